// libcufile's C interface as this code uses it, without its header: what is laid out how, which calls there are, what
// its errors mean. What the calls are for is cufile.h's and cufile_batch.h's.
//
// Source: GPUDirect Storage, cuFile API Reference Guide; the headers of cuFile 1.11 to 1.20, which agree on all of
// this.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <ctime>
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
  int sys_errno;  // for a transfer that fails so: what says "not with this file" lets another engine take over
};

CuFileErrorName NameOf(int code);
// Such as "CU_FILE_IO_DISABLED (5034)", with the driver's own error where there is one.
std::string Describe(CuFileError error);
// Of a transfer of size_bytes: what cuFileRead and cuFileWrite answer, and errno behind them.
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

// --- batches ---

// CUfileIOParams_t. Its union has this one member, and the field before it, which says so, comes first.
struct CuFileBatchRequest {
  int mode = 1;  // CUFILE_BATCH
  void* base = nullptr;
  off_t offset_bytes = 0;
  off_t base_offset_bytes = 0;
  size_t size_bytes = 0;
  void* file = nullptr;
  int opcode = 0;  // CUFILE_READ 0, CUFILE_WRITE 1
  void* cookie = nullptr;
};
static_assert(sizeof(CuFileBatchRequest) == 64);

// CUfileStatus_t.
enum CuFileBatchStatus : int {
  kBatchWaiting = 0x01,
  kBatchPending = 0x02,
  kBatchInvalid = 0x04,
  kBatchCanceled = 0x08,
  kBatchComplete = 0x10,
  kBatchTimeout = 0x20,
  kBatchFailed = 0x40,
};

// CUfileIOEvents_t.
struct CuFileBatchEvent {
  void* cookie = nullptr;
  int status = 0;
  size_t answer = 0;  // the bytes moved, or a negative error
};
static_assert(sizeof(CuFileBatchEvent) == 24);

// CUfileDrvProps_t, in 4-byte words. Later ones may have more.
constexpr size_t kPropertiesRoomWords = 256;
constexpr size_t kMaxBatchWord = 12;

// --- the calls ---

struct CuFile::Calls {
  CuFileError (*driver_open)();
  CuFileError (*handle_register)(void** file, FileDescription* description);
  void (*handle_deregister)(void* file);
  CuFileError (*buf_register)(const void* base, size_t size_bytes, int flags);
  CuFileError (*buf_deregister)(const void* base);
  ssize_t (*read)(void* file, void* base, size_t size_bytes, off_t offset_bytes, off_t base_offset_bytes);
  ssize_t (*write)(void* file, const void* base, size_t size_bytes, off_t offset_bytes, off_t base_offset_bytes);
  // Null in a library that is too old for them.
  CuFileError (*get_version)(int* version);
  CuFileError (*get_stats_level)(int* level);
  CuFileError (*set_stats_level)(int level);
  CuFileError (*stats_start)();
  CuFileError (*get_stats_l3)(void* statistics);
  CuFileError (*get_properties)(void* properties);
  CuFileError (*batch_set_up)(void** batch, unsigned request_count);
  CuFileError (*batch_submit)(void* batch, unsigned count, CuFileBatchRequest* requests, unsigned flags);
  CuFileError (*batch_get_status)(void* batch, unsigned min_count, unsigned* count, CuFileBatchEvent* events,
                                  timespec* timeout);
  CuFileError (*batch_cancel)(void* batch);
  void (*batch_destroy)(void* batch);
};

}  // namespace fastpersist
