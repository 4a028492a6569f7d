// Moves the requests of one file through a pump: decides what starts next and handles what comes back. It has no thread
// and never sleeps: request_worker's thread calls Step repeatedly, and so do simulations
// (tests/csrc/request_simulation_test.cc). Others cut pieces (request_cutter), share out staging memory
// (staging_shares), hold the lock (write_turn) and copy to and from devices (device_copies).
//
// A host piece takes a slot of the pump. A device piece takes two steps: a read goes through the kernel into staging,
// then through device_copies; a write goes through device_copies first, then through the kernel when a slot of the pump
// is free. While they are copied, pieces hold no slot and no lock, so a hung stream delays only its own requests.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transfer/device_copies.h"
#include "transfer/io_pump.h"
#include "transfer/request_cutter.h"
#include "transfer/request_pieces.h"
#include "transfer/staging_shares.h"
#include "transfer/write_turn.h"

namespace fastpersist {

// How a worker's writes relate to other writes to the same file.
enum class WriteSide : uint8_t {
  kShared,  // direct writes, or writes without any on the other side
  kAlone,   // buffered writes beside direct ones; they are on the device when the lock is left
};

// One owner thread; any thread may call the last three functions.
class RequestFlow {
 public:
  using Jobs = std::deque<std::shared_ptr<RequestJob>>;

  // The caller owns the descriptors of the pump's file and of the lock.
  RequestFlow(std::unique_ptr<IoPump> pump, DirectIoLimits limits, uint64_t chunk_bytes, uint64_t staging_bytes,
              EdgeLock lock, WriteSide side);

  // How long to wait for new jobs before the next Step. kForever: every job is complete.
  static constexpr auto kForever = std::chrono::microseconds::max();
  std::chrono::microseconds NextWait();

  // Take all jobs of `arrived`, start what can start, wait for the kernel if it has requests, and complete what came
  // back. `closing`: devices get no longer than the grace time. Waits only in the pump: until a request is complete,
  // its wake_fd is readable, or, while copies or the lock have to be polled, for a millisecond.
  void Step(Jobs& arrived, bool closing);

  std::string engine_name() const;
  std::vector<std::string> demotions() const;
  // The first error with which bytes written through the page cache did not reach the device.
  Status write_back_error() const;

 private:
  using Job = RequestJob;
  using Piece = RequestPiece;

  Status StartAll();
  Status StartHostPieces();
  Status StartHostPiece(const std::shared_ptr<Job>& job, bool& started);
  Status StartReadyWrites();
  Status StartDevicePieces();
  Status StartDevicePiece(const std::shared_ptr<Job>& job, bool& started);
  Status StartRequest(Piece piece, const PieceRange& range, std::byte* buffer);
  Result<bool> MayWrite();
  std::shared_ptr<Job> FirstRead() const;
  bool next_is_write() const { return !host_jobs_.empty() && host_jobs_.front()->is_write(); }
  // Work besides cutting pieces off host_jobs_.
  bool has_more_work() const { return !device_jobs_.empty() || !copies_.empty() || !ready_writes_.empty(); }

  void CompleteRequest(const IoPump::Finished& finished);
  void CompleteDeviceRequest(Piece piece, uint32_t done_bytes);
  void CompleteCopies(bool closing);
  void CompletePiece(const Piece& piece);
  void CompleteJobIfLast(const std::shared_ptr<Job>& job);
  void Fail(const std::shared_ptr<Job>& job, size_t part_number, uint64_t place_bytes, const Status& status);
  void FailNext(const Status& status);
  void FailEverything(const Status& status);
  void NoteEngine();
  void LeaveLock();

  const RequestCutter cutter_;
  const WriteSide side_;
  std::unique_ptr<IoPump> pump_;
  StagingShares staging_;
  WriteTurn turn_;
  DeviceCopies copies_;
  Jobs host_jobs_;  // not all cut
  Jobs device_jobs_;
  // Writes that wait for a slot of the pump: a device has copied them, or a direct engine has left them over.
  std::deque<Piece> ready_writes_;
  std::vector<Piece> pieces_;  // by tag
  std::vector<size_t> free_tags_;
  std::vector<IoPump::Finished> finished_;
  std::vector<DeviceCopies::Ended> ended_;
  bool is_devices_turn_ = false;
  bool has_moved_ = false;  // a device piece has advanced since the last look
  std::chrono::microseconds pause_;
  Status broken_;  // the pump is useless now

  mutable std::mutex noted_mutex_;  // guards the members below, for callers on other threads
  std::string engine_name_;
  std::vector<std::string> demotions_;
  Status write_back_error_;
};

}  // namespace fastpersist
