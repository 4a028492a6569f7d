"""Weights streamed to a GPU: the results of the model loaded whole, however busy the stream is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gpu_device import DEVICE, GPU, keep_busy, synchronize

import fastpersist as fp

pytestmark = GPU

WIDTH = 512
WORDS = 4096


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("shift", torch.full((1,), 0.25), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.relu(self.up(self.norm(values)))) * self.scale + self.shift


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(6))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.embedding(ids)
        for layer in self.layers:
            values = layer(values)
        return self.head(values)


@pytest.fixture
def whole() -> Model:
    torch.manual_seed(7)
    return Model()


def save_untied(whole: Model, path: Path) -> None:
    """Save as safetensors, which have no shared memory."""
    state = whole.state_dict()
    del state["head.weight"]
    fp.save(state, path / "model.safetensors")


@pytest.mark.parametrize("budget_bytes", ["26MiB", "40MiB", "auto"])
@torch.no_grad()
def test_the_results_are_those_of_the_model_loaded_whole(budget_bytes: str, whole: Model, tmp_path: Path) -> None:
    fp.save({"model": whole.state_dict()}, tmp_path / "model.pt")
    ids = torch.randint(WORDS, (2, 5))
    expected = whole.to(DEVICE)(ids.to(DEVICE)).cpu()
    model = Model()
    with fp.stream(model, tmp_path / "model.pt", device=DEVICE, prefix="model.", budget_bytes=budget_bytes) as stream:
        assert {each.device for each in model.state_dict().values()} == {torch.device(DEVICE)}
        for _ in range(3):
            assert torch.equal(model(ids.to(DEVICE)).cpu(), expected)
        assert stream.stats().on_demand_count == 0


@torch.no_grad()
def test_no_place_is_filled_anew_while_the_stream_still_uses_it(whole: Model, tmp_path: Path) -> None:
    """All kernels of three passes wait behind one that takes long."""
    save_untied(whole, tmp_path)
    ids = torch.randint(WORDS, (1, 3), device=DEVICE)
    expected = whole.to(DEVICE)(ids).cpu()
    model = Model()
    with fp.stream(model, tmp_path / "model.safetensors", device=DEVICE, budget_bytes="26MiB"):
        for _ in range(3):
            keep_busy()
            found = model(ids)
            assert torch.equal(found.cpu(), expected)
    synchronize()


@torch.no_grad()
def test_values_are_converted_and_checked(whole: Model, tmp_path: Path) -> None:
    save_untied(whole, tmp_path)
    ids = torch.randint(WORDS, (1, 3), device=DEVICE)
    expected = whole.to(DEVICE, torch.bfloat16)(ids).cpu()
    model = Model()
    options = {"device": DEVICE, "budget_bytes": "64MiB", "dtype": torch.bfloat16, "verify": True}
    with fp.stream(model, tmp_path / "model.safetensors", **options):
        for layer in model.layers:
            layer.shift = layer.shift.to(torch.bfloat16)
        assert torch.equal(model(ids).cpu(), expected)
