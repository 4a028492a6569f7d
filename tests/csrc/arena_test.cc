// The arena (core/arena.h): limits, reuse, pinning, and what a forked child may do with it.
#include "core/arena.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <functional>
#include <set>
#include <thread>

#include "testing.h"

namespace fastpersist {
namespace {

constexpr uint64_t kBlock = Arena::kBlockBytes;

std::vector<std::byte*> TakeAll(Arena& arena) {
  std::unique_lock lock(arena.mutex());
  std::vector<std::byte*> blocks;
  while (std::byte* block = arena.TryTake(lock)) blocks.push_back(block);
  return blocks;
}

void ReturnAll(Arena& arena, const std::vector<std::byte*>& blocks) {
  const std::lock_guard lock(arena.mutex());
  for (std::byte* block : blocks) arena.Return(block);
}

uint64_t MappedBytes(Arena& arena) {
  const std::lock_guard lock(arena.mutex());
  return arena.mapped_bytes();
}

// Pins that block until they are released, except for the first `quick_count`.
class HeldPinning {
 public:
  explicit HeldPinning(int quick_count = 0) : quick_count_(quick_count) {}

  Pin pin() {
    return [this](std::span<std::byte>) -> std::shared_ptr<void> {
      if (++count_ > quick_count_) may_end_.wait(false);
      return std::make_shared<int>(0);
    };
  }

  int count() const { return count_; }

