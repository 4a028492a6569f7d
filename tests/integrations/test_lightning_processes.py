"""Processes that are killed while they save, two that train as one, and what is installed or not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import IGNORED, ModelCheckpoint, Net, train, weights_of
from support.runs import hidden_names

from fastpersist.integrations.lightning import last_checkpoint

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

TESTS = Path(__file__).parents[1]
PATIENCE_S = 90


def start(code: str, *words: object, **variables: str) -> subprocess.Popen[str]:
    """Begin to run code in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait until a process is over; kill it if it does not come to an end."""
    with process:
        try:
            told, errors = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, told, errors)


def run(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return end(start(code, *words))


# --- killed

KILLED = """
    import os, signal, sys
    from pathlib import Path
    from support.filesystems import KillingFilesystem
    from support.lightning_runs import Callback, ModelCheckpoint, Net, train
    from support.training import HeldFilesystem
    from fastpersist.filesystem import using

    directory, way = Path(sys.argv[1]), sys.argv[2]

    class Dying(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 3:
                trainer.strategy.checkpoint_io.wait()  # from here on, no save gets further than this
                self.held = HeldFilesystem() if way == "held" else KillingFilesystem(*way.split())
                self.using = using(self.held)
                self.using.__enter__()

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            if trainer.current_epoch == 4 and way == "held":
                self.held.reached.wait(30)
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoint = ModelCheckpoint(directory, filename="{epoch}", save_last=sys.argv[3] == "last")
    train(Net, Dying(), checkpoint, limit_train_batches=1, max_epochs=6)
"""


@pytest.mark.parametrize(
    ("way", "last", "epoch"),
    [("held", "last", 2), ("rename before", "", 2), ("rename after", "last", 3)],
)
def test_training_that_is_killed_while_it_saves_resumes_and_takes_the_same_way(
    tmp_path: Path, way: str, last: str, epoch: int
) -> None:
    options: dict[str, Any] = {"limit_train_batches": 1, "max_epochs": 6}
    _, whole = train(Net, ours=False, **options)
    died = run(KILLED, tmp_path / "run", way, last)
    assert died.returncode == -signal.SIGKILL, died.stderr
    newest = last_checkpoint(tmp_path / "run")
    assert newest is not None
    assert torch.load(newest, weights_only=False)["epoch"] == epoch
    checkpoint = ModelCheckpoint(tmp_path / "run", filename="{epoch}", save_last=bool(last))
    trainer, resumed = train(Net, checkpoint, ckpt_path=newest, **options)
    assert trainer.current_epoch == 6
    assert weights_of(resumed) == weights_of(whole)
    assert all("epoch=3" not in name for name in hidden_names(tmp_path / "run")) or way == "rename before"


# --- two processes

TWO = """
    import sys
    from pathlib import Path
    import torch
    from support.lightning_runs import ModelCheckpoint, Net, contents, lightning
    from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO

    directory, results = Path(sys.argv[1]), []
    for way in ("stock", "ours"):
        torch.manual_seed(1)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", plugins=[FastPersistCheckpointIO()] if way == "ours" else [],
            callbacks=[
                *([FastPersistCallback()] if way == "ours" else []),
                ModelCheckpoint(directory, monitor="wave", every_n_train_steps=1, save_top_k=2, save_last="link",
                                filename="model"),
            ],
            logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, max_epochs=4,
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
    assert results[0] == results[1], results
    print(sorted(results[0][1]))
"""


def test_two_processes_save_what_they_save_with_lightning(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    ranks = []
    for rank in range(2):
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        ranks.append(start(TWO, tmp_path / "checkpoints", **places))
    told = [end(rank) for rank in ranks]
    assert [one.returncode for one in told] == [0, 0], [one.stderr for one in told]
    assert told[0].stdout == "['last.ckpt', 'model-v1.ckpt', 'model.ckpt']\n"


# --- what is installed

PLAIN = """
    import sys
    import torch
    {first}
    from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO, Callback
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


@pytest.mark.parametrize(
    ("first", "second", "base"),
    [
        ("import pytorch_lightning as pl", "", "pytorch_lightning"),
        ("import pytorch_lightning as pl; sys.modules['lightning'] = None", "", "pytorch_lightning"),
        ("import lightning as pl", "", "lightning"),
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
    done = run(
        """
        import sys
        sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
        import fastpersist.integrations.lightning
        """
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert 'pip install "fastpersist[lightning]"' in done.stderr


def test_lightning_that_is_too_old_is_refused_with_both_versions() -> None:
    done = run(
        """
        import importlib.metadata
        importlib.metadata.version = lambda name: "2.5.6"
        import fastpersist.integrations.lightning
        """
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("fastpersist.errors.UnsupportedError")
    assert "2.6" in done.stderr.splitlines()[-1]
    assert "2.5.6" in done.stderr.splitlines()[-1]
