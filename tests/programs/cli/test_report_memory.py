"""The memory of `fastpersist report` on a run of 10,000 saves; it starts the program, which imports torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.run_logs import write_run

MEASURE = """
import sys
from fastpersist.cli import main
def peak_bytes():
    text = open("/proc/self/status").read()
    return int(text.split("VmHWM:")[1].split()[0]) << 10
import fastpersist.cli.report.command, torch
before = peak_bytes()
assert main(["report", sys.argv[1], "--html", sys.argv[2]]) == 0
print(before, peak_bytes())
"""


def test_memory_beside_the_imports_is_bounded(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 10_000, fails=tuple(range(0, 10_000, 7)))
    words = [sys.executable, "-c", MEASURE, str(tmp_path / "run"), str(tmp_path / "out.html")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    before, after = map(int, ended.stdout.splitlines()[-1].split())
    assert after - before < 64 << 20  # 300 MiB are the limit; what torch takes at import is not ours to bound
