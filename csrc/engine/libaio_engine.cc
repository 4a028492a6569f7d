// The libaio engine: Linux native AIO. Its four calls come from the libaio library where that can be loaded (its
// io_getevents looks into the completion ring without entering the kernel), else straight from the kernel: no -dev
// package and no library is ever required.
//
// The kernel runs these requests asynchronously only on descriptors with O_DIRECT. On buffered ones Submit does the
// work itself: correct, but nothing overlaps.
#include <dlfcn.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/fork.h"
#include "core/wakeup.h"
#include "engine/builtin_engines.h"
#include "engine/deadline.h"
#include "engine/engine.h"

namespace fastpersist {
namespace {

static_assert(sizeof(aio_context_t) == sizeof(void*), "libaio passes the context as a pointer");

// Each answers a value or -errno, as libaio does.
struct AioTable {
  int (*io_setup)(int, aio_context_t*);
  int (*io_destroy)(aio_context_t);
  int (*io_submit)(aio_context_t, long, iocb**);
  int (*io_getevents)(aio_context_t, long, long, io_event*, timespec*);
};

int Answer(long value) { return value < 0 ? -errno : static_cast<int>(value); }

constexpr AioTable kSystemCalls = {
    .io_setup = [](int count, aio_context_t* context) { return Answer(syscall(SYS_io_setup, count, context)); },
    .io_destroy = [](aio_context_t context) { return Answer(syscall(SYS_io_destroy, context)); },
    .io_submit = [](aio_context_t context, long count,
                    iocb** requests) { return Answer(syscall(SYS_io_submit, context, count, requests)); },
    .io_getevents =
        [](aio_context_t context, long min_count, long max_count, io_event* events, timespec* timeout) {
          return Answer(syscall(SYS_io_getevents, context, min_count, max_count, events, timeout));
        },
};

template <class Function>
bool Find(void* library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, symbol));
  return function != nullptr;
}

AioTable LoadLibrary() {
  // The name with t64 is that of Debian 13, Ubuntu 24.04 and later. A library once loaded stays.
  for (const char* soname : {"libaio.so.1", "libaio.so.1t64"}) {
    void* library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    AioTable table = {};
    if (library != nullptr && Find(library, "io_setup", table.io_setup) &&
        Find(library, "io_destroy", table.io_destroy) && Find(library, "io_submit", table.io_submit) &&
        Find(library, "io_getevents", table.io_getevents)) {
      return table;
    }
  }
  return kSystemCalls;
}

const AioTable& TableOf(AioCalls calls) {
  if (calls == AioCalls::kSystem) return kSystemCalls;
  static const AioTable library = LoadLibrary();
  return library;
}

// Contexts that wait for their next engine. io_destroy waits for a grace period of the whole kernel, 35 ms where this
// was measured: as long as a save of 100 MB. Lock-free, so that a fork at any moment leaves it usable.
class SpareContexts {
 public:
  // Deeper ones would hold much of fs.aio-max-nr for nothing.
  static constexpr uint32_t kQueueDepthMax = 64;

  // 0: there is none of that depth.
  aio_context_t Take(uint32_t queue_depth) {
    for (std::atomic<const Spare*>& slot : slots_) {
      const std::unique_ptr<const Spare> spare(slot.exchange(nullptr));
      if (spare == nullptr || spare->generation != ForkGeneration()) continue;  // a parent's did not come along
      if (spare->queue_depth == queue_depth) return spare->context;
      if (!Keep(spare->context, spare->queue_depth)) kSystemCalls.io_destroy(spare->context);
    }
    return 0;
  }

  // False: no room, destroy it. REQUIRES: nothing is in flight in it.
  bool Keep(aio_context_t context, uint32_t queue_depth) {
    if (queue_depth > kQueueDepthMax) return false;
    auto spare = std::make_unique<const Spare>(Spare{context, queue_depth, ForkGeneration()});
    for (std::atomic<const Spare*>& slot : slots_) {
      const Spare* empty = nullptr;
      if (!slot.compare_exchange_strong(empty, spare.get())) continue;
      spare.release();  // NOLINT(bugprone-unused-return-value): the slot owns it now
      return true;
    }
    return false;
  }

 private:
  struct Spare {
    aio_context_t context;
    uint32_t queue_depth;
    uint64_t generation;
  };
  std::array<std::atomic<const Spare*>, 4> slots_{};
};

SpareContexts& TheSpareContexts() {
  static auto* const spares = new SpareContexts;  // never destroyed: engines may run while the process exits
  return *spares;
}

class LibaioEngine final : public IoEngine {
 public:
  LibaioEngine(std::string name, EngineLimits limits, const AioTable& aio, int wake_fd);
  ~LibaioEngine() override;

  Status Open();

  std::string_view name() const override { return name_; }
  const EngineLimits& limits() const override { return limits_; }
  QueueResult Queue(const IoRequest& request) override;
  Status Submit() override;
  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) override;
  size_t in_flight() const override { return requests_.size() - free_requests_.size(); }

 private:
  // A request that io_submit did not take, for its descriptor or alignment say; not yet reaped.
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
  const AioTable& aio_;
  const int wake_fd_;
  std::unique_ptr<Wakeup> completed_;  // only with a wake_fd: io_getevents cannot wait for both
  aio_context_t context_ = 0;

  std::vector<iocb> requests_;  // one per request that is not reaped; the kernel keeps the address
  std::vector<iocb*> free_requests_;
  std::vector<iocb*> queued_;  // those before queued_begin_ are in the kernel already
  size_t queued_begin_ = 0;
  size_t in_kernel_count_ = 0;
  std::vector<Refusal> refused_;
  std::vector<io_event> events_;  // room for io_getevents
};

