"""Storages and tensors are found in what torch.save writes, in torch's order and under torch's names."""

from __future__ import annotations

import collections
import io
import pickle
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from fastpersist.errors import FormatError
from fastpersist.formats.pickle_scan import (
    DTYPE_ITEMSIZE_BYTES,
    Call,
    StorageReference,
    SymbolicTensor,
    UnsupportedPickle,
    iter_tensors,
    scan_pickle,
    storage_references,
)

# torch says "beta", "prototype" and "deprecated" when some of the tensors below are made.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def saved(value: object, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=protocol)
    return file.getvalue()


def data_pkl(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        return next(records.read(name) for name in records.namelist() if name.endswith("/data.pkl"))


def asked_by_unpickler(archive: bytes) -> list[StorageReference]:
    """Load with torch.load and record each persistent id that its unpickler asks for."""
    asked: list[StorageReference] = []

    class RecordingUnpickler(pickle._Unpickler):
        @property
        def persistent_load(self) -> Callable[[object], object]:
            return self._recorded

        @persistent_load.setter
        def persistent_load(self, load: Callable[[object], object]) -> None:
            def recorded(saved_id: tuple[str, type, str, str, int]) -> object:
                _, storage_class, key, location, numel = saved_id
                is_untyped = storage_class is torch.UntypedStorage
                dtype = torch.uint8 if is_untyped else storage_class.dtype
                asked.append(StorageReference(str(dtype).removeprefix("torch."), key, location, numel))
                return load(saved_id)

            self._recorded = recorded

    module = types.ModuleType("recording_pickle")
    module.Unpickler = RecordingUnpickler
    module.load = pickle.load
    torch.load(io.BytesIO(archive), weights_only=False, pickle_module=module)
    return asked


def named(value: object, protocol: int = 2) -> list[tuple[str, SymbolicTensor]]:
    return list(iter_tensors(scan_pickle(data_pkl(saved(value, protocol))).root))


class Subclass(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    """A tensor without a storage: its data is another tensor, in an attribute."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@dataclass
class Record:
    tensor: torch.Tensor
    others: dict[str, torch.Tensor] = field(default_factory=dict)


class Slotted:
    __slots__ = ("tensor",)


Pair = collections.namedtuple("Pair", "left right")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(3.0))
        self.loose = [torch.ones(1)]


def optimizer_state() -> dict[str, object]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def with_attribute() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.companion = torch.ones(3)
    return tensor


def parameter_with_attribute() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2), requires_grad=False)
    parameter.main_grad = torch.ones(2)
    return parameter


def views() -> list[torch.Tensor]:
    base = torch.arange(12.0).reshape(3, 4)
    return [base, base.t(), base[1:, 2:], base[2], base.flatten()[5]]


def slotted() -> Slotted:
    value = Slotted()
    value.tensor = torch.zeros(1)
    return value


def self_containing() -> list[object]:
    value: list[object] = [torch.zeros(1)]
    value.append({"again": value, "other": torch.ones(2)})
    return value


def quantized_per_channel() -> torch.Tensor:
    return torch.quantize_per_channel(torch.zeros(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)


def nested_strided() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)])


def nested_jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


tied = torch.zeros(2, 2)
shared_dict = {"weight": torch.zeros(1)}

# What is saved, and the names of the tensors in it.
CASES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "tensor": (lambda: torch.zeros(2, 3), [""]),
    "scalars": (lambda: {"a": 1, "b": [2.5, None]}, []),
    "nested dicts": (
        lambda: {
            "a": {"b": torch.zeros(1), 3: torch.zeros(2)},
            ("x", 1): torch.zeros(3),
            None: [torch.zeros(4)],
        },
        ["a.b", "a[3]", "[#1]", "[None][0]"],
    ),
    "sequences": (
        lambda: [(torch.zeros(1), [torch.zeros(2)]), collections.deque([torch.zeros(3)], 5)],
        ["[0][0]", "[0][1][0]", "[1][0]"],
    ),
    "dtype keys": (lambda: {torch.float32: torch.zeros(1)}, ["[torch.float32]"]),
    "state dict": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict(),
        [
            *("0.weight", "0.bias", "1.weight", "1.bias"),
            *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
        ],
    ),
    "optimizer": (
        optimizer_state,
        [
            *("model.weight", "model.bias"),
            *(f"optimizer.state[{i}].{k}" for i in (0, 1) for k in ("step", "exp_avg", "exp_avg_sq")),
        ],
    ),
    "default dict": (lambda: collections.defaultdict(list, a=[torch.zeros(1)]), ["a[0]"]),
    "named tuple": (lambda: {"p": Pair(torch.zeros(1), torch.zeros(2))}, ["p(0)", "p(1)"]),
    "data class": (lambda: Record(torch.zeros(1), {"x": torch.zeros(2)}), ["tensor", "others.x"]),
    "slots": (lambda: [slotted()], ["[0].tensor"]),
    "shared storages": (views, ["[0]", "[1]", "[2]", "[3]", "[4]"]),
    "tensor under two names": (
        lambda: {"a": tied, "b": {"c": tied}, "a_list": [tied]},
        ["a", "b.c", "a_list[0]"],
    ),
    "dict under two names": (lambda: {"a": shared_dict, "b": shared_dict}, ["a.weight"]),
    "cycle": (self_containing, ["[0]", "[1].other"]),
    "parameter": (lambda: {"p": nn.Parameter(torch.zeros(2))}, ["p"]),
    "parameter with attribute": (lambda: {"p": parameter_with_attribute()}, ["p", "p.main_grad"]),
    "buffer": (lambda: nn.Buffer(torch.zeros(2)), [""]),
    "attribute": (lambda: {"t": with_attribute()}, ["t", "t.companion"]),
    "subclass": (lambda: [torch.zeros(2).as_subclass(Subclass)], ["[0]"]),
    "parameter of subclass": (lambda: [nn.Parameter(torch.zeros(2).as_subclass(Subclass))], ["[0]"]),
    "wrapper subclass": (lambda: {"w": Wrapper(torch.zeros(2, 3))}, ["w", "w.inner"]),
    "meta": (lambda: {"m": torch.zeros(2, 3, device="meta")}, ["m"]),
    "empty": (lambda: [torch.zeros(0), torch.zeros(0, 3)], ["[0]", "[1]"]),
    "conj and neg": (
        lambda: [torch.zeros(2, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(2))],
        ["[0]", "[1]"],
    ),
    "new dtypes": (
        lambda: [torch.zeros(2).to(torch.float8_e4m3fn), torch.zeros(2, dtype=torch.uint16)],
        ["[0]", "[1]"],
    ),
    "quantized": (lambda: {"q": torch.quantize_per_tensor(torch.zeros(3), 0.5, 1, torch.quint8)}, ["q"]),
    "quantized by channel": (
        lambda: {"q": quantized_per_channel()},
        ["q", "q.scales", "q.zero_points"],
    ),
    "sparse COO": (lambda: {"s": torch.eye(3).to_sparse()}, ["s.indices", "s.values"]),
    "sparse CSR": (
        lambda: {"s": torch.eye(3).to_sparse_csr()},
        ["s.crow_indices", "s.col_indices", "s.values"],
    ),
    "sparse CSC": (
        lambda: {"s": torch.eye(3).to_sparse_csc()},
        ["s.ccol_indices", "s.row_indices", "s.values"],
    ),
    "sparse BSR": (
        lambda: {"s": torch.eye(4).to_sparse_bsr((2, 2))},
        ["s.crow_indices", "s.col_indices", "s.values"],
    ),
    "nested, strided": (
        lambda: {"n": nested_strided()},
        ["n.values", "n.sizes", "n.strides", "n.storage_offsets"],
    ),
    "untyped storage": (lambda: [torch.zeros(2).untyped_storage()], []),
    "typed storage": (lambda: {"s": torch.zeros(2)._typed_storage(), "t": torch.ones(1)}, ["t"]),
    "generator state": (lambda: {"rng": torch.get_rng_state()}, ["rng"]),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("case", CASES)
def test_storages_come_in_the_order_of_the_unpickler(case: str, protocol: int) -> None:
    make, names = CASES[case]
    archive = saved(make(), protocol)
    scan = scan_pickle(data_pkl(archive))
    assert storage_references(scan) == asked_by_unpickler(archive)
    assert [name for name, _ in iter_tensors(scan.root)] == names


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_module_objects_are_named_as_by_torch(protocol: int) -> None:
    network = Network()
    archive = saved({"network": network}, protocol)
    scan = scan_pickle(data_pkl(archive))
    expected = {f"network.{name}" for name, _ in network.named_parameters(remove_duplicate=False)}
    expected |= {f"network.{name}" for name, _ in network.named_buffers()}
    assert storage_references(scan) == asked_by_unpickler(archive)
    assert {name for name, _ in iter_tensors(scan.root)} == expected | {"network.loose[0]"}
    tensors = dict(iter_tensors(scan.root))
    assert tensors["network.head.weight"] is tensors["network.embedding.weight"]
    assert tensors["network.head.weight"].requires_grad
    assert not tensors["network.table"].requires_grad


@pytest.fixture
def process_group() -> Iterator[None]:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg", reason="torch without distributed")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_tensor_is_a_wrapper_of_its_local_one() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    archive = saved({"d": nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()]))})
    scan = scan_pickle(data_pkl(archive))
    assert storage_references(scan) == asked_by_unpickler(archive)
    tensors = dict(iter_tensors(scan.root))
    assert tensors["d"].kind == "wrapper"
    assert tensors["d"].requires_grad
    assert tensors["d"].shape == (4, 3)
    local = tensors["d._local_tensor"]
    assert (local.kind, local.dtype, local.shape) == ("dense", "float32", (4, 3))


def test_jagged_components_are_found() -> None:
    archive = saved({"n": nested_jagged()})
    scan = scan_pickle(data_pkl(archive))
    assert storage_references(scan) == asked_by_unpickler(archive)
    tensors = dict(iter_tensors(scan.root))
    assert tensors["n.values"].kind == "nested"
    assert tensors["n.offsets"].dtype == "int64"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.arange(12).reshape(3, 4).t()[1:, 1:],
        torch.zeros(2, requires_grad=True),
        torch.zeros(3).expand(4, 3),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
        torch.zeros(2, device="meta"),
    ],
)
def test_geometry_is_the_tensor_s(tensor: torch.Tensor) -> None:
    ((_, found),) = named(tensor)
    assert found.dtype == str(tensor.dtype).removeprefix("torch.")
    assert found.shape == tuple(tensor.shape)
    assert found.stride == tensor.stride()
    assert found.requires_grad == tensor.requires_grad
    assert (found.is_conj, found.is_neg) == (tensor.is_conj(), tensor.is_neg())
    if tensor.is_meta:
        assert (found.kind, found.storage) == ("meta", None)
    else:
        assert found.kind == "dense"
        assert found.storage_offset == tensor.storage_offset()
        assert found.storage is not None
        assert found.storage.size_bytes == tensor.untyped_storage().nbytes()
        assert found.storage.location == "cpu"


def all_dtypes() -> list[torch.dtype]:
    return sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_item_size_is_torch_s(dtype: torch.dtype) -> None:
    assert DTYPE_ITEMSIZE_BYTES[str(dtype).removeprefix("torch.")] == dtype.itemsize


def saved_dtypes() -> list[torch.dtype]:
    """List the dtypes that torch.save takes; the quantized ones are made in another way than the others."""
    known = {*torch.storage._new_dtypes(), *torch.storage._dtype_to_storage_type_map()}
    return sorted((dtype for dtype in known if "qu" not in str(dtype) and "qint" not in str(dtype)), key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", saved_dtypes(), ids=str)
def test_every_dtype_that_torch_saves_is_read(dtype: torch.dtype) -> None:
    archive = saved(torch.empty(8, dtype=dtype))
    scan = scan_pickle(data_pkl(archive))
    ((_, found),) = iter_tensors(scan.root)
    (reference,) = storage_references(scan)
    assert found.dtype == str(dtype).removeprefix("torch.")
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        (size_bytes,) = (info.file_size for info in records.infolist() if info.filename.endswith("/data/0"))
    assert reference.size_bytes == size_bytes


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantized_dtypes_are_read(dtype: torch.dtype) -> None:
    ((_, found),) = named(torch.quantize_per_tensor(torch.zeros(3), 0.5, 1, dtype))
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert found.storage is not None
    assert found.storage.size_bytes == 3 * dtype.itemsize


def test_kind_says_what_a_tensor_is_part_of() -> None:
    found = {
        **dict(named({"coo": torch.eye(2).to_sparse(), "csr": torch.eye(2).to_sparse_csr()})),
        **dict(named({"quantized": quantized_per_channel(), "nested": nested_strided()})),
        **dict(named({"wrapper": Wrapper(torch.zeros(2))})),
    }
    assert {name: tensor.kind for name, tensor in found.items()} == {
        "coo.indices": "sparse_coo",
        "coo.values": "sparse_coo",
        "csr.crow_indices": "sparse_csr",
        "csr.col_indices": "sparse_csr",
        "csr.values": "sparse_csr",
        "quantized": "quantized",
        "quantized.scales": "quantized",
        "quantized.zero_points": "quantized",
        "nested.values": "nested",
        "nested.sizes": "nested",
        "nested.strides": "nested",
        "nested.storage_offsets": "nested",
        "wrapper": "wrapper",
        "wrapper.inner": "dense",
    }


def test_tensor_pickled_without_torch_save_has_no_storage_to_name() -> None:
    root = scan_pickle(pickle.dumps({"t": torch.zeros(2)}, 2)).root
    assert list(iter_tensors(root)) == []


# --- what torch.save never writes ---

STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
V2 = b"ctorch._utils\n_rebuild_tensor_v2\n"
DENSE = V2 + b"(" + STORAGE + b"K\x00K\x04\x85K\x01\x85\x89NtR"


def test_hand_written_pickles_below_are_otherwise_right() -> None:
    ((name, found),) = iter_tensors(scan_pickle(DENSE + b".").root)
    assert (name, found.shape, found.storage) == ("", (4,), StorageReference("float32", "0", "cpu", 4))


@pytest.mark.parametrize(
    ("persistent_id", "error"),
    [
        (b"N", FormatError),
        (b"Vstorage\n", FormatError),
        (b")", FormatError),
        (b"(Vother\nctorch\nFloatStorage\nV0\nVcpu\nK\x04t", FormatError),
        (b"(Vstorage\nVFloatStorage\nV0\nVcpu\nK\x04t", FormatError),
        (b"(Vstorage\nctorch\nFloatStorage\nK\x00Vcpu\nK\x04t", FormatError),
        (b"(Vstorage\nctorch\nFloatStorage\nV0\nNK\x04t", FormatError),
        (b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nJ\xff\xff\xff\xfft", FormatError),
        (b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\n\x88t", FormatError),
        (b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\n\x8a\x09" + b"\xff" * 8 + b"\x00t", FormatError),
        (b"(Vstorage\nctorch\nOtherStorage\nV0\nVcpu\nK\x04t", UnsupportedPickle),
        (b"(Vstorage\ncelsewhere\nFloatStorage\nV0\nVcpu\nK\x04t", UnsupportedPickle),
    ],
)
def test_wrong_storage_is_refused(persistent_id: bytes, error: type[Exception]) -> None:
    scan = scan_pickle(persistent_id + b"Q.")
    with pytest.raises(error, match="persistent id number 0"):
        storage_references(scan)
    scan = scan_pickle(V2 + b"(" + persistent_id + b"QK\x00K\x04\x85K\x01\x85\x89NtR.")
    with pytest.raises(error, match="tensor ''"):
        list(iter_tensors(scan.root))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (V2 + b"(" + STORAGE + b"K\x00))\x89tR.", "takes 6 arguments or more and gets 5"),
        (V2 + b"(" + STORAGE + b"NK\x04\x85K\x01\x85\x89NtR.", "storage offset"),
        (V2 + b"(" + STORAGE + b"J\xff\xff\xff\xffK\x04\x85K\x01\x85\x89NtR.", "storage offset"),
        (V2 + b"(" + STORAGE + b"K\x00]K\x01\x85\x89NtR.", "shape is not a tuple"),
        (V2 + b"(" + STORAGE + b"K\x00N\x85K\x01\x85\x89NtR.", "element of its shape"),
        (V2 + b"(" + STORAGE + b"K\x00K\x04\x85)\x89NtR.", "differ in length"),
        (V2 + b"(" + STORAGE + b"K\x00K\x04\x85K\x01\x85NNtR.", "requires_grad"),
        (b"ctorch._utils\n_rebuild_tensor_v3\n(" + STORAGE + b"K\x00))\x89NNtR.", "dtype"),
        (b"ctorch._utils\n_rebuild_tensor_v3\n(" + STORAGE + b"K\x00))\x89Ncos\nsystem\ntR.", "dtype"),
        (b"ctorch._utils\n_rebuild_parameter\n(N\x88NtR.", "no tensor"),
        (b"ctorch._utils\n_rebuild_parameter\n)R.", "takes 3 arguments"),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(NNNNtR.", "no tuple"),
        (b"ctorch._utils\n_rebuild_qtensor\n(" + STORAGE + b"K\x00))N\x89NtR.", "quantizer"),
        (b"ctorch._utils\n_rebuild_nested_tensor\n)R.", "nested data"),
    ],
)
def test_malformed_tensor_is_refused(data: bytes, message: str) -> None:
    scan = scan_pickle(b"}Vkey\n" + data[:-1] + b"s.")
    with pytest.raises(FormatError, match=f"tensor 'key'.*{message}"):
        list(iter_tensors(scan.root))


def test_unknown_layout_and_many_wrappings_are_unsupported() -> None:
    layout = b"ctorch._utils\n_rebuild_sparse_tensor\n(ctorch.serialization\n_get_layout\nVtorch.odd\n\x85R)tR."
    with pytest.raises(UnsupportedPickle, match="sparse layout"):
        list(iter_tensors(scan_pickle(layout).root))
    wrapped = b"ctorch._utils\n_rebuild_parameter\n" * 20 + DENSE + b"\x88N\x87R" * 20 + b"."
    with pytest.raises(UnsupportedPickle, match="wrappings"):
        list(iter_tensors(scan_pickle(wrapped).root))
    dimensions = V2 + b"(" + STORAGE + b"K\x00(" + b"K\x01" * 300 + b"t)\x89NtR."
    with pytest.raises(UnsupportedPickle, match="300 dimensions"):
        list(iter_tensors(scan_pickle(dimensions).root))


def test_long_names_are_cut() -> None:
    key = b"X" + (5000).to_bytes(4, "little") + b"k" * 5000
    ((name, _),) = iter_tensors(scan_pickle(b"}" + key + DENSE + b"s.").root)
    assert name == "k" * 512 + "…"
    ((name, _),) = iter_tensors(scan_pickle(b"]" * 2000 + DENSE + b"a" * 2000 + b".").root)
    assert name == "…" + ("[0]" * 2000)[-1024:]


def test_nesting_too_deep_for_a_name_is_unsupported() -> None:
    with pytest.raises(UnsupportedPickle, match="deeper than 4000 levels"):
        list(iter_tensors(scan_pickle(b"]" * 5000 + DENSE + b"a" * 5000 + b".").root))


def test_tensors_of_an_opaque_object_are_named_by_where_they_stand() -> None:
    call = b"cm\nn\n(" + DENSE + b"tR(" + DENSE + b"e(Vkey\n" + DENSE + b"u(Vstate\n" + DENSE + b"db"
    names = [name for name, _ in iter_tensors(scan_pickle(b"}Vx\n" + call + b"s.").root)]
    assert names == ["x(0)", "x[0]", "x.key", "x.state"]
    call = b"cm\nn\n)}Vk\n" + DENSE + b"s\x92(" + DENSE + b"Nt" + b"b"
    root = scan_pickle(call + b".").root
    assert isinstance(root, Call)
    assert [name for name, _ in iter_tensors(root)] == ["(k)", "[state][0]"]
    call = b"cm\nn\n" + DENSE + b"\x85R)R"
    assert [name for name, _ in iter_tensors(scan_pickle(call + b".").root)] == ["(function)(0)"]
