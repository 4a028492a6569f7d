// An engine over calls that block, which worker threads make side by side. The user of this file says what a call does;
// this file has the three verbs, the threads, and what a forked child must leave alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/status.h"
#include "engine/engine.h"

namespace fastpersist {

// What the workers call.
class BlockingIo {
 public:
  BlockingIo() = default;
  BlockingIo(const BlockingIo&) = delete;
  BlockingIo& operator=(const BlockingIo&) = delete;
  // On the thread that ends the engine, when the workers have gone. Not in a forked child.
  virtual ~BlockingIo() = default;

  // One request from its start to its end: the completion has its tag. Called by several workers at once.
  virtual IoCompletion Perform(const IoRequest& request) = 0;

  // As IoEngine::last_failure. Thread-safe.
  virtual std::string last_failure() const { return {}; }
};

// thread_count: 0: min(queue depth, 16). wake_fd as in EngineOptions. kUnsupported where a thread cannot be started.
Result<std::unique_ptr<IoEngine>> CreateWorkerEngine(std::string name, EngineLimits limits, uint32_t thread_count,
                                                     std::unique_ptr<BlockingIo> io, int wake_fd = -1);

}  // namespace fastpersist
