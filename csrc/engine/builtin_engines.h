// The engines of this folder, one function each. Only registry.cc, which knows their names, the engines themselves and
// the tests include this.
#pragma once

#include <cstdint>
#include <memory>

#include "core/check.h"
#include "core/status.h"
#include "engine/engine.h"
#include "engine/tmpfs_writes.h"

namespace fastpersist {

// Old kernels are rare where tests run, so tests ask for their code paths by this.
enum class UringAbi : uint8_t {
  kNewest,   // whatever the kernel offers
  kLinux54,  // as on Linux 5.4: readv and writev only, no timeout argument, no cooperative task work
};

// `options` are checked by CreateEngine; options.name becomes name() and `direct` becomes limits().direct.
Result<std::unique_ptr<IoEngine>> CreateUringEngine(const EngineOptions& options, bool direct, UringAbi abi);
Result<std::unique_ptr<IoEngine>> CreateLibaioEngine(const EngineOptions& options, bool direct);
Result<std::unique_ptr<IoEngine>> CreateThreadsEngine(const EngineOptions& options, bool direct, TmpfsMapping tmpfs);
Result<std::unique_ptr<IoEngine>> CreateCuFileEngine(const EngineOptions& options, bool direct);
Result<std::unique_ptr<IoEngine>> CreateNullEngine(const EngineOptions& options, bool direct);

// What wraps another engine for the names "fault:<engine>"; null where the fault engine is not compiled in, as in a
// wheel. `wake_fd` as in EngineOptions. Set by fault_engine.cc while the program is loaded.
using EngineWrapper = std::unique_ptr<IoEngine> (*)(std::unique_ptr<IoEngine> wrapped, int wake_fd);
inline EngineWrapper g_fault_wrapper = nullptr;

// What no caller may ask of any engine. The offset matters most: io_uring takes UINT64_MAX as "the file's position".
inline void CheckRequest(const IoRequest& request) {
  FP_CHECK(request.buffer != nullptr);
  FP_CHECK(request.size_bytes > 0);
  FP_CHECK(request.offset_bytes <= INT64_MAX);
}

}  // namespace fastpersist
