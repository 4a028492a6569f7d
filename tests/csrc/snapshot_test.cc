// The bytes of a save between save() and the writer (transfer/snapshot.h): changes after Capture() never reach the
// file, however writer and barrier meet, with much, little and no memory; and nobody waits for ever.
#include "transfer/snapshot.h"

#include <sys/wait.h>

#include <atomic>
#include <future>
#include <thread>

#include "testing.h"

namespace fastpersist {
namespace {

constexpr uint64_t kBlock = Arena::kBlockBytes;
constexpr uint64_t kPlenty = uint64_t{1} << 30;
const Snapshot::Poll kNoPoll;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRounds = 15;
#else
constexpr int kRounds = 20;
#endif

std::shared_ptr<Arena> MakeArena(uint64_t limit_bytes) { return std::make_shared<Arena>(limit_bytes); }

uint64_t UsedBytes(Arena& arena) {
  const std::lock_guard lock(arena.mutex());
  return arena.used_bytes();
}

uint64_t Remaining(Snapshot& snapshot, SourceKind kind) {
  return snapshot.counts().remaining_bytes[static_cast<size_t>(kind)];
}

uint64_t Copied(Snapshot& snapshot, SourceKind kind) {
  return snapshot.counts().copied_bytes[static_cast<size_t>(kind)];
}

void Scribble(Bytes& bytes) { std::fill(bytes.begin(), bytes.end(), std::byte{0xDB}); }

// Acts as the writer: takes a source to its end, at most max_bytes at a time.
Status TakeSource(Snapshot& snapshot, uint32_t index, uint64_t size_bytes, uint64_t max_bytes, Bytes& into) {
  for (uint64_t done_bytes = 0; done_bytes < size_bytes;) {
    auto taken = snapshot.Take(index, done_bytes, max_bytes, kNoPoll);
    if (!taken.ok()) return taken.status();
    const auto bytes = taken.value().host_bytes();
    EXPECT(!bytes.empty() && bytes.size() <= max_bytes && done_bytes + bytes.size() <= size_bytes);
    into.insert(into.end(), bytes.begin(), bytes.end());
    done_bytes += bytes.size();
    snapshot.EndLease();
  }
  return Status::Ok();
}

Bytes TakeSource(Snapshot& snapshot, uint32_t index, uint64_t size_bytes) {
  Bytes into;
  EXPECT_OK(TakeSource(snapshot, index, size_bytes, kBlock, into));
  return into;
}

// Waits until another thread has met `condition`. Its step after that cannot be seen from outside: the tests hold even
// if it comes late, but then they may prove less.
template <class Condition>
void WaitUntil(Condition condition) {
  const auto start = Clock::now();
  while (!condition() && SecondsSince(start) < 30) std::this_thread::sleep_for(std::chrono::microseconds(20));
  EXPECT(condition());
}

// --- One thread

void TheWriterAloneReadsFromWhereItIs() {
  const auto arena = MakeArena(kPlenty);
  Snapshot snapshot(arena);
  const Bytes bytes = RandomBytes(3 * kBlock + 5, 1);
  EXPECT(snapshot.Add(bytes.data(), bytes.size(), SourceKind::kStable) == 0);
  EXPECT(snapshot.Add(bytes.data(), 10, SourceKind::kConstant) == 1);
  uint64_t done_bytes = 0;
  while (done_bytes < bytes.size()) {
    const auto span = Must(snapshot.Take(0, done_bytes, kBlock, kNoPoll)).host_bytes();
    EXPECT(span.data() == bytes.data() + done_bytes && !span.empty() && span.size() <= kBlock);
    done_bytes += span.size();
    snapshot.EndLease();
  }
  EXPECT(done_bytes == bytes.size());
  EXPECT(TakeSource(snapshot, 1, 10) == Bytes(bytes.begin(), bytes.begin() + 10));
  const auto counts = snapshot.counts();
  EXPECT(counts.taken_bytes == bytes.size() + 10);
  for (size_t kind = 0; kind < kSourceKindCount; ++kind) {
    EXPECT(counts.remaining_bytes[kind] == 0 && counts.copied_bytes[kind] == 0);
  }
  const std::lock_guard lock(arena->mutex());
  EXPECT(arena->mapped_bytes() == 0);
}

void OnlyTheKindThatIsAskedForIsCaptured() {
  const auto arena = MakeArena(kPlenty);
  Snapshot snapshot(arena);
  Bytes bytes[] = {RandomBytes(1000, 1), RandomBytes(70000, 2), RandomBytes(kBlock + 1, 3)};
  const Bytes before[] = {bytes[0], bytes[1], bytes[2]};
  const SourceKind kinds[] = {SourceKind::kStable, SourceKind::kVolatile, SourceKind::kConstant};
  for (size_t i = 0; i < 3; ++i) snapshot.Add(bytes[i].data(), bytes[i].size(), kinds[i]);
  EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, false, kNoPoll));
  EXPECT(Remaining(snapshot, SourceKind::kVolatile) == 0 && Copied(snapshot, SourceKind::kVolatile) == 70000);
  EXPECT(Remaining(snapshot, SourceKind::kStable) == 1000 && Copied(snapshot, SourceKind::kStable) == 0);
  EXPECT(Remaining(snapshot, SourceKind::kConstant) == kBlock + 1);
  Scribble(bytes[1]);
  EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
  Scribble(bytes[0]);
  for (uint32_t i = 0; i < 3; ++i) EXPECT(TakeSource(snapshot, i, bytes[i].size()) == before[i]);
  EXPECT(Copied(snapshot, SourceKind::kConstant) == 0 && Remaining(snapshot, SourceKind::kConstant) == 0);
  snapshot.Close();
  EXPECT(UsedBytes(*arena) == 0);
}

