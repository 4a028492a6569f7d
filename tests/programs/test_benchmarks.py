"""Benchmarks of one process, with little data: each prints a line for all that it measures, and writes its JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.benchmark_rooms import BENCHMARKS
from support.programs import run_file_in_fork


@pytest.mark.parametrize(
    ("name", "words", "line", "count_min"),
    [
        ("many_tensors.py", "--tensors 8 80 --saves 2", r" +80? tensors: first [\d.]+ ms, then [\d.]+ ms", 2),
        ("copied_state.py", "--megabytes 2 --saves 2", r"\d+ threads: first save \d+ ms, then \d+ .*in \d+ ms", 1),
        ("rows/cached.py", "--table-bytes 200000 --counts 9 90 --repeat 3", r"90? +[\d.]+ +[\d.]+ +[\d.]+", 2),
    ],
)
def test_what_is_measured_is_said(name: str, words: str, line: str, count_min: int, tmp_path: Path) -> None:
    code, output, errors = run_file_in_fork(
        BENCHMARKS / name, tmp_path, *words.split(), "--json", tmp_path / "found.json", directory=tmp_path
    )
    assert code == 0, errors
    found = [said for said in output.splitlines() if re.match(line, said)]
    assert len(found) >= count_min, output
    assert json.loads((tmp_path / "found.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]  # what it wrote to measure is gone
