"""examples/stateful_loader.py under torchrun: no sample is left out or comes twice, whatever the number of ranks."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from support.torchrun import pid_of_rank, run_to_its_end, torchrun

import fastpersist as fp

EXAMPLE = Path(__file__).parents[2] / "examples" / "stateful_loader.py"
PATIENCE_S = 120
RANK_COUNTS = (4, 2)
STEPS = 3  # of each run
SHARD_COUNT = 10


def seen_in(said: str, rank_count: int, step_count: int) -> list[tuple[int, int]]:
    """Return the samples that were seen, shard and number, if so many steps were taken."""
    lines = re.findall(rf"step \d+ rank \d of {rank_count} saw ({{.+?}})", said)  # lines may mix
    assert len(lines) == rank_count * step_count, said
    return [(int(shard), int(number)) for line in lines for shard, number in re.findall(r"(\d+): (\d+)", line)]


def train(root: Path, rank_count: int, steps: int, step_count: int = STEPS) -> list[tuple[int, int]]:
    """Train up to a step, which takes so many steps; return the samples that were seen."""
    words = [root, "--steps", steps, "--every", STEPS]
    code, said = run_to_its_end(EXAMPLE, rank_count, *words, patience_s=PATIENCE_S)
    assert code == 0, said
    return seen_in(said, rank_count, step_count)


def test_every_sample_comes_once_with_any_number_of_ranks(tmp_path: Path) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for run, rank_count in enumerate(RANK_COUNTS, 1):
        seen.update(train(tmp_path, rank_count, run * STEPS))
    assert set(seen.values()) == {1}
    assert seen.total() == sum(2 * STEPS * rank_count for rank_count in RANK_COUNTS)
    ends = {shard: 1 + max(number for other, number in seen if other == shard) for shard, _ in seen}
    assert set(seen) == {(shard, number) for shard, end in ends.items() for number in range(end)}
    path = tmp_path / f"step-{len(RANK_COUNTS) * STEPS:08d}"
    positions: dict[int, int] = {}
    for rank in range(RANK_COUNTS[-1]):
        positions.update(fp.load(path / f"rank-{rank:05d}.pt")["positions"])
    assert {shard: positions[shard] for shard in ends} == ends
    assert sorted(positions) == list(range(SHARD_COUNT))


@pytest.mark.parametrize("told", ["one rank", "torchrun"])
def test_preempted_ranks_save_one_step_and_other_ranks_go_on_there(tmp_path: Path, told: str) -> None:
    said = ""
    with torchrun(EXAMPLE, 3, tmp_path, "--steps", 100_000, "--every", 100_000) as job:
        assert job.stdout is not None
        while "step 4 rank" not in said:
            said += (line := job.stdout.readline())
            assert line, said
        os.kill(job.pid if told == "torchrun" else pid_of_rank(job, 1), signal.SIGTERM)
        said += job.stdout.read()  # not communicate(), which would lose what is read ahead
    assert job.returncode != 0
    [saved] = fp.Checkpointer(tmp_path).steps()
    assert said.count(f"step {saved} was saved because of SIGTERM") == 3, said
    seen = Counter(seen_in(said, 3, saved))
    steps = saved + STEPS - saved % STEPS
    seen.update(train(tmp_path, 2, steps, steps - saved))
    assert set(seen.values()) == {1}
    assert fp.Checkpointer(tmp_path).steps() == [saved, steps]
