#include "transfer/capture_core.h"

#include <algorithm>
#include <utility>

#include "transfer/device_clusters.h"

namespace fastpersist {
namespace {

// The most that the writer leases at a time, and so the most that a barrier waits for: about 0.2 ms.
constexpr uint64_t kLeaseBytes = uint64_t{1} << 20;
// A paced writer looks at the clock once per chunk of this size.
constexpr uint64_t kPaceBytes = uint64_t{8} << 20;
constexpr uint64_t kCacheLineBytes = 64;
// The most that is copied in one go: 64 MiB by a device, 16 MiB by threads, for which the writer may have to wait.
constexpr size_t kDeviceRunBlocks = 32;
constexpr size_t kHostRunBlocks = 8;

}  // namespace

uint32_t CaptureCore::Add(uintptr_t address, uint64_t size_bytes, SourceKind kind, Device* device) {
  memories_.push_back({.address = address, .device = device, .segments = {}});
  if (device != nullptr && std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
    devices_.push_back(device);
  }
  return ledger_.Add(size_bytes, kind);
}

void CaptureCore::FindClusters() {
  if (std::exchange(are_clusters_found_, true)) return;
  std::vector<ClusterSource> small;
  for (uint32_t index = 0; index < memories_.size(); ++index) {
    const CaptureLedger::Source& source = ledger_[index];
    if (memories_[index].device == nullptr || source.size_bytes == 0 || source.size_bytes > kClusterSourceBytes)
      continue;
    small.push_back({.index = index,
                     .device = memories_[index].device,
                     .kind = source.kind,
                     .address = memories_[index].address,
                     .size_bytes = source.size_bytes});
  }
  clusters_ = FindDeviceClusters(std::move(small));
  for (size_t cluster = 0; cluster < clusters_.size(); ++cluster) {
    for (const uint32_t member : clusters_[cluster]) memories_[member].cluster = cluster;
  }
}

void CaptureCore::SetFailed(Status status) {
  if (!failed_.ok()) return;
  failed_ = std::move(status);
  changed_ = true;
}

void CaptureCore::Pace(TimePoint start, std::chrono::nanoseconds duration) {
  pace_start_ = start;
  pace_duration_ = duration;
}

void CaptureCore::Hurry() { hurry_ = changed_ = true; }

// ----------------------------------------------------------------------------------- copies into the arena

// May release the lock: meanwhile the writer may advance, or Close() be called. Open blocks stay, and Narrow waits.
bool CaptureCore::EnsureRoom(std::unique_lock<std::mutex>& lock, Filler filler, Device* device, size_t size_bytes) {
  ++copying_count_;  // makes Close and Narrow wait
  const bool has_room = blocks_.EnsureRoom(lock, filler, device, size_bytes);
  --copying_count_;
  changed_ = true;
  return has_room;
}

// Prepare one copy of a device's small source together with all untouched members of its cluster. Returns false, and
// does nothing, if it has no cluster, no other member is untouched, or there is no room.
bool CaptureCore::Gather(std::unique_lock<std::mutex>& lock, Filler filler, uint32_t source, Copy& copy) {
  const size_t cluster = memories_[source].cluster;
  if (cluster == kNoCluster || !ledger_[source].is_untouched()) return false;
  std::vector<uint32_t> members;
  for (const uint32_t index : clusters_[cluster]) {
    if (ledger_[index].size_bytes > 0 && ledger_[index].is_untouched()) members.push_back(index);
  }
  if (members.size() < 2) return false;
  uintptr_t from = memories_[members.front()].address;
  uintptr_t end = from;
  for (const uint32_t member : members) {  // Narrow may have changed the order of overlapping ones
    from = std::min(from, memories_[member].address);
    end = std::max<uintptr_t>(end, memories_[member].address + ledger_[member].size_bytes);
  }
  const uint64_t span_bytes = end - from;
  Device* const device = memories_[source].device;
  if (!EnsureRoom(lock, filler, device, span_bytes) || closed_) return false;
  const auto is_untouched = [this](uint32_t member) { return ledger_[member].is_untouched(); };
  if (!std::all_of(members.begin(), members.end(), is_untouched)) return false;
  Block* const block = blocks_.open_block(filler);
  copy.device = device;
  copy.from = from;
  copy.target = blocks_.Fill(filler, span_bytes, static_cast<uint32_t>(members.size()));
  copy.size_bytes = span_bytes;
  copy.is_pinned = blocks_.is_pinned(block);
  copy.filler = filler;
  copy.blocks = {block};
  copy.first_bytes = span_bytes;
  for (const uint32_t member : members) ledger_.Claim(member, ledger_[member].size_bytes);
  copy.sources = std::move(members);
  ++copying_count_;
  return true;
}

// Prepare to copy the last live bytes of a source into the capture's open block, which has room, and into the free
// blocks behind that one: a device's stream takes some thousand copies, and a further one waits for the first; threads
// that share a copy wait for each other at its end.
void CaptureCore::BeginCopy(uint32_t source, Copy& copy) {
  const Memory& memory = memories_[source];
  const uint64_t live_bytes = ledger_[source].live_bytes();
  copy.first_bytes = std::min<uint64_t>(blocks_.room_bytes(Filler::kCapture), live_bytes);
  copy.blocks = {blocks_.open_block(Filler::kCapture)};
  copy.size_bytes = copy.first_bytes;
  const size_t block_count = memory.device != nullptr ? kDeviceRunBlocks : kHostRunBlocks;
  while (copy.size_bytes < live_bytes && copy.blocks.size() < block_count) {
    Block* const next = blocks_.TryAddBehind(copy.blocks.back());
    if (next == nullptr) break;
    copy.blocks.push_back(next);
    copy.size_bytes += std::min<uint64_t>(Arena::kBlockBytes, live_bytes - copy.size_bytes);
  }
  ledger_.Claim(source, copy.size_bytes);
  copy.target = blocks_.Fill(Filler::kCapture, copy.first_bytes, 1);
  copy.device = memory.device;
  copy.from = memory.address + ledger_[source].claimed_bytes;
  copy.is_pinned = memory.device != nullptr && blocks_.is_pinned(copy.blocks.front());
  copy.filler = Filler::kCapture;
  copy.sources.assign(1, source);
  ++copying_count_;
}

// End a copy: a device's is started, a thread's is complete; an error fails the writer.
void CaptureCore::EndCopy(Copy& copy, Status status) {
  --copying_count_;
  changed_ = true;
  if (!status.ok()) SetFailed(std::move(status));
  AddSegments(copy);
  for (const uint32_t source : copy.sources) {
    // The writer takes what it gathers: no barrier has copied it.
    ledger_.CompleteClaim(source, copy.filler == Filler::kCapture);
  }
  if (copy.blocks.size() > 1) {
    blocks_.EndRun(copy.blocks, copy.size_bytes - copy.first_bytes - (copy.blocks.size() - 2) * Arena::kBlockBytes);
  }
}

void CaptureCore::AddSegments(const Copy& copy) {
  if (copy.sources.size() > 1) {  // gathered: the whole of each source
    for (const uint32_t source : copy.sources) {
      memories_[source].segments.push_back({.from_bytes = 0,
                                            .size_bytes = ledger_[source].size_bytes,
                                            .memory = copy.target + (memories_[source].address - copy.from),
                                            .block = copy.blocks.front(),
                                            .is_complete = false});
    }
    return;
  }
  const uint32_t source = copy.sources.front();
  uint64_t end_bytes = copy.size_bytes;
  for (size_t index = copy.blocks.size(); index > 0; --index) {  // the lowest is pushed last
    const uint64_t start_bytes = index == 1 ? 0 : copy.first_bytes + (index - 2) * Arena::kBlockBytes;
    memories_[source].segments.push_back({.from_bytes = ledger_[source].claimed_bytes + start_bytes,
                                          .size_bytes = end_bytes - start_bytes,
                                          .memory = copy.target + start_bytes,
                                          .block = copy.blocks[index - 1],
                                          .is_complete = false});
    end_bytes = start_bytes;
  }
}

// ----------------------------------------------------------------------------------- those who capture

CaptureCore::Next CaptureCore::NextOf(CaptureRun& run, std::unique_lock<std::mutex>& lock) {
  if (closed_) return Next::kEnd;
  if (!run.is_first) {
    if (run.may_wait && run.kind == SourceKind::kStable) Hurry();
    // One thread copies; a second one waits for the same bytes, or returns.
    if (capturing_) return run.may_wait ? Next::kWait : Next::kEnd;
    capturing_ = run.is_first = true;
    FindClusters();
  }
  if (!run.is_swept) {
    const Next next = Sweep(run, lock);
    if (next != Next::kEnd) return next;
    run.is_swept = true;
    CloseCaptureBlock();
  }
  // Bytes that are neither copied nor written are leased to the writer, or found no room.
  const bool is_over = closed_ || !run.may_wait || !failed_.ok() || ledger_.is_open(run.kind);
  return is_over ? Next::kEnd : Next::kWait;
}

// Each device in turn, then the host's sources, which the writer overtakes more easily. One block takes bytes of one
// device only, and a state may alternate between devices.
CaptureCore::Next CaptureCore::Sweep(CaptureRun& run, std::unique_lock<std::mutex>& lock) {
  const size_t source_count = ledger_.size();
  for (; run.turn < (devices_.size() + 1) * source_count; ++run.turn) {
    const auto source = static_cast<uint32_t>(source_count - 1 - run.turn % source_count);
    const size_t place = run.turn / source_count;
    Device* const device = place < devices_.size() ? devices_[place] : nullptr;
    if (ledger_[source].kind != run.kind || memories_[source].device != device) continue;
    if (closed_ || !failed_.ok()) return Next::kEnd;
    if (ledger_[source].live_bytes() == 0) continue;  // the writer has the rest
    if (Gather(lock, Filler::kCapture, source, run.copy)) return Next::kCopy;
    if (!EnsureRoom(lock, Filler::kCapture, device, kCacheLineBytes)) return run.may_wait ? Next::kWait : Next::kEnd;
    if (closed_ || ledger_[source].live_bytes() == 0) continue;
    BeginCopy(source, run.copy);
    return Next::kCopy;
  }
  return Next::kEnd;
}

void CaptureCore::End(CaptureRun& run) {
  if (!std::exchange(run.is_first, false)) return;
  capturing_ = false;
  changed_ = true;
  if (!run.is_swept && !closed_) CloseCaptureBlock();
}

// Mark the copies of devices. A block that threads fill stays open for the next capture.
void CaptureCore::CloseCaptureBlock() {
  const Block* const block = blocks_.open_block(Filler::kCapture);
  if (block != nullptr && block->device != nullptr) blocks_.CloseBlock(Filler::kCapture);
  blocks_.MarkFull();
  changed_ = true;
}

// ----------------------------------------------------------------------------------- the writer

TimePoint CaptureCore::DueTime(const TakeRun& run) const {
  const uint64_t taken_bytes = ledger_.counts().taken_bytes;
  const bool at_chunk = memories_[run.source].device != nullptr || taken_bytes % kPaceBytes < kLeaseBytes;
  if (pace_duration_.count() == 0 || !at_chunk) return TimePoint::min();
  const double share = static_cast<double>(taken_bytes) / static_cast<double>(ledger_.total_bytes());
  return pace_start_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                           std::chrono::duration<double, std::nano>(pace_duration_) * share);
}

