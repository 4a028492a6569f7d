"""Converts a source to new files: another format, dtype, names, or number of files, streamed in pieces.

The files are first planned as for a save, with tensors that have no memory; so they equal the files that
`fastpersist.save` would write. Then the bytes stream from the source. Each piece gets a CRC when it has been read: the
written bytes must have the same CRC, and those of a whole tensor the CRC that the source records; parts of a sharded
checkpoint are compared as a whole before. Otherwise nothing gets its final name.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from fastpersist import _native
from fastpersist.commit.file_commit import PendingFile, refuse_existing, resolve_target
from fastpersist.commit.filesystem import absolute_path, filesystem
from fastpersist.contents.pieces import Piece, read_pieces
from fastpersist.contents.statistics import can_be_widened, in_parts
from fastpersist.contents.stored import Contents, Stored
from fastpersist.dcp.checkpoint_directory import files_of_ours, find_others, keep_others
from fastpersist.errors import (
    ChecksumError,
    ConfigError,
    InternalError,
    UnsupportedError,
)
from fastpersist.formats.layout import align_up
from fastpersist.formats.names import is_wanted, renamed
from fastpersist.formats.safetensors import INDEX_NAME, SINGLE_NAME, WEIGHTS_NAME
from fastpersist.saving.containers import Checksum, Container, Literal, Part, container_for, is_safetensors
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.write_file import WrittenFile, publish_file, write_file
from fastpersist.transfer.engine_selection import refuse_null_engine
from fastpersist.transfer.tensor_memory import crc32_of, storage_without_memory
from fastpersist.transfer.writer import Pieces, Writer

__all__ = ["Conversion", "Wish", "convert"]


_METADATA = {"format": "pt"}
"""What transformers looks for in a safetensors file."""

# The files of a checkpoint that shards replace; the others that its manifest lists, such as a config.json, stay.
_TENSOR_FILE = re.compile(
    r".*\.(pt|pth|bin|ckpt|safetensors|distcp|metadata|part-\d{5})|PARTS\.json|COPY\.json", re.DOTALL
)


class Wish(NamedTuple):
    """The options of a conversion.

    Attributes:
        patterns: Convert only tensors with such a name; all if there are none.
        prefixes: Prefixes of names, and what replaces them.
        dtype: Floating-point tensors are converted to it; None leaves them as they are.
        file_format: "torch", "safetensors", or "auto", which takes the format from the suffix.
        shard_bytes: Write a directory of safetensors files with an index: each file with at most so many bytes of
            tensors, or one tensor; None for one file.
        overwrite: Replace what is there. In a directory, other files (a config.json, a tokenizer) stay.
    """

    patterns: Sequence[str] = ()
    prefixes: Mapping[str, str] = {}
    dtype: torch.dtype | None = None
    file_format: str = "auto"
    shard_bytes: int | None = None
    overwrite: bool = False


class Conversion(NamedTuple):
    """What a conversion did.

    Attributes:
        path: The path of the file, or of the directory.
        tensor_count: How many tensors were written.
        size_bytes: The length of all files together.
        file_count: How many files there are, without an index.
        checked_count: Tensors whose bytes were compared with the CRCs of the source.
        dropped_values: Names of entries that are no tensors, and were left out.
        total_s: The seconds that the conversion took.
    """

    path: str
    tensor_count: int
    size_bytes: int
    file_count: int
    checked_count: int
    dropped_values: list[str]
    total_s: float


class _Target(NamedTuple):
    """A tensor to write.

    Attributes:
        name: The tensor's new name.
        stored: The tensor that it is made from.
        dtype: Its dtype in the new file.
    """

    name: str
    stored: Stored
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Its bytes when it is written."""
        return self.stored.size_bytes // self.stored.dtype.itemsize * self.dtype.itemsize


