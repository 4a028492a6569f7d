"""`fastpersist info`: what is said of an engine and of a directory is what they do."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.cuda_double import cuda_double
from support.cufile_double import SAYS_P2P, SAYS_POSIX, CuFileDouble, cufile_double

import fastpersist as fp
from fastpersist import _native
from fastpersist.cli import main
from fastpersist.cli.info import filesystem_name


def test_json_has_the_documented_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "fastpersist",
        "torch",
        "python",
        "kernel",
        "machine",
        "crc32",
        "ring_bytes",
        "chunk_bytes",
        "tuned_by",
        "directory",
        "filesystem",
        "direct_io",
        "engines",
        "auto",
        "gpu",
    ]
    assert found["tuned_by"] is None
    assert found["torch"] == torch.__version__
    assert found["kernel"] == platform.release()
    assert found["ring_bytes"] % found["chunk_bytes"] == 0
    assert found["directory"] == str(tmp_path.resolve())
    assert set(found["direct_io"]) == {
        "supported",
        "memory_alignment_bytes",
        "offset_alignment_bytes",
        "why_not",
    }
    assert [(e["name"], e["usable"]) for e in found["engines"]] == [(p.name, p.usable) for p in fp.engines(tmp_path)]
    assert {tuple(engine) for engine in found["engines"]} == {("name", "usable", "why_not", "way")}
    assert list(found["gpu"]) == ["torch", "is_started", "usable", "why_not", "pinned_bytes", "why_not_pinned"]
    assert list(tmp_path.iterdir()) == []


def test_auto_is_the_engine_that_a_save_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", str(tmp_path), "--json"])
    auto = json.loads(capsys.readouterr().out)["auto"]
    report = fp.save({"weight": torch.ones(100)}, tmp_path / "model.pt")
    assert auto == report.engine


def test_auto_follows_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPERSIST_ENGINE", "threads-buffered")
    assert main(["info", str(tmp_path)]) == 0
    assert "auto would take threads-buffered" in capsys.readouterr().out


def test_unusable_engines_come_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = [
        fp.EngineProbe("uring", False, "io_uring_setup: Operation not permitted"),
        fp.EngineProbe("threads-buffered", True, ""),
    ]
    monkeypatch.setattr(fp, "engines", lambda directory: probes)
    monkeypatch.delenv("FASTPERSIST_ENGINE", raising=False)
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "no: io_uring_setup: Operation not permitted" in text
    assert "auto would take threads-buffered" in text


def test_no_usable_engine_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp, "engines", lambda directory: [fp.EngineProbe("uring", False, "no")])
    assert main(["info", str(tmp_path)]) == 0
    assert "nothing can be saved here" in capsys.readouterr().out
    assert main(["info", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auto"] is None


def test_missing_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastpersist: error: ")
    assert str(tmp_path / "nowhere") in error


def test_nonsense_in_the_environment_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPERSIST_RING_BYTES", "plenty")
    assert main(["info", str(tmp_path)]) == 2
    assert "FASTPERSIST_RING_BYTES" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="without /proc there are no names")
def test_filesystem_name_is_that_of_the_innermost_mount() -> None:
    assert filesystem_name("/proc/self") == "proc"
    assert filesystem_name("/") not in ("proc", "unknown")


def test_the_values_of_a_tuning_file_and_its_name_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = tmp_path / "tuning.toml"
    tuning.write_text('engine = "threads"\nchunk_bytes = 1048576\n')
    monkeypatch.setenv("FASTPERSIST_CONFIG", str(tuning))
    assert main(["info", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tuned_by"], found["chunk_bytes"]) == (str(tuning), 1 << 20)
    assert main(["info", str(tmp_path)]) == 0
    assert f"tuned by     {tuning}" in capsys.readouterr().out


# --- GPUs


@pytest.fixture
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that is built for CUDA, and has not started it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.fixture
def cufile(built_for_cuda: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuFileDouble]:
    """The doubles of driver and libcufile, below a torch that has a device."""
    double = cufile_double()
    cuda_double().clear()
    double.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("fastpersist.transfer.gpudirect._MODULES", os.devnull)  # not every machine lists its modules
    monkeypatch.setattr(torch.cuda, "init", lambda: monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True))
    yield double
    double.clear()
    cuda_double().clear()


def engine_line(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.split()[:1] == [name])


def test_torch_without_gpus_is_all_there_is_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, None, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "GPU          none for this torch" in text
    assert engine_line(text, "cufile").endswith("no: this torch has no GPUs")


def test_why_torch_copies_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    built_for_cuda: None,
) -> None:
    monkeypatch.setattr(_native, "cuda_driver_why_not", lambda: "the driver is from 2009")
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "GPU          torch for CUDA 13.0 copies from and to it, piece by piece: the driver is from 2009" in text
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert main(["info", str(tmp_path)]) == 0
    assert "GPU          torch for ROCm 6.3 copies from and to it, piece by piece: " in capsys.readouterr().out


def test_cuda_is_not_started_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cufile: CuFileDouble
) -> None:
    for starts in ("cuda_why_not", "cufile_why_not"):
        monkeypatch.setattr(_native, starts, lambda: pytest.fail("started CUDA"))
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "copies from and to it are fastpersist's own, if the driver, which is there, starts" in text
    assert "--gpu" in engine_line(text, "cufile")
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("says", "way"), [(SAYS_P2P, "peer to peer"), (SAYS_POSIX, "compatibility mode: through host memory")]
)
def test_way_of_cufile_is_told_where_cuda_may_start(
    says: int, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], cufile: CuFileDouble
) -> None:
    cufile.set_way(says)
    assert main(["info", str(tmp_path), "--gpu"]) == 0
    text = capsys.readouterr().out
    assert engine_line(text, "cufile").endswith(f"usable ({way})")
    assert "are fastpersist's own\n" in text
    assert main(["info", str(tmp_path), "--json"]) == 0  # of a process that has started it
    found = json.loads(capsys.readouterr().out)
    assert {engine["name"]: engine["way"] for engine in found["engines"] if engine["way"]} == {"cufile": way}
    gpu = found["gpu"]
    assert (gpu["torch"], gpu["is_started"], gpu["usable"], gpu["why_not"]) == ("CUDA 13.0", True, True, "")
    assert gpu["pinned_bytes"] == _native.pinned_bytes()
    assert found["auto"] != "cufile"
    assert list(tmp_path.iterdir()) == []


def test_device_whose_memory_cufile_cannot_take_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cufile: CuFileDouble
) -> None:
    cufile.fail("cuFileBufRegister", 0, 5016)
    assert main(["info", str(tmp_path), "--gpu"]) == 0
    assert "usable (from host memory alone: " in engine_line(capsys.readouterr().out, "cufile")


def test_cufile_of_the_environment_is_what_auto_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cufile: CuFileDouble
) -> None:
    monkeypatch.setenv("FASTPERSIST_ENGINE", "cufile")
    assert main(["info", str(tmp_path)]) == 0
    assert "auto would take cufile" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pinned_bytes", "why_not", "words"),
    [(0, "", "nothing yet"), (64 << 20, "", "67.1 MB of host memory"), (0, "the limit is 8 MiB", "no: the limit")],
)
def test_pinned_memory_is_told(
    pinned_bytes: int,
    why_not: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cufile: CuFileDouble,
) -> None:
    monkeypatch.setattr(_native, "pinned_bytes", lambda: pinned_bytes)
    monkeypatch.setattr(_native, "why_not_pinned", lambda: why_not)
    assert main(["info", str(tmp_path)]) == 0
    assert f"pinned       {words}" in capsys.readouterr().out
