"""Prometheus: counters and gauges of saves and loads, to be scraped, or in a text file for the node exporter."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastpersist.events import Event, subscribe

from .figures import scalars

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["attach", "write_to"]

_GAUGES = {
    "stall_s": ("stall_seconds", "Time that the last save took from training"),
    "write_s": ("write_seconds", "Time in which the last save wrote its bytes"),
    "sync_s": ("sync_seconds", "Time in which the bytes of the last save became durable"),
    "bytes": ("size_bytes", "Length of the files of the last save"),
    "bytes_per_s": ("write_bytes_per_second", "Rate at which the last save wrote"),
    "load_s": ("load_seconds", "Time of the last load"),
}


def attach(registry: CollectorRegistry | None = None, *, root: str = "") -> Callable[[], None]:
    """Keep metrics in a registry: `fastpersist_saves_total{result=…}`, `fastpersist_stall_seconds` and so on.

    Serve them as you serve your other metrics, such as with `prometheus_client.start_http_server(9100)`. Alert when
    `time() - fastpersist_last_commit_timestamp_seconds` is more than some intervals between your saves.

    Args:
        registry: The registry; None for the default one of `prometheus_client`. One process attaches once to each.
        root: The value of the label `root`, to tell programs apart.

    Returns:
        A function that ends this; the metrics stay in the registry.

    Raises:
        ValueError: The registry has these metrics already.

    Thread safety: any thread.
    """
    from prometheus_client import REGISTRY, Counter, Gauge

    into = REGISTRY if registry is None else registry
    saves = Counter("fastpersist_saves", "Saves that are over, by result", ["root", "result"], registry=into)
    written = Counter("fastpersist_written_bytes", "Bytes of all committed saves", ["root"], registry=into)
    last = Gauge("fastpersist_last_commit_timestamp_seconds", "When a save was committed", ["root"], registry=into)
    gauges = {
        name: Gauge(f"fastpersist_{metric}", text, ["root"], registry=into) for name, (metric, text) in _GAUGES.items()
    }

    def count(event: Event) -> None:
        found = scalars(event)
        if event.kind in ("committed", "failed", "skipped"):
            saves.labels(root, event.kind).inc()
        if event.kind == "committed":
            written.labels(root).inc(found.get("bytes", 0.0))
            last.labels(root).set(event.time_s)
        for name in gauges.keys() & found.keys():
            gauges[name].labels(root).set(found[name])

    return subscribe(count)


def write_to(path: str | os.PathLike[str], *, root: str = "") -> Callable[[], None]:
    """Keep a text file with these metrics, for the textfile collector of the node exporter; nothing listens.

    Args:
        path: A `.prom` file in the collector's directory; it is replaced as a whole after each save and load.
        root: The value of the label `root`, as in `attach`.

    Returns:
        A function that ends this; the file stays.

    Thread safety: any thread.
    """
    from prometheus_client import CollectorRegistry, write_to_textfile

    registry = CollectorRegistry()
    name = os.fspath(path)
    stop_counting = attach(registry, root=root)  # runs first at each event, before the callback below
    stop_writing = subscribe(lambda event: write_to_textfile(name, registry) if _counts(event) else None)

    def stop() -> None:
        stop_writing()
        stop_counting()

    return stop


def _counts(event: Event) -> bool:
    return event.kind == "skipped" or bool(scalars(event))
