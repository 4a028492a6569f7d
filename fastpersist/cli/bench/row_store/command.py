"""`fastpersist bench rows DIR`: rows gathered from a table on disk, by us and by others, against fio.

A table is written to a scratch directory inside DIR, which is always removed. Nothing fails because a machine is slow:
the exit code is 0 unless our own row fails, or returns wrong rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from fastpersist.cli.argument_types import positive, size, size_name
from fastpersist.cli.bench.io.report import cpu_us_per_io, io_per_s, io_samples
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import (
    check_device,
    check_places,
    require_space,
    scratch_directory,
    write_json,
)
from fastpersist.cli.bench.report import (
    command_line_text,
    facts_text,
    machine_facts,
    notes_text,
    report_head,
    samples_json,
    table,
)
from fastpersist.cli.bench.row_store.ways import (
    FEW_COUNT,
    Case,
    cold_rows,
    device_rows,
    few_rows,
    has_lmdb,
    hit_rows,
    write_table,
)
from fastpersist.cli.bench.rows import Measured, Row, exit_code, measure
from fastpersist.cli.terminal import HelpFormatter, examples_text
from fastpersist.errors import ConfigError
from fastpersist.transfer.arena import available_host_bytes

__all__ = ["add_parser", "run"]

_SIZE_MIN_BYTES = 8192  # else whole rows of 264 bytes do not fill a block of 4096, which fio reads
_FEW_ROW_BYTES = 264
_FEW_ROWS = 200 * FEW_COUNT
_HIT_BYTES = 1 << 30
_COLUMNS = ["way", "median s", "min – max s", "rows/s", "of the limit", "processor µs a row"]
_FEW_COLUMNS = [*_COLUMNS, "µs a request", "99 % of them"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], *, name: str = "rows") -> None:
    """Add it as `rows` to the commands of `bench.command`, and as `bench` to those of `rows`."""
    parser = commands.add_parser(
        name,
        help="rows gathered from a table on disk, by fp.RowStore and by others",
        description="Rows gathered from a table on disk, at random: fp.RowStore, mapped files and threads, against "
        "fio; small requests; and rows that are in memory, against torch.index_select.",
        epilog=examples_text(f"fastpersist {'rows bench' if name == 'bench' else 'bench rows'} /mnt/nvme --size 2GiB"),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory; gets a table, removed afterwards")
    parser.add_argument("--size", type=size, default=8 << 30, metavar="SIZE", help="of the table (default: 8GiB)")
    parser.add_argument(
        "--row-bytes", type=_row_bytes, nargs="+", default=[512, 4096], metavar="N", help="default: 512 4096"
    )
    parser.add_argument("--depth", type=positive, nargs="+", default=[64, 256], metavar="N", help="default: 64 256")
    parser.add_argument(
        "--count", type=positive, default=200_000, metavar="N", help="rows of a sample (default: 200000)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cuda or cuda:N: rows in memory are brought there, too"
    )
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.set_defaults(run=run, parser=parser)


def _row_bytes(text: str) -> int:
    value = positive(text)
    if value % 512:
        raise argparse.ArgumentTypeError("must be a multiple of 512, which fio can read past the page cache")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, write the JSON.

    Returns:
        0, or 1 if our row failed.

    Raises:
        ConfigError: DIR is no directory; or a table of --size would be too small.
        StorageError: DIR has no room or takes no files; or the JSON file cannot be written.
    """
    check_device(arguments.device)
    least_bytes = max(_SIZE_MIN_BYTES, *arguments.row_bytes)
    if arguments.size < least_bytes:
        raise ConfigError(
            f"--size {size_name(arguments.size)} is too small: a table needs at least {size_name(least_bytes)}, "
            "for a row and for a block that is read"
        )
    check_places(arguments.directory, [arguments.json])
    require_space(arguments.directory, arguments.size * (3 if has_lmdb() else 1), instead="a smaller --size")
    facts = machine_facts(arguments.directory)
    parts: list[tuple[str, list[Measured]]] = []
    cache = PageCache(warm=False, whole_machine=False)
    with scratch_directory(arguments.directory) as scratch:
        path = os.path.join(scratch, "table")

        def measured(title: str, rows: Sequence[Row]) -> None:
            def before(_suffix: str) -> str:
                cache.prepare(path)
                return path

            parts.append((title, measure(rows, arguments.repeat, before=before, after=lambda: None)))

        for row_bytes in arguments.row_bytes:
            made = write_table(path, row_bytes, arguments.size)
            for depth in arguments.depth:
                case = Case(made, arguments.count, depth)
                measured(f"{case.count} rows of {row_bytes} bytes, depth {depth}", cold_rows(case))
        made = write_table(path, _FEW_ROW_BYTES, arguments.size)
        measured(
            f"{_FEW_ROWS} rows of {_FEW_ROW_BYTES} bytes, {FEW_COUNT} at a time (time = number of requests × median)",
            few_rows(Case(made, _FEW_ROWS, 64)),
        )
        hit_bytes = min(_HIT_BYTES, arguments.size, available_host_bytes() // 8)
        made = write_table(path, 1024, hit_bytes)
        hits = Case(made, min(arguments.count, 100_000), 256)
        measured("rows of 1024 bytes that are in memory", hit_rows(hits))
        if arguments.device != "cpu":
            measured(f"the same, brought to {arguments.device}", device_rows(hits, torch.device(arguments.device)))
    notes = [
        "rows are drawn anew for each sample, uniformly, and each gather is checked; rows took turns, each round in "
        "another order",
        "limit: the first row of a table; fio reads blocks of a row's length (4096 in requests of 48), ours may read "
        "two wanted blocks that lie close together at once",
        cache.describe(),
        f"read_ahead_kb of the disk: {facts['read_ahead_kb']}, which mapped files depend on",
    ]
    command_line = command_line_text(arguments)
    print(_text(command_line, facts, notes, parts))
    if arguments.json:
        values = [{"title": title, "rows": [_values(one) for one in results]} for title, results in parts]
        write_json(arguments.json, report_head("rows", command_line, facts, notes) | {"tables": values})
    return exit_code(one for _, results in parts for one in results)


def _values(one: Measured) -> dict[str, Any]:
    values: dict[str, Any] = {"name": one.row.name, "kind": one.row.kind, "note": one.note}
    if not one.samples:
        return values
    slow_s = [sample.p99_s for sample in io_samples(one) if sample.p99_s is not None]
    values |= samples_json(one)
    return values | {"rows_per_s": io_per_s(one), "cpu_us_a_row": cpu_us_per_io(one), "p99_s": slow_s}


def _text(
    command_line: str, facts: dict[str, Any], notes: list[str], parts: Sequence[tuple[str, list[Measured]]]
) -> str:
    lines = [facts_text(command_line, facts)]
    for title, results in parts:
        limit = next((io_per_s(one) for one in results if one.row.kind == "ceiling" and one.samples), None)
        few = any(sample.p99_s is not None for one in results for sample in io_samples(one))
        cells = [_cells(one, limit) + (_request_cells(one) if few else []) for one in results]
        lines += ["", title, "", table(_FEW_COLUMNS if few else _COLUMNS, cells)]
        lines += [f"{one.row.name}: {one.note}" for one in results if one.note]
    return "\n".join([*lines, "", notes_text(notes)])


def _cells(one: Measured, limit: float | None) -> list[str]:
    if not one.samples:
        return [one.row.name, "–", "", "", "", ""]
    cpu_us = cpu_us_per_io(one)
    return [
        one.row.name,
        *one.time_cells()[:2],
        f"{io_per_s(one):.0f}",
        "" if limit is None else f"{io_per_s(one) / limit:.2f}",
        f"{statistics.median(cpu_us):.2f}" if cpu_us else "",
    ]


def _request_cells(one: Measured) -> list[str]:
    """Return the time of a request, in microseconds, and what 99 % of them take at most."""
    if not one.samples:
        return ["", ""]
    slow_s = [sample.p99_s for sample in io_samples(one) if sample.p99_s is not None]
    request_s = one.median_s * FEW_COUNT / io_samples(one)[0].io_count
    return [f"{1e6 * request_s:.0f}", f"{1e6 * statistics.median(slow_s):.0f}" if slow_s else ""]
