"""Whose root it is: other processes, other threads, forked children; roots that go away or cannot be written."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from support.directories import wait_for_report
from support.forking import Child, Report, run_in_child
from support.runs import held_writers, hidden_names, remove_root
from support.sandbox import become_ordinary_user, open_directory
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.checkpointer.root import Root
from fastpersist.errors import FastPersistError
from fastpersist.saving.pending_save import PendingSave
from fastpersist.transfer.garbage import no_garbage_collection

STATE = {"weights": torch.arange(1000.0), "name": "a state"}


# --- whose root it is


def test_second_trainer_in_another_process_is_refused_and_may_read(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    checkpointer.save(1, {"step": 1}).result()
    owner = os.getpid()

    def intrude(report: Report) -> None:
        second = fp.Checkpointer(tmp_path)
        assert second.load() == {"step": 1}
        with pytest.raises(fp.ConfigError, match=f"being saved to by process {owner}"):
            second.save(2, {"step": 2})
        second.close()

    run_in_child(intrude)
    checkpointer.save(2, {"step": 3}).result()
    checkpointer.close()
    assert checkpointer.load() == {"step": 3}

    def follow(report: Report) -> None:
        with fp.Checkpointer(tmp_path) as second:
            second.save(3, {"step": 3})

    run_in_child(follow)
    assert checkpointer.steps() == [1, 2, 3]


def test_second_checkpointer_of_one_process_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    first, second = fp.Checkpointer(tmp_path), fp.Checkpointer(tmp_path)
    first.save(1, STATE)
    with pytest.raises(fp.ConfigError, match="this process"):
        second.save(2, STATE)
    first.close()
    second.save(2, STATE)
    second.close()
    assert second.steps() == [1, 2]


def test_a_checkpointer_that_nobody_has_any_more_leaves_its_root_to_the_next(tmp_path: Path) -> None:
    with no_garbage_collection():  # as a cell of a notebook that is run again, before Python looks for cycles
        checkpoints = fp.Checkpointer(tmp_path / "run")
        checkpoints.save(1, {})
        checkpoints.wait()
        checkpoints = fp.Checkpointer(tmp_path / "run")
        checkpoints.save(2, {})
        checkpoints.close()
    assert checkpoints.steps() == [1, 2]


def test_a_thread_that_has_finished_a_save_does_not_keep_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waited_for = threading.Event()
    finish, join = PendingSave._finish, threading.Thread.join

    def finish_and_stay(pending: PendingSave) -> None:
        finish(pending)
        is_waited_for.wait(PATIENCE_S)  # the thread still holds what it has saved

    def let_go_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        is_waited_for.set()
        join(thread, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(PendingSave, "_finish", finish_and_stay)
        checkpoints = fp.Checkpointer(tmp_path / "run")
        checkpoints.save(1, {}).result()
        patched.setattr(threading.Thread, "join", let_go_and_join)
        checkpoints = fp.Checkpointer(tmp_path / "run")
        checkpoints.save(2, {}).result()
        checkpoints.close()
    assert checkpoints.steps() == [1, 2]


def test_a_thread_that_is_only_being_started_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting = threading.Thread(name="fastpersist-save")  # of a save to another root
    monkeypatch.setitem(threading._limbo, starting, starting)  # type: ignore[attr-defined]
    with fp.Checkpointer(tmp_path / "run") as first:
        first.save(1, {}).result()
        with pytest.raises(fp.ConfigError, match="only one Checkpointer"):
            fp.Checkpointer(tmp_path / "run").save(2, {})


def test_lock_that_this_process_has_lost_is_taken_again(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path / "run")
    checkpointer.save(1, STATE).result()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # closing the copied lock file ends the record lock
    checkpointer.save(2, STATE).result()

    def intrude(report: Report) -> None:
        with fp.Checkpointer(tmp_path / "run") as second, pytest.raises(fp.ConfigError, match="is being saved to by"):
            second.save(3, STATE)

    run_in_child(intrude)
    checkpointer.close()


def test_steps_that_another_process_saved_while_the_lock_was_lost_are_older_than_those_after(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path / "run", keep=2)
    checkpointer.save(1, STATE).result()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")

    def intrude(report: Report) -> None:
        with fp.Checkpointer(tmp_path / "run") as second:
            for step in (10, 11, 12):
                second.save(step, STATE)

    run_in_child(intrude)
    checkpointer.save(2, {"mine": 2}).result()
    checkpointer.close()
    assert checkpointer.steps() == [2, 12]
    assert fp.Checkpointer(tmp_path / "run").load() == {"mine": 2}


def test_lock_that_another_process_has_meanwhile_is_an_error(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path / "run")
    checkpointer.save(1, STATE).result()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")

    def intrude(report: Report) -> None:
        second = fp.Checkpointer(tmp_path / "run")
        second.save(2, STATE).result()
        report(2)
        time.sleep(PATIENCE_S)  # it is killed

    with Child(intrude) as other:
        wait_for_report(other, 2)
        with pytest.raises(fp.ConfigError, match=f"is being saved to by process {other.pid}"):
            checkpointer.save(3, STATE)
    checkpointer.save(4, STATE).result()
    checkpointer.close()
    assert checkpointer.steps() == [1, 2, 4]


def test_a_link_that_is_changed_leads_to_another_root_with_a_lock_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        with fp.Checkpointer(tmp_path / name) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, {"root": name})
    (tmp_path / "link").symlink_to("a")
    go = threading.Event()
    after_commit = Root.after_commit
    monkeypatch.setattr(Root, "after_commit", lambda *given: go.wait(PATIENCE_S) and after_commit(*given))
    with fp.Checkpointer(tmp_path / "link", keep=1) as checkpointer, fp.Checkpointer(tmp_path / "b") as owner:
        owner.save(3, {"root": "b"})
        begun = checkpointer.save(3, {"root": "a"})
        begun.wait_written()
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("b")
        go.set()
        with pytest.raises(fp.ConfigError, match="is being saved to by this process"):
            checkpointer.save(4, {})
        owner.close()
        checkpointer.save(4, {})
        checkpointer.wait()
    assert fp.Checkpointer(tmp_path / "a").steps() == [3]
    assert fp.Checkpointer(tmp_path / "b").steps() == fp.Checkpointer(tmp_path / "link").steps() == [4]


def test_root_that_was_taken_away_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with fp.Checkpointer(root) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.wait()  # nothing of it comes any more, neither to the log of events
        remove_root(root)
        checkpointer.save(2, STATE).result()
    assert checkpointer.steps() == [2]
    assert sorted(os.listdir(root)) == [".lock", "LATEST", "events.jsonl", "step-00000002"]


def test_root_that_was_taken_away_below_a_save_is_an_error_of_that_save(tmp_path: Path) -> None:
    root = tmp_path / "run"
    checkpointer = fp.Checkpointer(root)
    with held_writers() as writers:
        pending = checkpointer.save(1, STATE)
        assert writers.reached.wait(PATIENCE_S)
        remove_root(root)
        writers.release()
        assert isinstance(pending.exception(), fp.StorageError)
    checkpointer.save(2, STATE)
    checkpointer.close()
    assert checkpointer.steps() == [2]
    assert hidden_names(root) == []


def test_root_that_became_read_only_is_an_error_until_it_is_writable(tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:

        def work(report: Report) -> None:
            become_ordinary_user()
            root = directory / "run"
            checkpointer = fp.Checkpointer(root)
            checkpointer.save(1, {"step": 1}).result()
            root.chmod(0o555)
            with pytest.raises(fp.StorageError, match="ermission"):
                checkpointer.save(2, {"step": 2}).result()
            assert fp.Checkpointer(root).load() == {"step": 1}
            root.chmod(0o755)
            checkpointer.save(2, {"step": 2})
            checkpointer.close()
            assert checkpointer.steps() == [1, 2]
            assert hidden_names(root) == []

        run_in_child(work)


def test_forked_child_cannot_save_and_leaves_its_parent_alone(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    checkpointer.save(1, STATE).result()
    with held_writers() as writers:
        pending = checkpointer.save(2, STATE)
        assert writers.reached.wait(PATIENCE_S)

        def work(report: Report) -> None:
            with pytest.raises(fp.ConfigError, match="forked"):
                checkpointer.save(3, STATE)
            with pytest.raises(fp.FastPersistError, match="forked"):
                pending.result()
            assert checkpointer.load(1)["name"] == "a state"
            checkpointer.close()

        run_in_child(work)
        assert len(hidden_names(tmp_path)) == 1
        writers.release()
    assert pending.result() == tmp_path / "step-00000002"
    with pytest.raises(fp.ConfigError):  # the child has not given our lock away
        fp.Checkpointer(tmp_path).save(4, STATE)
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]


def test_a_child_does_not_wait_for_the_saves_of_its_parent(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "root") as checkpoints:
        checkpoints.save(1, {"x": torch.ones(3_000_000)})

        def work(_: Report) -> None:
            with pytest.raises(FastPersistError, match="process"):
                checkpoints.wait()

        run_in_child(work)
