"""Every example runs as its first lines say, in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fastpersist as fp

FOLDER = Path(__file__).parent.parent / "examples"
WITH_TESTS_OF_THEIR_OWN = {"train_gpt.py"}
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name not in WITH_TESTS_OF_THEIR_OWN)


def command_of(example: Path, *words: object) -> list[str]:
    return [sys.executable, "-W", "error", str(example), *map(str, words)]


def test_there_are_examples() -> None:
    assert EXAMPLES
    assert all((FOLDER / name).is_file() for name in WITH_TESTS_OF_THEIR_OWN)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(command_of(example), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir()), "an example cleans up after itself"


def train(root: Path, step_count: int) -> list[str]:
    """Run examples/train_gpt.py up to a step; return its lines."""
    command = command_of(FOLDER / "train_gpt.py", root, "--steps", step_count, "--width", 16)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_training_that_runs_twice_resumes_and_takes_the_same_way(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6)
    first, second = train(tmp_path / "parts", 4), train(tmp_path / "parts", 6)
    assert second[0] == "resumed at step 4"
    assert first[:-1] + second[1:-1] == whole[:-1]
    assert [line.split()[1] for line in whole[:-1]] == ["1", "2", "3", "4", "5", "6"]
    assert fp.Checkpointer(tmp_path / "parts").steps() == [4, 5, 6]


def test_training_that_is_told_to_end_saves_first_and_resumes_there(tmp_path: Path) -> None:
    command = command_of(FOLDER / "train_gpt.py", tmp_path, "--steps", 100_000, "--width", 16)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        while "step 3" not in child.stdout.readline():
            assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        lines, errors = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM, errors
    told = [int(step) for step in re.findall("^step ([0-9]+)", lines, re.MULTILINE)]
    saved = int(re.findall("step ([0-9]+) was saved because of SIGTERM", errors)[0])
    assert saved == max(told, default=3) + 1
    assert fp.Checkpointer(tmp_path).latest() == saved
    assert train(tmp_path, saved + 1)[0] == f"resumed at step {saved}"
