"""`fastpersist demo`: the whole story in its quick version, and that it says FAIL when a claim does not hold."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp
from fastpersist.cli import demo, main


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_quick_demo_passes_and_keeps_what_it_shows(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "fastpersist", "demo", "--quick", "--steps", "12", "--dir", str(kept)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[-1].startswith("PASS: killed inside a save, resumed from step ")
    assert [line[0] for line in lines if line[1:3] == ". "] == ["1", "2", "3", "4", "5"]
    left_behind = next(line for line in lines if line.startswith("left behind: .state.pt.pending-"))
    leftover = left_behind.split()[2].rstrip(",")
    assert any(leftover in line and line.endswith("left by a save that died") for line in lines)
    assert any(line.startswith("fp.save ") for line in lines)
    assert any(line.startswith("torch.load, cold ") for line in lines)

    *_, killed, whole = sorted(path.parent for path in kept.glob("fastpersist-demo-*/*/state.pt"))
    assert whole.name == "uninterrupted"
    expected, resumed = (torch.load(run / "state.pt", weights_only=True) for run in (whole, killed))
    assert (expected["step"], resumed["step"]) == (12, 12)
    for name, tensor in expected["model"].items():
        assert torch.equal(tensor, resumed["model"][name])
    assert sorted(path.name for run in (whole, killed) for path in run.iterdir()) == [
        "result.json",
        "result.json",
        "state.pt",
        "state.pt",
    ]


def test_trainer_that_dies_of_something_else_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["demo", "--quick", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("FAIL: the trainer ended with code 1; what it says is above\n")


def test_without_dir_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["demo", "--quick"]) == 1
    assert str(tmp_path / "fastpersist-demo-") in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--dir", str(tmp_path / "file" / "below")]) == 2
    assert capsys.readouterr().err.startswith("fastpersist: error: creating a directory in ")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"losses": {"3": "0x1.8p+1", "4": "0x1.0p+1"}, "digest": "aa"}, "the loss of step 3"),
        ({"losses": {"4": "0x1.0p+1"}, "digest": "bb"}, "parameters or moments"),
    ],
    ids=["loss", "digest"],
)
def test_one_different_bit_fails_the_demo(found: dict[str, Any], reason: str) -> None:
    expected = {"losses": {"3": "0x1.4p+1", "4": "0x1.0p+1"}, "digest": "aa"}
    with pytest.raises(demo._DemoFailedError, match=reason):
        demo._compare(expected, found, 2)


def test_equal_runs_are_told_to_be_equal() -> None:
    result = {"losses": {"3": "0x1.4p+1", "4": "0x1.0p+1"}, "digest": "aa"}
    assert "resumed from step 2, and at step 4" in demo._compare(result, result, 2)


def test_kill_that_comes_too_late_is_tried_again_and_then_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    monkeypatch.setattr(demo, "_watch_for_save", lambda child, directory: directory / ".state.pt.pending-0")
    arguments = argparse.Namespace(steps=6, quick=True)
    with pytest.raises(demo._DemoFailedError, match="no signal hit a save in 5 attempts"):
        demo._kill_inside_save(arguments, tmp_path)
    assert capsys.readouterr().out.count("the save ended before the signal came; again") == 5


@pytest.mark.parametrize("forgotten", [None, "rng", "position", "optimizer"])
def test_resumed_training_needs_all_of_the_state(forgotten: str | None, one_thread: None, tmp_path: Path) -> None:
    from fastpersist.cli.demo_gpt import Training, sizes

    whole = Training(sizes(quick=True))
    for _ in range(2):
        whole.step()
    fp.save(whole.state(), tmp_path / "state.pt")
    losses = [whole.step() for _ in range(2)]

    resumed = Training(sizes(quick=True))
    state = fp.load(tmp_path / "state.pt")
    if forgotten is not None:
        state[forgotten] = Training(sizes(quick=True)).state()[forgotten]
    resumed.load_state(state)
    same = [resumed.step() for _ in range(2)] == losses and resumed.digest() == whole.digest()
    assert same == (forgotten is None)
