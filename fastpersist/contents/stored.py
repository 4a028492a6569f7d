"""Lists the tensors of a file, of a directory of safetensors or of a step by name, with the places of their bytes.

It reads headers and pickles, runs no code from the file, and reads no tensor (`pieces` does). Entries that are no
tensors are listed by name, as text.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from fastpersist.commit.filesystem import has_name, storage_errors
from fastpersist.commit.locks import HeldDirectory, hold_for_reading
from fastpersist.commit.step_listing import check_files, read_manifest
from fastpersist.errors import ConfigError, FormatError, InternalError, StorageError, UnsupportedError
from fastpersist.formats.byte_ranges import row_major_strides
from fastpersist.formats.manifest import DCP_METADATA_NAME, MANIFEST_NAME, STATE_NAME, FileEntry, step_of
from fastpersist.formats.pickle_scan import iter_tensors
from fastpersist.formats.pickle_tensors import SymbolicTensor
from fastpersist.formats.pickle_values import iter_values
from fastpersist.formats.split_manifest import PARTS_NAME
from fastpersist.loading.checkpoint_file import CheckpointSource, open_file
from fastpersist.loading.directory_inspection import TENSOR_SUFFIXES
from fastpersist.loading.fill_tensors import StoredTensor
from fastpersist.streaming.source import WeightSource
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.tensor_file import TensorFile

if TYPE_CHECKING:
    from fastpersist.contents.sharded import Shards

__all__ = ["Contents", "Stored", "open_contents", "refuse_parts", "refuse_root"]

_EXPANDED_BYTES_MAX = 1 << 30
"""Of the values of a view that repeats elements: a file of a few bytes can claim any number of them."""


class Stored(NamedTuple):
    """A tensor whose bytes lie in a file.

    Attributes:
        name: The tensor's place in the object, as `fastpersist.inspect` names it; in files of a step other than
            `state.pt`, with the file's name and a colon in front.
        dtype: The dtype of the elements.
        shape: The shape of the tensor.
        stride: Elements from one index to the next in each dimension, in the file.
        file: The open file that holds it; None for a tensor in shards.
        offset_bytes: The offset of its first element, from the start of the file.
        crc32: The CRC-32 of exactly its bytes; None if none was recorded.
        kind: "dense", or the kind of tensor of which it is a component: "sparse_coo", …, "nested".
        is_conj: The tensor's values are the conjugates of the stored elements.
        is_neg: The tensor's values are the negatives of the stored elements.
        rows: Reads rows of a tensor in shards; takes the first row, and the one behind the last; None for others.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    file: TensorFile | None
    offset_bytes: int
    crc32: int | None = None
    kind: str = "dense"
    is_conj: bool = False
    is_neg: bool = False
    rows: Callable[[int, int], torch.Tensor] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def lies_in_order(self) -> bool:
        """Whether its values lie in the file as they are, row-major without gaps."""
        if self.rows is not None or self.is_conj or self.is_neg:
            return False
        return self.stride == row_major_strides(self.shape) or self.layout.is_contiguous()

    @property
    def path(self) -> str:
        """The path of its file; "" in shards."""
        return "" if self.file is None else self.file.path

    def opened(self) -> TensorFile:
        """Return its file.

        Raises:
            InternalError: It lies in shards.
        """
        if self.file is None:
            raise InternalError(f"{self.name} lies in shards, and has no file of its own")
        return self.file

    @property
    def layout(self) -> StoredTensor:
        """How its elements lie in the file."""
        return StoredTensor(self.offset_bytes, self.dtype, self.shape, self.stride)


_Scanned: TypeAlias = "tuple[list[tuple[str, SymbolicTensor]], list[tuple[str, str]]]"


