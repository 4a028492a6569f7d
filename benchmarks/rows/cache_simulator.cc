// Replays a trace of row ids against cache policies and counts hits. It decides nothing: simulate.py makes the traces,
// names the policies and prints the table.
//
//   cache_simulator TRACE [NODES] < runs        a run is a line of words: policy=sampled slots=1000 warm=50 window=8 …
//
// A trace is int64 row count, int64 batch count, then for each batch int64 count and its unique ids, int32. NODES,
// which policy=degree needs, is all ids, int32, those of highest degree first.
//
// A batch is the unit, as in the store: all of its ids are looked up first, then its misses are admitted or not. So an
// eviction by a batch never costs that batch a hit, in any policy. A policy with a window W knows the ids of the next W
// batches when it admits.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kNever = std::numeric_limits<int>::max();
constexpr int kAbsent = -1;

struct Trace {
  int64_t row_count = 0;
  std::vector<std::vector<int>> batches;
  std::vector<std::vector<int>> next_uses;  // for each id of each batch the batch that asks for it next, or kNever
  std::vector<int> by_degree;               // all ids; empty if the rows are no nodes
};

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

File open_file(const char* path) {
  File file(std::fopen(path, "rb"), &std::fclose);
  if (!file) throw std::runtime_error(std::string("cannot open ") + path);
  return file;
}

std::vector<int> read_ids(const char* path) {
  const File file = open_file(path);
  std::vector<int> ids;
  for (int id = 0; std::fread(&id, sizeof id, 1, file.get()) == 1;) ids.push_back(id);
  return ids;
}

Trace read_trace(const char* path) {
  const File file = open_file(path);
  auto read = [&](void* target, size_t size, size_t count) {
    if (std::fread(target, size, count, file.get()) != count) throw std::runtime_error("the trace is cut short");
  };
  Trace trace;
  int64_t batch_count = 0;
  read(&trace.row_count, sizeof(int64_t), 1);
  read(&batch_count, sizeof(int64_t), 1);
  trace.batches.resize(batch_count);
  for (auto& batch : trace.batches) {
    int64_t count = 0;
    read(&count, sizeof count, 1);
    batch.resize(count);
    read(batch.data(), sizeof(int), batch.size());
  }
  std::vector<int> next(trace.row_count, kNever);
  trace.next_uses.resize(batch_count);
  for (int t = static_cast<int>(batch_count) - 1; t >= 0; --t) {
    const auto& batch = trace.batches[t];
    trace.next_uses[t].resize(batch.size());
    for (size_t i = 0; i < batch.size(); ++i) trace.next_uses[t][i] = next[batch[i]];
    for (int id : batch) next[id] = t;
  }
  return trace;
}

// The words of a run, each with the value that it has when it is left out.
class Options {
 public:
  explicit Options(const std::string& line) {
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      const auto equals = word.find('=');
      values_[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }
  std::string text(const std::string& name, const std::string& otherwise) const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  double number(const std::string& name, double otherwise) const {
    return std::stod(text(name, std::to_string(otherwise)));
  }

 private:
  std::map<std::string, std::string> values_;
};

class Policy {
 public:
  Policy(const Trace& trace, int64_t slots) : trace_(trace), slots_(slots) {}
  virtual ~Policy() = default;
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;
  virtual int64_t run_batch(int t) = 0;  // returns the hits

 protected:
  const Trace& trace_;
  const int64_t slots_;
};

// The bound: the row whose next use is farthest goes, and a row that is worse than all in the cache does not come in.
class Belady : public Policy {
 public:
  Belady(const Trace& trace, int64_t slots) : Policy(trace, slots), count_by_next_use_(trace.batches.size()) {}

  int64_t run_batch(int t) override {
    // Rows are alike except for their next use, so the cache is a count for each next use. Those of batch t are its hits.
    const int64_t hits = count_by_next_use_[t];
    size_ -= hits;
    count_by_next_use_[t] = 0;
    for (int next : trace_.next_uses[t]) {
      if (next == kNever) continue;
      ++count_by_next_use_[next];
      farthest_ = std::max(farthest_, next);
      ++size_;
    }
    while (size_ > slots_) {
      auto& count = count_by_next_use_[farthest_];
      const int64_t dropped = std::min(count, size_ - slots_);
      count -= dropped;
      size_ -= dropped;
      if (count == 0) --farthest_;
    }
    return hits;
  }

