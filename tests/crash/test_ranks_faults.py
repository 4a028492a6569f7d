"""Everything that may go wrong for one rank of several that save together, but not kill it.

Whatever it was: a save is there, whole, or every rank raises, and in time; what was saved before loads; the next save
of the same ranks works; no unfinished directory stays behind.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.filesystems import FailingFilesystem
from support.forking import SMALL_RING
from support.log_levels import quiet
from support.process_groups import run_ranks
from support.rank_faults import (
    SIZES,
    Trainer,
    cut_lines,
    empty_disk_over,
    everybodys,
    expect_steps,
    points_of,
    spread,
    state_numbers,
    wait_until,
    watched,
)
from support.runs import Replay, Run, hidden_names
from support.sandbox import needs_root
from support.states import pending_files
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.distributed import sessions
from fastpersist.distributed.sessions import Session

SHORT_S = 2.0
"""The deadline, where it is to be passed."""
SLACK_S = 5.0
"""This machine may be busy."""


class Holding(Filesystem):
    """While it is held, a sync waits, or what makes a step visible.

    Args:
        publishing: What waits is the call that makes a step visible, in place of a sync.
        stopping: All threads of the process wait, until another one continues it.
    """

    def __init__(self, *, publishing: bool = False, stopping: bool = False) -> None:
        self.held = False
        self.reached = threading.Event()
        self._publishing = publishing
        self._stopping = stopping
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    def sync(self, fd: int, path: str) -> None:
        self._wait(self.held and not self._publishing)
        super().sync(fd, path)

    def rename_to_free_name(self, source: str, target: str) -> None:
        self._wait(self.held and self._publishing)
        super().rename_to_free_name(source, target)

    def _wait(self, held: bool) -> None:
        if held and self._stopping:
            self.held = False
            # To this thread, which takes it before its next instruction. A signal to the process may go to another
            # thread, and this one would go on until that one is scheduled.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif held:
            self.reached.set()
            if not self._released.wait(PATIENCE_S):
                raise TimeoutError("the test never released its disk")


# --- time


@pytest.mark.parametrize("slow", [0, 1])
def test_slow_disk_of_one_rank_holds_no_training(tmp_path: Path, slow: int) -> None:
    def work(rank: int, count: int) -> Any:
        with using(disk := Holding()):
            trainer = Trainer(tmp_path / "run", rank)
            assert trainer.outcome() is None
            disk.held = rank == slow
            pending = trainer.save()
            for _ in range(3):
                trainer.run.advance()  # the gate is no longer than the copy
            if rank == slow:
                assert disk.reached.wait(PATIENCE_S)
            dist.barrier()
            assert not pending.done()
            dist.barrier()
            disk.release()
            pending.result()
            trainer.close()

    run_ranks(2, work, environment=SMALL_RING)
    expect_steps(tmp_path / "run", [1, 2])


@pytest.mark.parametrize("slow", [0, 1])
def test_rank_that_writes_for_longer_than_the_deadline_is_not_silent(tmp_path: Path, slow: int) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        engine = "fault:threads" if rank == slow else "auto"
        trainer = Trainer(root, rank, peer_timeout_s=1.0, engine=engine)
        assert trainer.outcome() is None
        if rank == slow:
            _native.set_fault_plan(_native.FaultPlan(op="write", count=1 << 62, kind="delay", delay_ms=150))
        started_s = time.monotonic()
        assert trainer.outcome() is None
        assert time.monotonic() - started_s > 1.5
        _native.clear_fault_plan()
        trainer.close()

    run_ranks(3, work, environment=SMALL_RING)
    expect_steps(root, [1, 2])


@pytest.mark.parametrize(
    ("slow", "publishing"), [(0, False), (1, False), (0, True)], ids=["sync of the first", "sync", "rename"]
)
def test_rank_in_one_system_call_for_longer_than_the_deadline_is_not_silent(
    tmp_path: Path, slow: int, publishing: bool
) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        waited = threading.Event()

        class Waiting(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "alive and late" in record.getMessage():  # the deadline has passed
                    waited.set()

        sessions._LATE_S = 2.0
        logging.getLogger("fastpersist").addHandler(Waiting())
        with using(disk := Holding(publishing=publishing)):
            trainer = Trainer(root, rank, peer_timeout_s=1.0)
            assert trainer.outcome() is None
            disk.held = rank == slow
            pending = trainer.save()
            assert isinstance(pending, fp.PendingSave)
            assert rank == slow or waited.wait(PATIENCE_S)
            dist.barrier()
            disk.release()
            pending.result()
            trainer.close()

    run_ranks(3, work, environment=SMALL_RING)
    expect_steps(root, [1, 2])


def save_while_one_is_stopped(rank: int, count: int, root: Path, stopped: int, publishing: bool) -> list[Any]:
    """Save three steps; in the second, one rank stops in a system call until all others gave up. Return its errors."""
    with using(disk := Holding(publishing=publishing, stopping=True)):
        trainer = Trainer(root, rank, peer_timeout_s=SHORT_S)
        assert trainer.outcome() is None
        pids = everybodys(os.getpid())
        disk.held = rank == stopped
        pending = trainer.save()
        assert isinstance(pending, fp.PendingSave)
        started_s = time.monotonic()
        error = pending.exception()
        if rank != stopped:
            assert time.monotonic() - started_s < SHORT_S + SLACK_S
            gave_up = [root.parent / f"gave-up-{other}" for other in range(count) if other != stopped]
            (root.parent / f"gave-up-{rank}").touch()
            wait_until(lambda: all(path.exists() for path in gave_up))
            os.kill(pids[stopped], signal.SIGCONT)
        told = everybodys(error)
        assert trainer.outcome() is None
        trainer.close()
        return told


def test_rank_that_is_silent_until_the_deadline_has_failed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    told = run_ranks(3, save_while_one_is_stopped, root, 1, False, environment=SMALL_RING)[0]
    for rank, error in enumerate(told):
        assert isinstance(error, fp.PeerError if rank == 1 else fp.AgreementTimeoutError), repr(error)
        assert error.rank == 1
        assert "step 2" in str(error)
    expect_steps(root, [1, 3])


@pytest.mark.parametrize("publishing", [False, True], ids=["sync", "rename"])
def test_first_rank_that_is_silent_until_the_deadline_saves_whole_or_not(tmp_path: Path, publishing: bool) -> None:
    root = tmp_path / "run"
    first, *others = run_ranks(3, save_while_one_is_stopped, root, 0, publishing, environment=SMALL_RING)[0]
    for error in others:
        assert isinstance(error, fp.AgreementTimeoutError), repr(error)
        assert error.rank == 0
        assert "step 2" in str(error)
    assert first is None or isinstance(first, fp.PeerError)
    expect_steps(root, [1, 2, 3] if first is None else [1, 3])


@pytest.mark.parametrize("stopped", [0, 1])
def test_rank_that_is_stopped_until_the_deadline_has_failed_and_comes_back(tmp_path: Path, stopped: int) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank, peer_timeout_s=SHORT_S)
        assert trainer.outcome() is None
        pids = everybodys(os.getpid())
        if rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)  # all threads; the other rank wakes it
            error = trainer.outcome()
        else:
            started_s = time.monotonic()
            error = trainer.outcome()
            took_s = time.monotonic() - started_s
            os.kill(pids[stopped], signal.SIGCONT)
            assert SHORT_S / 2 < took_s < SHORT_S + SLACK_S
        told = everybodys(error)
        assert trainer.outcome() is None
        trainer.close()
        return told

    told = run_ranks(2, work, environment=SMALL_RING)[0]
    assert isinstance(told[1 - stopped], fp.AgreementTimeoutError)
    assert told[1 - stopped].rank == stopped
    assert isinstance(told[stopped], fp.PeerError)
    expect_steps(root, [1, 3])


@pytest.mark.parametrize("late", [0, 1])
def test_rank_that_begins_to_save_after_the_deadline_is_waited_for(tmp_path: Path, late: int) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank, peer_timeout_s=SHORT_S)
        assert trainer.outcome() is None
        if rank == late:
            time.sleep(2 * SHORT_S)
        started_s = time.monotonic()
        assert trainer.outcome() is None
        took_s = time.monotonic() - started_s
        trainer.close()
        return took_s

    took_s = run_ranks(3, work, environment=SMALL_RING)
    assert all(one > SHORT_S for rank, one in enumerate(took_s) if rank != late)
    expect_steps(root, [1, 2])


@pytest.mark.parametrize("leaving", [0, 1])
def test_rank_that_has_closed_is_not_waited_for(tmp_path: Path, leaving: int) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank)
        assert trainer.outcome() is None
        if rank == leaving:
            trainer.checkpoints.close()  # as leaving a with-block by an exception does
            dist.barrier()
            return None
        dist.barrier()
        started_s = time.monotonic()
        error = trainer.outcome()
        trainer.checkpoints.close()
        assert time.monotonic() - started_s < SLACK_S
        return error

    for rank, error in enumerate(run_ranks(3, work, environment=SMALL_RING)):
        assert rank == leaving or isinstance(error, fp.PeerError)
        assert rank == leaving or error.rank == leaving
    expect_steps(root, [1])


# --- disks


@pytest.mark.parametrize("sys_errno", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("failing", [0, 1])
def test_each_operation_of_one_rank_fails_once(tmp_path: Path, failing: int, sys_errno: int) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank, keep=2)
        failed: list[str] = []
        assert [trainer.outcome(), trainer.outcome()] == [None, None]  # from now on there is something to remove
        for nth in itertools.count(1):
            disk = FailingFilesystem(nth if rank == failing else 1 << 60, sys_errno)
            with quiet(), using(disk):
                error = trainer.outcome()
            told = everybodys((disk.failed, error))
            if not told[failing][0]:
                break
            failed.append(told[failing][0])
            assert [isinstance(one, BaseException) for _, one in told] in ([False, False], [True, True]), told
            if error is not None:
                text = str(told[failing][1]).partition("; ")[0]  # how much is free, only that rank says
                assert isinstance(error, fp.StorageError if rank == failing else fp.PeerError), repr(error)
                assert isinstance(told[failing][1], fp.NoSpaceError) == (sys_errno == errno.ENOSPC)
                assert rank == failing or (error.rank, text in str(error)) == (failing, True), str(error)
            step = trainer.run.step
            path = root / f"step-{step:08d}"
            assert path.exists() == (error is None) or "is published, but" in str(error)
            assert trainer.outcome() is None
            if rank == 0:  # a removal that failed is for the next process; what was not published is gone at once
                assert not any(f"{step:08d}" in name for name in hidden_names(root)), f"after {failed[-1]} has failed"
        assert told == [("", None)] * count
        trainer.close()
        next_one = Trainer(root, rank, keep=2)
        next_one.run.advance(trainer.run.step)
        assert next_one.outcome() is None
        next_one.close()
        return failed

    failed = set(run_ranks(2, work, environment=SMALL_RING)[0])
    common = {"create", "allocate", "truncate", "sync"}
    only_first = {"make_directory", "write", "sync_directory", "rename_to_free_name", "rename", "unlink",
                  "remove_directory"}  # fmt: skip
    assert failed == (common if failing else common | only_first)
    newest = fp.Checkpointer(root).latest()
    assert newest is not None
    expect_steps(root, [newest - 1, newest])


@pytest.mark.parametrize("failing", [0, 1])
def test_each_operation_of_one_rank_fails_once_in_save(tmp_path: Path, failing: int) -> None:
    path = tmp_path / "state.pt"

    def work(rank: int, count: int) -> Any:
        run = Run(SIZES).advance()
        fp.save(run.state(), path, process_group=dist.group.WORLD)
        old = 1
        for nth in itertools.count(1):
            state = run.advance().state()
            disk = FailingFilesystem(nth if rank == failing else 1 << 60, errno.ENOSPC)
            error = None
            with quiet(), using(disk):
                try:
                    fp.save(state, path, process_group=dist.group.WORLD)
                except fp.FastPersistError as raised:
                    error = raised
            told = everybodys((disk.failed, error))
            if not told[failing][0]:
                assert error is None
                break
            assert isinstance(error, fp.NoSpaceError if rank == failing else fp.PeerError), repr(told)
            assert rank == failing or error.rank == failing
            found = fp.load(path, verify=True)["step"]
            assert found == (run.step if told[failing][0] == "sync_directory" else old)
            dist.barrier()  # all have looked
            fp.save(run.advance().state(), path, process_group=dist.group.WORLD)
            old = run.step
            assert Replay(SIZES).check(fp.load(path, verify=True), old) == old
            assert pending_files(tmp_path) == []
            dist.barrier()
        return nth

    assert run_ranks(2, work, environment=SMALL_RING)[failing] > (1 if failing else 5)


def test_file_that_a_rank_makes_while_the_first_one_gives_up_does_not_stay(tmp_path: Path) -> None:
    root, removing, made, making = (tmp_path / name for name in ("run", "removing", "made", "making"))

    class Disk(Filesystem):
        """Rank 1's is full; rank 2 makes its own file between the last look of rank 0 and its rmdir()."""

        rank = 0
        armed = False

        def sync(self, fd: int, path: str) -> None:
            if self.armed and self.rank == 1:
                wait_until(making.exists)
                raise fp.NoSpaceError(errno.ENOSPC, f"syncing {path}: full", path)
            super().sync(fd, path)

        def create(self, path: str, mode: int = 0o666) -> int:
            if self.armed and self.rank == 2:
                making.touch()
                wait_until(removing.exists)
                fd = super().create(path, mode)
                made.touch()
                return fd
            return super().create(path, mode)

        def unlink(self, path: str) -> None:
            if self.armed and self.rank == 0 and path.endswith("MANIFEST.json"):
                removing.touch()
                wait_until(made.exists)
            super().unlink(path)

    def work(rank: int, count: int) -> Any:
        with using(disk := Disk()):
            disk.rank = rank
            trainer = Trainer(root, rank)
            assert trainer.outcome() is None
            disk.armed = True
            error = trainer.outcome()
            disk.armed = False
            told = everybodys(error)
            assert trainer.outcome() is None
            trainer.close()
            return told

    first, second, third = run_ranks(3, work, environment=SMALL_RING)[0]
    assert isinstance(second, fp.NoSpaceError)
    assert isinstance(first, fp.PeerError)
    assert isinstance(third, fp.PeerError)
    expect_steps(root, [1, 3])


