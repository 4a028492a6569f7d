#include "transfer/snapshot.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "core/parallel.h"
#include "device/pinning.h"

namespace fastpersist {
namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(50);

}  // namespace

uint32_t Snapshot::Add(Device& device, CudaAddress address, uint64_t size_bytes, SourceKind kind) {
  const auto& known = core_.devices();
  if (std::find(known.begin(), known.end(), &device) == known.end()) arena_->PinWith(PinFor(device));
  return core_.Add(address, size_bytes, kind, &device);
}

// Wake the waiting threads if a step has changed something.
void Snapshot::TellOthers() {
  if (core_.TakeChanged()) arena_->changed().notify_all();
}

// Sleep until a step changes something or the timeout passes. Returns false, and sets `stopped`, if `poll` fails.
bool Snapshot::Wait(Lock& lock, std::chrono::nanoseconds timeout, const Poll& poll, Status& stopped) {
  if (arena_->changed().wait_for(lock, timeout) == std::cv_status::timeout && poll) {
    lock.unlock();
    stopped = poll();
    lock.lock();
  }
  return stopped.ok();
}

// Copy, or start a device's copy. Close() or `poll` ends a wait for room in the stream. Called without the lock.
Status Snapshot::Perform(const CaptureCore::Copy& copy, const Poll& poll) {
  if (copy.device == nullptr) {
    CopyInParallel(copy.target, reinterpret_cast<const std::byte*>(copy.from), copy.size_bytes, thread_count_);
    return Status::Ok();
  }
  FP_RETURN_IF_ERROR(copy.device->to_host().AwaitRoom(copy.is_pinned, [&]() -> Status {
    {
      const std::lock_guard lock(arena_->mutex());
      if (core_.is_closed()) return Status::Error(StatusCode::kCancelled, "the snapshot was closed");
    }
    return poll ? poll() : Status::Ok();
  }));
  return copy.device->to_host().ToHost(copy.target, copy.from, copy.size_bytes);
}

Status Snapshot::Capture(SourceKind kind, bool wait, const Poll& poll) {
  Lock lock(arena_->mutex());
  arena_->TakeBack(lock);
  CaptureCore::CaptureRun run;
  run.kind = kind;
  run.may_wait = wait;
  Status stopped;
  std::optional<ContextScope> scope;  // one for consecutive copies; none while Wait calls `poll`
  const Device* scope_device = nullptr;
  for (auto next = CaptureCore::Next::kWait; stopped.ok();) {
    next = core_.NextOf(run, lock);
    TellOthers();
    if (next == CaptureCore::Next::kEnd) break;
    if (next == CaptureCore::Next::kWait) {
      scope.reset();
      scope_device = nullptr;
      Wait(lock, kPollInterval, poll, stopped);
      continue;
    }
    lock.unlock();
    if (run.copy.device != scope_device) {
      scope.reset();
      if (run.copy.device != nullptr) scope.emplace(*run.copy.device);
      scope_device = run.copy.device;
    }
    Status copied = Perform(run.copy, {});
    lock.lock();
    core_.EndCopy(run.copy, std::move(copied));
    TellOthers();
  }
  core_.End(run);
  TellOthers();
  return stopped;
}

Result<Snapshot::Taken> Snapshot::Take(uint32_t source, uint64_t offset_bytes, uint64_t max_bytes, const Poll& poll) {
  Lock lock(arena_->mutex());
  CaptureCore::TakeRun run;
  run.source = source;
  run.offset_bytes = offset_bytes;
  run.max_bytes = max_bytes;
  for (;;) {
    const TimePoint now = std::chrono::steady_clock::now();
    const CaptureCore::Next next = core_.NextOf(run, now, lock);
    TellOthers();
    Status status;
    switch (next) {
      case CaptureCore::Next::kEnd:
        if (run.status.ok()) return *run.taken;
        ReturnIncomplete(lock, /*give_up=*/true);
        return run.status;
      case CaptureCore::Next::kWait: {
        const std::chrono::nanoseconds until_due = run.until.has_value() ? *run.until - now : kPollInterval;
        if (!Wait(lock, std::min<std::chrono::nanoseconds>(until_due, kPollInterval), poll, status)) return status;
        break;
      }
      case CaptureCore::Next::kCopy:
        lock.unlock();
        status = Perform(run.copy, poll);
        lock.lock();
        core_.EndCopy(run.copy, std::move(status));
        TellOthers();
        break;
      case CaptureCore::Next::kAwait:
        lock.unlock();
        status = run.mark->Wait(poll);
        lock.lock();
        if (status.ok()) break;
        core_.Fail(run, std::move(status));
        TellOthers();
        ReturnIncomplete(lock, /*give_up=*/true);
        return run.status;
    }
  }
}

