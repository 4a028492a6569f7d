"""What ranks want of a file in parts is cut into pieces, each read once by who has it and taken where it belongs."""

from __future__ import annotations

from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastpersist as fp
from fastpersist import _native
from fastpersist.distributed.node_local.exchange import Piece, _Taking, cut_pieces, structure_of, takers_of, writing_to
from fastpersist.distributed.partition import CUT_BYTES_MIN
from fastpersist.formats import torch_zip
from fastpersist.formats.byte_ranges import Extent, merged, overlaps, without
from fastpersist.formats.split_manifest import Part
from fastpersist.loading.part_files import OpenPart
from fastpersist.transfer import progress
from fastpersist.transfer.reader import Extents

UNIT = 4096
PIECE = 16 * UNIT


@st.composite
def parts_and_wants(draw: st.DrawFn) -> tuple[list[Part], list[int], list[list[Extent]], int]:
    """A file of some units that lies in parts, who reads each of them, and what each rank wants."""
    owners = draw(st.lists(st.integers(0, 2), min_size=1, max_size=600))
    runs: dict[int, list[Extent]] = {0: [], 1: [], 2: []}
    at = 0
    for owner, group in groupby(owners):
        count = len(list(group))
        runs[owner].append(Extent(at * UNIT, count * UNIT))
        at += count
    parts = [Part(rank, tuple(extents)) for rank, extents in runs.items() if extents]
    size = len(owners) * UNIT

    def extent(pair: tuple[int, int]) -> Extent:
        low, high = sorted(one * size // 1000 for one in pair)
        return Extent.between(low, max(low + 1, high))

    wanted = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 1000)).map(extent), max_size=4)
    holders = draw(st.lists(st.integers(0, 3), min_size=len(parts), max_size=len(parts)))
    return parts, holders, draw(st.lists(wanted, min_size=1, max_size=3)), size


@given(parts_and_wants())
def test_pieces_are_all_that_is_wanted_each_byte_once_from_who_holds_it(
    case: tuple[list[Part], list[int], list[list[Extent]], int],
) -> None:
    parts, holders, wants, _size = case
    pieces = cut_pieces(wants, parts, holders, PIECE)
    taken = sorted(Extent(piece.offset_bytes, piece.size_bytes) for piece in pieces)
    assert all(before.end_bytes <= after.offset_bytes for before, after in pairwise(taken))
    for extent in (extent for want in wants for extent in want):
        assert not without(extent, taken)
    by_rank = {part.rank: (part, holder) for part, holder in zip(parts, holders, strict=True)}
    for piece in pieces:
        part, holder = by_rank[piece.part]
        assert piece.holder == holder
        assert 0 < piece.size_bytes <= PIECE
        assert not without(Extent(piece.offset_bytes, piece.size_bytes), part.extents)
    assert cut_pieces(wants[::-1], parts, holders, PIECE) == pieces, "all ranks cut alike"
    for piece, takers in zip(pieces, takers_of(pieces, wants), strict=True):
        bytes_of_it = Extent(piece.offset_bytes, piece.size_bytes)
        wanting = [rank for rank, want in enumerate(wants) if any(overlaps(bytes_of_it, merged(want)))]
        assert takers == [rank for rank in wanting if rank != piece.holder]


def test_holders_take_turns() -> None:
    parts = [Part(0, (Extent(0, 3 * PIECE),)), Part(1, (Extent(3 * PIECE, 2 * PIECE),))]
    pieces = cut_pieces([[Extent(0, 5 * PIECE)]], parts, [1, 0], PIECE)
    assert [piece.holder for piece in pieces] == [0, 1, 0, 1, 1]


def test_what_goes_straight_to_its_place_lies_in_pieces_of_its_own() -> None:
    large = Extent(1000, CUT_BYTES_MIN)
    parts = [Part(0, (Extent(0, 4 * CUT_BYTES_MIN),))]
    pieces = cut_pieces([[Extent(0, 900), large, Extent(large.end_bytes, 50)]], parts, [0])
    assert [(piece.offset_bytes, piece.size_bytes) for piece in pieces] == [(0, 1000), large, (large.end_bytes, 50)]


