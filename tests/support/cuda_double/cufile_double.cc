// A double of libcufile over the double of the driver, for tests on machines without a GPU: files are read and written
// by pread and pwrite, memory of devices by double_read and double_write. It is built into a library of its own with
// the SONAME of the real one, so that the product finds it by its own means once a test has loaded it. What it refuses,
// and that it opens a file a second time, is what libcufile 1.11 was seen to do.
//
// cufile_interface.h has what tests use.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cufile_interface.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cufile_double {

struct Error {  // CUfileError_t
  int code;
  int cuda;
};
struct Description {  // CUfileDescr_t
  int type;
  union {
    int fd;
    void* other;
  } handle;
  const void* operations;
};

namespace {

constexpr Error kGood = {0, 0};
constexpr int kInvalidOpenFlag = 5019;
constexpr int kInvalidValue = 5022;
constexpr int kAlreadyRegistered = 5023;
constexpr int kNotRegistered = 5024;
constexpr int kDriverAlreadyOpen = 5026;
constexpr int kFileAlreadyRegistered = 5028;
constexpr int kNoSecondDescriptor = 5031;
constexpr int kDriverNotInitialized = 5001;

constexpr std::array kCalls = {"cuFileDriverOpen",    "cuFileHandleRegister", "cuFileHandleDeregister",
                               "cuFileBufRegister",   "cuFileBufDeregister",  "cuFileRead",
                               "cuFileWrite",         "cuFileGetVersion",     "cuFileGetStatsLevel",
                               "cuFileSetStatsLevel", "cuFileStatsStart",     "cuFileGetStatsL3"};

// Of the double of the driver.
struct Device {
  int (*read)(uint64_t address, void* target, size_t size_bytes);
  int (*write)(uint64_t address, const void* source, size_t size_bytes);
  int (*context_depth)();
  int (*range_of)(uint64_t* base, size_t* size_bytes, uint64_t address);  // the driver's own call
};

struct Plan {
  std::string call;
  uint64_t at_count;  // 0: each
  int error;
};

struct File {
  int fd;
  int second_fd;  // of its own, by the file's path: closing it drops the process's record locks on the file
  int user_count;
};

struct Library {
  std::mutex mutex;
  std::condition_variable changed;
  Device device = {};
  bool is_open = false;
  bool is_forked = false;
  std::map<std::string, uint64_t> call_counts;
  std::vector<Plan> failures;
  std::vector<std::pair<uint64_t, size_t>> shortened;  // the transfer, and what it moves
  uint64_t transfer_count = 0;
  uint64_t host_transfer_count = 0;
  uint64_t unregistered_transfer_count = 0;
  std::deque<std::string> violations;
  std::map<void*, File*> files;
  std::map<uint64_t, size_t> buffers;
  int version = 1160;
  int way = kSaysPosix;
  int oddity = kAsDocumented;
  int level = 0;
  bool counts = false;
  std::array<uint64_t, 3> read_counts = {};  // by way
  std::array<uint64_t, 3> write_counts = {};
  bool holds = false;
  int held_count = 0;

  void Violate(std::string text) { violations.push_back(std::move(text)); }
};

Library* g_library = nullptr;

Library& Get() {
  static Library* const library = [] {
    g_library = new Library;
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    const auto find = [&](auto& function, const char* symbol) {
      function = driver == nullptr
                     ? nullptr
                     : reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(driver, symbol));
      if (function != nullptr) return;
      std::fprintf(stderr, "cufile_double: load the double of the driver first (no %s)\n", symbol);
      std::abort();
    };
    find(g_library->device.read, "double_read");
    find(g_library->device.write, "double_write");
    find(g_library->device.context_depth, "double_context_depth");
    find(g_library->device.range_of, "cuMemGetAddressRange_v2");
    // The child's copy of the mutex may be locked; so it gets a library of its own, which is of no use.
    pthread_atfork(nullptr, nullptr, [] {
      const bool was_open = g_library->is_open;
      new (g_library) Library;
      g_library->is_forked = was_open;
    });
    return g_library;
  }();
  return *library;
}

