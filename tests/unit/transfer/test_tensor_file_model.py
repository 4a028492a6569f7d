"""TensorFile against a bytearray: any sequence of requests, requests that overlap in time, and writers that are
neighbours in one block, from threads, files and processes: no byte is lost.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forking import Child, Report
from support.tensor_files import ENGINES, bytes_of, faults, pattern, skip_without, tensor_of

import fastpersist as fp

torch.set_num_threads(1)

DIRECT = ("uring", "libaio", "threads")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


# --------------------------------------------------------------------------------- against a model

sizes = st.sampled_from([0, 1, 3, 511, 512, 513, 4095, 4096, 4097, 8192, 20_000, 70_000]) | st.integers(0, 30_000)
offsets = st.sampled_from([0, 1, 512, 4095, 4096, 8192, 12_289, 65_536]) | st.integers(0, 60_000)
items = st.tuples(sizes, offsets, st.sampled_from([0, 1, 8, 512, 2048]))
operations = st.one_of(
    st.tuples(st.just("write"), items),
    st.tuples(st.just("read"), items),
    st.tuples(st.just("truncate"), sizes),
    st.tuples(st.just("allocate"), sizes),
    st.tuples(st.just("write_list"), st.lists(items, max_size=5)),
    st.tuples(st.just("read_list"), st.lists(items, max_size=5)),
    st.tuples(st.just("sync"), st.none()),
    st.tuples(st.just("look"), st.none()),
)


def apart(wanted: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Leave out what would overlap with one before: the order within a list is not said."""
    kept: list[tuple[int, int, int]] = []
    for size, offset, shift in wanted:
        if all(offset + size <= at or at + count <= offset for count, at, _ in kept):
            kept.append((size, offset, shift))
    return kept


def put(model: bytearray, data: bytes, offset: int) -> None:
    if data:
        model.extend(bytes(max(0, offset - len(model))))
        model[offset : offset + len(data)] = data


@settings(max_examples=60)
@given(
    steps=st.lists(operations, min_size=1, max_size=12),
    start=sizes,
    engine=st.sampled_from([*ENGINES, "uring-buffered", "libaio-buffered"]),
    chunk_bytes=st.sampled_from([4096, 8192, 65_536, 8 << 20]),
    queue_depth=st.sampled_from([1, 2, 7, 64]),
    threads=st.sampled_from([None, 1, 3]),
)
def test_any_sequence_leaves_what_a_bytearray_would_hold(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, Any]],
    start: int,
    engine: str,
    chunk_bytes: int,
    queue_depth: int,
    threads: int | None,
) -> None:
    path = tmp_path_factory.getbasetemp() / "model"
    if engine != "auto" and not {probe.name: probe.usable for probe in PROBES(path.parent)}[engine]:
        engine = "auto"
    model = bytearray(pattern(start))
    path.write_bytes(model)
    seeds = itertools.count(10)
    with fp.TensorFile(
        path, "r+", engine=engine, chunk_bytes=chunk_bytes, queue_depth=queue_depth, threads=threads
    ) as file:
        for name, argument in steps:
            if name == "truncate":
                file.truncate(argument)
                model[:] = model[:argument].ljust(argument, b"\0")
            elif name == "allocate":
                file.allocate(argument)
                model.extend(bytes(max(0, argument - len(model))))
            elif name == "sync":
                file.sync()
            elif name == "look":
                assert path.read_bytes() == model
            elif name.startswith("write"):
                wanted = apart(argument if name == "write_list" else [argument])
                data = [(pattern(size, next(seeds)), offset, shift) for size, offset, shift in wanted]
                tensors = [(tensor_of(some, shifted_bytes=shift), offset) for some, offset, shift in data]
                assert file.write_list(tensors) == sum(len(some) for some, _, _ in data)
                for some, offset, _ in data:
                    put(model, some, offset)
            else:
                there = [
                    (max(0, min(size, len(model) - offset)), offset, shift)
                    for size, offset, shift in (argument if name == "read_list" else [argument])
                ]
                reads = [(tensor_of(bytes(size), shifted_bytes=shift), offset) for size, offset, shift in there]
                assert file.read_list(reads) == sum(size for size, _, _ in there)
                for tensor, offset in reads:
                    assert bytes_of(tensor) == model[offset : offset + tensor.nbytes]
            assert file.size() == len(model)
    assert path.read_bytes() == model


_probes: dict[Path, list[fp.EngineProbe]] = {}


def PROBES(directory: Path) -> list[fp.EngineProbe]:
    if directory not in _probes:
        _probes[directory] = fp.engines(directory)
    return _probes[directory]


