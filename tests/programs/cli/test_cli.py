"""The command as a whole: what every subcommand has in common, and how all of them end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastpersist as fp
from fastpersist.cli import main

COMMANDS = ("demo", "info", "bench", "inspect", "verify")


def run_module(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastpersist", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_installed_command_and_module_are_the_same(tmp_path: Path) -> None:
    fp.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    words = ["inspect", str(tmp_path / "model.pt")]
    script = Path(sys.executable).parent / "fastpersist"
    installed = subprocess.run([str(script), *words], capture_output=True, text=True, timeout=60, check=False)
    module = run_module(*words)
    assert (module.returncode, module.stderr) == (0, "")
    assert "weight" in module.stdout
    assert (installed.returncode, installed.stdout) == (0, module.stdout)


def test_error_is_one_line_without_traceback(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.pt")
    result = run_module("verify", missing)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == f"fastpersist: error: there is no checkpoint at {missing}\n"


def test_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    tensors = {f"a-rather-long-name-of-a-tensor-{number}": torch.zeros(1) for number in range(3000)}
    fp.save(tensors, tmp_path / "many.safetensors")
    command = [sys.executable, "-m", "fastpersist", "inspect", str(tmp_path / "many.safetensors")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"file ")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_output_that_cannot_be_written_is_an_error_line(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    command = [sys.executable, "-m", "fastpersist", "inspect", str(tmp_path / "x.pt")]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "fastpersist: error: the output could not be written: No space left on device\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: fastpersist {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fastpersist {fp.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["unheard-of"],
        ["inspect"],
        ["verify"],
        ["inspect", "--limit", "-1", "model.pt"],
        ["demo", "--steps", "5"],
        ["demo", "--steps", "many"],
    ],
)
def test_wrong_usage_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("inspct", "'inspct' is no command; is 'inspect' meant? There are demo, run, "),
        ("verfy", "is 'verify' meant?"),
        ("checkpoint", "'checkpoint' is no command; there are demo, run, "),
    ],
)
def test_command_that_is_misspelt_is_told_which_is_meant(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word, "--json", "model.pt"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
