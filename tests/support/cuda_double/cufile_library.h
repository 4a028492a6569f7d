// What the parts of the double of libcufile share: its state, and what every call goes through. The calls that move one
// request each are cufile_double.cc's, those of batches cufile_double_batch.cc's.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
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

constexpr Error kGood = {0, 0};
constexpr int kInvalidOpenFlag = 5019;
constexpr int kInvalidValue = 5022;
constexpr int kAlreadyRegistered = 5023;
constexpr int kNotRegistered = 5024;
constexpr int kDriverAlreadyOpen = 5026;
constexpr int kFileAlreadyRegistered = 5028;
constexpr int kNoSecondDescriptor = 5031;
constexpr int kDriverNotInitialized = 5001;

// Not called, but counted and failed as if they were: the requests of batches.
inline constexpr const char* kBatchRead = "batch read";
inline constexpr const char* kBatchWrite = "batch write";

inline constexpr std::array kCalls = {"cuFileDriverOpen",
                                      "cuFileHandleRegister",
                                      "cuFileHandleDeregister",
                                      "cuFileBufRegister",
                                      "cuFileBufDeregister",
                                      "cuFileRead",
                                      "cuFileWrite",
                                      "cuFileGetVersion",
                                      "cuFileGetStatsLevel",
                                      "cuFileSetStatsLevel",
                                      "cuFileStatsStart",
                                      "cuFileGetStatsL3",
                                      "cuFileDriverGetProperties",
                                      "cuFileBatchIOSetUp",
                                      "cuFileBatchIOSubmit",
                                      "cuFileBatchIOGetStatus",
                                      "cuFileBatchIOCancel",
                                      "cuFileBatchIODestroy",
                                      kBatchRead,
                                      kBatchWrite};

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

// Of a batch, what was submitted: its place there, until it was told of.
struct Entry {
  void* parameters;  // the caller's own, read when it is its turn
  bool on_device = false;
  bool is_running = false;
};
struct Event {  // CUfileIOEvents_t
  void* cookie;
  int status;
  size_t answer;
};
struct Batch {
  unsigned capacity = 0;
  std::deque<Entry*> open;  // not told of, those that wait for a thread among them
  std::deque<Event> events;
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
  std::map<void*, Batch*> batches;
  std::deque<std::pair<Batch*, Entry*>> waiting;  // for a thread that executes them
  bool has_threads = false;
  int batch_oddity = kAsSeen;
  unsigned batch_max = 128;
  uint64_t batch_p2p_count = 0, batch_nvfs_count = 0, batch_total_count = 0;
  bool holds = false;
  int held_count = 0;

  void Violate(std::string text) { violations.push_back(std::move(text)); }
};

Library& Get();
// Counts a call; what it is to answer, 0: nothing in particular. With the mutex held.
int Enter(Library& library, const char* call);
bool IsDeviceMemory(Library& library, uint64_t address, size_t size_bytes = 1);
// One request; answers as cuFileRead and cuFileWrite do. Those of batches, which have no context and are counted
// elsewhere, bring along whether the memory is a device's.
ssize_t Transfer(const char* call, bool write, void* handle, void* base, size_t size_bytes, off_t offset,
                 off_t base_offset, std::optional<bool> in_batch_on_device = {});

// Whether requests of a batch that were not told of are of memory that was registered by this address.
bool UsesBuffer(const Batch& batch, const void* base);

}  // namespace cufile_double
