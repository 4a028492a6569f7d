#include "transfer/snapshot.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "core/alignment.h"
#include "device/pinning.h"

namespace fastpersist {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);
// What the writer takes at a time, and so what a gate that meets it may have to wait for: about 0.2 ms.
constexpr uint64_t kLeaseBytes = uint64_t{1} << 20;
// How often a paced writer looks at the clock: once per chunk of this size.
constexpr uint64_t kPaceBytes = uint64_t{8} << 20;
constexpr uint64_t kCacheLineBytes = 64;
// Sources of a device up to this size are gathered: a copy of 256 KiB takes PCIe about as long as starting it takes us.
constexpr uint64_t kSmallBytes = uint64_t{256} << 10;
constexpr size_t kRunBlocks = 32;   // 64 MiB, that a device is given to copy at once
constexpr size_t kMarkBlocks = 64;  // that are marked together
// As far apart as that they still go into one copy: its bytes cost less than another one.
constexpr uint64_t kGapBytes = uint64_t{64} << 10;

size_t IndexOf(SourceKind kind) { return static_cast<size_t>(kind); }

}  // namespace

uint32_t Snapshot::Add(Device& device, CudaAddress address, uint64_t size_bytes, SourceKind kind) {
  if (std::find(devices_.begin(), devices_.end(), &device) == devices_.end()) {
    devices_.push_back(&device);
    arena_->PinWith(PinFor(device));
  }
  return AddSource(address, size_bytes, kind, &device);
}

uint32_t Snapshot::AddSource(uintptr_t address, uint64_t size_bytes, SourceKind kind, Device* device) {
  sources_.push_back({.address = address,
                      .device = device,
                      .size_bytes = size_bytes,
                      .kind = kind,
                      .claimed_bytes = size_bytes,
                      .copied_from_bytes = size_bytes,
                      .segments = {}});
  counts_.remaining_bytes[IndexOf(kind)] += size_bytes;
  total_bytes_ += size_bytes;
  return static_cast<uint32_t>(sources_.size() - 1);
}

void Snapshot::Narrow(uint32_t source_index, uint64_t from_bytes, uint64_t until_bytes) {
  FP_CHECK(source_index < sources_.size());
  std::unique_lock lock(arena_->mutex());
  while (copying_count_ > 0 && !closed_) arena_->changed().wait(lock);  // perhaps what is dropped here
  if (closed_) return;
  Source& source = sources_[source_index];
  FP_CHECK(from_bytes <= until_bytes && until_bytes <= source.size_bytes);
  FP_CHECK(source.taken_bytes == 0 && source.leased_bytes == 0);
  const uint64_t size_bytes = until_bytes - from_bytes;
  const uint64_t live_bytes = std::clamp(source.claimed_bytes, from_bytes, until_bytes) - from_bytes;
  counts_.remaining_bytes[IndexOf(source.kind)] -= source.claimed_bytes - live_bytes;
  total_bytes_ -= source.size_bytes - size_bytes;
  std::vector<Segment> kept;
  for (const Segment& segment : source.segments) {
    const uint64_t first = std::max(segment.from_bytes, from_bytes);
    const uint64_t end = std::min(segment.from_bytes + segment.size_bytes, until_bytes);
    if (first >= end) {
      Release(segment.block);
      continue;
    }
    kept.push_back({.from_bytes = first - from_bytes,
                    .size_bytes = end - first,
                    .memory = segment.memory + (first - segment.from_bytes),
                    .block = segment.block,
                    .landed = segment.landed});
  }
  source.segments = std::move(kept);
  source.address += from_bytes;
  source.size_bytes = size_bytes;
  source.claimed_bytes = live_bytes;
  source.copied_from_bytes = live_bytes;
  arena_->changed().notify_all();
  ReturnUnlanded(lock, /*give_up=*/false);
}

