"""A store in forked children, in workers of a DataLoader, and pickled."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import leaks
from support.forking import run_in_child
from support.tensor_files import slow
from torch.utils.data import DataLoader, Dataset

from fastpersist.errors import ConfigError, StorageError
from fastpersist.rows.store import RowStore
from fastpersist.rows.writer import write_rows

nothing_is_left_behind = leaks.nothing_is_left_behind

COUNT = 20_000
MANY = torch.arange(0, COUNT, 100)


class Batches(Dataset[torch.Tensor]):
    """Each item is a gather of its own."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._store.gather(torch.arange(index, COUNT, 500))


# ----------------------------------------------------------------------------------------------------------- forks


def test_a_child_opens_the_files_anew(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, cache_bytes="1MiB") as store:
        store.gather(MANY)

        def work(_report: object) -> None:
            assert torch.equal(store.gather(MANY), rows[MANY])
            stats = store.stats()
            assert (stats.cache_row_limit, stats.hit_count) == (0, 0)
            assert torch.equal(store.prefetch([3]).result(), rows[[3]])
            store.close()

        run_in_child(work)
        assert torch.equal(store.gather(MANY), rows[MANY])
        assert store.stats().hit_count == len(MANY)


@pytest.mark.skipif(torch.get_num_threads() == 1, reason="torch has one thread here")
def test_a_child_of_a_parent_that_copies_in_threads_does_so_too(tmp_path: Path) -> None:
    torch_library = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    assert hasattr(torch_library, "GOMP_parallel"), "torch's OpenMP is where csrc/core/parallel.cc looks for it"
    rows = torch.arange(1 << 20).view(-1, 256)
    write_rows(tmp_path / "wide.npy", rows)

    def gather_cached(store: RowStore) -> None:
        for _ in range(3):
            assert torch.equal(store.gather(range(len(rows))), rows)
        assert store.stats().hit_count == 2 * len(rows)

    def work(_report: object) -> None:
        torch.set_num_threads(thread_count)
        with RowStore(tmp_path / "wide.npy", cache_bytes="16MiB") as store:
            torch.set_num_threads(1)  # torch itself would wait for its parent's threads
            gather_cached(store)

    thread_count = torch.get_num_threads()
    with RowStore(tmp_path / "wide.npy", cache_bytes="16MiB") as store:
        gather_cached(store)
    run_in_child(work)


def test_a_child_may_be_forked_with_everything_under_way(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, engine="fault:threads-buffered", cache_bytes=0, ahead_bytes=0, queue_depth=8) as store:
        done = store.prefetch([4])
        done.result()
        with slow(30):
            tickets = [store.prefetch((MANY + first) % COUNT) for first in range(4)]
            threads = [threading.Thread(target=store.gather, args=([first * 300],)) for first in range(4)]
            for thread in threads:
                thread.start()

            def work(_report: object) -> None:
                while not all(ticket.done() for ticket in tickets):  # nobody works on the parent's requests here
                    time.sleep(0.01)
                for first, ticket in enumerate(tickets):
                    if first != 1:
                        assert torch.equal(ticket.result(), rows[(MANY + first) % COUNT])
                tickets[1].cancel()
                assert torch.equal(done.result(), rows[[4]])
                tickets.clear()
                assert torch.equal(store.gather([1]), rows[[1]])

            run_in_child(work)
            for thread in threads:
                thread.join()
        for first, ticket in enumerate(tickets):
            assert torch.equal(ticket.result(), rows[(MANY + first) % COUNT])


def test_a_child_of_a_closed_store_finds_it_closed(path: Path) -> None:
    store = RowStore(path)
    store.close()

    def work(_report: object) -> None:
        with pytest.raises(ConfigError, match="is closed"):
            store.gather([1])

    run_in_child(work)


def test_a_child_that_finds_no_file_says_so(path: Path, tmp_path: Path, rows: torch.Tensor) -> None:
    moved = tmp_path / "moved.npy"
    write_rows(moved, rows)
    with RowStore(moved) as store:
        moved.unlink()

        def work(_report: object) -> None:
            with pytest.raises(StorageError):
                store.gather([1])

        run_in_child(work)
        assert torch.equal(store.gather([1]), rows[[1]])