std::string NameOrDie(const char* function, const char* call) {
  const auto* const found =
      std::find_if(kCalls.begin(), kCalls.end(), [&](const char* known) { return std::strcmp(known, call) == 0; });
  if (found != kCalls.end()) return call;
  std::fprintf(stderr, "%s: there is no call \"%s\"\n", function, call);
  std::abort();
}

// Counts a call; what it is to answer, 0: nothing in particular. With the mutex held.
int Enter(Library& library, const char* call) {
  const uint64_t count = ++library.call_counts[call];
  if (library.is_forked) library.Violate(std::string(call) + " in a forked child");
  for (const Plan& plan : library.failures) {
    if (plan.call == call && (plan.at_count == 0 || plan.at_count == count)) return plan.error;
  }
  if (!library.is_open && std::strcmp(call, "cuFileDriverOpen") != 0 && std::strcmp(call, "cuFileGetVersion") != 0) {
    library.Violate(std::string(call) + " before cuFileDriverOpen");
    return kDriverNotInitialized;
  }
  return 0;
}

bool IsDeviceMemory(Library& library, uint64_t address, size_t size_bytes = 1) {
  uint64_t base = 0;
  size_t range_bytes = 0;
  return library.device.range_of(&base, &range_bytes, address) == 0 && size_bytes <= base + range_bytes - address;
}

// The driver says neither yes nor no: the device is lost, or a test has made the call fail.
bool DriverFails(Library& library, uint64_t address) {
  constexpr int kNotFound = 500;
  uint64_t base = 0;
  size_t range_bytes = 0;
  const int answer = library.device.range_of(&base, &range_bytes, address);
  return answer != 0 && answer != kNotFound;
}

ssize_t Answer(int error) {
  if (error >= 5000) return -error;
  errno = error < 0 ? 0 : error;
  return -1;
}

struct PageMemory {
  explicit PageMemory(size_t size_bytes) {
    if (posix_memalign(&data, 4096, std::max<size_t>(size_bytes, 1)) != 0) std::abort();
  }
  PageMemory(const PageMemory&) = delete;
  PageMemory& operator=(const PageMemory&) = delete;
  ~PageMemory() { std::free(data); }
  void* data = nullptr;
};

// One request; answers as cuFileRead and cuFileWrite do.
ssize_t Transfer(const char* call, bool write, void* handle, void* base, size_t size_bytes, off_t offset,
                 off_t base_offset) {
  Library& library = Get();
  std::unique_lock lock(library.mutex);
  const auto base_address = reinterpret_cast<uint64_t>(base);
  const uint64_t address = base_address + static_cast<uint64_t>(base_offset);
  const uint64_t number = ++library.transfer_count;
  const bool on_device = library.buffers.contains(base_address) || IsDeviceMemory(library, address);
  const int planned = Enter(library, call);
  const auto file = library.files.find(handle);
  if (file == library.files.end()) {
    library.Violate(std::string(call) + " of a file that is not registered");
    return -kInvalidValue;
  }
  const int fd = file->second->fd;
  ++file->second->user_count;
  if (on_device) {
    if (library.device.context_depth() == 0) library.Violate(std::string(call) + " without a context");
    const auto buffer = library.buffers.find(base_address);
    if (buffer == library.buffers.end()) {
      ++library.unregistered_transfer_count;
    } else if (static_cast<uint64_t>(base_offset) + size_bytes > buffer->second) {
      library.Violate(std::string(call) + " beyond the end of a registered buffer");
    }
  } else {
    ++library.host_transfer_count;
    if (base_offset != 0) library.Violate(std::string(call) + " with an offset into memory that is not registered");
  }
  ++library.held_count;
  library.changed.notify_all();
  library.changed.wait(lock, [&] { return !library.holds; });
  --library.held_count;

  size_t moved_bytes = size_bytes;
  for (const auto& [at, limit_bytes] : library.shortened) {
    if (at == number) moved_bytes = std::min(moved_bytes, limit_bytes);
  }
  lock.unlock();
  ssize_t done = 0;
  if (planned != 0) {
    done = Answer(planned);
  } else if (!on_device) {
    auto* const memory = static_cast<char*>(base) + base_offset;
    done = write ? pwrite(fd, memory, moved_bytes, offset) : pread(fd, memory, moved_bytes, offset);
  } else {
    const PageMemory bounce(moved_bytes);
    bool whole = true;
    if (write) {
      whole = library.device.read(address, bounce.data, moved_bytes) == 0;
      done = whole ? pwrite(fd, bounce.data, moved_bytes, offset) : -kInvalidValue;
    } else {
      done = pread(fd, bounce.data, moved_bytes, offset);
      if (done > 0) whole = library.device.write(address, bounce.data, static_cast<size_t>(done)) == 0;
    }
    if (!whole) done = -kInvalidValue;
  }
  const int sys_errno = errno;
  lock.lock();
  if (on_device && done >= 0 && library.counts && library.level >= 3) {
    ++(write ? library.write_counts : library.read_counts)[static_cast<size_t>(library.way)];
  }
  const auto still = library.files.find(handle);
  if (still == library.files.end()) {
    library.Violate(std::string("cuFileHandleDeregister during ") + call);
  } else {
    --still->second->user_count;
  }
  errno = sys_errno;
  return done;
}

}  // namespace
}  // namespace cufile_double

