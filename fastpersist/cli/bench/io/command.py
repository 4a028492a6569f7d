"""`fastpersist bench io DIR`: how fast TensorFile reads and writes tensors, beside fio with the same requests.

Here the command line becomes points and a setup; rows and report have files of their own. As in the other
benchmarks, nothing fails because a machine is slow: the exit code is 0 unless a row of TensorFile itself fails, or
--validate finds other bytes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch

from fastpersist import locked_tensor, require_engine
from fastpersist.cli.argument_types import positive, size, size_name
from fastpersist.cli.bench.io.points import (
    Direction,
    Memory,
    Point,
    Setup,
    is_block,
    thread_count_for,
)
from fastpersist.cli.bench.io.report import io_report_json, io_report_text
from fastpersist.cli.bench.io.rows import IoResult, measure_direction, plan_rows, resolve_engines
from fastpersist.cli.bench.io.worker import IoProcesses
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import check_places, require_space, scratch_directory, write_json
from fastpersist.cli.bench.report import command_line_text, machine_facts
from fastpersist.cli.bench.rows import exit_code
from fastpersist.cli.terminal import HelpFormatter, examples_text
from fastpersist.errors import ConfigError, StorageError
from fastpersist.transfer.arena import available_host_bytes

__all__ = ["add_parser", "run"]

_MIB = 1 << 20
_DEPTH_MAX = 4096


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `io` to the commands of `bench.command`."""
    parser = commands.add_parser(
        "io",
        help="speed of reading and writing tensors by TensorFile, block by block",
        description="Speed of reading and writing tensors by TensorFile, beside fio with the same requests. Sizes are "
        "4KiB, 8MiB, 1GiB …; options with several values make a row for each combination.",
        epilog=examples_text(
            "fastpersist bench io /mnt/nvme --block 1MiB 8MiB --depth 1 8",
            "fastpersist bench io /mnt/nvme --read --random --depth 64 256",
        ),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory; a scratch directory in it is removed")
    parser.add_argument("--read", action="store_true", help="only read (default: read and write)")
    parser.add_argument("--write", action="store_true", help="only write")
    parser.add_argument(
        "--size-mb", type=positive, default=1024, metavar="N", help="MiB that each process moves (default: 1024)"
    )
    parser.add_argument(
        "--block",
        type=size,
        nargs="+",
        action="extend",
        metavar="SIZE",
        help="bytes of one tensor, of one request (default: 8MiB, with --random 4KiB; at most --size-mb)",
    )
    parser.add_argument(
        "--depth",
        type=positive,
        nargs="+",
        action="extend",
        metavar="N",
        help="requests in flight (default: 8, with --random 64)",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of the engine threads")
    parser.add_argument(
        "--processes", type=positive, default=1, metavar="N", help="processes, each with its own file (default: 1)"
    )
    parser.add_argument(
        "--engine", nargs="+", action="extend", metavar="NAME", help="engines of fastpersist info (default: auto)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (default: cpu)")
    parser.add_argument(
        "--memory",
        choices=("locked", "plain"),
        help="host tensors: locked_tensor or torch.empty (default: locked, or plain where the limit forbids)",
    )
    parser.add_argument("--random", action="store_true", help="blocks in shuffled order; shows IOPS and processor time")
    parser.add_argument(
        "--sync",
        action="store_true",
        dest="one_by_one",
        help="one block after the other has been moved (default: all blocks as one list of requests)",
    )
    parser.add_argument("--validate", action="store_true", help="compare file and memory after each run")
    parser.add_argument("--in-place", action="store_true", help="write over a file that is there, not a fresh one")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="rounds (default: 3)")
    parser.add_argument("--no-fio", action="store_true", help="TensorFile alone")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        0, or 1 if a row of TensorFile failed.

    Raises:
        ConfigError: Options make no sense, or ask for what is not there.
        StorageError: DIR has no room or takes no files; or a result cannot be written.
    """
    directions = _check(arguments)
    check_places(arguments.directory, [arguments.json])
    setup, notes = _setup(arguments)
    facts = machine_facts(arguments.directory)
    results = _measure_all(arguments, setup, directions, notes)
    command_line = command_line_text(arguments)
    print(io_report_text(command_line, facts, notes, setup, results))
    if arguments.json:
        report = io_report_json(command_line, facts, notes, setup, results)
        write_json(arguments.json, report)
    return exit_code(result.measured for result in results)


def _check(arguments: argparse.Namespace) -> list[Direction]:
    """Fill in the defaults that depend on other options, and refuse what makes no sense; return the directions."""
    if arguments.one_by_one and arguments.depth not in (None, [1]):
        raise ConfigError("--sync has one block in flight at a time; leave --depth out")
    arguments.block = arguments.block or [4096 if arguments.random else min(8, arguments.size_mb) * _MIB]
    arguments.depth = [1] if arguments.one_by_one else arguments.depth or [64 if arguments.random else 8]
    arguments.engine = arguments.engine or ["auto"]
    for engine in arguments.engine:
        require_engine(engine)
    if max(arguments.depth) > _DEPTH_MAX:
        raise ConfigError(f"--depth {max(arguments.depth)}: no more than {_DEPTH_MAX} requests can be in flight")
    for block_bytes in arguments.block:
        if not is_block(block_bytes):
            raise ConfigError(
                f"--block {size_name(block_bytes)}: it must be 512, 1024, 2048 or a multiple of 4096 bytes; K and M "
                "count by 1000, KiB and MiB by 1024"
            )
        if block_bytes > arguments.size_mb * _MIB:
            raise ConfigError(f"--block {size_name(block_bytes)}: it must be at most --size-mb")
    directions: list[Direction] = []
    if arguments.write or not arguments.read:
        directions.append("write")
    if arguments.read or not arguments.write:
        directions.append("read")
    if arguments.in_place and "write" not in directions:
        raise ConfigError("--in-place is about writing, and --read asks for reading only")
    if arguments.device == "cuda":
        if arguments.memory:
            raise ConfigError("--memory is about host tensors; leave it out with --device cuda")
        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no CUDA device here; leave it out to measure host tensors")
    return directions


def _setup(arguments: argparse.Namespace) -> tuple[Setup, list[str]]:
    """Return what all rows share, and what there is to say about it."""
    size_bytes = arguments.size_mb * _MIB
    notes = []
    memory: Memory = arguments.memory or "locked"
    if arguments.device == "cpu":
        needed_bytes = arguments.processes * size_bytes
        if needed_bytes > available_host_bytes():
            raise ConfigError(
                f"{arguments.processes} × --size-mb {arguments.size_mb} is more memory than is available "
                f"({available_host_bytes() / 1e9:.1f} GB); ask for less"
            )
        if arguments.memory is None:
            try:
                locked_tensor((size_bytes,), torch.uint8)
            except StorageError as error:
                memory = "plain"
                notes.append(f"host tensors are plain ones (torch.empty), as so much cannot be locked: {error}")
        if not notes:
            kind = "page-locked (locked_tensor)" if memory == "locked" else "plain ones (torch.empty)"
            notes.append(f"host tensors are {kind}; every page has been touched before")
    else:
        notes += [
            f"the tensors are in the memory of a GPU: {torch.cuda.get_device_name()}",
            "TensorFile copies them through host memory with every engine, cufile included; GPUDirect is what "
            'fastpersist.save and load do with engine="cufile" and without checksums',
        ]
    setup = Setup(
        size_bytes=size_bytes,
        process_count=arguments.processes,
        thread_count=arguments.threads,
        random=arguments.random,
        one_by_one=arguments.one_by_one,
        in_place=arguments.in_place,
        validate=arguments.validate,
        memory=memory,
        device=arguments.device,
    )
    return setup, notes


def _measure_all(
    arguments: argparse.Namespace, setup: Setup, directions: Sequence[Direction], notes: list[str]
) -> list[IoResult]:
    """Measure every point in each direction; add what is to be said to the notes."""
    require_space(arguments.directory, setup.process_count * setup.size_bytes, instead="a smaller --size-mb")
    cache = PageCache(warm=False, whole_machine=False)
    results: list[IoResult] = []
    with scratch_directory(arguments.directory) as scratch:
        engines, engine_notes = resolve_engines(scratch, arguments.engine)
        notes += engine_notes
        with IoProcesses(setup) as processes:
            for direction in directions:
                points = [
                    Point(direction, engine, block_bytes, depth)
                    for engine in engines
                    for block_bytes in arguments.block
                    for depth in arguments.depth
                ]
                planned = plan_rows(points, setup, processes, with_fio=not arguments.no_fio)
                results += measure_direction(
                    planned,
                    setup,
                    processes,
                    cache,
                    path=os.path.join(scratch, direction),
                    round_count=arguments.repeat,
                )
    notes += _notes(arguments, setup, directions, engines, cache)
    return results


def _notes(
    arguments: argparse.Namespace,
    setup: Setup,
    directions: Sequence[Direction],
    engines: Sequence[str],
    cache: PageCache,
) -> list[str]:
    """Say how it was measured."""
    pace = "one after the other" if setup.one_by_one else "as one list of requests"
    notes = [
        f"each run moves all blocks, {pace}; the rows took turns, each round in another order; GB/s are 10^9 bytes"
    ]
    if setup.process_count > 1:
        notes.append(f"{setup.process_count} processes, each with its own file: from the first start to the last end")
    if "write" in directions and setup.in_place:
        notes.append(
            "write in place: over the blocks of a file that was there, synced; saves write fresh files, which cost more"
        )
    elif "write" in directions:
        notes.append(
            "write: a fresh file, preallocated; from opening it until its bytes and its name are synced (fio: its "
            "bytes); its removal is synced before the next run"
        )
    if "read" in directions:
        notes.append("read: from opening the file until all bytes are in memory; fio reads the very same file")
    if "read" in directions or setup.in_place:
        notes.append(cache.describe())
        notes.append("caches in the drive, or in the host of a virtual disk, cannot be dropped")
    if setup.validate:
        notes.append("after each run of TensorFile, outside its time, the file was compared with the memory")
    if not arguments.no_fio:
        notes += _fio_notes(arguments, setup, engines)
    return notes


def _fio_notes(arguments: argparse.Namespace, setup: Setup, engines: Sequence[str]) -> list[str]:
    notes = [
        "fio: the same engine, bs, iodepth, size and direct; writes with --end_fsync=1 and "
        f"{'over the same file' if setup.in_place else '--fallocate=native'}; from the first request on (opening and "
        "allocating are not in its time)"
    ]
    if setup.device != "cpu":
        notes.append("fio moves bytes between disk and host memory: its figure is without the copy to or from the GPU")
    if setup.random:
        notes.append(
            "processor time: of TensorFile all threads of its processes, in user space and in the kernel; of fio what "
            "it says itself (usr_cpu and sys_cpu of job_runtime)"
        )
    if any(engine.startswith("threads") for engine in engines) and not setup.one_by_one:
        counts = {thread_count_for(Point("read", "threads", 4096, depth), setup) for depth in arguments.depth}
        notes.append(
            "engine threads: fio has psync with a job for each thread "
            f"(--thread --numjobs={', '.join(map(str, sorted(counts)))}), a range of the file each"
        )
    return notes
