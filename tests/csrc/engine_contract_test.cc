// The contract of engine.h for every engine: each name of EngineNames(), each wrapped by "fault:" without a plan, and
// the code paths for old kernels and machines without libaio. An engine that cannot run here is skipped with its
// reason, except the threads engines, which run everywhere.
//
// engine_contract_test [SCRATCH_DIRECTORY [ENGINE]]
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

#include "engine_candidates.h"

namespace fastpersist {
namespace {

// --- The tests -------------------------------------------------------------------------------------------------------

void NameAndLimitsAreAsAsked(const Candidate& candidate) {
  const auto engine = Make(candidate, 17);
  EXPECT_WITH(engine->name() == candidate.name, std::string(engine->name()));
  EXPECT(engine->limits().queue_depth == 17);
  EXPECT(engine->limits().direct == candidate.direct);
  EXPECT(engine->in_flight() == 0);
}

void EveryDepthWorks(const Candidate& candidate) {
  Buffer buffer(8 * kAlignment);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  for (const uint32_t depth : {1U, 2U, 3U, 255U, 4096U}) {
    const auto engine = Make(candidate, depth);
    const IoCompletion completion = RunOne(*engine, Read(file, buffer.span(0, 8 * kAlignment), 0, depth));
    EXPECT_WITH(completion.sys_errno == 0 && completion.done_bytes == 8 * kAlignment, Describe(completion));
  }
}

void SizesAroundTheAlignmentAreWrittenAndReadBack(const Candidate& candidate) {
  std::vector<size_t> sizes;
  for (const size_t size : {1UL, 2UL, 64UL, 128UL, 256UL}) {
    sizes.push_back(size * kAlignment);
    if (candidate.direct) continue;
    for (const size_t near : {size * kAlignment - 1, size * kAlignment + 1, size * 512, size * 512 + 7})
      sizes.push_back(near);
  }
  if (!candidate.direct) sizes.push_back(1);

  Buffer buffer(2 << 20);
  const File file(g_scratch.path("sizes"), O_CREAT | O_TRUNC | O_RDWR, candidate.direct);
  const auto engine = Make(candidate, 4);
  uint64_t tag = 1;
  uint64_t offset = 3 * kAlignment;  // behind a hole
  for (const size_t size : sizes) {
    const std::span<std::byte> bytes = buffer.span(0, size);
    std::memcpy(bytes.data(), Content().data() + offset, size);  // other bytes at each place
    IoCompletion completion = RunOne(*engine, Write(file, bytes, offset, tag++));
    EXPECT_WITH(completion.sys_errno == 0 && completion.done_bytes == size, Describe(completion));
    Fill(bytes, 0xEE);
    completion = RunOne(*engine, Read(file, bytes, offset, tag++));
    EXPECT_WITH(completion.sys_errno == 0 && completion.done_bytes == size, Describe(completion));
    if (candidate.moves_bytes) EXPECT_WITH(HoldsContent(bytes, offset), "size_bytes " + std::to_string(size));
    offset += AlignUp(size, kAlignment) + (candidate.direct ? 0 : 13);
  }
}

// The kernel refuses these, some file systems accept them, and libaio reports them at submission: always one
// completion.
void MisalignedDirectRequestsCompleteEitherWay(const Candidate& candidate) {
  if (!candidate.direct) return;
  Buffer buffer(4 * kAlignment);
  const File file(g_scratch.input, O_RDONLY, true);
  const auto engine = Make(candidate, 4);
  ASSERT(engine->Queue(Read(file, buffer.span(0, 4095), 0, 1)) == QueueResult::kQueued);
  ASSERT(engine->Queue(Read(file, buffer.span(kAlignment + 1, 4096), 0, 2)) == QueueResult::kQueued);
  ASSERT(engine->Queue(Read(file, buffer.span(2 * kAlignment, 4096), 1, 3)) == QueueResult::kQueued);
  ASSERT(engine->Queue(Read(file, buffer.span(3 * kAlignment, 4096), 0, 4)) == QueueResult::kQueued);
  EXPECT(engine->Submit().ok());
  auto completions = ReapAll(*engine);
  ASSERT(completions.size() == 4);
  for (const uint64_t tag : {1, 2, 3}) {
    const IoCompletion& completion = completions[tag];
    EXPECT_WITH(completion.sys_errno == EINVAL || (completion.sys_errno == 0 && completion.done_bytes >= 4095),
                Describe(completion));
  }
  EXPECT_WITH(completions[4].done_bytes == 4096 && HoldsContent(buffer.span(3 * kAlignment, 4096), 0),
              Describe(completions[4]));
}

void QueueIsFullAtItsDepthUntilReaped(const Candidate& candidate) {
  constexpr uint32_t kDepth = 5;  // no power of two: rings round up
  Buffer buffer((kDepth + 1) * kAlignment);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto engine = Make(candidate, kDepth);
  for (int round = 0; round < 20; ++round) {
    for (uint64_t tag = 0; tag < kDepth; ++tag) {
      ASSERT(engine->Queue(Read(file, buffer.span(tag * kAlignment, kAlignment), tag * kAlignment, tag)) ==
             QueueResult::kQueued);
    }
    const IoRequest extra = Read(file, buffer.span(kDepth * kAlignment, kAlignment), 0, 99);
    EXPECT(engine->Queue(extra) == QueueResult::kFull);
    EXPECT(engine->in_flight() == kDepth);
    EXPECT(engine->Submit().ok());
    EXPECT(engine->Queue(extra) == QueueResult::kFull);
    // After some are reaped, there is room for as many.
    std::vector<IoCompletion> two(2);
    auto reaped = engine->Reap(two, 2, std::chrono::seconds(60));
    ASSERT(reaped.ok() && reaped.value() == 2);
    EXPECT(engine->Queue(extra) == QueueResult::kQueued);
    EXPECT(engine->in_flight() == kDepth - 1);
    EXPECT(engine->Submit().ok());
    const auto completions = ReapAll(*engine);
    EXPECT(completions.size() == kDepth - 1 && completions.contains(99));
  }
}

void TagsComeBackUnchangedEvenWhenEqual(const Candidate& candidate) {
  Buffer buffer(4 * kAlignment);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto engine = Make(candidate, 4);
  const std::vector<uint64_t> tags = {0, UINT64_MAX, 7, 7};
  for (size_t i = 0; i < tags.size(); ++i) {
    ASSERT(engine->Queue(Read(file, buffer.span(i * kAlignment, kAlignment), 0, tags[i])) == QueueResult::kQueued);
  }
  EXPECT(engine->Submit().ok());
  std::vector<IoCompletion> out(8);  // more room than there are
  auto reaped = engine->Reap(out, 8, std::chrono::seconds(60));
  ASSERT(reaped.ok() && reaped.value() == 4);
  std::multiset<uint64_t> seen;
  for (size_t i = 0; i < 4; ++i) seen.insert(out[i].tag);
  EXPECT(seen == (std::multiset<uint64_t>{0, UINT64_MAX, 7, 7}));
}

// 4 KiB random reads, 256 in flight, refilled as they complete; each block's content is checked.
void RandomReadsAtDepth256AreRight(const Candidate& candidate, int request_count = 8192) {
  constexpr uint32_t kDepth = 256;
  constexpr size_t kBlock = 4096;
  Buffer buffer(kDepth * kBlock);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto engine = Make(candidate, kDepth);
  std::mt19937_64 random(42);
  std::vector<uint64_t> free_blocks(kDepth);
  for (uint64_t i = 0; i < kDepth; ++i) free_blocks[i] = i;
  std::vector<uint64_t> offset_of(kDepth);
  std::vector<IoCompletion> out(kDepth);
  int started = 0;
  int finished = 0;
  while (finished < request_count) {
    while (started < request_count && !free_blocks.empty()) {
      const uint64_t block = free_blocks.back();
      free_blocks.pop_back();
      offset_of[block] = random() % (kInputBytes / kBlock) * kBlock;
      ASSERT(engine->Queue(Read(file, buffer.span(block * kBlock, kBlock), offset_of[block], block)) ==
             QueueResult::kQueued);
      ++started;
    }
    EXPECT(engine->Submit().ok());
    auto reaped = engine->Reap(out, std::min<size_t>(engine->in_flight(), 16), std::chrono::seconds(60));
    ASSERT(reaped.ok() && reaped.value() > 0);
    for (size_t i = 0; i < reaped.value(); ++i) {
      const uint64_t block = out[i].tag;
      ASSERT(out[i].sys_errno == 0 && out[i].done_bytes == kBlock);
      const std::span<std::byte> bytes = buffer.span(block * kBlock, kBlock);
      if (candidate.moves_bytes) EXPECT(HoldsContent(bytes, offset_of[block]));
      Fill(bytes, 0);
      free_blocks.push_back(block);
      ++finished;
    }
  }
  EXPECT(engine->in_flight() == 0);
}

void EightMebibyteRequestsAtDepthEightAreRight(const Candidate& candidate) {
  constexpr size_t kSize = 8 << 20;
  Buffer buffer(8 * kSize);
  const auto engine = Make(candidate, 8);
  const auto run = [&](const File& file, IoOp op) {
    for (uint64_t i = 0; i < 8; ++i) {
      IoRequest request = Read(file, buffer.span(i * kSize, kSize), i * kSize, i);
      request.op = op;
      EXPECT(engine->Queue(request) == QueueResult::kQueued);
    }
    EXPECT(engine->Submit().ok());
    auto completions = ReapAll(*engine);
    EXPECT(completions.size() == 8);
    for (auto& [tag, completion] : completions) {
      // The kernel gives large buffered requests to threads of its own, and cancels them all when it cannot make the
      // first one right now. An engine reports that, the pump asks again.
      if (completion.sys_errno == ECANCELED) {
        IoRequest request = Read(file, buffer.span(tag * kSize, kSize), tag * kSize, tag);
        request.op = op;
        EXPECT(engine->Queue(request) == QueueResult::kQueued);
        EXPECT(engine->Submit().ok());
        completion = ReapAll(*engine).at(tag);
      }
      EXPECT_WITH(completion.sys_errno == 0 && completion.done_bytes == kSize, Describe(completion));
    }
  };
  const std::string copy = g_scratch.path("copy");
  const File input(g_scratch.input, O_RDONLY, candidate.direct);
  run(input, IoOp::kRead);
  if (candidate.moves_bytes) EXPECT(HoldsContent(buffer.all(), 0));
  const File output(copy, O_CREAT | O_TRUNC | O_RDWR, candidate.direct);
  FP_CHECK(posix_fallocate(output.fd(), 0, 8 * kSize) == 0);
  run(output, IoOp::kWrite);
  Fill(buffer.all(), 0xEE);
  run(output, IoOp::kRead);
  if (candidate.moves_bytes) EXPECT(HoldsContent(buffer.all(), 0));
  unlink(copy.c_str());
}

// The longest request that the kernel does in one go. The memory is one page set mapped many times, the file a hole.
void RequestOfTwoGibibytesLessAPageIsLegal(const Candidate& candidate) {
  if (!candidate.direct) return;  // through the page cache it would take 2 GiB of memory
#if defined(__SANITIZE_THREAD__)
  return;  // TSan would fill 8 GiB of its own memory for the one request
#endif
  constexpr size_t kSize = (size_t{2} << 30) - 4096;
  constexpr size_t kPiece = 16 << 20;
  const int memory = memfd_create("piece", MFD_CLOEXEC);
  FP_CHECK(memory >= 0 && ftruncate(memory, kPiece) == 0);
  void* reserved = mmap(nullptr, kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  FP_CHECK(reserved != MAP_FAILED);
  auto* const bytes = static_cast<std::byte*>(reserved);
  for (size_t offset = 0; offset < kSize; offset += kPiece) {
    FP_CHECK(mmap(bytes + offset, std::min(kPiece, kSize - offset), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                  memory, 0) != MAP_FAILED);
  }
  close(memory);
  bytes[0] = std::byte{1};
  {
    const File file(g_scratch.path("hole"), O_CREAT | O_TRUNC | O_RDWR, true);
    FP_CHECK(ftruncate(file.fd(), off_t{1} << 32) == 0);
    const auto engine = Make(candidate, 1);
    const IoCompletion completion = RunOne(*engine, Read(file, {bytes, kSize}, 4096, 5));
    EXPECT_WITH(completion.sys_errno == 0 && completion.done_bytes == kSize, Describe(completion));
    EXPECT(bytes[0] == std::byte{0});
  }
  munmap(reserved, kSize);
  unlink(g_scratch.path("hole").c_str());
}

void ReadAtTheEndIsShortAndBehindItZero(const Candidate& candidate) {
  if (!candidate.moves_bytes) return;
  Buffer buffer(1 << 20);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto engine = Make(candidate, 4);
  const uint64_t last = AlignDown(kInputBytes - 1, kAlignment);
  IoCompletion completion = RunOne(*engine, Read(file, buffer.span(0, 1 << 20), last, 1));
  EXPECT_WITH(completion.sys_errno == 0 && completion.done_bytes == kInputBytes - last, Describe(completion));
  EXPECT(HoldsContent(buffer.span(0, kInputBytes - last), last));
  completion = RunOne(*engine, Read(file, buffer.span(0, kAlignment), AlignUp(kInputBytes, kAlignment), 2));
  EXPECT_WITH(completion.sys_errno == 0 && completion.done_bytes == 0, Describe(completion));
}

void ErrorsStayWithTheirRequest(const Candidate& candidate) {
  if (!candidate.moves_bytes) return;
  Buffer buffer(16 * kAlignment);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto engine = Make(candidate, 16);
  const int closed = dup(file.fd());  // after the engine, whose own descriptor would take the number
  close(closed);
  for (uint64_t tag = 0; tag < 16; ++tag) {
    const std::span<std::byte> bytes = buffer.span(tag * kAlignment, kAlignment);
    IoRequest request = Read(file, bytes, tag * kAlignment, tag);
    if (tag % 4 == 1) request.fd = closed;
    if (tag % 4 == 2) request.op = IoOp::kWrite;  // the descriptor is read-only
    ASSERT(engine->Queue(request) == QueueResult::kQueued);
  }
  EXPECT(engine->Submit().ok());
  const auto completions = ReapAll(*engine);
  EXPECT(completions.size() == 16);
  for (const auto& [tag, completion] : completions) {
    if (tag % 4 == 1 || tag % 4 == 2) {
      EXPECT_WITH(completion.sys_errno == EBADF, Describe(completion));
      continue;
    }
    EXPECT_WITH(completion.sys_errno == 0 && completion.done_bytes == kAlignment, Describe(completion));
    EXPECT(HoldsContent(buffer.span(tag * kAlignment, kAlignment), tag * kAlignment));
  }
}

void ReapWithNothingInFlightReturnsAtOnce(const Candidate& candidate) {
  const auto engine = Make(candidate, 4);
  std::vector<IoCompletion> out(4);
  const auto start = Clock::now();
  for (const size_t min_count : {0UL, 1UL, 4UL}) {
    auto reaped = engine->Reap(out, min_count, std::chrono::seconds(30));
    EXPECT(reaped.ok() && reaped.value() == 0);
  }
  EXPECT(Clock::now() - start < std::chrono::seconds(5));
}

// Whatever the timing: fewer than min_count come only after the timeout, and then soon.
void ReapHonoursItsTimeout(const Candidate& candidate) {
  constexpr size_t kSize = 8 << 20;
  Buffer buffer(8 * kSize);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto engine = Make(candidate, 8);
  std::vector<IoCompletion> out(8);
  for (const int timeout_ms : {-1, 0, 1, 3, 10}) {
    for (uint64_t i = 0; i < 8; ++i) {
      ASSERT(engine->Queue(Read(file, buffer.span(i * kSize, kSize), i * kSize, i)) == QueueResult::kQueued);
    }
    EXPECT(engine->Submit().ok());
    const auto start = Clock::now();
    auto reaped = engine->Reap(out, 8, milliseconds(timeout_ms));
    const auto elapsed = Clock::now() - start;
    ASSERT(reaped.ok());
    if (reaped.value() < 8) {
      EXPECT(elapsed >= milliseconds(timeout_ms));
      EXPECT_WITH(elapsed < milliseconds(timeout_ms) + std::chrono::seconds(2),
                  std::to_string(std::chrono::duration<double>(elapsed).count()) + " s");
    }
    EXPECT(ReapAll(*engine).size() == 8 - reaped.value());
  }
  // The longest timeout does not overflow into none.
  EXPECT(engine->Queue(Read(file, buffer.span(0, kSize), 0, 1)) == QueueResult::kQueued);
  EXPECT(engine->Submit().ok());
  auto reaped = engine->Reap(out, 1, milliseconds::max());
  EXPECT(reaped.ok() && reaped.value() == 1);
}

// A read that waits until the test writes: io_uring takes pipes too.
void TimeoutPassesWhileNothingCompletes(const Candidate& candidate) {
  if (!candidate.name.starts_with("uring")) return;
  int ends[2];
  FP_CHECK(pipe2(ends, O_CLOEXEC) == 0);
  {
    Buffer buffer(kAlignment);
    const auto engine = Make(candidate, 2);
    const IoRequest request = {
        .op = IoOp::kRead, .fd = ends[0], .buffer = buffer.at(0), .size_bytes = 5, .offset_bytes = 0, .tag = 3};
    ASSERT(engine->Queue(request) == QueueResult::kQueued);
    EXPECT(engine->Submit().ok());
    std::vector<IoCompletion> out(2);
    for (const int timeout_ms : {0, 1, 20, 100}) {
      const auto start = Clock::now();
      auto reaped = engine->Reap(out, 1, milliseconds(timeout_ms));
      const auto elapsed = Clock::now() - start;
      EXPECT(reaped.ok() && reaped.value() == 0);
      EXPECT(elapsed >= milliseconds(timeout_ms) && elapsed < milliseconds(timeout_ms + 2000));
    }
    std::thread writer([&] {
      std::this_thread::sleep_for(milliseconds(20));
      FP_CHECK(write(ends[1], "hello", 5) == 5);
    });
    auto reaped = engine->Reap(out, 1, std::chrono::seconds(60));
    writer.join();
    EXPECT(reaped.ok() && reaped.value() == 1 && out[0].done_bytes == 5 && out[0].tag == 3);
  }
  close(ends[0]);
  close(ends[1]);
}

// With a read that waits until somebody writes, as above.
void TheOwnerIsWokenWhileNothingCompletes(const Candidate& candidate) {
  if (!Contains(candidate.name, "uring")) return;
  int ends[2];
  FP_CHECK(pipe2(ends, O_CLOEXEC) == 0);
  {
    Buffer buffer(kAlignment);
    const auto wakeup = Wakeup::Create().value();
    const auto engine = candidate.create({.name = candidate.name, .queue_depth = 2, .wake_fd = wakeup->fd()}).value();
    const IoRequest request = {
        .op = IoOp::kRead, .fd = ends[0], .buffer = buffer.at(0), .size_bytes = 5, .offset_bytes = 0, .tag = 3};
    ASSERT(engine->Queue(request) == QueueResult::kQueued);
    EXPECT(engine->Submit().ok());
    std::vector<IoCompletion> out(2);
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(20));
      wakeup->Signal();
    });
    for (int round = 0; round < 2; ++round) {  // and as long as it is readable
      auto reaped = engine->Reap(out, 1, std::chrono::hours(1));
      EXPECT(reaped.ok() && reaped.value() == 0 && IsReadable(wakeup->fd()));
    }
    other.join();
    wakeup->Clear();
    EXPECT(!IsReadable(wakeup->fd()));
    FP_CHECK(write(ends[1], "hello", 5) == 5);
    auto reaped = engine->Reap(out, 1, std::chrono::hours(1));
    EXPECT(reaped.ok() && reaped.value() == 1 && out[0].done_bytes == 5 && out[0].tag == 3);
  }
  close(ends[0]);
  close(ends[1]);
}

