"""The table of `fastpersist report`: the cost of the steps that are there, from their manifests.

Removed steps are missing; `page` has those of the log of events, too. `inspect` lists the contents of steps, and
`verify` checks them.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from fastpersist.display import duration_text, printable, rate_text, size_text, time_text

if TYPE_CHECKING:
    from fastpersist import Manifest

__all__ = ["as_json", "print_costs"]

_DURATIONS = ("stall_s", "capture_s", "write_s", "sync_s")


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


def as_json(manifest: Manifest) -> dict[str, object]:
    """Return the costs of the steps of a root, as --json prints them."""
    return {"path": manifest.path, **_as_json(_rows(manifest.checkpoints))}


def print_costs(manifest: Manifest) -> None:
    """Print the costs of the steps of a root."""
    _print_text(manifest.path, _rows(manifest.checkpoints), [name for name in manifest.leftovers if name[0] != "."])


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


def _print_text(path: str, rows: list[_Row], damaged: list[str]) -> None:
    from tabulate import tabulate

    print(f"root     {printable(path)}")
    print(f"steps    {len(rows)} that are there, {size_text(sum(row.size_bytes for row in rows))}")
    if damaged:
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        print(f"damaged  {printable(', '.join(damaged[:3]))}{more}: `fastpersist verify` says how")
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
            rate_text(row.rate_bytes_per_s),
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


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio * 100:{'.2g' if ratio < 0.995 else '.0f'}} %"
