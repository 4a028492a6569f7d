"""One rank of several that save sharded state has a fault: all hear of it, nothing half is seen, the next one works."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import Point, kill_this_process, points_of, spread, watched
from support.runs import hidden_names
from support.sameness import assert_same
from support.sharded_runs import ShardedRun, expected, mesh_of_all, sharded

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import Filesystem, using

NOTICED_S_MAX = 8.0  # the kernel tells at once that a process is gone; this machine may be busy


class Saver:
    """One rank, which saves step after step, whatever becomes of each."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.run = ShardedRun(mesh_of_all())
        self.checkpoints = fp.Checkpointer(
            root, **{"sharded": True, "optimizer": self.run.optimizer, "process_group": dist.group.WORLD, **options}
        )

    def outcome(self, change: Callable[[dict[str, Any]], object] = len, step: int | None = None) -> Any:
        """Save one more step; return its error."""
        state = self.run.advance().state()
        change(state)
        try:
            return self.checkpoints.save(step or self.run.step, state).exception()
        except fp.FastPersistError as error:
            return error

    def close(self) -> None:
        """Close, when all ranks have come here."""
        dist.barrier()
        self.checkpoints.close()


def check_steps(root: Path, steps: list[int]) -> None:
    """Check that these steps are there, whole, and nothing else."""
    reader = fp.Checkpointer(root)
    assert reader.steps() == steps
    for step in steps:
        assert fp.verify(root / f"step-{step:08d}").ok
        found = reader.load(step)
        assert_same({key: found[key] for key in expected(step)}, expected(step))
    assert hidden_names(root) == []


# --- killed


def save_until_killed(rank: int, count: int, root: Path, victim: int, point: Point | None) -> tuple[int, Any, Any]:
    """Go on from what is there; save one step, and one in which a rank is killed. Return what became of the latter."""
    run = ShardedRun(mesh_of_all())
    checkpoints = fp.Checkpointer(root, sharded=True, optimizer=run.optimizer, process_group=dist.group.WORLD, keep=2)
    newest = [checkpoints.latest() or 0]
    dist.broadcast_object_list(newest)
    run.advance(newest[0] + 1)
    checkpoints.save(run.step, run.state()).result()
    run.advance()
    dist.barrier()
    started_s = time.monotonic()
    with watched(point if rank == victim else None, kill_this_process) as counts:
        try:
            error = checkpoints.save(run.step, run.state()).exception()
        except fp.FastPersistError as raised:
            error = raised
        checkpoints.close()
    assert time.monotonic() - started_s < NOTICED_S_MAX
    return run.step, error, counts


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_before_a_call_leaves_whole_steps_and_the_others_know(tmp_path: Path, victim: int) -> None:
    counts: Counter[str] = run_ranks(2, save_until_killed, tmp_path, victim, None)[victim][2]
    points = points_of(counts)
    assert {point.name for point in points} >= {
        *("Session.finish", "Writer.append", "Writer.finish", "create", "allocate", "truncate", "sync"),
        *(("Session.tell", "Session.hear") if victim else ("Session.gather", "Session.answer", "rename_to_free_name")),
    }
    for point in spread(points, 5):
        other = rank_endings(2, save_until_killed, tmp_path, victim, point)
        assert other[victim].signal == signal.SIGKILL, (point, other[victim].trace)
        ending = other[1 - victim]
        assert ending.error_type is None, (point, ending.trace)
        step, error, _ = ending.result
        steps = fp.Checkpointer(tmp_path).steps()
        assert steps[-1] in (step - 1, step), point
        if error is None:
            assert steps[-1] == step, point
        else:
            assert isinstance(error, fp.PeerError), (point, error)
            assert error.rank == victim, (point, error)
            assert victim == 0 or steps[-1] == step - 1, point
        for found in steps:
            assert_same(fp.Checkpointer(tmp_path).load(found), expected(found))
    last = run_ranks(2, save_until_killed, tmp_path, 0, None)[0][0]
    check_steps(tmp_path, [last - 1, last])


# --- the disk


