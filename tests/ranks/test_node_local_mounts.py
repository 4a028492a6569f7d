"""A root that is not the same on all ranks: a disk that is not mounted is no disk that is not shared."""

from __future__ import annotations

import errno
import os
import socket
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.process_groups import run_ranks
from support.runs import Run, hidden_names
from support.store_runs import SIZES, checkpoints_at, step_path

import fastpersist as fp
from fastpersist.distributed.node_local.detection import Stores, StoreSeeker


def save_twice(rank: int, count: int, roots: list[Path], make_between: Path | None) -> list[str]:
    """Save a step, make a directory, save one more; return what each raises."""
    run = Run(SIZES).advance()
    said = []
    with checkpoints_at(roots[rank], run) as checkpoints:
        for step in (1, 2):
            error = checkpoints.save(step, run.state()).exception()
            said.append("" if error is None else f"{type(error).__name__}: {error}")
            dist.barrier()
            if make_between is not None and rank == 0:
                make_between.mkdir(parents=True, exist_ok=True)
            dist.barrier()
    return said


# --- without node_local, all ranks need one file system


def refused(rank: int, count: int, root: Path, mended: Path) -> tuple[BaseException | None, str]:
    """Save, fail, have somebody mount the file system, and save again."""
    run = Run(SIZES).advance()
    with checkpoints_at(root, run, node_local=None, on_error="warn") as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = checkpoints.save(1, run.state(), rank_state=rank).exception()
        dist.barrier()
        if rank == count // 2:
            assert not root.exists()
            root.symlink_to(mended)
        dist.barrier()
        again = checkpoints.save(2, run.state(), rank_state=rank).exception()
    return error, "" if again is None else str(again)


@pytest.mark.parametrize("count", [2, 4])
def test_first_save_fails_on_all_ranks_and_names_hosts_and_what_each_sees(tmp_path: Path, count: int) -> None:
    def work(rank: int, count: int) -> Any:
        name = f"node-{rank * 2 // count}"
        with mock.patch("socket.gethostname", return_value=name):
            return refused(rank, count, tmp_path / ("a" if name == "node-0" else "b"), tmp_path / "a")

    for rank, (error, again) in enumerate(run_ranks(count, work)):
        assert type(error) is (fp.PeerError if rank else fp.StorageError)
        for said in ("node-0", str(tmp_path / "a"), "node-1", str(tmp_path / "b"), "mounted at", "copies", "parts"):
            assert said in str(error)
        assert again == ""  # all see one file system now
    assert hidden_names(tmp_path / "a") == []
    assert fp.Checkpointer(tmp_path / "a").steps() == [2]


def test_refused_save_leaves_no_root_behind(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES).advance()
        root = tmp_path / f"{rank}" / "run"
        with checkpoints_at(root, run, node_local=None, on_error="warn") as checkpoints, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [str(checkpoints.save(step, run.state(), rank_state=rank).exception()) for step in (1, 2)]

    for errors in run_ranks(2, work):
        assert all(f"and there is no {tmp_path / '1'}" in error for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_sharded_state_needs_one_file_system_too(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> str:
        checkpoints = fp.Checkpointer(
            tmp_path / f"{rank}", process_group=dist.group.WORLD, sharded=True, on_error="warn"
        )
        with checkpoints, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return str(checkpoints.save(1, {"own": torch.ones(rank + 1)}).exception())

    for said in run_ranks(2, work):
        assert f"{tmp_path / '0'} on" in said
        assert f"{tmp_path / '1'} on" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("node_local", ["shared", True, "PARTS"])
def test_other_words_for_node_local_are_refused(tmp_path: Path, node_local: Any) -> None:
    with pytest.raises(fp.ConfigError, match="node_local"):
        fp.Checkpointer(tmp_path, node_local=node_local)


# --- with it, what has to be there all the same


def test_parents_that_are_missing_on_one_rank_are_an_error_that_names_host_and_path(tmp_path: Path) -> None:
    roots = [tmp_path / "here" / "runs" / "a", tmp_path / "mnt" / "runs" / "a"]
    roots[0].parent.mkdir(parents=True)
    first, other = run_ranks(2, save_twice, roots, roots[1].parent)
    assert first[0].startswith("StorageError: ")
    assert other[0].startswith("PeerError: rank 0 failed")
    for said in (first[0], other[0]):
        assert f"rank 1 on {socket.gethostname()} has no {tmp_path / 'mnt'}." in said
        assert "mounted" in said
    assert (first[1], other[1]) == ("", "")  # the directory is there now, and each has its part
    assert (step_path(roots[1], 2) / "PARTS.json").exists()
    assert not step_path(roots[1], 1).exists()


def test_parents_that_rank_0_has_to_make_are_an_error_each_time_and_are_not_left_there(tmp_path: Path) -> None:
    roots = [tmp_path / "mnt" / "runs" / "a", tmp_path / "there" / "runs" / "a"]
    roots[1].parent.mkdir(parents=True)
    for _ in range(2):  # as a job is that is started again
        for said in run_ranks(2, save_twice, roots, None):
            for one in said:
                assert f"rank 0 on {socket.gethostname()} had no {tmp_path / 'mnt'}." in one
        assert not (tmp_path / "mnt").exists()
        assert {path.name for path in roots[1].rglob("*")} <= {".lock", "events-rank-00001.jsonl"}


def test_link_into_what_is_not_mounted_is_followed_to_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "mnt" / "data")
    first, _ = run_ranks(2, save_twice, [tmp_path / "here" / "a", tmp_path / "data" / "a"], tmp_path / "mnt" / "data")
    assert f"has no {tmp_path / 'mnt'}." in first[0]
    assert first[1] == ""


def test_parents_are_made_where_all_ranks_see_them(tmp_path: Path) -> None:
    root = tmp_path / "new" / "runs" / "a"
    assert run_ranks(2, save_twice, [root, root], tmp_path) == [["", ""]] * 2
    assert (step_path(root, 2) / "state.pt").exists()


@pytest.mark.parametrize("broken", [".step-00000001.pending-token", "runs"])
def test_error_of_the_disk_is_raised_and_makes_no_other_file_system_of_it(tmp_path: Path, broken: str) -> None:
    root = tmp_path / "runs" / "a"
    root.parent.mkdir()
    stores = Stores(lambda: pytest.fail("the root is made"), "parts")
    follower = StoreSeeker(os.fspath(root / "step-00000001"), 1, stores)
    stat = os.stat

    def fail(path: str, *arguments: object, **options: object) -> os.stat_result:
        if os.path.basename(path) == broken:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(path, *arguments, **options)  # type: ignore[arg-type]

    with mock.patch("os.stat", fail), mock.patch("os.lstat", fail):
        with pytest.raises(fp.StorageError, match=broken) as raised:
            follower.reply({"look": ".step-00000001.pending-token", "first_ranks": None, "overwrite": False})
    assert raised.value.errno == errno.ESTALE
    assert not root.exists()
