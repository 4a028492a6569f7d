"""What happens while a checkpoint is being written: training goes on, the rest of the Trainer waits or hears later."""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from support.huggingface_trainers import At, PlainModel, attached, checkpoints_in, tiny_gpt2, trainer_for
from support.runs import held_writers, hidden_names
from support.sameness import assert_same
from support.training import PATIENCE_S, HeldFilesystem
from transformers import Trainer

import fastpersist as fp
from fastpersist.integrations.huggingface import Attachment, attach, foreign_files


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldFilesystem]:
    """Let no save be written until it is waited for, or released."""
    join, wait_written = fp.PendingSave.join, fp.PendingSave.wait_written
    with held_writers() as held:

        def release_and_join(self: fp.PendingSave, timeout: float | None = None) -> bool:
            held.release()
            return join(self, timeout)

        def release_and_wait(self: fp.PendingSave) -> None:
            held.release()
            wait_written(self)

        monkeypatch.setattr(fp.PendingSave, "join", release_and_join)
        monkeypatch.setattr(fp.PendingSave, "wait_written", release_and_wait)
        yield held


def at_step(step: int, call: Callable[[], object], event: str = "on_step_end") -> At:
    """Call something in a step, numbered as at its end."""
    own = step if event in ("on_step_end", "on_save") else step - 1

    def check(state: Any, control: Any) -> None:
        if state.global_step == own:
            call()

    return At(event, check)


def test_training_goes_on_and_the_files_hold_what_was_true_at_the_save(tmp_path: Path, writers: HeldFilesystem) -> None:
    expected: dict[str, Any] = {}

    def note() -> None:
        expected.update(model=copy.deepcopy(trainer.model.state_dict()))
        expected.update(optimizer=copy.deepcopy(trainer.optimizer.state_dict()))

    def look() -> None:
        pending = attachment.pending()
        assert pending is not None
        assert not pending.done()
        assert checkpoints_in(tmp_path) == []
        assert not torch.equal(trainer.model.transformer.wte.weight, expected["model"]["transformer.wte.weight"])
        writers.release()

    callbacks = [at_step(2, note), at_step(3, look)]
    trainer, attachment = attached(output_dir=tmp_path, callbacks=callbacks)
    trainer.train()
    weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert_same(weights, {name: expected["model"][name] for name in weights})
    assert_same(torch.load(tmp_path / "checkpoint-2" / "optimizer.pt"), expected["optimizer"])


def test_the_gate_is_the_trainers_hook_before_the_step(tmp_path: Path, writers: HeldFilesystem) -> None:
    captured = []

    def look() -> None:
        pending = attachment.pending()
        assert pending is not None
        captured.append(pending.captured())

    callbacks = [at_step(3, look, "on_substep_end"), at_step(3, look, "on_pre_optimizer_step")]
    trainer, attachment = attached(
        output_dir=tmp_path, callbacks=callbacks, gradient_accumulation_steps=2, save_steps=2
    )
    trainer.train()
    assert captured == [False, True]


def test_buffers_that_forward_changes_are_those_of_the_save(tmp_path: Path, writers: HeldFilesystem) -> None:
    expected: list[torch.Tensor] = []
    callbacks = [at_step(2, lambda: expected.append(trainer.model.norm.running_mean.clone()))]
    trainer, _ = attached(model=PlainModel(), output_dir=tmp_path, callbacks=callbacks)
    trainer.train()
    assert torch.equal(load_file(tmp_path / "checkpoint-2" / "model.safetensors")["norm.running_mean"], expected[0])
    assert not torch.equal(trainer.model.norm.running_mean, expected[0])


def hearing(heard: list[tuple[int, int, int, bool]], trainers: list[Trainer], output: Path) -> At:
    def hear(state: Any, control: Any) -> None:
        assert not control.should_save
        path = output / f"checkpoint-{state.global_step}"
        newest = max(entry["step"] for entry in state.log_history)
        heard.append((trainers[0].state.global_step, state.global_step, newest, path.is_dir() and fp.verify(path).ok))

    return At("on_save", hear)


