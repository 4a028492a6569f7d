"""`fastpersist inspect`: everything that a file holds is listed, and nothing of it is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import flip_bit

import fastpersist as fp
from fastpersist.cli import main


class MakesDirectory:
    """Unpickles by running code that leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    fp.save({"model": {"weight": weight, "bias": torch.ones(())}, "step": 7}, path)
    return path


def test_json_has_the_documented_keys(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(checkpoint)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "path",
        "format",
        "size_bytes",
        "has_checksums",
        "tensor_count",
        "tensors",
        "globals",
        "metadata",
    ]
    assert (found["path"], found["format"]) == (str(checkpoint), "torch_zip")
    assert found["size_bytes"] == checkpoint.stat().st_size
    assert found["has_checksums"] is True
    assert found["tensor_count"] == 2
    assert "torch._utils._rebuild_tensor_v2" in found["globals"]
    weight = found["tensors"][0]
    assert list(weight) == ["name", "dtype", "shape", "size_bytes", "offset_bytes", "record", "crc32"]
    assert (weight["name"], weight["dtype"], weight["shape"]) == ("model.weight", "bfloat16", [2, 3])
    stored = checkpoint.read_bytes()[weight["offset_bytes"] :][: weight["size_bytes"]]
    assert torch.frombuffer(bytearray(stored), dtype=torch.bfloat16).tolist() == [0, 1, 2, 3, 4, 5]


def test_text_lists_tensors_and_globals(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = fp.inspect(checkpoint).tensors[0]
    assert main(["inspect", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.startswith("model.weight"))
    assert row == ["model.weight", "bfloat16", "2×3", "12", str(entry.offset_bytes), f"{entry.crc32:08x}"]
    assert next(line.split() for line in lines if line.startswith("model.bias"))[2] == "scalar"
    assert "global     torch._utils._rebuild_tensor_v2" in lines


def test_safetensors_metadata_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    fp.save({"1e5": torch.ones(2)}, path, metadata={"license": "MIT"})
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "metadata   license = MIT" in text
    assert "\n1e5 " in text  # a name, though it looks like a number
    assert main(["inspect", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["metadata"]["license"] == "MIT"


def test_limit_says_what_it_left_out(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--limit", "1", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    assert "model.weight" in text
    assert "model.bias" not in text
    assert "… and 1 more" in text
    assert main(["inspect", "--json", "--limit", "1", str(checkpoint)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["tensors"]), found["tensor_count"]) == (1, 2)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_code_in_a_hostile_pickle_is_named_but_not_run(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "it-ran"
    path = tmp_path / "hostile.pt"
    torch.save({"weight": torch.ones(3), "bait": MakesDirectory(trace)}, path)
    assert main([command, str(path)]) == 0
    assert not trace.exists()
    if command == "inspect":
        assert f"global     {os.mkdir.__module__}.mkdir" in capsys.readouterr().out
    torch.load(path, weights_only=False)
    assert trace.exists()  # so it would have run


def test_names_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    fp.save({"\x1b[2Jweight": torch.ones(3)}, path, metadata={"by": "\x1b]0;me\x07"})
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\\x1b[2Jweight" in text


def test_file_without_tensors_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp.save({"step": 7}, tmp_path / "model.pt")
    assert main(["inspect", str(tmp_path / "model.pt")]) == 0
    text = capsys.readouterr().out
    assert "tensors    0" in text
    assert "offset" not in text


@pytest.mark.parametrize(
    ("content", "reason", "exit_code"),
    [(b"", "empty", 1), (b"just text, and enough of it", "neither a torch zip nor", 2)],
    ids=["empty is damaged", "text is no checkpoint"],
)
def test_what_is_no_checkpoint_is_refused(
    content: bytes, reason: str, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert main(["inspect", str(path)]) == exit_code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"fastpersist: error: {path}")
    assert reason in output.err


def test_missing_file_and_directory_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nothing.pt")]) == 2
    assert main(["inspect", str(tmp_path)]) == 2
    assert "it is a directory" in capsys.readouterr().err


def test_damaged_structure_ends_with_1(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(checkpoint, checkpoint.stat().st_size - 22)  # the first byte of the end record's magic
    assert main(["inspect", str(checkpoint)]) == 1
    assert capsys.readouterr().err.startswith(f"fastpersist: error: {checkpoint}: ")
