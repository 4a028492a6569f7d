"""The Trainer with our plugin: what overlaps, what waits, and what happens when something fails."""

from __future__ import annotations

import logging
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.filesystems import FullFor
from support.lightning_runs import (
    IGNORED,
    Callback,
    ModelCheckpoint,
    Net,
    TwoOptimizers,
    TwoRawOptimizers,
    WithClosures,
    WithRawClosures,
    lightning,
    train,
    trainer_of,
    weights_of,
)
from support.runs import copied, hidden_names
from support.sameness import portrait
from support.training import HeldFilesystem

import fastpersist as fp
from fastpersist.commit.filesystem import using
from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO, last_checkpoint

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]


class ReleaseAt(Callback):
    """Lets the writers go after a number of steps."""

    def __init__(self, writers: HeldFilesystem, step_count: int) -> None:
        self._writers = writers
        self._step_count = step_count

    def on_train_batch_end(self, trainer: Any, *_others: Any) -> None:
        if trainer.global_step >= self._step_count:
            self._writers.release()


class Watching(Callback):
    """Saves after the first batch, and notes in the second whether all is captured; only then does the writer begin."""

    def __init__(self, plugin: FastPersistCheckpointIO, writers: HeldFilesystem, path: Path) -> None:
        self._plugin = plugin
        self._writers = writers
        self._path = path
        self.expected: Any = None
        self.seen: list[tuple[str, bool]] = []

    def _note(self, when: str) -> None:
        self.seen += [(when, pending.captured()) for pending in self._plugin.order.under_way()]

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._note("backward")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            trainer.save_checkpoint(self._path)
            states = [pl_module.state_dict(), *(optimizer.state_dict() for optimizer in trainer.optimizers)]
            self.expected = [portrait(copied(state)) for state in states]
        else:
            self._note("end")
            assert not self._path.exists()
            self._writers.release()


@pytest.fixture
def writers() -> Iterator[HeldFilesystem]:
    held = HeldFilesystem()
    with using(held):
        yield held
        held.release()


@pytest.mark.parametrize("kind", [Net, TwoOptimizers, TwoRawOptimizers, WithClosures, WithRawClosures])
def test_forward_and_backward_run_beside_the_writing_and_the_step_waits(
    tmp_path: Path, writers: HeldFilesystem, kind: type[Net]
) -> None:
    plugin = FastPersistCheckpointIO()
    watching = Watching(plugin, writers, tmp_path / "a.ckpt")
    train(kind, watching, io=plugin, max_epochs=1, limit_train_batches=2)
    # The first step waits for all: in manual optimization the second backward comes after it. A closure that does not
    # come from Lightning's hooks runs inside a step that has begun by waiting.
    backward = {Net: [False], WithRawClosures: [True, True]}.get(kind, [False, True])
    assert watching.seen == [*(("backward", one) for one in backward), ("end", True)]
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=False)
    # One by one: what optimizers share, such as default options, is no part of a state.
    assert [portrait(state) for state in (loaded["state_dict"], *loaded["optimizer_states"])] == watching.expected


def test_names_that_are_being_written_count_as_taken(tmp_path: Path, writers: HeldFilesystem) -> None:
    class Asking(Callback):
        answers: list[bool]

        def on_train_batch_end(self, trainer: Any, *_others: Any) -> None:
            if trainer.global_step == 2:
                path = str(tmp_path / "step=1.ckpt")
                assert not os.path.exists(path)
                self.answers = [one.file_exists(path, trainer) for one in trainer.checkpoint_callbacks]
                writers.release()

    asking = Asking()
    train(Net, asking, ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}"), max_steps=2)
    assert asking.answers == [True]
    checkpoint = ModelCheckpoint(tmp_path)
    assert "file_exists" not in vars(checkpoint)


def test_last_never_links_to_what_is_not_there(tmp_path: Path, writers: HeldFilesystem) -> None:
    class Looking(Callback):
        looks = 0

        def on_train_batch_end(self, trainer: Any, *_others: Any) -> None:
            last = tmp_path / "last.ckpt"
            if trainer.global_step == 2:
                assert not os.path.lexists(last)  # for what it is to lead to is not there
                assert [one.file_exists(str(last), trainer) for one in trainer.checkpoint_callbacks] == [True]
                writers.release()
            elif trainer.global_step > 2:
                self.looks += torch.load(last, weights_only=False)["global_step"]

    looking = Looking()
    train(Net, looking, ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last="link"), max_epochs=2)
    assert looking.looks
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 8


def test_modelcheckpoint_has_its_own_functions_back_after_fit(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last="link")
    train(Net, checkpoint, max_epochs=1)
    assert "file_exists" not in vars(checkpoint)
    assert "_link_checkpoint" not in vars(checkpoint)


def test_second_name_of_one_save_is_a_hard_link(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)
    train(Net, checkpoint, max_steps=3)
    assert os.path.samefile(checkpoint.best_model_path, checkpoint.last_model_path)


