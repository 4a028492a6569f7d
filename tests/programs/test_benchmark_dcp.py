"""benchmarks/dcp.py runs, with a state so small that its figures mean nothing, and leaves nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "dcp.py"
SAVE_WAYS = ["fastpersist", "stock, 1 thread", "stock, 2 threads"]
LOAD_WAYS = ["fastpersist", "stock"]
ASYNC_WAYS = ["fastpersist", "stock", "stock, staging thread"]


def run_dcp_benchmark(directory: Path, options: list[str], environment: dict[str, str]) -> tuple[str, Any]:
    """Run it; return all it said, and what it wrote as JSON."""
    disk, result_path = directory / "disk", directory / "result.json"
    disk.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARK), str(disk), *options, "--json", str(result_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(disk.iterdir())
    return done.stdout, json.loads(result_path.read_text())


def expect_samples(found: Any, save_ways: list[str], load_ways: list[str], size_mb: int) -> None:
    """Check that each way has had its turn."""
    assert {way: len(seconds) for way, seconds in found["save"].items()} == dict.fromkeys(save_ways, 1)
    assert {way: len(grown) for way, grown in found["growth"].items()} == dict.fromkeys(save_ways, 1)
    assert {way: len(seconds) for way, seconds in found["load"].items()} == dict.fromkeys(load_ways, 1)
    assert 0.8 * size_mb < found["size_bytes"] / (1 << 20) < 1.2 * size_mb


def test_all_ways_take_turns_and_leave_nothing(tmp_path: Path) -> None:
    options = ["--ranks", "2", "--size-mb", "8", "--rounds", "1", "--between", "0.01", "--async-ways", *ASYNC_WAYS]
    said, result = run_dcp_benchmark(tmp_path, options, {})
    assert list(result["results"]) == ["2"]
    found = result["results"]["2"]
    peers = ["torch_checkpointing"] if importlib.util.find_spec("torch_checkpointing") else []
    expect_samples(found, [*SAVE_WAYS, *peers], [*LOAD_WAYS, *peers], 8)
    for what in ("fio_read", "fio_write"):
        assert len(found[what]) == (1 if result["machine"]["fio"] else 0)
    assert list(found["async"]) == ASYNC_WAYS
    for samples in found["async"].values():
        assert {what: len(values) for what, values in samples.items()} == {"stall": 1, "durable": 1, "growth": 1}
        assert 0 < samples["stall"][0] < samples["durable"][0]
    assert len(result["checks"]) == 4
    assert all(f"| {what}" in said for what, _, _ in result["checks"])


def test_what_is_not_installed_is_left_out(tmp_path: Path) -> None:
    """Neither fio nor torch_checkpointing, whether they are there or not."""
    (tmp_path / "torch_checkpointing.py").write_text("raise ImportError('is refused by the test')")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path)}
    said, result = run_dcp_benchmark(
        tmp_path, ["--ranks", "2", "--size-mb", "8", "--rounds", "1", "--parts", "save", "load"], environment
    )
    found = result["results"]["2"]
    expect_samples(found, SAVE_WAYS, LOAD_WAYS, 8)
    assert not result["machine"]["fio"]
    assert found["fio_read"] == []
    assert list(found["unavailable"]) == ["save, torch_checkpointing", "load, torch_checkpointing"]
    assert "not tried: save, torch_checkpointing: is refused by the test" in said
    assert len(result["checks"]) == 3
