"""pacing: how long a step takes to follow a save, and how a save spreads its writes over that time."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import pytest
import torch

import fastpersist as fp
from fastpersist import _native
from fastpersist.saving import pacing


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1)


@pytest.fixture(autouse=True)
def no_other_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget saves that other tests have left under way."""
    monkeypatch.setattr(pacing, "_under_way", weakref.WeakSet())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_spread_is_a_share_of_the_shortest_of_the_last_delays_from_save_to_step(clock: list[float]) -> None:
    optimizer = an_optimizer()
    assert pacing.spread_s([optimizer]) == 0.0
    for delay_s in (1.0, 9.0, 2.0, 4.0, 3.0, 5.0):  # the first is forgotten by then
        pacing.note_save([optimizer], manual=False)
        clock[0] += delay_s
        pacing.note_step(optimizer, manual=False)
        pacing.note_step(optimizer, manual=False)  # of the next step: no save before it
    assert pacing.spread_s([optimizer]) == pytest.approx(2.0 * pacing.PACE_SHARE)


def test_of_several_optimizers_the_one_that_steps_first_counts(clock: list[float]) -> None:
    early, late = an_optimizer(), an_optimizer()
    pacing.note_save([early, late], manual=False)
    clock[0] += 1.0
    pacing.note_step(early, manual=False)
    clock[0] += 1.0
    pacing.note_step(late, manual=False)
    assert pacing.spread_s([late, early]) == pytest.approx(1.0 * pacing.PACE_SHARE)


def test_with_a_manual_gate_the_step_itself_is_no_gate(clock: list[float]) -> None:
    optimizer = an_optimizer()
    pacing.note_save([optimizer], manual=True)
    pacing.note_step(optimizer, manual=False)  # Lightning calls step() before forward and backward
    clock[0] += 3.0
    pacing.note_step(optimizer, manual=True)
    assert pacing.spread_s([optimizer]) == pytest.approx(3.0 * pacing.PACE_SHARE)


def test_lengths_of_steps_are_told_beside_a_save_and_without(clock: list[float]) -> None:
    optimizer = an_optimizer()

    def step_after(seconds: float) -> None:
        clock[0] += seconds
        pacing.note_step(optimizer, manual=False)

    pacing.note_save([optimizer], manual=False)
    assert pacing.take_step_times([optimizer]) == (0.0, 0.0)
    step_after(9.0)  # since when, is not known
    step_after(1.0)
    step_after(2.0)
    save = an_optimizer()  # or any other object
    pacing.save_begun(save)
    step_after(3.0)
    step_after(4.0)
    pacing.save_over(save)
    step_after(5.0)  # one was under way when it began
    step_after(6.0)
    pacing.note_save([optimizer], manual=False)  # which is over before the step
    step_after(8.0)
    pacing.note_step(optimizer, manual=True)  # is no step
    assert pacing.take_step_times([an_optimizer(), optimizer]) == (pytest.approx(9.0 / 3), pytest.approx(20.0 / 4))
    assert pacing.take_step_times([optimizer]) == (0.0, 0.0)
    pacing.save_begun(an_optimizer())  # which nobody holds
    gc.collect()
    step_after(1.0)
    assert pacing.take_step_times([optimizer]) == (pytest.approx(1.0), 0.0)


def test_a_save_tells_the_lengths_of_the_steps_before_it(tmp_path: Path) -> None:
    optimizer = an_optimizer()
    with fp.Checkpointer(tmp_path, optimizer=optimizer) as checkpoints:
        for number in range(3):
            checkpoints.save(number, {"optimizer": optimizer.state_dict()})
            optimizer.step()
            checkpoints.wait()
            for _ in range(3):
                optimizer.step()
        first, second, third = checkpoints.stats()
    assert (first.step_s, first.step_beside_save_s) == (0.0, 0.0)
    assert min(second.step_s, second.step_beside_save_s, third.step_s, third.step_beside_save_s) > 0


def test_clocks_do_not_keep_optimizers() -> None:
    optimizer = an_optimizer()
    pacing.note_save([optimizer], manual=False)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


def paces_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    seen: list[tuple[float, float]] = []

    class Recording(_native.Snapshot):
        def pace(self, delay_s: float, seconds: float) -> None:
            seen.append((delay_s, seconds))
            super().pace(delay_s, seconds)

    monkeypatch.setattr(_native, "Snapshot", Recording)
    return seen


def test_files_of_a_directory_share_the_time_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paces = paces_of(monkeypatch)
    weights = torch.nn.Parameter(torch.zeros(1 << 20))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    monkeypatch.setattr("fastpersist.saving.pacing.spread_s", lambda _: 1000.0)
    with fp.DirectorySave(tmp_path / "a") as files:
        files.save({"w": weights.data}, "one.pt", optimizer)
        files.save({"w": weights.data, "x": torch.zeros(2 << 20)}, "three.pt", optimizer)
        pending = files.publish()
    pending.result()
    (first_delay, first_s), (second_delay, second_s) = paces
    assert first_delay == 0.0
    assert second_delay == pytest.approx(first_s)
    assert second_s == pytest.approx(3 * first_s)
    assert 500.0 < second_delay + second_s <= 1000.0


def test_who_waits_for_a_spread_save_ends_the_spreading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.nn.Parameter(torch.zeros(1 << 20))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    monkeypatch.setattr("fastpersist.saving.pacing.spread_s", lambda _: 3600.0)
    pending = fp.save_async({"w": weights.data}, tmp_path / "a.pt", optimizer=optimizer)
    assert pending.result(timeout=60) == tmp_path / "a.pt"


@pytest.mark.parametrize("waits", [True, False])
def test_with_a_manual_gate_steps_are_noted_also_when_all_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    weights = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    pending = fp.save_async({"w": weights.data}, tmp_path / "a.pt", optimizer=optimizer, gate="manual")
    pending.result()
    if waits:
        pending.wait_captured()
    weights.grad = torch.ones(8)
    optimizer.step()
    assert pacing.spread_s([optimizer]) > 0
