"""Attributes that are computed at their first use, by threads and in forked children."""

from __future__ import annotations

import threading

from support.forking import in_child

from fastpersist.cached import cached_property


class Thing:
    def __init__(self, may_go_on: threading.Event | None = None) -> None:
        self.computed_count = 0
        self.is_computing = threading.Event()
        self.may_go_on = may_go_on

    @cached_property
    def value(self) -> int:
        """Its value."""
        self.computed_count += 1
        self.is_computing.set()
        if self.may_go_on is not None:
            self.may_go_on.wait()
        return 7


def test_value_is_computed_once() -> None:
    thing = Thing()
    assert [thing.value, thing.value, thing.computed_count] == [7, 7, 1]
    thing.value = 8
    assert [thing.value, thing.computed_count] == [8, 1]
    assert Thing.value.__doc__ == "Its value."


def test_other_objects_do_not_wait_nor_do_forked_children() -> None:
    may_go_on = threading.Event()
    slow = Thing(may_go_on)
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    try:
        slow.is_computing.wait()
        in_child({})(lambda: Thing().value)()
        assert Thing().value == 7
    finally:
        may_go_on.set()
        thread.join()
    assert slow.value == 7
