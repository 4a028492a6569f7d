// GPUDirect Storage by the C interface of libcufile, which is loaded at run time: building needs neither its header nor
// the library. Here is what moves bytes between a file and the memory of a device (or of the host), device memory that
// is registered for that, and the library's own word on which way the bytes took. Threads, order and completions are
// engine/cufile_engine.cc's; where a Python package has put the library is fastpersist/transfer/gpudirect.py's to know.
//
// Source: GPUDirect Storage, cuFile API Reference Guide (calls, error numbers); the headers of cuFile 1.11 to 1.20
// (what is laid out how).
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

// Transfers between device memory and files of this process so far, by the way they took. Only the first two are
// GPUDirect; libcufile does the third (compatibility mode: through host memory) without a word where those fail.
struct CuFileTraffic {
  uint64_t p2p_count = 0;   // the disk's DMA into the device, by the kernel's own means (PCI P2PDMA)
  uint64_t nvfs_count = 0;  // the same by the nvidia-fs module
  uint64_t posix_count = 0;
};

// What became of one transfer. sys_errno as in IoCompletion.
struct CuFileOutcome {
  size_t done_bytes = 0;
  int sys_errno = 0;
  std::string error;  // cuFile's own, such as "CU_FILE_IO_DISABLED (5034)"; empty where the kernel has said all
};

// libcufile in this process: loaded and opened once, never closed (other users of the library may be at work, and
// closing drops what they have registered). Thread-safe.
class CuFile {
 public:
  // For the next Get that loads: where the library is (empty: the loader finds it by name), and the device whose
  // context requests of host memory run in.
  static void Configure(std::string library_path, int host_device);

  // kUnsupported, with the reason in one sentence: no driver, no library, one that refuses to open, a process that was
  // forked after cuFile was used. Not remembered: the next call tries again. Starts CUDA (CudaDriver::Get).
  static Result<CuFile*> Get();

  CuFile(const CuFile&) = delete;
  CuFile& operator=(const CuFile&) = delete;

  // 1000 * major + 10 * minor; 0: older than 1.8, which cannot tell.
  int version() const { return version_; }
  // Since 1.7; by what it says of itself, since 1.8.
  bool moves_host_memory() const { return version_ >= 1070; }
  // Such as "1.16".
  std::string version_text() const;

  // kUnsupported, with the reason, where the library keeps no statistics that we know how to read.
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
  size_t device_count_word_ = 0;  // in the library's statistics
  std::string why_no_statistics_;
};

// An open file as cuFile knows it. Those of one open file share what libcufile has of it, which refuses to register a
// descriptor twice. Move-only. The descriptor was opened without O_NOFOLLOW, and the file has a name: libcufile refuses
// others.
//
// What libcufile has is given back only when the descriptor has been closed (DropClosed): it contains a second
// descriptor of the file, and closing any descriptor drops the record locks that this process holds on the file.
class CuFileDescriptor {
 public:
  // EBADF for a descriptor that is not open.
  static Result<CuFileDescriptor> Open(CuFile& cufile, int fd);
  // Give back what libcufile has of files that nobody uses and whose descriptors were closed. The others do it, too.
  static void DropClosed();
  CuFileDescriptor(CuFileDescriptor&& other) noexcept;
  CuFileDescriptor& operator=(CuFileDescriptor&&) = delete;
  ~CuFileDescriptor();  // in a forked child it does nothing
  CuFileDescriptor(const CuFileDescriptor&) = delete;
  CuFileDescriptor& operator=(const CuFileDescriptor&) = delete;

  int fd() const { return fd_; }
  // Whether the descriptor is what it was; another file may have got its number since.
  bool IsStillOpen() const;

  // Blocks until the bytes have moved or failed. `buffer` is host memory, or device memory inside a DeviceStaging: what
  // was copied there before has landed (CopyMark), for cuFile waits for no stream.
  CuFileOutcome Read(std::byte* buffer, size_t size_bytes, uint64_t offset_bytes) const;
  CuFileOutcome Write(const std::byte* buffer, size_t size_bytes, uint64_t offset_bytes) const;

 private:
  // Memory in cuFile's terms, and the device in whose context it is moved.
  struct Memory {
    Device* device = nullptr;
    std::byte* base = nullptr;
    size_t base_offset_bytes = 0;
  };
  // Where a request's buffer lies; with an error where the request is one that cannot be made.
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

// Device memory that files are read into and written from: one allocation, registered with cuFile, in buffers of one
// size. No other memory is ever registered: what can be is scarce, and freeing it while it is registered can hang the
// machine's driver. Thread-safe.
class DeviceStaging {
 public:
  static constexpr uint64_t kBufferAlignment = 4096;

  // kUnsupported where cuFile refuses the memory, kDeviceError where the device has none.
  // REQUIRES: buffer_bytes is a multiple of kBufferAlignment, buffer_count > 0.
  static Result<std::unique_ptr<DeviceStaging>> Create(Device& device, size_t buffer_count, size_t buffer_bytes);
  // Every buffer is back, and no request uses one. In a forked child, and once the process ends, it does nothing.
  ~DeviceStaging();
  DeviceStaging(const DeviceStaging&) = delete;
  DeviceStaging& operator=(const DeviceStaging&) = delete;

  Device& device() const { return device_; }
  size_t buffer_bytes() const { return buffer_bytes_; }
  size_t buffer_count() const { return buffer_count_; }
  size_t free_count() const;

  // An idle buffer, or null. It is an address of the device, which the host cannot look into; a std::byte* because
  // IoRequest and BufferPool have those.
  std::byte* Take();
  void Put(std::byte* buffer);

  // Where memory lies in an area, in cuFile's terms: what was registered, and how far inside.
  struct Place {
    Device* device = nullptr;
    std::byte* base = nullptr;
    size_t offset_bytes = 0;
    size_t left_bytes = 0;  // from there to the end of the area
  };
  // In whichever area of the process; nothing for host memory and for memory of the device that is not ours.
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
