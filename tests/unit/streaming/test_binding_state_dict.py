"""state_dict() of a streamed model lists its weights, as loaders of adapters need; none of the entries has values."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastpersist as fp


@pytest.fixture
def model(tmp_path: Path) -> Iterator[torch.nn.Module]:
    whole = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fp.save(whole.state_dict(), tmp_path / "model.safetensors")
    with fp.stream(whole, tmp_path / "model.safetensors", budget_bytes="1MiB"):
        yield whole


def test_names_shapes_and_dtypes_are_there_and_nothing_is_read(model: torch.nn.Module) -> None:
    twin = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).state_dict()
    for state, expected in ((model.state_dict(), twin), (model.state_dict(keep_vars=True), twin)):
        assert {name: (each.shape, each.dtype) for name, each in state.items()} == {
            name: (each.shape, each.dtype) for name, each in expected.items()
        }
    assert list(model[0].state_dict()) == ["weight", "bias"]


def test_an_entry_refuses_whatever_needs_its_values(model: torch.nn.Module) -> None:
    weight = model.state_dict()["0.weight"]
    for use in (
        lambda: weight + 1,
        lambda: weight.clone(),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), weight),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: copy.deepcopy(weight),
        lambda: torch.nn.Linear(4, 4).load_state_dict(model[0].state_dict()),
    ):
        with pytest.raises((fp.ConfigError, RuntimeError), match=r"0\.weight|fastpersist"):
            use()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_saving_the_entries_is_refused_with_the_way_out(model: torch.nn.Module, tmp_path: Path, suffix: str) -> None:
    for state in (model.state_dict(), dict(model.named_parameters())):
        with pytest.raises(fp.ConfigError, match=r"0\.weight, which stay on disk .* take the weights from the source"):
            fp.save(state, tmp_path / f"saved{suffix}")


def test_weights_that_are_no_weights_of_the_source_are_loaded_beside_the_others(model: torch.nn.Module) -> None:
    inputs = torch.randn(3, 4)
    expected = model.eval()(inputs)
    model[0].scale = torch.nn.Parameter(torch.ones(1))
    found = model.load_state_dict({"0.scale": torch.full((1,), 3.0)}, strict=False)
    assert model[0].scale.item() == 3
    assert "0.weight" in found.missing_keys
    assert torch.equal(model(inputs), expected)


def test_detach_stays_lazy(model: torch.nn.Module, tmp_path: Path) -> None:
    weight = model[0].weight.detach()
    assert torch.equal(weight + 0, fp.load(tmp_path / "model.safetensors")["0.weight"])
