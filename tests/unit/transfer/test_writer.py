"""Writing to an open file: pieces of any place, memory that only torch can copy, and errors of disk and hooks.

Which engine is taken is test_engine_selection.py's.
"""

from __future__ import annotations

import errno
import gc
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import native_fixtures
from support.forking import SMALL_RING, in_child
from support.leaks import no_leaks
from support.states import differences, load_step, make_state, pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import ConfigError, InternalError, StorageError
from fastpersist.transfer import cuda, tensor_memory
from fastpersist.transfer import reader as transfer_reader
from fastpersist.transfer import writer as transfer_writer
from fastpersist.transfer.engine_selection import transfer_options
from fastpersist.transfer.writer import Pieces, Writer

EVERY = 2**64 - 1
CHUNK_BYTES = 64 << 10  # of the small ring


fault = native_fixtures.fault
open_file = native_fixtures.open_file


class HookError(Exception):
    pass


def assert_ring_is_free() -> None:
    assert _native.ring_free_count() == _native.ring_buffer_count()


def test_pieces_lie_one_behind_the_other(tmp_path: Path, open_file: Callable[..., int]) -> None:
    storage = torch.arange(50_000, dtype=torch.int32).untyped_storage()
    memory = bytes(storage)
    fd = open_file()
    with Writer(fd, "file.bin") as writer:
        pieces = Pieces()
        pieces.add_bytes(b"head")
        pieces.add_storage(storage, 0)
        pieces.add_crc(0)
        pieces.add_storage(storage, 1, offset_bytes=4, size_bytes=1000)
        pieces.add_storage(storage, None, offset_bytes=199_990)
        pieces.add_storage(torch.empty(0).untyped_storage(), 2)
        writer.append(pieces)
        writer.seek(409_600)
        tail = Pieces()
        tail.add_bytes(b"tail")
        writer.append(tail)
        assert writer.crcs(4) == [zlib.crc32(memory), zlib.crc32(memory[4:1004]), 0, 0]
        writer.finish()
    expected = b"head" + memory + zlib.crc32(memory).to_bytes(4, "little") + memory[4:1004] + memory[199_990:]
    content = (tmp_path / "file.bin").read_bytes()
    assert content[: len(expected)] == expected
    assert content[409_600:409_604] == b"tail"
    assert not any(content[409_604:])
    assert len(content) == 409_600 + 4096


@in_child({})
def test_writer_may_be_closed_again_but_not_used(open_file: Callable[..., int]) -> None:
    writer = Writer(open_file(), "file.bin")
    pieces = Pieces()
    pieces.add_bytes(bytes(10_000_000))
    writer.append(pieces)
    writer.close()
    writer.close()
    assert_ring_is_free()
    for use in (lambda: writer.crcs(1), lambda: writer.append(pieces), lambda: writer.seek(0), writer.finish):
        with pytest.raises(ConfigError, match=r"the writer of file\.bin is closed"):
            use()


def test_seek_between_blocks_is_refused(open_file: Callable[..., int]) -> None:
    with Writer(open_file(), "file.bin") as writer, pytest.raises(ConfigError, match="no multiple of 4096"):
        writer.seek(512)


def test_pieces_keep_storages_alive_and_let_them_go() -> None:
    storage = torch.zeros(10).untyped_storage()
    gone = weakref.ref(storage)
    pieces = Pieces()
    pieces.add_storage(storage, None)
    del storage
    gc.collect()
    assert gone() is not None
    del pieces
    gc.collect()
    assert gone() is None


# --- what an error of disk or hook leaves


@pytest.mark.parametrize("engine", ["uring", "libaio", "threads", "threads-buffered"])
def test_io_error_says_what_where_and_which_file(
    engine: str, tmp_path: Path, fault: Callable[..., None], leak_check: None
) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    fault(op="write", sys_errno=errno.EIO)
    with pytest.raises(StorageError, match=r"write to .*model\.pt at offset 0: ") as caught:
        fp.save(make_state(2), path, engine=f"fault:{engine}")
    assert (caught.value.errno, caught.value.offset_bytes) == (errno.EIO, 0)
    assert caught.value.filename == str(path)
    assert pending_files(tmp_path) == []
    fault(op="read", sys_errno=errno.EIO)
    with pytest.raises(StorageError, match=r"read of .*model\.pt at offset ") as caught:
        fp.load(path, engine=f"fault:{engine}")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert caught.value.offset_bytes is not None
    _native.clear_fault_plan()
    assert_ring_is_free()
    assert load_step(path) == 1
    fp.save(make_state(2), path, engine=f"fault:{engine}")
    assert load_step(path) == 2