def test_callbacks_hear_of_a_save_after_its_publication_with_the_state_of_then(
    tmp_path: Path, writers: HeldFilesystem
) -> None:
    heard: list[tuple[int, int, int, bool]] = []
    trainers: list[Trainer] = []

    def publish() -> None:
        pending = attachment.pending()
        assert pending is not None
        assert pending.join()
        assert heard == []

    callbacks = [hearing(heard, trainers, tmp_path), at_step(6, publish)]
    trainer, attachment = attached(output_dir=tmp_path, callbacks=callbacks, save_steps=4)
    trainers.append(trainer)
    trainer.train()
    assert heard == [(7, 4, 4, True), (8, 8, 8, True)]


@pytest.mark.parametrize("on_save", ["published", "sync"])
def test_callbacks_hear_of_every_save_once_and_in_order(tmp_path: Path, on_save: str) -> None:
    heard: list[tuple[int, int, int, bool]] = []
    trainers: list[Trainer] = []
    callbacks = [hearing(heard, trainers, tmp_path)]
    trainer, _ = attached(output_dir=tmp_path, callbacks=callbacks, save_steps=1, on_save=on_save)
    trainers.append(trainer)
    trainer.train()
    assert [saved for _, saved, _, _ in heard] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(whole and newest == saved for _, saved, newest, whole in heard)
    if on_save == "sync":
        assert all(now == saved for now, saved, _, _ in heard)
    assert checkpoints_in(tmp_path) == [f"checkpoint-{step}" for step in range(1, 9)]


def test_a_callback_that_stops_the_training_when_it_hears_of_a_save_is_obeyed(
    tmp_path: Path, writers: HeldFilesystem
) -> None:
    def stop(state: Any, control: Any) -> Any:
        control.should_training_stop = True
        return control

    callbacks = [At("on_save", stop), at_step(5, writers.release), at_step(5, lambda: attachment.pending().join())]
    trainer, attachment = attached(output_dir=tmp_path, callbacks=callbacks, save_steps=4)
    trainer.train()
    assert trainer.state.global_step == 6


def test_a_callback_that_waits_does_not_lose_the_save_that_is_due(tmp_path: Path) -> None:
    callbacks = [At("on_step_end", lambda state, control: attachment.wait())]
    trainer, attachment = attached(output_dir=tmp_path, callbacks=callbacks, save_steps=1)
    trainer.train()
    assert checkpoints_in(tmp_path) == [f"checkpoint-{step}" for step in range(1, 9)]


WAITING = ("evaluate", "predict", "_load_best_model", "hyperparameter_search", "_finalize_training")


@pytest.mark.parametrize("name", WAITING)
def test_the_trainers_other_work_waits_for_the_save(tmp_path: Path, writers: HeldFilesystem, name: str) -> None:
    if not hasattr(Trainer, name):
        pytest.skip(f"this Trainer has no {name}")
    found: list[list[str]] = []

    def stop(state: Any, control: Any) -> Any:
        if state.global_step == 3:
            if name != "_finalize_training":
                getattr(trainer, name)("an argument")
            control.should_training_stop = True
        return control

    def noticed(*arguments: Any) -> Any:
        found.append(checkpoints_in(tmp_path))
        return stock(*arguments) if name == "_finalize_training" else None

    trainer = trainer_for(output_dir=tmp_path, callbacks=[At("on_step_end", stop)])
    stock = getattr(trainer, name)
    setattr(trainer, name, noticed)
    attach(trainer)
    trainer.train()
    assert found == [["checkpoint-2"]]


def test_train_returns_when_its_last_save_is_published(tmp_path: Path, writers: HeldFilesystem) -> None:
    trainer, attachment = attached(output_dir=tmp_path, save_strategy="epoch")
    trainer.train()
    assert attachment.pending() is None
    assert checkpoints_in(tmp_path) == ["checkpoint-4", "checkpoint-8"]


