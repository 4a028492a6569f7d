"""A DCP checkpoint that is damaged, replaced or leads astray is refused: it is said where, and who wrote it."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import (
    IGNORED,
    PART,
    SMALL,
    blank,
    failure_of,
    failures,
    load,
    place_of,
    portrait,
    save,
    tells_why,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import fastpersist as fp
from fastpersist import _native
from fastpersist.integrations.torch_dcp import FastPersistReader

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

torch.set_num_threads(1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(SMALL, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_changed_byte_of_a_tensor_is_found_unless_one_does_not_want_to_know(checkpoint: Path, name: str) -> None:
    place = place_of(checkpoint, name)
    flip(checkpoint / PART, place.offset + (4096 if name == "a" else place.length // 2))
    if name == "b":  # where in its blob the tensor lies
        flip(checkpoint / PART, place.offset + place.length // 2)
        blob = (checkpoint / PART).read_bytes()[place.offset : place.offset + place.length]
        flip(checkpoint / PART, place.offset + blob.index(bytes(torch.ones(7).numpy())))
    error = failure_of(lambda: load(checkpoint, SMALL))
    assert isinstance(error, fp.ChecksumError)
    assert str(checkpoint / PART) in str(error)
    assert repr(name) in str(error)
    assert "rank 0" in str(error)
    assert load(checkpoint, SMALL, verify=False)["c"] == "text"


def test_a_changed_byte_of_an_object_is_found(checkpoint: Path) -> None:
    place = place_of(checkpoint, "c")
    blob = (checkpoint / PART).read_bytes()[place.offset : place.offset + place.length]
    flip(checkpoint / PART, place.offset + blob.index(b"text"))
    error = failure_of(lambda: load(checkpoint, SMALL))
    assert isinstance(error, fp.ChecksumError)
    assert "'c'" in str(error)
    assert load(checkpoint, SMALL, verify=False)["c"] == "dext"


def test_a_changed_byte_of_torchs_file_is_found(tmp_path: Path) -> None:
    state = {"a": torch.arange(1 << 16)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "checkpoint"))
    flip(tmp_path / "checkpoint" / PART, 1 << 18)
    error = failure_of(lambda: load(tmp_path / "checkpoint", state))
    assert isinstance(error, fp.ChecksumError)
    assert "rank 0" in str(error)


def test_no_changed_byte_of_a_part_goes_unnoticed_in_a_tensor(tmp_path: Path) -> None:
    """Wherever it is: it is found, or the tensor comes back as it was."""
    state = {"a": torch.arange(40), "b": torch.zeros(0, 3)}
    save(state, tmp_path / "checkpoint")
    part = tmp_path / "checkpoint" / PART
    for offset in range(0, part.stat().st_size, 13):
        flip(part, offset)
        found = None
        refused: list[BaseException] = []
        try:
            found = portrait(load(tmp_path / "checkpoint", state))
        except dcp.api.CheckpointException as error:
            refused = failures(error)
        assert found == portrait(state) if found else isinstance(refused[0], (fp.CorruptionError, fp.UnsupportedError))
        flip(part, offset)


def test_a_part_that_was_cut_off_is_named(checkpoint: Path) -> None:
    os.truncate(checkpoint / PART, 4096)
    error = failure_of(lambda: load(checkpoint, SMALL))
    assert isinstance(error, fp.CorruptionError)
    assert str(checkpoint / PART) in str(error)
    assert "cut off" in str(error)


def test_a_missing_part_is_named_and_who_wrote_it(checkpoint: Path) -> None:
    (checkpoint / PART).unlink()
    error = failure_of(lambda: load(checkpoint, SMALL))
    assert isinstance(error, fp.CheckpointNotFoundError)
    assert str(checkpoint / PART) in str(error)
    assert "rank 0" in str(error)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("before", [100, 1000])
def test_a_part_of_another_save_is_refused(tmp_path: Path, verify: bool, before: int) -> None:
    """Whatever lies where a tensor ought to lie, it is no tensor's head there."""
    state = {"a": torch.zeros(1 << 16, dtype=torch.int64), "b": torch.zeros(7)}
    save(state, tmp_path / "checkpoint")
    save({"x": torch.zeros(before), **state, "y": torch.zeros(100)}, tmp_path / "other")
    (tmp_path / "other" / PART).replace(tmp_path / "checkpoint" / PART)
    error = failure_of(lambda: load(tmp_path / "checkpoint", state, verify=verify))
    assert isinstance(error, (fp.CorruptionError, fp.UnsupportedError))


