"""Writes the tuning file, the findings of `fastpersist tune` as TOML with comments, atomically.

`fastpersist.config` finds and reads the file; it also checks the new text before the file is replaced.
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
        settings: The settings that differ from the defaults, by key.
        facts: Facts on the machine, from `bench.report.machine_facts`.
        findings: The findings, one line each.
    """
    comments = [
        f"Written by `fastpersist tune {facts['directory']}` on {facts['date']}.",
        f"File system: {facts['file_system']} on {facts['device']} {facts['device_model']}".rstrip(),
        f"Machine: {facts['cpu_model']}, {facts['cpu_count']} CPUs, Linux {facts['kernel']} {facts['architecture']}",
        f"With: fastpersist {facts['fastpersist']}, torch {facts['torch']}",
        "",
        *findings,
        "",
        "Settings that are missing here have their defaults. Delete this file to return to all defaults.",
    ]
    # A comment ends with its line, whatever a device or a directory is called.
    shown = ["".join(c if c.isprintable() else "?" for c in comment) for comment in comments]
    lines = [f"# {line}".rstrip() for comment in shown for line in textwrap.wrap(comment, _COLUMNS) or [""]]
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    return "\n".join(lines) + "\n"


def write_tuning(path: str, text: str, settings: Mapping[str, Any], *, make_parents: bool) -> None:
    """Write a tuning file atomically: concurrent readers find the old one or the new one.

    Args:
        path: Path of the file.
        text: Result of `tuning_text`.
        settings: Settings that the library must read back from the text.
        make_parents: Make the file's directory.

    Raises:
        StorageError: It cannot be written; nothing has changed.
    """
    with storage_errors("looking up", path):
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
