// What RowStore does when reads fail (rows/store.h): the requests that wait for a failed read fail with its place, all
// others are right, and the store goes on.
//
// row_store_faults_test [SCRATCH_DIRECTORY]
#include <fcntl.h>

#include <thread>

#include "core/file.h"
#include "testing_row_store.h"

namespace fastpersist {
namespace {

constexpr uint32_t kRowBytes = 512;

std::unique_ptr<RowStore> Open(const TableFiles& files, std::vector<std::string> engines, uint64_t cache_bytes = 0) {
  return Must(RowStore::Open(
      files.Table(),
      {.reader = {.engines = std::move(engines), .queue_depth = 16}, .cache_bytes = cache_bytes, .gap_bytes = 0}));
}

// Few rows are read by the caller, many by the worker.
void TheNthReadFailsUntilNoneIsLeftToFail() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  for (const std::vector<int64_t>& ids : {EachNth(200, 4000), EachNth(40, 4000)}) {
    const auto store = Open(files, {"fault:threads-buffered"});
    uint64_t nth = 1;
    for (;; ++nth) {
      SetFaultPlan(Fault::Errno(EIO, nth, 1));
      Bytes result(ids.size() * kRowBytes);
      const auto request = store->Start(ids, result.data(), RowRequest::kNoBatch);
      const Status status = Wait(*request);
      if (ClearFaultPlan() == 0) {
        EXPECT_OK(status);
        break;
      }
      EXPECT(status.sys_errno() == EIO && status.code() == StatusCode::kIoError);
      EXPECT(request->failed_path() == files.file(0).path());
      const uint64_t row = status.offset_bytes() / kRowBytes;
      EXPECT(std::ranges::find(ids, static_cast<int64_t>(row)) != ids.end());
      const std::string expected = "read of row " + std::to_string(row) + " of " + files.file(0).path() +
                                   " at offset " + std::to_string(row * kRowBytes) + ": " + std::strerror(EIO);
      EXPECT_WITH(status.message() == expected, status.message());
      ExpectRows(*store, ids);
    }
    EXPECT_WITH(nth == ids.size() + 1, std::to_string(nth));
  }
}

void AnErrorNamesARowThatWasAskedFor() {
  const TableFiles files(100, {{128, 1000}});
  if (!DirectIoLimitsOf(files.file(0).fd()).supported) return;
  const auto store = Open(files, {"fault:threads"});
  const Fault fault(Fault::Errno(EIO, 1, 1));
  Bytes result(100);
  const auto request = store->Start(std::vector<int64_t>{77}, result.data(), RowRequest::kNoBatch);
  EXPECT_WITH(Contains(Wait(*request).message(), "row 77 of"), request->status().message());
}

// The file ends behind row 99 of 200. A read of rows 90 to 109 brings the first ten, and fails.
void AnErrorNamesNoRowThatCameBeforeIt() {
  const TableFiles files(kRowBytes, {{0, 100}});
  const RowPiece piece = {.fd = files.file(0).fd(), .path = files.file(0).path(), .offset_bytes = 0, .row_count = 200};
  const auto store =
      Must(RowStore::Open({{piece}, kRowBytes, {}}, {.reader = {.engines = {"fault:threads-buffered"}}}));
  std::vector<int64_t> ids(20);
  std::iota(ids.begin(), ids.end(), 90);
  Bytes first(ids.size() * kRowBytes);
  Bytes second(kRowBytes);
  const Fault fault(Fault::Delay(100));
  const auto a = store->Start(ids, first.data(), 1);
  const auto b = store->Start(std::vector<int64_t>{95}, second.data(), 2);
  const Status of_a = Wait(*a);
  const Status of_b = Wait(*b);
  EXPECT_WITH(of_a.code() == StatusCode::kEndOfFile && Contains(of_a.message(), "row 100: "), of_a.message());
  EXPECT(of_a.offset_bytes() == 100 * kRowBytes && of_b.offset_bytes() == 100 * kRowBytes);
  EXPECT_WITH(of_b.code() == StatusCode::kEndOfFile && !Contains(of_b.message(), "row 95"), of_b.message());
  EXPECT_WITH(Contains(of_b.message(), piece.path), of_b.message());
  EXPECT(store->stats().read_count == 1);
}

void OnlyThoseWhoWaitForAReadThatFailedFail() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  const auto store = Open(files, {"fault:threads-buffered"}, 4 << 20);
  const std::vector<int64_t> many = EachNth(40, 4000);
  const std::vector<int64_t> sharing = {0, 2000, 3960};
  const std::vector<int64_t> others = {1, 2001, 3001};
  Bytes first(many.size() * kRowBytes);
  Bytes second(sharing.size() * kRowBytes);
  Bytes third(others.size() * kRowBytes);
  SetFaultPlan(Fault::Delay(300));
  const auto a = store->Start(many, first.data(), RowRequest::kNoBatch);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // its first 16 reads are under way
  SetFaultPlan(Fault::Errno(EIO, 1, Fault::kAll));              // the others are not
  const auto b = store->Start(sharing, second.data(), RowRequest::kNoBatch);
  const Status of_a = Wait(*a);
  const Status of_b = Wait(*b);
  EXPECT(of_a.sys_errno() == EIO && of_b.sys_errno() == EIO);
  EXPECT_WITH(Contains(of_b.message(), "row 2000 ") || Contains(of_b.message(), "row 3960 "), of_b.message());
  ClearFaultPlan();
  const auto c = store->Start(others, third.data(), RowRequest::kNoBatch);
  EXPECT_OK(Wait(*c));
  CheckRows(third, others, kRowBytes);
  // What came before the first failure is in the cache, what failed is not.
  const uint64_t hit_count = store->stats().hit_count;
  ExpectRows(*store, {0, 40});
  EXPECT(store->stats().hit_count == hit_count + 2);
  ExpectRows(*store, many);
}

