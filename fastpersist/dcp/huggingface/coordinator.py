"""Finishes the files of a HuggingFace checkpoint on the coordinator: writes the headers, and bytes left by other ranks.

Ranks leave two kinds of bytes to the coordinator: partial pages, if ranks of several machines would write to them, and
tensors of many short runs that could not go through `shared_windows`. Each rank puts these bytes into a scratch file.
Everything else is already written (`model_part`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fastpersist import _native
from fastpersist.commit.filesystem import filesystem
from fastpersist.dcp.huggingface.crc_terms import crc_of_zeros
from fastpersist.dcp.huggingface.layout import ModelLayout, Run, in_file_order, runs_of
from fastpersist.dcp.huggingface.model_part import ModelPart, said_of, scratch_engine, submit_runs
from fastpersist.formats import safetensors
from fastpersist.transfer.tensor_file import TensorFile
from fastpersist.transfer.tensor_memory import byte_view, crc32_of
from fastpersist.transfer.tensor_requests import PendingIO

__all__ = ["finish_files"]

_WINDOW_BYTES = 16 << 20
"""How many bytes of a tensor are put together at a time."""


def finish_files(
    layout: ModelLayout,
    parts: Sequence[ModelPart],
    items: Sequence[Sequence[WriteItem]],
    results: Iterable[WriteResult],
    *,
    engine: str,
    durable: bool,
) -> Iterator[tuple[str, int, int]]:
    """Write what the ranks have left, and the headers that make the files readable.

    Args:
        layout: The layout of the model.
        parts: The parts of all ranks, by rank.
        items: The items of all ranks, by rank.
        results: The results of all ranks, as `write_model_part` returns them.
        engine: Engine name or "auto".
        durable: Sync the files.

    Yields:
        Name, length and CRC of each file, when it is finished.

    Raises:
        StorageError: A file could not be written, or what a rank has left not be read.
    """
    crcs = {name: crc_of_zeros(place.size_bytes) for name, place in layout.places.items()}
    for result in results:
        crcs[result.index.fqn] ^= result.storage_data
    left = [_Left(part, own, engine) for part, own in zip(parts, items, strict=True)]
    try:
        for file, (name, header) in enumerate(zip(layout.names, layout.headers, strict=True)):
            path = os.path.join(parts[0].directory, name)
            with said_of(parts[0], file, ()), TensorFile(path, "r+", engine=engine) as out:
                for rank_left in left:
                    rank_left.write_edges(file, out)
                entries = header.header.entries
                for entry in entries:
                    if layout.places[entry.name].gathered:
                        crcs[entry.name] = _put_together(entry, left, out)
                own_crcs = [crcs[entry.name] for entry in entries]
                text = safetensors.encode_header(header, own_crcs)
                out.write(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
                if durable:
                    out.sync()
            file_crc = _native.crc32(text)
            for entry, crc in zip(entries, own_crcs, strict=True):
                file_crc = _native.combine_crc32(file_crc, crc, entry.size_bytes)
            yield name, layout.size_bytes(file), file_crc
        for rank_left in left:
            rank_left.remove()
    finally:
        for rank_left in left:
            rank_left.close()


@dataclass(frozen=True, slots=True)
class _Box:
    """A chunk of a tensor in a scratch file."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    scratch_bytes: int


class _Left:
    """The bytes that a rank has left in its scratch file."""

    def __init__(self, part: ModelPart, items: Iterable[WriteItem], engine: str) -> None:
        self._path = part.scratch_path
        self._engine = engine
        self._file: TensorFile | None = None
        self._edges: dict[int, list[Run]] = {}
        self.boxes: dict[str, list[_Box]] = {}
        position = 0
        for item in in_file_order(items, part.places):
            place, data = part.places[item.index.fqn], item.tensor_data
            for _, size_bytes, offset_bytes in runs_of(item, place, part.unit_bytes).left:
                if place.gathered and data is not None:
                    box = _Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype, position)
                    self.boxes.setdefault(item.index.fqn, []).append(box)
                else:
                    self._edges.setdefault(place.file, []).append((position, size_bytes, offset_bytes))
                position += size_bytes
        self._size_bytes = position

    def write_edges(self, file: int, out: TensorFile) -> None:
        """Write the edges of tensors whose other bytes the rank has written itself."""
        edges = self._edges.get(file, [])
        while edges:
            some, edges = _first_of(edges)
            start, (last, last_bytes, _) = some[0][0], some[-1]
            data = self.read(start, last + last_bytes - start)
            parts = [(data.data_ptr() + at - start, size_bytes, place) for at, size_bytes, place in some]
            submit_runs(out, parts, data).result()

    def read(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Read bytes of the scratch file."""
        if self._file is None:
            self._file = TensorFile(self._path, engine=scratch_engine(self._engine))
        data = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        self._file.read(data, offset_bytes)
        return data

    def close(self) -> None:
        """Close the scratch file."""
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """Remove the scratch file, if there is one: everything in the directory becomes part of the checkpoint."""
        self.close()
        if self._size_bytes:
            filesystem().unlink(self._path)


def _first_of(edges: list[Run]) -> tuple[list[Run], list[Run]]:
    """Split off as many edges as may be in memory at once."""
    end = next((n for n, edge in enumerate(edges) if edge[0] - edges[0][0] >= _WINDOW_BYTES), len(edges))
    return edges[:end], edges[end:]


def _put_together(entry: safetensors.Entry, left: Sequence[_Left], out: TensorFile) -> int:
    """Write a tensor of which the ranks have left all chunks, piece by piece; return its CRC."""
    boxes = [(rank_left, box) for rank_left in left for box in rank_left.boxes.get(entry.name, ())]
    dtype, shape, crc, offset_bytes = boxes[0][1].dtype, entry.torch_shape, 0, entry.offset_bytes
    # The first dimension that can be cut: in any chunk, too, each index of it lies in one piece.
    cut = next(dimension for dimension, length in enumerate(shape) if length > 1)
    step = max(1, _WINDOW_BYTES // (entry.size_bytes // shape[cut]))
    pending: PendingIO | None = None
    for first in range(0, shape[cut], step):
        end = min(first + step, shape[cut])
        window = torch.empty((*shape[:cut], end - first, *shape[cut + 1 :]), dtype=dtype, device="cpu")
        for rank_left, box in boxes:
            low, high = max(first, box.offsets[cut]), min(end, box.offsets[cut] + box.lengths[cut])
            if low >= high:
                continue
            lengths = (*box.lengths[:cut], high - low, *box.lengths[cut + 1 :])
            row_bytes = math.prod(lengths[cut + 1 :]) * dtype.itemsize
            own = rank_left.read(box.scratch_bytes + (low - box.offsets[cut]) * row_bytes, (high - low) * row_bytes)
            target = window.narrow(cut, low - first, high - low)
            for dimension in range(cut + 1, len(lengths)):
                target = target.narrow(dimension, box.offsets[dimension], lengths[dimension])
            target.copy_(own.view(dtype).view(lengths))
        if pending is not None:
            pending.result()
        data = byte_view(window)
        pending = out.write_async(data, offset_bytes)
        crc = crc32_of(data, crc)
        offset_bytes += data.numel()
    if pending is not None:
        pending.result()
    return crc
