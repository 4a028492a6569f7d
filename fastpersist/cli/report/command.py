"""`fastpersist report ROOT`: what the checkpoints of a run cost its training, as a table, a page, or pictures."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from fastpersist.cli.bench.places import check_places
from fastpersist.cli.report import disk_rate
from fastpersist.cli.report.charts import charts_of
from fastpersist.cli.report.contents import content_of
from fastpersist.cli.report.page import html_page
from fastpersist.cli.report.png import draw_charts, require_matplotlib
from fastpersist.cli.report.records import Run, read_run, steps_there
from fastpersist.cli.report.table import as_json, print_costs
from fastpersist.cli.terminal import EXIT_GOOD
from fastpersist.commit.file_commit import replace_small_file
from fastpersist.display import count_text, printable
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.events.log import read_events

if TYPE_CHECKING:
    from fastpersist import Manifest

__all__ = ["add_parser", "run"]

_EPILOG = """\
examples:
  fastpersist report runs/a
  fastpersist report runs/a --html report.html
  fastpersist report runs/a --html report.html --probe
  fastpersist report runs/a --png pictures
  fastpersist report runs/a --json | jq .median

The table has the steps that are still there, with the figures of rank 0 at the moment when
it published the step:
  stall    time that the training thread lost: inside save(), and waiting at the gate
  capture  from save() until everything could be changed again; most of it overlaps training
  write    from the first byte to the last; sync: until these were durable
  rate     size divided by write and sync; a background save spreads its writing over
           the step, so this rate is below that of the disk
  copied   bytes copied inside save(), and at the gate for a step that came before the writer
  every    time since the previous step that is still there
  lost     stall as a part of that time

--html and --png also show removed steps, failures, retention and all ranks, from the log of
events in the root. The page has no scripts and needs no network. The disk's own rate is that
of `fastpersist tune`, or with --probe that of a file written for two seconds into ROOT.

--json prints one object:
  path, steps     list of {step, time_s, size_bytes, stats, every_s, rate_bytes_per_s, lost_ratio}, oldest first;
                  stats as in the manifest; null if not known
  total           {step_count, size_bytes, stall_s, write_s, sync_s}, sums
  median          {stall_s, rate_bytes_per_s, every_s, lost_ratio} of the steps; null if no step has it

Exit codes: 0 good, 2 not found, or no directory of checkpoints.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "report",
        help="show what the checkpoints of a run cost its training",
        description="Show what the steps in a directory of checkpoints cost: stalls, writing, rates, copies.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", metavar="ROOT", help="a directory of checkpoints, as fp.Checkpointer writes it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="instead of the table, write one page with pictures")
    parser.add_argument(
        "--png", metavar="DIR", help="instead of the table, write each picture there (needs matplotlib)"
    )
    parser.add_argument("--probe", action="store_true", help="measure the disk's own rate, in two seconds")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the costs of the steps, or draw them.

    Raises:
        ConfigError: Options do not fit together, or there is no matplotlib.
        UnsupportedError: ROOT is one checkpoint.
    """
    draws = arguments.html is not None or arguments.png is not None
    if arguments.json and draws:
        raise ConfigError("--json prints the table; leave out --html and --png")
    if arguments.probe and not draws:
        raise ConfigError("--probe measures for a picture: add --html FILE or --png DIR")
    if arguments.png is not None:
        require_matplotlib()
    if draws:
        found = _read(arguments.root)
        if arguments.probe:
            check_places(arguments.root, [arguments.html])
        _add_disk_rate(found, arguments.root, probe=arguments.probe)
        _draw(found, arguments.html, arguments.png)
    elif arguments.json:
        print(json.dumps(as_json(_root_of(arguments.root)), indent=2))
    else:
        print_costs(_root_of(arguments.root))
    return EXIT_GOOD


def _root_of(path: str) -> Manifest:
    from fastpersist import inspect

    manifest = inspect(path)
    if manifest.format != "root":
        raise UnsupportedError(
            f"{path} is no directory of checkpoints; `fastpersist inspect` says what one checkpoint cost"
        )
    return manifest


def _read(path: str) -> Run:
    checkpoints = steps_there(path) if os.path.isdir(path) else []
    if not checkpoints:
        _root_of(path)  # says what it is instead
    found = read_run(path, read_events(path), checkpoints)
    found.content_bytes, found.content_note = content_of(path, checkpoints)
    return found


def _add_disk_rate(found: Run, root: str, *, probe: bool) -> None:
    if probe:
        found.disk_bytes_per_s, found.disk_note = disk_rate.probed_rate(root), "The disk's own: a probe of two seconds."
        return
    found.disk_bytes_per_s = disk_rate.tuned_rate(root)
    found.disk_note = "The disk's own: as fastpersist tune has found it." if found.disk_bytes_per_s else ""


def _draw(found: Run, html: str | None, png: str | None) -> None:
    if html is not None:
        page = html_page(found)
        replace_small_file(html, page.encode("utf-8", "backslashreplace"))
        saves, steps = count_text(len(found.saves), "save"), count_text(len(found.steps_there), "step")
        print(f"{printable(html)}: {saves}, {steps} kept")
    if png is not None:
        for path in draw_charts(charts_of(found), png):
            print(printable(path))