def test_old_checkpoints_are_deleted_when_the_new_one_is_there(tmp_path: Path, writers: HeldFilesystem) -> None:
    found = []

    def look() -> None:
        pending = attachment.pending()
        assert pending is not None
        found.append((pending.done(), checkpoints_in(tmp_path)))

    callbacks = [at_step(3, lambda: attachment.wait()), at_step(4, writers.hold), at_step(5, look)]
    trainer, attachment = attached(output_dir=tmp_path, callbacks=callbacks, save_total_limit=1)
    trainer.train()
    assert found == [(False, ["checkpoint-2"])]
    assert checkpoints_in(tmp_path) == ["checkpoint-8"]


def test_a_part_that_is_named_as_constant_is_not_copied(tmp_path: Path) -> None:
    copied = []

    def look() -> None:
        pending = attachment.pending()
        assert pending is not None
        pending.join()
        copied.append(pending.stats.bytes_before_return)

    model = tiny_gpt2()
    frozen = model.transformer.h[0].requires_grad_(False)
    for constant in ((), frozen):
        callbacks = [at_step(3, look, "on_step_begin")]  # before anybody looks whether the save is over
        trainer = trainer_for(model, output_dir=tmp_path, callbacks=callbacks, save_only_model=True, max_steps=4)
        attachment = attach(trainer, constant=constant)
        trainer.train()
    assert copied[0] - copied[1] == sum(parameter.nbytes for parameter in frozen.parameters())


@pytest.mark.parametrize("counted", [True, False])
def test_a_teacher_that_begins_to_move_late_is_saved_as_it_was(
    tmp_path: Path, writers: HeldFilesystem, counted: bool
) -> None:
    """As with a warm-up. It is the same at several saves before, and the training moves it before the next gate."""
    model = PlainModel()
    model.teacher = torch.nn.Parameter(torch.zeros(400_000), requires_grad=False)

    def follow() -> None:
        with torch.no_grad():
            (model.teacher if counted else model.teacher.data).fill_(1.0)

    callbacks = [at_step(6, writers.hold, "on_step_begin"), at_step(7, follow, "on_step_begin")]
    trainer, _ = attached(model=model, output_dir=tmp_path, callbacks=callbacks)
    trainer.train()
    for step in (2, 4, 6, 8):
        weights = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        assert torch.equal(weights["teacher"], torch.full((400_000,), float(step >= 7)))


@pytest.mark.parametrize("counted", [True, False])
def test_a_teacher_that_needs_no_gradient_and_moves_is_saved_as_it_was(
    tmp_path: Path, writers: HeldFilesystem, counted: bool
) -> None:
    model = PlainModel()
    model.teacher = torch.nn.Parameter(torch.zeros(1000), requires_grad=False)

    def follow(state: Any, control: Any) -> None:
        with torch.no_grad():
            (model.teacher if counted else model.teacher.data).add_(1)

    trainer, _ = attached(model=model, output_dir=tmp_path, callbacks=[At("on_step_begin", follow)])
    trainer.train()
    for step in (2, 4, 6, 8):
        weights = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        assert torch.equal(weights["teacher"], torch.full((1000,), float(step)))


def test_callbacks_hear_of_a_checkpoint_while_it_is_there(tmp_path: Path) -> None:
    """The last save is published, and the one before deleted, without a step between."""
    found = []

    def look(state: Any, control: Any) -> None:
        found.append(((tmp_path / f"checkpoint-{state.global_step}").is_dir(), state.global_step))

    options = {"save_total_limit": 1, "save_steps": 1, "max_steps": 4}
    trainer, _ = attached(output_dir=tmp_path, callbacks=[At("on_save", look)], **options)
    trainer.train()
    assert found == [(True, 1), (True, 2), (True, 3), (True, 4)]


