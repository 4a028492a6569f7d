// Reads and writes at any place of a file (transfer/random_access.h), by many threads and with every engine: against a
// model, beyond the end, with failing requests, with a full queue, and in a forked child.
#include "transfer/random_access.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "core/alignment.h"
#include "core/file.h"
#include "testing.h"
#include "testing_writeback.h"
#include "transfer/edge_lock.h"
#include "transfer/request_flow.h"

namespace {

uint32_t g_direct_unit_bytes = 0;  // what statx says of files; 0: the truth

}  // namespace

// In place of that of the C library. The offsets of the two fields: core/file.cc.
extern "C" int statx(int fd, const char* path, int flags, unsigned mask, struct statx* answer) noexcept {
  const long result = syscall(SYS_statx, fd, path, flags, mask, answer);
  if (result == 0 && g_direct_unit_bytes != 0) {
    answer->stx_mask |= 0x2000;  // STATX_DIOALIGN
    std::memcpy(reinterpret_cast<char*>(answer) + 0x98, &g_direct_unit_bytes, sizeof(g_direct_unit_bytes));
    std::memcpy(reinterpret_cast<char*>(answer) + 0x9c, &g_direct_unit_bytes, sizeof(g_direct_unit_bytes));
  }
  return static_cast<int>(result);
}

namespace fastpersist {
namespace {

constexpr auto kLong = std::chrono::milliseconds(60000);
constexpr uint64_t kAll = Fault::kAll;
const std::vector<std::string> kEngines = {"uring", "libaio", "threads", "threads-buffered"};

struct Descriptor {
  explicit Descriptor(const std::string& path) : fd(open(path.c_str(), O_RDWR | O_CLOEXEC)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(fd); }
  const int fd;
};

// A file, opened as TensorFile opens it. Its end waits for all requests.
class OpenFile {
 public:
  OpenFile(const std::string& path, std::vector<std::string> engines, uint64_t chunk_bytes = 16384,
           uint32_t queue_depth = 8, uint64_t staging_bytes = uint64_t{1} << 20)
      : direct_(path), buffered_(path), direct_lock_(path), edge_lock_(path) {
    const std::string edge = engines[0].starts_with("fault:") ? "fault:threads-buffered" : "threads-buffered";
    Result<std::unique_ptr<RandomAccess>> opened = RandomAccess::Open({.fd = direct_.fd,
                                                                       .buffered_fd = buffered_.fd,
                                                                       .direct_lock_fd = direct_lock_.fd,
                                                                       .edge_lock_fd = edge_lock_.fd,
                                                                       .path = path,
                                                                       .engines = std::move(engines),
                                                                       .edge_engines = {edge},
                                                                       .queue_depth = queue_depth,
                                                                       .thread_count = 2,
                                                                       .chunk_bytes = chunk_bytes,
                                                                       .staging_bytes = staging_bytes});
    status_ = opened.status();
    if (opened.ok()) file_ = std::move(opened).value();
  }

  const Status& status() const { return status_; }
  bool ok() const { return file_ != nullptr; }
  RandomAccess* operator->() { return file_.get(); }
  void Close() { file_.reset(); }
  int direct_lock_fd() const { return direct_lock_.fd; }
  int edge_lock_fd() const { return edge_lock_.fd; }

  std::shared_ptr<FileRequest> Submit(IoOp op, std::vector<FilePart> parts) {
    std::shared_ptr<FileRequest> request = file_->Begin(op);
    file_->Add(request, std::move(parts));
    file_->End(request);
    return request;
  }
  std::shared_ptr<FileRequest> Write(const Bytes& bytes, uint64_t offset) {
    return Submit(IoOp::kWrite, {{const_cast<std::byte*>(bytes.data()), bytes.size(), offset}});
  }
  std::shared_ptr<FileRequest> Read(Bytes& bytes, uint64_t offset) {
    return Submit(IoOp::kRead, {{bytes.data(), bytes.size(), offset}});
  }