CaptureCore::Next CaptureCore::NextOf(TakeRun& run, TimePoint now, std::unique_lock<std::mutex>& lock) {
  using Stage = TakeRun::Stage;
  FP_CHECK(run.source < ledger_.size() && (!lease_.has_value() || run.stage == Stage::kCompleting));
  run.until.reset();
  switch (run.stage) {
    case Stage::kPace:
      FP_CHECK(run.offset_bytes == ledger_[run.source].taken_bytes &&
               run.offset_bytes < ledger_[run.source].size_bytes && run.max_bytes > 0);
      if (const TimePoint due = DueTime(run); !hurry_ && !closed_ && now < due) {
        run.until = due;
        return Next::kWait;
      }
      run.stage = Stage::kFirst;
      [[fallthrough]];
    case Stage::kFirst:
      return First(run, lock);
    case Stage::kGathering:
      return AwaitGathered(run);
    case Stage::kGathered:
      for (const uint32_t index : clusters_[memories_[run.source].cluster]) {
        for (Segment& segment : memories_[index].segments) {
          segment.is_complete |= segment.block == blocks_.open_block(Filler::kWriter);
        }
      }
      run.stage = Stage::kLease;
      [[fallthrough]];
    case Stage::kLease:
      return LeaseNext(run);
    case Stage::kCompleting:
      CapturedBlocks::CompleteSegment(memories_[run.source].segments.back(), run.marks_block);
      return Next::kEnd;
  }
  return Next::kEnd;
}