@pytest.mark.parametrize("hook", ["pull", "poll"])
def test_exception_in_a_hook_comes_out_as_it_is(
    hook: str, open_file: Callable[..., int], fault: Callable[..., None]
) -> None:
    raised = HookError("from the hook")

    def fail(*arguments: object) -> None:
        raise raised

    fault(kind="delay", count=EVERY, delay_ms=120)
    options = transfer_options(open_file(), "file.bin", "fault:threads-buffered", placed=[])
    pieces = _native.PieceList()
    pieces.add_pulled(0, 1_000_000)
    hooks = {"pull": lambda *arguments: None} | {hook: fail}
    with pytest.raises(HookError) as caught:
        writer = _native.FileWriter(options, **hooks)
        writer.append(pieces)
        writer.finish()
    assert caught.value is raised
    with pytest.raises(InternalError, match="stopped by an exception"):
        writer.append(pieces)
    del writer
    caught = None
    raised.__traceback__ = None
    gc.collect()
    assert_ring_is_free()


@in_child({})
def test_error_of_a_ring_without_memory_is_made_while_other_threads_may_use_rings(
    open_file: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    class Probing(StorageError):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            counts.append(_native.ring_buffer_count())  # as another thread, which may get the GIL here

    monkeypatch.setattr("fastpersist.errors.StorageError", Probing)
    options = _native.TransferOptions(
        fd=open_file(),
        path="file.bin",
        engines=["threads-buffered"],
        ring_bytes=1 << 60,
        chunk_bytes=1 << 20,
        queue_depth=2,
    )
    with pytest.raises(Probing, match="FASTPERSIST_RING_BYTES"):
        _native.FileWriter(options)
    assert counts == [0]


# --- memory that only torch can copy


@pytest.fixture
def far_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No storage counts as host memory; returns the sizes of the pieces that torch was asked to copy."""
    sizes: list[int] = []
    real = tensor_memory.host_tensor

    def host_tensor(address: int, size_bytes: int) -> torch.Tensor:
        sizes.append(size_bytes)
        return real(address, size_bytes)

    monkeypatch.setattr(cuda, "is_host_memory", lambda storage: False)
    for side in (transfer_writer, transfer_reader):
        monkeypatch.setattr(side, "is_host_memory", lambda storage: False)
        monkeypatch.setattr(side, "host_tensor", host_tensor)
    return sizes


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_far_memory_round_trips_in_pieces_of_a_chunk(suffix: str, tmp_path: Path, far_memory: list[int]) -> None:
    @in_child(SMALL_RING)
    def test() -> None:
        path = tmp_path / f"model{suffix}"
        state = make_state(1)
        with no_leaks(tmp_path):
            fp.save(state, path)
            assert sum(far_memory) == sum(tensor.nbytes for tensor in state.values())
            assert max(far_memory) <= CHUNK_BYTES
            far_memory.clear()
            assert differences(fp.load(path, verify=True), state) == []
            assert sum(far_memory) == sum(tensor.nbytes for tensor in state.values())
            assert max(far_memory) <= CHUNK_BYTES
            target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            fp.load_into(path, target, verify=True)
            assert differences(target, state) == []
        assert_ring_is_free()

    test()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_far_memory_gives_the_same_file(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"model{suffix}"
    fp.save(make_state(1), path)
    near = path.read_bytes()
    monkeypatch.setattr(transfer_writer, "is_host_memory", lambda storage: False)
    fp.save(make_state(1), path)
    assert path.read_bytes() == near
    assert load_step(path) == 1


def test_far_views_of_one_storage_are_copied_once(tmp_path: Path, far_memory: list[int]) -> None:
    whole = torch.arange(30_000)
    fp.save({"whole": whole, "part": whole[100:200], "strided": whole[::2]}, tmp_path / "model.pt")
    assert sum(far_memory) == whole.nbytes
    loaded = fp.load(tmp_path / "model.pt")
    assert torch.equal(loaded["strided"], whole[::2])
    assert loaded["part"].data_ptr() == loaded["whole"].data_ptr() + 800
