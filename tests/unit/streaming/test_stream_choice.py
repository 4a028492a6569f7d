"""What stays in memory is chosen anew when passes have shown how a model uses its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.streamed_models import expect_same, least_budget, loaded_whole, on_meta, save_weights
from torch import nn

import fastpersist as fp

pytestmark = pytest.mark.usefixtures("small_units")

WIDTH = 64


class Mixer(nn.Module):
    """Uses the weights of a child that it never calls, as Mamba's mixers do; it is too large for one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2 * WIDTH))
        self.before = nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.behind = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x)) * self.scale[:WIDTH]
        inside = self.convolution
        x = nn.functional.conv1d(x.mT, inside.weight, inside.bias, padding=1, groups=WIDTH).mT
        result: torch.Tensor = self.behind(torch.tanh(x))
        return result


def mixers() -> nn.Module:
    return nn.Sequential(*(Mixer() for _ in range(4)))


@pytest.mark.parametrize("extra_bytes", [0, 30_000, 60_000])
def test_weights_that_a_parent_uses_are_read_ahead_with_it_from_the_second_pass_on(
    extra_bytes: int, tmp_path: Path
) -> None:
    whole = mixers()
    path = save_weights(whole, tmp_path / "model.safetensors")
    loaded_whole(whole, path)
    model, x = on_meta(mixers()), torch.randn(2, 5, WIDTH)
    budget = least_budget(lambda: on_meta(mixers()), path) + extra_bytes
    with torch.inference_mode(), fp.stream(model, path, budget_bytes=budget) as stream:
        counts = []
        for _ in range(5):
            expect_same(model(x), whole(x))
            counts.append(stream.stats().on_demand_count)
        stats = stream.stats()
    assert counts[0] == 8
    if extra_bytes:
        assert counts == counts[:1] * 5
    assert stats.ring_bytes + stats.resident_bytes <= budget
    assert stats.outside_count == 0


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
        self.decoder = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def forward(self, encoded: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decoder(encoded)
        return result


def test_units_that_are_used_once_in_many_passes_do_not_stay(tmp_path: Path) -> None:
    whole = EncoderDecoder()
    path = save_weights(whole, tmp_path / "model.safetensors")
    loaded_whole(whole, path)
    model, x = on_meta(EncoderDecoder()), torch.randn(2, WIDTH)
    budget = least_budget(lambda: on_meta(EncoderDecoder()), path) + 100_000
    with torch.inference_mode(), fp.stream(model, path, budget_bytes=budget) as stream:
        encoded = model.encoder(x)
        read = []
        for _ in range(12):
            before_bytes = stream.stats().read_bytes
            expect_same(model(encoded), whole(whole.encoder(x)))
            read.append(stream.stats().read_bytes - before_bytes)
        stays = {stream._units[number].name.split(".")[0] for number in stream._prefetch.residents}
        assert stays == {"decoder"}
        assert read[-1] < read[4]
        expect_same(model.encoder(x), whole.encoder(x))
        expect_same(model(encoded), whole(whole.encoder(x)))
        stats = stream.stats()
    assert stats.ring_bytes + stats.resident_bytes <= budget
    assert stats.outside_count == 0


def test_a_model_whose_units_are_used_alike_keeps_its_residents(tmp_path: Path) -> None:
    whole = EncoderDecoder().decoder
    path = save_weights(whole, tmp_path / "model.safetensors")
    model, x = on_meta(EncoderDecoder().decoder), torch.randn(2, WIDTH)
    budget = least_budget(lambda: on_meta(EncoderDecoder().decoder), path) + 40_000
    with torch.inference_mode(), fp.stream(model, path, budget_bytes=budget) as stream:
        first = stream._prefetch.residents
        assert 0 < len(first) < 8
        for _ in range(12):
            model(x)
        assert stream._prefetch.residents == first
        assert stream.stats().read_count == 8 + 11 * (8 - len(first)) + len(stream._prefetch._ahead)
