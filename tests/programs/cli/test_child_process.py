"""Processes that answer: what a fork of theirs has begun is over when its answer is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import fastpersist
from fastpersist.cli.child_process import ChildProcess, ConnectedProcess, python_command

ENDS_SLOWLY = """
import os, time
from fastpersist.cli.child_process import Answers
answers, exit_at_once = Answers(), os._exit
def exit_slowly(code):
    time.sleep(0.5)
    exit_at_once(code)
os._exit = exit_slowly
for _ in answers.requests():
    answers.send_from_fork(lambda: {"pid": os.getpid(), "much": "x" * 1_000_000}, "it died")
"""


def test_a_fork_is_gone_when_its_answer_comes() -> None:
    with ChildProcess(ENDS_SLOWLY, title="the process") as process:
        process.send({})
        answer = process.receive()
        assert not Path(f"/proc/{answer['pid']}").exists()
        assert len(answer["much"]) == 1_000_000


def test_children_import_what_we_import_whatever_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a source tree without a native module, beside a package that is installed."""
    (tmp_path / "fastpersist").mkdir()
    (tmp_path / "fastpersist" / "__init__.py").write_text("raise ImportError('this is the wrong one')")
    monkeypatch.chdir(tmp_path)
    program = "import fastpersist, sys; print(fastpersist.__file__, sys.argv[1])"
    done = subprocess.run(python_command(program, "word"), capture_output=True, text=True, check=False)
    assert done.stdout == f"{fastpersist.__file__} word\n", done.stderr
    with ChildProcess(ENDS_SLOWLY, title="the process") as process:
        process.send({})
        assert process.receive()["pid"] != os.getpid()
    connected = ConnectedProcess("fastpersist.cli.bench.io.worker")
    connected.connection.close()  # which ends what has come so far
    assert connected.wait() == 0


def test_a_process_ends_in_silence_when_its_parent_closes_without_reading_an_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such a close resets the connection, where another one ends it."""
    connected = ConnectedProcess("fastpersist.cli.bench.ranks.processes")
    connected.connection.send((0, [1], str(tmp_path / "meeting"), 120.0))
    connected.connection.send((str, ()))
    assert connected.connection.poll(120)  # its answer is there, and stays unread
    connected.connection.close()
    assert connected.wait() == 0
    assert capfd.readouterr().err == ""
