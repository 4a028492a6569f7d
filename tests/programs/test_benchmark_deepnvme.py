"""benchmarks/deepnvme.py runs, with a tensor so small that its figures mean nothing, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.long  # each way starts processes that import torch
def test_all_ways_take_turns_and_leave_nothing(tmp_path: Path) -> None:
    disk, result_path = tmp_path / "disk", tmp_path / "result.json"
    disk.mkdir()
    options = ["--size-mb", "8", "--block", "1MiB", "--rounds", "2", "--json", str(result_path)]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARKS / "deepnvme.py"), str(disk), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(result_path.read_text())
    tables = {state["name"]: {row["name"]: row for row in state["rows"]} for state in result["states"]}
    for direction, rows in tables.items():
        assert f"fio {direction}" in rows
        for name in ("TensorFile", "our aio_handle"):
            assert len(rows[name]["seconds"]) == 2
            assert rows[name]["size_bytes"] == 8 << 20
    assert list(tables) == ["write", "read"]
    assert "DeepNVMe is left out" in result["notes"][0] or len(tables["read"]["DeepNVMe"]["seconds"]) == 2
    assert result["notes"][0].split(":")[0] in done.stdout
    assert not list(disk.iterdir())


@pytest.mark.parametrize("name", ["deepnvme.py", "trainers.py"])
def test_without_a_fastpersist_to_measure_the_remedy_is_named(name: str, tmp_path: Path) -> None:
    """As a source tree that was not built: it is found, and has no native module."""
    (tmp_path / "fastpersist").mkdir()
    (tmp_path / "fastpersist" / "__init__.py").write_text("raise ImportError('the native module cannot be imported')")
    command = [sys.executable, str(BENCHMARKS / name), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("the native module cannot be imported\n")
    assert "run `make setup`" in done.stderr
    assert f".venv/bin/python {BENCHMARKS / name}" in done.stderr
    assert "Traceback" not in done.stderr
