"""A signal to one rank, or to several at different moments, makes all ranks save one step, and then go on alike."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.runs import Run, hidden_names
from support.sameness import assert_same
from support.store_runs import SIZES, checkpoints_at

import fastpersist as fp

SIGNALS: Any = (signal.SIGUSR1,)


class Told:
    """What handled the signal before: notes the step at which it came."""

    def __init__(self, run: Run) -> None:
        self.steps: list[int] = []
        self._run = run
        signal.signal(signal.SIGUSR1, self)

    def __call__(self, number: int, frame: object) -> None:
        self.steps.append(self._run.step)


def train_until_told(handler: Told, run: Run, checkpoints: fp.Checkpointer, occasions_per_step: int) -> None:
    """Go on as with micro-batches, at most to step 30, until the handler was told of a step."""
    occasion_count = 0
    while not handler.steps and run.step < 30:
        together()
        occasion_count += 1
        if occasion_count % occasions_per_step == 0:
            run.advance()
        checkpoints.poll()


def together() -> None:
    """Do what a step does with the other ranks."""
    dist.all_reduce(torch.ones(8))


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def saved_steps(root: Path) -> list[int]:
    reader = fp.Checkpointer(root)
    for step in reader.steps():
        assert_same(torch.load(root / f"step-{step:08d}" / "state.pt"), Run(SIZES).advance(step).state())
        assert fp.verify(root / f"step-{step:08d}").ok
    return reader.steps()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("told", [{0: 3}, {1: 3}, {0: 3, 1: 4}, {0: 4, 1: 3}])
def test_all_ranks_save_the_same_step_whoever_is_told(tmp_path: Path, count: int, told: dict[int, int]) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        handler = Told(run)
        with checkpoints_at(tmp_path, run) as checkpoints:
            checkpoints.save_on_signal(lambda: (run.step, run.state(), {"rank": rank}), SIGNALS)
            while run.step < 20 and not handler.steps:
                together()
                if told.get(rank) == run.step + 1:
                    send()
                run.advance()
            return handler.steps

    ends = run_ranks(count, work)
    assert all(end == ends[0] for end in ends)
    [step] = ends[0]
    assert 3 < step <= 8
    assert saved_steps(tmp_path) == [step]
    for rank in range(count):
        assert fp.load(tmp_path / f"step-{step:08d}" / f"rank-{rank:05d}.pt") == {"rank": rank}
    assert hidden_names(tmp_path) == []


def test_signal_to_one_ends_all_by_default_and_leaves_a_whole_step(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run = Run(SIZES)
        checkpoints = checkpoints_at(tmp_path, run)
        checkpoints.save_on_signal(lambda: (run.step, run.state()))
        while run.step < 50:
            together()
            if rank == 1 and run.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            run.advance()

    assert [ending.signal for ending in rank_endings(3, work)] == [signal.SIGTERM] * 3
    [step] = saved_steps(tmp_path)
    assert step > 3


def test_loop_that_saves_by_itself_saves_the_agreed_step_and_waits_for_it(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        handler = Told(run)
        with checkpoints_at(tmp_path, run, keep=2) as checkpoints:
            checkpoints.save_on_signal(lambda: None, SIGNALS)  # the loop saves
            while not handler.steps:
                together()
                if rank == 1 and run.step == 3:
                    send()
                run.advance()
                checkpoints.save(run.step, run.state())
                if handler.steps:
                    assert checkpoints.latest() == run.step
            return handler.steps

    first, other = run_ranks(2, work)
    assert first == other
    assert saved_steps(tmp_path)[-1] == first[0]


def test_ranks_that_go_on_may_be_told_again_and_save_the_step_once_more(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        handler = Told(run)
        with checkpoints_at(tmp_path, run) as checkpoints:
            checkpoints.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
            for _ in range(30):
                together()
                if run.step in (3, 15):
                    send()  # to all of them
                run.advance()
                if run.step in handler.steps:
                    checkpoints.save(run.step, run.state())
            return handler.steps

    first, other = run_ranks(2, work)
    assert first == other
    assert len(first) == 2
    assert saved_steps(tmp_path) == first


def test_poll_is_the_occasion_without_an_optimizer(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        handler = Told(run)
        with fp.Checkpointer(tmp_path, process_group=dist.group.WORLD) as checkpoints:
            checkpoints.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
            while not handler.steps and run.step < 30:
                run.advance()
                together()
                if rank == 0 and run.step == 2:
                    send()
                checkpoints.poll()
        return handler.steps

    first, other = run_ranks(2, work)
    assert first == other
    assert saved_steps(tmp_path) == first


@pytest.mark.parametrize("looks_back", [False, True])
def test_step_that_was_resumed_from_is_saved_already(tmp_path: Path, looks_back: bool) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        handler = Told(run)
        with checkpoints_at(tmp_path, run) as checkpoints:
            for _ in range(2):
                run.advance()
                checkpoints.save(run.step, run.state()).result()
        with fp.Checkpointer(tmp_path, process_group=dist.group.WORLD) as checkpoints:
            checkpoints.load(into=run.targets())
            if looks_back:
                run.advance()
                checkpoints.save(run.step, run.state()).result()
                checkpoints.load(1)  # only to look at it
            checkpoints.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
            if rank == 0:
                send()
            train_until_told(handler, run, checkpoints, occasions_per_step=4)
        return handler.steps

    first, other = run_ranks(2, work)
    assert first == other
    assert first > [3 if looks_back else 2]
    assert saved_steps(tmp_path) == [1, 2, *([3] if looks_back else []), *first]


def test_ranks_that_do_not_wait_for_each_other_find_a_step_too(tmp_path: Path) -> None:
    """Without a collective in each step, one rank may be far ahead: it is beyond the first steps that are named."""

    def work(rank: int, count: int) -> Any:
        run = Run((7,))
        handler = Told(run)
        with checkpoints_at(tmp_path, run) as checkpoints:
            checkpoints.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
            while run.step < 400 and not handler.steps:
                if rank == 0 and run.step == 3:
                    send()
                run.advance()
                time.sleep(0.02 if rank == 0 else 0.005)
            return handler.steps

    first, other = run_ranks(2, work)
    assert first == other
    assert fp.Checkpointer(tmp_path).steps() == first


def errors_in_log() -> list[str]:
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastpersist").addHandler(handler)
    return found


def test_rank_that_is_gone_leaves_nobody_waiting(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        said = errors_in_log()
        run = Run(SIZES)
        handler = Told(run)
        checkpoints = checkpoints_at(tmp_path, run)
        checkpoints.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        run.advance()
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        send()
        for _ in range(200):
            run.advance()
            if handler.steps:
                return said
            time.sleep(0.02)
        return None

    endings = rank_endings(3, work)
    for ending in endings[:2]:
        assert any("the ranks cannot agree on a step" in line for line in ending.result), ending


def test_grace_period_ends_a_rank_that_waits_for_one_that_never_comes(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run = Run(SIZES)
        checkpoints = checkpoints_at(tmp_path, run)
        checkpoints.save_on_signal(lambda: (run.step, run.state()), grace_s=1.0)
        if rank == 0:
            return  # its process stays, and takes part in nothing
        os.kill(os.getpid(), signal.SIGTERM)
        together()  # in C++, where no Python runs

    endings = rank_endings(2, work)
    assert endings[1].signal == signal.SIGTERM
    assert fp.Checkpointer(tmp_path).steps() == []


def test_new_group_agrees_anew(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        handler = Told(run)
        with checkpoints_at(tmp_path, run) as checkpoints:
            checkpoints.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
            run.advance()
            checkpoints.rebind(dist.group.WORLD)
            while not handler.steps and run.step < 20:
                together()
                if rank == 1 and run.step == 3:
                    send()
                run.advance()
            checkpoints.save(30, run.state())  # sessions are still counted alike
            return handler.steps

    first, other = run_ranks(2, work)
    assert first == other
    assert fp.Checkpointer(tmp_path).steps() == [*first, 30]


def test_step_that_was_saved_with_another_group_is_saved_already(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        said = errors_in_log()
        run = Run(SIZES)
        handler = Told(run)
        with checkpoints_at(tmp_path, run) as checkpoints:
            checkpoints.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
            run.advance()
            checkpoints.save(run.step, run.state()).result()
            dist.barrier()
            checkpoints.rebind(dist.new_group([1, 0]))
            if rank == 1:
                send()
            train_until_told(handler, run, checkpoints, occasions_per_step=10)
        return handler.steps, said

    (first, said), other = run_ranks(2, work)
    assert (first, said) == other
    assert said == []
    assert first > [1]
    assert saved_steps(tmp_path) == [1, *first]
