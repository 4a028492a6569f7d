"""What is done in a root when a step is durable: LATEST names it, and what is kept no longer goes.

Which steps go is `retention`'s decision, how a directory is removed `directory_removal`'s. A failure costs no step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch

from fastpersist.committed import committed_steps
from fastpersist.directory_commit import remove_directory
from fastpersist.errors import CheckpointNotFoundError, ConfigError, StorageError
from fastpersist.filesystem import filesystem, storage_errors
from fastpersist.formats.manifest import CheckpointManifest, encode_manifest, step_name
from fastpersist.retention import RetentionPolicy, steps_to_remove

__all__ = ["RootUpkeep", "checked_metrics"]

_log = logging.getLogger("fastpersist")

_LATEST_NAME = "LATEST"


class RootUpkeep:
    """Keeps a root in order. One thread uses it.

    Args:
        root: The directory.
        retention: What is kept.
    """

    def __init__(self, root: str, retention: RetentionPolicy) -> None:
        self._root = root
        self._retention = retention
        self._metrics: dict[int, dict[str, float]] | None = None  # of the committed steps

    def forget(self) -> None:
        """Somebody else may have changed the root."""
        self._metrics = None

    def after_commit(self, step: int, metrics: dict[str, float], among: Collection[int] | None = None) -> bool:
        """A step is durable: name it in LATEST, and remove what is kept no longer.

        Args:
            step: Which.
            metrics: Of that step.
            among: The steps that count, if not all of them do: a root that holds parts of steps (`stores`) may hold
                some of steps that were never committed.

        Returns:
            Whether the root could be read and written; the log says why not.
        """
        try:
            self._write_latest(step)
            if self._metrics is None:
                self._metrics = {found: manifest.metrics for found, manifest in committed_steps(self._root).items()}
            self._metrics[step] = metrics
        except StorageError as error:
            _log.warning("%s: step %d is saved, but what comes after was not done: %s", self._root, step, error)
            return False
        counted = {found: self._metrics[found] for found in self._metrics if among is None or found in among}
        for old in steps_to_remove(counted, self._retention):
            if old != step:  # which may be older than others, after a rewind
                self._remove_step(old, self._metrics)
        return True

    def _remove_step(self, step: int, known: dict[int, dict[str, float]]) -> None:
        try:
            if remove_directory(os.path.join(self._root, step_name(step))):
                del known[step]
        except CheckpointNotFoundError:  # somebody else has removed it
            del known[step]
        except StorageError as error:
            _log.warning("%s: step %d is kept no longer, but stays: %s", self._root, step, error)

    def _write_latest(self, step: int) -> None:
        path = os.path.join(self._root, _LATEST_NAME)
        temporary = os.path.join(self._root, f".{_LATEST_NAME}.new")
        with storage_errors("creating", temporary):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            filesystem().write(fd, f"{step_name(step)}\n".encode(), temporary)
        finally:
            os.close(fd)
        filesystem().rename(temporary, path)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics as numbers that a manifest can hold.

    Raises:
        ConfigError: They are not.
    """
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"metrics are numbers; {name!r} is {type(value).__name__}: {error}") from None
    encode_manifest(CheckpointManifest((), None, 0.0, checked, {}, {}, {}))
    return checked
