"""Iterates over batches, and requests their rows while earlier batches are processed: `RowStore.ahead`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import torch

from fastpersist.errors import ConfigError

__all__ = ["Ticket", "ahead"]

Batch = TypeVar("Batch")

_WINDOW_MAX = 32  # the cache knows the uses of so many requests (RowCache::kWindow); of later ones it never would


class Ticket(Protocol):
    """Rows that were asked for."""

    def result(self) -> torch.Tensor:
        """Wait for them and return them."""

    def cancel(self) -> None:
        """Give them up."""


def ahead(loader: Iterable[Batch], ask: Callable[[Batch], Ticket], window: int) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Iterate over the batches of a loader with their rows; `ask` asks for those of a batch, `window` batches ahead.

    Raises:
        ConfigError: The window is no whole number above 0.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigError(f"window is {window!r}; it must be a number of batches, 1 or more")
    return _with_rows(loader, ask, min(window, _WINDOW_MAX))


def _with_rows(
    loader: Iterable[Batch], ask: Callable[[Batch], Ticket], window: int
) -> Iterator[tuple[Batch, torch.Tensor]]:
    asked: deque[tuple[Batch, Ticket]] = deque()
    failures: list[Exception] = []
    try:
        for pair in _until_failure(((batch, ask(batch)) for batch in loader), failures):
            asked.append(pair)
            if len(asked) > window:
                yield _taken(asked)
        while asked:
            yield _taken(asked)
        if failures:
            raise failures.pop()
    finally:  # the loop was left early, or the rows of a batch failed, or the wait for them was interrupted
        for _, ticket in reversed(asked):  # in forward order, each would make room for starting the next one
            ticket.cancel()


def _taken(asked: deque[tuple[Batch, Ticket]]) -> tuple[Batch, torch.Tensor]:
    first, ticket = asked[0]
    rows = ticket.result()
    asked.popleft()
    return first, rows


def _until_failure(pairs: Iterator[tuple[Batch, Ticket]], failures: list[Exception]) -> Iterator[tuple[Batch, Ticket]]:
    """Yield pairs up to an error, which is put into `failures`: the batches before it are processed first."""
    try:
        yield from pairs
    except Exception as error:  # noqa: BLE001 - it is raised later
        failures.append(error)
