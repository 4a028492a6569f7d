"""One TensorFile, several processes: forked children and DataLoader workers read and write through their parent's file,
and neither side hurts the other.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch
from support.forking import Child, Report, run_in_child
from support.leaks import no_leaks
from support.tensor_files import ENGINES, PAGE_BYTES, ROW_BYTES, Rows, bytes_of, pattern, skip_without, slow, tensor_of
from torch.utils.data import DataLoader

import fastpersist as fp
from fastpersist.errors import ConfigError, StorageError

torch.set_num_threads(1)

# torch's loader asks for more workers than this machine has processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def check(file: fp.TensorFile, data: bytes, offset: int = 0) -> None:
    read = tensor_of(bytes(len(data)))
    file.read(read, offset)
    assert bytes_of(read) == data


@engines
@pytest.mark.parametrize("used", [False, True], ids=["unused before", "used before"])
def test_a_forked_child_reads_and_writes_through_its_parents_file(engine: str, used: bool, path: Path) -> None:
    skip_without(engine, path.parent)
    data = pattern(100_000)
    path.write_bytes(data)
    with no_leaks(), fp.TensorFile(path, "r+", engine=engine) as file:
        if used:
            check(file, data)
            file.write(tensor_of(data[:100]))

        def work(report: Report) -> None:
            check(file, data)
            file.write(tensor_of(b"child"), 5)
            file.sync()
            assert file.size() == 100_000
            file.close()

        run_in_child(work)
        check(file, data[:5] + b"child" + data[10:])
        file.write(tensor_of(b"parent"), 20)
        file.sync()


def test_a_fork_with_requests_under_way_leaves_them_to_the_parent(path: Path) -> None:
    data = pattern(400_000)
    with no_leaks(), fp.TensorFile(path, "w", engine="fault:threads-buffered", chunk_bytes=PAGE_BYTES) as file:
        with slow(20, "write"):
            pending = [file.write_async(tensor_of(data[at : at + 10_000]), at) for at in range(0, 400_000, 10_000)]

            def work(report: Report) -> None:
                with pytest.raises(ConfigError, match="belongs to the process"):
                    pending[0].wait()
                with pytest.raises(ConfigError, match="belongs to the process"):
                    pending[-1].done()
                pending.clear()
                gc.collect()
                file.sync()  # has none of its own to wait for
                file.write(tensor_of(b"child"), 500_000)

            run_in_child(work)
            assert all(one.result() == 10_000 for one in pending)
    assert path.read_bytes() == data + bytes(100_000) + b"child"


def test_forks_at_any_moment_of_other_threads_hang_nobody(path: Path) -> None:
    data = pattern(200_000)
    path.write_bytes(data)
    stop = threading.Event()
    with fp.TensorFile(path, "r+") as file:

        def use(number: int) -> None:
            while not stop.is_set():
                check(file, data[number * 1000 :], number * 1000)
                file.write_async(tensor_of(data[number * 50_000 + 1 : (number + 1) * 50_000]), number * 50_000 + 1)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(25):

                def work(report: Report) -> None:
                    check(file, data[150_000:], 150_000)
                    file.write(tensor_of(data[190_000:]), 190_000)

                with Child(work) as child:
                    ending = child.wait()
                assert ending.verdict == "passed", ending.message
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert path.read_bytes() == data


def test_memory_that_is_read_into_while_the_process_forks_gets_its_bytes(path: Path) -> None:
    data = pattern(4 << 20)
    path.write_bytes(data)
    with fp.TensorFile(path, engine="threads") as file:
        for _ in range(10):
            # One straight into its memory, one staged.
            reads = [fp.locked_tensor(4 << 20, torch.uint8), tensor_of(bytes(4 << 20), shifted_bytes=1)]
            pending = [file.read_async(read) for read in reads]
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            for one, read in zip(pending, reads, strict=True):
                one.wait()
                assert bytes_of(read) == data


def test_a_child_that_cannot_open_the_file_again_says_so_and_can_later(path: Path) -> None:
    path.write_bytes(pattern(100))
    with no_leaks(), fp.TensorFile(path, "r+") as file:

        def work(report: Report) -> None:
            import resource

            # Descriptors of the parent's file may be closed by now, and their numbers free.
            with open(os.devnull) as devnull:
                limit = max(devnull.fileno(), *map(int, os.listdir("/proc/self/fd")))
            fillers = []
            while True:
                try:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4096))
                    fillers.append(os.dup(0))
                except OSError:
                    break
            for _ in range(3):
                with pytest.raises(StorageError):
                    file.read(torch.zeros(1))
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            check(file, pattern(100))
            before = len(os.listdir("/proc/self/fd"))
            check(file, pattern(100))
            assert len(os.listdir("/proc/self/fd")) == before
            file.close()
            # What it opened is gone, and what it had from its parent.
            names = []
            for fd in os.listdir("/proc/self/fd"):
                with contextlib.suppress(FileNotFoundError):  # the listing's own
                    names.append(os.readlink(f"/proc/self/fd/{fd}"))
            assert str(path) not in names

        run_in_child(work)
        check(file, pattern(100))


def test_a_child_that_never_uses_the_file_takes_nothing_of_it(path: Path) -> None:
    path.write_bytes(pattern(100))
    file = fp.TensorFile(path, "r+")
    file.write(tensor_of(b"1"))

    def work(report: Report) -> None:
        nonlocal file
        del file
        gc.collect()

    run_in_child(work)
    check(file, b"1" + pattern(100)[1:])
    file.close()


def test_children_of_children_do_too(path: Path) -> None:
    data = pattern(50_000)
    path.write_bytes(data)
    with fp.TensorFile(path) as file:

        def child(report: Report) -> None:
            check(file, data)
            run_in_child(lambda report: check(file, data))
            check(file, data)

        run_in_child(child)
        run_in_child(lambda report: run_in_child(lambda report: check(file, data)))
        check(file, data)


def test_a_file_that_was_replaced_or_removed_is_still_the_same_one_for_a_child(path: Path) -> None:
    data = pattern(50_000)
    path.write_bytes(data)
    with fp.TensorFile(path, "r+") as file:
        path.unlink()
        path.write_bytes(b"another")
        run_in_child(lambda report: check(file, data))
        run_in_child(lambda report: None if file.write(tensor_of(b"new")) == 3 else pytest.fail("short"))
        check(file, b"new" + data[3:])
    assert path.read_bytes() == b"another"


def test_a_child_that_dies_in_a_write_blocks_nobody(path: Path) -> None:
    path.write_bytes(bytes(200_000))
    with fp.TensorFile(path, "r+") as file:

        def work(report: Report) -> None:
            for number in range(1000):
                file.write_async(tensor_of(b"x" * 10_001), number * 101)
                report(number)
            threading.Event().wait()

        for _ in range(5):
            with Child(work) as child:
                while child.reported < 5 and not child.ended():
                    pass
                child.kill()
            assert file.write_async(tensor_of(b"y" * 10_001), 1).result(20) == 10_001


# ------------------------------------------------------------------------------------------------------ DataLoader


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_the_workers_of_a_data_loader_read_through_one_file(start: str, path: Path) -> None:
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start} here")
    data = pattern(64 * ROW_BYTES)
    path.write_bytes(data)
    with fp.TensorFile(path) as file:
        rows = Rows(file, 64)
        assert bytes_of(rows[3]) == data[3 * ROW_BYTES : 4 * ROW_BYTES]  # used by the parent before
        loader = DataLoader(rows, batch_size=8, num_workers=2, multiprocessing_context=start)
        for _ in range(2 if start == "fork" else 1):
            assert b"".join(bytes_of(batch) for batch in loader) == data
        assert bytes_of(rows[63]) == data[63 * ROW_BYTES :]
