"""`dtype="model"` converts each weight to the dtype that the model gives it, and nothing that is no conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastpersist as fp


class TwoPrecisions(torch.nn.Module):
    """A part in bfloat16, and one that is to keep float32."""

    def __init__(self) -> None:
        super().__init__()
        self.low = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        self.high = torch.nn.Linear(8, 8, dtype=torch.float32)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(inputs.bfloat16()).float()) + self.count.sum()


def saved(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    state = TwoPrecisions().state_dict()
    state = {name: each.to(dtype) if each.is_floating_point() else each + 5 for name, each in state.items()}
    fp.save(state, path)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_weight_gets_the_dtype_of_the_model(dtype: torch.dtype, tmp_path: Path) -> None:
    state = saved(tmp_path / "model.safetensors", dtype)
    whole, model = TwoPrecisions(), TwoPrecisions()
    whole.load_state_dict(state)
    inputs = torch.randn(4, 8)
    with fp.stream(model, tmp_path / "model.safetensors", dtype="model", budget_bytes="1MiB"):
        assert (model.low.weight.dtype, model.high.weight.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(model(inputs), whole(inputs))


def test_no_integers_are_made_of_floating_point_numbers(tmp_path: Path) -> None:
    state = saved(tmp_path / "model.safetensors", torch.float32)
    fp.save({**state, "count": state["count"].float()}, tmp_path / "model.safetensors")
    with pytest.raises(fp.ConfigError, match=r"count is torch\.int64, in the source torch\.float32"):
        fp.stream(TwoPrecisions(), tmp_path / "model.safetensors", dtype="model", budget_bytes="1MiB")
