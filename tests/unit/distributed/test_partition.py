"""Which bytes each writer owns: everything once, in whole blocks, shares equal but for a block."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpersist as fp
from fastpersist.distributed.partition import choose_writers, interior_of, merged, overlaps, shard_of, without

BLOCK = 4096

extents = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 100)).map(lambda one: (one[0], one[0] + one[1])))


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
    interiors = [(index % 3 * 7, count * BLOCK) for index, count in enumerate(counts)]
    shards = [shard_of(interiors, writer, writers, BLOCK) for writer in range(writers)]
    sizes = [sum(part.size_bytes for part in shard) for shard in shards]
    assert sum(sizes) == sum(size for _, size in interiors)
    assert max(sizes) - min(sizes) <= BLOCK
    found: dict[int, list[tuple[int, int]]] = {}
    for part in itertools.chain(*shards):
        assert part.size_bytes > 0
        assert part.size_bytes % BLOCK == 0
        found.setdefault(part.source, []).append((part.from_bytes, part.from_bytes + part.size_bytes))
    for source, (start, size) in enumerate(interiors):
        assert merged(found.get(source, [])) == ([(start, start + size)] if size else [])
        assert sum(high - low for low, high in found.get(source, [])) == size


def test_most_sources_are_not_cut_at_all() -> None:
    interiors = [(0, 10 * BLOCK)] * 100
    parts = [part for writer in range(4) for part in shard_of(interiors, writer, 4, BLOCK)]
    assert len(parts) == 100


@given(st.tuples(st.integers(0, 500), st.integers(0, 300)), extents)
def test_overlap_and_rest_make_the_whole(place: tuple[int, int], others: list[tuple[int, int]]) -> None:
    extent = (place[0], place[0] + place[1])
    taken = merged(others)
    inside = {value for low, high in overlaps(extent, taken) for value in range(low, high)}
    outside = {value for low, high in without(extent, taken) for value in range(low, high)}
    assert inside == set(range(*extent)) & {value for low, high in others for value in range(low, high)}
    assert outside == set(range(*extent)) - inside


@given(extents)
def test_merged_extents_are_the_same_values_sorted_and_apart(others: list[tuple[int, int]]) -> None:
    found = merged(others)
    assert {v for low, high in found for v in range(low, high)} == {v for low, high in others for v in range(low, high)}
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


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
