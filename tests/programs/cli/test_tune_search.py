"""What `fastpersist tune` decides, with disks that do not exist: costs and clock are made up, so it is known what is
best, and how much of it is noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from fastpersist.cli.tune.search import (
    DEFAULTS,
    Choice,
    Comparison,
    Race,
    choices_for,
    compare,
    halve,
    search,
    simplify,
)
from fastpersist.errors import UnsupportedError

MIB = 1 << 20
ENGINES = ["uring", "libaio", "threads", "threads-buffered"]


# --- a disk that does not exist


class MadeUpDisk:
    """Takes as long for a save as a function of the choice says, more or less; time is counted, not spent."""

    def __init__(self, cost: Callable[[Any], float], noise: float = 0.0, seed: int = 0) -> None:
        self._cost = cost
        self._noise = noise
        self._random = random.Random(seed)
        self.now_s = 0.0
        self.runs: list[Any] = []

    def measure(self, thing: Any) -> float:
        self.runs.append(thing)
        seconds = self._cost(thing) * (1 + self._random.uniform(-self._noise, self._noise))
        self.now_s += seconds
        return seconds

    def race(self) -> Race[Any]:
        return Race(self.measure, lambda: self.now_s)


def choices() -> list[Choice]:
    return choices_for(ENGINES, "uring", ring_limit_bytes=256 * MIB)


def test_choices_are_legal_different_from_the_defaults_and_from_each_other() -> None:
    every = choices()
    assert len(set(every)) == len(every) > 100
    assert DEFAULTS not in every
    assert all(choice.is_legal() for choice in every)
    assert {choice.engine for choice in every} == {"auto", "libaio", "threads", "threads-buffered"}
    first = [key for choice in every[:20] if len(choice.settings()) == 1 for key in choice.settings()]
    assert set(first) == {"engine", "chunk_bytes", "queue_depth", "ring_bytes"}
    assert {choice.engine for choice in every[20:28]} == {"auto", "libaio", "threads", "threads-buffered"}


def test_rings_that_hold_the_whole_file_are_not_tried() -> None:
    assert max(choice.ring_bytes for choice in choices_for(ENGINES, "uring", ring_limit_bytes=MIB)) == 64 * MIB


def test_threads_are_tried_where_auto_takes_them() -> None:
    found = choices_for(["threads-buffered"], "threads-buffered", ring_limit_bytes=MIB)
    assert {choice.engine for choice in found} == {"auto"}
    assert {choice.threads for choice in found} > {0, 2, 4}


def test_search_finds_what_is_faster_than_the_noise() -> None:
    def cost(choice: Choice) -> float:
        return 0.2 * (0.8 if choice.chunk_bytes == 2 * MIB else 1) * (0.8 if choice.engine == "libaio" else 1)

    idle_count = 0
    for seed in range(20):
        disk = MadeUpDisk(cost, noise=0.08, seed=seed)
        race = disk.race()
        best, rounds = search(race, choices(), DEFAULTS, 30.0, 0.2)
        best = simplify(race, best, 6, 36.0)
        comparison = compare(race, DEFAULTS, best, 45.0, pair_count_min=7, pair_count_max=15)
        assert comparison.is_faster
        assert comparison.gain == pytest.approx(0.2 / cost(best), rel=0.1)
        assert 0.01 < comparison.noise < 0.08
        assert len(rounds) >= 3
        assert disk.now_s < 50
        idle_count += len(set(best.settings()) - {"chunk_bytes", "engine"})
    assert idle_count <= 8  # values that make no difference, of 20 × 3


def test_search_keeps_the_defaults_where_all_are_alike() -> None:
    kept = 0
    for seed in range(40):
        disk = MadeUpDisk(lambda choice: 0.2, noise=0.1, seed=seed)
        race = disk.race()
        best, _ = search(race, choices(), DEFAULTS, 10.0, 0.2)
        comparison = compare(race, DEFAULTS, best, 15.0, pair_count_min=7, pair_count_max=15)
        kept += best == DEFAULTS or not comparison.is_faster
    assert kept >= 37  # one in forty by chance, says the interval


def test_drift_of_the_machine_does_not_decide() -> None:
    """Everything becomes slower while it is measured, the better choice too."""
    disk = MadeUpDisk(lambda choice: 0.1 + disk.now_s / 20 + (0 if choice.engine == "threads" else 0.05))
    race = disk.race()
    best, _ = search(race, choices(), DEFAULTS, 60.0, 0.2)
    assert best.engine == "threads"


def test_time_that_is_left_is_used_for_further_choices() -> None:
    disk = MadeUpDisk(lambda choice: 0.01 if choice != DEFAULTS else 0.02)
    search(disk.race(), choices(), DEFAULTS, 10.0, 1.0)  # the first estimate was a hundred times too high
    assert len(set(disk.runs)) > 100
    assert disk.now_s < 10.5


def test_slow_disk_ends_in_time() -> None:
    disk = MadeUpDisk(lambda choice: 3.0)
    _, rounds = search(disk.race(), choices(), DEFAULTS, 10.0, 3.0)
    assert disk.now_s <= 12
    assert DEFAULTS in rounds[0]


def test_half_is_left_after_each_round_and_runs_more_often() -> None:
    told: list[tuple[int, int]] = []
    disk = MadeUpDisk(lambda number: 1 + number / 10)
    best, rounds = halve(disk.race(), range(1, 17), 0, 1e9, lambda things, repeats: told.append((len(things), repeats)))
    assert told == [(17, 2), (9, 3), (5, 4), (3, 5)]
    assert best == 0
    assert [set(found) for found in rounds[1:]] == [set(range(9)), set(range(5)), set(range(3))]


def test_choice_that_fails_is_out_and_told() -> None:
    def cost(choice: Choice) -> float:
        if choice.engine == "libaio":
            raise UnsupportedError("no libaio here")
        return 0.1 if choice.engine == "threads" else 0.2

    disk = MadeUpDisk(cost)
    race = disk.race()
    best, rounds = search(race, choices(), DEFAULTS, 20.0, 0.2)
    assert best.engine == "threads"
    assert {choice.engine for choice in race.failed} == {"libaio"}
    assert set(race.failed.values()) == {"no libaio here"}
    assert len(disk.runs) == len([c for c in disk.runs if c.engine != "libaio"]) + len(race.failed)  # once each
    assert not any(choice.engine == "libaio" for found in rounds for choice in found)


def test_pass_that_was_not_ended_does_not_count() -> None:
    disk = MadeUpDisk(lambda thing: 1.0)
    found = disk.race().round(["a", "b", "c"], 5, 7.5)
    assert {thing: len(seconds) for thing, seconds in found.items()} == {"a": 2, "b": 2, "c": 2}
    found = disk.race().round(["a", "b", "c"], 5, 0.0)
    assert found == {"a": [1.0]}


# --- what is left of a choice


def cost_of(**gains: float) -> Callable[[Choice], float]:
    def cost(choice: Choice) -> float:
        return math.prod([0.2, *(gains.get(key, 1.0) for key in choice.settings())])

    return cost


FULL = Choice("threads", 4 * MIB, 6, 128 * MIB, 4)


@pytest.mark.parametrize(
    ("gains", "kept"),
    [
        ({"engine": 0.9}, {"engine"}),
        ({"chunk_bytes": 0.9, "threads": 0.9}, {"chunk_bytes", "threads"}),
        ({"queue_depth": 0.9, "engine": 1.1}, {"queue_depth"}),
        (dict.fromkeys(FULL.settings(), 0.9), set(FULL.settings())),
    ],
)
def test_only_values_that_matter_are_left(gains: dict[str, float], kept: set[str]) -> None:
    disk = MadeUpDisk(cost_of(**gains), noise=0.01)
    assert set(simplify(disk.race(), FULL, 6, math.inf).settings()) == kept


def test_of_two_values_that_each_are_enough_one_is_left() -> None:
    disk = MadeUpDisk(lambda choice: 0.1 if {"engine", "chunk_bytes"} & set(choice.settings()) else 0.2)
    kept = simplify(disk.race(), FULL, 3, math.inf).settings()
    assert set(kept) in ({"engine"}, {"chunk_bytes"})


def test_values_that_are_good_together_alone_stay_together() -> None:
    def cost(choice: Choice) -> float:
        return 0.1 if {"engine", "chunk_bytes"} <= set(choice.settings()) else 0.2

    assert set(simplify(MadeUpDisk(cost).race(), FULL, 3, math.inf).settings()) == {"engine", "chunk_bytes"}


# --- the noise


@pytest.mark.parametrize(
    ("ratios", "is_faster", "low"),
    [
        ([1.1] * 5, False, 0.0),  # too few to say anything
        ([1.1] * 6, True, 1.1),
        ([0.99, 1.1, 1.1, 1.1, 1.1, 1.1], False, 0.99),
        ([0.99, *[1.1] * 8], True, 1.1),
        ([0.99, 0.99, *[1.1] * 7], False, 0.99),
        ([1.01] * 15, False, 1.01),  # certain, and not worth a file
        ([0.5] * 9, False, 0.5),
        ([], False, 0.0),
    ],
)
def test_gain_counts_when_it_is_beyond_the_noise(ratios: list[float], is_faster: bool, low: float) -> None:
    comparison = Comparison(list(ratios), [1.0] * len(ratios))
    assert comparison.is_faster is is_faster
    assert comparison.interval[0] == low


def test_interval_holds_the_true_median_in_19_of_20_cases() -> None:
    lot = random.Random(7)
    inside = 0
    for _ in range(2000):
        comparison = Comparison([math.exp(lot.gauss(0.1, 0.3)) for _ in range(9)], [1.0] * 9)
        low, high = comparison.interval
        inside += low <= math.exp(0.1) <= high
    assert 0.94 < inside / 2000 < 0.98  # (96.1 %, as there are whole numbers of pairs alone)
