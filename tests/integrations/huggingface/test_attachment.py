"""A Trainer with ours attached trains, saves, resumes and rotates as a stock one; what it saves, a stock one reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from peft import LoraConfig, get_peft_model
from support.huggingface_trainers import (
    PlainModel,
    StopAfter,
    assert_like_stock,
    assert_same_file,
    attached,
    checkpoints_in,
    files_below,
    losses,
    tiny_gpt2,
    trainer_for,
    working_in,
)
from support.runs import hidden_names
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import EarlyStoppingCallback, PreTrainedTokenizerFast, Trainer

from fastpersist.integrations.huggingface import attach

# peft 0.21 asks for a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def tokenizer() -> PreTrainedTokenizerFast:
    own = Tokenizer(models.WordLevel({"[UNK]": 0, "def": 1, "return": 2}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="[UNK]", pad_token="[UNK]")


def with_adapters(model: torch.nn.Module | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True, lora_dropout=0.1)
    return get_peft_model(tiny_gpt2(), config)


def half_frozen() -> torch.nn.Module:
    model = tiny_gpt2()
    model.transformer.h[0].requires_grad_(False)
    return model


BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}

WAYS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any]]] = {
    "steps": (tiny_gpt2, {}),
    "every step": (tiny_gpt2, {"save_steps": 1}),
    "epochs": (tiny_gpt2, {"save_strategy": "epoch", "eval_strategy": "epoch"}),
    "best": (tiny_gpt2, {**BEST, "save_strategy": "best", "metric_for_best_model": "loss"}),
    "best at the end": (tiny_gpt2, BEST),
    "limit": (tiny_gpt2, {"save_total_limit": 2}),
    "limit and best": (tiny_gpt2, {**BEST, "save_total_limit": 1, "learning_rate": 1.0}),
    "model only": (tiny_gpt2, {"save_only_model": True}),
    "accumulation": (tiny_gpt2, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}),
    "bf16": (tiny_gpt2, {"bf16": True}),
    "plateau": (tiny_gpt2, {**BEST, "lr_scheduler_type": "reduce_lr_on_plateau"}),
    "sgd": (tiny_gpt2, {"optim": "sgd"}),
    "tokenizer": (tiny_gpt2, {"processing_class": tokenizer()}),
    "adapters": (with_adapters, BEST),
    "half frozen": (half_frozen, {}),
    "no transformer": (PlainModel, {}),
    "exported callbacks": (tiny_gpt2, {**BEST, "callbacks": [EarlyStoppingCallback(3)]}),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_and_checkpoints_are_those_of_a_stock_trainer(tmp_path: Path, way: str) -> None:
    make, options = WAYS[way]
    compare(tmp_path, make, options)


def test_the_scaler_is_saved_and_so_is_its_optimizer(tmp_path: Path) -> None:
    def scaled(trainer: Trainer) -> None:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    compare(tmp_path, tiny_gpt2, {}, scaled)
    saved = [torch.load(tmp_path / "ours" / "run" / f"checkpoint-{step}" / "scaler.pt")["scale"] for step in (2, 8)]
    assert saved[0] < saved[1]


def compare(
    tmp_path: Path,
    make: Callable[[], torch.nn.Module],
    options: dict[str, Any],
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> None:
    """Train twice, as a stock Trainer and with ours, and fail if there is a difference."""
    trainers = []
    outputs = []
    for who in ("stock", "ours"):
        with working_in(tmp_path / who) as output:
            trainer = trainer_for(make(), **options)
            prepare(trainer)
            if who == "ours":
                attach(trainer)
            trainer.train()
        trainers.append(trainer)
        outputs.append(output)
    stock, ours = trainers
    assert losses(ours.state.log_history) == losses(stock.state.log_history)
    assert ours.state.best_model_checkpoint == stock.state.best_model_checkpoint
    for name, parameter in stock.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], parameter), name
    assert checkpoints_in(outputs[1]) == checkpoints_in(outputs[0])
    assert checkpoints_in(outputs[0]), "nothing was saved, so nothing was compared"
    for name in checkpoints_in(outputs[0]):
        assert_like_stock(outputs[1] / name, outputs[0] / name)
    assert hidden_names(outputs[1]) == []


def test_adapters_alone_are_saved(tmp_path: Path) -> None:
    trainer, _ = attached(model=with_adapters(), output_dir=tmp_path)
    trainer.train()
    assert "adapter_model.safetensors" in files_below(tmp_path / "checkpoint-8")
    assert "model.safetensors" not in files_below(tmp_path / "checkpoint-8")


@pytest.mark.parametrize("first", ["stock", "ours"])
@pytest.mark.parametrize("second", ["stock", "ours"])
@pytest.mark.parametrize("make", [tiny_gpt2, with_adapters])
def test_resumed_training_takes_the_way_of_an_uninterrupted_one(
    tmp_path: Path, first: str, second: str, make: Callable[[], torch.nn.Module]
) -> None:
    def train(who: str, resume: bool = False, **options: Any) -> Trainer:
        trainer = trainer_for(make(), **options)
        if who == "ours":
            attach(trainer)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    with working_in(tmp_path / "whole"):
        whole = train("stock")
    with working_in(tmp_path / "parts") as output:
        with pytest.raises(KeyboardInterrupt):
            train(first, callbacks=[StopAfter(5)])
        assert checkpoints_in(output) == ["checkpoint-2", "checkpoint-4"]
        resumed = train(second, resume=True)
    assert losses(resumed.state.log_history)[:-1] == losses(whole.state.log_history)[:-1]  # the last: a mean of its run
    for name, parameter in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], parameter), name


def test_resumed_in_the_middle_of_an_epoch_and_overwriting_what_is_there(tmp_path: Path) -> None:
    with working_in(tmp_path) as output:
        trainer_for(save_steps=3).train()
        stock = {name: (output / "checkpoint-6" / name).read_bytes() for name in ("model.safetensors", "optimizer.pt")}
        trainer, _ = attached(save_steps=3)
        trainer.train(resume_from_checkpoint=str(output / "checkpoint-3"))
        (tmp_path / "kept").mkdir()
        for name, content in stock.items():
            (tmp_path / "kept" / name).write_bytes(content)
            assert_same_file(output / "checkpoint-6" / name, tmp_path / "kept" / name)
        assert "MANIFEST.json" in files_below(output / "checkpoint-6")
        assert "MANIFEST.json" not in files_below(output / "checkpoint-3")


def test_a_second_training_of_the_same_trainer_saves_too(tmp_path: Path) -> None:
    trainer, _ = attached(output_dir=tmp_path, max_steps=2)
    trainer.train()
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert checkpoints_in(tmp_path) == ["checkpoint-2", "checkpoint-4"]
