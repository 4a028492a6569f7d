// The test double that injects faults: plans hit exactly the requests that they name, and recordings hold the written
// bytes. engine_contract_test checks that it changes nothing without a plan.
//
// fault_engine_test [SCRATCH_DIRECTORY]
#include "engine/fault_engine.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace fastpersist {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

int g_failure_count = 0;
std::string g_directory;

bool Expect(bool holds, const char* what, int line) {
  if (!holds) {
    ++g_failure_count;
    std::printf("%s:%d: %s is false\n", __FILE__, line, what);
  }
  return holds;
}

#define EXPECT(condition) Expect((condition), #condition, __LINE__)
#define ASSERT(condition) \
  if (!EXPECT(condition)) return

constexpr uint32_t kBlock = 4096;
constexpr std::optional<IoOp> kAny = std::nullopt;

// An engine with faults, a buffer of ten blocks, and a file of ten blocks: block i is full of the letter 'a' + i.
class Bench {
 public:
  explicit Bench(const std::string& engine_name) : path_(g_directory + "/file"), buffer_(size_t{10} * kBlock) {
    auto made = CreateEngine({.name = engine_name, .queue_depth = 10});
    if (!made.ok()) {
      std::printf("%s: %s\n", engine_name.c_str(), made.status().message().c_str());
      std::exit(1);
    }
    engine_ = std::move(made).value();
    fd_ = open(path_.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0644);
    FP_CHECK(fd_ >= 0);
    for (int i = 0; i < 10; ++i) {
      const std::string block(kBlock, static_cast<char>('a' + i));
      FP_CHECK(pwrite(fd_, block.data(), kBlock, i * off_t{kBlock}) == kBlock);
    }
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() {
    engine_.reset();
    close(fd_);
    unlink(path_.c_str());
    ClearFaultPlan();
    SetWriteRecording(false);
    TakeRecordedWrites();
  }

  IoEngine& engine() { return *engine_; }
  int fd() const { return fd_; }
  std::byte* block(size_t i) { return buffer_.data() + i * kBlock; }

  void Queue(IoOp op, uint64_t i) {
    EXPECT(engine_->Queue(
               {.op = op, .fd = fd_, .buffer = block(i), .size_bytes = kBlock, .offset_bytes = i * kBlock, .tag = i}) ==
           QueueResult::kQueued);
  }
  // Runs blocks [0, count), one after the other; returns their completions.
  std::vector<IoCompletion> RunEach(IoOp op, size_t count) {
    std::vector<IoCompletion> completions;
    for (size_t i = 0; i < count; ++i) {
      Queue(op, i);
      EXPECT(engine_->Submit().ok());
      IoCompletion completion;
      auto reaped = engine_->Reap({&completion, 1}, 1, std::chrono::seconds(60));
      EXPECT(reaped.ok() && reaped.value() == 1 && completion.tag == i);
      completions.push_back(completion);
    }
    EXPECT(engine_->in_flight() == 0);
    return completions;
  }

 private:
  std::string path_;
  std::vector<std::byte> buffer_;
  std::unique_ptr<IoEngine> engine_;
  int fd_ = -1;
};

// Which of the ten completions have this errno, as a string of 0 and 1.
std::string WithErrno(const std::vector<IoCompletion>& completions, int sys_errno) {
  std::string marks;
  for (const IoCompletion& completion : completions) marks += completion.sys_errno == sys_errno ? '1' : '0';
  return marks;
}

void ErrnoHitsTheNthAndTheCountBehindIt() {
  Bench bench("fault:threads-buffered");
  SetFaultPlan({.op = kAny, .nth = 1, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  EXPECT(WithErrno(bench.RunEach(IoOp::kRead, 10), EIO) == "1000000000");
  EXPECT(ClearFaultPlan() == 1);
  SetFaultPlan({.op = kAny, .nth = 4, .count = 3, .kind = FaultPlan::Kind::kErrno, .sys_errno = ENOSPC});
  EXPECT(WithErrno(bench.RunEach(IoOp::kRead, 10), ENOSPC) == "0001110000");
  EXPECT(ClearFaultPlan() == 3);
  SetFaultPlan({.op = kAny, .nth = 8, .count = UINT64_MAX, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  EXPECT(WithErrno(bench.RunEach(IoOp::kRead, 10), EIO) == "0000000111");
  EXPECT(ClearFaultPlan() == 3);
  // A plan that no request reached, and no plan at all.
  SetFaultPlan({.op = kAny, .nth = 11, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  EXPECT(WithErrno(bench.RunEach(IoOp::kRead, 10), 0) == "1111111111");
  EXPECT(ClearFaultPlan() == 0);
  EXPECT(ClearFaultPlan() == 0);
  EXPECT(WithErrno(bench.RunEach(IoOp::kRead, 10), 0) == "1111111111");
}

void SettingAPlanRestartsTheCount() {
  Bench bench("fault:null");
  SetFaultPlan({.op = kAny, .nth = 3, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  EXPECT(WithErrno(bench.RunEach(IoOp::kRead, 2), EIO) == "00");
  SetFaultPlan({.op = kAny, .nth = 3, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  EXPECT(WithErrno(bench.RunEach(IoOp::kRead, 4), EIO) == "0010");
  EXPECT(ClearFaultPlan() == 1);
}

void PlanForWritesCountsOnlyWrites() {
  Bench bench("fault:null");
  SetFaultPlan({.op = IoOp::kWrite, .nth = 2, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  EXPECT(WithErrno(bench.RunEach(IoOp::kRead, 10), EIO) == "0000000000");
  EXPECT(WithErrno(bench.RunEach(IoOp::kWrite, 3), EIO) == "010");
  EXPECT(ClearFaultPlan() == 1);
}

void RefusedRequestIsNotCounted() {
  Bench bench("fault:null");
  SetFaultPlan({.op = kAny, .nth = 11, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  for (uint64_t i = 0; i < 10; ++i) bench.Queue(IoOp::kRead, i);
  const IoRequest extra = {.op = IoOp::kRead,
                           .fd = bench.fd(),
                           .buffer = bench.block(0),
                           .size_bytes = kBlock,
                           .offset_bytes = 0,
                           .tag = 77};
  for (int attempt = 0; attempt < 3; ++attempt) EXPECT(bench.engine().Queue(extra) == QueueResult::kFull);
  std::vector<IoCompletion> out(10);
  auto reaped = bench.engine().Reap(out, 10, milliseconds(0));
  ASSERT(reaped.ok() && reaped.value() == 10);
  EXPECT(bench.engine().Queue(extra) == QueueResult::kQueued);
  reaped = bench.engine().Reap(out, 1, milliseconds(0));
  EXPECT(reaped.ok() && reaped.value() == 1 && out[0].sys_errno == EIO && out[0].tag == 77);
  EXPECT(ClearFaultPlan() == 1);
}

void FailedWriteTouchesNothing() {
  Bench bench("fault:threads-buffered");
  std::memset(bench.block(0), 'X', kBlock);
  SetFaultPlan({.op = kAny, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  bench.RunEach(IoOp::kWrite, 1);
  char first = 0;
  EXPECT(pread(bench.fd(), &first, 1, 0) == 1 && first == 'a');
}

void ShortMovesExactlyTheseBytes() {
  Bench bench("fault:threads-buffered");
  for (size_t i = 0; i < 3; ++i) std::memset(bench.block(i), 'X', kBlock);
  SetFaultPlan({.op = IoOp::kWrite, .nth = 2, .kind = FaultPlan::Kind::kShort, .short_bytes = 512});
  const auto completions = bench.RunEach(IoOp::kWrite, 3);
  EXPECT(completions[0].done_bytes == kBlock && completions[2].done_bytes == kBlock);
  EXPECT(completions[1].done_bytes == 512 && completions[1].sys_errno == 0);
  std::string file(size_t{3} * kBlock, '?');
  EXPECT(pread(bench.fd(), file.data(), file.size(), 0) == static_cast<ssize_t>(file.size()));
  EXPECT(file == std::string(kBlock + 512, 'X') + std::string(kBlock - 512, 'b') + std::string(kBlock, 'X'));
  // Longer than the request: all of it.
  SetFaultPlan({.op = kAny, .kind = FaultPlan::Kind::kShort, .short_bytes = 2 * kBlock});
  EXPECT(bench.RunEach(IoOp::kRead, 1)[0].done_bytes == kBlock);
}

void ZeroMovesNothingAndIsNoError() {
  Bench bench("fault:threads-buffered");
  std::memset(bench.block(0), 'X', kBlock);
  SetFaultPlan({.op = kAny, .kind = FaultPlan::Kind::kZero});
  const IoCompletion completion = bench.RunEach(IoOp::kRead, 1)[0];
  EXPECT(completion.sys_errno == 0 && completion.done_bytes == 0);
  EXPECT(bench.block(0)[0] == std::byte{'X'});
}

void DelayHoldsOnlyItsRequest() {
  for (const char* name : {"fault:null", "fault:threads-buffered"}) {
    Bench bench(name);
    SetFaultPlan({.op = kAny, .nth = 2, .kind = FaultPlan::Kind::kDelay, .delay_ms = 200});
    const auto start = Clock::now();
    for (uint64_t i = 0; i < 3; ++i) bench.Queue(IoOp::kRead, i);
    EXPECT(bench.engine().Submit().ok());
    std::vector<IoCompletion> out(3);
    auto reaped = bench.engine().Reap(out, 2, milliseconds(100));
    ASSERT(reaped.ok() && reaped.value() == 2);
    EXPECT(out[0].tag + out[1].tag == 0 + 2);
    EXPECT(bench.engine().in_flight() == 1);
    // A wait honours its timeout first, and then returns when the completion is due, not later.
    reaped = bench.engine().Reap(out, 1, milliseconds(10));
    EXPECT(reaped.ok() && reaped.value() == 0);
    reaped = bench.engine().Reap(out, 1, std::chrono::seconds(60));
    EXPECT(reaped.ok() && reaped.value() == 1 && out[0].tag == 1 && out[0].done_bytes == kBlock);
    const auto elapsed = Clock::now() - start;
    EXPECT(elapsed >= milliseconds(200) && elapsed < std::chrono::seconds(20));
  }
}

void EngineWithDelayedRequestCanBeDestroyed() {
  const auto start = Clock::now();
  {
    Bench bench("fault:threads-buffered");
    SetFaultPlan({.op = kAny, .kind = FaultPlan::Kind::kDelay, .delay_ms = 60000});
    bench.Queue(IoOp::kRead, 0);
    EXPECT(bench.engine().Submit().ok());
    std::vector<IoCompletion> out(1);
    EXPECT(bench.engine().Reap(out, 1, milliseconds(20)).value() == 0);
  }
  EXPECT(Clock::now() - start < std::chrono::seconds(30));
}

void RecordingHoldsCompletedWritesInOrder() {
  Bench bench("fault:threads-buffered");
  for (size_t i = 0; i < 10; ++i) std::memset(bench.block(i), static_cast<int>('A' + i), kBlock);
  bench.RunEach(IoOp::kWrite, 1);
  SetWriteRecording(true);
  bench.RunEach(IoOp::kRead, 1);
  std::memset(bench.block(0), 'A', kBlock);
  SetFaultPlan({.op = IoOp::kWrite, .nth = 1, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  bench.RunEach(IoOp::kWrite, 2);
  SetFaultPlan({.op = IoOp::kWrite, .nth = 1, .kind = FaultPlan::Kind::kShort, .short_bytes = 512});
  bench.RunEach(IoOp::kWrite, 1);
  ClearFaultPlan();
  SetWriteRecording(false);
  bench.RunEach(IoOp::kWrite, 1);
  const std::vector<RecordedWrite> writes = TakeRecordedWrites();
  ASSERT(writes.size() == 2);
  EXPECT(writes[0].offset_bytes == kBlock && writes[0].data == std::string(kBlock, 'B'));
  EXPECT(writes[1].offset_bytes == 0 && writes[1].data == std::string(512, 'A'));
  EXPECT(TakeRecordedWrites().empty());
}

// Engines of several threads share one plan: each of its hits goes to exactly one of them.
void PlanIsSharedByAllThreads() {
  SetFaultPlan({.op = kAny, .nth = 11, .count = 25, .kind = FaultPlan::Kind::kErrno, .sys_errno = EIO});
  SetWriteRecording(true);
  std::atomic<int> failed_count{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&failed_count] {
      auto engine = CreateEngine({.name = "fault:null", .queue_depth = 1}).value();
      std::byte byte{1};
      for (int i = 0; i < 100; ++i) {
        engine->Queue({.op = IoOp::kWrite, .fd = -1, .buffer = &byte, .size_bytes = 1, .offset_bytes = 0, .tag = 0});
        IoCompletion completion;
        if (engine->Reap({&completion, 1}, 1, milliseconds(0)).ok() && completion.sys_errno == EIO) ++failed_count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(failed_count == 25);
  EXPECT(ClearFaultPlan() == 25);
  SetWriteRecording(false);
  EXPECT(TakeRecordedWrites().size() == 375);
}

int Main(int argc, char** argv) {
  std::string made_here;
  if (argc > 1) {
    g_directory = argv[1];
  } else {
    made_here = "fault_engine_test.XXXXXX";
    if (mkdtemp(made_here.data()) == nullptr) {
      std::printf("mkdtemp in the current directory: %s\n", std::strerror(errno));
      return 1;
    }
    g_directory = made_here;
  }
  ErrnoHitsTheNthAndTheCountBehindIt();
  SettingAPlanRestartsTheCount();
  PlanForWritesCountsOnlyWrites();
  RefusedRequestIsNotCounted();
  FailedWriteTouchesNothing();
  ShortMovesExactlyTheseBytes();
  ZeroMovesNothingAndIsNoError();
  DelayHoldsOnlyItsRequest();
  EngineWithDelayedRequestCanBeDestroyed();
  RecordingHoldsCompletedWritesInOrder();
  PlanIsSharedByAllThreads();
  if (!made_here.empty()) rmdir(made_here.c_str());
  return g_failure_count == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) { return fastpersist::Main(argc, argv); }
