"""Anything in place of the files of DCP checkpoints: a clear error before anything changes, and an older step."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import PART, failure_of, load, put_metadata, safetensors_place, save, tells_why
from support.store_runs import step_path
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

import fastpersist as fp
from fastpersist.checkpointer.merge import merge
from fastpersist.commit.step_listing import read_manifest
from fastpersist.dcp.metadata import read_metadata
from fastpersist.formats.manifest import encode_manifest
from fastpersist.integrations.torch_dcp import (
    FastPersistHuggingFaceReader,
    FastPersistHuggingFaceWriter,
    FastPersistReader,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with fp.Checkpointer(tmp_path / "run", sharded=True) as checkpoints:
        for step in (1, 2):
            state = {"w": torch.full((1000,), float(step)), "b": torch.ones(3), "list": [torch.ones(2)], "epoch": step}
            checkpoints.save(step, state).result()
    return tmp_path / "run"


def change_metadata(root: Path, change: Callable[[Any], object]) -> Path:
    """Change the metadata of step 2."""
    step = step_path(root, 2)
    metadata = FastPersistReader(step).read_metadata()
    change(metadata)
    put_metadata(step, pickle.dumps(metadata))
    return step


def expect_older(root: Path, match: str | None = None, *, has_shape: bool = True) -> None:
    """Expect that step 2 is refused, that nothing was changed by then, and that step 1 is loaded instead."""
    target = torch.full((1000,), 7.0)
    checkpoints = fp.Checkpointer(root)
    for into in (None, {"w": target}):
        if not has_shape and into is not None:
            with pytest.raises(fp.ConfigError, match=r"w has shape \(1000,\) in the target"):
                checkpoints.load(2, into=into)
            continue
        with pytest.raises((fp.CorruptionError, fp.StorageError, fp.CheckpointNotFoundError), match=match):
            checkpoints.load(2, into=into)
        assert target.tolist() == [7.0] * 1000
    for into in (None, {"w": target})[: 1 + has_shape]:
        with pytest.warns(RuntimeWarning, match="going back"):
            found = checkpoints.load(into=into)
        assert found["w"].tolist() == [1.0] * 1000
        assert found["epoch"] == 1


def place(**fields: Any) -> Callable[[Any], object]:
    def change(metadata: Any) -> None:
        index = MetadataIndex("w", [0])
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    return change


def shape(*lengths: int) -> Callable[[Any], object]:
    def change(metadata: Any) -> None:
        described = metadata.state_dict_metadata["w"]
        described.size = described.chunks[0].sizes = torch.Size(lengths)
        described.chunks[0].offsets = torch.Size([0] * len(lengths))
        info = metadata.storage_data.pop(MetadataIndex("w", [0]))
        metadata.storage_data[MetadataIndex("w", described.chunks[0].offsets)] = info

    return change


def path(*parts: Any, name: str = "epoch") -> Callable[[Any], object]:
    return lambda metadata: metadata.planner_data.update({name: parts})


def described_as(name: str, like: str) -> Callable[[Any], object]:
    """Describe something as it is, and let it lie where another thing lies."""

    def change(metadata: Any) -> None:
        places = {index.fqn: index for index in metadata.storage_data}
        metadata.storage_data[places[name]] = metadata.storage_data[places[like]]

    return change


def holding_itself() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


CHANGES: dict[str, Callable[[Any], object]] = {
    "offset before": place(offset=-5),
    "offset behind": place(offset=1 << 40),
    "offset beyond all": place(offset=(1 << 64) - 1),
    "length behind": place(length=1 << 62),
    "length of nothing": place(length=0),
    "length below nothing": place(length=-1),
    "length of a part": place(length=2000),
    "not all of it": place(length=4000),
    "path above": place(relative_path="../step-00000001/" + PART),
    "path of nothing": place(relative_path=""),
    "path with a zero": place(relative_path="a\0b"),
    "path of no text": place(relative_path="\udc80\ud800"),
    "path too long": place(relative_path="a" * 5000),
    "path not there": place(relative_path="__7_0.distcp"),
    "path of metadata": place(relative_path=".metadata"),
    "more elements than memory": shape(1 << 50),
    "more elements than bytes": shape(1 << 30),
    "more elements": shape(1001),
    "fewer elements": shape(999),
    "another shape": shape(10, 100),
    "no dimensions": shape(),
    "one element": shape(1),
    "deep": path(*["a"] * 5000),
    "far": path("list", 1 << 40),
    "before the first": path("list", -1),
    "below a tensor": path("w", "below"),
    "below an object": lambda metadata: metadata.planner_data.update({"w": ("epoch", "w")}),
    "a number for a dict": path(0),
    "no path": lambda metadata: metadata.planner_data.update({"epoch": 5}),
    "path of lists": lambda metadata: metadata.planner_data.update({"epoch": ([],)}),
    "no paths": lambda metadata: setattr(metadata, "planner_data", [5]),
    "paths that hold themselves": lambda metadata: setattr(metadata, "planner_data", holding_itself()),
    "an object for a tensor": described_as("w", "epoch"),
    "another tensor": described_as("w", "b"),
    "not placed": lambda metadata: metadata.storage_data.pop(MetadataIndex("w", [0])),
    "object not placed": lambda metadata: metadata.storage_data.pop(MetadataIndex("epoch")),
    "no bytes of an object": lambda metadata: metadata.storage_data.update(
        {MetadataIndex("epoch"): _StorageInfo(PART, 0, 0)}
    ),
}


OTHER_SHAPES = {"more elements", "fewer elements", "another shape", "no dimensions", "one element"}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_lead_astray_let_an_older_step_be_loaded(root: Path, name: str, tmp_path: Path) -> None:
    step = change_metadata(root, CHANGES[name])
    expect_older(root, has_shape=name not in OTHER_SHAPES)
    with pytest.raises((fp.CorruptionError, fp.StorageError, fp.CheckpointNotFoundError)):
        merge([step], tmp_path / "merged.pt")
    try:
        fp.inspect(step)
    except fp.FormatError:
        pass
    assert isinstance(fp.verify(step).ok, bool)


def test_many_far_places_in_lists_take_no_memory(root: Path) -> None:
    def change(metadata: Any) -> None:
        for number in range(100):
            metadata.state_dict_metadata[f"x{number}"] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(f"x{number}")] = metadata.storage_data[MetadataIndex("epoch")]
            metadata.planner_data[f"x{number}"] = (f"list{number}", 100_000)

    change_metadata(root, change)
    expect_older(root, "places without anything")


# --- parts


def put_blob(root: Path, name: str, value: object) -> None:
    """Write what torch.save makes of a value to the end of step 2's part, and let a name lie there."""
    step = step_path(root, 2)
    file = io.BytesIO()
    torch.save(value, file)
    size_bytes = (step / PART).stat().st_size
    with (step / PART).open("ab") as part:
        part.write(file.getvalue())

    def change(metadata: Any) -> None:
        for index in metadata.storage_data:
            if index.fqn == name:
                metadata.storage_data[index] = _StorageInfo(PART, size_bytes, len(file.getvalue()))

    change_metadata(root, change)
    put_size(step, PART)


