"""The README is short and true where a program can tell: its commands, its links; and so are the other documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastpersist.cli import _parser
from fastpersist.config import TUNING_KEYS

ROOT = Path(__file__).resolve().parents[2]
README_LINES_MAX = 250
MADE_PAGES = {"changelog.md", "contributing.md", "reference/cli.md"}
"""Pages that docs/tools makes when the site is built."""

WITHOUT_OUTPUT = {"watch", "bench"}
"""Commands that docs/tools/command_outputs.py does not run: one needs a terminal, the other has a page of tables."""

LINK = re.compile(r"!?\[[^\]]*\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
MADE_TARGET = re.compile(r"`?\bmake ([a-z-]+)")
VARIABLE = re.compile(r"FASTPERSIST_[A-Z_]+")

PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md"))
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def without_code(text: str) -> str:
    return CODE.sub("", text)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def test_the_two_commands_of_the_readme_are_targets() -> None:
    section = (ROOT / "README.md").read_text().split("## Two commands")[1].split("\n## ")[0]
    commands = re.findall(r"^make ([a-z-]+)", section, re.MULTILINE)
    assert commands == ["demo", "test"]
    assert set(commands) <= make_targets()


@pytest.mark.parametrize("path", [*TOP, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_that_is_named_exists(path: Path) -> None:
    named = {
        found
        for code in re.findall(r"`make [^`]*`|^make .*", path.read_text(), re.MULTILINE)
        for found in MADE_TARGET.findall(code)
    }
    assert named <= make_targets()


@pytest.mark.parametrize("path", [*TOP, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(path: Path) -> None:
    missing = []
    for target in LINK.findall(without_code(path.read_text())):
        found = (path.parent / target).resolve()
        made = found.is_relative_to(ROOT / "docs") and str(found.relative_to(ROOT / "docs")) in MADE_PAGES
        if not found.exists() and not made:
            missing.append(target)
    assert not missing


def test_every_command_shows_what_it_prints() -> None:
    commands = set(_parser()[1]) - WITHOUT_OUTPUT
    for command in commands:
        text = (ROOT / "docs" / "outputs" / f"{command}.txt").read_text()
        assert text.startswith(f"$ fastpersist {command}")
        assert len(text.splitlines()) > 1
        assert "/tmp" not in text


def test_a_link_to_nowhere_would_be_seen() -> None:
    assert LINK.findall(without_code("[a](b.md#c), `[not](code.md)`, ![p](d/e.svg), [w](https://x.y)")) == [
        "b.md",
        "d/e.svg",
    ]


def test_variables_and_tuning_keys_are_those_of_their_page() -> None:
    code = "".join(path.read_text() for path in (ROOT / "fastpersist").rglob("*.py"))
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert set(VARIABLE.findall(page)) == set(VARIABLE.findall(code))
    assert {key for key in TUNING_KEYS if f"`{key}`" not in page} == set()


def test_every_variable_that_a_page_names_is_read() -> None:
    known = set(
        VARIABLE.findall((ROOT / "setup.py").read_text() + (ROOT / "docs/reference/configuration.md").read_text())
    )
    assert {name for path in [*TOP[:2], *PAGES] for name in VARIABLE.findall(path.read_text())} <= known