FAULTS: dict[str, dict[str, Any]] = {
    "EIO": {"sys_errno": errno.EIO},
    "short": {"kind": "short", "short_bytes": 4096},
    "slow": {"kind": "delay", "delay_ms": 20},
}
FORGIVEN = ("short", "slow")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_request_of_the_engine_of_one_rank_fails_once(tmp_path: Path, fault: str) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank, keep=2, engine="fault:threads" if rank == 1 else "auto")
        assert trainer.outcome() is None
        for nth in itertools.count(1):
            if rank == 1:
                _native.set_fault_plan(_native.FaultPlan(op="write", nth=nth, **FAULTS[fault]))
            error = trainer.outcome()
            told = everybodys((_native.clear_fault_plan() > 0, error))
            hit = told[1][0]
            if not hit or fault in FORGIVEN:
                assert [one for _, one in told] == [None, None]
            else:
                assert isinstance(told[1][1], fp.StorageError)
                assert isinstance(told[0][1], fp.PeerError)
                assert told[0][1].rank == 1
                assert str(told[1][1]) in str(told[0][1])
                assert trainer.outcome() is None
            if rank == 0:
                assert hidden_names(root) == []
            assert _native.ring_free_count() == _native.ring_buffer_count()
            if not hit:
                break
        trainer.close()
        return nth

    assert run_ranks(2, work, environment=SMALL_RING)[1] > 10
    newest = fp.Checkpointer(root).latest()
    assert newest is not None
    expect_steps(root, [newest - 1, newest])


