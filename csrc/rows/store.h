// Gathers rows of a table: from the cache if they are there, otherwise from the disk.
//
// The steps of a request. The caller's thread copies the cached rows, sorts the others, and plans their reads. If the
// caller waits for the rows anyway and there are few reads, it does them itself, with a queue of its own: two thread
// switches would cost more. Many reads, and those of requests registered ahead, go to one worker thread, which keeps
// the device's queue full across requests; if it cannot be started, callers do all reads. The thread that completes a
// read gives its rows to all requests that wait for them, and offers them to the cache.
//
// flights_ maps the blocks in which rows begin to the read in flight, so a second request for the same rows, or for
// others in the same blocks, waits for that read. A cancelled request drops its reads that were not started and that no
// other request waits for; rows that arrive later are not copied, so its memory is free at once.
//
// Requests may be registered ahead: the store then knows which rows will be used, and the cache keeps these.
#pragma once

#include <pthread.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/file.h"
#include "core/memory.h"
#include "core/status.h"
#include "rows/cache.h"
#include "rows/flat_map.h"
#include "rows/plan.h"
#include "rows/reader.h"
#include "rows/request.h"
#include "rows/table.h"

namespace fastpersist {

struct RowStoreOptions {
  RowReaderOptions reader;
  uint64_t cache_bytes = 0;
  uint32_t gap_bytes = 4096;
  uint32_t copy_thread_count = 1;
};

struct RowStoreStats {
  uint64_t row_count = 0;     // rows asked for
  uint64_t hit_count = 0;     // rows that were copied from the cache
  uint64_t shared_count = 0;  // rows that another request read
  uint64_t read_count = 0;    // read requests to the kernel
  uint64_t read_bytes = 0;    // bytes that these requests read
  uint64_t cached_count = 0;  // rows in the cache now
  uint64_t slot_count = 0;    // rows that the cache has room for
};

// A shared lock. A waiting writer keeps new readers out, so it waits only for the present ones.
class FairSharedMutex {
 public:
  void lock() {
    const std::lock_guard gate(gate_);
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }
  void lock_shared() {
    const std::lock_guard gate(gate_);
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  std::mutex gate_;
  std::shared_mutex mutex_;
};

// Thread-safe, except for the destructor. A forked child must not touch it.
class RowStore {
 public:
  static Result<std::unique_ptr<RowStore>> Open(RowTable table, RowStoreOptions options);
  // Fails all requests, and waits until the kernel has released all memory.
  ~RowStore();
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  const RowTable& table() const { return table_; }

  // Let the cache know that the request with this number (from 1 on, ascending) will ask for these ids.
  void Register(std::span<const int64_t> ids, uint32_t batch);
  // Keep those of these rows that are cached; returns how many ids have no row in the cache.
  size_t Keep(std::span<const int64_t> ids);
  // How many rows are kept; the rest of the cache holds other rows, which may be held.
  uint32_t CountKept();
  // The request will not come.
  void Unregister(std::span<const int64_t> ids, uint32_t batch);

  // Start reading rows into `result`, which has room for them in the order of the ids. `batch`: as registered, or
  // one of RowRequest's. The result must stay valid until the request is done or cancelled. Fails at once if a file of
  // the table has changed. REQUIRES: every id is one of the table.
  std::shared_ptr<RowRequest> Start(std::span<const int64_t> ids, std::byte* result, uint32_t batch);

  // Pin the slots of the cache that are in use and not yet pinned, if there are enough of them. Returns how many slots,
  // from the first on, are pinned. Does not wait for another thread that pins. REQUIRES: `pin` pins for all devices.
  uint32_t PinCache(const Pin& pin);
  const std::byte* cache_bytes() const { return cache_->slab().data(); }
  // Hold cached rows for a request with this batch (as in Start, which then reads the other rows): their slots get no
  // other rows before EndHold. Only the first `slot_count` slots count. Threads look rows up; each passes the rows that
  // it has found to `take`, some thousands at a time, so that the receiver can begin at once: their slots, roughly in
  // ascending order, and their places among the ids. Both lie in `slots` and `places`, which have room for one entry
  // per id. Returns the places of the other ids, or an error of `take`. REQUIRES: as Start; at most INT32_MAX ids.
  using TakeHeld = std::function<Status(std::span<const int32_t> slots, const int32_t* places)>;
  uint16_t BeginHold(uint32_t batch);
  Result<std::vector<int64_t>> Hold(std::span<const int64_t> ids, uint32_t batch, uint32_t slot_count, int32_t* slots,
                                    int32_t* places, const TakeHeld& take);
  // `taken_count`: how many held rows the request has received.
  void EndHold(uint16_t hold, uint64_t taken_count);

  RowStoreStats stats();
  // The engine in use, and why earlier engines were abandoned.
  std::string engine_name();
  std::vector<std::string> demotions();

