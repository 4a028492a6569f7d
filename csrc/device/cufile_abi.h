// The part of libcufile's C interface that this code uses, without its header: layouts, calls, and the meaning of
// errors. cufile.h uses it.
//
// Source: GPUDirect Storage, cuFile API Reference Guide; the headers of cuFile 1.11 to 1.20, which agree on all of
// this.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/cuda_driver.h"
#include "device/cufile.h"

namespace fastpersist {

// --- errors ---

constexpr int kCuFileSuccess = 0;
constexpr int kCuFileErrorBase = 5000;
constexpr int kCuFileCudaDriverError = 5011;
constexpr int kCuFileDriverAlreadyOpen = 5026;
constexpr int kCuFileNotRegistered = 5027;
constexpr int kCuFileInternalError = 5030;

// CUfileError_t.
struct CuFileError {
  int code;
  CudaResult cuda;
};

struct CuFileErrorName {
  int code;
  const char* name;
  int sys_errno;  // of a transfer with this error: "not with this file" lets another engine take over
};

CuFileErrorName NameOf(int code);
// A text such as "CU_FILE_IO_DISABLED (5034)", with the driver's own error if there is one.
std::string Describe(CuFileError error);
// The outcome of a transfer of size_bytes from the result of cuFileRead or cuFileWrite, and the errno after it.
CuFileOutcome OutcomeOf(ssize_t answer, size_t size_bytes, int sys_errno);

// --- files ---

// CUfileDescr_t, for a descriptor of Linux.
struct FileDescription {
  int type = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD
  union {
    int fd;
    void* other;
  } handle = {};
  const void* operations = nullptr;
};

// --- the calls ---

struct CuFile::Calls {
  CuFileError (*driver_open)();
  CuFileError (*handle_register)(void** file, FileDescription* description);
  void (*handle_deregister)(void* file);
  CuFileError (*buf_register)(const void* base, size_t size_bytes, int flags);
  CuFileError (*buf_deregister)(const void* base);
  ssize_t (*read)(void* file, void* base, size_t size_bytes, off_t offset_bytes, off_t base_offset_bytes);
  ssize_t (*write)(void* file, const void* base, size_t size_bytes, off_t offset_bytes, off_t base_offset_bytes);
  // Null in a library that is too old.
  CuFileError (*get_version)(int* version);
  CuFileError (*get_stats_level)(int* level);
  CuFileError (*set_stats_level)(int level);
  CuFileError (*stats_start)();
  CuFileError (*get_stats_l3)(void* statistics);
};

}  // namespace fastpersist
