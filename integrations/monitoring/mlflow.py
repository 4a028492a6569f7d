"""MLflow: the costs of saves and loads, as metrics of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastpersist.events import Event, subscribe

from .figures import Steps, scalars

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["attach"]


def attach(run_id: str, *, client: MlflowClient | None = None, prefix: str = "checkpoint/") -> Callable[[], None]:
    """Log checkpoint/stall_s, checkpoint/write_s, checkpoint/bytes_per_s … under the steps that were saved.

    Args:
        run_id: The id of the run: `mlflow.active_run().info.run_id`.
        client: A client for the server or the directory; None for the tracking URI that is set.
        prefix: The prefix of the metrics' names.

    Returns:
        A function that ends this.

    Thread safety: any thread; the client is called on another thread, which MLflow allows.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    own = MlflowClient() if client is None else client
    steps = Steps()

    def log(event: Event) -> None:
        if found := scalars(event):
            at_ms, step = int(event.time_s * 1000), steps.of(event)
            metrics = [Metric(prefix + name, value, at_ms, step) for name, value in found.items()]
            own.log_batch(run_id, metrics)

    return subscribe(log)
