"""The trainings of `bench overlap`: square layers of any size, a GPT-2, or many vectors, under AdamW, on random inputs.

Matrix products that do not touch the state make a step as long as wanted. `overlap.run` defines a step and its times;
`overlap.ways` saves.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional

from fastpersist.cli.bench.overlap.run import TrainedModel
from fastpersist.cli.demo.gpt import Block, Sizes

__all__ = ["GPT2", "GPT2_STATE_BYTES", "LAYERS", "MODELS", "VECTORS", "SyntheticTraining"]

GPT2, LAYERS, VECTORS = "gpt2-124m", "layers", "vectors"
MODELS = (LAYERS, GPT2, VECTORS)
GPT2_STATE_BYTES = 124_439_808 * 12

_SEED = 20260
_ROW_COUNT = 16  # of the inputs of the layers: so few that the length of a step is the products' affair
_TOKEN_COUNT = 96  # of a GPT-2's sequence: a step takes about 1 s on one thread of a 2025 server processor
_WIDTHS = (4096, 2048, 1024, 512, 256, 128, 64)
_LAYER_COUNT_MIN = 4
_COPY_COUNT = 3  # of a parameter: itself and two moments
_VECTOR_COUNT = 2500  # each is four tensors of the state, with the count of its steps


class _Gpt2(nn.Module):
    """GPT-2 with the output head tied to the token embedding: 124.4 million parameters in 12 layers of 768."""

    vocabulary_count = 50257

    def __init__(self) -> None:
        super().__init__()
        size = Sizes(width=768, layers=12, heads=12, context=1024, batch=1)
        self.wte, self.wpe = nn.Embedding(self.vocabulary_count, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.ln_f = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, self.vocabulary_count, bias=False)
        self.head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)
        self.eval()  # without dropout, whose random numbers only take time

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(
            self.ln_f(self.blocks(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])),
        )
        return logits


def _layers(parameter_count: int, dtype: torch.dtype) -> tuple[nn.Module, int]:
    """Return square layers with about so many parameters, and their width."""
    width = next((w for w in _WIDTHS if _LAYER_COUNT_MIN * w * w <= parameter_count), _WIDTHS[-1])
    layer_count, rest = divmod(parameter_count, width**2)
    shapes = [(width, width)] * layer_count + [(width, rest // width)] * (rest >= width)
    model = nn.Sequential(*(nn.Linear(*shape, bias=False, dtype=dtype) for shape in shapes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=width**-0.5)  # or gradients would vanish, and steps change nothing
    return model, width


class _Vectors(nn.Module):
    """Many small parameters, as adapters and experts have them."""

    def __init__(self, parameter_count: int, dtype: torch.dtype) -> None:
        super().__init__()
        length = max(parameter_count // _VECTOR_COUNT, 1)
        self.vectors = nn.ParameterList(torch.randn(length, dtype=dtype) for _ in range(_VECTOR_COUNT))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean() * torch.cat(tuple(self.vectors))


def _model(name: str, parameter_count: int, dtype: torch.dtype) -> tuple[nn.Module, int]:
    """Return one of MODELS, and the width of its inputs."""
    if name == GPT2:
        return _Gpt2(), 768
    if name == VECTORS:
        return _Vectors(parameter_count, dtype), 1
    return _layers(parameter_count, dtype)


class SyntheticTraining(TrainedModel):
    """A model under AdamW, random inputs, and products that only take time. One thread.

    Args:
        size_bytes: The size of parameters and moments together, approximately; a GPT-2 has a size of its own.
        device: The device of the model, its inputs and the products.
        product_count: Matrix products in each step; they touch nothing of the state.
        model: One of MODELS.
        batch_count: Rows or sequences in each step; None for the default.
        token_count: Tokens in each sequence; None for the default.
        dtype: The dtype of the layers and their moments.
    """

    def __init__(
        self,
        size_bytes: int,
        device: str,
        product_count: int = 0,
        *,
        model: str = LAYERS,
        batch_count: int | None = None,
        token_count: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(_SEED)
        self._device = torch.device(device)
        self._is_gpt2 = model == GPT2
        parameter_count = max(size_bytes // (_COPY_COUNT * dtype.itemsize), 1)
        with self._device:
            network, self.width = _model(model, parameter_count, dtype)
            side = 256 if self._device.type == "cpu" else 2048 if dtype == torch.float32 else 8192
            self._factors = [torch.randn(side, side, dtype=dtype) for _ in range(3)]
        super().__init__(network, torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True))
        self.product_count = product_count
        self._batch_count = batch_count or (1 if self._is_gpt2 else _ROW_COUNT)
        self._token_count = token_count or _TOKEN_COUNT

    def compute(self, product_count: int) -> None:
        """Keep the device busy."""
        first, second, out = self._factors
        for _ in range(product_count):
            torch.mm(first, second, out=out)

    def product_s(self) -> float:
        """Return the seconds of a product, with nothing beside it."""
        self.compute(3)
        self.synchronize()
        start = time.perf_counter()
        self.compute(20)
        self.synchronize()
        return (time.perf_counter() - start) / 20

    def loss(self) -> torch.Tensor:
        """Return the loss of random inputs."""
        if self._is_gpt2:
            shape = (self._batch_count, self._token_count + 1)
            tokens = torch.randint(_Gpt2.vocabulary_count, shape, device=self._device)
            return functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        inputs = torch.randn(self._batch_count, self.width, device=self._device, dtype=self._factors[0].dtype)
        output: torch.Tensor = self.model(inputs)
        return output.float().square().mean()

    def follow_backward(self) -> None:
        """Make the step as long as wanted."""
        self.compute(self.product_count)

    def end_step(self, loss: torch.Tensor) -> None:
        """Wait for the device."""
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the stream that trains, and for no other: saving has streams of its own, which go on."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
