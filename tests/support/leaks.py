"""Finds what a piece of code left behind in this process and on disk: descriptors, threads, pending files.

    with no_leaks(directory):
        fastpersist.save(obj, directory / "model.pt")

A leak raises LeakError at the end of the block, unless an exception is already on its way.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# Threads of the kernel that live for a while after their work is done: io_uring's worker pool.
KERNEL_THREAD_PREFIXES = ("iou-wrk", "iou-sqp")
# So long may a thread that was told to end, or a descriptor the kernel closes later, take to be gone.
PATIENCE_S = 3.0


class LeakError(AssertionError):
    """Something was left behind."""


@dataclass(frozen=True)
class Inventory:
    """What this process holds, and which unfinished files lie in some directories, at one moment."""

    descriptors: frozenset[str]  # "7 -> /dev/null"
    threads: frozenset[str]  # "1234 (python)"
    pending_files: frozenset[str]

    def leaked_since(self, before: Inventory) -> list[str]:
        """Name each thing that is here and was not there before."""
        return [
            *(f"descriptor {name}" for name in sorted(self.descriptors - before.descriptors)),
            *(f"thread {name}" for name in sorted(self.threads - before.threads)),
            *(f"unfinished file {name}" for name in sorted(self.pending_files - before.pending_files)),
        ]


def take_inventory(*directories: Path) -> Inventory:
    """Note this process's descriptors and threads, and the pending and retired files below `directories`."""
    return Inventory(
        descriptors=frozenset(_open_descriptors()),
        threads=frozenset(_running_threads()),
        pending_files=frozenset(
            str(path)
            for directory in directories
            for pattern in (".*.pending-*", ".*.retired-*")
            for path in directory.rglob(pattern)
        ),
    )


@contextlib.contextmanager
def no_leaks(*directories: Path) -> Iterator[None]:
    """Raise LeakError if the block leaves a descriptor, a thread, or an unfinished file below `directories`.

    What a process makes once and keeps (torch's thread pools, the ring of buffers) is no leak, but looks like
    one the first time: it has to exist before the block.
    """
    _start_thread_pools()
    before = take_inventory(*directories)
    yield
    deadline_s = time.monotonic() + PATIENCE_S
    # Only what is still there is looked for among the garbage: with torch's objects, that takes a fifth of a second.
    while leaked := take_inventory(*directories).leaked_since(before):
        if time.monotonic() > deadline_s:
            raise LeakError("left behind: " + "; ".join(leaked))
        time.sleep(0.02)
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a file that leaves something, with its last test; a file takes this fixture by its name."""
    with no_leaks(tmp_path_factory.getbasetemp()):
        yield


def _open_descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        # The listing itself needs a descriptor, which is gone by now.
        with contextlib.suppress(FileNotFoundError):
            yield f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}"


def _running_threads() -> Iterator[str]:
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/self/task/{name}/comm").read_text().strip()
            if not command.startswith(KERNEL_THREAD_PREFIXES):
                yield f"{name} ({command})"


def _start_thread_pools() -> None:
    """Make torch start the threads that it keeps: a tensor of this size is split over all of them."""
    import torch

    torch.ones(1 << 20).add_(1).sum()
