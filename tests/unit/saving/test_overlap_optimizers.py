"""Every kind of optimizer steps while a save of its state is under way; the file holds what was true at save().

What else training does meanwhile, and what happens when the rules are broken: test_overlap_correctness.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import overlap_fixtures
from support.forking import run_in_child
from support.training import (
    WIDTH,
    Overlap,
    backward,
    small_model,
    state_of,
    torn_by,
    train,
)

import fastpersist as fp

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "SGD fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam one by one": partial(torch.optim.Adam, lr=0.1, foreach=False),
    "Adam foreach": partial(torch.optim.Adam, lr=0.1, foreach=True),
    "Adam fused": partial(torch.optim.Adam, lr=0.1, fused=True),
    "Adam capturable": partial(torch.optim.Adam, lr=0.1, capturable=True),
    "AdamW amsgrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=3),
}

adam = OPTIMIZERS["Adam foreach"]


overlap = overlap_fixtures.overlap
held = overlap_fixtures.held


def step_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step as this optimizer wants it: LBFGS calls a closure several times."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model)

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def made(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "Adam capturable":
        probe = torch.nn.Parameter(torch.zeros(1))
        probe.grad = torch.zeros(1)
        try:
            OPTIMIZERS[name]([probe]).step()
        except AssertionError as error:
            pytest.skip(f"this processor cannot step it: {error}")
    return OPTIMIZERS[name](model.parameters())


# --- one optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_after_save_do_not_reach_the_file(overlap: Overlap, name: str) -> None:
    model = small_model()
    optimizer = made(name, model)
    for _ in range(2):
        step_once(model, optimizer)
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    for _ in range(2):
        step_once(model, optimizer)
    overlap.check(pending, state)
    if overlap.way == "held":
        assert pending.stats.bytes_at_gate > 0


@pytest.mark.parametrize("name", ["SGD fused", "Adam foreach", "Adam fused", "LBFGS"])
def test_the_very_first_step_waits_too(overlap: Overlap, name: str) -> None:
    model = small_model()
    optimizer = made(name, model)
    state = state_of(model, optimizer)  # parameters without state yet
    pending = overlap.save(state, optimizer=optimizer)
    step_once(model, optimizer)
    overlap.check(pending, state)


@pytest.mark.parametrize("name", ["SGD fused", "Adam foreach", "Adam fused"])
def test_the_model_alone_is_safe_too(overlap: Overlap, name: str) -> None:
    model = small_model()
    optimizer = made(name, model)
    train(model, optimizer)
    state = model.state_dict()
    pending = overlap.save(state, optimizer=optimizer)
    train(model, optimizer)
    overlap.check(pending, state)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adam capturable"])
def test_a_step_without_the_promised_wait_is_noticed(held: Overlap, name: str) -> None:
    model = small_model()
    optimizer = made(name, model)
    step_once(model, optimizer)
    pending = held.save(state_of(model, optimizer), optimizer=optimizer, gate="manual")
    step_once(model, optimizer)
    torn_by(held, pending)


@pytest.mark.parametrize("name", ["SGD fused", "Adam fused"])
def test_a_first_fused_step_without_the_promised_wait_is_noticed(held: Overlap, name: str) -> None:
    model = small_model()
    optimizer = made(name, model)
    pending = held.save(model.state_dict(), optimizer=optimizer, gate="manual")
    train(model, optimizer)  # no state yet, and nothing counts how often parameters are changed
    torn_by(held, pending)


# --- saves inside a step


@pytest.mark.parametrize("place", ["hook", "closure"])
@pytest.mark.parametrize("gate", ["optimizer", "manual"])
@pytest.mark.parametrize("name", ["SGD fused", "Adam foreach", "LBFGS"])
def test_save_inside_a_step_is_of_that_moment(overlap: Overlap, name: str, gate: str, place: str) -> None:
    model = small_model()
    optimizer = made(name, model)
    step_once(model, optimizer)
    states: list[Any] = []
    saves: list[fp.PendingSave] = []

    def save(*_: object) -> None:
        if not saves:
            states.append(state_of(model, optimizer))
            saves.append(overlap.save(states[0], optimizer=optimizer, gate=gate))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = backward(model)
        if place == "closure":
            save()
        return loss

    if place == "hook":
        optimizer.register_step_pre_hook(save)
    optimizer.step(closure)
    overlap.check(saves[0], states[0])


def test_first_save_of_a_process_inside_a_step(tmp_path: Path) -> None:
    def first_save(_report: object) -> None:
        with Overlap(tmp_path, "held") as held:
            test_save_inside_a_step_is_of_that_moment(held, "SGD fused", "optimizer", "hook")

    run_in_child(first_save, {"OMP_NUM_THREADS": "1"})


def test_save_after_a_step_that_has_failed_is_written_in_place(held: Overlap) -> None:
    model = small_model()
    optimizer = adam(model.parameters())
    train(model, optimizer)

    def fail() -> float:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(fail)
    state = state_of(model, optimizer)
    pending = held.save(state, optimizer=optimizer)
    train(model, optimizer)
    held.check(pending, state)
    assert pending.stats.bytes_at_gate > 0


def test_save_in_a_hook_after_the_step_is_written_in_place(held: Overlap) -> None:
    model = small_model()
    optimizer = adam(model.parameters())
    saves: list[fp.PendingSave] = []
    hook = optimizer.register_step_post_hook(
        lambda *_: saves.append(held.save(state_of(model, optimizer), optimizer=optimizer))
    )
    train(model, optimizer)
    hook.remove()
    train(model, optimizer)
    held.check(saves[0])
    assert saves[0].stats.bytes_at_gate > 0


# --- what else happens to an optimizer


def test_parameters_of_a_new_group_get_state_meanwhile(overlap: Overlap) -> None:
    model, head = small_model(), torch.nn.Linear(WIDTH, WIDTH)
    optimizer = adam(model.parameters())
    train(model, optimizer)
    state = {**state_of(model, optimizer), "head": head.state_dict()}
    pending = overlap.save(state, optimizer=optimizer)
    optimizer.add_param_group({"params": list(head.parameters())})
    train(torch.nn.Sequential(model, head), optimizer)
    overlap.check(pending, state)


def test_load_state_dict_of_the_optimizer_meanwhile(overlap: Overlap) -> None:
    model = small_model()
    optimizer = adam(model.parameters())
    train(model, optimizer)
    earlier = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer)
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    optimizer.load_state_dict(earlier)
    train(model, optimizer)
    overlap.check(pending, state)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_tensor_learning_rate_with_a_scheduler(overlap: Overlap, fused: bool) -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), fused=fused, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    train(model, optimizer)
    scheduler.step()
    state = {**state_of(model, optimizer), "scheduler": scheduler.state_dict()}
    pending = overlap.save(state, optimizer=optimizer)
    optimizer.param_groups[0]["lr"].fill_(7)  # before any step
    train(model, optimizer)
    scheduler.step()
    overlap.check(pending, state)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_skipped_and_taken_steps_of_a_grad_scaler(overlap: Overlap, fused: bool) -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, WIDTH)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    state = {**state_of(model, optimizer), "scaler": scaler.state_dict()}
    pending = overlap.save(state, optimizer=optimizer)
    weights = model[0].weight.clone()
    step(float("inf"))
    assert torch.equal(model[0].weight, weights)
    step(1.0)
    overlap.check(pending, state)
    assert scaler.get_scale() < 4.0


# --- several optimizers


def test_two_optimizers_that_step_in_turn(overlap: Overlap) -> None:
    generator, critic = small_model(1), small_model(2)
    optimizers = [adam(generator.parameters()), OPTIMIZERS["SGD fused"](critic.parameters())]
    train(generator, optimizers[0])
    train(critic, optimizers[1])
    state = {"generator": generator.state_dict(), "critic": critic.state_dict(), "both": state_of(critic, *optimizers)}
    pending = overlap.save(state, optimizer=optimizers)
    train(critic, optimizers[1], 3)
    train(generator, optimizers[0])
    overlap.check(pending, state)


def test_what_an_optimizer_that_is_not_named_owns_is_copied_at_once(overlap: Overlap) -> None:
    generator, critic = small_model(1), small_model(2)
    named, other = adam(generator.parameters()), adam(critic.parameters())
    train(generator, named)
    train(critic, other)
    state = {"generator": state_of(generator, named), "critic": state_of(critic, other)}
    pending = overlap.save(state, optimizer=named)
    train(critic, other)
    if overlap.way == "held":
        assert not pending.captured()
    train(generator, named)
    overlap.check(pending, state)
    if overlap.way in ("held", "free"):
        assert pending.stats.bytes_before_return > 3 << 20


def test_another_optimizer_of_the_same_parameters_waits(overlap: Overlap) -> None:
    model = small_model()
    first, second = adam(model.parameters()), OPTIMIZERS["SGD fused"](model.parameters())
    train(model, first)
    state = state_of(model, first, second)
    pending = overlap.save(state, optimizer=first)
    train(model, second)
    overlap.check(pending, state)


def test_a_step_of_an_unrelated_optimizer_does_not_wait(tmp_path: Path) -> None:
    with Overlap(tmp_path, "no room") as overlap:
        model, unrelated = small_model(1), small_model(2)
        optimizer, other = adam(model.parameters()), adam(unrelated.parameters())
        state = state_of(model, optimizer)
        pending = overlap.save(state, optimizer=optimizer)
        train(unrelated, other)
        assert overlap.writers.reached.wait(60)
        assert not pending.captured()  # had it waited, it would have let the writer go
        assert not pending.done()
        train(model, optimizer)
        assert pending.captured()
        overlap.check(pending, state)


# --- optimizers that wrap others, or do more than one thing


class Wrapper:
    """What trainers put around an optimizer, as Accelerate does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state_dict()
        return state


