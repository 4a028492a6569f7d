"""A Trainer with our plugin trains to the same bits, and leaves the same checkpoints, as one with Lightning's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import (
    IGNORED,
    KeepsOldWeights,
    ModelCheckpoint,
    Net,
    TwoOptimizers,
    TwoRawOptimizers,
    contents,
    train,
    weights_of,
)

import fastpersist as fp

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

CHECKPOINTING: dict[str, dict[str, Any]] = {
    "default": {},
    "every step": {"every_n_train_steps": 1},
    "all, every second step": {"every_n_train_steps": 2, "save_top_k": -1},
    "top two": {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 1, "filename": "{step}-{wave:.3f}"},
    "top two and last": {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 1, "save_last": True},
    "best by validation": {"monitor": "val_loss", "mode": "max", "filename": "{epoch}-{val_loss:.4f}"},
    "last as well": {"every_n_train_steps": 1, "save_last": True},
    "last as a link": {"every_n_train_steps": 1, "save_last": "link", "save_top_k": -1},
    "last as a link to the one": {"every_n_train_steps": 1, "save_last": "link"},
    "only last": {"every_n_train_steps": 3, "save_last": True, "save_top_k": 0},
    "weights only": {"every_n_train_steps": 1, "save_weights_only": True, "save_last": True},
    "one name": {"every_n_train_steps": 1, "filename": "model"},
    "one name for the top two": {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 1, "filename": "model"},
    "one name without versions": {"every_n_train_steps": 1, "filename": "model", "enable_version_counter": False},
    "step in the name of last": {"every_n_train_steps": 1, "save_last": True, "save_top_k": 0},
}


@pytest.mark.parametrize("options", CHECKPOINTING.values(), ids=CHECKPOINTING)
def test_checkpoints_are_those_of_lightning(tmp_path: Path, options: dict[str, Any]) -> None:
    compare_with_lightning(tmp_path, Net, options)


def test_name_of_last_with_the_step_in_it_is_removed_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelCheckpoint, "CHECKPOINT_NAME_LAST", "{step}-last")
    found = compare_with_lightning(tmp_path, Net, {"every_n_train_steps": 1, "save_last": True})
    assert list(found) == ["epoch=1-step=8.ckpt", "step=8-last.ckpt"]


@pytest.mark.parametrize("kind", [TwoOptimizers, TwoRawOptimizers, KeepsOldWeights])
def test_manual_optimization_is_saved_like_lightning_saves_it(tmp_path: Path, kind: type[Net]) -> None:
    compare_with_lightning(tmp_path, kind, {"every_n_train_steps": 1, "save_top_k": -1, "save_last": True})


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"val_check_interval": 2},
    ],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
def test_options_of_the_trainer_make_no_difference(tmp_path: Path, options: dict[str, Any]) -> None:
    compare_with_lightning(tmp_path, Net, {"every_n_train_steps": 1, "save_top_k": -1}, **options)


def averaging() -> Any:
    from lightning.pytorch.callbacks import WeightAveraging

    return WeightAveraging()


def stochastic_averaging() -> Any:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)


@pytest.mark.parametrize("callback", [averaging, stochastic_averaging])
def test_weights_that_change_outside_of_steps_are_saved_as_they_were(
    tmp_path: Path, callback: Callable[[], Any]
) -> None:
    compare_with_lightning(
        tmp_path, Net, {"every_n_train_steps": 1, "save_top_k": -1, "save_last": True}, callbacks=callback, max_epochs=3
    )


def finding_the_rate() -> Any:
    from lightning.pytorch.callbacks import LearningRateFinder

    return LearningRateFinder(num_training_steps=3, attr_name="rate", early_stop_threshold=None)


class WithRate(Net):
    """Its learning rate can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.rate)


def test_learning_rate_finder_saves_and_restores_as_with_lightning(tmp_path: Path) -> None:
    checkpointing = {"every_n_train_steps": 1, "save_top_k": -1}
    compare_with_lightning(
        tmp_path, WithRate, checkpointing, callbacks=finding_the_rate, max_steps=6, default_root_dir=tmp_path
    )


def compare_with_lightning(
    tmp_path: Path,
    kind: type[Net],
    checkpointing: dict[str, Any],
    *,
    callbacks: Callable[[], Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train both ways in a directory of one name, which is part of the checkpoints; return what is in it."""
    directory = tmp_path / "checkpoints"
    results = []
    for ours in (False, True):
        checkpoint = ModelCheckpoint(directory, **checkpointing)
        more = [callbacks()] if callbacks is not None else []
        _, model = train(kind, *more, checkpoint, ours=ours, **{"max_epochs": 2, **options})
        told = (
            checkpoint.best_model_path,
            checkpoint.last_model_path,
            checkpoint.kth_best_model_path,
            sorted(checkpoint.best_k_models),
        )
        results.append((told, weights_of(model), contents(directory)))
        shutil.rmtree(directory)
    stock, own = results
    assert own[0] == stock[0]
    assert own[1] == stock[1]
    assert list(own[2]) == list(stock[2])
    assert own[2] == stock[2]
    assert own[2]
    return own[2]


@pytest.mark.parametrize("first_is_ours", [True, False], ids=["ours to stock", "stock to ours"])
def test_one_resumes_what_the_other_began_and_reaches_the_same_bits(tmp_path: Path, first_is_ours: bool) -> None:
    _, whole = train(Net, ours=False, max_steps=8)
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}")
    train(Net, checkpoint, ours=first_is_ours, max_epochs=1)
    trainer, resumed = train(
        Net,
        ours=not first_is_ours,
        max_steps=8,
        ckpt_path=tmp_path / "step=4.ckpt",
    )
    assert trainer.global_step == 8
    assert weights_of(resumed) == weights_of(whole)


def test_paths_best_and_last_are_found_right_after_fit(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="wave", every_n_train_steps=1, save_last=True)
    trainer, _ = train(Net, checkpoint, max_epochs=2)
    best = trainer.test(ckpt_path="best", verbose=False)
    best_step = fp.load(checkpoint.best_model_path)["global_step"]
    assert best_step != 8
    last = trainer.test(ckpt_path="last", verbose=False)
    assert best != last
    again, _ = train(Net, ModelCheckpoint(tmp_path, save_last=True), ckpt_path="last", max_epochs=3)
    assert again.global_step == 12
    assert again.test(ckpt_path="last", verbose=False) != last
