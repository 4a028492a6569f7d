"""The rows of `bench io`: TensorFile at each point, and fio at the same one.

The rows of one direction take turns (`bench.rows.measure`). All reads use the same files, written before and dropped
from the page cache before each run; each write makes fresh files, unless it is in place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastpersist import TensorFile
from fastpersist.cli.argument_types import size_name
from fastpersist.cli.bench.fio import FioJob, fio_row, run_fio
from fastpersist.cli.bench.io.points import (
    Point,
    Setup,
    file_paths,
    fio_engine,
    thread_count_for,
)
from fastpersist.cli.bench.io.worker import IoProcesses
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import remove_files
from fastpersist.cli.bench.rows import Measured, Row, measure
from fastpersist.errors import StorageError, UnsupportedError

__all__ = [
    "IoResult",
    "PlannedRow",
    "fio_job",
    "measure_direction",
    "plan_rows",
    "resolve_engine",
    "resolve_engines",
]

_TENSOR_FILE = "TensorFile"


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row of the table.

    Attributes:
        who: "TensorFile" or "fio".
        point: What the row does.
        row: How to run the row.
        ceiling: Name of the row that it is compared with; empty if there is none.
    """

    who: str
    point: Point
    row: Row
    ceiling: str = ""


@dataclass(frozen=True, slots=True)
class IoResult:
    """What came of a row.

    Attributes:
        planned: The row.
        measured: The samples of the row.
        ratio: The row's rate divided by the rate of its ceiling; None if one of them has no rate.
    """

    planned: PlannedRow
    measured: Measured
    ratio: float | None = None


def resolve_engine(directory: str, engine: str) -> tuple[str, str]:
    """Find out what an engine name stands for in a directory, by writing a block there.

    Returns:
        The name of the engine, and why it cannot be used; one of the two is empty.

    Raises:
        ConfigError: There is no such engine.
    """
    path = os.path.join(directory, "engine")
    try:
        with TensorFile(path, "w", engine=engine) as file:
            file.write(torch.zeros(4096, dtype=torch.uint8))
            return file.engine, ""
    except (StorageError, UnsupportedError) as error:
        return "", str(error)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def resolve_engines(directory: str, asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """Find out which of some engines can be used in a directory.

    Returns:
        The names of the engines themselves, each once; and what is to be said about those that were asked for.

    Raises:
        ConfigError: There is no such engine.
        UnsupportedError: None of them can be used.
    """
    engines: list[str] = []
    notes, reasons = [], []
    for name in dict.fromkeys(asked):
        engine, why_not = resolve_engine(directory, name)
        if why_not:
            reasons.append(f"engine {name} is left out: {why_not}")
        elif engine not in engines:
            engines.append(engine)
        if name == "auto" and engine:
            notes.append(f'engine="auto" is {engine} here')
    if not engines:
        raise UnsupportedError("; ".join(reasons))
    return engines, notes + reasons


def plan_rows(points: Sequence[Point], setup: Setup, processes: IoProcesses, *, with_fio: bool) -> list[PlannedRow]:
    """Return the rows of some points, each with its yardstick beside it.

    Args:
        points: What the rows do; the engines can be used.
        setup: What all rows share.
        processes: The processes that run our rows.
        with_fio: Whether rows of fio are added.
    """
    planned: list[PlannedRow] = []
    for point in dict.fromkeys(points):
        fio = _fio_row(point, setup) if with_fio else None
        rows = [PlannedRow(_TENSOR_FILE, point, _own_row(point, processes), fio.name if fio else "")]
        if fio is not None:
            rows.append(PlannedRow("fio", point, fio, fio.name))
        planned += [one for one in rows if one.row.name not in {other.row.name for other in planned}]
    return planned


def _name(who: str, point: Point) -> str:
    return f"{who} {point.direction} {size_name(point.block_bytes)} × {point.depth}, {point.engine}"


def _own_row(point: Point, processes: IoProcesses) -> Row:
    return Row(_name(_TENSOR_FILE, point), "fastpersist", lambda path: processes.run(point, path))


def _fio_row(point: Point, setup: Setup) -> Row:
    job = fio_job(point, setup)
    if job is None:
        why_not = f"fio makes no system calls such as those of {point.engine}"
        return Row(_name("fio", point), "ceiling", None, why_not=why_not)
    return fio_row(_name("fio", point), lambda path: run_fio(job, file_paths(path, setup.process_count)))


def fio_job(point: Point, setup: Setup) -> FioJob | None:
    """Return what fio must do to do what TensorFile does at a point; None if it cannot.

    psync has one request at a time, so there are as many jobs as TensorFile has threads, a range of the file each.
    """
    engine = fio_engine(point.engine)
    if engine is None:
        return None
    name, direct = engine
    depth = 1 if setup.one_by_one or name == "psync" else point.depth
    sharing_count = 1
    if name == "psync" and not setup.one_by_one:
        sharing_count = min(thread_count_for(point, setup), point.depth, point.block_count(setup))
    return FioJob(
        point.direction,
        point.block_count(setup) * point.block_bytes,
        engine=name,
        direct=direct,
        block_bytes=point.block_bytes,
        depth=depth,
        random=setup.random,
        sharing_count=sharing_count,
        in_place=setup.in_place,
    )


def measure_direction(
    planned: Sequence[PlannedRow],
    setup: Setup,
    processes: IoProcesses,
    cache: PageCache,
    *,
    path: str,
    round_count: int,
) -> list[IoResult]:
    """Run all rows of one direction, round by round.

    Args:
        planned: The rows, at least one.
        setup: What all rows share.
        processes: The processes, which lay out what is read or written over.
        cache: Drops the file from the page cache before each run.
        path: The path of the rows' file, or what the names of the processes' files begin with; no file is left there.
        round_count: The number of samples of each row.
    """
    keeps_files = planned[0].point.direction == "read" or setup.in_place

    def before(suffix: str) -> str:
        if keeps_files:
            for one in file_paths(path, setup.process_count):
                cache.prepare(one)
        return path

    def after() -> None:
        if not keeps_files:
            remove_files(file_paths(path, setup.process_count))

    if keeps_files:
        processes.lay_out(path)
    try:
        measured = measure([one.row for one in planned], round_count, before=before, after=after)
    finally:
        remove_files(file_paths(path, setup.process_count))
    by_name = {one.row.name: one for one in measured}
    return [
        IoResult(one, mine, _ratio(mine, by_name.get(one.ceiling))) for one, mine in zip(planned, measured, strict=True)
    ]


def _ratio(measured: Measured, ceiling: Measured | None) -> float | None:
    if ceiling is None or not ceiling.samples or not measured.samples:
        return None
    return measured.bytes_per_s / ceiling.bytes_per_s
