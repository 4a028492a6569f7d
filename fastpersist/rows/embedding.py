"""A module in place of `torch.nn.Embedding` whose rows stay on disk: `fastpersist.RowEmbedding`."""

from __future__ import annotations

import torch

from fastpersist.errors import ConfigError, RowIndexError
from fastpersist.rows.device_rows import rows_at
from fastpersist.rows.store import RowStore

__all__ = ["RowEmbedding"]


class RowEmbedding(torch.nn.Module):
    """A frozen embedding whose rows are read from disk when they are looked up.

    It has no parameter and no buffer: it adds nothing to a state_dict, and `to` converts nothing. Results have no
    gradient, and are in the table's dtype.

    Args:
        rows: The table; its rows have one dimension. The caller owns it, and closes it.

    Attributes:
        rows: The table.
        num_embeddings: The number of rows.
        embedding_dim: The number of elements in each row.

    Raises:
        ConfigError: `rows` is no RowStore, or its rows have another shape.

    Thread safety: as `RowStore`, any thread.
    """

    def __init__(self, rows: RowStore) -> None:
        super().__init__()
        if not isinstance(rows, RowStore):
            raise ConfigError(f"rows is a RowStore, not {type(rows).__name__}")
        if len(rows.row_shape) != 1:
            raise ConfigError(f"an embedding's rows have one dimension; those of {rows!r} have {len(rows.row_shape)}")
        self.rows = rows
        self.num_embeddings = rows.row_count
        self.embedding_dim = rows.row_shape[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, on the ids' device.

        Args:
            ids: Whole numbers of any shape.

        Returns:
            A tensor of shape `ids.shape + (embedding_dim,)`.

        Raises:
            RowIndexError, ConfigError, StorageError: As `RowStore.gather`.
        """
        if not isinstance(ids, torch.Tensor):
            raise ConfigError(f"ids of an embedding are a tensor, not {type(ids).__name__}; pass torch.as_tensor(ids)")
        if not ids.is_cuda:
            return self.rows.gather(ids, device=ids.device)
        try:  # a repeated row crosses the bus once
            unique, inverse = torch.unique(ids, return_inverse=True)
            return rows_at(self.rows.gather(unique, device=ids.device), inverse)
        except RowIndexError:
            self.rows.gather(ids)  # its error says which of the ids it is
            raise

    def extra_repr(self) -> str:
        """Describe the table."""
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={self.rows.dtype}, on disk"
