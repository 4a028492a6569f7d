"""`fastpersist ls`: tensors as a table, as a tree and as JSON, chosen by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import golden

import fastpersist as fp
from fastpersist.cli import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    layers = [{"weight": torch.ones(2, 3), "bias": torch.ones(())} for _ in range(2)]
    fp.save({"model": {"layers": layers}, "head": torch.ones(4, dtype=torch.bfloat16), "step": 7}, path)
    return path


def test_table(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{checkpoint}: 5 tensors, 64 bytes"
    assert ["model.layers[0].weight", "float32", "2×3", "24"] in [line.split() for line in lines]
    assert ["model.layers[1].bias", "float32", "scalar", "4"] in [line.split() for line in lines]


def test_globs_choose(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(checkpoint), "*.bias", "model.layers[0].weight"]) == 0
    out = capsys.readouterr().out
    assert "3 tensors, 32 bytes" in out
    assert "head" not in out
    assert "layers[1].weight" not in out


def test_no_such_name(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(checkpoint), "weights*"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "none of the 5 tensors" in printed.err
    assert "weights*" in printed.err


def test_tree(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--tree", str(checkpoint)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [
        ["├─", "model", "4", "tensors", "56", "bytes"],
        ["│", "└─", "layers", "4", "tensors", "56", "bytes"],
        ["│", "├─", "[0]", "2", "tensors", "28", "bytes"],
        ["│", "│", "├─", "weight", "float32", "2×3", "24", "bytes"],
        ["│", "│", "└─", "bias", "float32", "scalar", "4", "bytes"],
        ["│", "└─", "[1]", "2", "tensors", "28", "bytes"],
        ["│", "├─", "weight", "float32", "2×3", "24", "bytes"],
        ["│", "└─", "bias", "float32", "scalar", "4", "bytes"],
        ["└─", "head", "bfloat16", "4", "8", "bytes"],
    ]


def test_json_has_the_tensors_of_inspect(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(checkpoint)]) == 0
    inspected = json.loads(capsys.readouterr().out)["tensors"]
    assert main(["ls", "--json", str(checkpoint), "head"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["path", "tensor_count", "size_bytes", "tensors"]
    assert found["tensors"] == [one for one in inspected if one["name"] == "head"]
    assert (found["tensor_count"], found["size_bytes"]) == (1, 8)


def test_step_and_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {"w": torch.ones(2)}, rank_state={"seed": torch.ones(1)})
    assert main(["ls", str(tmp_path / "step-00000003")]) == 0
    out = capsys.readouterr().out
    assert ["state.pt", "w", "float32", "2", "8"] in [line.split() for line in out.splitlines()]
    assert ["rank-00000.pt", "seed", "float32", "1", "4"] in [line.split() for line in out.splitlines()]
    assert main(["ls", str(tmp_path)]) == 2
    assert "step-00000003" in capsys.readouterr().err


def test_directory_of_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert main(["ls", str(tmp_path), "--json"]) == 0
    (tensor,) = json.loads(capsys.readouterr().out)["tensors"]
    assert (tensor["file"], tensor["name"], tensor["dtype"]) == ("model.safetensors", "w", "float32")


def test_names_with_control_characters_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a\x1b[31m": torch.ones(1)}, tmp_path / "a.pt")
    for form in ([], ["--tree"]):
        assert main(["ls", str(tmp_path / "a.pt"), *form]) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_no_tensor_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"step": 1}, tmp_path / "a.pt")
    for form in ([], ["--tree"]):
        assert main(["ls", str(tmp_path / "a.pt"), *form]) == 0
        assert "0 tensors, 0 bytes" in capsys.readouterr().out


def test_part_of_a_step_is_no_step_without_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(golden.PARTS / "a" / "step-00000007")]) == 2
    assert "`fastpersist merge` makes a whole one first" in capsys.readouterr().err


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    assert main(["ls", str(tmp_path / "nothing.pt")]) == 2
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["ls", str(path)]) == 1
