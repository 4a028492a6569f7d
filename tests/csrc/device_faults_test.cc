// Failures of the driver (device/device.h), over its double: every call may fail and leaves nothing behind, an error
// that costs the device says so, a mark finds a late error, and a forked or ending process leaves the driver alone.
#include <filesystem>
#include <fstream>
#include <optional>

#include "core/fork.h"
#include "device/device.h"
#include "testing_device.h"

namespace fastpersist {
namespace {

// --- failures ---

void AnyCallMayFailAndTheNextSaveIsWhole() {
  int failure_count = 0;
  for (const char* const call :
       {"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent", "cuStreamCreate", "cuStreamWaitEvent", "cuEventCreate", "cuEventRecord", "cuEventQuery",
        "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemGetAddressRange", "cuStreamIsCapturing", "cuMemHostRegister"}) {
    // The product remembers its devices, so each nth failure gets a fresh process.
    for (int nth = 1;; ++nth) {
      const int answer = InChild([&] {
        Cuda().fail(call, nth, 2);  // out of memory
        std::string why_not;
        const Status status = SaveAndLoad(&why_not);
        const bool has_failed = !status.ok() || !why_not.empty();
        const std::string message = status.ok() ? why_not : status.message();
        if (has_failed) EXPECT_WITH(Contains(message, "CUDA_ERROR_OUT_OF_MEMORY"), std::string(call) + ": " + message);
        if (!status.ok()) {
          EXPECT(status.code() == StatusCode::kDeviceError || status.code() == StatusCode::kUnsupported);
        }
        if (!has_failed) return 0;
        Cuda().clear();
        EXPECT_OK(SaveAndLoad(&why_not));
        EXPECT_WITH(why_not.empty(), why_not);
        ExpectNothingLeft();
        return 1;
      });
      EXPECT_WITH(answer == 0 || answer == 1, std::string(call) + " " + std::to_string(nth));
      if (answer != 1) {
        EXPECT_WITH(nth > 1, std::string(call) + " is never made");
        break;
      }
      ++failure_count;
    }
  }
  EXPECT_WITH(failure_count >= 25, std::to_string(failure_count));
}

void AnErrorHasItsNumberWhereTheDriverHasNoName() {
  const CudaDriver& driver = *Must(CudaDriver::Get());
  EXPECT(driver.Check(4711, "copying").message() == "copying: CUDA error 4711");
}

void ADeviceThatIsOpenedAgainGoesOnWhereItStopped() {
  for (const int nth : {1, 2}) {  // the second time, the first stream is there
    Cuda().fail("cuStreamCreate", nth, 2);
    const Status status = Device::Get(0).status();
    EXPECT_WITH(status.code() == StatusCode::kDeviceError && Contains(status.message(), "cuda:0"), status.message());
  }
  EXPECT_OK(Device::Get(0).status());
  EXPECT(Cuda().call_count("cuDevicePrimaryCtxRetain") == 1 && Cuda().stream_count() == 2);
}

void AnErrorThatTakesTheDeviceAwaySaysSoAndLeavesTheOtherDeviceAlone() {
  Cuda().reset(2);
  Device& device = TheDevice(0);
  const Pages host;
  {
    const Pinned pinned = Pinned::Register(TheDevice(1), host.bytes());
    const DeviceMemory memory(0);
    const CopyMark before = Must(device.to_host().Mark());
    Cuda().fail("cuMemcpyDtoHAsync", 1, 700);
    for (const Status& status :
         {device.to_host().ToHost(host.data(), memory.address(), kBytes), device.to_host().FollowCaller(0),
          device.to_device().Mark().status(), before.Wait(no_poll), device.RangeOf(memory.address()).status()}) {
      EXPECT(status.code() == StatusCode::kDeviceError);
      for (const char* const part : {"cuda:0", "CUDA_ERROR_ILLEGAL_ADDRESS",
                                     "this process cannot use the device any more", "saves of CPU tensors go on"}) {
        EXPECT_WITH(Contains(status.message(), part), status.message());
      }
    }
    const Pages more;
    EXPECT(Contains(Pinned::Register(device, more.bytes()).why_not(), "CUDA_ERROR_ILLEGAL_ADDRESS"));
    const DeviceMemory of_other(1);
    EXPECT_OK(TheDevice(1).to_host().ToHost(host.data(), of_other.address(), kBytes));
    EXPECT_OK(Must(TheDevice(1).to_host().Mark()).Wait(no_poll));
    EXPECT(host.AllAre(kFresh));
  }
  EXPECT(Cuda().registration_count() == 0);
}

void AnErrorThatIsNoneOfTheDevicesStateDoesNotSaySo() {
  const CudaDriver& driver = *Must(CudaDriver::Get());
  EXPECT(!Contains(driver.Check(2, "copying").message(), "any more"));
  for (const int error : {700, 719, 999, 100, 226, 721, 810, 911}) {
    EXPECT(Contains(driver.Check(error, "copying").message(), "cannot use the device any more"));
  }
  EXPECT(Contains(driver.Check(46, "opening").message(), "compute mode"));
}

void ACopyThatWasStartedIsNoErrorWhereItCannotBeMarked() {
  Device& device = TheDevice();
  const Pages host;
  const Pinned pinned = Pinned::Register(device, host.bytes());
  const DeviceMemory memory;
  Cuda().hold_copies(0);
  for (const char* const call : {"cuEventCreate", "cuEventRecord"}) Cuda().fail(call, 0, 2);
  for (uint64_t count = 1; count <= 300; ++count) {  // now and then one is marked
    EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), 1));
    EXPECT(Cuda().queued_copy_count() == count);
  }
  EXPECT(device.to_host().Mark().status().code() == StatusCode::kDeviceError);
  Cuda().clear();
}

