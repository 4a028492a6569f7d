"""The tuning file: what `fastpersist tune` has found, as TOML with comments, written whole or not at all.

How it is found and read is `fastpersist.config`'s affair; what is written here is read back by it before it counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from fastpersist.commit.filesystem import filesystem, make_directories, storage_errors
from fastpersist.config import read_tuning
from fastpersist.errors import InternalError

__all__ = ["tuning_text", "write_tuning"]

_COLUMNS = 100


def tuning_text(settings: Mapping[str, Any], facts: Mapping[str, Any], findings: Sequence[str]) -> str:
    """Return a tuning file.

    Args:
        settings: By key, what differs from the defaults.
        facts: Of the machine, as `bench_report.machine_facts` gives them.
        findings: What was measured and what came of it, a line each.
    """
    comments = [
        f"Written by `fastpersist tune {facts['directory']}` on {facts['date']}.",
        f"File system: {facts['file_system']} on {facts['device']} {facts['device_model']}".rstrip(),
        f"Machine: {facts['cpu_model']}, {facts['cpu_count']} CPUs, Linux {facts['kernel']} {facts['architecture']}",
        f"With: fastpersist {facts['fastpersist']}, torch {facts['torch']}",
        "",
        *findings,
        "",
        "What is not set here is as it is by default. Without this file, everything is.",
    ]
    # A comment ends with its line, whatever a device or a directory is called.
    shown = ["".join(c if c.isprintable() else "?" for c in comment) for comment in comments]
    lines = [f"# {line}".rstrip() for comment in shown for line in textwrap.wrap(comment, _COLUMNS) or [""]]
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    return "\n".join(lines) + "\n"


def write_tuning(path: str, text: str, settings: Mapping[str, Any], *, make_parents: bool) -> None:
    """Write a tuning file in one step: who reads it meanwhile finds the old one or the new one.

    Args:
        path: Of the file.
        text: What `tuning_text` has made of the settings.
        settings: What the library has to read in it.
        make_parents: Make the directory that it is in.

    Raises:
        StorageError: It cannot be written; nothing has changed.
    """
    path = os.path.realpath(path)  # a file that is a link stays one
    directory = os.path.dirname(path)
    if make_parents:
        make_directories(directory)
    pending = os.path.join(directory, f".{os.path.basename(path)}.{secrets.token_hex(8)}")
    fd = filesystem().create(pending)
    try:
        try:
            filesystem().write(fd, text.encode(), pending)
            filesystem().sync(fd, pending)
        finally:
            os.close(fd)
        if read_tuning(pending) != dict(settings):
            raise InternalError(f"{path} would not be read as it is meant")
        with storage_errors("writing", path):
            os.rename(pending, path)
        filesystem().sync_directory(directory)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(pending)
