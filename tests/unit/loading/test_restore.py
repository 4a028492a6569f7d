"""A state goes back into modules and optimizers as load_state_dict would put it there, but into the same memory."""

from __future__ import annotations

import copyreg
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import leaks
from support.resumables import load, network, save, storages_of
from support.sameness import assert_same, portrait
from support.specimens import Network, PlainSubclass, train

import fastpersist as fp

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|CSC|BSR|BSC):UserWarning"),
]

DAMAGE = (fp.FormatError, fp.ChecksumError)


nothing_is_left_behind = leaks.nothing_is_left_behind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


# --------------------------------------------------------------------------------------------- without targets


def test_without_targets_it_is_a_plain_load(path: Path) -> None:
    state = {"model": network().state_dict(), "step": 7, "rng": torch.get_rng_state()}
    save(state, path)
    assert_same(load(path), state)
    assert_same(load(path, {}, verify=True), state)


def test_map_location_reaches_entries_without_target(path: Path) -> None:
    source = network()
    save({"model": source.state_dict(), "other": torch.ones(3)}, path)
    target = network(9)
    loaded = load(path, {"model": target}, map_location={"cpu": "cpu"}, keys=["other"])
    assert loaded["other"].tolist() == [1, 1, 1]
    assert_same(target.state_dict(), source.state_dict())


