// Staging memory (transfer/staging.h): pieces are aligned, disjoint and inside; places given back are reused, the
// lowest first; with nothing out, any size up to the capacity fits; and a file's memory goes to the next file, except
// pieces that a device may still touch.
#include "transfer/staging.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <fstream>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "core/quarantine.h"
#include "testing.h"

namespace fastpersist {
namespace {

constexpr size_t kUnit = Staging::kUnitBytes;

void EveryPieceIsAlignedAndHoldsItsBytes() {
  Staging staging(4 * kUnit);
  EXPECT_OK(staging.Prepare());
  EXPECT_OK(staging.Prepare());
  std::byte* const first = staging.Take(1);
  std::byte* const second = staging.Take(kUnit + 1);
  EXPECT(reinterpret_cast<uintptr_t>(first) % kUnit == 0 && second == first + kUnit);
  std::memset(first, 1, 1);
  std::memset(second, 2, kUnit + 1);
  EXPECT(first[0] == std::byte{1});
  staging.Put(first);
  staging.Put(second);
}

void AnySizeUpToTheCapacityFitsWhenNothingIsOut() {
  Staging staging(3 * kUnit - 5);  // rounded up
  EXPECT_OK(staging.Prepare());
  for (const size_t size : {size_t{1}, kUnit, 2 * kUnit + 1, 3 * kUnit}) {
    std::byte* const piece = staging.Take(size);
    EXPECT_WITH(piece != nullptr, std::to_string(size));
    std::memset(piece, 0xA5, size);
    staging.Put(piece);
  }
  EXPECT(staging.Take(3 * kUnit + 1) == nullptr);
  EXPECT(staging.Take(SIZE_MAX - 2 * kUnit) == nullptr);
}

void WhatDoesNotFitIsRefusedAndFitsLater() {
  Staging staging(4 * kUnit);
  EXPECT_OK(staging.Prepare());
  std::byte* const first = staging.Take(2 * kUnit);
  std::byte* const second = staging.Take(kUnit);
  EXPECT(staging.Take(2 * kUnit) == nullptr);
  EXPECT(staging.Take(kUnit) == second + kUnit);
  staging.Put(first);
  EXPECT(staging.Take(3 * kUnit) == nullptr);  // three units are free, but not side by side
  EXPECT(staging.Take(2 * kUnit) == first);
}

void TheLowestPlaceIsTaken() {
  Staging staging(8 * kUnit);
  EXPECT_OK(staging.Prepare());
  std::byte* const memory = staging.Take(kUnit);
  std::byte* const gap = staging.Take(2 * kUnit);
  EXPECT(staging.Take(kUnit) == memory + 3 * kUnit);
  staging.Put(gap);
  EXPECT(staging.Take(3 * kUnit) == memory + 4 * kUnit);
  EXPECT(staging.Take(kUnit) == gap);
  EXPECT(staging.Take(kUnit) == gap + kUnit);
  EXPECT(staging.Take(kUnit) == memory + 7 * kUnit);
  EXPECT(staging.Take(1) == nullptr);
}

void PiecesNeverMeetWhateverTheOrder() {
  constexpr size_t kCapacityUnits = 32;
  Staging staging(kCapacityUnits * kUnit);
  EXPECT_OK(staging.Prepare());
  std::byte* const memory = staging.Take(1);
  staging.Put(memory);
  std::mt19937_64 random(1);
  std::map<std::byte*, size_t> out;  // the model: where pieces begin, and their units
  for (int step = 0; step < 20000; ++step) {
    if (!out.empty() && random() % 2 == 0) {
      const auto chosen = std::next(out.begin(), static_cast<ptrdiff_t>(random() % out.size()));
      staging.Put(chosen->first);
      out.erase(chosen);
      continue;
    }
    const size_t units = 1 + random() % 12;
    std::byte* expected = memory;  // the lowest gap
    for (const auto& [begin, taken_units] : out) {
      if (begin >= expected + units * kUnit) break;
      expected = begin + taken_units * kUnit;
    }
    if (expected + units * kUnit > memory + kCapacityUnits * kUnit) expected = nullptr;
    std::byte* const piece = staging.Take(units * kUnit - random() % kUnit);
    if (!EXPECT_WITH(piece == expected, std::to_string(step))) return;
    if (piece != nullptr) out.emplace(piece, units);
  }
}

void TheNextFileHasTheMemoryOfTheLastIfItIsLargeEnough() {
  std::byte* memory = nullptr;
  {
    Staging staging(8 * kUnit);
    EXPECT_OK(staging.Prepare());
    memory = staging.Take(1);
  }
  Staging next(4 * kUnit);
  EXPECT_OK(next.Prepare());
  EXPECT(next.Take(kUnit) == memory);
  EXPECT(next.Take(4 * kUnit) == nullptr);  // its capacity is what it asked for
  Staging beside(4 * kUnit);
  EXPECT_OK(beside.Prepare());
  std::byte* const other = beside.Take(4 * kUnit);
  EXPECT(other + 4 * kUnit <= memory || memory + 8 * kUnit <= other);
  std::memset(other, 1, 4 * kUnit);
}

// Keeps this thread on its CPU while it lives.
class OnOneCpu {
 public:
  OnOneCpu() {
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    sched_getaffinity(0, sizeof before_, &before_);
    sched_setaffinity(0, sizeof here, &here);
  }
  ~OnOneCpu() { sched_setaffinity(0, sizeof before_, &before_); }
  OnOneCpu(const OnOneCpu&) = delete;
  OnOneCpu& operator=(const OnOneCpu&) = delete;

