// The base of the engine contract tests: the engines under test, checks that print, memory and files of known content,
// and common steps.
#pragma once

#include <fcntl.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/alignment.h"
#include "core/wakeup.h"
#include "engine/builtin_engines.h"
#include "engine/engine.h"
#include "engine/fault_engine.h"
#include "engine/uring_abi.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
static_assert(sizeof(io_uring_params) == sizeof(fastpersist::uring_abi::Params));
static_assert(offsetof(io_uring_params, features) == offsetof(fastpersist::uring_abi::Params, features));
static_assert(offsetof(io_uring_params, sq_off) == offsetof(fastpersist::uring_abi::Params, sq_off));
static_assert(offsetof(io_uring_params, cq_off) == offsetof(fastpersist::uring_abi::Params, cq_off));
static_assert(offsetof(io_sqring_offsets, array) == offsetof(fastpersist::uring_abi::SqOffsets, array));
static_assert(offsetof(io_cqring_offsets, cqes) == offsetof(fastpersist::uring_abi::CqOffsets, cqes));
static_assert(sizeof(io_uring_sqe) == sizeof(fastpersist::uring_abi::Sqe));
static_assert(offsetof(io_uring_sqe, fd) == offsetof(fastpersist::uring_abi::Sqe, fd));
static_assert(offsetof(io_uring_sqe, off) == offsetof(fastpersist::uring_abi::Sqe, off));
static_assert(offsetof(io_uring_sqe, addr) == offsetof(fastpersist::uring_abi::Sqe, addr));
static_assert(offsetof(io_uring_sqe, len) == offsetof(fastpersist::uring_abi::Sqe, len));
static_assert(offsetof(io_uring_sqe, buf_index) == offsetof(fastpersist::uring_abi::Sqe, buffer_index));
static_assert(IORING_REGISTER_BUFFERS == fastpersist::uring_abi::kRegisterBuffers);
static_assert(IORING_OP_READ_FIXED == fastpersist::uring_abi::kOpReadFixed);
static_assert(IORING_OP_WRITE_FIXED == fastpersist::uring_abi::kOpWriteFixed);
static_assert(offsetof(io_uring_sqe, user_data) == offsetof(fastpersist::uring_abi::Sqe, user_data));
static_assert(sizeof(io_uring_cqe) == sizeof(fastpersist::uring_abi::Cqe));
static_assert(IORING_OFF_SQES == fastpersist::uring_abi::kOffsetSqes);
#endif

namespace fastpersist {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

inline int g_failure_count = 0;
inline std::string g_engine;  // under test

inline bool Expect(bool holds, const char* what, const std::string& detail, const char* file, int line) {
  if (!holds) {
    ++g_failure_count;
    std::printf("%s:%d: %s: %s is false; %s\n", file, line, g_engine.c_str(), what, detail.c_str());
    std::fflush(stdout);
  }
  return holds;
}

#define EXPECT(condition) Expect((condition), #condition, "", __FILE__, __LINE__)
#define EXPECT_WITH(condition, detail) Expect((condition), #condition, (detail), __FILE__, __LINE__)
#define ASSERT(condition) \
  if (!EXPECT(condition)) return

// --- Engines ---------------------------------------------------------------------------------------------------------

struct Candidate {
  std::string name;
  std::function<Result<std::unique_ptr<IoEngine>>(const EngineOptions&)> create;
  bool direct = false;
  bool moves_bytes = true;
  bool must_run = false;
  bool works_in_forked_child = true;  // of a process that has used the engine
};

inline std::vector<Candidate> Candidates() {
  std::vector<Candidate> candidates;
  for (const std::string& name : EngineNames()) {
    for (const char* prefix : {"", "fault:"}) {
      candidates.push_back({.name = prefix + name,
                            .create = CreateEngine,
                            .direct = name == "uring" || name == "libaio" || name == "threads" || name == "cufile",
                            .moves_bytes = name != "null",
                            .must_run = name == "null" || name.starts_with("threads"),
                            .works_in_forked_child = name != "cufile"});
    }
  }
  for (const bool direct : {true, false}) {
    const std::string suffix = direct ? "" : "-buffered";
    candidates.push_back(
        {.name = "uring" + suffix + " as on Linux 5.4",
         .create = [direct](const EngineOptions& o) { return CreateUringEngine(o, direct, UringAbi::kLinux54); },
         .direct = direct});
  }
  return candidates;
}

inline std::unique_ptr<IoEngine> Make(const Candidate& candidate, uint32_t queue_depth) {
  auto made = candidate.create({.name = candidate.name, .queue_depth = queue_depth});
  if (!made.ok()) {
    std::printf("%s: cannot be made: %s\n", candidate.name.c_str(), made.status().message().c_str());
    std::exit(1);
  }
  return std::move(made).value();
}

// --- Memory and files ------------------------------------------------------------------------------------------------

constexpr uint64_t kAlignment = 4096;  // more than any disk here asks for

// Page-aligned and not copied by fork, as the ring is: if a child copied a page while the kernel writes into it, one of
// the two would lose the bytes.
class Buffer {
 public:
  explicit Buffer(size_t size_bytes) : size_bytes_(size_bytes) {
    void* address = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    FP_CHECK(address != MAP_FAILED);
    FP_CHECK(madvise(address, size_bytes, MADV_DONTFORK) == 0);
    data_ = static_cast<std::byte*>(address);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { munmap(data_, size_bytes_); }

  std::byte* at(size_t offset) { return data_ + offset; }
  std::span<std::byte> span(size_t offset, size_t size_bytes) { return {data_ + offset, size_bytes}; }
  std::span<std::byte> all() { return span(0, size_bytes_); }

 private:
  size_t size_bytes_;
  std::byte* data_ = nullptr;
};

class File {
 public:
  File(const std::string& path, int flags, bool direct)
      : fd_(open(path.c_str(), flags | O_CLOEXEC | (direct ? O_DIRECT : 0), 0644)) {
    if (fd_ < 0) {
      std::printf("%s: open %s: %s\n", g_engine.c_str(), path.c_str(), std::strerror(errno));
      std::exit(1);
    }
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(fd_); }
  int fd() const { return fd_; }

