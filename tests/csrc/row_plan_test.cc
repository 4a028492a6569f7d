// What decides about rows without any I/O: the map of rows, the plan of reads, and which rows the cache keeps. The map
// is compared with std::unordered_map; of the plan and the cache, random tables show that they keep what they promise.
//
// row_plan_test [SCRATCH_DIRECTORY]
#include <algorithm>
#include <array>
#include <set>
#include <unordered_map>

#include "core/alignment.h"
#include "rows/cache.h"
#include "rows/flat_map.h"
#include "rows/plan.h"
#include "simulation.h"
#include "testing_rows.h"

namespace fastpersist {
namespace {

// --- the map

// Keys whose home in an array of up to 2^16 entries is the same: the hash multiplies, so they are multiples of an
// inverse.
uint64_t KeyWithHash(uint64_t hash) {
  uint64_t inverse = 1;  // of the multiplier, by Newton's iteration
  for (int i = 0; i < 6; ++i) inverse *= 2 - (0x9E3779B97F4A7C15U * inverse);
  return hash * inverse;
}

template <class MakeKey>
void CompareWithUnorderedMap(uint64_t seed, size_t step_count, MakeKey make_key) {
  Random random(seed);
  FlatMap<uint32_t> map(random.Below(20));
  std::unordered_map<uint64_t, uint32_t> model;
  for (size_t step = 0; step < step_count; ++step) {
    const uint64_t key = make_key(random);
    if (random.OneIn(1000)) {
      map.Clear();
      model.clear();
    } else if (random.OneIn(2)) {
      const auto value = static_cast<uint32_t>(random.Next());
      map.Set(key, value);
      model[key] = value;
    } else {
      map.Erase(key);
      model.erase(key);
    }
    const uint64_t asked = make_key(random);
    const uint32_t* const found = map.Find(asked);
    const auto expected = model.find(asked);
    const bool is_same = expected == model.end() ? found == nullptr : found != nullptr && *found == expected->second;
    if (!EXPECT_WITH(is_same && map.size() == model.size(), "seed " + std::to_string(seed))) return;
  }
  for (const auto& [key, value] : model) {
    const uint32_t* const found = map.Find(key);
    if (!EXPECT_WITH(found != nullptr && *found == value, "seed " + std::to_string(seed))) return;
  }
}

void AFlatMapIsAMap() {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CompareWithUnorderedMap(seed, 5000, [&](Random& random) { return random.Below(10 * seed); });
    CompareWithUnorderedMap(seed, 5000, [](Random& random) { return random.Next() >> 1; });
  }
}

void AFlatMapTakesManyKeysOfOneHome() {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    // The first place of the array, the last one, where runs wrap around, and both.
    CompareWithUnorderedMap(seed, 3000, [](Random& random) { return KeyWithHash(random.Below(60)); });
    CompareWithUnorderedMap(seed, 3000, [](Random& random) { return KeyWithHash(~uint64_t{1} - random.Below(60)); });
    CompareWithUnorderedMap(seed, 3000, [](Random& random) {
      return KeyWithHash(random.OneIn(2) ? random.Below(30) : ~uint64_t{1} - random.Below(30));
    });
  }
}

// --- the table

