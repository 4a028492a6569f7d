"""What a notebook shows for our objects: true, escaped, and there for each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rendered_html import seen

import fastpersist as fp

HOSTILE = "<script>alert(1)</script>"


def test_report_of_a_save_has_its_figures(tmp_path: Path) -> None:
    report = fp.save({"weight": torch.ones(1000)}, tmp_path / "<b>.pt")
    found = seen(report)
    assert str(tmp_path / "<b>.pt") in found.texts
    assert {"engine", report.engine, "total"} <= set(found.texts)


def test_manifest_of_a_file_lists_its_tensors(tmp_path: Path) -> None:
    fp.save({HOSTILE: torch.ones(2, 3), **{f"w{n}": torch.zeros(1) for n in range(40)}}, tmp_path / "model.safetensors")
    found = seen(fp.inspect(tmp_path / "model.safetensors"))
    assert {HOSTILE, "float32", "2×3", "24 bytes", "… and 11 more"} <= set(found.texts)


def test_manifest_of_a_root_lists_its_steps_newest_first(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        for step in (9, 10):
            checkpoints.save(step, {"weight": torch.ones(3)}, metrics={"loss": step / 4})
    (tmp_path / "run" / "step-00000009" / "state.pt").unlink()
    found = seen(fp.inspect(tmp_path / "run"))
    assert [text for text in found.texts if text in ("9", "10")] == ["10"]
    assert {"loss 2.5", "no committed checkpoints: step-00000009"} <= set(found.texts)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "damaged"])
def test_report_of_a_verification_says_what_is_damaged(is_whole: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"<i>": torch.ones(5000)}, path)
    if not is_whole:
        data = bytearray(path.read_bytes())
        data[fp.inspect(path).tensors[0].offset_bytes or 0] ^= 1
        path.write_bytes(data)
    report = fp.verify(path)
    assert report.ok is is_whole
    found = seen(report)
    assert ("DAMAGED" in found.texts[0], "<i>" in found.texts) == (not is_whole, not is_whole)


def test_hostile_metric_is_shown_as_a_text(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"weight": torch.ones(3)}, metrics={HOSTILE: 1.0})
    assert f"{HOSTILE} 1" in seen(fp.inspect(tmp_path / "run")).texts
