"""What DCP has pickled is built without being unpickled: all that its releases write, and nothing that runs code."""

from __future__ import annotations

import collections
import enum
import os
import pathlib
import pickle
import tracemalloc
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import put_metadata, safetensors_place
from support.store_runs import step_path
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

import fastpersist as fp
from fastpersist.checkpointer.merge import merge
from fastpersist.cli import main
from fastpersist.dcp import plan_agreement
from fastpersist.dcp.global_plan.assignment import Share, WholePlan
from fastpersist.dcp.metadata import _FIELDS, build_pickled
from fastpersist.dcp.save_planner import StepSavePlanner
from fastpersist.integrations.torch_dcp import FastPersistReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

GOLDEN = Path(__file__).parents[2] / "data" / "dcp-metadata"
"""Of what each has in common with no other: paths by Python 3.13, places by torch 2.6 and by 2.7, versions from 2.9 on,
strides from 2.15 on.

Those of torch 2.13 and 2.15 were written by dcp.save, the others by that Python with classes that stand for torch's."""


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def make_metadata() -> Metadata:
    chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4])),
        ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([1, 4])),
    ]
    return Metadata(
        {
            "w": TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([3, 4]), chunks),
            "epoch": BytesStorageMetadata(),
        },
        {"w": ("model", 3, "w"), "epoch": ("epoch",)},
        {
            MetadataIndex("w", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 1200),
            MetadataIndex("w", [2, 0], 1): _StorageInfo("__1_0.distcp", 0, 1180, ["zstd"]),
            MetadataIndex("epoch"): _StorageInfo("__0_0.distcp", 1200, 300),
        },
        StorageMeta(Path("/runs/a"), "7c0e", None, ["model"]),
    )


# --- what is read


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_metadata_of_other_releases_are_read(name: str) -> None:
    found = build_pickled((GOLDEN / name).read_bytes())
    described = {"epoch": BytesStorageMetadata(), **dict.fromkeys(("model.w", "rate"))}
    assert found.state_dict_metadata.keys() == described.keys()
    assert found.state_dict_metadata["epoch"] == BytesStorageMetadata()
    weight = found.state_dict_metadata["model.w"]
    properties: Any = TensorProperties(torch.float32)
    if "torch2.15" in name and hasattr(properties, "strides"):
        properties.strides = (4, 1)
    assert weight.properties == properties
    assert weight.size == torch.Size([3, 4])
    assert sum(chunk.sizes.numel() for chunk in weight.chunks) == 12
    assert found.planner_data == {"model.w": ("model", "w"), "epoch": ("epoch",), "rate": ("rate",)}
    assert found.storage_data[MetadataIndex("epoch")].relative_path == "__0_0.distcp"
    assert not any(info.transform_descriptors for info in found.storage_data.values())
    if "torch2.13" not in name and "torch2.15" not in name:
        assert found.storage_meta == StorageMeta(Path("/runs/a"), "7c0e")
    assert getattr(found, "version", None) == (None if "torch2.6" in name or "torch2.8" in name else "1.0.0")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_is_built_equals_what_was_pickled(protocol: int) -> None:
    metadata = make_metadata()
    assert build_pickled(pickle.dumps(metadata, protocol)) == pickle.loads(pickle.dumps(metadata, protocol)) == metadata


def test_properties_that_a_later_torch_adds_at_the_end_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = make_metadata()
    stock = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*stock(self), None, (4, 1), "later"))
    assert build_pickled(pickle.dumps(metadata)) == metadata
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*stock(self), ["a list"]))
    with pytest.raises(fp.FormatError, match="TensorProperties in it are not what DCP pickles"):
        build_pickled(pickle.dumps(metadata))


