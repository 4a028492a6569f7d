"""rename= of fp.load and fp.load_into: the names of a checkpoint of others become those that are wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.sameness import assert_same, portrait
from support.specimens import Network

import fastpersist as fp
from fastpersist.loading.renaming import nested_for, regrouped, renamed


def network(seed: int) -> Network:
    torch.manual_seed(seed)
    return Network()


# --- fp.load


def test_nested_dicts_become_one_flat_dict_and_nothing_is_lost() -> None:
    held = {"model": {"a": 1, "b": {"c": 2}}, "optimizer": {0: {"exp": 3}}, "list": [{"d": 4}], "none": {}, "step": 5}
    assert renamed("file", held, lambda name: name) == {
        "model.a": 1,
        "model.b.c": 2,
        "optimizer[0].exp": 3,
        "list": [{"d": 4}],
        "none": {},
        "step": 5,
    }


def test_of_prefixes_the_longest_is_replaced_once() -> None:
    held = {"a": {"b": {"c": 1, "a.b.d": 2}, "e": 3}, "f": 4}
    prefixes = {"a.": "x.", "a.b.": ""}
    assert renamed("file", held, prefixes) == {"c": 1, "a.b.d": 2, "x.e": 3, "f": 4}


def test_a_function_may_leave_entries_out() -> None:
    held = {"keep.a": 1, "drop.a": 2}
    assert renamed("file", held, lambda name: name[5:] if name.startswith("keep.") else None) == {"a": 1}


def test_a_dict_in_itself_ends() -> None:
    held: dict[str, Any] = {"a": 1}
    held["self"] = held
    assert renamed("file", held, lambda name: name)["a"] == 1


MODEL, OPTIMIZER = torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1, requires_grad=True)])


@pytest.mark.parametrize(
    ("held", "rename", "targets", "expected"),
    [
        ({"m": {"module.a.b": 1}, "s": 2}, {"m.module.": "m."}, {"m": MODEL}, {"s": 2, "m": {"a.b": 1}}),
        ({"module.a.b": 1, "s": 2}, {"module.": "m."}, {"m": MODEL}, {"s": 2, "m": {"a.b": 1}}),
        ({"m": {"a": 1, "b": 2}}, {"m.a": "x"}, {"m": MODEL}, {"x": 1, "m": {"b": 2}}),
        ({"m": {"a": 1, "b": 2}}, {"m.a": "n.c"}, {"m": MODEL, "n": {"c": 0}}, {"n": {"c": 1}, "m": {"b": 2}}),
        (
            {"o": {"state": {"module.w": {"avg": 1}}, "param_groups": [2]}},
            {"o.state.module.": "o.state."},
            {"o": OPTIMIZER},
            {"o": {"state": {"w": {"avg": 1}}, "param_groups": [2]}},
        ),
        (
            {"old": {"state": {0: {"avg": 1}}, "param_groups": [2]}},
            {"old": "new"},
            {"new": OPTIMIZER},
            {"new": {"state": {0: {"avg": 1}}, "param_groups": [2]}},
        ),
        ({"a": {"0": 1, 0: 2}}, {"a": "b"}, {"b": {"0": 0, 0: 0}}, {"b": {"0": 1, 0: 2}}),
    ],
)
def test_what_has_a_new_name_lies_where_its_target_expects_it(
    held: dict[str, Any], rename: dict[str, str], targets: dict[str, object], expected: dict[str, Any]
) -> None:
    assert nested_for("file", held, rename, targets) == expected


def test_entries_in_which_no_name_changes_stay_what_they_are() -> None:
    held = {"kept": {"a": {0: 1}}, "left": {"b": 1}}
    found = nested_for("file", held, lambda name: None if name == "left.b" else name, {})
    assert found == {"kept": {"a": {0: 1}}}
    assert found["kept"] is held["kept"]


def test_a_loaded_file_has_the_new_names(tmp_path: Path) -> None:
    weights = {"module.a": torch.randn(3), "module.b": torch.randn(2)}
    expected = {"a": weights["module.a"], "b": weights["module.b"]}
    fp.save(weights, tmp_path / "model.pt")
    save_file(weights, tmp_path / "model.safetensors")
    fp.save({"state_dict": weights}, tmp_path / "nested.pt")
    assert_same(fp.load(tmp_path / "model.pt", rename={"module.": ""}), expected)
    assert_same(fp.load(tmp_path / "model.safetensors", rename={"module.": ""}), expected)
    assert_same(fp.load(tmp_path / "nested.pt", rename={"state_dict.module.": ""}), expected)
    assert_same(fp.load(tmp_path / "model.pt", mmap=True, rename={"module.": ""}), expected)
    with open(tmp_path / "model.pt", "rb") as file:
        assert_same(fp.load(file, rename={"module.": ""}), expected)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    fp.save({"a.x": torch.ones(1), "b.x": torch.zeros(1)}, tmp_path / "model.pt")
    with pytest.raises(fp.ConfigError, match=r"gives 'a\.x' and 'b\.x' of .*model\.pt one name: 'x'"):
        fp.load(tmp_path / "model.pt", rename={"a.": "", "b.": ""})


def test_a_new_name_is_a_text(tmp_path: Path) -> None:
    wrong: Any = lambda name: 3  # noqa: E731
    with pytest.raises(fp.ConfigError, match="returned 3 for 'a'"):
        renamed("file", {"a": 1}, wrong)


def test_a_text_is_no_way_to_rename(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(1)}, tmp_path / "file.pt")
    for wrong in ("model.", {1: "a"}):
        with pytest.raises(fp.ConfigError, match="a function of a name, or a dict of prefixes, not"):
            fp.load(tmp_path / "file.pt", rename=wrong)  # type: ignore[arg-type]


def test_what_has_no_names_is_refused(tmp_path: Path) -> None:
    fp.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(fp.ConfigError, match="holds a list"):
        fp.load(tmp_path / "list.pt", rename={"a": "b"})


# --- fp.load_into


@pytest.mark.parametrize("form", ["torch", "safetensors", "directory"])
def test_a_module_is_filled_from_the_state_of_its_wrapper(form: str, tmp_path: Path) -> None:
    source, target = network(1), network(2)
    state = {f"module.{name}": tensor for name, tensor in source.state_dict().items()}
    if form != "torch":
        del state["module.head.weight"]  # tied
    path = tmp_path / {"torch": "model.pt", "safetensors": "model.safetensors", "directory": "model.safetensors"}[form]
    fp.save(state, path)
    assert fp.load_into(tmp_path if form == "directory" else path, target, rename={"module.": ""}) == ([], [])
    assert_same(target.state_dict(), source.state_dict())


def test_a_part_of_a_nested_file_fills_a_module(tmp_path: Path) -> None:
    source, target = network(1), network(2)
    state = {f"model.{name}": tensor for name, tensor in source.state_dict().items()}
    fp.save({"state_dict": state, "optimizer": {"x": torch.ones(3)}, "epoch": 3}, tmp_path / "lightning.pt")
    found = fp.load_into(tmp_path / "lightning.pt", target, rename={"state_dict.model.": ""}, strict=False)
    assert found == ([], ["optimizer.x"])
    assert_same(target.state_dict(), source.state_dict())
    with pytest.raises(fp.ConfigError, match=r"optimizer\.x is in the file, but not in the target"):
        fp.load_into(tmp_path / "lightning.pt", target, rename={"state_dict.model.": ""})


def test_nested_targets_are_filled_by_new_names(tmp_path: Path) -> None:
    source = network(1)
    target = {"net": network(2), "ema": {"mean": torch.zeros(3)}, "list": [torch.zeros(2)]}
    fp.save({"old": source.state_dict(), "mean": torch.arange(3.0), "many": [torch.ones(2)]}, tmp_path / "all.pt")
    fp.load_into(tmp_path / "all.pt", target, rename={"old.": "net.", "mean": "ema.mean", "many": "list"})
    assert_same(target["net"].state_dict(), source.state_dict())  # type: ignore[union-attr]
    assert_same([target["ema"], target["list"]], [{"mean": torch.arange(3.0)}, [torch.ones(2)]])


def test_misfits_are_told_by_new_names_and_nothing_changes(tmp_path: Path) -> None:
    fp.save({"old.a": torch.ones(2), "old.c": torch.ones(1)}, tmp_path / "model.pt")
    target = {"a": torch.zeros(3), "b": torch.zeros(1)}
    before = portrait(target)
    with pytest.raises(fp.ConfigError) as caught:
        fp.load_into(tmp_path / "model.pt", target, rename={"old.": ""})
    assert "b is in the target, but not in the file" in str(caught.value)
    assert "a has shape (3,) in the target, (2,) in the file" in str(caught.value)
    assert "c is in the file, but not in the target" in str(caught.value)
    assert portrait(target) == before


class Extra(torch.nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_extra_state_is_found_by_its_new_name(tmp_path: Path) -> None:
    state = torch.nn.Sequential(Extra({"scale": torch.arange(3.0), "step": 4})).state_dict()
    fp.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "model.pt")
    target = torch.nn.Sequential(Extra("old"))
    fp.load_into(tmp_path / "model.pt", {"net": target}, rename={"module.": "net."})
    assert_same(target[0].state, {"scale": torch.arange(3.0), "step": 4})


def test_optimizers_are_not_renamed(tmp_path: Path) -> None:
    model = network(1)
    fp.save({"model": model.state_dict()}, tmp_path / "all.pt")
    with pytest.raises(fp.UnsupportedError, match="another call"):
        fp.load_into(tmp_path / "all.pt", {"o": torch.optim.SGD(model.parameters())}, rename={"a": "b"})
    with pytest.raises(fp.ConfigError, match="not with a list"):
        fp.load_into(tmp_path / "all.pt", [torch.ones(1)], rename={"a": "b"})


def test_regrouped_keeps_names_without_a_place_in_the_outermost_dict() -> None:
    target = {"net": torch.nn.Linear(1, 1), "x": {"y": torch.ones(1)}}
    flat = {"net.weight": 1, "net.more": 2, "x.y": 3, "x.z": 4, "other": 5}
    assert regrouped(flat, target) == {"net": {"weight": 1, "more": 2}, "x": {"y": 3}, "x.z": 4, "other": 5}
