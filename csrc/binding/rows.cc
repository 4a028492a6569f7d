// RowStore and its requests, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "binding/bindings.h"
#include "binding/dense_tensor.h"
#include "binding/errors.h"
#include "binding/gil.h"
#include "binding/tensor_questions.h"
#include "binding/waiting.h"
#include "core/fork.h"
#include "device/pinning.h"
#include "device/row_kernel.h"
#include "rows/store.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

std::span<const int64_t> IdsAt(uintptr_t address, size_t count) {
  return {reinterpret_cast<const int64_t*>(address), count};
}

// Finds the memory of ids and of the tensor for their rows in half a microsecond, where the checks in Python take five:
// of plain tensors in host memory, if DLPack describes them.
class [[gnu::visibility("hidden")]] PlainRows {
 public:
  // `row`: a tensor with the shape and the dtype of the table's rows.
  PlainRows(const py::type& tensor, const py::type& storage, py::object row)
      : tensor_(tensor),
        row_(std::move(row)),
        tensors_(tensor),
        dtype_(tensor, "dtype"),
        is_neg_(tensor, "is_neg"),
        requires_grad_(tensor, "requires_grad"),
        storage_offset_(tensor, "storage_offset"),
        untyped_storage_(tensor, "untyped_storage"),
        bytes_of_storage_(storage, "nbytes") {}

  struct Memory {
    std::span<const int64_t> ids;
    std::span<std::byte> rows;
  };
  // Returns nothing unless these are int64 ids and a tensor of the shape and dtype of their rows, both of type
  // torch.Tensor, contiguous and with their values in memory, which they do not share, and the rows need no gradient.
  std::optional<Memory> MemoryOf(PyObject* ids, PyObject* rows) const {
    DenseTensor of_ids{}, of_rows{}, of_row{};
    if (!IsPlain(ids, of_ids) || !IsPlain(rows, of_rows) || !tensors_.Describe(row_.ptr(), of_row)) return {};
    if (of_ids.type_code != DenseTensor::kSignedInteger || of_ids.type_bits != 64) return {};
    if (dtype_.Of(rows).ptr() != dtype_.Of(row_.ptr()).ptr()) return {};
    const size_t id_dims = of_ids.shape().size();
    if (of_rows.shape().size() != id_dims + of_row.shape().size() ||
        !std::ranges::equal(of_rows.shape().first(id_dims), of_ids.shape()) ||
        !std::ranges::equal(of_rows.shape().subspan(id_dims), of_row.shape()) || requires_grad_.IsTrueOf(rows)) {
      return {};
    }
    const uint64_t element_bytes = uint64_t{of_rows.type_bits} * of_rows.type_lanes / 8;
    const uint64_t size_bytes = of_rows.ElementCount() * element_bytes;
    const py::object storage = untyped_storage_.Of(rows);  // which may have been made smaller than the tensor
    const uint64_t offset_bytes = AsUnsigned(storage_offset_.Of(rows)) * element_bytes;
    if (offset_bytes + size_bytes > AsUnsigned(bytes_of_storage_.Of(storage.ptr()))) return {};
    const Memory found = {IdsAt(of_ids.address(), of_ids.ElementCount()),
                          {reinterpret_cast<std::byte*>(of_rows.address()), size_bytes}};
    const bool share = of_ids.address() < of_rows.address() + size_bytes &&
                       of_rows.address() < of_ids.address() + found.ids.size_bytes();
    return share ? std::nullopt : std::optional(found);
  }

 private:
  // Complex tensors are left out, and those with the negative bit: their values may not be those in memory.
  bool IsPlain(PyObject* object, DenseTensor& found) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == tensor_.ptr() && tensors_.Describe(object, found) &&
           found.device_kind == DenseTensor::kHost && found.type_code != DenseTensor::kComplex &&
           found.address() != 0 && found.IsContiguous() && !is_neg_.IsTrueOf(object);
  }

  const py::type tensor_;
  const py::object row_;
  const DenseTensors tensors_;
  const Asked dtype_, is_neg_, requires_grad_, storage_offset_, untyped_storage_, bytes_of_storage_;
};

// In a forked child: keep an object of the parent alive until the child ends.
void LeaveAlone(std::shared_ptr<void> object) noexcept {
  static auto* const kept = new std::vector<std::shared_ptr<void>>;  // NOLINT(bugprone-unhandled-exception-at-new)
  kept->push_back(std::move(object));
}