void WhatTheWriterHasPassedIsNotCopied() {
  const auto arena = MakeArena(kPlenty);
  Snapshot snapshot(arena, /*thread_count=*/3);
  Bytes bytes = RandomBytes(5 * kBlock, 1);
  const Bytes before = bytes;
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kStable);
  Bytes written;
  uint64_t done_bytes = 0;
  while (done_bytes < 2 * kBlock) {
    const auto span = Must(snapshot.Take(0, done_bytes, 300000, kNoPoll)).host_bytes();
    written.insert(written.end(), span.begin(), span.end());
    done_bytes += span.size();
    snapshot.EndLease();
  }
  EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
  EXPECT(Copied(snapshot, SourceKind::kStable) == bytes.size() - done_bytes);
  Scribble(bytes);
  while (done_bytes < bytes.size()) {
    const auto span = Must(snapshot.Take(0, done_bytes, 300000, kNoPoll)).host_bytes();
    written.insert(written.end(), span.begin(), span.end());
    done_bytes += span.size();
    snapshot.EndLease();
  }
  EXPECT(written == before);
  EXPECT(UsedBytes(*arena) <= kBlock);  // blocks come back as they are written, except for the one being filled
}

void EmptySourcesAreNothing() {
  Snapshot snapshot(MakeArena(0));
  snapshot.Add(nullptr, 0, SourceKind::kStable);
  snapshot.Add(nullptr, 0, SourceKind::kVolatile);
  EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, true, kNoPoll));
  EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
  EXPECT_OK(Snapshot(MakeArena(0)).Capture(SourceKind::kStable, true, kNoPoll));
}

void ManySmallSourcesShareABlock() {
  const auto arena = MakeArena(kPlenty);
  Snapshot snapshot(arena);
  std::vector<Bytes> sources;
  for (uint64_t i = 0; i < 5000; ++i) sources.push_back(RandomBytes(i % 70, i));
  for (const Bytes& source : sources) snapshot.Add(source.data(), source.size(), SourceKind::kVolatile);
  EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, false, kNoPoll));
  EXPECT(UsedBytes(*arena) == kBlock);
  const std::vector<Bytes> before = sources;
  for (Bytes& source : sources) Scribble(source);
  for (uint32_t i = 0; i < sources.size(); ++i) {
    if (TakeSource(snapshot, i, sources[i].size()) != before[i]) EXPECT_WITH(false, std::to_string(i));
  }
}

