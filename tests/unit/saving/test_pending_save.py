"""Saves in the background: their order, their one error, their threads; forks, Ctrl-C and the end of the program."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import run_in_child
from support.states import load_step, make_state, pending_files
from support.training import (
    PATIENCE_S,
    FailingFilesystem,
    HeldFilesystem,
    Overlap,
    backward,
    small_model,
    state_of,
    train,
    waiting_step,
)

import fastpersist as fp
from fastpersist.commit.filesystem import filesystem, using
from fastpersist.saving import capture, file_save
from fastpersist.saving.pending_save import PendingSave, SaveStats, _Latch
from fastpersist.transfer.arena import Arena

adam = functools.partial(torch.optim.Adam, lr=0.1)


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldFilesystem]:
    """Writers wait until they are released, and there is memory for as many as a test begins."""
    monkeypatch.setattr(file_save, "async_arena", Arena(64 << 20))
    with using(held := HeldFilesystem()):
        yield held
        held.release()


# --- what a pending save tells


def test_it_tells_how_far_it_is(tmp_path: Path, writers: HeldFilesystem) -> None:
    pending = fp.save_async(make_state(1), tmp_path / "state.pt")
    assert not pending.done()
    assert not pending.skipped()
    assert pending.captured()
    pending.wait_captured()
    for wait in (pending.result, pending.exception):
        with pytest.raises(TimeoutError, match=r"state\.pt"):
            wait(timeout=0.01)
    assert not (tmp_path / "state.pt").exists()
    assert "under way" in repr(pending)
    writers.release()
    assert pending.result(PATIENCE_S) == tmp_path / "state.pt"
    assert pending.exception() is None
    assert pending.done()
    assert "done" in repr(pending)
    assert load_step(tmp_path / "state.pt") == 1


def test_stats_add_up(tmp_path: Path) -> None:
    model = small_model()
    optimizer = adam(model.parameters())
    train(model, optimizer)
    with Overlap(tmp_path, "held") as overlap:
        state = {**state_of(model, optimizer), "copied": torch.ones(1000)}
        pending = overlap.save(state, optimizer=optimizer)
        train(model, optimizer)
        overlap.check(pending, state)
        stats = pending.stats
    steps_bytes = 4 * len(list(model.parameters()))
    stable_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters()) + steps_bytes
    assert stats.path == str(tmp_path / "state.pt")
    assert stats.bytes == (tmp_path / "state.pt").stat().st_size
    assert (stats.bytes_by_writer, stats.bytes_at_gate, stats.bytes_before_return) == (0, stable_bytes, 4000)
    assert 0 < stats.plan_s <= stats.stall_s
    assert 0 < stats.capture_s
    assert 0 < stats.write_s
    assert stats.engine in {probe.name for probe in fp.engines(tmp_path)}
    assert stats.error is None
    assert stats.step is None


def failed_save(tmp_path: Path) -> PendingSave:
    with using(writers := FailingFilesystem()):
        pending = fp.save_async(make_state(1), tmp_path / "state.pt")
        writers.release()
        assert pending.join(PATIENCE_S)
    return pending


def test_an_error_is_raised_by_result_and_then_by_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pending = failed_save(tmp_path)
    assert "NoSpaceError" in caplog.text
    with pytest.raises(fp.NoSpaceError):
        pending.result()
    assert pending.undelivered_error() is None
    assert isinstance(pending.exception(), fp.NoSpaceError)
    assert pending.stats.error is not None
    assert pending.stats.error.startswith("NoSpaceError: ")
    assert "failed" in repr(pending)


def test_an_error_that_exception_returned_is_delivered(tmp_path: Path) -> None:
    pending = failed_save(tmp_path)
    assert isinstance(pending.exception(), fp.NoSpaceError)
    assert pending.undelivered_error() is None


def test_an_error_that_the_owner_took_is_delivered(tmp_path: Path) -> None:
    pending = failed_save(tmp_path)
    assert isinstance(pending.undelivered_error(), fp.NoSpaceError)
    assert pending.undelivered_error() is None
    assert isinstance(pending.exception(), fp.NoSpaceError)


def test_an_error_that_comes_later_is_still_delivered(tmp_path: Path) -> None:
    with using(writers := FailingFilesystem()):
        pending = fp.save_async(make_state(1), tmp_path / "state.pt")
        assert writers.reached.wait(PATIENCE_S)
        assert pending.undelivered_error() is None
        with pytest.raises(TimeoutError):
            pending.exception(timeout=0.01)
        writers.release()
        assert pending.join(PATIENCE_S)
    assert isinstance(pending.undelivered_error(), fp.NoSpaceError)


def test_a_skipped_save_is_done_and_no_failure() -> None:
    pending = PendingSave("state.pt", SaveStats(path="state.pt"))
    assert pending.skip("another one is being written")
    assert pending.skipped()
    assert pending.done()
    assert pending.captured()
    assert pending.undelivered_error() is None
    with pytest.raises(fp.SkippedError, match="another one"):
        pending.result()
    ran: list[int] = []
    pending.run(lambda: ran.append(1))
    assert not ran
    assert "skipped" in repr(pending)


def test_a_save_that_is_being_written_is_not_skipped() -> None:
    pending = PendingSave("state.pt", SaveStats(path="state.pt"))
    answers: list[bool] = []
    pending.run(lambda: answers.append(pending.skip("too late")))
    pending.succeed()
    assert answers == [False]
    assert not pending.skipped()
    assert pending.result() == Path("state.pt")


@pytest.mark.parametrize("fails", [True, False])
def test_clean_up_runs_only_after_a_failure_and_the_end_is_told_always(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pending = PendingSave("state.pt", SaveStats(path="state.pt"))
    ran: list[str] = []

    def broken(_: object = None) -> None:
        ran.append("broken")
        raise ValueError("broken on purpose")

    pending.when_failed(lambda error: ran.append(f"first, {error}"))
    pending.when_failed(broken)
    pending.when_failed(lambda _: ran.append("last"))
    pending.when_finished(broken)
    pending.when_finished(lambda: ran.append("told"))

    def task() -> None:
        if fails:
            raise fp.StorageError(None, "the disk is gone")
        pending.succeed()

    pending.run(task)
    told = ["broken", "told"]
    assert ran == (["last", "broken", "first, the disk is gone", *told] if fails else told)
    assert (type(pending.exception()) is fp.StorageError) == fails
    assert "broken on purpose" in caplog.text


# --- order


class HoldingOne(HeldFilesystem):
    """Holds writers of one name only, and notes which renames were made."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.renamed: list[str] = []

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        if self._name in path:
            super().allocate(fd, size_bytes, path)
        else:
            super(HeldFilesystem, self).allocate(fd, size_bytes, path)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.renamed.append(os.path.basename(target))


