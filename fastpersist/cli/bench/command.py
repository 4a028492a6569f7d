"""`fastpersist bench save DIR` and `bench load DIR`: compares fastpersist and others with the speed of the disk.

This module also registers the other benches (io, overlap, ranks, rows, stream), which are packages.

It runs the rows of the other modules in one scratch directory inside DIR, always removes that, and reports. A slow
machine is no failure: the exit code is 0 unless a row of fastpersist fails.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import os
from collections.abc import Callable

import fastpersist
from fastpersist.cli.argument_types import positive
from fastpersist.cli.bench.fio import fio_read_row, fio_write_row, has_huge_pages
from fastpersist.cli.bench.io import command as bench_io
from fastpersist.cli.bench.io.rows import resolve_engines
from fastpersist.cli.bench.load_rows import PageCache, memcpy_rows, own_load_rows, peer_load_rows
from fastpersist.cli.bench.overlap import command as bench_overlap
from fastpersist.cli.bench.places import check_places, empty, require_space, scratch_directory, write_json
from fastpersist.cli.bench.ranks import command as bench_ranks
from fastpersist.cli.bench.report import StateResult, command_line_text, machine_facts, report_json, report_text
from fastpersist.cli.bench.row_store import command as bench_rows
from fastpersist.cli.bench.rows import Measured, Row, Sample, exit_code, measure
from fastpersist.cli.bench.save_rows import own_save_rows, peer_save_rows, usable_engines
from fastpersist.cli.bench.states import STATE_NAMES, StateRecipe, flatten
from fastpersist.cli.bench.stream import command as bench_stream
from fastpersist.cli.bench.worker import Job, Worker
from fastpersist.cli.terminal import HelpFormatter, examples_text
from fastpersist.errors import UnsupportedError
from fastpersist.transfer.arena import available_host_bytes

__all__ = ["add_parser", "run"]

_MIB = 1 << 20
_GIB = 1 << 30


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `bench` and its subcommands."""
    bench = subparsers.add_parser(
        "bench",
        help="measure saving and loading against fio and others, in a directory on the disk to measure",
        epilog=examples_text("fastpersist bench save /mnt/nvme", "fastpersist bench overlap --help"),
        formatter_class=HelpFormatter,
    )
    commands = bench.add_subparsers(dest="command", required=True, metavar="COMMAND")
    save = commands.add_parser(
        "save",
        help="time until a state is durable in a fresh file",
        epilog=examples_text(
            "fastpersist bench save /mnt/nvme", "fastpersist bench save /mnt/nvme --state one-tensor --json save.json"
        ),
        formatter_class=HelpFormatter,
    )
    load = commands.add_parser(
        "load",
        help="time until a state is in memory, read from the disk",
        epilog=examples_text("fastpersist bench load /mnt/nvme --quick", "fastpersist bench load /mnt/nvme --warm"),
        formatter_class=HelpFormatter,
    )
    for parser in (save, load):
        parser.add_argument(
            "directory", metavar="DIR", help="existing directory; gets a scratch directory, removed afterwards"
        )
        parser.add_argument(
            "--state",
            action="append",
            choices=STATE_NAMES,
            help="the state to save (default: gpt2-124m); may be repeated",
        )
        parser.add_argument("--repeat", type=positive, metavar="N", help="rounds (default: 7, with --quick 1)")
        parser.add_argument(
            "--size-mb",
            type=positive,
            default=1024,
            metavar="N",
            help="MiB of the state one-tensor (default: 1024)",
        )
        engines = parser.add_mutually_exclusive_group()
        engines.add_argument(
            "--engine",
            nargs="+",
            action="extend",
            metavar="NAME",
            help="rows for these (default: the engines of fastpersist info that work, except for cufile)",
        )
        engines.add_argument(
            "--all-engines", action="store_true", help="rows for the engines through the page cache, too"
        )
        parser.add_argument("--quick", action="store_true", help="small states, one round: to try it out")
        parser.add_argument("--json", metavar="FILE", help="write the results there as well")
        parser.set_defaults(run=run, parser=parser)
    load.add_argument("--warm", action="store_true", help="read files that are in the page cache")
    bench_io.add_parser(commands)
    bench_overlap.add_parser(commands)
    bench_ranks.add_parser(commands)
    bench_rows.add_parser(commands)
    bench_stream.add_parser(commands)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        0, or 1 if a row of fastpersist failed.

    Raises:
        ConfigError: DIR is no directory.
        StorageError: DIR has no room or takes no files; or the JSON file cannot be written.
    """
    arguments.repeat = arguments.repeat or (1 if arguments.quick else 7)
    arguments.state = arguments.state or ["gpt2-124m"]
    check_places(arguments.directory, [arguments.json])
    facts = machine_facts(arguments.directory)
    notes, states = _measure_all(arguments)
    command_line = command_line_text(arguments)
    print(report_text(arguments.command, command_line, facts, notes, states))
    if arguments.json:
        write_json(arguments.json, report_json(arguments.command, command_line, facts, notes, states))
    return exit_code(row for state in states for row in state.rows)


def _measure_all(arguments: argparse.Namespace) -> tuple[list[str], list[StateResult]]:
    """Measure every state; return the notes and the results."""
    measure_state = _measure_saves if arguments.command == "save" else _measure_loads
    results, notes = [], []
    with scratch_directory(arguments.directory) as scratch:
        for name in arguments.state:
            recipe = StateRecipe(name, quick=arguments.quick, one_tensor_bytes=arguments.size_mb * _MIB)
            result, state_notes = measure_state(arguments, recipe, scratch)
            results.append(result)
            notes += [note for note in state_notes if note not in notes]
            gc.collect()
    return notes, results


def _engines(arguments: argparse.Namespace, scratch: str) -> tuple[list[str], list[str]]:
    """Return the engines to measure by name, and notes on them.

    Raises:
        ConfigError, UnsupportedError: A named engine does not exist, or cannot be used.
    """
    if arguments.engine:
        return resolve_engines(scratch, arguments.engine)
    return usable_engines(scratch, buffered=arguments.all_engines), []


def _measure_saves(arguments: argparse.Namespace, recipe: StateRecipe, scratch: str) -> tuple[StateResult, list[str]]:
    payload_bytes = recipe.payload_bytes()
    require_space(scratch, payload_bytes, instead="a smaller --state")
    engines, engine_notes = _engines(arguments, scratch)
    job = Job("save", recipe, payload_bytes, engines)

    def before(suffix: str) -> str:
        return os.path.join(scratch, f"run{suffix}")

    def after() -> None:
        empty(scratch)

    # Every process has the state once; there are never more than two at a time.
    with _Denied(job, needed_bytes=2 * payload_bytes + _GIB) as denied:
        peaks = _peaks(job, before, after)
        state = recipe.build()
        rows = [
            fio_write_row(payload_bytes),
            *own_save_rows(state, engines),
            denied.row("fp.save"),
            *peer_save_rows(state),
        ]
        measured = measure(rows, arguments.repeat, before=before, after=after)
    notes = [
        "seconds run from the call until file and name are durable: writers that do not sync are followed by fsync of "
        "the file and of its directory; every run writes a fresh file, and its removal is synced before the next run",
        *_COMMON_NOTES,
        *engine_notes,
        "fio: --rw=write --direct=1 --ioengine=io_uring --bs=8M --iodepth=8 --numjobs=1 --fallocate=native "
        "--end_fsync=1, the state's size rounded up to whole blocks; from the first request to the end of the fsync",
    ]
    return _result(recipe, state.payload_bytes, state.tensor_count, measured, peaks | denied.peaks), notes


def _measure_loads(arguments: argparse.Namespace, recipe: StateRecipe, scratch: str) -> tuple[StateResult, list[str]]:
    payload_bytes = recipe.payload_bytes()
    require_space(scratch, 2 * payload_bytes, instead="a smaller --state")
    engines, engine_notes = _engines(arguments, scratch)
    job = Job("load", recipe, payload_bytes, engines)
    # --quick is for tests: it leaves the rest of the machine its caches.
    cache = PageCache(warm=arguments.warm, whole_machine=not arguments.quick)
    tensor_count = _write_files(recipe, scratch)
    huge_pages = has_huge_pages()

    def before(suffix: str) -> str:
        path = os.path.join(scratch, f"state{suffix}")
        cache.prepare(path)
        _give_memory_back()
        return path

    def after() -> None:
        """Leave the file for the next row."""

    with _Denied(job, needed_bytes=2 * payload_bytes + _GIB) as denied:
        peaks = _peaks(job, before, after)
        rows = [
            fio_read_row(".pt", huge_pages=huge_pages),
            *own_load_rows(recipe, payload_bytes, engines),
            denied.row("fp.load"),
            *peer_load_rows(payload_bytes),
            *(memcpy_rows(payload_bytes) if arguments.warm else ()),
        ]
        measured = measure(rows, arguments.repeat, before=before, after=after)
    empty(scratch)
    notes = [
        cache.describe(),
        "caches in the drive, or in the host of a virtual disk, cannot be dropped",
        "seconds run from the call until all bytes are in memory; mapped files have every page touched; all rows but "
        "those of safetensors read one file, which fio reads as well",
        "what malloc keeps of the rows before goes back to the kernel (malloc_trim), so each row pays for its pages, "
        "as the first load of a process does",
        *_COMMON_NOTES,
        *engine_notes,
        "fio: --rw=read --direct=1 --ioengine=io_uring --bs=8M --iodepth=8 --numjobs=1"
        + (" --iomem=mmaphuge: on huge pages" if huge_pages else ": on small pages (faster with vm.nr_hugepages=48)")
        + ", whole blocks of the file",
    ]
    return _result(recipe, payload_bytes, tensor_count, measured, peaks | denied.peaks), notes


def _give_memory_back() -> None:
    """Let malloc keep nothing of what was freed; only the GNU C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_COMMON_NOTES = (
    "GB/s are 10^9 bytes of tensors per second of the median; the rows took turns, each round in another order",
    "peak: the highest VmHWM of a process of its own, above what state or result take themselves",
    "io_uring denied: a process of its own under a seccomp filter that answers EPERM to every io_uring system call",
)


