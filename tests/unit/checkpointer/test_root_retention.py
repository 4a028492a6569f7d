"""Retention: a step goes only if no rule keeps it, and the newest never goes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpersist.checkpointer.root import RetentionPolicy, steps_to_remove
from fastpersist.errors import ConfigError

COUNTS = st.none() | st.integers(1, 6)
VALUES = st.sampled_from([0.0, -0.0, 1.0, 2.0, math.nan, math.inf, -math.inf]) | st.floats()
COMMITTED = st.dictionaries(
    st.integers(0, 30) | st.integers(0, 1 << 40),
    st.dictionaries(st.sampled_from(["loss", "accuracy"]), VALUES, max_size=2),
    max_size=15,
)
BEST = st.tuples(st.integers(1, 4), st.sampled_from(["loss", "accuracy", "absent"]), st.sampled_from(["min", "max"]))
POLICIES = st.builds(RetentionPolicy, keep=COUNTS, keep_every=COUNTS, keep_best=st.none() | BEST)

Committed = dict[int, dict[str, float]]


def kept(committed: Committed, policy: RetentionPolicy) -> set[int]:
    return set(committed) - set(steps_to_remove(committed, policy))


def newest_first(committed: Committed, steps: list[int], metric: str, sign: int) -> list[int]:
    place = {step: place for place, step in enumerate(committed)}
    return sorted(steps, key=lambda step: (sign * committed[step][metric], -place[step]))


# --------------------------------------------------------------------------------------------- what always holds


@given(COMMITTED, POLICIES)
def test_newest_is_never_removed(committed: Committed, policy: RetentionPolicy) -> None:
    assert not committed or list(committed)[-1] in kept(committed, policy)


@given(COMMITTED, POLICIES)
def test_removed_steps_are_committed_ones_the_oldest_first(committed: Committed, policy: RetentionPolicy) -> None:
    removed = steps_to_remove(committed, policy)
    assert removed == [step for step in committed if step in set(removed)]


@given(COMMITTED, POLICIES)
def test_what_is_left_keeps_itself(committed: Committed, policy: RetentionPolicy) -> None:
    left = {step: committed[step] for step in committed if step in kept(committed, policy)}
    assert steps_to_remove(left, policy) == []


@given(COMMITTED, POLICIES, st.integers(1, 6), st.integers(0, 3))
def test_a_larger_keep_removes_nothing_more(
    committed: Committed, policy: RetentionPolicy, keep: int, more: int
) -> None:
    fewer, larger = replace(policy, keep=keep), replace(policy, keep=keep + more)
    assert set(steps_to_remove(committed, larger)) <= set(steps_to_remove(committed, fewer))


@given(COMMITTED, POLICIES, BEST, st.integers(0, 3))
def test_a_larger_count_of_best_removes_nothing_more(
    committed: Committed, policy: RetentionPolicy, best: tuple[int, str, str], more: int
) -> None:
    fewer = replace(policy, keep_best=best)
    larger = replace(policy, keep_best=(best[0] + more, best[1], best[2]))
    assert set(steps_to_remove(committed, larger)) <= set(steps_to_remove(committed, fewer))


@given(COMMITTED, POLICIES)
def test_rules_keep_together_what_each_keeps_alone(committed: Committed, policy: RetentionPolicy) -> None:
    alone = [
        RetentionPolicy(**{name: value})
        for name in ("keep", "keep_every", "keep_best")
        if (value := getattr(policy, name)) is not None
    ]
    expected = set().union(*(kept(committed, rule) for rule in alone)) if alone else set(committed)
    assert kept(committed, policy) == expected


@given(COMMITTED, POLICIES, st.randoms())
def test_order_of_the_commits_counts_and_not_the_numbers(
    committed: Committed, policy: RetentionPolicy, random: Any
) -> None:
    policy = replace(policy, keep_every=None)
    numbers = random.sample(range(100), len(committed))
    renamed = dict(zip(committed, numbers, strict=True))
    removed = steps_to_remove({renamed[step]: metrics for step, metrics in committed.items()}, policy)
    assert removed == [renamed[step] for step in steps_to_remove(committed, policy)]


@given(COMMITTED, BEST)
def test_no_removed_step_is_better_than_the_best_that_stay(committed: Committed, best: tuple[int, str, str]) -> None:
    count, metric, direction = best
    removed = steps_to_remove(committed, RetentionPolicy(keep_best=best))
    sign = 1 if direction == "min" else -1
    ranked = [step for step in committed if not math.isnan(committed[step].get(metric, math.nan))]
    for step in set(removed) & set(ranked):
        order = newest_first(committed, ranked, metric, sign)
        ahead = order[: order.index(step)]
        assert len(ahead) >= count
        assert not set(ahead[:count]) & set(removed)


# --------------------------------------------------------------------------------------------- examples


def plain(*steps: int) -> Committed:
    return {step: {} for step in steps}


LOSSES = {10: {"loss": 3.0}, 20: {"loss": 1.0}, 30: {"loss": math.nan}, 40: {}, 50: {"loss": 1.0}, 60: {"loss": 9.0}}


@pytest.mark.parametrize(
    ("committed", "policy", "removed"),
    [
        (plain(), RetentionPolicy(keep=1), []),
        (plain(1, 2, 3), RetentionPolicy(), []),
        (plain(1, 2, 3), RetentionPolicy(keep=1), [1, 2]),
        (plain(3, 1, 2), RetentionPolicy(keep=2), [3]),
        (plain(10, 20, 30, 11), RetentionPolicy(keep=1), [10, 20, 30]),
        (plain(1, 2, 3), RetentionPolicy(keep=4), []),
        (plain(9, 10, 99_999_999, 100_000_000), RetentionPolicy(keep=2), [9, 10]),
        (plain(0, 5, 10, 15, 20, 21), RetentionPolicy(keep_every=10), [5, 15]),
        (plain(0, 5, 10, 15, 20, 21), RetentionPolicy(keep=2, keep_every=10), [5, 15]),
        (plain(5, 7), RetentionPolicy(keep_every=10), [5]),
        (LOSSES, RetentionPolicy(keep_best=(1, "loss", "min")), [10, 20, 30, 40]),  # of equal ones the later one stays
        (LOSSES, RetentionPolicy(keep_best=(2, "loss", "min")), [10, 30, 40]),
        (LOSSES, RetentionPolicy(keep_best=(9, "loss", "min")), [30, 40]),
        (LOSSES, RetentionPolicy(keep_best=(2, "loss", "max")), [20, 30, 40, 50]),
        (LOSSES, RetentionPolicy(keep_best=(1, "los", "max")), []),  # misspelt: nothing goes until a step has it
        (LOSSES, RetentionPolicy(keep=1, keep_every=7, keep_best=(1, "los", "max")), []),
        ({1: {}, 2: {"loss": math.nan}, 3: {}}, RetentionPolicy(keep_best=(1, "loss", "max")), [1, 2]),
        (LOSSES, RetentionPolicy(keep=2, keep_every=40, keep_best=(1, "loss", "min")), [10, 20, 30]),
        (
            {1: {"x": -math.inf}, 2: {"x": math.inf}, 3: {"x": math.nan}},
            RetentionPolicy(keep_best=(1, "x", "min")),
            [2],
        ),
        (
            {1: {"x": -math.inf}, 2: {"x": math.inf}, 3: {"x": math.nan}},
            RetentionPolicy(keep_best=(1, "x", "max")),
            [1],
        ),
    ],
)
def test_what_goes(committed: Committed, policy: RetentionPolicy, removed: list[int]) -> None:
    assert steps_to_remove(committed, policy) == removed


@pytest.mark.parametrize(
    "rules",
    [
        {"keep": 0}, {"keep": -1}, {"keep": True}, {"keep": 1.0}, {"keep": "3"},
        {"keep_every": 0}, {"keep_every": -10}, {"keep_every": False}, {"keep_every": 0.5},
        {"keep_best": (0, "loss", "min")}, {"keep_best": (True, "loss", "min")}, {"keep_best": (1, "", "min")},
        {"keep_best": (1, "loss", "least")}, {"keep_best": (1, "loss")}, {"keep_best": ("loss", 1, "min")},
        {"keep_best": "loss"}, {"keep_best": [1, "loss", "min"]}, {"keep_best": 3}, {"keep_best": (1, None, "min")},
        {"keep_best": ()},
    ],
    ids=str,
)  # fmt: skip
def test_rule_without_sense_is_refused_by_name(rules: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(rules))):
        RetentionPolicy(**rules)
