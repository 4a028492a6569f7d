"""DIR and FILE of all bench commands: early checks, scratch directories that leave nothing behind, room on the disk."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fastpersist.cli.bench.save_rows import sync_path
from fastpersist.cli.terminal import stopped_by_signals
from fastpersist.commit.filesystem import storage_errors
from fastpersist.errors import ConfigError, NoSpaceError

__all__ = ["check_device", "check_places", "empty", "positive", "require_space", "scratch_directory", "write_json"]

_MIB = 1 << 20


def positive(text: str) -> int:
    """Read a whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:  # perhaps DIR: an option that takes several numbers would take it, too
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number (DIR goes before options)") from None
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def check_places(directory: str, files: Iterable[str | None]) -> None:
    """Raise before measuring if DIR cannot be used, or the results could not be written.

    Args:
        directory: DIR.
        files: Files for results; None for those not asked for. Missing ones are created empty; an existing one keeps
            its results until there are new ones.

    Raises:
        ConfigError: DIR is no directory.
        StorageError: A file cannot be written.
    """
    if not os.path.isdir(directory):
        raise ConfigError(f"{directory} is no directory; name one on the disk that shall be measured")
    for path in filter(None, files):
        with storage_errors("creating", path), open(path, "a"):
            pass


def check_device(name: str) -> None:
    """Raise before measuring if --device cannot be used.

    Raises:
        ConfigError: It is neither the CPU nor a CUDA device that torch sees.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: torch sees no such CUDA device here")


@contextlib.contextmanager
def scratch_directory(directory: str) -> Iterator[str]:
    """Make a scratch directory in DIR. The end of the block, SIGTERM and SIGHUP remove it; only a SIGKILL leaves it.

    Raises:
        StorageError: DIR takes no directory.
    """
    with stopped_by_signals():
        with storage_errors("creating a directory in", directory):
            made = tempfile.TemporaryDirectory(prefix=".fastpersist-bench-", dir=directory)
        with made as scratch:
            yield scratch


def require_space(directory: str, payload_bytes: int, *, smaller: str) -> None:
    """Raise if the disk has too little room.

    Args:
        directory: The target directory.
        payload_bytes: Largest number of bytes in it at one time.
        smaller: The option that reduces them.

    Raises:
        NoSpaceError: The free space is less than that and a tenth more.
    """
    needed_bytes = int(1.1 * payload_bytes) + 64 * _MIB
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise NoSpaceError(
            errno.ENOSPC,
            f"{directory} has {free_bytes / 1e9:.1f} GB free, and this needs {needed_bytes / 1e9:.1f} GB: choose "
            f"another directory, or a smaller {smaller}",
            directory,
        )


def empty(directory: str) -> None:
    """Remove the contents of a directory, pending files of failed rows too, and sync the removal.

    Else the kernel would free the blocks in the next row's time.
    """
    with os.scandir(directory) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    sync_path(directory)


def write_json(path: str, report: Mapping[str, Any]) -> None:
    """Write results for programs.

    Raises:
        StorageError: The file cannot be written.
    """
    with storage_errors("writing", path), open(path, "w") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
