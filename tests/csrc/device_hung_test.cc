// Hung streams of a device, as behind a collective whose peer is gone: a transfer gives up in time, nobody reuses
// memory before the device has completed its copies, and the transfers of others go on.
#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "core/arena.h"
#include "core/buffer_pool.h"
#include "core/quarantine.h"
#include "testing_device.h"
#include "transfer/file_reader.h"
#include "transfer/file_writer.h"
#include "transfer/snapshot.h"

namespace fastpersist {
namespace {

constexpr size_t kChunkBytes = 64 << 10;
constexpr size_t kBufferCount = 4;
constexpr auto kGrace = std::chrono::milliseconds(300);
constexpr double kInTime_s = 5;  // on a busy machine; what hangs takes for ever
constexpr auto kLate = std::byte{7};

Status PeerIsGone() { return Status::Error(StatusCode::kCancelled, "a peer is gone"); }

// A stream of the application that hangs until the test releases it. Only then it writes kLate to the memory.
class StoppedStream {
 public:
  explicit StoppedStream(const DeviceMemory& memory) : stream_(Cuda().stream_new(0)) {
    Grace::Set(kGrace);
    Cuda().stream_block(stream_);
    Cuda().stream_add_work(stream_, 0, memory.address(), static_cast<int>(kLate), kBytes);
  }
  ~StoppedStream() { GoOn(); }
  StoppedStream(const StoppedStream&) = delete;
  StoppedStream& operator=(const StoppedStream&) = delete;

  uint64_t stream() const { return stream_; }
  void GoOn() const {
    Cuda().stream_unblock(stream_);
    Cuda().synchronize();
  }

 private:
  const uint64_t stream_;
};

std::unique_ptr<BufferPool> Pool() { return Must(BufferPool::Create(kBufferCount, kChunkBytes)); }

std::unique_ptr<FileWriter> Writer(const ScratchFile& file, BufferPool& pool, const std::function<Status()>& poll) {
  TransferCallbacks callbacks;
  if (poll) callbacks.poll = [poll](uint64_t) { return poll(); };
  return Must(FileWriter::Open(file.fd(), file.path(), {.engines = {"threads-buffered"}, .queue_depth = 4, .poll = {}},
                               pool, std::move(callbacks)));
}

PieceList OfDevice(const DeviceMemory& memory, uint64_t size_bytes = kBytes) {
  PieceList pieces;
  pieces.AddDevice(TheDevice(), memory.address(), size_bytes, PieceList::kNoCrc);
  return pieces;
}

Status Write(BufferPool& pool, const PieceList& pieces, const std::function<Status()>& poll = {}) {
  const ScratchFile file("hung");
  const auto writer = Writer(file, pool, poll);
  FP_RETURN_IF_ERROR(writer->Append(pieces));
  return writer->Finish();
}

Status WriteHostBytes(BufferPool& pool) {
  const ScratchFile file("host");
  const Bytes content = RandomBytes(3 * kBufferCount * kChunkBytes, 1);
  PieceList pieces;
  pieces.AddMemory(content.data(), content.size(), PieceList::kNoCrc);
  {
    const auto writer = Writer(file, pool, {});
    FP_RETURN_IF_ERROR(writer->Append(pieces));
    FP_RETURN_IF_ERROR(writer->Finish());
  }
  EXPECT(file.Content() == content);
  return Status::Ok();
}

// Fails a transfer of the device's memory, which leaves its buffers in quarantine.
void QuarantineBuffers(BufferPool& pool, const DeviceMemory& memory, const StoppedStream& stopped) {
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped.stream()));
  const auto start = Clock::now();
  const Status status = Write(pool, OfDevice(memory), PeerIsGone);
  EXPECT_WITH(status.code() == StatusCode::kCancelled && status.message() == "a peer is gone", status.message());
  EXPECT(SecondsSince(start) < kInTime_s);
  EXPECT(pool.quarantined_count() > 0);
}

void AWriterIsEndedInTimeAndOthersWriteWithoutItsBuffers() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  QuarantineBuffers(*pool, memory, stopped);
  EXPECT(pool->quarantined_count() == kBufferCount && pool->free_count() == 0);
  EXPECT_OK(WriteHostBytes(*pool));
  EXPECT(pool->quarantined_count() == kBufferCount && pool->free_count() == 0);
  stopped.GoOn();
  EXPECT_OK(WriteHostBytes(*pool));
  EXPECT(pool->quarantined_count() == 0);
  EXPECT(pool->free_count() == kBufferCount);
  EXPECT_OK(Write(*pool, OfDevice(memory)));
  EXPECT(Cuda().pageable_copy_count() == 0);  // the pinned buffers of the ring are back
}

