"""Compares two sources: names that only one has, other dtypes or shapes, and tensors whose bits differ.

Both are read side by side, piece by piece. Pieces with equal bits are compared by memcmp, at the speed of the disk;
values are examined only where bits differ.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fastpersist import _native
from fastpersist.contents.pieces import read_pieces
from fastpersist.contents.statistics import NATIVE_FLOATS, can_be_widened, in_parts
from fastpersist.contents.stored import Contents, Stored
from fastpersist.errors import ConfigError
from fastpersist.formats.names import is_wanted

__all__ = ["Comparison", "TensorDifference", "compare"]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class TensorDifference:
    """A tensor whose bits differ.

    Attributes:
        name: The name of the tensor in both sources.
        dtype: The dtype in both sources.
        shape: The shape in both sources.
        differing_count: Elements whose bits differ. Only these are counted in the attributes below.
        max_abs: The largest |a - b| of two finite elements, in single precision or their own; 0 for a dtype that torch
            cannot calculate with.
        max_rel: The largest |a - b| / max(|a|, |b|) of two finite elements; subnormal numbers count as the smallest
            normal one below the line.
        nan_counts: How many are NaN in A, and in B.
        inf_counts: How many are infinite in A, and in B.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    differing_count: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    nan_counts: tuple[int, int] = (0, 0)
    inf_counts: tuple[int, int] = (0, 0)

    def add(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Compare more elements."""
        if (name := NATIVE_FLOATS.get(self.dtype)) is not None:
            self._add_floats(_native.compare_values(name, ours.data_ptr(), theirs.data_ptr(), len(ours)))
        else:
            self._add_others(ours, theirs)

    def _add_floats(self, found: tuple[int, float, float, tuple[int, int], tuple[int, int]]) -> None:
        differing_count, max_abs, max_rel, (nan_a, nan_b), (inf_a, inf_b) = found
        self.differing_count += differing_count
        self.max_abs = max(self.max_abs, max_abs)
        self.max_rel = max(self.max_rel, max_rel)
        self.nan_counts = (self.nan_counts[0] + nan_a, self.nan_counts[1] + nan_b)
        self.inf_counts = (self.inf_counts[0] + inf_a, self.inf_counts[1] + inf_b)

    def _add_others(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        differ = _bits(ours) ^ _bits(theirs)
        if differ.dim() > 1:
            differ = differ.any(-1)
        count = int(differ.count_nonzero())
        self.differing_count += count
        if not count or not can_be_widened(self.dtype):
            return
        first, second = _wide(ours), _wide(theirs)
        tiny = torch.finfo(first.dtype).tiny
        if not self._measure(first, second, tiny):
            first, second = first[differ != 0], second[differ != 0]
            self.nan_counts = (self.nan_counts[0] + _count(first.isnan()), self.nan_counts[1] + _count(second.isnan()))
            self.inf_counts = (self.inf_counts[0] + _count(first.isinf()), self.inf_counts[1] + _count(second.isinf()))
            finite = first.isfinite() & second.isfinite()
            if bool(finite.any()):
                self._measure(first[finite].to(_widest(first)), second[finite].to(_widest(first)), tiny)

    def _measure(self, first: torch.Tensor, second: torch.Tensor, tiny: float) -> bool:
        """Note the largest differences, unless some of them are not finite: return whether none is.

        Relative is to the larger value, or to `tiny` if that is smaller.
        """
        gap = (first - second).abs()
        largest = float(gap.amax())  # which takes half the time of max()
        if not math.isfinite(largest):
            return False
        self.max_abs = max(self.max_abs, largest)
        # Two zeros are 0 apart, and 0 / 0 would be no number.
        scale = torch.maximum(first.abs(), second.abs()).clamp_min_(tiny)
        self.max_rel = max(self.max_rel, float(gap.div_(scale).amax()))
        return True


@dataclass(slots=True)
class Comparison:
    """How two sources differ.

    Attributes:
        only_in_a: Names of tensors that only A has.
        only_in_b: Names of tensors that only B has.
        described: Tensors of another dtype or shape, by name: what each is in A and in B.
        values: Differing entries that are no tensors, by name: as text in A and in B; None where one is missing.
            Metadata of safetensors are compared only if both have some: other files have none.
        tensors: Tensors of the same dtype and shape whose bits differ.
        equal_count: Tensors whose bits are equal.
        compared_bytes: Bytes of tensors that were read of each.
        undecided: Tensors that could not be compared, by name, and why.
    """

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    described: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    tensors: list[TensorDifference] = field(default_factory=list)
    equal_count: int = 0
    compared_bytes: int = 0
    undecided: dict[str, str] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether any difference was found."""
        return bool(self.only_in_a or self.only_in_b or self.described or self.values or self.tensors)


def compare(
    ours: Contents,
    theirs: Contents,
    patterns: Sequence[str] = (),
    *,
    on_read: Callable[[int], object] = lambda size_bytes: None,
) -> Comparison:
    """Compare two sources: names, dtypes, shapes and values first, then the bits of the tensors that both have.

    Args:
        ours: The source A.
        theirs: The source B.
        patterns: Compare only what these name, as `is_wanted` tells; all if there are none.
        on_read: Called with the bytes of each batch that was compared.

    Raises:
        ConfigError: Patterns that match nothing in either source.
        EndOfFileError, StorageError: See `read_pieces`.

    Thread safety: no other thread may use either source meanwhile.
    """
    found = Comparison()
    a, b = (_tensors_in(contents, patterns) for contents in (ours, theirs))
    if patterns and not (a or b or _has_values(ours, patterns) or _has_values(theirs, patterns)):
        raise ConfigError(f"neither has a tensor or a value that is named {' or '.join(patterns)}")
    found.only_in_a = [name for name in a if name not in b]
    found.only_in_b = [name for name in b if name not in a]
    shared = [name for name in a if name in b]
    unreadable = {**theirs.unreadable, **ours.unreadable}
    found.undecided = {name: unreadable[name] for name in shared if name in unreadable}
    found.described = {name: (_described(a[name]), _described(b[name])) for name in shared if _unlike(a[name], b[name])}
    found.values = _differing(ours.values, theirs.values, patterns)
    if ours.metadata and theirs.metadata:
        found.values |= _differing(_as_values(ours.metadata), _as_values(theirs.metadata), patterns)
    pairs = [
        (one, other)
        for name in shared
        if name not in found.undecided and name not in found.described
        if (one := a[name]) is not None and (other := b[name]) is not None
    ]
    _compare_bits(found, pairs, on_read)
    return found


def _tensors_in(contents: Contents, patterns: Sequence[str]) -> dict[str, Stored | None]:
    everything: dict[str, Stored | None] = {**contents.tensors, **dict.fromkeys(contents.unreadable)}
    return {name: tensor for name, tensor in everything.items() if is_wanted(name, patterns)}


def _has_values(contents: Contents, patterns: Sequence[str]) -> bool:
    names = (*contents.values, *_as_values(contents.metadata or {}))
    return any(is_wanted(name, patterns) for name in names)


def _unlike(one: Stored | None, other: Stored | None) -> bool:
    return one is not None and other is not None and (one.dtype, one.shape) != (other.dtype, other.shape)


def _described(tensor: Stored | None) -> str:
    if tensor is None:
        return "unreadable"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _differing(
    ours: Mapping[str, str], theirs: Mapping[str, str], patterns: Sequence[str]
) -> dict[str, tuple[str | None, str | None]]:
    return {
        name: (ours.get(name), theirs.get(name))
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name) and is_wanted(name, patterns)
    }


