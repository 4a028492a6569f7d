"""The code of ranks with a replicated state: they save it to one file, load that, and measure the limits of both.

`ranks.processes` runs the ranks; `ranks.one_file` decides the order, and evaluates the times.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import fastpersist
from fastpersist.cli.bench.ranks.processes import Here, Span
from fastpersist.cli.bench.save_rows import sync_path
from fastpersist.distributed import shared_reader
from fastpersist.transfer.writer import Pieces, Writer

__all__ = [
    "LOAD_WAYS",
    "copy_memory",
    "drop_state",
    "hold_state",
    "load_alone",
    "load_by_torch",
    "load_together",
    "pump_nowhere",
    "save_alone",
    "save_by_torch",
    "save_tiny",
    "save_together",
    "stay_on_cores",
    "write_bare",
]

LOAD_WAYS = ("ahead", "alone")
"""In which several ranks can read a file, says `fastpersist.distributed.shared_reader`, which chooses among them."""

_MIB = 1 << 20
_SEED = 20261
_TENSOR_COUNT_MAX = 64
_CHUNK_BYTES = 8 * _MIB
_CORES = sorted(os.sched_getaffinity(0))
_WARM_UP_COUNT = 2


def hold_state(here: Here, size_bytes: int) -> int:
    """Make the state: random, in tensors of unequal lengths; return its bytes."""
    count = max(1, min(_TENSOR_COUNT_MAX, size_bytes // (2 * _MIB)))
    generator = torch.Generator().manual_seed(_SEED)
    base_count = size_bytes // count // 4
    weights = {
        f"layers.{index}.weight": torch.empty(base_count + 13 * (index - count // 2)).uniform_(generator=generator)
        for index in range(count)
    }
    here.state = {"step": 1, "weights": weights}
    return sum(tensor.nbytes for tensor in weights.values())


def drop_state(here: Here) -> None:
    """Give the state's memory back."""
    here.state = {}


def save_together(here: Here, path: str, count: int) -> tuple[Span, str]:
    """Save the state with the first ranks; return when, and the engine."""
    here.together(count)
    start_s = time.monotonic()
    report = fastpersist.save(here.state, path, process_group=here.groups[count])
    return (start_s, time.monotonic()), report.engine


def save_alone(here: Here, path: str) -> tuple[Span, str]:
    """Save the state without a group; return when, and the engine."""
    start_s = time.monotonic()
    report = fastpersist.save(here.state, path)
    return (start_s, time.monotonic()), report.engine


def save_by_torch(here: Here, path: str) -> tuple[Span, str]:
    """Save the state as scripts do on rank 0, and make file and name durable."""
    start_s = time.monotonic()
    torch.save(here.state, path)
    sync_path(path)
    sync_path(os.path.dirname(path))
    return (start_s, time.monotonic()), ""


def load_together(here: Here, path: str, count: int, way: str = "") -> Span:
    """Load a file with the first ranks, in the way that is chosen; or in one of LOAD_WAYS."""
    shared = shared_reader.SharedReader
    replaced: Any = shared_reader
    replaced.SharedReader = functools.partial(shared, way=way) if way else shared
    try:
        return _timed_load(here, count, lambda: fastpersist.load(path, process_group=here.groups[count]))
    finally:
        replaced.SharedReader = shared


def load_alone(here: Here, path: str, count: int) -> Span:
    """Load a file at the same time as the others of the first ranks, and without them."""
    return _timed_load(here, count, lambda: fastpersist.load(path))


def load_by_torch(here: Here, path: str, count: int) -> Span:
    """Load a file by torch.load at the same time as the others of the first ranks."""
    return _timed_load(here, count, lambda: torch.load(path, weights_only=True))


def _timed_load(here: Here, count: int, load: Callable[[], object]) -> Span:
    here.together(count)
    start_s = time.monotonic()
    loaded = None
    try:
        loaded = load()
        end_s = time.monotonic()
    finally:
        here.together(count)  # no rank frees its object, or goes to another call, while others are still loading
    del loaded
    return start_s, end_s


# --- what agreement costs


def save_tiny(here: Here, root: str, count: int, save_count: int) -> list[tuple[float, float, float]]:
    """Save a state of 4 KiB again and again; return when each began, let training go on, and was published."""
    state = {"step": 0, "weight": torch.zeros(1024)}
    times = []
    group = here.groups[count] if count > 1 else None
    with fastpersist.Checkpointer(root, keep=2, process_group=group) as checkpoints:
        for step in range(_WARM_UP_COUNT + save_count):
            here.together(count)
            start_s = time.monotonic()
            pending = checkpoints.save(step, state)
            returned_s = time.monotonic()
            pending.result()
            times.append((start_s, returned_s, time.monotonic()))
    return times[_WARM_UP_COUNT:]


# --- what limits them


def stay_on_cores(here: Here, one_each: bool) -> None:
    """Keep this rank, its threads included, on a core of its own as far as there are enough; or let it go again."""
    cores = [_CORES[here.rank % len(_CORES)]] if one_each else _CORES
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def _shard_of(here: Here, count: int) -> list[tuple[int, torch.Tensor]]:
    """Return this rank's n-th of the state's tensors, and where each would lie in a file of them all."""
    placed, offset_bytes = [], 0
    for tensor in here.state["weights"].values():
        placed.append((offset_bytes, tensor))
        offset_bytes += tensor.nbytes
    return placed[len(placed) * here.rank // count : len(placed) * (here.rank + 1) // count]


def write_bare(here: Here, path: str, count: int, one_each: bool) -> Span:
    """Write this rank's n-th of the state by bare pwrite into a fresh, preallocated file, or into one of its own."""
    shard = _shard_of(here, count)
    first_bytes = shard[0][0] if one_each and shard else 0
    path += f".{here.rank}" if one_each else ""
    here.together(count)
    start_s = time.monotonic()
    if one_each or here.rank == 0:
        tensors = [tensor for _, tensor in shard] if one_each else here.state["weights"].values()
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, sum(tensor.nbytes for tensor in tensors)))
    here.together(count)
    fd = os.open(path, os.O_WRONLY)
    try:
        for offset_bytes, tensor in shard:
            view = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
            done = 0
            while done < tensor.nbytes:
                done += os.pwrite(fd, view[done : done + _CHUNK_BYTES], offset_bytes - first_bytes + done)
    finally:
        os.close(fd)
    return start_s, time.monotonic()


def pump_nowhere(here: Here, path: str, count: int) -> Span:
    """Write this rank's part with the null engine: the time of a save without the work of the kernel."""
    pieces = Pieces()
    for index, (_, tensor) in enumerate(_shard_of(here, count)):
        pieces.add_storage(tensor.untyped_storage(), index)
    path += f".{here.rank}"
    with open(path, "w+b") as file, Writer(file.fileno(), path, engine="null") as writer:
        here.together(count)
        start_s = time.monotonic()
        writer.append(pieces)
        writer.finish()
        return start_s, time.monotonic()


def copy_memory(here: Here, path: str, count: int) -> Span:
    """Copy this rank's n-th to memory that was touched before."""
    shard = _shard_of(here, count)
    size_bytes = max(1, sum(tensor.nbytes for _, tensor in shard))
    with mmap.mmap(-1, size_bytes) as target:
        target.write(bytes(size_bytes))
        whole = ctypes.c_char.from_buffer(target)
        position = ctypes.addressof(whole)
        here.together(count)
        start_s = time.monotonic()
        for _, tensor in shard:
            ctypes.memmove(position, tensor.data_ptr(), tensor.nbytes)
            position += tensor.nbytes
        end_s = time.monotonic()
        del whole
    return start_s, end_s
