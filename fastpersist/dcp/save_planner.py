"""A DCP save planner that cuts large replicated tensors, so that each of their holders writes a part.

DCP's own planner gives each replicated tensor to one rank as a whole, so one large embedding keeps one rank busy. This
planner cuts it along its first dimension before DCP removes duplicates, and each holder keeps some of the chunks. To
readers these are chunks of a sharded tensor, which every reader of DCP puts together.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from fastpersist.dcp.plan_comparison import CUT_TENSOR_BYTES_MIN, GetSums, StagedMeta, compared, with_samples
from fastpersist.errors import InternalError

__all__ = ["FastPersistSavePlanner", "StepSavePlanner", "cut_replicas", "is_object", "rows_of"]

_CUT_BYTES_MIN = CUT_TENSOR_BYTES_MIN // 2
"""The least bytes of a chunk. DCP gives smaller tensors to one of their holders."""


class FastPersistSavePlanner(DefaultSavePlanner):
    """Plans a save as DCP's DefaultSavePlanner does, but lets all ranks that hold a large tensor write a part of it.

    Takes the arguments of DefaultSavePlanner; with dedup_save_to_lowest_rank=True nothing is cut.

    One name is one tensor on all ranks. Samples are compared of what would be cut, of what lies in an optimizer's
    state_dict, and of chunks of DTensors that several ranks hold: if two tensors have one name, dcp.save raises a
    CheckpointException with a CoordinationError that names tensor and ranks. Of other plain tensors and of objects, one
    rank's is saved, as with DefaultSavePlanner. dcp.async_save compares the values at the time of its call.
    """

    _held: dict[str, list[WriteItem]] = {}  # noqa: RUF012 - replaced, never changed
    _compares = True
    _get_sums: GetSums | None = None
    _unfinished: ClassVar[set[str]] = set()  # keys of cached plans whose last save did not finish

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a save; called by dcp.save."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._get_sums = storage_meta.get_sums if isinstance(storage_meta, StagedMeta) else None

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank holds; called by dcp.save."""
        if self._enable_plan_caching:
            if self._cached_plans_key in self._unfinished:  # the coordinator may not have cached that plan
                self._cached_save_plan.pop(self._cached_plans_key, None)
            self._unfinished.add(self._cached_plans_key)
        plan: SavePlan = super().create_local_plan()
        held: dict[str, list[WriteItem]] = {}
        for item in self.plan.items:  # `plan` is empty if it is that of the last save
            held.setdefault(item.index.fqn, []).append(item)
        self._held = held
        if not self._compares:
            return plan
        are_cut = not self.dedup_save_to_lowest_rank
        return with_samples(plan, held, self.state_dict, self.mappings, are_cut=are_cut, get_sums=self._get_sums)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan what each rank writes; called by dcp.save on the coordinator.

        Raises:
            CoordinationError: Two ranks hold two tensors under one name.
        """
        planned, metadata = super().create_global_plan(compared(all_plans))
        if self._enable_plan_caching:
            # A rank that sends a plan gets one: after a save that failed, its plan may be cached here, and not there.
            own = zip(all_plans, planned, self.global_plan, strict=True)
            planned = [whole if sent.usable else change for sent, change, whole in own]
        return planned, metadata

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if not self.dedup_save_to_lowest_rank:
            all_plans = cut_replicas(all_plans)
        return super()._create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the plan of what this rank writes; called by dcp.save."""
        self._unfinished.discard(self._cached_plans_key)
        # A cached plan has the directory of the last save, not of this one.
        self.plan = dataclasses.replace(super().finish_plan(new_plan), storage_data=new_plan.storage_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item: of a tensor that was cut, the rows of this chunk."""
        source = self._cut_from(write_item)
        if source is None:
            return super().resolve_data(write_item)
        whole = super().resolve_data(source)
        if not isinstance(whole, torch.Tensor):
            raise InternalError(f"{source.index.fqn!r} is planned as a tensor, and is none")
        chunk, first = _chunk_of(write_item), _chunk_of(source).offsets[0]
        return whole.narrow(0, chunk.offsets[0] - first, chunk.sizes[0])

    def _cut_from(self, write_item: WriteItem) -> WriteItem | None:
        """Return the item of this rank that a chunk was cut from; None if it was not cut."""
        held = self._held.get(write_item.index.fqn, [])
        if write_item.tensor_data is None or not held:
            return None
        chunk = _chunk_of(write_item)
        for item in held:
            if item.tensor_data is not None and _contains(_chunk_of(item), chunk):
                return None if _chunk_of(item) == chunk else item
        raise InternalError(f"this rank is to write a chunk of {write_item.index.fqn!r} that it does not hold: {chunk}")


class StepSavePlanner(FastPersistSavePlanner):
    """Plans the save of a step, which must load without a target.

    So sparse, quantized and nested tensors are saved as objects: DCP's metadata do not tell how to make such tensors.
    `plan_agreement` compares what ranks hold alike.
    """

    _compares = False

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank holds."""
        state = self.state_dict
        self.state_dict = {name: _OBJECT if is_object(value) else value for name, value in state.items()}
        try:
            return super().create_local_plan()
        finally:
            self.state_dict = state


def is_object(value: object) -> bool:
    """Tell whether a tensor of a step is saved as an object: a sparse, quantized or nested one."""
    if not isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
        return False
    return not isinstance(value, ShardedTensor) and (
        value.layout is not torch.strided or value.is_quantized or value.is_nested
    )


_OBJECT = object()
"""Takes the place of such a tensor while DCP plans, so that it plans an object."""


def _chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    return item.tensor_data.chunk  # type: ignore[union-attr]


def _contains(outer: ChunkStorageMetadata, inner: ChunkStorageMetadata) -> bool:
    return all(
        first <= own and own + size <= first + length
        for first, length, own, size in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def cut_replicas(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Cut large tensors that several plans have into chunks, one for each of these plans, or for some of them.

    Args:
        plans: The plan of each rank, with all that the rank holds.

    Returns:
        The plans with chunks in place of what was cut. Small tensors, and those that differ, stay as they are.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    alike: dict[MetadataIndex, bool] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            first = items.setdefault(item.index, item)
            holders.setdefault(item.index, []).append(rank)
            alike[item.index] = alike.get(item.index, True) and _is_alike(first, item)
    loads_bytes = [0] * len(plans)
    for index, item in items.items():
        if len(holders[index]) == 1:
            loads_bytes[holders[index][0]] += _size_bytes(item)
    chunks: dict[MetadataIndex, dict[int, WriteItem]] = {}
    for index, item in sorted(items.items(), key=lambda entry: -_size_bytes(entry[1])):
        size_bytes = _size_bytes(item)
        row_count = _chunk_of(item).sizes[0] if size_bytes and _chunk_of(item).sizes else 0
        count = min(len(holders[index]), size_bytes // _CUT_BYTES_MIN, row_count)
        if count < 2 or not alike[index]:
            continue
        ranks = sorted(holders[index], key=lambda rank: loads_bytes[rank])[:count]
        chunks[index] = dict(zip(ranks, _cut(item, count), strict=True))
        for rank in ranks:
            loads_bytes[rank] += size_bytes // count
    return [
        dataclasses.replace(
            plan,
            items=[
                item if item.index not in chunks else chunks[item.index][rank]
                for item in plan.items
                if item.index not in chunks or rank in chunks[item.index]
            ],
        )
        for rank, plan in enumerate(plans)
    ]


def _is_alike(one: WriteItem, other: WriteItem) -> bool:
    if one.tensor_data is None or other.tensor_data is None:
        return False
    first, second = one.tensor_data, other.tensor_data
    return (first.chunk, first.size, first.properties.dtype) == (second.chunk, second.size, second.properties.dtype)


def _size_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _cut(item: WriteItem, count: int) -> list[WriteItem]:
    """Cut an item along its first dimension."""
    row_count = _chunk_of(item).sizes[0]
    bounds = [row_count * part // count for part in range(count + 1)]
    return [rows_of(item, start, end - start) for start, end in pairwise(bounds)]


def rows_of(item: WriteItem, first_row: int, row_count: int) -> WriteItem:
    """Return an item of some rows of an item's chunk."""
    whole = _chunk_of(item)
    if not whole.sizes or not 0 <= first_row <= first_row + row_count <= whole.sizes[0]:
        raise ValueError(f"{item.index.fqn!r} does not have rows {first_row} to {first_row + row_count} here")
    offsets = torch.Size((whole.offsets[0] + first_row, *whole.offsets[1:]))
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((row_count, *whole.sizes[1:])))
    data = dataclasses.replace(item.tensor_data, chunk=chunk)  # type: ignore[type-var]
    index = MetadataIndex(item.index.fqn, offsets)
    return dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data)
