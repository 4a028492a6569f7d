"""Random models with random budgets, called in random orders, with failures between: outputs are the whole model's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.leaks import no_leaks
from support.streamed_models import expect_same, least_budget, loaded_whole, on_meta, save_weights
from support.tensor_files import faults
from torch import nn

import fastpersist as fp
from fastpersist.errors import ConfigError, StorageError

pytestmark = [pytest.mark.usefixtures("small_units"), pytest.mark.slow]  # twenty models, each called many times

WIDTH = 32
ROUNDS = 20
CALLS = 25


class SprungError(Exception):
    """What a node raises when it is told to."""


class Node(nn.Module):
    """Weights of its own, children in containers, and calls of children and of nodes elsewhere, as a seed has it."""

    def __init__(self, seed: int, depth: int, elsewhere: list[Node]) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.trouble: list[type[BaseException]] = []
        self.mode = chance.choice(["plain", "view", "list", "dict", "functional", "twice"])
        if chance.random() < 0.6:
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        if chance.random() < 0.5:
            self.register_buffer("large", torch.randn(chance.choice([WIDTH, 2 * WIDTH]), WIDTH) / 6)
        if chance.random() < 0.4:
            self.register_buffer("small", torch.randn(chance.choice([(), (WIDTH,)])))
        if chance.random() < 0.4:
            self.table = nn.Embedding(chance.choice([10, 100]), WIDTH)
        children: list[nn.Module] = []
        if depth:
            children = [Node(chance.randrange(1 << 30), depth - 1, elsewhere) for _ in range(chance.randrange(1, 4))]
        children += [
            chance.choice([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)])
            for _ in range(chance.randrange(3))
        ]
        if chance.random() < 0.3:
            self.items = nn.ModuleDict({f"x{number}": child for number, child in enumerate(children)})
        else:
            self.items = nn.ModuleList(children)
        if chance.random() < 0.3 and hasattr(self, "table"):
            self.head = nn.Linear(WIDTH, self.table.num_embeddings, bias=False)
            self.head.weight = self.table.weight
        self.called = [chance.choice(elsewhere)] if elsewhere and chance.random() < 0.4 else []  # not registered
        elsewhere.append(self)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        held = self.weight.t() if hasattr(self, "weight") else None
        kept = self.large[:1] if hasattr(self, "large") else None
        children = list(self.items.values() if isinstance(self.items, nn.ModuleDict) else self.items)
        if self.mode == "twice":
            children = children + children[:1]
        if route % 3 == 1:
            children.reverse()
        for number, child in enumerate(children):
            if route % 5 == 2 and number % 2:
                continue
            if self.mode == "functional" and isinstance(child, nn.Linear):
                x = torch.tanh(nn.functional.linear(x, child.weight))
            else:
                x = torch.tanh(child(x, route) if isinstance(child, Node) else child(x))
        for other in self.called:
            x = x + torch.tanh(other(x, route))
        if self.trouble:
            raise self.trouble.pop()("sprung")
        if hasattr(self, "table"):
            x = x + self.table((x[..., 0] * 100).long() % self.table.num_embeddings)
        if hasattr(self, "head"):
            x = x + self.head(x).mean(-1, keepdim=True)
        if held is not None:
            x = x @ held
        if kept is not None:
            x = x + kept
        if hasattr(self, "small"):
            x = x * self.small
        return torch.tanh(x)


class Root(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.inside = Node(seed, 3, self.nodes)

    def forward(self, x: torch.Tensor, route: int) -> list[torch.Tensor]:
        out = self.inside(x, route)
        return [out, *(node.weight[route % WIDTH] for node in self.nodes[:2] if hasattr(node, "weight"))]


def budgets_of(chance: random.Random, seed: int, path: Path) -> int:
    least = least_budget(lambda: on_meta(Root(seed)), path)
    return least + int(chance.random() ** 2 * path.stat().st_size * 1.3) * chance.randrange(2)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_whatever_is_called_in_whatever_order(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    whole = Root(seed).eval()
    if not list(whole.parameters()):
        return
    path = save_weights(whole, tmp_path / "model.safetensors")
    loaded_whole(whole, path)
    model = on_meta(Root(seed)).eval()
    try:
        budget = budgets_of(chance, seed, path)
    except pytest.fail.Exception:  # all weights are small buffers or rows
        budget = 1 << 20
    with no_leaks(), torch.inference_mode():
        stream = fp.stream(model, path, budget_bytes=budget, engine="fault:threads")
        with stream:
            for number in range(CALLS):
                x = torch.randn(chance.randrange(1, 4), WIDTH)
                route = chance.randrange(6) if number > 4 else 0
                index = chance.randrange(len(whole.nodes)) if chance.random() < 0.2 else None
                with trouble(chance, model):
                    target = model if index is None else model.nodes[index]
                    source = whole if index is None else whole.nodes[index]
                    run = target
                    if chance.random() < 0.1:
                        with ThreadPoolExecutor(1) as pool:
                            found = pool.submit(inference, run, x, route).result(60)
                    else:
                        found = run(x, route)
                    expect_same(found, source(x, route))
                for node in model.nodes:
                    node.trouble.clear()
            stats = stream.stats()
            assert stats.ring_bytes + stats.resident_bytes <= budget
        assert all("on disk" in repr(each) for each in model.parameters())


def inference(model: nn.Module, x: torch.Tensor, route: int) -> object:
    with torch.inference_mode():
        return model(x, route)


@contextlib.contextmanager
def trouble(chance: random.Random, model: Root) -> Iterator[None]:
    """Let something go wrong now and then; whatever is raised for it is right."""
    with contextlib.ExitStack() as stack:
        if chance.random() < 0.15:
            chance.choice(model.nodes).trouble.append(chance.choice([SprungError, KeyboardInterrupt]))
        elif chance.random() < 0.1:
            stack.enter_context(faults(op="read", nth=chance.randrange(1, 20)))
        with contextlib.suppress(SprungError, KeyboardInterrupt, StorageError):
            yield


def test_a_random_model_that_is_closed_has_no_values(tmp_path: Path) -> None:
    path = save_weights(Root(3), tmp_path / "model.safetensors")
    model = on_meta(Root(3))
    fp.stream(model, path).close()
    with pytest.raises(ConfigError):
        model(torch.ones(1, WIDTH), 0)
