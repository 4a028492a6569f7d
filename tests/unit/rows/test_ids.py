"""Ids as callers give them: every dtype and shape of whole numbers is taken, what is no row is named by its place."""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fastpersist.errors import ConfigError, RowIndexError
from fastpersist.rows.ids import checked_ids

ROW_COUNT = 100
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that they are a prototype
    NESTED = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])])


def find_bad(address: int, count: int) -> int:
    ids = (ctypes.c_int64 * count).from_address(address)
    return next((place for place, number in enumerate(ids) if not 0 <= number < ROW_COUNT), count)


def checked(ids: Any) -> tuple[list[int], tuple[int, ...]]:
    flat, shape = checked_ids(ids, find_bad, ROW_COUNT, "table.npy")
    assert flat.dtype == torch.int64
    assert flat.dim() == 1
    assert flat.is_contiguous()
    return flat.tolist(), tuple(shape)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
)
def test_every_dtype_of_whole_numbers_is_taken(dtype: torch.dtype) -> None:
    assert checked(torch.tensor([3, 99, 0]).to(dtype)) == ([3, 99, 0], (3,))


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_every_array_of_whole_numbers_is_taken(dtype: str) -> None:
    assert checked(np.array([[3, 99, 0], [1, 2, 3]], dtype)) == ([3, 99, 0, 1, 2, 3], (2, 3))


def test_one_number_is_a_scalar() -> None:
    for one in (7, np.int64(7), np.array(7), torch.tensor(7), torch.tensor(7, dtype=torch.uint16)):
        assert checked(one) == ([7], ())


def test_lists_and_ranges_are_taken() -> None:
    assert checked([1, 2, 3]) == ([1, 2, 3], (3,))
    assert checked((1, 2)) == ([1, 2], (2,))
    assert checked(range(3)) == ([0, 1, 2], (3,))
    assert checked([[1], [2]]) == ([1, 2], (2, 1))


@pytest.mark.parametrize(
    ("empty", "shape"),
    [([], (0,)), ([[], []], (2, 0)), (np.empty((0, 3)), (0, 3)), (torch.empty(4, 0, 2, dtype=torch.int32), (4, 0, 2))],
)
def test_nothing_has_its_shape(empty: Any, shape: tuple[int, ...]) -> None:
    assert checked(empty) == ([], shape)


def test_strides_are_followed() -> None:
    ids = torch.arange(24).view(4, 6)
    assert checked(ids.t()) == (ids.t().reshape(-1).tolist(), (6, 4))
    assert checked(ids[::2, 1::3]) == ([1, 4, 13, 16], (2, 2))
    assert checked(torch.tensor([5]).expand(3)) == ([5, 5, 5], (3,))
    assert checked(np.arange(24).reshape(4, 6).T[1:3])[1] == (2, 4)


def test_an_array_that_cannot_be_written_is_taken_without_a_warning() -> None:
    ids = np.arange(5)
    ids.flags.writeable = False
    assert checked(ids) == ([0, 1, 2, 3, 4], (5,))


@pytest.mark.parametrize(
    "ids",
    [
        [1.0, 2.0],
        3.5,
        [True, False],
        torch.tensor([True]),
        np.array([1.0], "f4"),
        torch.tensor([1j]),
        torch.ones(2, dtype=torch.bfloat16),
        "abc",
        ["a"],
        None,
        [[1, 2], [3]],
        [1 << 70],
        object(),
        {"a": 1},
        np.array([object()]),
        torch.ones(2, dtype=torch.int64, device="meta"),
        torch.tensor([3, 4]).to_sparse(),
        NESTED,
    ],
    ids=lambda value: type(value).__name__,  # the repr of an object has its address
)
def test_what_is_no_whole_number_is_refused(ids: Any) -> None:
    with pytest.raises(ConfigError, match="ids are whole numbers"):
        checked(ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (100, "ids is 100; table.npy has 100 rows"),
        (-1, "ids is -1; table.npy has 100 rows"),
        ([1, 2, 5000], r"ids\[2\] is 5000; table.npy has 100 rows"),
        (torch.tensor([[1, 2], [3, -4]]), r"ids\[1, 1\] is -4; "),
        (np.full((2, 3, 4), 100), r"ids\[0, 0, 0\] is 100; "),
        (torch.tensor([1, 255], dtype=torch.uint8), r"ids\[1\] is 255; "),
        (torch.tensor([[1, 7], [500, 3]]).t(), r"ids\[0, 1\] is 500; "),
        (np.array([1, (1 << 64) - 1], "u8"), rf"ids\[1\] is {(1 << 64) - 1}; "),
        ([1, -(1 << 63)], rf"ids\[1\] is -{1 << 63}; "),
    ],
)
def test_the_first_id_that_is_no_row_is_named(ids: Any, message: str) -> None:
    with pytest.raises(RowIndexError, match=f"^{message}"):
        checked(ids)
    with pytest.raises(IndexError):
        checked(ids)


def test_no_ids_need_no_check() -> None:
    calls: list[int] = []

    def find(_address: int, count: int) -> int:
        calls.append(count)
        return count

    checked_ids([1, 2], find, 3, "t")
    checked_ids([], find, 3, "t")
    assert calls == [2]


def test_arrays_may_lie_backwards_or_have_the_other_byte_order() -> None:
    assert checked(np.arange(5)[::-1]) == ([4, 3, 2, 1, 0], (5,))
    assert checked(np.array([[3, 99]], ">i8")) == ([3, 99], (1, 2))
    assert checked(np.arange(12, dtype=">u2").reshape(3, 4)[:, ::2]) == ([0, 2, 4, 6, 8, 10], (3, 2))


def test_an_array_that_torch_takes_is_not_copied() -> None:
    ids = np.array([3, 99, 0])
    flat, _ = checked_ids(ids, find_bad, ROW_COUNT, "table.npy")
    assert flat.data_ptr() == ids.__array_interface__["data"][0]


@pytest.mark.parametrize("transform", [torch.func.functionalize, torch.func.vmap])
def test_ids_of_transforms_are_refused(transform: Any) -> None:
    for ids in (torch.tensor([1, 2]), torch.tensor([[1, 2]], dtype=torch.int32)):
        with pytest.raises(ConfigError, match=r"torch\.func"):
            transform(checked)(ids)
