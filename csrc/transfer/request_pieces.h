// The pieces into which request_flow cuts the requests of random_access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "transfer/random_access.h"

namespace fastpersist {

// The parts of a request for one worker, all in host memory or all in one device's.
struct RequestJob {
  std::shared_ptr<FileRequest> request;
  std::vector<FilePart> parts;
  size_t next_part = 0;  // earlier parts are in flight or done
  uint64_t next_part_bytes = 0;
  size_t piece_count = 0;  // pieces in flight
  uint64_t done_bytes = 0;
  uint64_t failed_count = 0;
  FileRequest::Failure first_failure;

  bool all_cut() const { return next_part == parts.size(); }
  bool is_write() const { return request->op() == IoOp::kWrite; }
  Device* device() const { return parts.front().device; }
  // The job has failed, so no thread waits for hung copies. The end of the file is no such failure: the bytes before it
  // are still copied.
  bool given_up() const { return failed_count > 0 && first_failure.status.code() != StatusCode::kEndOfFile; }

  // Record a failure. Pieces come back in any order, and each one behind the end of the file meets that end: the lowest
  // place counts. A caller that gets kEndOfFile trusts the bytes before it, so any other failure replaces it.
  void Note(FileRequest::Failure failure) {
    const bool is_end = failure.status.code() == StatusCode::kEndOfFile;
    const bool is_earlier_end = is_end && first_failure.part.offset_bytes == failure.part.offset_bytes &&
                                first_failure.part.address == failure.part.address &&
                                failure.done_bytes < first_failure.done_bytes;
    const bool was_end = first_failure.status.code() == StatusCode::kEndOfFile;
    if (failed_count++ == 0 || (was_end && (is_earlier_end || !is_end))) first_failure = std::move(failure);
  }
};

// One request to the kernel, and the copy before or after it. The wanted bytes begin `skipped_bytes` behind the start
// of the blocks that are read.
struct RequestPiece {
  std::shared_ptr<RequestJob> job;
  size_t part = 0;
  uint64_t from_bytes = 0;  // the offset in the part
  uint32_t size_bytes = 0;
  uint32_t skipped_bytes = 0;
  uint32_t staged_bytes = 0;
  std::byte* staged = nullptr;

  std::byte* address() const { return job->parts[part].address + from_bytes; }
};

}  // namespace fastpersist