def _write_files(recipe: StateRecipe, scratch: str) -> int:
    """Write the files that are loaded, both with page-aligned data; return the number of tensors."""
    state = recipe.build()
    fastpersist.save(state.tree, os.path.join(scratch, "state.pt"))
    fastpersist.save(flatten(state.tree), os.path.join(scratch, "state.safetensors"))
    return state.tensor_count


class _Denied(contextlib.AbstractContextManager["_Denied"]):
    """The row that runs without io_uring, in a worker for the whole run. A context manager.

    Attributes:
        peaks: Peak of memory by row, there once it has run.
    """

    def __init__(self, job: Job, *, needed_bytes: int) -> None:
        self.peaks: dict[str, int | None] = {}
        self._worker: Worker | None = None
        self._needed_bytes = needed_bytes
        if needed_bytes <= available_host_bytes():
            self._worker = Worker(dataclasses.replace(job, deny_io_uring=True))

    def row(self, of_row: str) -> Row:
        """Return the form without io_uring of another row; waits until the worker is ready."""
        name = f"{of_row}, io_uring denied"
        worker = self._worker
        if worker is None:
            why_not = f"a second process needs {self._needed_bytes / 1e9:.1f} GB of memory, more than is available"
            return Row(name, "fastpersist", None, why_not=why_not)
        try:
            worker.rows()
        except UnsupportedError as error:
            return Row(name, "fastpersist", None, why_not=str(error))

        def run(path: str) -> Sample:
            sample, peak_bytes = worker.run(of_row, path)
            self.peaks.setdefault(name, peak_bytes)  # of the first run, which makes the ring
            return sample

        return Row(name, "fastpersist", run)

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.end()


def _peaks(job: Job, before: Callable[[str], str], after: Callable[[], None]) -> dict[str, int | None]:
    """Run each row once in a process that does nothing else; return the peaks of its memory by row."""
    peaks: dict[str, int | None] = {}
    with Worker(dataclasses.replace(job, apart=True)) as worker:
        for name, suffix in worker.rows().items():
            path = before(suffix)
            try:
                peaks[name] = worker.run(name, path)[1]
            except UnsupportedError:  # the row will fail in its turn as well, and say why
                peaks[name] = None
            finally:
                after()
    return peaks


def _result(
    recipe: StateRecipe,
    payload_bytes: int,
    tensor_count: int,
    measured: list[Measured],
    peaks: dict[str, int | None],
) -> StateResult:
    auto_engine = ""
    for result in measured:
        result.peak_bytes = peaks.get(result.row.name)
        if result.row.name in ("fp.save", "fp.load") and result.samples:
            auto_engine = result.samples[0].engine
    name = f"{recipe.name} (quick)" if recipe.quick else recipe.name
    return StateResult(name, payload_bytes, tensor_count, auto_engine, measured)
