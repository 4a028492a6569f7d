"""One run of a training with a way of saving: the times of its steps and saves, and the files at the end.

The model is arbitrary; subclasses of `TrainedModel` define what a step computes.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fastpersist.cli.bench.overlap.ways import Trained, Way
from fastpersist.cli.bench.worker import resident_bytes
from fastpersist.errors import StorageError

__all__ = [
    "StepTimes",
    "Stepping",
    "TrainedModel",
    "check_newest",
    "step_and_save",
    "summarize_run",
    "train_and_save",
]


@dataclass(slots=True)
class StepTimes:
    """Where the seconds of one step went.

    Attributes:
        step_s: Seconds from the step's start to its end, the other times included.
        gate_s: How long the optimizer's step waited before it could begin, as far as its thread waited.
        save_s: Seconds inside the call that saves; 0.0 in steps without one.
    """

    step_s: float
    gate_s: float
    save_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """Time that the training thread lost to saving."""
        return self.gate_s + self.save_s


class Stepping(Trained, Protocol):
    """A training that can be measured."""

    def step(
        self,
        *,
        before_update: Callable[[], None] = ...,
        update_guard: Callable[[], contextlib.AbstractContextManager[Any]] = ...,
    ) -> StepTimes:
        """Train one step.

        Args:
            before_update: Called when the gradients are there; may wait until the state may change.
            update_guard: Gives a context in which the optimizer's step runs.
        """

    def state_bytes(self) -> int:
        """Return the bytes of all tensors of the state."""

    def last_loss(self) -> float:
        """Return the loss of the last step."""


class TrainedModel(abc.ABC):
    """A model and its optimizer, and what its updates wait for. One thread.

    Args:
        model: The model; its parameters are on the device where they are trained.
        optimizer: The optimizer of all its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        # Hooks of one optimizer run after the global ones, where a gate may wait. So this is when the gate is open.
        optimizer.register_step_pre_hook(self._note_gate_is_open)
        self._gate_open_at = 0.0
        self._loss = torch.tensor(float("nan"))

    def _note_gate_is_open(self, *_: Any) -> None:
        self._gate_open_at = time.perf_counter()

    def step(
        self,
        *,
        before_update: Callable[[], None] = lambda: None,
        update_guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> StepTimes:
        """Train one step.

        Args:
            before_update: Called when the gradients are there; may wait until the state may change.
            update_guard: Gives a context in which the optimizer's step runs.
        """
        start = time.perf_counter()
        loss = self.loss()
        self._loss = loss.detach()
        loss.backward()
        self.follow_backward()
        ready = time.perf_counter()
        before_update()
        with update_guard():
            self.optimizer.step()
        self.optimizer.zero_grad()
        gate_s = self._gate_open_at - ready
        self.end_step(loss)
        return StepTimes(time.perf_counter() - start, gate_s)

    @abc.abstractmethod
    def loss(self) -> torch.Tensor:
        """Return the loss of the next batch."""

    def follow_backward(self) -> None:  # noqa: B027 - most do nothing
        """Do what a step does between its gradients and its update."""

    @abc.abstractmethod
    def end_step(self, loss: torch.Tensor) -> None:
        """Wait until the device has made the step, as a training does that reads its loss."""

    def last_loss(self) -> float:
        """Return the loss of the last step; waits for the device."""
        return float(self._loss)

    def state(self, step: int) -> dict[str, Any]:
        """Return what a training script saves; the tensors are the live ones."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": step,
        }

    def state_bytes(self) -> int:
        """Return the bytes of all tensors of `state` once there is optimizer state; tied ones count once."""
        tensors = {id(parameter): parameter for parameter in self.model.parameters()}
        moments = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return sum(tensor.nbytes for tensor in [*tensors.values(), *moments, torch.get_rng_state()])


def step_and_save(training: Stepping, way: Way, step: int | None) -> tuple[StepTimes, bool]:
    """Train one step; save afterwards if there is a number for it.

    Returns:
        The times, and whether the save found the one before still being written.
    """
    times = training.step(before_update=way.before_update, update_guard=way.update_guard)
    if step is None:
        return times, False
    is_late = not way.is_written()
    start = time.perf_counter()
    way.save(step)
    times.save_s = time.perf_counter() - start
    times.step_s += times.save_s
    return times, is_late


def check_newest(way: Way, step: int, state_bytes: int) -> int:
    """Return the bytes of the newest checkpoint, 0 of a way that saves nothing.

    Raises:
        StorageError: It is not that of the step, or too small to be whole: this way did not do its work.
    """
    if type(way) is Way:
        return 0
    newest_step, size_bytes = way.newest()
    if newest_step != step or size_bytes < state_bytes:
        message = (
            f"the newest checkpoint is of step {newest_step} with {size_bytes} bytes; expected step {step} with at "
            f"least {state_bytes}"
        )
        raise StorageError(None, message, way.root)
    return size_bytes


def train_and_save(training: Stepping, way: Way, *, every: int, warm_up_count: int, step_count: int) -> dict[str, Any]:
    """Train with one way from first step to everything durable, and end the way.

    Args:
        training: The training, at its start.
        way: The way of saving, made for this training.
        every: The number of steps from one save to the next.
        warm_up_count: Steps before those that count, a multiple of `every`.
        step_count: Steps that count, a multiple of `every`.

    Returns:
        As JSON can carry it: seconds of each step, those until all was durable after the last one, how many saves found
        the one before still being written, the last loss, bytes of memory and of the last checkpoint.
    """
    last_step = warm_up_count + step_count
    gc.collect()
    # At the start of the first that counts, the last save of the warm-up is on its way, as after any other step.
    steps = [
        step_and_save(training, way, number if number % every == 0 else None) for number in range(1, last_step + 1)
    ][warm_up_count:]
    start = time.perf_counter()
    way.settle()
    tail_s = time.perf_counter() - start
    report = way.report()
    way.finish()
    state_bytes = training.state_bytes()
    return {
        "settings": way.settings,
        "steps": [asdict(times) for times, _ in steps],
        "late_count": sum(is_late for _, is_late in steps),
        "tail_s": tail_s,
        "state_bytes": state_bytes,
        "checkpoint_bytes": check_newest(way, last_step, state_bytes),
        "loss": training.last_loss(),
        "peak_bytes": resident_bytes("VmHWM"),
        # Of the process that writes, where there is one; memory that it shares with the trainer counts in both.
        "child_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "report": report,
    }


def summarize_run(result: dict[str, Any], every: int) -> dict[str, float]:
    """Condense one run.

    A window is as many steps as lie between two saves, so each holds one save, and its mean is what a step costs.
    """
    steps = result["steps"]
    windows = [steps[start : start + every] for start in range(0, len(steps), every)]
    stalls_s = [sum(step["gate_s"] + step["save_s"] for step in window) for window in windows]
    return {
        "step_s": statistics.median(sum(step["step_s"] for step in window) / len(window) for window in windows),
        "stall_s": statistics.median(stalls_s),
        "stall_max_s": max(stalls_s),
        "train_s": sum(step["step_s"] for step in steps),
        "tail_s": result["tail_s"],
        "total_s": sum(step["step_s"] for step in steps) + result["tail_s"],
        "save_count": len(windows),
    }