void WithoutRoomACaptureThatMayNotWaitReturnsAndLosesNothing() {
  for (const uint64_t limit_bytes : {uint64_t{0}, kBlock}) {
    Snapshot snapshot(MakeArena(limit_bytes));
    const Bytes bytes = RandomBytes(3 * kBlock, 1);
    snapshot.Add(bytes.data(), bytes.size(), SourceKind::kVolatile);
    for (int i = 0; i < 3; ++i) EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, false, kNoPoll));
    EXPECT(Remaining(snapshot, SourceKind::kVolatile) == bytes.size() - limit_bytes);
    EXPECT(TakeSource(snapshot, 0, bytes.size()) == bytes);
  }
}

void WhatIsLeftOutIsNeitherCopiedNorKept() {
  const auto arena = MakeArena(kPlenty);
  Snapshot snapshot(arena);
  Bytes bytes[] = {RandomBytes(3 * kBlock, 1), RandomBytes(2 * kBlock + 3, 2), RandomBytes(100, 3)};
  const Bytes before[] = {bytes[0], bytes[1], bytes[2]};
  snapshot.Add(bytes[0].data(), bytes[0].size(), SourceKind::kStable);
  snapshot.Add(bytes[1].data(), bytes[1].size(), SourceKind::kVolatile);
  snapshot.Add(bytes[2].data(), bytes[2].size(), SourceKind::kVolatile);
  EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, true, kNoPoll));
  const uint64_t used_bytes = UsedBytes(*arena);
  snapshot.Narrow(0, 10, kBlock + 10);              // not copied yet
  snapshot.Narrow(1, kBlock + 500, kBlock + 1000);  // copied, and one of the blocks is free now
  snapshot.Narrow(2, 100, 100);
  EXPECT(Remaining(snapshot, SourceKind::kStable) == kBlock);
  EXPECT(UsedBytes(*arena) < used_bytes);
  EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
  EXPECT(Copied(snapshot, SourceKind::kStable) == kBlock);
  Scribble(bytes[0]);
  Scribble(bytes[1]);
  EXPECT(TakeSource(snapshot, 0, kBlock) == Bytes(before[0].begin() + 10, before[0].begin() + 10 + kBlock));
  EXPECT(TakeSource(snapshot, 1, 500) == Bytes(before[1].begin() + kBlock + 500, before[1].begin() + kBlock + 1000));
  snapshot.Close();
  snapshot.Narrow(0, 0, 1);  // nothing is left to be narrowed
  EXPECT(UsedBytes(*arena) == 0);
}

