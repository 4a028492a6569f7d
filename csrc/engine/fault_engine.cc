// Injects faults between a caller and any engine; the plan and the recording are one per process (fault_engine.h).
#include "engine/fault_engine.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/fork.h"
#include "core/wakeup.h"
#include "engine/builtin_engines.h"
#include "engine/deadline.h"

namespace fastpersist {
namespace {

using Clock = std::chrono::steady_clock;

// The process-wide state of the tests.
struct Script {
  std::mutex mutex;
  std::optional<FaultPlan> plan;
  uint64_t counted = 0;
  uint64_t hit = 0;
  bool recording = false;
  std::vector<RecordedWrite> writes;
};

// Never destroyed: engines may run while the process exits.
Script& TheScript() {
  static auto* const script = new Script;
  return *script;
}

// Count this request; returns the plan if it is hit.
std::optional<FaultPlan> NextFault(IoOp op) {
  Script& script = TheScript();
  const std::lock_guard lock(script.mutex);
  if (!script.plan.has_value()) return std::nullopt;
  const FaultPlan& plan = *script.plan;
  if (plan.op.has_value() && *plan.op != op) return std::nullopt;
  ++script.counted;
  // Not counted < nth + count: that overflows when count is UINT64_MAX.
  if (script.counted < plan.nth || script.counted - plan.nth >= plan.count) return std::nullopt;
  ++script.hit;
  return plan;
}

class FaultEngine final : public IoEngine {
 public:
  FaultEngine(std::unique_ptr<IoEngine> wrapped, int wake_fd)
      : name_("fault:" + std::string(wrapped->name())),
        wrapped_(std::move(wrapped)),
        wake_fd_(wake_fd),
        slots_(wrapped_->limits().queue_depth),
        from_wrapped_(slots_.size()) {
    for (size_t slot = slots_.size(); slot > 0; --slot) free_slots_.push_back(slot - 1);
  }

  std::string_view name() const override { return name_; }
  const EngineLimits& limits() const override { return wrapped_->limits(); }
  std::string last_failure() const override { return wrapped_->last_failure(); }
  QueueResult Queue(const IoRequest& request) override;
  Status Submit() override { return wrapped_->Submit(); }
  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) override;
  size_t in_flight() const override { return slots_.size() - free_slots_.size(); }

 private:
  // One for each unreaped request; its index is the wrapped engine's tag.
  struct Slot {
    IoRequest request;
    Clock::time_point due;  // the completion is held back until then
  };
  // Completed here, not reaped yet.
  struct Finished {
    size_t slot = 0;
    IoCompletion completion;
  };

  Status CollectFromWrapped(size_t min_count, std::chrono::milliseconds timeout);
  void Record(const Finished& finished) const;
  size_t TakeDue(std::span<IoCompletion> out);

