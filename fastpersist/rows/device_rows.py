"""Rows in a CUDA device's memory: rows kept there, so that requests read only the others, and transfers of rows to it.

The device itself gathers cached rows: it reads the cache's pinned memory as fast as the bus allows. A gather on the
host would take many threads, and a copy afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fastpersist import _native
from fastpersist.errors import ConfigError, DeviceError, UnsupportedError
from fastpersist.transfer.cuda import tell_of_gathers, tell_of_pinning, why_not_native

__all__ = [
    "CachedRows",
    "DeviceRows",
    "SentRows",
    "Split",
    "cached_rows",
    "checked_device",
    "kept_on_device",
    "rows_at",
    "send_rows",
]

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_WORD_BYTES_MIN = 4  # as of csrc/device/row_kernel.h
_ROW_BYTES_MIN = 256  # with shorter rows, a device reads too few bytes at a time to be faster than the host
_GATHERED_BYTES_MIN = 1 << 20  # the host gathers fewer bytes faster: a device takes a while to begin
_COUNT_MAX = 2**31 - 1
_AT_ONCE_BYTES = 64 << 20  # of device memory, for rows before they are put into their places


def checked_device(device: torch.device | str | None) -> torch.device | None:
    """Return the CUDA device for the rows, with its number; None if none was given.

    Raises:
        ConfigError: There is no such device.
    """
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r}: {error}") from None
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, and torch finds no CUDA device here")
    if wanted == torch.device("cuda"):  # rows are kept by the device's number
        return torch.device("cuda", torch.cuda.current_device())
    return wanted


class DeviceRows(NamedTuple):
    """Rows on a device, and where each lies.

    Attributes:
        rows: The rows, [count, *row_shape], on the device.
        place_of_row: For each row of the table, its index in `rows`, or -1; int32, on the CPU.
    """

    rows: torch.Tensor
    place_of_row: torch.Tensor

    def split(self, ids: torch.Tensor) -> Split:
        """Divide ids, of one dimension on the CPU, into those of kept rows and the others.

        The tensors that are copied to the device are in pinned memory, so the caller need not wait.
        """
        places = torch.empty(ids.numel(), dtype=torch.int32, device="cpu", pin_memory=True)
        torch.index_select(self.place_of_row, 0, ids, out=places)
        other = (places < 0).nonzero().view(-1)
        return Split(self.rows, places, other.pin_memory(), ids[other])


class Split(NamedTuple):
    """A request for rows, some of which are on the device.

    Attributes:
        rows: The rows that are kept on the device.
        places: For each id of the request, its row's index in `rows`, or -1.
        other: The positions in the request of the ids whose rows are not on the device; int64.
        other_ids: The ids at these positions.
    """

    rows: torch.Tensor
    places: torch.Tensor
    other: torch.Tensor
    other_ids: torch.Tensor

    def joined(self, other_rows: torch.Tensor) -> torch.Tensor:
        """Return all rows of the request on the device, in the caller's current stream.

        Args:
            other_rows: The rows of `other_ids`, in pinned memory.
        """
        device = self.rows.device
        joined = rows_at(self.rows, self.places.to(device, non_blocking=True).clamp_(min=0))
        _fill(joined, self.other, other_rows)
        self.rows.record_stream(torch.cuda.current_stream(device))  # `keep` may free them before this is done
        return joined


class CachedRows(NamedTuple):
    """A request for rows, for which a device has gathered those that were cached.

    Attributes:
        rows: All rows of the request, on the device; the others are not there yet.
        other: The positions in the request of the ids whose rows were not cached; int64, in pinned memory.
        other_ids: The ids at these positions.
    """

    rows: torch.Tensor
    other: torch.Tensor
    other_ids: torch.Tensor

    def joined(self, other_rows: torch.Tensor) -> torch.Tensor:
        """Return all rows of the request, those of `other_ids` from pinned memory, in the caller's current stream."""
        _fill(self.rows, self.other, other_rows)
        self.rows.record_stream(torch.cuda.current_stream(self.rows.device))  # they were allocated for another one
        return self.rows


class SentRows(NamedTuple):
    """Rows being copied to a device in a stream of ours, in parallel with the caller's streams.

    Attributes:
        rows: The rows, on the device.
        event: The CUDA event recorded behind their copy.
    """

    rows: torch.Tensor
    event: torch.cuda.Event

    def taken(self) -> torch.Tensor:
        """Make the caller's current stream wait for the rows, and return them."""
        stream = torch.cuda.current_stream(self.rows.device)
        stream.wait_event(self.event)
        self.rows.record_stream(stream)
        return self.rows


