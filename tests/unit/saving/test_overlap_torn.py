"""What training may not do while a save is under way, and what the disk may do to it: one error, and no wrong file.

What training may do: test_overlap_correctness.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import overlap_fixtures
from support.overlap_fixtures import trained
from support.states import pending_files
from support.training import (
    PATIENCE_S,
    WAYS,
    WIDTH,
    FailingFilesystem,
    Overlap,
    backward,
    small_model,
    state_of,
    torn_by,
    train,
    waiting_step,
)

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import using
from fastpersist.saving import capture, write_file

adam = functools.partial(torch.optim.Adam, lr=0.1)


overlap = overlap_fixtures.overlap
held = overlap_fixtures.held_either_way


# --- changes before the gate


def load_other_weights(model: torch.nn.Module) -> None:
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})


def add_to_one_parameter(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1)


def change_it_in_inference_mode(model: torch.nn.Module) -> None:
    with torch.inference_mode():
        model.get_parameter("0.weight").add_(1)


def change_a_view_of_it(model: torch.nn.Module) -> None:
    model.get_parameter("0.weight").detach()[3, 5:7].fill_(1)


changes = pytest.mark.parametrize(
    "change", [load_other_weights, add_to_one_parameter, change_it_in_inference_mode, change_a_view_of_it]
)


@changes
@pytest.mark.parametrize("gate", ["optimizer", "manual"])
def test_change_before_the_gate_fails_one_save_and_no_other(
    held: Overlap, change: Callable[[torch.nn.Module], None], gate: str
) -> None:
    model, optimizer = trained()
    held.writers.release()
    fp.save({"old": 1}, held.directory / "state.pt")
    held.writers.hold()
    torn = held.save(state_of(model, optimizer), optimizer=optimizer, gate=gate)
    change(model)
    torn_by(held, torn, "model.0.weight")
    assert fp.load(held.directory / "state.pt") == {"old": 1}
    assert not pending_files(held.directory)
    state = state_of(model, optimizer)
    pending = held.save(state, optimizer=optimizer, gate=gate)
    change(model)
    pending.wait_captured()
    train(model, optimizer)
    held.check(pending, state)


@changes
@pytest.mark.parametrize("gate", ["optimizer", "manual"])
def test_change_after_wait_captured_is_safe(
    overlap: Overlap, change: Callable[[torch.nn.Module], None], gate: str
) -> None:
    model, optimizer = trained()
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer, gate=gate)
    pending.wait_captured()
    assert pending.captured()
    change(model)
    train(model, optimizer)
    overlap.check(pending, state)
    assert pending.stats.bytes_before_return == 0


def test_change_of_optimizer_state_is_noticed(held: Overlap) -> None:
    model, optimizer = trained()
    pending = held.save(state_of(model, optimizer), optimizer=optimizer)
    optimizer.state[model[2].bias]["exp_avg"].zero_()
    torn_by(held, pending, "exp_avg")


def test_change_and_then_a_step_is_noticed_at_the_gate(held: Overlap) -> None:
    model, optimizer = trained()
    pending = held.save(state_of(model, optimizer), optimizer=optimizer)
    add_to_one_parameter(model)
    train(model, optimizer)  # what is torn already is not waited for, and training goes on
    torn_by(held, pending, "model.0.weight")


def test_all_that_changed_is_volatile_afterwards(held: Overlap) -> None:
    model, optimizer = trained()
    torn = held.save(state_of(model, optimizer), optimizer=optimizer)
    load_other_weights(model)
    torn_by(held, torn)
    state = state_of(model, optimizer)
    pending = held.save(state, optimizer=optimizer)
    load_other_weights(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    pending.wait_captured()
    held.check(pending, state)
    if held.way == "held":
        assert pending.stats.bytes_before_return == sum(tensor.nbytes for tensor in model.state_dict().values())


def test_embedding_with_max_norm_changes_in_forward(held: Overlap) -> None:
    embedding = torch.nn.Embedding(WIDTH, WIDTH, max_norm=0.5)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        embedding(torch.randint(WIDTH, (32,))).square().sum().backward()
        optimizer.step()

    step()
    torn = held.save(state_of(embedding, optimizer), optimizer=optimizer)
    step()
    torn_by(held, torn, "model.weight")
    for _ in range(2):
        state = state_of(embedding, optimizer)
        pending = held.save(state, optimizer=optimizer)
        step()
        held.check(pending, state)


def test_embedding_with_max_norm_and_wait_captured(overlap: Overlap) -> None:
    embedding = torch.nn.Embedding(4 * WIDTH, WIDTH, max_norm=0.5)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    state = state_of(embedding, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    pending.wait_captured()
    embedding(torch.arange(WIDTH)).sum().backward()
    optimizer.step()
    overlap.check(pending, state)


@pytest.mark.parametrize("trained_too", [False, True], ids=["", "owned by an optimizer"])
def test_constant_that_changes_fails_one_save_and_no_other(held: Overlap, trained_too: bool) -> None:
    frozen, optimizer = trained(1)
    given = optimizer if trained_too else None
    torn = held.save({"frozen": frozen.state_dict()}, optimizer=given, constant=frozen)
    add_to_one_parameter(frozen)
    torn_by(held, torn, "frozen.0.weight")
    state = {"frozen": frozen.state_dict()}
    pending = held.save(state, optimizer=given, constant=frozen)
    add_to_one_parameter(frozen)
    held.check(pending, state)


@pytest.mark.parametrize("named", ["model", "state_dict"])
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_constant_that_an_optimizer_trains_is_never_torn(overlap: Overlap, fused: bool, named: str) -> None:
    model = small_model()
    optimizer = adam(model.parameters(), fused=fused, foreach=not fused)
    state = model.state_dict()
    pending = overlap.save(state, optimizer=optimizer, constant=model if named == "model" else model.state_dict())
    train(model, optimizer)
    overlap.let_all_finish()
    if not isinstance(pending.exception(), fp.TornStateError):  # to refuse it is safe too
        overlap.check(pending, state)


# --- errors of the disk


def expect_one_delivery(pending: fp.PendingSave, kind: type[Exception]) -> None:
    error = pending.undelivered_error()
    assert isinstance(error, kind)
    assert pending.undelivered_error() is None
    assert pending.exception() is error
    with pytest.raises(kind):
        pending.result()


@pytest.mark.parametrize("way", ["held", "no room"])
def test_full_disk_opens_the_gate_and_is_told(tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture) -> None:
    with Overlap(tmp_path, way) as overlap:
        model, optimizer = trained()
        with using(writers := FailingFilesystem()):
            pending = overlap.save(state_of(model, optimizer), optimizer=optimizer)
            optimizer.zero_grad()
            backward(model)
            if way == "held":
                optimizer.step()
                assert pending.captured()
            else:
                with waiting_step(optimizer.step):
                    writers.release()
            writers.release()
            assert pending.join(PATIENCE_S)
        expect_one_delivery(pending, fp.NoSpaceError)
        assert any(record.levelno == logging.ERROR for record in caplog.records)
        assert not pending_files(tmp_path)
        state = state_of(model, optimizer)
        again = overlap.save(state, optimizer=optimizer)
        train(model, optimizer)
        overlap.check(again, state)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sys_errno", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_failed_write_opens_the_gate_and_is_told(tmp_path: Path, way: str, sys_errno: int) -> None:
    path = tmp_path / "state.pt"
    fp.save({"old": 1}, path)
    with Overlap(tmp_path, way) as overlap:
        model, optimizer = trained()
        _native.set_fault_plan(_native.FaultPlan(op="write", nth=1, sys_errno=sys_errno, count=2**64 - 1))
        try:
            pending = overlap.save(state_of(model, optimizer), optimizer=optimizer, engine="fault:threads")
            train(model, optimizer)
            overlap.writers.release()
            assert pending.join(PATIENCE_S)
        finally:
            assert _native.clear_fault_plan()
        expect_one_delivery(pending, fp.NoSpaceError if sys_errno == errno.ENOSPC else fp.StorageError)
        assert pending.captured()
        assert fp.load(path) == {"old": 1}
        state = state_of(model, optimizer)
        again = overlap.save(state, optimizer=optimizer)
        train(model, optimizer)
        overlap.check(again, state)


# --- what no counter sees


def paranoid_capture(*arguments: Any, **options: Any) -> capture.Capture:
    return capture.Capture(*arguments, **{**options, "paranoid": True})


def test_paranoid_finds_what_torch_does_not_count(held: Overlap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_file, "Capture", paranoid_capture)
    model, optimizer = trained()
    pending = held.save(state_of(model, optimizer), optimizer=optimizer)
    for parameter in model.parameters():
        parameter.data.add_(1)
    torn_by(held, pending)


def test_paranoid_finds_nothing_in_honest_training(overlap: Overlap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_file, "Capture", paranoid_capture)
    model, optimizer = trained()
    for _ in range(3):
        state = state_of(model, optimizer)
        pending = overlap.save(state, optimizer=optimizer)
        train(model, optimizer)
        overlap.check(pending, state)


def test_resized_storage_is_noticed_before_its_memory_is_read(tmp_path: Path) -> None:
    with Overlap(tmp_path, "held") as overlap:
        parameter = torch.nn.Parameter(torch.randn(1 << 20))
        pending = overlap.save({"p": parameter.detach()}, optimizer=torch.optim.SGD([parameter], lr=0.1))
        parameter.data.resize_(1 << 21)
        overlap.let_all_finish()
        with pytest.raises(fp.TornStateError, match="resized"):
            pending.result(PATIENCE_S)
