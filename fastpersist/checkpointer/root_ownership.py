"""The root of a Checkpointer that saves: made and locked by its first save, and what is known of the steps in it."""

from __future__ import annotations

import os
import re

from fastpersist.commit.directory_commit import RootLock, sweep_directories
from fastpersist.commit.filesystem import make_directories
from fastpersist.commit.step_listing import check_files, read_manifest
from fastpersist.errors import CheckpointNotFoundError, CorruptionError, StorageError
from fastpersist.formats.manifest import step_name

__all__ = ["RootOwnership"]

_STEP_PATTERN = re.compile(r"step-[0-9]{8,19}")


class RootOwnership:
    """Holds the lock of a root from the first save on. The training thread uses it.

    Args:
        root: The directory.
        timeout_s: Seconds for which the first save waits for a process of another host.

    Attributes:
        unloadable: Steps that a load has gone back from: damaged, whatever their manifests say.
    """

    def __init__(self, root: str, timeout_s: float) -> None:
        self._root = root
        self._timeout_s = timeout_s
        self._lock: RootLock | None = None
        self.unloadable: set[int] = set()

    def take(self) -> list[str] | None:
        """Make the root and take its lock, once; again if somebody took the directory away meanwhile.

        Returns:
            The directories that were made for it; None if it was held already.

        Raises:
            ConfigError: Another process saves there.
            StorageError: It cannot be made or written.
        """
        if self._lock is not None and self._lock.is_held():
            return None
        self.release()
        made = make_directories(self._root)
        timeout_s, self._timeout_s = self._timeout_s, 0.0  # a training that goes on without waits once
        self._lock = RootLock.acquire(self._root, timeout_s=timeout_s)
        sweep_directories(self._root, _STEP_PATTERN, locks_work=self._lock.excludes_others)
        return made

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def is_damaged(self, step: int) -> bool:
        """Tell whether a step is there, but cannot be loaded as far as we know."""
        path = os.path.join(self._root, step_name(step))
        if not os.path.lexists(path):
            return False
        try:
            check_files(path, read_manifest(path))
        except CorruptionError:
            return True
        except (StorageError, CheckpointNotFoundError):
            return False
        return step in self.unloadable