class Intruder:
    def __reduce__(self) -> Any:
        return os.getpid, ()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (pickle.dumps(Intruder()), "posix.getpid"),
        (b"no pickle at all", "cannot be read"),
        (b"", "cannot be read"),
        (pickle.dumps({}), "no metadata"),
        (pickle.dumps(Metadata({})), "no metadata"),
    ],
)
def test_metadata_that_are_none_are_refused(checkpoint: Path, written: bytes, said: str) -> None:
    (checkpoint / ".metadata").write_bytes(written)
    with pytest.raises(fp.FormatError, match=said):
        FastPersistReader(checkpoint).read_metadata()


def test_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(fp.CheckpointNotFoundError, match="there is no checkpoint"):
        FastPersistReader(tmp_path / "nothing").read_metadata()


@tells_why
def test_no_checkpoint_is_said_to_be_none_by_dcp(tmp_path: Path) -> None:
    assert "there is no checkpoint" in str(failure_of(lambda: load(tmp_path / "nothing", SMALL)))


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"relative_path": "../other/" + PART}, fp.FormatError, "'..'"),
        ({"relative_path": "/etc/passwd"}, fp.FormatError, "absolute"),
        ({"transform_descriptors": ["zstd"]}, fp.UnsupportedError, "zstd"),
        ({"offset": 1 << 40}, fp.CorruptionError, "cut off"),
        ({"offset": -5}, fp.CorruptionError, "cut off"),
    ],
)
def test_metadata_that_lead_astray_are_refused(checkpoint: Path, change: Any, kind: Any, said: str) -> None:
    metadata = FastPersistReader(checkpoint).read_metadata()
    metadata.storage_data = {
        index: dataclasses.replace(info, **change) for index, info in metadata.storage_data.items()
    }
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    error = failure_of(lambda: load(checkpoint, SMALL))
    assert isinstance(error, kind)
    assert said in str(error)


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_mixed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(FastPersistReader):
        def prepare_global_plan(self, plans: Any) -> Any:
            save({**SMALL, "b": torch.full((7,), 5.0)}, checkpoint)
            return plans

    error = failure_of(lambda: dcp.load(blank(SMALL), storage_reader=Late(checkpoint)))
    assert isinstance(error, fp.CheckpointNotFoundError)
    assert "replaced" in str(error)


def test_a_read_that_fails_is_an_error(checkpoint: Path) -> None:
    _native.set_fault_plan(_native.FaultPlan(op="read", nth=1, sys_errno=errno.EIO))
    try:
        error = failure_of(lambda: load(checkpoint, SMALL, engine="fault:threads"))
    finally:
        _native.clear_fault_plan()
    assert isinstance(error, fp.StorageError)
    assert error.errno == errno.EIO


def test_an_item_that_the_metadata_do_not_place_is_named(checkpoint: Path) -> None:
    metadata = FastPersistReader(checkpoint).read_metadata()
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "b"}
    assert MetadataIndex("b", [0]) not in metadata.storage_data
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    error = failure_of(lambda: load(checkpoint, SMALL))
    assert isinstance(error, fp.FormatError)
    assert "'b'" in str(error)


def test_a_load_counts_as_a_change_of_what_it_fills(checkpoint: Path) -> None:
    state = {"a": torch.zeros_like(SMALL["a"]), "b": torch.zeros_like(SMALL["b"])}
    versions = {name: tensor._version for name, tensor in state.items()}
    dcp.load(state, storage_reader=FastPersistReader(checkpoint), no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, SMALL[name])
        assert tensor._version > versions[name]
