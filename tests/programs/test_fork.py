"""Fork during and after use: a child has no part in what its parent was doing, makes a ring and engines of its own, and
can neither hurt the parent nor outlive it as a lock.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forking import Report, run_in_child
from support.leaks import no_leaks
from support.states import load_step, make_state, pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.file_commit import PendingFile, resolve_target
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.writer import Pieces, Writer

ENGINES = ("uring", "libaio", "threads", "threads-buffered")
EVERY = 2**64 - 1


@contextlib.contextmanager
def slow_writes(delay_ms: int) -> Iterator[None]:
    """Each write of an engine named "fault:…" takes so long."""
    _native.set_fault_plan(_native.FaultPlan(op="write", kind="delay", count=EVERY, delay_ms=delay_ms))
    try:
        yield
    finally:
        _native.clear_fault_plan()


def open_file_names() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


class SlowSave:
    """A save of step 1 in another thread, which takes about a second. A context manager that ends with it done."""

    def __init__(self, path: Path, engine: str) -> None:
        self._path = path
        self._engine = f"fault:{engine}"
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            fp.save(make_state(1), self._path, engine=self._engine)
        except BaseException as error:  # noqa: BLE001 - raised again where the test sees it
            self._error = error

    def __enter__(self) -> None:
        free_count = _native.ring_free_count()
        self._slow = slow_writes(1000)
        self._slow.__enter__()
        self._thread.start()
        deadline_s = time.monotonic() + 10
        # Under way: it has its buffers, and the kernel its requests.
        while not pending_files(self._path.parent) or _native.ring_free_count() == free_count:
            assert time.monotonic() < deadline_s, "the save did not start"
            time.sleep(0.001)
        time.sleep(0.02)

    def __exit__(self, *exception: object) -> None:
        self._thread.join()
        self._slow.__exit__(None, None, None)
        if self._error is not None:
            raise self._error


@pytest.fixture(autouse=True)
def ring_in_use(tmp_path: Path) -> None:
    """The parent has a ring, as it has after its first transfer."""
    fp.save(make_state(0), tmp_path / "first.pt")
    assert _native.ring_buffer_count() > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_child_saves_and_loads_after_the_parent_did(tmp_path: Path, engine: str) -> None:
    def work(report: Report) -> None:
        assert _native.ring_buffer_count() == 0
        with no_leaks(tmp_path):
            fp.save(make_state(7), tmp_path / "child.pt", engine=engine)
            assert load_step(tmp_path / "child.pt") == 7
        assert load_step(tmp_path / "first.pt") == 0
        assert _native.ring_buffer_count() > 0
        assert _native.ring_free_count() == _native.ring_buffer_count()

    run_in_child(work)
    assert load_step(tmp_path / "child.pt") == 7
    assert _native.ring_free_count() == _native.ring_buffer_count()
    fp.save(make_state(8), tmp_path / "first.pt", engine=engine)
    assert load_step(tmp_path / "first.pt") == 8


@pytest.mark.parametrize("engine", ENGINES)
def test_fork_in_the_middle_of_a_save_harms_neither(tmp_path: Path, engine: str, leak_check: None) -> None:
    path = tmp_path / "model.pt"

    def work(report: Report) -> None:
        fp.save(make_state(7), tmp_path / "child.pt", engine=engine)
        assert load_step(tmp_path / "child.pt") == 7
        # To the very path that the parent is writing: its pending file is live and stays.
        (live,) = pending_files(tmp_path)
        fp.save(make_state(6), path, engine=engine)
        assert pending_files(tmp_path) == [live]
        assert load_step(path) == 6

    with SlowSave(path, engine):
        run_in_child(work)
    assert load_step(path) == 1


def test_child_closes_what_the_parent_was_writing(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        names = open_file_names()
        assert not [name for name in names if ".pending-" in name or "io_uring" in name], names

    with SlowSave(tmp_path / "model.pt", "uring"):
        names = open_file_names()
        assert [name for name in names if ".pending-" in name]
        assert [name for name in names if "io_uring" in name]
        run_in_child(work)


@pytest.mark.parametrize("engine", ENGINES)
def test_child_may_drop_a_writer_it_inherited(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "model.bin"
    data = bytes(range(256)) * (1 << 16)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    with slow_writes(200), Writer(fd, str(path), engine=f"fault:{engine}") as writer:
        pieces = Pieces()
        pieces.add_bytes(data)
        writer.append(pieces)
        writers = [writer]

        def work(report: Report) -> None:
            nonlocal writer
            writers.pop().close()
            del writer
            gc.collect()
            fp.save(make_state(7), tmp_path / "child.pt")

        run_in_child(work)
        assert load_step(tmp_path / "child.pt") == 7
        writer.append(pieces)
        writer.finish()
    os.close(fd)
    assert path.read_bytes() == data + data
    assert _native.ring_free_count() == _native.ring_buffer_count()


def test_child_that_gives_up_leaves_the_parents_pending_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    pending = PendingFile.create(resolve_target(str(path)))
    assert pending is not None
    os.write(pending.fd, b"what the parent wrote")

    def work(report: Report) -> None:
        # What an exception does on its way through a save that was forked, in a hook say.
        pending.abort()

    run_in_child(work)
    assert [str(left) for left in pending_files(tmp_path)] == [pending.path]
    pending.publish(21, durable=True)
    assert path.read_bytes() == b"what the parent wrote"


def test_interpreters_end_cleanly_with_an_open_writer_on_both_sides_of_a_fork(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, sys, torch
        from fastpersist.transfer.writer import Pieces, Writer

        pieces = Pieces()
        pieces.add_bytes(bytes(20 << 20))
        writers = []
        for engine in ("auto", "threads"):
            fd = os.open(sys.argv[1] + engine, os.O_RDWR | os.O_CREAT)
            writers.append(Writer(fd, sys.argv[1], engine=engine))
            writers[-1].append(pieces)
            # The next one needs buffers, which this one only gives back as its chunks are written.
            writers[-1].finish() if engine == "auto" else None
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            writers[-1].finish()
            sys.exit(os.waitstatus_to_exitcode(status))
        """
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "file-")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_child_forked_while_a_thread_plans_collects_garbage() -> None:
    planning, may_end = threading.Event(), threading.Event()

    def plan() -> None:
        with no_garbage_collection():
            planning.set()
            may_end.wait(30)

    thread = threading.Thread(target=plan)
    thread.start()
    planning.wait(30)
    assert not gc.isenabled()

    def work(_: Report) -> None:
        assert gc.isenabled()

    try:
        run_in_child(work)
    finally:
        may_end.set()
        thread.join()
    assert gc.isenabled()


def test_forked_worker_does_not_keep_the_lock_of_a_dead_save(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    from_worker, to_test = os.pipe()
    let_go, held = os.pipe()
    saver = os.fork()
    if saver == 0:
        with contextlib.suppress(BaseException):
            os.close(held)
            pending = PendingFile.create(resolve_target(str(path)))
            # As a DataLoader does; the worker outlives its parent, which is killed while it saves.
            if pending is not None and os.fork() == 0:
                os.write(to_test, b"up")
                os.read(let_go, 1)
                os.write(to_test, b"still up")
                os._exit(0)
            time.sleep(60)
        os._exit(1)
    try:
        os.close(to_test)
        assert os.read(from_worker, 2) == b"up"
        (left,) = pending_files(tmp_path)
        fp.save(make_state(2), path)
        assert pending_files(tmp_path) == [left]  # its writer lives
    finally:
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
    fp.save(make_state(3), path)
    assert pending_files(tmp_path) == []
    assert load_step(path) == 3
    os.close(held)  # now the worker may end; it has been there all the time
    assert os.read(from_worker, 8) == b"still up"
    os.close(from_worker)
    os.close(let_go)
