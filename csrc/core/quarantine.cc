#include "core/quarantine.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/fork.h"

namespace fastpersist {
namespace {

// Memory without an owner, and the conditions for its release.
struct Orphan {
  std::vector<CopiesComplete> conditions;
  std::function<void()> release;
};

struct Orphans {
  std::mutex mutex;
  std::vector<Orphan> waiting;
};

Orphans& OfThisProcess() {
  static PerProcess<Orphans> orphans;
  return orphans.Get();
}

}  // namespace

void Quarantine::Add(std::byte* piece, CopiesComplete complete) {
  const std::lock_guard lock(mutex_);
  pieces_.push_back({piece, std::move(complete)});
  ++count_;
}

std::vector<std::byte*> Quarantine::TakeComplete() {
  if (count_ == 0) return {};
  std::vector<Piece> pieces;
  {
    const std::lock_guard lock(mutex_);
    pieces.swap(pieces_);
  }
  const auto end = std::partition(pieces.begin(), pieces.end(), [](const Piece& piece) { return !piece.complete(); });
  std::vector<std::byte*> complete;
  std::transform(end, pieces.end(), std::back_inserter(complete), [](const Piece& piece) { return piece.memory; });
  pieces.erase(end, pieces.end());
  const std::lock_guard lock(mutex_);
  std::move(pieces.begin(), pieces.end(), std::back_inserter(pieces_));
  count_ -= complete.size();
  return complete;
}

bool Quarantine::Touches(std::span<const std::byte> memory) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(pieces_.begin(), pieces_.end(),
                     [memory](const Piece& piece) { return IsInside(memory, piece.memory); });
}

void Quarantine::Outlive(std::span<const std::byte> memory, std::function<void()> release) {
  std::vector<CopiesComplete> conditions;
  {
    const std::lock_guard lock(mutex_);
    for (Piece& piece : pieces_) {
      if (IsInside(memory, piece.memory)) conditions.push_back(std::move(piece.complete));
    }
    count_ -= std::erase_if(pieces_, [memory](const Piece& piece) { return IsInside(memory, piece.memory); });
  }
  ReleaseWhenComplete(std::move(conditions), std::move(release));
}

void ReleaseWhenComplete(std::vector<CopiesComplete> conditions, std::function<void()> release) {
  if (conditions.empty()) return release();
  {
    Orphans& orphans = OfThisProcess();
    const std::lock_guard lock(orphans.mutex);
    orphans.waiting.push_back({std::move(conditions), std::move(release)});
  }
  ReleaseComplete();
}

size_t ReleaseComplete() {
  Orphans& orphans = OfThisProcess();
  std::vector<Orphan> looked_at;  // checked without the mutex: a condition may be slow or need another mutex
  {
    const std::lock_guard lock(orphans.mutex);
    looked_at.swap(orphans.waiting);
  }
  for (Orphan& orphan : looked_at) {
    std::erase_if(orphan.conditions, [](const CopiesComplete& complete) { return complete(); });
    if (orphan.conditions.empty()) orphan.release();
  }
  std::erase_if(looked_at, [](const Orphan& orphan) { return orphan.conditions.empty(); });
  const std::lock_guard lock(orphans.mutex);
  std::move(looked_at.begin(), looked_at.end(), std::back_inserter(orphans.waiting));
  return orphans.waiting.size();
}

}  // namespace fastpersist
