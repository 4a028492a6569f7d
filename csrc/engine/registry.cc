// The names of the engines. transfer/engine_selection.py chooses among them (probes, the ladder of "auto").
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/builtin_engines.h"
#include "engine/engine.h"

namespace fastpersist {
namespace {

using EngineResult = Result<std::unique_ptr<IoEngine>>;

struct Entry {
  std::string_view name;
  bool direct;
  EngineResult (*create)(const EngineOptions& options, bool direct);
};

EngineResult CreateUring(const EngineOptions& options, bool direct) {
  return CreateUringEngine(options, direct, UringAbi::kNewest);
}
EngineResult CreateThreads(const EngineOptions& options, bool direct) {
  return CreateThreadsEngine(options, direct, TmpfsMapping::kWherePays);
}

// Best first. Buffered, the threads copy into the page cache in parallel, while libaio does all its work in Submit.
// cufile comes last: it is for device memory.
constexpr std::array<Entry, 8> kEntries = {{
    {.name = "uring", .direct = true, .create = CreateUring},
    {.name = "libaio", .direct = true, .create = CreateLibaioEngine},
    {.name = "threads", .direct = true, .create = CreateThreads},
    {.name = "threads-buffered", .direct = false, .create = CreateThreads},
    {.name = "uring-buffered", .direct = false, .create = CreateUring},
    {.name = "libaio-buffered", .direct = false, .create = CreateLibaioEngine},
    {.name = "cufile", .direct = true, .create = CreateCuFileEngine},
    {.name = "null", .direct = false, .create = CreateNullEngine},
}};

constexpr std::string_view kFaultPrefix = "fault:";
constexpr uint32_t kMaxQueueDepth = 4096;

}  // namespace

std::vector<std::string> EngineNames() {
  std::vector<std::string> names;
  names.reserve(kEntries.size());
  for (const Entry& entry : kEntries) names.emplace_back(entry.name);
  return names;
}

EngineResult CreateEngine(const EngineOptions& options) {
  if (options.queue_depth < 1 || options.queue_depth > kMaxQueueDepth) {
    return Status::Error(StatusCode::kInvalidArgument, "queue_depth is " + std::to_string(options.queue_depth) +
                                                           "; it must be 1 to " + std::to_string(kMaxQueueDepth));
  }
  EngineOptions wrapped = options;
  const bool with_faults = g_fault_wrapper != nullptr && options.name.starts_with(kFaultPrefix);
  if (with_faults) wrapped.name.erase(0, kFaultPrefix.size());

  const auto* const entry =
      std::find_if(kEntries.begin(), kEntries.end(), [&](const Entry& known) { return known.name == wrapped.name; });
  if (entry == kEntries.end()) {
    std::string known_names;
    for (const Entry& known : kEntries) known_names.append(known_names.empty() ? "" : ", ").append(known.name);
    return Status::Error(StatusCode::kInvalidArgument,
                         "there is no engine \"" + options.name + "\"; the engines are " + known_names);
  }
  EngineResult engine = entry->create(wrapped, entry->direct);
  if (!with_faults || !engine.ok()) return engine;
  return g_fault_wrapper(std::move(engine).value(), options.wake_fd);
}

}  // namespace fastpersist
