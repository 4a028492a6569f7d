#include "device/cufile.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "core/alignment.h"
#include "core/check.h"
#include "device/cuda_driver.h"
#include "device/cufile_abi.h"

namespace fastpersist {
namespace {

constexpr const char* kSoname = "libcufile.so.0";

Status Unsupported(std::string message) { return Status::Error(StatusCode::kUnsupported, std::move(message)); }

// --- statistics ---

// CUfileStatsLevel3_t in 8-byte words: the counters of level 1, whose number has grown, and two histograms of 32 for
// level 2; the number of devices (32 bits, and padding); then 31 words for each device, of which 2 are its UUID. By the
// headers of cuFile 1.15 to 1.20. A later one may have changed it again, under the same SONAME.
struct Layout {
  int first_version;
  size_t device_count_word;  // 0: not known
};
constexpr std::array<Layout, 3> kLayouts = {{{1150, 128}, {1190, 142}, {1210, 0}}};
constexpr size_t kDeviceWords = 31;
constexpr size_t kDevicesMax = 16;
constexpr std::array<size_t, 2> kP2pWords = {7, 20};  // reads and writes, in a device's words
constexpr std::array<size_t, 2> kNvfsWords = {8, 21};
constexpr std::array<size_t, 2> kPosixWords = {9, 22};
// Room for a structure that has grown, with a fill pattern that shows whether it has.
constexpr size_t kRoomWords = 8192;
constexpr uint64_t kUntouched = 0xA5C3'5A3C'C3A5'3C5A;
constexpr int kPerDevice = 3;

// Settings for the first use.

// No lock, so a fork at any moment leaves them usable. A replaced path is not freed, since it may be in use.
std::atomic<const std::string*> g_library_path{nullptr};
std::atomic<int> g_host_device{0};

}  // namespace

// --- the library ---

void CuFile::Configure(std::string library_path, int host_device) {
  const std::string* const known = g_library_path.load();
  if (known == nullptr || *known != library_path) g_library_path.store(new std::string(std::move(library_path)));
  g_host_device.store(host_device);
}

Result<CuFile*> CuFile::Get() {
  FP_RETURN_IF_ERROR(CudaDriver::Get().status());
  // No child of a process that was here gets past this line: so no thread that the child lacks holds the mutex or has
  // left its state half-made.
  static auto* const mutex = new std::mutex;
  static CuFile* opened = nullptr;
  const std::lock_guard lock(*mutex);
  if (opened != nullptr) return opened;
  Result<CuFile*> fresh = LoadAndOpen();
  if (fresh.ok()) opened = fresh.value();
  return fresh;
}

Result<CuFile*> CuFile::LoadAndOpen() {
  // If other users have loaded the library, take theirs. A library once loaded stays.
  void* library = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  std::string why_not;
  const std::string* const path = g_library_path.load();
  for (const char* const name : {path == nullptr ? "" : path->c_str(), kSoname}) {
    if (library != nullptr || *name == '\0') continue;
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) continue;
    const char* const reason = dlerror();  // NOLINT(concurrency-mt-unsafe): of the calling thread, in glibc and musl
    why_not.append(why_not.empty() ? "" : "; ").append(reason == nullptr ? name : reason);
  }
  if (library == nullptr) {
    return Unsupported("GPUDirect Storage finds no library here (" + why_not +
                       "): install nvidia-cufile with pip (nvidia-cufile-cu12 for CUDA 12), or the system's libcufile");
  }
  auto calls = std::make_unique<Calls>();
  const char* missing = nullptr;
  const auto find = [&]<class Function>(Function*& function, const char* symbol, bool required = true) {
    function = reinterpret_cast<Function*>(dlsym(library, symbol));
    if (function == nullptr && required && missing == nullptr) missing = symbol;
  };
  find(calls->driver_open, "cuFileDriverOpen");
  find(calls->handle_register, "cuFileHandleRegister");
  find(calls->handle_deregister, "cuFileHandleDeregister");
  find(calls->buf_register, "cuFileBufRegister");
  find(calls->buf_deregister, "cuFileBufDeregister");
  find(calls->read, "cuFileRead");
  find(calls->write, "cuFileWrite");
  find(calls->get_version, "cuFileGetVersion", false);
  find(calls->get_stats_level, "cuFileGetStatsLevel", false);
  find(calls->set_stats_level, "cuFileSetStatsLevel", false);
  find(calls->stats_start, "cuFileStatsStart", false);
  find(calls->get_stats_l3, "cuFileGetStatsL3", false);
  if (missing != nullptr) return Unsupported("libcufile has no " + std::string(missing) + ": install a newer one");

