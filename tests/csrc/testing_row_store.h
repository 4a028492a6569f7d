// What the tests of RowStore share: requests, waiting for them, and comparing what they brought.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rows/store.h"
#include "simulation.h"
#include "testing_rows.h"

namespace fastpersist {

inline std::vector<std::string> UsableEngines() {
  const TableFiles files(8, {{0, 1}});
  std::vector<std::string> usable;
  for (const char* name : {"uring", "libaio", "threads", "uring-buffered", "threads-buffered"}) {
    if (RowStore::Open(files.Table(), {.reader = {.engines = {name}}}).ok()) usable.emplace_back(name);
  }
  EXPECT(!usable.empty());
  return usable;
}

// A request that is not done after this long has been forgotten.
inline Status Wait(const RowRequest& request) {
  if (!request.WaitFor(std::chrono::seconds(60))) {
    std::printf("%s: a request does not come to its end\n", g_test.c_str());
    std::fflush(stdout);
    std::abort();
  }
  return request.status();
}

inline void CheckRows(const Bytes& result, const std::vector<int64_t>& ids, uint32_t row_bytes) {
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool is_right = IsRow(result.data() + (i * row_bytes), static_cast<uint64_t>(ids[i]), row_bytes);
    if (!EXPECT_WITH(is_right, "row " + std::to_string(ids[i]) + " at " + std::to_string(i))) return;
  }
}

inline void ExpectRows(RowStore& store, const std::vector<int64_t>& ids, uint32_t batch = RowRequest::kNoBatch) {
  const uint32_t row_bytes = store.table().row_bytes();
  Bytes result(ids.size() * row_bytes);
  EXPECT_OK(Wait(*store.Start(ids, result.data(), batch)));
  CheckRows(result, ids, row_bytes);
}

inline std::vector<int64_t> EachNth(int64_t step, int64_t end) {
  std::vector<int64_t> ids;
  for (int64_t id = 0; id < end; id += step) ids.push_back(id);
  return ids;
}

// Half of them from a few favourites, some in runs.
inline std::vector<int64_t> RandomIds(Random& random, uint64_t row_count, size_t count) {
  std::vector<int64_t> ids;
  while (ids.size() < count) {
    uint64_t id = random.OneIn(2) ? random.Below(std::min<uint64_t>(row_count, 100)) : random.Below(row_count);
    for (uint64_t run = random.OneIn(10) ? 5 : 1; run > 0 && ids.size() < count; --run) {
      ids.push_back(static_cast<int64_t>(id));
      id = std::min(id + 1, row_count - 1);
    }
  }
  return ids;
}

// Random requests of one thread: some registered ahead, some cancelled, some dropped, up to eight at a time. Those that
// are done must be right, unless they failed and `may_fail`. The memory of a cancelled one is written to and freed
// here.
inline void RandomRequests(RowStore& store, uint64_t seed, int count, std::atomic<uint32_t>& next_batch,
                           bool may_fail = false) {
  struct Open {
    std::vector<int64_t> ids;
    Bytes result;
    std::shared_ptr<RowRequest> request;
  };
  Random random(seed);
  const uint64_t row_count = store.table().row_count();
  const uint32_t row_bytes = store.table().row_bytes();
  std::deque<Open> open;
  const auto end_one = [&] {
    const size_t at = random.Below(open.size());
    Open one = std::move(open[at]);
    open.erase(open.begin() + static_cast<ptrdiff_t>(at));
    if (random.OneIn(3)) {
      one.request->Cancel(Status::Error(StatusCode::kCancelled, "enough"));
      EXPECT(one.request->done());
      std::ranges::fill(one.result, std::byte{0x5A});
      return;
    }
    const Status status = Wait(*one.request);
    if (status.ok()) CheckRows(one.result, one.ids, row_bytes);
    EXPECT_WITH(status.ok() || may_fail, status.message());
  };
  for (int i = 0; i < count; ++i) {
    const size_t id_count = random.OneIn(3) ? random.Below(1200) : random.Below(50);
    Open one{.ids = RandomIds(random, row_count, id_count), .result = Bytes(id_count * row_bytes), .request = {}};
    uint32_t batch = RowRequest::kNoBatch;
    if (random.OneIn(2)) {
      batch = next_batch++;
      store.Register(one.ids, batch);
      if (random.OneIn(5)) {
        store.Unregister(one.ids, batch);
        continue;
      }
    }
    if (random.OneIn(30)) store.Keep(std::span(one.ids).first(std::min<size_t>(one.ids.size(), 3)));
    one.request = store.Start(one.ids, one.result.data(), batch);
    open.push_back(std::move(one));
    while (open.size() > random.Below(8)) end_one();
  }
  while (!open.empty()) end_one();
}

}  // namespace fastpersist
