"""Many at once: threads and processes that save to one path, more transfers than the ring has room for, and a user who
interrupts. No deadlock, no torn file, nothing left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.forking import SMALL_RING, Child, Report, in_child, run_in_child
from support.leaks import no_leaks
from support.sandbox import needs_root, small_filesystem
from support.states import load_step, make_state, pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.transfer.writer import Pieces, Writer

EVERY = 2**64 - 1
FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
CHUNK_BYTES = 64 << 10
EIGHT_BUFFERS = {"FASTPERSIST_CHUNK_BYTES": str(CHUNK_BYTES), "FASTPERSIST_RING_BYTES": str(8 * CHUNK_BYTES)}


@contextlib.contextmanager
def slow_io(delay_ms: int, op: str = "any") -> Iterator[None]:
    """Each request of an engine named "fault:…" takes so long."""
    _native.set_fault_plan(_native.FaultPlan(op=op, kind="delay", count=EVERY, delay_ms=delay_ms))
    try:
        yield
    finally:
        _native.clear_fault_plan()


def run_threads(*work: Callable[[], None], timeout_s: float = 60.0) -> None:
    """Run functions side by side; the first exception of any of them becomes ours."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
        assert not thread.is_alive(), "a thread does not come to its end"
    if errors:
        raise errors[0]


def assert_ring_is_free() -> None:
    assert _native.ring_free_count() == _native.ring_buffer_count() > 0


# --- one path


@in_child(EIGHT_BUFFERS)
def test_threads_that_save_to_one_path_never_show_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(0), path)
    done = threading.Event()
    steps_seen = set()

    def save(first: int) -> None:
        for step in range(first, first + 10):
            fp.save(make_state(step), path, durable=False)
        while len(steps_seen) < 2 and reader.is_alive():  # a slow machine may not have let it read beside a save yet
            fp.save(make_state(step), path, durable=False)

    def read() -> None:
        while not done.is_set():
            steps_seen.add(load_step(path))

    with no_leaks(tmp_path):
        reader = threading.Thread(target=read)
        reader.start()
        try:
            run_threads(*(lambda first=first: save(first) for first in (100, 200, 300)))
        finally:
            done.set()
            reader.join()
    assert load_step(path) in (109, 209, 309)
    assert len(steps_seen) > 1
    assert pending_files(tmp_path) == []
    assert_ring_is_free()


def test_processes_that_save_to_one_path_never_show_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(0), path)

    def save(first: int) -> Callable[[Report], None]:
        def work(report: Report) -> None:
            for step in range(first, first + 10):
                fp.save(make_state(step), path, durable=False)

        return work

    with Child(save(100), SMALL_RING) as one, Child(save(200), SMALL_RING) as other:
        while not (one.ended() and other.ended()):
            load_step(path)
        for child in (one, other):
            assert child.wait().verdict == "passed", child.wait().message
    assert load_step(path) in (109, 209)
    assert pending_files(tmp_path) == []


def test_slow_save_of_another_process_is_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def work(report: Report) -> None:
        with slow_io(300, "write"):
            fp.save(make_state(1), path, engine="fault:threads")

    with Child(work) as child:
        # Space is reserved when the file is locked; before that it may be swept, and its writer makes another one.
        while not any(found.stat().st_size for found in pending_files(tmp_path)):
            assert not child.ended(), child.wait()
            time.sleep(0.001)
        live = pending_files(tmp_path)
        fp.save(make_state(2), path)
        assert pending_files(tmp_path) == live
        assert child.wait().verdict == "passed", child.wait().message
    assert load_step(path) == 1  # the one that finished last
    assert pending_files(tmp_path) == []


# --- the ring


@pytest.mark.parametrize("engine", ["auto", "uring", "libaio", "threads", "threads-buffered"])
def test_twelve_threads_share_eight_buffers(tmp_path: Path, engine: str) -> None:
    @in_child(EIGHT_BUFFERS)
    def test() -> None:
        def work(number: int) -> None:
            path = tmp_path / f"model-{number}.pt"
            for round_number in range(2):
                step = 100 * number + round_number
                fp.save(make_state(step), path, engine=engine, durable=False)
                assert int(fp.load(path, engine=engine)["step"]) == step
            assert load_step(path) == 100 * number + 1

        with no_leaks(tmp_path):
            run_threads(*(lambda number=number: work(number) for number in range(12)))
        assert _native.ring_buffer_count() == 8
        assert_ring_is_free()

    test()


