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
  RunInParallel(4, [&] {
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
  for (const size_t count : {size_t{0}, size_t{1}}) {
    int calls = 0;
    RunInParallel(count, [&, caller = std::this_thread::get_id()] {
      ++calls;
      EXPECT(std::this_thread::get_id() == caller);
    });
    EXPECT(calls == 1);
  }
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv, {TEST(AllWorkIsDoneWhenItReturns), TEST(OneThreadIsTheCaller)});
}
