"""PageWriter: pages at any place, many at once, with every engine, and beside a record lock on the file."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.leaks import no_leaks

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import ConfigError, StorageError
from fastpersist.transfer.page_writer import PageWriter, page_tensor

ENGINES = [name for name in _native.engine_names() if not name.startswith(("null", "fault", "cufile"))]


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with no_leaks(tmp_path):
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        yield fd
        os.close(fd)


def pages(count: int, value: int) -> torch.Tensor:
    return page_tensor(4096 * count).fill_(value)


def test_a_page_tensor_begins_on_a_page() -> None:
    for size_bytes in (0, 1, 4096, 10_000):
        tensor = page_tensor(size_bytes)
        assert tensor.numel() == size_bytes
        assert tensor.data_ptr() % 4096 == 0


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_pages_go_where_they_belong(fd: int, tmp_path: Path, engine: str) -> None:
    if engine != "auto" and not next(probe for probe in fp.engines(tmp_path) if probe.name == engine).usable:
        pytest.skip(f"{engine} is not usable here")
    writer = PageWriter(fd, str(tmp_path / "file"), engine=engine)
    try:
        begun = [writer.write_async(pages(3000, 2), 4096 * 5), writer.write_async(pages(1, 1), 0)]
        for request in begun:
            request.wait()
    finally:
        writer.close()
    data = (tmp_path / "file").read_bytes()
    assert data == b"\1" * 4096 + bytes(4 * 4096) + b"\2" * (4096 * 3000)


def test_what_is_no_page_is_refused(fd: int) -> None:
    writer = PageWriter(fd, "file")
    try:
        for tensor, offset_bytes in ((pages(1, 0)[:100], 0), (pages(1, 0), 512), (pages(2, 0)[64 : 4096 + 64], 0)):
            with pytest.raises(ConfigError, match="no whole pages"):
                writer.write_async(tensor, offset_bytes)
    finally:
        writer.close()
    for engine in ("null", "no such engine"):
        with pytest.raises(ConfigError):
            PageWriter(fd, "file", engine=engine)


def test_a_failed_write_is_an_error_of_its_request(fd: int) -> None:
    writer = PageWriter(fd, "file", engine="fault:threads")
    _native.set_fault_plan(_native.FaultPlan(op="write", nth=1))
    try:
        failed = writer.write_async(pages(1, 1), 4096)
        with pytest.raises(StorageError, match="offset 4096"):
            failed.wait()
        writer.write_async(pages(1, 1), 4096).wait()
    finally:
        _native.clear_fault_plan()
        writer.close()
