// The threads engine: workers that call pread and pwrite. It works wherever
// files do, so it is the last rung of the ladder; ENGINES.md walks through it.
#include <unistd.h>

#include <cerrno>

#include "engine/builtin_engines.h"
#include "engine/engine.h"
#include "engine/worker_engine.h"

namespace fastpersist {
namespace {

class PositionedIo final : public BlockingIo {
 public:
  IoCompletion Perform(const IoRequest& request) override {
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
};

}  // namespace

Result<std::unique_ptr<IoEngine>> CreateThreadsEngine(const EngineOptions& options, bool direct) {
  return CreateWorkerEngine(options.name, {.queue_depth = options.queue_depth, .direct = direct}, options.thread_count,
                            std::make_unique<PositionedIo>());
}

}  // namespace fastpersist
