"""Rows gathered to a GPU: the right ones, in the order of the caller's stream, wherever they were before."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_device import DEVICE, GPU, keep_busy, needs_cuda, random_tensor
from support.ranks_in_threads import eventually
from support.row_tables import make_rows

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import ConfigError, DeviceError, RowIndexError, StorageError
from fastpersist.rows import device_rows, store

pytestmark = GPU

COUNT = 4000


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return make_rows(COUNT)


@pytest.fixture
def path(rows: torch.Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "table.npy"
    fp.write_rows(path, rows)
    return path


def some_ids(count: int) -> torch.Tensor:
    return torch.randint(COUNT, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("kept_count", [0, 1, COUNT // 2, COUNT])
def test_all_requests_bring_the_rows(kept_count: int, path: Path, rows: torch.Tensor) -> None:
    """With none, some and all of them on the device."""
    with fp.RowStore(path) as opened:
        if kept_count and DEVICE.type == "cuda":
            opened.keep(some_ids(2 * COUNT)[:kept_count] if kept_count < COUNT else range(COUNT), device=DEVICE)
        for ids in (some_ids(1), some_ids(3000), some_ids(600).view(20, 30), torch.tensor(7), torch.empty(0, 3).long()):
            found = opened.gather(ids, device=DEVICE)
            assert found.device == DEVICE
            assert torch.equal(found.cpu(), rows[ids])
            assert torch.equal(opened.prefetch(ids, device=DEVICE).result().cpu(), rows[ids])
            unique, inverse = opened.gather_unique(ids, device=DEVICE)
            assert torch.equal(unique[inverse].cpu(), rows[ids])
        batches = [some_ids(count) for count in (500, 700, 3)]
        for batch, found in opened.ahead(batches, ids=lambda batch: batch, device=DEVICE):
            assert torch.equal(found.cpu(), rows[batch])


@needs_cuda
def test_rows_on_the_device_are_not_read(path: Path, rows: torch.Tensor) -> None:
    with fp.RowStore(path, cache_bytes=0) as opened:
        opened.keep(range(1000), device=DEVICE)
        before = opened.stats()
        assert torch.equal(opened.gather(range(1000), device=DEVICE).cpu(), rows[:1000])
        after = opened.stats()
        assert after.read_count == before.read_count
        assert after.device_row_count - before.device_row_count == after.row_count - before.row_count == 1000
        assert torch.equal(opened.gather(range(10)), rows[:10])
        assert opened.stats().read_count > after.read_count, "rows for the CPU come from the disk"


@needs_cuda
def test_many_rows_are_brought_piece_by_piece(path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by a copy that its successor, in the same pinned memory, must not overtake."""
    monkeypatch.setattr(store, "_KEPT_AT_ONCE_BYTES", rows[0].nbytes * 50)
    keep_busy()
    with fp.RowStore(path, cache_bytes=0) as opened:
        opened.keep(range(COUNT), device=DEVICE)
        assert torch.equal(opened.gather(range(COUNT), device=DEVICE).cpu(), rows)


@needs_cuda
def test_a_second_call_takes_the_place_of_the_first(path: Path, rows: torch.Tensor) -> None:
    with fp.RowStore(path, cache_bytes=0) as opened:
        opened.keep(range(1000), device=DEVICE)
        opened.keep(range(2000, 2100), device="cuda")
        assert torch.equal(opened.gather(range(COUNT), device=DEVICE).cpu(), rows)
        assert opened.stats().device_row_count == 100
        opened.keep([], device=DEVICE)
        assert torch.equal(opened.gather(range(COUNT), device=DEVICE).cpu(), rows)
        assert opened.stats().device_row_count == 100


@needs_cuda
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (16,)])
def test_rows_of_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    table = torch.randint(0, 2, (50, *shape)).to(dtype)
    fp.save({"x": table}, tmp_path / "x.safetensors")
    with fp.RowStore(tmp_path / "x.safetensors") as opened:
        opened.keep(range(20), device=DEVICE)
        found = opened.gather(range(50), device=DEVICE)
    assert found.dtype == dtype
    assert torch.equal(found.cpu().view(torch.uint8), table.view(torch.uint8))