void AGateWithoutMemoryGoesWhenWhatItWaitsForIsLeftOut() {
  Snapshot snapshot(MakeArena(0));
  const Bytes stable = RandomBytes(100000, 1);
  snapshot.Add(stable.data(), stable.size(), SourceKind::kStable);
  auto gate = std::async(std::launch::async, [&] { return snapshot.Capture(SourceKind::kStable, true, kNoPoll); });
  EXPECT(gate.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  snapshot.Narrow(0, 0, 0);
  EXPECT_OK(gate.get());
}

// --- Writer and gate

// All kinds of sources, sizes, leases and moments: the writer takes the old bytes, although each kind is overwritten as
// soon as its capture returns.
void WriterAndGateMeetAnywhere(uint64_t limit_bytes) {
  for (int round = 0; round < kRounds; ++round) {
    std::mt19937 random(static_cast<uint32_t>(round));
    const auto arena = MakeArena(limit_bytes);
    Snapshot snapshot(arena);
    std::vector<Bytes> sources;
    std::vector<SourceKind> kinds;
    const size_t count = 1 + random() % 12;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t sizes[] = {random() % 100, random() % 100000, random() % (3 * kBlock),
                                (1 + random() % 2) * kBlock};
      sources.push_back(RandomBytes(sizes[random() % 4], random()));
      kinds.push_back(static_cast<SourceKind>(random() % kSourceKindCount));
    }
    std::vector<Bytes> before = sources;
    for (size_t i = 0; i < count; ++i) snapshot.Add(sources[i].data(), sources[i].size(), kinds[i]);
    std::vector<std::pair<uint64_t, uint64_t>> narrowed(count);  // what the writer wants in the end
    for (size_t i = 0; i < count; ++i) {
      const uint64_t one = random() % (sources[i].size() + 1);
      const uint64_t other = random() % (sources[i].size() + 1);
      const bool is_whole = random() % 2 == 0;
      narrowed[i] = {is_whole ? 0 : std::min(one, other), is_whole ? sources[i].size() : std::max(one, other)};
      before[i] = Bytes(before[i].begin() + static_cast<ptrdiff_t>(narrowed[i].first),
                        before[i].begin() + static_cast<ptrdiff_t>(narrowed[i].second));
    }
    const bool narrows_late = random() % 2 == 0;
    const auto scribble = [&](SourceKind kind) {
      for (size_t i = 0; i < count; ++i) {
        if (kinds[i] == kind) Scribble(sources[i]);
      }
    };
    const uint64_t max_bytes = 1 + random() % (kBlock / 2);
    const std::chrono::microseconds pause(random() % 1500);
    std::vector<Bytes> written(count);
    std::thread writer([&] {
      const auto narrow = [&](uint32_t i) { snapshot.Narrow(i, narrowed[i].first, narrowed[i].second); };
      for (uint32_t i = 0; i < count && !narrows_late; ++i) narrow(i);
      for (uint32_t i = 0; i < count; ++i) {
        if (narrows_late) narrow(i);
        EXPECT_OK(TakeSource(snapshot, i, before[i].size(), max_bytes, written[i]));
      }
    });
    (void)snapshot.Capture(SourceKind::kVolatile, false, kNoPoll);
    EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, true, kNoPoll));
    EXPECT(Remaining(snapshot, SourceKind::kVolatile) == 0);
    scribble(SourceKind::kVolatile);
    std::this_thread::sleep_for(pause);
    EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
    EXPECT(Remaining(snapshot, SourceKind::kStable) == 0);
    scribble(SourceKind::kStable);
    writer.join();
    for (size_t i = 0; i < count; ++i) {
      EXPECT_WITH(written[i] == before[i], "round " + std::to_string(round) + ", source " + std::to_string(i));
    }
    EXPECT(Copied(snapshot, SourceKind::kConstant) == 0);
    EXPECT(UsedBytes(*arena) <= limit_bytes);
    snapshot.Close();
    EXPECT(UsedBytes(*arena) == 0);
  }
}

void WriterAndGateMeetWithPlentyOfMemory() { WriterAndGateMeetAnywhere(kPlenty); }
void WriterAndGateMeetWithTwoBlocks() { WriterAndGateMeetAnywhere(2 * kBlock); }
void WriterAndGateMeetWithOneBlock() { WriterAndGateMeetAnywhere(kBlock); }
void WriterAndGateMeetWithNoMemory() { WriterAndGateMeetAnywhere(0); }

void SeveralGatesAtOnceAreAllKept() {
  for (int round = 0; round < kRounds; ++round) {
    Snapshot snapshot(MakeArena(round % 2 == 0 ? kPlenty : kBlock), /*thread_count=*/2);
    Bytes stable = RandomBytes(4 * kBlock + 17, 1);
    Bytes changing = RandomBytes(kBlock + 17, 2);
    const Bytes before = stable;
    const Bytes changing_before = changing;
    snapshot.Add(stable.data(), stable.size(), SourceKind::kStable);
    snapshot.Add(changing.data(), changing.size(), SourceKind::kVolatile);
    std::atomic<int> passed = 0;
    std::vector<std::thread> gates;
    for (int i = 0; i < 3; ++i) {
      gates.emplace_back([&] {
        EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, true, kNoPoll));
        EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
        EXPECT(Remaining(snapshot, SourceKind::kStable) == 0 && Remaining(snapshot, SourceKind::kVolatile) == 0);
        if (++passed == 3) {
          Scribble(stable);
          Scribble(changing);
        }
      });
    }
    EXPECT(TakeSource(snapshot, 0, stable.size()) == before);
    EXPECT(TakeSource(snapshot, 1, changing.size()) == changing_before);
    for (std::thread& gate : gates) gate.join();
  }
}