 private:
  Descriptor direct_;
  Descriptor buffered_;
  Descriptor direct_lock_;
  Descriptor edge_lock_;
  Status status_;
  std::unique_ptr<RandomAccess> file_;
};

bool Well(const std::shared_ptr<FileRequest>& request) {
  return EXPECT(request->WaitFor(kLong)) && EXPECT_WITH(request->status().ok(), request->status().message());
}

// The engines that work in the scratch directory.
template <class Test>
void WithEachEngine(Test test) {
  size_t tried_count = 0;
  for (const std::string& engine : kEngines) {
    const ScratchFile probe("probe", RandomBytes(4096, 1));
    if (!OpenFile(probe.path(), {engine}).ok()) continue;
    ++tried_count;
    test(engine);
  }
  EXPECT(tried_count > 0);
}

// Once another side has had the lock alone, its former owner has left it, and so has written back.
void AwaitWriteback(const std::string& path) {
  const Descriptor own(path);
  EdgeLock lock(own.fd, path);
  EXPECT_OK(lock.Enter(/*alone=*/true));
  lock.Leave();
}

// --- What is written is read again

void AnySequenceLeavesWhatAModelWouldHold() {
  WithEachEngine([](const std::string& engine) {
    std::mt19937_64 random(7);
    for (const uint64_t chunk_bytes : {4096, 16384, 1 << 20}) {
      Bytes model = RandomBytes(100000, 1);
      const ScratchFile scratch("model", model);
      OpenFile file(scratch.path(), {engine}, chunk_bytes, 1 + static_cast<uint32_t>(random() % 8));
      Bytes memory(200000 + 8192);
      for (int step = 0; step < 150; ++step) {
        const uint64_t size = random() % 3 == 0 ? 4096 * (random() % 6) : random() % 30000;
        const uint64_t offset = random() % 2 == 0 ? 4096 * (random() % 24) : random() % 100000;
        std::byte* const address = memory.data() + random() % 8192;
        if (random() % 2 == 0) {
          const Bytes data = RandomBytes(size, random());
          std::copy(data.begin(), data.end(), address);
          const auto request = file.Submit(IoOp::kWrite, {{address, size, offset}});
          if (!Well(request)) return;
          EXPECT(request->done_bytes() == size);
          if (size > 0) model.resize(std::max<size_t>(model.size(), offset + size));
          std::copy(data.begin(), data.end(), model.begin() + static_cast<ptrdiff_t>(offset));
        } else {
          const uint64_t there = offset >= model.size() ? 0 : std::min<uint64_t>(size, model.size() - offset);
          const auto request = file.Submit(IoOp::kRead, {{address, there, offset}});
          if (!Well(request)) return;
          EXPECT_WITH(std::memcmp(address, model.data() + offset, there) == 0,
                      engine + ": " + std::to_string(there) + " bytes at " + std::to_string(offset));
        }
      }
      file.Close();
      EXPECT_WITH(scratch.Content() == model, engine);
    }
  });
}

void ARequestOfManyPartsIsDoneWhenAllAre() {
  WithEachEngine([](const std::string& engine) {
    constexpr size_t kCount = 5000;
    constexpr size_t kRowBytes = 700;
    const Bytes content = RandomBytes(kCount * kRowBytes, 3);
    const ScratchFile scratch("rows");
    OpenFile file(scratch.path(), {engine}, 8192, 16);
    Bytes memory = content;
    const auto write = file->Begin(IoOp::kWrite);
    const auto read_parts = [&](size_t first, size_t count) {
      std::vector<FilePart> parts;
      for (size_t row = first; row < first + count; ++row) {
        parts.push_back({memory.data() + row * kRowBytes, kRowBytes, row * kRowBytes});
        parts.push_back({memory.data(), 0, 1 << 20});  // nothing
      }
      return parts;
    };
    for (size_t first = 0; first < kCount; first += 1000) file->Add(write, read_parts(first, 1000));
    EXPECT(!write->done());  // not before it is ended
    EXPECT(!file->WaitForAll(std::chrono::milliseconds(20)));
    file->End(write);
    EXPECT(Well(write) && write->done_bytes() == content.size());
    EXPECT(scratch.Content() == content);
    std::fill(memory.begin(), memory.end(), std::byte{0});
    EXPECT(Well(file.Submit(IoOp::kRead, read_parts(0, kCount))));
    EXPECT_WITH(memory == content, engine);
  });
}

void ARequestOfNothingIsDoneAtOnce() {
  const ScratchFile scratch("nothing");
  OpenFile file(scratch.path(), {"threads-buffered"});
  for (const IoOp op : {IoOp::kRead, IoOp::kWrite}) {
    const auto request = file.Submit(op, {});
    EXPECT(request->done() && request->status().ok() && request->done_bytes() == 0);
    EXPECT(file.Submit(op, {{nullptr, 0, INT64_MAX}})->done());
  }
  EXPECT(file->WaitForAll(std::chrono::milliseconds(0)));
}

// --- What goes straight to the memory of callers

struct Reached {
  std::byte* address;
  size_t size_bytes;
  bool operator<(const Reached& other) const { return address < other.address; }
};
std::mutex g_reads_mutex;
std::vector<Reached> g_reads;         // that the kernel was asked for
std::condition_variable g_read_came;  // while one is held, the first waits for the next
std::atomic<bool> g_holds_first{false};

uint64_t PlaceOf(const std::byte* address) { return reinterpret_cast<uintptr_t>(address); }

std::vector<Reached> TakeReads() {
  const std::lock_guard lock(g_reads_mutex);
  std::vector<Reached> reads = std::exchange(g_reads, {});
  std::sort(reads.begin(), reads.end());
  return reads;
}

// The requests that reached these bytes.
std::vector<Reached> TakeReadsTo(const std::byte* address, size_t size_bytes) {
  std::vector<Reached> reads = TakeReads();
  std::erase_if(reads, [&](const Reached& read) {
    return PlaceOf(read.address) + read.size_bytes <= PlaceOf(address) ||
           PlaceOf(read.address) >= PlaceOf(address) + size_bytes;
  });
  return reads;
}

uint64_t PageBytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

void OnlyWholePagesOfMemoryAreReadTo() {
  const Bytes content = RandomBytes(5 << 18, 17);
  const ScratchFile scratch("pages", content);
  const DirectIoLimits limits = DirectIoLimitsOf(scratch.fd());
  if (!limits.supported) return;
  Bytes memory((5 << 18) + (64 << 10));
  std::byte* const page = memory.data() + (AlignUp(PlaceOf(memory.data()), PageBytes()) - PlaceOf(memory.data()));
  for (const uint64_t chunk_bytes : {uint64_t{4096}, uint64_t{16384}, uint64_t{1} << 20}) {
    OpenFile file(scratch.path(), {"threads"}, chunk_bytes, 4);
    for (const uint64_t shift : {0, 64, 512, 4095}) {
      for (const uint64_t offset : {0, 512, 1000, 4096}) {
        for (const uint64_t size : {512, 4096, 5000, 100000, (1 << 20) + 4096, (1 << 20) + 512}) {
          std::byte* const address = page + shift;
          std::fill(memory.begin(), memory.end(), std::byte{0xA5});
          TakeReads();
          if (!Well(file.Submit(IoOp::kRead, {{address, size, offset}}))) return;
          const std::string what = std::to_string(size) + " bytes at " + std::to_string(offset) + " to page + " +
                                   std::to_string(shift) + " in chunks of " + std::to_string(chunk_bytes);
          EXPECT_WITH(std::memcmp(address, content.data() + offset, size) == 0, what);
          EXPECT_WITH(std::count(page, address, std::byte{0xA5}) == address - page, what);
          EXPECT_WITH(address[size] == std::byte{0xA5}, what);
          uint64_t straight_bytes = 0;
          for (const Reached& read : TakeReadsTo(memory.data(), memory.size())) {
            EXPECT_WITH((PlaceOf(read.address) | read.size_bytes) % PageBytes() == 0, what);
            EXPECT_WITH(read.address >= address && read.address + read.size_bytes <= address + size, what);
            straight_bytes += read.size_bytes;
          }
          if (limits.offset_alignment_bytes > PageBytes()) continue;  // then it is whole blocks that count
          // All whole pages, where they lie on whole blocks, but in the first and the last chunk if they are few.
          const uint64_t first = AlignUp(PlaceOf(address), PageBytes());
          const uint64_t last = AlignDown(PlaceOf(address) + size, PageBytes());
          const bool fits = (offset + (first - PlaceOf(address))) % limits.offset_alignment_bytes == 0;
          if (!fits || last <= first) {
            EXPECT_WITH(straight_bytes == 0, what);
          } else if (last - first == size || chunk_bytes == (1 << 20)) {
            const uint64_t few_bytes = last - first == size ? 0 : 2 * (uint64_t{64} << 10);
            EXPECT_WITH(straight_bytes + few_bytes >= last - first, what + ": " + std::to_string(straight_bytes));
          }
        }
      }
    }
  }
}

void WhatLiesOnPagesIsReadToThemInOneRequestEach() {
  const Bytes content = RandomBytes(1 << 20, 18);
  const ScratchFile scratch("pages", content);
  const DirectIoLimits limits = DirectIoLimitsOf(scratch.fd());
  if (!limits.supported || PageBytes() != 4096) return;
  const uint64_t row_bytes = BlockBytesOf(limits);
  OpenFile file(scratch.path(), {"threads"}, 256 << 10, 8);
  Bytes memory((1 << 20) + 4096);
  std::byte* const page = memory.data() + (AlignUp(PlaceOf(memory.data()), 4096) - PlaceOf(memory.data()));
  TakeReads();
  EXPECT(Well(file.Submit(IoOp::kRead, {{page, 1 << 20, 0}})));
  for (const Reached& read : TakeReads()) EXPECT(read.size_bytes == 256 << 10);
  EXPECT(Well(file.Submit(IoOp::kRead, {{page, 1 << 20, 0}})));
  EXPECT(TakeReadsTo(page, 1 << 20).size() == 4);

  std::vector<FilePart> rows;
  for (uint64_t row = 0; row < 10; ++row) rows.push_back({page + row * row_bytes, row_bytes, (15 - row) * row_bytes});
  EXPECT(Well(file.Submit(IoOp::kRead, rows)));
  const std::vector<Reached> reads = TakeReads();
  EXPECT(reads.size() == 10);
  for (size_t row = 0; row < reads.size(); ++row) {
    EXPECT(reads[row].address == page + row * row_bytes && reads[row].size_bytes == row_bytes);
    EXPECT(std::memcmp(page + row * row_bytes, content.data() + (15 - row) * row_bytes, row_bytes) == 0);
  }
}

// --- Requests that come while others are under way

// How often a thread of the file has gone to sleep.
uint64_t SleepCount() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string line;
    std::ifstream(task.path() / "comm") >> line;
    if (line != "fastpersist-ra") continue;
    std::ifstream status(task.path() / "status");
    while (std::getline(status, line)) {
      unsigned long count = 0;
      if (std::sscanf(line.c_str(), "voluntary_ctxt_switches: %lu", &count) == 1) return count;
    }
  }
  return 0;
}

