"""A few elements of each tensor that ranks may hold alike, as they are when a save begins: do they hold the same?

One name on several ranks stands for one tensor, of which one rank's bytes are written, or some rows of each. Where two
tensors have got one name (stages of a pipeline whose optimizers number their parameters), one of them would be lost,
or both be mixed. So sums of samples are compared (`plan_agreement`; in torch's own saves `comparing`) of what ranks
have to hold alike:

- shards of DTensors and ShardedTensors, but for partial sums;
- plain tensors that an optimizer owns, or that lie in its state_dict, but for single numbers: how often a parameter
  was updated may differ where ranks meet other data;
- plain tensors that are large enough to be cut among ranks.

Other plain tensors (statistics of batches, states of random generators) differ by design; as in DCP one rank's counts.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Partial

from fastpersist.dcp.blobs import is_plain
from fastpersist.saving.capture import no_garbage_collection
from fastpersist.saving.ownership import Ownership

__all__ = ["CUT_TENSOR_BYTES_MIN", "GetSums", "sample", "sample_each"]

CUT_TENSOR_BYTES_MIN = 2 << 20
"""Of a tensor that is cut, if several ranks hold it (`save_planner`)."""

_WINDOW_COUNT = 4
_WINDOW_BYTES = 64
"""So many bytes at so many places, spread over a tensor, whatever its size."""

GetSums: TypeAlias = Callable[[], dict[str, int]]
"""Gives a sum for each sampled tensor, by its name for DCP. May wait for a device, until its samples are copied."""


@no_garbage_collection()
def sample(state: Mapping[str, Any], ownership: Ownership, passed_over: Container[str]) -> GetSums:
    """Take samples of the tensors of a state, as they are now; waits for no device.

    Args:
        state: Nested dicts and lists of tensors.
        ownership: What optimizers own.
        passed_over: Names of tensors that need no sample, since no other rank has them.
    """
    found: dict[str, torch.Tensor] = {}
    _find(state, "", found, _Judge({**ownership.stable, **ownership.constant}, passed_over), in_optimizer=False)
    return _taken(found)


@no_garbage_collection()
def sample_each(tensors: Mapping[str, torch.Tensor]) -> GetSums:
    """Take samples of tensors, as they are now; waits for no device.

    Args:
        tensors: By name. Of what cannot be compared, none is taken.
    """
    found = {name: _local_of(tensor) for name, tensor in tensors.items()}
    return _taken({name: local for name, local in found.items() if local is not None})


def _taken(found: Mapping[str, torch.Tensor]) -> GetSums:
    """Take samples of tensors that are contiguous, and nothing but their elements."""
    sums: dict[str, int] = {}
    on_devices: dict[tuple[torch.device, torch.Size], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in found.items():
        if tensor.device.type == "cpu":
            sums[name] = _sum_of(tensor)
        else:
            windows = _windows_of(tensor)
            on_devices.setdefault((tensor.device, windows.shape), []).append((name, windows))
    copies = [_copied(device, parts) for (device, _), parts in on_devices.items()]
    return lambda: {**sums, **{name: total for get in copies for name, total in get().items()}}


class _Judge:
    """Knows which tensors ranks have to hold alike."""

    def __init__(self, owned: Container[int], passed_over: Container[str]) -> None:
        self._owned = owned
        self._passed_over = passed_over

    def local_of(self, tensor: torch.Tensor, name: str, *, in_optimizer: bool) -> torch.Tensor | None:
        """Return what this rank holds of a tensor, if that is to be compared with what others hold."""
        if name in self._passed_over:
            return None
        local = _local_of(tensor)
        if local is not tensor or local is None or in_optimizer or local.nbytes >= CUT_TENSOR_BYTES_MIN:
            return local
        return local if local.untyped_storage()._cdata in self._owned else None


def _local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what this rank holds of a tensor; None if that cannot be compared, or may differ."""
    local, count_min = tensor, 1
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            return None
    elif isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        if len(shards) != 1:
            return None
        local = shards[0].tensor
    else:
        count_min = 2
    if not is_plain(local) or local.numel() < count_min or local.device.type not in ("cpu", "cuda"):
        return None
    return local if local.is_contiguous() and not local.is_conj() and not local.is_neg() else None


def _find(value: Any, name: str, found: dict[str, torch.Tensor], judge: _Judge, *, in_optimizer: bool) -> None:
    """Find what is to be compared, by the names that DCP gives."""
    if isinstance(value, torch.Tensor):
        local = judge.local_of(value, name, in_optimizer=in_optimizer)
        if local is not None:
            found[name] = local
    elif isinstance(value, Mapping):
        is_optimizer = isinstance(value.get("state"), Mapping) and isinstance(value.get("param_groups"), list)
        for key, item in value.items():
            inner = f"{name}.{key}" if name else str(key)
            _find(item, inner, found, judge, in_optimizer=in_optimizer or (is_optimizer and key == "state"))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _find(item, f"{name}.{index}", found, judge, in_optimizer=in_optimizer)


def _step_bytes(size_bytes: int) -> int:
    """Return how far the windows of a tensor are apart; 0 if all of it is taken."""
    if size_bytes <= _WINDOW_COUNT * _WINDOW_BYTES:
        return 0
    return (size_bytes - _WINDOW_BYTES) // (_WINDOW_COUNT - 1)


def _sum_of(tensor: torch.Tensor) -> int:
    """Return the sum of a contiguous tensor in host memory."""
    address, size_bytes = tensor.data_ptr(), tensor.nbytes
    step_bytes = _step_bytes(size_bytes)
    if not step_bytes:
        return zlib.crc32(ctypes.string_at(address, size_bytes))
    places = range(address, address + _WINDOW_COUNT * step_bytes, step_bytes)
    return zlib.crc32(b"".join([ctypes.string_at(place, _WINDOW_BYTES) for place in places]))


def _windows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bytes of a contiguous tensor on a device; a view."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    step_bytes = _step_bytes(flat.numel())
    shape, strides = ((_WINDOW_COUNT, _WINDOW_BYTES), (step_bytes, 1)) if step_bytes else ((1, flat.numel()), (1, 1))
    return flat.as_strided(shape, strides, flat.storage_offset())


def _copied(device: torch.device, parts: list[tuple[str, torch.Tensor]]) -> GetSums:
    """Copy windows of one shape, in the order of the caller's stream; return what waits for them."""
    joined = torch.cat([windows for _, windows in parts])
    names, size_bytes = [name for name, _ in parts], parts[0][1].numel()
    on_cuda = device.type == "cuda"
    copied = joined.to("cpu", non_blocking=on_cuda)
    done = torch.cuda.current_stream(device).record_event() if on_cuda else None

    def get() -> dict[str, int]:
        if done is not None:
            done.synchronize()
        data = ctypes.string_at(copied.data_ptr(), copied.nbytes)
        return {
            name: zlib.crc32(data[index * size_bytes : (index + 1) * size_bytes]) for index, name in enumerate(names)
        }

    return get
