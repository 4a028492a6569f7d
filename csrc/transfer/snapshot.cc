#include "transfer/snapshot.h"

#include <algorithm>
#include <cstring>

#include "core/alignment.h"

namespace fastpersist {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);
// What the writer takes at a time, and so what a gate that meets it may have to wait for: about 0.2 ms.
constexpr uint64_t kLeaseBytes = uint64_t{1} << 20;
// How often a paced writer looks at the clock: once per chunk of this size.
constexpr uint64_t kPaceBytes = uint64_t{8} << 20;
constexpr uint64_t kCacheLineBytes = 64;

size_t IndexOf(SourceKind kind) { return static_cast<size_t>(kind); }

}  // namespace

uint32_t Snapshot::Add(const std::byte* address, uint64_t size_bytes, SourceKind kind) {
  sources_.push_back({.address = address,
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
  while (copying_ && !closed_) arena_->changed().wait(lock);  // perhaps what is dropped here
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
                    .block = segment.block});
  }
  source.segments = std::move(kept);
  source.address += from_bytes;
  source.size_bytes = size_bytes;
  source.claimed_bytes = live_bytes;
  source.copied_from_bytes = live_bytes;
  arena_->changed().notify_all();
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

// See that there is a block with room for at least one line.
bool Snapshot::EnsureRoom() {
  if (open_block_ != nullptr && open_fill_bytes_ < Arena::kBlockBytes) return true;
  if (open_block_ != nullptr) Release(std::exchange(open_block_, nullptr));
  std::byte* memory = arena_->TryTake();
  if (memory == nullptr) return false;
  open_block_ = &blocks_.emplace_back(Block{.memory = memory, .user_count = 1});
  open_fill_bytes_ = 0;
  return true;
}

void Snapshot::Release(Block* block) {
  FP_CHECK(block->user_count > 0);
  if (--block->user_count > 0) return;
  arena_->Return(std::exchange(block->memory, nullptr));
  arena_->changed().notify_all();
}

Status Snapshot::Capture(SourceKind kind, bool wait, const Poll& poll) {
  std::unique_lock lock(arena_->mutex());
  if (wait && kind == SourceKind::kStable) {
    hurry_ = true;
    arena_->changed().notify_all();
  }
  Status stopped;
  while (capturing_ && !closed_) {  // one at a time copies; a second one waits for the same bytes, or does not wait
    if (!wait) return Status::Ok();
    if (!Wait(lock, kPollInterval, poll, stopped)) return stopped;
  }
  if (closed_) return Status::Ok();
  capturing_ = true;
  bool no_room = false;
  for (size_t index = sources_.size(); index > 0 && stopped.ok() && !closed_ && !no_room; --index) {
    Source& source = sources_[index - 1];
    if (source.kind != kind) continue;
    while (!closed_) {
      const uint64_t front_bytes = source.taken_bytes + source.leased_bytes;
      if (source.claimed_bytes <= front_bytes) break;  // the rest of it is the writer's
      if (!EnsureRoom()) {
        no_room = !wait;
        if (no_room || !Wait(lock, kPollInterval, poll, stopped)) break;
        continue;
      }
      const uint64_t size_bytes =
          std::min<uint64_t>(Arena::kBlockBytes - open_fill_bytes_, source.claimed_bytes - front_bytes);
      Block* const block = open_block_;
      std::byte* const target = block->memory + open_fill_bytes_;
      open_fill_bytes_ = AlignUp(open_fill_bytes_ + size_bytes, kCacheLineBytes);
      ++block->user_count;
      source.claimed_bytes -= size_bytes;
      copying_ = true;
      lock.unlock();
      std::memcpy(target, source.address + source.claimed_bytes, size_bytes);
      lock.lock();
      copying_ = false;
      source.copied_from_bytes = source.claimed_bytes;
      source.segments.push_back(
          {.from_bytes = source.claimed_bytes, .size_bytes = size_bytes, .memory = target, .block = block});
      counts_.remaining_bytes[IndexOf(kind)] -= size_bytes;
      counts_.copied_bytes[IndexOf(kind)] += size_bytes;
      arena_->changed().notify_all();
    }
  }
  // What is neither in the arena nor behind the writer is what the writer is looking at this moment, or found no room.
  while (wait && stopped.ok() && !closed_ && counts_.remaining_bytes[IndexOf(kind)] > 0) {
    if (!Wait(lock, kPollInterval, poll, stopped)) break;
  }
  capturing_ = false;
  arena_->changed().notify_all();
  return stopped;
}

Result<std::span<const std::byte>> Snapshot::Take(uint32_t source_index, uint64_t offset_bytes, uint64_t max_bytes,
                                                  const Poll& poll) {
  FP_CHECK(source_index < sources_.size());
  std::unique_lock lock(arena_->mutex());
  FP_CHECK(leased_ == nullptr);
  Source& source = sources_[source_index];
  FP_CHECK(offset_bytes == source.taken_bytes && offset_bytes < source.size_bytes && max_bytes > 0);
  Status stopped;
  if (pace_duration_.count() > 0 && counts_.taken_bytes % kPaceBytes < kLeaseBytes) {
    const double share = static_cast<double>(counts_.taken_bytes) / static_cast<double>(total_bytes_);
    const auto due = pace_start_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                       std::chrono::duration<double, std::nano>(pace_duration_) * share);
    for (auto now = std::chrono::steady_clock::now(); !hurry_ && !closed_ && now < due;
         now = std::chrono::steady_clock::now()) {
      if (!Wait(lock, std::min<std::chrono::nanoseconds>(due - now, kPollInterval), poll, stopped)) return stopped;
    }
  }
  while (!closed_ && offset_bytes >= source.claimed_bytes && offset_bytes < source.copied_from_bytes) {
    if (!Wait(lock, kPollInterval, poll, stopped)) return stopped;
  }
  if (closed_) return Status::Error(StatusCode::kCancelled, "the snapshot was closed");
  leased_ = &source;
  leased_live_ = offset_bytes < source.copied_from_bytes;
  const std::byte* memory = nullptr;
  if (leased_live_) {
    source.leased_bytes = std::min({max_bytes, kLeaseBytes, source.claimed_bytes - offset_bytes});
    memory = source.address + offset_bytes;
  } else {
    const Segment& segment = source.segments.back();
    const uint64_t inside_bytes = offset_bytes - segment.from_bytes;
    FP_CHECK(inside_bytes < segment.size_bytes);
    source.leased_bytes = std::min({max_bytes, kLeaseBytes, segment.size_bytes - inside_bytes});
    memory = segment.memory + inside_bytes;
  }
  return std::span(memory, source.leased_bytes);
}

void Snapshot::Done() {
  const std::lock_guard lock(arena_->mutex());
  FP_CHECK(leased_ != nullptr);
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
  while (copying_) arena_->changed().wait(lock);  // its target is a block of ours
  for (Source& source : sources_) {
    // What the writer is looking at stays until it is Done().
    const auto kept = source.segments.end() - (&source == leased_ && !leased_live_ ? 1 : 0);
    for (auto segment = source.segments.begin(); segment != kept; ++segment) Release(segment->block);
    source.segments.erase(source.segments.begin(), kept);
  }
  if (open_block_ != nullptr) Release(std::exchange(open_block_, nullptr));
}

Snapshot::Counts Snapshot::counts() {
  const std::lock_guard lock(arena_->mutex());
  return counts_;
}

}  // namespace fastpersist
