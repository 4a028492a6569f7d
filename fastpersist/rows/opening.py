"""A source of rows → where its rows lie: the files of a table, each proven as far as its header goes.

Sources are .npy, a tensor of a safetensors file, raw bytes, and pieces of any of these that are joined by rows. The
first bytes of a file tell its format. No row is read here, and no file stays open. `sidecar` has what lies beside a
table.
"""

from __future__ import annotations

import errno
import math
import operator
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from fastpersist.arguments import local_path
from fastpersist.commit.filesystem import absolute_path, filesystem
from fastpersist.errors import CheckpointNotFoundError, ConfigError, FormatError, UnsupportedError
from fastpersist.formats import npy
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.unpickle import torch_dtype
from fastpersist.rows.sidecar import read_positions

__all__ = ["Piece", "RowSource", "Source", "as_absolute", "facts_of", "open_rows", "row_layout"]

Path: TypeAlias = "str | os.PathLike[str]"
Source: TypeAlias = "Path | Sequence[Path | tuple[Path, str]]"
"""A path, or pieces: each a path, or a path and the name of a tensor in a safetensors file."""


class Piece(NamedTuple):
    """Consecutive rows in one file.

    Attributes:
        path: The file, absolute.
        offset_bytes: The offset of the first row, from the file's start.
        row_count: The number of rows.
        facts: Facts that tell the file from another one, and from its state before a change (`facts_of`).
    """

    path: str
    offset_bytes: int
    row_count: int
    facts: tuple[int, ...]


class RowSource(NamedTuple):
    """The rows of a table, and where they lie.

    Attributes:
        pieces: The rows in the order of their positions.
        row_shape: Dimensions of a row; () in a table of one dimension.
        dtype: The dtype of the elements.
        row_bytes: The length of a row; rows follow each other without gaps.
        position_of_row: By id, the position of its row; int32 or int64, [row count]. None: ids are positions.
    """

    pieces: tuple[Piece, ...]
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int
    position_of_row: torch.Tensor | None

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return sum(piece.row_count for piece in self.pieces)


class _Table(NamedTuple):
    """The rows of one file, before tables are joined."""

    piece: Piece
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    position_of_row: torch.Tensor | None


def as_absolute(source: Source) -> Source:
    """Return the source for a process in another directory."""

    def absolute(path: str | os.PathLike[str]) -> str:
        return absolute_path(local_path(path, "source"))

    if isinstance(source, str | os.PathLike):
        return absolute(source)
    return [
        absolute(piece) if isinstance(piece, str | os.PathLike) else (absolute(piece[0]), piece[1]) for piece in source
    ]


def open_rows(
    source: Source,
    *,
    tensor: str | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    offset_bytes: int = 0,
) -> RowSource:
    """Find the rows of a table.

    Args:
        source: A .npy or safetensors file, a raw one (with `shape` and `dtype`), or a list of pieces, joined by rows.
        tensor: The name of the tensor in a safetensors file; may be left out if the file has only one.
        shape: For raw files: the dimensions; the first may be -1, for as many rows as the file has.
        dtype: For raw files: the dtype of the elements. For other files: a dtype of the same width.
        offset_bytes: For raw files: where the first row begins.

    Raises:
        ConfigError: Arguments that make no sense, or do not fit the file; pieces whose rows differ.
        CheckpointNotFoundError: There is no such file.
        FormatError: A file is damaged, or shorter than it says.
        ChecksumError: The ids of a packed table are damaged.
        UnsupportedError: A file of another format, or an array without rows of numbers.
        StorageError: A file cannot be read.

    Thread safety: any thread.
    """
    if isinstance(source, str | os.PathLike):
        return _joined([_open(source, tensor, shape, dtype, offset_bytes)])
    if shape is not None or offset_bytes or tensor is not None:
        raise ConfigError(
            "tensor=, shape= and offset_bytes= are about one file; pieces are paths, or (path, tensor name)"
        )
    if not isinstance(source, Iterable) or not (pieces := list(source)):
        raise ConfigError(f"source is a path, or a list of pieces with at least one, not {source!r}")
    return _joined([_open(*_path_and_name(piece), None, dtype, 0) for piece in pieces])