// A request, and the owner of its result. The destructor first cancels the request, so no thread writes to the memory
// later.
class PyRowRequest {
 public:
  PyRowRequest(std::shared_ptr<RowRequest> request, py::object owner)
      : request_(std::move(request)), owner_(std::move(owner)) {}
  // In a forked child the request is not touched: a thread of the parent may have held its mutex.
  ~PyRowRequest() {
    if (generation_ == ForkGeneration()) {
      Cancel("the request for rows was dropped");
    } else {
      LeaveAlone(std::move(request_));
    }
  }
  PyRowRequest(const PyRowRequest&) = delete;
  PyRowRequest& operator=(const PyRowRequest&) = delete;

  bool done() const { return request_->done(); }
  bool Wait(const std::optional<double>& timeout_s) const {
    if (request_->done()) return true;
    return WaitWithSignals(timeout_s, [this](std::chrono::milliseconds time) { return request_->WaitFor(time); });
  }
  void RaiseFailure() const {
    const Status& status = request_->status();
    // This is no interruption, which would raise its own exception: the caller asks for rows of a cancelled request.
    if (status.code() == StatusCode::kCancelled)
      Throw(Status::Error(StatusCode::kInvalidArgument, status.message()), {});
    ThrowIfError(status, request_->failed_path());
  }
  void WaitAndRaise() const {
    Wait({});
    RaiseFailure();
  }
  void Cancel(const std::string& why) const {
    const ReleasedGil released;
    request_->Cancel(Status::Error(StatusCode::kCancelled, why));
  }

 private:
  const uint64_t generation_ = ForkGeneration();
  std::shared_ptr<RowRequest> request_;
  const py::object owner_;
};

// Where a device puts cached rows of some ids.
struct DeviceGather {
  std::span<const int64_t> ids;
  uint32_t batch;
  int32_t* scratch;  // pinned, for two numbers of each id
  int64_t* others;   // gets the places of the ids that are not cached
  CudaAddress target;
  uintptr_t stream;
  size_t found_count_min;  // if fewer are cached, none is taken
};

// Let a device copy cached rows, and wait for it. Returns how many ids are left: all, if it took none.
Result<size_t> GatherCached(RowStore& store, Device& device, const DeviceGather& of) {
  Result<RowKernel> kernel = RowKernel::Load(device, store.table().row_bytes());
  if (!kernel.ok()) return kernel.status();
  const uint32_t slot_count = store.PinCache(PinFor(device));
  if (slot_count == 0) return of.ids.size();
  const auto start = [&](std::span<const int32_t> slots, const int32_t* places) {
    return kernel.value().Start(of.stream, store.cache_bytes(), of.target, slots, places);
  };
  // However this function ends, nothing reads the rows any more when the hold ends.
  struct Hold {
    ~Hold() {
      waited = kernel.Wait(stream);
      store.EndHold(number, waited.ok() ? found_count : 0);
    }
    RowStore& store;
    const RowKernel kernel;
    const uintptr_t stream;
    const uint16_t number;
    Status& waited;
    size_t found_count = 0;
  };
  Status waited;
  std::vector<int64_t> others;
  size_t found_count = 0;
  {
    Hold hold = {store, kernel.value(), of.stream, store.BeginHold(of.batch), waited};
    Result<std::vector<int64_t>> found =
        store.Hold(of.ids, of.batch, slot_count, of.scratch, of.scratch + of.ids.size(), start);
    if (!found.ok()) return found.status();
    others = std::move(found).value();
    found_count = of.ids.size() - others.size();
    if (found_count < of.found_count_min) found_count = 0;
    hold.found_count = found_count;
  }
  FP_RETURN_IF_ERROR(waited);
  if (found_count == 0) return of.ids.size();
  std::ranges::copy(others, of.others);
  return others.size();
}

class PyRowStore {
 public:
  using Piece = std::tuple<int, std::string, uint64_t, uint64_t>;  // descriptor, path, offset, rows

  PyRowStore(const std::vector<Piece>& pieces, uint32_t row_bytes, std::pair<uintptr_t, size_t> positions,
             py::object owner, RowStoreOptions options)
      : owner_(std::move(owner)) {
    std::vector<RowPiece> its;
    its.reserve(pieces.size());
    for (const auto& [fd, path, offset_bytes, row_count] : pieces) its.push_back({fd, path, offset_bytes, row_count});
    path_ = its.front().path;
    RowTable table(std::move(its), row_bytes, IdsAt(positions.first, positions.second));
    Result<std::unique_ptr<RowStore>> opened =
        WithoutGil([&] { return RowStore::Open(std::move(table), std::move(options)); });
    ThrowIfError(opened.status(), path_);
    store_ = std::shared_ptr<RowStore>(std::move(opened).value().release(), [gone = gone_](RowStore* store) {
      delete store;
      gone->set_value();
    });
  }
  ~PyRowStore() { Close(); }
  PyRowStore(const PyRowStore&) = delete;
  PyRowStore& operator=(const PyRowStore&) = delete;

