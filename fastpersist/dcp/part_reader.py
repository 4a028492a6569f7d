"""Reads tensors from the part files of a DCP checkpoint, ours or those of DCP's own writer, into their targets.

The place of a plain tensor in our parts is computed. Only the wanted elements are read, straight into the target if
they are contiguous in both; head and tail of the blob prove that the tensor lies there. For any other item, both ends
are read first. If it is a contiguous tensor, it is then read in the same way; otherwise it goes through torch.load.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import itertools
import math
import operator
import os
import pickle
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastpersist.commit.filesystem import open_regular
from fastpersist.dcp.blobs import QUANTIZED, Blob, Shape, is_plain, plain_blob
from fastpersist.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    ConfigError,
    CorruptionError,
    FormatError,
    StorageError,
    UnsupportedError,
)
from fastpersist.formats import torch_zip
from fastpersist.formats.byte_ranges import Extent, row_major_strides, runs_of_box
from fastpersist.formats.pickle_scan import SymbolicTensor, iter_tensors, scan_pickle
from fastpersist.transfer.reader import Extents, read_extents

__all__ = ["Batch", "PartReader", "Payload", "Wanted", "load_object", "pieces", "require_place"]

_PART_NAME = re.compile(r"__(\d+)_\d+\.distcp")

_TEMPORARY_BYTES = 64 << 20
"""The most memory that is used beside the targets at a time, unless one item needs more."""

_EXTENT_COUNT = 16384
"""The most places of the file that are read at a time."""

_RUN_BYTES_MIN = 4096
"""Shorter runs are read together with what lies between them, and copied from memory."""

_HEAD_BYTES = 8 << 10
_TAIL_BYTES = 66 << 10
"""Bytes read from another writer's blob to find its tensor: a zip may end with a comment of 64 KiB."""

_LOOK_COUNT = 512
"""The most blobs of other writers that are looked at, at a time."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Something to read from a part.

    Attributes:
        name: The name of the item, for messages.
        offset_bytes: The offset of its blob in the part.
        size_bytes: The length of the blob.
        stored: Dtype and shape of the tensor in it, by the metadata; None where they do not tell.
        offsets: The position of the first wanted element in that tensor, in each dimension.
        lengths: The number of wanted elements, in each dimension.
        target: The tensor to fill; None for bytes.
        done: Called with the bytes; for a tensor with b"", once its target is filled.
    """

    name: str
    offset_bytes: int
    size_bytes: int
    stored: tuple[torch.dtype, Shape] | None
    offsets: Shape
    lengths: Shape
    target: torch.Tensor | None
    done: Callable[[bytes], None]