void WhatIsReadyIsReapedThoughTheOwnerIsWanted(const Candidate& candidate) {
  if (Contains(candidate.name, "cufile")) return;
  constexpr size_t kSize = 1 << 20;
  Buffer buffer(8 * kSize);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto wakeup = Wakeup::Create().value();
  const auto engine = candidate.create({.name = candidate.name, .queue_depth = 8, .wake_fd = wakeup->fd()}).value();
  std::vector<IoCompletion> out(8);
  for (const bool is_wanted : {true, false}) {
    if (is_wanted) wakeup->Signal();
    for (uint64_t i = 0; i < 8; ++i) {
      ASSERT(engine->Queue(Read(file, buffer.span(i * kSize, kSize), i * kSize, i)) == QueueResult::kQueued);
    }
    EXPECT(engine->Submit().ok());
    for (size_t count = 0; count < 8;) {
      auto reaped = engine->Reap(out, 8 - count, std::chrono::hours(1));
      ASSERT(reaped.ok());
      EXPECT(is_wanted || reaped.value() == 8);
      count += reaped.value();
    }
    wakeup->Clear();
    if (candidate.moves_bytes) EXPECT(HoldsContent(buffer.all(), 0));
  }
}

// After the destructor the kernel must not write into the buffers any more.
void DestructionWaitsForRequestsInFlight(const Candidate& candidate) {
  constexpr size_t kSize = 4 << 20;
  Buffer buffer(8 * kSize);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  for (int round = 0; round < 5; ++round) {
    auto engine = Make(candidate, 8);
    for (uint64_t i = 0; i < 8; ++i) {
      ASSERT(engine->Queue(Read(file, buffer.span(i * kSize, kSize), i * kSize, i)) == QueueResult::kQueued);
      if (i == 5) EXPECT(engine->Submit().ok());  // the last two are queued only
    }
    if (round % 2 == 1) {
      std::vector<IoCompletion> one(1);
      EXPECT(engine->Reap(one, 0, milliseconds(0)).ok());
    }
    engine.reset();
    Fill(buffer.all(), 0xAB);
    std::this_thread::sleep_for(milliseconds(10));
    EXPECT(AllEqual(buffer.all(), 0xAB));
  }
}

