"""Power is lost at any moment while sharded steps are saved and replaced: what was durable is there, whole.

Recorded saves are replayed with every loss that is possible, as in crash/test_checkpointer_power_loss.py, which also
looks at what the next save makes of what is left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.filesystems import Operation
from support.forking import SMALL_RING, in_child
from support.power_loss import ViolationError
from support.power_loss_trees import (
    RecordingTrees,
    Tree,
    fates_to_try,
    read_tree,
    tree_after_cut,
    unsafe_operations,
    write_tree,
)
from support.sameness import assert_same
from support.sharded_runs import ShardedRun, expected

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import using

SHAPES = ((1200,), (3, 2))


class ForgetsTheParts(RecordingTrees):
    def sync(self, fd: int, path: str) -> None:
        if not path.endswith(".distcp"):
            super().sync(fd, path)


class ForgetsTheMetadata(RecordingTrees):
    def sync(self, fd: int, path: str) -> None:
        if not path.endswith(".metadata"):
            super().sync(fd, path)


def record(root: Path, recorder: RecordingTrees) -> tuple[Tree, list[Operation]]:
    """Save step 3, which removes step 1, and replace it by the 4th state; return what was there, and what was done."""
    run = ShardedRun(shapes=SHAPES)
    with fp.Checkpointer(root, sharded=True) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, run.advance().state())
    before = read_tree(root)
    _native.set_write_recording(True)
    try:
        with using(recorder), fp.Checkpointer(root, sharded=True, keep=2, engine="fault:threads") as checkpoints:
            for number in (3, 4):
                recorder.mark("started", number)
                checkpoints.save(3, run.advance().state(), overwrite=number == 4).result()
                recorder.mark("returned", number)
    finally:
        _native.set_write_recording(False)
        _native.take_recorded_writes()
    return before, recorder.log


def newest_state(root: Path) -> int:
    """Check all that is there; return which state is the newest."""
    reader = fp.Checkpointer(root)
    steps = reader.steps()
    assert steps in ([1, 2], [1, 2, 3], [2, 3]), f"there are the steps {steps}"
    newest = 0
    for step in steps:
        loaded = reader.load(step, verify=True)
        newest = int(loaded["step"])
        assert newest == step or (step, newest) == (3, 4)
        assert_same(loaded, expected(newest, SHAPES))
    return newest


def replay_everything(root: Path, before: Tree, log: Sequence[Operation], scratch: Path, random_count: int) -> int:
    """Replay every prefix; return how many different roots that made.

    Raises:
        ViolationError: What was durable is damaged or gone, or something is there that was never saved.
    """
    rng = random.Random(0)
    known: dict[int, int] = {}
    for cut in range(len(log), -1, -1):
        done = log[:cut]
        marks = [(operation.name, operation.size_bytes) for operation in done if operation.path == ""]
        returned = max([number for name, number in marks if name == "returned"], default=2)
        started = max([number for _, number in marks], default=2)
        for fates in fates_to_try(done, unsafe_operations(before, str(root), done), rng, random_count):
            tree = tree_after_cut(before, str(root), done, fates, rng)
            key = hash(frozenset(tree.items()))
            if key not in known:
                write_tree(tree, scratch / str(len(known)))
                try:
                    known[key] = newest_state(scratch / str(len(known)))
                except (fp.FastPersistError, AssertionError, RuntimeError) as error:
                    raise ViolationError(f"{len(known)} after {done[-1:]}: {error}") from error
            if not returned <= known[key] <= started:
                raise ViolationError(f"state {known[key]} is there, {returned} was durable, {started} was begun")
    return len(known)


@pytest.mark.parametrize("random_count", [1, pytest.param(100, marks=pytest.mark.long)])
@in_child(SMALL_RING)
def test_no_loss_of_power_costs_a_sharded_step(tmp_path: Path, random_count: int) -> None:
    root = tmp_path / "run"
    before, log = record(root, RecordingTrees())
    assert replay_everything(root, before, log, tmp_path / "replayed", random_count) > 50
    synced = {operation.path.rpartition("/")[2] for operation in log if operation.name == "sync"}
    assert synced >= {"__0_0.distcp", ".metadata", "MANIFEST.json"}


@pytest.mark.parametrize("recorder", [ForgetsTheParts, ForgetsTheMetadata])
@in_child(SMALL_RING)
def test_replay_notices_what_is_not_synced(tmp_path: Path, recorder: type[RecordingTrees]) -> None:
    root = tmp_path / "run"
    before, log = record(root, recorder())
    with pytest.raises(ViolationError):
        replay_everything(root, before, log, tmp_path / "replayed", 5)
