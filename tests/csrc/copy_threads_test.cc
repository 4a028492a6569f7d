// Copy threads (core/copy_threads.h) in a writer whose disk is memory: when they start, that they lose no byte
// and no CRC, and that a writer which gives up leaves none behind. The disk completes a write at once, or only when its
// queue is full.
#include "core/copy_threads.h"

#include <vector>

#include "core/crc32.h"
#include "core/thread.h"
#include "testing.h"
#include "transfer/file_writer.h"

namespace fastpersist {
namespace {

constexpr size_t kChunkBytes = size_t{256} << 10;
constexpr size_t kBufferCount = 6;

struct Disk {
  Bytes content = Bytes(80 * kChunkBytes);
  bool is_slow = false;
  uint64_t fails_at = UINT64_MAX;  // the first offset of a write that fails
};

class MemoryEngine : public IoEngine {
 public:
  MemoryEngine(Disk& disk, uint32_t queue_depth) : disk_(disk), limits_{.queue_depth = queue_depth, .direct = false} {}

  std::string_view name() const override { return "memory"; }
  const EngineLimits& limits() const override { return limits_; }
  QueueResult Queue(const IoRequest& request) override {
    if (in_flight_.size() == limits_.queue_depth) return QueueResult::kFull;
    in_flight_.push_back(request);
    return QueueResult::kQueued;
  }
  Status Submit() override { return Status::Ok(); }
  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds) override {
    size_t count = 0;
    while (count < out.size() && !in_flight_.empty() && (!disk_.is_slow || count < min_count)) {
      const IoRequest request = in_flight_.front();
      in_flight_.erase(in_flight_.begin());
      const bool fails = request.offset_bytes >= disk_.fails_at;
      if (!fails) std::memcpy(disk_.content.data() + request.offset_bytes, request.buffer, request.size_bytes);
      out[count++] = {
          .tag = request.tag, .done_bytes = fails ? 0 : request.size_bytes, .sys_errno = fails ? ENOSPC : 0};
    }
    return count;
  }
  size_t in_flight() const override { return in_flight_.size(); }

 private:
  Disk& disk_;
  const EngineLimits limits_;
  std::vector<IoRequest> in_flight_;
};

struct Writing {
  explicit Writing(TransferCallbacks callbacks = {}) {
    seam = {.create_engine = [this](const std::string&) -> Result<std::unique_ptr<IoEngine>> {
              return std::unique_ptr<IoEngine>(std::make_unique<MemoryEngine>(disk, kBufferCount - 1));
            },
            .limits = DirectIoLimitsFor(4096, 4096)};
    writer = Must(FileWriter::Open(
        -1, "the file", {.engines = {"memory"}, .queue_depth = kBufferCount - 1, .poll = {}, .simulation = &seam},
        *pool, std::move(callbacks)));
  }

