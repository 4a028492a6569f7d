// Reads and writes of a file with device memory (transfer/random_access.h): by many threads, beside those of the host,
// with a failing device, and with one that hangs when the file is closed.
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "core/quarantine.h"
#include "testing_device.h"
#include "transfer/edge_lock.h"
#include "transfer/random_access.h"

namespace fastpersist {
namespace {

constexpr auto kLong = std::chrono::milliseconds(60000);
constexpr uint64_t kChunkBytes = 16 << 10;
constexpr uint32_t kQueueDepth = 8;
constexpr double kInTime_s = 8;  // on a busy machine; what hangs takes for ever

// A file, opened as TensorFile opens it. Its end waits for all requests.
class OpenFile {
 public:
  explicit OpenFile(const std::string& path, const std::string& engine = "threads", uint32_t queue_depth = kQueueDepth)
      : OpenFile(path, std::vector<std::string>{engine, "threads-buffered"}, queue_depth) {}
  OpenFile(const std::string& path, const std::vector<std::string>& engines, uint32_t queue_depth = kQueueDepth)
      : path_(path),
        file_(Must(RandomAccess::Open({.fd = Open(),
                                       .buffered_fd = Open(),
                                       .direct_lock_fd = Open(),
                                       .edge_lock_fd = Open(),
                                       .path = path,
                                       .engines = engines,
                                       .edge_engines = {"threads-buffered"},
                                       .queue_depth = queue_depth,
                                       .thread_count = 2,
                                       .chunk_bytes = kChunkBytes}))) {}
  ~OpenFile() {
    Close();
    for (const int fd : fds_) close(fd);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  RandomAccess* operator->() { return file_.get(); }
  void Close() { file_.reset(); }

  std::shared_ptr<FileRequest> Submit(IoOp op, FilePart part, std::shared_ptr<const void> memory = nullptr) {
    std::shared_ptr<FileRequest> request = file_->Begin(op);
    request->Keep(std::move(memory));
    file_->Add(request, {part});
    file_->End(request);
    return request;
  }
  static FilePart OnDevice(CudaAddress address, uint64_t size_bytes, uint64_t offset_bytes, int device = 0) {
    return {reinterpret_cast<std::byte*>(address), size_bytes, offset_bytes, &TheDevice(device)};
  }

 private:
  int Open() {
    fds_.push_back(open(path_.c_str(), O_RDWR | O_CLOEXEC));
    return fds_.back();
  }

  const std::string path_;
  std::vector<int> fds_;
  std::unique_ptr<RandomAccess> file_;
};

bool Well(const std::shared_ptr<FileRequest>& request) {
  return EXPECT(request->WaitFor(kLong)) && EXPECT_WITH(request->status().ok(), request->status().message());
}

// Each thread has its own range of the file and of both memories.
void RequestsOfManyThreadsAndBothMemories() {
  constexpr size_t kThreads = 4;
  constexpr size_t kShare = kBytes / kThreads;
  const Bytes content = RandomBytes(kBytes, 1);
  const ScratchFile scratch("threads", content);
  const DeviceMemory memory;
  OpenFile file(scratch.path());
  std::vector<std::thread> threads;
  std::atomic<int> failure_count{0};
  for (size_t number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937_64 random(number);
      Bytes host(kShare);
      const uint64_t caller = Cuda().stream_new(0);
      for (int round = 0; round < 25; ++round) {
        const uint64_t size = 1 + random() % (kShare / 3);
        const uint64_t at = number * kShare + random() % (kShare - size + 1);
        const auto read_host = file.Submit(IoOp::kRead, {host.data(), size, at});
        if (!TheDevice().to_device().FollowCaller(caller).ok()) ++failure_count;
        const auto read = file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address() + at, size, at));
        if (!Well(read_host) || !Well(read) || read->done_bytes() != size) ++failure_count;
        Bytes seen(size);
        if (Cuda().read(memory.address() + at, seen.data(), size) != 0) ++failure_count;
        if (std::memcmp(seen.data(), content.data() + at, size) != 0 ||
            !std::equal(seen.begin(), seen.end(), host.begin()))
          ++failure_count;
        if (!TheDevice().to_host().FollowCaller(caller).ok()) ++failure_count;
        if (!Well(file.Submit(IoOp::kWrite, OpenFile::OnDevice(memory.address() + at, size, at)))) ++failure_count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(failure_count == 0);
  file.Close();
  EXPECT(scratch.Content() == content);
  EXPECT(Cuda().pageable_copy_count() == 0);
}

void WhicheverCallFailsEveryRequestEndsAndTheNextWorks() {
  const Bytes content = RandomBytes(20 * kChunkBytes, 2);
  const ScratchFile scratch("nth", content);
  const DeviceMemory memory;
  Grace::Set(std::chrono::milliseconds(300));
  OpenFile file(scratch.path());
  EXPECT(Well(file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address(), content.size(), 0))));  // pins
  for (const char* const call : {"cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery", "cuCtxPushCurrent_v2"}) {
    for (int nth = 1; nth <= 12; ++nth) {
      Cuda().fail(call, nth, 1);
      const auto read = file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address(), content.size(), 0));
      EXPECT(read->WaitFor(kLong));
      EXPECT_WITH(read->status().ok() || read->status().code() == StatusCode::kDeviceError, read->status().message());
      EXPECT(nth > 1 || !read->status().ok());
      Cuda().clear();
      EXPECT(Well(file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address(), content.size(), 0))));
    }
  }
}

