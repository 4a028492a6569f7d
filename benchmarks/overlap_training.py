"""The training that overlap.py measures: models with random weights, Adam, random data, all from one seed.

Knows nothing of checkpoints. Where a way of saving has to step in (before the optimizer's step), it is called back.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fastpersist.cli.bench.overlap.run import StepTimes, TrainedModel

__all__ = ["MODELS", "Recipe", "StepTimes", "Training", "recipe_of"]

_SEED = 20260


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained; the same recipe gives the same losses in every process.

    Attributes:
        model: One of MODELS.
        batch_count: Sequences (gpt2) or rows (mlp) of a step.
        sequence_count: Tokens of a sequence; without meaning for an mlp.
        layer_count: Blocks (gpt2) or square layers (mlp).
        width: Of the residual stream, or of the square layers.
        vocabulary_count: Tokens there are; for an mlp, classes.
        adam: "fused" or "foreach".
    """

    model: str
    batch_count: int
    sequence_count: int
    layer_count: int
    width: int
    vocabulary_count: int
    adam: str = "fused"

    def plain(self) -> dict[str, Any]:
        """Return the recipe as JSON can carry it; Recipe(**plain) is the way back."""
        return asdict(self)


# Batches are such that a step takes about 1 s on one thread of a 2025 server processor (some 80 GFLOP/s).
MODELS = {
    "gpt2-124m": Recipe("gpt2-124m", 1, 96, layer_count=12, width=768, vocabulary_count=50257),
    "mlp": Recipe("mlp", 96, 1, layer_count=7, width=4096, vocabulary_count=1000),
    "tiny": Recipe("tiny", 16, 1, layer_count=3, width=256, vocabulary_count=100),
}


def recipe_of(model: str, *, adam: str, batch_count: int | None, sequence_count: int | None) -> Recipe:
    """Return the recipe of a model, with what the user wants different."""
    base = MODELS[model]
    changes: dict[str, Any] = {"adam": adam}
    if batch_count is not None:
        changes["batch_count"] = batch_count
    if sequence_count is not None:
        changes["sequence_count"] = sequence_count
    return Recipe(**(base.plain() | changes))


class _Block(nn.Module):
    """One transformer block of GPT-2: attention, then a feed-forward net, each behind a norm."""

    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.head_count, width // self.head_count).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: torch.Tensor = self.down(functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))
        return x + hidden


class _Gpt2(nn.Module):
    """GPT-2 with the output head tied to the token embedding: 124.4 million parameters in 12 layers of 768."""

    def __init__(self, recipe: Recipe, context_count: int = 1024) -> None:
        super().__init__()
        width = recipe.width
        self.wte, self.wpe = nn.Embedding(recipe.vocabulary_count, width), nn.Embedding(context_count, width)
        self.blocks = nn.ModuleList(_Block(width, width // 64) for _ in range(recipe.layer_count))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, recipe.vocabulary_count, bias=False)
        self.head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln_f(x))
        return logits


def _mlp(recipe: Recipe) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(recipe.layer_count):
        layers += [nn.Linear(recipe.width, recipe.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(recipe.width, recipe.vocabulary_count))


class Training(TrainedModel):
    """A model, its optimizer and its data. One thread.

    Args:
        recipe: What to train.
    """

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(_SEED)
        self.recipe = recipe
        model = _Gpt2(recipe) if recipe.model.startswith("gpt2") else _mlp(recipe)
        is_fused = recipe.adam == "fused"
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_fused, foreach=not is_fused))
        self._data = torch.Generator().manual_seed(_SEED)
        self.losses: list[float] = []

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        recipe = self.recipe
        if recipe.model.startswith("gpt2"):
            shape = (recipe.batch_count, recipe.sequence_count + 1)
            tokens = torch.randint(recipe.vocabulary_count, shape, generator=self._data)
            return tokens[:, :-1], tokens[:, 1:]
        inputs = torch.randn(recipe.batch_count, recipe.width, generator=self._data)
        return inputs, torch.randint(recipe.vocabulary_count, (recipe.batch_count,), generator=self._data)

    def loss(self) -> torch.Tensor:
        """Return the loss of the next batch."""
        inputs, targets = self._batch()
        return functional.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

    def end_step(self, loss: torch.Tensor) -> None:
        """Read the loss."""
        self.losses.append(loss.item())
