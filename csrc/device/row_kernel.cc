#include "device/row_kernel.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>

#include "core/check.h"

namespace fastpersist {
namespace {

constexpr unsigned kThreadCount = 256;  // threads of a block
constexpr unsigned kRowsPerBlock = kThreadCount / 32;
constexpr unsigned kBlockCountMax = 528;  // enough reads in flight for the bus

// A word as a thread copies it; in PTX.
struct Word {
  uint32_t bytes;
  const char* registers;
  const char* type;
  const char* names;
};
constexpr std::array<Word, 3> kWords = {{
    {16, ".b32 w<4>", "v4.b32", "{w0, w1, w2, w3}"},
    {8, ".b64 w0", "b64", "w0"},
    {RowKernel::kWordBytesMin, ".b32 w0", "b32", "w0"},
}};

std::string NameOf(const Word& word) { return "copy_rows_" + std::to_string(word.bytes); }

// A warp copies a row, 32 words at a time.
std::string TextOf(const Word& word) {
  const std::string type = word.type;
  const std::string names = word.names;
  return ".visible .entry " + NameOf(word) + R"((
  .param .u64 source_of, .param .u64 target_of, .param .u64 rows_of, .param .u64 places_of, .param .u32 count_of,
  .param .u32 bytes_of) {
  .reg .pred is_done;
  .reg .u32 at, step, lane, threads, index, byte, first, count, bytes;
  .reg .u64 source, target, rows, places, from, to, offset, word;
  .reg )" +
         word.registers + R"(;
  ld.param.u64 source, [source_of];
  ld.param.u64 target, [target_of];
  ld.param.u64 rows, [rows_of];
  ld.param.u64 places, [places_of];
  ld.param.u32 count, [count_of];
  ld.param.u32 bytes, [bytes_of];
  mov.u32 at, %ctaid.x;
  mov.u32 step, %nctaid.x;
  mov.u32 threads, %ntid.x;
  mov.u32 lane, %tid.x;
  mad.lo.u32 at, at, threads, lane;
  shr.u32 at, at, 5;
  mul.lo.u32 step, step, threads;
  shr.u32 step, step, 5;
  and.b32 lane, lane, 31;
  mul.lo.u32 first, lane, )" +
         std::to_string(word.bytes) + R"(;
next_row:
  setp.ge.u32 is_done, at, count;
  @is_done bra done;
  mul.wide.u32 offset, at, 4;
  add.u64 from, rows, offset;
  ld.global.u32 index, [from];
  mul.wide.u32 from, index, bytes;
  add.u64 from, from, source;
  add.u64 to, places, offset;
  ld.global.u32 index, [to];
  mul.wide.u32 to, index, bytes;
  add.u64 to, to, target;
  mov.u32 byte, first;
next_word:
  setp.ge.u32 is_done, byte, bytes;
  @is_done bra row_done;
  cvt.u64.u32 offset, byte;
  add.u64 word, from, offset;
  ld.global.)" +
         type + " " + names + R"(, [word];
  add.u64 word, to, offset;
  st.global.)" +
         type + " [word], " + names + R"(;
  add.u32 byte, byte, )" +
         std::to_string(32 * word.bytes) + R"(;
  bra next_word;
row_done:
  add.u32 at, at, step;
  bra next_row;
done:
  ret;
}
)";
}

struct Loaded {
  CudaModule module = nullptr;
  Status failure;
};
std::mutex g_mutex;
std::map<int, Loaded> g_loaded;  // by device; guarded by g_mutex, never unloaded

Status LoadInto(CudaModule& module, const CudaDriver& driver, int ordinal) {
  CudaDeviceId id = 0;
  FP_RETURN_IF_ERROR(driver.Check(driver.DeviceGet(&id, ordinal), "cuDeviceGet"));
  int reads_host_pointers = 0;
  FP_RETURN_IF_ERROR(driver.Check(driver.DeviceGetAttribute(&reads_host_pointers, kCudaReadsHostPointers, id),
                                  "cuDeviceGetAttribute"));
  if (reads_host_pointers == 0) {
    return Status::Error(StatusCode::kUnsupported,
                         "cuda:" + std::to_string(ordinal) + " does not read pinned host memory at its address");
  }
  std::string text = ".version 6.0\n.target sm_50\n.address_size 64\n";
  for (const Word& word : kWords) text += TextOf(word);
  return driver.Check(driver.ModuleLoadData(&module, text.c_str()), "cuModuleLoadData");
}

// REQUIRES: the device's context is current.
Result<CudaModule> ModuleOf(const CudaDriver& driver, int ordinal) {
  const std::lock_guard lock(g_mutex);
  const auto [found, is_new] = g_loaded.try_emplace(ordinal);
  Loaded& loaded = found->second;
  if (is_new) loaded.failure = LoadInto(loaded.module, driver, ordinal);
  if (!loaded.failure.ok()) return loaded.failure;
  return loaded.module;
}

}  // namespace

Result<RowKernel> RowKernel::Load(Device& device, uint32_t row_bytes) {
  FP_CHECK(row_bytes % kWordBytesMin == 0);
  const ContextScope scope(device);
  FP_RETURN_IF_ERROR(scope.status());
  Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  Result<CudaModule> module = ModuleOf(*driver.value(), device.ordinal());
  if (!module.ok()) return module.status();
  const Word& word = *std::ranges::find_if(kWords, [&](const Word& one) { return row_bytes % one.bytes == 0; });
  CudaFunction function = nullptr;
  FP_RETURN_IF_ERROR(driver.value()->Check(
      driver.value()->ModuleGetFunction(&function, module.value(), NameOf(word).c_str()), "cuModuleGetFunction"));
  return RowKernel(device, function, row_bytes);
}

Status RowKernel::Start(uintptr_t stream, const std::byte* source, CudaAddress target, std::span<const int32_t> rows,
                        const int32_t* places) const {
  if (rows.empty()) return Status::Ok();
  const ContextScope scope(*device_);
  FP_RETURN_IF_ERROR(scope.status());
  Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  // As the kernel's text declares them.
  std::array<uint64_t, 4> addresses = {reinterpret_cast<uintptr_t>(source), target,
                                       reinterpret_cast<uintptr_t>(rows.data()), reinterpret_cast<uintptr_t>(places)};
  std::array<uint32_t, 2> numbers = {static_cast<uint32_t>(rows.size()), row_bytes_};
  std::array<void*, 6> arguments = {&addresses[0], &addresses[1], &addresses[2],
                                    &addresses[3], &numbers[0],   &numbers[1]};
  const unsigned block_count = std::min((numbers[0] + kRowsPerBlock - 1) / kRowsPerBlock, kBlockCountMax);
  return driver.value()->Check(
      driver.value()->LaunchKernel(function_, block_count, 1, 1, kThreadCount, 1, 1, 0,
                                   reinterpret_cast<CudaStream>(stream), arguments.data(), nullptr),
      "copying rows to cuda:" + std::to_string(device_->ordinal()));
}

Status RowKernel::Wait(uintptr_t stream) const {
  const ContextScope scope(*device_);
  FP_RETURN_IF_ERROR(scope.status());
  Result<const CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  return driver.value()->Check(driver.value()->StreamSynchronize(reinterpret_cast<CudaStream>(stream)),
                               "waiting for rows on cuda:" + std::to_string(device_->ordinal()));
}

}  // namespace fastpersist
