"""`fastpersist stats`: figures of each tensor, as a table and as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import fastpersist as fp
from fastpersist.cli import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    weight = torch.tensor([[1.0, -2.0], [math.nan, math.inf]])
    fp.save({"weight": weight, "steps": torch.arange(4), "phase": torch.tensor([3 + 4j]), "name": "x"}, path)
    return path


def test_table(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(checkpoint)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["weight", "float32", "2×2", "-2", "1", "-0.5", "2.23607", "1", "1"] in rows
    assert ["steps", "int64", "4", "0", "3", "1.5", "3.74166"] in rows
    assert ["phase", "complex64", "1", "5"] in rows


def test_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--json", str(checkpoint), "weight", "phase"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["path", "tensors", "unreadable"]
    weight, phase = found["tensors"]
    assert weight == {
        "name": "weight",
        "dtype": "float32",
        "shape": [2, 2],
        "min": -2.0,
        "max": 1.0,
        "mean": -0.5,
        "norm": pytest.approx(math.sqrt(5)),
        "nan_count": 1,
        "inf_count": 1,
    }
    assert (phase["min"], phase["max"], phase["mean"], phase["norm"]) == (None, None, None, 5.0)


def test_norms_beyond_a_double_are_text_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp.save({"w": torch.full((2,), 1e308, dtype=torch.float64)}, tmp_path / "a.pt")
    assert main(["stats", "--json", str(tmp_path / "a.pt")]) == 0
    (one,) = json.loads(capsys.readouterr().out)["tensors"]
    assert (one["norm"], one["mean"], one["inf_count"]) == ("inf", "inf", 0)


def test_no_such_name(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(checkpoint), "bias"]) == 2
    assert "bias" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_not_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"q": torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8)}, tmp_path / "a.pt")
    assert main(["stats", str(tmp_path / "a.pt")]) == 0
    assert "q was not read: it is a quantized tensor" in capsys.readouterr().out


def test_no_progress_where_standard_error_is_no_terminal(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(checkpoint)]) == 0
    assert not capsys.readouterr().err
