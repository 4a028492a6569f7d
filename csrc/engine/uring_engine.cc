// The uring engine: io_uring by its three system calls and two shared mappings, without a library.
//
// Owner threads may change (engine.h), so it does not use SINGLE_ISSUER and DEFER_TASKRUN, which tie a ring to one
// thread.
//
// The completion ring cannot overflow: at most queue_depth requests are unreaped and it has twice as many entries.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/fork.h"
#include "core/kernel_file.h"
#include "core/wakeup.h"
#include "engine/builtin_engines.h"
#include "engine/deadline.h"
#include "engine/engine.h"
#include "engine/uring_abi.h"

namespace fastpersist {
namespace {

// Accesses to words that the kernel reads or writes concurrently.
uint32_t LoadAcquire(uint32_t* word) { return std::atomic_ref<uint32_t>(*word).load(std::memory_order_acquire); }
void StoreRelease(uint32_t* word, uint32_t value) {
  std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release);
}

// System calls that return a value or -errno.
int Setup(uint32_t entries, uring_abi::Params* params) {
  const long answer = syscall(uring_abi::kSysSetup, entries, params);
  return answer < 0 ? -errno : static_cast<int>(answer);
}
int Enter(int fd, uint32_t submit_count, uint32_t wait_count, uint32_t flags, const void* argument, size_t size_bytes) {
  const long answer = syscall(uring_abi::kSysEnter, fd, submit_count, wait_count, flags, argument, size_bytes);
  return answer < 0 ? -errno : static_cast<int>(answer);
}

// A part of the ring, shared with the kernel. A forked child does not have it (MADV_DONTFORK).
class SharedMapping {
 public:
  SharedMapping() = default;
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;
  ~SharedMapping() {
    if (address_ != nullptr) munmap(address_, size_bytes_);
  }

  // Returns 0 or an errno.
  int Map(int fd, long offset_bytes, size_t size_bytes) {
    void* address = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset_bytes);
    if (address == MAP_FAILED) return errno;
    address_ = address;
    size_bytes_ = size_bytes;
    return madvise(address, size_bytes, MADV_DONTFORK) == 0 ? 0 : errno;
  }
  template <class T>
  T* At(uint32_t offset_bytes) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(address_) + offset_bytes);
  }

 private:
  void* address_ = nullptr;
  size_t size_bytes_ = 0;
};

struct Ring {
  SharedMapping rings;
  SharedMapping sqe_array;
};

class UringEngine final : public IoEngine {
 public:
  UringEngine(std::string name, EngineLimits limits, int wake_fd)
      : name_(std::move(name)), limits_(limits), wake_fd_(wake_fd) {}
  ~UringEngine() override;

  Status Open(UringAbi abi, std::span<std::byte> memory);

  std::string_view name() const override { return name_; }
  const EngineLimits& limits() const override { return limits_; }
  QueueResult Queue(const IoRequest& request) override;
  Status Submit() override;
  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) override;
  size_t in_flight() const override { return slots_.size() - free_slots_.size(); }

 private:
  // One for each unreaped request; the completion carries its index.
  struct Slot {
    uint64_t tag = 0;
    iovec vector = {};  // for readv and writev; Linux 5.4 reads it as late as when the request runs
  };

  bool HasPlainReadWrite() const;
  bool Register(std::span<std::byte> memory) const;
  uint32_t queued_count() const { return sq_tail_ - LoadAcquire(shared_sq_head_); }
  size_t TakeCompletions(std::span<IoCompletion> out);
  Status Wait(size_t count, const Deadline& deadline);

  const uint64_t generation_ = ForkGeneration();
  const std::string name_;
  const EngineLimits limits_;
  const int wake_fd_;

  int fd_ = -1;
  // On the heap so that a forked child can leave it alone: other objects may have these addresses there.
  std::unique_ptr<Ring> ring_ = std::make_unique<Ring>();
  bool plain_read_write_ = false;
  bool registered_memory_ = false;
  bool timeout_argument_ = false;

  uint32_t* shared_sq_head_ = nullptr;
  uint32_t* shared_sq_tail_ = nullptr;
  uint32_t* shared_sq_flags_ = nullptr;
  uring_abi::Sqe* sqes_ = nullptr;
  uint32_t sq_mask_ = 0;
  uint32_t sq_tail_ = 0;  // the engine's; Submit shows it to the kernel

  uint32_t* shared_cq_head_ = nullptr;
  uint32_t* shared_cq_tail_ = nullptr;
  uring_abi::Cqe* cqes_ = nullptr;
  uint32_t cq_mask_ = 0;

  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
};

