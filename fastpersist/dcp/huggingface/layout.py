"""Plan where each tensor of a model lies in the files of a HuggingFace checkpoint, and each rank's runs of it; no I/O.

Tensors are whole in the files, however they are sharded: names, shapes, dtypes and chunks in the plans of all ranks
give the place of every byte. A chunk that is cut along inner dimensions consists of many runs. If the runs are tiny,
the ranks of one machine assemble the tensor in windows (`shared_windows`). On several machines, and if runs of several
ranks share a page, the bytes go through a scratch file to the coordinator, which writes them at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from fastpersist.dcp.blobs import Shape
from fastpersist.errors import ConfigError
from fastpersist.formats import safetensors
from fastpersist.formats.byte_ranges import row_major_strides, runs_of_box
from fastpersist.formats.layout import align_up
from fastpersist.formats.safetensors import INDEX_NAME, SINGLE_NAME

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "ModelLayout",
    "Place",
    "Run",
    "Runs",
    "chunk_of",
    "first_byte_of",
    "in_file_order",
    "plan_model",
    "runs_of",
    "without_duplicates",
]

_RUN_BYTES_MIN = 16 << 10
"""Chunks of shorter runs are gathered: a disk takes longer for them."""

_UNIT_COUNT_MIN = 16
"""The same limit in units: with shorter runs, too much would be left to the coordinator."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies.

    Attributes:
        file: The number of its file, from 0.
        offset_bytes: The offset of its first byte, in that file.
        size_bytes: The bytes of the whole tensor.
        gathered: Whether all its bytes go through the coordinator.
        windowed: Whether they go through windows that the ranks share.
        run_bytes: Length of the shortest run of a chunk with many runs; 0 if there is no such chunk.
    """

    file: int
    offset_bytes: int
    size_bytes: int
    gathered: bool
    windowed: bool = False
    run_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The files of a model.

    Attributes:
        names: The names of the files.
        headers: The header of each file.
        places: The place of each tensor, by the tensor's name.
    """

    names: tuple[str, ...]
    headers: tuple[safetensors.HeaderPlan, ...]
    places: dict[str, Place]

    @property
    def is_split(self) -> bool:
        """Whether there are several files, and so an index."""
        return self.names != (SINGLE_NAME,)

    def size_bytes(self, file: int) -> int:
        """Return the length of a file."""
        header = self.headers[file].header
        return header.size_bytes + sum(entry.size_bytes for entry in header.entries)


Run: TypeAlias = tuple[int, int, int]
"""Contiguous bytes of a chunk: their offset in the chunk, how many, and their offset in the file."""


class Runs(NamedTuple):
    """The bytes of a chunk, in their order.

    Attributes:
        own: The runs that its rank writes.
        left: The runs that go through the coordinator.
    """

    own: list[Run]
    left: list[Run]


# --- the plans of all ranks


def chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    """Return the chunk of its tensor that an item is."""
    return item.tensor_data.chunk  # type: ignore[union-attr]


