"""RowWriter: tables that stock readers read, what is refused, and rows that an error leaves for the next writer."""

from __future__ import annotations

import errno
import gc
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.filesystems import FailingFilesystem, FullAtSync
from support.forking import run_in_child
from support.leaks import no_leaks
from support.row_tables import hidden_files, make_rows, read_rows
from support.specimens import DTYPES

import fastpersist as fp
from fastpersist.commit.file_commit import PendingFile
from fastpersist.commit.filesystem import using
from fastpersist.errors import ChecksumError, ConfigError, NoSpaceError, StorageError
from fastpersist.formats import npy, safetensors
from fastpersist.rows import writer as writer_module
from fastpersist.rows.opening import open_rows
from fastpersist.rows.sidecar import CHUNK_BYTES, sidecar_path
from fastpersist.rows.verification import verify_rows
from fastpersist.rows.writer import RowWriter, write_rows
from fastpersist.transfer.page_writer import PageWriter

WIDTH = 160  # 640 bytes: rows that straddle pages, chunks and buffers
ROW_BYTES = 4 * WIDTH
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that they are a prototype
    NESTED = torch.nested.nested_tensor([make_rows(2, WIDTH), make_rows(1, WIDTH)])


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Buffers of a chunk, and progress after each two: some MiB are many of both."""
    monkeypatch.setattr(writer_module, "_BUFFER_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(writer_module, "PROGRESS_BYTES", 2 * CHUNK_BYTES)
    with no_leaks():
        yield
        gc.collect()


def int32_writer(path: Path, **options: Any) -> RowWriter:
    return RowWriter(path, (WIDTH,), torch.int32, **options)


def expect_table(path: Path, count: int) -> None:
    assert torch.equal(read_rows(open_rows(path)), make_rows(count, WIDTH))
    report = verify_rows(path)
    assert report.ok, report
    assert report.has_checksums
    assert hidden_files(path.parent) == []


@pytest.mark.parametrize("resume", [False, True])
def test_second_writer_of_a_table_is_refused(tmp_path: Path, resume: bool) -> None:
    path = tmp_path / "table.npy"
    rows = make_rows(10_000, WIDTH)
    with int32_writer(path, resume=resume) as writer:
        writer.append(rows[:5000])
        for other in (True, False):
            with pytest.raises(ConfigError, match=r"table.npy is being written already \(.*pending-"):
                int32_writer(path, resume=other, overwrite=True).__enter__()

        def other_process(report: Any) -> None:
            with pytest.raises(ConfigError, match="being written already"):
                write_rows(path, rows)

        run_in_child(other_process)
        assert len(hidden_files(tmp_path)) == 1
        writer.append(rows[5000:])
    expect_table(path, 10_000)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 1638, 1639, 10_000])
def test_stock_readers_read_the_table(tmp_path: Path, suffix: str, count: int) -> None:
    path = tmp_path / f"table{suffix}"
    rows = make_rows(count, WIDTH)
    with int32_writer(path) as writer:
        for part in rows.split(777):
            writer.append(part)
        assert writer.row_count == count
        assert not path.exists()
    expect_table(path, count)
    (piece,) = open_rows(path).pieces
    assert piece.offset_bytes == 4096
    if suffix == ".npy":
        mapped = np.load(path, mmap_mode="r")
        assert mapped.offset == 4096
        assert np.array_equal(mapped, rows.numpy())
    else:
        assert torch.equal(load_file(path)["rows"], rows)
        assert torch.equal(fp.load(path, verify=True)["rows"], rows)
        assert fp.verify(path).has_checksums


@settings(max_examples=20)
@given(st.lists(st.integers(0, 4000), max_size=6), st.sampled_from([1, 7, 160, 100_000]))
def test_any_chunks_make_the_same_file(tmp_path_factory: pytest.TempPathFactory, counts: list[int], width: int) -> None:
    directory = tmp_path_factory.mktemp("chunks")
    counts = [count * 7 // width for count in counts] if width > 1000 else counts
    rows = make_rows(sum(counts), width)
    with RowWriter(directory / "parts.npy", (width,), torch.int32) as writer:
        for part in rows.split(counts or [0]):
            writer.append(part)
    write_rows(directory / "whole.npy", rows)
    assert (directory / "parts.npy").read_bytes() == (directory / "whole.npy").read_bytes()
    crcs = [load_file(sidecar_path(str(directory / name)))["crc32"] for name in ("parts.npy", "whole.npy")]
    assert torch.equal(*crcs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_into_a_format(tmp_path: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    rows = torch.arange(6 * 4 * dtype.itemsize, dtype=torch.uint8).view(6, -1)
    rows = (rows % 2).bool() if dtype == torch.bool else rows.view(dtype)
    for suffix, names in ((".npy", npy.DTYPE_NAMES), (".safetensors", safetensors.DTYPE_NAMES)):
        path = tmp_path / f"table{suffix}"
        if name not in names:
            with pytest.raises(ConfigError, match=r"safetensors|\.npy"):
                write_rows(path, rows)
            continue
        write_rows(path, rows)
        found = read_rows(open_rows(path))
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))


def test_rows_of_any_memory(tmp_path: Path) -> None:
    rows = make_rows(60, 4)
    read_only = rows.numpy()
    read_only.flags.writeable = False
    with warnings.catch_warnings(), RowWriter(tmp_path / "table.npy", (4,), torch.int32) as writer:
        warnings.simplefilter("error")
        writer.append(rows[:10])
        writer.append(rows[:30:3].flip(0).flip(0))
        writer.append(rows.t().contiguous().t()[20:30])
        writer.append(read_only[30:40])
        writer.append(np.asfortranarray(rows.numpy()[40:50]))
        writer.append(rows.numpy()[::-1][:10])
        writer.append(np.zeros((0, 4), np.int32))
        writer.append(rows.float().requires_grad_().int())
    found = read_rows(open_rows(tmp_path / "table.npy"))
    expected = [rows[:10], rows[:30:3], rows[20:30], rows[30:40], rows[40:50], rows.flip(0)[:10], rows.float().int()]
    assert torch.equal(found, torch.cat(expected))


def test_rows_of_one_dimension_and_of_three(tmp_path: Path) -> None:
    write_rows(tmp_path / "flat.npy", torch.arange(7.0))
    assert np.load(tmp_path / "flat.npy").tolist() == list(range(7))
    write_rows(tmp_path / "deep.npy", make_rows(6, 8).view(6, 2, 4))
    assert open_rows(tmp_path / "deep.npy").row_shape == (2, 4)


def test_the_caller_may_change_rows_at_once(tmp_path: Path) -> None:
    rows = torch.empty(100, WIDTH, dtype=torch.int32)
    with int32_writer(tmp_path / "table.npy") as writer:
        for first in range(0, 10_000, 100):
            rows.copy_(make_rows(100, WIDTH, first))
            writer.append(rows)
            rows.zero_()
    expect_table(tmp_path / "table.npy", 10_000)


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (torch.zeros(3, WIDTH), "torch.float32"),
        (torch.zeros(3, WIDTH + 1, dtype=torch.int32), r"\[3, 161\]"),
        (torch.zeros(WIDTH, dtype=torch.int32), r"\[160\]"),
        (torch.tensor(1, dtype=torch.int32), r"\[\]"),
        (torch.zeros(3, WIDTH, dtype=torch.int32, device="meta"), "on meta"),
        (np.zeros((3, WIDTH), ">i4"), "big-endian"),
        (np.zeros((3, WIDTH), "V4"), "pass a tensor"),
        (np.zeros((3, WIDTH), object), "Python objects"),
        ([[1, 2]], "not list"),
        (make_rows(3, WIDTH).to_sparse(), "not in one of torch.sparse_coo"),
        (NESTED, "not in a nested one"),
    ],
)
def test_other_rows_are_refused_and_do_no_harm(tmp_path: Path, rows: Any, word: str) -> None:
    with int32_writer(tmp_path / "table.npy") as writer:
        writer.append(make_rows(5, WIDTH))
        with pytest.raises(ConfigError, match=word):
            writer.append(rows)
    expect_table(tmp_path / "table.npy", 5)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("table.bin", (4,), torch.int32), "suffix"),
        (("table.npy", (4,), torch.bfloat16), r"no dtype bfloat16.*safetensors"),
        (("table.safetensors", (4,), torch.complex128), "npy"),
        (("table.npy", (0,), torch.int32), "nothing to read or write"),
        (("table.npy", (-1,), torch.int32), "numbers, 0 or more"),
        (("table.npy", (4,), "int32"), "torch.dtype"),
        (("table.npy", (1,) * 900, torch.int32), "dimensions"),
    ],
)
def test_tables_that_make_no_sense(arguments: tuple[str, Any, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        RowWriter(*arguments)


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        RowWriter(tmp_path / "t.safetensors", (4,), torch.int32, tensor="x" * 5000)
    with pytest.raises(ConfigError, match="resume"):
        int32_writer(tmp_path / "t.npy", resume="yes")
    with pytest.raises(ConfigError, match="scalar"):
        write_rows(tmp_path / "t.npy", torch.tensor(1))
    with pytest.raises(ConfigError, match="nested"):
        write_rows(tmp_path / "t.npy", NESTED)
    writer = int32_writer(tmp_path / "t.npy")
    with pytest.raises(ConfigError, match="with"):
        writer.append(make_rows(1, WIDTH))
    with writer:
        pass
    with pytest.raises(ConfigError, match="used already"), writer:
        pass


# --- tables that are there


def test_a_table_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    write_rows(path, make_rows(3, WIDTH))
    with pytest.raises(ConfigError, match="exists already"):
        write_rows(path, make_rows(4, WIDTH))
    expect_table(path, 3)
    write_rows(path, make_rows(4, WIDTH), overwrite=True)
    expect_table(path, 4)
    (tmp_path / "link.npy").symlink_to(path)
    write_rows(tmp_path / "link.npy", make_rows(5, WIDTH), overwrite=True)
    assert (tmp_path / "link.npy").is_symlink()
    expect_table(path, 5)


def test_a_table_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    with pytest.raises(ConfigError, match="exists already"), int32_writer(path) as writer:
        writer.append(make_rows(3, WIDTH))
        path.write_bytes(b"of somebody else")
    assert path.read_bytes() == b"of somebody else"
    assert hidden_files(tmp_path) == []


def test_a_table_that_cannot_be_made_durable_leaves_the_old_one_and_its_checksums(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    write_rows(path, make_rows(3, WIDTH))
    with using(FullAtSync("pending")), pytest.raises(NoSpaceError, match="syncing"):
        write_rows(path, make_rows(4, WIDTH), overwrite=True)
    expect_table(path, 3)


@pytest.mark.parametrize("resume", [False, True])
def test_rows_are_synced_once_where_no_checksums_are_replaced(tmp_path: Path, resume: bool) -> None:
    counts = []
    for _ in range(2):
        seen = FailingFilesystem(0, errno.EIO)  # which fails nothing
        with using(seen), int32_writer(tmp_path / "table.npy", resume=resume, overwrite=True) as writer:
            writer.append(make_rows(3, WIDTH))
        counts.append(seen.names.count("sync"))
    assert counts == [2, 3]  # the table and its sidecar


def test_a_sidecar_without_its_table_goes(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    write_rows(path, make_rows(3, WIDTH))
    path.unlink()
    write_rows(path, make_rows(4, WIDTH))
    expect_table(path, 4)


def test_a_packed_table_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    with int32_writer(path) as writer:
        writer.append(make_rows(2, WIDTH).flip(0))
        writer.keep_positions(torch.tensor([1, 0], dtype=torch.int32))
    expect_table(path, 2)
    with pytest.raises(ConfigError, match="packed table cannot be replaced"):
        write_rows(path, make_rows(3, WIDTH), overwrite=True)
    expect_table(path, 2)
    write_rows(tmp_path / "other.npy", make_rows(3, WIDTH))
    with pytest.raises(ConfigError, match="packed"), int32_writer(tmp_path / "other.npy", overwrite=True) as writer:
        writer.append(make_rows(2, WIDTH))
        writer.keep_positions(torch.tensor([1, 0], dtype=torch.int32))
    expect_table(tmp_path / "other.npy", 3)
    with pytest.raises(ConfigError, match="positions of"), int32_writer(tmp_path / "third.npy") as writer:
        writer.append(make_rows(2, WIDTH))
        writer.keep_positions(torch.tensor([1, 0, 2], dtype=torch.int32))
    assert hidden_files(tmp_path) == []


# --- errors and what they leave


class OurError(Exception):
    pass


def fail_behind(path: Path, count: int, **options: Any) -> None:
    with pytest.raises(OurError), int32_writer(path, **options) as writer:
        writer.append(make_rows(count - writer.row_count, WIDTH, writer.row_count))
        raise OurError


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    fail_behind(tmp_path / "table.npy", 5_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("count", [0, 1, 1638, 1639, 5_000, 16_384])
def test_a_resumed_writer_goes_on_behind_the_rows_that_are_there(tmp_path: Path, suffix: str, count: int) -> None:
    path = tmp_path / f"table{suffix}"
    fail_behind(path, count, resume=True)
    assert len(hidden_files(tmp_path)) == 1
    fail_behind(path, count + 10, resume=True)  # twice
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count == count + 10
        writer.append(make_rows(20_000 - writer.row_count, WIDTH, writer.row_count))
    expect_table(path, 20_000)


@pytest.mark.parametrize("error", [OurError(), KeyboardInterrupt()])
@pytest.mark.parametrize("count", [0, 1, 1639, 5_000])
def test_what_is_left_for_the_next_writer_has_no_reserved_space(
    tmp_path: Path, count: int, error: BaseException
) -> None:
    for first in (0, count):  # also from a writer that has resumed
        with pytest.raises(type(error)), int32_writer(tmp_path / "table.npy", resume=True) as writer:
            writer.append(make_rows(count, WIDTH, first))
            raise error
        (name,) = hidden_files(tmp_path)
        assert (tmp_path / name).stat().st_size == 4096 + (first + count) * ROW_BYTES
    with int32_writer(tmp_path / "table.npy", resume=True) as writer:
        assert writer.row_count == 2 * count
    expect_table(tmp_path / "table.npy", 2 * count)


def test_a_directory_that_cannot_be_read_is_no_reason_to_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.npy"
    fail_behind(path, 100, resume=True)

    def fail(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as broken, pytest.raises(StorageError, match=f"listing {tmp_path}"):
        broken.setattr(os, "scandir", fail)
        int32_writer(path, resume=True).__enter__()
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count == 100


def test_a_child_that_leaves_the_block_cuts_nothing(tmp_path: Path) -> None:
    with int32_writer(tmp_path / "table.npy", resume=True) as writer:
        writer.append(make_rows(5_000, WIDTH))

        def child(report: Any) -> None:
            writer.__exit__(OurError, OurError(), None)

        run_in_child(child)
        writer.append(make_rows(5, WIDTH, 5_000))
    expect_table(tmp_path / "table.npy", 5_005)


def test_rows_wider_than_a_buffer_resume(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    rows = make_rows(5, 700_000)  # 2.8 MB each
    with pytest.raises(OurError), RowWriter(path, (700_000,), torch.int32, resume=True) as writer:
        writer.append(rows[:2])
        raise OurError
    with RowWriter(path, (700_000,), torch.int32, resume=True) as writer:
        assert writer.row_count == 2
        writer.append(rows[2:])
    assert torch.equal(read_rows(open_rows(path)), rows)
    assert verify_rows(path)


def test_resuming_what_was_never_begun_begins(tmp_path: Path) -> None:
    with int32_writer(tmp_path / "table.npy", resume=True) as writer:
        assert writer.row_count == 0
        writer.append(make_rows(9_000, WIDTH))
    expect_table(tmp_path / "table.npy", 9_000)


def test_without_resume_one_begins_anew(tmp_path: Path) -> None:
    fail_behind(tmp_path / "table.npy", 100, resume=True)
    with int32_writer(tmp_path / "table.npy") as writer:
        assert writer.row_count == 0
        writer.append(make_rows(3, WIDTH))
    expect_table(tmp_path / "table.npy", 3)


def test_an_unfinished_table_of_other_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    fail_behind(path, 100, resume=True)
    for row_shape, dtype in (((WIDTH + 1,), torch.int32), ((WIDTH,), torch.float32)):
        with (
            pytest.raises(ConfigError, match=r"unfinished table of .npy torch.int32 \(160,\)"),
            RowWriter(path, row_shape, dtype, resume=True),
        ):
            pass
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count == 100


@pytest.mark.parametrize("error", [StorageError(errno.EIO, "no look at it"), KeyboardInterrupt()])
def test_a_look_at_the_unfinished_that_fails_leaves_it_for_the_next_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "table.npy"
    for count in (100, 200):
        fail_behind(path, count, resume=True)
        (tmp_path / hidden_files(tmp_path)[0]).rename(tmp_path / f"kept-{count}")
    for number, count in enumerate((100, 200)):
        (tmp_path / f"kept-{count}").rename(tmp_path / f".table.npy.pending-{number:016x}")

    def fail_at_second(pending: PendingFile) -> Any:
        looked_at.append(pending.path)
        if len(looked_at) == 2:
            raise error
        return look(pending)

    looked_at: list[str] = []
    look = writer_module._records_of
    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(writer_module, "_records_of", fail_at_second)
        int32_writer(path, resume=True).__enter__()
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count == 200


def test_damaged_rows_are_not_gone_on_with(tmp_path: Path) -> None:
    fail_behind(tmp_path / "table.npy", 5_000, resume=True)
    (name,) = hidden_files(tmp_path)
    with open(tmp_path / name, "r+b") as file:
        file.seek(4096 + 1_500_000)
        file.write(b"x")
    with pytest.raises(ChecksumError, match="damaged; remove it"), int32_writer(tmp_path / "table.npy", resume=True):
        pass
    assert hidden_files(tmp_path) == [name]


def test_a_file_shorter_than_its_record_is_not_gone_on_with(tmp_path: Path) -> None:
    fail_behind(tmp_path / "table.npy", 5_000, resume=True)
    (name,) = hidden_files(tmp_path)
    os.truncate(tmp_path / name, 1_000_000)
    with int32_writer(tmp_path / "table.npy", resume=True) as writer:
        assert writer.row_count == 0
        writer.append(make_rows(3, WIDTH))
    expect_table(tmp_path / "table.npy", 3)


def test_other_bytes_behind_a_torn_row_do_no_harm(tmp_path: Path) -> None:
    """The part of a row behind the last whole one may be written anew with other bytes."""
    path = tmp_path / "table.npy"
    with pytest.raises(OurError), int32_writer(path, resume=True) as writer:
        writer.append(make_rows(1, WIDTH))
        writer._entered().append(torch.full((100,), 7, dtype=torch.uint8))
        raise OurError
    fail_behind(path, 1700, resume=True)
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count == 1700
        writer.append(make_rows(300, WIDTH, 1700))
    expect_table(path, 2000)


def test_the_unfinished_table_with_the_most_rows_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    for count in (50, 5_000, 70):
        fail_behind(path, count, resume=True)
        for name in hidden_files(tmp_path):
            (tmp_path / name).rename(tmp_path / f"aside-{count}")
    for number, count in enumerate((50, 5_000, 70)):
        (tmp_path / f"aside-{count}").rename(tmp_path / f".table.npy.pending-{number:016x}")
    (tmp_path / f".table.npy.pending-{9:016x}").write_bytes(b"of a save that died")
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count == 5_000
        assert len(hidden_files(tmp_path)) == 1
    expect_table(path, 5_000)


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    with int32_writer(tmp_path / "table.npy") as writer:
        writer.append(make_rows(5_000, WIDTH))

        def child(report: Any) -> None:
            with pytest.raises(ConfigError, match="forked"):
                writer.append(make_rows(1, WIDTH))
            with pytest.raises(ConfigError, match="forked"):
                writer.__exit__(None, None, None)

        run_in_child(child)
        writer.append(make_rows(5, WIDTH, 5_000))
    expect_table(tmp_path / "table.npy", 5_005)


def test_other_transfers_go_on_beside_a_writer(tmp_path: Path) -> None:
    with int32_writer(tmp_path / "table.npy") as writer:
        for first in range(0, 20_000, 5_000):
            writer.append(make_rows(5_000, WIDTH, first))
            fp.save({"x": torch.zeros(30_000_000, dtype=torch.uint8)}, tmp_path / "state.pt", durable=False)
    (tmp_path / "state.pt").unlink()
    expect_table(tmp_path / "table.npy", 20_000)


def test_a_failed_write_fails_the_table_and_keeps_what_is_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from fastpersist import _native

    path = tmp_path / "table.npy"
    _native.set_fault_plan(_native.FaultPlan(op="write", nth=8, count=2**64 - 1))
    try:
        with (
            caplog.at_level(logging.WARNING, "fastpersist"),
            pytest.raises(StorageError, match="offset"),
            int32_writer(path, resume=True, engine="fault:threads") as writer,
        ):
            for first in range(0, 20_000, 100):
                writer.append(make_rows(100, WIDTH, first))
    finally:
        _native.clear_fault_plan()
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count >= 2 * CHUNK_BYTES // ROW_BYTES
        writer.append(make_rows(20_000 - writer.row_count, WIDTH, writer.row_count))
    expect_table(path, 20_000)


def test_a_full_disk_leaves_all_rows_that_it_had_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.npy"
    room_bytes = 4096 + 5 * CHUNK_BYTES  # the last note while rows are written is of four chunks
    allocate, write_async = PendingFile.allocate, PageWriter.write_async

    def full() -> None:
        raise NoSpaceError(28, "full", str(path))

    def allocate_here(pending: PendingFile, size_bytes: int) -> None:
        allocate(pending, size_bytes) if size_bytes <= room_bytes else full()

    def write_here(file: PageWriter, data: torch.Tensor, offset_bytes: int) -> Any:
        if offset_bytes + data.numel() > room_bytes:
            return SimpleNamespace(wait=full)
        return write_async(file, data, offset_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(PendingFile, "allocate", allocate_here)
        patched.setattr(PageWriter, "write_async", write_here)
        with (
            pytest.raises(NoSpaceError, match=r"full; .* are free there, beside the rows that are left for .* resume"),
            int32_writer(path, resume=True) as writer,
        ):
            writer.append(make_rows(20_000, WIDTH))
    (name,) = hidden_files(tmp_path)
    assert (tmp_path / name).stat().st_size == 4096 + 5 * CHUNK_BYTES // ROW_BYTES * ROW_BYTES
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count == 5 * CHUNK_BYTES // ROW_BYTES
        writer.append(make_rows(20_000 - writer.row_count, WIDTH, writer.row_count))
    expect_table(path, 20_000)


@pytest.mark.parametrize("resume", [False, True])
def test_a_full_disk_says_what_is_free_when_nothing_is_left(tmp_path: Path, resume: bool) -> None:
    """Publishing removes its file in any case."""
    message = r"disk full; .* are free there, now that the unfinished files are removed"
    with (
        using(FullAtSync("pending")),
        pytest.raises(NoSpaceError, match=message),
        int32_writer(tmp_path / "table.npy", resume=resume) as writer,
    ):
        writer.append(make_rows(10, WIDTH))
    assert hidden_files(tmp_path) == []


def test_a_disk_without_room_for_positions_leaves_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    with (
        using(FullAtSync("rows.safetensors")),
        pytest.raises(NoSpaceError, match=r"disk full; [^;]* are free there, beside the rows that are left[^;]*$"),
        int32_writer(path, resume=True) as writer,
    ):
        writer.append(make_rows(2_000, WIDTH))
        writer.keep_positions(torch.arange(2_000))
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count == 2_000
    expect_table(path, 2_000)


@pytest.mark.parametrize("count", [20_000, 5 * CHUNK_BYTES // ROW_BYTES + 10], ids=["append", "the last flush"])
@pytest.mark.parametrize("noted_after", [2, 100])
def test_a_full_disk_where_no_space_can_be_reserved_leaves_what_was_written(
    tmp_path: Path, noted_after: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.npy"
    room_bytes = 4096 + 5 * CHUNK_BYTES + 4096  # which the rest of the rows would fit into, behind a hole
    used: dict[int, int] = {}
    write_async = PageWriter.write_async

    def full() -> None:
        raise NoSpaceError(28, "full", str(path))

    def write_here(file: PageWriter, data: torch.Tensor, offset_bytes: int) -> Any:
        if offset_bytes not in used and sum(used.values()) + data.numel() > room_bytes:
            return SimpleNamespace(wait=full)
        used[offset_bytes] = data.numel()
        return write_async(file, data, offset_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(writer_module, "PROGRESS_BYTES", noted_after * CHUNK_BYTES)
        patched.setattr(PendingFile, "allocate", lambda pending, size_bytes: os.ftruncate(pending.fd, size_bytes))
        patched.setattr(PageWriter, "write_async", write_here)
        with pytest.raises(NoSpaceError, match="full"), int32_writer(path, resume=True) as writer:
            writer.append(make_rows(count, WIDTH))
    with int32_writer(path, resume=True) as writer:
        assert writer.row_count == 5 * CHUNK_BYTES // ROW_BYTES
        writer.append(make_rows(20_000 - writer.row_count, WIDTH, writer.row_count))
    expect_table(path, 20_000)


@pytest.mark.parametrize("resume", [False, True])
def test_an_append_that_failed_in_the_middle_of_a_row_is_the_last_one(
    tmp_path: Path, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.npy"
    append = writer_module._Stream.append

    def half(stream: Any, data: torch.Tensor) -> None:
        append(stream, data[: data.numel() // 2 + 3])
        raise NoSpaceError(28, "full", str(path))

    with pytest.raises(ConfigError, match="could not be appended before"), int32_writer(path, resume=resume) as writer:
        writer.append(make_rows(2_000, WIDTH))
        with monkeypatch.context() as patched, pytest.raises(NoSpaceError):
            patched.setattr(writer_module._Stream, "append", half)
            writer.append(make_rows(5, WIDTH, 2_000))
        with pytest.raises(ConfigError, match="could not be appended before"):
            writer.append(make_rows(5, WIDTH, 2_000))
    assert not path.exists()
    with int32_writer(path, resume=resume) as writer:
        assert writer.row_count == (2_002 if resume else 0)
        writer.append(make_rows(3_000 - writer.row_count, WIDTH, writer.row_count))
    expect_table(path, 3_000)


def test_rows_whose_bytes_have_no_address_are_refused(tmp_path: Path) -> None:
    interface = {"typestr": "|u1", "shape": (2, 2), "data": b"\1\2\3\4", "version": 3}
    with pytest.raises(ConfigError, match=r"pass numpy\.asarray"):
        write_rows(tmp_path / "table.npy", SimpleNamespace(__array_interface__=interface))


@pytest.mark.parametrize("name", ["__metadata__", 5])
def test_names_that_no_tensor_can_have_are_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match="cannot have the name"):
        write_rows(tmp_path / "table.safetensors", torch.ones(2, 3), tensor=name)


@pytest.mark.parametrize(
    "positions",
    [[0, 1, 2], torch.tensor([0.0, 1, 2]), torch.tensor([0, 1, 2], dtype=torch.int16), torch.tensor([[0, 1, 2]])],
    ids=["list", "floats", "int16", "two dimensions"],
)
def test_positions_are_whole_numbers_in_one_dimension(tmp_path: Path, positions: Any) -> None:
    with int32_writer(tmp_path / "table.npy") as writer:
        writer.append(make_rows(3, WIDTH))
        with pytest.raises(ConfigError, match="int32 or int64"):
            writer.keep_positions(positions)


@pytest.mark.parametrize("positions", [[0, 0, 0], [0, 1, 3], [-1, 0, 1], [0, 1], [0, 1, 2, 3]])
def test_each_position_comes_once(tmp_path: Path, positions: list[int]) -> None:
    path = tmp_path / "table.npy"
    with pytest.raises(ConfigError, match="position"), int32_writer(path) as writer:
        writer.append(make_rows(3, WIDTH))
        writer.keep_positions(torch.tensor(positions))
    assert not path.exists()
    assert hidden_files(tmp_path) == []


def test_a_table_goes_where_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "table.npy").write_bytes(b"another file")
    monkeypatch.chdir(tmp_path)
    with int32_writer(Path("table.npy")) as writer:
        writer.append(make_rows(5, WIDTH))
        monkeypatch.chdir(tmp_path / "other")
    expect_table(tmp_path / "table.npy", 5)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_a_default_device_is_not_that_of_tables(tmp_path: Path, suffix: str) -> None:
    rows, path, packed = make_rows(50, WIDTH), tmp_path / f"table{suffix}", tmp_path / f"packed{suffix}"
    order = torch.arange(50)
    with torch.device("meta"):
        write_rows(path, rows)
        assert verify_rows(path).ok
        fp.pack_rows(path, packed, order=order)
        for name in (path, packed):
            with fp.RowStore(name) as store:
                assert torch.equal(store.gather([3, 4]), rows[3:5])
                assert torch.equal(store.prefetch([7]).result(), rows[7:8])
                assert store.gather([]).shape == (0, WIDTH)
