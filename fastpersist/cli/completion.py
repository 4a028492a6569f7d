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
        shtab = importlib.import_module("shtab")
        _complete_paths(parser, shtab.FILE)
        print(shtab.complete(parser, values))
        parser.exit()


def _complete_paths(parser: argparse.ArgumentParser, how: object) -> None:
    """Let names of files complete whatever takes any text: mostly it is a path."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_paths(below, how)
        elif action.nargs != 0 and action.choices is None and action.type is None:
            action.complete = how  # type: ignore[attr-defined]  # where shtab looks for it


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --completion to the parser of all commands."""
    parser.add_argument(
        "--completion",
        action=PrintCompletion,
        choices=_SHELLS,
        metavar="SHELL",
        help="print a script that completes commands and options, for bash or zsh",
    )
