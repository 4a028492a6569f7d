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

// What transfers cut and pad direct I/O on a file to: offsets and lengths are multiples of it, and a power of two.
uint64_t BlockBytesOf(const DirectIoLimits& limits);

// Of a file that asks for these alignments; 0 for the offset: it takes no direct I/O.
DirectIoLimits DirectIoLimitsFor(uint32_t memory_alignment_bytes, uint32_t offset_alignment_bytes);

// From statx(STATX_DIOALIGN) where the kernel (6.1) and the file system answer, else the logical block size of the
// device, else 4096; whether the file system takes O_DIRECT at all is asked by setting the flag. Leaves the flag clear.
DirectIoLimits DirectIoLimitsOf(int fd);

// Set or clear O_DIRECT on the open file description.
Status SetDirect(int fd, bool direct, std::string_view path);

// Reserve size_bytes and make that the file's size: ENOSPC comes now, and direct writes inside the file run in
// parallel, since none of them allocates or extends. Where the file system has no fallocate, only the size is set. On
// tmpfs, too, once there is room: fallocate would take as long as writing does, page by page on this one thread.
Status Allocate(int fd, uint64_t size_bytes, std::string_view path);

// Reserve a range, and let the file reach as far. Where the file system has no fallocate, nothing happens: writing
// does it.
Status AllocateRange(int fd, uint64_t offset_bytes, uint64_t size_bytes, std::string_view path);

bool IsTmpfs(int fd);

// The statfs type number of the file system that a file lies on, or 0 where it cannot be had.
uint64_t FilesystemTypeOf(int fd);

// How many bytes of the file are in the page cache (cachestat, Linux 6.5), or 0 where the kernel cannot tell.
uint64_t CachedBytesOf(int fd);

// True when something is mounted on this very path (a bind-mounted file): a rename over it fails with EBUSY.
// False also where the kernel (before 5.8) cannot tell.
bool IsMountPoint(const std::string& path);

// Let two names on one file system change places, in one step: whoever looks sees both, before or after. kUnsupported
// where the kernel, the file system or a sandbox has no such rename.
Status ExchangeNames(const std::string& first, const std::string& second);

// Rename, unless something has the new name already (EEXIST), be it an empty directory, which rename() would replace.
// kUnsupported as above.
Status RenameToFreeName(const std::string& source, const std::string& target);

}  // namespace fastpersist