@needs_root
@pytest.mark.parametrize("sizes", [SIZES, (300, 7)], ids=["writes a part", "has its own state only"])
def test_rank_with_another_file_system_is_told_so(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank, sizes)
        assert trainer.outcome() is None
        if rank == 1:
            with empty_disk_over(root):
                error = trainer.outcome()
        else:
            error = trainer.outcome()
        told = everybodys(error)
        assert trainer.outcome() is None
        trainer.close()
        return told

    first, second = run_ranks(2, work, environment=SMALL_RING)[0]
    assert isinstance(second, fp.StorageError)
    assert isinstance(first, fp.PeerError)
    assert first.rank == 1
    for error in (first, second):
        assert "rank 1" in str(error)
        assert "need the same file system" in str(error)
    expect_steps(root, [1, 3], sizes)


# --- memory


@pytest.mark.parametrize("sharded", [False, True])
def test_own_states_that_find_no_room_in_memory_are_written_before_save_returns(tmp_path: Path, sharded: bool) -> None:
    def work(rank: int, count: int) -> Any:
        with fp.Checkpointer(
            tmp_path / "run", process_group=dist.group.WORLD, max_host_bytes=1 << 20, sharded=sharded
        ) as checkpoints:
            own = torch.full((1_000_000,), float(rank))
            pending = checkpoints.save(1, {"weights": torch.ones(1000)}, rank_state=own)
            own += 100  # all of it was captured
            pending.result(PATIENCE_S)

    run_ranks(3, work, environment=SMALL_RING)
    for rank in range(3):
        assert torch.equal(
            fp.load(tmp_path / "run" / "step-00000001" / f"rank-{rank:05d}.pt"), torch.full((1_000_000,), float(rank))
        )


