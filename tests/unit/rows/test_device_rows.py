"""Rows of every dtype are indexed as words; tests/gpu/test_gpu_rows.py has what needs a device."""

from __future__ import annotations

import pytest
import torch

from fastpersist.rows.device_rows import rows_at

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (16,)])
def test_rows_are_those_of_the_indices(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers, indices = torch.randint(0, 2, (50, *shape)), torch.randint(50, (4, 6))
    rows = numbers.to(dtype)
    found = rows_at(rows, indices)
    assert (found.dtype, found.shape) == (dtype, (4, 6, *shape))
    assert torch.equal(found.reshape(-1).view(torch.uint8), numbers[indices].to(dtype).reshape(-1).view(torch.uint8))


def test_no_indices_give_no_rows() -> None:
    assert rows_at(torch.ones(5, 3), torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 3)
    assert rows_at(torch.empty(0, 3), torch.empty(0, dtype=torch.int64)).shape == (0, 3)
