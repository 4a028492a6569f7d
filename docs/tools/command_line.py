"""Write the reference of the command line: what `--help` says for every command, and what it prints.

`command_outputs.py` has kept the latter, beforehand.

It runs where fastpersist is installed, which the environment of the site need not be.

python docs/tools/command_line.py build/docs/command_line.md
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

COLUMNS = "100"
OUTPUTS = Path(__file__).resolve().parents[1] / "outputs"
LISTED = re.compile(r"^    ([a-z][a-z-]*)(?: {2,}|$)", re.MULTILINE)
INTRODUCTION = """# Command line

This page is what `--help` says for every command, and what it prints. `python -m fastpersist` is the same program. The
outputs come from a shared machine with two cores, on which other programs ran: they show the form, and their times say
nothing. How the commands are used:
[torch.save, unchanged](../how-to/torch-save.md), [monitoring](../how-to/monitoring.md), [pictures of a
run](../how-to/report.md), [completion in a shell](../how-to/notebooks.md), [tuning](../how-to/tuning.md),
[node-local disks](../how-to/node-local.md), [benchmarks](../benchmarks/index.md)."""


def help_of(words: list[str]) -> str:
    """Return what a command prints for `--help`."""
    from fastpersist.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return printed.getvalue()


def commands(words: list[str]) -> list[list[str]]:
    """Return a command and all below it, in the order in which `--help` lists them."""
    text = help_of(words)
    below = LISTED.findall(text.partition("  COMMAND\n")[2]) if "COMMAND ..." in text else []
    return [words, *(found for name in below for found in commands([*words, name]))]


def main() -> None:
    """Write the page."""
    os.environ["COLUMNS"] = COLUMNS  # argparse breaks lines by it
    every = commands([])
    if len(every) < 2:
        raise SystemExit("`fastpersist --help` lists no commands where this program looks for them")
    parts = [INTRODUCTION]
    for words in every:
        title = " ".join(["fastpersist", *words])
        parts.append(f"{'##' if len(words) < 2 else '###'} {title}\n\n```text\n{help_of(words).rstrip()}\n```")
        printed = OUTPUTS / f"{'-'.join(words)}.txt"
        if words and printed.is_file():
            parts.append(f"It prints, for example:\n\n```console\n{printed.read_text().rstrip()}\n```")
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
