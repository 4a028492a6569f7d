// The part of the kernel's io_uring ABI that uring_engine.cc uses. The ABI never changes, but <linux/io_uring.h> is old
// or missing on the systems where wheels are built, so it is stated here; engine_contract_test.cc compares it with the
// header where there is one. Names follow io_uring_setup(2), io_uring_enter(2) and io_uring_register(2).
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastpersist::uring_abi {

// The same on every architecture: these calls came after the numbers were unified.
inline constexpr long kSysSetup = 425;
inline constexpr long kSysEnter = 426;
inline constexpr long kSysRegister = 427;

inline constexpr uint32_t kSetupCoopTaskrun = 1U << 8;  // Linux 5.19
inline constexpr uint32_t kSetupTaskrunFlag = 1U << 9;  // Linux 5.19

inline constexpr uint32_t kFeatureSingleMmap = 1U << 0;  // Linux 5.4
inline constexpr uint32_t kFeatureExtArg = 1U << 8;      // Linux 5.11

inline constexpr uint32_t kEnterGetEvents = 1U << 0;
inline constexpr uint32_t kEnterExtArg = 1U << 3;

inline constexpr uint32_t kSqCqOverflow = 1U << 1;  // in the flags of the submission ring
inline constexpr uint32_t kSqTaskrun = 1U << 2;

inline constexpr uint8_t kOpReadv = 1;
inline constexpr uint8_t kOpWritev = 2;
inline constexpr uint8_t kOpReadFixed = 4;  // buffer_index says in which registered buffer
inline constexpr uint8_t kOpWriteFixed = 5;
inline constexpr uint8_t kOpRead = 22;   // Linux 5.6
inline constexpr uint8_t kOpWrite = 23;  // Linux 5.6

inline constexpr uint32_t kRegisterBuffers = 0;
inline constexpr uint32_t kRegisterProbe = 8;  // Linux 5.6
inline constexpr uint16_t kOpSupported = 1U << 0;

inline constexpr long kOffsetRings = 0;
inline constexpr long kOffsetSqes = 0x10000000;

struct SqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  uint64_t user_addr;
};
static_assert(sizeof(SqOffsets) == 40);

struct CqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  uint64_t user_addr;
};
static_assert(sizeof(CqOffsets) == 40);

struct Params {
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SqOffsets sq_off;
  CqOffsets cq_off;
};
static_assert(sizeof(Params) == 120);

struct Sqe {
  uint8_t opcode, flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t off, addr;
  uint32_t len, rw_flags;
  uint64_t user_data;
  uint16_t buffer_index, unused[11];
};
static_assert(sizeof(Sqe) == 64 && offsetof(Sqe, buffer_index) == 40);

struct Cqe {
  uint64_t user_data;
  int32_t res;
  uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct GetEventsArg {
  uint64_t sigmask;
  uint32_t sigmask_size, pad;
  uint64_t timeout;  // address of a KernelTimespec
};
static_assert(sizeof(GetEventsArg) == 24);

struct KernelTimespec {
  int64_t tv_sec, tv_nsec;
};
static_assert(sizeof(KernelTimespec) == 16);

struct ProbeOp {
  uint8_t op, reserved;
  uint16_t flags;
  uint32_t reserved2;
};
struct Probe {
  uint8_t last_op, ops_length;
  uint16_t reserved;
  uint32_t reserved2[3];
  ProbeOp ops[kOpWrite + 1];
};
static_assert(sizeof(Probe) == 16 + 8 * (kOpWrite + 1));

}  // namespace fastpersist::uring_abi
