// The native module fastpersist._native; only this folder uses Python. Tensor memory crosses as address and length, and
// the Python side keeps it alive. The GIL is released while bytes move, and taken only to run a hook.
// fastpersist/_native.pyi has the signatures.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/bindings.h"
#include "binding/column.h"
#include "binding/errors.h"
#include "binding/gil.h"
#include "binding/plain_pickler.h"
#include "binding/rings.h"
#include "core/buffer_pool.h"
#include "core/crc32.h"
#include "core/file.h"
#include "core/fork.h"
#include "core/memory.h"
#include "core/value_statistics.h"
#include "engine/engine.h"
#include "transfer/file_reader.h"
#include "transfer/file_writer.h"
#include "transfer/snapshot.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

// ---------------------------------------------------------------------------------------------------- hooks

// Holds the exception that a hook raised: the transfer stops with kCancelled, and the binding raises it again.
struct HookError {
  std::unique_ptr<py::error_already_set> error;

  Status Keep(py::error_already_set& raised) {
    if (error == nullptr) error = std::make_unique<py::error_already_set>(std::move(raised));
    return Status::Error(StatusCode::kCancelled, "stopped by an exception");
  }
  void Rethrow() {
    if (error == nullptr) return;
    const std::unique_ptr<py::error_already_set> raised = std::move(error);
    throw std::move(*raised);
  }
};

// Run `call` with the GIL, from transfers, which run without it.
template <class Call>
Status WithGil(HookError& hook_error, Call call) {
  const HeldGil gil;
  try {
    call();
    return Status::Ok();
  } catch (py::error_already_set& raised) {
    return hook_error.Keep(raised);
  }
}

// `pull` and `push` are called as (id, offset_bytes, address, size_bytes), `poll` as (done_bytes); each may be None.
// Every poll handles signals, so Ctrl-C ends a transfer of the main thread.
TransferCallbacks MakeHooks(const std::shared_ptr<HookError>& hook_error, const py::object& pull,
                            const py::object& push, const py::object& poll) {
  TransferCallbacks hooks;
  // Transfers copy and drop the hooks without the GIL, so the hooks share their Python objects and copy none.
  if (!pull.is_none()) {
    hooks.pull = [hook_error, pull = Shared(pull)](uint64_t id, uint64_t offset_bytes, std::byte* target,
                                                   uint64_t size_bytes) {
      return WithGil(*hook_error, [&] { (*pull)(id, offset_bytes, reinterpret_cast<uintptr_t>(target), size_bytes); });
    };
  }
  if (!push.is_none()) {
    hooks.destinations = Shared(push);  // `push` keeps the destinations alive
    hooks.push = [hook_error, push = Shared(push)](uint64_t id, uint64_t offset_bytes, const std::byte* source,
                                                   uint64_t size_bytes) {
      return WithGil(*hook_error, [&] { (*push)(id, offset_bytes, reinterpret_cast<uintptr_t>(source), size_bytes); });
    };
  }
  hooks.poll = [hook_error, poll = Shared(poll)](uint64_t done_bytes) {
    return WithGil(*hook_error, [&] {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!poll->is_none()) (*poll)(done_bytes);
    });
  };
  return hooks;
}

// ---------------------------------------------------------------------------------------------------- transfers

PumpOptions MakePumpOptions(const TransferOptions& options) {
  PumpOptions pump;
  pump.engines = options.engines;
  pump.queue_depth = static_cast<uint32_t>(options.queue_depth);
  pump.thread_count = options.thread_count;
  return pump;
}

// Run `call` (which returns a Status) without the GIL, then raise the error, a hook's own exception first.
template <class Call>
void RunTransfer(HookError& hook_error, const std::string& path, Call call) {
  const Status status = WithoutGil(call);
  hook_error.Rethrow();
  ThrowIfError(status, path);
}

// Deletes an object without the GIL, since its destructor may take long, on the thread that drops the last reference.
template <class T>
void DeleteWithoutGil(const T* last) {
  if (PyGILState_Check() == 0) {
    delete last;
    return;
  }
  const ReleasedGil released;
  delete last;
}

// For objects whose destructors wait only for the kernel or a device, such as a transfer that was not closed.
template <class T>
struct EndsWithoutGil {
  void operator()(const T* last) const { DeleteWithoutGil(last); }
};
template <class T>
using WithoutGilPtr = std::unique_ptr<T, EndsWithoutGil<T>>;

