"""`fastpersist bench stream DIR`: token passes of a model that does not fit in memory, by us and by others, in turn.

A model is made in a scratch directory inside DIR, which is always removed. Nothing fails because a machine is slow: the
exit code is 0 unless our own row fails, or generates other tokens than the mapped model.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from fastpersist.cli.argument_types import positive, size, size_name, whole_number
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import (
    check_device,
    check_places,
    require_space,
    scratch_directory,
    write_json,
)
from fastpersist.cli.bench.report import command_line_text, machine_facts
from fastpersist.cli.bench.rows import Measured, Row, exit_code, measure
from fastpersist.cli.bench.stream.memory_limit import MemoryLimit
from fastpersist.cli.bench.stream.model import FORM_COUNT, MODEL_NAMES, ModelFiles, make_model, weight_sizes
from fastpersist.cli.bench.stream.report import stream_json, stream_text
from fastpersist.cli.bench.stream.rows import Case, PassSample, WayProcess, bandwidth_rows, way_rows
from fastpersist.cli.bench.stream.ways import BUILDERS, MAPPED, ON_DEVICES, OURS, PACKAGES, RESIDENT
from fastpersist.cli.terminal import HelpFormatter, examples_text
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.transfer.arena import available_host_bytes

__all__ = ["add_parser", "run"]

_RING_BYTES_MIN = 36 << 20  # of models whose modules are smaller than the smallest unit
_MEMORY_PARTS = {"half": 2, "quarter": 4, "all": None}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `stream` to the commands of `bench.command`."""
    parser = commands.add_parser(
        "stream",
        help="token passes of a model whose weights stay on disk, by fp.stream and by others",
        description="Token passes of a model whose weights stay on disk: fp.stream, transformers, accelerate and "
        "mapped files, and diffusers, AirLLM and DeepSpeed where these are installed, against what disk and processor "
        "allow. Needs transformers and accelerate.",
        epilog=examples_text(
            "fastpersist bench stream /mnt/nvme --model small", "fastpersist bench stream /mnt/nvme --budget 1GiB half"
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="existing directory; gets three forms of the model, and one for each of the last three "
        "packages, removed afterwards",
    )
    parser.add_argument(
        "--model", choices=MODEL_NAMES, default="large", help="a Llama of 4.8 GB or 97 MB (default: large)"
    )
    parser.add_argument("--layers", type=positive, metavar="N", help="decoder layers (default: large 12, small 16)")
    parser.add_argument(
        "--budget",
        type=_budget,
        nargs="+",
        action="extend",
        metavar="SIZE",
        help="of fp.stream: such as 1GiB, ring (little more than that), half (of the model); a row for each (default: "
        "ring half)",
    )
    parser.add_argument(
        "--memory",
        choices=_MEMORY_PARTS,
        default="half",
        help="part of the model that the cgroup of a way has room for (default: half)",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu, cuda or cuda:N, to compute on (default: cpu)"
    )
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="prompts at once (default: 1)")
    parser.add_argument("--prompt-len", type=positive, default=8, metavar="N", help="tokens of each (default: 8)")
    parser.add_argument(
        "--gen-len",
        type=whole_number(2),
        default=5,
        metavar="N",
        help="tokens to generate, at least 2: the first is no token pass (default: 5)",
    )
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.set_defaults(run=run, parser=parser)