  const CuFileError error = calls->driver_open();
  if (error.code != kCuFileSuccess && error.code != kCuFileDriverAlreadyOpen) {
    return Unsupported("GPUDirect Storage does not start: cuFileDriverOpen: " + Describe(error) +
                       "; libcufile says more in its cufile.log, mostly in the working directory");
  }
  std::unique_ptr<CuFile> cufile(new CuFile(std::move(calls)));
  cufile->StartStatistics();
  return cufile.release();  // never freed: engines may run while the process exits
}

CuFile::CuFile(std::unique_ptr<const Calls> calls) : calls_(std::move(calls)) {
  if (calls_->get_version == nullptr || calls_->get_version(&version_).code != kCuFileSuccess) version_ = 0;
}

std::string CuFile::version_text() const {
  return version_ == 0 ? "before 1.8" : std::to_string(version_ / 1000) + "." + std::to_string(version_ % 1000 / 10);
}

// Count from the start, so that Traffic() can report what each transfer did.
void CuFile::StartStatistics() {
  for (const Layout& layout : kLayouts) {
    if (version_ >= layout.first_version) device_count_word_ = layout.device_count_word;
  }
  if (version_ < kLayouts.front().first_version || calls_->get_stats_l3 == nullptr ||
      calls_->set_stats_level == nullptr || calls_->get_stats_level == nullptr || calls_->stats_start == nullptr) {
    why_no_statistics_ =
        "cuFile " + version_text() + " does not tell which way bytes take: that comes with cuFile 1.15 (CUDA 13.0)";
    return;
  }
  if (device_count_word_ == 0) {
    why_no_statistics_ =
        "which way bytes take is not known: cuFile " + version_text() + " is newer than what is understood";
    return;
  }
  int level = 0;
  CuFileError error = calls_->get_stats_level(&level);
  if (error.code == kCuFileSuccess && level < kPerDevice) error = calls_->set_stats_level(kPerDevice);
  if (error.code == kCuFileSuccess) error = calls_->stats_start();
  if (error.code != kCuFileSuccess) why_no_statistics_ = "cuFile refuses to keep statistics: " + Describe(error);
}

Result<CuFileTraffic> CuFile::Traffic() const {
  if (!why_no_statistics_.empty()) return Unsupported(why_no_statistics_);
  std::vector<uint64_t> words(kRoomWords, kUntouched);
  const CuFileError error = calls_->get_stats_l3(words.data());
  if (error.code != kCuFileSuccess) return Unsupported("cuFileGetStatsL3: " + Describe(error));
  uint32_t device_count = 0;
  std::memcpy(&device_count, &words[device_count_word_], sizeof(device_count));
  const size_t first_device_word = device_count_word_ + 1;
  const std::span<const uint64_t> behind = std::span(words).subspan(first_device_word + kDevicesMax * kDeviceWords);
  const bool known = device_count <= kDevicesMax &&
                     std::all_of(behind.begin(), behind.end(), [](uint64_t word) { return word == kUntouched; });
  if (!known) return Unsupported("cuFileGetStatsL3 answers in a layout that is not known");
  CuFileTraffic traffic;
  for (size_t device = 0; device < device_count; ++device) {
    const std::span<const uint64_t> counts =
        std::span(words).subspan(first_device_word + device * kDeviceWords, kDeviceWords);
    if (std::find(counts.begin(), counts.end(), kUntouched) != counts.end()) {
      return Unsupported("cuFileGetStatsL3 left out counts of a device");
    }
    for (const size_t word : kP2pWords) traffic.p2p_count += counts[word];
    for (const size_t word : kNvfsWords) traffic.nvfs_count += counts[word];
    for (const size_t word : kPosixWords) traffic.posix_count += counts[word];
  }
  return traffic;
}

