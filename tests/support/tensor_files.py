"""What the tests of TensorFile share: the engines, bytes that differ everywhere, tensors at odd addresses, faults."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import fastpersist as fp
from fastpersist import _native

ENGINES = ("auto", "uring", "libaio", "threads", "threads-buffered")
"""They differ in what is direct, and in how the kernel completes. The buffered others are like the last."""

PAGE_BYTES = 4096
ROW_BYTES = 1000
EVERY = 2**64 - 1


@functools.lru_cache
def _why_not(engine: str, directory: Path) -> str:
    return next(probe.why_not for probe in fp.engines(directory) if probe.name == engine)


def skip_without(engine: str, directory: Path) -> None:
    """Skip the test where an engine does not work."""
    name = engine.removeprefix("fault:")
    if name != "auto" and (why_not := _why_not(name, directory)):
        pytest.skip(f"{name}: {why_not}")


def pattern(size_bytes: int, seed: int = 1) -> bytes:
    """Bytes of which no two blocks are alike."""
    return random.Random(seed).randbytes(size_bytes)


def tensor_of(data: bytes, *, shifted_bytes: int = 0) -> torch.Tensor:
    """A uint8 tensor that holds `data`, `shifted_bytes` behind the start of a page."""
    memory = torch.zeros(len(data) + 2 * PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_BYTES + shifted_bytes
    tensor = memory[start : start + len(data)]
    if data:
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    return bytes(fp.byte_view(tensor).numpy())


@contextlib.contextmanager
def faults(
    *,
    op: str = "any",
    nth: int = 1,
    count: int = 1,
    kind: str = "errno",
    sys_errno: int = 5,
    short_bytes: int = 512,
    delay_ms: int = 0,
) -> Iterator[None]:
    """Let requests of the engines named "fault:<engine>" be hit while the block runs."""
    _native.set_fault_plan(
        _native.FaultPlan(
            op=op,
            nth=nth,
            count=count,
            kind=kind,
            sys_errno=sys_errno,
            short_bytes=short_bytes,
            delay_ms=delay_ms,
        )
    )
    try:
        yield
    finally:
        _native.clear_fault_plan()


@contextlib.contextmanager
def slow(delay_ms: int, op: str = "any") -> Iterator[None]:
    """Let every request of the engines named "fault:<engine>" take so long."""
    with faults(op=op, kind="delay", count=EVERY, delay_ms=delay_ms):
        yield


class Rows(Dataset[torch.Tensor]):
    """Rows of a file, each read when it is asked for. Here, where spawned workers find it."""

    def __init__(self, file: fp.TensorFile, count: int) -> None:
        self._file = file
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> torch.Tensor:
        read = torch.zeros(ROW_BYTES, dtype=torch.uint8)
        self._file.read(read, row * ROW_BYTES)
        return read

    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        read = torch.zeros(len(rows), ROW_BYTES, dtype=torch.uint8)
        self._file.read_list((read[at], row * ROW_BYTES) for at, row in enumerate(rows))
        return list(read)