  Disk disk;
  PumpOptions::Simulation seam;
  std::unique_ptr<BufferPool> pool = Must(BufferPool::Create(kBufferCount, kChunkBytes));
  std::unique_ptr<FileWriter> writer;
};

bool HasCpus() { return UsableCpuCount() >= 2; }

void CopyThreadsStartWhereTheDiskWaitsAndLoseNothing() {
  for (const bool with_crcs : {true, false}) {
    Writing w;
    const Bytes large = RandomBytes(20 * kChunkBytes + 777, 1);
    const Bytes small = RandomBytes(1000, 2);
    Bytes expected;
    const auto add = [&expected](const Bytes& bytes) { expected.insert(expected.end(), bytes.begin(), bytes.end()); };
    uint32_t crc_of_small = 0;
    for (int round = 0; round < 3; ++round) {
      PieceList pieces;
      pieces.AddMemory(large.data(), large.size(), with_crcs ? 0 : PieceList::kNoCrc);
      pieces.AddMemory(small.data(), small.size(), with_crcs ? 1 : PieceList::kNoCrc);
      pieces.AddBytes("text");
      add(large);
      add(small);
      for (const char letter : {'t', 'e', 'x', 't'}) expected.push_back(static_cast<std::byte>(letter));
      if (with_crcs) {
        pieces.AddCrc(1);  // behind copies that may not be complete
        crc_of_small = Crc32(crc_of_small, small.data(), small.size());
        for (int shift = 0; shift < 32; shift += 8) expected.push_back(static_cast<std::byte>(crc_of_small >> shift));
      }
      EXPECT_OK(w.writer->Append(pieces));
    }
    EXPECT_OK(w.writer->Finish());
    EXPECT_WITH(w.writer->copy_thread_count() >= (HasCpus() ? 2 : 0), std::to_string(w.writer->copy_thread_count()));
    EXPECT(w.writer->copy_thread_count() <= 4);
    w.disk.content.resize(expected.size());
    EXPECT(w.disk.content == expected);
    if (with_crcs) {
      EXPECT(w.writer->crc(1) == crc_of_small);
      uint32_t crc_of_large = 0;
      for (int round = 0; round < 3; ++round) crc_of_large = Crc32(crc_of_large, large.data(), large.size());
      EXPECT(w.writer->crc(0) == crc_of_large);
      EXPECT(FileWriter::CombineRuns(*w.writer->runs(), expected.size()) == Crc32(0, expected.data(), expected.size()));
    }
    w.writer.reset();
    EXPECT(w.pool->free_count() == kBufferCount);
  }
}

void ADiskThatIsBusyGetsNoCopyThreads() {
  Writing w;
  w.disk.is_slow = true;
  const Bytes bytes = RandomBytes(70 * kChunkBytes, 3);
  PieceList pieces;
  pieces.AddMemory(bytes.data(), bytes.size(), 0);
  EXPECT_OK(w.writer->Append(pieces));
  EXPECT_OK(w.writer->Finish());
  EXPECT(w.writer->copy_thread_count() == 0);
}

void AnErrorWhileCopyThreadsCopyReturnsEveryBuffer() {
  for (uint64_t chunk = 0; chunk < 60; chunk += 7) {
    Writing w;
    w.disk.fails_at = chunk * kChunkBytes;
    const Bytes bytes = RandomBytes(70 * kChunkBytes, 4);
    PieceList pieces;
    pieces.AddMemory(bytes.data(), bytes.size(), 0);
    Status status = w.writer->Append(pieces);
    if (status.ok()) status = w.writer->Finish();
    EXPECT(status.code() == StatusCode::kNoSpace);
    EXPECT_WITH(status.offset_bytes() == w.disk.fails_at, std::to_string(status.offset_bytes()));
    EXPECT(w.pool->free_count() == kBufferCount);
  }
}

void AWaitForACopyEndsWithTheErrorOfPoll() {
  CopyThreads threads;
  EXPECT(threads.TryAddThread());
  const Bytes source = RandomBytes(size_t{64} << 20, 5);
  Bytes target(source.size());
  const auto copy = std::make_shared<CopyThreads::Copy>(target.data(), source.data(), source.size(), true);
  threads.Start(copy);
  int polls = 0;
  EXPECT_OK(threads.Wait(*copy, [&polls] {
    ++polls;
    return Status::Ok();
  }));
  EXPECT(copy->crc == Crc32(0, source.data(), source.size()) && target == source);
  const auto never = std::make_shared<CopyThreads::Copy>(target.data(), source.data(), size_t{0}, false);
  const Status status = threads.Wait(*never, [] { return Status::Error(StatusCode::kCancelled, "enough"); });
  EXPECT(status.message() == "enough");
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(CopyThreadsStartWhereTheDiskWaitsAndLoseNothing), TEST(ADiskThatIsBusyGetsNoCopyThreads),
              TEST(AnErrorWhileCopyThreadsCopyReturnsEveryBuffer), TEST(AWaitForACopyEndsWithTheErrorOfPoll)});
}