void ShortReadsAreFinished() {
  const TableFiles files(1000, {{128, 3000}, {5, 1000}});
  for (const std::string& engine : UsableEngines()) {
    const auto store = Open(files, {"fault:" + engine});
    Random random(2);
    for (uint64_t nth = 1; nth < 40; nth += 6) {
      SetFaultPlan(Fault::Short(512, nth, 20));
      ExpectRows(*store, RandomIds(random, 4000, 30));
      ExpectRows(*store, RandomIds(random, 4000, 300));
      EXPECT(ClearFaultPlan() > 0);
    }
  }
}

void AFileThatBecomesShorterIsAnErrorOfItsRowsAlone() {
  for (const std::string& engine : UsableEngines()) {
    const TableFiles files(1000, {{0, 4000}});
    const auto store = Open(files, {"fault:" + engine});
    const std::vector<int64_t> ids = EachNth(20, 4000);
    Bytes result(ids.size() * 1000);
    SetFaultPlan(Fault::Delay(60));
    const auto request = store->Start(ids, result.data(), RowRequest::kNoBatch);
    FP_CHECK(truncate(files.file(0).path().c_str(), 3'100'500) == 0);
    ClearFaultPlan();
    const Status status = Wait(*request);
    EXPECT_WITH(status.code() == StatusCode::kEndOfFile, engine + ": " + status.message());
    EXPECT_WITH(Contains(status.message(), files.file(0).path()), status.message());
    // The next request finds that the file is another one.
    EXPECT(Contains(Wait(*store->Start(ids, result.data(), RowRequest::kNoBatch)).message(), "has changed"));
  }
}

void AFileThatChangesIsFoundAndItsRowsAreForgotten() {
  const TableFiles files(kRowBytes, {{0, 100}, {0, 100}});
  const auto store = Open(files, {"threads-buffered"}, 4 << 20);
  ExpectRows(*store, {1, 2, 150});
  EXPECT(store->stats().cached_count == 3);
  const uint64_t read_count = store->stats().read_count;
  const int fd = open(files.file(1).path().c_str(), O_WRONLY | O_CLOEXEC);
  const struct timespec times[2] = {{.tv_sec = 1, .tv_nsec = 2}, {.tv_sec = 1, .tv_nsec = 2}};
  FP_CHECK(pwrite(fd, "x", 1, 0) == 1 && futimens(fd, times) == 0);
  close(fd);
  Bytes result(kRowBytes);
  const auto request = store->Start(std::vector<int64_t>{1}, result.data(), RowRequest::kNoBatch);
  const Status status = Wait(*request);
  EXPECT_WITH(status.code() == StatusCode::kIoError && Contains(status.message(), "changed"), status.message());
  EXPECT_WITH(request->failed_path() == files.file(1).path(), request->failed_path());
  EXPECT(store->stats().cached_count == 0 && store->stats().read_count == read_count);
}

