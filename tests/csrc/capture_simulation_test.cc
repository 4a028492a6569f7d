// The barrier of a save (transfer/capture_core.h) in simulated time: a writer, capturing threads and a closing one
// advance one step at a time in random order, with much, little and no memory, hung or failing devices, and given up
// waits. Threads wake only when the core reports a change: a forgotten wake-up leaves all of them asleep. Checks:
// nobody reads bytes whose barrier has opened, no block holds two things at once, the writer gets every byte unchanged,
// and every schedule ends.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include "core/quarantine.h"
#include "device/pinning.h"
#include "simulation.h"
#include "testing_device.h"
#include "transfer/capture_core.h"

namespace fastpersist {
namespace {

constexpr int kDeviceCount = 2;
constexpr size_t kDeviceBytes = size_t{4} << 20;
constexpr uint64_t kBlock = Arena::kBlockBytes;
constexpr uint64_t kClusterGapBytes = uint64_t{128} << 10;
constexpr int kStepLimit = 20000;  // far more than any schedule takes
constexpr uint64_t kLimits[] = {0, 1, 2, 5, 40};
using Next = CaptureCore::Next;
using Lock = std::unique_lock<std::mutex>;

std::shared_ptr<Arena> g_arenas[std::size(kLimits)];  // one for each limit; their memory serves all schedules
CudaAddress g_device[kDeviceCount] = {};
uint64_t g_caller[kDeviceCount] = {};  // streams that the devices' copies follow, and that change the sources

// The initial content of a device's memory, 8 bytes at a time.
uint64_t WordAt(uint64_t place) { return (place / 8 + 1) * 0x9E3779B97F4A7C15U; }

// The source addresses of which the arena's host memory holds copies.
class Copies {
 public:
  void Set(uintptr_t target, uint64_t size_bytes, uintptr_t from) {
    const uintptr_t end = target + size_bytes;
    auto next = held_.upper_bound(target);
    if (next != held_.begin()) --next;
    while (next != held_.end() && next->first < end) {  // cut what is overwritten
      const auto [start, held] = *next;
      next = held_.erase(next);
      if (held.end <= target) {
        held_[start] = held;
        continue;
      }
      if (start < target) held_[start] = {target, held.delta};
      if (held.end > end) held_[end] = {held.end, held.delta};
      next = held_.lower_bound(target);
    }
    held_[target] = {end, from - target};
  }
  bool Holds(uintptr_t target, uint64_t size_bytes, uintptr_t from) const {
    auto found = held_.upper_bound(target);
    if (found == held_.begin()) return false;
    --found;
    return found->second.end >= target + size_bytes && found->second.delta == from - target;
  }

 private:
  struct Held {
    uintptr_t end;
    uintptr_t delta;
  };
  std::map<uintptr_t, Held> held_;
};

struct SimulatedSource {
  uintptr_t address;
  Device* device;
  uint64_t size_bytes;
  SourceKind kind;
};

struct Simulation;

// A thread: its work between two waits is one step.
struct Thread {
  explicit Thread(Simulation& simulation) : sim(simulation) {}
  virtual ~Thread() = default;
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  virtual void Step() = 0;
  virtual bool CanStep() const;
  void Wait(std::optional<TimePoint> at_most = {}) {
    is_asleep = true;
    until = at_most;
  }
  // Gives back blocks into which a device still copies. Returns whether all of them are complete.
  bool ReturnIncomplete(bool give_up);

  Simulation& sim;
  bool is_over = false;
  bool is_asleep = false;
  std::optional<TimePoint> until;
  std::shared_ptr<const CopyMark> mark;  // awaited
  CapturedBlocks::Block* returning = nullptr;
  std::vector<CopyEnd> ends;
};

struct Gate : Thread {
  Gate(Simulation& simulation, SourceKind first) : Thread(simulation), kind(first) {}
  void Step() override;
  void EndRun(bool given_up);

  SourceKind kind;
  bool may_wait = false;
  std::optional<CaptureCore::CaptureRun> run;
  bool is_copying = false;
};

struct Writer : Thread {
  using Thread::Thread;
  void Step() override;
  void StepTake();
  void Perform(Next next);
  void ExpectTaken() const;

