"""Processes that answer: what a fork of theirs has begun is over when its answer is there."""

from __future__ import annotations

from pathlib import Path

from fastpersist.cli.child_process import ChildProcess

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
