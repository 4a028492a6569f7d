"""What a streamed model refuses changes nothing, and ends with the stream."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.streamed_models import (
    Blocks,
    expect_same,
    least_budget,
    loaded_whole,
    on_meta,
    weights_of,
)
from torch import nn

import fastpersist as fp
from fastpersist.errors import ConfigError

pytestmark = pytest.mark.usefixtures("small_units")


@pytest.fixture
def whole(path: Path) -> nn.Module:
    return loaded_whole(Blocks(), path)


@pytest.fixture(params=["least", "10MiB", "10MiB, in memory"])
def streamed(request: pytest.FixtureRequest, path: Path) -> Iterator[tuple[nn.Module, fp.WeightStream]]:
    """A model whose weights have no values, or are resident: what is refused must not depend on it."""
    model = on_meta(Blocks())
    budget = least_budget(lambda: on_meta(Blocks()), path) if request.param == "least" else "10MiB"
    with fp.stream(model, path, budget_bytes=budget) as stream:
        if "memory" in request.param:
            with torch.inference_mode():
                model(torch.tensor([1]))
        yield model, stream


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: model.to(torch.bfloat16),
    "to device": lambda model: model.to("meta"),
    "half": lambda model: model.half(),
    "cuda": lambda model: model.cuda(),
    "double": lambda model: model.double(),
    "part": lambda model: model.blocks[1].half(),
    "apply": lambda model: model.blocks[1][1]._apply(lambda each: each.clone()),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "deepcopy": copy.deepcopy,
    "deepcopy of a part": lambda model: copy.deepcopy(model.blocks),
    "pickle": pickle.dumps,
    "pickle of a part": lambda model: pickle.dumps(model.blocks[0]),
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "load": lambda model: model.load_state_dict(weights_of(Blocks())),
    "load a part": lambda model: model.blocks[1][1].load_state_dict(weights_of(Blocks().blocks[1][1])),
    "load one": lambda model: model.load_state_dict({"blocks.3.1.bias": torch.zeros(48)}, strict=False),
    "assign": lambda model: model.load_state_dict(weights_of(Blocks()), assign=True),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_model_refuses_changes_nothing_whatever_is_in_memory(
    what: str, streamed: tuple[nn.Module, fp.WeightStream], whole: nn.Module
) -> None:
    model, _ = streamed
    before = [(id(each), each.dtype, each.device) for each in model.parameters()]
    with pytest.raises(ConfigError, match=r"stream"):
        REFUSED[what](model)
    assert [(id(each), each.dtype, each.device) for each in model.parameters()] == before
    with torch.no_grad():
        expect_same(model(torch.tensor([1])), whole(torch.tensor([1])))


UNCHANGED: dict[str, Callable[[nn.Module], Any]] = {
    "to device": lambda model: model.to("cpu"),
    "to dtype": lambda model: model.to(torch.float32),
    "to both": lambda model: model.to(torch.device("cpu"), torch.float32, non_blocking=True),
    "float": lambda model: model.float(),
    "cpu": lambda model: model.cpu(),
    "type": lambda model: model.type(torch.float32),
    "part": lambda model: model.blocks[1].to("cpu"),
}


@pytest.mark.parametrize("what", UNCHANGED)
def test_a_conversion_to_what_the_weights_are_is_none(
    what: str, streamed: tuple[nn.Module, fp.WeightStream], whole: nn.Module
) -> None:
    model, stream = streamed
    before = [(id(each), each.dtype, type(each)) for each in model.parameters()]
    on_demand_count = stream.stats().on_demand_count
    UNCHANGED[what](model)
    assert [(id(each), each.dtype, type(each)) for each in model.parameters()] == before
    assert stream.stats().on_demand_count == on_demand_count
    for _ in range(2):
        with torch.no_grad():
            expect_same(model(torch.tensor([1])), whole(torch.tensor([1])))


def test_a_conversion_that_leaves_the_weights_alone_converts_what_is_added_to_them(
    streamed: tuple[nn.Module, fp.WeightStream],
) -> None:
    model, _ = streamed
    model.blocks[1].add_module("adapter", nn.Linear(48, 48, dtype=torch.float64))  # type: ignore[index, union-attr]
    adapter = model.get_submodule("blocks.1.adapter")
    adapter.weight.grad = torch.ones(48, 48, dtype=torch.float64)
    with pytest.raises(ConfigError, match="stream"):
        model.to(torch.bfloat16)
    assert adapter.weight.dtype == torch.float64
    model.to(torch.float32)
    assert adapter.weight.dtype == adapter.weight.grad.dtype == torch.float32
    model.get_submodule("blocks.1.2").half()  # it has no streamed weights
    model.train().zero_grad()


def test_a_model_that_is_not_streamed_any_more_takes_other_values(path: Path, whole: nn.Module) -> None:
    model = on_meta(Blocks())
    with fp.stream(model, path):
        pass
    model.load_state_dict(load_file(path), assign=True)
    expect_same(model(torch.tensor([1])).detach(), whole(torch.tensor([1])).detach())
    copy.deepcopy(model).to(torch.float64)


def test_without_assign_the_error_says_that_the_stream_is_closed_and_what_helps(path: Path) -> None:
    model = on_meta(Blocks())
    with fp.stream(model, path):
        pass
    with pytest.raises(RuntimeError, match=r"head\.weight has none, since its stream .* closed: .*assign=True"):
        model.load_state_dict(load_file(path))
    with pytest.raises(ConfigError, match="closed"):
        model.head.weight.data = torch.zeros(100, 48)
