// The cufile engine: worker threads that move bytes between files and the memory of a device by GPUDirect Storage
// (device/cufile.h). Requests' buffers are addresses inside a DeviceStaging, or host memory. Which way the bytes took
// is CuFile::Traffic's to say: libcufile goes through host memory, without a word, where it cannot do better.
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

class CuFileIo final : public BlockingIo {
 public:
  explicit CuFileIo(CuFile& cufile) : cufile_(cufile) {}

  IoCompletion Perform(const IoRequest& request) override;

  std::string last_failure() const override {
    const std::lock_guard lock(mutex_);
    return last_failure_;
  }

 private:
  Result<std::shared_ptr<const CuFileDescriptor>> DescriptorOf(int fd);
  IoCompletion Fail(const IoRequest& request, int sys_errno, std::string why);

  CuFile& cufile_;
  mutable std::mutex mutex_;
  // Registered at the first request, until the engine's end. Never more than a few: transfers have one file.
  std::vector<std::shared_ptr<const CuFileDescriptor>> descriptors_;
  std::string last_failure_;
};

// A descriptor that the engine has seen is meant to stay open until the engine's end; one that was closed all the same
// is not mistaken for the file that has its number now.
Result<std::shared_ptr<const CuFileDescriptor>> CuFileIo::DescriptorOf(int fd) {
  const std::lock_guard lock(mutex_);
  std::erase_if(descriptors_, [&](const auto& known) { return known->fd() == fd && !known->IsStillOpen(); });
  for (const auto& known : descriptors_) {
    if (known->fd() == fd) return known;
  }
  Result<CuFileDescriptor> fresh = CuFileDescriptor::Open(cufile_, fd);
  if (!fresh.ok()) return fresh.status();
  descriptors_.push_back(std::make_shared<const CuFileDescriptor>(std::move(fresh).value()));
  return descriptors_.back();
}

IoCompletion CuFileIo::Fail(const IoRequest& request, int sys_errno, std::string why) {
  if (!why.empty()) {
    const std::lock_guard lock(mutex_);
    last_failure_ = std::move(why);
  }
  return {.tag = request.tag, .done_bytes = 0, .sys_errno = sys_errno};
}

IoCompletion CuFileIo::Perform(const IoRequest& request) {
  Result<std::shared_ptr<const CuFileDescriptor>> descriptor = DescriptorOf(request.fd);
  if (!descriptor.ok()) {
    const Status& status = descriptor.status();
    if (status.sys_errno() != 0) return Fail(request, status.sys_errno(), {});
    return Fail(request, status.code() == StatusCode::kUnsupported ? EOPNOTSUPP : EIO, status.message());
  }
  CuFileOutcome outcome = request.op == IoOp::kRead
                              ? descriptor.value()->Read(request.buffer, request.size_bytes, request.offset_bytes)
                              : descriptor.value()->Write(request.buffer, request.size_bytes, request.offset_bytes);
  if (outcome.sys_errno != 0) return Fail(request, outcome.sys_errno, std::move(outcome.error));
  return {.tag = request.tag, .done_bytes = static_cast<uint32_t>(outcome.done_bytes), .sys_errno = 0};
}

}  // namespace

Result<std::unique_ptr<IoEngine>> CreateCuFileEngine(const EngineOptions& options, bool direct) {
  Result<CuFile*> cufile = CuFile::Get();
  if (!cufile.ok()) return cufile.status();
  CuFileDescriptor::DropClosed();  // of transfers before
  return CreateWorkerEngine(options.name, {.queue_depth = options.queue_depth, .direct = direct}, options.thread_count,
                            std::make_unique<CuFileIo>(*cufile.value()));
}

}  // namespace fastpersist
