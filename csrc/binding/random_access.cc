// RandomAccess, its requests, and page-locked memory, for Python. Waits handle signals: Ctrl-C ends the wait, not the
// request.
#include "transfer/random_access.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/bindings.h"
#include "binding/errors.h"
#include "binding/gil.h"
#include "binding/waiting.h"
#include "core/file.h"
#include "core/fork.h"
#include "core/memory.h"
#include "transfer/edge_lock.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

using std::chrono::milliseconds;

// Whether requests never drop the owners of their memory. Guarded by the GIL.
bool owners_stay = false;

// A request, the path for its errors, and the owner of its memory. The owner needs the GIL.
struct PyRequest {
  std::shared_ptr<FileRequest> request;
  std::string path;
  py::object memory_owner;

  bool done() const { return request->done(); }
  void RaiseFailure() const {
    const Status& status = request->status();
    if (status.ok()) return;
    request->SetTold();
    if (status.code() != StatusCode::kDeviceError) Throw(status, path);
    // Errors of devices name no file.
    const uint64_t offset_bytes = request->failed_part().offset_bytes + request->failed_part_done_bytes();
    const std::string what = request->op() == IoOp::kRead ? "reading " : "writing ";
    Throw(Status::Error(status.code(),
                        what + path + " at offset " + std::to_string(offset_bytes) + ": " + status.message()),
          path);
  }
  // Drop the owner of the memory; its destructor may run code that calls back here. REQUIRES: the GIL is held.
  void LetGo() {
    // At the end of Python, a thread that frees a tensor would end the process with std::terminate: torch releases the
    // GIL for this, and takes it back with the guards that gil.h describes.
    if (owners_stay) memory_owner.release();
    request->Drop();
    const py::object last = std::exchange(memory_owner, py::none());
  }
  // Where a read met the end of the file: offset, bytes read, bytes requested.
  std::optional<std::tuple<uint64_t, uint64_t, uint64_t>> ended_early() const {
    if (request->status().code() != StatusCode::kEndOfFile) return std::nullopt;
    const FilePart& part = request->failed_part();
    return std::tuple(part.offset_bytes, request->failed_part_done_bytes(), part.size_bytes);
  }
};

// References to every request that may still run: its caller may drop it, or be interrupted before it is returned,
// while the kernel uses its memory. All functions need the GIL. Leaked on purpose, like the requests of a forked
// child's parent.
class OpenRequests {
 public:
  static void Add(const std::shared_ptr<PyRequest>& request) {
    OpenRequests& own = Own();
    own.requests_.push_back(request);
    if (own.requests_.size() >= own.next_look_count_) Forget();
  }

  // Drop the requests that are done.
  static void Forget() {
    OpenRequests& own = Own();
    std::vector<std::shared_ptr<PyRequest>> done;  // destroyed last: its members may run code that calls back here
    std::erase_if(own.requests_, [&done](const std::shared_ptr<PyRequest>& request) {
      if (!request->done()) return false;
      done.push_back(request);
      return true;
    });
    own.next_look_count_ = std::max<size_t>(64, 2 * own.requests_.size());  // keeps the cost per request small
    for (const std::shared_ptr<PyRequest>& request : done) request->LetGo();
  }

 private:
  static OpenRequests& Own() {
    static auto* const of_generations = new std::vector<OpenRequests*>{new OpenRequests};
    static uint64_t generation = ForkGeneration();
    if (generation != ForkGeneration()) {
      of_generations->push_back(new OpenRequests);
      generation = ForkGeneration();
    }
    return *of_generations->back();
  }

  std::vector<std::shared_ptr<PyRequest>> requests_;
  size_t next_look_count_ = 64;
};

class PyRandomAccess {
 public:
  explicit PyRandomAccess(RandomAccessOptions options) : path_(options.path) {
    Result<std::unique_ptr<RandomAccess>> opened = WithoutGil([&] { return RandomAccess::Open(std::move(options)); });
    ThrowIfError(opened.status(), path_);
    file_ = std::move(opened).value();
  }
  ~PyRandomAccess() { Close(); }
  PyRandomAccess(const PyRandomAccess&) = delete;
  PyRandomAccess& operator=(const PyRandomAccess&) = delete;

