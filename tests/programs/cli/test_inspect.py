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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of three checkpoints, each with a state and a file of the rank."""
    path = tmp_path / "run"
    with fp.Checkpointer(path) as checkpoints:
        for step in (8, 9, 10):
            state = {"weight": torch.full((2, 3), float(step))}
            checkpoints.save(step, state, rank_state={"position": torch.ones(4)}, metrics={"loss": 1 / step})
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
    assert f"{tmp_path} is a directory that holds neither" in capsys.readouterr().err


def test_damaged_structure_ends_with_1(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(checkpoint, checkpoint.stat().st_size - 22)  # the first byte of the end record's magic
    assert main(["inspect", str(checkpoint)]) == 1
    assert capsys.readouterr().err.startswith(f"fastpersist: error: {checkpoint}: ")


# --- directories ---


CHECKPOINT_KEYS = ["files", "step", "time_s", "commit_number", "metrics", "versions", "host", "stats"]


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line]


def test_steps_of_a_root_are_listed_and_the_newest_is_marked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root)]) == 0
    text = capsys.readouterr().out
    rows = [row for row in rows_of(text) if row[0].startswith("step-")]
    assert [row[0] for row in rows] == ["step-00000008", "step-00000009", "step-00000010"]
    assert [row[-1] for row in rows] == ["0.125", "0.111111", "LATEST"]
    assert rows[2][-4:] == ["loss", "0.1", "newest,", "LATEST"]
    size_bytes = sum(path.stat().st_size for path in (root / "step-00000010").glob("*.pt"))
    assert rows[2][3:6] == [f"{size_bytes / 1000:.1f}", "kB", "2"]


def test_newest_is_the_one_that_was_committed_last(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fp.Checkpointer(root) as checkpoints:
        checkpoints.load(8)
        checkpoints.save(7, {})
    assert main(["inspect", str(root)]) == 0
    rows = [row for row in rows_of(capsys.readouterr().out) if row[0].startswith("step-")]
    assert [row[0] for row in rows if "newest," in row and "LATEST" in row] == ["step-00000007"]
    assert sum("newest," in row for row in rows) == 1


def test_json_of_a_root_has_the_documented_keys(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", "--limit", "2", str(root)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "path",
        "format",
        "size_bytes",
        "has_checksums",
        "checkpoint_count",
        "checkpoints",
        "latest",
        "leftovers",
    ]
    assert (found["format"], found["checkpoint_count"], found["latest"]) == ("root", 3, "step-00000010")
    assert [checkpoint["step"] for checkpoint in found["checkpoints"]] == [9, 10]
    assert list(found["checkpoints"][0]) == ["path", "size_bytes", "has_checksums", *CHECKPOINT_KEYS]


def test_limit_of_a_root_keeps_the_newest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--limit", "1", str(root)]) == 0
    text = capsys.readouterr().out
    assert [row[0] for row in rows_of(text) if row[0].startswith("step-")] == ["step-00000010"]
    assert "… and 2 older ones" in text
    assert main(["inspect", "--limit", "0", str(root)]) == 0
    assert "step-" not in capsys.readouterr().out


def test_step_is_listed_with_its_files_and_their_tensors(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = root / "step-00000009"
    manifest = fp.inspect(step)
    assert main(["inspect", str(step)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == f"directory  {step}"
    assert "step       9" in lines
    assert "metric     loss = 0.111111" in lines
    assert f"version    torch = {torch.__version__}" in lines
    assert f"stat       bytes = {manifest.size_bytes}" in lines
    rows = rows_of(text)
    for entry in manifest.files:
        assert [entry.name, str(entry.size_bytes), f"{entry.crc32:08x}"] in rows
    assert ["state.pt", "weight", "float32", "2×3", "24"] in [row[:5] for row in rows]
    assert ["rank-00000.pt", "position", "float32", "4", "16"] in [row[:5] for row in rows]


def test_json_of_a_step_has_the_documented_keys(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(root / "step-00000009")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found)[-len(CHECKPOINT_KEYS) :] == CHECKPOINT_KEYS
    assert (found["format"], found["step"], found["metrics"]) == ("directory", 9, {"loss": 1 / 9})
    assert [entry["name"] for entry in found["files"]] == ["rank-00000.pt", "state.pt"]
    assert list(found["tensors"][0]) == [
        "file",
        "name",
        "dtype",
        "shape",
        "size_bytes",
        "offset_bytes",
        "record",
        "crc32",
    ]
    assert {tensor["file"] for tensor in found["tensors"]} == {"rank-00000.pt", "state.pt"}


def test_metrics_that_json_cannot_say_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {}, metrics={"a": float("nan"), "b": float("-inf"), "c": 2.0})

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    assert main(["inspect", "--json", str(tmp_path / "run" / "step-00000001")]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["metrics"] == {"a": "nan", "b": "-inf", "c": 2.0}


def test_step_that_lost_a_file_is_told_and_ends_with_1(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-00000010" / "rank-00000.pt").unlink()
    assert main(["inspect", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "damaged    step-00000010" in lines
    assert "LATEST     step-00000010, which is not complete here" in lines
    assert any(line.startswith("step-00000009") and "newest" in line for line in lines)
    assert main(["inspect", str(root / "step-00000010")]) == 1
    assert "rank-00000.pt is missing" in capsys.readouterr().err


def test_unfinished_save_is_a_leftover_and_no_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".step-00000011.pending-0123456789abcdef").mkdir()
    assert main(["inspect", str(root)]) == 0
    assert "leftover   .step-00000011.pending-0123456789abcdef" in capsys.readouterr().out


@pytest.mark.parametrize("latest", [None, "a fifo"])
def test_root_is_listed_without_its_hint(latest: str | None, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "LATEST").unlink()
    if latest is not None:
        os.mkfifo(root / "LATEST")
    assert main(["inspect", str(root)]) == 0
    text = capsys.readouterr().out
    assert "newest" in text
    assert "newest, LATEST" not in text


def test_texts_of_a_manifest_cannot_command_the_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest_path = root / "step-00000010" / "MANIFEST.json"
    manifest = json.loads(manifest_path.read_text())
    hostile = "\x1b[2Jx\n"
    manifest["metrics"] = {hostile: 1.0}
    manifest["versions"] = manifest["host"] = manifest["stats"] = {hostile: hostile}
    manifest_path.write_text(json.dumps(manifest))
    (root / "LATEST").write_text(hostile)
    for path in (root, manifest_path.parent):
        assert main(["inspect", str(path)]) == 0
        text = capsys.readouterr().out
        assert "\x1b" not in text
        assert "\\x1b[2Jx" in text