 private:
  std::vector<int64_t> count_by_next_use_;
  int64_t size_ = 0;
  int farthest_ = 0;
};

// Next uses within the window, the rest by exact frequency; the worst of all rows is found exactly. What `sampled`
// would be without sampling and with a count for each row.
class Exact : public Policy {
 public:
  Exact(const Trace& trace, int64_t slots, const Options& options)
      : Policy(trace, slots),
        window_(static_cast<int>(options.number("window", 0))),
        age_(options.number("age", 1e18)),
        frequency_(trace.row_count),
        next_(trace.row_count, -1),
        in_cache_(trace.row_count) {}

  int64_t run_batch(int t) override {
    const int known = std::min<int>(t + window_, static_cast<int>(trace_.batches.size()) - 1);
    if (known > t && window_ > 0)
      for (int id : trace_.batches[known])
        if (next_[id] < t) next_[id] = known;
    int64_t hits = 0;
    const auto& batch = trace_.batches[t];
    for (size_t i = 0; i < batch.size(); ++i) {
      const int id = batch[i];
      frequency_[id] += 1;
      next_[id] = trace_.next_uses[t][i] <= t + window_ ? trace_.next_uses[t][i] : -1;
      if (in_cache_[id]) {
        ++hits;
      } else {
        cache_.push_back(id);
      }
    }
    if (static_cast<int64_t>(cache_.size()) > slots_) {
      std::nth_element(cache_.begin(), cache_.begin() + slots_, cache_.end(),
                       [&](int a, int b) { return value(a, t) > value(b, t); });
      for (size_t i = slots_; i < cache_.size(); ++i) in_cache_[cache_[i]] = 0;
      cache_.resize(slots_);
    }
    for (int id : batch) in_cache_[id] = 0;
    for (int id : cache_) in_cache_[id] = 1;
    since_ += static_cast<double>(batch.size());
    if (since_ >= age_ * static_cast<double>(slots_)) {
      since_ = 0;
      for (auto& frequency : frequency_) frequency /= 2;
    }
    return hits;
  }

 private:
  float value(int id, int t) const {
    return next_[id] > t ? 1e6F + static_cast<float>(t + window_ + 1 - next_[id]) * 1e4F + frequency_[id]
                         : frequency_[id];
  }
  const int window_;
  const double age_;
  double since_ = 0;
  std::vector<float> frequency_;
  std::vector<int> next_;
  std::vector<char> in_cache_;
  std::vector<int> cache_;
};

// Base of those that keep a row for each slot.
class Slotted : public Policy {
 public:
  Slotted(const Trace& trace, int64_t slots)
      : Policy(trace, slots), slot_of_(trace.row_count, kAbsent), id_of_(slots, kAbsent) {}

  int64_t run_batch(int t) override {
    const auto& batch = trace_.batches[t];
    begin(t);
    missing_.clear();
    for (size_t i = 0; i < batch.size(); ++i) {
      const int slot = slot_of_[batch[i]];
      if (slot == kAbsent) {
        missing_.push_back(i);
      } else {
        hit(slot, t, i);
      }
    }
    for (size_t i : missing_) miss(batch[i], t, i);
    return static_cast<int64_t>(batch.size() - missing_.size());
  }

 protected:
  virtual void begin(int) {}
  virtual void hit(int slot, int t, size_t i) = 0;
  virtual void miss(int id, int t, size_t i) = 0;
  void put(int slot, int id) {
    if (id_of_[slot] != kAbsent) slot_of_[id_of_[slot]] = kAbsent;
    id_of_[slot] = id;
    slot_of_[id] = slot;
  }
  std::vector<int> slot_of_, id_of_;
  int64_t used_ = 0;

