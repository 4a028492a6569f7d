"""Which numbers dashboards show."""

from __future__ import annotations

import pytest

from fastpersist.events import Event
from fastpersist.integrations.monitoring.figures import Steps, scalars


def event_of(kind: str, step: int | None = 1, **figures: float | str) -> Event:
    return Event(kind, 1.0, None, "p", step, 0, figures)


@pytest.mark.parametrize(
    ("event", "wanted"),
    [
        (
            event_of("committed", stall_s=0.5, write_s=2.0, bytes=8.0, plan_s=1.0, engine="uring"),
            {"stall_s": 0.5, "write_s": 2.0, "bytes": 8.0, "bytes_per_s": 4.0, "failed": 0.0},
        ),
        (event_of("committed", write_s=0.0), {"write_s": 0.0, "failed": 0.0}),
        (event_of("failed", error="full", write_s=2.0), {"failed": 1.0}),
        (event_of("loaded", bytes=8.0, total_s=2.0), {"load_s": 2.0, "load_bytes": 8.0}),
        (event_of("save_begun"), {}),
        (event_of("skipped", error="busy"), {}),
    ],
    ids=["committed", "committed-without-bytes", "failed", "loaded", "save_begun", "skipped"],
)
def test_numbers_of_an_event(event: Event, wanted: dict[str, float]) -> None:
    assert scalars(event) == wanted


def test_files_without_a_step_are_counted() -> None:
    steps = Steps()
    events = [event_of("loaded", None), event_of("loaded", 7), event_of("loaded", None)]
    assert [steps.of(event) for event in events] == [0, 7, 1]