def test_saves_to_one_path_are_written_in_order(tmp_path: Path, writers: HeldFilesystem) -> None:
    (tmp_path / "link.pt").symlink_to("state.pt")
    names = [tmp_path / "state.pt", tmp_path / "link.pt", Path(os.path.relpath(tmp_path / "state.pt"))]
    seen: list[int] = []
    pendings = []
    for step in range(6):
        pending = fp.save_async(make_state(step), names[step % 3])
        pending.when_finished(lambda: seen.append(load_step(tmp_path / "state.pt")))
        pendings.append(pending)
    writers.release()
    for pending in reversed(pendings):
        pending.result(PATIENCE_S)
    pendings[-1].join()
    assert (tmp_path / "link.pt").is_symlink()
    assert load_step(tmp_path / "state.pt") == 5
    assert seen[:5] == [0, 1, 2, 3, 4]
    assert not pending_files(tmp_path)


def test_saves_to_one_path_are_in_order_whatever_others_do(tmp_path: Path, writers: HeldFilesystem) -> None:
    first = fp.save_async(make_state(1), tmp_path / "state.pt")
    others = [fp.save_async(make_state(9), tmp_path / f"other{index}.pt") for index in range(3)]
    second = fp.save_async(make_state(2), tmp_path / "state.pt")
    assert not any(pending.done() for pending in (first, second, *others))
    writers.release()
    second.result(PATIENCE_S)
    assert first.done()
    for pending in others:
        pending.result(PATIENCE_S)
    assert load_step(tmp_path / "state.pt") == 2


def test_saves_to_other_paths_do_not_wait(tmp_path: Path) -> None:
    with using(writers := HoldingOne("slow.pt")):
        slow = fp.save_async(make_state(1), tmp_path / "slow.pt")
        assert writers.reached.wait(PATIENCE_S)
        for step in range(3):
            fp.save_async(make_state(step), tmp_path / f"{step}.pt").result(PATIENCE_S)
        assert not slow.done()
        writers.release()
        slow.result(PATIENCE_S)
    assert writers.renamed == ["0.pt", "1.pt", "2.pt", "slow.pt"]