 private:
  cpu_set_t before_{};
};

// How much of the mapping at an address the kernel may reclaim at any time. A CPU marks such pages in batches, the last
// of them when it next unmaps something.
size_t TakeableKib(const std::byte* address) {
  munmap(mmap(nullptr, kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0), kUnit);
  const auto place = reinterpret_cast<uintptr_t>(address);
  std::ifstream smaps("/proc/self/smaps");
  bool is_it = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    size_t kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) is_it = begin <= place && place < end;
    if (is_it && std::sscanf(line.c_str(), "LazyFree: %zu kB", &kib) == 1) return kib;
  }
  return 0;
}

void MemoryOfTheLastFileIsNotTakenFromUnderARead() {
  const OnOneCpu on_one_cpu;
  constexpr size_t kBytes = 64 * kUnit;
  const std::byte* memory = nullptr;
  const auto leave_some = [&memory] {
    Staging staging(kBytes);
    EXPECT_OK(staging.Prepare());
    std::byte* const piece = staging.Take(kBytes);
    std::memset(piece, 1, kBytes);
    staging.Put(piece);
    memory = piece;
  };
  leave_some();
  if (TakeableKib(memory) == 0) {
    std::printf("%s: this kernel does not say what it may take\n", g_test.c_str());
    return;
  }
  const size_t before_kib = TakeableKib(memory);
  Staging staging(kBytes);
  EXPECT_OK(staging.Prepare());
  EXPECT(staging.Take(kUnit) == memory);
  EXPECT_WITH(TakeableKib(memory) < before_kib, std::to_string(TakeableKib(memory)));
  EXPECT(staging.Take(kBytes - 2 * kUnit, 2 * kUnit) == memory + 2 * kUnit);
  EXPECT_WITH(TakeableKib(memory) == 0, std::to_string(TakeableKib(memory)));
}

void MemoryOfTheLastFileIsThereBeforeADeviceKnowsIt() {
  constexpr size_t kBytes = 64 * kUnit;
  {
    Staging staging(kBytes);
    EXPECT_OK(staging.Prepare());
    std::memset(staging.Take(kBytes), 1, kBytes);
  }
  Staging staging(kBytes);
  EXPECT_OK(staging.Prepare());
  staging.PinWith([](std::span<std::byte> memory) -> std::shared_ptr<void> {
    EXPECT_WITH(TakeableKib(memory.data()) == 0, std::to_string(TakeableKib(memory.data())));
    return nullptr;
  });
}

void TooLittleMemoryOfTheLastFileIsNotTaken() {
  {
    EXPECT_OK(Staging(4 * kUnit).Prepare());
  }
  Staging large(1024 * kUnit);
  EXPECT_OK(large.Prepare());
  std::byte* const piece = large.Take(1024 * kUnit);
  EXPECT(piece != nullptr);
  std::memset(piece, 1, 1024 * kUnit);
}

