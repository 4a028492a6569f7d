"""FastPersistCallback alone: the files of a stock Trainer, by steps and by epochs, and what it says it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from support.huggingface_trainers import (
    At,
    PlainModel,
    StopAfter,
    assert_same_file,
    checkpoints_in,
    files_below,
    losses,
    trainer_for,
    working_in,
)
from support.runs import held_writers
from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

import fastpersist as fp
from fastpersist.integrations.huggingface import FastPersistCallback, last_checkpoint

QUIET = {"logging_strategy": "no"}  # what is logged in the step that is saved comes too late for a callback


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0})), pad_token="[UNK]")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_strategy": "epoch"},
        {"save_total_limit": 2},
        {"save_only_model": True},
        {"model": PlainModel},
        {"processing_class": tokenizer},
        {"gradient_accumulation_steps": 2, "bf16": True},
    ],
    ids=["steps", "epochs", "limit", "model only", "no transformer", "tokenizer", "accumulation"],
)
def test_files_are_those_of_a_stock_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    outputs = []
    for who in ("stock", "ours"):
        made = {name: value() if callable(value) else value for name, value in options.items()}
        with working_in(tmp_path / who) as output:
            callbacks = [FastPersistCallback()] if who == "ours" else []
            trainer_for(callbacks=callbacks, **QUIET, **made).train()
        outputs.append(output)
    stock, ours = outputs
    assert checkpoints_in(ours) == checkpoints_in(stock) != []
    for name in checkpoints_in(stock):
        assert fp.verify(ours / name).ok
        assert files_below(ours / name) == files_below(stock / name) | {"MANIFEST.json"}
        for file in files_below(stock / name) - {"trainer_state.json"}:
            assert_same_file(ours / name / file, stock / name / file)


def test_tokenizer_of_the_collator_is_saved_as_by_a_stock_trainer(tmp_path: Path) -> None:
    names = []
    for who in ("stock", "ours"):
        trainer = trainer_for(output_dir=tmp_path / who, callbacks=[FastPersistCallback()] if who == "ours" else [])
        trainer.data_collator = DataCollatorWithPadding(tokenizer())
        trainer.train()
        names.append(files_below(tmp_path / who / "checkpoint-2"))
    assert names[1] == names[0] | {"MANIFEST.json"}
    assert "tokenizer.json" in names[0]


def test_resumed_training_takes_the_way_of_an_uninterrupted_one(tmp_path: Path) -> None:
    with working_in(tmp_path / "whole"):
        whole = trainer_for()
        whole.train()
    with working_in(tmp_path / "parts") as output:
        own = FastPersistCallback()
        with pytest.raises(KeyboardInterrupt):
            trainer_for(callbacks=[own, StopAfter(5)]).train()
        own.wait()
        found = last_checkpoint(output)
        assert found == str(output / "checkpoint-4")
        resumed = trainer_for(callbacks=[FastPersistCallback()])
        resumed.train(resume_from_checkpoint=found)
    assert losses(resumed.state.log_history)[-3:-1] == losses(whole.state.log_history)[-3:-1]
    assert torch.equal(resumed.model.transformer.wte.weight, whole.model.transformer.wte.weight)


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    own = FastPersistCallback()
    found = []

    with held_writers() as writers:

        def look(state: Any, control: Any) -> None:
            pending = own.pending()
            if state.global_step == 3:
                assert pending is not None
                found.append((pending.done(), checkpoints_in(tmp_path)))
                writers.release()

        trainer_for(output_dir=tmp_path, callbacks=[own, At("on_step_end", look)]).train()
    assert found == [(False, [])]
    assert own.pending() is None
    assert checkpoints_in(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "epoch"}, "save_strategy="),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}, "load_best_model_at_end"),
    ],
)
def test_what_a_callback_cannot_do_is_refused_when_training_begins(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    trainer = trainer_for(output_dir=tmp_path, callbacks=[FastPersistCallback()], **options)
    with pytest.raises(fp.ConfigError, match=rf"{message}.*attach\(trainer\)"):
        trainer.train()
    assert checkpoints_in(tmp_path) == []


def test_a_gradient_scaler_is_refused(tmp_path: Path) -> None:
    trainer = trainer_for(output_dir=tmp_path, callbacks=[FastPersistCallback()])
    create = trainer.create_optimizer

    def create_scaled(*arguments: Any) -> Any:
        optimizer = create(*arguments)
        optimizer.scaler = object()
        return optimizer

    trainer.create_optimizer = create_scaled
    trainer.accelerator.scaler = object()
    with pytest.raises(fp.ConfigError, match="fp16"):
        trainer.train()
