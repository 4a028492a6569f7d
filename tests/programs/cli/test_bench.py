"""The benchmark: it runs, measures what it says, leaves nothing behind, and does without what is missing."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench_runs import check_interrupted

import fastpersist
from fastpersist import _native, require_engine
from fastpersist.cli import main
from fastpersist.cli.bench import command as bench
from fastpersist.cli.bench.fio import fio_read_row, fio_write_row
from fastpersist.cli.bench.io import rows
from fastpersist.cli.bench.load_rows import PageCache, peer_load_rows
from fastpersist.cli.bench.report import StateResult, report_json
from fastpersist.cli.bench.rows import Measured, Row, Sample, measure
from fastpersist.cli.bench.save_rows import peer_save_rows, usable_engines
from fastpersist.cli.bench.states import StateRecipe, flatten, tensor_bytes
from fastpersist.cli.bench.worker import Job, Worker

MIB = 1 << 20
QUICK_ONE_TENSOR = StateRecipe("one-tensor", quick=True)
needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


def run_quick(command: str, directory: Path, *options: str) -> dict[str, Any]:
    """Run the command in this process and return its JSON."""
    target = directory / "result.json"
    assert main(["bench", command, str(directory), "--quick", "--json", str(target), *options]) == 0
    result: dict[str, Any] = json.loads(target.read_text())
    target.unlink()
    return result


def rows_by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (state,) = result["states"]
    return {row["name"]: row for row in state["rows"]}


def check_schema(result: dict[str, Any], command: str) -> None:
    assert result["format"] == 1
    assert result["command"] == command
    assert result["command_line"].startswith(f"fastpersist bench {command} ")
    machine = result["machine"]
    for fact in ("date", "device", "file_system", "kernel", "cpu_count", "torch", "memory_bytes", "fio"):
        assert fact in machine
    assert machine["torch"] == torch.__version__
    assert result["notes"]
    for state in result["states"]:
        assert state["payload_bytes"] > 0
        assert state["auto_engine"] in _native.engine_names()
        for row in state["rows"]:
            assert row["kind"] in ("ceiling", "fastpersist", "peer")
            assert row["note"] or "seconds" in row
            if "seconds" in row:
                assert row["min_s"] <= row["median_s"] <= row["max_s"]
                assert row["bytes_per_s"] == pytest.approx(row["size_bytes"] / row["median_s"])


# --- the commands ---


def test_bench_save_measures_every_row_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_quick("save", tmp_path)

    check_schema(result, "save")
    rows = rows_by_name(result)
    usable = [probe.name for probe in fastpersist.engines(tmp_path) if probe.usable]
    for name in ("fp.save", "fp.save, threads", "fp.save, checksum=False", "fp.save .safetensors"):
        assert rows[name]["note"] == ""
        assert rows[name]["engine"] in usable
        assert 0 <= rows[name]["peak_bytes"] < 200 * MIB
    assert "fp.save, threads-buffered" not in rows
    for name in ("torch.save + fsync, CRC on", "torch.save + fsync, CRC off", "safetensors save_file + fsync"):
        assert rows[name]["note"] == ""
    for name in ("DCP FileSystemWriter, 1 thread", "DCP FileSystemWriter, 2 threads"):
        assert rows[name]["note"] == ""
    denied = rows["fp.save, io_uring denied"]
    assert denied["note"] or not denied["engine"].startswith("uring")
    if shutil.which("fio") is not None and not rows["fio write"]["note"]:
        assert rows["fio write"]["ratio_to_fio"] == 1.0
        assert rows["fp.save"]["ratio_to_fio"] > 0
    assert list(tmp_path.iterdir()) == []
    table = capsys.readouterr().out
    assert all(name in table for name in rows)


def test_bench_load_goes_without_fio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")

    result = run_quick("load", tmp_path, "--state", "one-tensor", "--all-engines", "--warm")

    check_schema(result, "load")
    rows = rows_by_name(result)
    assert "apt install fio" in rows["fio read"]["note"]
    assert "apt install fio" in capsys.readouterr().out
    for name in ("fp.load", "fp.load, threads-buffered", "fp.load, verify=True", "fp.load_into"):
        assert rows[name]["note"] == ""
        assert rows[name]["ratio_to_fio"] is None
        assert rows[name]["peak_bytes"] < 200 * MIB
    peers = ("torch.load", "torch.load(mmap=True), touched", "safetensors load_file, touched")
    for name in (*peers, "memcpy, 1 thread", "memcpy, 2 threads"):
        assert rows[name]["note"] == ""
    assert any("page cache" in note for note in result["notes"])
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_removes_every_file_and_ends_every_process(tmp_path: Path) -> None:
    words = ["save", str(tmp_path), "--quick", "--repeat", "100000", "--state", "one-tensor"]
    check_interrupted(tmp_path, *words, when=".fastpersist-bench-*/run*", child_count=1)


def test_missing_directory_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "save", str(tmp_path / "none"), "--quick"]) == 2
    assert "none" in capsys.readouterr().err


def test_disk_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    petabyte = str(10**9)
    assert main(["bench", "save", str(tmp_path), "--state", "one-tensor", "--size-mb", petabyte]) == 2
    assert "free, and this needs" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["save", "load", "io", "overlap", "ranks"])
def test_older_results_outlive_a_command_that_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older = tmp_path / "result.json"
    older.write_text("{}")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": MIB}))
    assert main(["bench", command, str(tmp_path), "--size-mb", "4", "--json", str(older)]) == 2
    assert "free, and this needs" in capsys.readouterr().err
    assert older.read_text() == "{}"


def test_unwritable_json_is_refused_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "save", str(tmp_path), "--quick", "--json", str(tmp_path / "none" / "x.json")]) == 2
    assert "x.json" in capsys.readouterr().err


# --- engines ---


def test_engines_that_are_named_have_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(directory: str, engine: str) -> tuple[str, str]:
        return (engine, "") if engine == "cufile" else ("", "the kernel says no")

    def job(_command: str, _recipe: StateRecipe, _payload_bytes: int, engines: list[str]) -> None:
        seen.extend(engines)
        raise fastpersist.UnsupportedError("enough is seen")

    seen: list[str] = []
    monkeypatch.setattr(rows, "resolve_engine", resolve)
    monkeypatch.setattr(bench, "Job", job)
    assert main(["bench", "save", str(tmp_path), "--quick", "--engine", "uring", "cufile"]) == 2
    assert "enough is seen" in capsys.readouterr().err
    assert seen == ["cufile"]


@pytest.mark.parametrize(("engine", "message"), [("uring", "the kernel says no"), ("warp", "no engine 'warp'")])
def test_no_engine_of_those_named_is_an_error(
    engine: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_arguments: object, engine: str) -> None:
        require_engine(engine)
        raise fastpersist.UnsupportedError("the kernel says no")

    monkeypatch.setattr(rows, "TensorFile", refuse)
    assert main(["bench", "load", str(tmp_path), "--quick", "--engine", engine]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_cufile_is_for_those_who_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = [fastpersist.EngineProbe(name, True, "") for name in ("uring", "threads-buffered", "cufile")]
    monkeypatch.setattr(fastpersist, "engines", lambda directory: probes)
    assert usable_engines(str(tmp_path), buffered=True) == ["uring", "threads-buffered"]
    assert usable_engines(str(tmp_path), buffered=False) == ["uring"]


# --- the ceiling ---


@needs_fio
def test_fio_writes_whole_blocks_and_reads_the_same_file(tmp_path: Path) -> None:
    write = fio_write_row(9 * MIB)
    assert write.run is not None
    path = tmp_path / f"file:with colon{write.suffix}"

    try:
        written = write.run(str(path))
    except fastpersist.UnsupportedError as error:
        pytest.skip(str(error))

    assert written.size_bytes == path.stat().st_size == 16 * MIB
    assert written.seconds > 0
    os.truncate(path, 9 * MIB)
    read = fio_read_row(".fio")
    assert read.run is not None
    assert read.run(str(path)).size_bytes == 8 * MIB
    assert path.stat().st_size == 9 * MIB


@needs_fio
def test_jobs_of_fio_write_whole_blocks_of_one_file(tmp_path: Path) -> None:
    row = fio_write_row(17 * MIB, job_count=2)
    assert row.name == "fio write, 2 jobs"
    assert row.run is not None
    try:
        written = row.run(str(tmp_path / "x"))
    except fastpersist.UnsupportedError as error:
        pytest.skip(str(error))
    assert written.size_bytes == (tmp_path / "x").stat().st_size == 32 * MIB


def test_another_engine_of_fio_finds_no_file_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"write": {"io_bytes": 8 * MIB, "runtime": 5, "total_ios": 1}, "usr_cpu": 0, "sys_cpu": 0, "job_runtime": 5}
    program = tmp_path / "bin" / "fio"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\ncase "$*" in *ioengine=io_uring*) echo refused >&2; exit 1;; esac\n'
        f"echo '{json.dumps({'jobs': [job, job]})}'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    row = fio_write_row(16 * MIB, job_count=2)
    assert row.run is not None
    sample = row.run(str(tmp_path / "x"))
    assert (sample.engine, sample.size_bytes, sample.seconds) == ("libaio", 16 * MIB, 0.005)


def test_rates_are_told_relative_to_fio() -> None:
    ceiling = Measured(Row("fio write", "ceiling", None), "", [Sample(2.0, 4000)])
    ours = Measured(Row("fp.save", "fastpersist", None), "", [Sample(1.0, 1500), Sample(9.0, 1500), Sample(1.5, 1500)])
    result = report_json("save", "", {}, [], [StateResult("s", 1500, 1, "uring", [ceiling, ours])])
    _, row = result["states"][0]["rows"]
    assert (row["median_s"], row["min_s"], row["max_s"]) == (1.5, 1.0, 9.0)
    assert row["bytes_per_s"] == 1000
    assert row["ratio_to_fio"] == 0.5


# --- without io_uring ---


def test_sandbox_denies_io_uring_and_nothing_else(tmp_path: Path) -> None:
    source = (
        "import json, sys, fastpersist\n"
        "from fastpersist.cli.bench.sandbox import deny_io_uring\n"
        "deny_io_uring()\n"
        "print(json.dumps({p.name: [p.usable, p.why_not] for p in fastpersist.engines(sys.argv[1])}))\n"
    )
    child = subprocess.run([sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True, check=False)
    if "takes no system call filter" in child.stderr or "no system call filter is known" in child.stderr:
        pytest.skip(child.stderr.splitlines()[-1])
    assert child.returncode == 0, child.stderr

    inside = json.loads(child.stdout)

    for probe in fastpersist.engines(tmp_path):
        usable, why_not = inside[probe.name]
        if probe.name.startswith("uring"):
            assert not usable
            assert os.strerror(errno.EPERM) in why_not
        else:
            assert usable == probe.usable


# --- the second process ---


@pytest.mark.parametrize("apart", [False, True])
def test_worker_goes_on_after_a_row_failed(tmp_path: Path, apart: bool) -> None:
    job = Job("save", QUICK_ONE_TENSOR, QUICK_ONE_TENSOR.payload_bytes(), ["threads"], apart=apart)
    with Worker(job) as worker:
        assert worker.rows()["fp.save, threads"] == ".pt"
        with pytest.raises(fastpersist.UnsupportedError, match="No such file or directory"):
            worker.run("fp.save", str(tmp_path / "none" / "x.pt"))

        sample, peak_bytes = worker.run("fp.save, threads", str(tmp_path / "x.pt"))

    assert sample.engine == "threads"
    assert peak_bytes is None or 0 < peak_bytes < 200 * MIB
    assert tensor_bytes(fastpersist.load(tmp_path / "x.pt")) == sample.size_bytes


def test_dead_worker_is_an_error_not_a_hang() -> None:
    worker = Worker(Job("load", QUICK_ONE_TENSOR, QUICK_ONE_TENSOR.payload_bytes(), []))
    worker.rows()
    worker.end()
    with pytest.raises(fastpersist.UnsupportedError, match="has ended"):
        worker.run("fp.load", "x.pt")


# --- states ---


@pytest.mark.parametrize(
    ("name", "parameter_count", "tensor_count"),
    [("gpt-29m", 28_942_848, 52), ("gpt2-124m", 124_439_808, 148), ("gpt2-355m", 354_823_168, 292)],
)
def test_gpt2_states_have_the_real_size(name: str, parameter_count: int, tensor_count: int) -> None:
    # parameter and two moments in float32, and a float32 step for each tensor
    assert StateRecipe(name).payload_bytes() == 3 * 4 * parameter_count + 4 * tensor_count


def test_ten_thousand_small_tensors_are_small() -> None:
    with torch.device("meta"):
        tensors = flatten(StateRecipe("small-tensors")._lay_out())
    assert len(tensors) == 10_000
    assert all(1024 <= tensor.nbytes <= 65536 for tensor in tensors.values())


def test_recipe_builds_the_same_state_again() -> None:
    recipe = StateRecipe("gpt2-124m", quick=True)
    first, second = recipe.build(), recipe.build()
    assert first.payload_bytes == recipe.payload_bytes()
    one, other = flatten(first.tree), flatten(second.tree)
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["model.transformer.wte.weight"].std() > 0.5


# --- rounds ---


def test_every_row_runs_once_per_round() -> None:
    ran: list[str] = []

    def row(name: str) -> Row:
        def run(path: str) -> Sample:
            ran.append(name)
            return Sample(1.0, 1)

        return Row(name, "peer", run)

    results = measure([row("a"), row("b"), row("c")], 3, before=lambda suffix: suffix, after=lambda: None)
    assert [result.row.name for result in results] == ["a", "b", "c"]
    assert [sorted(ran[index : index + 3]) for index in (0, 3, 6)] == [["a", "b", "c"]] * 3


def test_failing_row_is_cleared_away_and_noted() -> None:
    cleared: list[int] = []

    def fail(path: str) -> Sample:
        raise OSError(errno.EIO, "broken")

    rows = [Row("bad", "peer", fail), Row("absent", "peer", None, why_not="not installed")]
    bad, absent = measure(rows, 3, before=lambda suffix: suffix, after=lambda: cleared.append(1))
    assert bad.note == "failed: OSError: [Errno 5] broken"
    assert cleared == [1]
    assert absent.note == "not installed"
    assert not bad.samples
    assert not absent.samples


# --- rows ---


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_peers_write_what_their_own_readers_read(tmp_path: Path) -> None:
    state = StateRecipe("small-tensors", quick=True).build()
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    for row in peer_save_rows(state):
        if row.run is None:
            continue
        path = tmp_path / f"{row.name.replace(' ', '-')}{row.suffix}"
        assert row.run(str(path)).size_bytes == state.payload_bytes
        if row.suffix == ".dcp":
            assert len(FileSystemReader(path).read_metadata().state_dict_metadata) == state.tensor_count
    fastpersist.save(state.tree, tmp_path / "x.pt")
    fastpersist.save(state.tree, tmp_path / "x.safetensors")
    for row in peer_load_rows(state.payload_bytes):
        if row.run is not None:
            assert row.run(str(tmp_path / f"x{row.suffix}")).size_bytes == state.payload_bytes


def test_load_row_notices_a_result_that_is_not_whole(tmp_path: Path) -> None:
    fastpersist.save({"a": torch.zeros(10)}, tmp_path / "x.pt")
    row = peer_load_rows(41)[0]
    assert row.run is not None
    with pytest.raises(fastpersist.StorageError, match="40 bytes of tensors instead of 41"):
        row.run(str(tmp_path / "x.pt"))


# --- page cache ---


@pytest.mark.parametrize(
    ("warm", "cached_count", "words"),
    [
        (True, 4, "all of it was there"),
        (True, 3, "up to 4096 bytes were missing"),
        (False, 0, "none of it was left"),
        (False, 1, "up to 4096 bytes were left: NOT COLD"),
    ],
)
def test_page_cache_says_which_pages_the_kernel_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool, cached_count: int, words: str
) -> None:
    class Libc:  # what stays in memory is for the kernel to decide
        def mincore(self, address: ctypes.c_void_p, size: ctypes.c_size_t, pages: ctypes.Array[ctypes.c_ubyte]) -> int:
            assert size.value == 4 * mmap.PAGESIZE
            pages[:cached_count] = [1] * cached_count
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Libc())
    path = tmp_path / "x"
    path.write_bytes(bytes(4 * mmap.PAGESIZE))
    cache = PageCache(warm=warm, whole_machine=False)
    cache.prepare(str(path))
    assert cache.describe().endswith(f"checked each time: {words}")


@pytest.mark.parametrize("warm", [False, True])
def test_page_cache_asks_the_kernel(tmp_path: Path, warm: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(4 * MIB))
    cache = PageCache(warm=warm, whole_machine=False)
    cache.prepare(str(path))
    assert "checked each time" in cache.describe()
