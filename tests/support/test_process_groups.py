"""The ranks that other tests run say how they ended, and none is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.leaks import no_leaks
from support.process_groups import rank_endings, run_ranks


def test_results_are_in_the_order_of_the_ranks_of_one_group() -> None:
    def work(rank: int, count: int, more: int) -> tuple[int, int, float]:
        number = torch.tensor(float(rank + more))
        dist.all_reduce(number)
        return rank, count, number.item()

    with no_leaks():
        assert run_ranks(3, work, 10) == [(rank, 3, 33.0) for rank in range(3)]


def test_failure_of_one_rank_fails_the_test_with_its_traceback() -> None:
    def work(rank: int, count: int) -> None:
        if rank == 1:
            raise KeyError("a key that is missing")

    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1: Traceback.*a key that is missing"):
        run_ranks(2, work)


def test_ending_says_error_and_signal() -> None:
    def work(rank: int, count: int) -> Any:
        if rank == 0:
            raise OSError(28, "full", "a.pt")
        os.kill(os.getpid(), signal.SIGKILL)

    first, second = rank_endings(2, work)
    assert (first.error_type, first.error_attributes["errno"], first.error_attributes["filename"]) == (
        OSError,
        28,
        "a.pt",
    )
    assert (second.signal, second.error_type) == (signal.SIGKILL, None)


def test_the_timeout_of_a_group_begins_when_its_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = dist.init_process_group

    def meet_late(*arguments: Any, rank: int, **options: Any) -> None:
        time.sleep(3 * rank)
        meet(*arguments, rank=rank, **options)

    def work(rank: int, count: int) -> None:
        if rank == 0:
            dist.all_gather_object([None] * count, "nobody else comes")

    monkeypatch.setattr(dist, "init_process_group", meet_late)
    first, second = rank_endings(2, work, group_timeout_s=0.2)
    assert second.error_type is None, second.trace
    assert "Timed out" in first.error_text
    assert 0.2 <= first.seconds < 60


@pytest.mark.parametrize("failure_count", [1, 2])
def test_ranks_that_could_not_connect_meet_once_more(
    failure_count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meet = dist.init_process_group

    def fail_to_meet(*arguments: Any, rank: int, **options: Any) -> None:
        tries = len(list(tmp_path.iterdir()))
        if rank == 1 and tries < failure_count:
            (tmp_path / str(tries)).touch()
            raise RuntimeError("connectFullMesh failed")
        meet(*arguments, rank=rank, **options)

    def work(rank: int, count: int) -> int:
        return rank

    monkeypatch.setattr(dist, "init_process_group", fail_to_meet)
    if failure_count == 1:
        assert run_ranks(3, work) == [0, 1, 2]
        return
    with no_leaks(), pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1: Traceback.*connectFullMesh failed"):
        run_ranks(3, work)  # at once: the other ranks would wait 100 s


def test_rank_that_hangs_is_killed_at_the_deadline() -> None:
    def work(rank: int, count: int) -> None:
        if rank == 0:
            time.sleep(300)

    started_s = time.monotonic()
    with no_leaks(), pytest.raises(pytest.fail.Exception, match=r"ranks \[0\] still ran after 1.5 s"):
        run_ranks(2, work, timeout_s=1.5)
    assert time.monotonic() - started_s < 100
