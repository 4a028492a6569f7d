"""The search of `fastpersist tune`: choices, successive halving, and the decision whether a gain exceeds the noise.

This module uses no disk and no clock: the caller passes a function that measures a choice, so tests can use simulated
disks.

Choices that are compared take turns, each time in another order, so that drift of a shared machine affects all alike.
Each round measures anew, because the best of many noisy numbers is partly luck. So the reported gain comes from runs
that had no part in the choosing.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from fastpersist.config import Config
from fastpersist.errors import UnsupportedError

__all__ = [
    "DEFAULTS",
    "WRITER_COUNTS",
    "Choice",
    "Comparison",
    "Race",
    "choices_for",
    "compare",
    "halve",
    "search",
    "settings_text",
    "simplify",
]

_UNTUNED = Config()
_MIB = 1 << 20
_CHUNKS = tuple(mib * _MIB for mib in (1, 2, 4, 8, 16, 32))
_RINGS = tuple(mib * _MIB for mib in (32, 64, 128, 256))
_THREADS = (2, 4, 8)
WRITER_COUNTS = (1, 2, 4, 8)
"""Processes that write one file together. The last one is what the defaults come to, where there are enough ranks."""

_FIRST_REPEAT_COUNT = 2
_FINALIST_COUNT = 2
_CHOICE_COUNT_MAX = 48
_CONFIDENCE = 0.95
_GAIN_MIN = 1.02  # less is no reason to have a file

_Thing = TypeVar("_Thing")


class Choice(NamedTuple):
    """Values that a save is done with, by the names of `fastpersist.config.Config`."""

    engine: str = _UNTUNED.engine
    chunk_bytes: int = _UNTUNED.chunk_bytes
    queue_depth: int | None = _UNTUNED.queue_depth
    ring_bytes: int = _UNTUNED.ring_bytes
    threads: int = _UNTUNED.threads

    def settings(self) -> dict[str, Any]:
        """Return what differs from the defaults, as a tuning file has it."""
        own, defaults = self._asdict(), DEFAULTS._asdict()
        return {key: value for key, value in own.items() if value != defaults[key]}

    def environment(self) -> dict[str, str]:
        """Return the variables that put it in force; no other variable of ours may be set."""
        return {"FASTPERSIST_CONFIG": ""} | {
            f"FASTPERSIST_{key.upper()}": str(value) for key, value in self.settings().items()
        }

    def is_legal(self) -> bool:
        """Whether a ring can have these values, and each of them matters."""
        buffer_count = self.ring_bytes // self.chunk_bytes
        return (
            not self.ring_bytes % self.chunk_bytes
            and buffer_count >= 4
            and (self.queue_depth is None or self.queue_depth < buffer_count)
            and (self.threads == 0 or self.threads < min(16, self.queue_depth or buffer_count))
        )

    def __str__(self) -> str:
        return settings_text(self.settings()) or "the defaults"


DEFAULTS = Choice()
"""The settings without tuning."""


def settings_text(settings: dict[str, Any]) -> str:
    """Describe settings in one line, such as "engine threads, chunk_bytes 4 MiB"."""
    return ", ".join(
        f"{key} {value // _MIB} MiB" if key.endswith("_bytes") else f"{key} {value}" for key, value in settings.items()
    )


def choices_for(engines: Sequence[str], auto: str, *, ring_limit_bytes: int) -> list[Choice]:
    """Return all choices but the defaults: first those that differ in one value, then the rest in random order.

    Args:
        engines: The engines that work in the directory.
        auto: The engine that "auto" takes.
        ring_limit_bytes: The largest ring that still says something: a file should be several times as large.
    """
    names = ["auto", *(name for name in engines if name != auto)]
    every = []
    for name, chunk_bytes, ring_bytes in itertools.product(names, _CHUNKS, _RINGS):
        if ring_bytes > max(ring_limit_bytes, DEFAULTS.ring_bytes):
            continue
        is_threads = (auto if name == "auto" else name).startswith("threads")
        buffer_count = ring_bytes // chunk_bytes
        depths = (None, *sorted({buffer_count // 2, buffer_count // 4} - {0}))
        for depth, threads in itertools.product(depths, (0, *_THREADS) if is_threads else (0,)):
            every.append(Choice(name, chunk_bytes, depth, ring_bytes, threads))
    every = [choice for choice in every if choice.is_legal() and choice != DEFAULTS]
    lot = random.Random(0)
    lot.shuffle(every)
    near = [choice for choice in every if len(choice.settings()) == 1]
    near.sort(key=lambda choice: "engine" not in choice.settings())
    far = [choice for choice in every if len(choice.settings()) > 1]
    # One choice of each engine in turn: engines with threads have many more choices, which would crowd out the others.
    by_engine = [[choice for choice in far if choice.engine == name] for name in names]
    mixed = [choice for turn in itertools.zip_longest(*by_engine) for choice in turn if choice is not None]
    return [*near, *mixed]


# ------------------------------------------------------------------------------------------------- rounds


class Race(Generic[_Thing]):
    """Measures choices in turn, and keeps the results. Drops a choice that cannot be measured.

    Args:
        measure: Returns the seconds of one run; raises UnsupportedError if a choice cannot be measured.
        now: A clock, in seconds.

    Attributes:
        failed: Reason of failure by choice.
        run_count: Number of runs.
    """

    def __init__(self, measure: Callable[[_Thing], float], now: Callable[[], float]) -> None:
        self._measure = measure
        self._lot = random.Random(1)
        self.now = now
        self.failed: dict[_Thing, str] = {}
        self.run_count = 0

    def round(self, things: Sequence[_Thing], repeat_count: int, deadline_s: float) -> dict[_Thing, list[float]]:
        """Run each choice a number of times; stop early after the deadline, but run the first one at least once.

        Returns:
            Seconds by choice, the same number for each. An unfinished pass does not count, unless it was the first.
        """
        found: dict[_Thing, list[float]] = {thing: [] for thing in things}
        for number in range(repeat_count):
            passed: dict[_Thing, float] = {}
            todo = [thing for thing in things if thing not in self.failed]
            for thing in self._lot.sample(todo, len(todo)) if number else todo:
                if self.now() >= deadline_s and (number or passed):
                    break
                self.run_count += 1
                try:
                    passed[thing] = self._measure(thing)
                except UnsupportedError as error:
                    self.failed[thing] = str(error)
            if number == 0 or len(passed) == len([thing for thing in todo if thing not in self.failed]):
                for thing, seconds in passed.items():
                    found[thing].append(seconds)
            if self.now() >= deadline_s:
                break
        return {thing: seconds for thing, seconds in found.items() if seconds and thing not in self.failed}


def run_count_of(choice_count: int) -> int:
    """Return how many runs it takes to halve so many choices down to the finalists, the defaults included."""
    runs, repeat_count = 0, _FIRST_REPEAT_COUNT
    while choice_count > _FINALIST_COUNT:
        runs += (choice_count + 1) * repeat_count
        choice_count = -(-choice_count // 2)
        repeat_count += 1
    return runs + (choice_count + 1) * repeat_count


def choice_count_for(run_count: int) -> int:
    """Return how many choices can be halved in so many runs, 4 at least and 48 at most."""
    count = 2 * _FINALIST_COUNT
    while count < _CHOICE_COUNT_MAX and run_count_of(count + 1) <= run_count:
        count += 1
    return count


def halve(
    race: Race[_Thing],
    things: Sequence[_Thing],
    baseline: _Thing,
    deadline_s: float,
    tell: Callable[[Sequence[_Thing], int], object] = lambda things, repeat_count: None,
) -> tuple[_Thing, list[dict[_Thing, list[float]]]]:
    """Return the best thing by successive halving: a few runs of each, then more of the better half, and so on.

    Args:
        race: Measures the things.
        things: The things to compare, without the baseline.
        baseline: A thing that runs in every round, and is never dropped.
        deadline_s: The time at which a result is due, by the race's clock.
        tell: Called before each round with the things that run, and how often each runs.

    Returns:
        The best, which may be the baseline; and for each round, the seconds by thing.
    """
    left, repeat_count = list(things), _FIRST_REPEAT_COUNT
    rounds = []
    while True:
        things = [baseline, *left]
        tell(things, repeat_count)
        found = race.round(things, repeat_count, deadline_s)
        rounds.append(found)
        ranked = sorted(found, key=lambda thing: statistics.median(found[thing]))
        best = ranked[0] if ranked else baseline
        is_final = len(left) <= _FINALIST_COUNT
        left = [thing for thing in ranked if thing != baseline]
        if is_final or not left or race.now() >= deadline_s:
            return best, rounds
        left = left[: max(_FINALIST_COUNT, -(-len(left) // 2))]
        repeat_count += 1


def search(
    race: Race[_Thing],
    things: Sequence[_Thing],
    baseline: _Thing,
    deadline_s: float,
    run_s: float,
    tell: Callable[[Sequence[_Thing], int], object] = lambda things, repeat_count: None,
) -> tuple[_Thing, list[dict[_Thing, list[float]]]]:
    """Return the best of many things: halves as many at a time as there is time for, and more if some is left.

    What was best before runs against the next ones.

    Args:
        race: Measures the things.
        things: The things to compare, without the baseline; those to be tried first come first.
        baseline: A thing that runs in every round, and is never dropped.
        deadline_s: The time at which a result is due, by the race's clock.
        run_s: The seconds that a run takes, as far as is known.
        tell: Called before each round, as in `halve`.
    """
    best, rounds, tried = baseline, [], 0
    started_s = race.now()
    while tried < len(things):
        if race.run_count:
            run_s = (race.now() - started_s) / race.run_count
        left_count = int((deadline_s - race.now()) / run_s)
        if tried and left_count < run_count_of(2 * _FINALIST_COUNT):
            break
        batch = list(things[tried : tried + choice_count_for(left_count)])
        tried += len(batch)
        if best != baseline:
            batch.append(best)
        best, more = halve(race, batch, baseline, deadline_s, tell)
        rounds += more
    return best, rounds


def simplify(race: Race[Choice], choice: Choice, repeat_count: int, deadline_s: float) -> Choice:
    """Reset to its default every value that makes no difference, so that only effective ones remain.

    Args:
        race: Measures the choices.
        choice: The choice to simplify.
        repeat_count: The number of runs of each variant.
        deadline_s: The time at which a result is due, by the race's clock.
    """
    defaults = DEFAULTS._asdict()
    back = {key: choice._replace(**{key: defaults[key]}) for key in choice.settings()}
    variants = {key: other for key, other in back.items() if other.is_legal()}
    if len(back) < 2 or not variants:
        return choice
    found = race.round([choice, *variants.values()], repeat_count, deadline_s)
    idle = [key for key, variant in variants.items() if _is_as_good(found, variant, choice)]
    idle.sort(key=lambda key: statistics.median(found[variants[key]]))
    plain = choice
    for key in idle:
        plain = _plainer(plain, key)
    if plain == choice or plain in variants.values():
        return plain
    if _is_as_good(race.round([choice, plain], repeat_count, deadline_s), plain, choice):
        return plain
    # Some of them make up for each other: one at a time, against what is left by then.
    plain = _plainer(choice, idle[0])
    for key in idle[1:]:
        other = _plainer(plain, key)
        if race.now() >= deadline_s:
            break
        if other != plain and _is_as_good(race.round([plain, other], repeat_count, deadline_s), other, plain):
            plain = other
    return plain


def _plainer(choice: Choice, key: str) -> Choice:
    """Reset a value to its default, if the result is valid and not all defaults."""
    plainer = choice._replace(**{key: getattr(DEFAULTS, key)})
    return plainer if plainer.is_legal() and plainer != DEFAULTS else choice


def _is_as_good(found: dict[Choice, list[float]], plain: Choice, choice: Choice) -> bool:
    """Return whether a few runs show no evidence that a plainer choice is slower."""
    if plain not in found or choice not in found:
        return False
    comparison = Comparison(found[plain], found[choice])
    faster_count = sum(ratio > 1 for ratio in comparison.ratios)
    return comparison.gain < _GAIN_MIN or faster_count < 0.8 * len(comparison.ratios)


# ------------------------------------------------------------------------------------------------- noise


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of two things in turn, paired in order.

    Attributes:
        before_s: Seconds of the current choice.
        after_s: Seconds of the proposed choice.
    """

    before_s: list[float]
    after_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """How many times as fast, pair by pair, ascending."""
        pairs = zip(self.before_s, self.after_s, strict=False)
        return sorted(before / after for before, after in pairs)

    @property
    def gain(self) -> float:
        """The median of the ratios; 1 if there are none."""
        return statistics.median(self.ratios) if self.ratios else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the median ratio, for noise of any distribution; (0, inf) with too few pairs.

        The k-th smallest and the k-th largest value enclose the median unless fewer than k values lie on one side of
        it, which happens as often as with fair coins. Example: of 9 pairs it is the 2nd and the 8th (96 %); below 6
        there is no such k.

        Source: David and Nagaraja, Order Statistics, 7.1.
        """
        ratios = self.ratios
        count = len(ratios)
        rank, outside = 0, 0.0
        while rank < count:
            outside += 2 * math.comb(count, rank) / 2**count
            if outside > 1 - _CONFIDENCE:
                break
            rank += 1
        return (ratios[rank - 1], ratios[count - rank]) if rank else (0.0, math.inf)

    @property
    def is_faster(self) -> bool:
        """Whether the proposed one is faster by more than the noise, and by enough to matter."""
        return self.interval[0] > 1 and self.gain >= _GAIN_MIN

    @property
    def is_slower(self) -> bool:
        """Whether the proposed one is slower by more than the noise, and by enough to matter."""
        return self.interval[1] < 1 and self.gain <= 1 / _GAIN_MIN

    @property
    def noise(self) -> float:
        """Noise of the `before` runs: half the distance of the quartiles, divided by the median."""
        if len(self.before_s) < 2:
            return 0.0
        quartiles = statistics.quantiles(self.before_s, n=4, method="inclusive")
        return (quartiles[2] - quartiles[0]) / 2 / quartiles[1]


def compare(
    race: Race[_Thing], before: _Thing, after: _Thing, deadline_s: float, *, pair_count_min: int, pair_count_max: int
) -> Comparison:
    """Run two things in turn until the deadline.

    Args:
        race: Measures the two.
        before: The current choice.
        after: The proposed choice.
        deadline_s: The time at which a result is due, by the race's clock.
        pair_count_min: Least number of pairs, even after the deadline.
        pair_count_max: Largest number of pairs.
    """
    found = race.round([before, after], pair_count_min, math.inf)
    for _ in range(pair_count_max - pair_count_min):
        if race.now() >= deadline_s or len(found) < 2:
            break
        for thing, seconds in race.round([before, after], 1, math.inf).items():
            found[thing] += seconds
    if len(found) < 2:
        return Comparison(found.get(before, []), [])
    return Comparison(found[before], found[after])
