"""The log of events in a root: `events.jsonl`, one JSON object in a line; docs/reference/events.md is the format.

    root/events.jsonl             of rank 0; root/events-rank-00001.jsonl and so on of the others
    root/events.jsonl.1           what was `events.jsonl` until that had 8 MiB

A line is appended by one write, and never synced, because nothing depends on the log. So a crash or a full disk may
cut the last line. Whoever appends next ends this line, and readers skip it.
"""

from __future__ import annotations

import errno
import heapq
import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, BinaryIO

from fastpersist.arguments import local_path
from fastpersist.commit.filesystem import absolute_path, open_regular, storage_errors
from fastpersist.commit.locks import is_root_on
from fastpersist.errors import FastPersistError
from fastpersist.events.event import Event, Figure

__all__ = ["EVENTS_NAME", "EventLog", "LogFollower", "events_name", "read_events"]

_log = logging.getLogger("fastpersist")

EVENTS_NAME = "events.jsonl"
_NAME = re.compile(r"events(?:-rank-[0-9]{5,9})?\.jsonl(?:\.1)?")
_SIZE_MAX_BYTES = 8 << 20
_LINE_MAX_BYTES = 64 << 10
_TEXT_MAX = 4000
"""Characters of one figure, such as an error; so a line stays within its limit."""
_WITHOUT_ROOT_COUNT = 1000
_DISORDER_COUNT = 256
"""The events of a file are nearly in order: any two that are further apart than this are in order."""


def events_name(rank: int) -> str:
    """Return the name of a rank's log in the root."""
    return EVENTS_NAME if rank == 0 else f"events-rank-{rank:05d}.jsonl"


# ------------------------------------------------------------------------------------------------------ writing


class EventLog:
    """Where the events of one root go in this process; only the thread that delivers them appends.

    The file is made by the first event of a save, or of a removal. A process that only loads appends to a log that is
    there and may be written, and makes none. While the file system of the root is not mounted, events wait.

    Args:
        root: The directory, absolute; it is not created here.
        rank: The rank of this process.

    Attributes:
        root, rank: The same as the arguments.
        device: The device of the root, as far as it is known: of the last save, or of the last event.
    """

    def __init__(self, root: str, rank: int) -> None:
        self.root = root
        self.rank = rank
        self.device: int | None = None
        self._path = os.path.join(root, events_name(rank))
        self._saves = False
        self._has_looked = False
        self._has_failed = False
        self._waiting: deque[bytes] = deque(maxlen=_WITHOUT_ROOT_COUNT)  # until the root is there

    def append(self, event: Event) -> None:
        """Append an event. An error of the disk is logged once."""
        self._saves = self._saves or event.kind != "loaded"
        self._waiting.append(encode_line(event))
        try:
            self._write_waiting()
        except FileNotFoundError:
            if not self._saves:
                self._waiting.clear()
            # Otherwise this or another process is about to make the root, or it will be mounted again.
        except OSError as error:
            self._waiting.clear()
            if self._saves and not self._has_failed:
                self._has_failed = True
                _log.warning("%s: events are not logged there: %s; this is logged once", self._path, error.strerror)

    def _write_waiting(self) -> None:
        # What follows is in this directory, even if its file system is unmounted meanwhile.
        directory_fd = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            device = _device_of(directory_fd)
            if self.device is not None and not is_root_on(self.root, device, self.device):
                raise FileNotFoundError(errno.ENOENT, "its file system is not mounted", self.root)
            self.device = device
            self._write_to(directory_fd)
        finally:
            os.close(directory_fd)

    def _write_to(self, directory_fd: int) -> None:
        name = events_name(self.rank)
        made = os.O_CREAT if self._saves else 0
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | made  # a FIFO there is an error, and no wait
        fd = os.open(name, flags, 0o666, dir_fd=directory_fd)
        try:
            size_bytes = os.fstat(fd).st_size
            if not self._has_looked and size_bytes and not _ends_a_line(name, directory_fd, size_bytes):
                os.write(fd, b"\n")
            self._has_looked = False  # if a full disk cuts a line, the next call ends it
            while self._waiting:
                rest = self._waiting[0]
                while rest:
                    written_bytes = os.write(fd, rest)
                    size_bytes, rest = size_bytes + written_bytes, rest[written_bytes:]
                self._waiting.popleft()
            self._has_looked = True
        finally:
            os.close(fd)
        if self._saves and size_bytes >= _SIZE_MAX_BYTES:
            os.replace(name, f"{name}.1", src_dir_fd=directory_fd, dst_dir_fd=directory_fd)


def _device_of(fd: int) -> int:
    return os.fstat(fd).st_dev


def _ends_a_line(name: str, directory_fd: int, size_bytes: int) -> bool:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        return os.pread(fd, 1, size_bytes - 1) == b"\n"
    finally:
        os.close(fd)


