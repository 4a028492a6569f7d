"""The ranks of a group meet for a Checkpointer, or all of them refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.loads_together import world
from support.process_groups import rank_endings, run_ranks

import fastpersist as fp
from fastpersist.checkpointer.meeting import meet_ranks


def test_ranks_that_meet_are_connected(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        met = meet_ranks(world(), str(tmp_path), "wait", 60.0)
        assert met is not None
        ranks, tuned_count = met
        session = ranks.begin("a test")
        told = session.gather(b"0") if rank == 0 else session.tell(b"%d" % rank)
        dist.barrier()
        ranks.close()
        return ranks.rank, ranks.count, tuned_count, told

    first, second = run_ranks(2, work)
    assert first == (0, 2, None, [b"0", b"1"])
    assert second[:2] == (1, 2)


def test_rank_that_is_alone_meets_nobody(tmp_path: Path) -> None:
    assert run_ranks(1, lambda rank, count: meet_ranks(world(), str(tmp_path), "skip", 60.0)) == [None]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_refuses_all_refuse(tmp_path: Path, failing: int) -> None:
    (tmp_path / "file").touch()

    def work(rank: int, count: int) -> None:
        meet_ranks(world(), str(tmp_path / ("file" if rank == failing else "run")), "wait", 60.0)

    for rank, ending in enumerate(rank_endings(3, work)):
        assert ending.error_type is (fp.ConfigError if rank == failing else fp.PeerError)
        assert "is a file" in ending.error_text


def test_saves_that_ranks_would_leave_out_differently_are_refused(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        meet_ranks(world(), str(tmp_path), "latest", 60.0)

    assert [ending.error_type for ending in rank_endings(2, work)] == [fp.ConfigError] * 2
