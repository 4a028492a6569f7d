// A file written from a snapshot (transfer/file_writer.h, transfer/snapshot.h): the old bytes, although others change
// them meanwhile, and the CRC of the whole file from the CRCs of its parts.
#include <optional>
#include <thread>

#include "core/crc32.h"
#include "testing.h"
#include "transfer/file_writer.h"
#include "transfer/snapshot.h"

namespace fastpersist {
namespace {

std::optional<uint32_t> FileCrc(const FileWriter& writer, uint64_t size_bytes) {
  const auto runs = writer.runs();
  return runs.has_value() ? FileWriter::CombineRuns(*runs, size_bytes) : std::nullopt;
}

constexpr uint64_t kBlock = Arena::kBlockBytes;
constexpr int kRounds = 15;
constexpr size_t kChunkBytes = size_t{64} << 10;

std::unique_ptr<FileWriter> OpenWriter(const ScratchFile& file, BufferPool& pool) {
  return Must(FileWriter::Open(file.fd(), file.path(), {.engines = {"threads-buffered"}, .queue_depth = 4, .poll = {}},
                               pool, {}));
}

uint32_t CrcOfStart(const ScratchFile& file, uint64_t size_bytes) {
  return Crc32(0, file.Content().data(), size_bytes);
}

void AFileIsWhatItsSourcesWereAndItsCrcIsKnown() {
  const auto pool = Must(BufferPool::Create(4, kChunkBytes));
  for (int round = 0; round < kRounds; ++round) {
    std::mt19937 random(static_cast<uint32_t>(round));
    const ScratchFile file("snapshot");
    const auto snapshot = std::make_shared<Snapshot>(std::make_shared<Arena>(round % 3 * kBlock));
    std::vector<Bytes> sources;
    Bytes expected;
    PieceList pieces;
    for (uint32_t i = 0; i < 10; ++i) {
      sources.push_back(RandomBytes(random() % (5 * kChunkBytes), random()));
      pieces.AddBytes("between");
      pieces.AddCaptured(snapshot, i, sources[i].size(), i);
      pieces.AddCrc(i);
      for (const char c : std::string("between")) expected.push_back(static_cast<std::byte>(c));
      expected.insert(expected.end(), sources[i].begin(), sources[i].end());
      const uint32_t crc = Crc32(0, sources[i].data(), sources[i].size());
      for (int k = 0; k < 4; ++k) expected.push_back(static_cast<std::byte>(crc >> (8 * k)));
    }
    for (const Bytes& source : sources) snapshot->Add(source.data(), source.size(), SourceKind::kStable);
    std::thread gate([&] {
      EXPECT_OK(snapshot->Capture(SourceKind::kStable, true, {}));
      for (Bytes& source : sources) std::fill(source.begin(), source.end(), std::byte{0xDB});
    });
    const auto writer = OpenWriter(file, *pool);
    EXPECT_OK(writer->Append(pieces));
    EXPECT_OK(writer->Finish());
    gate.join();
    const Bytes content = file.Content();
    EXPECT(content.size() >= expected.size() && std::equal(expected.begin(), expected.end(), content.begin()));
    const auto crc = FileCrc(*writer, expected.size());
    EXPECT(crc.has_value() && *crc == CrcOfStart(file, expected.size()));
    EXPECT(!FileCrc(*writer, expected.size() - 1).has_value() && !FileCrc(*writer, expected.size() + 1).has_value());
  }
}

void AFileWhoseHeadIsWrittenLastHasACrc() {
  const auto pool = Must(BufferPool::Create(4, kChunkBytes));
  const ScratchFile file("snapshot");
  const auto writer = OpenWriter(file, *pool);
  EXPECT(FileCrc(*writer, 0) == std::optional<uint32_t>(0));
  const Bytes data = RandomBytes(3 * kChunkBytes + 77, 1);
  const Bytes head = RandomBytes(2 * FileWriter::kBlockBytes, 2);
  EXPECT_OK(writer->Seek(head.size()));
  PieceList last;
  last.AddMemory(data.data(), data.size(), 0);
  EXPECT_OK(writer->Append(last));
  EXPECT(!FileCrc(*writer, head.size() + data.size()).has_value());  // the head is missing
  EXPECT_OK(writer->Seek(0));
  PieceList first;
  first.AddMemory(head.data(), head.size(), 1);
  EXPECT_OK(writer->Append(first));
  EXPECT_OK(writer->Finish());
  const auto crc = FileCrc(*writer, head.size() + data.size());
  EXPECT(crc.has_value() && *crc == CrcOfStart(file, head.size() + data.size()));
}

void WithoutAllCrcsOrWithAGapThereIsNoCrcOfTheFile() {
  const auto pool = Must(BufferPool::Create(4, kChunkBytes));
  const Bytes data = RandomBytes(5000, 1);
  {
    const ScratchFile file("snapshot");
    const auto writer = OpenWriter(file, *pool);
    PieceList pieces;
    pieces.AddMemory(data.data(), data.size(), 0);
    pieces.AddMemory(data.data(), data.size(), PieceList::kNoCrc);
    EXPECT_OK(writer->Append(pieces));
    EXPECT_OK(writer->Finish());
    EXPECT(!FileCrc(*writer, 2 * data.size()).has_value());
  }
  const ScratchFile file("snapshot");
  const auto writer = OpenWriter(file, *pool);
  PieceList pieces;
  pieces.AddMemory(data.data(), data.size(), 0);
  EXPECT_OK(writer->Append(pieces));
  EXPECT_OK(writer->Seek(3 * FileWriter::kBlockBytes));
  EXPECT_OK(writer->Append(pieces));
  EXPECT_OK(writer->Finish());
  EXPECT(!FileCrc(*writer, 3 * FileWriter::kBlockBytes + data.size()).has_value());
  EXPECT(!FileCrc(*writer, 2 * data.size()).has_value());
}

void AFileOfAClosedSnapshotFails() {
  const auto pool = Must(BufferPool::Create(4, kChunkBytes));
  const ScratchFile file("snapshot");
  const auto snapshot = std::make_shared<Snapshot>(std::make_shared<Arena>(0));
  const Bytes data = RandomBytes(5000, 1);
  PieceList pieces;
  pieces.AddCaptured(snapshot, snapshot->Add(data.data(), data.size(), SourceKind::kStable), data.size(), 0);
  snapshot->Close();
  {
    const auto writer = OpenWriter(file, *pool);
    EXPECT(writer->Append(pieces).code() == StatusCode::kCancelled);
    EXPECT(writer->Finish().code() == StatusCode::kCancelled);
  }
  EXPECT(pool->free_count() == 4);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(AFileIsWhatItsSourcesWereAndItsCrcIsKnown), TEST(AFileWhoseHeadIsWrittenLastHasACrc),
              TEST(WithoutAllCrcsOrWithAGapThereIsNoCrcOfTheFile), TEST(AFileOfAClosedSnapshotFails)});
}
