"""What an event is: the fields and kinds that programs rely on."""

from __future__ import annotations

from fastpersist.events import KINDS, Event


def test_fields_keep_their_names_and_places() -> None:
    assert Event._fields == ("kind", "time_s", "root", "path", "step", "rank", "figures")


def test_kinds_keep_their_names() -> None:
    assert KINDS == ("save_begun", "captured", "written", "committed", "failed", "skipped", "removed", "loaded")
