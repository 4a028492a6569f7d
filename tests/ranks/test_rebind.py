"""Ranks give up what is under way, and go on with another process group in the same processes."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.runs import Run, held_writers, hidden_names
from support.sameness import assert_same
from support.store_runs import SIZES, checkpoints_at

import fastpersist as fp


@pytest.mark.parametrize("aborting", [0, 1])
def test_rank_that_aborts_waits_for_no_other_and_the_others_hear_of_it(tmp_path: Path, aborting: int) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        checkpoints = checkpoints_at(tmp_path, run, on_error="warn")
        checkpoints.save(1, run.advance().state()).result()
        with held_writers() as writers:
            pending = checkpoints.save(2, run.advance().state())
            assert rank or writers.reached.wait(30)  # the others wait for rank 0
            dist.barrier()
            if rank == aborting:
                checkpoints.close(abort=True)
            dist.barrier()  # the others' writers are held until that one has returned
        error = pending.exception()
        if rank != aborting:
            checkpoints.close()
        return error

    for rank, error in enumerate(run_ranks(3, work)):
        if rank == aborting:
            assert type(error) is fp.SkippedError
        else:
            assert isinstance(error, fp.PeerError)
            assert error.rank == aborting
            assert "given up" in str(error)
    assert fp.Checkpointer(tmp_path).steps() == [1]
    assert hidden_names(tmp_path) == []


def regroup(directory: Path, rank: int, ranks: list[int]) -> dist.ProcessGroup:
    """Leave the group, of which ranks may be dead, and make a new one of these ranks, in this order."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=ranks.index(rank), world_size=len(ranks)
    )
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_ranks_that_are_left_go_on_with_a_new_group(tmp_path: Path, lost: int) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        left = [one for one in range(count) if one != lost]
        run = Run(SIZES)
        checkpoints = checkpoints_at(root, run, on_error="warn")
        checkpoints.save(1, run.advance().state(), rank_state=rank).result()
        with held_writers() as writers:
            pending = checkpoints.save(2, run.advance().state())
            assert rank or writers.reached.wait(30)
            dist.barrier()
            if rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(0.5, writers.release).start()  # rebind() waits for what the thread has begun
            checkpoints.rebind(regroup(tmp_path, rank, left))
        told = pending.exception()
        found = checkpoints.load(into=run.targets(), on_resize=lambda states, *_: states)
        assert (found["step"], found["rank_state"]) == (1, [0, 1, 2])
        run.step = 1
        with checkpoints:
            for _ in range(2):
                checkpoints.save(run.advance().step, run.state(), rank_state=left.index(rank))
        return type(told)

    endings = rank_endings(3, work)
    assert endings[lost].signal == signal.SIGKILL
    for rank, ending in enumerate(endings):
        if rank != lost:
            assert ending.error_type is None, ending.trace
            assert issubclass(ending.result, fp.PeerError | fp.SkippedError)
    with pytest.warns(RuntimeWarning, match="saved by 3 ranks"):
        assert_same(fp.Checkpointer(root).load(1), Run(SIZES).advance(1).state())
    for step in (2, 3):
        path = root / f"step-{step:08d}"
        assert_same(torch.load(path / "state.pt"), Run(SIZES).advance(step).state())
        assert fp.inspect(path).host["rank_count"] == 2
    assert fp.Checkpointer(root).steps() == [1, 2, 3]
    assert hidden_names(root) == []


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_ranks_that_come_back_take_part_again(tmp_path: Path, order: list[int]) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        first = dist.new_group([0, 1])
        if rank < 2:
            checkpoints = checkpoints_at(root, run, group=first)
            checkpoints.save(1, run.advance().state()).result()
            checkpoints.rebind(regroup(tmp_path, rank, order))
        else:
            checkpoints = checkpoints_at(root, run, group=regroup(tmp_path, rank, order))
        with checkpoints:
            checkpoints.load(into=run.targets())
            run.step = 1
            checkpoints.save(2, run.advance().state())
        return repr(checkpoints)

    for rank, told in enumerate(run_ranks(3, work)):
        assert f"rank {order.index(rank)} of 3" in told
    assert fp.inspect(root / "step-00000002").host["rank_count"] == 3
    for step in (1, 2):
        assert_same(fp.Checkpointer(root).load(step), Run(SIZES).advance(step).state())


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_that_no_longer_count_alike_save_again_with_a_new_group(tmp_path: Path, sharded: bool) -> None:
    def work(rank: int, count: int) -> Any:
        state = {"weights": torch.ones(4)}
        with fp.Checkpointer(tmp_path, process_group=dist.group.WORLD, sharded=sharded) as checkpoints:
            checkpoints.save(1, state).result()
            for step in (2 + rank, 3 + rank):  # rank 1 has missed a call
                with pytest.raises(fp.CoordinationError, match=r"missed call: rebind\(group\)"):
                    checkpoints.save(step, state).result()
                dist.barrier()
            checkpoints.rebind(dist.group.WORLD)
            checkpoints.save(5, state).result()
            return checkpoints.steps()

    assert run_ranks(2, work) == [[1, 5]] * 2