class Refusing(Filesystem):
    """A disk of one rank that has no room for its part, at one call."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.is_full = False

    def _refuse(self, call: str, path: str) -> None:
        if self.is_full and call == self.call and path.endswith(".distcp"):
            raise fp.NoSpaceError(errno.ENOSPC, f"{call} of {path}: no room", path)

    def create(self, path: str, *arguments: Any) -> int:
        self._refuse("create", path)
        return super().create(path, *arguments)

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        self._refuse("allocate", path)
        super().allocate(fd, size_bytes, path)

    def sync(self, fd: int, path: str) -> None:
        self._refuse("sync", path)
        super().sync(fd, path)


@pytest.mark.parametrize("call", ["create", "allocate", "sync"])
def test_full_disk_of_one_rank_fails_that_step_on_all_and_no_other(tmp_path: Path, call: str) -> None:
    def work(rank: int, count: int, full: int) -> list[Any]:
        with using(disk := Refusing(call)):
            saver = Saver(tmp_path)
            errors = [saver.outcome()]
            disk.is_full = rank == full
            errors.append(saver.outcome())
            disk.is_full = False
            errors.append(saver.outcome())
            saver.close()
        return errors

    full = 1 if call != "sync" else 0
    endings = run_ranks(2, work, full)
    assert [endings[full][0], endings[full][2]] == [None, None]
    assert isinstance(endings[full][1], fp.NoSpaceError)
    before, told, after = endings[1 - full]
    assert (before, after) == (None, None)
    assert isinstance(told, fp.PeerError), told
    assert told.rank == full
    assert "no room" in str(told)
    check_steps(tmp_path, [1, 3])


def test_a_write_that_fails_says_which_rank_and_near_which_tensor(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> list[Any]:
        saver = Saver(tmp_path, engine="fault:threads" if rank == 1 else "auto")
        if rank == 1:
            _native.set_fault_plan(_native.FaultPlan(op="write", sys_errno=errno.EIO))
        errors = [saver.outcome()]
        _native.clear_fault_plan()
        errors.append(saver.outcome())
        saver.close()
        return errors

    (told, after), (own, after_own) = run_ranks(2, work)
    assert (after, after_own) == (None, None)
    assert isinstance(own, fp.StorageError)
    assert own.errno == errno.EIO
    assert "rank 1" in str(own)
    assert "'model." in str(own)
    assert isinstance(told, fp.PeerError)
    check_steps(tmp_path, [2])


# --- ranks that do not fit each other


def other_shape(state: dict[str, Any]) -> None:
    state["position"] = torch.zeros(51, dtype=torch.int64)


def other_dtype(state: dict[str, Any]) -> None:
    state["position"] = torch.zeros(50)


def no_tensor(state: dict[str, Any]) -> None:
    state["position"] = "nowhere"


def plain_where_others_have_shards(state: dict[str, Any]) -> None:
    state["model"]["4"] = torch.zeros(300, 70)


def other_rows(state: dict[str, Any]) -> None:
    state["model"]["4"] = sharded(torch.zeros(301, 70), state["model"]["4"].device_mesh, None)


def no_shard(state: dict[str, Any]) -> None:
    del state["model"]["4"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (other_shape, "'position'"),
        (other_dtype, "'position'"),
        (no_tensor, "'position'"),
        (plain_where_others_have_shards, "'model.4'"),
        (other_rows, "'model.4'"),
        (no_shard, "model.4"),
    ],
)
def test_a_state_that_differs_from_rank_to_rank_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], name: str
) -> None:
    def work(rank: int, count: int) -> list[Any]:
        saver = Saver(tmp_path)
        errors = [saver.outcome(), saver.outcome(change if rank == 1 else len)]
        errors.append(saver.outcome())
        saver.close()
        return errors

    first, second = run_ranks(2, work)
    assert [first[0], second[0], first[2], second[2]] == [None] * 4
    assert isinstance(first[1], fp.CoordinationError), first[1]
    assert not isinstance(first[1], fp.PeerError)
    assert name in str(first[1])
    assert isinstance(second[1], fp.PeerError)
    assert name in str(second[1])
    check_steps(tmp_path, [1, 3])


def test_ranks_that_save_different_steps_or_in_different_ways_are_told(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> list[Any]:
        saver = Saver(tmp_path)
        errors = [saver.outcome(step=1 + rank), saver.outcome()]
        saver.close()
        saver = Saver(tmp_path, sharded=rank == 0)
        errors.append(saver.outcome(step=7))
        saver.close()
        return errors

    first, second = run_ranks(2, work)
    assert isinstance(first[0], fp.CoordinationError)
    assert "step-00000001" in str(first[0])
    assert "step-00000002" in str(first[0])
    assert isinstance(second[0], fp.PeerError)
    assert (first[1], second[1]) == (None, None)
    assert isinstance(first[2], fp.CoordinationError)
    assert isinstance(second[2], fp.CoordinationError)
    check_steps(tmp_path, [2])


def test_what_cannot_be_copied_fails_where_it_is_and_the_others_hear_of_it(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> list[Any]:
        saver = Saver(tmp_path)
        errors: list[Any] = []
        state = saver.run.advance().state()
        if rank == 1:
            state["lock"] = threading.Lock()
        try:
            errors.append(saver.checkpoints.save(1, state).exception())
        except fp.UnsupportedError as error:
            errors.append(str(error))
        errors.append(saver.outcome())
        saver.close()
        return errors

    (told, after), (own, after_own) = run_ranks(2, work)
    assert (after, after_own) == (None, None)
    assert "lock" in str(own)
    assert isinstance(told, fp.PeerError)
    assert told.rank == 1
    check_steps(tmp_path, [2])


def test_a_rank_that_does_not_see_the_directory_says_so(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        if rank == 1:  # what is asked for has gone when this rank opens it

            class Elsewhere(Filesystem):
                def create(self, path: str, *arguments: Any) -> int:
                    return super().create(path.replace("/run/", "/elsewhere/"), *arguments)

            with using(Elsewhere()):
                saver = Saver(tmp_path / "run")
                error = saver.outcome()
        else:
            saver = Saver(tmp_path / "run")
            error = saver.outcome()
        saver.close()
        return error

    first, second = run_ranks(2, work)
    assert isinstance(first, fp.PeerError)
    assert isinstance(second, (fp.UnsupportedError, fp.PeerError))
    assert os.listdir(tmp_path) == ["run"]
    assert hidden_names(tmp_path / "run") == []
