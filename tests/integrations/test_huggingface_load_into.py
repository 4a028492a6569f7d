"""fp.load_into of what save_pretrained of transformers wrote: several files, an index, tied weights once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.sameness import assert_same

import fastpersist as fp

transformers = pytest.importorskip("transformers")


def network(seed: int) -> torch.nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=16)
    torch.manual_seed(seed)
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def test_a_model_with_tied_weights_is_filled_from_its_shards(tmp_path: Path) -> None:
    source, target = network(1), network(2)
    source.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert fp.load_into(tmp_path, target) == ([], [])
    assert_same(dict(target.state_dict()), dict(source.state_dict()))
    assert target.lm_head.weight is target.transformer.wte.weight
