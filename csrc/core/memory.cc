#include "core/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

#include "core/alignment.h"
#include "core/thread.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#define MADV_KEEPONFORK 19
#endif

namespace fastpersist {
namespace {

constexpr uint64_t kStepBytes = uint64_t{4} << 20;         // the longest wait of a stop: about 1 ms
constexpr uint64_t kWorthwhileBytes = uint64_t{64} << 20;  // below, starting a thread costs more than it gains

// The whole units inside a range.
std::pair<uint64_t, uint64_t> Inside(std::span<std::byte> range, uint64_t unit_bytes) {
  const auto start = reinterpret_cast<uintptr_t>(range.data());
  return {AlignUp(start, unit_bytes), AlignDown(start + range.size(), unit_bytes)};
}

}  // namespace

uint64_t PageBytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

void AdviseHugePages(std::vector<std::span<std::byte>> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.data() < b.data(); });
  const uint64_t page_bytes = PageBytes();
  for (size_t i = 0; i < ranges.size();) {
    const auto start = reinterpret_cast<uintptr_t>(ranges[i].data());
    uintptr_t end = start;
    for (; i < ranges.size() && reinterpret_cast<uintptr_t>(ranges[i].data()) <= AlignUp(end, page_bytes); ++i) {
      end = std::max(end, reinterpret_cast<uintptr_t>(ranges[i].data() + ranges[i].size()));
    }
    const auto [first, last] = Inside({reinterpret_cast<std::byte*>(start), end - start}, kHugePageBytes);
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
}

void Populate(std::span<std::byte> range) { (void)madvise(range.data(), range.size(), MADV_POPULATE_WRITE); }

namespace {

// Map anonymous memory on a huge-page boundary, advised to use huge pages; null, with errno set, if the kernel refuses.
// NORESERVE: untouched pages cost nothing. Whole pages: munmap cuts between pages only.
std::byte* MapOnHugePages(size_t wanted_bytes) {
  const size_t size_bytes = AlignUp(wanted_bytes, PageBytes());
  // One huge page more than needed, cut off again at both ends.
  const size_t mapped_bytes = size_bytes + kHugePageBytes;
  void* const mapped =
      mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<uintptr_t>(mapped);
  const auto aligned = static_cast<uintptr_t>(AlignUp(start, kHugePageBytes));
  if (aligned > start) munmap(mapped, aligned - start);
  const uintptr_t end = start + mapped_bytes;
  const uintptr_t used_end = aligned + size_bytes;
  if (end > used_end) munmap(reinterpret_cast<void*>(used_end), end - used_end);
  void* const memory = reinterpret_cast<void*>(aligned);
  madvise(memory, size_bytes, MADV_HUGEPAGE);  // advice: refused by a kernel without huge pages, the memory is as good
  return static_cast<std::byte*>(memory);
}

}  // namespace

std::byte* MapBuffers(size_t size_bytes) {
  std::byte* const memory = MapOnHugePages(size_bytes);
  if (memory != nullptr) madvise(memory, size_bytes, MADV_DONTFORK);  // advice, too
  return memory;
}

namespace {

// A list that only grows: it needs no lock, which a fork could leave locked.
struct Unreleased {
  const std::byte* memory;
  const Unreleased* next;
};
std::atomic<const Unreleased*> g_unreleased{nullptr};

}  // namespace

void KeepMapped(const std::byte* memory) {
  auto* const unreleased = new Unreleased{memory, g_unreleased.load()};
  while (!g_unreleased.compare_exchange_weak(unreleased->next, unreleased)) continue;
}

void UnmapBuffers(std::byte* memory, size_t size_bytes) {
  for (const Unreleased* one = g_unreleased.load(); one != nullptr; one = one->next) {
    if (IsInside({memory, size_bytes}, one->memory)) return;
  }
  munmap(memory, size_bytes);
}

bool WipedOnFork::Add(std::span<std::byte> range) {
  if (madvise(range.data(), range.size(), MADV_WIPEONFORK) != 0) return false;
  ranges_.push_back(range);
  return true;
}

WipedOnFork::~WipedOnFork() {
  for (const auto& range : ranges_) madvise(range.data(), range.size(), MADV_KEEPONFORK);
}

Result<std::unique_ptr<LockedMemory>> LockedMemory::Create(size_t size_bytes) {
  FP_CHECK(size_bytes > 0);
  const std::string what = std::to_string(size_bytes) + " bytes";
  if (size_bytes > SIZE_MAX / 2) return Status::FromErrno(ENOMEM, "mapping " + what, "to be locked");
  const size_t mapped_bytes = AlignUp(size_bytes, PageBytes());
  std::byte* const memory = MapOnHugePages(mapped_bytes);
  if (memory == nullptr) return Status::FromErrno(errno, "mapping " + what, "to be locked");
  if (mlock(memory, mapped_bytes) != 0) {
    const int sys_errno = errno;
    munmap(memory, mapped_bytes);
    rlimit limit = {};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    const std::string now = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur) + " bytes";
    return Status::Error(StatusCode::kNoMemory, "locking " + what +
                                                    " of memory: " + std::generic_category().message(sys_errno) +
                                                    "; this process may lock " + now +
                                                    " in all (RLIMIT_MEMLOCK; ulimit -l shows and raises it, in KiB)");
  }
  return std::unique_ptr<LockedMemory>(new LockedMemory(memory, size_bytes, mapped_bytes));
}

LockedMemory::~LockedMemory() { munmap(memory_, mapped_bytes_); }

Prefault::Prefault(std::vector<std::span<std::byte>> ranges, uint64_t page_bytes)
    : ranges_(std::move(ranges)), page_bytes_(page_bytes) {
  uint64_t total_bytes = 0;
  for (const auto& range : ranges_) total_bytes += range.size();
  if (total_bytes < kWorthwhileBytes || sysconf(_SC_NPROCESSORS_ONLN) < 2) return;
  started_ = StartThread(thread_, "fastpersist-mem", [this] { Run(); }) == 0;
}

Prefault::~Prefault() {
  stopping_.store(true, std::memory_order_relaxed);
  if (started_ && generation_ == ForkGeneration()) pthread_join(thread_, nullptr);
}

void Prefault::Run() const {
  for (const auto& range : ranges_) {
    const auto [first, last] = Inside(range, page_bytes_);
    for (uint64_t at = first; at < last; at += kStepBytes) {
      if (stopping_.load(std::memory_order_relaxed)) return;
      const uint64_t size_bytes = std::min(kStepBytes, last - at);
      // An older kernel, or no memory: the filling thread will get that error.
      if (madvise(reinterpret_cast<void*>(at), size_bytes, MADV_POPULATE_WRITE) != 0) return;
    }
  }
}

}  // namespace fastpersist