def test_fit_returns_when_all_is_durable_and_later_saves_are_durable_at_once(tmp_path: Path) -> None:
    plugin = FastPersistCheckpointIO()
    trainer, model = train(Net, ModelCheckpoint(tmp_path, every_n_train_steps=1), io=plugin, max_steps=3)
    assert plugin.pending() == []
    assert hidden_names(tmp_path) == []
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    loaded = torch.load(tmp_path / "after.ckpt", weights_only=False)
    assert portrait(dict(loaded["state_dict"])) == weights_of(model)
    with using(FullFor("after")), pytest.raises(fp.NoSpaceError):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert portrait(torch.load(tmp_path / "after.ckpt", weights_only=False)) == portrait(loaded)


def test_second_fit_of_a_trainer_overlaps_again(tmp_path: Path, writers: HeldFilesystem) -> None:
    plugin = FastPersistCheckpointIO()
    trainer, model = train(Net, io=plugin, max_steps=2)
    watching = Watching(plugin, writers, tmp_path / "a.ckpt")
    trainer.callbacks.append(watching)
    trainer.limit_train_batches = 2
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model)
    assert watching.seen == [("backward", False), ("end", True)]
    assert torch.load(tmp_path / "a.ckpt", weights_only=False)["global_step"] == 3


def test_plugin_without_the_callback_saves_the_same(tmp_path: Path) -> None:
    results = []
    for callbacks in ([], [FastPersistCallback()]):
        directory = tmp_path / str(len(callbacks))
        torch.manual_seed(1)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            plugins=[FastPersistCheckpointIO()],
            callbacks=[*callbacks, ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_steps=4,
        )
        trainer.fit(Net())
        loaded = [torch.load(path, weights_only=False) for path in sorted(directory.iterdir())]
        results.append([portrait([one["state_dict"], one["optimizer_states"]]) for one in loaded])
    assert results[0] == results[1]
    assert len(results[0]) == 4


# --- failures


def test_disk_that_is_full_ends_the_training_and_the_last_good_checkpoint_resumes(tmp_path: Path) -> None:
    options = {"limit_train_batches": 1, "max_epochs": 6}
    _, whole = train(Net, ours=False, **options)
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}")
    with using(FullFor("epoch=3")), pytest.raises(fp.NoSpaceError, match="epoch=3"):
        train(Net, checkpoint, **options)
    assert os.listdir(tmp_path) == ["epoch=2.ckpt"]
    newest = last_checkpoint(tmp_path)
    for ours in (True, False):
        trainer, resumed = train(Net, ours=ours, ckpt_path=newest, **options)
        assert trainer.current_epoch == 6
        assert weights_of(resumed) == weights_of(whole)


def test_disk_that_is_full_for_the_last_save_is_told_at_the_end_of_fit(tmp_path: Path) -> None:
    with using(FullFor("epoch=1")), pytest.raises(fp.NoSpaceError, match="epoch=1"):
        train(Net, ModelCheckpoint(tmp_path, filename="{epoch}", every_n_epochs=1), max_epochs=2)
    assert os.listdir(tmp_path) == ["epoch=0.ckpt"]


def test_with_warnings_the_training_goes_on_and_what_was_to_be_replaced_stays(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}")
    with using(FullFor("epoch=1")), pytest.warns(RuntimeWarning, match="epoch=1"):
        trainer, _ = train(Net, checkpoint, io=FastPersistCheckpointIO(on_error="warn"), max_epochs=4)
    assert trainer.current_epoch == 4
    assert sorted(os.listdir(tmp_path)) == ["epoch=0.ckpt", "epoch=3.ckpt"]


class Raising(Net):
    """Training ends with an exception, in the third step."""

    error: type[BaseException] = KeyError

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        if number == 2:
            raise self.error("of the training")
        return super().training_step(batch, number)


def test_exception_of_the_training_comes_through_and_pending_saves_are_finished(tmp_path: Path) -> None:
    plugin = FastPersistCheckpointIO()
    with pytest.raises(KeyError, match="of the training"):
        train(Raising, ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}"), io=plugin, max_epochs=1)
    assert plugin.pending() == []
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    assert last_checkpoint(tmp_path) is not None


def test_exception_of_the_training_comes_through_before_that_of_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = FastPersistCheckpointIO()
    with using(FullFor("step=2")), caplog.at_level(logging.ERROR, "fastpersist"):
        with pytest.raises(KeyError, match="of the training"):
            train(Raising, ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}"), io=plugin, max_epochs=1)
    assert "disk full" in caplog.text
    assert os.listdir(tmp_path) == ["step=1.ckpt"]
    plugin.wait()  # nothing is told twice


def test_checkpoint_on_exception_is_durable_when_fit_raises(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="{step}", save_on_exception=True)
    with pytest.raises(KeyError, match="of the training"):
        train(Raising, checkpoint, max_epochs=1)
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    assert torch.load(tmp_path / "step=2.ckpt", weights_only=False)["global_step"] == 2