void ClosingLeavesMemoryAloneThatTheDeviceMayStillTouch() {
  const Bytes content = RandomBytes(20 * kChunkBytes, 3);
  const ScratchFile scratch("closing", content);
  const DeviceMemory memory;
  Grace::Set(std::chrono::milliseconds(300));
  const uint64_t stopped = Cuda().stream_new(0);
  Cuda().stream_block(stopped);
  Cuda().stream_add_work(stopped, 0, memory.address(), 7, kBytes);
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> kept = owner;
  EXPECT_OK(TheDevice().to_device().FollowCaller(stopped));
  std::shared_ptr<FileRequest> late;
  {
    OpenFile file(scratch.path());
    late = file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address(), content.size(), 0),
                       std::exchange(owner, nullptr));
    Cuda().wait_for_queued_copies(2, 20'000);
    const auto start = Clock::now();
    file.Close();
    EXPECT(SecondsSince(start) < kInTime_s);
  }
  EXPECT(late->done());
  EXPECT_WITH(late->status().code() == StatusCode::kDeviceError && Contains(late->status().message(), "cuda:0"),
              late->status().message());
  late->Drop();
  EXPECT(!kept.expired());
  EXPECT(memory.AllAre(kFresh));
  EXPECT(Cuda().registration_count() == 1);  // staging
  Cuda().stream_unblock(stopped);
  Cuda().synchronize();
  EXPECT(ReleaseComplete() == 0);
  EXPECT(kept.expired());
  EXPECT(Cuda().registration_count() == 0);
  OpenFile file(scratch.path());
  EXPECT(Well(file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address(), content.size(), 0))));
  Bytes seen(content.size());
  EXPECT(Cuda().read(memory.address(), seen.data(), seen.size()) == 0);
  EXPECT(seen == content);
}

// A slow disk is no hung device: requests in flight end normally when the file is closed.
void ClosingWaitsForTheDiskHoweverLongItTakes() {
  const Bytes content(20 * kChunkBytes, kFresh);
  const ScratchFile scratch("slow", Bytes(20 * kChunkBytes));
  const DeviceMemory memory;
  Grace::Set(std::chrono::milliseconds(50));
  const Fault fault(Fault::Delay(60));
  OpenFile file(scratch.path(), "fault:threads-buffered");
  const auto write = file.Submit(IoOp::kWrite, OpenFile::OnDevice(memory.address(), content.size(), 0));
  file.Close();
  EXPECT(Well(write));
  EXPECT(scratch.Content() == content);
}

