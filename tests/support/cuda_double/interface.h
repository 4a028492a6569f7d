// How tests steer the double of the CUDA driver (libcuda.so.1, built from this folder) and look into it. What the
// product calls, cu…, is in cuda_double.cc and behaves as the driver API documents; nothing here has a counterpart in
// CUDA. Streams and events are named by their handles, as integers; stream 0 is the legacy default stream of device 0.
//
// A call's name may be given as exported ("cuMemHostRegister_v2"), or without "cu", "_v2" or both. An unknown name, or
// an unknown stream, is a mistake in the test, and ends the process with a message.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// --- the whole ---

// Forget everything: contexts, streams, events, memory, registrations, plans, counts. Queued work is dropped. Handles
// from before are unknown afterwards, so a process whose product has used a device wants double_clear instead. cuInit
// stays done. At first there is one device.
void double_reset(int device_count);
// Lift every hold and delay, let queued work end, then forget errors, plans, counts and violations. Contexts, streams,
// events, memory and registrations stay as they are.
void double_clear();
void double_set_driver_version(int version);  // 12040 at first
void double_set_pci_bus_id(int device, const char* text);
void double_set_reads_host_pointers(int on);  // whether devices read pinned host memory at its address; 1 at first

// --- memory of the device ---

// Memory at an address that the CPU cannot access, on a 2 MiB boundary, filled with 0xAB; 0: there is none. No address
// is given out twice. The first is of no certain device; of memory that has one, a copy in another device's stream is a
// violation.
uint64_t double_alloc(size_t size_bytes);
uint64_t double_alloc_on(int device, size_t size_bytes);
// Poisons it (0xDD) for copies that are queued still, and counts those as violations. Does nothing for what a
// double_reset has freed.
void double_free(uint64_t address);
// At once, without regard to streams. 0: done; 1: not inside an allocation, which is a violation. Registered memory of
// the host can be read, too, as by a kernel.
int double_read(uint64_t address, void* target, size_t size_bytes);
int double_write(uint64_t address, const void* source, size_t size_bytes);

// --- failures ---

// The nth (from 1; 0: each) call by that name from now on does nothing but return the error. Sticky errors (such as
// 700, 719, 999) make all later calls in that context fail, too.
void double_fail(const char* call, int nth, int error);
// The nth copy from now on that is started by that call (cuMemcpy…Async, cuMemsetD8Async) fails in its stream when its
// turn comes. Later calls, queries and synchronizations on the stream report it; a sticky one spoils the context.
void double_fail_async(const char* copy, int nth, int error);
void double_set_registration_limit(uint64_t bytes);  // above, cuMemHostRegister returns 2 (out of memory)
// 0: a copy with host memory that is not registered returns before it is done, as CUDA allows it: where the device
// reads such memory by itself (HMM, Grace) it is a copy like any other. 1, at first: it waits.
void double_set_pageable_waits(int on);

// --- time and order ---

void double_delay_us(int us);  // every copy takes so long in its stream; bytes move at the end of it
// As torch makes one (CU_STREAM_NON_BLOCKING), and the legacy default stream of a device.
uint64_t double_stream_new(int device);
uint64_t double_default_stream(int device);
void double_stream_free(uint64_t stream);
// "Kernels" of the caller: after so long in the stream, fill or copy memory of the device. They are no copies to
// double_delay_us, double_hold_copies and the counts.
void double_stream_add_work(uint64_t stream, int us, uint64_t target, int byte_value, size_t size_bytes);
void double_stream_add_copy(uint64_t stream, int us, uint64_t target, uint64_t source, size_t size_bytes);
// What the stream is given from now on comes after all that the other one holds, as torch's wait_stream().
void double_stream_wait(uint64_t stream, uint64_t other);
// A stream that is blocked starts nothing.
void double_stream_block(uint64_t stream);
void double_stream_unblock(uint64_t stream);
// As long as it is on, the stream counts as captured into a graph by this thread. Work for it, and calls of threads
// that did not exchange their capture mode, are violations, and make the capture invalid (cuStreamIsCapturing: 2).
void double_capture(uint64_t stream, int on);
void double_stream_synchronize(uint64_t stream);
void double_synchronize();  // all streams
// Let so many more copies start, in whichever stream, and hold the rest; -1: hold none.
void double_hold_copies(int64_t allowed_count);
// As long as it is on, streams have no threads: what they hold is done by double_step, one work a call, so that the
// order is the test's. Durations are nothing then. To be set before anything is queued.
void double_step_by_step(int on);
// Do one of the works that may start now: the (choice modulo their count)th. 0: there is none.
int double_step(uint64_t choice);
// As long as it is on, cuMemHostRegister does not return, as for large memory that has no pages yet.
void double_hold_registrations(int on);
// Wait for the calls by that name, or for the copies that are queued, to be so many at least. 1: they are; 0: timeout.
int double_wait_for_calls(const char* call, uint64_t count, int timeout_ms);
int double_wait_for_queued_copies(uint64_t count, int timeout_ms);

// --- what happened ---

uint64_t double_call_count(const char* call);  // with those that failed; "": all calls
int double_has_call(const char* call);
// Misuse that CUDA would punish, or that would spoil data, in words. A text lasts until double_clear or double_reset.
int double_violation_count();
const char* double_violation(int index);
uint64_t double_queued_copy_count();       // started, not done
uint64_t double_peak_queued_copy_count();  // since the last double_clear or double_reset, as are the next three
uint64_t double_pageable_copy_count();     // with host memory that was not registered
uint64_t double_copied_to_host_bytes();
uint64_t double_copied_to_device_bytes();
uint64_t double_registration_count();  // now
uint64_t double_registered_bytes();
int double_is_registered(uint64_t address, size_t size_bytes);  // all of it
uint64_t double_stream_count();                                 // live ones, default streams not counted
uint64_t double_event_count();
uint64_t double_allocation_count();
int double_context_depth();  // contexts on the calling thread's stack

}  // extern "C"

// Each of them once: for what looks them up in the library.
// clang-format off
#define FASTPERSIST_CUDA_DOUBLE_FUNCTIONS(X)                                                                       \
  X(reset) X(clear) X(set_driver_version) X(set_pci_bus_id) X(set_reads_host_pointers) X(alloc) X(alloc_on) X(free) X(read) X(write) X(fail)  \
  X(fail_async) X(set_registration_limit) X(set_pageable_waits) X(delay_us) X(stream_new) X(default_stream)        \
  X(stream_free) X(stream_add_work) X(stream_add_copy) X(stream_wait) X(stream_block) X(stream_unblock) X(capture) \
  X(step_by_step) X(step) X(stream_synchronize) X(synchronize) X(hold_copies) X(hold_registrations)                \
  X(wait_for_calls) X(wait_for_queued_copies) X(call_count) X(has_call) X(violation_count) X(violation)            \
  X(queued_copy_count) X(peak_queued_copy_count) X(pageable_copy_count) X(copied_to_host_bytes)                    \
  X(copied_to_device_bytes) X(registration_count) X(registered_bytes) X(is_registered) X(stream_count) X(event_count)               \
  X(allocation_count) X(context_depth)
// clang-format on
