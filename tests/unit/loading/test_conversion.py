"""dtype= of fp.load: floating-point tensors are converted, all else stays, and what was one tensor stays one."""

from __future__ import annotations

import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.sameness import assert_same

import fastpersist as fp
from fastpersist.loading.conversion import converted, require_floating

pytestmark = pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")

Pair = namedtuple("Pair", ["one", "other"])


def test_floating_point_tensors_are_converted_and_all_else_stays() -> None:
    held = {
        "float": torch.randn(3, 4),
        "double": [torch.randn(2, dtype=torch.float64)],
        "same": torch.randn(2).bfloat16(),
        "int": torch.arange(3),
        "bool": torch.tensor([True]),
        "complex": torch.randn(2, dtype=torch.complex64),
        "quantized": torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
        "number": 1.5,
        "none": None,
    }
    before = dict(held)
    found = converted(held, torch.bfloat16)
    assert found is held
    assert_same(found["float"], before["float"].bfloat16())  # type: ignore[attr-defined]
    assert found["double"][0].dtype == torch.bfloat16
    for name in ("same", "int", "bool", "complex", "quantized", "number", "none"):
        assert found[name] is before[name]


def test_what_is_one_tensor_stays_one() -> None:
    weight = torch.randn(4)
    view = weight[:]
    found = converted({"a": weight, "b": weight, "view": view, "part": weight[:2], "in": (weight, [view])}, torch.half)
    assert found["a"] is found["b"] is found["view"] is found["in"][0] is found["in"][1][0]
    assert_same(found["part"], weight[:2].half())


def test_parameters_and_their_flags_stay() -> None:
    frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    found = converted([torch.nn.Parameter(torch.randn(2)), frozen, torch.randn(2, requires_grad=True)], torch.float64)
    assert [type(one) for one in found] == [torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]
    assert [one.requires_grad for one in found] == [True, False, True]
    assert all(one.is_leaf and one.dtype == torch.float64 for one in found)


def test_tuples_are_made_anew_only_where_something_changed() -> None:
    plain, pair = (1, torch.arange(2)), Pair(torch.ones(1), 2)
    found = converted([plain, pair, pair], torch.half)
    assert found[0] is plain
    assert type(found[1]) is Pair
    assert found[1] is found[2]
    assert found[1].one.dtype == torch.half


def test_a_list_in_itself_ends() -> None:
    held: list[Any] = [torch.ones(1)]
    held.append(held)
    assert converted(held, torch.half)[1] is held


def test_each_old_tensor_is_freed_before_the_next_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [torch.ones(1000) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in held]
    counts = []

    class Watched(list[torch.Tensor]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            counts.append(sum(one() is not None for one in alive))

    watched = Watched(held)
    del held
    converted(watched, torch.half)
    assert counts == [2, 1, 0]


@pytest.mark.parametrize("form", ["pt", "safetensors", "mapped"])
def test_a_file_is_loaded_in_another_dtype(form: str, tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 4), "n": torch.arange(5)}
    path = tmp_path / ("model.safetensors" if form == "safetensors" else "model.pt")
    if form == "safetensors":
        save_file(weights, path)
    else:
        fp.save(weights, path)
    found = fp.load(path, dtype=torch.bfloat16, mmap=form == "mapped")
    assert_same({name: found[name] for name in weights}, {"a": weights["a"].bfloat16(), "n": weights["n"]})


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "bfloat16"], ids=str)
def test_other_dtypes_are_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match="floating-point dtype"):
        require_floating(dtype)
    with pytest.raises(fp.ConfigError, match="floating-point dtype"):
        fp.load(tmp_path / "nothing", dtype=dtype)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
def test_a_dtype_that_torch_does_not_convert_is_refused(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(fp.ConfigError, match=r"dtype=torch.float4_e2m1fn_x2 is not possible"):
        fp.load(tmp_path / "a.pt", dtype=torch.float4_e2m1fn_x2)
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"a": torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
        with pytest.raises(fp.ConfigError, match=r"cannot convert torch.float4_e2m1fn_x2"):
            checkpoints.load(1, dtype=torch.float32)
