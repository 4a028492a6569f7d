// RowStore gathers rows of real files (rows/store.h): every result is compared with what the rows must be, for many
// shapes of tables, with several threads, a small cache and requests that are cancelled. row_store_faults_test makes
// reads fail.
//
// row_store_test [SCRATCH_DIRECTORY]
#include <algorithm>
#include <numeric>
#include <thread>

#include "rows/store.h"
#include "simulation.h"
#include "testing_row_store.h"

namespace fastpersist {
namespace {

// --- one thread

void GathersBringTheRowsAskedFor() {
  struct Layout {
    uint32_t row_bytes;
    std::vector<PieceShape> pieces;
  };
  const std::vector<Layout> layouts = {
      {1, {{128, 3000}}},
      {264, {{128, 2000}}},
      {512, {{4096, 1000}}},
      {1000, {{7, 500}, {0, 0}, {4096, 700}, {129, 1}}},
      {4096, {{0, 300}, {100, 300}}},
      {300'000, {{5, 20}}},
  };
  for (const std::string& engine : UsableEngines()) {
    for (const Layout& layout : layouts) {
      const TableFiles files(layout.row_bytes, layout.pieces);
      for (const uint64_t cache_bytes : {uint64_t{0}, files.row_count() * layout.row_bytes / 4}) {
        Random random(layout.row_bytes);
        const auto store = Must(RowStore::Open(
            files.Table(), {.reader = {.engines = {engine}}, .cache_bytes = cache_bytes, .copy_thread_count = 2}));
        EXPECT(store->engine_name() == engine);
        for (const size_t count : {0, 1, 5, 100, 20, 1500}) {
          ExpectRows(*store, RandomIds(random, files.row_count(), count));
        }
        ExpectRows(*store, AllIds(files.row_count()));
        ExpectRows(*store, std::vector<int64_t>(1000, static_cast<int64_t>(files.row_count()) - 1));
      }
    }
  }
}

// Each row begins in the block where the one before it ends, for up to 512 rows in a row.
void DenseRowsThatStraddleBlocksAreReadInPartsOfBearableLength() {
  for (const uint32_t row_bytes : {257, 1025, 2050, 4097, 5001}) {
    const TableFiles files(row_bytes, {{0, 5000}});
    for (const std::string& engine : UsableEngines()) {
      const auto store = Must(RowStore::Open(files.Table(), {.reader = {.engines = {engine}}}));
      const std::vector<int64_t> ids = AllIds(files.row_count());
      ExpectRows(*store, {ids.begin(), ids.begin() + 600});  // by the caller
      ExpectRows(*store, ids);
      const RowStoreStats stats = store->stats();
      EXPECT_WITH(stats.read_count >= stats.read_bytes / (128 << 10), std::to_string(stats.read_count));
    }
  }
}

void IdsMayDifferFromPositions() {
  const TableFiles files(100, {{10, 600}, {20, 400}});
  std::vector<int64_t> positions = AllIds(1000);
  Random random(5);
  for (size_t i = positions.size() - 1; i > 0; --i) std::swap(positions[i], positions[random.Below(i + 1)]);
  const auto store = Must(RowStore::Open(
      files.Table(positions), {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 40'000, .gap_bytes = 300}));
  for (int round = 0; round < 30; ++round) {
    const std::vector<int64_t> ids = RandomIds(random, 1000, 200);
    Bytes result(ids.size() * 100);
    EXPECT_OK(Wait(*store->Start(ids, result.data(), RowRequest::kNoBatch)));
    for (size_t i = 0; i < ids.size(); ++i) {
      EXPECT(IsRow(result.data() + (i * 100), static_cast<uint64_t>(positions[static_cast<size_t>(ids[i])]), 100));
    }
  }
}

void ARequestMayHaveManyReads() {
  const TableFiles files(512, {{0, 140'000}});
  const auto store = Must(RowStore::Open(files.Table(), {.reader = {.engines = {"threads-buffered"}}, .gap_bytes = 0}));
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < 140'000; id += 2) ids.push_back(id);
  ExpectRows(*store, ids);
  EXPECT(store->stats().read_count == 70'000 && store->stats().read_bytes == uint64_t{70'000} * 512);
}

void TheStatisticsCount() {
  const TableFiles files(512, {{0, 1000}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 4 << 20}));
  ExpectRows(*store, {});
  EXPECT(store->stats().row_count == 0 && store->stats().read_count == 0);
  ExpectRows(*store, {1, 2, 3, 500, 500});
  RowStoreStats stats = store->stats();
  EXPECT(stats.row_count == 5 && stats.hit_count == 0 && stats.shared_count == 0);
  EXPECT(stats.read_count == 2 && stats.read_bytes == 2048 && stats.cached_count == 4 && stats.slot_count == 1000);
  ExpectRows(*store, {500, 3, 4});
  stats = store->stats();
  EXPECT(stats.row_count == 8 && stats.hit_count == 2 && stats.read_count == 3 && stats.cached_count == 5);
}

void RowsThatAreKeptNeedNoMoreReads() {
  const TableFiles files(512, {{0, 2000}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 200 << 10}));
  std::vector<int64_t> others;
  for (int64_t id = 1000; id < 2000; ++id) others.push_back(id);
  ExpectRows(*store, others);  // fills the cache
  const auto count = static_cast<int64_t>(store->stats().slot_count);
  std::vector<int64_t> kept = AllIds(static_cast<uint64_t>(count));
  EXPECT(store->Keep(kept) == kept.size());
  ExpectRows(*store, kept, RowRequest::kKeep);
  EXPECT_WITH(store->Keep(kept) == 0, std::to_string(store->Keep(kept)));
  ExpectRows(*store, others);
  const uint64_t read_count = store->stats().read_count;
  ExpectRows(*store, kept);
  EXPECT(store->stats().read_count == read_count);
}

void RowsThatAreCachedWhenARequestToKeepThemComesAreKept() {
  const TableFiles files(512, {{0, 4000}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 200 << 10}));
  const std::vector<int64_t> kept = AllIds(100);
  ExpectRows(*store, kept);
  for (int round = 0; round < 2; ++round) ExpectRows(*store, kept, RowRequest::kKeep);
  EXPECT(store->stats().hit_count == 2 * kept.size() && store->stats().cached_count == kept.size());
  // Rows that a request will use push out all others.
  std::vector<int64_t> better;
  for (int64_t id = 1000; id < 4000; ++id) better.push_back(id);
  store->Register(better, 1);
  ExpectRows(*store, better);
  EXPECT_WITH(store->Keep(kept) == 0, std::to_string(store->Keep(kept)));
  const uint64_t read_count = store->stats().read_count;
  ExpectRows(*store, kept);
  EXPECT(store->stats().read_count == read_count);
}

void RowsThatRegisteredRequestsWillUseStayInTheCache() {
  const TableFiles files(512, {{0, 4000}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 200 << 10}));
  std::vector<int64_t> known;
  for (int64_t id = 0; id < 100; ++id) known.push_back(id * 7);
  store->Register(known, 2);
  ExpectRows(*store, known);
  for (int64_t first = 1000; first < 4000; first += 100) {
    std::vector<int64_t> scan;
    for (int64_t id = first; id < first + 100; ++id) scan.push_back(id);
    ExpectRows(*store, scan);
  }
  const uint64_t hit_count = store->stats().hit_count;
  ExpectRows(*store, known, 2);
  EXPECT(store->stats().hit_count == hit_count + known.size());
}

void RegisteredRequestsFindTheirRowsInACacheOfAllRows() {
  const TableFiles files(128, {{0, 3000}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"threads-buffered"}}, .cache_bytes = 1 << 20}));
  std::vector<int64_t> all(3000);
  std::iota(all.begin(), all.end(), 0);
  // The first half comes with requests that are registered before it is cached, and the rest meanwhile.
  const std::vector<int64_t> half(all.begin(), all.begin() + 1500);
  for (uint32_t batch = 1; batch <= 3; ++batch) store->Register(half, batch);
  ExpectRows(*store, half, 1);
  ExpectRows(*store, all);
  const RowStoreStats before = store->stats();
  store->Register(all, 4);
  for (uint32_t batch = 2; batch <= 4; ++batch) ExpectRows(*store, batch == 4 ? all : half, batch);
  store->Unregister(all, 5);
  EXPECT(store->stats().read_count == before.read_count && store->stats().cached_count == all.size());
  EXPECT(store->stats().hit_count == before.hit_count + (2 * half.size()) + all.size());
  EXPECT(store->Keep(all) == 0 && store->CountKept() == all.size());
}

// --- several requests

// Requests each of which wants one row of every block, in the order of the block or against it.
std::vector<std::vector<int64_t>> OneRowOfEachBlock(int64_t block_count, int64_t rows_in_block, bool is_reversed) {
  std::vector<std::vector<int64_t>> requests;
  for (int64_t row = 0; row < rows_in_block; ++row) {
    std::vector<int64_t>& ids = requests.emplace_back();
    for (int64_t block = 0; block < block_count; ++block) {
      ids.push_back((block * rows_in_block) + (is_reversed ? rows_in_block - 1 - row : row));
    }
  }
  return requests;
}

// 99 blocks of 4096 bytes, far enough apart that their reads are not joined.
constexpr uint32_t kNeighbourBytes = 256;
constexpr int64_t kRowsInBlock = 4096 / kNeighbourBytes;

void RowsOfABlockThatRequestsWillUseComeWithTheFirstOfThem() {
  const TableFiles files(kNeighbourBytes, {{0, 99 * kRowsInBlock}});
  if (!DirectIoLimitsOf(files.file(0).fd()).supported) return;
  for (const bool is_reversed : {false, true}) {
    const auto requests = OneRowOfEachBlock(99, kRowsInBlock, is_reversed);
    const auto store = Must(RowStore::Open(
        files.Table(), {.reader = {.engines = {"threads"}}, .cache_bytes = uint64_t{1} << 20, .gap_bytes = 0}));
    for (uint32_t i = 0; i < requests.size(); ++i) store->Register(requests[i], i + 1);
    ExpectRows(*store, requests[0], 1);
    const uint64_t read_bytes = store->stats().read_bytes;
    for (uint32_t i = 1; i < requests.size(); ++i) {
      std::vector<int64_t> near;  // in the block of 512 bytes, or whatever the device has, that the first one was in
      for (const int64_t id : requests[i]) {
        if (id / 2 == requests[0][static_cast<size_t>(id / kRowsInBlock)] / 2) near.push_back(id);
      }
      if (!near.empty()) ExpectRows(*store, near, i + 1);
    }
    EXPECT(store->stats().read_bytes == read_bytes && store->stats().hit_count >= 99);
  }
}

void RowsOfABlockThatIsBeingReadShareTheRead() {
  const TableFiles files(kNeighbourBytes, {{0, 99 * kRowsInBlock}});
  if (!DirectIoLimitsOf(files.file(0).fd()).supported) return;
  for (const bool is_reversed : {false, true}) {
    const auto requests = OneRowOfEachBlock(99, kRowsInBlock, is_reversed);  // the first two are in blocks of 512 bytes
    const auto store = Must(
        RowStore::Open(files.Table(), {.reader = {.engines = {"fault:threads"}, .queue_depth = 256}, .gap_bytes = 0}));
    const Fault fault(Fault::Delay(200));
    Bytes first(99 * kNeighbourBytes);
    Bytes second(99 * kNeighbourBytes);
    const auto a = store->Start(requests[0], first.data(), RowRequest::kNoBatch);
    store->Register(requests[1], 1);
    const auto b = store->Start(requests[1], second.data(), 1);
    EXPECT_OK(Wait(*a));
    EXPECT_OK(Wait(*b));
    CheckRows(first, requests[0], kNeighbourBytes);
    CheckRows(second, requests[1], kNeighbourBytes);
    EXPECT_WITH(store->stats().shared_count == 99, std::to_string(store->stats().shared_count));
  }
}

void RequestsForTheSameRowsShareTheirReads() {
  const TableFiles files(512, {{0, 4000}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"fault:threads-buffered"}, .queue_depth = 256}}));
  const std::vector<int64_t> ids = EachNth(40, 4000);
  const std::vector<int64_t> many = EachNth(20, 4000);
  const Fault fault(Fault::Delay(200));
  Bytes first(many.size() * 512);
  Bytes second(many.size() * 512);
  Bytes third(ids.size() * 512);
  const auto a = store->Start(many, first.data(), RowRequest::kNoBatch);
  const auto b = store->Start(many, second.data(), RowRequest::kNoBatch);
  const auto c = store->Start(ids, third.data(), RowRequest::kNoBatch);
  EXPECT(!a->done() && !b->done() && !c->done());
  EXPECT_OK(Wait(*a));
  EXPECT_OK(Wait(*b));
  EXPECT_OK(Wait(*c));
  CheckRows(first, many, 512);
  CheckRows(second, many, 512);
  CheckRows(third, ids, 512);
  const RowStoreStats stats = store->stats();
  EXPECT(stats.read_count == many.size() && stats.shared_count == many.size() + ids.size());
}

