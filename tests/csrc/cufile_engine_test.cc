// The engine of GPUDirect Storage over the doubles of libcufile and of the driver (tests/support/cuda_double): it moves
// bytes between files and a device's memory, names the cause in every error, and leaves the library alone in a forked
// child. engine_contract_test checks the contract of all engines.
#include <fcntl.h>

#include <array>
#include <utility>

#include "device/cufile.h"
#include "engine/engine.h"
#include "testing_cufile.h"
#include "transfer/io_pump.h"

namespace fastpersist {
namespace {

// --- moving bytes ---

void BytesOfTheDeviceGoToAFileAndComeBack() {
  Double();
  const Bytes bytes = RandomBytes(kBufferCount * kBufferBytes, 1);
  {
    ScratchFile file("round_trip");
    const auto staging = NewStaging();
    const auto engine = NewEngine();
    for (size_t i = 0; i < kBufferCount; ++i) {
      std::byte* const buffer = staging->Take();
      Fill(buffer, std::span(bytes).subspan(i * kBufferBytes, kBufferBytes));
      const IoCompletion wrote =
          RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer, kBufferBytes, i * kBufferBytes));
      EXPECT_WITH(wrote.sys_errno == 0 && wrote.done_bytes == kBufferBytes, Describe(wrote));
      Fill(buffer, Bytes(kBufferBytes));
      const IoCompletion read =
          RunOne(*engine, Request(IoOp::kRead, file.fd(), buffer, kBufferBytes, i * kBufferBytes));
      EXPECT_WITH(read.sys_errno == 0 && read.done_bytes == kBufferBytes, Describe(read));
      EXPECT(BytesOf(buffer) == Bytes(bytes.begin() + static_cast<ptrdiff_t>(i * kBufferBytes),
                                      bytes.begin() + static_cast<ptrdiff_t>((i + 1) * kBufferBytes)));
      staging->Put(buffer);
    }
    EXPECT(engine->last_failure().empty());
    EXPECT(file.Content() == bytes);
  }
  // All requests use the registered address, and the offset inside it.
  EXPECT(Double().unregistered_transfer_count() == 0);
  EXPECT(Double().host_transfer_count() == 0);
  ExpectNothingLeft();
}

void BytesOfTheHostGoToAFileAndComeBack() {
  Double();
  Bytes bytes = RandomBytes(kBufferBytes, 2);
  {
    ScratchFile file("host");
    const auto engine = NewEngine();
    EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), bytes.data())).done_bytes == kBufferBytes);
    Bytes back(kBufferBytes);
    EXPECT(RunOne(*engine, Request(IoOp::kRead, file.fd(), back.data())).done_bytes == kBufferBytes);
    EXPECT(back == bytes);
    EXPECT(file.Content() == bytes);
  }
  EXPECT(Double().host_transfer_count() == 2);
  ExpectNothingLeft();
}

void MemoryOfTheHostNeedsTheContextOfADeviceThatIsThere() {
  Double();
  CuFile::Configure("", 5);
  ScratchFile file("no_device");
  Bytes bytes(kBufferBytes);
  const auto engine = NewEngine();
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), bytes.data())).sys_errno == EIO);
  EXPECT_WITH(Contains(engine->last_failure(), "cuda:5"), engine->last_failure());
}

void AnOldLibraryMovesMemoryOfTheDeviceOnly() {
  Double(OldLibrary());
  EXPECT(Must(CuFile::Get())->version() == 0);
  ScratchFile file("old");
  const auto staging = NewStaging();
  const auto engine = NewEngine();
  std::byte* const buffer = staging->Take();
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer)).done_bytes == kBufferBytes);
  staging->Put(buffer);
  Bytes bytes(kBufferBytes);
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), bytes.data())).sys_errno == EOPNOTSUPP);
  EXPECT_WITH(Contains(engine->last_failure(), "1.8"), engine->last_failure());
  const Status traffic = Must(CuFile::Get())->Traffic().status();
  EXPECT_WITH(traffic.code() == StatusCode::kUnsupported && Contains(traffic.message(), "1.15"), traffic.message());
}

