// The cufile engine: it moves bytes between files and the memory of a device by GPUDirect Storage (device/cufile.h).
// Worker threads each make one call after the other. Requests' buffers are addresses inside a DeviceStaging, or host
// memory. Which way the bytes took is CuFile::Traffic's to say: libcufile goes through host memory, without a word,
// where it cannot do better.
#include <cerrno>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/cufile.h"
#include "engine/builtin_engines.h"
#include "engine/engine.h"
#include "engine/worker_engine.h"

namespace fastpersist {
namespace {

using SharedDescriptor = std::shared_ptr<const CuFileDescriptor>;

// What one engine has used: registered at the first request, until the engine's end. Never more than a few: transfers
// have one file. Thread-safe.
class Descriptors {
 public:
  explicit Descriptors(CuFile& cufile) : cufile_(cufile) {}

  Result<SharedDescriptor> Of(int fd);

 private:
  CuFile& cufile_;
  std::mutex mutex_;
  std::vector<SharedDescriptor> known_;
};

// A descriptor that the engine has seen is meant to stay open until the engine's end; one that was closed all the same
// is not mistaken for the file that has its number now.
Result<SharedDescriptor> Descriptors::Of(int fd) {
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [&](const auto& known) { return known->fd() == fd && !known->IsStillOpen(); });
  for (const SharedDescriptor& known : known_) {
    if (known->fd() == fd) return known;
  }
  Result<CuFileDescriptor> fresh = CuFileDescriptor::Open(cufile_, fd);
  if (!fresh.ok()) return fresh.status();
  known_.push_back(std::make_shared<const CuFileDescriptor>(std::move(fresh).value()));
  return known_.back();
}

// Of a file that libcufile does not take.
CuFileOutcome Refused(const Status& status) {
  if (status.sys_errno() != 0) return {.sys_errno = status.sys_errno(), .error = {}};
  return {.sys_errno = status.code() == StatusCode::kUnsupported ? EOPNOTSUPP : EIO, .error = status.message()};
}

IoCompletion AsCompletion(uint64_t tag, const CuFileOutcome& outcome) {
  if (outcome.sys_errno != 0) return {.tag = tag, .done_bytes = 0, .sys_errno = outcome.sys_errno};
  return {.tag = tag, .done_bytes = static_cast<uint32_t>(outcome.done_bytes), .sys_errno = 0};
}

class CuFileIo final : public BlockingIo {
 public:
  explicit CuFileIo(CuFile& cufile) : descriptors_(cufile) {}

  IoCompletion Perform(const IoRequest& request) override;

  std::string last_failure() const override {
    const std::lock_guard lock(mutex_);
    return last_failure_;
  }

 private:
  Descriptors descriptors_;
  mutable std::mutex mutex_;
  std::string last_failure_;
};

IoCompletion CuFileIo::Perform(const IoRequest& request) {
  Result<SharedDescriptor> descriptor = descriptors_.Of(request.fd);
  CuFileOutcome outcome;
  if (!descriptor.ok()) {
    outcome = Refused(descriptor.status());
  } else if (request.op == IoOp::kRead) {
    outcome = descriptor.value()->Read(request.buffer, request.size_bytes, request.offset_bytes);
  } else {
    outcome = descriptor.value()->Write(request.buffer, request.size_bytes, request.offset_bytes);
  }
  if (!outcome.error.empty()) {
    const std::lock_guard lock(mutex_);
    last_failure_ = outcome.error;
  }
  return AsCompletion(request.tag, outcome);
}

}  // namespace

Result<std::unique_ptr<IoEngine>> CreateCuFileEngine(const EngineOptions& options, bool direct) {
  Result<CuFile*> cufile = CuFile::Get();
  if (!cufile.ok()) return cufile.status();
  CuFileDescriptor::DropClosed();  // of transfers before
  const EngineLimits limits = {.queue_depth = options.queue_depth, .direct = direct};
  return CreateWorkerEngine(options.name, limits, options.thread_count, std::make_unique<CuFileIo>(*cufile.value()));
}

}  // namespace fastpersist
