"""The yardstick for GPU memory: NVIDIA's gdsio, where it is installed, with the requests that the other rows make."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import replace

from fastpersist.cli.bench.io.points import IoSample, Point, Setup
from fastpersist.cli.bench.save_rows import sync_path
from fastpersist.errors import UnsupportedError

__all__ = ["gdsio_command", "gdsio_sample", "run_gdsio", "why_no_gdsio"]

# Where the packages of CUDA install it; this is usually not in PATH.
_USUAL_PLACE = "/usr/local/cuda/gds/tools/gdsio"


def _program() -> str:
    """Return the path of gdsio, an empty string when there is none."""
    return shutil.which("gdsio") or (_USUAL_PLACE if os.access(_USUAL_PLACE, os.X_OK) else "")


def why_no_gdsio(setup: Setup) -> str:
    """Return why gdsio is left out; an empty string if it is not."""
    if setup.device == "cpu":
        return "it moves bytes between disk and GPU memory, and this is about host memory"
    if setup.process_count > 1:
        return "it is run with one file only"
    if not _program():
        return f"not installed: it is part of CUDA's GPUDirect Storage tools ({_USUAL_PLACE})"
    return ""


def gdsio_command(program: str, point: Point, setup: Setup, path: str) -> list[str]:
    """Return the words of its command line: a thread per request in flight, as each has one at a time.

    Source: GPUDirect Storage Benchmarking and Configuration Guide, "gdsio Utility".
    """
    kind = (0 if point.direction == "read" else 1) + (2 if setup.random else 0)
    size_bytes = point.block_count(setup) * point.block_bytes
    return [
        program, "-f", path, "-d", "0", "-w", str(point.depth), "-s", str(size_bytes),
        "-i", str(point.block_bytes), "-x", "0", "-I", str(kind),
    ]  # fmt: skip


def run_gdsio(point: Point, setup: Setup, path: str) -> IoSample:
    """Run gdsio once on one file; a sync, which it does not do, is added to what it writes.

    Raises:
        UnsupportedError: It failed, or its output is unknown.
    """
    command = gdsio_command(_program(), point, setup, path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[0]
        raise UnsupportedError(f"gdsio cannot {point.direction} here: {said}")
    sample = gdsio_sample(done.stdout, point)
    if point.direction == "read":
        return sample
    start_s = time.monotonic()
    sync_path(path)
    return replace(sample, seconds=sample.seconds + time.monotonic() - start_s)


def gdsio_sample(output: str, point: Point) -> IoSample:
    """Take the figures from its line of results; they do not include a sync.

    Raises:
        UnsupportedError: There is no such line.
    """
    moved = re.search(r"DataSetSize: (\d+)(?:/\d+)?\(KiB\)", output)
    took = re.search(r"total_time:? ([\d.]+) secs", output)
    way = re.search(r"XferType: (\S+)", output)
    if moved is None or took is None or float(took[1]) <= 0:
        raise UnsupportedError(f"gdsio said something unknown: {output.strip().splitlines()[-1:]}")
    size_bytes = int(moved[1]) << 10
    return IoSample(
        seconds=float(took[1]),
        size_bytes=size_bytes,
        engine=way[1] if way else "",
        io_count=size_bytes // point.block_bytes,
    )
