// A test double that wraps any engine, forwards every request, and makes chosen ones fail, be short or be slow. It can
// record the written bytes, for power-loss replay. Tests set one plan for the process; without a plan it changes
// nothing. Only test builds contain it (setup.py), and so the names "fault:<engine>".
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
  uint64_t nth = 1;        // the n-th counted request since the plan was set is the first hit, 1-based
  uint64_t count = 1;      // this many in a row are hit; UINT64_MAX: all from there on
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

// While recording is on, append each completed write, with a copy of its bytes, in completion order.
void SetWriteRecording(bool on);
std::vector<RecordedWrite> TakeRecordedWrites();

}  // namespace fastpersist
