"""What a root is told of its steps: the number of the next one, LATEST when one is durable, and which of them go.

Which steps are kept no longer is `retention`'s decision, how a directory is removed `removal`'s. A failure of
what is done beside a save costs no step.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from fastpersist.checkpointer.retention import RetentionPolicy, steps_to_remove
from fastpersist.commit.commit_order import Commit, commit_of, in_commit_order, next_commit_number
from fastpersist.commit.directory_commit import remove_directory
from fastpersist.commit.filesystem import filesystem
from fastpersist.commit.step_listing import committed_steps
from fastpersist.errors import CheckpointNotFoundError, ConfigError, StorageError
from fastpersist.formats.manifest import COMMIT_NUMBER_MAX, CheckpointManifest, encode_manifest, step_name

__all__ = ["RootUpkeep", "checked_metrics"]

_log = logging.getLogger("fastpersist")

_LATEST_NAME = "LATEST"


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
        """Somebody else may have changed the root."""
        with self._lock:
            self._metrics = None

    def resumed_from(self, step: int) -> None:
        """A step was loaded: for retention it counts as committed now, and goes when `keep` newer ones have come."""
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
            commits = {step: commit_of(manifest) for step, manifest in committed_steps(self._root).items()}
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
        """A step is durable: name it in LATEST, and remove what is kept no longer.

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

    def _name_newest(self) -> None:
        with self._lock:
            self._metrics = None
            commits = {step: commit_of(manifest) for step, manifest in committed_steps(self._root).items()}
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


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics as numbers that a manifest can hold.

    Raises:
        ConfigError: They are not.
    """
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(f'metrics is a dict from names to numbers, such as {{"loss": 0.5}}; not {metrics!r}')
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"metrics are numbers; {name!r} is {type(value).__name__}: {error}") from None
    encode_manifest(CheckpointManifest((), None, 0.0, checked, {}, {}, {}))
    return checked
