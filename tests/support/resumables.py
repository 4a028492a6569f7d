"""What the tests of resuming share: a small training run, its state, and load_state with its usual options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.specimens import Network, train

import fastpersist as fp
from fastpersist.loading import restore


def load(path: Path, into: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    defaults = {"map_location": None, "verify": False, "weights_only": True, "engine": "auto"}
    return restore.load_state(str(path), into=into, **(defaults | options))


def save(obj: Any, path: Path, **options: Any) -> None:
    fp.save(obj, path, durable=False, **options)


def network(seed: int = 3) -> Network:
    torch.manual_seed(seed)
    return Network()


def resumable(seed: int = 3, steps: int = 2) -> dict[str, Any]:
    """Make a model and its optimizer, and train them for some steps."""
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer}


def state_of(parts: dict[str, Any]) -> dict[str, Any]:
    """Return what a training loop would save."""
    return {**{name: part.state_dict() for name, part in parts.items()}, "step": 5, "rng": torch.arange(9)}


def storages_of(value: Any) -> set[int]:
    """Return the addresses of all storages of a module or an optimizer."""
    found = []
    if isinstance(value, torch.nn.Module):
        found = list(value.state_dict(keep_vars=True).values())
    elif isinstance(value, torch.optim.Optimizer):
        found = [t for state in value.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in found}
