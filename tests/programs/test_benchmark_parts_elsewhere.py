"""benchmarks/ranks/parts_elsewhere.py with four ranks and little data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ranks" / "parts_elsewhere.py"


@pytest.mark.long  # starts five processes that import torch
def test_ranks_load_what_lies_in_the_stores_of_others(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [sys.executable, *words, SCRIPT, tmp_path, "--megabytes", "2"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    )
    assert len(re.findall(r"4 ranks, 2 MB each: [\d.]+ s, \d+ MB moved", done.stdout)) == 3