// FileWriter::Run for Python: offset in the file, size in bytes, CRC.
using RunTuple = std::tuple<uint64_t, uint64_t, uint32_t>;

class PyWriter {
 public:
  PyWriter(TransferOptions options, const py::object& pull, const py::object& poll)
      : path_(options.path), hook_error_(std::make_shared<HookError>()), open_transfer_(new OpenTransfer(options)) {
    BufferPool& ring = open_transfer_->buffers();
    Device* const ring_device = open_transfer_->ring_device();
    TransferCallbacks hooks = MakeHooks(hook_error_, pull, py::none(), poll);
    RunTransfer(*hook_error_, path_, [&] {
      Result<std::unique_ptr<FileWriter>> opened =
          FileWriter::Open(options.fd, path_, MakePumpOptions(options), ring, std::move(hooks), ring_device);
      if (!opened.ok()) return opened.status();
      writer_.reset(std::move(opened).value().release());
      return Status::Ok();
    });
  }

  void Append(const PieceList& pieces) {
    FileWriter& open = writer();
    RunTransfer(*hook_error_, path_, [&] { return open.Append(pieces); });
  }
  void Seek(uint64_t offset_bytes) {
    FileWriter& open = writer();
    RunTransfer(*hook_error_, path_, [&] { return open.Seek(offset_bytes); });
  }
  void Finish() {
    FileWriter& open = writer();
    RunTransfer(*hook_error_, path_, [&] { return open.Finish(); });
  }
  // Wait for the kernel and give everything back. Without Finish, the written bytes are of no use.
  void Close() {
    if (writer_ == nullptr) return;
    engine_name_ = writer_->pump().engine_name();
    demotions_ = writer_->pump().demotions();
    writer_.reset();
    open_transfer_.reset();
  }

  uint64_t position() { return writer().position(); }
  std::vector<uint32_t> crcs(uint32_t count) {
    std::vector<uint32_t> values(count);
    for (uint32_t slot = 0; slot < count; ++slot) values[slot] = writer().crc(slot);
    return values;
  }
  std::optional<std::vector<RunTuple>> runs() {
    const std::optional<std::vector<FileWriter::Run>> runs = writer().runs();
    if (!runs.has_value()) return std::nullopt;
    std::vector<RunTuple> tuples;
    tuples.reserve(runs->size());
    for (const FileWriter::Run& run : *runs) tuples.emplace_back(run.offset_bytes, run.size_bytes, run.crc);
    return tuples;
  }
  std::string engine_name() const { return writer_ == nullptr ? engine_name_ : writer_->pump().engine_name(); }
  std::vector<std::string> demotions() const { return writer_ == nullptr ? demotions_ : writer_->pump().demotions(); }

 private:
  // Raises if the writer is closed. REQUIRES: the GIL is held.
  FileWriter& writer() {
    if (writer_ == nullptr) {
      Throw(Status::Error(StatusCode::kInvalidArgument, "the writer of " + path_ + " is closed"), path_);
    }
    return *writer_;
  }

  const std::string path_;
  const std::shared_ptr<HookError> hook_error_;
  WithoutGilPtr<OpenTransfer> open_transfer_;  // outlives the writer, which returns its buffers to it
  WithoutGilPtr<FileWriter> writer_;
  std::string engine_name_;
  std::vector<std::string> demotions_;
};

