// Tests every CRC-32 variant of this CPU and the dispatched functions against a bitwise reference. Run it under the
// sanitizers too: the bytes lie flush against the end of their allocation, so they catch reads beyond it.
#include "core/crc32.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace fastpersist {
namespace {

int g_failure_count = 0;

// Prints the first failures of a run; thousands of lines would hide them.
void Expect(uint32_t actual, uint32_t expected, std::string_view variant, const char* what, size_t size_bytes,
            size_t detail) {
  if (actual == expected) return;
  if (++g_failure_count <= 20) {
    std::printf("FAILED %s: %.*s, size_bytes=%zu, detail=%zu: 0x%08" PRIX32 " instead of 0x%08" PRIX32 "\n", what,
                static_cast<int>(variant.size()), variant.data(), size_bytes, detail, actual, expected);
  }
}

void ExpectTrue(bool holds, std::string_view variant, const char* what, size_t size_bytes, size_t detail) {
  Expect(holds ? 1 : 0, 1, variant, what, size_bytes, detail);
}

// --- The reference ---------------------------------------------------------------------------------------------------

uint32_t ReferenceStep(uint32_t state, std::byte byte) {
  state ^= std::to_integer<uint32_t>(byte);
  for (int bit = 0; bit < 8; ++bit) state = (state & 1) != 0 ? (state >> 1) ^ 0xEDB88320 : state >> 1;
  return state;
}

uint32_t Reference(const std::vector<std::byte>& data) {
  uint32_t state = ~uint32_t{0};
  for (const std::byte byte : data) state = ReferenceStep(state, byte);
  return ~state;
}

// result[n] is the CRC of the first n bytes.
std::vector<uint32_t> ReferenceOfPrefixes(const std::vector<std::byte>& data) {
  std::vector<uint32_t> prefixes{0};
  uint32_t state = ~uint32_t{0};
  for (const std::byte byte : data) {
    state = ReferenceStep(state, byte);
    prefixes.push_back(~state);
  }
  return prefixes;
}

// A linear map of states as a 32 x 32 matrix over GF(2): column n is the image of bit n.
using Matrix = std::array<uint32_t, 32>;

uint32_t Apply(const Matrix& matrix, uint32_t state) {
  uint32_t image = 0;
  for (size_t bit = 0; bit < 32; ++bit) {
    if (((state >> bit) & 1) != 0) image ^= matrix[bit];
  }
  return image;
}

// The state after `count` more zero bytes, for counts too large for a loop.
uint32_t ReferenceAfterZeros(uint32_t state, uint64_t count) {
  Matrix step{};
  for (size_t bit = 0; bit < 32; ++bit) step[bit] = ReferenceStep(uint32_t{1} << bit, std::byte{0});
  for (; count != 0; count >>= 1) {
    if ((count & 1) != 0) state = Apply(step, state);
    Matrix squared{};
    for (size_t bit = 0; bit < 32; ++bit) squared[bit] = Apply(step, step[bit]);
    step = squared;
  }
  return state;
}

// --- Bytes
// -------------------------------------------------------------------------------------------------------------

// Seeded, so that a failure can be repeated.
std::mt19937 RandomNumbers(uint32_t seed) { return std::mt19937(seed); }

std::vector<std::byte> RandomBytes(size_t size_bytes, uint32_t seed) {
  std::mt19937 random = RandomNumbers(seed);
  std::vector<std::byte> bytes(size_bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xFF);
  return bytes;
}

// A copy of `content` at an address `misalignment` past a multiple of 64, with nothing allocated behind its last byte.
class MisalignedBytes {
 public:
  MisalignedBytes(const std::byte* content, size_t size_bytes, size_t misalignment)
      : allocation_(static_cast<std::byte*>(::operator new(misalignment + size_bytes, kAlignment))),
        data_(allocation_ + misalignment) {
    if (size_bytes > 0) std::memcpy(data_, content, size_bytes);
  }
  ~MisalignedBytes() { ::operator delete(allocation_, kAlignment); }
  MisalignedBytes(const MisalignedBytes&) = delete;
  MisalignedBytes& operator=(const MisalignedBytes&) = delete;

