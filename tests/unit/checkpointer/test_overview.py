"""What a notebook shows for a Checkpointer: its steps, newest first, and the saves that are under way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.rendered_html import seen

import fastpersist as fp

HOSTILE = "<script>alert(1)</script>"


def test_checkpointer_shows_its_steps_and_that_nothing_is_under_way(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run", keep=3) as checkpoints:
        assert seen(checkpoints).texts[-1] == "No save is under way."
        for step in (20, 30, 11):  # went back to step 10
            checkpoints.save(step, {"weight": torch.ones(250_000)})
        checkpoints.wait()
        found = seen(checkpoints)
    assert [text for text in found.texts if text in ("11", "20", "30")] == ["11", "30", "20"]
    assert found.texts.count("1.0 MB") == 3
    assert "keep=3" in found.texts[0]


def test_checkpointer_shows_the_save_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp.Checkpointer(tmp_path / "run", optimizer=optimizer) as checkpoints:
        pending = checkpoints.save(7, model.state_dict())
        monkeypatch.setattr(checkpoints._queue, "unfinished", lambda: [pending])  # as if the disk were slow
        checkpoints.wait_captured()
        assert seen(checkpoints).texts[-1] == "step 7 is being saved: captured"


def test_hostile_manifest_does_no_harm(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"weight": torch.ones(3)})
        checkpoints.wait()
        path = tmp_path / "run" / "step-00000001" / "MANIFEST.json"
        stats = {"engine": HOSTILE, "stall_s": "nan"}
        path.write_text(json.dumps({**json.loads(path.read_text()), "stats": stats, "time_s": 6e10}))
        assert HOSTILE in seen(checkpoints).texts


def test_root_that_cannot_be_listed_is_said(tmp_path: Path) -> None:
    checkpoints = fp.Checkpointer(tmp_path / "run")
    (tmp_path / "run").write_text("a file")
    assert str(tmp_path / "run") in seen(checkpoints).texts[-1]
