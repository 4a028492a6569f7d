"""What gathers rows in `bench rows`: fio as the limit, `fp.RowStore`, and what people do without it.

Element j of row i has the value i × width + j, so every gather is checked, outside its time.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import fastpersist
from fastpersist.cli.bench.fio import FioJob, fio_row, run_fio
from fastpersist.cli.bench.io.points import IoSample
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.rows import Kind, Row
from fastpersist.errors import CorruptionError

__all__ = ["FEW_COUNT", "Case", "Table", "cold_rows", "device_rows", "few_rows", "has_lmdb", "hit_rows", "write_table"]

_THREAD_COUNT = 16
FEW_COUNT = 48
"""Rows of a small request, as of a language model's n-gram tables."""

_GROUP_COUNT = 256
_BLOCK_BYTES = 4096
_GRAPHBOLT = f"GraphBolt's reader, a replica: {_BLOCK_BYTES} bytes for each id, {_GROUP_COUNT} at a time"

_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Table:
    """A table on disk: raw int32, rows of `row_bytes`."""

    path: str
    row_bytes: int
    row_count: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.row_bytes // 4

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the first element of each of these rows, which wraps around."""
        return (ids * self.width).to(torch.int32)


@dataclass(frozen=True, slots=True)
class Case:
    """One table of results.

    Attributes:
        table: The table that is read.
        count: Rows in each sample.
        depth: Reads in flight at once.
    """

    table: Table
    count: int
    depth: int

    def ids(self) -> torch.Tensor:
        """Draw ids, uniform; each call others, but the same ones in each run of the command."""
        _draws[self] = _draws.get(self, 0) + 1
        return torch.randint(self.table.row_count, (self.count,), generator=torch.Generator().manual_seed(_draws[self]))


_draws: dict[Case, int] = {}


def write_table(path: str, row_bytes: int, size_bytes: int) -> Table:
    """Write a table and make it durable."""
    table = Table(path, row_bytes, size_bytes // row_bytes)
    row_count = max(1, _CHUNK_BYTES // row_bytes)
    with open(path, "wb") as file:
        for first in range(0, table.row_count, row_count):
            end = min(first + row_count, table.row_count)
            torch.arange(first * table.width, end * table.width).to(torch.int32).numpy().tofile(file)
        file.flush()
        os.fsync(file.fileno())
    return table


# ------------------------------------------------------------------------------------------------------- rows


def cold_rows(case: Case) -> list[Row]:
    """Return the ways to gather from a table that is not in memory."""

    def fio(name: str, *, tuned: bool) -> Row:
        job = FioJob(
            "read",
            case.table.row_count * case.table.row_bytes,
            block_bytes=case.table.row_bytes,
            depth=case.depth,
            random=True,
            io_count=case.count,
            tuned=tuned,
        )
        return fio_row(name, lambda path: run_fio(job, [path]))

    return [
        fio("fio", tuned=False),
        fio("fio, buffers and files registered, batches", tuned=True),
        _gather_row(case, "fastpersist.RowStore", "fastpersist", _our_gather),
        _gather_row(case, "numpy.memmap", "peer", _memmap_gather(random=False)),
        _gather_row(case, "numpy.memmap, MADV_RANDOM", "peer", _memmap_gather(random=True)),
        _gather_row(case, f"pread by {_THREAD_COUNT} threads", "peer", _pread_gather),
        _graphbolt_row(case),
        _lmdb_row(case),
    ]


def hit_rows(case: Case) -> list[Row]:
    """Return the ways to gather from memory: from the cache of a store, and from a tensor."""
    store, tensor = _held(case)

    def ours(_case: Case, _path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        return _timed(lambda: store().gather(ids), store())

    def in_memory(_case: Case, _path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        return _timed(lambda: tensor().index_select(0, ids), tensor())

    return [
        _gather_row(case, "torch.index_select in memory", "ceiling", in_memory),
        _gather_row(case, "fastpersist.RowStore, all cached", "fastpersist", ours),
    ]


def device_rows(case: Case, device: torch.device) -> list[Row]:
    """Return the ways to gather from memory to a CUDA device."""
    store, tensor = _held(case)
    pinned = cache(lambda: torch.empty((case.count, case.table.width), dtype=torch.int32, pin_memory=True))

    def on_device(gather: Callable[[torch.Tensor], torch.Tensor]) -> Gather:
        def run(ids: torch.Tensor) -> torch.Tensor:
            rows = gather(ids).to(device, non_blocking=True)
            torch.cuda.synchronize(device)
            return rows

        def timed(_case: Case, _path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
            run(ids)  # pins, allocates and loads at its first use what it needs
            _wake(device)
            return _timed(lambda: run(ids), store())

        return timed

    def copied(case: Case, _path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        torch.index_select(tensor(), 0, ids, out=pinned())
        return on_device(lambda _ids: pinned())(case, _path, ids)

    @cache
    def kept() -> fastpersist.RowStore:
        opened = _opened(case, cache_bytes=0)
        opened.keep(torch.arange(case.table.row_count), device=device)
        return opened

    return [
        _gather_row(case, "copy of rows in pinned memory", "ceiling", copied),
        _gather_row(
            case, "fastpersist.RowStore, all cached", "fastpersist",
            on_device(lambda ids: store().gather(ids, device=device)),
        ),
        _gather_row(
            case, "fastpersist.RowStore, all kept on the device", "fastpersist",
            on_device(lambda ids: kept().gather(ids, device=device)),
        ),
        _gather_row(
            case, "torch.index_select into pinned memory, copied", "peer",
            on_device(lambda ids: torch.index_select(tensor(), 0, ids, out=pinned()[: len(ids)])),
        ),
        _gather_row(
            case, "torch.index_select, copied", "peer", on_device(lambda ids: tensor().index_select(0, ids)),
        ),
    ]  # fmt: skip


def _wake(device: torch.device) -> None:
    """Let a device compute for a while, as it does in training: one that was idle has a slow clock at first."""
    matrix = torch.full((2048, 2048), 1 / 2048, device=device)
    end_s = time.perf_counter() + 0.05
    while time.perf_counter() < end_s:
        matrix = matrix @ matrix
        torch.cuda.synchronize(device)


def _held(case: Case) -> tuple[Callable[[], fastpersist.RowStore], Callable[[], torch.Tensor]]:
    """Return what gives a store that has all rows in its cache, and a tensor of all rows; made at their first use."""

    @cache
    def store() -> fastpersist.RowStore:
        opened = _opened(case, cache_bytes=3 * case.table.row_count * case.table.row_bytes)
        for some in torch.arange(case.table.row_count).split(max(1, _CHUNK_BYTES // case.table.row_bytes)):
            opened.gather(some)
        return opened

    return store, cache(lambda: store().gather(torch.arange(case.table.row_count)))


def few_rows(case: Case) -> list[Row]:
    """Return the ways to answer small requests, one after the other, from a table that is not in memory."""

    def fio(name: str, *, in_turns: bool) -> Row:
        job = FioJob(
            "read",
            case.table.row_count * case.table.row_bytes // 4096 * 4096,
            block_bytes=4096 if case.table.row_bytes % 512 else case.table.row_bytes,
            depth=FEW_COUNT,
            random=True,
            io_count=case.count,
            in_turns=in_turns,
        )
        return fio_row(name, lambda path: run_fio(job, [path]))

    return [
        fio(f"fio, always {FEW_COUNT} in flight", in_turns=False),
        fio(f"fio, {FEW_COUNT} at a time, waiting for all", in_turns=True),
        _gather_row(case, "fastpersist.RowStore", "fastpersist", _in_requests(_our_few)),
        _gather_row(case, "numpy.memmap, MADV_RANDOM", "peer", _in_requests(_memmap_few)),
    ]


Gather = Callable[[Case, str, torch.Tensor], tuple[torch.Tensor, list[float]]]
"""Returns the rows, and the seconds that each request took from its call on."""


def _gather_row(case: Case, name: str, kind: Kind, gather: Gather) -> Row:
    def run(path: str) -> IoSample:
        ids = case.ids()
        before_s = _cpu_s()
        rows, times_s = gather(case, path, ids)
        cpu_s = _cpu_s() - before_s
        if not torch.equal(rows.view(case.count, -1)[:, 0].cpu(), case.table.expected(ids)):
            raise CorruptionError(f"{name} returned other rows than those that were asked for")
        p99_s = sorted(times_s)[len(times_s) * 99 // 100] if len(times_s) > 1 else None
        # Of many requests, as if each took the median.
        seconds = statistics.median(times_s) * len(times_s)
        return IoSample(seconds, case.count * case.table.row_bytes, io_count=case.count, cpu_s=cpu_s, p99_s=p99_s)

    return Row(name, kind, run)


def _timed(gather: Callable[[], torch.Tensor], _ready: object) -> tuple[torch.Tensor, list[float]]:
    """Run it; what is made at its first use is ready, since the caller has named it."""
    start = time.perf_counter()
    rows = gather()
    return rows, [time.perf_counter() - start]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# ------------------------------------------------------------------------------------------------------- ways


def _opened(case: Case, cache_bytes: int = 0) -> fastpersist.RowStore:
    table = case.table
    shape = (table.row_count, table.width)
    return fastpersist.RowStore(
        table.path, shape=shape, dtype=torch.int32, cache_bytes=cache_bytes, queue_depth=case.depth
    )


def _our_gather(case: Case, _path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    with _opened(case) as store:
        return _timed(lambda: store.gather(ids), store)


def _mapped(case: Case, path: str, *, random: bool) -> torch.Tensor:
    """Map the table; elements of numpy's memmap and of this are read by the same page faults."""
    size_bytes = case.table.row_count * case.table.row_bytes
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    if random:
        mapped.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(mapped, dtype=torch.int32).view(case.table.row_count, -1)


