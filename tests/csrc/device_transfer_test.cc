// Snapshot, writer and reader with sources and targets in a device's memory, over the double of the driver: threads
// that capture, write and abandon at once, and a training that overwrites everything as soon as it may. For the
// sanitizers.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "core/arena.h"
#include "core/buffer_pool.h"
#include "core/crc32.h"
#include "core/pinned_cache.h"
#include "cuda_double.h"
#include "device/device.h"
#include "testing.h"
#include "transfer/capture_core.h"
#include "transfer/file_reader.h"
#include "transfer/file_writer.h"
#include "transfer/snapshot.h"

namespace fastpersist {
namespace {

constexpr size_t kChunkBytes = 64 << 10;
constexpr uint8_t kOverwritten = 0xDB;
const Snapshot::Poll kNoPoll;

std::unique_ptr<FileWriter> OpenWriter(const ScratchFile& file, BufferPool& pool) {
  return Must(FileWriter::Open(file.fd(), file.path(), {.engines = {"threads-buffered"}, .queue_depth = 4, .poll = {}},
                               pool, {}));
}

// Tensors in one allocation, each on a multiple of 512 bytes as torch's allocator places them, and their content.
struct DeviceTensors {
  DeviceTensors(const std::vector<size_t>& sizes, uint64_t seed) {
    const CudaDouble& cuda = CudaDouble::Get();
    size_t total_bytes = 0;
    for (const size_t size : sizes) {
      addresses.push_back(total_bytes);
      total_bytes += (size + 511) / 512 * 512;
    }
    base = cuda.alloc_on(0, total_bytes + 1);
    for (size_t i = 0; i < sizes.size(); ++i) {
      addresses[i] += base;
      contents.push_back(RandomBytes(sizes[i], seed + i));
      if (sizes[i] > 0) EXPECT(cuda.write(addresses[i], contents[i].data(), sizes[i]) == 0);
    }
  }
  ~DeviceTensors() { CudaDouble::Get().free(base); }
  DeviceTensors(const DeviceTensors&) = delete;
  DeviceTensors& operator=(const DeviceTensors&) = delete;

  // The work of a training step, in its stream.
  void Overwrite(uint64_t stream) const {
    for (size_t i = 0; i < addresses.size(); ++i) {
      if (!contents[i].empty()) {
        CudaDouble::Get().stream_add_work(stream, 0, addresses[i], kOverwritten, contents[i].size());
      }
    }
  }

