// Reads of extents (transfer/file_reader.h): extents of any place, size and overlap arrive intact, with few requests
// and right CRCs, and an error leaves nothing in flight.
#include "transfer/file_reader.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "core/crc32.h"
#include "core/memory.h"
#include "engine/fault_engine.h"
#include "testing.h"

namespace fastpersist {
namespace {

constexpr size_t kChunkBytes = size_t{1} << 20;  // more than the gap that is read over
constexpr size_t kBufferCount = 8;
constexpr uint64_t kGapBytes = FileReader::kGapBytes;
using Target = ReadExtent::Target;

std::unique_ptr<BufferPool> Pool(size_t chunk_bytes = kChunkBytes) {
  return Must(BufferPool::Create(kBufferCount, chunk_bytes));
}

Result<std::unique_ptr<FileReader>> Open(const ScratchFile& file, BufferPool& pool,
                                         const std::string& engine = "fault:threads-buffered",
                                         TransferCallbacks callbacks = {}) {
  return FileReader::Open(file.fd(), file.path(), {.engines = {engine}, .queue_depth = kBufferCount, .poll = {}}, pool,
                          std::move(callbacks));
}

ReadExtent ToMemory(uint64_t offset_bytes, Bytes& target, bool with_crc = false) {
  return {.offset_bytes = offset_bytes,
          .size_bytes = target.size(),
          .target = Target::kMemory,
          .address = target.data(),
          .with_crc = with_crc};
}

Bytes Slice(const Bytes& content, uint64_t offset_bytes, uint64_t size_bytes) {
  const auto first = content.begin() + static_cast<ptrdiff_t>(offset_bytes);
  return {first, first + static_cast<ptrdiff_t>(size_bytes)};
}

uint32_t CrcOf(const Bytes& bytes) { return Crc32(0, bytes.data(), bytes.size()); }

// How many requests a read of these extents takes.
uint64_t CountRequests(const ScratchFile& file, const std::vector<std::pair<uint64_t, uint64_t>>& places) {
  const auto pool = Pool();
  std::vector<ReadExtent> extents;
  for (const auto& [offset_bytes, size_bytes] : places) {
    extents.push_back({.offset_bytes = offset_bytes, .size_bytes = size_bytes, .with_crc = true});
  }
  const auto reader = Must(Open(file, *pool));
  SetFaultPlan(Fault::Delay(0));  // hits every request and hurts none
  EXPECT_OK(reader->Read(extents).status());
  return ClearFaultPlan();
}

// --- What arrives

void ExtentsOfAllKindsAreRightWithEveryEngine() {
  const Bytes content = RandomBytes(5 * kChunkBytes + 1234, 1);
  const ScratchFile file("reader", content);
  const auto pool = Pool();
  for (const char* engine : {"threads-buffered", "threads", "uring", "libaio"}) {
    Bytes memory(3 * kChunkBytes + 1);
    Bytes pushed(kChunkBytes + 99);
    uint64_t pushed_bytes = 0;
    TransferCallbacks callbacks;
    callbacks.push = [&](uint64_t id, uint64_t offset_bytes, const std::byte* source, uint64_t size_bytes) {
      EXPECT(id == 17 && size_bytes > 0 && size_bytes <= kChunkBytes && offset_bytes + size_bytes <= pushed.size());
      std::memcpy(pushed.data() + offset_bytes, source, size_bytes);
      pushed_bytes += size_bytes;
      return Status::Ok();
    };
    auto reader = Open(file, *pool, engine, std::move(callbacks));
    if (!reader.ok()) continue;  // an engine or a file system that this machine does not have
    const std::vector<ReadExtent> extents = {
        ToMemory(7, memory, /*with_crc=*/true),
        {.offset_bytes = 8, .size_bytes = 0, .with_crc = true},
        {.offset_bytes = kChunkBytes + 3, .size_bytes = pushed.size(), .target = Target::kPush, .id = 17},
        {.offset_bytes = 2 * kChunkBytes, .size_bytes = content.size() - 2 * kChunkBytes, .with_crc = true},
    };
    const auto crcs = reader.value()->Read(extents);
    EXPECT_WITH(crcs.ok(), crcs.status().message());
    if (!crcs.ok()) continue;
    EXPECT_WITH(memory == Slice(content, 7, memory.size()), engine);
    EXPECT_WITH(pushed == Slice(content, kChunkBytes + 3, pushed.size()) && pushed_bytes == pushed.size(), engine);
    const std::vector<uint32_t> expected = {CrcOf(memory), 0, 0,
                                            CrcOf(Slice(content, 2 * kChunkBytes, content.size() - 2 * kChunkBytes))};
    EXPECT_WITH(Must(std::move(crcs)) == expected, engine);
  }
  EXPECT(pool->free_count() == kBufferCount);
}

// Random lists of extents: small and large, apart, touching, inside each other, empty, up to the end.
void RandomExtentsAreRight() {
  constexpr size_t kSmallChunkBytes = size_t{64} << 10;
  const Bytes content = RandomBytes(20 * kSmallChunkBytes + 777, 2);
  const ScratchFile file("reader", content);
  const auto pool = Pool(kSmallChunkBytes);
  std::mt19937 random(3);
  const auto below = [&random](uint64_t limit) {
    return std::uniform_int_distribution<uint64_t>(0, limit - 1)(random);
  };
  for (int round = 0; round < 150; ++round) {
    const uint64_t size_limit_bytes = uint64_t{1} << (4 + below(17));
    std::vector<Bytes> targets(1 + below(20));
    std::vector<uint64_t> offsets;
    for (Bytes& target : targets) {
      const bool on_a_border = below(3) == 0;
      offsets.push_back(on_a_border ? below(21) * kSmallChunkBytes : below(content.size() + 1));
      const uint64_t left_bytes = content.size() - offsets.back();
      target.resize(below(10) == 0 ? left_bytes : std::min(left_bytes, below(size_limit_bytes)));
    }
    std::sort(offsets.begin(), offsets.end());
    for (size_t i = 0; i < targets.size(); ++i) {
      targets[i].resize(std::min<uint64_t>(targets[i].size(), content.size() - offsets[i]));
    }
    std::vector<ReadExtent> extents;
    for (size_t i = 0; i < targets.size(); ++i) {
      extents.push_back(ToMemory(offsets[i], targets[i], /*with_crc=*/true));
    }
    // A buffered engine may read straight to the target, a direct one reads to the ring.
    auto opened = Open(file, *pool, round % 2 == 0 ? "threads-buffered" : "threads");
    if (!opened.ok()) continue;  // this file system has no direct I/O
    const auto reader = std::move(opened).value();
    const std::vector<uint32_t> crcs = Must(reader->Read(extents));
    for (size_t i = 0; i < targets.size(); ++i) {
      const std::string detail = "round " + std::to_string(round) + ", extent " + std::to_string(i);
      EXPECT_WITH(targets[i] == Slice(content, offsets[i], targets[i].size()), detail);
      EXPECT_WITH(crcs[i] == CrcOf(targets[i]), detail);
    }
    if (g_failure_count > 10) return;
  }
}

void BytesAroundATargetStayAsTheyAre() {
  const Bytes content = RandomBytes(3 * kChunkBytes, 4);
  const ScratchFile file("reader", content);
  const auto pool = Pool();
  Bytes memory(kChunkBytes + 200, std::byte{0xA5});
  const std::vector<ReadExtent> extents = {
      {.offset_bytes = 4095, .size_bytes = kChunkBytes, .target = Target::kMemory, .address = memory.data() + 100}};
  EXPECT_OK(Must(Open(file, *pool))->Read(extents).status());
  EXPECT(Slice(memory, 0, 100) == Bytes(100, std::byte{0xA5}));
  EXPECT(Slice(memory, 100, kChunkBytes) == Slice(content, 4095, kChunkBytes));
  EXPECT(Slice(memory, kChunkBytes + 100, 100) == Bytes(100, std::byte{0xA5}));
}

// Fresh pages, as a load of a large tensor has them.
class FreshPages {
 public:
  explicit FreshPages(size_t size_bytes) : size_bytes_(size_bytes) {
    void* const mapped = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(mapped != MAP_FAILED);
    address_ = static_cast<std::byte*>(mapped);
  }
  ~FreshPages() { munmap(address_, size_bytes_); }
  FreshPages(const FreshPages&) = delete;
  FreshPages& operator=(const FreshPages&) = delete;

