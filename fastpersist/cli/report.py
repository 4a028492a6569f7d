"""`fastpersist report ROOT`: the cost of a run's checkpoints to its training, from their manifests.

Removed steps are missing; a running `Checkpointer` has the figures of its own saves in `stats()`. `inspect` lists the
contents of steps, and `verify` checks them.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from fastpersist.cli.terminal import EXIT_GOOD
from fastpersist.display import duration_text, printable, size_text, time_text
from fastpersist.errors import UnsupportedError

if TYPE_CHECKING:
    from fastpersist import Manifest

__all__ = ["add_parser", "run"]

_DURATIONS = ("stall_s", "capture_s", "write_s", "sync_s")

_EPILOG = """\
examples:
  fastpersist report runs/a
  fastpersist report runs/a --json

The figures are those of rank 0 at the moment when it published the step:
  stall    time that the training thread lost: inside save(), and waiting at the gate
  capture  from save() until everything could be changed again; most of it overlaps training
  write    from the first byte to the last; sync: until these were durable
  rate     size divided by write and sync; a background save spreads its writing over
           the step, so this rate is below that of the disk
  copied   bytes copied inside save(), and at the gate for a step that came before the writer
  every    time since the previous step that is still there
  lost     stall as a part of that time

--json prints one object:
  path, steps     list of {step, time_s, size_bytes, stats, every_s, rate_bytes_per_s, lost_ratio}, oldest first;
                  stats as in the manifest; null if not known
  total           {step_count, size_bytes, stall_s, write_s, sync_s}, sums
  median          {stall_s, rate_bytes_per_s, every_s, lost_ratio} of the steps; null if no step has it

Exit codes: 0 good, 2 not found, or no directory of checkpoints.
"""


class _Row(NamedTuple):
    """A step; None stands for an unknown value.

    Attributes:
        step: Number of the step.
        time_s: Unix time of the save.
        size_bytes: Size of all its files.
        stats: See `fastpersist.SaveStats`.
        every_s: Time since the previous step.
        rate_bytes_per_s: Size divided by the time of writing and syncing.
        lost_ratio: Stall divided by `every_s`.
    """

    step: int | None
    time_s: float | None
    size_bytes: int
    stats: dict[str, float | int | str]
    every_s: float | None
    rate_bytes_per_s: float | None
    lost_ratio: float | None

    def number(self, name: str) -> float:
        """Return a figure of the manifest; 0 for none."""
        value = self.stats.get(name, 0.0)
        return 0.0 if isinstance(value, str) else float(value)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "report",
        help="show what the checkpoints of a run cost its training",
        description="Show what the steps in a directory of checkpoints cost: stalls, writing, rates, copies.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", metavar="ROOT", help="a directory of checkpoints, as fp.Checkpointer writes it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the costs of the steps."""
    from fastpersist import inspect

    manifest = inspect(arguments.root)
    if manifest.format != "root":
        raise UnsupportedError(
            f"{arguments.root} is no directory of checkpoints; `fastpersist inspect` says what one checkpoint cost"
        )
    rows = _rows(manifest.checkpoints)
    if arguments.json:
        print(json.dumps({"path": manifest.path, **_as_json(rows)}, indent=2))
    else:
        _print_text(manifest.path, rows)
    return EXIT_GOOD


def _rows(checkpoints: tuple[Manifest, ...]) -> list[_Row]:
    before = (None, *checkpoints)
    rows = []
    for found, last in zip(checkpoints, before, strict=False):
        every_s = None if last is None else _seconds_between(last.time_s, found.time_s)
        row = _Row(found.step, found.time_s, found.size_bytes, dict(found.stats), every_s, None, None)
        written_s = row.number("write_s") + row.number("sync_s")
        rows.append(
            row._replace(
                rate_bytes_per_s=row.size_bytes / written_s if written_s > 0 else None,
                lost_ratio=None if every_s is None or "stall_s" not in row.stats else row.number("stall_s") / every_s,
            )
        )
    return rows


def _seconds_between(earlier_s: float | None, later_s: float | None) -> float | None:
    if earlier_s is None or later_s is None or later_s <= earlier_s:
        return None
    return later_s - earlier_s


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _medians(rows: list[_Row]) -> dict[str, float | None]:
    return {
        "stall_s": _median([row.number("stall_s") if "stall_s" in row.stats else None for row in rows]),
        "rate_bytes_per_s": _median([row.rate_bytes_per_s for row in rows]),
        "every_s": _median([row.every_s for row in rows]),
        "lost_ratio": _median([row.lost_ratio for row in rows]),
    }


def _as_json(rows: list[_Row]) -> dict[str, object]:
    return {
        "steps": [row._asdict() for row in rows],
        "total": {
            "step_count": len(rows),
            "size_bytes": sum(row.size_bytes for row in rows),
            **{name: sum(row.number(name) for row in rows) for name in ("stall_s", "write_s", "sync_s")},
        },
        "median": _medians(rows),
    }


def _print_text(path: str, rows: list[_Row]) -> None:
    from tabulate import tabulate

    print(f"root     {printable(path)}")
    print(f"steps    {len(rows)} that are there, {size_text(sum(row.size_bytes for row in rows))}")
    if not rows:
        return
    medians = _medians(rows)
    worst = max(rows, key=lambda row: row.number("stall_s"))
    longest = duration_text(worst.number("stall_s"))
    print(f"stall    {duration_text(medians['stall_s'])} is the median; {longest} the longest, of {_name(worst)}")
    if medians["every_s"] is not None:
        every = duration_text(medians["every_s"])
        print(f"lost     {_percent(medians['lost_ratio'])} of {every} between two steps (medians)")
    print()
    table = [
        (
            _name(row),
            time_text(row.time_s),
            duration_text(row.every_s),
            size_text(row.size_bytes),
            *(duration_text(row.number(name) if name in row.stats else None) for name in _DURATIONS),
            _rate(row.rate_bytes_per_s),
            size_text(int(row.number("bytes_at_gate") + row.number("bytes_before_return"))),
            _percent(row.lost_ratio),
            printable(str(row.stats.get("engine", ""))),
        )
        for row in rows
    ]
    headers = ("step", "time", "every", "size", "stall", "capture", "write", "sync", "rate", "copied", "lost", "engine")
    alignments = ("right", "left", *["right"] * 9, "left")
    print(tabulate(table, headers=headers, colalign=alignments, disable_numparse=True))


def _name(row: _Row) -> str:
    return "none" if row.step is None else str(row.step)


def _rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio * 100:.2g} %"
