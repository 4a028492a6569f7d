"""Names of a checkpoint and names of a model are brought together as transformers does, from headers alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from support.streamed_transformers import ARCHITECTURES
from transformers import AutoModel, AutoModelForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

import fastpersist as fp
from fastpersist.integrations.huggingface_streaming import weight_names as module_of_names
from fastpersist.integrations.huggingface_streaming.weight_names import weight_names


def empty(name: str, auto_class: Any = AutoModelForCausalLM) -> Any:
    """Return a model without weights."""
    with torch.device("meta"):
        return auto_class.from_config(ARCHITECTURES[name][0])


def headers(**shapes: tuple[int, ...]) -> dict[str, fp.TensorEntry | None]:
    return {name: fp.TensorEntry(name, "float32", shape, 0, 0, name, None) for name, shape in shapes.items()}


def of_model(model: torch.nn.Module) -> dict[str, fp.TensorEntry | None]:
    return headers(**{name: tuple(each.shape) for name, each in model.state_dict().items()})


def mixtral_headers(count: int = 11) -> dict[str, fp.TensorEntry | None]:
    """Return what a checkpoint of Mixtral has in its first layer, experts in no order."""
    prefix = "model.layers.0.block_sparse_moe"
    shapes = {f"{prefix}.gate.weight": (count, 64)}
    for expert in reversed(range(count)):
        shapes[f"{prefix}.experts.{expert}.w1.weight"] = shapes[f"{prefix}.experts.{expert}.w3.weight"] = (96, 64)
        shapes[f"{prefix}.experts.{expert}.w2.weight"] = (64, 96)
    return headers(**shapes)


def converting(monkeypatch: pytest.MonkeyPatch, *transforms: Any) -> None:
    """Let transformers have these conversions and no others."""
    monkeypatch.setattr(module_of_names, "get_model_conversion_mapping", lambda model: list(transforms))


def test_names_of_the_model_are_its_names_in_the_checkpoint() -> None:
    model = empty("llama")
    mapped = weight_names(model, of_model(model))
    assert mapped.names == {name: (name,) for name in model.state_dict()}
    assert mapped.unused == ()


def test_the_prefix_of_the_base_model_is_added_and_removed() -> None:
    head, base = empty("llama"), empty("llama", AutoModel)
    assert weight_names(head, of_model(base)).names["model.norm.weight"] == ("norm.weight",)
    mapped = weight_names(base, of_model(head))
    assert mapped.names["norm.weight"] == ("model.norm.weight",)
    assert mapped.unused == ("lm_head.weight",)


def test_what_is_known_by_name_only_is_mapped_all_the_same() -> None:
    model = empty("mixtral")
    full = weight_names(model, mixtral_headers())
    assert weight_names(model, dict.fromkeys(mixtral_headers())).names == full.names


def test_experts_are_in_the_order_of_their_numbers_gate_before_up() -> None:
    names = weight_names(empty("mixtral"), mixtral_headers()).names
    prefix = "model.layers.0.block_sparse_moe"
    assert names["model.layers.0.mlp.gate.weight"] == (f"{prefix}.gate.weight",)
    assert names["model.layers.0.mlp.experts.down_proj"] == tuple(
        f"{prefix}.experts.{number}.w2.weight" for number in range(11)
    )
    assert names["model.layers.0.mlp.experts.gate_up_proj"] == tuple(
        f"{prefix}.experts.{number}.{part}.weight" for number in range(11) for part in ("w1", "w3")
    )


def test_experts_that_do_not_fill_the_weight_are_refused() -> None:
    with pytest.raises(fp.ConfigError, match=r"gate_up_proj has shape \[11, 192, 64\].*do not make it"):
        weight_names(empty("mixtral"), mixtral_headers(10))
    found = mixtral_headers()
    del found["model.layers.0.block_sparse_moe.experts.3.w3.weight"]
    with pytest.raises(fp.ConfigError, match=r"as many tensors of each kind, and there are 11 of .*, 10 of"):
        weight_names(empty("mixtral"), found)
    turned = mixtral_headers()
    for name in list(turned):
        if name.endswith("w2.weight"):
            turned |= headers(**{name: (96, 64)})  # as many bytes
    with pytest.raises(fp.ConfigError, match=r"down_proj has shape \[11, 64, 96\]"):
        weight_names(empty("mixtral"), turned)


def test_renamings_are_applied_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    converting(monkeypatch, WeightRenaming("last_norm", "final_norm"), WeightRenaming("final_norm", "model.norm"))
    assert weight_names(empty("llama"), headers(**{"last_norm.weight": (64,)})).names == {
        "model.norm.weight": ("last_norm.weight",)
    }


def test_concatenation_in_the_first_dimension_is_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["mlp.second.weight", "mlp.first.weight"]
    converting(monkeypatch, WeightConverter(list(parts), "mlp.up_proj.weight", operations=[Concatenate(dim=0)]))
    found = headers(**{f"model.layers.0.{part}": (128, 64) for part in parts})
    assert weight_names(empty("llama"), found).names == {
        "model.layers.0.mlp.up_proj.weight": tuple(f"model.layers.0.{part}" for part in parts)
    }


@pytest.mark.parametrize(("shape", "is_streamed"), [((256, 64), True), ((64, 256), False)])
def test_a_transposition_counts_only_where_it_is_one(
    shape: tuple[int, int], is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter = WeightConverter("mlp.w.weight", "mlp.up_proj.weight", operations=[Transpose(0, 1, check_dims=True)])
    converting(monkeypatch, converter)
    found = headers(**{"model.layers.0.mlp.w.weight": shape})
    if is_streamed:
        assert weight_names(empty("llama"), found).names == {
            "model.layers.0.mlp.up_proj.weight": ("model.layers.0.mlp.w.weight",)
        }
        return
    with pytest.raises(fp.UnsupportedError, match=r"up_proj\.weight from .*mlp\.w\.weight by Transpose"):
        weight_names(empty("llama"), found)


@pytest.mark.parametrize(
    ("sources", "targets", "operations"),
    [
        (["mlp.gate_up.weight"], ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)]),
        (["mlp.a.weight", "mlp.b.weight"], ["mlp.gate_proj.weight"], [Concatenate(dim=1)]),
        (["mlp.*.weight"], ["mlp.gate_proj.weight"], [MergeModulelist(dim=1)]),
        (["mlp.a.weight"], ["mlp.gate_proj.weight"], [PermuteForRope()]),
        (["mlp.a.weight"], ["mlp.gate_proj.weight"], [Transpose(0, 1)]),
    ],
    ids=["chunks", "columns", "stacks", "permutation", "transposition"],
)
def test_what_is_computed_is_refused_by_name(
    sources: list[str], targets: list[str], operations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    converting(monkeypatch, WeightConverter(list(sources), list(targets), operations=operations))
    found = headers(**{f"model.layers.0.{name}".replace("*", "0"): (64, 64) for name in sources})
    operation = type(operations[0]).__name__
    with pytest.raises(fp.UnsupportedError, match=rf"layers\.0\.mlp\.gate_proj.* by {operation}.*save_original_format"):
        weight_names(empty("llama"), found)


def test_the_experts_of_qwen_have_another_name_and_the_same_order() -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    prefix = "model.layers.0.mlp.experts"
    shapes = {f"{prefix}.{number}.{part}_proj.weight": (16, 32) for number in range(2) for part in ("up", "gate")}
    assert weight_names(model, headers(**shapes)).names == {
        f"{prefix}.gate_up_proj": tuple(
            f"{prefix}.{number}.{part}_proj.weight" for number in range(2) for part in ("gate", "up")
        )
    }