@in_child(EIGHT_BUFFERS)
def test_transfer_joins_while_another_holds_all_other_buffers(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "large.bin", os.O_RDWR | os.O_CREAT)
    pieces = Pieces()
    pieces.add_bytes(bytes(400 * CHUNK_BYTES))
    ended_s = {}
    with slow_io(20), Writer(fd, "large.bin", engine="fault:null") as writer:  # 400 chunks, 8 at a time: a second

        def write() -> None:
            writer.append(pieces)
            writer.finish()
            ended_s["large"] = time.monotonic()

        def save() -> None:
            while _native.ring_free_count() > 0:
                time.sleep(0.001)
            fp.save(make_state(1), tmp_path / "small.pt")
            ended_s["small"] = time.monotonic()

        run_threads(write, save)
    os.close(fd)
    assert ended_s["small"] < ended_s["large"]
    assert load_step(tmp_path / "small.pt") == 1
    assert_ring_is_free()


def test_signal_handler_may_save_while_a_save_is_running(tmp_path: Path) -> None:
    """As a job does that is about to be preempted: the handler runs on the thread that is in the transfer."""

    def work(report: Report) -> None:
        def handle(number: int, frame: object) -> None:
            report(1)
            fp.save(make_state(2), tmp_path / "emergency.pt")
            report(2)

        signal.signal(signal.SIGUSR1, handle)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with slow_io(200, "write"):
            fp.save(make_state(1, 40 * CHUNK_BYTES), tmp_path / "model.pt", engine="fault:threads")

    with Child(work, EIGHT_BUFFERS) as child:
        deadline_s = time.monotonic() + 6
        while not child.ended() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert child.reported == 2, "the save in the handler waits for buffers that the save below it holds"
        assert child.wait().verdict == "passed", child.wait().message
    assert load_step(tmp_path / "emergency.pt") == 2
    assert load_step(tmp_path / "model.pt", 40 * CHUNK_BYTES) == 1


# --- interrupted


@pytest.mark.parametrize("engine", ["uring", "libaio", "threads", "threads-buffered"])
@pytest.mark.parametrize("transfer", ["save", "load"])
def test_interrupt_ends_a_transfer_at_once(tmp_path: Path, transfer: str, engine: str) -> None:
    path = tmp_path / "model.pt"

    def work(report: Report) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fp.save(make_state(1), path)
        state = make_state(2)
        with no_leaks(tmp_path):
            with slow_io(20_000), pytest.raises(KeyboardInterrupt):
                report(1)
                if transfer == "save":
                    fp.save(state, path, engine=f"fault:{engine}")
                else:
                    fp.load(path, engine=f"fault:{engine}")
            report(2)
            assert pending_files(tmp_path) == []
            assert_ring_is_free()
        assert load_step(path) == 1
        fp.save(state, path)

    with Child(work, SMALL_RING) as child:
        while child.reported < 1:
            assert not child.ended(), child.wait().message
            time.sleep(0.001)
        time.sleep(0.2)  # now requests are in flight
        os.kill(child.pid, signal.SIGINT)
        started_s = time.monotonic()
        while child.reported < 2 and not child.ended():
            time.sleep(0.001)
        took_s = time.monotonic() - started_s
        assert child.wait().verdict == "passed", child.wait().message
    assert took_s < 10.0  # the requests take 20
    assert load_step(path) == 2


