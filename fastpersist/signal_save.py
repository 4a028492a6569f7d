"""A last checkpoint when the job is told to end: the signal is noted, and heeded where the state is whole.

A signal handler runs between any two instructions, in the middle of an optimizer's step as well; so it only takes
note. The state is saved after the next step, on the thread that trains, or when poll() is called.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fastpersist.errors import ConfigError
from fastpersist.owners import Owners

__all__ = ["SignalSave"]

_log = logging.getLogger("fastpersist")


class SignalSave:
    """Installed handlers, what they noted, and what handled the signals before.

    Args:
        owners: After a step of the last of its optimizers the state is whole.
        save: Saves a step and its state, and returns when it is committed.
    """

    def __init__(self, owners: Owners, save: Callable[[int, object], None]) -> None:
        self._owners = owners
        self._save = save
        self._make_state: Callable[[], tuple[int, object]] | None = None
        self._previous: dict[int, Any] = {}
        self._noted: int | None = None
        self._hook: Any = None
        self._process = os.getpid()
        self.saved_step: int | None = None
        """The step that was saved because of a signal: the loop may come to save it again."""

    def install(self, make_state: Callable[[], tuple[int, object]], signals: Iterable[int]) -> None:
        """See `Checkpointer.save_on_signal`."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("save_on_signal is called on the main thread, which alone may set signal handlers")
        self.uninstall()
        self._make_state = make_state
        for number in signals:
            self._previous[number] = signal.signal(number, self._note)
        if self._owners.optimizers():
            self._hook = register_optimizer_step_post_hook(self._after_step)

    def uninstall(self) -> None:
        """Put the handlers back that were there before; those that somebody else replaced meanwhile stay.

        A signal that was noted and not heeded goes on to the handler that was there before.
        """
        noted, self._noted = self._noted, None
        previous_of_noted = None if noted is None else self._previous.get(noted)
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note and threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if noted is not None:
            self._go_on(noted, previous_of_noted)

    def poll(self) -> None:
        """Save if a signal was noted, then let it do what it did before."""
        number = self._noted
        if number is None or self._make_state is None:
            return
        self._noted = None
        previous = self._previous.get(number)
        try:
            step, state = self._make_state()
            self.saved_step = step
            self._save(step, state)
            _log.warning("step %d was saved because of %s", step, signal.Signals(number).name)
        finally:
            self._go_on(number, previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():  # a forked child has our handler, but not our checkpoints
            self._go_on(number, self._previous.get(number))
            return
        self._noted = number

    def _after_step(self, optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
        if self._noted is not None and optimizer is self._owners.optimizers()[-1]:
            self.poll()

    def _go_on(self, number: int, previous: Any) -> None:
        """Do what the signal did before there was a handler of ours."""
        if callable(previous):
            previous(number, None)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
