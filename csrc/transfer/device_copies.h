// The copies between staging and devices that a request_worker has under way. Nothing here waits: copies are started
// when their stream has room, marked together, and looked at. A stream that stands still holds up its own copies, and
// once they are given up (their request has failed, or the file is being closed) they end late, within the grace time.
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
  // A copy that is complete, has failed, or is given up.
  struct Ended {
    RequestPiece piece;
    Status status;
    CopiesComplete late;  // not empty: the device may still copy, until this holds; the status is an error then
  };

  // Of a piece whose job is of a device: to staging if it is written, from there if it was read. The copy is started
  // by Start(); the memory of both sides stays as it is until the piece is given back.
  void Add(RequestPiece piece);

  // Start what there is room for. `is_pinned`: the device knows staging.
  void Start(bool is_pinned);

  // Give back what has ended. `closing`: nothing is waited for longer than the grace time.
  void Look(bool closing, std::vector<Ended>& ended);

  bool empty() const;

 private:
  struct Batch {
    std::shared_ptr<const CopyMark> mark;  // null: the status is an error
    CopyEnd end;
    Status status;
    std::vector<RequestPiece> pieces;
    std::optional<Grace> grace;  // since somebody gives up on it
  };
  struct Lane {
    Device* device;
    bool to_host;
    std::deque<RequestPiece> waiting;   // for room in the stream
    std::vector<RequestPiece> started;  // since the last mark
    std::deque<Batch> batches;
    std::optional<Grace> grace;  // since the file is being closed and there is no room

    CopyStream& stream() const { return to_host ? device->to_host() : device->to_device(); }
  };

  // Each is one command for the driver, which takes about a thousand before it waits.
  static constexpr size_t kBatchCount = 32;

  static Status Copy(const Lane& lane, const RequestPiece& piece);
  void StartWaiting(Lane& lane, bool is_pinned);
  static void Mark(Lane& lane);
  static void TakeComplete(Lane& lane, std::vector<Ended>& ended);
  static void GiveUp(Lane& lane, bool closing, std::vector<Ended>& ended);
  static Status HeldUp(const Lane& lane);

  std::deque<Lane> lanes_;      // one for each device and direction that was met
  std::vector<Ended> refused_;  // of which no copy was started
};

}  // namespace fastpersist
