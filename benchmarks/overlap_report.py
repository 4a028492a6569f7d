"""What overlap.py says: the machine, one table per measurement, and how the figures of the targets came out."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate

import fastpersist as fp
from fastpersist.cli.bench.overlap.run import summarize_run

__all__ = [
    "machine_facts",
    "report_disk",
    "report_facts",
    "report_runs",
    "report_soak",
    "report_turns",
    "summarize_run",
]

_MIB = 1 << 20
NONE = "none"


def machine_facts(directory: str) -> dict[str, Any]:
    """Say what was measured on."""
    source, kind, options = _mount_of(os.path.realpath(directory))
    with open("/proc/cpuinfo") as lines:
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "core_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "directory": os.path.realpath(directory),
        "device": source,
        "file_system": kind,
        "mount_options": options,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastpersist": fp.__version__,
        "load_average": os.getloadavg()[0],
    }


def _mount_of(path: str) -> tuple[str, str, str]:
    """Return device, type and options of the file system that a path is on."""
    best = ("", "unknown", "unknown", "")
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            source, point, kind, options = line.split()[:4]
            point = point.encode().decode("unicode_escape")  # blanks are written \040
            # Of two at one place the later one hides the earlier.
            if os.path.commonpath([path, point]) == point and len(point) >= len(best[0]):
                best = (point, source, kind, options)
    return best[1:]


def report_facts(command_line: str, facts: dict[str, Any]) -> str:
    """Return the lines on top."""
    return "\n".join(
        [
            command_line,
            f"{facts['cpu']}, {facts['core_count']} cores, {facts['memory_bytes'] / (1 << 30):.0f} GiB, "
            f"Linux {facts['kernel']}, load {facts['load_average']:.1f}",
            f"{facts['directory']} on {facts['device']}, {facts['file_system']} ({facts['mount_options']})",
            f"torch {facts['torch']} on one thread, Python {facts['python']}, fastpersist {facts['fastpersist']}",
        ]
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles; of one value, that value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


# --- the disk alone ---


def report_disk(model: str, disk: dict[str, Any]) -> str:
    """Return a line on what the disk does with nothing beside it."""
    if "failed" in disk:
        return f"{model}: the bare loop cannot run: {disk['failed']}"
    seconds, size_bytes = statistics.median(disk["seconds"]), disk["state_bytes"]
    return (
        f"{model}: state of {size_bytes / 1e9:.3f} GB; the bare O_DIRECT loop alone writes it in {seconds:.3f} s "
        f"({size_bytes / seconds / 1e9:.2f} GB/s)"
    )


# --- whole runs ---


def report_runs(
    model: str, every: int, rounds: list[dict[str, dict[str, Any]]], notes: dict[str, str], disk: dict[str, Any]
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the table of whole runs, and the same by way.

    Args:
        model: What was trained.
        every: Steps from save to save.
        rounds: Of each round, the results by way.
        notes: Of ways without results, why.
        disk: Result of the bare loop alone.
    """
    names = list(dict.fromkeys(name for results in rounds for name in results))
    alone = [summarize_run(results[NONE], every) for results in rounds if NONE in results]
    alone_step_s = _median_of(alone, "step_s")
    alone_total_s = _median_of(alone, "total_s")
    alone_peak_bytes = _median_of([results[NONE] for results in rounds if NONE in results], "peak_bytes")
    write_alone_s = statistics.median(disk["seconds"]) if "seconds" in disk else None
    rows, table = [], {}
    for name in names:
        found = [results[name] for results in rounds if name in results]
        runs = [summarize_run(result, every) for result in found]
        step_s, total_s, save_count = _median_of(runs, "step_s"), _median_of(runs, "total_s"), runs[0]["save_count"]
        ratios = [
            summarize_run(results[name], every)["step_s"] / summarize_run(results[NONE], every)["step_s"]
            for results in rounds
            if name in results and NONE in results
        ]
        bound_s = max(alone_total_s or 0.0, save_count * (write_alone_s or 0.0)) if alone_total_s else None
        summary = {
            "settings": found[0]["settings"],
            "run_count": len(found),
            "step_s": step_s,
            "slowdown_of_medians": step_s / alone_step_s if alone_step_s else None,
            "slowdown_by_round": ratios,
            "stall_s": _median_of(runs, "stall_s"),
            "stall_max_s": max(run["stall_max_s"] for run in runs),
            "tail_s": _median_of(runs, "tail_s"),
            "total_s": total_s,
            "total_of_bound": total_s / bound_s if bound_s else None,
            "checkpoint_bytes": found[0]["checkpoint_bytes"],
            "peak_bytes": _median_of(found, "peak_bytes"),
            "child_peak_bytes": _median_of(found, "child_peak_bytes"),
            "own_words": _own_words([stats for result in found for stats in result["report"]]),
        }
        table[name] = summary
        rows.append(_run_cells(name, summary, alone_peak_bytes, is_alone=name == NONE))
    rows += [[name, "–"] for name in notes if name not in names]
    headers = ["way", "runs", "step s", "slowdown", "by round", "stall ms/save", "max", "tail s", "total s", "of bound"]
    headers += ["GB/save", "peak MiB above none", "writer's peak MiB"]
    lines = [
        f"Whole runs: {model}, a checkpoint every {every} step{'s' if every > 1 else ''}, "
        f"{len(rounds[0][names[0]]['steps']) if names else 0} steps each",
        "",
        tabulate(rows, headers=headers, disable_numparse=True, colalign=("left",) + ("right",) * (len(headers) - 1)),
        "",
        *(f"{name}: {summary['settings']}" for name, summary in table.items()),
        *(f"{name}: {note}" for name, note in notes.items()),
        *(f"{name} says, in medians: {said}" for name, row in table.items() if (said := row["own_words"])),
    ]
    lines += _differing_losses(rounds)
    if alone_step_s and write_alone_s:
        share = write_alone_s / (every * alone_step_s)
        lines.append(
            f"Writing alone takes {100 * share:.0f} % of the {every} step{'s' if every > 1 else ''} between two saves"
        )
    return "\n".join(lines), table