CaptureCore::Next CaptureCore::EndWith(TakeRun& run, Status status) {
  run.taken.reset();
  run.status = std::move(status);
  return Next::kEnd;
}

// Gather an uncaptured small source of a device with its cluster, so that the following sources are copied too. If that
// is impossible, nothing happens.
CaptureCore::Next CaptureCore::First(TakeRun& run, std::unique_lock<std::mutex>& lock) {
  if (!closed_ && ledger_[run.source].is_front_copying()) return Next::kWait;
  if (!failed_.ok()) return EndWith(run, failed_);
  run.stage = TakeRun::Stage::kLease;
  if (!closed_ && memories_[run.source].device != nullptr && run.offset_bytes == 0) {
    FindClusters();
    if (Gather(lock, Filler::kWriter, run.source, run.copy)) {
      run.stage = TakeRun::Stage::kGathering;
      return Next::kCopy;
    }
  }
  return LeaseNext(run);  // a barrier may have copied it first
}

CaptureCore::Next CaptureCore::AwaitGathered(TakeRun& run) {
  if (!failed_.ok()) return EndWith(run, failed_);
  Result<CopyMark> mark = memories_[run.source].device->to_host().Mark();
  if (!mark.ok()) return EndWith(run, mark.status());
  run.mark = std::make_shared<CopyMark>(std::move(mark).value());
  run.stage = TakeRun::Stage::kGathered;
  return Next::kAwait;
}

