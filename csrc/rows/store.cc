#include "rows/store.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <system_error>
#include <utility>

#include "core/alignment.h"
#include "core/check.h"
#include "core/memory.h"
#include "core/parallel.h"
#include "core/thread.h"

namespace fastpersist {
namespace {

constexpr size_t kFewReads = 64;      // the most reads that a caller does itself
constexpr size_t kReadersMax = 4;     // the most readers for callers at once; other callers take the worker
constexpr size_t kLockedCount = 512;  // ids that are looked up under one lock
constexpr size_t kAheadCount = 8;     // ids whose memory is fetched ahead
constexpr uint32_t kCellBytes = 512;  // the least size
constexpr uint32_t kJoinedBytesMax = 128 << 10;
constexpr uint64_t kNeighboursMax = 64;  // rows of a read: examining so many costs less than another read
constexpr size_t kTouchedBytesMin = size_t{1} << 20;
// From this size on, malloc maps new memory for each result, whose pages the kernel has to allocate; smaller results
// reuse pages.
constexpr size_t kOwnMappingBytesMin = size_t{32} << 20;
constexpr size_t kPartBytes = size_t{256} << 10;        // bytes of rows that a thread copies before it takes more
constexpr size_t kIdsPerThread = size_t{1} << 14;       // look-ups that are worth a thread
constexpr size_t kHeldAtFirst = size_t{1} << 11;        // ids whose rows are held before they are taken
constexpr size_t kHeldAtOnce = size_t{1} << 14;         // the same, later on
constexpr uint64_t kPinnedAtOnce = uint64_t{64} << 20;  // each time takes system calls, and a place in a driver's table

uint64_t FlightOf(uint32_t number, size_t read) { return (uint64_t{number} << 32) | read; }

// Calls `call` for each run of wants of one row.
template <class Call>
void ForEachRow(std::span<const RowWant> sorted, Call call) {
  for (size_t i = 0; i < sorted.size();) {
    size_t end = i + 1;
    while (end < sorted.size() && sorted[end].position == sorted[i].position) ++end;
    call(sorted.subspan(i, end - i));
    i = end;
  }
}

}  // namespace

RowStore::RowStore(RowTable table, RowStoreOptions options, std::unique_ptr<RowCache> cache)
    : table_(std::move(table)), options_(std::move(options)), cache_(std::move(cache)) {}

Result<std::unique_ptr<RowStore>> RowStore::Open(RowTable table, RowStoreOptions options) {
  Result<std::unique_ptr<RowCache>> cache = RowCache::Create(options.cache_bytes, table.row_bytes(), table.row_count());
  if (!cache.ok()) return cache.status();
  std::unique_ptr<RowStore> store(new RowStore(std::move(table), std::move(options), std::move(cache).value()));
  for (const RowPiece& piece : store->table_.pieces()) {
    struct stat facts = {};
    if (fstat(piece.fd, &facts) != 0) return Status::FromErrno(errno, "fstat of", piece.path);
    store->facts_.push_back(facts);
  }
  Result<std::unique_ptr<RowReader>> reader = RowReader::Open(store->table_, store->options_.reader);
  if (!reader.ok()) return reader.status();
  store->reader_ = std::move(reader).value();
  store->direct_limits_ = store->reader_->pump().limits();
  store->engine_name_ = store->reader_->pump().engine_name();
  store->demotions_ = store->reader_->pump().demotions();
  store->limits_ = {.block_bytes = store->reader_->pump().device_block_bytes(),
                    .gap_bytes = store->options_.gap_bytes,
                    .read_bytes_max = kJoinedBytesMax};
  return store;
}

RowStore::~RowStore() {
  std::vector<std::shared_ptr<RowRequest>> open;
  {
    const std::lock_guard lock(lock_);
    for (const auto& [number, request] : requests_) open.push_back(request);
    for (const auto& [flight, arrivals] : others_) {
      for (const Arrival& arrival : arrivals) open.push_back(arrival.request);
    }
  }
  for (const std::shared_ptr<RowRequest>& request : open) {
    request->Cancel(Status::Error(StatusCode::kCancelled, "the row store was closed"));
  }
  {
    const std::lock_guard lock(queue_mutex_);
    is_stopping_ = true;
  }
  queue_changed_.notify_all();
  if (is_started_) pthread_join(thread_, nullptr);
}

// --- planning, on the caller's thread ---

bool RowStore::FailIfChanged(RowRequest& request) {
  for (size_t i = 0; i < facts_.size(); ++i) {
    const RowPiece& piece = table_.pieces()[i];
    struct stat now = {};
    if (fstat(piece.fd, &now) != 0) {
      request.FailRead(Status::FromErrno(errno, "fstat of", piece.path), piece.path);
      return true;
    }
    const struct stat& then = facts_[i];
    if (now.st_size == then.st_size && now.st_mtim.tv_sec == then.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == then.st_mtim.tv_nsec) {
      continue;
    }
    {
      const std::lock_guard lock(lock_);
      cache_->Clear();
    }
    request.FailRead(
        Status::Error(StatusCode::kIoError,
                      piece.path + " has changed since it was opened as a table of rows, so its rows may be of two "
                                   "versions; open the table again (a new version belongs into a new file that takes "
                                   "over the name)"),
        piece.path);
    return true;
  }
  return false;
}

void RowStore::Register(std::span<const int64_t> ids, uint32_t batch) {
  for (size_t first = 0; first < ids.size(); first += kLockedCount) {
    const std::lock_guard lock(lock_);
    if (!cache_->KnowsBatch(batch) || cache_->HasEachRow()) return;
    for (const int64_t id : ids.subspan(first, std::min(kLockedCount, ids.size() - first))) {
      const uint64_t position = table_.PositionOf(id);
      const uint32_t slot = cache_->Find(position);
      if (slot != RowCache::kNoSlot) {
        cache_->AddUse(slot, batch);
      } else {
        const uint32_t* const uses = known_.Find(position);
        known_.Set(position, (uses == nullptr ? 0 : *uses) | RowCache::UseOf(batch));
      }
    }
  }
}

void RowStore::Unregister(std::span<const int64_t> ids, uint32_t batch) {
  const std::lock_guard lock(lock_);
  if (!cache_->MayKnowBatch(batch)) return;
  for (const int64_t id : ids) {
    const uint64_t position = table_.PositionOf(id);
    const uint32_t slot = cache_->Find(position);
    if (slot != RowCache::kNoSlot) {
      cache_->EndUse(slot, batch);
    } else {
      EndKnownUse(position, batch);
    }
  }
}

// A batch no longer wants a row that is not cached.
void RowStore::EndKnownUse(uint64_t position, uint32_t batch) {
  uint32_t* const uses = known_.Find(position);
  if (uses == nullptr) return;
  *uses &= ~RowCache::UseOf(batch);
  if (*uses == 0) known_.Erase(position);
}

size_t RowStore::Keep(std::span<const int64_t> ids) {
  const std::lock_guard lock(lock_);
  size_t left_count = 0;
  for (const int64_t id : ids) {
    const uint32_t slot = cache_->Find(table_.PositionOf(id));
    if (slot == RowCache::kNoSlot) {
      ++left_count;
    } else {
      cache_->Keep(slot);
    }
  }
  return left_count;
}

uint32_t RowStore::CountKept() {
  const std::lock_guard lock(lock_);
  return cache_->CountKept();
}

std::shared_ptr<RowRequest> RowStore::Start(std::span<const int64_t> ids, std::byte* result, uint32_t batch) {
  auto request = std::make_shared<RowRequest>(result, table_.row_bytes(), batch);
  if (FailIfChanged(*request)) return request;
  if (ids.empty()) {
    request->EndReads(1, /*has_copied=*/false);
    return request;
  }
  if (request->is_registered()) {
    const std::lock_guard lock(lock_);
    cache_->SetReadBatch(batch);
  }
  const std::span<std::byte> bytes(result, ids.size() * table_.row_bytes());
  if (bytes.size() > kOwnMappingBytesMin) AdviseHugePages({bytes});
  std::vector<RowWant> missing = CopyHits(ids, *request);
  row_count_ += ids.size();
  hit_count_ += ids.size() - missing.size();
  if (!missing.empty()) {
    SortByPosition(missing);
    Plan(request, missing);
  }
  // A caller that asks ahead goes on at once.
  const bool reads_here = request->reads.size() <= kFewReads && !request->is_registered();
  if (!request->reads.empty()) {
    std::unique_ptr<RowReader> reader = reads_here ? LeaseReader() : nullptr;
    if (reader != nullptr) {
      ReadHere(*reader, *request);
      ReturnReader(std::move(reader));
    } else {
      GiveToWorker(request);
      // This thread only waits now. It touches fresh memory of the result first, which takes as long as a row's read.
      if (batch == RowRequest::kNoBatch) TouchAhead(bytes);
    }
  }
  request->EndReads(1, /*has_copied=*/false);
  return request;
}

// Make the kernel allocate the pages of this memory that it has not allocated yet.
void RowStore::TouchAhead(std::span<std::byte> result) {
  const uint64_t page_bytes = PageBytes();
  const auto address = reinterpret_cast<uintptr_t>(result.data());
  const size_t before_bytes = AlignUp(address, page_bytes) - address;
  if (result.size() < before_bytes + kTouchedBytesMin) return;
  Populate(result.subspan(before_bytes, AlignDown(result.size() - before_bytes, page_bytes)));
}

// Calls `share(ids, first, found)` for parts of the ids, with the index of the part's first id; each thread takes the
// next part when it has done one. Returns what the calls have found, in the order of the parts.
template <class Found, class Share>
std::vector<Found> RowStore::InShares(std::span<const int64_t> ids, size_t part_count, Share share) {
  std::vector<std::vector<Found>> found(std::max<size_t>(part_count, 1));
  std::atomic<size_t> next_part = 0;
  RunInParallel(options_.copy_thread_count, found.size(), [&] {
    for (size_t part = next_part++; part < found.size(); part = next_part++) {
      const size_t from = ids.size() * part / found.size();
      const size_t until = ids.size() * (part + 1) / found.size();
      share(ids.subspan(from, until - from), from, found[part]);
    }
  });
  for (size_t i = 1; i < found.size(); ++i) found[0].insert(found[0].end(), found[i].begin(), found[i].end());
  return std::move(found[0]);
}

// Copy the cached rows; returns the others. For a request to keep rows, cached rows that are not kept yet count as
// others: Plan keeps them, under the exclusive lock.
std::vector<RowWant> RowStore::CopyHits(std::span<const int64_t> ids, RowRequest& request) {
  const size_t part_count =
      stats().cached_count == 0 ? 1 : AlignUp(ids.size() * table_.row_bytes(), kPartBytes) / kPartBytes;
  return InShares<RowWant>(ids, part_count,
                           [&](std::span<const int64_t> some, size_t first, std::vector<RowWant>& missing) {
                             CopyHitsOf(some, first, request, missing);
                           });
}

// Calls `use` with the index, the position and the slot of each id. REQUIRES: lock_ is held.
template <class Use>
void RowStore::LookUp(std::span<const int64_t> ids, Use use) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i + (2 * kAheadCount) < ids.size()) cache_->Prefetch(table_.PositionOf(ids[i + (2 * kAheadCount)]));
    if (i + kAheadCount < ids.size()) cache_->PrefetchEntry(table_.PositionOf(ids[i + kAheadCount]));
    const uint64_t position = table_.PositionOf(ids[i]);
    use(i, position, cache_->Find(position));
  }
}

