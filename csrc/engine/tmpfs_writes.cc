#include "engine/tmpfs_writes.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/alignment.h"
#include "core/file.h"
#include "core/kernel_file.h"
#include "core/thread.h"

namespace fastpersist {
namespace {

// For smaller requests, mapping costs more than it gains.
constexpr uint32_t kRequestBytesMin = 1 << 20;
// One thread with pwrite(2) is about as fast as two that fill small pages of a mapping.
constexpr int kCpuCountMin = 4;

// The mount options of a file system; nothing for one of the kernel's own, such as that of memfd_create(2), whose files
// are rewritten many times, into pages that exist. In a line of mountinfo (proc_pid_mountinfo(5)) the third word is the
// device, and the words after the lone dash are type, source and options.
std::optional<std::string> MountOptions(dev_t device) {
  const std::string number = std::to_string(major(device)) + ":" + std::to_string(minor(device));
  const std::string content = ReadKernelFile("/proc/self/mountinfo");
  for (size_t start = 0; start < content.size();) {
    const size_t end = std::min(content.find('\n', start), content.size());
    const std::string_view line = std::string_view(content).substr(start, end - start);
    const size_t third = line.find(' ', line.find(' ') + 1) + 1;
    const size_t dash = line.find(" - ");
    if (dash != std::string_view::npos && line.substr(third, line.find(' ', third) - third) == number) {
      return std::string(line.substr(dash));
    }
    start = end + 1;
  }
  return std::nullopt;
}

bool GiveHugePages(const std::string& options) {
  for (const char* option : {"huge=advise", "huge=always", "huge=within_size"}) {
    if (options.find(option) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

TmpfsWrites::TmpfsWrites(TmpfsMapping mapping)
    : pays_with_small_pages_(mapping == TmpfsMapping::kAlways || UsableCpuCount() >= kCpuCountMin) {}

TmpfsWrites::Kind TmpfsWrites::KindOf(int fd, dev_t device) {
  const std::lock_guard lock(mutex_);
  const auto known = std::find_if(kinds_.begin(), kinds_.end(), [&](const auto& kind) { return kind.first == device; });
  if (known != kinds_.end()) return known->second;
  Kind kind = Kind::kOther;
  if (IsTmpfs(fd)) {
    const std::optional<std::string> options = MountOptions(device);
    if (options.has_value()) kind = GiveHugePages(*options) ? Kind::kHugePages : Kind::kSmallPages;
  }
  kinds_.emplace_back(device, kind);
  return kind;
}

bool TmpfsWrites::Write(const IoRequest& request) {
  if (request.size_bytes < kRequestBytesMin || refused_.load(std::memory_order_relaxed)) return false;
  struct stat file = {};
  if (fstat(request.fd, &file) != 0) return false;
  const uint64_t end_bytes = request.offset_bytes + request.size_bytes;
  if (end_bytes > static_cast<uint64_t>(file.st_size)) return false;
  const Kind kind = KindOf(request.fd, file.st_dev);
  if (kind == Kind::kOther || (kind == Kind::kSmallPages && !pays_with_small_pages_)) return false;

  const uint64_t start_bytes = AlignDown(request.offset_bytes, static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
  const size_t window_bytes = end_bytes - start_bytes;
  void* const window =
      mmap(nullptr, window_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, request.fd, static_cast<off_t>(start_bytes));
  if (window == MAP_FAILED) return false;
  (void)madvise(window, window_bytes, MADV_DONTFORK);
  if (kind == Kind::kHugePages) (void)madvise(window, window_bytes, MADV_HUGEPAGE);
  const iovec target{.iov_base = static_cast<std::byte*>(window) + (request.offset_bytes - start_bytes),
                     .iov_len = request.size_bytes};
  const iovec source{.iov_base = request.buffer, .iov_len = request.size_bytes};
  const ssize_t copied_bytes = process_vm_readv(getpid(), &target, 1, &source, 1, 0);
  if (copied_bytes < 0 && (errno == ENOSYS || errno == EPERM)) refused_.store(true, std::memory_order_relaxed);
  munmap(window, window_bytes);
  return copied_bytes == static_cast<ssize_t>(request.size_bytes);
}

}  // namespace fastpersist
