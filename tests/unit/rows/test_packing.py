"""pack_rows: callers keep their ids, whatever the order, the memory and the source."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.archives import flip_bit
from support.filesystems import FailingFilesystem, FullAtSync
from support.leaks import no_leaks
from support.row_tables import hidden_files, make_rows, read_rows
from support.torch_release import TORCH

from fastpersist.commit.filesystem import using
from fastpersist.errors import ChecksumError, ConfigError, FormatError, NoSpaceError, StorageError
from fastpersist.rows import packing
from fastpersist.rows.opening import open_rows
from fastpersist.rows.packing import pack_rows
from fastpersist.rows.sidecar import CHUNK_BYTES, sidecar_path
from fastpersist.rows.verification import verify_rows
from fastpersist.rows.writer import write_rows

COUNT = 5_000
WIDE_COUNT = 10_001  # 3.8 chunks of rows of 400 bytes


@pytest.fixture
def table(tmp_path: Path) -> Path:
    write_rows(tmp_path / "table.npy", make_rows(COUNT))
    return tmp_path / "table.npy"


def positions_in(path: Path) -> torch.Tensor:
    rows = open_rows(path)._replace(position_of_row=None)
    return read_rows(rows)


def test_the_highest_score_comes_first_and_of_equal_ones_the_lower_id(table: Path, tmp_path: Path) -> None:
    degrees = torch.randint(0, 50, (COUNT,), generator=torch.Generator().manual_seed(1))
    path = tmp_path / "packed.npy"
    report = pack_rows(table, path, order=degrees)
    assert report == (COUNT, 1, 128)
    assert torch.equal(read_rows(open_rows(path)), make_rows(COUNT))
    ids = sorted(range(COUNT), key=lambda id_: (-int(degrees[id_]), id_))
    assert torch.equal(positions_in(path), make_rows(COUNT)[ids])
    assert verify_rows(path).ok


@pytest.mark.parametrize(
    "order",
    [
        np.arange(COUNT)[::-1],
        np.arange(COUNT, 0, -1).astype(">f8"),
        np.arange(2 * COUNT, 0, -1, dtype=">i4")[::2],
        list(range(COUNT, 0, -1)),
    ],
    ids=["backwards", "big-endian", "with gaps", "list"],
)
def test_an_order_may_be_any_array(table: Path, tmp_path: Path, order: Any) -> None:
    pack_rows(table, tmp_path / "packed.npy", order=order)
    assert torch.equal(positions_in(tmp_path / "packed.npy"), make_rows(COUNT))


@settings(max_examples=25)
@given(
    st.integers(0, 300),
    st.sampled_from([1, 2, 3, 4, 12, 33]),
    st.integers(0, 20_000),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_ids_stay_whatever_the_memory(
    tmp_path_factory: pytest.TempPathFactory, count: int, width: int, memory_bytes: int, seed: int, is_packed: bool
) -> None:
    directory = tmp_path_factory.mktemp("pack")
    rows = make_rows(count, width).to(torch.int16 if width % 2 else torch.int32)
    generator = torch.Generator().manual_seed(seed)
    write_rows(directory / "a.npy", rows)
    source = directory / "a.npy"
    if is_packed:
        pack_rows(source, directory / "b.safetensors", order=torch.rand(count, generator=generator))
        source = directory / "b.safetensors"
    order = torch.randint(-5, 5, (count,), generator=generator)
    report = pack_rows(source, directory / "c.npy", order=order, memory_bytes=memory_bytes)
    window = max(1, memory_bytes // report.row_bytes)
    assert report.pass_count == -(-count // window)
    assert torch.equal(read_rows(open_rows(directory / "c.npy")), rows)
    assert torch.equal(positions_in(directory / "c.npy"), rows[torch.argsort(order, descending=True, stable=True)])


def test_blocks_of_several_files(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BLOCK_BYTES", 100_000)
    np.save(tmp_path / "odd.npy", make_rows(777, first=COUNT).numpy())
    np.save(tmp_path / "none.npy", make_rows(0).numpy())
    order = torch.rand(2 * COUNT + 777, generator=torch.Generator().manual_seed(2))
    pieces = [table, tmp_path / "none.npy", tmp_path / "odd.npy", table]
    expected = torch.cat([make_rows(COUNT + 777), make_rows(COUNT)])
    with no_leaks(tmp_path):
        report = pack_rows(pieces, tmp_path / "packed.npy", order=order, memory_bytes="500KB")
        pack_rows(pieces, tmp_path / "joined.npy")
    assert report.pass_count == 3
    assert torch.equal(read_rows(open_rows(tmp_path / "packed.npy")), expected)
    assert torch.equal(read_rows(open_rows(tmp_path / "joined.npy")), expected)
    assert open_rows(tmp_path / "joined.npy").position_of_row is None


def test_without_an_order_packed_rows_go_back(table: Path, tmp_path: Path) -> None:
    pack_rows(table, tmp_path / "packed.npy", order=-torch.arange(COUNT) % 7)
    pack_rows(tmp_path / "packed.npy", tmp_path / "again.npy")
    assert (tmp_path / "again.npy").read_bytes() == table.read_bytes()


def test_raw_sources_are_opened_first(tmp_path: Path) -> None:
    rows = torch.randn(100, 8).bfloat16()
    (tmp_path / "raw.bin").write_bytes(rows.view(torch.uint8).numpy().tobytes())
    source = open_rows(tmp_path / "raw.bin", shape=(-1, 8), dtype=torch.bfloat16)
    pack_rows(source, tmp_path / "packed.safetensors", order=torch.rand(100), tensor="x")
    assert torch.equal(read_rows(open_rows(tmp_path / "packed.safetensors", tensor="x")), rows)


@pytest.mark.parametrize(
    ("order", "word"),
    [
        (torch.zeros(COUNT - 1), "number for each of 5000 ids"),
        (torch.zeros(COUNT, 1), "number for each"),
        (torch.zeros(COUNT, dtype=torch.complex64), "have no order"),
        (torch.full((COUNT,), float("nan")), "NaN"),
        pytest.param(
            torch.zeros(COUNT).to(torch.float8_e4m3fn),
            "cannot sort an order of torch.float8_e4m3fn",
            marks=pytest.mark.skipif(TORCH < (2, 8), reason="this torch says so itself"),
        ),
        (torch.zeros(COUNT).to_sparse(), "cannot sort an order of torch.float32, torch.sparse_coo"),
        (torch.zeros(COUNT, device="meta"), "cannot sort an order of .* on meta"),
        (np.array(["a"] * COUNT), "order is numbers"),
        (["a"] * COUNT, "order is numbers"),
        ([[1], [1, 2]], "order is numbers"),
        ("degree", "order is numbers"),
    ],
)
def test_orders_that_make_no_sense(table: Path, tmp_path: Path, order: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        pack_rows(table, tmp_path / "packed.npy", order=order)
    assert not (tmp_path / "packed.npy").exists()


def test_what_is_there_stays(table: Path, tmp_path: Path) -> None:
    (tmp_path / "there.npy").write_bytes(b"there")
    with pytest.raises(ConfigError, match="replaces nothing"):
        pack_rows(table, tmp_path / "there.npy")
    with pytest.raises(ConfigError, match="replaces nothing"):
        pack_rows(table, table, order=torch.zeros(COUNT))
    with pytest.raises(ConfigError, match="memory_bytes"):
        pack_rows(table, tmp_path / "new.npy", order=torch.zeros(COUNT), memory_bytes="much")
    assert hidden_files(tmp_path) == []


@pytest.mark.parametrize("memory_bytes", ["1GiB", "500KB"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("order", [None, torch.arange(WIDE_COUNT)], ids=["by id", "by score"])
def test_damage_of_the_source_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: torch.Tensor | None, is_packed: bool, memory_bytes: str
) -> None:
    monkeypatch.setattr(packing, "_BLOCK_BYTES", 100_000)  # blocks and chunks straddle each other
    write_rows(tmp_path / "whole.npy", make_rows(WIDE_COUNT, 100))
    source = tmp_path / "source.npy"
    pack_rows(tmp_path / "whole.npy", source, order=torch.arange(WIDE_COUNT) if is_packed else None)
    pieces: list[Path | str] = [tmp_path / "whole.npy", source]
    both = None if order is None else torch.cat([order, order])
    for at in (4096 + CHUNK_BYTES, 4096 + 2 * CHUNK_BYTES - 1, 4096 + 2 * CHUNK_BYTES + 77):
        flip_bit(source, at)
        chunk_at = 4096 + (at - 4096) // CHUNK_BYTES * CHUNK_BYTES
        with pytest.raises(ChecksumError, match=r"source\.npy: .*damaged") as caught:
            pack_rows(pieces, tmp_path / "packed.npy", order=both, memory_bytes=memory_bytes)
        assert (caught.value.path, caught.value.offset_bytes) == (str(source), chunk_at)
        assert not (tmp_path / "packed.npy").exists()
        flip_bit(source, at)
    pack_rows(pieces, tmp_path / "packed.npy", order=both, memory_bytes=memory_bytes)
    assert torch.equal(read_rows(open_rows(tmp_path / "packed.npy")), make_rows(WIDE_COUNT, 100).repeat(2, 1))


@pytest.mark.parametrize("at", [0, 4096, -1], ids=["header", "first", "last"])
def test_damage_where_sidecars_are_compared_with_their_tables_is_not_taken_for_another_table(
    table: Path, tmp_path: Path, at: int
) -> None:
    at = table.read_bytes().index(b"5000, 32") if at == 0 else at % table.stat().st_size
    flip_bit(table, at)
    with pytest.raises(ChecksumError, match="damaged"):
        pack_rows(table, tmp_path / "packed.npy")


def test_a_table_that_was_written_anew_is_packed_without_its_old_checksums(table: Path, tmp_path: Path) -> None:
    rows = make_rows(COUNT, first=9)
    np.save(table, rows.numpy())
    pack_rows(table, tmp_path / "packed.npy")
    assert torch.equal(read_rows(open_rows(tmp_path / "packed.npy")), rows)


def test_a_table_that_cannot_be_published_leaves_no_sidecar(table: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    with using(FullAtSync("packed.npy.pending")), pytest.raises(NoSpaceError, match="packed"):
        pack_rows(table, tmp_path / "packed.npy", order=torch.arange(COUNT))
    assert set(tmp_path.iterdir()) == before


def test_a_sidecar_that_cannot_be_published_does_not_stay(table: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    for nth in itertools.count(1):
        disk = FailingFilesystem(nth, errno.EIO)
        failure = "packed.npy is published"
        try:
            with using(disk):
                pack_rows(table, tmp_path / "packed.npy", order=torch.arange(COUNT))
        except StorageError as error:
            failure = str(error)
        assert ("packed.npy is published" in failure) == (tmp_path / "packed.npy").exists()
        if not disk.failed:
            break
        if (tmp_path / "packed.npy").exists():
            assert torch.equal(read_rows(open_rows(tmp_path / "packed.npy")), make_rows(COUNT))
            os.unlink(tmp_path / "packed.npy")
            os.unlink(sidecar_path(str(tmp_path / "packed.npy")))
        assert set(tmp_path.iterdir()) == before, disk.failed
    assert nth > 10


def test_a_sidecar_without_its_packed_table_is_not_that_of_another_one(table: Path, tmp_path: Path) -> None:
    """A killed process leaves such a one."""
    pack_rows(table, tmp_path / "packed.npy", order=torch.arange(COUNT))
    os.unlink(tmp_path / "packed.npy")
    np.save(tmp_path / "packed.npy", make_rows(COUNT).numpy())
    with pytest.raises(FormatError, match=r"not this one .*if the table was written anew, remove that file"):
        open_rows(tmp_path / "packed.npy")
    os.unlink(tmp_path / "packed.npy")
    pack_rows(table, tmp_path / "packed.npy")
    assert torch.equal(read_rows(open_rows(tmp_path / "packed.npy")), make_rows(COUNT))


@pytest.mark.parametrize("row_bytes", [1001, 9000])
def test_rows_of_any_length_are_read_in_blocks_of_the_same_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_bytes: int
) -> None:
    sizes = []

    def page_tensor(size_bytes: int) -> torch.Tensor:
        sizes.append(size_bytes)
        return packing_page_tensor(size_bytes)

    packing_page_tensor = packing.page_tensor
    monkeypatch.setattr(packing, "page_tensor", page_tensor)
    monkeypatch.setattr(packing, "_BLOCK_BYTES", 8192)
    rows = torch.randint(256, (50, row_bytes), dtype=torch.uint8)
    write_rows(tmp_path / "rows.npy", rows)
    pack_rows(tmp_path / "rows.npy", tmp_path / "packed.npy", order=torch.arange(50), memory_bytes=8192)
    assert max(sizes) <= max(8192, row_bytes)
    assert torch.equal(read_rows(open_rows(tmp_path / "packed.npy")), rows)
