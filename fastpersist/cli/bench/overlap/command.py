"""`fastpersist bench overlap DIR`: measures the cost of a checkpoint in every step to a training, against others.

Each way of saving trains in its own process (`overlap.worker`), in turn for several rounds. This module has the
command line, `overlap.report` the output. As in the other benchmarks, a slow machine is no failure: the exit code is 0
unless a row of fastpersist fails, or --soak finds growth.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import tempfile
from collections.abc import Iterable
from typing import Any

from fastpersist import require_engine
from fastpersist.cli.argument_types import positive
from fastpersist.cli.bench.overlap.report import NONE, condense, overlap_remarks, overlap_text, report_soak
from fastpersist.cli.bench.overlap.training import GPT2, GPT2_STATE_BYTES, LAYERS, MODELS, VECTORS
from fastpersist.cli.bench.overlap.worker import ALL_WAYS, WAYS, Job
from fastpersist.cli.bench.places import (
    check_device,
    check_places,
    require_space,
    scratch_directory,
    write_json,
)
from fastpersist.cli.bench.report import command_line_text, facts_text, machine_facts, report_head
from fastpersist.cli.child_process import ChildProcess
from fastpersist.cli.terminal import HelpFormatter, examples_text
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.transfer.arena import available_host_bytes
from fastpersist.transfer.progress import progress_bar

__all__ = ["add_parser", "run"]

_MIB = 1 << 20
_PROGRAM = "from fastpersist.cli.bench.overlap.worker import main; main()"
_OURS = "fp.Checkpointer"
_STEP_OF_WRITE = 1.25  # the write fits into the step, with some air
_FILE_COUNT = 4  # two checkpoints are kept while one is written and one removed
_COPY_COUNT = 4  # parameters, moments and gradients, and the saver's copy of the state


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `overlap` to the commands of `bench.command`."""
    parser = commands.add_parser(
        "overlap",
        help="measure the cost of a checkpoint in every step to a training",
        description="What a checkpoint in every step costs a training: a stack of linear layers with random weights "
        "under AdamW, whose step is made as long as wanted by matrix products. Measured are its steps without "
        "checkpoints, with fastpersist.Checkpointer, with torch.save and fsync, and with "
        "torch.distributed.checkpoint.async_save (its defaults, and with a stager that is kept), each in a process of "
        "its own, in turn for several rounds. All of them save after each step, keep two checkpoints, and are durable "
        "at the end. A step is timed from its start until the device has made it, the call that saves included. Stall "
        "is what the thread that trains lost: inside that call, and waiting before the optimizer's step.",
        epilog=examples_text(
            "fastpersist bench overlap /mnt/nvme",
            "fastpersist bench overlap /mnt/nvme --model gpt2-124m --ways all --json overlap.json",
        )
        + "A step that is shorter than a write shows how ways behave on a disk that cannot keep up.",
        formatter_class=HelpFormatter,
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
        f"with nothing beside it, which is measured first; with --model {GPT2} what it takes by itself)",
    )
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="steps of a run that count (default: 8)")
    parser.add_argument("--every", type=positive, default=1, metavar="N", help="steps per checkpoint (default: 1)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="rounds: runs of each way (default: 3)")
    parser.add_argument(
        "--ways",
        nargs="+",
        action="extend",
        choices=["all", *ALL_WAYS],
        metavar="NAME",
        help=f"all, or the names of rows: {_quoted(ALL_WAYS)} (default: {_quoted(WAYS)}); the first is always there",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--turns",
        type=positive,
        metavar="N",
        help="instead of whole runs, N steps of each way in turn in one process, each save awaited: less is measured, "
        "and the drift of a shared machine cancels out",
    )
    instead.add_argument(
        "--soak",
        type=positive,
        metavar="N",
        help="instead, N saves of each way in a row; exit code 1 if memory, threads or descriptors grow",
    )
    parser.add_argument(
        "--growth-mb", type=positive, default=8, metavar="N", help="MiB of growth that --soak allows (default: 8)"
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default=LAYERS,
        help=f"what is trained; {GPT2} has 1.5 GB of state, {VECTORS} has 10,000 tensors (default: {LAYERS})",
    )
    parser.add_argument(
        "--batch", type=positive, metavar="N", help="rows of the layers' input, or sequences (default: 16, or 1)"
    )
    parser.add_argument("--tokens", type=positive, metavar="N", help=f"of a sequence of {GPT2} (default: 96)")
    parser.add_argument(
        "--max-host-mb", type=positive, metavar="N", help="MiB of copies, max_host_bytes of the Checkpointer"
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="threads that compute on the CPU (default: half of the CPUs)"
    )
    parser.add_argument("--engine", default="auto", metavar="NAME", help="of fastpersist (default: auto)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.set_defaults(run=run, parser=parser)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        0, or 1 if a run with fastpersist failed, or something grew.

    Raises:
        ConfigError: Options make no sense, or ask for what is not there.
        StorageError: DIR has no room or takes no files; or the JSON file cannot be written.
        UnsupportedError: The training cannot be run at all, or not be saved by fastpersist; the message says why.
    """
    _check(arguments)
    facts = machine_facts(arguments.directory)
    command_line = command_line_text(arguments)
    head = report_head("overlap", command_line, facts, [])
    with scratch_directory(arguments.directory) as scratch:
        if arguments.soak:
            results, grown = _soak(arguments, scratch, facts_text(command_line, facts))
            report: dict[str, Any] = head | {"soak": results, "grown": grown}
        else:
            lengths, rounds, notes = _measure(arguments, scratch)
            rows = condense(arguments.names, rounds, notes, every=arguments.every, write_s=lengths["write_s"])
            remarks = overlap_remarks(arguments, lengths)
            print(overlap_text(command_line, facts, lengths, rows, remarks))
            report = head | {"notes": remarks, "training": lengths, "rows": rows}
            grown = [row["name"] for row in rows if row["name"].startswith("fp.") and row["note"].startswith("failed")]
    if arguments.json:
        write_json(arguments.json, report)
    return int(bool(grown))


def _check(arguments: argparse.Namespace) -> None:
    """Fill in the defaults that depend on the machine, and refuse what makes no sense."""
    require_engine(arguments.engine)
    check_device(arguments.device)
    wanted = arguments.ways or ([_OURS] if arguments.soak else WAYS)
    wanted = list(ALL_WAYS) if "all" in wanted else [NONE, *wanted]
    arguments.names = [name for name in ALL_WAYS if name in wanted and not (arguments.soak and name.startswith(NONE))]
    arguments.steps = -(-arguments.steps // arguments.every) * arguments.every
    state_bytes = GPT2_STATE_BYTES if arguments.model == GPT2 else arguments.size_mb * _MIB
    smaller = f"--model {LAYERS} with --size-mb" if arguments.model == GPT2 else "a smaller --size-mb"
    needed_bytes = (_COPY_COUNT if arguments.device == "cpu" else 1) * state_bytes
    if needed_bytes > available_host_bytes():
        option = f"--model {GPT2}" if arguments.model == GPT2 else f"--size-mb {arguments.size_mb}"
        raise ConfigError(
            f"{option} needs some {needed_bytes / 1e9:.1f} GB of memory, more than is available "
            f"({available_host_bytes() / 1e9:.1f} GB); ask for less: {smaller}"
        )
    arguments.threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // 2)
    check_places(arguments.directory, [arguments.json])
    one_after_another = len(arguments.names) if arguments.turns else 1
    require_space(arguments.directory, one_after_another * _FILE_COUNT * state_bytes, instead=smaller)


def _measure(
    arguments: argparse.Namespace, scratch: str
) -> tuple[dict[str, Any], list[dict[str, dict[str, Any]]], dict[str, str]]:
    """Run all; return what is known of the training, of each round the results by way, and why ways have none."""
    job = _job(arguments)
    rounds: list[dict[str, dict[str, Any]]] = []
    notes: dict[str, str] = {}
    order = random.Random(0)
    names = arguments.names
    count = 2 if arguments.turns else 1 + arguments.repeat * len(names)
    with (
        progress_bar(total=count, desc="bench", unit="run", leave=False, disable=None) as progress,
        ChildProcess(_PROGRAM, title="the process that trains") as process,
    ):
        progress.set_postfix_str("how long a write takes")
        answer = _run_job(process, job, scratch)
        if "result" not in answer:
            raise UnsupportedError(f"the training and its first checkpoints: {_why(answer)}")
        lengths = answer["result"]
        own_s = lengths["step_s"] if arguments.model == GPT2 else _STEP_OF_WRITE * lengths["write_s"]
        wanted_s = arguments.step_ms / 1000 if arguments.step_ms else own_s
        product_count = max(round((wanted_s - lengths["step_s"]) / lengths["product_s"]), 0)
        lengths |= {"wanted_step_s": wanted_s, "product_count": product_count}
        job = dataclasses.replace(job, product_count=product_count, every=arguments.every)
        progress.update()
        if arguments.turns:
            progress.set_postfix_str("turns")
            turns = dataclasses.replace(job, ways=tuple(names), step_count=arguments.turns, every=1)
            answer = _run_job(process, turns, scratch)
            if "result" not in answer:
                raise UnsupportedError(f"the turns: {_why(answer)}")
            return lengths, answer["result"]["rounds"], answer["result"]["notes"]
        for _ in range(arguments.repeat):
            results: dict[str, dict[str, Any]] = {}
            for name in order.sample(names, len(names)):
                progress.set_postfix_str(name)
                if name not in notes:
                    answer = _run_job(process, dataclasses.replace(job, ways=(name,)), scratch)
                    if "result" in answer:
                        results[name] = answer["result"]
                    else:
                        notes[name] = _why(answer)
                progress.update()
            rounds.append(results)
    return lengths, rounds, notes


def _job(arguments: argparse.Namespace) -> Job:
    """Return the job of finding out how long things take; others differ in a few attributes."""
    return Job(
        root="",
        size_bytes=arguments.size_mb * _MIB,
        device=arguments.device,
        thread_count=arguments.threads,
        engine=arguments.engine,
        step_count=arguments.steps,
        model=arguments.model,
        batch_count=arguments.batch,
        token_count=arguments.tokens,
        max_host_bytes=arguments.max_host_mb and arguments.max_host_mb * _MIB,
    )


def _soak(arguments: argparse.Namespace, scratch: str, facts: str) -> tuple[dict[str, Any], list[str]]:
    """Save many times in a row in each way; print and return what came of it, and what grew."""
    print(facts)
    results: dict[str, Any] = {}
    grown: list[str] = []
    with ChildProcess(_PROGRAM, title="the process that trains") as process:
        for name in arguments.names:
            job = dataclasses.replace(_job(arguments), ways=(name,), step_count=arguments.soak, soak=True)
            results[name] = _run_job(process, job, scratch)
            if "result" in results[name]:
                text, found = report_soak(results[name]["result"], growth_bytes_max=arguments.growth_mb * _MIB)
                grown += [f"{name}: {what}" for what in found]
            else:
                text = _why(results[name])
                grown.append(f"{name}: {text}")
            print(f"\n{name}: {text}")
    return results, grown


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
