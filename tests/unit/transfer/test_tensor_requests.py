"""TensorFile, many requests at once: their lives, and those of the tensors, the file and the interpreter."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.forking import Child, Report, run_in_child
from support.leaks import no_leaks
from support.tensor_files import ENGINES, bytes_of, faults, pattern, skip_without, slow, tensor_of

import fastpersist as fp
from fastpersist.errors import ConfigError, EndOfFileError, StorageError

torch.set_num_threads(1)

engines = pytest.mark.parametrize("engine", ENGINES)
DIRECT = ("uring", "libaio", "threads")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


# ------------------------------------------------------------------------------------------------ one request's life


def test_a_request_is_waited_for_as_often_as_one_likes(path: Path) -> None:
    path.write_bytes(pattern(5000))
    read = torch.zeros(5000, dtype=torch.uint8)
    with fp.TensorFile(path, engine="fault:threads-buffered") as file, slow(1000):
        pending = file.read_async(read)
        assert not pending.done()
        for call in (pending.wait, pending.result, pending.exception):
            with pytest.raises(TimeoutError):
                call(0)
        with pytest.raises(TimeoutError, match="still under way"):
            pending.wait(0.01)
        for _ in range(3):
            pending.wait()
            pending.wait(0)
            assert pending.result() == 5000
            assert pending.exception() is None
            assert pending.done()
    assert pending.result() == 5000  # also when the file is closed
    assert bytes_of(read) == pattern(5000)


def test_a_failure_is_raised_each_time_by_wait_and_result(path: Path) -> None:
    path.write_bytes(bytes(10))
    with fp.TensorFile(path) as file:
        pending = file.read_async(torch.zeros(10))
        for _ in range(2):
            for call in (pending.wait, pending.result):
                with pytest.raises(EndOfFileError):
                    call()
            assert isinstance(pending.exception(), EndOfFileError)
            assert pending.done()


def test_many_threads_wait_for_one_request(path: Path) -> None:
    path.write_bytes(bytes(100))
    with fp.TensorFile(path, engine="fault:threads-buffered") as file, slow(1000):
        pending = file.read_async(torch.zeros(25))
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: pending.result(10), range(8))) == [100] * 8


def test_waiting_and_moving_bytes_leave_the_interpreter_to_others(path: Path) -> None:
    path.write_bytes(bytes(100))
    counted = 0
    with fp.TensorFile(path, engine="fault:threads-buffered") as file, slow(1500):
        waiting = threading.Thread(target=file.read, args=(torch.zeros(25),))
        start_s = time.monotonic()
        waiting.start()
        while waiting.is_alive():
            counted += 1
        assert time.monotonic() - start_s > 0.4
        waiting.join()
    assert counted > 100


def test_a_tensor_lives_until_its_request_is_done_whoever_drops_what(path: Path) -> None:
    path.write_bytes(pattern(1 << 20))
    with fp.TensorFile(path, "r+", engine="fault:threads-buffered") as file:
        with slow(1500):
            read = torch.zeros(1 << 20, dtype=torch.uint8)
            there = weakref.ref(read)
            pending = file.read_async(read)
            del read
            gc.collect()
            assert there() is not None
            pending.wait()
            assert there() is None, "kept for nothing by a request that is done"

            for start in (file.read_async, file.write_async):
                dropped = torch.zeros(1 << 20, dtype=torch.uint8)
                there = weakref.ref(dropped)
                start(dropped)  # nobody keeps the request
                del dropped
                gc.collect()
                assert there() is not None
                file.sync()
                assert there() is None
        assert file.read(torch.zeros(1)) == 4


def test_what_is_written_comes_from_the_tensor_though_it_was_dropped(path: Path) -> None:
    # Freed memory would be taken by the next tensors at once.
    with fp.TensorFile(path, "w", engine="fault:threads-buffered", threads=1) as file, slow(20, "write"):
        for number in range(20):
            file.write_async(torch.full((50_000,), number, dtype=torch.uint8), number * 50_000)
            torch.full((50_000,), 255, dtype=torch.uint8)
    assert path.read_bytes() == b"".join(bytes([number]) * 50_000 for number in range(20))


def test_requests_dropped_by_threads_lose_no_tensor(path: Path) -> None:
    path.write_bytes(b"\1" * 4096)

    def drop(file: fp.TensorFile, seed: int) -> list[weakref.ref[torch.Tensor]]:
        watched = []
        for _ in range(200):
            tensor = torch.zeros(4096, dtype=torch.uint8)
            watched.append(weakref.ref(tensor))
            file.read_async(tensor)
        return watched

    with no_leaks(), fp.TensorFile(path, engine="fault:threads-buffered", threads=4) as file, slow(2):
        with ThreadPoolExecutor(4) as pool:
            watched = [ref for refs in pool.map(lambda seed: drop(file, seed), range(4)) for ref in refs]
        alive = sum(ref() is not None for ref in watched)
        assert alive > 0  # 800 requests of 2 ms by 4 threads take longer than asking for them
        file.sync()
        assert not any(ref() is not None for ref in watched)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not tell profilers of native methods")
def test_ctrl_c_between_the_request_and_its_owner_frees_nothing(path: Path) -> None:
    path.write_bytes(pattern(100))
    with fp.TensorFile(path, engine="fault:threads-buffered") as file, slow(1500):
        tensor = torch.zeros(100, dtype=torch.uint8)
        there = weakref.ref(tensor)

        def interrupt(frame: object, event: str, argument: object) -> None:
            if event == "c_return" and getattr(argument, "__name__", "") == "submit":
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                file.read(tensor)
        finally:
            sys.setprofile(None)
        del tensor
        gc.collect()
        # pytest holds the traceback's frames; what counts is that the bytes arrive in memory that is still there.
        assert there() is not None
        held = there()
        file.close()
        assert held is not None
        assert bytes_of(held) == pattern(100)


def test_ctrl_c_ends_a_wait_and_not_the_request(path: Path) -> None:
    path.write_bytes(pattern(100))
    read = torch.zeros(100, dtype=torch.uint8)
    with fp.TensorFile(path, engine="fault:threads-buffered") as file, slow(3000):
        pending = file.read_async(read)
        timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        timer.join()
        assert not pending.done()
        assert pending.result() == 100
    assert bytes_of(read) == pattern(100)


def test_ctrl_c_while_closing_closes_all_the_same(path: Path) -> None:
    with no_leaks():
        file = fp.TensorFile(path, "w", engine="fault:threads-buffered")
        with slow(1500):
            file.write_async(torch.ones(100, dtype=torch.uint8))
            timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                file.close()
            timer.join()
        assert file.closed
        file.close()
    assert path.read_bytes() == b"\1" * 100


def test_what_comes_after_the_bytes_is_done_again_if_it_failed(path: Path) -> None:
    # As a copy to a device that is out of memory.
    path.write_bytes(bytes(100))
    with fp.TensorFile(path) as file:
        calls = []

        def copy() -> None:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("the device is full")

        pending = file.read_async(torch.zeros(25))
        pending._then = copy
        with pytest.raises(RuntimeError, match="full"):
            pending.wait()
        assert pending.result() == 100
        assert pending.result() == 100
        assert len(calls) == 2


# ------------------------------------------------------------------------------------------------------ many of them


@engines
@pytest.mark.parametrize("queue_depth", [1, 64])
def test_thousands_are_under_way_at_once(engine: str, queue_depth: int, path: Path) -> None:
    skip_without(engine, path.parent)
    data = torch.frombuffer(bytearray(pattern(3000 * 700)), dtype=torch.uint8).view(3000, 700)
    read = torch.zeros_like(data)
    with no_leaks(), fp.TensorFile(path, "w", engine=engine, queue_depth=queue_depth) as file:
        writes = [file.write_async(data[row], row * 700) for row in range(3000)]
        assert [pending.result() for pending in writes] == [700] * 3000
        reads = [file.read_async(read[row], row * 700) for row in range(3000)]
        assert [pending.result() for pending in reversed(reads)] == [700] * 3000
    assert torch.equal(read, data)


def test_large_and_small_requests_share_a_queue(path: Path) -> None:
    data = pattern(6 << 20)
    path.write_bytes(data)
    with fp.TensorFile(path, chunk_bytes=65_536, queue_depth=4) as file:
        rng = random.Random(1)
        wanted = []
        for _ in range(60):
            size = rng.choice([1, 100, 4096, 70_000, 1 << 20])
            offset = rng.randrange((6 << 20) - size)
            read = tensor_of(bytes(size), shifted_bytes=rng.choice([0, 1, 512]))
            wanted.append((file.read_async(read, offset), read, offset))
        for pending, read, offset in wanted:
            assert pending.result() == read.nbytes
            assert bytes_of(read) == data[offset : offset + read.nbytes]


def test_a_read_starts_while_others_are_under_way(path: Path) -> None:
    path.write_bytes(bytes(8192))
    with fp.TensorFile(path, engine="fault:threads-buffered", threads=2) as file:
        with faults(kind="delay", delay_ms=3000):
            late = file.read_async(torch.zeros(10))
            for _ in range(20):
                file.read(torch.zeros(10))
            assert not late.done()
            late.wait()


# ------------------------------------------------------------------------------------------- a lock of somebody else


def test_a_write_waits_for_a_lock_that_somebody_has_on_the_whole_file(path: Path) -> None:
    path.write_bytes(bytes(10_000))
    with no_leaks(), path.open("r+b") as guard, fp.TensorFile(path, "r+") as file:
        fcntl.lockf(guard, fcntl.LOCK_EX)  # an ordinary one; it reaches beyond all offsets
        pending = file.write_async(torch.ones(9001, dtype=torch.uint8), 1)
        assert file.read(torch.zeros(10), 9000) == 40  # reads need no lock
        with pytest.raises(TimeoutError):
            pending.wait(0.3)
        fcntl.lockf(guard, fcntl.LOCK_UN)
        assert pending.result(300) == 9001


@pytest.mark.long
def test_a_lock_that_stays_is_an_error_that_names_its_holder(path: Path) -> None:
    path.write_bytes(bytes(10_000))
    with no_leaks(), path.open("r+b") as guard, fp.TensorFile(path, "r+") as file:
        fcntl.lockf(guard, fcntl.LOCK_EX)
        error = file.write_async(torch.zeros(8192)).exception(60)
        assert isinstance(error, StorageError)
        assert str(os.getpid()) in str(error)
        fcntl.lockf(guard, fcntl.LOCK_UN)
        assert file.write(torch.zeros(8192)) == 32_768  # it was that request's affair


# ------------------------------------------------------------------------------------------------ failures, unheard


@pytest.mark.parametrize("end", ["sync", "close", "forgotten"])
def test_of_several_failed_writes_one_is_raised_and_the_others_are_in_the_log(
    path: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(pattern(100_000))
    file = fp.TensorFile(path, "r+", engine="fault:threads-buffered", threads=1)
    with faults(op="write", count=2):
        for offset_bytes in (1000, 50_000):
            file.write_async(torch.zeros(10), offset_bytes)
        if end == "forgotten":
            with pytest.warns(ResourceWarning, match="was not closed"):
                file.__del__()
        else:
            with pytest.raises(StorageError, match="offset"):
                getattr(file, end)()
    file.close()
    told = " ".join(record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert ("at offset 1000" in told) + ("at offset 50000" in told) == (2 if end == "forgotten" else 1)


def test_a_failed_write_that_nobody_asks_about_is_raised_by_sync_or_close(path: Path) -> None:
    for end in (fp.TensorFile.sync, fp.TensorFile.close):
        with no_leaks():
            file = fp.TensorFile(path, "w", engine="fault:threads-buffered")
            with faults(op="write"):
                file.write_async(torch.zeros(10), 8192)
                with pytest.raises(StorageError) as failure:
                    end(file)
            assert failure.value.errno == 5
            assert failure.value.offset_bytes == 8192
            file.close()  # said once
            assert file.closed


def test_a_failed_write_that_was_heard_of_is_not_raised_again(path: Path) -> None:
    with fp.TensorFile(path, "w", engine="fault:threads-buffered") as file, faults(op="write", count=3):
        with pytest.raises(StorageError):
            file.write(torch.zeros(10))
        assert isinstance(file.write_async(torch.zeros(10)).exception(), StorageError)
        pending = file.write_async(torch.zeros(10))
        while not pending.done():
            time.sleep(0.001)
        with pytest.raises(StorageError):  # done() alone has told nobody
            file.sync()
        file.sync()


def test_a_failed_read_is_the_affair_of_who_asked(path: Path) -> None:
    path.write_bytes(bytes(10))
    with fp.TensorFile(path, "r+") as file:
        file.read_async(torch.zeros(100))
        file.sync()


def test_an_error_that_is_on_its_way_is_not_replaced_by_closing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with faults(op="write"), pytest.raises(KeyError, match="mine"):
        with fp.TensorFile(path, "w", engine="fault:threads-buffered") as file:
            file.write_async(torch.zeros(10))
            raise KeyError("mine")
    assert "write to" in caplog.text
    assert file.closed


# --------------------------------------------------------------------------------------------- the file's own end


def test_close_and_drop_wait_for_what_is_under_way(path: Path) -> None:
    for end in ("close", "drop", "exit"):
        path.unlink(missing_ok=True)
        with no_leaks(), slow(1000):
            file = fp.TensorFile(path, "w", engine="fault:threads-buffered")
            pending = file.write_async(torch.ones(1000, dtype=torch.uint8))
            if end == "close":
                file.close()
            elif end == "exit":
                with file:
                    pass
            else:
                with pytest.warns(ResourceWarning):
                    del file  # the last reference
            assert pending.done()
            assert path.read_bytes() == b"\1" * 1000


def close_soon(file: fp.TensorFile) -> None:
    time.sleep(0.02)
    file.close()


def test_threads_may_use_and_close_a_file_at_any_time(path: Path) -> None:
    path.write_bytes(bytes(100_000))
    for seed in range(10):
        with no_leaks():
            file = fp.TensorFile(path, "r+", queue_depth=2)

            def use(number: int, file: fp.TensorFile = file, seed: int = seed) -> None:
                rng = random.Random(seed * 10 + number)
                with pytest.raises(ConfigError, match="closed"):
                    while True:
                        call = rng.choice(
                            [file.sync, file.size, lambda: file.write_async(torch.ones(9), 4000 * number)]
                        )
                        call()
                        file.read_async(torch.zeros(1000), rng.randrange(90_000))

            with ThreadPoolExecutor(4) as pool:
                using = [pool.submit(use, number) for number in range(3)]
                pool.submit(close_soon, file).result()
                for future in using:
                    future.result()
            assert file.closed


def test_descriptors_and_threads_are_given_back(path: Path) -> None:
    for engine in ENGINES:
        skip_without(engine, path.parent)
        with no_leaks():
            for mode in ("w", "r+", "r"):
                with fp.TensorFile(path, mode, engine=engine, threads=5) as file:
                    if mode != "r":
                        file.write(torch.ones(10_001))
                        file.write(torch.ones(10_001), 3)
                    file.read(torch.ones(10_001))


def test_hundreds_of_files_may_be_open(tmp_path: Path) -> None:
    with no_leaks():
        files = [fp.TensorFile(tmp_path / str(number), "w") for number in range(200)]
        pending = [file.write_async(torch.full((100,), number)) for number, file in enumerate(files)]
        assert all(one.result() == 800 for one in pending)
        for file in files:
            file.close()


def test_a_kill_with_requests_under_way_leaves_a_file_that_works(path: Path) -> None:
    def write(report: Report) -> None:
        with fp.TensorFile(path, "w") as file:
            for number in range(10_000):
                file.write_async(torch.zeros(10_001, dtype=torch.uint8), number * 10_001)
                report(number)
            while True:
                time.sleep(1)

    with Child(write) as child:
        while child.reported < 100 and not child.ended():
            time.sleep(0.001)
        assert child.kill().signal == signal.SIGKILL
    with fp.TensorFile(path, "r+") as file:
        assert file.write_async(torch.ones(10_001)).result(10) == 40_004  # no lock is left behind


def test_a_process_may_have_few_descriptors(path: Path) -> None:
    def work(report: Report) -> None:
        import resource

        path.write_bytes(bytes(100))
        file = fp.TensorFile(path, "r+")
        file.write(torch.zeros(25))  # starts its threads
        file.read(torch.zeros(25))
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), 4096))
        with no_leaks():
            for _ in range(3):
                with pytest.raises(StorageError):
                    fp.TensorFile(path, "r+")
            assert file.read(torch.zeros(25)) == 100
            assert file.write(torch.zeros(25)) == 100
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        file.sync()
        file.close()

    run_in_child(work)
