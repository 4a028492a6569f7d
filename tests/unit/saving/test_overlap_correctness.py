"""What training may do while a save is under way; the file holds what was true at save().

Each kind of optimizer: test_overlap_optimizers. What training may not do, and errors: test_overlap_torn.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import overlap_fixtures
from support.overlap_fixtures import trained
from support.sameness import assert_same, portrait
from support.specimens import single_process_group
from support.training import (
    PATIENCE_S,
    WIDTH,
    Overlap,
    backward,
    small_model,
    state_of,
    torn_by,
    train,
    waiting_step,
)

import fastpersist as fp
from fastpersist.saving import capture, file_save

adam = functools.partial(torch.optim.Adam, lr=0.1)


overlap = overlap_fixtures.overlap
held = overlap_fixtures.held_either_way


# --- what training may do


def test_gradients_that_add_up_over_several_backwards(overlap: Overlap) -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    backward(model)
    state = {**state_of(model, optimizer), "gradients": [parameter.grad for parameter in model.parameters()]}
    pending = overlap.save(state, optimizer=optimizer)
    backward(model)
    backward(model)
    optimizer.step()
    backward(model)
    optimizer.step()
    overlap.check(pending, state)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_dropped_or_set_to_zero(overlap: Overlap, set_to_none: bool) -> None:
    model, optimizer = trained()
    backward(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    state = {**state_of(model, optimizer), "gradients": gradients}
    pending = overlap.save(state, optimizer=optimizer)
    optimizer.zero_grad(set_to_none=set_to_none)
    del gradients
    train(model, optimizer)
    overlap.check(pending, state)


def test_batch_norm_changes_buffers_in_forward(overlap: Overlap) -> None:
    model = torch.nn.Sequential(small_model(), torch.nn.BatchNorm1d(WIDTH))
    optimizer = adam(model.parameters())
    train(model, optimizer)
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    model(torch.randn(4, WIDTH))
    train(model, optimizer)
    overlap.check(pending, state)


def test_average_of_weights_and_random_state(overlap: Overlap) -> None:
    model, optimizer = trained()
    average = torch.optim.swa_utils.AveragedModel(model)
    random_state = torch.get_rng_state()
    state = {**state_of(model, optimizer), "average": average.state_dict(), "random": random_state}
    pending = overlap.save(state, optimizer=optimizer)
    average.update_parameters(model)
    random_state.add_(1)
    train(model, optimizer)
    average.update_parameters(model)
    overlap.check(pending, state)


def test_tied_parameters_stay_tied(overlap: Overlap) -> None:
    embedding, head = torch.nn.Embedding(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head)
    optimizer = adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()

    step()
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    step()
    overlap.check(pending, state)
    loaded = fp.load(pending.result())["model"]
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()


@pytest.mark.parametrize("in_optimizer", [False, True], ids=["not in optimizer", "in optimizer"])
def test_frozen_parameters_that_are_not_named_may_change(overlap: Overlap, in_optimizer: bool) -> None:
    frozen, model = small_model(1).requires_grad_(False), small_model(2)
    optimizer = adam([*model.parameters(), *(frozen.parameters() if in_optimizer else ())])
    train(model, optimizer)
    state = {**state_of(model, optimizer), "frozen": frozen.state_dict()}
    pending = overlap.save(state, optimizer=optimizer)
    if in_optimizer:
        pending.wait_captured()
    for parameter in frozen.parameters():
        parameter.mul_(2)
    train(torch.nn.Sequential(frozen, model), optimizer)
    overlap.check(pending, state)


def _module(frozen: torch.nn.Module) -> object:
    return frozen


def _generator(frozen: torch.nn.Module) -> object:
    return frozen.parameters()


def _dict_of_lists(frozen: torch.nn.Module) -> object:
    return {"frozen": list(frozen.state_dict().values())}


@pytest.mark.parametrize("named", [_module, _generator, _dict_of_lists])
def test_frozen_parameters_that_are_named_are_never_copied(
    overlap: Overlap, named: Callable[[torch.nn.Module], object]
) -> None:
    frozen, model = small_model(1).requires_grad_(False), small_model(2)
    optimizer = adam(model.parameters())
    both = torch.nn.Sequential(frozen, model)
    train(both, optimizer)
    state = {**state_of(model, optimizer), "frozen": frozen.state_dict()}
    pending = overlap.save(state, optimizer=optimizer, constant=named(frozen))
    train(both, optimizer)
    overlap.check(pending, state)
    assert pending.stats.bytes_before_return == 0
    if overlap.way == "held":
        assert pending.stats.bytes_by_writer >= 1 << 20


def test_views_of_one_flat_parameter(overlap: Overlap) -> None:
    flat = torch.nn.Parameter(torch.randn(1 << 19))
    optimizer = adam([flat])
    shapes = {"low": flat[: 1 << 18].view(512, 512), "high": flat[1 << 18 :].view(512, 512).t(), "one": flat[7]}
    state = {name: view.detach() for name, view in shapes.items()}
    pending = overlap.save(state, optimizer=optimizer)
    flat.grad = torch.ones_like(flat)
    optimizer.step()
    overlap.check(pending, state)


def test_safetensors_file(overlap: Overlap) -> None:
    model, optimizer = trained()
    state = {**model.state_dict(), "part": optimizer.state[model[0].weight]["exp_avg"][1:3]}
    before = copy.deepcopy(state)
    pending = fp.save_async(state, overlap.directory / "model.safetensors", optimizer=optimizer)
    train(model, optimizer)
    overlap.writers.release()
    loaded = fp.load(pending.result(PATIENCE_S), verify=True)
    assert portrait(state) != portrait(before)
    assert {name: portrait(tensor.clone()) for name, tensor in loaded.items()} == {
        name: portrait(tensor.clone()) for name, tensor in before.items()
    }


def test_parameters_of_all_sizes_and_dtypes(overlap: Overlap) -> None:
    torch.manual_seed(0)
    sizes = [0, 1, 3, 63, 64, 65, 4095, 4097, (1 << 20) + 1]
    dtypes = [torch.float64, torch.bfloat16, torch.float32]
    parameters = [
        torch.nn.Parameter(torch.randn(size).to(dtypes[index % 3])) for index, size in enumerate([*sizes, *sizes])
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    step()
    state = {"parameters": parameters, "optimizer": optimizer.state_dict()}
    pending = overlap.save(state, optimizer=optimizer)
    step()
    for parameter in parameters:  # the copies have no gradients
        parameter.grad = None
    overlap.check(pending, state)


def test_inference_tensors_may_change_at_once(overlap: Overlap) -> None:
    model, optimizer = trained()
    with torch.inference_mode():
        cache = torch.randn(1000)
    state = {**state_of(model, optimizer), "cache": cache}
    pending = overlap.save(state, optimizer=optimizer)
    with torch.inference_mode():
        cache.zero_()
    train(model, optimizer)
    overlap.check(pending, state)


def test_optimizer_state_made_of_inference_tensors(overlap: Overlap) -> None:
    model = small_model()
    optimizer = adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        backward(model)
        with torch.inference_mode():
            optimizer.step()

    step()
    assert optimizer.state[model[0].weight]["exp_avg"].is_inference()
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    step()
    overlap.check(pending, state)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_dtensor_parameters(overlap: Overlap, fused: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def shard(_name: str, module: torch.nn.Module, mesh: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    with single_process_group():
        model = distribute_module(small_model(), init_device_mesh("cpu", (1,)), shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, foreach=not fused)

        def step() -> None:
            optimizer.zero_grad()
            sum((parameter * parameter).sum() for parameter in model.parameters()).backward()
            optimizer.step()

        step()
        state = state_of(model, optimizer)
        pending = overlap.save(state, optimizer=optimizer)
        step()
        overlap.check(pending, state, same_file=False)
        if overlap.way == "held":
            assert pending.stats.bytes_at_gate > 3 << 20


def test_changed_dtensor_parameter_is_noticed(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    # Held, whatever the room: with none, save() waits for the mesh's numbers to be written, and all may be by then.
    with single_process_group(), Overlap(tmp_path, "held") as held:
        mesh = init_device_mesh("cpu", (1,))
        parameter = torch.nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]))
        pending = held.save({"weight": parameter.detach()}, optimizer=torch.optim.SGD([parameter], lr=0.1))
        with torch.no_grad():
            parameter.mul_(2)
        torn_by(held, pending, "weight")


def test_wrapper_subclass_with_two_tensors_inside(overlap: Overlap) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(TwoTensor(torch.randn(300, 1000), torch.randn(300, 1000)))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        (parameter * parameter).sum().backward()
        optimizer.step()

    step()
    state = {"parameter": parameter.detach(), "optimizer": optimizer.state_dict()}
    inside = [parameter.a, parameter.b]
    expected = [tensor.detach().clone() for tensor in inside]
    pending = overlap.save(state, optimizer=optimizer)
    step()
    overlap.check(pending, state, same_file=False)
    assert not torch.equal(inside[0], expected[0])
    if overlap.way == "held":
        assert pending.stats.bytes_at_gate == 2 * 2 * 300 * 1000 * 4


def test_model_that_moves_to_another_dtype(overlap: Overlap) -> None:
    model, optimizer = trained()
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    model.double()
    del state
    gc.collect()
    model.zero_grad()
    model(torch.randn(4, WIDTH, dtype=torch.float64)).sum().backward()
    overlap.check(pending)


def test_parameters_that_get_other_data(overlap: Overlap) -> None:
    model, optimizer = trained()
    pending = overlap.save(state_of(model, optimizer), optimizer=optimizer)
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 7)
    gc.collect()
    train(model, optimizer)
    overlap.check(pending)


def test_everything_is_freed_right_after_save(overlap: Overlap) -> None:
    model, optimizer = trained()
    pending = overlap.save(state_of(model, optimizer), optimizer=optimizer)
    del model, optimizer
    gc.collect()
    garbage = [torch.full((WIDTH, 2 * WIDTH), float(index)) for index in range(30)]  # in their memory, if it were free
    overlap.check(pending)
    del garbage


def test_two_saves_pending_at_once(overlap: Overlap) -> None:
    model, optimizer = trained()
    state = state_of(model, optimizer)
    first = overlap.save(state, name="first.pt", optimizer=optimizer)
    second = overlap.save(state, name="second.pt", optimizer=optimizer)
    train(model, optimizer)
    third = overlap.save(state_of(model, optimizer), name="third.pt", optimizer=optimizer)
    train(model, optimizer)
    for pending in (third, first, second):
        overlap.check(pending, state)


def test_save_in_every_step(overlap: Overlap) -> None:
    model, optimizer = trained()
    pendings = []
    for step in range(6):
        state = state_of(model, optimizer)
        pendings.append(overlap.save(state, name=f"{step}.pt", optimizer=optimizer))
        train(model, optimizer)
    for pending in pendings:
        overlap.check(pending, state)


def test_no_optimizer_means_that_all_is_copied_at_once(overlap: Overlap) -> None:
    model, optimizer = trained()
    state = state_of(model, optimizer)
    pending = overlap.save(state)
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
    train(model, optimizer)
    assert pending.captured()
    overlap.check(pending, state)


# --- a step that waits


@pytest.mark.parametrize("arena_bytes", [0, 2 << 20])
def test_step_waits_for_the_writer_where_memory_is_short(tmp_path: Path, arena_bytes: int) -> None:
    with Overlap(tmp_path, "held") as overlap, pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_save, "async_arena", type(file_save.async_arena)(arena_bytes))
        model, optimizer = trained()
        state = state_of(model, optimizer)
        pending = overlap.save(state, optimizer=optimizer)
        optimizer.zero_grad()
        backward(model)
        before = model[0].weight.clone()
        with waiting_step(optimizer.step) as stepping:
            assert stepping.is_alive()
            assert not pending.captured()
            with pytest.raises(TimeoutError):
                pending.wait_captured(timeout=0.01)
            assert torch.equal(model[0].weight, before)
            overlap.writers.release()
        assert not torch.equal(model[0].weight, before)
        overlap.check(pending, state)
        assert pending.stats.bytes_at_gate <= arena_bytes


# --- the tests themselves


def pass_the_gate(*_arguments: object, **_keywords: object) -> None:
    """Stand in for the hook that waits."""


def test_without_the_gate_the_alarm_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture.Capture, "is_changed_by", pass_the_gate)
    with Overlap(tmp_path, "held") as overlap:
        model, optimizer = trained()
        pending = overlap.save(state_of(model, optimizer), optimizer=optimizer)
        train(model, optimizer)
        torn_by(overlap, pending)


def test_without_gate_and_alarm_the_comparison_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture.Capture, "is_changed_by", pass_the_gate)
    monkeypatch.setattr(capture.Capture, "_look_for_changes", pass_the_gate)
    with Overlap(tmp_path, "held") as overlap:
        model, optimizer = trained()
        state = state_of(model, optimizer)
        pending = overlap.save(state, optimizer=optimizer)
        train(model, optimizer)
        with pytest.raises(AssertionError):
            overlap.check(pending, state)
        assert_same(fp.load(pending.result()), state)  # what it is now, not what it was