CaptureCore::Next CaptureCore::LeaseNext(TakeRun& run) {
  const CaptureLedger::Source& source = ledger_[run.source];
  const Memory& memory = memories_[run.source];
  if (!closed_ && source.is_front_copying()) return Next::kWait;
  if (!failed_.ok()) return EndWith(run, failed_);
  if (closed_) return EndWith(run, Status::Error(StatusCode::kCancelled, "the snapshot was closed"));
  lease_ = {.source = run.source, .is_live = source.is_front_live()};
  if (lease_->is_live) {
    // A device takes one command for each lease, and no barrier waits for it: lease all.
    const uint64_t lease_bytes = memory.device == nullptr ? kLeaseBytes : run.max_bytes;
    ledger_.Lease(run.source, std::min({run.max_bytes, lease_bytes, source.claimed_bytes - run.offset_bytes}));
    run.taken = {
        .address = memory.address + run.offset_bytes, .size_bytes = source.leased_bytes, .device = memory.device};
    return Next::kEnd;
  }
  const Segment& segment = memory.segments.back();
  const uint64_t inside_bytes = run.offset_bytes - segment.from_bytes;
  FP_CHECK(inside_bytes < segment.size_bytes);
  ledger_.Lease(run.source, std::min({run.max_bytes, kLeaseBytes, segment.size_bytes - inside_bytes}));
  run.taken = {.address = reinterpret_cast<uintptr_t>(segment.memory + inside_bytes),
               .size_bytes = source.leased_bytes,
               .device = nullptr};
  run.marks_block = !blocks_.is_open(segment.block);
  Result<std::shared_ptr<const CopyMark>> mark = blocks_.MarkOf(segment);
  if (!mark.ok()) {
    Fail(run, mark.status());
    return Next::kEnd;
  }
  run.stage = TakeRun::Stage::kCompleting;
  run.mark = std::move(mark).value();
  return run.mark == nullptr ? Next::kEnd : Next::kAwait;  // the lease keeps the block
}

void CaptureCore::Fail(TakeRun& run, Status status) {
  if (lease_.has_value()) {
    ledger_.CancelLease(run.source);
    EndLease();
  }
  EndWith(run, std::move(status));
}

void CaptureCore::EndLease() {
  FP_CHECK(lease_.has_value());
  const uint32_t index = std::exchange(lease_, std::nullopt)->source;
  if (ledger_.EndLease(index)) {
    changed_ = true;
    return;
  }
  std::vector<Segment>& segments = memories_[index].segments;
  const Segment& segment = segments.back();
  if (!closed_ && ledger_[index].taken_bytes < segment.from_bytes + segment.size_bytes) return;
  Release(segment);
  segments.pop_back();
}

// ----------------------------------------------------------------------------------- narrowing, closing

void CaptureCore::Narrow(uint32_t source, uint64_t from_bytes, uint64_t until_bytes) {
  FP_CHECK(source < ledger_.size() && !is_copying());
  ledger_.Narrow(source, from_bytes, until_bytes);
  Memory& memory = memories_[source];
  std::vector<Segment> narrowed;
  for (const Segment& segment : memory.segments) {
    const uint64_t first = std::max(segment.from_bytes, from_bytes);
    const uint64_t end = std::min(segment.from_bytes + segment.size_bytes, until_bytes);
    if (first >= end) {
      Release(segment);
      continue;
    }
    narrowed.push_back({.from_bytes = first - from_bytes,
                        .size_bytes = end - first,
                        .memory = segment.memory + (first - segment.from_bytes),
                        .block = segment.block,
                        .is_complete = segment.is_complete});
  }
  memory.segments = std::move(narrowed);
  memory.address += from_bytes;
  changed_ = true;
}

void CaptureCore::Close() { closed_ = changed_ = true; }

void CaptureCore::ReleaseAll() {
  FP_CHECK(closed_ && !is_copying());
  blocks_.CloseBlock(Filler::kCapture);
  blocks_.CloseBlock(Filler::kWriter);
  blocks_.MarkFull();
  for (uint32_t index = 0; index < memories_.size(); ++index) {
    std::vector<Segment>& segments = memories_[index].segments;
    // The writer keeps its leased bytes until EndLease.
    const bool is_leased = lease_.has_value() && lease_->source == index && !lease_->is_live;
    const auto leased = segments.end() - (is_leased ? 1 : 0);
    for (auto segment = segments.begin(); segment != leased; ++segment) Release(*segment);
    segments.erase(segments.begin(), leased);
  }
  changed_ = true;
}

void CaptureCore::Return(Block* block, CopiesComplete landed) {
  blocks_.Return(block, std::move(landed));
  changed_ = true;
}

}  // namespace fastpersist