// Add sources; of each its address, bytes, kind and device (none: the host's memory). Many lie on no device.
void AddSources(Snapshot& snapshot, const py::object& addresses_given, const py::object& sizes_given,
                const py::object& kinds_given, const std::optional<std::vector<std::optional<int>>>& devices_given) {
  const std::vector<uint64_t> addresses = Column<uint64_t>(addresses_given), sizes = Column<uint64_t>(sizes_given);
  std::vector<SourceKind> kinds;
  if (py::isinstance<py::bytearray>(kinds_given)) {
    for (const uint8_t kind : Column<uint8_t>(kinds_given)) kinds.push_back(static_cast<SourceKind>(kind));
  } else {
    kinds = kinds_given.cast<std::vector<SourceKind>>();
  }
  const size_t count = addresses.size();
  const std::vector<std::optional<int>> devices =
      devices_given.has_value() ? *devices_given : std::vector<std::optional<int>>(count);
  if (sizes.size() != count || kinds.size() != count || devices.size() != count) {
    throw py::value_error("each source has an address, a size, a kind and a device");
  }
  snapshot.Reserve(count);
  for (size_t index = 0; index < count; ++index) {
    if (devices[index].has_value()) {
      Device& owner = DeviceOf(*devices[index]);
      const ReleasedGil released;  // the first call pins the arena's mapped memory
      snapshot.Add(owner, addresses[index], sizes[index], kinds[index]);
    } else {
      snapshot.Add(reinterpret_cast<const std::byte*>(addresses[index]), sizes[index], kinds[index]);
    }
  }
}

// Wait as Snapshot::Capture does, without the GIL; handles signals meanwhile.
void CaptureSnapshot(Snapshot& snapshot, SourceKind kind, bool wait) {
  const auto hook_error = std::make_shared<HookError>();
  const TransferCallbacks hooks = MakeHooks(hook_error, py::none(), py::none(), py::none());
  RunTransfer(*hook_error, "", [&] { return snapshot.Capture(kind, wait, [&hooks] { return hooks.poll(0); }); });
}

// Calls that lock the mutex of a snapshot or an arena, as most here do, must not hold the GIL: the owner of the mutex
// may be pinning memory, which takes long.
py::dict CountsOf(Snapshot& snapshot) {
  const Snapshot::Counts counts = WithoutGil([&] { return snapshot.counts(); });
  const auto of = [](const std::array<uint64_t, kSourceKindCount>& values, SourceKind kind) {
    return values[static_cast<size_t>(kind)];
  };
  py::dict found;
  found["stable_remaining_bytes"] = of(counts.remaining_bytes, SourceKind::kStable);
  found["volatile_remaining_bytes"] = of(counts.remaining_bytes, SourceKind::kVolatile);
  found["stable_copied_bytes"] = of(counts.copied_bytes, SourceKind::kStable);
  found["volatile_copied_bytes"] = of(counts.copied_bytes, SourceKind::kVolatile);
  found["taken_bytes"] = counts.taken_bytes;
  return found;
}

struct ExtentList {
  std::vector<ReadExtent> extents;

  void AddMemory(uint64_t offset_bytes, uint64_t size_bytes, uintptr_t address, bool with_crc, bool fresh) {
    extents.push_back({.offset_bytes = offset_bytes,
                       .size_bytes = size_bytes,
                       .target = ReadExtent::Target::kMemory,
                       .address = reinterpret_cast<std::byte*>(address),
                       .with_crc = with_crc,
                       .fresh = fresh});
  }
  void AddDevice(uint64_t offset_bytes, uint64_t size_bytes, int device, uint64_t address, bool with_crc) {
    extents.push_back({.offset_bytes = offset_bytes,
                       .size_bytes = size_bytes,
                       .target = ReadExtent::Target::kDevice,
                       .device = &DeviceOf(device),
                       .device_address = address,
                       .with_crc = with_crc});
  }
  void AddPushed(uint64_t offset_bytes, uint64_t size_bytes, uint64_t id, bool with_crc) {
    extents.push_back({.offset_bytes = offset_bytes,
                       .size_bytes = size_bytes,
                       .target = ReadExtent::Target::kPush,
                       .id = id,
                       .with_crc = with_crc});
  }
  void AddChecked(uint64_t offset_bytes, uint64_t size_bytes) {
    extents.push_back({.offset_bytes = offset_bytes, .size_bytes = size_bytes, .with_crc = true});
  }
};

struct ReadReport {
  std::vector<uint32_t> crcs;
  std::string engine;
  std::vector<std::string> demotions;
};

