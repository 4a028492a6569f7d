"""What a load with weights_only=True would refuse is told when it is saved: once, with all that loading needs."""

from __future__ import annotations

import argparse
import collections
import enum
import importlib
import pathlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.torch_release import TORCH

import fastpersist as fp
from fastpersist.integrations import torch_save


class Kind(enum.Enum):
    SMALL = 1


class Counted:
    """Counts how often it is pickled."""

    def __init__(self) -> None:
        self.count = 0

    def __getstate__(self) -> dict[str, int]:
        self.count += 1
        return {"count": self.count}


class Once:
    """Can be pickled once, as a handle that is handed over."""

    def __init__(self) -> None:
        self.is_there = True

    def __reduce__(self) -> tuple[type, tuple[()]]:
        if not self.is_there:
            raise RuntimeError("handed over already")
        self.is_there = False
        return Once, ()


def save_step(state: Any, path: Path) -> None:
    with fp.Checkpointer(path.parent / "run") as checkpoints:
        checkpoints.save(1, state)


SAVES: dict[str, Callable[[Any, Path], object]] = {
    "save": fp.save,
    "save_async": lambda state, path: fp.save_async(state, path).result(),
    "Checkpointer": save_step,
}

STATES: dict[str, Any] = {
    "namespace": {"model": torch.ones(3), "args": argparse.Namespace(lr=0.1, path=pathlib.Path("run"))},
    "number": {"loss": np.float64(0.5)},
    "arrays": {"rng": {"keys": np.arange(3, dtype=np.uint32), "position": np.int64(1)}, "kind": Kind.SMALL},
    "whole": [torch.ones(2), argparse.Namespace(a=1)],
    "built in": {"kinds": frozenset([1]), "numbers": range(3)},
    "module": torch.nn.Linear(2, 2),
}


@pytest.mark.parametrize("kind", STATES)
def test_one_warning_names_all_that_loading_needs(kind: str, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="weights_only=True") as caught:
        fp.save(STATES[kind], tmp_path / "state.pt")
    (warning,) = caught
    assert warning.filename == __file__
    found = re.search(r"(?:import (\S.*); )?torch\.serialization\.add_safe_globals\(\[(.*)\]\)", str(warning.message))
    assert found is not None, str(warning.message)
    names = [name if "." in name else f"builtins.{name}" for name in found[2].split(", ")]
    imported = set(found[1].split(", ")) if found[1] else set()
    assert imported == {name.rpartition(".")[0] for name in names} - {"builtins"}
    allowed = [getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    with torch.serialization.safe_globals(allowed):
        torch.load(tmp_path / "state.pt", weights_only=True)
    for left_out in allowed:
        with torch.serialization.safe_globals([one for one in allowed if one is not left_out]):
            with pytest.raises(Exception, match="Weights only load failed"):
                torch.load(tmp_path / "state.pt", weights_only=True)


def test_the_keys_are_named(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning) as caught:
        fp.save({"model": torch.ones(1), "a": argparse.Namespace(), "b": [Kind.SMALL]}, tmp_path / "state.pt")
    assert f"key 'a' needs argparse.Namespace; key 'b' needs {__name__}.Kind" in str(caught[0].message)


@pytest.mark.filterwarnings("ignore:torch.load, fp.load")
@pytest.mark.parametrize("way", SAVES)
def test_code_of_the_object_runs_once(way: str, tmp_path: Path) -> None:
    counted = Counted()
    SAVES[way]({"counted": counted, "once": Once(), "w": torch.ones(1)}, tmp_path / "state.pt")
    assert counted.count == 1


@pytest.mark.parametrize(
    "value",
    [
        collections.deque([1]),
        pytest.param(
            collections.defaultdict(list, {1: [2]}),
            marks=pytest.mark.skipif(TORCH < (2, 10), reason="this torch lets it through if it is on the list"),
        ),
    ],
    ids=repr,
)
def test_what_no_list_lets_through_is_not_promised(value: Any, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"no list of safe globals lets collections\.\w+ through") as caught:
        fp.save({"counts": value}, tmp_path / "state.pt")
    assert "add_safe_globals" not in str(caught[0].message)
    with torch.serialization.safe_globals([type(value), list]), pytest.raises(Exception, match="Weights only load"):
        torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize(
    "state",
    [
        {"model": torch.nn.Linear(2, 2).state_dict(), "step": 3, "rng": torch.get_rng_state(), "size": torch.Size([1])},
        {"text": "ccollections\ndeque\n", "names": collections.OrderedDict(a={1}), "count": collections.Counter("ab")},
        [None, 1.5, b"bytes", (1, 2), torch.float32, torch.nn.Parameter(torch.ones(1))],
    ],
    ids=["state", "text like a global", "list"],
)
def test_what_loads_is_not_warned_of(state: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp.save(state, tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


def test_what_is_allowed_already_is_not_warned_of_and_safetensors_need_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.serialization.safe_globals([argparse.Namespace]):
            fp.save({"args": argparse.Namespace()}, tmp_path / "state.pt")
        fp.save({"w": torch.ones(2)}, tmp_path / "state.safetensors")


@pytest.mark.parametrize("has_compiled", [False, True])
def test_who_typed_torch_save_is_not_warned(has_compiled: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings(), torch_save.installed():
        if has_compiled:  # frames of the compiler lie between ours from now on
            torch.compile(lambda: fp.save({}, tmp_path / "empty.pt"), backend="eager")()
        warnings.simplefilter("error")
        torch.save({"args": argparse.Namespace()}, tmp_path / "state.pt")
