"""Every fuzzer runs, finds nothing in a second, and is able to report a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import run_file_in_fork

FOLDER = Path(__file__).parent
FUZZERS = sorted(path.name for path in FOLDER.glob("fuzz_*.py"))


def test_there_are_fuzzers() -> None:
    assert "fuzz_pickle_scan.py" in FUZZERS


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_fuzzer_finds_nothing(fuzzer: str) -> None:
    # The same inputs in every run, so that this fails for a change and not for luck; `make fuzz` looks further.
    command = [sys.executable, str(FOLDER / fuzzer), "--seconds", "1", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "seed" in result.stdout


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_fuzzer_reports_a_failure_that_can_be_repeated(fuzzer: str, tmp_path: Path) -> None:
    options = ["--seconds", "2", "--seed", "1", "--canary"]
    if fuzzer == "fuzz_devices.py":  # a child of a process that has used a device can use none
        command = [sys.executable, str(FOLDER / fuzzer), *options]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        code, output, errors = result.returncode, result.stdout, result.stderr
    else:
        code, output, errors = run_file_in_fork(FOLDER / fuzzer, *options, directory=tmp_path)
    assert code == 1
    assert "--seed 1 --only 0" in output
    assert "the canary sings" in errors
