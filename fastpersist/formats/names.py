"""Matches names of tensors with patterns, and renames them. Pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

__all__ = ["is_wanted", "renamed"]


def is_wanted(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name matches one of the patterns, or there are none.

    A pattern is the name itself, or shell wildcards over all of it: `*` also matches dots, so "model.*" is everything
    below "model". Since `[…]` is a wildcard, names with positions are also compared as they are.

    Worked example: "optimizer.state[0].exp_avg" matches itself and "*.exp_avg", but not "optimizer.state[0]*".
    """
    return not patterns or any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with its prefix replaced: the longest of those that it begins with.

    Worked example: with {"module.": "", "module.head.": "classifier."}, "module.body.weight" becomes "body.weight" and
    "module.head.weight" becomes "classifier.weight".
    """
    found = max((old for old in prefixes if name.startswith(old)), key=len, default=None)
    return name if found is None else prefixes[found] + name[len(found) :]