  std::byte* address() const { return address_; }
  Bytes Read(size_t from, size_t size_bytes) const { return {address_ + from, address_ + from + size_bytes}; }

 private:
  const size_t size_bytes_;
  std::byte* address_;
};

// With a direct engine, whole pages of fresh memory are filled without the ring, the rest through it, and nothing else
// is touched. The ring's requests end on multiples of a chunk; the others begin where the extent begins, so one does.
void WholeFreshPagesAreReadStraight() {
  constexpr uint64_t kOffsetBytes = kChunkBytes / 2;
  const Bytes content = RandomBytes(4 * kChunkBytes, 13);
  const ScratchFile file("reader", content);
  const auto pool = Pool();
  struct Case {
    uint64_t offset_bytes;
    size_t address_bytes;
    uint64_t size_bytes;
    bool fresh;
    uint64_t request_count;
  };
  for (const Case& one :
       {Case{kOffsetBytes, 0, kChunkBytes, true, 1}, Case{kOffsetBytes, 0, kChunkBytes, false, 2},
        Case{kOffsetBytes, 64, kChunkBytes, true, 2}, Case{kOffsetBytes + 64, 0, kChunkBytes, true, 2},
        Case{kOffsetBytes, 0, kChunkBytes + 5000, true, 2}, Case{0, 0, 2 * kChunkBytes + 1, true, 3}}) {
    const FreshPages memory(4 * kChunkBytes);
    auto opened = Open(file, *pool, "fault:threads");
    if (!opened.ok()) return;  // this file system has no direct I/O
    const std::vector<ReadExtent> extents = {{.offset_bytes = one.offset_bytes,
                                              .size_bytes = one.size_bytes,
                                              .target = Target::kMemory,
                                              .address = memory.address() + one.address_bytes,
                                              .with_crc = true,
                                              .fresh = one.fresh}};
    SetFaultPlan(Fault::Delay(0));
    const std::vector<uint32_t> crcs = Must(opened.value()->Read(extents));
    const uint64_t request_count = ClearFaultPlan();
    EXPECT_WITH(request_count == one.request_count, std::to_string(request_count));
    const Bytes expected = Slice(content, one.offset_bytes, one.size_bytes);
    EXPECT(memory.Read(one.address_bytes, one.size_bytes) == expected);
    EXPECT(crcs == std::vector<uint32_t>{CrcOf(expected)});
    EXPECT(memory.Read(0, one.address_bytes) == Bytes(one.address_bytes));
    EXPECT(memory.Read(one.address_bytes + one.size_bytes, 9000) == Bytes(9000));
  }
}

// A child that is forked meanwhile shares no page with a direct read: it finds zeros, and may write.
void AForkWhileReadingStraightTakesNoBytesAway() {
  const Bytes content = RandomBytes(6 * kChunkBytes, 14);
  const ScratchFile file("reader", content);
  const auto pool = Pool();
  const FreshPages memory(content.size());
  TransferCallbacks callbacks;
  int zeros_count = 0;
  callbacks.poll = [&](uint64_t) {
    const pid_t child = fork();
    if (child == 0) {
      const bool found_zeros = memory.Read(0, content.size()) == Bytes(content.size());
      std::memset(memory.address(), 1, content.size());
      _exit(found_zeros ? 0 : 1);
    }
    int status = -1;
    zeros_count += waitpid(child, &status, 0) == child && status == 0 ? 1 : 0;
    return Status::Ok();
  };
  auto opened = Open(file, *pool, "fault:threads", std::move(callbacks));
  if (!opened.ok()) return;              // this file system has no direct I/O
  const Fault fault(Fault::Delay(120));  // ms: longer than the time between two polls
  const std::vector<ReadExtent> extents = {{.offset_bytes = 0,
                                            .size_bytes = content.size(),
                                            .target = Target::kMemory,
                                            .address = memory.address(),
                                            .fresh = true}};
  EXPECT_OK(opened.value()->Read(extents).status());
  EXPECT(zeros_count > 0);
  EXPECT(memory.Read(0, content.size()) == content);
}

void AReaderMayReadAgain() {
  const Bytes content = RandomBytes(2 * kChunkBytes, 5);
  const ScratchFile file("reader", content);
  const auto pool = Pool();
  const auto reader = Must(Open(file, *pool));
  EXPECT(Must(reader->Read({})).empty());
  for (const uint64_t offset_bytes : {100, 0, 4096}) {
    Bytes memory(kChunkBytes);
    const std::vector<ReadExtent> extents = {ToMemory(offset_bytes, memory, /*with_crc=*/true)};
    const std::vector<uint32_t> crcs = Must(reader->Read(extents));
    EXPECT(crcs == std::vector<uint32_t>{CrcOf(memory)});
    EXPECT(memory == Slice(content, offset_bytes, memory.size()));
  }
}

// --- Requests

void ExtentsThatLieCloseShareARequest() {
  const ScratchFile file("reader", Bytes(4 * kChunkBytes));
  EXPECT(CountRequests(file, {{0, 100}, {5000, 100}, {200000, 100}}) == 1);
  EXPECT(CountRequests(file, {{0, 100}, {100 + kGapBytes, 100}}) == 1);
  EXPECT(CountRequests(file, {{0, 100}, {101 + kGapBytes, 100}}) == 2);
  EXPECT(CountRequests(file, {{0, kChunkBytes}, {kChunkBytes, kChunkBytes}}) == 2);
  EXPECT(CountRequests(file, {{kChunkBytes - 10, 20}}) == 2);
  EXPECT(CountRequests(file, {{5000, 4 * kChunkBytes - 5000}}) == 4);
  EXPECT(CountRequests(file, {{0, 0}, {100, 0}}) == 0);
  std::vector<std::pair<uint64_t, uint64_t>> small;
  for (uint64_t offset_bytes = 0; offset_bytes < 4 * kChunkBytes; offset_bytes += 1000)
    small.push_back({offset_bytes, 64});
  EXPECT(CountRequests(file, small) == 4);
}

void AGapIsNotRead() {
  const ScratchFile file("reader", Bytes(8 * kChunkBytes));
  EXPECT(CountRequests(file, {{0, 10}, {7 * kChunkBytes, 10}}) == 2);
}

// --- The end of the file

void TheLastBlockMayBeShort() {
  const Bytes content = RandomBytes(kChunkBytes + 5, 6);
  const ScratchFile file("reader", content);
  const auto pool = Pool();
  for (const char* engine : {"threads-buffered", "threads", "uring", "libaio"}) {
    auto reader = Open(file, *pool, engine);
    if (!reader.ok()) continue;
    Bytes memory(content.size());
    const std::vector<ReadExtent> extents = {ToMemory(0, memory)};
    EXPECT_OK(reader.value()->Read(extents).status());
    EXPECT_WITH(memory == content, engine);
  }
}

void AnExtentBehindTheEndIsAnErrorThatSaysWhere() {
  const ScratchFile file("reader", RandomBytes(5000, 7));
  const auto pool = Pool();
  for (const char* engine : {"threads-buffered", "threads", "uring", "libaio"}) {
    for (const uint64_t offset_bytes : {uint64_t{0}, uint64_t{4999}, uint64_t{5000}, uint64_t{1} << 40}) {
      auto reader = Open(file, *pool, engine);
      if (!reader.ok()) continue;
      Bytes memory(offset_bytes == 0 ? 5001 : 2);
      const std::vector<ReadExtent> extents = {ToMemory(offset_bytes, memory)};
      const Status status = reader.value()->Read(extents).status();
      EXPECT_WITH(status.code() == StatusCode::kEndOfFile, std::string(engine) + ": " + status.message());
      EXPECT_WITH(Contains(status.message(), file.path()), status.message());
      EXPECT_WITH(status.offset_bytes() != Status::kNoOffset, status.message());
    }
  }
  EXPECT(pool->free_count() == kBufferCount);
}

// --- Errors and giving up

void AnErrorOfTheDiskLeavesNothingInFlight() {
  const ScratchFile file("reader", RandomBytes(12 * kChunkBytes, 8));
  const auto pool = Pool();
  for (const uint64_t nth : {1, 5, 12}) {
    const Fault fault(Fault::Errno(EIO, nth, 1));
    const auto reader = Must(Open(file, *pool));
    auto memory = std::make_unique<Bytes>(12 * kChunkBytes);
    const std::vector<ReadExtent> extents = {ToMemory(0, *memory)};
    const Status status = reader->Read(extents).status();
    EXPECT_WITH(status.sys_errno() == EIO && status.offset_bytes() == (nth - 1) * kChunkBytes, status.message());
    memory.reset();  // a request that still ran would write to freed memory
  }
  EXPECT(pool->free_count() == kBufferCount);
}

void AnErrorOfPushEndsTheRead() {
  const ScratchFile file("reader", RandomBytes(12 * kChunkBytes, 9));
  const auto pool = Pool();
  int count = 0;
  TransferCallbacks callbacks;
  callbacks.push = [&count](uint64_t, uint64_t, const std::byte*, uint64_t) {
    return ++count < 3 ? Status::Ok() : Status::Error(StatusCode::kCancelled, "the device is gone");
  };
  {
    const auto reader = Must(Open(file, *pool, "threads-buffered", std::move(callbacks)));
    const std::vector<ReadExtent> extents = {
        {.offset_bytes = 0, .size_bytes = 12 * kChunkBytes, .target = Target::kPush}};
    EXPECT(reader->Read(extents).status().message() == "the device is gone");
    EXPECT(count == 3);
  }
  EXPECT(pool->free_count() == kBufferCount);
}

void AnErrorOfPollStopsAtOnceWithIoInFlight() {
  const ScratchFile file("reader", RandomBytes(12 * kChunkBytes, 10));
  const auto pool = Pool();
  for (const char* engine : {"fault:threads-buffered", "fault:uring", "fault:libaio"}) {
    TransferCallbacks callbacks;
    callbacks.poll = [](uint64_t) { return Status::Error(StatusCode::kCancelled, "enough"); };
    const Fault fault(Fault::Delay(10000));
    auto reader = Open(file, *pool, engine, std::move(callbacks));
    if (!reader.ok()) continue;
    Bytes memory(12 * kChunkBytes);
    const std::vector<ReadExtent> extents = {ToMemory(0, memory)};
    const auto start = Clock::now();
    EXPECT(reader.value()->Read(extents).status().code() == StatusCode::kCancelled);
    EXPECT_WITH(SecondsSince(start) < 2, std::to_string(SecondsSince(start)));
  }
  EXPECT(pool->free_count() == kBufferCount);
}

void TwoBuffersAreEnough() {
  const Bytes content = RandomBytes(12 * kChunkBytes, 11);
  const ScratchFile file("reader", content);
  const auto pool = Pool();
  auto holder = std::make_unique<BufferShare>(Must(BufferShare::Join(*pool, {})));
  std::vector<std::byte*> held;
  while (held.size() < kBufferCount - 2) held.push_back(holder->Take());
  Bytes memory(content.size());
  const std::vector<ReadExtent> extents = {ToMemory(0, memory, /*with_crc=*/true)};
  EXPECT(Must(Must(Open(file, *pool))->Read(extents)) == std::vector<uint32_t>{CrcOf(content)});
  EXPECT(memory == content);
  for (std::byte* buffer : held) holder->Put(buffer);
}

// Completes all requests together, as the disks of some virtual machines do.
class TogetherEngine final : public IoEngine {
 public:
  std::string_view name() const override { return "together"; }
  const EngineLimits& limits() const override { return limits_; }
  QueueResult Queue(const IoRequest& request) override {
    queued_.push_back({.tag = request.tag, .done_bytes = request.size_bytes, .sys_errno = 0});
    return QueueResult::kQueued;
  }
  Status Submit() override { return Status::Ok(); }
  Result<size_t> Reap(std::span<IoCompletion> out, size_t /*min_count*/,
                      std::chrono::milliseconds /*timeout*/) override {
    std::copy(queued_.begin(), queued_.end(), out.begin());
    return std::exchange(queued_, {}).size();
  }
  size_t in_flight() const override { return queued_.size(); }