void AGateWithoutMemoryWaitsForTheWriterAndNoLonger() {
  Snapshot snapshot(MakeArena(0));
  const Bytes stable = RandomBytes(100000, 1);
  const Bytes constant = RandomBytes(1000, 2);
  snapshot.Add(stable.data(), stable.size(), SourceKind::kStable);
  snapshot.Add(constant.data(), constant.size(), SourceKind::kConstant);
  auto gate = std::async(std::launch::async, [&] { return snapshot.Capture(SourceKind::kStable, true, kNoPoll); });
  Bytes written;
  EXPECT(gate.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  EXPECT_OK(TakeSource(snapshot, 0, stable.size(), 1 << 20, written));
  EXPECT_OK(gate.get());  // though the constant is still unwritten
}

void ALeaseHoldsTheGateUntilItIsDone() {
  Snapshot snapshot(MakeArena(kPlenty));
  const Bytes bytes = RandomBytes(kBlock, 1);
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kStable);
  const auto span = Must(snapshot.Take(0, 0, 4096, kNoPoll)).host_bytes();
  auto gate = std::async(std::launch::async, [&] { return snapshot.Capture(SourceKind::kStable, true, kNoPoll); });
  WaitUntil([&] { return Copied(snapshot, SourceKind::kStable) == bytes.size() - span.size(); });
  EXPECT(gate.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  snapshot.EndLease();
  EXPECT_OK(gate.get());
}

void ACaptureThatMayNotWaitDoesNotWaitForOneThatDoes() {
  Snapshot snapshot(MakeArena(0));
  const Bytes bytes = RandomBytes(kBlock, 1);
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kStable);
  std::atomic<bool> polled = false;
  auto gate = std::async(std::launch::async, [&] {
    return snapshot.Capture(SourceKind::kStable, true, [&] {
      polled = true;
      return Status::Ok();
    });
  });
  WaitUntil([&] { return polled.load(); });
  auto hasty = std::async(std::launch::async, [&] { return snapshot.Capture(SourceKind::kStable, false, kNoPoll); });
  const bool returned = hasty.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
  EXPECT(returned);
  snapshot.Close();
  EXPECT_OK(gate.get());
  EXPECT_OK(hasty.get());
}

void BlocksOfOneSaveServeTheNext() {
  const auto arena = MakeArena(2 * kBlock);
  Snapshot first(arena);
  Snapshot second(arena);
  Bytes bytes[] = {RandomBytes(2 * kBlock, 1), RandomBytes(2 * kBlock, 2)};
  const Bytes before[] = {bytes[0], bytes[1]};
  first.Add(bytes[0].data(), bytes[0].size(), SourceKind::kVolatile);
  second.Add(bytes[1].data(), bytes[1].size(), SourceKind::kVolatile);
  EXPECT_OK(first.Capture(SourceKind::kVolatile, true, kNoPoll));
  Scribble(bytes[0]);
  auto gate = std::async(std::launch::async, [&] {
    const Status status = second.Capture(SourceKind::kVolatile, true, kNoPoll);
    Scribble(bytes[1]);
    return status;
  });
  EXPECT(TakeSource(first, 0, bytes[0].size()) == before[0]);
  first.Close();
  EXPECT_OK(gate.get());  // nobody has written a byte of the second
  EXPECT(TakeSource(second, 0, bytes[1].size()) == before[1]);
}

// --- Giving up

void AnErrorOfPollEndsTheWaitAndOnlyThat() {
  Snapshot snapshot(MakeArena(kBlock));
  Bytes bytes = RandomBytes(3 * kBlock, 1);
  const Bytes before = bytes;
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kStable);
  const auto enough = [] { return Status::Error(StatusCode::kCancelled, "enough"); };
  EXPECT(snapshot.Capture(SourceKind::kStable, true, enough).message() == "enough");
  EXPECT(Remaining(snapshot, SourceKind::kStable) == 2 * kBlock);
  Bytes written;
  std::thread writer([&] { EXPECT_OK(TakeSource(snapshot, 0, before.size(), 100000, written)); });
  EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
  Scribble(bytes);
  writer.join();
  EXPECT(written == before);
}

void AnErrorOfPollEndsAPacedWriter() {
  Snapshot snapshot(MakeArena(0));
  const Bytes bytes = RandomBytes(32 << 20, 1);
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kStable);
  snapshot.Pace({}, std::chrono::hours(1));
  Status status;
  for (uint64_t done_bytes = 0; status.ok() && done_bytes < bytes.size();) {
    auto taken = snapshot.Take(0, done_bytes, 1 << 20, [] { return Status::Error(StatusCode::kCancelled, "enough"); });
    status = taken.ok() ? Status::Ok() : taken.status();
    if (!taken.ok()) break;
    done_bytes += taken.value().size_bytes;
    snapshot.EndLease();
  }
  EXPECT(status.message() == "enough");
}

