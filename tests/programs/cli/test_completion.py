"""The script for shells, run by bash itself: what it offers for the beginning of a line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastpersist.cli import main

PRESS = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
function_of_command=$(complete -p fastpersist | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
$function_of_command fastpersist "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}" 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as ended:
        main(["--completion", "bash"])
    assert ended.value.code == 0
    path = tmp_path / "completion.bash"
    path.write_text(capsys.readouterr().out)
    return path


def offered(script: Path, *words: str) -> list[str]:
    """Return what bash offers when the key is pressed behind these words."""
    if shutil.which("bash") is None:
        pytest.skip("no bash is installed")
    press = ["bash", "--norc", "-c", PRESS, "bash", str(script), "fastpersist", *words]
    return subprocess.run(press, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def test_commands_are_offered(script: Path) -> None:
    assert offered(script, "re") == ["report"]
    assert {"demo", "bench", "verify"} <= set(offered(script, ""))


def test_commands_below_a_command_are_offered(script: Path) -> None:
    assert offered(script, "bench", "ov") == ["overlap"]


def test_options_of_a_command_are_offered(script: Path) -> None:
    assert offered(script, "ls", "--t") == ["--tree"]
    assert offered(script, "bench", "save", "--js") == ["--json"]


def test_files_are_offered_where_a_path_is_meant(script: Path) -> None:
    assert offered(script, "verify", str(script)[:-2]) == [str(script)]
    assert offered(script, "report", "runs", "--html", str(script)[:-2]) == [str(script)]


def test_nothing_is_offered_for_what_no_command_begins_with(script: Path) -> None:
    assert offered(script, "quux") == []


def test_zsh_has_a_script_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        main(["--completion", "zsh"])
    assert capsys.readouterr().out.startswith("#compdef fastpersist")


def test_without_shtab_it_is_said_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["--completion", "bash"])
    assert ended.value.code == 2
    assert "fastpersist[completion]" in capsys.readouterr().err