  const std::byte* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  std::byte* allocation_;
  std::byte* data_;
};

// --- The tests
// ---------------------------------------------------------------------------------------------------------

constexpr size_t kMisalignmentCount = 64;
constexpr size_t kSmallBytes = 1100;  // beyond four blocks of the widest kernel

// The dispatched functions count as one more variant.
std::vector<Crc32Variant> AllVariants() {
  const auto usable = Crc32Variants();
  std::vector<Crc32Variant> all(usable.begin(), usable.end());
  all.push_back({.name = "dispatched", .function = Crc32, .copy_function = CopyWithCrc32});
  return all;
}

void KnownVectors(const Crc32Variant& variant) {
  struct Vector {
    std::string bytes;
    uint32_t crc;
  };
  const std::array<Vector, 7> vectors = {{
      {"", 0},
      {"a", 0xE8B7BE43},
      {"123456789", 0xCBF43926},
      {"The quick brown fox jumps over the lazy dog", 0x414FA339},
      {std::string(32, '\0'), 0x190A55AD},
      {std::string(32, '\xFF'), 0xFF6CAB0B},
      {std::string(size_t{1} << 20, '\0'), 0xA738EA1C},
  }};
  for (const auto& [bytes, crc] : vectors) {
    const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
    Expect(variant.function(0, data, bytes.size()), crc, variant.name, "known vector", bytes.size(), 0);
  }
  Expect(variant.function(0x12345678, nullptr, 0), 0x12345678, variant.name, "no bytes keep the CRC", 0, 0);
  Expect(variant.copy_function(0x12345678, nullptr, nullptr, 0), 0x12345678, variant.name, "no bytes copied", 0, 0);
}

void SmallSizesAtEveryMisalignment(const Crc32Variant& variant) {
  const std::vector<std::byte> content = RandomBytes(kSmallBytes, 1);
  const std::vector<uint32_t> expected = ReferenceOfPrefixes(content);
  for (size_t misalignment = 0; misalignment < kMisalignmentCount; ++misalignment) {
    for (size_t size_bytes = 0; size_bytes <= kSmallBytes; ++size_bytes) {
      const MisalignedBytes bytes(content.data(), size_bytes, misalignment);
      Expect(variant.function(0, bytes.data(), size_bytes), expected[size_bytes], variant.name, "misaligned CRC",
             size_bytes, misalignment);
    }
  }
}

// Sizes around every length at which a kernel takes another path, and random ones.
void LargeSizes(const Crc32Variant& variant) {
  const std::vector<std::byte> content = RandomBytes(size_t{1} << 18, 2);
  const std::vector<uint32_t> expected = ReferenceOfPrefixes(content);
  std::vector<size_t> sizes;
  for (const size_t border : {1024U, 1536U, 4096U, 8192U, 16384U, 24576U, 26112U, 49152U, 65536U, 73728U}) {
    for (size_t size_bytes = border - 17; size_bytes <= border + 17; ++size_bytes) sizes.push_back(size_bytes);
  }
  std::mt19937 random = RandomNumbers(3);
  for (int round = 0; round < 100; ++round) sizes.push_back(random() % content.size());
  for (const size_t size_bytes : sizes) {
    const size_t misalignment = random() % kMisalignmentCount;
    const MisalignedBytes bytes(content.data(), size_bytes, misalignment);
    Expect(variant.function(0, bytes.data(), size_bytes), expected[size_bytes], variant.name, "large CRC", size_bytes,
           misalignment);
  }
}

void ContinuedAtRandomPlaces(const Crc32Variant& variant) {
  const std::vector<std::byte> content = RandomBytes(100000, 4);
  const uint32_t expected = Reference(content);
  std::vector<std::byte> target(content.size());
  std::mt19937 random = RandomNumbers(5);
  for (size_t round = 0; round < 200; ++round) {
    const size_t piece_limit_bytes = size_t{16} << (random() % 13);
    uint32_t crc = 0;
    uint32_t copied_crc = 0;
    for (size_t at = 0; at < content.size();) {
      const size_t piece_bytes = std::min(content.size() - at, random() % piece_limit_bytes);
      crc = variant.function(crc, content.data() + at, piece_bytes);
      copied_crc = variant.copy_function(copied_crc, target.data() + at, content.data() + at, piece_bytes);
      at += piece_bytes;
    }
    Expect(crc, expected, variant.name, "continued CRC", content.size(), round);
    Expect(copied_crc, expected, variant.name, "continued copy's CRC", content.size(), round);
    ExpectTrue(target == content, variant.name, "continued copy's bytes", content.size(), round);
    std::fill(target.begin(), target.end(), std::byte{0});
  }
}

// Copies into a region of guard bytes and checks the CRC, the copy, and that every guard byte is still there.
class CopyTest {
 public:
  CopyTest(const Crc32Variant& variant, size_t content_bytes)
      : variant_(variant),
        content_(RandomBytes(content_bytes, 6)),
        expected_(ReferenceOfPrefixes(content_)),
        region_(kAlignment + kGuardBytes + kMisalignmentCount + content_bytes + kGuardBytes, kGuard),
        pristine_(region_) {
    first_target_ = kAlignment - reinterpret_cast<uintptr_t>(region_.data()) % kAlignment + kGuardBytes;
  }

