"""A module whose weights are all its own is streamed, whatever children without weights it has."""

from __future__ import annotations

from pathlib import Path

import torch

import fastpersist as fp


class FusedExperts(torch.nn.Module):
    """The experts of a layer in one tensor, with an activation for a child: so has transformers' Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.randn(4, 1 << 19))  # 8 MiB: more than a unit has
        self.more = torch.nn.Parameter(torch.randn(1 << 10))
        self.activation = torch.nn.SiLU()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.activation(inputs * self.gate_up.sum() + self.more[0])


def test_only_a_module_with_weights_below_it_has_to_stay(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(FusedExperts() for _ in range(5)))
    expected = model(torch.ones(3)).detach()
    fp.save(model.state_dict(), tmp_path / "model.safetensors")
    with fp.stream(model, tmp_path / "model.safetensors", budget_bytes="26MiB") as stream:
        assert stream.stats().streamed_bytes > 0
        assert torch.equal(model(torch.ones(3)), expected)
