// Preparing fresh memory (core/memory.h) touches pages and no byte, beside whoever fills them, and ends when told.
#include "core/memory.h"

#include <sys/mman.h>

#include <fstream>

#include "testing.h"

namespace fastpersist {
namespace {

constexpr size_t kBytes = size_t{96} << 20;  // enough to be worth a thread

class Mapping {
 public:
  Mapping() : address_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    EXPECT(address_ != MAP_FAILED);
  }
  ~Mapping() { munmap(address_, kBytes); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(address_), kBytes}; }

  size_t ResidentPages() const {
    std::vector<unsigned char> resident(kBytes / 4096);
    EXPECT(mincore(address_, kBytes, resident.data()) == 0);
    return static_cast<size_t>(std::count_if(resident.begin(), resident.end(), [](auto page) { return page & 1; }));
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
  // What Prefault itself needs: a second CPU, and MADV_POPULATE_WRITE (23) of Linux 5.14.
  const Mapping probe;
  return sysconf(_SC_NPROCESSORS_ONLN) > 1 && madvise(probe.bytes().data(), 4096, 23) == 0;
}

void PagesAreThereInTheEndAndHoldZeros() {
  const Mapping memory;
  const bool can = PreparesAhead();
  {
    const Prefault prefault({memory.bytes()});
    for (int i = 0; can && i < 1000 && memory.ResidentPages() < kBytes / 4096; ++i) usleep(10'000);
  }
  if (can) EXPECT(memory.ResidentPages() == kBytes / 4096);
  EXPECT(
      std::all_of(memory.bytes().begin(), memory.bytes().end(), [](std::byte byte) { return byte == std::byte{0}; }));
}

void WhatIsFilledMeanwhileStays() {
  const Mapping memory;
  AdviseHugePages(memory.bytes());
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

void OddRangesAreLeftAlone() {
  const Mapping memory;
  std::byte small[100];
  AdviseHugePages(small);
  AdviseHugePages({});
  const Prefault prefault(
      {std::span(small), {}, memory.bytes().subspan(1, 4095), memory.bytes().subspan(5, kBytes - 7)});
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(PagesAreThereInTheEndAndHoldZeros), TEST(WhatIsFilledMeanwhileStays),
              TEST(EndsAtOnceAndLeavesNoThread), TEST(OddRangesAreLeftAlone)});
}
