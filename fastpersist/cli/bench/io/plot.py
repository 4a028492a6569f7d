"""The picture of `bench io`: bandwidth by depth and by block size, TensorFile in full lines, its yardsticks in dashes.

matplotlib is an extra. Nothing of it is imported before it is needed, and its state for the whole process (pyplot) is
left alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastpersist.cli.argument_types import size_name
from fastpersist.cli.bench.io.points import Setup
from fastpersist.cli.bench.io.rows import IoResult
from fastpersist.commit.filesystem import storage_errors
from fastpersist.errors import ConfigError

__all__ = ["Curve", "curves", "draw", "require_matplotlib"]

Axis = Literal["depth", "block_bytes"]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line.

    Attributes:
        label: Whose it is, and what is the same along it.
        color: Lines of one color are compared with each other: they do the same.
        is_own: TensorFile's.
        points: Depth or block size in bytes, and GB/s; in order.
    """

    label: str
    color: int
    is_own: bool
    points: list[tuple[int, float]]


def require_matplotlib() -> None:
    """Refuse before anything is measured.

    Raises:
        ConfigError: There is no matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'fastpersist[plots]', or leave --plot out")


def curves(results: Sequence[IoResult], setup: Setup, axis: Axis) -> list[Curve]:
    """Return the lines along one axis; rows without samples are not in them."""
    colors: dict[tuple[str, str, int], int] = {}
    found: dict[tuple[str, tuple[str, str, int]], Curve] = {}
    for result in results:
        if not result.measured.samples:
            continue
        planned, point = result.planned, result.planned.point
        if axis == "depth":
            x, other, other_text = point.depth, point.block_bytes, size_name(point.block_bytes)
        else:
            x, other, other_text = point.block_bytes, point.depth, f"depth {point.depth}"
        same = (point.direction, point.engine, other)
        color = colors.setdefault(same, len(colors))
        curve = found.get((planned.who, same))
        if curve is None:
            engine = result.measured.samples[0].engine
            label = f"{planned.who} {engine}: {point.words(setup)}, {other_text}"
            curve = found[planned.who, same] = Curve(label, color, planned.row.kind == "fastpersist", [])
        curve.points.append((x, result.measured.bytes_per_s / 1e9))
    for curve in found.values():
        curve.points.sort()
    return list(found.values())


def draw(path: str, results: Sequence[IoResult], setup: Setup, title: str) -> None:
    """Write the PNG.

    Raises:
        ConfigError: There is no matplotlib.
        StorageError: The file cannot be written.
    """
    require_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(13, 5.5), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels: tuple[tuple[Axis, str], ...] = (("depth", "requests in flight"), ("block_bytes", "block"))
    for axes, (axis, name) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        lines = curves(results, setup, axis)
        for curve in lines:
            axes.plot(
                [x for x, _ in curve.points],
                [rate for _, rate in curve.points],
                label=curve.label,
                color=f"C{curve.color % 10}",
                linestyle="-" if curve.is_own else "--",
                marker="o" if curve.is_own else "x",
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({x for curve in lines for x, _ in curve.points})
        axes.set_xticks(ticks, [size_name(x) if axis == "block_bytes" else str(x) for x in ticks])
        axes.set_xlabel(name)
        axes.set_ylabel("GB/s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend(fontsize="x-small")
    with storage_errors("writing", path), open(path, "wb") as file:
        figure.savefig(file, format="png", dpi=150)
