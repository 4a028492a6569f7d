"""Decide which steps of a root stay, and do what follows a durable step: name it in LATEST, remove what no rule keeps.

The rules are pure. A step is removed only when the newer ones are durable; `removal` removes its directory. A failure
here costs no step: the log says what was not done.
"""

from __future__ import annotations

import difflib
import errno
import logging
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastpersist.commit.directory_commit import remove_directory
from fastpersist.commit.filesystem import filesystem
from fastpersist.commit.step_listing import (
    Commit,
    commit_of,
    committed_steps,
    in_commit_order,
    next_commit_number,
    read_commits,
)
from fastpersist.distributed.common_steps import done_by_first
from fastpersist.errors import CheckpointNotFoundError, ConfigError, StorageError
from fastpersist.formats.manifest import COMMIT_NUMBER_MAX, step_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RetentionPolicy", "RootUpkeep", "best_steps", "commits_of", "steps_to_remove"]

_log = logging.getLogger("fastpersist")

_LATEST_NAME = "LATEST"


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

    def said(self) -> list[str]:
        """Return the rules as they were given, for people."""
        rules = {"keep": self.keep, "keep_every": self.keep_every, "keep_best": self.keep_best}
        return [f"{name}={value!r}" for name, value in rules.items() if value is not None] or ["every step is kept"]

    def why_all_stay(self, metrics: Mapping[str, float]) -> str:
        """Say why `keep_best` may keep every step: these metrics do not have its own, which may be misspelt; or ""."""
        if self.keep_best is None or self.keep_best[1] in metrics:
            return ""
        metric = self.keep_best[1]
        given = ", ".join(map(repr, metrics)) or "none"
        alike = difflib.get_close_matches(metric, metrics, 1)
        meant = f" (is {alike[0]!r} meant?)" if alike else ""
        return (
            f"keep_best goes by the metric {metric!r}, and the metrics of this save are: {given}{meant}. While no step "
            "has it, every step is kept"
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
        committed: From each committed step to its metrics, in the order in which they were committed (`step_listing`).
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
        rule: Its metric, and "min" or "max"; its count is not used here.

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


def commits_of(root: str) -> dict[int, Commit]:
    """Return when each committed step of a root was committed, and its metrics."""
    return {step: commit_of(manifest) for step, manifest in committed_steps(root).items()}


class RootUpkeep:
    """Keeps a root in order.

    Args:
        root: The directory.
        retention: What is kept.

    Thread safety: any thread.
    """

    def __init__(self, root: str, retention: RetentionPolicy) -> None:
        self._root = root
        self._retention = retention
        self._lock = threading.RLock()  # re-entrant, for signal handlers; not held while anything is removed
        self._metrics: dict[int, Mapping[str, float]] | None = None  # of the committed steps, in order of commit
        self._next_number = 1
        self._resumed: int | None = None
        self._resumed_at: int | None = None  # the greatest number then, as far as it is known

    def forget(self) -> None:
        """Read the root again when it is needed: somebody else may have changed it."""
        with self._lock:
            self._metrics = None

    def resumed_from(self, step: int) -> None:
        """Count a step that was loaded as committed now: it is removed after `keep` newer ones."""
        with self._lock:
            self._resumed = step
            self._resumed_at = None if self._metrics is None else self._next_number - 1
            if self._metrics is not None and step in self._metrics:
                self._metrics[step] = self._metrics.pop(step)

    def next_commit_number(self) -> int:
        """Return the number of the step that is about to be made visible; greater than all that were there before.

        Raises:
            StorageError: The root cannot be listed.
        """
        with self._lock:
            self._known()
            number = self._next_number
            self._next_number = min(number + 1, COMMIT_NUMBER_MAX)
            return number

    def _known(self) -> dict[int, Mapping[str, float]]:
        """Return the metrics of the committed steps, in order of commit. Under the lock."""
        if self._metrics is None:
            commits = commits_of(self._root)
            number = next_commit_number(commits.values())
            self._next_number = max(self._next_number, number)
            if self._resumed is not None and self._resumed in commits:
                if self._resumed_at is None:
                    self._resumed_at = number - 1
                if (commits[self._resumed].number or 0) <= self._resumed_at:  # else it was saved again since
                    commits[self._resumed] = Commit(self._resumed_at, math.inf, commits[self._resumed].metrics)
            self._metrics = {step: commits[step].metrics for step in in_commit_order(commits)}
        return self._metrics

    def after_commit(self, step: int, metrics: dict[str, float], among: Collection[int] | None = None) -> bool:
        """Name a durable step in LATEST, and remove the steps that no rule keeps.

        Args:
            step: Which.
            metrics: Of that step.
            among: The steps that count, if not all of them do: a root that holds parts of steps (`node_local`) may hold
                some of steps that were never committed.

        Returns:
            Whether the root could be read and written; the log says why not.
        """
        try:
            self._write_latest(step)
            with self._lock:
                known = self._known()
                known.pop(step, None)
                known[step] = metrics  # behind all others: these calls come in the order of the commits
                counted = {found: known[found] for found in known if among is None or found in among}
        except StorageError as error:
            _log.warning("%s: step %d is saved, but what comes after was not done: %s", self._root, step, error)
            return False
        for old in steps_to_remove(counted, self._retention):
            try:
                with suppress(CheckpointNotFoundError):  # somebody else has removed it
                    if not remove_directory(os.path.join(self._root, step_name(old))):
                        continue  # somebody reads it: later
                with self._lock:
                    known.pop(old, None)
            except StorageError as error:
                _log.warning("%s: step %d is kept no longer, but stays: %s", self._root, old, error)
        return True

    def remove(self, steps: Iterable[int]) -> list[int]:
        """Remove steps because somebody has asked for it, and let LATEST name the newest of those that are left.

        Args:
            steps: Those that are there already no longer are passed over.

        Returns:
            What was removed, in the order in which it went.

        Raises:
            StorageError: One could not be removed; the message says which, and why. The others are.
        """
        removed = []
        stuck: StorageError | None = None
        for step in steps:
            path = os.path.join(self._root, step_name(step))
            try:
                if remove_directory(path):
                    removed.append(step)
                    continue
                message = f"step {step} of {self._root} is being read, and stays: remove it again when that is over"
                stuck = StorageError(errno.EBUSY, message, path)
            except CheckpointNotFoundError as error:
                if os.path.lexists(path):  # without a manifest; it was never committed
                    stuck = StorageError(None, f"{error}; it is no checkpoint: look at it, and remove it by hand", path)
            except StorageError as error:
                stuck = error
        if removed:
            self._name_newest()
        if stuck is not None:
            raise stuck
        return removed

    def remove_together(
        self,
        choose: Callable[[list[int]], list[int]],
        take_root: Callable[[], None],
        process_group: ProcessGroup | None,
        rank: int,
    ) -> list[int]:
        """Remove what the first rank chooses; all ranks call this, each for its own root.

        Args:
            choose: Of the steps there are, the newest first: what is left has then always been a state.
            take_root: Called on the first rank before anything is removed.
            process_group: Of the ranks; None for this one alone.
            rank: This one.

        Returns:
            What the first rank has removed.

        Raises:
            StorageError: As `remove`.
            PeerError: The first rank failed.
            Exception: Whatever `choose` and `take_root` raise.
        """

        def remove() -> list[int]:
            steps = choose(in_commit_order(read_commits(self._root))[::-1])
            if steps:
                take_root()
            return self.remove(steps)

        removed = done_by_first(process_group, self._root, "removing steps of", remove)
        if rank:
            try:
                self.remove(removed)
            except StorageError as error:  # what other stores have is worth nothing without the first rank's part
                _log.warning("%s: a part of a removed step stays: %s", self._root, error)
        return removed

    def _name_newest(self) -> None:
        with self._lock:
            self._metrics = None
            commits = commits_of(self._root)
        if commits:
            self._write_latest(in_commit_order(commits)[-1])
            return
        try:
            filesystem().unlink(os.path.join(self._root, _LATEST_NAME))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise

    def _write_latest(self, step: int) -> None:
        path = os.path.join(self._root, _LATEST_NAME)
        temporary = os.path.join(self._root, f".{_LATEST_NAME}.new")
        try:
            fd = filesystem().create(temporary)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            filesystem().unlink(temporary)  # a process has died here; or it is no file, such as a FIFO
            fd = filesystem().create(temporary)
        try:
            filesystem().write(fd, f"{step_name(step)}\n".encode(), temporary)
        finally:
            filesystem().close(fd, temporary)
        filesystem().rename(temporary, path)
