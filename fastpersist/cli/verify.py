"""`fastpersist verify PATH…`: reads whole files and checkpoints, and reports damaged tensors."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from fastpersist.cli.terminal import (
    EXIT_DAMAGED,
    EXIT_GOOD,
    EXIT_USAGE,
    print_error,
    printable,
    size_text,
)

if TYPE_CHECKING:
    from fastpersist import Damage, VerifyReport

__all__ = ["add_parser", "print_report", "run"]

_EPILOG = """\
examples:
  fastpersist verify runs/a
  fastpersist verify model.pt optimizer.pt --json

--json prints a list with one object per PATH, in their order:
  path
  ok                    the check found no damage
  has_checksums         false: only the structure could be checked
  checked_bytes         bytes that were compared with a CRC-32
  damages               list of {message, tensors, record, offset_bytes, file}: tensors
                        are the damaged names, offset_bytes is from the file's start and
                        null for damage without a place, file is relative to the
                        directory and "" where PATH is a file
  leftovers             of a directory of checkpoints: names of unfinished and replaced
                        ones, which are no damage; the next save removes them
  notes                 remarks that are no damage, such as foreign files in a checkpoint
  error                 why the file could not be read, else null

Exit codes: 0 all good, 1 some are damaged, 2 some could not be read or checked.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "verify",
        help="read whole files and checkpoints, and report damaged tensors",
        description="Read whole files and checkpoints, and compare their checksums. This runs no code from them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="a file written by fastpersist, torch.save or safetensors, a checkpoint, or a directory of those",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="print only damage, and no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check all paths, even after a damaged one."""
    from fastpersist import FastPersistError, verify

    progress = sys.stderr.isatty() and not arguments.quiet
    code = EXIT_GOOD
    results = []
    for path in arguments.paths:
        try:
            report = verify(path, progress=progress)
        except FastPersistError as error:
            print_error(str(error))
            results.append(_unread_as_json(path, str(error)))
            code = EXIT_USAGE
            continue
        if not report.ok:
            code = max(code, EXIT_DAMAGED)
        results.append(_as_json(report))
        if not arguments.json and not (arguments.quiet and report.ok):
            print_report(report, quiet=arguments.quiet)
    if arguments.json:
        print(json.dumps(results, indent=2))
    return code


def print_report(report: VerifyReport, *, quiet: bool) -> None:
    """Print what a check found."""
    path = printable(report.path)
    if not report.ok:
        print(f"{path}: DAMAGED")
        for damage in report.damages:
            print(f"  {_damage_text(damage)}")
    elif report.has_checksums:
        print(f"{path}: ok, {size_text(report.checked_bytes)} compared with their CRC-32s")
    else:
        print(f"{path}: ok as far as can be told: it has no checksums, so only its structure was checked")
    for note in () if quiet else report.notes:
        print(f"  {printable(note)}")
    for name in () if quiet else report.leftovers:
        print(f"  {printable(name)} is no checkpoint: it is being written, or the next save removes it")


def _damage_text(damage: Damage) -> str:
    message = printable(damage.message)
    if damage.offset_bytes is None:
        return message
    if damage.file:  # the message begins with it
        return f"{message} (at offset {damage.offset_bytes})"
    return f"at offset {damage.offset_bytes}: {message}"


def _as_json(report: VerifyReport) -> dict[str, object]:
    return {
        "path": report.path,
        "ok": report.ok,
        "has_checksums": report.has_checksums,
        "checked_bytes": report.checked_bytes,
        "damages": [
            {
                "message": damage.message,
                "tensors": list(damage.tensors),
                "record": damage.record,
                "offset_bytes": damage.offset_bytes,
                "file": damage.file,
            }
            for damage in report.damages
        ],
        "leftovers": list(report.leftovers),
        "notes": list(report.notes),
        "error": None,
    }


def _unread_as_json(path: str, error: str) -> dict[str, object]:
    return {
        "path": path,
        "ok": False,
        "has_checksums": False,
        "checked_bytes": 0,
        "damages": [],
        "leftovers": [],
        "notes": [],
        "error": error,
    }
