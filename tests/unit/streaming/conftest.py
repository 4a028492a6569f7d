"""What tests of streamed models share: one thread, units that are small, and the file of a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.streamed_models import Blocks, save_weights, small_units

__all__ = ["path", "small_units"]

torch.set_num_threads(1)  # sums are the same then, whatever else runs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The weights of a small model, in a safetensors file."""
    return save_weights(Blocks(), tmp_path / "model.safetensors")
