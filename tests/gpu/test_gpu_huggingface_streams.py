"""Models of transformers streamed to a GPU: the answers of the stock model on that GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from support.gpu_device import DEVICE, GPU
from support.streamed_transformers import ARCHITECTURES, inputs_of, new_model, save

from fastpersist.integrations.huggingface_streaming import from_pretrained

pytestmark = GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5"])
def test_logits_and_greedy_tokens_are_those_of_the_stock_model(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastpersist.streaming import stream

    monkeypatch.setattr(stream, "_UNIT_BYTES_MIN", 64 << 10)
    directory = save(new_model(name, dtype), tmp_path / "model", shards=True)
    auto_class = ARCHITECTURES[name][1]
    # The other way to compute experts counts with a kernel that no emulated GPU has.
    options = {"experts_implementation": "eager"} if name == "mixtral" else {}
    budget_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors")) * 7 // 10
    model = from_pretrained(directory, device_map=DEVICE, auto_class=auto_class, budget_bytes=budget_bytes, **options)
    assert model.weight_stream.stats().streamed_bytes > 0
    stock = auto_class.from_pretrained(directory, **options).to(DEVICE)
    assert model.device == stock.device
    inputs = {key: each.to(DEVICE) for key, each in inputs_of(model).items()}
    given = {**inputs, "decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else inputs
    with torch.no_grad():
        assert torch.equal(model(**given).logits, stock(**given).logits)
    tokens = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **tokens), stock.generate(**inputs, **tokens))
    model.weight_stream.close()
