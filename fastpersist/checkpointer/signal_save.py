"""Save a last checkpoint when a signal tells the job to end: the handler notes the signal, the training thread saves.

A signal handler may run between any two instructions, even in the middle of an optimizer's step; so it only notes the
signal. The training thread saves after the optimizer's next step or in poll(), or the loop saves by itself. Then the
signal's earlier handler runs. If the save fails, the log says so first.

With several ranks, a signal reaches the ranks in different steps, or only one rank. They first agree on one occasion
(`distributed.stop_agreement`); from then on, each behaves as if it had got the signals of all.

While the optimizer's step runs, a loop that counts after it still has the number of the previous step, and may have
saved under that number. So a step that is there is never replaced: the save waits for the next occasion.
"""

from __future__ import annotations

import ctypes
import logging
import math
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fastpersist.checkpointer.grace import GracePeriod
from fastpersist.distributed.stop_agreement import StopAgreement
from fastpersist.errors import ConfigError, CoordinationError
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import PendingSave

__all__ = ["MakeState", "SignalSave"]

_log = logging.getLogger("fastpersist")

_NAMES = {number.value: number.name for number in signal.Signals}  # real-time signals have none

MakeState = Callable[[], tuple[int, object] | tuple[int, object, object] | None]


class SignalSave:
    """The installed signal handlers, the signals they have noted, and the earlier handlers.

    Args:
        owners: The optimizers. After a step of the last of them, the state is that of a whole step.
        save: Saves a step with its state and rank_state, and returns when it is committed; raises TimeoutError if that
            takes more than so many seconds.
        is_saved: Tells whether a step is committed, or being saved.

    Thread safety: the training thread calls all methods; only the main thread may call install and uninstall.
    """

    def __init__(
        self,
        owners: Owners,
        save: Callable[[int, object, object, float | None], None],
        is_saved: Callable[[int], bool],
    ) -> None:
        self._owners = owners
        self._save = save
        self._is_saved = is_saved
        self._make_state: MakeState | None = None
        self._previous: dict[int, Any] = {}
        self._passed_on: dict[int, Any] = {}  # handlers for code that has replaced ours, and still calls it
        self._going_on: list[int] = []  # signals whose earlier handler runs
        self._noted: list[int] = []  # each signal once, in the order in which they came
        self._is_told = False
        self._agreement: StopAgreement | None = None
        self._is_agreed = False
        self._grace: GracePeriod | None = None
        self._hook: Any = None
        self._process = os.getpid()
        self.saved_step: int | None = None
        """The step that was saved because of a signal; the loop may save it once more."""

    def install(self, make_state: MakeState, signals: Iterable[int], grace_s: float | None) -> None:
        """Install the handlers; see `Checkpointer.save_on_signal`.

        Raises:
            ConfigError: This is not the main thread, make_state cannot be called, a signal cannot be handled, or
                grace_s is no time.
        """
        if grace_s is not None and not (isinstance(grace_s, int | float) and 0 < grace_s < math.inf):
            raise ConfigError(f"grace_s must be a number of seconds above 0, or None for no limit; not {grace_s!r}")
        if not callable(make_state):
            raise ConfigError(
                "make_state is a function that returns the step and the state when a signal has come; "
                f"{type(make_state).__name__} cannot be called"
            )
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("save_on_signal must be called on the main thread, which alone may set signal handlers")
        numbers = _that_can_be_handled(signals)
        grace = None if grace_s is None else GracePeriod(grace_s, self._end_without)
        self.uninstall()
        self._grace = grace
        self._make_state = make_state  # from here on, our handler notes signals
        for number in numbers:
            previous = signal.getsignal(number)
            caller = getattr(previous, "__self__", None)
            if previous == self._note:
                previous = self._passed_on.pop(number, None)
            elif isinstance(caller, SignalSave) and caller._previous.get(number) == self._note:
                caller._previous[number] = self._passed_on.pop(number, None)
            self._previous[number] = previous
            signal.signal(number, self._note)
        if self._owners.optimizers():
            self._hook = register_optimizer_step_post_hook(self._after_step)

    @property
    def is_installed(self) -> bool:
        """Whether signals are handled."""
        return self._make_state is not None

    def agree_by(self, agreement: StopAgreement | None) -> None:
        """Agree with other ranks before anything is saved for a signal; None if this process is alone."""
        self._agreement, self._is_agreed = agreement, False

    def uninstall(self) -> None:
        """Put the earlier handlers back, except where other code has replaced ours meanwhile.

        Code that has replaced our handler may call ours later, as its predecessor: then ours calls the earlier one.

        For a signal that was noted, and for which nothing is saved yet, the earlier handler runs now.
        """
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._note and threading.current_thread() is threading.main_thread():
                earlier = _in_use(handler, number)
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
            else:
                self._passed_on[number] = handler
        self._make_state = None  # until here, our handler may note another signal
        previous, self._previous = self._previous, {}
        noted, self._noted = self._noted, []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._grace is not None:
            self._grace.close()
            self._grace = None
        if self._agreement is not None:
            self._agreement.end()
            self._agreement = None
        for number in noted:
            self._go_on(number, previous.get(number))

    def is_noted(self) -> bool:
        """Tell whether the next save is for a signal, of which the earlier handler has not run yet."""
        return bool(self._noted) and (self._agreement is None or self._is_agreed)

    def poll(self) -> None:
        """If a signal was noted, save the step unless it is saved already; then run the signal's earlier handler.

        With several ranks, all of them call this equally often. In a forked child nothing happens.
        """
        if self._make_state is None or self._process != os.getpid():
            return
        if self._agreement is not None and not self._is_agreed and not self._agree():
            return
        if not self._noted or self._is_too_late():
            return
        with self._going_on_after_errors():
            found = self._make_state()
            if found is None:
                self._tell_that_it_waits("make_state() returned None")
                return
            if not isinstance(found, tuple) or len(found) not in (2, 3):
                raise ConfigError(
                    "make_state() returns (step, state) or (step, state, rank_state), or None to wait, not "
                    f"{type(found).__name__}"
                )
            step, state, rank_state = found if len(found) == 3 else (*found, None)
            if self._is_saved(step):
                self._tell_that_it_waits(f"step {step} is saved already")
                return
            try:
                self._save(step, state, rank_state, self._left_s())
            except TimeoutError:
                if self._is_too_late():
                    return
                raise
            self.saved_step = step
        _log.warning("step %d was saved because of %s", step, self._names())
        self._go_on_with_all()

    def after_save(self, pending: PendingSave) -> None:
        """Called when the loop saves a step: if a signal was noted, finish the save and run the earlier handler."""
        if not self.is_noted() or pending.skipped():
            return
        with self._going_on_after_errors():
            is_over = pending.join(self._left_s())
        stats = pending.stats
        if not is_over:
            self._is_too_late()
            return
        if stats.error is None:
            _log.warning("step %s is saved, and %s goes to its earlier handler", stats.step, self._names())
        else:
            _log.error(
                "step %s was not saved, and %s goes to its earlier handler: %s", stats.step, self._names(), stats.error
            )
        self._go_on_with_all()

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_going_on = number in self._going_on
        is_passed_back = is_going_on and frame is None and number in self._passed_on  # a second signal has a frame
        if self._make_state is None or is_passed_back:
            self._go_on(number, self._passed_on.get(number))
        elif self._process != os.getpid():  # a forked child inherits the handler, and saves nothing
            self._go_on(number, self._previous.get(number))
        elif not is_going_on and number not in self._noted:
            self._noted.append(number)
            self._is_told = False
            if self._grace is not None:
                self._grace.begin()

    def _after_step(self, optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
        if (self._noted or self._agreement is not None) and optimizer is self._owners.optimizers()[-1]:
            self.poll()

    def _agree(self) -> bool:
        """Find out whether all ranks stop at this occasion."""
        if self._agreement is None:
            return True
        try:
            signals = self._agreement.occasion(self._noted, self._left_s)
        except CoordinationError as error:
            if self._noted:
                _log.error("%s: nothing is saved, as the ranks cannot agree on a step: %s", self._names(), error)
                self._go_on_with_all()
            return False
        self._is_agreed = bool(signals)
        for number in signals:
            if number not in self._noted:
                self._noted.append(number)
        if not self._is_agreed and self._noted:
            self._is_too_late()
        return self._is_agreed

    def _left_s(self) -> float | None:
        return None if self._grace is None else self._grace.left_s()

    def _is_too_late(self) -> bool:
        """If the grace period is over, say so and run the earlier handlers; return whether it is."""
        if self._grace is None or self._grace.left_s() > 0:
            return False
        _log.error("%s: the grace period is over, and the step was not saved in time", self._names())
        self._go_on_with_all()
        return True

    def _end_without(self) -> None:
        """Called on the watching thread: the grace period is over, and the training thread has not noticed."""
        noted = list(self._noted)
        if not noted:
            return
        _log.error(
            "%s: the grace period is over, and the step was not saved in time: the training thread still computes, "
            "or waits for a rank that is gone",
            self._names(),
        )
        for number in noted:
            previous = self._previous.get(number)
            if not callable(previous) and previous != signal.SIG_IGN:
                _do_by_default(number)

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
        self._is_agreed = False
        if self._grace is not None:
            self._grace.end()
        while self._noted:
            number = self._noted.pop(0)
            self._go_on(number, self._previous.get(number))

    def _go_on(self, number: int, previous: Any) -> None:
        """Do what the signal did before our handler was installed."""
        if callable(previous):
            self._going_on.append(number)
            try:
                previous(number, None)
            finally:
                self._going_on.remove(number)
        elif previous != signal.SIG_IGN:
            _do_by_default(number)


def _that_can_be_handled(signals: Iterable[int]) -> list[int]:
    """Return the numbers of the signals, each once; raise ConfigError unless all can be handled, and there is one."""
    can = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    try:
        numbers = list(dict.fromkeys(map(operator.index, signals)))
        if not numbers:
            raise ValueError("it names none")
        if wrong := [number for number in numbers if number not in can]:
            raise ValueError(f"not {', '.join(_NAMES.get(number, str(number)) for number in wrong)}")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"signals are those that can be handled, such as (signal.SIGTERM,): {error}") from error
    return numbers


def _do_by_default(number: int) -> None:
    """Do what the signal does where no handler is set; on any thread, unlike signal.signal."""
    ctypes.CDLL(None).signal(number, 0)  # 0 is SIG_DFL
    os.kill(os.getpid(), number)


def _in_use(handler: Any, number: int) -> Any:
    """Return a handler; for one of a SignalSave that was uninstalled, the one before it."""
    while isinstance(owner := getattr(handler, "__self__", None), SignalSave) and not owner.is_installed:
        handler = owner._passed_on.get(number)
    return handler
