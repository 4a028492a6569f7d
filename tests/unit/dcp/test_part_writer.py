"""A part file holds what torch.save writes of each tensor; its space is reserved first, and little memory is held."""

from __future__ import annotations

import errno
import io
import itertools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import (
    IGNORED,
    PART,
    failures,
    load,
    loaded,
    make_state,
    place_of,
    portrait,
    save,
)
from support.runs import hidden_names
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.multiprocessing.reductions import StorageWeakRef

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistWriter

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]


def test_blobs_are_what_torch_save_writes_and_zipfile_finds_no_error_in(tmp_path: Path) -> None:
    state = {name: value for name, value in make_state().items() if isinstance(value, torch.Tensor)}
    save(state, tmp_path / "checkpoint")
    data = (tmp_path / "checkpoint" / PART).read_bytes()
    metadata = FastPersistReader(tmp_path / "checkpoint").read_metadata()
    assert len(metadata.storage_data) == len(state)
    for index, info in metadata.storage_data.items():
        blob = data[info.offset : info.offset + info.length]
        assert zipfile.ZipFile(io.BytesIO(blob)).testzip() is None
        found = torch.load(io.BytesIO(blob), weights_only=True)
        assert portrait(found) == portrait(state[index.fqn])
        assert found.untyped_storage().nbytes() == found.nbytes  # and nothing else of what it was a view of
        if found.nbytes >= 1 << 16:
            start = zipfile.ZipFile(io.BytesIO(blob)).getinfo("archive/data/0")
            stored = data.index(bytes(found.reshape(-1).view(torch.uint8).numpy()), info.offset + start.header_offset)
            assert stored % 4096 == info.offset % 4096 == 0


class Tagged(torch.Tensor):
    """A subclass, which the pickle names."""


@pytest.mark.parametrize("reader", [FastPersistReader, dcp.FileSystemReader], ids=["ours", "torch's"])
def test_tensors_of_a_subclass_go_through_torch_save(tmp_path: Path, reader: Any) -> None:
    state = {"tagged": torch.randn(3, 50)[1:, :7].as_subclass(Tagged), "plain": torch.arange(5)}
    save(state, tmp_path / "checkpoint")
    place = place_of(tmp_path / "checkpoint", "tagged")
    blob = (tmp_path / "checkpoint" / PART).read_bytes()[place.offset : place.offset + place.length]
    with torch.serialization.safe_globals([Tagged]):
        found = torch.load(io.BytesIO(blob))
        assert type(found) is Tagged
        assert found.untyped_storage().nbytes() == found.nbytes
        assert loaded(tmp_path / "checkpoint", reader, state) == portrait(state)


def test_space_is_reserved_before_anything_is_written(tmp_path: Path) -> None:
    reserved = []

    class Noted(Filesystem):
        def allocate(self, fd: int, size_bytes: int, path: str) -> None:
            reserved.append(size_bytes)
            super().allocate(fd, size_bytes, path)

    with using(Noted()):
        save({"a": torch.ones(1 << 20), "b": torch.ones(5)}, tmp_path / "checkpoint")
    part_bytes = (tmp_path / "checkpoint" / PART).stat().st_size
    assert part_bytes <= reserved[0] <= part_bytes + (1 << 16)


def test_what_a_planner_makes_is_let_go_before_it_makes_more(tmp_path: Path) -> None:
    made: list[StorageWeakRef] = []
    alive_counts = []

    class Converting(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            alive_counts.append(sum(not one.expired() for one in made))
            doubled = super().resolve_data(write_item) * 2
            made.append(StorageWeakRef(doubled.untyped_storage()))
            return doubled

    state = {str(number): torch.full((1 << 21,), float(number)) for number in range(6)}
    dcp.save(state, storage_writer=FastPersistWriter(tmp_path / "checkpoint"), planner=Converting())
    assert max(alive_counts) <= 1
    assert load(tmp_path / "checkpoint", state)["5"][0] == 10


@pytest.mark.parametrize("sys_errno", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_write_that_fails_leaves_the_older_checkpoint(tmp_path: Path, sys_errno: int) -> None:
    path = tmp_path / "checkpoint"
    save(make_state(), path)
    for nth in itertools.count(1):
        _native.set_fault_plan(_native.FaultPlan(op="write", nth=nth, sys_errno=sys_errno))
        try:
            writer = FastPersistWriter(path, engine="fault:threads")
            dcp.save(make_state(2), storage_writer=writer)
        except dcp.api.CheckpointException as caught:
            (error,) = failures(caught)
        else:
            break
        finally:
            _native.clear_fault_plan()
        assert isinstance(error, fp.NoSpaceError if sys_errno == errno.ENOSPC else fp.StorageError)
        assert "rank 0" in str(error)
        assert str(path / PART) in str(error)
        assert "(at '" in str(error)  # a tensor
        assert hidden_names(tmp_path) == []
        assert portrait(load(path, make_state())) == portrait(make_state())
    assert nth > 1
    assert portrait(load(path, make_state())) == portrait(make_state(2))
