// The null engine: completes every request at once and moves nothing. It shows the cost of everything except the disk.
#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/fork.h"
#include "engine/builtin_engines.h"
#include "engine/engine.h"

namespace fastpersist {
namespace {

class NullEngine final : public IoEngine {
 public:
  NullEngine(std::string name, EngineLimits limits) : name_(std::move(name)), limits_(limits) {
    completed_.reserve(limits.queue_depth);
  }

  std::string_view name() const override { return name_; }
  const EngineLimits& limits() const override { return limits_; }

  QueueResult Queue(const IoRequest& request) override {
    FP_CHECK(ForkGeneration() == generation_);
    CheckRequest(request);
    if (completed_.size() == limits_.queue_depth) return QueueResult::kFull;
    completed_.push_back({.tag = request.tag, .done_bytes = request.size_bytes, .sys_errno = 0});
    return QueueResult::kQueued;
  }

  Status Submit() override {
    FP_CHECK(ForkGeneration() == generation_);
    return Status::Ok();
  }

  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds /*timeout*/) override {
    FP_CHECK(ForkGeneration() == generation_);
    FP_CHECK(min_count <= out.size());
    const size_t count = std::min(out.size(), completed_.size());
    const auto end = completed_.begin() + static_cast<ptrdiff_t>(count);
    std::copy(completed_.begin(), end, out.begin());
    completed_.erase(completed_.begin(), end);
    return count;
  }

  size_t in_flight() const override { return completed_.size(); }

 private:
  const uint64_t generation_ = ForkGeneration();
  const std::string name_;
  const EngineLimits limits_;
  std::vector<IoCompletion> completed_;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> CreateNullEngine(const EngineOptions& options, bool direct) {
  return std::unique_ptr<IoEngine>(
      std::make_unique<NullEngine>(options.name, EngineLimits{.queue_depth = options.queue_depth, .direct = direct}));
}

}  // namespace fastpersist
