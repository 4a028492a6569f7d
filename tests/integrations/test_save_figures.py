"""What saves cost stands in the trainers' own logs: HuggingFace, Lightning and Accelerate, each the real one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import IGNORED

from fastpersist.integrations._shared.save_figures import SaveFigures

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

NAMES = ("stall_s", "write_s", "bytes_per_s")


class DoneSave:
    """A save that is over."""

    def __init__(self, stall_s: float, error: str | None = None, *, written: bool = True) -> None:
        from fastpersist import SaveStats

        self.stats = SaveStats("p", bytes=8, stall_s=stall_s, write_s=2.0, error=error)
        self.written = written

    def is_written(self) -> bool:
        return self.written


def test_each_save_is_taken_once_when_it_is_over() -> None:
    figures = SaveFigures("x/")
    late: Any = DoneSave(4.0, written=False)
    for save in (DoneSave(1.0), DoneSave(2.0), DoneSave(9.0, "full"), late):
        figures.add(save)  # type: ignore[arg-type]
    assert figures.take() == {"x/stall_s": 3.0, "x/write_s": 2.0, "x/bytes_per_s": 4.0}
    assert figures.take() == {}
    late.written = True
    assert figures.take()["x/stall_s"] == 4.0


def test_logger_that_fails_costs_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    figures = SaveFigures("x/")
    figures.add(DoneSave(1.0))  # type: ignore[arg-type]

    def fail(_: object) -> None:
        raise ConnectionError("no network")

    figures.log_by(fail)
    assert "could not be logged" in caplog.text


def test_huggingface(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from support.huggingface_trainers import trainer_for

    from fastpersist.integrations.huggingface import attach

    trainer = trainer_for(output=str(tmp_path), max_steps=4)
    attach(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "checkpoint_stall_s" in entry]
    assert 1 <= len(logged) <= 2
    for entry in logged:
        assert all(entry[f"checkpoint_{name}"] > 0 for name in NAMES)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger

    from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO

    trainer = lightning.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=CSVLogger(str(tmp_path), name="", version="log"),
        plugins=[FastPersistCheckpointIO()],
        callbacks=[
            FastPersistCallback(),
            lightning.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel())
    with open(tmp_path / "log" / "metrics.csv") as file:
        logged = [row for row in csv.DictReader(file) if row.get("checkpoint/stall_s")]
    assert 1 <= len(logged) <= 2
    for row in logged:
        assert all(float(row[f"checkpoint/{name}"]) > 0 for name in NAMES)


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.tracking import GeneralTracker

    from fastpersist.integrations.accelerate import save_state, wait

    class Kept(GeneralTracker):
        name = "kept"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, float]] = []

        @property
        def tracker(self) -> object:
            return self

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            self.rows.append(values)

    kept = Kept()
    accelerator = accelerate.Accelerator(cpu=True, log_with=kept)
    accelerator.init_trackers("training")
    model = torch.nn.Linear(4, 4)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert prepared
    for number in range(2):
        save_state(accelerator, tmp_path / f"saved_{number}")
    wait(accelerator)
    wait(accelerator)
    assert len(kept.rows) == 2
    for row in kept.rows:
        assert all(row[f"checkpoint/{name}"] > 0 for name in NAMES)
