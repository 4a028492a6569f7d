// The copies between staging and devices that a request_worker has in flight. Nothing here waits: it starts copies when
// their stream has room, puts marks behind them and polls the marks. A hung stream delays only its own copies. Copies
// that are given up (their request has failed, or the file is being closed) end within the grace time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "device/device.h"
#include "transfer/request_pieces.h"

namespace fastpersist {

// One owner thread.
class DeviceCopies {
 public:
  // A copy that is complete, failed, or given up.
  struct Ended {
    RequestPiece piece;
    Status status;
    CopiesComplete late;  // not empty: the device may copy until this holds; status is an error then
  };

  // Add a piece whose job belongs to a device: a write copies to staging, a read copies from there. Start() starts the
  // copy. Neither side's memory may change until Look() returns the piece.
  void Add(RequestPiece piece);

  // Start the copies that their streams have room for. `is_pinned`: staging is pinned memory.
  void Start(bool is_pinned);

  // Return the copies that have ended. `closing`: no copy gets longer than the grace time.
  void Look(bool closing, std::vector<Ended>& ended);

  bool empty() const;

 private:
  struct Batch {
    std::shared_ptr<const CopyMark> mark;  // null: the status is an error
    CopyEnd end;
    Status status;
    std::vector<RequestPiece> pieces;
    std::optional<Grace> grace;  // set when the batch was given up
  };
  struct Lane {
    Device* device;
    bool to_host;
    std::deque<RequestPiece> waiting;   // pieces that wait for room in the stream
    std::vector<RequestPiece> started;  // since the last mark
    std::deque<Batch> batches;
    std::optional<Grace> grace;  // set when the file began to close while there was no room

    CopyStream& stream() const { return to_host ? device->to_host() : device->to_device(); }
  };

  // Each batch is one command for the driver, whose queue blocks at about a thousand.
  static constexpr size_t kBatchCount = 32;

  static Status Copy(const Lane& lane, const RequestPiece& piece);
  void StartWaiting(Lane& lane, bool is_pinned);
  static void Mark(Lane& lane);
  static void TakeComplete(Lane& lane, std::vector<Ended>& ended);
  static void GiveUp(Lane& lane, bool closing, std::vector<Ended>& ended);
  static Status HeldUp(const Lane& lane);

  std::deque<Lane> lanes_;      // one for each device and direction in use
  std::vector<Ended> refused_;  // their copy was never started
};

}  // namespace fastpersist
