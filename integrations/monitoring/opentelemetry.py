"""OpenTelemetry: a span for each save, with spans of its phases below it, and one for each load."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastpersist.events import Event, subscribe

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["attach"]

_PHASES = {"captured": "capture", "written": "write", "committed": "commit"}
_UNFINISHED_COUNT = 1000


def attach(provider: TracerProvider | None = None) -> Callable[[], None]:
    """Make spans: "fastpersist.save" from the call until it is committed, and "fastpersist.load".

    Below a save are "capture" (from the call until its state may change), "write" (until all is written and durable)
    and "commit". Attributes are the figures of the event, as `fastpersist.stall_s`. A save that has failed has the
    status ERROR. The spans belong to no trace of the training thread: a save outlives the code that began it.

    Args:
        provider: The provider of your SDK; None for the global one.

    Returns:
        A function that ends this; saves under way get no span then.

    Thread safety: any thread.
    """
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Status, StatusCode

    tracer = trace.get_tracer("fastpersist", tracer_provider=provider)
    begun: dict[tuple[str, int], list[Event]] = {}

    def add_span(name: str, since_s: float, event: Event, context: Context) -> trace.Span:
        attributes = {f"fastpersist.{key}": value for key, value in event.figures.items()}
        attributes |= {"fastpersist.path": event.path, "fastpersist.rank": event.rank}
        if event.step is not None:
            attributes["fastpersist.step"] = event.step
        return tracer.start_span(name, context, attributes=attributes, start_time=int(since_s * 1e9))

    def tell(event: Event) -> None:
        key = (event.path, event.rank)
        if event.kind == "loaded":
            since_s = event.time_s - float(event.figures.get("total_s", 0.0))
            add_span("fastpersist.load", since_s, event, Context()).end(int(event.time_s * 1e9))
        elif event.kind == "save_begun":
            if len(begun) < _UNFINISHED_COUNT:
                begun[key] = [event]
        elif key in begun and event.kind in ("captured", "written"):
            begun[key].append(event)
        elif key in begun and event.kind in ("committed", "failed", "skipped"):
            known = begun.pop(key)
            save = add_span("fastpersist.save", known[0].time_s, event, Context())
            below = trace.set_span_in_context(save, Context())
            if event.kind == "committed":
                since_s = known[0].time_s
                for phase in [*known[1:], event]:
                    add_span(f"fastpersist.{_PHASES[phase.kind]}", since_s, phase, below).end(int(phase.time_s * 1e9))
                    since_s = phase.time_s
            elif event.kind == "failed":
                save.set_status(Status(StatusCode.ERROR, str(event.figures.get("error", ""))))
            save.end(int(event.time_s * 1e9))

    return subscribe(tell)
