"""Processes that are killed while they save, two that train as one, and what is installed or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support.filesystems import KillingFilesystem
from support.forking import Child, Report
from support.imports import expect_import_error, in_version, without
from support.lightning_runs import IGNORED, Callback, ModelCheckpoint, Net, contents, lightning, train, weights_of
from support.process_groups import run_ranks
from support.runs import hidden_names
from support.training import HeldFilesystem

from fastpersist.commit.filesystem import using
from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO, last_checkpoint

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

OURS = "fastpersist.integrations.lightning"
TESTS = Path(__file__).parents[2]
PATIENCE_S = 90


# --- killed


class Dying(Callback):
    """Kills its process: in epoch 4 while a save is held, or at an operation of a save."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._files: Any = None

    def on_train_epoch_start(self, trainer: Any, _module: Any) -> None:
        if trainer.current_epoch == 3:
            trainer.strategy.checkpoint_io.wait()  # from here on, no save gets further than this
            self._files = HeldFilesystem() if self._way == "held" else KillingFilesystem(*self._way.split())
            self._using = using(self._files)  # kept, or it would end
            self._using.__enter__()

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 4 and self._way == "held":
            self._files.reached.wait(30)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("way", "last", "epoch"),
    [("held", "last", 2), ("rename before", "", 2), ("rename after", "last", 3)],
)
def test_training_that_is_killed_while_it_saves_resumes_and_takes_the_same_way(
    tmp_path: Path, way: str, last: str, epoch: int
) -> None:
    options: dict[str, Any] = {"limit_train_batches": 1, "max_epochs": 6}
    _, whole = train(Net, ours=False, **options)
    checkpoint = ModelCheckpoint(tmp_path / "run", filename="{epoch}", save_last=bool(last))

    def work(_report: Report) -> None:
        train(Net, Dying(way), checkpoint, **options)

    with Child(work) as child:
        ending = child.wait()
    assert ending.signal == signal.SIGKILL, ending.message
    newest = last_checkpoint(tmp_path / "run")
    assert newest is not None
    assert torch.load(newest, weights_only=False)["epoch"] == epoch
    checkpoint = ModelCheckpoint(tmp_path / "run", filename="{epoch}", save_last=bool(last))
    trainer, resumed = train(Net, checkpoint, ckpt_path=newest, **options)
    assert trainer.current_epoch == 6
    assert weights_of(resumed) == weights_of(whole)
    assert all("epoch=3" not in name for name in hidden_names(tmp_path / "run")) or way == "rename before"


# --- two processes


def train_both_ways(directory: Path) -> list[str]:
    """Train on this rank, with Lightning's plugin and with ours; return the names of what is left."""
    results = []
    for way in ("stock", "ours"):
        torch.manual_seed(1)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            plugins=[FastPersistCheckpointIO()] if way == "ours" else [],
            callbacks=[
                *([FastPersistCallback()] if way == "ours" else []),
                ModelCheckpoint(
                    directory,
                    monitor="wave",
                    every_n_train_steps=1,
                    save_top_k=2,
                    save_last="link",
                    filename="model",
                ),
            ],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            max_epochs=4,
        )
        model = Net()
        trainer.fit(model)
        scores = trainer.test(model, ckpt_path="best", verbose=False)
        trainer.strategy.barrier()
        results.append((scores, contents(directory)))
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            directory.rename(directory.with_name(way))
        trainer.strategy.barrier()
    assert results[0] == results[1]
    return sorted(results[0][1])


def test_two_processes_save_what_they_save_with_lightning(tmp_path: Path) -> None:
    names = run_ranks(2, lambda _rank, _count: train_both_ways(tmp_path / "checkpoints"), timeout_s=PATIENCE_S)
    assert names == [["last.ckpt", "model-v1.ckpt", "model.ckpt"]] * 2


# --- what is installed

PLAIN = """
    import sys
    import torch
    {first}
    from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO
    from fastpersist.integrations.lightning.plugin import Callback
    {second}

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
        def training_step(self, batch, number):
            return self.layer(batch).sum()
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=2, default_root_dir=sys.argv[1], logger=False,
        plugins=FastPersistCheckpointIO(), callbacks=FastPersistCallback(),
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 4)))
    print(Callback.__module__.partition(".")[0])
"""


def run(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize(
    ("first", "second", "base"),
    [
        ("import pytorch_lightning as pl", "", "pytorch_lightning"),
        ("import pytorch_lightning as pl; sys.modules['lightning'] = None", "", "pytorch_lightning"),
    ],
)
def test_either_package_of_lightning_will_do(tmp_path: Path, first: str, second: str, base: str) -> None:
    done = run(textwrap.dedent(PLAIN).format(first=first, second=second), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [base]
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert torch.load(path, weights_only=False)["global_step"] == 2


def test_trainer_of_the_other_package_takes_the_classes_too(tmp_path: Path) -> None:
    code = textwrap.dedent(PLAIN).format(first="import lightning", second="import pytorch_lightning as pl")
    done = run(code.replace("callbacks=FastPersistCallback()", "callbacks=[FastPersistCallback()]"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["lightning"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_without_lightning_the_import_names_the_extra() -> None:
    change = without("lightning", "pytorch_lightning")
    expect_import_error(OURS, change, "ImportError: ", 'pip install "fastpersist[lightning]"')


def test_lightning_that_is_too_old_is_refused_with_both_versions() -> None:
    expect_import_error(OURS, in_version("lightning", "2.5.6"), "fastpersist.errors.UnsupportedError", "2.6", "2.5.6")
