"""What save() takes, who waits for whom while saves are unfinished, and what is told of each."""

from __future__ import annotations

import collections
import logging
import math
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.runs import Run, held_writers, hidden_names
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.checkpointer.step_saver import SaveQueue, checked_metrics, step_of
from fastpersist.saving.pending_save import PendingSave, SaveStats

STATE = {"weights": torch.arange(1000.0), "name": "a state"}


# --- what is saved


@pytest.mark.parametrize("step", [7, numpy.int64(7), torch.tensor(7)], ids=repr)
def test_whole_number_of_any_kind_is_a_step(step: Any) -> None:
    assert (step_of(step, {}), type(step_of(step, {}))) == (int(step), int)


@pytest.mark.parametrize(
    ("step", "state", "said"),
    [
        (-1, {}, "-1"),
        (True, {}, "True"),
        (1.5, {}, "1.5"),
        ("7", {}, "'7'"),
        (None, {}, "None"),
        ({"w": 1}, 7, "the step comes first"),
    ],
)
def test_what_is_no_step_is_refused(step: Any, state: Any, said: str) -> None:
    with pytest.raises(fp.ConfigError, match=said):
        step_of(step, state)


def test_metrics_become_numbers() -> None:
    assert checked_metrics(None) == {}
    found = checked_metrics({"a": 2, "b": torch.tensor([3]), "c": numpy.float32(0.5), "d": math.inf})
    assert found == {"a": 2.0, "b": 3.0, "c": 0.5, "d": math.inf}
    assert {type(value) for value in found.values()} == {float}
    with pytest.raises(fp.ConfigError, match="metrics is a dict"):
        checked_metrics([("loss", 1.0)])  # type: ignore[arg-type]


# --- failures


def failed_save(step: int) -> PendingSave:
    pending = PendingSave(f"/run/{step}", SaveStats(path=f"/run/{step}", step=step))
    pending.fail(fp.StorageError(5, f"step {step} failed", f"/run/{step}"))
    return pending


def queue_of(*pending: PendingSave, on_error: str = "raise") -> SaveQueue:
    queue = SaveQueue("/run", on_error)
    for one in pending:
        queue.add(one)
    return queue


def test_failures_are_raised_one_by_one_in_the_order_of_the_saves() -> None:
    queue = queue_of(failed_save(1), failed_save(2))
    for step in (1, 2):
        with pytest.raises(fp.StorageError, match=f"step {step} failed"):
            queue.deliver()
    queue.deliver()
    assert [stats.step for stats in queue.stats] == [1, 2]


def test_failures_that_are_given_back_come_before_later_ones() -> None:
    queue = queue_of(failed_save(1), failed_save(2))
    taken = queue.take_failed()
    queue.deliver()  # there is none: they are the caller's
    queue.add(failed_save(3))
    with pytest.raises(fp.StorageError, match="step 1 failed"):
        queue.deliver(taken)
    for step in (2, 3):
        with pytest.raises(fp.StorageError, match=f"step {step} failed"):
            queue.deliver()
    queue.deliver()


def test_failure_that_its_owner_has_seen_is_not_raised_again() -> None:
    first = failed_save(1)
    queue = queue_of(first, failed_save(2))
    assert isinstance(first.exception(), fp.StorageError)
    with pytest.raises(fp.StorageError, match="step 2 failed"):
        queue.deliver()
    queue.deliver()


def test_skipped_save_is_no_failure() -> None:
    pending = PendingSave("/run/1", SaveStats(path="/run/1", step=1))
    queue = queue_of(pending)
    assert queue.unfinished() == [pending]
    assert pending.skip("another one came")
    assert queue.unfinished() == []
    queue.deliver()
    assert [stats.step for stats in queue.stats] == [1]


def test_failures_are_warned_of_where_training_shall_go_on() -> None:
    queue = queue_of(failed_save(1), failed_save(2), on_error="warn")
    with pytest.warns(RuntimeWarning, match="training goes on") as caught:
        queue.deliver()
    assert ["step 1" in str(caught[0].message), "step 2" in str(caught[1].message)] == [True, True]
    queue.deliver()


def test_failures_are_logged_while_another_exception_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    queue = queue_of(failed_save(1), failed_save(2))
    with caplog.at_level(logging.ERROR, logger="fastpersist"):
        queue.log_failed("while another exception was being raised")
    said = [record.getMessage() for record in caplog.records if "another exception" in record.getMessage()]
    assert ["step 1" in said[0], "step 2" in said[1], len(said)] == [True, True, 2]
    queue.deliver()


def test_waiting_can_be_limited() -> None:
    queue = queue_of(PendingSave("/run/1", SaveStats(path="/run/1", step=1)))
    with pytest.raises(TimeoutError, match="still under way"):
        queue.join(0)


