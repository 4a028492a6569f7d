// GPUDirect Storage by the C interface of libcufile, loaded at run time: building needs neither its header nor the
// library. This file moves bytes between a file and the memory of a device (or of the host), registers device memory
// for these transfers, and reports their data path. engine/cufile_engine.cc has threads, order and completions;
// fastpersist/transfer/gpudirect.py finds the library of a Python package.
//
// Source: GPUDirect Storage, cuFile API Reference Guide (calls, error numbers); the headers of cuFile 1.11 to 1.20
// (layouts).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/status.h"
#include "device/device.h"

namespace fastpersist {

// Transfers between device memory and files of this process so far, by data path. Only the first two are
// GPUDirect; the third goes through host memory (compatibility mode), which libcufile chooses silently if those fail.
struct CuFileTraffic {
  uint64_t p2p_count = 0;   // the disk's DMA into the device, by the kernel's own means (PCI P2PDMA)
  uint64_t nvfs_count = 0;  // the same by the nvidia-fs module
  uint64_t posix_count = 0;
};

// The outcome of one transfer. sys_errno as in IoCompletion.
struct CuFileOutcome {
  size_t done_bytes = 0;
  int sys_errno = 0;
  std::string error;  // cuFile's own, such as "CU_FILE_IO_DISABLED (5034)"; empty if the errno says all
};

// libcufile in this process: loaded and opened once, never closed, since closing drops the registrations of its other
// users. Thread-safe.
class CuFile {
 public:
  // For the next Get that loads: the library's path (empty: the loader finds it by name), and the device whose context
  // serves requests of host memory.
  static void Configure(std::string library_path, int host_device);

  // Returns the library, and starts CUDA (CudaDriver::Get). kUnsupported, with the reason in one sentence: no driver,
  // no library, one that refuses to open, or a process forked after cuFile was used. The next call after a failure
  // tries again.
  static Result<CuFile*> Get();

  CuFile(const CuFile&) = delete;
  CuFile& operator=(const CuFile&) = delete;

  // 1000 * major + 10 * minor; 0: older than 1.8, which cannot say.
  int version() const { return version_; }
  // True since 1.7, but only 1.8 and later can say their version.
  bool moves_host_memory() const { return version_ >= 1070; }
  // Such as "1.16".
  std::string version_text() const;

  // kUnsupported, with the reason, if the library keeps no statistics that this code can read.
  Result<CuFileTraffic> Traffic() const;

 private:
  friend class CuFileDescriptor;
  friend class DeviceStaging;

  struct Calls;  // cufile_abi.h
  explicit CuFile(std::unique_ptr<const Calls> calls);
  static Result<CuFile*> LoadAndOpen();
  void StartStatistics();

  const std::unique_ptr<const Calls> calls_;
  int version_ = 0;
  size_t device_count_word_ = 0;  // the index of the word in the library's statistics
  std::string why_no_statistics_;
};

// A file registered with cuFile. Move-only. Objects of one open file share its registration, since libcufile refuses to
// register a descriptor twice. The file must have a name, and its descriptor must be opened without O_NOFOLLOW:
// libcufile refuses others.
//
// A registration ends only after its descriptor was closed (DropClosed): it contains a second descriptor of the file,
// and closing any descriptor drops the record locks that this process holds on the file.
class CuFileDescriptor {
 public:
  // EBADF for a descriptor that is not open.
  static Result<CuFileDescriptor> Open(CuFile& cufile, int fd);
  // End the registrations of files without users whose descriptors were closed. Open and the destructor do it too.
  static void DropClosed();
  CuFileDescriptor(CuFileDescriptor&& other) noexcept;
  CuFileDescriptor& operator=(CuFileDescriptor&&) = delete;
  ~CuFileDescriptor();  // in a forked child it does nothing
  CuFileDescriptor(const CuFileDescriptor&) = delete;
  CuFileDescriptor& operator=(const CuFileDescriptor&) = delete;

  int fd() const { return fd_; }
  // Whether the descriptor still is this file; another file may have its number by now.
  bool IsStillOpen() const;

  // Block until the bytes have moved or failed. `buffer` is host memory, or device memory inside a DeviceStaging.
  // Earlier copies into it must be complete (CopyMark), since cuFile waits for no stream.
  CuFileOutcome Read(std::byte* buffer, size_t size_bytes, uint64_t offset_bytes) const;
  CuFileOutcome Write(const std::byte* buffer, size_t size_bytes, uint64_t offset_bytes) const;

 private:
  // Memory in cuFile's terms, and the device in whose context it is moved.
  struct Memory {
    Device* device = nullptr;
    std::byte* base = nullptr;
    size_t base_offset_bytes = 0;
  };
  // Finds where a request's buffer lies; the outcome has an error if the request is impossible.
  CuFileOutcome Locate(bool write, std::byte* buffer, size_t size_bytes, Memory& memory) const;

  struct Registered;
  struct Table;
  static Table& TheTable();
  CuFileDescriptor(CuFile& cufile, int fd, Registered* registered);
  CuFileOutcome Move(bool write, std::byte* buffer, size_t size_bytes, uint64_t offset_bytes) const;

  CuFile* cufile_;
  int fd_;
  Registered* registered_;
};

// Device memory for reads and writes of files: one allocation, registered with cuFile, in buffers of one size. No other
// memory is registered: registrations are scarce, and freeing registered memory can hang the machine's driver.
// Thread-safe.
class DeviceStaging {
 public:
  static constexpr uint64_t kBufferAlignment = 4096;

  // kUnsupported if cuFile refuses the memory, kDeviceError if the device has none. REQUIRES: buffer_bytes is a
  // multiple of kBufferAlignment, buffer_count > 0.
  static Result<std::unique_ptr<DeviceStaging>> Create(Device& device, size_t buffer_count, size_t buffer_bytes);
  // REQUIRES: every buffer is back, and no request uses one. Does nothing in a forked child and when the process ends.
  ~DeviceStaging();
  DeviceStaging(const DeviceStaging&) = delete;
  DeviceStaging& operator=(const DeviceStaging&) = delete;

  Device& device() const { return device_; }
  size_t buffer_bytes() const { return buffer_bytes_; }
  size_t buffer_count() const { return buffer_count_; }
  size_t free_count() const;

  // Take an idle buffer, or null. It is a device address, which the host cannot read; a std::byte* because IoRequest
  // and BufferPool use those.
  std::byte* Take();
  void Put(std::byte* buffer);

  // A place in registered memory, in cuFile's terms: base of the registration, and offset inside.
  struct Place {
    Device* device = nullptr;
    std::byte* base = nullptr;
    size_t offset_bytes = 0;
    size_t left_bytes = 0;  // from there to the end of the area
  };
  // Search all staging areas of the process; nothing for host memory and for other device memory.
  static std::optional<Place> Find(const std::byte* address);

 private:
  DeviceStaging(Device& device, std::byte* base, size_t buffer_count, size_t buffer_bytes);

  Device& device_;
  std::byte* const base_;
  const size_t buffer_count_;
  const size_t buffer_bytes_;
  mutable std::mutex mutex_;
  std::vector<std::byte*> free_;
};

}  // namespace fastpersist
