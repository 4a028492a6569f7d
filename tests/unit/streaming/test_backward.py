"""Gradients through streamed weights are those of the model loaded whole, bit by bit; of weights, nothing is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastpersist as fp

WIDTH = 256
BUDGETS = ["13MB", "18MB", "1GB"]  # a ring and hardly more, some residents, all


class Adapted(torch.nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(4, base.in_features) / 8)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 4) / 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.base(values) + values @ self.down.T @ self.up.T


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 8 * WIDTH)
        self.down = torch.nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.nn.functional.gelu(self.up(self.norm(values))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(5))
        self.checkpointed: bool | None = None  # or use_reentrant

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointed is None:
                values = layer(values)
            else:
                values = checkpoint(layer, values, use_reentrant=self.checkpointed)
        return values


def adapted(model: Model) -> list[torch.nn.Parameter]:
    torch.manual_seed(5)
    model.requires_grad_(False)
    for layer in model.layers:
        layer.up = Adapted(layer.up)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients(model: Model, parameters: list[torch.nn.Parameter], inputs: torch.Tensor) -> list[torch.Tensor]:
    """Train three steps, and return the gradients of all of them."""
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    found = []
    for _ in range(3):
        model(inputs).square().mean().backward()
        found += [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    fp.save(Model().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(3, WIDTH)


def whole(path: Path) -> Model:
    model = Model()
    model.load_state_dict(fp.load(path))
    return model.requires_grad_(False)


def meta() -> Model:
    with torch.device("meta"):
        return Model()


@pytest.mark.parametrize("budget_bytes", BUDGETS)
@pytest.mark.parametrize("checkpointed", [None, True, False])
def test_adapters_get_the_gradients_of_the_model_loaded_whole(
    budget_bytes: str, checkpointed: bool | None, path: Path, inputs: torch.Tensor
) -> None:
    inputs.requires_grad_(checkpointed is True)
    reference, model = whole(path), meta()
    reference.checkpointed = model.checkpointed = checkpointed
    expected = gradients(reference, adapted(reference), inputs)
    with fp.stream(model, path, budget_bytes=budget_bytes):
        found = gradients(model, adapted(model), inputs)
    assert len(found) == len(expected) == 30
    assert all(map(torch.equal, found, expected))


def test_gradients_of_inputs_and_of_two_backward_passes(path: Path, inputs: torch.Tensor) -> None:
    model = meta()
    with fp.stream(model, path, budget_bytes=BUDGETS[0]):
        for _ in range(2):
            given, also = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
            whole(path)(also).sum().backward()
            output = model(given).sum()
            output.backward(retain_graph=True)
            assert given.grad is not None
            assert also.grad is not None
            assert torch.equal(given.grad, also.grad)
            output.backward()
            assert torch.equal(given.grad, 2 * also.grad)


def test_autograd_keeps_no_memory_of_streamed_weights(path: Path, inputs: torch.Tensor) -> None:
    model = meta()
    with fp.stream(model, path, budget_bytes=BUDGETS[0]) as stream:
        model(inputs.requires_grad_())
        first = stream.stats().read_bytes
        output = model(inputs)
        second = stream.stats().read_bytes
        output.sum().backward()
        backward_bytes = stream.stats().read_bytes - second
    streamed = sum(tensor.nbytes for name, tensor in whole(path).state_dict().items() if "weight" in name)
    assert second > first
    assert backward_bytes > streamed // 2  # the weights were read again, except for the residents


def test_two_threads_go_back_at_once(path: Path, inputs: torch.Tensor) -> None:
    expected = inputs.clone().requires_grad_()
    whole(path)(expected).sum().backward()
    model = meta()
    found: list[torch.Tensor | None] = []
    together = threading.Barrier(2)

    def go_back(output: torch.Tensor, given: torch.Tensor) -> None:
        torch.set_num_threads(1)  # a thread has a number of its own, which decides how sums are divided
        together.wait()
        output.backward()
        found.append(given.grad)

    with fp.stream(model, path, budget_bytes=BUDGETS[0]):
        given = [inputs.clone().requires_grad_() for _ in range(2)]
        threads = [threading.Thread(target=go_back, args=(model(each).sum(), each)) for each in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 2
    assert all(each is not None and torch.equal(each, expected.grad) for each in found)


def test_values_are_converted_for_the_way_back_too(path: Path, inputs: torch.Tensor) -> None:
    given, also = (inputs.bfloat16().requires_grad_() for _ in range(2))
    whole(path).bfloat16()(also).sum().backward()
    model = meta().bfloat16()
    with fp.stream(model, path, budget_bytes="20MB", dtype=torch.bfloat16):
        model(given).sum().backward()
    assert given.grad is not None
    assert torch.equal(given.grad, also.grad)


@pytest.mark.parametrize(
    "view",
    [torch.Tensor.conj, lambda weight: weight.conj().imag, lambda weight: torch._neg_view(weight).conj()],
    ids=["conjugate", "negative", "both"],
)
def test_lazy_views_of_complex_weights_have_their_gradients(
    view: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    class Complex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(1100, 1000, dtype=torch.complex64))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values + values * view(self.weight)[:3]

    torch.manual_seed(0)
    reference = torch.nn.Sequential(*[Complex() for _ in range(4)]).requires_grad_(False)
    torch.save(reference.state_dict(), tmp_path / "complex.pt")
    model = torch.nn.Sequential(*[Complex() for _ in range(4)])
    given, also = (torch.ones(3, 1000, dtype=view(reference[0].weight).dtype).requires_grad_() for _ in range(2))
    reference(also).abs().sum().backward()
    with fp.stream(model, tmp_path / "complex.pt", budget_bytes="27MB") as stream:
        assert stream.stats().streamed_bytes
        model(given).abs().sum().backward()
    assert given.grad is not None
    assert also.grad is not None
    assert torch.equal(given.grad, also.grad)


def test_a_forward_that_turns_gradients_on_has_them(path: Path, inputs: torch.Tensor) -> None:
    """As models of forces do, which need a gradient while the caller has turned them off."""

    def turn_on(model: Model) -> Model:
        for layer in model.layers:
            layer.forward = torch.enable_grad()(layer.forward)
        return model

    whole = Model()
    whole.load_state_dict(fp.load(path))
    model = meta()
    given, also = (inputs.clone().requires_grad_() for _ in range(2))
    with fp.stream(model, path, budget_bytes=BUDGETS[0]):
        with torch.no_grad():
            found, expected = turn_on(model)(given), turn_on(whole)(also)
        found.square().sum().backward()
        expected.square().sum().backward()
    assert given.grad is not None
    assert also.grad is not None
    assert torch.equal(given.grad, also.grad)


def test_a_stream_that_is_closed_meanwhile_is_an_error(path: Path, inputs: torch.Tensor) -> None:
    model = meta()
    with fp.stream(model, path, budget_bytes=BUDGETS[0]):
        output = model(inputs.requires_grad_()).sum()
    with pytest.raises(fp.ConfigError, match=r"layers\.4\.down\.weight.*closed"):
        output.backward()


def test_hooks_of_the_caller_are_as_they_were(path: Path, inputs: torch.Tensor) -> None:
    """Also after a forward that has failed, and one that was interrupted."""
    kept: list[torch.Tensor] = []

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    model = meta()
    with fp.stream(model, path, budget_bytes=BUDGETS[0]), torch.no_grad():
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, id):
            with pytest.raises(RuntimeError):
                model(torch.randn(2, WIDTH + 1))
            handle = model.layers[2].register_forward_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                model(inputs)
            handle.remove()
            model(inputs)
            before = len(kept)
            torch.ones(2, requires_grad=True).square()
        assert len(kept) == before + 1
