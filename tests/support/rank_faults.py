"""What a rank does while it saves, call by call, and something that happens to it right before one of these calls.

    with watched() as counts: ...                             # counts what this rank does
    with watched(Point("sync", 2), kill_this_process): ...    # its second sync is never done

The calls are the operations of the seam to the file system (`create`, `sync` …), what it has to say to the other ranks
(`Session.tell` …), and what it gives to the writer (`Writer.append` …). So the points of a save are found by counting,
not listed by hand: a phase that is added to a save has points at once. Everything happens in the calling process.

A `Trainer` is one rank of a test that saves step after step, whatever becomes of each.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.filesystems import Operation, WatchedFilesystem
from support.runs import Replay, Run, hidden_names
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import using
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.sessions import Session
from fastpersist.transfer.writer import Writer

SIZES = (280_000, 7)
"""Of the parameters of a `Run`: the first, and its two moments, are cut."""

Run((1,)).advance()  # the first optimizer of a process imports for seconds: here once, not in every rank

_CALLS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Session, ("gather", "answer", "answer_each", "settle", "tell", "hear", "offer", "announce", "offered", "finish")),
    (Writer, ("append", "finish")),
)


@dataclass(frozen=True, slots=True)
class Point:
    """Before the n-th call of a name.

    Attributes:
        name: The name of an operation on the file system, or "Session.tell" and the like.
        nth: The number of the call, from 1.
    """

    name: str
    nth: int

    def __str__(self) -> str:
        return f"{self.name} {self.nth}"


def points_of(counts: Counter[str]) -> list[Point]:
    """Return the points of what was counted."""
    return [Point(name, nth) for name in sorted(counts) for nth in range(1, counts[name] + 1)]


def spread(points: Sequence[Any], count: int) -> list[Any]:
    """Return so many of these, evenly; all if there are no more."""
    count = min(count, len(points))
    return [points[(2 * index + 1) * len(points) // (2 * count)] for index in range(count)]


class _Watch(WatchedFilesystem):
    def __init__(self, at: Point | None, act: Callable[[], object]) -> None:
        self.counts: Counter[str] = Counter()
        self._at = at
        self._act = act
        self._lock = threading.RLock()

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        self.reach(operation.name)
        yield

    def reach(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1
            reached = self._at == Point(name, self.counts[name])
        if reached:
            self._act()

    def wrapped(self, owner: type, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.reach(f"{owner.__name__}.{name}")
            return original(*arguments, **options)

        return call


@contextmanager
def watched(at: Point | None = None, act: Callable[[], object] = lambda: None) -> Iterator[Counter[str]]:
    """Count what this process does in the block, on whatever thread, and act before one call of it.

    Args:
        at: The point before which `act` is called; None: it is not called.
        act: Called there, on the thread that makes the call; what it raises is raised there.
    """
    watch = _Watch(at, act)
    with ExitStack() as stack:
        stack.enter_context(using(watch))
        for owner, names in _CALLS:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, watch.wrapped(owner, name)))
        yield watch.counts


def kill_this_process() -> None:
    """End by SIGKILL, with all threads, before the next line."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_this_process_later(after_s: float) -> None:
    """End by SIGKILL at some moment, whatever is being done then; who does it is a child of this process."""
    pidfd = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        try:
            time.sleep(after_s)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os._exit(0)
    os.close(pidfd)


def wait_until(true: Callable[[], bool]) -> None:
    """Return when something is true that another process brings about."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, "it never happens"
        time.sleep(0.001)


def cut_lines(ranks: Ranks) -> Callable[[], None]:
    """Return what cuts all connections of this rank, as a network does: neither side has closed anything."""

    def cut() -> None:
        for connection in list(ranks.connections._by_rank.values()):
            with suppress(OSError):  # the other side was faster, and this one has closed it
                connection.socket.shutdown(socket.SHUT_RDWR)

    return cut


@contextmanager
def empty_disk_over(root: Path) -> Iterator[None]:
    """Let this process, and no other, see an empty file system where the directory is."""
    new_mount_namespace = 0x00020000
    for thread in threading.enumerate():  # one that still ends a save would write the next one in the old namespace
        if thread.name.startswith("fastpersist-") and not thread.daemon:
            thread.join(PATIENCE_S)
    if ctypes.CDLL(None, use_errno=True).unshare(new_mount_namespace) != 0:
        pytest.skip(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", str(root)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def state_numbers(root: os.PathLike[str], replay: Replay) -> dict[int, int]:
    """Check every committed step of a root, in every bit; return which state each holds, by its name.

    Each rank's own state is expected to be there: {"rank": its number, "step": of the state}.
    """
    numbers = {}
    for step in fp.Checkpointer(root).steps():
        path = os.path.join(root, f"step-{step:08d}")
        report = fp.verify(path)
        assert report.ok, report
        numbers[step] = replay.check(fp.load(os.path.join(path, "state.pt"), verify=True))
        manifest = json.loads(Path(path, "MANIFEST.json").read_text())
        for rank in range(manifest["host"].get("rank_count", 1)):
            own = fp.load(os.path.join(path, f"rank-{rank:05d}.pt"))
            assert own == {"rank": rank, "step": numbers[step]}
        stock = torch.load(os.path.join(path, "state.pt"), weights_only=True)
        assert stock["step"] == numbers[step]
    return numbers


class Trainer:
    """One rank, which saves step after step, whatever becomes of each."""

    def __init__(self, root: Path, rank: int, sizes: tuple[int, ...] = SIZES, **options: Any) -> None:
        self.root = root
        self.rank = rank
        self.run = Run(sizes)
        self.checkpoints = fp.Checkpointer(
            root, optimizer=self.run.optimizer, process_group=dist.group.WORLD, **options
        )

    def save(self, *, ahead: int = 0, **more: Any) -> fp.PendingSave | BaseException:
        """Begin to save one more step; return that, or what was raised."""
        step = self.run.advance().step
        try:
            return self.checkpoints.save(
                step + ahead, {**self.run.state(), **more}, rank_state={"rank": self.rank, "step": step}
            )
        except fp.FastPersistError as error:
            return error

    def outcome(self, **more: Any) -> BaseException | None:
        """Save one more step, and return its error."""
        pending = self.save(**more)
        return pending if isinstance(pending, BaseException) else pending.exception()

    def close(self) -> None:
        """Close, when all ranks have come here."""
        dist.barrier()
        self.checkpoints.close()


def everybodys(own: Any) -> list[Any]:
    """Return what each rank gives."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def expect_steps(root: Path, steps: list[int], sizes: tuple[int, ...] = SIZES) -> None:
    """Check that these steps are there, with the state of that step, and that nothing else is."""
    assert state_numbers(root, Replay(sizes)) == {step: step for step in steps}
    assert hidden_names(root) == []
