// The queue of reads of a table (rows/reader.h): each started read is done once, with the bytes of its place, however
// the ring wraps and in whatever order memory is given back; and with an error if the engine breaks.
//
// row_reader_test [SCRATCH_DIRECTORY]
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <thread>

#include "core/alignment.h"
#include "rows/reader.h"
#include "simulation.h"
#include "testing_rows.h"

namespace fastpersist {
namespace {

constexpr uint32_t kRowBytes = 1000;

bool TakesDirect() {
  const ScratchFile file("direct");
  return DirectIoLimitsOf(file.fd()).supported;
}

std::vector<std::string> UsableEngines() {
  const TableFiles files(kRowBytes, {{0, 1}});
  std::vector<std::string> usable;
  for (const char* name : {"uring", "libaio", "threads", "uring-buffered", "threads-buffered"}) {
    if (RowReader::Open(files.Table(), {.engines = {name}}).ok()) usable.emplace_back(name);
  }
  EXPECT(!usable.empty());
  return usable;
}

// Whether the bytes of a read are those of the file.
bool IsPartOf(const Bytes& content, const RowRead& read, const std::byte* bytes) {
  return std::memcmp(bytes, content.data() + read.offset_bytes, read.needed_bytes) == 0;
}

// Random reads of two files, given back in random order: some are held while many others come and go.
void EachReadIsDoneOnce() {
  const TableFiles files(kRowBytes, {{0, 4000}, {700, 3000}});
  const std::vector<Bytes> contents = {files.file(0).Content(), files.file(1).Content()};
  for (const std::string& engine : UsableEngines()) {
    for (const uint32_t queue_depth : {1, 7, 128}) {
      Random random(queue_depth);
      const auto reader =
          Must(RowReader::Open(files.Table(), {.engines = {engine}, .queue_depth = queue_depth, .ring_bytes = 0}));
      const uint64_t block_bytes = reader->pump().block_bytes();
      std::map<uint64_t, RowRead> started;
      std::vector<RowReader::Done> held;
      std::vector<RowReader::Done> done;
      uint64_t next_tag = 0;
      size_t refused_count = 0;
      while (next_tag < 1500 || !started.empty()) {
        for (; next_tag < 1500; ++next_tag) {
          const auto piece = static_cast<uint32_t>(random.Below(2));
          const uint64_t file_bytes = contents[piece].size();
          const uint64_t longest_bytes = random.OneIn(5) ? reader->read_bytes_max() : 3 * block_bytes;
          RowRead read{.offset_bytes = AlignDown(random.Below(file_bytes), block_bytes), .piece = piece};
          read.size_bytes = static_cast<uint32_t>(AlignUp(random.Within(1, longest_bytes), block_bytes));
          read.needed_bytes =
              static_cast<uint32_t>(std::min<uint64_t>(read.size_bytes, file_bytes - read.offset_bytes));
          if (!Must(reader->TryStart(read, next_tag))) break;
          started[next_tag] = read;
        }
        refused_count += next_tag < 1500;
        EXPECT(reader->in_flight() <= queue_depth);
        if (reader->in_flight() == 0 && held.empty() && started.empty()) break;
        done.clear();
        if (reader->in_flight() > 0) reader->Collect(done);
        for (RowReader::Done& each : done) {
          const auto found = started.find(each.tag);
          if (!EXPECT_WITH(found != started.end(), engine)) return;
          EXPECT_OK(each.status);
          EXPECT_WITH(IsPartOf(contents[found->second.piece], found->second, each.bytes), engine);
          held.push_back(each);
        }
        // What is held stays as it is, whatever is read meanwhile.
        while (!held.empty() && (held.size() > 5 || random.OneIn(3) || reader->in_flight() == 0)) {
          const size_t at = random.Below(held.size());
          const RowRead read = started.at(held[at].tag);
          EXPECT_WITH(IsPartOf(contents[read.piece], read, held[at].bytes), engine);
          started.erase(held[at].tag);
          reader->Release(held[at]);
          held.erase(held.begin() + static_cast<ptrdiff_t>(at));
        }
      }
      EXPECT(next_tag == 1500 && started.empty() && refused_count > 0);
    }
  }
}

void ARingThatIsFullTakesNoReadUntilItsOldestIsGivenBack() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  const auto reader = Must(RowReader::Open(files.Table(), {.engines = {"threads-buffered"}, .ring_bytes = 0}));
  const RowRead read{.offset_bytes = 0,
                     .size_bytes = static_cast<uint32_t>(reader->read_bytes_max()),
                     .needed_bytes = static_cast<uint32_t>(reader->read_bytes_max())};
  std::vector<RowReader::Done> done;
  for (uint64_t tag = 0; tag < 4; ++tag) EXPECT(Must(reader->TryStart(read, tag)));
  EXPECT(!Must(reader->TryStart(read, 4)));
  while (done.size() < 4) reader->Collect(done);
  EXPECT(!Must(reader->TryStart(read, 4)));
  const auto with_tag = [&](uint64_t tag) {
    return *std::ranges::find_if(done, [&](const RowReader::Done& each) { return each.tag == tag; });
  };
  reader->Release(with_tag(2));
  reader->Release(with_tag(1));
  EXPECT(!Must(reader->TryStart(read, 4)));
  reader->Release(with_tag(0));
  for (uint64_t tag = 4; tag < 7; ++tag) EXPECT(Must(reader->TryStart(read, tag)));
  EXPECT(!Must(reader->TryStart(read, 7)));
}

void AReadThatFailsIsDoneWithItsError() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  const Fault fault(Fault::Errno(EIO, 3, 1));
  const auto reader = Must(RowReader::Open(files.Table(), {.engines = {"fault:threads-buffered"}, .queue_depth = 1}));
  std::vector<RowReader::Done> done;
  for (uint64_t tag = 0; tag < 6; ++tag) {
    EXPECT(Must(reader->TryStart({.offset_bytes = tag * 1000, .size_bytes = 1000, .needed_bytes = 1000}, tag)));
    reader->Collect(done);
    EXPECT(done.size() == 1 && done[0].tag == tag && done[0].status.sys_errno() == (tag == 2 ? EIO : 0));
    EXPECT(tag == 2 || IsRow(done[0].bytes, tag, kRowBytes));
    if (tag == 2) EXPECT(done[0].status.offset_bytes() == 2000);
    reader->Release(done[0]);
    done.clear();
  }
  EXPECT(!reader->is_broken());
}

