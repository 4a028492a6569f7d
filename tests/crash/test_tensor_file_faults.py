"""TensorFile when the disk or the kernel does not do what it was asked: the n-th request fails, for n = 1, 2, 3 … until
there is no n-th.

Whatever it was: nothing hangs, nothing is said to be done that is not, other requests are not touched, and the file
goes on working.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import Report, run_in_child
from support.leaks import no_leaks
from support.sandbox import mount_ext4, needs_root, small_filesystem, unmount
from support.tensor_files import EVERY, bytes_of, faults, pattern, skip_without, tensor_of

import fastpersist as fp
from fastpersist import _native
from fastpersist.config import Config
from fastpersist.errors import EndOfFileError, NoSpaceError, StorageError
from fastpersist.transfer import engine_selection, tensor_file

torch.set_num_threads(1)

ENGINES = ("uring", "libaio", "threads", "threads-buffered")
FAULTS: dict[str, dict[str, Any]] = {
    "EIO": {"sys_errno": errno.EIO},
    "ENOSPC": {"sys_errno": errno.ENOSPC},
    "EIO-lasting": {"sys_errno": errno.EIO, "count": EVERY},
    "EINVAL": {"sys_errno": errno.EINVAL},  # a named engine is not replaced
    "zero": {"kind": "zero"},
    "zero-lasting": {"kind": "zero", "count": EVERY},
    "EINTR": {"sys_errno": errno.EINTR},
    "EAGAIN": {"sys_errno": errno.EAGAIN, "count": 3},
    "ECANCELED": {"sys_errno": errno.ECANCELED, "count": 3},
    "short": {"kind": "short", "short_bytes": 4096},
    "short-lasting": {"kind": "short", "short_bytes": 4096, "count": EVERY},
    "late": {"kind": "delay", "delay_ms": 20},
}
FORGIVEN = ("EINTR", "EAGAIN", "ECANCELED", "short", "short-lasting", "late")
CHUNK_BYTES = 16_384
SIZE = 5 * CHUNK_BYTES + 777
OFFSET = 1000  # so that writes have edges, and reads are staged
REQUESTS_MIN = 5  # fewer would be no loop worth the name

# One of each kind at any time (asynchronous and direct; threads and buffered), all of them in `make crash`.
engines = pytest.mark.parametrize(
    "engine",
    [pytest.param(engine, marks=[pytest.mark.long] if engine in ("libaio", "threads") else []) for engine in ENGINES],
)
fault_kinds = pytest.mark.parametrize("fault", FAULTS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@contextmanager
def armed(**plan: Any) -> Iterator[list[int]]:
    """Arm a fault; the list holds afterwards how many requests were hit."""
    hits: list[int] = []
    with faults(**plan):
        yield hits
        hits.append(_native.clear_fault_plan())


def opened(path: Path, mode: str, engine: str) -> fp.TensorFile:
    return fp.TensorFile(path, mode, engine=f"fault:{engine}", chunk_bytes=CHUNK_BYTES, threads=2)


def leaks_at(nth: int) -> AbstractContextManager[None]:
    """Look for leaks in the first and a middle round: looking takes longer than the round."""
    return no_leaks() if nth in (1, 4) else nullcontext()


@engines
@fault_kinds
def test_a_write_is_whole_or_an_error_whichever_request_fails(engine: str, fault: str, path: Path) -> None:
    skip_without(engine, path.parent)
    before, data, after = pattern(OFFSET + SIZE + 5000, 1), pattern(SIZE, 2), pattern(SIZE, 3)
    for nth in itertools.count(1):
        path.write_bytes(before)
        with leaks_at(nth), opened(path, "r+", engine) as file:
            with armed(op="write", nth=nth, **FAULTS[fault]) as hits:
                # Two parts, so that a failure of one of them is not taken for all.
                items = [(tensor_of(data[:20_000]), OFFSET), (tensor_of(data[20_000:]), OFFSET + 20_000)]
                error = file.write_list_async(items).exception(60)
            written = path.read_bytes()
            # Whatever happened, nothing beside was touched.
            assert written[:OFFSET] == before[:OFFSET]
            assert written[OFFSET + SIZE :] == before[OFFSET + SIZE :]
            if hits == [0] or fault in FORGIVEN:
                assert error is None
                assert written[OFFSET : OFFSET + SIZE] == data
            else:
                assert isinstance(error, StorageError)
                assert error.filename == str(path)
                assert str(path) in str(error)
                assert error.offset_bytes is not None
                assert OFFSET <= error.offset_bytes < OFFSET + SIZE
                if "sys_errno" in FAULTS[fault]:
                    assert error.errno == FAULTS[fault]["sys_errno"]
                assert isinstance(error, NoSpaceError) == (fault == "ENOSPC")
            # And it goes on.
            assert file.write(tensor_of(after), OFFSET) == SIZE
            file.sync()
        assert path.read_bytes()[OFFSET : OFFSET + SIZE] == after
        if hits == [0]:
            assert nth > REQUESTS_MIN
            break


@engines
@fault_kinds
@pytest.mark.parametrize("shifted_bytes", [0, 1])
def test_a_read_is_whole_or_an_error_whichever_request_fails(
    engine: str, fault: str, shifted_bytes: int, path: Path
) -> None:
    skip_without(engine, path.parent)
    data = pattern(OFFSET + SIZE, 1)
    path.write_bytes(data)
    offset = OFFSET if shifted_bytes else 4096
    for nth in itertools.count(1):
        read = tensor_of(bytes(OFFSET + SIZE - offset), shifted_bytes=shifted_bytes)
        with leaks_at(nth), opened(path, "r", engine) as file:
            with armed(op="read", nth=nth, **FAULTS[fault]) as hits:
                error = file.read_async(read, offset).exception(60)
            if hits == [0] or fault in FORGIVEN:
                assert error is None
                assert bytes_of(read) == data[offset:]
            elif fault.startswith("zero"):  # the kernel's word for the end
                assert isinstance(error, EndOfFileError)
                assert bytes_of(read)[: error.done_bytes] == data[offset:][: error.done_bytes]
                assert error.done_bytes < SIZE
            else:
                assert isinstance(error, StorageError)
                assert not isinstance(error, EndOfFileError)
                assert (error.errno, error.filename) == (FAULTS[fault]["sys_errno"], str(path))
            assert file.read(read, offset) == len(data) - offset
            assert bytes_of(read) == data[offset:]
        if hits == [0]:
            assert nth > REQUESTS_MIN
            break


@engines
def test_a_failure_is_of_its_own_request_only(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    rows = [tensor_of(pattern(10_000, seed)) for seed in range(40)]
    with fp.TensorFile(path, "w", engine=f"fault:{engine}", queue_depth=4) as file:
        with armed(op="write", nth=30, count=5) as hits:
            writes = [file.write_async(row, number * 10_000) for number, row in enumerate(rows)]
            failed = [number for number, pending in enumerate(writes) if pending.exception() is not None]
        assert hits == [5]
        assert 1 <= len(failed) <= 5
        file.sync()  # all were heard of
        for number, row in enumerate(rows):
            read = torch.zeros_like(row)
            if number not in failed:
                file.read(read, number * 10_000)
                assert bytes_of(read) == bytes_of(row)


@engines
def test_a_short_write_is_finished_where_it_stopped(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    data = pattern(200_000)
    for short_bytes in (512, 4096, 5000, 12_288):
        with fp.TensorFile(path, "w", engine=f"fault:{engine}") as file:
            if short_bytes % 512 and not engine.endswith("-buffered"):
                continue  # no direct engine stops there but at the end of the file
            with armed(kind="short", short_bytes=short_bytes, count=EVERY) as hits:
                file.write(tensor_of(data), 3)
                read = tensor_of(bytes(len(data)))
                file.read(read, 3)
            assert hits[0] > 2
        assert bytes_of(read) == data
        assert path.read_bytes() == bytes(3) + data


LADDER = ["fault:uring", "fault:libaio", "fault:threads", "threads-buffered"]


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("sys_errno", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_auto_leaves_an_engine_in_mid_file_and_loses_nothing(
    op: str, sys_errno: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "engine_ladder", lambda *arguments, **named: list(LADDER))
    data = pattern(6 * CHUNK_BYTES)
    cuts = [0, 4096, 8192, CHUNK_BYTES, 3 * CHUNK_BYTES, len(data)]  # no edges: those are in the page cache already
    with no_leaks():
        for nth, count in itertools.product((1, 2, 5), (1, EVERY)):
            path.write_bytes(data if op == "read" else bytes(4096 + len(data)))
            with fp.TensorFile(path, "r+", chunk_bytes=CHUNK_BYTES, queue_depth=4, threads=2) as file:
                first = file.engine
                with armed(op=op, nth=nth, count=count, sys_errno=sys_errno) as hits:
                    if op == "write":
                        pending = [
                            file.write_async(tensor_of(data[start:end], shifted_bytes=start // 4096 % 2), 4096 + start)
                            for start, end in itertools.pairwise(cuts)
                        ]
                        assert [one.exception() for one in pending] == [None] * 5
                        assert path.read_bytes() == bytes(4096) + data
                    else:
                        read = tensor_of(bytes(len(data) - 7), shifted_bytes=1)
                        file.read(read, 7)
                        assert bytes_of(read) == data[7:]
                assert hits[0] >= 1
                assert file.engine != first
                # Whatever it has come to: any request is done, and right.
                for shifted_bytes in (0, 1):
                    file.write(tensor_of(data, shifted_bytes=shifted_bytes), OFFSET + shifted_bytes)
                    read = tensor_of(bytes(len(data)), shifted_bytes=shifted_bytes)
                    file.read(read, OFFSET + shifted_bytes)
                    assert bytes_of(read) == data
                file.sync()


def test_a_ladder_that_begins_in_the_page_cache_never_becomes_direct(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a tuning file may have it. What was cut for the page cache would not do for direct I/O.
    monkeypatch.setattr(engine_selection, "config_for", lambda fd: Config(engine_wish="fault:threads-buffered"))
    with fp.TensorFile(path, "w") as file:
        with armed(op="write", sys_errno=errno.EOPNOTSUPP) as hits:
            file.write(fp.locked_tensor(4096, torch.uint8))
        assert hits == [1]
        assert file.engine.endswith("-buffered")
        file.write(torch.ones(1001, dtype=torch.uint8), 1001)
    assert path.read_bytes() == bytes(1001) + b"\1" * 1001 + bytes(4096 - 2002)


def test_a_named_engine_is_left_for_no_other(path: Path) -> None:
    with fp.TensorFile(path, "w", engine="fault:threads-buffered") as file:
        with armed(sys_errno=errno.EOPNOTSUPP):
            with pytest.raises(fp.FastPersistError):
                file.write(torch.zeros(10))
        assert file.engine == "fault:threads-buffered"
        file.write(torch.zeros(10))


def failure_of(file: fp.TensorFile, tensor: torch.Tensor, offset_bytes: int) -> fp.FastPersistError | None:
    """Write; whether it is refused at once or fails later."""
    try:
        return file.write_async(tensor, offset_bytes).exception()
    except fp.FastPersistError as error:
        return error


@needs_root
@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "ext4-without-fallocate"])
@pytest.mark.parametrize("engine", ["auto", "uring", "libaio", "threads", "threads-buffered"])
def test_a_disk_that_is_really_full_is_an_error_and_loses_nothing_else(kind: str, engine: str, tmp_path: Path) -> None:
    def fill(report: Report) -> None:
        with small_filesystem(kind, tmp_path, 12) as directory:
            if engine != "auto" and engine not in {probe.name for probe in fp.engines(directory) if probe.usable}:
                pytest.skip(f"{engine} does not work on {kind}")
            data = pattern(1 << 20)
            path = directory / "file"
            with no_leaks(), fp.TensorFile(path, "w", engine=engine, chunk_bytes=65_536) as file:
                written = 0
                for number in range(20):
                    error = failure_of(file, tensor_of(data, shifted_bytes=number % 2), number * len(data) + 100)
                    if error is not None:
                        break
                    written += 1
                assert isinstance(error, NoSpaceError)
                assert error.errno == errno.ENOSPC
                assert str(path) in str(error)
                assert 1 <= written < 12
                with pytest.raises(NoSpaceError):
                    file.write_list([(torch.zeros(4 << 20), 64 << 20)])
                with pytest.raises(NoSpaceError):
                    file.write_async(tensor_of(bytes(16 << 20)), 32 << 20).wait()
                for number in range(written):
                    read = tensor_of(bytes(len(data)))
                    file.read(read, number * len(data) + 100)
                    assert bytes_of(read) == data
                file.truncate(5000)
                file.write(tensor_of(data), 5000)  # there is room again
                file.sync()
            assert path.read_bytes()[5000:] == data
            with fp.TensorFile(path, "r+") as file, pytest.raises(NoSpaceError):
                file.allocate(64 << 20)
                file.write(torch.zeros(16 << 20))  # where nothing can be reserved

    if kind == "tmpfs" and engine == "libaio":
        pytest.skip("no asynchronous I/O on tmpfs")
    run_in_child(fill)


def lose_a_demoted_write(file: fp.TensorFile, let_disk_fail: Callable[[], None]) -> None:
    # Demoted, its own writes go through the page cache, and are brought from there to the disk when it leaves the lock.
    file.allocate(2 << 20)
    file.write(tensor_of(pattern(4096)))
    with armed(sys_errno=errno.EOPNOTSUPP, count=EVERY):
        file.read(tensor_of(bytes(4096)))
    assert file.engine == "threads-buffered"
    file.sync()
    let_disk_fail()
    file.write(tensor_of(pattern(1 << 20)), 1 << 20)
    with fp.TensorFile(file.path, "r+", engine="fault:threads") as other:
        other.write(tensor_of(bytes(10)), 10)  # alone, so the lock has been left


def lose_an_edge(file: fp.TensorFile, let_disk_fail: Callable[[], None]) -> None:
    # The page in which the file ends is brought to the disk before the end is moved.
    file.write(tensor_of(pattern(4096)))
    file.sync()
    let_disk_fail()
    file.write_list((tensor_of(pattern(1000)), 4096 * page) for page in range(1, 257))
    with contextlib.suppress(NoSpaceError):
        file.truncate(4096 * 256 + 500)


@needs_root
@pytest.mark.parametrize("lose", [lose_a_demoted_write, lose_an_edge])
def test_sync_tells_what_the_disk_has_not_taken(
    lose: Callable[[fp.TensorFile, Callable[[], None]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "engine_ladder", lambda *arguments, **named: ["fault:threads", "threads-buffered"])

    def work(report: Report) -> None:
        # A disk of 64 MiB in memory of 12 MiB. What it has written once it can write again; of the rest it takes a few
        # pages at most.
        with small_filesystem("tmpfs", tmp_path, 12) as memory:
            directory = tmp_path / "disk"
            directory.mkdir()
            mount_ext4(memory / "image", directory, 64)

            def let_disk_fail() -> None:
                os.sync()
                with (memory / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(4096))

            try:
                path = directory / "file"
                with fp.TensorFile(path, "w") as file:
                    lose(file, let_disk_fail)
                    for _ in range(2):
                        with pytest.raises(NoSpaceError) as failure:
                            file.sync()
                        assert failure.value.errno == errno.ENOSPC
                        assert str(path) in str(failure.value)
            finally:
                unmount(directory)

    run_in_child(work)


def test_a_file_system_that_turns_read_only_is_an_error(path: Path) -> None:
    with fp.TensorFile(path, "w", engine="fault:threads-buffered") as file:
        with armed(op="write", sys_errno=errno.EROFS), pytest.raises(StorageError) as failure:
            file.write(torch.zeros(10))
        assert failure.value.errno == errno.EROFS


def test_memory_that_cannot_be_read_is_an_error_of_that_request(path: Path) -> None:
    path.write_bytes(bytes(1 << 20))
    source = path.with_name("mapped")
    source.write_bytes(bytes(1 << 16))
    mapped = torch.from_file(str(source), shared=True, size=1 << 16, dtype=torch.uint8)
    os.truncate(source, 0)  # its pages are gone: whoever touches them gets SIGBUS, and the kernel EFAULT
    with fp.TensorFile(path, "r+", engine="threads-buffered") as file:
        for call in (file.write, file.read):
            with pytest.raises(StorageError) as failure:
                call(mapped)
            assert failure.value.errno == errno.EFAULT
        assert file.read(torch.zeros(10)) == 40


def test_no_thread_can_be_started(path: Path) -> None:
    def work(report: Report) -> None:
        import resource

        from support.sandbox import become_ordinary_user

        path.write_bytes(bytes(10_000))
        path.chmod(0o666)
        fds = [fp.TensorFile(path, "r+", engine="uring" if number else "auto") for number in range(2)]
        become_ordinary_user()
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        for file in fds:
            for _ in range(2):
                error = file.write_async(torch.zeros(100)).exception(10)
                if error is None:
                    pytest.skip("this process may start threads all the same")
                assert isinstance(error, fp.FastPersistError)
                assert "thread" in str(error)
            file.close()

    skip_without("uring", path.parent)
    run_in_child(work)
