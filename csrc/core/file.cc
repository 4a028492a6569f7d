#include "core/file.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "core/kernel_file.h"

#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x00002000U
#endif
#ifndef STATX_ATTR_MOUNT_ROOT
#define STATX_ATTR_MOUNT_ROOT 0x00002000
#endif

namespace fastpersist {
namespace {

constexpr uint32_t kDefaultAlignment = kBlockBytesMin;

// struct statx of a C library older than Linux 6.1 lacks these two fields; the kernel's layout is fixed, and the area
// behind stx_mnt_id is reserved in every older header. Offsets: include/uapi/linux/stat.h.
constexpr size_t kDioMemAlignOffset = 0x98;
constexpr size_t kDioOffsetAlignOffset = 0x9c;

uint32_t FieldAt(const struct statx& answer, size_t offset) {
  uint32_t value = 0;
  __builtin_memcpy(&value, reinterpret_cast<const char*>(&answer) + offset, sizeof(value));
  return value;
}

// /sys has a device's logical block size without permission to open it; for a partition, in the parent's folder.
uint32_t LogicalBlockSize(uint32_t major, uint32_t minor) {
  for (const char* suffix : {"", "/.."}) {
    const std::string device = std::to_string(major) + ":" + std::to_string(minor);
    const auto value = ReadKernelNumber("/sys/dev/block/" + device + suffix + "/queue/logical_block_size").value_or(0);
    if (value >= 512 && value <= UINT32_MAX) return static_cast<uint32_t>(value);
  }
  return 0;
}

// By number, for C libraries before glibc 2.28. The flags are those of include/uapi/linux/fs.h.
constexpr unsigned kRenameNoReplace = 1U << 0;
constexpr unsigned kRenameExchange = 1U << 1;

Status RenameWith(unsigned flags, const std::string& source, const std::string& target, std::string_view operation) {
  if (syscall(SYS_renameat2, AT_FDCWD, source.c_str(), AT_FDCWD, target.c_str(), flags) == 0) return Status::Ok();
  const int sys_errno = errno;
  Status status = Status::FromErrno(sys_errno, operation, target);
  // EINVAL: the file system does not know the flag. EPERM: a sandbox filters system calls, or a right is missing; the
  // caller then renames plainly, which reports a missing right.
  if (sys_errno == EINVAL || sys_errno == EPERM) return Status::Error(StatusCode::kUnsupported, status.message());
  return status;
}

// Set the size if the file system has space for the pages that the file lacks.
Status AllocateOnTmpfs(int fd, uint64_t size_bytes, std::string_view path) {
  struct statfs system = {};
  struct stat file = {};
  if (fstatfs(fd, &system) != 0 || fstat(fd, &file) != 0) return Status::FromErrno(errno, "fstat of", path);
  const uint64_t own_bytes = static_cast<uint64_t>(file.st_blocks) * 512;
  const uint64_t free_bytes = static_cast<uint64_t>(system.f_bavail) * static_cast<uint64_t>(system.f_bsize);
  const bool is_limited = system.f_blocks != 0;
  if (is_limited && size_bytes > own_bytes && size_bytes - own_bytes > free_bytes) {
    return Status::FromErrno(ENOSPC, "reserving " + std::to_string(size_bytes) + " bytes for", path);
  }
  if (static_cast<uint64_t>(file.st_size) < size_bytes && ftruncate(fd, static_cast<off_t>(size_bytes)) != 0) {
    return Status::FromErrno(errno, "ftruncate of", path);
  }
  return Status::Ok();
}

}  // namespace

uint64_t BlockBytesOf(const DirectIoLimits& limits) {
  return std::max<uint64_t>(kBlockBytesMin, limits.supported ? limits.offset_alignment_bytes : 0);
}

DirectIoLimits DirectIoLimitsFor(uint32_t memory_alignment_bytes, uint32_t offset_alignment_bytes) {
  DirectIoLimits limits{.supported = false,
                        .memory_alignment_bytes = memory_alignment_bytes,
                        .offset_alignment_bytes = offset_alignment_bytes,
                        .why_not = ""};
  if (offset_alignment_bytes == 0) {
    limits.why_not = "the file system says that this file takes no direct I/O";
  } else if (!std::has_single_bit(offset_alignment_bytes) || offset_alignment_bytes > kBlockBytesMax) {
    limits.why_not = "this file takes direct I/O in units of " + std::to_string(offset_alignment_bytes) +
                     " bytes only, which is no power of two up to " + std::to_string(kBlockBytesMax);
  } else {
    limits.supported = true;
  }
  return limits;
}

DirectIoLimits DirectIoLimitsOf(int fd) {
  DirectIoLimits limits;
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_DIRECT) != 0) {
    limits.why_not = "the file system does not take O_DIRECT";
    return limits;
  }
  fcntl(fd, F_SETFL, flags & ~O_DIRECT);
  struct statx answer = {};
  uint32_t block_bytes = 0;
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) == 0) {
    if ((answer.stx_mask & STATX_DIOALIGN) != 0) {
      return DirectIoLimitsFor(FieldAt(answer, kDioMemAlignOffset), FieldAt(answer, kDioOffsetAlignOffset));
    }
    block_bytes = LogicalBlockSize(answer.stx_dev_major, answer.stx_dev_minor);
  }
  if (block_bytes == 0) block_bytes = kDefaultAlignment;
  return DirectIoLimitsFor(block_bytes, block_bytes);
}

