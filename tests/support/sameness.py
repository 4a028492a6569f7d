"""Says whether two objects are the same, down to the bits, strides and shared memory of their tensors.

`portrait` draws an object as plain nested tuples, which compare by ==. Objects that occur twice are drawn once
and referred to by number, so that two objects have one portrait only if they share the same parts in the same
places. Reads the bytes of whole storages, also those that no tensor shows.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    """Return all bytes of a storage in host memory."""
    # A device is named because the caller may have a default device.
    view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return view.numpy().tobytes()


def assert_same(actual: object, expected: object) -> None:
    """Fail with a readable difference unless both have the same portrait."""
    assert portrait(actual) == portrait(expected)


def assert_same_values(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare dtypes, shapes and values of tensors, wherever they lie in memory."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def portrait(value: object) -> Any:
    """Draw an object; see the module's docstring."""
    return _Painter().draw(value)


class _Painter:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._kept: list[object] = []  # or an id could be used again

    def draw(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | type | torch.dtype):
            return type(value).__name__, repr(value)
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, torch.Tensor):
            return kind, *self._tensor(value)
        if isinstance(value, torch.UntypedStorage):
            return kind, self._storage(value)
        if isinstance(value, torch.TypedStorage):
            return kind, str(value.dtype), self._storage(value._untyped_storage)
        if isinstance(value, dict):
            return kind, tuple((self.draw(key), self.draw(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return kind, tuple(self.draw(item) for item in value)
        if isinstance(value, set | frozenset):
            return kind, tuple(self.draw(item) for item in sorted(value, key=repr))
        if (hasattr(value, "__dict__") and not callable(value)) or isinstance(value, torch.nn.Module):
            return kind, self.draw(vars(value))
        return kind, repr(value)

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.nbytes() == 0:
            return "empty storage", str(storage.device)  # torch.load gives every tensor one of its own
        number = self._storages.get(storage._cdata)
        if number is not None:
            return "storage", number
        number = self._storages[storage._cdata] = len(self._storages)
        self._kept.append(storage)
        has_bytes = storage.device.type == "cpu"
        digest = hashlib.sha256(storage_bytes(storage)).hexdigest()[:16] if has_bytes else None
        return "storage", number, str(storage.device), storage.nbytes(), digest

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return (
            ("dtype", str(tensor.dtype)),
            ("layout", str(tensor.layout)),
            ("requires_grad", tensor.requires_grad),
            ("attributes", self.draw(_attributes(tensor))),
            *self._contents(tensor),
        )

    def _contents(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            shown = "" if tensor.layout == torch.jagged else repr(context)
            return ("wraps", tuple((name, self.draw(getattr(tensor, name))) for name in names), shown)
        if tensor.is_nested:
            return ("nested", tuple(self.draw(part) for part in tensor.unbind()))
        size = ("shape", tuple(tensor.shape))
        if tensor.layout == torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
            return (size, tensor.is_coalesced(), tuple(map(self.draw, parts)))
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return (size, tuple(map(self.draw, [tensor.crow_indices(), tensor.col_indices(), tensor.values()])))
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return (size, tuple(map(self.draw, [tensor.ccol_indices(), tensor.row_indices(), tensor.values()])))
        quantizer: Any = None
        if tensor.is_quantized:
            with contextlib.suppress(RuntimeError):  # bytes that were only declared to be quantized
                if tensor.qscheme() == torch.per_tensor_affine:
                    quantizer = (tensor.q_scale(), tensor.q_zero_point())
                else:
                    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
                    quantizer = (tensor.q_per_channel_axis(), scales.tolist(), zeros.tolist())
        return (
            size,
            ("stride", tensor.stride()),
            ("offset", tensor.storage_offset()),
            ("conj, neg", tensor.is_conj(), tensor.is_neg()),
            ("quantizer", quantizer),
            self._storage(tensor.untyped_storage()),
        )


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    # A jagged tensor counts itself in some of its attributes and in its context: no two are ever the same.
    return {} if tensor.layout == torch.jagged else dict(vars(tensor))
