"""benchmarks/deepnvme.py runs, with a tensor so small that its figures mean nothing, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "deepnvme.py"


def test_all_ways_take_turns_and_leave_nothing(tmp_path: Path) -> None:
    disk, result_path = tmp_path / "disk", tmp_path / "result.json"
    disk.mkdir()
    options = ["--size-mb", "8", "--block", "1M", "--rounds", "2", "--json", str(result_path)]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARK), str(disk), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(result_path.read_text())
    rows = result["rows"]
    for direction in ("read", "write"):
        assert f"{direction}, fio" in rows
        for name in ("TensorFile", "our aio_handle"):
            assert len(rows[f"{direction}, {name}"]["seconds"]) == 2
    assert "DeepNVMe is left out" in result["notes"][0] or len(rows["read, DeepNVMe"]["seconds"]) == 2
    assert result["notes"][0].split(":")[0] in done.stdout
    assert not list(disk.iterdir())