def put(target: torch.Tensor, offset_bytes: int, data: torch.Tensor) -> None:
    target[offset_bytes : offset_bytes + len(data)] = data


@given(parts_and_wants())
def test_what_is_taken_of_the_pieces_is_what_was_wanted(
    case: tuple[list[Part], list[int], list[list[Extent]], int],
) -> None:
    parts, holders, wants, size = case
    file = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    pieces = cut_pieces(wants, parts, holders, PIECE)
    extents, targets = Extents(), []
    for number, want in enumerate(wants[0]):
        target = torch.zeros(want.size_bytes, dtype=torch.uint8)
        targets.append(target)
        if number % 2:  # in memory that no piece may go to straight away
            extents.add_pushed(*want, partial(put, target), with_crc=True)
        else:
            extents.add_memory(*want, target.data_ptr(), target, with_crc=True)
    counts: list[int] = []
    token = progress._count.set(counts.append)
    taking = _Taking(extents, range(len(targets)))
    progress._count.reset(token)
    taking.plan(pieces)
    for index, piece in enumerate(pieces):
        buffer = taking.buffer_for(index)
        buffer.copy_(file[piece.offset_bytes : piece.offset_bytes + piece.size_bytes])
        taking.take(index, buffer)
    for want, target in zip(wants[0], targets, strict=True):
        assert torch.equal(target, file[want.offset_bytes : want.end_bytes])
    assert taking.crcs() == {index: _native.crc32(target.numpy()) for index, target in enumerate(targets)}
    assert sum(counts) in (0, sum(want.size_bytes for want in wants[0]))


def test_an_extent_that_no_piece_brings_is_no_crc() -> None:
    extents, target = Extents(), torch.zeros(10, dtype=torch.uint8)
    extents.add_memory(0, 10, target.data_ptr(), target, with_crc=True)
    taking = _Taking(extents, [0])
    taking.plan([Piece(0, 0, 0, 4)])
    taking.take(0, taking.buffer_for(0))
    with pytest.raises(fp.InternalError, match="not covered"):
        taking.crcs()


# --- the structure of a file


def saved(path: Path) -> int:
    fp.save({"large": torch.ones(1 << 20), "small": torch.ones(100)}, path)
    return path.stat().st_size


def test_structure_is_all_but_large_storages(tmp_path: Path) -> None:
    size = saved(tmp_path / "x.pt")
    with OpenPart(str(tmp_path / "x.pt"), [Extent(0, size)]) as part:
        directory = torch_zip.read_directory(part.read_small, size, path="x.pt")
        entry = directory.entries["data/0"]
        large = Extent(entry.data_offset_bytes, entry.size_bytes)
        assert large.size_bytes == 4 << 20
        assert structure_of(part, size, "x.pt") == without(Extent(0, size), [large])


@pytest.mark.parametrize("lacks", ["a small storage", "the end"])
def test_a_part_of_rank_0_that_lacks_some_of_the_structure_is_refused(tmp_path: Path, lacks: str) -> None:
    size = saved(tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    at = data.rindex(bytes(torch.ones(100).numpy())) if lacks == "a small storage" else size - 10
    held = without(Extent(0, size), [Extent(at, 10)])
    (tmp_path / "part").write_bytes(b"".join(data[one.offset_bytes : one.end_bytes] for one in held))
    with OpenPart(str(tmp_path / "part"), held) as part, pytest.raises(fp.FormatError):
        structure_of(part, size, "x.pt")


def test_bytes_are_written_to_a_file_in_memory_from_their_offset_on(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b") as file:
        push = writing_to(file.fileno(), 100)
        push(20, torch.arange(5, dtype=torch.uint8))
        push(0, torch.ones(2, dtype=torch.uint8))
    data = (tmp_path / "x").read_bytes()
    assert data == bytes(100) + b"\1\1" + bytes(18) + bytes(range(5))