def test_a_save_behind_one_that_fails_is_written(tmp_path: Path) -> None:
    with using(writers := FailingFilesystem()):
        failing = fp.save_async(make_state(1), tmp_path / "state.pt")
        assert writers.reached.wait(PATIENCE_S)
        following = fp.save_async(make_state(2), tmp_path / "state.pt")
        writers.fails_once = True
        writers.release()
        following.result(PATIENCE_S)
    assert isinstance(failing.exception(), fp.NoSpaceError)
    assert load_step(tmp_path / "state.pt") == 2


# --- before it begins


def test_what_a_rename_cannot_replace_is_saved_at_once(tmp_path: Path) -> None:
    (tmp_path / "one.pt").touch()
    os.link(tmp_path / "one.pt", tmp_path / "two.pt")
    pending = fp.save_async(make_state(3), tmp_path / "one.pt")
    assert pending.done()
    assert pending.captured()
    assert pending.result() == tmp_path / "one.pt"
    assert load_step(tmp_path / "two.pt") == 3
    assert pending.stats.engine == "torch.save"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"engine": "punch cards"}, fp.ConfigError),
        ({"gate": "none"}, fp.ConfigError),
        ({"optimizer": object()}, fp.ConfigError),
        ({"constant": 5}, fp.ConfigError),
    ],
)
def test_nonsense_is_refused_before_any_file_is_touched(
    tmp_path: Path, leak_check: None, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        fp.save_async(make_state(1), tmp_path / "state.pt", **arguments)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_pickled_is_refused_before_any_file_is_touched(tmp_path: Path, leak_check: None) -> None:
    with pytest.raises(Exception, match="lambda"):
        fp.save_async({"function": lambda: None}, tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_is_told_at_once(tmp_path: Path, leak_check: None) -> None:
    with pytest.raises(fp.StorageError):
        fp.save_async(make_state(1), tmp_path / "missing" / "state.pt")


def test_many_saves_leave_nothing_behind(tmp_path: Path) -> None:
    from support.leaks import no_leaks

    fp.save_async(make_state(0), tmp_path / "state.pt").result(PATIENCE_S)
    with no_leaks(tmp_path):
        for step in range(20):
            pending = fp.save_async(make_state(step), tmp_path / "state.pt")
        pending.result(PATIENCE_S)
        del pending
    assert not capture._pending


@pytest.mark.parametrize("fails", [False, True], ids=["published", "failed"])
def test_a_save_that_is_over_holds_nothing_of_the_state(tmp_path: Path, fails: bool) -> None:
    model = small_model()
    optimizer = adam(model.parameters())
    train(model, optimizer)
    with using(FailingFilesystem() if fails else HeldFilesystem()) as _:
        writers = filesystem()
        assert isinstance(writers, HeldFilesystem)
        pending = fp.save_async(state_of(model, optimizer), tmp_path / "state.pt", optimizer=optimizer)
        train(model, optimizer)
        writers.release()
        assert (pending.exception(PATIENCE_S) is not None) == fails
    held = [weakref.ref(thing) for thing in (model[0].weight, optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert pending.done()


# --- forks


@pytest.mark.parametrize("way", ["held", "no room"])
def test_a_forked_child_has_nothing_to_do_with_it(tmp_path: Path, way: str) -> None:
    with Overlap(tmp_path, way) as overlap:
        model = small_model()
        optimizer = adam(model.parameters())
        train(model, optimizer)
        state = state_of(model, optimizer)
        pending = overlap.save(state, optimizer=optimizer)
        assert overlap.writers.reached.wait(PATIENCE_S)

        def child(_report: Callable[[int], None]) -> None:
            for call in (pending.result, pending.exception, pending.wait_captured):
                with pytest.raises(fp.FastPersistError, match="forked"):
                    call()
            train(model, optimizer)  # no gate: what is saved is the parent's
            with using(HoldingOne("nothing")):
                mine = fp.save_async(state_of(model, optimizer), tmp_path / "child.pt", optimizer=optimizer)
                train(model, optimizer)
                mine.result(PATIENCE_S)
                fp.load(tmp_path / "child.pt", verify=True)

        run_in_child(child)
        assert pending_files(tmp_path)
        assert not pending.done()
        train(model, optimizer)
        overlap.check(pending, state)


# --- Ctrl-C


@contextmanager
def interrupted_when(event: threading.Event) -> Iterator[None]:
    """Interrupt the main thread by SIGINT once an event has happened."""
    taken = threading.Event()

    def take(_number: int, _frame: object) -> None:
        if not taken.is_set():
            taken.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        assert event.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)
        while not taken.wait(0.05):  # a thread that is just about to wait does not notice the first one
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, take)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE_S)
        signal.signal(signal.SIGINT, before)


def told_when_waiting(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> threading.Event:
    """Return an event that happens when a thread begins to wait inside a method."""
    waits = threading.Event()
    method = getattr(owner, name)

    def wait(self: object, *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("wait", True):
            waits.set()
        return method(self, *arguments, **keywords)

    monkeypatch.setattr(owner, name, wait)
    return waits


def test_ctrl_c_ends_the_wait_at_the_gate_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Overlap(tmp_path, "held") as overlap:
        monkeypatch.setattr(file_save, "async_arena", Arena(0))
        model = small_model()
        optimizer = adam(model.parameters())
        train(model, optimizer)
        state = state_of(model, optimizer)
        pending = overlap.save(state, optimizer=optimizer)
        backward(model)
        before = model[0].weight.clone()
        with (
            interrupted_when(told_when_waiting(monkeypatch, capture.Capture, "wait_captured")),
            pytest.raises(KeyboardInterrupt),
        ):
            optimizer.step()
        assert torch.equal(model[0].weight, before)
        assert not pending.captured()
        with waiting_step(optimizer.step):  # and it still holds the next one
            overlap.writers.release()
        overlap.check(pending, state)


def test_ctrl_c_while_save_waits_for_memory_cancels_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    with using(writers := HeldFilesystem()):
        monkeypatch.setattr(file_save, "async_arena", Arena(0))
        waits = told_when_waiting(monkeypatch, capture.Capture, "copy_volatile")
        with interrupted_when(waits), pytest.raises(KeyboardInterrupt):
            fp.save_async(make_state(1), tmp_path / "state.pt")
        writers.release()
        monkeypatch.setattr(file_save, "async_arena", Arena())
        fp.save_async(make_state(2), tmp_path / "state.pt").result(PATIENCE_S)
    assert load_step(tmp_path / "state.pt") == 2
    assert not pending_files(tmp_path)


def test_ctrl_c_ends_the_wait_for_a_result_and_not_the_save(
    tmp_path: Path, writers: HeldFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = fp.save_async(make_state(1), tmp_path / "state.pt")
    with interrupted_when(told_when_waiting(monkeypatch, PendingSave, "join")), pytest.raises(KeyboardInterrupt):
        pending.result(PATIENCE_S)
    assert not pending.done()
    writers.release()
    pending.result(PATIENCE_S)
    assert load_step(tmp_path / "state.pt") == 1


# --- the end of the program


def test_log_of_a_failed_save_names_path_and_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failed_save(tmp_path)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert str(tmp_path / "state.pt") in record.getMessage()
    assert "NoSpaceError" in record.getMessage()


# --- latches


def test_a_latch_lets_all_go_once_it_is_set() -> None:
    latch = _Latch()
    assert not latch.wait(0.001)
    ended: list[bool] = []
    waiters = [threading.Thread(target=lambda: ended.append(latch.wait(PATIENCE_S))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    latch.set()
    latch.set()
    for waiter in waiters:
        waiter.join(PATIENCE_S)
    assert (ended, latch.is_set(), latch.wait(0)) == ([True] * 3, True, True)


def test_a_waiter_that_is_interrupted_before_it_lets_the_next_one_go_holds_up_nobody() -> None:
    latch = _Latch()
    ended: list[bool] = []
    waiter = threading.Thread(target=lambda: ended.append(latch.wait(PATIENCE_S)))
    waiter.start()
    latch._is_set = True  # the waiter that got the lock has gone, and never releases it
    waiter.join(PATIENCE_S)
    assert ended == [True]


def test_a_save_is_written_at_full_speed_when_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = PendingSave("state.pt", SaveStats(path="state.pt"))
    hurried: list[bool] = []
    monkeypatch.setattr(pending, "hurry", lambda: hurried.append(True))
    pending.poll(0)
    assert not hurried
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    pending.poll(0)
    assert hurried