def test_fields_that_a_later_torch_adds_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Later(_StorageInfo):
        later: Any = 0

    Later.__module__, Later.__qualname__ = name = (_StorageInfo.__module__, "_StorageInfo")
    monkeypatch.setattr(torch.distributed.checkpoint.filesystem, "_StorageInfo", Later)
    metadata = make_metadata()
    index = MetadataIndex("epoch")
    metadata.storage_data = {index: Later("__0_0.distcp", 1200, 300, None, 5)}
    with pytest.raises(fp.FormatError, match="'later', which this torch does not know"):
        build_pickled(pickle.dumps(metadata))
    monkeypatch.setitem(_FIELDS, name, (Later, _FIELDS[name][1]))
    assert build_pickled(pickle.dumps(metadata)) == metadata
    metadata.storage_data = {index: Later("__0_0.distcp", 1200, 300, None, {"a": "dict"})}
    with pytest.raises(fp.FormatError, match="'later' of a _StorageInfo in it is a dict"):
        build_pickled(pickle.dumps(metadata))


def test_what_planners_of_others_note_is_kept() -> None:
    metadata: Any = make_metadata()
    metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (3, 4), "kind": [None, True, 1.5, b"x"]}}
    metadata.planner_data = collections.OrderedDict(a=[torch.Size([1]), torch.int8, -5])
    found = build_pickled(pickle.dumps(metadata))
    assert found.mcore_data == metadata.mcore_data
    assert found.planner_data == metadata.planner_data


@pytest.mark.parametrize("by_name", [False, True])
def test_enums_are_read_by_value_and_by_name(by_name: bool) -> None:
    """Python 3.11.0 pickles them by name."""
    enumeration = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    name = b"cbuiltins\ngetattr\n" + enumeration + text("TORCH_CHANNELS_LAST") + b"\x86R"
    data = b"\x80\x03" + (name if by_name else enumeration + b"K\x01\x85R") + b"."
    assert build_pickled(data) is torch.channels_last


def test_places_in_safetensors_are_read() -> None:
    metadata = make_metadata()
    metadata.storage_data = {MetadataIndex("w", [0, 0]): safetensors_place("model.safetensors", [3], torch.int8)}
    assert build_pickled(pickle.dumps(metadata)) == metadata


def test_plans_of_other_ranks_are_read() -> None:
    planner = StepSavePlanner()
    planner.set_up_planner({"a": {"w": torch.ones(3, 4)}, "b": "text"}, is_coordinator=True)
    items = planner.create_local_plan().items
    assert {item.type for item in items} == {WriteItemType.TENSOR, WriteItemType.BYTE_IO}
    assert build_pickled(pickle.dumps((items, planner.mappings, {"a.w": 1 << 63})))[0] == items
    plan = (b"names", b"chunks", ["b"], {"b": ("b",)})
    assert plan_agreement._unpacked(plan_agreement._packed(plan), 1, plan_agreement._HELD) == plan
    shared = ("version", b"", b"", b"", b"", {"0 1": b"1"})
    assert plan_agreement._unpacked(plan_agreement._packed(shared), 0, plan_agreement._SHARED) == shared


# --- what is not run


class Run:
    """What runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def through_pathlib(command: str) -> bytes:
    """Run a command by names that modules of pathlib's have imported."""
    getter = b"cpathlib._local\nattrgetter\n(" + text("system") + b"tR"
    return b"\x80\x04" + getter + b"(cpathlib._local\nos\ntR(" + text(command) + b"tR."


@pytest.fixture
def step(tmp_path: Path) -> Path:
    with fp.Checkpointer(tmp_path / "run", sharded=True) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}).result()
        checkpoints.save(2, {"w": torch.ones(3)}).result()
    return step_path(tmp_path / "run", 2)


