"""Tensors are filled from a file in place, whatever their strides, dtypes and ties, as load_state_dict would do it."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import leaks
from support.archives import save_aligned
from support.sameness import assert_same
from support.specimens import Network, train, trained

import fastpersist as fp

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


nothing_is_left_behind = leaks.nothing_is_left_behind


# --------------------------------------------------------------------------------------------- targets


def test_optimizer_state_is_filled_in_place(tmp_path: Path) -> None:
    source = trained()
    optimizer = torch.optim.AdamW(source.parameters())
    train(source, optimizer)
    fp.save({"model": source.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "all.pt")
    network = Network()
    other = torch.optim.AdamW(network.parameters())
    train(network, other, steps=1)
    fp.load_into(tmp_path / "all.pt", {"model": network, "optimizer": other.state_dict(), "step": 0})
    assert_same(network.state_dict(), source.state_dict())
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert_same(mine, theirs)


def test_nested_containers_are_filled(tmp_path: Path) -> None:
    Pair = collections.namedtuple("Pair", "left right")
    source = {"list": [torch.ones(2), {"deep": torch.full((3,), 5)}], 7: (torch.zeros(1), 3), "text": "kept"}
    fp.save(source, tmp_path / "model.pt")
    target = {
        "list": [torch.zeros(2), {"deep": torch.zeros(3, dtype=torch.int64)}],
        7: Pair(torch.ones(1), "old"),
        "text": "old",
    }
    fp.load_into(tmp_path / "model.pt", target)
    assert target["list"][0].tolist() == [1, 1]
    assert target["list"][1]["deep"].tolist() == [5, 5, 5]
    assert target[7] == Pair(torch.zeros(1), 3)
    assert target["text"] == "kept"


def test_single_tensor_is_filled(tmp_path: Path) -> None:
    fp.save(torch.arange(9), tmp_path / "model.pt")
    target = torch.zeros(9, dtype=torch.int64)
    fp.load_into(tmp_path / "model.pt", target)
    assert target.tolist() == list(range(9))


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous().t(),
    "every second row": lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
    "inner columns": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "offset": lambda t: torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("target_form", FORMS)
@pytest.mark.parametrize("source_form", FORMS)
def test_strides_and_dtypes_are_converted_as_load_state_dict_does(
    source_form: str, target_form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    values = torch.arange(1200, dtype=torch.float32).view(30, 40).fmod(251) - 100.5
    fp.save({"w": FORMS[source_form](values)}, tmp_path / "model.pt", durable=False)
    target = FORMS[target_form](torch.zeros(30, 40, dtype=dtype))
    stride, offset = target.stride(), target.storage_offset()
    around = target.untyped_storage().nbytes() - target.nbytes
    fp.load_into(tmp_path / "model.pt", {"w": target})
    assert torch.equal(target, values.to(dtype))
    assert (target.stride(), target.storage_offset()) == (stride, offset)
    if around:
        whole = torch.empty(0, dtype=dtype).set_(target.untyped_storage())
        assert whole.double().abs().sum() == target.double().abs().sum()  # nothing was written between its rows


def test_conversion_larger_than_the_chunks(tmp_path: Path) -> None:
    values = torch.arange(5_000_000)
    fp.save([torch.zeros(3, dtype=torch.uint8), values], tmp_path / "model.pt", durable=False)
    target = [torch.ones(3), torch.zeros(5_000_000, dtype=torch.float64)]
    fp.load_into(tmp_path / "model.pt", target)
    assert torch.equal(target[1], values.double())
    assert target[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("alignment", [1, 64])
def test_unaligned_elements_are_converted(alignment: int, tmp_path: Path) -> None:
    values = torch.randn(3_000_000)
    save_aligned([torch.zeros(3, dtype=torch.uint8), values], tmp_path / "model.pt", alignment=alignment)
    target = [torch.ones(3), torch.zeros(3_000_000, dtype=torch.float64)]
    fp.load_into(tmp_path / "model.pt", target)
    assert torch.equal(target[1], values.double())


def test_views_of_one_storage_fill_separate_tensors(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    fp.save([base[10:20], base.view(10, 10)[:, 3], base], tmp_path / "model.pt")
    target = [torch.zeros(10), torch.zeros(10), torch.zeros(100)]
    fp.load_into(tmp_path / "model.pt", target)
    assert_same([part.tolist() for part in target], [base[10:20].tolist(), base[3::10].tolist(), base.tolist()])


def test_empty_and_scalar_tensors_are_filled(tmp_path: Path) -> None:
    fp.save([torch.empty(0, 3), torch.tensor(2.5), torch.ones(1)], tmp_path / "model.pt")
    target = [torch.empty(0, 3), torch.tensor(0.0), torch.zeros(1)]
    fp.load_into(tmp_path / "model.pt", target)
    assert target[1].item() == 2.5
    assert target[2].item() == 1


# --------------------------------------------------------------------------------------------- autograd


def test_leaf_parameters_are_filled_and_autograd_notices(tmp_path: Path) -> None:
    fp.save({"w": torch.full((3,), 2.0)}, tmp_path / "model.pt")
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    version = weight._version
    fp.load_into(tmp_path / "model.pt", {"w": weight})
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fresh_forward_and_backward_work_afterwards(tmp_path: Path) -> None:
    fp.save(trained().state_dict(), tmp_path / "model.pt")
    network = Network()
    fp.load_into(tmp_path / "model.pt", network)
    network(torch.arange(5)).sum().backward()
    assert network.embedding.weight.grad is not None


def test_inference_tensors_are_filled(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with torch.inference_mode():
        target = {"w": torch.zeros(3)}
        fp.load_into(tmp_path / "model.pt", target)
    assert target["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("form", FORMS)
def test_default_device_does_not_matter(form: str, tmp_path: Path) -> None:
    values = torch.arange(12.0).view(3, 4)
    fp.save({"w": FORMS[form](values), "v": values}, tmp_path / "model.pt")
    target = {"w": torch.zeros(3, 4), "v": FORMS[form](torch.zeros(3, 4, dtype=torch.float64))}
    with torch.device("meta"):
        fp.load_into(tmp_path / "model.pt", target)
    assert torch.equal(target["w"], values)
    assert torch.equal(target["v"], values.double())


# --------------------------------------------------------------------------------------------- tied memory


def test_tied_target_and_tied_file(tmp_path: Path) -> None:
    source, target = trained(), Network()
    fp.save(source.state_dict(), tmp_path / "model.pt")
    fp.load_into(tmp_path / "model.pt", target, verify=True)
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.head.weight, source.head.weight)


def test_tied_target_and_untied_file_end_as_load_state_dict_leaves_them(tmp_path: Path) -> None:
    # 3 chunks each, so that two reads into one memory would mix.
    first, last = torch.full((6_000_000,), 1.0), torch.full((6_000_000,), 2.0)
    fp.save({"b": last, "a": first}, tmp_path / "model.pt", durable=False)
    target = torch.zeros(6_000_000)
    fp.load_into(tmp_path / "model.pt", {"a": target, "b": target})
    assert target.unique().tolist() == [2.0]


def test_target_is_a_copy_of_nothing(tmp_path: Path) -> None:
    """Filling twice from two files gives the second, whatever the first left."""
    fp.save({"w": torch.full((10,), 1.0)}, tmp_path / "one.pt")
    fp.save({"w": torch.full((10,), 2.0)}, tmp_path / "two.pt")
    target = {"w": torch.zeros(10)}
    kept = copy.copy(target)
    for name, value in (("one", 1.0), ("two", 2.0), ("one", 1.0)):
        fp.load_into(tmp_path / f"{name}.pt", target)
        assert kept["w"].unique().tolist() == [value]