class PartReader:
    """Reads items of one part file. A context manager; one owner thread.

    Args:
        directory: The directory of the checkpoint.
        name: The name of the part.
        engine: Engine name or "auto".
        verify: Check the CRC of every tensor that is read as a whole.
        inside: Another file that contains the part: its descriptor, which this object closes, and the part's place in
            it. None: the part itself is read.

    Raises:
        CheckpointNotFoundError: The part is missing.
        FormatError: The part is no regular file.
        StorageError: The part cannot be opened.
    """

    def __init__(
        self, directory: str, name: str, *, engine: str, verify: bool, inside: tuple[int, Extent] | None = None
    ) -> None:
        self.path = os.path.join(directory, name)
        self.verify = verify
        self._engine = engine
        self._writer = _writer_of(name)
        try:
            self._fd = open_regular(self.path) if inside is None else inside[0]
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            message = f"{self.path} is missing, which {self._writer} wrote: {directory} is not the whole checkpoint"
            raise CheckpointNotFoundError(errno.ENOENT, message, self.path) from None
        self._place = Extent(0, os.fstat(self._fd).st_size) if inside is None else inside[1]

    @property
    def start_bytes(self) -> int:
        """Where the part begins in the file that is read."""
        return self._place.offset_bytes

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Read items into their targets.

        Args:
            wanted: Best in the order of the file. Consumed while items are read.

        Raises:
            ChecksumError: The bytes of a tensor have changed since they were written.
            CorruptionError: The file is cut off, or holds something else in the place of an item.
            UnsupportedError: torch.load refuses an item.
            StorageError: An error of the disk.
        """
        unknown: list[Wanted] = []
        batch = Batch(self)
        for one in wanted:
            self.check_place(one)
            blob = _expected_blob(one)
            for piece in pieces(one):
                if one.target is None:
                    batch.add_blob(one, functools.partial(self._take, one))
                elif blob is not None:
                    batch.add_own(piece, blob, unknown.append)
                else:
                    unknown.append(piece)
                batch.run_if_full()
        batch.run()
        for first in range(0, len(unknown), _LOOK_COUNT):
            looks = [(one, batch.add_look(one)) for one in unknown[first : first + _LOOK_COUNT]]
            batch.run()
            for one, look in looks:
                with self.errors_of(one):
                    self._add_found(one, look, batch)
                batch.run_if_full()
            batch.run()

    def transfer(self, extents: Extents) -> list[int]:
        """Read extents; return their CRCs."""
        return read_extents(self._fd, self.path, extents, engine=self._engine).crcs if len(extents) else []

    @contextmanager
    def errors_of(self, one: Wanted) -> Iterator[None]:
        """Add to an error of damage in the block which item it is, and which rank wrote it."""
        try:
            yield
        except CorruptionError as error:
            message = f"{one.name!r}, which {self._writer} wrote, is damaged: {error.message}"
            raise type(error)(message, path=self.path, offset_bytes=one.offset_bytes) from None

    def check_place(self, one: Wanted) -> None:
        """Refuse an item that does not lie in the part; see `require_place`."""
        require_place(self.path, one.name, one.offset_bytes, one.size_bytes, self._place.size_bytes)

    def _add_found(self, one: Wanted, look: _Look, batch: Batch) -> None:
        """Add a tensor that its blob describes; an item that is not plain goes through torch.load."""
        try:
            directory = torch_zip.read_directory(look.read_at, one.size_bytes, path=self.path)
            payload = _found_payload(directory, look)
        except UnsupportedError:
            payload = None
        if payload is None:
            batch.add_blob(one, functools.partial(self._load, one))
        else:
            batch.add_found(one, payload)

    def _take(self, one: Wanted, data: bytes) -> None:
        """Deliver the bytes of an item, usually those that torch.save wrote of an object."""
        self._check_records(one, data)
        try:
            with self.errors_of(one):
                one.done(data)
        except CorruptionError:
            raise
        except Exception as error:
            raise UnsupportedError(f"{self.path}: the planner does not take {one.name!r}: {error}") from error

    def _load(self, one: Wanted, data: bytes) -> None:
        self._check_records(one, data)
        with self.errors_of(one):
            try:
                tensor = load_object(io.BytesIO(data), weights_only=True)
            except pickle.UnpicklingError as error:
                raise UnsupportedError(f"{self.path}: torch.load does not load {one.name!r}: {error}") from error
            if not isinstance(tensor, torch.Tensor):
                raise CorruptionError(f"it is a {type(tensor).__name__}, and no tensor")
            _require_part(one, tuple(tensor.shape))
            if tensor.is_quantized != _target_of(one).is_quantized:
                raise FormatError(
                    f"it is a tensor of {tensor.dtype}, which cannot be copied to one of {_target_of(one).dtype}"
                )
        for dimension, (start, length) in enumerate(zip(one.offsets, one.lengths, strict=True)):
            if (start, length) != (0, tensor.size(dimension)):
                tensor = tensor.narrow(dimension, start, length)
        _target_of(one).copy_(tensor)
        one.done(b"")

    def _check_records(self, one: Wanted, data: bytes) -> None:
        """Check the CRCs of a whole zip."""
        if not self.verify or not data.startswith(torch_zip.LOCAL_HEADER_MAGIC):
            return
        with self.errors_of(one):
            try:
                directory = torch_zip.read_directory(
                    lambda offset, size: data[offset : offset + size], len(data), path=self.path
                )
            except UnsupportedError:  # a zip that torch.save did not write
                return
            for entry in directory.entries.values() if directory.has_checksums else ():
                if zlib.crc32(data[entry.data_offset_bytes :][: entry.size_bytes]) != entry.crc:
                    raise ChecksumError(f"its record {entry.name} does not have the recorded checksum")


def _writer_of(name: str) -> str:
    match = _PART_NAME.fullmatch(name)
    return f"rank {match[1]}" if match else "its writer"


def require_place(path: str, name: str, offset_bytes: int, length_bytes: int, part_bytes: int) -> None:
    """Refuse an item that does not lie in its part.

    Args:
        path: The path of the part.
        name: The name of the item.
        offset_bytes: The item's offset, by the metadata.
        length_bytes: The item's length, by the metadata.
        part_bytes: The length of the part.

    Raises:
        CorruptionError: The item begins before the part, or ends behind it.
    """
    if not 0 <= offset_bytes <= offset_bytes + length_bytes <= part_bytes:
        raise CorruptionError(
            f"{name!r}, which {_writer_of(os.path.basename(path))} wrote, ends at {offset_bytes + length_bytes}, and "
            f"the file at {part_bytes}: it was cut off, or is of another checkpoint",
            path=path,
            offset_bytes=offset_bytes,
        )


def load_object(file: io.BytesIO, *, weights_only: bool) -> Any:
    """Load what torch.save wrote of one object or tensor.

    Raises:
        FormatError: With weights_only: torch.load cannot read it. Without, a class may be missing instead.
        pickle.UnpicklingError: weights_only refuses it.
        Exception: Whatever else torch.load raises.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=weights_only)
    except (pickle.UnpicklingError, MemoryError):
        raise
    except Exception as error:
        if not weights_only or "can't allocate memory" in str(error):  # a RuntimeError of torch's
            raise
        raise FormatError(f"torch.load does not read it: {type(error).__name__}: {error}") from error


