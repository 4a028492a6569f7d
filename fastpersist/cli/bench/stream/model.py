"""The model of `bench stream`: a Llama with random weights, made shard by shard, so that it is never whole in memory.

Each shard is written in the form that each way reads: safetensors as transformers writes them, a torch file for
mapping, and the folder of `accelerate.disk_offload`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

import fastpersist

__all__ = ["FORM_COUNT", "MODEL_NAMES", "ModelFiles", "make_model", "weight_sizes"]

MODEL_NAMES = ("large", "small")
FORM_COUNT = 3
"""How often the model is on disk."""

_SHARD_BYTES = 1_000_000_000
_SHAPES: dict[str, dict[str, int]] = {
    "large": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 12,
        "vocab_size": 32000,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 16,
        "vocab_size": 4096,
    },
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.

    Attributes:
        directory: The directory of the model's files, in the form that transformers reads.
        torch_paths: Files for torch.load, which together hold all tensors of the model.
        offload_directory: The offload folder of accelerate; empty where accelerate is not installed.
        offload_s: The seconds that making this folder took; its user waits so long before the first token.
        weight_bytes: Bytes of all tensors.
        pass_bytes: Bytes of the tensors that a token pass needs whole: all but the embedding.
    """

    directory: str
    torch_paths: list[str]
    offload_directory: str
    offload_s: float
    weight_bytes: int
    pass_bytes: int

    def paths(self, suffix: str) -> list[str]:
        """Return the files of the model that have this ending."""
        places = (self.directory, self.offload_directory, *{os.path.dirname(path) for path in self.torch_paths})
        return [
            os.path.join(place, name)
            for place in filter(None, places)
            for name in sorted(os.listdir(place))
            if name.endswith(suffix)
        ]


def _config(name: str, layer_count: int | None) -> Any:
    from transformers import LlamaConfig

    shape: dict[str, Any] = _SHAPES[name] | ({} if layer_count is None else {"num_hidden_layers": layer_count})
    return LlamaConfig(**shape, tie_word_embeddings=False, dtype="bfloat16", pad_token_id=0)


def _weights(config: Any) -> dict[str, torch.Tensor]:
    """Return the weights by name, without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()}


def weight_sizes(name: str, layer_count: int | None) -> list[int]:
    """Return the bytes of each weight of a model.

    Args:
        name: One of MODEL_NAMES.
        layer_count: The number of layers; None for the model's own.
    """
    return [weight.nbytes for weight in _weights(_config(name, layer_count)).values()]


def make_model(directory: str, name: str, layer_count: int | None) -> ModelFiles:
    """Make the files of a model.

    Args:
        directory: An empty directory.
        name: One of MODEL_NAMES.
        layer_count: The number of layers; None for the model's own.

    Raises:
        StorageError: A file cannot be written.
    """
    from safetensors.torch import save_file

    config = _config(name, layer_count)
    weights = _weights(config)
    places = {form: os.path.join(directory, form) for form in ("safetensors", "torch", "offload")}
    for place in places.values():
        os.mkdir(place)
    config.save_pretrained(places["safetensors"])
    shards = _shards(weights)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    offloaded: dict[str, Any] = {}
    torch_paths = []
    offload_s = 0.0
    for number, names in enumerate(shards, 1):
        stem = f"model-{number:05}-of-{len(shards):05}"
        tensors = {one: _filled(weights[one], generator) for one in names}
        save_file(tensors, os.path.join(places["safetensors"], f"{stem}.safetensors"), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, f"{stem}.safetensors")
        torch_paths.append(os.path.join(places["torch"], f"{stem}.pt"))
        fastpersist.save(tensors, torch_paths[-1])
        offload_s += _offload(tensors, places["offload"], offloaded)
    weight_bytes = sum(weight.nbytes for weight in weights.values())
    with open(os.path.join(places["safetensors"], "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": weight_bytes}, "weight_map": weight_map}, file)
    if offloaded:
        with open(os.path.join(places["offload"], "index.json"), "w") as file:
            json.dump(offloaded, file)
    return ModelFiles(
        places["safetensors"],
        torch_paths,
        places["offload"] if offloaded else "",
        offload_s,
        weight_bytes,
        weight_bytes - weights["model.embed_tokens.weight"].nbytes,
    )


def _shards(weights: dict[str, torch.Tensor]) -> list[list[str]]:
    """Cut the names, in order, into shards of at most a gigabyte, as save_pretrained does."""
    shards: list[list[str]] = [[]]
    size_bytes = 0
    for name, weight in weights.items():
        if shards[-1] and size_bytes + weight.nbytes > _SHARD_BYTES:
            shards.append([])
            size_bytes = 0
        shards[-1].append(name)
        size_bytes += weight.nbytes
    return shards


def _filled(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty_like(weight, device="cpu")
    return values.fill_(1.0) if weight.dim() < 2 else values.normal_(std=0.02, generator=generator)  # 1-d: of norms


def _offload(tensors: dict[str, torch.Tensor], directory: str, index: dict[str, Any]) -> float:
    """Write what `accelerate.disk_offload` writes at its first start; return the seconds."""
    if importlib.util.find_spec("accelerate") is None:
        return 0.0
    from accelerate.utils import offload_weight  # type: ignore[import-untyped]

    started_s = time.perf_counter()
    for name, tensor in tensors.items():
        offload_weight(tensor, name, directory, index=index)
    return time.perf_counter() - started_s
