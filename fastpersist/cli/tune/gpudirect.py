"""Whether "auto" shall take GPUDirect in a directory: a trial, in a process of its own, for `fastpersist tune`.

Of its own, because libcufile has been seen to wait without end, and because a process that has started CUDA cannot give
it back. What the trial is, `fastpersist.transfer.gpudirect` says; here is what it runs against: what saves and loads of
this file system do without GPUDirect, with the values that were found best.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastpersist import _native
from fastpersist.cli.child_process import Answers, ChildProcess
from fastpersist.commit.filesystem import storage_errors
from fastpersist.config import CUFILE_APIS
from fastpersist.errors import FastPersistError, UnsupportedError
from fastpersist.transfer import gpudirect
from fastpersist.transfer.gpudirect import Trial
from fastpersist.transfer.pipeline import Extents, Pieces, Writer, read_extents

__all__ = ["main", "try_gpudirect"]

_PROGRAM = "from fastpersist.cli.tune.gpudirect import main; main()"
_LIMIT_S = 120.0  # starting CUDA and moving some GiB takes seconds


def try_gpudirect(scratch: str, size_bytes: int, settings: Mapping[str, Any]) -> Trial:
    """Hold a trial on the first CUDA device; lost, with the reason, whenever it cannot be held.

    If it does not come to its end, it is held once more without batches, in which libcufile has been seen to wait.

    Args:
        scratch: A directory of the caller's on the file system, in which files are made.
        size_bytes: Of each file; a multiple of 64 MiB.
        settings: What a tuning file would say by now; how the ring is used.

    Raises:
        StorageError: The directory takes no file.
    """
    if torch.version.cuda is None:
        return Trial("this torch is not built for CUDA")
    if why := _native.cuda_driver_why_not():
        return Trial(why)
    tuning = os.path.join(scratch, "tuning.toml")  # a file, as it will be: an engine for saving is none for loading
    with storage_errors("writing", tuning), open(tuning, "w") as file:
        file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTPERSIST_")}
    environment["FASTPERSIST_CONFIG"] = tuning
    found, is_late = _tried(scratch, size_bytes, environment, CUFILE_APIS)
    if is_late:
        without, _ = _tried(scratch, size_bytes, environment, CUFILE_APIS[:1])
        found = without._replace(why_not_batch=found.why_lost)
    return found


def _tried(scratch: str, size_bytes: int, environment: Mapping[str, str], apis: Sequence[str]) -> tuple[Trial, bool]:
    """Hold a trial; return what came of it, and whether it had to be ended."""
    title = "the process that tries GPUDirect"
    with ChildProcess(_PROGRAM, environment=environment, title=title) as child:
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(_LIMIT_S, stop)
        timer.start()
        try:
            child.send({"directory": scratch, "size_bytes": size_bytes, "apis": apis})
            return Trial(**child.receive()), False
        except UnsupportedError as error:
            late = f"{title} was at it for {_LIMIT_S:.0f} s, and was ended"
            return Trial(late if is_late.is_set() else str(error)), is_late.is_set()
        finally:
            timer.cancel()


def main() -> None:
    """Hold the trials that the command asks for, until it closes its end."""
    answers = Answers()
    for request in answers.requests():
        answers.send(_held(request["directory"], request["size_bytes"], request["apis"])._asdict())


def _held(directory: str, size_bytes: int, apis: Sequence[str]) -> Trial:
    try:
        memory = _device_memory(size_bytes)
        return gpudirect.trial(
            directory,
            memory.device.index or 0,
            size_bytes,
            lambda fd, path: _write_by_ring(memory, fd, path),
            lambda fd, path: _read_by_ring(memory, fd, path),
            apis,
        )
    except FastPersistError as error:
        return Trial(str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the trial was not won
        return Trial(f"{type(error).__name__}: {error}")


def _device_memory(size_bytes: int) -> torch.UntypedStorage:
    """Return memory of the first device, with bytes that no file system makes smaller."""
    if not torch.cuda.is_available():
        raise UnsupportedError("this torch finds no CUDA device")
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda").random_().untyped_storage()


def _write_by_ring(memory: torch.UntypedStorage, fd: int, path: str) -> None:
    pieces = Pieces()
    pieces.add_storage(memory, None)
    with Writer(fd, path) as writer:
        writer.append(pieces)
        writer.finish()


def _read_by_ring(memory: torch.UntypedStorage, fd: int, path: str) -> None:
    extents = Extents()
    extents.add_storage(0, memory, with_crc=False)
    read_extents(fd, path, extents)
