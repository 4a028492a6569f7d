"""The yardstick: what fio gets out of the same directory, with the requests that a good writer or reader would make."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from fastpersist.cli.bench_rows import Row, Sample
from fastpersist.errors import StorageError, UnsupportedError

__all__ = ["CEILING_NAMES", "fio_read_row", "fio_version", "fio_write_row"]

CEILING_NAMES = {"save": "fio write", "load": "fio read"}

_BLOCK_BYTES = 8 << 20
_NOT_INSTALLED = "fio is not installed, so there is no ceiling to compare with: apt install fio (or dnf, or pacman -S)"


def fio_version() -> str:
    """Return what `fio --version` says, an empty string when there is no fio."""
    program = shutil.which("fio")
    if program is None:
        return ""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def fio_write_row(size_bytes: int) -> Row:
    """Return the write ceiling: a fresh file of at least `size_bytes`, in whole blocks of 8 MiB, synced."""
    name = CEILING_NAMES["save"]
    if shutil.which("fio") is None:
        return Row(name, "ceiling", None, why_not=_NOT_INSTALLED)
    rounded_bytes = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES

    def run(path: str) -> Sample:
        return _run(path, "write", rounded_bytes, ["--fallocate=native", "--end_fsync=1"])

    return Row(name, "ceiling", run, suffix=".fio")


def fio_read_row(suffix: str) -> Row:
    """Return the read ceiling: the very file that the other rows load, from its start, in whole blocks of 8 MiB.

    The file's blocks have been written; of blocks that are only allocated a file system reads nothing.
    """
    name = CEILING_NAMES["load"]
    if shutil.which("fio") is None:
        return Row(name, "ceiling", None, why_not=_NOT_INSTALLED)

    def run(path: str) -> Sample:
        # What is left over is less than a block; the rate is per byte, so nothing is gained by leaving it out.
        size_bytes = os.path.getsize(path) // _BLOCK_BYTES * _BLOCK_BYTES
        return _run(path, "read", size_bytes, ["--readonly", "--allow_file_create=0"])

    return Row(name, "ceiling", run, suffix=suffix)


def _run(path: str, direction: str, size_bytes: int, options: list[str]) -> Sample:
    """Run one job by io_uring, or by libaio where the kernel or a container's profile refuses io_uring."""
    reasons = []
    for engine in ("io_uring", "libaio"):
        command = [
            "fio", "--name=ceiling", f"--filename={_escaped(path)}", f"--rw={direction}", f"--ioengine={engine}",
            "--direct=1", "--bs=8M", "--iodepth=8", "--numjobs=1", f"--size={size_bytes}", "--output-format=json",
            *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Sample(_seconds(done.stdout, direction, size_bytes), size_bytes, engine)
        reasons.append(f"{engine}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[0]}")
    raise UnsupportedError(f"fio cannot {direction} here by direct I/O ({'; '.join(reasons)})")


def _escaped(path: str) -> str:
    """Escape the colons that would separate file names."""
    return path.replace(":", "\\:")


def _seconds(output: str, direction: str, size_bytes: int) -> float:
    """Take the seconds from fio's report.

    `jobs[0].write.runtime` (ms, as in `job_runtime`) runs from the first request to the end of the fsync that
    --end_fsync=1 asks for: a buffered job of 1 GiB reports ten times the runtime with it that it reports without.
    Creating and preallocating the file come before, in less than a millisecond; filling fio's own buffers, and starting
    and ending its processes (some 0.5 s), are not in it either. So the figure is from create to synced, a trifle in
    fio's favour.
    """
    # fio may put remarks in front of the report.
    report: dict[str, Any] = json.loads(output[output.index("{") :])
    job = report["jobs"][0][direction]
    if job["io_bytes"] != size_bytes:
        raise StorageError(None, f"fio moved {job['io_bytes']} bytes instead of {size_bytes}")
    return max(int(job["runtime"]), 1) / 1000
