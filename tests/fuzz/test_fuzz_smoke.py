"""Every fuzzer runs, finds nothing in two seconds, and is able to report a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZERS = sorted(path.name for path in Path(__file__).parent.glob("fuzz_*.py"))


def run(fuzzer: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name(fuzzer)), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_there_are_fuzzers() -> None:
    assert "fuzz_pickle_scan.py" in FUZZERS


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_fuzzer_finds_nothing(fuzzer: str) -> None:
    # The same inputs in every run, so that this fails for a change and not for luck; `make fuzz` looks further.
    result = run(fuzzer, "--seconds", "2", "--seed", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "seed" in result.stdout


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_fuzzer_reports_a_failure_that_can_be_repeated(fuzzer: str) -> None:
    result = run(fuzzer, "--seconds", "2", "--seed", "1", "--canary")
    assert result.returncode == 1
    assert "--seed 1 --only 0" in result.stdout
    assert "the canary sings" in result.stderr
