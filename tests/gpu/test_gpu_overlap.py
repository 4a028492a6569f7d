"""Training on the GPU goes on while it is saved; the file holds what was true at save().

With a gate that is left out, wrong files are seen to be wrong: so the comparisons here can fail.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import overlap_fixtures
from support.gpu_device import (
    DEVICE,
    GPU,
    PATIENCE_S,
    host_copy,
    host_portrait,
    keep_busy,
    needs_cuda,
    random_tensor,
    synchronize,
)
from support.states import differences
from support.training import Overlap, state_of, torn_by

import fastpersist as fp
from fastpersist import _native

pytestmark = GPU

WIDTH = 256

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "AdamW one by one": partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "AdamW capturable": partial(torch.optim.AdamW, lr=0.1, capturable=True),
    "AdamW fused capturable": partial(torch.optim.AdamW, lr=0.1, fused=True, capturable=True),
    "AdamW with a tensor as lr": partial(torch.optim.AdamW, lr=torch.tensor(0.1), fused=True),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
fused: Optimizer = OPTIMIZERS["AdamW fused"]


overlap = overlap_fixtures.overlap
held = overlap_fixtures.held


def model_on_device(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Make a model of 1 MiB: with two moments it is larger than a block of the small arena."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers).to(DEVICE, dtype)


def backward(model: torch.nn.Module) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    loss = model(torch.randn(4, WIDTH, device=DEVICE, dtype=dtype)).square().mean()
    loss.backward()
    return loss


def train(model: torch.nn.Module, optimizer: Any, step_count: int = 1) -> None:
    for _ in range(step_count):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def trained(make: Optimizer = fused) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    model = model_on_device()
    optimizer = make(model.parameters())
    train(model, optimizer, 2)
    return model, optimizer


def expect_what_was(overlap: Overlap, pending: fp.PendingSave, state: Any) -> None:
    """The file is the one that torch.save wrote at save(), and the state is another by now."""
    overlap.let_all_finish()
    path = pending.result(PATIENCE_S)
    expected = torch.load(overlap.directory / "expected" / path.name, map_location="cpu", weights_only=False)
    assert host_portrait(state) != host_portrait(expected), "nothing changed since save(), so nothing is proved"
    assert host_portrait(fp.load(path, weights_only=False, verify=True)) == host_portrait(expected)
    overlap.check(pending)


# --- the gate


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_steps_of_every_optimizer(name: str, overlap: Overlap) -> None:
    if name == "AdamW capturable" and DEVICE.type == "cpu":
        pytest.skip("only a fused optimizer is capturable on a CPU")
    model, optimizer = trained(OPTIMIZERS[name])
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    train(model, optimizer, 2)
    expect_what_was(overlap, pending, state)


def test_a_step_that_comes_while_the_device_is_busy(overlap: Overlap) -> None:
    """The values to be saved are not there yet when save() is called, and the step is queued right behind them."""
    model, optimizer = trained()
    backward(model)
    synchronize()
    before = host_copy(model.state_dict())
    state = state_of(model, optimizer)
    keep_busy()
    optimizer.step()
    expected_after_copy = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    keep_busy()
    pending = fp.save_async(state, overlap.directory / "busy.pt", optimizer=optimizer)
    optimizer.step()
    optimizer.step()
    overlap.writers.release()
    saved: Any = fp.load(pending.result(PATIENCE_S), map_location="cpu")
    assert not differences(saved["model"], host_copy(expected_after_copy))
    assert differences(saved["model"], before)


def test_a_gate_that_is_left_out_is_noticed(held: Overlap) -> None:
    """The optimizer's changes are counted, and the save fails rather than keep what is half a step on."""
    model, optimizer = trained()
    state = state_of(model, optimizer)
    pending = held.save(state, optimizer=optimizer, gate="manual")
    train(model, optimizer)
    torn_by(held, pending)


def test_a_gate_that_is_left_out_gives_a_wrong_file(held: Overlap) -> None:
    """The control: changes that torch does not count end up in the file, and the comparison of these tests finds it."""
    model, optimizer = trained()
    state = state_of(model, optimizer)
    pending = held.save(state, optimizer=optimizer, gate="manual")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.add_(1.0)
    synchronize()
    held.let_all_finish()
    saved: Any = fp.load(pending.result(PATIENCE_S), map_location="cpu")
    expected = torch.load(held.directory / "expected" / "state.pt", map_location="cpu")
    assert differences(saved["model"], expected["model"])
    with pytest.raises(AssertionError):
        held.check(pending)


def test_a_manual_gate_that_is_heeded(overlap: Overlap) -> None:
    model, optimizer = trained()
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer, gate="manual")
    pending.wait_captured(PATIENCE_S)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.add_(1.0)
    expect_what_was(overlap, pending, state)


