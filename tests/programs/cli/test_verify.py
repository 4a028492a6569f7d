"""`fastpersist verify`: damage is found, named and placed; what could not be checked is not called good."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from support.archives import flip_bit

import fastpersist as fp
from fastpersist.cli import main


def state() -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"weight": torch.arange(5000.0), "bias": torch.ones(3)}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    fp.save(state(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def damage_tensor(path: Path, name: str, at_bytes: int) -> int:
    """Flip a bit of a tensor; return where the tensor begins."""
    offset_bytes = next(tensor.offset_bytes for tensor in fp.inspect(path).tensors if tensor.name == name)
    assert offset_bytes is not None
    flip_bit(path, offset_bytes + at_bytes)
    return offset_bytes


def test_whole_file_is_good(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"{checkpoint}: ok, ")
    assert "compared with their CRC-32s" in output.out
    assert output.err == ""


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_flipped_bit_is_blamed_on_its_tensor(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    fp.save({f"model.{key}": value for key, value in state()["model"].items()}, path)
    offset_bytes = damage_tensor(path, "model.weight", at_bytes=7777)
    assert main(["verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: DAMAGED"
    assert lines[1].startswith(f"  at offset {offset_bytes}: the bytes of model.weight are damaged")
    assert len(lines) == 2


def test_json_has_the_documented_keys(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json", str(checkpoint)]) == 0
    (good,) = json.loads(capsys.readouterr().out)
    offset_bytes = damage_tensor(checkpoint, "model.bias", at_bytes=5)
    missing = checkpoint.with_name("nothing.pt")
    assert main(["verify", "--json", str(checkpoint), str(missing)]) == 2
    damaged, unread = json.loads(capsys.readouterr().out)
    keys = ["path", "ok", "has_checksums", "checked_bytes", "damages", "leftovers", "notes", "error"]
    assert list(good) == list(damaged) == list(unread) == keys
    assert (good["ok"], good["damages"], good["error"]) == (True, [], None)
    assert good["checked_bytes"] > 20_012
    (damage,) = damaged["damages"]
    assert list(damage) == ["message", "tensors", "record", "offset_bytes", "file"]
    assert (damaged["ok"], damage["tensors"], damage["offset_bytes"]) == (False, ["model.bias"], offset_bytes)
    assert (unread["ok"], unread["path"]) == (False, str(missing))
    assert "there is no checkpoint" in unread["error"]


def test_every_file_is_checked_and_the_worst_counts(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = checkpoint.with_name("damaged.pt")
    fp.save(state(), damaged)
    damage_tensor(damaged, "model.weight", at_bytes=0)
    missing = checkpoint.with_name("nothing.pt")
    assert main(["verify", str(damaged), str(checkpoint)]) == 1
    capsys.readouterr()
    assert main(["verify", str(missing), str(damaged), str(checkpoint)]) == 2
    output = capsys.readouterr()
    assert f"{damaged}: DAMAGED" in output.out
    assert f"{checkpoint}: ok" in output.out
    assert output.err.count("\n") == 1
    assert str(missing) in output.err


def test_without_checksums_only_the_structure_is_vouched_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    fp.save(state(), path, checksum=False)
    damage_tensor(path, "model.weight", at_bytes=0)  # which nobody can notice
    assert main(["verify", str(path)]) == 0
    text = capsys.readouterr().out
    assert "no checksums" in text
    assert "only its structure was checked" in text
    assert main(["verify", "--json", str(path)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["has_checksums"], found["checked_bytes"]) == (True, False, 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "the file is empty"), (bytes(8192), "its save never finished"), (b"no checkpoint", "neither a torch zip")],
    ids=["empty", "zeros", "text"],
)
def test_what_is_no_checkpoint_is_damaged(
    content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert main(["verify", str(path)]) == 1
    assert reason in capsys.readouterr().out


def test_truncated_file_is_damaged(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(checkpoint, checkpoint.stat().st_size - 100)
    assert main(["verify", str(checkpoint)]) == 1
    assert f"{checkpoint}: DAMAGED" in capsys.readouterr().out


def test_quiet_speaks_only_of_damage(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quiet", str(checkpoint)]) == 0
    assert capsys.readouterr() == ("", "")
    damage_tensor(checkpoint, "model.weight", at_bytes=0)
    assert main(["verify", "--quiet", str(checkpoint)]) == 1
    assert "model.weight" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--quiet"]], ids=["plain", "quiet"])
def test_progress_is_shown_on_a_terminal_unless_quiet(checkpoint: Path, options: list[str]) -> None:
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [sys.executable, "-m", "fastpersist", "verify", *options, str(checkpoint)]
    try:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=terminal, timeout=60, check=True)
        os.set_blocking(reader, False)
        try:
            shown = os.read(reader, 65536)
        except BlockingIOError:
            shown = b""
    finally:
        os.close(reader)
        os.close(terminal)
    if options:
        assert shown == b""
    else:
        assert b"model.pt" in shown
        assert b"100%" in shown


# --- directories ---


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of two checkpoints, each with a state and a file of the rank."""
    path = tmp_path / "run"
    with fp.Checkpointer(path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(), rank_state={"position": torch.ones(4)})
    return path


def test_every_file_of_every_step_is_checked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked_bytes = sum(path.stat().st_size for path in root.glob("step-*/*.pt"))
    assert main(["verify", "--json", str(root)]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["has_checksums"], found["checked_bytes"]) == (True, True, checked_bytes)
    assert main(["verify", str(root), str(root / "step-00000001")]) == 0
    assert [line.split(": ")[1][:2] for line in capsys.readouterr().out.splitlines()] == ["ok", "ok"]


def test_damage_in_a_root_names_step_file_and_tensor(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = root / "step-00000002" / "state.pt"
    offset_bytes = damage_tensor(damaged, "model.weight", at_bytes=7777)
    assert main(["verify", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{root}: DAMAGED"
    assert lines[1].startswith("  step-00000002: state.pt: the bytes of model.weight are damaged: ")
    assert lines[1].endswith(f" (at offset {offset_bytes})")
    assert main(["verify", "--json", str(root), str(damaged.parent)]) == 1
    of_root, of_step = json.loads(capsys.readouterr().out)
    assert of_root["damages"][0]["file"] == "step-00000002/state.pt"
    assert of_step["damages"][0]["file"] == "state.pt"
    assert of_step["damages"][0]["tensors"] == ["model.weight"]
    assert main(["verify", str(root / "step-00000001")]) == 0


def test_file_of_the_rank_is_checked_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_tensor(root / "step-00000001" / "rank-00000.pt", "position", at_bytes=3)
    assert main(["verify", "--quiet", str(root)]) == 1
    assert "step-00000001: rank-00000.pt: the bytes of position are damaged" in capsys.readouterr().out


def test_file_beside_those_of_a_step_is_named_but_no_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-00000001" / "notes.md").touch()
    note = "step-00000001: notes.md is not in the manifest, so nothing is known of it"
    assert main(["verify", str(root)]) == 0
    assert f"  {note}" in capsys.readouterr().out
    assert main(["verify", "--quiet", str(root)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["verify", "--json", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["notes"] == [note]


def test_unfinished_save_is_named_but_no_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = ".step-00000003.pending-0123456789abcdef"
    (root / name).mkdir()
    assert main(["verify", str(root)]) == 0
    assert f"  {name} is no checkpoint" in capsys.readouterr().out
    assert main(["verify", "--quiet", str(root)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["verify", "--json", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["leftovers"] == [name]


def test_directory_without_checkpoints_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "no checkpoint" in capsys.readouterr().err
