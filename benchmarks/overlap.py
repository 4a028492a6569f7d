"""Does training notice its checkpoints? Measures steps of a training with and without them.

Two views. Whole runs: each way of saving trains in a process of its own, same seed, the ways in turn for several
rounds. Turns: in one process, steps alone, beside a bare O_DIRECT loop, and with a save before them take turns, which
cancels the drift of a shared machine. Beyond them, --soak saves many times in a row and fails if memory, threads or
descriptors grow.

    python benchmarks/overlap.py DIR                                      GPT-2 124M, every step, both views
    python benchmarks/overlap.py DIR --model gpt2-124m mlp --every 1 5    all of it; takes an hour
    python benchmarks/overlap.py DIR --view turns --depth 1 4 --turns 20
    python benchmarks/overlap.py DIR --soak 1000

How a step is counted: whole runs take the median over windows, a window being the steps from save to save, the first
ones left out; a turn is one step. A stall is the time inside the call that saves plus what the optimizer's step then
waits for. Everything is durable when a run ends; the time for that is the tail, and in the total. Bound is the larger
of training alone and of writing alone, for the same number of saves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

from overlap_report import (
    machine_facts,
    report_disk,
    report_facts,
    report_runs,
    report_soak,
    report_turns,
    summarize_run,
)
from overlap_training import MODELS, recipe_of
from overlap_views import VIEWS, set_up_process
from overlap_ways import DEFAULT_WAYS, WAY_NAMES, Unavailable, variants_of

_MIB = 1 << 20


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlap.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory on the disk to measure; left as it was")
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["gpt2-124m"], help="(default: gpt2-124m)")
    parser.add_argument("--view", choices=("runs", "turns", "both"), default="both", help="(default: both)")
    parser.add_argument("--json", metavar="PATH", help="write all samples and results there as well")
    runs = parser.add_argument_group("whole runs")
    runs.add_argument(
        "--every", nargs="+", type=_positive, default=[1], metavar="N", help="steps per save (default: 1)"
    )
    runs.add_argument("--steps", type=_positive, default=20, metavar="N", help="steps that count (default: 20)")
    runs.add_argument(
        "--warm-up", type=_positive, default=3, metavar="N", help="steps before them, at least two saves' (default: 3)"
    )
    runs.add_argument("--rounds", type=_positive, default=3, metavar="N", help="runs of each way (default: 3)")
    runs.add_argument(
        "--ways",
        nargs="+",
        choices=WAY_NAMES,
        default=DEFAULT_WAYS,
        metavar="WAY",
        help=f"of {', '.join(WAY_NAMES)}; dcp and torch_checkpointing stand for several settings, of which the first "
        f"round finds the fastest (default: {' '.join(DEFAULT_WAYS)})",
    )
    turns = parser.add_argument_group("turns")
    turns.add_argument("--turns", type=_positive, default=20, metavar="N", help="turns of each kind (default: 20)")
    turns.add_argument(
        "--turn-ways",
        nargs="*",
        choices=WAY_NAMES[2:],
        default=["fastpersist"],
        metavar="WAY",
        help="ways that get turns (default: fastpersist)",
    )
    turns.add_argument(
        "--depth", nargs="+", type=_positive, default=[4], metavar="N", help="requests in flight of the bare loop; "
        "several give several kinds of turns (default: 4)",
    )  # fmt: skip
    turns.add_argument("--chunk-mib", type=_positive, default=8, metavar="N", help="of such a request (default: 8)")
    training = parser.add_argument_group("what is trained and how fastpersist saves it")
    training.add_argument("--batch", type=_positive, metavar="N", help="rows or sequences per step")
    training.add_argument("--sequence", type=_positive, metavar="N", help="tokens per sequence")
    training.add_argument("--adam", choices=("fused", "foreach"), default="fused", help="(default: fused)")
    training.add_argument("--engine", default="auto", help="of fastpersist (default: auto)")
    training.add_argument("--max-host-mib", type=_positive, metavar="N", help="max_host_bytes of the Checkpointer")
    soak = parser.add_argument_group("many saves in a row")
    soak.add_argument("--soak", type=_positive, metavar="N", help="instead of all else, save N times; exit 1 on growth")
    soak.add_argument("--soak-way", choices=WAY_NAMES[2:], default="fastpersist", metavar="WAY", help=argparse.SUPPRESS)
    soak.add_argument("--growth-mib", type=_positive, default=8, metavar="N", help="allowed growth (default: 8)")
    parser.add_argument("--timeout", type=_positive, default=3600, metavar="S", help="of a process (default: 3600)")
    return parser


class _Bench:
    """Runs jobs, each in a process of its own that gets an empty directory."""

    def __init__(self, arguments: argparse.Namespace, scratch: str) -> None:
        self.arguments, self._scratch = arguments, scratch
        host_mib = arguments.max_host_mib
        self._options = {"engine": arguments.engine, "max_host_bytes": host_mib and host_mib * _MIB}

    def run(self, view: str, model: str, what: str, **job: Any) -> dict[str, Any]:
        """Run one job; return its result, or the reason under "failed" (unavailable ways included)."""
        print(f"… {model}: {what}", file=sys.stderr, flush=True)
        arguments = self.arguments
        recipe = recipe_of(
            model, adam=arguments.adam, batch_count=arguments.batch, sequence_count=arguments.sequence
        ).plain()
        with tempfile.TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True) as root:
            files = os.path.join(root, "files")
            os.mkdir(files)
            result_path, log_path = os.path.join(root, "result.json"), os.path.join(root, "log")
            job |= {
                "view": view,
                "recipe": recipe,
                "root": files,
                "options": self._options,
                "chunk_bytes": arguments.chunk_mib * _MIB,
                "depths": arguments.depth,
                "result_path": result_path,
            }
            with open(log_path, "w") as log:
                failed = _run_process(["--worker", json.dumps(job)], log, arguments.timeout)
            if os.path.exists(result_path):
                with open(result_path) as file:
                    result: dict[str, Any] = json.load(file)
                return result
            with open(log_path) as log_file:
                said = log_file.read().strip()
        print(said, file=sys.stderr)
        return {"failed": f"{failed}: {said.splitlines()[-1] if said else 'no message'}", "is_error": True}


def _run_process(options: list[str], log: Any, timeout_s: float) -> str:
    """Run this program again with other arguments; return how it ended."""
    command = [sys.executable, os.path.abspath(__file__), *options]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return f"exit status {process.wait(timeout_s)}"
    except subprocess.TimeoutExpired:
        return f"no end after {timeout_s} s"
    finally:
        # Writing processes of peers must not outlive their trainer, nor their files the scratch directory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _work(job_text: str) -> int:
    """Be the process of one job."""
    job = json.loads(job_text)
    set_up_process()
    try:
        result = VIEWS[job["view"]](job)
    except Unavailable as reason:
        result = {"failed": str(reason)}
    pending_path = f"{job['result_path']}.pending"
    with open(pending_path, "w") as file:
        json.dump(result, file)
    os.rename(pending_path, job["result_path"])
    return 0


def _whole_runs(bench: _Bench, model: str, every: int, disk: dict[str, Any]) -> dict[str, Any]:
    """Run every way once per round, each round in another order; print the table."""
    arguments = bench.arguments
    step_count = -(-arguments.steps // every) * every
    # Two saves at least: with the first, peers start processes and everybody allocates memory.
    warm_up_count = max(2, -(-arguments.warm_up // every)) * every
    rounds: list[dict[str, dict[str, Any]]] = []
    notes: dict[str, str] = {}
    is_error: dict[str, bool] = {}
    groups = {name: variants_of(name) for name in arguments.ways}
    order = random.Random(0)
    for number in range(arguments.rounds):
        ways = list(dict.fromkeys(way for variants in groups.values() for way in variants))
        results: dict[str, dict[str, Any]] = {}
        for way in order.sample(ways, len(ways)):
            if way in notes:
                continue
            what = f"{way}, every {every}, round {number + 1} of {arguments.rounds}"
            job = {"way": way, "every": every, "step_count": step_count, "warm_up_count": warm_up_count}
            result = bench.run("whole run", model, what, **job)
            if "failed" in result:
                notes[way], is_error[way] = result["failed"], "is_error" in result
            else:
                results[way] = result
        rounds.append({way: results[way] for way in ways if way in results})
        for name, variants in groups.items():
            if len(variants) > 1 and (tried := [way for way in variants if way in results]):
                fastest = min(tried, key=lambda way: summarize_run(results[way], every)["total_s"])
                groups[name] = [fastest]
    text, table = report_runs(model, every, rounds, notes, disk)
    print(f"\n{text}")
    for name in arguments.ways:
        if len(variants_of(name)) > 1 and len(groups[name]) == 1:
            print(f"{name}: the fastest settings are those of {groups[name][0]}")
    return {"model": model, "every": every, "results": table, "notes": notes, "errors": is_error, "rounds": rounds}


def _turns(bench: _Bench, model: str) -> dict[str, Any]:
    """Run the turns; print the table."""
    arguments = bench.arguments
    ways = list(arguments.turn_ways)
    result = bench.run("turns", model, "turns", ways=ways, turn_count=arguments.turns, warm_up_count=3)
    if "failed" in result:
        print(f"\nTurns: {model}: {result['failed']}")
        return {"model": model, "failed": result["failed"], "errors": {"fastpersist": "is_error" in result}}
    text, table = report_turns(model, result)
    print(f"\n{text}")
    return {"model": model, "results": table, "samples": result["samples"], "notes": result["notes"], "errors": {}}


def _measure(bench: _Bench, output: dict[str, Any]) -> int:
    """Measure what was asked for; return the exit status."""
    arguments = bench.arguments
    if arguments.soak:
        result = bench.run("soak", "tiny", f"{arguments.soak} saves", way=arguments.soak_way, save_count=arguments.soak)
        output["soak"] = result
        if "failed" in result:
            print(f"\n{arguments.soak_way}: {result['failed']}")
            return 1
        text, grown = report_soak(result, growth_bytes_max=arguments.growth_mib * _MIB)
        output["grown"] = grown
        print(f"\n{text}")
        return int(bool(grown))
    errors = []
    for model in arguments.model:
        disk = bench.run("disk alone", model, "the disk alone")
        output["disk"][model] = disk
        print(f"\n{report_disk(model, disk)}")
        if arguments.view in ("runs", "both"):
            output["runs"] += [_whole_runs(bench, model, every, disk) for every in arguments.every]
        if arguments.view in ("turns", "both"):
            output["turns"].append(_turns(bench, model))
    for measured in [*output["runs"], *output["turns"]]:
        errors += [way for way, is_error in measured["errors"].items() if is_error and way.startswith("fastpersist")]
    return int(bool(errors))


def _require_space(directory: str, models: list[str]) -> None:
    """Refuse to fill the disk: two checkpoints are kept while one is written and one removed."""
    state_bytes = 2 << 30 if set(models) != {"tiny"} else 16 * _MIB
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < 5 * state_bytes:
        raise SystemExit(
            f"{directory} has {free_bytes / 1e9:.1f} GB free, and this needs {5 * state_bytes / 1e9:.1f} GB"
        )


def main() -> int:
    """Measure, print and write what was asked for.

    Returns:
        0, or 1 if a row of fastpersist failed (not: if it is slow), or something grew in --soak.
    """
    if sys.argv[1:2] == ["--worker"]:
        return _work(sys.argv[2])
    arguments = _parser().parse_args()
    if not os.path.isdir(arguments.directory):
        raise SystemExit(f"{arguments.directory} is no directory; name one on the disk that shall be measured")
    _require_space(arguments.directory, ["tiny"] if arguments.soak else arguments.model)
    if arguments.json:
        with open(arguments.json, "w"):
            pass  # better refused now than after an hour
    command_line = shlex.join(["python", "benchmarks/overlap.py", *sys.argv[1:]])
    facts = machine_facts(arguments.directory)
    print(report_facts(command_line, facts))
    output: dict[str, Any] = {"command_line": command_line, "machine": facts, "disk": {}, "runs": [], "turns": []}
    # Any exception removes it, Ctrl-C included; only a SIGKILL leaves it behind.
    with tempfile.TemporaryDirectory(prefix=".overlap-", dir=arguments.directory) as scratch:
        status = _measure(_Bench(arguments, scratch), output)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(output, file, indent=1)
            file.write("\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