def _memmap_gather(*, random: bool) -> Gather:
    def gather(case: Case, path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        array = _mapped(case, path, random=random).numpy()
        places = ids.numpy()
        return _timed(lambda: torch.from_numpy(array[places]), array)

    return gather


def _pread_gather(case: Case, path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    rows = torch.empty(case.count, case.table.width, dtype=torch.int32)
    view = memoryview(rows.numpy().data).cast("B")
    row_bytes = case.table.row_bytes
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(first: int) -> None:
        for index in range(first, case.count, _THREAD_COUNT):
            os.preadv(fd, [view[index * row_bytes : (index + 1) * row_bytes]], places[index] * row_bytes)

    try:
        places = ids.tolist()
        with ThreadPoolExecutor(_THREAD_COUNT) as pool:
            return _timed(lambda: (list(pool.map(read, range(_THREAD_COUNT))), rows)[1], pool)
    finally:
        os.close(fd)


def _graphbolt_row(case: Case) -> Row:
    if _BLOCK_BYTES % case.table.row_bytes and case.table.row_bytes % _BLOCK_BYTES:
        return Row(_GRAPHBOLT, "peer", None, why_not="rows of this length lie across blocks")
    return _gather_row(case, _GRAPHBOLT, "peer", _graphbolt_gather)


def _graphbolt_gather(case: Case, path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Read as GraphBolt's DiskBasedFeature does: a block for each id, and a wait for all reads of a group.

    Source: DGL, graphbolt/src/cnumpy.cc. DGL 2.1 does not run with the torch that fastpersist needs.
    """
    row_bytes, rows = case.table.row_bytes, torch.empty(case.count, case.table.width, dtype=torch.int32)
    blocks_bytes = max(_BLOCK_BYTES, row_bytes)
    memory = fastpersist.locked_tensor((_GROUP_COUNT * blocks_bytes,), torch.uint8)
    blocks = memory.view(_GROUP_COUNT, -1).unbind()
    held = memory.view(torch.int32).view(-1, case.table.width)

    def gather(file: fastpersist.TensorFile) -> torch.Tensor:
        for first in range(0, case.count, _GROUP_COUNT):
            starts = ids[first : first + _GROUP_COUNT] * row_bytes
            aligned = starts // blocks_bytes * blocks_bytes
            file.read_list(zip(blocks, aligned.tolist(), strict=False))
            places = torch.arange(len(starts)) * (blocks_bytes // row_bytes) + (starts - aligned) // row_bytes
            torch.index_select(held, 0, places, out=rows[first : first + _GROUP_COUNT])
        return rows

    with fastpersist.TensorFile(path) as file:
        file.read(blocks[0], 0)
        return _timed(lambda: gather(file), file)


def has_lmdb() -> bool:
    """Tell whether LMDB takes part; its database takes up to twice the bytes of the table."""
    return importlib.util.find_spec("lmdb") is not None


def _lmdb_row(case: Case) -> Row:
    name = "LMDB"
    if not has_lmdb():
        return Row(name, "peer", None, why_not="lmdb is not installed (pip install lmdb)")
    return _gather_row(case, name, "peer", _lmdb_gather)


def _lmdb_gather(case: Case, path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    import lmdb

    database, row_bytes = f"{path}.lmdb", case.table.row_bytes
    if _databases.get(path) != case.table:
        _write_lmdb(database, case.table)
        _databases[path] = case.table
    PageCache(warm=False, whole_machine=False).prepare(database)
    rows = torch.empty(case.count, case.table.width, dtype=torch.int32)
    view = memoryview(rows.numpy().data).cast("B")
    keys = [one.to_bytes(8, "big") for one in ids.tolist()]

    def gather(reader: Any) -> torch.Tensor:
        for index, key in enumerate(keys):
            view[index * row_bytes : (index + 1) * row_bytes] = reader.get(key)
        return rows

    with (
        lmdb.open(database, subdir=False, readonly=True, lock=False, readahead=False) as opened,
        opened.begin(buffers=True) as reader,
    ):
        return _timed(lambda: gather(reader), reader)


_databases: dict[str, Table] = {}
"""What the databases beside tables hold."""


def _write_lmdb(database: str, table: Table) -> None:
    """Write the rows of a table under their numbers, in order, durable."""
    import lmdb

    with suppress(FileNotFoundError):
        os.unlink(database)
    chunk_count = max(1, _CHUNK_BYTES // table.row_bytes)
    # A row of a block takes two pages with its header.
    limit_bytes = table.row_count * (2 * table.row_bytes + 256) + (1 << 24)
    with open(table.path, "rb") as file, lmdb.open(database, map_size=limit_bytes, subdir=False, sync=False) as opened:
        for first in range(0, table.row_count, chunk_count):
            with opened.begin(write=True) as writer, writer.cursor() as cursor:
                last = min(first + chunk_count, table.row_count)
                items = [(number.to_bytes(8, "big"), file.read(table.row_bytes)) for number in range(first, last)]
                cursor.putmulti(items, append=True)
        opened.sync(True)


def _in_requests(opened: Callable[[Case, str], Callable[[torch.Tensor], torch.Tensor]]) -> Gather:
    """Gather a few rows at a time."""

    def gather(case: Case, path: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        one = opened(case, path)
        one(ids[:FEW_COUNT])  # what is made at the first use
        found, times_s = [], []
        for some in ids.split(FEW_COUNT):
            start = time.perf_counter()
            found.append(one(some))
            times_s.append(time.perf_counter() - start)
        return torch.cat(found), times_s

    return gather


def _our_few(case: Case, _path: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return _opened(case).gather


def _memmap_few(case: Case, path: str) -> Callable[[torch.Tensor], torch.Tensor]:
    array = _mapped(case, path, random=True).numpy()
    return lambda ids: torch.from_numpy(array[ids.numpy()])
