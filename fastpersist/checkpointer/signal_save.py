"""Save a last checkpoint when a signal tells the job to end: the handler notes the signal, the training thread saves.

A signal handler may run between any two instructions, even in the middle of an optimizer's step; so it only notes the
signal. The training thread saves after the optimizer's next step or in poll(), or the loop saves by itself. Then the
signal's earlier handler runs. If the save fails, the log says so first.

While the optimizer's step runs, a loop that counts after it still has the number of the previous step, and may have
saved under that number. So a step that is there is never replaced: the save waits for the next occasion.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fastpersist.errors import ConfigError
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import PendingSave

__all__ = ["SignalSave"]

_log = logging.getLogger("fastpersist")

_NAMES = {number.value: number.name for number in signal.Signals}  # real-time signals have none

MakeState = Callable[[], tuple[int, object] | None]


class SignalSave:
    """The installed signal handlers, the signals they have noted, and the earlier handlers.

    Args:
        owners: The optimizers. After a step of the last of them the state is that of a whole step.
        save: Saves a step with its state, and returns when it is committed.
        is_saved: Tells whether a step is committed, or being saved.

    Thread safety: the training thread calls all methods; only the main thread may call install and uninstall.
    """

    def __init__(self, owners: Owners, save: Callable[[int, object], None], is_saved: Callable[[int], bool]) -> None:
        self._owners = owners
        self._save = save
        self._is_saved = is_saved
        self._make_state: MakeState | None = None
        self._previous: dict[int, Any] = {}
        self._noted: list[int] = []  # each signal once, in the order in which they came
        self._is_told = False
        self._hook: Any = None
        self._process = os.getpid()
        self.saved_step: int | None = None
        """The step that was saved because of a signal; the loop may save it once more."""

    def install(self, make_state: MakeState, signals: Iterable[int]) -> None:
        """Install the handlers; see `Checkpointer.save_on_signal`.

        Raises:
            ConfigError: This is not the main thread, make_state cannot be called, or a signal cannot be handled.
        """
        if not callable(make_state):
            raise ConfigError(
                "make_state is a function that returns the step and the state when a signal has come; "
                f"{type(make_state).__name__} cannot be called"
            )
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("save_on_signal is called on the main thread, which alone may set signal handlers")
        self.uninstall()
        try:
            for number in signals:
                self._previous[number] = signal.signal(number, self._note)
        except (OSError, TypeError, ValueError) as error:
            self.uninstall()
            raise ConfigError(f"signals are those that can be handled, such as (signal.SIGTERM,): {error}") from error
        self._make_state = make_state
        if self._owners.optimizers():
            self._hook = register_optimizer_step_post_hook(self._after_step)

    def uninstall(self) -> None:
        """Put the earlier handlers back, except where somebody else has replaced ours meanwhile.

        For a signal that was noted, and for which nothing is saved yet, the earlier handler runs now.
        """
        previous, self._previous = self._previous, {}
        noted, self._noted = self._noted, []
        for number, handler in previous.items():
            if signal.getsignal(number) == self._note and threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for number in noted:
            self._go_on(number, previous.get(number))

    def is_noted(self) -> bool:
        """Tell whether a signal has come, and its earlier handler has not run yet."""
        return bool(self._noted)

    def poll(self) -> None:
        """If a signal was noted, save the step unless it is saved already; then run the signal's earlier handler."""
        if not self._noted or self._make_state is None:
            return
        with self._going_on_after_errors():
            found = self._make_state()
            if found is None:
                self._tell_that_it_waits("make_state() returned None")
                return
            if not isinstance(found, tuple) or len(found) != 2:
                raise ConfigError(f"make_state() returns (step, state), or None to wait, not {type(found).__name__}")
            step, state = found
            if self._is_saved(step):
                self._tell_that_it_waits(f"step {step} is saved already")
                return
            self._save(step, state)
            self.saved_step = step
        _log.warning("step %d was saved because of %s", step, self._names())
        self._go_on_with_all()

    def after_save(self, pending: PendingSave) -> None:
        """Called when the loop saves a step: if a signal was noted, finish the save and run the earlier handler."""
        if not self._noted or pending.skipped():
            return
        with self._going_on_after_errors():
            pending.join()
        stats = pending.stats
        if stats.error is None:
            _log.warning("step %s is saved, and %s goes to its earlier handler", stats.step, self._names())
        else:
            _log.error(
                "step %s was not saved, and %s goes to its earlier handler: %s", stats.step, self._names(), stats.error
            )
        self._go_on_with_all()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():  # a forked child inherits the handler, and saves nothing
            self._go_on(number, self._previous.get(number))
        elif number not in self._noted:
            self._noted.append(number)
            self._is_told = False

    def _after_step(self, optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
        if self._noted and optimizer is self._owners.optimizers()[-1]:
            self.poll()

    def _names(self) -> str:
        return ", ".join(_NAMES.get(number, f"signal {number}") for number in self._noted)

    def _tell_that_it_waits(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            _log.warning("%s waits for the next step, or for the loop's own save(): %s", self._names(), why)

    @contextmanager
    def _going_on_after_errors(self) -> Iterator[None]:
        """Log an error of the block before the earlier handlers run: they may end the process."""
        try:
            yield
        except BaseException as error:
            _log.error(
                "%s asked for a save, which failed: %s: %s", self._names(), type(error).__name__, error, exc_info=True
            )
            self._go_on_with_all()
            raise

    def _go_on_with_all(self) -> None:
        while self._noted:
            number = self._noted.pop(0)
            self._go_on(number, self._previous.get(number))

    def _go_on(self, number: int, previous: Any) -> None:
        """Do what the signal did before our handler was installed."""
        if callable(previous):
            previous(number, None)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