def row_layout(row_shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """Return a row's dimensions and its length in bytes.

    Raises:
        ConfigError: There are no such rows, or they have no bytes.
    """
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}; it must be a torch.dtype")
    try:
        sizes = tuple(map(operator.index, row_shape))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise ConfigError(f"the shape of a row is a sequence of numbers, 0 or more, not {row_shape!r}")
    row_bytes = math.prod(sizes) * dtype.itemsize
    if not 0 < row_bytes < 1 << 62:
        raise ConfigError(f"a row of shape {sizes} has {row_bytes} bytes: there is nothing to read or write")
    return sizes, row_bytes


def _path_and_name(piece: object) -> tuple[Path, str | None]:
    if isinstance(piece, str | os.PathLike):
        return piece, None
    match piece:
        case (str() | os.PathLike() as path, str(name)):
            return path, name
    raise ConfigError(f"a piece is a path, or a tuple of a path and the name of a tensor, not {piece!r}")


def _joined(tables: Sequence[_Table]) -> RowSource:
    first = tables[0]
    for other in tables[1:]:
        if (other.dtype, other.row_shape) != (first.dtype, first.row_shape):
            raise ConfigError(
                f"pieces of different rows: those of {first.piece.path} are {first.dtype} of shape {first.row_shape}, "
                f"those of {other.piece.path} {other.dtype} of shape {other.row_shape}"
            )
    row_shape, row_bytes = row_layout(first.row_shape, first.dtype)
    positions = first.position_of_row
    if len(tables) > 1:
        positions = _joined_positions(tables)
    return RowSource(tuple(table.piece for table in tables), row_shape, first.dtype, row_bytes, positions)


def _joined_positions(tables: Sequence[_Table]) -> torch.Tensor | None:
    """Return where rows lie if ids go on from one piece to the next; None if no piece is packed."""
    if all(table.position_of_row is None for table in tables):
        return None
    joined, before_count = [], 0
    for table in tables:
        count = table.piece.row_count
        own = torch.arange(count, device="cpu") if table.position_of_row is None else table.position_of_row.long()
        joined.append(own + before_count)
        before_count += count
    return torch.cat(joined)


# ------------------------------------------------------------------------------------------------------- one file


def _open(
    given: Path, tensor: str | None, shape: Sequence[int] | None, dtype: torch.dtype | None, offset_bytes: int
) -> _Table:
    path = absolute_path(local_path(given, "source"))
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}; it must be a torch.dtype")
    try:
        source = CheckpointSource(path)
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(errno.ENOENT, f"there is no table at {path}", path) from None
    with source:
        is_npy = npy.is_npy(source.read_at(0, min(8, source.size_bytes)))
        if shape is not None and not is_npy and not (source.kind == "safetensors" and path.endswith(".safetensors")):
            if tensor is not None:
                raise ConfigError(f"{path}: tensor= names a tensor of a safetensors file, shape= is about a raw one")
            return _raw(source, shape, dtype, offset_bytes)
        if shape is not None or offset_bytes:
            raise ConfigError(f"{path} says itself where its rows lie; shape= and offset_bytes= are for raw files")
        if is_npy:
            if tensor is not None:
                raise ConfigError(f"{path} is a .npy file, which holds one array without a name; leave tensor= out")
            table = _npy(source, dtype)
        elif source.kind == "safetensors":
            table = _safetensors(source, tensor, dtype)
        elif source.kind == "torch_zip":
            _ = source.pickle  # its error tells what other archives are
            raise UnsupportedError(
                f"{path} is a file of torch.save; write its tensor with fastpersist.write_rows, or as safetensors"
            )
        else:
            source.refuse_incomplete()
            raise ConfigError(
                f"{path} is {source.looks_like()}, neither .npy nor safetensors; if it holds nothing but rows, give "
                "fastpersist.RowStore shape= and dtype="
            )
        return table._replace(position_of_row=read_positions(source, table.piece.offset_bytes, table.piece.row_count))


