"""What a test run hands down to the programs that tests start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INNER = "FASTPERSIST_TEST_INNER"


def test_programs_hear_of_a_hangup_although_the_tests_do_not() -> None:
    """Run these tests as under nohup; in that run, look at itself and at a program."""
    if INNER not in os.environ:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        result = subprocess.run(
            ["nohup", *command],
            cwd=Path(__file__).parents[2],
            env={**os.environ, INNER: "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout
        return
    os.kill(os.getpid(), signal.SIGHUP)  # a terminal that is closed
    program = "import os, signal; os.kill(os.getpid(), signal.SIGHUP); print('still here')"
    with pytest.raises(subprocess.CalledProcessError) as ended:
        subprocess.run([sys.executable, "-c", program], check=True)
    assert ended.value.returncode == -signal.SIGHUP
