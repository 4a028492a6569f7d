#include "transfer/device_copies.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace fastpersist {

void DeviceCopies::Add(RequestPiece piece) {
  Device* const device = piece.job->device();
  const bool to_host = piece.job->is_write();
  auto lane = std::find_if(lanes_.begin(), lanes_.end(), [device, to_host](const Lane& one) {
    return one.device == device && one.to_host == to_host;
  });
  if (lane == lanes_.end()) {
    lanes_.push_back({.device = device, .to_host = to_host, .waiting = {}, .started = {}, .batches = {}, .grace = {}});
    lane = std::prev(lanes_.end());
  }
  lane->waiting.push_back(std::move(piece));
}

bool DeviceCopies::empty() const {
  return refused_.empty() && std::all_of(lanes_.begin(), lanes_.end(),
                                         [](const Lane& lane) { return lane.waiting.empty() && lane.batches.empty(); });
}

void DeviceCopies::Start(bool is_pinned) {
  for (Lane& lane : lanes_) {
    if (lane.waiting.empty()) continue;
    StartWaiting(lane, is_pinned);
    Mark(lane);
  }
}

Status DeviceCopies::Copy(const Lane& lane, const RequestPiece& piece) {
  const auto address = reinterpret_cast<CudaAddress>(piece.address());
  std::byte* const bytes = piece.staged + piece.skipped_bytes;
  return lane.to_host ? lane.stream().ToHost(bytes, address, piece.size_bytes)
                      : lane.stream().ToDevice(address, bytes, piece.size_bytes);
}

void DeviceCopies::StartWaiting(Lane& lane, bool is_pinned) {
  while (!lane.waiting.empty() && lane.batches.size() < kBatchCount) {
    Result<bool> room = lane.stream().HasRoom(is_pinned);
    if (room.ok() && !room.value()) return;
    RequestPiece piece = std::move(lane.waiting.front());
    lane.waiting.pop_front();
    if (!room.ok()) {
      refused_.push_back({.piece = std::move(piece), .status = room.status(), .late = {}});
      continue;
    }
    lane.grace.reset();
    Status status = Copy(lane, piece);
    if (status.ok()) {
      lane.started.push_back(std::move(piece));
      continue;
    }
    // The failed copy may run all the same. Give the earlier ones a mark of their own.
    Mark(lane);
    lane.batches.push_back(
        {.mark = nullptr, .end = CopyEnd(lane.stream()), .status = std::move(status), .pieces = {}, .grace = {}});
    lane.batches.back().pieces.push_back(std::move(piece));
  }
}

void DeviceCopies::Mark(Lane& lane) {
  if (lane.started.empty()) return;
  Result<CopyMark> made = lane.stream().Mark();
  Status status = made.status();
  const auto mark = made.ok() ? std::make_shared<const CopyMark>(std::move(made).value()) : nullptr;
  lane.batches.push_back({.mark = mark,
                          .end = mark != nullptr ? CopyEnd(mark) : CopyEnd(lane.stream()),
                          .status = std::move(status),
                          .pieces = std::exchange(lane.started, {}),
                          .grace = {}});
}

void DeviceCopies::Look(bool closing, std::vector<Ended>& ended) {
  for (Lane& lane : lanes_) {
    TakeComplete(lane, ended);
    GiveUp(lane, closing, ended);
  }
  std::move(refused_.begin(), refused_.end(), std::back_inserter(ended));
  refused_.clear();
}

// A stream completes its copies in order.
void DeviceCopies::TakeComplete(Lane& lane, std::vector<Ended>& ended) {
  while (!lane.batches.empty()) {
    Batch& first = lane.batches.front();
    bool is_reached = false;
    if (first.status.ok()) {
      Result<bool> reached = first.mark->IsComplete();
      if (!reached.ok()) first.status = reached.status();
      is_reached = reached.ok() && reached.value();
    }
    if (!first.status.ok()) is_reached = first.end.IsComplete();
    if (!is_reached) return;
    for (RequestPiece& piece : first.pieces) {
      ended.push_back({.piece = std::move(piece), .status = first.status, .late = {}});
    }
    lane.batches.pop_front();
  }
}

void DeviceCopies::GiveUp(Lane& lane, bool closing, std::vector<Ended>& ended) {
  const auto given_up = [closing](const RequestPiece& piece) { return closing || piece.job->given_up(); };
  for (Batch& batch : lane.batches) {
    const bool failed = !batch.status.ok();
    if (!failed && std::none_of(batch.pieces.begin(), batch.pieces.end(), given_up)) continue;
    if (!batch.grace.has_value()) batch.grace.emplace();
    if (!batch.grace->IsOver(batch.end)) continue;
    const CopiesComplete landed = Grace::GiveUp({batch.end});
    const auto others = std::partition(batch.pieces.begin(), batch.pieces.end(),
                                       [&](const RequestPiece& piece) { return !failed && !given_up(piece); });
    for (auto piece = others; piece != batch.pieces.end(); ++piece) {
      ended.push_back({.piece = std::move(*piece), .status = failed ? batch.status : HeldUp(lane), .late = landed});
    }
    batch.pieces.erase(others, batch.pieces.end());
  }
  std::erase_if(lane.batches, [](const Batch& batch) { return batch.pieces.empty(); });

  // Copies that never started end at once.
  if (closing && !lane.waiting.empty() && !lane.grace.has_value()) lane.grace.emplace();
  const bool all = closing && lane.grace.has_value() && lane.grace->IsOver();
  for (RequestPiece& piece : lane.waiting) {
    if (all || piece.job->given_up()) ended.push_back({.piece = std::move(piece), .status = HeldUp(lane), .late = {}});
  }
  std::erase_if(lane.waiting, [](const RequestPiece& piece) { return piece.job == nullptr; });
}

Status DeviceCopies::HeldUp(const Lane& lane) {
  return Status::Error(
      StatusCode::kDeviceError,
      "cuda:" + std::to_string(lane.device->ordinal()) +
          " has not completed the copies before they were given up: the stream they follow stands still, "
          "as behind a collective whose peer is gone; wait for requests before closing their file");
}

}  // namespace fastpersist
