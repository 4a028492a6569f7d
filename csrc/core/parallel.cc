#include "core/parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "core/alignment.h"
#include "core/fork.h"
#include "core/memory.h"
#include "core/thread.h"

namespace fastpersist {
namespace {

using Run = std::function<void()>;

// What a thread copies at a time: one huge page, which a single thread has to clear if it is fresh.
constexpr size_t kCopiedBytes = kHugePageBytes;

// The function that GCC's `#pragma omp parallel` calls; LLVM's and Intel's OpenMP have it, too.
using OpenMpParallel = void (*)(void (*run)(void*), void* argument, unsigned thread_count, unsigned flags);

constexpr size_t kPartsPerStart = 4;  // for fewer, it does not pay to start a thread

// The OpenMP that torch uses. Linking another one here would make a second team of threads.
OpenMpParallel FindOpenMp() {
  void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch == nullptr ? nullptr : reinterpret_cast<OpenMpParallel>(dlsym(torch, "GOMP_parallel"));
}

void CallRun(void* run) { (*static_cast<const Run*>(run))(); }

}  // namespace

void RunInParallel(size_t thread_count, size_t part_count, const Run& run) {
  if (thread_count <= 1 || part_count <= 1) return run();
  if (ForkGeneration() == 0) {
    static const OpenMpParallel open_mp = FindOpenMp();
    // Always use all threads: a smaller team would end some of them, and torch's next operation would start them again.
    if (open_mp != nullptr) return open_mp(CallRun, const_cast<Run*>(&run), static_cast<unsigned>(thread_count), 0);
  }
  std::vector<pthread_t> started;
  for (size_t i = 1; i < std::min(thread_count, part_count / kPartsPerStart); ++i) {
    pthread_t thread = {};
    if (StartThread(thread, "fastpersist-par", run) != 0) break;
    started.push_back(thread);
  }
  run();
  for (const pthread_t thread : started) pthread_join(thread, nullptr);
}

void CopyInParallel(std::byte* target, const std::byte* source, size_t size_bytes, size_t thread_count) {
  std::atomic<size_t> next_bytes = 0;
  RunInParallel(thread_count, AlignUp(size_bytes, kCopiedBytes) / kCopiedBytes, [&] {
    for (size_t from = next_bytes.fetch_add(kCopiedBytes); from < size_bytes;
         from = next_bytes.fetch_add(kCopiedBytes)) {
      std::memcpy(target + from, source + from, std::min(kCopiedBytes, size_bytes - from));
    }
  });
}

}  // namespace fastpersist
