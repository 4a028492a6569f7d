"""examples/torchft_replicas.py: a replica is lost, the other one goes on alone, and a new one comes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastpersist as fp

pytest.importorskip("torchft", reason="torchft has no wheel for this Python")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchft_replicas.py"


def test_replicas_go_on_from_the_newest_step_whoever_is_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path / "run")], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = done.stdout.split("replica 1 is gone\n")
    begun = re.findall(r"replica (\d) goes on from step (\d+), one of 2", before)
    assert sorted(begun)[-2:] == [("0", "0"), ("1", "0")]
    assert "replica 1 took step 7, one of 2" in before
    steps_alone = [int(step) for step in re.findall(r"replica 0 took step (\d+), one of 1", after)]
    assert len(steps_alone) == 5
    together = re.findall(r"replica (\d) goes on from step (\d+), one of 2", after)
    assert sorted(replica for replica, _ in together) == ["0", "1"]
    assert len({step for _, step in together}) == 1
    assert int(together[0][1]) >= steps_alone[0] - 1
    assert "replica 1 took step 20, one of 2" in after
    assert fp.Checkpointer(tmp_path / "run").steps() == [18, 19, 20]
    assert fp.verify(tmp_path / "run" / "step-00000020").ok
