// Errors are values: a Status says what failed, with the kernel's errno if there is one; a Result<T> is a T or a
// Status. Nothing in csrc throws or prints. Only FromErrno turns an errno into a Status, and only binding/errors.cc
// turns a Status into a Python exception.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/check.h"

namespace fastpersist {

enum class StatusCode : uint8_t {
  kOk,
  kInvalidArgument,  // the request makes no sense; nothing was done
  kUnsupported,      // this kernel, file system or sandbox cannot; the message says why not
  kIoError,          // the kernel refused; sys_errno() holds its error
  kNoSpace,          // ENOSPC, EDQUOT
  kNoMemory,         // ENOMEM: no memory for the ring or a kernel resource
  kEndOfFile,        // the file ends before the requested bytes
  kDeviceError,      // the device or its driver refused; the message has the driver's name of the error
  kCancelled,        // a hook asked to stop (KeyboardInterrupt, an exception in a callback)
  kInternal,         // an invariant of this library broke
};

class [[nodiscard]] Status {
 public:
  static constexpr uint64_t kNoOffset = UINT64_MAX;

  Status() = default;
  static Status Ok() { return {}; }
  static Status Error(StatusCode code, std::string message, uint64_t offset_bytes = kNoOffset) {
    FP_CHECK(code != StatusCode::kOk);
    Status status;
    status.code_ = code;
    status.offset_bytes_ = offset_bytes;
    status.message_ = std::move(message);
    return status;
  }
  // The message reads "<operation> <path> at offset <n>: <strerror> (<detail>)", without the offset if it is kNoOffset
  // and without the detail if it is empty.
  static Status FromErrno(int sys_errno, std::string_view operation, std::string_view path,
                          uint64_t offset_bytes = kNoOffset, std::string_view detail = {});

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  int sys_errno() const { return sys_errno_; }
  const std::string& message() const { return message_; }
  uint64_t offset_bytes() const { return offset_bytes_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  int sys_errno_ = 0;
  uint64_t offset_bytes_ = kNoOffset;
  std::string message_;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}                                    // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) { FP_CHECK(!status_.ok()); }  // NOLINT: implicit on purpose

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & {
    FP_CHECK(ok());
    return *value_;
  }
  T&& value() && {
    FP_CHECK(ok());
    return *std::move(value_);
  }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace fastpersist

// Return the Status of an expression if it is an error.
#define FP_RETURN_IF_ERROR(expression)              \
  do {                                              \
    ::fastpersist::Status fp_status = (expression); \
    if (!fp_status.ok()) return fp_status;          \
  } while (false)
