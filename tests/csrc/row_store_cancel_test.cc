// A request for rows that is cancelled when its n-th read has completed, for each n (rows/store.h): its memory is left
// alone from then on, requests that share its reads get their rows, and what nobody waits for is not read.
//
// An engine in which reads complete one by one, as the test allows, says when that is. No clock takes part.
//
// row_store_cancel_test [SCRATCH_DIRECTORY]
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <span>

#include "engine/builtin_engines.h"
#include "testing_row_store.h"

namespace fastpersist {
namespace {

constexpr uint32_t kRowBytes = 512;
constexpr uint32_t kDepth = 8;
constexpr size_t kReadCount = 30;
constexpr size_t kAll = SIZE_MAX;

// How many reads may complete, and how many have.
class Gate {
 public:
  void Open(size_t allowed_count) {
    const std::lock_guard lock(mutex_);
    allowed_count_ = allowed_count;
    changed_.notify_all();
  }
  void Close() {
    const std::lock_guard lock(mutex_);
    allowed_count_ = completed_count_ = 0;
    is_reached_ = false;
  }
  // Wait until the reader has delivered what was allowed and waits for more.
  void WaitUntilReached(size_t count) {
    std::unique_lock lock(mutex_);
    const bool is_reached =
        changed_.wait_for(lock, std::chrono::seconds(60), [&] { return is_reached_ && completed_count_ == count; });
    EXPECT_WITH(is_reached, std::to_string(completed_count_) + " of " + std::to_string(count));
  }
  // For the engine: wait until a read may complete.
  void Pass() {
    std::unique_lock lock(mutex_);
    is_reached_ = completed_count_ == allowed_count_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return completed_count_ < allowed_count_; });
    is_reached_ = false;
    ++completed_count_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t allowed_count_ = 0;
  size_t completed_count_ = 0;
  bool is_reached_ = false;
};

Gate g_gate;

// Reads in the order of the requests, each when the gate lets it pass.
class GatedEngine final : public IoEngine {
 public:
  explicit GatedEngine(std::unique_ptr<IoEngine> wrapped) : wrapped_(std::move(wrapped)) {}

  std::string_view name() const override { return wrapped_->name(); }
  const EngineLimits& limits() const override { return wrapped_->limits(); }
  QueueResult Queue(const IoRequest& request) override {
    if (queued_.size() == limits().queue_depth) return QueueResult::kFull;
    queued_.push_back(request);
    return QueueResult::kQueued;
  }
  Status Submit() override { return Status::Ok(); }
  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds /*timeout*/) override {
    size_t count = 0;
    for (; count < min_count && !queued_.empty(); ++count) {
      g_gate.Pass();
      const IoRequest request = queued_.front();
      queued_.pop_front();
      const ssize_t got =
          pread(request.fd, request.buffer, request.size_bytes, static_cast<off_t>(request.offset_bytes));
      FP_CHECK(got >= 0);
      out[count] = {.tag = request.tag, .done_bytes = static_cast<uint32_t>(got), .sys_errno = 0};
    }
    return count;
  }
  size_t in_flight() const override { return queued_.size(); }

 private:
  const std::unique_ptr<IoEngine> wrapped_;
  std::deque<IoRequest> queued_;
};

struct Asked {
  std::vector<int64_t> ids;
  Bytes result;
  std::shared_ptr<RowRequest> request;
};

Asked Ask(RowStore& store, std::vector<int64_t> ids, uint32_t batch) {
  Asked asked{.ids = std::move(ids), .result = {}, .request = {}};
  asked.result.resize(asked.ids.size() * kRowBytes);
  if (RowRequest::IsRegistered(batch)) store.Register(asked.ids, batch);
  asked.request = store.Start(asked.ids, asked.result.data(), batch);
  return asked;
}

// Read number `nth` of the request that is cancelled has completed, and the next one has not. Every third of its reads
// has somebody else who waits for it; if `is_asked_for_again`, another request wants all rows before reads go on.
void CancelAt(size_t nth, bool is_asked_for_again) {
  const TableFiles files(kRowBytes, {{0, 4000}});
  g_gate.Close();
  auto store = Must(RowStore::Open(
      files.Table(),
      {.reader = {.engines = {"fault:threads-buffered"}, .queue_depth = kDepth}, .cache_bytes = 0, .gap_bytes = 0}));
  const std::vector<int64_t> ids = EachNth(100, 100 * kReadCount);  // each row is a read of its own, in this order
  Asked cancelled = Ask(*store, ids, 1);
  EXPECT(cancelled.request->reads.size() == kReadCount);
  std::vector<Asked> sharing;
  for (size_t i = 0; i < kReadCount; i += 3) sharing.push_back(Ask(*store, {ids[i]}, RowRequest::kNoBatch));
  g_gate.Open(nth);
  if (nth < kReadCount) {
    g_gate.WaitUntilReached(nth);
  } else {
    EXPECT_OK(Wait(*cancelled.request));
    CheckRows(cancelled.result, ids, kRowBytes);
  }
  EXPECT(cancelled.request->done() == (nth == kReadCount));
  for (size_t i = 0; i < sharing.size(); ++i) EXPECT(nth == kReadCount || sharing[i].request->done() == (3 * i < nth));

  cancelled.request->Cancel(Status::Error(StatusCode::kCancelled, "enough"));
  EXPECT(cancelled.request->done());
  EXPECT((nth == kReadCount) == cancelled.request->status().ok());
  std::ranges::fill(cancelled.result, std::byte{0x5A});
  std::vector<Asked> again;
  if (is_asked_for_again) again.push_back(Ask(*store, ids, 2));
  g_gate.Open(kAll);
  for (const Asked& one : sharing) {
    EXPECT_OK(Wait(*one.request));
    CheckRows(one.result, one.ids, kRowBytes);
  }
  for (const Asked& one : again) {
    EXPECT_OK(Wait(*one.request));
    CheckRows(one.result, one.ids, kRowBytes);
  }

  size_t read_count = is_asked_for_again ? nth : 0;  // what had come is read again, for nothing is cached
  for (size_t i = 0; i < kReadCount; ++i) read_count += i < nth + kDepth || i % 3 == 0 || is_asked_for_again ? 1 : 0;
  // A request behind them brings the worker past the reads that it drops.
  const Asked last = Ask(*store, {3999}, 3);
  EXPECT_OK(Wait(*last.request));
  CheckRows(last.result, last.ids, kRowBytes);
  EXPECT_WITH(store->stats().read_count == read_count + 1, std::to_string(store->stats().read_count));
  store.reset();
  EXPECT(std::ranges::all_of(cancelled.result, [](std::byte byte) { return byte == std::byte{0x5A}; }));
}

void ARequestMayBeCancelledAtEachOfItsReads() {
  for (size_t nth = 0; nth <= kReadCount; ++nth) CancelAt(nth, /*is_asked_for_again=*/false);
}

void WhatWasCancelledMayBeAskedForBeforeItsReadsHaveEnded() {
  for (size_t nth = 0; nth <= kReadCount; ++nth) CancelAt(nth, /*is_asked_for_again=*/true);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  g_fault_wrapper = [](std::unique_ptr<IoEngine> wrapped, int /*wake_fd*/) -> std::unique_ptr<IoEngine> {
    return std::make_unique<GatedEngine>(std::move(wrapped));
  };
  return Run(
      argc, argv,
      {TEST(ARequestMayBeCancelledAtEachOfItsReads), TEST(WhatWasCancelledMayBeAskedForBeforeItsReadsHaveEnded)});
}
