"""When a save may begin, and what it replaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastpersist as fp
from fastpersist.checkpointer.meeting import BoundRanks
from fastpersist.checkpointer.root import RetentionPolicy, Root
from fastpersist.checkpointer.saves import StepSaves
from fastpersist.checkpointer.step_saver import SaveQueue, StepSaver
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import PendingSave
from fastpersist.transfer.arena import Arena

STATE = {"weights": torch.arange(1000.0)}


class Alone:
    """The saves of one process, with what they stand on."""

    def __init__(self, path: Path, on_error: str = "raise") -> None:
        rules = RetentionPolicy(None, None, None)
        self.root = Root(str(path), rules)
        self.queue = SaveQueue(str(path), on_error)
        self.saver = StepSaver(str(path), Owners(None, (), "optimizer"), Arena(None), engine="auto", paranoid=False)
        self.saves = StepSaves(self.root, rules, self.saver, self.queue, busy="wait", on_error=on_error)
        options = {"node_local": None, "busy": "wait", "writers": "auto", "check_replicas": False, "timeout_s": 60.0}
        self.saves.bind(BoundRanks(None, str(path), self.saves.own_root, **options))  # type: ignore[arg-type]

    def save(
        self, step: int, *, overwrite: bool = False, replaces: int | None = None, last: bool = False
    ) -> PendingSave:
        return self.saves.save(step, STATE, None, None, overwrite=overwrite, replaces=replaces, is_last=last)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    made = Alone(tmp_path / "run")
    yield made
    made.queue.join(None)
    made.root.release()


def test_step_that_was_saved_is_saved_and_others_are_not(alone: Alone) -> None:
    assert not alone.saves.is_saved(3)
    alone.save(3).result()
    assert alone.saves.is_saved(3)
    assert not alone.saves.is_saved(4)


def test_existing_step_is_replaced_only_if_that_is_allowed(alone: Alone) -> None:
    alone.save(3).result()
    with pytest.raises(fp.ConfigError, match="exists"):
        alone.save(3)
    with pytest.raises(fp.ConfigError, match="exists"):
        alone.save(3, replaces=2)
    alone.save(3, replaces=3).result()
    alone.save(3, overwrite=True).result()


def test_damaged_step_is_always_replaced(alone: Alone, tmp_path: Path) -> None:
    alone.save(3).result()
    (tmp_path / "run" / "step-00000003" / "state.pt").unlink()
    assert not alone.saves.is_saved(3)
    alone.save(3).result()
    assert alone.saves.is_saved(3)


def test_failure_is_raised_by_the_next_save_but_not_by_the_last_one(alone: Alone) -> None:
    failed = alone.save(1)
    failed.result()
    with pytest.raises(fp.ConfigError):
        alone.save(1)
    lost = PendingSave("/run/2", failed.stats)
    lost.fail(fp.StorageError(5, "step 2 failed", "/run/2"))
    alone.queue.add(lost)
    alone.save(3, last=True).result()
    with pytest.raises(fp.StorageError, match="step 2 failed"):
        alone.save(4)


def test_root_is_locked_by_the_first_save(alone: Alone, tmp_path: Path) -> None:
    assert not (tmp_path / "run").exists()
    alone.save(1).result()
    other = Root(str(tmp_path / "run"), RetentionPolicy(None, None, None))
    with pytest.raises(fp.ConfigError, match="being saved to"):
        other.take()


def test_nothing_is_removed_any_more_once_it_is_closed(tmp_path: Path) -> None:
    made = Alone(tmp_path / "run")
    made.saves.closed = True
    made.save(1).result()
    assert not (tmp_path / "run" / "LATEST").exists()
    made.queue.join(None)
    made.root.release()