void ARequestThatComesLaterIsStartedWithoutLookingForIt() {
  const ScratchFile scratch("later", RandomBytes(65536, 19));
  OpenFile file(scratch.path(), {"threads-buffered"});
  Bytes first_memory(4096);
  Bytes second_memory(4096);
  TakeReads();
  g_holds_first = true;
  const auto first = file.Read(first_memory, 0);
  {
    std::unique_lock lock(g_reads_mutex);
    EXPECT(g_read_came.wait_for(lock, kLong, [] { return g_reads.size() == 1; }));
  }
  // The pump returns every 50 ms; otherwise the thread sleeps until something happens.
  const auto start = Clock::now();
  const uint64_t before_count = SleepCount();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const uint64_t sleep_count = SleepCount() - before_count;
  EXPECT_WITH(static_cast<double>(sleep_count) <= SecondsSince(start) / 0.05 + 3, std::to_string(sleep_count));

  const auto second = file.Read(second_memory, 8192);  // which the first one waits for
  EXPECT(Well(second) && Well(first));
  {
    const std::lock_guard lock(g_reads_mutex);
    g_holds_first = false;
    g_read_came.notify_all();
  }
  file.Close();
}

// --- The end of the file

void AReadBeyondTheEndSaysHowMuchIsThere() {
  WithEachEngine([](const std::string& engine) {
    const Bytes content = RandomBytes(40000, 4);
    const ScratchFile scratch("end", content);
    for (const uint64_t chunk_bytes : {4096, 1 << 20}) {
      OpenFile file(scratch.path(), {engine}, chunk_bytes);
      for (const uint64_t offset : {0, 1, 4096, 39999, 40000, 50000}) {
        Bytes memory(100000);
        const auto request = file.Read(memory, offset);
        EXPECT(request->WaitFor(kLong));
        const uint64_t there = offset > content.size() ? 0 : content.size() - offset;
        EXPECT_WITH(request->status().code() == StatusCode::kEndOfFile, request->status().message());
        EXPECT_WITH(request->failed_part_done_bytes() == there,
                    engine + ": " + std::to_string(request->failed_part_done_bytes()));
        EXPECT(request->failed_part().offset_bytes == offset && request->failed_part().size_bytes == memory.size());
        EXPECT(std::memcmp(memory.data(), content.data() + (content.size() - there), there) == 0);
      }
    }
  });
}

