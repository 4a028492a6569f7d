#include "transfer/device_clusters.h"

#include <algorithm>
#include <tuple>

#include "core/arena.h"

namespace fastpersist {
namespace {

// The longest gap in a cluster: its bytes cost less than another copy.
constexpr uint64_t kGapBytes = uint64_t{64} << 10;

}  // namespace

std::vector<std::vector<uint32_t>> FindDeviceClusters(std::vector<ClusterSource> sources) {
  std::vector<std::vector<uint32_t>> clusters;
  std::sort(sources.begin(), sources.end(), [](const ClusterSource& left, const ClusterSource& right) {
    return std::tuple(left.device->ordinal(), left.kind, left.address) <
           std::tuple(right.device->ordinal(), right.kind, right.address);
  });
  for (size_t first = 0, next = 0; first < sources.size(); first = next) {
    const ClusterSource& start = sources[first];
    uintptr_t end = start.address + start.size_bytes;
    uintptr_t limit = 0;  // the end of its allocation, once another source is close: a copy must not reach further
    for (next = first + 1; next < sources.size(); ++next) {
      const ClusterSource& source = sources[next];
      if (source.device != start.device || source.kind != start.kind) break;
      const uintptr_t further = std::max<uintptr_t>(end, source.address + source.size_bytes);
      if (source.address > end + kGapBytes || further - start.address > Arena::kBlockBytes) break;
      if (limit == 0) {
        auto range = start.device->RangeOf(start.address);
        limit = range.ok() ? range.value().first + range.value().second : end;
      }
      if (further > limit) break;
      end = further;
    }
    if (next - first < 2) continue;
    std::vector<uint32_t>& cluster = clusters.emplace_back();
    for (size_t member = first; member < next; ++member) cluster.push_back(sources[member].index);
  }
  return clusters;
}

}  // namespace fastpersist
