"""Rows asked for ahead: tickets are started as memory allows, can be taken, cancelled and dropped at any moment, and a
closed store ends them all. Rows that are kept stay.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import leaks
from support.row_tables import make_rows
from support.tensor_files import faults, slow

from fastpersist import _native
from fastpersist.errors import ConfigError, StorageError
from fastpersist.rows.store import RowStore, RowTicket

nothing_is_left_behind = leaks.nothing_is_left_behind

COUNT = 20_000
FAULTY = "fault:threads-buffered"


@pytest.fixture
def store(path: Path) -> Iterator[RowStore]:
    with RowStore(path, engine=FAULTY, cache_bytes=0, queue_depth=16) as store:
        yield store


MANY = torch.arange(0, COUNT, 100)  # 200 reads, more than a caller does itself: their gaps are longer than a read
MANY_BYTES = len(MANY) * 128


def asked(store: RowStore, first: int = 0) -> RowTicket:
    return store.prefetch((MANY + first) % COUNT)


# --------------------------------------------------------------------------------------------------------- tickets


def test_a_ticket_brings_its_rows_and_again_the_same(store: RowStore, rows: torch.Tensor) -> None:
    ids = torch.tensor([[7, 3], [7, 19_999]])
    ticket = store.prefetch(ids)
    found = ticket.result()
    assert torch.equal(found, rows[ids])
    assert ticket.done()
    assert ticket.result().data_ptr() == found.data_ptr()
    assert torch.equal(store.prefetch(MANY).result(timeout=60), rows[MANY])


def test_ids_may_change_after_the_request(store: RowStore, rows: torch.Tensor) -> None:
    array = np.arange(10)
    tensor = torch.arange(10)
    with slow(100):
        blocked = [asked(store, 1), asked(store, 2)]
        store._ahead_bytes = 0
        tickets = [store.prefetch(array), store.prefetch(tensor), store.prefetch(tensor[2:])]
        array[:] = 1 << 60
        tensor[:] = -1
    assert torch.equal(tickets[0].result(), rows[:10])
    assert torch.equal(tickets[1].result(), rows[:10])
    assert torch.equal(tickets[2].result(), rows[2:10])
    del blocked


def test_a_result_waits_no_longer_than_its_timeout(store: RowStore, rows: torch.Tensor) -> None:
    with slow(1500):
        ticket = asked(store)
        assert not ticket.done()
        for timeout in (0, 0.05):
            with pytest.raises(TimeoutError, match="are not there after"):
                ticket.result(timeout)
    assert torch.equal(ticket.result(), rows[MANY])


def test_few_reads_that_are_asked_for_ahead_are_not_waited_for(store: RowStore, rows: torch.Tensor) -> None:
    with slow(1500):
        ticket = store.prefetch(MANY[:10])
        assert not ticket.done()
    assert torch.equal(ticket.result(), rows[MANY[:10]])


def test_a_gather_needs_no_lock_that_a_request_made_ahead_holds(store: RowStore, rows: torch.Tensor) -> None:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(store.gather([7])))
    with store._lock:
        thread.start()
        thread.join(60)
        assert torch.equal(found[0], rows[[7]])
    thread.join()


def test_a_cancelled_ticket_has_no_rows(store: RowStore) -> None:
    with slow(50):
        ticket = asked(store)
        ticket.cancel()
        ticket.cancel()
        assert ticket.done()
        for _ in range(2):
            with pytest.raises(ConfigError, match="was cancelled"):
                ticket.result()
    assert store.stats().read_count < len(MANY)
    done = store.prefetch([1])
    done.result()
    done.cancel()
    with pytest.raises(ConfigError, match="was cancelled"):
        done.result()


def test_a_cancel_ends_the_wait_of_another_thread(store: RowStore) -> None:
    errors: list[BaseException] = []

    def take() -> None:
        try:
            ticket.result()
        except ConfigError as error:
            errors.append(error)

    with slow(2000):
        ticket = asked(store)
        thread = threading.Thread(target=take)
        thread.start()
        time.sleep(0.1)
        begin_s = time.monotonic()
        ticket.cancel()
        thread.join(60)
        assert time.monotonic() - begin_s < 1.5
    assert len(errors) == 1


def test_who_drops_a_ticket_gives_its_reads_up(store: RowStore) -> None:
    with slow(30):
        for first in range(20):
            asked(store, first)
    assert store.stats().read_count < 20 * len(MANY)
    assert not store._under_way
    assert torch.equal(store.gather([5]), store.gather([5]))


def test_a_request_that_fails_says_so_to_who_takes_it(store: RowStore, rows: torch.Tensor) -> None:
    with faults(nth=5):
        failing = asked(store)
        fine = store.prefetch([3])
        for _ in range(2):
            with pytest.raises(StorageError, match="row"):
                failing.result()
    assert torch.equal(fine.result(), rows[[3]])
    assert torch.equal(asked(store).result(), rows[MANY])


def test_a_ticket_without_memory_fails_alone(store: RowStore, rows: torch.Tensor) -> None:
    fine = asked(store)
    huge = store.prefetch(torch.zeros(1 << 20, dtype=torch.int64))
    assert huge._request is not None  # its memory is a promise; make it one that cannot be kept
    huge.cancel()
    empty = torch.empty

    def refuse(*arguments: object, **named: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    torch.empty = refuse  # type: ignore[assignment]
    try:
        poor = store.prefetch([1])
    finally:
        torch.empty = empty
    assert torch.equal(fine.result(), rows[MANY])
    with pytest.raises(RuntimeError, match="not enough memory"):
        poor.result()


# ----------------------------------------------------------------------------------------------------- ahead_bytes


def test_two_requests_are_under_way_whatever_the_limit(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, engine=FAULTY, cache_bytes=0, ahead_bytes=0) as store, slow(20):
        tickets = [asked(store, first) for first in range(5)]
        assert [ticket._request is not None for ticket in tickets] == [True, True, False, False, False]
        assert torch.equal(tickets[0].result(), rows[MANY])
        assert [ticket._request is not None for ticket in tickets] == [True, True, True, False, False]
        tickets[1].cancel()
        assert tickets[3]._request is not None
        # Out of turn: nobody waits for what is not begun.
        assert torch.equal(tickets[4].result(), rows[(MANY + 4) % COUNT])
        assert torch.equal(tickets[3].result(), rows[(MANY + 3) % COUNT])
        assert torch.equal(tickets[2].result(), rows[(MANY + 2) % COUNT])
        assert not store._under_way
        assert torch.equal(asked(store).result(), rows[MANY])
        assert not store._waiting


def test_by_default_as_many_are_under_way_as_keep_a_disk_busy(path: Path, rows: torch.Tensor) -> None:
    """Those that were not started are known to the cache."""
    with RowStore(path, engine=FAULTY, cache_bytes=0) as store, slow(20):
        tickets = [store.prefetch(range(300 * first, 300 * (first + 1))) for first in range(5)]
        assert [ticket._request is not None for ticket in tickets] == [True, True, True, False, False]
        for first, ticket in enumerate(tickets):
            assert torch.equal(ticket.result(), rows[300 * first : 300 * (first + 1)])


def test_a_loop_that_is_left_starts_nothing_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [torch.arange(1000 * first, 1000 * (first + 1)) for first in range(20)]
    with RowStore(path, engine=FAULTY, cache_bytes=0) as store, slow(20):
        pairs = store.ahead(batches, ids=lambda batch: batch, window=10)
        next(pairs)
        monkeypatch.setattr(RowStore, "_start_ticket", lambda *_: pytest.fail("a request was started"))
        pairs.close()  # type: ignore[attr-defined] # it is a generator
        assert not store._under_way


def test_uses_of_requests_that_were_passed_over_end_with_them(path: Path, rows: torch.Tensor) -> None:
    """Their rows would stay in the cache for good, as rows that are used soon."""
    with RowStore(path, cache_bytes=100 * (rows[0].nbytes + 28), ahead_bytes=0) as store:
        tickets = [store.prefetch(range(100 * first, 100 * (first + 1))) for first in range(6)]
        tickets[5].result()
        for ticket in tickets[2:5]:
            ticket.cancel()
        tickets[0].result()
        tickets[1].result()
        store.gather(range(200, 500))
        favourites = range(1000, 1100)
        for _ in range(8):
            store.gather(favourites)
        before = store.stats().hit_count
        store.gather(favourites)
        assert store.stats().hit_count - before > 80


def test_as_many_are_under_way_as_there_is_memory_for(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, engine=FAULTY, cache_bytes=0, ahead_bytes=4 * MANY_BYTES) as store, slow(5):
        tickets = [asked(store, first) for first in range(10)]
        assert sum(ticket._request is not None for ticket in tickets) == 4
        del tickets[1]
        for ticket in tickets[5:]:
            ticket.cancel()
        assert sum(ticket._request is not None for ticket in tickets[:5]) == 4
        del ticket
        for first, ticket in zip((0, 2, 3, 4, 5), tickets[:5], strict=True):
            assert torch.equal(ticket.result(), rows[(MANY + first) % COUNT])


def test_tickets_in_cycles_are_dropped_by_the_garbage_collector(path: Path, rows: torch.Tensor) -> None:
    """The collector may run in any thread, at any place, also where the store's lock is held."""
    first = RowStore(path, cache_bytes=200_000, ahead_bytes=0)
    second = RowStore(path, cache_bytes=0, ahead_bytes=0)
    failures: list[BaseException] = []
    before = gc.get_threshold()

    def loop(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for round_number in range(60):
                store = (first, second)[round_number % 2]
                ids = torch.randint(COUNT, (100,), generator=generator)
                tickets = [store.prefetch(ids) for _ in range(4)]
                cycle: list[object] = [tickets[1], tickets[3]]
                cycle.append(cycle)
                del cycle
                assert torch.equal(tickets[2].result(), rows[ids])
                if round_number % 5 == 0:
                    tickets[0].cancel()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test fails with it
            failures.append(error)

    gc.set_threshold(3)
    try:
        threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a deadlock"
    finally:
        gc.set_threshold(*before)
    assert not failures
    gc.collect()
    with first, second:
        for store in (first, second):
            assert not store._under_way
            assert torch.equal(store.prefetch([1]).result(), rows[[1]])


def test_the_collector_may_come_while_the_lock_is_held(store: RowStore) -> None:
    with slow(20):
        tickets = [asked(store, first) for first in range(3)]
        cycle: list[object] = [*tickets]
        cycle.append(cycle)
        del tickets, cycle
        with store._lock:
            gc.collect()
    assert not store._under_way


# ----------------------------------------------------------------------------------------------------------- ahead


def test_a_loop_gets_its_rows(store: RowStore, rows: torch.Tensor) -> None:
    batches = [torch.randint(COUNT, (500,), generator=torch.Generator().manual_seed(n)) for n in range(20)]
    seen = 0
    for batch, found in store.ahead(batches, ids=lambda ids: ids, window=3):
        assert torch.equal(found, rows[batch])
        assert batch is batches[seen]
        seen += 1
    assert seen == 20
    assert not store._under_way


def test_a_loop_that_is_left_cancels_what_it_asked_for(store: RowStore) -> None:
    with slow(10):
        for _batch, _found in store.ahead(range(100), ids=lambda n: (MANY + n) % COUNT, window=5):
            break
        del _found
        gc.collect()
        assert not store._under_way
    assert store.stats().row_count <= 6 * len(MANY)


def test_a_window_makes_hits_of_rows_that_are_used_again(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    hot = torch.randperm(COUNT, generator=generator)[:300]
    with RowStore(path, cache_bytes=64 << 10, ahead_bytes=0) as store:
        for _ in store.ahead(range(30), ids=lambda n: torch.cat([hot, torch.randint(COUNT, (300,))]), window=4):
            pass
        assert store.stats().hit_rate > 0.3


# ------------------------------------------------------------------------------------------------------------ keep


def test_rows_that_are_kept_are_never_read_again(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, cache_bytes=64 << 10) as store:
        store.gather(range(5000))  # others fill the cache
        limit = store.stats().cache_row_limit
        kept = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))[:limit]
        store.keep(kept)
        store.keep(kept)
        store.gather(range(10_000))
        read_count = store.stats().read_count
        assert torch.equal(store.gather(kept), rows[kept])
        assert store.stats().read_count == read_count