void NothingIsLeftBehind(const Candidate& candidate) {
  Buffer buffer(8 * kAlignment);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto use = [&] {
    const auto engine = Make(candidate, 8);
    for (uint64_t i = 0; i < 8; ++i) {
      EXPECT(engine->Queue(Read(file, buffer.span(i * kAlignment, kAlignment), 0, i)) == QueueResult::kQueued);
    }
    EXPECT(engine->Submit().ok());
  };
  use();  // what is loaded once (a library) is there from now on
  const size_t descriptors_before = DescriptorCount();
  const size_t threads_before = ThreadCount();
  for (int round = 0; round < 30; ++round) use();
  EXPECT_WITH(DescriptorCount() == descriptors_before, std::to_string(DescriptorCount()));
  // A joined thread stays in /proc a moment longer.
  for (int wait = 0; wait < 100 && ThreadCount() != threads_before; ++wait)
    std::this_thread::sleep_for(milliseconds(10));
  EXPECT_WITH(ThreadCount() == threads_before, std::to_string(ThreadCount()));
}

void OwnerMayChangeBetweenThreads(const Candidate& candidate) {
  constexpr size_t kSize = 1 << 20;
  Buffer buffer(16 * kSize);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto engine = Make(candidate, 16);
  for (int round = 0; round < 4; ++round) {
    Fill(buffer.all(), 0);
    std::thread([&] {
      for (uint64_t i = 0; i < 8; ++i) {
        EXPECT(engine->Queue(Read(file, buffer.span(i * kSize, kSize), i * kSize, i)) == QueueResult::kQueued);
      }
      EXPECT(engine->Submit().ok());
      EXPECT(ReapAll(*engine).size() == 8);
      for (uint64_t i = 8; i < 16; ++i) {
        EXPECT(engine->Queue(Read(file, buffer.span(i * kSize, kSize), i * kSize, i)) == QueueResult::kQueued);
      }
    }).join();
    EXPECT(engine->Submit().ok());
    EXPECT(ReapAll(*engine).size() == 8);
    if (candidate.moves_bytes) EXPECT(HoldsContent(buffer.all(), 0));
  }
}

