"""A streamed model gives the outputs of the model loaded whole, bit by bit, at any budget, however it is called."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.leaks import no_leaks
from support.streamed_models import (
    Blocks,
    budgets,
    expect_same,
    least_budget,
    loaded_whole,
    on_meta,
    save_weights,
    weights_of,
)
from torch import nn

import fastpersist as fp
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.streaming import reading
from fastpersist.transfer import arena

pytestmark = pytest.mark.usefixtures("small_units")

MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


class Shared(nn.Module):
    """Two modules in one place each, and one that is called between them: A B A C."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.again = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.c(self.again(self.b(self.a(x)).relu()))
        return result


class OwnWeights(nn.Module):
    """Weights of its own beside large children, in containers that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(64))
        self.steps = nn.ParameterList([nn.Parameter(torch.randn(64, 64)) for _ in range(3)])
        self.tables = nn.ParameterDict({"one": nn.Parameter(torch.randn(64, 64))})
        self.layers = nn.ModuleDict({"x": nn.Linear(64, 64), "y": nn.ModuleList([nn.Linear(64, 64)])})
        self.register_buffer("small", torch.randn(8))
        self.register_buffer("large", torch.randn(64, 64))
        self.register_buffer("not_kept", torch.arange(64.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.not_kept
        for step in self.steps:
            x = torch.tanh(x @ step)
        x = self.layers["x"](x) + self.tables["one"][0]
        x = self.layers["y"][0](x) @ self.large  # type: ignore[index, operator]
        return x * self.small.sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(64, 64)
        self.lstm = nn.LSTM(64, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden, state = self.lstm(self.inside(x))
        hidden, last = self.gru(hidden)
        return {"out": self.out(hidden), "state": state, "last": [last, (last, 3)]}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0) for _ in range(3)
        )
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class Encoder(nn.Module):
    """An encoder takes another path for padded inputs if the weights of its first layer let it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        result: torch.Tensor = self.out(self.encoder(x, src_key_padding_mask=padded))
        return result


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old = torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.conv = nn.Conv1d(16, 64, 3)
        self.norm = nn.BatchNorm1d(64)
        self.spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.spectral(self.old(self.norm(self.conv(x)).mean(-1)))
        return result


class Sibling(nn.Module):
    """A block that calls the block before it, which is not below it."""

    def __init__(self, before: nn.Module | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.before = [before]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        transposed = self.weight.t()
        if self.before[0] is not None:
            x = self.before[0](x)
        return x @ transposed


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Sibling(None)
        self.two = Sibling(self.one)
        self.three = Sibling(self.two)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.three(self.two(self.one(x))))
        return result


class Repeating(nn.Module):
    """It calls itself, with a view of its weight in hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        transposed = self.weight.t()
        if depth:
            x = self(x, depth - 1)
        return x @ transposed


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.repeat, self.a, self.b = nn.Linear(64, 64), Repeating(), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.a(self.repeat(self.inside(x), 3)))
        return result


class Views(nn.Module):
    """Its blocks return views of their weights, in containers."""

    class Block(nn.Module):
        """A linear layer whose weight goes out in views."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self) -> dict[str, Any]:
            return {"row": self.weight[3], "all": (self.weight, [self.weight.t()]), "no tensor": "text", "one": None}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Views.Block() for _ in range(6))

    def forward(self) -> list[Any]:
        return [block() for block in self.blocks]