 private:
  std::vector<size_t> missing_;
};

// The policy that ships. Of `k` slots the one of least value is the victim, and a row comes in only if its value is
// higher. A row that the window asks for is worth more than any other, and more the nearer that is; the rest is worth
// how often it was asked for. A slot counts its hits. For rows outside the cache `cells` for each slot count their
// misses; a cell has a tag of 12 bits beside its count, and belongs to the row that missed there last. All counts are
// halved after `age` misses for each slot.
class Sampled : public Slotted {
 public:
  Sampled(const Trace& trace, int64_t slots, const Options& options)
      : Slotted(trace, slots),
        window_(static_cast<int>(options.number("window", 0))),
        k_(std::min(static_cast<int64_t>(options.number("k", 16)), slots)),
        age_(static_cast<int64_t>(options.number("age", 4) * static_cast<double>(slots))),
        tags_(options.number("tags", 1) != 0),
        ties_come_in_(options.number("ties", 0) != 0),
        slots_by_(options.text("slots_by", "run")),
        write_back_(options.number("write_back", 1) != 0),
        nearest_(options.text("need", "next") == "next"),
        frequency_(slots),
        cells_(std::max<int64_t>(1, static_cast<int64_t>(options.number("cells", 2) * static_cast<double>(slots)))),
        needed_(trace.row_count, -1) {}

 protected:
  void begin(int t) override {
    if (misses_ >= age_) {
      misses_ = 0;
      for (auto& cell : cells_) cell = static_cast<uint16_t>((cell & ~kCountMax) | (cell & kCountMax) >> 1);
      for (auto& count : frequency_) count >>= 1;
    }
    const auto& batches = trace_.batches;
    for (; registered_ <= t + window_ && registered_ < static_cast<int>(batches.size()); ++registered_)
      for (int id : batches[registered_])
        if (needed_[id] < t || !nearest_) needed_[id] = registered_;
  }

  void hit(int slot, int t, size_t i) override {
    if (frequency_[slot] < kCountMax) ++frequency_[slot];
    note_next_use(id_of_[slot], t, i);
  }

  void miss(int id, int t, size_t i) override {
    ++misses_;
    note_next_use(id, t, i);
    const int frequency = count_miss(id);
    int64_t slot = used_;
    if (used_ < slots_) {
      ++used_;
    } else {
      slot = worst(t);
      if (value(id, frequency, t) + (ties_come_in_ ? 1 : 0) <= value(id_of_[slot], frequency_[slot], t)) return;
      if (write_back_) {
        const Place place = place_of(id_of_[slot]);
        *place.cell = static_cast<uint16_t>(place.tag | frequency_[slot]);
      }
    }
    put(static_cast<int>(slot), id);
    frequency_[slot] = static_cast<uint8_t>(frequency);
  }

 private:
  static constexpr int kCountMax = 15;
  struct Place {
    uint16_t* cell;
    int tag;  // above the count
  };

  Place place_of(int id) {
    const uint64_t hash = static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ULL;
    return {&cells_[((hash >> 32) * cells_.size()) >> 32], tags_ ? static_cast<int>(hash & 0xfff0) : 0};
  }
  int count_miss(int id) {
    const Place place = place_of(id);
    const int count = (*place.cell & ~kCountMax) == place.tag ? *place.cell & kCountMax : 0;
    *place.cell = static_cast<uint16_t>(place.tag | std::min(count + 1, kCountMax));
    return *place.cell & kCountMax;
  }
  void note_next_use(int id, int t, size_t i) {
    if (!nearest_) return;  // need=last: the last use within the window, which registering has noted
    const int next = trace_.next_uses[t][i];
    needed_[id] = next <= t + window_ ? next : -1;
  }
  int value(int id, int frequency, int t) const {
    if (needed_[id] <= t) return frequency;
    return nearest_ ? 1000 + (t + window_ - needed_[id]) : 1000 + frequency;
  }
  int64_t worst(int t) {
    // By default a run of slots from a random one: their counts share a cache line.
    int64_t slot = slots_by_ == "hand" ? hand_ : random_slot();
    int64_t found = 0;
    int lowest = kNever;
    for (int64_t n = 0; n < k_; ++n) {
      const int one = value(id_of_[slot], frequency_[slot], t);
      if (one < lowest) {
        lowest = one;
        found = slot;
      }
      slot = slots_by_ == "random" ? random_slot() : slot + 1 < slots_ ? slot + 1 : 0;
    }
    hand_ = slot;
    return found;
  }
  int64_t random_slot() {  // xorshift
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<int64_t>(((state_ >> 32) * static_cast<uint64_t>(slots_)) >> 32);
  }