  // Starts each slice before it asks `slices` for the next. If the iteration raises, waits for the started ones, or
  // until a signal's handler raises.
  std::shared_ptr<PyRequest> Submit(bool write, const py::iterable& slices, py::object memory_owner) {
    const std::shared_ptr<RandomAccess> open = file();
    const auto request = std::make_shared<PyRequest>(
        PyRequest{open->Begin(write ? IoOp::kWrite : IoOp::kRead), path_, std::move(memory_owner)});
    OpenRequests::Add(request);
    bool has_owner = false;
    try {
      for (const py::handle slice : slices) {
        std::vector<FilePart> parts;
        if (py::isinstance<py::tuple>(slice)) {
          const auto [device, its_parts] = slice.cast<std::tuple<int, py::object>>();
          parts = PartsOf(its_parts);
          Device& owner = DeviceOf(device);
          for (FilePart& part : parts) part.device = &owner;
          if (!std::exchange(has_owner, true)) request->request->Keep(Shared(request->memory_owner));
        } else {
          parts = PartsOf(slice);
        }
        const ReleasedGil released;
        open->Add(request->request, std::move(parts));
      }
    } catch (...) {
      open->End(request->request);
      WaitWithSignals(std::nullopt, [&request](milliseconds time) { return request->request->WaitFor(time); });
      throw;
    }
    open->End(request->request);
    return request;
  }

  // From now on, copies that a device has not completed within the grace time fail.
  void GiveUpOnDevices() {
    const std::shared_ptr<RandomAccess> open = file();
    const ReleasedGil released;
    open->GiveUpOnDevices();
  }

  bool WaitForAll(const std::optional<double>& timeout_s) {
    const std::shared_ptr<RandomAccess> open = file();
    return WaitWithSignals(timeout_s, [&open](milliseconds time) { return open->WaitForAll(time); });
  }

  // The failed writes whose failure was not raised yet.
  std::vector<std::shared_ptr<PyRequest>> TakeFailedWrites() {
    std::vector<std::shared_ptr<PyRequest>> found;
    for (const std::shared_ptr<FileRequest>& request : file()->TakeFailedWrites()) {
      if (!request->told()) found.push_back(std::make_shared<PyRequest>(PyRequest{request, path_, py::none()}));
    }
    return found;
  }

  void RaiseLostWrites() const { ThrowIfError(file()->WrittenBack(), path_); }

  // Wait for all requests. May be called again.
  void Close() {
    if (file_ == nullptr) return;
    if (generation_ != ForkGeneration()) {
      // The parent's locks may be held for ever here, so never destroy it.
      static auto* const left_alone = new std::vector<std::shared_ptr<RandomAccess>>;
      left_alone->push_back(std::move(file_));
      file_ = nullptr;
      return;
    }
    engine_name_ = file_->engine_name();
    demotions_ = file_->demotions();
    std::shared_ptr<RandomAccess> last = std::move(file_);
    file_ = nullptr;
    const ReleasedGil released;
    last->GiveUpOnDevices();
    // Another thread may hold a reference too; descriptors must not be closed while the kernel uses them.
    while (!last->WaitForAll(std::chrono::hours(1))) continue;
    last.reset();
  }

  std::string engine_name() const { return file_ == nullptr ? engine_name_ : file_->engine_name(); }
  py::list demotions() const { return FileSystemTexts(file_ == nullptr ? demotions_ : file_->demotions()); }

 private:
  std::vector<FilePart> PartsOf(const py::handle& slice) const {
    const auto tuples = slice.cast<std::vector<std::tuple<uintptr_t, uint64_t, uint64_t>>>();
    std::vector<FilePart> parts;
    parts.reserve(tuples.size());
    for (const auto& [address, size_bytes, offset_bytes] : tuples) {
      if (offset_bytes > INT64_MAX || size_bytes > INT64_MAX - offset_bytes) {
        Throw(Status::Error(StatusCode::kInvalidArgument, std::to_string(size_bytes) + " bytes at offset " +
                                                              std::to_string(offset_bytes) + " of " + path_ +
                                                              " lie beyond any possible end of a file"),
              path_);
      }
      parts.push_back({reinterpret_cast<std::byte*>(address), size_bytes, offset_bytes});
    }
    return parts;
  }

  // Guarded by the GIL, as file_ is.
  std::shared_ptr<RandomAccess> file() const {
    if (file_ == nullptr) Throw(Status::Error(StatusCode::kInvalidArgument, path_ + " is closed"), path_);
    return file_;
  }

  const uint64_t generation_ = ForkGeneration();
  const std::string path_;
  std::shared_ptr<RandomAccess> file_;
  std::string engine_name_;
  std::vector<std::string> demotions_;
};

}  // namespace

