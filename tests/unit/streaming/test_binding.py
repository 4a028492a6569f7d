"""What a weight without its values answers, what it reads on demand, and what it refuses."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.streamed_models import (
    Blocks,
    expect_same,
    least_budget,
    loaded_whole,
    on_meta,
    save_weights,
)
from torch import nn

import fastpersist as fp
from fastpersist.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.usefixtures("small_units")
F = nn.functional


@pytest.fixture
def whole(path: Path) -> nn.Module:
    return loaded_whole(Blocks(), path)


@pytest.fixture
def model(path: Path) -> Iterator[nn.Module]:
    built = on_meta(Blocks())
    with fp.stream(built, path, budget_bytes=least_budget(lambda: on_meta(Blocks()), path)):
        yield built


# ------------------------------------------------------------------------------------------------------ what is true

TRUE: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda weight: weight.shape,
    "size": lambda weight: weight.size(),
    "size of one": lambda weight: weight.size(-1),
    "dim": lambda weight: weight.dim(),
    "ndim": lambda weight: weight.ndim,
    "ndimension": lambda weight: weight.ndimension(),
    "dtype": lambda weight: weight.dtype,
    "device": lambda weight: weight.device,
    "layout": lambda weight: weight.layout,
    "numel": lambda weight: weight.numel(),
    "nelement": lambda weight: weight.nelement(),
    "len": len,
    "itemsize": lambda weight: weight.itemsize,
    "element_size": lambda weight: weight.element_size(),
    "nbytes": lambda weight: weight.nbytes,
    "stride": lambda weight: weight.stride(),
    "stride of one": lambda weight: weight.stride(0),
    "is_contiguous": lambda weight: weight.is_contiguous(),
    "grad": lambda weight: weight.grad,
    "is_leaf": lambda weight: weight.is_leaf,
    "is_meta": lambda weight: weight.is_meta,
    "is_cuda": lambda weight: weight.is_cuda,
    "is_cpu": lambda weight: weight.is_cpu,
    "is_sparse": lambda weight: weight.is_sparse,
    "is_quantized": lambda weight: weight.is_quantized,
    "is_floating_point": lambda weight: weight.is_floating_point(),
    "is_complex": lambda weight: weight.is_complex(),
    "torch.is_floating_point": torch.is_floating_point,
    "torch.is_tensor": torch.is_tensor,
    "torch.numel": torch.numel,
    "is_inference": lambda weight: weight.is_inference(),
    "get_device": lambda weight: weight.get_device(),
    "a parameter": lambda weight: isinstance(weight, nn.Parameter),
    "truth of shape": lambda weight: bool(weight.shape),
}


@pytest.mark.parametrize("what", TRUE)
def test_attributes_are_true_without_a_read(what: str, model: nn.Module, whole: nn.Module) -> None:
    for name in ("head.weight", "blocks.1.0.bias", "embed.weight"):
        assert TRUE[what](model.get_parameter(name)) == TRUE[what](whole.get_parameter(name).detach_()) or what == (
            "a parameter"
        )
        assert isinstance(model.get_parameter(name), nn.Parameter)
        assert "on disk" in repr(model.get_parameter(name))


def test_no_gradient_is_wanted_and_setting_that_again_is_fine(model: nn.Module) -> None:
    weight = model.head.weight
    assert not weight.requires_grad
    weight.requires_grad_(False)
    weight.requires_grad = False
    weight.grad = None
    model.requires_grad_(False)
    model.zero_grad()
    model.eval()
    model.train()
    assert not weight.requires_grad


def test_printing_reads_nothing(model: nn.Module) -> None:
    described = "<weight head.weight on disk, shape (100, 48), torch.float32>"
    weight = model.head.weight
    assert all(described in text for text in (repr(weight), str(weight), f"{weight}", f"{weight!r}"))
    assert "Linear(in_features=48" in repr(model)
    assert "100x48" in repr(nn.ParameterList([weight]))


def test_identity_is_kept_through_passes(model: nn.Module) -> None:
    before = [id(each) for each in model.parameters()]
    as_keys = {each: name for name, each in model.named_parameters()}
    for _ in range(2):
        model(torch.tensor([1, 2]))
    assert [id(each) for each in model.parameters()] == before
    assert all(as_keys[each] == name for name, each in model.named_parameters())


# --------------------------------------------------------------------------------------------- what is read on demand

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda weight: weight.sum(),
    "row": lambda weight: weight[1],
    "operator": lambda weight: weight * 2 + weight,
    "from the right": lambda weight: 2 - weight,
    "matmul": lambda weight: torch.ones(1, weight.shape[0]) @ weight,
    "linear": lambda weight: F.linear(torch.ones(2, weight.shape[1]), weight),
    "transposed": lambda weight: weight.T.contiguous(),
    "clone": lambda weight: weight.clone(),
    "detach": lambda weight: weight.detach() + 0,
    "stack": lambda weight: torch.stack([weight, weight]),
    "keyword": lambda weight: torch.add(input=weight, other=weight),
    "out": lambda weight: torch.neg(weight, out=torch.empty_like(weight)),
    "iteration": lambda weight: list(weight)[3],
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy().copy()),
    "item": lambda weight: weight[0, 0].item(),
    "tolist": lambda weight: weight.tolist()[0],
    "comparison": lambda weight: torch.equal(weight, weight.clone()),
    "contains": lambda weight: 1e30 in weight,
    "embedding": lambda weight: F.embedding(torch.tensor([[3, 1], [1, 0]]), weight),
    "into another": lambda weight: torch.zeros(2, *weight.shape).__setitem__(0, weight),
    "copy to another": lambda weight: torch.zeros(weight.shape).copy_(weight),
    "add to another": lambda weight: torch.zeros(weight.shape).add_(weight),
    "dlpack": lambda weight: torch.from_dlpack(weight).clone(),
    "bag": lambda weight: F.embedding_bag(torch.tensor([[3, 1], [1, 0]]), weight),
}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("name", ["head.weight", "blocks.1.1.weight", "embed.weight"])
def test_values_are_read_on_demand(what: str, name: str, model: nn.Module, whole: nn.Module) -> None:
    expected = READS[what](whole.get_parameter(name).detach())
    for _ in range(2):
        expect_same(READS[what](model.get_parameter(name)), expected)
    model(torch.tensor([1]))
    expect_same(READS[what](model.get_parameter(name)), expected)
    assert "on disk" in repr(model.get_parameter(name))


def test_a_read_on_demand_is_told_once_and_counted(
    path: Path, whole: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    model = on_meta(Blocks())
    with (
        fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Blocks()), path)) as stream,
        caplog.at_level(logging.WARNING, "fastpersist"),
    ):
        before = stream.stats()
        model.head.weight.sum()
        model.blocks[0][1].weight.sum()
        after = stream.stats()
    assert len(caplog.messages) == 1
    assert "head.weight was used outside" in caplog.messages[0]
    assert after.on_demand_count - before.on_demand_count == 2
    assert after.read_bytes - before.read_bytes == whole.head.weight.nbytes + whole.blocks[0][1].weight.nbytes


def test_a_view_of_a_weight_read_on_demand_keeps_its_values(model: nn.Module, whole: nn.Module) -> None:
    views = [model.head.weight.t(), model.embed.weight[:3], model.blocks[0][1].weight.view(-1)]
    for _ in range(3):
        model(torch.tensor([1]))
    expected = [whole.head.weight.t(), whole.embed.weight[:3], whole.blocks[0][1].weight.view(-1)]
    for view, other in zip(views, expected, strict=True):
        expect_same(view, other.detach())


def test_gradients_through_a_weight_read_on_demand_are_right(model: nn.Module, whole: nn.Module) -> None:
    x, y = torch.ones(2, 48, requires_grad=True), torch.ones(2, 48, requires_grad=True)
    out = F.linear(x, model.head.weight)
    model(torch.tensor([1]))
    out.square().sum().backward()
    F.linear(y, whole.head.weight.detach()).square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    expect_same(x.grad, y.grad)


def test_gradients_through_a_weight_that_a_resident_unit_reads_on_demand_are_right(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(64))
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x)) * self.scale
            return x * self.layers[0].bias

    path = save_weights(Scaled(), tmp_path / "model.safetensors")
    whole, model = loaded_whole(Scaled(), path), on_meta(Scaled())
    x, y = torch.ones(2, 64, requires_grad=True), torch.ones(2, 64, requires_grad=True)
    with fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Scaled()), path)) as stream:
        out = model(x)
        model(x.detach())
        out.square().sum().backward()
        assert stream.stats().on_demand_count == 2
    whole.requires_grad_(False)(y).square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    expect_same(x.grad, y.grad)


def test_a_weight_that_another_unit_uses_belongs_to_it_from_the_next_pass_on(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.other = [nn.Linear(64, 64)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x @ self.weight, self.other[0].weight, self.other[0].bias)

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.takes = nn.ModuleList(Takes() for _ in range(4))
            self.taken = nn.ModuleList(each.other[0] for each in self.takes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for each in self.takes:
                x = each(x)
            return x

    whole, model = Holds(), on_meta(Holds())
    for each, taken in zip(model.takes, model.taken, strict=True):
        each.other = [taken]
    path = save_weights(whole, tmp_path / "model.safetensors")
    loaded_whole(whole, path)
    x = torch.randn(2, 64)
    budget = least_budget(lambda: on_meta(Holds()), path) + (20 << 10)
    with fp.stream(model, path, budget_bytes=budget) as stream, torch.no_grad():
        counts = []
        for _ in range(4):
            expect_same(model(x), whole(x))
            counts.append(stream.stats().on_demand_count)
        assert stream.stats().outside_count == 0
    assert counts[0] == 8
    assert counts[-1] - counts[-2] < 8


# --------------------------------------------------------------------------------------------------- what is refused

CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda weight: weight.add_(1),
    "copy_": lambda weight: weight.copy_(torch.zeros(weight.shape)),
    "zero_": lambda weight: weight.zero_(),
    "init": lambda weight: nn.init.normal_(weight),
    "setitem": lambda weight: weight.__setitem__(0, 1),
    "+=": lambda weight: weight.__iadd__(1),
    "*=": lambda weight: weight.__imul__(2),
    "data =": lambda weight: setattr(weight, "data", torch.zeros(3)),
    "data": lambda weight: weight.data,
    "grad =": lambda weight: setattr(weight, "grad", torch.zeros(weight.shape)),
    "requires_grad_": lambda weight: weight.requires_grad_(),
    "requires_grad =": lambda weight: setattr(weight, "requires_grad", True),
    "resize_": lambda weight: weight.resize_(3),
    "to": lambda weight: weight.to(torch.float64),
    "to another": lambda weight: weight.to("meta"),
    "half": lambda weight: weight.half(),
    "cpu": lambda weight: weight.cpu(),
    "share_memory_": lambda weight: weight.share_memory_(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda weight: torch.save(weight, io.BytesIO()),
    "max_norm": lambda weight: F.embedding(torch.tensor([1]), weight, max_norm=1.0),
    "foreach": lambda weight: torch._foreach_add_([weight], 1),
    "out": lambda weight: torch.add(torch.ones(weight.shape), 1, out=weight),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_and_copies_are_refused(what: str, model: nn.Module, whole: nn.Module) -> None:
    with torch.no_grad(), pytest.raises((ConfigError, RuntimeError), match=r"(?s)head\.weight.*fastpersist\.stream"):
        CHANGES[what](model.head.weight)
    assert "on disk" in repr(model.head.weight)
    with torch.no_grad():
        expect_same(model(torch.tensor([1])), whole(torch.tensor([1])))


# ------------------------------------------------------------------------------------------------------- embeddings


def embeddings(tmp_path: Path, dtype: torch.dtype, **options: Any) -> tuple[nn.Embedding, nn.Embedding, Path]:
    whole = nn.Embedding(100, 48, dtype=dtype, **options)
    path = save_weights(whole, tmp_path / "rows.safetensors")
    return whole, on_meta(nn.Embedding(100, 48, dtype=dtype, **options)), path  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": -1}, {"sparse": True}], ids=str)
def test_rows_are_those_of_the_whole_embedding(dtype: torch.dtype, options: dict[str, Any], tmp_path: Path) -> None:
    whole, model, path = embeddings(tmp_path, dtype, **options)
    with fp.stream(model, path, budget_bytes=8192) as stream:
        for ids in (
            torch.tensor([[3, 99, 0], [3, 3, 1]]),
            torch.tensor(5),
            torch.tensor([], dtype=torch.long),
            torch.zeros(2, 0, 3, dtype=torch.long),
            torch.tensor([7, 7], dtype=torch.int32),
            torch.arange(100).flip(0),
        ):
            before = stream.stats().read_bytes
            expect_same(model(ids), whole(ids).detach())
            assert stream.stats().read_bytes - before == len(ids.unique()) * 48 * dtype.itemsize
        assert stream.stats().on_demand_count == 0


@pytest.mark.parametrize("ids", [[-1], [100], [0, -1, 5], [2**40]], ids=str)
def test_ids_outside_are_refused_as_torch_does(ids: list[int], tmp_path: Path) -> None:
    whole, model, path = embeddings(tmp_path, torch.float32)
    with pytest.raises(IndexError):
        whole(torch.tensor(ids))
    with fp.stream(model, path, budget_bytes=8192):
        with pytest.raises(IndexError, match="weight has 100 rows"):
            model(torch.tensor(ids))
        expect_same(model(torch.tensor([1])), whole(torch.tensor([1])).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16], ids=str)
def test_ids_of_a_dtype_that_torch_refuses_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    whole, model, path = embeddings(tmp_path, torch.float32)
    with pytest.raises(RuntimeError):
        whole(torch.ones(3, dtype=dtype))
    with fp.stream(model, path, budget_bytes=8192), pytest.raises((RuntimeError, ConfigError)):
        model(torch.ones(3, dtype=dtype))


def test_max_norm_is_refused(tmp_path: Path) -> None:
    _, model, path = embeddings(tmp_path, torch.float32, max_norm=1.0)
    with pytest.raises(UnsupportedError, match="max_norm"):
        fp.stream(model, path, budget_bytes=8192)


def test_a_tied_head_and_embedding_share_a_weight_and_a_read(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Blocks(24, words=400, tied=True)

    path = save_weights(build(), tmp_path / "model.safetensors")
    whole, model = loaded_whole(build(), path), on_meta(build())
    ids = torch.tensor([3, 399])
    with fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(build()), path)) as stream:
        assert model.head.weight is model.embed.weight
        model(ids)
        before = stream.stats()
        expect_same(model(ids), whole(ids).detach())
        after = stream.stats()
        assert after.read_bytes - before.read_bytes == before.streamed_bytes + 2 * 48 * 4
        assert after.on_demand_count == 0