  const int window_;
  const int64_t k_, age_;
  const bool tags_, ties_come_in_;
  const std::string slots_by_;
  const bool write_back_, nearest_;
  std::vector<uint8_t> frequency_;  // of slots
  std::vector<uint16_t> cells_;
  std::vector<int> needed_;  // for each row a batch of the window, until that is over
  int64_t misses_ = 0;
  int registered_ = 0;
  int64_t hand_ = 0;
  uint64_t state_ = 88172645463325252ULL;
};

// A queue of slots, as LRU and SIEVE have it: newest at the head.
class Listed : public Slotted {
 public:
  Listed(const Trace& trace, int64_t slots) : Slotted(trace, slots), newer_(slots, kAbsent), older_(slots, kAbsent) {}

 protected:
  void push(int slot) {
    newer_[slot] = kAbsent;
    older_[slot] = head_;
    (head_ == kAbsent ? tail_ : newer_[head_]) = slot;
    head_ = slot;
  }
  void unlink(int slot) {
    (newer_[slot] == kAbsent ? head_ : older_[newer_[slot]]) = older_[slot];
    (older_[slot] == kAbsent ? tail_ : newer_[older_[slot]]) = newer_[slot];
  }
  std::vector<int> newer_, older_;
  int head_ = kAbsent, tail_ = kAbsent;
};

class Lru : public Listed {
 public:
  using Listed::Listed;

 protected:
  void hit(int slot, int, size_t) override {
    unlink(slot);
    push(slot);
  }
  void miss(int id, int, size_t) override {
    const int slot = used_ < slots_ ? static_cast<int>(used_++) : tail_;
    if (id_of_[slot] != kAbsent) unlink(slot);
    put(slot, id);
    push(slot);
  }
};

// Source: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.
class Sieve : public Listed {
 public:
  Sieve(const Trace& trace, int64_t slots) : Listed(trace, slots), visited_(slots) {}

 protected:
  void hit(int slot, int, size_t) override { visited_[slot] = 1; }
  void miss(int id, int, size_t) override {
    int slot = static_cast<int>(used_);
    if (used_ < slots_) {
      ++used_;
    } else {
      slot = hand_ == kAbsent ? tail_ : hand_;
      while (visited_[slot]) {
        visited_[slot] = 0;
        slot = newer_[slot] == kAbsent ? tail_ : newer_[slot];
      }
      hand_ = newer_[slot];
      unlink(slot);
    }
    put(slot, id);
    push(slot);
    visited_[slot] = 0;
  }

 private:
  std::vector<char> visited_;
  int hand_ = kAbsent;
};

class Clock : public Slotted {
 public:
  Clock(const Trace& trace, int64_t slots) : Slotted(trace, slots), visited_(slots) {}

 protected:
  void hit(int slot, int, size_t) override { visited_[slot] = 1; }
  void miss(int id, int, size_t) override {
    int slot = static_cast<int>(used_);
    if (used_ < slots_) {
      ++used_;
    } else {
      while (visited_[hand_]) {
        visited_[hand_] = 0;
        step();
      }
      slot = static_cast<int>(hand_);
      step();
    }
    put(slot, id);
    visited_[slot] = 0;
  }

 private:
  void step() {
    if (++hand_ == slots_) hand_ = 0;
  }
  std::vector<char> visited_;
  int64_t hand_ = 0;
};

// Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
class S3Fifo : public Slotted {
 public:
  S3Fifo(const Trace& trace, int64_t slots, const Options& options)
      : Slotted(trace, slots),
        promote_(static_cast<int>(options.number("promote", 2))),
        uses_(slots),
        ghost_since_(trace.row_count, std::numeric_limits<int64_t>::min() / 2) {}

 protected:
  void hit(int slot, int, size_t) override {
    if (uses_[slot] < 3) ++uses_[slot];
  }
  void miss(int id, int, size_t) override {
    const int slot = used_ < slots_ ? static_cast<int>(used_++) : evict();
    // A ghost is one of the last rows that left the small queue, as many as the main queue holds.
    const bool known = ghosts_ - ghost_since_[id] < slots_ - small_limit();
    put(slot, id);
    uses_[slot] = 0;
    (known ? main_ : small_).push_back(slot);
  }