@pytest.mark.parametrize("way", ["direct", "by way of pathlib"])
def test_no_way_to_read_a_step_runs_what_its_metadata_name(step: Path, way: str, tmp_path: Path, capsys: Any) -> None:
    ran = tmp_path / "ran"
    command = f"touch {ran}"
    put_metadata(step, pickle.dumps(Run(command)) if way == "direct" else through_pathlib(command))
    with pytest.raises(fp.FormatError, match=r"no part of DCP's|another call"):
        fp.inspect(step)
    with pytest.raises(fp.FormatError):
        fp.Checkpointer(step.parent).load(2)
    with pytest.warns(RuntimeWarning, match="going back"):
        assert torch.equal(fp.Checkpointer(step.parent).load()["w"], torch.ones(3))
    with pytest.raises(fp.FormatError):
        FastPersistReader(step).read_metadata()
    with pytest.raises(fp.FormatError):
        merge([step], tmp_path / "merged.pt")
    fp.verify(step)
    assert main(["inspect", str(step)]) != 0
    assert main(["merge", str(step), str(tmp_path / "merged.pt")]) != 0
    capsys.readouterr()
    assert not ran.exists()


def test_plans_that_come_over_a_connection_run_nothing(tmp_path: Path) -> None:
    for plan in (Run(f"touch {tmp_path / 'ran'}"), ([], {}, Run(f"touch {tmp_path / 'ran'}"))):
        with pytest.raises(fp.CoordinationError, match=r"plan of rank 3 cannot be read.*system"):
            plan_agreement._unpacked(zlib.compress(pickle.dumps(plan)), 3, plan_agreement._HELD)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("plan", [None, (), ([], {}), ([], {}, []), ([make_metadata()], {}, {}), make_metadata()])
def test_what_is_no_plan_is_refused(plan: object) -> None:
    with pytest.raises(fp.CoordinationError, match="plan of rank 3 cannot be read"):
        plan_agreement._unpacked(zlib.compress(pickle.dumps(plan)), 3, plan_agreement._HELD)


CLASSES = [
    "pathlib\nPath",
    "pathlib._local\nPurePosixPath",
    "torch.distributed.checkpoint.metadata\nMetadata",
    "torch.distributed.checkpoint.metadata\nMetadataIndex",
    "torch\nSize",
    "collections\nOrderedDict",
]


@pytest.mark.parametrize("opening", CLASSES)
@pytest.mark.parametrize("at", ["the root", "planner_data"])
def test_no_class_is_changed(opening: str, at: str) -> None:
    """BUILD sets attributes of whatever is below it."""
    change = b"c" + opening.encode() + b"\n}" + text("parent") + text("/etc") + b"sb"
    before = pathlib.Path.parent
    metadata = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(" + text("state_dict_metadata") + b"}"
    metadata += text("storage_data") + b"}" + text("planner_data") + change + b"ub"
    with pytest.raises(fp.FormatError):
        build_pickled(b"\x80\x02" + (change if at == "the root" else metadata) + b".")
    assert pathlib.Path.parent is before
    assert str(Path("/a/b").parent) == "/a"


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "planner_data",
    [
        {("a", "b"): 1},
        {1 << 64: 1},
        [1 << 64],
        {"a": {1, 2}},
        {"a": bytearray(b"x")},
        Colour.RED,
        Path("/runs"),
        make_metadata(),
        StorageMeta(),
        torch.device("cpu"),
        len,
    ],
)
def test_planner_data_are_plain(planner_data: object) -> None:
    metadata = make_metadata()
    metadata.planner_data = planner_data
    with pytest.raises(fp.FormatError):
        build_pickled(pickle.dumps(metadata))


def with_state(**changes: Any) -> Metadata:
    metadata = make_metadata()
    vars(metadata).update(changes)
    return metadata


def tensor(chunks: Any, size: Any = (4,), dtype: torch.dtype = torch.int8) -> dict[str, TensorStorageMetadata]:
    found = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return {"w": TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), found)}


