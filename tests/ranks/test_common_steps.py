"""A run that may be the first one: load(missing_ok=True) gives None where nothing is committed, alike on all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.runs import Run
from support.store_runs import SIZES, checkpoints_at, step_path, train, two_stores

import fastpersist as fp


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_nothing_is_committed_or_not_that_step(tmp_path: Path, sharded: bool) -> None:
    target = torch.zeros(2)
    with fp.Checkpointer(tmp_path / "new", sharded=sharded) as checkpoints:
        assert checkpoints.load(missing_ok=True) is None
        assert checkpoints.load(into={"w": target}, keys=["v"], missing_ok=True) is None
        assert checkpoints.load(3, missing_ok=True) is None
        assert not (tmp_path / "new").exists()
        with pytest.raises(fp.CheckpointNotFoundError):
            checkpoints.load(missing_ok=False)
        checkpoints.save(1, {"w": torch.ones(2)})
        assert checkpoints.load(into={"w": target}, missing_ok=True)["w"] is target  # waits for the save
        assert checkpoints.load(2, missing_ok=True) is None
        with pytest.raises(fp.CheckpointNotFoundError):
            checkpoints.load(2)


@pytest.mark.filterwarnings("ignore:.*going back")
def test_step_that_is_damaged_is_not_missing(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)})
    (tmp_path / "step-00000001" / "state.pt").unlink()
    for step in (None, 1):
        with pytest.raises((fp.CorruptionError, fp.StorageError)):
            fp.Checkpointer(tmp_path).load(step, missing_ok=True)


def resumed_step(rank: int, count: int, roots: list[Path], step: int | None = None) -> Any:
    """Begin as a training does, and go on with a collective of its own, which needs all ranks."""
    run = Run(SIZES)
    with checkpoints_at(roots[rank], run) as checkpoints:
        sees = checkpoints.latest()
        found = checkpoints.load(step, into=run.targets(), missing_ok=True)
    steps = [None] * count
    dist.all_gather_object(steps, None if found is None else found["step"])
    assert len(set(steps)) == 1
    return sees, steps[0]


@pytest.mark.filterwarnings("ignore:.*rank_state is left out")
@pytest.mark.parametrize("step", [None, 2])
def test_ranks_that_see_different_steps_load_the_same(tmp_path: Path, step: int | None) -> None:
    roots = two_stores(tmp_path)
    assert run_ranks(2, resumed_step, roots) == [(None, None)] * 2
    run_ranks(2, train, roots, 2)
    new = tmp_path / "new"  # a disk that was replaced
    assert run_ranks(3, resumed_step, [new, *roots], step) == [(None, 2), (2, 2), (2, 2)]
    assert run_ranks(3, resumed_step, [*roots, new], step) == [(2, 2), (2, 2), (None, 2)]
    assert run_ranks(2, resumed_step, roots, 7) == [(2, None)] * 2


def test_disk_that_was_replaced_is_no_first_run(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train, roots, 1)
    shutil.rmtree(roots[0])
    for ending in rank_endings(2, resumed_step, roots, 1):
        assert ending.error_type is not None
        assert issubclass(ending.error_type, fp.FastPersistError), ending.trace
        assert "no rank sees the parts of rank 0" in ending.error_text
    assert step_path(roots[1], 1).exists()