def _own_words(report: list[dict[str, Any]]) -> str:
    """Condense what a way says about its saves: medians of numbers; of words, those that occur."""
    said = []
    for name in report[0] if report else ():
        values = [stats[name] for stats in report if stats[name] is not None]
        if values and all(isinstance(value, (int, float)) for value in values):
            middle = statistics.median(values)
            is_time = name.endswith("_s")
            said.append(f"{name[:-2]} {_milliseconds(middle)} ms" if is_time else f"{name} {middle / 1e6:.1f} MB")
        elif values:
            said.append(f"{name} {' or '.join(sorted({str(value) for value in values}))}")
    return ", ".join(said)


def _median_of(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs) if runs else 0.0


def _run_cells(name: str, summary: dict[str, Any], alone_peak_bytes: float, *, is_alone: bool) -> list[str]:
    cells = [name, str(summary["run_count"]), f"{summary['step_s']:.4f}"]
    if is_alone:
        return [*cells, "", "", "", "", "", f"{summary['total_s']:.2f}"]
    ratio, ratios = summary["slowdown_of_medians"], summary["slowdown_by_round"]
    return [
        *cells,
        _percent(ratio) if ratio else "",
        f"{_percent(min(ratios))} – {_percent(max(ratios))}" if ratios else "",
        _milliseconds(summary["stall_s"]),
        _milliseconds(summary["stall_max_s"]),
        f"{summary['tail_s']:.2f}",
        f"{summary['total_s']:.2f}",
        f"{summary['total_of_bound']:.2f}" if summary["total_of_bound"] else "",
        f"{summary['checkpoint_bytes'] / 1e9:.3f}",
        f"{(summary['peak_bytes'] - alone_peak_bytes) / _MIB:.0f}" if alone_peak_bytes else "",
        f"{summary['child_peak_bytes'] / _MIB:.0f}" if summary["child_peak_bytes"] else "",
    ]