using namespace cufile_double;  // NOLINT: all that follows are the library's own names

// --- what the product calls ---

EXPORT Error cuFileDriverOpen() {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileDriverOpen"); error != 0) return {error, 0};
  if (library.is_open) return {kDriverAlreadyOpen, 0};
  library.is_open = true;
  return kGood;
}

EXPORT Error cuFileHandleRegister(void** handle, Description* description) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileHandleRegister"); error != 0) return {error, 0};
  const int flags = description->type == 1 ? fcntl(description->handle.fd, F_GETFL) : -1;
  if (flags < 0) return {kInvalidValue, 0};
  if ((flags & (O_APPEND | O_NONBLOCK | O_DIRECTORY | O_NOFOLLOW | O_NOATIME)) != 0) return {kInvalidOpenFlag, 0};
  for (const auto& [known, file] : library.files) {
    if (file->fd != description->handle.fd) continue;
    library.Violate("cuFileHandleRegister of a descriptor that is registered");
    return {kFileAlreadyRegistered, 0};
  }
  std::array<char, 4096> path = {};
  const std::string link = "/proc/self/fd/" + std::to_string(description->handle.fd);
  const ssize_t length = readlink(link.c_str(), path.data(), path.size() - 1);
  const int second_fd = length < 0 ? -1 : open(path.data(), (flags & O_ACCMODE) | O_CLOEXEC);
  if (second_fd < 0) return {kNoSecondDescriptor, 0};
  auto* const file = new File{description->handle.fd, second_fd, 0};
  library.files.emplace(file, file);
  *handle = file;
  return kGood;
}

EXPORT void cuFileHandleDeregister(void* handle) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  Enter(library, "cuFileHandleDeregister");
  const auto file = library.files.find(handle);
  if (file == library.files.end()) return library.Violate("cuFileHandleDeregister of what is not registered");
  if (file->second->user_count > 0) library.Violate("cuFileHandleDeregister of a file in use");
  close(file->second->second_fd);
  delete file->second;
  library.files.erase(file);
}

EXPORT Error cuFileBufRegister(const void* base, size_t size_bytes, int flags) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileBufRegister"); error != 0) return {error, 0};
  const auto address = reinterpret_cast<uint64_t>(base);
  if (flags != 0 || size_bytes == 0 || !IsDeviceMemory(library, address, size_bytes)) {
    if (DriverFails(library, address)) return {kInvalidValue, 0};
    library.Violate("cuFileBufRegister of what is no memory of a device");
    return {kInvalidValue, 0};
  }
  if (library.device.context_depth() == 0) library.Violate("cuFileBufRegister without a context");
  if (!library.buffers.emplace(address, size_bytes).second) {
    library.Violate("cuFileBufRegister of what is registered");
    return {kAlreadyRegistered, 0};
  }
  return kGood;
}