def _require_part(one: Wanted, shape: Shape) -> None:
    """Refuse a tensor that is not the one that the metadata describe.

    Raises:
        CorruptionError: The tensor has another shape.
    """
    if (one.stored is not None and shape != one.stored[1]) or len(shape) != len(one.lengths):
        stored = "" if one.stored is None else f", which is {one.stored[1]}"
        raise CorruptionError(f"it is a tensor of shape {shape}, and not what the metadata say{stored}")
    for start, length, size in zip(one.offsets, one.lengths, shape, strict=True):
        if start < 0 or start + length > size:
            raise CorruptionError(f"it is a tensor of shape {shape}, and not what the metadata say")


def _target_of(one: Wanted) -> torch.Tensor:
    if one.target is None or tuple(one.target.shape) != one.lengths:
        shape = None if one.target is None else tuple(one.target.shape)
        raise ConfigError(f"the planner wants {one.lengths} elements of {one.name!r}, and gives {shape} for them")
    return one.target


def _expected_blob(one: Wanted) -> Blob | None:
    """Return the blob that we would have written of a plain tensor; None if it cannot be that."""
    if one.stored is None or one.stored[0] in QUANTIZED:
        return None
    if not 0 <= math.prod(one.stored[1]) * one.stored[0].itemsize < one.size_bytes:
        return None
    blob = plain_blob(*one.stored)
    return blob if blob.size_bytes == one.size_bytes else None


# --- tensors in a file


@dataclass(frozen=True, slots=True)
class Payload:
    """A contiguous tensor in a file: where its first element lies, and the CRC of all of it, if one is recorded."""

    offset_bytes: int
    dtype: torch.dtype
    shape: Shape
    crc: int | None = None


