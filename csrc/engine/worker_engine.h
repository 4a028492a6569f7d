// An engine over blocking calls, which worker threads make in parallel. The user of this file defines the call; this
// file has the three verbs, the threads, and what a forked child must leave alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/status.h"
#include "engine/engine.h"

namespace fastpersist {

// The blocking call.
class BlockingIo {
 public:
  BlockingIo() = default;
  BlockingIo(const BlockingIo&) = delete;
  BlockingIo& operator=(const BlockingIo&) = delete;
  // Runs on the thread that ends the engine, after the workers have ended. Not in a forked child.
  virtual ~BlockingIo() = default;

  // Perform one request completely; the completion has its tag. Several workers call this at once.
  virtual IoCompletion Perform(const IoRequest& request) = 0;

  // As IoEngine::last_failure. Thread-safe.
  virtual std::string last_failure() const { return {}; }
};

// thread_count 0: min(queue depth, 16). wake_fd as in EngineOptions. kUnsupported if a thread cannot be started.
Result<std::unique_ptr<IoEngine>> CreateWorkerEngine(std::string name, EngineLimits limits, uint32_t thread_count,
                                                     std::unique_ptr<BlockingIo> io, int wake_fd = -1);

}  // namespace fastpersist