void ACopyThatFailsLaterIsFoundByTheMarksBehindIt() {
  Cuda().reset(2);  // what is pinned stays so where the context is spoilt, so that is the other one's
  Device& device = TheDevice();
  const Pages host;
  const Pinned pinned = Pinned::Register(TheDevice(1), host.bytes());
  const DeviceMemory memory;
  Cuda().fail_async("cuMemcpyDtoHAsync", 2, 719);
  EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), 4096));
  EXPECT_OK(Must(device.to_host().Mark()).Wait(no_poll));
  Cuda().hold_copies(0);
  EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), kBytes));
  const CopyMark mark = Must(device.to_host().Mark());
  EXPECT(!Must(mark.IsComplete()));
  Cuda().hold_copies(-1);
  const Status status = mark.Wait(no_poll);
  EXPECT(status.code() == StatusCode::kDeviceError);
  EXPECT_WITH(Contains(status.message(), "CUDA_ERROR_LAUNCH_FAILED"), status.message());
  EXPECT(mark.IsComplete().status().code() == StatusCode::kDeviceError);
}

// --- forked and ending processes ---

// Wait until the double's idle threads are gone: ASan's allocator does not survive a fork while another thread is
// inside it.
void WaitForTheThreadsOfTheDouble() {
  const auto is_double = [](const std::filesystem::directory_entry& task) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    return name == "cuda-double";
  };
  const std::filesystem::directory_iterator end;
  while (std::find_if(std::filesystem::directory_iterator("/proc/self/task"), end, is_double) != end) usleep(1000);
}