 private:
  int64_t small_limit() const { return std::max<int64_t>(1, slots_ / 10); }
  int evict() {
    for (;;) {
      if (static_cast<int64_t>(small_.size()) >= small_limit() || main_.empty()) {
        const int slot = small_.front();
        small_.pop_front();
        if (uses_[slot] < promote_) {
          ghost_since_[id_of_[slot]] = ghosts_++;
          return slot;
        }
        uses_[slot] = 0;
        main_.push_back(slot);
      } else {
        const int slot = main_.front();
        main_.pop_front();
        if (uses_[slot] == 0) return slot;
        --uses_[slot];
        main_.push_back(slot);
      }
    }
  }
  const int promote_;
  std::vector<char> uses_;
  std::vector<int64_t> ghost_since_;
  int64_t ghosts_ = 0;
  std::deque<int> small_, main_;
};

// The first rows of a list stay.
class Static : public Policy {
 public:
  Static(const Trace& trace, int64_t slots, const std::vector<int>& list)
      : Policy(trace, slots), kept_(trace.row_count) {
    if (static_cast<int64_t>(list.size()) < slots)
      throw std::runtime_error("policy=degree needs NODES, a file of all ids");
    for (int64_t i = 0; i < slots; ++i) kept_.at(list[i]) = 1;
  }
  int64_t run_batch(int t) override {
    int64_t hits = 0;
    for (int id : trace_.batches[t]) hits += kept_[id];
    return hits;
  }

 private:
  std::vector<char> kept_;
};

// The rows that the whole trace asks for most often, as many as there are slots: a bound on what a list made beforehand
// can do.
std::vector<int> most_wanted(const Trace& trace, int64_t slots) {
  std::vector<int> count(trace.row_count), ids(trace.row_count);
  for (const auto& batch : trace.batches)
    for (int id : batch) ++count[id];
  for (size_t id = 0; id < ids.size(); ++id) ids[id] = static_cast<int>(id);
  std::nth_element(ids.begin(), ids.begin() + slots, ids.end(), [&](int a, int b) { return count[a] > count[b]; });
  return ids;
}

std::unique_ptr<Policy> make_policy(const Trace& trace, const Options& options) {
  const auto slots = static_cast<int64_t>(options.number("slots", 0));
  if (slots < 1 || slots >= trace.row_count) throw std::runtime_error("slots is 1 or more, and fewer than rows");
  const std::string name = options.text("policy", "");
  if (name == "belady") return std::make_unique<Belady>(trace, slots);
  if (name == "exact") return std::make_unique<Exact>(trace, slots, options);
  if (name == "sampled") return std::make_unique<Sampled>(trace, slots, options);
  if (name == "lru") return std::make_unique<Lru>(trace, slots);
  if (name == "clock") return std::make_unique<Clock>(trace, slots);
  if (name == "sieve") return std::make_unique<Sieve>(trace, slots);
  if (name == "s3fifo") return std::make_unique<S3Fifo>(trace, slots, options);
  if (name == "static") return std::make_unique<Static>(trace, slots, most_wanted(trace, slots));
  if (name == "degree") return std::make_unique<Static>(trace, slots, trace.by_degree);
  throw std::runtime_error("no policy of the name \"" + name + "\"");
}

void run(const Trace& trace, const std::string& line) {
  const Options options(line);
  const auto policy = make_policy(trace, options);
  const int warm = static_cast<int>(options.number("warm", 0));
  int64_t hits = 0;
  int64_t asked = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int t = 0; t < static_cast<int>(trace.batches.size()); ++t) {
    const int64_t hits_of_batch = policy->run_batch(t);
    if (t < warm) continue;
    hits += hits_of_batch;
    asked += static_cast<int64_t>(trace.batches[t].size());
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::cout << hits << ' ' << asked << ' ' << took.count() << '\n';
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2 && argc != 3) throw std::runtime_error("usage: cache_simulator TRACE [NODES] < runs");
  Trace trace = read_trace(argv[1]);
  if (argc == 3) trace.by_degree = read_ids(argv[2]);
  for (std::string line; std::getline(std::cin, line);) run(trace, line);
  return 0;
} catch (const std::exception& error) {
  std::cerr << "cache_simulator: " << error.what() << '\n';
  return 1;
}
