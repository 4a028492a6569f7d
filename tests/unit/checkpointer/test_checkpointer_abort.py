"""close(abort=True) waits for nothing, publishes nothing that is unfinished, and leaves the root to others."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.filesystems import FullFor
from support.runs import Replay, Run, held_writers, hidden_names, wait_for_writers

import fastpersist as fp
from fastpersist.commit.filesystem import using


def test_saves_under_way_are_given_up_without_waiting_for_them(tmp_path: Path, leak_check: None) -> None:
    run = Run()
    checkpoints = fp.Checkpointer(tmp_path, optimizer=run.optimizer)
    checkpoints.save(1, run.advance().state()).result()
    with held_writers() as writers:
        pending = [checkpoints.save(step, run.advance().state()) for step in (2, 3)]
        assert writers.reached.wait(30)
        checkpoints.close(abort=True)  # the writer is held until the block ends
        assert pending[0].captured()
        assert pending[1].captured()
        assert not pending[0].done()
        run.advance()
    for each in pending:
        with pytest.raises(fp.SkippedError, match="given up: the Checkpointer was closed with abort=True"):
            each.result(30)
    assert Replay().check_all(tmp_path) == [1]
    assert hidden_names(tmp_path) == []
    checkpoints.close()  # nobody has a failure to be told of
    with pytest.raises(fp.ConfigError, match="closed"):
        checkpoints.save(4, run.state())


def test_root_is_free_for_others_while_the_writer_still_ends(tmp_path: Path) -> None:
    run = Run()
    checkpoints = fp.Checkpointer(tmp_path, optimizer=run.optimizer)
    with held_writers() as writers:
        checkpoints.save(1, run.advance().state())
        assert writers.reached.wait(30)
        checkpoints.close(abort=True)
        before = hidden_names(tmp_path)
        assert len(before) == 1
        with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as others:
            others.save(1, run.state())
            assert before[0] in hidden_names(tmp_path), "it belongs to a writer that lives"
            writers.release()
    assert Replay().check_all(tmp_path) == [1]
    assert hidden_names(tmp_path) == []


def test_steps_that_are_visible_stay_and_closing_twice_does_nothing(tmp_path: Path) -> None:
    run = Run()
    checkpoints = fp.Checkpointer(tmp_path, keep=1)
    for _ in range(2):
        checkpoints.save(run.advance().step, run.state()).result()
    checkpoints.close(abort=True)
    checkpoints.close(abort=True)
    wait_for_writers()
    assert Replay().check_all(tmp_path) == [2]


def test_earlier_failure_is_logged_and_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = fp.Checkpointer(tmp_path)
    with using(FullFor("step-00000001")):
        checkpoints.save(1, {"a": 1})
        wait_for_writers()
    checkpoints.close(abort=True)
    assert "while another exception was being raised" not in caplog.text
    assert "whose error was not raised" in caplog.text


def test_signal_that_has_come_saves_nothing_and_goes_on(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        checkpoints = fp.Checkpointer(tmp_path)
        checkpoints.save_on_signal(lambda: (1, {"a": 1}), (signal.SIGUSR1,))
        signal.raise_signal(signal.SIGUSR1)
        assert came == []
        checkpoints.close(abort=True)
        assert came == [signal.SIGUSR1]
        assert fp.Checkpointer(tmp_path).steps() == []
    finally:
        signal.signal(signal.SIGUSR1, before)