void AForkedChildHasMemoryOfItsOwn() {
  {
    EXPECT_OK(Staging(4 * kUnit).Prepare());
  }
  const pid_t child = fork();
  if (child == 0) {
    Staging staging(4 * kUnit);
    if (!staging.Prepare().ok()) _exit(1);
    std::memset(staging.Take(4 * kUnit), 1, 4 * kUnit);  // what the parent has kept is not mapped here
    _exit(0);
  }
  int ending = 0;
  waitpid(child, &ending, 0);
  EXPECT(ending == 0);
}

void MemoryThatCannotBeHadIsAnErrorThatMayBeTriedAgain() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which need more address space than that
  // In a child: a limit lowered for good would hurt the other tests.
  const pid_t child = fork();
  if (child == 0) {
    Staging staging(size_t{1} << 40);
    rlimit limit = {};
    getrlimit(RLIMIT_AS, &limit);
    rlimit small = limit;
    small.rlim_cur = size_t{1} << 34;
    setrlimit(RLIMIT_AS, &small);
    const Status status = staging.Prepare();
    const bool refused = status.code() == StatusCode::kNoMemory && Contains(status.message(), "staging");
    setrlimit(RLIMIT_AS, &limit);
    Staging other(kUnit);
    _exit(refused && other.Prepare().ok() ? 0 : 1);
  }
  int ending = 0;
  waitpid(child, &ending, 0);
  EXPECT(ending == 0);
#endif
}

// --- Devices

void PiecesFromALimitOnLeaveRoomBelowIt() {
  Staging staging(6 * kUnit);
  EXPECT_OK(staging.Prepare());
  std::byte* const above = staging.Take(kUnit, 2 * kUnit);
  EXPECT(staging.Take(kUnit, 2 * kUnit) == above + kUnit);
  EXPECT(staging.Take(3 * kUnit, 2 * kUnit) == nullptr);
  std::byte* const below = staging.Take(2 * kUnit);
  EXPECT(below + 2 * kUnit == above);
  staging.Put(below);
  EXPECT(staging.Take(3 * kUnit) == nullptr);
  EXPECT(staging.Take(kUnit, kUnit) == below + kUnit);
  staging.Put(above);
  EXPECT(staging.Take(kUnit, kUnit + 1) == above);
  EXPECT(staging.Take(kUnit, 6 * kUnit) == nullptr);
}

void AQuarantinedPieceIsNobodysUntilItsCopiesAreComplete() {
  bool is_complete = false;
  Staging staging(2 * kUnit);
  EXPECT_OK(staging.Prepare());
  std::byte* const piece = staging.Take(kUnit);
  staging.PutInQuarantine(piece, [&is_complete] { return is_complete; });
  staging.TakeBack();
  EXPECT(staging.has_quarantined() && staging.Take(2 * kUnit) == nullptr);
  EXPECT(staging.Take(kUnit) == piece + kUnit);
  staging.Put(piece + kUnit);
  is_complete = true;
  staging.TakeBack();
  EXPECT(!staging.has_quarantined() && staging.Take(2 * kUnit) == piece);
}

void WhatADeviceKnowsItKnowsForTheNextFileToo() {
  int pin_count = 0;
  const auto pins = [&pin_count](const Staging& staging) {
    return [&pin_count, &staging](std::span<std::byte> memory) -> std::shared_ptr<void> {
      EXPECT(memory.size() >= staging.capacity_bytes());
      ++pin_count;
      return std::make_shared<int>(0);
    };
  };
  for (int file = 0; file < 3; ++file) {
    Staging staging(4096 * kUnit);
    EXPECT_OK(staging.Prepare());
    for (int again = 0; again < 2; ++again) staging.PinWith(pins(staging));
    EXPECT(staging.is_pinned() && pin_count == 1);
  }
  Staging larger(8192 * kUnit);  // the mapping that is kept is too small, and the device forgets it
  EXPECT_OK(larger.Prepare());
  EXPECT(!larger.is_pinned());
  larger.PinWith([](std::span<std::byte>) { return nullptr; });
  larger.PinWith(pins(larger));  // once refused, always
  EXPECT(!larger.is_pinned() && pin_count == 1);
}

