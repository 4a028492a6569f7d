"""Ranks that share no file system, on one machine: each is given a root of its own, or a mount of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.runs import Run
from support.sameness import assert_same

import fastpersist as fp

SIZES = (280_000, 7)
"""Of the parameters of a `Run`: the first, and its two moments, are cut."""

Run((1,)).advance()  # the first optimizer of a process imports for seconds: here once, not in every rank


def two_stores(directory: Path, count: int = 2) -> list[Path]:
    """Return the roots of ranks of which the first half sees one file system, and the others another one."""
    return [directory / ("a" if rank < (count + 1) // 2 else "b") for rank in range(count)]


def checkpoints_at(root: Path, run: Run, *, group: dist.ProcessGroup | None = None, **options: Any) -> fp.Checkpointer:
    """Return a Checkpointer of all ranks, or of those of a group."""
    group = group or dist.group.WORLD
    options = {"node_local": "parts", **options}
    return fp.Checkpointer(root, optimizer=run.optimizer, process_group=group, writers="all", **options)


def train(rank: int, count: int, roots: Sequence[Path], steps: int, first: int = 1, **options: Any) -> None:
    """Save some steps; in each rank, below its own root."""
    run = Run(SIZES).advance(first - 1)
    with checkpoints_at(roots[rank], run, **options) as checkpoints:
        for _ in range(steps):
            run.advance()
            checkpoints.save(run.step, run.state(), rank_state={"rank": rank, "step": run.step})


def resume(rank: int, count: int, roots: Sequence[Path], **options: Any) -> int:
    """Load the newest step, whole and in place; return which it is."""
    run = Run(SIZES)
    with checkpoints_at(roots[rank], run) as checkpoints:
        whole = checkpoints.load(**options)
        run.load(checkpoints, **options)
    expected = Run(SIZES).advance(run.step)
    assert_same(run.model.state_dict(), expected.model.state_dict())
    assert_same(run.optimizer.state_dict(), expected.optimizer.state_dict())
    own = whole.pop("rank_state", None)
    assert own in (None, {"rank": rank, "step": run.step})
    assert_same(whole, expected.state())
    return run.step


def step_path(root: Path, step: int) -> Path:
    """Return the directory of a step."""
    return root / f"step-{step:08d}"


def ordinary_file(directory: Path, step: int) -> bytes:
    """Return what one rank alone would have written of a step."""
    path = directory / "alone" / "state.pt"
    path.parent.mkdir(exist_ok=True)
    fp.save(Run(SIZES).advance(step).state(), path)
    return path.read_bytes()
