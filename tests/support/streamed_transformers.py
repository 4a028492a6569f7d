"""Tiny models of transformers in files, with inputs, and what a streamed one is compared by."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSeq2SeqLM

WORDS = 512

_DECODER = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig(**_GROUPED), AutoModelForCausalLM),
    "qwen3": (transformers.Qwen3Config(**_GROUPED, head_dim=16, tie_word_embeddings=True), AutoModelForCausalLM),
    "gpt2": (transformers.GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=4, n_head=4), AutoModelForCausalLM),
    "opt": (
        transformers.OPTConfig(
            vocab_size=WORDS, hidden_size=64, word_embed_proj_dim=64, ffn_dim=256, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=128,
        ),
        AutoModelForCausalLM,
    ),
    "mixtral": (
        transformers.MixtralConfig(**{**_GROUPED, "intermediate_size": 96}, num_local_experts=11),
        AutoModelForCausalLM,
    ),
    "t5": (
        transformers.T5Config(
            vocab_size=WORDS, d_model=64, d_kv=16, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0
        ),
        AutoModelForSeq2SeqLM,
    ),
    "bart": (
        transformers.BartConfig(
            vocab_size=WORDS, d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=256, decoder_ffn_dim=256,
            encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=128,
        ),
        AutoModelForSeq2SeqLM,
    ),
    "vit": (
        transformers.ViTConfig(
            hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, image_size=32,
            patch_size=8, num_labels=5,
        ),
        AutoModelForImageClassification,
    ),
}  # fmt: skip


def new_model(name: str, dtype: torch.dtype = torch.float32, *, auto_class: Any = None, **changes: Any) -> Any:
    """Return a model with random weights; the same name gives the same weights."""
    config, usual_class = ARCHITECTURES[name]
    config = type(config).from_dict({**config.to_dict(), **changes})
    torch.manual_seed(0)
    return (auto_class or usual_class).from_config(config).to(dtype).eval()


def save(model: Any, directory: Path, *, shards: bool = False, **options: Any) -> Path:
    """Save a model as transformers does: in one file, or in about six."""
    size_bytes = sum(each.nbytes for each in model.parameters())
    options = {"max_shard_size": size_bytes // 6, **options} if shards else options
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        model.save_pretrained(directory, **options)
    assert len(list(directory.glob("*.safetensors"))) > 2 or not shards
    return directory


def with_odd_header(file: Path) -> None:
    """Write a safetensors file anew with a header of odd length, so that no tensor is aligned."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip(b" ")
    header += b" " * (1 - len(header) % 2)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def change_config(directory: Path, **changes: Any) -> None:
    """Change config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Return inputs for a batch of two."""
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.rand((2, 3, 32, 32), generator=generator).to(model.dtype)}
    ids = torch.randint(3, WORDS, (2, 9), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def answers_of(model: Any) -> list[torch.Tensor]:
    """Return the logits (or the last hidden states) of a forward and, where the model generates, its greedy tokens."""
    inputs = inputs_of(model)
    generates = model.can_generate()
    given = {**inputs, "decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else inputs
    with torch.no_grad():
        found = model(**given)
    answers = [found.logits if "logits" in found else found.last_hidden_state]
    if generates:
        answers.append(model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False))
    return answers


def assert_same_answers(streamed: Any, stock: Any) -> None:
    """Compare what two models answer, bit by bit."""
    for ours, theirs in zip(answers_of(streamed), answers_of(stock), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def fingerprint(directory: Path) -> Mapping[str, tuple[int, int, int, bytes]]:
    """Return what a write to a directory would change."""
    found = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        told = os.stat(path)
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (told.st_ino, told.st_mtime_ns, told.st_ctime_ns, content)
    return found


__all__ = [
    "ARCHITECTURES",
    "answers_of",
    "assert_same_answers",
    "change_config",
    "fingerprint",
    "inputs_of",
    "new_model",
    "save",
    "with_odd_header",
]