// Sleep until something changed, or the timeout. False when `poll` says stop.
bool Snapshot::Wait(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds timeout, const Poll& poll,
                    Status& stopped) {
  if (arena_->changed().wait_for(lock, timeout) == std::cv_status::timeout && poll) {
    lock.unlock();
    stopped = poll();
    lock.lock();
  }
  return stopped.ok();
}

// See that there is a block with this much room, filled by this device or, with none, by a thread. The lock may have
// been let go of meanwhile: the writer may have gone on, or be closed; the open blocks and what can be narrowed stay.
bool Snapshot::EnsureRoom(std::unique_lock<std::mutex>& lock, OpenBlock& open, Device* device, size_t size_bytes) {
  FP_CHECK(size_bytes <= Arena::kBlockBytes);
  if (open.block != nullptr && open.block->device == device && open.fill_bytes + size_bytes <= Arena::kBlockBytes) {
    return true;
  }
  CloseBlock(open);
  ++copying_count_;  // Close and Narrow wait
  std::byte* memory = arena_->TryTake(lock);
  --copying_count_;
  arena_->changed().notify_all();
  if (memory == nullptr) return false;
  open = {.block = AddBlock(memory, device), .fill_bytes = 0};
  return true;
}

Snapshot::Block* Snapshot::AddBlock(std::byte* memory, Device* device) {
  blocks_.push_back({.memory = memory,
                     .user_count = 1,
                     .device = device,
                     .mark = nullptr,
                     .unmarked = false,
                     .landed = device == nullptr});
  return &blocks_.back();
}

// Nothing more goes into the open block. If a device fills it, it gets a mark: now if it is the writer's, who waits for
// it, else together with others, since the driver takes only so many commands ahead of the device.
void Snapshot::CloseBlock(OpenBlock& open) {
  if (open.block == nullptr) return;
  Block& block = *std::exchange(open.block, nullptr);
  if (!block.landed && block.user_count > 1) AddUnmarked(block);
  if (&open == &writer_block_) MarkFull();
  Release(&block);
}

// Wait until a device's copy of a segment is there.
Status Snapshot::Land(std::unique_lock<std::mutex>& lock, const Segment& segment, const Poll& poll) {
  Block& block = *segment.block;
  if (segment.landed || block.landed) return Status::Ok();
  const bool is_open = &block == capture_block_.block || &block == writer_block_.block;
  CopyMark own;  // more may go into an open block, which gets its mark when it is closed
  if (is_open || block.mark == nullptr) {
    Result<CopyMark> made = block.device->to_host().Mark();
    if (!made.ok()) return made.status();
    own = std::move(made).value();
  }
  const CopyMark& mark = own ? own : *block.mark;
  lock.unlock();
  Status status = mark.Wait(poll);
  lock.lock();
  if (status.ok() && !is_open) block.landed = true;
  return status;
}

// ----------------------------------------------------------------------------------- small sources of devices

// Find the small sources of one kind that lie close together, in one allocation of a device: an allocator that gives
// many tensors from the same 2 MiB puts them there. What lies between them is copied and ignored.
void Snapshot::FindClusters() {
  if (clusters_found_) return;
  clusters_found_ = true;
  std::vector<uint32_t> small;
  for (uint32_t index = 0; index < sources_.size(); ++index) {
    const Source& source = sources_[index];
    if (source.device != nullptr && source.size_bytes > 0 && source.size_bytes <= kSmallBytes) small.push_back(index);
  }
  std::sort(small.begin(), small.end(), [this](uint32_t a, uint32_t b) {
    const Source& left = sources_[a];
    const Source& right = sources_[b];
    return std::tuple(left.device->ordinal(), left.kind, left.address) <
           std::tuple(right.device->ordinal(), right.kind, right.address);
  });
  for (size_t first = 0, next = 0; first < small.size(); first = next) {
    const Source& start = sources_[small[first]];
    uintptr_t end = start.address + start.size_bytes;
    uintptr_t limit = 0;  // of its allocation, once there is somebody close: a copy must not reach into the next one
    for (next = first + 1; next < small.size(); ++next) {
      const Source& source = sources_[small[next]];
      if (source.device != start.device || source.kind != start.kind) break;
      const uintptr_t further = std::max<uintptr_t>(end, source.address + source.size_bytes);
      if (source.address > end + kGapBytes || further - start.address > Arena::kBlockBytes) break;
      if (limit == 0) {
        auto range = start.device->RangeOf(start.address);
        limit = range.ok() ? range.value().first + range.value().second : end;
      }
      if (further > limit) break;
      end = further;
    }
    if (next - first < 2) continue;
    for (size_t member = first; member < next; ++member) sources_[small[member]].cluster = clusters_.size();
    clusters_.emplace_back(small.begin() + static_cast<std::ptrdiff_t>(first),
                           small.begin() + static_cast<std::ptrdiff_t>(next));
  }
}

