"""kill -9 of a process that trains and saves every step: at random moments, and before every operation of the protocol.

Whatever was being done: the newest committed step loads, is what was saved at that step, and is not older than what
had been reported as durable; the next process goes on at once and clears up.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.directories import Refusing, kill_alone, leave, wait_for_report
from support.filesystems import Operation, WatchedFilesystem
from support.forking import NOTHING_REPORTED, SMALL_RING, Child, Report
from support.runs import FEW, SIZES, Replay, Run, hidden_names, remove_root

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.saving.pending_save import PendingSave

ALIVE_S_MAX = 0.2  # some ten saves; the first may be killed as well as any other
SURE_KILL_COUNT = 15  # of so many random kills, at least one leaves something behind


class Counting(WatchedFilesystem):
    """Counts operations, and kills this process before the n-th."""

    def __init__(self, nth: int | None = None) -> None:
        self.operations: list[Operation] = []
        self._nth = nth

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        if len(self.operations) == self._nth:
            os.kill(os.getpid(), signal.SIGKILL)
        self.operations.append(operation)
        yield


class CountingRefusing(Refusing, Counting):
    """The same where two names cannot change places."""


# --- random moments


def training(root: Path, seed: int) -> Callable[[Report], None]:
    """Return what a child does until it is killed: resume, train, save every step, report what is durable."""

    def train(report: Report) -> None:
        rng = random.Random(seed)
        run = Run()
        options: dict[str, Any] = {
            "keep": 2,
            "keep_every": rng.choice([None, 7]),
            "max_host_bytes": rng.choice([None, 0, 200_000]),
            "busy": rng.choice(["wait", "latest", "skip"]),
            "optimizer": rng.choice([None, run.optimizer]),
        }
        checkpointer = fp.Checkpointer(root, **options)
        if checkpointer.latest() is not None:
            run.load(checkpointer)
            if rng.random() < 0.5:  # what a trainer may do that begins again where it has stopped
                checkpointer.save(run.step, run.state(), overwrite=True)
        unfinished: list[tuple[int, PendingSave]] = []
        while True:
            run.advance()
            unfinished.append((run.step, checkpointer.save(run.step, run.state(), rank_state={"step": run.step})))
            while unfinished and unfinished[0][1].done():
                step, pending = unfinished.pop(0)
                if not pending.skipped():
                    pending.result()
                    report(step)

    return train


def test_killed_at_random_moments(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kill_count = request.config.getoption("--kills")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    replay = Replay()
    root = tmp_path / "run"
    durable = 0
    leftover_count = 0
    for _ in range(kill_count):
        with Child(training(root, rng.randrange(1 << 32)), SMALL_RING) as child:
            if rng.random() < 0.5:
                while child.reported == NOTHING_REPORTED and not child.ended():
                    time.sleep(0.001)
            time.sleep(rng.uniform(0.0, ALIVE_S_MAX))
            ending = child.kill()
            assert ending.signal == signal.SIGKILL, ending.message
            if child.reported != NOTHING_REPORTED:
                durable = child.reported
        leftover_count += len(hidden_names(root))
        steps = replay.check_all(root)
        newest = replay.check_newest(root) or 0
        assert steps[-1:] == ([newest] if newest else [])
        assert newest >= durable
        durable = newest
        chance = rng.random()
        if chance < 0.25:
            durable = expect_next_process_clears_up(root, newest + 1, 2, replay)
        elif chance < 0.5:
            shutil.rmtree(root, ignore_errors=True)
            durable = 0
    assert leftover_count > 0 or kill_count < SURE_KILL_COUNT


def expect_next_process_clears_up(root: Path, step: int, keep: int, replay: Replay) -> int:
    """Save one more step; only the last `keep` are left, and nothing hidden."""
    run = replay.at(step)
    with fp.Checkpointer(root, keep=keep, optimizer=run.optimizer) as checkpointer:
        checkpointer.save(step, run.state())
    assert hidden_names(root) == []
    assert len(checkpointer.steps()) <= keep
    assert (root / "LATEST").read_text() == f"step-{step:08d}\n"
    assert replay.check_newest(root) == step
    return step


# --- every operation


def prepare(root: Path, sizes: tuple[int, ...] = SIZES) -> None:
    """Make a root with steps 1 and 2, and with what a dead process has left of step 3 and of a replacement of 2."""
    run = Run(sizes)
    with fp.Checkpointer(root, optimizer=run.optimizer) as checkpointer:
        for step in (1, 2):
            run.advance(step)
            checkpointer.save(step, run.state())
    leave(root, name="step-00000003")
    leave(root, "retired", "step-00000002", manifest=b"of an older one")


def save_and_replace(
    root: Path, filesystem: Filesystem, report: Report, sizes: tuple[int, ...] = SIZES, **options: Any
) -> None:
    """Save step 3, which removes step 1; then replace step 3 by a state that says it is the 4th; report either."""
    run = Run(sizes).advance(3)
    with using(filesystem):
        with fp.Checkpointer(root, keep=2, optimizer=run.optimizer, **options) as checkpointer:
            checkpointer.save(3, run.state(), rank_state={"step": 3}).result()
            report(3)
            checkpointer.save(3, run.advance(4).state(), rank_state={"step": 4}, overwrite=True).result()
            report(4)


def expect_whole(root: Path, durable: int, replay: Replay) -> int:
    """Return what step 3 holds, or 2 if it is not there; all that is there must be whole and not too old."""
    reader = fp.Checkpointer(root)
    steps = reader.steps()
    assert steps in ([1, 2], [1, 2, 3], [2, 3]), steps
    for step in steps:
        loaded = reader.load(step, verify=True)
        if step == 3:
            assert loaded["rank_state"] == {"step": loaded["step"]}
        found = replay.check(loaded)
        assert found == step or (step, found) == (3, 4)
    found = int(reader.load(strict=True)["step"])
    assert found >= durable
    return found


@pytest.mark.parametrize("refusing", [False, True], ids=["exchange", "retire"])
def test_killed_before_each_operation(tmp_path: Path, refusing: bool) -> None:
    double = CountingRefusing if refusing else Counting
    prepare(tmp_path / "prepared", FEW)
    shutil.copytree(tmp_path / "prepared", tmp_path / "all")
    save_and_replace(tmp_path / "all", filesystem := double(), lambda step: None, FEW)
    operations = filesystem.operations
    names = [operation.name for operation in operations]
    replaces = {"rename"} if refusing else {"rename", "exchange"}
    assert set(names) == replaces | {
        "make_directory", "create", "allocate", "truncate", "sync", "write", "sync_directory", "rename_to_free_name",
        "unlink", "remove_directory",
    }  # fmt: skip

    first = 0
    if refusing:  # until there it is the other way's
        first = next(index for index, operation in enumerate(operations) if ".retired-" in operation.target)
    seen: list[int] = []
    replay = Replay(FEW)
    for nth in range(first, len(operations) + 1):
        root = tmp_path / str(nth)
        shutil.copytree(tmp_path / "prepared", root)

        def work(report: Report, nth: int = nth, root: Path = root) -> None:
            save_and_replace(root, double(nth), report, FEW)

        with Child(work, SMALL_RING) as child:
            ending = child.wait()
            durable = max(child.reported, 2)
        assert (ending.signal == signal.SIGKILL) == (nth < len(operations)), (nth, ending)
        seen.append(expect_whole(root, durable, replay))
        expect_next_process_clears_up(root, 5, 2, replay)
        remove_root(root)
    assert seen == sorted(seen)
    assert set(seen) == ({3, 4} if refusing else {2, 3, 4})


@pytest.mark.parametrize("nth", [1, 3, 6])
def test_killed_amid_the_data(tmp_path: Path, nth: int) -> None:
    prepare(tmp_path)

    def work(report: Report) -> None:
        def die(self: PendingSave, done_bytes: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        PendingSave.poll = die  # type: ignore[method-assign]
        # The n-th request takes for ever, and whoever waits for it polls meanwhile.
        _native.set_fault_plan(_native.FaultPlan(op="write", nth=nth, kind="delay", delay_ms=100_000))
        save_and_replace(tmp_path, Filesystem(), report, engine="fault:threads")

    with Child(work, SMALL_RING) as child:
        assert child.wait().signal == signal.SIGKILL, child.wait().message
    assert len(hidden_names(tmp_path)) == 1
    assert expect_whole(tmp_path, 2, Replay()) == 2
    expect_next_process_clears_up(tmp_path, 5, 2, Replay())


# --- workers that outlive their owner


@pytest.mark.parametrize("moment", ["between saves", "while one is written"])
def test_killed_owner_leaves_no_lock_to_its_forked_workers(tmp_path: Path, moment: str) -> None:
    class ForkingFilesystem(Filesystem):
        """Forks a worker, as a DataLoader does in its own time, while a file is open and locks are held."""

        def sync(self, fd: int, path: str) -> None:
            if path.endswith("step-00000002/state.pt"):
                fork_and_stop()
            super().sync(fd, path)

    pids = tmp_path / "worker"

    def fork_and_stop() -> None:
        worker = os.fork()
        if worker == 0:
            signal.pause()
            os._exit(0)
        pids.write_text(str(worker))
        report_to(2)
        signal.pause()

    def report_to(step: int) -> None:
        raise NotImplementedError

    def work(report: Report) -> None:
        nonlocal report_to
        report_to = report
        run = Run().advance(1)
        checkpointer = fp.Checkpointer(tmp_path / "run", optimizer=run.optimizer)
        checkpointer.save(1, run.state()).result()
        if moment == "between saves":
            fork_and_stop()
        with using(ForkingFilesystem()):
            checkpointer.save(2, run.advance(2).state()).result()

    with Child(work) as child:
        wait_for_report(child, 2)
        worker = int(pids.read_text())
        try:
            kill_alone(child)
            began_s = time.monotonic()
            assert Replay().check_newest(tmp_path / "run") == 1
            expect_next_process_clears_up(tmp_path / "run", 2, 2, Replay())
            assert time.monotonic() - began_s < 30.0  # no lock of the worker is waited for
            os.kill(worker, 0)  # it is still there
        finally:
            os.kill(worker, signal.SIGKILL)
