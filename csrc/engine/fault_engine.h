// A test double that wraps any engine, forwards everything, and makes chosen requests fail, be short or be slow. It can
// also record what was written, for power-loss replay. Tests set one plan for the process; without a plan it changes
// nothing. It is compiled into test builds only (setup.py), which is what makes the names "fault:<engine>" exist.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace fastpersist {

struct FaultPlan {
  enum class Kind : uint8_t { kErrno, kShort, kZero, kDelay };
  std::optional<IoOp> op;  // count only reads or only writes; none: both
  uint64_t nth = 1;        // the n-th counted request since the plan was set is hit, 1-based
  uint64_t count = 1;      // and so are the count - 1 after it; UINT64_MAX: all from there on
  Kind kind = Kind::kErrno;
  int sys_errno = 5;           // kErrno
  uint32_t short_bytes = 512;  // kShort: bytes that are really done (the wrapped engine is asked for only these)
  uint32_t delay_ms = 0;       // kDelay
};

struct RecordedWrite {
  uint64_t offset_bytes;
  std::string data;
};

// Process-wide, thread-safe. SetFaultPlan restarts the count; ClearFaultPlan returns how many requests were hit.
void SetFaultPlan(const FaultPlan& plan);
uint64_t ClearFaultPlan();

// While recording is on, each completed write is appended, with a copy of its bytes, in completion order.
void SetWriteRecording(bool on);
std::vector<RecordedWrite> TakeRecordedWrites();

}  // namespace fastpersist
