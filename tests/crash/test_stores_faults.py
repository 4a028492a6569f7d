"""Saves of two ranks that share no file system, disturbed before calls that matter: kill -9, or a call that fails.

Whoever it was, and whatever it was doing: all load one step of one save; what had been reported as durable is there;
the next save works. All kills, and all failures, of a test hit the same roots.
"""

from __future__ import annotations

import errno
import itertools
import signal
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.forking import SMALL_RING
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import Point, everybodys, kill_this_process, points_of, spread, watched
from support.runs import Run, hidden_names
from support.sameness import assert_same
from support.store_runs import SIZES, checkpoints_at, two_stores

import fastpersist as fp


@dataclass(frozen=True)
class Outcome:
    """What one rank knows of a save: what was loaded before, what was durable before, its error, and its calls."""

    loaded: int
    durable: int
    error: BaseException | None
    counts: Counter[str]


def save_twice(
    rank: int,
    count: int,
    roots: list[Path],
    victim: int,
    point: Point | None,
    replaces: bool,
    node_local: str,
) -> Outcome:
    """Load what is there and check it, save one state, and then one more, in which `victim` is killed at a point."""
    run = Run(SIZES)
    checkpoints = checkpoints_at(roots[rank], run, keep=1, node_local=node_local)
    loaded = 0
    if any(root.exists() for root in roots):
        found = checkpoints.load()
        loaded = run.load(checkpoints).step
        expected = Run(SIZES).advance(loaded)
        assert found["rank_state"] == {"rank": rank, "step": loaded}
        assert_same(run.optimizer.state_dict(), expected.optimizer.state_dict())
        assert_same(found["model"], expected.model.state_dict())
    own = {"rank": rank, "step": run.advance().step}
    target = 1 if replaces else run.step
    checkpoints.save(target, run.state(), rank_state=own, overwrite=replaces).result()
    durable = run.step
    run.advance()
    own = {"rank": rank, "step": run.step}
    dist.barrier()
    with watched(point if rank == victim else None, kill_this_process) as counts:
        try:
            error = checkpoints.save(
                1 if replaces else run.step, run.state(), rank_state=own, overwrite=replaces
            ).exception()
        except fp.FastPersistError as raised:
            error = raised
        checkpoints.close()
    return Outcome(loaded, durable, error, counts)


@pytest.mark.filterwarnings("ignore:.*cannot be loaded, going back:RuntimeWarning")
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replace"])
@pytest.mark.parametrize("node_local", ["parts", "copies"])
def test_rank_killed_before_each_call_leaves_one_step_that_all_stores_have(
    tmp_path: Path, node_local: str, replaces: bool, request: pytest.FixtureRequest
) -> None:
    roots = two_stores(tmp_path)

    def work(victim: int, point: Point | None) -> list[Any]:
        return rank_endings(2, save_twice, roots, victim, point, replaces, node_local, environment=SMALL_RING)

    for _ in range(2):  # the second time there is something to remove
        outcomes = run_ranks(2, save_twice, roots, 0, None, replaces, node_local, environment=SMALL_RING)
    points = [(rank, point) for rank in range(2) for point in points_of(outcomes[rank].counts)]
    rename = "exchange" if replaces else "rename_to_free_name"
    for outcome in outcomes:
        assert outcome.counts[rename] == 1
    # The calls around the renames are what this is about; of the others, some.
    near = [(rank, point) for rank, point in points if point.name == rename]
    near += [(rank, Point("sync_directory", outcomes[rank].counts["sync_directory"])) for rank in range(2)]
    near += [(0, Point("Session.answer", outcomes[0].counts["Session.answer"]))]
    near += [(1, Point("Session.hear", outcomes[1].counts["Session.hear"]))]
    near += [(1, Point("Session.tell", outcomes[1].counts["Session.tell"]))]
    chosen = [*near, *spread(points, max(1, request.config.getoption("--kills") // 2 - len(near)))]
    durable, told = outcomes[0].durable + 1, [(-1, None, None)]
    states = []
    for victim, point in [*chosen, (0, None)]:
        endings = work(victim, point)
        left = endings[1 - victim].result
        assert isinstance(left, Outcome), (victim, point, endings[1 - victim].trace)
        if point is not None:
            assert endings[victim].signal == signal.SIGKILL, (victim, point, endings[victim].trace)
        states.append(left.loaded - durable)
        assert left.loaded in (durable, durable + 1), (told, left.loaded, durable)
        if told[-1][2] is not None and told[-1][2].error is None:
            assert left.loaded == durable + 1, told
        if told[-1][2] is not None and told[-1][0] == 1 and told[-1][2].error is not None:
            assert left.loaded == durable, told  # rank 0 alone can have published and be gone
        durable = left.durable
        told = [(victim, point, left)]
    assert set(itertools.islice(states, 1, None)) == {0, 1}, "all kills came at one phase"
    for root in roots:
        assert hidden_names(root) == []


@pytest.mark.parametrize(
    ("failing", "replaces", "node_local"),
    [
        (0, True, "parts"),
        (1, False, "parts"),
        (0, False, "copies"),
        (1, True, "copies"),
        pytest.param(0, False, "parts", marks=pytest.mark.long),
        pytest.param(1, True, "parts", marks=pytest.mark.long),
        pytest.param(0, True, "copies", marks=pytest.mark.long),
        pytest.param(1, False, "copies", marks=pytest.mark.long),
    ],
)
def test_call_that_fails_on_one_rank_leaves_the_step_before_or_the_new_one_in_all_stores(
    tmp_path: Path, failing: int, replaces: bool, node_local: str, request: pytest.FixtureRequest
) -> None:
    roots = two_stores(tmp_path)
    count_max = request.config.getoption("--kills")

    def full() -> None:
        raise fp.NoSpaceError(errno.ENOSPC, "no room")

    def work(rank: int, count: int) -> set[bool]:
        warnings.simplefilter("ignore")
        run = Run(SIZES)
        checkpoints = checkpoints_at(roots[rank], run, on_error="warn", keep=2, node_local=node_local)

        def save() -> BaseException | None:
            run.advance()
            step, own = 1 if replaces else run.step, {"rank": rank, "step": run.step}
            try:
                return checkpoints.save(step, run.state(), rank_state=own, overwrite=replaces).exception()
            except fp.FastPersistError as error:
                return error

        assert save() is None
        with watched() as counts:
            assert save() is None
        seen = set()
        for point in spread(points_of(everybodys(counts)[failing]), count_max):
            before = run.step
            with watched(point if rank == failing else None, full):
                error = save()
            told = everybodys(error)
            loaded = checkpoints.load()
            assert loaded["step"] in (before, run.step), (point, told)
            assert loaded["rank_state"] == {"rank": rank, "step": loaded["step"]}, (point, told)
            assert any(told) or loaded["step"] == run.step, (point, told)
            seen.add(loaded["step"] == run.step)
            dist.barrier()
            assert save() is None, point
        checkpoints.close()
        return seen

    assert run_ranks(2, work) == [{True, False}] * 2
    for root in roots:
        assert hidden_names(root) == []
