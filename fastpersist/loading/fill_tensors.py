"""Fill existing tensors from a file: the bytes go straight to their memory, without a second copy.

Contiguous host tensors of the same dtype are filled straight from the ring. torch fills all others (strided, converted,
on a device): in pieces, or one tensor at a time if strides differ. `fill_target` and `restore` decide which tensor is
filled from which place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from fastpersist.errors import FormatError, UnsupportedError
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.unpickle import new_storage
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.reader import Extents, Read
from fastpersist.transfer.tensor_memory import PLAIN_TYPES

__all__ = ["Pair", "StoredTensor", "described_tensor", "fill_pairs", "memory_of", "why_not_fillable"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file: its place, and how its elements lie there."""

    offset_bytes: int  # of its first element, from the file's start
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Tell whether it is row-major without gaps; the stride of a dimension of size 1 does not matter."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A tensor of a target, and the tensor of the file that fills it."""

    name: str
    target: torch.Tensor
    stored: StoredTensor


def described_tensor(source: CheckpointSource, key_of: Mapping[int, str], tensor: torch.Tensor) -> StoredTensor:
    """Return where a tensor on the meta device lies in the file, after proving that it lies inside its storage.

    Args:
        source: The file.
        key_of: Keys of the storages, by their `_cdata`.
        tensor: A tensor over one of these storages.

    Raises:
        FormatError: The tensor reaches beyond its storage.
        UnsupportedError: The tensor is not plain and dense.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) not in PLAIN_TYPES:
        raise UnsupportedError(
            f"{source.path} holds a {type(tensor).__name__} of layout {tensor.layout}; load_into fills plain dense "
            "tensors only: use fastpersist.load and load_state_dict"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(
            f"{source.path} holds a conjugate or negative view; use fastpersist.load and load_state_dict"
        )
    key = key_of.get(tensor.untyped_storage()._cdata)
    if key is None:
        raise UnsupportedError(f"{source.path} holds a tensor without data (meta)")
    entry = source.directory.entries[f"data/{key}"]
    start = int(tensor.storage_offset()) * tensor.element_size()
    found = StoredTensor(entry.data_offset_bytes + start, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
    if any(step < 0 for step in found.stride) or start + found.span_bytes > entry.size_bytes:
        raise FormatError(f"a tensor reaches beyond its storage {key}", path=source.path)
    return found


def why_not_fillable(name: str, tensor: torch.Tensor, stored_dtype: torch.dtype) -> list[str]:
    """Return why a target cannot be filled with values of a dtype; an empty list if it can."""
    if tensor.device.type == "meta":
        return [f"{name} is on the meta device and has no memory yet; call to_empty(device=…) on its module first"]
    if tensor.layout != torch.strided or tensor.is_quantized:
        return [f"{name} is not a dense tensor with memory"]
    if type(tensor) not in PLAIN_TYPES:
        return [f"{name} is a {type(tensor).__name__}, whose memory cannot be filled from outside"]
    if tensor.is_conj() or tensor.is_neg():
        return [f"{name} is a conjugate or negative view"]
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return [f"{name} is an expanded tensor: several of its elements share memory"]
    if stored_dtype.is_complex and not tensor.dtype.is_complex:
        return [f"{name} is {stored_dtype} in the file and {tensor.dtype} in the target"]
    return []


def fill_pairs(source: CheckpointSource, pairs: Sequence[Pair], engine: str, filled: list[str], read: Read) -> None:
    """Fill all targets, by `read`; `filled` gets the name of each target before it may change."""
    extents = Extents()
    with torch.no_grad():
        one_by_one = _add_all(extents, pairs, filled)
        try:
            read(source.fd, source.path, extents, engine=engine)
            for pair in one_by_one:
                filled.append(pair.name)
                pair.target.copy_(_read_strided(source, pair.stored, engine, read))
        finally:
            # tells autograd that the values changed; it does not see what the native side writes
            torch.autograd.graph.increment_version([pair.target for pair in pairs])


@no_garbage_collection()
def _add_all(extents: Extents, pairs: Sequence[Pair], filled: list[str]) -> list[Pair]:
    """Add what is read for all targets at once; return those that are filled one by one afterwards."""
    one_by_one = _overlapping(pairs)
    overlapping = set(one_by_one)
    last = {memory_of(pair.target): pair for pair in pairs}  # the last of tied targets wins, as in load_state_dict
    for pair in last.values():
        if not pair.target.numel() or pair in overlapping:
            continue
        if not pair.stored.is_contiguous():
            one_by_one.append(pair)
            continue
        filled.append(pair.name)
        _add_contiguous(extents, pair)
    return one_by_one


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors over the same elements of the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _overlapping(pairs: Sequence[Pair]) -> list[Pair]:
    """Find targets that overlap in memory without being equal: they are filled one by one, in order."""
    found: set[int] = set()
    reach: tuple[str, int, int, Pair] | None = None  # the one so far on this device whose memory ends last
    places = (_in_memory(pair) for pair in pairs if pair.target.numel())
    for device, start, end, pair in sorted(places, key=itemgetter(0, 1, 2)):
        if reach is not None and reach[0] == device and start < reach[2]:
            if memory_of(reach[3].target) != memory_of(pair.target):
                found |= {id(reach[3]), id(pair)}
            if end <= reach[2]:
                continue
        reach = device, start, end, pair
    return [pair for pair in pairs if id(pair) in found]


def _in_memory(pair: Pair) -> tuple[str, int, int, Pair]:
    """Return the device of a target, and where its memory, which is not empty, begins and ends there."""
    target = pair.target
    last = sum((size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True))
    start = target.data_ptr()
    return str(target.device), start, start + (last + 1) * target.element_size(), pair


def _add_contiguous(extents: Extents, pair: Pair) -> None:
    target, stored = pair.target, pair.stored
    size_bytes = stored.span_bytes
    if target.device.type == "cpu" and target.dtype == stored.dtype and target.is_contiguous():
        extents.add_memory(stored.offset_bytes, size_bytes, target.data_ptr(), target, with_crc=False)
        return
    flat = target.detach().view(-1) if target.is_contiguous() else None
    itemsize = stored.dtype.itemsize
    if target.device.type == "cuda" and flat is not None and target.dtype == stored.dtype:
        extents.add_storage(
            stored.offset_bytes,
            target.untyped_storage(),
            with_crc=False,
            from_bytes=int(target.storage_offset()) * itemsize,
            size_bytes=size_bytes,
        )
        return
    if flat is None or stored.offset_bytes % itemsize:
        # A strided target, or elements that a chunk border could cut in two: gather the whole tensor first.
        whole = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        missing_bytes = size_bytes

        def gather(offset_bytes: int, source: torch.Tensor) -> None:
            nonlocal missing_bytes
            whole[offset_bytes : offset_bytes + source.numel()] = source
            missing_bytes -= source.numel()
            if not missing_bytes:
                target.detach().copy_(whole.view(stored.dtype).view(stored.shape))

        extents.add_pushed(stored.offset_bytes, size_bytes, gather, with_crc=False)
        return

    def convert(offset_bytes: int, source: torch.Tensor) -> None:
        first = offset_bytes // itemsize
        flat[first : first + source.numel() // itemsize].copy_(source.view(stored.dtype))

    extents.add_pushed(stored.offset_bytes, size_bytes, convert, with_crc=False)


def _read_strided(source: CheckpointSource, stored: StoredTensor, engine: str, read: Read) -> torch.Tensor:
    """Read a tensor with gaps between its elements: read its span, then view it."""
    span = new_storage(stored.span_bytes, torch.device("cpu"))
    extents = Extents()
    extents.add_storage(stored.offset_bytes, span, with_crc=False)
    read(source.fd, source.path, extents, engine=engine)
    return torch.empty(0, dtype=stored.dtype, device="cpu").set_(span, 0, stored.shape, stored.stride)
