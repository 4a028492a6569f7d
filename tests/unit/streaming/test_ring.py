"""Places in the ring, against a plain list of who has which bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpersist.streaming.ring import ByteRing, Room, ring_bytes_for

UNIT_SIZES = st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=6)


def bytes_of(room: Room, sizes: list[int]) -> set[int]:
    return {byte for at, size in zip(room.offsets, sizes, strict=True) for byte in range(at, at + size)}


@given(
    size=st.integers(0, 120), choices=st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 50))), max_size=40)
)
def test_rooms_never_overlap_and_never_leave_the_ring(size: int, choices: list[tuple[int, list[int]]]) -> None:
    ring = ByteRing(size)
    held: list[tuple[Room, set[int]]] = []
    for choice, sizes in choices:
        if choice < 4 and held:
            ring.give_back(held.pop(choice % len(held))[0])
            continue
        room = ring.take(sizes)
        if room is None:
            continue
        taken = bytes_of(room, sizes)
        assert len(taken) == sum(sizes)  # its own blocks do not overlap, either
        assert taken <= set(range(size))
        for _, others in held:
            assert not taken & others
        held.append((room, taken))


@given(sizes=st.lists(st.integers(0, 50), max_size=6), more=st.integers(0, 10), before=st.lists(st.integers(0, 50)))
def test_an_empty_ring_takes_whatever_is_not_larger_than_it(sizes: list[int], more: int, before: list[int]) -> None:
    ring = ByteRing(sum(sizes) + more)
    rooms = [room for size in before if (room := ring.take([size])) is not None]
    for room in random.Random(len(before)).sample(rooms, len(rooms)):
        ring.give_back(room)
    room = ring.take(sizes)
    assert room is not None
    assert ring.take([more + 1]) is None


@given(units=UNIT_SIZES, uses=st.lists(st.integers(0, 5), max_size=30))
def test_any_two_units_are_held_at_once_wherever_it_wraps(units: list[list[int]], uses: list[int]) -> None:
    ring = ByteRing(ring_bytes_for(units))
    used = 0
    older = ring.take(units[used])
    assert older is not None
    for number in (use % len(units) for use in uses):
        if number == used:
            continue
        newer = ring.take(units[number])
        assert newer is not None
        ring.give_back(older)
        older, used = newer, number


@given(units=UNIT_SIZES, choices=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_a_second_unit_fits_beside_a_first_whatever_was_read_ahead_in_between(
    units: list[list[int]], choices: list[tuple[int, int]]
) -> None:
    """A unit is in use, others were read behind it, and all of those are given up for one that was not foretold."""
    ring = ByteRing(ring_bytes_for(units))
    for used, wanted in ((used % len(units), wanted % len(units)) for used, wanted in choices):
        held = ring.take(units[used])
        assert held is not None
        ahead = [room for unit in units * 3 if (room := ring.take(unit)) is not None]
        for room in ahead:
            ring.give_back(room)
        if used != wanted:
            second = ring.take(units[wanted])
            assert second is not None
            ring.give_back(held)
            held = second
        ring.give_back(held)


def test_bytes_come_back_in_any_order() -> None:
    ring = ByteRing(100)
    first, second, third = ring.take([40]), ring.take([30]), ring.take([30])
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.offsets, second.offsets, third.offsets) == ((0,), (40,), (70,))
    assert ring.take([1]) is None
    ring.give_back(second)
    assert ring.take([30]) is None  # behind an older one
    ring.give_back(first)
    again = ring.take([50, 20])
    assert again is not None
    assert again.offsets == (0, 50)


def test_a_block_does_not_wrap() -> None:
    ring = ByteRing(100)
    first, second = ring.take([60]), ring.take([20])
    assert first is not None
    assert second is not None
    ring.give_back(first)
    room = ring.take([10, 30, 15])
    assert room is not None
    assert room.offsets == (80, 0, 30)


def test_a_ring_of_nothing_has_room_for_nothing() -> None:
    ring = ByteRing(0)
    assert ring.take([1]) is None
    room = ring.take([0, 0])
    assert room is not None
    ring.give_back(room)


@pytest.mark.parametrize(
    ("units", "expected"),
    [([], 0), ([[]], 0), ([[5, 5]], 10), ([[5], [7]], 19), ([[3, 4], [1], [2, 6]], 21), ([[], [], [9]], 18)],
)
def test_a_ring_is_as_large_as_two_units_and_one_wrap_need(units: list[list[int]], expected: int) -> None:
    assert ring_bytes_for(units) == expected