EXPORT Error cuFileBufDeregister(const void* base) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileBufDeregister"); error != 0) return {error, 0};
  const auto address = reinterpret_cast<uint64_t>(base);
  if (library.buffers.erase(address) == 0) {
    library.Violate("cuFileBufDeregister of what is not registered");
    return {kNotRegistered, 0};
  }
  if (!IsDeviceMemory(library, address)) library.Violate("memory was freed while it was registered");
  return kGood;
}

EXPORT ssize_t cuFileRead(void* handle, void* base, size_t size_bytes, off_t offset, off_t base_offset) {
  return Transfer("cuFileRead", false, handle, base, size_bytes, offset, base_offset);
}

EXPORT ssize_t cuFileWrite(void* handle, const void* base, size_t size_bytes, off_t offset, off_t base_offset) {
  return Transfer("cuFileWrite", true, handle, const_cast<void*>(base), size_bytes, offset, base_offset);
}

#if !defined(CUFILE_DOUBLE_OLD)  // as before cuFile 1.8: no version and no statistics

EXPORT Error cuFileGetVersion(int* version) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileGetVersion"); error != 0) return {error, 0};
  *version = library.version;
  return kGood;
}

EXPORT Error cuFileGetStatsLevel(int* level) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileGetStatsLevel"); error != 0) return {error, 0};
  *level = library.level;
  return kGood;
}

EXPORT Error cuFileSetStatsLevel(int level) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileSetStatsLevel"); error != 0) return {error, 0};
  if (level < 0 || level > 3) return {kInvalidValue, 0};
  library.level = level;
  return kGood;
}

EXPORT Error cuFileStatsStart() {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileStatsStart"); error != 0) return {error, 0};
  library.counts = true;
  return kGood;
}

// Written by names here, by words in the product: either would show the other's mistake.
struct DeviceStatistics {
  char uuid[16];
  uint64_t read_bytes, read_rate, read_utilization, read_duration_us, reads;
  uint64_t p2p_reads, nvfs_reads, posix_reads, unaligned_reads, rerouted_reads, sparse_regions, inline_regions,
      bad_reads;
  uint64_t written_bytes, write_rate, write_utilization, write_duration_us, writes;
  uint64_t p2p_writes, nvfs_writes, posix_writes, unaligned_writes, rerouted_writes, bad_writes;
  uint64_t mappings, good_mappings, bad_mappings, unmappings, registered_bytes;
};
template <size_t kVectoredWords>  // of cuFileReadv and cuFileWritev
struct Statistics {
  struct Counter {
    uint64_t good, bad;
  };
  Counter operations[6];
  uint64_t bytes_and_rates[10];
  Counter batch_operations[15];
  uint64_t batch_bytes_and_rates[12 + kVectoredWords];
  uint64_t read_sizes[32], write_sizes[32];
  uint32_t device_count;
  DeviceStatistics devices[16];
};
static_assert(sizeof(Statistics<0>) == 5000 && sizeof(Statistics<14>) == 5112);

template <class Filled>
void Fill(const Library& library, Filled* statistics) {
  const size_t filled = library.oddity == kLeftOut ? 1 : 16;
  std::memset(static_cast<void*>(statistics), 0, offsetof(Filled, devices) + filled * sizeof(DeviceStatistics));
  statistics->device_count = library.oddity == kAbsurd ? 1'000'000'000 : library.oddity == kLeftOut ? 2 : 1;
  DeviceStatistics& device = statistics->devices[0];
  device.posix_reads = library.read_counts[kSaysPosix];
  device.nvfs_reads = library.read_counts[kSaysNvfs];
  device.p2p_reads = library.read_counts[kSaysP2p];
  device.posix_writes = library.write_counts[kSaysPosix];
  device.nvfs_writes = library.write_counts[kSaysNvfs];
  device.p2p_writes = library.write_counts[kSaysP2p];
  // What no reader may take for one of them.
  for (uint64_t* other : {&device.reads, &device.unaligned_reads, &device.writes, &device.unaligned_writes})
    *other = 77;
  for (auto& batches : statistics->batch_operations) batches = {77, 77};
  if (library.oddity == kGrown) std::memset(reinterpret_cast<char*>(statistics) + sizeof(Filled), 0, 248);
}