// Copy a small source of a device, and all of its cluster that nobody has begun with, into the arena in one go. False:
// it has no cluster, is alone, or there is no room; then nothing was done.
bool Snapshot::Gather(std::unique_lock<std::mutex>& lock, OpenBlock& open, const Source& source, const Poll& poll) {
  if (source.cluster == kNoCluster || !source.untouched()) return false;
  std::vector<Source*> members;
  for (const uint32_t index : clusters_[source.cluster]) {
    if (sources_[index].size_bytes > 0 && sources_[index].untouched()) members.push_back(&sources_[index]);
  }
  if (members.size() < 2) return false;
  uintptr_t from = members.front()->address;
  uintptr_t end = from;
  for (const Source* member : members) {  // those that overlap may have changed their order by Narrow
    from = std::min(from, member->address);
    end = std::max<uintptr_t>(end, member->address + member->size_bytes);
  }
  const uint64_t span_bytes = end - from;
  if (!EnsureRoom(lock, open, source.device, span_bytes) || closed_) return false;
  if (!std::all_of(members.begin(), members.end(), [](const Source* member) { return member->untouched(); })) {
    return false;
  }
  Block* const block = open.block;
  std::byte* const target = block->memory + open.fill_bytes;
  open.fill_bytes = AlignUp(open.fill_bytes + span_bytes, kCacheLineBytes);
  block->user_count += static_cast<uint32_t>(members.size());
  for (Source* member : members) member->claimed_bytes = 0;
  ++copying_count_;
  Device& device = *source.device;
  const bool is_pinned = arena_->is_pinned(block->memory);
  lock.unlock();
  Status copied = CopyToHost(device, target, from, span_bytes, is_pinned, poll);
  lock.lock();
  --copying_count_;
  if (!copied.ok() && failed_.ok()) failed_ = std::move(copied);
  for (Source* member : members) {
    member->copied_from_bytes = 0;
    member->segments.push_back({.from_bytes = 0,
                                .size_bytes = member->size_bytes,
                                .memory = target + (member->address - from),
                                .block = block,
                                .landed = false});
    counts_.remaining_bytes[IndexOf(member->kind)] -= member->size_bytes;
    // What the writer gathers is as good as taken by it: no gate has copied it.
    if (&open == &capture_block_) counts_.copied_bytes[IndexOf(member->kind)] += member->size_bytes;
  }
  arena_->changed().notify_all();
  return true;
}

// For the writer, which comes to a small source that nobody has captured: gather its cluster and wait for it, so that
// those that follow are there. Where that cannot be, nothing happens.
Status Snapshot::GatherAndLand(std::unique_lock<std::mutex>& lock, const Source& source, const Poll& poll) {
  if (!Gather(lock, writer_block_, source, poll) || !failed_.ok()) return failed_;
  Result<CopyMark> mark = source.device->to_host().Mark();
  if (!mark.ok()) return mark.status();
  lock.unlock();
  Status status = mark.value().Wait(poll);
  lock.lock();
  if (!status.ok()) return status;
  for (const uint32_t index : clusters_[source.cluster]) {
    for (Segment& segment : sources_[index].segments) segment.landed |= segment.block == writer_block_.block;
  }
  return Status::Ok();
}

