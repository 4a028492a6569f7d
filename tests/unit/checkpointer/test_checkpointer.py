"""A directory of steps: what is saved under which name, what is kept, what is told, who waits for whom."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.directories import wait_for_report
from support.forking import Child, Report
from support.runs import Replay, Run, held_writers, hidden_names

import fastpersist as fp
from fastpersist.commit.directory_commit import hold_for_reading

STATE = {"weights": torch.arange(1000.0), "name": "a state"}


def names_in(root: Path) -> list[str]:
    """List what a root holds, except for the lock and the log of events."""
    return sorted(name for name in os.listdir(root) if name not in (".lock", "events.jsonl"))


def manifest_in(path: Path) -> Any:
    return json.loads((path / "MANIFEST.json").read_text())


# --- what is on disk


def test_every_step_of_a_training_is_what_it_was_when_it_was_saved(tmp_path: Path, leak_check: None) -> None:
    run = Run()
    with fp.Checkpointer(tmp_path / "run", optimizer=run.optimizer) as checkpointer:
        for _ in range(6):
            run.advance()
            checkpointer.save(run.step, run.state(), rank_state={"position": run.step})
    assert checkpointer.steps() == [1, 2, 3, 4, 5, 6]
    assert checkpointer.latest() == 6
    assert Replay().check_all(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    for step in checkpointer.steps():
        assert checkpointer.load(step)["rank_state"] == {"position": step}


def test_a_step_is_an_ordinary_file_of_torch(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, STATE)
    loaded = torch.load(tmp_path / "step-00000003" / "state.pt", weights_only=True)
    assert torch.equal(loaded["weights"], STATE["weights"])
    assert loaded["name"] == "a state"


def test_making_and_reading_touches_nothing(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path / "none")
    assert checkpointer.steps() == []
    assert checkpointer.latest() is None
    with pytest.raises(fp.CheckpointNotFoundError, match="no committed step"):
        checkpointer.load()
    with pytest.raises(fp.CheckpointNotFoundError, match="no step 4"):
        checkpointer.load(4)
    checkpointer.close()
    assert os.listdir(tmp_path) == []


def test_root_is_made_with_its_parents_and_holds_steps_latest_and_lock(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "a"
    with fp.Checkpointer(root) as checkpointer:
        checkpointer.save(7, STATE, rank_state=[1])
    assert sorted(os.listdir(root)) == [".lock", "LATEST", "events.jsonl", "step-00000007"]
    assert sorted(os.listdir(root / "step-00000007")) == ["MANIFEST.json", "rank-00000.pt", "state.pt"]
    assert (root / "LATEST").read_text() == "step-00000007\n"


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpointer = fp.Checkpointer("run")
    checkpointer.save(1, STATE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpointer.save(2, STATE)
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]
    assert names_in(tmp_path / "elsewhere") == []


def test_latest_names_the_step_that_was_committed_last(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        for step in (5, 9, 7):
            checkpointer.save(step, STATE).result()
            assert (tmp_path / "LATEST").read_text() == f"step-{step:08d}\n"
    assert checkpointer.latest() == 7


@pytest.mark.parametrize("content", [None, "step-00000099\n", "nonsense"])
def test_latest_is_a_hint_that_nobody_trusts(tmp_path: Path, content: str | None) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE)
    (tmp_path / "LATEST").unlink()
    if content is not None:
        (tmp_path / "LATEST").write_text(content)
    assert fp.Checkpointer(tmp_path).latest() == 1
    assert fp.Checkpointer(tmp_path).load()["name"] == "a state"


def test_steps_beyond_eight_digits_are_numbers(tmp_path: Path) -> None:
    steps = [99_999_999, 100_000_000, 1_000_000_000_000, 2**63 - 1]
    with fp.Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"step": step})
            assert checkpointer.load(step) == {"step": step}
            assert checkpointer.latest() == step
    assert checkpointer.steps() == steps[-2:]
    assert checkpointer.load() == {"step": 2**63 - 1}


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, True, "1", None])
def test_what_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(fp.ConfigError, match="step"):
            checkpointer.save(step, STATE)
    assert not (tmp_path / "run").exists()


def test_what_else_is_in_the_root_is_left_alone(tmp_path: Path) -> None:
    for name in ("step-3", "step-000000003", "notes", ".step-00000003.pending-mine", "step-00000099.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "readme.txt").write_text("mine")
    before = names_in(tmp_path)
    with fp.Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, STATE)
    assert set(before) <= set(names_in(tmp_path))
    assert checkpointer.steps() == [3]


# --- overwrite


def test_step_that_exists_is_replaced_only_when_told(tmp_path: Path, leak_check: None) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"value": 1}).result()
        with pytest.raises(fp.ConfigError, match="overwrite=True"):
            checkpointer.save(1, {"value": 2})
        assert checkpointer.load(1) == {"value": 1}
        checkpointer.save(1, {"value": 3}, rank_state={"of": 3}, overwrite=True)
        assert checkpointer.load(1) == {"value": 3, "rank_state": {"of": 3}}
        checkpointer.save(1, {"value": 4}, overwrite=True)
        assert checkpointer.load(1) == {"value": 4}
    assert names_in(tmp_path) == ["LATEST", "step-00000001"]


def test_step_that_is_being_written_counts_as_there(tmp_path: Path, leak_check: None) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    with held_writers() as writers:
        first = checkpointer.save(1, {"value": 1})
        second = checkpointer.save(1, {"value": 2}, overwrite=True)
        third: list[BaseException] = []
        writers.release()
        first.result()
        second.result()
        try:
            checkpointer.save(1, {"value": 3}).result()
        except fp.ConfigError as error:
            third.append(error)
    checkpointer.close()
    assert len(third) == 1
    assert checkpointer.load(1) == {"value": 2}
    assert names_in(tmp_path) == ["LATEST", "step-00000001"]


# --- retention


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, list(range(1, 13))),
        ({"keep": 1}, [12]),
        ({"keep": 3}, [10, 11, 12]),
        ({"keep_every": 5}, [5, 10, 12]),
        ({"keep": 2, "keep_every": 4}, [4, 8, 11, 12]),
        ({"keep_best": (2, "loss", "min")}, [3, 7, 12]),
        ({"keep_best": (1, "loss", "max")}, [5, 12]),
        ({"keep": 2, "keep_every": 6, "keep_best": (1, "loss", "min")}, [6, 7, 11, 12]),
    ],
)
def test_retention_keeps_what_a_rule_names(
    tmp_path: Path, rules: dict[str, Any], kept: list[int], leak_check: None
) -> None:
    losses = {3: 0.2, 5: 9.0, 7: 0.1, 8: math.nan}
    with fp.Checkpointer(tmp_path, **rules) as checkpointer:
        for step in range(1, 13):
            metrics = None if step == 9 else {"loss": losses.get(step, 1.0)}
            checkpointer.save(step, {"step": step}, metrics=metrics)
    assert checkpointer.steps() == kept
    assert names_in(tmp_path) == ["LATEST", *(f"step-{step:08d}" for step in kept)]
    assert [checkpointer.load(step)["step"] for step in kept] == kept


def test_retention_knows_the_metrics_of_an_earlier_process(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"keep": 1, "keep_best": (1, "loss", "min")}
    with fp.Checkpointer(tmp_path, **rules) as checkpointer:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            checkpointer.save(step, STATE, metrics={"loss": loss})
    assert checkpointer.steps() == [2, 3]
    with fp.Checkpointer(tmp_path, **rules) as checkpointer:
        checkpointer.save(4, STATE, metrics={"loss": 2.5})
    assert checkpointer.steps() == [2, 4]


def test_retention_goes_by_the_metrics_of_the_step_that_replaced_another(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep_best=(1, "loss", "min")) as checkpointer:
        checkpointer.save(1, STATE, metrics={"loss": 1.0})
        checkpointer.save(2, STATE, metrics={"loss": 2.0})
        checkpointer.save(1, STATE, metrics={"loss": 5.0}, overwrite=True)
        checkpointer.save(3, STATE, metrics={"loss": 3.0})
    assert checkpointer.steps() == [2, 3] or checkpointer.steps() == [3]
    assert 1 not in checkpointer.steps()


def test_step_that_another_process_reads_is_removed_later(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, STATE).result()

    def read(report: Report) -> None:
        with hold_for_reading(str(tmp_path / "step-00000001")):
            report(1)
            signal.pause()

    with Child(read) as child:
        wait_for_report(child, 1)
        checkpointer.save(2, STATE).result()
        assert checkpointer.steps() == [1, 2]
    checkpointer.save(3, STATE)
    checkpointer.close()
    assert checkpointer.steps() == [3]
    assert hidden_names(tmp_path) == []


def test_retention_goes_on_after_somebody_removed_a_step_by_hand(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, STATE).result()
        shutil.rmtree(tmp_path / "step-00000001")
        for step in (2, 3, 4):
            checkpointer.save(step, STATE).result()
    assert checkpointer.steps() == [4]


def test_step_that_was_just_saved_stays_even_if_there_are_newer_ones(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (8, 9):
            checkpointer.save(step, {"step": step})
        path = checkpointer.save(6, {"step": 6}).result()
        assert path.is_dir()
        assert checkpointer.load(6) == {"step": 6}


# --- who waits for whom


def test_load_sees_the_saves_that_are_under_way(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        for step in range(5):
            checkpointer.save(step, {"step": step})
            assert checkpointer.load() == {"step": step}


def test_manual_gate_waits_for_every_save(tmp_path: Path) -> None:
    run = Run().advance()
    replay = Replay()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer, gate="manual") as checkpointer:
        for _ in range(3):
            pending = checkpointer.save(run.step, run.state())
            checkpointer.wait_captured()
            assert pending.captured()
            run.advance()
    assert replay.check_all(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("max_host_bytes", [0, 1, 100_000, None])
@pytest.mark.parametrize("owned", [True, False], ids=["stable", "volatile"])
def test_memory_limit_makes_saves_slower_and_never_wrong(
    tmp_path: Path, max_host_bytes: int | None, owned: bool, leak_check: None
) -> None:
    run = Run()
    optimizer = run.optimizer if owned else None
    with fp.Checkpointer(tmp_path, optimizer=optimizer, max_host_bytes=max_host_bytes) as checkpointer:
        for _ in range(4):
            run.advance()
            checkpointer.save(run.step, run.state(), rank_state={"large": torch.arange(70_000) + run.step})
    assert Replay().check_all(tmp_path) == [1, 2, 3, 4]
    for step in checkpointer.steps():
        assert torch.equal(checkpointer.load(step)["rank_state"]["large"], torch.arange(70_000) + step)
