"""Which storages are stable and which constant: what optimizers hold and what users name, found anew at each save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import small_model, train
from torch.testing._internal.two_tensor import TwoTensor

import fastpersist as fp
from fastpersist.saving.ownership import Owners, note_step_of, step_count, storage_key, storage_keys


def key_of(tensor: torch.Tensor) -> int:
    (key,) = storage_keys(tensor)
    return key


def test_without_an_optimizer_nothing_is_stable() -> None:
    owners = Owners()
    assert owners.optimizers() == []
    assert owners.stable() == (([], []), "no optimizer was given")
    assert owners.constant() == ([], [])


def test_parameters_and_state_are_stable_as_they_are_at_each_save() -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    owners = Owners(optimizer)
    found, why_not = owners.stable()
    assert set(found.held) == {key_of(parameter) for parameter in model.parameters()}
    assert why_not == ""
    train(model, optimizer)
    found, _ = owners.stable()
    state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    assert len(state) == 12
    assert set(found.held) == {key_of(tensor) for tensor in (*model.parameters(), *state)}
    late = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [late]})
    assert key_of(late) in owners.stable()[0].held


def test_tensors_are_found_anywhere_inside_state() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    inside = [torch.zeros(n) for n in range(1, 5)]
    optimizer.state[parameter] = {"a": [inside[0], (inside[1], {"b": inside[2]})], "c": 5, "d": None, "e": "text"}
    optimizer.state["all"] = OrderedDict(f=inside[3])  # type: ignore[index]
    assert set(Owners(optimizer).stable()[0].held) == {key_of(tensor) for tensor in (parameter, *inside)}


class Wrapper:
    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def test_wrappers_are_taken_off() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    assert Owners(Wrapper(optimizer)).optimizers() == [optimizer]
    assert Owners(Wrapper(Wrapper(optimizer))).optimizers() == [optimizer]
    assert Owners([Wrapper(optimizer), other]).optimizers() == [optimizer, other]
    assert Owners((optimizer,)).optimizers() == [optimizer]
    assert Owners([]).optimizers() == []


def test_what_wraps_itself_is_refused() -> None:
    endless = Wrapper(None)
    endless.optimizer = endless
    with pytest.raises(fp.ConfigError, match="Wrapper"):
        Owners(endless)


@pytest.mark.parametrize("nonsense", [5, "adam", object(), torch.zeros(3), {"a": 1}, [None], Wrapper(7)])
def test_what_is_no_optimizer_is_refused(nonsense: object) -> None:
    with pytest.raises(fp.ConfigError, match=r"torch\.optim\.Optimizer"):
        Owners(nonsense)


@pytest.mark.parametrize("nonsense", [5, "text", b"bytes", [torch.zeros(3), None], {"a": 1.5}])
def test_what_is_no_tensor_is_no_constant(nonsense: object) -> None:
    with pytest.raises(fp.ConfigError, match="constant="):
        Owners(None, nonsense)


@pytest.mark.parametrize("gate", ["", "Optimizer", "auto", None])
def test_unknown_gate_is_refused(gate: Any) -> None:
    with pytest.raises(fp.ConfigError, match="gate"):
        Owners(None, (), gate)


def as_module(module: torch.nn.Module) -> object:
    return module


def as_generator(module: torch.nn.Module) -> object:
    return (tensor for tensor in [*module.parameters(), *module.buffers()])


def as_state_dict(module: torch.nn.Module) -> object:
    return module.state_dict()


def as_nest(module: torch.nn.Module) -> object:
    return [{"a": list(module.parameters())}, iter(()), (tensor for tensor in module.buffers())]


@pytest.mark.parametrize("named", [as_module, as_generator, as_state_dict, as_nest])
def test_constants_are_found_at_every_save(named: Callable[[torch.nn.Module], object]) -> None:
    module = torch.nn.BatchNorm1d(7)
    owners = Owners(None, named(module))
    expected = {key_of(tensor) for tensor in module.state_dict().values()}
    assert len(expected) == 5
    for _ in range(2):
        assert set(owners.constant().held) == expected


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.eye(3).to_mkldnn(), torch.nn.UninitializedParameter()]
)
def test_tensors_without_a_storage_have_no_key(tensor: torch.Tensor) -> None:
    assert storage_keys(tensor) == []
    assert storage_key(tensor) is None
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"odd": tensor}
    assert set(Owners(optimizer, tensor).stable()[0].held) == {key_of(parameter)}
    assert Owners(optimizer, tensor).constant() == ([], [])


@pytest.mark.filterwarnings("ignore:torch.load, fp.load")  # a load with weights_only=True wants its class allowed
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_lazy_module_is_saved_before_its_first_run(has_optimizer: bool, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if has_optimizer else None
    fp.save_async(module.state_dict(), tmp_path / "async.pt", optimizer=optimizer).result()
    with fp.Checkpointer(tmp_path, optimizer=optimizer) as checkpoints:
        checkpoints.save(1, module.state_dict())
    for path in (tmp_path / "async.pt", tmp_path / "step-00000001" / "state.pt"):
        loaded = torch.load(path, weights_only=False)
        assert torch.nn.parameter.is_lazy(loaded["0.weight"])
        assert torch.equal(loaded["1.weight"], module[1].weight)


def test_subclass_that_wraps_tensors_has_the_keys_of_those_inside() -> None:
    first, second = torch.zeros(3), torch.zeros(3)
    nested = TwoTensor(TwoTensor(first, second), TwoTensor(second, first))
    assert storage_keys(nested) == [key_of(one) for one in (first, second, second, first)]
    assert set(Owners(None, [nested]).constant().held) == {key_of(first), key_of(second)}


def test_views_have_the_key_of_what_they_view() -> None:
    base = torch.nn.Parameter(torch.zeros(10, 10))
    assert key_of(base) == key_of(base.detach()) == key_of(base[3, 2:4]) == key_of(base.t())
    assert key_of(base) != key_of(base.clone())


# --- what steps change


def test_constant_that_an_optimizer_trains_is_none() -> None:
    model = small_model()
    trained, frozen = list(model.parameters())[:2], list(model.parameters())[2:]
    for parameter in frozen:
        parameter.requires_grad_(False)
    owners = Owners(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found = owners.look()
    assert set(found.constant.held) == {key_of(parameter) for parameter in frozen}
    assert set(found.stable.held) == {key_of(parameter) for parameter in (*trained, *frozen)}


def test_optimizer_whose_step_a_graph_has_captured_owns_nothing_stable_for_good() -> None:
    replayed, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1) for _ in range(2))
    before = step_count()
    note_step_of(other, is_replayed=False)
    note_step_of(replayed, is_replayed=True)
    note_step_of(replayed, is_replayed=False)
    assert step_count() == before + 3
    for gate in ("optimizer", "manual"):
        found, why_volatile = Owners([replayed, other], gate=gate).stable()
        assert set(found.held) == {key_of(other.param_groups[0]["params"][0])}
        assert why_volatile == "SGD steps inside a CUDA graph, where no hook runs"
