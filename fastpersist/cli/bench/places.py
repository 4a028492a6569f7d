"""DIR and FILE of the commands that measure: early checks, scratch directories, room on the disk, removed files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastpersist.cli.bench.save_rows import sync_path
from fastpersist.cli.terminal import size_text, stopped_by_signals
from fastpersist.commit.filesystem import storage_errors
from fastpersist.errors import ConfigError, NoSpaceError

__all__ = [
    "check_device",
    "check_places",
    "empty",
    "remove_files",
    "require_space",
    "scratch_directory",
    "write_json",
]

_MIB = 1 << 20


def check_places(directory: str, files: Iterable[str | None]) -> None:
    """Raise before measuring if DIR cannot be used, or the results could not be written.

    Args:
        directory: DIR.
        files: Files for results; None for those not asked for. A missing file is created empty, an existing one stays
            as it is until the new results are written.

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
        ConfigError: The name is neither the CPU nor a CUDA device that torch sees.
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
def scratch_directory(directory: str, command: str = "bench") -> Iterator[str]:
    """Make a scratch directory in DIR. The end of the block, SIGTERM and SIGHUP remove it; only a SIGKILL leaves it.

    Args:
        directory: The command's argument DIR.
        command: The name of the command, which the name of the scratch directory contains.

    Raises:
        StorageError: DIR takes no directory.
    """
    with stopped_by_signals():
        with storage_errors("creating a directory in", directory):
            made = tempfile.TemporaryDirectory(prefix=f".fastpersist-{command}-", dir=directory)
        try:
            yield made.name
        finally:
            with _without_ctrl_c():
                made.cleanup()


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl-C: a second one would end the removal of files. Only the main thread can."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def require_space(directory: str, payload_bytes: int, *, instead: str) -> None:
    """Raise if the disk has too little room.

    Args:
        directory: The target directory.
        payload_bytes: The largest number of bytes that are in it at one time.
        instead: What needs less space, such as "a smaller --size-mb".

    Raises:
        NoSpaceError: The free space is less than `payload_bytes` and a tenth more.
    """
    needed_bytes = int(1.1 * payload_bytes) + 64 * _MIB
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise NoSpaceError(
            errno.ENOSPC,
            f"{directory} has {size_text(free_bytes)} free, and this needs {size_text(needed_bytes)}: choose another "
            f"directory, or {instead}",
            directory,
        )


def remove_files(paths: Sequence[str]) -> None:
    """Remove those files of one directory that exist, and sync the removal, as `empty` does."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    sync_path(os.path.dirname(paths[0]))


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