def _differing_losses(rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    """Name the ways whose training was not the same: then the times compare different work, or a way spoilt it."""
    losses = {name: result["loss"] for results in rounds for name, result in results.items()}
    expected = losses.get(NONE, next(iter(losses.values()), None))
    return [
        f"{name}: the last loss is {loss!r} instead of {expected!r}: this run did not train the same"
        for name, loss in losses.items()
        if loss != expected
    ]


# --- turns ---


def report_turns(model: str, result: dict[str, Any]) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the table of turns, and the same by kind."""
    samples = result["samples"]
    alone_s = [sample["step_s"] for sample in samples["alone"]]
    rows, table = [], {}
    for name, turns in samples.items():
        steps_s = [turn["step_s"] for turn in turns]
        low, median, high = _quartiles(steps_s)
        pairs = _quartiles([step_s / other_s for step_s, other_s in zip(steps_s, alone_s, strict=True)])
        stalls_s = [turn["save_s"] + turn["gate_s"] for turn in turns if "save_s" in turn]
        told = result["ways"].get(name, {}).get("report", [])
        # What the loop measured; of a save, what the way says itself, as it ends where nobody looks at the clock.
        writes_s = [turn["write_s"] for turn in [*turns, *told] if turn.get("write_s") is not None]
        summary: dict[str, Any] = {
            "step_s": median,
            "step_quartiles_s": [low, high],
            "slowdown_of_medians": median / statistics.median(alone_s),
            "slowdown_in_pairs": pairs[1],
            "slowdown_in_pairs_quartiles": [pairs[0], pairs[2]],
            "stall_s": statistics.median(stalls_s) if stalls_s else None,
            "save_s": statistics.median(turn["save_s"] for turn in turns) if stalls_s else None,
            "gate_s": statistics.median(turn["gate_s"] for turn in turns) if stalls_s else None,
            "write_s": statistics.median(writes_s) if writes_s else None,
            "after_s": statistics.median(turn.get("after_s", 0.0) for turn in turns),
            "own_words": _own_words(told),
            **result["ways"].get(name, {}),
        }
        table[name] = summary
        rows.append(_turn_cells(name, summary))
    headers = ["turn", "step s", "quartiles", "slowdown", "in pairs", "quartiles", "stall ms"]
    headers += ["save() ms", "gate ms", "writing s", "after the step ms"]
    lines = [
        f"Turns: {model}, {len(alone_s)} of each kind in one process, {result['state_bytes'] / 1e9:.3f} GB per save",
        "",
        tabulate(rows, headers=headers, disable_numparse=True, colalign=("left",) + ("right",) * (len(headers) - 1)),
        "",
        *(f"{name}: {known['settings']}" for name, known in result["ways"].items()),
        *(f"{name}: {note}" for name, note in result["notes"].items()),
        *(f"{name} says, in medians: {said}" for name, row in table.items() if (said := row["own_words"])),
        *_compared_with_bare_loop(samples),
        "alone, again: what differs there is what this measurement cannot tell from nothing",
        "after the step: how long all was durable later than that; what is written then, no step was measured beside",
        f"peak of resident memory: {result['peak_bytes'] / _MIB:.0f} MiB",
    ]
    return "\n".join(lines), table


def _compared_with_bare_loop(samples: dict[str, list[dict[str, float]]]) -> list[str]:
    """Say what each way costs beyond the disk's own interference, round by round, in points of a step alone."""
    said = []
    for loop in (name for name in samples if name.startswith("bare loop")):
        for way in (name for name in samples if name.startswith("save, ")):
            points = [
                100 * (turn["step_s"] - beside["step_s"]) / alone["step_s"]
                for turn, beside, alone in zip(samples[way], samples[loop], samples["alone"], strict=True)
            ]
            low, middle, high = _quartiles(points)
            said.append(f"{way}, against {loop}: {middle:+.1f} points ({low:+.1f} – {high:+.1f})")
    return said


def _turn_cells(name: str, summary: dict[str, Any]) -> list[str]:
    low, high = summary["step_quartiles_s"]
    pair_low, pair_high = summary["slowdown_in_pairs_quartiles"]
    cells = [name, f"{summary['step_s']:.4f}", f"{low:.4f} – {high:.4f}"]
    if name == "alone":
        return cells
    cells += [_percent(summary["slowdown_of_medians"]), _percent(summary["slowdown_in_pairs"])]
    cells.append(f"{_percent(pair_low)} – {_percent(pair_high)}")
    cells += ["" if summary[key] is None else _milliseconds(summary[key]) for key in ("stall_s", "save_s", "gate_s")]
    if name.startswith("alone"):
        return cells
    return [*cells, f"{summary['write_s']:.3f}" if summary["write_s"] else "", _milliseconds(summary["after_s"])]


# --- many saves in a row ---


def report_soak(result: dict[str, Any], *, growth_bytes_max: int) -> tuple[str, list[str]]:
    """Return the table of many saves in a row, and what grew that must not."""
    (early_count, early), (last_count, last) = result["footprints"].items()
    after = result["after_finish"]
    rows = [
        [
            what,
            f"{footprint['resident_bytes'] / _MIB:.1f}",
            footprint["thread_count"],
            footprint["descriptor_count"],
        ]
        for what, footprint in ((early_count, early), (last_count, last), ("close()", after))
    ]
    grown = [
        f"{what} grew from {early[key]} to {last[key]} between save {early_count} and save {last_count}"
        for key, what in (("thread_count", "threads"), ("descriptor_count", "descriptors"))
        if last[key] > early[key]
    ]
    if last["resident_bytes"] - early["resident_bytes"] > growth_bytes_max:
        grown.append(
            f"resident memory grew by {(last['resident_bytes'] - early['resident_bytes']) / _MIB:.1f} MiB between save "
            f"{early_count} and save {last_count}; {growth_bytes_max / _MIB:.0f} MiB are allowed"
        )
    table = tabulate(rows, headers=["after save", "resident MiB", "threads", "descriptors"], disable_numparse=True)
    lines = [
        f"{last_count} saves in a row, one after each step, of {result['checkpoint_bytes'] / 1e6:.1f} MB",
        "",
        table,
        "",
        f"stall per save, median: {_milliseconds(result['median_stall_s'])} ms",
        *(grown or ["nothing grew"]),
    ]
    return "\n".join(lines), grown