  void AwaitBegin() const {
    while (count_ <= quick_count_) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

  void LetGo() {
    may_end_ = true;
    may_end_.notify_all();
  }

 private:
  const int quick_count_;
  std::atomic<int> count_{0};
  std::atomic<bool> may_end_{false};
};

// Runs `child` in a fork; returns whether it succeeded.
template <class Function>
bool HoldsInAChild(Function child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child() ? 0 : 1);
  int status = 0;
  return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void TheLimitIsRoundedDownToWholeBlocks() {
  for (const auto& [limit_bytes, count] : std::initializer_list<std::pair<uint64_t, size_t>>{
           {0, 0}, {1, 0}, {kBlock - 1, 0}, {kBlock, 1}, {kBlock + 1, 1}, {5 * kBlock - 1, 4}}) {
    Arena arena(limit_bytes);
    const auto blocks = TakeAll(arena);
    EXPECT_WITH(blocks.size() == count, std::to_string(limit_bytes));
    ReturnAll(arena, blocks);
  }
}

void NothingIsMappedBeforeItIsNeeded() {
  Arena arena(uint64_t{1} << 40);
  EXPECT(MappedBytes(arena) == 0);
  Arena none(0);
  EXPECT(TakeAll(none).empty() && MappedBytes(none) == 0);
}

void BlocksAreApartAndCanBeFilled() {
  Arena arena(70 * kBlock);  // more than two mappings
  const auto blocks = TakeAll(arena);
  EXPECT(blocks.size() == 70);
  EXPECT(std::set<std::byte*>(blocks.begin(), blocks.end()).size() == blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT(reinterpret_cast<uintptr_t>(blocks[i]) % kBlock == 0);
    std::memset(blocks[i], static_cast<int>(i), 100);
    std::memset(blocks[i] + kBlock - 100, static_cast<int>(i), 100);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT(blocks[i][0] == static_cast<std::byte>(i) && blocks[i][kBlock - 1] == static_cast<std::byte>(i));
  }
  ReturnAll(arena, blocks);
}

void GrowRaisesTheLimitAndNeverLowersIt() {
  Arena arena(kBlock);
  auto blocks = TakeAll(arena);
  EXPECT(blocks.size() == 1);
  arena.Grow(3 * kBlock);
  const auto more = TakeAll(arena);
  EXPECT(more.size() == 2);
  arena.Grow(0);
  blocks.insert(blocks.end(), more.begin(), more.end());
  ReturnAll(arena, blocks);
  const auto again = TakeAll(arena);
  EXPECT(again.size() == 3);
  ReturnAll(arena, again);
}

void AThousandSavesMapNothingNew() {
  Arena arena(40 * kBlock);
  ReturnAll(arena, TakeAll(arena));
  const uint64_t mapped_bytes = MappedBytes(arena);
  EXPECT(mapped_bytes >= 40 * kBlock);
  for (int round = 0; round < 1000; ++round) ReturnAll(arena, TakeAll(arena));
  EXPECT(MappedBytes(arena) == mapped_bytes);
  const std::lock_guard lock(arena.mutex());
  EXPECT(arena.used_bytes() == 0);
}

void RunsAreAsLongInEverySave() {
  Arena arena(64 * kBlock);  // two mappings
  for (int save = 0; save < 4; ++save) {
    std::unique_lock lock(arena.mutex());
    std::vector<std::byte*> blocks;
    std::vector<size_t> runs;
    while (std::byte* block = arena.TryTake(lock)) {
      runs.push_back(1);
      for (blocks.push_back(block); (block = arena.TryTakeBehind(block)) != nullptr; ++runs.back()) {
        EXPECT(block == blocks.back() + kBlock);
        blocks.push_back(block);
      }
    }
    // Each mapping was mapped and pinned in one piece, even if two of them touch.
    EXPECT_WITH(runs == std::vector<size_t>({32, 32}), std::to_string(runs.size()) + " runs");
    if (save % 2 == 1) std::reverse(blocks.begin(), blocks.end());
    std::swap(blocks[3], blocks[40]);
    for (std::byte* block : blocks) arena.Return(block);
  }
}

void ARunEndsAtTheLimit() {
  Arena arena(64 * kBlock);
  ReturnAll(arena, TakeAll(arena));
  Arena few(3 * kBlock);
  std::unique_lock lock(few.mutex());
  std::byte* const first = few.TryTake(lock);
  std::byte* const second = few.TryTakeBehind(first);
  std::byte* const third = few.TryTakeBehind(second);
  EXPECT(third != nullptr && few.TryTakeBehind(third) == nullptr);
  few.Return(second);
  EXPECT(few.TryTakeBehind(second) == nullptr);  // the third is not free
  EXPECT(few.TryTakeBehind(first) == second);
  for (std::byte* block : {first, second, third}) few.Return(block);
}

// Unpins the memory of a test's arenas, so that no later test gets it. Declared before them.
struct Cleaner {
  ~Cleaner() { EmptyPinnedCache(); }
};

// A save that maps fresh memory must not block those that have theirs.
void BlocksAreReturnedAndTakenWhileFreshMemoryIsPinned() {
  const Cleaner cleaner;
  Arena arena(34 * kBlock);
  const std::vector<std::byte*> all_but_two = [&] {
    std::unique_lock lock(arena.mutex());
    std::vector<std::byte*> blocks;
    while (blocks.size() < 32) blocks.push_back(arena.TryTake(lock));
    return blocks;
  }();
  HeldPinning held(/*quick_count=*/1);
  arena.PinWith(held.pin());
  std::byte* fresh = nullptr;
  std::thread taker([&] {
    std::unique_lock lock(arena.mutex());
    fresh = arena.TryTake(lock);
  });
  held.AwaitBegin();
  {
    std::unique_lock lock(arena.mutex());  // hangs if the mutex is held
    EXPECT(arena.used_bytes() == 32 * kBlock);
    arena.Return(all_but_two[7]);
    EXPECT(arena.TryTake(lock) == all_but_two[7]);
  }
  EXPECT(held.count() == 2);
  held.LetGo();
  taker.join();
  EXPECT(fresh != nullptr && MappedBytes(arena) == 34 * kBlock);
  ReturnAll(arena, all_but_two);
  ReturnAll(arena, {fresh});
}

// The first tensor of a device comes to an arena that saves of host memory use.
void BlocksAreReturnedAndTakenWhileMappedMemoryIsPinned() {
  const Cleaner cleaner;
  Arena arena(40 * kBlock);  // two mappings
  const std::vector<std::byte*> blocks = TakeAll(arena);
  ReturnAll(arena, blocks);
  HeldPinning held;
  std::thread pinning([&] { arena.PinWith(held.pin()); });
  held.AwaitBegin();
  arena.PinWith(held.pin());  // another save's: it does not wait either
  {
    std::unique_lock lock(arena.mutex());  // hangs if the mutex is held
    EXPECT(arena.TryTake(lock) == blocks[0] && !arena.is_pinned(blocks[0]));
    EXPECT(arena.TryTakeBehind(blocks[0]) == blocks[1]);
    arena.Return(blocks[0]);
  }
  EXPECT(held.count() == 1);
  held.LetGo();
  pinning.join();
  EXPECT(held.count() == 2);
  {
    const std::lock_guard lock(arena.mutex());
    EXPECT(std::all_of(blocks.begin(), blocks.end(), [&](std::byte* block) { return arena.is_pinned(block); }));
    arena.Return(blocks[1]);
  }
  EXPECT(TakeAll(arena).size() == 40);
  ReturnAll(arena, blocks);
}

// Counts how often memory was pinned, and how much still is.
struct Pins {
  ~Pins() { EmptyPinnedCache(); }