void TransfersRunSideBySide() {
  Double();
  ScratchFile file("side_by_side");
  const auto staging = NewStaging(8);
  const auto engine = NewEngine();
  Double().hold(1);
  std::vector<std::byte*> buffers;
  for (uint64_t i = 0; i < 8; ++i) {
    buffers.push_back(staging->Take());
    EXPECT(engine->Queue(Request(IoOp::kWrite, file.fd(), buffers.back(), kBufferBytes, i * kBufferBytes)) ==
           QueueResult::kQueued);
  }
  EXPECT_OK(engine->Submit());
  EXPECT(Double().wait_for_held(8, 20'000) == 1);
  Double().hold(0);
  std::array<IoCompletion, 8> done = {};
  EXPECT(Must(engine->Reap(done, 8, std::chrono::seconds(60))) == 8);
  for (std::byte* const buffer : buffers) staging->Put(buffer);
}

void AShortTransferIsReportedAndThePumpFinishesIt() {
  Double();
  ScratchFile file("short");
  const Bytes bytes = RandomBytes(kBufferBytes, 3);
  const auto staging = NewStaging();
  std::byte* const buffer = staging->Take();
  Fill(buffer, bytes);
  {
    const auto engine = NewEngine();
    Double().shorten(1, 8192);
    const IoCompletion done = RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer));
    EXPECT_WITH(done.sys_errno == 0 && done.done_bytes == 8192, Describe(done));
  }
  for (const int nth : {1, 2}) Double().shorten(nth, 12288 * static_cast<size_t>(nth));
  const auto pump = Must(IoPump::Open(file.fd(), file.path(), {.engines = {"cufile"}, .poll = {}}));
  EXPECT_OK(pump->Start({.op = IoOp::kWrite, .buffer = buffer, .size_bytes = kBufferBytes, .tag = 1}));
  std::vector<IoPump::Finished> finished;
  EXPECT_OK(pump->Collect(finished));
  EXPECT(finished.size() == 1 && finished[0].done_bytes == kBufferBytes);
  EXPECT(file.Content() == bytes);
  EXPECT(Double().call_count("cuFileWrite") == 4);
  staging->Put(buffer);
}

void AReadAtTheEndIsShortAndBehindItZero() {
  Double();
  const Bytes bytes = RandomBytes(kBufferBytes - 1234, 4);
  const ScratchFile file("end", bytes);
  const auto staging = NewStaging();
  const auto engine = NewEngine();
  std::byte* const buffer = staging->Take();
  EXPECT(RunOne(*engine, Request(IoOp::kRead, file.fd(), buffer)).done_bytes == bytes.size());
  EXPECT(BytesOf(buffer, bytes.size()) == bytes);
  const IoCompletion behind = RunOne(*engine, Request(IoOp::kRead, file.fd(), buffer, 4096, kBufferBytes));
  EXPECT(behind.sys_errno == 0 && behind.done_bytes == 0);
  staging->Put(buffer);
}

// --- failures ---

void AFailedTransferIsItsOwnErrorAndTheNextOneIsWhole() {
  struct Case {
    int error;
    int sys_errno;
    const char* words;
  };
  const std::array cases = {
      Case{EIO, EIO, ""},
      Case{ENOSPC, ENOSPC, ""},
      Case{EAGAIN, EAGAIN, ""},
      Case{-1, EIO, ""},  // -1 and no errno
      Case{5001, EOPNOTSUPP, "CU_FILE_DRIVER_NOT_INITIALIZED (5001)"},
      Case{5008, EOPNOTSUPP, "CU_FILE_IO_NOT_SUPPORTED (5008)"},
      Case{5011, EIO, "CU_FILE_CUDA_DRIVER_ERROR (5011)"},
      Case{5034, EOPNOTSUPP, "CU_FILE_IO_DISABLED (5034)"},
      Case{5043, ENOMEM, "CU_FILE_NOMEM_ERROR (5043)"},
      Case{5999, EIO, "cuFile error (5999)"},
  };
  Double();
  ScratchFile file("failures");
  const auto staging = NewStaging();
  std::byte* const buffer = staging->Take();
  for (const IoOp op : {IoOp::kWrite, IoOp::kRead}) {
    for (const Case& failure : cases) {
      const auto engine = NewEngine();
      Double().fail(op == IoOp::kWrite ? "cuFileWrite" : "cuFileRead", 1, failure.error);
      IoCompletion done = RunOne(*engine, Request(op, file.fd(), buffer));
      EXPECT_WITH(done.sys_errno == failure.sys_errno && done.done_bytes == 0,
                  std::to_string(failure.error) + ": " + Describe(done));
      EXPECT_WITH(engine->last_failure() == failure.words, engine->last_failure());
      done = RunOne(*engine, Request(op, file.fd(), buffer));
      EXPECT_WITH(done.sys_errno == 0 && done.done_bytes == kBufferBytes, Describe(done));
    }
  }
  staging->Put(buffer);
  ExpectNoViolation();
}

