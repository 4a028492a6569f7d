// Holds of the row cache (rows/cache.h, rows/store.h): what a device reads without the store's lock stays as it is,
// other slots go on changing, and the memory that it reads is pinned piece by piece.
//
// row_hold_test [SCRATCH_DIRECTORY]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <vector>

#include "core/memory.h"
#include "rows/cache.h"
#include "rows/store.h"
#include "testing_row_store.h"

namespace fastpersist {
namespace {

constexpr uint32_t kRowBytes = 100;
constexpr uint32_t kSlotCount = 64;
constexpr uint64_t kRowCount = 100'000;

// A cache of 64 slots with the rows 0 … 63.
class FullCache {
 public:
  FullCache() : cache_(Must(RowCache::Create(kSlotCount * (kRowBytes + 28), kRowBytes, kRowCount))) {
    for (uint64_t row = 0; row < kSlotCount; ++row) EXPECT(cache_->Admit(row, 0, /*keep=*/false).slot != nullptr);
  }
  RowCache* operator->() const { return cache_.get(); }

  void Hold(uint64_t from, uint64_t until) const {
    for (uint64_t row = from; row < until; ++row) cache_->Hold(cache_->Find(row));
  }
  // Offer many other rows, each often enough to be better than what is there. Returns how many of the rows 0 … 63 stay.
  uint32_t CountAfterOthers(bool keep = false) {
    for (int i = 0; i < 200; ++i, ++other_) {
      for (int k = 0; k < 3; ++k) {
        if (cache_->Find(other_) == RowCache::kNoSlot) cache_->Admit(other_, 0, keep);
      }
    }
    uint32_t count = 0;
    for (uint64_t row = 0; row < kSlotCount; ++row) count += cache_->Find(row) == RowCache::kNoSlot ? 0 : 1;
    return count;
  }

