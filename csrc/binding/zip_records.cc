// Encodes headers, descriptors and directory entries of a torch zip's records, for many records in one call.
// fastpersist/formats/layout.py places the records, and torch_zip.py says what the bytes mean.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "binding/bindings.h"
#include "binding/tensor_questions.h"
#include "transfer/file_writer.h"
#include "transfer/snapshot.h"

namespace py = pybind11;

namespace fastpersist {
namespace {

constexpr uint64_t kZip32Limit = 0xFFFFFFFF;  // a size or offset from here on needs 64 bits
constexpr uint64_t kLocalHeaderBytes = 30;
constexpr uint64_t kFieldHeaderBytes = 4;
constexpr std::string_view kDescriptorMagic = "PK\x07\x08";
constexpr uint16_t kHasDescriptor = 0x0008;
constexpr uint16_t kNameIsUtf8 = 0x0800;
constexpr uint16_t kZip64Field = 0x0001;

// A layout.Record. The tuple that it was read from keeps its name alive.
struct Record {
  std::string_view name;
  uint64_t size_bytes;
  uint64_t header_offset_bytes;
  uint64_t data_offset_bytes;
  uint64_t descriptor_bytes;

  bool has_large_size() const { return size_bytes >= kZip32Limit; }
  bool has_large_offset() const { return header_offset_bytes >= kZip32Limit; }
  uint16_t flags() const { return size_bytes > 0 ? kNameIsUtf8 | kHasDescriptor : kNameIsUtf8; }
};

// Uses the C API directly: with thousands of records, pybind11's conversions take longer than everything else.
Record RecordOf(py::handle record) {
  PyObject* const fields = record.ptr();
  if (!PyTuple_Check(fields) || PyTuple_GET_SIZE(fields) != 5 || !PyBytes_Check(PyTuple_GET_ITEM(fields, 0))) {
    throw py::value_error("a record is a tuple of a name in bytes and four numbers");
  }
  PyObject* const name = PyTuple_GET_ITEM(fields, 0);
  return {.name = {PyBytes_AS_STRING(name), size_t(PyBytes_GET_SIZE(name))},
          .size_bytes = AsUnsigned(PyTuple_GET_ITEM(fields, 1)),
          .header_offset_bytes = AsUnsigned(PyTuple_GET_ITEM(fields, 2)),
          .data_offset_bytes = AsUnsigned(PyTuple_GET_ITEM(fields, 3)),
          .descriptor_bytes = AsUnsigned(PyTuple_GET_ITEM(fields, 4))};
}

// Append a number in little-endian bytes.
template <class Number>
void Put(std::string& out, Number value) {
  for (size_t byte = 0; byte < sizeof(Number); ++byte) out += static_cast<char>(value >> (8 * byte));
}

void PutLocalHeader(std::string& out, const Record& record) {
  std::string zip64;
  if (record.has_large_size()) {
    Put<uint64_t>(zip64, record.size_bytes);
    Put<uint64_t>(zip64, 0);
  }
  if (record.has_large_offset()) Put<uint64_t>(zip64, record.header_offset_bytes);
  const uint64_t zip64_bytes = zip64.empty() ? 0 : kFieldHeaderBytes + zip64.size();
  const uint64_t extra_bytes =
      record.data_offset_bytes - record.header_offset_bytes - kLocalHeaderBytes - record.name.size();
  if (extra_bytes < zip64_bytes + kFieldHeaderBytes || extra_bytes > UINT16_MAX) {
    throw py::value_error("the header of a record does not fit before its data");
  }
  const uint64_t padding_bytes = extra_bytes - zip64_bytes - kFieldHeaderBytes;
  out += "PK\x03\x04";
  Put<uint16_t>(out, 0);  // version
  Put<uint16_t>(out, record.flags());
  out.append(18, '\0');  // method, time, CRC, sizes
  Put(out, static_cast<uint16_t>(record.name.size()));
  Put(out, static_cast<uint16_t>(extra_bytes));
  out += record.name;
  if (!zip64.empty()) {
    Put(out, kZip64Field);
    Put(out, static_cast<uint16_t>(zip64.size()));
    out += zip64;
  }
  out += "FB";
  Put(out, static_cast<uint16_t>(padding_bytes));
  out.append(padding_bytes, 'Z');
}

// Append what follows the CRC in a descriptor: the size, twice.
void PutDescriptorTail(std::string& out, const Record& record) {
  if (record.descriptor_bytes == 0) return;
  for (int i = 0; i < 2; ++i) {
    if (record.descriptor_bytes == 24) {
      Put<uint64_t>(out, record.size_bytes);
    } else {
      Put(out, static_cast<uint32_t>(record.size_bytes));
    }
  }
}

void PutCentralEntry(std::string& out, const Record& record, uint32_t crc) {
  std::string zip64;
  if (record.has_large_size()) {
    Put<uint64_t>(zip64, record.size_bytes);
    Put<uint64_t>(zip64, record.size_bytes);
  }
  if (record.has_large_offset()) Put<uint64_t>(zip64, record.header_offset_bytes);
  const auto size32 = static_cast<uint32_t>(std::min(record.size_bytes, kZip32Limit));
  out += "PK\x01\x02";
  Put<uint32_t>(out, 0);  // versions
  Put<uint16_t>(out, record.flags());
  out.append(6, '\0');  // method, time
  Put(out, crc);
  Put(out, size32);
  Put(out, size32);
  Put(out, static_cast<uint16_t>(record.name.size()));
  Put(out, static_cast<uint16_t>(zip64.empty() ? 0 : kFieldHeaderBytes + zip64.size()));
  out.append(10, '\0');  // comment, disk, attributes
  Put(out, static_cast<uint32_t>(std::min(record.header_offset_bytes, kZip32Limit)));
  out += record.name;
  if (zip64.empty()) return;
  Put(out, kZip64Field);
  Put(out, static_cast<uint16_t>(zip64.size()));
  out += zip64;
}

// Add consecutive records to a list of pieces: header, data, descriptor. Their data are the sources from first_source
// on, either of a snapshot, or in host memory at these addresses.
void AddRecords(PieceList& pieces, const py::list& records, uint32_t first_source, bool with_crcs,
                const std::shared_ptr<Snapshot>& snapshot, const std::vector<uintptr_t>& addresses) {
  if (snapshot == nullptr && addresses.size() != records.size()) {
    throw py::value_error("each record needs an address, or a snapshot");
  }
  std::string between;  // the end of a descriptor, and the next header
  for (size_t index = 0; index < records.size(); ++index) {
    const Record record = RecordOf(records[index]);
    const auto source = static_cast<uint32_t>(first_source + index);
    const uint32_t slot = with_crcs ? source : PieceList::kNoCrc;
    PutLocalHeader(between, record);
    pieces.AddBytes(std::exchange(between, {}));
    if (snapshot != nullptr) {
      pieces.AddCaptured(snapshot, source, record.size_bytes, slot);
    } else {
      pieces.AddMemory(reinterpret_cast<const std::byte*>(addresses[index]), record.size_bytes, slot);
    }
    if (record.descriptor_bytes == 0) continue;
    between += kDescriptorMagic;
    if (with_crcs) {
      pieces.AddBytes(std::exchange(between, {}));
      pieces.AddCrc(slot);
    } else {
      Put<uint32_t>(between, 0);
    }
    PutDescriptorTail(between, record);
  }
  if (!between.empty()) pieces.AddBytes(std::move(between));
}

using Crcs = std::vector<uint32_t>;

// Returns the bytes that one of the functions above appends for a record.
template <class Put>
auto Encoding(Put put) {
  return [put](const py::tuple& record) {
    std::string out;
    put(out, RecordOf(record));
    return py::bytes(out);
  };
}

// The same for many records, each with its CRC.
template <class Put>
auto EncodingAll(Put put) {
  return [put](const py::list& records, const Crcs& crcs) {
    if (records.size() != crcs.size()) throw py::value_error("each record needs a CRC");
    std::string out;
    for (size_t index = 0; index < records.size(); ++index) put(out, RecordOf(records[index]), crcs[index]);
    return py::bytes(out);
  };
}

void PutContents(std::string& out, const Record& record, uint32_t crc) {
  out += record.name;
  out += ' ' + std::to_string(record.size_bytes) + ' ' + std::to_string(crc) + '\n';
}

}  // namespace

void BindZipRecords(py::module_& m, py::class_<PieceList>& pieces) {
  m.def("zip_local_header", Encoding(PutLocalHeader), py::arg("record"));
  m.def("zip_descriptor_tail", Encoding(PutDescriptorTail), py::arg("record"));
  m.def("zip_central_entries", EncodingAll(PutCentralEntry), py::arg("records"), py::arg("crcs"));
  m.def("zip_contents", EncodingAll(PutContents), py::arg("records"), py::arg("crcs"));
  pieces.def("add_records", &AddRecords, py::arg("records"), py::arg("first_source"), py::arg("with_crcs"),
             py::arg("snapshot"), py::arg("addresses"));
}

}  // namespace fastpersist
