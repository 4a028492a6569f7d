"""Which bytes each writer owns: everything once, in whole blocks, shares equal except for a block."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpersist as fp
from fastpersist import _native
from fastpersist.distributed.partition import choose_writers, combined_crcs, interior_of, shard_of
from fastpersist.formats.byte_ranges import ByteRange, Extent, merged

BLOCK = 4096


@given(st.integers(0, 50_000), st.integers(0, 50_000))
def test_interior_is_all_whole_blocks_of_a_source(offset_bytes: int, size_bytes: int) -> None:
    start, length = interior_of(offset_bytes, size_bytes, BLOCK)
    inside = [
        place
        for place in range(0, offset_bytes + size_bytes, BLOCK)
        if offset_bytes <= place and place + BLOCK <= offset_bytes + size_bytes
    ]
    assert length == len(inside) * BLOCK
    assert not inside or offset_bytes + start == inside[0]


@given(st.lists(st.integers(0, 40)), st.integers(1, 9))
def test_shards_are_everything_once_in_order_and_differ_by_at_most_a_block(counts: list[int], writers: int) -> None:
    interiors = [Extent(index % 3 * 7, count * BLOCK) for index, count in enumerate(counts)]
    shards = [shard_of(interiors, writer, writers, BLOCK) for writer in range(writers)]
    sizes = [sum(part.size_bytes for part in shard) for shard in shards]
    assert sum(sizes) == sum(size for _, size in interiors)
    assert max(sizes) - min(sizes) <= BLOCK
    found: dict[int, list[Extent]] = {}
    for part in itertools.chain(*shards):
        assert part.size_bytes > 0
        assert part.size_bytes % BLOCK == 0
        found.setdefault(part.source, []).append(Extent(part.from_bytes, part.size_bytes))
    for source, interior in enumerate(interiors):
        assert merged(found.get(source, [])) == ([interior] if interior.size_bytes else [])
        assert sum(part.size_bytes for part in found.get(source, [])) == interior.size_bytes


def test_most_sources_are_not_cut_at_all() -> None:
    interiors = [Extent(0, 10 * BLOCK)] * 100
    parts = [part for writer in range(4) for part in shard_of(interiors, writer, 4, BLOCK)]
    assert len(parts) == 100


@pytest.mark.parametrize(
    ("wanted", "nodes", "writers"),
    [
        ("all", (0, 0, 1, 1), [0, 1, 2, 3]),
        ("node", (0, 0, 1, 1), [0, 2]),
        ("node", (0, 1, 0, 1), [0, 1]),
        ("auto", (0,), [0]),
        ("auto", (0,) * 4, [0, 1, 2, 3]),
        ("auto", (0,) * 12, list(range(8))),
        ("auto", (0, 0, 1, 1, 2), [0, 2, 4]),
        (1, (0, 0, 1, 1), [0]),
        (2, (0, 0, 1, 1), [0, 2]),
        (3, (0, 0, 1, 1), [0, 1, 2]),
        (99, (0, 0), [0, 1]),
    ],
)
def test_writers(wanted: str | int, nodes: tuple[int, ...], writers: list[int]) -> None:
    assert choose_writers(wanted, nodes) == writers


@pytest.mark.parametrize("wanted", [0, -1, True, 1.5, "both", None])
def test_nonsense_writers_are_refused(wanted: object) -> None:
    with pytest.raises(fp.ConfigError, match="writers"):
        choose_writers(wanted, (0, 0))  # type: ignore[arg-type]


def test_crcs_of_parts_make_those_of_sources() -> None:
    data = [bytes(range(200)), b"", b"abc"]
    parts = [ByteRange(0, 50, 150), ByteRange(2, 0, 3), ByteRange(0, 0, 50)]
    found = [
        (part, _native.crc32(data[part.source][part.from_bytes : part.from_bytes + part.size_bytes])) for part in parts
    ]
    assert combined_crcs([200, 0, 3], found) == [_native.crc32(one) for one in data]
    assert combined_crcs([200, 0, 3], [(part, 0) for part in parts]) == [0, 0, 0]
    with pytest.raises(fp.InternalError, match="source 0 is not covered"):
        combined_crcs([200, 0, 3], found[:2])
