"""What `bench io` is put together from: blocks, what fio is asked for and says, table and JSON."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import fastpersist as fp
from fastpersist.cli.bench.fio import FioJob, run_fio
from fastpersist.cli.bench.io.points import (
    IoSample,
    Point,
    Setup,
    chunk_bytes_for,
    file_paths,
    fio_engine,
    is_block,
)
from fastpersist.cli.bench.io.report import io_report_json, io_report_text
from fastpersist.cli.bench.io.rows import IoResult, PlannedRow, fio_job
from fastpersist.cli.bench.rows import Measured, Row, Sample

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE = Point("read", "threads", 64 * KIB, 4), Point("write", "threads", 64 * KIB, 4)
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


# --- parameters ---


@pytest.mark.parametrize("block_bytes", [512, 1024, 4096, 3 * 4096, 8 * MIB])
def test_blocks_are_whole_pages_or_parts_of_one(block_bytes: int) -> None:
    assert is_block(block_bytes)


@pytest.mark.parametrize("block_bytes", [0, 1, 256, 1536, 4000, 8_000_000])
def test_other_sizes_are_no_blocks(block_bytes: int) -> None:
    assert not is_block(block_bytes)


@pytest.mark.parametrize(
    ("block_bytes", "chunk_bytes"),
    [(512, 4096), (4096, 4096), (3 * MIB, 4 * MIB), (8 * MIB, 8 * MIB), (2 << 30, 1 << 30)],
)
def test_a_block_is_one_request(block_bytes: int, chunk_bytes: int) -> None:
    assert chunk_bytes_for(block_bytes) == chunk_bytes


def test_each_process_has_a_file_of_its_own() -> None:
    assert file_paths("x", 1) == ["x"]
    assert len(set(file_paths("x", 3))) == 3


# --- fio ---


@pytest.mark.parametrize("engine", ["uring", "libaio", "threads"])
def test_fio_has_the_same_system_calls(engine: str) -> None:
    names = {"uring": "io_uring", "libaio": "libaio", "threads": "psync"}
    assert fio_engine(engine) == (names[engine], True)
    assert fio_engine(f"{engine}-buffered") == (names[engine], False)


@pytest.mark.parametrize("engine", ["null", "fault:uring", "cufile"])
def test_fio_has_no_counterpart_of_other_engines(engine: str) -> None:
    assert fio_engine(engine) is None
    assert fio_job(Point("read", engine, 4096, 8), Setup(size_bytes=MIB)) is None


@pytest.mark.parametrize(
    ("point", "setup", "depth", "sharing_count"),
    [
        (Point("read", "uring", 4096, 64), Setup(MIB), 64, 1),
        (Point("read", "uring", 4096, 1), Setup(MIB, one_by_one=True), 1, 1),
        (Point("read", "threads", 4096, 64), Setup(MIB), 1, 16),
        (Point("read", "threads", 4096, 64), Setup(MIB, thread_count=5), 1, 5),
        (Point("read", "threads", 4096, 2), Setup(MIB, thread_count=5), 1, 2),
        (Point("read", "threads", MIB, 8), Setup(2 * MIB), 1, 2),
        (Point("read", "threads", MIB, 1), Setup(2 * MIB, one_by_one=True), 1, 1),
    ],
)
def test_fio_has_as_many_requests_in_flight(point: Point, setup: Setup, depth: int, sharing_count: int) -> None:
    job = fio_job(point, setup)
    assert job is not None
    assert (job.depth, job.sharing_count) == (depth, sharing_count)
    assert job.block_bytes == point.block_bytes


@pytest.mark.parametrize(
    ("job", "words", "missing"),
    [
        (FioJob("write", MIB), {"--rw=write", "--direct=1", "--end_fsync=1", "--fallocate=native"}, "--overwrite=1"),
        (FioJob("write", MIB, in_place=True), {"--overwrite=1", "--end_fsync=1"}, "--fallocate=native"),
        (FioJob("read", MIB, random=True), {"--rw=randread", "--readonly"}, "--end_fsync=1"),
        (FioJob("read", MIB, direct=False, engine="psync", sharing_count=3, block_bytes=4096, depth=1),
         {"--direct=0", "--ioengine=psync", "--numjobs=3", "--thread", f"--size={85 * 4096}", "--bs=4096"},
         "--end_fsync=1"),
    ],
)  # fmt: skip
def test_fio_is_asked_for_the_same(job: FioJob, words: set[str], missing: str) -> None:
    command = job.command(["/a:b", "/c"])
    assert words <= set(command)
    assert missing not in command
    assert command[-4:] == ["--name=file0", "--filename=/a\\:b", "--name=file1", "--filename=/c"]
    assert command.index("--name=global") < min(command.index(word) for word in words)


def fake_fio(directory: Path, monkeypatch: pytest.MonkeyPatch, report: str, code: int = 0) -> None:
    """Put a program in front of the real one that says this."""
    program = directory / "bin" / "fio"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{report}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def fio_report(runtime_ms: int, io_bytes: int, *, user_percent: float = 0, system_percent: float = 0) -> dict[str, Any]:
    moved = {"io_bytes": io_bytes, "runtime": runtime_ms, "total_ios": io_bytes // 4096}
    return {"read": moved, "usr_cpu": user_percent, "sys_cpu": system_percent, "job_runtime": runtime_ms}


def test_fio_figures_are_of_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        fio_report(1000, MIB, user_percent=10, system_percent=40),
        fio_report(2000, MIB, user_percent=20, system_percent=5),
    ]
    fake_fio(tmp_path, monkeypatch, "fio: a remark\n" + json.dumps({"jobs": jobs}))

    sample = run_fio(FioJob("read", MIB, block_bytes=4096), ["a", "b"])

    assert (sample.seconds, sample.size_bytes, sample.io_count) == (2.0, 2 * MIB, 512)
    assert sample.cpu_s == pytest.approx(0.5 * 1 + 0.25 * 2)


def test_fio_that_moves_something_else_or_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fio(tmp_path, monkeypatch, json.dumps({"jobs": [fio_report(1000, MIB - 4096)]}))
    with pytest.raises(fp.StorageError, match="fio moved 1044480 bytes instead of 1048576"):
        run_fio(FioJob("read", MIB, block_bytes=4096), ["a"])

    shutil.rmtree(tmp_path / "bin")
    fake_fio(tmp_path, monkeypatch, "no such engine", code=1)
    with pytest.raises(fp.UnsupportedError, match="cannot read here by direct I/O with io_uring: no such engine"):
        run_fio(FioJob("read", MIB), ["a"])


@needs_fio
@pytest.mark.parametrize("direction", ["read", "write", "in place"])
def test_fio_with_many_jobs_on_many_files_moves_all(tmp_path: Path, direction: str) -> None:
    paths = file_paths(str(tmp_path / "x:y"), 2)
    reads = direction == "read"
    if direction != "write":
        for path in paths:
            Path(path).write_bytes(bytes(MIB))
    job = FioJob(
        "read" if reads else "write", MIB, engine="psync", direct=False, block_bytes=4096, depth=1, random=True,
        sharing_count=3, in_place=direction == "in place",
    )  # fmt: skip

    sample = run_fio(job, paths)

    assert sample.size_bytes == 2 * 3 * 85 * 4096
    assert sample.io_count == 2 * 3 * 85
    assert sample.cpu_s is not None
    assert sorted(os.listdir(tmp_path)) == ["x:y.0", "x:y.1"]
    sizes = {os.path.getsize(path) for path in paths}
    assert sizes == {3 * 85 * 4096 if direction == "write" else MIB}


# --- table, JSON ---


def a_result(who: str, point: Point, rate: float, *, ratio: float | None = None, note: str = "") -> IoResult:
    """Return a row that moved a gigabyte at a rate in GB/s; at 0 it has no samples."""
    row = Row(f"{who} {point}", "fastpersist" if who == "TensorFile" else "ceiling", None)
    samples: list[Sample] = [IoSample(1 / rate, 10**9, f"{who}-engine", 1000, 0.004)] if rate else []
    return IoResult(PlannedRow(who, point, row), Measured(row, note, samples), ratio)


def test_table_and_json_say_the_same() -> None:
    setup = Setup(MIB, random=True, in_place=True)
    results = [
        a_result("TensorFile", WRITE, 2.0, ratio=0.5),
        a_result("fio", WRITE, 4.0, ratio=1.0),
        a_result("fio", READ, 0, note="not installed"),
        a_result("fio", WRITE, 0, note="not installed"),
    ]
    facts = dict.fromkeys(
        (
            *("date", "device", "device_model", "file_system", "mount_options", "directory", "kernel"),
            *("architecture", "cpu_model", "fastpersist", "torch", "python", "fio"),
        ),
        "fact",
    ) | {"cpu_count": 2, "memory_bytes": 1 << 30, "load_average": 0.5}

    text = io_report_text("the command", facts, ["a note"], setup, results)
    values = io_report_json("the command", facts, ["a note"], setup, results)

    assert text.startswith("the command\n")
    assert "- a note" in text
    (line,) = [line for line in text.splitlines() if "TensorFile-engine" in line]
    for cell in ("random write in place", "64KiB", "0.500", "2.00", "50 %", "2,000", "4.0"):
        assert cell in line
    assert text.count("not installed") == 1
    assert "and 1 more: not installed" in text
    first = values["rows"][0]
    assert (first["bytes_per_s"], first["io_per_s"], first["ratio_to_fio"]) == (2e9, 2000, 0.5)
    assert first["cpu_us_per_io"] == pytest.approx(4.0)
    assert first["in_place"]
    assert "seconds" not in values["rows"][2]
    assert not values["rows"][2]["in_place"]
    json.dumps(values)
