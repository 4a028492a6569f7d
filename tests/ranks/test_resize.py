"""A step that another number of ranks has saved: on_resize= is offered what each of them had of its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.runs import Run
from support.store_runs import SIZES, checkpoints_at, train, two_stores

import fastpersist as fp


def offered(rank_states: list[Any], rank: int, count: int) -> Any:
    """Return all that on_resize is given."""
    return rank_states, rank, count


def saved_by(count: int, step: int = 1) -> list[dict[str, int]]:
    """Return what the ranks of `train` have saved of their own."""
    return [{"rank": rank, "step": step} for rank in range(count)]


@pytest.mark.parametrize(("count", "new_count"), [(4, 2), (2, 3), (3, 1)])
def test_each_rank_is_offered_the_states_of_all_that_saved(tmp_path: Path, count: int, new_count: int) -> None:
    run_ranks(count, train, [tmp_path] * count, 1)

    def resume(rank: int, count: int) -> Any:
        warnings.simplefilter("error", RuntimeWarning)  # nothing is left out
        run = Run(SIZES)
        with checkpoints_at(tmp_path, run) as checkpoints:
            return checkpoints.load(into=run.targets(), on_resize=offered)["rank_state"]

    assert run_ranks(new_count, resume) == [(saved_by(count), rank, new_count) for rank in range(new_count)]


def test_process_that_is_alone_is_offered_them_too(tmp_path: Path) -> None:
    run_ranks(2, train, [tmp_path] * 2, 1)
    assert fp.Checkpointer(tmp_path).load(1, on_resize=offered)["rank_state"] == (saved_by(2), 0, 1)
    assert fp.Checkpointer(tmp_path).load(keys=["rank_state"], on_resize=offered) == {"rank_state": (saved_by(2), 0, 1)}
    assert "rank_state" not in fp.Checkpointer(tmp_path).load(keys=["step"], on_resize=offered)


def test_with_the_same_number_of_ranks_each_gets_its_own_back(tmp_path: Path) -> None:
    run_ranks(2, train, [tmp_path] * 2, 1)

    def resume(rank: int, count: int) -> Any:
        return fp.Checkpointer(tmp_path, process_group=dist.group.WORLD).load(on_resize=offered)["rank_state"]

    assert run_ranks(2, resume) == saved_by(2)


def test_rank_that_had_no_state_is_none_and_nobody_is_asked_without_any(tmp_path: Path) -> None:
    def save(rank: int, count: int) -> None:
        with fp.Checkpointer(tmp_path, process_group=dist.group.WORLD) as checkpoints:
            checkpoints.save(1, {"a": 1}, rank_state="own" if rank == 1 else None)
            checkpoints.save(2, {"a": 2})

    run_ranks(3, save)
    assert fp.Checkpointer(tmp_path).load(1, on_resize=offered)["rank_state"] == ([None, "own", None], 0, 1)
    assert fp.Checkpointer(tmp_path).load(2, on_resize=offered) == {"a": 2}


@pytest.mark.parametrize("asking", [(True, True, True), (False, True, False)])
def test_states_that_lie_in_several_stores_reach_all_that_ask(tmp_path: Path, asking: tuple[bool, ...]) -> None:
    run_ranks(4, train, two_stores(tmp_path, 4), 1)
    roots = two_stores(tmp_path, 3)

    def resume(rank: int, count: int) -> Any:
        warnings.simplefilter("ignore", RuntimeWarning)
        with checkpoints_at(roots[rank], Run(SIZES)) as checkpoints:
            return checkpoints.load(on_resize=offered if asking[rank] else None).get("rank_state")

    expected = [(saved_by(4), rank, 3) if asks else None for rank, asks in enumerate(asking)]
    assert run_ranks(3, resume) == expected


def test_states_of_sharded_steps_are_offered(tmp_path: Path) -> None:
    def save(rank: int, count: int) -> None:
        with fp.Checkpointer(tmp_path, process_group=dist.group.WORLD, sharded=True) as checkpoints:
            checkpoints.save(1, {"weights": torch.ones(3)}, rank_state={"rank": rank, "step": 1})

    run_ranks(2, save)
    assert fp.Checkpointer(tmp_path).load(on_resize=offered)["rank_state"] == (saved_by(2), 0, 1)


def test_error_of_the_function_is_told_to_all_and_no_older_step_is_taken(tmp_path: Path) -> None:
    run_ranks(2, train, [tmp_path] * 2, 2)

    def refuse(rank_states: list[Any], rank: int, count: int) -> Any:
        if rank == 1:
            raise LookupError("no way to divide this")
        return rank_states

    def resume(rank: int, count: int) -> None:
        fp.Checkpointer(tmp_path, process_group=dist.group.WORLD).load(on_resize=refuse)

    endings = rank_endings(3, resume)
    assert [ending.error_type for ending in endings] == [fp.PeerError, LookupError, fp.PeerError]
    assert "no way to divide this" in endings[0].error_text


def test_state_that_is_damaged_makes_the_step_fail(tmp_path: Path) -> None:
    run_ranks(2, train, [tmp_path] * 2, 2)
    path = tmp_path / "step-00000002" / "rank-00001.pt"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.warns(RuntimeWarning, match="step 2 cannot be loaded"):
        assert fp.Checkpointer(tmp_path).load(on_resize=offered)["rank_state"] == (saved_by(2), 0, 1)


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match="on_resize is a function"):
        fp.Checkpointer(tmp_path).load(on_resize="drop")  # type: ignore[arg-type]