@needs_cuda
def test_kept_rows_come_in_the_order_of_each_stream(path: Path, rows: torch.Tensor) -> None:
    """A stream that is not the one of `keep`, and that is busy."""
    ids = some_ids(3000)
    with fp.RowStore(path) as opened:
        opened.keep(range(COUNT // 2), device=DEVICE)
        found = []
        for _ in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                keep_busy()
                found.append(opened.gather(ids, device=DEVICE).clone())
        torch.cuda.synchronize()
    assert all(torch.equal(one.cpu(), rows[ids]) for one in found)


@needs_cuda
@pytest.mark.parametrize("kept_count", [0, COUNT // 2])
def test_the_next_rows_come_while_the_caller_computes(kept_count: int, path: Path, rows: torch.Tensor) -> None:
    """In a stream of ours; the caller's, whichever it is by then, waits for them alone."""
    with fp.RowStore(path, ahead_bytes="16MiB") as opened:
        opened.keep(range(kept_count), device=DEVICE)
        ids = [some_ids(count) for count in (3000, 2000, 1000)]
        tickets = [opened.prefetch(some, device=DEVICE) for some in ids]
        eventually(lambda: all(ticket.done() for ticket in tickets))
        found = [tickets[0].result()]
        assert tickets[1]._sent is not None
        assert tickets[2]._sent is None, "one ahead takes memory of the device for one"
        with torch.cuda.stream(torch.cuda.Stream()):
            keep_busy()
            found += [tickets[1].result() + 0, tickets[2].result() + 0]
        again = tickets[1].result()
        torch.cuda.synchronize()
    assert all(torch.equal(one.cpu(), rows[some]) for one, some in zip(found, ids, strict=True))
    assert torch.equal(again.cpu(), rows[ids[1]])


@pytest.fixture
def by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows are asked for, the device gathers those that are cached."""
    monkeypatch.setattr(device_rows, "_GATHERED_BYTES_MIN", 0)
    monkeypatch.setattr(device_rows, "_ROW_BYTES_MIN", 1)


@pytest.mark.usefixtures("by_device")
@needs_cuda
@pytest.mark.parametrize("cached_count", [1, COUNT // 2, COUNT])
def test_the_device_gathers_cached_rows(cached_count: int, path: Path, rows: torch.Tensor) -> None:
    with fp.RowStore(path, cache_bytes=cached_count * (rows[0].nbytes + 28)) as opened:
        opened.keep(range(0, 2 * cached_count, 2) if 2 * cached_count <= COUNT else range(cached_count))
        for ids in (some_ids(1), some_ids(3000), some_ids(600).view(20, 30), torch.empty(0, 3).long()):
            before = opened.stats()
            found = opened.gather(ids, device=DEVICE)
            assert torch.equal(found.cpu(), rows[ids])
            after = opened.stats()
            assert after.row_count - before.row_count == ids.numel()
            is_cached = ids % 2 == 0 if 2 * cached_count <= COUNT else ids < cached_count
            if cached_count > 1:
                assert after.hit_count - before.hit_count >= is_cached.sum()
            ticket = opened.prefetch(ids, device=DEVICE)
            assert torch.equal(ticket.result().cpu(), rows[ids])
            assert torch.equal(ticket.result().cpu(), rows[ids])
            unique, inverse = opened.gather_unique(ids, device=DEVICE)
            assert torch.equal(unique[inverse].cpu(), rows[ids])
        batches = [some_ids(count) for count in (500, 700, 3)]
        for batch, found in opened.ahead(batches, ids=lambda batch: batch, device=DEVICE):
            assert torch.equal(found.cpu(), rows[batch])


@pytest.mark.usefixtures("by_device")
@needs_cuda
def test_cached_rows_do_not_pass_through_the_host(
    path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    start = store.RowStore._start

    def count(self: fp.RowStore, native: object, ids: torch.Tensor, *rest: object) -> object:
        asked.append(ids.numel())
        return start(self, native, ids, *rest)  # type: ignore[arg-type]

    with fp.RowStore(path, cache_bytes=1 << 30) as opened:
        opened.keep(range(COUNT))
        opened.keep(range(100), device=DEVICE)
        monkeypatch.setattr(store.RowStore, "_start", count)
        assert torch.equal(opened.gather(range(COUNT), device=DEVICE).cpu(), rows)
        assert asked == [0]
        assert opened.stats().device_row_count == 100
        assert torch.equal(opened.gather(range(COUNT)), rows)
        assert asked == [0, COUNT], "for the CPU, the host gathers them"


@pytest.mark.usefixtures("by_device")
@needs_cuda
@pytest.mark.parametrize("what", ["shape", "memory", "pins", "refused"])
def test_the_host_gathers_what_the_device_cannot(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(300, dtype=torch.uint8).view(100, 3) if what == "shape" else torch.arange(100)[:, None]
    fp.write_rows(tmp_path / "table.npy", table)
    if what == "memory":
        monkeypatch.setattr(_native.RowStore, "gather_cached", refuse_memory)
    if what == "pins":
        monkeypatch.setattr(_native.RowStore, "gather_cached", lambda *arguments: arguments[4])
    if what == "refused":
        monkeypatch.setattr(_native.RowStore, "gather_cached", refuse_launch)
    by_device = count_gathers_by_device(monkeypatch)
    with fp.RowStore(tmp_path / "table.npy") as opened:
        opened.keep(range(100))
        before = opened.stats()
        for _ in range(2):
            assert torch.equal(opened.gather(range(100), device=DEVICE).cpu(), table)
        after = opened.stats()
    assert by_device == ([] if what == "memory" else [False, False])
    assert after.row_count - before.row_count == after.hit_count - before.hit_count == 200


def count_gathers_by_device(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each request for rows on the device, whether the device gathered some of them."""
    found: list[bool] = []
    cached_rows = store.cached_rows

    def counted(*arguments: Any) -> device_rows.CachedRows | None:
        cached = cached_rows(*arguments)
        found.append(cached is not None)
        return cached

    monkeypatch.setattr(store, "cached_rows", counted)
    return found


def refuse_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


def refuse_launch(*_: object) -> None:
    raise DeviceError("copying rows: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")


@pytest.mark.usefixtures("by_device")
@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_come_to_two_devices(path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    by_device = count_gathers_by_device(monkeypatch)
    with fp.RowStore(path, cache_bytes=COUNT * (rows[0].nbytes + 28)) as opened:
        opened.keep(range(COUNT))
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            found = opened.gather(range(COUNT), device=device)
            assert found.device == torch.device(device)
            assert torch.equal(found.cpu(), rows)
    assert by_device == [True] * 3


@needs_cuda
@pytest.mark.parametrize("width", [65, 66, 260, 1031])
def test_rows_of_any_length_come_by_the_kernel(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words of 4, 8, 16 and 4 bytes, more than 32 of them a row; and more rows than the kernel has warps."""
    table = make_rows(6000, width)
    fp.write_rows(tmp_path / "table.npy", table)
    by_device = count_gathers_by_device(monkeypatch)
    with fp.RowStore(tmp_path / "table.npy", cache_bytes=6000 * (table[0].nbytes + 28)) as opened:
        opened.keep(range(6000))
        ids = torch.randint(6000, (20_000,), generator=torch.Generator().manual_seed(width))
        assert torch.equal(opened.gather(ids, device=DEVICE).cpu(), table[ids])
    assert by_device == [True]


@needs_cuda
def test_a_few_cached_rows_are_left_to_the_host(
    path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rows, "_ROW_BYTES_MIN", 1)
    monkeypatch.setattr(device_rows, "_GATHERED_BYTES_MIN", 100 * rows[0].nbytes)
    by_device = count_gathers_by_device(monkeypatch)
    with fp.RowStore(path, cache_bytes=COUNT // 2 * (rows[0].nbytes + 28)) as opened:
        opened.keep(range(COUNT // 2))
        for first in (COUNT // 2 - 100, COUNT // 2 - 101):
            ids = torch.arange(first, COUNT)
            assert torch.equal(opened.gather(ids, device=DEVICE).cpu(), rows[ids])
    assert by_device == [False, True]


@pytest.mark.usefixtures("by_device")
@needs_cuda
def test_rows_that_were_not_cached_join_the_others_piece_by_piece(
    path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rows, "_AT_ONCE_BYTES", rows[0].nbytes * 50)
    with fp.RowStore(path, cache_bytes=COUNT // 2 * (rows[0].nbytes + 28)) as opened:
        opened.keep(range(COUNT // 2))
        for ids in (some_ids(3000), torch.arange(COUNT // 2 - 1, COUNT // 2 + 50)):
            assert torch.equal(opened.gather(ids, device=DEVICE).cpu(), rows[ids])


@pytest.mark.usefixtures("by_device")
@needs_cuda
def test_rows_come_into_the_cache_while_the_device_gathers(
    path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them in the place of one that the device is to read."""
    by_device = count_gathers_by_device(monkeypatch)
    with fp.RowStore(path, cache_bytes=COUNT // 4 * (rows[0].nbytes + 28)) as opened:
        opened.gather(range(COUNT // 4))
        end = threading.Event()

        def others() -> None:
            seed = 0
            while not end.is_set():
                seed += 1
                ids = torch.randint(COUNT, (500,), generator=torch.Generator().manual_seed(seed))
                assert torch.equal(opened.gather(ids), rows[ids])

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(others) for _ in range(2)]
            for count in range(100, 1100, 50):
                ids = some_ids(count)
                assert torch.equal(opened.gather(ids, device=DEVICE).cpu(), rows[ids])
            end.set()
            for one in running:
                one.result()
    assert all(by_device)


@pytest.mark.usefixtures("by_device")
@needs_cuda
def test_rows_asked_for_in_inference_mode_are_ordinary_ones(
    path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_device = count_gathers_by_device(monkeypatch)
    with fp.RowStore(path, cache_bytes=100 * (rows[0].nbytes + 28)) as opened:
        opened.keep(range(100))
        with torch.inference_mode():
            tickets = [opened.prefetch(some, device=DEVICE) for some in ([1, 2], [3, COUNT - 1], [COUNT - 2])]
        for ticket, some in zip(tickets, ([1, 2], [3, COUNT - 1], [COUNT - 2]), strict=True):
            found = ticket.result()
            assert not found.is_inference()
            assert torch.equal(found.cpu(), rows[some])
    assert by_device == [True, True, False]


@pytest.mark.usefixtures("by_device")
@needs_cuda
def test_threads_that_take_one_ticket_get_the_same_rows(path: Path, rows: torch.Tensor) -> None:
    with fp.RowStore(path, cache_bytes=COUNT // 2 * (rows[0].nbytes + 28)) as opened, ThreadPoolExecutor(4) as pool:
        opened.keep(range(0, COUNT, 2))
        for count in range(300, 400, 10):
            tickets = [opened.prefetch(some_ids(count + i), device=DEVICE) for i in range(2)]
            taken = [[pool.submit(ticket.result) for _ in range(2)] for ticket in tickets]
            for i, both in enumerate(taken):
                one, other = (future.result() for future in both)
                assert one.data_ptr() == other.data_ptr(), "they were completed once"
                assert torch.equal(one.cpu(), rows[some_ids(count + i)])


@pytest.mark.usefixtures("by_device")
@needs_cuda
def test_a_changed_table_is_noticed_though_all_rows_are_cached(path: Path) -> None:
    with fp.RowStore(path) as opened:
        opened.keep(range(10))
        os.utime(path, (1, 1))
        with pytest.raises(StorageError, match="has changed"):
            opened.gather(range(10), device=DEVICE)


@needs_cuda
def test_a_failure_is_told_to_who_takes_the_rows_and_to_no_other(path: Path, rows: torch.Tensor) -> None:
    with fp.RowStore(path) as opened:
        first = opened.prefetch(range(100), device=DEVICE)
        eventually(first.done)
        os.utime(path, (1, 1))
        second = opened.prefetch(range(100), device=DEVICE)
        eventually(second.done)
        assert torch.equal(first.result().cpu(), rows[:100])
        with pytest.raises(StorageError, match="has changed"):
            second.result()


@needs_cuda
def test_a_device_without_room_for_the_next_rows_fails_no_others(
    path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "send_rows", refuse_memory)
    with fp.RowStore(path) as opened:
        tickets = [opened.prefetch(range(1000), device=DEVICE) for _ in range(2)]
        eventually(lambda: all(ticket.done() for ticket in tickets))
        for ticket in tickets:
            assert torch.equal(ticket.result().cpu(), rows[:1000])


@needs_cuda
def test_rows_that_were_sent_and_given_up_are_gone(path: Path) -> None:
    with fp.RowStore(path) as opened:
        tickets = [opened.prefetch(range(1000), device=DEVICE) for _ in range(2)]
        eventually(lambda: all(ticket.done() for ticket in tickets))
        tickets[0].result()
        tickets[1].cancel()
        with pytest.raises(ConfigError, match="was cancelled"):
            tickets[1].result()


@needs_cuda
def test_a_changed_table_is_noticed_though_all_rows_are_on_the_device(path: Path) -> None:
    with fp.RowStore(path) as opened:
        opened.keep(range(10), device=DEVICE)
        os.utime(path, (1, 1))
        with pytest.raises(StorageError, match="has changed"):
            opened.gather(range(10), device=DEVICE)


@needs_cuda
def test_bad_ids_are_named_before_anything_is_looked_up(path: Path) -> None:
    with fp.RowStore(path) as opened:
        opened.keep(range(10), device=DEVICE)
        with pytest.raises(RowIndexError, match=rf"ids\[1\] is {COUNT}"):
            opened.gather([1, COUNT], device=DEVICE)


def test_an_embedding_for_ids_on_the_device(tmp_path: Path) -> None:
    table = random_tensor(1000 * 12).view(1000, 12)
    fp.write_rows(tmp_path / "table.npy", table.cpu())
    ids = torch.randint(1000, (7, 300)).to(DEVICE)
    with fp.RowStore(tmp_path / "table.npy") as opened:
        embedding = fp.RowEmbedding(opened)
        assert torch.equal(embedding(ids), torch.nn.functional.embedding(ids, table))
        ids[3, 200] = 1000
        with pytest.raises(RowIndexError, match=r"ids\[3, 200\] is 1000"):
            embedding(ids)
