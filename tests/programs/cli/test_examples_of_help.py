"""Every command shows examples in `--help`, and each of them is one that the command takes."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Iterator

import pytest

from fastpersist.cli import _parser, main

EXAMPLE = re.compile(r"^  (fastpersist .*)$", re.MULTILINE)
END_OF_WORDS = ("|", ">", ">>", "&&", ";")


def parsers_below(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below, found in action.choices.items():
                yield from parsers_below(found, f"{name} {below}")


PARSERS = dict(parsers_below(_parser()[0], "fastpersist"))


def examples_of(name: str) -> list[list[str]]:
    """Return the words of each example, without the program's name, up to a pipe."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*name.split()[1:], "--help"])
    block = printed.getvalue().partition("examples:\n")[2].partition("\n\n")[0]
    found = []
    for line in EXAMPLE.findall(block):
        words = shlex.split(line)[1:]
        end = next((number for number, word in enumerate(words) if word in END_OF_WORDS), len(words))
        found.append(words[:end])
    return found


def test_all_commands_are_looked_at() -> None:
    assert {"fastpersist", "fastpersist report", "fastpersist bench overlap", "fastpersist rows pack"} <= set(PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_help_has_examples(name: str) -> None:
    found = examples_of(name)
    assert found
    wanted = name.split()[1:]
    assert any(words[: len(wanted)] == wanted for words in found)


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "fastpersist"])
def test_examples_are_commands_that_are_taken(name: str) -> None:
    parser = PARSERS["fastpersist"]
    for words in examples_of(name):
        if "--help" not in words:
            assert callable(parser.parse_args(words).run)