  const uint64_t generation_ = ForkGeneration();
  const std::string name_;
  const std::unique_ptr<IoEngine> wrapped_;
  const int wake_fd_;
  std::vector<Slot> slots_;
  std::vector<size_t> free_slots_;
  std::vector<Finished> finished_;  // oldest first
  std::vector<IoCompletion> from_wrapped_;
};

QueueResult FaultEngine::Queue(const IoRequest& request) {
  FP_CHECK(ForkGeneration() == generation_);
  if (free_slots_.empty()) return QueueResult::kFull;
  const std::optional<FaultPlan> fault = NextFault(request.op);
  const size_t slot = free_slots_.back();
  free_slots_.pop_back();
  slots_[slot] = {.request = request, .due = Clock::time_point::min()};

  IoRequest forwarded = request;
  forwarded.tag = slot;
  if (fault.has_value()) {
    switch (fault->kind) {
      case FaultPlan::Kind::kErrno:
        finished_.push_back({slot, {.tag = request.tag, .done_bytes = 0, .sys_errno = fault->sys_errno}});
        return QueueResult::kQueued;
      case FaultPlan::Kind::kZero:
        finished_.push_back({slot, {.tag = request.tag, .done_bytes = 0, .sys_errno = 0}});
        return QueueResult::kQueued;
      case FaultPlan::Kind::kShort:
        FP_CHECK(fault->short_bytes > 0);
        forwarded.size_bytes = std::min(request.size_bytes, fault->short_bytes);
        break;
      case FaultPlan::Kind::kDelay:
        slots_[slot].due = Clock::now() + std::chrono::milliseconds(fault->delay_ms);
        break;
    }
  }
  FP_CHECK(wrapped_->Queue(forwarded) ==
           QueueResult::kQueued);  // the wrapped engine never holds more requests than this one
  return QueueResult::kQueued;
}

void FaultEngine::Record(const Finished& finished) const {
  const IoRequest& request = slots_[finished.slot].request;
  if (request.op != IoOp::kWrite || finished.completion.done_bytes == 0) return;
  Script& script = TheScript();
  const std::lock_guard lock(script.mutex);
  if (!script.recording) return;
  const auto* const bytes = reinterpret_cast<const char*>(request.buffer);
  script.writes.push_back({request.offset_bytes, std::string(bytes, finished.completion.done_bytes)});
}

size_t FaultEngine::TakeDue(std::span<IoCompletion> out) {
  const Clock::time_point now = Clock::now();
  std::vector<Finished> not_due;
  size_t count = 0;
  for (const Finished& finished : finished_) {
    if (count == out.size() || slots_[finished.slot].due > now) {
      not_due.push_back(finished);
      continue;
    }
    Record(finished);
    free_slots_.push_back(finished.slot);
    out[count++] = finished.completion;
  }
  finished_.swap(not_due);
  return count;
}

Status FaultEngine::CollectFromWrapped(size_t min_count, std::chrono::milliseconds timeout) {
  Result<size_t> reaped = wrapped_->Reap(from_wrapped_, min_count, timeout);
  if (!reaped.ok()) return reaped.status();
  for (size_t i = 0; i < reaped.value(); ++i) {
    const size_t slot = from_wrapped_[i].tag;
    finished_.push_back({slot, from_wrapped_[i]});
    finished_.back().completion.tag = slots_[slot].request.tag;
  }
  return Status::Ok();
}

Result<size_t> FaultEngine::Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) {
  FP_CHECK(ForkGeneration() == generation_);
  FP_CHECK(min_count <= out.size());
  const Deadline deadline(timeout);
  size_t taken = 0;
  for (bool last_look = false;; last_look = deadline.Passed() || IsReadable(wake_fd_)) {
    Status healthy = CollectFromWrapped(0, std::chrono::milliseconds(0));
    taken += TakeDue(out.subspan(taken));
    const size_t wanted = std::min(min_count, taken + in_flight());
    if (taken >= wanted || last_look) return taken;

    // Sleep until the wrapped engine has enough completions, a delayed one is due, or the time is over.
    Clock::time_point until = deadline.end();
    for (const Finished& finished : finished_) until = std::min(until, slots_[finished.slot].due);
    const auto patience = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    if (healthy.ok() && wrapped_->in_flight() > 0) {
      healthy = CollectFromWrapped(std::min(wanted - taken, wrapped_->in_flight()), patience);
    } else if (healthy.ok()) {
      AwaitReadable(wake_fd_, -1, Deadline(patience).RemainingTimespec());
    }
    if (!healthy.ok()) {
      if (taken > 0) return taken;  // return these first; the next call meets the error again
      return healthy;
    }
  }
}

[[maybe_unused]] const bool g_registered = [] {
  g_fault_wrapper = [](std::unique_ptr<IoEngine> wrapped, int wake_fd) -> std::unique_ptr<IoEngine> {
    return std::make_unique<FaultEngine>(std::move(wrapped), wake_fd);
  };
  return true;
}();

}  // namespace

void SetFaultPlan(const FaultPlan& plan) {
  Script& script = TheScript();
  const std::lock_guard lock(script.mutex);
  script.plan = plan;
  script.counted = 0;
  script.hit = 0;
}

uint64_t ClearFaultPlan() {
  Script& script = TheScript();
  const std::lock_guard lock(script.mutex);
  script.plan.reset();
  return std::exchange(script.hit, 0);
}

void SetWriteRecording(bool on) {
  Script& script = TheScript();
  const std::lock_guard lock(script.mutex);
  script.recording = on;
}

std::vector<RecordedWrite> TakeRecordedWrites() {
  Script& script = TheScript();
  const std::lock_guard lock(script.mutex);
  return std::exchange(script.writes, {});
}

}  // namespace fastpersist
