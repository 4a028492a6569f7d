"""`bench io`: it measures what it says beside fio with the same requests, notices wrong bytes, and leaves nothing.

What it is put together from (parameters, fio, table) is tested in test_bench_io_parts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp
from fastpersist import _native
from fastpersist.cli import main
from fastpersist.cli.bench.io import command as bench_io
from fastpersist.cli.bench.io import rows
from fastpersist.cli.bench.io.points import IoSample, Point, Setup
from fastpersist.cli.bench.io.worker import IoProcesses, Requests, Timing, together
from fastpersist.transfer import tensor_file

KIB, MIB = 1 << 10, 1 << 20
READ, WRITE = Point("read", "threads", 64 * KIB, 4), Point("write", "threads", 64 * KIB, 4)

torch.set_num_threads(1)


def run_io(directory: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """Run the command in this process and return its JSON."""
    target = directory / "result.json"
    assert main(["bench", "io", str(directory), "--json", str(target), *options]) == code
    result: dict[str, Any] = json.loads(target.read_text())
    target.unlink()
    return result


def own_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["who"] == "TensorFile"]


# --- the command ---


def test_every_combination_is_measured_beside_fio_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_io(
        tmp_path, "--size-mb", "4", "--block", "1MiB", "256KiB", "--depth", "2", "8", "--repeat", "1", "--validate"
    )

    assert (result["format"], result["command"]) == (1, "io")
    assert result["command_line"].startswith(
        f"fastpersist bench io {tmp_path} --size-mb 4 --block 1MiB 256KiB --depth 2 8"
    )
    assert result["machine"]["torch"] == torch.__version__
    found = [(row["direction"], row["block_bytes"], row["depth"]) for row in own_rows(result)]
    blocks_and_depths = [(MIB, 2), (MIB, 8), (256 * KIB, 2), (256 * KIB, 8)]
    assert found == [(direction, *both) for direction in ("write", "read") for both in blocks_and_depths]
    for row in own_rows(result):
        assert row["note"] == ""
        assert row["engine"] in _native.engine_names()
        assert row["size_bytes"] == 4 * MIB
        assert row["bytes_per_s"] == pytest.approx(4 * MIB / row["median_s"])
        assert row["io_per_s"] == pytest.approx(4 * MIB / row["block_bytes"] / row["median_s"])
        assert row["cpu_us_per_io"] > 0
    for ours, fio in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        assert fio["kind"] == "ceiling"
        assert [ours[name] for name in ("what", "block_bytes", "depth")] == [
            fio[name] for name in ("what", "block_bytes", "depth")
        ]
        if shutil.which("fio") is not None and not fio["note"]:
            assert ours["ratio_to_fio"] == pytest.approx(ours["bytes_per_s"] / fio["bytes_per_s"])
            assert fio["ratio_to_fio"] == 1.0
            assert fio["size_bytes"] == 4 * MIB
    assert list(tmp_path.iterdir()) == []
    table = capsys.readouterr().out
    assert len(re.findall(r"^(?:read|write) .* TensorFile, [a-z]", table, re.MULTILINE)) == 8
    assert "dropped from the page cache" in table


def test_options_reach_the_rows_and_in_place_is_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_io(
        tmp_path,
        *("--write", "--in-place", "--random", "--processes", "2", "--engine", "threads-buffered", "--threads", "3"),
        *("--size-mb", "1", "--memory", "plain", "--no-fio", "--repeat", "3", "--validate"),
    )

    (row,) = result["rows"]
    assert row["note"] == ""
    assert len(row["seconds"]) == 3
    assert row["min_s"] <= row["median_s"] <= row["max_s"]
    assert row["in_place"]
    assert (row["what"], row["engine"]) == ("random write in place", "threads-buffered")
    assert (row["block_bytes"], row["depth"]) == (4096, 64)
    assert row["size_bytes"] == 2 * MIB
    assert row["ratio_to_fio"] is None
    setup = result["setup"]
    assert (setup["process_count"], setup["thread_count"], setup["memory"]) == (2, 3, "plain")
    text = capsys.readouterr().out
    assert "random write in place" in text
    assert "IOPS" in text
    assert "CPU µs per I/O" in text
    assert "over the blocks of a file that was there" in text
    assert list(tmp_path.iterdir()) == []


def test_goes_without_fio_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")

    result = run_io(tmp_path, "--read", "--sync", "--size-mb", "1", "--block", "512KiB", "--repeat", "1", "--validate")

    ours, fio = result["rows"]
    assert (ours["note"], ours["depth"]) == ("", 1)
    assert "apt install fio" in fio["note"]
    assert capsys.readouterr().out.count("apt install fio") == 1


def test_wrong_bytes_fail_the_row_and_the_command(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The null engine moves nothing, and says that all went well. TensorFile refuses it, but not here.
    monkeypatch.setattr(tensor_file, "refuse_null_engine", lambda used: None)
    lenient = tmp_path_factory.mktemp("lenient")
    lenient.joinpath("sitecustomize.py").write_text(
        "from fastpersist.transfer import tensor_file\ntensor_file.refuse_null_engine = lambda used: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(lenient), prepend=os.pathsep)
    options = ("--engine", "null", "--size-mb", "1", "--block", "64KiB", "--repeat", "2", "--no-fio")
    result = run_io(tmp_path, *options, "--validate", code=1)

    assert [row["note"].split(":")[0] for row in result["rows"]] == ["failed", "failed"]
    assert "is not what was written (at offset 0)" in result["rows"][0]["note"]
    assert "is not what was read (at offset 0)" in result["rows"][1]["note"]
    assert "is not what was" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--block", "100"), "multiple of 4096"),
        (("--block", "8M"), "KiB and MiB by 1024"),
        (("--block", "4MiB", "--size-mb", "2"), "at most --size-mb"),
        (("--depth", "5000"), "no more than 4096"),
        (("--sync", "--depth", "4"), "leave --depth out"),
        (("--read", "--in-place"), "reading only"),
        (("--device", "cuda", "--memory", "plain"), "--memory is about host tensors"),
        (("--engine", "warp"), "no engine 'warp'"),
        (("--size-mb", "1", "--processes", "1000000000"), "more memory than is available"),
        (("--json", "none/x.json"), "x.json"),
    ],
)
def test_senseless_options_are_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert main(["bench", "io", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_gpu_without_a_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "io", str(tmp_path), "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--block", "8X"], ["--block", "8MiB", "/data"], ["--depth", "0"]])
def test_words_that_make_no_command_are_usage_errors(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["bench", "io", str(tmp_path), *words])
    assert raised.value.code == 2


def test_missing_directory_and_full_disk_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "io", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err

    full = types.SimpleNamespace(total=10**12, used=10**12, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert main(["bench", "io", str(tmp_path), "--size-mb", "1"]) == 2
    assert "0 bytes free" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_memory_is_plain_and_said_to_be_where_it_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(shape: object, dtype: object) -> torch.Tensor:
        raise fp.StorageError(12, "RLIMIT_MEMLOCK is too small")

    monkeypatch.setattr(bench_io, "locked_tensor", refuse)
    result = run_io(tmp_path, "--read", "--size-mb", "1", "--block", "64KiB", "--no-fio", "--repeat", "1")

    assert result["setup"]["memory"] == "plain"
    assert any("RLIMIT_MEMLOCK is too small" in note for note in result["notes"])
    assert own_rows(result)[0]["note"] == ""


def test_engine_that_cannot_be_used_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(directory: str, engine: str) -> tuple[str, str]:
        return ("", "the kernel says no") if engine == "uring" else (engine, "")

    monkeypatch.setattr(rows, "resolve_engine", resolve)
    options = ("--read", "--size-mb", "1", "--no-fio", "--repeat", "1", "--engine", "uring")

    result = run_io(tmp_path, *options, "threads-buffered")

    assert [row["engine"] for row in result["rows"]] == ["threads-buffered"]
    assert "engine uring is left out: the kernel says no" in result["notes"]
    assert main(["bench", "io", str(tmp_path), *options]) == 2
    assert "the kernel says no" in capsys.readouterr().err


def test_ctrl_c_removes_every_file_and_ends_every_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from fastpersist.cli import main; sys.exit(main())"]
    options = ["--size-mb", "2", "--block", "64KiB", "--repeat", "100000", "--processes", "2", "--no-fio", "--read"]
    bench = subprocess.Popen([*command, "bench", "io", str(tmp_path), *options], stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while not list(tmp_path.glob(".fastpersist-bench-*/read.1")):
            assert bench.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        workers = [int(word) for word in Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()]
        assert len(workers) == 2
        bench.send_signal(signal.SIGINT)
        assert bench.wait(timeout=60) == 130
    finally:
        bench.kill()
        bench.wait()
    assert list(tmp_path.iterdir()) == []
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


# --- the processes ---


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("point", [READ, WRITE])
def test_file_and_memory_are_compared_block_by_block(tmp_path: Path, point: Point, random: bool) -> None:
    path = tmp_path / "x"
    requests = Requests(Setup(size_bytes=MIB, random=random, validate=True), seed=1)
    if point.direction == "read":
        requests.lay_out(str(path))
    requests.arm(point, str(path))

    timing = requests.go()

    assert (timing.moved_bytes, timing.io_count, timing.engine) == (MIB, 16, "threads")
    assert timing.end_s > timing.start_s
    requests.check()
    with path.open("r+b") as file:
        file.seek(5 * 64 * KIB + 100)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(fp.CorruptionError, match=rf"offset {5 * 64 * KIB}\)"):
        requests.check()


def test_a_read_or_an_overwrite_that_did_nothing_is_noticed(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    requests = Requests(Setup(size_bytes=MIB, in_place=True, validate=True), seed=1)
    requests.lay_out(path)
    for point in (READ, WRITE):
        requests.arm(point, path)  # and no run
        with pytest.raises(fp.CorruptionError):
            requests.check()
        requests.go()
        requests.check()
    # The second time as well: what the first run wrote is not what this one must write.
    requests.arm(WRITE, path)
    with pytest.raises(fp.CorruptionError):
        requests.check()


def test_a_file_that_ends_early_is_different(tmp_path: Path) -> None:
    path = tmp_path / "x"
    requests = Requests(Setup(size_bytes=MIB), seed=1)
    requests.arm(WRITE, str(path))
    requests.go()
    os.truncate(path, MIB - 1)
    with pytest.raises(fp.CorruptionError, match=rf"offset {15 * 64 * KIB}\)"):
        requests.check()


def test_random_order_has_every_block_once() -> None:
    requests = Requests(Setup(size_bytes=MIB, random=True), seed=1)
    requests.arm(READ, "x")
    offsets = [offset_bytes for _, offset_bytes in requests._requests]
    assert offsets != sorted(offsets)
    assert sorted(offsets) == list(range(0, MIB, 64 * KIB))


def test_rest_of_less_than_a_block_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x"
    requests = Requests(Setup(size_bytes=MIB), seed=1)
    requests.arm(Point("write", "threads", 384 * KIB, 2), str(path))
    assert requests.go().moved_bytes == path.stat().st_size == 768 * KIB


def test_time_runs_from_the_first_start_to_the_last_end() -> None:
    timings = [Timing(10.0, 12.0, 0.5, 100, 3, "uring"), Timing(10.5, 13.0, 0.25, 200, 4, "uring")]
    assert together(timings) == IoSample(3.0, 300, "uring", io_count=7, cpu_s=0.75)


def test_failure_in_a_process_is_the_rows_and_the_next_row_runs(tmp_path: Path) -> None:
    with IoProcesses(Setup(size_bytes=MIB)) as processes:
        with pytest.raises(fp.StorageError, match="No such file"):
            processes.run(WRITE, str(tmp_path / "none" / "x"))
        sample = processes.run(WRITE, str(tmp_path / "x"))
        assert (sample.size_bytes, sample.io_count) == (MIB, 16)

        processes._ends[0]._process.kill()
        with pytest.raises(fp.UnsupportedError, match="has ended"):
            processes.run(WRITE, str(tmp_path / "y"))


def test_process_that_cannot_have_its_memory_says_so() -> None:
    with pytest.raises(fp.UnsupportedError, match="RuntimeError"):
        IoProcesses(Setup(size_bytes=MIB, device="nowhere"))  # type: ignore[arg-type]
