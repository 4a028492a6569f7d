"""Hypothesis strategies: nested objects with tensors of any dtype, shape, stride and offset that share storages."""

from __future__ import annotations

import collections
import math
from typing import Any

import torch
from hypothesis import strategies as st
from support.specimens import DTYPES

# Quantized dtypes need a quantizer; specimens.py has them.
PLAIN_DTYPES = [dtype for dtype in DTYPES if "q" not in str(dtype) and "bits" not in str(dtype)]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=20)
    | st.binary(min_size=1, max_size=20)  # torch.load(weights_only=True) refuses b""
)
keys = st.text(max_size=8) | st.integers() | st.booleans() | st.floats(allow_nan=False) | st.none()


@st.composite
def storages(draw: st.DrawFn) -> tuple[torch.UntypedStorage, torch.dtype]:
    """A storage and the one dtype under which it may be seen: torch refuses to save two."""
    dtype = draw(st.sampled_from(PLAIN_DTYPES))
    count = draw(st.integers(0, 40) | st.sampled_from([1024, 5000]))
    seed = draw(st.integers(0, 250))
    data = ((torch.arange(count * dtype.itemsize) * 31 + seed) % 251).to(torch.uint8)
    if dtype == torch.bool:
        data %= 2  # any other byte is undefined behaviour
    return data.untyped_storage(), dtype


@st.composite
def views(draw: st.DrawFn, storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """A tensor somewhere in a storage: any stride that stays inside, broadcast and overlapping ones included."""
    count = storage.nbytes() // dtype.itemsize
    offset = draw(st.integers(0, count))
    room = count - offset  # elements from the first one on
    shape: list[int] = []
    stride: list[int] = []
    last = 0
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.integers(0, max(1, room)))
        most = (room - 1 - last) // step + 1 if step and room else 3
        size = draw(st.integers(0, max(0, min(most, 7))))
        shape.append(size)
        stride.append(step)
        last += max(size - 1, 0) * step
    if room == 0 and 0 not in shape:
        shape, stride = [0], [1]
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    if dtype in (torch.complex64, torch.complex128) and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype.is_floating_point and dtype.itemsize > 1 and draw(st.booleans()):
        tensor.requires_grad_()
        if draw(st.booleans()) and math.prod(shape):
            tensor = torch.nn.Parameter(tensor.detach(), requires_grad=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0:
        tensor.note = draw(scalars)
    return tensor


@st.composite
def nested_objects(draw: st.DrawFn) -> Any:
    """Containers of containers of values and tensors; tensors share storages, containers occur twice."""
    # By index: hypothesis prints what it may choose from, and torch cannot print a tensor of every dtype.
    pool = draw(st.lists(storages(), min_size=1, max_size=5))
    tensors = st.integers(0, len(pool) - 1).flatmap(lambda index: views(*pool[index]))
    shared: list[Any] = draw(st.lists(tensors, min_size=1, max_size=3))
    leaves = scalars | tensors | st.integers(0, len(shared) - 1).map(lambda index: shared[index])

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
            | st.dictionaries(st.text(max_size=4), inner, max_size=4).map(collections.OrderedDict)
            | inner.map(lambda value: [value, value])
        )

    return draw(st.recursive(leaves, containers, max_leaves=20))
