"""Runs a part of a test in a forked process of its own, which makes its own ring and may be killed.

A fork, because it has imported torch already. Everything of fastpersist that the parent uses starts anew in
it.

    with Child(work) as child:        # work(report) runs in the child; child.reported is what it reported
        time.sleep(0.1)
        child.kill()

    @in_child(SMALL_RING)             # the whole test runs in a child, with these environment variables
    def test_something(tmp_path): ...

What it raises becomes the test's failure in the parent, with the child's traceback. It never returns into
pytest.
"""

from __future__ import annotations

import functools
import gc
import mmap
import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec

import pytest
import torch

SMALL_RING = {"FASTPERSIST_CHUNK_BYTES": str(64 << 10), "FASTPERSIST_RING_BYTES": str(256 << 10)}
"""Four chunks of 64 KiB, the least there may be: some hundred KiB are many requests and fill the ring."""

NOTHING_REPORTED = -1

Report = Callable[[int], None]
Parameters = ParamSpec("Parameters")


class Ending(NamedTuple):
    """How a child ended: the signal that killed it (0: none), and what it said when it ended by itself."""

    signal: int
    verdict: str  # "passed", "skipped", "failed", or "" when it was killed
    message: str


class Child:
    """A forked process that runs one function. A context manager that leaves no process behind."""

    def __init__(self, work: Callable[[Report], None], environment: Mapping[str, str] | None = None) -> None:
        self._memory = mmap.mmap(-1, 8)
        # One store of eight bytes. struct.pack_into writes zeros first, and a child killed in between has reported 0.
        self._reported = memoryview(self._memory).cast("q")
        self._report(NOTHING_REPORTED)
        self._ending: Ending | None = None
        self._verdict_fd, verdict_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._verdict_fd)
            self._run(work, environment or {}, verdict_fd)
        os.close(verdict_fd)

    def _run(self, work: Callable[[Report], None], environment: Mapping[str, str], verdict_fd: int) -> None:
        said = ("failed", "the child ended without a verdict")
        try:
            gc.freeze()  # what the parent had is not ours to collect, and leak checks collect often
            torch.set_num_threads(1)  # torch's threads are the parent's; waiting for them would be for ever
            os.environ.update(environment)
            work(self._report)
            said = ("passed", "")
        except pytest.skip.Exception as reason:
            said = ("skipped", str(reason))
        except BaseException:  # noqa: BLE001 - whatever it was, the parent reports it
            said = ("failed", traceback.format_exc())
        finally:
            try:
                with os.fdopen(verdict_fd, "wb") as file:
                    pickle.dump(said, file)
            finally:
                os._exit(0)

    def _report(self, step: int) -> None:
        """Store a step number where the parent sees it at once; it survives the child."""
        self._reported[0] = step

    @property
    def reported(self) -> int:
        """The last step that was reported, NOTHING_REPORTED before the first."""
        return self._reported[0]

    def ended(self) -> bool:
        """Whether the child has come to its end by itself."""
        return self._ending is not None or bool(select.select([self._verdict_fd], [], [], 0)[0])

    def kill(self) -> Ending:
        """Kill the child by SIGKILL, unless it has ended, and wait for it."""
        if self._ending is None:
            os.kill(self.pid, signal.SIGKILL)  # it is a zombie at worst: nobody else waits for it
        return self.wait()

    def wait(self) -> Ending:
        """Wait until the child has ended. May be called again."""
        if self._ending is None:
            with os.fdopen(self._verdict_fd, "rb") as file:
                said = file.read()
            _, status = os.waitpid(self.pid, 0)
            verdict, message = pickle.loads(said) if said else ("", "")
            self._ending = Ending(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, verdict, message)
        return self._ending

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._reported.release()
        self._memory.close()


def run_in_child(work: Callable[[Report], None], environment: Mapping[str, str] | None = None) -> None:
    """Run `work` in a child; its failure, or its skip, becomes ours."""
    __tracebackhide__ = True
    with Child(work, environment) as child:
        ending = child.wait()
    if ending.verdict == "skipped":
        pytest.skip(ending.message)
    if ending.signal:
        pytest.fail(f"the child was killed by {signal.Signals(ending.signal).name}", pytrace=False)
    if ending.verdict != "passed":
        pytest.fail(ending.message, pytrace=False)


def in_child(
    environment: Mapping[str, str],
) -> Callable[[Callable[Parameters, None]], Callable[Parameters, None]]:
    """Decorate a test so that it runs in a child with these environment variables."""

    def decorate(test: Callable[Parameters, None]) -> Callable[Parameters, None]:
        @functools.wraps(test)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            run_in_child(lambda report: test(*args, **kwargs), environment)

        return wrapper

    return decorate
