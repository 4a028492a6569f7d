// Finds out which alignment direct I/O on a file needs, reserves its space before a byte is written, and makes the two
// renames that Python lacks. fastpersist/commit/filesystem.py owns the descriptor, and opens, names, truncates and
// syncs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fastpersist {

struct DirectIoLimits {
  bool supported = false;
  uint32_t memory_alignment_bytes = 0;
  uint32_t offset_alignment_bytes = 0;  // the alignment of offset and length
  std::string why_not;                  // the reason, if it is not supported
};

// The smallest unit of direct I/O: a multiple of what nearly all devices need, and one page.
constexpr uint64_t kBlockBytesMin = 4096;
// The largest unit of direct I/O: the largest block of a Linux block device, and the smallest chunk of a transfer. A
// file with a larger unit, or one that is no power of two, counts as one without direct I/O.
constexpr uint64_t kBlockBytesMax = 64 << 10;

// The unit of direct I/O on a file, a power of two: transfers make offsets and lengths multiples of it.
uint64_t BlockBytesOf(const DirectIoLimits& limits);

// The limits for these alignments. An offset alignment of 0 means that the file takes no direct I/O.
DirectIoLimits DirectIoLimitsFor(uint32_t memory_alignment_bytes, uint32_t offset_alignment_bytes);

// Ask statx(STATX_DIOALIGN); if the kernel (before 6.1) or the file system does not answer, take the device's logical
// block size, else 4096. Sets O_DIRECT to learn whether the file system takes it, and clears it again.
DirectIoLimits DirectIoLimitsOf(int fd);

// Set or clear O_DIRECT on the open file description.
Status SetDirect(int fd, bool direct, std::string_view path);

// Reserve size_bytes and make that the file's size. ENOSPC comes now, and direct writes inside the file run in
// parallel, since none allocates or extends. If the file system has no fallocate, this only sets the size. On tmpfs it
// compares the free space and sets the size: fallocate would fill page by page on one thread, which takes as long as
// writing.
Status Allocate(int fd, uint64_t size_bytes, std::string_view path);

// Reserve a range and extend the file to its end. Does nothing if the file system has no fallocate: writing reserves
// then.
Status AllocateRange(int fd, uint64_t offset_bytes, uint64_t size_bytes, std::string_view path);

bool IsTmpfs(int fd);

// The statfs type number of the file's file system; 0 if the kernel does not say.
uint64_t FilesystemTypeOf(int fd);

// How many bytes of the file are in the page cache (cachestat, Linux 6.5); 0 if the kernel cannot say.
uint64_t CachedBytesOf(int fd);

// Whether something is mounted on this very path (a bind-mounted file): a rename over it fails with EBUSY. False also
// if the kernel (before 5.8) cannot say.
bool IsMountPoint(const std::string& path);

// Exchange two names on one file system atomically: both names always exist. kUnsupported if the kernel, the file
// system or a sandbox has no such rename.
Status ExchangeNames(const std::string& first, const std::string& second);

// Rename. If the new name exists, fail with EEXIST, also for an empty directory, which rename() would replace.
// kUnsupported as above.
Status RenameToFreeName(const std::string& source, const std::string& target);

}  // namespace fastpersist