  enum class State : uint8_t { kNarrow, kTake, kCopy, kAwait, kLeased, kReturn, kGivenUp } state = State::kNarrow;
  uint32_t source = 0;
  uint64_t offset_bytes = 0;
  std::optional<CaptureCore::TakeRun> run;
  std::optional<CaptureCore::Taken> taken;
};

struct Closer : Thread {
  using Thread::Thread;
  void Step() override;

  enum class State : uint8_t { kBefore, kCopies, kReturn, kOthers } state = State::kBefore;
};

struct Simulation {
  explicit Simulation(uint64_t seed);
  void AddSources();
  void RunToEnd();
  void WakeOthers();
  Status Perform(const CaptureCore::Copy& copy);
  void Open(SourceKind kind);
  void ExpectNoneForgotten() const;
  bool IsReader(const SimulatedSource& source, uintptr_t from, uint64_t size_bytes) const;
  void ExpectUnchanged(uintptr_t from, uint64_t size_bytes) const;

  Random random;
  SimulatedClock clock;
  Arena& arena;
  std::unique_ptr<CaptureCore> core;
  std::vector<SimulatedSource> sources;
  std::vector<SimulatedSource> changed;  // bytes of devices
  Copies copies;
  bool is_open[kSourceKindCount] = {};  // the bytes of this kind have been changed
  uint32_t give_up_odds = 0;            // waits are given up
  uint32_t copy_fault_odds = 0;
  uint32_t device_odds = 4;  // a device does its next command once in so many steps of threads
  bool may_fail = false;
  std::vector<std::pair<uintptr_t, uint64_t>> live_reads;  // under way
  std::unique_ptr<Writer> writer;
  std::vector<std::unique_ptr<Gate>> gates;
  std::unique_ptr<Closer> closer;
};

// ---------------------------------------------------------------------------------------------- threads

bool Thread::CanStep() const {
  if (is_over) return false;
  if (mark != nullptr) {
    Result<bool> reached = mark->IsComplete();
    return !reached.ok() || reached.value();
  }
  if (returning != nullptr) {
    return std::all_of(ends.begin(), ends.end(), [](const CopyEnd& end) { return end.IsComplete(); });
  }
  return !is_asleep || (until.has_value() && sim.clock.Now() >= *until);
}

bool Thread::ReturnIncomplete(bool give_up) {
  if (returning != nullptr) {
    const bool in_time = std::all_of(ends.begin(), ends.end(), [](const CopyEnd& end) { return end.IsComplete(); });
    CopiesComplete landed;
    if (!in_time) landed = give_up ? Grace::GiveUp(std::move(ends)) : CompletionOf(std::move(ends));
    sim.may_fail |= !in_time && give_up;
    sim.core->Return(std::exchange(returning, nullptr), std::move(landed));
    sim.WakeOthers();
    ends.clear();
  }
  returning = sim.core->TakeIncomplete();
  if (returning == nullptr) return true;
  if (returning->mark != nullptr) {
    ends.emplace_back(std::move(returning->mark));
  } else {
    ends.emplace_back(returning->device->to_host());
  }
  return false;
}

void Gate::EndRun(bool given_up) {
  Simulation& s = sim;
  s.core->End(*run);
  s.WakeOthers();
  if (!given_up && may_wait && !s.core->is_closed() && s.core->failed().ok()) s.Open(kind);
  run.reset();
  if (!may_wait && !given_up) {
    may_wait = true;
  } else if (kind == SourceKind::kVolatile && !given_up) {
    kind = SourceKind::kStable;
  } else {
    is_over = true;
  }
}

void Gate::Step() {
  Simulation& s = sim;
  const bool was_asleep = std::exchange(is_asleep, false);
  if (is_copying) {
    is_copying = false;
    Status status = s.Perform(run->copy);
    s.core->EndCopy(run->copy, std::move(status));
    s.WakeOthers();
    return;
  }
  if (was_asleep && s.give_up_odds > 0 && s.random.OneIn(s.give_up_odds)) {
    EndRun(/*given_up=*/true);
    return;
  }
  if (!run.has_value()) {
    run.emplace();
    run->kind = kind;
    run->may_wait = may_wait;
  }
  Lock lock(s.arena.mutex());
  const Next next = s.core->NextOf(*run, lock);
  s.WakeOthers();
  if (next == Next::kWait) Wait();
  if (next == Next::kCopy) {
    is_copying = true;
    s.ExpectUnchanged(run->copy.from, run->copy.size_bytes);
    if (run->copy.device == nullptr) s.live_reads.emplace_back(run->copy.from, run->copy.size_bytes);
  }
  ALWAYS(next != Next::kAwait, "those who capture never wait for a device");
  if (next == Next::kEnd) EndRun(/*given_up=*/false);
}

void Writer::ExpectTaken() const {
  const SimulatedSource& from = sim.sources[source];
  const uintptr_t place = from.address + offset_bytes;
  if (taken->address == place && taken->device == from.device) {
    sim.ExpectUnchanged(place, taken->size_bytes);
  } else if (from.device == nullptr) {
    ALWAYS(sim.copies.Holds(taken->address, taken->size_bytes, place), "a block holds other bytes");
  } else {
    const uint64_t start = place - g_device[from.device->ordinal()];
    for (const uint64_t at : {uint64_t{0}, (taken->size_bytes - 8) / 16 * 8, taken->size_bytes - 8}) {
      uint64_t word = 0;
      std::memcpy(&word, reinterpret_cast<const std::byte*>(taken->address) + at, sizeof(word));
      ALWAYS(word == WordAt(start + at), "a block holds other bytes than the device had");
    }
  }
}

void Writer::StepTake() {
  Simulation& s = sim;
  const bool was_asleep = std::exchange(is_asleep, false);
  if (!run.has_value()) {
    const bool is_of_device = s.sources[source].device != nullptr;
    const uint64_t max_bytes = s.random.Within(8, s.random.OneIn(2) ? kBlock : 100000);
    run.emplace();
    run->source = source;
    run->offset_bytes = offset_bytes;
    run->max_bytes = is_of_device ? max_bytes / 8 * 8 : max_bytes;
  } else if (was_asleep && s.give_up_odds > 0 && s.random.OneIn(s.give_up_odds)) {
    is_over = true;  // the save is cancelled
    return;
  }
  Lock lock(s.arena.mutex());
  const Next next = s.core->NextOf(*run, s.clock.Now(), lock);
  s.WakeOthers();
  Perform(next);
}

void Writer::Perform(Next next) {
  Simulation& s = sim;
  if (next == Next::kWait) Wait(run->until);
  if (next == Next::kCopy) state = State::kCopy;
  if (next == Next::kAwait) {
    state = State::kAwait;
    mark = run->mark;
  }
  if (next != Next::kEnd) return;
  if (!run->status.ok()) {
    ALWAYS(s.may_fail || s.core->is_closed(), run->status.message());
    state = State::kGivenUp;
    return;
  }
  taken = run->taken;
  run.reset();
  ALWAYS(taken->size_bytes > 0 && offset_bytes + taken->size_bytes <= s.sources[source].size_bytes, "taken too much");
  ExpectTaken();
  if (taken->address == s.sources[source].address + offset_bytes) {
    s.live_reads.emplace_back(taken->address, taken->size_bytes);
  }
  state = State::kLeased;
}

void Writer::Step() {
  Simulation& s = sim;
  switch (state) {
    case State::kNarrow: {
      is_asleep = false;
      if (source == s.sources.size()) {
        is_over = true;
        return;
      }
      SimulatedSource& narrowed = s.sources[source];
      if (s.random.OneIn(4)) {
        if (s.core->is_copying() && !s.core->is_closed()) {
          Wait();
          return;
        }
        if (s.core->is_closed()) {
          is_over = true;
          return;
        }
        const uint64_t from = s.random.Below(narrowed.size_bytes + 1) / 8 * 8;
        const uint64_t until = from + s.random.Below(narrowed.size_bytes - from + 1) / 8 * 8;
        s.core->Narrow(source, from, until);
        s.WakeOthers();
        narrowed.address += from;
        narrowed.size_bytes = until - from;
      }
      offset_bytes = 0;
      state = State::kReturn;
      return;
    }
    case State::kTake:
      StepTake();
      return;
    case State::kCopy: {
      Status status = s.Perform(run->copy);
      s.core->EndCopy(run->copy, std::move(status));
      s.WakeOthers();
      state = State::kTake;
      return;
    }
    case State::kAwait:
      mark = nullptr;
      state = State::kTake;
      if (s.give_up_odds > 0 && s.random.OneIn(s.give_up_odds)) {
        s.core->Fail(*run, Status::Error(StatusCode::kCancelled, "given up"));
        s.WakeOthers();
        state = State::kGivenUp;
      }
      return;
    case State::kLeased:
      ExpectTaken();
      std::erase(s.live_reads, std::pair(taken->address, taken->size_bytes));
      s.core->EndLease();
      s.WakeOthers();
      offset_bytes += taken->size_bytes;
      taken.reset();
      state = State::kReturn;
      return;
    case State::kReturn:
      if (!ReturnIncomplete(s.core->is_closed())) return;
      state = State::kTake;
      if (offset_bytes < s.sources[source].size_bytes) return;
      ++source;
      state = State::kNarrow;
      return;
    case State::kGivenUp:
      is_over = ReturnIncomplete(/*give_up=*/true);
  }
}

void Closer::Step() {
  Simulation& s = sim;
  is_asleep = false;
  switch (state) {
    case State::kBefore:
      if (!s.writer->is_over && !s.random.OneIn(400)) return;
      s.core->Close();
      s.WakeOthers();
      state = State::kCopies;
      return;
    case State::kCopies:
      if (s.core->is_copying()) {
        Wait();
        return;
      }
      s.core->ReleaseAll();
      s.WakeOthers();
      state = State::kReturn;
      return;
    case State::kReturn:
      if (ReturnIncomplete(/*give_up=*/true)) state = State::kOthers;
      return;
    case State::kOthers:
      if (s.core->is_returning()) {
        Wait();
        return;
      }
      is_over = true;
  }
}

// ---------------------------------------------------------------------------------------------- the schedule

Simulation::Simulation(uint64_t seed) : random(seed), arena(*g_arenas[random.Below(std::size(kLimits))]) {
  core = std::make_unique<CaptureCore>(arena);
  give_up_odds = random.OneIn(4) ? 20 : 0;
  may_fail = give_up_odds > 0;
  AddSources();
  if (random.OneIn(3)) core->Pace(clock.Now(), std::chrono::milliseconds(random.Below(100)));
  writer = std::make_unique<Writer>(*this);
  closer = std::make_unique<Closer>(*this);
  for (uint64_t count = random.Within(1, 3); count > 0; --count) {
    gates.push_back(std::make_unique<Gate>(*this, random.OneIn(3) ? SourceKind::kStable : SourceKind::kVolatile));
  }
}

void Simulation::AddSources() {
  const bool with_devices = random.OneIn(2);
  struct Region {
    uint64_t next;
    uint64_t end;
  };
  // Two for each device, too far apart for one cluster: a state may alternate between clusters.
  Region regions[kDeviceCount][2];
  for (Region(&of_device)[2] : regions) {
    of_device[0] = {.next = 0, .end = kDeviceBytes / 2};
    of_device[1] = {.next = kDeviceBytes / 2 + kClusterGapBytes, .end = kDeviceBytes};
  }
  uintptr_t next_host = uintptr_t{1} << 40;  // no memory: nothing of the host is copied
  for (uint64_t count = random.Within(1, 12); count > 0; --count) {
    SimulatedSource source{.address = next_host,
                           .device = nullptr,
                           .size_bytes = random.OneIn(2) ? random.Below(200000) : random.Below(3 * kBlock),
                           .kind = static_cast<SourceKind>(random.Below(kSourceKindCount))};
    next_host += source.size_bytes + kBlock;
    if (with_devices && random.OneIn(2)) {
      const size_t device = random.Below(kDeviceCount);
      source.device = &TheDevice(static_cast<int>(device));
      source.size_bytes = random.OneIn(8) ? random.Below(kBlock) / 8 * 8 : random.Below(20000) / 8 * 8;
      Region& region = regions[device][random.Below(2)];
      source.size_bytes = std::min(source.size_bytes, region.end - region.next);
      source.address = g_device[device] + region.next;
      region.next += source.size_bytes;
      if (random.OneIn(2)) region.next = std::min(region.next + random.Below(4000) * 8, region.end);
    }
    sources.push_back(source);
    core->Add(source.address, source.size_bytes, source.kind, source.device);
  }
  if (!with_devices) return;
  copy_fault_odds = random.OneIn(8) ? 10 : 0;
  device_odds = random.OneIn(2) ? 4 : 40;
  may_fail |= copy_fault_odds > 0;
  for (int device = 0; device < kDeviceCount; ++device) {
    if (random.OneIn(4)) Cuda().stream_block(g_caller[device]);
    Cuda().stream_add_work(g_caller[device], 0, g_device[device], 0, 0);
    EXPECT_OK(TheDevice(device).to_host().FollowCaller(g_caller[device]));
  }
}

void Simulation::WakeOthers() {
  if (!core->TakeChanged()) return;
  writer->is_asleep = closer->is_asleep = false;
  for (const auto& gate : gates) gate->is_asleep = false;
}

Status Simulation::Perform(const CaptureCore::Copy& copy) {
  if (copy.device == nullptr) {
    ExpectUnchanged(copy.from, copy.size_bytes);
    std::erase(live_reads, std::pair(copy.from, copy.size_bytes));
    copies.Set(reinterpret_cast<uintptr_t>(copy.target), copy.size_bytes, copy.from);
    return Status::Ok();
  }
  if (copy_fault_odds > 0 && random.OneIn(copy_fault_odds)) {
    return Status::Error(StatusCode::kDeviceError, "a copy fails");
  }
  ALWAYS(copy.is_pinned, "a block of the arena is not pinned");
  return copy.device->to_host().ToHost(copy.target, copy.from, copy.size_bytes);
}

bool Simulation::IsReader(const SimulatedSource& source, uintptr_t from, uint64_t size_bytes) const {
  return source.address < from + size_bytes && from < source.address + source.size_bytes;
}

// Checks that these host bytes are unchanged.
void Simulation::ExpectUnchanged(uintptr_t from, uint64_t size_bytes) const {
  for (const SimulatedSource& source : sources) {
    if (source.device != nullptr || !IsReader(source, from, size_bytes)) continue;
    ALWAYS(!is_open[static_cast<size_t>(source.kind)], "bytes are read that a barrier has opened");
  }
}

// A barrier has opened: change its bytes; those of devices in the order of the caller's stream.
void Simulation::Open(SourceKind kind) {
  if (std::exchange(is_open[static_cast<size_t>(kind)], true)) return;
  for (int device = 0; device < kDeviceCount; ++device) {
    Status held = TheDevice(device).to_host().HoldCaller(g_caller[device]);
    if (held.ok()) continue;
    core->SetFailed(std::move(held));
    WakeOthers();
    return;
  }
  for (const SimulatedSource& source : sources) {
    if (source.kind != kind || source.size_bytes == 0) continue;
    if (source.device != nullptr) {
      changed.push_back(source);
      Cuda().stream_add_work(g_caller[source.device->ordinal()], 0, source.address, 0xDB, source.size_bytes);
    }
    for (const auto& [from, size_bytes] : live_reads) {
      ALWAYS(!IsReader(source, from, size_bytes), "a barrier has opened while bytes behind it are read");
    }
  }
}

// Every sleeper still has something to wait for.
void Simulation::ExpectNoneForgotten() const {
  const CaptureLedger& ledger = core->ledger();
  for (const auto& gate : gates) {
    const bool waits = gate->is_asleep && gate->run.has_value() && gate->run->is_swept;
    ALWAYS(!waits || !ledger.is_open(gate->kind), "a barrier is open, and a thread sleeps behind it");
  }
  if (writer->is_asleep && !writer->until.has_value()) {
    const bool narrows = writer->state == Writer::State::kNarrow;
    ALWAYS(narrows ? core->is_copying() : ledger[writer->source].is_front_copying(), "the writer is forgotten");
  }
  if (closer->is_asleep) {
    const bool waits_for_copies = closer->state == Closer::State::kCopies;
    ALWAYS(waits_for_copies ? core->is_copying() : core->is_returning(), "who closes is forgotten");
  }
}

void Simulation::RunToEnd() {
  std::vector<Thread*> threads = {writer.get(), closer.get()};
  for (const auto& gate : gates) threads.push_back(gate.get());
  for (int step = 0;; ++step) {
    ALWAYS(step < kStepLimit, "the schedule does not end");
    ExpectNoneForgotten();
    if (random.OneIn(device_odds)) Cuda().step(random.Next());
    if (random.OneIn(50)) Cuda().stream_unblock(g_caller[random.Below(kDeviceCount)]);
    std::vector<Thread*> ready;
    std::copy_if(threads.begin(), threads.end(), std::back_inserter(ready), [](Thread* one) { return one->CanStep(); });
    // The closer polls; that alone does not keep the schedule going.
    const bool is_closer_alone =
        ready.size() == 1 && ready.front() == closer.get() && closer->state == Closer::State::kBefore;
    if (!ready.empty() && !(is_closer_alone && !writer->is_over)) {
      ready[random.Below(ready.size())]->Step();
      continue;
    }
    if (std::all_of(threads.begin(), threads.end(), [](const Thread* one) { return one->is_over; })) return;
    if (Cuda().step(random.Next()) != 0) continue;
    // Let grace times pass: a waiter gives its device up, or the device goes on.
    const auto returning = std::find_if(threads.begin(), threads.end(), [](Thread* one) { return one->returning; });
    if (returning != threads.end() && random.OneIn(2)) {
      (*returning)->Step();
      continue;
    }
    for (const uint64_t caller : g_caller) Cuda().stream_unblock(caller);
    if (Cuda().step(random.Next()) != 0) continue;
    std::optional<TimePoint> first;
    for (const Thread* one : threads) {
      if (!one->is_over && one->until.has_value()) first = std::min(first.value_or(*one->until), *one->until);
    }
    ALWAYS(first.has_value() && *first > clock.Now(), "all threads sleep, and nobody wakes them");
    clock.Sleep(*first - clock.Now());
  }
}

void RunSchedule(uint64_t seed) {
  Simulation simulation(seed);
  simulation.RunToEnd();
  const bool is_whole = simulation.writer->source == simulation.sources.size();
  ALWAYS(is_whole || simulation.may_fail || simulation.core->is_closed(), "the writer has not passed everything");
  if (is_whole) {
    uint64_t size_bytes = 0;
    for (const SimulatedSource& source : simulation.sources) size_bytes += source.size_bytes;
    ALWAYS(simulation.core->ledger().counts().taken_bytes == size_bytes, "taken more, or less, than there is");
    for (size_t kind = 0; kind < kSourceKindCount; ++kind) {
      ALWAYS(simulation.core->ledger().is_open(static_cast<SourceKind>(kind)), "all is taken, and a barrier is closed");
    }
  }
  for (const uint64_t caller : g_caller) Cuda().stream_unblock(caller);
  while (Cuda().step(0) != 0) continue;
  ALWAYS(Cuda().violation_count() == 0, Cuda().Violations());
  {
    Lock lock(simulation.arena.mutex());
    simulation.arena.TakeBack(lock);
    ALWAYS(simulation.arena.used_bytes() == 0 && simulation.arena.quarantined_bytes() == 0, "a block is lost");
  }
  for (const SimulatedSource& source : simulation.changed) {  // as they were at first
    const uint64_t start = source.address - g_device[source.device->ordinal()];
    std::vector<uint64_t> words(source.size_bytes / 8);
    for (size_t i = 0; i < words.size(); ++i) words[i] = WordAt(start + 8 * i);
    Cuda().write(source.address, words.data(), source.size_bytes);
  }
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  Cuda().reset(kDeviceCount);
  Cuda().step_by_step(1);
  for (int device = 0; device < kDeviceCount; ++device) {
    g_device[device] = Cuda().alloc_on(device, kDeviceBytes);
    g_caller[device] = Cuda().stream_new(device);
    std::vector<uint64_t> words(kDeviceBytes / 8);
    for (size_t i = 0; i < words.size(); ++i) words[i] = WordAt(8 * i);
    Cuda().write(g_device[device], words.data(), kDeviceBytes);
  }
  for (size_t i = 0; i < std::size(kLimits); ++i) {
    g_arenas[i] = std::make_shared<Arena>(kLimits[i] * kBlock);
    g_arenas[i]->PinWith(PinFor(TheDevice(0)));
  }
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr uint64_t kCount = 2000;
#else
  constexpr uint64_t kCount = 30000;
#endif
  const int status = RunSchedules(argc, argv, kCount, RunSchedule);
  for (std::shared_ptr<Arena>& arena : g_arenas) arena.reset();
  return status;
}