void NobodyGetsABufferToWhichTheDeviceStillCopies() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  QuarantineBuffers(*pool, memory, stopped);
  auto share = Must(BufferShare::Join(*pool, no_poll));
  std::vector<std::byte*> mine;
  while (std::byte* const buffer = share.Take()) mine.push_back(buffer);
  EXPECT(mine.size() == BufferPool::kBuffersPerTransfer);
  for (std::byte* const buffer : mine) std::memset(buffer, 3, kChunkBytes);
  stopped.GoOn();
  for (std::byte* const buffer : mine) {
    EXPECT(std::all_of(buffer, buffer + kChunkBytes, [](std::byte byte) { return byte == std::byte{3}; }));
    share.Put(buffer);
  }
}

void TheDeviceTakesNoCopiesUntilItHasEndedThose() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  QuarantineBuffers(*pool, memory, stopped);
  const size_t quarantined_count = pool->quarantined_count();
  const uint64_t other = Cuda().stream_new(0);
  for (int again = 0; again < 3; ++again) {
    const auto start = Clock::now();
    const Status status = Write(*pool, OfDevice(memory));
    EXPECT_WITH(status.code() == StatusCode::kDeviceError && Contains(status.message(), "cuda:0") &&
                    Contains(status.message(), "stands still"),
                status.message());
    EXPECT(TheDevice().to_host().FollowCaller(other).code() == StatusCode::kDeviceError);
    EXPECT(TheDevice().to_host().HoldCaller(other).code() == StatusCode::kDeviceError);
    EXPECT(SecondsSince(start) < kInTime_s);
  }
  EXPECT(pool->quarantined_count() == quarantined_count);
  EXPECT_OK(TheDevice().to_device().FollowCaller(other));  // loads are another stream
  stopped.GoOn();
  EXPECT_OK(TheDevice().to_host().FollowCaller(other));
  const ScratchFile file("after");
  {
    const auto writer = Writer(file, *pool, {});
    EXPECT_OK(writer->Append(OfDevice(memory)));
    EXPECT_OK(writer->Finish());
  }
  EXPECT(file.Content() == Bytes(kBytes, kLate));
}

void OthersJoinWhileATransferWaitsForTheDevice() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped.stream()));
  std::atomic<int> ended_count{0};
  std::thread stuck([&] {
    EXPECT_OK(Write(*pool, OfDevice(memory)));
    ++ended_count;
  });
  Cuda().wait_for_queued_copies(kBufferCount, 20'000);  // it has the whole ring
  for (int again = 0; again < 3; ++again) EXPECT_OK(WriteHostBytes(*pool));
  EXPECT(ended_count == 0);
  EXPECT(pool->quarantined_count() == 0);
  stopped.GoOn();
  stuck.join();
  EXPECT_OK(WriteHostBytes(*pool));
  EXPECT(pool->free_count() == kBufferCount);  // and not one more
}

void ARingThatIsGoneStaysMappedAndPinnedUntilTheDeviceHasEnded() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  {
    const auto pool = Pool();
    QuarantineBuffers(*pool, memory, stopped);
  }
  EXPECT(ReleaseComplete() == 1);
  EXPECT(Cuda().registration_count() == 1);
  stopped.GoOn();
  EXPECT(ReleaseComplete() == 0);
  EXPECT(Cuda().registration_count() == 0);
}

void ManySmallPiecesDoNotFillTheStream() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped.stream()));
  PieceList pieces;
  for (int i = 0; i < 2'000; ++i) pieces.AddDevice(TheDevice(), memory.address() + 512, 16, PieceList::kNoCrc);
  const Status status = Write(*pool, pieces, PeerIsGone);
  EXPECT_WITH(status.code() == StatusCode::kCancelled, status.message());
  EXPECT(Cuda().queued_copy_count() < 1000);  // a driver takes about a thousand, and waits by itself then
  stopped.GoOn();
}

void MemoryThatIsNotPinnedIsNotWaitedForInTheDriver() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  Cuda().set_registration_limit(0);
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped.stream()));
  const Status status = Write(*pool, OfDevice(memory), PeerIsGone);
  EXPECT_WITH(status.code() == StatusCode::kCancelled, status.message());
  EXPECT(Cuda().queued_copy_count() == 0);
  EXPECT(pool->quarantined_count() == 0);
  EXPECT(pool->free_count() == kBufferCount);
}

