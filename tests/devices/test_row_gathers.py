"""Cached rows that a device gathers itself, by the native calls that `fastpersist.rows.device_rows` makes.

Over the double of the driver, which copies the rows as the kernel does (tests/gpu/test_gpu_rows.py has a GPU run it).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import cuda_fixtures
from support.cuda_calls import HostMemory
from support.cuda_double import CudaDouble
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


@pytest.fixture
def store(tmp_path: Path) -> fp.RowStore:
    fp.write_rows(tmp_path / "table.npy", make_rows(COUNT, WIDTH))
    opened = fp.RowStore(tmp_path / "table.npy", cache_bytes=CACHED_COUNT * (ROW_BYTES + 28))
    opened.gather(range(CACHED_COUNT))
    return opened


def gather(store: fp.RowStore, scratch: HostMemory, target: int, stream: int) -> list[int]:
    """Let the device gather what is cached of IDS; return the places of the others."""
    hold = store._opened().hold(0, 0)
    assert hold is not None
    other = torch.empty(len(IDS), dtype=torch.int64)
    try:
        count = hold.gather(IDS.data_ptr(), len(IDS), scratch.address, other.data_ptr(), target, stream)
    finally:
        hold.end(0)
    return other[:count].tolist()


def test_cached_rows_come_to_the_device_and_the_others_are_named(
    store: fp.RowStore, cuda: CudaDouble, pinned: HostMemory
) -> None:
    target, stream = cuda.alloc(len(IDS) * ROW_BYTES), cuda.stream_new()
    with store:
        others = gather(store, pinned, target, stream)
        cuda.stream_synchronize(stream)
        assert others == (IDS >= CACHED_COUNT).nonzero().view(-1).tolist()
        found = cuda.read(target, len(IDS) * ROW_BYTES)
        wanted = bytes_of(make_rows(COUNT, WIDTH)[IDS])
        for place in range(len(IDS)):
            row = slice(place * ROW_BYTES, (place + 1) * ROW_BYTES)
            assert found[row] == (b"\xab" * ROW_BYTES if place in set(others) else wanted[row])
    cuda.free(target)


@pytest.mark.parametrize("why", ["pins", "kernel"])
def test_a_device_that_cannot_gather_leaves_it_to_the_host(why: str, store: fp.RowStore, cuda: CudaDouble) -> None:
    if why == "pins":
        cuda.set_registration_limit(1)
    else:
        cuda.fail("cuModuleGetFunction", 1, 2)
    with store:
        assert store._opened().hold(0, 0) is None


def test_a_refused_launch_is_an_error_of_the_device(store: fp.RowStore, cuda: CudaDouble, pinned: HostMemory) -> None:
    target, stream = cuda.alloc(len(IDS) * ROW_BYTES), cuda.stream_new()
    with store:
        cuda.fail("cuLaunchKernel", 1, 701)
        with pytest.raises(DeviceError, match="copying rows to cuda:0"):
            gather(store, pinned, target, stream)
        others = gather(store, pinned, target, stream)
        assert len(others) == int((IDS >= CACHED_COUNT).sum())
        cuda.stream_synchronize(stream)
    cuda.free(target)


def test_rows_that_a_device_reads_leave_no_room_for_now(
    store: fp.RowStore, cuda: CudaDouble, pinned: HostMemory
) -> None:
    target, stream = cuda.alloc(CACHED_COUNT * ROW_BYTES), cuda.stream_new()
    cached = torch.arange(CACHED_COUNT)
    with store:
        hold = store._opened().hold(0, 0)
        assert hold is not None
        other = torch.empty(CACHED_COUNT, dtype=torch.int64)
        assert hold.gather(cached.data_ptr(), CACHED_COUNT, pinned.address, other.data_ptr(), target, stream) == 0
        rows_to_keep = range(CACHED_COUNT, CACHED_COUNT + 10)
        try:
            with pytest.raises(ConfigError, match=rf"10 of 10 .* holds {CACHED_COUNT}; of these, {CACHED_COUNT} are "):
                store.keep(rows_to_keep)
            cuda.stream_synchronize(stream)
        finally:
            hold.end(CACHED_COUNT)
        store.keep(rows_to_keep)
    cuda.free(target)