# ----------------------------------------------------------------------------------------------- overlapping in time


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 30),
    engine=st.sampled_from(ENGINES),
    chunk_bytes=st.sampled_from([4096, 65_536, 8 << 20]),
    queue_depth=st.sampled_from([1, 3, 64]),
    cut_count=st.integers(1, 60),
    size=st.sampled_from([4096, 20_000, 200_000]),
)
def test_requests_of_many_threads_that_overlap_in_time_and_not_in_place(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    engine: str,
    chunk_bytes: int,
    queue_depth: int,
    cut_count: int,
    size: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "overlap"
    rng = random.Random(seed)
    path.write_bytes(b"\xee" * size)
    data = rng.randbytes(size)
    cuts = sorted({0, size, *(rng.randrange(size) for _ in range(cut_count))})
    ranges = list(itertools.pairwise(cuts))
    rng.shuffle(ranges)
    try:
        file = fp.TensorFile(path, "r+", engine=engine, chunk_bytes=chunk_bytes, queue_depth=queue_depth)
        other = fp.TensorFile(path, "r+", engine=engine)
    except fp.UnsupportedError:
        return
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        mine = ranges[number::4]
        chosen = (file, other)[number % 2]
        shift = rng.choice([0, 1, 512])
        barrier.wait()
        writes = [
            chosen.write_async(tensor_of(data[start:end], shifted_bytes=shift), start) for start, end in mine[::2]
        ]
        chosen.write_list((tensor_of(data[start:end]), start) for start, end in mine[1::2])
        for pending in writes:
            pending.wait()
        for start, end in mine:
            read = tensor_of(bytes(end - start))
            chosen.read(read, start)
            assert bytes_of(read) == data[start:end]

    with file, other, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert path.read_bytes() == data


# ---------------------------------------------------------------------------------------- neighbours in one block

# The kernel cannot drop a cached folio that was made dirty while a direct write was under way in it: a sync says EIO
# then, and old bytes stay. So direct writes, and bytes through the page cache, take turns. The first tests show that
# they do, the others that it helps: without turns, those fail now and then only.


@contextmanager
def slow_write(path: Path, file: fp.TensorFile, data: bytes, place: int) -> Iterator[fp.PendingIO]:
    """Let a write be under way for a second: from when its bytes are in the file until it is known to be done."""
    with faults(op="write", kind="delay", delay_ms=1000):
        pending = file.write_async(tensor_of(data), place)
        while path.read_bytes()[place : place + len(data)] != data:
            assert not pending.done()
        yield pending
        pending.wait()


@pytest.mark.parametrize("engine", DIRECT)
@pytest.mark.parametrize("of_one_file", [True, False], ids=["one file", "two files"])
def test_direct_writes_and_bytes_through_the_page_cache_take_turns(engine: str, of_one_file: bool, path: Path) -> None:
    skip_without(engine, path.parent)
    path.write_bytes(bytes(100_000))
    edge, block, read = tensor_of(b"e" * 100), tensor_of(b"w" * 8192), tensor_of(bytes(100_000))
    with fp.TensorFile(path, "r+", engine=f"fault:{engine}") as first, fp.TensorFile(path, "r+") as other:
        second = first if of_one_file else other
        with slow_write(path, first, pattern(8192), 4096) as pending:
            second.read(read)  # takes no part in this
            second.write(block, 65_536)  # is direct, too
            assert not pending.done()
            second.write(edge, 50_000)
            assert pending.done()
        with slow_write(path, first, pattern(100), 50_000) as pending:
            second.read(read)
            assert not pending.done()
            second.write(block, 4096)
            assert pending.done()
    assert path.read_bytes()[4096 : 4096 + 8192] == b"w" * 8192


def dirty_page_count(path: Path) -> int:
    """How many pages of a file are in the page cache only. Source: cachestat(2)."""
    with path.open("rb") as file:
        answer = (ctypes.c_uint64 * 5)()
        whole = (ctypes.c_uint64 * 2)()
        if ctypes.CDLL(None, use_errno=True).syscall(451, file.fileno(), whole, answer, 0) != 0:
            pytest.skip(f"cachestat: {os.strerror(ctypes.get_errno())}")
        return int(answer[1] + answer[2])


@pytest.mark.parametrize("engine", DIRECT)
@pytest.mark.parametrize("grows", [False, True], ids=["within the file", "beyond its end"])
def test_nothing_is_left_dirty_beside_direct_writes(engine: str, grows: bool, path: Path) -> None:
    skip_without(engine, path.parent)
    path.write_bytes(bytes(400_000))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    with fp.TensorFile(path, "r+", engine=engine) as file:
        if grows:
            file.truncate(33_333)
            file.truncate(44_444)
        for place in (1, 50_000, 99_900, 150_000, 170_000):
            file.write(tensor_of(b"e" * 10_000), place)
        file.write(tensor_of(b"e" * 100), 70_000)
        deadline_s = time.monotonic() + 2  # the kernel itself begins after five
        while dirty_page_count(path) > 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def read_through_the_page_cache(path: Path) -> None:
    """Read a file as `cp` does, so that the kernel caches it in large folios; now and then it is to forget them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while os.read(fd, 1 << 17):
            pass
        if random.random() < 0.3:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def write_own_bytes(path: Path, engine: str, number: int, count: int, seconds: float, data: bytes) -> None:
    """Write random parts of every `count`-th range of a file again and again; check that nobody undoes them."""
    rng = random.Random(number)
    cuts_of = random.Random(99)
    cuts = sorted({0, len(data), *(cuts_of.randrange(len(data)) for _ in range(12))})
    own = list(itertools.pairwise(cuts))[number::count]
    want = {place: bytearray(data[place[0] : place[1]]) for place in own}
    deadline_s = time.monotonic() + seconds
    with fp.TensorFile(path, "r+", engine=engine, chunk_bytes=rng.choice([4096, 16_384, 1 << 20])) as file:
        while time.monotonic() < deadline_s:
            items = []
            for start, end in rng.sample(own, min(3, len(own))):
                size = rng.randint(1, end - start)
                offset = rng.randint(0, end - start - size)
                some = rng.randbytes(size)
                want[start, end][offset : offset + size] = some
                items.append((tensor_of(some), start + offset))
            file.write_list(items)
            if rng.random() < 0.3:
                file.sync()  # the kernel's alarm that cached and direct bytes have collided is an EIO here
            for start, end in rng.sample(own, min(2, len(own))):
                read = tensor_of(bytes(end - start))
                file.read(read, start)
                assert bytes_of(read) == want[start, end], "direct"
                with path.open("rb", buffering=0) as cached:
                    cached.seek(start)
                    assert cached.read(end - start) == want[start, end], "cached"
        for start, end in own:
            read = tensor_of(bytes(end - start))
            file.read(read, start)
            assert bytes_of(read) == want[start, end], "at the end"


@pytest.mark.slow  # processes write beside each other for a while
@pytest.mark.parametrize("engine", DIRECT)
@pytest.mark.parametrize("size", [20_000, 1 << 18])
def test_processes_that_write_neighbouring_bytes_lose_none_while_others_read(
    engine: str, size: int, path: Path
) -> None:
    skip_without(engine, path.parent)
    data = pattern(size)
    path.write_bytes(data)

    def writer(number: int) -> Callable[[Report], None]:
        return lambda report: write_own_bytes(path, engine, number, 3, 2.0, data)

    def read_all(report: Report) -> None:
        while True:
            read_through_the_page_cache(path)

    with Child(read_all), Child(read_all), Child(writer(1)) as first, Child(writer(2)) as second:
        write_own_bytes(path, engine, 0, 3, 2.0, data)
        for child in (first, second):
            ending = child.wait()
            assert ending.verdict == "passed", ending.message


@pytest.mark.parametrize("engine", DIRECT)
def test_threads_that_write_neighbouring_bytes_through_one_file_or_two_lose_none(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    data = pattern(30_000)
    path.write_bytes(data)
    stop = threading.Event()

    def read_all() -> None:
        while not stop.is_set():
            read_through_the_page_cache(path)

    with ThreadPoolExecutor(4) as pool:
        reading = pool.submit(read_all)
        writing = [pool.submit(write_own_bytes, path, engine, number, 3, 1.5, data) for number in range(3)]
        for future in writing:
            future.result()
        stop.set()
        reading.result()


@pytest.mark.parametrize("engine", DIRECT)
def test_neighbours_that_let_the_file_grow_lose_none(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    path.write_bytes(b"")
    data = pattern(600_000)
    cuts = sorted({0, len(data), *(random.Random(5).randrange(len(data)) for _ in range(150))})
    ranges = list(itertools.pairwise(cuts))

    def writer(number: int) -> Callable[[Report], None]:
        def write(report: Report) -> None:
            with fp.TensorFile(path, "r+", engine=engine, chunk_bytes=16_384) as file:
                for start, end in ranges[number::2]:
                    file.write_async(tensor_of(data[start:end]), start)
                    read_through_the_page_cache(path)
                    if start % 7 == 0:
                        file.sync()
                file.sync()

        return write

    with Child(writer(0)) as first, Child(writer(1)) as second:
        for child in (first, second):
            ending = child.wait()
            assert ending.verdict == "passed", ending.message
    assert path.read_bytes() == data