void WithoutMarksTheWholeStreamIsWaitedFor() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped.stream()));
  Cuda().fail("cuEventRecord", 0, 1);
  const Status status = Write(*pool, OfDevice(memory));
  EXPECT_WITH(status.code() == StatusCode::kDeviceError && Contains(status.message(), "marking"), status.message());
  EXPECT(pool->quarantined_count() == 1);
  Cuda().stream_unblock(stopped.stream());
  Cuda().synchronize();
  EXPECT_OK(WriteHostBytes(*pool));
  EXPECT(pool->quarantined_count() == 0);
}

void AnErrorOfTheQueryAloneGivesNoBufferBack() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped.stream()));
  Cuda().fail("cuEventQuery", 0, 1);
  EXPECT(Write(*pool, OfDevice(memory)).code() == StatusCode::kDeviceError);
  EXPECT(pool->quarantined_count() > 0);
  stopped.GoOn();
  EXPECT_OK(WriteHostBytes(*pool));
  EXPECT(pool->quarantined_count() == 0);
}

void ASnapshotIsClosedInTimeAndItsArenaKeepsItsRoom() {
  constexpr uint64_t kLimitBytes = 3 * Arena::kBlockBytes;
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped.stream()));
  const auto arena = std::make_shared<Arena>(kLimitBytes);
  {
    Snapshot snapshot(arena);
    snapshot.Add(TheDevice(), memory.address(), kBytes, SourceKind::kVolatile);
    EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, true, no_poll));
    const auto start = Clock::now();
    EXPECT(snapshot.Take(0, 0, kChunkBytes, PeerIsGone).status().code() == StatusCode::kCancelled);
    snapshot.Close();
    EXPECT(SecondsSince(start) < kInTime_s);
  }
  const auto quarantined_bytes = [&] {
    const std::lock_guard lock(arena->mutex());
    return arena->quarantined_bytes();
  };
  EXPECT(quarantined_bytes() == Arena::kBlockBytes);
  const auto save_of_cpu_tensors = [&] {
    Bytes source = RandomBytes(kLimitBytes, 2);
    const Bytes as_saved = source;
    Snapshot snapshot(arena);
    snapshot.Add(source.data(), source.size(), SourceKind::kVolatile);
    EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, false, no_poll));
    EXPECT(snapshot.counts().copied_bytes[static_cast<size_t>(SourceKind::kVolatile)] == kLimitBytes);
    std::fill(source.begin(), source.end(), std::byte{0});
    if (quarantined_bytes() > 0) stopped.GoOn();  // the late copies change nothing here
    for (uint64_t at = 0; at < source.size();) {
      const Snapshot::Taken taken = Must(snapshot.Take(0, at, kChunkBytes, no_poll));
      EXPECT(std::memcmp(taken.host_bytes().data(), as_saved.data() + at, taken.size_bytes) == 0);
      at += taken.size_bytes;
      snapshot.EndLease();
    }
  };
  save_of_cpu_tensors();
  save_of_cpu_tensors();
  EXPECT(quarantined_bytes() == 0);
  const std::lock_guard lock(arena->mutex());
  EXPECT(arena->used_bytes() == 0);
  EXPECT(arena->mapped_bytes() < kLimitBytes + Arena::kBlockBytes);
}

void AnArenaThatIsGoneStaysMappedUntilTheDeviceHasEnded() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped.stream()));
  {
    Snapshot snapshot(std::make_shared<Arena>(Arena::kBlockBytes));
    snapshot.Add(TheDevice(), memory.address(), kBytes, SourceKind::kVolatile);
    EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, true, no_poll));
  }
  EXPECT(ReleaseComplete() == 1);
  EXPECT(Cuda().registration_count() == 1);
  stopped.GoOn();
  EXPECT(ReleaseComplete() == 0);
}

// Nobody else checks the quarantine: the process may have no arena and no device any more.
void TheNextTransferLetsGoOfWhatTheDeviceHasEndedMeanwhile() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped.stream()));
  {
    Snapshot snapshot(std::make_shared<Arena>(Arena::kBlockBytes));
    snapshot.Add(TheDevice(), memory.address(), kBytes, SourceKind::kVolatile);
    EXPECT_OK(snapshot.Capture(SourceKind::kVolatile, true, no_poll));
  }
  EXPECT_OK(WriteHostBytes(*pool));
  EXPECT(Cuda().registration_count() == 1);
  stopped.GoOn();
  EXPECT_OK(WriteHostBytes(*pool));
  EXPECT(Cuda().registration_count() == 0);
}

