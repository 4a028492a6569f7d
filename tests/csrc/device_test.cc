// The CUDA driver by dlopen (device/cuda_driver.h) and its use by transfers (device/device.h), over the driver's
// double: it is found once or says why not, copies keep their order with the caller's streams both ways, marks tell the
// truth, memory is pinned and unpinned, and the application's own use of CUDA stays undisturbed. device_faults_test
// checks failures.
#include "device/device.h"

#include <dlfcn.h>
#include <sys/resource.h>

#include <thread>

#include "testing_device.h"

namespace fastpersist {
namespace {

// --- finding the driver ---

// The folder of this program, and of the libraries built for it.
std::string Folder() {
  char path[4096];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  const std::string program(path, static_cast<size_t>(std::max<ssize_t>(size, 0)));
  return program.substr(0, program.rfind('/'));
}

// Run before the double is loaded: shows what the machine has.
void WithoutADriverTheReasonSaysWhatToDo() {
  const Status status = CudaDriver::Present();
  if (status.ok()) return;  // it has one
  for (const Status& same : {status, CudaDriver::Get().status(), Device::Get(0).status()}) {
    EXPECT(same.code() == StatusCode::kUnsupported);
    EXPECT_WITH(Contains(same.message(), "libcuda.so.1") && Contains(same.message(), "install"), same.message());
  }
}

void ADriverWithoutACallThatIsNeededIsRefusedByTheCallsName() {
  const std::string library = Folder() + "/no-cuda/libcuda.so.1";
  if (!EXPECT_WITH(dlopen(library.c_str(), RTLD_NOW) != nullptr, library)) return;
  for (const Status& status : {CudaDriver::Present(), CudaDriver::Get().status(), Device::Get(0).status()}) {
    EXPECT(status.code() == StatusCode::kUnsupported);
    EXPECT_WITH(Contains(status.message(), "has no cuInit"), status.message());
  }
}

void TheDriverIsInitialisedOnceAndKept() {
  const CudaDriver* const driver = Must(CudaDriver::Get());
  EXPECT(Must(CudaDriver::Get()) == driver);
  EXPECT(Cuda().call_count("cuInit") == 1);
  EXPECT_OK(CudaDriver::Present());
  EXPECT_OK(driver->Check(kCudaSuccess, "nothing"));
}

void LookingWhetherThereIsADriverDoesNotInitialiseIt() {
  EXPECT_OK(CudaDriver::Present());
  EXPECT(Cuda().call_count("cuInit") == 0);
}

void ADriverThatIsTooOldIsRefusedUntilThereIsANewerOne() {
  Cuda().set_driver_version(10020);
  for (const Status& status : {CudaDriver::Present(), CudaDriver::Get().status(), Device::Get(0).status()}) {
    EXPECT(status.code() == StatusCode::kUnsupported);
    EXPECT_WITH(Contains(status.message(), "CUDA 10.2") && Contains(status.message(), "11.0"), status.message());
  }
  EXPECT(Cuda().call_count("cuInit") == 0);
  Cuda().set_driver_version(11000);
  EXPECT_OK(CudaDriver::Get().status());
}

// The driver of CUDA 12.4 answers each call like this.
void TheStubOfTheToolkitIsNamedByTheFirstCallThatItRefuses() {
  Cuda().fail("cuDriverGetVersion", 0, 34);
  for (const Status& status : {CudaDriver::Present(), CudaDriver::Get().status()}) {
    EXPECT(status.code() == StatusCode::kUnsupported);
    EXPECT_WITH(Contains(status.message(), "stub of the CUDA toolkit"), status.message());
  }
  EXPECT(Cuda().call_count("cuInit") == 0);
}

void ADriverThatDoesNotStartSaysWhyAndIsTriedAgain() {
  struct Case {
    int error;
    const char* words;
  };
  for (const Case& one : {Case{3, "spawn"}, Case{34, "LD_LIBRARY_PATH"}, Case{100, "CUDA_VISIBLE_DEVICES"},
                          Case{999, "CUDA_ERROR_UNKNOWN"}}) {
    Cuda().fail("cuInit", 1, one.error);
    const Status status = CudaDriver::Get().status();
    EXPECT(status.code() == StatusCode::kUnsupported);
    EXPECT_WITH(Contains(status.message(), one.words), status.message());
  }
  EXPECT_OK(CudaDriver::Get().status());
}

void ADeviceThatIsNotThereIsAnErrorThatCountsThoseThatAre() {
  Cuda().reset(2);
  for (const int ordinal : {-1, 2}) {
    const Status status = Device::Get(ordinal).status();
    EXPECT(status.code() == StatusCode::kDeviceError);
    EXPECT_WITH(Contains(status.message(), "cuda:" + std::to_string(ordinal)) && Contains(status.message(), "2 CUDA"),
                status.message());
  }
}

void ADeviceIsMadeOnceWithOneContextAndTwoStreams() {
  Device& device = TheDevice();
  EXPECT(device.ordinal() == 0);
  EXPECT(&TheDevice() == &device && &device.to_host() != &device.to_device());
  EXPECT(Cuda().call_count("cuDevicePrimaryCtxRetain") == 1);
  EXPECT(Cuda().stream_count() == 2);
}

// --- copies, and their order ---

void BytesGoToTheDeviceAndComeBack() {
  Device& device = TheDevice();
  const Pages source;
  const Pages target;
  const Pinned pinned_source = Pinned::Register(device, source.bytes());
  const Pinned pinned_target = Pinned::Register(device, target.bytes());
  EXPECT_WITH(pinned_source.ok() && pinned_target.ok(), pinned_source.why_not());
  const DeviceMemory memory;
  const Bytes bytes = RandomBytes(kBytes, 1);
  std::copy(bytes.begin(), bytes.end(), source.data());
  EXPECT_OK(device.to_device().ToDevice(memory.address(), source.data(), kBytes));
  EXPECT_OK(Must(device.to_device().Mark()).Wait(no_poll));
  // In pieces, each from somewhere inside.
  for (size_t at = 0; at < kBytes; at += kBytes / 4) {
    EXPECT_OK(device.to_host().ToHost(target.data() + at, memory.address() + at, kBytes / 4));
  }
  EXPECT_OK(Must(device.to_host().Mark()).Wait(no_poll));
  EXPECT(std::equal(bytes.begin(), bytes.end(), target.data()));
  EXPECT(Cuda().pageable_copy_count() == 0);
  EXPECT_OK(device.to_host().ToHost(nullptr, memory.address(), 0));
  EXPECT_OK(device.to_device().ToDevice(memory.address(), nullptr, 0));
  EXPECT(Cuda().call_count("cuMemcpyDtoHAsync") == 4 && Cuda().call_count("cuMemcpyHtoDAsync") == 1);
}

void CopiesComeAfterWhatTheCallersStreamHolds(uint64_t stream) {
  Device& device = TheDevice();
  const Pages host;
  const Pinned pinned = Pinned::Register(device, host.bytes());
  const DeviceMemory memory;
  Cuda().stream_block(stream);
  Cuda().stream_add_work(stream, 0, memory.address(), 7, kBytes);
  EXPECT_OK(device.to_host().FollowCaller(stream));
  EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), kBytes));
  const CopyMark mark = Must(device.to_host().Mark());
  // The other direction does not follow, which shows that there was time enough.
  const DeviceMemory other;
  EXPECT_OK(device.to_device().ToDevice(other.address(), host.data(), 0));
  EXPECT_OK(Must(device.to_device().Mark()).Wait(no_poll));
  EXPECT(!Must(mark.IsComplete()));
  EXPECT(host.AllAre(std::byte{0}));
  Cuda().stream_unblock(stream);
  EXPECT_OK(mark.Wait(no_poll));
  EXPECT(Must(mark.IsComplete()));
  EXPECT(host.AllAre(std::byte{7}));
}

