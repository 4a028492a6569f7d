"""The output of `bench io`: a table for people, JSON for programs. `bench.report` has the facts on the machine.

Rates and processor times of I/O are those of `bench rows`, too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from fastpersist.cli.argument_types import size_name
from fastpersist.cli.bench.io.points import IoSample, Setup
from fastpersist.cli.bench.io.rows import IoResult
from fastpersist.cli.bench.report import facts_text, notes_text, percent, report_head, samples_json, table
from fastpersist.cli.bench.rows import Measured

__all__ = ["cpu_us_per_io", "io_per_s", "io_report_json", "io_report_text", "io_samples"]


def io_report_json(
    command_line: str, facts: dict[str, Any], notes: list[str], setup: Setup, results: Sequence[IoResult]
) -> dict[str, Any]:
    """Return everything as plain values."""
    return report_head("io", command_line, facts, notes) | {
        "setup": dataclasses.asdict(setup),
        "rows": [_row_json(result, setup) for result in results],
    }


def _row_json(result: IoResult, setup: Setup) -> dict[str, Any]:
    planned, measured = result.planned, result.measured
    row: dict[str, Any] = {
        "name": planned.row.name,
        "who": planned.who,
        "kind": planned.row.kind,
        "what": planned.point.words(setup),
        "direction": planned.point.direction,
        "in_place": setup.in_place and planned.point.direction == "write",
        "block_bytes": planned.point.block_bytes,
        "depth": planned.point.depth,
        "note": measured.note,
    }
    if not measured.samples:
        return row
    return row | {
        **samples_json(measured),
        "io_per_s": io_per_s(measured),
        "cpu_us_per_io": _median(cpu_us_per_io(measured)),
        "ratio_to_fio": result.ratio,
    }


def io_samples(measured: Measured) -> list[IoSample]:
    """Return the samples that count I/O."""
    return [sample for sample in measured.samples if isinstance(sample, IoSample)]


def io_per_s(measured: Measured) -> float:
    """Return I/Os per second of the median; there must be a sample that counts I/O."""
    return io_samples(measured)[0].io_count / measured.median_s


def cpu_us_per_io(measured: Measured) -> list[float]:
    """Return the processor time of an I/O in each sample that knows it, in microseconds."""
    return [
        sample.cpu_s / sample.io_count * 1e6
        for sample in io_samples(measured)
        if sample.cpu_s is not None and sample.io_count
    ]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def io_report_text(
    command_line: str, facts: dict[str, Any], notes: list[str], setup: Setup, results: Sequence[IoResult]
) -> str:
    """Return facts, the table, and how it was measured."""
    headers = ["what", "block", "depth", "by", "median s", "min – max s", "GB/s", "of fio"]
    headers += ["IOPS", "CPU µs per I/O"] if setup.random else []
    cells = [_cells(result, setup) for result in results]
    lines = [facts_text(command_line, facts), "", table(headers, cells, align="lrrl"), *_remarks(results), ""]
    return "\n".join([*lines, notes_text(notes)])


def _cells(result: IoResult, setup: Setup) -> list[str]:
    point, measured = result.planned.point, result.measured
    cells = [point.words(setup), size_name(point.block_bytes), str(point.depth)]
    if not measured.samples:
        return [*cells, result.planned.who, "–"]
    cells += [
        f"{result.planned.who}, {measured.samples[0].engine}",
        *measured.time_cells(),
        percent(result.ratio),
    ]
    if setup.random:
        cpu_us = _median(cpu_us_per_io(measured))
        cells += [f"{io_per_s(measured):,.0f}", "" if cpu_us is None else f"{cpu_us:.1f}"]
    return cells


def _remarks(results: Sequence[IoResult]) -> list[str]:
    """Return why rows have no samples, or fewer; a reason of many rows appears once."""
    rows_by_note: dict[str, list[str]] = {}
    for result in results:
        if result.measured.note:
            rows_by_note.setdefault(result.measured.note, []).append(result.planned.row.name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {note}"
        for note, names in rows_by_note.items()
    ]