EXPORT Error cuFileGetStatsL3(void* statistics) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileGetStatsL3"); error != 0) return {error, 0};
  if (library.oddity == kDisabled || library.level < 3) return {kInvalidValue, 0};
  if (library.version < 1190) {
    Fill(library, static_cast<Statistics<0>*>(statistics));
  } else {
    Fill(library, static_cast<Statistics<14>*>(statistics));
  }
  return kGood;
}

#endif

// --- what tests call ---

EXPORT void cufile_double_clear() {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  library.call_counts.clear();
  library.failures.clear();
  library.shortened.clear();
  library.transfer_count = library.host_transfer_count = library.unregistered_transfer_count = 0;
  library.violations.clear();
  library.version = 1160;
  library.way = kSaysPosix;
  library.oddity = kAsDocumented;
  library.read_counts = library.write_counts = {};
  library.holds = false;
  library.changed.notify_all();
}

EXPORT void cufile_double_set_version(int version) {
  const std::lock_guard lock(Get().mutex);
  Get().version = version;
}
EXPORT void cufile_double_set_way(int way) {
  const std::lock_guard lock(Get().mutex);
  Get().way = way;
}
EXPORT void cufile_double_set_oddity(int oddity) {
  const std::lock_guard lock(Get().mutex);
  Get().oddity = oddity;
}

EXPORT void cufile_double_fail(const char* call, int nth, int error) {
  const std::string name = NameOrDie("cufile_double_fail", call);
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  library.failures.push_back({name, nth == 0 ? 0 : library.call_counts[name] + static_cast<uint64_t>(nth), error});
}

EXPORT void cufile_double_shorten(int nth, size_t size_bytes) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  library.shortened.emplace_back(library.transfer_count + static_cast<uint64_t>(nth), size_bytes);
}

EXPORT void cufile_double_hold(int on) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  library.holds = on != 0;
  library.changed.notify_all();
}

EXPORT int cufile_double_wait_for_held(int count, int timeout_ms) {
  Library& library = Get();
  std::unique_lock lock(library.mutex);
  const auto enough = [&] { return library.held_count >= count; };
  return library.changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), enough) ? 1 : 0;
}

EXPORT uint64_t cufile_double_call_count(const char* call) {
  const std::string name = NameOrDie("cufile_double_call_count", call);
  const std::lock_guard lock(Get().mutex);
  return Get().call_counts[name];
}
EXPORT uint64_t cufile_double_host_transfer_count() {
  const std::lock_guard lock(Get().mutex);
  return Get().host_transfer_count;
}
EXPORT uint64_t cufile_double_unregistered_transfer_count() {
  const std::lock_guard lock(Get().mutex);
  return Get().unregistered_transfer_count;
}
EXPORT int64_t cufile_double_file_count() {
  const std::lock_guard lock(Get().mutex);
  return static_cast<int64_t>(Get().files.size());
}
EXPORT int64_t cufile_double_buffer_count() {
  const std::lock_guard lock(Get().mutex);
  return static_cast<int64_t>(Get().buffers.size());
}
EXPORT int cufile_double_violation_count() {
  const std::lock_guard lock(Get().mutex);
  return static_cast<int>(Get().violations.size());
}
EXPORT const char* cufile_double_violation(int index) {
  const std::lock_guard lock(Get().mutex);
  return Get().violations.at(static_cast<size_t>(index)).c_str();
}