void CopiesComeAfterTheCallersWork() { CopiesComeAfterWhatTheCallersStreamHolds(Cuda().stream_new(0)); }

void CopiesComeAfterTheCallersWorkOnTheDefaultStream() { CopiesComeAfterWhatTheCallersStreamHolds(0); }

void OnlyWhatTheCallerHasGivenBeforeIsWaitedFor() {
  Device& device = TheDevice();
  const Pages host;
  const Pinned pinned = Pinned::Register(device, host.bytes());
  const DeviceMemory memory;
  const uint64_t stream = Cuda().stream_new(0);
  EXPECT_OK(device.to_host().FollowCaller(stream));
  Cuda().stream_synchronize(stream);
  Cuda().stream_block(stream);
  Cuda().stream_add_work(stream, 0, memory.address(), 7, kBytes);
  EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), kBytes));
  EXPECT_OK(Must(device.to_host().Mark()).Wait(no_poll));  // would never end
  EXPECT(host.AllAre(kFresh));
  Cuda().stream_unblock(stream);
  Cuda().stream_synchronize(stream);
}

void TheCallersStreamWaitsForCopiesAndNotItsThread(uint64_t stream) {
  Device& device = TheDevice();
  const Pages host;
  const Pinned pinned = Pinned::Register(device, host.bytes());
  const DeviceMemory memory;
  const DeviceMemory witness;
  Cuda().hold_copies(0);
  EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), kBytes));
  EXPECT_OK(device.to_host().HoldCaller(stream));
  Cuda().stream_add_work(stream, 0, memory.address(), 7, kBytes);  // the optimizer's step
  const uint64_t free_stream = Cuda().stream_new(0);
  Cuda().stream_add_work(free_stream, 1000, witness.address(), 9, kBytes);
  Cuda().stream_synchronize(free_stream);
  EXPECT(witness.AllAre(std::byte{9}));
  EXPECT(memory.AllAre(kFresh));
  Cuda().hold_copies(-1);
  Cuda().stream_synchronize(stream);
  EXPECT(memory.AllAre(std::byte{7}));
  EXPECT(host.AllAre(kFresh));
}

