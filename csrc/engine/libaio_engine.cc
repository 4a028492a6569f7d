// The libaio engine: Linux native AIO by its four system calls, without the library of that name. The library wraps the
// same calls and saved no time per request in alternating runs of 4 KiB reads (figures: docs/explanation/engines.md).
//
// The kernel runs these requests asynchronously only on descriptors with O_DIRECT. On buffered ones Submit does the
// work itself: correct, but nothing overlaps.
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/fork.h"
#include "core/kernel_file.h"
#include "core/reuse_cache.h"
#include "core/wakeup.h"
#include "engine/builtin_engines.h"
#include "engine/deadline.h"
#include "engine/engine.h"

namespace fastpersist {
namespace {

// System calls that return a value or -errno.
int Answer(long value) { return value < 0 ? -errno : static_cast<int>(value); }
int Setup(uint32_t count, aio_context_t* context) { return Answer(syscall(SYS_io_setup, count, context)); }
int Send(aio_context_t context, size_t count, iocb** requests) {
  return Answer(syscall(SYS_io_submit, context, static_cast<long>(count), requests));
}
int GetEvents(aio_context_t context, size_t min_count, size_t max_count, io_event* events, timespec* timeout) {
  return Answer(
      syscall(SYS_io_getevents, context, static_cast<long>(min_count), static_cast<long>(max_count), events, timeout));
}

// A kernel AIO context. REQUIRES of its destructor: nothing is in flight in it, if that can be found out.
struct AioContext {
  explicit AioContext(uint32_t depth) : queue_depth(depth) {}
  ~AioContext() {
    if (id != 0) syscall(SYS_io_destroy, id);
  }
  AioContext(const AioContext&) = delete;
  AioContext& operator=(const AioContext&) = delete;

  const uint32_t queue_depth;
  aio_context_t id = 0;
};

// Contexts for later engines. io_destroy waits for a grace period of the whole kernel, 35 ms where this was measured:
// as long as a save of 100 MB.
constinit ReuseCache<AioContext, 4> g_contexts;
// Deeper contexts are not reused: they would hold much of fs.aio-max-nr while idle.
constexpr uint32_t kReusedDepthMax = 64;

class LibaioEngine final : public IoEngine {
 public:
  LibaioEngine(std::string name, EngineLimits limits, int wake_fd);
  ~LibaioEngine() override;

  Status Open();

  std::string_view name() const override { return name_; }
  const EngineLimits& limits() const override { return limits_; }
  QueueResult Queue(const IoRequest& request) override;
  Status Submit() override;
  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) override;
  size_t in_flight() const override { return requests_.size() - free_requests_.size(); }

 private:
  // A request that io_submit refused, for its descriptor or alignment for example; not reaped yet.
  struct Refusal {
    iocb* request = nullptr;
    int sys_errno = 0;
  };

  size_t queued_count() const { return queued_.size() - queued_begin_; }
  size_t TakeRefused(std::span<IoCompletion> out);
  Result<size_t> TakeCompletions(std::span<IoCompletion> out, size_t min_count, const Deadline& deadline);

  const uint64_t generation_ = ForkGeneration();
  const std::string name_;
  const EngineLimits limits_;
  const int wake_fd_;
  std::unique_ptr<Wakeup> completed_;  // only with a wake_fd: io_getevents cannot wait for both
  std::unique_ptr<AioContext> context_;