class UsesItsFiles(Trainer):
    """Reads, copies, renames and replaces what it has just saved."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        path = Path(output_dir or "") / "model.safetensors"
        shutil.copy(path, path.with_name("copy.safetensors"))
        save_file(load_file(path), path)
        torch.save({"step": self.state.global_step}, path.with_name("extra.pt"))
        torch.save(torch.load(path.with_name("extra.pt")) | {"seen": True}, path.with_name("extra.pt"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        path = Path(output_dir) / "optimizer.pt"
        torch.save(torch.load(path), path)
        path.with_name("scheduler.pt").rename(path.with_name("renamed.pt"))


@pytest.mark.parametrize("on_save", ["published", "sync"])
def test_overridden_functions_use_the_files_that_they_save(tmp_path: Path, on_save: str) -> None:
    trainer_for(output_dir=tmp_path / "stock", kind=UsesItsFiles).train()
    trainer = trainer_for(output_dir=tmp_path / "ours", kind=UsesItsFiles)
    attach(trainer, on_save=on_save)
    trainer.train()
    for name in checkpoints_in(tmp_path / "stock"):
        stock, ours = tmp_path / "stock" / name, tmp_path / "ours" / name
        assert sorted({*os.listdir(stock), "MANIFEST.json"}) == sorted(os.listdir(ours))
        for file in ("model.safetensors", "copy.safetensors"):
            assert_same(dict(sorted(load_file(ours / file).items())), dict(sorted(load_file(stock / file).items())))
        for file in ("extra.pt", "optimizer.pt", "renamed.pt"):
            assert_same(torch.load(ours / file), torch.load(stock / file))
        assert fp.verify(ours).ok


class ChangesTheModel(Trainer):
    """Replaces the model's file once the optimizer is saved."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        path = Path(output_dir) / "model.safetensors"
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)


def test_an_overridden_function_changes_what_was_saved_before_it(tmp_path: Path) -> None:
    trainer, _ = attached(output_dir=tmp_path, kind=ChangesTheModel)
    trainer.train()
    assert fp.verify(tmp_path / "checkpoint-8").ok
    saved = load_file(tmp_path / "checkpoint-8" / "model.safetensors")
    for name, parameter in trainer.model.state_dict().items():
        assert name not in saved or torch.equal(saved[name], parameter + 1)


def test_a_model_uses_the_files_that_it_saves(tmp_path: Path) -> None:
    model = tiny_gpt2()
    save_pretrained = type(model).save_pretrained

    class Copies(type(model)):  # type: ignore[misc]
        def save_pretrained(self, save_directory: str, **options: Any) -> None:
            save_pretrained(self, save_directory, **options)
            shutil.copy(f"{save_directory}/model.safetensors", f"{save_directory}/copy.safetensors")

    model.__class__ = Copies
    trainer, _ = attached(model=model, output_dir=tmp_path)
    trainer.train()
    for name in checkpoints_in(tmp_path):
        copied = load_file(tmp_path / name / "copy.safetensors")
        assert_same(copied, load_file(tmp_path / name / "model.safetensors"))