def test_process_that_is_left_alone_goes_on_alone(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        checkpoints = checkpoints_at(tmp_path, run)
        checkpoints.save(1, run.advance().state()).result()
        if rank == 0:
            checkpoints.close()
            dist.barrier()
            return
        dist.barrier()  # the root is rank 0's until it has closed
        checkpoints.rebind(None)
        with checkpoints:
            checkpoints.save(2, run.advance().state())

    run_ranks(2, work)
    assert [fp.inspect(tmp_path / f"step-0000000{step}").host.get("rank_count") for step in (1, 2)] == [2, None]


@pytest.mark.parametrize("is_default", [True, False])
def test_group_that_is_destroyed_is_named_by_what_needs_it(tmp_path: Path, is_default: bool) -> None:
    def work(rank: int, count: int) -> None:
        run = Run(SIZES)
        group = dist.group.WORLD if is_default else dist.new_group([0, 1])
        checkpoints = checkpoints_at(tmp_path, run, group=group)
        checkpoints.save(1, run.advance().state()).result()
        dist.destroy_process_group(None if is_default else group)
        for needs_group in (checkpoints.load, partial(checkpoints.load, 1), partial(checkpoints.delete, 1)):
            with pytest.raises(fp.ConfigError, match=r"group of the Checkpointer of .* is gone, .* call rebind\(\)"):
                needs_group()
        checkpoints.save(2, run.advance().state()).result()  # saves have connections of their own
        if rank == 0:
            checkpoints.close()
            return
        checkpoints.rebind(None)
        assert checkpoints.load()["step"] == 2
        checkpoints.close()

    run_ranks(2, work)


def test_a_group_that_torch_does_not_know_is_refused_everywhere(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        run = Run(SIZES)
        destroyed: Any = dist.new_group([0, 1])
        dist.destroy_process_group(destroyed)
        checkpoints = checkpoints_at(tmp_path, run)
        for group in (destroyed, "world", 5):
            calls = [
                lambda group=group: fp.save({}, tmp_path / "a.pt", process_group=group),
                lambda group=group: fp.save_async({}, tmp_path / "a.pt", process_group=group),
                lambda group=group: fp.load(tmp_path / "a.pt", process_group=group),
                lambda group=group: fp.load_into(tmp_path / "a.pt", {}, process_group=group),
                lambda group=group: fp.Checkpointer(tmp_path / "b", process_group=group),
                lambda group=group: checkpoints.rebind(group),
            ]
            for call in calls:
                with pytest.raises(fp.ConfigError, match="torch knows no such process_group"):
                    call()
        checkpoints.save(1, run.advance().state()).result()  # still with its own group
        checkpoints.close()

    run_ranks(2, work)


def test_sharded_steps_are_planned_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> None:
        state = {"weights": torch.arange(400_000.0), f"own.{rank}": torch.full((3,), float(rank))}
        checkpoints = fp.Checkpointer(root, process_group=dist.group.WORLD, sharded=True)
        checkpoints.save(1, state).result()
        if rank == 2:
            checkpoints.close()
            return
        checkpoints.rebind(regroup(tmp_path, rank, [1, 0]))
        with checkpoints:
            checkpoints.save(2, state)

    run_ranks(3, work)
    assert sorted(fp.Checkpointer(root).load(1)) == ["own.0", "own.1", "own.2", "weights"]
    found = fp.Checkpointer(root).load(2)
    assert sorted(found) == ["own.0", "own.1", "weights"]
    assert_same(found["weights"], torch.arange(400_000.0))


def test_new_group_that_refuses_leaves_no_rank_that_saves_alone(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> None:
        checkpoints = fp.Checkpointer(root, process_group=dist.group.WORLD)
        checkpoints.save(1, {"a": 1}).result()
        dist.barrier()
        if rank == 1:
            checkpoints._path = str(tmp_path / "file")
            (tmp_path / "file").touch()
        with pytest.raises(fp.ConfigError if rank == 1 else fp.PeerError, match="is a file"):
            checkpoints.rebind(dist.group.WORLD)
        with pytest.raises(fp.CoordinationError, match="closed"):
            checkpoints.save(2, {"a": 2})
        checkpoints._path = str(root)
        checkpoints.rebind(dist.group.WORLD)
        checkpoints.save(2, {"a": 2}).result()
        checkpoints.close()
        with pytest.raises(fp.ConfigError, match="closed"):
            checkpoints.rebind(dist.group.WORLD)

    run_ranks(2, work)
    assert fp.Checkpointer(root).steps() == [1, 2]