def _budget(text: str) -> int | str:
    return text if text in ("ring", "half") else size(text)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        0, or 1 if our row failed.

    Raises:
        ConfigError: DIR is no directory, or the budget is more than the memory.
        StorageError: DIR has no room or takes no files; or the JSON file cannot be written.
        UnsupportedError: A package is missing.
    """
    _require_packages()
    check_device(arguments.device)
    check_places(arguments.directory, [arguments.json])
    sizes_bytes = weight_sizes(arguments.model, arguments.layers)
    weight_bytes = sum(sizes_bytes)
    form_count = FORM_COUNT + sum(find_spec(name) is not None for name in PACKAGES.values())
    require_space(arguments.directory, form_count * weight_bytes, instead="a smaller --layers")
    case, notes = _case(arguments, weight_bytes, max(sizes_bytes))
    facts = machine_facts(arguments.directory)
    with scratch_directory(arguments.directory) as scratch:
        files = make_model(scratch, arguments.model, arguments.layers)
        results = _measure_ways(arguments, case, files, scratch, notes)
    command_line = command_line_text(arguments)
    sizes = {"weight_bytes": weight_bytes, "pass_bytes": files.pass_bytes}
    print(stream_text(command_line, facts, notes, case, sizes, results))
    if arguments.json:
        write_json(arguments.json, stream_json(command_line, facts, notes, case, sizes, results))
    return exit_code(results)


def _require_packages() -> None:
    missing = [name for name in ("transformers", "accelerate", "safetensors") if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f'this command needs {", ".join(missing)}: pip install "fastpersist[huggingface]"')


def _case(arguments: argparse.Namespace, weight_bytes: int, largest_bytes: int) -> tuple[Case, list[str]]:
    """Return what is generated, and what there is to say about it."""
    notes = []
    part = _MEMORY_PARTS[arguments.memory]
    memory_bytes = None if part is None else weight_bytes // part
    if memory_bytes is not None:
        try:
            MemoryLimit(f"fastpersist-bench-{os.getpid()}").close()
        except UnsupportedError as error:
            memory_bytes = None
            notes.append(f"memory was NOT held down: {error}")
    named = {"ring": max(5 * largest_bytes // 2, _RING_BYTES_MIN), "half": weight_bytes // 2}
    wanted = arguments.budget or ["ring", *(["half"] if arguments.memory != "quarter" else [])]
    budgets = tuple(named.get(one, one) for one in wanted)
    if memory_bytes is not None and max(budgets) > memory_bytes:
        raise ConfigError(
            f"--budget {size_name(max(budgets))} is more than --memory {arguments.memory} ({size_name(memory_bytes)}) "
            "leaves for weights"
        )
    case = Case(arguments.batch_size, arguments.prompt_len, arguments.gen_len, budgets, memory_bytes, arguments.device)
    if memory_bytes is not None:
        notes.append(
            f"each way runs in a memory cgroup of {memory_bytes / 1e9:.2f} GB for weights and their pages in the page "
            f"cache, {case.activation_bytes / 1e9:.2f} GB for all else, and what the process takes without a model"
        )
    return case, notes


def _measure_ways(
    arguments: argparse.Namespace, case: Case, files: ModelFiles, scratch: str, notes: list[str]
) -> list[Measured]:
    """Run all rows in turn; add what is to be said to the notes."""
    cache = PageCache(warm=False, whole_machine=False)

    def before(suffix: str) -> str:
        peers = glob.glob(os.path.join(scratch, "peers", "**", f"*{suffix}"), recursive=True)
        for path in (*files.paths(suffix), *peers):
            cache.prepare(path)
        return files.directory

    processes = [WayProcess(OURS, case, files, scratch, budget_bytes) for budget_bytes in case.budgets]
    processes += [WayProcess(way, case, files, scratch) for way in BUILDERS if way != OURS]
    with contextlib.ExitStack() as closing:
        for process in processes:
            closing.callback(process.close)
        rows = [*bandwidth_rows(files), *way_rows(processes)]
        for at, row in enumerate(rows):
            package = PACKAGES.get(row.name, "")
            if package and find_spec(package) is None:
                rows[at] = Row(row.name, row.kind, None, why_not=f"not installed: pip install {package}")
            elif row.kind == "peer" and case.device != "cpu" and row.name not in ON_DEVICES:
                rows[at] = Row(row.name, row.kind, None, why_not="not measured on a device")
        needed_bytes = int(1.2 * files.weight_bytes) + case.activation_bytes
        if case.device == "cpu" and needed_bytes > available_host_bytes():
            rows[-1] = Row(RESIDENT, "ceiling", None, why_not=f"needs {needed_bytes / 1e9:.1f} GB of memory")
        results = measure(rows, arguments.repeat, before=before, after=lambda: None)
    _compare_tokens(results)
    notes += [
        "token pass: from token to token, choosing it included; the median of a generation, then of the rounds, in "
        "which the rows took turns, each round in another order; first token: from building the model on",
        "limit: the larger of (bytes of a pass / best read rate) and (a pass with the model in memory); one read: of "
        "what a pass needs, all weights but the embedding",
        cache.describe(),
        "caches in the drive, or in the host of a virtual disk, cannot be dropped",
        f"accelerate: its folder was written before ({files.offload_s:.1f} s, beside the other forms)",
        "peak: VmHWM of the process, mapped pages of files included; the cgroup counts all pages of files read through "
        "the page cache; written: by the process, to the disk",
    ]
    return results


def _compare_tokens(results: Sequence[Measured]) -> None:
    """Fail our row if it generated other tokens than the mapped model, whose tensors have the same alignment.

    On a device the model in its memory is compared with, as no mapped one computes there.
    """

    def tokens_of(one: Measured) -> list[Any]:
        return [sample.answer["tokens"] for sample in one.samples if isinstance(sample, PassSample)]

    named = {one.row.name: one for one in results if one.samples}
    right = named.get(MAPPED) or named.get(RESIDENT)
    for one in results:
        if one.row.kind == "fastpersist" and right and any(tokens != tokens_of(right)[0] for tokens in tokens_of(one)):
            one.note = f"failed: other tokens than {right.row.name}"
