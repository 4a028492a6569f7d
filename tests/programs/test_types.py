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


def mypy(site: Path, directory: Path) -> list[str]:
    """Return the lines with what mypy --strict finds in the programs of a directory, not in what they import."""
    if find_spec("mypy") is None:
        pytest.skip("no mypy is installed")
    programs = sorted(path.name for path in directory.iterdir())
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-incremental", *programs]
    ended = run_checker(words, site, directory)
    assert ended.returncode in (0, 1), ended.stderr
    return [line for line in ended.stdout.splitlines() if ": error: " in line]


def pyright(site: Path, directory: Path) -> list[str]:
    """Return what pyright's strict mode finds; basedpyright is pyright with a Node.js of its own, from its wheel."""
    if find_spec("basedpyright") is None:
        pytest.skip("no basedpyright is installed")
    programs = sorted(path.name for path in directory.iterdir())
    settings = {"typeCheckingMode": "strict", "include": programs, "extraPaths": [str(site)]}
    (directory / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(directory)]
    ended = run_checker(words, site, directory)
    assert ended.returncode in (0, 1), ended.stderr
    found = json.loads(ended.stdout)
    assert found["summary"]["filesAnalyzed"] == len(programs)
    return [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in found["generalDiagnostics"]
    ]


@pytest.fixture(scope="module", params=[mypy, pyright], ids=["mypy", "pyright"])
def found(request: pytest.FixtureRequest, site: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a checker finds in a right program and in a wrong one, for which it reads torch's types once."""
    directory = tmp_path_factory.mktemp("programs")
    (directory / "right.py").write_text(PROGRAM.read_text())
    (directory / "wrong.py").write_text(WRONG)
    lines: list[str] = request.param(site, directory)
    return lines


def test_program_of_a_user_has_no_error(found: list[str]) -> None:
    assert [line for line in found if not line.startswith("wrong.py:")] == []


@pytest.mark.parametrize("number", [3, 4, 5])
def test_wrong_types_are_found(found: list[str], number: int) -> None:
    assert [line for line in found if line.startswith(f"wrong.py:{number}:")]


def test_program_uses_every_public_name() -> None:
    used = set(re.findall(r"\bfp\.(\w+)", PROGRAM.read_text()))
    assert used == set(fp.__all__)