  std::atomic<int> count{0};
  std::atomic<uint64_t> size_bytes{0};

  Pin pin() {
    return [this](std::span<std::byte> memory) {
      ++count;
      size_bytes += memory.size();
      return std::shared_ptr<void>(memory.data(), [this, taken = memory.size()](void*) { size_bytes -= taken; });
    };
  }
};

// A device's arena that has handed out all of its blocks.
std::unique_ptr<Arena> UsedArena(uint64_t limit_bytes, const Pin& pin) {
  auto arena = std::make_unique<Arena>(limit_bytes);
  arena->PinWith(pin);
  const std::vector<std::byte*> blocks = TakeAll(*arena);
  EXPECT(blocks.size() == limit_bytes / kBlock);
  {
    const std::lock_guard lock(arena->mutex());
    EXPECT(std::all_of(blocks.begin(), blocks.end(), [&](std::byte* block) { return arena->is_pinned(block); }));
  }
  for (std::byte* block : blocks) std::memset(block, 1, kBlock);
  ReturnAll(*arena, blocks);
  return arena;
}

void AnArenaHasWhatEarlierOnesHadPinned() {
  Pins pins;
  UsedArena(70 * kBlock, pins.pin()).reset();
  EXPECT(pins.count == 3 && pins.size_bytes == 70 * kBlock && PinnedCacheBytes() == 70 * kBlock);
  for (const uint64_t count : {70, 40, 3, 33}) {
    const auto arena = UsedArena(count * kBlock, pins.pin());
    EXPECT_WITH(PinnedCacheBytes() + MappedBytes(*arena) == 70 * kBlock, std::to_string(count));
  }
  auto preparing = std::make_unique<Arena>(70 * kBlock);
  preparing->PinWith(pins.pin());
  while (preparing->Prepare(70 * kBlock)) continue;
  EXPECT(MappedBytes(*preparing) == 70 * kBlock && PinnedCacheBytes() == 0);
  EXPECT(pins.count == 3);
  UsedArena(kBlock, pins.pin()).reset();  // there is nothing left
  EXPECT(pins.count == 4 && PinnedCacheBytes() == kBlock);
  EXPECT(EmptyPinnedCache() == kBlock && PinnedCacheBytes() == 0 && EmptyPinnedCache() == 0);
  EXPECT(pins.size_bytes == 70 * kBlock);
  preparing.reset();
  EXPECT(EmptyPinnedCache() == 70 * kBlock && pins.size_bytes == 0);
}

void ArenasAtTheSameTimeHaveWhatOthersHadAtTheSameTime() {
  Pins pins;
  for (int round = 0; round < 3; ++round) {
    const auto first = UsedArena(40 * kBlock, pins.pin());
    const auto second = UsedArena(20 * kBlock, pins.pin());
  }
  EXPECT(pins.count == 3 && PinnedCacheBytes() == 60 * kBlock);
  EmptyPinnedCache();
  EXPECT(pins.size_bytes == 0);
}

void WhatIsNotPinnedIsNotKept() {
  const Cleaner cleaner;
  UsedArena(3 * kBlock, [](std::span<std::byte>) { return std::make_shared<int>(0); }).reset();
  EXPECT(EmptyPinnedCache() == 3 * kBlock);
  Arena arena(3 * kBlock);
  ReturnAll(arena, TakeAll(arena));
  Arena refused(3 * kBlock);
  refused.PinWith([](std::span<std::byte>) { return nullptr; });
  ReturnAll(refused, TakeAll(refused));
  EXPECT(PinnedCacheBytes() == 0);
}

void WhatNobodyTakesForLongIsGivenBack() {
  Pins pins;
  UsedArena(40 * kBlock, pins.pin()).reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT(PinnedCacheBytes() == 40 * kBlock);
  SetPinnedCacheLifetime(std::chrono::milliseconds(300));
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [start] { return std::chrono::steady_clock::now() - start; };
  while (pins.size_bytes > 0 && passed() < std::chrono::seconds(20)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT(pins.size_bytes == 0 && PinnedCacheBytes() == 0);
  UsedArena(kBlock, pins.pin()).reset();  // and so on
  EXPECT(PinnedCacheBytes() == kBlock);
  while (pins.size_bytes > 0 && passed() < std::chrono::seconds(40)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT(pins.size_bytes == 0);
  SetPinnedCacheLifetime(std::chrono::minutes(10));
}

void AForkedChildHasNothingOfWhatTheParentKeeps() {
  Pins pins;
  UsedArena(3 * kBlock, pins.pin()).reset();
  EXPECT(HoldsInAChild([&] {
    if (PinnedCacheBytes() != 0 || EmptyPinnedCache() != 0) return false;
#ifndef __SANITIZE_THREAD__  // which lets no thread begin here
    UsedArena(2 * kBlock, pins.pin()).reset();
    if (pins.count != 2 || PinnedCacheBytes() != 2 * kBlock || EmptyPinnedCache() != 2 * kBlock) return false;
#endif
    return true;
  }));
  EXPECT(pins.count == 1 && EmptyPinnedCache() == 3 * kBlock);
}

// Mappings on which PinWith works stay mapped, even beyond the limit.
void WhatIsBeingPinnedIsNotLetGoOf() {
  const Cleaner cleaner;
  Arena arena(4 * kBlock);
  const std::vector<std::byte*> blocks = TakeAll(arena);
  std::atomic<bool> is_complete{false};
  {
    const std::lock_guard lock(arena.mutex());
    for (std::byte* block : blocks) arena.PutInQuarantine(block, [&] { return is_complete.load(); });
  }
  const std::vector<std::byte*> others = TakeAll(arena);
  ReturnAll(arena, others);
  HeldPinning held;
  std::thread pinning([&] { arena.PinWith(held.pin()); });
  held.AwaitBegin();
  is_complete = true;
  {
    std::unique_lock lock(arena.mutex());
    arena.TakeBack(lock);
    EXPECT(arena.mapped_bytes() == 8 * kBlock);
  }
  held.LetGo();
  pinning.join();
  const std::lock_guard lock(arena.mutex());
  EXPECT(arena.is_pinned(blocks[0]) && arena.is_pinned(others[0]));
}

// A taker that meets a running Prepare must wait for it: it must not pin as much itself and throw half of it away.
void WhatIsPreparedAndNeededAtOnceIsPinnedOnce() {
  for (const bool prepared_first : {true, false}) {
    const Cleaner cleaner;
    Arena arena(4 * kBlock);
    HeldPinning held;
    arena.PinWith(held.pin());
    std::vector<std::byte*> blocks;
    const auto prepare = [&] { arena.Prepare(4 * kBlock); };
    const auto take = [&] { blocks = TakeAll(arena); };
    std::thread first(prepared_first ? std::function<void()>(prepare) : take);
    held.AwaitBegin();
    std::thread second(prepared_first ? std::function<void()>(take) : prepare);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT(held.count() == 1);
    held.LetGo();
    first.join();
    second.join();
    EXPECT(held.count() == 1);
    EXPECT(blocks.size() == 4 && MappedBytes(arena) == 4 * kBlock);
    ReturnAll(arena, blocks);
  }
}

void AForkedChildHasNoneOfItAndHarmsNothing() {
  auto arena = std::make_unique<Arena>(32 * kBlock);  // so large that no mapping of the child lands there
  const auto blocks = TakeAll(*arena);
  blocks[0][0] = std::byte{42};
  EXPECT(!arena->forked());
  int ends[2];
  if (pipe(ends) != 0) return;
  EXPECT(HoldsInAChild([&] {
    // Asks the kernel whether the page is mapped: a touch would crash.
    const bool is_there = write(ends[1], blocks[0], 1) == 1;
    const bool is_forked = arena->forked();
    arena.reset();  // with blocks out, which would be a broken invariant in the parent
    return is_forked && !is_there;
  }));
  close(ends[0]);
  close(ends[1]);
  EXPECT(blocks[0][0] == std::byte{42});
  ReturnAll(*arena, blocks);
}

void WithoutMemoryFromTheKernelThereIsNoBlock() {
  EXPECT(HoldsInAChild([] {
    Arena arena(kBlock);
    struct rlimit none = {.rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY};
    if (getrlimit(RLIMIT_AS, &none) != 0) return false;
    const rlim_t before = none.rlim_cur;
    none.rlim_cur = 1 << 20;
    if (setrlimit(RLIMIT_AS, &none) != 0) return false;
    bool has_none = false;
    {
      std::unique_lock lock(arena.mutex());
      has_none = arena.TryTake(lock) == nullptr && arena.mapped_bytes() == 0 && arena.used_bytes() == 0;
    }
    none.rlim_cur = before;
    if (setrlimit(RLIMIT_AS, &none) != 0) return false;
    const auto blocks = TakeAll(arena);
    ReturnAll(arena, blocks);
    return has_none && blocks.size() == 1;
  }));
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(TheLimitIsRoundedDownToWholeBlocks), TEST(NothingIsMappedBeforeItIsNeeded),
              TEST(BlocksAreApartAndCanBeFilled), TEST(GrowRaisesTheLimitAndNeverLowersIt),
              TEST(AThousandSavesMapNothingNew), TEST(RunsAreAsLongInEverySave), TEST(ARunEndsAtTheLimit),
              TEST(BlocksAreReturnedAndTakenWhileFreshMemoryIsPinned),
              TEST(BlocksAreReturnedAndTakenWhileMappedMemoryIsPinned), TEST(WhatIsBeingPinnedIsNotLetGoOf),
              TEST(AnArenaHasWhatEarlierOnesHadPinned), TEST(ArenasAtTheSameTimeHaveWhatOthersHadAtTheSameTime),
              TEST(WhatIsNotPinnedIsNotKept), TEST(WhatNobodyTakesForLongIsGivenBack),
              TEST(AForkedChildHasNothingOfWhatTheParentKeeps), TEST(WhatIsPreparedAndNeededAtOnceIsPinnedOnce),
              TEST(AForkedChildHasNoneOfItAndHarmsNothing), TEST(WithoutMemoryFromTheKernelThereIsNoBlock)});
}
