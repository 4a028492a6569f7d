"""The charts of a report as PNG files, drawn by matplotlib, which is an extra: nothing of it is imported before."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import time
from collections.abc import Sequence
from typing import Any

from fastpersist.cli.report.charts import Chart, Unit
from fastpersist.cli.report.svg import tick_text
from fastpersist.commit.file_commit import replace_small_file
from fastpersist.commit.filesystem import make_directories
from fastpersist.display import printable
from fastpersist.errors import ConfigError

__all__ = ["draw_charts", "require_matplotlib"]

_COLORS = ("#d1495b", "#8ea3b8", "#3949ab", "#e8973a", "#2e8b7a", "#8d5fb0")
_STYLES = {"line": "-", "steps": "-", "dashes": "--", "dots": ""}


def require_matplotlib() -> None:
    """Refuse before anything is read.

    Raises:
        ConfigError: There is no matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install 'fastpersist[plots]'; --html does without it")


def draw_charts(charts: Sequence[Chart], directory: str) -> list[str]:
    """Write a file for each chart, and return their paths.

    Raises:
        ConfigError: There is no matplotlib.
        StorageError: A file cannot be written.
    """
    require_matplotlib()
    make_directories(directory)
    paths = []
    for chart in charts:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.set_title(chart.title)
        _draw_bars(axes, chart) if chart.bars else _draw_lines(axes, chart)
        path = os.path.join(directory, f"{chart.name}.png")
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=150)
        replace_small_file(path, picture.getvalue())
        paths.append(path)
    return paths


def _formatter(unit: Unit) -> Any:
    return importlib.import_module("matplotlib.ticker").FuncFormatter(lambda value, _: tick_text(value, unit))


def _draw_lines(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        nothing = float("nan")
        axes.plot(
            [x for x, _ in line.points],
            [nothing if y is None else y for _, y in line.points],
            label=line.name,
            color=_COLORS[line.color],
            linestyle=_STYLES[line.style],
            marker="." if line.style == "dots" or len(line.points) == 1 else "",
            drawstyle="steps-post" if line.style == "steps" else "default",
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_formatter(chart.unit))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    if chart.x_name == "time":
        moment = importlib.import_module("matplotlib.ticker").FuncFormatter(
            lambda value, _: time.strftime("%m-%d %H:%M", time.localtime(value)) if 0 <= value < 2**36 else ""
        )
        axes.xaxis.set_major_formatter(moment)
    else:
        axes.set_xlabel(chart.x_name)


def _draw_bars(axes: Any, chart: Chart) -> None:
    for number, row in enumerate(chart.bars):
        height = 0.8 / max(1, len(row.lanes))
        for lane_number, lane in enumerate(row.lanes):
            for span in lane:
                y = number - 0.4 + height * lane_number
                axes.broken_barh([(span.start, span.end - span.start)], (y, height), facecolors=_COLORS[span.color])
        ends = [span.end for lane in row.lanes for span in lane]
        # No text of a file may be read as a formula, which matplotlib does between two dollars.
        axes.annotate(" " + printable(row.value).replace("$", r"\$"), (max(ends, default=0.0), number), va="center")
    axes.set_yticks(range(len(chart.bars)), [printable(row.label).replace("$", r"\$") for row in chart.bars])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(_formatter(chart.unit))
    if chart.legend:
        patch = importlib.import_module("matplotlib.patches").Patch
        axes.legend(handles=[patch(color=_COLORS[color], label=name) for name, color in chart.legend], fontsize="small")
