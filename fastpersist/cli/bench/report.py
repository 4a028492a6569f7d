"""The output of the bench commands: command line, facts on the machine, tables, notes, and the same as JSON.

`command_line_text`, `report_head`, `facts_text`, `table` and `notes_text` serve all commands; the rest is for `bench
save` and `bench load`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

import fastpersist
from fastpersist.cli.argument_types import size_name
from fastpersist.cli.bench.fio import fio_version
from fastpersist.cli.bench.rows import Measured
from fastpersist.commit.filesystem import Mount, mount_of, storage_errors

__all__ = [
    "StateResult",
    "command_line_text",
    "facts_text",
    "machine_facts",
    "mebibytes",
    "notes_text",
    "percent",
    "report_head",
    "report_json",
    "report_text",
    "samples_json",
    "table",
]

_FORMAT = 1
_COLUMNS = 118
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True)
class StateResult:
    """All rows of one state.

    Attributes:
        name: The name of the state.
        payload_bytes: Bytes of all tensors of the state.
        tensor_count: How many tensors it has.
        auto_engine: The engine that engine="auto" took; empty if that row failed, or there is none.
        rows: The rows, in the order of the table.
    """

    name: str
    payload_bytes: int
    tensor_count: int
    auto_engine: str
    rows: list[Measured]


def command_line_text(arguments: argparse.Namespace) -> str:
    """Spell out a command, as it would be typed to run the same again.

    An option that has its default is left out, and so is --json. A default that the command has found for this run is
    in `arguments`, and is spelled out.

    Args:
        arguments: The parsed command line; `parser` in it is the parser of the command.
    """
    parser: argparse.ArgumentParser = arguments.parser
    words = parser.prog.split()
    for action in parser._actions:
        value = vars(arguments).get(action.dest, action.default)
        if value == action.default or action.dest == "json":
            continue
        option = action.option_strings[:1]
        texts = [
            size_name(one) if action.metavar == "SIZE" and isinstance(one, int) else str(one)
            for one in (value if isinstance(value, list) else [value])
        ]
        if action.nargs == 0:
            words += option
        elif isinstance(value, list) and action.nargs is None:  # the option is repeated
            words += [word for text in texts for word in (*option, text)]
        else:
            words += [*option, *texts]
    return shlex.join(words)


def machine_facts(directory: str) -> dict[str, Any]:
    """Return the facts on the machine: device, file system, kernel, processors, versions, date.

    `read_ahead_kb`, of the disk, is what a fault of a mapped file reads: it belongs beside each figure of such a file.
    """
    with storage_errors("looking up", directory):
        real_directory = os.path.realpath(directory)
    mount = mount_of(directory) or Mount("", "unknown", "unknown", "")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "directory": real_directory,
        "device": mount.source,
        "device_model": _device_model(mount.source),
        "file_system": mount.type_name,
        "mount_options": mount.options,
        "read_ahead_kb": _read_ahead_kb(directory),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpu_model": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastpersist": fastpersist.__version__,
        "fio": fio_version(),
    }


def _read_ahead_kb(directory: str) -> str:
    device = os.stat(directory).st_dev
    for name in ("queue", "../queue"):  # of a disk, or of the disk that a partition is on
        path = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/{name}/read_ahead_kb"
        if os.path.exists(path):
            with open(path) as file:
                return file.read().strip()
    return "unknown"


def _device_model(source: str) -> str:
    """Return the model that a block device or the disk around a partition gives; virtual disks give none."""
    device = os.path.realpath(os.path.join("/sys/class/block", os.path.basename(os.path.realpath(source))))
    for place in (device, os.path.dirname(device)):
        try:
            with open(os.path.join(place, "device", "model")) as file:
                return file.read().strip()
        except OSError:
            continue
    return ""


def _cpu_model() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:  # no /proc here
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return ""


def report_head(command: str, command_line: str, facts: dict[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Return what the JSON of every bench command begins with."""
    return {
        "format": _FORMAT,
        "command": command,
        "command_line": command_line,
        "machine": facts,
        "notes": list(notes),
    }


