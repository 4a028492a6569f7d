"""Figures of tensors from their pieces, beside those of torch on the whole tensor."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import fastpersist as fp
from fastpersist.contents.statistics import Statistics, can_be_widened, iter_statistics
from fastpersist.contents.stored import open_contents


def statistics_of(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Statistics]:
    fp.save(tensors, path)
    with open_contents(str(path)) as contents:
        return {one.tensor.name: one for one in iter_statistics(list(contents.tensors.values()))}


REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.bool]


@pytest.mark.parametrize("dtype", [*REAL, *WHOLE], ids=str)
def test_figures_are_those_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (3, 1 << 19), generator=torch.Generator().manual_seed(2)).to(torch.float32)
    tensor = (values - 50 if dtype in REAL else values).to(dtype)
    one = statistics_of(tmp_path / "a.pt", {"w": tensor})["w"]
    exact = tensor.double()
    assert one.finite_count == tensor.numel()
    assert (one.min, one.max) == (exact.min(), exact.max())
    assert one.mean == pytest.approx(float(exact.mean()), rel=1e-9, abs=1e-9)
    assert one.norm == pytest.approx(float(exact.norm()), rel=1e-9)
    assert (one.nan_count, one.inf_count) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 3, 1023, 1024, 1029, 5000])
def test_any_bits_give_the_figures_of_torch(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    tensor = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    one = Statistics(None)  # type: ignore[arg-type]
    one.add(tensor)
    finite = tensor[tensor.isfinite()].double()
    assert (one.nan_count, one.inf_count) == (int(tensor.isnan().sum()), int(tensor.isinf().sum()))
    assert (one.finite_count, one.min, one.max) == (len(finite), finite.min(), finite.max())
    assert one._sum == pytest.approx(float(finite.sum()), rel=1e-9)
    assert one._squares == pytest.approx(float(finite.square().sum()), rel=1e-9)


def test_nan_and_infinities_are_counted_and_left_out(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, math.nan, math.inf, -math.inf, -3.0, math.nan])
    one = statistics_of(tmp_path / "a.pt", {"w": tensor})["w"]
    assert (one.nan_count, one.inf_count, one.finite_count) == (2, 2, 2)
    assert (one.min, one.max, one.mean, one.norm) == (-3.0, 1.0, -1.0, math.sqrt(10))


def test_a_sum_that_overflows_only_in_its_dtype_is_finite(tmp_path: Path) -> None:
    one = statistics_of(tmp_path / "a.pt", {"w": torch.full((8,), 65504.0, dtype=torch.float16)})["w"]
    assert (one.mean, one.inf_count) == (65504.0, 0)


def test_finite_doubles_whose_sum_overflows_are_not_called_infinite(tmp_path: Path) -> None:
    one = statistics_of(tmp_path / "a.pt", {"w": torch.full((8,), 1e308, dtype=torch.float64)})["w"]
    assert (one.inf_count, one.finite_count, one.max) == (0, 8, 1e308)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_complex_numbers_have_a_norm_only(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([3 + 4j, complex(math.nan, math.inf), complex(0, math.inf)], dtype=torch.complex64).to(dtype)
    one = statistics_of(tmp_path / "a.pt", {"w": tensor})["w"]
    assert (one.min, one.max, one.mean, one.norm) == (None, None, None, 5.0)
    assert (one.nan_count, one.inf_count, one.finite_count) == (1, 1, 1)


def test_whole_numbers_of_64_bits_are_exact(tmp_path: Path) -> None:
    tensor = torch.tensor([2**62 + 1, -(2**62) - 1])
    one = statistics_of(tmp_path / "a.pt", {"w": tensor})["w"]
    assert (one.min, one.max) == (-(2**62) - 1, 2**62 + 1)


@pytest.mark.parametrize("values", [[1, 2], [0, 2**64 - 1], [2**63 - 1, 2**63], [2**63 + 5]])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_unsigned_numbers_of_64_bits_are_exact(values: list[int], shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.tensor([value - (value >> 63 << 64) for value in values]).view(torch.uint64).view(shape)
    one = statistics_of(tmp_path / "a.pt", {"w": tensor})["w"]
    assert (one.min, one.max) == (min(values), max(values))
    assert one.mean == pytest.approx(sum(values) / len(values))


def test_each_tensor_has_figures_even_without_elements(tmp_path: Path) -> None:
    tensors = {"first": torch.empty(0), "w": torch.ones(2), "middle": torch.empty(0, 3), "last": torch.empty(0)}
    found = statistics_of(tmp_path / "a.pt", tensors)
    assert list(found) == list(tensors)
    assert (found["middle"].min, found["middle"].norm) == (None, 0.0)
    assert found["w"].norm == math.sqrt(2)


def test_what_torch_cannot_calculate_with() -> None:
    assert can_be_widened(torch.float8_e4m3fn)
    assert can_be_widened(torch.bool)
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert not can_be_widened(torch.float4_e2m1fn_x2)


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(5 << 20)}, tmp_path / "a.pt")
    read: list[int] = []
    with open_contents(str(tmp_path / "a.pt")) as contents:
        list(iter_statistics(list(contents.tensors.values()), on_read=read.append))
    assert sum(read) == 20 << 20
    assert len(read) > 4
