"""A short storm: forked ranks, one of which is killed, stopped or late. `make storm` has 32 of them for a minute."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rank_storm import KINDS, happening, storm


@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_are_killed_stopped_or_late_leave_whole_steps(tmp_path: Path, seed: int) -> None:
    for number in range(len(KINDS)):
        assert f"round {number}: {KINDS[number]}" in storm(tmp_path, 4, seed, number)


def test_a_storm_that_finds_something_says_how_to_repeat_it(tmp_path: Path) -> None:
    storm(tmp_path, 2, 1, 3)
    (step,) = sorted(tmp_path.glob("step-*"))[-1:]
    (step / "MANIFEST.json").write_bytes(b"{}")
    with pytest.raises(Exception, match=r"MANIFEST|step"):
        storm(tmp_path, 2, 1, 3)
    assert happening(1, 3, 2) == happening(1, 3, 2)