// Ends by itself after a while, so that a hung child fails the test and does not block it.
int ExitCodeOfChild(const std::function<int()>& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const rlimit no_core = {};
    setrlimit(RLIMIT_CORE, &no_core);
    _exit(body());
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void ForkWithRequestsInFlightHurtsNobody(const Candidate& candidate) {
  constexpr size_t kSize = 2 << 20;
  Buffer buffer(8 * kSize);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  for (int round = 0; round < 4; ++round) {
    Fill(buffer.all(), 0);
    auto engine = Make(candidate, 8);
    for (uint64_t i = 0; i < 8; ++i) {
      ASSERT(engine->Queue(Read(file, buffer.span(i * kSize, kSize), i * kSize, i)) == QueueResult::kQueued);
    }
    EXPECT(engine->Submit().ok());
    const size_t descriptors_in_parent = DescriptorCount();
    const int exit_code = ExitCodeOfChild([&] {
      g_failure_count = 0;
      const bool has_ring = candidate.name.find("uring") != std::string::npos;
      EXPECT(DescriptorCount() == descriptors_in_parent - (has_ring ? 1 : 0));
      engine.reset();
#if defined(__SANITIZE_THREAD__)
      // TSan cannot start threads in the child of a process that had some ("dup thread with used id").
      if (candidate.name.find("threads") != std::string::npos) return g_failure_count == 0 ? 0 : 1;
#endif
      if (!candidate.works_in_forked_child) {
        EXPECT(candidate.create({.name = candidate.name}).status().code() == StatusCode::kUnsupported);
        return g_failure_count == 0 ? 0 : 1;
      }
      Buffer own_buffer(kAlignment);
      const auto own = Make(candidate, 8);
      const IoCompletion completion = RunOne(*own, Read(file, own_buffer.all(), kAlignment, 1));
      EXPECT_WITH(completion.done_bytes == kAlignment, Describe(completion));
      if (candidate.moves_bytes) EXPECT(HoldsContent(own_buffer.all(), kAlignment));
      return g_failure_count == 0 ? 0 : 1;
    });
    EXPECT_WITH(exit_code == 0, "exit code " + std::to_string(exit_code));
    EXPECT(ReapAll(*engine).size() == 8);
    if (candidate.moves_bytes) EXPECT(HoldsContent(buffer.all(), 0));
  }
}

void UseOfAnInheritedEngineAborts(const Candidate& candidate) {
  Buffer buffer(kAlignment);
  const File file(g_scratch.input, O_RDONLY, candidate.direct);
  const auto engine = Make(candidate, 2);
  const auto exit_code = [&](const std::function<void()>& use) {
    return ExitCodeOfChild([&] {
      signal(SIGABRT, SIG_DFL);
      freopen("/dev/null", "w", stderr);  // FP_CHECK says what it found
      use();
      return 0;
    });
  };
  std::vector<IoCompletion> out(1);
  EXPECT(exit_code([&] { engine->Queue(Read(file, {buffer.at(0), kAlignment}, 0, 0)); }) == -SIGABRT);
  EXPECT(exit_code([&] { static_cast<void>(engine->Submit()); }) == -SIGABRT);
  EXPECT(exit_code([&] { static_cast<void>(engine->Reap(out, 0, milliseconds(0))); }) == -SIGABRT);
  EXPECT(RunOne(*engine, Read(file, buffer.all(), 0, 0)).sys_errno == 0);
}

// From now on the kernel refuses this process the calls that reap. False: it has no seccomp filters.
bool DenyReaping() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_getevents, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(uring_abi::kSysEnter), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = std::size(code), .filter = code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
}

