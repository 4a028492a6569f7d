"""The line of tasks behind background saves: one after the other, on a thread that lives while there is work."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support.forking import run_in_child
from support.training import PATIENCE_S

from fastpersist.saving.pending_save import Lane


def test_tasks_run_one_after_the_other_on_another_thread() -> None:
    lane = Lane("line")
    ran: list[tuple[int, str]] = []
    go, done = threading.Event(), threading.Event()
    lane.submit(lambda: ran.append((-1, str(go.wait(PATIENCE_S)))))
    for number in range(100):
        lane.submit(lambda number=number: ran.append((number, threading.current_thread().name)))  # type: ignore[misc]
    lane.submit(done.set)
    assert not lane.is_idle()
    assert not ran
    go.set()
    assert done.wait(PATIENCE_S)
    assert ran == [(-1, "True"), *((number, "line") for number in range(100))]


def test_a_lane_without_work_has_no_thread() -> None:
    lane = Lane("a lane without work")
    assert lane.is_idle()
    for _ in range(3):
        threads: list[threading.Thread] = []
        lane.submit(lambda threads=threads: threads.append(threading.current_thread()))  # type: ignore[misc]
        deadline = threading.Event()
        while not threads:
            assert not deadline.wait(0.001)
        threads[0].join(PATIENCE_S)
        assert lane.is_idle()
        assert not any(thread.name == "a lane without work" for thread in threading.enumerate())


def test_a_task_that_raises_does_not_hold_up_those_behind(caplog: pytest.LogCaptureFixture) -> None:
    lane = Lane("line")
    done = threading.Event()

    def bad() -> None:
        raise KeyboardInterrupt

    lane.submit(bad)
    lane.submit(done.set)
    assert done.wait(PATIENCE_S)
    assert "did not catch its own error" in caplog.text


def test_a_task_whose_thread_was_not_started_runs_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    lane = Lane("line")
    ran: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lane.submit(lambda: ran.append(1))
    assert not lane.is_idle()
    assert lane.await_idle()
    assert ran == [1]
    lane.submit(lambda: ran.append(2))
    lane.await_idle()
    assert not lane.await_idle()
    assert ran == [1, 2]


def test_a_task_without_a_thread_may_submit_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    lane = Lane("line")
    ran: list[str] = []

    def first() -> None:
        lane.submit(lambda: ran.append("second"))
        ran.append("first")

    lane.submit(first)
    assert ran == ["first", "second"]
    assert lane.is_idle()


def test_every_task_of_many_threads_runs_once_and_alone() -> None:
    lane = Lane("line")
    inside = 0
    most = 0
    count = 0

    def task() -> None:
        nonlocal inside, most, count
        inside += 1
        most = max(most, inside)
        count += 1
        inside -= 1

    threads = [threading.Thread(target=lambda: [lane.submit(task) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    done = threading.Event()
    lane.submit(done.set)
    assert done.wait(PATIENCE_S)
    assert (count, most) == (800, 1)


def test_a_forked_child_begins_a_line_of_its_own() -> None:
    lane = Lane("line")
    go = threading.Event()
    ran = []
    lane.submit(lambda: ran.append(go.wait(PATIENCE_S)))
    lane.submit(lambda: ran.append(True))

    def child(_report: Callable[[int], None]) -> None:
        assert lane.is_idle()
        done = threading.Event()
        lane.submit(done.set)
        assert done.wait(PATIENCE_S)
        assert not ran

    run_in_child(child)
    go.set()
    done = threading.Event()
    lane.submit(done.set)
    assert done.wait(PATIENCE_S)
    assert ran == [True, True]
