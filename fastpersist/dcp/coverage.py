"""Check that the chunks of a tensor cover it: elements that no chunk covers would be loaded as uninitialized memory.

A step holds whole tensors, so its metadata are checked. Other checkpoints may hold a part of a tensor (what one process
had of it, or the metadata of one rank): there the plan of a rank is checked, for the elements that this rank wants.
Chunks may overlap, as in stock readers: of overlapping elements, those that are read last count. (DCP's planners refuse
to save overlapping chunks. They write chunks that do not overlap, and have as many elements as the tensor.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from fastpersist.errors import FormatError

__all__ = ["is_covered", "require_covered", "require_filled"]

_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""First element in each dimension, and the one behind the last."""

_LOOKS_PER_CHUNK = 64
"""Grids and boxes of repeated cuts take fewer looks. Hostile chunks could take the square of their number."""


def require_covered(described: Mapping[str, object], path: str) -> None:
    """Refuse tensors with elements that no chunk has.

    Args:
        described: The metadata's description of each name.
        path: The path of the metadata, for the message.

    Raises:
        FormatError: There is such a tensor; or its chunks overlap in a way that would take too long to check.
    """
    for name, one in described.items():
        if isinstance(one, TensorStorageMetadata) and not is_covered(one.size, one.chunks):
            elements = sum(chunk.sizes.numel() for chunk in one.chunks)
            raise FormatError(
                f"{name!r} has shape {tuple(one.size)}, and its {len(one.chunks)} chunks, of {elements} elements, do "
                "not cover it: the checkpoint is not whole",
                path=path,
            )


def require_filled(plan: LoadPlan, planner: LoadPlanner, path: str) -> None:
    """Refuse a plan that leaves elements of a tensor unfilled, as far as the planner tells what it fills.

    Args:
        plan: The plan of what this rank reads.
        planner: The planner that made the plan; checked if it derives from DCP's DefaultLoadPlanner.
        path: The path of the checkpoint, for the message.

    Raises:
        FormatError: There is such a tensor; the message names it.
    """
    if not isinstance(planner, DefaultLoadPlanner) or planner.metadata is None:
        return
    read: dict[tuple[str, tuple[int, ...]], list[ChunkStorageMetadata]] = {}
    for item in plan.items:
        if item.type == LoadItemType.TENSOR:
            place = (item.dest_index.fqn, tuple(item.dest_index.offset or ()))
            read.setdefault(place, []).append(ChunkStorageMetadata(item.dest_offsets, item.lengths))
    for name, target in planner.state_dict.items():
        described = planner.metadata.state_dict_metadata.get(name)
        if not isinstance(target, torch.Tensor) or not isinstance(described, TensorStorageMetadata):
            continue
        if isinstance(target, DTensor) and target.device_mesh.get_coordinate() is None:  # none of it is here
            continue
        for chunk in _create_chunk_list(target):
            if not is_covered(chunk.sizes, read.get((name, tuple(chunk.offsets)), ())):
                raise FormatError(
                    f"{name!r}, of shape {tuple(described.size)}, is not whole: of the elements from "
                    f"{tuple(chunk.offsets)} on, {tuple(chunk.sizes)} of them, the checkpoint does not have all",
                    path=path,
                )


def is_covered(size: Sequence[int], chunks: Iterable[ChunkStorageMetadata]) -> bool:
    """Tell whether each element lies in a chunk. Chunks lie in the tensor, and have its dimensions.

    Cuts the tensor at places that cut no chunk, and examines each part in the same way; only if there is no such place
    (chunks that overlap, or are arranged like a pinwheel) are chunks cut, too.

    Args:
        size: The shape of the tensor.
        chunks: The chunks of the tensor, in any order; also empty ones.

    Raises:
        FormatError: It would take too long.

    Thread safety: a pure function.
    """
    boxes = [
        (tuple(chunk.offsets), tuple(map(int.__add__, chunk.offsets, chunk.sizes)))
        for chunk in chunks
        if all(chunk.sizes)
    ]
    whole = (0,) * len(size), tuple(size)
    looks_left = _LOOKS_PER_CHUNK * (len(boxes) + _LOOKS_PER_CHUNK)
    tasks = [(whole, boxes)] if all(size) else []
    while tasks:
        box, inside = tasks.pop()
        looks_left -= len(inside)
        if looks_left < 0:
            raise FormatError(f"a tensor of shape {tuple(size)} has {len(boxes)} chunks that overlap in too many ways")
        if sum(map(_volume, inside)) < _volume(box):
            return False
        if box in inside:
            continue
        parts = _parts(box, inside)
        if parts is None:
            return False
        tasks += parts
    return True


def _volume(box: _Box) -> int:
    return math.prod(map(int.__sub__, box[1], box[0]))


def _parts(box: _Box, inside: list[_Box]) -> list[tuple[_Box, list[_Box]]] | None:
    """Return the parts of a box, each with the chunks in it; [] if the chunks cover it, None if they do not."""
    lows, highs = box
    partial = [
        dimension
        for dimension, (low, high) in enumerate(zip(lows, highs, strict=True))
        if any(start[dimension] != low or end[dimension] != high for start, end in inside)
    ]
    for dimension in partial:
        groups = _groups(box, inside, dimension)
        if groups is None:
            return None
        if len(partial) == 1:  # in all other dimensions each of them is as wide as the box
            return []
        if len(groups) > 1:
            return groups
    middle = _middle(box, inside, partial[0])
    return [_clipped(box, inside, partial[0], *ends) for ends in ((0, middle), (middle, box[1][partial[0]]))]


def _groups(box: _Box, inside: list[_Box], dimension: int) -> list[tuple[_Box, list[_Box]]] | None:
    """Cut a box along a dimension at each place that cuts no chunk; None if no chunk reaches some place."""
    groups: list[list[_Box]] = []
    end = box[0][dimension]
    for one in sorted(inside, key=lambda one: one[0][dimension]):
        start = one[0][dimension]
        if start > end:
            return None
        if start == end:
            groups.append([])
        groups[-1].append(one)
        end = max(end, one[1][dimension])
    if end != box[1][dimension]:
        return None
    starts = [group[0][0][dimension] for group in groups]
    ends = [*starts[1:], end]
    return [(_narrowed(box, dimension, *between), group) for *between, group in zip(starts, ends, groups, strict=True)]


def _middle(box: _Box, inside: list[_Box], dimension: int) -> int:
    """Return where half of the chunks begin or end."""
    places = sorted(place for one in inside for place in (one[0][dimension], one[1][dimension]))
    between = [place for place in places if box[0][dimension] < place < box[1][dimension]]
    return between[len(between) // 2]


def _clipped(box: _Box, inside: list[_Box], dimension: int, low: int, high: int) -> tuple[_Box, list[_Box]]:
    """Return the part of a box between two places, and what of the chunks lies in it."""
    cut = [_narrowed(one, dimension, low, high) for one in inside]
    return _narrowed(box, dimension, low, high), [one for one in cut if one[0][dimension] < one[1][dimension]]


def _narrowed(box: _Box, dimension: int, low: int, high: int) -> _Box:
    lows, highs = box
    return (
        (*lows[:dimension], max(lows[dimension], low), *lows[dimension + 1 :]),
        (*highs[:dimension], min(highs[dimension], high), *highs[dimension + 1 :]),
    )