void RowStore::CountHit(uint32_t slot, uint32_t batch) const {
  if (cache_->HasSlotForEachRow()) return;
  cache_->CountHit(slot);
  if (RowRequest::IsRegistered(batch)) cache_->EndUse(slot, batch);
}

// `first`: the index of the first of these ids in the request.
void RowStore::CopyHitsOf(std::span<const int64_t> ids, size_t first, RowRequest& request,
                          std::vector<RowWant>& missing) {
  const uint32_t row_bytes = table_.row_bytes();
  for (size_t from = 0; from < ids.size(); from += kLockedCount) {
    const size_t until = std::min(ids.size(), from + kLockedCount);
    const std::shared_lock lock(lock_);
    std::array<uint32_t, kLockedCount> slots;
    LookUp(ids.subspan(from, until - from), [&](size_t i, uint64_t position, uint32_t slot) {
      const bool is_hit = slot != RowCache::kNoSlot && (request.batch != RowRequest::kKeep || cache_->IsKept(slot));
      slots[i] = is_hit ? slot : RowCache::kNoSlot;
      if (is_hit) {
        CountHit(slot, request.batch);
      } else {
        missing.push_back({position, first + from + i});
      }
    });
    for (size_t i = from; i < until; ++i) {
      if (i + kAheadCount < until && slots[i + kAheadCount - from] != RowCache::kNoSlot) {
        cache_->PrefetchBytes(slots[i + kAheadCount - from]);
      }
      const uint32_t slot = slots[i - from];
      if (slot != RowCache::kNoSlot) std::memcpy(request.RowAt(first + i), cache_->BytesOf(slot), row_bytes);
    }
  }
}

