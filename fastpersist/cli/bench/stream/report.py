"""The output of `bench stream`: the limit of a token pass, each way against it, the table, and the same as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastpersist.cli.bench.report import facts_text, notes_text, report_head, samples_json, table
from fastpersist.cli.bench.rows import Measured
from fastpersist.cli.bench.stream.rows import Case, PassSample
from fastpersist.cli.bench.stream.ways import RESIDENT
from fastpersist.display import rate_text

__all__ = ["Limits", "stream_json", "stream_text"]

_MIB = 1 << 20
_TIMES = ("", "token pass s", "min – max", "of limit", "× best peer", "first token s", "of one read")
_OTHERS = ("", "prefill s", "of resident", "peak MiB", "device MiB", "cgroup MiB", "written MB")


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a token pass.

    Attributes:
        bytes_per_s: The rate of the disk: the best of the rows that only read; None if none of them could be run.
        resident_pass_s: The seconds of a token pass of the model in memory; None if that was not measured.
        resident_prefill_s: The seconds of its pass over the prompts; None likewise.
    """

    bytes_per_s: float | None
    resident_pass_s: float | None
    resident_prefill_s: float | None

    @staticmethod
    def of(results: Sequence[Measured]) -> Limits:
        """Find them in the rows."""
        ceilings = [one for one in results if one.row.kind == "ceiling" and one.samples]
        resident = next((one for one in ceilings if one.row.name == RESIDENT), None)
        return Limits(
            max((one.bytes_per_s for one in ceilings if one is not resident), default=None),
            None if resident is None else resident.median_s,
            None if resident is None else _median(resident, "prefill_s"),
        )

    def pass_s(self, size_bytes: int) -> float | None:
        """Return what a token pass that reads so much takes at least."""
        read_s = None if self.bytes_per_s is None else size_bytes / self.bytes_per_s
        return max((one for one in (read_s, self.resident_pass_s) if one is not None), default=None)


def _median(measured: Measured, name: str) -> float:
    return statistics.median(
        float(sample.answer[name]) for sample in measured.samples if isinstance(sample, PassSample)
    )


def _most(samples: Sequence[PassSample], name: str) -> int | None:
    return max((value for one in samples if (value := one.answer[name]) is not None), default=None)


def _row(measured: Measured, limits: Limits, pass_bytes: int, best_peer_s: float | None) -> dict[str, Any]:
    """Return a row as plain values; None where there is nothing to compare with."""
    row: dict[str, Any] = {"name": measured.row.name, "kind": measured.row.kind, "note": measured.note}
    if not measured.samples:
        return row
    row |= samples_json(measured)
    samples = [sample for sample in measured.samples if isinstance(sample, PassSample)]
    if not samples:
        return row
    limit_s = limits.pass_s(samples[-1].size_bytes)
    first_s, prefill_s = _median(measured, "first_token_s"), _median(measured, "prefill_s")
    return row | {
        "limit_s": limit_s,
        "of_limit": None if limit_s is None else limit_s / measured.median_s,
        "of_best_peer": None if best_peer_s is None else best_peer_s / measured.median_s,
        "first_token_s": first_s,
        "of_one_read": None if limits.bytes_per_s is None else first_s / (pass_bytes / limits.bytes_per_s),
        "prefill_s": prefill_s,
        "of_resident": None if limits.resident_prefill_s is None else limits.resident_prefill_s / prefill_s,
        "peak_bytes": _most(samples, "peak_bytes"),
        "device_peak_bytes": _most(samples, "device_peak_bytes"),
        "group_peak_bytes": samples[-1].group_peak_bytes,
        "written_bytes": max(sample.answer["written_bytes"] for sample in samples),
        "runs": [{name: value for name, value in one.answer.items() if name != "tokens"} for one in samples],
    }


def _rows(results: Sequence[Measured], pass_bytes: int) -> list[dict[str, Any]]:
    best_peer_s = min((one.median_s for one in results if one.row.kind == "peer" and one.samples), default=None)
    limits = Limits.of(results)
    return [_row(one, limits, pass_bytes, best_peer_s) for one in results]


def stream_json(
    command_line: str,
    facts: dict[str, Any],
    notes: list[str],
    case: Case,
    sizes: dict[str, int],
    results: Sequence[Measured],
) -> dict[str, Any]:
    """Return everything as plain values."""
    return report_head("stream", command_line, facts, notes) | {
        "case": dataclasses.asdict(case),
        "model": sizes,
        "limits": dataclasses.asdict(Limits.of(results)),
        "rows": _rows(results, sizes["pass_bytes"]),
    }


def stream_text(
    command_line: str,
    facts: dict[str, Any],
    notes: list[str],
    case: Case,
    sizes: dict[str, int],
    results: Sequence[Measured],
) -> str:
    """Return facts, the limits, the table, and how it was measured."""
    rows = _rows(results, sizes["pass_bytes"])
    limits = Limits.of(results)
    ways = [row for row in rows if row["kind"] != "ceiling" or row["name"] == RESIDENT]
    lines = [
        facts_text(command_line, facts),
        "",
        f"Llama, {sizes['weight_bytes'] / 1e9:.2f} GB of weights, {sizes['pass_bytes'] / 1e9:.2f} GB of them in a "
        f"pass; {case.batch_size} × {case.prompt_len} tokens of prompts, {case.gen_len} generated "
        f"on {case.device}",
        *(
            f"{row['name']}: {rate_text(row['bytes_per_s'])} ({row['min_s']:.3f} – {row['max_s']:.3f} s)"
            for row in rows
            if row not in ways and "median_s" in row
        ),
        "no limit could be measured" if limits.pass_s(0) is None else _limit_text(limits, sizes),
        "",
        table(_TIMES, [_time_cells(row) for row in ways]),
        "",
        table(_OTHERS, [_other_cells(row) for row in ways]),
    ]
    lines += [f"{row['name']}: {row['note']}" for row in rows if row["note"]]
    return "\n".join([*lines, "", notes_text(notes)])


def _limit_text(limits: Limits, sizes: dict[str, int]) -> str:
    parts = []
    if limits.bytes_per_s is not None:
        parts.append(f"reading a pass {sizes['pass_bytes'] / limits.bytes_per_s:.3f} s")
    if limits.resident_pass_s is not None:
        parts.append(f"computing it {limits.resident_pass_s:.3f} s")
    return f"limit of a token pass without residents: {', '.join(parts)}"


def _time_cells(row: dict[str, Any]) -> list[str]:
    if "median_s" not in row:
        return [row["name"], "–"]
    return [
        row["name"],
        f"{row['median_s']:.3f}",
        f"{row['min_s']:.3f} – {row['max_s']:.3f}",
        _text(row["of_limit"], ".0%"),
        _text(row["of_best_peer"], ".2f"),
        f"{row['first_token_s']:.3f}",
        _text(row["of_one_read"], ".2f"),
    ]


def _other_cells(row: dict[str, Any]) -> list[str]:
    if "median_s" not in row:
        return [row["name"], "–"]
    return [
        row["name"],
        f"{row['prefill_s']:.3f}",
        _text(row["of_resident"], ".0%"),
        _text(row["peak_bytes"], ".0f", _MIB),
        _text(row["device_peak_bytes"], ".0f", _MIB),
        _text(row["group_peak_bytes"], ".0f", _MIB),
        _text(row["written_bytes"], ".1f", 1e6),
    ]


def _text(value: float | None, form: str, unit: float = 1) -> str:
    return "" if value is None else format(value / unit, form)
