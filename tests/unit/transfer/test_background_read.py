"""A read beside the caller's thread gives the bytes, or the error, and never outlives its block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import native_fixtures

import fastpersist as fp
from fastpersist.transfer import background_read, progress
from fastpersist.transfer.background_read import BackgroundRead
from fastpersist.transfer.reader import Extents

open_file = native_fixtures.open_file


def extents_into(target: torch.Tensor) -> Extents:
    extents = Extents()
    extents.add_memory(0, target.numel(), target.data_ptr(), target, with_crc=True)
    return extents


def test_bytes_are_there_after_the_wait(open_file: Callable[..., int], tmp_path: Path) -> None:
    target = torch.zeros(9, dtype=torch.uint8)
    fd = open_file("file.bin", b"123456789")
    with BackgroundRead(fd, str(tmp_path / "file.bin"), extents_into(target)) as read:
        assert read.wait().crcs == [0xCBF43926]
        assert bytes(target.tolist()) == b"123456789"


def test_error_is_raised_by_the_wait(open_file: Callable[..., int], tmp_path: Path) -> None:
    target = torch.zeros(9, dtype=torch.uint8)
    with BackgroundRead(open_file("file.bin", b"12"), str(tmp_path / "file.bin"), extents_into(target)) as read:
        with pytest.raises(fp.StorageError, match="file ends"):
            read.wait()


def test_the_bar_around_it_counts_and_may_stop_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def count(more_bytes: int) -> None:
        seen.append(more_bytes)
        if sum(seen) > 40:
            raise LookupError("enough")

    def read(_fd: int, _path: str, _extents: Extents, *, engine: str, poll: Callable[[int], None]) -> Any:
        told = progress.counted(poll)
        assert told is not None
        told(40)
        told(50)

    monkeypatch.setattr(background_read, "read_extents", read)
    token = progress._count.set(count)
    try:
        with BackgroundRead(-1, "model.pt", Extents()) as reading:
            with pytest.raises(LookupError, match="enough"):
                reading.wait()
    finally:
        progress._count.reset(token)
    assert seen == [40, 10]


def test_exception_of_the_block_stops_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def read(_fd: int, _path: str, _extents: Extents, *, engine: str, poll: Callable[[int], None]) -> Any:
        try:
            while True:
                poll(0)
        finally:
            ended.append(True)

    monkeypatch.setattr(background_read, "read_extents", read)
    with pytest.raises(LookupError, match="of the block"), BackgroundRead(-1, "model.pt", Extents()):
        raise LookupError("of the block")
    assert ended == [True]
