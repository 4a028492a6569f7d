"""DeepSpeed when something goes wrong: nothing is lost or told twice, and the last good checkpoint resumes.

By one rank, with a stand-in of the engine; with several ranks: test_ranks.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deepspeed_stand_in import StandInEngine, deepspeed_integration, latest_in, names_in
from support.filesystems import FullFor, FullForNames
from support.forking import Child, run_in_child
from support.rank_faults import wait_until
from support.runs import held_writers, hidden_names, wait_for_writers
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import using

attach = deepspeed_integration().attach


@pytest.fixture(autouse=True)
def _no_writer_is_left() -> Iterator[None]:
    yield
    wait_for_writers()


def failed_save(engine: StandInEngine, root: Path) -> None:
    """Save on a disk that turns out to be full."""
    with using(FullFor()):
        engine.save_checkpoint(str(root))
        wait_for_writers()


def next_save(engine: StandInEngine, saving: Any, root: Path) -> None:
    engine.save_checkpoint(str(root), "next")


def load(engine: StandInEngine, saving: Any, root: Path) -> None:
    engine.load_checkpoint(str(root))


def wait(engine: StandInEngine, saving: Any, root: Path) -> None:
    saving.wait()


tellers = pytest.mark.parametrize("tell", [next_save, load, wait])


@tellers
def test_full_disk_is_told_once_and_all_that_was_there_stays(
    tmp_path: Path, tell: Callable[..., None], caplog: pytest.LogCaptureFixture, leak_check: None
) -> None:
    engine = StandInEngine(1)
    saving = attach(engine)
    engine.save_checkpoint(str(tmp_path), "a")
    saving.wait()
    engine.train()
    with caplog.at_level(logging.ERROR, "fastpersist"):
        failed_save(engine, tmp_path)
    assert "disk full" in caplog.text, "at once, whether anybody asks or not"
    engine.train()
    assert (names_in(tmp_path), latest_in(tmp_path)) == (["a", "latest"], "a")
    with pytest.raises(fp.NoSpaceError, match="disk full"):
        tell(engine, saving, tmp_path)
    tell(engine, saving, tmp_path)
    saving.close()


@tellers
def test_full_disk_is_warned_of_once_where_that_is_wanted(
    tmp_path: Path, tell: Callable[..., None], recwarn: pytest.WarningsRecorder
) -> None:
    engine = StandInEngine(1)
    saving = attach(engine, on_error="warn")
    engine.save_checkpoint(str(tmp_path), "a")
    saving.wait()
    failed_save(engine, tmp_path)
    with pytest.warns(RuntimeWarning, match="a checkpoint was not saved, training goes on: .*disk full") as told:
        tell(engine, saving, tmp_path)
    assert told[0].filename == __file__
    tell(engine, saving, tmp_path)
    saving.close()
    assert not recwarn.list


def test_disk_that_takes_no_name_is_told_by_the_save_itself_or_warned_of(tmp_path: Path) -> None:
    engine = StandInEngine(1)
    saving = attach(engine)
    with using(FullForNames()), pytest.raises(fp.NoSpaceError, match="disk full"):
        engine.save_checkpoint(str(tmp_path), "a")
    saving.close()
    saving = attach(engine, on_error="warn")
    with using(FullForNames()), pytest.warns(RuntimeWarning, match="disk full") as told:
        assert engine.save_checkpoint(str(tmp_path), "a") is False
    assert told[0].filename == __file__
    assert engine.save_checkpoint(str(tmp_path), "a") is True
    saving.close()
    assert latest_in(tmp_path) == "a"


def test_what_the_engine_raises_is_raised_and_leaves_nothing(tmp_path: Path, leak_check: None) -> None:
    class Broken(StandInEngine):
        breaks = True

        def partition_name(self) -> str:
            if self.breaks:
                raise KeyError("no partition")
            return super().partition_name()

    engine = Broken(1)
    saving = attach(engine)
    with pytest.raises(KeyError, match="no partition"):
        engine.save_checkpoint(str(tmp_path), "a")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no save_dir"):
        engine.save_checkpoint("")
    engine.breaks = False
    engine.train()
    engine.save_checkpoint(str(tmp_path), "a")
    saving.close()
    assert latest_in(tmp_path) == "a"


def test_state_that_cannot_be_pickled_is_told_by_the_save_itself(tmp_path: Path) -> None:
    engine = StandInEngine(1)
    saving = attach(engine)
    with pytest.raises(Exception, match="pickle"):
        engine.save_checkpoint(str(tmp_path), "a", client_state={"not": lambda: 0})
    assert list(tmp_path.iterdir()) == []
    engine.save_checkpoint(str(tmp_path), "a")
    saving.close()


def test_latest_that_cannot_be_written_is_told_and_the_checkpoint_stays(tmp_path: Path) -> None:
    engine = StandInEngine()
    saving = attach(engine)
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "file").touch()
    engine.save_checkpoint(str(tmp_path), "a")
    with pytest.raises(fp.StorageError, match=r"a is saved, but .*latest cannot be updated to name it"):
        saving.wait()
    assert names_in(tmp_path) == ["a", "latest"]
    assert fp.verify(tmp_path / "a").ok


def test_a_change_past_the_gate_fails_one_save_and_is_seen_coming_in_the_next(tmp_path: Path) -> None:
    engine = StandInEngine()
    saving = attach(engine)
    for number in range(2):
        with held_writers() as writers:
            engine.save_checkpoint(str(tmp_path), str(number))
            assert writers.reached.wait(PATIENCE_S)
            with torch.no_grad():
                engine.module[0].weight.mul_(2)
        if number == 0:
            with pytest.raises(fp.TornStateError, match="changed in place"):
                saving.wait()
    saving.close()
    assert names_in(tmp_path) == ["1", "latest"]
    with held_writers():
        saving = attach(engine)
        engine.save_checkpoint(str(tmp_path), "2")
        saving.wait_captured()
        with torch.no_grad():
            engine.module[0].weight.mul_(2)
    saving.close()
    assert latest_in(tmp_path) == "2"


def test_an_exception_in_the_block_is_not_hidden_by_one_of_the_disk(tmp_path: Path) -> None:
    engine = StandInEngine()
    with pytest.raises(ZeroDivisionError):
        with attach(engine):
            failed_save(engine, tmp_path)
            raise ZeroDivisionError
    assert "save_checkpoint" not in vars(engine)


def test_kill_leaves_the_checkpoint_before_and_latest_names_it(tmp_path: Path) -> None:
    def work(report: Callable[[int], None]) -> None:
        engine = StandInEngine(1)
        saving = attach(engine)
        engine.save_checkpoint(str(tmp_path), "a")
        saving.wait()
        engine.train()
        with held_writers() as writers:
            engine.save_checkpoint(str(tmp_path), "b")
            writers.reached.wait(PATIENCE_S)
            report(1)
            writers._released.wait()

    with Child(work) as child:
        wait_until(lambda: child.reported == 1 or child.ended())
        assert child.kill().signal
    assert names_in(tmp_path) == sorted([*hidden_names(tmp_path), "a", "latest"])
    resumed = StandInEngine(1)
    with attach(resumed):
        path, _ = resumed.load_checkpoint(str(tmp_path))
        assert path == str(tmp_path / "a" / "mp_rank_00_model_states.pt")
        resumed.train()
        resumed.save_checkpoint(str(tmp_path), "b")
    assert names_in(tmp_path) == ["a", "b", "latest"], "what was left is swept"


def test_a_forked_child_waits_for_no_save_of_its_parent(tmp_path: Path) -> None:
    engine = StandInEngine()
    saving = attach(engine)

    def work(_report: Callable[[int], None]) -> None:
        engine.destroy()
        saving.wait()

    with held_writers() as writers:
        engine.save_checkpoint(str(tmp_path), "a")
        assert writers.reached.wait(PATIENCE_S)
        run_in_child(work)
    saving.close()
    assert latest_in(tmp_path) == "a"


def test_destroying_the_engine_waits_and_tells(tmp_path: Path) -> None:
    engine = StandInEngine()
    attach(engine)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    assert latest_in(tmp_path) == "global_step0"
    failed_save(engine, tmp_path)
    with pytest.raises(fp.NoSpaceError):
        engine.destroy()
    engine.destroy()
