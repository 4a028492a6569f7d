"""Steps count in the order in which they were committed: what is newest, what is kept, how a run goes back."""

from __future__ import annotations

import gc
import json
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.committed_steps import newest_of, save_steps, state
from support.directories import wait_for_report
from support.forking import Child, Report
from support.runs import hidden_names
from support.training import HeldFilesystem

import fastpersist as fp
from fastpersist.checkpointer.root import RetentionPolicy, Root
from fastpersist.commit.filesystem import using
from fastpersist.commit.locks import hold_for_reading
from fastpersist.errors import CheckpointNotFoundError, ConfigError, CorruptionError, StorageError


def edit_manifest(root: Path, step: int, **changes: Any) -> None:
    """Change values of a manifest; None removes one."""
    path = root / f"step-{step:08d}" / "MANIFEST.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# --- the order


def test_run_that_went_back_keeps_what_it_came_from_and_what_it_saves(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    with fp.Checkpointer(tmp_path, keep=3) as checkpointer:
        assert checkpointer.load(10)["step"] == 10
        found = []
        for step in (11, 12, 13, 14):
            checkpointer.save(step, state(step)).result()
            found.append(checkpointer.steps())
            assert newest_of(tmp_path) == step
    assert found == [[10, 11, 30], [10, 11, 12], [11, 12, 13], [12, 13, 14]]


def test_next_process_goes_on_with_what_was_saved_last(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(10)
        checkpointer.save(11, state(11))
    assert newest_of(tmp_path) == 11
    save_steps(tmp_path, 12, keep=2)
    assert newest_of(tmp_path) == 12
    assert fp.Checkpointer(tmp_path).steps() == [11, 12]


def test_step_that_replaces_another_is_the_newest(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with fp.Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(1, state(1), overwrite=True)
    assert newest_of(tmp_path) == 1
    assert checkpointer.steps() == [1, 3]


def test_clock_that_is_set_back_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, now_s in ((1, 3000.0), (2, 1000.0), (3, 2000.0)):
        monkeypatch.setattr("fastpersist.saving.directory_files.time.time", lambda now_s=now_s: now_s)
        save_steps(tmp_path, step, keep=2)
    assert newest_of(tmp_path) == 3
    assert fp.Checkpointer(tmp_path).steps() == [2, 3]


def test_manifests_of_before_count_by_time_among_those_with_a_number(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    for step, number, time_s in ((4, None, 100.0), (3, None, 200.0), (2, 5, 300.0), (1, None, 400.0)):
        edit_manifest(tmp_path, step, commit_number=number, time_s=time_s)
    with fp.Checkpointer(tmp_path) as checkpointer:
        for newest in (1, 2, 3, 4):
            assert checkpointer.latest() == newest
            assert checkpointer.load()["step"] == newest
            checkpointer.delete(newest)


def test_number_at_its_limit_keeps_nobody_from_saving(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    edit_manifest(tmp_path, 1, commit_number=(1 << 63) - 1)
    save_steps(tmp_path, 2, 3)
    assert newest_of(tmp_path) == 3


@pytest.mark.parametrize("damage", ["state", "manifest"])
def test_falling_back_goes_by_the_order_too(tmp_path: Path, damage: str) -> None:
    save_steps(tmp_path, 10, 20, 30)
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(20)
        checkpointer.save(21, state(21))
        checkpointer.save(22, state(22))
    for step in (21, 22):  # a manifest that cannot be read has no number: the step counts right behind the one below it
        name = "state.pt" if damage == "state" or step == 21 else "MANIFEST.json"
        (tmp_path / f"step-{step:08d}" / name).write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="going back") as caught:
        assert fp.Checkpointer(tmp_path).load()["step"] == 30
    assert [str(warning.message).split(" cannot")[0].split()[-1] for warning in caught] == ["22", "21"]


def test_what_was_resumed_from_takes_nobody_s_place_when_the_root_is_read_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 30)
    root = Root(str(tmp_path), RetentionPolicy(keep=2, keep_every=10))
    root.resumed_from(10)
    for step in (11, 12):
        save_steps(tmp_path, step)
        root.after_commit(step, {})
    root.forget()
    save_steps(tmp_path, 13)
    root.after_commit(13, {})
    assert fp.Checkpointer(tmp_path).steps() == [10, 12, 13, 30]


# --- discard_after, delete


def test_discard_after_forgets_what_is_greater(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    with fp.Checkpointer(tmp_path, keep=3) as checkpointer:
        checkpointer.save(5, state(5)).result()  # 10 has gone
        assert checkpointer.discard_after(20) == [30]
        assert newest_of(tmp_path) == 5
        assert checkpointer.discard_after(5) == [20]
        assert checkpointer.discard_after(5) == []
        checkpointer.save(6, state(6)).result()
        assert checkpointer.steps() == [5, 6]
        assert newest_of(tmp_path) == 6
    assert hidden_names(tmp_path) == []


def test_discard_after_waits_for_saves_that_are_under_way(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
        assert checkpointer.discard_after(1) == [2, 3]
        checkpointer.save(2, state(2))
    assert checkpointer.steps() == [1, 2]


def test_delete_removes_one_step_and_latest_follows(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.delete(3)
        assert newest_of(tmp_path) == 2
        checkpointer.delete(1)
        assert newest_of(tmp_path) == 2
        with pytest.raises(CheckpointNotFoundError, match="no step 3"):
            checkpointer.delete(3)
        checkpointer.delete(2)
        assert sorted(os.listdir(tmp_path)) == [".lock", "events.jsonl"]
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load()


def test_damaged_step_can_be_deleted(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "MANIFEST.json").write_text("{")
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.delete(2)
    assert newest_of(tmp_path) == 1


def test_removing_from_a_root_that_is_not_there_makes_none(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.discard_after(0) == []
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.delete(1)
    assert os.listdir(tmp_path) == []


def test_step_that_somebody_reads_stays_and_that_is_said(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)

    def read(report: Report) -> None:
        with hold_for_reading(str(tmp_path / "step-00000002")):
            report(1)
            signal.pause()

    with fp.Checkpointer(tmp_path) as checkpointer:
        with Child(read) as child:
            wait_for_report(child, 1)
            with pytest.raises(StorageError, match=r"step 2 .* is being read"):
                checkpointer.discard_after(1)
            assert checkpointer.steps() == [1, 2]
            assert newest_of(tmp_path) == 2
        assert checkpointer.discard_after(1) == [2]


def test_who_does_not_own_the_root_removes_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with fp.Checkpointer(tmp_path) as owner:
        owner.save(3, state(3)).result()

        def other(report: Report) -> None:
            try:
                fp.Checkpointer(tmp_path).delete(1)
            except ConfigError:
                report(1)

        with Child(other) as child:
            wait_for_report(child, 1)
    with pytest.raises(ConfigError, match="closed"):
        owner.delete(1)
    assert owner.steps() == [1, 2, 3]


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None])
def test_what_is_no_step_is_not_removed(tmp_path: Path, step: Any) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    for remove in (checkpointer.delete, checkpointer.discard_after):
        with pytest.raises(ConfigError, match="a step is an int"):
            remove(step)


# --- the best


@pytest.mark.parametrize(("direction", "expected"), [("min", 30), ("max", 10)])
def test_best_is_what_keep_best_ranks_first(tmp_path: Path, direction: str, expected: int) -> None:
    save_steps(tmp_path, 10, 20, 30)
    with fp.Checkpointer(tmp_path, keep_best=(2, "loss", direction)) as checkpointer:
        assert checkpointer.best() == expected
        assert checkpointer.load("best")["step"] == expected
        with pytest.warns(RuntimeWarning, match="keep_best goes by the metric 'loss'"):
            checkpointer.save(40, state(40))
        assert checkpointer.load("best")["step"] == expected  # it is no matter that 40 has none


def test_of_equal_ones_the_one_committed_last_is_best(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep_best=(1, "loss", "min")) as checkpointer:
        for step in (10, 20, 11):
            checkpointer.save(step, state(step), metrics={"loss": 1.0})
        checkpointer.wait()
        assert checkpointer.best() == 11
    assert checkpointer.steps() == [11]


def test_best_of_steps_without_metrics_is_none(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path, keep_best=(1, "loss", "min"))
    assert checkpointer.best() is None
    checkpointer.save(1, state(1), metrics={"loss": float("nan")}).result()
    checkpointer.save(2, state(2)).result()
    assert checkpointer.best() is None
    with pytest.raises(CheckpointNotFoundError, match="loss"):
        checkpointer.load("best")
    checkpointer.close()


def test_best_that_is_damaged_is_an_error_and_no_other_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    file = tmp_path / "step-00000002" / "state.pt"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CorruptionError):
        fp.Checkpointer(tmp_path, keep_best=(1, "loss", "min")).load("best")


def test_without_a_rule_nobody_knows_what_best_is(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    for ask in (checkpointer.best, lambda: checkpointer.load("best")):
        with pytest.raises(ConfigError, match="keep_best"):
            ask()
    for step in ("newest", 1.0, True):
        with pytest.raises(ConfigError, match="a step is an int"):
            checkpointer.load(step)  # type: ignore[arg-type]


# --- a metric that no step has


def test_misspelt_metric_is_told_at_the_first_save_and_nothing_goes(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep=1, keep_best=(1, "los", "min")) as checkpointer:
        with pytest.warns(RuntimeWarning) as caught:
            checkpointer.save(1, state(1), metrics={"loss": 1.0, "lr": 2.0})
        for step in (2, 3):
            checkpointer.save(step, state(step), metrics={"loss": 1.0})
    assert [str(warning.message) for warning in caught] == [
        "keep_best goes by the metric 'los', and the metrics of this save are: 'loss', 'lr' (is 'loss' meant?). While "
        "no step has it, every step is kept"
    ]
    assert caught[0].filename == __file__
    assert checkpointer.steps() == [1, 2, 3]
    save_steps(tmp_path, 4, keep=1, keep_best=(1, "loss", "max"))
    assert checkpointer.steps() == [4]


# --- several ranks


def test_a_save_that_is_left_out_frees_its_state_at_once(tmp_path: Path) -> None:
    with using(held := HeldFilesystem()), fp.Checkpointer(tmp_path, busy="latest") as checkpointer:
        try:
            kept = []
            for step in range(4):
                state = {"w": torch.full((1000,), float(step))}
                kept.append(weakref.ref(state["w"]))
                checkpointer.save(step, state)
                del state
            gc.collect()
            assert [tensor() is None for tensor in kept[1:3]] == [True, True]  # the first is written, the last waits
        finally:
            held.release()
    assert fp.Checkpointer(tmp_path).steps() == [0, 3]
