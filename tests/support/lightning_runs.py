"""Tiny trainings under Lightning, deterministic to the last bit, so that two runs can be compared.

`Net` is trained on batches that depend on their number alone. `train` runs it with Lightning's own checkpoint plugin or
with ours; `contents` lists what a directory of checkpoints holds.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Lightning's imports warn of is not ours
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import torch
from support.sameness import portrait

from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO

torch.set_num_threads(1)
for _name in ("lightning", "lightning.pytorch", "lightning.fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)

# Advice about workers, full directories and the like; what torch deprecates, which pytest.warns repeats elsewhere.
IGNORED = ("ignore::Warning:lightning", "ignore:.*treespec:FutureWarning")

BATCH_COUNT = 4
WIDTH = 48


class Net(lightning.LightningModule):
    """Linear layers around a batch norm, whose statistics change in forward, outside of the optimizer's step."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(width, 1)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.last(self.norm(torch.tanh(self.first(batch)))) - batch.sum(1, keepdim=True)).pow(2).mean()

    def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss.detach())
        self.log("wave", torch.sin(torch.tensor(float(self.global_step) * 2)))  # goes up and down: for top-k
        return loss

    def validation_step(self, batch: torch.Tensor, _number: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]

    def train_dataloader(self) -> Any:
        return _batches(0)

    def val_dataloader(self) -> Any:
        return _batches(1)

    def test_dataloader(self) -> Any:
        return _batches(2)


def _batches(seed: int) -> Any:
    rows = torch.randn(BATCH_COUNT * 8, 4, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(rows, batch_size=8)  # type: ignore[arg-type]


class TwoOptimizers(Net):
    """Manual optimization: two optimizers, stepped one after the other; the second past Lightning, if `raw`."""

    raw = False

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, number: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers(use_pl_optimizer=not self.raw)
        for optimizer in optimizers:  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, number))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        lower = [*self.first.parameters(), *self.norm.parameters()]
        return [torch.optim.Adam(lower, lr=1e-2, fused=True), torch.optim.Adam(self.last.parameters(), lr=1e-2)]


class TwoRawOptimizers(TwoOptimizers):
    """The same, without Lightning's wrappers: none of its hooks is called before a step."""

    raw = True


class WithClosures(TwoOptimizers):
    """Manual optimization with a closure that runs forward and backward."""

    def training_step(self, batch: torch.Tensor, number: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers(use_pl_optimizer=not self.raw):  # type: ignore[union-attr]

            def closure(zero_grad: Any = optimizer.zero_grad) -> torch.Tensor:
                zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)


class WithRawClosures(WithClosures):
    """The same, without Lightning's wrappers."""

    raw = True


class KeepsOldWeights(TwoOptimizers):
    """Keeps weights of before the step where ModelCheckpoint looks for them, puts them in place and then back."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.layer = self.last
        self.saved_models: dict[int, Any] = {}

    def training_step(self, batch: torch.Tensor, number: int) -> None:  # type: ignore[override]
        self.saved_models = {number: {name: value.detach().clone() for name, value in self.layer.state_dict().items()}}
        super().training_step(batch, number)


class Asked(Callback):
    """Does something in the middle of training, on each rank."""

    def __init__(self, step: int, act: Callable[[Any], None]) -> None:
        self.step = step
        self.act = act

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act(trainer)


def trainer_of(*callbacks: Callback, ours: bool = True, **options: Any) -> lightning.Trainer:
    """Make a Trainer that writes nothing but checkpoints.

    Args:
        callbacks: Callbacks such as ModelCheckpoint.
        ours: Use our plugin and callback.
        options: Options of Trainer; `io` is the plugin to use.
    """
    plugin = options.pop("io", None) or FastPersistCheckpointIO()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[plugin] if ours else [],
        callbacks=[FastPersistCallback(), *callbacks] if ours else list(callbacks),
        **{**quiet, "num_sanity_val_steps": 0, **options},
    )


def train(
    kind: Callable[[], Net], *callbacks: Callback, ckpt_path: Any = None, **options: Any
) -> tuple[lightning.Trainer, Net]:
    """Train a new model; returns when `fit` has."""
    torch.manual_seed(1)
    model = kind()
    trainer = trainer_of(*callbacks, **options)
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model


def contents(directory: Path) -> dict[str, Any]:
    """Return for each file what is in it, and for each symbolic link where it leads; hidden files too."""
    found: dict[str, Any] = {}
    for path in sorted(directory.iterdir()):
        if path.is_symlink():
            found[path.name] = "-> " + str(path.readlink())
        else:
            found[path.name] = portrait(torch.load(path, weights_only=False))
    return found


def weights_of(model: torch.nn.Module) -> Any:
    """Return what two models share if they are the same in every bit."""
    return portrait({name: value.detach().clone() for name, value in model.state_dict().items()})


__all__ = [
    "IGNORED",
    "Asked",
    "Callback",
    "KeepsOldWeights",
    "ModelCheckpoint",
    "Net",
    "TwoOptimizers",
    "TwoRawOptimizers",
    "WithClosures",
    "WithRawClosures",
    "contents",
    "lightning",
    "train",
    "trainer_of",
    "weights_of",
]
