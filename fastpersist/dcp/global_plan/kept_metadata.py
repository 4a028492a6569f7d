"""Pickles DCP's `.metadata` once for a plan: the next save by that plan writes the same bytes with another end.

Pickling a million items takes ten seconds and a gigabyte. From save to save, only two things change: the identity of
the save, and the places of objects, whose pickles may have other lengths. Here, both are at the end:

    body    the tensors, the paths, DCP's version, and where each tensor's chunks lie
    end     where the objects lie, in the same dict; the save

The body is a pickle of torch's own Metadata that is cut before its dict of places is complete. The end is pickled
without references into the body. To any unpickler, the whole is one pickle of a Metadata.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from fastpersist.dcp.global_plan.assignment import WHOLE, WholePlan
from fastpersist.dcp.metadata import pickled_unframed
from fastpersist.dcp.part_writer import part_name
from fastpersist.errors import InternalError
from fastpersist.transfer.garbage import no_garbage_collection

__all__ = ["KeptMetadata", "metadata_of"]

_FRAME_BYTES = 9  # the opcode FRAME and a length
_SETITEMS_BUILD_STOP = b"ub."
_PIECE_COUNT = 1000  # entries that one SETITEMS of the end takes, as in Python's pickler


class KeptMetadata:
    """Writes the metadata of saves by one plan; on the coordinator. One thread at a time.

    Args:
        plan: The plan of all ranks.

    Attributes:
        places: For each rank, the packed offsets and lengths of its tensors in the last save; None before one.
    """

    def __init__(self, plan: WholePlan) -> None:
        self.places: list[bytes] | None = None
        self._plan = plan
        self._body = b""

    def pickle(
        self, places: list[bytes], object_places: Sequence[Sequence[tuple[int, int]]], meta: StorageMeta
    ) -> bytes:
        """Return the bytes of the metadata.

        Args:
            places: For each rank, the packed offsets and lengths of its tensors.
            object_places: For each rank, the offset and length of each of its objects.
            meta: DCP's storage metadata of this save.
        """
        if places != self.places or not self._body:
            self.places = None
            self._body = _body_of(self._plan, places)
            self.places = places
        return b"".join([self._body, *_end_of(self._plan, object_places, meta)])


@no_garbage_collection()
def _body_of(plan: WholePlan, places: Sequence[bytes]) -> bytes:
    metadata = metadata_of(plan)
    infos: dict[Any, Any] = {}
    for rank, (indexes, packed) in enumerate(zip(_indexes_of(plan, metadata), places, strict=True)):
        numbers, name = array("Q", packed), part_name(rank)
        for index, offset_bytes, size_bytes in zip(indexes, numbers[::2], numbers[1::2], strict=True):
            infos[index] = _StorageInfo(name, offset_bytes, size_bytes)
    state = vars(metadata)
    del state["storage_meta"], state["storage_data"]
    state["storage_data"] = infos  # the last one: after it come SETITEMS and BUILD of the metadata, and STOP
    data = pickled_unframed(metadata)
    if not data.endswith(_SETITEMS_BUILD_STOP):
        raise InternalError("this Python pickles an object in another way than those known")
    return data[: -len(_SETITEMS_BUILD_STOP)]


def _indexes_of(plan: WholePlan, metadata: Metadata) -> list[list[MetadataIndex]]:
    """Return by rank the indexes of the tensors that it writes, with the very offsets that the metadata have."""
    described: Any = metadata.state_dict_metadata
    counts: dict[str, int] = {}
    found = []
    for held, share in zip(plan.held_by(), plan.shares, strict=True):
        names, name_of = held.described.names, held.described.name_of
        indexes = []
        for item in share.items:
            name = names[name_of[item]]
            number = counts.get(name, 0)
            counts[name] = number + 1
            index = MetadataIndex(name, None, number)
            # As MetadataIndex makes it, except for the copy of the offsets: the pickler writes one object once.
            object.__setattr__(index, "offset", described[name].chunks[number].offsets)
            indexes.append(index)
        found.append(indexes)
    return found


def _end_of(plan: WholePlan, object_places: Sequence[Sequence[tuple[int, int]]], meta: StorageMeta) -> list[bytes]:
    entries = [
        _fragment(MetadataIndex(name)) + _fragment(_StorageInfo(part_name(rank), *place))
        for rank, (share, places) in enumerate(zip(plan.shares, object_places, strict=True))
        for name, place in zip(share.objects, places, strict=True)
    ]
    pieces = []
    for first in range(0, len(entries), _PIECE_COUNT):
        pieces += [b"(", *entries[first : first + _PIECE_COUNT], b"u"]
    return [*pieces, _fragment("storage_meta"), _fragment(meta), _SETITEMS_BUILD_STOP]


def _fragment(value: object) -> bytes:
    """Return the opcodes that make a value, for the middle of a pickle: without header, memo, frame and end."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True  # no memo, whose numbers would be those of the body
    pickler.dump(value)
    data = file.getvalue()[2:-1]
    return data[_FRAME_BYTES:] if data[:1] == pickle.FRAME else data


@no_garbage_collection()
def metadata_of(plan: WholePlan) -> Metadata:
    """Return what is saved, without where it lies, in the order of the state."""
    described: dict[str, Any] = {}
    for held, share in zip(plan.held_by(), plan.shares, strict=True):
        names, name_of = held.described.names, held.described.name_of
        for item, first_row, row_count in zip(share.items, share.first_rows, share.row_counts, strict=True):
            name = names[name_of[item]]
            one = described.get(name)
            if one is None:
                data: Any = held.kind(item).tensor_data
                one = described[name] = TensorStorageMetadata(data.properties, data.size, [])
            offsets, lengths = held.place(item)
            if first_row != WHOLE:
                offsets, lengths = (offsets[0] + first_row, *offsets[1:]), (row_count, *lengths[1:])
            one.chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(lengths)))
        for name in share.objects:
            described[name] = BytesStorageMetadata()
    names = [name for name in plan.paths if name in described]
    names += [name for name in described if name not in plan.paths]
    metadata = Metadata({name: described[name] for name in names}, planner_data=plan.paths)
    if hasattr(metadata, "version"):  # not before torch 2.9
        metadata.version = dcp_filesystem.CURRENT_DCP_VERSION
    return metadata