// --- files ---

// Constant, except for the count, which the table guards.
struct CuFileDescriptor::Registered {
  CuFile* cufile = nullptr;
  int fd = -1;
  int access = O_RDONLY;  // O_RDONLY, O_WRONLY or O_RDWR
  dev_t device = 0;
  ino_t inode = 0;
  void* file = nullptr;  // CUfileHandle_t
  size_t user_count = 0;

  // Returns 0 or an errno.
  int Look(int descriptor) {
    struct stat found = {};
    const int flags = fcntl(descriptor, F_GETFL);
    if (flags < 0 || fstat(descriptor, &found) != 0) return errno;
    fd = descriptor;
    access = flags & O_ACCMODE;
    device = found.st_dev;
    inode = found.st_ino;
    return 0;
  }
  bool IsStillOpen() const {
    Registered now;
    return now.Look(fd) == 0 && now.access == access && now.device == device && now.inode == inode;
  }
};

struct CuFileDescriptor::Table {
  // Held while libcufile registers and deregisters, so that no thread meets a half-registered descriptor.
  std::mutex mutex;
  std::vector<std::unique_ptr<Registered>> all;

  void DropClosed() {
    std::erase_if(all, [](const std::unique_ptr<Registered>& known) {
      if (known->user_count > 0 || known->IsStillOpen()) return false;
      known->cufile->calls_->handle_deregister(known->file);
      return true;
    });
  }
};

CuFileDescriptor::Table& CuFileDescriptor::TheTable() {
  static auto* const table = new Table;
  return *table;
}

void CuFileDescriptor::DropClosed() {
  if (!CudaDriver::Get().ok()) return;  // in a forked child the table may be locked
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  table.DropClosed();
}

Result<CuFileDescriptor> CuFileDescriptor::Open(CuFile& cufile, int fd) {
  FP_RETURN_IF_ERROR(CudaDriver::Get().status());
  auto fresh = std::make_unique<Registered>();
  const std::string which = "descriptor " + std::to_string(fd);
  if (const int sys_errno = fresh->Look(fd); sys_errno != 0) {
    return Status::FromErrno(sys_errno, "registering", which);
  }
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  table.DropClosed();
  for (const std::unique_ptr<Registered>& known : table.all) {
    if (known->fd != fd || !known->IsStillOpen()) continue;
    ++known->user_count;
    return CuFileDescriptor(cufile, fd, known.get());
  }
  FileDescription description;
  description.handle.fd = fd;
  const CuFileError error = cufile.calls_->handle_register(&fresh->file, &description);
  if (error.code != kCuFileSuccess) {
    std::string what = "cuFileHandleRegister of " + which + ": " + Describe(error);
    // libcufile asks udev about the disk. Without an answer it reports the first since cuFile 1.16, the second until
    // then.
    const bool has_no_udev =
        (error.code == kCuFileNotRegistered || error.code == kCuFileInternalError) && access("/run/udev", F_OK) != 0;
    if (has_no_udev) {
      what.append("; it asks udev about the disk, and /run/udev is not here: mount it into the container");
    }
    return has_no_udev || NameOf(error.code).sys_errno == EOPNOTSUPP ? Unsupported(what)
                                                                     : Status::Error(StatusCode::kIoError, what);
  }
  fresh->cufile = &cufile;
  fresh->user_count = 1;
  table.all.push_back(std::move(fresh));
  return CuFileDescriptor(cufile, fd, table.all.back().get());
}

CuFileDescriptor::CuFileDescriptor(CuFile& cufile, int fd, Registered* registered)
    : cufile_(&cufile), fd_(fd), registered_(registered) {}