  size_t FirstBadId(uintptr_t ids, size_t count) const {
    return WithStore([&](RowStore& store) { return store.table().FirstBadId(IdsAt(ids, count)); });
  }

  std::unique_ptr<PyRowRequest> Start(uintptr_t ids, size_t count, uintptr_t result, uint32_t batch, py::object owner) {
    return std::make_unique<PyRowRequest>(WithStore([&](RowStore& store) {
                                            return store.Start(IdsAt(ids, count), reinterpret_cast<std::byte*>(result),
                                                               batch);
                                          }),
                                          std::move(owner));
  }

  // Starts a request and waits for it. If the wait is interrupted, nothing is written to the result any more.
  void Bring(uintptr_t ids, size_t count, uintptr_t result, uint32_t batch, py::object owner) {
    Start(ids, count, result, batch, std::move(owner))->WaitAndRaise();
  }

  // Does the same for plain tensors. Returns false, and does nothing, if these are none or an id is no row.
  bool BringPlain(const PlainRows& plain, const py::object& ids, const py::object& rows) {
    const std::optional<PlainRows::Memory> memory = plain.MemoryOf(ids.ptr(), rows.ptr());
    if (!memory.has_value()) return false;
    std::shared_ptr<RowRequest> started = WithStore([&](RowStore& store) -> std::shared_ptr<RowRequest> {
      const size_t count = memory->ids.size();
      if (memory->rows.size() != count * store.table().row_bytes()) return nullptr;
      if (store.table().FirstBadId(memory->ids) < count) return nullptr;
      return store.Start(memory->ids, memory->rows.data(), RowRequest::kNoBatch);
    });
    if (started == nullptr) return false;
    PyRowRequest(std::move(started), rows).WaitAndRaise();
    return true;
  }

  void Register(uintptr_t ids, size_t count, uint32_t batch) const {
    WithStore([&](RowStore& store) { store.Register(IdsAt(ids, count), batch); });
  }
  size_t Keep(uintptr_t ids, size_t count) const {
    return WithStore([&](RowStore& store) { return store.Keep(IdsAt(ids, count)); });
  }
  uint32_t CountKept() const {
    return WithStore([](RowStore& store) { return store.CountKept(); });
  }
  void Unregister(uintptr_t ids, size_t count, uint32_t batch) const {
    WithStore([&](RowStore& store) { store.Unregister(IdsAt(ids, count), batch); });
  }

  size_t GatherCached(int ordinal, uint32_t batch, uintptr_t ids, size_t count, uintptr_t scratch, uintptr_t others,
                      CudaAddress target, uintptr_t stream, size_t found_count_min) const {
    Device& device = DeviceOf(ordinal);
    const DeviceGather of = {.ids = IdsAt(ids, count),
                             .batch = batch,
                             .scratch = reinterpret_cast<int32_t*>(scratch),
                             .others = reinterpret_cast<int64_t*>(others),
                             .target = target,
                             .stream = stream,
                             .found_count_min = found_count_min};
    Result<size_t> left = WithStore([&](RowStore& store) { return fastpersist::GatherCached(store, device, of); });
    ThrowIfError(left.status(), path_);
    return left.value();
  }

  py::dict stats() const {
    const RowStoreStats stats = WithStore([](RowStore& store) { return store.stats(); });
    py::dict found;
    found["row_count"] = stats.row_count;
    found["hit_count"] = stats.hit_count;
    found["shared_count"] = stats.shared_count;
    found["read_count"] = stats.read_count;
    found["read_bytes"] = stats.read_bytes;
    found["cached_count"] = stats.cached_count;
    found["slot_count"] = stats.slot_count;
    return found;
  }
  std::string engine() const {
    return WithStore([](RowStore& store) { return store.engine_name(); });
  }
  py::list demotions() const {
    return FileSystemTexts(WithStore([](RowStore& store) { return store.demotions(); }));
  }