  std::vector<iocb> requests_;  // one for each unreaped request; the kernel keeps the address
  std::vector<iocb*> free_requests_;
  std::vector<iocb*> queued_;  // those before queued_begin_ are in the kernel
  size_t queued_begin_ = 0;
  size_t in_kernel_count_ = 0;
  std::vector<Refusal> refused_;
  std::vector<io_event> events_;  // what io_getevents fills
};

Status SetupError(int sys_errno, const std::string& call, uint32_t queue_depth) {
  const std::string why = " (" + call + ": " + std::generic_category().message(sys_errno) + ")";
  switch (sys_errno) {
    case EAGAIN:
      return Status::Error(StatusCode::kUnsupported,
                           "Linux AIO has no room for " + std::to_string(queue_depth) +
                               " more requests: the sysctl fs.aio-max-nr is " +
                               std::to_string(ReadKernelNumber("/proc/sys/fs/aio-max-nr").value_or(0)) + " and " +
                               std::to_string(ReadKernelNumber("/proc/sys/fs/aio-nr").value_or(0)) +
                               " are taken on this machine; raise it (sysctl -w fs.aio-max-nr=1048576)" + why);
    case ENOSYS:
      return Status::Error(StatusCode::kUnsupported,
                           "Linux AIO is missing: this kernel is built without it, or a sandbox hides it" + why);
    case EPERM:
    case EACCES:
      return Status::Error(StatusCode::kUnsupported,
                           "Linux AIO is not permitted here: a seccomp filter or security module forbids it" + why);
    default:
      return Status::FromErrno(sys_errno, call, "for the libaio engine");
  }
}

LibaioEngine::LibaioEngine(std::string name, EngineLimits limits, int wake_fd)
    : name_(std::move(name)),
      limits_(limits),
      wake_fd_(wake_fd),
      requests_(limits.queue_depth),
      events_(limits.queue_depth) {
  free_requests_.reserve(requests_.size());
  for (size_t i = requests_.size(); i > 0; --i) free_requests_.push_back(&requests_[i - 1]);
  queued_.reserve(requests_.size());
  refused_.reserve(requests_.size());
}

Status LibaioEngine::Open() {
  if (wake_fd_ >= 0) {
    Result<std::unique_ptr<Wakeup>> completed = Wakeup::Create();
    if (!completed.ok()) return completed.status();
    completed_ = std::move(completed).value();
  }
  const uint32_t depth = limits_.queue_depth;
  context_ = g_contexts.Take([depth](const AioContext& context) { return context.queue_depth == depth; });
  if (context_ == nullptr) {
    context_ = std::make_unique<AioContext>(depth);
    const int answer = Setup(depth, &context_->id);
    if (answer < 0) return SetupError(-answer, "io_setup", depth);
  }
  // A sandbox may allow a context, but no requests, or not to learn of their end: then take another engine now.
  const int sent = Send(context_->id, 0, nullptr);
  if (sent < 0) return SetupError(-sent, "io_submit", depth);
  timespec at_once = {};
  const int asked = GetEvents(context_->id, 0, events_.size(), events_.data(), &at_once);
  return asked < 0 && asked != -EINTR ? SetupError(-asked, "io_getevents", depth) : Status::Ok();
}

LibaioEngine::~LibaioEngine() {
  if (ForkGeneration() != generation_) {
    // The context is the parent's: contexts belong to an address space, and fork does not copy them.
    [[maybe_unused]] const AioContext* const left_alone = context_.release();
    return;
  }
  // io_destroy is not enough: some kernels do not wait there for requests that they cannot cancel.
  while (in_kernel_count_ > 0) {
    const int reaped = GetEvents(context_->id, 1, events_.size(), events_.data(), nullptr);
    if (reaped > 0) {
      in_kernel_count_ -= static_cast<size_t>(reaped);
    } else if (reaped == -EPERM || reaped == -EACCES || reaped == -ENOSYS) {
      context_.reset();  // a sandbox that was entered meanwhile refuses this for ever: io_destroy has to wait
      return;
    } else if (reaped != -EINTR) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  if (context_ != nullptr && context_->id != 0 && limits_.queue_depth <= kReusedDepthMax) {
    g_contexts.Put(std::move(context_));
  }
}

QueueResult LibaioEngine::Queue(const IoRequest& request) {
  FP_CHECK(ForkGeneration() == generation_);
  CheckRequest(request);
  if (free_requests_.empty()) return QueueResult::kFull;
  iocb* const kernel_request = free_requests_.back();
  free_requests_.pop_back();
  *kernel_request = {};
  kernel_request->aio_data = request.tag;
  kernel_request->aio_lio_opcode = request.op == IoOp::kRead ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
  kernel_request->aio_fildes = static_cast<uint32_t>(request.fd);
  kernel_request->aio_buf = reinterpret_cast<uint64_t>(request.buffer);
  kernel_request->aio_nbytes = request.size_bytes;
  kernel_request->aio_offset = static_cast<int64_t>(request.offset_bytes);
  if (completed_ != nullptr) {
    kernel_request->aio_flags = IOCB_FLAG_RESFD;
    kernel_request->aio_resfd = static_cast<uint32_t>(completed_->fd());
  }
  if (queued_begin_ > 0) {
    // io_submit needs an array, so close the gap that an earlier Submit left.
    queued_.erase(queued_.begin(), queued_.begin() + static_cast<ptrdiff_t>(queued_begin_));
    queued_begin_ = 0;
  }
  queued_.push_back(kernel_request);
  return QueueResult::kQueued;
}

Status LibaioEngine::Submit() {
  FP_CHECK(ForkGeneration() == generation_);
  while (queued_count() > 0) {
    const int taken = Send(context_->id, queued_count(), queued_.data() + queued_begin_);
    if (taken > 0) {
      queued_begin_ += static_cast<size_t>(taken);
      in_kernel_count_ += static_cast<size_t>(taken);
    } else if (taken == 0 || taken == -EAGAIN) {
      return Status::Ok();  // the kernel takes no more now: the rest stays queued
    } else if (taken != -EINTR) {
      refused_.push_back({.request = queued_[queued_begin_++], .sys_errno = -taken});  // always the first one
    }
  }
  queued_.clear();
  queued_begin_ = 0;
  return Status::Ok();
}

size_t LibaioEngine::TakeRefused(std::span<IoCompletion> out) {
  const size_t count = std::min(out.size(), refused_.size());
  for (size_t i = 0; i < count; ++i) {
    out[i] = {.tag = refused_[i].request->aio_data, .done_bytes = 0, .sys_errno = refused_[i].sys_errno};
    free_requests_.push_back(refused_[i].request);
  }
  refused_.erase(refused_.begin(), refused_.begin() + static_cast<ptrdiff_t>(count));
  return count;
}

// May return fewer than min_count before the deadline: after a signal, or if wake_fd is readable.
Result<size_t> LibaioEngine::TakeCompletions(std::span<IoCompletion> out, size_t min_count, const Deadline& deadline) {
  const size_t max_count = std::min(out.size(), in_kernel_count_);
  if (max_count == 0) return size_t{0};
  timespec remaining = min_count > 0 ? deadline.RemainingTimespec() : timespec{};
  if (completed_ != nullptr && min_count > 0) {
    completed_->Clear();  // before reading, so that a completion that comes later ends the wait
    Result<size_t> there = TakeCompletions(out, 0, deadline);
    if (!there.ok() || there.value() > 0) return there;
    AwaitReadable(completed_->fd(), wake_fd_, remaining);
    return TakeCompletions(out, 0, deadline);
  }
  const int reaped = GetEvents(context_->id, min_count, max_count, events_.data(), &remaining);
  if (reaped == -EINTR) return size_t{0};
  if (reaped < 0) return Status::FromErrno(-reaped, "io_getevents", "of the libaio engine");
  const auto count = static_cast<size_t>(reaped);
  for (size_t i = 0; i < count; ++i) {
    const io_event& event = events_[i];
    out[i] = {.tag = event.data,
              .done_bytes = event.res < 0 ? 0 : static_cast<uint32_t>(event.res),
              .sys_errno = event.res < 0 ? static_cast<int>(-event.res) : 0};
    free_requests_.push_back(reinterpret_cast<iocb*>(event.obj));
  }
  in_kernel_count_ -= count;
  return count;
}

Result<size_t> LibaioEngine::Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) {
  FP_CHECK(min_count <= out.size());
  const Deadline deadline(timeout);
  size_t taken = 0;
  for (bool last_look = false;; last_look = deadline.Passed() || IsReadable(wake_fd_)) {
    FP_RETURN_IF_ERROR(Submit());
    taken += TakeRefused(out.subspan(taken));
    const size_t wanted = std::min(min_count, taken + in_flight());
    size_t wait_count = taken >= wanted || last_look ? 0 : std::min(wanted - taken, in_kernel_count_);
    // One completion is enough to try the requests again that the kernel did not take.
    if (queued_count() > 0) wait_count = std::min<size_t>(wait_count, 1);
    Result<size_t> reaped = TakeCompletions(out.subspan(taken), wait_count, deadline);
    if (!reaped.ok()) {
      if (taken > 0) return taken;  // return these first; the next call meets the error again
      return reaped.status();
    }
    taken += reaped.value();
    if (taken >= wanted || last_look) return taken;
    if (in_kernel_count_ == 0 && queued_count() > 0) {
      std::this_thread::sleep_for(
          std::min<std::chrono::nanoseconds>(deadline.Remaining(), std::chrono::milliseconds(1)));
    }
  }
}

}  // namespace

Result<std::unique_ptr<IoEngine>> CreateLibaioEngine(const EngineOptions& options, bool direct) {
  auto engine = std::make_unique<LibaioEngine>(
      options.name, EngineLimits{.queue_depth = options.queue_depth, .direct = direct}, options.wake_fd);
  FP_RETURN_IF_ERROR(engine->Open());
  return std::unique_ptr<IoEngine>(std::move(engine));
}

}  // namespace fastpersist
