"""A thread sees that the time after a signal is over, unless somebody ends it before."""

from __future__ import annotations

import threading
import time

import pytest

from fastpersist.checkpointer import grace
from fastpersist.checkpointer.grace import GracePeriod

LONG_S = 1000.0


def test_it_is_over_once_after_it_has_begun(monkeypatch: pytest.MonkeyPatch, leak_check: None) -> None:
    monkeypatch.setattr(grace, "_MORE_S", 0.0)
    over = threading.Semaphore(0)
    period = GracePeriod(0.05, over.release)
    assert period.left_s() == 0.05
    assert not over.acquire(timeout=0.2), "it has not begun"
    period.begin()
    assert over.acquire(timeout=30)
    period.begin()
    assert not over.acquire(timeout=0.2), "it has begun once"
    assert period.left_s() == 0
    period.end()
    period.begin()
    assert over.acquire(timeout=30)
    period.close()


def test_what_is_ended_in_time_is_not_over(monkeypatch: pytest.MonkeyPatch, leak_check: None) -> None:
    monkeypatch.setattr(grace, "_MORE_S", 0.0)
    over = threading.Event()
    period = GracePeriod(0.2, over.set)
    period.begin()
    period.end()
    period.end()
    assert not over.wait(0.5)
    assert period.left_s() == 0.2
    period.close()


def test_closing_ends_the_thread_however_much_time_is_left(leak_check: None) -> None:
    period = GracePeriod(LONG_S, lambda: None)
    period.begin()
    time.sleep(0.01)
    assert 0 < period.left_s() < LONG_S
    period.close()
