// The turns of direct and buffered writes (transfer/edge_lock.h), between descriptions of one process and of several: a
// side that is alone is alone, no side starves, and an ended process holds nothing.
#include "transfer/edge_lock.h"

#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "testing.h"
#include "testing_writeback.h"

namespace fastpersist {
namespace {

constexpr auto kPause = std::chrono::milliseconds(10);

// A lock with its own file description.
struct Owner {
  explicit Owner(const ScratchFile& file) : fd(open(file.path().c_str(), O_RDWR | O_CLOEXEC)), lock(fd, file.path()) {}
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() { close(fd); }
  bool Enters(bool alone) { return Must(lock.TryEnter(alone)); }
  const int fd;
  EdgeLock lock;
};

bool Works(const ScratchFile& file) {
  if (EdgeLock::Works(file.fd())) return true;
  std::printf("%s: no locks of open file descriptions here\n", g_test.c_str());
  return false;
}

void ManyMayShareAndOneMayBeAlone() {
  const ScratchFile file("lock");
  if (!Works(file)) return;
  Owner first(file);
  Owner second(file);
  Owner third(file);
  EXPECT(first.Enters(false) && second.Enters(false));
  EXPECT(first.lock.held() && !first.lock.alone());
  EXPECT(!third.Enters(true) && !third.lock.held());
  first.lock.Leave();
  EXPECT(!third.Enters(true));
  second.lock.Leave();
  EXPECT(third.Enters(true) && third.lock.alone());
  EXPECT(!first.Enters(false) && !second.Enters(true));
  third.lock.Leave();
  third.lock.Leave();  // of no lock: nothing
  EXPECT(!third.lock.held() && !third.lock.alone());
}

void WhoHasWaitedComesBeforeThoseWhoCameLater() {
  const ScratchFile file("lock");
  if (!Works(file)) return;
  Owner shared(file);
  Owner waiting(file);
  Owner late(file);
  EXPECT(shared.Enters(false));
  std::this_thread::sleep_for(kPause);
  EXPECT(!shared.lock.SomebodyWaits());
  EXPECT(!waiting.Enters(true));
  std::this_thread::sleep_for(kPause);  // it looks every few milliseconds only
  EXPECT(shared.lock.SomebodyWaits());
  EXPECT(!late.Enters(false));  // else the one who waits could do so for ever
  shared.lock.Leave();
  EXPECT(!late.Enters(false));
  EXPECT(waiting.Enters(true));
  EXPECT(!late.Enters(false));
  std::this_thread::sleep_for(kPause);
  waiting.lock.Leave();
  EXPECT(late.Enters(false));
}

void WhoGivesUpWaitingIsInNobodysWay() {
  const ScratchFile file("lock");
  if (!Works(file)) return;
  Owner shared(file);
  Owner waiting(file);
  Owner late(file);
  EXPECT(shared.Enters(false));
  EXPECT(!waiting.Enters(true));
  EXPECT(!late.Enters(false));
  waiting.lock.Leave();
  EXPECT(late.Enters(false));
  EXPECT(!waiting.Enters(true));  // as for the first time
  shared.lock.Leave();
  late.lock.Leave();
  EXPECT(waiting.Enters(true));
}

void OnesAloneTakeTurnsToo() {
  const ScratchFile file("lock");
  if (!Works(file)) return;
  Owner first(file);
  Owner second(file);
  EXPECT(first.Enters(true) && !second.Enters(true));
  std::this_thread::sleep_for(kPause);
  EXPECT(first.lock.SomebodyWaits());
  first.lock.Leave();
  EXPECT(second.Enters(true));
}

void WithoutADescriptorNothingIsLocked() {
  EdgeLock none(-1, "none");
  EXPECT(Must(none.TryEnter(true)) && Must(none.TryEnter(false)));
  EXPECT_OK(none.Enter(true));
  none.Leave();
}

void AnotherLockOnTheLastBytesIsWaitedFor() {
  const ScratchFile file("lock");
  if (!Works(file)) return;
  Owner owner(file);
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  EXPECT(fcntl(file.fd(), F_SETLK, &whole) == 0);  // an ordinary lock, of this very process
  EXPECT(!owner.Enters(false) && !owner.Enters(true));
  whole.l_type = F_UNLCK;
  EXPECT(fcntl(file.fd(), F_SETLK, &whole) == 0);
  EXPECT(owner.Enters(true));
}

void AClosedDescriptionHoldsNothing() {
  const ScratchFile file("lock");
  if (!Works(file)) return;
  Owner waiting(file);
  {
    Owner gone(file);
    EXPECT(gone.Enters(true) && !waiting.Enters(false));
  }
  EXPECT(waiting.Enters(false));
}

void AKilledProcessHoldsNothing() {
  const ScratchFile file("lock");
  if (!Works(file)) return;
  Owner owner(file);
  int pipe_fds[2];
  EXPECT(pipe(pipe_fds) == 0);
  const pid_t child = fork();
  if (child == 0) {
    Owner own(file);
    const char answer = own.lock.TryEnter(true).value() ? 'y' : 'n';
    if (write(pipe_fds[1], &answer, 1) != 1) _exit(1);
    for (;;) pause();
  }
  char answer = 0;
  EXPECT(read(pipe_fds[0], &answer, 1) == 1 && answer == 'y');
  EXPECT(!owner.Enters(false));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT(owner.Enters(false));
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

void ManyThreadsOfEitherKindNeverMeetAndNoneStarves() {
  const ScratchFile file("lock");
  if (!Works(file)) return;
  constexpr int kThreads = 6;
  std::atomic<int> shared_count{0};
  std::atomic<int> alone_count{0};
  std::atomic<int> met_count{0};
  std::atomic<bool> stop{false};
  std::vector<int> rounds(kThreads);
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      Owner own(file);
      const bool alone = number % 2 == 0;
      while (!stop) {
        if (!own.lock.Enter(alone).ok()) return;
        if (alone) {
          if (alone_count++ != 0 || shared_count != 0) ++met_count;
          --alone_count;
        } else {
          ++shared_count;
          if (alone_count != 0) ++met_count;
          --shared_count;
        }
        own.lock.Leave();
        ++rounds[static_cast<size_t>(number)];
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::seconds(2));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_WITH(met_count == 0, std::to_string(met_count));
  for (const int count : rounds) EXPECT_WITH(count > 0, std::to_string(count));
}

void TheFileIsCutAndGrowsWithNobodyBeside() {
  const ScratchFile file("lock", RandomBytes(10000, 1));
  if (!Works(file)) return;
  const Bytes content = file.Content();
  Owner lock(file);
  EXPECT_OK(TruncateAlone(lock.fd, file.fd(), 5001, file.path()));
  EXPECT(file.Content() == Bytes(content.begin(), content.begin() + 5001));
  EXPECT_OK(TruncateAlone(-1, file.fd(), 9001, file.path()));
  EXPECT(file.Content().size() == 9001);
  EXPECT_OK(AllocateAlone(lock.fd, file.fd(), 8000, 12000, file.path()));
  EXPECT(file.Content().size() == 20000 || file.Content().size() == 9001);  // where it cannot be reserved
  EXPECT(TruncateAlone(lock.fd, -1, 0, "nowhere").sys_errno() == EBADF);
  Owner other(file);
  EXPECT(other.Enters(true));  // and the lock was left each time

  std::atomic<bool> done{false};
  std::thread cutting([&] {
    EXPECT_OK(TruncateAlone(lock.fd, file.fd(), 1, file.path()));
    done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT(!done && file.Content().size() > 1);
  other.lock.Leave();
  cutting.join();
  EXPECT(file.Content().size() == 1);
}

void AFailedWritebackIsToldToTheLockAndLeftForTheFile() {
  const ScratchFile file("lock", RandomBytes(10000, 1));
  if (!Works(file)) return;
  Owner owner(file);
  TakeWritebackFds();
  EXPECT_OK(TruncateAlone(owner.fd, file.fd(), 5001, file.path()));
  EXPECT(AllAre(TakeWritebackFds(), owner.fd));
  EXPECT_OK(AllocateAlone(owner.fd, file.fd(), 5000, 1000, file.path()));
  EXPECT(AllAre(TakeWritebackFds(), owner.fd));

  g_writeback_errno = EIO;
  for (const Status& status : {TruncateAlone(owner.fd, file.fd(), 4097, file.path()),
                               AllocateAlone(owner.fd, file.fd(), 5000, 2000, file.path())}) {
    EXPECT_WITH(status.sys_errno() == EIO && status.offset_bytes() == 4096, status.message());
    EXPECT_WITH(Contains(status.message(), file.path()), status.message());
  }
  EXPECT(TruncateAlone(owner.fd, -1, 0, "nowhere").sys_errno() == EBADF);  // the first of two errors
  g_writeback_errno = 0;
  EXPECT(owner.Enters(true));  // and the lock was left each time
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(
      argc, argv,
      {TEST(ManyMayShareAndOneMayBeAlone), TEST(WhoHasWaitedComesBeforeThoseWhoCameLater),
       TEST(WhoGivesUpWaitingIsInNobodysWay), TEST(OnesAloneTakeTurnsToo), TEST(WithoutADescriptorNothingIsLocked),
       TEST(AnotherLockOnTheLastBytesIsWaitedFor), TEST(AClosedDescriptionHoldsNothing),
       TEST(AKilledProcessHoldsNothing), TEST(ManyThreadsOfEitherKindNeverMeetAndNoneStarves),
       TEST(TheFileIsCutAndGrowsWithNobodyBeside), TEST(AFailedWritebackIsToldToTheLockAndLeftForTheFile)});
}