@dataclass(slots=True)
class Contents:
    """What a source holds.

    Attributes:
        path: The path as it was given.
        tensors: The tensors by name, file by file, in the order of each file's header or pickle.
        unreadable: By name of a tensor: why its values cannot be read without the tensor's own code.
        values: Values that are no tensors, and tensors without data, as text by name.
        metadata: The metadata in the header of a safetensors file; empty for a directory of such files.
        scanned: What was found in each pickle (tensors and values), by the bytes of the pickle.
        shards: The shards that the tensors with `rows` come from; None if there are none.
        close: Closes the source's files before `open_contents` does.
    """

    path: str
    tensors: dict[str, Stored] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    scanned: dict[bytes, _Scanned] = field(default_factory=dict, repr=False)
    shards: Shards | None = field(default=None, repr=False)
    close: Callable[[], object] = field(default=lambda: None, repr=False)

    def _free(self, name: str) -> str:
        """Return a name that no other tensor has; `{"a.b": …, "a": {"b": …}}` has one name twice."""
        free, count = name, 1
        while free in self.tensors or free in self.unreadable:
            count += 1
            free = f"{name} ({count})"
        return free


@contextmanager
def open_contents(path: str, *, engine: str = "auto", like: Contents | None = None) -> Iterator[Contents]:
    """Give what a source holds, while its files are open. Python's garbage collector rests meanwhile.

    Args:
        path: A file of torch.save, of safetensors or of ours; a directory of safetensors; or the directory of a step or
            of a torch.distributed.checkpoint.
        engine: "auto", or an engine's name, as in `TensorFile`.
        like: Another source. A pickle that is the same there is not scanned again: two files of weights often differ in
            the bytes of tensors only.

    Raises:
        CheckpointNotFoundError: There is nothing.
        FormatError: A file is damaged, or is missing in a step or in an index.
        StorageError: A file cannot be read.
        UnsupportedError: It is in another format.

    Thread safety: each caller gets objects of its own.
    """
    contents = Contents(path, scanned={} if like is None else like.scanned)
    with no_garbage_collection(), ExitStack() as stack:
        contents.close = stack.close
        if not os.path.isdir(path):
            _add_file(contents, stack, CheckpointSource(path), "", engine)
        elif has_name(os.path.join(path, MANIFEST_NAME)):
            _add_step(contents, stack, stack.enter_context(hold_for_reading(path)), engine)
        else:
            refuse_root(path)
            if os.path.lexists(os.path.join(path, DCP_METADATA_NAME)):
                _add_shards(contents, stack, path, engine)
            else:
                _add_safetensors(contents, stack, path, "", engine)
        yield contents


def refuse_root(path: str) -> None:
    """Refuse a directory of steps.

    Raises:
        ConfigError: It is one, and not a step itself.
        StorageError: It cannot be listed.
    """
    with storage_errors("listing", path):
        names = os.listdir(path)
    steps = [name for name in names if step_of(name) is not None]
    if steps and MANIFEST_NAME not in names:
        raise ConfigError(f"{path} is a directory of steps: name one of them, such as {os.path.join(path, max(steps))}")


def refuse_parts(path: str, names: Collection[str]) -> None:
    """Refuse a directory whose files are a part of a step.

    Raises:
        UnsupportedError: It is one; the others lie in other directories.
    """
    if PARTS_NAME in names:
        raise UnsupportedError(f"{path} holds a part of a step only: `fastpersist merge` makes a whole one first")


def _add_shards(
    contents: Contents, stack: ExitStack, directory: str, engine: str, files: Sequence[FileEntry] = ()
) -> None:
    from fastpersist.contents.sharded import Shards  # slow to import, like all of DCP

    contents.shards = shards = Shards(directory, engine=engine, stack=stack, files=files)
    for name, (dtype, shape) in shards.tensors.items():
        if shards.is_plain(name):
            rows = functools.partial(shards.rows, name)
            contents.tensors[name] = Stored(name, dtype, shape, row_major_strides(shape), None, 0, rows=rows)
        else:
            contents.unreadable[name] = f"it is a quantized tensor ({dtype})"
    contents.values.update(shards.values())


def _add_step(contents: Contents, stack: ExitStack, held: HeldDirectory, engine: str) -> None:
    manifest = read_manifest(held.place)
    names = {entry.name for entry in manifest.files}
    refuse_parts(held.path, names)
    check_files(held.place, manifest)
    if DCP_METADATA_NAME in names:
        _add_shards(contents, stack, held.place, engine, manifest.files)
    suffixed = [entry.name for entry in manifest.files if entry.name.endswith(TENSOR_SUFFIXES)]
    for name in sorted(suffixed, key=lambda name: (name != STATE_NAME, name)):
        prefix = "" if name == STATE_NAME or name.endswith(".safetensors") else f"{name}:"
        _add_file(contents, stack, open_file(held, name), prefix, engine, os.path.join(held.place, name))