def without_duplicates(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the plans without chunks that an earlier plan has, and without empty chunks.

    Raises:
        ConfigError: An item is no tensor.
    """
    seen: set[tuple[str, Shape, Shape]] = set()
    found = []
    for plan in plans:
        items = []
        for item in plan.items:
            if item.tensor_data is None:
                raise ConfigError(
                    f"{item.index.fqn!r} is no tensor, and a safetensors file holds nothing else: leave it out, or "
                    "save it with FastPersistWriter"
                )
            key = (item.index.fqn, tuple(chunk_of(item).offsets), tuple(chunk_of(item).sizes))
            # Of a tensor without elements one chunk stays: it has to be known.
            if key in seen or (not math.prod(key[2]) and item.tensor_data.size.numel()):
                continue
            seen.add(key)
            items.append(item)
        found.append(dataclasses.replace(plan, items=items))
    return found


@dataclass(slots=True)
class _Tensor:
    dtype: torch.dtype
    shape: Shape
    element_count: int = 0
    run_bytes: int = 0
    gathered: bool = False


def _tensors_in(plans: Sequence[SavePlan], order: Iterable[str], unit_bytes: int) -> dict[str, _Tensor]:
    """Return the tensors that the plans describe; those named in `order` come first."""
    run_bytes_min = _RUN_BYTES_MIN if unit_bytes == 1 else _UNIT_COUNT_MIN * unit_bytes
    found: dict[str, _Tensor] = {}
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        if data is None:
            continue
        name, shape, dtype = item.index.fqn, tuple(data.size), data.properties.dtype
        tensor = found.setdefault(name, _Tensor(dtype, shape))
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise ConfigError(
                f"{name!r} is not the same on all ranks: {tensor.dtype} of shape {tensor.shape}, and {dtype} of "
                f"shape {shape}"
            )
        lengths = tuple(data.chunk.sizes)
        tensor.element_count += math.prod(lengths)
        outer, run = runs_of_box(shape, lengths)
        if math.prod(lengths[:outer]) > 1 and run:
            tensor.run_bytes = min(tensor.run_bytes or sys.maxsize, run * dtype.itemsize)
            tensor.gathered = tensor.run_bytes < run_bytes_min
    for name, tensor in found.items():
        if _dtype_name(tensor.dtype) not in safetensors.DTYPE_NAMES:
            raise ConfigError(
                f"{name!r} cannot go into a safetensors file: the format has no dtype for {tensor.dtype}; convert it, "
                "or save it with FastPersistWriter"
            )
        if tensor.element_count != math.prod(tensor.shape):
            raise ConfigError(
                f"{name!r} has {math.prod(tensor.shape)} elements, and the ranks together plan to write "
                f"{tensor.element_count}: their shards overlap, or one is missing"
            )
    return {name: found[name] for name in dict.fromkeys([*order, *found]) if name in found}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- files


def plan_model(
    plans: Sequence[SavePlan],
    order: Iterable[str],
    *,
    max_shard_bytes: int,
    indices: Mapping[str, int] | None,
    metadata: Mapping[str, str],
    unit_bytes: int,
) -> ModelLayout:
    """Distribute tensors over files, and place them.

    Args:
        plans: The plans of all ranks; each chunk is in one of them.
        order: Names in the order of the model; names that are missing here come behind.
        max_shard_bytes: A new file begins where one would get more bytes of tensors. A larger tensor gets its own.
        indices: The number of the file of each tensor, from 1; then `max_shard_bytes` has no effect.
        metadata: Metadata for the header of each file.
        unit_bytes: The unit in which ranks write, as in `runs_of`.

    Raises:
        ConfigError: The tensors are not all of a model, or the format cannot hold them; the message names one.
    """
    tensors = _tensors_in(plans, order, unit_bytes)
    groups = _groups(tensors, max_shard_bytes) if indices is None else _groups_by_index(tensors, indices)
    count = max(groups)
    names, headers, places = [], [], {}
    for file, (number, members) in enumerate(sorted(groups.items())):
        described = [(name, safetensors.DTYPE_NAMES[_dtype_name(one.dtype)], one.shape) for name, one in members]
        header = safetensors.place_tensors(described, metadata, checksum=True)
        names.append(SINGLE_NAME if count == 1 else f"model-{number:05}-of-{count:05}.safetensors")
        headers.append(header)
        for entry in header.header.entries:
            tensor = tensors[entry.name]
            place = Place(file, entry.offset_bytes, entry.size_bytes, tensor.gathered, run_bytes=tensor.run_bytes)
            places[entry.name] = place
    return ModelLayout(tuple(names), tuple(headers), places)


_Members = list[tuple[str, _Tensor]]


def _groups(tensors: Mapping[str, _Tensor], max_shard_bytes: int) -> dict[int, _Members]:
    groups: list[_Members] = [[]]
    group_bytes = 0
    for name, tensor in tensors.items():
        size_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if groups[-1] and group_bytes + size_bytes > max_shard_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append((name, tensor))
        group_bytes += size_bytes
    return dict(enumerate(groups, 1))


def _groups_by_index(tensors: Mapping[str, _Tensor], indices: Mapping[str, int]) -> dict[int, _Members]:
    groups: dict[int, _Members] = {}
    for name, tensor in tensors.items():
        number = indices.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 99_999:
            found = "does not have it" if number is None else f"has {number!r} for it"
            raise ConfigError(
                f"fqn_to_index_mapping gives each tensor the number of its file, from 1; of {name!r} it {found}"
            )
        groups.setdefault(number, []).append((name, tensor))
    return groups or {1: []}


# --- pieces of chunks


def in_file_order(items: Iterable[WriteItem], places: Mapping[str, Place]) -> list[WriteItem]:
    """Return items in the order in which each rank writes them: that of their tensors, and of their chunks in these.

    What goes through windows comes first: the ranks wait for each other there.
    """

    def key(item: WriteItem) -> tuple[bool, int, int, Shape]:
        place = places[item.index.fqn]
        return not place.windowed, place.file, place.offset_bytes, tuple(chunk_of(item).offsets)

    return sorted(items, key=key)


def first_byte_of(item: WriteItem, place: Place) -> int:
    """Return where the first byte of a chunk belongs in its file."""
    if item.tensor_data is None:
        return place.offset_bytes
    shape, itemsize = tuple(item.tensor_data.size), item.tensor_data.properties.dtype.itemsize
    return _run_starts(shape, tuple(chunk_of(item).offsets), (), itemsize, place.offset_bytes)[0]


def runs_of(item: WriteItem, place: Place, unit_bytes: int) -> Runs:
    """Return the runs in which a chunk lies in its file; of a tensor that is gathered, all of the chunk as one.

    There are none of what goes through windows.

    Args:
        item: The chunk.
        place: The place of the chunk's tensor.
        unit_bytes: Ranks write whole units, counted from the start of the file; the rest goes through the coordinator.
            1 where ranks may write to the same page.
    """
    data, chunk = item.tensor_data, chunk_of(item)
    if data is None:
        return Runs([], [])
    shape, offsets, lengths = tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes)
    itemsize = data.properties.dtype.itemsize
    size_bytes = math.prod(lengths) * itemsize
    if not size_bytes:
        return Runs([], [])
    if place.windowed:
        return Runs([], [])
    if place.gathered:
        return Runs([], [(0, size_bytes, place.offset_bytes)])
    outer, run = runs_of_box(shape, lengths)
    run_bytes = run * itemsize
    starts = _run_starts(shape, offsets, lengths[:outer], itemsize, place.offset_bytes)
    runs = Runs(list(zip(range(0, size_bytes, run_bytes), itertools.repeat(run_bytes), starts, strict=False)), [])
    return runs if unit_bytes == 1 else _in_units(runs.own, unit_bytes)


def _in_units(runs: Iterable[Run], unit_bytes: int) -> Runs:
    """Split runs into whole units and the rest.

    Worked example: in units of 4096, the run (0, 10000, 5000) is (3192, 4096, 8192) and two that are left,
    (0, 3192, 5000) and (7288, 2712, 12288).
    """
    found = Runs([], [])
    for start, size_bytes, offset_bytes in runs:
        end_bytes = offset_bytes + size_bytes
        low = min(end_bytes, align_up(offset_bytes, unit_bytes))
        high = max(low, end_bytes // unit_bytes * unit_bytes)
        found.own.append((start + low - offset_bytes, high - low, low))
        found.left.append((start, low - offset_bytes, offset_bytes))
        found.left.append((start + high - offset_bytes, end_bytes - high, high))
    return Runs([run for run in found.own if run[1]], [run for run in found.left if run[1]])


def _run_starts(shape: Shape, offsets: Shape, outer_lengths: Shape, itemsize: int, offset_bytes: int) -> list[int]:
    """Return where each run of a box begins, in a file in which its tensor begins at `offset_bytes`."""
    strides = [stride * itemsize for stride in row_major_strides(shape)]
    starts = torch.tensor([offset_bytes + sum(map(operator.mul, offsets, strides))])
    for length, stride in zip(outer_lengths, strides, strict=False):
        starts = (starts.unsqueeze(-1) + torch.arange(length) * stride).reshape(-1)
    return starts.tolist()
