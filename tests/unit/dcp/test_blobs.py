"""Head, bytes and tail of a planned blob are what torch.save could have written: stock tools read them."""

from __future__ import annotations

import io
import math
import zipfile
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastpersist.dcp.blobs import BLOCK_BYTES, SMALL_ALIGNMENT, is_plain, plain_blob

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int64]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def whole_blob(tensor: torch.Tensor) -> bytes:
    blob, payload = plain_blob(tensor.dtype, tuple(tensor.shape)), bytes_of(tensor)
    data = blob.head + payload + blob.tail_with(zlib.crc32(payload))
    assert len(data) == blob.size_bytes
    assert (len(payload), len(data) - len(blob.head) - len(payload)) == (blob.payload_bytes, blob.tail_bytes)
    return data


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=4))
def test_stock_tools_read_a_blob_of_any_dtype_and_shape(dtype: torch.dtype, shape: list[int]) -> None:
    tensor = (torch.arange(math.prod(shape)) % 7).to(dtype).reshape(shape)
    data = whole_blob(tensor)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert found.untyped_storage().nbytes() == tensor.nbytes


def test_a_wrong_checksum_is_found() -> None:
    tensor = torch.arange(100)
    blob = plain_blob(tensor.dtype, (100,))
    data = blob.head + bytes_of(tensor) + blob.tail_with(zlib.crc32(bytes_of(tensor)) ^ 1)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() == "archive/data/0"


@pytest.mark.parametrize(
    ("size_bytes", "alignment"), [(0, SMALL_ALIGNMENT), ((64 << 10) - 1, SMALL_ALIGNMENT), (64 << 10, BLOCK_BYTES)]
)
def test_a_tensor_lies_on_a_block_where_that_costs_little(size_bytes: int, alignment: int) -> None:
    blob = plain_blob(torch.uint8, (size_bytes,))
    assert blob.alignment == alignment
    assert len(blob.head) % alignment == 0


def test_a_tensor_larger_than_memory_is_planned_without_memory() -> None:
    blob = plain_blob(torch.float64, (1 << 20, 1 << 20))
    assert blob.payload_bytes == 1 << 43
    assert len(blob.head) + blob.tail_bytes < 2 * BLOCK_BYTES


def test_only_tensors_that_are_nothing_but_their_elements_are_plain() -> None:
    class Tagged(torch.Tensor):
        pass

    assert is_plain(torch.ones(3))
    assert is_plain(torch.nn.Parameter(torch.ones(3, 4).t()))
    for other in (torch.eye(3).to_sparse(), torch.ones(3).as_subclass(Tagged), torch.ones(3, device="meta")):
        assert not is_plain(other)
