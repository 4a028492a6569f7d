"""A checkpoint that dcp.save writes appears as a whole, and leaves alone what is not its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import (
    IGNORED,
    PART,
    SMALL,
    WRITERS,
    failure_of,
    load,
    make_state,
    portrait,
    save,
)
from support.rank_faults import Point, watched
from support.runs import hidden_names
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

import fastpersist as fp
from fastpersist.integrations.torch_dcp import FastPersistSavePlanner, FastPersistWriter

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]


def test_a_checkpoint_has_a_manifest_that_verifies(tmp_path: Path) -> None:
    save(make_state(), tmp_path / "checkpoint")
    report = fp.verify(tmp_path / "checkpoint")
    assert report.ok
    assert report.has_checksums
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [".metadata", "MANIFEST.json", PART]
    assert hidden_names(tmp_path) == []


def test_parts_are_not_read_again_for_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def adopted(*_: Any) -> None:
        raise AssertionError("it reads what was written")

    monkeypatch.setattr("fastpersist.saving.directory_files.DirectoryFiles._read", adopted)
    save(make_state(), tmp_path / "checkpoint")
    assert fp.verify(tmp_path / "checkpoint").ok


@pytest.mark.parametrize("durable", [True, False])
def test_every_file_is_synced_unless_that_is_not_wanted(tmp_path: Path, durable: bool) -> None:
    with watched() as counts:
        save(make_state(), tmp_path / "checkpoint", durable=durable)
    assert counts["sync"] >= 3 if durable else not counts["sync"]
    assert portrait(load(tmp_path / "checkpoint", make_state())) == portrait(make_state())


@pytest.mark.parametrize("before", ["ours", "torch's with 2 threads"])
def test_a_save_replaces_an_older_checkpoint_as_a_whole(tmp_path: Path, before: str) -> None:
    path = tmp_path / "checkpoint"
    dcp.save(make_state(), storage_writer=WRITERS[before](path))
    (path / "__7_0.distcp").write_bytes(b"of a rank that there is no more")
    save(make_state(2), path)
    assert sorted(os.listdir(path)) == [".metadata", "MANIFEST.json", PART]
    assert portrait(load(path, make_state())) == portrait(make_state(2))
    assert hidden_names(tmp_path) == []


def test_without_overwrite_the_older_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(make_state(), path)
    error = failure_of(lambda: save(make_state(2), path, overwrite=False))
    assert isinstance(error, fp.ConfigError)
    assert portrait(load(path, make_state())) == portrait(make_state())


def test_what_is_in_a_directory_that_is_no_checkpoint_stays(tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter").write_text("one")
    save({"a": torch.ones(3)}, path)
    assert sorted(os.listdir(path)) == [".metadata", "MANIFEST.json", PART, "chapter"]
    assert (path / "chapter").read_text() == "one"
    assert load(path, {"a": torch.ones(3)})["a"].tolist() == [1, 1, 1]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(SMALL, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("name", ["make_directory", "create", "allocate", "truncate", "sync", "write", "exchange"])
def test_a_directory_that_cannot_be_made_or_published_leaves_the_older_checkpoint(checkpoint: Path, name: str) -> None:
    def fail() -> None:
        raise fp.StorageError(errno.EIO, f"{name}: the disk is gone")

    with watched(Point(name, 1), fail) as counts:
        error = failure_of(lambda: save({**SMALL, "b": torch.full((7,), 5.0)}, checkpoint))
    assert counts[name] >= 1
    assert isinstance(error, fp.StorageError)
    assert "the disk is gone" in str(error)
    assert hidden_names(checkpoint.parent) == []
    assert torch.equal(load(checkpoint, SMALL)["b"], torch.ones(7))


def test_a_planner_that_fails_leaves_the_older_checkpoint(checkpoint: Path) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "b":
                raise ValueError("no such tensor any more")
            return super().resolve_data(write_item)

    def fail() -> None:
        dcp.save(SMALL, storage_writer=FastPersistWriter(checkpoint), planner=Failing())

    assert isinstance(failure_of(fail), ValueError)
    assert hidden_names(checkpoint.parent) == []
    assert torch.equal(load(checkpoint, SMALL)["a"], torch.arange(1 << 16))


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Start and end without plans of other tests: they are kept in the class."""
    kept = [getattr(SavePlanner, name) for name in dir(SavePlanner) if name.startswith("_cached")]
    assert kept
    for plans in kept:
        plans.clear()
    yield
    for plans in kept:
        plans.clear()


def test_plans_may_be_kept(tmp_path: Path, no_plans: None) -> None:
    for seed in (1, 2, 3):
        planner = FastPersistSavePlanner(enable_plan_caching=True)
        dcp.save(make_state(seed), storage_writer=FastPersistWriter(tmp_path / str(seed)), planner=planner)
    for seed in (1, 2, 3):
        assert portrait(load(tmp_path / str(seed), make_state())) == portrait(make_state(seed))


def test_torchs_planner_that_keeps_plans_is_told_which_one_to_use(tmp_path: Path, no_plans: None) -> None:
    def save_keeping_plans() -> None:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": torch.ones(3)}, storage_writer=FastPersistWriter(tmp_path / "checkpoint"), planner=planner)

    save_keeping_plans()
    assert "FastPersistSavePlanner" in str(failure_of(save_keeping_plans))