void TheCallersStepWaitsForItsCapture() { TheCallersStreamWaitsForCopiesAndNotItsThread(Cuda().stream_new(0)); }

void TheCallersStepOnTheDefaultStreamWaitsForItsCapture() { TheCallersStreamWaitsForCopiesAndNotItsThread(0); }

void TheCallersKernelsSeeWhatWasLoaded() {
  Device& device = TheDevice();
  const Pages host;
  const Pinned pinned = Pinned::Register(device, host.bytes());
  std::memset(host.data(), 5, kBytes);
  const DeviceMemory loaded;
  const DeviceMemory used;
  const uint64_t stream = Cuda().stream_new(0);
  Cuda().hold_copies(0);
  EXPECT_OK(device.to_device().ToDevice(loaded.address(), host.data(), kBytes));
  EXPECT_OK(device.to_device().HoldCaller(stream));
  Cuda().stream_add_copy(stream, 0, used.address(), loaded.address(), kBytes);
  Cuda().hold_copies(-1);
  Cuda().stream_synchronize(stream);
  EXPECT(used.AllAre(std::byte{5}));
}

void AMarkIsReachedWhenTheCopiesBeforeItHaveLanded() {
  Device& device = TheDevice();
  const Pages first;
  const Pages second;
  const Pinned pinned[] = {Pinned::Register(device, first.bytes()), Pinned::Register(device, second.bytes())};
  const DeviceMemory memory;
  Cuda().hold_copies(1);
  EXPECT_OK(device.to_host().ToHost(first.data(), memory.address(), kBytes));
  const CopyMark after_first = Must(device.to_host().Mark());
  EXPECT_OK(device.to_host().ToHost(second.data(), memory.address(), kBytes));
  const CopyMark after_second = Must(device.to_host().Mark());
  EXPECT_OK(after_first.Wait(no_poll));
  EXPECT(first.AllAre(kFresh) && second.AllAre(std::byte{0}));
  EXPECT(!Must(after_second.IsComplete()));
  Cuda().hold_copies(-1);
  EXPECT_OK(after_second.Wait(no_poll));
  EXPECT(second.AllAre(kFresh));
}

