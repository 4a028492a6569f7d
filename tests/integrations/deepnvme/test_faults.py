"""DeepNVMe's names when things go wrong: replaced files, errors of arguments and of the disk, validation, forks."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import deepnvme_handles
from support.deepnvme_handles import SIZE, Handle, contents, some_bytes
from support.forking import run_in_child

import fastpersist as fp
from fastpersist import _native
from fastpersist.integrations.deepnvme import aio_handle, operations

torch.set_num_threads(1)

handle = deepnvme_handles.handle
source = deepnvme_handles.source


# --- which file


def test_a_file_that_was_replaced_is_never_taken_for_the_new_one(handle: Handle, source: Path, tmp_path: Path) -> None:
    buffer = torch.empty(SIZE, dtype=torch.uint8)
    handle.sync_pread(buffer, source)
    for seed in (2, 3):
        (tmp_path / "other.bin").write_bytes(bytes(some_bytes(seed=seed).tolist()))
        os.replace(tmp_path / "other.bin", source)
        handle.sync_pread(buffer, source)
        assert torch.equal(buffer, some_bytes(seed=seed))
    source.unlink()
    with pytest.raises(fp.StorageError):
        handle.sync_pread(buffer, source)
    handle.sync_pwrite(some_bytes(seed=4), source)
    assert torch.equal(contents(source), some_bytes(seed=4))
    source.unlink()
    handle.sync_pwrite(some_bytes(50, seed=5), source)
    assert torch.equal(contents(source), some_bytes(50, seed=5))


def test_a_file_that_grows_or_shrinks_under_another_name_is_seen_as_it_is(handle: Handle, source: Path) -> None:
    buffer = torch.empty(SIZE, dtype=torch.uint8)
    handle.sync_pread(buffer, source)
    os.truncate(source, 10)
    with pytest.raises(fp.EndOfFileError):
        handle.sync_pread(buffer, source)
    with open(source, "ab") as file:
        file.write(bytes(some_bytes(SIZE, seed=9).tolist()))
    handle.sync_pread(buffer, source, 10)
    assert torch.equal(buffer, some_bytes(SIZE, seed=9))


def test_repeated_operations_open_a_file_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    class Counted(fp.TensorFile):
        def __init__(self, path: Any, mode: str = "r", **keywords: Any) -> None:
            opened.append((Path(path).name, mode))
            super().__init__(path, mode, **keywords)

    monkeypatch.setattr(operations, "TensorFile", Counted)
    handle = aio_handle()
    buffer = torch.empty(SIZE, dtype=torch.uint8)
    for _ in range(5):
        handle.sync_pread(buffer, source)
    assert opened == [("source.bin", "r")]
    opened.clear()
    for _ in range(5):
        handle.async_pwrite(buffer, source)
    handle.wait()
    assert opened == [("source.bin", "r+")]


def test_a_file_that_was_written_and_removed_gives_its_space_back(tmp_path: Path) -> None:
    handle = aio_handle()
    handle.sync_pwrite(torch.empty(SIZE, dtype=torch.uint8), tmp_path / "a.bin")
    (tmp_path / "a.bin").unlink()
    held = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            held.append(os.readlink(f"/proc/self/fd/{fd}"))
    assert held
    assert not [name for name in held if "a.bin" in name]


def test_one_file_stays_open_whatever_was_used(handle: Handle, tmp_path: Path) -> None:
    counts = set()
    for number in range(20):
        handle.sync_pwrite(some_bytes(100, seed=number), tmp_path / f"{number}.bin")
        counts.add(len(os.listdir("/proc/self/fd")))
    assert len(counts) == 1


# --- errors


def test_a_file_that_is_not_there_is_an_error_at_once(handle: Handle, tmp_path: Path) -> None:
    for method in (handle.sync_pread, handle.async_pread):
        with pytest.raises(fp.StorageError, match=r"no\.bin") as raised:
            method(some_bytes(), tmp_path / "no.bin")
        assert raised.value.errno == errno.ENOENT
    for method in (handle.sync_pwrite, handle.async_pwrite):
        with pytest.raises(fp.StorageError, match=r"no/a\.bin") as raised:
            method(some_bytes(), tmp_path / "no" / "a.bin")
        assert raised.value.errno == errno.ENOENT
    assert handle.wait() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("buffer", "offset_bytes", "reason"),
    [
        (torch.arange(12).view(3, 4).t(), 0, "contiguous"),
        (torch.empty(3, device="meta"), 0, "meta"),
        ([1, 2, 3], 0, "tensor"),
        (torch.ones(3), -1, "-1"),
        (torch.ones(3), 1.5, r"1\.5"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(
    buffer: Any, offset_bytes: Any, reason: str, handle: Handle, source: Path
) -> None:
    for method in (handle.sync_pread, handle.async_pread, handle.sync_pwrite, handle.async_pwrite):
        with pytest.raises(fp.ConfigError, match=reason):
            method(buffer, source, offset_bytes)
    assert handle.wait() == 0
    assert torch.equal(contents(source), some_bytes())


@pytest.mark.parametrize("buffer", [torch.arange(12).view(3, 4).t(), torch.empty(3, device="meta"), [1, 2, 3]])
def test_a_refused_write_makes_no_file(buffer: Any, handle: Handle, tmp_path: Path) -> None:
    for method in (handle.sync_pwrite, handle.async_pwrite):
        with pytest.raises(fp.ConfigError):
            method(buffer, tmp_path / "new.bin")
    assert not (tmp_path / "new.bin").exists()


def test_what_is_no_name_is_refused(handle: Handle) -> None:
    for nonsense in (None, 1.5, ["a.bin"]):
        with pytest.raises(fp.ConfigError, match="filename"):
            handle.sync_pread(some_bytes(), nonsense)  # type: ignore[arg-type]
    with pytest.raises(fp.ConfigError, match="filename"):
        handle.sync_pwrite(some_bytes(), 3)  # type: ignore[arg-type]  # only async_pwrite takes descriptors
    for method in (handle.sync_pread, handle.async_pread, handle.sync_pwrite, handle.async_pwrite):
        with pytest.raises(fp.ConfigError, match="null character"):
            method(some_bytes(), "a\0b")


def test_arguments_that_do_not_exist_or_lack_are_told_as_python_does(handle: Handle, source: Path) -> None:
    buffer = torch.empty(3)
    with pytest.raises(TypeError, match="async"):
        handle.pread(buffer, source, False)
    with pytest.raises(TypeError, match="asink"):
        handle.pwrite(buffer, source, False, False, asink=True)
    with pytest.raises(TypeError):
        handle.async_pwrite(buffer)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        handle.async_pwrite(buffer, source, 0, validate=True)  # type: ignore[call-overload]


def test_a_read_beyond_the_end_is_an_error_with_the_count(handle: Handle, source: Path) -> None:
    buffer = torch.zeros(SIZE + 1, dtype=torch.uint8)
    with pytest.raises(fp.EndOfFileError, match=str(SIZE)) as raised:
        handle.sync_pread(buffer, source)
    assert raised.value.done_bytes == SIZE
    assert torch.equal(buffer[:SIZE], some_bytes())
    with pytest.raises(fp.EndOfFileError):
        handle.read(buffer, source, False)


def test_wait_raises_the_first_error_when_all_others_are_done(
    handle: Handle, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffers = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(4)]
    for number, buffer in enumerate(buffers):
        handle.async_pread(buffer, source, number % 2 * (SIZE - number))  # the second and fourth reach beyond
    with pytest.raises(fp.EndOfFileError) as raised:
        handle.wait()
    assert raised.value.done_bytes == 1
    assert torch.equal(buffers[0], some_bytes())
    assert torch.equal(buffers[2], some_bytes())
    others = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(others) == 1
    assert "another operation failed too" in others[0]
    assert handle.wait() == 0
    handle.async_pread(buffers[1], source)
    assert handle.wait() == 1


def test_what_fails_and_nobody_waits_for_is_in_the_log(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    handle = aio_handle()
    handle.async_pread(torch.empty(SIZE + 1, dtype=torch.uint8), source)
    del handle
    gc.collect()
    assert "an operation that no call waited for failed" in caplog.text


@pytest.mark.parametrize(("sys_errno", "kind"), [(errno.EIO, fp.StorageError), (errno.ENOSPC, fp.NoSpaceError)])
def test_errors_of_the_disk_are_raised(sys_errno: int, kind: type[fp.StorageError], tmp_path: Path) -> None:
    def work(_report: object) -> None:
        handle = aio_handle()
        path = tmp_path / "a.bin"
        tensor = some_bytes(1 << 20)
        for fails in (
            lambda: handle.sync_pwrite(tensor, path),
            lambda: handle.async_pwrite(tensor, path) or handle.wait(),
        ):
            _native.set_fault_plan(_native.FaultPlan(op="write", nth=1, sys_errno=sys_errno))
            with pytest.raises(kind, match=r"a\.bin") as raised:
                fails()
            assert raised.value.errno == sys_errno
            assert _native.clear_fault_plan() > 0
        assert handle.sync_pwrite(tensor, path) == 1
        assert torch.equal(contents(path), tensor)

    run_in_child(work, {"FASTPERSIST_ENGINE": "fault:threads"})


# --- validation


class Liar(fp.TensorFile):
    """Moves other bytes than it is asked to, at one place."""

    place = SIZE - 2

    def write_async(self, tensor: torch.Tensor, offset_bytes: int = 0) -> fp.PendingIO:
        other = tensor.clone()
        other[self.place] += 1
        return super().write_async(other, offset_bytes)

    def read_async(self, tensor: torch.Tensor, offset_bytes: int = 0) -> fp.PendingIO:
        pending = super().read_async(tensor, offset_bytes)
        pending.wait()
        tensor[self.place] += 1
        return pending


@pytest.mark.parametrize("way", ["synchronous", "asynchronous", "simple"])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_validation_finds_the_first_byte_that_differs(
    way: str, direction: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "TensorFile", Liar)
    monkeypatch.setattr(operations, "_COMPARED_BYTES", 4096)
    handle = aio_handle()
    tensor = some_bytes(seed=3)
    if way == "simple":
        function: Any = getattr(handle, direction)
        arguments: tuple[object, ...] = ()
    else:
        function = getattr(handle, f"p{direction}")
        arguments = (way == "asynchronous",)
    assert function(tensor, source, False, *arguments) in (0, 1)  # nobody looks
    assert handle.wait() == (way == "asynchronous")
    with pytest.raises(fp.CorruptionError, match=r"source\.bin.*other bytes") as raised:
        function(tensor, source, True, *arguments)
        handle.wait()
    assert raised.value.offset_bytes == Liar.place
    assert handle.wait() == 0


def test_validation_looks_at_the_file_that_was_written(handle: Handle, source: Path, tmp_path: Path) -> None:
    handle.pwrite(some_bytes(seed=3), source, True, True)
    (tmp_path / "other.bin").write_bytes(b"of others")
    os.replace(tmp_path / "other.bin", source)
    assert handle.wait() == 1


def test_validation_finds_that_the_file_is_too_short(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(fp.TensorFile):
        def write_async(self, tensor: torch.Tensor, offset_bytes: int = 0) -> fp.PendingIO:
            pending = super().write_async(tensor, offset_bytes)
            self.truncate(1000)
            return pending

    monkeypatch.setattr(operations, "TensorFile", Short)
    with pytest.raises(fp.CorruptionError) as raised:
        aio_handle().write(some_bytes(), source, True)
    assert raised.value.offset_bytes == 1000


# --- fork


def test_a_forked_child_starts_with_nothing_under_way(handle: Handle, source: Path, tmp_path: Path) -> None:
    buffer = torch.zeros(SIZE, dtype=torch.uint8)
    handle.sync_pread(buffer, source)
    for number in range(20):
        handle.async_pwrite(some_bytes(seed=number), tmp_path / "a.bin", number * SIZE)

    def work(_report: object) -> None:
        assert handle.wait() == 0
        again = torch.zeros(SIZE, dtype=torch.uint8)
        assert handle.sync_pread(again, source) == 1
        assert torch.equal(again, buffer)
        assert handle.async_pwrite(again, tmp_path / "child.bin") == 0
        assert handle.wait() == 1

    run_in_child(work)
    assert handle.wait() == 20
    assert torch.equal(contents(tmp_path / "child.bin"), buffer)
    assert torch.equal(contents(tmp_path / "a.bin"), torch.cat([some_bytes(seed=number) for number in range(20)]))
