"""A weight that is on disk cannot be changed in memory, by no way that would go unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.streamed_models import expect_same, least_budget, loaded_whole, on_meta, save_weights

import fastpersist as fp
from fastpersist.errors import ConfigError


def test_data_is_refused_since_a_change_through_it_would_be_lost(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fp.save(model.state_dict(), tmp_path / "model.safetensors")
    with fp.stream(model, tmp_path / "model.safetensors", budget_bytes="1MiB"):
        with pytest.raises(fp.ConfigError, match=r"0\.weight"):
            model[0].weight.data += 1  # as peft merges an adapter
        with pytest.raises(fp.ConfigError, match=r"0\.weight"):
            model[0].weight.data.clone()


def test_an_address_is_refused_where_its_memory_would_not_last(tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))

    path = save_weights(build(), tmp_path / "model.safetensors")
    model = on_meta(build())
    seen: list[bool] = []
    with torch.no_grad(), fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(build()), path)):
        last = model[3].weight
        with pytest.raises(ConfigError, match=r"data_ptr needs the values of 3\.weight"):
            last.data_ptr()
        with pytest.raises(ConfigError, match=r"data_ptr needs the values of 3\.bias"):
            save_file({"bias": model[3].bias}, tmp_path / "out.safetensors")
        model[0].register_forward_pre_hook(lambda *_: seen.append(last.data_ptr() == last.detach().data_ptr()))
        model(torch.ones(1, 300))
    assert seen == [True]


@pytest.mark.parametrize("budget_bytes", [None, "200MiB"])
def test_what_stays_in_memory_cannot_be_merged_either_and_is_as_it_was(
    budget_bytes: str | None, tmp_path: Path
) -> None:
    """An adapter that is merged into some layers, until one raises, would leave a model of both kinds."""

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(5)))

    path = save_weights(build(), tmp_path / "model.safetensors")
    whole, x = loaded_whole(build(), path), torch.ones(1, 1500)
    expected = whole(x).detach()
    budget = budget_bytes or least_budget(lambda: on_meta(build()), path) + (10 << 20)
    model = on_meta(build())
    with torch.no_grad(), fp.stream(model, path, budget_bytes=budget) as stream:
        expect_same(model(x), expected)
        assert stream.stats().resident_unit_count > 0
        for layer in model:
            with pytest.raises(ConfigError, match=r"needs the values of \d\.weight"):
                layer.weight.data += 1
            with pytest.raises(ConfigError, match=r"needs the values of \d\.weight"):
                layer.weight.data = torch.zeros(1500, 1500)
        expect_same(model(x), expected)
        seen = []
        for layer in model:
            layer.register_forward_pre_hook(lambda layer, inputs: seen.append(layer.weight.data.shape))
        model(x)
        assert len(seen) == 5  # a forward may look
