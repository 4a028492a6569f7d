"""`fastpersist rows info | verify | pack | bench`: tables whose rows are gathered from disk."""

from __future__ import annotations

import argparse
import math

from fastpersist.cli.bench.row_store import command as bench_rows
from fastpersist.cli.terminal import (
    EXIT_DAMAGED,
    EXIT_GOOD,
    EXIT_USAGE,
    HelpFormatter,
    examples_text,
    print_error,
    printable,
    size_text,
)
from fastpersist.cli.verify import print_report

__all__ = ["add_parser", "run_info", "run_pack", "run_verify"]

_EPILOG = """\
examples:
  fastpersist rows info feat.npy
  fastpersist rows verify feat.npy
  fastpersist rows pack feat.npy packed.npy --order degree.npy
  fastpersist rows bench /mnt/nvme

A table is a .npy file or a tensor of a safetensors file, as fastpersist.write_rows,
numpy.save and safetensors write them.

pack puts rows that are asked for often next to each other, so that one read brings
several. fp.RowStore opens the packed table, and callers keep their ids: where each row
lies is in packed.npy.rows.safetensors, which has to stay beside the table.

Exit codes: 0 good, 1 damaged, 2 usage or not found.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its subcommands."""
    rows = subparsers.add_parser(
        "rows",
        help="look into, check and reorder tables of rows",
        description="Look into, check and reorder tables of rows.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = rows.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser(
        "info",
        help="tell what is in a table",
        epilog=examples_text("fastpersist rows info feat.npy", "fastpersist rows info graph.safetensors --tensor feat"),
        formatter_class=HelpFormatter,
    )
    info.add_argument("table", metavar="FILE", help="a .npy or safetensors file")
    info.add_argument("--tensor", metavar="NAME", help="of a safetensors file with several")
    info.set_defaults(run=run_info)
    verify = commands.add_parser(
        "verify",
        help="compare the checksums of tables",
        epilog=examples_text("fastpersist rows verify feat.npy packed.npy"),
        formatter_class=HelpFormatter,
    )
    verify.add_argument("tables", metavar="FILE", nargs="+", help="a table that fastpersist wrote")
    verify.add_argument("--quiet", action="store_true", help="print only damage")
    verify.set_defaults(run=run_verify)
    pack = commands.add_parser(
        "pack",
        help="write a table anew, rows with the highest score first",
        epilog=examples_text("fastpersist rows pack feat.npy packed.npy --order degree.npy"),
        formatter_class=HelpFormatter,
    )
    pack.add_argument("source", metavar="SRC", help="a .npy file, or a safetensors file with one tensor")
    pack.add_argument("out", metavar="DST", help="the new table, .npy or .safetensors; nothing may be there")
    pack.add_argument("--order", metavar="FILE", help="a table of one number for each row, such as its degree")
    pack.add_argument("--memory", metavar="SIZE", help="such as 4GiB (default: half of what is available)")
    pack.set_defaults(run=run_pack)
    bench_rows.add_parser(commands, name="bench")


def run_info(arguments: argparse.Namespace) -> int:
    """Print what is in a table.

    Raises:
        ConfigError, CheckpointNotFoundError, FormatError, UnsupportedError, StorageError: As `RowStore`.
    """
    from fastpersist.rows.opening import open_rows
    from fastpersist.rows.sidecar import read_sidecar

    found = open_rows(arguments.table, tensor=arguments.tensor)
    piece = found.pieces[0]
    shape = (found.row_count, *found.row_shape)
    elements = math.prod(found.row_shape)
    print(
        f"{printable(piece.path)}: {found.row_count} rows of {elements} × {str(found.dtype).removeprefix('torch.')}, "
        f"{found.row_bytes} bytes each"
    )
    print(f"  shape {shape}, {size_text(found.row_count * found.row_bytes)} from offset {piece.offset_bytes} on")
    print("  packed: ids are translated" if found.position_of_row is not None else "  ids are positions")
    print("  checksums: " + ("none" if read_sidecar(piece.path) is None else "CRC-32 of each MiB"))
    return EXIT_GOOD


def run_verify(arguments: argparse.Namespace) -> int:
    """Check all tables, even after one that is damaged or cannot be read."""
    from fastpersist import FastPersistError, verify_rows

    code = EXIT_GOOD
    for path in arguments.tables:
        try:
            report = verify_rows(path)
        except FastPersistError as error:
            print_error(str(error))
            code = EXIT_USAGE
            continue
        if not report.ok:
            code = max(code, EXIT_DAMAGED)
        if not (arguments.quiet and report.ok):
            print_report(report, quiet=arguments.quiet)
    return code


def run_pack(arguments: argparse.Namespace) -> int:
    """Pack a table, and say what that took.

    Raises:
        ConfigError, CheckpointNotFoundError, FormatError, UnsupportedError, StorageError: As `pack_rows`.
    """
    import torch

    from fastpersist import RowStore, pack_rows

    order = None
    if arguments.order:
        with RowStore(arguments.order, cache_bytes=0) as scores:
            order = scores.gather(torch.arange(len(scores)))
    report = pack_rows(arguments.source, arguments.out, order=order, memory_bytes=arguments.memory)
    size = size_text(report.row_count * report.row_bytes)
    passes = "once" if report.pass_count == 1 else f"{report.pass_count} times"
    print(f"{printable(arguments.out)}: {report.row_count} rows, {size}; the source was read {passes}")
    return EXIT_GOOD
