"""Copies views of mostly foreign storages before a save, such as a layer's part of a flat buffer.

A torch file holds whole storages, however small the saved views are. DeepSpeed therefore copies every tensor that
pipelines and experts save. This module copies only wasteful views; all other tensors are written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["without_waste"]

_WASTE_BYTES_MAX = 1 << 20
_WASTE_SHARE_MAX = 1 / 8


def without_waste(state: Any) -> tuple[Any, list[torch.Tensor]]:
    """Copy the tensors whose storages mostly hold other tensors.

    Args:
        state: Nested dicts, lists and tuples.

    Returns:
        The state with copies in host memory for such tensors; and these copies, which no other code holds.
    """
    seen: dict[int, dict[tuple[Any, ...], int]] = {}  # bytes of the different views, by storage
    sizes: dict[int, int] = {}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            place = tensor.storage_offset() * tensor.element_size(), tensor.shape, tensor.stride()
            seen.setdefault(storage._cdata, {})[place] = tensor.nbytes
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    _mapped(state, look)
    wasteful = {key for key, size_bytes in sizes.items() if _is_waste(size_bytes - sum(seen[key].values()), size_bytes)}
    if not wasteful:
        return state, []
    copies: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []  # so that no other tensor gets its id

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_plain(tensor) or tensor.untyped_storage()._cdata not in wasteful:
            return tensor
        if id(tensor) not in copies:
            kept.append(tensor)
            copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return copies[id(tensor)]

    return _mapped(state, copy), list(copies.values())


def _is_waste(spare_bytes: int, size_bytes: int) -> bool:
    return spare_bytes > max(_WASTE_BYTES_MAX, _WASTE_SHARE_MAX * size_bytes)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Map all tensors of a nested value; return an unchanged part as the same object."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        found = {key: _mapped(inner, change) for key, inner in value.items()}
        if all(found[key] is inner for key, inner in value.items()):
            return value
        try:
            rebuilt = value.copy()  # type: ignore[attr-defined]
        except AttributeError:
            return found
        rebuilt.update(found)
        return rebuilt
    if type(value) in (list, tuple):
        changed = [_mapped(inner, change) for inner in value]
        return value if all(one is inner for one, inner in zip(changed, value, strict=True)) else type(value)(changed)
    return value