def facts_of(fd: int, path: str) -> tuple[int, ...]:
    """Return what tells an open file from another one, and from what it was before a change."""
    status = filesystem().status(fd, path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _raw(source: CheckpointSource, shape: Sequence[int], dtype: torch.dtype | None, offset_bytes: int) -> _Table:
    path = source.path
    if dtype is None:
        raise ConfigError(f"{path}: a raw file needs dtype= beside shape=")
    if isinstance(offset_bytes, bool) or not isinstance(offset_bytes, int) or offset_bytes < 0:
        raise ConfigError(f"offset_bytes is {offset_bytes!r}; it must be a number of bytes")
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        raise ConfigError(
            f"{path}: shape= is a sequence of numbers, of which the first is that of rows, or -1; it is {shape!r}"
        ) from None
    if not sizes:
        raise ConfigError(f"{path}: shape= has no dimension of rows; the first is their number, or -1")
    row_shape, row_bytes = row_layout(sizes[1:], dtype)
    there_bytes = source.size_bytes - offset_bytes
    row_count = sizes[0]
    if row_count == -1:
        row_count, rest_bytes = divmod(there_bytes, row_bytes)
        if rest_bytes or row_count < 0:
            raise ConfigError(
                f"{path} has {there_bytes} bytes from offset {offset_bytes} on, which are no whole rows of {row_bytes}"
            )
    if row_count < 0:
        raise ConfigError(f"{path}: shape= begins with {row_count}; it must be the number of rows, or -1")
    if row_count * row_bytes > there_bytes:
        raise FormatError(
            f"{row_count} rows of {row_bytes} bytes do not fit: {there_bytes} bytes are there",
            path=path,
            offset_bytes=offset_bytes,
        )
    return _Table(Piece(path, offset_bytes, row_count, facts_of(source.fd, path)), row_shape, dtype, None)


def _npy(source: CheckpointSource, wanted: torch.dtype | None) -> _Table:
    header = npy.read_header(source.read_at, source.size_bytes, path=source.path)
    if not header.dtype and wanted is None:
        raise ConfigError(
            f"{source.path} has elements of {header.item_bytes} bytes without a type, as numpy saves those that it "
            "does not know; say what they are, such as dtype=torch.bfloat16"
        )
    dtype = getattr(torch, header.dtype) if header.dtype else None
    return _table(source, header.shape, dtype, header.item_bytes, wanted, header.offset_bytes)


def _safetensors(source: CheckpointSource, name: str | None, wanted: torch.dtype | None) -> _Table:
    entries = {entry.name: entry for entry in source.header.entries}
    if name is None and len(entries) != 1:
        raise ConfigError(
            f"{source.path} has {len(entries)} tensors; name one with tensor= (rows info: --tensor): {_some(entries)}"
        )
    entry = next(iter(entries.values())) if name is None else entries.get(name)
    if entry is None:
        raise ConfigError(f"{source.path} has no tensor {name!r}; it has {_some(entries)}")
    dtype = torch_dtype(entry, source.path)
    return _table(source, entry.torch_shape, dtype, dtype.itemsize, wanted, entry.offset_bytes)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _table(
    source: CheckpointSource,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    item_bytes: int,
    wanted: torch.dtype | None,
    offset_bytes: int,
) -> _Table:
    """Return the rows of an array that knows its own shape and dtype."""
    path = source.path
    if not shape:
        raise ConfigError(f"{path} holds a scalar, which has no rows")
    if wanted is not None and wanted.itemsize != item_bytes:
        raise ConfigError(
            f"{path} has elements of {item_bytes} bytes, which cannot be taken for {wanted} of {wanted.itemsize}; "
            "dtype= converts nothing"
        )
    used = wanted or dtype
    if used is None or 0 in shape[1:]:
        raise ConfigError(f"{path} has rows of shape {shape[1:]}, which have no bytes")
    return _Table(Piece(path, offset_bytes, shape[0], facts_of(source.fd, path)), shape[1:], used, None)