def convert(
    contents: Contents,
    path: str,
    wish: Wish,
    *,
    engine: str = "auto",
    on_read: Callable[[int], object] = lambda size_bytes: None,
) -> Conversion:
    """Write the tensors of a source to a new file, or to a directory of safetensors files; durable when this returns.

    Args:
        contents: The source, open; its files may be closed when this returns.
        path: The file or directory to make.
        wish: The options.
        engine: "auto", or an engine's name, which then never falls back.
        on_read: Called with the bytes of each batch that was read.

    Raises:
        ChecksumError: Bytes of the source are not those that were saved.
        ConfigError: Something is there already; no tensor is meant, or none begins with a prefix; two would have one
            name; or the format cannot hold one, which the message names.
        NoSpaceError, StorageError: An error of the disk.
        UnsupportedError: A tensor is not plain (sparse, quantized, …), which the message names; or the directory that
            is replaced holds what cannot stay, such as a link to a directory.

    Thread safety: no other thread may use the source meanwhile.
    """
    started_s = time.monotonic()
    out = absolute_path(path)
    if not wish.overwrite:
        refuse_existing(out)
    targets = _targets(contents, wish)
    checked_count = sum(target.stored.crc32 is not None for target in targets)
    if contents.shards is not None:  # the CRCs are of whole parts, and rows of tensors are read below
        checked_count += contents.shards.verify(target.stored.name for target in targets if target.stored.rows)
    stream = functools.partial(_stream, engine=engine, on_read=on_read)
    if wish.shard_bytes is None:
        size_bytes, file_count = _convert_to_file(targets, out, wish, contents.metadata, stream), 1
    else:
        size_bytes, file_count = _convert_to_shards(targets, out, wish, contents, stream)
    total_s = time.monotonic() - started_s
    dropped = list(contents.values)
    if wish.shard_bytes is None and not is_safetensors(out, wish.file_format):
        dropped += [f"metadata[{key}]" for key in contents.metadata]
    return Conversion(path, len(targets), size_bytes, file_count, checked_count, dropped, total_s)


_Stream = Callable[["_Planned", int, str], WrittenFile]


def _targets(contents: Contents, wish: Wish) -> list[_Target]:
    """Return the tensors to write, in the order of the source."""
    for name, why in contents.unreadable.items():
        if is_wanted(name, wish.patterns):
            raise UnsupportedError(f"{name!r} of {contents.path} cannot be converted: {why}; leave it out with --keys")
    found: dict[str, _Target] = {}
    for name, stored in contents.tensors.items():
        if not is_wanted(name, wish.patterns):
            continue
        if stored.kind != "dense":
            raise UnsupportedError(
                f"{name!r} of {contents.path} is a component of a {stored.kind} tensor, and would become a plain one: "
                "leave it out with --keys, or load and save the state"
            )
        new_name = renamed(name, wish.prefixes)
        if new_name in found:
            raise ConfigError(f"{name!r} and {found[new_name].stored.name!r} would both be called {new_name!r}")
        found[new_name] = _Target(new_name, stored, _converted_dtype(stored, wish.dtype))
    if not found:
        raise ConfigError(f"there is nothing to convert: no tensor in {contents.path} is selected")
    for prefix, new in wish.prefixes.items():
        if not any(target.stored.name.startswith(prefix) for target in found.values()):
            raise ConfigError(
                f"no tensor in {contents.path} that is to be converted begins with {prefix!r}: leave out "
                f"--rename {prefix}={new}, or correct it; `fastpersist inspect` prints the names"
            )
    return list(found.values())


