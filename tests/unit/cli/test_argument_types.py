"""Types of options: what they read, and that an error says what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from fastpersist.cli.argument_types import positive, positive_number, size, size_name, whole_number

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4KiB", 4096), ("8MiB", 8 * MIB), ("1GiB", 1 << 30), ("512", 512), ("8GB", 8 * 10**9), ("2k", 2000)],
)
def test_sizes_are_read_as_everywhere_else(text: str, size_bytes: int) -> None:
    assert size(text) == size_bytes
    assert size(size_name(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "name"),
    [(0, "0"), (1001, "1001"), (64 * KIB, "64KiB"), (1536 * KIB, "1536KiB"), (3 << 30, "3GiB"), (2 * 10**9, "2GB")],
)
def test_a_size_is_named_without_a_fraction(size_bytes: int, name: str) -> None:
    assert size_name(size_bytes) == name


@pytest.mark.parametrize("text", ["", "M", "-4K", "8X"])
def test_other_words_are_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as"):
        size(text)


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (positive, "0", "must be at least 1"),
        (positive, "abc", "'abc' is no whole number$"),
        (positive, "1.5", "'1.5' is no whole number$"),
        (whole_number(2, 64), "65", "must be at least 2, at most 64"),
        (whole_number(0), "-1", "must be at least 0"),
        (positive_number, "0", "'0' is no number above 0"),
        (positive_number, "inf", "'inf' is no number above 0"),
        (positive_number, "abc", "'abc' is no number above 0"),
    ],
)
def test_what_is_no_such_number_is_refused(read: Callable[[str], float], text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        read(text)


def test_numbers_are_read() -> None:
    assert [positive("1"), whole_number(2, 64)("64"), whole_number(0)("0"), positive_number("0.5")] == [1, 64, 0, 0.5]


@pytest.mark.parametrize("read", [size, positive])
def test_a_directory_behind_an_option_of_several_values_is_explained(
    read: Callable[[str], int], tmp_path: Path
) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="DIR goes before the options"):
        read(str(tmp_path))
