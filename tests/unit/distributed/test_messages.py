"""Errors of ours cross from rank to rank as plain text, and nothing else comes out of that text."""

from __future__ import annotations

import errno
import json
import pickle

import pytest

from fastpersist import errors
from fastpersist.distributed.messages import error_as_json, error_from_json
from fastpersist.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    ConfigError,
    EndOfFileError,
    FastPersistError,
    NoSpaceError,
    PeerError,
    StorageError,
)


@pytest.mark.parametrize(
    "error",
    [
        NoSpaceError(errno.ENOSPC, "no room on /data", "/data/model.pt", 4096),
        EndOfFileError(None, "model.pt ends at 17", "model.pt", 16, 1, 8),
        StorageError(None, "model.pt is gone"),
        CheckpointNotFoundError(errno.ENOENT, "there is no checkpoint", "run"),
        CheckpointNotFoundError("there is no checkpoint"),
        ChecksumError("wrong CRC", path="model.pt", offset_bytes=7),
        PeerError("rank 3 is gone", rank=3, subject="step 100"),
        *(getattr(errors, name)("said", "more") for name in ("ConfigError", "TornStateError", "InternalError")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_it_was(error: FastPersistError) -> None:
    copy = error_from_json(error_as_json(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
    for name in ("errno", "filename"):
        assert getattr(copy, name, "none") == getattr(error, name, "none")


def test_what_is_a_special_case_of_an_error_of_ours_arrives_as_that() -> None:
    class Special(ConfigError):
        pass

    assert type(error_from_json(error_as_json(Special("no")))) is ConfigError


def test_other_errors_do_not_cross() -> None:
    assert error_as_json(ValueError("not ours")) == ""
    assert error_as_json(StorageError(1, "a path that is no text", b"bytes")) == ""  # type: ignore[arg-type]


class Evil:
    made = 0

    def __reduce__(self) -> object:
        return (Evil.make, ())

    @staticmethod
    def make() -> None:
        Evil.made += 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "1",
        json.dumps({"class": "ConfigError"}),
        json.dumps({"class": "ConfigError", "arguments": [["nested"]], "attributes": {}}),
        json.dumps({"class": "ConfigError", "arguments": [], "attributes": []}),
        json.dumps({"class": "StorageError", "arguments": [], "attributes": {}}),
        *(json.dumps({"class": name, "arguments": ["x"], "attributes": {}}) for name in ("annotations", "__doc__")),
        json.dumps({"class": ["ConfigError"], "arguments": [], "attributes": {}}),
        pickle.dumps(Evil()).decode("latin-1"),
    ],
)
def test_anything_else_is_no_error(text: str) -> None:
    assert error_from_json(text) is None
    assert Evil.made == 0


def test_attributes_that_the_error_does_not_have_are_not_set() -> None:
    text = {"class": "PeerError", "arguments": ["said"], "attributes": {"rank": 2, "subject": [], "__class__": "x"}}
    error = error_from_json(json.dumps(text))
    assert isinstance(error, PeerError)
    assert vars(error) == {"rank": 2, "subject": ""}
