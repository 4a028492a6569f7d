"""The output of `bench overlap`: the runs or turns of each way condensed to a row, the table, and a soak's result."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fastpersist.cli.bench.overlap.run import summarize_run
from fastpersist.cli.bench.overlap.worker import WARM_UP_COUNT
from fastpersist.cli.bench.report import facts_text, mebibytes, notes_text, table
from fastpersist.display import rate_text

__all__ = ["NONE", "condense", "overlap_remarks", "overlap_text", "report_soak"]

NONE = "no checkpoints"
_MIB = 1 << 20
_WRITER_BYTES_MIN = 64 * _MIB  # Python with torch takes more; less is a program that torch has asked about the machine


def condense(
    names: Sequence[str],
    rounds: Sequence[Mapping[str, dict[str, Any]]],
    notes: Mapping[str, str],
    *,
    every: int,
    write_s: float,
) -> list[dict[str, Any]]:
    """Condense the runs of each way, as plain values. Slowdowns are against the run without checkpoints of the round.

    Args:
        names: The names of the ways, in the order of the table.
        rounds: For each round, the results by way.
        notes: Why a way has no results, or fewer.
        every: The number of steps from one save to the next.
        write_s: The seconds that a write takes with nothing beside it.

    Returns:
        A row for each way; values that have no meaning, or nothing to be compared with, are None.
    """
    alone = [results[NONE] for results in rounds if NONE in results]
    rows = []
    for name in names:
        found = [results[name] for results in rounds if name in results]
        row: dict[str, Any] = {"name": name, "note": notes.get(name, "")}
        rows.append(row)
        if not found:
            continue
        runs = [summarize_run(result, every) for result in found]
        steps_s = [step["step_s"] for result in found for step in result["steps"]]
        row |= {
            "settings": found[0]["settings"],
            "runs": [{key: value for key, value in result.items() if key != "settings"} for result in found],
            "step_s": statistics.median(run["step_s"] for run in runs),
            "step_min_s": min(steps_s),
            "step_max_s": max(steps_s),
        }
        if name == NONE:
            continue
        slowdowns = [
            summarize_run(results[name], every)["step_s"] / summarize_run(results[NONE], every)["step_s"]
            for results in rounds
            if name in results and NONE in results
        ]
        row |= {
            "slowdowns": slowdowns,
            "slowdown": statistics.median(slowdowns) if slowdowns else None,
            "stall_s": statistics.median(run["stall_s"] for run in runs),
            "stall_max_s": max(run["stall_max_s"] for run in runs),
            "save_count": sum(len(result["steps"]) // every for result in found),
            "late_count": sum(result["late_count"] for result in found),
            "tail_s": statistics.median(run["tail_s"] for run in runs),
            "total_of_bound": _total_of_bound(runs, [summarize_run(result, every) for result in alone], write_s),
            "checkpoint_bytes": found[0]["checkpoint_bytes"],
            "peak_bytes": _peak_above(found, alone, "peak_bytes"),
            "child_peak_bytes": _peak_above(found, [], "child_peak_bytes"),
        }
    return rows


def _total_of_bound(
    runs: Sequence[dict[str, float]], alone: Sequence[dict[str, float]], write_s: float
) -> float | None:
    """Return run time until durable, divided by the larger of training alone and writing alone."""
    if not alone:
        return None
    bound_s = max(statistics.median(run["total_s"] for run in alone), runs[0]["save_count"] * write_s)
    return statistics.median(run["total_s"] for run in runs) / bound_s


def _peak_above(found: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the median peak of some runs, above that of those without checkpoints; None if it is not known."""
    peaks, others = ([float(result[name]) for result in some if result.get(name)] for some in (found, alone))
    if not peaks or (alone and not others):
        return None
    return statistics.median(peaks) - (statistics.median(others) if others else 0)


def overlap_remarks(arguments: argparse.Namespace, lengths: dict[str, Any]) -> list[str]:
    """Say how it was measured."""
    remarks = [
        "step: from its start until the device has made it, and the call that saves; median of the runs' medians, and "
        "the shortest and longest of all. slowdown: median of the rounds, each against its own run without checkpoints",
        "stall: inside the call that saves, and waiting before the optimizer's step; median, and the longest of all",
        "kept up: how many saves found the one before written; a late one made the next one wait. torch.save is done "
        "when its call returns",
        "durable after: from the end of the last step until all is durable. of bound: run time until durable, divided "
        "by the larger of training alone and writing alone",
    ]
    if arguments.turns:
        remarks += [
            f"turns: one process, {arguments.turns} rounds, each a step of every way in another order; a save comes "
            "before its step, and is durable before the next turn begins",
        ]
    else:
        remarks += [
            "peak: the highest VmHWM of the process, above that of the training without checkpoints; and of a process "
            "that writes, what it shares with the other included",
            f"the first {WARM_UP_COUNT * arguments.every} steps of a run, in which memory is made, do not count; the "
            "ways took turns, each round in another order; the optimizer's time is part of every step",
        ]
    if arguments.every > 1:
        remarks.append(f"a checkpoint every {arguments.every} steps: medians are of windows from save to save")
    if lengths["device"]:
        remarks.append(
            f"trained on {lengths['device']}: where the optimizer's step waits on the GPU's stream, and its thread "
            "does not, that is in the step and not in the stall"
        )
    else:
        threads = f"{arguments.threads} thread{'s' if arguments.threads > 1 else ''}"
        remarks.append(f"computed on {threads} of the CPU (--threads); what other CPUs there are is left to saving")
    return remarks


