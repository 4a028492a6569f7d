// The implementations of CRC-32: tables for every machine, folding with carry-less multiplication for x86-64, the CRC
// instructions for AArch64; and the choice between them. The contracts are in crc32.h.
//
// The mathematics: a string of n bits is a polynomial over GF(2) of degree n - 1, the first bit its highest power;
// adding is xor. The CRC is the remainder of that polynomial times x^32 modulo a fixed P of degree 32, with two twists
// that keep leading and trailing zeros from going unnoticed: the first 32 bits and the result are inverted. Between the
// twists we call the value the *state*. "Reflected" means that bytes are taken least significant bit first, so in a
// 32-bit state bit 31 is the coefficient of x^0 and bit 0 that of x^31.
//
// Since remainders add up, state(A then B) = state(A) * x^n + state(B), where B has n bits and its state begins at 0.
// This line gives all speed below: several pieces are computed at once, and a multiplication by x^n mod P, a constant
// for constant n, moves each into place. The compiler computes every such constant from P.
//
// Folding follows V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel
// white paper, 2009. The constants look different here because they are kept in the upper half of their 64 bits.
#include "core/crc32.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace fastpersist {
namespace {

// --- Polynomials modulo P, reflected ---------------------------------------------------------------------------------

constexpr uint32_t kPolynomial = 0xEDB88320;  // P without its x^32
constexpr uint32_t kOne = 0x80000000;         // x^0

constexpr uint32_t MultiplyByX(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0); }

// No branches on the bits of b: they are random, and a wrong guess costs more than the whole step.
constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int power = 0; power < 32; ++power) {
    product ^= a & (0 - (b >> 31));
    a = MultiplyByX(a);
    b <<= 1;
  }
  return product;
}

// x^(2^k): enough of them to move a state over any 64-bit count of bytes (2^k bytes are 2^(k + 3) bits).
constexpr size_t kBitsPerByteLog2 = 3;
constexpr auto kSquares = [] {
  std::array<uint32_t, 64 + kBitsPerByteLog2> squares{};
  squares[0] = MultiplyByX(kOne);
  for (size_t k = 1; k < squares.size(); ++k) squares[k] = Multiply(squares[k - 1], squares[k - 1]);
  return squares;
}();

// x^(count * 2^log2_unit).
constexpr uint32_t PowerOfX(uint64_t count, size_t log2_unit) {
  uint32_t power = kOne;
  for (size_t k = log2_unit; count != 0; ++k, count >>= 1) {
    if ((count & 1) != 0) power = Multiply(power, kSquares[k]);
  }
  return power;
}

// kMoves[digit][n] is x^(8 * n * 256^digit): a state is moved over a count of bytes by a multiplication for each digit.
constexpr auto kMoves = [] {
  std::array<std::array<uint32_t, 256>, sizeof(uint64_t)> moves{};
  for (size_t digit = 0; digit < moves.size(); ++digit) {
    moves[digit][0] = kOne;
    for (size_t n = 1; n < 256; ++n)
      moves[digit][n] = Multiply(moves[digit][n - 1], kSquares[kBitsPerByteLog2 + 8 * digit]);
  }
  return moves;
}();

// --- Portable: sixteen table look-ups for sixteen bytes --------------------------------------------------------------

// kTables[n][byte] is the state of `byte` followed by n zero bytes, so that bytes can be looked up independently.
constexpr size_t kTableCount = 16;
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, kTableCount> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = MultiplyByX(state);
    tables[0][byte] = state;
  }
  for (size_t n = 1; n < kTableCount; ++n) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[n - 1][byte];
      tables[n][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}();

uint32_t LoadLittleEndian32(const std::byte* data) {
  uint32_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap32(word);
  return word;
}

// The state of the four bytes in `word`, its lowest byte first, followed by kZeros zero bytes.
template <size_t kZeros>
uint32_t LookUp(uint32_t word) {
  return kTables[kZeros + 3][word & 0xFF] ^ kTables[kZeros + 2][(word >> 8) & 0xFF] ^
         kTables[kZeros + 1][(word >> 16) & 0xFF] ^ kTables[kZeros][word >> 24];
}

uint32_t UpdatePortable(uint32_t state, const std::byte* data, size_t size_bytes) {
  for (; size_bytes >= kTableCount; size_bytes -= kTableCount, data += kTableCount) {
    state = LookUp<12>(state ^ LoadLittleEndian32(data)) ^ LookUp<8>(LoadLittleEndian32(data + 4)) ^
            LookUp<4>(LoadLittleEndian32(data + 8)) ^ LookUp<0>(LoadLittleEndian32(data + 12));
  }
  for (; size_bytes > 0; --size_bytes, ++data) {
    state = (state >> 8) ^ kTables[0][(state ^ std::to_integer<uint32_t>(*data)) & 0xFF];
  }
  return state;
}

