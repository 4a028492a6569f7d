"""Reads tensors from the shards of a torch.distributed.checkpoint: rows of the whole tensor, from all parts.

`.metadata` says which box of a tensor lies where; `dcp.part_reader` reads any box of any writer's parts. Rows are whole
along all dimensions but the first, so the memory that they take does not depend on the sharding.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from fastpersist.dcp.blobs import QUANTIZED
from fastpersist.dcp.coverage import require_covered
from fastpersist.dcp.load_state import verify_files
from fastpersist.dcp.metadata import METADATA_NAME, read_metadata
from fastpersist.dcp.part_reader import PartReader, Wanted
from fastpersist.errors import CorruptionError, FormatError, UnsupportedError
from fastpersist.formats import torch_zip
from fastpersist.formats.manifest import FileEntry
from fastpersist.formats.pickle_scan import scan_pickle
from fastpersist.formats.pickle_values import iter_values

__all__ = ["Shards"]

_Box = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Offsets, sizes, and where the blob of it lies."""


class Shards:
    """The tensors and objects of a sharded checkpoint.

    Args:
        directory: The directory that holds `.metadata` and the parts.
        engine: "auto", or an engine's name.
        stack: Closes the parts that were opened.
        files: The files that the manifest lists, if there is a manifest.

    Attributes:
        tensors: Dtype and shape of each whole tensor, by name.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError, StorageError: The metadata are missing or not valid.

    Thread safety: one thread at a time.
    """

    def __init__(self, directory: str, *, engine: str, stack: ExitStack, files: Sequence[FileEntry] = ()) -> None:
        path = os.path.join(directory, METADATA_NAME)
        metadata, _ = read_metadata(path)
        require_covered(metadata.state_dict_metadata, path)
        self._directory, self._engine, self._stack = directory, engine, stack
        self._parts: dict[str, PartReader] = {}
        self._checked = {entry.name: entry for entry in files if entry.crc32 is not None}
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        try:
            self._boxes = _boxes_by_name(metadata)
            for name, described in metadata.state_dict_metadata.items():
                if isinstance(described, TensorStorageMetadata):
                    self.tensors[name] = described.properties.dtype, tuple(described.size)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"its metadata cannot be read: {error!r}", path=path) from error
        self._objects = [
            name for name, what in metadata.state_dict_metadata.items() if isinstance(what, BytesStorageMetadata)
        ]

    def is_plain(self, name: str) -> bool:
        """Tell whether rows of a tensor can be read."""
        return self.tensors[name][0] not in QUANTIZED

    def verify(self, names: Iterable[str]) -> int:
        """Read the parts with these tensors, and compare them with the CRCs of the manifest.

        Returns:
            The number of these tensors that lie in parts with a CRC.

        Raises:
            ChecksumError: A part, or the metadata, are damaged.
            StorageError: One cannot be read.
        """
        parts_of = [{info.relative_path for _, _, info in self._boxes.get(name, ())} for name in names]
        read = {METADATA_NAME}.union(*parts_of)
        verify_files(
            self._directory, [self._checked[name] for name in sorted(read & self._checked.keys())], self._engine
        )
        return sum(bool(parts) and parts <= self._checked.keys() for parts in parts_of)

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Read rows of a tensor: those from `first` to before `end`; of a scalar all there is.

        Raises:
            CheckpointNotFoundError, CorruptionError, FormatError, StorageError, UnsupportedError: See `PartReader`.
        """
        dtype, shape = self.tensors[name]
        target = torch.empty((end - first, *shape[1:]) if shape else (), dtype=dtype)
        wanted: dict[str, list[Wanted]] = {}
        for offsets, sizes, info in self._boxes[name]:
            own_first = max(first, offsets[0]) if shape else 0
            own_end = min(end, offsets[0] + sizes[0]) if shape else 1
            if own_first >= own_end:
                continue
            box, inside, lengths = target, offsets, sizes
            if shape:
                inside = (own_first - offsets[0], *(0 for _ in offsets[1:]))
                lengths = (own_end - own_first, *sizes[1:])
                box = _narrowed(target, (own_first - first, *offsets[1:]), lengths)
            stored = dtype, sizes
            one = Wanted(name, info.offset, info.length, stored, inside, lengths, box, lambda _: None)
            wanted.setdefault(info.relative_path, []).append(one)
        for part, items in wanted.items():
            self._part(part).read(sorted(items, key=lambda item: item.offset_bytes))
        return target

    def values(self) -> Iterator[tuple[str, str]]:
        """Name what is no tensor, as text; see `iter_values`."""
        for name in self._objects:
            for _, _, info in self._boxes[name]:
                for own_name, text in _values_in(self._bytes(name, info)):
                    yield (f"{name}.{own_name}" if own_name and not own_name.startswith("[") else name + own_name), text

    def _bytes(self, name: str, info: Any) -> bytes:
        found: list[bytes] = []
        self._part(info.relative_path).read([Wanted(name, info.offset, info.length, None, (), (), None, found.append)])
        return b"".join(found)

    def _part(self, name: str) -> PartReader:
        if name not in self._parts:
            reader = PartReader(self._directory, name, engine=self._engine, verify=False)
            self._parts[name] = self._stack.enter_context(reader)
        return self._parts[name]


def _boxes_by_name(metadata: Metadata) -> dict[str, list[_Box]]:
    """Return the boxes of each tensor, and the one place of each object."""
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in (metadata.storage_data or {}).items():
        places[index.fqn, tuple(index.offset or ())] = info
    boxes: dict[str, list[_Box]] = {}
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            for chunk in described.chunks:
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                boxes.setdefault(name, []).append((offsets, sizes, places[name, offsets]))
        else:
            boxes[name] = [((), (), places[name, ()])]
    return boxes


def _narrowed(target: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dimension, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        target = target.narrow(dimension, start, length)
    return target


def _values_in(data: bytes) -> Iterator[tuple[str, str]]:
    """Name the values in what torch.save wrote of an object."""
    try:
        directory = torch_zip.read_directory(lambda at, size: data[at : at + size], len(data), path="an object")
        entry = directory.entries["data.pkl"]
        pickled = data[entry.data_offset_bytes : entry.data_offset_bytes + entry.size_bytes]
        yield from iter_values(scan_pickle(pickled).root)
    except (CorruptionError, KeyError, UnsupportedError):
        yield "", f"an object of {len(data)} bytes"