void SandboxThatIsEnteredWithRequestsInFlightHangsNobody(const Candidate& candidate) {
  if (!candidate.works_in_forked_child || candidate.name.find("threads") != std::string::npos) return;
  EXPECT(ExitCodeOfChild([&] {
           Buffer buffer(kAlignment);
           const File file(g_scratch.input, O_RDONLY, candidate.direct);
           auto engine = Make(candidate, 2);
           g_failure_count = 0;
           for (uint64_t i = 0; i < 2; ++i) {
             EXPECT(engine->Queue(Read(file, buffer.all(), 0, i)) == QueueResult::kQueued);
             EXPECT(engine->Submit().ok());
           }
           if (!DenyReaping()) return 0;
           engine.reset();
           const auto next = candidate.create({.name = candidate.name, .queue_depth = 2});
           EXPECT(next.ok() ? !candidate.moves_bytes : next.status().code() == StatusCode::kUnsupported);
           return g_failure_count;
         }) == 0);
}

// VmPin of /proc/self/status: what the kernel keeps pinned for this process.
uint64_t PinnedBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "VmPin:") continue;
    uint64_t kibibytes = 0;
    status >> kibibytes;
    return kibibytes * 1024;
  }
  return 0;
}

constexpr uint64_t kOneMemoryBytes = 64 * kAlignment;

