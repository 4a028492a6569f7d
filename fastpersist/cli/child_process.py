"""Child processes that answer requests, either as lines of JSON or as pickled Python objects.

For commands that measure: a memory peak belongs to a process, and so do a ring, an engine, or a denied system call. The
two ends define the requests and answers.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, TextIO

from fastpersist.errors import UnsupportedError

__all__ = ["Answers", "ChildProcess", "ConnectedProcess", "connection_to_parent", "python_command"]


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command of a fresh interpreter that finds modules where this process finds them.

    With `-c` and `-m` Python looks into the working directory first, and in a checkout beside an installed package it
    would import the source tree there, which may have no native module.

    Args:
        program: The Python code to run.
        arguments: The arguments in its `sys.argv`.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}", *arguments]


class ChildProcess(contextlib.AbstractContextManager["ChildProcess"]):
    """The parent's end: a context manager around the process, which ends with it. One owner thread.

    Args:
        program: The Python code that a fresh interpreter runs.
        arguments: The arguments in its `sys.argv`.
        environment: The environment of the process, in place of ours.
        title: Names the process in messages: "the process that saves".
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        title: str,
    ) -> None:
        self._title = title
        self._process = subprocess.Popen(
            python_command(program, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent alone; and `end` reaches what it has forked, too
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request; answers come in the same order. If the process has ended, only reading an answer raises."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            UnsupportedError: The process has ended.
        """
        answers = self._process.stdout
        line = "" if answers is None or answers.closed else answers.readline()
        if not line:
            raise UnsupportedError(f"{self._title} has ended (exit status {self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def result(self) -> dict[str, Any]:
        """Wait for the next answer, and raise the failure that it may be.

        Raises:
            UnsupportedError: The answer is {"failed": why}, or the process has ended.
        """
        answer = self.receive()
        if "failed" in answer:
            raise UnsupportedError(answer["failed"])
        return answer

    def end(self) -> None:
        """End the process and its children, and wait for them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()  # until the last one that could answer is gone

    def __exit__(self, *_: object) -> None:
        self.end()


class ConnectedProcess:
    """A process at the other end of a connection, which it serves until we close our end. One owner thread.

    Args:
        module: The module whose `main` a fresh interpreter calls, with the descriptor of its end.

    Attributes:
        connection: Our end.
    """

    def __init__(self, module: str) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                python_command(f"from {module} import main; main({theirs.fileno()})"),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the table's
                start_new_session=True,  # Ctrl-C is for the parent alone; and `end` reaches what it has forked, too
            )

    def wait(self) -> int:
        """Wait until the process has ended; return its exit status."""
        return self._process.wait()

    def end(self, patience_s: float = 0.0) -> None:
        """Close our end; after a timeout in seconds end the process and its children; wait for it."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def connection_to_parent(descriptor: int) -> Iterator[Connection]:
    """Open the process's end of a `ConnectedProcess`; leave the with block when the parent has closed its end.

    Args:
        descriptor: The file descriptor of the process's end.
    """
    # A parent that closes its end before it has read an answer resets the connection.
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        yield connection


class Answers:
    """The process's end. Make it before any code may print: later prints go to stderr."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints cannot come between the answers

    def send(self, answer: Mapping[str, Any]) -> None:
        """Answer the parent.

        Raises:
            BrokenPipeError: The parent has ended.
        """
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def send_from_fork(self, work: Callable[[], Mapping[str, Any]], died: str) -> None:
        """Make the answer in a forked child, so that its memory use neither depends on earlier answers nor remains.

        The child has ended before the parent gets the answer, so it cannot still write files that the parent removes.

        Args:
            work: Makes the answer; does not raise.
            died: The answer's "failed" text if the child ends before it has answered.
        """
        with open(os.memfd_create("answer"), "w+") as answer:
            with warnings.catch_warnings():
                # From Python 3.12 on, of forking beside numpy's idle threads.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                json.dump(work(), answer)
                answer.flush()
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            answer.seek(0)
            self.send(json.load(answer) if code == 0 else {"failed": f"{died} (exit status {code})"})

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the parent's requests, until it closes its end."""
        for line in sys.stdin:
            yield json.loads(line)