def send_rows(bring: Callable[[], torch.Tensor], stream: torch.cuda.Stream) -> SentRows:
    """Copy rows to a device in a stream of ours.

    Args:
        bring: Copies the rows to the device in the current stream, and returns them.
        stream: A stream of the device.
    """
    with torch.cuda.stream(stream):
        return SentRows(bring(), stream.record_event())


def kept_on_device(
    ids: torch.Tensor, row_count: int, rows: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor], at_once: int
) -> DeviceRows:
    """Copy rows to a device.

    Args:
        ids: Different ids, in a tensor of one dimension on the CPU.
        row_count: The number of rows of the table.
        rows: Memory on the device for as many rows.
        read: Returns the rows of some ids in pinned memory.
        at_once: How many to read at a time.
    """
    place_of_row = torch.full((row_count,), -1, dtype=torch.int32, device="cpu")
    place_of_row[ids] = torch.arange(ids.numel(), dtype=torch.int32, device="cpu")
    for some, there in zip(ids.split(at_once), rows.split(at_once), strict=True):
        there.copy_(read(some), non_blocking=True)
    torch.cuda.current_stream(rows.device).synchronize()  # requests may use any stream
    return DeviceRows(rows, place_of_row)


def cached_rows(
    native: _native.RowStore,
    ids: torch.Tensor,
    batch: int,
    row_shape: Sequence[int],
    dtype: torch.dtype,
    stream: torch.cuda.Stream,
) -> CachedRows | None:
    """Let a device gather the cached rows of a request, and wait for it; None: the host has to.

    Args:
        native: The store.
        ids: The ids of the request, in a tensor of one dimension on the CPU.
        batch: The number of the request's batch.
        row_shape: The shape of a row of the table.
        dtype: The dtype of the table.
        stream: A stream of the device that is used for this alone.
    """
    count, row_bytes = ids.numel(), math.prod(row_shape) * dtype.itemsize
    if count * row_bytes <= _GATHERED_BYTES_MIN or row_bytes < _ROW_BYTES_MIN or row_bytes % _WORD_BYTES_MIN:
        return None
    if count > _COUNT_MAX or why_not_native():
        return None
    scratch = torch.empty((2, count), dtype=torch.int32, device="cpu", pin_memory=True)
    other = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
    if scratch.untyped_storage().device.type == "meta":  # of a FakeTensorMode
        return None
    with torch.inference_mode(False), torch.cuda.stream(stream):
        rows = torch.empty((count, *row_shape), dtype=dtype, device=stream.device)
    try:
        other_count = native.gather_cached(
            stream.device.index,
            batch,
            ids.data_ptr(),
            count,
            scratch.data_ptr(),
            other.data_ptr(),
            rows.data_ptr(),
            stream.cuda_stream,
            _GATHERED_BYTES_MIN // row_bytes + 1,
        )
    except (DeviceError, UnsupportedError) as error:
        tell_of_gathers(error)
        return None
    if other_count == count:
        tell_of_pinning()
        return None
    other = other[:other_count]
    return CachedRows(rows, other, ids[other])


def rows_at(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows by their indices, in a tensor of shape `indices.shape + row_shape`."""
    found = _as_words(rows).index_select(0, indices.reshape(-1)).view(rows.dtype)
    return found.view(*indices.shape, *rows.shape[1:])


def _fill(rows: torch.Tensor, places: torch.Tensor, found: torch.Tensor) -> None:
    """Write rows to some places among others on a device, in its current stream."""
    if not places.numel():
        return
    at_once = max(1, _AT_ONCE_BYTES // (rows[:1].nbytes or 1))
    for some, targets in zip(found.split(at_once), places.split(at_once), strict=True):
        there = _as_words(some.to(rows.device, non_blocking=True))
        _as_words(rows).index_copy_(0, targets.to(rows.device, non_blocking=True), there)


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """View rows as words, as long as possible to copy fast; not every dtype can be indexed."""
    raw = rows.view(rows.shape[0], math.prod(rows.shape[1:])).view(torch.uint8)
    return raw.view(next(word for word in _WORDS if raw.shape[1] % word.itemsize == 0))