// Writes and reads back blocks of the memory that the engine was told of, with a request among them that fails, and
// drops the engine with requests in flight. Returns the bytes that were pinned for it.
uint64_t UseOneMemory(const Candidate& candidate) {
  constexpr uint64_t kCount = kOneMemoryBytes / kAlignment;
  Buffer buffer(kOneMemoryBytes);
  Fill(buffer.all(), 0);
  const uint64_t pinned_before = PinnedBytes();
  const File file(g_scratch.path("memory"), O_CREAT | O_RDWR, candidate.direct);
  auto made = candidate.create({.name = candidate.name, .queue_depth = kCount, .memory = buffer.all()});
  if (!EXPECT_WITH(made.ok(), made.status().message())) return 0;
  const std::unique_ptr<IoEngine> engine = std::move(made).value();
  const uint64_t pinned_bytes = PinnedBytes() - pinned_before;
  const auto run_all = [&](IoOp op) {
    for (uint64_t i = 0; i < kCount; ++i) {
      IoRequest request = Read(file, buffer.span(i * kAlignment, kAlignment), i * kAlignment, i);
      request.op = op;
      if (i == 5) request.fd = -1;
      EXPECT(engine->Queue(request) == QueueResult::kQueued);
    }
    EXPECT(engine->Submit().ok());
    for (const auto& [tag, completion] : ReapAll(*engine)) {
      const bool failed = completion.sys_errno == EBADF;
      const bool moved = completion.sys_errno == 0 && completion.done_bytes == kAlignment;
      EXPECT_WITH(candidate.moves_bytes && tag == 5 ? failed : moved, Describe(completion));
    }
  };
  for (uint64_t i = 0; i < kCount; ++i) Fill(buffer.span(i * kAlignment, kAlignment), static_cast<int>(i + 1));
  run_all(IoOp::kWrite);
  Fill(buffer.all(), 0);
  run_all(IoOp::kRead);
  for (uint64_t i = 0; candidate.moves_bytes && i < kCount; ++i) {
    EXPECT(AllEqual(buffer.span(i * kAlignment, kAlignment), i == 5 ? 0 : static_cast<int>(i + 1)));
  }
  EXPECT(engine->Queue(Read(file, buffer.span(0, kAlignment), 0, 0)) == QueueResult::kQueued);
  EXPECT(engine->Submit().ok());
  return pinned_bytes;
}

