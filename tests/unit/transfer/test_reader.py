"""Reading extents of an open file, of any place and order, and what an error of file or hook leaves."""

from __future__ import annotations

import gc
import random
import zlib
from collections.abc import Callable

import pytest
import torch
from support import native_fixtures

from fastpersist import _native
from fastpersist.errors import StorageError
from fastpersist.transfer import reader
from fastpersist.transfer.engine_selection import transfer_options
from fastpersist.transfer.reader import Extents, read_extents

EVERY = 2**64 - 1

fault = native_fixtures.fault
open_file = native_fixtures.open_file


class HookError(Exception):
    pass


def assert_ring_is_free() -> None:
    assert _native.ring_free_count() == _native.ring_buffer_count()


def test_extents_of_any_place_and_order_are_right(open_file: Callable[..., int]) -> None:
    content = random.Random(1).randbytes(1_000_003)
    fd = open_file(content=content)
    places = [(500_000, 70_000), (0, 10), (999_000, 1003), (500_100, 5), (12_345, 0), (4095, 200_002), (0, 10)]
    storages = [torch.UntypedStorage(size) for _, size in places]
    extents = Extents()
    for number, ((offset, _), storage) in enumerate(zip(places, storages, strict=True)):
        assert extents.add_storage(offset, storage, with_crc=number != 1) == number
    checked = extents.add_checked(0, len(content))
    received = bytearray(3000)

    def push(offset: int, data: torch.Tensor) -> None:
        received[offset : offset + data.numel()] = data.numpy().tobytes()

    pushed = extents.add_pushed(7, len(received), push, with_crc=True)
    assert len(extents) == 9
    result = read_extents(fd, "file.bin", extents)
    for (offset, size), storage in zip(places, storages, strict=True):
        assert bytes(storage) == content[offset : offset + size]
    expected = [zlib.crc32(content[offset : offset + size]) for offset, size in places]
    expected[1] = 0
    assert result.crcs[:7] == expected
    assert result.crcs[checked] == zlib.crc32(content)
    assert bytes(received) == content[7:3007]
    assert result.crcs[pushed] == zlib.crc32(content[7:3007])
    assert result.engine in _native.engine_names()


def test_no_extents_are_no_transfer() -> None:
    assert read_extents(-1, "file.bin", Extents()).crcs == []


def test_extent_beyond_the_end_is_an_error(open_file: Callable[..., int]) -> None:
    extents = Extents()
    extents.add_checked(90, 11)
    with pytest.raises(StorageError, match=r"file\.bin.*the file ends before") as caught:
        read_extents(open_file(content=bytes(100)), "file.bin", extents)
    assert caught.value.errno is None


@pytest.mark.parametrize("hook", ["push", "poll"])
def test_exception_in_a_hook_comes_out_as_it_is(
    hook: str, open_file: Callable[..., int], fault: Callable[..., None]
) -> None:
    raised = HookError("from the hook")

    def fail(*arguments: object) -> None:
        raise raised

    fault(kind="delay", count=EVERY, delay_ms=120)
    fd = open_file(content=bytes(1_000_000))
    options = transfer_options(fd, "file.bin", "fault:threads-buffered", placed=[], for_reading=True)
    extents = _native.ExtentList()
    extents.add_pushed(0, 1_000_000, 0)
    hooks = {"push": lambda *arguments: None} | {hook: fail}
    with pytest.raises(HookError) as caught:
        _native.read_extents(options, extents, **hooks)
    assert caught.value is raised
    caught = None
    raised.__traceback__ = None
    gc.collect()
    assert_ring_is_free()


def test_poll_hears_how_much_is_done(open_file: Callable[..., int], fault: Callable[..., None]) -> None:
    done = []
    fault(kind="delay", count=EVERY, delay_ms=120)
    extents = Extents()
    extents.add_checked(0, 100_000)
    fd = open_file(content=bytes(100_000))
    read_extents(fd, "file.bin", extents, engine="fault:threads-buffered", poll=done.append)
    assert done
    assert done == sorted(done)
    assert done[-1] <= 100_000


def test_read_exactly_reads_whole_or_says_where_the_file_ends(open_file: Callable[..., int]) -> None:
    fd = open_file(content=b"0123456789")
    assert reader.read_exactly(fd, 2, 5, "file.bin") == b"23456"
    assert reader.read_exactly(fd, 10, 0, "file.bin") == b""
    with pytest.raises(StorageError, match=r"file\.bin ends at (offset )?10"):
        reader.read_exactly(fd, 8, 3, "file.bin")