def facts_text(command_line: str, facts: dict[str, Any]) -> str:
    """Return the lines on top of every report."""
    device = " ".join(filter(None, (facts["device"], facts["device_model"])))
    return "\n".join(
        [
            command_line,
            f"{facts['date']}, {device}, {facts['file_system']} ({facts['mount_options']}), {facts['directory']}",
            f"Linux {facts['kernel']} {facts['architecture']}, {facts['cpu_count']} CPUs {facts['cpu_model']}, "
            f"{facts['memory_bytes'] / _GIB:.0f} GiB, load {facts['load_average']:.1f}",
            f"fastpersist {facts['fastpersist']}, torch {facts['torch']}, Python {facts['python']}, "
            f"{facts['fio'] or 'no fio'}",
        ]
    )


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, align: str = "l") -> str:
    """Return a table as text.

    Args:
        headers: The headers of the columns.
        rows: The cells of each row; a row may end early.
        align: "l" or "r" for each of the first columns; all others hold numbers, and are aligned to the right.
    """
    from tabulate import tabulate  # here: benchmarks/gpu.py uses this package where tabulate is not installed

    sides = [{"l": "left", "r": "right"}[side] for side in align.ljust(len(headers), "r")]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=sides)


def percent(ratio: float | None) -> str:
    """Return the cell of a ratio: "98 %", empty for None."""
    return "" if ratio is None else f"{100 * ratio:.0f} %"


def mebibytes(size_bytes: float | None) -> str:
    """Return the cell of a size in a column of MiB, empty for None."""
    return "" if size_bytes is None else f"{size_bytes / _MIB:.0f}"


def notes_text(notes: Sequence[str]) -> str:
    """Return the lines below the tables: how it was measured."""
    return "\n".join(textwrap.fill(f"- {note}", _COLUMNS, subsequent_indent="  ") for note in notes)


def report_json(
    command: str, command_line: str, facts: dict[str, Any], notes: list[str], states: list[StateResult]
) -> dict[str, Any]:
    """Return everything as plain values."""
    return report_head(command, command_line, facts, notes) | {
        "states": [
            {
                "name": state.name,
                "payload_bytes": state.payload_bytes,
                "tensor_count": state.tensor_count,
                "auto_engine": state.auto_engine,
                "rows": [_row_json(row, _ceiling(state)) for row in state.rows],
            }
            for state in states
        ],
    }


def _ceiling(state: StateResult) -> float | None:
    """Return fio's bytes per second."""
    return next((row.bytes_per_s for row in state.rows if row.row.kind == "ceiling" and row.samples), None)


def _row_json(measured: Measured, ceiling: float | None) -> dict[str, Any]:
    row = {"name": measured.row.name, "kind": measured.row.kind, "note": measured.note}
    if not measured.samples:
        return row
    return row | {
        **samples_json(measured),
        "ratio_to_fio": measured.bytes_per_s / ceiling if ceiling else None,
        "peak_bytes": measured.peak_bytes,
    }


def samples_json(measured: Measured) -> dict[str, Any]:
    """Return what was measured of a row that has samples."""
    seconds = [sample.seconds for sample in measured.samples]
    return {
        "engine": measured.samples[0].engine,
        "size_bytes": measured.samples[0].size_bytes,
        "seconds": seconds,
        "median_s": measured.median_s,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "bytes_per_s": measured.bytes_per_s,
    }


def report_text(
    command: str, command_line: str, facts: dict[str, Any], notes: list[str], states: list[StateResult]
) -> str:
    """Return facts, one table per state, and how it was measured."""
    lines = [facts_text(command_line, facts)]
    above = "state" if command == "save" else "result"
    headers = [command, "engine", "median s", "min – max s", "GB/s", "of fio", f"peak MiB above the {above}"]
    for state in states:
        lines += [
            "",
            f"{state.name}: {state.payload_bytes / 1e9:.3f} GB in {state.tensor_count} tensors"
            + (f'; engine="auto" took {state.auto_engine}' if state.auto_engine else ""),
            "",
            table(headers, [_cells(row, _ceiling(state)) for row in state.rows], align="ll"),
        ]
        lines += [f"{row.row.name}: {row.note}" for row in state.rows if row.note]
    return "\n".join([*lines, "", notes_text(notes)])


def _cells(measured: Measured, ceiling: float | None) -> list[str]:
    if not measured.samples:
        return [measured.row.name, "", "–", "", "", "", ""]
    return [
        measured.row.name,
        measured.samples[0].engine,
        *measured.time_cells(),
        percent(measured.bytes_per_s / ceiling if ceiling else None),
        mebibytes(measured.peak_bytes),
    ]