 private:
  int fd_;
};

constexpr uint64_t kInputBytes = (uint64_t{64} << 20) + 8192 + 1234;  // 8 x 8 MiB, and an end that is not aligned

// The content of the input file: random, so that no two blocks are alike.
inline const std::vector<std::byte>& Content() {
  static const std::vector<std::byte> content = [] {
    std::vector<std::byte> bytes(kInputBytes);
    std::mt19937_64 random(1);
    for (size_t offset = 0; offset < bytes.size(); offset += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(bytes.data() + offset, &word, std::min(sizeof(word), bytes.size() - offset));
    }
    return bytes;
  }();
  return content;
}
inline bool HoldsContent(std::span<const std::byte> bytes, uint64_t offset) {
  return std::memcmp(bytes.data(), Content().data() + offset, bytes.size()) == 0;
}
inline void Fill(std::span<std::byte> bytes, int value) { std::memset(bytes.data(), value, bytes.size()); }
inline bool AllEqual(std::span<const std::byte> bytes, int value) {
  return bytes[0] == static_cast<std::byte>(value) &&
         std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

struct Scratch {
  std::string directory;
  std::string input;  // kInputBytes of Content(); tests only read it
  bool takes_direct = true;
  std::string path(const char* name) const { return directory + "/" + name; }
};
inline Scratch g_scratch;

inline bool Contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

inline void MakeInput() {
  g_scratch.input = g_scratch.path("input");
  const File file(g_scratch.input, O_CREAT | O_RDWR, false);
  FP_CHECK(write(file.fd(), Content().data(), kInputBytes) == static_cast<ssize_t>(kInputBytes));
  FP_CHECK(fsync(file.fd()) == 0);
  const int direct = open(g_scratch.input.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  g_scratch.takes_direct = direct >= 0;
  if (direct >= 0) close(direct);
}

// --- Steps that many tests take --------------------------------------------------------------------------------------

inline IoRequest Read(const File& file, std::span<std::byte> bytes, uint64_t offset, uint64_t tag) {
  return {.op = IoOp::kRead,
          .fd = file.fd(),
          .buffer = bytes.data(),
          .size_bytes = static_cast<uint32_t>(bytes.size()),
          .offset_bytes = offset,
          .tag = tag};
}
inline IoRequest Write(const File& file, std::span<std::byte> bytes, uint64_t offset, uint64_t tag) {
  IoRequest request = Read(file, bytes, offset, tag);
  request.op = IoOp::kWrite;
  return request;
}

// Reap until nothing is in flight; completions by tag.
inline std::map<uint64_t, IoCompletion> ReapAll(IoEngine& engine) {
  std::map<uint64_t, IoCompletion> completions;
  std::vector<IoCompletion> out(engine.limits().queue_depth);
  while (engine.in_flight() > 0) {
    const size_t before = engine.in_flight();
    auto reaped = engine.Reap(out, 1, std::chrono::seconds(60));
    if (!EXPECT_WITH(reaped.ok(), reaped.ok() ? "" : reaped.status().message())) break;
    if (!EXPECT_WITH(reaped.value() > 0, std::to_string(before) + " requests in flight for a minute")) break;
    EXPECT(engine.in_flight() == before - reaped.value());
    for (size_t i = 0; i < reaped.value(); ++i) EXPECT(completions.emplace(out[i].tag, out[i]).second);
  }
  return completions;
}

// Run one request alone.
inline IoCompletion RunOne(IoEngine& engine, const IoRequest& request) {
  EXPECT(engine.Queue(request) == QueueResult::kQueued);
  EXPECT(engine.Submit().ok());
  const auto completions = ReapAll(engine);
  const auto found = completions.find(request.tag);
  if (!EXPECT(completions.size() == 1 && found != completions.end())) return {};
  return found->second;
}

inline std::string Describe(const IoCompletion& completion) {
  return "tag " + std::to_string(completion.tag) + ": done_bytes " + std::to_string(completion.done_bytes) + ", " +
         (completion.sys_errno == 0 ? "no error" : std::strerror(completion.sys_errno));
}

inline size_t DescriptorCount() {
  const auto entries = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

// Threads of this process without the kernel's io_uring workers, which the kernel ends after idle seconds.
inline size_t ThreadCount() {
  size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    if (!name.starts_with("iou-")) ++count;
  }
  return count;
}

}  // namespace fastpersist
