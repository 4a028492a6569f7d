"""Every example runs as its first lines say, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support.programs import run_file_in_fork
from support.torchrun import pid_of_rank, torchrun

import fastpersist as fp

FOLDER = Path(__file__).parents[2] / "examples"
WITH_TESTS_OF_THEIR_OWN = {
    *("ddp_partitioned.py", "deepspeed_zero.py", "fsdp_checkpointer.py", "fsdp_dcp_reshard.py", "stateful_loader.py"),
    *("graph_larger_than_memory.py", "lost_rank.py", "torchft_replicas.py", "train_gpt.py"),
}
SHARED = {"memory_group.py"}  # imported by examples; no program
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name not in WITH_TESTS_OF_THEIR_OWN | SHARED)
SMALL = {
    "accelerate_loop.py": ["--steps", 10, "--width", 16],
    "embedding_on_disk.py": ["--rows", 20_000, "--lookups", 3],
    "huggingface_trainer.py": ["--steps", 10],
    "lightning_trainer.py": ["--steps", 6],
}
# What torch_geometric calls when it is imported.
IGNORED = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"


def command_of(example: Path, *words: object) -> list[str]:
    return [sys.executable, "-W", "error", "-W", IGNORED, str(example), *map(str, words)]


def test_there_are_examples() -> None:
    assert EXAMPLES
    assert all((FOLDER / name).is_file() for name in WITH_TESTS_OF_THEIR_OWN | SHARED | set(SMALL))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    command = command_of(example, *SMALL.get(example.name, []))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir()), "an example cleans up after itself"


def test_unchanged_program_makes_the_directory_that_it_is_given(tmp_path: Path) -> None:
    code, _, errors = run_file_in_fork(FOLDER / "torch_save_unchanged.py", tmp_path / "new" / "run", directory=tmp_path)
    assert (code, errors) == (0, "")
    assert (tmp_path / "new" / "run" / "checkpoint.pt").exists()


def test_rows_of_the_graph_are_read_both_ways_alike(tmp_path: Path) -> None:
    command = command_of(FOLDER / "graph_larger_than_memory.py", "--nodes", 20_000, "--seconds", 0.5)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir()), "an example cleans up after itself"
    first_losses = re.findall(r"loss ([0-9.]+) →", done.stdout)
    assert len(first_losses) == 3, done.stdout
    assert len(set(first_losses)) == 1, "the first batch has the same seeds, and so the same rows"


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


# --- several processes


DDP_PATIENCE_S = 60
STOCK_LOAD = """
import sys, torch
state = torch.load(sys.argv[1], weights_only=True)
assert "fastpersist" not in sys.modules
print(state["step"])
"""


def run_ddp(root: Path, count: int, step_count: int) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run examples/ddp_partitioned.py with so many processes; nothing of it is left afterwards."""
    words = ["--steps", step_count, "--width", 384]  # large enough to cut
    return torchrun(FOLDER / "ddp_partitioned.py", count, root, *words)


def lines_until(job: subprocess.Popen[str], text: str) -> list[str]:
    """Read what a job says up to a line with this text."""
    assert job.stdout is not None
    lines: list[str] = []
    for line in job.stdout:
        lines.append(line.rstrip())
        if text in line:
            return lines
    pytest.fail("\n".join(["it ended too early:", *lines]))


def test_ranks_that_lose_one_repeat_the_steps_that_were_not_saved(tmp_path: Path) -> None:
    command = command_of(FOLDER / "lost_rank.py", tmp_path / "run")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    resumed = re.findall(r"generation 1: rank \d goes on from step (\d+)", done.stdout)
    assert len(resumed) == 3
    assert len(set(resumed)) == 1
    losses: dict[str, set[str]] = {}
    for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", done.stdout, re.MULTILINE):
        losses.setdefault(step, set()).add(loss)
    assert sorted(map(int, losses)) == list(range(1, 16))
    assert all(len(found) == 1 for found in losses.values())
    assert fp.Checkpointer(tmp_path / "run").steps() == [13, 14, 15]


def test_ranks_that_lose_one_go_on_with_another_number(tmp_path: Path) -> None:
    saved = 0
    for count, lost in [(2, 1), (3, 0)]:
        with run_ddp(tmp_path, count, 100_000) as job:
            lines = lines_until(job, f"step {saved + 3} ")
            resumed = re.findall(rf"rank \d of {count} resumed at step {saved}(?!\d)", "".join(lines))  # lines may mix
            assert len(resumed) == (count if saved else 0)
            os.kill(pid_of_rank(job, lost), signal.SIGKILL)
            said, _ = job.communicate(timeout=DDP_PATIENCE_S)
            assert job.returncode not in (0, None), said
        newest = fp.Checkpointer(tmp_path).latest()
        assert newest is not None
        assert newest > saved  # of three, two may be unfinished
        assert fp.verify(tmp_path / f"step-{newest:08d}").ok
        saved = newest
    with run_ddp(tmp_path, 2, saved + 2) as job:
        said, _ = job.communicate(timeout=DDP_PATIENCE_S)
        assert job.returncode == 0, said
    assert f"rank 1 of 2 resumed at step {saved}" in said
    assert fp.Checkpointer(tmp_path).steps()[-2:] == [saved + 1, saved + 2]
    assert not list(tmp_path.glob(".step-*"))
    shares = [int(share) for share in re.findall(r"bytes by rank \[\[(\d+), (\d+)\]\]", said)[0]]
    assert min(shares) > 1 << 20
    assert max(shares) - min(shares) <= 4096
    path = tmp_path / f"step-{saved + 2:08d}" / "state.pt"
    stock = subprocess.run([sys.executable, "-c", STOCK_LOAD, str(path)], capture_output=True, text=True, check=False)
    assert (stock.stdout, stock.stderr) == (f"{saved + 2}\n", "")


@pytest.mark.parametrize(
    "name", ["ddp_partitioned.py", "fsdp_checkpointer.py", "fsdp_dcp_reshard.py", "stateful_loader.py"]
)
def test_what_needs_torchrun_says_so_without_it(name: str, tmp_path: Path) -> None:
    code, _, errors = run_file_in_fork(FOLDER / name, directory=tmp_path)
    assert code == 2
    assert "which torchrun starts" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("name", ["generate_larger_than_memory.py", "quickstart.py", "torch_save_unchanged.py"])
def test_help_is_no_name_of_a_directory(name: str, tmp_path: Path) -> None:
    code, output, _ = run_file_in_fork(FOLDER / name, "--help", directory=tmp_path)
    assert code == 0
    assert output.startswith("usage: ")
    assert not list(tmp_path.iterdir())