// Copies into a full block were started.
void Snapshot::AddUnmarked(Block& block) {
  block.unmarked = true;
  unmarked_.push_back(&block);
  if (unmarked_.size() >= kMarkBlocks) MarkFull();
}

// Mark the copies into full blocks. Where that cannot be, Land makes a mark, or says why it cannot.
void Snapshot::MarkFull() {
  while (!unmarked_.empty()) {
    Device* const device = unmarked_.back()->device;
    Result<CopyMark> made = device->to_host().Mark();
    const auto mark = made.ok() ? std::make_shared<CopyMark>(std::move(made).value()) : nullptr;
    for (Block* block : unmarked_) {
      if (block->device != device || mark == nullptr || block->user_count == 0) continue;  // 0: it is being returned
      block->mark = mark;
      block->unmarked = false;
    }
    std::erase_if(unmarked_, [device](const Block* block) { return block->device == device; });
  }
}

void Snapshot::Release(Block* block) {
  FP_CHECK(block->user_count > 0);
  if (--block->user_count > 0) return;
  if (!block->landed && (block->mark != nullptr || block->unmarked)) {
    unlanded_.push_back(block);
    return;
  }
  arena_->Return(std::exchange(block->memory, nullptr));
  arena_->changed().notify_all();
}

// Give back the blocks that nobody wants any more, but into which a device still copies: whoever gets one next must not
// find that. Waits without the lock, behind which all saves of the arena would stand still; after the grace time the
// rest goes to quarantine. give_up: the snapshot ends, and the device is held to be at fault.
void Snapshot::ReturnUnlanded(std::unique_lock<std::mutex>& lock, bool give_up) {
  const Grace grace;
  while (!unlanded_.empty()) {
    Block* const block = unlanded_.back();
    unlanded_.pop_back();
    ++returning_count_;
    lock.unlock();
    std::vector<CopyEnd> ends;
    if (block->mark != nullptr) {
      ends.emplace_back(std::move(block->mark));
    } else {
      ends.emplace_back(block->device->to_host());
    }
    const bool in_time = grace.WaitFor(ends);
    CopiesComplete landed;
    if (!in_time) landed = give_up ? Grace::GiveUp(std::move(ends)) : CompletionOf(std::move(ends));
    lock.lock();
    --returning_count_;
    std::byte* const memory = std::exchange(block->memory, nullptr);
    if (in_time) {
      arena_->Return(memory);
    } else {
      arena_->PutInQuarantine(memory, std::move(landed));
    }
    arena_->changed().notify_all();
  }
}

// Start a copy; where it has to wait for room, Close() or `poll` ends that. Without the lock.
Status Snapshot::CopyToHost(Device& device, std::byte* target, CudaAddress from, uint64_t size_bytes, bool is_pinned,
                            const Poll& poll) {
  FP_RETURN_IF_ERROR(device.to_host().AwaitRoom(is_pinned, [&]() -> Status {
    {
      const std::lock_guard lock(arena_->mutex());
      if (closed_) return Status::Error(StatusCode::kCancelled, "the snapshot was closed");
    }
    return poll ? poll() : Status::Ok();
  }));
  return device.to_host().ToHost(target, from, size_bytes);
}

