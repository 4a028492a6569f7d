// A function in several threads at once (core/parallel.h), without torch and its OpenMP.
#include "core/parallel.h"

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "testing.h"

namespace fastpersist {
namespace {

void AllWorkIsDoneWhenItReturns() {
  std::atomic<int> left = 1000;
  std::atomic<int> done = 0;
  std::mutex mutex;
  std::set<std::thread::id> threads;
  RunInParallel(4, 16, [&] {
    {
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    }
    while (left-- > 0) ++done;
  });
  EXPECT(done == 1000);
  EXPECT(threads.size() == 4);
  EXPECT(threads.contains(std::this_thread::get_id()));
}

void OneThreadIsTheCaller() {
  for (const auto& [thread_count, part_count] : {std::pair{0, 9}, {1, 9}, {9, 0}, {9, 1}}) {
    int calls = 0;
    RunInParallel(static_cast<size_t>(thread_count), static_cast<size_t>(part_count),
                  [&, caller = std::this_thread::get_id()] {
                    ++calls;
                    EXPECT(std::this_thread::get_id() == caller);
                  });
    EXPECT(calls == 1);
  }
}

void FewPartsStartFewThreads() {
  std::atomic<int> calls = 0;
  RunInParallel(64, 11, [&] { ++calls; });
  EXPECT(calls == 2);
}

void CopiesOfAnySizeAreWhole() {
  const Bytes source = RandomBytes((size_t{25} << 20) + 77, 1);
  for (const size_t size_bytes : {size_t{0}, size_t{1}, size_t{2} << 20, (size_t{2} << 20) + 1, source.size()}) {
    Bytes target(source.size() + 1);
    CopyInParallel(target.data(), source.data(), size_bytes, 3);
    EXPECT(std::equal(target.begin(), target.begin() + static_cast<ptrdiff_t>(size_bytes), source.begin()));
    EXPECT(target[size_bytes] == std::byte{0});
  }
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(AllWorkIsDoneWhenItReturns), TEST(OneThreadIsTheCaller), TEST(FewPartsStartFewThreads),
              TEST(CopiesOfAnySizeAreWhole)});
}