void IdsThatAreNoRowsAreFound() {
  const RowTable table({{.fd = -1, .path = "a", .offset_bytes = 0, .row_count = 1000}}, 8, {});
  std::vector<int64_t> ids(3000, 999);
  EXPECT(table.FirstBadId(ids) == ids.size());
  EXPECT(table.FirstBadId({}) == 0);
  for (const size_t bad : {size_t{0}, size_t{255}, size_t{256}, size_t{2815}, size_t{2816}, size_t{2999}}) {
    for (const int64_t id : {int64_t{1000}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
      std::vector<int64_t> some = ids;
      some[bad] = id;
      EXPECT(table.FirstBadId(some) == bad);
      some.back() = -5;
      EXPECT(table.FirstBadId(some) == bad);
    }
  }
}

void PlacesSkipEmptyPieces() {
  const RowTable table({{.fd = -1, .path = "a", .offset_bytes = 100, .row_count = 2},
                        {.fd = -1, .path = "b", .offset_bytes = 7, .row_count = 0},
                        {.fd = -1, .path = "c", .offset_bytes = 0, .row_count = 3}},
                       10, {});
  EXPECT(table.row_count() == 5);
  const auto is_at = [&](uint64_t position, uint32_t piece, uint64_t offset_bytes) {
    const RowPlace place = table.PlaceOf(position);
    return place.piece == piece && place.offset_bytes == offset_bytes;
  };
  EXPECT(is_at(0, 0, 100) && is_at(1, 0, 110) && is_at(2, 2, 0) && is_at(4, 2, 20));
}

// --- the plan

std::vector<RowWant> RandomWants(Random& random, uint64_t row_count, size_t count) {
  std::vector<RowWant> wants;
  uint64_t position = random.Below(row_count);
  for (size_t i = 0; i < count; ++i) {
    // Runs, repetitions, near rows and jumps.
    const uint64_t choice = random.Below(10);
    if (choice < 6) position += choice < 4 ? 1 : random.Below(20);
    if (choice > 7) position = random.Below(row_count);
    position %= row_count;
    wants.push_back({position, i});
  }
  return wants;
}

void SortingSortsAndLosesNothing() {
  Random random(3);
  for (const size_t count : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{5000}}) {
    for (const uint64_t row_count : {uint64_t{1}, uint64_t{2047}, uint64_t{2048}, uint64_t{1} << 40}) {
      std::vector<RowWant> wants = RandomWants(random, row_count, count);
      const std::vector<RowWant> given = wants;
      SortByPosition(wants);
      std::set<uint64_t> seen;
      for (size_t i = 0; i < wants.size(); ++i) {
        EXPECT(i == 0 || wants[i - 1].position <= wants[i].position);
        EXPECT(wants[i].position == given[wants[i].index].position);
        seen.insert(wants[i].index);
      }
      EXPECT(seen.size() == count && wants.size() == count);
    }
  }
}

struct PlanCase {
  RowTable table;
  PlanLimits limits;
  std::vector<RowWant> wants;
};

