"""A memory cgroup, version 1 or 2, that holds down what a process and the page cache behind it may take."""

from __future__ import annotations

import contextlib
import os
import time

from fastpersist.errors import UnsupportedError

__all__ = ["MemoryLimit"]

_ROOT = "/sys/fs/cgroup"
# Files of a group: limit, most that it ever took, what keeps it from swapping at 0; version 1, then version 2.
_LEGACY = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.swappiness")
_UNIFIED = ("memory.max", "memory.peak", "memory.swap.max")


class MemoryLimit(contextlib.AbstractContextManager["MemoryLimit"]):
    """A cgroup for one process: a context manager. The group goes when its process has ended. One owner thread.

    Args:
        name: The name of the cgroup; unique on the machine.

    Raises:
        UnsupportedError: Such a cgroup cannot be made here; the message says why.
    """

    def __init__(self, name: str) -> None:
        is_unified = os.path.exists(f"{_ROOT}/cgroup.controllers")
        parent = _ROOT if is_unified else f"{_ROOT}/memory"
        self._limit_name, self._peak_name, self._swap_name = _UNIFIED if is_unified else _LEGACY
        self._directory = os.path.join(parent, name)
        try:
            if is_unified:
                with open(os.path.join(parent, "cgroup.subtree_control"), "w") as file:
                    file.write("+memory")
            os.mkdir(self._directory)
        except OSError as error:
            raise UnsupportedError(
                f"no memory cgroup can be made here ({error}): run as root, in a container with a writable "
                f"{_ROOT}, or take --memory all"
            ) from error

    def add(self, pid: int) -> None:
        """Put a process into the group, best before it has taken memory: what it has stays outside."""
        self._write("cgroup.procs", str(pid))

    def hold_down(self, limit_bytes: int) -> None:
        """Set the limit; what is above it is given back, or the kernel refuses."""
        with contextlib.suppress(UnsupportedError):  # a kernel without swap
            self._write(self._swap_name, "0")
        self._write(self._limit_name, str(limit_bytes))

    def peak_bytes(self) -> int | None:
        """Return the most that the group ever took, pages of files included; None where the kernel does not say."""
        try:
            with open(os.path.join(self._directory, self._peak_name)) as file:
                return int(file.read())
        except OSError:  # memory.peak is of Linux 5.19
            return None

    def close(self) -> None:
        """Remove the group."""
        for _ in range(100):  # a process that was waited for leaves its group a little later
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.rmdir(self._directory)
                except OSError:
                    time.sleep(0.01)
                    continue
            return

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, text: str) -> None:
        try:
            with open(os.path.join(self._directory, name), "w") as file:
                file.write(text)
        except OSError as error:
            raise UnsupportedError(f"the memory cgroup refuses {name}={text}: {error}") from error
