"""`fastpersist watch`: what it shows of a root, beside a save that is held at a known moment."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from support.runs import held_writers

import fastpersist as fp
from fastpersist.cli import main
from fastpersist.cli.watch import read_root
from fastpersist.events.delivery import flush


def once(root: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["watch", str(root), "--once", *options]) == 0
    return capsys.readouterr().out


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"weight": torch.randn(100_000)})
            checkpoints.wait()
    assert flush(60)
    return tmp_path / "run"


def test_root_at_rest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = once(root, capsys)
    assert "newest step 20" in text
    assert "no save is under way" in text
    assert "step 10: 4" in text
    assert "stall" in text
    assert "more such steps" in text


def test_json_has_the_keys_of_the_help(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(once(root, capsys, "--json"))
    assert set(found) == {
        "time_s", "root", "newest", "flights", "steps", "failures", "free_bytes", "room_count"
    }  # fmt: skip
    assert (found["newest"], found["flights"], found["failures"]) == (20, [], [])
    assert [step["step"] for step in found["steps"]] == [10, 20]
    assert found["room_count"] == found["free_bytes"] // found["steps"][-1]["bytes"]


def test_save_in_flight(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.nn.Parameter(torch.zeros(100_000))
    checkpoints = fp.Checkpointer(root, optimizer=torch.optim.SGD([weight]), gate="manual")
    with held_writers() as writers:
        checkpoints.save(30, {"weight": weight})
        assert writers.reached.wait(60)
        assert flush(0) in (True, False)
        first = json.loads(once(root, capsys, "--json"))
        (flight,) = first["flights"]
        assert (flight["step"], flight["written_bytes"], flight["captured"]) == (30, 0, False)
        assert "saving step 30" in once(root, capsys)
        checkpoints.wait_captured()
        assert flush(60)
        assert read_root(str(root)).flights[0].captured
    checkpoints.close()
    assert read_root(str(root)).flights == []
    assert read_root(str(root)).newest == 30


def test_rate_is_that_since_the_reading_before(tmp_path: Path) -> None:
    pending = tmp_path / ".step-00000001.pending-0011223344556677"
    pending.mkdir()
    data = pending / "state.pt"
    data.write_bytes(bytes(range(256)) * 4096)
    os.truncate(data, 1 << 30)
    first = read_root(str(tmp_path))
    first.time_s -= 2
    with open(data, "r+b") as file:
        file.seek(1 << 20)
        file.write(bytes(range(256)) * 8192)
    second = read_root(str(tmp_path), first)
    assert first.flights[0].written_bytes == 1 << 20
    assert first.flights[0].bytes_per_s is None
    assert second.flights[0].written_bytes == 3 << 20
    rate = second.flights[0].bytes_per_s
    assert rate is not None
    assert 0 < rate <= (2 << 20) / 2


def test_failures_are_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = fp.Checkpointer(root, on_error="warn")
    with held_writers():
        checkpoints.save(30, {"weight": torch.zeros(10)}).cancel(fp.StorageError(5, "writing: error\n", "state.pt"))
    with pytest.warns(RuntimeWarning, match="not saved"):
        checkpoints.close()
    assert flush(60)
    assert "step 30 failed: StorageError: writing: error\\n" in once(root, capsys)


def test_root_without_a_log_is_watched_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in root.glob("events*"):
        path.unlink()
    text = once(root, capsys)
    assert "newest step 20" in text
    assert "step 10: 4" in text
    assert "more such steps" in text


def test_watching_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    once(root, capsys)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_missing_root_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "none"), "--once"]) == 2
    assert "listing" in capsys.readouterr().err


def test_step_is_no_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(root / "step-00000010"), "--once"]) == 2
    assert f"step-00000010 is one checkpoint: name the directory that holds it, {root}" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "x"])
def test_readings_are_some_seconds_apart(seconds: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(root), "--every", seconds])
    assert "--every" in capsys.readouterr().err


def test_without_a_terminal_lines_come_until_the_reader_leaves(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    done = threading.Event()

    def show(text: str, **_: object) -> None:
        printed.append(text)
        if len(printed) == 3:
            done.set()
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", show)
    assert main(["watch", str(root), "--every", "0.05"]) == 130
    assert done.is_set()
    assert all("newest step 20" in text for text in printed)