def test_a_cache_that_is_too_small_keeps_what_it_can_and_says_so(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, cache_bytes=64 << 10) as store:
        limit = store.stats().cache_row_limit
        with pytest.raises(ConfigError, match=rf"{limit + 5 - limit} of {limit + 5} rows of .* raise cache_bytes"):
            store.keep(range(limit + 5))
        assert store.stats().cached_row_count == limit
        assert torch.equal(store.gather(range(COUNT)), rows)
    with RowStore(path, cache_bytes=0) as store, pytest.raises(ConfigError, match="1 of 1 rows"):
        store.keep([1])


def test_rows_may_be_kept_while_others_gather(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, cache_bytes=64 << 10) as store:
        limit = store.stats().cache_row_limit
        is_over = threading.Event()

        def gather() -> None:
            while not is_over.is_set():
                ids = torch.randint(COUNT, (1000,))
                assert torch.equal(store.gather(ids), rows[ids])

        threads = [threading.Thread(target=gather) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for first in range(0, limit - 20, 20):
                store.keep(range(first, first + 20))
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        read_count = store.stats().read_count
        store.gather(range(first + 20))
        assert store.stats().read_count == read_count


class Between:
    """The native side of a store, which calls something behind each `keep`."""

    def __init__(self, store: RowStore, calls: list[Callable[[], object]]) -> None:
        self._native: Any = store._native
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def start(self, *arguments: Any) -> Any:
        request = self._native.start(*arguments)
        if arguments[3] == _native.KEEP_BATCH:
            request.wait()
            self._calls.pop(0)()
        return request

    def keep(self, *arguments: Any) -> int:
        left_count: int = self._native.keep(*arguments)
        if self._calls:
            self._calls.pop(0)()
        return left_count


def test_rows_that_others_bring_meanwhile_are_kept(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, cache_bytes=64 << 10) as store:
        limit = store.stats().cache_row_limit
        kept, others = torch.arange(limit // 2), torch.arange(10_000, 10_000 + limit)

        def push_out() -> None:
            for _ in range(10):  # the more often, the better
                store.gather(others)

        store._native = Between(store, [lambda: store.gather(kept), push_out])  # type: ignore[assignment]
        store.keep(kept)
        read_count = store.stats().read_count
        assert torch.equal(store.gather(kept), rows[kept])
        assert store.stats().read_count == read_count


# ----------------------------------------------------------------------------------------------------------- close


def test_nothing_works_after_close(path: Path) -> None:
    store = RowStore(path)
    done, waiting = store.prefetch([1]), store.prefetch([2])
    taken = done.result()
    store.close()
    store.close()
    for call in (
        lambda: store.gather([1]),
        lambda: store.gather([]),
        lambda: store.gather_unique([1]),
        lambda: store.prefetch([1]),
        lambda: store.keep([1]),
        store.stats,
        lambda: list(store.ahead([[1]], ids=lambda ids: ids)),
    ):
        with pytest.raises(ConfigError, match="is closed"):
            call()
    assert torch.equal(done.result(), taken)
    waiting.cancel()
    assert len(store) == COUNT


def test_a_close_ends_the_tickets_that_are_open(path: Path) -> None:
    with slow(50):
        store = RowStore(path, engine=FAULTY, cache_bytes=0, ahead_bytes=0, queue_depth=4)
        tickets = [asked(store, first) for first in range(5)]
        store.close()
    for ticket in tickets:
        with pytest.raises(ConfigError, match="closed"):
            ticket.result()
        assert ticket.done()


def test_descriptors_are_open_as_long_as_another_thread_reads(path: Path, tmp_path: Path) -> None:
    """A descriptor that is closed too early may be another file's by the time of the read."""
    other = tmp_path / "other"
    other.write_bytes(b"\xff" * path.stat().st_size)
    for _ in range(5):
        store = RowStore(path, engine=FAULTY, cache_bytes=0)
        results: list[torch.Tensor | ConfigError] = []

        def gather(store: RowStore = store, results: list[torch.Tensor | ConfigError] = results) -> None:
            try:
                results.append(store.gather([1, 5000, 10_000]))
            except ConfigError as error:
                results.append(error)

        with slow(60):
            thread = threading.Thread(target=gather)
            thread.start()
            time.sleep(0.02)
            store.close()
            with open(other, "rb"), open(other, "rb"), open(other, "rb"):
                thread.join()
        (result,) = results
        assert isinstance(result, ConfigError) or torch.equal(result, make_rows(COUNT)[[1, 5000, 10_000]])


def test_a_store_that_is_dropped_is_closed(path: Path) -> None:
    with leaks.no_leaks():
        store = RowStore(path)
        ticket = store.prefetch(MANY)
        count = sys.getrefcount(store)
        del ticket
        assert sys.getrefcount(store) < count
        del store


def test_many_threads_share_a_store(path: Path, rows: torch.Tensor) -> None:
    failures: list[BaseException] = []
    with RowStore(path, cache_bytes=300_000, ahead_bytes=1 << 20) as store:

        def work(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            try:
                for count in (3, 300, 50, 2000):
                    ids = torch.randint(COUNT, (count,), generator=generator)
                    ticket = store.prefetch(ids)
                    assert torch.equal(store.gather(ids), rows[ids])
                    if seed % 3:
                        assert torch.equal(ticket.result(), rows[ids])
                    unique, inverse = store.gather_unique(ids)
                    assert torch.equal(unique[inverse], rows[ids])
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test fails with it
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert not failures
        assert not store._under_way


def test_a_ticket_behind_dropped_ones_is_started_when_somebody_looks(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, ahead_bytes=0) as store:
        tickets = [store.prefetch([number]) for number in range(4)]
        del tickets[:3]
        gc.collect()
        deadline_s = time.monotonic() + 60
        while not tickets[0].done():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        assert torch.equal(tickets[0].result(), rows[3:4])


def within(seconds: float, call: Callable[[], object]) -> None:
    """Run a call that must not wait for itself."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()


def interrupting(store: RowStore, monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[], object]) -> None:
    """Run a call while a request is started, as a signal's handler and the garbage collector may."""
    ask = store._ask
    calls = [interrupt]

    def interrupted(*arguments: Any) -> Any:
        while calls:
            calls.pop()()
        return ask(*arguments)

    monkeypatch.setattr(store, "_ask", interrupted)


def test_a_loop_that_was_left_may_end_while_a_request_is_started(
    store: RowStore, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = store.ahead([MANY] * 5, ids=lambda ids: ids, window=3)
    next(loop)
    interrupting(store, monkeypatch, loop.close)
    found: list[torch.Tensor] = []
    within(60, lambda: found.append(asked(store).result()))
    assert torch.equal(found[0], rows[MANY])


def test_a_store_may_be_closed_while_a_request_is_started(store: RowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(store, monkeypatch, store.close)
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            asked(store).result()
        except ConfigError as error:
            failures.append(error)

    within(60, ask)
    assert "closed" in str(failures[0])


def test_a_request_may_be_made_while_another_one_is_started(
    store: RowStore, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.Tensor] = []
    interrupting(store, monkeypatch, lambda: found.append(asked(store, 1).result()))
    within(60, lambda: found.append(asked(store).result()))
    assert torch.equal(found[0], rows[(MANY + 1) % COUNT])
    assert torch.equal(found[1], rows[MANY])


def test_a_ticket_that_waits_in_a_closed_store_is_done(path: Path) -> None:
    with RowStore(path, engine=FAULTY, cache_bytes=0, ahead_bytes=0) as store, slow(50):
        tickets = [asked(store) for _ in range(4)]
        assert not tickets[-1].done()
        store.close()
        assert all(ticket.done() for ticket in tickets)
        with pytest.raises(ConfigError, match="closed"):
            tickets[-1].result()
