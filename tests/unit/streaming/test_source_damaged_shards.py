"""All that is wrong with the files of an index is told by one error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fastpersist as fp


def test_missing_and_damaged_shards_are_named_together(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    weight_map = {}
    for name, tensor in model.state_dict().items():
        weight_map[name] = f"model-{name}.safetensors"
        fp.save({name: tensor}, tmp_path / weight_map[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-0.weight.safetensors").unlink()
    cut = tmp_path / "model-1.weight.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    (tmp_path / "model-2.bias.safetensors").write_bytes(b"no file of weights")
    with pytest.raises(fp.ConfigError) as caught:
        fp.stream(model, tmp_path, budget_bytes="1MiB")
    for name in ("model-0.weight", "model-1.weight", "model-2.bias"):
        assert f"{name}.safetensors" in str(caught.value)
    assert "3.weight" not in str(caught.value)
