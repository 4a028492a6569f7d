#include "transfer/captured_blocks.h"

#include <span>
#include <utility>

#include "core/alignment.h"

namespace fastpersist {
namespace {

constexpr uint64_t kCacheLineBytes = 64;
constexpr size_t kMarkBlocks = 64;  // this many share a mark

}  // namespace

bool CapturedBlocks::EnsureRoom(std::unique_lock<std::mutex>& lock, Filler filler, Device* device, size_t size_bytes) {
  FP_CHECK(size_bytes <= Arena::kBlockBytes);
  const Open& open = Of(filler);
  if (open.block != nullptr && open.block->device == device && open.fill_bytes + size_bytes <= Arena::kBlockBytes) {
    return true;
  }
  CloseBlock(filler);
  std::byte* memory = arena_.TryTake(lock);
  if (memory == nullptr) return false;
  Of(filler) = {.block = AddBlock(memory, device), .fill_bytes = 0};
  return true;
}

CapturedBlocks::Block* CapturedBlocks::AddBlock(std::byte* memory, Device* device) {
  blocks_.push_back({.memory = memory,
                     .user_count = 1,
                     .device = device,
                     .mark = nullptr,
                     .is_unmarked = false,
                     .is_complete = device == nullptr,
                     .has_dropped = false});
  return &blocks_.back();
}

std::byte* CapturedBlocks::Fill(Filler filler, size_t size_bytes, uint32_t user_count) {
  Open& open = Of(filler);
  FP_CHECK(open.block != nullptr && size_bytes <= room_bytes(filler));
  std::byte* const target = open.block->memory + open.fill_bytes;
  open.fill_bytes = AlignUp(open.fill_bytes + size_bytes, kCacheLineBytes);
  open.block->user_count += user_count;
  return target;
}

CapturedBlocks::Block* CapturedBlocks::TryAddBehind(const Block* last) {
  std::byte* const next = arena_.TryTakeBehind(last->memory);
  return next == nullptr ? nullptr : AddBlock(next, last->device);
}

void CapturedBlocks::EndRun(const std::vector<Block*>& run, uint64_t last_bytes) {
  if (run.size() < 2) return;
  for (Block* block : std::span(run).first(run.size() - 1)) {
    if (!block->is_complete) AddUnmarked(*block);
  }
  ++run.back()->user_count;
  Of(Filler::kCapture) = {.block = run.back(), .fill_bytes = AlignUp(last_bytes, kCacheLineBytes)};
  DropUser(run.front());
}

void CapturedBlocks::CloseBlock(Filler filler) {
  Open& open = Of(filler);
  if (open.block == nullptr) return;
  Block& block = *std::exchange(open.block, nullptr);
  if (!block.is_complete && (block.user_count > 1 || block.has_dropped)) AddUnmarked(block);
  if (filler == Filler::kWriter) MarkFull();
  DropUser(&block);
}

// A device's copies into a full block are in flight and need a mark.
void CapturedBlocks::AddUnmarked(Block& block) {
  block.is_unmarked = true;
  unmarked_.push_back(&block);
  if (unmarked_.size() >= kMarkBlocks) MarkFull();
}

void CapturedBlocks::MarkFull() {
  while (!unmarked_.empty()) {
    Device* const device = unmarked_.back()->device;
    Result<CopyMark> made = device->to_host().Mark();
    const auto mark = made.ok() ? std::make_shared<CopyMark>(std::move(made).value()) : nullptr;
    for (Block* block : unmarked_) {
      if (block->device != device || mark == nullptr || block->user_count == 0) continue;  // 0: it is being returned
      block->mark = mark;
      block->is_unmarked = false;
    }
    std::erase_if(unmarked_, [device](const Block* block) { return block->device == device; });
  }
}

Result<std::shared_ptr<const CopyMark>> CapturedBlocks::MarkOf(const Segment& segment) {
  const Block& block = *segment.block;
  if (segment.is_complete || block.is_complete) return std::shared_ptr<const CopyMark>();
  // An open block may take more copies; CloseBlock marks it.
  if (!is_open(&block) && block.mark != nullptr) return std::shared_ptr<const CopyMark>(block.mark);
  Result<CopyMark> made = block.device->to_host().Mark();
  if (!made.ok()) return made.status();
  return std::shared_ptr<const CopyMark>(std::make_shared<CopyMark>(std::move(made).value()));
}

bool CapturedBlocks::Release(const Segment& segment) {
  segment.block->has_dropped |= !segment.is_complete;
  return DropUser(segment.block);
}

bool CapturedBlocks::DropUser(Block* block) {
  FP_CHECK(block->user_count > 0);
  if (--block->user_count > 0) return false;
  if (!block->is_complete && (block->mark != nullptr || block->is_unmarked)) {
    incomplete_.push_back(block);
    return false;
  }
  arena_.Return(std::exchange(block->memory, nullptr));
  return true;
}

CapturedBlocks::Block* CapturedBlocks::TakeIncomplete() {
  if (incomplete_.empty()) return nullptr;
  Block* const block = incomplete_.back();
  incomplete_.pop_back();
  ++returning_count_;
  return block;
}

void CapturedBlocks::Return(Block* block, CopiesComplete landed) {
  --returning_count_;
  std::byte* const memory = std::exchange(block->memory, nullptr);
  if (landed == nullptr) {
    arena_.Return(memory);
  } else {
    arena_.PutInQuarantine(memory, std::move(landed));
  }
}

}  // namespace fastpersist
