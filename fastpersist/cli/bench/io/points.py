"""The parameters of `bench io`, varied (points) and fixed (setup). It does no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastpersist.cli.bench.rows import Sample

__all__ = [
    "Device",
    "Direction",
    "IoSample",
    "Memory",
    "Point",
    "Setup",
    "chunk_bytes_for",
    "file_paths",
    "fio_engine",
    "is_block",
    "thread_count_for",
]

Direction = Literal["read", "write"]
Memory = Literal["locked", "plain"]
Device = Literal["cpu", "cuda"]

_SECTOR_BYTES = 512  # no device takes direct requests of less
_PAGE_BYTES = 4096

_CHUNK_BYTES_MIN = 1 << 12
_CHUNK_BYTES_MAX = 1 << 30
_THREADS_MAX = 16

# fio's engines that make the same system calls. psync makes one at a time, so as many jobs as we have threads share the
# file. Not posixaio: glibc serves one file by one thread, whatever the depth.
_FIO_ENGINES = {"uring": "io_uring", "libaio": "libaio", "threads": "psync"}


@dataclass(frozen=True, slots=True)
class Setup:
    """What all rows of a run share.

    Attributes:
        size_bytes: The size of each process's memory, and of its file.
        process_count: Processes, each with a file of its own.
        thread_count: Threads of the threads engines; None for the number that TensorFile takes.
        random: Blocks in shuffled order, instead of one after the other.
        one_by_one: The next block is asked for when the last one is done, instead of all in one list.
        in_place: Overwrite an existing file, instead of writing a fresh one.
        validate: Compare the file with the memory after each run.
        memory: The kind of memory for host tensors; it has no effect where `device` is another.
        device: Where the tensors are.
    """

    size_bytes: int
    process_count: int = 1
    thread_count: int | None = None
    random: bool = False
    one_by_one: bool = False
    in_place: bool = False
    validate: bool = False
    memory: Memory = "plain"
    device: Device = "cpu"


@dataclass(frozen=True, slots=True)
class Point:
    """What distinguishes the rows of a run.

    Attributes:
        direction: Read or write, as seen from the memory.
        engine: The name of an engine; "auto" only until it is known which engine that is.
        block_bytes: The size of each tensor that is read or written.
        depth: Requests in flight.
    """

    direction: Direction
    engine: str
    block_bytes: int
    depth: int

    def block_count(self, setup: Setup) -> int:
        """Return how many whole blocks the memory of a process has."""
        return setup.size_bytes // self.block_bytes

    def words(self, setup: Setup) -> str:
        """Say what is done: "read", "random write", "write in place"."""
        shuffled = "random " if setup.random else ""
        place = " in place" if self.direction == "write" and setup.in_place else ""
        return f"{shuffled}{self.direction}{place}"


@dataclass(frozen=True, slots=True)
class IoSample(Sample):
    """One run of one row.

    Attributes:
        io_count: Blocks that were asked for.
        cpu_s: Processor time, in user space and in the kernel; None where it is not known.
        p99_s: For requests that are waited for one after the other: 99 % of them take at most this long.
    """

    io_count: int = 0
    cpu_s: float | None = None
    p99_s: float | None = None


def is_block(block_bytes: int) -> bool:
    """Tell whether blocks of this size are aligned for direct requests: whole pages, or sectors that divide a page."""
    return block_bytes >= _SECTOR_BYTES and not (block_bytes % _PAGE_BYTES and _PAGE_BYTES % block_bytes)


def chunk_bytes_for(block_bytes: int) -> int:
    """Return the chunk with which a block is one request to the kernel: a power of two, of at least 4 KiB."""
    chunk_bytes = 1 << max(block_bytes - 1, 1).bit_length()
    return min(max(chunk_bytes, _CHUNK_BYTES_MIN), _CHUNK_BYTES_MAX)


def thread_count_for(point: Point, setup: Setup) -> int:
    """Return how many threads the threads engines have."""
    return setup.thread_count or min(point.depth, _THREADS_MAX)


def fio_engine(engine: str) -> tuple[str, bool] | None:
    """Return fio's engine with the same system calls, and whether it passes by the page cache; None: it has none."""
    base, _, kind = engine.partition("-")
    name = _FIO_ENGINES.get(base)
    return None if name is None or kind not in ("", "buffered") else (name, kind == "")


def file_paths(path: str, process_count: int) -> list[str]:
    """Return the files of the processes: `path` itself for a single one."""
    return [path] if process_count == 1 else [f"{path}.{index}" for index in range(process_count)]