def changed(made: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


INFO = _StorageInfo("__0_0.distcp", 0, 1)
SHARED = tensor([((0,), (4,))])["w"]


@pytest.mark.parametrize(
    "metadata",
    [
        with_state(state_dict_metadata=None),
        with_state(state_dict_metadata={"w": None}),
        with_state(state_dict_metadata={3: BytesStorageMetadata()}),
        with_state(state_dict_metadata=tensor([((0,), (5,))])),
        with_state(state_dict_metadata=tensor([((1,), (4,))])),
        with_state(state_dict_metadata=tensor([((0, 0), (4, 1))])),
        with_state(state_dict_metadata=tensor([((), ())])),
        with_state(state_dict_metadata=tensor([], [1 << 62, 4])),
        with_state(state_dict_metadata=tensor([], [1 << 60], torch.float64)),
        with_state(state_dict_metadata=tensor([], [0, 1 << 62, 1 << 62])),
        with_state(state_dict_metadata=tensor([], [1] * 65)),
        with_state(state_dict_metadata=tensor([((4,), (0,))] * 65)),
        with_state(state_dict_metadata={"w": changed(replace(SHARED), chunks=None)}),
        with_state(state_dict_metadata={"w": changed(replace(SHARED), chunks=[INFO])}),
        with_state(state_dict_metadata={"w": changed(replace(SHARED), size=(4,))}),
        with_state(state_dict_metadata={"w": changed(replace(SHARED), properties=torch.int8)}),
        with_state(state_dict_metadata={"w": changed(replace(SHARED), more=1)}),
        with_state(state_dict_metadata={"v": SHARED, "w": replace(SHARED)}),
        with_state(storage_data=None),
        with_state(storage_data=[]),
        with_state(storage_data={"w": INFO}),
        with_state(storage_data={MetadataIndex("w"): 5}),
        with_state(storage_data={MetadataIndex("w"): changed(replace(INFO), relative_path=b"x")}),
        with_state(storage_data={MetadataIndex("w"): changed(replace(INFO), offset=1.5)}),
        with_state(storage_data={MetadataIndex("w"): changed(replace(INFO), length=True)}),
        with_state(storage_data={MetadataIndex("w"): changed(replace(INFO), length=1 << 64)}),
        with_state(storage_data={changed(MetadataIndex("w"), fqn=7): INFO}),
        with_state(storage_meta={}),
        with_state(storage_meta=StorageMeta("a" * 10, modules=[len])),  # type: ignore[list-item]
        with_state(storage_meta=StorageMeta(Path("a" * 5000))),
        with_state(__class__x=1),
        with_state(**{"not a name": 1}),
    ],
)
def test_metadata_that_do_not_consist_of_what_dcp_writes_are_refused(metadata: Metadata) -> None:
    with pytest.raises(fp.FormatError):
        build_pickled(pickle.dumps(metadata))


# --- what costs time and memory


def refused_within(data: bytes, memory_bytes: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(fp.FormatError):
            build_pickled(data)
        assert tracemalloc.get_traced_memory()[1] < memory_bytes
    finally:
        tracemalloc.stop()


def test_a_memo_index_takes_no_memory() -> None:
    refused_within(b"\x80\x04cos\nsystem\nr" + (1 << 28).to_bytes(4, "little") + b".", 1 << 20)


def test_a_length_that_is_not_there_takes_no_memory() -> None:
    refused_within(b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b".", 1 << 20)


def nested_tuple(levels: int) -> tuple[object, ...]:
    found: tuple[object, ...] = ()
    for _ in range(levels):
        found = (found, found)
    return found


def test_shared_tuples_are_not_hashed_and_not_copied() -> None:
    keys = b"\x80\x04}" + b")" + b"q\x00h\x00\x86" * 100 + b"Ns."
    refused_within(keys, 1 << 20)
    index = changed(MetadataIndex("w"), offset=nested_tuple(25))
    refused_within(pickle.dumps(index, 4), 1 << 20)
    assert len(build_pickled(pickle.dumps({"a": nested_tuple(25)}))["a"]) == 2  # as values they are shared


def test_what_holds_itself_or_is_nested_deep_is_refused() -> None:
    itself: list[object] = []
    itself += [itself, itself]
    refused_within(pickle.dumps(itself), 1 << 20)
    refused_within(pickle.dumps(with_state(planner_data={"a": itself})), 1 << 20)
    refused_within(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".", 64 << 20)


def test_places_that_have_one_hash_are_refused() -> None:
    """The hash of a tuple of numbers is no secret: b is what makes it the same for each a. By CPython's tuplehash."""
    bits, first, second, start = (1 << 64) - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261

    def rotated(value: int, by: int) -> int:
        return (value << by | value >> (64 - by)) & bits

    def after(accumulated: int, lane: int) -> int:
        return rotated((accumulated + lane * second) & bits, 31) * first & bits

    target = rotated(0x1234_5678_9ABC_DEF0 * pow(first, -1, 1 << 64) & bits, 33)
    offsets = []
    for a in range(1200):
        b = (target - after(start, a)) * pow(second, -1, 1 << 64) & bits
        if b < 1 << 60:
            offsets.append((a, b))
    assert len({hash(offset) for offset in offsets}) == 1
    assert len(offsets) >= 65
    places = {MetadataIndex("w", offset): INFO for offset in offsets[:64]}
    assert build_pickled(pickle.dumps(with_state(storage_data=places))).storage_data == places
    places[MetadataIndex("w", offsets[64])] = INFO
    with pytest.raises(fp.FormatError, match="one hash"):
        build_pickled(pickle.dumps(with_state(storage_data=places)))


def test_lists_of_chunks_are_not_looked_at_for_each_tensor_that_has_them() -> None:
    chunks = tensor([((0,), (4,))])["w"].chunks * 64
    described = {str(n): TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([4]), chunks) for n in range(2)}
    with pytest.raises(fp.FormatError, match="same list"):
        build_pickled(pickle.dumps(with_state(state_dict_metadata=described)))


@pytest.mark.parametrize("message", [b"", b"nothing packed", zlib.compress(b"N.")[:-1], zlib.compress(b"N.") + b"x"])
def test_a_plan_that_is_not_packed_whole_is_refused(message: bytes) -> None:
    with pytest.raises(fp.CoordinationError, match="plan of rank 3 cannot be read"):
        plan_agreement._unpacked(message, 3, plan_agreement._HELD)


def test_a_plan_is_not_unpacked_beyond_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_agreement, "_PLAN_BYTES_MAX", 1 << 20)
    bomb = zlib.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(fp.CoordinationError, match="longer than 1048576"):
            plan_agreement._unpacked(bomb, 3, plan_agreement._HELD)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(fp.ConfigError, match="fewer, larger tensors"):
        plan_agreement._packed([b"x" * (2 << 20)])
    assert plan_agreement._unpacked(plan_agreement._packed((b"", b"", ["w"], {})), 3, plan_agreement._HELD)[2] == ["w"]


