"""What tests of stores share: the rows of a table, and its file, which all tests of a module read and none changes.

A module says how many rows it has (COUNT), and how long these are (ROW_BYTES) if not 128 bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.row_tables import make_rows

from fastpersist.rows.writer import write_rows


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> torch.Tensor:
    """All rows of the module's table."""
    return make_rows(request.module.COUNT, getattr(request.module, "ROW_BYTES", 128) // 4)


@pytest.fixture(scope="module")
def path(rows: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table."""
    path = tmp_path_factory.mktemp("table") / "table.npy"
    write_rows(path, rows)
    return path