def _converted_dtype(stored: Stored, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not stored.dtype.is_floating_point or not can_be_widened(stored.dtype):
        return stored.dtype
    return dtype


# --- where they go


def _convert_to_file(
    targets: Sequence[_Target], out: str, wish: Wish, metadata: Mapping[str, str], stream: _Stream
) -> int:
    file = resolve_target(out, replace_links=False)
    if file.why_not_replaceable is not None:
        raise UnsupportedError(f"cannot write {out}: {file.why_not_replaceable}")
    planned = _Planned(targets, out, wish.file_format, metadata)
    pending = PendingFile.create(file)
    pending.overwrite = wish.overwrite
    with ExitStack() as stack:
        stack.callback(pending.abort)
        size_bytes = planned.container.size_bytes
        publish_file(pending, size_bytes, lambda: stream(planned, pending.fd, out), durable=True)
    return size_bytes


def _convert_to_shards(
    targets: Sequence[_Target], out: str, wish: Wish, contents: Contents, stream: _Stream
) -> tuple[int, int]:
    groups = _groups(targets, wish.shard_bytes or 0)
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    if len(names) == 1:
        names = [SINGLE_NAME]
    total_bytes = 0
    with DirectorySave(out, overwrite=wish.overwrite) as directory:
        for name, group in zip(names, groups, strict=True):
            planned = _Planned(group, name, "safetensors", contents.metadata)
            size_bytes = planned.container.size_bytes
            place = os.path.join(directory.path, name)
            fd = filesystem().create(place)
            try:
                shown = os.path.join(out, name)
                written = write_file(fd, shown, size_bytes, functools.partial(stream, planned, fd, shown))
                filesystem().sync(fd, shown)
            finally:
                os.close(fd)
            directory.add_written(name, size_bytes, written.crc32)
            total_bytes += size_bytes
        if len(names) > 1:
            weight_map = {target.name: name for name, group in zip(names, groups, strict=True) for target in group}
            index = {"metadata": {"total_size": sum(target.size_bytes for target in targets)}, "weight_map": weight_map}
            directory.add_bytes(INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")
        contents.close()  # it may be the directory that is replaced, and one that is being read is not removed
        if wish.overwrite:
            _keep_others(directory, out)
        directory.publish().result()
    return total_bytes, len(names)


def _keep_others(directory: DirectorySave, out: str) -> None:
    """Keep what is in a directory beside the checkpoint that is replaced, such as a config.json."""
    own = set(filter(_TENSOR_FILE.fullmatch, files_of_ours(out)))
    others = find_others(out, lambda name: name in own or WEIGHTS_NAME.fullmatch(name))
    for name, size_bytes in keep_others(others, out, directory.path):
        directory.add_written(name, size_bytes, None)


def _groups(targets: Sequence[_Target], shard_bytes: int) -> list[list[_Target]]:
    groups: list[list[_Target]] = [[]]
    room_bytes = shard_bytes
    for target in targets:
        if groups[-1] and target.size_bytes > room_bytes:
            groups.append([])
            room_bytes = shard_bytes
        groups[-1].append(target)
        room_bytes -= target.size_bytes
    return groups


# --- one file


class _Planned:
    """A file to write, and the tensors that become its sources, in its order.

    Attributes:
        container: The layout of the file.
        targets: The tensor for each source of the container.
    """

    def __init__(self, targets: Sequence[_Target], path: str, file_format: str, metadata: Mapping[str, str]) -> None:
        address = 1 << 12  # of memory that is not read: each storage needs one of its own
        stand_ins: dict[str, torch.Tensor] = {}
        same: dict[object, torch.Tensor] = {}
        of_storage: dict[int, _Target] = {}
        is_torch = not is_safetensors(path, file_format)
        for target in targets:
            # Tied weights stay tied where the format can say so.
            key = target.stored._replace(name=""), target.dtype
            if is_torch and key in same:
                stand_ins[target.name] = same[key]
                continue
            stand_in = _without_memory(target, address)
            address += target.size_bytes
            stand_ins[target.name] = same[key] = stand_in
            of_storage[stand_in.untyped_storage()._cdata] = target
        self.container: Container = container_for(
            stand_ins,
            path,
            checksum=True,
            file_format=file_format,
            metadata=None if is_torch else {**_METADATA, **metadata},
        )
        self.targets = [of_storage[storage._cdata] for storage in self.container.sources.storages]


def _without_memory(target: _Target, address: int) -> torch.Tensor:
    storage = storage_without_memory(target.size_bytes, address)
    stand_in = torch.empty(0, dtype=target.dtype)
    stand_in.set_(storage, 0, target.stored.shape)  # type: ignore[call-overload]
    return stand_in


def _stream(planned: _Planned, fd: int, path: str, *, engine: str, on_read: Callable[[int], object]) -> WrittenFile:
    """Write a planned file from the pieces of its tensors, and compare all CRCs."""
    container, targets = planned.container, planned.targets
    sums = _Sums(targets)
    with Writer(fd, path, engine=engine) as writer:
        parts = iter(container.parts())
        if container.closing_extent[0] == 0:  # the header comes last
            writer.seek(container.closing_extent[1])
        for batch in read_pieces([target.stored for target in targets]):
            pieces = Pieces()
            for piece, data in zip(batch, sums.converted(batch), strict=True):
                if piece.from_bytes == 0:
                    _add_until(parts, piece.number, pieces)
                start_bytes, size_bytes = int(data.storage_offset()), data.numel()
                storage = data.untyped_storage()
                pieces.add_storage(storage, piece.number, offset_bytes=start_bytes, size_bytes=size_bytes)
            writer.append(pieces)
            on_read(sum(piece.data.numel() for piece in batch))
        pieces = Pieces()
        _add_until(parts, None, pieces)
        writer.append(pieces)
        crcs = writer.crcs(len(targets))
        sums.check(crcs)
        if container.closing_extent[0] == 0:
            writer.seek(0)
        pieces = Pieces()
        pieces.add_bytes(container.closing(crcs))
        writer.append(pieces)
        used_engine = writer.finish()
        runs = writer.runs()
    refuse_null_engine(used_engine)
    return WrittenFile(used_engine, None if runs is None else _native.combine_runs(runs, container.size_bytes))


def _add_until(parts: Iterator[Part], source: int | None, pieces: Pieces) -> None:
    """Add what lies before the bytes of a source; None for all that is left. Other sources on the way are empty."""
    for part in parts:
        if isinstance(part, Literal):
            pieces.add_bytes(part.data)
        elif isinstance(part, Checksum):
            pieces.add_crc(part.source)
        elif part.source == source:
            return


class _Sums:
    """The CRCs of what was read, and of what it was converted to."""

    def __init__(self, targets: Sequence[_Target]) -> None:
        self._targets = targets
        self._read = [0] * len(targets)
        self._written = [0] * len(targets)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def converted(self, batch: Sequence[Piece]) -> Iterator[torch.Tensor]:
        """Yield the bytes to write of each piece; they stay until the next batch is converted."""
        places = list(itertools.accumulate((self._room_bytes(piece) for piece in batch), initial=0))
        if places[-1] > self._memory.numel():
            # Kept for all batches: glibc's heap grows without end when new memory of this size is aligned each time.
            self._memory = torch.empty(places[-1], dtype=torch.uint8)
        for piece, start_bytes in zip(batch, places, strict=False):
            number, data = piece.number, piece.data
            target = self._targets[number]
            self._read[number] = crc32_of(data, self._read[number])
            if target.dtype != target.stored.dtype:
                values = piece.values(target.stored.dtype)
                end_bytes = start_bytes + len(values) * target.dtype.itemsize
                data = self._memory[start_bytes:end_bytes]
                for into, part in zip(in_parts(data.view(target.dtype)), in_parts(values), strict=True):
                    into.copy_(part)
            self._written[number] = crc32_of(data, self._written[number])
            yield data

    def _room_bytes(self, piece: Piece) -> int:
        """Return how much memory the converted values of a piece take, with room to align what follows."""
        stored, dtype = self._targets[piece.number].stored, self._targets[piece.number].dtype
        if dtype == stored.dtype:
            return 0
        return align_up(piece.data.numel() // stored.dtype.itemsize * dtype.itemsize, 64)

    def check(self, crcs: Sequence[int]) -> None:
        """Compare the CRCs with those that the source records, and with those of the written bytes.

        Raises:
            ChecksumError: A tensor of the source is damaged.
            InternalError: Bytes changed between reading and writing.
        """
        for target, read, wanted, written in zip(self._targets, self._read, self._written, crcs, strict=True):
            stored = target.stored
            if stored.crc32 not in (None, read):
                raise ChecksumError(
                    f"the bytes of {stored.name} are damaged: their CRC is {read:08x}, not {stored.crc32:08x}",
                    path=stored.path,
                    offset_bytes=stored.offset_bytes,
                )
            if written != wanted:
                raise InternalError(f"{target.name} changed in memory between reading and writing")