  void Copy(size_t size_bytes, size_t target_misalignment, size_t source_misalignment) {
    const MisalignedBytes source(content_.data(), size_bytes, source_misalignment);
    std::byte* const target = region_.data() + first_target_ + target_misalignment;
    const uint32_t crc = variant_.copy_function(0, target, source.data(), size_bytes);
    const size_t detail = target_misalignment * 1000 + source_misalignment;
    Expect(crc, expected_[size_bytes], variant_.name, "copy's CRC", size_bytes, detail);
    ExpectTrue(std::equal(target, target + size_bytes, content_.begin()), variant_.name, "copy's bytes", size_bytes,
               detail);
    std::fill(target, target + size_bytes, kGuard);
    ExpectTrue(std::memcmp(region_.data(), pristine_.data(), region_.size()) == 0, variant_.name, "guard bytes",
               size_bytes, detail);
    std::fill(region_.begin(), region_.end(), kGuard);
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kGuardBytes = 512;
  static constexpr std::byte kGuard{0xA5};
  const Crc32Variant& variant_;
  std::vector<std::byte> content_;
  std::vector<uint32_t> expected_;
  std::vector<std::byte> region_;
  std::vector<std::byte> pristine_;
  size_t first_target_ = 0;
};

void CopiesAtEveryMisalignment(const Crc32Variant& variant) {
  CopyTest small(variant, kSmallBytes);
  for (size_t misalignment = 0; misalignment < kMisalignmentCount; ++misalignment) {
    for (size_t size_bytes = 0; size_bytes <= kSmallBytes; ++size_bytes) {
      small.Copy(size_bytes, misalignment, (misalignment * 37 + size_bytes) % kMisalignmentCount);
    }
  }
  CopyTest large(variant, 80000);
  std::mt19937 random = RandomNumbers(7);
  for (const size_t border : {2048U, 16384U, 24576U, 65536U}) {
    for (size_t misalignment = 0; misalignment < kMisalignmentCount; ++misalignment) {
      large.Copy(border, misalignment, 0);
      for (int round = 0; round < 8; ++round) {
        large.Copy(border - 300 + random() % 600, misalignment, random() % kMisalignmentCount);
      }
    }
  }
}

void CombinesLikeConcatenation() {
  const std::vector<std::byte> content = RandomBytes(20000, 8);
  const uint32_t expected = Reference(content);
  std::mt19937 random = RandomNumbers(9);
  for (int round = 0; round < 1000; ++round) {
    const size_t cut = random() % (content.size() + 1);
    const uint32_t first = Crc32(0, content.data(), cut);
    const uint32_t second = Crc32(0, content.data() + cut, content.size() - cut);
    Expect(CombineCrc32(first, second, content.size() - cut), expected, "combine", "concatenation", content.size(),
           cut);
  }
}

void CombinesBeyond4GiB() {
  const std::vector<std::byte> content = RandomBytes(1000, 10);
  const uint32_t first = Reference(content);
  constexpr uint64_t k4GiB = uint64_t{1} << 32;
  for (const uint64_t zeros_bytes :
       {uint64_t{0}, uint64_t{1}, uint64_t{4095}, k4GiB - 1, k4GiB, k4GiB + 1, 5 * k4GiB / 4, (uint64_t{1} << 40) + 7,
        uint64_t{1} << 61, uint64_t{1} << 63, UINT64_MAX}) {
    const uint32_t zeros = ~ReferenceAfterZeros(~uint32_t{0}, zeros_bytes);
    const uint32_t expected = ~ReferenceAfterZeros(~first, zeros_bytes);
    Expect(CombineCrc32(first, zeros, zeros_bytes), expected, "combine", "zeros appended", zeros_bytes, 0);
    // The other way round: the second string's length counts.
    const uint32_t prepended = ~std::accumulate(content.begin(), content.end(), ~zeros, ReferenceStep);
    Expect(CombineCrc32(zeros, first, content.size()), prepended, "combine", "zeros prepended", zeros_bytes, 0);
  }
}

// The features of the first processor in /proc/cpuinfo, between spaces; empty if the list is another processor's, as
// under a user-mode emulator.
std::string ProcessorFeatures() {
#if defined(__x86_64__)
  constexpr const char* kLabel = "flags";
#else
  constexpr const char* kLabel = "Features";
#endif
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind(kLabel, 0) == 0) return line + " ";
  }
  return "";
}

