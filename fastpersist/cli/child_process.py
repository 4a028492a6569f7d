"""A process of our own that answers: each request is a line of JSON, and so is each answer.

For commands that measure: a peak of memory belongs to a process, and what a process has set up (a ring, an engine) or
given up (a system call) stays with it. What is asked and answered is the affair of the two ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, TextIO

from fastpersist.errors import UnsupportedError

__all__ = ["Answers", "ChildProcess"]


class ChildProcess:
    """The parent's end: a context manager around the process, which ends with it. One owner thread.

    Args:
        program: What a fresh interpreter runs.
        arguments: For its `sys.argv`.
        environment: In place of ours.
        title: What it is, for messages: "the process that saves".
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
            [sys.executable, "-c", program, *arguments],
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
        """Ask something; the answers come in the same order. That nobody is there shows when one is awaited."""
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

    def end(self) -> None:
        """End the process, and all that it has forked, and wait for them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()  # until the last one that could answer is gone

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


class Answers:
    """The process's end. Make it before anything may print: what is printed then goes to stderr."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whoever prints cannot come between the answers

    def send(self, answer: Mapping[str, Any]) -> None:
        """Answer the parent.

        Raises:
            BrokenPipeError: It is gone.
        """
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield what the parent asks, until it closes its end."""
        for line in sys.stdin:
            yield json.loads(line)