Status SetupError(int sys_errno, const std::string& call) {
  const std::string why = " (" + call + ": " + std::generic_category().message(sys_errno) + ")";
  switch (sys_errno) {
    case ENOSYS:
      return Status::Error(
          StatusCode::kUnsupported,
          "io_uring is missing: this kernel is older than Linux 5.1, built without it, or a sandbox hides it" + why);
    case EPERM:
    case EACCES: {
      const int64_t disabled = ReadKernelNumber("/proc/sys/kernel/io_uring_disabled").value_or(0);
      const std::string cause = disabled != 0
                                    ? "the sysctl kernel.io_uring_disabled is " + std::to_string(disabled)
                                    : "a seccomp filter or security module of this container or service forbids it";
      return Status::Error(StatusCode::kUnsupported, "io_uring is not permitted here: " + cause + why);
    }
    case ENOMEM: {
      rlimit limit = {};
      getrlimit(RLIMIT_MEMLOCK, &limit);
      const std::string now =
          limit.rlim_cur == RLIM_INFINITY ? "no limit" : std::to_string(limit.rlim_cur / 1024) + " KiB";
      return Status::Error(StatusCode::kNoMemory,
                           "no memory for the io_uring: many kernels count it against RLIMIT_MEMLOCK, which is " + now +
                               "; raise it (ulimit -l) or use a smaller queue depth" + why);
    }
    default:
      return Status::FromErrno(sys_errno, call, "for the uring engine");
  }
}

Status UringEngine::Open(UringAbi abi, std::span<std::byte> memory) {
  uring_abi::Params params = {};
  int opened = -EINVAL;
  if (abi == UringAbi::kNewest) {
    // Completions wait for the next kernel entry and do not interrupt the submitting thread.
    params.flags = uring_abi::kSetupCoopTaskrun | uring_abi::kSetupTaskrunFlag;
    opened = Setup(limits_.queue_depth, &params);
  }
  if (opened == -EINVAL) {
    params = {};
    opened = Setup(limits_.queue_depth, &params);
  }
  if (opened < 0) return SetupError(-opened, "io_uring_setup");
  fd_ = opened;  // the kernel made it O_CLOEXEC
  CloseInForkedChild(fd_);
  // A sandbox may allow the setup only; then another engine must be taken now, since no request would be sent.
  if (const int entered = Enter(fd_, 0, 0, 0, nullptr, 0); entered < 0) return SetupError(-entered, "io_uring_enter");

  if ((params.features & uring_abi::kFeatureSingleMmap) == 0) {
    return Status::Error(StatusCode::kUnsupported, "io_uring of this kernel is too old: Linux 5.4 or newer is needed");
  }
  FP_CHECK(params.sq_entries >= limits_.queue_depth && params.cq_entries >= params.sq_entries);
  const size_t rings_bytes = std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                                      params.cq_off.cqes + params.cq_entries * sizeof(uring_abi::Cqe));
  const size_t sqes_bytes = params.sq_entries * sizeof(uring_abi::Sqe);
  int refused = ring_->rings.Map(fd_, uring_abi::kOffsetRings, rings_bytes);
  if (refused == 0) refused = ring_->sqe_array.Map(fd_, uring_abi::kOffsetSqes, sqes_bytes);
  if (refused != 0) return Status::FromErrno(refused, "mmap of the ring", "for the uring engine");

  const SharedMapping& rings = ring_->rings;
  shared_sq_head_ = rings.At<uint32_t>(params.sq_off.head);
  shared_sq_tail_ = rings.At<uint32_t>(params.sq_off.tail);
  shared_sq_flags_ = rings.At<uint32_t>(params.sq_off.flags);
  sq_mask_ = *rings.At<uint32_t>(params.sq_off.ring_mask);
  sqes_ = ring_->sqe_array.At<uring_abi::Sqe>(0);
  shared_cq_head_ = rings.At<uint32_t>(params.cq_off.head);
  shared_cq_tail_ = rings.At<uint32_t>(params.cq_off.tail);
  cq_mask_ = *rings.At<uint32_t>(params.cq_off.ring_mask);
  cqes_ = rings.At<uring_abi::Cqe>(params.cq_off.cqes);
  // Entries are used in ring order, so the index array of the submission ring is set once.
  uint32_t* const index_of = rings.At<uint32_t>(params.sq_off.array);
  for (uint32_t entry = 0; entry < params.sq_entries; ++entry) index_of[entry] = entry;

  plain_read_write_ = abi == UringAbi::kNewest && HasPlainReadWrite();
  registered_memory_ = plain_read_write_ && !memory.empty() && Register(memory);
  timeout_argument_ = abi == UringAbi::kNewest && (params.features & uring_abi::kFeatureExtArg) != 0;

  slots_.resize(limits_.queue_depth);
  free_slots_.reserve(limits_.queue_depth);
  for (uint32_t slot = limits_.queue_depth; slot > 0; --slot) free_slots_.push_back(slot - 1);
  return Status::Ok();
}