CuFileDescriptor::CuFileDescriptor(CuFileDescriptor&& other) noexcept
    : cufile_(other.cufile_), fd_(other.fd_), registered_(std::exchange(other.registered_, nullptr)) {}

CuFileDescriptor::~CuFileDescriptor() {
  if (registered_ == nullptr || !CudaDriver::Get().ok()) return;
  Table& table = TheTable();
  const std::lock_guard lock(table.mutex);
  --registered_->user_count;
  table.DropClosed();
}

bool CuFileDescriptor::IsStillOpen() const { return registered_->IsStillOpen(); }

CuFileOutcome CuFileDescriptor::Read(std::byte* buffer, size_t size_bytes, uint64_t offset_bytes) const {
  return Move(false, buffer, size_bytes, offset_bytes);
}

CuFileOutcome CuFileDescriptor::Write(const std::byte* buffer, size_t size_bytes, uint64_t offset_bytes) const {
  return Move(true, const_cast<std::byte*>(buffer), size_bytes, offset_bytes);  // NOLINT: a write only reads it
}

CuFileOutcome CuFileDescriptor::Locate(bool write, std::byte* buffer, size_t size_bytes, Memory& memory) const {
  if (registered_->access == (write ? O_RDONLY : O_WRONLY)) return {.sys_errno = EBADF, .error = {}};
  const std::optional<DeviceStaging::Place> place = DeviceStaging::Find(buffer);
  if (place.has_value()) {
    memory = {.device = place->device, .base = place->base, .base_offset_bytes = place->offset_bytes};
    if (size_bytes <= place->left_bytes) return {};
    return {.sys_errno = EFAULT, .error = "the request reaches beyond the device's staging area"};
  }
  if (!cufile_->moves_host_memory()) {
    return {.sys_errno = EOPNOTSUPP, .error = "before cuFile 1.8 only memory of a device can be moved"};
  }
  Result<Device*> device = Device::Get(g_host_device.load());
  if (!device.ok()) return {.sys_errno = EIO, .error = device.status().message()};
  memory = {.device = device.value(), .base = buffer, .base_offset_bytes = 0};
  return {};
}

CuFileOutcome CuFileDescriptor::Move(bool write, std::byte* buffer, size_t size_bytes, uint64_t offset_bytes) const {
  Memory memory;
  CuFileOutcome refused = Locate(write, buffer, size_bytes, memory);
  if (refused.sys_errno != 0) return refused;
  FP_CHECK(memory.device != nullptr);
  const ContextScope context(*memory.device);
  if (!context.status().ok()) return {.sys_errno = EIO, .error = context.status().message()};

  std::byte* const base = memory.base;
  const auto base_offset = static_cast<off_t>(memory.base_offset_bytes);
  const auto offset = static_cast<off_t>(offset_bytes);
  ssize_t done = 0;
  do {
    errno = 0;
    done = write ? cufile_->calls_->write(registered_->file, base, size_bytes, offset, base_offset)
                 : cufile_->calls_->read(registered_->file, base, size_bytes, offset, base_offset);
  } while (done == -1 && errno == EINTR);
  return OutcomeOf(done, size_bytes, errno);
}

// --- memory of the device ---

namespace {

constexpr size_t kDevicePageBytes = size_t{2} << 20;

// The first byte and the end of every area.
struct Areas {
  std::mutex mutex;
  struct Area {
    Device* device;
    std::byte* base;
    size_t size_bytes;
  };
  std::vector<Area> all;
};

Areas& TheAreas() {
  static auto* const areas = new Areas;
  return *areas;
}

std::byte* AsPointer(CudaAddress address) { return reinterpret_cast<std::byte*>(address); }
CudaAddress AsAddress(const std::byte* pointer) { return reinterpret_cast<CudaAddress>(pointer); }

}  // namespace