void CloseLetsEverybodyGo() {
  Snapshot snapshot(MakeArena(0));
  const Bytes bytes = RandomBytes(kBlock, 1);
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kStable);
  std::vector<std::future<Status>> gates;
  for (int i = 0; i < 3; ++i) {
    gates.push_back(
        std::async(std::launch::async, [&] { return snapshot.Capture(SourceKind::kStable, true, kNoPoll); }));
  }
  EXPECT(gates[0].wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  snapshot.Close();
  for (auto& gate : gates) EXPECT_OK(gate.get());
  EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
  EXPECT(snapshot.Take(0, 0, 100, kNoPoll).status().code() == StatusCode::kCancelled);
  snapshot.Close();
}

// After Close() nobody reads the sources, and no block is out: both memories may go.
void CloseInTheMiddleOfCopyingIsTheEndOfIt() {
  for (int round = 0; round < kRounds; ++round) {
    const auto arena = MakeArena(kPlenty);
    Snapshot snapshot(arena);
    auto bytes = std::make_unique<Bytes>(RandomBytes(4 * kBlock, 1));
    snapshot.Add(bytes->data(), bytes->size(), SourceKind::kStable);
    std::thread gate([&] { EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll)); });
    if (round % 2 == 0) WaitUntil([&] { return Copied(snapshot, SourceKind::kStable) > 0; });
    snapshot.Close();
    EXPECT(UsedBytes(*arena) == 0);
    bytes.reset();
    gate.join();
    EXPECT(UsedBytes(*arena) == 0);
  }
}

void CloseLeavesTheWriterWhatItLooksAt() {
  const auto arena = MakeArena(kBlock);
  Snapshot snapshot(arena);
  const Bytes bytes = RandomBytes(kBlock, 1);
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kVolatile);
  EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, true, kNoPoll));
  const auto span = Must(snapshot.Take(0, 0, 4096, kNoPoll)).host_bytes();
  snapshot.Close();
  Snapshot next(arena);
  const Bytes other = RandomBytes(kBlock, 2);
  next.Add(other.data(), other.size(), SourceKind::kVolatile);
  EXPECT_OK(next.Capture(SourceKind::kVolatile, false, kNoPoll));  // would overwrite it
  EXPECT(std::memcmp(span.data(), bytes.data(), span.size()) == 0);
  snapshot.EndLease();
  EXPECT_OK(next.Capture(SourceKind::kVolatile, false, kNoPoll));
  EXPECT(Remaining(next, SourceKind::kVolatile) == 0);
  EXPECT(snapshot.Take(0, span.size(), 1, kNoPoll).status().code() == StatusCode::kCancelled);
}

void CloseAtAnyMomentStopsTheWriter() {
  for (int round = 0; round < kRounds; ++round) {
    const auto arena = MakeArena(kPlenty);
    Snapshot snapshot(arena);
    Bytes bytes = RandomBytes(4 * kBlock, 1);
    snapshot.Add(bytes.data(), bytes.size(), round % 3 == 0 ? SourceKind::kStable : SourceKind::kVolatile);
    EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, true, kNoPoll));
    Bytes written;
    std::thread writer([&] { (void)TakeSource(snapshot, 0, bytes.size(), 50000, written); });
    WaitUntil([&] { return snapshot.counts().taken_bytes > 0; });
    snapshot.Close();
    writer.join();
    EXPECT(std::equal(written.begin(), written.end(), bytes.begin()));
    EXPECT(UsedBytes(*arena) == 0);
  }
}