@pytest.mark.parametrize("levels", [1, 2])
def test_wrapped_optimizer(overlap: Overlap, levels: int) -> None:
    model = small_model()
    optimizer: Any = adam(model.parameters())
    for _ in range(levels):
        optimizer = Wrapper(optimizer)
    train(model, optimizer)
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    train(model, optimizer)
    overlap.check(pending, state)
    if overlap.way == "held":
        assert pending.stats.bytes_before_return == 0
        assert pending.stats.bytes_at_gate > 3 << 20


def test_optimizer_of_accelerate(overlap: Overlap) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    raw = small_model()
    model, optimizer = accelerator.prepare(raw, adam(raw.parameters()))
    train(model, optimizer)
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    train(model, optimizer)
    overlap.check(pending, state)
    if overlap.way == "held":
        assert pending.stats.bytes_at_gate > 3 << 20


def test_scheduler_that_wraps_step(overlap: Overlap) -> None:
    model = small_model()
    optimizer = adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    train(model, optimizer)
    state = {**state_of(model, optimizer), "scheduler": scheduler.state_dict()}
    pending = overlap.save(state, optimizer=optimizer)
    train(model, optimizer)
    scheduler.step()
    overlap.check(pending, state)


@pytest.mark.slow  # compiles a graph
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_step(held: Overlap) -> None:
    model = small_model()
    optimizer = OPTIMIZERS["SGD fused"](model.parameters())
    compiled = torch.compile(optimizer.step, backend="eager")
    for index in range(4):
        state = state_of(model, optimizer)
        pending = held.save(state, name=f"{index}.pt", optimizer=optimizer) if index else None
        optimizer.zero_grad()
        backward(model)
        compiled()
        if pending is not None:
            held.check(pending, state)


