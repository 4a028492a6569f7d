"""kill -9 of one rank of several that save together: before every call that matters, and at random moments.

Whoever it was, and whatever it was doing: the others know within seconds; every committed step is whole and is what was
saved as that step; what had been reported as durable is there; new ranks go on at once, and clear up. All kills of a
test hit the same root, one run of all ranks after the other, so each run begins with what the last one has left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.forking import SMALL_RING
from support.process_groups import RankEnding, rank_endings, run_ranks
from support.rank_faults import (
    SIZES,
    Point,
    kill_this_process,
    kill_this_process_later,
    points_of,
    spread,
    state_numbers,
    wait_until,
    watched,
)
from support.runs import Replay, Run, hidden_names
from support.states import pending_files

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.distributed import coordination
from fastpersist.saving.pending_save import PendingSave

NOTICED_S_MAX = 5.0  # the kernel tells at once that a process is gone; this machine may be busy
LOADING_S_MAX = 10.0  # the process group's timeout
ALIVE_S_MAX = 0.4  # some five saves


@dataclass(frozen=True)
class Outcome:
    """What one rank knows of the save that somebody did not survive.

    Attributes:
        durable: The state that was saved before.
        error: The error of the save; None if it succeeded.
        seconds: The seconds from save() until its end was known and everything closed.
        counts: The calls of this rank in that save.
    """

    durable: int
    error: BaseException | None
    seconds: float
    counts: Counter[str]


def save_twice(rank: int, count: int, root: Path, victim: int, point: Point | None, replaces: bool) -> Outcome:
    """Resume, save one state, and then one more, in which `victim` is killed at a point."""
    run = Run(SIZES)
    checkpoints = fp.Checkpointer(root, optimizer=run.optimizer, keep=2, process_group=dist.group.WORLD)
    run.resume(checkpoints)
    own = {"rank": rank, "step": run.advance().step}
    checkpoints.save(run.step, run.state(), rank_state=own).result()
    if rank == 0:
        assert hidden_names(root) == []
    durable = run.step
    run.advance()
    target = durable if replaces else run.step
    own = {"rank": rank, "step": run.step}
    dist.barrier()
    started_s = time.monotonic()
    with watched(point if rank == victim else None, kill_this_process) as counts:
        try:
            error = checkpoints.save(target, run.state(), rank_state=own, overwrite=replaces).exception()
        except fp.FastPersistError as raised:
            error = raised
        checkpoints.close()
    return Outcome(durable, error, time.monotonic() - started_s, counts)


def complaints(endings: list[RankEnding], victim: int, newest: int) -> list[str]:
    """Compare what the ranks that are left were told with the newest state that is there; return what is wrong."""
    found = []
    for rank, ending in enumerate(endings):
        if rank == victim:
            if ending.signal != signal.SIGKILL:
                found.append(f"rank {rank} was not killed: {ending.trace or ending.result}")
            continue
        outcome = ending.result
        if not isinstance(outcome, Outcome):
            found.append(f"rank {rank}: {ending.trace}")
            continue
        error, durable = outcome.error, outcome.durable
        if outcome.seconds > NOTICED_S_MAX:
            found.append(f"rank {rank} took {outcome.seconds:.1f} s")
        if newest not in (durable, durable + 1):
            found.append(f"the newest state is {newest}, and {durable} had been durable")
        elif error is None and newest == durable:
            found.append(f"rank {rank} says that it is saved, and it is not there")
        elif error is not None and not (isinstance(error, fp.PeerError) and error.rank == victim):
            found.append(f"rank {rank} says {error!r}")
        elif error is not None and victim != 0 and newest != durable:
            # Rank 0 alone can have published and be gone before it could say so.
            found.append(f"rank {rank} says that nothing was published, and it is there: {error}")
    return found


def newest_state(root: Path, replay: Replay) -> int:
    """Check all steps, and return the newest state."""
    numbers = state_numbers(root, replay)
    return numbers[max(numbers)]


def find_points(count: int, root: Path, replaces: bool) -> list[tuple[int, Point]]:
    """Return, by rank, all calls of a save that nobody disturbs."""
    for _ in range(2):  # the second time there is something to remove
        outcomes = run_ranks(count, save_twice, root, 0, None, replaces, environment=SMALL_RING)
    assert [outcome.error for outcome in outcomes] == [None] * count
    return [(rank, point) for rank in range(count) for point in points_of(outcomes[rank].counts)]


def save_modes(*modes: tuple[int, bool]) -> list[Any]:
    return [pytest.param(*mode, id=f"{mode[0]}-{'replace' if mode[1] else 'new'}") for mode in modes]


@pytest.mark.parametrize(
    ("count", "replaces"),
    [
        *save_modes((2, False), (3, True)),
        *(pytest.param(*each.values, id=each.id, marks=pytest.mark.long)
          for each in save_modes((2, True), (3, False), (4, False), (4, True))),
    ],
)  # fmt: skip
def test_rank_killed_before_each_call(
    tmp_path: Path, count: int, replaces: bool, request: pytest.FixtureRequest
) -> None:
    root = tmp_path / "run"
    replay = Replay(SIZES)
    points = find_points(count, root, replaces)
    by_rank = [{point.name for rank, point in points if rank == one} for one in range(count)]
    assert by_rank[0] >= {
        "Session.gather", "Session.answer", "Session.finish", "Writer.append", "Writer.finish", "create", "allocate",
        "truncate", "sync", "sync_directory", "rename", "unlink", "remove_directory", "write", "make_directory",
        "exchange" if replaces else "rename_to_free_name",
    }  # fmt: skip
    for names in by_rank[1:]:
        assert names == {
            "Session.tell", "Session.hear", "Session.offered", "Session.finish", "Writer.append", "Writer.finish",
            "create", "allocate", "truncate", "sync",
        }  # fmt: skip
    wrong = []
    states = [newest_state(root, replay)]
    for victim, point in spread(points, request.config.getoption("--kills")):
        endings = rank_endings(count, save_twice, root, victim, point, replaces, environment=SMALL_RING)
        states.append(newest_state(root, replay))
        wrong += [f"rank {victim} at {point}: {one}" for one in complaints(endings, victim, states[-1])]
    assert not wrong, "\n".join(wrong)
    assert {after - before for before, after in itertools.pairwise(states)} == {1, 2}, "all kills came at one phase"
    outcomes = run_ranks(count, save_twice, root, 0, None, replaces, environment=SMALL_RING)
    assert [outcome.error for outcome in outcomes] == [None] * count
    assert hidden_names(root) == []
    assert len(os.listdir(root)) == 2 + 2 + count  # .lock, LATEST, two steps, a log of each rank


def test_rank_killed_while_the_first_one_publishes_costs_nobody_the_step(tmp_path: Path) -> None:
    """The first rank's training thread looks at the connections, too, while its other thread syncs and renames."""
    root, publishing, begun = tmp_path / "run", tmp_path / "publishing", tmp_path / "begun"

    class Disk(Filesystem):
        def rename_to_free_name(self, source: str, target: str) -> None:
            if target.endswith("step-00000002"):
                publishing.touch()
                wait_until(begun.exists)
            super().rename_to_free_name(source, target)

    def work(rank: int, count: int) -> Any:
        coordination._RETURN_S = 1.0
        run = Run(SIZES)
        checkpoints = fp.Checkpointer(root, optimizer=run.optimizer, process_group=dist.group.WORLD)
        checkpoints.save(1, run.advance().state()).result()
        pids: list[int] = [0] * count
        dist.all_gather_object(pids, os.getpid())
        with using(Disk()):
            pending = checkpoints.save(2, run.advance().state())
            wait_until(publishing.exists)
            if rank == 1:
                kill_this_process()
            wait_until(lambda: Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
            after = checkpoints.save(3, run.advance().state())
            if rank == 0:
                begun.touch()
            outcomes = [pending.exception(), after.exception()]
        checkpoints.close()
        return outcomes

    endings = rank_endings(3, work, environment=SMALL_RING)
    assert endings[1].signal == signal.SIGKILL
    for rank in (0, 2):
        assert endings[rank].error_type is None, endings[rank].trace
        second, third = endings[rank].result
        assert second is None, f"rank {rank} says of a step that is there: {second}"
        assert isinstance(third, fp.PeerError)
        assert third.rank == 1
    assert fp.Checkpointer(root).steps() == [1, 2]
    assert hidden_names(root) == []


def test_workers_of_a_killed_rank_do_not_hide_that_it_is_gone(tmp_path: Path) -> None:
    root, noticed = tmp_path / "run", tmp_path / "noticed"

    def work(rank: int, count: int) -> Any:
        coordination._RETURN_S = 1.0
        run = Run(SIZES)
        checkpoints = fp.Checkpointer(root, optimizer=run.optimizer, process_group=dist.group.WORLD)
        checkpoints.save(1, run.advance().state()).result()
        if rank == 1:
            if os.fork() == 0:  # as a DataLoader does in its own time; it inherits all that is open
                try:
                    wait_until(noticed.exists)
                finally:
                    os._exit(0)
            kill_this_process()
        started_s = time.monotonic()
        error = checkpoints.save(2, run.advance().state()).exception()
        took_s = time.monotonic() - started_s
        noticed.touch()
        checkpoints.close()
        return error, took_s

    (error, took_s), _ = (ending.result for ending in rank_endings(2, work, environment=SMALL_RING))
    assert isinstance(error, fp.PeerError)
    assert error.rank == 1
    assert took_s < NOTICED_S_MAX
    assert fp.Checkpointer(root).steps() == [1]
    assert hidden_names(root) == []


# --- one file


def save_file_twice(rank: int, count: int, path: Path, victim: int, point: Point | None) -> Outcome:
    """Save the state after the one in the file, and then one more, in which `victim` is killed at a point."""
    run = Run(SIZES).advance(int(fp.load(path)["step"]) + 1)
    fp.save(run.state(), path, process_group=dist.group.WORLD)
    if rank == 0:
        assert pending_files(path.parent) == []
    durable = run.step
    state = run.advance().state()
    dist.barrier()
    started_s = time.monotonic()
    error = None
    with watched(point if rank == victim else None, kill_this_process) as counts:
        try:
            fp.save(state, path, process_group=dist.group.WORLD)
        except fp.FastPersistError as raised:
            error = raised
    return Outcome(durable, error, time.monotonic() - started_s, counts)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_rank_killed_before_each_call_of_save(tmp_path: Path, count: int, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "state.pt"
    replay = Replay(SIZES)
    fp.save(replay.at(1).state(), path)
    outcomes = run_ranks(count, save_file_twice, path, 0, None, environment=SMALL_RING)
    assert [outcome.error for outcome in outcomes] == [None] * count
    points = [(rank, point) for rank in range(count) for point in points_of(outcomes[rank].counts)]
    wrong = []
    states = [replay.check(fp.load(path, verify=True))]
    for victim, point in spread(points, request.config.getoption("--kills")):
        endings = rank_endings(count, save_file_twice, path, victim, point, environment=SMALL_RING)
        states.append(replay.check(fp.load(path, verify=True)))
        wrong += [f"rank {victim} at {point}: {one}" for one in complaints(endings, victim, states[-1])]
        assert len(pending_files(tmp_path)) <= 1
    assert not wrong, "\n".join(wrong)
    assert {after - before for before, after in itertools.pairwise(states)} == {1, 2}, "all kills came at one phase"
    run_ranks(count, save_file_twice, path, 0, None, environment=SMALL_RING)
    assert pending_files(tmp_path) == []


# --- random moments


@dataclass(frozen=True)
class Loss:
    """How one rank learned that another one is gone.

    Attributes:
        phase: What the rank was doing: "loading" or "saving".
        error: The error that the rank got.
        durable: The newest step that this rank knows to be saved, 0 if none.
        told_s: When it got the error, by the clock that all processes share.
        closed_s: When it had closed everything.
    """

    phase: str
    error: BaseException
    durable: int
    told_s: float
    closed_s: float


def train_until_somebody_is_gone(rank: int, count: int, root: Path, victim: int, alive_s: float, seed: int) -> Loss:
    """Resume, and save every step while the next one is computed, waiting for nothing but room."""
    coordination._RETURN_S = 1.0  # so long rank 0 waits for a rank whose connection was lost between two saves
    rng = random.Random(seed)  # the same on all ranks
    run = Run(SIZES)
    saves: list[tuple[int, PendingSave]] = []
    phase = "loading"
    error: BaseException | None = None
    checkpoints = fp.Checkpointer(
        root,
        optimizer=run.optimizer,
        keep=2,
        max_host_bytes=rng.choice([None, 0]),
        process_group=dist.group.WORLD,
        writers=rng.choice(["all", 1, 2]),
    )
    if rank == victim:
        kill_this_process_later(alive_s)
    try:
        run.resume(checkpoints)
        phase = "saving"
        while error is None:
            run.advance()
            pending = checkpoints.save(run.step, run.state(), rank_state={"rank": rank, "step": run.step})
            saves.append((run.step, pending))
            error = next((pending.exception() for _, pending in saves if pending.done() and pending.exception()), None)
    except fp.FastPersistError as raised:
        error = raised
    told_s = time.monotonic()
    with contextlib.suppress(fp.PeerError):
        checkpoints.close()
    durable = max((step for step, pending in saves if pending.exception() is None), default=0)
    return Loss(phase, error, durable, told_s, time.monotonic())


@pytest.mark.parametrize("count", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_rank_killed_at_random_moments(tmp_path: Path, count: int, request: pytest.FixtureRequest) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    replay = Replay(SIZES)
    root = tmp_path / "run"
    newest = 0
    phases = Counter[str]()
    for _ in range(max(1, request.config.getoption("--kills") // 4)):
        victim, alive_s = rng.randrange(count), rng.uniform(0.0, ALIVE_S_MAX)
        endings = rank_endings(
            count,
            train_until_somebody_is_gone,
            root,
            victim,
            alive_s,
            rng.randrange(1 << 32),
            group_timeout_s=LOADING_S_MAX,
            environment=SMALL_RING,
        )
        numbers = state_numbers(root, replay)
        assert all(step == number for step, number in numbers.items())
        assert max(numbers, default=0) >= newest
        newest = max(numbers, default=0)
        assert endings[victim].signal == signal.SIGKILL, endings[victim].trace
        for rank, ending in enumerate(endings):
            if rank == victim:
                continue
            loss = ending.result
            assert isinstance(loss, Loss), f"rank {rank}: {ending.trace}"
            assert newest >= loss.durable
            assert ending.seconds < alive_s + NOTICED_S_MAX + (LOADING_S_MAX if loss.phase == "loading" else 0.0)
            assert loss.closed_s - loss.told_s < NOTICED_S_MAX
            phases[loss.phase] += 1
            if loss.phase == "saving":
                assert isinstance(loss.error, fp.PeerError), repr(loss.error)
                assert loss.error.rank in (victim, 0), loss.error  # 0: it heard first, and closed
            else:
                assert isinstance(loss.error, fp.CoordinationError), repr(loss.error)
    assert phases["saving"] > 0
    outcomes = run_ranks(count, save_twice, root, 0, None, False, environment=SMALL_RING)
    assert [outcome.error for outcome in outcomes] == [None] * count
    assert hidden_names(root) == []
    assert max(state_numbers(root, replay)) == newest + 2
