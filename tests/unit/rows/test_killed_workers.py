"""Workers of a DataLoader that are killed, as by the kernel where memory is short: the loop ends with the loader's
error, and the parent's store goes on.

A worker kills itself, so that no clock says when. What workers send are no tensors: the parent fetches the memory of a
tensor from the worker that sent it, and says something else where that one has gone.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support import leaks
from support.row_tables import bytes_of
from support.tensor_files import skip_without, slow
from torch.utils.data import DataLoader, Dataset

from fastpersist.rows.store import RowStore

nothing_is_left_behind = leaks.nothing_is_left_behind

pytestmark = pytest.mark.slow  # starts processes, and waits for torch to notice that they are gone

COUNT = 20_000
MANY = torch.arange(0, COUNT, 100)  # more reads than a caller does itself
ENGINES = ("fault:uring", "fault:threads-buffered")
LOST = "DataLoader worker .*(killed by signal: Killed|exited unexpectedly)"  # by its signal, or by torch's look


class Samples(Dataset[list[int]]):
    """Ids of batches. The worker that has to make the last one is killed."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> list[int]:
        if index == self._count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ids_of(index).tolist()


def ids_of(index: int) -> torch.Tensor:
    return (MANY + index) % COUNT


class Gathered(Dataset[bytes]):
    """Rows of batches. The worker that has to make the last one is killed while it reads."""

    def __init__(self, store: RowStore, rows: torch.Tensor) -> None:
        self._store = store
        self._rows = rows
        self.reached = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> bytes:
        found = self._store.gather(ids_of(index))
        if index == len(self) - 1 and torch.equal(found, self._rows[ids_of(index)]):
            with slow(3_600_000):  # these reads are under way, whenever the signal comes
                tickets = [self._store.prefetch(ids_of(number)) for number in range(3)]
                self.reached += not any(ticket.done() for ticket in tickets)
                os.kill(os.getpid(), signal.SIGKILL)
        return bytes_of(found)


def check_goes_on(store: RowStore, rows: torch.Tensor) -> None:
    """Check that nothing is under way, and that the store brings rows, to workers of another loader, too."""
    gc.collect()
    assert not store._under_way
    assert not [ticket for waiting in store._waiting if (ticket := waiting()) is not None]
    assert torch.equal(store.gather(MANY), rows[MANY])
    assert torch.equal(store.prefetch(MANY + 1).result(), rows[MANY + 1])
    four: Any = range(4)
    loader = DataLoader(four, batch_size=None, num_workers=2, multiprocessing_context="fork")
    numbers = [number for number, found in store.ahead(loader, ids=ids_of) if torch.equal(found, rows[ids_of(number)])]
    assert numbers == [0, 1, 2, 3]


@pytest.mark.parametrize("worker_count", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_loop_ends_with_the_error_of_a_loader_that_lost_a_worker(
    engine: str, worker_count: int, path: Path, rows: torch.Tensor
) -> None:
    skip_without(engine, path.parent)
    with RowStore(path, engine=engine, cache_bytes=0, ahead_bytes=3 * len(MANY) * 128) as store:
        loader = DataLoader(Samples(12), batch_size=None, num_workers=worker_count, multiprocessing_context="fork")
        seen = []
        with slow(5), pytest.raises(RuntimeError, match=LOST):
            for ids, found in store.ahead(loader, ids=lambda batch: batch, window=4):
                assert torch.equal(found, rows[ids])
                seen.append(ids[0])
        assert seen == list(range(len(seen)))
        del loader
        check_goes_on(store, rows)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_worker_that_is_killed_while_it_reads_takes_nothing_from_its_parent(
    engine: str, path: Path, rows: torch.Tensor
) -> None:
    skip_without(engine, path.parent)
    with RowStore(path, engine=engine, cache_bytes=0) as store:
        with slow(20):
            tickets = [store.prefetch(ids_of(number)) for number in range(2)]  # under way when workers are forked
        samples = Gathered(store, rows)
        loader = DataLoader(samples, batch_size=None, num_workers=2, multiprocessing_context="fork")
        with pytest.raises(RuntimeError, match=LOST):
            for index, found in enumerate(loader):
                assert found == bytes_of(rows[ids_of(index)])
        assert samples.reached.item() == 1
        for number, ticket in enumerate(tickets):
            assert torch.equal(ticket.result(), rows[ids_of(number)])
        del loader
        check_goes_on(store, rows)
