"""`fastpersist watch ROOT`: the save in flight, the last steps, and for how many more the disk has room.

It reads, and nothing else: names and manifests of the root, the log of events, and the lengths of the files that are
being written. So it runs beside a training in another process, and on another host that sees the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from fastpersist.cli.argument_types import positive_number
from fastpersist.cli.terminal import EXIT_GOOD, has_rich, printable, size_text
from fastpersist.errors import UnsupportedError
from fastpersist.events.event import ENDS, Event
from fastpersist.events.log import LogFollower

__all__ = ["add_parser", "run"]

_EPILOG = """\
examples:
  fastpersist watch runs/a
  fastpersist watch runs/a --every 5 >> watch.log
  fastpersist watch runs/a --once --json | jq .room_count

It goes on until Ctrl-C; in place on a terminal if rich is installed, else line by line.

The save in flight is read from its hidden directory: what the disk has of it already. "training may change its state"
means that all of it is captured: nothing waits for the disk any more.

--json prints one object per reading: time_s, root, flights (step, rank_count, begun_s, written_bytes, bytes_per_s,
captured), steps (step, bytes, stall_s, write_s, the newest last), failures (step, error), free_bytes,
room_count (how many steps of the last one's size fit), newest.

Exit codes: 0 good, 2 usage, or no such directory.
"""
_STEP_COUNT = 5
_LOG_COUNT = 2000


@dataclass
class Flight:
    """A save that has begun and is not over.

    Attributes:
        step: The step that is saved.
        rank_count: The number of ranks that have reported the save.
        begun_s: When it began, Unix time.
        written_bytes: The bytes of its files that are on the disk.
        bytes_per_s: The rate of writing since the reading before; None at the first reading.
        captured: The state may change again, on all ranks that have reported.
    """

    step: int
    rank_count: int
    begun_s: float
    written_bytes: int
    bytes_per_s: float | None
    captured: bool


@dataclass
class Reading:
    """What is to be seen of a root at one moment; the fields are the keys of --json."""

    time_s: float
    root: str
    newest: int | None
    flights: list[Flight]
    steps: list[dict[str, float | int | str]]
    failures: list[dict[str, float | int | str]]
    free_bytes: int
    room_count: int | None
    _written: dict[int, int] = field(default_factory=dict, repr=False)
    _log: LogFollower | None = field(default=None, repr=False)
    _events: list[Event] = field(default_factory=list, repr=False)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "watch",
        help="the save in flight, the last steps, room on the disk",
        description="Watch the root of a Checkpointer beside the training that saves there. Nothing is written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", metavar="ROOT", help="the directory of a Checkpointer")
    parser.add_argument("--once", action="store_true", help="print one reading, and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per reading")
    parser.add_argument(
        "--every", type=positive_number, default=1.0, metavar="S", help="seconds between readings (default: 1)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print readings until the user ends it.

    Raises:
        UnsupportedError: ROOT is one checkpoint.
    """
    from fastpersist.commit.filesystem import absolute_path
    from fastpersist.formats.manifest import MANIFEST_NAME

    root = absolute_path(arguments.root)
    if os.path.lexists(os.path.join(root, MANIFEST_NAME)):
        raise UnsupportedError(f"{root} is one checkpoint: name the directory that holds it, {os.path.dirname(root)}")
    readings = _readings(root, max(0.05, arguments.every))
    if arguments.once or arguments.json or not (sys.stdout.isatty() and has_rich()):
        for reading in readings:
            print(_as_json(reading) if arguments.json else "\n".join(_lines(reading)), flush=True)
            if arguments.once:
                break
        return EXIT_GOOD
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        for reading in readings:
            live.update(Text("\n".join(_lines(reading))), refresh=True)
    return EXIT_GOOD


# ------------------------------------------------------------------------------------------------- what is read


def _readings(root: str, every_s: float) -> Iterator[Reading]:
    before: Reading | None = None
    while True:
        before = read_root(root, before)
        yield before
        time.sleep(every_s)


def read_root(root: str, before: Reading | None = None) -> Reading:
    """Read a root once.

    Args:
        root: The directory.
        before: The reading before, for rates, and since it knows how far the log was read.

    Raises:
        StorageError: The root cannot be listed.
    """
    from fastpersist.commit.filesystem import storage_errors
    from fastpersist.commit.step_listing import commits_of, in_commit_order

    with storage_errors("listing", root):
        names = os.listdir(root)
        disk = os.statvfs(root)
    order = in_commit_order(commits_of(root))
    log = before._log if before is not None and before._log is not None else LogFollower(root)
    events = [*(before._events if before is not None else ()), *log.news()][-_LOG_COUNT:]
    now_s = time.time()
    free_bytes = disk.f_bavail * disk.f_frsize
    steps = list(_rows(root, order[-_STEP_COUNT:]))
    failures = [_failure(event) for event in events if event.kind == "failed"][-_STEP_COUNT:]
    size_bytes = int(steps[-1]["bytes"]) if steps else 0
    reading = Reading(
        now_s,
        root,
        order[-1] if order else None,
        [],
        steps,
        failures,
        free_bytes,
        free_bytes // size_bytes if size_bytes else None,
        _log=log,
        _events=events,
    )
    for step, pending in sorted(_pending_of(root, names).items()):
        written_bytes = sum(map(_written_below, pending))
        reading._written[step] = written_bytes
        earlier = None if before is None else before._written.get(step)
        rate = None
        if before is not None and earlier is not None:
            rate = max(0, written_bytes - earlier) / max(1e-9, now_s - before.time_s)
        reading.flights.append(_flight(step, events, written_bytes, rate, now_s))
    return reading


def _rows(root: str, steps: list[int]) -> Iterator[dict[str, float | int | str]]:
    """Yield what the manifests of steps say; a step that is removed this moment, or damaged, is passed over."""
    from fastpersist.commit.step_listing import read_manifest
    from fastpersist.errors import FastPersistError
    from fastpersist.formats.manifest import step_name

    for step in steps:
        with suppress(FastPersistError):
            manifest = read_manifest(os.path.join(root, step_name(step)))
            size_bytes = sum(entry.size_bytes for entry in manifest.files)
            figures = {name: _number(manifest.stats.get(name)) for name in ("stall_s", "write_s")}
            yield {"step": step, "bytes": size_bytes, **figures}


def _number(value: object) -> float:
    return value if isinstance(value, float | int) else 0.0


def _failure(event: Event) -> dict[str, float | int | str]:
    return {"step": event.step or 0, "error": str(event.figures.get("error", ""))}


def _pending_of(root: str, names: list[str]) -> dict[int, list[str]]:
    """Return the hidden directories that are being written, by step."""
    from fastpersist.formats.manifest import step_of

    found: dict[int, list[str]] = {}
    for name in names:
        final_name, separator, _ = name.removeprefix(".").partition(".pending-")
        step = step_of(final_name) if separator else None
        if step is not None:
            found.setdefault(step, []).append(os.path.join(root, name))
    return found


def _flight(step: int, events: list[Event], written_bytes: int, rate: float | None, now_s: float) -> Flight:
    """Join what the log and the disk say; without a log the disk alone."""
    begun: dict[int, float] = {}
    captured: set[int] = set()
    for event in events:
        if event.step != step:
            continue
        if event.kind == "save_begun":
            begun[event.rank] = event.time_s
            captured.discard(event.rank)
        elif event.kind == "captured":
            captured.add(event.rank)
        elif event.kind in ENDS:
            begun.pop(event.rank, None)
    is_captured = bool(begun) and captured >= set(begun)
    return Flight(step, len(begun), min(begun.values(), default=now_s), written_bytes, rate, is_captured)


def _written_below(directory: str) -> int:
    """Return how many bytes of the files the disk has: they are preallocated, so lengths do not tell."""
    total_bytes = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # it is published, or removed, this moment
                total_bytes += _data_bytes(os.path.join(folder, name))
    return total_bytes


def _data_bytes(path: str) -> int:
    """Return the bytes of a file up to the last one that is written: behind it, preallocated space is a hole."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes, data_bytes, place = os.fstat(fd).st_size, 0, 0
        while place < size_bytes:
            try:
                start = os.lseek(fd, place, os.SEEK_DATA)
            except OSError:  # no more data
                break
            place = os.lseek(fd, start, os.SEEK_HOLE)
            data_bytes += place - start
        return data_bytes
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------------- what is shown


def _as_json(reading: Reading) -> str:
    return json.dumps({name: value for name, value in vars(reading).items() if not name.startswith("_")}, default=vars)


def _lines(reading: Reading) -> list[str]:
    """Return a reading as text."""
    newest = "no step yet" if reading.newest is None else f"newest step {reading.newest}"
    lines = [f"{time.strftime('%H:%M:%S', time.localtime(reading.time_s))}  {printable(reading.root)}: {newest}"]
    for flight in reading.flights:
        rate = "" if flight.bytes_per_s is None else f" at {size_text(int(flight.bytes_per_s))}/s"
        state = "training may change its state" if flight.captured else "the optimizer's step waits for it"
        ranks = f", {flight.rank_count} ranks" if flight.rank_count > 1 else ""
        since_s = reading.time_s - flight.begun_s
        lines.append(
            f"  saving step {flight.step}: {size_text(flight.written_bytes)}{rate}, for {since_s:.1f} s{ranks}; {state}"
        )
    if not reading.flights:
        lines.append("  no save is under way")
    for step in reading.steps:
        lines.append(
            f"  step {step['step']}: {size_text(int(step['bytes']))}, stall {float(step['stall_s']) * 1e3:.1f} ms, "
            f"written in {float(step['write_s']):.2f} s"
        )
    for failure in reading.failures:
        lines.append(f"  step {failure['step']} failed: {printable(str(failure['error']))}")
    room = "" if reading.room_count is None else f": room for {reading.room_count} more such steps"
    lines.append(f"  {size_text(reading.free_bytes)} free{room}")
    return lines