ReadReport ReadExtents(TransferOptions options, const ExtentList& list, const py::object& push,
                       const py::object& poll) {
  const auto hook_error = std::make_shared<HookError>();
  const WithoutGilPtr<OpenTransfer> open_transfer(new OpenTransfer(options));
  BufferPool& ring = open_transfer->buffers();
  Device* const ring_device = open_transfer->ring_device();
  TransferCallbacks hooks = MakeHooks(hook_error, py::none(), push, poll);
  ReadReport report;
  RunTransfer(*hook_error, options.path, [&] {
    Result<std::unique_ptr<FileReader>> opened =
        FileReader::Open(options.fd, options.path, MakePumpOptions(options), ring, std::move(hooks), ring_device);
    if (!opened.ok()) return opened.status();
    const std::unique_ptr<FileReader> reader = std::move(opened).value();  // its destructor may have to wait
    Result<std::vector<uint32_t>> crcs = reader->Read(list.extents);
    if (!crcs.ok()) return crcs.status();
    report.crcs = std::move(crcs).value();
    report.engine = reader->pump().engine_name();
    report.demotions = reader->pump().demotions();
    return Status::Ok();
  });
  return report;
}

// Run independent requests (write, offset_bytes, address, size_bytes), straight from and to memory: for probes,
// benchmarks and tests of the engines.
void RunRequests(int fd, const std::string& path, const std::vector<std::string>& engines,
                 const std::vector<std::tuple<bool, uint64_t, uintptr_t, uint32_t>>& requests, uint32_t queue_depth,
                 uint32_t thread_count) {
  const auto hook_error = std::make_shared<HookError>();
  TransferCallbacks hooks = MakeHooks(hook_error, py::none(), py::none(), py::none());
  RunTransfer(*hook_error, path, [&] {
    Result<std::unique_ptr<IoPump>> opened = IoPump::Open(
        fd, path,
        {.engines = engines, .queue_depth = queue_depth, .thread_count = thread_count, .poll = std::move(hooks.poll)});
    if (!opened.ok()) return opened.status();
    const std::unique_ptr<IoPump> pump = std::move(opened).value();
    std::vector<IoPump::Finished> finished;
    size_t next = 0;
    while (next < requests.size() || pump->in_flight() > 0) {
      while (next < requests.size() && pump->in_flight() < queue_depth) {
        const auto& [write, offset_bytes, address, size_bytes] = requests[next];
        FP_RETURN_IF_ERROR(pump->Start({.op = write ? IoOp::kWrite : IoOp::kRead,
                                        .buffer = reinterpret_cast<std::byte*>(address),
                                        .size_bytes = size_bytes,
                                        .needed_bytes = size_bytes,
                                        .offset_bytes = offset_bytes,
                                        .tag = next++}));
      }
      finished.clear();
      FP_RETURN_IF_ERROR(pump->Collect(finished));
    }
    return Status::Ok();
  });
}

std::optional<uint32_t> CombineRuns(const std::vector<RunTuple>& tuples, uint64_t size_bytes) {
  std::vector<FileWriter::Run> runs;
  runs.reserve(tuples.size());
  for (const auto& [offset_bytes, run_bytes, crc] : tuples) {
    runs.push_back({.offset_bytes = offset_bytes, .size_bytes = run_bytes, .crc = crc});
  }
  return FileWriter::CombineRuns(std::move(runs), size_bytes);
}

uint32_t CrcOfBuffer(const py::buffer& data, uint32_t crc) {
  const py::buffer_info info = data.request();
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) throw py::value_error("crc32 needs a contiguous buffer");
  return Crc32(crc, static_cast<const std::byte*>(info.ptr), static_cast<size_t>(info.size * info.itemsize));
}

ValueType ValueTypeOf(std::string_view dtype) {
  if (dtype == "float16") return ValueType::kFloat16;
  if (dtype == "bfloat16") return ValueType::kBFloat16;
  if (dtype == "float32") return ValueType::kFloat32;
  if (dtype == "float64") return ValueType::kFloat64;
  throw py::value_error("there is no arithmetic for values of " + std::string(dtype));
}

auto CompareMemory(std::string_view dtype, uintptr_t a, uintptr_t b, size_t count) {
  const ValueType type = ValueTypeOf(dtype);
  const ReleasedGil released;
  const ValueDifference found =
      CompareValues(type, reinterpret_cast<const std::byte*>(a), reinterpret_cast<const std::byte*>(b), count);
  return std::make_tuple(found.differing_count, found.max_abs, found.max_rel,
                         std::make_pair(found.nan_count_a, found.nan_count_b),
                         std::make_pair(found.inf_count_a, found.inf_count_b));
}

