"""Packs what a rank holds of a state into columns of numbers: DCP's WriteItem takes 1 to 2 KB, pickled or not.

Tensors are described in two blobs, so that content which is equal on many ranks is sent and kept once:

    names    the names with their paths; which name, shape and dtype each item has: alike where ranks hold shards
    chunks   where each item lies in its tensor, and the sum of its samples: alike where ranks hold replicas

Objects, which may have a name of their own on each rank, are only names. The blobs are pickles that are read without
running what they name (`metadata.build_pickled`), and each number in them is checked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fastpersist.dcp.metadata import build_pickled, pickled
from fastpersist.errors import ConfigError, FormatError
from fastpersist.transfer.garbage import no_garbage_collection

__all__ = ["NO_SUM", "HeldTensors", "TensorNames", "from_runs", "packed_tensors", "runs_of"]

NO_SUM = -1
"""In place of the sum of a tensor that was not sampled."""


@dataclass(frozen=True)
class TensorNames:
    """Names and kinds of numbered items.

    Attributes:
        names: The names, each once.
        paths: The path of each name in the state.
        name_of: For each item, the number of its name.
        kind_of: For each item, the number of its kind.
        kinds: Items without name and chunk, each for all items of the same type, shape and properties.
        starts: For each item, where its numbers begin in `HeldTensors.places`; and where those of the last one end.
    """

    names: list[str]
    paths: dict[str, Any]
    name_of: array[int]
    kind_of: array[int]
    kinds: list[WriteItem]
    starts: array[int]

    @classmethod
    def of(cls, blob: bytes) -> TensorNames:
        """Read what `packed_tensors` has made.

        Raises:
            FormatError: The bytes are something else.
        """
        read = build_pickled(blob)
        if type(read) is not tuple or tuple(map(type, read)) != (list, dict, bytes, bytes, list):
            raise FormatError("these are no names of tensors")
        names, paths, name_of, kind_of = read[0], read[1], _column("I", read[2]), _column("I", read[3])
        kinds = read[4]
        if {*map(type, names)} - {str} or len(set(names)) != len(names) or {*map(type, kinds)} - {WriteItem}:
            raise FormatError("these are no names of tensors")
        if any(kind.tensor_data is None for kind in kinds) or len(name_of) != len(kind_of):
            raise FormatError("these names do not describe their tensors")
        if len({*name_of}) != len(names) or max(name_of, default=-1) >= len(names):
            raise FormatError("a name in it has no item, or an item has no name")
        if max(kind_of, default=-1) >= len(kinds):
            raise FormatError("an item in it is of no kind")
        return cls(names, paths, name_of, kind_of, kinds, _starts(kind_of, kinds))


@dataclass(frozen=True)
class HeldTensors:
    """The tensors that some ranks hold alike.

    Attributes:
        described: The names and kinds of the tensors.
        places: For each item, its first element in each dimension, and then its length in each dimension.
        sums: For each name, the sum of its samples, or NO_SUM.
    """

    described: TensorNames
    places: array[int]
    sums: array[int]

    @classmethod
    def of(cls, described: TensorNames, blob: bytes) -> HeldTensors:
        """Read what `packed_tensors` has made.

        Raises:
            FormatError: The bytes are something else, or do not go with these names.
        """
        read = build_pickled(blob)
        if type(read) is not tuple or tuple(map(type, read)) != (bytes, bytes):
            raise FormatError("these are no chunks of tensors")
        held = cls(described, _column("q", read[0]), _column("q", read[1]))
        if len(held.places) != described.starts[-1] or len(held.sums) != len(described.names):
            raise FormatError("these are chunks of other tensors")
        shapes = [tuple(kind.tensor_data.size) for kind in described.kinds]  # type: ignore[union-attr]
        for item, kind in enumerate(described.kind_of):
            offsets, lengths = held.place(item)
            if any(
                offset < 0 or length < 0 or offset + length > whole
                for offset, length, whole in zip(offsets, lengths, shapes[kind], strict=True)
            ):
                raise FormatError(f"a chunk of {described.names[described.name_of[item]]!r} lies outside of it")
        return held

    def __len__(self) -> int:
        return len(self.described.name_of)

    def place(self, item: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offsets and lengths of an item."""
        start, end = self.described.starts[item], self.described.starts[item + 1]
        middle = (start + end) // 2
        return tuple(self.places[start:middle]), tuple(self.places[middle:end])

    def kind(self, item: int) -> WriteItem:
        """Return the kind of an item."""
        return self.described.kinds[self.described.kind_of[item]]

    def sums_of_items(self) -> Iterator[int]:
        """Return the sum of each item; NO_SUM if a rank holds several items of one name, since the sum covers all."""
        counts = array("I", bytes(4 * len(self.sums)))
        for name in self.described.name_of:
            counts[name] += 1
        return (self.sums[name] if counts[name] == 1 else NO_SUM for name in self.described.name_of)


