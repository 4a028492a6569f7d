"""Rows in the memory of a CUDA device: kept there, so that requests read only the others; or on their way there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["DeviceRows", "SentRows", "Split", "kept_on_device", "rows_at", "send_rows"]

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class DeviceRows(NamedTuple):
    """Rows on a device, and where each lies.

    Attributes:
        rows: [count, *row_shape], on the device.
        place_of_row: For each row of the table its index in `rows`, or -1; int32, on the CPU.
    """

    rows: torch.Tensor
    place_of_row: torch.Tensor

    def split(self, ids: torch.Tensor) -> Split:
        """Divide ids, of one dimension on the CPU, into those of kept rows and the others.

        What is copied to the device is in pinned memory, so the caller need not wait for it.
        """
        places = torch.empty(ids.numel(), dtype=torch.int32, device="cpu", pin_memory=True)
        torch.index_select(self.place_of_row, 0, ids, out=places)
        other = (places < 0).nonzero().view(-1)
        return Split(self.rows, places, other.pin_memory(), ids[other])


class Split(NamedTuple):
    """A request for rows, some of which are on the device.

    Attributes:
        rows: What is kept there.
        places: For each id of the request the index in `rows`, or -1.
        other: Which ids of the request have none; int64.
        other_ids: These ids.
    """

    rows: torch.Tensor
    places: torch.Tensor
    other: torch.Tensor
    other_ids: torch.Tensor

    def joined(self, other_rows: torch.Tensor) -> torch.Tensor:
        """Return all rows of the request on the device, in the caller's current stream.

        Args:
            other_rows: Those of `other_ids`, in pinned memory.
        """
        device = self.rows.device
        with torch.cuda.device(device):
            joined = rows_at(self.rows, self.places.to(device, non_blocking=True).clamp_(min=0))
            if self.other_ids.numel():
                there = _as_words(other_rows.to(device, non_blocking=True))
                _as_words(joined).index_copy_(0, self.other.to(device, non_blocking=True), there)
            self.rows.record_stream(torch.cuda.current_stream())  # `keep` may free them before this is done
        return joined


class SentRows(NamedTuple):
    """Rows on their way to a device, in a stream of ours, beside what the caller's streams do.

    Attributes:
        rows: The rows, on the device.
        event: Recorded behind their copy.
    """

    rows: torch.Tensor
    event: torch.cuda.Event

    def taken(self) -> torch.Tensor:
        """Return them for the caller's current stream, which waits for them."""
        stream = torch.cuda.current_stream(self.rows.device)
        stream.wait_event(self.event)
        self.rows.record_stream(stream)
        return self.rows


def send_rows(bring: Callable[[], torch.Tensor], stream: torch.cuda.Stream) -> SentRows:
    """Bring rows to a device in a stream of ours.

    Args:
        bring: Copies them there in the current stream, and returns them.
        stream: Of the device.
    """
    with torch.cuda.stream(stream):
        return SentRows(bring(), stream.record_event())


def kept_on_device(
    ids: torch.Tensor, row_count: int, rows: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor], at_once: int
) -> DeviceRows:
    """Bring rows to a device.

    Args:
        ids: Different ids, of one dimension on the CPU.
        row_count: Of the table.
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


def rows_at(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows by their indices, in a tensor of shape `indices.shape + row_shape`."""
    found = _as_words(rows).index_select(0, indices.reshape(-1)).view(rows.dtype)
    return found.view(*indices.shape, *rows.shape[1:])


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """View rows as words, the longer the faster they are copied; not every dtype can be indexed."""
    raw = rows.view(rows.shape[0], math.prod(rows.shape[1:])).view(torch.uint8)
    return raw.view(next(word for word in _WORDS if raw.shape[1] % word.itemsize == 0))
