"""Groups of ranks that hold made-up tensors, for tests of the plan of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fastpersist.dcp.global_plan.assignment import Group
from fastpersist.dcp.global_plan.held_items import HeldTensors, TensorNames, packed_tensors


def item(name: str, size: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> WriteItem:
    """Return the item of a chunk."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(size))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def whole(name: str, *size: int) -> WriteItem:
    """Return the item of a whole tensor."""
    return item(name, size, (0,) * len(size), size)


def held(names: bytes, chunks: bytes) -> HeldTensors:
    """Return what two blobs hold."""
    return HeldTensors.of(TensorNames.of(names), chunks)


def group(ranks: list[int], items: Sequence[WriteItem], sums: dict[str, int] | None = None) -> Group:
    """Return ranks that hold these items."""
    return Group(ranks, held(*packed_tensors(items, {}, sums or {})))
