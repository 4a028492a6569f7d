// The requests of a file (transfer/request_flow.h) in simulated time, with random arrivals, completions in any order,
// short and failing I/O, engines that prove unsupported or break, another file that wants the lock, hung devices, and
// closing. After each event: no buffer is in use twice, staging stays within its capacity, direct requests are aligned,
// no write is in flight while another file has the lock. At the end: every request is complete exactly once, has failed
// only if its I/O did, and the bytes are at their places.
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "core/alignment.h"
#include "core/quarantine.h"
#include "simulation.h"
#include "testing_device.h"
#include "transfer/request_flow.h"
#include "transfer/request_worker.h"

namespace fastpersist {
namespace {

constexpr uint32_t kBlock = 512;
constexpr uint64_t kUnit = 4096;  // of direct writes
constexpr size_t kMemoryBytes = size_t{1} << 20;
constexpr int kStepLimit = 20000;  // far more than any schedule takes
constexpr int kDeviceCount = 2;

// Memory that requests use, of the host and of each device. It outlives all schedules.
std::byte* g_host = nullptr;
CudaAddress g_device[kDeviceCount] = {};
uint64_t g_caller[kDeviceCount] = {};  // streams that the devices' copies follow
std::unique_ptr<ScratchFile> g_lock_file;

struct Simulation;

struct InFlight {
  IoRequest request;
  bool is_submitted = false;
};

// The expected bytes of a part, and their place.
struct Expected {
  std::shared_ptr<FileRequest> request;
  std::vector<FilePart> parts;
  std::vector<Bytes> contents;  // of each part: what is read, or written
  bool is_ended = false;        // no part is added any more
  int complete_count = 0;
  bool may_fail = false;
};

class Engine : public IoEngine {
 public:
  Engine(Simulation& simulation, std::string name, uint32_t queue_depth)
      : simulation_(simulation),
        name_(std::move(name)),
        limits_{.queue_depth = queue_depth, .direct = !name_.ends_with("-buffered")} {}
  ~Engine() override;

  std::string_view name() const override { return name_; }
  const EngineLimits& limits() const override { return limits_; }
  QueueResult Queue(const IoRequest& request) override;
  Status Submit() override;
  Result<size_t> Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) override;
  size_t in_flight() const override { return in_flight_.size(); }

 private:
  IoCompletion Complete(const IoRequest& request);

  Simulation& simulation_;
  const std::string name_;
  const EngineLimits limits_;
  std::vector<InFlight> in_flight_;
};

struct Simulation {
  explicit Simulation(uint64_t seed);
  void RunToEnd();

  // An event beside the flow.
  void Happen();
  void Arrive();
  std::vector<FilePart> NewParts(IoOp op, Device* device, Expected& expected);
  bool HasWork() const;
  void ExpectAll();

  Random random;
  SimulatedClock clock;
  bool with_devices = false;
  bool is_direct_first = true;
  bool breaks = false;  // the engine may fail for good
  uint32_t fault_odds = 0;
  bool stands_still[kDeviceCount] = {};
  bool device_fails = false;
  uint32_t device_odds = 3;   // a device does its next command once in so many events
  bool is_impatient = false;  // devices are given up at once
  bool is_closing = false;
  bool is_stopped = false;
  bool is_broken = false;

  Bytes disk;
  uint64_t end_bytes = 0;   // of the file
  uint64_t next_bytes = 0;  // behind what requests have
  size_t next_memory[1 + kDeviceCount] = {};
  uint64_t chunk_bytes = 0;
  size_t staging_bytes = 0;
  size_t left_count = 0;  // requests to come
  std::vector<std::unique_ptr<Expected>> requests;
  std::vector<Expected*> open;  // of which parts may still come
  std::set<const std::byte*> staged;
  std::set<uint64_t> trouble;  // places in the file at which I/O failed