 private:
  std::unique_ptr<RowCache> cache_;
  uint64_t other_ = 1000;
};

void ACacheOfAllRowsThatIsHeldAdmitsNoneAfterClear() {
  const auto cache = Must(RowCache::Create(1 << 20, kRowBytes, 10));
  for (uint64_t row = 0; row < 10; ++row) cache->Admit(row, 0, /*keep=*/false);
  EXPECT(cache->HasEachRow());
  const uint16_t hold = cache->BeginHold();
  cache->Hold(cache->Find(3));
  cache->Clear();
  EXPECT(cache->Admit(7, 0, /*keep=*/true).slot == nullptr);
  cache->EndHold(hold);
  EXPECT(cache->Admit(7, 0, /*keep=*/false).slot != nullptr);
}

void HeldRowsStayAndOthersGo() {
  FullCache cache;
  const uint16_t hold = cache->BeginHold();
  cache.Hold(0, 20);
  EXPECT(cache.CountAfterOthers() == 20);
  for (uint64_t row = 0; row < 20; ++row) EXPECT(cache->Find(row) == row);
  cache->EndHold(hold);
  EXPECT(cache.CountAfterOthers() == 0);
}

void ACacheThatIsHeldAsAWholeTakesNoRows() {
  FullCache cache;
  const uint16_t hold = cache->BeginHold();
  cache.Hold(0, kSlotCount);
  EXPECT(cache.CountAfterOthers() == kSlotCount);
  EXPECT(cache.CountAfterOthers(/*keep=*/true) == kSlotCount);
  cache->EndHold(hold);
  EXPECT(cache.CountAfterOthers(/*keep=*/true) == 0);
}

void RowsThatAreKeptTakeThePlacesThatAreNotHeld() {
  FullCache cache;
  const uint16_t hold = cache->BeginHold();
  cache.Hold(0, kSlotCount - 1);
  EXPECT(cache.CountAfterOthers(/*keep=*/true) == kSlotCount - 1);
  cache->EndHold(hold);
}

void HoldsMayOverlapAndEndInAnyOrder() {
  for (const bool newer_ends_first : {false, true}) {
    FullCache cache;
    const uint16_t older = cache->BeginHold();
    cache.Hold(0, 20);
    const uint16_t newer = cache->BeginHold();
    cache.Hold(10, 40);  // for both
    cache->EndHold(newer_ends_first ? newer : older);
    const uint64_t from = newer_ends_first ? 0 : 10;
    EXPECT(cache.CountAfterOthers() >= 30);
    for (uint64_t row = from; row < 40; ++row) EXPECT(cache->Find(row) == row);
    cache->EndHold(newer_ends_first ? older : newer);
    EXPECT(cache.CountAfterOthers() == 0);
  }
}

void NumbersOfHoldsMayBeginAgain() {
  FullCache cache;
  for (int i = 0; i < 200'000; ++i) {
    const uint16_t hold = cache->BeginHold();
    if (i % 9999 == 0) {
      cache.Hold(0, kSlotCount);
      cache->EndHold(hold);
      const uint16_t next = cache->BeginHold();
      cache.Hold(5, 6);
      EXPECT(cache.CountAfterOthers() == 1);
      cache->EndHold(next);
      cache->Clear();
      for (uint64_t row = 0; row < kSlotCount; ++row) cache->Admit(row, 0, /*keep=*/false);
    } else {
      cache->EndHold(hold);
    }
  }
}

// As where one device stands still while others go on.
void AHoldOutlastsAllNumbers() {
  FullCache cache;
  const uint16_t first = cache->BeginHold();
  cache->EndHold(cache->BeginHold());
  cache.Hold(0, 20);
  for (int i = 0; i < 65'535; ++i) cache->EndHold(cache->BeginHold());
  EXPECT(cache.CountAfterOthers() >= 20);
  for (uint64_t row = 0; row < 20; ++row) EXPECT(cache->Find(row) == row);
  cache->EndHold(first);
  EXPECT(cache.CountAfterOthers() == 0);
}

void ACacheThatIsEmptiedTakesNoRowsBeforeItsHoldsHaveEnded() {
  FullCache cache;
  const uint16_t hold = cache->BeginHold();
  cache.Hold(0, 1);
  cache->Clear();
  EXPECT(cache->Admit(7, 0, /*keep=*/false).slot == nullptr);
  const uint16_t later = cache->BeginHold();
  cache->EndHold(hold);
  EXPECT(cache->Admit(7, 0, /*keep=*/false).slot != nullptr);
  cache->EndHold(later);
}

void RowsAreFoundWhereTheyLieAndTheOthersNamed() {
  const TableFiles files(100, {{0, 100'000}});
  const auto store = Must(RowStore::Open(
      files.Table(),
      {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = uint64_t{20} << 20, .copy_thread_count = 3}));
  ExpectRows(*store, EachNth(3, 100'000));
  const RowStoreStats before = store->stats();
  for (const size_t count : {1, 511, 100'000}) {
    const std::vector<int64_t> ids = AllIds(count);
    std::vector<int32_t> slots(count);
    std::vector<int32_t> places(count);
    const uint16_t hold = store->BeginHold(RowRequest::kNoBatch);
    std::mutex mutex;  // several threads look up
    std::vector<int64_t> found;
    const std::vector<int64_t> others =
        Must(store->Hold(ids, RowRequest::kNoBatch, 20'000, slots.data(), places.data(),
                         [&](std::span<const int32_t> held, const int32_t* places_of) {
                           const std::lock_guard lock(mutex);
                           for (size_t i = 0; i < held.size(); ++i) {
                             const auto row = static_cast<uint64_t>(places_of[i]);
                             EXPECT(held[i] < 20'000 && IsRow(store->cache_bytes() + (held[i] * 100), row, 100));
                             found.push_back(ids[row]);
                           }
                           return Status::Ok();
                         }));
    EXPECT(found.size() == std::min<size_t>((count + 2) / 3, 20'000));
    found.insert(found.end(), others.begin(), others.end());
    std::ranges::sort(found);
    EXPECT(found == ids);
    store->EndHold(hold, 7);
  }
  EXPECT(store->stats().hit_count == before.hit_count + 21 && store->stats().row_count == before.row_count + 21);
}

void RowsThatAreTakenComeAboutInTheOrderOfTheirSlots() {
  const TableFiles files(100, {{0, 50'000}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 50'000 * 128}));
  ExpectRows(*store, AllIds(50'000));
  std::vector<int64_t> ids = AllIds(50'000);
  std::ranges::shuffle(ids, std::mt19937(1));
  std::vector<int32_t> slots(ids.size());
  std::vector<int32_t> places(ids.size());
  const uint16_t hold = store->BeginHold(RowRequest::kNoBatch);
  size_t count = 0;
  Must(store->Hold(ids, RowRequest::kNoBatch, 50'000, slots.data(), places.data(),
                   [&](std::span<const int32_t> held, const int32_t*) {
                     EXPECT(std::ranges::is_sorted(held, {}, [](int32_t slot) { return slot >> 6; }));
                     EXPECT(held.size() <= (count == 0 ? 2048 : 16384));
                     count += held.size();
                     return Status::Ok();
                   }));
  EXPECT(count == ids.size());
  store->EndHold(hold, 0);
}

void AnErrorOfWhoTakesThemEndsAHold() {
  const TableFiles files(100, {{0, 50'000}});
  const auto store = Must(RowStore::Open(
      files.Table(),
      {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 50'000 * 128, .copy_thread_count = 3}));
  ExpectRows(*store, AllIds(50'000));
  std::vector<int32_t> slots(50'000);
  std::vector<int32_t> places(50'000);
  const uint16_t hold = store->BeginHold(RowRequest::kNoBatch);
  std::atomic<int> count = 0;
  const Status status = store
                            ->Hold(AllIds(50'000), RowRequest::kNoBatch, 50'000, slots.data(), places.data(),
                                   [&](std::span<const int32_t>, const int32_t*) {
                                     ++count;
                                     return Status::Error(StatusCode::kDeviceError, "no");
                                   })
                            .status();
  EXPECT(status.code() == StatusCode::kDeviceError && count <= 3);
  store->EndHold(hold, 0);
}

void MemoryIsPinnedAsItFills() {
  constexpr uint32_t kLongRow = (1 << 20) + 1000;
  const TableFiles files(kLongRow, {{0, 150}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 150 << 21}));
  std::vector<std::span<std::byte>> pinned;
  bool is_refused = false;
  const Pin pin = [&](std::span<std::byte> memory) -> std::shared_ptr<void> {
    pinned.push_back(memory);
    return is_refused ? nullptr : std::make_shared<int>(0);
  };
  const std::vector<int64_t> ids = AllIds(150);
  EXPECT(store->PinCache(pin) == 0 && pinned.empty());
  ExpectRows(*store, {ids.begin(), ids.begin() + 60});
  EXPECT(store->PinCache(pin) == 0 && pinned.empty());
  ExpectRows(*store, {ids.begin(), ids.begin() + 75});
  EXPECT(store->PinCache(pin) == 73 && pinned.size() == 1);
  EXPECT(store->PinCache(pin) == 73 && pinned.size() == 1);
  ExpectRows(*store, {ids.begin(), ids.begin() + 90});
  EXPECT(store->PinCache(pin) == 73 && pinned.size() == 1);
  ExpectRows(*store, ids);
  is_refused = true;
  EXPECT(store->PinCache(pin) == 73 && pinned.size() == 2);
  is_refused = false;
  EXPECT(store->PinCache(pin) == 73 && pinned.size() == 2);
  EXPECT(pinned[0].data() == store->cache_bytes() && pinned[0].size() % kHugePageBytes == 0);
  EXPECT(pinned[1].data() == pinned[0].data() + pinned[0].size());
  EXPECT(pinned[0].size() + pinned[1].size() == 150 * uint64_t{kLongRow});
}

void OtherThreadsGoOnWithWhatIsPinnedSoFar() {
  constexpr uint32_t kLongRow = 1 << 20;
  const TableFiles files(kLongRow, {{0, 150}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 150 << 21}));
  const std::vector<int64_t> ids = AllIds(150);
  const Pin at_once = [](std::span<std::byte>) { return std::make_shared<int>(0); };
  ExpectRows(*store, {ids.begin(), ids.begin() + 70});
  EXPECT(store->PinCache(at_once) == 70);
  ExpectRows(*store, ids);
  std::future<uint32_t> other;
  const Pin slow = [&](std::span<std::byte>) {
    other = std::async(std::launch::async, [&] { return store->PinCache(at_once); });
    EXPECT(other.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
    return std::make_shared<int>(0);
  };
  EXPECT(store->PinCache(slow) == 150);
  EXPECT(other.get() == 70);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(
      argc, argv,
      {TEST(HeldRowsStayAndOthersGo), TEST(ACacheOfAllRowsThatIsHeldAdmitsNoneAfterClear),
       TEST(ACacheThatIsHeldAsAWholeTakesNoRows), TEST(RowsThatAreKeptTakeThePlacesThatAreNotHeld),
       TEST(HoldsMayOverlapAndEndInAnyOrder), TEST(NumbersOfHoldsMayBeginAgain), TEST(AHoldOutlastsAllNumbers),
       TEST(ACacheThatIsEmptiedTakesNoRowsBeforeItsHoldsHaveEnded), TEST(RowsAreFoundWhereTheyLieAndTheOthersNamed),
       TEST(RowsThatAreTakenComeAboutInTheOrderOfTheirSlots), TEST(AnErrorOfWhoTakesThemEndsAHold),
       TEST(MemoryIsPinnedAsItFills), TEST(OtherThreadsGoOnWithWhatIsPinnedSoFar)});
}
