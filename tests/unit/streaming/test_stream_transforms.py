"""A streamed model in what torch does with functions: torch.func's transforms, traces; and its changes and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import Report, run_in_child
from support.streamed_models import Blocks, least_budget, loaded_whole, on_meta, save_weights
from torch import nn

import fastpersist as fp
from fastpersist.errors import ConfigError, UnsupportedError

# torch itself makes its decompositions by torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")

WIDTH = 512
INPUT = torch.linspace(-1.0, 1.0, 3 * WIDTH).view(3, WIDTH)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "layers.safetensors"
    save_weights(layers(), path)
    return path


@pytest.fixture(params=["resident", "ring"])
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "resident":
        return "auto"
    monkeypatch.setattr("fastpersist.streaming.stream._UNIT_BYTES_MIN", WIDTH * WIDTH * 4 + WIDTH * 4)
    return 3_300_000  # of 6.3 MB


def jvp(model: nn.Module) -> Any:
    return torch.func.jvp(model, (INPUT,), (INPUT,))


def vmap(model: nn.Module) -> Any:
    return (torch.func.vmap(model)(INPUT),)


def functionalize(model: nn.Module) -> Any:
    with torch.no_grad():
        return (torch.func.functionalize(model)(INPUT),)


@pytest.mark.parametrize("transform", [jvp, vmap, functionalize])
def test_transforms_give_what_they_give_of_the_model_loaded_whole(
    transform: Callable[[nn.Module], Any], file: Path, budget: Any
) -> None:
    def work(report: Report) -> None:
        expected = transform(loaded_whole(layers(), file))
        model = layers()
        with fp.stream(model, file, budget_bytes=budget):
            for _ in range(2):
                found = transform(model)
                assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    run_in_child(work)  # a weight whose memory was of a transform that is over ended the process


def test_rows_of_an_embedding_are_read_inside_transforms_of_something_else(tmp_path: Path) -> None:
    path = save_weights(Blocks(3), tmp_path / "model.safetensors")
    whole, model, ids = loaded_whole(Blocks(3), path), on_meta(Blocks(3)), torch.tensor([[1, 2]])
    shift = torch.linspace(-1.0, 1.0, whole.embed(ids).shape[-1])
    with fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Blocks(3)), path)):
        for transform in (torch.func.jacfwd, lambda function: lambda at: torch.func.jvp(function, (at,), (at,))[1]):
            found, expected = (
                transform(lambda at, each=each: each.blocks[0](each.embed(ids) + at))(shift) for each in (model, whole)
            )
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "transform",
    [
        lambda model: torch.func.grad(lambda x: model(x).sum())(INPUT),
        lambda model: torch.func.vjp(model, INPUT),
        lambda model: torch.func.jacrev(model)(INPUT),
    ],
    ids=["grad", "vjp", "jacrev"],
)
def test_a_transform_that_takes_gradients_is_refused_and_leaves_a_model_that_works(
    transform: Callable[[nn.Module], Any], file: Path, budget: Any
) -> None:
    def work(report: Report) -> None:
        with torch.no_grad():
            expected = loaded_whole(layers(), file)(INPUT)
        model = layers()
        with fp.stream(model, file, budget_bytes=budget):
            with pytest.raises(UnsupportedError, match=r"use torch\.autograd\.grad"):
                transform(model)
            with torch.no_grad():
                assert torch.equal(model(INPUT), expected)

    run_in_child(work)


def test_a_trace_is_refused(file: Path, budget: Any) -> None:
    model = layers()
    with fp.stream(model, file, budget_bytes=budget):
        with pytest.raises(ConfigError, match=r"torch\.jit\.trace would record"):
            torch.jit.trace(model, INPUT)
        with torch.no_grad():
            assert torch.equal(model(INPUT), loaded_whole(layers(), file)(INPUT))


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.zero_(),
        lambda weight: weight.__iadd__(1),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: weight.requires_grad_(True),
        lambda weight: weight.requires_grad_(),
        lambda weight: setattr(weight, "requires_grad", True),
        lambda weight: nn.init.zeros_(weight),
        lambda weight: weight.requires_grad_(requires_grad=True),
    ],
)
@pytest.mark.parametrize("passes", [0, 1])
def test_changes_are_refused_before_the_first_forward_and_after_it(
    change: Callable[[torch.Tensor], object], passes: int, file: Path
) -> None:
    model = layers()
    with fp.stream(model, file):
        with torch.no_grad():
            for _ in range(passes):
                model(INPUT)
            with pytest.raises(ConfigError, match="weight, which stay on disk"):
                change(model[0].weight)  # type: ignore[index]
            model.requires_grad_(False)
            if passes:
                model[0].weight.requires_grad_(requires_grad=False)  # type: ignore[index]
            assert torch.equal(model(INPUT), loaded_whole(layers(), file)(INPUT))


@dataclass
class Output:
    """What pytree takes for a leaf."""

    rows: list[torch.Tensor]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Output:
        return Output([self.weight[:3]])


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(Table() for _ in range(6))

    def forward(self) -> list[Output]:
        return [table() for table in self.tables]


@dataclass
class Cache:
    """What layers fill, and the caller holds."""

    keys: list[torch.Tensor]
    owner: Any = None


def test_a_cache_of_the_callers_stays_the_same_object_even_if_it_holds_itself(tmp_path: Path) -> None:
    class Filling(nn.Linear):
        def forward(self, input: Any) -> Any:
            input.keys.append(super().forward(input.keys[-1]))
            return input

    torch.manual_seed(0)
    model = nn.Sequential(*[Filling(WIDTH, WIDTH) for _ in range(6)])
    path = save_weights(model, tmp_path / "filling.safetensors")
    keys = [INPUT]
    cache = Cache(keys)
    cache.owner = {"cache": cache}
    with fp.stream(model, path), torch.no_grad():
        assert model(cache) is cache
    assert cache.keys is keys
    assert len(keys) == 7


def test_views_of_weights_in_dataclasses_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpersist.streaming.stream._UNIT_BYTES_MIN", WIDTH * WIDTH * 4)
    path = tmp_path / "tables.safetensors"
    save_weights(Tables(), path)
    expected = [output.rows[0].clone() for output in Tables()()]
    model = Tables()
    with fp.stream(model, path, budget_bytes=3_300_000), torch.no_grad():
        outputs = model()
        model()
        assert all(torch.equal(output.rows[0], rows) for output, rows in zip(outputs, expected, strict=True))
