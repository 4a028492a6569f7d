"""Every error that FastPersist raises on purpose, and nothing else.

An operating error (the disk, the file, the caller's options) is one of these classes; a broken invariant of ours is
`InternalError`. Errors say what failed, where, and what to do next where there is something to do. Families that the
standard library already names are also instances of it, so `except OSError` and `except FileNotFoundError` work.
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
    "SkippedError",
    "StorageError",
    "TornStateError",
    "UnsavableTensorError",
    "UnsupportedError",
]


class FastPersistError(Exception):
    """The base of all errors that FastPersist raises on purpose."""


class ConfigError(FastPersistError, ValueError):
    """Options or arguments make no sense; raised before any I/O."""


class UnsavableTensorError(ConfigError, RuntimeError):
    """A tensor cannot be saved, or not in this format; raised before any I/O, and the message names it.

    A RuntimeError, too: torch.save and safetensors raise that for memory that is shared, or that is not there.
    """


class UnsupportedError(FastPersistError):
    """This engine, object, kernel or file system cannot do what was asked; the message says why not."""


class DeviceError(FastPersistError, RuntimeError):
    """The GPU or its driver refused an operation; the message has the driver's name of the error.

    Where the message says that the process cannot use the device any more, tensors on the CPU can still be saved.
    """


class StorageError(FastPersistError, OSError):
    """The kernel refused an operation on a file: `errno`, `strerror` and `filename` as in OSError.

    Args:
        sys_errno: The errno, or None when no system call failed (a file that ends too early).
        message: Operation, path, offset and reason, in one line.
        path: The file that was asked for.
        offset_bytes: Where in the file, from its start; None when the operation has no place.
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
    """A read reached beyond the end of a file.

    Args:
        sys_errno: None: no system call failed.
        message: What was read, and how much of it.
        path: The file.
        offset_bytes: Where the read began.
        done_bytes: So many bytes were there, and have been read.
        asked_bytes: So many were asked for.
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
        path: The file; put in front of the message when given.
        offset_bytes: Where in the file (or in the record the message names), from its start.
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
    """A file parses, but its bytes do not have the checksum that was recorded for them."""


class TornStateError(FastPersistError):
    """State was changed between save() and its capture, what was written may mix two steps. Nothing was published."""


class SkippedError(FastPersistError):
    """This save was left out because another one was still being written (busy="skip" or "latest")."""


class CoordinationError(FastPersistError):
    """Ranks that save or load together do not agree, or do not hear each other. Nothing was published."""


class PeerError(CoordinationError):
    """Another rank has failed, or is gone, so this rank's part was given up too. Nothing was published.

    If rank 0 is gone, it may have published just before.

    Args:
        message: What was being done, and what is known.
        rank: The rank that failed, in the process group.
        subject: What was being saved or loaded: "step 100", or a path.
    """

    def __init__(self, message: str, *, rank: int = -1, subject: str = "") -> None:  # defaults: for pickle
        super().__init__(message)
        self.rank = rank
        self.subject = subject


class AgreementTimeoutError(PeerError, TimeoutError):
    """A rank was silent until the deadline."""


class InternalError(FastPersistError):
    """An invariant of FastPersist itself broke: a bug, please report it."""
