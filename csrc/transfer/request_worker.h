// The thread that owns a pump and feeds it with the requests of random_access, cut into pieces of at most a chunk. It
// decides what goes straight and what is staged; who may submit, and where edges go, is random_access's affair.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/file.h"
#include "transfer/edge_lock.h"
#include "transfer/io_pump.h"
#include "transfer/random_access.h"
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

  // `fd` is the pump's; it stays the caller's, and so does the lock's.
  RequestWorker(std::unique_ptr<IoPump> pump, DirectIoLimits limits, uint64_t chunk_bytes, uint64_t staging_bytes,
                int fd, EdgeLock lock, Side side);
  // Waits for all jobs.
  ~RequestWorker();
  RequestWorker(const RequestWorker&) = delete;
  RequestWorker& operator=(const RequestWorker&) = delete;

  // The parts of a request that this worker does. REQUIRES: none is empty; those of a write by a direct engine are
  // aligned to whole blocks of the file.
  void Add(std::shared_ptr<FileRequest> request, std::vector<FilePart> parts);

  std::string engine_name() const;
  std::vector<std::string> demotions() const;

 private:
  struct Job {
    std::shared_ptr<FileRequest> request;
    std::vector<FilePart> parts;
    size_t next_part = 0;  // what was cut off before is in flight or done
    uint64_t next_part_bytes = 0;
    size_t piece_count = 0;  // in flight
    uint64_t done_bytes = 0;
    uint64_t failed_count = 0;
    FileRequest::Failure first_failure;

    bool all_cut() const { return next_part == parts.size(); }
  };
  // What is in the kernel. The bytes asked for lie `skipped_bytes` behind the start of the blocks that are read.
  struct Piece {
    std::shared_ptr<Job> job;
    size_t part = 0;
    uint64_t from_bytes = 0;  // in the part
    uint32_t size_bytes = 0;
    uint32_t skipped_bytes = 0;
    std::byte* staged = nullptr;
  };

  static void* Main(void* self);
  void Run();
  Status StartPieces();
  Status StartPiece(const std::shared_ptr<Job>& job, bool& started);
  void PrepareToWrite(bool& may_write);
  std::shared_ptr<Job> FirstRead() const;
  void LeaveLock();
  bool next_is_write() const { return !jobs_.empty() && jobs_.front()->request->op() == IoOp::kWrite; }
  void Finish(const IoPump::Finished& finished);
  void FinishIfDone(const std::shared_ptr<Job>& job);
  void FailNext(const Status& status);
  void FailEverything(const Status& status);
  void NoteEngine();

  const DirectIoLimits limits_;
  const uint64_t chunk_bytes_;
  const int fd_;
  const Side side_;

  // The thread's own.
  std::unique_ptr<IoPump> pump_;
  Staging staging_;
  std::deque<std::shared_ptr<Job>> jobs_;  // of which something is still to be cut
  std::vector<Piece> pieces_;              // by tag
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
  bool started_ = false;
  pthread_t thread_{};
  std::string engine_name_;
  std::vector<std::string> demotions_;
};

}  // namespace fastpersist