class Extra(Trainer):
    """Saves a file of its own once the Trainer has saved, where the Trainer did."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        (Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}" / "extra.txt").write_text("extra")


def test_an_overridden_save_finds_the_directory_when_ours_returns(tmp_path: Path) -> None:
    stock = Trainer._save_checkpoint
    trainer = trainer_for(output_dir=tmp_path / "ours", kind=Extra)
    attachment = attach(trainer)
    trainer.train()
    for name in ("checkpoint-2", "checkpoint-8"):
        assert (tmp_path / "ours" / name / "MANIFEST.json").is_file()
        assert (tmp_path / "ours" / name / "extra.txt").is_file()
    trainer_for(output_dir=tmp_path / "other", max_steps=2).train()
    assert not (tmp_path / "other" / "checkpoint-2" / "MANIFEST.json").exists()
    attachment.detach()
    assert Trainer._save_checkpoint is stock


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_save_at_sigterm_is_whole_when_it_returns_and_takes_the_place_of_its_sentinel(
    tmp_path: Path, writers: HeldFilesystem, is_asked: bool
) -> None:
    found: list[Any] = []

    def request() -> None:
        manager = next(one.jit_manager for one in trainer.callback_handler.callbacks if hasattr(one, "jit_manager"))
        manager.is_checkpoint_requested = is_asked
        execute = manager.execute_jit_checkpoint

        def noticed() -> None:
            execute()
            found.append((attachment.pending(), checkpoints_in(tmp_path), fp.verify(tmp_path / "checkpoint-2").ok))
            assert not (tmp_path / "checkpoint-2" / "checkpoint-is-incomplete.txt").exists()

        manager.execute_jit_checkpoint = noticed
        if not is_asked:  # without the callback, which also ends the training
            noticed()

    callbacks = [at_step(3, request, "on_step_begin")]
    trainer, attachment = attached(output_dir=tmp_path, callbacks=callbacks, enable_jit_checkpoint=True, save_steps=100)
    trainer.train()
    assert found == [(None, ["checkpoint-2"], True)]
    assert trainer.state.global_step == (3 if is_asked else 8)
    assert hidden_names(tmp_path) == []


def test_what_is_pushed_is_published(tmp_path: Path, writers: HeldFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, **_: None)
    monkeypatch.setattr(Trainer, "_finish_current_push", lambda self: None)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, path: pushed.append((path, fp.verify(path).ok)))
    trainer, _ = attached(output_dir=tmp_path, push_to_hub=True, hub_model_id="nobody/nothing")
    trainer.train()
    assert pushed == [(str(tmp_path / f"checkpoint-{step}"), True) for step in (2, 4, 6, 8)]


def test_trials_of_a_search_save_into_their_own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from transformers import trainer as module
    from transformers.trainer_utils import HPSearchBackend

    class Backend:
        def ensure_available(self) -> None:
            pass

        def run(self, trainer: Trainer, trial_count: int, direction: str, **_: Any) -> str:
            for number in range(trial_count):
                trial = SimpleNamespace(number=number, params={"learning_rate": 0.1})
                trainer.train(resume_from_checkpoint=None, trial=trial)
            return "the best"

    monkeypatch.setitem(module.ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.OPTUNA, Backend)
    monkeypatch.setattr(module, "default_hp_search_backend", lambda: "optuna", raising=False)
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)
    dataset = trainer_for(output_dir=tmp_path).train_dataset
    trainer = Trainer(model_init=lambda: tiny_gpt2(), args=trainer_for(output_dir=tmp_path).args, train_dataset=dataset)
    attach(trainer)
    outcome = trainer.hyperparameter_search(lambda trial: trial.params, n_trials=2, backend="optuna")
    assert outcome == "the best"
    for number in (0, 1):
        assert checkpoints_in(tmp_path / f"run-{number}") == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]


def test_detached_trainer_is_a_stock_one_again(tmp_path: Path) -> None:
    trainer = trainer_for(output_dir=tmp_path, max_steps=2)
    trainer.evaluate = evaluate = trainer.evaluate
    before = dict(trainer.__dict__), dict(trainer.callback_handler.__dict__), list(trainer.callback_handler.callbacks)
    attachment = attach(trainer)
    assert isinstance(attachment, Attachment)
    assert trainer.evaluate is not evaluate
    attachment.detach()
    attachment.detach()
    assert dict(trainer.__dict__) == before[0]
    assert dict(trainer.callback_handler.__dict__) == before[1]
    assert trainer.callback_handler.callbacks == before[2]
    trainer.train()
    assert not (tmp_path / "checkpoint-2" / "MANIFEST.json").exists()


def test_next_save_does_not_wait_until_old_checkpoints_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    rotate = foreign_files.rotate_checkpoints

    def slow(**options: Any) -> None:
        assert released.wait(PATIENCE_S), "the test never let old checkpoints be deleted"
        rotate(**options)

    monkeypatch.setattr(foreign_files, "rotate_checkpoints", slow)
    seen: list[list[str]] = []

    def look() -> None:
        pending = attachment.pending()
        if pending is not None:  # else it is known already that it is published
            pending.wait_written()
        seen.append(checkpoints_in(tmp_path))
        released.set()

    trainer, attachment = attached(
        output_dir=tmp_path, callbacks=[at_step(6, look)], save_steps=2, max_steps=6, save_total_limit=1
    )
    trainer.train()
    assert seen == [["checkpoint-2", "checkpoint-4"]]
    assert checkpoints_in(tmp_path) == ["checkpoint-6"]
