"""Callbacks hear all events, in order, on a thread of their own; nothing that they do reaches the program."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.forking import run_in_child

import fastpersist as fp
from fastpersist.events import Event, delivery, read_events, subscribe
from fastpersist.events.delivery import emit, flush, log_of, wake


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    found: list[Event] = []
    unsubscribe = subscribe(found.append)
    yield found
    unsubscribe()


def emit_some(count: int) -> None:
    for number in range(count):
        emit("removed", f"/x/{number}", {})


def test_events_come_in_their_order(heard: list[Event]) -> None:
    emit_some(100)
    assert flush(60)
    assert [event.path for event in heard] == [f"/x/{number}" for number in range(100)]


def test_callback_runs_on_another_thread() -> None:
    threads = []
    unsubscribe = subscribe(lambda _: threads.append(threading.current_thread().name))
    emit_some(1)
    assert flush(60)
    unsubscribe()
    assert threads == ["fastpersist-events"]


def test_nothing_comes_after_the_end_of_a_subscription() -> None:
    found: list[Event] = []
    unsubscribe = subscribe(found.append)
    unsubscribe()
    unsubscribe()
    emit_some(1)
    assert flush(60)
    assert not found


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
def test_failing_callback_is_logged_once_and_others_hear(
    error: type[BaseException], heard: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise error("no dashboard")

    unsubscribe = subscribe(fail)
    emit_some(3)
    assert flush(60)
    unsubscribe()
    emit_some(1)
    assert flush(60)
    assert len(heard) == 4
    assert len([record for record in caplog.records if "callback" in record.message]) == 1


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(fp.ConfigError, match="cannot be called"):
        subscribe("no function")  # type: ignore[arg-type]


def test_hanging_callback_holds_nobody_up_and_what_is_too_much_is_dropped(
    heard: list[Event], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_WAITING_COUNT", 5)
    hangs, go = threading.Event(), threading.Event()

    def hang(event: Event) -> None:
        hangs.set()
        go.wait(60)

    unsubscribe = subscribe(hang)
    emit_some(1)
    assert hangs.wait(60)
    emit_some(8)
    assert not flush(0.01)
    unsubscribe()
    go.set()
    assert flush(60)
    assert len(heard) == 6
    with caplog.at_level(logging.WARNING):
        emit_some(1)
        assert flush(60)
    assert "3 events were dropped" in caplog.text


def test_event_that_wakes_nobody_waits_for_the_next_that_does(heard: list[Event]) -> None:
    emit("loaded", "/x/0", {}, wakes=False)
    wake()
    assert flush(60)
    assert [event.kind for event in heard] == ["loaded"]


def test_flush_inside_a_callback_does_not_wait_for_itself() -> None:
    found = []
    unsubscribe = subscribe(lambda _: found.append(flush(60)))
    emit_some(1)
    assert flush(60)
    unsubscribe()
    assert found == [False]


def test_thread_ends_when_nothing_happens_and_starts_again(heard: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    assert flush(60)
    monkeypatch.setattr(delivery, "_IDLE_S", 0.01)
    emit_some(1)  # a thread that runs already idles as long as it began to
    assert flush(60)
    thread = delivery._thread
    if thread is not None:
        thread.join(60)
    assert delivery._thread is None
    emit_some(1)
    assert flush(60)
    assert len(heard) == 2


def test_forked_child_has_no_thread_and_no_callbacks(heard: list[Event], tmp_path: Path) -> None:
    log = log_of(str(tmp_path), 0)
    emit_some(1)
    assert flush(60)

    def child(_report: Callable[[int], None]) -> None:
        emit("removed", str(tmp_path / "step-00000001"), {}, step=1)
        assert delivery._thread is None
        assert flush(60)
        assert len(heard) == 1
        told: list[Event] = []
        subscribe(told.append)
        emit_some(1)
        assert flush(60)
        assert len(told) == 1

    run_in_child(child)
    assert log.rank == 0
    assert not os.listdir(tmp_path)


def test_log_is_told_of_steps_of_its_root_only(tmp_path: Path) -> None:
    log = log_of(str(tmp_path), 3)
    emit("removed", str(tmp_path / "step-00000001"), {"bytes": 7}, step=1, rank=3)
    emit("removed", str(tmp_path / "step-00000001"), {}, step=1, rank=0)
    emit("removed", str(tmp_path / "file.pt"), {}, rank=3)
    assert flush(60)
    (event,) = read_events(tmp_path)
    assert (event.step, event.rank, event.root, event.figures) == (1, log.rank, str(tmp_path), {"bytes": 7})


def test_log_that_nobody_keeps_is_forgotten(tmp_path: Path) -> None:
    log_of(str(tmp_path), 0)
    emit("removed", str(tmp_path / "step-00000001"), {}, step=1)
    assert flush(60)
    assert not os.listdir(tmp_path)


def test_log_of_a_link_does_not_go_with_an_earlier_one_of_its_place(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    earlier = log_of(str(tmp_path / "root"), 0)
    log = log_of(str(tmp_path / "link"), 0)
    assert log is not earlier
    del earlier
    gc.collect()
    emit("committed", str(tmp_path / "root" / "step-00000001"), {}, step=1)
    assert flush(60)
    (event,) = read_events(tmp_path / "root")
    assert (event.kind, event.step) == ("committed", 1)
