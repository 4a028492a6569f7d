"""A disk that dies and stays dead: from some read on, every read fails. Every request says which of its rows could not
be read, nobody waits for ever, and a closed store leaves nothing.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.tensor_files import EVERY, faults, skip_without

from fastpersist.errors import FastPersistError, StorageError
from fastpersist.rows.store import RowStore, RowTicket

ROW_BYTES = 512
HEADER_BYTES = 4096
READS = 100  # of a batch: more than a caller does itself
SHIFT = 16  # rows between those of two batches, which no block has together
STEP = 20 * SHIFT  # rows between two of a batch, which are too far apart for one read
COUNT = READS * STEP

ENGINES = ("fault:uring", "fault:threads", "fault:threads-buffered")
DISKS = [*((engine, errno.EIO) for engine in ENGINES), (ENGINES[-1], errno.ENODEV)]


def batch(number: int) -> torch.Tensor:
    """Ids of batch 0 … 19, of which no two have a read in common, so that each has as many of its own."""
    return torch.arange(number * SHIFT, COUNT, STEP)


def check_error(error: StorageError, path: Path, ids: Sequence[int], sys_errno: int) -> None:
    """Check that an error names the file, a row that was asked for, its place, and what the disk said."""
    assert error.errno == sys_errno
    assert error.filename == str(path)
    found = re.search(rf"read of row (\d+) of {re.escape(str(path))} at offset (\d+): (.*)", str(error))
    assert found is not None, str(error)
    row, offset_bytes = int(found[1]), int(found[2])
    assert row in ids
    assert offset_bytes == error.offset_bytes
    assert offset_bytes <= HEADER_BYTES + row * ROW_BYTES < offset_bytes + 8192
    assert os.strerror(sys_errno) in found[3]


@pytest.mark.parametrize(("engine", "sys_errno"), DISKS)
@pytest.mark.parametrize("nth", [1, READS // 2, READS + READS // 2])
def test_every_ticket_names_a_row_of_its_own(
    nth: int, engine: str, sys_errno: int, path: Path, rows: torch.Tensor, leak_check: None
) -> None:
    skip_without(engine, path.parent)
    whole_count = (nth - 1) // READS  # requests whose reads all come before the disk dies
    with (
        faults(nth=nth, count=EVERY, sys_errno=sys_errno),
        RowStore(path, engine=engine, cache_bytes="1MiB", ahead_bytes=3 * READS * ROW_BYTES) as store,
    ):
        wanted = [batch(number) for number in range(8)]
        wanted[3] = batch(2)[1::2]  # it may share reads
        tickets = [store.prefetch(ids) for ids in wanted]
        assert 3 <= len(store._under_way) < 8  # the others wait for their turn
        for number, (ids, ticket) in enumerate(zip(wanted, tickets, strict=True)):
            if number < whole_count:
                assert torch.equal(ticket.result(), rows[ids])
                continue
            for _ in range(2):  # again the same
                with pytest.raises(StorageError) as failure:
                    ticket.result()
                check_error(failure.value, path, ids.tolist(), sys_errno)
        for ids in (torch.tensor([7 + 8 * SHIFT]), batch(9)):
            with pytest.raises(StorageError) as failure:
                store.gather(ids)
            check_error(failure.value, path, ids.tolist(), sys_errno)
        assert not store._under_way
        del failure
        memory = [weakref.ref(rows_of) for ticket in tickets if (rows_of := ticket._rows) is not None]
        assert len(memory) == len(tickets)
        del rows_of, ticket
        tickets.clear()
        gc.collect()
        assert not [one for one in memory if one() is not None]


@pytest.mark.parametrize(("engine", "sys_errno"), DISKS)
@pytest.mark.parametrize("whole_count", [0, 1, 4])
def test_a_loop_ends_with_the_batch_that_could_not_be_read(
    whole_count: int, engine: str, sys_errno: int, path: Path, rows: torch.Tensor, leak_check: None
) -> None:
    skip_without(engine, path.parent)
    drawn = iter(range(20))
    found = []
    with (
        faults(nth=whole_count * READS + READS // 2, count=EVERY, sys_errno=sys_errno),
        RowStore(path, engine=engine, cache_bytes=0) as store,
    ):
        with pytest.raises(StorageError) as failure:
            for number, rows_of in store.ahead(drawn, ids=batch, window=3):
                assert torch.equal(rows_of, rows[batch(number)])
                found.append(number)
        assert found == list(range(whole_count))
        check_error(failure.value, path, batch(whole_count).tolist(), sys_errno)
        assert next(drawn) == whole_count + 4  # the window, and no batch beyond
        assert not store._under_way
        assert not [ticket for waiting in store._waiting if (ticket := waiting()) is not None and not ticket.done()]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nth", [1, READS // 2, READS + READS // 2])
def test_a_store_is_closed_while_reads_fail(
    nth: int, engine: str, path: Path, rows: torch.Tensor, leak_check: None
) -> None:
    skip_without(engine, path.parent)
    with faults(nth=nth, count=EVERY):
        store = RowStore(path, engine=engine, cache_bytes=0, ahead_bytes="1GiB", queue_depth=4)  # all are started
        pairs = store.ahead(range(8, 20), ids=batch, window=8)
        if nth > READS:
            number, rows_of = next(pairs)
            assert torch.equal(rows_of, rows[batch(number)])
        tickets = [store.prefetch(batch(number)) for number in range(8)]
        memory = [weakref.ref(ticket._rows) for ticket in tickets if ticket._rows is not None]
        assert len(memory) == len(tickets)
        store.close()
        for number, ticket in enumerate(tickets):
            check_ended(ticket, path, batch(number).tolist())
        with pytest.raises(FastPersistError):
            list(pairs)
        del pairs, ticket
        tickets.clear()
        gc.collect()
        assert not [one for one in memory if one() is not None]


def check_ended(ticket: RowTicket, path: Path, ids: Sequence[int]) -> None:
    """Check that a ticket of a store that was closed has an error: that of the disk, or that of the end."""
    with pytest.raises(FastPersistError) as failure:
        ticket.result()
    if isinstance(failure.value, StorageError):
        check_error(failure.value, path, ids, errno.EIO)
    else:
        assert "closed" in str(failure.value)
