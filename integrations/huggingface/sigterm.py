"""Makes all ranks of a Trainer with enable_jit_checkpoint save the same step, and end after it.

A signal reaches the ranks at different moments, or only one of them. The Trainer would save and stop each rank where
that rank happens to be, but our save needs all ranks together. So at the end of each step, a rank that should save
notifies the others, and the Trainer's own callback then acts on all ranks. This takes one small collective a step, on
the host if the process group has a backend for it; otherwise each step waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._shared.agreement import are_several

__all__ = ["AgreedSigterm"]


class AgreedSigterm:
    """The request of a rank to save and to end. The Trainer's timer makes it, on a thread of its own.

    Args:
        trainer: The Trainer, with its callbacks.
    """

    def __init__(self, trainer: Any) -> None:
        self._device: torch.device = trainer.args.device
        self._is_asked = False
        managers = [getattr(one, "jit_manager", None) for one in trainer.callback_handler.callbacks]
        self.manager: Any = next((one for one in managers if hasattr(one, "_enable_checkpoint")), None)

    def begin(self) -> None:
        """Forget the request of a training that has ended."""
        self._is_asked = False

    def ask(self) -> None:
        """Replace the function of the Trainer's timer, which lets the next callback save on this rank alone."""
        if are_several():
            self._is_asked = True
        else:
            self.manager.is_checkpoint_requested = True

    def agree(self) -> None:
        """At the end of a step, let the Trainer save on all ranks if one has asked. Collective."""
        if self.manager is None or not are_several():
            return
        device = "cpu" if "cpu:" in dist.get_backend_config() else self._device
        asked = torch.tensor([int(self._is_asked)], device=device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        if asked.item():
            self.manager.is_checkpoint_requested = True
