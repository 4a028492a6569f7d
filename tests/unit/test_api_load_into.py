"""fp.load_into with more than tensors: optimizers, plain values, and what cannot be filled, which is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support.sameness import assert_same, portrait
from support.specimens import Network, train

import fastpersist as fp
from fastpersist.loading import restore

Optimizer = torch.optim.Optimizer


def network(seed: int) -> Network:
    torch.manual_seed(seed)
    return Network()


def adam(module: torch.nn.Module) -> Optimizer:
    return torch.optim.Adam(module.parameters())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Network, Optimizer]:
    """A file with the state of a training, and the training."""
    source = network(3)
    optimizer = adam(source)
    train(source, optimizer)
    state = {"model": source.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "note": "of the file"}
    fp.save(state, tmp_path / "all.pt")
    return tmp_path / "all.pt", source, optimizer


def refused(path: Path, target: Any, **options: Any) -> str:
    """Expect a refusal that leaves the target as it was; return the message."""
    before = portrait(target)
    with pytest.raises(fp.ConfigError, match="was not changed") as caught:
        fp.load_into(path, target, **options)
    assert portrait(target) == before
    return str(caught.value)


# --- what is filled


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1], ids=["new", "with state"])
def test_model_and_optimizer_go_on_where_they_were_saved(
    saved: tuple[Path, Network, Optimizer], steps_before: int, verify: bool
) -> None:
    path, source, optimizer = saved
    model = network(9)
    other = adam(model)
    train(model, other, steps=steps_before)
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values()]
    target = {"model": model, "optimizer": other, "step": 0, "note": None}
    found = fp.load_into(path, target, verify=verify)
    assert found == ([], [])
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == pointers
    assert (target["model"], target["optimizer"]) == (model, other)
    assert (target["step"], target["note"]) == (3, "of the file")
    train(source, optimizer)
    train(model, other)
    assert_same(model.state_dict(), source.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())


class Wrapped:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapped], ids=["bare", "wrapped"])
def test_optimizer_alone_is_filled(wrap: Callable[[Optimizer], object], tmp_path: Path) -> None:
    source = network(3)
    optimizer = adam(source)
    train(source, optimizer)
    fp.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = adam(network(9))
    assert fp.load_into(tmp_path / "optimizer.pt", wrap(other)) == ([], [])
    assert_same(other.state_dict(), optimizer.state_dict())


def test_object_with_load_state_dict_and_nested_targets_are_filled(tmp_path: Path) -> None:
    source = network(3)
    optimizer = adam(source)
    train(source, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {"parts": [(optimizer.state_dict(), 7), {"scheduler": scheduler.state_dict(), "w": torch.ones(3)}]}
    fp.save(state, tmp_path / "all.pt")
    other = adam(network(9))
    other_scheduler = torch.optim.lr_scheduler.StepLR(other, 5)
    weight = torch.zeros(3)
    target = {"parts": [(other, 0), {"scheduler": other_scheduler, "w": weight}]}
    fp.load_into(tmp_path / "all.pt", target)
    assert target["parts"][0] == (other, 7)
    assert other_scheduler.state_dict() == scheduler.state_dict()
    assert_same(other.state_dict(), optimizer.state_dict())
    assert weight.tolist() == [1, 1, 1]


# --- what is on one side only


def test_names_on_one_side_only_are_returned_as_load_state_dict_returns_them(tmp_path: Path) -> None:
    state = network(3).state_dict()
    state["unknown"] = state.pop("head.weight")
    fp.save(state, tmp_path / "model.pt")
    stock = network(9).load_state_dict(torch.load(tmp_path / "model.pt"), strict=False)
    found = fp.load_into(tmp_path / "model.pt", network(9), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (stock.missing_keys, stock.unexpected_keys)
    assert found.missing_keys == ["head.weight"]
    assert found.unexpected_keys == ["unknown"]


def test_beside_an_optimizer_too_and_what_nobody_takes_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = network(3)
    optimizer = adam(source)
    train(source, optimizer)
    model_state = source.state_dict()
    model_state["unknown"] = torch.ones(500_000)
    state = {"model": model_state, "optimizer": optimizer.state_dict(), "ema": torch.ones(700_000)}
    fp.save(state, tmp_path / "all.pt")
    model = network(9)
    other = adam(model)
    message = refused(tmp_path / "all.pt", {"model": model, "optimizer": other, "scaler": torch.zeros(1)})
    for part in ("scaler is in the target", "model.unknown is in the file", "ema is in the file"):
        assert part in message

    read_bytes: list[int] = []
    original = restore.fill_storages

    def fill_storages(source: Any, wanted: Any, *rest: Any, **options: Any) -> Any:
        read_bytes.append(sum(item.size_bytes for item in wanted.values()))
        return original(source, wanted, *rest, **options)

    monkeypatch.setattr(restore, "fill_storages", fill_storages)
    target = {"model": model, "optimizer": other, "scaler": torch.zeros(1)}
    found = fp.load_into(tmp_path / "all.pt", target, strict=False)
    assert found == (["scaler"], ["model.unknown", "ema"])
    assert sum(read_bytes) < 1_000_000
    assert_same(model.state_dict(), source.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())


# --- what cannot be filled


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (None, "the target is a value of type NoneType"),
        ("text", "the target is a value of type str"),
        (np.zeros(3), "the target is a value of type ndarray; torch.from_numpy"),
        ({"model": {"w": [np.zeros(3)]}}, "model.w[0] is a value of type ndarray; torch.from_numpy"),
        ({"model": object()}, "model is a value of type object, which cannot be filled"),
        ((torch.zeros(1), 3), "[1] is a value of type int, which cannot be filled"),
        (MappingProxyType({"step": 3}), "step is a value of type int, which cannot be filled"),
        ([{"model": torch.zeros(1)}, 3], "all is a value of type list in the target, but a value of type dict"),
    ],
    ids=["None", "text", "array", "nested array", "object", "value in a tuple", "value in a fixed dict", "list"],
)
def test_what_cannot_be_filled_is_named(saved: tuple[Path, Network, Optimizer], target: Any, named: str) -> None:
    with pytest.raises(fp.ConfigError) as caught:
        fp.load_into(saved[0], target)
    assert named in str(caught.value)
    assert "was not changed" in str(caught.value)


def test_safetensors_hold_no_optimizer(tmp_path: Path) -> None:
    model = network(3)
    fp.save({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert "tensors only" in refused(tmp_path / "model.safetensors", {"w": torch.zeros(3), "optimizer": adam(model)})
    assert "tensors only" in refused(tmp_path / "model.safetensors", {"w": torch.zeros(3), "note": "text"})


OTHERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
}


@pytest.mark.parametrize("steps_before", [0, 1], ids=["new", "with state"])
@pytest.mark.parametrize("kind", OTHERS)
def test_optimizer_of_another_class_is_refused_by_name(
    saved: tuple[Path, Network, Optimizer], kind: str, steps_before: int, tmp_path: Path
) -> None:
    path, _, optimizer = saved
    model = network(9)
    other = OTHERS[kind](model.parameters())
    train(model, other, steps=steps_before)
    before = portrait(other.state_dict())
    assert f"optimizer is of the class {kind} in the target" in refused(path, {"model": model, "optimizer": other})
    assert portrait(other.state_dict()) == before
    fp.save(other.state_dict(), tmp_path / "other.pt")
    before = portrait(optimizer.state_dict())
    message = refused(tmp_path / "other.pt", optimizer)
    assert "optimizer is of the class Adam in the target, but of another one in the file" in message
    assert portrait(optimizer.state_dict()) == before


def test_optimizer_with_an_older_torch_s_groups_and_a_scheduler_s_is_taken(tmp_path: Path) -> None:
    source = network(3)
    optimizer = adam(source)
    train(source, optimizer)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["fused"], group["foreach"]
        group["initial_lr"] = 0.1
        group["my_decay"] = 0.5
    fp.save(state, tmp_path / "optimizer.pt")
    other = adam(network(9))
    fp.load_into(tmp_path / "optimizer.pt", other)
    assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("steps_before", [0, 1], ids=["new", "with state"])
def test_optimizer_of_other_shapes_is_refused_by_name(steps_before: int, tmp_path: Path) -> None:
    def made(*shape: int, steps: int) -> Optimizer:
        weight = torch.nn.Parameter(torch.ones(shape))
        optimizer = torch.optim.Adam([weight])
        for _ in range(steps):
            weight.sum().backward()
            optimizer.step()
        return optimizer

    fp.save({"optimizer": made(4, steps=1).state_dict()}, tmp_path / "all.pt")
    other = made(3, steps=steps_before)
    before = portrait(other.state_dict())
    message = refused(tmp_path / "all.pt", {"optimizer": other})
    assert "optimizer.state[0].exp_avg has shape (3,) in the target, (4,) in the file" in message
    assert portrait(other.state_dict()) == before
    groups = torch.optim.Adam([{"params": [torch.ones(4)]}, {"params": [torch.ones(1)]}])
    assert "optimizer has 2 parameter groups in the target, 1 in the file" in refused(
        tmp_path / "all.pt", {"optimizer": groups}
    )