// A barrier on a device that was given up: the save fails, and the training goes on.
void AGateOfADeviceThatStandsStillFailsTheSaveAndWaitsForNothing() {
  const DeviceMemory memory;
  const StoppedStream stopped(memory);
  const auto pool = Pool();
  QuarantineBuffers(*pool, memory, stopped);
  Snapshot snapshot(std::make_shared<Arena>(4 * Arena::kBlockBytes));
  snapshot.Add(TheDevice(), memory.address(), kBytes, SourceKind::kStable);
  EXPECT_OK(snapshot.Capture(SourceKind::kStable, true, no_poll));
  EXPECT(snapshot.HoldCaller(TheDevice(), Cuda().stream_new(0)));
  EXPECT(snapshot.Take(0, 0, kChunkBytes, no_poll).status().code() == StatusCode::kDeviceError);
  stopped.GoOn();
}

void AReaderKeepsTheDestinationsUntilTheDeviceHasWrittenThere() {
  const DeviceMemory memory;
  const DeviceMemory target;
  const StoppedStream stopped(memory);
  const ScratchFile file("read", Bytes(kBytes, std::byte{9}));
  const auto pool = Pool();
  EXPECT_OK(TheDevice().to_device().FollowCaller(stopped.stream()));
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> destinations = owner;
  {
    TransferCallbacks callbacks;
    callbacks.destinations = std::exchange(owner, nullptr);
    callbacks.poll = [](uint64_t) { return PeerIsGone(); };
    const auto reader =
        Must(FileReader::Open(file.fd(), file.path(), {.engines = {"threads-buffered"}, .queue_depth = 4, .poll = {}},
                              *pool, std::move(callbacks)));
    const std::vector<ReadExtent> extents = {{.size_bytes = kBytes,
                                              .target = ReadExtent::Target::kDevice,
                                              .device = &TheDevice(),
                                              .device_address = target.address()}};
    const auto start = Clock::now();
    EXPECT(reader->Read(extents).status().code() == StatusCode::kCancelled);
    EXPECT(SecondsSince(start) < kInTime_s);
    EXPECT(reader->Read(extents).status().code() == StatusCode::kDeviceError);
  }
  EXPECT(!destinations.expired());
  EXPECT(pool->quarantined_count() > 0);
  EXPECT(target.AllAre(kFresh));
  EXPECT_OK(WriteHostBytes(*pool));
  stopped.GoOn();
  EXPECT(!destinations.expired());
  EXPECT_OK(WriteHostBytes(*pool));
  EXPECT(destinations.expired());
  EXPECT(pool->quarantined_count() == 0);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(
      argc, argv,
      {WITH_DOUBLE(AWriterIsEndedInTimeAndOthersWriteWithoutItsBuffers),
       WITH_DOUBLE(NobodyGetsABufferToWhichTheDeviceStillCopies),
       WITH_DOUBLE(TheDeviceTakesNoCopiesUntilItHasEndedThose), WITH_DOUBLE(OthersJoinWhileATransferWaitsForTheDevice),
       WITH_DOUBLE(ARingThatIsGoneStaysMappedAndPinnedUntilTheDeviceHasEnded),
       WITH_DOUBLE(ManySmallPiecesDoNotFillTheStream), WITH_DOUBLE(MemoryThatIsNotPinnedIsNotWaitedForInTheDriver),
       WITH_DOUBLE(WithoutMarksTheWholeStreamIsWaitedFor), WITH_DOUBLE(AnErrorOfTheQueryAloneGivesNoBufferBack),
       WITH_DOUBLE(ASnapshotIsClosedInTimeAndItsArenaKeepsItsRoom),
       WITH_DOUBLE(AnArenaThatIsGoneStaysMappedUntilTheDeviceHasEnded),
       WITH_DOUBLE(TheNextTransferLetsGoOfWhatTheDeviceHasEndedMeanwhile),
       WITH_DOUBLE(AGateOfADeviceThatStandsStillFailsTheSaveAndWaitsForNothing),
       WITH_DOUBLE(AReaderKeepsTheDestinationsUntilTheDeviceHasWrittenThere)});
}
