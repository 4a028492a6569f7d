// Preparing fresh memory (core/memory.h) touches pages but no byte, beside the filling thread, and ends when stopped.
#include "core/memory.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <memory>

#include "core/alignment.h"
#include "testing.h"

namespace fastpersist {
namespace {

constexpr size_t kBytes = size_t{96} << 20;  // enough to be worth a thread
const size_t kPageBytes = PageBytes();

class Mapping {
 public:
  Mapping() : address_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    EXPECT(address_ != MAP_FAILED);
  }
  ~Mapping() { munmap(address_, kBytes); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(address_), kBytes}; }

  size_t ResidentBytes() const {
    std::vector<unsigned char> resident(kBytes / kPageBytes);
    EXPECT(mincore(address_, kBytes, resident.data()) == 0);
    const auto count = std::count_if(resident.begin(), resident.end(), [](auto page) { return page & 1; });
    return static_cast<size_t>(count) * kPageBytes;
  }

 private:
  void* const address_;
};

size_t ThreadCount() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "Threads:") continue;
    size_t count = 0;
    status >> count;
    return count;
  }
  return 0;
}

bool PreparesAhead() {
  // The needs of Prefault: a second CPU, and MADV_POPULATE_WRITE (23) of Linux 5.14.
  const Mapping probe;
  return sysconf(_SC_NPROCESSORS_ONLN) > 1 && madvise(probe.bytes().data(), kPageBytes, 23) == 0;
}

void PagesAreThereInTheEndAndHoldZeros() {
  const Mapping memory;
  const bool can = PreparesAhead();
  {
    const Prefault prefault({memory.bytes()});
    for (int i = 0; can && i < 1000 && memory.ResidentBytes() < kBytes; ++i) usleep(10'000);
  }
  if (can) EXPECT(memory.ResidentBytes() == kBytes);
  EXPECT(
      std::all_of(memory.bytes().begin(), memory.bytes().end(), [](std::byte byte) { return byte == std::byte{0}; }));
}

// A kernel with pages of 64 KiB refuses a range that begins or ends within one, and would prepare nothing.
void OnlyWholePagesArePrepared() {
  constexpr size_t kLargePageBytes = 64 << 10;
  const Mapping memory;
  const auto start = reinterpret_cast<uintptr_t>(memory.bytes().data());
  const size_t to_page_bytes = AlignUp(start, kLargePageBytes) - start;
  const size_t from = to_page_bytes + kPageBytes;
  const size_t until = to_page_bytes + 64 * kLargePageBytes + kLargePageBytes - kPageBytes;
  const size_t whole_bytes = kPageBytes == kLargePageBytes ? until - from : 63 * kLargePageBytes;
  const std::span<std::byte> range = memory.bytes().subspan(from, until - from);
  const bool can = PreparesAhead();
  {
    // Repeated, so that a thread pays.
    const Prefault prefault(std::vector(32, range), kLargePageBytes);
    for (int i = 0; can && i < 1000 && memory.ResidentBytes() < whole_bytes; ++i) usleep(10'000);
  }
  if (can) EXPECT_WITH(memory.ResidentBytes() == whole_bytes, std::to_string(memory.ResidentBytes()));
}

size_t MappedPages() {
  size_t count = 0;
  std::ifstream("/proc/self/statm") >> count;
  return count;
}

void BuffersOfAnySizeAreGivenBack() {
  (void)MappedPages();  // what reading allocates is there from now on
  const size_t before = MappedPages();
  for (const size_t size_bytes : {size_t{1}, size_t{4096}, size_t{4096 * 5}, kHugePageBytes + 1}) {
    std::byte* const memory = MapBuffers(size_bytes);
    EXPECT(memory != nullptr && IsAligned(reinterpret_cast<uintptr_t>(memory), kHugePageBytes));
    memory[size_bytes - 1] = std::byte{1};
    UnmapBuffers(memory, size_bytes);
    EXPECT_WITH(MappedPages() == before, std::to_string(size_bytes));
  }
}

void WhatIsFilledMeanwhileStays() {
  const Mapping memory;
  AdviseHugePages({memory.bytes()});
  {
    const Prefault prefault({memory.bytes().subspan(100, kBytes - 1000)});
    std::memset(memory.bytes().data(), 7, kBytes);
  }
  EXPECT(
      std::all_of(memory.bytes().begin(), memory.bytes().end(), [](std::byte byte) { return byte == std::byte{7}; }));
}

void EndsAtOnceAndLeavesNoThread() {
  const size_t before = ThreadCount();
  const Mapping memory;
  const auto started = Clock::now();
  {
    const Prefault prefault(std::vector(200, memory.bytes()));
  }
  EXPECT(Clock::now() - started < std::chrono::seconds(1));
  EXPECT(ThreadCount() == before);
}

void AForkedChildDoesNotWaitForTheThread() {
  const Mapping memory;
  auto prefault = std::make_unique<Prefault>(std::vector(200, memory.bytes()));
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    prefault.reset();
    _exit(0);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

void OddRangesAreLeftAlone() {
  const Mapping memory;
  std::byte small[100];
  AdviseHugePages({std::span(small)});
  AdviseHugePages({});
  AdviseHugePages({{}, memory.bytes().subspan(kBytes - 100), std::span(small), memory.bytes().first(1)});
  const Prefault prefault(
      {std::span(small), {}, memory.bytes().subspan(1, kPageBytes - 1), memory.bytes().subspan(5, kBytes - 7)});
}

void AForkedChildFindsZerosWhileMemoryIsWiped() {
  const Mapping memory;
  std::memset(memory.bytes().data(), 7, kBytes);
  // What a child finds in the first page, and right behind it.
  const auto found_by_child = [&memory] {
    const pid_t child = fork();
    if (child == 0) _exit(static_cast<int>(memory.bytes()[0]) * 16 + static_cast<int>(memory.bytes()[kPageBytes]));
    int status = -1;
    EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
  };
  {
    WipedOnFork wiped;
    EXPECT(wiped.Add(memory.bytes().first(kPageBytes)));
    EXPECT(found_by_child() == 7);
    EXPECT(memory.bytes()[0] == std::byte{7});
  }
  EXPECT(found_by_child() == 7 * 16 + 7);
}

void SharedMemoryCannotBeWiped() {
  void* const shared = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT(shared != MAP_FAILED);
  EXPECT(!WipedOnFork().Add({static_cast<std::byte*>(shared), kPageBytes}));
  munmap(shared, kPageBytes);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(
      argc, argv,
      {TEST(PagesAreThereInTheEndAndHoldZeros), TEST(OnlyWholePagesArePrepared), TEST(BuffersOfAnySizeAreGivenBack),
       TEST(WhatIsFilledMeanwhileStays), TEST(EndsAtOnceAndLeavesNoThread), TEST(AForkedChildDoesNotWaitForTheThread),
       TEST(OddRangesAreLeftAlone), TEST(AForkedChildFindsZerosWhileMemoryIsWiped), TEST(SharedMemoryCannotBeWiped)});
}