@pytest.mark.parametrize("change", ["rename", "in place"])
def test_a_child_refuses_a_file_that_is_another_by_now(change: str, tmp_path: Path, rows: torch.Tensor) -> None:
    first, second, new = (tmp_path / name for name in ("first.npy", "second.npy", "new.npy"))
    for path in (first, second, new):
        write_rows(path, rows)
    with RowStore([first, second]) as store:
        if change == "rename":
            os.utime(new, ns=(second.stat().st_atime_ns, second.stat().st_mtime_ns))  # all but the file is the same
            os.replace(new, second)
        else:
            os.utime(second, ns=(1, 1))

        def work(_report: object) -> None:
            before = sorted(os.listdir("/proc/self/fd"))
            for _ in range(2):
                with pytest.raises(StorageError, match=r"second\.npy was replaced or changed") as failure:
                    store.gather([1])
                assert failure.value.filename == str(second)
                with pytest.raises(StorageError, match="open the table again"):
                    store.prefetch([1])
            assert sorted(os.listdir("/proc/self/fd")) == before

        run_in_child(work)


def test_a_child_that_has_used_the_store_goes_on_with_the_old_file(tmp_path: Path, rows: torch.Tensor) -> None:
    path, new = tmp_path / "table.npy", tmp_path / "new.npy"
    write_rows(path, rows)
    write_rows(new, torch.zeros_like(rows))
    with RowStore(path) as store:

        def work(_report: object) -> None:
            store.gather([1])
            os.replace(new, path)
            assert torch.equal(store.gather(MANY), rows[MANY])

        run_in_child(work)
        assert torch.equal(store.gather(MANY), rows[MANY])


def test_workers_of_a_loader_gather(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path) as store:
        store.gather(MANY)
        loader = DataLoader(Batches(store), batch_size=None, num_workers=2, multiprocessing_context="fork")
        for index, found in enumerate(loader):
            assert torch.equal(found, rows[index::500])
        assert torch.equal(store.gather(MANY), rows[MANY])


def test_a_loop_over_a_loader_with_workers(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path) as store:
        ids: Any = range(COUNT)
        loader = DataLoader(ids, batch_size=700, shuffle=True, num_workers=2, multiprocessing_context="fork")
        seen = torch.zeros(COUNT, dtype=torch.int64)
        for batch, found in store.ahead(loader, ids=lambda batch: batch, window=4):
            assert torch.equal(found, rows[batch])
            seen[batch] += 1
        assert torch.equal(seen, torch.ones(COUNT, dtype=torch.int64))


# --------------------------------------------------------------------------------------------------------- pickles


def test_a_store_is_pickled_as_its_arguments(path: Path, tmp_path: Path, rows: torch.Tensor) -> None:
    (tmp_path / "raw").write_bytes(b"123" + rows.numpy().tobytes())
    raw = RowStore(tmp_path / "raw", shape=(-1, 32), dtype=torch.int32, offset_bytes=3, cache_bytes=70_000)
    for store in (raw, RowStore(path, ahead_bytes=77, queue_depth=5), RowStore([path, str(path)])):
        with store, pickle.loads(pickle.dumps(store)) as again:
            assert repr(again) == repr(store)
            assert again._arguments == store._arguments
            ids = torch.randint(len(store), (300,))
            assert torch.equal(again.gather(ids), rows[ids % COUNT])
            assert again.stats().cache_row_limit == pytest.approx(store.stats().cache_row_limit, rel=0.5)


def test_a_process_that_is_started_with_a_store_has_no_cache_as_a_forked_one(
    path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RowStore(path, cache_bytes=70_000) as store:
        with monkeypatch.context() as patched:  # as while multiprocessing pickles what a process gets
            patched.setattr("fastpersist.rows.store.get_spawning_popen", object)
            pickled = pickle.dumps(store)
        with pickle.loads(pickled) as again:
            assert again.stats().cache_row_limit == 0
            assert torch.equal(again.gather(MANY), rows[MANY])
        assert store.stats().cache_row_limit > 0


def test_pieces_in_the_home_directory_are_pickled(
    rows: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("some.npy", "more.safetensors"):
        write_rows(tmp_path / name, rows)
    store = RowStore(["~/some.npy", ("~/more.safetensors", "rows")])
    with store, pickle.loads(pickle.dumps(store)) as again:
        assert torch.equal(again.gather([1, COUNT + 2]), rows[[1, 2]])


def test_a_child_reads_only_what_it_asks_for(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, ahead_bytes=0) as store:
        tickets = [store.prefetch([first]) for first in range(6)]

        def work(_report: object) -> None:
            assert torch.equal(store.prefetch([100]).result(), rows[[100]])
            assert store.stats().row_count == 1

        run_in_child(work)
        for first, ticket in enumerate(tickets):
            assert torch.equal(ticket.result(), rows[[first]])
