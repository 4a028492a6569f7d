"""What callers of a `TensorFile` give it, looked at: which memory, how many bytes, at which offset.

Whether a tensor's bytes can be had at all, `tensor_memory` knows; this is the quick way for ten thousand rows.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from fastpersist.errors import ConfigError
from fastpersist.tensor_memory import byte_view

__all__ = ["SLICE_COUNT", "Item", "Part", "checked_offset", "in_slices", "looked_at"]

SLICE_COUNT = 1024
"""Of a list that is read, so many are under way while the next are looked at."""

Item: TypeAlias = "tuple[torch.Tensor, int]"
"""A tensor and where its bytes are in the file."""

Part: TypeAlias = "tuple[int, int, int]"
"""Address, bytes, offset in the file."""


def checked_offset(value: int, what: str) -> int:
    """Return a number of bytes as an int.

    Raises:
        ConfigError: It is none; `what` names it.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{what} is {value!r}; it must be a whole number of bytes") from None
    if not 0 <= number < 1 << 63:
        raise ConfigError(f"{what} is {number}; it must be a number of bytes from 0 to 2**63 - 1")
    return number


def in_slices(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield `SLICE_COUNT` items at a time."""
    try:
        rest = iter(items)
    except TypeError:
        raise ConfigError(f"items is {items!r}; it must be a list of pairs of a tensor and an offset") from None
    while some := list(itertools.islice(rest, SLICE_COUNT)):
        yield some


def looked_at(items: Sequence[Item], before_count: int) -> tuple[list[torch.Tensor], list[Part], list[Item]]:
    """Check items of a request, before which there were others.

    Returns:
        All tensors; the parts of those in host memory; those that are elsewhere, and their offsets.
    """
    tensors: list[torch.Tensor] = []
    parts: list[Part] = []
    elsewhere: list[Item] = []
    for item in items:
        try:
            if isinstance(item, torch.Tensor):  # which can be unpacked, too
                raise TypeError
            tensor, offset_bytes = item
        except (TypeError, ValueError):
            raise ConfigError(
                f"item {before_count + len(tensors)} is {item!r}; it must be a tensor and an offset"
            ) from None
        if type(offset_bytes) is not int or not 0 <= offset_bytes < 1 << 63:
            offset_bytes = checked_offset(offset_bytes, "the offset")
        view = tensor if _is_plain(tensor) else byte_view(tensor)
        size_bytes = view.nbytes
        if size_bytes > (1 << 63) - 1 - offset_bytes:
            raise ConfigError(f"{size_bytes} bytes at offset {offset_bytes} end behind any file")
        tensors.append(tensor)
        if view.is_cpu:
            parts.append((view.data_ptr(), size_bytes, offset_bytes))
        else:
            elsewhere.append((tensor, offset_bytes))
    return tensors, parts, elsewhere


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether byte_view would take it, if that can be told in less than a microsecond; it takes ten times that."""
    if type(tensor) not in _PLAIN:
        return False
    try:
        return (
            tensor.is_cpu
            and tensor.dtype in _PLAIN_DTYPES
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.data_ptr() != 0
            and tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        )
    except (RuntimeError, NotImplementedError):  # inside a transformation of torch.func, for one
        return False


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_DTYPES = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
