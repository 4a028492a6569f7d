"""Shared by the programs here, beside the harness of `fastpersist bench`, which they import.

Import it first: without an installed fastpersist, or with a source tree that has no native module, the program ends
with one line that says what to do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

try:
    import fastpersist  # noqa: F401
except ImportError as error:
    raise SystemExit(
        f"{error}\nThe benchmarks measure the fastpersist that this Python imports. In a checkout: run `make setup` "
        f"once, then .venv/bin/python {sys.argv[0]} …"
    ) from None

from fastpersist.cli.terminal import run_command

__all__ = ["argument_parser", "run_benchmark"]


def argument_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs: DIR and --json."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory on the disk to measure; left as it was")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    return parser


def run_benchmark(main: Callable[[], int]) -> None:
    """Run a program like the commands of fastpersist: print a FastPersistError as one line."""
    sys.exit(run_command(main))