void AForkedChildLeavesTheDriverAlone() {
  Device& device = TheDevice();
  const Pages host;
  Pinned pinned = Pinned::Register(device, host.bytes());
  const DeviceMemory memory;
  CopyMark mark = Must(device.to_host().Mark());
  EXPECT_OK(mark.Wait(no_poll));
  WaitForTheThreadsOfTheDouble();
  const uint64_t call_count = Cuda().call_count("");
  const int answer = InChild([&] {
    EXPECT(ForkGeneration() == 2);
    for (const Status& status :
         {CudaDriver::Get().status(), CudaDriver::Present(), Device::Get(0).status(), mark.IsComplete().status(),
          mark.Wait(no_poll), device.to_host().FollowCaller(0), device.to_host().HoldCaller(0),
          device.to_host().ToHost(nullptr, memory.address(), kBytes), device.to_host().Mark().status(),
          device.to_device().ToDevice(memory.address(), nullptr, kBytes), device.RangeOf(memory.address()).status()}) {
      EXPECT(status.code() == StatusCode::kUnsupported);
      EXPECT_WITH(Contains(status.message(), "forked after CUDA was used") && Contains(status.message(), "spawn"),
                  status.message());
    }
    const Pages own;
    EXPECT(Contains(Pinned::Register(device, own.bytes()).why_not(), "forked after CUDA was used"));
    pinned = Pinned();
    mark = CopyMark();
    EXPECT(Cuda().call_count("") == call_count);
    return 7;
  });
  EXPECT(answer == 7);
  EXPECT(pinned.ok() && Cuda().registration_count() == 1);
  EXPECT_OK(mark.Wait(no_poll));
}

void AChildOfAProcessThatOnlyLookedHasADriverOfItsOwn() {
  EXPECT_OK(CudaDriver::Present());
  Cuda().fail("cuInit", 1, 999);
  EXPECT(!CudaDriver::Get().ok());  // has not used it
  EXPECT(InChild([] {
           EXPECT_OK(SaveAndLoad());
           return 7;
         }) == 7);
  EXPECT_OK(SaveAndLoad());
}

uint64_t g_last_call_count = 0;

void TheEndOfTheProcessLeavesTheDriverAlone() {
  const int answer = InChild([]() -> int {
    // Handlers run backwards: this one after the destructors of what is made below.
    (void)std::atexit([] { std::_Exit(Cuda().call_count("") == g_last_call_count ? 7 : 1); });
    static Pages host;
    static std::optional<Pinned> pinned;
    static CopyMark mark;
    static const struct Last {
      ~Last() {
        EXPECT(CudaDriver::Get().status().code() == StatusCode::kUnsupported);
        EXPECT(Contains(CudaDriver::Get().status().message(), "ending"));
        EXPECT(Contains(mark.IsComplete().status().message(), "ending"));
        if (g_failure_count > 0) std::_Exit(1);
      }
    } last;
    pinned = Pinned::Register(TheDevice(), host.bytes());  // the driver is found here, after all of them
    mark = Must(TheDevice().to_host().Mark());
    EXPECT(pinned->ok() && mark);
    g_last_call_count = Cuda().call_count("");
    std::exit(0);
  });
  EXPECT(answer == 7);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  if (CudaDouble::FindLibrary().empty()) CudaDouble::Get();  // says so
  return Run(argc, argv,
             {
                 WITH_DOUBLE(AnyCallMayFailAndTheNextSaveIsWhole),
                 WITH_DOUBLE(AnErrorHasItsNumberWhereTheDriverHasNoName),
                 WITH_DOUBLE(ADeviceThatIsOpenedAgainGoesOnWhereItStopped),
                 WITH_DOUBLE(AnErrorThatTakesTheDeviceAwaySaysSoAndLeavesTheOtherDeviceAlone),
                 WITH_DOUBLE(AnErrorThatIsNoneOfTheDevicesStateDoesNotSaySo),
                 WITH_DOUBLE(ACopyThatWasStartedIsNoErrorWhereItCannotBeMarked),
                 WITH_DOUBLE(ACopyThatFailsLaterIsFoundByTheMarksBehindIt),
                 WITH_DOUBLE(AForkedChildLeavesTheDriverAlone),
                 WITH_DOUBLE(AChildOfAProcessThatOnlyLookedHasADriverOfItsOwn),
                 WITH_DOUBLE(TheEndOfTheProcessLeavesTheDriverAlone),
             });
}