uint32_t RowStore::PinCache(const Pin& pin) {
  // Pinning takes the driver seconds. Other threads go on meanwhile with the slots that are pinned already.
  const std::unique_lock pins_lock(pins_mutex_, std::try_to_lock);
  if (!pins_lock) return static_cast<uint32_t>(pinned_bytes_ / table_.row_bytes());
  const std::span<std::byte> slab = cache_->slab();
  const uint64_t used_bytes = stats().cached_count * table_.row_bytes();
  const uint64_t until = used_bytes == slab.size() ? used_bytes : AlignDown(used_bytes, kHugePageBytes);
  const bool is_worth_it = until >= pinned_bytes_ + kPinnedAtOnce || (until == slab.size() && until > pinned_bytes_);
  if (is_worth_it && !is_pinning_refused_) {
    std::shared_ptr<void> pinned = pin(slab.subspan(pinned_bytes_, until - pinned_bytes_));
    is_pinning_refused_ = pinned == nullptr;
    if (pinned != nullptr) {
      pins_.push_back(std::move(pinned));
      pinned_bytes_ = until;
    }
  }
  return static_cast<uint32_t>(pinned_bytes_ / table_.row_bytes());
}

uint16_t RowStore::BeginHold(uint32_t batch) {
  const std::lock_guard lock(lock_);
  if (RowRequest::IsRegistered(batch)) cache_->SetReadBatch(batch);
  return cache_->BeginHold();
}

