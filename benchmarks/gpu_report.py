"""What gpu.py and gpu.sh have found, as tables, and how the targets came out. Needs nothing but Python itself.

    python benchmarks/gpu_report.py WORK NAME DIRECTORY…

gathers, for gpu.sh, what its stages left in WORK (stages.tsv, tests/*.xml, bench.json, logs/) and writes NAME.json and
NAME.md to each directory, and prints the latter. Whatever is missing is said to be.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

__all__ = ["bars", "first_value", "markdown", "mount_of"]

_MIB = 1 << 20
_GB = 1e9
_MEMORY_TOLERANCE_BYTES = 32 * _MIB  # what Python, the pickle and stacks of threads take beside ring and arena
_TEST_LINE = re.compile(r"(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)(?: (\(.*?\)))?(?:\s|$)")
_ALL_PASSED = re.compile(r"^=+ \d+ passed(?:, \d+ \w+)* in .*=+$", re.MULTILINE)
_INTERRUPTED = re.compile(r"^!+ .*Interrupt", re.MULTILINE)
_STARTED_LINE = re.compile(r"\S+\.py::\S")
PASS, FAIL, NOT_MEASURED = "PASS", "FAIL", "not measured"


def first_value(path: str, name: str) -> str:
    """Return the value of the first "name: value" line of a file, or nothing."""
    with contextlib.suppress(OSError), open(path) as lines:
        for line in lines:
            if line.split(":")[0].strip() == name:
                return line.split(":", 1)[1].strip()
    return ""


def mount_of(path: str) -> str:
    """Return device, type and options of the file system that a path is on."""
    best = ("", "unknown")
    with contextlib.suppress(OSError), open("/proc/self/mounts") as mounts:
        for line in mounts:
            source, point, kind, options = line.split()[:4]
            point = point.encode().decode("unicode_escape")  # blanks are written \040
            # Of two at one place the later one hides the earlier.
            if os.path.commonpath([path, point]) == point and len(point) >= len(best[0]):
                best = (point, f"{source}, {kind} ({options})")
    return best[1]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in markdown."""
    whole = [list(headers), *[[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in whole) for column in range(len(headers))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in whole
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ the targets


def _rows(results: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = results["parts"].get(part, {}).get("rows", {})
    return rows


def _rate(row: dict[str, Any] | None) -> float | None:
    """Return bytes per second of the median."""
    if not row or not row["seconds"]:
        return None
    return float(row["size_bytes"] / statistics.median(row["seconds"]))


def _best_rate(rows: dict[str, dict[str, Any]], beginning: str) -> float | None:
    rates = [rate for name, row in rows.items() if name.startswith(beginning) and (rate := _rate(row))]
    return max(rates, default=None)


def bars(results: dict[str, Any]) -> list[dict[str, str]]:
    """Judge the targets; on a CPU, or where figures are missing, none is met or missed.

    Returns:
        Of each: "bar" what was to be reached, "found" what was found, "verdict".
    """
    is_cuda = str(results["facts"].get("device", "")).startswith("cuda")
    judged: list[dict[str, str]] = []

    def judge(bar: str, found: str, is_met: bool | None) -> None:
        verdict = NOT_MEASURED if is_met is None or not is_cuda else PASS if is_met else FAIL
        judged.append({"bar": bar, "found": found, "verdict": verdict})

    _judge_disk(results, judge)
    _judge_tmpfs(results, judge)
    _judge_overlap(results, judge)
    _judge_memory(results, judge)
    checked = {
        f"{part}: {name}": row["integrity"]
        for part in ("save", "tmpfs", "load", "gpudirect")
        for name, row in _rows(results, part).items()
        if row["integrity"] not in ("moves no state", "not checked")
    }
    for name, way in _overlap(results).get("ways", {}).items():
        if way["integrity"] not in ("moves no state", "not checked"):
            checked[f"overlap: {name}"] = way["integrity"]
    wrong = [name for name, integrity in checked.items() if integrity != "equal"]
    judge(
        "every way's file is equal to the state, bit by bit",
        f"{len(checked) - len(wrong)} of {len(checked)} are" + (f"; not {', '.join(wrong)}" if wrong else ""),
        not wrong if checked else None,
    )
    return judged


def _judge_disk(results: dict[str, Any], judge: Any) -> None:
    for part, ours, disk, copy, said in (
        ("save", "fp.save", "disk write", "pinned D2H", "HBM → durable file"),
        ("load", "fp.load(map_location)", "disk read", "pinned H2D", "file → HBM"),
    ):
        rows = _rows(results, part)
        own, limits = _rate(rows.get(ours)), [_best_rate(rows, disk), _best_rate(rows, copy)]
        found, is_met = "", None
        if own and all(limits):
            limit = min(rate for rate in limits if rate)
            found = f"{own / _GB:.2f} GB/s, {100 * own / limit:.0f} % of {limit / _GB:.2f} GB/s"
            is_met = own >= 0.9 * limit
        judge(f"{said} ≥ 90 % of min({disk}, {copy} rate)", found, is_met)


def _judge_tmpfs(results: dict[str, Any], judge: Any) -> None:
    rows = _rows(results, "tmpfs")
    own, stock = _rate(rows.get("fp.save")), _rate(rows.get("torch.save"))
    best = _rate(rows.get("torch.save, CRC off, pinned"))
    cores = results["facts"].get("core_count")
    judge(
        "HBM → tmpfs ≥ 8 GB/s on 16 cores",
        f"{own / _GB:.2f} GB/s on {cores}" if own else rows.get("fp.save", {}).get("note", ""),
        own >= 8 * _GB if own and cores else None,
    )
    found = f"{own / stock:.1f} times" if own and stock else ""
    if own and best:
        found += f"; {own / best:.1f} times it with CRC off, pinned"
    judge("HBM → tmpfs ≥ 10 × torch.save", found, own >= 10 * stock if own and stock else None)


def _overlap(results: dict[str, Any]) -> dict[str, Any]:
    overlap: dict[str, Any] = results["parts"].get("overlap", {}).get("values", {}).get("overlap", {})
    return overlap


def _summaries(overlap: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Condense the blocks of steps of each way that has any."""
    found = {}
    for name, way in overlap.get("ways", {}).items():
        blocks = way["steps"]
        if blocks:
            steps = [step for block in blocks for step in block]
            stalls_s = [step["save_s"] + step["gate_s"] for step in steps]
            found[name] = {
                "step_s": statistics.median(statistics.mean(step["step_s"] for step in block) for block in blocks),
                "step_min_s": min(step["step_s"] for step in steps),
                "step_max_s": max(step["step_s"] for step in steps),
                "save_s": statistics.median(step["save_s"] for step in steps),
                "gate_s": statistics.median(step["gate_s"] for step in steps),
                "stall_s": statistics.median(stalls_s),
                "stall_max_s": max(stalls_s),
            }
    return found


def _judge_overlap(results: dict[str, Any], judge: Any) -> None:
    overlap = _overlap(results)
    summaries = _summaries(overlap)
    own, none = summaries.get("fp.Checkpointer"), summaries.get("no saves")
    state = f"{overlap.get('parameter_count', 0) / 1e9:.2f} billion parameters"
    if own and none:
        slowdown = own["step_s"] / none["step_s"] - 1
        judge("overlap: slowdown ≤ 3 %, a save every step", f"{100 * slowdown:+.1f} %, {state}", slowdown <= 0.03)
    else:
        judge("overlap: slowdown ≤ 3 %, a save every step", "", None)
    found = (
        f"median {1e3 * own['stall_s']:.1f} ms (save {1e3 * own['save_s']:.1f}, gate {1e3 * own['gate_s']:.1f}), "
        f"at most {1e3 * own['stall_max_s']:.1f} ms"
        if own
        else ""
    )
    judge("overlap: host stall ≤ 5 ms", found, own["stall_s"] <= 0.005 if own else None)


def _judge_memory(results: dict[str, Any], judge: Any) -> None:
    memory = results["parts"].get("memory", {}).get("values", {}).get("memory", {})
    for name, what in (("fp.save, the first", "ring"), ("fp.Checkpointer, max_host_bytes = half", "ring + arena")):
        saves = [save for key, save in memory.get("saves", {}).items() if key.startswith(name) and "peak_bytes" in save]
        found, is_met = "", None
        if saves:
            limit_bytes = memory["ring_bytes"] + (memory["arena_bytes"] if "arena" in what else 0)
            found = f"{saves[0]['peak_bytes'] / _MIB:.0f} MiB, {what} {limit_bytes / _MIB:.0f} MiB"
            is_met = saves[0]["peak_bytes"] <= limit_bytes + _MEMORY_TOLERANCE_BYTES
        judge(f"host memory of {name.split(',')[0]} ≤ {what} (+ 32 MiB)", found, is_met)


# ------------------------------------------------------------------------------------------------ the tables


def markdown(results: dict[str, Any]) -> str:
    """Return all tables."""
    facts = results["facts"]
    lines = [f"`{results['command']}`", "", *_fact_lines(facts), ""]
    lines += ["## Targets", "", table(["target", "found", ""], [list(bar.values()) for bar in results["bars"]]), ""]
    for part, found in results["parts"].items():
        lines += [f"## {part}", ""]
        if found["rows"]:
            lines += [_rates(found["rows"], are_alike=part != "gpudirect"), ""]
        if part == "overlap":
            lines += _overlap_lines(_overlap(results))
        if part == "memory":
            lines += _memory_lines(found["values"].get("memory", {}))
        lines += [line for note in found["notes"] for line in (f"Note: {note}.", "")]
        if "log_tail" in found:
            lines += ["```", *found["log_tail"].splitlines()[-12:], "```", ""]
    return "\n".join(lines)


def _fact_lines(facts: dict[str, Any]) -> list[str]:
    if not facts:
        return ["(nothing is known of the machine)"]
    gpu = facts.get("gpu") or ("no GPU: a rehearsal on the CPU" if facts.get("device") == "cpu" else "no GPU was found")
    usable = [probe["name"] for probe in facts.get("engines", []) if probe["usable"]]
    why_not = [f"{probe['name']}: {probe['why_not']}" for probe in facts.get("engines", []) if not probe["usable"]]
    return [
        f"{facts.get('when')} UTC, {gpu}, CUDA {facts.get('cuda')}, torch {facts.get('torch')}, Python "
        f"{facts.get('python')}, fastpersist {facts.get('fastpersist')}  ",
        f"{facts.get('cpu')}, {facts.get('core_count')} cores, {facts.get('memory_bytes', 0) / (1 << 30):.0f} GiB, "
        f"Linux {facts.get('kernel')}  ",
        f"{facts.get('directory')} on {facts.get('file_system')}  ",
        f"engines: {', '.join(usable)}" + (f"; not {'; '.join(why_not)}" if why_not else "")
        if "engines" in facts
        else "engines: not known, as the part that asks (gpudirect) has not said",
        *[f"  \n{note}" for note in facts.get("notes", [])],
    ]


def _rates(rows: dict[str, dict[str, Any]], *, are_alike: bool) -> str:
    """Return the table of a part whose rows have seconds; ratios are to the yardsticks that are there.

    Args:
        rows: The rows by name.
        are_alike: The rows all save, or all load: they can be compared with the first of ours.
    """
    yardsticks = {
        "of disk": _best_rate(rows, "disk"),
        "of PCIe": _best_rate(rows, "pinned") or _best_rate(rows, "D2H") or _best_rate(rows, "H2D"),
    }
    own = _rate(next((row for row in rows.values() if row["kind"] == "ours"), None)) if are_alike else None
    lines = []
    for name, row in rows.items():
        seconds, rate = row["seconds"], _rate(row)
        cells = [name, row["kind"]]
        if rate is None:
            cells += ["", "", *["" for _ in yardsticks], "", "", row["integrity"], row["note"] or "no round"]
        else:
            cells += [
                f"{statistics.median(seconds):.3f} ({min(seconds):.3f} – {max(seconds):.3f}), {len(seconds)}",
                f"{rate / _GB:.2f}",
                *[f"{100 * rate / limit:.0f} %" if limit else "" for limit in yardsticks.values()],
                f"{own / rate:.2f}" if own else "",
                f"{row['first_s']:.3f}" if row["first_s"] is not None else "",
                row["integrity"],
                row["note"],
            ]
        lines.append(cells)
    headers = ["what", "kind", "median s (min – max), rounds", "GB/s", *yardsticks, "times ours", "first s"]
    size_bytes = max(row["size_bytes"] for row in rows.values())
    return f"{size_bytes / _GB:.2f} GB\n\n" + table([*headers, "file", "note"], lines)


def _overlap_lines(overlap: dict[str, Any]) -> list[str]:
    if not overlap:
        return []
    summaries = _summaries(overlap)
    none = summaries.get("no saves", {}).get("step_s")
    rows = []
    for name, way in overlap["ways"].items():
        one = summaries.get(name)
        if one is None:
            rows.append([name, "", "", "", "", "", way["integrity"], way["note"] or "no round"])
            continue
        rows.append(
            [
                name,
                f"{one['step_s']:.3f} ({one['step_min_s']:.3f} – {one['step_max_s']:.3f})",
                f"{100 * (one['step_s'] / none - 1):+.1f} %" if none else "",
                f"{1e3 * one['save_s']:.1f}",
                f"{1e3 * one['gate_s']:.1f}",
                f"{1e3 * one['stall_max_s']:.1f}",
                way["integrity"],
                way["note"],
            ]
        )
    times = overlap["step_made_s"] / overlap["write_alone_s"]
    fits = f"{times:.2f} times what a write takes" + (", so that it fits" if times > 1 else ", so it does not fit")
    headers = ["saves by", "step s (min – max)", "slowdown", "save ms", "gate ms", "both, at most", "file", "note"]
    return [
        f"{overlap['parameter_count'] / 1e6:.0f} million bf16 parameters under fused AdamW, "
        f"{overlap['state_bytes'] / _GB:.2f} GB, saved every step; alone a write takes "
        f"{overlap['write_alone_s']:.3f} s, the first {overlap['first_save_s']:.3f} s. A step is made "
        f"{overlap['step_made_s']:.3f} s long, by {overlap['products_per_step']} matrix products: {fits}.",
        "",
        table(headers, rows),
        "",
    ]


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    rows = []
    for name, save in memory.get("saves", {}).items():
        if "note" in save:
            rows.append([name, "", "", "", "", save["note"]])
            continue
        rows.append(
            [
                name,
                f"{save['seconds']:.3f}",
                f"{save['peak_bytes'] / _MIB:.0f}",
                f"{save['kept_bytes'] / _MIB:.0f}",
                f"{save['pinned_by_torch_bytes'] / _MIB:.0f}",
                "" if save["is_exact"] else "the kernel tells no peak: growth is what was left",
            ]
        )
    if not rows:
        return []
    return [
        f"State {memory['state_bytes'] / _MIB:.0f} MiB, ring {memory['ring_bytes'] / _MIB:.0f} MiB, arena of the "
        f"Checkpointer {memory['arena_bytes'] / _MIB:.0f} MiB.",
        "",
        table(["save", "s", "grew by MiB at most", "kept", "pinned by torch", "note"], rows),
        "",
    ]


# ------------------------------------------------------------------------------------------------ for gpu.sh


def _stages(work: str) -> list[dict[str, Any]]:
    """Read name, exit status and seconds of each stage, and the end of its log if it failed."""
    stages = []
    with contextlib.suppress(OSError), open(os.path.join(work, "stages.tsv")) as lines:
        for line in lines:
            name, status, seconds = line.rstrip("\n").split("\t")
            stage: dict[str, Any] = {"name": name, "status": int(status), "seconds": float(seconds)}
            if stage["status"]:
                stage["log_tail"] = _tail(os.path.join(work, "logs", f"{name}.log"))
            stages.append(stage)
    return stages


def _tail(path: str) -> str:
    with contextlib.suppress(OSError), open(path, errors="replace") as log:
        return log.read()[-3000:]
    return "(no log)"


def _tests(work: str, stages: Sequence[str]) -> dict[str, Any]:
    """Read pytest's own reports; of a file whose run was killed there is none, and its log tells what it came to.

    Args:
        work: The directory of what gpu.sh has gathered.
        stages: Names of the stages that were run; tests are those that begin with "test_".
    """
    tests: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "skips": {}}
    directory = os.path.join(work, "tests")
    reported = {name.removesuffix(".xml") for name in os.listdir(directory)} if os.path.isdir(directory) else set()
    for name in sorted(reported | {stage for stage in stages if stage.startswith("test_")}):
        try:
            cases = list(ElementTree.parse(os.path.join(directory, f"{name}.xml")).iter("testcase"))
        except (OSError, ElementTree.ParseError) as error:
            _add_tests_of_log(tests, name, os.path.join(work, "logs", f"{name}.log"), error)
            continue
        for case in cases:
            if case.get("name") is None:  # it was running when time was up; the log has its name
                continue
            label = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
            wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
            skip = case.find("skipped")
            if wrong is not None:
                tests["failed"] += 1
                said = wrong.text or wrong.get("message") or ""
                tests["failures"].append({"test": label, "said": said[-1500:]})
            elif skip is not None:
                _add_skip(tests, skip.get("message", ""))
            else:
                tests["passed"] += 1
    return tests


def _add_skip(tests: dict[str, Any], reason: str) -> None:
    tests["skipped"] += 1
    tests["skips"][reason] = tests["skips"].get(reason, 0) + 1


def _add_tests_of_log(tests: dict[str, Any], name: str, path: str, error: Exception) -> None:
    """Count the lines of `pytest -v`: "path::test PASSED [ 5%]"."""
    ends, running = [], ""
    with contextlib.suppress(OSError), open(path, errors="replace") as log:
        for line in log:
            if end := _TEST_LINE.match(line):
                ends.append(end.groups())
            running = line.split()[0] if not end and _STARTED_LINE.match(line) else "" if end else running
    for label, verdict, reason in ends:
        if verdict == "PASSED":
            tests["passed"] += 1
        elif verdict == "SKIPPED":
            _add_skip(tests, (reason or "").strip("() "))
        else:
            tests["failed"] += 1
            tests["failures"].append({"test": label, "said": f"{verdict}; the log says more"})
    said = f"no report ({error}); by its log {len(ends)} tests have ended"
    tests["failures"].append({"test": name, "said": said + (f", and {running} has not" if running else "")})


def _ending(stage: dict[str, Any], work: str) -> str:
    """Say how a stage ended; that of tests which all had run and passed, and that then was slow to end, apart."""
    if not stage["status"]:
        return "ok"
    if stage["status"] in (124, 137) and stage["name"].startswith("test_"):
        with contextlib.suppress(OSError), open(os.path.join(work, "logs", f"{stage['name']}.log")) as log:
            said = log.read()
            if _ALL_PASSED.search(said) and not _INTERRUPTED.search(said):
                return f"all passed, but its process did not end ({stage['status']})"
    return f"FAILED ({stage['status']})"


def _gathered(work: str) -> tuple[dict[str, Any], str]:
    """Return all that gpu.sh has, and the page about it."""
    results: dict[str, Any] = {"command": "benchmarks/gpu.sh", "facts": {}, "parts": {}, "bars": []}
    with contextlib.suppress(OSError, ValueError), open(os.path.join(work, "bench.json")) as file:
        results = json.load(file)
    with contextlib.suppress(OSError), open(os.path.join(work, "command")) as file:
        results["command"] = file.read().strip()
    stages = _stages(work)
    tests = _tests(work, [stage["name"] for stage in stages])
    results |= {"stages": stages, "tests": tests, "bars": results["bars"] or bars(results)}
    with contextlib.suppress(OSError), open(os.path.join(work, "nvidia-smi")) as file:
        results["nvidia_smi"] = file.read().strip()
    page = ["# FastPersist on a GPU", "", markdown(results)]
    rows = [[one["name"], _ending(one, work), f"{one['seconds']:.0f}"] for one in stages]
    page += ["## Stages", "", table(["stage", "", "s"], rows), ""]
    page += [f"`pytest -m gpu`: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped.", ""]
    page += [f"- {count} skipped: {reason}" for reason, count in tests["skips"].items()]
    for failure in tests["failures"]:
        page += ["", f"FAILED {failure['test']}", "", "```", failure["said"], "```"]
    for stage in stages:
        # 1 is what pytest ends with when tests have failed, and gpu.py when parts have, which are there already.
        has_report = os.path.exists(os.path.join(work, "tests", f"{stage['name']}.xml"))
        is_reported = stage["status"] == 1 and (has_report or (stage["name"] == "measure" and results["parts"]))
        if stage["status"] and not is_reported:
            page += ["", f"The end of the log of {stage['name']}:", "", "```", stage["log_tail"], "```"]
    if results.get("nvidia_smi"):
        page += ["", f"nvidia-smi: {results['nvidia_smi']}"]
    return results, "\n".join([*page, ""])


def main() -> int:
    """Gather, write and print."""
    work, name, *directories = sys.argv[1:]
    results, page = _gathered(work)
    for directory in directories:
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, f"{name}.json"), "w") as file:
            json.dump(results, file, indent=1)
        with open(os.path.join(directory, f"{name}.md"), "w") as file:
            file.write(page)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
