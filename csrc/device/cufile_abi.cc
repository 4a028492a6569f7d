#include "device/cufile_abi.h"

#include <algorithm>
#include <array>
#include <cerrno>

namespace fastpersist {
namespace {

constexpr std::array kErrorNames = {
    CuFileErrorName{5001, "CU_FILE_DRIVER_NOT_INITIALIZED", EOPNOTSUPP},
    CuFileErrorName{5002, "CU_FILE_DRIVER_INVALID_PROPS", EIO},
    CuFileErrorName{5003, "CU_FILE_DRIVER_UNSUPPORTED_LIMIT", EIO},
    CuFileErrorName{5004, "CU_FILE_DRIVER_VERSION_MISMATCH", EOPNOTSUPP},
    CuFileErrorName{5005, "CU_FILE_DRIVER_VERSION_READ_ERROR", EOPNOTSUPP},
    CuFileErrorName{5006, "CU_FILE_DRIVER_CLOSING", EIO},
    CuFileErrorName{5007, "CU_FILE_PLATFORM_NOT_SUPPORTED", EOPNOTSUPP},
    CuFileErrorName{5008, "CU_FILE_IO_NOT_SUPPORTED", EOPNOTSUPP},
    CuFileErrorName{5009, "CU_FILE_DEVICE_NOT_SUPPORTED", EOPNOTSUPP},
    CuFileErrorName{5010, "CU_FILE_NVFS_DRIVER_ERROR", EIO},
    CuFileErrorName{kCuFileCudaDriverError, "CU_FILE_CUDA_DRIVER_ERROR", EIO},
    CuFileErrorName{5012, "CU_FILE_CUDA_POINTER_INVALID", EIO},
    CuFileErrorName{5013, "CU_FILE_CUDA_MEMORY_TYPE_INVALID", EIO},
    CuFileErrorName{5014, "CU_FILE_CUDA_POINTER_RANGE_ERROR", EIO},
    CuFileErrorName{5015, "CU_FILE_CUDA_CONTEXT_MISMATCH", EIO},
    CuFileErrorName{5016, "CU_FILE_INVALID_MAPPING_SIZE", EIO},
    CuFileErrorName{5017, "CU_FILE_INVALID_MAPPING_RANGE", EIO},
    CuFileErrorName{5018, "CU_FILE_INVALID_FILE_TYPE", EOPNOTSUPP},
    CuFileErrorName{5019, "CU_FILE_INVALID_FILE_OPEN_FLAG", EOPNOTSUPP},
    CuFileErrorName{5020, "CU_FILE_DIO_NOT_SET", EOPNOTSUPP},
    CuFileErrorName{5022, "CU_FILE_INVALID_VALUE", EIO},
    CuFileErrorName{5023, "CU_FILE_MEMORY_ALREADY_REGISTERED", EIO},
    CuFileErrorName{5024, "CU_FILE_MEMORY_NOT_REGISTERED", EIO},
    CuFileErrorName{5025, "CU_FILE_PERMISSION_DENIED", EIO},
    CuFileErrorName{kCuFileDriverAlreadyOpen, "CU_FILE_DRIVER_ALREADY_OPEN", EIO},
    CuFileErrorName{kCuFileNotRegistered, "CU_FILE_HANDLE_NOT_REGISTERED", EOPNOTSUPP},
    CuFileErrorName{5028, "CU_FILE_HANDLE_ALREADY_REGISTERED", EIO},
    CuFileErrorName{5029, "CU_FILE_DEVICE_NOT_FOUND", EIO},
    CuFileErrorName{kCuFileInternalError, "CU_FILE_INTERNAL_ERROR", EIO},
    CuFileErrorName{5031, "CU_FILE_GETNEWFD_FAILED", EOPNOTSUPP},  // the file has no name
    CuFileErrorName{5033, "CU_FILE_NVFS_SETUP_ERROR", EIO},
    CuFileErrorName{5034, "CU_FILE_IO_DISABLED", EOPNOTSUPP},
    CuFileErrorName{5035, "CU_FILE_BATCH_SUBMIT_FAILED", EIO},
    CuFileErrorName{5036, "CU_FILE_GPU_MEMORY_PINNING_FAILED", EIO},
    CuFileErrorName{5037, "CU_FILE_BATCH_FULL", EAGAIN},
    CuFileErrorName{5039, "CU_FILE_INTERNAL_BATCH_SETUP_ERROR", EIO},
    CuFileErrorName{5040, "CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR", EIO},
    CuFileErrorName{5041, "CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR", EIO},
    CuFileErrorName{5042, "CU_FILE_INTERNAL_BATCH_CANCEL_ERROR", EIO},
    CuFileErrorName{5043, "CU_FILE_NOMEM_ERROR", ENOMEM},
    CuFileErrorName{5044, "CU_FILE_IO_ERROR", EIO},
    CuFileErrorName{5045, "CU_FILE_INTERNAL_BUF_REGISTER_ERROR", EIO},
    CuFileErrorName{5046, "CU_FILE_HASH_OPR_ERROR", EIO},
    CuFileErrorName{5047, "CU_FILE_INVALID_CONTEXT_ERROR", EIO},
    CuFileErrorName{5048, "CU_FILE_NVFS_INTERNAL_DRIVER_ERROR", EIO},
    CuFileErrorName{5049, "CU_FILE_BATCH_NOCOMPAT_ERROR", EOPNOTSUPP},
};

}  // namespace

CuFileErrorName NameOf(int code) {
  const auto* const found = std::find_if(kErrorNames.begin(), kErrorNames.end(),
                                         [&](const CuFileErrorName& known) { return known.code == code; });
  return found != kErrorNames.end() ? *found : CuFileErrorName{code, "cuFile error", EIO};
}

std::string Describe(CuFileError error) {
  std::string text = std::string(NameOf(error.code).name) + " (" + std::to_string(error.code) + ")";
  if (error.code != kCuFileCudaDriverError) return text;
  Result<const CudaDriver*> driver = CudaDriver::Get();
  return driver.ok() && error.cuda != kCudaSuccess ? driver.value()->Check(error.cuda, text).message() : text;
}

CuFileOutcome OutcomeOf(ssize_t answer, size_t size_bytes, int sys_errno) {
  if (answer >= 0) {
    if (static_cast<size_t>(answer) <= size_bytes) return {.done_bytes = static_cast<size_t>(answer), .error = {}};
    return {.sys_errno = EIO, .error = "cuFile says that it moved " + std::to_string(answer) + " bytes"};
  }
  if (answer == -1) return {.sys_errno = sys_errno == 0 ? EIO : sys_errno, .error = {}};
  if (-answer < kCuFileErrorBase) return {.sys_errno = static_cast<int>(-answer), .error = {}};
  const CuFileError error = {.code = static_cast<int>(-answer), .cuda = kCudaSuccess};
  return {.sys_errno = NameOf(error.code).sys_errno, .error = Describe(error)};
}

}  // namespace fastpersist