def put_size(step: Path, name: str) -> None:
    """Let the manifest say of a file what it is now."""
    manifest = read_manifest(str(step))
    files = [
        replace(entry, size_bytes=(step / name).stat().st_size, crc32=None) if entry.name == name else entry
        for entry in manifest.files
    ]
    (step / "MANIFEST.json").write_bytes(encode_manifest(replace(manifest, files=tuple(files))))


class Dense:
    """A dense tensor of a quantized dtype, as nobody writes it."""

    def __reduce__(self) -> Any:
        storage = torch.UntypedStorage(1000)
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.qint8, _internal=True)
        return torch._utils._rebuild_tensor_v2, (typed, 0, (1000,), (1,), False, {})


@pytest.mark.parametrize(
    "value",
    [
        5,
        {"a": 1},
        holding_itself(),
        torch.ones(1),
        torch.ones(1001),
        torch.ones(2000)[::2][:999],
        torch.ones(10, 100),
        torch.ones(()),
        torch.ones(1000, 1).to_sparse(),
    ],
)
def test_what_is_no_such_tensor_lets_an_older_step_be_loaded(root: Path, value: object) -> None:
    put_blob(root, "w", value)
    target = torch.full((1000,), 7.0)
    checkpoints = fp.Checkpointer(root)
    for into in (None, {"w": target}):
        with pytest.raises(fp.CorruptionError, match=f"'w'.*{PART}|{PART}.*'w'"):
            checkpoints.load(2, into=into)
        with pytest.warns(RuntimeWarning, match="going back"):
            assert checkpoints.load(into=into)["w"].tolist() == [1.0] * 1000