PlanCase RandomPlan(Random& random) {
  const uint32_t block_bytes = random.OneIn(4) ? 1 : 512U << random.Below(4);
  const auto row_bytes = static_cast<uint32_t>(random.OneIn(8) ? random.Within(1, 300'000) : random.Within(1, 6000));
  std::vector<RowPiece> pieces;
  uint64_t row_count = 0;
  for (uint64_t i = random.Within(1, 4); i > 0; --i) {
    const uint64_t count = random.OneIn(4) ? 0 : random.Within(1, 3000);
    pieces.push_back({.fd = -1, .path = "p", .offset_bytes = random.Below(10'000), .row_count = count});
    row_count += count;
  }
  if (row_count == 0) row_count = pieces.back().row_count = 1;
  const PlanLimits limits{.block_bytes = block_bytes,
                          .gap_bytes = static_cast<uint32_t>(random.OneIn(3) ? 0 : random.Below(20'000)),
                          .read_bytes_max = static_cast<uint32_t>(random.OneIn(3) ? 8192 : 128 << 10)};
  std::vector<RowWant> wants = random.OneIn(4) ? std::vector<RowWant>() : RandomWants(random, row_count, 500);
  if (wants.empty()) {
    for (uint64_t position = 0; position < row_count; ++position) wants.push_back({position, position});
  }
  SortByPosition(wants);
  return {RowTable(std::move(pieces), row_bytes, {}), limits, std::move(wants)};
}

// Whether a read could have taken the row of the next one too.
bool CouldJoin(const PlanCase& plan, const RowRead& read, const RowRead& next) {
  const RowPlace place = plan.table.PlaceOf(plan.wants[next.first_want].position);
  const uint64_t end = AlignUp(place.offset_bytes + plan.table.row_bytes(), plan.limits.block_bytes);
  return read.piece == next.piece && next.offset_bytes <= read.offset_bytes + read.size_bytes + plan.limits.gap_bytes &&
         end - read.offset_bytes <= plan.limits.read_bytes_max;
}

void CheckPlan(const PlanCase& plan, const std::string& seed) {
  const std::vector<RowRead> reads = PlanReads(plan.table, plan.wants, plan.limits);
  const uint32_t row_bytes = plan.table.row_bytes();
  size_t want = 0;
  for (size_t i = 0; i < reads.size(); ++i) {
    const RowRead& read = reads[i];
    bool is_right = read.first_want == want && read.want_count > 0;
    is_right = is_right && read.offset_bytes % plan.limits.block_bytes == 0;
    is_right = is_right && read.size_bytes % plan.limits.block_bytes == 0 && read.needed_bytes <= read.size_bytes;
    const size_t end_want = want + read.want_count;
    uint64_t row_count = 0;
    for (; want < end_want && want < plan.wants.size(); ++want) {
      const RowPlace place = plan.table.PlaceOf(plan.wants[want].position);
      is_right = is_right && place.piece == read.piece && place.offset_bytes >= read.offset_bytes;
      is_right = is_right && place.offset_bytes + row_bytes <= read.offset_bytes + read.needed_bytes;
      if (want == read.first_want || plan.wants[want].position != plan.wants[want - 1].position) ++row_count;
    }
    is_right = is_right && want == end_want;
    // What is longer than the limit is one row, in as few blocks as hold it.
    is_right = is_right && (read.size_bytes <= plan.limits.read_bytes_max || row_count == 1);
    is_right = is_right && (row_count > 1 || read.size_bytes < row_bytes + (2 * uint64_t{plan.limits.block_bytes}));
    // A table may end in the middle of a block.
    const RowPiece& piece = plan.table.pieces()[read.piece];
    const uint64_t rows_end = piece.offset_bytes + (piece.row_count * row_bytes);
    is_right = is_right && read.needed_bytes == std::min<uint64_t>(read.size_bytes, rows_end - read.offset_bytes);
    is_right = is_right && (i == 0 || !CouldJoin(plan, reads[i - 1], read));
    if (!EXPECT_WITH(is_right, seed + ", read " + std::to_string(i))) return;
  }
  EXPECT_WITH(want == plan.wants.size(), seed);
}

void APlanKeepsWhatItPromises() {
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    Random random(seed);
    CheckPlan(RandomPlan(random), "seed " + std::to_string(seed));
  }
}

void RowsOfOneBlockShareARead() {
  const RowTable table({{.fd = -1, .path = "a", .offset_bytes = 128, .row_count = 100}}, 100, {});
  const std::vector<RowWant> wants = {{0, 0}, {2, 1}, {2, 2}, {3, 3}, {60, 4}};
  const std::vector<RowRead> reads = PlanReads(table, wants, {.block_bytes = 512, .gap_bytes = 0});
  EXPECT(reads.size() == 2);
  EXPECT(reads[0].offset_bytes == 0 && reads[0].size_bytes == 1024 && reads[0].needed_bytes == 1024);
  EXPECT(reads[0].want_count == 4 && reads[1].first_want == 4);
  EXPECT(reads[1].offset_bytes == 5632 && reads[1].size_bytes == 1024 && reads[1].needed_bytes == 1024);
}

// --- the cache

void FillRow(std::byte* slot, uint64_t row, uint32_t row_bytes) {
  for (uint32_t at = 0; at < row_bytes; ++at) slot[at] = RowByte(row, at);
}

void NoTwoRowsAreInOneSlot() {
  constexpr uint32_t kRowBytes = 24;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    Random random(seed);
    // Tables of many rows, of rows that have a place each in the directory, and of rows that all fit.
    const uint64_t row_count = std::array{100'000, 600, 300}[seed % 3];
    const uint64_t cache_bytes = random.Within(row_count == 100'000 ? 100 : 16'000, 20'000);
    const auto cache = Must(RowCache::Create(cache_bytes, kRowBytes, row_count));
    EXPECT(cache->HasSlotForEachRow() == (row_count == 300));
    std::set<uint64_t> kept;
    uint32_t read_batch = 0;
    for (int step = 0; step < 20'000; ++step) {
      const uint64_t row = random.Below(random.OneIn(2) ? 50 : std::min<uint64_t>(row_count, 2000));
      cache->Prefetch(row);
      cache->PrefetchEntry(row);
      const uint32_t batch = read_batch + 1 + static_cast<uint32_t>(random.Below(RowCache::kWindow));
      EXPECT(cache->KnowsBatch(batch) && !cache->KnowsBatch(read_batch + RowCache::kWindow + 1));
      const uint32_t slot = cache->Find(row);
      if (slot != RowCache::kNoSlot) {
        if (!EXPECT(slot < cache->slot_count() && IsRow(cache->BytesOf(slot), row, kRowBytes))) return;
        cache->CountHit(slot);
        if (random.OneIn(5)) cache->AddUse(slot, batch);
        if (random.OneIn(5)) cache->EndUse(slot, batch);
      } else {
        const bool is_kept = random.OneIn(200);
        const RowCache::Admission admission = cache->Admit(row, random.OneIn(2) ? 0 : RowCache::UseOf(batch), is_kept);
        if (admission.slot != nullptr) FillRow(admission.slot, row, kRowBytes);
        EXPECT((admission.slot != nullptr) == (cache->Find(row) != RowCache::kNoSlot));
        EXPECT(admission.evicted_uses == 0 || cache->Find(admission.evicted_row) == RowCache::kNoSlot);
        if (admission.slot != nullptr && is_kept) kept.insert(row);
      }
      if (random.OneIn(50)) cache->SetReadBatch(++read_batch);
      if (random.OneIn(5000)) {
        cache->Clear();
        kept.clear();
        EXPECT(cache->size() == 0);
      }
      EXPECT(cache->size() <= cache->slot_count());
    }
    for (const uint64_t row : kept) EXPECT(cache->Find(row) != RowCache::kNoSlot);
  }
}

void ACacheKeepsToItsBytes() {
  for (const uint64_t cache_bytes : {0, 1, 50, 1000, 100'000, 10'000'000}) {
    for (const uint32_t row_bytes : {1, 128, 5000}) {
      const auto cache = Must(RowCache::Create(cache_bytes, row_bytes, uint64_t{1} << 40));
      const uint64_t slot_count = cache->slot_count();
      EXPECT(slot_count * row_bytes <= cache_bytes);
      // Metadata is no excuse for nothing: at most 28 bytes a row.
      EXPECT(slot_count >= cache_bytes / (row_bytes + 28));
    }
  }
  EXPECT(Must(RowCache::Create(1 << 20, 64, 10))->slot_count() == 10);
  const auto none = Must(RowCache::Create(0, 64, 10));
  none->Prefetch(1);
  EXPECT(none->Admit(1, 0, true).slot == nullptr && none->Find(1) == RowCache::kNoSlot);
  none->Clear();
}

// With rows 0, 1, 2, …, each of which `batch` will use (0: nobody).
std::unique_ptr<RowCache> FullCache(uint32_t batch) {
  auto cache = Must(RowCache::Create(200'000, 64, 1'000'000));
  const uint32_t uses = batch == 0 ? 0 : RowCache::UseOf(batch);
  for (uint64_t row = 0; row < cache->slot_count(); ++row) EXPECT(cache->Admit(row, uses, false).slot != nullptr);
  EXPECT(cache->size() == cache->slot_count());
  return cache;
}

void ABatchThatIsReadLateDoesNotBringEarlierOnesBack() {
  const auto cache = Must(RowCache::Create(10'000, 64, 100));
  cache->SetReadBatch(8);
  cache->SetReadBatch(7);
  EXPECT(!cache->KnowsBatch(8) && cache->KnowsBatch(9) && cache->KnowsBatch(8 + RowCache::kWindow));
}

bool Comes(RowCache& cache, uint64_t row, uint32_t uses = 0) { return cache.Admit(row, uses, false).slot != nullptr; }
bool IsKept(RowCache& cache, uint64_t row) { return cache.Admit(row, 0, true).slot != nullptr; }

void AnyRowThatIsNotKeptMakesRoomForOneThatIs() {
  const auto cache = FullCache(0);
  const uint64_t count = cache->slot_count();
  for (uint64_t row = count; row < 2 * count; ++row) EXPECT_WITH(IsKept(*cache, row), std::to_string(row));
  EXPECT(!IsKept(*cache, 2 * count));
  EXPECT(!Comes(*cache, 2 * count, RowCache::UseOf(1)));
  for (uint64_t row = count; row < 2 * count; ++row) EXPECT(cache->Find(row) != RowCache::kNoSlot);
}

void RowsThatAreKeptWhereTheyAreStayToo() {
  const auto cache = FullCache(0);
  const uint64_t count = cache->slot_count();
  for (uint64_t row = 0; row < count; row += 2) cache->Keep(cache->Find(row));
  for (uint64_t row = 0; row < count; row += 2) cache->CountHit(cache->Find(row));  // does not undo it
  size_t kept_count = 0;
  for (uint64_t row = count; row < 3 * count; ++row) kept_count += IsKept(*cache, row) ? 1 : 0;
  EXPECT_WITH(kept_count == count / 2, std::to_string(kept_count));
  for (uint64_t row = 0; row < count; row += 2) EXPECT(cache->Find(row) != RowCache::kNoSlot);
  cache->Clear();
  EXPECT(cache->size() == 0);
  for (uint64_t row = 0; row < count; ++row) EXPECT(IsKept(*cache, row));
}

void ARowThatWillBeUsedIsBetterThanOneOfWhichNothingIsKnown() {
  const auto cache = FullCache(0);
  const uint64_t count = cache->slot_count();
  for (int use = 0; use < 200; ++use) {
    for (uint64_t row = 0; row < count; ++row) cache->CountHit(cache->Find(row));
  }
  EXPECT(!Comes(*cache, count));
  EXPECT(Comes(*cache, count, RowCache::UseOf(3)));
}

void OfTwoRowsThatWillBeUsedTheOneThatIsUsedSoonerIsBetter() {
  const auto cache = FullCache(5);
  const uint64_t count = cache->slot_count();
  EXPECT(!Comes(*cache, count));
  EXPECT(!Comes(*cache, count, RowCache::UseOf(6)));
  const RowCache::Admission sooner = cache->Admit(count, RowCache::UseOf(4) | RowCache::UseOf(9), false);
  EXPECT(sooner.slot != nullptr && sooner.evicted_uses == RowCache::UseOf(5));
  cache->SetReadBatch(4);
  cache->EndUse(cache->Find(count), 4);  // its next one is batch 9
  EXPECT(!Comes(*cache, count + 1, RowCache::UseOf(4 + RowCache::kWindow)));
  // A row whose uses are over is like any other.
  cache->SetReadBatch(5);
  for (uint64_t row = 0; row < count; ++row) {
    const uint32_t slot = cache->Find(row);
    if (slot != RowCache::kNoSlot) cache->EndUse(slot, 5);
  }
  EXPECT(Comes(*cache, count + 1, RowCache::UseOf(4 + RowCache::kWindow)));
}

void ARowThatMissesOftenReplacesOneThatIsNotUsed() {
  const auto cache = FullCache(0);
  const uint64_t count = cache->slot_count();
  int try_count = 1;
  while (!Comes(*cache, count) && try_count < 20) ++try_count;
  EXPECT_WITH(try_count == 2, std::to_string(try_count));  // the others have come once
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(
      argc, argv,
      {TEST(AFlatMapIsAMap), TEST(AFlatMapTakesManyKeysOfOneHome), TEST(IdsThatAreNoRowsAreFound),
       TEST(PlacesSkipEmptyPieces), TEST(SortingSortsAndLosesNothing), TEST(APlanKeepsWhatItPromises),
       TEST(RowsOfOneBlockShareARead), TEST(NoTwoRowsAreInOneSlot), TEST(ACacheKeepsToItsBytes),
       TEST(ABatchThatIsReadLateDoesNotBringEarlierOnesBack), TEST(AnyRowThatIsNotKeptMakesRoomForOneThatIs),
       TEST(RowsThatAreKeptWhereTheyAreStayToo), TEST(ARowThatWillBeUsedIsBetterThanOneOfWhichNothingIsKnown),
       TEST(OfTwoRowsThatWillBeUsedTheOneThatIsUsedSoonerIsBetter), TEST(ARowThatMissesOftenReplacesOneThatIsNotUsed)});
}