def test_optimizers_that_step_inside_backward(overlap: Overlap) -> None:
    model = small_model()
    optimizers = {parameter: OPTIMIZERS["SGD fused"]([parameter]) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    backward(model)
    state = state_of(model, *optimizers.values())
    pending = overlap.save(state, optimizer=list(optimizers.values()))
    backward(model)
    overlap.check(pending, state)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: climb, look at the gradient there, climb down, step."""

    def __init__(self, parameters: Any, base: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                climb = parameter.grad * 0.05
                parameter.add_(climb)
                self.state[parameter]["climb"] = climb

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.state[parameter]["climb"])
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def sam_closure(model: torch.nn.Module, optimizer: Sam) -> None:
    optimizer.zero_grad()
    backward(model)


def sam_by_hand(model: torch.nn.Module, optimizer: Sam) -> None:
    sam_closure(model, optimizer)
    optimizer.first_step()
    sam_closure(model, optimizer)
    optimizer.second_step()


@pytest.mark.parametrize("named", ["sam", "base", "both"])
def test_sam_with_a_closure(overlap: Overlap, named: str) -> None:
    model = small_model()
    sam = Sam(model.parameters(), adam)
    sam.step(lambda: sam_closure(model, sam))
    state = state_of(model, sam, sam.base_optimizer)
    optimizer = {"sam": sam, "base": sam.base_optimizer, "both": [sam, sam.base_optimizer]}[named]
    pending = overlap.save(state, optimizer=optimizer)
    sam.step(lambda: sam_closure(model, sam))
    overlap.check(pending, state)


def test_sam_by_hand_tears_one_save_and_no_other(held: Overlap) -> None:
    model = small_model()
    sam = Sam(model.parameters(), adam)
    sam_by_hand(model, sam)
    torn = held.save(state_of(model, sam, sam.base_optimizer), optimizer=[sam, sam.base_optimizer])
    sam_by_hand(model, sam)
    torn_by(held, torn)
    for _ in range(2):
        state = state_of(model, sam, sam.base_optimizer)
        pending = held.save(state, optimizer=[sam, sam.base_optimizer])
        sam_by_hand(model, sam)
        held.check(pending, state)


def test_sam_by_hand_with_a_manual_gate(overlap: Overlap) -> None:
    model = small_model()
    sam = Sam(model.parameters(), adam)
    sam_by_hand(model, sam)
    state = state_of(model, sam, sam.base_optimizer)
    pending = overlap.save(state, optimizer=[sam, sam.base_optimizer], gate="manual")
    pending.wait_captured()
    sam_by_hand(model, sam)
    overlap.check(pending, state)


class ScheduleFree(torch.optim.Optimizer):
    """Its parameters are one mixture of two sequences while it trains, and another one in eval()."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"training": True})

    @torch.no_grad()
    def _mix(self, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.lerp_(self.state[parameter]["z"], weight)

    def train(self) -> None:
        self._mix(0.1)

    def eval(self) -> None:
        self._mix(1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                z.sub_(parameter.grad, alpha=0.1)
                parameter.lerp_(z, 0.2)


@pytest.mark.parametrize("gate", ["optimizer", "manual"])
def test_schedule_free_changes_parameters_outside_its_step(overlap: Overlap, gate: str) -> None:
    model = small_model()
    optimizer = ScheduleFree(model.parameters())
    train(model, optimizer)
    optimizer.eval()
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer, gate=gate)
    if gate == "manual":
        pending.wait_captured()
    optimizer.train()
    train(model, optimizer)
    overlap.check(pending, state)
    if overlap.way == "held":
        assert (pending.stats.bytes_before_return > 1 << 20) == (gate == "optimizer")


class WithoutHooks(torch.optim.SGD):
    """Does not call Optimizer.__init__, so its step announces itself to nobody."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.state = {}  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad)


def test_optimizer_without_hooks_has_everything_copied_at_once(overlap: Overlap) -> None:
    model = small_model()
    optimizer = WithoutHooks(model.parameters())
    state = state_of(model, optimizer)
    pending = overlap.save(state, optimizer=optimizer)
    train(model, optimizer)
    overlap.check(pending, state)


def test_a_step_does_not_ask_for_cuda_where_none_is_in_use(held: Overlap, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question would start it: the process could not be forked any more. torch's own optimizers ask."""

    def is_available() -> bool:
        assert not sys._getframe(1).f_globals["__name__"].startswith("fastpersist"), "asked for CUDA"
        return False

    model = small_model()
    optimizer = adam(model.parameters())
    state = state_of(model, optimizer)
    pending = held.save(state, optimizer=optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked for the stream"))
        patch.setattr(torch.cuda, "is_available", is_available)
        train(model, optimizer)
    held.check(pending, state)


def test_step_seen_in_a_cuda_graph_makes_its_optimizer_volatile_for_good(
    held: Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = small_model(1), small_model(2)
    replayed, ordinary = adam(model.parameters()), adam(other.parameters())
    state = {"replayed": state_of(model, replayed), "ordinary": state_of(other, ordinary)}
    first = held.save(state, name="first.pt", optimizer=[replayed, ordinary])
    assert first.stats.bytes_before_return == 0
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch.backends.cuda, "is_built", lambda: False)  # else torch looks at it too, and refuses
        train(model, replayed)
    held.check(first, state)
    for name in ("second.pt", "third.pt"):
        state = {"replayed": state_of(model, replayed), "ordinary": state_of(other, ordinary)}
        pending = held.save(state, name=name, optimizer=[replayed, ordinary])
        for parameter in model.parameters():
            parameter.data.mul_(2)  # what a replay does: no hook runs, and nothing is counted
        train(other, ordinary)
        held.check(pending, state)
        assert pending.stats.bytes_before_return > 1 << 20


def test_step_seen_in_a_cuda_graph_before_the_first_save(held: Overlap, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    optimizer = adam(model.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch.backends.cuda, "is_built", lambda: False)  # else torch looks at it too, and refuses
        train(model, optimizer)
    state = state_of(model, optimizer)
    pending = held.save(state, optimizer=optimizer)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    held.check(pending, state)


def test_hooks_of_others_that_change_parameters_are_noticed(held: Overlap) -> None:
    model = small_model()
    optimizer = adam(model.parameters())
    pending = held.save(state_of(model, optimizer), optimizer=optimizer)
    with torch.no_grad():
        optimizer.register_step_pre_hook(lambda *_: SimpleNamespace())
        model[0].weight.clamp_(-0.01, 0.01)
    optimizer.zero_grad()
    torn_by(held, pending, "0.weight")
