"""What was saved is a tree of names again; a target's own tensors are planned to be filled, and misfits are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from fastpersist.dcp.global_plan.kept_metadata import metadata_of as global_metadata_of
from fastpersist.dcp.plan_agreement import SharedPlans
from fastpersist.dcp.target_plan import Fit, Saved, full_value, holds_nothing, leaves, like, saved_tree
from fastpersist.errors import UnsupportedError

CPU = torch.device("cpu")


def metadata_of(state: dict[str, Any]) -> Metadata:
    """Return what a save of this state notes."""
    whole = SharedPlans().agree(state, None, "s", "/d").whole
    assert whole is not None
    return global_metadata_of(whole.plan)


def metadata_with(paths: dict[str, tuple[Any, ...]]) -> Metadata:
    return Metadata(dict.fromkeys(paths, BytesStorageMetadata()), paths)


NAMES = st.text("ab.", min_size=1, max_size=2)
STATES = st.dictionaries(
    NAMES,
    st.recursive(
        st.integers(1, 9).map(torch.zeros),
        lambda below: st.dictionaries(NAMES, below, min_size=1, max_size=3) | st.lists(below, min_size=1, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


def shapes(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: shapes(below) for key, below in node.items()}
    return [shapes(below) for below in node] if isinstance(node, list) else tuple(node.shape)


@given(STATES)
def test_names_of_a_save_are_the_tree_that_was_saved(state: dict[str, Any]) -> None:
    try:
        metadata = metadata_of(state)
    except ValueError:  # "a.b", and "b" in "a": refused when it is saved
        return
    tree = saved_tree(metadata)
    assert full_value(tree, lambda saved: saved.shape) == shapes(state)
    assert sorted(saved.fqn for saved in leaves(tree)) == sorted(metadata.state_dict_metadata)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ({"a": ("a",) * 129}, "'a' has no path of up to 128 names"),
        ({"a": ("a", -1)}, "'a' has no path"),
        ({"a": ("a", 1.5)}, "'a' has no path"),
        ({"a": ("a", True)}, "'a' has no path"),
        ({"a": ("x",), "b": ("x",)}, "'b' has the place of something else"),
        ({"a": ("x", "y"), "b": ("x",)}, "'b' has the place of something else"),
        ({"a": ("x", 1 << 40)}, "lists in it have more than"),
        ({f"a{index}": (f"a{index}", 1 << 18) for index in range(5)}, "lists in it have more than"),
    ],
)
def test_names_that_make_no_tree_are_refused(paths: dict[str, tuple[Any, ...]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        saved_tree(metadata_with(paths))


def test_places_that_dcp_left_out_are_none() -> None:
    tree = saved_tree(metadata_with({"a": ("x", 2), "b": ("x", 0, "y"), "c": ()}))
    assert full_value(tree, lambda saved: saved.fqn) == {"x": [{"y": "b"}, None, "a"], "c": "c"}


def test_parameters_of_an_optimizer_have_their_numbers_again() -> None:
    values = {"g0": {"params": [0, 1]}, "g1": {"params": ["named"]}, "s0": 7, "s1": 8}
    paths = {"g0": ("o", "param_groups", 0), "g1": ("o", "param_groups", 1)}
    paths |= {"s0": ("o", "state", "1"), "s1": ("o", "state", "named")}
    found = full_value(saved_tree(metadata_with(paths)), lambda saved: values[saved.fqn])
    assert found["o"]["state"] == {1: 7, "named": 8}


def test_values_take_the_keys_and_the_empty_dicts_of_what_is_live() -> None:
    assert like({"1": {"2": "x"}, "y": 3}, {1: {2: 0, 3: {}}, "z": []}) == {1: {2: "x", 3: {}}, "y": 3, "z": []}
    assert like(None, {}) == {}
    assert like(None, [1]) is None
    assert like(5, {1: 2}) == 5


def test_what_has_no_state_holds_nothing() -> None:
    assert holds_nothing({})
    assert holds_nothing(torch.nn.ReLU())
    assert not holds_nothing(torch.nn.Linear(1, 1))
    assert not holds_nothing(torch.zeros(0))
    assert not holds_nothing(0)


# --- what goes where


def fitted(saved: dict[str, Any], target: object, objects: dict[str, Any] | None = None, **modules: Any) -> Fit:
    """Plan a target for what was saved as "x"."""
    fit = Fit(objects or {}, CPU, list(modules.values()))
    fit.add(("x",), "x", target, saved_tree(metadata_of(saved))["x"])
    return fit


def test_tensors_of_a_module_are_filled_where_they_are() -> None:
    model = torch.nn.Linear(3, 4)
    fit = fitted({"x": torch.nn.Linear(3, 4).state_dict()}, model)
    assert not fit.problems
    assert {name: tensor.data_ptr() for name, tensor in fit.tensors.items()} == {
        "x.weight": model.weight.data_ptr(),
        "x.bias": model.bias.data_ptr(),
    }
    assert list(fit.filled_keys) == ["x"]


def test_names_and_shapes_that_do_not_fit_are_told_all_at_once() -> None:
    model = torch.nn.Linear(3, 4)
    fit = fitted({"x": {"weight": torch.zeros(4, 2), "other": torch.zeros(1)}}, model)
    assert ["x.weight" in problem and "(4, 2)" in problem for problem in fit.problems] == [True]
    assert (fit.keys.missing_keys, fit.keys.unexpected_keys) == (["x.bias"], ["x.other"])
    assert "x is a module in the target, but a tensor" in fitted({"x": torch.zeros(3)}, model).problems[0]


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def objects_of(metadata: Metadata, state: dict[str, Any]) -> dict[str, Any]:
    def value_at(path: tuple[Any, ...]) -> Any:
        found: Any = state
        for part in path:
            found = found[part] if not isinstance(found, dict) or part in found else found[int(part)]
        return found

    return {
        name: value_at(metadata.planner_data[name])
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, BytesStorageMetadata)
    }


def test_state_that_an_optimizer_does_not_have_yet_gets_memory() -> None:
    model = torch.nn.Linear(3, 4)
    saved = {"x": trained(torch.nn.Linear(3, 4)).state_dict()}
    objects = objects_of(metadata_of(saved), saved)
    fresh = torch.optim.AdamW(model.parameters())
    fit = fitted(saved, fresh, objects)
    assert not fit.problems
    assert fit.tensors["x.state.0.exp_avg"].shape == (4, 3)
    assert not fit.tensors["x.state.0.exp_avg"].any()
    assert fit.tensors["x.state.0.step"].shape == ()
    assert not fresh.state, "a plan changes nothing"


def test_state_that_an_optimizer_has_is_filled_where_it_is() -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = trained(model)
    saved = {"x": trained(torch.nn.Linear(3, 4)).state_dict()}
    fit = fitted(saved, optimizer, objects_of(metadata_of(saved), saved))
    assert fit.tensors["x.state.0.exp_avg"].data_ptr() == optimizer.state[model.weight]["exp_avg"].data_ptr()


def test_groups_of_another_number_of_parameters_are_refused() -> None:
    saved = {"x": trained(torch.nn.Linear(3, 4)).state_dict()}
    one = torch.optim.AdamW(torch.nn.Linear(3, 4, bias=False).parameters())
    (problem,) = fitted(saved, one, objects_of(metadata_of(saved), saved)).problems
    assert "groups of [1] parameters in the target, and of [2] in the checkpoint" in problem


def test_parameters_are_found_by_their_names_in_any_order() -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD([model.bias, model.weight], momentum=0.5)
    saved = {
        "x": {
            "state": {"weight": {"momentum_buffer": torch.ones(4, 3)}, "bias": {"momentum_buffer": torch.ones(4)}},
            "param_groups": [{"lr": 0.5, "params": ["weight", "bias"]}],
        }
    }
    fit = fitted(saved, optimizer, objects_of(metadata_of(saved), saved), model=model)
    assert not fit.problems
    shape_of = {name: tuple(tensor.shape) for name, tensor in fit.tensors.items()}
    assert shape_of == {"x.state.weight.momentum_buffer": (4, 3), "x.state.bias.momentum_buffer": (4,)}
    saved["x"]["param_groups"][0]["params"] = ["weight", "elsewhere"]
    problems = fitted(saved, optimizer, objects_of(metadata_of(saved), saved), model=model).problems
    assert problems == [
        "x has bias in the target, and not in the checkpoint",
        "x has elsewhere in the checkpoint, and not in the target",
    ]


def test_a_tensor_that_no_target_takes_is_made_once() -> None:
    fit = Fit({}, CPU, [])
    (saved,) = leaves(saved_tree(metadata_of({"x": torch.ones(5, dtype=torch.int16)})))
    assert isinstance(saved, Saved)
    made = fit.value_of(saved)
    assert (made.shape, made.dtype) == ((5,), torch.int16)
    assert fit.value_of(saved) is made
    saved.described.properties.layout = torch.sparse_coo  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match=r"'x' is a tensor of layout torch\.sparse_coo"):
        Fit({}, CPU, []).value_of(saved)