void WhoWaitsForARowDoesNotWaitBehindAQueueForItsNeighbour() {
  const TableFiles files(kNeighbourBytes, {{0, 99 * kRowsInBlock}});
  if (!DirectIoLimitsOf(files.file(0).fd()).supported) return;
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"fault:threads"}, .queue_depth = 1}, .gap_bytes = 0}));
  const Fault fault(Fault::Delay(300));
  const std::vector<int64_t> far = EachNth(kRowsInBlock, 6 * kRowsInBlock);
  Bytes first(far.size() * kNeighbourBytes);
  store->Register(far, 1);
  const auto prefetch = store->Start(far, first.data(), 1);  // one read after the other
  ExpectRows(*store, {far.back() + 1});
  EXPECT(!prefetch->done() && store->stats().shared_count == 0);
  ExpectRows(*store, {far.back()});
  EXPECT(store->stats().shared_count == 1);
  EXPECT_OK(Wait(*prefetch));
  CheckRows(first, far, kNeighbourBytes);
}

void ACancelledRequestLeavesItsReadsToThoseWhoWait() {
  const TableFiles files(512, {{0, 8000}});
  const auto store =
      Must(RowStore::Open(files.Table(), {.reader = {.engines = {"fault:threads-buffered"}, .queue_depth = 16}}));
  const std::vector<int64_t> many = EachNth(20, 8000);  // 400 reads, 16 at a time
  const std::vector<int64_t> last = {7980, 7960, 20, 0};
  SetFaultPlan(Fault::Delay(100));
  Bytes first(many.size() * 512, std::byte{1});
  Bytes second(last.size() * 512);
  const auto a = store->Start(many, first.data(), RowRequest::kNoBatch);
  const auto b = store->Start(last, second.data(), RowRequest::kNoBatch);
  a->Cancel(Status::Error(StatusCode::kCancelled, "enough"));
  std::ranges::fill(first, std::byte{2});  // it is ours again
  EXPECT(a->done() && a->status().message() == "enough");
  ClearFaultPlan();
  EXPECT_OK(Wait(*b));
  CheckRows(second, last, 512);
  EXPECT(std::ranges::all_of(first, [](std::byte byte) { return byte == std::byte{2}; }));
  EXPECT_WITH(store->stats().read_count < 100, std::to_string(store->stats().read_count));
  // Nothing is left of the reads that were dropped.
  const uint64_t shared_count = store->stats().shared_count;
  ExpectRows(*store, many);
  EXPECT(store->stats().shared_count == shared_count);
}

