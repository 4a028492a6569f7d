"""Types for users: two type checkers in their strictest mode find nothing in a program with every public name.

The package is looked at as a wheel lays it out. Each checker is a program; it reads torch's types for some ten seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fastpersist as fp

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "data" / "typed_program.py"
WRONG = 'import fastpersist as fp\n\nfp.Checkpointer("runs/a", keep="three")\nfp.load(1)\nfp.inspect("a").tensor\n'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of packages with ours in it, its integrations inside."""
    path = tmp_path_factory.mktemp("site")
    native_only = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "fastpersist", path / "fastpersist", ignore=native_only)
    shutil.copytree(ROOT / "integrations", path / "fastpersist" / "integrations", ignore=native_only)
    return path


def run_checker(words: list[str], site: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "MYPYPATH": str(site)}
    return subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, timeout=540, check=False
    )


def mypy(program: Path, site: Path, directory: Path) -> list[str]:
    """Return the lines with what mypy --strict finds in a program, and nothing of what it imports."""
    if find_spec("mypy") is None:
        pytest.skip("no mypy is installed")
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-incremental", str(program)]
    ended = run_checker(words, site, directory)
    assert ended.returncode in (0, 1), ended.stderr
    return [line for line in ended.stdout.splitlines() if ": error: " in line]


def pyright(program: Path, site: Path, directory: Path) -> list[str]:
    """Return what pyright's strict mode finds; basedpyright is pyright with a Node.js of its own, from its wheel."""
    if find_spec("basedpyright") is None:
        pytest.skip("no basedpyright is installed")
    settings = {"typeCheckingMode": "strict", "include": [str(program)], "extraPaths": [str(site)]}
    (directory / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(directory)]
    ended = run_checker(words, site, directory)
    assert ended.returncode in (0, 1), ended.stderr
    found = json.loads(ended.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    return [f"{one['range']['start']['line'] + 1}: {one['message']}" for one in found["generalDiagnostics"]]


CHECKERS = pytest.mark.parametrize("check", [mypy, pyright], ids=["mypy", "pyright"])


@CHECKERS
def test_program_of_a_user_has_no_error(check: object, site: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text())
    assert callable(check)
    assert check(program, site, tmp_path) == []


@CHECKERS
def test_wrong_types_are_found(check: object, site: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WRONG)
    assert callable(check)
    found = "\n".join(check(program, site, tmp_path))
    assert [f"{line}: " in found or f":{line}:" in found for line in (3, 4, 5)] == [True] * 3


def test_program_uses_every_public_name() -> None:
    used = set(re.findall(r"\bfp\.(\w+)", PROGRAM.read_text()))
    assert used == set(fp.__all__)