Result<std::vector<int64_t>> RowStore::Hold(std::span<const int64_t> ids, uint32_t batch, uint32_t slot_count,
                                            int32_t* slots, int32_t* places, const TakeHeld& take) {
  const size_t part_count = std::min<size_t>(options_.copy_thread_count, ids.size() / kIdsPerThread);
  std::mutex failure_mutex;
  Status failure;
  std::atomic<bool> has_failed = false;
  std::vector<int64_t> missing = InShares<int64_t>(
      ids, part_count, [&](std::span<const int64_t> some, size_t first, std::vector<int64_t>& missing_of) {
        std::vector<Held> held;
        // Few at first, so that the receiver begins soon.
        for (size_t from = 0, count = kHeldAtFirst; from < some.size() && !has_failed;
             from += count, count = std::min(2 * count, kHeldAtOnce)) {
          held.clear();
          const size_t start = first + from;
          HoldPiece(some.subspan(from, std::min(count, some.size() - from)), start, batch, slot_count, held,
                    missing_of);
          OrderBySlot(held, slots + start, places + start);
          if (Status taken = take({slots + start, held.size()}, places + start); !taken.ok()) {
            const std::lock_guard lock(failure_mutex);
            failure = std::move(taken);
            has_failed = true;
          }
        }
      });
  if (!failure.ok()) return failure;
  return missing;
}

// `first`: the place of the first of these ids among all.
void RowStore::HoldPiece(std::span<const int64_t> ids, size_t first, uint32_t batch, uint32_t slot_count,
                         std::vector<Held>& held, std::vector<int64_t>& missing) {
  for (size_t from = 0; from < ids.size(); from += kLockedCount) {
    const std::shared_lock lock(lock_);
    LookUp(ids.subspan(from, std::min(kLockedCount, ids.size() - from)), [&](size_t i, uint64_t, uint32_t slot) {
      const size_t place = first + from + i;
      if (slot >= slot_count) {  // or kNoSlot
        missing.push_back(static_cast<int64_t>(place));
        return;
      }
      cache_->Hold(slot);
      CountHit(slot, batch);
      held.push_back({static_cast<int32_t>(slot), static_cast<int32_t>(place)});
    });
  }
}

