"""Fuzz RowStore: random operations of several threads on one store, while reads fail or are slow.

    python tests/fuzz/fuzz_row_store.py --seconds 5 --seed 1

An input is a table, the options of a store, a plan of faults, and what each of up to four threads does: gather, ask
ahead, take, cancel, drop, keep, loop, close. Rows that come are compared with the table; errors must be those that are
documented, and only where there is a reason. Nobody may wait for ever, and nothing may be left under way.
"""

from __future__ import annotations

import contextlib
import gc
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from fuzzing import main

from fastpersist import _native
from fastpersist.errors import ConfigError, StorageError
from fastpersist.rows.store import RowStore, RowTicket

outcomes: Counter[str] = Counter()
ROW_BYTES = [1, 16, 100, 264, 512, 1025, 4096]
ROW_COUNT = 1500
PATIENCE_S = 60.0


def table_of(row_bytes: int) -> torch.Tensor:
    rows = torch.arange(ROW_COUNT).unsqueeze(1) * 2654435761 + torch.arange(row_bytes) * 97
    return (rows >> 7).to(torch.uint8)


TABLES = {row_bytes: table_of(row_bytes) for row_bytes in ROW_BYTES}
FOLDER = tempfile.TemporaryDirectory(prefix="fastpersist-fuzz-rows-")
for _row_bytes, _table in TABLES.items():
    Path(FOLDER.name, str(_row_bytes)).write_bytes(b"offset " + _table.numpy().tobytes())


def make_input(rng: random.Random) -> bytes:
    return rng.randbytes(8)


@contextlib.contextmanager
def faults(rng: random.Random) -> Iterator[bool]:
    """Set a plan, and tell whether reads may fail by it."""
    kind = rng.choice(["", "", "errno", "short", "delay"])
    if kind:
        plan = _native.FaultPlan(
            kind=kind,
            nth=rng.choice([1, 2, rng.randrange(1, 100)]),
            count=rng.choice([1, 3, 1000]) if kind != "delay" else 5,
            short_bytes=rng.choice([1, 512, 600]),
            delay_ms=2,
        )
        _native.set_fault_plan(plan)
    try:
        yield kind in ("errno", "short")  # of one byte: no progress for direct I/O
    finally:
        _native.clear_fault_plan()


