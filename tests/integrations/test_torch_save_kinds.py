"""What a suite for torch.save and torch.load goes through with file objects, led through paths, where we do the work.

The kinds of objects are those that `specimens` lacks; and what loading must keep between objects: memory that they
share, and which of them are one.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sameness import assert_same
from support.torch_save_calls import STOCK_LOAD, STOCK_SAVE, is_ours
from torch import nn

import fastpersist as fp

KINDS: dict[str, Callable[[], Any]] = {}


def kind(make: Callable[[], Any]) -> Callable[[], Any]:
    KINDS[make.__name__] = make
    return make


@kind
def overlapping_views() -> Any:
    base = torch.arange(24.0)
    return [base[2:9], base[::5], base.view(4, 6).T, base.as_strided((5, 3), (1, 2), 1), base[24:]]


@kind
def expanded() -> Any:
    return [torch.ones(1, 3).expand(4, 3), torch.tensor(2.0).expand(2, 2), torch.arange(3).expand(0, 3)]


@kind
def storages_beside_tensors() -> Any:
    whole = torch.arange(16, dtype=torch.int32)
    return [whole, whole[4:8], whole.untyped_storage().clone(), whole.storage()._untyped_storage.clone()]


@kind
def storages_of_slices() -> Any:
    base = torch.arange(100, dtype=torch.uint8)
    return {"storage": base[10:20].untyped_storage(), "slice": base[10:20], "again": base[50:]}


@kind
def tensors_without_elements() -> Any:
    shared = torch.empty(0)
    return [shared, shared.view(0, 5), torch.empty(3, 0, 2, dtype=torch.int8), torch.empty(0, requires_grad=True)]


@kind
def gradients() -> Any:
    leaf = torch.ones(3, requires_grad=True)
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    (leaf * 2).sum().backward()
    return [leaf, leaf.grad, parameter, nn.Parameter(torch.ones(2)), leaf.detach()]


@kind
def complex_views() -> Any:
    value = torch.randn(4, 3, dtype=torch.complex64)
    return [value, value.conj(), value.mT.conj(), torch.view_as_real(value.clone()), value.clone().conj().imag]


@kind
def words_of_torch() -> Any:
    return [torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.strided, torch.per_channel_affine]


@kind
def containers() -> Any:
    tensor = torch.arange(3)
    named = OrderedDict(a=tensor, b={"c": (tensor, [tensor[1:]])})
    named.note = {"kept": tensor}  # type: ignore[attr-defined]
    return {1: named, (2, "x"): [named], None: {3.5, "y"}, b"bytes": bytearray(b"z")}


@kind
def packed_sequence() -> Any:
    return nn.utils.rnn.pack_sequence([torch.randn(4, 2), torch.randn(2, 2)])


@kind
def modules() -> Any:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.GRUCell(3, 2), nn.Embedding(5, 2, sparse=True))
    module.register_buffer("left_out", torch.ones(2), persistent=False)
    module.register_module("again", module[0])
    return module


@kind
def many_that_share_one_storage() -> Any:
    base = torch.arange(5000.0)
    return [base[index : index + 7] for index in range(0, 4990, 3)]


def saved_and_loaded(obj: Any, weights_only: bool) -> Any:
    """Go through stock torch and a file object."""
    file = io.BytesIO()
    STOCK_SAVE(obj, file)
    file.seek(0)
    return STOCK_LOAD(file, weights_only=weights_only)


NOT_BY_DEFAULT = {"words_of_torch", "containers", "packed_sequence", "modules"}
"""Those that torch.load does not take by default."""


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_a_path_ends_as_a_file_object_does(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    obj, weights_only, path = KINDS[name](), name not in NOT_BY_DEFAULT, tmp_path / "x.pt"
    expected = saved_and_loaded(obj, weights_only)
    with fp.installed():
        torch.save(obj, path)
        assert is_ours(path)
        assert_same(torch.load(path, weights_only=weights_only), expected)
    assert_same(STOCK_LOAD(path, weights_only=weights_only), expected)


def test_memory_that_was_shared_is_shared_again(tmp_path: Path) -> None:
    obj = overlapping_views()
    with fp.installed():
        torch.save([obj, obj, obj[0]], tmp_path / "x.pt")
        first, second, view = torch.load(tmp_path / "x.pt")
    assert first is second
    assert first[0] is view
    view.fill_(-1)
    expected = overlapping_views()
    expected[0].fill_(-1)
    assert_same(first, expected)


def test_a_zero_tensor_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    zeros = torch._efficientzerotensor(3)
    with fp.installed():
        torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
        with pytest.raises(RuntimeError, match=r"'b\[1\]' cannot be saved: a ZeroTensor"):
            torch.save({"a": torch.ones(3), "b": [0, zeros]}, tmp_path / "x.pt")
        with pytest.raises(RuntimeError):
            STOCK_SAVE(zeros, io.BytesIO())
        assert_same(torch.load(tmp_path / "x.pt"), {"a": torch.ones(2)})
