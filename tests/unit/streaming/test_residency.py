"""How a budget is divided between the ring and the units that stay."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpersist.streaming.residency import choose_residents
from fastpersist.streaming.ring import ring_bytes_for

UNITS = st.lists(st.tuples(st.lists(st.integers(0, 60), max_size=4), st.booleans()), min_size=1, max_size=12)


@given(given_units=UNITS, budget=st.integers(0, 1500))
def test_ring_and_residents_never_exceed_the_budget(given_units: list[tuple[list[int], bool]], budget: int) -> None:
    units, must_stay = [blocks for blocks, _ in given_units], [stays for _, stays in given_units]
    chosen = choose_residents(units, must_stay, budget)
    assert chosen.resident_bytes == sum(sum(units[number]) for number in chosen.residents)
    assert {number for number, stays in enumerate(must_stay) if stays} <= chosen.residents
    if chosen.missing_bytes:
        assert sum(map(sum, units)) > budget
        return
    assert chosen.resident_bytes + chosen.ring_bytes <= budget
    streamed = [unit for number, unit in enumerate(units) if number not in chosen.residents]
    if streamed:
        assert chosen.ring_bytes >= ring_bytes_for(streamed)
    if sum(map(sum, units)) <= budget:
        assert not streamed
        assert chosen.ring_bytes == 0


@given(given_units=UNITS, budget=st.integers(0, 1500))
def test_what_is_missing_is_enough_and_one_byte_less_is_not(
    given_units: list[tuple[list[int], bool]], budget: int
) -> None:
    units, must_stay = [blocks for blocks, _ in given_units], [stays for _, stays in given_units]
    missing = choose_residents(units, must_stay, budget).missing_bytes
    if missing:
        assert choose_residents(units, must_stay, budget + missing).missing_bytes == 0
        assert choose_residents(units, must_stay, budget + missing - 1).missing_bytes == 1


def test_all_stay_where_all_fit() -> None:
    chosen = choose_residents([[10, 5], [20]], [False, False], 35)
    assert (chosen.residents, chosen.resident_bytes, chosen.ring_bytes) == ({0, 1}, 35, 0)
    assert len(choose_residents([[10, 5], [20], [1]], [False] * 3, 35).residents) < 3


def test_no_units_need_nothing() -> None:
    chosen = choose_residents([], [], 0)
    assert (chosen.residents, chosen.resident_bytes, chosen.ring_bytes, chosen.missing_bytes) == (frozenset(), 0, 0, 0)


@pytest.mark.parametrize("count", [12, 32, 80])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_residents_are_spread_over_the_depth(count: int, share: float) -> None:
    ring = ring_bytes_for([[100]] * 2)
    chosen = choose_residents([[100]] * count, [False] * count, ring + int(share * (count - 3) * 100))
    places = sorted(chosen.residents)
    assert len(places) >= share * (count - 3) - 1
    # Between two residents, and between two streamed ones, it is never further than an even spread has it, and one.
    gaps = {after - before for before, after in itertools.pairwise(places)}
    assert max(gaps) - min(gaps) <= 1
    streamed = [number for number in range(count) if number not in chosen.residents]
    apart = {after - before for before, after in itertools.pairwise(streamed)}
    assert max(apart) - min(apart) <= 1


def test_units_that_must_stay_do_and_the_others_share_the_rest() -> None:
    must_stay = [True, False, False, False, False, False, True]
    units = [[7], [100], [100], [100], [100], [100], [3]]
    chosen = choose_residents(units, must_stay, 10 + 300 + 100)
    assert {0, 6} < chosen.residents
    assert len(chosen.residents) == 3
    assert chosen.ring_bytes == 300


def test_a_large_budget_in_bytes_is_divided_without_a_byte_too_many() -> None:
    units = [[123_456_789_012 + number] for number in range(70)]
    for budget in range(3 * units[-1][0] + 10, 60 * units[-1][0], 7 * units[-1][0] + 13):
        chosen = choose_residents(units, [False] * 70, budget)
        assert chosen.missing_bytes == 0
        assert chosen.resident_bytes + chosen.ring_bytes == budget


def test_what_is_used_more_often_comes_first_and_each_rank_is_spread() -> None:
    units = [[10]] * 12
    uses = [1] * 4 + [
        6,
        7,
        6,
        6,
        5,
        6,
        4,
        6,
    ]  # an encoder, a decoder
    chosen = choose_residents(units, [False] * 12, 30 + 40, uses)
    assert chosen.residents == {5, 7, 9, 11}
    chosen = choose_residents(units, [False] * 12, 30 + 80, uses)
    assert chosen.residents == {4, 5, 6, 7, 8, 9, 10, 11}
    assert chosen.ring_bytes == 30