void MoreSmallRequestsThanQueuesAreDoneToo() {
  const TableFiles files(512, {{0, 8000}});
  const auto store = Must(RowStore::Open(files.Table(), {.reader = {.engines = {"fault:threads-buffered"}}}));
  SetFaultPlan(Fault::Delay(20));
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 12; ++i) {
    threads.emplace_back([&, i] {
      Random random(i);
      for (int round = 0; round < 5; ++round) ExpectRows(*store, RandomIds(random, 8000, 10));
    });
  }
  for (std::thread& thread : threads) thread.join();
  ClearFaultPlan();
}

void AStoreMayGoWithRequestsUnderWay() {
  const TableFiles files(512, {{0, 8000}});
  for (int round = 0; round < 6; ++round) {
    auto store =
        Must(RowStore::Open(files.Table(), {.reader = {.engines = {"fault:threads-buffered"}, .queue_depth = 16}}));
    SetFaultPlan(Fault::Delay(30));
    const std::vector<int64_t> ids = EachNth(20, 8000);
    std::vector<Bytes> results(3, Bytes(ids.size() * 512));
    std::vector<std::shared_ptr<RowRequest>> requests;
    for (Bytes& result : results) requests.push_back(store->Start(ids, result.data(), RowRequest::kNoBatch));
    std::this_thread::sleep_for(std::chrono::milliseconds(10 * round));
    if (round % 2 == 1) requests[0]->Cancel(Status::Error(StatusCode::kCancelled, "enough"));
    ClearFaultPlan();
    store.reset();
    for (const auto& request : requests) {
      EXPECT(request->done());
      EXPECT(request->status().ok() || request->status().code() == StatusCode::kCancelled);
    }
    std::vector<Bytes>().swap(results);  // nobody writes there
  }
}

