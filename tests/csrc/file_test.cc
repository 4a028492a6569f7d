// The limits and calls of core/file.h, on a real file in the scratch directory.
#include "core/file.h"

#include <sys/vfs.h>

#include "core/alignment.h"
#include "testing.h"

namespace fastpersist {
namespace {

bool HasDirectFlag(int fd) { return (fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

struct stat StatusOf(const ScratchFile& file) {
  struct stat status = {};
  EXPECT(fstat(file.fd(), &status) == 0);
  return status;
}

void DirectIoWorksWithTheAlignmentThatIsTold() {
  const ScratchFile file("file", RandomBytes(size_t{1} << 20, 1));
  const DirectIoLimits limits = DirectIoLimitsOf(file.fd());
  EXPECT(!HasDirectFlag(file.fd()));
  if (!limits.supported) {
    EXPECT(!limits.why_not.empty());
    return;
  }
  EXPECT(limits.why_not.empty());
  EXPECT(std::has_single_bit(limits.memory_alignment_bytes) && std::has_single_bit(limits.offset_alignment_bytes));
  EXPECT_WITH(limits.offset_alignment_bytes <= kBlockBytesMax, std::to_string(limits.offset_alignment_bytes));
  EXPECT_OK(SetDirect(file.fd(), true, file.path()));
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(8192, kBlockBytesMax + 8192));
  std::byte* const place = memory + limits.memory_alignment_bytes % 8192;  // no more aligned than it must be
  const uint32_t size_bytes = limits.offset_alignment_bytes;
  const Bytes content = file.Content();
  EXPECT(pread(file.fd(), place, size_bytes, size_bytes) == static_cast<ssize_t>(size_bytes));
  EXPECT(std::memcmp(place, content.data() + size_bytes, size_bytes) == 0);
  EXPECT(pwrite(file.fd(), place, size_bytes, 3 * size_bytes) == static_cast<ssize_t>(size_bytes));
  std::free(memory);
}

void BlocksAreAtLeastAPageAndWhatTheFileAsksFor() {
  for (const uint32_t asked : {512U, 4096U, 16384U, 65536U}) {
    const DirectIoLimits limits = DirectIoLimitsFor(512, asked);
    EXPECT_WITH(limits.supported && limits.why_not.empty(), limits.why_not);
    EXPECT_WITH(BlockBytesOf(limits) == std::max(asked, 4096U), std::to_string(BlockBytesOf(limits)));
  }
  EXPECT(BlockBytesOf(DirectIoLimits{}) == 4096);  // no direct I/O
}

void DirectIoThatNoChunkFitsIsNotDone() {
  for (const uint32_t asked : {0U, 12288U, 131072U}) {
    const DirectIoLimits limits = DirectIoLimitsFor(512, asked);
    EXPECT(!limits.supported && BlockBytesOf(limits) == 4096);
    EXPECT_WITH(Contains(limits.why_not, asked == 0 ? "no direct I/O" : std::to_string(asked)), limits.why_not);
  }
}

void TheDirectFlagIsSetAndCleared() {
  const ScratchFile file("file");
  if (!DirectIoLimitsOf(file.fd()).supported) return;
  for (const bool direct : {true, true, false, false, true}) {
    EXPECT_OK(SetDirect(file.fd(), direct, file.path()));
    EXPECT(HasDirectFlag(file.fd()) == direct);
  }
  EXPECT(DirectIoLimitsOf(file.fd()).supported);
  EXPECT(!HasDirectFlag(file.fd()));  // asking leaves it clear
}

void AClosedDescriptorIsAnErrorNotACrash() {
  constexpr int kClosed = 123456;
  EXPECT(!DirectIoLimitsOf(kClosed).supported);
  const Status status = SetDirect(kClosed, true, "some.pt");
  EXPECT_WITH(status.sys_errno() == EBADF && Contains(status.message(), "some.pt"), status.message());
  EXPECT(Allocate(kClosed, 1, "some.pt").sys_errno() == EBADF);
  EXPECT(FilesystemTypeOf(kClosed) == 0);
  EXPECT(CachedBytesOf(kClosed) == 0);
}

void AllocationReservesTheSpaceAndSetsTheSize() {
  const ScratchFile file("file");
  EXPECT_OK(Allocate(file.fd(), 0, file.path()));
  EXPECT(StatusOf(file).st_size == 0);
  EXPECT_OK(Allocate(file.fd(), (3 << 20) + 5, file.path()));
  EXPECT(StatusOf(file).st_size == (3 << 20) + 5);
  // On tmpfs, and if the file system has no fallocate, only the size is set.
  const bool reserved = !IsTmpfs(file.fd()) && fallocate(file.fd(), 0, 0, 1) == 0;
  EXPECT(!reserved || StatusOf(file).st_blocks * 512 >= 3 << 20);
  EXPECT(file.Content() == Bytes((3 << 20) + 5));
}

void AllocationKeepsWhatIsThere() {
  const Bytes content = RandomBytes(10000, 2);
  const ScratchFile file("file", content);
  EXPECT_OK(Allocate(file.fd(), 20000, file.path()));
  Bytes expected = content;
  expected.resize(20000);
  EXPECT(file.Content() == expected);
}

void AllocationOfMoreThanThereIsSaysHowMuch() {
  const ScratchFile file("file");
  const Status status = Allocate(file.fd(), uint64_t{1} << 60, file.path());
  EXPECT(!status.ok());
  EXPECT_WITH(status.sys_errno() == ENOSPC || status.sys_errno() == EFBIG, status.message());
  EXPECT_WITH(Contains(status.message(), file.path()), status.message());
  EXPECT(StatusOf(file).st_size == 0);
}

void TheFileSystemTypeIsThatOfStatfs() {
  const ScratchFile file("file");
  struct statfs answer = {};
  EXPECT(statfs(g_directory.c_str(), &answer) == 0);
  EXPECT(FilesystemTypeOf(file.fd()) == static_cast<uint32_t>(answer.f_type));
}

void CachedBytesAreThoseInThePageCache() {
  constexpr uint64_t kBytes = 1 << 20;
  const ScratchFile file("file", RandomBytes(kBytes, 3));
  const uint64_t cached_bytes = CachedBytesOf(file.fd());
  // 0 from a kernel before 6.5, which cannot say; else at least the pages just written.
  EXPECT_WITH(cached_bytes == 0 || cached_bytes == kBytes, std::to_string(cached_bytes));
  EXPECT(fsync(file.fd()) == 0);
  posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  EXPECT(CachedBytesOf(file.fd()) <= cached_bytes);
}

void MountPointsAreKnown() {
  const ScratchFile file("file");
  EXPECT(!IsMountPoint(file.path()));
  EXPECT(!IsMountPoint(g_directory + "/missing"));
  EXPECT(!IsMountPoint("/proc/version"));
  struct statfs answer = {};
  constexpr int kProcMagic = 0x9fa0;
  if (statfs("/proc", &answer) != 0 || answer.f_type != kProcMagic) return;
  if (!IsMountPoint("/proc")) {
    std::printf("this kernel (before 5.8) does not tell mount points\n");
    return;
  }
  const std::string link = g_directory + "/link";
  EXPECT(symlink("/proc", link.c_str()) == 0);
  EXPECT(!IsMountPoint(link));  // a rename over a link replaces the link
  unlink(link.c_str());
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  return Run(
      argc, argv,
      {TEST(DirectIoWorksWithTheAlignmentThatIsTold), TEST(BlocksAreAtLeastAPageAndWhatTheFileAsksFor),
       TEST(DirectIoThatNoChunkFitsIsNotDone), TEST(TheDirectFlagIsSetAndCleared),
       TEST(AClosedDescriptorIsAnErrorNotACrash), TEST(AllocationReservesTheSpaceAndSetsTheSize),
       TEST(AllocationKeepsWhatIsThere), TEST(AllocationOfMoreThanThereIsSaysHowMuch),
       TEST(TheFileSystemTypeIsThatOfStatfs), TEST(CachedBytesAreThoseInThePageCache), TEST(MountPointsAreKnown)});
}
