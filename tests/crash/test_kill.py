"""kill -9 while a process saves in a loop, at random moments and at every point of the protocol.

Whatever was being done: the file is whole, not older than the last save that had returned, and the next
save clears up.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from support.filesystems import FILE_OPERATIONS, KillingFilesystem, Operation, WatchedFilesystem
from support.forking import NOTHING_REPORTED, SMALL_RING, Child, Report
from support.states import load_step, make_state, pending_files

import fastpersist as fp
from fastpersist.commit.filesystem import using

STATE_BYTES = 1_000_000
ALIVE_S_MAX = 0.2  # some ten saves; the first may be killed as well as any other
SURE_KILL_COUNT = 10  # of so many random kills, at least one hits a save between its first and last operation

Point = tuple[str, Literal["before", "after"]]
POINTS: list[Point] = []  # in the order in which a save comes to them, when there is something to sweep
for _name in ("unlink", "create", "allocate", "truncate", "sync", "rename", "sync_directory"):
    POINTS += [(_name, "before"), (_name, "after")]

suffixes = pytest.mark.parametrize("suffix", [".pt", ".safetensors"])


def step_on_disk(path: Path) -> int | None:
    return load_step(path, STATE_BYTES) if path.exists() else None


def save_step(path: Path, step: int, engine: str = "auto") -> None:
    fp.save(make_state(step, STATE_BYTES), path, engine=engine)


def expect_next_save_clears_up(path: Path, step: int) -> None:
    save_step(path, step)
    assert step_on_disk(path) == step
    assert not pending_files(path.parent)


def saving_from(path: Path, first_step: int, engine: str) -> Callable[[Report], None]:
    """Return what a child does until it is killed: save the next step, report it, over and over."""

    def save_steps(report: Report) -> None:
        for step in range(first_step, first_step + 1_000_000):
            save_step(path, step, engine)
            report(step)

    return save_steps


@suffixes
def test_killed_at_random_moments(tmp_path: Path, suffix: str, request: pytest.FixtureRequest) -> None:
    kill_count = (request.config.getoption("--kills") + 1) // 2  # half of them for each format
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    engines = ["auto", *(probe.name for probe in fp.engines(tmp_path) if probe.usable)]
    path = tmp_path / f"state{suffix}"
    returned: int | None = None  # the step whose save has returned last, if the file is to be there at all
    step = 0
    leftover_count = 0
    for _ in range(kill_count):
        with Child(saving_from(path, step, rng.choice(engines)), SMALL_RING) as child:
            time.sleep(rng.uniform(0.0, ALIVE_S_MAX))
            ending = child.kill()
            assert ending.signal == signal.SIGKILL, ending.message
            if child.reported != NOTHING_REPORTED:
                returned = child.reported
                step = returned + 1
        leftover_count += len(pending_files(tmp_path))
        assert step_on_disk(path) in (returned, step)

        returned = step + 1
        expect_next_save_clears_up(path, returned)
        step = returned + 1
        if rng.random() < 0.25:
            path.unlink()
            returned = None
    assert leftover_count > 0 or kill_count < SURE_KILL_COUNT


def test_every_operation_is_a_point() -> None:
    assert {name for name, _ in POINTS} == set(FILE_OPERATIONS)


@pytest.mark.parametrize("point", POINTS, ids="-".join)
@pytest.mark.parametrize("replaces", [True, False], ids=["replaces", "first"])
@suffixes
def test_killed_at_a_point_of_the_protocol(tmp_path: Path, suffix: str, replaces: bool, point: Point) -> None:
    path = tmp_path / f"state{suffix}"
    if replaces:
        save_step(path, 0)
    (tmp_path / f".{path.name}.pending-0011223344556677").touch()

    def save_until_killed(report: Report) -> None:
        with using(KillingFilesystem(*point)):
            save_step(path, 1)

    with Child(save_until_killed, SMALL_RING) as child:
        ending = child.wait()
    assert ending.signal == signal.SIGKILL, f"it was not killed at {point}: {ending}"

    reached = POINTS.index(point)
    committed = reached >= POINTS.index(("rename", "after"))
    swept = reached >= POINTS.index(("unlink", "after"))
    created = reached >= POINTS.index(("create", "after"))
    assert step_on_disk(path) == (1 if committed else 0 if replaces else None)
    assert len(pending_files(tmp_path)) == (not swept) + (created and not committed)
    expect_next_save_clears_up(path, 2)


class StoppingFilesystem(WatchedFilesystem):
    """Reports and waits to be killed when everything is written and nothing is durable."""

    def __init__(self, report: Report) -> None:
        self._report = report

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        if operation.name == "sync":
            self._report(0)
            signal.pause()
        yield


def test_pending_file_is_left_alone_while_its_writer_lives(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"

    def save_until_stopped(report: Report) -> None:
        with using(StoppingFilesystem(report)):
            save_step(path, 1)

    with Child(save_until_stopped) as child:
        while child.reported == NOTHING_REPORTED and not child.ended():
            time.sleep(0.005)
        (live,) = pending_files(tmp_path)
        save_step(path, 2)
        assert pending_files(tmp_path) == [live]
        child.kill()
    assert pending_files(tmp_path) == [live]
    expect_next_save_clears_up(path, 3)
