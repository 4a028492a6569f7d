"""Several ranks that do not fit each other: other versions, other states, other steps, another number of them.

What is no replica is named, and nothing of it is published; what may differ does no harm. The next save of the same
ranks works, what was saved before loads.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forking import SMALL_RING
from support.process_groups import run_ranks
from support.rank_faults import (
    SIZES,
    Trainer,
    everybodys,
    expect_steps,
)
from support.runs import Run, hidden_names

import fastpersist as fp
from fastpersist.saving.ownership import Owners


def test_ranks_with_different_versions_of_torch_are_warned_of_and_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        caplog.set_level(logging.WARNING, logger="fastpersist")
        if rank == 1:
            monkeypatch.setattr(torch, "__version__", "1.13.1")
        trainer = Trainer(root, rank)
        assert trainer.outcome() is None
        trainer.close()
        return [record.message for record in caplog.records]

    own_version = torch.__version__
    first, second = run_ranks(2, work, environment=SMALL_RING)
    assert len(first) == 1
    assert own_version in first[0]
    assert "1.13.1" in first[0]
    assert second == []
    expect_steps(root, [1])


def other_shape() -> Run:
    return Run((290_000, 7)).advance(2)


def other_dtype() -> Run:
    run = Run(SIZES).advance(2)
    moments = run.optimizer.state[run.model[0]]
    moments["exp_avg"] = moments["exp_avg"].view(torch.int32)  # the same bytes
    return run


def one_tensor_more() -> Run:
    return Run((*SIZES, 270_000)).advance(2)


def one_tensor_less() -> Run:
    return Run(SIZES[1:]).advance(2)


def other_values() -> Run:
    run = Run(SIZES).advance(2)
    with torch.no_grad():
        run.model[0].mul_(2)
    return run


BAD_RUNS = {
    other_shape: "model.0; optimizer.* on rank 1",
    other_dtype: "optimizer.*exp_avg on rank 1",
    one_tensor_more: "rank 0 has 3 .*rank 1 6",
    one_tensor_less: "rank 0 has 3 .*rank 1 0",
    other_values: "model.0 on rank 1",
}


@pytest.mark.parametrize("check_replicas", [False, True], ids=["samples", "all bytes"])
@pytest.mark.parametrize("make", BAD_RUNS)
def test_replicas_that_are_none_are_named_and_nothing_is_published(
    tmp_path: Path, make: Callable[[], Run], check_replicas: bool
) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank, check_replicas=check_replicas)
        assert trainer.outcome() is None
        if rank == 1:
            bad, owners = make(), trainer.checkpoints._saver._owners
            trainer.checkpoints._saver._owners = Owners(bad.optimizer, (), "optimizer")
            error = trainer.checkpoints.save(2, bad.state(), rank_state={"rank": 1, "step": 2}).exception()
            trainer.checkpoints._saver._owners = owners
            trainer.run.advance()
        else:
            error = trainer.outcome()
        told = everybodys(error)
        assert trainer.outcome() is None
        trainer.close()
        return told

    first, second, third = run_ranks(3, work, environment=SMALL_RING)[0]
    assert type(first) is fp.CoordinationError
    assert re.search(BAD_RUNS[make], str(first)), str(first)
    assert "rank 2" not in str(first)
    for error in (second, third):
        assert isinstance(error, fp.PeerError)
        assert error.rank == 0
        assert str(first) in str(error)
    expect_steps(root, [1, 3])


def test_replicas_in_another_order_are_named_and_nothing_is_published(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        first, second = torch.nn.Parameter(torch.ones(280_000)), torch.nn.Parameter(torch.ones(290_000))
        optimizer = torch.optim.SGD([first, second])
        checkpoints = fp.Checkpointer(root, optimizer=optimizer, process_group=dist.group.WORLD)
        state = {"first": first, "second": second}
        error = checkpoints.save(1, dict(reversed(state.items())) if rank else state).exception()
        checkpoints.save(2, state).result()
        checkpoints.close()
        return error

    first, second = run_ranks(2, work, environment=SMALL_RING)
    assert type(first) is fp.CoordinationError
    assert "first; second on rank 1" in str(first)
    assert isinstance(second, fp.PeerError)
    assert fp.Checkpointer(root).steps() == [2]
    assert hidden_names(root) == []


def test_what_only_rank_0_writes_may_differ_between_ranks(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank)
        assert trainer.save(**({"noise": torch.rand(500_000), "more": list(range(rank))} if rank else {})).result()
        assert trainer.outcome() is None
        trainer.close()

    run_ranks(2, work, environment=SMALL_RING)
    expect_steps(root, [1, 2])


def test_ranks_that_save_different_steps_are_told_and_nothing_is_published(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        trainer = Trainer(root, rank)
        assert trainer.outcome() is None
        told = everybodys(trainer.outcome(ahead=10 * rank))
        assert trainer.outcome() is None
        trainer.close()
        return told

    first, second = run_ranks(2, work, environment=SMALL_RING)[0]
    assert isinstance(first, fp.CoordinationError)
    assert isinstance(second, fp.PeerError)
    for error in (first, second):
        assert "step-00000002" in str(error)
        assert "step-00000012" in str(error)
    expect_steps(root, [1, 3])


# --- another number of ranks


def test_each_number_of_ranks_goes_on_from_what_another_has_saved(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int, before: int) -> Any:
        run = Run(SIZES)
        with fp.Checkpointer(root, optimizer=run.optimizer, process_group=dist.group.WORLD) as checkpoints:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if before:
                    found = checkpoints.load(into=run.targets())
                    run.step = found["step"]
                    assert found.get("rank_state") == ({"rank": rank, "step": run.step} if before == count else None)
            for _ in range(2):
                run.advance()
                checkpoints.save(run.step, run.state(), rank_state={"rank": rank, "step": run.step})
        return [str(one.message) for one in caught]

    before = 0
    for count in (4, 2, 1, 3, 3):
        for told in run_ranks(count, work, before, environment=SMALL_RING):
            if before in (0, count):
                assert told == []
            else:
                assert len(told) == 1
                assert f"saved by {before} ranks and is loaded by {count}" in told[0]
        before = count
    expect_steps(root, list(range(1, 11)))
