// Batches of the double of libcufile: threads of its own execute what is submitted, in the caller's own array, while
// nobody waits. Beyond what is documented, it behaves as libcufile 1.15 to 1.20 was seen to: a submission that is
// refused leaves the batch without a word of what it had, a cancelled one tells of nothing, and an idle one is not
// waited for. Where that would lose a caller's requests, it is a violation.
#include <fcntl.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "cufile_library.h"

#if !defined(CUFILE_DOUBLE_OLD)

namespace cufile_double {
namespace {

constexpr int kBatchFull = 5037;
constexpr int kSubmitError = 5040;
constexpr int kPlannedStatus = 10'000;
constexpr int kComplete = 0x10, kFailed = 0x40, kPending = 0x02;
constexpr int kThreadCount = 8;

struct Parameters {  // CUfileIOParams_t
  int mode;
  union {
    struct {
      void* base;
      off_t offset;
      off_t base_offset;
      size_t size_bytes;
    } batch;
  } u;
  void* file;
  int opcode;
  void* cookie;
};

Event Execute(const Entry& entry) {
  const auto& parameters = *static_cast<const Parameters*>(entry.parameters);
  const bool write = parameters.opcode == 1;
  const auto& request = parameters.u.batch;
  errno = 0;
  const ssize_t done = Transfer(write ? kBatchWrite : kBatchRead, write, parameters.file, request.base,
                                request.size_bytes, request.offset, request.base_offset, entry.on_device);
  if (done >= 0) return {parameters.cookie, kComplete, static_cast<size_t>(done)};
  if (done <= -kPlannedStatus) return {parameters.cookie, static_cast<int>(-done) - kPlannedStatus, 0};
  const ssize_t answer = done == -1 && errno != 0 ? -errno : done;
  return {parameters.cookie, kFailed, static_cast<size_t>(answer)};
}

void Work() {
  Library& library = Get();
  std::unique_lock lock(library.mutex);
  for (;;) {
    library.changed.wait(lock, [&] { return !library.waiting.empty(); });
    const bool from_the_end = library.batch_oddity == kReversed;
    const auto [batch, entry] = from_the_end ? library.waiting.back() : library.waiting.front();
    if (from_the_end) {
      library.waiting.pop_back();
    } else {
      library.waiting.pop_front();
    }
    entry->is_running = true;
    lock.unlock();
    const Event event = Execute(*entry);
    lock.lock();
    entry->is_running = false;
    if (library.batch_oddity == kReversed) {
      batch->events.push_front(event);
    } else {
      batch->events.push_back(event);
    }
    library.changed.notify_all();
  }
}

void StartThreads(Library& library) {
  if (std::exchange(library.has_threads, true)) return;
  for (int i = 0; i < kThreadCount; ++i) std::thread(Work).detach();
}

// Null, and a violation: there is none.
Batch* Find(Library& library, const char* call, void* handle) {
  const auto found = library.batches.find(handle);
  if (found != library.batches.end()) return found->second;
  library.Violate(std::string(call) + " of a batch that is not set up");
  return nullptr;
}

void Forget(Batch& batch) {
  for (Entry* const entry : batch.open) delete entry;
  batch.open.clear();
  batch.events.clear();
}

// Until nothing of it runs; what has not begun never does.
void Drain(Library& library, std::unique_lock<std::mutex>& lock, Batch& batch) {
  std::erase_if(library.waiting, [&](const auto& waiting) { return waiting.first == &batch; });
  library.changed.wait(lock, [&] {
    return std::none_of(batch.open.begin(), batch.open.end(), [](const Entry* entry) { return entry->is_running; });
  });
  Forget(batch);
}

}  // namespace

bool UsesBuffer(const Batch& batch, const void* base) {
  return std::any_of(batch.open.begin(), batch.open.end(), [&](const Entry* entry) {
    return static_cast<const Parameters*>(entry->parameters)->u.batch.base == base;
  });
}

}  // namespace cufile_double

using namespace cufile_double;  // NOLINT: all that follows are the library's own names

EXPORT Error cuFileDriverGetProperties(void* properties) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileDriverGetProperties"); error != 0) return {error, 0};
  static_cast<uint32_t*>(properties)[12] = library.batch_max;  // max_batch_io_size
  static_cast<uint32_t*>(properties)[13] = 5;                  // max_batch_io_timeout_msecs
  return kGood;
}

EXPORT Error cuFileBatchIOSetUp(void** handle, unsigned count) {
  Library& library = Get();
  const std::lock_guard lock(library.mutex);
  if (const int error = Enter(library, "cuFileBatchIOSetUp"); error != 0) return {error, 0};
  if (count == 0 || count > library.batch_max) return {kInvalidValue, 0};
  StartThreads(library);
  auto* const batch = new Batch;
  batch->capacity = count;
  library.batches.emplace(batch, batch);
  *handle = batch;
  return kGood;
}

