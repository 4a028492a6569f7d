// The common part of the tests of the CUDA driver and its devices: memory of both sides, over the double of the driver
// (tests/support/cuda_double), and child processes, since the product keeps the driver and its devices as long as the
// process lives.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <span>
#include <string>

#include "core/memory.h"
#include "core/pinned_cache.h"
#include "cuda_double.h"
#include "device/device.h"
#include "testing.h"

namespace fastpersist {

inline const CudaDouble& Cuda() { return CudaDouble::Get(); }

constexpr size_t kBytes = size_t{2} << 20;
constexpr auto kFresh = std::byte{0xAB};  // what memory of the device holds at first

// Pages of the host, as the ring's.
class Pages {
 public:
  explicit Pages(size_t size_bytes = kBytes) : bytes_(MapBuffers(size_bytes), size_bytes) {}
  ~Pages() { munmap(bytes_.data(), bytes_.size()); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  std::byte* data() const { return bytes_.data(); }
  bool AllAre(std::byte value) const {
    return std::all_of(bytes_.begin(), bytes_.end(), [&](std::byte byte) { return byte == value; });
  }

 private:
  std::span<std::byte> bytes_;
};

// A range of the device's memory, at first filled with one value.
class DeviceMemory {
 public:
  explicit DeviceMemory(int device = 0) : address_(Cuda().alloc_on(device, kBytes)) {}
  ~DeviceMemory() { Cuda().free(address_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  CudaAddress address() const { return address_; }
  bool AllAre(std::byte value) const {
    Bytes bytes(kBytes);
    EXPECT(Cuda().read(address_, bytes.data(), kBytes) == 0);
    return std::all_of(bytes.begin(), bytes.end(), [&](std::byte byte) { return byte == value; });
  }

 private:
  const uint64_t address_;
};

inline Device& TheDevice(int ordinal = 0) { return *Must(Device::Get(ordinal)); }

inline const std::function<Status()> no_poll;

inline void ExpectNothingLeft() {
  EXPECT_WITH(Cuda().violation_count() == 0, Cuda().Violations());
  EXPECT(Cuda().context_depth() == 0);
  EmptyPinnedCache();
  EXPECT(Cuda().registration_count() == 0);
}

// The answer of a child process, which begins in the state of this one; -1: it, or one of its checks, failed.
inline int InChild(const std::function<int()>& function) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const int failure_count = g_failure_count;
    const int answer = function();
    std::fflush(stdout);
    // At once: the double's threads run, and the leak checker needs all threads at rest.
    std::_Exit(g_failure_count == failure_count ? answer : 99);
  }
  int ending = 0;
  waitpid(child, &ending, 0);
  return WIFEXITED(ending) && WEXITSTATUS(ending) != 99 ? WEXITSTATUS(ending) : -1;
}

template <void (*kTest)()>
void WithoutDouble() {
  EXPECT(InChild([] {
           kTest();
           return 0;
         }) == 0);
}

template <void (*kTest)()>
void WithDouble() {
  const int answer = InChild([] {
    Cuda().reset(1);
    kTest();
    ExpectNothingLeft();
    return 0;
  });
  EXPECT(answer == 0);
}

// All calls of a save and a load; the tests check the results of the steps afterwards.
inline Status SaveAndLoad(std::string* why_not_pinned = nullptr) {
  Result<Device*> device = Device::Get(0);
  if (!device.ok()) return device.status();
  const Pages host;
  const DeviceMemory memory;
  const uint64_t stream = Cuda().stream_new(0);
  const Pinned pinned = Pinned::Register(*device.value(), host.bytes());
  if (why_not_pinned != nullptr) *why_not_pinned = pinned.why_not();
  CopyStream& to_host = device.value()->to_host();
  CopyStream& to_device = device.value()->to_device();
  const auto transfer = [&]() -> Status {
    Cuda().stream_add_work(stream, 0, memory.address(), 7, kBytes);
    FP_RETURN_IF_ERROR(device.value()->RangeOf(memory.address()).status());
    FP_RETURN_IF_ERROR(to_host.FollowCaller(stream));
    FP_RETURN_IF_ERROR(to_host.ToHost(host.data(), memory.address(), kBytes));
    FP_RETURN_IF_ERROR(to_host.HoldCaller(stream));
    Result<CopyMark> captured = to_host.Mark();
    if (!captured.ok()) return captured.status();
    FP_RETURN_IF_ERROR(captured.value().Wait(no_poll));
    EXPECT(host.AllAre(std::byte{7}));
    std::memset(host.data(), 8, kBytes);
    FP_RETURN_IF_ERROR(to_device.ToDevice(memory.address(), host.data(), kBytes));
    Result<CopyMark> loaded = to_device.Mark();
    if (!loaded.ok()) return loaded.status();
    FP_RETURN_IF_ERROR(loaded.value().Wait(no_poll));
    EXPECT(memory.AllAre(std::byte{8}));
    return Status::Ok();
  };
  const Status status = transfer();
  Cuda().synchronize();  // what an error left behind still has its memory
  return status;
}

}  // namespace fastpersist

#ifdef __SANITIZE_THREAD__
// These processes end without a last check of violations.
extern "C" const char* __tsan_default_options() { return "halt_on_error=1"; }  // NOLINT: its name is given
#endif

#define WITHOUT_DOUBLE(function) \
  ::fastpersist::Test { #function, ::fastpersist::WithoutDouble<::fastpersist::function> }
#define WITH_DOUBLE(function) \
  ::fastpersist::Test { #function, ::fastpersist::WithDouble<::fastpersist::function> }