Result<std::unique_ptr<DeviceStaging>> DeviceStaging::Create(Device& device, size_t buffer_count, size_t buffer_bytes) {
  FP_CHECK(buffer_count > 0 && buffer_bytes > 0 && IsAligned(buffer_bytes, kBufferAlignment));
  Result<CuFile*> cufile = CuFile::Get();
  if (!cufile.ok()) return cufile.status();
  Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const ContextScope context(device);
  FP_RETURN_IF_ERROR(context.status());
  // Whole pages of the device: the driver places smaller ones between other small allocations, on any boundary.
  const size_t size_bytes = AlignUp(buffer_count * buffer_bytes, kDevicePageBytes);
  const std::string what =
      std::to_string(size_bytes) + " bytes of staging memory on cuda:" + std::to_string(device.ordinal());
  CudaAddress address = 0;
  FP_RETURN_IF_ERROR(driver.value()->Check(driver.value()->MemAlloc(&address, size_bytes), "allocating " + what));
  std::byte* const base = AsPointer(address);
  if (!IsAligned(address, kBufferAlignment)) {
    driver.value()->MemFree(address);
    return Unsupported(what + " do not begin on a page");
  }
  const CuFileError error = cufile.value()->calls_->buf_register(base, size_bytes, 0);
  if (error.code != kCuFileSuccess) {
    driver.value()->MemFree(address);
    return Unsupported("GPUDirect Storage refuses " + what + ": cuFileBufRegister: " + Describe(error));
  }
  Areas& areas = TheAreas();
  const std::lock_guard lock(areas.mutex);
  areas.all.push_back({&device, base, size_bytes});
  return std::unique_ptr<DeviceStaging>(new DeviceStaging(device, base, buffer_count, buffer_bytes));
}

DeviceStaging::DeviceStaging(Device& device, std::byte* base, size_t buffer_count, size_t buffer_bytes)
    : device_(device), base_(base), buffer_count_(buffer_count), buffer_bytes_(buffer_bytes) {
  free_.reserve(buffer_count);
  for (size_t i = buffer_count; i > 0; --i) free_.push_back(base_ + (i - 1) * buffer_bytes_);
}

DeviceStaging::~DeviceStaging() {
  Result<const CudaDriver*> driver = CudaDriver::Get();
  Result<CuFile*> cufile = CuFile::Get();
  if (!driver.ok() || !cufile.ok()) return;  // it was the parent's, or ends with the process
  FP_CHECK(free_count() == buffer_count_);   // a request in flight would write to memory that is in use elsewhere
  {
    Areas& areas = TheAreas();
    const std::lock_guard lock(areas.mutex);
    std::erase_if(areas.all, [&](const Areas::Area& area) { return area.base == base_; });
  }
  const ContextScope context(device_);
  // Never free registered memory: lose it instead. An error here means that the device is lost.
  if (context.status().ok() && cufile.value()->calls_->buf_deregister(base_).code == kCuFileSuccess) {
    driver.value()->MemFree(AsAddress(base_));
  }
}

size_t DeviceStaging::free_count() const {
  const std::lock_guard lock(mutex_);
  return free_.size();
}

std::byte* DeviceStaging::Take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return nullptr;
  std::byte* const buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void DeviceStaging::Put(std::byte* buffer) {
  FP_CHECK(buffer >= base_ && buffer < base_ + buffer_count_ * buffer_bytes_);
  const std::lock_guard lock(mutex_);
  free_.push_back(buffer);
  FP_CHECK(free_.size() <= buffer_count_);
}

std::optional<DeviceStaging::Place> DeviceStaging::Find(const std::byte* address) {
  Areas& areas = TheAreas();
  const std::lock_guard lock(areas.mutex);
  for (const Areas::Area& area : areas.all) {
    // Unsigned: an address below the area is beyond its end too.
    const CudaAddress inside = AsAddress(address) - AsAddress(area.base);
    if (inside < area.size_bytes) return Place{area.device, area.base, inside, area.size_bytes - inside};
  }
  return std::nullopt;
}

}  // namespace fastpersist