// Roughly sorted is enough, because a device caches the addresses of few host pages; it takes one pass.
void RowStore::OrderBySlot(std::span<const Held> held, int32_t* slots, int32_t* places) const {
  constexpr int kBits = 10;
  const int shift = std::max(static_cast<int>(std::bit_width(cache_->slot_count())) - kBits, 0);
  std::array<uint32_t, (size_t{1} << kBits) + 1> next = {};
  for (const Held& one : held) ++next[(static_cast<uint32_t>(one.slot) >> shift) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (const Held& one : held) {
    const uint32_t at = next[static_cast<uint32_t>(one.slot) >> shift]++;
    slots[at] = one.slot;
    places[at] = one.place;
  }
}

void RowStore::EndHold(uint16_t hold, uint64_t taken_count) {
  {
    const std::lock_guard lock(lock_);
    cache_->EndHold(hold);
  }
  row_count_ += taken_count;
  hit_count_ += taken_count;
}

// Plan reads for the rows, except rows that have come into the cache meanwhile, or that a read in flight will bring.
void RowStore::Plan(const std::shared_ptr<RowRequest>& request, std::span<const RowWant> missing) {
  const std::lock_guard lock(lock_);
  ForEachRow(missing, [&](std::span<const RowWant> same) {
    const uint64_t position = same.front().position;
    const uint32_t slot = cache_->Find(position);
    if (slot != RowCache::kNoSlot) {
      if (request->is_registered()) cache_->EndUse(slot, request->batch);
      if (request->batch == RowRequest::kKeep) cache_->Keep(slot);
      hit_count_ += same.size();
      for (const RowWant& want : same) {
        std::memcpy(request->RowAt(want.index), cache_->BytesOf(slot), table_.row_bytes());
      }
      return;
    }
    if (request->is_registered()) EndKnownUse(position, request->batch);
    if (!WaitForFlight(request, same)) request->wants.insert(request->wants.end(), same.begin(), same.end());
  });
  request->reads = PlanReads(table_, request->wants, limits_);
  if (request->reads.empty()) return;
  request->AwaitReads(request->reads.size());
  request->unended_read_count = request->reads.size();
  request->number = ++next_number_;
  requests_[request->number] = request;
  for (size_t i = 0; i < request->reads.size(); ++i) {
    const RowRead& read = request->reads[i];
    for (uint32_t k = 0; k < read.want_count; ++k) {
      const uint64_t cell = CellOf(table_.PlaceOf(request->wants[read.first_want + k].position));
      if (flights_.Find(cell) != nullptr) continue;  // an earlier read stays known
      flights_.Set(cell, FlightOf(request->number, i));
    }
  }
}

// Rows that begin in one cell share its reads.
uint64_t RowStore::CellOf(const RowPlace& place) const {
  return (uint64_t{place.piece} << 48) | (place.offset_bytes / std::max(kCellBytes, limits_.block_bytes));
}

// If a read in flight will bring a row, let the request wait for this read. Returns whether there is one.
bool RowStore::WaitForFlight(const std::shared_ptr<RowRequest>& request, std::span<const RowWant> same) {
  const RowPlace place = table_.PlaceOf(same.front().position);
  const uint64_t* const flight = flights_.Find(CellOf(place));
  if (flight == nullptr) return false;
  const RowRequest& other = *requests_.at(static_cast<uint32_t>(*flight >> 32));
  const RowRead& read = other.reads[static_cast<uint32_t>(*flight)];
  const uint64_t end = place.offset_bytes + table_.row_bytes();
  if (place.piece != read.piece) return false;  // two pieces of very many may share a cell
  if (place.offset_bytes < read.offset_bytes || end > read.offset_bytes + read.needed_bytes) return false;
  // A caller that needs rows now must not wait behind the queue for a read that only happens to cover its row.
  const RowWant& last = other.wants[read.first_want + read.want_count - 1];
  const bool is_asked_for = end <= table_.PlaceOf(last.position).offset_bytes + table_.row_bytes();
  const bool is_started = static_cast<uint32_t>(*flight) < other.next_read.load(std::memory_order_relaxed);
  if (!is_asked_for && !is_started && !request->is_registered()) return false;
  const auto first = static_cast<uint32_t>(request->shared.size());
  request->shared.insert(request->shared.end(), same.begin(), same.end());
  request->AwaitReads(1);
  others_[*flight].push_back({request, &request->shared, first, static_cast<uint32_t>(same.size())});
  shared_count_ += same.size();
  return true;
}

// --- reading ---

// O_DIRECT is a flag of the file, so all readers begin with the engine in use.
RowReaderOptions RowStore::ReaderOptions() {
  RowReaderOptions options = options_.reader;
  options.limits = direct_limits_;
  options.engines.erase(options.engines.begin(), std::ranges::find(options.engines, engine_name()));
  return options;
}

std::unique_ptr<RowReader> RowStore::LeaseReader() {
  {
    const std::lock_guard lock(readers_mutex_);
    if (!readers_.empty()) {
      std::unique_ptr<RowReader> reader = std::move(readers_.back());
      readers_.pop_back();
      return reader;
    }
    if (reader_count_ == kReadersMax) return nullptr;
    ++reader_count_;
  }
  RowReaderOptions options = ReaderOptions();
  options.queue_depth = kFewReads;
  options.ring_bytes = 0;
  Result<std::unique_ptr<RowReader>> reader = RowReader::Open(table_, options);
  if (reader.ok()) return std::move(reader).value();
  const std::lock_guard lock(readers_mutex_);
  --reader_count_;
  return nullptr;
}

void RowStore::ReturnReader(std::unique_ptr<RowReader> reader) {
  NoteEngine(*reader);
  const std::lock_guard lock(readers_mutex_);
  if (reader->is_broken()) {
    --reader_count_;
  } else {
    readers_.push_back(std::move(reader));
  }
}

// Do the reads of a request on this thread.
void RowStore::ReadHere(RowReader& reader, RowRequest& request) {
  std::vector<RowReader::Done> done;
  while (request.next_read < request.reads.size() || reader.in_flight() > 0) {
    StartReads(reader, request, done);
    if (done.empty()) reader.Collect(done);
    Complete(done, reader);
  }
}

// Start reads of a request until the reader is full. Reads that cannot be started are done, with an error.
void RowStore::StartReads(RowReader& reader, RowRequest& request, std::vector<RowReader::Done>& done) {
  for (; request.next_read < request.reads.size(); ++request.next_read) {
    const RowRead& read = request.reads[request.next_read];
    const uint64_t flight = FlightOf(request.number, request.next_read);
    if (request.done() && Withdraw(request, request.next_read)) {
      done.push_back({.tag = flight, .status = request.status()});
      continue;
    }
    Result<bool> started = reader.TryStart(read, flight);
    if (!started.ok()) {
      done.push_back({.tag = flight, .status = started.status()});
      continue;
    }
    if (!started.value()) return;
    read_count_.fetch_add(1, std::memory_order_relaxed);
    read_bytes_.fetch_add(read.size_bytes, std::memory_order_relaxed);
  }
}

// Withdraw a read if no other request waits for it; returns whether that was so. Afterwards no request can wait for it.
bool RowStore::Withdraw(const RowRequest& request, size_t read) {
  const std::lock_guard lock(lock_);
  const uint64_t flight = FlightOf(request.number, read);
  if (others_.contains(flight)) return false;
  ForgetFlight(request, read);
  return true;
}

// Remove a read from the reads in flight, so that no request can begin to wait for it.
void RowStore::ForgetFlight(const RowRequest& request, size_t read) {
  for (const RowWant& want :
       std::span(request.wants).subspan(request.reads[read].first_want, request.reads[read].want_count)) {
    const uint64_t cell = CellOf(table_.PlaceOf(want.position));
    const uint64_t* const flight = flights_.Find(cell);
    if (flight != nullptr && *flight == FlightOf(request.number, read)) flights_.Erase(cell);
  }
}

// Give the reads of a request to the worker; if no thread can be started, this thread does them.
void RowStore::GiveToWorker(const std::shared_ptr<RowRequest>& request) {
  int refused = 0;
  {
    const std::lock_guard lock(queue_mutex_);
    if (!is_started_) refused = StartThread(thread_, "fastpersist-rows", [this] { Work(); });
    is_started_ = refused == 0;
    if (is_started_) queue_.push_back(request);
  }
  queue_changed_.notify_one();
  if (refused == 0) return;
  if (std::unique_ptr<RowReader> reader = LeaseReader()) {
    ReadHere(*reader, *request);
    ReturnReader(std::move(reader));
    return;
  }
  const Status status = Status::Error(
      StatusCode::kNoMemory,
      "the thread that reads rows could not be started (pthread_create: " + std::generic_category().message(refused) +
          "); raise the limit of processes (ulimit -u, or pids.max of the container)");
  std::vector<RowReader::Done> done;
  for (; request->next_read < request->reads.size(); ++request->next_read) {
    done.push_back({.tag = FlightOf(request->number, request->next_read), .status = status});
  }
  Complete(done, *reader_);
}

void RowStore::Work() {
  std::vector<RowReader::Done> done;
  for (;;) {
    {
      std::unique_lock lock(queue_mutex_);
      if (reader_->in_flight() == 0 && done.empty()) {
        queue_changed_.wait(lock, [this] { return !queue_.empty() || is_stopping_; });
        if (queue_.empty()) return;
      }
      // The next request fills the queue before the last reads of this one are complete.
      while (!queue_.empty() && !reader_->is_full()) {
        const std::shared_ptr<RowRequest> request = queue_.front();
        lock.unlock();
        StartReads(*reader_, *request, done);
        lock.lock();
        if (request->next_read < request->reads.size()) break;
        queue_.pop_front();
      }
    }
    if (!done.empty()) {  // the kernel has the next reads meanwhile
      Complete(done, *reader_);
      continue;
    }
    reader_->Collect(done);
    NoteEngine(*reader_);
    if (reader_->is_broken()) {  // later requests may succeed
      Complete(done, *reader_);
      Result<std::unique_ptr<RowReader>> reader = RowReader::Open(table_, ReaderOptions());
      if (reader.ok()) reader_ = std::move(reader).value();
    }
  }
}

// Once any reader has abandoned an engine, new readers begin with the next one.
void RowStore::NoteEngine(const RowReader& reader) {
  const std::lock_guard lock(readers_mutex_);
  const auto place_of = [this](const std::string& name) {
    return std::ranges::find(options_.reader.engines, name) - options_.reader.engines.begin();
  };
  const std::string& its_name = reader.pump().engine_name();
  const ptrdiff_t left_count = place_of(its_name) - place_of(engine_name_);
  if (left_count <= 0) return;
  engine_name_ = its_name;
  const std::vector<std::string>& whys = reader.pump().demotions();
  demotions_.insert(demotions_.end(), whys.end() - left_count, whys.end());
}

// --- rows that have come ---

// Offer the rows of completed reads to the cache, and deliver them to all waiting requests. Empties `done`.
void RowStore::Complete(std::vector<RowReader::Done>& done, RowReader& reader) {
  std::vector<Arrival> arrivals;
  {
    const std::lock_guard lock(lock_);
    for (size_t i = 0; i < done.size(); ++i) EndFlight(done[i], i, arrivals);
  }
  for (const Arrival& arrival : arrivals) Deliver(arrival, done[arrival.done]);
  for (const RowReader::Done& each : done) {
    if (each.bytes != nullptr) reader.Release(each);
  }
  done.clear();
}

// Find the requests that wait for a completed read; the one that planned it comes first.
void RowStore::EndFlight(const RowReader::Done& done, size_t number, std::vector<Arrival>& arrivals) {
  const auto found = requests_.find(static_cast<uint32_t>(done.tag >> 32));
  const std::shared_ptr<RowRequest> owner = found->second;
  const RowRead& read = owner->reads[static_cast<uint32_t>(done.tag)];
  const size_t first = arrivals.size();
  arrivals.push_back({owner, &owner->wants, read.first_want, read.want_count});
  ForgetFlight(*owner, static_cast<uint32_t>(done.tag));
  if (const auto waiting = others_.find(done.tag); waiting != others_.end()) {
    arrivals.insert(arrivals.end(), waiting->second.begin(), waiting->second.end());
    others_.erase(waiting);
  }
  for (size_t i = first; i < arrivals.size(); ++i) {
    arrivals[i].done = number;
    arrivals[i].piece = read.piece;
    arrivals[i].offset_bytes = read.offset_bytes;
    if (done.status.ok()) Cache(arrivals[i], done.bytes);
  }
  if (done.status.ok()) CacheNeighbours(arrivals[first], read, done.bytes);
  if (--owner->unended_read_count == 0) requests_.erase(found);
}

// Offer the rows of an arrival to the cache.
void RowStore::Cache(const Arrival& arrival, const std::byte* bytes) {
  ForEachRow(arrival.rows(), [&](std::span<const RowWant> same) {
    const uint64_t position = same.front().position;
    const bool is_kept = arrival.request->batch == RowRequest::kKeep;
    const uint32_t cached = cache_->Find(position);
    if (cached != RowCache::kNoSlot) {  // by another request that waited for the read, or along with other rows
      if (is_kept) cache_->Keep(cached);
      return;
    }
    Admit(position, bytes + (table_.PlaceOf(position).offset_bytes - arrival.offset_bytes), is_kept);
  });
}

// Offer to the cache the other rows in the blocks of a read that a request known ahead will use. `arrival`: that of the
// request that planned the read.
void RowStore::CacheNeighbours(const Arrival& arrival, const RowRead& read, const std::byte* bytes) {
  if (known_.size() == 0) return;
  const uint64_t row_bytes = table_.row_bytes();
  std::span<const RowWant> wants = arrival.rows();
  const RowPlace place = table_.PlaceOf(wants.front().position);
  const uint64_t rows_begin = std::max(read.offset_bytes, table_.pieces()[place.piece].offset_bytes);
  const uint64_t before_count = (place.offset_bytes - rows_begin) / row_bytes;
  const uint64_t count = before_count + ((read.offset_bytes + read.needed_bytes - place.offset_bytes) / row_bytes);
  if (count > kNeighboursMax) return;
  const uint64_t first = wants.front().position - before_count;
  const uint64_t first_offset_bytes = place.offset_bytes - (before_count * row_bytes) - read.offset_bytes;
  for (uint64_t i = 0; i < count; ++i) {
    while (!wants.empty() && wants.front().position < first + i) wants = wants.subspan(1);
    const bool is_wanted = !wants.empty() && wants.front().position == first + i;
    if (is_wanted || known_.Find(first + i) == nullptr) continue;  // it lists only rows that are not cached
    Admit(first + i, bytes + first_offset_bytes + (i * row_bytes), /*keep=*/false);
  }
}

// Offer a row that is not cached to the cache.
void RowStore::Admit(uint64_t position, const std::byte* bytes, bool keep) {
  const uint32_t* const known = known_.Find(position);
  const RowCache::Admission admission = cache_->Admit(position, known == nullptr ? 0 : *known, keep);
  if (admission.slot == nullptr) return;
  std::memcpy(admission.slot, bytes, table_.row_bytes());
  if (known != nullptr) known_.Erase(position);
  if (admission.evicted_uses != 0) known_.Set(admission.evicted_row, admission.evicted_uses);
}

// Copy the rows of an arrival to its request.
void RowStore::Deliver(const Arrival& arrival, const RowReader::Done& done) {
  RowRequest& request = *arrival.request;
  if (!done.status.ok()) {
    request.FailRead(WithRow(done.status, arrival), table_.pieces()[arrival.piece].path);
    return;
  }
  const bool copies = request.BeginCopy();
  if (copies) {
    for (const RowWant& want : arrival.rows()) {
      std::memcpy(request.RowAt(want.index),
                  done.bytes + (table_.PlaceOf(want.position).offset_bytes - arrival.offset_bytes), table_.row_bytes());
    }
  }
  request.EndReads(1, copies);
}

// Add to a read's error the first row in it that the request has not received; the read may begin in an earlier row. It
// names no row if all rows of the request lie before the place of the error, in a read that other requests share.
Status RowStore::WithRow(const Status& status, const Arrival& arrival) const {
  if (status.code() == StatusCode::kCancelled || status.offset_bytes() == Status::kNoOffset) return status;
  const std::span<const RowWant> wants = arrival.rows();
  const auto lost = std::ranges::find_if(wants, [&](const RowWant& want) {
    return table_.PlaceOf(want.position).offset_bytes + table_.row_bytes() > status.offset_bytes();
  });
  if (lost == wants.end()) return status;
  const std::string row = std::to_string(table_.IdAt(lost->position));
  const std::string& path = table_.pieces()[arrival.piece].path;
  if (status.sys_errno() != 0) {
    return Status::FromErrno(status.sys_errno(), "read of row " + row + " of", path, status.offset_bytes());
  }
  return Status::Error(status.code(), "row " + row + ": " + status.message(), status.offset_bytes());
}

RowStoreStats RowStore::stats() {
  const std::shared_lock lock(lock_);
  return {.row_count = row_count_,
          .hit_count = hit_count_,
          .shared_count = shared_count_,
          .read_count = read_count_,
          .read_bytes = read_bytes_,
          .cached_count = cache_->size(),
          .slot_count = cache_->slot_count()};
}

std::string RowStore::engine_name() {
  const std::lock_guard lock(readers_mutex_);
  return engine_name_;
}

std::vector<std::string> RowStore::demotions() {
  const std::lock_guard lock(readers_mutex_);
  return demotions_;
}

}  // namespace fastpersist