// The pump breaks while copies wait for room in a stream: an engine fails, and the next one cannot be created.
void WhatWaitsForADeviceEndsThoughTheFileIsOfNoUseAnyMore() {
  const Bytes content = RandomBytes(kChunkBytes, 4);
  const ScratchFile scratch("broken", content);
  const DeviceMemory memory;
  const DeviceMemory source;
  const uint64_t stopped = Cuda().stream_new(0);
  Cuda().set_registration_limit(0);  // a stream has room for one copy then
  Cuda().stream_block(stopped);
  Cuda().stream_add_work(stopped, 0, memory.address(), 7, kBytes);
  EXPECT_OK(TheDevice().to_device().FollowCaller(stopped));
  EXPECT_OK(TheDevice().to_host().FollowCaller(stopped));
  OpenFile file(scratch.path(), std::vector<std::string>{"fault:threads-buffered", "missing-buffered"});
  const auto read = file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address(), content.size(), 0));
  const auto write = file.Submit(IoOp::kWrite, OpenFile::OnDevice(source.address(), content.size(), 0));
  const uint64_t look_count = Cuda().call_count("cuStreamQuery");
  EXPECT(Cuda().wait_for_calls("cuStreamQuery", look_count + 20, 20'000) == 1);  // of both lanes
  {
    const Fault fault(Fault::Errno(EINVAL, 1, Fault::kAll));
    Bytes host(content.size());
    const auto failed = file.Submit(IoOp::kRead, {host.data(), host.size(), 0});
    EXPECT(failed->WaitFor(kLong) && !failed->status().ok());
  }
  EXPECT(!read->done() && !write->done());
  Cuda().stream_unblock(stopped);
  EXPECT(read->WaitFor(kLong / 3) && read->status().ok());
  EXPECT(write->WaitFor(kLong / 3) && !write->status().ok());
  Bytes seen(content.size());
  EXPECT(Cuda().read(memory.address(), seen.data(), seen.size()) == 0);
  EXPECT(seen == content);
  file.Close();
  EXPECT(scratch.Content() == content);
}

// A write waits with its first piece for its turn in the file, and fails in the second: then it waits for nothing.
void AWriteThatFailsGivesItsTurnInTheFileAway() {
  const ScratchFile scratch("turn", Bytes(2 * kChunkBytes));
  const DeviceMemory memory;
  const int fds[] = {open(scratch.path().c_str(), O_RDWR | O_CLOEXEC),
                     open(scratch.path().c_str(), O_RDWR | O_CLOEXEC)};
  EdgeLock others(fds[0], scratch.path());
  EdgeLock next(fds[1], scratch.path());
  if (EdgeLock::Works(fds[0])) {
    OpenFile file(scratch.path(), "threads-buffered");
    EXPECT(Must(others.TryEnter(/*alone=*/false)));
    Cuda().set_registration_limit(0);  // so that the copies come one after the other
    Cuda().set_pageable_waits(0);
    Cuda().delay_us(20'000);
    Cuda().fail("cuMemcpyDtoHAsync_v2", 2, 1);
    const auto write = file.Submit(IoOp::kWrite, OpenFile::OnDevice(memory.address(), 2 * kChunkBytes, 0));
    EXPECT(write->WaitFor(kLong) && write->status().code() == StatusCode::kDeviceError);
    const auto start = Clock::now();
    EXPECT_OK(next.Enter(/*alone=*/false));
    EXPECT(SecondsSince(start) < kInTime_s);
    next.Leave();
    others.Leave();
    Cuda().clear();
    EXPECT(Well(file.Submit(IoOp::kWrite, OpenFile::OnDevice(memory.address(), 2 * kChunkBytes, 0))));
  }
  for (const int fd : fds) close(fd);
}

// A caller that gets the end of the file trusts the bytes before it.
void TheEndOfTheFileHidesNoCopyThatFailed() {
  const Bytes content = RandomBytes(kChunkBytes + 512, 5);
  const ScratchFile scratch("end", content);
  const DeviceMemory memory;
  const uint64_t stopped = Cuda().stream_new(0);
  Cuda().set_registration_limit(0);  // a stream has room for one copy then
  Cuda().stream_block(stopped);
  Cuda().stream_add_work(stopped, 0, memory.address() + kBytes / 2, 7, 1);
  EXPECT_OK(TheDevice().to_device().FollowCaller(stopped));
  OpenFile file(scratch.path(), "threads-buffered");
  const auto read = file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address(), 3 * kChunkBytes, 0));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the end is met
  EXPECT(!read->done());
  Cuda().fail("cuMemcpyHtoDAsync_v2", 1, 1);
  Cuda().stream_unblock(stopped);
  EXPECT(read->WaitFor(kLong));
  EXPECT_WITH(read->status().code() == StatusCode::kDeviceError, read->status().message());
  const auto again = file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address(), 3 * kChunkBytes, 0));
  EXPECT(again->WaitFor(kLong) && again->done_bytes() == content.size());
  EXPECT_WITH(again->status().code() == StatusCode::kEndOfFile, again->status().message());
}

