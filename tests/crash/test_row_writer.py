"""Tables that are written when the process is killed, an operation fails, or power is lost: at every point of it.

Whatever it was: the table is absent, the old one or the new one, whole; its sidecar never says that it is damaged, or
that its rows are elsewhere; and the next writer goes on behind the rows that were durable, and clears up. The kills
take child processes, which are forked.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.filesystems import FailingFilesystem, Operation, WatchedFilesystem
from support.forking import NOTHING_REPORTED, Child, Report
from support.leaks import no_leaks
from support.power_loss import Fate, RecordingFilesystem, disk_after_cut, every_fate, unsafe_operations
from support.row_tables import hidden_files, make_rows, read_rows

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.rows import sidecar, verification
from fastpersist.rows import writer as writer_module
from fastpersist.rows.opening import open_rows
from fastpersist.rows.packing import pack_rows
from fastpersist.rows.progress import newest_of
from fastpersist.rows.verification import verify_rows
from fastpersist.rows.writer import RowWriter

WIDTH = 25  # 100 bytes a row: rows straddle all chunks
CHUNK_BYTES = 16 << 10
COUNT = 900  # 5.5 chunks
PART = 50
FINISHING = 1 << 40
SIDECAR = "table.npy.rows.safetensors"
FATES_MAX = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of one chunk, and progress after each two: little data takes every step several times."""
    for module in (sidecar, verification, writer_module):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(writer_module, "_BUFFER_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(writer_module, "PROGRESS_BYTES", 2 * CHUNK_BYTES)


def old_rows() -> torch.Tensor:
    return make_rows(COUNT, WIDTH, first=77)


def write(path: Path, *, report: Report = lambda rows: None, count: int = COUNT, **options: Any) -> None:
    """Write the rows that are missing, and report how many are durable."""
    with RowWriter(path, (WIDTH,), torch.int32, **options) as writer:
        report(writer.row_count)
        for first in range(writer.row_count, count, PART):
            writer.append(make_rows(min(PART, count - first), WIDTH, first))
            record = newest_of(writer._records)
            report(0 if record is None else record.done_bytes // (4 * WIDTH))
        report(FINISHING)


def table_in(path: Path) -> str:
    """Return which table is there, "none", "old" or "new", after a look at all that is recorded of it."""
    if not path.exists():
        return "none"
    rows = read_rows(open_rows(path))
    verified = verify_rows(path)
    assert verified.ok, verified
    if torch.equal(rows, old_rows()):
        return "old"
    assert torch.equal(rows, make_rows(COUNT, WIDTH)), "the table is torn"
    return "new"


def expect_next_write_clears_up(path: Path, **options: Any) -> None:
    path.unlink(missing_ok=True)
    write(path, resume=True, **options)
    assert table_in(path) == "new"
    assert verify_rows(path).has_checksums
    assert hidden_files(path.parent) == []


# --- kill -9


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_killed_at_random_moments_and_resumed(tmp_path: Path, suffix: str, request: pytest.FixtureRequest) -> None:
    kill_count = request.config.getoption("--kills")  # as many for each format
    count = 20_000
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / f"table{suffix}"
    durable, resumed_count, finished_count = 0, 0, 0
    for _ in range(kill_count):
        with Child(lambda report: write(path, report=report, count=count, resume=True)) as child:
            time.sleep(rng.uniform(0.0, 0.15))
            ending = child.kill()
            assert ending.signal == signal.SIGKILL or ending.verdict == "passed", ending.message
            reported = child.reported
        assert reported in (NOTHING_REPORTED, FINISHING) or reported >= durable, "durable rows are gone"
        resumed_count += 0 < durable <= reported
        durable = max(durable, reported) if reported != FINISHING else 0
        if path.exists():
            assert torch.equal(read_rows(open_rows(path)), make_rows(count, WIDTH))
            assert verify_rows(path).ok
            path.unlink()
            durable = 0
            finished_count += 1
    assert resumed_count + finished_count > 0 or kill_count < 10
    write(path, count=count, resume=True)
    assert torch.equal(read_rows(open_rows(path)), make_rows(count, WIDTH))
    assert hidden_files(tmp_path) == []


class KillingAt(WatchedFilesystem):
    """This process dies before the n-th operation, or with `after` right behind it."""

    def __init__(self, nth: int, *, after: bool) -> None:
        self._left = nth
        self._after = after

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        self._left -= 1
        if self._left == 0 and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("replaces", [False, True], ids=["first", "replaces"])
def test_killed_at_every_operation(tmp_path: Path, replaces: bool, after: bool) -> None:
    path = tmp_path / "table.npy"
    found = set()
    for nth in itertools.count(1):
        if replaces:
            writer_module.write_rows(path, old_rows(), overwrite=True)

        def write_until_killed(report: Report, nth: int = nth) -> None:
            with using(KillingAt(nth, after=after)):
                write(path, report=report, resume=True, overwrite=True)

        with Child(write_until_killed) as child:
            ending = child.wait()
            reported = child.reported
        if not ending.signal:
            assert ending.verdict == "passed", ending.message
            break
        found.add(table_in(path))
        assert "new" in found or table_in(path) == ("old" if replaces else "none")
        if reported not in (NOTHING_REPORTED, FINISHING) and reported > 0:
            with pytest.raises(RuntimeError), RowWriter(path, (WIDTH,), torch.int32, resume=True, overwrite=True) as w:
                assert w.row_count >= reported
                raise RuntimeError
        expect_next_write_clears_up(path)
        path.unlink()
    assert nth > 15
    assert found == {"old" if replaces else "none", "new"}


def test_a_packed_table_is_never_there_without_its_positions(tmp_path: Path) -> None:
    writer_module.write_rows(tmp_path / "source.npy", make_rows(COUNT, WIDTH))
    path = tmp_path / "packed.npy"
    order = torch.rand(COUNT, generator=torch.Generator().manual_seed(1))
    found = set()
    for nth in itertools.count(1):

        def pack_until_killed(report: Report, nth: int = nth) -> None:
            with using(KillingAt(nth, after=False)):
                pack_rows(tmp_path / "source.npy", path, order=order)

        with Child(pack_until_killed) as child:
            ending = child.wait()
        found.add(table_in(path))
        if not ending.signal:
            assert ending.verdict == "passed", ending.message
            break
        expect_next_write_clears_up(path)  # a plain table, beside which no positions may stay
        path.unlink()
    assert nth > 10
    assert found == {"none", "new"}


# --- the n-th fault


def fail_each(path: Path, double: Callable[[int], Filesystem], options: dict[str, Any], replaces: bool) -> int:
    """Write with the n-th operation failing, for each n; return how many there were."""
    for nth in itertools.count(1):
        if replaces:
            writer_module.write_rows(path, old_rows(), overwrite=True)
        filesystem = double(nth)
        failure: fp.StorageError | None = None
        with no_leaks() if options.get("resume") else no_leaks(path.parent):
            try:
                with using(filesystem):
                    write(path, **options)
            except fp.StorageError as error:
                failure = error.with_traceback(None)
                del error
        if not getattr(filesystem, "failed", ""):
            assert failure is None
            return nth
        there = table_in(path)
        if failure is None:
            assert there == "new"  # only what was being cleared up
        elif there == "new":
            assert "is published" in str(failure)
        expect_next_write_clears_up(path)
        path.unlink()
    raise AssertionError


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("replaces", [False, True], ids=["first", "replaces"])
@pytest.mark.parametrize("sys_errno", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_every_operation_fails_once(tmp_path: Path, resume: bool, replaces: bool, sys_errno: int) -> None:
    options = {"resume": resume, "overwrite": True}
    count = fail_each(tmp_path / "table.npy", lambda nth: FailingFilesystem(nth, sys_errno), options, replaces)
    assert count > 12


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize(
    "fault",
    [{"sys_errno": errno.EIO}, {"sys_errno": errno.EIO, "count": 2**64 - 1}, {"kind": "short"}, {"kind": "zero"}],
)
def test_every_request_fails_once(tmp_path: Path, resume: bool, op: str, fault: dict[str, Any]) -> None:
    path = tmp_path / "table.npy"
    hits = 0
    for nth in itertools.count(1):
        if op == "read":  # what a resumed writer reads first
            with pytest.raises(RuntimeError), RowWriter(path, (WIDTH,), torch.int32, resume=True) as writer:
                writer.append(make_rows(500, WIDTH))
                raise RuntimeError
        failure = None
        _native.set_fault_plan(_native.FaultPlan(op=op, nth=nth, **fault))
        try:
            with no_leaks():
                write(path, resume=resume or op == "read", engine="fault:threads")
        except fp.StorageError as error:
            failure = error.with_traceback(None)
            del error
        finally:
            was_hit = _native.clear_fault_plan() > 0
        if failure is None:
            assert table_in(path) == "new"
        else:
            assert str(path.parent) in str(failure)
            assert table_in(path) == "none" or "is published" in str(failure)
        expect_next_write_clears_up(path)
        path.unlink()
        if not was_hit:
            break
        hits += 1
    assert hits >= (1 if op == "read" else 7)


# --- power loss


class Unsynced(Filesystem):
    """A file system for what is thrown away anyway: it syncs nothing."""

    def sync(self, fd: int, path: str) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


class ForgetsToSync(RecordingFilesystem):
    def sync(self, fd: int, path: str) -> None:
        pass


class ForgetsTheDirectory(RecordingFilesystem):
    def sync_directory(self, path: str) -> None:
        pass


class KeepsOldSidecars(RecordingFilesystem):
    def unlink(self, path: str) -> None:
        if not path.endswith(SIDECAR):
            super().unlink(path)


class Judge:
    """Says whether a directory is what a power cut may leave, and whether the next writer comes to its end there."""

    def __init__(self, scratch: Path, name: str, old: str) -> None:
        self.scratch = scratch
        self.name = name
        self.old = old
        self.found: set[str] = set()
        self._known: dict[frozenset[tuple[str, bytes]], str] = {}

    def judge(self, names: dict[str, bytes], *, has_returned: bool) -> None:
        key = frozenset((Path(name).name, content) for name, content in names.items())
        there = self._known.get(key) or self._known.setdefault(key, self._look(key))
        assert there in (("new",) if has_returned else (self.old, "new"))
        self.found.add(there)

    def _look(self, key: frozenset[tuple[str, bytes]]) -> str:
        directory = self.scratch / str(len(self._known))
        directory.mkdir(parents=True)
        for name, content in key:
            (directory / name).write_bytes(content)
        with using(Unsynced()):
            there = table_in(directory / self.name)
            expect_next_write_clears_up(directory / self.name)
        return there


def recorded(path: Path, work: Callable[[], None], recorder: RecordingFilesystem) -> list[Operation]:
    """Do the work, and return all that was done; writes before any file was created went to the one that was there."""
    left = [str(path.parent / name) for name in hidden_files(path.parent)]
    _native.set_write_recording(True)
    try:
        with using(recorder):
            work()
        recorder.take_writes()
    finally:
        _native.set_write_recording(False)
        _native.take_recorded_writes()
    return [
        replace(operation, path=left[0]) if operation.name == "write" and not operation.path else operation
        for operation in recorder.log
    ]


def fates_of(log: Sequence[Operation], rng: random.Random) -> Iterator[dict[int, Fate]]:
    """Yield every loss that is possible at the end of a log, or some of them where they are too many."""
    unsafe = unsafe_operations(log)
    choices = {index: list(Fate) if log[index].name == "write" else [Fate.KEPT, Fate.DROPPED] for index in unsafe}
    if math.prod(map(len, choices.values())) <= FATES_MAX:
        yield from every_fate(log)
        return
    for _ in range(FATES_MAX):
        yield {index: rng.choice(fates) for index, fates in choices.items()}


def replay(tmp_path: Path, what: str, recorder: RecordingFilesystem, cut_step: int = 1) -> None:
    """Write a table in one of four ways, and judge what each loss of power, or each n-th, would have left of it."""
    (tmp_path / "disk").mkdir()
    path = tmp_path / "disk" / "table.npy"
    source = tmp_path / "source.npy"
    writer_module.write_rows(source, make_rows(COUNT, WIDTH))
    if what == "replaces":
        writer_module.write_rows(path, old_rows())
    elif what == "resumed":
        with pytest.raises(RuntimeError), RowWriter(path, (WIDTH,), torch.int32, resume=True) as writer:
            writer.append(make_rows(500, WIDTH))
            raise RuntimeError

    def work() -> None:
        if what == "packed":
            pack_rows(source, path, order=torch.arange(COUNT) % 7, engine="fault:threads")
        else:
            write(path, resume=True, overwrite=True, engine="fault:threads")

    before = {str(file): file.read_bytes() for file in path.parent.iterdir()}
    log = recorded(path, work, recorder)
    rng = random.Random(0)
    assert disk_after_cut(before, log, {}, rng) == {str(file): file.read_bytes() for file in path.parent.iterdir()}
    old = "old" if what == "replaces" else "none"
    judge = Judge(tmp_path / "replayed", path.name, old)
    for cut in range(len(log), -1, -cut_step):
        for fates in fates_of(log[:cut], rng):
            judge.judge(disk_after_cut(before, log[:cut], fates, rng), has_returned=cut == len(log))
    assert judge.found == {old, "new"}


@pytest.mark.parametrize("cut_step", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("what", ["first", "replaces", "resumed", "packed"])
def test_no_loss_of_power_tears_a_table(tmp_path: Path, what: str, cut_step: int) -> None:
    replay(tmp_path, what, RecordingFilesystem(), cut_step)


@pytest.mark.parametrize(
    ("what", "protocol"),
    [
        ("first", ForgetsToSync),
        ("resumed", ForgetsToSync),
        ("packed", ForgetsToSync),
        ("first", ForgetsTheDirectory),
        ("replaces", ForgetsTheDirectory),
        ("replaces", KeepsOldSidecars),
    ],
)
def test_replay_notices_a_broken_protocol(tmp_path: Path, what: str, protocol: type[RecordingFilesystem]) -> None:
    with pytest.raises((AssertionError, fp.FastPersistError)):
        replay(tmp_path, what, protocol())