void AMarkThatIsMovedFromIsEmpty() {
  Device& device = TheDevice();
  CopyMark first = Must(device.to_host().Mark());
  CopyMark second = std::move(first);
  EXPECT(!first && second);  // NOLINT(bugprone-use-after-move): that is what is tested
  first = std::move(second);
  EXPECT(first && !second);  // NOLINT(bugprone-use-after-move)
  CopyMark& itself = first;
  first = std::move(itself);
  EXPECT(static_cast<bool>(first));
  EXPECT_OK(first.Wait(no_poll));
  first = CopyMark();
  EXPECT(!first);
  EXPECT(!CopyMark());
}

void EventsAreUsedAgain() {
  Device& device = TheDevice();
  const uint64_t stream = Cuda().stream_new(0);
  for (int i = 0; i < 100; ++i) {
    EXPECT_OK(device.to_host().FollowCaller(stream));
    EXPECT_OK(device.to_host().HoldCaller(stream));
    const CopyMark one = Must(device.to_host().Mark());
    const CopyMark other = Must(device.to_device().Mark());
    EXPECT_OK(one.Wait(no_poll));
  }
  EXPECT(Cuda().event_count() == 2);
}

void AnEventOfAMarkThatWasDroppedTooEarlyTellsTheNextMarkNothing() {
  Device& device = TheDevice();
  const Pages host;
  const Pinned pinned = Pinned::Register(device, host.bytes());
  const DeviceMemory memory;
  EXPECT(static_cast<bool>(Must(device.to_host().Mark())));
  Cuda().hold_copies(0);
  EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), kBytes));
  EXPECT(!Must(Must(device.to_host().Mark()).IsComplete()));  // dropped
  const CopyMark of_other = Must(device.to_device().Mark());
  EXPECT_OK(of_other.Wait(no_poll));
  const CopyMark mark = Must(device.to_host().Mark());
  EXPECT(!Must(mark.IsComplete()));
  Cuda().hold_copies(-1);
  EXPECT_OK(mark.Wait(no_poll));
}

void AWaitAsksWhetherToGoOnAndEndsWhenTold() {
  Device& device = TheDevice();
  const Pages host;
  const Pinned pinned = Pinned::Register(device, host.bytes());
  const DeviceMemory memory;
  Cuda().hold_copies(0);
  EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), kBytes));
  const CopyMark mark = Must(device.to_host().Mark());
  const auto started = Clock::now();
  int poll_count = 0;
  const Status status = mark.Wait([&]() -> Status {
    if (++poll_count < 3) return Status::Ok();
    return Status::Error(StatusCode::kCancelled, "enough");
  });
  EXPECT(status.code() == StatusCode::kCancelled && status.message() == "enough");
  EXPECT_WITH(SecondsSince(started) >= 0.15 && poll_count == 3, std::to_string(SecondsSince(started)));
  Cuda().hold_copies(-1);
  EXPECT_OK(mark.Wait([&]() -> Status { return Status::Error(StatusCode::kInternal, "asked too early"); }));
}

void TheAllocationOfAnAddressIsFound() {
  Device& device = TheDevice();
  const DeviceMemory memory;
  const auto [base, size_bytes] = Must(device.RangeOf(memory.address() + 4711));
  EXPECT(base == memory.address() && size_bytes == kBytes);
  const Status status = device.RangeOf(1).status();
  EXPECT(status.code() == StatusCode::kDeviceError);
}

// --- contexts and threads ---

void WhatWasCurrentBeforeIsSoAfterwards() {
  Cuda().reset(2);
  const CudaDriver& driver = *Must(CudaDriver::Get());
  CudaContext of_caller = nullptr;
  EXPECT(driver.DevicePrimaryCtxRetain(&of_caller, 1) == kCudaSuccess);
  EXPECT(driver.CtxPushCurrent(of_caller) == kCudaSuccess);
  {
    Device& device = TheDevice(0);
    const Pages host;
    const Pinned pinned = Pinned::Register(device, host.bytes());
    const DeviceMemory memory(0);
    EXPECT_OK(device.to_host().FollowCaller(0));
    EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), kBytes));
    EXPECT_OK(Must(device.to_host().Mark()).Wait(no_poll));
    EXPECT_OK(device.RangeOf(memory.address()).status());
    const ContextScope outer(device);
    const ContextScope inner(TheDevice(1));
    EXPECT(outer.status().ok() && inner.status().ok() && Cuda().context_depth() == 3);
  }
  EXPECT(Cuda().context_depth() == 1);
  CudaContext context = nullptr;
  EXPECT(driver.CtxPopCurrent(&context) == kCudaSuccess && context == of_caller);
}

