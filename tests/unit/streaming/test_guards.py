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
    "apply": lambda model: model.blocks[1][1]._apply(lambda each: each),
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