WORDS = torch.tensor([[1, 5, 99], [7, 5, 0]])
ROWS = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "blocks": (Blocks, (WORDS,)),
    "tied": (lambda: Blocks(24, words=300, tied=True), (WORDS,)),
    "shared": (Shared, (ROWS,)),
    "own weights": (OwnWeights, (ROWS,)),
    "recurrent": (Recurrent, (ROWS,)),
    "attention": (Attention, (ROWS,)),
    "encoder": (Encoder, (ROWS,)),
    "normed": (Normed, (torch.randn(2, 16, 9, generator=torch.Generator().manual_seed(1)),)),
    "siblings": (Siblings, (ROWS,)),
    "recursive": (Recursive, (ROWS,)),
    "views": (Views, ()),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_model_loaded_whole_at_any_budget(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make, arguments = MODELS[name]

    def build() -> nn.Module:
        return on_meta(make().to(dtype).eval()) if name != "normed" else make().to(dtype).eval()

    torch.manual_seed(3)
    whole = make().to(dtype).eval()
    inputs = [each.to(dtype) if each.is_floating_point() else each for each in arguments]
    path = save_weights(whole, tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = loaded_whole(whole, path)(*inputs)
    for budget in budgets(build, path):
        model = build()
        with no_leaks(), fp.stream(model, path, budget_bytes=budget) as stream:
            for mode in MODES.values():
                with mode():
                    found = model(*inputs)
                    again = model(*inputs)
                expect_same(again, expected)
                expect_same(found, expected)  # not changed by the pass that followed
            stats = stream.stats()
            assert stats.pass_count == 6
            assert stats.ring_bytes + stats.resident_bytes <= budget
            assert stats.outside_count == 0 or name == "siblings"


def test_a_smaller_budget_than_the_least_is_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    path = save_weights(Blocks(), tmp_path / "model.safetensors")
    least = least_budget(lambda: on_meta(Blocks()), path)
    for model in (on_meta(Blocks()), Blocks()):
        before = {name: (id(each), each.requires_grad, each.device) for name, each in model.named_parameters()}
        values = {} if model.head.weight.is_meta else weights_of(model)
        with no_leaks(), pytest.raises(ConfigError, match=rf"needs at least {least} .*\(head with \d+ and "):
            fp.stream(model, path, budget_bytes=least - 1)
        after = {name: (id(each), each.requires_grad, each.device) for name, each in model.named_parameters()}
        assert after == before
        for name, each in values.items():
            assert torch.equal(model.state_dict()[name], each)


def test_every_budget_from_the_least_one_up_will_do(tmp_path: Path) -> None:
    """An embedding of which rows are read makes a model run with less than its weights need whole."""

    def build() -> nn.Module:
        return on_meta(nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.Linear(64, 64)))

    whole = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    path = save_weights(whole, tmp_path / "model.safetensors")
    least, total = least_budget(build, path), sum(each.nbytes for each in weights_of(whole).values())
    assert least < total / 2
    ids = torch.tensor([3, 999, 3])
    for budget in (least, total - 1, total, total + 1, total + 4096, total + 8192, total + 20_000, 2 * total):
        model = build()
        with fp.stream(model, path, budget_bytes=budget):
            expect_same(model(ids), whole(ids).detach())


def test_a_model_is_streamed_where_it_has_values_and_they_are_replaced(tmp_path: Path) -> None:
    whole, model = Blocks(), Blocks()
    path = save_weights(whole, tmp_path / "model.safetensors")
    parameters = list(model.parameters())
    with fp.stream(model, path, budget_bytes=least_budget(Blocks, path)), torch.no_grad():
        expect_same(model(WORDS), whole(WORDS))
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


def test_it_can_be_streamed_again_after_it_was_closed(tmp_path: Path) -> None:
    first, second, model = Blocks(), Blocks(), on_meta(Blocks())
    paths = [save_weights(each, tmp_path / f"{number}.safetensors") for number, each in enumerate((first, second))]
    budget = least_budget(lambda: on_meta(Blocks()), paths[0])
    for whole, path in zip((first, second, first), (*paths, paths[0]), strict=True):
        stream = fp.stream(model, path, budget_bytes=budget)
        with pytest.raises(ConfigError, match="streamed already"):
            fp.stream(model, path, budget_bytes=budget)
        with torch.no_grad():
            expect_same(model(WORDS), whole(WORDS))
        stream.close()
        stream.close()
        assert stream.closed
        with pytest.raises(ConfigError, match=r"its stream from .* is closed"):
            model(WORDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "auto", None], ids=str)