void DevicesHaveContextsAndStreamsOfTheirOwnAndShareWhatIsPinned() {
  Cuda().reset(2);
  const Pages host;
  const Pinned pinned = Pinned::Register(TheDevice(0), host.bytes());
  const DeviceMemory memories[] = {DeviceMemory(0), DeviceMemory(1)};
  Cuda().stream_block(Cuda().default_stream(0));
  Cuda().stream_add_work(Cuda().default_stream(0), 0, memories[0].address(), 7, kBytes);
  EXPECT_OK(TheDevice(0).to_host().FollowCaller(0));
  EXPECT_OK(TheDevice(0).to_host().ToHost(host.data(), memories[0].address(), kBytes / 2));
  const CopyMark of_first = Must(TheDevice(0).to_host().Mark());
  // The other device's default stream is another one.
  EXPECT_OK(TheDevice(1).to_host().FollowCaller(0));
  EXPECT_OK(TheDevice(1).to_host().ToHost(host.data() + kBytes / 2, memories[1].address(), kBytes / 2));
  EXPECT_OK(Must(TheDevice(1).to_host().Mark()).Wait(no_poll));
  EXPECT(host.data()[kBytes - 1] == kFresh && host.data()[0] == std::byte{0});
  Cuda().stream_unblock(Cuda().default_stream(0));
  EXPECT_OK(of_first.Wait(no_poll));
  EXPECT(host.data()[0] == std::byte{7});
  EXPECT(Cuda().pageable_copy_count() == 0 && Cuda().stream_count() == 4);
}

void ThreadsShareADevice() {
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([i] {
      Device& device = TheDevice(0);
      const Pages host;
      const Pinned pinned = Pinned::Register(device, host.bytes());
      const DeviceMemory memory;
      for (int round = 0; round < 20; ++round) {
        const auto value = static_cast<std::byte>(16 * i + round % 16);
        std::memset(host.data(), static_cast<int>(value), kBytes);
        EXPECT_OK(device.to_device().ToDevice(memory.address(), host.data(), kBytes));
        EXPECT_OK(Must(device.to_device().Mark()).Wait(no_poll));
        std::memset(host.data(), 0, kBytes);
        EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), kBytes));
        EXPECT_OK(Must(device.to_host().Mark()).Wait(no_poll));
        EXPECT(host.AllAre(value));
      }
      EXPECT(Cuda().context_depth() == 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(Cuda().call_count("cuDevicePrimaryCtxRetain") == 1 && Cuda().stream_count() == 2);
  EXPECT(Cuda().event_count() <= kThreads);
}

// --- CUDA graphs ---

void AGraphThatTheApplicationCapturesMeanwhileIsNotBrokenInto() {
  const CudaDriver& driver = *Must(CudaDriver::Get());
  const uint64_t captured = Cuda().stream_new(0);
  Cuda().capture(captured, 1);  // as torch.cuda.graph does: all threads are forbidden to
  std::thread([] { EXPECT_OK(SaveAndLoad()); }).join();
  EXPECT_OK(SaveAndLoad());
  int mode = 0;
  EXPECT(driver.ThreadExchangeStreamCaptureMode(&mode) == kCudaSuccess && mode == 0);  // as it was
  {
    const ContextScope scope(TheDevice());
    int status = 0;
    EXPECT(driver.StreamIsCapturing(reinterpret_cast<CudaStream>(captured), &status) == kCudaSuccess && status == 1);
  }
  Cuda().capture(captured, 0);
}