void AnEngineThatBreaksEndsEveryReadOnce() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  for (uint64_t nth = 1; nth <= 20; nth += 3) {
    // No engine is left when the first is refused.
    const Fault fault(Fault::Errno(EOPNOTSUPP, nth, 1));
    const auto reader =
        Must(RowReader::Open(files.Table(), {.engines = {"fault:threads-buffered", "abacus"}, .queue_depth = 8}));
    std::map<uint64_t, int> done_count;
    size_t failed_count = 0;
    std::vector<RowReader::Done> done;
    uint64_t next_tag = 0;
    const auto collect = [&] {
      reader->Collect(done);
      for (const RowReader::Done& each : done) {
        ++done_count[each.tag];
        failed_count += !each.status.ok();
        EXPECT(!each.status.ok() || IsRow(each.bytes, each.tag, kRowBytes));
        reader->Release(each);
      }
      done.clear();
    };
    while (!reader->is_broken()) {
      for (;; ++next_tag) {
        const RowRead read{.offset_bytes = next_tag * kRowBytes, .size_bytes = kRowBytes, .needed_bytes = kRowBytes};
        if (!Must(reader->TryStart(read, next_tag))) break;
      }
      collect();
    }
    EXPECT(reader->in_flight() == 0);
    EXPECT(done_count.size() == next_tag && failed_count > 0);
    for (const auto& [tag, count] : done_count) EXPECT_WITH(count == 1, std::to_string(tag));
    EXPECT(!reader->TryStart({.offset_bytes = 0, .size_bytes = 1000, .needed_bytes = 1000}, 0).ok());
  }
}

void AReaderMayGoWithReadsUnderWay() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  for (const std::string& engine : UsableEngines()) {
    const Fault fault(Fault::Delay(50));
    const auto reader = Must(RowReader::Open(files.Table(), {.engines = {"fault:" + engine}, .queue_depth = 8}));
    for (uint64_t tag = 0; tag < 8; ++tag) {
      EXPECT(Must(reader->TryStart({.offset_bytes = tag * 4096, .size_bytes = 4096, .needed_bytes = 4096}, tag)));
    }
  }
}

void SeveralFilesShareAQueueOnlyIfAllTakeItsEngine() {
  if (!TakesDirect()) return;
  const TableFiles files(kRowBytes, {{0, 100}});
  const int memory_fd = memfd_create("rows", MFD_CLOEXEC);
  if (DirectIoLimitsOf(memory_fd).supported) return;
  std::vector<RowPiece> pieces = files.Table().pieces();
  pieces.push_back({.fd = memory_fd, .path = "memory", .offset_bytes = 0, .row_count = 0});
  const RowTable table(pieces, kRowBytes, {});
  EXPECT(RowReader::Open(table, {.engines = {"threads"}}).status().code() == StatusCode::kUnsupported);
  const auto reader = Must(RowReader::Open(table, {.engines = {"threads", "threads-buffered"}}));
  EXPECT(reader->pump().engine_name() == "threads-buffered");
  close(memory_fd);
}

// To ask for the limits of a file sets O_DIRECT for a moment, with which no row can be read that is not aligned.
void AReaderThatOpensDisturbsNoOther() {
  const TableFiles files(kRowBytes, {{0, 4000}});
  const auto reader = Must(RowReader::Open(files.Table(), {.engines = {"threads-buffered"}, .queue_depth = 8}));
  std::atomic<bool> stopping{false};
  std::thread opener([&] {
    while (!stopping) {
      Must(RowReader::Open(files.Table(),
                           {.engines = {"threads-buffered"}, .queue_depth = 1, .limits = reader->pump().limits()}));
    }
  });
  std::vector<RowReader::Done> done;
  size_t failed_count = 0;
  for (uint64_t tag = 0; tag < 20000; ++tag) {
    const RowRead read{.offset_bytes = tag % 4000 * kRowBytes, .size_bytes = kRowBytes, .needed_bytes = kRowBytes};
    while (!Must(reader->TryStart(read, tag))) {
      reader->Collect(done);
      for (const RowReader::Done& each : done) {
        failed_count += !each.status.ok();
        reader->Release(each);
      }
      done.clear();
    }
  }
  stopping = true;
  opener.join();
  EXPECT(failed_count == 0);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(EachReadIsDoneOnce), TEST(ARingThatIsFullTakesNoReadUntilItsOldestIsGivenBack),
              TEST(AReadThatFailsIsDoneWithItsError), TEST(AnEngineThatBreaksEndsEveryReadOnce),
              TEST(AReaderMayGoWithReadsUnderWay), TEST(SeveralFilesShareAQueueOnlyIfAllTakeItsEngine),
              TEST(AReaderThatOpensDisturbsNoOther)});
}
