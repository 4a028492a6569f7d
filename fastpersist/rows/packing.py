"""Rewrites a table with the most requested rows first: `pack_rows`.

Rows that are requested together then lie together: a read of a block brings several of them, and the hot part of the
table is small. The permutation goes into the sidecar, so callers keep their ids.

The source is read only in file order, and compared with the checksums in its sidecar: a new sidecar would make damaged
rows good. A pass reads the whole source, and keeps the rows in memory that belong into the next window of the
destination; then the window is written. With memory for a quarter of the table, this takes four reads of the source and
one write, all sequential.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fastpersist.arguments import byte_count, local_path
from fastpersist.commit.filesystem import has_name
from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import ConfigError
from fastpersist.rows.ids import plain_array
from fastpersist.rows.opening import Piece, RowSource, Source, open_rows
from fastpersist.rows.sidecar import ChunkCheck, read_sidecar
from fastpersist.rows.writer import RowWriter
from fastpersist.transfer.arena import available_host_bytes
from fastpersist.transfer.page_writer import page_tensor
from fastpersist.transfer.tensor_file import TensorFile
from fastpersist.transfer.tensor_requests import PendingIO

__all__ = ["PackReport", "pack_rows"]

_BLOCK_BYTES = 32 << 20


class PackReport(NamedTuple):
    """What a rewrite did.

    Attributes:
        row_count: The number of rows of the table.
        pass_count: The number of times that the source was read.
        row_bytes: The length of each row.
    """

    row_count: int
    pass_count: int
    row_bytes: int


def pack_rows(
    source: RowSource | Source,
    path: str | os.PathLike[str],
    *,
    order: torch.Tensor | None = None,
    memory_bytes: int | str | None = None,
    tensor: str = "rows",
    engine: str = "auto",
) -> PackReport:
    """Write a table with the rows of another one, ordered by a score.

    Args:
        source: The table to read, as in `RowStore`; pieces become one table.
        path: The new table's path, .npy or .safetensors. Nothing may be there: a packed table and its sidecar cannot
            replace others in one step.
        order: A number for each id, such as its degree, or how often it was asked for: the highest come first, and of
            equal ones the lower id. None: in the order of ids, as a table that is not packed.
        memory_bytes: Memory for a window of the destination; by default half of what is available. In addition, 24 to
            40 bytes a row are taken, and some 300 MiB for what is read, sorted and written.
        tensor: The name of the tensor in a new safetensors file.
        engine: "auto", or an engine's name, as in `save`.

    Raises:
        ConfigError: Arguments that make no sense; the table exists.
        ChecksumError: The source does not match the checksums in its sidecar.
        Others: As `RowStore` and `RowWriter`.

    Thread safety: any thread.
    """
    rows = source if isinstance(source, RowSource) else open_rows(source)
    name = local_path(path)
    if has_name(name):
        raise ConfigError(f"{name} exists; a packed table replaces nothing: remove it, or choose another name")
    if memory_bytes is None:
        memory_bytes = available_host_bytes() // 2
    window_count = max(1, byte_count(memory_bytes, "memory_bytes") // rows.row_bytes)
    positions = None if order is None else _positions_by_score(order, rows.row_count)
    with RowWriter(name, rows.row_shape, rows.dtype, tensor=tensor, engine=engine) as writer:
        if positions is not None:
            writer.keep_positions(positions)
        targets = _targets(rows, positions)
        if targets is None:
            for _, block in _blocks(rows, engine):
                writer.append(_as_rows(block, rows))
            return PackReport(rows.row_count, 1, rows.row_bytes)
        starts = range(0, rows.row_count, window_count)
        width = _widest_integer(rows.row_bytes)
        window = page_tensor(min(window_count, rows.row_count) * rows.row_bytes).view(width).view(-1, _items(rows))
        for start in starts:
            end = min(start + window_count, rows.row_count)
            for first, block in _blocks(rows, engine):
                items = block.view(width).view(-1, _items(rows))
                target = targets[first : first + items.shape[0]]
                wanted = ((target >= start) & (target < end)).nonzero().squeeze(1)
                window.index_copy_(0, target[wanted].long() - start, items.index_select(0, wanted))
            writer.append(_as_rows(window[: end - start].view(-1).view(torch.uint8), rows))
    return PackReport(rows.row_count, len(starts), rows.row_bytes)


def _positions_by_score(order: torch.Tensor, row_count: int) -> torch.Tensor:
    """Return where the row of each id goes."""
    try:
        scores = order if isinstance(order, torch.Tensor) else torch.as_tensor(plain_array(order), device="cpu")
        shape = scores.shape
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"order is numbers, as a tensor, an array or a list: {error}") from None
    if shape != (row_count,):
        raise ConfigError(f"order is of shape {list(shape)}; it must have a number for each of {row_count} ids")
    if scores.is_complex():
        raise ConfigError(f"order is of {scores.dtype}, whose numbers have no order")
    try:
        scores = scores.cpu()
        has_nan = scores.is_floating_point() and bool(scores.isnan().any())
        ids = torch.argsort(scores, descending=True, stable=True)
    except NotImplementedError:
        raise ConfigError(
            f"torch cannot sort an order of {scores.dtype}, {scores.layout}, on {scores.device}; pass a dense one of "
            "torch.float32 or torch.int64 on the CPU"
        ) from None
    if has_nan:
        raise ConfigError("order has a NaN, which cannot be ordered")
    dtype = torch.int32 if row_count < 1 << 31 else torch.int64
    positions = torch.empty(row_count, dtype=dtype, device="cpu")
    positions[ids] = torch.arange(row_count, dtype=dtype, device="cpu")
    return positions


def _targets(rows: RowSource, positions: torch.Tensor | None) -> torch.Tensor | None:
    """Return where the row at each position of the source goes; None if it stays where it is."""
    if rows.position_of_row is None:
        return positions
    # The source is packed itself: at position p lies the row of the id that has p.
    by_id = positions
    if by_id is None:
        by_id = torch.arange(rows.row_count, dtype=rows.position_of_row.dtype, device="cpu")
    targets = torch.empty_like(by_id)
    targets[rows.position_of_row.long()] = by_id
    return targets


def _blocks(rows: RowSource, engine: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Read a table in file order; yield the position of the first row of each block, and its bytes.

    A block may be used until the next one is asked for; meanwhile the one behind it is read.
    """
    unit = BLOCK_BYTES // math.gcd(BLOCK_BYTES, rows.row_bytes)  # so many rows are whole pages
    block_count = max(1, _BLOCK_BYTES // rows.row_bytes)
    if block_count > unit:
        block_count -= block_count % unit
    buffers = [page_tensor(min(block_count, rows.row_count) * rows.row_bytes) for _ in range(2)]
    before_count = 0
    for piece in rows.pieces:
        with TensorFile(piece.path, engine=engine) as file:
            check = _check_of(piece, file)
            ahead: deque[tuple[int, torch.Tensor, PendingIO]] = deque()
            for number, start in enumerate(range(0, piece.row_count, block_count)):
                size_bytes = min(block_count, piece.row_count - start) * rows.row_bytes
                block = buffers[number % 2][:size_bytes]
                pending = file.read_async(block, piece.offset_bytes + start * rows.row_bytes)
                ahead.append((before_count + start, block, pending))
                if len(ahead) == len(buffers):
                    yield _read(ahead.popleft(), check)
            while ahead:
                yield _read(ahead.popleft(), check)
        before_count += piece.row_count


def _check_of(piece: Piece, file: TensorFile) -> ChunkCheck | None:
    """Compare the header with the sidecar; return what compares the rows. None if there is no sidecar of this table."""
    facts = read_sidecar(piece.path)
    if facts is None or (facts.offset_bytes, facts.file_bytes) != (piece.offset_bytes, file.size()):
        return None  # another program has written the table anew
    check = ChunkCheck(facts, piece.path)
    header = torch.empty(facts.offset_bytes, dtype=torch.uint8, device="cpu")
    file.read(header)
    check.take(header)
    return check


def _read(begun: tuple[int, torch.Tensor, PendingIO], check: ChunkCheck | None) -> tuple[int, torch.Tensor]:
    first, block, pending = begun
    pending.wait()
    if check is not None:
        check.take(block)
    return first, block


def _as_rows(data: torch.Tensor, rows: RowSource) -> torch.Tensor:
    return data.view(rows.dtype).view(-1, *rows.row_shape)


def _widest_integer(row_bytes: int) -> torch.dtype:
    """Return the widest integer of which rows are made: rows of few elements are copied faster."""
    widths = (torch.int64, torch.int32, torch.int16)
    return next((dtype for dtype in widths if row_bytes % dtype.itemsize == 0), torch.uint8)


def _items(rows: RowSource) -> int:
    return rows.row_bytes // _widest_integer(rows.row_bytes).itemsize
