// The kernel that copies rows (device/row_kernel.h), over the driver's double, which checks what it is given and copies
// by itself: only a GPU runs the kernel's text (tests/gpu/test_gpu_rows.py).
#include "device/row_kernel.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "testing_device.h"

namespace fastpersist {
namespace {

// A pinned table of random bytes, and what to copy of it.
class Rows {
 public:
  explicit Rows(uint32_t row_bytes) : row_bytes_(row_bytes), count_(static_cast<int32_t>(kBytes / row_bytes)) {
    const Bytes bytes = RandomBytes(kBytes, row_bytes);
    std::ranges::copy(bytes, table_.data());
  }

  const std::byte* table() const { return table_.data(); }
  int32_t count() const { return count_; }

  // Copy every third row, the last one to the first place.
  Status StartReversed(const RowKernel& kernel, uint64_t stream, CudaAddress target) {
    rows_.clear();
    for (int32_t row = 0; row < count_; row += 3) rows_.push_back(row);
    std::vector<int32_t> places(rows_.size());
    std::iota(places.rbegin(), places.rend(), 0);
    auto* const pinned = reinterpret_cast<int32_t*>(indices_.data());
    std::ranges::copy(rows_, pinned);
    std::ranges::copy(places, pinned + rows_.size());
    return kernel.Start(stream, table(), target, {pinned, rows_.size()}, pinned + rows_.size());
  }
  bool AreReversedAt(CudaAddress target) const {
    Bytes found(rows_.size() * row_bytes_);
    EXPECT(Cuda().read(target, found.data(), found.size()) == 0);
    for (size_t i = 0; i < rows_.size(); ++i) {
      const std::byte* const row = table() + (static_cast<size_t>(rows_[rows_.size() - 1 - i]) * row_bytes_);
      if (std::memcmp(found.data() + (i * row_bytes_), row, row_bytes_) != 0) return false;
    }
    return true;
  }

 private:
  const uint32_t row_bytes_;
  const int32_t count_;
  const Pages table_;
  const Pages indices_{2 * kBytes};
  const Pinned pinned_table_ = Pinned::Register(TheDevice(), table_.bytes());
  const Pinned pinned_indices_ = Pinned::Register(TheDevice(), indices_.bytes());
  std::vector<int32_t> rows_;
};

void RowsComeToTheirPlacesInTheOrderOfTheStream() {
  for (const uint32_t row_bytes : {4, 8, 12, 16, 1000, 1024, 4096}) {
    Rows rows(row_bytes);
    const RowKernel kernel = Must(RowKernel::Load(TheDevice(), row_bytes));
    const DeviceMemory target;
    const uint64_t stream = Cuda().stream_new(0);
    Cuda().stream_block(stream);
    Cuda().stream_add_work(stream, 0, target.address(), 7, kBytes);
    EXPECT_OK(rows.StartReversed(kernel, stream, target.address()));
    EXPECT(target.AllAre(kFresh));
    Cuda().stream_unblock(stream);
    Cuda().stream_synchronize(stream);
    EXPECT_WITH(rows.AreReversedAt(target.address()), std::to_string(row_bytes));
    Cuda().stream_free(stream);
  }
  EXPECT(Cuda().call_count("cuModuleLoadData") == 1 && Cuda().call_count("cuLaunchKernel") == 7);
}

void NoRowsAreNoWork() {
  const RowKernel kernel = Must(RowKernel::Load(TheDevice(), 16));
  EXPECT_OK(kernel.Start(Cuda().stream_new(0), nullptr, 0, {}, nullptr));
  EXPECT(Cuda().call_count("cuLaunchKernel") == 0);
}

void EachDeviceHasAKernelOfItsOwn() {
  Cuda().reset(2);
  for (const int ordinal : {1, 0, 1}) {
    const RowKernel kernel = Must(RowKernel::Load(TheDevice(ordinal), 64));
    Rows rows(64);
    const DeviceMemory target(ordinal);
    const uint64_t stream = Cuda().stream_new(ordinal);
    EXPECT_OK(rows.StartReversed(kernel, stream, target.address()));
    Cuda().stream_synchronize(stream);
    EXPECT(rows.AreReversedAt(target.address()));
  }
  EXPECT(Cuda().call_count("cuModuleLoadData") == 2);
}

void ADeviceThatDoesNotReadHostMemoryHasNone() {
  Cuda().set_reads_host_pointers(0);
  const Status status = RowKernel::Load(TheDevice(), 64).status();
  EXPECT(status.code() == StatusCode::kUnsupported);
  EXPECT_WITH(Contains(status.message(), "cuda:0 does not read"), status.message());
}

void AKernelThatTheDriverDoesNotCompileIsNotTriedAgain() {
  Cuda().fail("cuModuleLoadData", 1, 221);
  for (int i = 0; i < 2; ++i) {
    const Status status = RowKernel::Load(TheDevice(), 64).status();
    EXPECT_WITH(status.code() == StatusCode::kDeviceError && Contains(status.message(), "cuModuleLoadData"),
                status.message());
  }
  EXPECT(Cuda().call_count("cuModuleLoadData") == 1);
}

void AWaitEndsWhenTheStreamHasDoneItsWork() {
  const RowKernel kernel = Must(RowKernel::Load(TheDevice(), 64));
  Rows rows(64);
  const DeviceMemory target;
  const uint64_t stream = Cuda().stream_new(0);
  Cuda().stream_add_work(stream, 20'000, target.address(), 7, kBytes);
  EXPECT_OK(rows.StartReversed(kernel, stream, target.address()));
  EXPECT_OK(kernel.Wait(stream));
  EXPECT(rows.AreReversedAt(target.address()));
  Cuda().fail("cuStreamSynchronize", 1, 702);
  EXPECT(kernel.Wait(stream).code() == StatusCode::kDeviceError);
  Cuda().clear();
}

void ALaunchMayFailAndTheNextOneSucceed() {
  const RowKernel kernel = Must(RowKernel::Load(TheDevice(), 64));
  Rows rows(64);
  const DeviceMemory target;
  const uint64_t stream = Cuda().stream_new(0);
  Cuda().fail("cuLaunchKernel", 1, 701);
  const Status refused = rows.StartReversed(kernel, stream, target.address());
  EXPECT_WITH(refused.code() == StatusCode::kDeviceError && Contains(refused.message(), "cuda:0"), refused.message());
  EXPECT_OK(rows.StartReversed(kernel, stream, target.address()));
  Cuda().stream_synchronize(stream);
  EXPECT(rows.AreReversedAt(target.address()));
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  if (CudaDouble::FindLibrary().empty()) CudaDouble::Get();  // says so
  return Run(argc, argv,
             {WITH_DOUBLE(RowsComeToTheirPlacesInTheOrderOfTheStream), WITH_DOUBLE(NoRowsAreNoWork),
              WITH_DOUBLE(EachDeviceHasAKernelOfItsOwn), WITH_DOUBLE(ADeviceThatDoesNotReadHostMemoryHasNone),
              WITH_DOUBLE(AKernelThatTheDriverDoesNotCompileIsNotTriedAgain),
              WITH_DOUBLE(AWaitEndsWhenTheStreamHasDoneItsWork), WITH_DOUBLE(ALaunchMayFailAndTheNextOneSucceed)});
}
