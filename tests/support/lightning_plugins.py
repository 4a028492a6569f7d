"""A model with its optimizer, and our Lightning plugin without Lightning around it; disks that are full."""

from __future__ import annotations

import errno
from typing import Any

import torch
from support.lightning_runs import IGNORED
from support.training import HeldFilesystem

import fastpersist as fp
from fastpersist.integrations.lightning import FastPersistCheckpointIO

__all__ = ["IGNORED", "FullOnceReleased", "Training", "plugin_of"]


class FullOnceReleased(HeldFilesystem):
    """Once released, there is no room for the files of one name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        super().allocate(fd, size_bytes, path)
        if self._name in path:
            raise fp.NoSpaceError(errno.ENOSPC, f"reserving {size_bytes} bytes for {path}: disk full", path)


class Training:
    """A model, its optimizer, and a checkpoint of them."""

    def __init__(self, *, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(200, 30)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2, fused=fused)
        self.step_count = 0
        self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        self.optimizer.step()
        self.step_count += 1

    def checkpoint(self, **more: Any) -> dict[str, Any]:
        own = {"state_dict": self.model.state_dict(), "optimizer_states": [self.optimizer.state_dict()]}
        return {"global_step": self.step_count, **own, **more}


def plugin_of(training: Training | None = None, **options: Any) -> FastPersistCheckpointIO:
    return FastPersistCheckpointIO(optimizer=None if training is None else training.optimizer, **options)
