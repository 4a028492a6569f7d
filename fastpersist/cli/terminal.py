"""Shared by the commands: exit codes, error lines, and text for people.

A FastPersistError is an answer: the command prints one line on standard error and returns an exit code. Any other
exception is a bug, and keeps its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastpersist.display import count_text, printable, size_text
from fastpersist.errors import CorruptionError, FastPersistError

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = [
    "EXIT_DAMAGED",
    "EXIT_GOOD",
    "EXIT_USAGE",
    "HelpFormatter",
    "bytes_bar",
    "count_text",
    "examples_text",
    "has_rich",
    "print_error",
    "print_table",
    "printable",
    "run_command",
    "shape_text",
    "size_text",
    "stopped_by_signals",
]

EXIT_GOOD = 0
EXIT_DAMAGED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_READER_LEFT = 141  # 128 + SIGPIPE


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; print a FastPersistError as one line.

    Args:
        command: Prints its result and returns its exit code.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`; print would take the other stream, or fail
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # no name may be unprintable, whatever the locale
    try:
        code = command()
        sys.stdout.flush()
    except FastPersistError as error:
        print_error(str(error))
        return EXIT_DAMAGED if isinstance(error, CorruptionError) else EXIT_USAGE
    except BrokenPipeError:
        # As in `fastpersist inspect FILE | head`. The interpreter flushes once more at exit: give it a place.
        _drop_output()
        return EXIT_READER_LEFT
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        _drop_output()
        print_error(f"the output could not be written: {error.strerror}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """End the block like Ctrl-C on SIGTERM or SIGHUP (kill, timeout, a closed terminal).

    The exit code is the shell's: 143 or 129. A signal that has a handler already or is ignored (nohup) keeps that. Only
    the main thread installs handlers.

    Raises:
        SystemExit: The process got such a signal.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs, as argparse does, but keeps the lines of those that begin with "examples:"."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            paragraph
            if paragraph.startswith("examples:")
            else super(HelpFormatter, self)._fill_text(paragraph, width, indent)
            for paragraph in text.rstrip().split("\n\n")
        )


def examples_text(*lines: str) -> str:
    """Return the paragraph with the examples of a command, for an epilog that HelpFormatter lays out."""
    return "\n  ".join(["examples:", *lines]) + "\n\n"


def print_error(message: str) -> None:
    """Print an error as one line."""
    print(f"fastpersist: error: {printable(message)}", file=sys.stderr)


def shape_text(shape: Sequence[int]) -> str:
    """Format dimensions: "2×3", or "scalar"."""
    return "×".join(map(str, shape)) or "scalar"


def print_table(headers: Sequence[str], alignments: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print an empty line and a table.

    Args:
        headers: The headers of the columns.
        alignments: The alignment of each column: "left" or "right".
        rows: The cells; they are printed as they are.
    """
    from tabulate import tabulate

    print()
    # No numbers are made of texts: a tensor may be called 1e5.
    print(tabulate(rows, headers=headers, colalign=alignments, disable_numparse=True))


def has_rich() -> bool:
    """Tell whether rich is installed, which draws lines that change in place."""
    return importlib.util.find_spec("rich") is not None


def bytes_bar(what: str, total_bytes: int, *, quiet: bool) -> tqdm[Any]:
    """Make a progress bar of bytes: one line that appears after two seconds, and none where standard error is a file.

    Args:
        what: What is being done; the label of the bar.
        total_bytes: The number of bytes at which all is done.
        quiet: Show nothing.
    """
    from fastpersist.transfer.progress import progress_bar

    return progress_bar(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        desc=what,
        delay=2,
        leave=False,
        disable=quiet or not sys.stderr.isatty(),
    )