void BindRandomAccess(py::module_& m) {
  py::class_<PyRequest, std::shared_ptr<PyRequest>>(m, "FileRequest")
      .def("done", &PyRequest::done)
      .def("let_go", &PyRequest::LetGo)
      .def(
          "wait",
          [](const PyRequest& self, const std::optional<double>& timeout_s) {
            return WaitWithSignals(timeout_s, [&self](milliseconds time) { return self.request->WaitFor(time); });
          },
          py::arg("timeout_s") = py::none())
      .def("raise_failure", &PyRequest::RaiseFailure)
      .def_property_readonly("ended_early", &PyRequest::ended_early)
      .def_property_readonly("failed_count", [](const PyRequest& self) { return self.request->failed_count(); })
      .def_property_readonly("done_bytes", [](const PyRequest& self) { return self.request->done_bytes(); });

  py::class_<PyRandomAccess>(m, "RandomAccess")
      .def(py::init([](int fd, int buffered_fd, int direct_lock_fd, int edge_lock_fd, std::string path,
                       std::vector<std::string> engines, std::vector<std::string> edge_engines, uint32_t queue_depth,
                       uint32_t thread_count, uint64_t chunk_bytes, uint64_t staging_bytes) {
             return std::make_unique<PyRandomAccess>(RandomAccessOptions{.fd = fd,
                                                                         .buffered_fd = buffered_fd,
                                                                         .direct_lock_fd = direct_lock_fd,
                                                                         .edge_lock_fd = edge_lock_fd,
                                                                         .path = std::move(path),
                                                                         .engines = std::move(engines),
                                                                         .edge_engines = std::move(edge_engines),
                                                                         .queue_depth = queue_depth,
                                                                         .thread_count = thread_count,
                                                                         .chunk_bytes = chunk_bytes,
                                                                         .staging_bytes = staging_bytes});
           }),
           py::kw_only(), py::arg("fd"), py::arg("buffered_fd"), py::arg("direct_lock_fd"), py::arg("edge_lock_fd"),
           py::arg("path"), py::arg("engines"), py::arg("edge_engines"), py::arg("queue_depth"),
           py::arg("thread_count"), py::arg("chunk_bytes"), py::arg("staging_bytes"))
      .def("submit", &PyRandomAccess::Submit, py::arg("write"), py::arg("slices"), py::arg("memory_owner"))
      .def("wait_for_all", &PyRandomAccess::WaitForAll, py::arg("timeout_s") = py::none())
      .def("give_up_on_devices", &PyRandomAccess::GiveUpOnDevices)
      .def("take_failed_writes", &PyRandomAccess::TakeFailedWrites)
      .def("raise_lost_writes", &PyRandomAccess::RaiseLostWrites)
      .def("close", &PyRandomAccess::Close)
      .def_property_readonly("engine", &PyRandomAccess::engine_name)
      .def_property_readonly("demotions", &PyRandomAccess::demotions);

  py::class_<LockedMemory>(m, "LockedMemory", py::buffer_protocol())
      .def(py::init([](size_t size_bytes) {
             if (size_bytes == 0) Throw(Status::Error(StatusCode::kInvalidArgument, "there is nothing to lock"), "");
             Result<std::unique_ptr<LockedMemory>> made = WithoutGil([&] { return LockedMemory::Create(size_bytes); });
             ThrowIfError(made.status(), "");
             return std::move(made).value();
           }),
           py::arg("size_bytes"))
      .def_buffer([](LockedMemory& self) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(self.address()), static_cast<py::ssize_t>(self.size_bytes()));
      })
      .def_property_readonly("address",
                             [](const LockedMemory& self) { return reinterpret_cast<uintptr_t>(self.address()); })
      .def_property_readonly("size_bytes", &LockedMemory::size_bytes);

  m.def("has_edge_locks", &EdgeLock::Works, py::arg("fd"));
  m.def("forget_done_requests", &OpenRequests::Forget);
  m.def("keep_owners", [] { owners_stay = true; });
  m.def(
      "allocate_alone",
      [](int lock_fd, int fd, uint64_t offset_bytes, uint64_t size_bytes, const std::string& path) {
        ThrowIfError(WithoutGil([&] { return AllocateAlone(lock_fd, fd, offset_bytes, size_bytes, path); }), path);
      },
      py::arg("lock_fd"), py::arg("fd"), py::arg("offset_bytes"), py::arg("size_bytes"), py::arg("path"));
  m.def(
      "truncate_alone",
      [](int lock_fd, int fd, uint64_t size_bytes, const std::string& path) {
        ThrowIfError(WithoutGil([&] { return TruncateAlone(lock_fd, fd, size_bytes, path); }), path);
      },
      py::arg("lock_fd"), py::arg("fd"), py::arg("size_bytes"), py::arg("path"));
}

}  // namespace fastpersist
