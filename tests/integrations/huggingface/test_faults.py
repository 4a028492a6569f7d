"""What goes wrong beside a training: it is told once, nothing good is lost, and the last good checkpoint resumes."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from support.filesystems import FullFor, FullForNames
from support.huggingface_trainers import (
    At,
    StopAfter,
    attached,
    checkpoints_in,
    tiny_gpt2,
    trainer_for,
    working_in,
)
from support.runs import hidden_names
from transformers import Trainer

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations.huggingface import FastPersistCallback, attach, last_checkpoint


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let threads that the framework starts once, such as that of progress bars, be there before anything is tried."""
    trainer_for(output_dir=tmp_path_factory.mktemp("warm"), max_steps=2).train()


disks = pytest.mark.parametrize("disk", [FullFor, FullForNames])
ways = pytest.mark.parametrize("way", ["published", "sync", "callback"])


def trainer_with(way: str, on_error: str, output: Path, **options: Any) -> Trainer:
    if way == "callback":
        own = FastPersistCallback(on_error=on_error)
        return trainer_for(output_dir=output, callbacks=[*options.pop("callbacks", []), own], **options)
    return attached(output_dir=output, on_save=way, on_error=on_error, **options)[0]


@disks
@ways
def test_a_full_disk_ends_the_training_and_the_last_good_checkpoint_resumes(
    tmp_path: Path, disk: Callable[[str], Filesystem], way: str, leak_check: None
) -> None:
    with working_in(tmp_path / "whole"):
        whole = trainer_for()
        whole.train()
    with working_in(tmp_path / "full") as output:
        trainer = trainer_with(way, "raise", Path("run"), save_total_limit=1)
        with using(disk("checkpoint-4")), pytest.raises(fp.NoSpaceError, match="checkpoint-4"):
            trainer.train()
        assert trainer.state.global_step in (4, 5, 6)
        assert checkpoints_in(output) == ["checkpoint-2"]
        assert hidden_names(output) == []
        resumed = trainer_with(way, "raise", Path("run"), save_total_limit=1)
        resumed.train(resume_from_checkpoint=True)
        assert checkpoints_in(output) == ["checkpoint-8"]
    assert torch.equal(resumed.model.transformer.wte.weight, whole.model.transformer.wte.weight)


@disks
@ways
def test_a_full_disk_is_warned_of_once_and_the_training_goes_on(
    tmp_path: Path, disk: Callable[[str], Filesystem], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []
    callbacks = [At("on_save", lambda state, control: heard.append(state.global_step))]
    trainer = trainer_with(way, "warn", tmp_path, callbacks=callbacks)
    with using(disk("checkpoint-4")), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    told = [warning for warning in caught if "checkpoint-4" in str(warning.message)]
    assert [warning.category for warning in told] == [RuntimeWarning]
    assert "training goes on without it" in str(told[0].message)
    assert checkpoints_in(tmp_path) == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    if way != "callback":
        assert heard == [2, 6, 8]
    if disk is FullFor:
        assert "disk full" in caplog.text


def test_old_checkpoints_stay_when_the_new_one_fails(tmp_path: Path) -> None:
    trainer, _ = attached(output_dir=tmp_path, save_total_limit=1, on_error="warn")
    with using(FullFor("checkpoint-8")), pytest.warns(RuntimeWarning, match="checkpoint-8 could not be saved"):
        trainer.train()
    assert checkpoints_in(tmp_path) == ["checkpoint-6"]


SCORES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.0}


