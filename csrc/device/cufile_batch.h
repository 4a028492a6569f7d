// Many requests to cuFile in one call, which runs them by itself: the batch interface of libcufile. One of these takes
// requests, hands them over at once, and tells what became of each, as it becomes known. How many there are and whose
// turn it is are engine/cufile_engine.cc's.
//
// What the documentation leaves open is decided for the worse. It does not say what a handle does that is given more
// before all it has was answered. libcufile 1.11 to 1.20 (run without a GPU, on host memory) was seen to take more, but
// when it then refuses a submission, it tells nothing any more of what it had: so a handle has one submission at a
// time, and is used again once all of that was answered well. After a cancellation it was seen to answer nothing: so
// nothing is cancelled that may still be answered. Answers were seen in any order.
//
// Source: GPUDirect Storage, cuFile API Reference Guide, "cuFile Batch API Functional Specification".
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "device/cufile.h"
#include "device/cufile_abi.h"

namespace fastpersist {

// Not thread-safe. In a forked child it is to be left alone.
class CuFileBatch {
 public:
  // Requests in one; fewer where libcufile is set so.
  static constexpr uint32_t kRequestsMax = 32;

  struct Request {
    bool write = false;
    std::byte* buffer = nullptr;
    size_t size_bytes = 0;
    uint64_t offset_bytes = 0;
    uint64_t tag = 0;  // comes back in the answer
  };
  struct Answer {
    uint64_t tag = 0;
    CuFileOutcome outcome;
  };

  // kUnsupported, with the reason, where libcufile has no batches, or none that take what a ring holds.
  static Status WhyNot(const CuFile& cufile);

  // REQUIRES: WhyNot is ok.
  explicit CuFileBatch(CuFile& cufile);
  // Waits until libcufile has let go of every buffer.
  ~CuFileBatch();
  CuFileBatch(const CuFileBatch&) = delete;
  CuFileBatch& operator=(const CuFileBatch&) = delete;

  enum class Taken : uint8_t {
    kYes,
    kNo,     // it is full, or what it has is of another device: the next batch may take it
    kNever,  // it cannot be made, and the outcome says why
  };
  // Take a request for the next Submit. The descriptor lives until it is answered. REQUIRES: !is_submitted().
  Taken Take(const CuFileDescriptor& descriptor, const Request& request, CuFileOutcome& why_never);

  // Hand over what was taken, which is something. What libcufile refuses is answered by the next Collect.
  // REQUIRES: !is_submitted().
  void Submit();

  bool is_empty() const { return requests_.empty(); }
  // Whether something that was submitted is still to be collected.
  bool is_submitted() const { return is_submitted_; }

  // Add what has become known; returns once something has, or the time is over, or sooner. What failed is answered
  // last, when the handle is gone: of what timed out nobody says that the device has let go of the memory before.
  void Collect(std::vector<Answer>& answers, std::chrono::nanoseconds timeout);

 private:
  using Clock = std::chrono::steady_clock;

  static uint32_t Capacity(const CuFile& cufile);
  size_t open_count() const { return requests_.size() - answered_count_; }
  void Ask(std::vector<Answer>& answers, std::chrono::nanoseconds timeout);
  void Hear(const CuFileBatchEvent& event, std::vector<Answer>& answers);
  void FailWhatIsOpen(const CuFileOutcome& outcome);
  void DropHandle();

  CuFile& cufile_;
  const uint32_t capacity_;
  void* handle_ = nullptr;  // CUfileBatchHandle_t; made when it is first needed
  Device* device_ = nullptr;
  bool is_submitted_ = false;
  std::vector<CuFileBatchRequest> requests_;  // libcufile may look at them until they are answered
  std::vector<uint64_t> tags_;
  std::vector<bool> is_answered_;
  size_t answered_count_ = 0;
  std::vector<Answer> failed_;
  std::vector<CuFileBatchEvent> events_;
  bool is_silent_ = false;  // it answers at once, and nothing
  Clock::time_point silent_since_;
  Clock::time_point silent_until_;
};

}  // namespace fastpersist