void AnInterruptedTransferIsRepeated() {
  Double();
  ScratchFile file("interrupted");
  const auto staging = NewStaging();
  const auto engine = NewEngine();
  std::byte* const buffer = staging->Take();
  Double().fail("cuFileWrite", 1, EINTR);
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer)).done_bytes == kBufferBytes);
  EXPECT(Double().call_count("cuFileWrite") == 2);
  staging->Put(buffer);
}

void AFileThatIsRefusedFailsItsRequestsAndIsTriedAgain() {
  Double();
  ScratchFile file("refused");
  const auto staging = NewStaging();
  const auto engine = NewEngine();
  std::byte* const buffer = staging->Take();
  const bool has_udev = access("/run/udev", F_OK) == 0;
  for (const auto& [error, sys_errno] : {std::pair(5008, EOPNOTSUPP), std::pair(5025, EIO),
                                         // For a disk that udev does not know: until cuFile 1.15, and since 1.16.
                                         std::pair(5030, has_udev ? EIO : EOPNOTSUPP), std::pair(5027, EOPNOTSUPP)}) {
    Double().fail("cuFileHandleRegister", 1, error);
    EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer)).sys_errno == sys_errno);
    EXPECT_WITH(Contains(engine->last_failure(), "(" + std::to_string(error) + ")"), engine->last_failure());
    EXPECT_WITH(Contains(engine->last_failure(), "/run/udev") == (!has_udev && (error == 5030 || error == 5027)),
                engine->last_failure());
  }
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer)).sys_errno == 0);
  staging->Put(buffer);
}

void ARequestBeyondTheStagingAreaMovesNothing() {
  Double();
  ScratchFile file("beyond");
  const auto staging = Must(DeviceStaging::Create(TheDevice(), 1, size_t{2} << 20));
  const auto engine = NewEngine();
  std::byte* const buffer = staging->Take();
  const IoCompletion done = RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer + 4096, size_t{2} << 20));
  EXPECT_WITH(done.sys_errno == EFAULT, Describe(done));
  EXPECT(Double().call_count("cuFileWrite") == 0);
  staging->Put(buffer);
}

// --- files ---

void EnginesShareWhatIsRegisteredOfADescriptor() {
  Double();
  {
    ScratchFile file("shared");
    ScratchFile other("other");
    const auto staging = NewStaging();
    std::byte* const buffer = staging->Take();
    auto first = NewEngine();
    auto second = NewEngine();
    for (IoEngine* const engine : {first.get(), second.get(), first.get()}) {
      EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer)).sys_errno == 0);
    }
    EXPECT(RunOne(*second, Request(IoOp::kWrite, other.fd(), buffer)).sys_errno == 0);
    second.reset();
    first.reset();
    EXPECT(RunOne(*NewEngine(), Request(IoOp::kWrite, file.fd(), buffer)).sys_errno == 0);
    EXPECT(Double().call_count("cuFileHandleRegister") == 2);
    staging->Put(buffer);
  }
  ExpectNothingLeft();
}

