"""`fastpersist --completion SHELL`: a script with which a shell completes our commands and options.

The script holds all names, so a shell does not start us, and with us torch, at each press of the key. shtab writes it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

__all__ = ["PrintCompletion", "add_option"]

_SHELLS = ("bash", "zsh")


class PrintCompletion(argparse.Action):
    """Print the script and end, like --version."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the script for the shell in `values`; see argparse.Action."""
        if importlib.util.find_spec("shtab") is None:
            parser.error("--completion needs shtab: pip install 'fastpersist[completion]'")
        print(importlib.import_module("shtab").complete(parser, values))
        parser.exit()


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --completion to the parser of all commands."""
    parser.add_argument(
        "--completion",
        action=PrintCompletion,
        choices=_SHELLS,
        metavar="SHELL",
        help="print a script that completes commands and options, for bash or zsh",
    )
