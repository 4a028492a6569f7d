#include "transfer/device_ring.h"

#include <algorithm>
#include <span>

#include "core/quarantine.h"

namespace fastpersist {
namespace {

CudaAddress AddressOf(const std::byte* buffer) { return reinterpret_cast<CudaAddress>(buffer); }

}  // namespace

Status DeviceRing::WaitFor(CopyStream& stream) {
  Result<CopyMark> mark = stream.Mark();
  Status status = mark.ok() ? mark.value().Wait(poll_) : mark.status();
  if (status.ok()) return status;
  const CopyEnd end(stream);
  if (!Grace().WaitFor(std::span(&end, 1))) {
    ReleaseWhenComplete({Grace::GiveUp({end})},
                        [bounce = std::exchange(bounce_, nullptr), destinations = destinations_] {});
  }
  return status;
}

// The host memory here is not pinned: a copy into a busy stream blocks inside the driver, where nothing can end the
// wait.
Status DeviceRing::AwaitRoom(CopyStream& stream, bool with_host) { return stream.AwaitRoom(!with_host, poll_); }

Status DeviceRing::PutHost(std::byte* buffer, const std::byte* source, size_t size_bytes) {
  FP_RETURN_IF_ERROR(AwaitRoom(device_.to_host(), /*with_host=*/true));
  return device_.to_host().ToDevice(AddressOf(buffer), source, size_bytes);
}

Status DeviceRing::PutDevice(std::byte* buffer, Device& from, CudaAddress source, size_t size_bytes) {
  if (&from == &device_) {
    FP_RETURN_IF_ERROR(AwaitRoom(device_.to_host(), /*with_host=*/false));
    return device_.to_host().Within(AddressOf(buffer), source, size_bytes);
  }
  std::byte* const bounce = Bounce(size_bytes);
  FP_RETURN_IF_ERROR(AwaitRoom(from.to_host(), /*with_host=*/true));
  FP_RETURN_IF_ERROR(from.to_host().ToHost(bounce, source, size_bytes));
  FP_RETURN_IF_ERROR(WaitFor(from.to_host()));
  FP_RETURN_IF_ERROR(PutHost(buffer, bounce, size_bytes));
  return Wait();
}

Status DeviceRing::PutZeros(std::byte* buffer, size_t size_bytes) {
  FP_RETURN_IF_ERROR(AwaitRoom(device_.to_host(), /*with_host=*/false));
  return device_.to_host().Zero(AddressOf(buffer), size_bytes);
}

Status DeviceRing::TakeHost(std::byte* target, const std::byte* buffer, size_t size_bytes) {
  FP_RETURN_IF_ERROR(AwaitRoom(device_.to_host(), /*with_host=*/true));
  FP_RETURN_IF_ERROR(device_.to_host().ToHost(target, AddressOf(buffer), size_bytes));
  return Wait();
}

Status DeviceRing::TakeDevice(Device& to, CudaAddress target, const std::byte* buffer, size_t size_bytes) {
  if (&to == &device_) {
    FP_RETURN_IF_ERROR(AwaitRoom(device_.to_device(), /*with_host=*/false));
    return device_.to_device().Within(target, AddressOf(buffer), size_bytes);
  }
  std::byte* const bounce = Bounce(size_bytes);
  FP_RETURN_IF_ERROR(TakeHost(bounce, buffer, size_bytes));
  FP_RETURN_IF_ERROR(AwaitRoom(to.to_device(), /*with_host=*/true));
  FP_RETURN_IF_ERROR(to.to_device().ToDevice(target, bounce, size_bytes));
  return WaitFor(to.to_device());
}

std::byte* DeviceRing::Bounce(size_t size_bytes) {
  if (bounce_ == nullptr) bounce_ = std::make_shared<std::vector<std::byte>>();
  bounce_->resize(std::max(bounce_->size(), size_bytes));
  return bounce_->data();
}

Status DeviceRing::Wait() { return WaitFor(device_.to_host()); }

}  // namespace fastpersist
