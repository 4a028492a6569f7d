"""Errors are what their names say: of the right families, with errno, path and place, in one readable line."""

from __future__ import annotations

import errno
import pickle
import re
from pathlib import Path

import pytest

from fastpersist import errors
from fastpersist.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    ConfigError,
    CorruptionError,
    DeviceError,
    FastPersistError,
    FormatError,
    InternalError,
    NoSpaceError,
    StorageError,
    UnsavableTensorError,
    UnsupportedError,
)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_ours(name: str) -> None:
    assert issubclass(getattr(errors, name), FastPersistError)


def test_troubleshooting_has_an_entry_for_each_error_and_for_no_other() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "troubleshooting.md"
    entries = re.findall(r"^## (\w+Error)$", page.read_text(), re.MULTILINE)
    assert sorted(entries) == sorted(errors.__all__)


@pytest.mark.parametrize(
    ("ours", "family"),
    [
        (ConfigError, ValueError),
        (UnsavableTensorError, ValueError),
        (UnsavableTensorError, RuntimeError),
        (StorageError, OSError),
        (NoSpaceError, StorageError),
        (DeviceError, RuntimeError),
        (CheckpointNotFoundError, FileNotFoundError),
        (FormatError, CorruptionError),
        (ChecksumError, CorruptionError),
    ],
)
def test_error_is_caught_as_what_the_standard_library_calls_it(ours: type[Exception], family: type[Exception]) -> None:
    assert issubclass(ours, family)


@pytest.mark.parametrize("kind", [StorageError, NoSpaceError])
def test_storage_error_holds_what_an_oserror_holds(kind: type[StorageError]) -> None:
    error = kind(errno.EIO, "write to model.pt at offset 4096: I/O error", "model.pt", 4096)
    assert error.errno == errno.EIO
    assert error.strerror == "write to model.pt at offset 4096: I/O error"
    assert error.filename == "model.pt"
    assert error.offset_bytes == 4096
    assert str(error) == "write to model.pt at offset 4096: I/O error"


def test_storage_error_without_a_system_call_has_no_errno() -> None:
    error = StorageError(None, "model.pt ends at 17", "model.pt")
    assert error.errno is None
    assert error.offset_bytes is None
    assert str(error) == "model.pt ends at 17"


def test_not_found_error_reads_as_a_sentence() -> None:
    error = CheckpointNotFoundError(errno.ENOENT, "there is no checkpoint at model.pt", "model.pt")
    assert str(error) == "there is no checkpoint at model.pt"
    assert (error.errno, error.filename) == (errno.ENOENT, "model.pt")
    assert str(CheckpointNotFoundError()) == ""


@pytest.mark.parametrize("kind", [CorruptionError, FormatError, ChecksumError])
def test_corruption_error_says_file_and_place(kind: type[CorruptionError]) -> None:
    assert str(kind("the directory is damaged")) == "the directory is damaged"
    error = kind("the directory is damaged", path="model.pt", offset_bytes=0)
    assert str(error) == "model.pt: the directory is damaged (at offset 0)"
    assert (error.message, error.path, error.offset_bytes) == ("the directory is damaged", "model.pt", 0)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no such engine"),
        UnsupportedError("not here"),
        DeviceError("copying: CUDA_ERROR_UNKNOWN"),
        InternalError("a bug"),
        StorageError(errno.EIO, "reading", "model.pt", 5),
        NoSpaceError(errno.ENOSPC, "full", "model.pt"),
        CheckpointNotFoundError(errno.ENOENT, "nothing there", "model.pt"),
        FormatError("torn", path="model.pt", offset_bytes=3),
        ChecksumError("changed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_crosses_between_processes_whole(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    if isinstance(error, OSError):
        assert isinstance(copy, OSError)
        assert (copy.errno, copy.filename) == (error.errno, error.filename)
