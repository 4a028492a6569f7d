"""Weights & Biases: the costs of saves and loads, as metrics of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastpersist.events import Event, subscribe

from .figures import Steps, scalars

if TYPE_CHECKING:
    from wandb import Run

__all__ = ["attach"]


def attach(run: Run, *, prefix: str = "checkpoint/") -> Callable[[], None]:
    """Log checkpoint/stall_s, checkpoint/write_s, checkpoint/bytes_per_s … with checkpoint/step as their x-axis.

    The numbers join the row that your next `run.log` completes, so the run's own step stays yours. If two saves fall
    between two of your rows, the row has the later one.

    Args:
        run: The run that `wandb.init` returned, online or offline; it is not finished here.
        prefix: The prefix of the metrics' names.

    Returns:
        A function that ends this; call it before you finish the run.

    Thread safety: any thread; `run.log` is called on another thread, which wandb allows.
    """
    steps = Steps()
    run.define_metric(f"{prefix}step", hidden=True)
    run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")

    def log(event: Event) -> None:
        if found := scalars(event):
            row = {prefix + name: value for name, value in found.items()}
            run.log({**row, f"{prefix}step": steps.of(event)}, commit=False)

    return subscribe(log)
