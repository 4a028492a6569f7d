"""examples/deepspeed_zero.py runs under torchrun, resumes where it was, and takes the same way."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastpersist as fp

EXAMPLE = Path(__file__).parent.parent / "examples" / "deepspeed_zero.py"
PATIENCE_S = 110  # the first time, DeepSpeed compiles

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def torchrun(root: Path, step_count: int) -> list[str]:
    """Train up to a step on two ranks; return the lines of rank 0."""
    words = ["--nproc-per-node", 2, EXAMPLE, root, "--steps", step_count, "--every", 2, "--width", 32]
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    ) as job:
        try:
            said, _ = job.communicate(timeout=PATIENCE_S)
        finally:
            if job.poll() is None:
                job.terminate()  # which ends its processes first
    assert job.returncode == 0, said
    return [line for line in said.splitlines() if line.startswith(("step ", "resumed "))]


@needs_deepspeed
def test_training_that_runs_twice_resumes_and_takes_the_same_way(tmp_path: Path) -> None:
    whole = torchrun(tmp_path / "whole", 5)
    first, second = torchrun(tmp_path / "parts", 3), torchrun(tmp_path / "parts", 5)
    assert second[0] == "resumed at step 2"
    assert first[:2] + second[1:] == whole
    assert [line.split()[1] for line in whole] == ["1", "2", "3", "4", "5"]
    assert (tmp_path / "parts" / "latest").read_text() == "global_step4"
    assert fp.verify(tmp_path / "parts" / "global_step4").ok


def test_it_says_how_it_is_started() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torchrun starts; --help shows how" in done.stderr
