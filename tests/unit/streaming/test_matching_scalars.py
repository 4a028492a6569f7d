"""Weights without dimensions: BatchNorm counts its batches in one, and some models scale by one."""

from __future__ import annotations

from pathlib import Path

import torch

import fastpersist as fp


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(inputs) * self.scale + self.norm.num_batches_tracked


def test_weights_of_no_dimension_are_streamed(tmp_path: Path) -> None:
    model = Scaled().eval()
    model.norm.num_batches_tracked += 7
    fp.save(model.state_dict(), tmp_path / "model.safetensors")
    inputs = torch.randn(3, 4)
    expected = model(inputs).detach()
    with fp.stream(model, tmp_path / "model.safetensors", budget_bytes="1MiB"):
        assert model.scale.shape == ()
        assert torch.equal(model(inputs), expected)