def overlap_text(
    command_line: str,
    facts: dict[str, Any],
    lengths: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    remarks: Sequence[str],
) -> str:
    """Return facts, the table, and how it was measured."""
    headers = ["checkpoints by", "step s", "min – max s", "slowdown", "by round", "stall ms", "longest", "kept up"]
    headers += ["durable after s", "of bound", "peak MiB above none", "of its writer"]
    write_s, state_bytes = lengths["write_s"], lengths["state_bytes"]
    lines = [
        facts_text(command_line, facts),
        "",
        f"a state of {state_bytes / 1e9:.3f} GB; writing it with nothing beside takes fp.Checkpointer {write_s:.3f} s "
        f"({rate_text(state_bytes / write_s)}, {lengths['engine']})",
        f"steps that were to take {lengths['wanted_step_s']:.3f} s: {lengths['product_count']} products beside a "
        f"training of {lengths['step_s']:.3f} s",
        "",
        table(headers, [_cells(row) for row in rows]),
        "",
        *(f"{row['name']}: {row['settings']}" for row in rows if "settings" in row),
        *(f"{row['name']}: {row['note']}" for row in rows if row["note"]),
        *_differing_losses(rows),
        "",
        notes_text(remarks),
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    if "step_s" not in row:
        return [row["name"], "–"]
    cells = [row["name"], f"{row['step_s']:.4f}", f"{row['step_min_s']:.4f} – {row['step_max_s']:.4f}"]
    if row["name"] == NONE:
        return cells
    slowdowns = row["slowdowns"]
    kept_up = row["save_count"] - row["late_count"]
    return [
        *cells,
        _percent(row["slowdown"]) if slowdowns else "",
        f"{_percent(min(slowdowns))} – {_percent(max(slowdowns))}" if slowdowns else "",
        f"{1e3 * row['stall_s']:.1f}",
        f"{1e3 * row['stall_max_s']:.1f}",
        "yes" if not row["late_count"] else f"{kept_up} of {row['save_count']}",
        f"{row['tail_s']:.2f}",
        "" if row["total_of_bound"] is None else f"{row['total_of_bound']:.2f}",
        mebibytes(row["peak_bytes"]),
        "" if (row["child_peak_bytes"] or 0) < _WRITER_BYTES_MIN else mebibytes(row["child_peak_bytes"]),
    ]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _differing_losses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Name the ways whose training was not the same: then the times compare different work, or a way spoilt it."""
    losses = {row["name"]: run["loss"] for row in rows for run in row.get("runs", ()) if "loss" in run}
    expected = losses.get(NONE)
    return [
        f"{name}: the last loss is {loss!r} instead of {expected!r}: this run did not train the same"
        for name, loss in losses.items()
        if expected is not None and loss != expected
    ]


def report_soak(result: dict[str, Any], *, growth_bytes_max: int) -> tuple[str, list[str]]:
    """Return the table of many saves in a row, and what grew that must not.

    Args:
        result: The result of the process: its memory use early, after the last save, and after all was closed.
        growth_bytes_max: How much resident memory may grow.
    """
    (early_name, early), (last_name, last), _ = result["footprints"].items()
    grown = [
        f"{what} grew from {early[key]} to {last[key]} between {early_name} and {last_name}"
        for key, what in (("thread_count", "threads"), ("descriptor_count", "descriptors"))
        if last[key] > early[key]
    ]
    growth_bytes = last["resident_bytes"] - early["resident_bytes"]
    if growth_bytes > growth_bytes_max:
        grown.append(
            f"resident memory grew by {growth_bytes / _MIB:.1f} MiB between {early_name} and {last_name}; "
            f"{growth_bytes_max / _MIB:.0f} MiB are allowed"
        )
    rows = [
        [name, f"{one['resident_bytes'] / _MIB:.1f}", str(one["thread_count"]), str(one["descriptor_count"])]
        for name, one in result["footprints"].items()
    ]
    lines = [
        f"saves in a row, one after each step, of {result['checkpoint_bytes'] / 1e6:.1f} MB; the stall's median is "
        f"{1e3 * result['stall_s']:.1f} ms",
        "",
        table(["after", "resident MiB", "threads", "descriptors"], rows),
        "",
        *(grown or ["nothing grew"]),
    ]
    return "\n".join(lines), grown
