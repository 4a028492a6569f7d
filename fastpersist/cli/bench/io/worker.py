"""The processes that run TensorFile's rows: each has memory and a file of its own, and all of them start at one time.

They are processes of their own also when there is one only: the processor time of a run is then that of TensorFile, its
threads included, and of nothing else. The parent goes through a run in steps: "arm" (make the list of requests), "go"
(what the clock sees), "check"; each is done when all processes have answered.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastpersist import TensorFile, locked_tensor
from fastpersist.cli.bench.io.points import IoSample, Point, Setup, chunk_bytes_for, file_paths, thread_count_for
from fastpersist.cli.child_process import ConnectedProcess, connection_to_parent
from fastpersist.commit.filesystem import storage_errors
from fastpersist.errors import CorruptionError, FastPersistError, InternalError, StorageError, UnsupportedError

__all__ = ["IoProcesses", "Requests", "Timing", "main"]

_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """What a process says of its part of a run; the times are of the clock that all processes share.

    Attributes:
        start_s: The time before the file was opened.
        end_s: The time when all bytes were in memory (reads) or synced (writes).
        cpu_s: Processor time of all threads of the process.
        moved_bytes: Bytes of the tensors that were read or written.
        io_count: How many tensors were read or written.
        engine: The one in use.
    """

    start_s: float
    end_s: float
    cpu_s: float
    moved_bytes: int
    io_count: int
    engine: str


class Requests:
    """The memory of one process, and what it reads and writes with it.

    Args:
        setup: What all rows share.
        seed: The seed of the random numbers in the memory, and of the shuffled order.

    Raises:
        StorageError: The memory cannot be locked.
    """

    def __init__(self, setup: Setup, seed: int) -> None:
        self._setup = setup
        self._seed = seed
        self._memory = _memory(setup)
        generator = torch.Generator(self._memory.device).manual_seed(seed)
        # Every page is touched here, not in the first run; eight bytes at a time, for it is a gigabyte.
        self._memory.view(torch.int64).random_(generator=generator)
        self._point: Point | None = None
        self._path = ""
        self._order = torch.empty(0, dtype=torch.int64)
        self._requests: list[tuple[torch.Tensor, int]] = []

    def lay_out(self, path: str) -> None:
        """Write the memory to a file, by plain writes, and sync it: what the reads will find."""
        with storage_errors("writing", path), open(path, "wb", buffering=0) as file:
            for low in range(0, self._memory.numel(), _COPY_BYTES):
                rest = _bytes_of(self._memory[low : low + _COPY_BYTES].cpu())
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def arm(self, point: Point, path: str) -> None:
        """Make the list of requests, and the memory such that `check` would notice that nothing was moved."""
        self._path = path
        if self._point is None or self._point.block_bytes != point.block_bytes:
            count = point.block_count(self._setup)
            shuffled = torch.Generator().manual_seed(self._seed)
            self._order = torch.randperm(count, generator=shuffled) if self._setup.random else torch.arange(count)
            rows = self._memory[: count * point.block_bytes].view(count, point.block_bytes).unbind(0)
            offsets: list[int] = (self._order * point.block_bytes).tolist()
            self._requests = list(zip(rows, offsets, strict=True))
        self._point = point
        if self._setup.validate and point.direction == "read":
            self._memory.zero_()
        elif self._setup.validate and self._setup.in_place:
            self._memory.add_(1)
        self._wait_for_device()
        gc.collect()  # what the list has left; not in `go`, where it would hold back some processes more than others

    def go(self) -> Timing:
        """Read or write the file once."""
        point, setup = self._armed(), self._setup
        gc.disable()
        try:
            start_s, start_cpu_s = time.monotonic(), time.process_time()
            with self._open(point) as file:
                if point.direction == "write" and not setup.in_place:
                    file.allocate(point.block_count(setup) * point.block_bytes)
                moved_bytes = self._move(file, point)
                if point.direction == "write":
                    file.sync()
                self._wait_for_device()
                end_s, end_cpu_s = time.monotonic(), time.process_time()
                engine = file.engine
        finally:
            gc.enable()
        wanted_bytes = point.block_count(setup) * point.block_bytes
        if moved_bytes != wanted_bytes:
            raise StorageError(None, f"TensorFile moved {moved_bytes} bytes instead of {wanted_bytes}", self._path)
        return Timing(start_s, end_s, end_cpu_s - start_cpu_s, moved_bytes, len(self._requests), engine)

    def check(self) -> None:
        """Compare the file, by plain reads, with the memory.

        Raises:
            CorruptionError: A block is not the same in both.
        """
        block_bytes = self._armed().block_bytes
        row_of_block = torch.argsort(self._order)
        rows = self._memory[: row_of_block.numel() * block_bytes].view(-1, block_bytes)
        step = max(1, _COPY_BYTES // block_bytes)
        with storage_errors("reading", self._path), open(self._path, "rb", buffering=0) as file:
            for low in range(0, row_of_block.numel(), step):
                wanted = row_of_block[low : low + step].to(rows.device)
                in_memory = rows.index_select(0, wanted).cpu()
                in_file = torch.zeros_like(in_memory)
                rest = _bytes_of(in_file)
                while rest and (count := file.readinto(rest)):
                    rest = rest[count:]
                different = (in_memory != in_file).any(1).nonzero()
                if different.numel():
                    offset_bytes = (low + int(different[0])) * block_bytes
                    verb = "read" if self._armed().direction == "read" else "written"
                    raise CorruptionError(
                        f"the block of {block_bytes} bytes is not what was {verb}",
                        path=self._path,
                        offset_bytes=offset_bytes,
                    )

    def _armed(self) -> Point:
        if self._point is None:
            raise InternalError("a run before its requests were made")
        return self._point

    def _open(self, point: Point) -> TensorFile:
        mode = "r" if point.direction == "read" else "r+" if self._setup.in_place else "x"
        threads = thread_count_for(point, self._setup) if point.engine.startswith("threads") else None
        return TensorFile(
            self._path,
            mode,
            engine=point.engine,
            queue_depth=point.depth,
            chunk_bytes=chunk_bytes_for(point.block_bytes),
            threads=threads,
        )

    def _move(self, file: TensorFile, point: Point) -> int:
        if self._setup.one_by_one:
            one = file.read if point.direction == "read" else file.write
            return sum(one(tensor, offset_bytes) for tensor, offset_bytes in self._requests)
        many = file.read_list if point.direction == "read" else file.write_list
        return many(self._requests)

    def _wait_for_device(self) -> None:
        if self._memory.is_cuda:
            torch.cuda.synchronize()


def _memory(setup: Setup) -> torch.Tensor:
    if setup.device != "cpu":
        return torch.empty(setup.size_bytes, dtype=torch.uint8, device=setup.device)
    if setup.memory == "locked":
        return locked_tensor((setup.size_bytes,), torch.uint8)
    return torch.empty(setup.size_bytes, dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a host tensor, which must stay alive."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# --- the parent's end ---


class IoProcesses(contextlib.AbstractContextManager["IoProcesses"]):
    """The processes: a context manager; they end with it. One owner thread.

    Args:
        setup: What all rows share; it says how many processes there are.

    Raises:
        StorageError: Their memory cannot be locked.
        UnsupportedError: One of them could not start.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._ends: list[ConnectedProcess] = []
        try:
            for seed in range(setup.process_count):
                self._ends.append(ConnectedProcess("fastpersist.cli.bench.io.worker"))
                self._ends[-1].connection.send((setup, seed))
            self._receive()
        except BaseException:
            self.end()
            raise

    def lay_out(self, path: str) -> None:
        """Have each write the file that it will read or write over."""
        self._call("lay_out", [(one,) for one in self._paths(path)])

    def run(self, point: Point, path: str) -> IoSample:
        """Run a row once, all processes at the same time.

        Returns:
            The seconds from the first start to the last end, and what all of them moved and spent.

        Raises:
            CorruptionError: File and memory differ.
            FastPersistError: What TensorFile raised in one of them.
            UnsupportedError: One of them has died.
        """
        self._call("arm", [(point, one) for one in self._paths(path)])
        timings: list[Timing] = self._call("go", [()] * len(self._ends))
        if self._setup.validate:
            self._call("check", [()] * len(self._ends))
        return together(timings)

    def _paths(self, path: str) -> list[str]:
        return file_paths(path, self._setup.process_count)

    def _call(self, step: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        for end, words in zip(self._ends, arguments, strict=True):
            try:
                end.connection.send((step, words))
            except ConnectionError:
                raise _dead(end) from None
        return self._receive()

    def _receive(self) -> list[Any]:
        """Wait for all, so that none is still at it when the next step comes; raise what the first one raised."""
        answers: list[Any] = []
        for end in self._ends:
            try:
                answers.append(end.connection.recv())
            except (EOFError, ConnectionError):
                answers.append(_dead(end))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def end(self) -> None:
        """End the processes and wait for them."""
        for end in self._ends:
            end.end()
        self._ends = []

    def __exit__(self, *_: object) -> None:
        self.end()


def together(timings: Sequence[Timing]) -> IoSample:
    """Return what processes did together: from the first start to the last end."""
    return IoSample(
        seconds=max(timing.end_s for timing in timings) - min(timing.start_s for timing in timings),
        size_bytes=sum(timing.moved_bytes for timing in timings),
        engine=timings[0].engine,
        io_count=sum(timing.io_count for timing in timings),
        cpu_s=sum(timing.cpu_s for timing in timings),
    )


def _dead(process: ConnectedProcess) -> UnsupportedError:
    return UnsupportedError(f"a process that reads and writes has ended (exit status {process.wait()})")


# --- the process ---


def main(descriptor: int) -> None:
    """Serve the parent at the other end of a connection until it closes it.

    Args:
        descriptor: The file descriptor of this process's end.
    """
    torch.set_num_threads(1)
    with connection_to_parent(descriptor) as connection:
        setup, seed = connection.recv()
        try:
            requests = Requests(setup, seed)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            connection.send(_as_sent(error))
            return
        connection.send(None)
        steps: dict[str, Callable[..., Any]] = {
            "lay_out": requests.lay_out,
            "arm": requests.arm,
            "go": requests.go,
            "check": requests.check,
        }
        while True:
            step, words = connection.recv()
            try:
                answer: Any = steps[step](*words)
            except Exception as error:  # noqa: BLE001 - it is the row's result
                answer = _as_sent(error)
            connection.send(answer)


def _as_sent(error: Exception) -> Exception:
    """Return an error that the parent can raise: this one if it is ours and can be pickled, else one with its text."""
    if isinstance(error, FastPersistError):
        with contextlib.suppress(Exception):  # whatever its class does wrong
            pickle.loads(pickle.dumps(error))
            return error
    return UnsupportedError(f"{type(error).__name__}: {error}")