void AnEngineThatIsNotSupportedIsReplacedForSmallRequestsToo() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  for (const std::vector<int64_t>& ids : {EachNth(400, 4000), EachNth(20, 4000)}) {
    const auto store = Open(files, {"fault:threads-buffered", "threads-buffered"});
    const Fault fault(Fault::Errno(EOPNOTSUPP, 1, Fault::kAll));
    ExpectRows(*store, ids);
    EXPECT_WITH(store->engine_name() == "threads-buffered", store->engine_name());
    EXPECT(store->demotions().size() == 1);
    ExpectRows(*store, EachNth(300, 4000));
    ExpectRows(*store, EachNth(10, 4000));
    EXPECT(store->demotions().size() == 1);
  }
}

// No engine is left, so everything fails; nobody waits for ever.
void AnEngineThatBreaksEndsAllRequests() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  for (uint64_t nth = 1; nth <= 100; nth += 9) {
    const auto store = Open(files, {"fault:threads-buffered", "abacus"}, 100'000);
    SetFaultPlan(Fault::Errno(EOPNOTSUPP, nth, Fault::kAll));
    std::vector<std::thread> threads;
    std::atomic<uint32_t> next_batch = 1;
    for (uint64_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] { RandomRequests(*store, i + nth, 20, next_batch, /*may_fail=*/true); });
    }
    for (std::thread& thread : threads) thread.join();
    ClearFaultPlan();
  }
}

void AnEngineThatBrokeIsOpenedAgain() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  const auto store = Open(files, {"fault:threads-buffered", "abacus"});
  for (const std::vector<int64_t>& ids : {EachNth(7, 4000), EachNth(200, 4000)}) {
    for (int i = 0; i < 2; ++i) {
      Bytes result(ids.size() * kRowBytes);
      const Fault fault(Fault::Errno(EOPNOTSUPP, 1, Fault::kAll));
      EXPECT(!Wait(*store->Start(ids, result.data(), RowRequest::kNoBatch)).ok());
    }
    ExpectRows(*store, ids);
  }
}

void ManyThreadsMayDoAnythingWhileReadsFail() {
  const TableFiles files(264, {{128, 1500}, {0, 2500}});
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const auto store = Open(files, {"fault:threads-buffered"}, 100'000);
    std::atomic<uint32_t> next_batch = 1;
    std::atomic<bool> is_over = false;
    std::thread breaker([&] {
      Random random(seed);
      while (!is_over) {
        SetFaultPlan(random.OneIn(3) ? Fault::Delay(2) : Fault::Errno(EIO, random.Within(1, 50), random.Within(1, 20)));
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
    std::vector<std::thread> threads;
    for (uint64_t number = 0; number < 6; ++number) {
      threads.emplace_back([&, number] { RandomRequests(*store, (seed * 100) + number, 50, next_batch, true); });
    }
    for (std::thread& thread : threads) thread.join();
    is_over = true;
    breaker.join();
    ClearFaultPlan();
    ExpectRows(*store, AllIds(4000));
  }
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(TheNthReadFailsUntilNoneIsLeftToFail), TEST(AnErrorNamesARowThatWasAskedFor),
              TEST(AnErrorNamesNoRowThatCameBeforeIt), TEST(OnlyThoseWhoWaitForAReadThatFailedFail),
              TEST(ShortReadsAreFinished), TEST(AFileThatBecomesShorterIsAnErrorOfItsRowsAlone),
              TEST(AFileThatChangesIsFoundAndItsRowsAreForgotten),
              TEST(AnEngineThatIsNotSupportedIsReplacedForSmallRequestsToo), TEST(AnEngineThatBreaksEndsAllRequests),
              TEST(AnEngineThatBrokeIsOpenedAgain), TEST(ManyThreadsMayDoAnythingWhileReadsFail)});
}
