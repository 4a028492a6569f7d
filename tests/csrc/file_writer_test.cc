// Writes through the ring (transfer/file_writer.h): cuts, coalescing, padding, the number of requests, the CRCs, and
// that an error leaves nothing in flight. The fault engine shows the requests.
#include "transfer/file_writer.h"

#include <map>

#include "core/crc32.h"
#include "engine/fault_engine.h"
#include "testing.h"

namespace fastpersist {
namespace {

constexpr size_t kChunkBytes = size_t{64} << 10;
constexpr size_t kBufferCount = 8;
constexpr uint64_t kBlockBytes = FileWriter::kBlockBytes;

std::unique_ptr<BufferPool> Pool() { return Must(BufferPool::Create(kBufferCount, kChunkBytes)); }

Result<std::unique_ptr<FileWriter>> Open(const ScratchFile& file, BufferPool& pool,
                                         const std::string& engine = "fault:threads-buffered",
                                         TransferCallbacks callbacks = {}) {
  return FileWriter::Open(file.fd(), file.path(), {.engines = {engine}, .queue_depth = kBufferCount, .poll = {}}, pool,
                          std::move(callbacks));
}

void AddAll(PieceList& pieces, const Bytes& bytes, uint32_t crc_slot = PieceList::kNoCrc) {
  pieces.AddMemory(bytes.data(), bytes.size(), crc_slot);
}

Bytes Padded(Bytes bytes, uint64_t block_bytes = kBlockBytes) {
  bytes.resize((bytes.size() + block_bytes - 1) / block_bytes * block_bytes);
  return bytes;
}

uint32_t CrcOf(const Bytes& bytes) { return Crc32(0, bytes.data(), bytes.size()); }

// Records offset and size of each write while it lives.
class Recording {
 public:
  Recording() { SetWriteRecording(true); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording() {
    SetWriteRecording(false);
    (void)TakeRecordedWrites();
  }
  static std::map<uint64_t, uint64_t> Take() {
    std::map<uint64_t, uint64_t> requests;
    for (const RecordedWrite& write : TakeRecordedWrites()) {
      EXPECT_WITH(requests.emplace(write.offset_bytes, write.data.size()).second, "written twice");
    }
    return requests;
  }
};

using Requests = std::map<uint64_t, uint64_t>;

// --- What is written

void BytesOfAllKindsLieOneBehindTheOther() {
  const auto pool = Pool();
  for (const char* engine : {"threads-buffered", "threads", "uring", "libaio"}) {
    const ScratchFile file("writer");
    TransferCallbacks callbacks;
    const Bytes pulled = RandomBytes(100000, 1);
    callbacks.pull = [&pulled](uint64_t, uint64_t offset_bytes, std::byte* target, uint64_t size_bytes) {
      std::memcpy(target, pulled.data() + offset_bytes, size_bytes);
      return Status::Ok();
    };
    auto writer = Open(file, *pool, engine, std::move(callbacks));
    if (!writer.ok()) continue;  // an engine or a file system that this machine does not have
    const Bytes first = RandomBytes(200001, 2);
    const Bytes second = RandomBytes(3, 3);
    PieceList pieces;
    AddAll(pieces, first, 0);
    pieces.AddBytes("between");
    pieces.AddPulled(7, pulled.size(), 1);
    pieces.AddCrc(0);
    AddAll(pieces, second);
    EXPECT(pieces.size_bytes() == 200001 + 7 + 100000 + 4 + 3);
    EXPECT_OK(writer.value()->Append(pieces));
    EXPECT(writer.value()->position() == pieces.size_bytes());
    EXPECT_OK(writer.value()->Finish());

    Bytes expected = first;
    const auto append = [&expected](const void* data, size_t size_bytes) {
      const auto* bytes = static_cast<const std::byte*>(data);
      expected.insert(expected.end(), bytes, bytes + size_bytes);
    };
    append("between", 7);
    append(pulled.data(), pulled.size());
    const uint32_t crc = CrcOf(first);
    for (int i = 0; i < 4; ++i) expected.push_back(static_cast<std::byte>(crc >> (8 * i)));
    append(second.data(), second.size());
    EXPECT_WITH(file.Content() == Padded(expected, writer.value()->pump().block_bytes()), engine);
    EXPECT(writer.value()->crc(0) == crc && writer.value()->crc(1) == CrcOf(pulled));
  }
  EXPECT(pool->free_count() == kBufferCount);
}

void NothingIsWrittenForNothing() {
  const auto pool = Pool();
  const ScratchFile file("writer");
  const Recording recording;
  const auto writer = Must(Open(file, *pool));
  PieceList pieces;
  pieces.AddMemory(nullptr, 0, 0);
  pieces.AddBytes("");
  EXPECT_OK(writer->Append(pieces));
  EXPECT_OK(writer->Append(PieceList()));
  EXPECT_OK(writer->Finish());
  EXPECT(Recording::Take().empty());
  EXPECT(writer->position() == 0 && file.Content().empty());
  EXPECT(writer->crc(0) == 0);
}

void TheLastBlockIsPaddedWithZeros() {
  const auto pool = Pool();
  {
    auto share = Must(BufferShare::Join(*pool, {}));
    std::vector<std::byte*> buffers;
    while (std::byte* buffer = share.Take()) buffers.push_back(buffer);
    for (std::byte* buffer : buffers) {
      std::memset(buffer, 0xA5, kChunkBytes);  // what an earlier transfer left
      share.Put(buffer);
    }
  }
  for (const size_t size_bytes : {size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, kChunkBytes + 1}) {
    const ScratchFile file("writer");
    const auto writer = Must(Open(file, *pool));
    const Bytes bytes = RandomBytes(size_bytes, 12);
    PieceList pieces;
    AddAll(pieces, bytes);
    EXPECT_OK(writer->Append(pieces));
    EXPECT_OK(writer->Finish());
    EXPECT(writer->position() == size_bytes);
    EXPECT_WITH(file.Content() == Padded(bytes), std::to_string(size_bytes));
  }
}

// --- Requests

void TenThousandSmallPiecesAreAFewRequests() {
  const auto pool = Pool();
  const ScratchFile file("writer");
  const Bytes source = RandomBytes(1 << 20, 4);
  std::mt19937 random(5);
  PieceList pieces;
  Bytes expected;
  for (int i = 0; i < 10000; ++i) {
    const size_t size_bytes = random() % 500;
    const size_t from = random() % (source.size() - size_bytes);
    pieces.AddMemory(source.data() + from, size_bytes, static_cast<uint32_t>(i));
    expected.insert(expected.end(), source.begin() + static_cast<ptrdiff_t>(from),
                    source.begin() + static_cast<ptrdiff_t>(from + size_bytes));
  }
  const Recording recording;
  const auto writer = Must(Open(file, *pool));
  EXPECT_OK(writer->Append(pieces));
  EXPECT_OK(writer->Finish());
  const size_t request_count = Recording::Take().size();
  EXPECT_WITH(request_count == (expected.size() + kChunkBytes - 1) / kChunkBytes, std::to_string(request_count));
  EXPECT(file.Content() == Padded(expected));
}

void ManyAppendsFillTheSameChunk() {
  const auto pool = Pool();
  const ScratchFile file("writer");
  const Recording recording;
  const auto writer = Must(Open(file, *pool, "fault:null"));
  for (int i = 0; i < 1000; ++i) {
    PieceList pieces;
    pieces.AddBytes(std::string(64, 'x'));
    EXPECT_OK(writer->Append(pieces));
  }
  EXPECT(Recording::Take().empty());  // 64,000 bytes: not a full chunk yet
  EXPECT_OK(writer->Finish());
  EXPECT((Recording::Take() == Requests{{0, 65536}}));
}

void ChunksEndOnMultiplesOfTheChunkSize() {
  const auto pool = Pool();
  const ScratchFile file("writer");
  const Recording recording;
  const auto writer = Must(Open(file, *pool, "fault:null"));
  EXPECT_OK(writer->Seek(3 * kBlockBytes));
  const Bytes bytes(3 * kChunkBytes);
  PieceList pieces;
  AddAll(pieces, bytes);
  EXPECT_OK(writer->Append(pieces));
  EXPECT_OK(writer->Finish());
  EXPECT((Recording::Take() == Requests{{3 * kBlockBytes, kChunkBytes - 3 * kBlockBytes},
                                        {kChunkBytes, kChunkBytes},
                                        {2 * kChunkBytes, kChunkBytes},
                                        {3 * kChunkBytes, 3 * kBlockBytes}}));
}

// --- Seek

void SeekGoesOnWhereItIsToldAndLeavesTheRestAlone() {
  const auto pool = Pool();
  const Bytes before(4 * kBlockBytes, std::byte{0xEE});
  const ScratchFile file("writer", before);
  const auto writer = Must(Open(file, *pool));
  const Bytes data = RandomBytes(5000, 6);
  const Bytes head = RandomBytes(10, 7);
  PieceList last;
  AddAll(last, data);
  PieceList first;
  AddAll(first, head);
  EXPECT_OK(writer->Seek(2 * kBlockBytes));
  EXPECT(writer->position() == 2 * kBlockBytes);
  EXPECT_OK(writer->Append(last));
  EXPECT_OK(writer->Seek(0));
  EXPECT_OK(writer->Append(first));
  EXPECT(writer->position() == 10);
  EXPECT_OK(writer->Finish());

  Bytes expected = Padded(head);
  expected.insert(expected.end(), before.begin(), before.begin() + kBlockBytes);
  const Bytes tail = Padded(data);
  expected.insert(expected.end(), tail.begin(), tail.end());
  EXPECT(file.Content() == expected);
}

void SeekBetweenBlocksIsRefusedAndHarmsNothing() {
  const auto pool = Pool();
  const ScratchFile file("writer");
  const auto writer = Must(Open(file, *pool));
  PieceList pieces;
  pieces.AddBytes("abc");
  EXPECT_OK(writer->Append(pieces));
  for (const uint64_t offset_bytes : {uint64_t{1}, uint64_t{512}, kBlockBytes + 1}) {
    const Status status = writer->Seek(offset_bytes);
    EXPECT_WITH(status.code() == StatusCode::kInvalidArgument && Contains(status.message(), "4096"), status.message());
  }
  EXPECT(writer->position() == 3);
  EXPECT_OK(writer->Append(pieces));
  EXPECT_OK(writer->Finish());
  EXPECT(writer->position() == 6);
  const Bytes content = file.Content();
  EXPECT(content.size() == kBlockBytes && std::memcmp(content.data(), "abcabc", 6) == 0);
}

// --- CRCs

void ACrcGoesOnOverPiecesAndChunks() {
  const auto pool = Pool();
  const ScratchFile file("writer");
  const Bytes bytes = RandomBytes(5 * kChunkBytes + 77, 8);
  const auto writer = Must(Open(file, *pool, "null"));
  std::mt19937 random(9);
  PieceList pieces;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size_bytes = std::min<size_t>(bytes.size() - at, random() % 30000);
    pieces.AddMemory(bytes.data() + at, size_bytes, 3);
    pieces.AddBytes("not in it");
    at += size_bytes;
  }
  EXPECT_OK(writer->Append(pieces));
  EXPECT(writer->crc(3) == CrcOf(bytes));
  EXPECT(writer->crc(0) == 0 && writer->crc(4) == 0 && writer->crc(PieceList::kNoCrc) == 0);
}

void ACrcPieceHoldsTheCrcAsItIsWhenItIsReached() {
  const auto pool = Pool();
  const ScratchFile file("writer");
  const auto writer = Must(Open(file, *pool));
  const std::string digits = "123456789";
  PieceList pieces;
  pieces.AddCrc(0);
  pieces.AddMemory(reinterpret_cast<const std::byte*>(digits.data()), digits.size(), 0);
  pieces.AddCrc(0);
  pieces.AddMemory(reinterpret_cast<const std::byte*>(digits.data()), digits.size(), 0);
  pieces.AddCrc(0);
  pieces.AddCrc(99);
  EXPECT_OK(writer->Append(pieces));
  EXPECT_OK(writer->Finish());
  const Bytes content = file.Content();
  const auto little_endian = [&content](size_t at) {
    uint32_t value = 0;
    for (size_t i = 0; i < 4; ++i) value |= std::to_integer<uint32_t>(content[at + i]) << (8 * i);
    return value;
  };
  EXPECT(little_endian(0) == 0);
  EXPECT(little_endian(4 + 9) == 0xCBF43926);
  const std::string twice = digits + digits;
  EXPECT(little_endian(4 + 9 + 4 + 9) == Crc32(0, reinterpret_cast<const std::byte*>(twice.data()), twice.size()));
  EXPECT(little_endian(4 + 9 + 4 + 9 + 4) == 0);
}

// --- Pulled pieces

void PullIsAskedForAtMostAChunkInOrder() {
  const auto pool = Pool();
  const ScratchFile file("writer");
  uint64_t expected_offset = 0;
  TransferCallbacks callbacks;
  callbacks.pull = [&expected_offset](uint64_t id, uint64_t offset_bytes, std::byte* target, uint64_t size_bytes) {
    EXPECT(id == 42 && offset_bytes == expected_offset && size_bytes > 0 && size_bytes <= kChunkBytes);
    std::memset(target, 0x77, size_bytes);
    expected_offset += size_bytes;
    return Status::Ok();
  };
  const auto writer = Must(Open(file, *pool, "null", std::move(callbacks)));
  PieceList pieces;
  pieces.AddBytes("some bytes before");
  pieces.AddPulled(42, 3 * kChunkBytes, 0);
  EXPECT_OK(writer->Append(pieces));
  EXPECT(expected_offset == 3 * kChunkBytes);
  EXPECT(writer->crc(0) == CrcOf(Bytes(3 * kChunkBytes, std::byte{0x77})));
}

void AnErrorOfPullEndsTheTransferForGood() {
  const auto pool = Pool();
  const ScratchFile file("writer");
  int count = 0;
  TransferCallbacks callbacks;
  callbacks.pull = [&count](uint64_t, uint64_t, std::byte*, uint64_t) {
    return ++count < 3 ? Status::Ok() : Status::Error(StatusCode::kCancelled, "the source is gone");
  };
  const auto writer = Must(Open(file, *pool, "fault:threads-buffered", std::move(callbacks)));
  PieceList pieces;
  pieces.AddPulled(0, 10 * kChunkBytes, PieceList::kNoCrc);
  EXPECT(writer->Append(pieces).message() == "the source is gone");
  EXPECT(count == 3);
  EXPECT(writer->Append(pieces).message() == "the source is gone");
  EXPECT(writer->Seek(0).message() == "the source is gone");
  EXPECT(writer->Finish().message() == "the source is gone");
  EXPECT(count == 3);
}

// --- Errors and giving up

void AnErrorOfTheDiskComesBackAndStays() {
  const auto pool = Pool();
  for (const uint64_t nth : {1, 5, 20}) {
    {
      const ScratchFile file("writer");
      const Fault fault(Fault::Errno(ENOSPC, nth, 1));
      const auto writer = Must(Open(file, *pool));
      const Bytes bytes(20 * kChunkBytes);
      PieceList pieces;
      AddAll(pieces, bytes);
      Status status = writer->Append(pieces);
      if (status.ok()) status = writer->Finish();
      EXPECT(status.code() == StatusCode::kNoSpace);
      EXPECT_WITH(status.offset_bytes() == (nth - 1) * kChunkBytes, std::to_string(status.offset_bytes()));
      EXPECT(writer->Append(pieces).code() == StatusCode::kNoSpace);
      EXPECT(writer->Finish().code() == StatusCode::kNoSpace);
    }
    EXPECT(pool->free_count() == kBufferCount);
  }
}

void AnErrorOfPollStopsAtOnceWithIoInFlight() {
  const auto pool = Pool();
  for (const char* engine : {"fault:threads-buffered", "fault:uring", "fault:libaio"}) {
    {
      const ScratchFile file("writer");
      TransferCallbacks callbacks;
      callbacks.poll = [](uint64_t) { return Status::Error(StatusCode::kCancelled, "enough"); };
      const Fault fault(Fault::Delay(10000));
      auto writer = Open(file, *pool, engine, std::move(callbacks));
      if (!writer.ok()) continue;
      const Bytes bytes(20 * kChunkBytes);
      PieceList pieces;
      AddAll(pieces, bytes);
      const auto start = Clock::now();
      EXPECT(writer.value()->Append(pieces).code() == StatusCode::kCancelled);
      EXPECT_WITH(SecondsSince(start) < 2, std::to_string(SecondsSince(start)));
    }
    EXPECT_WITH(pool->free_count() == kBufferCount, engine);
  }
}

void AWriterMayBeDroppedInTheMiddle() {
  const auto pool = Pool();
  for (int round = 0; round < 20; ++round) {
    const ScratchFile file("writer");
    const auto writer = Must(Open(file, *pool, "threads-buffered"));
    const Bytes bytes(5 * kChunkBytes + 100);
    PieceList pieces;
    AddAll(pieces, bytes);
    EXPECT_OK(writer->Append(pieces));
  }
  EXPECT(pool->free_count() == kBufferCount);
}

void TwoBuffersAreEnough() {
  const auto pool = Pool();
  auto holder = std::make_unique<BufferShare>(Must(BufferShare::Join(*pool, {})));
  std::vector<std::byte*> held;
  while (held.size() < kBufferCount - 2) held.push_back(holder->Take());
  const ScratchFile file("writer");
  const Bytes bytes = RandomBytes(20 * kChunkBytes, 10);
  PieceList pieces;
  AddAll(pieces, bytes);
  {
    const auto writer = Must(Open(file, *pool, "threads-buffered"));
    EXPECT_OK(writer->Append(pieces));
    EXPECT_OK(writer->Finish());
  }
  EXPECT(file.Content() == bytes);
  for (std::byte* buffer : held) holder->Put(buffer);
}

void AnEngineThatIsReplacedLosesNothing() {
  const auto pool = Pool();
  for (const uint64_t nth : {1, 4, 12}) {
    const ScratchFile file("writer");
    const Fault fault(Fault::Errno(EOPNOTSUPP, nth, Fault::kAll));
    const auto writer = Must(FileWriter::Open(
        file.fd(), file.path(),
        {.engines = {"fault:threads-buffered", "threads-buffered"}, .queue_depth = kBufferCount, .poll = {}}, *pool,
        {}));
    const Bytes bytes = RandomBytes(12 * kChunkBytes, 11);
    PieceList pieces;
    AddAll(pieces, bytes, 0);
    EXPECT_OK(writer->Append(pieces));
    EXPECT_OK(writer->Finish());
    EXPECT(file.Content() == bytes);
    EXPECT(writer->pump().engine_name() == "threads-buffered" && writer->crc(0) == CrcOf(bytes));
  }
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(
      argc, argv,
      {TEST(BytesOfAllKindsLieOneBehindTheOther), TEST(NothingIsWrittenForNothing), TEST(TheLastBlockIsPaddedWithZeros),
       TEST(TenThousandSmallPiecesAreAFewRequests), TEST(ManyAppendsFillTheSameChunk),
       TEST(ChunksEndOnMultiplesOfTheChunkSize), TEST(SeekGoesOnWhereItIsToldAndLeavesTheRestAlone),
       TEST(SeekBetweenBlocksIsRefusedAndHarmsNothing), TEST(ACrcGoesOnOverPiecesAndChunks),
       TEST(ACrcPieceHoldsTheCrcAsItIsWhenItIsReached), TEST(PullIsAskedForAtMostAChunkInOrder),
       TEST(AnErrorOfPullEndsTheTransferForGood), TEST(AnErrorOfTheDiskComesBackAndStays),
       TEST(AnErrorOfPollStopsAtOnceWithIoInFlight), TEST(AWriterMayBeDroppedInTheMiddle), TEST(TwoBuffersAreEnough),
       TEST(AnEngineThatIsReplacedLosesNothing)});
}