# --------------------------------------------------------------------------------------------- optimizers

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW foreach amsgrad": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "two groups": lambda p: torch.optim.AdamW([{"params": (q := list(p))[:2], "lr": 0.5}, {"params": q[2:]}]),
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1], ids=["new", "with state"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(name: str, steps_before: int, verify: bool, path: Path) -> None:
    source = network()
    optimizer = OPTIMIZERS[name](source.parameters())
    train(source, optimizer, 3)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    save({"model": source.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, path)

    stock = network(9)
    stock_optimizer = OPTIMIZERS[name](stock.parameters())
    target = network(9)
    target_optimizer = OPTIMIZERS[name](target.parameters())
    for one, its_optimizer in ((stock, stock_optimizer), (target, target_optimizer)):
        train(one, its_optimizer, steps_before)
    state = torch.load(path)
    stock.load_state_dict(state["model"])
    stock_optimizer.load_state_dict(state["optimizer"])

    had = {(id(p), k): v for p, s in target_optimizer.state.items() for k, v in s.items() if torch.is_tensor(v)}
    addresses = storages_of(target)
    loaded = load(path, {"model": target, "optimizer": target_optimizer}, verify=verify)
    assert loaded["step"] == 3
    assert loaded["model"] is target
    assert loaded["optimizer"] is target_optimizer
    assert storages_of(target) == addresses
    assert_same(target.state_dict(), stock.state_dict())
    assert_same(target_optimizer.state_dict(), stock_optimizer.state_dict())
    for parameter, entries in target_optimizer.state.items():
        for key, value in entries.items():
            if (id(parameter), key) in had:
                assert value is had[id(parameter), key]
    for one, its_optimizer in ((source, optimizer), (target, target_optimizer)):
        train(one, its_optimizer, 2)
    assert_same(target.state_dict(), source.state_dict())
    assert_same(target_optimizer.state_dict(), optimizer.state_dict())


def lbfgs(model: torch.nn.Module, steps: int, optimizer: torch.optim.LBFGS) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(8)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_lbfgs_with_its_lists_of_tensors(steps_before: int, path: Path) -> None:
    source = network()
    optimizer = torch.optim.LBFGS(source.parameters(), max_iter=3, history_size=5)
    lbfgs(source, 2, optimizer)
    save({"model": source.state_dict(), "optimizer": optimizer.state_dict()}, path)
    target = network(9)
    target_optimizer = torch.optim.LBFGS(target.parameters(), max_iter=3, history_size=5)
    lbfgs(target, steps_before, target_optimizer)
    load(path, {"model": target, "optimizer": target_optimizer})
    for one, its_optimizer in ((source, optimizer), (target, target_optimizer)):
        lbfgs(one, 1, its_optimizer)
    assert_same(target.state_dict(), source.state_dict())


def test_several_optimizers_in_a_list(path: Path) -> None:
    models = [network(1), network(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2)
    state = {"parts": [(m.state_dict(), o.state_dict()) for m, o in zip(models, optimizers, strict=True)]}
    save(state, path)
    others = [network(8), network(9)]
    targets = [(model, torch.optim.Adam(model.parameters())) for model in others]
    assert load(path, {"parts": targets})["parts"] is targets
    assert_same([(m.state_dict(), o.state_dict()) for m, o in targets], state["parts"])


# --------------------------------------------------------------------------------------------- modules


class Extra(torch.nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 4.0))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [None, {"scale": 2.0}, torch.arange(4.0), {"amax": [torch.arange(4.0)]}], ids=repr)
def test_extra_state_is_set(state: Any, path: Path) -> None:
    source = torch.nn.Sequential(Extra(state), torch.nn.Linear(2, 2))
    save({"model": source.state_dict()}, path)
    target = torch.nn.Sequential(Extra("old"), torch.nn.Linear(2, 2))
    load(path, {"model": target})
    assert_same(target.state_dict(), source.state_dict())


def test_hooks_of_the_module_run(path: Path) -> None:
    save({"model": network().state_dict()}, path)
    target = network(9)
    called: list[str] = []
    target.register_load_state_dict_pre_hook(lambda *_: called.append("before"))
    target.register_load_state_dict_post_hook(lambda *_: called.append("after"))
    load(path, {"model": target})
    assert called == ["before", "after"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_another_dtype_are_converted(dtype: torch.dtype, path: Path) -> None:
    source = network()
    optimizer = torch.optim.Adam(source.parameters())
    train(source, optimizer, 2)
    save({"model": source.state_dict(), "optimizer": optimizer.state_dict()}, path)
    results = []
    for way in ("stock", "new", "filled"):
        target = network(9).to(dtype)
        other = torch.optim.Adam(target.parameters())
        if way == "stock":
            state = torch.load(path)
            target.load_state_dict(state["model"])
            other.load_state_dict(state["optimizer"])
        else:
            if way == "filled":
                train(target, other, 1)
            load(path, {"model": target, "optimizer": other})
        results.append(portrait([target.state_dict(), other.state_dict()]))
    assert results[0] == results[1] == results[2]


def test_tied_parameters_stay_tied(path: Path) -> None:
    source, target = network(), network(9)
    save({"model": source.state_dict()}, path)
    load(path, {"model": target})
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.head.weight, source.head.weight)


def test_subclass_parameter_is_copied_into(path: Path) -> None:
    source, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    save({"model": source.state_dict()}, path)
    target.weight = torch.nn.Parameter(torch.zeros(2, 2).as_subclass(PlainSubclass))
    weight = target.weight
    load(path, {"model": target})
    assert target.weight is weight
    assert weight.tolist() == source.weight.tolist()


def test_autograd_notices_and_requires_grad_stays(path: Path) -> None:
    save({"w": torch.full((3,), 2.0)}, path)
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    load(path, {"w": weight})
    assert weight.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_ordered_dicts_keep_their_versions(path: Path) -> None:
    """load_state_dict looks at _metadata: without it a BatchNorm believes that the file is of torch 0.4."""
    source, seen = network(), []

    class Curious(Network):
        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            seen.append((type(state), metadata))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    save({"model": source.state_dict()}, path)
    load(path, {"model": Curious()})
    assert seen == [(OrderedDict, {"version": 1})]


# --------------------------------------------------------------------------------------------- other targets


def test_schedulers_and_scalers_get_their_state(path: Path) -> None:
    def make() -> tuple[Any, ...]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=64.0)

    optimizer, scheduler, scaler = make()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    names = ("optimizer", "scheduler", "scaler")
    states = {name: part.state_dict() for name, part in zip(names, (optimizer, scheduler, scaler), strict=True)}
    save(states, path)
    others = dict(zip(names, make(), strict=True))
    load(path, others)
    assert_same({name: part.state_dict() for name, part in others.items()}, states)
    optimizer.step()
    scheduler.step()
    others["optimizer"].step()
    others["scheduler"].step()
    assert others["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_views_with_gaps_and_of_one_storage(path: Path) -> None:
    base = torch.arange(100.0)
    save({"t": [base[10:20], base.view(10, 10)[:, 3], base]}, path)
    target = [torch.zeros(10), torch.zeros(10), torch.zeros(10, 20).t()[::2].reshape(-1)]
    load(path, {"t": target})
    assert [part.tolist() for part in target] == [base[10:20].tolist(), base[3::10].tolist(), base.tolist()]


def test_values_of_any_kind_beside_the_targets(path: Path) -> None:
    other = {"sparse": torch.eye(3).to_sparse(), "sub": torch.ones(2).as_subclass(PlainSubclass), "raw": {1, 2}}
    save({"w": torch.ones(2), "other": other}, path)
    target = torch.zeros(2)
    loaded = load(path, {"w": target}, weights_only=False, keys=["other"])
    assert target.tolist() == [1, 1]
    assert_same(loaded["other"], other)


def test_cycles_and_doubly_held_containers_in_the_file(path: Path) -> None:
    inner: dict[str, Any] = {"w": torch.ones(2)}
    inner["self"] = inner
    twice: Any = [torch.zeros(1)]
    for _ in range(60):
        twice = [twice, twice]
    save({"a": inner, "b": twice, "c": twice}, path)
    weight = torch.zeros(2)
    target = {"w": weight, "self": None}
    loaded = load(path, {"a": target, "b": []})
    assert loaded["a"] is target
    assert target["w"] is weight
    assert weight.tolist() == [1, 1]
    assert target["self"]["self"]["w"].tolist() == [1, 1]


# --------------------------------------------------------------------------------------------- by a copy

AWKWARD: dict[str, tuple[Any, dict[str, Any]]] = {
    "callable map_location": (torch.ones(3), {"map_location": lambda storage, _: storage}),
    "sparse": (torch.ones(3).to_sparse(), {}),
    "conjugated": (torch.ones(3, dtype=torch.complex64).conj(), {}),
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", AWKWARD)
def test_what_cannot_be_filled_from_the_file_is_copied(name: str, verify: bool, path: Path) -> None:
    value, options = AWKWARD[name]
    source = network()
    optimizer = torch.optim.Adam(source.parameters())
    train(source, optimizer, 2)
    save({"model": source.state_dict(), "optimizer": optimizer.state_dict(), "value": {"v": value}}, path)
    target, into = network(9), {"v": torch.zeros_like(value).clone()}
    other = torch.optim.Adam(target.parameters())
    train(target, other, 1)
    addresses = storages_of(other)
    load(path, {"model": target, "optimizer": other, "value": into}, verify=verify, **options)
    assert_same(target.state_dict(), source.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())
    assert storages_of(other) == addresses
    assert torch.equal(into["v"].to_dense(), value.to_dense())


class Registered:
    """An object whose class the pickle names by a code of the extension registry, which no scan understands."""


@pytest.mark.parametrize("what", ["targets", "keys"])
def test_a_pickle_that_cannot_be_scanned_is_loaded_by_torch(what: str, path: Path) -> None:
    copyreg.add_extension(__name__, "Registered", 7)
    try:
        torch.save({"w": torch.ones(3), "odd": Registered(), "v": torch.ones(2)}, path, pickle_protocol=2)
        if what == "targets":
            target = torch.zeros(3)
            assert load(path, {"w": target}, weights_only=False)["w"] is target
            assert_same(target, torch.ones(3))
        else:
            assert_same(fp.load(path, keys=["w"], weights_only=False), {"w": torch.ones(3)})
    finally:
        copyreg.remove_extension(__name__, "Registered", 7)


def test_copy_is_logged_with_its_reason(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"w": torch.ones(3)}, path)
    with caplog.at_level(logging.WARNING, "fastpersist"):
        load(path, {"w": torch.zeros(3)})
        assert "once more" not in caplog.text
        load(path, {"w": torch.zeros(3)}, map_location=lambda storage, _: storage)
    assert "map_location is a callable" in caplog.text


@pytest.mark.parametrize("way", ["in place", "by a copy"])
def test_entry_with_large_tensors_in_a_set_is_left_out_like_any_other(way: str, path: Path) -> None:
    large = torch.ones(1 << 18)
    save({"w": torch.ones(3), "set": {large}, "frozen": [frozenset([large.clone()])], "names": {"a"}}, path)
    map_location = None if way == "in place" else lambda storage, _: storage
    loaded = load(path, {"w": torch.zeros(3)}, map_location=map_location, weights_only=False)
    assert loaded.keys() == {"w", "names"}