// --- From a state's update to the public contracts -------------------------------------------------------------------

using UpdateFunction = uint32_t (*)(uint32_t state, const std::byte* data, size_t size_bytes);
using CopyFunction = uint32_t (*)(uint32_t state, std::byte* target, const std::byte* source, size_t size_bytes);

template <UpdateFunction kUpdate>
uint32_t Inverted(uint32_t crc, const std::byte* data, size_t size_bytes) {
  return ~kUpdate(~crc, data, size_bytes);
}

template <CopyFunction kCopy>
uint32_t InvertedCopy(uint32_t crc, std::byte* target, const std::byte* source, size_t size_bytes) {
  return ~kCopy(~crc, target, source, size_bytes);
}

// A block fits the first-level cache twice, as source and as target: it is copied, then read back from there.
constexpr size_t kCopyBlockBytes = size_t{24} << 10;

template <UpdateFunction kUpdate>
uint32_t CopyByBlocks(uint32_t state, std::byte* target, const std::byte* source, size_t size_bytes) {
  while (size_bytes > 0) {
    const size_t block_bytes = std::min(size_bytes, kCopyBlockBytes);
    std::memcpy(target, source, block_bytes);
    state = kUpdate(state, target, block_bytes);
    target += block_bytes;
    source += block_bytes;
    size_bytes -= block_bytes;
  }
  return state;
}

// --- x86-64: folding with carry-less multiplication ------------------------------------------------------------------
//
// A 128-bit register holds sixteen bytes of the message as they lie in memory: its low 64 bits L come first, so it
// stands for L * x^64 + H. To add it to what lies d bits further on, without changing the remainder, it is replaced by
// the sum of two products of 64 bits by 32 bits, which fits 128 bits again:
//
//     L * (x^(64 + d) mod P) + H * (x^d mod P)
//
// The carry-less product of two reflected numbers comes out one bit too low, that is, times x; the factors are
// therefore x^(63 + d) and x^(d - 1). As 64-bit reflected numbers, their 32 coefficients are the upper half.

#if defined(__x86_64__)

#define FP_TARGET_PCLMUL __attribute__((target("pclmul")))
#define FP_TARGET_AVX512 __attribute__((target("avx512f,vpclmulqdq,pclmul")))

struct FoldFactors {
  int64_t low;
  int64_t high;
};

constexpr FoldFactors FoldOver(uint64_t distance_bits) {
  return {.low = static_cast<int64_t>(uint64_t{PowerOfX(63 + distance_bits, 0)} << 32),
          .high = static_cast<int64_t>(uint64_t{PowerOfX(distance_bits - 1, 0)} << 32)};
}

// What happens to the bytes after they are loaded. Streaming stores bypass the cache: a plain store first reads the
// line that it overwrites, a third of all traffic in a copy of cold bytes.
enum class Then : uint8_t { kForget, kStream };

// The prefetch distance: far enough to hide the latency of memory while streaming, and across page ends, where the
// hardware's prefetching stops. Reading alone is no faster with it. A prefetch beyond the source's end never faults.
// NTA: the source is read once and must not evict the data of a training from the shared cache. Copies are as fast as
// with T0.
constexpr size_t kPrefetchBytes = 2048;

template <Then kThen>
FP_TARGET_PCLMUL inline __m128i Load128(std::byte* target, const std::byte* source, size_t at) {
  const __m128i loaded = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at));
  if constexpr (kThen == Then::kStream) _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), loaded);
  return loaded;
}

