// What a file allows: the alignment that direct I/O needs, and space for all of it before a byte is written; and the
// two renames that Python does not have. Opening, naming, truncating and syncing belong to
// fastpersist/commit/filesystem.py, which owns the descriptor.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fastpersist {

struct DirectIoLimits {
  bool supported = false;
  uint32_t memory_alignment_bytes = 0;
  uint32_t offset_alignment_bytes = 0;  // of offset and length
  std::string why_not;                  // when not supported
};

// Direct I/O in smaller units than this is never asked for: a multiple of what nearly all devices want, and one page.
constexpr uint64_t kBlockBytesMin = 4096;
// The largest unit that direct I/O is done in: the largest block of a Linux block device, and the smallest chunk of a
// transfer. A file that wants larger ones, or no power of two, counts as one that takes no direct I/O.
constexpr uint64_t kBlockBytesMax = 64 << 10;

// The unit of direct I/O on a file, a power of two: transfers make offsets and lengths multiples of it.
uint64_t BlockBytesOf(const DirectIoLimits& limits);

// The limits of a file that asks for these alignments. An offset alignment of 0 says that it takes no direct I/O.
DirectIoLimits DirectIoLimitsFor(uint32_t memory_alignment_bytes, uint32_t offset_alignment_bytes);

// From statx(STATX_DIOALIGN) where the kernel (6.1) and the file system answer, else the logical block size of the
// device, else 4096; whether the file system takes O_DIRECT at all is asked by setting the flag. Leaves the flag clear.
DirectIoLimits DirectIoLimitsOf(int fd);

// Set or clear O_DIRECT on the open file description.
Status SetDirect(int fd, bool direct, std::string_view path);

// Reserve size_bytes and make that the file's size: ENOSPC comes now, and direct writes inside the file run in
// parallel, since none of them allocates or extends. Where the file system has no fallocate, only the size is set. So
// it is on tmpfs, once its free space has been compared: fallocate would fill page by page on this one thread, which
// takes as long as writing.
Status Allocate(int fd, uint64_t size_bytes, std::string_view path);

// Reserve a range, and extend the file to its end. Does nothing where the file system has no fallocate: there, writing
// reserves and extends.
Status AllocateRange(int fd, uint64_t offset_bytes, uint64_t size_bytes, std::string_view path);

bool IsTmpfs(int fd);

// The statfs type number of a file's file system, or 0 where the kernel does not tell it.
uint64_t FilesystemTypeOf(int fd);

// How many bytes of the file are in the page cache (cachestat, Linux 6.5), or 0 where the kernel cannot tell.
uint64_t CachedBytesOf(int fd);

// True when something is mounted on this very path (a bind-mounted file): a rename over it fails with EBUSY.
// False also where the kernel (before 5.8) cannot tell.
bool IsMountPoint(const std::string& path);

// Exchange two names on one file system in one step: at every moment both names exist. kUnsupported where the kernel,
// the file system or a sandbox has no such rename.
Status ExchangeNames(const std::string& first, const std::string& second);

// Rename. EEXIST where the new name exists, also as an empty directory, which rename() would replace. kUnsupported as
// above.
Status RenameToFreeName(const std::string& source, const std::string& target);

}  // namespace fastpersist