def test_without_an_optimizer_everything_may_change_at_once(overlap: Overlap) -> None:
    state = {"large": random_tensor(3_000_000), "small": [random_tensor(3, 1), random_tensor(70_000, 2)]}
    keep_busy(100)
    pending = overlap.save(state)
    state["large"].fill_(9)
    for small in state["small"]:
        small.fill_(9)
    expect_what_was(overlap, pending, state)


def test_tensors_that_are_freed_right_after_save_async(overlap: Overlap) -> None:
    """The allocator gives their memory to the next who asks; what was in it is what is saved."""
    state = {"a": random_tensor(2_000_000), "b": [random_tensor(40_000, 1)]}
    keep_busy(100)
    pending = overlap.save(state)
    state.clear()
    others = [torch.full((count,), 7.0, device=DEVICE) for count in (2_000_000, 40_000) for _ in range(4)]
    expect_what_was(overlap, pending, others)


def test_a_model_that_is_dropped_with_its_optimizer_right_after_save_async(overlap: Overlap) -> None:
    model, optimizer = trained()
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    del model, optimizer
    state.clear()
    gc.collect()
    others = [torch.full((2 * WIDTH * WIDTH,), 7.0, device=DEVICE) for _ in range(12)]
    expect_what_was(overlap, pending, others)


def test_states_on_both_sides(overlap: Overlap) -> None:
    """Parameters on the device, an optimizer's state that was moved to the host, and buffers of both."""
    model, optimizer = trained(OPTIMIZERS["AdamW foreach"])
    master = torch.nn.Parameter(torch.randn(500_000))
    on_host = torch.optim.AdamW([master], lr=0.1)
    master.grad = torch.ones_like(master)
    on_host.step()
    state = {**state_of(model, optimizer, on_host), "master": master, "average": random_tensor(300_000)}
    pending = overlap.save(state, optimizer=[optimizer, on_host])
    state["average"].mul_(2)
    train(model, optimizer)
    on_host.step()
    expect_what_was(overlap, pending, state)


def test_bfloat16_parameters(overlap: Overlap) -> None:
    model = model_on_device(torch.bfloat16)
    optimizer = fused(model.parameters())
    train(model, optimizer, 2)
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    train(model, optimizer)
    expect_what_was(overlap, pending, state)


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW foreach"])
def test_mixed_precision_with_a_gradient_scaler(name: str, overflows: bool, overlap: Overlap) -> None:
    """Its scale is on the device and changes in update(), which no gate holds back; an overflow leaves the step out."""
    model = model_on_device()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=1)
    dtype = torch.float16 if DEVICE.type == "cuda" else torch.bfloat16

    def step(factor: float = 1.0) -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype):
            loss = model(torch.randn(4, WIDTH, device=DEVICE)).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    step()
    state = {**state_of(model, optimizer), "scaler": scaler.state_dict(), "scale": scaler._scale}
    pending = overlap.save(state, optimizer=optimizer)
    if overflows:
        step(float("inf"))
    step()
    step()
    expect_what_was(overlap, pending, state)


# --- streams of the caller


@needs_cuda
def test_values_that_a_side_stream_still_computes(overlap: Overlap) -> None:
    """save() is called where the work is queued, so it comes after it."""
    side = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(side):
        tensor = torch.zeros(3_000_000, device=DEVICE)
        small = torch.zeros(100, device=DEVICE)
        keep_busy()
        tensor.fill_(5)
        small.fill_(5)
        pending = fp.save_async({"tensor": tensor, "small": small}, overlap.directory / "side.pt")
        tensor.fill_(6)
        small.fill_(6)
    overlap.writers.release()
    saved: Any = fp.load(pending.result(PATIENCE_S), map_location="cpu")
    assert bool((saved["tensor"] == 5).all())
    assert bool((saved["small"] == 5).all())


@needs_cuda
def test_training_on_a_side_stream(overlap: Overlap) -> None:
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        model, optimizer = trained()
        keep_busy(100)
        train(model, optimizer)
        state = state_of(model, optimizer)
        pending = overlap.save(state, optimizer=optimizer)
        train(model, optimizer, 2)
        expect_what_was(overlap, pending, state)
    torch.cuda.current_stream(DEVICE).wait_stream(side)


@needs_cuda
def test_a_step_on_another_stream_than_the_save(overlap: Overlap) -> None:
    """The gate holds back the stream on which the step is taken, whichever that is."""
    model, optimizer = trained()
    backward(model)
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        optimizer.step()
        optimizer.step()
    torch.cuda.current_stream(DEVICE).wait_stream(side)
    expect_what_was(overlap, pending, state)