FP_TARGET_PCLMUL inline __m128i Fold128(__m128i folded, __m128i factors, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(folded, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(folded, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

template <uint64_t kDistanceBits>
FP_TARGET_PCLMUL inline __m128i Factors128() {
  constexpr FoldFactors kFactors = FoldOver(kDistanceBits);
  return _mm_set_epi64x(kFactors.high, kFactors.low);
}

// Sixteen folded bytes are a message like any other, and the tables finish it in two steps.
FP_TARGET_PCLMUL inline uint32_t StateOf(__m128i folded) {
  std::array<std::byte, sizeof(__m128i)> bytes;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes.data()), folded);
  return UpdatePortable(0, bytes.data(), bytes.size());
}

// Four registers in flight, since a multiplication takes several cycles and a new one can start every cycle or two.
// REQUIRES: size_bytes is a positive multiple of kPclmulBlockBytes; a target that is streamed to is 16-byte aligned.
constexpr size_t kPclmulBlockBytes = 4 * sizeof(__m128i);

template <Then kThen>
FP_TARGET_PCLMUL uint32_t FoldPclmul(uint32_t state, std::byte* target, const std::byte* source, size_t size_bytes) {
  const __m128i over_block = Factors128<8 * kPclmulBlockBytes>();
  __m128i a = _mm_cvtsi32_si128(static_cast<int>(state));
  a = _mm_xor_si128(a, Load128<kThen>(target, source, 0));
  __m128i b = Load128<kThen>(target, source, 16);
  __m128i c = Load128<kThen>(target, source, 32);
  __m128i d = Load128<kThen>(target, source, 48);
  for (size_t at = kPclmulBlockBytes; at < size_bytes; at += kPclmulBlockBytes) {
    if constexpr (kThen == Then::kStream) _mm_prefetch(source + at + kPrefetchBytes, _MM_HINT_NTA);
    a = Fold128(a, over_block, Load128<kThen>(target, source, at));
    b = Fold128(b, over_block, Load128<kThen>(target, source, at + 16));
    c = Fold128(c, over_block, Load128<kThen>(target, source, at + 32));
    d = Fold128(d, over_block, Load128<kThen>(target, source, at + 48));
  }
  const __m128i over_register = Factors128<128>();
  b = Fold128(a, over_register, b);
  c = Fold128(b, over_register, c);
  d = Fold128(c, over_register, d);
  if constexpr (kThen == Then::kStream) _mm_sfence();
  return StateOf(d);
}

template <Then kThen>
FP_TARGET_AVX512 inline __m512i Load512(std::byte* target, const std::byte* source, size_t at) {
  const __m512i loaded = _mm512_loadu_si512(source + at);
  if constexpr (kThen == Then::kStream) _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), loaded);
  return loaded;
}

// Zero the upper halves by hand: g++ 12 omits it when the next call leaves them alone, and then all 128-bit code of the
// process (the PCLMULQDQ variant too) runs at half speed until they are zeroed.
FP_TARGET_AVX512 inline uint32_t StateOf(__m512i folded) {
  std::array<std::byte, sizeof(__m512i)> bytes;
  _mm512_storeu_si512(bytes.data(), folded);
  _mm256_zeroupper();
  static_assert(sizeof(bytes) == kPclmulBlockBytes);
  return FoldPclmul<Then::kForget>(0, nullptr, bytes.data(), bytes.size());
}

FP_TARGET_AVX512 inline __m512i Fold512(__m512i folded, __m512i factors, __m512i next) {
  constexpr int kXorOfThree = 0x96;
  const __m512i low = _mm512_clmulepi64_epi128(folded, factors, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(folded, factors, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, kXorOfThree);
}

template <uint64_t kDistanceBits>
FP_TARGET_AVX512 inline __m512i Factors512() {
  constexpr FoldFactors kFactors = FoldOver(kDistanceBits);
  return _mm512_set4_epi64(kFactors.high, kFactors.low, kFactors.high, kFactors.low);
}

// The same with each register four times as wide.
// REQUIRES: size_bytes is a positive multiple of kAvx512BlockBytes; a target that is streamed to is 64-byte aligned.
constexpr size_t kAvx512BlockBytes = 4 * sizeof(__m512i);

template <Then kThen>
FP_TARGET_AVX512 uint32_t FoldAvx512(uint32_t state, std::byte* target, const std::byte* source, size_t size_bytes) {
  const __m512i over_block = Factors512<8 * kAvx512BlockBytes>();
  __m512i a = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state)));
  a = _mm512_xor_si512(a, Load512<kThen>(target, source, 0));
  __m512i b = Load512<kThen>(target, source, 64);
  __m512i c = Load512<kThen>(target, source, 128);
  __m512i d = Load512<kThen>(target, source, 192);
  for (size_t at = kAvx512BlockBytes; at < size_bytes; at += kAvx512BlockBytes) {
    if constexpr (kThen == Then::kStream) {
      _mm_prefetch(source + at + kPrefetchBytes, _MM_HINT_NTA);
      _mm_prefetch(source + at + kPrefetchBytes + 64, _MM_HINT_NTA);
      _mm_prefetch(source + at + kPrefetchBytes + 128, _MM_HINT_NTA);
      _mm_prefetch(source + at + kPrefetchBytes + 192, _MM_HINT_NTA);
    }
    a = Fold512(a, over_block, Load512<kThen>(target, source, at));
    b = Fold512(b, over_block, Load512<kThen>(target, source, at + 64));
    c = Fold512(c, over_block, Load512<kThen>(target, source, at + 128));
    d = Fold512(d, over_block, Load512<kThen>(target, source, at + 192));
  }
  const __m512i over_register = Factors512<512>();
  b = Fold512(a, over_register, b);
  c = Fold512(b, over_register, c);
  d = Fold512(c, over_register, d);
  if constexpr (kThen == Then::kStream) _mm_sfence();
  return StateOf(d);
}