  // Fail all requests; wait for the kernel and for other threads, so that the descriptors may be closed. May be called
  // again.
  void Close() {
    std::shared_ptr<RowStore> last = std::move(store_);
    store_ = nullptr;
    if (last == nullptr) return;
    if (generation_ != ForkGeneration()) {
      LeaveAlone(std::move(last));
      return;
    }
    const ReleasedGil released;
    last.reset();
    gone_->get_future().wait();
  }

 private:
  // Guarded by the GIL, as store_ is.
  std::shared_ptr<RowStore> store() const {
    if (store_ == nullptr) Throw(Status::Error(StatusCode::kInvalidArgument, path_ + " is closed"), path_);
    return store_;
  }
  template <class Call>
  std::invoke_result_t<Call, RowStore&> WithStore(Call call) const {
    std::shared_ptr<RowStore> open = store();
    const ReleasedGil released;
    const std::shared_ptr<RowStore> used = std::move(open);  // the last user destroys the store, without the GIL
    return call(*used);
  }

  const std::shared_ptr<std::promise<void>> gone_ = std::make_shared<std::promise<void>>();  // set when the store ends
  const uint64_t generation_ = ForkGeneration();
  const py::object owner_;  // the owner of the positions
  std::string path_;
  std::shared_ptr<RowStore> store_;  // guarded by the GIL
};

}  // namespace

void BindRows(py::module_& m) {
  py::class_<PyRowRequest>(m, "RowRequest")
      .def("done", &PyRowRequest::done)
      .def("wait", &PyRowRequest::Wait, py::arg("timeout_s") = py::none())
      .def("raise_failure", &PyRowRequest::RaiseFailure)
      .def("cancel", &PyRowRequest::Cancel, py::arg("why"));

  py::class_<PlainRows>(m, "PlainRows")
      .def(py::init<py::type, py::type, py::object>(), py::arg("tensor"), py::arg("storage"), py::arg("row"));

  py::class_<PyRowStore>(m, "RowStore")
      .def(py::init([](const std::vector<PyRowStore::Piece>& pieces, uint32_t row_bytes,
                       std::pair<uintptr_t, size_t> positions, py::object owner, std::vector<std::string> engines,
                       uint32_t queue_depth, uint32_t thread_count, uint64_t cache_bytes, uint32_t gap_bytes,
                       uint32_t copy_thread_count) {
             return std::make_unique<PyRowStore>(pieces, row_bytes, positions, std::move(owner),
                                                 RowStoreOptions{.reader = {.engines = std::move(engines),
                                                                            .queue_depth = queue_depth,
                                                                            .thread_count = thread_count},
                                                                 .cache_bytes = cache_bytes,
                                                                 .gap_bytes = gap_bytes,
                                                                 .copy_thread_count = copy_thread_count});
           }),
           py::kw_only(), py::arg("pieces"), py::arg("row_bytes"), py::arg("positions"), py::arg("owner"),
           py::arg("engines"), py::arg("queue_depth"), py::arg("thread_count"), py::arg("cache_bytes"),
           py::arg("gap_bytes"), py::arg("copy_thread_count"))
      .def("first_bad_id", &PyRowStore::FirstBadId, py::arg("ids"), py::arg("count"))
      .def("start", &PyRowStore::Start, py::arg("ids"), py::arg("count"), py::arg("result"), py::arg("batch"),
           py::arg("owner"))
      .def("bring", &PyRowStore::Bring, py::arg("ids"), py::arg("count"), py::arg("result"), py::arg("batch"),
           py::arg("owner"))
      .def("bring_plain", &PyRowStore::BringPlain, py::arg("plain"), py::arg("ids"), py::arg("rows"))
      .def("register", &PyRowStore::Register, py::arg("ids"), py::arg("count"), py::arg("batch"))
      .def("unregister", &PyRowStore::Unregister, py::arg("ids"), py::arg("count"), py::arg("batch"))
      .def("keep", &PyRowStore::Keep, py::arg("ids"), py::arg("count"))
      .def("count_kept", &PyRowStore::CountKept)
      .def("gather_cached", &PyRowStore::GatherCached, py::arg("device"), py::arg("batch"), py::arg("ids"),
           py::arg("count"), py::arg("scratch"), py::arg("others"), py::arg("target"), py::arg("stream"),
           py::arg("found_count_min"))
      .def("stats", &PyRowStore::stats)
      .def("close", &PyRowStore::Close)
      .def_property_readonly("engine", &PyRowStore::engine)
      .def_property_readonly("demotions", &PyRowStore::demotions);
  m.attr("KEEP_BATCH") = RowRequest::kKeep;
}

}  // namespace fastpersist
