"""The arena: limits the host memory for captured bytes, and owns the native arena that holds them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress

from fastpersist import _native
from fastpersist.errors import ConfigError

__all__ = ["Arena", "ArenaOfSave", "available_bytes_per_rank", "available_host_bytes", "note_ranks_of_machine"]

_met_count = 1  # the most ranks of one process group that have met on this machine


class Arena:
    """Host memory for captured bytes, shared by saves that follow each other.

    Args:
        max_bytes: The limit; None for the bytes of the state, but at most half of what is available per rank at the
            first save.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0):
            raise ConfigError(f"max_host_bytes must be a number of bytes, 0 or more, not {max_bytes!r}")
        self._max_bytes = max_bytes
        self._half_bytes: int | None = None
        self._native: _native.Arena | None = None
        self._process = 0
        self._limit_bytes = 0
        self._preparing: threading.Thread | None = None
        self._wanted_bytes = 0

    def prepare(self, state_bytes: int) -> None:
        """Map and pin memory for this much in the background: pinning is too slow for the gate."""
        native = self._native
        if native is None or native.mapped_bytes >= min(state_bytes, self._limit_bytes):
            return
        self._wanted_bytes = state_bytes
        if self._preparing is not None and self._preparing.is_alive():
            return  # the thread reads the new number

        floor_bytes = available_host_bytes() // 2  # other processes of the machine may do the same at this moment

        def prepare() -> None:
            while threading.main_thread().is_alive() and available_host_bytes() > floor_bytes:
                if not native.prepare(self._wanted_bytes):
                    break

        self._preparing = threading.Thread(target=prepare, name="fastpersist-arena")
        with suppress(RuntimeError):  # no thread can start, as at the interpreter's end: the gate does the work then
            self._preparing.start()

    def for_state(self, state_bytes: int) -> _native.Arena:
        """Return the native arena, with room for a state of this size as far as the limit allows."""
        if self._native is None or self._process != os.getpid():
            self._native = _native.Arena(0)
            self._process = os.getpid()
        if self._max_bytes is not None:
            limit_bytes = self._max_bytes
        else:
            if self._half_bytes is None:
                self._half_bytes = (available_bytes_per_rank() + _native.pinned_cache_bytes()) // 2
            # A little more than the state: sources start on cache lines, and a block belongs to one save.
            limit_bytes = min(state_bytes + state_bytes // 64 + (32 << 20), self._half_bytes)
        self._native.grow(limit_bytes)
        self._limit_bytes = limit_bytes
        return self._native

    def let_go(self) -> None:
        """Give the memory to other arenas as soon as no save uses it; called if no save is expected soon."""
        self._native = None


class ArenaOfSave(Arena):
    """An arena for one save of several files, which has room for all of them together.

    Args:
        arena: Shared with the saves before and after.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._state_bytes = 0
        self._device_bytes = 0

    def prepare(self, state_bytes: int) -> None:
        """Prepare memory for this much more of the save."""
        self._device_bytes += state_bytes
        self._arena.prepare(self._device_bytes)

    def for_state(self, state_bytes: int) -> _native.Arena:
        """Return the native arena, with room for this much more of the save as far as the limit allows."""
        self._state_bytes += state_bytes
        return self._arena.for_state(self._state_bytes)


def note_ranks_of_machine(count: int) -> None:
    """Note that a process group has so many ranks on this machine."""
    global _met_count
    _met_count = max(_met_count, count)


def available_bytes_per_rank() -> int:
    """Return this process's share of the available memory: each rank of the machine takes as much.

    LOCAL_WORLD_SIZE, which torchrun sets, is the number of ranks. Without it, the ranks that have met are counted
    (`note_ranks_of_machine`).
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    count = int(told) if told.isdecimal() else 0
    return available_host_bytes() // (count or _met_count)


def available_host_bytes() -> int:
    """Return how much memory this process could still take: MemAvailable, and what its cgroups leave."""
    available_bytes = 1 << 62
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    available_bytes = int(line.split()[1]) << 10
    except OSError:
        pass
    return min([available_bytes, *_cgroup_room_bytes()])


def _cgroup_room_bytes() -> Iterator[int]:
    """Yield how many bytes each memory cgroup above this process has left."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, scope = "/sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, scope = "/sys/fs/cgroup/memory", "total_"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        while True:
            directory = f"{root}{path.rstrip('/')}"
            limit_bytes, used_bytes = _number_in(f"{directory}/{limit}"), _number_in(f"{directory}/{usage}")
            if limit_bytes is not None and used_bytes is not None:
                # The page cache is counted as used, and a program that reads its data fills the whole limit with it.
                yield max(0, limit_bytes - max(0, used_bytes - _file_cache_bytes(f"{directory}/memory.stat", scope)))
            if path in ("", "/"):
                break
            path = os.path.dirname(path)


def _file_cache_bytes(path: str, scope: str) -> int:
    """Return how much of a cgroup's memory the kernel would give back: cached files, as in MemAvailable."""
    names = {f"{scope}inactive_file", f"{scope}active_file"}
    try:
        with open(path, encoding="ascii") as file:
            fields = (line.split() for line in file)
            return sum(int(value) for name, value in fields if name in names)
    except (OSError, ValueError):
        return 0


def _number_in(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):  # not there, or "max"
        return None
