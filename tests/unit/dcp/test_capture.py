"""What a state is nested in, and how its tensors overlap, is no reason for a capture of shards to fail."""

from __future__ import annotations

import collections
import itertools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp


class Names(list[Any]):
    pass


def portable(value: Any) -> Any:
    """Return a value with plain containers, for comparison."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: portable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [portable(inner) for inner in value]
    return value


def saved_and_loaded(path: Path, state: dict[str, Any]) -> Any:
    with fp.Checkpointer(path, sharded=True) as checkpointer:
        checkpointer.save(1, state).result(30)
        return checkpointer.load(1)


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "defaultdict": lambda tensor: collections.defaultdict(dict, {"inner": {"w": tensor}}),
    "UserDict": lambda tensor: collections.UserDict({"w": tensor, "note": "text"}),
    "mappingproxy": lambda tensor: types.MappingProxyType({"w": tensor}),
    "list of a kind of its own": lambda tensor: Names([tensor, {"w": tensor * 2}]),
    "tuple in a list": lambda tensor: [(tensor, 3), {"size": torch.Size([1, 2])}],
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_are_found_in_containers_of_any_kind(tmp_path: Path, kind: str) -> None:
    held = CONTAINERS[kind](torch.arange(300.0))
    assert portable(saved_and_loaded(tmp_path, {"held": held})) == {"held": portable(held)}


def test_tensors_in_a_tuple_are_those_of_the_save(tmp_path: Path) -> None:
    """DCP pickles tuples, on the writing thread."""
    tensor = torch.arange(300.0)
    with fp.Checkpointer(tmp_path, sharded=True) as checkpointer:
        pending = checkpointer.save(1, {"pair": (tensor, 7)})
        tensor.zero_()
        pending.result(30)
        assert portable(checkpointer.load(1)) == {"pair": [torch.arange(300.0).tolist(), 7]}


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, sharded=True) as checkpointer:
        with pytest.raises(fp.UnsupportedError, match=r"'run\.log', a TextIOWrapper, cannot be copied"):
            with open(__file__) as file:
                checkpointer.save(1, {"run": {"log": file}}).result(30)


@pytest.mark.parametrize("order", [*itertools.permutations(["flat", "head", "head of head", "tail"])])
def test_views_may_come_in_any_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    flat = torch.arange(1000.0)
    views = {"flat": flat, "head": flat[:10], "head of head": flat[:4], "tail": flat[500:]}
    state = {name: views[name] for name in order}
    assert portable(saved_and_loaded(tmp_path, state)) == portable(state)