// Whole blocks by `kFold`, the rest by `kRest`.
template <CopyFunction kFold, size_t kBlockBytes, UpdateFunction kRest>
uint32_t UpdateByFolding(uint32_t state, const std::byte* data, size_t size_bytes) {
  const size_t folded_bytes = size_bytes - size_bytes % kBlockBytes;
  if (folded_bytes > 0) state = kFold(state, nullptr, data, folded_bytes);
  return kRest(state, data + folded_bytes, size_bytes - folded_bytes);
}

constexpr UpdateFunction kUpdatePclmul = UpdateByFolding<FoldPclmul<Then::kForget>, kPclmulBlockBytes, UpdatePortable>;
constexpr UpdateFunction kUpdateAvx512 = UpdateByFolding<FoldAvx512<Then::kForget>, kAvx512BlockBytes, kUpdatePclmul>;

// For smaller sizes, waiting until the streamed bytes have left the core costs more than the cache does.
constexpr size_t kStreamMinBytes = 1024;
constexpr size_t kCacheLineBytes = 64;

// Streams whole blocks from the target's first cache line border on; the ends go through the cache.
template <CopyFunction kFold, size_t kBlockBytes, UpdateFunction kUpdate>
uint32_t CopyByFolding(uint32_t state, std::byte* target, const std::byte* source, size_t size_bytes) {
  if (size_bytes >= kStreamMinBytes) {
    const size_t head_bytes = (0 - reinterpret_cast<uintptr_t>(target)) % kCacheLineBytes;
    state = CopyByBlocks<kUpdate>(state, target, source, head_bytes);
    target += head_bytes;
    source += head_bytes;
    size_bytes -= head_bytes;
    const size_t folded_bytes = size_bytes - size_bytes % kBlockBytes;
    state = kFold(state, target, source, folded_bytes);
    target += folded_bytes;
    source += folded_bytes;
    size_bytes -= folded_bytes;
  }
  return CopyByBlocks<kUpdate>(state, target, source, size_bytes);
}

constexpr Crc32Variant kAvx512 = {
    .name = "avx512-vpclmulqdq",
    .function = Inverted<kUpdateAvx512>,
    .copy_function = InvertedCopy<CopyByFolding<FoldAvx512<Then::kStream>, kAvx512BlockBytes, kUpdateAvx512>>,
};
constexpr Crc32Variant kPclmul = {
    .name = "pclmulqdq",
    .function = Inverted<kUpdatePclmul>,
    .copy_function = InvertedCopy<CopyByFolding<FoldPclmul<Then::kStream>, kPclmulBlockBytes, kUpdatePclmul>>,
};

bool HasPclmul() { return __builtin_cpu_supports("pclmul"); }
// Also checks that the operating system has enabled the wide registers.
bool HasAvx512() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") && HasPclmul(); }

#endif  // __x86_64__

// --- AArch64: the CRC32 instructions of ARMv8 ------------------------------------------------------------------------
//
// One instruction takes eight bytes and two or three cycles, but a new one can start each cycle: three strips side by
// side. Copies need no streaming stores: these cores notice a run of full-line stores and stop reading the lines first.

#if defined(__aarch64__)

// The compilers' own names: <arm_acle.h> hides its names from older clangs unless the whole file is built with +crc.
#if defined(__clang__)
#define FP_TARGET_CRC __attribute__((target("crc")))
FP_TARGET_CRC inline uint32_t CrcOf8(uint32_t state, uint64_t word) { return __builtin_arm_crc32d(state, word); }
FP_TARGET_CRC inline uint32_t CrcOf1(uint32_t state, uint8_t byte) { return __builtin_arm_crc32b(state, byte); }
#else
#define FP_TARGET_CRC __attribute__((target("+crc")))
FP_TARGET_CRC inline uint32_t CrcOf8(uint32_t state, uint64_t word) { return __builtin_aarch64_crc32x(state, word); }
FP_TARGET_CRC inline uint32_t CrcOf1(uint32_t state, uint8_t byte) { return __builtin_aarch64_crc32b(state, byte); }
#endif

