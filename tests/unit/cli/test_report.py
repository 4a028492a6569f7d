"""`fastpersist report`: what the steps of a run cost, as their manifests say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp
from fastpersist.cli import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of three steps, 10 s apart, whose stalls are 100, 300 and 200 ms."""
    path = tmp_path / "run"
    with fp.Checkpointer(path) as checkpoints:
        for step in (8, 9, 10):
            checkpoints.save(step, {"weight": torch.full((250_000,), float(step))})
    for step, stall_s in ((8, 0.1), (9, 0.3), (10, 0.2)):
        change(path, step, time_s=1e9 + 10 * step)
        change_stats(path, step, stall_s=stall_s, write_s=0.3, sync_s=0.2, bytes_at_gate=5_000_000, engine="uring")
        change_stats(path, step, bytes_before_return=1_000_000)
    return path


def change(root: Path, step: int, **values: object) -> None:
    manifest_path = root / f"step-{step:08d}" / "MANIFEST.json"
    manifest_path.write_text(json.dumps({**json.loads(manifest_path.read_text()), **values}))


def change_stats(root: Path, step: int, **values: object) -> None:
    manifest_path = root / f"step-{step:08d}" / "MANIFEST.json"
    change(root, step, stats={**json.loads(manifest_path.read_text())["stats"], **values})


def report(root: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["report", "--json", str(root)]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_documented_keys_and_the_figures_of_the_manifests(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(root, capsys)
    assert list(found) == ["path", "steps", "total", "median"]
    size_bytes = [fp.inspect(root / f"step-{step:08d}").size_bytes for step in (8, 9, 10)]
    assert [one["step"] for one in found["steps"]] == [8, 9, 10]
    assert [one["size_bytes"] for one in found["steps"]] == size_bytes
    assert [one["stats"]["stall_s"] for one in found["steps"]] == [0.1, 0.3, 0.2]
    assert [one["every_s"] for one in found["steps"]] == [None, 10, 10]
    assert [one["lost_ratio"] for one in found["steps"]] == [None, pytest.approx(0.03), pytest.approx(0.02)]
    assert [one["rate_bytes_per_s"] for one in found["steps"]] == [pytest.approx(size / 0.5) for size in size_bytes]
    assert found["total"] == {
        "step_count": 3,
        "size_bytes": sum(size_bytes),
        "stall_s": pytest.approx(0.6),
        "write_s": pytest.approx(0.9),
        "sync_s": pytest.approx(0.6),
    }
    assert found["median"]["stall_s"] == 0.2
    assert found["median"]["lost_ratio"] == pytest.approx(0.025)


def test_text_says_what_was_lost_and_where_most(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(root)]) == 0
    told = capsys.readouterr().out
    assert "stall    200 ms is the median; 300 ms the longest, of 9" in told
    assert "lost     2.5 % of 10 s between two steps (medians)" in told
    (row,) = [line.split() for line in told.splitlines() if line.split()[:1] == ["9"]]
    assert row[3:9] == "10 s 1.0 MB 300 ms".split()
    assert row[11:] == "300 ms 200 ms 0.00 GB/s 6.0 MB 3 % uring".split()  # between them capture, which is as it was


def test_steps_of_which_nothing_is_known_are_told_without_figures(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (8, 9, 10):
        change(root, step, stats={}, time_s=1e9)
    found = report(root, capsys)
    assert found["median"] == {"stall_s": None, "rate_bytes_per_s": None, "every_s": None, "lost_ratio": None}
    assert main(["report", str(root)]) == 0
    assert "between two steps" not in capsys.readouterr().out


def test_texts_of_a_manifest_cannot_command_the_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_stats(root, 9, engine="\x1b[2J", stall_s="long")
    assert main(["report", str(root)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "\\x1b[2J" in told


def test_directory_whose_steps_are_all_damaged_has_none(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (8, 9, 10):
        (root / f"step-{step:08d}" / "state.pt").unlink()
    assert report(root, capsys)["steps"] == []
    assert main(["report", str(root)]) == 0
    told = capsys.readouterr().out
    assert "steps    0" in told
    assert "damaged  step-00000008, step-00000009, step-00000010: `fastpersist verify` says how" in told


def test_damaged_steps_are_named_beside_those_that_are_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-00000009" / "state.pt").unlink()
    assert main(["report", str(root)]) == 0
    told = capsys.readouterr().out
    assert "steps    2" in told
    assert "damaged  step-00000009: " in told


@pytest.mark.parametrize("name", ["missing", "step-00000008", "step-00000008/state.pt"])
def test_what_is_no_directory_of_checkpoints_ends_with_2(
    name: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(root / name)]) == 2
    assert name in capsys.readouterr().err
