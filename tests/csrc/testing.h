// The common part of the test programs of core and transfers: checks that print and count, scratch files, and bytes of
// which no two blocks are alike. A program's main() calls Run with its tests.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.h"
#include "engine/fault_engine.h"

namespace fastpersist {

using Bytes = std::vector<std::byte>;
using Clock = std::chrono::steady_clock;

inline int g_failure_count = 0;
inline std::string g_test;       // the one that runs
inline std::string g_directory;  // for scratch files

inline bool Expect(bool holds, const char* what, const std::string& detail, const char* file, int line) {
  if (!holds) {
    ++g_failure_count;
    std::printf("%s:%d: %s: %s is false%s%s\n", file, line, g_test.c_str(), what, detail.empty() ? "" : "; ",
                detail.c_str());
    std::fflush(stdout);
  }
  return holds;
}

#define EXPECT(condition) ::fastpersist::Expect((condition), #condition, "", __FILE__, __LINE__)
#define EXPECT_WITH(condition, detail) ::fastpersist::Expect((condition), #condition, (detail), __FILE__, __LINE__)
#define EXPECT_OK(expression)                                                                        \
  do {                                                                                               \
    const ::fastpersist::Status expected_ok = (expression);                                          \
    ::fastpersist::Expect(expected_ok.ok(), #expression, expected_ok.message(), __FILE__, __LINE__); \
  } while (false)

// The value of a call that cannot fail here; without it the test is meaningless.
template <class T>
T Must(Result<T> result) {
  if (!result.ok()) {
    std::printf("%s: %s\n", g_test.c_str(), result.status().message().c_str());
    std::exit(1);
  }
  return std::move(result).value();
}

inline bool Contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

inline double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Seeded, so that a failure can be repeated.
inline Bytes RandomBytes(size_t size_bytes, uint64_t seed) {
  Bytes bytes(size_bytes);
  std::mt19937_64 random(seed);
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min(sizeof(word), bytes.size() - at));
  }
  return bytes;
}

// A file in the scratch directory, removed at the end.
class ScratchFile {
 public:
  explicit ScratchFile(const char* name) : path_(g_directory + "/" + name) { Open(O_RDWR | O_CREAT | O_TRUNC); }
  ScratchFile(const char* name, const Bytes& content) : ScratchFile(name) {
    size_t done = 0;
    while (done < content.size()) {
      const ssize_t wrote = pwrite(fd_, content.data() + done, content.size() - done, static_cast<off_t>(done));
      if (wrote < 0) Die("pwrite");
      done += static_cast<size_t>(wrote);
    }
  }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  ~ScratchFile() {
    close(fd_);
    unlink(path_.c_str());
  }

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

  // Uses its own descriptor: the flags of fd() belong to the engines.
  Bytes Content() const {
    const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status = {};
    if (fd < 0 || fstat(fd, &status) != 0) Die("open");
    Bytes bytes(static_cast<size_t>(status.st_size));
    for (size_t done = 0; done < bytes.size();) {
      const ssize_t got = pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
      if (got <= 0) Die("pread");
      done += static_cast<size_t>(got);
    }
    close(fd);
    return bytes;
  }

 private:
  void Open(int flags) {
    fd_ = open(path_.c_str(), flags | O_CLOEXEC, 0644);
    if (fd_ < 0) Die("open");
  }
  [[noreturn]] void Die(const char* operation) const {
    std::printf("%s: %s %s: %s\n", g_test.c_str(), operation, path_.c_str(), std::strerror(errno));
    std::exit(1);
  }

  std::string path_;
  int fd_ = -1;
};

// Sets the plan of the fault engines (engine/fault_engine.h) while it lives. It hits `count` requests from the nth on.
class Fault {
 public:
  static constexpr uint64_t kAll = UINT64_MAX;

  explicit Fault(const FaultPlan& plan) { SetFaultPlan(plan); }
  Fault(const Fault&) = delete;
  Fault& operator=(const Fault&) = delete;
  ~Fault() { ClearFaultPlan(); }

  static FaultPlan Errno(int sys_errno, uint64_t nth, uint64_t count) {
    FaultPlan plan = Plan(FaultPlan::Kind::kErrno, nth, count);
    plan.sys_errno = sys_errno;
    return plan;
  }
  static FaultPlan Short(uint32_t short_bytes, uint64_t nth, uint64_t count) {
    FaultPlan plan = Plan(FaultPlan::Kind::kShort, nth, count);
    plan.short_bytes = short_bytes;
    return plan;
  }
  static FaultPlan Zero(uint64_t nth, uint64_t count) { return Plan(FaultPlan::Kind::kZero, nth, count); }
  static FaultPlan Delay(uint32_t delay_ms) {
    FaultPlan plan = Plan(FaultPlan::Kind::kDelay, 1, kAll);
    plan.delay_ms = delay_ms;
    return plan;
  }

 private:
  static FaultPlan Plan(FaultPlan::Kind kind, uint64_t nth, uint64_t count) {
    FaultPlan plan;
    plan.kind = kind;
    plan.nth = nth;
    plan.count = count;
    return plan;
  }
};

struct Test {
  const char* name;
  void (*function)();
};

// Run all tests with scratch files in argv[1], by default the current directory; returns the exit status.
inline int Run(int argc, char** argv, std::initializer_list<Test> tests) {
  g_directory = argc > 1 ? argv[1] : ".";
  for (const Test& test : tests) {
    g_test = test.name;
    test.function();
  }
  std::printf("%zu tests, %d failures\n", tests.size(), g_failure_count);
  return g_failure_count == 0 ? 0 : 1;
}

}  // namespace fastpersist

#define TEST(function) \
  ::fastpersist::Test { #function, function }
