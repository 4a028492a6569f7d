"""Power is lost at any moment of a training that saves, replaces and removes steps: what was durable is there, whole.

Two ways, as in test_power_loss.py: recorded saves are replayed with every loss that is possible, and a real disk is
cloned while a process trains on it.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.directories import leave
from support.filesystems import Operation
from support.forking import NOTHING_REPORTED, SMALL_RING, Child, Report, in_child
from support.loop_disks import NoLoopDisksError, loop_disk, mounted, why_no_loop_disks
from support.power_loss import Fate, ViolationError
from support.power_loss_trees import (
    RecordingRefusing,
    RecordingTrees,
    Tree,
    fates_to_try,
    read_tree,
    tree_after_cut,
    unsafe_operations,
    write_tree,
)
from support.runs import FEW, Replay, Run, hidden_names

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import using
from fastpersist.events.log import EVENTS_NAME

SIZES = (6_000, 7)
CLONE_COUNT = 5


class ForgetsToSyncData(RecordingTrees):
    def sync(self, fd: int, path: str) -> None:
        if not path.endswith("MANIFEST.json"):
            return
        super().sync(fd, path)


class ForgetsToSyncTheManifest(RecordingTrees):
    def sync(self, fd: int, path: str) -> None:
        if path.endswith("MANIFEST.json"):
            return
        super().sync(fd, path)


class ForgetsTheNamesInside(RecordingTrees):
    def sync_directory(self, path: str) -> None:
        if "pending" not in path:
            super().sync_directory(path)


class ForgetsTheRoot(RecordingTrees):
    def sync_directory(self, path: str) -> None:
        if "pending" in path:
            super().sync_directory(path)


def record(root: Path, recorder: RecordingTrees) -> tuple[Tree, list[Operation]]:
    """Save step 3, which removes step 1, and replace it by the 4th state; return what was there, and what was done."""
    run = Run(SIZES)
    with fp.Checkpointer(root, optimizer=run.optimizer) as checkpointer:
        for step in (1, 2):
            run.advance(step)
            checkpointer.save(step, run.state(), rank_state={"step": step})
    leave(root, name="step-00000003")
    leave(root, "retired", "step-00000002", manifest=b"of an older one")
    before = read_tree(root)
    _native.set_write_recording(True)
    try:
        with (
            using(recorder),
            fp.Checkpointer(root, keep=2, optimizer=run.optimizer, engine="fault:threads") as checkpointer,
        ):
            for number in (3, 4):
                recorder.mark("started", number)
                state = run.advance(number).state()
                checkpointer.save(3, state, rank_state={"step": number}, overwrite=number == 4).result()
                recorder.mark("returned", number)
    finally:
        _native.set_write_recording(False)
        _native.take_recorded_writes()
    return before, recorder.log


class Judge:
    """Says whether a rebuilt root is what the promise allows. Looks at each different root once."""

    def __init__(self, scratch: Path) -> None:
        self.judged_count = 0
        self._scratch = scratch
        self._replay = Replay(SIZES)
        self._known: dict[int, int] = {}

    def judge(self, tree: Tree, log: Sequence[Operation]) -> None:
        """Check a root after a power cut at the end of `log`.

        Raises:
            ViolationError: What was durable is damaged or gone, or something is there that was never saved.
        """
        marks = [(operation.name, operation.size_bytes) for operation in log if operation.path == ""]
        returned = max([number for name, number in marks if name == "returned"], default=2)
        started = max([number for _, number in marks], default=2)
        key = hash(frozenset(tree.items()))
        if key not in self._known:
            self.judged_count += 1
            root = self._scratch / str(self.judged_count)
            write_tree(tree, root)
            try:
                self._known[key] = self._newest(root)
            except (fp.FastPersistError, AssertionError, RuntimeError) as error:
                raise ViolationError(f"{root} after {log[-1:]}: {error}") from error
        if not returned <= self._known[key] <= started:
            raise ViolationError(f"state {self._known[key]} is there, {returned} was durable, {started} was begun")

    def _newest(self, root: Path) -> int:
        """Return which state is the newest; step 2 must be there, and all that is there must be whole."""
        reader = fp.Checkpointer(root)
        steps = reader.steps()
        assert steps in ([1, 2], [1, 2, 3], [2, 3]), f"there are the steps {steps}"
        for step in steps:
            loaded = reader.load(step, verify=True)
            assert loaded["rank_state"] == {"step": loaded["step"]}
            number = self._replay.check(loaded)
            assert number == step or (step, number) == (3, 4)
        newest = int(reader.load(strict=True)["step"])
        with fp.Checkpointer(root, keep=2) as writer:
            writer.save(5, {"step": 5})
        assert writer.steps() == [steps[-1], 5]
        assert hidden_names(root) == []
        return newest


def replay_everything(
    root: Path, before: Tree, log: Sequence[Operation], scratch: Path, random_count: int, cut_step: int = 1
) -> Judge:
    """Replay every prefix, or each n-th one, the longest first: there most is promised."""
    judge = Judge(scratch)
    rng = random.Random(0)
    for cut in range(len(log), -1, -cut_step):
        done = log[:cut]
        unsafe = unsafe_operations(before, str(root), done)
        for fates in fates_to_try(done, unsafe, rng, random_count):
            judge.judge(tree_after_cut(before, str(root), done, fates, rng), done)
    return judge


@pytest.mark.parametrize("recorder", [RecordingTrees, RecordingRefusing], ids=["exchange", "retire"])
@pytest.mark.parametrize(("random_count", "cut_step"), [(2, 3), pytest.param(300, 1, marks=pytest.mark.long)])
@in_child(SMALL_RING)
def test_no_loss_of_power_costs_a_step(
    tmp_path: Path, recorder: type[RecordingTrees], random_count: int, cut_step: int
) -> None:
    root = tmp_path / "run"
    before, log = record(root, recorder())
    judge = replay_everything(root, before, log, tmp_path / "replayed", random_count, cut_step)
    names = {operation.name for operation in log}
    assert names >= {"write", "sync", "sync_directory", "rename", "unlink", "remove_directory", "make_directory"}
    assert ("exchange" in names) == (recorder is RecordingTrees)
    assert judge.judged_count > 100


@in_child(SMALL_RING)
def test_recording_is_complete(tmp_path: Path) -> None:
    root = tmp_path / "run"
    before, log = record(root, RecordingTrees())
    trees = tree_after_cut(before, str(root), log, {}, random.Random()), read_tree(root)
    for tree in trees:
        tree.pop(EVENTS_NAME)  # never synced, and not by the protocol: no promise hangs on it
    assert trees[0] == trees[1]
    dropped = dict.fromkeys(unsafe_operations(before, str(root), log), Fate.DROPPED)
    assert {log[index].path.rpartition("/")[2] for index in dropped} != set()  # LATEST, and what was removed last
    assert not {log[index].name for index in dropped} & {"exchange", "rename_to_free_name"}


@pytest.mark.parametrize(
    ("recorder", "said"),
    [
        (ForgetsToSyncData, r"state"),
        (ForgetsToSyncTheManifest, r"the steps \[2\]"),
        (ForgetsTheNamesInside, r"the steps \[2\]"),
        (ForgetsTheRoot, r"the steps \[2\]"),
    ],
)
@in_child(SMALL_RING)
def test_replay_notices_a_broken_protocol(tmp_path: Path, recorder: type[RecordingTrees], said: str) -> None:
    root = tmp_path / "run"
    before, log = record(root, recorder())
    with pytest.raises(ViolationError, match=said):
        replay_everything(root, before, log, tmp_path / "replayed", 20)


@pytest.mark.skipif(why_no_loop_disks() is not None, reason=str(why_no_loop_disks()))
@in_child(SMALL_RING)
def test_cloned_disk_holds_what_was_durable(tmp_path: Path) -> None:
    try:
        with loop_disk(tmp_path) as disk:
            replay = Replay(FEW)

            def train(report: Report) -> None:
                run = Run(FEW)
                checkpointer = fp.Checkpointer(disk.directory / "run", keep=2, optimizer=run.optimizer)
                while True:
                    run.advance()
                    checkpointer.save(run.step, run.state()).result()
                    report(run.step)
                    if run.step % 3 == 0:
                        checkpointer.save(run.step, run.state(), overwrite=True)

            with Child(train) as trainer:
                for _ in range(CLONE_COUNT):
                    seen = trainer.reported
                    while trainer.reported <= max(seen, NOTHING_REPORTED) + 1 and not trainer.ended():
                        time.sleep(0.001)
                    time.sleep(random.uniform(0.0, 0.02))
                    durable = trainer.reported
                    image = disk.clone()
                    begun = trainer.reported + 2
                    with mounted(image) as directory:
                        newest = replay.check_newest(directory / "run")
                        assert newest is not None
                        assert durable <= newest <= begun
                        replay.check_all(directory / "run")
                        with fp.Checkpointer(directory / "run", keep=2) as writer:
                            writer.save(newest + 1, {"step": newest + 1})
                        assert hidden_names(directory / "run") == []
                    image.unlink()
                ending = trainer.kill()
            assert ending.signal == signal.SIGKILL, ending.message
    except NoLoopDisksError as error:
        pytest.skip(f"no loop disks here: {error}")
