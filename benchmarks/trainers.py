"""The cost of checkpoints inside the frameworks: the same small GPT-2, saved by the framework itself and by us.

    python benchmarks/trainers.py DIR                                   all frameworks, every step and every 10th
    python benchmarks/trainers.py DIR --frameworks lightning --every 1 2 --rounds 5

Each run is a process of its own; the ways of one framework take turns for several rounds, the same steps each, after
warm-up steps that do not count. Slowdown is that of the steps from save to save, over the framework without saving in
the same round. "In turns" compares, within one run, steps that follow a save with the others around them, which
cancels the drift of a shared machine; it needs a gap between saves (--every 2 or more). A stall is the time inside the
call that saves plus the wait at the gate. Durable is from that call until files and names survive a power loss; for the
frameworks' own saving, which does not sync, it is a save after the training and a sync of its files.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from harness import argument_parser, run_benchmark

# isort: split
from trainers_runs import FRAMEWORKS, WAYS, median_of, train

from fastpersist.cli.bench.places import check_places, scratch_directory, write_json
from fastpersist.cli.bench.report import facts_text, machine_facts, report_head, table

_WARM_UP_COUNT = 6


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("trainers.py", __doc__)
    parser.add_argument("--frameworks", nargs="+", choices=list(FRAMEWORKS), default=list(FRAMEWORKS))
    parser.add_argument("--every", nargs="+", type=int, default=[1, 10], metavar="N", help="steps per save")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps that count, at most")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each way")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="sequences of a step")
    parser.add_argument("--sequence", type=int, default=64, metavar="N", help="tokens of a sequence")
    parser.add_argument("--tiny", action="store_true", help="a model of 140 kB, to try the benchmark itself")
    parser.add_argument("--timeout", type=int, default=600, metavar="S", help="of a process")
    return parser


def _run(arguments: argparse.Namespace, scratch: str, framework: str, way: str, every: int) -> dict[str, Any]:
    """Train in a child process; return its samples, or its output before it failed."""
    step_count = _WARM_UP_COUNT + 1 + -(-arguments.steps // every) * every
    with tempfile.TemporaryDirectory(dir=scratch) as root:
        job = {
            "framework": framework,
            "way": way,
            "every": every,
            "step_count": step_count,
            "batch_count": arguments.batch,
            "sequence_count": arguments.sequence,
            "is_tiny": arguments.tiny,
            "root": os.path.join(root, "checkpoints"),
            "result_path": os.path.join(root, "result.json"),
        }
        os.mkdir(str(job["root"]))
        command = [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(job)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=arguments.timeout, check=False)
        if done.returncode != 0:
            return {"failed": done.stderr.strip()[-2000:]}
        with open(str(job["result_path"])) as file:
            result: dict[str, Any] = json.load(file)
        return result


def _windows(run: dict[str, Any], every: int) -> list[float]:
    """Return the seconds per step of each stretch from save to save, the warm-up left out."""
    intervals = run["intervals_s"][_WARM_UP_COUNT:]
    return [statistics.fmean(intervals[start : start + every]) for start in range(0, len(intervals) - every + 1, every)]


def _in_turns(run: dict[str, Any], every: int) -> float | None:
    """Return how much longer a step takes that follows a save than the quiet ones of the same run."""
    if every < 2 or not run["save_steps"]:
        return None
    intervals = run["intervals_s"]
    after_save = {step - 1 for step in run["save_steps"]}  # the interval that begins when that step ends
    busy = [s for index, s in enumerate(intervals) if index in after_save and index >= _WARM_UP_COUNT]
    quiet = [s for index, s in enumerate(intervals) if index not in after_save and index >= _WARM_UP_COUNT]
    return statistics.median(busy) / statistics.median(quiet) - 1 if busy and quiet else None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def _rows(framework: str, every: int, rounds: list[dict[str, dict[str, Any]]]) -> list[list[str]]:
    rows = []
    for way in WAYS:
        runs = [(each[way], each["none"]) for each in rounds if "failed" not in each[way]]
        if not runs:
            rows.append([framework, way, f"failed: {rounds[0][way]['failed'].splitlines()[-1]}"])
            continue
        step_s = median_of([median_of(_windows(run, every)) for run, _ in runs])
        slowdowns = [
            median_of(_windows(run, every)) / median_of(_windows(none, every)) - 1
            for run, none in runs
            if "failed" not in none
        ]
        turns = [turn for run, _ in runs if (turn := _in_turns(run, every)) is not None]
        stalls = [
            sum(run["save_s"]) / len(run["save_s"]) + run["gate_s"] / len(run["save_s"])
            for run, _ in runs
            if run["save_s"]
        ]
        durable = [seconds for run, _ in runs for seconds in run["durable_s"]]
        rows.append(
            [
                framework,
                way,
                f"{step_s:.3f}",
                ""
                if way == "none"
                else f"{_percent(median_of(slowdowns))} ({_percent(min(slowdowns))} … {_percent(max(slowdowns))})",
                "" if not turns else _percent(median_of(turns)),
                "" if not stalls else f"{1000 * median_of(stalls):.0f} ms",
                "" if not durable else f"{median_of(durable):.2f} s",
            ]
        )
    return rows


def _measure(arguments: argparse.Namespace, scratch: str) -> list[dict[str, Any]]:
    measured: list[dict[str, Any]] = []
    headers = ["framework", "saved by", "step s", "slowdown (by round)", "in turns", "stall per save", "durable after"]
    for every in arguments.every:
        rows = []
        size_bytes = 0
        for framework in arguments.frameworks:
            rounds: list[dict[str, dict[str, Any]]] = []
            for number in range(arguments.rounds):
                ways = WAYS if number % 2 == 0 else WAYS[::-1]
                print(f"… {framework}, every {every}, round {number + 1}", file=sys.stderr, flush=True)
                rounds.append({way: _run(arguments, scratch, framework, way, every) for way in ways})
            for way, run in ((way, run) for each in rounds for way, run in each.items()):
                if "failed" in run:
                    print(f"{framework}, {way}: {run['failed']}", file=sys.stderr)
                size_bytes = max(size_bytes, run.get("checkpoint_bytes", 0))
            measured.append({"framework": framework, "every": every, "rounds": rounds})
            rows += _rows(framework, every, rounds)
        print(f"\nA save of {size_bytes / 1e9:.2f} GB every {every} steps, {arguments.rounds} rounds:\n")
        print(table(headers, rows, align="ll"))
    return measured


def main() -> int:
    """Measure, print and write the results; return 1 if a run of ours failed."""
    if sys.argv[1:2] == ["--worker"]:
        job = json.loads(sys.argv[2])
        result = train(job)
        with open(job["result_path"], "w") as file:
            json.dump(result, file)
        return 0
    arguments = _parser().parse_args()
    check_places(arguments.directory, [arguments.json])
    command_line = shlex.join(["python", "benchmarks/trainers.py", *sys.argv[1:]])
    facts = machine_facts(arguments.directory)
    print(facts_text(command_line, facts))
    with scratch_directory(arguments.directory) as scratch:
        measured = _measure(arguments, scratch)
    if arguments.json:
        write_json(arguments.json, report_head("trainers", command_line, facts, []) | {"runs": measured})
    failed = [run for runs in measured for each in runs["rounds"] for run in each.values() if "failed" in run]
    return int(bool(failed))


if __name__ == "__main__":
    run_benchmark(main)
