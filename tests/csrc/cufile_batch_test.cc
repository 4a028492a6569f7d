// Batches of cuFile (device/cufile_batch.h) as the engine uses them, over the double: several on their way, in any
// order, refused, failed, forgotten, and waited for at the end. What holds either way is cufile_engine_test's.
#include "device/cufile_batch.h"

#include <array>
#include <chrono>
#include <set>
#include <thread>

#include "engine/engine.h"
#include "testing_cufile.h"
#include "transfer/io_pump.h"

namespace fastpersist {
namespace {

using std::chrono::milliseconds;

// Requests of one block each, from one buffer.
class Blocks {
 public:
  static constexpr size_t kBytes = 4096;

  explicit Blocks(const char* name) : file_(name), staging_(NewStaging()), buffer_(staging_->Take()) {
    Fill(buffer_, content_);
  }
  ~Blocks() { staging_->Put(buffer_); }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  void Queue(IoEngine& engine, uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) {
      IoRequest request = Request(IoOp::kWrite, file_.fd(), buffer_ + i * kBytes, kBytes, i * kBytes);
      request.tag = i;
      EXPECT(engine.Queue(request) == QueueResult::kQueued);
    }
  }
  void Write(IoEngine& engine, uint64_t first, uint64_t count) {
    Queue(engine, first, count);
    EXPECT_OK(engine.Submit());
  }
  bool IsWritten(uint64_t count) const {
    const Bytes found = file_.Content();
    return found.size() >= count * kBytes &&
           std::equal(found.begin(), found.begin() + static_cast<ptrdiff_t>(count * kBytes), content_.begin());
  }
  ScratchFile& file() { return file_; }
  std::byte* buffer() const { return buffer_; }

