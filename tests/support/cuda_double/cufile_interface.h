// How tests steer the double of libcufile (libcufile.so.0, built from cufile_double.cc) and look into it. What the
// product calls, cuFile…, behaves as the cuFile API documents; nothing here has a counterpart there. A process loads
// the double of the driver first (interface.h): memory of devices is there.
//
// A call's name is given as exported ("cuFileWrite"); an unknown one is a mistake in the test, and ends the process.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// The way that transfers of device memory are said to take.
enum CuFileDoubleWay : int { kSaysPosix = 0, kSaysNvfs = 1, kSaysP2p = 2 };
// What is odd about the statistics.
enum CuFileDoubleOddity : int {
  kAsDocumented = 0,
  kGrown = 1,     // a device more than there is room for in the structure that is documented
  kLeftOut = 2,   // says that there are two devices, and fills in one
  kDisabled = 3,  // answers with an error
  kAbsurd = 4     // says that there are a billion devices
};

// Forget plans, counts, statistics and violations; what is open and registered stays so. A version of 1160, and posix.
void cufile_double_clear();
void cufile_double_set_version(int version);
void cufile_double_set_way(int way);
void cufile_double_set_oddity(int oddity);
// The nth (from 1; 0: each) call by that name from now on fails. Below 5000 the error is an errno, which only
// cuFileRead and cuFileWrite can tell; from there on it is cuFile's. An errno of -1 means: -1, and no errno.
void cufile_double_fail(const char* call, int nth, int error);
// The nth transfer from now on moves so many bytes at most.
void cufile_double_shorten(int nth, size_t size_bytes);
// A transfer waits until told. Returns once so many wait: cufile_double_wait_for_held.
void cufile_double_hold(int on);
int cufile_double_wait_for_held(int count, int timeout_ms);  // 1: they do; 0: timeout

uint64_t cufile_double_call_count(const char* call);   // with those that failed
uint64_t cufile_double_host_transfer_count();          // of host memory
uint64_t cufile_double_unregistered_transfer_count();  // of device memory that is not registered, or not by its base
int64_t cufile_double_file_count();                    // registered now
int64_t cufile_double_buffer_count();                  // registered now
int cufile_double_violation_count();
const char* cufile_double_violation(int index);  // lasts until cufile_double_clear

}  // extern "C"

// Each of them once: for what looks them up in the library.
// It moves them anew at each run.
// clang-format off
#define FASTPERSIST_CUFILE_DOUBLE_FUNCTIONS(X)                                                                   \
  X(clear) X(set_version) X(set_way) X(set_oddity) X(fail) X(shorten) X(hold) X(wait_for_held) X(call_count)     \
  X(host_transfer_count) X(unregistered_transfer_count) X(file_count) X(buffer_count) X(violation_count)         \
  X(violation)
// clang-format on
