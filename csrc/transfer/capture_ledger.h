// Counts which bytes of each source are written, leased to the writer, live, being copied, or copied: the arithmetic
// behind the barrier. The writer leases from the front of a source, a capture claims from its back; the two meet in the
// middle. It knows no memory, threads or devices.
//
//     0 … taken | … leased | … live … | claimed: being copied | copied_from: copied … size
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fastpersist {

enum class SourceKind : uint8_t {
  kStable,    // may change once Capture(kStable) has returned
  kVolatile,  // may change once Capture(kVolatile) has returned
  kConstant,  // does not change before the writer has taken it
};
constexpr size_t kSourceKindCount = 3;

// Not thread-safe: it needs one owner or the owner's lock.
class CaptureLedger {
 public:
  struct Source {
    SourceKind kind = SourceKind::kStable;
    uint64_t size_bytes = 0;
    uint64_t taken_bytes = 0;        // the writer has taken [0, taken_bytes),
    uint64_t leased_bytes = 0;       // and reads the next leased_bytes
    uint64_t claimed_bytes = 0;      // bytes from here on are copied, or are being copied
    uint64_t copied_from_bytes = 0;  // bytes from here on are copied: they are in the arena

    uint64_t live_bytes() const { return claimed_bytes - std::min(claimed_bytes, taken_bytes + leased_bytes); }
    bool is_untouched() const { return taken_bytes == 0 && leased_bytes == 0 && claimed_bytes == size_bytes; }
    // The bytes that the writer takes next are being copied.
    bool is_front_copying() const { return taken_bytes >= claimed_bytes && taken_bytes < copied_from_bytes; }
    bool is_front_live() const { return taken_bytes < claimed_bytes; }
  };
  struct Counts {
    std::array<uint64_t, kSourceKindCount> remaining_bytes = {};  // by kind: neither written nor copied
    std::array<uint64_t, kSourceKindCount> copied_bytes = {};     // by kind: copied by Capture
    uint64_t taken_bytes = 0;
  };

  void Reserve(size_t count) { sources_.reserve(sources_.size() + count); }
  uint32_t Add(uint64_t size_bytes, SourceKind kind);
  // Reduce a source to its bytes [from_bytes, until_bytes). REQUIRES: none of it is taken, leased or being copied.
  void Narrow(uint32_t source, uint64_t from_bytes, uint64_t until_bytes);

  // Claim the last live bytes of a source. REQUIRES: as many are live, and no other claim on it is open.
  void Claim(uint32_t source, uint64_t size_bytes);
  // The claimed bytes are in the arena. `by_capture`: they count as copied.
  void CompleteClaim(uint32_t source, bool by_capture);

  // Lease the next bytes of a source to the writer until EndLease. REQUIRES: they are live, or copied; no other lease.
  void Lease(uint32_t source, uint64_t size_bytes);
  // Count the leased bytes as taken. Returns whether they were live.
  bool EndLease(uint32_t source);
  // Instead of EndLease: the bytes are not taken.
  void CancelLease(uint32_t source) { sources_[source].leased_bytes = 0; }

  // The barrier of this kind is open: all of its bytes are written or copied, so training may change them.
  bool is_open(SourceKind kind) const { return counts_.remaining_bytes[static_cast<size_t>(kind)] == 0; }

  const Source& operator[](size_t source) const { return sources_[source]; }
  size_t size() const { return sources_.size(); }
  const Counts& counts() const { return counts_; }
  uint64_t total_bytes() const { return total_bytes_; }

 private:
  std::vector<Source> sources_;
  Counts counts_;
  uint64_t total_bytes_ = 0;
};

}  // namespace fastpersist
