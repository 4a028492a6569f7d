"""benchmarks/ranks.py runs, with states so small that its figures mean nothing, and its arithmetic is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import benchmark_rooms
from support.benchmark_rooms import BENCHMARKS, rooms_of

disk = benchmark_rooms.disk


@pytest.fixture
def rooms() -> Iterator[dict[str, ModuleType]]:
    with rooms_of("ranks_parts", "ranks") as rooms:
        yield rooms


def run_ranks_benchmark(disk: Path, options: str, environment: dict[str, str] | None = None) -> tuple[str, Any]:
    """Run it; return all it said, and what it wrote as JSON."""
    result_path = disk.parent / "result.json"
    options = f"{options} --json {result_path}"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARKS / "ranks.py"), str(disk), *options.split()],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (environment or {}),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(disk.iterdir())
    return done.stdout, json.loads(result_path.read_text())


def test_all_parts_run_and_leave_nothing(disk: Path) -> None:
    said, result = run_ranks_benchmark(
        disk, "--ranks 1 3 --size-mb 8 --rounds 2 --real 2 3 --simulated 9 --saves 2 --tensors 5"
    )
    ways = result["files"]["samples"]
    assert list(ways) == ["fio, 1 job", "fio, 3 jobs", "one rank alone", "1 rank", "3 ranks"]
    assert {len(samples) for way, samples in ways.items() if not way.startswith("fio")} == {2}
    if not result["files"]["no_fio"]:
        assert {len(samples) for samples in ways.values()} == {2}
    if "memory" in result:
        assert all(len(samples) == 2 for kinds in result["memory"]["samples"].values() for samples in kinds.values())
    else:
        assert "/dev/shm is missing or has not enough room" in said
    by_rank = result["bytes"]["3"]["by_rank"]
    assert max(by_rank) - min(by_rank) <= 4096
    assert 7 << 20 < sum(by_rank) < 8 << 20
    loads = result["load"]["samples"]
    assert list(loads) == ["3 ranks, cold", "3 ranks, warm"]
    assert {way: len(seconds) for way, seconds in loads["3 ranks, cold"].items()} == dict.fromkeys(
        ["ahead", "exchange", "alone", "auto"], 2
    )
    assert "none of it was left" in said
    assert "all of it was there" in said
    assert {count: len(found["seconds"]) for count, found in result["real"].items()} == {"1": 2, "2": 2, "3": 2}
    assert result["real"]["3"]["messages_per_rank"] == 4
    assert len(result["simulated"]["9"]["committed_s"]) == 2
    untimed = [verdict for what, _, verdict in result["checks"] if "messages" in what or "block" in what]
    assert untimed == ["PASS"] * 4


def test_without_fio_and_tmpfs_what_needs_them_is_left_out_and_the_reason_said(disk: Path, tmp_path: Path) -> None:
    options = f"--parts files memory --ranks 2 --size-mb 4 --rounds 1 --memory-dir {tmp_path / 'missing'}"
    said, result = run_ranks_benchmark(disk, options, {"PATH": str(tmp_path)})
    assert "fio is not installed" in said
    assert "missing is missing or has" in said
    assert result["files"]["samples"]["fio, 2 jobs"] == []
    assert len(result["files"]["samples"]["2 ranks"]) == 1
    assert [what for what, _, _ in result["checks"]] == ["2 ranks: not slower than one"]


def test_a_rank_that_fails_ends_the_call_and_says_why(rooms: dict[str, ModuleType], tmp_path: Path) -> None:
    parts = rooms["ranks_parts"]
    missing = str(tmp_path / "missing" / "x.pt")
    with parts.RankProcesses([2], str(tmp_path), 30) as ranks, pytest.raises(parts.Failed, match="of 2 failed in save"):
        ranks.call(2, parts.hold_state, 4 << 20)
        ranks.call(2, parts.save_together, missing, 2)


def test_a_span_is_from_the_first_beginning_to_the_last_end(rooms: dict[str, ModuleType]) -> None:
    assert rooms["ranks_parts"].whole_span([(2.0, 5.0), (1.5, 3.0), (4.0, 4.5)]) == 3.5


def test_rates_are_compared_within_a_round(rooms: dict[str, ModuleType]) -> None:
    ranks = rooms["ranks"]
    ours = [ranks.Sample(2.0, 100, "uring"), ranks.Sample(1.0, 100, "uring")]
    fio = [ranks.Sample(1.0, 100, "io_uring"), ranks.Sample(2.0, 400, "io_uring")]
    assert ranks._ratios(ours, fio) == [0.5, 0.5]
    assert ranks._ratios(ours, []) == []
