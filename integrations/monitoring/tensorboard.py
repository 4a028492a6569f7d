"""TensorBoard: the costs of saves and loads, as scalars of a SummaryWriter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastpersist.events import Event, subscribe

from .figures import Steps, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["attach"]


def attach(writer: SummaryWriter, *, prefix: str = "checkpoint/") -> Callable[[], None]:
    """Write checkpoint/stall_s, checkpoint/write_s, checkpoint/bytes_per_s … under the steps that were saved.

    Args:
        writer: Your writer; it is neither flushed nor closed. Or any object with its add_scalar.
        prefix: The prefix of the tags.

    Returns:
        A function that ends this; call it before you close the writer.

    Thread safety: any thread; add_scalar is called on another thread, which TensorBoard allows.
    """
    steps = Steps()

    def write(event: Event) -> None:
        if found := scalars(event):
            step = steps.of(event)
            for name, value in found.items():
                writer.add_scalar(prefix + name, value, step, walltime=event.time_s)

    return subscribe(write)
