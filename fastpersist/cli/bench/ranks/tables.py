"""The tables of `bench ranks`: rows that several ranks have run, for people and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastpersist.cli.bench.report import facts_text, mebibytes, notes_text, percent, samples_json, table
from fastpersist.cli.bench.rows import Measured, Sample

__all__ = ["AsyncSample", "Result", "Table", "ranks_text", "row_json"]


@dataclass(frozen=True, slots=True)
class AsyncSample(Sample):
    """A save in the background.

    Attributes:
        stall_s: Time that the rank which lost most of it lost to the save.
    """

    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """One row of a table.

    Attributes:
        measured: The samples of the row; they count the bytes of the state once.
        rank_count: The number of ranks that took part.
        fio: The yardstick of this row; None if there is none.
        other: The row that it is compared with: of one rank without a group, or of fastpersist; None for no such row.
    """

    measured: Measured
    rank_count: int
    fio: Measured | None = None
    other: Measured | None = None

    def of(self, other: Measured | None) -> float | None:
        """Return by how much the rate is that of another row, None where one of them has none."""
        if other is None or not self.measured.samples or not other.samples:
            return None
        return self.measured.bytes_per_s / other.bytes_per_s

    def stalls_s(self) -> list[float]:
        """Return what each save in the background cost."""
        return [sample.stall_s for sample in self.measured.samples if isinstance(sample, AsyncSample)]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that are compared.

    Attributes:
        name: Its key in the JSON: "save", "load", "agreement" or "async".
        title: The header of the first column.
        results: The rows, in order.
        other: What Result.other is, as header of the column of ratios; if empty, that column has the rate of all ranks.
    """

    name: str
    title: str
    results: list[Result]
    other: str = ""


def row_json(result: Result, table_name: str) -> dict[str, Any]:
    """Return a row as plain values."""
    measured = result.measured
    row = {"name": measured.row.name, "kind": measured.row.kind, "rank_count": result.rank_count, "note": measured.note}
    if not measured.samples:
        return row
    row |= samples_json(measured) | {
        # A file that several write is written once; what each of them loads is loaded by each.
        "all_ranks_bytes_per_s": result.rank_count * measured.bytes_per_s if table_name == "load" else None,
        "ratio_to_fio": result.of(result.fio),
        "ratio_to_one_rank": result.of(result.other),
        "peak_bytes": measured.peak_bytes,
    }
    return row | ({"stall_s": result.stalls_s()} if result.stalls_s() else {})


def ranks_text(
    command_line: str, facts: dict[str, Any], notes: Sequence[str], tables: Sequence[Table], state: str
) -> str:
    """Return facts, all tables, and how it was measured."""
    lines = [facts_text(command_line, facts), "", state]
    for one in tables:
        lines += ["", _stall_table(one) if one.name in ("agreement", "async") else _rate_table(one)]
        lines += [f"{row.measured.row.name}: {row.measured.note}" for row in one.results if row.measured.note]
    return "\n".join([*lines, "", notes_text(notes)])


def _rate_table(one: Table) -> str:
    headers = [one.title, "engine", "median s", "min – max s", "GB/s", "of fio", one.other or "all ranks, GB/s"]
    has_peaks = any(result.measured.peak_bytes is not None for result in one.results)
    rows = []
    for result in one.results:
        measured = result.measured
        if not measured.samples:
            rows.append([measured.row.name, "", "–"])
            continue
        every = f"{result.rank_count * measured.bytes_per_s / 1e9:.2f}"
        rows.append(
            [
                measured.row.name,
                measured.samples[0].engine,
                *measured.time_cells(),
                percent(result.of(result.fio)),
                percent(result.of(result.other)) if one.other else every,
                mebibytes(measured.peak_bytes),
            ]
        )
    headers += ["peak MiB above the state"] if has_peaks else []
    return table(headers, [row[: len(headers)] for row in rows], align="ll")


def _stall_table(one: Table) -> str:
    """Return the table of saves in the background: what they cost the caller, and when they are durable."""
    headers = [one.title, "stall ms", "min – max ms", "durable after ms", "min – max ms", "peak MiB above the state"]
    rows = []
    for result in one.results:
        seconds, stalls_s = [sample.seconds for sample in result.measured.samples], result.stalls_s()
        if not seconds:
            rows.append([result.measured.row.name, "–"])
            continue
        rows.append([result.measured.row.name])
        for found in (stalls_s, seconds):
            rows[-1] += [f"{1e3 * statistics.median(found):.1f}", f"{1e3 * min(found):.1f} – {1e3 * max(found):.1f}"]
        rows[-1].append(mebibytes(result.measured.peak_bytes))
    return table(headers, rows)
