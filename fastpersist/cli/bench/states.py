"""The states to save and load: real parameter shapes with Adam moments, one big tensor, many small ones.

Everything is built from shapes and random numbers, so nothing is downloaded and no device can compress or share blocks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["STATE_NAMES", "State", "StateRecipe", "flatten", "tensor_bytes"]

STATE_NAMES = ("gpt-29m", "gpt2-124m", "gpt2-355m", "one-tensor", "small-tensors")

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Gpt2:
    """What decides the shapes of a GPT-2."""

    layer_count: int
    width: int
    vocabulary_count: int = 50257
    context_count: int = 1024

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every parameter; the output head is the token embedding, and stored once."""
        width = self.width
        yield "transformer.wte.weight", (self.vocabulary_count, width)
        yield "transformer.wpe.weight", (self.context_count, width)
        for layer in range(self.layer_count):
            block = f"transformer.h.{layer}"
            yield from _norm(f"{block}.ln_1", width)
            yield from _projection(f"{block}.attn.c_attn", width, 3 * width)
            yield from _projection(f"{block}.attn.c_proj", width, width)
            yield from _norm(f"{block}.ln_2", width)
            yield from _projection(f"{block}.mlp.c_fc", width, 4 * width)
            yield from _projection(f"{block}.mlp.c_proj", 4 * width, width)
        yield from _norm("transformer.ln_f", width)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _projection(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (inputs, outputs)
    yield f"{name}.bias", (outputs,)


_GPT2 = {
    "gpt-29m": _Gpt2(layer_count=4, width=768, vocabulary_count=256, context_count=512),  # of bytes, not of tokens
    "gpt2-124m": _Gpt2(layer_count=12, width=768),
    "gpt2-355m": _Gpt2(layer_count=24, width=1024),
}
_QUICK_GPT2 = {
    "gpt-29m": _Gpt2(layer_count=2, width=256, vocabulary_count=256, context_count=512),
    "gpt2-124m": _Gpt2(layer_count=2, width=256, vocabulary_count=2048),
    "gpt2-355m": _Gpt2(layer_count=3, width=256, vocabulary_count=2048),
}


@dataclass(frozen=True, slots=True)
class State:
    """What is saved.

    Attributes:
        tree: Nested dicts and lists of contiguous float32 host tensors and plain numbers.
        payload_bytes: Bytes of all tensors; every rate is these bytes per second, whatever a format adds to them.
        tensor_count: How many tensors there are.
    """

    tree: dict[str, Any]
    payload_bytes: int
    tensor_count: int


@dataclass(frozen=True, slots=True)
class StateRecipe:
    """How to build a state; the same recipe gives the same state in every process.

    Args:
        name: One of STATE_NAMES.
        quick: Build a small one of the same kind, 16 to 48 MiB, for trying out the benchmark itself.
        one_tensor_bytes: Size of the state "one-tensor", a multiple of 4.
    """

    name: str
    quick: bool = False
    one_tensor_bytes: int = 1024 * _MIB

    def build(self, *, random_numbers: bool = True) -> State:
        """Build the state, every page of it touched.

        Args:
            random_numbers: Fill with these; else with ones, faster, for what is overwritten anyway.
        """
        tree = self._lay_out()
        generator = torch.Generator().manual_seed(0)
        tensors = flatten(tree)
        for name, tensor in tensors.items():
            # Adam's step counters are numbers, which some loaders look at.
            if random_numbers and not name.endswith(".step"):
                tensor.normal_(generator=generator)
            else:
                tensor.fill_(1.0)
        return State(tree, tensor_bytes(tree), len(tensors))

    def payload_bytes(self) -> int:
        """Return the bytes of all tensors, without any memory for them."""
        with torch.device("meta"):
            return tensor_bytes(self._lay_out())

    def _lay_out(self) -> dict[str, Any]:
        if self.name in _GPT2:
            return _training_state((_QUICK_GPT2 if self.quick else _GPT2)[self.name])
        if self.name == "one-tensor":
            return {"tensor": torch.empty((16 * _MIB if self.quick else self.one_tensor_bytes) // 4)}
        return _small_tensors(1_000 if self.quick else 10_000)


def _training_state(model: _Gpt2) -> dict[str, Any]:
    """Lay out what a training script saves: parameters, and the state_dict of torch.optim.AdamW over them."""
    shapes = dict(model.shapes())
    moments = {
        index: {"step": torch.empty(()), "exp_avg": torch.empty(shape), "exp_avg_sq": torch.empty(shape)}
        for index, shape in enumerate(shapes.values())
    }
    group = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "params": list(moments)}
    return {
        "model": {name: torch.empty(shape) for name, shape in shapes.items()},
        "optimizer": {"state": moments, "param_groups": [group]},
        "iteration": 1000,
    }


def _small_tensors(count: int) -> dict[str, Any]:
    """Lay out tensors of 1 to 64 KiB, any multiple of 4 bytes."""
    sizes = random.Random(0)
    return {f"tensor.{index:05}": torch.empty(sizes.randint(256, 16384)) for index in range(count)}


def flatten(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of nested dicts and lists by their dotted names, as safetensors takes them."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = dict(enumerate(tree)).items()
    else:
        return {}
    found = {}
    for key, value in items:
        found.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return found


def tensor_bytes(tree: Any) -> int:
    """Return the bytes of all tensors in nested dicts and lists."""
    return sum(tensor.nbytes for tensor in flatten(tree).values())
