"""Patterns and prefixes of tensor names."""

from __future__ import annotations

import pytest

from fastpersist.formats.names import is_wanted, renamed


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("model.weight", [], True),
        ("model.weight", ["model.*"], True),
        ("model.weight", ["*.bias", "*.weight"], True),
        ("model.layer.weight", ["model.*"], True),
        ("model.weight", ["model"], False),
        ("model.Weight", ["*.weight"], False),
        ("state[0].step", ["state[0].step"], True),
        ("state[0].step", ["state[0]*"], False),
        ("state0.step", ["state[0].step"], True),
    ],
    ids=str,
)
def test_patterns(name: str, patterns: list[str], expected: bool) -> None:
    assert is_wanted(name, patterns) is expected


def test_the_longest_prefix_is_replaced_once() -> None:
    prefixes = {"module.": "", "module.head.": "classifier."}
    assert renamed("module.module.weight", prefixes) == "module.weight"
    assert renamed("module.head.weight", prefixes) == "classifier.weight"
    assert renamed("other.module.weight", prefixes) == "other.module.weight"
    assert renamed("weight", {"": "model."}) == "model.weight"