EXPORT Error cuFileBatchIOSubmit(void* handle, unsigned count, void* parameters, unsigned flags) {
  Library& library = Get();
  std::unique_lock lock(library.mutex);
  const int planned = Enter(library, "cuFileBatchIOSubmit");
  Batch* const batch = Find(library, "cuFileBatchIOSubmit", handle);
  if (batch == nullptr) return {kInvalidValue, 0};
  if (!batch->open.empty()) library.Violate("cuFileBatchIOSubmit to a batch that has not told of all it had");
  if (library.device.context_depth() == 0) library.Violate("cuFileBatchIOSubmit without a context");
  auto* const requests = static_cast<Parameters*>(parameters);
  int error = planned;
  if (error == 0 && (count == 0 || count > batch->capacity || flags != 0)) error = kSubmitError;
  if (error == 0 && count > batch->capacity - batch->open.size()) error = kBatchFull;
  for (unsigned i = 0; i < count && i < batch->capacity; ++i) {
    const auto file = library.files.find(requests[i].file);
    const bool is_known = file != library.files.end();
    const int access = is_known ? fcntl(file->second->fd, F_GETFL) & O_ACCMODE : O_RDWR;
    if (!is_known) library.Violate("cuFileBatchIOSubmit of a file that is not registered");
    if (error == 0 && (!is_known || requests[i].mode != 1 || access == (requests[i].opcode == 1 ? O_RDONLY : O_WRONLY)))
      error = kSubmitError;
    // Where it was planned, all but the last one are on their way all the same.
    if ((error != 0 && error != planned) || (planned != 0 && i + 1 == count)) break;
    const auto address = reinterpret_cast<uint64_t>(requests[i].u.batch.base);
    batch->open.push_back(new Entry{&requests[i], IsDeviceMemory(library, address)});
    library.waiting.emplace_back(batch, batch->open.back());
  }
  library.changed.notify_all();
  return error == 0 ? kGood : Error{error, 0};
}

EXPORT Error cuFileBatchIOGetStatus(void* handle, unsigned min_count, unsigned* count, Event* events,
                                    timespec* timeout) {
  Library& library = Get();
  std::unique_lock lock(library.mutex);
  const int planned = Enter(library, "cuFileBatchIOGetStatus");
  Batch* const batch = Find(library, "cuFileBatchIOGetStatus", handle);
  if (batch == nullptr) return {kInvalidValue, 0};
  const unsigned room = std::exchange(*count, 0);
  if (min_count > room) library.Violate("cuFileBatchIOGetStatus of more than there is room for");
  if (timeout == nullptr) library.Violate("cuFileBatchIOGetStatus without end");
  if (library.device.context_depth() == 0) library.Violate("cuFileBatchIOGetStatus without a context");
  if (planned != 0) return {planned, 0};
  if (batch->open.empty() || library.batch_oddity == kForgets) return kGood;  // at once, whatever the timeout
  const auto wait = std::chrono::seconds(timeout->tv_sec) + std::chrono::nanoseconds(timeout->tv_nsec);
  library.changed.wait_for(lock, wait, [&] { return batch->events.size() >= min_count; });
  const auto tell = [&](const Event& event) {
    if (*count < room) events[(*count)++] = event;
  };
  if (library.batch_oddity == kRepeats) {
    for (const Entry* const entry : batch->open) {
      tell({static_cast<const Parameters*>(entry->parameters)->cookie, kPending, 7777});
    }
    for (const Event& event : batch->events) tell(event);
    tell({reinterpret_cast<void*>(uintptr_t{99999}), kComplete, 1});  // of none that there is
    if (batch->events.size() < batch->open.size() || *count == room) return kGood;
    Forget(*batch);
    return kGood;
  }
  while (!batch->events.empty() && *count < room) {
    const Event event = batch->events.front();
    batch->events.pop_front();
    tell(event);
    const auto told = std::find_if(batch->open.begin(), batch->open.end(), [&](const Entry* entry) {
      return static_cast<const Parameters*>(entry->parameters)->cookie == event.cookie;
    });
    delete *told;
    batch->open.erase(told);
  }
  return kGood;
}

EXPORT Error cuFileBatchIOCancel(void* handle) {
  Library& library = Get();
  std::unique_lock lock(library.mutex);
  const int planned = Enter(library, "cuFileBatchIOCancel");
  Batch* const batch = Find(library, "cuFileBatchIOCancel", handle);
  if (batch == nullptr) return {kInvalidValue, 0};
  Drain(library, lock, *batch);
  return {planned, 0};
}

EXPORT void cuFileBatchIODestroy(void* handle) {
  Library& library = Get();
  std::unique_lock lock(library.mutex);
  Enter(library, "cuFileBatchIODestroy");
  Batch* const batch = Find(library, "cuFileBatchIODestroy", handle);
  if (batch == nullptr) return;
  if (!batch->open.empty()) library.Violate("cuFileBatchIODestroy of a batch that has not told of all it had");
  Drain(library, lock, *batch);
  library.batches.erase(handle);
  delete batch;
}

#else

namespace cufile_double {
bool UsesBuffer(const Batch& /*batch*/, const void* /*base*/) { return false; }
}  // namespace cufile_double

#endif