  uint64_t base = 0;
  std::vector<uint64_t> addresses;
  std::vector<Bytes> contents;
};

std::vector<size_t> RandomSizes(std::mt19937_64& random, size_t count) {
  std::vector<size_t> sizes;
  for (size_t i = 0; i < count; ++i) {
    const size_t limits[] = {1, 700, 9000, 5 * kChunkBytes};
    sizes.push_back(random() % limits[random() % 4]);
  }
  return sizes;
}

void EveryByteIsThatOfTheSaveWhoeverIsFirst() {
  const CudaDouble& cuda = CudaDouble::Get();
  Device& device = *Must(Device::Get(0));
  const uint64_t stream = cuda.stream_new(0);
  std::mt19937_64 random(1);
  for (int round = 0; round < 24; ++round) {
    const auto pool = Must(BufferPool::Create(4, kChunkBytes));
    const size_t room_bytes[] = {0, Arena::kBlockBytes, 4 * Arena::kBlockBytes, size_t{64} << 20};
    const auto arena = std::make_shared<Arena>(room_bytes[round % 4]);
    const ScratchFile file("device");
    DeviceTensors on_device(RandomSizes(random, 40), random());
    std::vector<Bytes> on_host;
    const auto snapshot = std::make_shared<Snapshot>(arena);
    PieceList pieces;
    Bytes expected;
    cuda.delay_us(static_cast<int>(random() % 60));
    EXPECT_OK(device.to_host().FollowCaller(stream));
    on_host.reserve(on_device.addresses.size());
    for (size_t i = 0; i < on_device.addresses.size(); ++i) {
      const SourceKind kind = random() % 3 == 0 ? SourceKind::kVolatile : SourceKind::kStable;
      const Bytes& content = on_device.contents[i];
      pieces.AddBytes("between");
      uint32_t source = snapshot->Add(device, on_device.addresses[i], content.size(), kind);
      pieces.AddCaptured(snapshot, source, content.size(), source);
      pieces.AddCrc(source);
      for (const char c : std::string("between")) expected.push_back(static_cast<std::byte>(c));
      expected.insert(expected.end(), content.begin(), content.end());
      const uint32_t crc = Crc32(0, content.data(), content.size());
      for (int k = 0; k < 4; ++k) expected.push_back(static_cast<std::byte>(crc >> (8 * k)));
      on_host.push_back(RandomBytes(random() % 3000, random()));
      source = snapshot->Add(on_host.back().data(), on_host.back().size(), SourceKind::kStable);
      pieces.AddCaptured(snapshot, source, on_host.back().size(), source);
      expected.insert(expected.end(), on_host.back().begin(), on_host.back().end());
    }
    EXPECT_OK(snapshot->Capture(SourceKind::kVolatile, /*wait=*/false, kNoPoll));
    std::thread gate([&] {
      if (round % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      EXPECT_OK(snapshot->Capture(SourceKind::kStable, true, kNoPoll));
      EXPECT_OK(snapshot->Capture(SourceKind::kVolatile, true, kNoPoll));
      snapshot->HoldCaller(device, stream);
      on_device.Overwrite(stream);
      for (Bytes& bytes : on_host) std::fill(bytes.begin(), bytes.end(), std::byte{kOverwritten});
    });
    const auto writer = OpenWriter(file, *pool);
    EXPECT_OK(writer->Append(pieces));
    EXPECT_OK(writer->Finish());
    gate.join();
    while (!Must(snapshot->AreCopiesComplete())) std::this_thread::sleep_for(std::chrono::microseconds(20));
    const Bytes content = file.Content();
    EXPECT(content.size() >= expected.size() && std::equal(expected.begin(), expected.end(), content.begin()));
    const auto runs = writer->runs();
    EXPECT(runs.has_value());
    const auto crc = FileWriter::CombineRuns(runs.value_or(std::vector<FileWriter::Run>()), expected.size());
    EXPECT(crc == std::optional(Crc32(0, expected.data(), expected.size())));
    snapshot->Close();
    cuda.stream_synchronize(stream);  // the tensors are overwritten, and then freed
    const std::lock_guard lock(arena->mutex());
    EXPECT(arena->used_bytes() == 0);
  }
}

// Close() during copies returns memory to which nobody writes any more.
void AbandonedTransfersLeaveNothingOnTheWay() {
  const CudaDouble& cuda = CudaDouble::Get();
  Device& device = *Must(Device::Get(0));
  std::mt19937_64 random(2);
  for (int round = 0; round < 24; ++round) {
    const auto pool = Must(BufferPool::Create(4, kChunkBytes));
    const auto arena = std::make_shared<Arena>(8 * Arena::kBlockBytes);
    const ScratchFile file("device");
    DeviceTensors tensors(RandomSizes(random, 60), random());
    const auto snapshot = std::make_shared<Snapshot>(arena);
    PieceList pieces;
    for (size_t i = 0; i < tensors.addresses.size(); ++i) {
      const auto source = snapshot->Add(device, tensors.addresses[i], tensors.contents[i].size(), SourceKind::kStable);
      pieces.AddCaptured(snapshot, source, tensors.contents[i].size(), source);
    }
    cuda.delay_us(200);
    std::atomic<bool> writer_is_done = false;
    std::thread writing([&] {
      const auto writer = OpenWriter(file, *pool);
      (void)writer->Append(pieces);
      writer_is_done = true;
    });
    std::thread gate([&] { (void)snapshot->Capture(SourceKind::kStable, true, kNoPoll); });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
    snapshot->Close();
    gate.join();
    writing.join();
    EXPECT(writer_is_done);
    EXPECT(pool->free_count() == 4);
    const std::lock_guard lock(arena->mutex());
    EXPECT(arena->used_bytes() == 0);
  }
}

// Each copy in turn fails; the writer gets the error, the barrier does not, and all memory comes back.
void AFailedCopyFailsTheWriterAlone() {
  const CudaDouble& cuda = CudaDouble::Get();
  Device& device = *Must(Device::Get(0));
  int failure_count = 0;
  Grace::Set(std::chrono::milliseconds(20));  // of a device that is broken nobody hears that a copy has ended
  for (int nth = 1; nth < 200; ++nth) {
    const auto pool = Must(BufferPool::Create(4, kChunkBytes));
    const auto arena = std::make_shared<Arena>(size_t{64} << 20);
    const ScratchFile file("device");
    DeviceTensors tensors({100, 200, 3 * kChunkBytes, 7, 300 << 10, 5000}, 3);
    const auto snapshot = std::make_shared<Snapshot>(arena);
    PieceList pieces;
    for (size_t i = 0; i < tensors.addresses.size(); ++i) {
      const auto source = snapshot->Add(device, tensors.addresses[i], tensors.contents[i].size(), SourceKind::kStable);
      pieces.AddCaptured(snapshot, source, tensors.contents[i].size(), source);
    }
    if (nth % 2 == 0) {
      cuda.fail_async("MemcpyDtoHAsync", nth / 2, 1);
    } else {
      cuda.fail("MemcpyDtoHAsync", nth / 2 + 1, 1);
    }
    if (nth % 4 < 2) EXPECT_OK(snapshot->Capture(SourceKind::kStable, true, kNoPoll));
    {
      const auto writer = OpenWriter(file, *pool);
      const Status status = writer->Append(pieces);
      EXPECT(status.ok() || status.code() == StatusCode::kDeviceError);
      failure_count += status.ok() ? 0 : 1;
    }
    snapshot->Close();
    cuda.clear();
    EXPECT(pool->free_count() + pool->quarantined_count() == 4);
    const std::lock_guard lock(arena->mutex());
    EXPECT(arena->used_bytes() == 0);
  }
  Grace::Set(Grace::kDefault);
  EXPECT_WITH(failure_count > 8 && failure_count < 199, std::to_string(failure_count));
}

// A device takes some thousand copies before it blocks the thread that starts them: so one copy has 64 MiB, not one
// block.
void EveryCaptureTakesAsFewCopies() {
  const CudaDouble& cuda = CudaDouble::Get();
  Device& device = *Must(Device::Get(0));
  constexpr uint64_t kSourceBytes = 192 << 20;
  EmptyPinnedCache();  // those of other tests are in smaller pieces
  const uint64_t address = cuda.alloc_on(0, kSourceBytes);
  const auto arena = std::make_shared<Arena>(uint64_t{256} << 20);
  for (int save = 0; save < 3; ++save) {
    Snapshot snapshot(arena);
    snapshot.Add(device, address, kSourceBytes, SourceKind::kStable);
    const uint64_t before = cuda.call_count("cuMemcpyDtoHAsync_v2");
    EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
    const uint64_t copy_count = cuda.call_count("cuMemcpyDtoHAsync_v2") - before;
    EXPECT_WITH(copy_count <= 4, std::to_string(copy_count) + " copies");
    for (uint64_t done = 0; done < kSourceBytes;) {  // the blocks come back in the order of the file
      auto taken = snapshot.Take(0, done, kChunkBytes, kNoPoll);
      if (!taken.ok()) break;
      done += taken.value().size_bytes;
      snapshot.EndLease();
    }
    snapshot.Close();
  }
  cuda.free(address);
}

// As in torch's pool of small tensors: allocations of 2 MiB that touch, the first with another owner's bytes in it.
void SmallTensorsAreGatheredInEachAllocation() {
  const CudaDouble& cuda = CudaDouble::Get();
  Device& device = *Must(Device::Get(0));
  constexpr uint64_t kTensorBytes = 16 << 10;
  constexpr uint64_t kAllocationBytes = 2 << 20;
  constexpr int kAllocationCount = 8;
  const auto arena = std::make_shared<Arena>(uint64_t{64} << 20);
  Snapshot snapshot(arena);
  for (int allocation = 0; allocation < kAllocationCount; ++allocation) {
    const uint64_t base = cuda.alloc_on(0, kAllocationBytes - 1);  // the next one begins a byte behind its end
    for (uint64_t at = allocation == 0 ? 4 * kTensorBytes : 0; at + kTensorBytes < kAllocationBytes;
         at += kTensorBytes) {
      snapshot.Add(device, base + at, kTensorBytes, SourceKind::kStable);
    }
  }
  const uint64_t before = cuda.call_count("cuMemcpyDtoHAsync_v2");
  EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, kNoPoll));
  const uint64_t copy_count = cuda.call_count("cuMemcpyDtoHAsync_v2") - before;
  EXPECT_WITH(copy_count == kAllocationCount, std::to_string(copy_count) + " copies");
  snapshot.Close();
}

// The writer awaits a copy into a block, which meanwhile takes another copy and is full.
void ACopyBehindAMarkIsAwaitedToo() {
  const CudaDouble& cuda = CudaDouble::Get();
  Device& device = *Must(Device::Get(0));
  constexpr uint64_t kTensorBytes = 4096;
  const uint64_t first = cuda.alloc_on(0, 2 * kTensorBytes);
  const uint64_t second = cuda.alloc_on(0, 2 * kTensorBytes);
  const auto arena = std::make_shared<Arena>(uint64_t{8} << 20);
  std::unique_lock lock(arena->mutex());
  CaptureCore core(*arena);
  for (const uint64_t address : {first, second, second + kTensorBytes, first + kTensorBytes}) {
    core.Add(address, kTensorBytes, SourceKind::kStable, &device);
  }
  using Next = CaptureCore::Next;
  CaptureCore::CaptureRun capture;
  const auto copy_pair = [&] {
    EXPECT(core.NextOf(capture, lock) == Next::kCopy && capture.copy.sources.size() == 2);
    EXPECT_OK(device.to_host().ToHost(capture.copy.target, capture.copy.from, capture.copy.size_bytes));
    core.EndCopy(capture.copy, Status::Ok());
  };
  const auto take = [&](CaptureCore::TakeRun& run) { return core.NextOf(run, std::chrono::steady_clock::now(), lock); };
  cuda.hold_copies(1);
  copy_pair();
  CaptureCore::TakeRun from_first;
  from_first.max_bytes = kTensorBytes;
  EXPECT(take(from_first) == Next::kAwait);
  copy_pair();
  EXPECT(core.NextOf(capture, lock) == Next::kEnd);
  core.End(capture);
  EXPECT_OK(from_first.mark->Wait(kNoPoll));
  EXPECT(take(from_first) == Next::kEnd && from_first.taken.has_value());
  core.EndLease();
  CaptureCore::TakeRun from_second;
  from_second.source = 1;
  from_second.max_bytes = kTensorBytes;
  EXPECT(take(from_second) == Next::kAwait);
  cuda.hold_copies(-1);
  if (from_second.mark != nullptr) EXPECT_OK(from_second.mark->Wait(kNoPoll));
  if (!from_second.taken.has_value() || from_second.stage == CaptureCore::TakeRun::Stage::kCompleting)
    take(from_second);
  core.EndLease();
  core.Close();
  core.ReleaseAll();
  cuda.synchronize();
  while (CapturedBlocks::Block* const block = core.TakeIncomplete()) core.Return(block, nullptr);
  cuda.free(first);
  cuda.free(second);
}

// The writer drops the only bytes of a block while the device still copies them there.
void ABlockOfDroppedBytesAwaitsTheirCopy() {
  const CudaDouble& cuda = CudaDouble::Get();
  Device& device = *Must(Device::Get(0));
  constexpr uint64_t kTensorBytes = 4096;
  const uint64_t tensor = cuda.alloc_on(0, kTensorBytes);
  const auto arena = std::make_shared<Arena>(uint64_t{8} << 20);
  std::unique_lock lock(arena->mutex());
  CaptureCore core(*arena);
  core.Add(tensor, kTensorBytes, SourceKind::kStable, &device);
  cuda.hold_copies(1);
  CaptureCore::CaptureRun capture;
  EXPECT(core.NextOf(capture, lock) == CaptureCore::Next::kCopy);
  EXPECT_OK(device.to_host().ToHost(capture.copy.target, capture.copy.from, capture.copy.size_bytes));
  core.EndCopy(capture.copy, Status::Ok());
  core.Narrow(0, kTensorBytes, kTensorBytes);
  EXPECT(core.NextOf(capture, lock) == CaptureCore::Next::kEnd);
  core.End(capture);
  EXPECT(arena->used_bytes() == Arena::kBlockBytes);  // else another save would take it under the copy
  cuda.hold_copies(-1);
  core.Close();
  core.ReleaseAll();
  cuda.synchronize();
  while (CapturedBlocks::Block* const block = core.TakeIncomplete()) core.Return(block, nullptr);
  EXPECT(arena->used_bytes() == 0);
  cuda.free(tensor);
}

void WhatIsReadComesToTheDevice() {
  const CudaDouble& cuda = CudaDouble::Get();
  Device& device = *Must(Device::Get(0));
  std::mt19937_64 random(4);
  for (int round = 0; round < 12; ++round) {
    const auto pool = Must(BufferPool::Create(4, kChunkBytes));
    const Bytes content = RandomBytes(40 * kChunkBytes + random() % 5000, random());
    const ScratchFile file("device");
    EXPECT(pwrite(file.fd(), content.data(), content.size(), 0) == static_cast<ssize_t>(content.size()));
    const uint64_t target = cuda.alloc_on(0, content.size());
    std::vector<ReadExtent> extents;
    for (uint64_t at = 0; at < content.size();) {
      const uint64_t limits[] = {200, 30'000, 400'000};
      const uint64_t size = std::min<uint64_t>(content.size() - at, 1 + random() % limits[random() % 3]);
      extents.push_back({.offset_bytes = at,
                         .size_bytes = size,
                         .target = ReadExtent::Target::kDevice,
                         .device = &device,
                         .device_address = target + at,
                         .with_crc = round % 2 == 0});
      at += size;
    }
    cuda.delay_us(static_cast<int>(random() % 40));
    {
      const auto reader = Must(FileReader::Open(
          file.fd(), file.path(),
          {.engines = {round % 3 == 0 ? "threads-buffered" : "threads"}, .queue_depth = 4, .poll = {}}, *pool, {}));
      const std::vector<uint32_t> crcs = Must(reader->Read(extents));
      for (size_t i = 0; i < extents.size() && round % 2 == 0; ++i) {
        EXPECT(crcs[i] == Crc32(0, content.data() + extents[i].offset_bytes, extents[i].size_bytes));
      }
    }
    Bytes found(content.size());
    EXPECT(cuda.read(target, found.data(), found.size()) == 0);
    EXPECT(found == content);
    EXPECT(pool->free_count() == 4);
    cuda.free(target);
  }
}

void NothingWasMisused() {
  const CudaDouble& cuda = CudaDouble::Get();
  for (int i = 0; i < cuda.violation_count(); ++i) EXPECT_WITH(false, cuda.violation(i));
  EXPECT(cuda.context_depth() == 0);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  CudaDouble::Get().reset(1);
  return Run(
      argc, argv,
      {TEST(EveryByteIsThatOfTheSaveWhoeverIsFirst), TEST(AbandonedTransfersLeaveNothingOnTheWay),
       TEST(WhatIsReadComesToTheDevice), TEST(EveryCaptureTakesAsFewCopies),
       TEST(SmallTensorsAreGatheredInEachAllocation), TEST(ACopyBehindAMarkIsAwaitedToo),
       TEST(ABlockOfDroppedBytesAwaitsTheirCopy), TEST(NothingWasMisused), TEST(AFailedCopyFailsTheWriterAlone)});
}