class Scripted(Trainer):
    """Says what each evaluation finds."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_loss": SCORES[self.state.global_step]}
        self.log(dict(metrics))
        return metrics


def test_the_best_checkpoint_is_never_one_that_could_not_be_saved(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = trainer_for(output_dir=tmp_path, kind=Scripted, **options)
    attach(trainer, on_error="warn")
    with using(FullFor("checkpoint-4")), pytest.warns(RuntimeWarning, match="checkpoint-4 could not be saved"):
        trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    best = tiny_gpt2().from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(trainer.model.transformer.wte.weight, best.transformer.wte.weight)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("is_full", [False, True])
def test_an_exception_in_training_comes_out_when_the_save_is_over(
    tmp_path: Path, kind: type[BaseException], is_full: bool, caplog: pytest.LogCaptureFixture, leak_check: None
) -> None:
    heard: list[int] = []

    def fail(state: Any, control: Any) -> None:
        if state.global_step == 2:
            raise kind("made to fail")

    callbacks = [At("on_pre_optimizer_step", fail), At("on_save", lambda state, control: heard.append(1))]
    trainer, attachment = attached(output_dir=tmp_path, callbacks=callbacks)
    with using(FullFor("checkpoint-2" if is_full else "none")), pytest.raises(kind, match="made to fail"):
        trainer.train()
    assert attachment.pending() is None
    assert checkpoints_in(tmp_path) == ([] if is_full else ["checkpoint-2"])
    assert hidden_names(tmp_path) == []
    assert heard == ([] if is_full else [1])
    attachment.wait()  # what was in the log is not told again
    assert ("disk full" in caplog.text) == is_full


def test_a_callback_that_fails_while_an_exception_is_on_its_way_does_not_replace_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(state: Any, control: Any) -> None:
        raise ValueError("on_save fails")

    trainer, _ = attached(output_dir=tmp_path, callbacks=[At("on_save", fail), StopAfter(2)], save_steps=1)
    with pytest.raises((KeyboardInterrupt, ValueError)):
        trainer.train()
    assert "on_save fails" in caplog.text or checkpoints_in(tmp_path) == ["checkpoint-1"]


def test_what_the_trainers_own_functions_raise_comes_out_and_leaves_nothing(tmp_path: Path, leak_check: None) -> None:
    class Failing(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            raise TypeError("a subclass fails")

    trainer = trainer_for(output_dir=tmp_path, kind=Failing)
    attachment = attach(trainer, on_error="warn")
    with pytest.raises(TypeError, match="a subclass fails"):
        trainer.train()
    assert attachment.pending() is None
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- damaged checkpoints


def flip(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_optimizer(directory: Path) -> None:
    path = directory / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:1000])


def cut_state(directory: Path) -> None:
    path = directory / "trainer_state.json"
    path.write_bytes(path.read_bytes()[:100])


def remove_state(directory: Path) -> None:
    (directory / "trainer_state.json").unlink()


def remove_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def mark_unfinished(directory: Path) -> None:
    (directory / "checkpoint-is-incomplete.txt").touch()


DAMAGES = [cut_weights, cut_optimizer, cut_state, remove_state, remove_weights, mark_unfinished]


@pytest.mark.parametrize(
    ("who", "damage"), [("ours", flip), *((who, damage) for who in ("ours", "stock") for damage in DAMAGES)]
)
def test_the_newest_whole_checkpoint_resumes_and_what_is_skipped_is_named(
    tmp_path: Path, who: str, damage: Callable[[Path], None]
) -> None:
    trainer = trainer_for(output_dir=tmp_path, max_steps=4)
    if who == "ours":
        attach(trainer)
    trainer.train()
    damage(tmp_path / "checkpoint-4")
    begun: list[int] = []
    callbacks = [At("on_train_begin", lambda state, control: begun.append(state.global_step))]
    resumed, _ = attached(output_dir=tmp_path, max_steps=6, callbacks=callbacks)
    with pytest.warns(RuntimeWarning, match="checkpoint-4 is not whole and is skipped: ."):
        resumed.train(resume_from_checkpoint=True)
    assert begun == [2]
    assert checkpoints_in(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert fp.verify(tmp_path / "checkpoint-4").ok, "the damaged one was replaced when its step came again"


def test_without_a_whole_checkpoint_nothing_is_resumed_or_overwritten(tmp_path: Path) -> None:
    attached(output_dir=tmp_path, max_steps=2)[0].train()
    flip(tmp_path / "checkpoint-2")
    trainer, _ = attached(output_dir=tmp_path, max_steps=4)
    with (
        pytest.warns(RuntimeWarning, match="is not whole"),
        pytest.raises(fp.CheckpointNotFoundError, match=r"no checkpoint in .* is whole \(checkpoint-2: .*model"),
    ):
        trainer.train(resume_from_checkpoint=True)
    assert checkpoints_in(tmp_path) == ["checkpoint-2"]


def test_without_any_checkpoint_the_trainer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        attached(output_dir=tmp_path)[0].train(resume_from_checkpoint=True)
    assert last_checkpoint(tmp_path) is None
    assert last_checkpoint(tmp_path / "missing") is None


def test_a_checkpoint_that_is_named_is_taken_as_it_is(tmp_path: Path) -> None:
    attached(output_dir=tmp_path, max_steps=2)[0].train()
    (tmp_path / "checkpoint-2" / "rng_state.pth").unlink()
    trainer, _ = attached(output_dir=tmp_path, max_steps=4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4


# ------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("options", [{"on_save": "later"}, {"on_error": "ignore"}, {"engine": "steam"}])
def test_unknown_options_are_refused(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(fp.ConfigError, match=next(iter(options.values()))):
        attached(output_dir=tmp_path, **options)


def test_a_trainer_takes_one_attachment(tmp_path: Path) -> None:
    trainer, attachment = attached(output_dir=tmp_path)
    with pytest.raises(fp.ConfigError, match="attached already"):
        attach(trainer)
    attachment.detach()
    trainer._save_checkpoint = lambda *_: None
    with pytest.raises(fp.ConfigError, match="other code has replaced"):
        attach(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "FSDP of XLA"),
        ({"deepspeed": {"zero_optimization": {}}}, "DeepSpeed"),
    ],
)
def test_strategies_with_savers_of_their_own_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    trainer = trainer_for(output_dir=tmp_path)
    for name, value in options.items():
        setattr(trainer.args, name, value)
    with pytest.raises(fp.ConfigError, match=f"{message} yet; stock saving works there"):
        attach(trainer)


def test_a_strategy_that_only_accelerate_knows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    trainer = trainer_for(output_dir=tmp_path)
    for state in (AcceleratorState, PartialState):
        monkeypatch.setitem(state._shared_state, "distributed_type", DistributedType.MEGATRON_LM)
    with pytest.raises(fp.ConfigError, match="MEGATRON_LM"):
        attach(trainer)


def test_nothing_is_logged_about_a_training_that_goes_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fastpersist"):
        attached(output_dir=tmp_path)[0].train()
    assert [record for record in caplog.records if record.name == "fastpersist" and record.levelno > 20] == []


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(fp.ConfigError, match=r"takes a transformers\.Trainer, not a Linear"):
        attach(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