// Copy the last of a source's live bytes into the open block, which has room. A device is given as much as free blocks
// lie behind that one, since it takes some thousand copies, and whoever starts one more waits for the first.
void Snapshot::CopyOnce(std::unique_lock<std::mutex>& lock, Source& source, uint64_t live_bytes) {
  const uint64_t first_bytes = std::min<uint64_t>(Arena::kBlockBytes - capture_block_.fill_bytes, live_bytes);
  std::byte* const target = capture_block_.block->memory + capture_block_.fill_bytes;
  uint64_t size_bytes = first_bytes;
  std::vector<Block*> run = {capture_block_.block};
  while (source.device != nullptr && size_bytes < live_bytes && run.size() < kRunBlocks) {
    std::byte* const next = arena_->TryTakeBehind(run.back()->memory);
    if (next == nullptr) break;
    run.push_back(AddBlock(next, source.device));
    size_bytes += std::min<uint64_t>(Arena::kBlockBytes, live_bytes - size_bytes);
  }
  capture_block_.fill_bytes = AlignUp(capture_block_.fill_bytes + first_bytes, kCacheLineBytes);
  ++run.front()->user_count;  // the others count their segment from the start
  source.claimed_bytes -= size_bytes;
  ++copying_count_;
  const uintptr_t from = source.address + source.claimed_bytes;
  Status copied;
  const bool is_pinned = source.device != nullptr && arena_->is_pinned(run.front()->memory);
  lock.unlock();
  if (source.device == nullptr) {
    std::memcpy(target, reinterpret_cast<const std::byte*>(from), size_bytes);
  } else {
    copied = CopyToHost(*source.device, target, from, size_bytes, is_pinned, {});
  }
  lock.lock();
  --copying_count_;
  if (!copied.ok() && failed_.ok()) failed_ = std::move(copied);
  source.copied_from_bytes = source.claimed_bytes;
  uint64_t end_bytes = size_bytes;
  for (size_t index = run.size(); index > 0; --index) {  // the lowest is pushed last
    const uint64_t start_bytes = index == 1 ? 0 : first_bytes + (index - 2) * Arena::kBlockBytes;
    source.segments.push_back({.from_bytes = source.claimed_bytes + start_bytes,
                               .size_bytes = end_bytes - start_bytes,
                               .memory = target + start_bytes,
                               .block = run[index - 1],
                               .landed = false});
    end_bytes = start_bytes;
  }
  counts_.remaining_bytes[IndexOf(source.kind)] -= size_bytes;
  counts_.copied_bytes[IndexOf(source.kind)] += size_bytes;
  if (run.size() > 1) {  // all of them are full but the last, which is the open one now
    for (Block* block : std::span(run).first(run.size() - 1)) AddUnmarked(*block);
    ++run.back()->user_count;
    const uint64_t last_bytes = size_bytes - first_bytes - (run.size() - 2) * Arena::kBlockBytes;
    capture_block_ = {.block = run.back(), .fill_bytes = AlignUp(last_bytes, kCacheLineBytes)};
    Release(run.front());
  }
}

Status Snapshot::Capture(SourceKind kind, bool wait, const Poll& poll) {
  std::unique_lock lock(arena_->mutex());
  if (wait && kind == SourceKind::kStable) {
    hurry_ = true;
    arena_->changed().notify_all();
  }
  arena_->TakeBack(lock);
  Status stopped;
  while (capturing_ && !closed_) {  // one at a time copies; a second one waits for the same bytes, or does not wait
    if (!wait) return Status::Ok();
    if (!Wait(lock, kPollInterval, poll, stopped)) return stopped;
  }
  if (closed_) return Status::Ok();
  capturing_ = true;
  FindClusters();
  bool no_room = false;
  // One device after the other, last those of the host, which the writer is the quicker to pass: a block is filled by
  // one of them, and in a state they alternate.
  std::vector<Device*> devices = devices_;
  devices.push_back(nullptr);
  std::optional<ContextScope> scope;  // one for all copies in a row; not while Wait runs the poll
  const Device* scope_device = nullptr;
  const auto wait_outside = [&] {
    scope.reset();
    scope_device = nullptr;
    return Wait(lock, kPollInterval, poll, stopped);
  };
  for (size_t turn = 0; turn < devices.size() * sources_.size(); ++turn) {
    Source& source = sources_[sources_.size() - 1 - turn % sources_.size()];
    if (source.kind != kind || source.device != devices[turn / sources_.size()]) continue;
    if (!stopped.ok() || !failed_.ok() || closed_ || no_room) break;
    while (!closed_ && failed_.ok()) {
      const uint64_t front_bytes = source.taken_bytes + source.leased_bytes;
      if (source.claimed_bytes <= front_bytes) break;  // the rest of it is the writer's
      if (source.device != scope_device) {
        scope.reset();
        if (source.device != nullptr) scope.emplace(*source.device);
        scope_device = source.device;
      }
      if (Gather(lock, capture_block_, source, {})) break;
      if (!EnsureRoom(lock, capture_block_, source.device, kCacheLineBytes)) {
        no_room = !wait;
        if (no_room || !wait_outside()) break;
        continue;
      }
      const uint64_t live_bytes =
          source.claimed_bytes - std::min(source.claimed_bytes, source.taken_bytes + source.leased_bytes);
      if (closed_ || live_bytes == 0) break;
      CopyOnce(lock, source, live_bytes);
      arena_->changed().notify_all();
    }
  }
  if (capture_block_.block != nullptr && capture_block_.block->device != nullptr) CloseBlock(capture_block_);
  MarkFull();
  scope.reset();
  // What is neither in the arena nor behind the writer is what the writer is looking at this moment, or found no room.
  while (wait && stopped.ok() && failed_.ok() && !closed_ && counts_.remaining_bytes[IndexOf(kind)] > 0) {
    if (!Wait(lock, kPollInterval, poll, stopped)) break;
  }
  capturing_ = false;
  arena_->changed().notify_all();
  return stopped;
}

