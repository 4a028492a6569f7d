"""The root of a Checkpointer: made and locked by its first save, named steps in it, and the rules by which steps stay.

The rules are pure functions. A step is removed only when the newer ones are durable; `commit.removal` removes its
directory. If tidying up after a save fails, no step is lost: the log says what was not done.
"""

from __future__ import annotations

import difflib
import errno
import logging
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastpersist.commit.directory_commit import RootLock, remove_directory, sweep_directories
from fastpersist.commit.filesystem import filesystem, ignoring, make_directories, storage_errors
from fastpersist.commit.locks import is_root_on
from fastpersist.commit.removal import remove_replaced_before
from fastpersist.commit.step_listing import (
    Commit,
    candidate_steps,
    check_files,
    commits_of,
    in_commit_order,
    next_commit_number,
    read_commits,
    read_manifest,
)
from fastpersist.distributed.common_steps import done_by_first
from fastpersist.distributed.node_local.copies import COMMITTED_NAME
from fastpersist.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    NoSpaceError,
    StorageError,
)
from fastpersist.events.delivery import emit, flush, log_of
from fastpersist.events.log import EventLog
from fastpersist.formats.manifest import COMMIT_NUMBER_MAX, step_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RetentionPolicy", "Root", "best_steps", "steps_to_remove", "why_no_root"]

_log = logging.getLogger("fastpersist")

_LATEST_NAME = "LATEST"
_STEP_PATTERN = re.compile(r"step-[0-9]{8,19}")


# --------------------------------------------------------------------------------------------- which steps stay


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The rules that keep steps; a step stays if any rule keeps it. Without any rule, all steps stay.

    Args:
        keep: Keep the steps that were committed last, this many; at least 1.
        keep_every: Keep the steps that are multiples of this number, at least 1; step 0 is one.
        keep_best: (count, metric, "min" or "max"): keep the `count` steps, at least 1, with the smallest or largest
            value of this metric. A step without it, or with NaN, is not among them; of equal steps the one committed
            later stays. While no step has the metric, which may be misspelt, all steps stay.

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
        """Return the rules as text, one for each."""
        rules = {"keep": self.keep, "keep_every": self.keep_every, "keep_best": self.keep_best}
        return [f"{name}={value!r}" for name, value in rules.items() if value is not None] or ["every step is kept"]

    def why_all_stay(self, metrics: Mapping[str, float]) -> str:
        """Say that these metrics lack the one of `keep_best`, which may be misspelt; "" if they have it."""
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

    Applied again to the steps that are left, the rules remove none.

    Args:
        committed: The metrics of each committed step, in the order of the commits (`step_listing`).
        policy: The rules.

    Returns:
        The steps to remove, in the order of the commits.

    Thread safety: any thread, as long as no other thread changes `committed` meanwhile.
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
    """Return the steps that have the metric of a `keep_best` rule, the best one first.

    Args:
        committed: The metrics of each committed step, as in `steps_to_remove`.
        rule: (count, metric, "min" or "max"); the count is ignored.

    Thread safety: any thread, as long as no other thread changes `committed` meanwhile.
    """
    _, metric, direction = rule
    sign = 1.0 if direction == "min" else -1.0
    values = [
        (sign * metrics[metric], -place, step)
        for place, (step, metrics) in enumerate(committed.items())
        if not math.isnan(metrics.get(metric, math.nan))
    ]
    return [step for _, _, step in sorted(values)]


# --------------------------------------------------------------------------------------------- the directory


def why_no_root(root: str) -> str:
    """Say why a path cannot be the root of checkpoints; "" if nothing is known against it."""
    try:
        is_directory = stat.S_ISDIR(os.stat(root).st_mode)
    except NotADirectoryError:
        return f"{root} cannot hold checkpoints: a file is where one of its parents should be"
    except OSError:
        return ""  # it is not there yet; or the first save says what is wrong
    return (
        "" if is_directory else f"{root} is a file, and checkpoints are directories below their root: name a directory"
    )


def committed_number(root: str) -> int:
    """Return the greatest commit number that `Root.mark_committed` has noted; 0 if there is none that can be read."""
    try:
        with open(os.path.join(root, COMMITTED_NAME), encoding="ascii") as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return 0