# --- the line


def test_rank_that_loses_its_connection_when_all_is_told_takes_nothing_from_a_step_that_is_published(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"

    class Waiting(Filesystem):
        """Makes a step visible when the other rank has given up."""

        def rename_to_free_name(self, source: str, target: str) -> None:
            (tmp_path / "all_is_told").touch()
            wait_until((tmp_path / "given_up").exists)
            super().rename_to_free_name(source, target)

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank)
        tell = Session.tell

        def told_and_lost(session: Session, message: bytes) -> None:
            tell(session, message)
            if b'"own"' in message:
                wait_until((tmp_path / "all_is_told").exists)
                raise fp.PeerError("the connection was lost", rank=0, subject="step 1")

        with using(Waiting()), mock.patch.object(Session, "tell", told_and_lost):
            error = trainer.outcome()
            if rank == 1:
                (tmp_path / "given_up").touch()
        told = everybodys(error)
        trainer.close()
        return told

    first, other = run_ranks(2, work, environment=SMALL_RING)[0]
    assert first is None
    assert isinstance(other, fp.PeerError)
    expect_steps(root, [1])


@pytest.mark.parametrize("cutting", [0, 1])
def test_connection_cut_before_each_call(tmp_path: Path, cutting: int, request: pytest.FixtureRequest) -> None:
    root = tmp_path / "run"
    cut_count = request.config.getoption("--kills")

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank, keep=2)
        ranks = trainer.checkpoints._bound.ranks
        assert ranks is not None
        assert [trainer.outcome(), trainer.outcome()] == [None, None]
        with watched() as counts:
            assert trainer.outcome() is None
        seen = set()
        for point in spread(points_of(everybodys(counts)[cutting]), cut_count):
            started_s = time.monotonic()
            with watched(point if rank == cutting else None, cut_lines(ranks)):
                error = trainer.outcome()
            assert time.monotonic() - started_s < SLACK_S
            told = everybodys(error)
            assert all(one is None or isinstance(one, fp.PeerError) for one in told), (point, told)
            published = (root / f"step-{trainer.run.step:08d}").exists()
            assert published or all(told), (point, told)
            assert not published or told[0] is None, (point, told)
            seen.add(published)
            started_s = time.monotonic()
            assert trainer.outcome() is None, point
            assert time.monotonic() - started_s < SLACK_S
            if rank == 0:
                assert hidden_names(root) == [], point
        dist.barrier()
        cut_lines(ranks)()  # between two saves it harms nothing
        dist.barrier()
        assert trainer.outcome() is None
        trainer.close()
        return seen

    assert run_ranks(2, work, environment=SMALL_RING, timeout_s=110)[0] == {False, True}
    state_numbers(root, Replay(SIZES))
