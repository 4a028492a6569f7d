"""`fastpersist bench overlap DIR`: what a checkpoint in every step costs a training, against others.

Each way of saving trains in a process of its own (`bench.overlap.worker`), the ways in turn for several rounds. Here
are the command line and the table. As in the other benchmarks, nothing fails because a machine is slow: the exit code
is 0 unless the row of fastpersist itself fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shlex
import statistics
import tempfile
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from tabulate import tabulate

from fastpersist import require_engine
from fastpersist.cli.bench.overlap.run import summarize_run
from fastpersist.cli.bench.overlap.worker import WARM_UP_COUNT, WAYS, Job
from fastpersist.cli.bench.places import check_places, positive, require_space, scratch_directory, write_json
from fastpersist.cli.bench.report import machine_facts, report_text
from fastpersist.cli.child_process import ChildProcess
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.transfer.arena import available_host_bytes
from fastpersist.transfer.progress import progress_bar

__all__ = ["add_parser", "run"]

_MIB = 1 << 20
_FORMAT = 1
_COLUMNS = 118
_PROGRAM = "from fastpersist.cli.bench.overlap.worker import main; main()"
_NONE, _OURS = "no checkpoints", "fp.Checkpointer"
_STEP_OF_WRITE = 1.25  # the write fits into the step, with some air
_FILE_COUNT = 4  # two checkpoints are kept while one is written and one removed
_COPY_COUNT = 4  # parameters, moments and gradients, and a copy of the state by who saves


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `overlap` to the commands of `bench.command`."""
    parser = commands.add_parser(
        "overlap",
        help="what a checkpoint in every step costs a training",
        description="What a checkpoint in every step costs a training: a stack of linear layers with random weights "
        "under AdamW, whose step is made as long as wanted by matrix products. Measured are its steps without "
        "checkpoints, with fastpersist.Checkpointer, with torch.save and fsync, and with "
        "torch.distributed.checkpoint.async_save (its defaults, and with a stager that is kept), each in a process of "
        "its own, in turn for several rounds. All of them save after each step, keep two checkpoints, and are durable "
        "at the end. A step is timed from its start until the device has made it, the call that saves included. Stall "
        "is what the thread that trains lost: inside that call, and waiting before the optimizer's step.",
        epilog="A step that is shorter than a write shows how ways behave on a disk that cannot keep up.",
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory; a scratch directory in it is removed")
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N, to train on (default: cpu)"
    )
    parser.add_argument(
        "--size-mb", type=positive, default=512, metavar="N", help="MiB of parameters and moments (default: 512)"
    )
    parser.add_argument(
        "--step-ms",
        type=positive,
        metavar="N",
        help=f"length of a step without checkpoints (default: {_STEP_OF_WRITE} times what writing a checkpoint takes "
        "with nothing beside it, which is measured first)",
    )
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="steps of a run that count (default: 8)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="rounds: runs of each way (default: 3)")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="threads that compute on the CPU (default: half of the CPUs)"
    )
    parser.add_argument("--engine", default="auto", metavar="NAME", help="of fastpersist (default: auto)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        0, or 1 if a run with fastpersist failed.

    Raises:
        ConfigError: Options make no sense, or ask for what is not there.
        StorageError: DIR has no room or takes no files; or the JSON file cannot be written.
        UnsupportedError: The training cannot be run at all, or not be saved by fastpersist; the message says why.
    """
    _check(arguments)
    facts = machine_facts(arguments.directory)
    with scratch_directory(arguments.directory) as scratch:
        lengths, rounds, notes = _measure(arguments, scratch)
    rows = _rows(rounds, notes)
    command_line = _command_line(arguments)
    remarks = _remarks(arguments, lengths)
    print(_text(command_line, facts, lengths, rows, remarks))
    if arguments.json:
        write_json(
            arguments.json,
            {"format": _FORMAT, "command": "overlap", "command_line": command_line, "machine": facts, "notes": remarks}
            | {"training": lengths, "rows": rows},
        )
    return int(rows[list(WAYS).index(_OURS)]["note"].startswith("failed"))


def _check(arguments: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine, and refuse what makes no sense."""
    require_engine(arguments.engine)
    try:
        kind = torch.device(arguments.device).type
    except RuntimeError as error:
        raise ConfigError(f"--device {arguments.device}: {str(error).splitlines()[0]}") from None
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"--device {arguments.device}: cpu, cuda or cuda:N")
    if kind == "cuda" and (torch.device(arguments.device).index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {arguments.device}: torch sees no such CUDA device here")
    needed_bytes = (_COPY_COUNT if kind == "cpu" else 1) * arguments.size_mb * _MIB
    if needed_bytes > available_host_bytes():
        raise ConfigError(
            f"--size-mb {arguments.size_mb} needs some {needed_bytes / 1e9:.1f} GB of memory, more than is available "
            f"({available_host_bytes() / 1e9:.1f} GB); ask for less"
        )
    arguments.threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // 2)
    check_places(arguments.directory, [arguments.json])
    require_space(arguments.directory, _FILE_COUNT * arguments.size_mb * _MIB, smaller="--size-mb")


def _command_line(arguments: argparse.Namespace) -> str:
    """Spell out the command, as it would be typed to run the same again."""
    words = ["fastpersist", "bench", "overlap", arguments.directory, "--device", arguments.device]
    words += ["--size-mb", str(arguments.size_mb)]
    words += ["--step-ms", str(arguments.step_ms)] if arguments.step_ms else []
    words += ["--steps", str(arguments.steps), "--repeat", str(arguments.repeat), "--threads", str(arguments.threads)]
    return shlex.join([*words, "--engine", arguments.engine])


def _measure(
    arguments: argparse.Namespace, scratch: str
) -> tuple[dict[str, Any], list[dict[str, dict[str, Any]]], dict[str, str]]:
    """Run all; return what is known of the training, of each round the results by way, and why ways have none."""
    job = Job(
        root="",
        size_bytes=arguments.size_mb * _MIB,
        device=arguments.device,
        thread_count=arguments.threads,
        engine=arguments.engine,
        step_count=arguments.steps,
    )
    rounds: list[dict[str, dict[str, Any]]] = []
    notes: dict[str, str] = {}
    order = random.Random(0)
    names = list(WAYS)
    count = 1 + arguments.repeat * len(names)
    with (
        progress_bar(total=count, desc="bench", unit="run", leave=False, disable=None) as progress,
        ChildProcess(_PROGRAM, title="the process that trains") as process,
    ):
        progress.set_postfix_str("how long a write takes")
        answer = _run_job(process, job, scratch)
        if "result" not in answer:
            raise UnsupportedError(f"the training and its first checkpoints: {_why(answer)}")
        lengths = answer["result"]
        wanted_s = arguments.step_ms / 1000 if arguments.step_ms else _STEP_OF_WRITE * lengths["write_s"]
        product_count = max(round((wanted_s - lengths["step_s"]) / lengths["product_s"]), 0)
        lengths |= {"wanted_step_s": wanted_s, "product_count": product_count}
        progress.update()
        for _ in range(arguments.repeat):
            results: dict[str, dict[str, Any]] = {}
            for name in order.sample(names, len(names)):
                progress.set_postfix_str(name)
                if name not in notes:
                    answer = _run_job(process, dataclasses.replace(job, way=name, product_count=product_count), scratch)
                    if "result" in answer:
                        results[name] = answer["result"]
                    else:
                        notes[name] = _why(answer)
                progress.update()
            rounds.append(results)
    return lengths, rounds, notes


def _run_job(process: ChildProcess, job: Job, scratch: str) -> dict[str, Any]:
    """Have a job done in a directory of its own; return the answer."""
    with tempfile.TemporaryDirectory(dir=scratch) as root:
        process.send(dataclasses.asdict(dataclasses.replace(job, root=root)))
        try:
            return process.receive()
        except UnsupportedError as error:
            process.end()  # with what it has forked, too
            return {"failed": str(error)}
        except BaseException:
            process.end()  # before the directory goes that it writes to
            raise


def _why(answer: dict[str, Any]) -> str:
    return str(answer["unavailable"]) if "unavailable" in answer else f"failed: {answer['failed']}"


# --- what is said ---


def _rows(rounds: Sequence[dict[str, dict[str, Any]]], notes: dict[str, str]) -> list[dict[str, Any]]:
    """Condense the runs of each way, as plain values. Slowdowns are against the run without checkpoints of the round.

    Attributes that have no meaning, or nothing to be compared with, are None.
    """
    rows = []
    alone_peaks = [results[_NONE]["peak_bytes"] for results in rounds if _NONE in results]
    for name in WAYS:
        found = [results[name] for results in rounds if name in results]
        row: dict[str, Any] = {"name": name, "note": notes.get(name, "")}
        rows.append(row)
        if not found:
            continue
        runs = [summarize_run(result, 1) for result in found]
        steps_s = [step["step_s"] for result in found for step in result["steps"]]
        row |= {
            "settings": found[0]["settings"],
            "runs": [{key: value for key, value in result.items() if key != "settings"} for result in found],
            "step_s": statistics.median(run["step_s"] for run in runs),
            "step_min_s": min(steps_s),
            "step_max_s": max(steps_s),
        }
        if name == _NONE:
            continue
        slowdowns = [
            summarize_run(results[name], 1)["step_s"] / summarize_run(results[_NONE], 1)["step_s"]
            for results in rounds
            if name in results and _NONE in results
        ]
        peak_bytes = statistics.median(result["peak_bytes"] for result in found)
        row |= {
            "slowdowns": slowdowns,
            "slowdown": statistics.median(slowdowns) if slowdowns else None,
            "stall_s": statistics.median(run["stall_s"] for run in runs),
            "stall_max_s": max(run["stall_max_s"] for run in runs),
            "save_count": sum(len(result["steps"]) for result in found),
            "late_count": sum(result["late_count"] for result in found),
            "tail_s": statistics.median(run["tail_s"] for run in runs),
            "checkpoint_bytes": found[0]["checkpoint_bytes"],
            "peak_bytes": peak_bytes - statistics.median(alone_peaks) if alone_peaks else None,
        }
    return rows


def _remarks(arguments: argparse.Namespace, lengths: dict[str, Any]) -> list[str]:
    remarks = [
        "step: from its start until the device has made it, and the call that saves; median of the runs' medians, and "
        "the shortest and longest of all. slowdown: median of the rounds, each against its own run without checkpoints",
        "stall: inside the call that saves, and waiting before the optimizer's step; median, and the longest of all",
        "kept up: how many saves found the one before written; who was late made the next one wait. torch.save is done "
        "when its call returns",
        "durable after: from the end of the last step until all is durable. peak: the highest VmHWM of the process, "
        "above that of the training without checkpoints",
        f"the first {WARM_UP_COUNT} steps of a run, in which memory is made, do not count; the ways took turns, "
        "each round in another order; the optimizer's time is part of every step",
    ]
    if lengths["device"]:
        remarks.append(
            f"trained on {lengths['device']}: where the optimizer's step waits on the GPU's stream, and its thread "
            "does not, that is in the step and not in the stall"
        )
    else:
        threads = f"{arguments.threads} thread{'s' if arguments.threads > 1 else ''}"
        remarks.append(f"computed on {threads} of the CPU (--threads); what other CPUs there are is left to saving")
    return remarks


def _text(
    command_line: str,
    facts: dict[str, Any],
    lengths: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    remarks: Sequence[str],
) -> str:
    headers = ["every step", "step s", "min – max s", "slowdown", "by round", "stall ms", "longest", "kept up"]
    headers += ["durable after s", "peak MiB above none"]
    align = ("left",) + ("right",) * (len(headers) - 1)
    write_s, state_bytes = lengths["write_s"], lengths["state_bytes"]
    lines = [
        report_text("overlap", command_line, facts, [], []).rstrip(),
        "",
        f"a state of {state_bytes / 1e9:.3f} GB; writing it with nothing beside takes fp.Checkpointer {write_s:.3f} s "
        f"({state_bytes / write_s / 1e9:.2f} GB/s, {lengths['engine']})",
        f"steps that were to take {lengths['wanted_step_s']:.3f} s: {lengths['product_count']} products beside a "
        f"training of {lengths['step_s']:.3f} s",
        "",
        tabulate([_cells(row) for row in rows], headers=headers, disable_numparse=True, colalign=align),
        "",
        *(f"{row['name']}: {row['settings']}" for row in rows if "settings" in row),
        *(f"{row['name']}: {row['note']}" for row in rows if row["note"]),
        "",
        *(textwrap.fill(f"- {remark}", _COLUMNS, subsequent_indent="  ") for remark in remarks),
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    if "step_s" not in row:
        return [row["name"], "–"]
    cells = [row["name"], f"{row['step_s']:.4f}", f"{row['step_min_s']:.4f} – {row['step_max_s']:.4f}"]
    if row["name"] == _NONE:
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
        "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / _MIB:.0f}",
    ]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
