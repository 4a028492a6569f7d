"""What the fuzzers of whole files share: put an input on disk and hold every reader to its promises.

- inspect and verify raise nothing but FastPersistError; verify reports damage instead of raising it.
- load and load_into raise FastPersistError, or for anything but safetensors what torch raises. Torch's turn
  comes when the file goes to stock torch.load, or when our storages are filled and stock torch.load builds the
  object around them. So any other error is accepted only if stock torch.load, asked alone, raises one too.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch

import fastpersist as fp
from fastpersist.loading.checkpoint_file import CheckpointSource

# In memory where there is such a place: a fuzzer writes thousands of files.
_SHM = "/dev/shm"
_DIRECTORY = tempfile.TemporaryDirectory(prefix="fastpersist-fuzz-", dir=_SHM if os.access(_SHM, os.W_OK) else None)
PATH = Path(_DIRECTORY.name) / "input"

# Bounded time: threads are quick to start, and what is read is the same with every engine.
ENGINE = "threads-buffered"

outcomes: Counter[str] = Counter()

# Errors of a program that is wrong or a machine that is too small, whoever raises them: never an answer.
NEVER = (MemoryError, fp.InternalError, RecursionError)


def try_file(data: bytes) -> None:
    """Give one input to every reader; raise if any of them breaks a promise."""
    PATH.write_bytes(data)
    warnings.simplefilter("ignore")
    report = fp.verify(PATH, engine=ENGINE)
    outcomes["verified" if report.ok else "damaged"] += 1
    try:
        manifest = fp.inspect(PATH)
        str(manifest)
        outcomes["inspected"] += 1
    except fp.FastPersistError as error:
        _check(error)
    target = {"a": torch.zeros(4), "b": torch.zeros(2, 3)}
    load(verify=False)
    load(verify=True)
    try:
        fp.load_into(PATH, target, strict=False, engine=ENGINE)
        outcomes["filled"] += 1
    except fp.FastPersistError as error:
        _check(error)
    except Exception as error:  # noqa: BLE001 - judged below
        _accept_if_torch_refuses_too(error)


def load(*, verify: bool) -> None:
    try:
        fp.load(PATH, verify=verify, engine=ENGINE)
        outcomes["loaded"] += 1
    except fp.FastPersistError as error:
        _check(error)
    except Exception as error:  # noqa: BLE001 - judged below
        _accept_if_torch_refuses_too(error)


def _check(error: fp.FastPersistError) -> None:
    if isinstance(error, NEVER):
        raise error
    if not str(error):
        raise AssertionError("an error without a message") from error
    outcomes[type(error).__name__] += 1


def _accept_if_torch_refuses_too(error: Exception) -> None:
    with CheckpointSource(str(PATH)) as source:
        if isinstance(error, NEVER) or source.kind == "safetensors":
            raise error
    outcomes["torch's turn"] += 1
    try:
        with PATH.open("rb") as file:
            torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - that it refuses is all we ask
        return
    raise AssertionError(f"torch loads what we answer with {error!r}") from error
