#include "core/status.h"

#include <cerrno>
#include <system_error>

namespace fastpersist {
namespace {

StatusCode CodeOf(int sys_errno) {
  switch (sys_errno) {
    case ENOSPC:
    case EDQUOT:
      return StatusCode::kNoSpace;
    case ENOMEM:
      return StatusCode::kNoMemory;
    case ENOSYS:
    case EOPNOTSUPP:
      return StatusCode::kUnsupported;
    default:
      return StatusCode::kIoError;
  }
}

}  // namespace

Status Status::FromErrno(int sys_errno, std::string_view operation, std::string_view path, uint64_t offset_bytes,
                         std::string_view detail) {
  std::string message(operation);
  message.append(" ").append(path);
  if (offset_bytes != kNoOffset) message.append(" at offset ").append(std::to_string(offset_bytes));
  message.append(": ").append(std::generic_category().message(sys_errno));
  if (!detail.empty()) message.append(" (").append(detail).append(")");
  Status status = Error(CodeOf(sys_errno), std::move(message), offset_bytes);
  status.sys_errno_ = sys_errno;
  return status;
}

}  // namespace fastpersist
