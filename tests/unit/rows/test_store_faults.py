"""What becomes of gathers when reads fail, files change under a store, and users press Ctrl-C: an error with its place,
or the old rows, and a store that goes on.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from support import leaks
from support.forking import Report, run_in_child
from support.sandbox import become_ordinary_user
from support.tensor_files import faults, skip_without, slow

from fastpersist import _native
from fastpersist.errors import ConfigError, FastPersistError, StorageError, UnsupportedError
from fastpersist.rows.packing import pack_rows
from fastpersist.rows.store import RowStore
from fastpersist.rows.writer import write_rows

nothing_is_left_behind = leaks.nothing_is_left_behind

COUNT = 4000
ROW_BYTES = 512
FEW = torch.arange(0, COUNT, 400)
MANY = torch.arange(0, COUNT, 40)  # more reads than a caller does itself: 100 rows of 512 bytes with gaps of 20 KB


@pytest.fixture
def path(rows: torch.Tensor, tmp_path: Path) -> Path:
    """A table that the test may change."""
    path = tmp_path / "table.npy"
    write_rows(path, rows)
    return path


@pytest.mark.parametrize("ids", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("engine", ["fault:uring", "fault:threads", "fault:threads-buffered"])
def test_any_read_may_fail(engine: str, ids: torch.Tensor, path: Path, rows: torch.Tensor) -> None:
    try:
        store = RowStore(path, engine=engine, cache_bytes=0)
    except UnsupportedError as reason:
        pytest.skip(str(reason))
    wanted = set(ids.tolist())
    nth = 0
    with store:
        while True:
            nth += 1
            _native.set_fault_plan(_native.FaultPlan(nth=nth))
            error = None
            try:
                assert torch.equal(store.gather(ids), rows[ids])
            except StorageError as failure:
                error = failure
            if _native.clear_fault_plan() == 0:
                break
            assert error is not None
            assert error.errno == errno.EIO
            assert error.filename == str(path)
            assert error.offset_bytes is not None
            row = next(row for row in wanted if f"read of row {row} of {path} at offset" in str(error))
            assert error.offset_bytes <= 4096 + row * 512 < error.offset_bytes + 8192
        assert error is None
        assert nth == len(ids) + 1
        assert torch.equal(store.gather(ids), rows[ids])


def test_where_no_thread_can_be_started_callers_read(path: Path, rows: torch.Tensor) -> None:
    def work(report: Report) -> None:
        with RowStore(path, engine="uring-buffered", cache_bytes=0) as store:
            become_ordinary_user()
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            try:
                threading.Thread(target=bool).start()
                pytest.skip("this process may start threads all the same")
            except RuntimeError:
                pass
            for ids in (FEW, MANY):
                tickets = [store.prefetch(ids + number) for number in range(3)]
                for number, ticket in enumerate(tickets):
                    assert torch.equal(ticket.result(10), rows[ids + number])
                assert torch.equal(store.gather(ids), rows[ids])

    skip_without("uring-buffered", path.parent)
    run_in_child(work)


def test_rows_that_failed_are_not_in_the_cache(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, engine="fault:threads-buffered", cache_bytes="4MiB", queue_depth=1) as store:
        with faults(nth=3), pytest.raises(StorageError):
            store.gather(FEW)
        cached_count = store.stats().cached_row_count
        assert 2 <= cached_count < len(FEW)
        assert torch.equal(store.gather(FEW), rows[FEW])
        assert store.stats().cached_row_count == len(FEW)


def test_reads_that_are_short_are_finished(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, engine="fault:threads-buffered", cache_bytes=0) as store:
        with faults(kind="short", short_bytes=100, count=50):
            assert torch.equal(store.gather(MANY), rows[MANY])
        with faults(kind="zero"), pytest.raises(StorageError, match="the file ends"):
            store.gather([5])


@pytest.mark.parametrize("name", ["gather", "keep"])
def test_a_failed_read_is_the_error_of_all_that_read(name: str, path: Path) -> None:
    with RowStore(path, engine="fault:threads-buffered", cache_bytes="1MiB") as store:
        with faults(), pytest.raises(StorageError, match="row 7 "):
            getattr(store, name)([7])
        with faults(), pytest.raises(StorageError, match="row 8 "):
            store.gather_unique([8, 8])


@pytest.mark.parametrize("ids", [FEW, FEW.int()], ids=["int64", "int32"])
def test_an_out_counts_as_changed_if_a_read_fails_since_a_part_may_be_written(ids: torch.Tensor, path: Path) -> None:
    out = torch.zeros(len(ids), ROW_BYTES // 4, dtype=torch.int32)
    with RowStore(path, engine="fault:threads-buffered", cache_bytes=0) as store:
        version = out._version
        with faults(nth=2), pytest.raises(StorageError):
            store.gather(ids, out=out)
        assert out._version > version


def test_an_error_of_a_packed_table_names_the_id_and_not_the_position(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.npy"
    pack_rows(path, packed, order=torch.arange(COUNT))  # the last id comes first
    with RowStore(packed, engine="fault:threads-buffered", cache_bytes=0) as store:
        with faults(), pytest.raises(StorageError, match=f"row {COUNT - 8} of"):
            store.gather([COUNT - 8])


# --------------------------------------------------------------------------------------------------- changed files


def test_a_file_that_changes_in_place_is_an_error(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, cache_bytes="1MiB") as store:
        ticket = store.prefetch([5])
        assert ticket._request is not None
        assert ticket._request.wait()
        assert torch.equal(store.gather([1, 2]), rows[[1, 2]])
        with open(path, "r+b") as file:
            file.seek(4096 + 512)
            file.write(bytes(512))
        os.utime(path, ns=(1, 1))
        read_count = store.stats().read_count
        with pytest.raises(StorageError, match="has changed since it was opened") as failure:
            store.gather([1])
        assert failure.value.filename == str(path)
        assert store.stats().cached_row_count == 0
        assert store.stats().read_count == read_count
        with pytest.raises(StorageError, match="has changed"):
            store.prefetch([1]).result()
        with pytest.raises(StorageError, match="has changed"):
            store.keep([1])
        with pytest.raises(StorageError, match="has changed"):
            store.gather([])  # as a request of which a device has all rows
        assert torch.equal(ticket.result(), rows[[5]])  # it was read before


def test_which_piece_has_changed_is_told(path: Path, tmp_path: Path, rows: torch.Tensor) -> None:
    write_rows(tmp_path / "other.npy", rows)
    with RowStore([path, tmp_path / "other.npy"]) as store:
        os.utime(tmp_path / "other.npy", ns=(1, 1))
        with pytest.raises(StorageError, match=r"other.npy has changed") as failure:
            store.gather([1])
        assert failure.value.filename == str(tmp_path / "other.npy")


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(path: Path) -> None:
    with RowStore(path, engine="fault:threads-buffered", cache_bytes=0, queue_depth=4) as store:
        with slow(30):
            ticket = store.prefetch(MANY)
            os.truncate(path, 4096 + 3000 * 512 + 100)
            with pytest.raises(StorageError, match=r"row 3\d\d\d: .*the file ends before") as failure:
                ticket.result()
            assert failure.value.filename == str(path)
        with pytest.raises(StorageError, match="has changed"):
            store.gather([1])


def test_a_new_version_that_takes_over_the_name_changes_nothing(path: Path, tmp_path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, cache_bytes=0) as store:
        write_rows(tmp_path / "new.npy", torch.zeros_like(rows))
        os.replace(tmp_path / "new.npy", path)
        assert torch.equal(store.gather(MANY), rows[MANY])
        with RowStore(path) as again:
            assert not again.gather(MANY).any()
        path.unlink()
        assert torch.equal(store.gather(FEW), rows[FEW])


# ---------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupt_soon() -> threading.Timer:
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    return timer


def test_ctrl_c_ends_a_gather_and_nothing_is_written_any_more(path: Path, rows: torch.Tensor) -> None:
    out = torch.zeros(len(MANY), 128, dtype=torch.int32)
    with RowStore(path, engine="fault:threads-buffered", cache_bytes=0, queue_depth=8) as store:
        with slow(300):
            timer = interrupt_soon()
            begin_s = time.monotonic()
            with pytest.raises(KeyboardInterrupt) as held:  # with its traceback, whose frames hold the request
                store.gather(MANY, out=out)
            assert time.monotonic() - begin_s < 2.5  # all reads take 13 times 300 ms
            timer.join()
            out.fill_(7)
        assert torch.equal(store.gather(MANY), rows[MANY])
        assert torch.equal(out, torch.full_like(out, 7))
        assert store.stats().read_count < 2 * len(MANY)
        del held


def test_ctrl_c_ends_a_wait_and_not_the_ticket(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, engine="fault:threads-buffered", cache_bytes=0) as store:
        with slow(400):
            ticket = store.prefetch(MANY)
            timer = interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                ticket.result()
            timer.join()
        assert torch.equal(ticket.result(), rows[MANY])


# --------------------------------------------------------------------------------------------------------- threads


def test_each_of_many_threads_gets_its_rows_or_its_error(path: Path, rows: torch.Tensor) -> None:
    wrong: list[object] = []
    with RowStore(path, engine="fault:threads-buffered", cache_bytes=100_000, queue_depth=32) as store:
        is_over = threading.Event()

        def gather(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for count in (3, 500, 40, 1500):
                ids = torch.randint(COUNT, (count,), generator=generator)
                try:
                    if seed % 2:
                        found = store.gather(ids)
                    else:
                        ticket = store.prefetch(ids)
                        if seed % 4:
                            ticket.cancel()
                        found = ticket.result()
                    if not torch.equal(found, rows[ids]):
                        wrong.append(ids)
                except (StorageError, ConfigError) as error:
                    if "Input/output error" not in str(error) and "was cancelled" not in str(error):
                        wrong.append(error)
                except BaseException as error:  # noqa: BLE001 - whatever it is, the test fails with it
                    wrong.append(error)

        def fail() -> None:
            nth = 1
            while not is_over.wait(0.003):
                nth = nth % 23 + 1
                _native.set_fault_plan(_native.FaultPlan(nth=nth, count=nth % 4))

        breaker = threading.Thread(target=fail)
        breaker.start()
        threads = [threading.Thread(target=gather, args=(seed,)) for seed in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        is_over.set()
        breaker.join()
        _native.clear_fault_plan()
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        assert torch.equal(store.gather(range(COUNT)), rows)
        assert not store._under_way


def test_a_store_may_be_closed_while_threads_gather(path: Path, rows: torch.Tensor) -> None:
    wrong: list[object] = []
    for _ in range(5):
        store = RowStore(path, cache_bytes=100_000)

        def gather(store: RowStore = store) -> None:
            while True:
                ids = torch.randint(COUNT, (300,))
                try:
                    if not torch.equal(store.gather(ids), rows[ids]):
                        wrong.append(ids)
                except FastPersistError as error:
                    if not isinstance(error, ConfigError) or "closed" not in str(error):
                        wrong.append(error)
                    return

        threads = [threading.Thread(target=gather) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        store.close()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert not wrong
