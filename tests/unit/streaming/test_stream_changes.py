"""Weights and large buffers that a forward changes in place: buffers keep their changes, parameters refuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.streamed_models import Blocks, expect_same, least_budget, loaded_whole, on_meta, save_weights
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastpersist as fp
from fastpersist.errors import ConfigError

pytestmark = pytest.mark.usefixtures("small_units")

WIDTH = 48
INPUT = torch.linspace(-1.0, 1.0, 2 * WIDTH).view(2, WIDTH)


class Queue(nn.Linear):
    """A layer whose buffer gets the mean of each input."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("queue", torch.zeros(WIDTH, WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.queue[int(self.count) % WIDTH] = input.mean(0)
            self.count += 1
        return super().forward(input) + input @ self.queue


class Scaled(nn.Linear):
    """A layer that changes its weight while `armed`."""

    armed = False
    by: torch.Tensor | float = 0.5

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.armed:
            self.weight.mul_(self.by)
        return super().forward(input)


def queues() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Queue() for _ in range(6)])


def scaled() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Scaled(WIDTH, WIDTH) for _ in range(6)])


@pytest.fixture(params=["ring", "resident"])
def streamed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Any], Any]]:
    """Stream a model, with the least budget or with one for all of it; yields how. Returns it, and one loaded whole."""
    streams = []

    def make(build: Callable[[], nn.Module]) -> tuple[Any, Any, fp.WeightStream]:
        path = save_weights(build(), tmp_path / "model.safetensors")
        budget = least_budget(lambda: on_meta(build()), path) if request.param == "ring" else "10MiB"
        model = on_meta(build())
        streams.append(fp.stream(model, path, budget_bytes=budget))
        assert (streams[0].stats().ring_bytes > 0) == (request.param == "ring")
        return model, loaded_whole(build(), path), streams[0]

    yield make
    for each in streams:
        each.close()


def test_running_statistics_keep_what_training_changed_though_torch_does_not_count_it(
    streamed: Callable[[Any], Any],
) -> None:
    def norms() -> nn.Module:
        return nn.Sequential(*[nn.BatchNorm1d(500) for _ in range(8)])

    model, whole, _ = streamed(norms)
    with torch.no_grad():
        for is_training in (True, True, False, True, False):
            for each in (model, whole):
                each.train(is_training)
            input = torch.randn(3, 500, 4)
            expect_same(model(input), whole(input))
    for layer, expected in zip(model, whole, strict=True):
        expect_same(layer.running_mean, expected.running_mean)
        expect_same(layer.running_var, expected.running_var)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_buffer_keeps_what_a_forward_changed(
    streamed: Callable[[Any], Any], mode: Callable[[], AbstractContextManager[None]]
) -> None:
    model, whole, _ = streamed(queues)
    with mode():
        for _ in range(9):  # residents are chosen anew in between
            expect_same(model(INPUT), whole(INPUT))
    for layer, expected in zip(model, whole, strict=True):
        expect_same(layer.queue, expected.queue)


def test_a_changed_buffer_stays_when_its_unit_does_not(tmp_path: Path) -> None:
    path = save_weights(queues(), tmp_path / "model.safetensors")
    whole = loaded_whole(queues(), path)
    model = on_meta(queues())
    least = least_budget(lambda: on_meta(queues()), path)
    with fp.stream(model, path, budget_bytes=least + 30_000) as stream, torch.no_grad():
        assert 0 < stream.stats().resident_unit_count < stream.stats().unit_count
        for passes in range(12):
            expect_same(model(INPUT), whole(INPUT))
            for _ in range(passes):  # so others are used more often
                expect_same(model[5](INPUT), whole[5](INPUT))  # type: ignore[index]


def test_gradients_are_those_of_the_changed_buffer(streamed: Callable[[Any], Any]) -> None:
    model, whole, _ = streamed(queues)
    for _ in range(3):
        gradients = []
        for each in (model, whole):
            input = INPUT.clone().requires_grad_()
            each(input).sum().backward()
            gradients.append(input.grad)
        expect_same(gradients[0], gradients[1])


def test_a_changed_parameter_is_refused_by_name_and_has_its_values_again(streamed: Callable[[Any], Any]) -> None:
    model, whole, stream = streamed(scaled)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expect_same(model(INPUT), whole(INPUT))
            model[3].armed = True
            with pytest.raises(ConfigError, match=r"3\.weight .*changed in place.*load the model"):
                model(INPUT)
            model[3].armed = False
            expect_same(model(INPUT), whole(INPUT))
    with ThreadPoolExecutor(1) as pool, torch.no_grad():  # nobody is inside of a forward any more
        expect_same(pool.submit(lambda: model(INPUT).detach()).result(60), whole(INPUT))
    assert stream.stats().outside_count == 0


def test_a_parameter_that_was_changed_to_want_gradients_wants_none_afterwards(streamed: Callable[[Any], Any]) -> None:
    model, whole, _ = streamed(scaled)
    model[3].armed, model[3].by = True, torch.ones(WIDTH, requires_grad=True)
    with pytest.raises(ConfigError, match=r"3\.weight"):
        model(INPUT)
    model[3].armed = False
    assert not model[3].weight.requires_grad
    assert model[3].weight.is_leaf
    expect_same(model(INPUT), whole(INPUT))


def test_a_forward_that_failed_after_a_change_raises_its_own_error(streamed: Callable[[Any], Any]) -> None:
    model, whole, _ = streamed(scaled)

    def fail(module: nn.Module, arguments: object) -> None:
        module.weight.mul_(2)
        raise KeyError("own")

    handle = model[2].register_forward_pre_hook(fail)
    with torch.no_grad():
        with pytest.raises(KeyError, match="own"):
            model(INPUT)
        handle.remove()
        expect_same(model(INPUT), whole(INPUT))


def test_a_stream_that_is_closed_after_a_change_in_the_same_forward_ends(streamed: Callable[[Any], Any]) -> None:
    model, _, stream = streamed(scaled)
    model[2].armed = True
    model[2].register_forward_hook(lambda *_: stream.close(), prepend=True)
    with torch.no_grad(), pytest.raises(ConfigError, match="closed"):
        model(INPUT)
    assert stream.closed


def test_a_weight_that_is_read_on_demand_and_then_changed_is_refused(streamed: Callable[[Any], Any]) -> None:
    model, whole, _ = streamed(scaled)

    def change(module: nn.Module, arguments: object) -> None:
        (model[4].weight + 1).sum()  # it has values now
        model[4].weight.mul_(2)

    handle = model[1].register_forward_pre_hook(change)
    with torch.no_grad():
        with pytest.raises(ConfigError, match=r"4\.weight"):
            model(INPUT)
        handle.remove()
        expect_same(model(INPUT), whole(INPUT))


def test_nothing_else_counts_as_a_change(path: Path) -> None:
    whole = loaded_whole(Blocks(), path)
    model = on_meta(Blocks())
    ids = torch.tensor([[1, 5, 99]])
    least = least_budget(lambda: on_meta(Blocks()), path)

    def gradient(each: Any) -> Any:
        hidden = each.embed(ids).requires_grad_()
        output = hidden
        for block in each.blocks:
            output = checkpoint(block, output, use_reentrant=False)
        return torch.autograd.grad(each.head(output).sum(), hidden)[0]

    with fp.stream(model, path, budget_bytes=least), ThreadPoolExecutor(4) as pool:
        expected = whole(ids)
        for _ in range(3):
            for found in pool.map(lambda _: model(ids), range(8)):
                expect_same(found, expected)
            expect_same(gradient(model), gradient(whole))
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            expect_same(compiled(ids), expected)
