"""A second process that runs fastpersist's rows: to measure its memory, or without io_uring.

The parent (`child_process`) starts `main`, sends a job and then rows to run, and gets an answer to each: first the rows
there are, then a sample or an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from typing import Any

import torch

from fastpersist.cli.bench.load_rows import own_load_rows
from fastpersist.cli.bench.rows import Row, Sample
from fastpersist.cli.bench.sandbox import deny_io_uring
from fastpersist.cli.bench.save_rows import own_save_rows
from fastpersist.cli.bench.states import StateRecipe
from fastpersist.cli.child_process import Answers, ChildProcess
from fastpersist.errors import FastPersistError, UnsupportedError

__all__ = ["Job", "Worker", "forget_peak", "main", "resident_bytes"]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """The job of a worker.

    Attributes:
        command: "save" or "load".
        recipe: The recipe of the state.
        payload_bytes: The bytes of the state.
        engines: Names of engines; each gets a row of its own.
        deny_io_uring: Make io_uring unusable for this process before anything else.
        apart: Run each row in a forked child, so that none finds memory that another has left: neither the ring, nor
            what the allocator keeps.
    """

    command: str
    recipe: StateRecipe
    payload_bytes: int
    engines: list[str]
    deny_io_uring: bool = False
    apart: bool = False


class Worker(contextlib.AbstractContextManager["Worker"]):
    """The parent's end: a context manager around the process. One owner thread.

    It prepares (builds its state) at once, while the parent goes on until it asks for `rows`.

    Args:
        job: What the worker shall be able to run.
    """

    def __init__(self, job: Job) -> None:
        self._process = ChildProcess(
            "from fastpersist.cli.bench.worker import main; main()", title="the second process"
        )
        self._process.send(dataclasses.asdict(job))
        self._rows: dict[str, str] = {}

    def rows(self) -> dict[str, str]:
        """Wait until the worker is ready; return the suffixes of its rows by name.

        Raises:
            UnsupportedError: It could not get ready; the message says why.
        """
        if not self._rows:
            self._rows = self._process.result()["rows"]
        return self._rows

    def run(self, row_name: str, path: str) -> tuple[Sample, int | None]:
        """Run a row once; return the sample, and the peak of memory above what the state itself takes.

        Raises:
            UnsupportedError: The worker could not do it, or is dead; the message says why.
        """
        self.rows()
        self._process.send({"row": row_name, "path": path})
        answer = self._process.result()
        return Sample(**answer["sample"]), answer["peak_bytes"]

    def end(self) -> None:
        """End the process and wait for it; it owns nothing that outlives it, as its files are in our directory."""
        self._process.end()

    def __exit__(self, *_: object) -> None:
        self.end()


def main() -> None:
    """Serve one parent until it closes its end."""
    answers = Answers()
    requests = answers.requests()
    description = next(requests)
    job = Job(**{**description, "recipe": StateRecipe(**description["recipe"])})

    if job.apart:
        torch.set_num_threads(1)  # a forked child cannot use OpenMP where its parent has
    try:
        if job.deny_io_uring:
            deny_io_uring()
            # auto takes another engine then, as intended: no warning.
            logging.getLogger("fastpersist").setLevel(logging.ERROR)
        rows = {row.name: row for row in _rows(job)}
    except FastPersistError as error:
        answers.send({"failed": str(error)})
        return
    answers.send({"rows": {row.name: row.suffix for row in rows.values()}})
    for request in requests:

        def work(row: Row = rows[request["row"]], path: str = request["path"]) -> dict[str, Any]:
            try:
                return _run(job, row, path)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's result
                return {"failed": f"{type(error).__name__}: {error}"}

        if job.apart:
            answers.send_from_fork(work, "the process that ran it died")
        else:
            answers.send(work())


def _rows(job: Job) -> list[Row]:
    if job.command == "save":
        return own_save_rows(job.recipe.build(), job.engines)
    return own_load_rows(job.recipe, job.payload_bytes, job.engines)


def _run(job: Job, row: Row, path: str) -> dict[str, Any]:
    if row.run is None:
        raise UnsupportedError(row.why_not)
    gc.collect()
    peak_is_known = forget_peak()
    # What the state itself takes: it is here already (saves), or part of what is about to be read (loads).
    state_bytes = resident_bytes("VmRSS") + (job.payload_bytes if job.command == "load" else 0)
    sample = row.run(path)
    peak_bytes = resident_bytes("VmHWM") - state_bytes if peak_is_known else None
    return {"sample": dataclasses.asdict(sample), "peak_bytes": peak_bytes}


def resident_bytes(name: str) -> int:
    """Read VmRSS, what is resident now, or VmHWM, the most that ever was."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{name}:"))


def forget_peak() -> bool:
    """Set VmHWM to what is resident now; False where the kernel does not allow it."""
    try:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5\n")
    except OSError:
        return False
    return True
