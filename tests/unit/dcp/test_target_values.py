"""Values in targets (betas, a schedule's numbers) are replaced by what was saved, as are tuples of values alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fastpersist as fp
from fastpersist.errors import ConfigError


class Beside(NamedTuple):
    tensor: torch.Tensor
    number: int


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.5 + seed / 10, 0.75))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def loaded_into(path: Path, state: dict[str, Any], into: dict[str, Any], *, sharded: bool) -> dict[str, Any]:
    with fp.Checkpointer(path, sharded=sharded) as checkpoints:
        checkpoints.save(1, state).result(30)
        return dict(checkpoints.load(1, into=into))


@pytest.mark.parametrize("flat", [False, True])
def test_what_get_state_dict_gives_is_loaded_into_what_it_gives(tmp_path: Path, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    (model, optimizer), (new_model, new_optimizer) = trained(0), trained(1)
    saved, blank = (
        dict(zip(("model", "optimizer"), get_state_dict(*one, options=options), strict=True))
        for one in ((model, optimizer), (new_model, new_optimizer))
    )
    found = loaded_into(tmp_path, saved, blank, sharded=True)
    set_state_dict(
        new_model,
        new_optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=options,
    )
    assert new_optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    for old, new in zip(model.parameters(), new_model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert torch.equal(optimizer.state[old]["exp_avg"], new_optimizer.state[new]["exp_avg"])


@pytest.mark.parametrize("sharded", [False, True])
def test_tuples_of_values_are_replaced_in_dicts_and_lists(tmp_path: Path, sharded: bool) -> None:
    tensor = torch.zeros(2)
    into: dict[str, Any] = {
        "held": {"betas": (0, 0), "size": torch.Size([9]), "nested": ((0,), "no", [0]), "t": tensor},
        "listed": [torch.zeros(1), (0, 0)],
    }
    state = {
        "held": {"betas": (1, 2), "size": torch.Size([3, 4]), "nested": ((5, 6), "yes", [7]), "t": torch.ones(2)},
        "listed": [torch.ones(1), (1, 2, 3)],
    }
    found = loaded_into(tmp_path, state, into, sharded=sharded)
    held, listed = found["held"], found["listed"]
    assert (held["betas"], held["size"], held["nested"]) == ((1, 2), (3, 4), ((5, 6), "yes", [7]))
    assert held["t"] is tensor
    assert tensor.tolist() == [1, 1]
    assert (listed[0].item(), listed[1]) == (1, (1, 2, 3))


def test_values_beside_tensors_in_a_tuple_are_replaced(tmp_path: Path) -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    into: dict[str, Any] = {"held": {"pair": Beside(tensors[0], 0)}, "listed": [(tensors[1], (0, tensors[2]))]}
    state = {
        "held": {"pair": (torch.ones(2), 3)},
        "listed": [(torch.ones(2), (4, torch.ones(2)))],
    }
    found = loaded_into(tmp_path, state, into, sharded=False)
    pair, (first, (number, second)) = found["held"]["pair"], found["listed"][0]
    assert isinstance(pair, Beside)
    assert (pair.number, number) == (3, 4)
    assert [id(pair.tensor), id(first), id(second)] == list(map(id, tensors))
    assert all(tensor.tolist() == [1, 1] for tensor in tensors)


@pytest.mark.parametrize("sharded", [False, True])
def test_tuple_of_values_that_nothing_holds_is_refused(tmp_path: Path, sharded: bool) -> None:
    with pytest.raises(ConfigError, match=r"betas is a value of type tuple"):
        loaded_into(tmp_path, {"betas": (1, 2)}, {"betas": (0, 0)}, sharded=sharded)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_holds_nothing_stays_in_its_list(tmp_path: Path, sharded: bool) -> None:
    """DCP leaves out what is empty; a list that is filled keeps its own."""
    nothing: dict[str, Any] = {}
    into: dict[str, Any] = {"listed": [nothing, torch.zeros(2)]}
    found = loaded_into(tmp_path, {"listed": [{}, torch.ones(2)]}, into, sharded=sharded)
    assert found["listed"][0] is nothing
    assert found["listed"][1].tolist() == [1, 1]


def test_tensor_for_which_nothing_was_saved_is_refused_in_a_list(tmp_path: Path) -> None:
    into = {"listed": [torch.zeros(3), torch.zeros(2)]}
    with pytest.raises(ConfigError, match=r"listed\[0\] is in the target, but not in the checkpoint"):
        loaded_into(tmp_path, {"listed": [{}, torch.ones(2)]}, into, sharded=True)
    assert into["listed"][1].tolist() == [0, 0]
