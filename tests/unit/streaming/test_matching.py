"""A model and a source are brought together by names, shapes and dtypes, or one error lists all that is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.leaks import no_leaks
from support.streamed_models import (
    Blocks,
    expect_same,
    hand_made_safetensors,
    least_budget,
    loaded_whole,
    on_meta,
    save_weights,
    weights_of,
)
from torch import nn

import fastpersist as fp
from fastpersist.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.usefixtures("small_units")

IDS = torch.tensor([1, 99])


def run(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(IDS)
    return result


def test_all_that_is_wrong_is_in_one_error_and_nothing_changed(tmp_path: Path) -> None:
    weights = weights_of(Blocks())
    del weights["blocks.0.0.bias"]
    weights["blocks.1.1.weight"] = torch.zeros(48, 47)
    weights["blocks.2.1.bias"] = torch.zeros(48, dtype=torch.bfloat16)
    weights["head.weight"] = torch.zeros(100, 48, dtype=torch.int32)
    save_weights(Blocks(), tmp_path, shards=3)
    names = {name: file for file in sorted(tmp_path.glob("*.safetensors")) for name in load_file(file)}
    for file in set(names.values()):
        save_file({name: each for name, each in weights.items() if names[name] == file}, file)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["embed.weight"] = "gone.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = on_meta(Blocks())
    before = {name: (id(each), each.requires_grad) for name, each in model.named_parameters()}
    with no_leaks(), pytest.raises(ConfigError) as caught:
        fp.stream(model, tmp_path)
    said = str(caught.value)
    for problem in (
        "gone.safetensors, which model.safetensors.index.json names, is missing",
        "blocks.0.0.bias is not in",
        "parameter blocks.0.0.bias",
        "blocks.1.1.weight has shape [48, 48], in the source [48, 47]",
        "blocks.2.1.bias is torch.float32, in the source torch.bfloat16: pass dtype='auto'",
        "head.weight is torch.float32, in the source torch.int32",
    ):
        assert problem in said, said
    assert {name: (id(each), each.requires_grad) for name, each in model.named_parameters()} == before


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"there is no such tensor; and 6 more$"):
        fp.stream(on_meta(Blocks()), tmp_path)


@pytest.mark.parametrize("size", [0, 8, 100, 5000])
def test_a_truncated_file_is_told_before_anything_changes(size: int, tmp_path: Path) -> None:
    path = save_weights(Blocks(), tmp_path / "model.safetensors")
    os.truncate(path, size)
    model = on_meta(Blocks())
    with no_leaks(), pytest.raises(fp.FastPersistError, match=r"model\.safetensors"):
        fp.stream(model, path)
    assert all(each.is_meta for each in model.parameters())


# ------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("kind", ["pt", "safetensors", "step"])
def test_a_training_checkpoint_by_its_prefix(kind: str, tmp_path: Path) -> None:
    whole = Blocks()
    optimizer = torch.optim.Adam(whole.parameters())
    whole(IDS).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"model": whole.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    if kind == "step":
        with fp.Checkpointer(tmp_path / "run") as checkpoints:
            checkpoints.save(7, state)
        path = tmp_path / "run" / "step-00000007"
    elif kind == "pt":
        path = tmp_path / "state.pt"
        fp.save(state, path)
    else:
        path = tmp_path / "state.safetensors"
        fp.save({f"model.{name}": each for name, each in whole.state_dict().items()}, path)
    model = on_meta(Blocks())
    with pytest.raises(ConfigError, match=r"parameter embed\.weight: there is no such tensor"):
        fp.stream(model, path)
    for budget in (least_budget(lambda: on_meta(Blocks()), path, prefix="model."), "10MiB"):
        with fp.stream(model, path, prefix="model.", budget_bytes=budget):
            for _ in range(2):
                assert torch.allclose(run(model), run(whole), atol=1e-5)


def test_names_of_the_source_replace_those_of_the_model(tmp_path: Path) -> None:
    whole = Blocks()
    weights = {f"other.{name}": each for name, each in weights_of(whole).items()}
    weights["lm_head"] = weights.pop("other.head.weight")
    save_file(weights, tmp_path / "a.safetensors")
    model = on_meta(Blocks())
    with fp.stream(model, tmp_path, prefix="other.", names={"head.weight": "lm_head"}):
        assert torch.allclose(run(model), run(whole), atol=1e-5)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"head.weight": "nothing"}, r"parameter head\.weight \(nothing\): there is no such tensor"),
        ({"head.weight": ["head.weight", "nothing"]}, r"parameter head\.weight \(nothing\): there is no such"),
        ({"head.weight": ["head.weight", "head.weight"]}, r"has 4800 elements, its pieces in the source 9600"),
        ({"head.weight": []}, r"head\.weight"),
        ({"haed.weight": "head.weight"}, r"names has haed\.weight, which the model does not have"),
    ],
    ids=str,
)
def test_names_that_lead_nowhere(names: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = save_weights(Blocks(), tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=said):
        fp.stream(on_meta(Blocks()), path, names=names)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(4, 32, 16))
        self.rest = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.rest:
            x = each(x)
        return torch.einsum("eoi,bi->beo", self.gate_up, x[..., :16])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_a_parameter_of_several_pieces(padding: int, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Experts whose halves are tensors of their own, in two files and in no order."""
    whole = Fused()
    nn.init.normal_(whole.gate_up)
    pieces = {
        f"experts.{expert}.{half}": whole.gate_up.detach()[expert, 16 * number : 16 * (number + 1)].clone()
        for expert in range(4)
        for number, half in enumerate(("gate", "up"))
    }
    rest = {name: each for name, each in weights_of(whole).items() if name != "gate_up"}
    order = sorted(pieces, key=lambda name: name[::-1])
    hand_made_safetensors(
        {name: pieces[name] for name in order[:5]} | rest, tmp_path / "a.safetensors", padding=padding
    )
    hand_made_safetensors({name: pieces[name] for name in order[5:]}, tmp_path / "b.safetensors", gap=5000)
    weight_map = dict.fromkeys([*order[:5], *rest], "a.safetensors") | dict.fromkeys(order[5:], "b.safetensors")
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    names = {"gate_up": [f"experts.{expert}.{half}" for expert in range(4) for half in ("gate", "up")]}
    x = torch.randn(2, 64).to(dtype or torch.float32)
    expected = whole.to(dtype or torch.float32)(x).detach()
    options: dict[str, Any] = {"names": names, "dtype": dtype}
    for budget in (least_budget(lambda: on_meta(Fused()), tmp_path, **options), "10MiB"):
        model = on_meta(Fused())
        with fp.stream(model, tmp_path, budget_bytes=budget, **options), torch.no_grad():
            for _ in range(2):
                assert torch.allclose(model(x), expected, atol=1e-4, rtol=1e-2)
            expect_same(model.gate_up + 0, whole.gate_up.detach())


