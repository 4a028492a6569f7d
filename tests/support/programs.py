"""Runs a program in a fork of this process, which has imported torch already, and says how it ended and what it said.

For what a program does and writes. What it does not import itself, and how Python comes to an end (threads, atexit, a
signal), is seen in a process that was started for it, and nowhere else.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from support.forking import Report, run_in_child


def run_in_fork(program: Callable[[], object], directory: Path) -> tuple[int, str, str]:
    """Return what a program that works in a directory returns or exits with, and what it wrote as output and errors."""
    with tempfile.TemporaryDirectory(prefix="fastpersist-program-") as name:
        files = [Path(name, what) for what in ("code", "output", "errors")]

        def work(_report: Report) -> None:
            os.chdir(directory)
            sys.excepthook = sys.__excepthook__
            with files[1].open("w") as sys.stdout, files[2].open("w") as sys.stderr:
                try:
                    code = program()
                except SystemExit as ended:
                    code = ended.code
                files[0].write_text(str(code or 0))

        run_in_child(work)
        code, output, errors = (file.read_text() for file in files)
    return int(code), output, errors


def run_file_in_fork(path: Path, *words: object, directory: Path) -> tuple[int, str, str]:
    """Do the same with a file, as `python PATH WORDS…` would."""

    def program() -> None:
        sys.argv = [str(path), *map(str, words)]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")

    return run_in_fork(program, directory)