def _as_values(metadata: Mapping[str, str]) -> dict[str, str]:
    return {f"metadata[{key}]": text for key, text in metadata.items()}


def _compare_bits(found: Comparison, pairs: Sequence[tuple[Stored, Stored]], on_read: Callable[[int], object]) -> None:
    differing: dict[int, TensorDifference] = {}
    batches = zip(read_pieces([one for one, _ in pairs]), read_pieces([other for _, other in pairs]), strict=True)
    for batch in batches:
        for ours, theirs in zip(*batch, strict=True):
            size_bytes = ours.data.numel()
            found.compared_bytes += size_bytes
            if _memcmp(ours.data.data_ptr(), theirs.data.data_ptr(), size_bytes) == 0:
                continue
            tensor = pairs[ours.number][0]
            difference = differing.setdefault(ours.number, TensorDifference(tensor.name, tensor.dtype, tensor.shape))
            values = ours.values(tensor.dtype), theirs.values(tensor.dtype)
            for part in zip(*map(in_parts, values), strict=True):
                difference.add(*part)
        on_read(sum(piece.data.numel() for piece in batch[0]))
    found.tensors = [differing[index] for index in sorted(differing)]
    found.equal_count = len(pairs) - len(differing)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """View elements as integers; those of 16 bytes as two each."""
    size_bytes = values.dtype.itemsize
    if size_bytes == 16:
        return values.view(torch.int64).reshape(-1, 2)
    return values.view(_INTEGERS[size_bytes])


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Convert elements to a dtype in which differences are taken: floats of up to 32 bits stay exact in single."""
    if values.dtype is torch.complex32:
        return torch.view_as_complex(values.view(torch.float16).float().reshape(-1, 2))
    if values.dtype.is_complex:
        return values
    is_small = values.dtype.is_floating_point and values.dtype.itemsize <= 4
    return values.to(torch.float32 if is_small else torch.float64)


def _widest(values: torch.Tensor) -> torch.dtype:
    return torch.complex128 if values.dtype.is_complex else torch.float64


def _count(mask: torch.Tensor) -> int:
    return int(mask.sum())
