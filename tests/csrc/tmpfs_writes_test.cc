// Large writes into tmpfs (engine/tmpfs_writes.h), on the tmpfs of /dev/shm and on one without room.
#include "engine/tmpfs_writes.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "core/file.h"
#include "core/thread.h"
#include "engine/builtin_engines.h"
#include "testing.h"

namespace fastpersist {
namespace {

constexpr size_t kMiB = 1 << 20;

IoRequest WriteOf(int fd, Bytes& bytes, uint64_t offset_bytes) {
  return {.op = IoOp::kWrite,
          .fd = fd,
          .buffer = bytes.data(),
          .size_bytes = static_cast<uint32_t>(bytes.size()),
          .offset_bytes = offset_bytes,
          .tag = offset_bytes};
}

// Acts as the kernel of a machine with 4,096 possible CPUs, of which this thread may use 5.
int AskOfALargeMachine(pid_t, size_t size_bytes, cpu_set_t* cpus) {
  if (8 * size_bytes < 4096) {
    errno = EINVAL;
    return -1;
  }
  std::memset(cpus, 0, size_bytes);
  for (const size_t cpu : {0, 1023, 1024, 2000, 4095}) CPU_SET_S(cpu, size_bytes, cpus);
  return 0;
}

int AskWithoutPermission(pid_t, size_t, cpu_set_t*) {
  errno = EPERM;
  return -1;
}

int AskWhoNeverHasRoom(pid_t, size_t, cpu_set_t*) {
  errno = EINVAL;
  return -1;
}

void CpusAreCountedOnMachinesOfAnySize() {
  EXPECT(UsableCpuCount(AskOfALargeMachine) == 5);
  EXPECT(UsableCpuCount(AskWithoutPermission) == 0);
  EXPECT(UsableCpuCount(AskWhoNeverHasRoom) == 0);
  cpu_set_t own;
  if (sched_getaffinity(0, sizeof(own), &own) == 0) EXPECT(UsableCpuCount() == CPU_COUNT(&own));
}

void LargeWritesArriveAndLeaveTheirNeighboursAlone() {
  TmpfsWrites writes(TmpfsMapping::kAlways);
  for (const size_t offset_bytes : {size_t{0}, size_t{4096}, size_t{5}, 3 * kMiB - 1}) {
    for (const size_t size_bytes : {kMiB, kMiB + 1, 2 * kMiB + 4095}) {
      Bytes expected = RandomBytes(8 * kMiB, 1);
      const ScratchFile file("file", expected);
      Bytes bytes = RandomBytes(size_bytes, 2);
      EXPECT(writes.Write(WriteOf(file.fd(), bytes, offset_bytes)));
      std::copy(bytes.begin(), bytes.end(), expected.begin() + static_cast<ptrdiff_t>(offset_bytes));
      EXPECT_WITH(file.Content() == expected, std::to_string(size_bytes) + " at " + std::to_string(offset_bytes));
    }
  }
}

void WhatIsNotForAMappingIsLeftToOthers() {
  TmpfsWrites writes(TmpfsMapping::kAlways);
  const Bytes nothing(4 * kMiB);
  const ScratchFile file("file", nothing);
  Bytes bytes = RandomBytes(2 * kMiB, 3);
  Bytes few = RandomBytes(kMiB - 1, 4);
  EXPECT(!writes.Write(WriteOf(file.fd(), few, 0)));
  EXPECT(!writes.Write(WriteOf(file.fd(), bytes, 2 * kMiB + 1)));  // beyond the end
  EXPECT(!writes.Write(WriteOf(123456, bytes, 0)));
  const int only_writes = open(file.path().c_str(), O_WRONLY | O_CLOEXEC);
  EXPECT(!writes.Write(WriteOf(only_writes, bytes, 0)));
  close(only_writes);
  const int of_kernel = memfd_create("file", MFD_CLOEXEC);
  EXPECT(ftruncate(of_kernel, 4 * kMiB) == 0);
  EXPECT(!writes.Write(WriteOf(of_kernel, bytes, 0)));
  close(of_kernel);
  EXPECT(file.Content() == nothing);
}

std::string g_elsewhere;  // a directory that may be on another file system

void FilesOfOtherFileSystemsAreLeftToOthers() {
  TmpfsWrites writes(TmpfsMapping::kAlways);
  const std::string path = g_elsewhere + "/elsewhere";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  EXPECT(fd >= 0 && ftruncate(fd, 2 * kMiB) == 0);
  Bytes bytes = RandomBytes(2 * kMiB, 5);
  if (!IsTmpfs(fd)) EXPECT(!writes.Write(WriteOf(fd, bytes, 0)));
  close(fd);
  unlink(path.c_str());
}

void AllocationSetsTheSizeAndTakesNoPages() {
  const ScratchFile file("file", Bytes(4096));
  EXPECT_OK(Allocate(file.fd(), 3 * kMiB, file.path()));
  struct stat status = {};
  EXPECT(fstat(file.fd(), &status) == 0);
  EXPECT(status.st_size == 3 * kMiB && status.st_blocks == 8);
  EXPECT_OK(Allocate(file.fd(), 2 * kMiB, file.path()));  // never cuts
  EXPECT(file.Content().size() == 3 * kMiB);
  EXPECT(Allocate(file.fd(), uint64_t{1} << 60, file.path()).sys_errno() == ENOSPC);
}

void ThreadsFillOneFileTogether() {
  auto engine = Must(CreateThreadsEngine({.name = "threads-buffered", .queue_depth = 8}, false, TmpfsMapping::kAlways));
  Bytes content = RandomBytes(24 * kMiB + 77, 6);
  const ScratchFile file("file");
  EXPECT_OK(Allocate(file.fd(), content.size(), file.path()));
  size_t done_count = 0;
  size_t queued_count = 0;
  const auto reap = [&](size_t count) {
    std::vector<IoCompletion> completions(8);
    const size_t reaped_count = Must(engine->Reap(completions, count, std::chrono::milliseconds(30000)));
    for (size_t i = 0; i < reaped_count; ++i) {
      EXPECT_WITH(completions[i].sys_errno == 0, std::strerror(completions[i].sys_errno));
    }
    done_count += reaped_count;
  };
  for (size_t at = 0; at < content.size(); at += 2 * kMiB) {
    if (engine->in_flight() == 8) reap(1);
    const IoRequest request{.op = IoOp::kWrite,
                            .fd = file.fd(),
                            .buffer = content.data() + at,
                            .size_bytes = static_cast<uint32_t>(std::min(2 * kMiB, content.size() - at)),
                            .offset_bytes = at,
                            .tag = at};
    EXPECT(engine->Queue(request) == QueueResult::kQueued);
    EXPECT_OK(engine->Submit());
    ++queued_count;
  }
  while (done_count < queued_count) reap(1);
  EXPECT(file.Content() == content);
}

void AFileCutShorterMeanwhileKillsNobody() {
  TmpfsWrites writes(TmpfsMapping::kAlways);
  const ScratchFile file("file");
  Bytes bytes = RandomBytes(8 * kMiB, 7);
  std::atomic<bool> over = false;
  std::thread cutter([&] {
    while (!over.load()) {
      EXPECT(ftruncate(file.fd(), static_cast<off_t>(bytes.size())) == 0);
      EXPECT(ftruncate(file.fd(), 4096) == 0);
    }
  });
  for (int round = 0; round < 200; ++round) (void)writes.Write(WriteOf(file.fd(), bytes, 0));
  over = true;
  cutter.join();
}

// --- In a child: with mounts of its own, or a system call less ---

// Returns whether the child could run its check; the child prints what it finds wrong and ends with 1.
bool InChild(const std::function<bool()>& set_up, const std::function<void()>& test) {
  const pid_t child = fork();
  if (child == 0) {
    if (!set_up()) _exit(77);
    const int failures_before = g_failure_count;
    test();
    std::fflush(stdout);
    _exit(g_failure_count == failures_before ? 0 : 1);
  }
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT_WITH(WIFEXITED(status), "signal " + std::to_string(WTERMSIG(status)));
  const int code = WEXITSTATUS(status);
  EXPECT(code == 0 || code == 77);
  return code != 77;
}

void WithoutRoomNobodyIsKilledAndPwriteSaysWhy() {
  const bool done = InChild(
      [] {
        return unshare(CLONE_NEWNS) == 0 && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               mount("tmpfs", g_directory.c_str(), "tmpfs", 0, "size=4m") == 0;
      },
      [] {
        const ScratchFile file("file");
        EXPECT(Allocate(file.fd(), 5 * kMiB, file.path()).sys_errno() == ENOSPC);
        EXPECT_OK(Allocate(file.fd(), 4 * kMiB, file.path()));
        const ScratchFile other("other", Bytes(2 * kMiB));  // takes what was seen to be free
        Bytes bytes = RandomBytes(4 * kMiB, 8);
        TmpfsWrites writes(TmpfsMapping::kAlways);
        EXPECT(!writes.Write(WriteOf(file.fd(), bytes, 0)));
        EXPECT(pwrite(file.fd(), bytes.data() + 3 * kMiB, kMiB, 3 * kMiB) < 0 && errno == ENOSPC);
      });
  if (!done) std::printf("nothing can be mounted here: a full tmpfs is not tested\n");
}

void HugePagesAreUsedWhereTheMountHasThem() {
  const bool done = InChild(
      [] {
        return unshare(CLONE_NEWNS) == 0 && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               mount("tmpfs", g_directory.c_str(), "tmpfs", 0, "huge=advise,size=64m") == 0;
      },
      [] {
        const ScratchFile file("file");
        Bytes bytes = RandomBytes(8 * kMiB, 9);
        EXPECT_OK(Allocate(file.fd(), bytes.size(), file.path()));
        TmpfsWrites writes(TmpfsMapping::kWherePays);  // however few CPUs there are
        EXPECT(writes.Write(WriteOf(file.fd(), bytes, 0)));
        EXPECT(file.Content() == bytes);
      });
  if (!done) std::printf("no tmpfs with huge pages can be mounted here: not tested\n");
}

void ASandboxThatRefusesLeavesItToPwrite() {
  const bool done = InChild(
      [] {
        sock_filter code[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        const sock_fprog program{.len = std::size(code), .filter = code};
        return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
               prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
      },
      [] {
        const ScratchFile file("file", Bytes(2 * kMiB));
        Bytes bytes = RandomBytes(2 * kMiB, 10);
        TmpfsWrites writes(TmpfsMapping::kAlways);
        EXPECT(!writes.Write(WriteOf(file.fd(), bytes, 0)));
        EXPECT(!writes.Write(WriteOf(file.fd(), bytes, 0)));
        EXPECT(file.Content() == Bytes(2 * kMiB));
      });
  if (!done) std::printf("no seccomp filter here: not tested\n");
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  std::string directory = "/dev/shm/fastpersist-XXXXXX";
  const int fd = open("/dev/shm", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0 || !IsTmpfs(fd) || mkdtemp(directory.data()) == nullptr) {
    std::printf("/dev/shm is no tmpfs: nothing is tested\n");
    return 77;
  }
  close(fd);
  g_elsewhere = argc > 1 ? argv[1] : ".";
  char* in_tmpfs[] = {argv[0], directory.data()};
  const int status = Run(2, in_tmpfs,
                         {TEST(CpusAreCountedOnMachinesOfAnySize), TEST(LargeWritesArriveAndLeaveTheirNeighboursAlone),
                          TEST(WhatIsNotForAMappingIsLeftToOthers), TEST(FilesOfOtherFileSystemsAreLeftToOthers),
                          TEST(AllocationSetsTheSizeAndTakesNoPages), TEST(ThreadsFillOneFileTogether),
                          TEST(AFileCutShorterMeanwhileKillsNobody), TEST(WithoutRoomNobodyIsKilledAndPwriteSaysWhy),
                          TEST(HugePagesAreUsedWhereTheMountHasThem), TEST(ASandboxThatRefusesLeavesItToPwrite)});
  rmdir(directory.c_str());
  return status;
}
