"""Change targets: take the steps that follow the filling of tensors, and name the changed targets in errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from fastpersist.errors import ConfigError, CorruptionError, FastPersistError, PeerError, StorageError
from fastpersist.loading.targets import Step

__all__ = ["TargetChange"]


class TargetChange(AbstractContextManager["TargetChange"]):
    """Surrounds everything that changes targets: its errors name those that are partly overwritten.

    Args:
        path: Of the file or the directory that is loaded, for messages.
        on_touched: Called with the key of a target directly before its first change.

    Raises:
        StorageError, CorruptionError, PeerError: As they came, with the touched targets in the message; or what else
            went wrong while tensors were filled.
        ConfigError: A target refused its part in a step.
    """

    def __init__(self, path: str, on_touched: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._on_touched = on_touched
        self._touched: list[str] = []
        self._step_name: str | None = None

    def touch(self, key: str) -> None:
        """Note that the target with this key changes now."""
        if key not in self._touched:
            self._touched.append(key)
            if self._on_touched is not None:
                self._on_touched(key)

    def take(self, steps: Iterable[Step], part_of: Callable[[Step], Any]) -> None:
        """Take the steps of a plan, each with its part of what was saved."""
        for step in sorted(steps, key=lambda step: step.rank):
            self._step_name = step.name
            self.touch(step.path[0] if step.path else step.name)
            step.apply(part_of(step))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        left = f"partly overwritten, and not usable until they are restored again: {', '.join(map(str, self._touched))}"
        if isinstance(error, StorageError | CorruptionError | PeerError):
            if self._touched:
                raise _with_message(error, left) from error
            return
        if self._step_name is None and (isinstance(error, FastPersistError) or not self._touched):
            return  # the named engine cannot be used here, for one: nothing was read
        reason = f"{type(error).__name__}: {error}; {left}"
        if self._step_name is None:
            message = f"filling the targets from {self._path} failed: {reason}"
            raise StorageError(None, message, self._path) from error
        raise ConfigError(f"{self._step_name} refused what {self._path} holds for it: {reason}") from error


def _with_message(error: StorageError | CorruptionError | PeerError, left: str) -> FastPersistError:
    if isinstance(error, PeerError):
        return type(error)(f"{error}; {left}", rank=error.rank, subject=error.subject)
    if isinstance(error, StorageError):
        return type(error)(error.errno, f"{error}; {left}", error.filename, error.offset_bytes)
    return type(error)(f"{error.message}; {left}", path=error.path, offset_bytes=error.offset_bytes)