// Closing any descriptor of a file drops the record locks of the process, and libcufile has one more.
void ARecordLockLastsUntilItsDescriptorIsClosed() {
  Double();
  const auto staging = NewStaging();
  std::byte* const buffer = staging->Take();
  auto file = std::make_unique<ScratchFile>("locked");
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  EXPECT(fcntl(file->fd(), F_SETLK, &lock) == 0);
  EXPECT(RunOne(*NewEngine(), Request(IoOp::kWrite, file->fd(), buffer)).sys_errno == 0);
  NewEngine();
  const int answer = InChild([&] {
    struct flock wanted = {};
    wanted.l_type = F_WRLCK;
    EXPECT(fcntl(file->fd(), F_GETLK, &wanted) == 0 && wanted.l_type == F_WRLCK);
  });
  EXPECT_WITH(answer == 0, "the lock is gone");
  EXPECT(Double().file_count() == 1);
  file.reset();
  NewEngine();  // sees that it was closed
  EXPECT(Double().file_count() == 0);
  staging->Put(buffer);
}

void AFileWithoutANameAndOneOpenedWithoutFollowingLinksAreUnsupported() {
  Double();
  const auto staging = NewStaging();
  const auto engine = NewEngine();
  std::byte* const buffer = staging->Take();
  const ScratchFile file("named", Bytes(4096));
  const int not_followed = open(file.path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, not_followed, buffer)).sys_errno == EOPNOTSUPP);
  EXPECT_WITH(Contains(engine->last_failure(), "CU_FILE_INVALID_FILE_OPEN_FLAG"), engine->last_failure());
  unlink(file.path().c_str());
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer)).sys_errno == EOPNOTSUPP);
  EXPECT_WITH(Contains(engine->last_failure(), "CU_FILE_GETNEWFD_FAILED"), engine->last_failure());
  close(not_followed);
  staging->Put(buffer);
}

void AnotherFileWithTheSameNumberIsNotMistakenForTheFirst() {
  Double();
  const ScratchFile before("before", Bytes(4096));
  const ScratchFile after("after", Bytes(4096));
  const auto staging = NewStaging();
  const auto engine = NewEngine();
  std::byte* const buffer = staging->Take();
  const int fd = open(before.path().c_str(), O_RDWR | O_CLOEXEC);
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, fd, buffer, 4096)).sys_errno == 0);
  const Bytes second = RandomBytes(4096, 5);
  Fill(buffer, second);
  EXPECT(dup2(after.fd(), fd) == fd);
  const Bytes first = before.Content();
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, fd, buffer, 4096)).sys_errno == 0);
  EXPECT(after.Content() == second);
  EXPECT(before.Content() == first);
  EXPECT(Double().call_count("cuFileHandleRegister") == 2);
  close(fd);
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, fd, buffer, 4096)).sys_errno == EBADF);
  staging->Put(buffer);
}

void ADescriptorInUseIsNotDroppedAndWhatIsOpenedAnewIsRegisteredAnew() {
  Double();
  const ScratchFile file("anew", RandomBytes(4096, 6));
  CuFile& cufile = *Must(CuFile::Get());
  const auto staging = NewStaging();
  std::byte* const buffer = staging->Take();
  const int fd = open(file.path().c_str(), O_RDONLY | O_CLOEXEC);
  {
    const CuFileDescriptor read_only = Must(CuFileDescriptor::Open(cufile, fd));
    EXPECT(read_only.Read(buffer, 4096, 0).done_bytes == 4096);
    EXPECT(read_only.Write(buffer, 4096, 0).sys_errno == EBADF);
    close(fd);
    CuFileDescriptor::DropClosed();
    EXPECT(!read_only.IsStillOpen());
    EXPECT(Double().call_count("cuFileHandleDeregister") == 0);
  }
  EXPECT(Double().call_count("cuFileHandleDeregister") == 1);
  const CuFileDescriptor before = Must(CuFileDescriptor::Open(cufile, file.fd()));
  const int again = open(file.path().c_str(), O_RDONLY | O_CLOEXEC);
  (void)Must(CuFileDescriptor::Open(cufile, again));
  const int writable = open(file.path().c_str(), O_RDWR | O_CLOEXEC);
  EXPECT(dup2(writable, again) == again);  // the number and the file, for writing
  EXPECT(Must(CuFileDescriptor::Open(cufile, again)).Write(buffer, 4096, 0).done_bytes == 4096);
  close(again);
  close(writable);
  staging->Put(buffer);
  ExpectNoViolation();
}

