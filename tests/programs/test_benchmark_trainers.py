"""benchmarks/trainers.py runs, with a model so small that its figures mean nothing, and its arithmetic is right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.benchmark_rooms import BENCHMARKS, rooms_of


@pytest.fixture
def trainers() -> Iterator[ModuleType]:
    with rooms_of("trainers") as rooms:
        yield rooms["trainers"]


@pytest.mark.long  # half a minute
def test_all_ways_of_a_framework_run_in_turn_and_leave_nothing(tmp_path: Path) -> None:
    disk, result_path = tmp_path / "disk", tmp_path / "result.json"
    disk.mkdir()
    options = "--frameworks torch --every 2 --steps 4 --rounds 1 --tiny --json"
    command = [sys.executable, str(BENCHMARKS / "trainers.py"), str(disk), *options.split(), str(result_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (runs,) = json.loads(result_path.read_text())["runs"]
    (ways,) = runs["rounds"]
    assert [len(ways[way]["intervals_s"]) for way in ("none", "stock", "fastpersist")] == [10, 10, 10]
    assert ways["none"]["save_steps"] == []
    assert ways["stock"]["save_steps"] == ways["fastpersist"]["save_steps"] == [2, 4, 6, 8, 10]
    assert len(ways["fastpersist"]["durable_s"]) == 5
    assert ways["fastpersist"]["checkpoint_bytes"] > 300_000
    assert not list(disk.iterdir())


def a_run(intervals_s: list[float], save_steps: list[int]) -> dict[str, Any]:
    return {"intervals_s": intervals_s, "save_steps": save_steps}


def test_windows_are_means_from_save_to_save_without_the_warm_up(trainers: ModuleType) -> None:
    run = a_run([9.0] * 6 + [1.0, 3.0, 2.0, 4.0, 7.0], [])
    assert trainers._windows(run, 2) == [2.0, 3.0]


def test_in_turns_compares_steps_after_a_save_with_the_quiet_ones(trainers: ModuleType) -> None:
    run = a_run([9.0] * 6 + [1.0, 1.5, 1.0, 1.5], [8, 10])  # interval 7 begins when step 8 ends
    assert trainers._in_turns(run, 2) == pytest.approx(0.5)
    assert trainers._in_turns(run, 1) is None
    assert trainers._in_turns(a_run([1.0] * 8, []), 2) is None
