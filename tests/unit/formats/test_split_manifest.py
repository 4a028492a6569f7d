"""PARTS.json and the arithmetic of parts: what is written is read back, what does not fit together is refused."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

import fastpersist as fp
from fastpersist.distributed.node_local.exchange import cut_pieces
from fastpersist.distributed.partition import CUT_BYTES_MIN
from fastpersist.formats.byte_ranges import Extent, ExtentMap
from fastpersist.formats.split_manifest import (
    Part,
    PartsRecord,
    SplitFile,
    Store,
    encode_parts,
    parse_parts,
)
from fastpersist.loading.part_files import missing_stores, require_whole

MIB = 1 << 20
RECORD = PartsRecord(
    "0123456789abcdef" * 2,
    (Store((0, 2), "node-a"), Store((1, 3), "nœud-b")),
    1,
    (SplitFile("state.pt", 30_000, 0xDEADBEEF, (Part(1, (Extent(4096, 4096), Extent(12288, 8192))), Part(3, ()))),),
)


def extents_of(*pairs: tuple[int, int]) -> tuple[Extent, ...]:
    return tuple(Extent(*pair) for pair in pairs)


def test_record_comes_back() -> None:
    assert parse_parts(encode_parts(RECORD), "x") == RECORD
    without_crc = PartsRecord(RECORD.token, RECORD.stores, 0, (SplitFile("a/b", 0, None, ()),))
    assert parse_parts(encode_parts(without_crc), "x") == without_crc


def test_record_of_a_copy_names_the_files_of_single_ranks() -> None:
    copy = PartsRecord(RECORD.token, RECORD.stores, 1, (), ("rank-00000.pt", "rank-00003.pt"))
    assert parse_parts(encode_parts(copy), "x") == copy
    for names in (["../x"], [7], "rank-00000.pt"):
        content = {**json.loads(encode_parts(copy)), "own_files": names}
        with pytest.raises(fp.FormatError, match="record of parts"):
            parse_parts(json.dumps(content).encode(), "x")


def test_missing_stores_are_named_by_ranks_and_host() -> None:
    assert missing_stores(RECORD, [RECORD]) == [0]
    assert RECORD.describe([0, 1]) == "ranks 0, 2 (written on node-a); ranks 1, 3 (written on nœud-b)"
    many = PartsRecord(RECORD.token, (Store(tuple(range(12)), "h"),), 0, ())
    assert many.describe([0]) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more (written on h)"


def changed(**changes: Any) -> bytes:
    content = json.loads(encode_parts(RECORD))
    for path, value in changes.items():
        at: Any = content
        *keys, last = [int(key) if key.isdigit() else key for key in path.split("__")]
        for key in keys:
            at = at[key]
        at[last] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"[]",
        b"[" * 100_000,
        b'"\xff"',
        changed(format=2),
        changed(format=None),
        changed(token="x" * 32),
        changed(token=7),
        changed(store=2),
        changed(store=-1),
        changed(stores=[]),
        changed(stores__0__ranks=[0, 0]),
        changed(stores__0__ranks=[2, 0]),
        changed(stores__0__ranks=[0, 1]),
        changed(stores__0__ranks=[0, 4]),
        changed(stores__0__ranks=[]),
        changed(stores__0__host=None),
        changed(stores__0__host="\ud800"),
        changed(files=None),
        changed(files__0__name="../state.pt"),
        changed(files__0__name="/state.pt"),
        changed(files__0__size_bytes=20_479),
        changed(files__0__size_bytes=True),
        changed(files__0__crc32="DEADBEEF"),
        changed(files__0__parts__0__rank=0),
        changed(files__0__parts__0__rank=3),
        changed(files__0__parts__0__extents=[4096]),
        changed(files__0__parts__0__extents=[4096, 0]),
        changed(files__0__parts__0__extents=[4096, 4096, 8000, 10]),
        changed(files__0__parts__0__extents=[8192, 10, 4096, 10]),
        changed(files__0__parts__0__extents=[0, 1 << 63]),
        changed(files__0__parts__0__extents=[0.5, 1]),
    ],
)
def test_what_cannot_be_trusted_is_refused(data: bytes) -> None:
    with pytest.raises(fp.FormatError, match="x: this is no valid record of parts"):
        parse_parts(data, "x")


def test_record_that_nobody_could_read_is_not_written() -> None:
    with pytest.raises(fp.ConfigError, match="a record of parts cannot hold this"):
        encode_parts(PartsRecord("", (), 0, ()))


@pytest.mark.parametrize(
    "parts",
    [[((0, 10),), ((11, 9),)], [((0, 10),), ((9, 11),)], [((0, 10),)], [((1, 19),)], [((0, 20),), ((5, 1),)], []],
    ids=["gap", "overlap", "end", "start", "twice", "nothing"],
)
def test_parts_that_are_not_the_whole_file_are_refused(parts: list[Any]) -> None:
    with pytest.raises(fp.FormatError, match="do not make up all of it"):
        require_whole(20, [Part(rank, extents_of(*pairs)) for rank, pairs in enumerate(parts)], "x")
    require_whole(20, [Part(0, extents_of((0, 5), (10, 10))), Part(1, extents_of((5, 5)))], "x")


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_what_is_wanted_once_and_lie_in_one_part_each(seed: int) -> None:
    dice = random.Random(seed)
    size_bytes = dice.randrange(20, 60) * MIB
    cuts = sorted({0, size_bytes, *(dice.randrange(size_bytes // 4096) * 4096 for _ in range(12))})
    extents: list[list[Extent]] = [[] for _ in range(4)]
    for low, high in itertools.pairwise(cuts):
        extents[dice.randrange(4)].append(Extent.between(low, high))
    parts = [Part(rank, tuple(one)) for rank, one in enumerate(extents)]
    holders = [dice.randrange(3) for _ in parts]
    wants: list[list[Extent]] = []
    for _ in range(3):
        own = []
        for _ in range(dice.randrange(6)):
            low = dice.randrange(size_bytes)
            own.append(Extent(low, min(dice.choice([100, 5000, 3 * MIB]), size_bytes - low)))
        wants.append(own)
    pieces = cut_pieces(wants, parts, holders, piece_bytes=MIB)
    assert pieces == cut_pieces(wants[::-1], parts, holders, piece_bytes=MIB)  # the same on all ranks
    covered: list[tuple[int, int]] = []
    for piece in pieces:
        assert 0 < piece.size_bytes <= MIB
        assert holders[piece.part] == piece.holder
        inside = ExtentMap(parts[piece.part].extents).within(piece.offset_bytes, piece.size_bytes)
        assert inside == [(piece.offset_bytes, piece.size_bytes)]
        covered.append((piece.offset_bytes, piece.offset_bytes + piece.size_bytes))
    covered.sort()
    assert all(one[1] <= next_one[0] for one, next_one in itertools.pairwise(covered))
    for low, length in (extent for want in wants for extent in want):
        inner = sum(max(0, min(high, low + length) - max(start, low)) for start, high in covered)
        assert inner == length
        if length >= CUT_BYTES_MIN:  # each goes to one place: none lies across an edge of what is large
            assert not any(start < edge < high for start, high in covered for edge in (low, low + length))


def test_holders_take_turns() -> None:
    parts = [Part(0, (Extent(0, 4 * MIB),)), Part(1, (Extent(4 * MIB, 4 * MIB),))]
    pieces = cut_pieces([[Extent(0, 8 * MIB)]], parts, [0, 1], piece_bytes=MIB)
    assert [piece.holder for piece in pieces] == [0, 1] * 4
