"""What callers give: ids of rows → a flat int64 tensor of valid ids and its shape; and a tensor to be filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastpersist.errors import ConfigError, RowIndexError
from fastpersist.transfer.tensor_memory import address_of, check_bytes

__all__ = ["check_out", "checked_ids", "count_change", "is_traced", "plain_array"]

_WHOLE_NUMBERS = {
    getattr(torch, name) for name in ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
}


def is_traced() -> bool:
    """Tell whether torch.jit traces this call; a trace would record only the memory for the rows, and no request."""
    return torch.jit.is_tracing()  # type: ignore[attr-defined, no-any-return, no-untyped-call] # torch has no types


def checked_ids(
    ids: Any, find_bad: Callable[[int, int], int], row_count: int, path: str
) -> tuple[torch.Tensor, torch.Size]:
    """Return ids as a contiguous int64 tensor of one dimension on the CPU, and the shape they were given in.

    Args:
        ids: A tensor of whole numbers on any device, an array, a list of them, or one number.
        find_bad: Takes the address and number of int64 ids; returns the place of the first one that is no row, or their
            number.
        row_count: The number of rows of the table, for messages.
        path: The path of the table, for messages.

    Raises:
        ConfigError: The ids are no whole numbers; or the call is traced by torch.jit.
        RowIndexError: One is no row of the table; the message says which and where.
    """
    if is_traced():
        raise ConfigError(
            f"torch.jit.trace records no reads, here of rows of {path}; gather them outside of what is traced"
        )
    try:
        given = ids if isinstance(ids, torch.Tensor) else torch.as_tensor(plain_array(ids), device="cpu")
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ids are whole numbers, as a tensor, an array, a list or one number: {error}") from None
    if given.is_nested and given.layout == torch.strided:
        raise ConfigError("ids are whole numbers in a dense tensor, not in a nested one")
    if given.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu"), given.shape
    if given.dtype not in _WHOLE_NUMBERS:
        raise ConfigError(f"ids are whole numbers, not {given.dtype}")
    if given.is_meta or given.layout != torch.strided:
        raise ConfigError(f"ids are whole numbers in a dense tensor, not in one of {given.layout} on {given.device}")
    is_flat = given.dim() == 1 and given.is_cpu and given.dtype == torch.int64 and given.is_contiguous()
    flat = given if is_flat else given.to("cpu", torch.int64).contiguous().flatten()
    address = address_of(flat)
    if not address:
        raise ConfigError("ids are whole numbers in memory, not in a fake tensor, nor inside torch.func transforms")
    bad = find_bad(address, flat.numel())
    if bad < flat.numel():
        place = f"[{', '.join(map(str, _indices(bad, given.shape)))}]" if given.dim() else ""
        raise RowIndexError(f"ids{place} is {given.reshape(-1)[bad].item()}; {path} has {row_count} rows")
    return flat, given.shape


def plain_array(given: Any) -> Any:
    """Return what torch takes: an array of numpy may be read-only, lie backwards, or have the other byte order."""
    if not hasattr(given, "__array_interface__"):
        return given
    return given.astype(given.dtype.newbyteorder("="), order="C", copy=not given.flags.writeable)


def check_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a tensor that rows of this shape and dtype cannot be written to.

    Raises:
        ConfigError: It does not fit, has no memory of its own on the CPU, or requires a gradient.
    """
    if not isinstance(out, torch.Tensor) or not out.is_cpu or out.layout != torch.strided:
        raise ConfigError("out is a tensor on the CPU; use device= for rows on a device")
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ConfigError(
            f"out is a contiguous tensor of {dtype} and shape {shape}, not one of {out.dtype} and shape "
            f"{tuple(out.shape)}{'' if out.is_contiguous() else ' that is not contiguous'}"
        )
    check_bytes(out)
    if out.requires_grad and torch.is_grad_enabled():
        raise ConfigError("out requires a gradient, which rows from a disk do not have; pass out.detach()")


def count_change(out: torch.Tensor) -> None:
    """Let code that compares the version of a tensor see that it changes."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _indices(flat_index: int, shape: torch.Size) -> list[int]:
    """Return the indices of an element in a tensor of this shape."""
    found = []
    for size in reversed(shape):
        flat_index, index = divmod(flat_index, size)
        found.append(index)
    return found[::-1]