void Snapshot::EndLease() {
  Lock lock(arena_->mutex());
  core_.EndLease();
  TellOthers();
  ReturnIncomplete(lock, core_.is_closed());
}

// Give back the unused blocks into which a device still copies. Waits without the lock, which all saves of the arena
// need; after the grace time the rest is quarantined. give_up: the snapshot ends, and the device counts as lost.
void Snapshot::ReturnIncomplete(Lock& lock, bool give_up) {
  std::optional<Grace> grace;
  while (CapturedBlocks::Block* const block = core_.TakeIncomplete()) {
    if (!grace.has_value()) grace.emplace();
    lock.unlock();
    std::vector<CopyEnd> ends;
    if (block->mark != nullptr) {
      ends.emplace_back(std::move(block->mark));
    } else {
      ends.emplace_back(block->device->to_host());
    }
    CopiesComplete landed;
    if (!grace->WaitFor(ends)) landed = give_up ? Grace::GiveUp(std::move(ends)) : CompletionOf(std::move(ends));
    lock.lock();
    core_.Return(block, std::move(landed));
    TellOthers();
  }
}

void Snapshot::Narrow(uint32_t source, uint64_t from_bytes, uint64_t until_bytes) {
  Lock lock(arena_->mutex());
  while (core_.is_copying() && !core_.is_closed()) arena_->changed().wait(lock);  // it may use bytes that Narrow drops
  if (core_.is_closed()) return;
  core_.Narrow(source, from_bytes, until_bytes);
  TellOthers();
  ReturnIncomplete(lock, /*give_up=*/false);
}

void Snapshot::Pace(std::chrono::nanoseconds delay, std::chrono::nanoseconds duration) {
  const std::lock_guard lock(arena_->mutex());
  core_.Pace(std::chrono::steady_clock::now() + delay, duration);
}

void Snapshot::Hurry() {
  const std::lock_guard lock(arena_->mutex());
  core_.Hurry();
  TellOthers();
}

void Snapshot::Close() {
  if (arena_->forked()) return;
  Lock lock(arena_->mutex());
  core_.Close();
  TellOthers();
  while (core_.is_copying()) arena_->changed().wait(lock);  // they fill our blocks
  core_.ReleaseAll();
  TellOthers();
  ReturnIncomplete(lock, /*give_up=*/true);
  while (core_.is_returning()) arena_->changed().wait(lock);  // at most for their grace time
  arena_->TakeBack(lock);
}

Result<bool> Snapshot::AreCopiesComplete() {
  const std::lock_guard lock(arena_->mutex());
  if (!core_.failed().ok()) return core_.failed();
  if (are_copies_complete_) return true;
  const CaptureLedger& ledger = core_.ledger();
  if (!core_.is_closed() && !(ledger.is_open(SourceKind::kStable) && ledger.is_open(SourceKind::kVolatile))) {
    return false;
  }
  for (size_t index = last_marks_.size(); index < core_.devices().size(); ++index) {
    Result<CopyMark> mark = core_.devices()[index]->to_host().Mark();
    if (!mark.ok()) return mark.status();
    last_marks_.push_back(std::move(mark).value());
  }
  for (const CopyMark& mark : last_marks_) {
    Result<bool> reached = mark.IsComplete();
    if (!reached.ok() || !reached.value()) return reached;
  }
  last_marks_.clear();
  are_copies_complete_ = true;
  return true;
}

bool Snapshot::HoldCaller(Device& device, uintptr_t stream) {
  Status held = device.to_host().HoldCaller(stream);
  if (held.code() == StatusCode::kUnsupported) return false;
  const std::lock_guard lock(arena_->mutex());
  if (!held.ok()) core_.SetFailed(std::move(held));
  TellOthers();
  return true;
}

Snapshot::Counts Snapshot::counts() {
  const std::lock_guard lock(arena_->mutex());
  return core_.ledger().counts();
}

}  // namespace fastpersist