Status SetDirect(int fd, bool direct, std::string_view path) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0) return Status::FromErrno(errno, "fcntl(F_GETFL) of", path);
  const int wanted = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
  if (wanted != flags && fcntl(fd, F_SETFL, wanted) != 0) {
    return Status::FromErrno(errno, direct ? "setting O_DIRECT on" : "clearing O_DIRECT on", path);
  }
  return Status::Ok();
}

Status Allocate(int fd, uint64_t size_bytes, std::string_view path) {
  if (size_bytes == 0) return Status::Ok();
  if (IsTmpfs(fd)) return AllocateOnTmpfs(fd, size_bytes, path);
  int result = 0;
  do {
    result = fallocate(fd, 0, 0, static_cast<off_t>(size_bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return Status::Ok();
  if (errno != EOPNOTSUPP && errno != ENOSYS) {
    return Status::FromErrno(errno, "reserving " + std::to_string(size_bytes) + " bytes for", path);
  }
  if (ftruncate(fd, static_cast<off_t>(size_bytes)) != 0) return Status::FromErrno(errno, "ftruncate of", path);
  return Status::Ok();
}

Status AllocateRange(int fd, uint64_t offset_bytes, uint64_t size_bytes, std::string_view path) {
  if (size_bytes == 0) return Status::Ok();
  int result = 0;
  do {
    result = fallocate(fd, 0, static_cast<off_t>(offset_bytes), static_cast<off_t>(size_bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS || errno == ENODEV) return Status::Ok();
  return Status::FromErrno(errno, "reserving " + std::to_string(size_bytes) + " bytes of", path, offset_bytes);
}

bool IsTmpfs(int fd) {
  constexpr uint64_t kTmpfs = 0x01021994;  // TMPFS_MAGIC
  return FilesystemTypeOf(fd) == kTmpfs;
}

uint64_t FilesystemTypeOf(int fd) {
  struct statfs answer = {};
  return fstatfs(fd, &answer) == 0 ? static_cast<uint32_t>(answer.f_type) : 0;
}

uint64_t CachedBytesOf(int fd) {
  // The ABI of cachestat(2), which C libraries of 2023 and before do not wrap; the number is the same everywhere.
  constexpr long kCachestat = 451;
  struct {
    uint64_t offset_bytes = 0;
    uint64_t size_bytes = 0;  // 0: to the end of the file
  } range;
  struct {
    uint64_t cached_pages, dirty_pages, writeback_pages, evicted_pages, recently_evicted_pages;
  } answer = {};
  if (syscall(kCachestat, fd, &range, &answer, 0U) != 0) return 0;
  return answer.cached_pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

bool IsMountPoint(const std::string& path) {
  struct statx answer = {};
  if (statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &answer) != 0) return false;
  return (answer.stx_attributes_mask & answer.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
}

Status ExchangeNames(const std::string& first, const std::string& second) {
  return RenameWith(kRenameExchange, first, second, "exchanging " + first + " with");
}

Status RenameToFreeName(const std::string& source, const std::string& target) {
  return RenameWith(kRenameNoReplace, source, target, "renaming " + source + " to");
}

}  // namespace fastpersist