 private:
  const EngineLimits limits_{.queue_depth = kBufferCount, .direct = true};
  std::vector<IoCompletion> queued_;
};

void TheNextChunkIsReadWhileThoseThatCameBackTogetherAreCopied() {
  constexpr size_t kRounds = 3;
  const auto pool = Pool();
  const TogetherEngine* engine = nullptr;
  const PumpOptions::Simulation simulation = {
      .create_engine = [&engine](const std::string&) -> Result<std::unique_ptr<IoEngine>> {
        auto made = std::make_unique<TogetherEngine>();
        engine = made.get();
        return std::unique_ptr<IoEngine>(std::move(made));
      },
      .limits = {.supported = true, .memory_alignment_bytes = 512, .offset_alignment_bytes = 512, .why_not = {}},
  };
  std::vector<size_t> in_flight;  // when a chunk is copied
  TransferCallbacks callbacks;
  callbacks.push = [&](uint64_t, uint64_t, const std::byte*, uint64_t) {
    in_flight.push_back(engine->in_flight());
    return Status::Ok();
  };
  const auto reader = Must(FileReader::Open(
      -1, "simulated", {.engines = {"together"}, .queue_depth = kBufferCount, .poll = {}, .simulation = &simulation},
      *pool, std::move(callbacks)));
  const std::vector<ReadExtent> extents = {
      {.offset_bytes = 0, .size_bytes = kRounds * kBufferCount * kChunkBytes, .target = Target::kPush}};
  EXPECT_OK(reader->Read(extents).status());
  std::vector<size_t> expected;
  for (size_t round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < kBufferCount; ++i) expected.push_back(round + 1 < kRounds ? i : 0);
  }
  EXPECT(in_flight == expected);
}

void ShortReadsAndAReplacedEngineLoseNothing() {
  const Bytes content = RandomBytes(12 * kChunkBytes, 12);
  const ScratchFile file("reader", content);
  const auto pool = Pool();
  for (const FaultPlan& plan : {Fault::Short(700001, 1, Fault::kAll), Fault::Errno(EINVAL, 5, Fault::kAll)}) {
    const Fault fault(plan);
    const auto reader = Must(FileReader::Open(
        file.fd(), file.path(),
        {.engines = {"fault:threads-buffered", "threads-buffered"}, .queue_depth = kBufferCount, .poll = {}}, *pool,
        {}));
    Bytes memory(content.size() - 100);
    const std::vector<ReadExtent> extents = {ToMemory(100, memory, /*with_crc=*/true)};
    const std::vector<uint32_t> crcs = Must(reader->Read(extents));
    EXPECT(crcs == std::vector<uint32_t>{CrcOf(memory)});
    EXPECT(memory == Slice(content, 100, memory.size()));
    EXPECT(ClearFaultPlan() > 0);
  }
}

void StraightReadsLoseNothingOfShortReadsAndAReplacedEngine() {
  const Bytes content = RandomBytes(12 * kChunkBytes, 15);
  const ScratchFile file("reader", content);
  const auto pool = Pool();
  for (const FaultPlan& plan : {Fault::Short(69 * 4096, 1, Fault::kAll), Fault::Errno(EINVAL, 5, Fault::kAll)}) {
    const FreshPages memory(content.size());
    const Fault fault(plan);
    auto opened = FileReader::Open(
        file.fd(), file.path(),
        {.engines = {"fault:threads", "threads-buffered"}, .queue_depth = kBufferCount, .poll = {}}, *pool, {});
    const auto reader = Must(std::move(opened));
    const uint64_t size_bytes = content.size() - 5000;
    const std::vector<ReadExtent> extents = {{.offset_bytes = 4096,
                                              .size_bytes = size_bytes - 4096,
                                              .target = Target::kMemory,
                                              .address = memory.address(),
                                              .with_crc = true,
                                              .fresh = true}};
    const Bytes expected = Slice(content, 4096, size_bytes - 4096);
    EXPECT(Must(reader->Read(extents)) == std::vector<uint32_t>{CrcOf(expected)});
    EXPECT(memory.Read(0, expected.size()) == expected);
    EXPECT(ClearFaultPlan() > 0);
  }
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(
      argc, argv,
      {TEST(ExtentsOfAllKindsAreRightWithEveryEngine), TEST(RandomExtentsAreRight),
       TEST(BytesAroundATargetStayAsTheyAre), TEST(AReaderMayReadAgain), TEST(ExtentsThatLieCloseShareARequest),
       TEST(AGapIsNotRead), TEST(TheLastBlockMayBeShort), TEST(AnExtentBehindTheEndIsAnErrorThatSaysWhere),
       TEST(AnErrorOfTheDiskLeavesNothingInFlight), TEST(AnErrorOfPushEndsTheRead),
       TEST(AnErrorOfPollStopsAtOnceWithIoInFlight), TEST(TwoBuffersAreEnough),
       TEST(TheNextChunkIsReadWhileThoseThatCameBackTogetherAreCopied), TEST(ShortReadsAndAReplacedEngineLoseNothing),
       TEST(WholeFreshPagesAreReadStraight), TEST(AForkWhileReadingStraightTakesNoBytesAway),
       TEST(StraightReadsLoseNothingOfShortReadsAndAReplacedEngine)});
}