  PumpOptions::Simulation seam;
  RequestInbox* inbox = nullptr;  // as long as the flow
  std::unique_ptr<RequestFlow> flow;
  std::unique_ptr<EdgeLock> other;  // another file's side of the lock, for its writes through the page cache
  int lock_fds[2] = {-1, -1};
  int wake_fd = -1;
  bool must_return = false;  // the flow is in the pump, and something has arrived
  int late_look_count = 0;
};

// ---------------------------------------------------------------------------------------------- the kernel

bool Overlap(const std::byte* a, uint64_t a_bytes, const std::byte* b, uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

Engine::~Engine() { in_flight_.clear(); }

QueueResult Engine::Queue(const IoRequest& request) {
  ALWAYS(in_flight_.size() < limits_.queue_depth, "the engine is full");
  ALWAYS(request.size_bytes > 0, "nothing is asked for");
  if (limits_.direct) {
    ALWAYS(reinterpret_cast<uintptr_t>(request.buffer) % kBlock == 0, "memory is not aligned");
    ALWAYS(request.offset_bytes % kBlock == 0 && request.size_bytes % kBlock == 0, "the place is not aligned");
  }
  for (const InFlight& other : in_flight_) {
    if (request.op == IoOp::kWrite && other.request.op == IoOp::kWrite) continue;  // both only read the memory
    ALWAYS(!Overlap(request.buffer, request.size_bytes, other.request.buffer, other.request.size_bytes),
           "a buffer is in use twice");
  }
  if (request.op == IoOp::kWrite) ALWAYS(!simulation_.other->held(), "a write begins while another file has the lock");
  const bool is_callers = request.buffer >= g_host && request.buffer < g_host + kMemoryBytes;
  if (!is_callers) {
    std::set<const std::byte*>& staged = simulation_.staged;
    staged.insert(request.buffer);
    const uint64_t reach = static_cast<uint64_t>(request.buffer + request.size_bytes - *staged.begin());
    ALWAYS(reach <= AlignUp(simulation_.staging_bytes, Staging::kUnitBytes), "staging is larger than it may be");
  }
  in_flight_.push_back({.request = request});
  return QueueResult::kQueued;
}

Status Engine::Submit() {
  if (simulation_.breaks && simulation_.random.OneIn(40)) {
    simulation_.is_broken = true;
    return Status::Error(StatusCode::kIoError, "the engine is broken");
  }
  for (InFlight& one : in_flight_) one.is_submitted = true;
  return Status::Ok();
}

IoCompletion Engine::Complete(const IoRequest& request) {
  Simulation& sim = simulation_;
  IoCompletion completion{.tag = request.tag};
  uint64_t there_bytes = request.size_bytes;
  if (request.op == IoOp::kRead) {
    there_bytes = sim.end_bytes - std::min(sim.end_bytes, request.offset_bytes);
    there_bytes = std::min<uint64_t>(there_bytes, request.size_bytes);
  }
  const uint64_t kind = sim.fault_odds == 0 ? 9 : sim.random.Below(sim.fault_odds);
  if (kind == 0) completion.sys_errno = EINTR;
  if (kind == 1) completion.sys_errno = EAGAIN;
  if (kind == 2) completion.sys_errno = EINVAL;  // not supported, if there is another engine
  if (kind == 3) completion.sys_errno = EIO;
  if (completion.sys_errno == EIO || completion.sys_errno == EINVAL) {
    for (uint64_t at = request.offset_bytes; at < request.offset_bytes + request.size_bytes; at += kBlock) {
      sim.trouble.insert(at / kBlock);
    }
  }
  if (completion.sys_errno != 0) {
    if (request.op == IoOp::kRead) std::memset(request.buffer, 0xEE, request.size_bytes);  // whatever was there
    return completion;
  }
  uint64_t moved_bytes = there_bytes;
  if (kind == 4 && there_bytes > 0) moved_bytes = sim.random.Below(there_bytes);  // short, perhaps by all
  if (moved_bytes < there_bytes) {
    const uint64_t resumed_bytes = limits_.direct ? AlignDown(moved_bytes, kBlock) : moved_bytes;
    if (resumed_bytes == 0) {  // it stops here, and the pump says so
      for (uint64_t at = request.offset_bytes; at < request.offset_bytes + request.size_bytes; at += kBlock) {
        sim.trouble.insert(at / kBlock);
      }
    }
  }
  std::byte* const place = sim.disk.data() + request.offset_bytes;
  if (request.op == IoOp::kRead) {
    std::memcpy(request.buffer, place, moved_bytes);
  } else {
    ALWAYS(request.offset_bytes + moved_bytes <= sim.disk.size(), "a write behind all requests");
    std::memcpy(place, request.buffer, moved_bytes);
  }
  completion.done_bytes = static_cast<uint32_t>(moved_bytes);
  return completion;
}

Result<size_t> Engine::Reap(std::span<IoCompletion> out, size_t min_count, std::chrono::milliseconds timeout) {
  Simulation& sim = simulation_;
  ALWAYS(!sim.must_return, "something has arrived, and the thread waits for the kernel again");
  if (min_count > 0) sim.Happen();
  if (sim.breaks && sim.random.OneIn(60)) {
    sim.is_broken = true;
    return Status::Error(StatusCode::kIoError, "the engine is broken");
  }
  size_t count = 0;
  while (count < out.size() && !in_flight_.empty() && !sim.random.OneIn(3)) {
    const size_t chosen = sim.random.Below(in_flight_.size());
    if (!in_flight_[chosen].is_submitted) break;
    const IoRequest request = in_flight_[chosen].request;
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(chosen));
    out[count++] = Complete(request);
  }
  if (count == 0) sim.clock.Sleep(timeout);
  // The pump must return now: it has a completion, or the wakeup is readable.
  sim.must_return = IsReadable(sim.wake_fd) && (count == 0 || !in_flight_.empty());
  return count;
}

// ---------------------------------------------------------------------------------------------- the schedule

Simulation::Simulation(uint64_t seed) : random(seed) {
  with_devices = random.OneIn(3);
  fault_odds = random.OneIn(2) ? 0 : static_cast<uint32_t>(random.Within(10, 60));
  breaks = random.OneIn(12);
  chunk_bytes = uint64_t{4096} << random.Below(3);
  const auto queue_depth = static_cast<uint32_t>(random.Within(1, 6));
  staging_bytes = std::max<uint64_t>(3, random.Within(1, queue_depth)) * chunk_bytes;
  static const std::vector<std::string> kLadders[] = {{"first"},
                                                      {"first", "second"},
                                                      {"first", "then-buffered"},
                                                      {"only-buffered"},
                                                      {"first", "second", "last-buffered"}};
  const std::vector<std::string>& engines = kLadders[random.Below(std::size(kLadders))];
  is_direct_first = !engines.front().ends_with("-buffered");
  left_count = random.Within(1, 8);
  disk.resize(kMemoryBytes);
  next_bytes = kUnit * random.Below(3);
  end_bytes = disk.size();

  for (int& fd : lock_fds) fd = ::open(g_lock_file->path().c_str(), O_RDWR | O_CLOEXEC);
  other = std::make_unique<EdgeLock>(lock_fds[1], "the other file", &clock);
  seam = {.create_engine = [this, queue_depth](const std::string& name) -> Result<std::unique_ptr<IoEngine>> {
            return std::unique_ptr<IoEngine>(std::make_unique<Engine>(*this, name, queue_depth));
          },
          .limits = DirectIoLimitsFor(kBlock, kBlock)};
  PumpOptions options{.engines = engines,
                      .queue_depth = queue_depth,
                      .wake_fd = wake_fd,
                      .poll = {},
                      .outlives_failures = true,
                      .gives_writes_back = true,
                      .clock = &clock,
                      .simulation = &seam};
  std::unique_ptr<Wakeup> wakeup = Must(Wakeup::Create());
  options.wake_fd = wake_fd = wakeup->fd();
  inbox = new RequestInbox(std::move(wakeup));
  flow = std::make_unique<RequestFlow>(Must(IoPump::Open(-1, "the file", std::move(options))), seam.limits, chunk_bytes,
                                       staging_bytes, EdgeLock(lock_fds[0], "the file", &clock), WriteSide::kShared);
  if (!with_devices) return;
  device_odds = random.OneIn(2) ? 3 : 40;
  is_impatient = random.OneIn(2);
  Grace::Set(is_impatient ? std::chrono::milliseconds(0) : std::chrono::hours(1));
  for (int device = 0; device < kDeviceCount; ++device) {
    if (!random.OneIn(3)) continue;
    stands_still[device] = true;
    Cuda().stream_block(g_caller[device]);
    Cuda().stream_add_work(g_caller[device], 0, g_device[device], 0, 0);
  }
  for (int device = 0; device < kDeviceCount; ++device) {
    EXPECT_OK(TheDevice(device).to_host().FollowCaller(g_caller[device]));
    EXPECT_OK(TheDevice(device).to_device().FollowCaller(g_caller[device]));
  }
  static const char* const kCalls[] = {"cuEventRecord", "cuEventQuery", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"};
  device_fails = random.OneIn(4);
  if (device_fails) {
    const char* const call = kCalls[random.Below(std::size(kCalls))];
    Cuda().fail(call, static_cast<int>(Cuda().call_count(call) + random.Within(1, 6)), 1);
  }
}

std::vector<FilePart> Simulation::NewParts(IoOp op, Device* device, Expected& expected) {
  std::vector<FilePart> parts;
  const size_t memory = device == nullptr ? 0 : 1 + static_cast<size_t>(device->ordinal());
  const bool is_aligned = op == IoOp::kWrite && is_direct_first;
  const size_t count = random.Within(1, 3);
  for (size_t i = 0; i < count; ++i) {
    uint64_t size_bytes = random.OneIn(3) ? random.Within(1, 6 * chunk_bytes) : random.Within(1, chunk_bytes);
    uint64_t gap_bytes = random.OneIn(2) ? 0 : random.Below(3 * kBlock);
    if (is_aligned) {
      size_bytes = AlignUp(size_bytes, kUnit);
      next_bytes = AlignUp(next_bytes, kUnit);
      gap_bytes = AlignDown(gap_bytes, kUnit);
    } else if (random.OneIn(2)) {
      next_bytes = AlignUp(next_bytes, random.OneIn(2) ? kUnit : kBlock);
    }
    const uint64_t offset_bytes = next_bytes + gap_bytes;
    // To any place, so that some pieces go straight and others do not. No request shares a page with another.
    size_t place = AlignUp(next_memory[memory], kUnit);
    if (random.OneIn(2)) place += random.Below(random.OneIn(2) ? kUnit : 8) * (random.OneIn(2) ? 1 : kBlock);
    if (offset_bytes + size_bytes + kUnit > disk.size() || place + size_bytes + kUnit > kMemoryBytes) break;
    next_bytes = AlignUp(offset_bytes + size_bytes, is_direct_first ? kUnit : 1);
    next_memory[memory] = place + size_bytes;
    Bytes content(size_bytes);
    for (uint64_t at = 0; at < size_bytes; at += 8) {
      const uint64_t word = random.Next();
      std::memcpy(content.data() + at, &word, std::min<uint64_t>(8, size_bytes - at));
    }
    std::byte* address = g_host + place;
    if (device != nullptr) address = reinterpret_cast<std::byte*>(g_device[memory - 1] + place);
    if (op == IoOp::kRead) {
      std::memcpy(disk.data() + offset_bytes, content.data(), size_bytes);
    } else if (device == nullptr) {
      std::memcpy(address, content.data(), size_bytes);
    } else {
      Cuda().write(reinterpret_cast<CudaAddress>(address), content.data(), size_bytes);
    }
    parts.push_back({address, size_bytes, offset_bytes, device});
    expected.parts.push_back(parts.back());
    expected.contents.push_back(std::move(content));
  }
  return parts;
}

// The next request, or more of one that is not ended, or the end of it.
void Simulation::Arrive() {
  if (open.empty() || (left_count > 0 && random.OneIn(3))) {
    if (left_count == 0) return;
    --left_count;
    requests.push_back(std::make_unique<Expected>());
    Expected* const expected = requests.back().get();
    const IoOp op = random.OneIn(2) ? IoOp::kRead : IoOp::kWrite;
    expected->request = std::make_shared<FileRequest>(op, [expected](const std::shared_ptr<FileRequest>&) {
      ++expected->complete_count;
      ALWAYS(expected->is_ended, "complete before its end was told");
    });
    if (with_devices) expected->request->Keep(std::make_shared<int>(0));
    open.push_back(expected);
  }
  Expected* const expected = open[random.Below(open.size())];
  Device* const device =
      with_devices && random.OneIn(2) ? &TheDevice(static_cast<int>(random.Below(kDeviceCount))) : nullptr;
  if (!random.OneIn(3)) {
    std::vector<FilePart> parts = NewParts(expected->request->op(), device, *expected);
    if (!parts.empty()) {
      auto job = std::make_shared<RequestJob>();
      job->request = expected->request;
      job->parts = std::move(parts);
      expected->request->AddJob();
      inbox->Push(std::move(job));
    }
  }
  if (random.OneIn(2)) {
    std::erase(open, expected);
    expected->is_ended = true;
    expected->request->CompleteJob(0, 0, {});
  }
}

void Simulation::Happen() {
  while (!random.OneIn(3)) {
    switch (random.Below(6)) {
      case 0:
      case 1:
        Arrive();
        break;
      case 2:
        if (with_devices && random.OneIn(device_odds)) Cuda().step(random.Next());
        break;
      case 3: {
        if (other->held()) {
          other->Leave();
        } else if (random.OneIn(2)) {
          (void)other->TryEnter(/*alone=*/true);  // until the next time, or never
        } else {
          other->Leave();
        }
        break;
      }
      case 4: {
        const size_t device = random.Below(kDeviceCount);
        if (with_devices && stands_still[device] && random.OneIn(4)) Cuda().stream_unblock(g_caller[device]);
        break;
      }
      default:
        if (left_count == 0 && open.empty() && random.OneIn(4) && !is_closing) {
          is_closing = true;
          inbox->GiveUpOnDevices();
        }
    }
  }
}

bool Simulation::HasWork() const {
  return std::any_of(requests.begin(), requests.end(),
                     [](const auto& one) { return one->is_ended && one->complete_count == 0; });
}

void Simulation::RunToEnd() {
  RequestFlow::Jobs arrived;
  bool closing = false;
  for (int step = 0; left_count > 0 || !open.empty() || HasWork(); ++step) {
    ALWAYS(step < kStepLimit, "the schedule does not end");
    if (step > kStepLimit / 2) {  // whoever was in the way is so no more
      other->Leave();
      for (const uint64_t caller : g_caller) {
        if (with_devices) Cuda().stream_unblock(caller);
      }
      while (left_count > 0 || !open.empty()) Arrive();
    }
    if (with_devices && random.OneIn(device_odds)) Cuda().step(random.Next());
    Happen();
    const std::chrono::microseconds wait = flow->NextWait();
    if (wait == RequestFlow::kForever) {
      ALWAYS(IsReadable(wake_fd) || !HasWork(), "a request is lost: nothing is waited for, and it is not complete");
      if (!IsReadable(wake_fd)) continue;
    }
    must_return = false;
    ALWAYS(inbox->Take(std::chrono::microseconds(0), arrived, closing), "the inbox was stopped");
    clock.Sleep(wait == RequestFlow::kForever ? std::chrono::microseconds(0) : wait);
    flow->Step(arrived, closing);
    ALWAYS(arrived.empty(), "a job was left where it came");
    must_return = false;
  }
  int more = 0;  // jobs that have failed are forgotten at the next look
  for (; flow->NextWait() != RequestFlow::kForever; ++more) {
    ALWAYS(more < 3, "all is complete, and the thread looks on");
    flow->Step(arrived, closing);
  }
}

// ---------------------------------------------------------------------------------------------- the end

void Simulation::ExpectAll() {
  for (const auto& one : requests) {
    const FileRequest& request = *one->request;
    ALWAYS(request.done() && one->complete_count == 1, "not complete, or not once");
    uint64_t size_bytes = 0;
    bool may_fail = is_broken;
    for (const FilePart& part : one->parts) {
      size_bytes += part.size_bytes;
      const uint64_t first = part.offset_bytes / kBlock;
      const uint64_t last = (part.offset_bytes + part.size_bytes - 1) / kBlock;
      const auto found = trouble.lower_bound(first);
      may_fail |= found != trouble.end() && *found <= last;
      if (part.device != nullptr) may_fail |= device_fails || is_impatient;
    }
    // Another file kept the lock for half a minute.
    may_fail |= request.op() == IoOp::kWrite && Contains(request.status().message(), "has held a lock");
    ALWAYS(request.done_bytes() <= size_bytes, "more is said to be done than was asked for");
    if (!request.status().ok()) {
      ALWAYS(may_fail && request.failed_count() > 0, request.status().message());
      continue;
    }
    ALWAYS(request.failed_count() == 0 && request.done_bytes() == size_bytes, "not all is done");
    for (size_t i = 0; i < one->parts.size(); ++i) {
      const FilePart& part = one->parts[i];
      const Bytes& content = one->contents[i];
      Bytes seen(part.size_bytes);
      if (request.op() == IoOp::kWrite) {
        std::memcpy(seen.data(), disk.data() + part.offset_bytes, seen.size());
      } else if (part.device == nullptr) {
        std::memcpy(seen.data(), part.address, seen.size());
      } else {
        Cuda().read(reinterpret_cast<CudaAddress>(part.address), seen.data(), seen.size());
      }
      ALWAYS(seen == content, "part " + std::to_string(i) + " has other bytes");
    }
  }
}

void RunSchedule(uint64_t seed) {
  auto simulation = std::make_unique<Simulation>(seed);
  simulation->RunToEnd();
  simulation->ExpectAll();
  simulation->flow.reset();  // with what devices still copy
  delete simulation->inbox;
  simulation->other.reset();
  for (const int fd : simulation->lock_fds) close(fd);
  if (!simulation->with_devices) return;
  for (const uint64_t caller : g_caller) Cuda().stream_unblock(caller);
  while (Cuda().step(0) != 0) continue;
  ALWAYS(Cuda().violation_count() == 0, Cuda().Violations());
  simulation.reset();
  ALWAYS(ReleaseComplete() == 0, "something is kept for devices that have ended all");
  Cuda().clear();
}

}  // namespace
}  // namespace fastpersist

int main(int argc, char** argv) {
  using namespace fastpersist;
  const char* const directory = std::getenv("TMPDIR");
  g_directory = directory == nullptr ? "/tmp" : directory;
  g_lock_file = std::make_unique<ScratchFile>("simulated");
  g_host = MapBuffers(kMemoryBytes);
  Cuda().reset(kDeviceCount);
  Cuda().step_by_step(1);
  for (int device = 0; device < kDeviceCount; ++device) {
    g_device[device] = Cuda().alloc_on(device, kMemoryBytes);
    g_caller[device] = Cuda().stream_new(device);
  }
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr uint64_t kCount = 2000;
#else
  constexpr uint64_t kCount = 8000;
#endif
  const int status = RunSchedules(argc, argv, kCount, RunSchedule);
  g_lock_file.reset();
  return status;
}