@no_garbage_collection()
def packed_tensors(
    items: Sequence[WriteItem], paths: Mapping[str, Any], sums: Mapping[str, int]
) -> tuple[bytes, bytes]:
    """Pack the tensors that a rank holds.

    Args:
        items: The items of the tensors.
        paths: The paths of all names in the state.
        sums: The sums of the samples, by name.

    Returns:
        The names and the chunks.

    Raises:
        ConfigError: An item says that it lies elsewhere than its chunk does, which nothing could load.
    """
    names: dict[str, int] = {}
    kinds: dict[object, int] = {}
    templates: list[WriteItem] = []
    name_of, kind_of, places = array("I"), array("I"), array("q")
    for item in items:
        data: Any = item.tensor_data
        if tuple(item.index.offset or ()) != tuple(data.chunk.offsets):
            raise ConfigError(f"an item of {item.index.fqn!r} is planned at {item.index.offset}: {data.chunk}")
        name_of.append(names.setdefault(item.index.fqn, len(names)))
        number = kinds.setdefault(_kind_key(item), len(kinds))
        if number == len(templates):
            templates.append(_template(item))
        kind_of.append(number)
        places.extend(data.chunk.offsets)
        places.extend(data.chunk.sizes)
    own_paths = {name: paths[name] for name in names if name in paths}
    own_sums = array("q", (sums.get(name, NO_SUM) for name in names))
    return (
        pickled((list(names), own_paths, name_of.tobytes(), kind_of.tobytes(), templates)),
        pickled((places.tobytes(), own_sums.tobytes())),
    )


def _kind_key(item: WriteItem) -> object:
    data: Any = item.tensor_data
    properties = data.properties
    return (
        item.type,
        tuple(data.size),
        properties.dtype,
        properties.layout,
        properties.requires_grad,
        properties.memory_format,
        properties.pin_memory,
    )


def _template(item: WriteItem) -> WriteItem:
    data: Any = item.tensor_data
    none = torch.Size([0] * len(data.size))
    chunk = ChunkStorageMetadata(offsets=none, sizes=none)
    data = TensorWriteData(chunk=chunk, properties=data.properties, size=data.size)
    return WriteItem(index=MetadataIndex(""), type=WriteItemType(item.type), tensor_data=data)


def _starts(kind_of: Sequence[int], kinds: Sequence[WriteItem]) -> array[int]:
    widths = [2 * len(kind.tensor_data.size) for kind in kinds]  # type: ignore[union-attr]
    return array("Q", accumulate((widths[kind] for kind in kind_of), initial=0))


def _column(code: str, data: bytes) -> array[int]:
    try:
        return array(code, data)
    except ValueError as error:
        raise FormatError("a column of numbers in it is cut off") from error


def runs_of(numbers: Sequence[int]) -> bytes:
    """Pack mostly consecutive numbers: each run as its first number and its length."""
    runs = array("I")
    for number in numbers:
        if runs and runs[-2] + runs[-1] == number:
            runs[-1] += 1
        else:
            runs.extend((number, 1))
    return runs.tobytes()


def from_runs(data: bytes, limit: int) -> list[int]:
    """Unpack what `runs_of` has packed.

    Args:
        data: The bytes.
        limit: A number that is larger than each number in them.

    Raises:
        FormatError: The bytes are something else, or there are more numbers than below the limit.
    """
    runs = _column("I", data)
    if len(runs) % 2 or sum(runs[1::2]) > limit:
        raise FormatError("these are no numbers of items")
    numbers = [
        number for first, count in zip(runs[::2], runs[1::2], strict=True) for number in range(first, first + count)
    ]
    if numbers and max(numbers) >= limit:
        raise FormatError("a number in it is of no item")
    return numbers
