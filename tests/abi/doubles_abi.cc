// What the doubles of the driver and of libcufile export, against what the product calls them by. Unlike driver_abi.cc
// and cufile_abi.cc it needs no header of NVIDIA's, and is compiled with every run of the tests.
#include "device/cufile_abi.h"
#include "same_abi.h"
// clang-format off
#include "../support/cuda_double/machine.h"
#include "abi_symbols.h"
// clang-format on

namespace fastpersist {

using cuda_double::Handle;

#define FP_ABI_DRIVER_CALL(member, type) \
  static_assert(abi::kSameRegisters<decltype(CudaDriver::member), type>, "the double's " #member);
FP_ABI_DRIVER_CALLS(FP_ABI_DRIVER_CALL)

namespace of_double {

FP_ABI_CUFILE_DOUBLE_RECORDS

}  // namespace of_double

static_assert(sizeof(CuFileError) == sizeof(of_double::Error));
static_assert(offsetof(CuFileError, cuda) == offsetof(of_double::Error, cuda));
static_assert(sizeof(FileDescription) == sizeof(of_double::Description));
static_assert(offsetof(FileDescription, handle) == offsetof(of_double::Description, handle));
static_assert(offsetof(FileDescription, operations) == offsetof(of_double::Description, operations));

template <>
constexpr bool abi::kSameRecord<CuFileError, of_double::Error> = true;

namespace of_double {

// CuFile::Calls is private; the arguments of an explicit instantiation may name it all the same.
template <class Calls>
struct CallsAgree {
#define FP_ABI_CUFILE_CALL(member, type) \
  static_assert(abi::kSameRegisters<decltype(Calls::member), type>, "the double's " #member);
  FP_ABI_CUFILE_CALLS(FP_ABI_CUFILE_CALL)
};

}  // namespace of_double

template struct of_double::CallsAgree<CuFile::Calls>;

}  // namespace fastpersist