class Actor:
    """What one thread does with a store."""

    def __init__(
        self, store: RowStore, table: torch.Tensor, rng: random.Random, may_fail: bool, may_close: bool
    ) -> None:
        self.store, self.table, self.rng = store, table, rng
        self.may_fail, self.may_close = may_fail, may_close
        self.tickets: list[tuple[torch.Tensor, RowTicket]] = []
        self.failure: BaseException | None = None

    def ids(self) -> torch.Tensor:
        count = self.rng.choice([0, 1, 5, 50, 300, 1000])
        first, length = self.rng.choice([(0, ROW_COUNT), (0, 60), (self.rng.randrange(ROW_COUNT - 60), 60)])
        ids = [first + self.rng.randrange(length) for _ in range(count)]
        return torch.tensor(ids, dtype=torch.int64)

    def check(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        if not torch.equal(rows, self.table[ids]):
            raise AssertionError(f"wrong rows for {ids.tolist()}")

    def run(self) -> None:
        try:
            for _ in range(self.rng.randrange(25)):
                self.step()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the find
            self.failure = error

    def step(self) -> None:
        name = self.rng.choice(
            "gather out unique prefetch prefetch take take cancel drop cycle keep ahead close".split()
        )
        try:
            getattr(self, name)()
            outcomes[name] += 1
        except StorageError as error:
            if not self.may_fail:
                raise
            outcomes[type(error).__name__] += 1
        except ConfigError as error:
            is_closed = self.may_close and "closed" in str(error)
            if not is_closed and not (name == "keep" and "have no room" in str(error)):
                raise
            outcomes["closed" if is_closed else "no room"] += 1

    def gather(self) -> None:
        ids = self.ids()
        self.check(ids, self.store.gather(ids))

    def out(self) -> None:
        ids = self.ids()
        out = torch.empty(len(ids), self.table.shape[1], dtype=torch.uint8)
        self.check(ids, self.store.gather(ids, out=out))

    def unique(self) -> None:
        ids = self.ids()
        unique, inverse = self.store.gather_unique(ids)
        self.check(ids, unique[inverse])

    def prefetch(self) -> None:
        ids = self.ids()
        self.tickets.append((ids, self.store.prefetch(ids)))

    def _popped(self) -> tuple[torch.Tensor, RowTicket] | None:
        return self.tickets.pop(self.rng.randrange(len(self.tickets))) if self.tickets else None

    def take(self) -> None:
        if popped := self._popped():
            ids, ticket = popped
            with contextlib.suppress(TimeoutError):
                self.check(ids, ticket.result(self.rng.choice([None, None, 0, 0.001])))

    def cancel(self) -> None:
        if popped := self._popped():
            popped[1].cancel()
            if not popped[1].done():
                raise AssertionError("a cancelled ticket is not done")

    def drop(self) -> None:
        self._popped()

    def cycle(self) -> None:
        held: list[object] = [self._popped()]
        held.append(held)
        del held
        if self.rng.random() < 0.3:
            gc.collect(0)

    def keep(self) -> None:
        self.store.keep(self.ids()[:20])

    def ahead(self) -> None:
        batches = [self.ids() for _ in range(self.rng.randrange(6))]
        last = self.rng.randrange(6)
        pairs = self.store.ahead(batches, ids=lambda ids: ids, window=self.rng.randrange(1, 4))
        for number, (ids, rows) in enumerate(pairs):
            self.check(ids, rows)
            if number == last:
                break

    def close(self) -> None:
        if self.may_close and self.rng.random() < 0.1:
            self.store.close()


def try_input(data: bytes) -> None:
    rng = random.Random(data)
    row_bytes = rng.choice(ROW_BYTES)
    table = TABLES[row_bytes]
    may_close = rng.random() < 0.2
    with faults(rng) as may_fail:
        store = RowStore(
            Path(FOLDER.name, str(row_bytes)),
            shape=(-1, row_bytes),
            dtype=torch.uint8,
            offset_bytes=7,
            cache_bytes=rng.choice([0, 2000, 30_000, 1 << 20]),
            ahead_bytes=rng.choice([0, 50_000, 1 << 20]),
            engine=rng.choice(["fault:threads-buffered", "fault:threads-buffered", "fault:" + direct_engine()]),
            queue_depth=rng.choice([1, 4, 32]),
        )
        actors = [
            Actor(store, table, random.Random(rng.random()), may_fail, may_close) for _ in range(rng.randint(1, 4))
        ]
        threads = [threading.Thread(target=actor.run, daemon=True) for actor in actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        if any(thread.is_alive() for thread in threads):
            raise AssertionError("a thread waits for ever")
    for actor in actors:
        if actor.failure is not None:
            raise actor.failure
    if not store._closed:
        for actor in actors:
            actor.may_fail = False
            actor.tickets.clear()
        del actor
        gc.collect(1)
        if store._under_way:
            raise AssertionError(f"still under way: {store._under_way}")
        # Whatever has failed or was cancelled, nothing of it is left, except for reads that were under way.
        with contextlib.suppress(StorageError):
            store.gather(torch.arange(ROW_COUNT))
        actors[0].check(torch.arange(ROW_COUNT), store.gather(torch.arange(ROW_COUNT)))
        store.close()


def direct_engine() -> str:
    """Return an engine of direct I/O if the folder takes it."""
    global _direct
    if not _direct:
        try:
            RowStore(
                Path(FOLDER.name, "16"), shape=(-1, 16), dtype=torch.uint8, offset_bytes=7, engine="threads"
            ).close()
            _direct = "threads"
        except Exception:  # noqa: BLE001 - a file system of memory, say
            _direct = "threads-buffered"
    return _direct


_direct = ""

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(make_input, try_input)
    print(dict(outcomes))