void AStreamThatIsCapturedIsNeitherFollowedNorHeld() {
  Device& device = TheDevice();
  const uint64_t stream = Cuda().stream_new(0);
  Cuda().capture(stream, 1);
  for (const Status& status : {device.to_host().FollowCaller(stream), device.to_host().HoldCaller(stream)}) {
    EXPECT(status.code() == StatusCode::kUnsupported);
    EXPECT_WITH(Contains(status.message(), "CUDA graph"), status.message());
  }
  Cuda().capture(stream, 0);
  EXPECT_OK(device.to_host().FollowCaller(stream));
  EXPECT_OK(device.to_host().HoldCaller(stream));
}

void TheDefaultStreamIsNeitherFollowedNorHeldWhileAStreamItWaitsForIsCaptured() {
  Device& device = TheDevice();
  const CudaDriver& driver = *Must(CudaDriver::Get());
  CudaStream blocking = nullptr;
  {
    const ContextScope scope(device);
    EXPECT(driver.StreamCreate(&blocking, 0) == kCudaSuccess);
  }
  Cuda().capture(reinterpret_cast<uint64_t>(blocking), 1);
  EXPECT(device.to_host().FollowCaller(0).code() == StatusCode::kUnsupported);
  EXPECT(device.to_host().HoldCaller(0).code() == StatusCode::kUnsupported);
  Cuda().capture(reinterpret_cast<uint64_t>(blocking), 0);
  EXPECT_OK(device.to_host().FollowCaller(0));
}

void AScopeInsideOneOfTheSameDeviceMakesNoCalls() {
  Device& device = TheDevice();
  const ContextScope outer(device);
  const uint64_t call_count = Cuda().call_count("");
  {
    const ContextScope inner(device);
    EXPECT_OK(inner.status());
    EXPECT(Cuda().context_depth() == 1);
  }
  EXPECT(Cuda().call_count("") == call_count);
  EXPECT(Cuda().context_depth() == 1);
}

// --- pinned memory ---

void MemoryIsPinnedWhileItsRegistrationLives() {
  Device& device = TheDevice();
  const Pages memory(3 * kBytes);
  const auto first = memory.bytes().first(kBytes);
  const auto second = memory.bytes().subspan(kBytes, kBytes);
  {
    Pinned pinned = Pinned::Register(device, first);
    EXPECT(pinned.ok() && pinned.why_not().empty());
    EXPECT(Cuda().registered_bytes() == kBytes);
    Pinned moved = std::move(pinned);
    EXPECT(moved.ok() && !pinned.ok());  // NOLINT(bugprone-use-after-move): that is what is tested
    EXPECT(Cuda().registration_count() == 1);
    pinned = Pinned::Register(device, second);
    EXPECT(Cuda().registration_count() == 2);
    moved = std::move(pinned);  // the first is forgotten
    EXPECT(Cuda().registration_count() == 1 && moved.ok());
    Pinned& itself = moved;
    moved = std::move(itself);
    EXPECT(moved.ok());
    EXPECT(Pinned::Register(device, first).ok());
  }
  EXPECT(Cuda().registration_count() == 0);
  EXPECT(!Pinned().ok());
  EXPECT(!Pinned::Register(device, {}).ok());
}

void PinningThatIsRefusedSaysWhyAndCopiesGoOn() {
  Device& device = TheDevice();
  const rlimit small = {.rlim_cur = 65536, .rlim_max = 65536};
  setrlimit(RLIMIT_MEMLOCK, &small);
  Cuda().set_registration_limit(kBytes / 2);
  const Pages host;
  const Pinned pinned = Pinned::Register(device, host.bytes());
  EXPECT(!pinned.ok());
  for (const char* const part : {"CUDA_ERROR_OUT_OF_MEMORY", "2097152 bytes", "65536 bytes", "RLIMIT_MEMLOCK"}) {
    EXPECT_WITH(Contains(pinned.why_not(), part), pinned.why_not());
  }
  const DeviceMemory memory;
  EXPECT_OK(device.to_host().ToHost(host.data(), memory.address(), kBytes));
  EXPECT_OK(Must(device.to_host().Mark()).Wait(no_poll));
  EXPECT(host.AllAre(kFresh));
  EXPECT(Cuda().pageable_copy_count() == 1);
  // Less memory is not refused, and the message does not blame a limit that suffices.
  const Pages less(65536);
  EXPECT(Pinned::Register(device, less.bytes()).ok());
  Cuda().fail("cuMemHostRegister", 1, 2);
  EXPECT(!Contains(Pinned::Register(device, less.bytes()).why_not(), "RLIMIT_MEMLOCK"));
}

