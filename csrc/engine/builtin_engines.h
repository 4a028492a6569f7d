// The engines of this folder, one function each. Only the registry (for their names), the engines and the tests include
// this.
#pragma once

#include <cstdint>
#include <memory>

#include "core/check.h"
#include "core/status.h"
#include "engine/engine.h"
#include "engine/tmpfs_writes.h"

namespace fastpersist {

// Lets tests take the code paths of old kernels on new ones.
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

// Wraps another engine for the names "fault:<engine>". fault_engine.cc sets it while the program is loaded; null in
// builds without that file, such as wheels. `wake_fd` as in EngineOptions.
using EngineWrapper = std::unique_ptr<IoEngine> (*)(std::unique_ptr<IoEngine> wrapped, int wake_fd);
inline EngineWrapper g_fault_wrapper = nullptr;

// Checks what no caller may ask of any engine. The offset matters most: io_uring takes UINT64_MAX as "the file's
// position".
inline void CheckRequest(const IoRequest& request) {
  FP_CHECK(request.buffer != nullptr);
  FP_CHECK(request.size_bytes > 0);
  FP_CHECK(request.offset_bytes <= INT64_MAX);
}

}  // namespace fastpersist