// Threads that gather, register, keep and cancel; all that is not cancelled must be right.
void ManyThreadsMayDoAnything() {
  for (const std::string& engine : UsableEngines()) {
    const TableFiles files(264, {{128, 1500}, {0, 2500}});
    const auto store = Must(RowStore::Open(files.Table(), {.reader = {.engines = {engine}, .queue_depth = 16},
                                                           .cache_bytes = 100'000,
                                                           .gap_bytes = 600,
                                                           .copy_thread_count = 2}));
    std::atomic<uint32_t> next_batch = 1;
    std::vector<std::thread> threads;
    for (uint64_t number = 0; number < 6; ++number) {
      threads.emplace_back([&, number] { RandomRequests(*store, number + 1, 30, next_batch); });
    }
    for (std::thread& thread : threads) thread.join();
    ExpectRows(*store, AllIds(4000));
  }
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(
      argc, argv,
      {TEST(GathersBringTheRowsAskedFor), TEST(DenseRowsThatStraddleBlocksAreReadInPartsOfBearableLength),
       TEST(IdsMayDifferFromPositions), TEST(ARequestMayHaveManyReads), TEST(TheStatisticsCount),
       TEST(RowsThatAreKeptNeedNoMoreReads), TEST(RowsThatAreCachedWhenARequestToKeepThemComesAreKept),
       TEST(RowsThatRegisteredRequestsWillUseStayInTheCache), TEST(RegisteredRequestsFindTheirRowsInACacheOfAllRows),
       TEST(RequestsForTheSameRowsShareTheirReads), TEST(RowsOfABlockThatRequestsWillUseComeWithTheFirstOfThem),
       TEST(RowsOfABlockThatIsBeingReadShareTheRead), TEST(WhoWaitsForARowDoesNotWaitBehindAQueueForItsNeighbour),
       TEST(ACancelledRequestLeavesItsReadsToThoseWhoWait), TEST(MoreSmallRequestsThanQueuesAreDoneToo),
       TEST(AStoreMayGoWithRequestsUnderWay), TEST(ManyThreadsMayDoAnything)});
}
