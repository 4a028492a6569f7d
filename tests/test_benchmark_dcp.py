"""benchmarks/dcp.py runs, with a state so small that its figures mean nothing, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "dcp.py"
SAVE_WAYS = ["fastpersist", "stock, 1 thread", "stock, 2 threads"]
LOAD_WAYS = ["fastpersist", "stock"]


def run_dcp_benchmark(directory: Path, options: str, environment: dict[str, str]) -> tuple[str, Any]:
    """Run it; return all it said, and what it wrote as JSON."""
    disk, result_path = directory / "disk", directory / "result.json"
    disk.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARK), str(disk), *options.split(), "--json", str(result_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(disk.iterdir())
    return done.stdout, json.loads(result_path.read_text())


@pytest.mark.parametrize("with_fio", [True, False], ids=["fio, if there is one", "no fio"])
def test_all_ways_take_turns_and_leave_nothing(tmp_path: Path, *, with_fio: bool) -> None:
    environment = {} if with_fio else {"PATH": str(tmp_path)}
    size_mb = 8
    said, result = run_dcp_benchmark(tmp_path, f"--ranks 2 --size-mb {size_mb} --rounds 1", environment)
    assert list(result["results"]) == ["2"]
    found = result["results"]["2"]
    assert {way: len(seconds) for way, seconds in found["save"].items()} == dict.fromkeys(SAVE_WAYS, 1)
    assert {way: len(grown) for way, grown in found["growth"].items()} == dict.fromkeys(SAVE_WAYS, 1)
    assert {way: len(seconds) for way, seconds in found["load"].items()} == dict.fromkeys(LOAD_WAYS, 1)
    assert len(found["fio_read"]) == (1 if result["machine"]["fio"] else 0)
    assert with_fio or not result["machine"]["fio"]
    assert 0.8 * size_mb < found["size_bytes"] / (1 << 20) < 1.2 * size_mb
    assert len(result["checks"]) == 3
    assert all(f"| {what}" in said for what, _, _ in result["checks"])
