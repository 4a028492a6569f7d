"""Smallest, largest and mean value, norm, NaN and infinities of each tensor, from its pieces."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fastpersist import _native
from fastpersist.contents.pieces import read_pieces
from fastpersist.contents.stored import Stored

__all__ = ["NATIVE_FLOATS", "Statistics", "can_be_widened", "in_parts", "iter_statistics"]

NATIVE_FLOATS = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
"""What the native module calculates with, by its names."""

_PART_COUNT = (1 << 15) - 64
"""Elements that are calculated with at a time: their copies stay in the processor's cache, and torch uses threads from
32,768 on. These would wait for each other at every step, and on a busy machine that takes many times longer."""


@dataclass(slots=True)
class Statistics:
    """What a tensor's values are like. NaN and infinities are counted, and left out of all else.

    Attributes:
        tensor: The tensor that is described.
        finite_count: Elements that are finite.
        nan_count: Elements that are NaN; a complex number counts if either of its parts is NaN.
        inf_count: Elements that are infinite.
        min: The smallest value; None if there are no finite elements, and for complex numbers.
        max: The largest value; None likewise.
        mean: The mean of the values; None likewise.
        norm: The square root of the sum of the squared magnitudes.
    """

    tensor: Stored
    finite_count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    norm: float = 0.0
    _sum: float = 0.0
    _squares: float = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Count more of the tensor's elements."""
        if values.dtype.is_complex:
            values = torch.view_as_real(values).double() if values.dtype is not torch.complex32 else _parts_of(values)
            nan, infinite = values.isnan().any(-1), values.isinf().any(-1)
            self.nan_count += int(nan.sum())
            self.inf_count += int((infinite & ~nan).sum())
            values = values[~(nan | infinite)]
            self.finite_count += len(values)
            self._squares += float(values.square().sum())
            return
        if not values.dtype.is_floating_point:
            doubles = values.double()
            shift = 0
            if values.dtype is torch.uint64:  # torch finds no smallest one; with the other sign bit they are in order
                shift = 1 << 63
                values = values.view(torch.int64) ^ -shift
            values = values.to(torch.int64)
            low, high = values.amin().item() + shift, values.amax().item() + shift
            self._add_finite(len(values), low, high, float(doubles.sum()), float(doubles.square().sum()))
            return
        name = NATIVE_FLOATS.get(values.dtype)
        if name is None:  # of 8 bits
            name, values = "float32", values.float()
        nan_count, inf_count, low, high, total, squares = _native.summarize_values(name, values.data_ptr(), len(values))
        self.nan_count += nan_count
        self.inf_count += inf_count
        self._add_finite(len(values) - nan_count - inf_count, low, high, total, squares)

    def finish(self) -> None:
        """Make mean and norm of what was counted."""
        self.norm = math.sqrt(self._squares)
        if self.finite_count and not self.tensor.dtype.is_complex:
            self.mean = self._sum / self.finite_count

    def _add_finite(self, count: int, low: float, high: float, total: float, squares: float) -> None:
        if not count:
            return
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        self.finite_count += count
        self._sum += total
        self._squares += squares


def _parts_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.float16).double().reshape(-1, 2)


@functools.cache
def can_be_widened(dtype: torch.dtype) -> bool:
    """Tell whether torch converts elements of a dtype to numbers that it can calculate with."""
    if dtype.is_complex:
        return True
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).double()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def in_parts(values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut elements into parts that are small enough to be widened; what need not be stays whole."""
    return [values] if values.dtype in NATIVE_FLOATS else values.split(_PART_COUNT)


def iter_statistics(
    tensors: Sequence[Stored], *, on_read: Callable[[int], object] = lambda size_bytes: None
) -> Iterator[Statistics]:
    """Read tensors and yield what each is like, in the order given.

    Args:
        tensors: The tensors; reading is fastest in the order of their files.
        on_read: Called with the bytes of each batch that was read.

    Raises:
        EndOfFileError, StorageError: See `read_pieces`.

    Thread safety: one thread at a time advances an iterator.
    """
    found = map(Statistics, tensors)
    current, index = next(found, None), 0
    for batch in read_pieces(tensors):
        for piece in batch:
            while current is not None and index < piece.number:
                current.finish()
                yield current
                current, index = next(found, None), index + 1
            if current is not None:
                for values in in_parts(piece.values(current.tensor.dtype)):
                    current.add(values)
        on_read(sum(piece.data.numel() for piece in batch))
    while current is not None:
        current.finish()
        yield current
        current = next(found, None)
