"""Cached rows that a device gathers itself, by the native call that `fastpersist.rows.device_rows` makes.

Over the double of the driver, which copies the rows as the kernel does (tests/gpu/test_gpu_rows.py has a GPU run it).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import cuda_fixtures
from support.cuda_calls import HostMemory
from support.cuda_double import CudaDouble
from support.ranks_in_threads import eventually
from support.row_tables import bytes_of, make_rows

import fastpersist as fp
from fastpersist.errors import ConfigError, DeviceError

cuda = cuda_fixtures.cuda
driver = cuda_fixtures.driver
pinned = cuda_fixtures.pinned

COUNT, CACHED_COUNT = 4000, 3000
WIDTH = 32
ROW_BYTES = 4 * WIDTH
IDS = torch.randint(COUNT, (5000,), generator=torch.Generator().manual_seed(1))
OTHERS = (IDS >= CACHED_COUNT).nonzero().view(-1).tolist()


@pytest.fixture
def store(tmp_path: Path) -> fp.RowStore:
    fp.write_rows(tmp_path / "table.npy", make_rows(COUNT, WIDTH))
    opened = fp.RowStore(tmp_path / "table.npy", cache_bytes=CACHED_COUNT * (ROW_BYTES + 28))
    opened.gather(range(CACHED_COUNT))
    return opened


Gather = Callable[..., "list[int] | None"]


@pytest.fixture
def gather(store: fp.RowStore, cuda: CudaDouble, pinned: HostMemory) -> Gather:
    """Lets the device gather what is cached; returns the places of the other ids, or None if none was taken."""

    def gathered(target: int, stream: int, found_count_min: int = 1, ids: torch.Tensor = IDS) -> list[int] | None:
        other = torch.empty(len(ids), dtype=torch.int64)
        memory = (ids.data_ptr(), len(ids), pinned.address, other.data_ptr(), target, stream)
        count = store._opened().gather_cached(0, 0, *memory, found_count_min)
        return None if count == len(ids) else other[:count].tolist()

    return gathered


def test_cached_rows_come_to_the_device_and_the_others_are_named(
    store: fp.RowStore, gather: Gather, cuda: CudaDouble
) -> None:
    target, stream = cuda.alloc(len(IDS) * ROW_BYTES), cuda.stream_new()
    before = store.stats()
    with store:
        assert gather(target, stream) == OTHERS
        found = cuda.read(target, len(IDS) * ROW_BYTES)
        wanted = bytes_of(make_rows(COUNT, WIDTH)[IDS])
        for place in range(len(IDS)):
            row = slice(place * ROW_BYTES, (place + 1) * ROW_BYTES)
            assert found[row] == (b"\xab" * ROW_BYTES if place in set(OTHERS) else wanted[row])
        after = store.stats()
        assert after.hit_count - before.hit_count == after.row_count - before.row_count == len(IDS) - len(OTHERS)
    cuda.free(target)


def test_too_few_cached_rows_are_left_to_the_host(store: fp.RowStore, gather: Gather, cuda: CudaDouble) -> None:
    target, stream = cuda.alloc(len(IDS) * ROW_BYTES), cuda.stream_new()
    found_count = len(IDS) - len(OTHERS)
    before = store.stats()
    with store:
        assert gather(target, stream, found_count + 1) is None
        assert store.stats() == before
        assert gather(target, stream, found_count) == OTHERS
    cuda.free(target)


def test_nothing_is_gathered_where_nothing_can_be_pinned(store: fp.RowStore, gather: Gather, cuda: CudaDouble) -> None:
    cuda.set_registration_limit(1)
    with store:
        assert gather(0, cuda.stream_new()) is None


@pytest.mark.parametrize("call", ["cuModuleGetFunction", "cuLaunchKernel", "cuStreamSynchronize"])
def test_a_call_that_the_driver_refuses_is_an_error_and_ends_the_hold(
    call: str, store: fp.RowStore, gather: Gather, cuda: CudaDouble
) -> None:
    target, stream = cuda.alloc(len(IDS) * ROW_BYTES), cuda.stream_new()
    with store:
        cuda.fail(call, 1, 701)
        with pytest.raises(DeviceError, match=r"cuModuleGetFunction|cuda:0"):
            gather(target, stream)
        cuda.synchronize()
        store.keep(range(CACHED_COUNT, COUNT))  # in the slots that it held
        assert gather(target, stream) is not None
    cuda.free(target)


def test_rows_that_a_device_reads_leave_no_room_for_now(store: fp.RowStore, gather: Gather, cuda: CudaDouble) -> None:
    """The call does not return, and so other rows come into no slot, before the device has copied."""
    target, stream = cuda.alloc(CACHED_COUNT * ROW_BYTES), cuda.stream_new()
    with store, ThreadPoolExecutor(1) as pool:
        with cuda.blocked(stream):
            under_way = pool.submit(gather, target, stream, 1, torch.arange(CACHED_COUNT))
            eventually(lambda: cuda.call_count("cuStreamSynchronize") == 1)
            with pytest.raises(ConfigError, match=rf"10 of 10 .* holds {CACHED_COUNT}; of these, {CACHED_COUNT} are "):
                store.keep(range(CACHED_COUNT, CACHED_COUNT + 10))
            assert not under_way.done()
        assert under_way.result() == []
        store.keep(range(CACHED_COUNT, CACHED_COUNT + 10))
        assert cuda.read(target, CACHED_COUNT * ROW_BYTES) == bytes_of(make_rows(CACHED_COUNT, WIDTH))
    cuda.free(target)
