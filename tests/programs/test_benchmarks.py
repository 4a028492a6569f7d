"""The benchmarks run, with states so small that their figures mean nothing, and their arithmetic is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import benchmark_rooms
from support.benchmark_rooms import BENCHMARKS, rooms_of

MIB = 1 << 20


def run_overlap(directory: Path, *options: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run overlap.py; return its exit status and all it said."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARKS / "overlap.py"), str(directory), *options],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (environment or {}),
    )
    return done.returncode, done.stdout + done.stderr


disk = benchmark_rooms.disk


@pytest.fixture
def rooms() -> Iterator[dict[str, ModuleType]]:
    with rooms_of("overlap_ways", "overlap_training", "overlap_disk", "overlap_report") as rooms:
        yield rooms


# --- the program ---


@pytest.mark.long  # half a minute
def test_overlap_measures_both_views_says_why_a_peer_is_missing_and_cleans_up(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "torch_checkpointing.py").write_text("raise ImportError('is refused by the test')")
    result_path = tmp_path / "result.json"
    options = "--model tiny --every 2 --steps 4 --rounds 1 --turns 2 --depth 1 2 --chunk-mib 1"
    ways = "--ways none torch-save tck fastpersist"
    status, said = run_overlap(
        disk, *options.split(), *ways.split(), "--json", str(result_path), environment={"PYTHONPATH": str(tmp_path)}
    )
    assert status == 0, said
    result = json.loads(result_path.read_text())
    runs = result["runs"][0]["results"]
    assert list(runs) == ["none", "torch-save", "fastpersist"]
    assert "is refused by the test" in result["runs"][0]["notes"]["tck"]
    state_bytes = result["disk"]["tiny"]["state_bytes"]
    for way in ("torch-save", "fastpersist"):
        assert state_bytes <= runs[way]["checkpoint_bytes"] < 1.2 * state_bytes
        assert 0 < runs[way]["stall_s"] < runs[way]["total_s"]
    losses = {run["loss"] for run in result["runs"][0]["rounds"][0].values()}
    assert len(losses) == 1, "every way trains the same"
    kinds = ["alone", "alone, again", "bare loop, depth 1", "bare loop, depth 2", "save, fastpersist"]
    turns = result["turns"][0]
    if turns["notes"]:  # a file system without direct I/O
        kinds = [kind for kind in kinds if not kind.startswith("bare loop")]
    assert list(turns["results"]) == kinds
    assert {len(samples) for samples in turns["samples"].values()} == {2}
    assert turns["results"]["save, fastpersist"]["report"], "the Checkpointer's own figures are in the report"
    assert not list(disk.iterdir())


def test_overlap_exits_with_1_and_the_reason_when_fastpersist_fails(disk: Path) -> None:
    options = "--model tiny --view runs --steps 1 --rounds 1 --ways fastpersist --engine unheard-of"
    status, said = run_overlap(disk, *options.split())
    assert status == 1, said
    assert "unheard-of" in said
    assert not list(disk.iterdir())


def test_soak_of_few_saves_passes(disk: Path) -> None:
    status, said = run_overlap(disk, "--soak", "30", "--growth-mib", "64")
    assert status == 0, said
    assert "nothing grew" in said
    assert not list(disk.iterdir())


# --- its arithmetic ---


def soak_result(**changes: int) -> dict[str, Any]:
    early = {"resident_bytes": 300 * MIB, "thread_count": 2, "descriptor_count": 5}
    footprints = {"100": early, "1000": early | changes}
    return {
        "footprints": footprints,
        "after_finish": early,
        "median_stall_s": 0.001,
        "checkpoint_bytes": 1,
    }


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"resident_bytes": 308 * MIB}, None),
        ({"resident_bytes": 308 * MIB + 1}, "memory"),
        ({"thread_count": 3}, "threads"),
        ({"descriptor_count": 6}, "descriptors"),
        ({"descriptor_count": 4}, None),
    ],
)
def test_soak_reports_growth(rooms: dict[str, ModuleType], changes: dict[str, int], word: str | None) -> None:
    text, grown = rooms["overlap_report"].report_soak(soak_result(**changes), growth_bytes_max=8 * MIB)
    assert len(grown) == (word is not None)
    assert word is None or (word in grown[0] and grown[0] in text)


def run_result(step_s: float, save_s: float, *, every: int, loss: float = 1.0) -> dict[str, Any]:
    """Make the result of 4 windows; in each, the last step has a save."""
    plain = {"step_s": step_s, "gate_s": 0.0, "save_s": 0.0}
    saving = {"step_s": step_s + save_s, "gate_s": 0.0, "save_s": save_s}
    return {
        "settings": "",
        "steps": ([plain] * (every - 1) + [saving]) * 4,
        "tail_s": 0.5,
        "checkpoint_bytes": 10**9,
        "peak_bytes": MIB,
        "child_peak_bytes": 0,
        "loss": loss,
        "report": [],
    }


@pytest.mark.parametrize(("every", "slowdown"), [(1, 1.5), (5, 1.1)])
def test_slowdown_spreads_a_save_over_the_steps_up_to_the_next(
    rooms: dict[str, ModuleType], every: int, slowdown: float
) -> None:
    rounds = [{"none": run_result(1.0, 0.0, every=every), "peer": run_result(1.0, 0.5, every=every)}]
    _, table = rooms["overlap_report"].report_runs("tiny", every, rounds, {}, {"seconds": [0.25], "state_bytes": 1})
    assert table["peer"]["slowdown_of_medians"] == pytest.approx(slowdown)
    assert table["peer"]["stall_s"] == pytest.approx(0.5)
    assert table["peer"]["total_s"] == pytest.approx(4 * (every + 0.5) + 0.5)


def test_run_that_trained_something_else_is_named(rooms: dict[str, ModuleType]) -> None:
    rounds = [{"none": run_result(1.0, 0.0, every=1), "peer": run_result(1.0, 0.5, every=1, loss=2.0)}]
    text, _ = rooms["overlap_report"].report_runs("tiny", 1, rounds, {}, {"failed": ""})
    assert "peer: the last loss is 2.0 instead of 1.0" in text


@pytest.mark.parametrize("depth", [1, 3])
def test_bare_loop_writes_every_byte_of_a_file_that_ends_within_a_chunk(
    rooms: dict[str, ModuleType], tmp_path: Path, depth: int
) -> None:
    size_bytes = 5 * MIB + 4096
    loop = rooms["overlap_disk"].BareLoop(str(tmp_path), size_bytes - 1, depth=depth, chunk_bytes=MIB)
    try:
        loop.prepare()
    except rooms["overlap_ways"].Unavailable as reason:
        pytest.skip(str(reason))
    try:
        loop.start()
        assert loop.join() > 0
        written = next(tmp_path.iterdir()).read_bytes()
    finally:
        loop.remove()
    chunk = written[:MIB]
    assert written == chunk * 5 + chunk[:4096]
    assert chunk.count(0) < MIB // 2, "blocks that were only allocated read as zeros"
    assert not list(tmp_path.iterdir())


def test_bare_loop_that_was_not_started_leaves_nothing(rooms: dict[str, ModuleType], tmp_path: Path) -> None:
    loop = rooms["overlap_disk"].BareLoop(str(tmp_path), MIB, depth=2, chunk_bytes=MIB)
    try:
        loop.prepare()
    except rooms["overlap_ways"].Unavailable as reason:
        pytest.skip(str(reason))
    loop.remove()
    assert not list(tmp_path.iterdir())
    assert "bare-loop" not in {thread.name for thread in threading.enumerate()}