Result<Snapshot::Taken> Snapshot::Take(uint32_t source_index, uint64_t offset_bytes, uint64_t max_bytes,
                                       const Poll& poll) {
  FP_CHECK(source_index < sources_.size());
  std::unique_lock lock(arena_->mutex());
  FP_CHECK(leased_ == nullptr);
  Source& source = sources_[source_index];
  FP_CHECK(offset_bytes == source.taken_bytes && offset_bytes < source.size_bytes && max_bytes > 0);
  Status stopped;
  const bool at_chunk = source.device != nullptr || counts_.taken_bytes % kPaceBytes < kLeaseBytes;
  if (pace_duration_.count() > 0 && at_chunk) {
    const double share = static_cast<double>(counts_.taken_bytes) / static_cast<double>(total_bytes_);
    const auto due = pace_start_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                       std::chrono::duration<double, std::nano>(pace_duration_) * share);
    for (auto now = std::chrono::steady_clock::now(); !hurry_ && !closed_ && now < due;
         now = std::chrono::steady_clock::now()) {
      if (!Wait(lock, std::min<std::chrono::nanoseconds>(due - now, kPollInterval), poll, stopped)) return stopped;
    }
  }
  const auto await_copy = [&] {  // that somebody makes of what comes next
    while (!closed_ && offset_bytes >= source.claimed_bytes && offset_bytes < source.copied_from_bytes) {
      if (!Wait(lock, kPollInterval, poll, stopped)) break;
    }
    return stopped;
  };
  FP_RETURN_IF_ERROR(await_copy());
  if (!failed_.ok()) return failed_;
  if (!closed_ && source.device != nullptr && offset_bytes == 0) {
    FindClusters();
    FP_RETURN_IF_ERROR(GatherAndLand(lock, source, poll));
    FP_RETURN_IF_ERROR(await_copy());  // a gate may have been the first
    if (!failed_.ok()) return failed_;
  }
  if (closed_) return Status::Error(StatusCode::kCancelled, "the snapshot was closed");
  leased_ = &source;
  leased_live_ = offset_bytes < source.copied_from_bytes;
  if (leased_live_) {
    // A device is told once for each lease, and no gate waits for it: as much as there is.
    const uint64_t lease_bytes = source.device == nullptr ? kLeaseBytes : max_bytes;
    source.leased_bytes = std::min({max_bytes, lease_bytes, source.claimed_bytes - offset_bytes});
    return Taken{.address = source.address + offset_bytes, .size_bytes = source.leased_bytes, .device = source.device};
  }
  const Segment segment = source.segments.back();
  const uint64_t inside_bytes = offset_bytes - segment.from_bytes;
  FP_CHECK(inside_bytes < segment.size_bytes);
  source.leased_bytes = std::min({max_bytes, kLeaseBytes, segment.size_bytes - inside_bytes});
  stopped = Land(lock, segment, poll);  // without the lock: the lease keeps the block
  if (!stopped.ok()) {
    source.leased_bytes = 0;
    EndLease();
    ReturnUnlanded(lock, /*give_up=*/true);
    return stopped;
  }
  return Taken{.address = reinterpret_cast<uintptr_t>(segment.memory + inside_bytes),
               .size_bytes = source.leased_bytes,
               .device = nullptr};
}

