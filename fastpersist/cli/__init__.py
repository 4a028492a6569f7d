"""The command `fastpersist`: a module or package per subcommand, with `add_parser(subparsers)` and `run(arguments)`.

This module only assembles them. `terminal` has the shared parts: exit codes, error lines, text for people;
`argument_types` reads numbers and sizes. Command modules import slow packages inside `run`, so that `--help` does not
wait for them.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from fastpersist.cli import convert, diff, generate, info, inspect, ls, merge, rows, run, stats, verify, watch
from fastpersist.cli.bench import command as bench_command
from fastpersist.cli.completion import add_option as add_completion
from fastpersist.cli.demo import command as demo_command
from fastpersist.cli.report import command as report_command
from fastpersist.cli.terminal import run_command
from fastpersist.cli.tune import command as tune_command

__all__ = ["main"]

_EPILOG = """\
examples:
  fastpersist demo
  fastpersist COMMAND --help
  source <(fastpersist --completion bash)

Exit codes: 0 good; 1 damaged, different (diff), a row of fastpersist failed or memory grew
(bench), a claim failed (demo); 2 usage or not found. Those of run are the program's own.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words of the command, without the program's name; None for the arguments of this process.

    Returns:
        The exit code, as the epilog lists them; 130 if interrupted, 141 if the output pipe is closed.

    Raises:
        SystemExit: From argparse: 0 after --help and --version, 2 for a usage error.
        BaseException: With `run`, the exception that ends the program.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser, commands = _parser()
    if words and not words[0].startswith("-") and words[0] not in commands:
        alike = difflib.get_close_matches(words[0], commands, 1)
        meant = f"is {alike[0]!r} meant? There are" if alike else "there are"
        parser.error(f"{words[0]!r} is no command; {meant} {', '.join(commands)}")
    arguments = parser.parse_args(words)
    if arguments.is_somebody_elses:  # a program that ends as Python ends it, not as our commands do
        return int(arguments.run(arguments))
    return run_command(lambda: int(arguments.run(arguments)))


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    from fastpersist import __version__

    parser = argparse.ArgumentParser(
        prog="fastpersist",
        description="Save and load PyTorch training state at the speed of the disk.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(is_somebody_elses=False)
    parser.add_argument("--version", action="version", version=f"fastpersist {__version__}")
    add_completion(parser)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    saving = (demo_command, run, info, bench_command, tune_command, inspect, verify, merge, report_command, watch)
    for command in (*saving, ls, stats, diff, convert, generate, rows):
        command.add_parser(subparsers)
    return parser, list(subparsers.choices)
