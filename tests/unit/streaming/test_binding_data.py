"""A weight that is on disk cannot be changed in memory, by no way that would go unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastpersist as fp


def test_data_is_refused_since_a_change_through_it_would_be_lost(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fp.save(model.state_dict(), tmp_path / "model.safetensors")
    with fp.stream(model, tmp_path / "model.safetensors", budget_bytes="1MiB"):
        with pytest.raises(fp.ConfigError, match=r"0\.weight"):
            model[0].weight.data += 1  # as peft merges an adapter
        with pytest.raises(fp.ConfigError, match=r"0\.weight"):
            model[0].weight.data.clone()
