"""A chart as SVG that is part of an HTML page: its colors are the page's, so they follow the reader's setting.

Everything that is a text is escaped, and every coordinate is a number that was made here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from fastpersist.cli.report.charts import Bars, Chart, Line, Unit
from fastpersist.display import duration_text, html_text, size_text

__all__ = ["chart_svg", "nice_step", "tick_text"]

_WIDTH = 480
_HEIGHT = 250
_LEFT = 72
_RIGHT = 14
_TOP = 30
_BOTTOM = 34
_ROW = 24
_LABEL = 70
_VALUE = 118
_CHARACTER = 6.6  # the width of one in a legend


def chart_svg(chart: Chart) -> str:
    """Return the `svg` element of a chart."""
    parts = _bars(chart) if chart.bars else _lines(chart)
    height = _bars_top(chart) + _ROW * len(chart.bars) + 8 if chart.bars else _HEIGHT
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{html_text(chart.title)}">'
    return "".join([head, *parts, "</svg>"])


def nice_step(span: float) -> float:
    """Return a round distance between marks of an axis: 1, 2 or 5 times a power of ten, at most about five marks."""
    if not (span > 0 and math.isfinite(span)):
        return 1.0
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next((step * power for step in (1, 2, 5) if step * power >= raw), 10 * power)


def tick_text(value: float, unit: Unit) -> str:
    """Return the words of a mark on an axis."""
    if value == 0:
        return "0"
    if unit == "s":
        return duration_text(value)
    if unit == "count":
        return f"{value:.10g}"
    return size_text(int(value)).replace(".00 ", " ").replace(".0 ", " ") + ("/s" if unit == "bytes/s" else "")


def _text(x: float, y: float, words: str, kinds: str = "") -> str:
    attribute = f' class="{kinds}"' if kinds else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attribute}>{html_text(words)}</text>'


def _legend(names: Sequence[tuple[str, int]], x: float) -> list[str]:
    parts = []
    for name, color in names:
        parts.append(f'<rect x="{x:.1f}" y="8" width="10" height="10" rx="2" class="f{color}"/>')
        parts.append(_text(x + 14, 17, name))
        x += 14 + _CHARACTER * len(name) + 12
    return parts


def _bars(chart: Chart) -> list[str]:
    longest = max((span.end for row in chart.bars for lane in row.lanes for span in lane), default=0.0) or 1.0
    scale = (_WIDTH - _LABEL - _VALUE) / longest
    parts = _legend(chart.legend, 4)
    for number, row in enumerate(chart.bars):
        parts += _bar_row(row, _bars_top(chart) + _ROW * number, scale)
    return parts


def _bars_top(chart: Chart) -> int:
    return _TOP if chart.legend else 4


def _bar_row(row: Bars, y: float, scale: float) -> list[str]:
    parts = [_text(_LABEL - 6, y + 16, row.label if len(row.label) < 11 else f"{row.label[:9]}…", "e")]
    height = (_ROW - 6) / max(1, len(row.lanes))
    for number, lane in enumerate(row.lanes):
        for span in lane:
            parts.append(
                f'<rect x="{_LABEL + span.start * scale:.1f}" y="{y + 3 + height * number:.1f}" height="{height:.1f}" '
                f'width="{max(1.0, (span.end - span.start) * scale):.1f}" class="f{span.color}">'
                f"<title>{html_text(span.words)}</title></rect>"
            )
    parts.append(_text(_WIDTH - _VALUE + 6, y + 16, row.value))
    return parts


def _lines(chart: Chart) -> list[str]:
    known = [(x, y) for line in chart.lines for x, y in line.points if y is not None]
    left, right = min(x for x, _ in known), max(x for x, _ in known)
    top = max(y for _, y in known) or 1.0
    step = nice_step(top)
    top = max(top, step * math.ceil(top / step - 1e-9))
    x_scale = (_WIDTH - _LEFT - _RIGHT) / ((right - left) or 1.0)
    y_scale = (_HEIGHT - _TOP - _BOTTOM) / top
    base = _HEIGHT - _BOTTOM
    parts = _legend([(line.name, line.color) for line in chart.lines], _LEFT)
    for number in range(round(top / step) + 1):
        y = base - number * step * y_scale
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" class="grid"/>')
        parts.append(_text(_LEFT - 6, y + 4, tick_text(number * step, chart.unit), "e"))
    parts += _x_axis(chart, left, right, x_scale)
    for line in chart.lines:
        points = [
            (_LEFT + (x - left) * x_scale, None if y is None else base - min(y, top) * y_scale) for x, y in line.points
        ]
        parts += _dots(points, line) if line.style == "dots" or len(line.points) == 1 else [_path(points, line)]
    return parts


def _x_axis(chart: Chart, left: float, right: float, x_scale: float) -> list[str]:
    y = _HEIGHT - _BOTTOM + 16
    if chart.x_name == "time":
        ends = [(left, "s"), (right, "e")] if right > left else [(left, "s")]
        return [_text(_LEFT + (x - left) * x_scale, y, _moment(x), kind) for x, kind in ends]
    step = max(1.0, nice_step(right - left))
    first = math.ceil(left / step) * step
    count = min(12, int((right - first) / step + 1e-9) + 1) if right >= first else 0
    marks = [first + number * step for number in range(count)] or [left]
    parts = [_text(_LEFT + (x - left) * x_scale, y, f"{x:.10g}", "m") for x in marks]
    return [*parts, _text(_WIDTH - _RIGHT, _HEIGHT - 4, chart.x_name, "e n")]


def _moment(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        return ""


def _path(points: Sequence[tuple[float, float | None]], line: Line) -> str:
    words: list[str] = []
    is_open = False
    for x, y in points:
        if y is None:
            is_open = False
            continue
        if is_open and line.style == "steps":
            words.append(f"H{x:.1f}V{y:.1f}")
        else:
            words.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}")
        is_open = True
    dashes = " dashes" if line.style == "dashes" else ""
    return f'<path d="{"".join(words)}" class="l s{line.color}{dashes}"/>'


def _dots(points: Sequence[tuple[float, float | None]], line: Line) -> list[str]:
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" class="f{line.color}"/>' for x, y in points if y is not None]
