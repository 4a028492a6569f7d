// What we declare of libcufile (csrc/device/cufile), and what its double exports, against NVIDIA's cufile.h, as
// driver_abi.cc does it for the driver. CUFILE_VERSION is the header's, as cuFileGetVersion would tell it (1150 is
// 1.15), CUFILE_HAS_STATISTICS whether it declares cuFileGetStatsL3.
#include "device/cufile_abi.cc"

#include <cufile.h>
#include <sys/types.h>

#include "device/cufile.cc"
#include "same_abi.h"
// clang-format off
#include "abi_symbols.h"
// clang-format on

namespace fastpersist {

// --- structures ---

static_assert(sizeof(CuFileError) == sizeof(CUfileError_t) && alignof(CuFileError) == alignof(CUfileError_t));
static_assert(std::is_trivially_copyable_v<CuFileError> && std::is_trivially_copyable_v<CUfileError_t>);
static_assert(offsetof(CuFileError, code) == offsetof(CUfileError_t, err));
static_assert(offsetof(CuFileError, cuda) == offsetof(CUfileError_t, cu_err));
static_assert(abi::SameValue<decltype(CuFileError::code), decltype(CUfileError_t::err)>());
static_assert(abi::SameValue<decltype(CuFileError::cuda), decltype(CUfileError_t::cu_err)>());

static_assert(sizeof(FileDescription) == sizeof(CUfileDescr_t) && alignof(FileDescription) == alignof(CUfileDescr_t));
static_assert(offsetof(FileDescription, type) == offsetof(CUfileDescr_t, type));
static_assert(offsetof(FileDescription, handle) == offsetof(CUfileDescr_t, handle));
static_assert(offsetof(FileDescription, handle.fd) == offsetof(CUfileDescr_t, handle.fd));
static_assert(offsetof(FileDescription, operations) == offsetof(CUfileDescr_t, fs_ops));
static_assert(abi::SameValue<decltype(FileDescription::type), decltype(CUfileDescr_t::type)>());
static_assert(sizeof(FileDescription::handle) == sizeof(CUfileDescr_t::handle));
static_assert(abi::SameValue<decltype(FileDescription::operations), decltype(CUfileDescr_t::fs_ops)>());
static_assert(FileDescription().type == CU_FILE_HANDLE_TYPE_OPAQUE_FD);

template <>
constexpr bool abi::kSameRecord<CuFileError, CUfileError_t> = true;
template <>
constexpr bool abi::kSameRecord<FileDescription, CUfileDescr_t> = true;

// --- calls ---

// CuFile::Calls is private; the arguments of an explicit instantiation may name it all the same.
template <class Calls>
struct CallsAgree {
#define FP_ABI_COUNT(member, symbol) +1
  static_assert(sizeof(Calls) == sizeof(void*) * (0 FP_ABI_CUFILE_CALLS(FP_ABI_COUNT)),
                "a function of CuFile::Calls is looked up twice or never");

#define FP_ABI_CALL(member, symbol)   \
  FP_ABI_IS_ITS_OWN(#symbol, symbol); \
  static_assert(abi::kSameCall<decltype(Calls::member), decltype(symbol)>, #symbol);
  FP_ABI_DECLARED_CUFILE_CALLS(FP_ABI_CALL)
};
template struct CallsAgree<CuFile::Calls>;

// The double's structures by its own names.
namespace of_double {

FP_ABI_CUFILE_DOUBLE_RECORDS

static_assert(sizeof(Error) == sizeof(CUfileError_t) && offsetof(Error, cuda) == offsetof(CUfileError_t, cu_err));
static_assert(sizeof(Description) == sizeof(CUfileDescr_t));
static_assert(offsetof(Description, type) == offsetof(CUfileDescr_t, type));
static_assert(offsetof(Description, handle) == offsetof(CUfileDescr_t, handle));
static_assert(offsetof(Description, operations) == offsetof(CUfileDescr_t, fs_ops));

}  // namespace of_double

template <>
constexpr bool abi::kSameRecord<of_double::Error, CUfileError_t> = true;

namespace of_double {

#define FP_ABI_DOUBLE_CALL(symbol, type) \
  static_assert(abi::kSameRegisters<type, decltype(symbol)>, "the double's " #symbol);
FP_ABI_CUFILE_DOUBLE_CALLS(FP_ABI_DOUBLE_CALL)

}  // namespace of_double

// --- errors ---

static_assert(kCuFileSuccess == CU_FILE_SUCCESS);
static_assert(kCuFileErrorBase == CUFILEOP_BASE_ERR);
static_assert(kCuFileCudaDriverError == CU_FILE_CUDA_DRIVER_ERROR);
static_assert(kCuFileDriverAlreadyOpen == CU_FILE_DRIVER_ALREADY_OPEN);
static_assert(kCuFileNotRegistered == CU_FILE_HANDLE_NOT_REGISTERED);
static_assert(kCuFileInternalError == CU_FILE_INTERNAL_ERROR);

constexpr std::string_view NameOfCode(int code) {
  for (const CuFileErrorName& known : kErrorNames) {
    if (known.code == code) return known.name;
  }
  return "";
}

// Of streams, which we do not use, and the end of the list.
constexpr bool IsNeverMet(std::string_view name) {
  return name == "CU_FILE_ASYNC_NOT_SUPPORTED" || name == "CU_FILE_IO_MAX_ERROR";
}

#define CUFILE_OP(code, name, text) \
  static_assert((code) == 0 || IsNeverMet(#name) || NameOfCode(code) == #name, "kErrorNames: " #name);
CUFILEOP_STATUS_ENTRIES
#undef CUFILE_OP

// --- statistics ---

constexpr size_t DeviceCountWord(int version) {
  size_t word = 0;
  for (const Layout& layout : kLayouts) {
    if (version >= layout.first_version) word = layout.device_count_word;
  }
  return word;
}

#if CUFILE_HAS_STATISTICS

constexpr size_t kWord = sizeof(uint64_t);
constexpr size_t kTheWord = DeviceCountWord(CUFILE_VERSION);
static_assert(kTheWord != 0, "kLayouts does not know this version");
static_assert(offsetof(CUfileStatsLevel3_t, num_gpus) == kTheWord * kWord);
static_assert(sizeof(CUfileStatsLevel3_t::num_gpus) == sizeof(uint32_t));
static_assert(offsetof(CUfileStatsLevel3_t, per_gpu_stats) == (kTheWord + 1) * kWord);
static_assert(sizeof(CUfilePerGpuStats_t) == kDeviceWords * kWord);
static_assert(std::extent_v<decltype(CUfileStatsLevel3_t::per_gpu_stats)> == kDevicesMax);
static_assert(sizeof(CUfileStatsLevel3_t) == (kTheWord + 1 + kDevicesMax * kDeviceWords) * kWord);
static_assert(sizeof(CUfileStatsLevel3_t) < kRoomWords * kWord);
#define FP_ABI_COUNTER(field, word)                                      \
  static_assert(offsetof(CUfilePerGpuStats_t, field) == (word) * kWord); \
  static_assert(sizeof(CUfilePerGpuStats_t::field) == kWord);
FP_ABI_COUNTER(n_p2p_reads, kP2pWords[0])
FP_ABI_COUNTER(n_p2p_writes, kP2pWords[1])
FP_ABI_COUNTER(n_nvfs_reads, kNvfsWords[0])
FP_ABI_COUNTER(n_nvfs_writes, kNvfsWords[1])
FP_ABI_COUNTER(n_posix_reads, kPosixWords[0])
FP_ABI_COUNTER(n_posix_writes, kPosixWords[1])

#else

static_assert(CUFILE_VERSION < kLayouts.front().first_version, "kLayouts knows a version that has no statistics");

#endif

}  // namespace fastpersist
