"""Two sources compared: structure, values, bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import fastpersist as fp
from fastpersist.contents.comparison import Comparison, TensorDifference, compare
from fastpersist.contents.stored import open_contents


def compared(tmp_path: Path, a: Any, b: Any, *patterns: str) -> Comparison:
    torch.save(a, tmp_path / "a.pt")
    fp.save(b, tmp_path / "b.pt")
    with open_contents(str(tmp_path / "a.pt")) as ours, open_contents(str(tmp_path / "b.pt")) as theirs:
        return compare(ours, theirs, patterns)


def test_equal_states_in_two_formats(tmp_path: Path) -> None:
    state = {f"w{n}": torch.randn(n * 1000, 7) for n in range(300)}
    save_file(state, tmp_path / "a.safetensors")
    fp.save(state, tmp_path / "b.pt")
    with open_contents(str(tmp_path / "a.safetensors")) as ours, open_contents(str(tmp_path / "b.pt")) as theirs:
        found = compare(ours, theirs)
    assert not found.differs
    assert found.equal_count == 300
    assert found.compared_bytes == sum(tensor.nbytes for tensor in state.values())


def test_structure_comes_first(tmp_path: Path) -> None:
    shared = torch.ones(3)
    a = {"both": shared, "a": shared, "dtype": torch.ones(2), "shape": torch.ones(6), "step": 1, "gone": "x"}
    b = {"both": shared, "b": shared, "dtype": torch.ones(2, dtype=torch.float16), "shape": torch.ones(2, 3), "step": 2}
    found = compared(tmp_path, a, b)
    assert (found.only_in_a, found.only_in_b) == (["a"], ["b"])
    assert found.described == {
        "dtype": ("float32 [2]", "float16 [2]"),
        "shape": ("float32 [6]", "float32 [2, 3]"),
    }
    assert found.values == {"step": ("1", "2"), "gone": ("'x'", None)}
    assert (found.equal_count, found.tensors) == (1, [])


def test_the_last_element_of_a_large_tensor(tmp_path: Path) -> None:
    a = {"first": torch.zeros(5), "w": torch.ones(3 << 20), "last": torch.zeros(5)}
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["w"][-1] = 1.5
    found = compared(tmp_path, a, b)
    (one,) = found.tensors
    assert (one.name, one.differing_count, one.max_abs) == ("w", 1, 0.5)
    assert one.max_rel == pytest.approx(1 / 3)
    assert found.equal_count == 2
    assert found.differs


def test_nan_infinities_and_zeros(tmp_path: Path) -> None:
    a = torch.tensor([math.nan, 1.0, math.inf, 0.0, 2.0, math.nan])
    b = torch.tensor([math.nan, math.nan, 5.0, -0.0, 3.0, 7.0])
    (one,) = compared(tmp_path, {"w": a}, {"w": b}).tensors
    assert one.differing_count == 5, "the first NaN has equal bits"
    assert (one.nan_counts, one.inf_counts) == ((1, 1), (1, 0))
    assert (one.max_abs, one.max_rel) == (1.0, pytest.approx(1 / 3))


DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
    *(torch.complex64, torch.complex128, torch.complex32),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    a, b = (torch.tensor(values).to(dtype) for values in ([0.0, 1.0, 1.0], [0.0, 1.0, 0.0]))
    (one,) = compared(tmp_path, {"w": a}, {"w": b}).tensors
    assert (one.differing_count, one.max_abs, one.max_rel) == (1, 1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32], ids=str)
@pytest.mark.parametrize("others", [(1.0, 1.0), (math.inf, 1.0)])
def test_subnormal_numbers_differ_relative_to_the_smallest_normal_one(
    dtype: torch.dtype, others: tuple[float, float]
) -> None:
    difference = TensorDifference("w", dtype, (2,))
    difference.add(*(torch.tensor([x, other], dtype=dtype) for x, other in zip((1e-39, -1e-39), others, strict=True)))
    assert difference.max_rel == pytest.approx(2e-39 / torch.finfo(dtype).tiny)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SPECIAL = [
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    1.0,
    -1.5,
    1e-5,
    6e-8,
    1e-39,
    5e-324,
    65504.0,
    3.4e38,
    1e308,
]


@st.composite
def pairs_of_floats(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two arrays of any bits, or of special values, with some elements the same."""
    dtype = draw(st.sampled_from(FLOATS))
    count = draw(st.sampled_from([1, 7, 8, 63, 1024, 1025, 2100]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 40)))

    def values() -> torch.Tensor:
        kind = draw(st.sampled_from(["bits", "normal", "special"]))
        if kind == "bits":
            return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
        if kind == "normal":
            return torch.randn(count, generator=generator).to(dtype)
        picked = torch.randint(0, len(SPECIAL), (count,), generator=generator)
        return torch.tensor(SPECIAL, dtype=torch.float64)[picked].to(dtype)

    a, b = values(), values()
    same = torch.rand(count, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return a, torch.where(same, a, b)


@given(pairs_of_floats())
def test_the_native_pass_finds_what_torch_does(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b = pair
    native, by_torch = (TensorDifference("w", a.dtype, tuple(a.shape)) for _ in range(2))
    native.add(a, b)
    by_torch._add_others(a, b)
    assert native.differing_count == by_torch.differing_count
    assert (native.nan_counts, native.inf_counts) == (by_torch.nan_counts, by_torch.inf_counts)
    finite = a.isfinite() & b.isfinite()
    if a.dtype is torch.float64 and not bool((a - b)[finite].isfinite().all()):
        half_a, half_b = a[finite] / 2, b[finite] / 2  # torch has no number for the whole difference
        scale = torch.maximum(half_a.abs(), half_b.abs()).clamp(min=torch.finfo(a.dtype).tiny / 2)
        assert native.max_abs == torch.finfo(a.dtype).max
        assert native.max_rel == pytest.approx(float(((half_a - half_b).abs() / scale).max()), rel=1e-6, abs=0)
        return
    # torch takes differences in double where one of its parts has something that is not finite.
    assert native.max_abs == pytest.approx(by_torch.max_abs, rel=1e-6, abs=0)
    assert native.max_rel == pytest.approx(by_torch.max_rel, rel=1e-6, abs=1e-44)


def test_strides_do_not_count(tmp_path: Path) -> None:
    matrix = torch.arange(600_000.0).reshape(600, 1000)
    found = compared(tmp_path, {"w": matrix}, {"w": matrix.t().contiguous().t()})
    assert not found.differs
    assert found.equal_count == 1


def test_patterns_choose_tensors_and_values(tmp_path: Path) -> None:
    a = {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}, "step": 1}
    b = {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.zeros(2)}, "step": 2}
    assert not compared(tmp_path, a, b, "model.*").differs
    assert compared(tmp_path, a, b, "optimizer.*").differs
    assert compared(tmp_path, a, b, "step").values == {"step": ("1", "2")}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    def state(scale: float) -> dict[str, torch.Tensor]:
        return {"q": torch.quantize_per_tensor(torch.ones(2), scale, 1, torch.qint8), "w": torch.ones(2)}

    found = compared(tmp_path, state(0.5), state(0.25))
    assert list(found.undecided) == ["q"]
    assert not found.differs


def test_two_files_with_no_tensor(tmp_path: Path) -> None:
    assert not compared(tmp_path, {"step": 1}, {"step": 1}).differs
    assert compared(tmp_path, {"step": 1}, {"step": 1.5}).values == {"step": ("1", "1.5")}


def test_metadata_are_compared_where_both_have_some(tmp_path: Path) -> None:
    for name, metadata in (("a", {"author": "me"}), ("b", {"author": "you", "format": "pt"}), ("c", None)):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors", metadata=metadata)
    with open_contents(str(tmp_path / "a.safetensors")) as a, open_contents(str(tmp_path / "b.safetensors")) as b:
        assert compare(a, b).values == {"metadata[author]": ("me", "you"), "metadata[format]": (None, "pt")}
    with open_contents(str(tmp_path / "a.safetensors")) as a, open_contents(str(tmp_path / "c.safetensors")) as c:
        assert not compare(a, c).differs