uint64_t ReadNumber(const char* path) {
  uint64_t number = 0;
  std::ifstream(path) >> number;
  return number;
}

Status SetupError(int sys_errno, uint32_t queue_depth) {
  const std::string why = " (io_setup: " + std::generic_category().message(sys_errno) + ")";
  switch (sys_errno) {
    case EAGAIN:
      return Status::Error(StatusCode::kUnsupported,
                           "Linux AIO has no room for " + std::to_string(queue_depth) +
                               " more requests: the sysctl fs.aio-max-nr is " +
                               std::to_string(ReadNumber("/proc/sys/fs/aio-max-nr")) + " and " +
                               std::to_string(ReadNumber("/proc/sys/fs/aio-nr")) +
                               " are taken on this machine; raise it (sysctl -w fs.aio-max-nr=1048576)" + why);
    case ENOSYS:
      return Status::Error(StatusCode::kUnsupported,
                           "Linux AIO is not there: this kernel is built without it, or a sandbox hides it" + why);
    case EPERM:
    case EACCES:
      return Status::Error(StatusCode::kUnsupported,
                           "Linux AIO is not permitted here: a seccomp filter or security module forbids it" + why);
    default:
      return Status::FromErrno(sys_errno, "io_setup", "for the libaio engine");
  }
}

LibaioEngine::LibaioEngine(std::string name, EngineLimits limits, const AioTable& aio, int wake_fd)
    : name_(std::move(name)),
      limits_(limits),
      aio_(aio),
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
  context_ = TheSpareContexts().Take(limits_.queue_depth);
  if (context_ != 0) return Status::Ok();
  const int answer = aio_.io_setup(static_cast<int>(limits_.queue_depth), &context_);
  return answer == 0 ? Status::Ok() : SetupError(-answer, limits_.queue_depth);
}

LibaioEngine::~LibaioEngine() {
  // In a forked child the context is the parent's: contexts belong to an address space and were not copied.
  if (ForkGeneration() != generation_ || context_ == 0) return;
  // io_destroy alone is not enough: not every kernel waits in it for requests that cannot be cancelled.
  while (in_kernel_count_ > 0) {
    const int reaped = aio_.io_getevents(context_, 1, static_cast<long>(events_.size()), events_.data(), nullptr);
    if (reaped > 0) {
      in_kernel_count_ -= static_cast<size_t>(reaped);
    } else if (reaped != -EINTR) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  if (!TheSpareContexts().Keep(context_, limits_.queue_depth)) aio_.io_destroy(context_);
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
    // io_submit wants an array, so close the gap that an earlier Submit left.
    queued_.erase(queued_.begin(), queued_.begin() + static_cast<ptrdiff_t>(queued_begin_));
    queued_begin_ = 0;
  }
  queued_.push_back(kernel_request);
  return QueueResult::kQueued;
}

Status LibaioEngine::Submit() {
  FP_CHECK(ForkGeneration() == generation_);
  while (queued_count() > 0) {
    const int taken = aio_.io_submit(context_, static_cast<long>(queued_count()), queued_.data() + queued_begin_);
    if (taken > 0) {
      queued_begin_ += static_cast<size_t>(taken);
      in_kernel_count_ += static_cast<size_t>(taken);
    } else if (taken == 0 || taken == -EAGAIN) {
      return Status::Ok();  // no room now: they stay queued
    } else if (taken != -EINTR) {
      refused_.push_back({.request = queued_[queued_begin_++], .sys_errno = -taken});  // it is always the first one
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

// May answer fewer than min_count before the deadline: a signal came, or the owner is wanted.
Result<size_t> LibaioEngine::TakeCompletions(std::span<IoCompletion> out, size_t min_count, const Deadline& deadline) {
  const size_t max_count = std::min(out.size(), in_kernel_count_);
  if (max_count == 0) return size_t{0};
  timespec remaining = min_count > 0 ? deadline.RemainingTimespec() : timespec{};
  if (completed_ != nullptr && min_count > 0) {
    completed_->Clear();  // then look, then wait: so that none slips through
    Result<size_t> there = TakeCompletions(out, 0, deadline);
    if (!there.ok() || there.value() > 0) return there;
    AwaitReadable(completed_->fd(), wake_fd_, remaining);
    return TakeCompletions(out, 0, deadline);
  }
  const int reaped = aio_.io_getevents(context_, static_cast<long>(min_count), static_cast<long>(max_count),
                                       events_.data(), &remaining);
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
    // With requests that found no room, one completion makes some: go and try them.
    if (queued_count() > 0) wait_count = std::min<size_t>(wait_count, 1);
    Result<size_t> reaped = TakeCompletions(out.subspan(taken), wait_count, deadline);
    if (!reaped.ok()) {
      if (taken > 0) return taken;  // these are not lost; the next call meets the error again
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

Result<std::unique_ptr<IoEngine>> CreateLibaioEngine(const EngineOptions& options, bool direct, AioCalls calls) {
  auto engine =
      std::make_unique<LibaioEngine>(options.name, EngineLimits{.queue_depth = options.queue_depth, .direct = direct},
                                     TableOf(calls), options.wake_fd);
  FP_RETURN_IF_ERROR(engine->Open());
  return std::unique_ptr<IoEngine>(std::move(engine));
}

}  // namespace fastpersist