@needs_cuda
def test_a_step_that_replays_a_cuda_graph_makes_its_tensors_volatile(tmp_path: Path) -> None:
    """No hook runs in a replay, so nothing could hold it back: all is copied before save() returns."""
    model, optimizer = trained(OPTIMIZERS["AdamW capturable"])
    with fp.Checkpointer(tmp_path / "run", optimizer=optimizer) as checkpointer:
        inputs = torch.randn(4, WIDTH, device=DEVICE)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            model(inputs).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream(DEVICE).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for number in range(3):
            graph.replay()
            state = state_of(model, optimizer)
            expected = host_copy(state)
            keep_busy(50)
            pending = checkpointer.save(number, state)
            graph.replay()
            path = pending.result(PATIENCE_S) / "state.pt"
            assert host_portrait(torch.load(path)) == host_portrait(expected)
            assert host_portrait(state) != host_portrait(expected)
        for stats in checkpointer.stats():
            assert stats.bytes_at_gate == 0


@needs_cuda
def test_a_graph_that_is_captured_while_a_save_is_under_way(tmp_path: Path) -> None:
    """In its default mode a capture fails if any thread makes a call of CUDA that is not allowed meanwhile."""
    engine = next(probe.name for probe in fp.engines(tmp_path) if probe.usable)
    state = {str(number): random_tensor(5_000_000, number) for number in range(8)}
    expected = host_copy(state)
    fp.save(state, tmp_path / "first.pt")
    total = torch.zeros(1000, device=DEVICE)
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        total.add_(1)
    torch.cuda.current_stream(DEVICE).wait_stream(side)
    _native.set_fault_plan(_native.FaultPlan(op="write", kind="delay", count=2**64 - 1, delay_ms=5))
    try:
        pending = fp.save_async(state, tmp_path / "model.pt", constant=state, engine=f"fault:{engine}")
        graphs = []
        while not pending.done() or not graphs:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                total.add_(1)
            graphs[-1].replay()
            assert len(graphs) < 10_000, "the save does not come to its end"
        path = pending.result(PATIENCE_S)
    finally:
        _native.clear_fault_plan()
    assert not differences(torch.load(path, map_location="cpu"), expected)
    assert bool((total == 1 + len(graphs)).all())


# --- whole runs


@pytest.mark.parametrize("arena_bytes", [None, 2 << 20, 0])
def test_a_checkpointer_that_saves_every_step(arena_bytes: int | None, tmp_path: Path) -> None:
    model, optimizer = trained()
    expected: dict[int, Any] = {}
    with fp.Checkpointer(tmp_path / "run", optimizer=optimizer, max_host_bytes=arena_bytes) as checkpointer:
        for step in range(12):
            state = {**state_of(model, optimizer), "average": random_tensor(5_000, step)}
            expected[step] = host_portrait(state)
            checkpointer.save(step, state)
            state["average"].zero_()
            train(model, optimizer)
        checkpointer.wait()
        assert checkpointer.steps() == list(expected)
        for step, drawn in expected.items():
            assert host_portrait(torch.load(tmp_path / "run" / f"step-{step:08d}" / "state.pt")) == drawn


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    def run(model: Any, optimizer: Any, steps: range, checkpointer: fp.Checkpointer | None) -> None:
        for step in steps:
            torch.manual_seed(step)
            train(model, optimizer)
            if checkpointer is not None:
                checkpointer.save(step, state_of(model, optimizer))

    whole, whole_optimizer = trained()
    run(whole, whole_optimizer, range(6), None)
    with contextlib.ExitStack() as stack:
        first, first_optimizer = trained()
        checkpointer = stack.enter_context(fp.Checkpointer(tmp_path / "run", optimizer=first_optimizer))
        run(first, first_optimizer, range(3), checkpointer)
    model = model_on_device()
    optimizer = fused(model.parameters())
    loaded = fp.Checkpointer(tmp_path / "run", optimizer=optimizer).load(map_location=DEVICE)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer0"])
    run(model, optimizer, range(3, 6), None)
    assert host_portrait(state_of(model, optimizer)) == host_portrait(state_of(whole, whole_optimizer))


def test_loading_into_a_model_on_the_device(tmp_path: Path) -> None:
    model, optimizer = trained()
    with fp.Checkpointer(tmp_path / "run", optimizer=optimizer) as checkpointer:
        checkpointer.save(1, {"model": model.state_dict()})
        wanted = host_copy(model.state_dict())
        train(model, optimizer)
        checkpointer.wait()
        checkpointer.load(1, into={"model": model})
    assert not differences(host_copy(model.state_dict()), wanted)
