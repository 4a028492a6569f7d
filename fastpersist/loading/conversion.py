"""Converts the floating-point tensors of a loaded object to another dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from fastpersist.errors import ConfigError

__all__ = ["converted", "require_floating"]


def require_floating(dtype: object) -> None:
    """Refuse what no floating-point tensor can be converted to.

    Raises:
        ConfigError: The value is no floating-point dtype, or torch converts nothing to it.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype must be a floating-point dtype, such as torch.bfloat16, not {dtype!r}")
    _in_dtype(torch.zeros(1), dtype)


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    try:
        return tensor.to(dtype)
    except NotImplementedError as error:  # of torch.float4_e2m1fn_x2, an element of which is two values
        raise ConfigError(f"dtype={dtype} is not possible: torch cannot convert {tensor.dtype} to it") from error


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in dicts, lists and tuples, and return the object.

    Dicts and lists are changed in place, one tensor after the other, so that memory holds one tensor twice at most.
    A tensor that occurs in several places stays one tensor.

    Raises:
        ConfigError: torch cannot convert a tensor to this dtype.
    """
    places: Counter[object] = Counter()
    _count(value, dtype, places, set())
    return _Conversion(dtype, places).of(value)


def _is_other(value: object, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype


def _view_of(tensor: torch.Tensor) -> object:
    """Return what is equal for tensors that view the same elements of one storage."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return id(tensor)
    place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return (type(tensor), tensor.requires_grad, *place)


def _items(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _count(value: object, dtype: torch.dtype, places: Counter[object], seen: set[int]) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            if _is_other(item, dtype):
                places[_view_of(item)] += 1
        elif id(item) not in seen:
            seen.add(id(item))
            stack.extend(_items(item))


class _Conversion:
    """Converts what an object holds.

    Args:
        dtype: The new dtype.
        places: In how many places of the object each tensor stands.
    """

    def __init__(self, dtype: torch.dtype, places: Counter[object]) -> None:
        self._dtype = dtype
        self._places = places
        # Old objects stay alive here, or another could get their address.
        self._tensors: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
        self._containers: dict[int, tuple[object, object]] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if _is_other(value, self._dtype) else value
        if not isinstance(value, dict | list | tuple):
            return value
        if id(value) in self._containers:
            return self._containers[id(value)][1]
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            is_same = all(new is old for new, old in zip(items, value, strict=True))
            new = value if is_same else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
            self._containers[id(value)] = value, new
            return new
        self._containers[id(value)] = value, value
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            value[key] = self.of(value[key])
        return value

    def _tensor(self, old: torch.Tensor) -> torch.Tensor:
        view = _view_of(old)
        known = self._tensors.get(view)
        new = known[1] if known is not None else self._converted(old)
        self._places[view] -= 1
        if self._places[view]:
            self._tensors[view] = old, new
        else:
            self._tensors.pop(view, None)
        return new

    def _converted(self, old: torch.Tensor) -> torch.Tensor:
        new = _in_dtype(old.detach(), self._dtype)
        if type(old) is torch.nn.Parameter:
            return torch.nn.Parameter(new, old.requires_grad)
        return new.requires_grad_(old.requires_grad)