void MemoryThatIsPinnedAlreadyStaysSo() {
  Device& device = TheDevice();
  const Pages host;
  const Pinned pinned = Pinned::Register(device, host.bytes());
  EXPECT(Contains(Pinned::Register(device, host.bytes()).why_not(), "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"));
  EXPECT(Cuda().registration_count() == 1);
  Cuda().clear();  // to the double it is a violation
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  if (CudaDouble::FindLibrary().empty()) CudaDouble::Get();  // says so
  return Run(argc, argv,
             {
                 WITHOUT_DOUBLE(WithoutADriverTheReasonSaysWhatToDo),
                 WITHOUT_DOUBLE(ADriverWithoutACallThatIsNeededIsRefusedByTheCallsName),
                 WITH_DOUBLE(TheDriverIsInitialisedOnceAndKept),
                 WITH_DOUBLE(LookingWhetherThereIsADriverDoesNotInitialiseIt),
                 WITH_DOUBLE(ADriverThatIsTooOldIsRefusedUntilThereIsANewerOne),
                 WITH_DOUBLE(TheStubOfTheToolkitIsNamedByTheFirstCallThatItRefuses),
                 WITH_DOUBLE(ADriverThatDoesNotStartSaysWhyAndIsTriedAgain),
                 WITH_DOUBLE(ADeviceThatIsNotThereIsAnErrorThatCountsThoseThatAre),
                 WITH_DOUBLE(ADeviceIsMadeOnceWithOneContextAndTwoStreams),
                 WITH_DOUBLE(BytesGoToTheDeviceAndComeBack),
                 WITH_DOUBLE(CopiesComeAfterTheCallersWork),
                 WITH_DOUBLE(CopiesComeAfterTheCallersWorkOnTheDefaultStream),
                 WITH_DOUBLE(OnlyWhatTheCallerHasGivenBeforeIsWaitedFor),
                 WITH_DOUBLE(TheCallersStepWaitsForItsCapture),
                 WITH_DOUBLE(TheCallersStepOnTheDefaultStreamWaitsForItsCapture),
                 WITH_DOUBLE(TheCallersKernelsSeeWhatWasLoaded),
                 WITH_DOUBLE(AMarkIsReachedWhenTheCopiesBeforeItHaveLanded),
                 WITH_DOUBLE(AMarkThatIsMovedFromIsEmpty),
                 WITH_DOUBLE(EventsAreUsedAgain),
                 WITH_DOUBLE(AnEventOfAMarkThatWasDroppedTooEarlyTellsTheNextMarkNothing),
                 WITH_DOUBLE(AWaitAsksWhetherToGoOnAndEndsWhenTold),
                 WITH_DOUBLE(TheAllocationOfAnAddressIsFound),
                 WITH_DOUBLE(WhatWasCurrentBeforeIsSoAfterwards),
                 WITH_DOUBLE(DevicesHaveContextsAndStreamsOfTheirOwnAndShareWhatIsPinned),
                 WITH_DOUBLE(ThreadsShareADevice),
                 WITH_DOUBLE(AGraphThatTheApplicationCapturesMeanwhileIsNotBrokenInto),
                 WITH_DOUBLE(AStreamThatIsCapturedIsNeitherFollowedNorHeld),
                 WITH_DOUBLE(TheDefaultStreamIsNeitherFollowedNorHeldWhileAStreamItWaitsForIsCaptured),
                 WITH_DOUBLE(AScopeInsideOneOfTheSameDeviceMakesNoCalls),
                 WITH_DOUBLE(MemoryIsPinnedWhileItsRegistrationLives),
                 WITH_DOUBLE(PinningThatIsRefusedSaysWhyAndCopiesGoOn),
                 WITH_DOUBLE(MemoryThatIsPinnedAlreadyStaysSo),
             });
}