FP_TARGET_CRC inline uint32_t Step(uint32_t state, const std::byte* data) {
  uint64_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  return CrcOf8(state, word);
}

// Take as many groups of three strips of kStripBytes as there are; advance `data` and `size_bytes` past them.
template <size_t kStripBytes>
FP_TARGET_CRC uint32_t UpdateByStrips(uint32_t state, const std::byte*& data, size_t& size_bytes) {
  static_assert(kStripBytes % sizeof(uint64_t) == 0);
  constexpr uint32_t kOverOneStrip = PowerOfX(kStripBytes, kBitsPerByteLog2);
  constexpr uint32_t kOverTwoStrips = PowerOfX(2 * kStripBytes, kBitsPerByteLog2);
  for (; size_bytes >= 3 * kStripBytes; size_bytes -= 3 * kStripBytes, data += 3 * kStripBytes) {
    uint32_t a = state;
    uint32_t b = 0;
    uint32_t c = 0;
    for (const std::byte* at = data; at < data + kStripBytes; at += sizeof(uint64_t)) {
      a = Step(a, at);
      b = Step(b, at + kStripBytes);
      c = Step(c, at + 2 * kStripBytes);
    }
    state = Multiply(a, kOverTwoStrips) ^ Multiply(b, kOverOneStrip) ^ c;
  }
  return state;
}

// Joining strips costs about as much as 1 KiB of CRC, so long strips come first, and short ones take the rest.
FP_TARGET_CRC uint32_t UpdateArmv8(uint32_t state, const std::byte* data, size_t size_bytes) {
  static_assert(kCopyBlockBytes == size_t{3} * 8192, "a copied block is three long strips");
  state = UpdateByStrips<8192>(state, data, size_bytes);
  state = UpdateByStrips<512>(state, data, size_bytes);
  for (; size_bytes >= sizeof(uint64_t); size_bytes -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    state = Step(state, data);
  }
  for (; size_bytes > 0; --size_bytes, ++data) state = CrcOf1(state, std::to_integer<uint8_t>(*data));
  return state;
}

constexpr Crc32Variant kArmv8 = {
    .name = "armv8-crc",
    .function = Inverted<UpdateArmv8>,
    .copy_function = InvertedCopy<CopyByBlocks<UpdateArmv8>>,
};

bool HasArmv8Crc() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

#endif  // __aarch64__

// --- Which of them
// -----------------------------------------------------------------------------------------------------

constexpr Crc32Variant kPortable = {
    .name = "portable",
    .function = Inverted<UpdatePortable>,
    .copy_function = InvertedCopy<CopyByBlocks<UpdatePortable>>,
};

struct UsableVariants {
  std::array<Crc32Variant, 3> variants{};
  size_t count = 0;

  UsableVariants() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (HasAvx512()) variants[count++] = kAvx512;
    if (HasPclmul()) variants[count++] = kPclmul;
#elif defined(__aarch64__)
    if (HasArmv8Crc()) variants[count++] = kArmv8;
#endif
    variants[count++] = kPortable;
  }
};

}  // namespace

std::span<const Crc32Variant> Crc32Variants() {
  static const UsableVariants usable;
  return {usable.variants.data(), usable.count};
}

std::string_view Crc32Implementation() { return Crc32Variants().front().name; }

uint32_t Crc32(uint32_t crc, const std::byte* data, size_t size_bytes) {
  return Crc32Variants().front().function(crc, data, size_bytes);
}

uint32_t CopyWithCrc32(uint32_t crc, std::byte* target, const std::byte* source, size_t size_bytes) {
  return Crc32Variants().front().copy_function(crc, target, source, size_bytes);
}

// The inversions of the two CRCs and of their concatenation cancel out, so states and CRCs join alike.
uint32_t CombineCrc32(uint32_t first, uint32_t second, uint64_t second_size_bytes) {
  if (first == 0) return second;  // zero times anything
  for (size_t digit = 0; second_size_bytes != 0; ++digit, second_size_bytes >>= 8) {
    if ((second_size_bytes & 0xFF) != 0) first = Multiply(first, kMoves[digit][second_size_bytes & 0xFF]);
  }
  return first ^ second;
}

}  // namespace fastpersist