def test_dtypes_are_converted_as_a_whole_model_is(dtype: torch.dtype | str | None, tmp_path: Path) -> None:
    whole = Blocks()
    path = save_weights(whole, tmp_path / "model.safetensors")
    wanted = dtype if isinstance(dtype, torch.dtype) else torch.float32
    whole.to(wanted)
    with torch.no_grad():
        expected = whole(WORDS)
    for budget in budgets(lambda: on_meta(Blocks()), path, dtype=dtype):
        model = on_meta(Blocks())
        with fp.stream(model, path, budget_bytes=budget, dtype=dtype), torch.inference_mode():
            assert {each.dtype for each in model.parameters()} == {wanted}
            for _ in range(3):
                expect_same(model(WORDS), expected)


def test_gradients_pass_through_residents(tmp_path: Path) -> None:
    whole = Shared()
    path = save_weights(whole, tmp_path / "model.safetensors")
    model = on_meta(Shared())
    x, y = ROWS.clone().requires_grad_(), ROWS.clone().requires_grad_()
    with fp.stream(model, path, budget_bytes="1MiB"):
        model(x).sum().backward()
        whole(y).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)


def test_a_model_is_called_through_its_parts(tmp_path: Path) -> None:
    whole = Blocks()
    path = save_weights(whole, tmp_path / "model.safetensors")
    model = on_meta(Blocks())
    with fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Blocks()), path)) as stream, torch.no_grad():
        for _ in range(3):
            for at in (4, 1, 1, 5, 0):
                expect_same(model.blocks[at](ROWS[..., :48]), whole.blocks[at](ROWS[..., :48]))
            expect_same(model.head(ROWS[..., :48]), whole.head(ROWS[..., :48]))
        assert stream.stats().pass_count == 0
        assert stream.stats().on_demand_count == 0
        expect_same(model(WORDS), whole(WORDS))


def test_another_branch_each_pass_costs_guesses_and_nothing_else(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x: torch.Tensor, routes: list[int]) -> torch.Tensor:
            for route in routes:
                x = self.experts[route](x)
            return x

    whole = Branches()
    path = save_weights(whole, tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for budget in budgets(lambda: on_meta(Branches()), path):
        model = on_meta(Branches())
        with fp.stream(model, path, budget_bytes=budget) as stream, torch.no_grad():
            for _ in range(20):
                routes = torch.randint(0, 8, (5,), generator=generator).tolist()
                expect_same(model(ROWS, routes), whole(ROWS, routes))
            stats = stream.stats()
            assert stats.outside_count == 0
            assert bool(stats.wrong_guess_count) == bool(stats.ring_bytes)


def test_a_pass_reads_what_is_streamed_once_and_nothing_else(tmp_path: Path) -> None:
    path = save_weights(Blocks(words=100), tmp_path / "model.safetensors")
    model = on_meta(Blocks(words=100))
    ids = torch.tensor([5])
    budget = least_budget(lambda: on_meta(Blocks(words=100)), path) + 30_000
    with fp.stream(model, path, budget_bytes=budget, engine="threads") as stream, torch.inference_mode():
        for _ in range(3):
            model(ids)
        before = stream.stats()
        assert 0 < before.resident_unit_count < before.unit_count
        for _ in range(4):
            model(ids)
        after = stream.stats()
        row_bytes = 48 * 4
        assert after.read_bytes - before.read_bytes == 4 * (before.streamed_bytes + row_bytes)
        assert after.wrong_guess_count == before.wrong_guess_count
        assert after.read_count - before.read_count == 4 * (before.unit_count - before.resident_unit_count)
        assert after.engine == "threads"


def test_reading_begins_before_the_first_forward_and_changes_nothing_for_it(tmp_path: Path) -> None:
    whole = Blocks(6)
    path = save_weights(whole, tmp_path / "model.safetensors")
    loaded_whole(whole, path)
    ids = torch.tensor([[1, 2, 3]])
    model = on_meta(Blocks(6))
    with fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Blocks(6)), path)) as stream:
        assert stream.stats().read_count > 0
        expect_same(model(ids), whole(ids))
        assert stream.stats().wrong_guess_count == 0