// --- Failures

void AFailedWriteIsFoundByWhoeverLooks() {
  const ScratchFile scratch("failed");
  OpenFile file(scratch.path(), {"fault:threads-buffered"});
  const Bytes content = RandomBytes(30000, 5);
  {
    const Fault fault(Fault::Errno(EIO, 1, 1));
    const auto request = file.Write(content, 0);
    EXPECT(request->WaitFor(kLong));
    EXPECT(request->status().sys_errno() == EIO && request->failed_count() == 1);
    EXPECT_WITH(Contains(request->status().message(), scratch.path()), request->status().message());
    auto failed = file->TakeFailedWrites();
    EXPECT(failed.size() == 1 && failed[0] == request && !request->told());
    EXPECT(file->TakeFailedWrites().empty());
  }
  EXPECT(Well(file.Write(content, 0)));
  EXPECT(file->TakeFailedWrites().empty());
  {
    const Fault fault(Fault::Errno(EIO, 1, 1));
    Bytes memory(30000);
    const auto request = file.Read(memory, 0);
    EXPECT(request->WaitFor(kLong) && !request->status().ok());
    EXPECT(file->TakeFailedWrites().empty());  // a read
  }
}

void EveryRequestEndsWhicheverPieceFails() {
  WithEachEngine([](const std::string& engine) {
    const Bytes content = RandomBytes(100000, 6);
    for (uint64_t nth = 1;; ++nth) {
      const ScratchFile scratch("nth", Bytes(100000));
      OpenFile file(scratch.path(), {"fault:" + engine}, 16384, 4);
      uint64_t hit_count = 0;
      std::vector<std::shared_ptr<FileRequest>> requests;
      {
        const Fault fault(Fault::Errno(EIO, nth, 3));
        for (uint64_t at = 0; at < content.size(); at += 12500) {
          requests.push_back(file.Submit(IoOp::kWrite, {{const_cast<std::byte*>(content.data()) + at, 12500, at}}));
        }
        for (const auto& request : requests) EXPECT(request->WaitFor(kLong));
        hit_count = ClearFaultPlan();
      }
      const auto failed_count = static_cast<uint64_t>(
          std::count_if(requests.begin(), requests.end(), [](const auto& each) { return !each->status().ok(); }));
      EXPECT(failed_count <= hit_count && (hit_count == 0 || failed_count > 0));
      EXPECT(file->TakeFailedWrites().size() == failed_count);
      const Bytes written = scratch.Content();
      for (size_t i = 0; i < requests.size(); ++i) {
        if (!requests[i]->status().ok()) continue;
        EXPECT_WITH(std::memcmp(written.data() + i * 12500, content.data() + i * 12500, 12500) == 0, engine);
      }
      EXPECT(Well(file.Write(content, 0)));
      if (hit_count == 0) {
        EXPECT(nth > 8);
        return;
      }
    }
  });
}

