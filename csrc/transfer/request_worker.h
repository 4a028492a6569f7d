// The thread that owns a pump and feeds it with the requests of random_access, cut into pieces of at most a chunk. It
// decides what goes straight and what is staged; who may submit, and where edges go, is random_access's affair.
//
// Pieces of devices go through more hands: of a read the kernel's, then, with the bytes in staging, device_copies'; of
// a write first the copies', then, as soon as a slot of the pump is free, the kernel's. They hold no slot and no lock
// while they are copied, and devices get places in staging that leave room for the host and for each other, so a stream
// that stands still holds up its own requests only.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/file.h"
#include "core/wakeup.h"
#include "transfer/device_copies.h"
#include "transfer/edge_lock.h"
#include "transfer/io_pump.h"
#include "transfer/random_access.h"
#include "transfer/request_pieces.h"
#include "transfer/staging.h"

namespace fastpersist {

// Thread-safe, but for the destructor.
class RequestWorker {
 public:
  // What a worker writes, with respect to what others write to the same file.
  enum class Side : uint8_t {
    kShared,  // direct writes, or whatever has nobody on the other side
    kAlone,   // bytes through the page cache beside direct writes; clean again when the lock is left
  };

  // `wakeup` is what the pump's wake_fd is of. The descriptors of the pump's file and of the lock stay the caller's.
  RequestWorker(std::unique_ptr<Wakeup> wakeup, std::unique_ptr<IoPump> pump, DirectIoLimits limits,
                uint64_t chunk_bytes, uint64_t staging_bytes, EdgeLock lock, Side side);
  // Waits for all jobs, as after GiveUpOnDevices.
  ~RequestWorker();
  RequestWorker(const RequestWorker&) = delete;
  RequestWorker& operator=(const RequestWorker&) = delete;

  // The parts of a request that this worker does. REQUIRES: none is empty; those of a write by a direct engine are
  // aligned to whole blocks of the file; all lie in one memory.
  void Add(std::shared_ptr<FileRequest> request, std::vector<FilePart> parts);

  // From now on devices are waited for no longer than the grace time.
  void GiveUpOnDevices();

  std::string engine_name() const;
  std::vector<std::string> demotions() const;
  // The first error of bytes that were written through the page cache, and then not from there to the device.
  Status written_back() const;

 private:
  using Job = RequestJob;
  using Piece = RequestPiece;
  // What the kernel is asked for: of a file from `start_bytes` to `end_bytes`, of which [from_bytes, until_bytes) are
  // wanted.
  struct Range {
    uint64_t start_bytes;
    uint64_t from_bytes;
    uint64_t until_bytes;
    uint64_t end_bytes;

    bool is_whole() const { return start_bytes == from_bytes && until_bytes == end_bytes; }
    uint64_t size_bytes() const { return until_bytes - from_bytes; }
  };

  void Run();
  Status StartAll();
  Status StartPieces();
  Status StartReadyWrites();
  Status StartPiece(const std::shared_ptr<Job>& job, bool& started);
  Range NextRange(const Job& job) const;
  uint64_t EndOfNextRead(uint64_t from, uint64_t end, uint64_t address) const;
  bool GoesStraight(const Range& range, const std::byte* address, IoOp op) const;
  Piece CutOff(const std::shared_ptr<Job>& job, const Range& range, std::byte* staged);
  Status StartRequest(Piece piece, const Range& range, std::byte* buffer);
  Result<bool> MayWrite();
  std::shared_ptr<Job> FirstRead() const;
  void LeaveLock();
  bool next_is_write() const { return !jobs_.empty() && jobs_.front()->request->op() == IoOp::kWrite; }
  void Finish(const IoPump::Finished& finished);
  void FinishIfDone(const std::shared_ptr<Job>& job);
  void Fail(const std::shared_ptr<Job>& job, size_t part_number, uint64_t place_bytes, const Status& status);
  void FailNext(const Status& status);
  void FailEverything(const Status& status);
  void NoteEngine();

  // Than to cut pieces off jobs_.
  bool has_more_work() const { return !device_jobs_.empty() || !copies_.empty() || !ready_writes_.empty(); }

  // Of devices.
  Status StartDevicePieces();
  Status StartDevicePiece(const std::shared_ptr<Job>& job, bool& started);
  std::byte* TakeForDevices(const Job& job, uint64_t size_bytes);
  void FinishOfDevice(Piece piece, uint32_t done_bytes);
  void LookAtCopies();
  void LetGo(const Piece& piece);
  void PutStaged(const Piece& piece, CopiesComplete late = {});

  const DirectIoLimits limits_;
  const uint64_t chunk_bytes_;
  const uint64_t memory_unit_bytes_;  // direct reads to memory of callers fill multiples of this
  const Side side_;

  const std::unique_ptr<Wakeup> wakeup_;  // readable while something is in inbox_

  // The thread's own.
  std::unique_ptr<IoPump> pump_;
  Staging staging_;
  std::deque<std::shared_ptr<Job>> jobs_;  // of which something is still to be cut
  std::deque<std::shared_ptr<Job>> device_jobs_;
  DeviceCopies copies_;
  // To be written, without a slot of the pump: a device has copied them, or a direct engine has left them over.
  std::deque<Piece> ready_writes_;
  std::map<std::pair<const Device*, IoOp>, uint64_t> staged_bytes_;  // of devices
  std::vector<DeviceCopies::Ended> ended_;
  bool is_devices_turn_ = false;
  bool has_moved_ = false;  // a piece of a device, since the last look
  bool is_closing_ = false;
  std::vector<Piece> pieces_;  // by tag
  std::vector<size_t> free_pieces_;
  Status broken_;           // the pump is of no use any more
  EdgeLock lock_;           // held while writes are in flight
  size_t write_count_ = 0;  // in flight
  bool is_leaving_ = false;
  bool is_locked_out_ = false;                        // somebody else has the lock that the next write needs
  std::vector<std::pair<uint64_t, uint64_t>> dirty_;  // alone: pages written since the lock was entered, first and end

  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::shared_ptr<Job>> inbox_;
  bool stopping_ = false;
  bool closing_ = false;
  bool started_ = false;
  pthread_t thread_{};
  std::string engine_name_;
  std::vector<std::string> demotions_;
  Status written_back_;
};

}  // namespace fastpersist