void AForkedChildLetsTheParentsSaveAlone() {
  const auto arena = MakeArena(kPlenty);
  auto snapshot = std::make_unique<Snapshot>(arena);
  Bytes bytes = RandomBytes(kBlock, 1);
  const Bytes before = bytes;
  snapshot->Add(bytes.data(), bytes.size(), SourceKind::kVolatile);
  EXPECT_OK(snapshot->Capture(SourceKind::kVolatile, true, kNoPoll));
  Scribble(bytes);
  const pid_t child = fork();
  if (child == 0) {
    snapshot.reset();
    _exit(0);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT(TakeSource(*snapshot, 0, bytes.size()) == before);
}

// --- Pace

void APacedWriterDoesNotEndTooEarly() {
  Snapshot snapshot(MakeArena(0));
  const Bytes bytes(24 << 20);
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kConstant);
  snapshot.Pace({}, std::chrono::milliseconds(300));
  const auto start = Clock::now();
  (void)TakeSource(snapshot, 0, bytes.size());
  // It reads the clock once every 8 MiB, so the last third may come at once.
  EXPECT_WITH(SecondsSince(start) >= 0.19, std::to_string(SecondsSince(start)));
}

void APacedWriterDoesNotBeginTooEarly() {
  Snapshot snapshot(MakeArena(0));
  const Bytes bytes(1 << 20);
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kConstant);
  snapshot.Pace(std::chrono::milliseconds(200), std::chrono::milliseconds(1));
  const auto start = Clock::now();
  (void)TakeSource(snapshot, 0, bytes.size());
  EXPECT_WITH(SecondsSince(start) >= 0.19, std::to_string(SecondsSince(start)));
}

void WhoWaitsEndsThePace() {
  for (const bool by_gate : {true, false}) {
    Snapshot snapshot(MakeArena(0));
    Bytes bytes = RandomBytes(24 << 20, 1);
    snapshot.Add(bytes.data(), bytes.size(), SourceKind::kStable);
    snapshot.Pace({}, std::chrono::hours(1));
    std::thread writer([&] { (void)TakeSource(snapshot, 0, bytes.size()); });
    const auto start = Clock::now();
    if (by_gate) {
      EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
    } else {
      snapshot.Hurry();
    }
    writer.join();
    EXPECT_WITH(SecondsSince(start) < 30, std::to_string(SecondsSince(start)));
  }
}

void CloseEndsThePace() {
  Snapshot snapshot(MakeArena(0));
  const Bytes bytes(24 << 20);
  snapshot.Add(bytes.data(), bytes.size(), SourceKind::kConstant);
  snapshot.Pace({}, std::chrono::hours(1));
  Bytes written;
  auto writer = std::async(std::launch::async, [&] { return TakeSource(snapshot, 0, bytes.size(), kBlock, written); });
  EXPECT(writer.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
  snapshot.Close();
  EXPECT(writer.get().code() == StatusCode::kCancelled);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(TheWriterAloneReadsFromWhereItIs),
              TEST(OnlyTheKindThatIsAskedForIsCaptured),
              TEST(WhatTheWriterHasPassedIsNotCopied),
              TEST(EmptySourcesAreNothing),
              TEST(ManySmallSourcesShareABlock),
              TEST(WithoutRoomACaptureThatMayNotWaitReturnsAndLosesNothing),
              TEST(WhatIsLeftOutIsNeitherCopiedNorKept),
              TEST(AGateWithoutMemoryGoesWhenWhatItWaitsForIsLeftOut),
              TEST(WriterAndGateMeetWithPlentyOfMemory),
              TEST(WriterAndGateMeetWithTwoBlocks),
              TEST(WriterAndGateMeetWithOneBlock),
              TEST(WriterAndGateMeetWithNoMemory),
              TEST(SeveralGatesAtOnceAreAllKept),
              TEST(AGateWithoutMemoryWaitsForTheWriterAndNoLonger),
              TEST(ALeaseHoldsTheGateUntilItIsDone),
              TEST(ACaptureThatMayNotWaitDoesNotWaitForOneThatDoes),
              TEST(BlocksOfOneSaveServeTheNext),
              TEST(AnErrorOfPollEndsTheWaitAndOnlyThat),
              TEST(AnErrorOfPollEndsAPacedWriter),
              TEST(CloseLetsEverybodyGo),
              TEST(CloseInTheMiddleOfCopyingIsTheEndOfIt),
              TEST(CloseLeavesTheWriterWhatItLooksAt),
              TEST(CloseAtAnyMomentStopsTheWriter),
              TEST(AForkedChildLetsTheParentsSaveAlone),
              TEST(APacedWriterDoesNotEndTooEarly),
              TEST(APacedWriterDoesNotBeginTooEarly),
              TEST(WhoWaitsEndsThePace),
              TEST(CloseEndsThePace)});
}
