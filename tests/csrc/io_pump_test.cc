// The pump finishes every request (transfer/io_pump.h): it resumes short ones, repeats refused ones, replaces an engine
// that proves unsupported, and turns everything else into an error with its place.
#include "transfer/io_pump.h"

#include <map>
#include <thread>

#include "core/file.h"
#include "testing.h"

namespace fastpersist {
namespace {

constexpr uint32_t kPieceBytes = 64 << 10;
constexpr size_t kPieceCount = 16;
constexpr uint64_t kAll = Fault::kAll;

// Aligned as direct I/O wants it.
class Memory {
 public:
  explicit Memory(size_t size_bytes) : size_bytes_(size_bytes) {
    data_ = static_cast<std::byte*>(std::aligned_alloc(4096, size_bytes));
    std::memset(data_, 0, size_bytes);
  }
  explicit Memory(const Bytes& content) : Memory(content.size()) { std::memcpy(data_, content.data(), content.size()); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data_); }
  std::byte* at(size_t offset) { return data_ + offset; }
  bool Holds(const Bytes& content) const {
    return content.size() <= size_bytes_ && std::memcmp(data_, content.data(), content.size()) == 0;
  }

 private:
  size_t size_bytes_;
  std::byte* data_;
};

Result<std::unique_ptr<IoPump>> Open(const ScratchFile& file, std::vector<std::string> engines,
                                     std::function<Status(uint64_t)> poll = {}, uint32_t queue_depth = 4) {
  return IoPump::Open(file.fd(), file.path(),
                      {.engines = std::move(engines), .queue_depth = queue_depth, .poll = std::move(poll)});
}

// Runs kPieceCount requests with the queue full. Each tag must come back once.
Status Transfer(IoPump& pump, IoOp op, Memory& memory) {
  std::map<uint64_t, int> finished_count;
  std::vector<IoPump::Finished> finished;
  size_t next = 0;
  while (next < kPieceCount || pump.in_flight() > 0) {
    while (next < kPieceCount && pump.in_flight() < pump.queue_depth()) {
      FP_RETURN_IF_ERROR(pump.Start({.op = op,
                                     .buffer = memory.at(next * kPieceBytes),
                                     .size_bytes = kPieceBytes,
                                     .needed_bytes = kPieceBytes,
                                     .offset_bytes = next * kPieceBytes,
                                     .tag = next}));
      ++next;
    }
    finished.clear();
    FP_RETURN_IF_ERROR(pump.Collect(finished));
    for (const IoPump::Finished& request : finished) ++finished_count[request.tag];
  }
  EXPECT(finished_count.size() == kPieceCount);
  for (const auto& [tag, count] : finished_count) EXPECT_WITH(count == 1, std::to_string(tag));
  EXPECT(pump.done_bytes() == uint64_t{kPieceBytes} * kPieceCount);
  return Status::Ok();
}

// A faulty write: the file must hold the written bytes even so.
void ExpectWriteSucceeds(const FaultPlan& plan, const std::vector<std::string>& engines, const std::string& last_engine,
                         size_t demotion_count) {
  const ScratchFile file("pump");
  const Bytes content = RandomBytes(kPieceBytes * kPieceCount, 1);
  Memory memory(content);
  const Fault fault(plan);
  const auto pump = Must(Open(file, engines));
  EXPECT_OK(Transfer(*pump, IoOp::kWrite, memory));
  EXPECT_WITH(file.Content() == content, engines.front());
  EXPECT_WITH(pump->engine_name() == last_engine, pump->engine_name());
  EXPECT_WITH(pump->demotions().size() == demotion_count, std::to_string(pump->demotions().size()));
  EXPECT(ClearFaultPlan() > 0);  // else the test has shown nothing
}

Status ReadWithFault(const FaultPlan& plan, const std::vector<std::string>& engines, Memory& memory,
                     const ScratchFile& file) {
  const Fault fault(plan);
  const auto pump = Must(Open(file, engines));
  Status status = Transfer(*pump, IoOp::kRead, memory);
  EXPECT(ClearFaultPlan() > 0);
  return status;
}

bool TakesDirect() {
  const ScratchFile file("direct");
  return DirectIoLimitsOf(file.fd()).supported;
}

// --- Opening

void ATransferWithoutEngineOrDepthIsRefused() {
  const ScratchFile file("pump");
  EXPECT(Open(file, {}).status().code() == StatusCode::kInvalidArgument);
  EXPECT(Open(file, {"null"}, {}, 0).status().code() == StatusCode::kInvalidArgument);
  EXPECT(Open(file, {"abacus"}).status().code() == StatusCode::kInvalidArgument);
}

void TheFirstUsableEngineIsTakenAndTheOthersAreNamed() {
  const ScratchFile file("pump");
  const auto pump = Must(Open(file, {"abacus", "threads-buffered", "null"}));
  EXPECT(pump->engine_name() == "threads-buffered");
  EXPECT(pump->demotions().size() == 1);
  EXPECT_WITH(pump->demotions()[0].starts_with("abacus: "), pump->demotions()[0]);
}

void DirectEnginesAreRefusedWhereTheFileTakesNoDirectIo() {
  // A directory can be opened, but takes no direct I/O on any file system.
  const int fd = open(g_directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (!DirectIoLimitsOf(fd).supported) {
    const auto pump = IoPump::Open(fd, "the directory", {.engines = {"threads"}, .poll = {}});
    EXPECT(!pump.ok() && pump.status().code() == StatusCode::kUnsupported);
    EXPECT_WITH(Contains(pump.status().message(), "threads on the directory: "), pump.status().message());
  }
  close(fd);
}

// --- Short, and refused for now

void ShortTransfersAreResumed() {
  const FaultPlan plan = Fault::Short(5000, 1, kAll);
  ExpectWriteSucceeds(plan, {"fault:threads-buffered"}, "fault:threads-buffered", 0);
  const Bytes content = RandomBytes(kPieceBytes * kPieceCount, 2);
  const ScratchFile file("pump", content);
  Memory memory(content.size());
  EXPECT_OK(ReadWithFault(plan, {"fault:threads-buffered"}, memory, file));
  EXPECT(memory.Holds(content));
}

void ShortDirectTransfersAreResumedOnAnAlignedPlace() {
  if (!TakesDirect()) return;
  // 4096 bytes more than half a piece: aligned, so the engine does all of it, but only that.
  const FaultPlan plan = Fault::Short(36864, 1, kAll);
  ExpectWriteSucceeds(plan, {"fault:threads"}, "fault:threads", 0);
}

void NothingDoneIsAnErrorNotALoop() {
  const FaultPlan plan = Fault::Zero(3, kAll);
  const Bytes content = RandomBytes(kPieceBytes * kPieceCount, 3);
  const ScratchFile file("pump", content);
  Memory memory(content);
  const Status read = ReadWithFault(plan, {"fault:threads-buffered"}, memory, file);
  EXPECT_WITH(read.code() == StatusCode::kEndOfFile, read.message());
  EXPECT_WITH(Contains(read.message(), file.path()) && Contains(read.message(), "at offset 131072"), read.message());

  const Fault fault(plan);
  const auto pump = Must(Open(file, {"fault:threads-buffered"}));
  const Status write = Transfer(*pump, IoOp::kWrite, memory);
  EXPECT_WITH(write.code() == StatusCode::kIoError, write.message());
  EXPECT_WITH(Contains(write.message(), file.path()) && Contains(write.message(), "at offset 131072"), write.message());
}

void InterruptedAndPostponedRequestsAreRepeated() {
  for (const int sys_errno : {EINTR, EAGAIN, ECANCELED}) {
    ExpectWriteSucceeds(Fault::Errno(sys_errno, 2, 10), {"fault:threads-buffered"}, "fault:threads-buffered", 0);
  }
}

void AReadMayEndWithTheFile() {
  const ScratchFile file("pump", RandomBytes(5000, 4));
  Memory memory(8192);
  for (const char* engine : {"threads-buffered", "threads"}) {
    if (std::string(engine) == "threads" && !TakesDirect()) continue;
    std::vector<IoPump::Finished> finished;
    const auto pump = Must(Open(file, {engine}));
    IoPump::Request request{.op = IoOp::kRead, .buffer = memory.at(0), .size_bytes = 8192, .needed_bytes = 5000};
    EXPECT_OK(pump->Start(request));
    EXPECT_OK(pump->Collect(finished));
    EXPECT(finished.size() == 1 && pump->done_bytes() == 5000);
    EXPECT(memory.Holds(file.Content()));

    finished.clear();
    request.needed_bytes = 5001;
    EXPECT_OK(pump->Start(request));
    const Status status = pump->Collect(finished);
    EXPECT_WITH(status.code() == StatusCode::kEndOfFile, status.message());
  }
}

// --- Demotion

void AnEngineThatIsNotSupportedInMidFileIsReplaced() {
  for (const int sys_errno : {EOPNOTSUPP, ENOSYS, EINVAL, EPERM}) {
    for (const uint64_t nth : {1, 7, 16}) {
      ExpectWriteSucceeds(Fault::Errno(sys_errno, nth, 1), {"fault:threads-buffered", "threads-buffered"},
                          "threads-buffered", 1);
    }
    ExpectWriteSucceeds(Fault::Errno(sys_errno, 5, kAll), {"fault:threads-buffered", "threads-buffered"},
                        "threads-buffered", 1);
  }
}

void ADirectEngineIsReplacedByABufferedOne() {
  if (!TakesDirect()) return;
  ExpectWriteSucceeds(Fault::Errno(EINVAL, 6, kAll), {"fault:threads", "threads-buffered"}, "threads-buffered", 1);
  ExpectWriteSucceeds(Fault::Errno(EOPNOTSUPP, 6, kAll),
                      {"fault:uring", "fault:libaio", "fault:threads", "threads-buffered"}, "threads-buffered", 3);
}

void AReadingEngineIsReplacedToo() {
  const Bytes content = RandomBytes(kPieceBytes * kPieceCount, 5);
  const ScratchFile file("pump", content);
  Memory memory(content.size());
  EXPECT_OK(
      ReadWithFault(Fault::Errno(EOPNOTSUPP, 6, 1), {"fault:threads-buffered", "threads-buffered"}, memory, file));
  EXPECT(memory.Holds(content));
}

void OneEngineAfterTheOtherIsReplaced() {
  ExpectWriteSucceeds(Fault::Errno(EOPNOTSUPP, 3, kAll),
                      {"fault:threads-buffered", "fault:threads-buffered", "abacus", "threads-buffered"},
                      "threads-buffered", 3);
}

void WhyAnEngineWasLeftIsTold() {
  const ScratchFile file("pump");
  Memory memory(kPieceBytes * kPieceCount);
  const Fault fault(Fault::Errno(EOPNOTSUPP, 2, 1));
  const auto pump = Must(Open(file, {"fault:threads-buffered", "threads-buffered"}));
  EXPECT_OK(Transfer(*pump, IoOp::kWrite, memory));
  EXPECT(pump->demotions().size() == 1);
  const std::string& why = pump->demotions()[0];
  EXPECT_WITH(why.starts_with("fault:threads-buffered: ") && Contains(why, std::strerror(EOPNOTSUPP)), why);
}

void TheLastEngineIsNotReplaced() {
  const ScratchFile file("pump");
  Memory memory(kPieceBytes * kPieceCount);
  const std::vector<std::vector<std::string>> ladders = {{"fault:threads-buffered"},
                                                         {"fault:threads-buffered", "fault:threads-buffered"}};
  for (const auto& engines : ladders) {
    const Fault fault(Fault::Errno(EOPNOTSUPP, 3, kAll));
    const auto pump = Must(Open(file, engines));
    const Status status = Transfer(*pump, IoOp::kWrite, memory);
    EXPECT_WITH(status.code() == StatusCode::kUnsupported && status.sys_errno() == EOPNOTSUPP, status.message());
  }
}

void AnErrorOfTheDiskReplacesNoEngine() {
  const ScratchFile file("pump");
  Memory memory(kPieceBytes * kPieceCount);
  for (const int sys_errno : {EIO, ENOSPC, EBADF}) {
    const Fault fault(Fault::Errno(sys_errno, 4, 1));
    const auto pump = Must(Open(file, {"fault:threads-buffered", "threads-buffered"}));
    const Status status = Transfer(*pump, IoOp::kWrite, memory);
    EXPECT_WITH(status.sys_errno() == sys_errno && pump->demotions().empty(), status.message());
    EXPECT(status.code() == (sys_errno == ENOSPC ? StatusCode::kNoSpace : StatusCode::kIoError));
  }
}

void WritesThatNoDirectEngineIsLeftForAreGivenBack() {
  if (!TakesDirect()) return;
  const Bytes content = RandomBytes(kPieceBytes * 4, 6);
  const ScratchFile file("pump", content);
  Memory memory(RandomBytes(kPieceBytes * 4, 7));
  const Fault fault(Fault::Errno(EOPNOTSUPP, 1, kAll));
  // From one direct engine to the next, nothing else changes.
  const auto pump = Must(IoPump::Open(file.fd(), file.path(),
                                      {.engines = {"fault:threads", "fault:threads", "threads-buffered"},
                                       .queue_depth = 4,
                                       .poll = {},
                                       .outlives_failures = true,
                                       .gives_writes_back = true}));
  const auto start = [&](uint64_t piece, IoOp op) {
    EXPECT_OK(pump->Start({.op = op,
                           .buffer = memory.at(piece * kPieceBytes),
                           .size_bytes = kPieceBytes,
                           .needed_bytes = kPieceBytes,
                           .offset_bytes = piece * kPieceBytes,
                           .tag = piece}));
  };
  std::map<uint64_t, bool> given_back;
  const auto collect = [&] {
    given_back.clear();
    std::vector<IoPump::Finished> finished;
    while (pump->in_flight() > 0) EXPECT_OK(pump->Collect(finished));
    for (const IoPump::Finished& request : finished) {
      EXPECT_WITH(request.status.ok(), request.status.message());
      EXPECT(given_back.emplace(request.tag, request.start_again).second);
    }
  };
  start(0, IoOp::kWrite);
  start(1, IoOp::kRead);
  start(2, IoOp::kWrite);
  collect();
  EXPECT((given_back == std::map<uint64_t, bool>{{0, true}, {1, false}, {2, true}}));
  EXPECT(pump->engine_name() == "threads-buffered" && pump->demotions().size() == 2);
  EXPECT(file.Content() == content);
  EXPECT(std::memcmp(memory.at(kPieceBytes), content.data() + kPieceBytes, kPieceBytes) == 0);
  start(0, IoOp::kWrite);
  collect();
  EXPECT((given_back == std::map<uint64_t, bool>{{0, false}}));
  EXPECT(std::memcmp(file.Content().data(), memory.at(0), kPieceBytes) == 0);
}

// --- Errors

void AnErrorSaysWhatWhereAndWhichFile() {
  const ScratchFile file("pump");
  Memory memory(kPieceBytes * kPieceCount);
  const Fault fault(Fault::Errno(EIO, 5, 1));
  const auto pump = Must(Open(file, {"fault:threads-buffered"}));
  const Status status = Transfer(*pump, IoOp::kWrite, memory);
  EXPECT(status.offset_bytes() == 4 * kPieceBytes);
  EXPECT_WITH(status.message() == "write to " + file.path() + " at offset 262144: " + std::strerror(EIO),
              status.message());
}

void TheFirstErrorStays() {
  const ScratchFile file("pump");
  Memory memory(kPieceBytes * kPieceCount);
  const Fault fault(Fault::Errno(EIO, 2, 1));
  const auto pump = Must(Open(file, {"fault:threads-buffered"}));
  EXPECT(!Transfer(*pump, IoOp::kWrite, memory).ok());
  std::vector<IoPump::Finished> finished;
  EXPECT(pump->Collect(std::chrono::milliseconds(0), finished).sys_errno() == EIO);
  EXPECT(pump->Start({.op = IoOp::kWrite, .buffer = memory.at(0), .size_bytes = kPieceBytes}).sys_errno() == EIO);
  pump->Abandon();
  EXPECT(pump->Collect(finished).sys_errno() == EIO);
}

void APumpThatOutlivesFailuresReportsEachWithItsRequest() {
  const ScratchFile file("pump", RandomBytes(kPieceBytes * 3 + 100, 5));
  Memory memory(kPieceBytes * kPieceCount);
  const Fault fault(Fault::Errno(EIO, 2, 1));
  const auto pump = Must(
      IoPump::Open(file.fd(), file.path(),
                   {.engines = {"fault:threads-buffered"}, .queue_depth = 1, .poll = {}, .outlives_failures = true}));
  // The second read is made to fail; the last one reaches 100 bytes into what is there.
  std::vector<IoPump::Finished> finished;
  for (uint64_t piece = 0; piece < 4; ++piece) {
    EXPECT_OK(pump->Start({.op = IoOp::kRead,
                           .buffer = memory.at(piece * kPieceBytes),
                           .size_bytes = kPieceBytes,
                           .needed_bytes = kPieceBytes,
                           .offset_bytes = piece * kPieceBytes,
                           .tag = piece}));
    std::vector<IoPump::Finished> found;
    EXPECT_OK(pump->Collect(found));
    finished.insert(finished.end(), found.begin(), found.end());
  }
  EXPECT(finished.size() == 4 && pump->in_flight() == 0);
  EXPECT(finished[0].status.ok() && finished[0].done_bytes == kPieceBytes);
  EXPECT(finished[1].tag == 1 && finished[1].status.sys_errno() == EIO && finished[1].done_bytes == 0);
  EXPECT(finished[2].status.ok());
  EXPECT(finished[3].status.code() == StatusCode::kEndOfFile && finished[3].done_bytes == 100);
}

void ACollectWithAnEndComesBackInTime() {
  const ScratchFile file("pump", RandomBytes(kPieceBytes, 5));
  Memory memory(kPieceBytes);
  const Fault fault(Fault::Delay(300));
  const auto pump = Must(Open(file, {"fault:threads-buffered"}));
  EXPECT_OK(
      pump->Start({.op = IoOp::kRead, .buffer = memory.at(0), .size_bytes = kPieceBytes, .needed_bytes = kPieceBytes}));
  std::vector<IoPump::Finished> finished;
  const auto start = Clock::now();
  EXPECT_OK(pump->Collect(std::chrono::milliseconds(5), finished));
  EXPECT_WITH(SecondsSince(start) < 0.2, std::to_string(SecondsSince(start)));
  EXPECT(finished.empty());
  EXPECT_OK(pump->Collect(finished));
  EXPECT(finished.size() == 1);
}

void MoreThatFollowGoesOutWithTheNextCall() {
  const ScratchFile file("pump", RandomBytes(kPieceBytes * 2, 5));
  Memory memory(kPieceBytes * 2);
  const auto pump = Must(Open(file, {"threads-buffered"}));
  for (uint64_t piece = 0; piece < 2; ++piece) {
    EXPECT_OK(pump->Start({.op = IoOp::kRead,
                           .buffer = memory.at(piece * kPieceBytes),
                           .size_bytes = kPieceBytes,
                           .needed_bytes = kPieceBytes,
                           .offset_bytes = piece * kPieceBytes,
                           .tag = piece},
                          /*more_follow=*/true));
  }
  std::vector<IoPump::Finished> finished;
  while (pump->in_flight() > 0) EXPECT_OK(pump->Collect(finished));
  EXPECT(finished.size() == 2);
  EXPECT(memory.Holds(file.Content()));
}

// --- Several files

void EachRequestGoesToItsFile() {
  const std::vector<Bytes> contents = {RandomBytes(kPieceBytes * 4, 8), RandomBytes(kPieceBytes * 2, 9),
                                       RandomBytes(kPieceBytes * 2, 10)};
  const ScratchFile first("pump-1", contents[0]);
  const ScratchFile second("pump-2", contents[1]);
  const ScratchFile third("pump-3", contents[2]);
  const std::vector<PumpFile> files = {
      {first.fd(), first.path()}, {second.fd(), second.path()}, {third.fd(), third.path()}};
  for (const char* engine : {"threads-buffered", "uring-buffered", "libaio-buffered", "threads", "uring", "libaio"}) {
    auto opened = IoPump::Open(files, {.engines = {engine}, .queue_depth = 8, .poll = {}, .outlives_failures = true});
    if (!opened.ok()) continue;  // an engine that this machine does not have, or no direct I/O
    const std::unique_ptr<IoPump> pump = std::move(opened).value();
    Memory memory(kPieceBytes * 8);
    std::vector<IoPump::Request> requests;
    for (uint32_t file = 0; file < 3; ++file) {
      for (uint64_t at = 0; at < contents[file].size(); at += kPieceBytes) {
        const uint64_t tag = requests.size();
        requests.push_back({.op = IoOp::kRead,
                            .buffer = memory.at(tag * kPieceBytes),
                            .size_bytes = kPieceBytes,
                            .needed_bytes = kPieceBytes,
                            .offset_bytes = at,
                            .tag = tag,
                            .file = file});
      }
    }
    for (const IoPump::Request& request : requests) EXPECT_OK(pump->Start(request, /*more_follow=*/true));
    std::vector<IoPump::Finished> finished;
    while (pump->in_flight() > 0) EXPECT_OK(pump->Collect(std::chrono::milliseconds::max(), finished, 3));
    EXPECT(finished.size() == requests.size());
    for (const IoPump::Finished& each : finished) {
      EXPECT_OK(each.status);
      const IoPump::Request& request = requests[each.tag];
      const std::byte* const expected = contents[request.file].data() + request.offset_bytes;
      EXPECT_WITH(std::memcmp(request.buffer, expected, kPieceBytes) == 0, engine);
    }

    // The third file ends before the second request's bytes, which is its error alone.
    requests[0].file = 2;
    requests[1].file = 2;
    requests[1].offset_bytes = contents[2].size();
    finished.clear();
    for (size_t i = 0; i < 2; ++i) EXPECT_OK(pump->Start(requests[i]));
    while (pump->in_flight() > 0) EXPECT_OK(pump->Collect(finished));
    for (const IoPump::Finished& each : finished) {
      EXPECT(each.status.ok() == (each.tag == 0));
      EXPECT_WITH(each.status.ok() || Contains(each.status.message(), third.path()), each.status.message());
    }
  }
}

void AllFilesOfAPumpFollowItsEngine() {
  if (!TakesDirect()) return;
  const Bytes content = RandomBytes(kPieceBytes * 2, 11);
  const ScratchFile first("pump-1", content);
  const ScratchFile second("pump-2", content);
  const auto is_direct = [](const ScratchFile& file) { return (fcntl(file.fd(), F_GETFL) & O_DIRECT) != 0; };
  const Fault fault(Fault::Errno(EINVAL, 3, Fault::kAll));
  const auto pump =
      Must(IoPump::Open({{first.fd(), first.path()}, {second.fd(), second.path()}},
                        {.engines = {"fault:threads", "threads-buffered"}, .queue_depth = 4, .poll = {}}));
  EXPECT(pump->direct() && is_direct(first) && is_direct(second));
  Memory memory(kPieceBytes * 4);
  for (uint64_t tag = 0; tag < 4; ++tag) {
    EXPECT_OK(pump->Start({.op = IoOp::kRead,
                           .buffer = memory.at(tag * kPieceBytes),
                           .size_bytes = kPieceBytes,
                           .needed_bytes = kPieceBytes,
                           .offset_bytes = (tag / 2) * kPieceBytes,
                           .tag = tag,
                           .file = static_cast<uint32_t>(tag % 2)}));
  }
  std::vector<IoPump::Finished> finished;
  while (pump->in_flight() > 0) EXPECT_OK(pump->Collect(finished));
  EXPECT(finished.size() == 4 && pump->engine_name() == "threads-buffered");
  EXPECT(!pump->direct() && !is_direct(first) && !is_direct(second));
  for (uint64_t tag = 0; tag < 4; ++tag) {
    const std::byte* const expected = content.data() + ((tag / 2) * kPieceBytes);
    EXPECT(std::memcmp(memory.at(tag * kPieceBytes), expected, kPieceBytes) == 0);
  }
}

// --- Polling and giving up

void PollIsAskedWhileIoIsInFlight() {
  const ScratchFile file("pump");
  Memory memory(kPieceBytes * kPieceCount);
  const Fault fault(Fault::Delay(120));
  std::vector<uint64_t> seen;
  const auto pump = Must(Open(file, {"fault:threads-buffered"}, [&seen](uint64_t done_bytes) {
    seen.push_back(done_bytes);
    return Status::Ok();
  }));
  EXPECT_OK(Transfer(*pump, IoOp::kWrite, memory));
  // Four rounds of four requests, 120 ms each: 480 ms, so some nine polls.
  EXPECT_WITH(seen.size() >= 4 && seen.size() <= 20, std::to_string(seen.size()));
  EXPECT(std::is_sorted(seen.begin(), seen.end()) && seen.back() > 0);
}

void AnErrorOfPollStopsAtOnceWithIoInFlight() {
  for (const char* engine : {"fault:threads-buffered", "fault:uring-buffered", "fault:libaio-buffered"}) {
    const ScratchFile file("pump");
    Memory memory(kPieceBytes * kPieceCount);
    const Fault fault(Fault::Delay(10000));
    auto pump = Open(file, {engine}, [](uint64_t) { return Status::Error(StatusCode::kCancelled, "enough"); });
    if (!pump.ok()) continue;  // an engine that this machine does not have
    const auto start = Clock::now();
    const Status status = Transfer(*pump.value(), IoOp::kWrite, memory);
    EXPECT_WITH(status.code() == StatusCode::kCancelled, status.message());
    pump.value()->Abandon();
    EXPECT_WITH(SecondsSince(start) < 2, std::to_string(SecondsSince(start)));
    EXPECT(pump.value()->in_flight() == 0);
  }
}

void AfterAbandonTheKernelWritesNoMore() {
  const Bytes content = RandomBytes(kPieceBytes * kPieceCount, 6);
  const ScratchFile file("pump", content);
  for (const char* engine : {"threads-buffered", "uring-buffered", "libaio-buffered"}) {
    for (int round = 0; round < 20; ++round) {
      auto pump = Open(file, {engine}, {}, kPieceCount);
      if (!pump.ok()) break;
      Memory memory(content.size());
      for (size_t piece = 0; piece < kPieceCount; ++piece) {
        EXPECT_OK(pump.value()->Start({.op = IoOp::kRead,
                                       .buffer = memory.at(piece * kPieceBytes),
                                       .size_bytes = kPieceBytes,
                                       .needed_bytes = kPieceBytes,
                                       .offset_bytes = piece * kPieceBytes,
                                       .tag = piece}));
      }
      pump.value()->Abandon();
      std::memset(memory.at(0), 0xA5, content.size());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_WITH(memory.Holds(Bytes(content.size(), std::byte{0xA5})), engine);
      std::vector<IoPump::Finished> finished;
      EXPECT(pump.value()->Collect(finished).code() == StatusCode::kCancelled);
    }
  }
}

void CollectWithNothingInFlightReturnsAtOnce() {
  const ScratchFile file("pump");
  const auto pump = Must(Open(file, {"threads-buffered"}));
  std::vector<IoPump::Finished> finished;
  EXPECT_OK(pump->Collect(finished));
  EXPECT(finished.empty());
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(ATransferWithoutEngineOrDepthIsRefused),
              TEST(TheFirstUsableEngineIsTakenAndTheOthersAreNamed),
              TEST(DirectEnginesAreRefusedWhereTheFileTakesNoDirectIo),
              TEST(ShortTransfersAreResumed),
              TEST(ShortDirectTransfersAreResumedOnAnAlignedPlace),
              TEST(NothingDoneIsAnErrorNotALoop),
              TEST(InterruptedAndPostponedRequestsAreRepeated),
              TEST(AReadMayEndWithTheFile),
              TEST(AnEngineThatIsNotSupportedInMidFileIsReplaced),
              TEST(ADirectEngineIsReplacedByABufferedOne),
              TEST(AReadingEngineIsReplacedToo),
              TEST(OneEngineAfterTheOtherIsReplaced),
              TEST(WhyAnEngineWasLeftIsTold),
              TEST(TheLastEngineIsNotReplaced),
              TEST(AnErrorOfTheDiskReplacesNoEngine),
              TEST(WritesThatNoDirectEngineIsLeftForAreGivenBack),
              TEST(AnErrorSaysWhatWhereAndWhichFile),
              TEST(TheFirstErrorStays),
              TEST(APumpThatOutlivesFailuresReportsEachWithItsRequest),
              TEST(ACollectWithAnEndComesBackInTime),
              TEST(MoreThatFollowGoesOutWithTheNextCall),
              TEST(EachRequestGoesToItsFile),
              TEST(AllFilesOfAPumpFollowItsEngine),
              TEST(PollIsAskedWhileIoIsInFlight),
              TEST(AnErrorOfPollStopsAtOnceWithIoInFlight),
              TEST(AfterAbandonTheKernelWritesNoMore),
              TEST(CollectWithNothingInFlightReturnsAtOnce)});
}