class _Alone:
    """A session with rank 1, which has sent this."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def gather(self, own: bytes) -> list[bytes]:
        return [own, self._message]


@pytest.mark.parametrize(
    "packed", [b"", b"x", zlib.compress(bytes(16)), zlib.compress(bytes(64 << 20)), zlib.compress(bytes(31))]
)
def test_places_that_are_not_as_many_as_were_planned_are_refused(packed: bytes) -> None:
    own = plan_agreement.Done(None, b"", [])
    shares = [Share(), Share(objects=["v", "w"])]
    planned = plan_agreement.Planned("/d", [], 0, plan_agreement.Whole(WholePlan([], shares, {})))
    session: Any = _Alone(b'{"part": ["__1_0.distcp", 5, 6]}\n' + packed)
    with pytest.raises(fp.CoordinationError, match="rank 1"):
        plan_agreement.gather_done(session, own, planned)
    session = _Alone(b'{"part": ["__1_0.distcp", 5, 6]}\n' + zlib.compress(bytes(32)))
    assert plan_agreement.gather_done(session, own, planned)[1].object_places == [(0, 0), (0, 0)]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch 2.7, of its own writer
def test_dcp_loads_what_another_program_saved(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(5)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    state = {"w": torch.zeros(5, dtype=torch.int64)}
    dcp.load(state, storage_reader=FastPersistReader(tmp_path), no_dist=True)
    assert state["w"].tolist() == [0, 1, 2, 3, 4]