// If dispatch omitted a variant that the processor has, code would be slow, not wrong, and nobody would notice.
void DispatchTakesTheFastestUsableVariant() {
  const std::string features = ProcessorFeatures();
  const auto listed = [&](const char* feature) {
    return features.find(" " + std::string(feature) + " ") != std::string::npos;
  };
  std::vector<std::string_view> expected;
  if (listed("avx512f") && listed("vpclmulqdq") && listed("pclmulqdq")) expected.push_back("avx512-vpclmulqdq");
  if (listed("pclmulqdq")) expected.push_back("pclmulqdq");
  if (listed("crc32") && listed("asimd")) expected.push_back("armv8-crc");
  expected.push_back("portable");
  std::vector<std::string_view> actual;
  for (const Crc32Variant& variant : Crc32Variants()) actual.push_back(variant.name);
  ExpectTrue(Crc32Implementation() == actual.front(), "dispatch", "the first variant is taken", 0, 0);
  if (!features.empty()) ExpectTrue(actual == expected, "dispatch", "variants as in /proc/cpuinfo", 0, 0);
}

// First, so that the threads race for the first use.
void FirstUseFromManyThreads() {
  static constexpr std::string_view kDigits = "123456789";
  std::array<uint32_t, 8> crcs{};
  std::vector<std::thread> threads;
  threads.reserve(crcs.size());
  for (uint32_t& crc : crcs) {
    threads.emplace_back(
        [&crc] { crc = Crc32(0, reinterpret_cast<const std::byte*>(kDigits.data()), kDigits.size()); });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < crcs.size(); ++i) Expect(crcs[i], 0xCBF43926, "dispatched", "first use in threads", 9, i);
}

int Main() {
  FirstUseFromManyThreads();
  DispatchTakesTheFastestUsableVariant();
  for (const Crc32Variant& variant : AllVariants()) {
    const int before = g_failure_count;
    KnownVectors(variant);
    SmallSizesAtEveryMisalignment(variant);
    LargeSizes(variant);
    ContinuedAtRandomPlaces(variant);
    CopiesAtEveryMisalignment(variant);
    std::printf("%.*s: %s\n", static_cast<int>(variant.name.size()), variant.name.data(),
                g_failure_count == before ? "ok" : "FAILED");
  }
  CombinesLikeConcatenation();
  CombinesBeyond4GiB();
  std::printf("%s: %d failures, dispatched to %s\n", g_failure_count == 0 ? "passed" : "FAILED", g_failure_count,
              std::string(Crc32Implementation()).c_str());
  return g_failure_count == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fastpersist

int main() { return fastpersist::Main(); }
