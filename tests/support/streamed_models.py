"""Small models whose weights are streamed: files of them, models without values, and units that are small, too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fastpersist as fp
from fastpersist.errors import ConfigError
from fastpersist.streaming import stream as stream_module

__all__ = [
    "Blocks",
    "budgets",
    "expect_same",
    "hand_made_safetensors",
    "least_budget",
    "loaded_whole",
    "on_meta",
    "save_weights",
    "small_units",
    "weights_of",
]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let units be as small as 8 KiB, and let only tensors below 1 KiB be small ones."""
    monkeypatch.setattr(stream_module, "_UNIT_BYTES_MIN", 8 << 10)
    monkeypatch.setattr(stream_module, "_SMALL_BYTES", 1 << 10)


class Blocks(nn.Module):
    """An embedding, blocks of three weights each, and a head; the blocks are called in order."""

    def __init__(self, depth: int = 6, width: int = 48, words: int = 100, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)
        )
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        result: torch.Tensor = self.head(hidden)
        return result


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model, each tied tensor once, under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        found[name] = tensor.detach().clone().contiguous()
    return found


def save_weights(model: nn.Module, path: Path, *, shards: int = 1) -> Path:
    """Write a model's weights as safetensors: one file, or a directory with an index."""
    weights = weights_of(model)
    if shards == 1:
        save_file(weights, path)
        return path
    path.mkdir(exist_ok=True)
    names = list(weights)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = names[number::shards]
        save_file({name: weights[name] for name in own}, path / file)
        weight_map |= dict.fromkeys(own, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def loaded_whole(model: nn.Module, path: Path) -> nn.Module:
    """Give a model the values of a safetensors file, mapped into memory, and return it frozen, as streamed weights are.

    Its outputs are what streaming is measured by: libraries may sum in another order for another alignment, and torch
    multiplies in another shape if a weight requires a gradient.
    """
    model.requires_grad_(False)
    values = load_file(path)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in values:
            tensor.data = values[name]
    return model


def hand_made_safetensors(tensors: Mapping[str, torch.Tensor], path: Path, *, padding: int = 0, gap: int = 0) -> None:
    """Write a safetensors file whose data begins `padding` bytes behind a multiple of eight; stock readers take it."""
    header: dict[str, Any] = {}
    data = b""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8", torch.float64: "F64"}
    for number, (name, tensor) in enumerate(tensors.items()):
        if gap and number:
            header[f"_gap{number}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [len(data), len(data) + gap]}
            data += bytes(gap)
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * ((-len(text)) % 8 + padding)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def on_meta(model: nn.Module) -> nn.Module:
    """Put the parameters and persistent buffers of a model on the meta device; ties stay. Returns the model."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for registry, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for local, tensor in registry.items():
                if tensor is None or (not is_parameter and local in module._non_persistent_buffers_set):
                    continue
                if id(tensor) not in made:
                    empty = tensor.detach().to("meta")
                    made[id(tensor)] = nn.Parameter(empty) if is_parameter else empty
                    made[id(made[id(tensor)])] = made[id(tensor)]
                setattr(module, local, made[id(tensor)])
    return model


def least_budget(build: Callable[[], nn.Module], source: Path, **options: Any) -> int:
    """Return the budget that the message about one that is too small asks for."""
    with pytest.raises(ConfigError, match="needs at least") as caught:
        fp.stream(build(), source, budget_bytes=1, **options)
    found = re.search(r"needs at least (\d+)", str(caught.value))
    assert found is not None
    return int(found[1])


def budgets(build: Callable[[], nn.Module], source: Path, count: int = 5, **options: Any) -> Iterator[int]:
    """Yield budgets from the least one to one for all weights."""
    least = least_budget(build, source, **options)
    most = max(2 * sum(weight.nbytes for weight in weights_of(build()).values()) + (1 << 20), least + 1)
    for step in range(count):
        yield least + (most - least) * step**2 // (count - 1) ** 2


def expect_same(found: object, expected: object) -> None:
    """Compare outputs bit by bit, in whatever containers they are."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found, expected), (found - expected).abs().max()
    elif isinstance(expected, Mapping):
        assert isinstance(found, Mapping)
        assert list(found) == list(expected)
        for key in expected:
            expect_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert isinstance(found, (list, tuple))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            expect_same(one, other)
    else:
        assert found == expected