def test_save_that_begins_while_another_thread_looks_at_the_saves_is_not_lost() -> None:
    class Interrupted(PendingSave):
        """Lets the training thread begin another save while it is looked at."""

        def done(self) -> bool:
            if not begun:
                begun.append(later)
                queue.add(later)
            return True

    begun: list[PendingSave] = []
    later = PendingSave("/run/2", SaveStats(path="/run/2", step=2))
    queue = queue_of(Interrupted("/run/1", SaveStats(path="/run/1", step=1)))
    assert queue.make_room("wait")
    assert queue.unfinished() == [later]


# --- who waits for whom


def test_busy_wait_lets_two_saves_be_unfinished_and_loses_none(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    with held_writers() as writers:
        pending = [checkpointer.save(step, {"step": step}) for step in (1, 2)]
        threading.Thread(target=lambda: (writers.reached.wait(PATIENCE_S), writers.release())).start()
        pending.append(checkpointer.save(3, {"step": 3}))
        assert pending[0].is_written()
    checkpointer.close()
    assert checkpointer.steps() == [1, 2, 3]
    assert not any(save.skipped() for save in pending)


def test_busy_latest_leaves_out_the_one_that_waits(tmp_path: Path, leak_check: None) -> None:
    checkpointer = fp.Checkpointer(tmp_path, busy="latest")
    with held_writers() as writers:
        first = checkpointer.save(1, {"step": 1})
        assert writers.reached.wait(PATIENCE_S)
        others = [checkpointer.save(step, {"step": step}) for step in (2, 3, 4)]
        assert [save.skipped() for save in others] == [True, True, False]
        assert others[0].done()
        with pytest.raises(fp.SkippedError, match="newer"):
            others[0].result()
    checkpointer.close()  # and raises nothing: a skipped save is no failure
    assert first.result() == tmp_path / "step-00000001"
    assert checkpointer.steps() == [1, 4]
    assert sorted(stats.step or 0 for stats in checkpointer.stats()) == [1, 2, 3, 4]
    assert hidden_names(tmp_path) == []


def test_busy_skip_captures_nothing(tmp_path: Path, leak_check: None) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise AssertionError("it was pickled")

    checkpointer = fp.Checkpointer(tmp_path, busy="skip")
    with held_writers():
        checkpointer.save(1, {"step": 1})
        skipped = checkpointer.save(2, {"step": Unpicklable()})
        assert skipped.skipped()
        assert skipped.done()
        assert skipped.captured()
        assert isinstance(skipped.exception(), fp.SkippedError)
    checkpointer.wait()
    assert not checkpointer.save(3, {"step": 3}).skipped()
    checkpointer.close()
    assert checkpointer.steps() == [1, 3]
    assert {stats.step: stats.error is None for stats in checkpointer.stats()} == {1: True, 2: False, 3: True}


def test_wait_returns_when_all_is_committed_and_can_be_limited(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    with held_writers() as writers:
        pending = checkpointer.save(1, STATE)
        with pytest.raises(TimeoutError):
            checkpointer.wait(0.01)
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        assert not pending.done()
        writers.release()
        checkpointer.wait()
        assert pending.done()
        assert checkpointer.steps() == [1]
    checkpointer.close()


# --- what is told


def test_one_line_of_the_log_tells_of_each_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run().advance()
    caplog.set_level(logging.INFO, logger="fastpersist")
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, run.state())
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    assert [line.split(":")[0] for line in told] == ["step 1", "step 2"]
    assert all("stalled" in line and "GB/s" in line for line in told)


def test_log_says_once_why_everything_is_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fastpersist")
    with fp.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, STATE)
    assert len([record for record in caplog.records if "copied inside save()" in record.getMessage()]) == 1


def test_log_does_not_call_all_state_copied_where_one_optimizer_is_volatile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fastpersist")
    run, other = Run().advance(), torch.nn.Parameter(torch.ones(3))
    volatile = torch.optim.SGD([other])
    volatile.train = volatile.eval = lambda: None  # type: ignore[attr-defined]
    with fp.Checkpointer(tmp_path, optimizer=[run.optimizer, volatile]) as checkpointer:
        checkpointer.save(1, run.state() | {"other": other})
    (told,) = [record.getMessage() for record in caplog.records if "inside save()" in record.getMessage()]
    assert told.startswith(f"{tmp_path}: state is copied inside save(), which stalls training: SGD changes parameters")


def test_state_that_weights_only_refuses_is_told_with_the_line_that_helps(tmp_path: Path) -> None:
    state = {"model": STATE, "counts": collections.deque([1, 2])}
    with fp.Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(RuntimeWarning, match="'counts' needs collections.deque") as caught:
            checkpointer.save(1, state)
        assert "no list of safe globals lets collections.deque through" in str(caught[0].message)
        assert caught[0].filename == __file__
        checkpointer.save(2, state)  # of the same structure: said once
        with pytest.raises(Exception, match="deque"):
            checkpointer.load(2)
        assert checkpointer.load(2, weights_only=False)["counts"] == collections.deque([1, 2])