void MemoryQuarantinedWhenItsFileIsGoneStaysUntilItsCopiesAreComplete() {
  bool is_complete = false;
  auto pinned = std::make_shared<int>(0);
  const std::weak_ptr<int> known = pinned;
  std::byte* piece = nullptr;
  {
    Staging staging(16384 * kUnit);
    EXPECT_OK(staging.Prepare());
    staging.PinWith([&pinned](std::span<std::byte>) { return std::exchange(pinned, nullptr); });
    piece = staging.Take(kUnit);
    staging.PutInQuarantine(piece, [&is_complete] { return is_complete; });
  }
  EXPECT(ReleaseComplete() == 1 && !known.expired());
  std::memset(piece, 1, kUnit);  // mapped
  Staging next(16384 * kUnit);
  EXPECT_OK(next.Prepare());
  EXPECT(next.Take(kUnit) != piece);
  is_complete = true;
  EXPECT(ReleaseComplete() == 0 && known.expired());
}

// The driver keeps the registrations of a lost device: it would take new memory at that address for the old.
void WhatADeviceDoesNotLetGoOfStaysMapped() {
  const Pin of_a_lost_device = [](std::span<std::byte> memory) {
    return std::shared_ptr<void>(memory.data(), [](void* known) { KeepMapped(static_cast<std::byte*>(known)); });
  };
  const auto is_mapped = [](std::byte* piece) {
    unsigned char resident = 0;
    return mincore(piece, kUnit, &resident) == 0;
  };
  const auto known_piece = [&](Staging& staging) {
    EXPECT_OK(staging.Prepare());
    staging.PinWith(of_a_lost_device);
    return staging.Take(kUnit);
  };
  std::byte* kept = nullptr;
  {
    Staging staging(32768 * kUnit);
    kept = known_piece(staging);
    staging.Put(kept);
  }
  Staging larger(65536 * kUnit);
  EXPECT_OK(larger.Prepare());  // the mapping that was kept is too small
  std::byte* const begin = larger.Take(kUnit);
  EXPECT(is_mapped(kept) && (kept < begin || kept >= begin + larger.capacity_bytes()));

  std::byte* alone = nullptr;
  {
    Staging staging(64 * kUnit, /*reuses=*/false);
    alone = known_piece(staging);
    staging.Put(alone);
  }
  EXPECT(is_mapped(alone));

  bool is_complete = false;
  std::byte* late = nullptr;
  {
    Staging staging(64 * kUnit, /*reuses=*/false);
    late = known_piece(staging);
    staging.PutInQuarantine(late, [&is_complete] { return is_complete; });
  }
  is_complete = true;
  EXPECT(ReleaseComplete() == 0 && is_mapped(late));
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(EveryPieceIsAlignedAndHoldsItsBytes), TEST(AnySizeUpToTheCapacityFitsWhenNothingIsOut),
              TEST(WhatDoesNotFitIsRefusedAndFitsLater), TEST(TheLowestPlaceIsTaken),
              TEST(PiecesNeverMeetWhateverTheOrder), TEST(TheNextFileHasTheMemoryOfTheLastIfItIsLargeEnough),
              TEST(MemoryOfTheLastFileIsNotTakenFromUnderARead), TEST(MemoryOfTheLastFileIsThereBeforeADeviceKnowsIt),
              TEST(TooLittleMemoryOfTheLastFileIsNotTaken), TEST(AForkedChildHasMemoryOfItsOwn),
              TEST(MemoryThatCannotBeHadIsAnErrorThatMayBeTriedAgain), TEST(PiecesFromALimitOnLeaveRoomBelowIt),
              TEST(AQuarantinedPieceIsNobodysUntilItsCopiesAreComplete), TEST(WhatADeviceKnowsItKnowsForTheNextFileToo),
              TEST(MemoryQuarantinedWhenItsFileIsGoneStaysUntilItsCopiesAreComplete),
              TEST(WhatADeviceDoesNotLetGoOfStaysMapped)});
}