void OneDirectionHoldsUpNoOtherHoweverShortTheQueueIs() {
  const Bytes content = RandomBytes(4 * kChunkBytes, 6);
  const DeviceMemory memory;
  const DeviceMemory source;
  for (const uint32_t queue_depth : {1, 2, 3}) {
    const ScratchFile scratch("short", content);
    const uint64_t stopped = Cuda().stream_new(0);
    Cuda().stream_block(stopped);
    Cuda().stream_add_work(stopped, 0, source.address(), 7, kBytes);
    EXPECT_OK(TheDevice().to_host().FollowCaller(stopped));
    OpenFile file(scratch.path(), "threads", queue_depth);
    const auto write = file.Submit(IoOp::kWrite, OpenFile::OnDevice(source.address(), content.size(), content.size()));
    EXPECT(Cuda().wait_for_queued_copies(1, 20'000) == 1);
    const auto read = file.Submit(IoOp::kRead, OpenFile::OnDevice(memory.address(), content.size(), 0));
    EXPECT_WITH(read->WaitFor(kLong / 6) && !write->done(), std::to_string(queue_depth));
    Cuda().stream_unblock(stopped);
    EXPECT(Well(read) && Well(write));
  }
}

// As WithDouble, but the process keeps one mapping that the device knows.
template <void (*kTest)()>
void OverDouble() {
  EXPECT(InChild([] {
           Cuda().reset(1);
           kTest();
           EXPECT_WITH(Cuda().violation_count() == 0, Cuda().Violations());
           EXPECT(Cuda().context_depth() == 0);
           EXPECT(Cuda().registration_count() <= 1);
           return 0;
         }) == 0);
}

}  // namespace
}  // namespace fastpersist

#define OVER_DOUBLE(function) \
  ::fastpersist::Test { #function, ::fastpersist::OverDouble<::fastpersist::function> }

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {OVER_DOUBLE(RequestsOfManyThreadsAndBothMemories),
              OVER_DOUBLE(WhicheverCallFailsEveryRequestEndsAndTheNextWorks),
              OVER_DOUBLE(ClosingLeavesMemoryAloneThatTheDeviceMayStillTouch),
              OVER_DOUBLE(ClosingWaitsForTheDiskHoweverLongItTakes),
              OVER_DOUBLE(WhatWaitsForADeviceEndsThoughTheFileIsOfNoUseAnyMore),
              OVER_DOUBLE(AWriteThatFailsGivesItsTurnInTheFileAway), OVER_DOUBLE(TheEndOfTheFileHidesNoCopyThatFailed),
              OVER_DOUBLE(OneDirectionHoldsUpNoOtherHoweverShortTheQueueIs)});
}