 private:
  ScratchFile file_;
  std::unique_ptr<DeviceStaging> staging_;
  std::byte* const buffer_;
  const Bytes content_ = RandomBytes(kBufferBytes, 7);
};

std::vector<IoCompletion> ReapAll(IoEngine& engine) {
  std::vector<IoCompletion> all;
  while (engine.in_flight() > 0) {
    std::array<IoCompletion, 64> some = {};
    const size_t count = Must(engine.Reap(some, 1, std::chrono::seconds(30)));
    EXPECT(count > 0);
    if (count == 0) break;
    all.insert(all.end(), some.begin(), some.begin() + static_cast<ptrdiff_t>(count));
  }
  return all;
}
void ExpectAll(IoEngine& engine, uint64_t count) {
  std::set<uint64_t> tags;
  for (const IoCompletion& done : ReapAll(engine)) {
    EXPECT_WITH(done.sys_errno == 0 && done.done_bytes == Blocks::kBytes, Describe(done));
    tags.insert(done.tag);
  }
  EXPECT(tags.size() == count);
}

void WhatIsQueuedTogetherGoesInOneCall() {
  Double();
  {
    Blocks blocks("together");
    const auto engine = NewEngine(16);
    blocks.Write(*engine, 0, 16);
    ExpectAll(*engine, 16);
    EXPECT(blocks.IsWritten(16));
  }
  EXPECT(Double().call_count("cuFileBatchIOSubmit") == 1);
  EXPECT(Double().call_count("cuFileBatchIOSetUp") == 1);
  EXPECT(Double().call_count("cuFileWrite") == 0);
  ExpectNothingLeft();
}

// Ending one takes long, so that is not done either.
void WhatOneEngineHasSetUpTheNextOneUses() {
  Double();
  Blocks blocks("spare");
  for (int round = 0; round < 5; ++round) {
    const auto engine = NewEngine();
    blocks.Write(*engine, 0, 4);
    ExpectAll(*engine, 4);
  }
  EXPECT(Double().call_count("cuFileBatchIOSetUp") == 1);
  EXPECT(Double().call_count("cuFileBatchIODestroy") == 0);
}

void ABatchHasOneSubmissionAtATimeAndThereAreSeveral() {
  Double();
  Blocks blocks("several");
  const auto engine = NewEngine(32);
  Double().hold(1);
  for (uint64_t i = 0; i < 6; ++i) blocks.Write(*engine, i, 1);
  EXPECT(Double().call_count("cuFileBatchIOSubmit") == 4);  // the others wait
  EXPECT(Double().wait_for_held(4, 20'000) == 1);
  EXPECT(engine->in_flight() == 6);
  Double().hold(0);
  ExpectAll(*engine, 6);
  EXPECT(Double().call_count("cuFileBatchIOSubmit") == 5);
  EXPECT(blocks.IsWritten(6));
}

void NoMoreThan32AreWithTheLibraryAtOnce() {
  Double();
  Blocks blocks("many");
  const auto engine = NewEngine(64);
  Double().hold(1);
  blocks.Write(*engine, 0, 20);
  blocks.Write(*engine, 20, 44);
  std::array<IoCompletion, 64> none = {};
  EXPECT(Must(engine->Reap(none, 1, milliseconds(20))) == 0);
  EXPECT(Double().call_count("cuFileBatchIOSubmit") == 2);
  Double().hold(0);
  ExpectAll(*engine, 64);
  EXPECT(Double().call_count(Writing()) == 64);
}

void NoMoreThanTheLibraryIsSetToAreInABatch() {
  Double().set_batch_max(3);
  Blocks blocks("set");
  const auto engine = NewEngine(16);
  blocks.Write(*engine, 0, 16);
  ExpectAll(*engine, 16);
  EXPECT(Double().call_count("cuFileBatchIOSubmit") >= 6);
  EXPECT(blocks.IsWritten(16));
}

void TheOrderOfAnswersDoesNotMatter() {
  for (const int oddity : {kReversed, kRepeats}) {
    Double().set_batch_oddity(oddity);
    Blocks blocks("order");
    const auto engine = NewEngine(16);
    for (uint64_t i = 0; i < 16; i += 4) blocks.Write(*engine, i, 4);
    ExpectAll(*engine, 16);
    EXPECT(blocks.IsWritten(16));
  }
  ExpectNoViolation();
}

void AFailedRequestIsToldLastAndItsBatchIsEnded() {
  Double();
  {
    Blocks blocks("failed");
    const auto engine = NewEngine(8);
    Double().fail(Writing(), 2, ENOSPC);
    blocks.Write(*engine, 0, 4);
    const std::vector<IoCompletion> all = ReapAll(*engine);
    EXPECT(all.size() == 4);
    if (all.size() != 4) return;
    for (size_t i = 0; i < 3; ++i) EXPECT_WITH(all[i].sys_errno == 0, Describe(all[i]));
    EXPECT_WITH(all[3].sys_errno == ENOSPC, Describe(all[3]));
    EXPECT(Double().call_count("cuFileBatchIODestroy") == 1);
    blocks.Write(*engine, 0, 4);
    ExpectAll(*engine, 4);
    EXPECT(Double().call_count("cuFileBatchIOSetUp") == 2);
  }
  ExpectNothingLeft();
}

void EveryStatusThatIsNoSuccessIsAnError() {
  struct Case {
    int status;
    int sys_errno;
    const char* words;
  };
  Double();
  Blocks blocks("statuses");
  for (const Case& known : {Case{0x04, EINVAL, "CUFILE_INVALID"}, Case{0x08, EIO, "CUFILE_CANCELED"},
                            Case{0x20, ETIMEDOUT, "CUFILE_TIMEOUT"}, Case{0x40, EIO, "64"}, Case{0x80, EIO, "128"}}) {
    const auto engine = NewEngine();
    Double().fail(Writing(), 1, 10'000 + known.status);
    blocks.Write(*engine, 0, 1);
    const std::vector<IoCompletion> all = ReapAll(*engine);
    EXPECT_WITH(all.size() == 1 && all[0].sys_errno == known.sys_errno, Describe(all.at(0)));
    EXPECT_WITH(Contains(engine->last_failure(), known.words), engine->last_failure());
  }
  ExpectNoViolation();
}

// Which of its requests are on their way is not told, so the batch is ended, which waits for them.
void ARefusedSubmissionFailsItsRequestsAndNoOthers() {
  Double();
  {
    Blocks blocks("refused");
    const auto engine = NewEngine(16);
    Double().hold(1);
    blocks.Write(*engine, 0, 4);
    EXPECT(Double().wait_for_held(4, 20'000) == 1);
    Double().fail("cuFileBatchIOSubmit", 1, 5035);
    std::thread release([] {
      std::this_thread::sleep_for(milliseconds(50));
      Double().hold(0);
    });
    blocks.Write(*engine, 4, 4);
    release.join();
    EXPECT_WITH(Contains(engine->last_failure(), "CU_FILE_BATCH_SUBMIT_FAILED (5035)") || engine->in_flight() == 8,
                engine->last_failure());
    int failed_count = 0;
    for (const IoCompletion& done : ReapAll(*engine)) {
      EXPECT_WITH((done.sys_errno == EIO) == (done.tag >= 4), Describe(done));
      if (done.sys_errno != 0) ++failed_count;
    }
    EXPECT(failed_count == 4);
    EXPECT_WITH(Contains(engine->last_failure(), "cuFileBatchIOSubmit: CU_FILE_BATCH_SUBMIT_FAILED (5035)"),
                engine->last_failure());
    EXPECT(blocks.IsWritten(4));
    blocks.Write(*engine, 0, 8);
    ExpectAll(*engine, 8);
  }
  ExpectNothingLeft();
}

void AFullBatchIsTriedAgainByThePump() {
  Double();
  Blocks blocks("full");
  Double().fail("cuFileBatchIOSubmit", 1, 5037);
  const auto pump = Must(IoPump::Open(blocks.file().fd(), blocks.file().path(),
                                      {.engines = {"cufile"}, .cufile_api = CuFileApi::kBatch, .poll = {}}));
  EXPECT_OK(pump->Start({.op = IoOp::kWrite, .buffer = blocks.buffer(), .size_bytes = kBufferBytes, .tag = 1}));
  std::vector<IoPump::Finished> finished;
  EXPECT_OK(pump->Collect(finished));
  EXPECT(finished.size() == 1 && blocks.IsWritten(kBufferBytes / Blocks::kBytes));
}

void ABatchThatCannotBeSetUpFailsItsRequests() {
  Double();
  Blocks blocks("set_up");
  const auto engine = NewEngine();
  Double().fail("cuFileBatchIOSetUp", 1, 5039);
  blocks.Write(*engine, 0, 2);
  for (const IoCompletion& done : ReapAll(*engine)) EXPECT_WITH(done.sys_errno == EIO, Describe(done));
  EXPECT_WITH(Contains(engine->last_failure(), "cuFileBatchIOSetUp: CU_FILE_INTERNAL_BATCH_SETUP_ERROR (5039)"),
              engine->last_failure());
  blocks.Write(*engine, 0, 2);
  ExpectAll(*engine, 2);
}

// "Retry later", says its name.
void AnErrorOfGetStatusIsNotTheRequests() {
  Double();
  Blocks blocks("retry");
  const auto engine = NewEngine();
  for (int nth = 1; nth <= 20; ++nth) Double().fail("cuFileBatchIOGetStatus", nth, 5041);
  blocks.Write(*engine, 0, 2);
  ExpectAll(*engine, 2);
}

// Nobody asks for a while, as where a save is spread over its interval.
void ErrorsOfGetStatusFarApartAreNoSilence() {
  Double();
  Blocks blocks("apart");
  const auto engine = NewEngine();
  std::array<IoCompletion, 2> done = {};
  Double().hold(1);
  blocks.Write(*engine, 0, 2);
  EXPECT(Double().wait_for_held(2, 20'000) == 1);
  std::thread release([] {
    std::this_thread::sleep_for(std::chrono::seconds(7));
    Double().hold(0);
  });
  for (const int pause_s : {6, 0}) {
    Double().fail("cuFileBatchIOGetStatus", 1, 5041);
    EXPECT(Must(engine->Reap(done, 0, milliseconds(0))) == 0);
    std::this_thread::sleep_for(std::chrono::seconds(pause_s));
  }
  release.join();
  ExpectAll(*engine, 2);
}

// Five seconds of nothing: then the batch is ended, which waits for what is on its way.
void WhatTheLibraryForgetsFailsInTheEnd() {
  Double().set_batch_oddity(kForgets);
  {
    Blocks blocks("forgotten");
    const auto engine = NewEngine();
    blocks.Write(*engine, 0, 2);
    for (const IoCompletion& done : ReapAll(*engine)) EXPECT_WITH(done.sys_errno == EIO, Describe(done));
    EXPECT_WITH(Contains(engine->last_failure(), "tells nothing"), engine->last_failure());
  }
  ExpectNothingLeft();
}

void TheEndOfAnEngineWaitsForWhatIsOnItsWay() {
  Double();
  {
    Blocks blocks("end");
    auto engine = NewEngine(16);
    Double().hold(1);
    blocks.Write(*engine, 0, 8);
    blocks.Queue(*engine, 8, 2);  // dropped
    EXPECT(Double().wait_for_held(8, 20'000) == 1);
    std::thread release([] {
      std::this_thread::sleep_for(milliseconds(100));
      Double().hold(0);
    });
    engine.reset();
    EXPECT(Double().call_count(Writing()) == 8);
    EXPECT(blocks.IsWritten(8));
    release.join();
    EXPECT(Double().call_count("cuFileBatchIOCancel") == 0);
  }
  ExpectNothingLeft();
}

void AWaitEndsWithItsTime() {
  Double();
  Blocks blocks("time");
  const auto engine = NewEngine();
  Double().hold(1);
  blocks.Write(*engine, 0, 2);
  blocks.Write(*engine, 2, 2);
  for (const int timeout_ms : {0, 1, 30, 250}) {
    std::array<IoCompletion, 8> none = {};
    const auto start = std::chrono::steady_clock::now();
    EXPECT(Must(engine->Reap(none, 1, milliseconds(timeout_ms))) == 0);
    const auto waited = std::chrono::steady_clock::now() - start;
    EXPECT(waited >= milliseconds(timeout_ms) && waited < milliseconds(timeout_ms + 2000));
  }
  Double().hold(0);
  ExpectAll(*engine, 4);
}

void MemoryOfTheHostAndOfTheDeviceAreNoBatchesApart() {
  Double();
  ScratchFile file("both");
  Bytes host = RandomBytes(4096, 8);
  Blocks blocks("device");
  const auto engine = NewEngine();
  IoRequest request = Request(IoOp::kWrite, file.fd(), host.data(), host.size());
  request.tag = 9;
  EXPECT(engine->Queue(request) == QueueResult::kQueued);
  blocks.Write(*engine, 0, 2);
  ExpectAll(*engine, 3);
  EXPECT(file.Content() == host && blocks.IsWritten(2));
  EXPECT(Double().host_transfer_count() == 1);
}

void TheWayOfABatchIsTold() {
  Double();
  CuFile& cufile = *Must(CuFile::Get());
  Blocks blocks("way");
  const auto engine = NewEngine();
  for (const int way : {kSaysP2p, kSaysNvfs, kSaysPosix}) {
    const CuFileTraffic before = Must(cufile.Traffic());
    Double().set_way(way);
    blocks.Write(*engine, 0, 3);
    ExpectAll(*engine, 3);
    const CuFileTraffic after = Must(cufile.Traffic());
    EXPECT(after.p2p_count - before.p2p_count == (way == kSaysP2p ? 3U : 0U));
    EXPECT(after.nvfs_count - before.nvfs_count == (way == kSaysNvfs ? 3U : 0U));
    EXPECT(after.posix_count - before.posix_count == (way == kSaysPosix ? 3U : 0U));
  }
}

void ALibraryThatIsTooOldSaysSo() {
  Double(OldLibrary());
  const Status old = CreateEngine({.name = "cufile", .cufile_api = CuFileApi::kBatch}).status();
  EXPECT_WITH(old.code() == StatusCode::kUnsupported && Contains(old.message(), "1.15") &&
                  Contains(old.message(), "FASTPERSIST_CUFILE_API=calls"),
              old.message());
  EXPECT_OK(CreateEngine({.name = "cufile"}).status());
}

void ALibraryThatTakesShortRequestsOnlySaysSo() {
  Double().set_version(1140);
  const Status status = CreateEngine({.name = "cufile", .cufile_api = CuFileApi::kBatch}).status();
  EXPECT_WITH(status.code() == StatusCode::kUnsupported && Contains(status.message(), "cuFile 1.14"), status.message());
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return RunWithDoubles(argc, argv,
                        {
                            IN_BATCHES(WhatIsQueuedTogetherGoesInOneCall),
                            IN_BATCHES(WhatOneEngineHasSetUpTheNextOneUses),
                            IN_BATCHES(ABatchHasOneSubmissionAtATimeAndThereAreSeveral),
                            IN_BATCHES(NoMoreThan32AreWithTheLibraryAtOnce),
                            IN_BATCHES(NoMoreThanTheLibraryIsSetToAreInABatch),
                            IN_BATCHES(TheOrderOfAnswersDoesNotMatter),
                            IN_BATCHES(AFailedRequestIsToldLastAndItsBatchIsEnded),
                            IN_BATCHES(EveryStatusThatIsNoSuccessIsAnError),
                            IN_BATCHES(ARefusedSubmissionFailsItsRequestsAndNoOthers),
                            IN_BATCHES(AFullBatchIsTriedAgainByThePump),
                            IN_BATCHES(ABatchThatCannotBeSetUpFailsItsRequests),
                            IN_BATCHES(AnErrorOfGetStatusIsNotTheRequests),
                            IN_BATCHES(ErrorsOfGetStatusFarApartAreNoSilence),
                            IN_BATCHES(WhatTheLibraryForgetsFailsInTheEnd),
                            IN_BATCHES(TheEndOfAnEngineWaitsForWhatIsOnItsWay),
                            IN_BATCHES(AWaitEndsWithItsTime),
                            IN_BATCHES(MemoryOfTheHostAndOfTheDeviceAreNoBatchesApart),
                            IN_BATCHES(TheWayOfABatchIsTold),
                            IN_BATCHES(ALibraryThatIsTooOldSaysSo),
                            IN_BATCHES(ALibraryThatTakesShortRequestsOnlySaysSo),
                        });
}
