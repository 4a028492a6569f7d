"""`fastpersist info [DIR]`: what FastPersist finds on this machine and in a directory, found by trying."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tempfile
from typing import Any

from fastpersist.cli.terminal import EXIT_GOOD, printable, size_text

__all__ = ["add_parser", "filesystem_name", "run"]

_EPILOG = """\
--json prints one object:
  fastpersist, torch, python, kernel      versions
  machine                                 architecture, such as "x86_64"
  crc32                                   which CRC-32 implementation runs here
  ring_bytes, chunk_bytes                 host memory for all transfers; one request
  tuned_by                                the tuning file that counts here, null when there is none
  directory, filesystem                   what was probed; its type, such as "ext4"
  direct_io       {supported, memory_alignment_bytes, offset_alignment_bytes, why_not}
  engines         list of {name, usable, why_not}, best first
  auto            the engine that a save here takes, null when none is usable

Exit codes: 0 good, 2 the directory is missing or takes no file.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "info",
        help="say which engines work in a directory, and why the others do not",
        description="Say what works here. Each engine does one real write and read in the directory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="default: the current one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found."""
    found = _find(arguments.directory)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _print_text(found)
    return EXIT_GOOD


def _find(directory: str) -> dict[str, Any]:
    import torch

    from fastpersist import __version__, _native, engines
    from fastpersist.config import config_for, tuning_path
    from fastpersist.filesystem import storage_errors
    from fastpersist.pipeline import engine_ladder

    probes = engines(directory)
    with storage_errors("creating a file in", directory), tempfile.TemporaryFile(dir=directory) as file:
        supported, memory_alignment_bytes, offset_alignment_bytes, why_not = _native.direct_io_limits(file.fileno())
        ladder = engine_ladder("auto", file.fileno())
        limits = config_for(file.fileno())
        tuned_by = tuning_path(file.fileno())
    usable = {probe.name for probe in probes if probe.usable}
    return {
        "fastpersist": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "crc32": _native.crc32_implementation(),
        "ring_bytes": limits.ring_bytes,
        "chunk_bytes": limits.chunk_bytes,
        "tuned_by": tuned_by if tuned_by is not None and os.path.exists(tuned_by) else None,
        "directory": os.path.realpath(directory),
        "filesystem": filesystem_name(directory),
        "direct_io": {
            "supported": supported,
            "memory_alignment_bytes": memory_alignment_bytes,
            "offset_alignment_bytes": offset_alignment_bytes,
            "why_not": why_not,
        },
        "engines": [{"name": probe.name, "usable": probe.usable, "why_not": probe.why_not} for probe in probes],
        "auto": next((name for name in ladder if name in usable), None),
    }


def _print_text(found: dict[str, Any]) -> None:
    from tabulate import tabulate

    direct_io = found["direct_io"]
    if direct_io["supported"]:
        limits = (
            f"memory in steps of {direct_io['memory_alignment_bytes']} bytes, "
            f"offsets in steps of {direct_io['offset_alignment_bytes']} bytes"
        )
    else:
        limits = f"no: {direct_io['why_not']}"
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "python"))
    print(f"fastpersist  {found['fastpersist']}")
    print(f"with         {versions}, Linux {found['kernel']} {found['machine']}")
    print(f"CRC-32 by    {found['crc32']}")
    print(f"ring         {size_text(found['ring_bytes'])}, in requests of {size_text(found['chunk_bytes'])}")
    print(f"tuned by     {printable(found['tuned_by'] or 'nothing; fastpersist tune finds out whether that is best')}")
    print(f"directory    {printable(found['directory'])}")
    print(f"file system  {found['filesystem']}")
    print(f"direct I/O   {limits}")
    print()
    rows = [
        (engine["name"], "usable" if engine["usable"] else f"no: {printable(engine['why_not'])}")
        for engine in found["engines"]
    ]
    print(tabulate(rows, headers=("engine", "here")))
    print()
    print("auto would take " + (found["auto"] or "none of them: nothing can be saved here"))


def filesystem_name(directory: str) -> str:
    """Return the type of the file system a directory is on, such as "ext4", by the kernel's table of mounts.

    Args:
        directory: An existing directory.

    Source: proc_pid_mountinfo(5). statfs has only a number, which ext2, ext3 and ext4 share.
    """
    path = os.path.realpath(directory)
    name, longest = "unknown", -1
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                mount_point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
                inside = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
                if inside and len(mount_point) >= longest:  # of equals, the later one is mounted on top
                    name, longest = after.split()[0], len(mount_point)
    except OSError:
        pass  # no /proc: the name is for people only
    return name
