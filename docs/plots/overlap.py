"""Draw how long a training step takes with a checkpoint in every step, by method, from `fastpersist bench overlap`.

fastpersist bench overlap DIR --json docs/plots/overlap.json
python docs/plots/overlap.py docs/plots/overlap.json docs/assets/overlap.svg

A bar is the median of the runs' medians, its whisker the shortest and the longest of them. The percentage is the median
of the rounds, each against its own run without checkpoints. The picture is plain SVG: the same results give the same
bytes.
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, TOP, ROW, LABEL, RIGHT = 860, 74, 44, 232, 150
COLORS = {"no checkpoints": "#78909c", "fp.Checkpointer": "#3949ab"}
OTHERS = "#ef9a5d"


class Bar(NamedTuple):
    """A method: its name, the median step of each of its runs, and by what each is longer than the run without."""

    name: str
    runs_s: list[float]
    slowdowns: list[float]


def bars_of(results: dict[str, Any]) -> list[Bar]:
    """Return a bar for each method that has run, in the order of the results."""
    found: list[Bar] = []
    for row in results["rows"]:
        runs_s = [statistics.median(step["step_s"] for step in run["steps"]) for run in row.get("runs", ())]
        if runs_s and not row["note"]:  # with a note, it failed in some round
            plain_s = found[0].runs_s if found else runs_s
            found.append(
                Bar(row["name"], runs_s, [run / plain - 1 for run, plain in zip(runs_s, plain_s, strict=True)])
            )
    return found


def text(x: float, y: float, words: str, *, size: int = 14, color: str = "#37474f", **attributes: str) -> str:
    """Return a line of text."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}"{more}>{escape(words)}</text>'


def picture(results: dict[str, Any]) -> str:
    """Return the SVG."""
    bars = bars_of(results)
    machine = results["machine"]
    state_gb = results["training"]["state_bytes"] / 1e9
    scale = (WIDTH - LABEL - RIGHT) / max(max(bar.runs_s) for bar in bars)
    command = textwrap.wrap(results["command_line"].replace(machine["directory"], "DIR"), 116)
    height = TOP + ROW * len(bars) + 42 + 18 * len(command)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif">',
        "<title>Length of a training step with a checkpoint in every step, by method</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        text(20, 30, "A training step with a checkpoint in every step", size=18, font_weight="600"),
        text(20, 52, f"seconds; {state_gb:.2f} GB of parameters and moments; shorter is better"),
    ]
    plain_s = statistics.median(bars[0].runs_s)
    for number, bar in enumerate(bars):
        y = TOP + ROW * number
        middle, step_s = y + ROW / 2, statistics.median(bar.runs_s)
        color = COLORS.get(bar.name, OTHERS)
        added = f"  {100 * statistics.median(bar.slowdowns):+.0f} %" if number else ""
        whisker = f"M{LABEL + min(bar.runs_s) * scale:.0f} {middle:.0f} H{LABEL + max(bar.runs_s) * scale:.0f}"
        parts += [
            text(LABEL - 10, middle + 5, bar.name, text_anchor="end"),
            f'<rect x="{LABEL}" y="{y + 8}" width="{step_s * scale:.0f}" height="{ROW - 16}" rx="3" fill="{color}"/>',
            f'<path d="{whisker}" stroke="#263238" stroke-width="1.5"/>',
            text(LABEL + max(bar.runs_s) * scale + 10, middle + 5, f"{step_s:.2f} s{added}", font_weight="600"),
        ]
    dashes = LABEL + plain_s * scale
    parts += [
        f'<path d="M{dashes:.0f} {TOP} V{TOP + ROW * len(bars)}" stroke="#78909c" stroke-dasharray="4 4"/>',
        *(text(20, TOP + ROW * len(bars) + 24 + 18 * number, line, size=12) for number, line in enumerate(command)),
        text(
            20,
            height - 14,
            f"{machine['date'][:10]}, {machine['cpu_count']} cores {machine['cpu_model']}, {machine['file_system']}, "
            f"torch {machine['torch']}; medians, shortest and longest run",
            size=12,
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text())))
