"""A run as charts: lines, bars and spans with a bounded number of points, however many steps the run has.

Each bin of steps is one point: their median, or their largest value where outliers matter. `svg` and `png` draw
charts without knowing what a run is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

from fastpersist.cli.report.records import Run, Save
from fastpersist.display import count_text, duration_text, size_text

__all__ = ["BINS_MAX", "Bars", "Chart", "Line", "Span", "Unit", "charts_of"]

BINS_MAX = 120
_TIMELINE_ROWS = 12  # the last ones
_RANK_BARS = 16
_CONTENT = ("model", "optimizer", "rest")

Unit = Literal["s", "bytes", "bytes/s", "count"]


@dataclass(slots=True)
class Line:
    """A line over steps or times. A point whose y is None is a gap.

    Attributes:
        name: The name of the line in the legend.
        color: The number of the color: the same thing has the same one in all charts.
        points: Pairs (x, y), in ascending order of x.
        style: "line", "steps" (y stays until the next point), "dashes", or "dots".
    """

    name: str
    color: int
    points: list[tuple[float, float | None]]
    style: Literal["line", "steps", "dashes", "dots"] = "line"


class Span(NamedTuple):
    """A part of a row: where it begins and ends, the number of its color, and the words where the pointer is."""

    start: float
    end: float
    color: int
    words: str


@dataclass(slots=True)
class Bars:
    """A row of spans.

    Attributes:
        label: The text beside the row.
        lanes: Spans, lane by lane; the lanes lie one above the other and share the height of the row.
        value: The text at the end of the row.
    """

    label: str
    lanes: list[list[Span]]
    value: str = ""


@dataclass(slots=True)
class Chart:
    """One picture.

    Attributes:
        name: The name of the chart's file and of its anchor.
        title: What the chart shows.
        unit: The unit of y, for lines; of x, for bars.
        x_name: The name of x, for lines: "step" or "time".
        lines, bars: What is drawn; one of them is empty.
        legend: For bars: the names and their colors.
        note: How to read the chart.
    """

    name: str
    title: str
    unit: Unit
    x_name: str = "step"
    lines: list[Line] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    legend: list[tuple[str, int]] = field(default_factory=list)
    note: str = ""


def charts_of(run: Run) -> list[Chart]:
    """Return the charts for which the run has figures."""
    saves = [save for save in run.saves if save.kind == "committed"]
    made = [
        _timeline(saves),
        _durations(saves),
        _stalls(saves),
        _rates(saves, run),
        _step_times(saves),
        _content(run),
        _ranks(run),
        _retention(run),
    ]
    return [chart for chart in made if any(_has_points(line) for line in chart.lines) or chart.bars]


def _has_points(line: Line) -> bool:
    return any(y is not None for _, y in line.points)


# ------------------------------------------------------------------------------------------------------ over steps


def _bins(saves: Sequence[Save]) -> list[Sequence[Save]]:
    """Cut the saves into at most BINS_MAX runs of neighbours."""
    count = min(BINS_MAX, len(saves))
    return [saves[len(saves) * n // count : len(saves) * (n + 1) // count] for n in range(count)]


def _over_steps(
    saves: Sequence[Save],
    figure: Callable[[Save], float | None],
    summary: Callable[[list[float]], float] = median,
) -> list[tuple[float, float | None]]:
    points: list[tuple[float, float | None]] = []
    for part in _bins(saves):
        known = [value for value in map(figure, part) if value is not None]
        points.append((float(part[-1].step), summary(known) if known else None))
    return sorted(points, key=lambda point: point[0])  # a run that went back has the same step twice


def _of(name: str) -> Callable[[Save], float | None]:
    return lambda save: save.get(name)


def _durations(saves: Sequence[Save]) -> Chart:
    names = ("capture", "write", "sync", "commit")
    return Chart(
        "durations",
        "How long each save took",
        "s",
        lines=[Line(name, color, _over_steps(saves, _of(f"{name}_s"))) for color, name in enumerate(names, 1)],
        note="During training: these seconds are not lost. Capture runs until everything may change again; writing is "
        "spread over the step.",
    )


def _stalls(saves: Sequence[Save]) -> Chart:
    lines = [Line("stall, median", 0, _over_steps(saves, _of("stall_s")))]
    if len(saves) > BINS_MAX:
        lines.append(Line("stall, longest", 5, _over_steps(saves, _of("stall_s"), max), "dots"))
    return Chart(
        "stall", "Time that training lost to each save", "s", lines=lines, note="Inside save(), and at the gate."
    )


def _rates(saves: Sequence[Save], run: Run) -> Chart:
    lines = [Line("this run", 2, _over_steps(saves, lambda save: save.rate_bytes_per_s))]
    if run.disk_bytes_per_s is not None and lines[0].points:
        ends = (lines[0].points[0][0], lines[0].points[-1][0])
        lines.append(Line("the disk's own", 5, [(x, run.disk_bytes_per_s) for x in ends], "dashes"))
    note = "Bytes by the seconds of writing and syncing. A save during training does not hurry: it needs to be done "
    note += "before the next one only."
    return Chart("rate", "Rate of writing", "bytes/s", lines=lines, note=f"{note} {run.disk_note}".strip())


def _step_times(saves: Sequence[Save]) -> Chart:
    """Compare steps beside a save and without one."""
    lines = [
        Line("beside a save", 0, _over_steps(saves, lambda save: save.get("step_beside_save_s") or None), "dots"),
        Line("without a save", 4, _over_steps(saves, lambda save: save.get("step_s") or None)),
    ]
    return Chart(
        "steps",
        "Length of a training step",
        "s",
        lines=lines,
        note="The mean from one optimizer step to the next, of the steps before a save. Known for saves with "
        "optimizer=, from the second one on. Beside a save: while one was under way.",
    )


# ------------------------------------------------------------------------------------------------------- bars


def _timeline(saves: Sequence[Save]) -> Chart:
    """Draw the last saves from their beginning on, one below the other."""
    rows = []
    for save in saves[-_TIMELINE_ROWS:]:
        seconds = {name: save.get(f"{name}_s") or 0.0 for name in ("stall", "capture", "write", "sync", "commit")}
        if not any(seconds.values()):
            continue
        upper = [
            Span(0.0, seconds[name], color, f"{name} {duration_text(seconds[name])}")
            for color, name in ((1, "capture"), (0, "stall"))
            if seconds[name]
        ]
        # The log says when the save ended; its bytes were written, synced and made visible right before that.
        work_s = seconds["write"] + seconds["sync"] + seconds["commit"]
        at_s = max(0.0, save.end_s - save.begun_s - work_s) if save.begun_s > 0 else 0.0
        lower = []
        for color, name in ((2, "write"), (3, "sync"), (4, "commit")):
            if seconds[name]:
                lower.append(Span(at_s, at_s + seconds[name], color, f"{name} {duration_text(seconds[name])}"))
                at_s += seconds[name]
        rows.append(Bars(str(save.step), [upper, lower], duration_text(max(at_s, seconds["capture"]))))
    names = ("stall", "capture", "write", "sync", "commit")
    return Chart(
        "timeline",
        "The last saves, from save() on",
        "s",
        bars=rows,
        legend=[(name, color) for color, name in enumerate(names)],
        note="Upper half: stall, over capture. Lower half: write, sync, commit.",
    )


def _content(run: Run) -> Chart:
    total = sum(run.content_bytes.values())
    rows = [
        Bars(
            name,
            [[Span(0.0, size, color, size_text(int(size)))]],
            f"{size_text(int(size))}, {100 * size / total:.0f} %",
        )
        for color, name in zip((2, 1, 4), _CONTENT, strict=True)
        if (size := run.content_bytes.get(name, 0.0)) > 0
    ]
    return Chart("content", "Bytes by what they are", "bytes", bars=rows, note=run.content_note)


def _ranks(run: Run) -> Chart:
    """Draw the bytes of the ranks; of many ranks those that were most often the slowest."""
    shown = sorted(run.ranks, key=lambda number: (-run.ranks[number].slowest_count, number))[:_RANK_BARS]
    if len(run.ranks) < 2:
        shown = []
    rows = [
        Bars(f"rank {number}", [[Span(0.0, size, 2, f"rank {number}")]], size_text(int(size)))
        for number in sorted(shown)
        for size in [run.ranks[number].bytes]
    ]
    left = len(run.ranks) - len(shown)
    note = f"{left} more ranks are not shown." if left else ""
    return Chart("ranks", "Bytes by rank, of all saves", "bytes", bars=rows, note=note)


def _retention(run: Run) -> Chart:
    """Draw what was there; of the points in a bin the largest, which is what the disk needs room for."""
    count = min(BINS_MAX, len(run.kept))
    parts = [run.kept[len(run.kept) * n // count : len(run.kept) * (n + 1) // count] for n in range(count)]
    points: list[tuple[float, float | None]] = [(part[0][0], max(size for _, _, size in part)) for part in parts]
    note = ""
    if run.kept:
        _, step_count, size = run.kept[-1]
        points.append((run.kept[-1][0], size))
        note = f"At the end {count_text(step_count, 'step')}, {size_text(int(size))}."
    lines = [Line("all steps that are there", 1, points, "steps")]
    return Chart("retention", "Bytes that are kept", "bytes", "time", lines=lines, note=note)
