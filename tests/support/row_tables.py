"""Tables whose rows say which they are, so a wrong row shows."""

from __future__ import annotations

from pathlib import Path

import torch

from fastpersist.rows.opening import RowSource


def make_rows(count: int, width: int = 32, first: int = 0) -> torch.Tensor:
    """Return int32 rows first … first + count - 1 of an endless table."""
    ids = torch.arange(first, first + count, dtype=torch.int64).unsqueeze(1)
    numbers = ids * 0x9E3779B1 + torch.arange(width) * 0x85EBCA6B + 12345
    return (numbers & 0x7FFFFFFF).to(torch.int32)


def bytes_of(rows: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in row-major order."""
    return bytes(rows.contiguous().reshape(-1).view(torch.uint8).tolist()) if rows.numel() else b""


def read_rows(source: RowSource) -> torch.Tensor:
    """Read all rows of a source in the order of their ids, by nothing but their places."""
    parts = []
    for piece in source.pieces:
        with open(piece.path, "rb") as file:
            file.seek(piece.offset_bytes)
            parts.append(file.read(piece.row_count * source.row_bytes))
    data = bytearray(b"".join(parts))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    rows = flat.view(source.dtype).view(-1, *source.row_shape)
    return rows if source.position_of_row is None else rows[source.position_of_row.long()]


def hidden_files(directory: Path) -> list[str]:
    """List the hidden files of a directory."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))