void Snapshot::Done() {
  std::unique_lock lock(arena_->mutex());
  FP_CHECK(leased_ != nullptr);
  EndLease();
  ReturnUnlanded(lock, closed_);
}

// What is leased has been taken.
void Snapshot::EndLease() {
  Source& source = *std::exchange(leased_, nullptr);
  source.taken_bytes += source.leased_bytes;
  counts_.taken_bytes += source.leased_bytes;
  if (leased_live_) {
    counts_.remaining_bytes[IndexOf(source.kind)] -= source.leased_bytes;
    arena_->changed().notify_all();
  } else if (const Segment& segment = source.segments.back();
             closed_ || source.taken_bytes == segment.from_bytes + segment.size_bytes) {
    Release(segment.block);
    source.segments.pop_back();
  }
  source.leased_bytes = 0;
}

void Snapshot::Pace(std::chrono::nanoseconds delay, std::chrono::nanoseconds duration) {
  const std::lock_guard lock(arena_->mutex());
  pace_start_ = std::chrono::steady_clock::now() + delay;
  pace_duration_ = duration;
}

void Snapshot::Hurry() {
  const std::lock_guard lock(arena_->mutex());
  hurry_ = true;
  arena_->changed().notify_all();
}

void Snapshot::Close() {
  if (arena_->forked()) return;
  std::unique_lock lock(arena_->mutex());
  closed_ = true;
  arena_->changed().notify_all();
  while (copying_count_ > 0) arena_->changed().wait(lock);  // its target is a block of ours
  CloseBlock(capture_block_);
  CloseBlock(writer_block_);
  MarkFull();
  for (Source& source : sources_) {
    // What the writer is looking at stays until it is Done().
    const auto kept = source.segments.end() - (&source == leased_ && !leased_live_ ? 1 : 0);
    for (auto segment = source.segments.begin(); segment != kept; ++segment) Release(segment->block);
    source.segments.erase(source.segments.begin(), kept);
  }
  ReturnUnlanded(lock, /*give_up=*/true);
  while (returning_count_ > 0) arena_->changed().wait(lock);  // no longer than their grace time
  arena_->TakeBack(lock);
}

Result<bool> Snapshot::Settled() {
  const std::lock_guard lock(arena_->mutex());
  if (!failed_.ok()) return failed_;
  if (settled_) return true;
  if (!closed_ &&
      counts_.remaining_bytes[IndexOf(SourceKind::kStable)] + counts_.remaining_bytes[IndexOf(SourceKind::kVolatile)] >
          0) {
    return false;
  }
  for (size_t index = settling_.size(); index < devices_.size(); ++index) {
    Result<CopyMark> mark = devices_[index]->to_host().Mark();
    if (!mark.ok()) return mark.status();
    settling_.push_back(std::move(mark).value());
  }
  for (const CopyMark& mark : settling_) {
    Result<bool> reached = mark.IsComplete();
    if (!reached.ok() || !reached.value()) return reached;
  }
  settling_.clear();
  settled_ = true;
  return true;
}

bool Snapshot::HoldCaller(Device& device, uintptr_t stream) {
  Status held = device.to_host().HoldCaller(stream);
  if (held.code() == StatusCode::kUnsupported) return false;
  const std::lock_guard lock(arena_->mutex());
  if (!held.ok() && failed_.ok()) failed_ = std::move(held);
  return true;
}

Snapshot::Counts Snapshot::counts() {
  const std::lock_guard lock(arena_->mutex());
  return counts_;
}

}  // namespace fastpersist
