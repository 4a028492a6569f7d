"""Everything fails once below a Checkpointer: the n-th operation on names, the n-th request of an engine, the room.

Whatever it was: a save is either there, whole, or its error is reported; what was saved before loads; the next save
works and clears up; nothing stays behind in the process.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.directories import FailingRefusing, leave
from support.filesystems import FailingFilesystem
from support.forking import SMALL_RING, in_child
from support.leaks import no_leaks
from support.log_levels import quiet
from support.runs import FEW, Replay, Run, hidden_names, remove_root, wait_for_writers
from support.sandbox import needs_root, small_filesystem

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import using

EVERY_FOLLOWING = 2**64 - 1
FAULTS: dict[str, dict[str, Any]] = {
    "EIO": {"sys_errno": errno.EIO},
    "ENOSPC-lasting": {"sys_errno": errno.ENOSPC, "count": EVERY_FOLLOWING},
    "EINTR": {"sys_errno": errno.EINTR},
    "short": {"kind": "short", "short_bytes": 4096},
    "zero": {"kind": "zero"},
}
FORGIVEN = ("EINTR", "short")


def prepare(root: Path, sizes: tuple[int, ...] = FEW) -> None:
    """Make a root with steps 1 and 2, and with what a dead process has left of step 3."""
    run = Run(sizes)
    with fp.Checkpointer(root, optimizer=run.optimizer) as checkpointer:
        for step in (1, 2):
            run.advance(step)
            checkpointer.save(step, run.state(), rank_state={"step": step})
    leave(root, name="step-00000003")


class Trainer:
    """Saves step 3, and replaces it by a state that says it is the 4th; notes what became of either.

    Use it in one process only; `go_on` is called when nothing fails any longer.
    """

    def __init__(self, root: Path, sizes: tuple[int, ...] = FEW, **options: Any) -> None:
        self.root = root
        self.run = Run(sizes)
        self.checkpointer = fp.Checkpointer(root, keep=2, optimizer=self.run.optimizer, **options)
        self.errors: dict[int, BaseException | None] = {}
        self.saved: list[weakref.ref[torch.Tensor]] = []

    def save(self, number: int, step: int, **options: Any) -> None:
        state = self.run.advance(number).state()
        self.saved.append(weakref.ref(state["position"]))
        try:
            pending = self.checkpointer.save(step, state, rank_state={"step": number}, **options)
            del state
            error = pending.exception()
        except (fp.StorageError, fp.UnsupportedError) as raised:
            error = raised
        self.errors[number] = None if error is None else error.with_traceback(None)
        if error is not None:
            error.__context__ = error.__cause__ = None  # their frames hold what the leak check looks for

    def save_and_replace(self) -> None:
        self.save(3, 3)
        self.save(4, 3, overwrite=True)

    def step_3(self, replay: Replay) -> int | None:
        """Return which state step 3 holds, None if it is not there. All that is there must be whole."""
        reader = fp.Checkpointer(self.root)
        steps = reader.steps()
        found = None
        for step in steps:
            loaded = reader.load(step, verify=True)
            assert loaded["rank_state"] == {"step": loaded["step"]}
            number = replay.check(loaded)
            assert number == step or (step, number) == (3, 4)
            found = number if step == 3 else found
        assert replay.check(reader.load(strict=True)) == (found or 2)
        return found

    def go_on(self, replay: Replay) -> None:
        """Save step 5 now that nothing fails, and look for what is left of all that did."""
        self.save(5, 5)
        assert self.errors[5] is None
        assert (self.root / "LATEST").read_text() == "step-00000005\n"
        assert replay.check(fp.Checkpointer(self.root).load(strict=True)) == 5
        self.checkpointer.close()
        with fp.Checkpointer(self.root, keep=2) as next_one:
            next_one.save(6, {"step": 6})
        assert fp.Checkpointer(self.root).steps() == [5, 6]
        assert hidden_names(self.root) == []
        assert sorted(os.listdir(self.root)) == [".lock", "LATEST", "events.jsonl", "step-00000005", "step-00000006"]
        assert _native.ring_free_count() == _native.ring_buffer_count()


def expect_told(trainer: Trainer, found: int | None) -> None:
    """Check that what step 3 holds is what was told of the two saves."""
    assert trainer.errors.keys() == {3, 4}
    if trainer.errors[4] is None:
        assert found == 4
    elif trainer.errors[3] is None:
        assert found in (3, 4)
    elif found is not None:
        assert "is published, but" in f"{trainer.errors[3]}{trainer.errors[4]}"


# --- names


@pytest.mark.parametrize(
    ("sys_errno", "lasting", "double"),
    [
        (errno.EIO, False, FailingFilesystem),
        (errno.EIO, False, FailingRefusing),
        (errno.ENOSPC, True, FailingFilesystem),
    ],
    ids=["EIO", "EIO-retire", "ENOSPC-lasting"],
)
@in_child(SMALL_RING)
def test_each_operation_fails_once(
    tmp_path: Path, sys_errno: int, lasting: bool, double: type[FailingFilesystem]
) -> None:
    replay = Replay(FEW)
    prepare(tmp_path / "prepared")
    first = 1
    if double is FailingRefusing:  # until the first step has been replaced it is the other way's
        shutil.copytree(tmp_path / "prepared", tmp_path / "run")
        trainer = Trainer(tmp_path / "run")
        with using(disk := double(EVERY_FOLLOWING, sys_errno)):
            trainer.save_and_replace()
        trainer.checkpointer.close()
        remove_root(tmp_path / "run")
        first = len(disk.names) - disk.names[::-1].index("allocate")
    failed: list[str] = []
    saved: list[weakref.ref[torch.Tensor]] = []
    for nth in itertools.count(first):
        root = tmp_path / "run"
        shutil.copytree(tmp_path / "prepared", root)
        disk = double(nth, sys_errno, lasting=lasting)
        with no_leaks(), quiet():
            trainer = Trainer(root)
            with using(disk):
                trainer.save_and_replace()
            expect_told(trainer, trainer.step_3(replay))
            for error in trainer.errors.values():
                assert error is None or getattr(error, "errno", sys_errno) == sys_errno
                assert error is None or str(root) in str(error)
            told = dict(trainer.errors)
            trainer.go_on(replay)
            saved += trainer.saved
            del trainer
        remove_root(root)
        if not disk.failed:
            break
        failed.append(disk.failed)
    assert told == {3: None, 4: None}
    assert set(failed) >= {
        "allocate", "truncate", "sync", "write", "sync_directory", "rename", "rename_to_free_name", "unlink",
        "remove_directory",
    }  # fmt: skip
    assert [reference() for reference in saved] == [None] * len(saved), "a state is kept in memory"


# --- data


@pytest.mark.parametrize("fault", FAULTS)
@in_child(SMALL_RING)
def test_each_request_of_the_engine_fails_once(tmp_path: Path, fault: str) -> None:
    sizes = (30_000, 7)
    replay = Replay(sizes)
    prepared = tmp_path / "prepared"
    prepare(prepared, sizes)
    with quiet():
        for nth in itertools.count(1):
            root = tmp_path / "run"
            shutil.copytree(prepared, root)
            with no_leaks():
                trainer = Trainer(root, sizes, engine="fault:threads")
                _native.set_fault_plan(_native.FaultPlan(op="write", nth=nth, **FAULTS[fault]))
                trainer.save_and_replace()
                hit = _native.clear_fault_plan() > 0
                found = trainer.step_3(replay)
                assert found == (4 if trainer.errors[4] is None else 3 if trainer.errors[3] is None else None)
                if not hit or fault in FORGIVEN:
                    assert trainer.errors == {3: None, 4: None}
                else:
                    first = next(error for error in trainer.errors.values() if error is not None)
                    assert isinstance(first, fp.NoSpaceError) == fault.startswith("ENOSPC")
                    assert isinstance(first, fp.StorageError)
                    assert str(root / "step-00000003") in str(first)
                trainer.go_on(replay)
                del trainer
            remove_root(root)
            if not hit:
                break
    assert nth > 10


@pytest.mark.parametrize("in_place", [False, True], ids=["", "into"])
@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
@in_child(SMALL_RING)
def test_each_read_of_a_load_fails_once(tmp_path: Path, in_place: bool, verify: bool) -> None:
    sizes = (30_000, 7)
    replay = Replay(sizes)
    prepare(tmp_path, sizes)
    for strict in (False, True):
        went_back = 0
        for nth in itertools.count(1):
            run = Run(sizes).advance(7)
            into = run.targets() if in_place else None
            reader = fp.Checkpointer(tmp_path, engine="fault:threads")
            with no_leaks(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _native.set_fault_plan(_native.FaultPlan(op="read", nth=nth, sys_errno=errno.EIO))
                loaded = None
                try:
                    loaded = reader.load(into=into, strict=strict, verify=verify)
                except fp.StorageError:
                    assert strict
                hit = _native.clear_fault_plan() > 0
            if not hit:
                break
            if strict:
                assert loaded is None
                loaded = reader.load(into=into, strict=True)
            else:
                assert "going back" in str(caught[0].message)
            step = 2 if strict else 1
            went_back += 1
            assert loaded is not None
            assert loaded["step"] == step
            if in_place:
                run.step = step
                assert replay.check(run.state()) == step
            else:
                assert replay.check(loaded) == step
            del loaded, into, run
        assert went_back > 2


# --- room


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_disk_may_be_full_at_any_moment(tmp_path: Path, kind: str) -> None:
    sizes = (30_000, 12_000)
    replay = Replay(sizes)
    with small_filesystem(kind, tmp_path, 4) as disk, quiet():
        root = disk / "run"
        prepare(root, sizes)
        filler = disk / "filler"
        outcomes = []
        for room_bytes in [*range(0, 64 << 10, 8 << 10), *range(64 << 10, 1300 << 10, 96 << 10)]:
            fill(filler, room_bytes)
            with no_leaks():
                trainer = Trainer(root, sizes)
                trainer.save_and_replace()
                found = trainer.step_3(replay)
                expect_told(trainer, found)
                for error in trainer.errors.values():
                    assert error is None or isinstance(error, fp.NoSpaceError)
                outcomes.append(found)
                filler.unlink()
                trainer.save(2, 2, overwrite=True)
                trainer.save(3, 3, overwrite=True)
                assert trainer.errors[2] is None
                trainer.checkpointer.close()
                del trainer
            remove_root(root)
            prepare(root, sizes)
        assert outcomes[0] is None
        assert outcomes[-1] == 4


def fill(path: Path, room_bytes: int) -> None:
    """Write a file that leaves so much room on its file system."""
    with path.open("wb", buffering=0) as file:
        free_bytes = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        data = bytes(4096)
        try:
            for _ in range(max(0, free_bytes - room_bytes) // 4096):
                file.write(data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


# --- time


@pytest.mark.parametrize("jump_s", [-400 * 24 * 3600.0, 400 * 24 * 3600.0], ids=["back", "ahead"])
def test_jumps_of_the_clock_change_nothing(tmp_path: Path, jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time
    jumps = 0

    def jumping_s() -> float:
        nonlocal jumps
        jumps += 1
        return now_s() + jump_s * (jumps % 3)

    monkeypatch.setattr(time, "time", jumping_s)
    root = tmp_path / "run"
    prepare(root)
    run = Run(FEW)
    with fp.Checkpointer(root, keep=3, optimizer=run.optimizer) as checkpointer:
        for step in range(3, 9):
            run.advance(step)
            checkpointer.save(step, run.state())
        run.advance(8)
        checkpointer.save(8, run.state(), overwrite=True)
    assert jumps >= 9
    assert Replay(FEW).check_all(root) == [6, 7, 8]
    assert Replay(FEW).check_newest(root) == 8
    assert hidden_names(root) == []
    for stats in checkpointer.stats():
        assert min(stats.stall_s, stats.capture_s, stats.write_s, stats.sync_s, stats.commit_s) >= 0


def test_old_files_of_a_live_save_are_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    with fp.DirectorySave(tmp_path / "a") as first:
        first.add_bytes("a", b"first")
        monkeypatch.setattr(time, "time", lambda: now_s + 400 * 24 * 3600.0)
        with fp.DirectorySave(tmp_path / "a") as second:
            second.add_bytes("a", b"second")
            second.publish().result()
        with pytest.raises(fp.ConfigError):
            first.publish().result()
    assert (tmp_path / "a" / "a").read_bytes() == b"second"


# --- many saves


def test_many_saves_leave_nothing_behind(tmp_path: Path) -> None:
    run = Run(FEW)
    with fp.Checkpointer(tmp_path, keep=1, optimizer=run.optimizer) as checkpointer:
        checkpointer.save(0, run.state()).result()
        with no_leaks():
            gc.disable()  # as many do while they train: a state that only it could free would stay
            try:
                references = []
                for step in range(1, 150):
                    state = run.advance(step).state()
                    references.append(weakref.ref(state["position"]))
                    checkpointer.save(step, state, rank_state={"step": step})
                    del state
                checkpointer.wait()
                wait_for_writers()
                assert len([reference for reference in references if reference() is not None]) == 0
            finally:
                gc.enable()
        names = sorted(os.listdir(tmp_path))
    assert names == [".lock", "LATEST", "events.jsonl", "step-00000149"]
    assert len(checkpointer.stats()) == 150
