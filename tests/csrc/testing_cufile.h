// The common part of the tests of GPUDirect Storage: the doubles of libcufile and of the driver, child processes, and
// common steps.
#pragma once

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "../support/cuda_double/cufile_interface.h"
#include "cuda_double.h"
#include "device/cufile.h"
#include "engine/engine.h"
#include "testing.h"

namespace fastpersist {

constexpr size_t kBufferBytes = 256 << 10;
constexpr size_t kBufferCount = 4;

// --- the doubles ---

// The path beside the program, where the Makefile builds it, or that of the environment.
inline std::string LibraryPath(const char* variable, const char* name) {
  if (const char* const given = std::getenv(variable); given != nullptr && *given != '\0') return given;
  std::array<char, 4096> program = {};
  const ssize_t size = readlink("/proc/self/exe", program.data(), program.size() - 1);
  const std::string path(program.data(), size < 0 ? 0 : static_cast<size_t>(size));
  return path.substr(0, path.rfind('/') + 1) + name;
}
inline std::string NewLibrary() { return LibraryPath("CUFILE_DOUBLE", "libcufile.so.0"); }
inline std::string OldLibrary() { return LibraryPath("CUFILE_DOUBLE_OLD", "old-cufile/libcufile.so.0"); }

struct CuFileDouble {
#define FASTPERSIST_MEMBER(name) decltype(&cufile_double_##name) name = nullptr;
  FASTPERSIST_CUFILE_DOUBLE_FUNCTIONS(FASTPERSIST_MEMBER)
#undef FASTPERSIST_MEMBER
};

// Loaded at the first use in a test.
inline const CuFileDouble& Double(const std::string& path = NewLibrary()) {
  static const CuFileDouble* const loaded = [&] {
    CudaDouble::Get();
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      std::printf("%s\n", dlerror());
      std::exit(1);
    }
    auto* const found = new CuFileDouble;
#define FASTPERSIST_LOOK_UP(name) \
  found->name = reinterpret_cast<decltype(found->name)>(dlsym(library, "cufile_double_" #name));
    FASTPERSIST_CUFILE_DOUBLE_FUNCTIONS(FASTPERSIST_LOOK_UP)
#undef FASTPERSIST_LOOK_UP
    return found;
  }();
  return *loaded;
}
inline const CudaDouble& Cuda() { return CudaDouble::Get(); }

inline void ExpectNoViolation() {
  for (int i = 0; i < Double().violation_count(); ++i) EXPECT_WITH(false, Double().violation(i));
  EXPECT_WITH(Cuda().violation_count() == 0, Cuda().Violations());
}
inline void ExpectNothingLeft() {
  CuFileDescriptor::DropClosed();
  ExpectNoViolation();
  EXPECT(Cuda().context_depth() == 0);
  EXPECT(Double().file_count() == 0);
  EXPECT(Double().buffer_count() == 0);
  EXPECT(Cuda().allocation_count() == 0);
}

// The exit code of a child process; -1: it, or one of its checks, failed.
inline int InChild(const std::function<void()>& function) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    const int failure_count = g_failure_count;
    function();
    std::fflush(stdout);
    _exit(g_failure_count == failure_count ? 0 : 1);
  }
  int ending = 0;
  waitpid(child, &ending, 0);
  return WIFEXITED(ending) ? WEXITSTATUS(ending) : -1;
}

template <void (*kTest)()>
inline void Isolated() {
  const int answer = InChild(kTest);
  EXPECT_WITH(answer == 0, "the test's process ended with " + std::to_string(answer));
}

// --- steps that many tests take ---

inline Device& TheDevice() { return *Must(Device::Get(0)); }
inline std::unique_ptr<DeviceStaging> NewStaging(size_t buffer_count = kBufferCount) {
  return Must(DeviceStaging::Create(TheDevice(), buffer_count, kBufferBytes));
}
inline uint64_t AddressOf(const std::byte* buffer) { return reinterpret_cast<uint64_t>(buffer); }
inline void Fill(std::byte* buffer, std::span<const std::byte> bytes) {
  EXPECT(Cuda().write(AddressOf(buffer), bytes.data(), bytes.size()) == 0);
}
inline Bytes BytesOf(const std::byte* buffer, size_t size_bytes = kBufferBytes) {
  Bytes bytes(size_bytes);
  EXPECT(Cuda().read(AddressOf(buffer), bytes.data(), size_bytes) == 0);
  return bytes;
}

inline std::unique_ptr<IoEngine> NewEngine(uint32_t queue_depth = 8) {
  return Must(CreateEngine({.name = "cufile", .queue_depth = queue_depth}));
}
inline IoRequest Request(IoOp op, int fd, std::byte* buffer, size_t size_bytes = kBufferBytes,
                         uint64_t offset_bytes = 0) {
  return {.op = op,
          .fd = fd,
          .buffer = buffer,
          .size_bytes = static_cast<uint32_t>(size_bytes),
          .offset_bytes = offset_bytes,
          .tag = 7};
}
inline IoCompletion RunOne(IoEngine& engine, const IoRequest& request) {
  EXPECT(engine.Queue(request) == QueueResult::kQueued);
  EXPECT_OK(engine.Submit());
  std::array<IoCompletion, 1> done = {};
  EXPECT(Must(engine.Reap(done, 1, std::chrono::seconds(60))) == 1);
  EXPECT(done[0].tag == request.tag);
  return done[0];
}
inline std::string Describe(const IoCompletion& completion) {
  return std::to_string(completion.done_bytes) + " bytes, " + std::strerror(completion.sys_errno);
}

// The exit status of a program if its doubles exist; else 77, "cannot run here".
inline int RunWithDoubles(int argc, char** argv, std::initializer_list<Test> tests) {
  for (const std::string& path : {CudaDouble::FindLibrary(), NewLibrary(), OldLibrary()}) {
    if (access(path.c_str(), R_OK) == 0) continue;
    std::printf("a double is not built: %s\n", path.c_str());
    return 77;
  }
  return Run(argc, argv, tests);
}

}  // namespace fastpersist

// Runs each test in its own process: the product keeps the library as long as the process lives.
#define ISOLATED(...) \
  ::fastpersist::Test { #__VA_ARGS__, ::fastpersist::Isolated<::fastpersist::__VA_ARGS__> }
