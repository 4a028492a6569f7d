"""Several ranks go back to a step, and keep and remove steps, together."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.committed_steps import newest_of, save_steps, state
from support.process_groups import rank_endings, run_ranks
from support.store_runs import two_stores

import fastpersist as fp
from fastpersist.errors import CheckpointNotFoundError, PeerError


def test_only_rank_0_tells_of_a_misspelt_metric(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> int:
        with fp.Checkpointer(tmp_path, keep_best=(1, "los", "min"), process_group=dist.group.WORLD) as checkpoints:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                checkpoints.save(1, state(1), metrics={"loss": 1.0} if rank == 0 else None)
        return len(caught)

    assert run_ranks(2, work) == [1, 0]


def test_ranks_go_back_and_remove_together(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)

    def work(rank: int, count: int) -> list[Any]:
        with fp.Checkpointer(
            tmp_path, keep=3, keep_best=(1, "loss", "min"), process_group=dist.group.WORLD
        ) as checkpoints:
            found: list[Any] = [checkpoints.load("best")["step"], checkpoints.load(10)["step"]]
            checkpoints.save(11, state(11), metrics={"loss": 0.1}).result()
            found += [checkpoints.load()["step"], checkpoints.load("best")["step"]]
            found += [checkpoints.discard_after(11), checkpoints.discard_after(11)]
            dist.barrier()
            found += [checkpoints.steps(), checkpoints.latest(), checkpoints.load()["step"]]
            return found

    expected = [30, 10, 11, 11, [30], [], [10, 11], 11, 11]
    assert run_ranks(2, work) == [expected, expected]
    assert newest_of(tmp_path) == 11


def test_parts_in_other_stores_go_with_the_step(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)

    def work(rank: int, count: int) -> list[Any]:
        with fp.Checkpointer(roots[rank], keep=3, process_group=dist.group.WORLD, node_local="parts") as checkpoints:
            for step in (10, 20, 30):
                checkpoints.save(step, state(step))
            found: list[Any] = [checkpoints.load(10)["step"]]
            checkpoints.save(11, state(11)).result()
            found += [checkpoints.steps(), checkpoints.load()["step"], checkpoints.discard_after(11)]
            checkpoints.delete(10)
            return [*found, checkpoints.steps(), checkpoints.latest()]

    expected = [10, [10, 11, 30], 11, [30], [11], 11]
    assert run_ranks(2, work) == [expected, expected]
    numbers = []
    for root in roots:
        assert (root / "LATEST").read_text() == "step-00000011\n"
        numbers.append(json.loads((root / "step-00000011" / "MANIFEST.json").read_text())["commit_number"])
    assert numbers == [4, 4]


def test_what_rank_0_cannot_remove_fails_on_all(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)

    def work(rank: int, count: int) -> None:
        with fp.Checkpointer(tmp_path, process_group=dist.group.WORLD) as checkpoints:
            checkpoints.delete(7)

    first, other = rank_endings(2, work)
    assert first.error_type is CheckpointNotFoundError
    assert other.error_type is PeerError
    assert other.error_attributes["rank"] == 0
    assert "no step 7" in other.error_text