auto SummarizeMemory(std::string_view dtype, uintptr_t values, size_t count) {
  const ValueType type = ValueTypeOf(dtype);
  const ReleasedGil released;
  const ValueSummary found = SummarizeValues(type, reinterpret_cast<const std::byte*>(values), count);
  return std::make_tuple(found.nan_count, found.inf_count, found.min, found.max, found.sum, found.square_sum);
}

}  // namespace

std::shared_ptr<const py::object> Shared(const py::object& object) {
  return std::shared_ptr<const py::object>(new py::object(object), [](const py::object* last) {
    const HeldGil gil;
    delete last;
  });
}

}  // namespace fastpersist

PYBIND11_MODULE(_native, m) {
  using namespace fastpersist;
  m.doc() = "The native core of fastpersist: engines, ring and transfers. Not public; see fastpersist/_native.pyi.";

  py::class_<TransferOptions>(m, "TransferOptions")
      .def(py::init<int, std::string, std::vector<std::string>, size_t, size_t, size_t, uint32_t, std::optional<int>>(),
           py::kw_only(), py::arg("fd"), py::arg("path"), py::arg("engines"), py::arg("ring_bytes"),
           py::arg("chunk_bytes"), py::arg("queue_depth"), py::arg("thread_count") = 0,
           py::arg("ring_device") = py::none());

  py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena")
      .def(py::init([](uint64_t limit_bytes) {
             // Its destructor unpins memory, which takes long.
             return std::shared_ptr<Arena>(new Arena(limit_bytes), DeleteWithoutGil<Arena>);
           }),
           py::arg("limit_bytes"))
      .def("grow", &Arena::Grow, py::arg("limit_bytes"), py::call_guard<ReleasedGil>())
      .def("prepare", &Arena::Prepare, py::arg("size_bytes"), py::call_guard<ReleasedGil>())
      .def_property_readonly("used_bytes",
                             [](Arena& self) {
                               return WithoutGil([&] {
                                 const std::lock_guard lock(self.mutex());
                                 return self.used_bytes();
                               });
                             })
      .def_property_readonly("mapped_bytes", [](Arena& self) {
        return WithoutGil([&] {
          const std::lock_guard lock(self.mutex());
          return self.mapped_bytes();
        });
      });

  py::enum_<SourceKind>(m, "SourceKind")
      .value("STABLE", SourceKind::kStable)
      .value("VOLATILE", SourceKind::kVolatile)
      .value("CONSTANT", SourceKind::kConstant);

  py::class_<Snapshot, std::shared_ptr<Snapshot>>(m, "Snapshot")
      .def(py::init([](std::shared_ptr<Arena> arena, size_t thread_count) {
             // Its destructor waits for the copies of devices if it was not closed.
             return std::shared_ptr<Snapshot>(new Snapshot(std::move(arena), thread_count), DeleteWithoutGil<Snapshot>);
           }),
           py::arg("arena"), py::arg("thread_count") = 1)
      .def("add", &AddSources, py::arg("addresses"), py::arg("sizes"), py::arg("kinds"), py::arg("devices"))
      .def("narrow", &Snapshot::Narrow, py::arg("source"), py::arg("from_bytes"), py::arg("until_bytes"),
           py::call_guard<ReleasedGil>())
      .def("capture", &CaptureSnapshot, py::arg("kind"), py::arg("wait"))
      .def(
          "pace",
          [](Snapshot& self, double delay_s, double seconds) {
            self.Pace(std::chrono::nanoseconds(int64_t(delay_s * 1e9)),
                      std::chrono::nanoseconds(int64_t(seconds * 1e9)));
          },
          py::arg("delay_s"), py::arg("seconds"), py::call_guard<ReleasedGil>())
      .def(
          "hold_caller",
          [](Snapshot& self, int device, uintptr_t stream) {
            Device& owner = DeviceOf(device);
            return WithoutGil([&] { return self.HoldCaller(owner, stream); });  // it waits while the stream is full
          },
          py::arg("device"), py::arg("stream"))
      .def("settled",
           [](Snapshot& self) {
             Result<bool> settled = WithoutGil([&] { return self.AreCopiesComplete(); });
             ThrowIfError(settled.status(), "");
             return settled.value();
           })
      .def("hurry", &Snapshot::Hurry, py::call_guard<ReleasedGil>())
      .def("close", &Snapshot::Close, py::call_guard<ReleasedGil>())
      .def("counts", &CountsOf);

  py::class_<PieceList> pieces(m, "PieceList");
  pieces.def(py::init<>())
      .def("add_bytes", [](PieceList& self, const py::bytes& data) { self.AddBytes(std::string(data)); })
      .def(
          "add_memory",
          [](PieceList& self, uintptr_t address, uint64_t size_bytes, uint32_t crc_slot) {
            self.AddMemory(reinterpret_cast<const std::byte*>(address), size_bytes, crc_slot);
          },
          py::arg("address"), py::arg("size_bytes"), py::arg("crc_slot") = PieceList::kNoCrc)
      .def(
          "add_device",
          [](PieceList& self, int device, uint64_t address, uint64_t size_bytes, uint32_t crc_slot) {
            self.AddDevice(DeviceOf(device), address, size_bytes, crc_slot);
          },
          py::arg("device"), py::arg("address"), py::arg("size_bytes"), py::arg("crc_slot") = PieceList::kNoCrc)
      .def("add_captured", &PieceList::AddCaptured, py::arg("snapshot"), py::arg("source"), py::arg("size_bytes"),
           py::arg("crc_slot") = PieceList::kNoCrc)
      .def("add_pulled", &PieceList::AddPulled, py::arg("id"), py::arg("size_bytes"),
           py::arg("crc_slot") = PieceList::kNoCrc)
      .def("add_crc", &PieceList::AddCrc, py::arg("crc_slot"))
      .def_property_readonly("size_bytes", &PieceList::size_bytes);
  BindZipRecords(m, pieces);
  BindHeldSources(m);

  py::class_<PyWriter>(m, "FileWriter")
      .def(py::init<TransferOptions, py::object, py::object>(), py::arg("options"), py::kw_only(),
           py::arg("pull") = py::none(), py::arg("poll") = py::none())
      .def("append", &PyWriter::Append, py::arg("pieces"))
      .def("seek", &PyWriter::Seek, py::arg("offset_bytes"))
      .def("finish", &PyWriter::Finish)
      .def("close", &PyWriter::Close)
      .def("runs", &PyWriter::runs)
      .def("crcs", &PyWriter::crcs, py::arg("count"))
      .def_property_readonly("position", &PyWriter::position)
      .def_property_readonly("engine", &PyWriter::engine_name)
      .def_property_readonly("demotions", [](const PyWriter& self) { return FileSystemTexts(self.demotions()); });

  py::class_<ExtentList>(m, "ExtentList")
      .def(py::init<>())
      .def("add_memory", &ExtentList::AddMemory, py::arg("offset_bytes"), py::arg("size_bytes"), py::arg("address"),
           py::arg("with_crc") = false, py::arg("fresh") = false)
      .def("add_device", &ExtentList::AddDevice, py::arg("offset_bytes"), py::arg("size_bytes"), py::arg("device"),
           py::arg("address"), py::arg("with_crc") = false)
      .def("add_pushed", &ExtentList::AddPushed, py::arg("offset_bytes"), py::arg("size_bytes"), py::arg("id"),
           py::arg("with_crc") = false)
      .def("add_checked", &ExtentList::AddChecked, py::arg("offset_bytes"), py::arg("size_bytes"))
      .def("__len__", [](const ExtentList& self) { return self.extents.size(); });

  py::class_<ReadReport>(m, "ReadReport")
      .def_readonly("crcs", &ReadReport::crcs)
      .def_readonly("engine", &ReadReport::engine)
      .def_property_readonly("demotions", [](const ReadReport& self) { return FileSystemTexts(self.demotions); });

  m.def("read_extents", &ReadExtents, py::arg("options"), py::arg("extents"), py::kw_only(),
        py::arg("push") = py::none(), py::arg("poll") = py::none());
  m.def("run_requests", &RunRequests, py::arg("fd"), py::arg("path"), py::arg("engines"), py::arg("requests"),
        py::arg("queue_depth") = 8, py::arg("thread_count") = 0);

  m.def(
      "allocate",
      [](int fd, uint64_t size_bytes, const std::string& path) {
        ThrowIfError(WithoutGil([&] { return Allocate(fd, size_bytes, path); }), path);
      },
      py::arg("fd"), py::arg("size_bytes"), py::arg("path"));
  py::class_<TorchFunctions, std::shared_ptr<TorchFunctions>>(m, "TorchFunctions")
      .def_static("find", &TorchFunctions::Find, py::arg("library"), py::arg("tensor"), py::arg("storage"),
                  py::arg("samples"));
  py::class_<TorchTypes>(m, "TorchTypes")
      .def(py::init<py::object, py::object, py::object, py::object, py::object, py::dict, py::object, py::object,
                    py::object, bool, std::shared_ptr<const TorchFunctions>>(),
           py::kw_only(), py::arg("tensor"), py::arg("parameter"), py::arg("storage"), py::arg("rebuild_parameter"),
           py::arg("ordered_dict"), py::arg("rebuild_by_dtype"), py::arg("is_ordinary"), py::arg("global_opcode"),
           py::arg("location_of"), py::arg("is_host_tagged_cpu"), py::arg("functions"));
  m.def("pickle_plain", &PicklePlain, py::arg("object"), py::arg("torch"));
  m.def("is_mount_point", &IsMountPoint, py::arg("path"));
  m.def(
      "exchange_names",
      [](const std::string& first, const std::string& second) {
        ThrowIfError(WithoutGil([&] { return ExchangeNames(first, second); }), second);
      },
      py::arg("first"), py::arg("second"));
  m.def(
      "rename_to_free_name",
      [](const std::string& source, const std::string& target) {
        ThrowIfError(WithoutGil([&] { return RenameToFreeName(source, target); }), target);
      },
      py::arg("source"), py::arg("target"));
  m.def("filesystem_type", &FilesystemTypeOf, py::arg("fd"));
  m.def("cached_bytes", &CachedBytesOf, py::arg("fd"));
  m.def(
      "direct_io_limits",
      [](int fd) {
        const DirectIoLimits limits = DirectIoLimitsOf(fd);
        return py::make_tuple(limits.supported, limits.memory_alignment_bytes, limits.offset_alignment_bytes,
                              limits.why_not);
      },
      py::arg("fd"));
  m.def("block_bytes", [](int fd) { return BlockBytesOf(DirectIoLimitsOf(fd)); }, py::arg("fd"));
  m.def("close_in_forked_child", &CloseInForkedChild, py::arg("fd"));
  m.def("forget_descriptor", &ForgetDescriptor, py::arg("fd"));

  py::class_<Prefault>(m, "Prefault")
      .def(py::init([](const std::vector<std::pair<uintptr_t, size_t>>& memory, const py::object& /*owner*/) {
             std::vector<std::span<std::byte>> ranges;
             ranges.reserve(memory.size());
             for (const auto& [address, size_bytes] : memory) {
               ranges.emplace_back(reinterpret_cast<std::byte*>(address), size_bytes);
             }
             return std::make_unique<Prefault>(std::move(ranges));
           }),
           py::arg("memory"), py::arg("owner"), py::keep_alive<1, 3>());

  m.def("crc32", &CrcOfBuffer, py::arg("data"), py::arg("crc") = 0);
  m.def("combine_runs", &CombineRuns, py::arg("runs"), py::arg("size_bytes"));
  m.def("combine_crc32", &CombineCrc32, py::arg("first"), py::arg("second"), py::arg("second_size_bytes"));
  m.def("crc32_implementation", &Crc32Implementation);

  m.def("compare_values", &CompareMemory, py::arg("dtype"), py::arg("a_address"), py::arg("b_address"),
        py::arg("count"));
  m.def("summarize_values", &SummarizeMemory, py::arg("dtype"), py::arg("address"), py::arg("count"));

  m.attr("NO_CRC") = PieceList::kNoCrc;
  m.def("engine_names", &EngineNames);
  m.def("ring_buffer_count", &RingBufferCount);
  m.def("ring_free_count", &RingFreeCount);
  m.def("ring_quarantined_count", &RingQuarantinedCount);

  BindCuFile(m);
  BindDevices(m);
  BindRandomAccess(m);
  BindRows(m);
  m.attr("HAS_FAULT_ENGINE") = g_bind_fault_plan != nullptr;
  if (g_bind_fault_plan != nullptr) g_bind_fault_plan(m);
}