def test_a_model_that_fits_is_read_once(tmp_path: Path) -> None:
    path = save_weights(Blocks(), tmp_path / "model.safetensors")
    model = on_meta(Blocks())
    with fp.stream(model, path, budget_bytes="10MiB") as stream, torch.inference_mode():
        model(WORDS)
        first = stream.stats()
        model(WORDS)
        assert first.ring_bytes == 0
        assert first.streamed_bytes == 0
        assert stream.stats().read_bytes == first.read_bytes


class Layouts(nn.Module):
    """A block whose output is no strided tensor, but may be a view of its weight nevertheless."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.layout = layout

    def forward(self) -> torch.Tensor:
        if self.layout == "jagged":
            return torch.nested.nested_tensor_from_jagged(self.weight.view(-1)[:64], torch.tensor([0, 3, 64]))
        return self.weight.to_sparse() if self.layout == "sparse" else self.weight.to_sparse_csr()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "jagged"])
def test_outputs_of_other_layouts_are_kept(layout: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.ModuleList(Layouts(layout) for _ in range(6))

    path = save_weights(build(), tmp_path / "model.safetensors")
    whole, model = loaded_whole(build(), path), on_meta(build())
    with fp.stream(model, path, budget_bytes=least_budget(build, path)), torch.no_grad():
        found = [each() for each in model]
        for each in model:
            each()
        for one, other in zip(found, whole, strict=True):
            expected = other()
            if layout == "jagged":
                expect_same(one.unbind(), expected.unbind())
            else:
                expect_same(one.to_dense(), expected.to_dense())


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["blocks", "tied", "own weights", "recurrent"])
def test_memory_for_weights_stays_within_the_budget(
    name: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: dict[int, int] = {}
    highest = 0

    class Watched(mmap.mmap):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal highest
            alive[id(self)] = len(self)
            weakref.finalize(self, alive.pop, id(self))
            highest = max(highest, sum(alive.values()))

    monkeypatch.setattr(reading.mmap, "mmap", Watched)
    make, arguments = MODELS[name]
    inputs = [each.to(dtype or each.dtype) if each.is_floating_point() else each for each in arguments]
    path = save_weights(make(), tmp_path / "model.safetensors")
    for budget in budgets(lambda: on_meta(make()), path, dtype=dtype):
        model = on_meta(make().to(dtype or torch.float32) if name == "own weights" else make())
        highest = 0
        with fp.stream(model, path, budget_bytes=budget, dtype=dtype) as stream, torch.inference_mode():
            for _ in range(3):
                model(*inputs)
            stats = stream.stats()
            small = sum(weight.file_bytes for weight in stream._weights if weight.name in stream._small)
            assert stats.outside_count == 0
            assert stats.on_demand_count == 0
        assert 0 < highest <= budget + 4096 + (small and 16 * 4096)
        assert sum(alive.values()) <= (small and 16 * 4096)


class Experts(nn.Module):
    """Experts in two parameters; it is told which ones are needed, and takes a weight of another module."""

    def __init__(self, inside: nn.Module | None) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 32, 16)), nn.Parameter(torch.randn(8, 16, 32))
        self.inside = [inside]  # not below it

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.up[top_k_index[0]]  # a view
        out = torch.zeros_like(x)
        for expert in top_k_index.unique().tolist():
            out = out + torch.tanh(x @ self.up[expert].t()) @ self.down[expert].t()
        if isinstance(self.inside[0], Experts):
            out = out + self.inside[0](x, 7 - top_k_index)[0]
        elif self.inside[0] is not None:
            out = out * self.inside[0].weight[0]  # type: ignore[operator]
        for expert in top_k_index.unique().tolist():
            out = torch.tanh(out + torch.tanh(x @ self.up[expert].t()) @ self.down[expert].t())
        return out, kept


class Routed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.experts = nn.ModuleList()
        for number in range(3):
            inside = {"plain": None, "takes a weight": self.before[0], "nested": [None, *self.experts][-1]}[kind]
            self.experts.append(Experts(inside if number else None))

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> list[torch.Tensor]:
        kept = []
        for before, experts in zip(self.before, self.experts, strict=True):
            x, view = experts(torch.tanh(before(x)), routes)
            kept.append(view)
        return [x, *kept]


@pytest.mark.parametrize("kind", ["plain", "takes a weight", "nested"])
def test_experts_that_are_routed_to_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    path = save_weights(Routed(kind), tmp_path / "model.safetensors")
    whole = loaded_whole(Routed(kind), path)
    generator = torch.Generator().manual_seed(1)
    for budget in budgets(lambda: on_meta(Routed(kind)), path):
        model = on_meta(Routed(kind))
        for number, experts in enumerate(model.experts):
            if number and kind != "plain":
                experts.inside = [model.before[0] if kind == "takes a weight" else model.experts[number - 1]]
        with fp.stream(model, path, budget_bytes=budget), torch.no_grad():
            for number in range(10):
                x = torch.randn(2, 16, generator=generator)
                routes = torch.arange(8) if number % 3 == 2 else torch.randint(0, 8, (2,), generator=generator)
                found, expected = model(x, routes), whole(x, routes)
                model(x, 7 - routes)
                expect_same(found, expected)


class SelfCalling(Experts):
    """Calls itself for other experts, and goes on with its own."""

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, depth: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        if depth:
            x = x + self(x, (top_k_index + 3) % 8, depth - 1)[0]
        return super().forward(x, top_k_index)


def test_experts_that_call_themselves_have_the_weights_of_each_call(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.ModuleList(SelfCalling(None) for _ in range(5))

    whole, model, x = build(), on_meta(build()), torch.randn(2, 16)
    path = save_weights(whole, tmp_path / "model.safetensors")
    loaded_whole(whole, path)
    with fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(build()), path)) as stream, torch.no_grad():
        assert not stream._prefetch.residents
        for routes in (torch.tensor([0, 1]), torch.tensor([5]), torch.arange(8), torch.tensor([2, 7])):
            for ours, its in zip(model, whole, strict=True):
                expect_same(ours(x, routes), its(x, routes))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"device": "mps"}, UnsupportedError, "CPUs and CUDA"),
        ({"device": "nowhere"}, ConfigError, "nowhere"),
        ({"dtype": torch.int8}, ConfigError, "floating-point"),
        ({"dtype": "bf16"}, ConfigError, "floating-point"),
        ({"budget_bytes": -1}, ConfigError, "budget_bytes"),
        ({"budget_bytes": "much"}, ConfigError, 'budget_bytes is .* or "auto"'),
        ({"engine": "no such"}, ConfigError, "engine"),
        ({"names": {"head.wieght": "x"}}, ConfigError, "head.wieght"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    path = save_weights(Blocks(), tmp_path / "model.safetensors")
    with no_leaks(), pytest.raises(error, match=said):
        fp.stream(on_meta(Blocks()), path, **options)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path = save_weights(Blocks(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model is a torch\.nn\.Module, not a dict"):
        fp.stream({}, path)  # type: ignore[arg-type]


def test_a_budget_that_is_small_beside_the_memory_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_weights(Blocks(), tmp_path / "model.safetensors")
    least = least_budget(lambda: on_meta(Blocks()), path)
    with caplog.at_level(logging.INFO, "fastpersist"):
        fp.stream(on_meta(Blocks()), path).close()
        assert not any("would fit into memory" in message for message in caplog.messages)
        fp.stream(on_meta(Blocks()), path, budget_bytes=least).close()
    assert any("would fit into memory" in message for message in caplog.messages)


def test_a_budget_is_shared_out_among_the_ranks_of_the_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_weights(Blocks(), tmp_path / "model.safetensors")
    total_bytes = sum(parameter.nbytes for parameter in Blocks().parameters())
    monkeypatch.setattr(arena, "available_host_bytes", lambda: 2 * (total_bytes * 5 // 4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    auto_bytes = total_bytes * 5 // 4 * 3 // 5
    with caplog.at_level(logging.INFO, "fastpersist"):
        for budget_bytes, taken_bytes in (("auto", auto_bytes), (auto_bytes + 1, auto_bytes + 1)):
            with fp.stream(on_meta(Blocks()), path, budget_bytes=budget_bytes) as stream:
                assert stream._budget_bytes == taken_bytes
                assert stream._chosen.ring_bytes > 0
    assert not any("would fit into memory" in message for message in caplog.messages)