class _Look:
    """The first and the last bytes of a blob; the rest is read on demand."""

    def __init__(self, reader: PartReader, one: Wanted) -> None:
        self._reader = reader
        self._one = one
        self._known: list[tuple[int, torch.Tensor]] = []
        self.offset_bytes = one.offset_bytes

    def add(self, offset_bytes: int, data: torch.Tensor) -> None:
        """Add bytes of the blob from this offset on; they are read before `read_at` is called."""
        self._known.append((offset_bytes, data))

    def read_at(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Read from the blob."""
        for first, data in self._known:
            if first <= offset_bytes and offset_bytes + size_bytes <= first + data.numel():
                return _to_bytes(data[offset_bytes - first : offset_bytes - first + size_bytes])
        if offset_bytes < 0 or offset_bytes + size_bytes > self._one.size_bytes:
            raise FormatError("a structure points outside of it")
        batch = Batch(self._reader)
        data = batch.add_bytes(self._one.offset_bytes + offset_bytes, size_bytes)
        batch.run()
        return _to_bytes(data)


def _to_bytes(data: torch.Tensor) -> bytes:
    return ctypes.string_at(data.data_ptr(), data.numel()) if data.numel() else b""  # numpy may be missing


def _found_payload(directory: torch_zip.Directory, look: _Look) -> Payload | None:
    """Return the tensor in a blob if its elements lie there as they do in memory."""
    pickled, order = directory.entries.get("data.pkl"), directory.entries.get("byteorder")
    if pickled is None:
        raise FormatError("there is no data.pkl in it")
    if order is not None and look.read_at(order.data_offset_bytes, order.size_bytes) != sys.byteorder.encode():
        return None
    tensor = _described(look.read_at(pickled.data_offset_bytes, pickled.size_bytes))
    if tensor is None or tensor.storage is None:
        return None
    dtype = getattr(torch, tensor.dtype)
    entry = directory.entries.get(f"data/{tensor.storage.key}")
    first_byte, size_bytes = tensor.storage_offset * dtype.itemsize, math.prod(tensor.shape) * dtype.itemsize
    if entry is None or first_byte + size_bytes > entry.size_bytes:
        raise FormatError("its tensor is larger than its storage")
    crc = entry.crc if directory.has_checksums and size_bytes == entry.size_bytes else None
    return Payload(look.offset_bytes + entry.data_offset_bytes + first_byte, dtype, tensor.shape, crc)


@functools.lru_cache(maxsize=4096)
def _described(pickled: bytes) -> SymbolicTensor | None:
    """Return the tensor that is all of a pickle, if it is dense and contiguous."""
    named = list(iter_tensors(scan_pickle(pickled).root))
    if len(named) != 1 or named[0][0] != "":
        return None
    tensor = named[0][1]
    is_dense = tensor.kind == "dense" and not tensor.is_conj and not tensor.is_neg
    stride = 1
    for length, own_stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        is_dense &= length <= 1 or own_stride == stride
        stride *= max(1, length)
    dtype = vars(torch).get(tensor.dtype)
    return tensor if is_dense and isinstance(dtype, torch.dtype) and dtype not in QUANTIZED else None


# --- parts of tensors


def _covered_count(lengths: Shape, strides: Shape) -> int:
    """Return the elements from the first of a box to its last."""
    return 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def pieces(one: Wanted) -> Iterator[Wanted]:
    """Cut an item whose runs would be read with too much between them, so that it takes less memory."""
    if one.stored is None or one.target is None or not all(one.lengths):
        yield one
        return
    dtype, shape = one.stored
    cut = next((dimension for dimension, length in enumerate(one.lengths) if length > 1), None)
    _, run = runs_of_box(shape, one.lengths)
    covered_bytes = _covered_count(one.lengths, row_major_strides(shape)) * dtype.itemsize
    if cut is None or covered_bytes <= _TEMPORARY_BYTES or run * dtype.itemsize >= _RUN_BYTES_MIN:
        yield one
        return
    target = _target_of(one)
    half = one.lengths[cut] // 2
    for start, length in ((0, half), (half, one.lengths[cut] - half)):
        offsets = (*one.offsets[:cut], one.offsets[cut] + start, *one.offsets[cut + 1 :])
        lengths = (*one.lengths[:cut], length, *one.lengths[cut + 1 :])
        done = one.done if start else _nothing
        narrow = target.narrow(cut, start, length)
        yield from pieces(replace(one, offsets=offsets, lengths=lengths, target=narrow, done=done))


def _nothing(_: bytes) -> None:
    """Do nothing for a piece that is not the last."""


class Batch:
    """A batch of reads, and the work to do afterwards."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader
        self._begin()

    def _begin(self) -> None:
        self._extents = Extents()
        self._steps: list[Callable[[list[int]], None]] = []
        self._straight: list[torch.Tensor] = []  # targets that are read into
        self._bytes = 0

    def run(self) -> None:
        """Read everything, and begin again."""
        extents, steps, straight = self._extents, self._steps, self._straight
        self._begin()
        try:
            crcs = self._reader.transfer(extents)
        finally:
            # tells autograd, and a save that has yet to capture them, of what the native side writes
            torch.autograd.graph.increment_version(straight)
        for step in steps:
            step(crcs)

    def run_if_full(self) -> None:
        """Read everything if the batch is full."""
        if self._bytes >= _TEMPORARY_BYTES or len(self._extents) >= _EXTENT_COUNT:
            self.run()

    def add_bytes(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Read to memory of our own."""
        data = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        if size_bytes:
            place = self._reader.start_bytes + offset_bytes
            self._extents.add_memory(place, size_bytes, data.data_ptr(), data, with_crc=False)
        self._bytes += size_bytes
        return data

    def add_blob(self, one: Wanted, take: Callable[[bytes], None]) -> None:
        """Read a whole blob, and call `take` with its bytes."""
        data = self.add_bytes(one.offset_bytes, one.size_bytes)
        self._steps.append(lambda _: take(_to_bytes(data)))

    def add_look(self, one: Wanted) -> _Look:
        """Read the ends of a blob."""
        look = _Look(self._reader, one)
        if one.size_bytes <= _HEAD_BYTES + _TAIL_BYTES:
            look.add(0, self.add_bytes(one.offset_bytes, one.size_bytes))
        else:
            first = one.size_bytes - _TAIL_BYTES
            look.add(0, self.add_bytes(one.offset_bytes, _HEAD_BYTES))
            look.add(first, self.add_bytes(one.offset_bytes + first, _TAIL_BYTES))
        return look

    def add_own(self, one: Wanted, blob: Blob, otherwise: Callable[[Wanted], None]) -> None:
        """Read a tensor whose blob is expected to be this one; call `otherwise` if it is not."""
        dtype, shape = one.stored  # type: ignore[misc]
        head = self.add_bytes(one.offset_bytes, len(blob.head))
        payload = Payload(one.offset_bytes + len(blob.head), dtype, shape)
        crc_index, fill = self._add_tensor(one, payload)
        end_bytes = one.offset_bytes + one.size_bytes
        checked = self._reader.verify and one.lengths == shape
        tail = self.add_bytes(end_bytes - blob.tail_bytes, blob.tail_bytes) if checked else None

        def step(crcs: list[int]) -> None:
            if _to_bytes(head) != blob.head:
                otherwise(one)
                return
            if tail is not None and _to_bytes(tail) != blob.tail_with(0 if crc_index is None else crcs[crc_index]):
                self._refuse(one)
            fill()

        self._steps.append(step)

    def add_found(self, one: Wanted, payload: Payload) -> None:
        """Read a tensor from the place where it was found."""
        _require_part(one, payload.shape)
        crc_index, fill = self._add_tensor(one, payload)

        def step(crcs: list[int]) -> None:
            if self._reader.verify and crc_index is not None and payload.crc not in (None, crcs[crc_index]):
                self._refuse(one)
            fill()

        self._steps.append(step)

    def _refuse(self, one: Wanted) -> None:
        with self._reader.errors_of(one):
            raise ChecksumError("its bytes do not have the recorded checksum")

    def _add_tensor(self, one: Wanted, payload: Payload) -> tuple[int | None, Callable[[], None]]:
        """Read elements into the target, or into memory from which they are copied.

        Returns:
            The extent whose CRC is that of the whole tensor, and what to do when everything is read.
        """
        target = _target_of(one)
        strides = row_major_strides(payload.shape)
        itemsize = payload.dtype.itemsize
        first = payload.offset_bytes + itemsize * sum(map(operator.mul, one.offsets, strides))
        count = math.prod(one.lengths)
        with_crc = self._reader.verify and one.lengths == payload.shape
        if not count:
            return None, lambda: one.done(b"")
        outer, run = runs_of_box(payload.shape, one.lengths)
        run_bytes = run * itemsize
        if run != count and run_bytes < _RUN_BYTES_MIN:
            covered = self.add_bytes(first, _covered_count(one.lengths, strides) * itemsize)
            return None, lambda: _copy(covered.view(payload.dtype).as_strided(one.lengths, strides), target, one)
        straight = is_plain(target) and target.is_contiguous() and target.dtype == payload.dtype
        straight = straight and not target.is_conj() and not target.is_neg()
        if straight and not target.is_inference():
            self._straight.append(target)
        memory = target if straight else torch.empty(one.lengths, dtype=payload.dtype, device="cpu")
        self._bytes += 0 if straight else count * itemsize
        index = -1
        for number, places in enumerate(itertools.product(*map(range, one.lengths[:outer]))):
            offset_bytes = first + itemsize * sum(map(operator.mul, places, strides))
            index = self._add_run(offset_bytes, run_bytes, memory, number * run_bytes, with_crc=with_crc)
        crc_index = index if with_crc else None
        return crc_index, (lambda: one.done(b"")) if straight else (lambda: _copy(memory, target, one))

    def _add_run(
        self, offset_bytes: int, size_bytes: int, memory: torch.Tensor, from_bytes: int, *, with_crc: bool
    ) -> int:
        """Read into bytes of a contiguous tensor, on any device."""
        return self._extents.add_storage(
            self._reader.start_bytes + offset_bytes,
            memory.untyped_storage(),
            with_crc=with_crc,
            from_bytes=int(memory.storage_offset()) * memory.element_size() + from_bytes,
            size_bytes=size_bytes,
        )


def _copy(source: torch.Tensor, target: torch.Tensor, one: Wanted) -> None:
    target.copy_(source)
    one.done(b"")