def test_pieces_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2).bfloat16()}, tmp_path / "x.safetensors")
    model = nn.Linear(4, 1, bias=False)
    with pytest.raises(ConfigError, match="the pieces of weight have different dtypes"):
        fp.stream(model, tmp_path, names={"weight": ["a", "b"]})


# --------------------------------------------------------------------------------------------- ties, buffers, kinds


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("meta", [False, True])
def test_a_tied_weight_is_found_under_any_of_its_names(name: str, meta: bool, tmp_path: Path) -> None:
    whole = Blocks(tied=True)
    weights = weights_of(whole)
    weights[name] = weights.pop("embed.weight")
    save_file(weights, tmp_path / "a.safetensors")
    model = on_meta(Blocks(tied=True)) if meta else Blocks(tied=True)
    with fp.stream(model, tmp_path):
        assert model.head.weight is model.embed.weight
        assert torch.allclose(run(model), run(whole), atol=1e-5)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("packed", torch.randint(0, 1 << 30, (64, 64)))
        self.register_buffer("computed", torch.arange(64.0), persistent=False)
        self.register_buffer("none", None)
        self.register_parameter("no bias", None)
        self.register_buffer("nothing", torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + (self.packed % 7) + self.computed + self.nothing.sum()


def test_buffers_large_small_empty_and_computed(tmp_path: Path) -> None:
    path = save_weights(Buffers(), tmp_path / "a.safetensors")
    whole = loaded_whole(Buffers(), path).eval()
    x = torch.randn(64, 64)
    with torch.no_grad():
        expected = whole(x)
        for budget in (least_budget(lambda: on_meta(Buffers()), path), "10MiB"):
            model = on_meta(Buffers()).eval()
            with fp.stream(model, path, budget_bytes=budget):
                for _ in range(3):
                    expect_same(model(x), expected)
                assert model.norm.running_var.sum() == 64


def test_a_computed_buffer_on_meta_is_named(tmp_path: Path) -> None:
    path = save_weights(Buffers(), tmp_path / "a.safetensors")
    with torch.device("meta"):
        model = Buffers()
    with pytest.raises(ConfigError, match=r"the buffer computed is on the meta device.*include_buffers=False"):
        fp.stream(model, path)


def test_a_model_built_in_inference_mode(tmp_path: Path) -> None:
    path = save_weights(Blocks(), tmp_path / "a.safetensors")
    whole = loaded_whole(Blocks(), path)
    for budget in (least_budget(Blocks, path), "10MiB"):
        with torch.inference_mode():
            model = Blocks()
        with fp.stream(model, path, budget_bytes=budget):
            for _ in range(2):
                expect_same(run(model), run(whole))


def test_kinds_of_parameters_that_hold_no_values_are_refused(tmp_path: Path) -> None:
    class Packed(nn.Parameter):
        pass

    path = save_weights(nn.Linear(3, 3), tmp_path / "a.safetensors")
    model = nn.Linear(3, 3)
    model.weight = Packed(torch.ones(3, 3))
    with pytest.raises(UnsupportedError, match="weight is a Packed"):
        fp.stream(model, path)
    with pytest.raises(UnsupportedError, match="UninitializedParameter"):
        fp.stream(nn.LazyLinear(3), path)


def test_views_in_torch_zips_that_cannot_be_streamed_are_named(tmp_path: Path) -> None:
    fp.save({"weight": torch.randn(3, 4).t(), "bias": torch.randn(8)[::2]}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"weight: it is a view whose .*; .*bias: it is a view whose"):
        fp.stream(nn.Linear(3, 4), tmp_path / "a.pt")