// --- forked children ---

void AForkedChildLeavesTheLibraryAlone() {
  Double();
  ScratchFile file("forked");
  auto staging = NewStaging();
  auto engine = NewEngine();
  std::byte* const buffer = staging->Take();
  EXPECT(RunOne(*engine, Request(IoOp::kWrite, file.fd(), buffer)).sys_errno == 0);
  const int answer = InChild([&] {
    for (const Status& status : {CuFile::Get().status(), CreateEngine({.name = "cufile"}).status()}) {
      EXPECT(status.code() == StatusCode::kUnsupported);
      EXPECT_WITH(Contains(status.message(), "forked"), status.message());
    }
    engine.reset();
    staging.reset();  // with a buffer taken, too
    EXPECT(Double().violation_count() == 0);
    EXPECT(Double().call_count("cuFileHandleDeregister") == 0);
  });
  EXPECT(answer == 0);
  EXPECT(RunOne(*engine, Request(IoOp::kRead, file.fd(), buffer)).sys_errno == 0);
  staging->Put(buffer);
  engine.reset();
  staging.reset();
  ExpectNoViolation();
  EXPECT(Double().buffer_count() == 0);
}

void AForkedChildDropsDescriptorsWithoutTouchingThem() {
  Double();
  ScratchFile file("descriptor");
  ScratchFile idle("idle");
  CuFile& cufile = *Must(CuFile::Get());
  (void)Must(CuFileDescriptor::Open(cufile, idle.fd()));
  auto descriptor = std::make_unique<CuFileDescriptor>(Must(CuFileDescriptor::Open(cufile, file.fd())));
  const int answer = InChild([&] {
    close(file.fd());
    close(idle.fd());
    descriptor.reset();
    CuFileDescriptor::DropClosed();
    EXPECT(Double().call_count("cuFileHandleDeregister") == 0);
  });
  EXPECT(answer == 0);
  descriptor.reset();
  EXPECT(Double().file_count() == 2);
  ExpectNoViolation();
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return RunWithDoubles(argc, argv,
                        {
                            ISOLATED(BytesOfTheDeviceGoToAFileAndComeBack),
                            ISOLATED(BytesOfTheHostGoToAFileAndComeBack),
                            ISOLATED(MemoryOfTheHostNeedsTheContextOfADeviceThatIsThere),
                            ISOLATED(AnOldLibraryMovesMemoryOfTheDeviceOnly),
                            ISOLATED(TransfersRunSideBySide),
                            ISOLATED(AShortTransferIsReportedAndThePumpFinishesIt),
                            ISOLATED(AReadAtTheEndIsShortAndBehindItZero),
                            ISOLATED(AFailedTransferIsItsOwnErrorAndTheNextOneIsWhole),
                            ISOLATED(AnInterruptedTransferIsRepeated),
                            ISOLATED(AFileThatIsRefusedFailsItsRequestsAndIsTriedAgain),
                            ISOLATED(ARequestBeyondTheStagingAreaMovesNothing),
                            ISOLATED(EnginesShareWhatIsRegisteredOfADescriptor),
                            ISOLATED(ARecordLockLastsUntilItsDescriptorIsClosed),
                            ISOLATED(AFileWithoutANameAndOneOpenedWithoutFollowingLinksAreUnsupported),
                            ISOLATED(AnotherFileWithTheSameNumberIsNotMistakenForTheFirst),
                            ISOLATED(ADescriptorInUseIsNotDroppedAndWhatIsOpenedAnewIsRegisteredAnew),
                            ISOLATED(AForkedChildLeavesTheLibraryAlone),
                            ISOLATED(AForkedChildDropsDescriptorsWithoutTouchingThem),
                        });
}
