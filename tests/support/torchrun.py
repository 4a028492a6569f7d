"""Starts an example under torchrun, and leaves no process of it behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def torchrun(program: Path, rank_count: int, *words: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program on so many ranks, with what it says on one pipe."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", rank_count]
    with subprocess.Popen(
        [*map(str, [*start, program, *words])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    ) as job:
        try:
            yield job
        finally:
            if job.poll() is None:
                job.terminate()  # which ends its processes first


def run_to_its_end(
    program: Path, rank_count: int, *words: object, patience_s: float, **variables: str
) -> tuple[int, str]:
    """Return how the job ended, and all it said."""
    with torchrun(program, rank_count, *words, **variables) as job:
        said, _ = job.communicate(timeout=patience_s)
    return job.returncode, said


def pid_of_rank(job: subprocess.Popen[str], rank: int) -> int:
    """Find a process of a job by its environment."""
    for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    pytest.fail(f"there is no rank {rank}")