void AnEngineThatIsLeftInMidFileLosesNothing() {
  const ScratchFile probe("probe", RandomBytes(4096, 1));
  if (!OpenFile(probe.path(), {"threads"}).ok()) return;
  const Bytes content = RandomBytes(200000, 8);
  for (const uint64_t nth : {1, 3, 7}) {
    const ScratchFile scratch("demoted", Bytes(200000));
    OpenFile file(scratch.path(), {"fault:threads", "threads-buffered"}, 16384, 4);
    Bytes memory(200000);
    {
      const Fault fault(Fault::Errno(EOPNOTSUPP, nth, kAll));
      const auto read = file.Read(memory, 0);
      EXPECT(Well(read));
    }
    EXPECT(file->engine_name() == "threads-buffered" && file->demotions().size() == 1);
    const auto first = file.Submit(IoOp::kWrite, {{const_cast<std::byte*>(content.data()), 100001, 0}});
    const auto second = file.Submit(IoOp::kWrite, {{const_cast<std::byte*>(content.data()) + 100001, 99999, 100001}});
    EXPECT(Well(first) && Well(second));
    EXPECT(Well(file.Read(memory, 0)) && memory == content);
  }
}

void WhatADirectEngineLeavesOverIsWrittenAlone() {
  const ScratchFile probe("probe", RandomBytes(4096, 1));
  if (!EdgeLock::Works(probe.fd()) || !OpenFile(probe.path(), {"threads"}).ok()) return;
  constexpr size_t kSize = 65536;
  const Bytes content = RandomBytes(kSize, 15);
  const Bytes data = RandomBytes(kSize + 8192, 16);
  for (const size_t shift : {0, 1}) {  // straight, and staged
    const ScratchFile scratch("left over", content);
    OpenFile file(scratch.path(), {"fault:threads", "threads-buffered"}, 16384, 4);
    const Descriptor own(scratch.path());
    EdgeLock others_direct_writes(own.fd, scratch.path());
    EXPECT(Must(others_direct_writes.TryEnter(/*alone=*/false)));
    TakeWritebackFds();

    const Fault fault(Fault::Errno(EOPNOTSUPP, 2, kAll));
    std::byte* const page = reinterpret_cast<std::byte*>(AlignUp(reinterpret_cast<uintptr_t>(data.data()), 4096));
    const auto write = file.Submit(IoOp::kWrite, {{page + shift, kSize, 0}});
    while (!others_direct_writes.SomebodyWaits() && !write->done())
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    EXPECT(!write->done());
    const Bytes meanwhile = scratch.Content();
    for (size_t at = 16384; at < kSize; at += 16384) {  // the first piece was written directly
      EXPECT(std::memcmp(meanwhile.data() + at, content.data() + at, 16384) == 0);
    }
    Bytes read(4096);
    EXPECT(Well(file.Read(read, 32768)));  // which waits for nobody
    others_direct_writes.Leave();
    EXPECT(Well(write) && write->done_bytes() == kSize);
    EXPECT(std::memcmp(scratch.Content().data(), page + shift, kSize) == 0);
    AwaitWriteback(scratch.path());
    EXPECT(AllAre(TakeWritebackFds(), file.direct_lock_fd()));  // and brought to the disk before others could enter
  }
}

