"""Which steps of a root may go. Pure: no I/O; whoever deletes them sees to it that the newer ones are durable first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fastpersist.errors import ConfigError

__all__ = ["RetentionPolicy", "best_steps", "steps_to_remove"]


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The rules that keep steps; a step stays if any of them keeps it. Without any rule, all steps stay.

    Args:
        keep: Keep the so many steps, >= 1, that were committed last.
        keep_every: Keep the steps that are multiples of it, >= 1; step 0 is one.
        keep_best: (count, metric, "min" or "max"): keep the `count` steps, >= 1, with the smallest or largest value of
            this metric. Steps without it, or with NaN, are not among them; of equal ones the one committed later stays.
            While no step has the metric, which may be misspelt, all steps stay.

    Raises:
        ConfigError: A rule makes no sense.
    """

    keep: int | None = None
    keep_every: int | None = None
    keep_best: tuple[int, str, str] | None = None

    def __post_init__(self) -> None:
        for name, count in (("keep", self.keep), ("keep_every", self.keep_every)):
            if count is not None and not _is_count(count):
                raise ConfigError(f"{name} must be an int >= 1, or None for no such rule; not {count!r}")
        if self.keep_best is not None and not _is_best_rule(self.keep_best):
            raise ConfigError(
                'keep_best must be a tuple (count >= 1, name of the metric, "min" or "max"), such as '
                f'(3, "loss", "min"); not {self.keep_best!r}'
            )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1  # bool is a subclass of int


def _is_best_rule(rule: object) -> bool:
    if not isinstance(rule, tuple) or len(rule) != 3:
        return False
    count, metric, direction = rule
    return _is_count(count) and isinstance(metric, str) and metric != "" and direction in ("min", "max")


def steps_to_remove(committed: Mapping[int, Mapping[str, float]], policy: RetentionPolicy) -> list[int]:
    """Return the steps that no rule keeps. The newest is never among them.

    What is left keeps itself: asked again about it, the answer is no step.

    Args:
        committed: From each committed step to its metrics, in the order in which they were committed (`commit_order`).
        policy: The rules.

    Returns:
        Steps to remove: the one that was committed first goes first.

    Thread safety: safe, as long as nobody changes `committed` meanwhile.
    """
    if policy.keep is None and policy.keep_every is None and policy.keep_best is None:
        return []
    if policy.keep_best is not None and not any(policy.keep_best[1] in metrics for metrics in committed.values()):
        return []
    steps = list(committed)
    kept = set(steps[-(policy.keep or 1) :])  # the newest stays whatever the rules are
    if policy.keep_every is not None:
        kept.update(step for step in steps if step % policy.keep_every == 0)
    if policy.keep_best is not None:
        kept.update(best_steps(committed, policy.keep_best)[: policy.keep_best[0]])
    return [step for step in steps if step not in kept]


def best_steps(committed: Mapping[int, Mapping[str, float]], rule: tuple[int, str, str]) -> list[int]:
    """Return the steps that have the metric of a `keep_best`, the best one first.

    Args:
        committed: As in `steps_to_remove`.
        rule: The metric, and "min" or "max", stand behind a count that is of no matter here.

    Thread safety: safe, as long as nobody changes `committed` meanwhile.
    """
    _, metric, direction = rule
    sign = 1.0 if direction == "min" else -1.0
    values = [
        (sign * metrics[metric], -place, step)
        for place, (step, metrics) in enumerate(committed.items())
        if not math.isnan(metrics.get(metric, math.nan))
    ]
    return [step for _, _, step in sorted(values)]
