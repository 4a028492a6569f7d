// The requests of one file on their way through a pump: what to start next, what becomes of what has come back. It has
// no thread and never sleeps: request_worker's thread calls Step again and again, as simulations do
// (tests/csrc/request_simulation_test.cc). How pieces are cut is request_cutter's affair, staging memory
// staging_shares', the lock write_turn's, and the copies of devices are device_copies'.
//
// A piece of the host takes a slot of the pump. Pieces of devices go through more hands: of a read the kernel's, then,
// with the bytes in staging, device_copies'; of a write first the copies', then, as soon as a slot of the pump is free,
// the kernel's. They hold no slot and no lock while they are copied, so a stream that stands still holds up its own
// requests only.
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

// What a worker writes, with respect to what others write to the same file.
enum class WriteSide : uint8_t {
  kShared,  // direct writes, or writes that have none on the other side
  kAlone,   // bytes through the page cache beside direct writes; on the device when the lock is left
};

// One owner thread, but for the last three calls, which are for any.
class RequestFlow {
 public:
  using Jobs = std::deque<std::shared_ptr<RequestJob>>;

  // The descriptors of the pump's file and of the lock stay the caller's.
  RequestFlow(std::unique_ptr<IoPump> pump, DirectIoLimits limits, uint64_t chunk_bytes, uint64_t staging_bytes,
              EdgeLock lock, WriteSide side);

  // How long to wait for new jobs before the next Step. kForever: every job is complete.
  static constexpr auto kForever = std::chrono::microseconds::max();
  std::chrono::microseconds NextWait();

  // Start what can be started, wait for the kernel if it has something, and complete what has come back. Takes all of
  // `arrived`. `closing`: devices are waited for no longer than the grace time. Waits in the pump only: until a request
  // is complete, its wake_fd is readable, or, where something else is looked at by the way, a millisecond has passed.
  void Step(Jobs& arrived, bool closing);

  std::string engine_name() const;
  std::vector<std::string> demotions() const;
  // The first error of bytes that were written through the page cache, and then not from there to the device.
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
  // Beside cutting pieces off host_jobs_.
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
  Jobs host_jobs_;  // of which something is still to be cut
  Jobs device_jobs_;
  // To be written, without a slot of the pump: a device has copied them, or a direct engine has left them over.
  std::deque<Piece> ready_writes_;
  std::vector<Piece> pieces_;  // by tag
  std::vector<size_t> free_tags_;
  std::vector<IoPump::Finished> finished_;
  std::vector<DeviceCopies::Ended> ended_;
  bool is_devices_turn_ = false;
  bool has_moved_ = false;  // a piece of a device, since the last look at them
  std::chrono::microseconds pause_;
  Status broken_;  // the pump is of no use any more

  mutable std::mutex noted_mutex_;  // of what follows: for callers on other threads
  std::string engine_name_;
  std::vector<std::string> demotions_;
  Status write_back_error_;
};

}  // namespace fastpersist
