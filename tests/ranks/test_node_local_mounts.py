"""A root that is not the same on all ranks: a disk that is not mounted is no disk that is not shared."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from support.process_groups import run_ranks
from support.runs import Run
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
        assert [path for path in roots[1].rglob("*") if path.name != ".lock"] == []


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
    follower = StoreSeeker(os.fspath(root / "step-00000001"), 1, Stores(lambda: pytest.fail("the root is made")))
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