class Root:
    """The directory of a Checkpointer. It holds the lock from the first save on, and keeps the directory in order.

    Args:
        path: The directory.
        retention: The rules by which steps stay.
        lock_timeout_s: Seconds for which the first save waits if a process of another host holds the lock.

    Attributes:
        path: The directory.
        unloadable: Steps that a load could not read although their manifests are whole.

    Thread safety: the training thread calls take, release, remove and remove_together (where each node has a root of
        its own, the thread that writes calls take); any thread calls the others.
    """

    def __init__(self, path: str, retention: RetentionPolicy, lock_timeout_s: float = 0.0) -> None:
        self.path = path
        self.unloadable: set[int] = set()
        self._retention = retention
        self._first_lock_timeout_s = self._lock_timeout_s = lock_timeout_s
        self._root_lock: RootLock | None = None
        self._device: int | None = None  # of the directory, when its lock was last taken
        self._lock = threading.RLock()  # re-entrant, for signal handlers; not held while anything is removed
        self._metrics: dict[int, Mapping[str, float]] | None = None  # of the committed steps, in order of commit
        self._next_number = 1
        self._may_have_missed = False  # the save of a step has failed, perhaps after the step became visible
        self._resumed: int | None = None
        self._resumed_at: int | None = None  # the greatest number then, as far as it is known
        self._events: EventLog | None = None

    def log_events(self, rank: int) -> None:
        """Log what happens to the steps from now on, as this rank."""
        self._events = log_of(self.path, rank)
        self._tell_log_the_device()

    def _tell_log_the_device(self) -> None:
        """Have no late event written elsewhere, if the file system is unmounted before it is delivered."""
        if self._events is not None and self._device is not None:
            self._events.device = self._device

    # --- the lock

    def is_locked(self) -> bool:
        """Tell whether this object has the lock of the directory to which the path leads now."""
        lock = self._root_lock
        return lock is not None and lock.root == os.path.realpath(self.path) and lock.is_held()

    @property
    def directory(self) -> str:
        """Where the path led when the lock was taken: saves under way end there, even if a link is changed."""
        lock = self._root_lock
        return self.path if lock is None else lock.root

    def take(self) -> list[str] | None:
        """Make the directory and take its lock, once; again if it was lost, moved away, or a link leads elsewhere.

        No step may still wait for `after_commit` at that time, because `after_commit` relies on the earlier state.

        Returns:
            The directories that were made for it; None if the lock was held already.

        Raises:
            ConfigError: Another process saves there.
            StorageError: The directory cannot be made or written; or its file system is not mounted any more.
        """
        if self.is_locked():
            return None
        self._unlock()
        self._refuse_unmounted()
        made = make_directories(self.path)
        with storage_errors("looking up", self.path):
            self._device = os.stat(self.path).st_dev
        self._tell_log_the_device()
        timeout_s, self._lock_timeout_s = self._lock_timeout_s, 0.0  # a training that goes on without it waits once
        self._root_lock = RootLock.acquire(self.path, timeout_s=timeout_s)
        sweep_directories(self.path, _STEP_PATTERN, locks_work=self._root_lock.excludes_others)
        self.forget()
        return made

    def _refuse_unmounted(self) -> None:
        """Raise if the file system of the root is gone: what is written below its mount point would be lost."""
        above = self.path
        while not os.path.isdir(above):
            above = os.path.dirname(above)
        with storage_errors("looking up", above):
            device = os.stat(above).st_dev
        if self._device is None or is_root_on(self.path, device, self._device):
            return
        was, now = (f"{os.major(number)}:{os.minor(number)}" for number in (self._device, device))
        raise StorageError(
            errno.ENODEV,
            f"the file system of {self.path} is not mounted any more: earlier saves went to device {was}, and {above} "
            f"is on device {now}. Mount it again; a new Checkpointer begins anew where it is",
            self.path,
        )

    def release(self) -> None:
        """Release the lock, if it is held; the event log is complete then."""
        flush()
        self._unlock()

    def _unlock(self) -> None:
        if self._root_lock is not None:
            self._root_lock.release()
            self._root_lock = None

    def hand_over(self) -> None:
        """Release the lock; taking it again waits as the first time, because another process may then hold it."""
        self.release()
        self._lock_timeout_s = self._first_lock_timeout_s

    # --- the steps

    def is_damaged(self, step: int) -> bool:
        """Tell whether a step is there, but is known to be damaged; also if a removal has left an empty directory."""
        path = os.path.join(self.path, step_name(step))
        if not os.path.lexists(path):
            return False
        try:
            check_files(path, read_manifest(path))
        except CorruptionError:
            return True
        except (StorageError, CheckpointNotFoundError):
            # No proof by itself, but a load may have gone back from the step for this reason.
            with suppress(OSError):
                if not os.listdir(path):
                    return True
        return step in self.unloadable

    def forget(self) -> None:
        """Read the directory again at the next use: another process may have changed it."""
        with self._lock:
            self._metrics = None

    def note_failed(self) -> None:
        """Look for unknown steps at the next commit: a save has failed, perhaps after its commit point."""
        with self._lock:
            self._may_have_missed = True

    def resumed_from(self, step: int) -> None:
        """Count a step that was loaded as committed now: it stays until `keep` newer ones are durable."""
        with self._lock:
            self._resumed = step
            self._resumed_at = None if self._metrics is None else self._next_number - 1
            if self._metrics is not None and step in self._metrics:
                self._metrics[step] = self._metrics.pop(step)

    def next_commit_number(self) -> int:
        """Return the commit number of the step that is about to become visible: greater than all earlier ones.

        Raises:
            StorageError: The root cannot be listed.
        """
        with self._lock:
            self._known()
            number = self._next_number
            self._next_number = min(number + 1, COMMIT_NUMBER_MAX)
            return number

    def peek_commit_number(self) -> int:
        """Return what `next_commit_number` would."""
        with self._lock:
            self._known()
            return self._next_number

    def raise_commit_number(self, number: int) -> None:
        """Make all later commit numbers at least this large: another store has such steps."""
        with self._lock:
            self._next_number = min(max(self._next_number, number), COMMIT_NUMBER_MAX)

    def _known(self) -> dict[int, Mapping[str, float]]:
        """Return the metrics of the committed steps, in order of commit. Under the lock."""
        if self._metrics is None:
            commits = commits_of(self.directory)
            number = next_commit_number(commits.values())
            self._next_number = max(self._next_number, number)
            if self._resumed is not None and self._resumed in commits:
                if self._resumed_at is None:
                    self._resumed_at = number - 1
                if (commits[self._resumed].number or 0) <= self._resumed_at:  # else it was saved again since
                    commits[self._resumed] = Commit(self._resumed_at, math.inf, commits[self._resumed].metrics)
            self._metrics = {step: commits[step].metrics for step in in_commit_order(commits)}
        return self._metrics

    def _known_to(self, step: int) -> dict[int, Mapping[str, float]]:
        """Read the directory again, and return what `_known` does, up to a durable step.

        The steps behind it may not be durable, and are left to the next commit.
        """
        self._metrics = None
        known = self._known()
        order = list(known)
        behind = order[order.index(step) + 1 :] if step in known else order
        for other in behind:
            del known[other]
        self._may_have_missed = bool(behind)
        return known

    def after_commit(self, step: int, metrics: dict[str, float], among: Collection[int] | None = None) -> None:
        """Name a durable step in LATEST, and remove the steps that no rule keeps. Errors are logged, not raised.

        Args:
            step: The step.
            metrics: The step's metrics.
            among: The steps that the rules see; None for all. A root on a node's own disk may hold parts of steps that
                were never committed.
        """
        is_named = False
        try:
            with suppress(NoSpaceError):  # removals make room
                self._write_latest(step)
                is_named = True
            with self._lock:
                known = self._known_to(step) if self._may_have_missed else self._known()
                known.pop(step, None)
                known[step] = metrics  # behind all others: these calls come in the order of the commits
                if steps_to_remove(known, self._retention):
                    # What was removed by hand must not take the place of another step.
                    for gone in known.keys() - candidate_steps(self.directory):
                        del known[gone]
                counted = {found: known[found] for found in known if among is None or found in among}
        except StorageError as error:
            _log.warning(
                "%s: step %d is saved, but LATEST and the older steps were not updated: %s", self.path, step, error
            )
            return
        self.unloadable.discard(step)
        self._remove_unkept(counted)
        if not is_named:
            try:
                self._write_latest(step)
            except StorageError as error:
                _log.warning("%s: step %d is saved, but LATEST does not name it: %s", self.path, step, error)

    def make_room(self) -> bool:
        """Remove the steps that no rule keeps; tell if any went. For a save that finds the disk full.

        A process that died after a commit may have left some, or the rules keep fewer than before. The newest step may
        not be durable yet, so the root is synced first. If a load could not read it, all stay. Errors are only logged.
        """
        if self._root_lock is None:
            return False
        try:
            self.forget()  # steps may have been removed by hand to make room
            with self._lock:
                known = dict(self._known())
            if not steps_to_remove(known, self._retention) or list(known)[-1] in self.unloadable:
                return remove_replaced_before(self.directory)
            filesystem().sync_directory(self.directory)
        except StorageError as error:
            _log.warning("%s: the steps that no rule keeps were not removed: %s", self.path, error)
            return False
        return self._remove_unkept(known)

    def _remove_unkept(self, committed: Mapping[int, Mapping[str, float]]) -> bool:
        """Remove the steps that no rule keeps, and replaced directories that were in use; tell if any went."""
        removed = remove_replaced_before(self.directory)
        for old in steps_to_remove(committed, self._retention):
            try:
                with suppress(CheckpointNotFoundError):  # another process has removed it
                    if not self._remove_directory(old):
                        continue  # it is being read; a later save removes it
                removed = True
                with self._lock:
                    if self._metrics is not None:
                        self._metrics.pop(old, None)
            except StorageError as error:
                _log.warning("%s: step %d, which no rule keeps, could not be removed: %s", self.path, old, error)
        return removed

    def _remove_directory(self, step: int) -> bool:
        """Remove a step, and tell of it; see `commit.removal.remove_directory`."""
        removed = remove_directory(os.path.join(self.directory, step_name(step)))
        if removed:
            path = os.path.join(self.path, step_name(step))
            emit("removed", path, {}, step=step, rank=0 if self._events is None else self._events.rank)
        return removed

    def remove(self, steps: Iterable[int]) -> list[int]:
        """Remove the steps that the user has named, and write the newest of the others to LATEST.

        Args:
            steps: The steps to remove; those that are no longer there are passed over.

        Returns:
            The removed steps, in the order of their removal.

        Raises:
            StorageError: A step could not be removed; the message says which, and why. The others were removed.
        """
        removed = []
        stuck: StorageError | None = None
        for step in steps:
            path = os.path.join(self.path, step_name(step))
            try:
                if self._remove_directory(step):
                    removed.append(step)
                    continue
                message = f"step {step} of {self.path} is being read, so it was not removed: try again later"
                stuck = StorageError(errno.EBUSY, message, path)
            except CheckpointNotFoundError as error:
                if os.path.lexists(path):  # without a manifest; it was never committed
                    stuck = StorageError(
                        None, f"{error}; it is no checkpoint: if it is not needed, remove it by hand", path
                    )
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
        everybodys: Mapping[int, Commit | None] | None = None,
    ) -> list[int]:
        """Remove the steps that the coordinator chooses; all ranks call this, each for its own root.

        Args:
            choose: Takes the steps of the root, the newest first, and returns those to remove. They are removed in this
                order, so that at every moment the steps that are left have been together before.
            take_root: Called on the coordinator before it removes anything.
            process_group: The ranks; None if this one is alone.
            rank: The number of this rank.
            everybodys: The steps of all ranks, where each node has copies; None: those that the coordinator sees count.

        Returns:
            The steps that the coordinator has removed; with `everybodys`, those that it has chosen.

        Raises:
            StorageError: As `remove`.
            PeerError: The coordinator failed.
            Exception: Whatever `choose` and `take_root` raise.
        """

        def remove() -> list[int]:
            commits = read_commits(self.path) if everybodys is None else everybodys
            steps = choose(in_commit_order(commits)[::-1])
            if steps:
                take_root()
            removed = self.remove(steps)
            return removed if everybodys is None else steps

        removed = done_by_first(process_group, self.path, "removing steps of", remove)
        if rank:
            try:
                self.remove(removed)
            except StorageError as error:  # without the coordinator's part, the parts of other stores are useless
                _log.warning("%s: a part of a removed step stays: %s", self.path, error)
        self.unloadable.difference_update(removed)
        return removed

    def _name_newest(self) -> None:
        with self._lock:
            self._metrics = None
            commits = commits_of(self.directory)
        if commits:
            self._write_latest(in_commit_order(commits)[-1])
            return
        with ignoring(errno.ENOENT), ignoring(errno.EISDIR):
            filesystem().unlink(os.path.join(self.directory, _LATEST_NAME))

    def mark_committed(self, number: int) -> None:
        """Note that all stores have the step with this commit number; see `node_local.copies`."""
        try:
            self._write_small(COMMITTED_NAME, f"{number}\n")
        except StorageError as error:  # it is needed only if rank 0's copy is lost
            _log.warning("%s: that a step is committed on all nodes could not be recorded: %s", self.path, error)

    def _write_latest(self, step: int) -> None:
        try:
            self._write_small(_LATEST_NAME, f"{step_name(step)}\n")
        except StorageError as error:
            if error.errno != errno.EISDIR:
                raise
            path = os.path.join(self.path, _LATEST_NAME)
            _log.warning("%s is a directory, so no file of that name can name step %d: remove it", path, step)

    def _write_small(self, name: str, text: str) -> None:
        path = os.path.join(self.directory, name)
        temporary = os.path.join(self.directory, f".{name.removeprefix('.')}.new")
        try:
            fd = filesystem().create(temporary)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            filesystem().unlink(temporary)  # a process that died here has left it
            fd = filesystem().create(temporary)
        try:
            filesystem().write(fd, text.encode(), temporary)
        finally:
            filesystem().close(fd, temporary)
        filesystem().rename(temporary, path)
