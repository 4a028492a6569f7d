"""Extents of a file: what they share, what is left of them, and where they lie in a file that holds nothing else."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from fastpersist.formats.byte_ranges import (
    Extent,
    ExtentMap,
    merged,
    overlaps,
    row_major_strides,
    runs_of_box,
    without,
)

extents = st.lists(st.builds(Extent, st.integers(0, 500), st.integers(0, 100)))


def bytes_of(found: list[Extent]) -> set[int]:
    return {offset for one in found for offset in range(one.offset_bytes, one.end_bytes)}


def test_an_extent_ends_behind_its_last_byte() -> None:
    assert Extent.between(3, 10) == Extent(3, 7)
    assert Extent(3, 7).end_bytes == 10


@given(st.builds(Extent, st.integers(0, 500), st.integers(0, 300)), extents)
def test_overlap_and_rest_make_the_whole(extent: Extent, others: list[Extent]) -> None:
    taken = merged(others)
    inside, outside = bytes_of(overlaps(extent, taken)), bytes_of(without(extent, taken))
    assert inside == bytes_of([extent]) & bytes_of(others)
    assert outside == bytes_of([extent]) - inside


@given(extents)
def test_merged_extents_are_the_same_bytes_sorted_and_apart(others: list[Extent]) -> None:
    found = merged(others)
    assert bytes_of(found) == bytes_of(others)
    assert all(before.end_bytes < after.offset_bytes for before, after in itertools.pairwise(found))


def test_places_in_a_part_and_in_the_file_are_each_others_inverse() -> None:
    extents = (Extent(10, 5), Extent(20, 3), Extent(30, 10))
    places = [offset for low, size in extents for offset in range(low, low + size)]
    found = ExtentMap(extents)
    assert found.size_bytes == len(places) == 18
    assert [found.place_of(offset) for offset in places] == list(range(18))
    for start, end in itertools.combinations(range(19), 2):
        assert [
            offset for low, size in found.belonging(start, end - start) for offset in range(low, low + size)
        ] == places[start:end]
    for start, end in itertools.combinations(range(8, 45), 2):
        inside = [offset for low, size in found.within(start, end - start) for offset in range(low, low + size)]
        assert inside == [offset for offset in places if start <= offset < end]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4))
def test_a_box_lies_in_runs_that_cannot_be_longer(dimensions: list[tuple[int, int]]) -> None:
    shape, lengths = tuple(map(max, dimensions)), tuple(map(min, dimensions))
    strides = row_major_strides(shape)
    places = [
        sum(index * stride for index, stride in zip(indices, strides, strict=True))
        for indices in itertools.product(*map(range, lengths))
    ]
    outer, run = runs_of_box(shape, lengths)
    runs = [places[start : start + run] for start in range(0, len(places), run)]
    assert len(runs) == math.prod(lengths[:outer])
    assert all(one == list(range(one[0], one[0] + run)) for one in runs)
    assert all(other[0] > one[-1] + 1 for one, other in itertools.pairwise(runs))