// As on a real-time volume of xfs whose extents are stripes of a RAID.
void AFileWithUnitsThatAreNoPowerOfTwoGoesThroughThePageCache() {
  const ScratchFile scratch("units");
  g_direct_unit_bytes = 28 << 10;
  OpenFile file(scratch.path(), {"threads", "threads-buffered"});
  g_direct_unit_bytes = 0;
  EXPECT(file.ok() && file->engine_name() == "threads-buffered");
  const Bytes bytes = RandomBytes(100'000, 1);
  EXPECT(Well(file.Write(bytes, 0)));
  EXPECT(scratch.Content() == bytes);
}

void ALadderThatGoesFromThePageCacheToDirectIsRefused() {
  const ScratchFile scratch("ladder");
  EXPECT(OpenFile(scratch.path(), {"threads-buffered", "threads"}).status().code() == StatusCode::kInvalidArgument);
  EXPECT(!OpenFile(scratch.path(), {"abacus"}).ok());
  EXPECT(OpenFile(scratch.path(), {"threads-buffered", "uring-buffered"}).ok());
}

void AFailedWritebackIsKeptForTheNextSync() {
  const ScratchFile probe("probe", RandomBytes(4096, 1));
  if (!EdgeLock::Works(probe.fd()) || !OpenFile(probe.path(), {"threads"}).ok()) return;
  const uint64_t block_bytes = BlockBytesOf(DirectIoLimitsOf(probe.fd()));
  const Bytes content = RandomBytes(5 * block_bytes, 14);
  for (const bool is_demoted : {false, true}) {
    const ScratchFile scratch("writeback", content);
    OpenFile file(scratch.path(), {"fault:threads", "threads-buffered"});
    Bytes memory(block_bytes);
    if (is_demoted) {
      const Fault fault(Fault::Errno(EOPNOTSUPP, 1, 1));
      EXPECT(Well(file.Read(memory, 0)) && file->engine_name() == "threads-buffered");
    }
    for (const int sys_errno : {0, EIO, ENOSPC}) {
      TakeWritebackFds();
      g_writeback_errno = sys_errno;
      EXPECT(Well(is_demoted ? file.Write(memory, 2 * block_bytes) : file.Write(memory, 100)));
      AwaitWriteback(scratch.path());
      // Not by the description that sync() uses: the kernel reports an error once to each.
      EXPECT(AllAre(TakeWritebackFds(), is_demoted ? file.direct_lock_fd() : file.edge_lock_fd()));
      const Status written_back = file->WrittenBack();
      EXPECT_WITH(written_back.sys_errno() == (sys_errno == 0 ? 0 : EIO), written_back.message());  // the first
      EXPECT(written_back.ok() || Contains(written_back.message(), scratch.path()));
    }
    g_writeback_errno = 0;
  }
}

// --- Many

void ThousandsOfRequestsOfManyThreads() {
  WithEachEngine([](const std::string& engine) {
    constexpr size_t kThreads = 4;
    constexpr size_t kRequests = 400;
    constexpr size_t kRequestBytes = 1777;
    const Bytes content = RandomBytes(kThreads * kRequests * kRequestBytes, 9);
    const ScratchFile scratch("threads");
    OpenFile file(scratch.path(), {engine}, 4096, 4, 16384);
    Bytes memory(content.size());
    std::vector<std::thread> threads;
    std::atomic<int> failure_count{0};
    for (size_t number = 0; number < kThreads; ++number) {
      threads.emplace_back([&, number] {
        std::vector<std::shared_ptr<FileRequest>> requests;
        for (const IoOp op : {IoOp::kWrite, IoOp::kRead}) {
          for (size_t i = 0; i < kRequests; ++i) {
            const size_t at = (i * kThreads + number) * kRequestBytes;
            std::byte* const address = op == IoOp::kWrite ? const_cast<std::byte*>(content.data()) : memory.data();
            requests.push_back(file.Submit(op, {{address + at, kRequestBytes, at}}));
          }
          for (const auto& request : requests) {
            if (!request->WaitFor(kLong) || !request->status().ok()) ++failure_count;
          }
          requests.clear();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_WITH(failure_count == 0, engine);
    EXPECT(file->WaitForAll(std::chrono::milliseconds(0)));
    EXPECT_WITH(memory == content && scratch.Content() == content, engine);
  });
}

void WhenAllWereWaitedForEachIsDone() {
  const ScratchFile scratch("all");
  OpenFile file(scratch.path(), {"threads-buffered"});
  const Bytes content = RandomBytes(5000, 10);
  for (int round = 0; round < 300; ++round) {
    const auto request = file.Write(content, 0);
    EXPECT(file->WaitForAll(kLong));
    if (!EXPECT_WITH(request->done(), std::to_string(round))) return;
  }
}

void ClosingWaitsForWhatIsUnderWay() {
  const ScratchFile scratch("closing");
  const Bytes content = RandomBytes(50000, 11);
  const Fault fault(Fault::Delay(100));
  OpenFile file(scratch.path(), {"fault:threads-buffered"}, 4096, 4);
  const auto request = file.Write(content, 3);
  EXPECT(!request->WaitFor(std::chrono::milliseconds(1)));
  file.Close();
  EXPECT(request->done() && request->status().ok());
}

size_t CountIn(const char* directory) {
  const auto entries = std::filesystem::directory_iterator(directory);
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

void DescriptorsAreGivenBack() {
  WithEachEngine([](const std::string& engine) {
    const ScratchFile scratch("given back");
    const size_t before = CountIn("/proc/self/fd");
    for (int round = 0; round < 5; ++round) {
      OpenFile file(scratch.path(), {engine});
      EXPECT(Well(file.Write(RandomBytes(10001, 1), 5)));
    }
    EXPECT_WITH(CountIn("/proc/self/fd") == before, engine);
  });
}

// --- Neighbours

void WritersOfNeighbouringBytesLoseNoneWhileOthersRead() {
  WithEachEngine([](const std::string& engine) {
    constexpr size_t kFiles = 3;
    constexpr size_t kSize = 30000;
    if (engine == "threads-buffered") return;
    Bytes content = RandomBytes(kSize, 12);
    const ScratchFile scratch("neighbours", content);
    std::atomic<bool> stop{false};
    std::atomic<int> failure_count{0};
    std::thread reader([&] {
      while (!stop) {
        if (scratch.Content().size() != kSize) ++failure_count;
      }
    });
    std::vector<std::thread> writers;
    for (size_t number = 0; number < kFiles; ++number) {
      writers.emplace_back([&, number] {
        OpenFile file(scratch.path(), {engine}, 4096, 4);
        std::mt19937_64 random(number);
        const size_t start = number * kSize / kFiles;
        const size_t end = (number + 1) * kSize / kFiles;
        const int fd = open(scratch.path().c_str(), O_RDWR | O_CLOEXEC);
        for (int round = 0; round < 120; ++round) {
          const size_t size = 1 + random() % (end - start);
          const size_t offset = start + random() % (end - start - size + 1);
          const Bytes data = RandomBytes(size, random());
          std::copy(data.begin(), data.end(), content.begin() + static_cast<ptrdiff_t>(offset));
          const auto write = file.Write(data, offset);
          if (!write->WaitFor(kLong) || !write->status().ok()) ++failure_count;
          Bytes memory(end - start);
          const auto read = file.Read(memory, start);
          if (!read->WaitFor(kLong) || !read->status().ok()) ++failure_count;
          if (std::memcmp(memory.data(), content.data() + start, end - start) != 0) ++failure_count;
          if (round % 8 == 0 && fdatasync(fd) != 0) ++failure_count;  // EIO: the kernel's alarm
        }
        close(fd);
      });
    }
    for (std::thread& writer : writers) writer.join();
    stop = true;
    reader.join();
    EXPECT_WITH(failure_count == 0, engine + ": " + std::to_string(failure_count));
    EXPECT_WITH(scratch.Content() == content, engine);
  });
}

// --- What is copied on the way

// Completes all its requests at once, as a disk may that works on all of them at the same time. What it reads is 0xAB.
class TogetherEngine final : public IoEngine {
 public:
  explicit TogetherEngine(std::function<void()> on_queue) : on_queue_(std::move(on_queue)) {}
  std::string_view name() const override { return "together"; }
  const EngineLimits& limits() const override { return limits_; }
  QueueResult Queue(const IoRequest& request) override {
    on_queue_();
    std::memset(request.buffer, 0xAB, request.size_bytes);
    complete_.push_back({.tag = request.tag, .done_bytes = request.size_bytes, .sys_errno = 0});
    return QueueResult::kQueued;
  }
  Status Submit() override { return Status::Ok(); }
  Result<size_t> Reap(std::span<IoCompletion> out, size_t, std::chrono::milliseconds) override {
    const std::vector<IoCompletion> given = std::exchange(complete_, {});
    std::copy(given.begin(), given.end(), out.begin());
    return given.size();
  }
  size_t in_flight() const override { return complete_.size(); }

 private:
  const std::function<void()> on_queue_;
  const EngineLimits limits_{.queue_depth = 2, .direct = true};
  std::vector<IoCompletion> complete_;
};

void TheNextChunkStartsBeforeAllThatCameTogetherAreCopied() {
  constexpr size_t kChunk = 128 << 10;
  constexpr size_t kChunkCount = 4;
  Bytes memory(kChunk * kChunkCount + 8192);
  std::byte* const target = memory.data() + (4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096) + 64;
  std::vector<size_t> copied_counts;  // at the start of each chunk
  const auto note = [&] {
    size_t copied_count = 0;
    for (size_t i = 0; i < kChunkCount; ++i) copied_count += target[i * kChunk] == std::byte{0xAB} ? 1 : 0;
    copied_counts.push_back(copied_count);
  };
  const PumpOptions::Simulation seam{.create_engine = [&](const std::string&) -> Result<std::unique_ptr<IoEngine>> {
                                       return std::unique_ptr<IoEngine>(std::make_unique<TogetherEngine>(note));
                                     },
                                     .limits = DirectIoLimitsFor(4096, 4096)};
  Result<std::unique_ptr<IoPump>> pump = IoPump::Open(
      -1, "the file",
      {.engines = {"together"}, .queue_depth = 2, .poll = {}, .outlives_failures = true, .simulation = &seam});
  if (!EXPECT(pump.ok())) return;
  RequestFlow flow(std::move(pump).value(), seam.limits, kChunk, 2 * kChunk, EdgeLock(-1, "the file"),
                   WriteSide::kShared);
  const auto job = std::make_shared<RequestJob>();
  job->request = std::make_shared<FileRequest>(IoOp::kRead, FileRequest::OnComplete());
  job->parts = {{target, kChunk * kChunkCount, 0}};
  RequestFlow::Jobs arrived = {job};
  while (flow.NextWait() != RequestFlow::kForever || !arrived.empty()) flow.Step(arrived, /*closing=*/false);
  EXPECT(job->request->done() && job->request->status().ok());
  EXPECT((copied_counts == std::vector<size_t>{0, 0, 1, 2}));
}

// --- Fork

void AForkedChildTouchesNothing() {
#if !defined(__SANITIZE_THREAD__)  // which ends a child of a process with threads
  const ScratchFile scratch("fork");
  const Bytes content = RandomBytes(50000, 13);
  const Fault fault(Fault::Delay(50));
  OpenFile file(scratch.path(), {"fault:threads-buffered"}, 4096, 4);
  const auto request = file.Write(content, 0);
  const pid_t child = fork();
  if (child == 0) {
    file.Close();  // waits for nothing, joins nobody
    _exit(0);
  }
  int ending = -1;
  waitpid(child, &ending, 0);
  EXPECT(ending == 0);
  EXPECT(Well(request));
  EXPECT(scratch.Content() == content);
#endif
}

}  // namespace
}  // namespace fastpersist

// Records the requests of the engine "threads" to the kernel.
extern "C" ssize_t pread(int fd, void* buffer, size_t size_bytes, off_t offset) noexcept(false) {
  using namespace fastpersist;
  {
    std::unique_lock lock(g_reads_mutex);
    g_reads.push_back({static_cast<std::byte*>(buffer), size_bytes});
    g_read_came.notify_all();
    if (g_holds_first && g_reads.size() == 1) {
      g_read_came.wait(lock, [] { return g_reads.size() > 1 || !g_holds_first; });
    }
  }
  return syscall(SYS_pread64, fd, buffer, size_bytes, offset);
}

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(AnySequenceLeavesWhatAModelWouldHold),
              TEST(ARequestOfManyPartsIsDoneWhenAllAre),
              TEST(ARequestOfNothingIsDoneAtOnce),
              TEST(ARequestThatComesLaterIsStartedWithoutLookingForIt),
              TEST(OnlyWholePagesOfMemoryAreReadTo),
              TEST(WhatLiesOnPagesIsReadToThemInOneRequestEach),
              TEST(AReadBeyondTheEndSaysHowMuchIsThere),
              TEST(AFailedWriteIsFoundByWhoeverLooks),
              TEST(EveryRequestEndsWhicheverPieceFails),
              TEST(AnEngineThatIsLeftInMidFileLosesNothing),
              TEST(WhatADirectEngineLeavesOverIsWrittenAlone),
              TEST(AFileWithUnitsThatAreNoPowerOfTwoGoesThroughThePageCache),
              TEST(ALadderThatGoesFromThePageCacheToDirectIsRefused),
              TEST(AFailedWritebackIsKeptForTheNextSync),
              TEST(ThousandsOfRequestsOfManyThreads),
              TEST(WhenAllWereWaitedForEachIsDone),
              TEST(ClosingWaitsForWhatIsUnderWay),
              TEST(DescriptorsAreGivenBack),
              TEST(WritersOfNeighbouringBytesLoseNoneWhileOthersRead),
              TEST(TheNextChunkStartsBeforeAllThatCameTogetherAreCopied),
              TEST(AForkedChildTouchesNothing)});
}