class Interrupted(Raising):
    """Somebody presses Ctrl-C in the third step."""

    error = KeyboardInterrupt


def test_keyboard_interrupt_finishes_pending_saves(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    plugin = FastPersistCheckpointIO()
    try:
        with pytest.raises(SystemExit):  # Lightning's way to end
            train(
                Interrupted,
                ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}"),
                io=plugin,
                max_epochs=1,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert plugin.pending() == []
    assert os.listdir(tmp_path) == ["step=2.ckpt"]


def test_change_of_weights_behind_the_gate_fails_that_save_and_says_so(tmp_path: Path) -> None:
    class Meddling(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Net, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                with torch.no_grad():
                    pl_module.first.weight.add_(1)

    held = HeldFilesystem()
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    plugin = FastPersistCheckpointIO(on_error="warn")
    with using(held), pytest.warns(RuntimeWarning, match=r"first\.weight"):
        train(Net, Meddling(), ReleaseAt(held, 2), checkpoint, io=plugin, max_epochs=1)
    assert sorted(os.listdir(tmp_path)) == ["step=2.ckpt", "step=3.ckpt", "step=4.ckpt"]


# --- what is refused


def test_callback_without_the_plugin_says_what_to_write(tmp_path: Path) -> None:
    trainer = trainer_of(FastPersistCallback(), ours=False, max_steps=1)
    with pytest.raises(fp.ConfigError, match=r"FastPersistCheckpointIO but TorchCheckpointIO: write Trainer\(plugins="):
        trainer.fit(Net())


def test_asynchronous_wrapper_is_refused_and_others_are_seen_through(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    with pytest.raises(fp.ConfigError, match="without AsyncCheckpointIO"):
        trainer_of(io=AsyncCheckpointIO(FastPersistCheckpointIO()), max_steps=1).fit(Net())

    class Wrapper(_WrappingCheckpointIO):
        pass

    plugin = FastPersistCheckpointIO()
    train(Net, ModelCheckpoint(tmp_path, every_n_train_steps=1), io=Wrapper(plugin), max_steps=2)
    assert plugin._is_over  # it was begun and torn down
    assert len(os.listdir(tmp_path)) == 1


def strategy_of(name: str, **attributes: Any) -> Any:
    """Make a strategy that only says what it is: real ones want devices, or packages, that are not here."""
    kind = type(name, (lightning.pytorch.strategies.Strategy,), {})
    kind.__abstractmethods__ = frozenset()
    strategy = kind()
    strategy.__dict__.update({"_checkpoint_io": FastPersistCheckpointIO(), **attributes})
    return strategy


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "XLAFSDPStrategy", "SingleDeviceXLAStrategy"])
def test_strategy_that_writes_by_itself_is_refused_by_name(name: str) -> None:
    trainer = SimpleNamespace(strategy=strategy_of(name), checkpoint_callbacks=[])
    with pytest.raises(fp.ConfigError, match=f"{name} writes checkpoints by itself.*stock saving works"):
        FastPersistCallback().setup(trainer, None, "fit")


@pytest.mark.parametrize(
    ("name", "attributes", "moves"),
    [
        ("FSDPStrategy", {"_state_dict_type": "full"}, True),
        ("FSDPStrategy", {"_state_dict_type": "sharded"}, True),
        ("ModelParallelStrategy", {"_save_distributed_checkpoint": False}, False),
        ("ModelParallelStrategy", {"_save_distributed_checkpoint": True}, False),
    ],
)
def test_strategy_that_moves_parameters_has_all_copied(name: str, attributes: dict[str, Any], moves: bool) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    trainer = SimpleNamespace(
        strategy=strategy_of(name, **attributes),
        checkpoint_callbacks=[],
        callbacks=[],
        world_size=1,
        lightning_module=SimpleNamespace(automatic_optimization=True),
        optimizers=[optimizer],
    )
    callback = FastPersistCallback()
    callback.setup(trainer, None, "fit")
    assert trainer.strategy.checkpoint_io._gated() == ([] if moves else [optimizer])
    trainer.strategy = strategy_of("DDPStrategy")
    callback.setup(trainer, None, "fit")
    assert trainer.strategy.checkpoint_io._gated() == [optimizer]


def test_strategies_of_the_real_names_exist() -> None:
    strategies = lightning.pytorch.strategies
    for name in ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "DDPStrategy"):
        assert hasattr(strategies, name)
    assert strategies.FSDPStrategy(state_dict_type="sharded")._state_dict_type == "sharded"
    assert strategies.ModelParallelStrategy()._save_distributed_checkpoint is True


def test_callback_goes_to_another_process(tmp_path: Path) -> None:
    callback = FastPersistCallback()
    trainer = trainer_of(callback, ours=False, io=None, max_steps=1)
    trainer.strategy.checkpoint_io = FastPersistCheckpointIO()
    trainer.fit(Net())
    assert pickle.loads(pickle.dumps(callback))._plugin is None
