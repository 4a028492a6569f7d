"""benchmarks/ranks/simulated_ranks.py with few ranks; each run starts two processes, which import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ranks" / "simulated_ranks.py"


def measured(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=True, timeout=200
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.long  # half a minute, as the others
def test_followers_are_connected_and_hear_of_each_commit() -> None:
    found = measured("commit", "--ranks", "9")
    assert found["ranks"] == 9
    assert found["messages"] == 8 * 5
    assert 8 < found["descriptors"] < 8 + 7  # one for each follower; the listener, the selector, what wakes the thread


@pytest.mark.long
def test_each_saver_of_a_group_has_connections_of_its_own() -> None:
    assert 2 * 8 < measured("commit", "--ranks", "9", "--savers", "2")["descriptors"] < 2 * (8 + 7)


@pytest.mark.long
def test_a_soft_limit_below_the_number_of_ranks_is_raised() -> None:
    assert measured("commit", "--ranks", "60", "--soft-limit", "50")["messages"] == 59 * 5


@pytest.mark.long
def test_plans_of_replicas_are_sent_once_and_kept() -> None:
    found = measured("plan", "--ranks", "24", "--tensors", "300", "--shards", "3")
    assert found["chunks"] == 900
    sent = [float(found[f"save{save}_messages_MB"]) for save in range(3)]
    assert sent[0] < 24 * 300 * 10 / 1e6  # bytes for an item that a rank holds
    assert max(sent[1:]) < 0.5 * sent[0]