def _add_file(
    contents: Contents, stack: ExitStack, source: CheckpointSource, prefix: str, engine: str, place: str = ""
) -> None:
    """Add the tensors and values of one file; `place` leads to it, if not its path."""
    with source:
        if source.kind == "safetensors":
            _add_safetensors(contents, stack, place or source.path, prefix, engine)
            contents.metadata.update(source.header.metadata)
            return
        if source.kind != "torch_zip":
            source.refuse_incomplete()
            raise UnsupportedError(
                f"{source.path}: {source.explain_unknown()}; this reads safetensors and files of torch.save as it is "
                "since torch 1.6: load and save it anew"
            )
        if source.is_byte_swapped():
            raise UnsupportedError(f"{source.path} has the other byte order; load it, and save it anew")
        file = stack.enter_context(closing(TensorFile(place or source.path, engine=engine)))
        with storage_errors("looking at", source.path):
            seen, opened = os.fstat(source.fd), os.fstat(file.fileno())
        if (seen.st_dev, seen.st_ino) != (opened.st_dev, opened.st_ino):
            raise StorageError(None, f"{source.path} was replaced while it was opened; try again", source.path)
        _add_torch_zip(contents, source, file, prefix)


def _add_safetensors(contents: Contents, stack: ExitStack, path: str, prefix: str, engine: str) -> None:
    source = stack.enter_context(closing(WeightSource(path, engine=engine)))
    if source.problems:
        raise FormatError("; ".join(source.problems[:5]), path=path)
    for name, reason in source.unusable.items():
        contents.unreadable[prefix + name] = reason
    for name, place in source.places.items():
        free = contents._free(prefix + name)
        file = source.file(place.file)
        contents.tensors[free] = Stored(
            free, place.dtype, place.shape, row_major_strides(place.shape), file, place.offset_bytes, place.crc32
        )


def _add_torch_zip(contents: Contents, source: CheckpointSource, file: TensorFile, prefix: str) -> None:
    entries, has_checksums = source.directory.entries, source.directory.has_checksums
    try:
        if source.pickle not in contents.scanned:
            root = source.scan().root
            contents.scanned[source.pickle] = list(iter_tensors(root)), list(iter_values(root))
        tensors, values = contents.scanned[source.pickle]
        for own_name, tensor in tensors:
            name = contents._free(prefix + own_name)
            if tensor.storage is None:
                contents.values[name] = f"a {tensor.kind} tensor of {tensor.dtype}, shape {list(tensor.shape)}"
                continue
            dtype = getattr(torch, tensor.dtype, None)
            record = entries.get(f"data/{tensor.storage.key}")
            if not isinstance(dtype, torch.dtype):
                contents.unreadable[name] = f"its dtype is {tensor.dtype}, which this torch does not have"
            elif tensor.kind == "quantized":
                contents.unreadable[name] = f"it is a quantized tensor ({tensor.dtype})"
            elif record is None or tensor.end_bytes > record.size_bytes:
                raise FormatError(f"tensor {own_name!r} reaches beyond its storage {tensor.storage.key}")
            else:
                offset_bytes = record.data_offset_bytes + tensor.storage_offset * dtype.itemsize
                crc32 = record.crc if has_checksums else None
                stored = Stored(
                    name,
                    dtype,
                    tensor.shape,
                    tensor.stride,
                    file,
                    offset_bytes,
                    crc32,
                    tensor.kind,
                    tensor.is_conj,
                    tensor.is_neg,
                )
                size_bytes = stored.size_bytes
                if size_bytes > max(record.size_bytes, _EXPANDED_BYTES_MAX):
                    contents.unreadable[name] = f"it is an expanded view: its values would be {size_bytes} bytes"
                    continue
                if crc32 is not None and not (size_bytes == record.size_bytes and stored.lies_in_order):
                    stored = stored._replace(crc32=None)  # the record's is not of exactly its bytes
                contents.tensors[name] = stored
        contents.values.update((prefix + name, text) for name, text in values)
    except FormatError as error:
        raise FormatError(error.message, path=source.path, offset_bytes=error.offset_bytes) from None