def encode_line(event: Event) -> bytes:
    """Return the line of an event."""
    line: dict[str, Figure | None] = {
        "event": event.kind,
        "time_s": round(event.time_s, 6),
        "step": event.step,
        "rank": event.rank,
        "path": event.path if event.root is None else os.path.relpath(event.path, event.root),
    }
    for name, value in event.figures.items():
        if isinstance(value, str):
            line.setdefault(name, value[:_TEXT_MAX])
        elif math.isfinite(value):
            line.setdefault(name, round(value, 6))
    return (json.dumps(line) + "\n").encode("ascii")


# ------------------------------------------------------------------------------------------------------ reading


def read_events(root: str | os.PathLike[str]) -> Iterator[Event]:
    """Yield the events in the logs of a root, those of all ranks, by time. Memory is bounded.

    Damaged lines are passed over: a crash may have cut the last one. A root without a log has no events. Another
    process may append meanwhile; what it appends later may or may not come.

    Args:
        root: The directory of a Checkpointer.

    Yields:
        The events; each `path` is absolute.

    Raises:
        StorageError: The root cannot be listed, or a log cannot be read.

    Thread safety: any thread; each call reads anew.
    """
    path = absolute_path(local_path(root, "root"))
    yield from heapq.merge(*(_events_of_rank(path, name) for name in _names_in(path)), key=_time_of)


def _names_in(root: str) -> list[str]:
    """Return the names of the logs in a root, one for each rank."""
    with storage_errors("listing", root):
        return sorted({name.removesuffix(".1") for name in os.listdir(root) if _NAME.fullmatch(name)})


class LogFollower:
    """Reads the logs of a root again and again, each time only what was appended since.

    Args:
        root: The directory, absolute.

    Thread safety: one thread at a time.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._places: dict[str, tuple[int, int]] = {}  # of each log: which file it was, and how far it is read

    def news(self) -> list[Event]:
        """Return the events since the last call, of each rank in order; at first all of them.

        Raises:
            StorageError: The root cannot be listed, or a log cannot be read.
        """
        return [event for name in _names_in(self._root) for event in self._news_of(name)]

    def _news_of(self, name: str) -> list[Event]:
        known, read_bytes = self._places.get(name, (0, 0))
        found: list[Event] = []
        with ExitStack() as stack:
            # The log first: if it is rotated in between, both are the same file.
            log, older = (_opened(stack, os.path.join(self._root, part)) for part in (name, f"{name}.1"))
            files = {os.fstat(file.fileno()).st_ino: file for file in (older, log) if file is not None}
            if log is not None and os.fstat(log.fileno()).st_ino == known:
                files = {known: log}
            for inode, file in files.items():
                with storage_errors("reading", os.path.join(self._root, name)):
                    found += self._read(file, read_bytes if inode == known else 0)
                self._places[name] = inode, file.tell()
        return found

    def _read(self, file: BinaryIO, place: int) -> Iterator[Event]:
        """Yield the events from a position on; leave the file position after the last whole line."""
        file.seek(place)
        while line := file.readline(_LINE_MAX_BYTES):
            if not line.endswith(b"\n") and len(line) < _LINE_MAX_BYTES:
                file.seek(-len(line), os.SEEK_CUR)  # its end is being written
                return
            event = decode_line(line, self._root)
            if event is not None:
                yield event


def _time_of(event: Event) -> float:
    return event.time_s


def _events_of_rank(root: str, name: str) -> Iterator[Event]:
    """Yield the events of one rank, the older file first, by time."""
    near: list[tuple[float, int, Event]] = []
    for count, event in enumerate(_parsed(root, name)):
        heapq.heappush(near, (event.time_s, count, event))
        if len(near) > _DISORDER_COUNT:
            yield heapq.heappop(near)[2]
    while near:
        yield heapq.heappop(near)[2]


def _parsed(root: str, name: str) -> Iterator[Event]:
    for part in (f"{name}.1", name):
        path = os.path.join(root, part)
        with ExitStack() as stack, storage_errors("reading", path):
            file = _opened(stack, path)
            while file is not None and (line := file.readline(_LINE_MAX_BYTES)):
                event = decode_line(line, root)
                if event is not None:
                    yield event


def _opened(stack: ExitStack, path: str) -> BinaryIO | None:
    """Open a log; None if there is none, or if it was rotated this moment."""
    try:
        return stack.enter_context(open(open_regular(path), "rb"))
    except FastPersistError as error:
        if getattr(error, "errno", None) == errno.ENOENT:
            return None
        raise


def decode_line(line: bytes, root: str) -> Event | None:
    """Return the event of a line; None if the line is damaged, or cut."""
    if not line.endswith(b"\n"):
        return None
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    kind, time_s, path = found.pop("event", None), found.pop("time_s", None), found.pop("path", None)
    step, rank = found.pop("step", None), found.pop("rank", None)
    if not (isinstance(kind, str) and isinstance(path, str) and _is_number(time_s)):
        return None
    if not (type(rank) is int and rank >= 0 and (step is None or (type(step) is int and step >= 0))):
        return None
    figures = {key: value for key, value in found.items() if isinstance(value, str) or _is_number(value)}
    return Event(kind, float(time_s), root, os.path.join(root, path), step, rank, figures)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # which NaN and Infinity are not
