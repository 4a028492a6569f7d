"""`fastpersist info`: what is said of an engine and of a directory is what they do."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest
import torch

import fastpersist as fp
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
