"""An integration whose framework is missing or too old says so in one line, with the command that helps."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest
from support.imports import expect_import_error, in_version, without

import fastpersist as fp
from fastpersist.integrations._shared.requirements import release_of, require

EXTRAS = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate", "deepspeed": "deepspeed"}


def version_that_is(installed: str) -> Callable[[str], str]:
    return lambda package: installed


def test_framework_that_is_there_and_new_enough_is_fine() -> None:
    require("huggingface", "torch", "2.7")


def test_missing_framework_names_the_extra() -> None:
    with pytest.raises(
        ImportError, match=r'integrations.some needs nothing_of_this_name: .*"fastpersist\[some\]"'
    ) as e:
        require("some", "nothing_of_this_name", "1.0")
    assert e.value.name == "nothing_of_this_name"


@pytest.mark.parametrize(
    ("installed", "minimum", "is_enough"),
    [
        ("5.2", "5.2", True),
        ("5.2.0", "5.2", True),
        ("5.10.1", "5.2", True),
        ("6.0.0.dev0", "5.2", True),
        ("5.2.0rc1", "5.2", True),
        ("5.2.0+cpu", "5.2.0", True),
        ("5.1.9", "5.2", False),
        ("4.57.3", "5", False),
        ("5", "5.0.1", False),
    ],
)
def test_versions_are_compared_as_numbers(
    monkeypatch: pytest.MonkeyPatch, installed: str, minimum: str, is_enough: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", version_that_is(installed))
    if is_enough:
        require("some", "torch", minimum)
    else:
        with pytest.raises(fp.UnsupportedError, match=f"needs torch {minimum} or newer, and {installed} is installed"):
            require("some", "torch", minimum)


def test_a_source_tree_without_a_version_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    require("some", "torch", "99")


@pytest.mark.parametrize(
    ("version", "release"),
    [("5.0.3.dev0", (5, 0, 3)), ("2.0rc1", (2,)), ("1!4.5", (4, 5)), ("v1.2.0", (1, 2)), ("unknown", ())],
)
def test_release_is_the_numbers_of_a_version(version: str, release: tuple[int, ...]) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize("extra", ["huggingface", "deepspeed"])
def test_import_without_the_framework_names_the_extra(extra: str) -> None:
    message = f'Error: fastpersist.integrations.{extra} needs {EXTRAS[extra]}: pip install "fastpersist[{extra}]"'
    expect_import_error(f"fastpersist.integrations.{extra}", without(EXTRAS[extra]), message)


@pytest.mark.parametrize("extra", ["huggingface"])
def test_import_with_an_old_framework_names_both_versions(extra: str) -> None:
    change = in_version(EXTRAS[extra], "0.9")
    expect_import_error(f"fastpersist.integrations.{extra}", change, "UnsupportedError", "and 0.9 is installed")
