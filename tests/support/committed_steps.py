"""A root with steps of known contents, and the newest of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fastpersist as fp


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((3000,), float(step)), "step": step}


def save_steps(root: Path, *steps: int, **options: Any) -> None:
    with fp.Checkpointer(root, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), metrics={"loss": 100.0 / step})


def newest_of(root: Path) -> int:
    """Return the newest step, of which latest(), LATEST and load() must say the same."""
    reader = fp.Checkpointer(root)
    newest = reader.latest()
    assert newest is not None
    assert (root / "LATEST").read_text() == f"step-{newest:08d}\n"
    assert reader.load()["step"] == newest
    return newest
