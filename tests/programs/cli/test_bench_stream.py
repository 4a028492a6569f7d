"""`bench stream` with a small model: every way generates in a process of its own, which imports transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.bench_runs import check_interrupted

import fastpersist as fp
from fastpersist.cli import main
from fastpersist.cli.bench.stream.memory_limit import MemoryLimit
from fastpersist.cli.bench.stream.model import make_model, weight_sizes
from fastpersist.cli.bench.stream.ways import OURS, PACKAGES, RESIDENT

for package in ("transformers", "accelerate", "safetensors"):
    pytest.importorskip(package)

WORDS = ["--model", "small", "--gen-len", "3", "--repeat", "1"]


def groups() -> list[str]:
    """Return the cgroups that the command has made in this process."""
    return [place for place, _, _ in os.walk("/sys/fs/cgroup") if f"fastpersist-bench-{os.getpid()}" in place]


def can_limit() -> bool:
    try:
        MemoryLimit("fastpersist-test").close()
    except fp.UnsupportedError:
        return False
    return True


def test_every_way_is_measured_against_the_limit_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    words = [*WORDS, "--layers", "8", "--budget", "24MiB", "--json", str(target)]
    assert main(["bench", "stream", str(tmp_path), *words]) == 0
    result = json.loads(target.read_text())
    target.unlink()
    assert list(tmp_path.iterdir()) == []
    assert groups() == []
    assert result["command_line"] == (
        f"fastpersist bench stream {tmp_path} --model small --layers 8 --budget 24MiB --gen-len 3 --repeat 1"
    )
    assert any("memory was NOT held down" in note for note in result["notes"]) is not can_limit()
    rows = {row["name"]: row for row in result["rows"]}
    for way, package in PACKAGES.items():
        if find_spec(package) is None:
            assert rows.pop(way)["note"] == f"not installed: pip install {package}"
    assert all(not row["note"] for name, row in rows.items() if name != "fio read"), rows
    ours = rows[f"{OURS}, 0.0252 GB"]
    assert ours["runs"][0]["stats"]["streamed_bytes"] == ours["size_bytes"] > 0
    for row in rows.values():
        if row["name"] == RESIDENT or row["kind"] != "ceiling":
            assert row["of_limit"] > 0
            assert row["peak_bytes"] > 0
            assert len(row["runs"][0]["passes_s"]) == 2
    assert min(row["of_best_peer"] for row in rows.values() if row["kind"] == "peer") <= 1
    table = capsys.readouterr().out
    assert all(name in table for name in rows)


def test_process_that_takes_more_than_its_limit_is_ended() -> None:
    if not can_limit():
        pytest.skip("no memory cgroup can be made here")
    program = "import sys; sys.stdin.readline(); b = bytearray(int(sys.argv[1]) << 20); print(len(b))"
    for size_mib, code in ((16, 0), (256, -signal.SIGKILL)):
        with MemoryLimit("fastpersist-test") as limit:
            words = [sys.executable, "-c", program, str(size_mib)]
            with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
                limit.add(child.pid)
                limit.hold_down(128 << 20)
                child.communicate(b"go\n")
            assert child.returncode == code
            peak_bytes = limit.peak_bytes()
            assert peak_bytes is None or size_mib << 20 <= peak_bytes <= 128 << 20 or code
    assert not os.path.exists("/sys/fs/cgroup/memory/fastpersist-test")


def test_budget_above_the_memory_is_refused_before_a_file_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not can_limit():
        pytest.skip("no memory cgroup can be made here")
    assert main(["bench", "stream", str(tmp_path), *WORDS, "--budget", "1GiB"]) == 2
    assert "--budget 1GiB is more than --memory half" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_disk_without_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    assert main(["bench", "stream", str(tmp_path), *WORDS, "--memory", "all"]) == 2
    assert "or a smaller --layers" in capsys.readouterr().err


def test_ctrl_c_removes_every_file_and_ends_every_process(tmp_path: Path) -> None:
    words = ["stream", str(tmp_path), *WORDS[:-1], "100000", "--memory", "all", "--budget", "40MiB"]
    check_interrupted(tmp_path, *words, when=".fastpersist-bench-*/offload/index.json", child_count=0)


def test_forms_of_the_model_hold_the_same_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    files = make_model(str(tmp_path), "small", 1)
    stock = {name: tensor for path in files.paths(".safetensors") for name, tensor in load_file(path).items()}
    torch_form = {name: tensor for path in files.torch_paths for name, tensor in torch.load(path).items()}
    assert sum(tensor.nbytes for tensor in stock.values()) == files.weight_bytes == sum(weight_sizes("small", 1))
    assert stock.keys() == torch_form.keys()
    assert all(torch.equal(stock[name], torch_form[name]) for name in stock)
    assert {Path(path).stem for path in files.paths(".dat")} == stock.keys()
