"""Reads extents on a separate thread, while the caller's thread builds the objects that will hold them.

The reading thread needs the GIL only at its beginning and end: the native side moves the bytes.
"""

from __future__ import annotations

import _thread
import contextvars
import threading
from types import TracebackType

from fastpersist.errors import InternalError
from fastpersist.transfer.reader import Extents, ReadResult, read_extents

__all__ = ["BackgroundRead"]


class _Abandoned(Exception):
    """Ends a read whose result is not needed any more."""


class BackgroundRead:
    """A read of extents under way. A context manager: when the block is left, nothing moves any more.

    Leaving by an exception stops the read, in about 50 ms. One owner thread.

    Args:
        fd: A descriptor of the file, as in `read_extents`; no other code may use it meanwhile.
        path: The path of the file, for messages.
        extents: What to read, and where to: host memory only, as the streams of devices belong to the caller's thread.
        engine: Engine name or "auto".
    """

    def __init__(self, fd: int, path: str, extents: Extents, *, engine: str = "auto") -> None:
        self._fd = fd
        self._path = path
        self._extents = extents
        self._engine = engine
        self._context = contextvars.copy_context()  # what `showing_progress` shows
        self._abandoned = False
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._result: ReadResult | None = None
        self._failure: BaseException | None = None

    def wait(self) -> ReadResult:
        """Wait until everything is read, and return the result. Signals are handled meanwhile.

        Raises:
            What `read_extents` raises.
        """
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
        if self._result is None:
            raise InternalError("a read ended without a result")
        return self._result

    def __enter__(self) -> BackgroundRead:
        # Not threading.Thread: after an interrupt during its start, nothing would tell whether it has started.
        try:
            _thread.start_new_thread(self._context.run, (self._run,))
            self._begun.wait()  # let it get the GIL first: the disk waits for it
        except RuntimeError:  # the system gives no thread
            self._run()
        except BaseException as error:  # an interrupt, behind the start
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abandoned = kind is not None
        interrupt: BaseException | None = None
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except BaseException as raised:  # noqa: BLE001 - the descriptor must not be closed while the thread reads
                self._abandoned, interrupt = True, raised
        self._failure = None  # its traceback would keep this object, and the destinations, alive
        if interrupt is not None:
            raise interrupt

    def _run(self) -> None:
        self._begun.set()
        try:
            self._result = read_extents(
                self._fd, self._path, self._extents, engine=self._engine, poll=self._stop_if_abandoned
            )
        except BaseException as error:  # noqa: BLE001 - it is the owner's
            self._failure = error
        finally:
            self._ended.set()

    def _stop_if_abandoned(self, _done_bytes: int) -> None:
        if self._abandoned:
            raise _Abandoned
