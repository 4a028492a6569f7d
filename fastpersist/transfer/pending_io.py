"""Reads and writes of a `TensorFile` under way: what callers wait for.

A tensor belongs to its request until that is done. The native side keeps it as long, whoever waits or does not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from fastpersist import _native
from fastpersist.errors import ConfigError, EndOfFileError, FastPersistError

__all__ = ["PendingIO"]


class PendingIO:
    """Reads or writes under way. Made by `TensorFile.read_async` and its like.

    Until it is done, the tensors of a read hold anything, and those of a write must not be changed. They are kept
    alive as long, also when this object is not. A read into a tensor of a device that is neither the CPU nor CUDA is
    done when one of the methods here has said so: its last step, the copy to the device, is theirs.

    Thread safety: any thread; but not in a forked child.
    """

    def __init__(self, request: _native.FileRequest, path: str, then: Callable[[], None] | None) -> None:
        self._request = request
        self._path = path
        self._then = then
        self._process_id = os.getpid()
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Tell whether it is done, well or not."""
        self._refuse_child()
        if not self._request.done():
            return False
        self._settle()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is done.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: It is still under way; nothing is lost.
            EndOfFileError: A read reached beyond the end of the file; what is there was read.
            StorageError: What the kernel said. Of several failures in one request the first that was met.
            DeviceError: What the driver of a CUDA device said.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def result(self, timeout: float | None = None) -> int:
        """Wait as `wait` does, and return how many bytes were moved."""
        self.wait(timeout)
        return self._request.done_bytes

    def exception(self, timeout: float | None = None) -> FastPersistError | None:
        """Wait until it is done, and return its error, or None. Counts as delivery.

        Raises:
            TimeoutError: It is still under way.
        """
        self._refuse_child()
        if not self._request.wait(timeout):
            raise TimeoutError(f"a request of {self._path} is still under way after {timeout} s")
        self._settle()
        return failure_of(self._request, self._path)

    def _settle(self) -> None:
        """Do what is left to do when the bytes have come, once, and let the tensors go."""
        with self._lock:
            # Of a read that failed nothing is copied: the host's copy holds anything. What fails here is done again by
            # whoever asks next.
            if self._then is not None and self._request.failed_count == 0:
                self._then()
            self._then = None
            self._request.let_go()

    def _refuse_child(self) -> None:
        if os.getpid() != self._process_id:
            raise ConfigError(f"this request of {self._path} belongs to the process that forked this one; wait there")


def failure_of(request: _native.FileRequest, path: str) -> FastPersistError | None:
    """Return the error of a request that is done, or None. Counts as delivery."""
    try:
        request.raise_failure()
    except FastPersistError as error:
        ended = request.ended_early
        if ended is None:
            return error
        offset_bytes, done_bytes, asked_bytes = ended
        message = f"read {done_bytes} of {asked_bytes} bytes at offset {offset_bytes} of {path}: the file ends there"
        return EndOfFileError(None, message, path, offset_bytes, done_bytes, asked_bytes)
    return None