// As a process that has no right to lock memory.
bool GiveUpLockedMemory() {
  const rlimit none = {};
  __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  __user_cap_data_struct rights[2] = {};
  if (setrlimit(RLIMIT_MEMLOCK, &none) != 0 || syscall(SYS_capget, &header, rights) != 0) return false;
  rights[CAP_TO_INDEX(CAP_IPC_LOCK)].effective &= ~CAP_TO_MASK(CAP_IPC_LOCK);
  return syscall(SYS_capset, &header, rights) == 0;
}

void MemoryThatIsKnownBeforehandWorks(const Candidate& candidate) {
  const uint64_t pinned_bytes = UseOneMemory(candidate);
  if (candidate.name == "uring") {
    rlimit limit = {};
    FP_CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    EXPECT_WITH(pinned_bytes == kOneMemoryBytes || limit.rlim_cur < kOneMemoryBytes, std::to_string(pinned_bytes));
    EXPECT(ExitCodeOfChild([&] {
             FP_CHECK(GiveUpLockedMemory());
             if (!candidate.create({.name = candidate.name}).ok()) return 0;  // a kernel that counts the ring itself
             g_failure_count = 0;
             EXPECT(UseOneMemory(candidate) == 0);
             return g_failure_count;
           }) == 0);
  }
  unlink(g_scratch.path("memory").c_str());
}

// A timer whose signals interrupt every system call that can be interrupted.
void SignalsDoNotShow(const Candidate& candidate) {
  struct sigaction ignore = {};
  ignore.sa_handler = [](int) {};  // no SA_RESTART
  struct sigaction before = {};
  FP_CHECK(sigaction(SIGALRM, &ignore, &before) == 0);
  itimerval timer = {.it_interval = {.tv_sec = 0, .tv_usec = 200}, .it_value = {.tv_sec = 0, .tv_usec = 200}};
  FP_CHECK(setitimer(ITIMER_REAL, &timer, nullptr) == 0);
  RandomReadsAtDepth256AreRight(candidate, 2048);
  EightMebibyteRequestsAtDepthEightAreRight(candidate);
  TimeoutPassesWhileNothingCompletes(candidate);
  TheOwnerIsWokenWhileNothingCompletes(candidate);
  WhatIsReadyIsReapedThoughTheOwnerIsWanted(candidate);
  timer = {};
  FP_CHECK(setitimer(ITIMER_REAL, &timer, nullptr) == 0);
  FP_CHECK(sigaction(SIGALRM, &before, nullptr) == 0);
}

