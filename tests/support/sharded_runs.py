"""A tiny training run whose parameters are DTensors, and whose every step is computed exactly from its number.

All numbers are small fractions of powers of two, so it does not matter how the tensors are sharded, nor in which order
a processor adds: every rank, and a test without ranks, knows each bit of the state at a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

SHAPES: tuple[tuple[int, ...], ...] = ((7, 33), (40, 16), (5,), (1, 9), (300, 70))


def mesh_of_all(*sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks."""
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


def sharded(full: torch.Tensor, mesh: DeviceMesh | None, placements: list[Placement] | None) -> torch.Tensor:
    """Return this rank's shard of a tensor that all ranks know."""
    if mesh is None:
        return full
    placements = placements or [Shard(0)] * mesh.ndim
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def whole(value: Any) -> Any:
    """Return plain tensors in place of DTensors, nested; a collective."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value


class ShardedRun:
    """A model and its optimizer after a number of steps.

    Args:
        mesh: The device mesh of the ranks; None for plain tensors.
        placements: How tensors are sharded; None for Shard(0) in each dimension of the mesh.
        shapes: The shapes of the parameters.
        blank: Make all parameters zeros: a target to load into.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        placements: list[Placement] | None = None,
        shapes: tuple[tuple[int, ...], ...] = SHAPES,
        *,
        blank: bool = False,
    ) -> None:
        self.step = 0
        self._mesh = mesh
        self._placements = placements
        self.model = torch.nn.ParameterList(
            torch.nn.Parameter(sharded(torch.zeros(shape) if blank else _counted(shape, 3) / 64, mesh, placements))
            for shape in shapes
        )
        # Each step adds a bit to the momentum; after a dozen steps there are still some left.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0 if blank else 0.125, momentum=0.5)
        if blank:
            self.optimizer.param_groups[0]["momentum"] = 0.25

    def advance(self, step: int | None = None) -> ShardedRun:
        """Take the steps up to this one, by default one step."""
        target = self.step + 1 if step is None else step
        while self.step < target:
            self.step += 1
            for parameter in self.model:
                full = _counted(tuple(parameter.shape), self.step) / 64 - 0.5
                parameter.grad = sharded(full, self._mesh, self._placements)
            self.optimizer.step()
        return self

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "position": torch.arange(50) + self.step,
            "schedule": {"last": self.step, "rates": [0.5, 0.25], "name": "linear"},
            "step": self.step,
        }

    def targets(self) -> dict[str, Any]:
        """Return what `load(into=…)` fills."""
        return {"model": self.model, "optimizer": self.optimizer}


def _counted(shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + start * 13) % 61).float().reshape(shape)


def expected(step: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> dict[str, Any]:
    """Return the whole state at a step."""
    state = whole(ShardedRun(shapes=shapes).advance(step).state())
    state["model"] = dict(state["model"])
    return dict(state)
