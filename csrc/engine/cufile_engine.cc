// The cufile engine: moves bytes between files and a device's memory by GPUDirect Storage (device/cufile.h). Each
// worker thread makes one call at a time. Buffers are addresses inside a DeviceStaging, or host memory. CuFile::Traffic
// reports the data path: libcufile silently goes through host memory if it cannot do better.
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

// The descriptors of one engine, registered at the first request until the engine's end. Only a few: a transfer has one
// file. Thread-safe.
class Descriptors {
 public:
  explicit Descriptors(CuFile& cufile) : cufile_(cufile) {}

  Result<SharedDescriptor> Of(int fd);

 private:
  CuFile& cufile_;
  std::mutex mutex_;
  std::vector<SharedDescriptor> known_;
};

// The registration of a descriptor. It should stay open until the engine's end; if it was closed, the engine does not
// take another file with that number for it.
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

// The outcome for a file that libcufile refuses.
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
  CuFileDescriptor::DropClosed();  // of earlier transfers
  const EngineLimits limits = {.queue_depth = options.queue_depth, .direct = direct};
  return CreateWorkerEngine(options.name, limits, options.thread_count, std::make_unique<CuFileIo>(*cufile.value()));
}

}  // namespace fastpersist
