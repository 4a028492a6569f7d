"""Which tensor of a file goes to which tensor of a target, or why not; and which storages that leaves to be loaded."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumables import load, network, save, storages_of
from support.sameness import assert_same
from support.specimens import train

import fastpersist as fp
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.target_plan import UNREAD, Leaf, Plan, SortedStorages, Tree, storages_below, tree_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


# --- the plan

CPU = torch.device("cpu")


def planned(target: object, value: Any) -> Plan:
    plan = Plan(lambda tensor: not tensor.is_meta)
    plan.add((), "", target, value)
    return plan


def test_plain_tensor_is_filled_and_others_get_memory_of_their_own() -> None:
    plain, subclass = torch.zeros(2), torch.zeros(2).as_subclass(type("Sub", (torch.Tensor,), {}))
    plan = planned({"a": plain, "b": subclass}, {"a": torch.ones(2), "b": torch.ones(2), "step": 3})
    assert plan.problems == []
    assert (plan.leaves["a",].target, plan.leaves["a",].of_this_rank(torch.ones(2))) == (plain, plain)
    leaf = plan.leaves["b",]
    assert (leaf.target, leaf.device) == (None, CPU)
    value = torch.ones(2)
    assert leaf.of_this_rank(value) is value
    assert [step.name for step in plan.steps] == ["b", "step"]


def test_state_that_an_optimizer_lacks_goes_to_the_device_of_its_parameter() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="meta"))
    saved = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    saved.param_groups[0]["params"][0].sum().backward()
    saved.step()
    plan = planned({"o": torch.optim.Adam([weight])}, {"o": saved.state_dict()})
    devices = {path[-1]: leaf.device for path, leaf in plan.leaves.items()}
    assert devices == {"step": CPU, "exp_avg": torch.device("meta"), "exp_avg_sq": torch.device("meta")}
    assert [leaf.target for leaf in plan.leaves.values()] == [None] * 3


# --- storages


def test_leaves_form_a_tree() -> None:
    leaf = Leaf("w", torch.ones(1), None, None)
    assert tree_of({("m", "w"): leaf, ("m", 0): leaf}, [("e",), ("m", "x")]) == {
        "m": {"w": leaf, 0: leaf, "x": UNREAD},
        "e": UNREAD,
    }


def scanned(path: Path, state: Any) -> Any:
    save(state, path)
    with CheckpointSource(str(path)) as source:
        return source.scan().root


def test_storages_below_a_node_are_found_once_whatever_holds_them(path: Path) -> None:
    shared = torch.ones(3)
    inner: dict[str, Any] = {"w": shared}
    inner["self"] = inner
    root = scanned(path, {"a": inner, "b": [shared[1:], (torch.ones(1), 5)], "c": "text"})
    assert storages_below([root]) == {"0", "1"}
    assert storages_below([dict(root.items())["b"]]) == {"0", "1"}
    assert storages_below([dict(root.items())["c"]]) == set()


def sorted_by(root: Any, tree: Tree) -> tuple[set[str], dict[str, torch.device], set[str]]:
    found = SortedStorages()
    found.sort(root, tree)
    return found.in_place, found.elsewhere, storages_below(found.whole)


def test_storages_are_sorted_by_what_the_plan_does_with_their_tensors(path: Path) -> None:
    state = OrderedDict(a=torch.ones(1), b=torch.nn.Parameter(torch.ones(2)), c=torch.ones(3), d=torch.ones(4))
    root = scanned(path, {"m": state, "e": {"f": torch.ones(5)}, "rest": torch.ones(6)})

    def leaf(target: torch.Tensor | None, device: torch.device | None) -> Leaf:
        return Leaf("w", torch.ones(1), target, device)

    leaves = {("m", "a"): leaf(torch.ones(1), CPU), ("m", "b"): leaf(None, CPU), ("m", "c"): leaf(None, None)}
    in_place, elsewhere, whole = sorted_by(root, tree_of(leaves, [("e",)]))
    assert in_place == {"0", "4"}  # a is filled, f is not read
    assert elsewhere == {"1": CPU}
    assert whole == {"2", "3", "5"}  # c goes where map_location says; the plan does not mention d and rest


def test_storage_of_two_devices_and_what_is_no_plain_tensor_are_loaded_whole(path: Path) -> None:
    shared = torch.ones(4)
    root = scanned(
        path, {"a": shared[:2], "b": shared[2:], "s": torch.ones(2).to_sparse(), "x": torch.eye(2).to_sparse()}
    )
    leaves = {("a",): Leaf("a", shared, None, CPU), ("b",): Leaf("b", shared, None, torch.device("meta"))}
    leaves["s",] = Leaf("s", shared, shared, CPU)
    in_place, elsewhere, whole = sorted_by(root, tree_of(leaves, [("x",)]))
    assert (in_place, elsewhere) == (set(), {"0": CPU})
    assert whole == {"0", "1", "2", "3", "4"}


def test_undecided_entries_stay_unsorted(path: Path) -> None:
    root = scanned(path, {"m": [torch.ones(1)], "rest": torch.ones(2)})
    assert sorted_by(root, {"m": None}) == (set(), {}, {"1"})


# --- with files


def test_state_that_parameters_share_in_the_target_only_is_not_shared_afterwards(path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    shared = torch.zeros(2)
    for value, weight in enumerate(weights):
        optimizer.state[weight]["momentum_buffer"] = torch.full((2,), float(value))
    save({"optimizer": optimizer.state_dict()}, path)
    for weight in weights:
        optimizer.state[weight]["momentum_buffer"] = shared
    load(path, {"optimizer": optimizer})
    assert [optimizer.state[weight]["momentum_buffer"].tolist() for weight in weights] == [[0, 0], [1, 1]]


def test_state_that_the_file_does_not_have_is_dropped_and_missing_state_is_added(path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    optimizer.state[weights[0]]["momentum_buffer"] = torch.full((2,), 5.0)
    save({"optimizer": optimizer.state_dict()}, path)
    optimizer.state.clear()
    optimizer.state[weights[1]]["momentum_buffer"] = torch.ones(2)
    load(path, {"optimizer": optimizer})
    assert {weight: dict(state) for weight, state in optimizer.state.items()}.keys() == {weights[0]}
    assert optimizer.state[weights[0]]["momentum_buffer"].tolist() == [5, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_load_state_dict_of_the_optimizers_own_sees_the_dtypes_of_the_file(dtype: torch.dtype, path: Path) -> None:
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            seen.append(state_dict["state"][0]["momentum_buffer"])
            self.state[weight]["momentum_buffer"] = seen[0]

    seen: list[torch.Tensor] = []
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Own([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((2,), 3, dtype=torch.float64)
    save({"optimizer": optimizer.state_dict()}, path)
    live = torch.zeros(2, dtype=dtype)
    optimizer.state[weight]["momentum_buffer"] = live
    load(path, {"optimizer": optimizer})
    assert seen[0].dtype == torch.float64
    assert seen[0].tolist() == [3, 3]
    assert (seen[0] is live) == (dtype == torch.float64)
    assert optimizer.state[weight]["momentum_buffer"] is seen[0]


def test_hooks_of_the_optimizer_see_loaded_values(path: Path) -> None:
    source = network()
    optimizer = torch.optim.Adam(source.parameters())
    train(source, optimizer, 2)
    save({"optimizer": optimizer.state_dict()}, path)
    target = network(9)
    target_optimizer = torch.optim.Adam(target.parameters())
    train(target, target_optimizer, 1)
    called = []

    def before(_: Any, state: dict[str, Any]) -> None:
        called.append(state["state"][0]["exp_avg"].clone())

    target_optimizer.register_load_state_dict_pre_hook(before)
    target_optimizer.register_load_state_dict_post_hook(lambda _: called.append("post"))
    load(path, {"optimizer": target_optimizer})
    assert torch.equal(called[0], optimizer.state_dict()["state"][0]["exp_avg"])
    assert called[1:] == ["post"]
    assert_same(target_optimizer.state_dict(), optimizer.state_dict())


def test_module_whose_state_dict_makes_its_tensors_gets_them_through_load_state_dict(path: Path) -> None:
    def double(_: Any, state: dict[str, Any], *__: Any) -> None:
        state["weight"] = state["weight"] * 2

    def halve(_: Any, state: dict[str, Any], *__: Any) -> None:
        state["weight"] = state["weight"] / 2

    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    for module in (source, target):
        module.register_state_dict_post_hook(double)
        module.register_load_state_dict_pre_hook(halve)
    save({"model": source.state_dict()}, path)
    load(path, {"model": target})
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)


def test_storage_that_an_entry_without_target_shares_is_loaded_for_it(path: Path) -> None:
    source = network()
    state = source.state_dict()
    save({"model": state, "best": state, "head": source.head.weight[:2]}, path)
    target = network(9)
    loaded = load(path, {"model": target}, keys=["best", "head"])
    assert_same(target.state_dict(), source.state_dict())
    assert_same(loaded["best"], copy.deepcopy(state))
    assert torch.equal(loaded["head"], source.head.weight[:2])
    assert not storages_of(target) & {t.untyped_storage().data_ptr() for t in loaded["best"].values()}


MISFITS: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "shape": (torch.ones(3), lambda: torch.zeros(4), r"x has shape \(4,\) in the target, \(3,\) in the file"),
    "no tensor": (5, lambda: torch.zeros(4), "x is a tensor in the target, but a value of type int"),
    "no dict": ([], lambda: {"a": torch.zeros(1)}, "x is a dict in the target, but a value of type list"),
    "no list": ({}, lambda: [torch.zeros(1)], "x is a value of type list in the target"),
    "lengths": ([torch.ones(1)], lambda: [torch.ones(1), torch.ones(1)], "x has 2 elements in the target, 1"),
    "no module": (5, lambda: torch.nn.Linear(1, 1), "x is a Module in the target, but a value of type int"),
    "lazy": (torch.nn.Linear(1, 2).state_dict(), lambda: torch.nn.LazyLinear(2), "lazy module"),
    "meta target": (
        torch.ones(3),
        lambda: torch.zeros(3, device="meta"),
        "on the meta device and has no memory yet; call to_empty",
    ),
    "meta file": (torch.ones(3, device="meta"), lambda: torch.zeros(3), r"without data \(meta\)"),
    "expanded": (torch.ones(3), lambda: torch.zeros(1).expand(3), "expanded"),
    "complex": (torch.ones(3, dtype=torch.complex64), lambda: torch.zeros(3), "complex64 in the file"),
    "no optimizer": (5, lambda: torch.optim.SGD([torch.ones(1)]), "x is an optimizer in the target"),
    "no optimizer state": ({"a": 1}, lambda: torch.optim.SGD([torch.ones(1)]), "x is an optimizer in the target"),
    "parameters": (
        torch.optim.SGD([torch.ones(1)]).state_dict(),
        lambda: torch.optim.SGD([torch.ones(1), torch.ones(1)]),
        r"x.param_groups\[0\] has 2 parameters in the target, 1 in the file",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfit_is_refused_before_anything_changes(name: str, path: Path) -> None:
    value, make, match = MISFITS[name]
    save({"good": torch.ones(2), "x": value}, path)
    with pytest.raises(fp.ConfigError, match=match):
        load(path, {"good": torch.zeros(2), "x": make()})
    good, bad = torch.zeros(2), make()
    touched: list[str] = []
    with pytest.raises(fp.ConfigError, match="was not changed"):
        load(path, {"good": good, "x": bad}, on_filled=touched.append)
    assert good.tolist() == [0, 0]
    assert touched == []
