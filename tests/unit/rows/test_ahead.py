"""ahead() draws batches early, gives them in order with their rows, and leaves nothing behind if a loop ends early."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastpersist.errors import ConfigError, RowIndexError, StorageError
from fastpersist.rows.ahead import ahead


class Asked:
    """A ticket that says what becomes of it."""

    def __init__(self, log: list[str], batch: int) -> None:
        self._log = log
        self._batch = batch
        log.append(f"ask {batch}")

    def result(self) -> torch.Tensor:
        self._log.append(f"take {self._batch}")
        if self._batch == 13:
            raise StorageError(5, "unlucky", "file")
        if self._batch == 33:
            raise KeyboardInterrupt
        return torch.tensor(self._batch * 10)

    def cancel(self) -> None:
        self._log.append(f"cancel {self._batch}")


def loop(batches: Any, window: int) -> tuple[Iterator[tuple[int, torch.Tensor]], list[str]]:
    log: list[str] = []
    return ahead(batches, lambda batch: Asked(log, batch), window), log


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("window", [1, 2, 3, 20])
def test_each_batch_comes_once_in_order_with_its_rows(count: int, window: int) -> None:
    pairs, log = loop(range(count), window)
    assert [(batch, int(rows)) for batch, rows in pairs] == [(n, n * 10) for n in range(count)]
    assert not [line for line in log if line.startswith("cancel")]


def test_a_window_of_batches_is_known_beyond_the_one_that_is_taken() -> None:
    pairs, log = loop(range(6), 2)
    assert log == []
    next(pairs)
    assert log == ["ask 0", "ask 1", "ask 2", "take 0"]
    next(pairs)
    assert log[4:] == ["ask 3", "take 1"]


def test_a_loop_that_is_left_gives_up_what_it_asked_for() -> None:
    pairs, log = loop(range(100), 3)
    for batch, _ in pairs:
        if batch == 2:
            break
    del pairs
    assert log[-3:] == ["cancel 5", "cancel 4", "cancel 3"]


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_batches_before_an_error_of_the_loader_come_first(window: int) -> None:
    def loader() -> Iterator[int]:
        yield from (1, 2, 3)
        raise KeyError("loader")

    pairs, log = loop(loader(), window)
    assert [batch for batch, _ in itertools.islice(pairs, 3)] == [1, 2, 3]
    with pytest.raises(KeyError, match="loader"):
        next(pairs)
    assert log[-1] == "take 3"


def test_the_batches_before_one_with_a_bad_id_come_first() -> None:
    def ask(batch: int) -> Asked:
        if batch == 4:
            raise RowIndexError("ids is 4")
        return Asked(log, batch)

    log: list[str] = []
    pairs = ahead(range(100), ask, 3)
    assert [batch for batch, _ in itertools.islice(pairs, 4)] == [0, 1, 2, 3]
    with pytest.raises(RowIndexError, match="ids is 4"):
        next(pairs)
    assert log[-1] == "take 3"
    assert not [line for line in log if line in ("ask 5", "cancel 3")]


def test_an_earlier_error_comes_before_one_of_the_loader() -> None:
    pairs, log = loop((batch or 1 / 0 for batch in (12, 13, 14, 0)), 5)
    assert next(pairs)[0] == 12
    with pytest.raises(StorageError):
        next(pairs)
    assert log[-2:] == ["cancel 14", "cancel 13"]


def test_an_interrupt_is_not_put_off() -> None:
    def loader() -> Iterator[int]:
        yield from (1, 2)
        raise KeyboardInterrupt

    pairs, log = loop(loader(), 5)
    with pytest.raises(KeyboardInterrupt):
        next(pairs)
    assert log == ["ask 1", "ask 2", "cancel 2", "cancel 1"]


def test_an_error_of_a_request_gives_up_all_that_were_not_taken() -> None:
    pairs, log = loop(range(10, 20), 2)
    with pytest.raises(StorageError):
        list(pairs)
    assert log[-4:] == ["take 13", "cancel 15", "cancel 14", "cancel 13"]


def test_an_interrupted_wait_gives_up_its_request_too() -> None:
    """Whoever keeps the traceback, as a notebook does, would keep its rows."""
    pairs, log = loop(range(32, 36), 1)
    with pytest.raises(KeyboardInterrupt):
        list(pairs)
    assert log[-3:] == ["take 33", "cancel 34", "cancel 33"]


@pytest.mark.parametrize("window", [0, -1, 1.5, True, None, "8"])
def test_a_window_is_a_number_of_batches(window: Any) -> None:
    with pytest.raises(ConfigError, match="window is"):
        loop([], window)


def test_no_more_batches_are_known_ahead_than_the_cache_can_use() -> None:
    pairs, log = loop(range(100), 50)
    next(pairs)
    assert len([line for line in log if line.startswith("ask")]) == 33