 private:
  // Rows of a request that a completed read has brought, and the place where the read began.
  struct Arrival {
    std::shared_ptr<RowRequest> request;
    const std::vector<RowWant>* wants;
    uint32_t first_want;
    uint32_t want_count;
    size_t done = 0;  // the read's place among the completed reads
    uint32_t piece = 0;
    uint64_t offset_bytes = 0;

    std::span<const RowWant> rows() const { return std::span(*wants).subspan(first_want, want_count); }
  };

  RowStore(RowTable table, RowStoreOptions options, std::unique_ptr<RowCache> cache);

  bool FailIfChanged(RowRequest& request);
  static void TouchAhead(std::span<std::byte> result);
  template <class Use>
  void LookUp(std::span<const int64_t> ids, Use use) const;
  void CountHit(uint32_t slot, uint32_t batch) const;
  struct Held {
    int32_t slot;
    int32_t place;
  };
  void HoldPiece(std::span<const int64_t> ids, size_t first, uint32_t batch, uint32_t slot_count,
                 std::vector<Held>& held, std::vector<int64_t>& missing);
  void OrderBySlot(std::span<const Held> held, int32_t* slots, int32_t* places) const;
  template <class Found, class Share>
  std::vector<Found> InShares(std::span<const int64_t> ids, size_t part_count, Share share);
  std::vector<RowWant> CopyHits(std::span<const int64_t> ids, RowRequest& request);
  void CopyHitsOf(std::span<const int64_t> ids, size_t first, RowRequest& request, std::vector<RowWant>& missing);
  void Plan(const std::shared_ptr<RowRequest>& request, std::span<const RowWant> missing);
  bool WaitForFlight(const std::shared_ptr<RowRequest>& request, std::span<const RowWant> same);
  uint64_t CellOf(const RowPlace& place) const;
  void EndKnownUse(uint64_t position, uint32_t batch);

  RowReaderOptions ReaderOptions();
  std::unique_ptr<RowReader> LeaseReader();
  void ReturnReader(std::unique_ptr<RowReader> reader);
  void ReadHere(RowReader& reader, RowRequest& request);
  void StartReads(RowReader& reader, RowRequest& request, std::vector<RowReader::Done>& done);
  bool Withdraw(const RowRequest& request, size_t read);
  void ForgetFlight(const RowRequest& request, size_t read);
  void GiveToWorker(const std::shared_ptr<RowRequest>& request);
  void Work();
  void NoteEngine(const RowReader& reader);

  void Complete(std::vector<RowReader::Done>& done, RowReader& reader);
  void EndFlight(const RowReader::Done& done, size_t number, std::vector<Arrival>& arrivals);
  void Cache(const Arrival& arrival, const std::byte* bytes);
  void CacheNeighbours(const Arrival& arrival, const RowRead& read, const std::byte* bytes);
  void Admit(uint64_t position, const std::byte* bytes, bool keep);
  void Deliver(const Arrival& arrival, const RowReader::Done& done);
  Status WithRow(const Status& status, const Arrival& arrival) const;

  const RowTable table_;
  const RowStoreOptions options_;
  PlanLimits limits_;
  DirectIoLimits direct_limits_;    // the limits of the files
  std::vector<struct stat> facts_;  // the status of the files as they were opened

  FairSharedMutex lock_;  // guards the members below; cached rows are copied under the shared lock
  std::unique_ptr<RowCache> cache_;
  std::mutex pins_mutex_;                    // guards the members below; its holder may change pinned_bytes_
  std::vector<std::shared_ptr<void>> pins_;  // pins of the cache's memory; they end before it
  std::atomic<uint64_t> pinned_bytes_{0};    // bytes from the start of that memory
  bool is_pinning_refused_ = false;

  FlatMap<uint32_t> known_;                                             // the coming uses of rows that are not cached
  FlatMap<uint64_t> flights_;                                           // by cell: request number and read
  std::unordered_map<uint32_t, std::shared_ptr<RowRequest>> requests_;  // requests with unended reads, by number
  std::unordered_map<uint64_t, std::vector<Arrival>> others_;           // who else waits for a flight
  uint32_t next_number_ = 0;

  std::unique_ptr<RowReader> reader_;                // the worker's
  std::mutex readers_mutex_;                         // guards the members below
  std::vector<std::unique_ptr<RowReader>> readers_;  // readers of callers that are unused now
  size_t reader_count_ = 0;                          // all readers of callers
  std::string engine_name_;
  std::vector<std::string> demotions_;

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::shared_ptr<RowRequest>> queue_;  // requests with reads that were not started
  bool is_stopping_ = false;
  bool is_started_ = false;
  pthread_t thread_{};

  std::atomic<uint64_t> row_count_{0};
  std::atomic<uint64_t> hit_count_{0};
  std::atomic<uint64_t> shared_count_{0};
  std::atomic<uint64_t> read_count_{0};
  std::atomic<uint64_t> read_bytes_{0};
};

}  // namespace fastpersist
