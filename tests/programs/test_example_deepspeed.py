"""examples/deepspeed_zero.py runs under torchrun, resumes where it was, and takes the same way."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.programs import run_file_in_fork
from support.torchrun import run_to_its_end

import fastpersist as fp

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepspeed_zero.py"
PATIENCE_S = 400  # the first time, DeepSpeed compiles

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def train(root: Path, step_count: int) -> list[str]:
    """Train up to a step on two ranks; return the lines of rank 0."""
    words = [root, "--steps", step_count, "--every", 2, "--width", 32]
    code, said = run_to_its_end(EXAMPLE, 2, *words, patience_s=PATIENCE_S, DS_ACCELERATOR="cpu")
    assert code == 0, said
    return [line for line in said.splitlines() if line.startswith(("step ", "resumed "))]


@needs_deepspeed
@pytest.mark.timeout(3 * PATIENCE_S)
def test_training_that_runs_twice_resumes_and_takes_the_same_way(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 5)
    first, second = train(tmp_path / "parts", 3), train(tmp_path / "parts", 5)
    assert second[0] == "resumed at step 2"
    assert first[:2] + second[1:] == whole
    assert [line.split()[1] for line in whole] == ["1", "2", "3", "4", "5"]
    assert (tmp_path / "parts" / "latest").read_text() == "global_step4"
    assert fp.verify(tmp_path / "parts" / "global_step4").ok


def test_it_says_how_it_is_started(tmp_path: Path) -> None:
    code, _, errors = run_file_in_fork(EXAMPLE, directory=tmp_path)
    assert code == 2
    assert "torchrun starts; --help shows how" in errors
