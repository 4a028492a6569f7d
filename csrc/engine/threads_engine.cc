// The threads engine: workers that call pread and pwrite. It works with every file, so it is the last rung of the
// ladder; docs/explanation/engines.md explains it. Into tmpfs it writes by tmpfs_writes if that pays.
#include <unistd.h>

#include <cerrno>
#include <optional>

#include "engine/builtin_engines.h"
#include "engine/engine.h"
#include "engine/tmpfs_writes.h"
#include "engine/worker_engine.h"

namespace fastpersist {
namespace {

class PositionedIo final : public BlockingIo {
 public:
  PositionedIo(bool direct, TmpfsMapping tmpfs) {
    if (!direct) tmpfs_writes_.emplace(tmpfs);
  }

  IoCompletion Perform(const IoRequest& request) override {
    if (request.op == IoOp::kWrite && tmpfs_writes_.has_value() && tmpfs_writes_->Write(request)) {
      return {.tag = request.tag, .done_bytes = request.size_bytes, .sys_errno = 0};
    }
    const auto offset = static_cast<off_t>(request.offset_bytes);
    ssize_t done = 0;
    do {
      done = request.op == IoOp::kRead ? pread(request.fd, request.buffer, request.size_bytes, offset)
                                       : pwrite(request.fd, request.buffer, request.size_bytes, offset);
    } while (done < 0 && errno == EINTR);
    return {.tag = request.tag,
            .done_bytes = done < 0 ? 0 : static_cast<uint32_t>(done),
            .sys_errno = done < 0 ? errno : 0};
  }

 private:
  std::optional<TmpfsWrites> tmpfs_writes_;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> CreateThreadsEngine(const EngineOptions& options, bool direct, TmpfsMapping tmpfs) {
  return CreateWorkerEngine(options.name, {.queue_depth = options.queue_depth, .direct = direct}, options.thread_count,
                            std::make_unique<PositionedIo>(direct, tmpfs), options.wake_fd);
}

}  // namespace fastpersist