void RunAll(const Candidate& candidate) {
  NameAndLimitsAreAsAsked(candidate);
  EveryDepthWorks(candidate);
  SizesAroundTheAlignmentAreWrittenAndReadBack(candidate);
  MisalignedDirectRequestsCompleteEitherWay(candidate);
  QueueIsFullAtItsDepthUntilReaped(candidate);
  TagsComeBackUnchangedEvenWhenEqual(candidate);
  RandomReadsAtDepth256AreRight(candidate);
  EightMebibyteRequestsAtDepthEightAreRight(candidate);
  RequestOfTwoGibibytesLessAPageIsLegal(candidate);
  ReadAtTheEndIsShortAndBehindItZero(candidate);
  ErrorsStayWithTheirRequest(candidate);
  ReapWithNothingInFlightReturnsAtOnce(candidate);
  ReapHonoursItsTimeout(candidate);
  TimeoutPassesWhileNothingCompletes(candidate);
  TheOwnerIsWokenWhileNothingCompletes(candidate);
  WhatIsReadyIsReapedThoughTheOwnerIsWanted(candidate);
  DestructionWaitsForRequestsInFlight(candidate);
  NothingIsLeftBehind(candidate);
  OwnerMayChangeBetweenThreads(candidate);
  ForkWithRequestsInFlightHurtsNobody(candidate);
  UseOfAnInheritedEngineAborts(candidate);
  SandboxThatIsEnteredWithRequestsInFlightHangsNobody(candidate);
  MemoryThatIsKnownBeforehandWorks(candidate);
  SignalsDoNotShow(candidate);
}

void CreateEngineRefusesWhatMakesNoSense() {
  g_engine = "CreateEngine";
  const auto refusal = [](const EngineOptions& options) {
    auto made = CreateEngine(options);
    return made.ok() ? Status::Ok() : made.status();
  };
  for (const char* name : {"", "uring2", "fault:", "fault:fault:null", "auto", "null-buffered", "uring "}) {
    const Status status = refusal({.name = name});
    EXPECT_WITH(status.code() == StatusCode::kInvalidArgument, name);
    EXPECT_WITH(status.message().find("threads-buffered") != std::string::npos, status.message());
  }
  EXPECT(refusal({.name = "null", .queue_depth = 0}).code() == StatusCode::kInvalidArgument);
  EXPECT(refusal({.name = "null", .queue_depth = 4097}).code() == StatusCode::kInvalidArgument);
  const std::vector<std::string> names = EngineNames();
  EXPECT(std::set<std::string>(names.begin(), names.end()).size() == names.size());
  EXPECT(!names.empty() && names.back() == "null");
}

// Runs all tests of one candidate, or says why it is skipped.
enum class Outcome : uint8_t { kRan, kSkipped };
Outcome RunOrSkip(const Candidate& candidate) {
  g_engine = candidate.name;
  std::string reason;
  if (candidate.direct && !g_scratch.takes_direct) {
    reason = "the file system of " + g_scratch.directory + " refuses O_DIRECT";
  } else if (auto made = candidate.create({.name = candidate.name, .queue_depth = 4096}); !made.ok()) {
    reason = made.status().message();
    EXPECT_WITH(!candidate.must_run, reason);
    EXPECT_WITH(made.status().code() == StatusCode::kUnsupported || made.status().code() == StatusCode::kNoMemory,
                reason);
  }
  if (!reason.empty()) {
    std::printf("%s: skipped: %s\n", candidate.name.c_str(), reason.c_str());
    return Outcome::kSkipped;
  }
  const auto start = Clock::now();
  RunAll(candidate);
  std::printf("%s: ran for %.1f s\n", candidate.name.c_str(),
              std::chrono::duration<double>(Clock::now() - start).count());
  std::fflush(stdout);
  return Outcome::kRan;
}

int Main(int argc, char** argv) {
  std::string made_here;
  if (argc > 1) {
    g_scratch.directory = argv[1];
  } else {
    made_here = "engine_contract_test.XXXXXX";
    if (mkdtemp(made_here.data()) == nullptr) {
      std::printf("mkdtemp in the current directory: %s\n", std::strerror(errno));
      return 1;
    }
    g_scratch.directory = made_here;
  }
  MakeInput();
  CreateEngineRefusesWhatMakesNoSense();
  int ran_count = 0;
  for (const Candidate& candidate : Candidates()) {
    if (argc > 2 && candidate.name != argv[2]) continue;
    if (RunOrSkip(candidate) == Outcome::kRan) ++ran_count;
  }
  for (const char* name : {"input", "sizes"}) unlink(g_scratch.path(name).c_str());
  if (!made_here.empty()) rmdir(made_here.c_str());
  if (ran_count == 0) {
    std::printf("no engine was tested\n");
    return 1;
  }
  std::printf("%d engines, %d failures\n", ran_count, g_failure_count);
  return g_failure_count == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) { return fastpersist::Main(argc, argv); }
