"""Every error that FastPersist raises on purpose, and nothing else.

The disk, a file or the caller's options cause all of them but `InternalError`, which is a bug of ours. The message
tells what failed, where, and what to do about it. Most are also subclasses of the standard library's class for the
same failure, so `except OSError` and `except FileNotFoundError` work.
"""

from __future__ import annotations

__all__ = [
    "AgreementTimeoutError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "ConfigError",
    "CoordinationError",
    "CorruptionError",
    "DeviceError",
    "EndOfFileError",
    "FastPersistError",
    "FormatError",
    "InternalError",
    "NoSpaceError",
    "PeerError",
    "RowIndexError",
    "SkippedError",
    "StorageError",
    "TornStateError",
    "UnsavableTensorError",
    "UnsupportedError",
]


class FastPersistError(Exception):
    """The base of all errors that FastPersist raises on purpose."""


class ConfigError(FastPersistError, ValueError):
    """An option or argument makes no sense, or does not fit what is there. Nothing was published."""


class RowIndexError(ConfigError, IndexError):
    """An id is no row of the table. Raised before any I/O; the message names the id and its place."""


class UnsavableTensorError(ConfigError, RuntimeError):
    """A tensor cannot be saved, or not in this format. Raised before any I/O; the message names the tensor.

    It is also a RuntimeError, which torch.save and safetensors raise for shared or missing memory.
    """


class UnsupportedError(FastPersistError):
    """The engine, object, kernel or file system cannot do what you asked; the message says why not."""


class DeviceError(FastPersistError, RuntimeError):
    """The GPU or its driver refused an operation; the message has the driver's name for the error.

    If the message says that the process cannot use the device any more, you can still save tensors on the CPU.
    """


class StorageError(FastPersistError, OSError):
    """The kernel refused an operation on a file. It has `errno`, `strerror` and `filename`, as an OSError has.

    Args:
        sys_errno: The errno; None if no system call failed (a file that ends too early).
        message: Operation, path, offset and reason, in one line.
        path: The file, as the caller named it.
        offset_bytes: Where in the file the operation was, from its start; None if it has no place.
    """

    def __init__(
        self, sys_errno: int | None, message: str, path: str | None = None, offset_bytes: int | None = None
    ) -> None:
        super().__init__(sys_errno, message)
        self.filename = path
        self.offset_bytes = offset_bytes

    def __str__(self) -> str:
        return str(self.args[1])


class NoSpaceError(StorageError):
    """The file system has no room for the file (ENOSPC, EDQUOT)."""


class EndOfFileError(StorageError, EOFError):
    """A file ended before all bytes of a read were there.

    Args:
        sys_errno: None, because no system call failed.
        message: What was read, and how much of it.
        path: The file.
        offset_bytes: Where the read began.
        done_bytes: How many bytes were read.
        asked_bytes: How many bytes were asked for.
    """

    def __init__(
        self,
        sys_errno: int | None,
        message: str,
        path: str | None = None,
        offset_bytes: int | None = None,
        done_bytes: int = 0,
        asked_bytes: int = 0,
    ) -> None:
        super().__init__(sys_errno, message, path, offset_bytes)
        self.done_bytes = done_bytes
        self.asked_bytes = asked_bytes


class CheckpointNotFoundError(FastPersistError, FileNotFoundError):
    """There is no checkpoint at this path."""

    def __str__(self) -> str:
        return str(self.args[-1]) if self.args else ""


class CorruptionError(FastPersistError):
    """The bytes of a file are not what its writer wrote.

    Args:
        message: What is wrong, in one line, without the path.
        path: The file; str() puts it in front of the message.
        offset_bytes: Where in the file, or in the record that the message names, from its start; None if unknown.
    """

    def __init__(self, message: str, *, path: str | None = None, offset_bytes: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.offset_bytes = offset_bytes

    def __str__(self) -> str:
        place = "" if self.offset_bytes is None else f" (at offset {self.offset_bytes})"
        return (f"{self.path}: " if self.path else "") + self.message + place


class FormatError(CorruptionError):
    """A file cannot be parsed as what it claims to be."""


class ChecksumError(CorruptionError):
    """A file can be parsed, but its bytes do not have their recorded checksum."""


class TornStateError(FastPersistError):
    """A tensor changed after save() and before it was captured: the bytes may mix two steps. Nothing was published."""


class SkippedError(FastPersistError):
    """This save was left out, as another one was still being written (busy="skip" or "latest"), or was given up."""


class CoordinationError(FastPersistError):
    """Ranks that save or load together disagree, or do not hear each other. Nothing was published."""


class PeerError(CoordinationError):
    """Another rank has failed or is gone, so this rank has given up its part. Nothing was published.

    One exception: if the coordinator (rank 0) is gone, it may have published just before.

    Args:
        message: What was being done, and what is known.
        rank: The rank that failed, counted in the process group; -1 if unknown.
        subject: What was being saved or loaded: "step 100", or a path.
    """

    def __init__(self, message: str, *, rank: int = -1, subject: str = "") -> None:  # defaults: for pickle
        super().__init__(message)
        self.rank = rank
        self.subject = subject


class AgreementTimeoutError(PeerError, TimeoutError):
    """A rank was silent until the deadline, so it counts as failed."""


class InternalError(FastPersistError):
    """An invariant of FastPersist is broken: this is a bug, please report it."""