bool UringEngine::HasPlainReadWrite() const {
  uring_abi::Probe probe = {};
  if (syscall(uring_abi::kSysRegister, fd_, uring_abi::kRegisterProbe, &probe, std::size(probe.ops)) < 0) return false;
  const auto supported = [&probe](uint8_t op) { return (probe.ops[op].flags & uring_abi::kOpSupported) != 0; };
  return probe.last_op >= uring_abi::kOpWrite && supported(uring_abi::kOpRead) && supported(uring_abi::kOpWrite);
}

// Returns false where the memory is more than RLIMIT_MEMLOCK leaves, or is of a kind that cannot be pinned.
bool UringEngine::Register(std::span<std::byte> memory) const {
  const iovec vector = {.iov_base = memory.data(), .iov_len = memory.size()};
  return syscall(uring_abi::kSysRegister, fd_, uring_abi::kRegisterBuffers, &vector, 1) == 0;
}

UringEngine::~UringEngine() {
  if (ForkGeneration() != generation_) {
    [[maybe_unused]] const Ring* const left_alone = ring_.release();  // core/fork.h has closed our copy of fd_
    return;
  }
  if (fd_ < 0) return;
  // Closing the ring does not wait for its requests, and a child of a bare clone() may keep it open.
  std::vector<IoCompletion> dropped(limits_.queue_depth);
  while (sqes_ != nullptr && in_flight() > queued_count()) {
    if (TakeCompletions(dropped) > 0) continue;
    const int waited = Enter(fd_, 0, 1, uring_abi::kEnterGetEvents, nullptr, 0);
    if (waited < 0 && waited != -EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ForgetDescriptor(fd_);
  close(fd_);
}

QueueResult UringEngine::Queue(const IoRequest& request) {
  FP_CHECK(ForkGeneration() == generation_);
  CheckRequest(request);
  if (free_slots_.empty()) return QueueResult::kFull;
  const uint32_t index = free_slots_.back();
  free_slots_.pop_back();
  Slot& slot = slots_[index];
  slot.tag = request.tag;

  const bool read = request.op == IoOp::kRead;
  uring_abi::Sqe sqe = {};
  sqe.fd = request.fd;
  sqe.off = request.offset_bytes;
  sqe.user_data = index;
  if (plain_read_write_) {
    sqe.opcode = registered_memory_ ? (read ? uring_abi::kOpReadFixed : uring_abi::kOpWriteFixed)
                                    : (read ? uring_abi::kOpRead : uring_abi::kOpWrite);
    sqe.addr = reinterpret_cast<uint64_t>(request.buffer);
    sqe.len = request.size_bytes;
  } else {
    slot.vector = {.iov_base = request.buffer, .iov_len = request.size_bytes};
    sqe.opcode = read ? uring_abi::kOpReadv : uring_abi::kOpWritev;
    sqe.addr = reinterpret_cast<uint64_t>(&slot.vector);
    sqe.len = 1;
  }
  // The entry is free: the submission ring has at least as many entries as there are slots.
  sqes_[sq_tail_ & sq_mask_] = sqe;
  ++sq_tail_;
  return QueueResult::kQueued;
}

Status UringEngine::Submit() {
  FP_CHECK(ForkGeneration() == generation_);
  StoreRelease(shared_sq_tail_, sq_tail_);
  // One call stops behind a request that it refuses (which completes with its errno), so repeat until all are taken.
  while (const uint32_t queued = queued_count()) {
    const int taken = Enter(fd_, queued, 0, 0, nullptr, 0);
    if (taken > 0 || taken == -EINTR) continue;
    if (taken == 0 || taken == -EAGAIN || taken == -EBUSY)
      break;  // the kernel takes no more now: the rest stays in the ring
    return Status::FromErrno(-taken, "io_uring_enter", "of the uring engine");
  }
  return Status::Ok();
}

size_t UringEngine::TakeCompletions(std::span<IoCompletion> out) {
  uint32_t head = *shared_cq_head_;  // only this thread writes it
  const uint32_t tail = LoadAcquire(shared_cq_tail_);
  size_t count = 0;
  for (; head != tail && count < out.size(); ++head, ++count) {
    const uring_abi::Cqe& cqe = cqes_[head & cq_mask_];
    FP_CHECK(cqe.user_data < slots_.size());
    const auto slot = static_cast<uint32_t>(cqe.user_data);
    out[count] = {.tag = slots_[slot].tag,
                  .done_bytes = cqe.res < 0 ? 0 : static_cast<uint32_t>(cqe.res),
                  .sys_errno = cqe.res < 0 ? -cqe.res : 0};
    free_slots_.push_back(slot);
  }
  if (count > 0) StoreRelease(shared_cq_head_, head);
  return count;
}

// Sleep until `count` completions are in the ring, the deadline has passed, a signal comes, or wake_fd is readable.
Status UringEngine::Wait(size_t count, const Deadline& deadline) {
  int waited = 0;
  if (timeout_argument_ && wake_fd_ < 0) {
    const timespec remaining = deadline.RemainingTimespec();
    const uring_abi::KernelTimespec timeout = {.tv_sec = remaining.tv_sec, .tv_nsec = remaining.tv_nsec};
    const uring_abi::GetEventsArg argument = {
        .sigmask = 0, .sigmask_size = 0, .pad = 0, .timeout = reinterpret_cast<uint64_t>(&timeout)};
    waited = Enter(fd_, 0, static_cast<uint32_t>(count), uring_abi::kEnterGetEvents | uring_abi::kEnterExtArg,
                   &argument, sizeof(argument));
  } else {
    // The ring's descriptor is readable while the ring holds a completion.
    AwaitReadable(fd_, wake_fd_, deadline.RemainingTimespec());
  }
  if (waited >= 0 || waited == -ETIME || waited == -EINTR || waited == -EAGAIN || waited == -EBUSY) return Status::Ok();
  return Status::FromErrno(-waited, "io_uring_enter", "of the uring engine");
}

Result<size_t> UringEngine::Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) {
  FP_CHECK(min_count <= out.size());
  const Deadline deadline(timeout);
  size_t taken = 0;
  for (bool last_look = false;; last_look = deadline.Passed() || IsReadable(wake_fd_)) {
    Status healthy = Submit();
    if (healthy.ok() && (LoadAcquire(shared_sq_flags_) & (uring_abi::kSqTaskrun | uring_abi::kSqCqOverflow)) != 0) {
      // The kernel holds completions and puts them into the ring only when it is entered.
      Enter(fd_, 0, 0, uring_abi::kEnterGetEvents, nullptr, 0);
    }
    taken += TakeCompletions(out.subspan(taken));
    const size_t wanted = std::min(min_count, taken + in_flight());
    if (taken >= wanted || last_look) return taken;

    const uint32_t queued = queued_count();
    const size_t in_kernel = in_flight() - queued;
    if (healthy.ok() && in_kernel > 0) {
      // One completion is enough to try the requests again that the kernel did not take.
      healthy = Wait(queued > 0 ? 1 : wanted - taken, deadline);
    } else if (healthy.ok()) {
      std::this_thread::sleep_for(
          std::min<std::chrono::nanoseconds>(deadline.Remaining(), std::chrono::milliseconds(1)));
    }
    if (!healthy.ok()) {
      if (taken > 0) return taken;  // return these first; the next call meets the error again
      return healthy;
    }
  }
}

}  // namespace

Result<std::unique_ptr<IoEngine>> CreateUringEngine(const EngineOptions& options, bool direct, UringAbi abi) {
  auto engine = std::make_unique<UringEngine>(
      options.name, EngineLimits{.queue_depth = options.queue_depth, .direct = direct}, options.wake_fd);
  FP_RETURN_IF_ERROR(engine->Open(abi, options.memory));
  return std::unique_ptr<IoEngine>(std::move(engine));
}

}  // namespace fastpersist