def test_interrupt_reaches_a_transfer_that_waits_for_buffers(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fd = os.open(tmp_path / "large.bin", os.O_RDWR | os.O_CREAT)
        pieces = Pieces()
        pieces.add_bytes(bytes(5 * CHUNK_BYTES))  # one more than there are buffers

        def hold_all_buffers() -> None:
            with Writer(fd, "large.bin", engine="fault:null") as writer:
                writer.append(pieces)

        with slow_io(4000):
            holder = threading.Thread(target=hold_all_buffers)
            holder.start()
            while _native.ring_buffer_count() == 0 or _native.ring_free_count() > 0:
                time.sleep(0.001)
            report(1)
            with pytest.raises(KeyboardInterrupt):
                fp.save(make_state(2), tmp_path / "model.pt")
            assert holder.is_alive()  # so nothing else has ended the wait
            assert pending_files(tmp_path) == []
            holder.join()
        os.close(fd)
        fp.save(make_state(3), tmp_path / "model.pt")
        assert_ring_is_free()

    with Child(work, SMALL_RING) as child:
        while child.reported < 1:
            assert not child.ended(), child.wait().message
            time.sleep(0.001)
        time.sleep(0.2)
        os.kill(child.pid, signal.SIGINT)
        assert child.wait().verdict == "passed", child.wait().message
    assert load_step(tmp_path / "model.pt") == 3


@pytest.mark.parametrize("transfer", ["save", "load"])
def test_exception_in_the_progress_display_ends_the_transfer(
    tmp_path: Path, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"

    class TerminalIsGone(Exception):
        pass

    class BrokenBar:
        n = 0

        def __init__(self, **options: object) -> None:
            pass

        def __enter__(self) -> BrokenBar:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def update(self, count: int) -> None:
            raise TerminalIsGone

    monkeypatch.setattr("tqdm.auto.tqdm", BrokenBar)

    def work(report: Report) -> None:
        fp.save(make_state(1), path)
        with no_leaks(tmp_path):
            with slow_io(300), pytest.raises(TerminalIsGone):
                if transfer == "save":
                    fp.save(make_state(2), path, progress=True, engine="fault:threads")
                else:
                    fp.load(path, progress=True, engine="fault:threads")
            assert pending_files(tmp_path) == []
            assert_ring_is_free()
        assert load_step(path) == 1

    run_in_child(work, SMALL_RING)


def test_gil_is_free_while_bytes_move(tmp_path: Path) -> None:
    count = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal count
        while not stop.wait(0.001):
            count += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        with slow_io(300, "write"):
            before = count
            fp.save({"x": torch.zeros(1000)}, tmp_path / "model.pt", engine="fault:threads")
            during = count - before
    finally:
        stop.set()
        ticker.join()
    assert during > 20


# --- ends without a close


@contextlib.contextmanager
def thawed_after(directory: Path, seconds: float) -> Iterator[None]:
    """Thaw a file system after a while, from another process, so that a test that hangs there comes to its end."""
    command = ["sh", "-c", 'sleep "$0" && exec fsfreeze --unfreeze "$1"', str(seconds), str(directory)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def set_frozen(directory: Path, frozen: bool) -> None:
    """Let writes to a file system stand still, in the kernel, or go on."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, FIFREEZE if frozen else FITHAW, 0)
    finally:
        os.close(fd)


def is_any_thread_in_the_kernel() -> bool:
    """Tell whether a thread of this process is in a call that no signal ends, such as a write to a frozen disk."""
    stats = [stat.read_text() for stat in Path("/proc/self/task").glob("*/stat")]
    return any(stat.rpartition(")")[2].split()[0] == "D" for stat in stats)


@needs_root
def test_a_writer_that_nobody_closed_waits_for_the_kernel_without_the_gil(tmp_path: Path) -> None:
    """Its write ends when another thread of Python has thawed the file system, which takes the GIL."""
    with small_filesystem("ext4", tmp_path, 16) as directory:

        @in_child(EIGHT_BUFFERS)
        def collect_writer() -> None:
            may_thaw, order = threading.Event(), []

            def thaw() -> None:
                may_thaw.wait()
                order.append("thaws")  # before the call, which lets go of the GIL
                set_frozen(directory, False)

            with (directory / "file").open("w+b") as file, thawed_after(directory, 30):
                thread = threading.Thread(target=thaw)
                thread.start()
                set_frozen(directory, True)
                writer = Writer(file.fileno(), file.name, engine="threads-buffered")
                pieces = Pieces()
                pieces.add_bytes(bytes(2 * CHUNK_BYTES))
                writer.append(pieces)
                while not is_any_thread_in_the_kernel():  # else there is nothing yet that it has to wait for
                    time.sleep(0.001)
                sys.setswitchinterval(1000)  # the thread runs when this one lets go of the GIL, and not before
                may_thaw.set()
                del writer
                order.append("collected")
                thread.join()
            assert order == ["thaws", "collected"]

        collect_writer()


@pytest.mark.parametrize("keeper", ["left = writer", "left = [writer]; left.append(left)"])
def test_a_writer_that_is_left_to_the_end_of_the_interpreter_harms_nothing(keeper: str, tmp_path: Path) -> None:
    script = f"""
import os, fastpersist
from fastpersist.transfer.writer import Pieces, Writer
fd = os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT)
writer = Writer(fd, "file", engine="fault:threads-buffered", poll=lambda done_bytes: None)
pieces = Pieces()
pieces.add_bytes(bytes(32 << 20))
writer.append(pieces)
{keeper}
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
