// The ring and its sharing rule (core/buffer_pool.h): how many buffers a transfer gets, in which order, and who gives
// back.
#include "core/buffer_pool.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "core/alignment.h"
#include "testing.h"

namespace fastpersist {
namespace {

constexpr size_t kBufferBytes = size_t{64} << 10;
using Poll = std::function<Status()>;

std::unique_ptr<BufferPool> Pool(size_t buffer_count) { return Must(BufferPool::Create(buffer_count, kBufferBytes)); }

// Takes every buffer that is available without waiting.
Bytes::size_type TakeAll(BufferShare& share, std::vector<std::byte*>& into) {
  while (std::byte* buffer = share.Take()) into.push_back(buffer);
  return into.size();
}

// A thread that joins, holds its share until the test releases it, and reports when it was admitted.
class Joiner {
 public:
  explicit Joiner(BufferPool& pool)
      : thread_([this, &pool] {
          // Polls come only while it waits, the first one after 50 ms.
          auto share = BufferShare::Join(pool, [this] {
            waits_ = true;
            return Status::Ok();
          });
          admitted_ = share.ok();
          std::unique_lock lock(mutex_);
          let_go_.wait(lock, [this] { return told_; });
        }) {}
  ~Joiner() { LetGo(); }

  void AwaitWaiting() const { Await(waits_); }
  void AwaitAdmission() const { Await(admitted_); }
  bool admitted() const { return admitted_; }
  void LetGo() {
    {
      const std::lock_guard lock(mutex_);
      told_ = true;
    }
    let_go_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  static void Await(const std::atomic<bool>& happened) {
    const auto start = Clock::now();
    while (!happened) {
      if (SecondsSince(start) > 20) {
        EXPECT_WITH(false, "a thread waits in vain");
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::atomic<bool> waits_ = false;
  std::atomic<bool> admitted_ = false;
  std::mutex mutex_;
  std::condition_variable let_go_;
  bool told_ = false;
  std::thread thread_;
};

void BuffersAreAlignedAndApart() {
  const auto pool = Pool(8);
  EXPECT(pool->buffer_count() == 8 && pool->buffer_bytes() == kBufferBytes && pool->free_count() == 8);
  auto share = Must(BufferShare::Join(*pool, {}));
  std::vector<std::byte*> buffers;
  EXPECT(TakeAll(share, buffers) == 8);
  EXPECT(pool->free_count() == 0);
  std::set<uintptr_t> places;
  for (std::byte* buffer : buffers) {
    EXPECT(IsAligned(reinterpret_cast<uintptr_t>(buffer), BufferPool::kBufferAlignment));
    EXPECT(places.insert(reinterpret_cast<uintptr_t>(buffer) / kBufferBytes).second);
    std::memset(buffer, 0xA5, kBufferBytes);  // all of it is there
    share.Put(buffer);
  }
}

void ARingThatCannotBeHadSaysItsSize() {
  const auto pool = BufferPool::Create(size_t{1} << 20, size_t{1} << 30);
  EXPECT(!pool.ok() && pool.status().code() == StatusCode::kNoMemory && pool.status().sys_errno() == ENOMEM);
  EXPECT_WITH(Contains(pool.status().message(), "1125899906842624 bytes for the ring"), pool.status().message());
}

void ATransferOwnsTwoBuffersBeforeItStarts() {
  const auto pool = Pool(8);
  {
    auto share = Must(BufferShare::Join(*pool, {}));
    EXPECT(pool->free_count() == 6);
  }
  EXPECT(pool->free_count() == 8);
}

void AMovedShareGivesBackOnce() {
  const auto pool = Pool(4);
  {
    auto share = Must(BufferShare::Join(*pool, {}));
    share.Put(share.Take());
    const BufferShare moved = std::move(share);
    EXPECT(pool->free_count() == 2);
  }
  EXPECT(pool->free_count() == 4);
}

void HeldBuffersAreUsedAgainWhileNobodyWaits() {
  const auto pool = Pool(4);
  auto share = Must(BufferShare::Join(*pool, {}));
  std::vector<std::byte*> buffers;
  TakeAll(share, buffers);
  for (std::byte* buffer : buffers) share.Put(buffer);
  EXPECT(pool->free_count() == 0);  // kept: nobody else wants them
  buffers.clear();
  EXPECT(TakeAll(share, buffers) == 4);
  for (std::byte* buffer : buffers) share.Put(buffer);
}

void ATransferJoinsWhileAnotherHoldsAllBuffers() {
  const auto pool = Pool(8);
  auto share = Must(BufferShare::Join(*pool, {}));
  std::vector<std::byte*> buffers;
  TakeAll(share, buffers);
  Joiner joiner(*pool);
  joiner.AwaitWaiting();
  EXPECT(!joiner.admitted());
  share.Put(buffers[0]);
  share.Put(buffers[1]);
  joiner.AwaitAdmission();
  EXPECT(pool->free_count() == 0);
  for (size_t i = 2; i < buffers.size(); ++i) share.Put(buffers[i]);
  EXPECT(pool->free_count() == 0);  // it is satisfied: what is left stays where it is
}

void ATransferKeepsTwoBuffersHoweverManyWait() {
  const auto pool = Pool(4);
  auto share = Must(BufferShare::Join(*pool, {}));
  std::vector<std::byte*> buffers;
  TakeAll(share, buffers);
  Joiner first(*pool);
  first.AwaitWaiting();
  Joiner second(*pool);
  second.AwaitWaiting();
  for (std::byte* buffer : buffers) share.Put(buffer);
  first.AwaitAdmission();
  EXPECT(!second.admitted());
  buffers.clear();
  EXPECT(TakeAll(share, buffers) == 2);
  for (std::byte* buffer : buffers) share.Put(buffer);
  first.LetGo();
  second.AwaitAdmission();
}

void NobodyGrowsWhileSomebodyWaits() {
  const auto pool = Pool(5);
  auto one = Must(BufferShare::Join(*pool, {}));
  auto two = Must(BufferShare::Join(*pool, {}));
  Joiner joiner(*pool);  // one buffer is free, and it needs two
  joiner.AwaitWaiting();
  std::vector<std::byte*> buffers;
  EXPECT(TakeAll(one, buffers) == 2);
  EXPECT(pool->free_count() == 1);
  for (std::byte* buffer : buffers) one.Put(buffer);
  {
    const BufferShare gone = std::move(two);
  }
  joiner.AwaitAdmission();
}

void TransfersJoinInTheOrderTheyCame() {
  const auto pool = Pool(2);
  auto first = std::make_unique<BufferShare>(Must(BufferShare::Join(*pool, {})));
  Joiner second(*pool);
  second.AwaitWaiting();
  Joiner third(*pool);
  third.AwaitWaiting();
  first.reset();
  second.AwaitAdmission();
  EXPECT(!third.admitted());
  second.LetGo();
  third.AwaitAdmission();
}

void AnErrorOfPollEndsTheWait() {
  const auto pool = Pool(2);
  auto share = std::make_unique<BufferShare>(Must(BufferShare::Join(*pool, {})));
  int asked_count = 0;
  const auto start = Clock::now();
  const auto stopped = BufferShare::Join(*pool, [&asked_count] {
    return ++asked_count < 3 ? Status::Ok() : Status::Error(StatusCode::kCancelled, "enough");
  });
  EXPECT(!stopped.ok() && stopped.status().code() == StatusCode::kCancelled);
  EXPECT(asked_count == 3);
  EXPECT_WITH(SecondsSince(start) < 2, std::to_string(SecondsSince(start)));
  // It has left the queue: the next one is admitted.
  Joiner joiner(*pool);
  joiner.AwaitWaiting();
  share.reset();
  joiner.AwaitAdmission();
}

void ManyTransfersShareFewBuffers() {
  const auto pool = Pool(8);
  std::atomic<int> torn_count = 0;
  std::vector<std::thread> threads;
  for (int number = 0; number < 12; ++number) {
    threads.emplace_back([&pool, &torn_count, number] {
      for (int round = 0; round < 20; ++round) {
        auto share = Must(BufferShare::Join(*pool, {}));
        std::vector<std::byte*> buffers;
        for (int chunk = 0; chunk < 40; ++chunk) {
          std::byte* buffer = share.Take();
          if (buffer != nullptr) {
            std::memset(buffer, number, 64);
            buffers.push_back(buffer);
          }
          if (buffer == nullptr || buffers.size() > 3) {
            // Nobody else may have written to our buffers.
            for (int i = 0; i < 64; ++i) torn_count += buffers.front()[i] != static_cast<std::byte>(number);
            share.Put(buffers.front());
            buffers.erase(buffers.begin());
          }
        }
        for (std::byte* held : buffers) share.Put(held);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(torn_count == 0);
  EXPECT(pool->free_count() == 8);
}

// Buffers with incomplete copies of a device, which the test plays.
class LostDevice {
 public:
  // Gives up a transfer with this many buffers.
  void Quarantine(BufferPool& pool, size_t buffer_count) const {
    auto share = Must(BufferShare::Join(pool, {}));
    std::vector<std::byte*> buffers;
    EXPECT(TakeAll(share, buffers) >= buffer_count);
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (i < buffer_count) {
        share.PutInQuarantine(buffers[i], [complete = complete_] { return complete->load(); });
      } else {
        share.Put(buffers[i]);
      }
    }
  }
  void Complete() const { *complete_ = true; }

 private:
  const std::shared_ptr<std::atomic<bool>> complete_ = std::make_shared<std::atomic<bool>>(false);
};

void QuarantinedBuffersComeBackWhenTheDeviceHasCompletedItsCopies() {
  const auto pool = Pool(8);
  const LostDevice device;
  device.Quarantine(*pool, 5);
  EXPECT(pool->quarantined_count() == 5 && pool->free_count() == 3);
  {
    auto share = Must(BufferShare::Join(*pool, {}));
    EXPECT(&share.pool() == pool.get());  // three are enough for one
    std::vector<std::byte*> buffers;
    EXPECT(TakeAll(share, buffers) == 3);
    device.Complete();
    for (std::byte* buffer : buffers) share.Put(buffer);
  }
  EXPECT(pool->quarantined_count() == 0 && pool->free_count() == 8);
}

void TransfersHavePrivateBuffersWhileTheRingIsInQuarantine() {
  const auto pool = Pool(4);
  const LostDevice device;
  device.Quarantine(*pool, 3);
  {
    auto one = Must(BufferShare::Join(*pool, {}));
    auto two = Must(BufferShare::Join(*pool, {}));
    EXPECT(pool->free_count() == 1 && &one.pool() != pool.get() && &two.pool() != &one.pool());
    one.pool().PinWith([](std::span<std::byte>) { return std::make_shared<int>(0); });
    std::vector<std::byte*> buffers;
    EXPECT(TakeAll(one, buffers) == BufferPool::kBuffersPerTransfer);
    for (std::byte* buffer : buffers) {
      EXPECT(!one.pool().is_pinned(buffer));  // pinning may wait for that very device
      std::memset(buffer, 0xA5, kBufferBytes);
      one.Put(buffer);
    }
    Joiner third(*pool);  // private pools have at most as many buffers as the ring
    third.AwaitWaiting();
    EXPECT(!third.admitted());
    {
      const BufferShare gone = std::move(two);
    }
    third.AwaitAdmission();
    EXPECT(pool->free_count() == 1);
    Joiner fourth(*pool);
    fourth.AwaitWaiting();
    EXPECT(!fourth.admitted());
    device.Complete();
    fourth.AwaitAdmission();
    EXPECT(pool->quarantined_count() == 0 && pool->free_count() == 2);
  }
  EXPECT(pool->free_count() == 4);
}

void ARingOfADeviceThatIsInQuarantineIsAnError() {
  std::vector<std::byte> memory(4 * kBufferBytes);
  const auto pool = BufferPool::Over(memory.data(), 4, kBufferBytes, std::make_shared<int>(0));
  const LostDevice device;
  device.Quarantine(*pool, 4);
  const auto share = BufferShare::Join(*pool, {});
  EXPECT(!share.ok() && share.status().code() == StatusCode::kDeviceError);
  EXPECT_WITH(Contains(share.status().message(), "4 of the ring's 4 buffers wait for a device"),
              share.status().message());
}

void AForkedChildHasNoRingAndMayDropWhatItInherits() {
  auto pool = Pool(4);
  auto share = std::make_unique<BufferShare>(Must(BufferShare::Join(*pool, {})));
  std::byte* buffer = share->Take();
  const pid_t child = fork();
  if (child == 0) {
    unsigned char resident = 0;
    const bool mapped = mincore(buffer, BufferPool::kBufferAlignment, &resident) == 0;
    share->Put(buffer);
    share.reset();
    pool.reset();
    _exit(mapped ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_WITH(WIFEXITED(status) && WEXITSTATUS(status) == 0, std::to_string(status));
  share->Put(buffer);
  share.reset();
  EXPECT(pool->free_count() == 4);
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(argc, argv,
             {TEST(BuffersAreAlignedAndApart), TEST(ARingThatCannotBeHadSaysItsSize),
              TEST(ATransferOwnsTwoBuffersBeforeItStarts), TEST(AMovedShareGivesBackOnce),
              TEST(HeldBuffersAreUsedAgainWhileNobodyWaits), TEST(ATransferJoinsWhileAnotherHoldsAllBuffers),
              TEST(ATransferKeepsTwoBuffersHoweverManyWait), TEST(NobodyGrowsWhileSomebodyWaits),
              TEST(TransfersJoinInTheOrderTheyCame), TEST(AnErrorOfPollEndsTheWait), TEST(ManyTransfersShareFewBuffers),
              TEST(QuarantinedBuffersComeBackWhenTheDeviceHasCompletedItsCopies),
              TEST(TransfersHavePrivateBuffersWhileTheRingIsInQuarantine),
              TEST(ARingOfADeviceThatIsInQuarantineIsAnError), TEST(AForkedChildHasNoRingAndMayDropWhatItInherits)});
}