@pytest.mark.filterwarnings("ignore")  # torch warns once in a process, and an error of that would hide the other one
def test_a_dense_tensor_of_a_quantized_dtype_is_no_crash(root: Path) -> None:
    put_blob(root, "w", Dense())
    with pytest.raises(fp.FastPersistError, match="'w'"):
        fp.Checkpointer(root).load(2)


def test_an_object_that_holds_itself_is_loaded_as_it_is(root: Path) -> None:
    put_blob(root, "epoch", holding_itself())
    found = fp.Checkpointer(root).load(2)["epoch"]
    assert found[0] is found


@pytest.mark.parametrize("groups", [5, [5], [{"params": 5}], [{"params": [[]]}], holding_itself(), [{"params": ["x"]}]])
def test_groups_of_an_optimizer_that_are_none_are_refused_by_name(tmp_path: Path, groups: Any) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with fp.Checkpointer(tmp_path / "run", sharded=True) as checkpoints:
        checkpoints.save(1, {"optimizer": {"state": {}, "param_groups": "here"}}).result()
        step = step_path(tmp_path / "run", 1)
        (step_path(tmp_path / "run", 1)).rename(step_path(tmp_path / "run", 2))
        put_blob(tmp_path / "run", "optimizer.param_groups", groups)
        assert not step.exists()
        checkpoints.load(2)
        with pytest.raises(fp.ConfigError, match="optimizer"):
            checkpoints.load(2, into={"optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 1.0


# --- what is no file


def fifo_in_place_of(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", [".metadata", PART])
def test_a_fifo_in_a_step_is_refused_by_kind_and_an_older_step_loaded(root: Path, name: str) -> None:
    step = step_path(root, 2)
    fifo_in_place_of(step / name)
    expect_older(root)
    put_size(step, name)
    expect_older(root, "no regular file")
    assert not fp.verify(step).ok
    with pytest.raises(fp.FormatError, match="no regular file"):
        fp.inspect(step)


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a device"])
@pytest.mark.parametrize("name", [pytest.param(".metadata", marks=tells_why), PART])
def test_what_is_no_file_is_refused_by_kind_by_dcp_too(tmp_path: Path, name: str, kind: str) -> None:
    save({"w": torch.ones(1000)}, tmp_path / "c")
    if kind == "a FIFO":
        fifo_in_place_of(tmp_path / "c" / name)
    else:
        (tmp_path / "c" / name).unlink()
        if kind == "a directory":
            (tmp_path / "c" / name).mkdir()
        else:
            (tmp_path / "c" / name).symlink_to("/dev/zero")
    error = failure_of(lambda: load(tmp_path / "c", {"w": torch.zeros(1000)}))
    assert "it is no regular file" in str(error)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_fifo_among_safetensors_is_refused_by_kind(tmp_path: Path, name: str) -> None:
    state = {"v": torch.ones(1000), "w": torch.ones(1000)}
    shard_bytes = 4000 if name.endswith("json") else 1 << 20
    writer = FastPersistHuggingFaceWriter(tmp_path / "m", max_shard_bytes=shard_bytes)
    dcp.save(state, storage_writer=writer, no_dist=True)
    fifo_in_place_of(tmp_path / "m" / name)
    with pytest.raises(fp.FormatError, match="no regular file"):
        FastPersistHuggingFaceReader(tmp_path / "m").read_metadata()


def test_metadata_of_holes_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(fp.FormatError, match="too many"):
        read_metadata(str(tmp_path / ".metadata"))


def test_places_of_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    metadata: Any = FastPersistReader(tmp_path).read_metadata()
    assert isinstance(metadata.state_dict_metadata["w"], TensorStorageMetadata)
    metadata.storage_data = {MetadataIndex("w", [0]): safetensors_place("model.safetensors", [3], torch.int8)}
    put_metadata(tmp_path, pickle.dumps(metadata))
    error = failure_of(lambda: load(tmp_path, {"w": torch.zeros(3)}))
    assert isinstance(error, fp.UnsupportedError)
    assert "_HFStorageInfo" in str(error)
    fp.verify(tmp_path)
