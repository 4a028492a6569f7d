"""The overlap part of gpu.py: a training on the device that saves every step, by Checkpointer and by DCP.

The training is a stack of square bf16 layers under fused AdamW, whose forward and backward are made as long as a write
takes by matrix products that touch nothing of it. So the write has the time that it needs, and what a step takes longer
than without saves is what saving costs: memory traffic, PCIe, the host's cores, waiting.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_disk import remove
from gpu_measure import Device, Found, check_equal
from gpu_plan import BYTES_PER_PARAMETER, STEP_OF_WRITE, overlap_blocks
from gpu_ways import DcpSaver
from torch import nn

import fastpersist as fp

__all__ = ["measure_overlap"]


class _Training:
    """A model, its optimizer, and a step of a chosen length."""

    def __init__(self, device: Device, parameter_count: int) -> None:
        torch.manual_seed(20260)
        self.device = device
        self.width = 4096 if device.is_cuda else 128
        layer_count = max(parameter_count // self.width**2, 1)
        with device.torch:
            self.model = nn.Sequential(
                *(nn.Linear(self.width, self.width, bias=False, dtype=torch.bfloat16) for _ in range(layer_count))
            )
            side = 8192 if device.is_cuda else 256
            self._factors = [torch.randn(side, side, dtype=torch.bfloat16) for _ in range(3)]
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=self.width**-0.5)  # or gradients would vanish, and steps change nothing
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4, fused=True)
        self.optimizer.register_step_pre_hook(self._note_gate_is_open)  # runs after the global ones, where a gate waits
        self._gate_open_at_s = 0.0
        self.product_count = 0

    def _note_gate_is_open(self, *_: Any) -> None:
        self._gate_open_at_s = time.perf_counter()

    def compute(self, product_count: int) -> None:
        """Keep the device busy."""
        first, second, out = self._factors
        for _ in range(product_count):
            torch.mm(first, second, out=out)

    def set_length(self, seconds: float) -> None:
        """Choose as many products as make a step so long."""
        self.step()
        self.compute(3)
        self.device.synchronize()
        start_s = time.perf_counter()
        self.compute(20)
        self.device.synchronize()
        product_s = (time.perf_counter() - start_s) / 20
        self.product_count = 0
        bare_s = min(self.step()[0] for _ in range(2))
        self.product_count = max(int((seconds - bare_s) / product_s), 0)

    def step(
        self, save: Callable[[], object] | None = None, before_update: Callable[[], object] = lambda: None
    ) -> tuple[float, float, float]:
        """Save, then train one step; return the seconds of all of it, of the save, and of the gate."""
        start_s = time.perf_counter()
        if save is not None:
            save()
        saved_s = time.perf_counter()
        inputs = torch.randn(64, self.width, device=self.device.torch, dtype=torch.bfloat16)
        self.model(inputs).float().square().mean().backward()
        self.compute(self.product_count)
        ready_s = time.perf_counter()
        before_update()
        self.optimizer.step()
        gate_s = self._gate_open_at_s - ready_s
        self.optimizer.zero_grad()
        self.device.synchronize()  # as a training does that reads its loss
        return time.perf_counter() - start_s, saved_s - start_s, gate_s

    def state(self) -> dict[str, Any]:
        """Return what is saved; the tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the large tensors of the state by one name each."""
        found = dict(self.model.state_dict())
        for index, moments in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": tensor for name, tensor in moments.items() if tensor.dim()}
        return found


class _None:
    """Saves nothing."""

    def __init__(self, training: _Training, root: str) -> None:
        pass

    save: Callable[[], object] | None = None

    def before_update(self) -> None:
        """Wait until the state may change."""

    def settle(self) -> None:
        """Wait until all is durable and nothing goes on."""

    def close(self) -> None:
        """Settle, and let go of what is held."""

    def load(self) -> dict[str, torch.Tensor] | None:
        """Return the tensors of the newest checkpoint, read by stock tools."""
        return None


class _Ours(_None):
    """fp.Checkpointer; the gate is in the optimizer's step."""

    def __init__(self, training: _Training, root: str) -> None:
        self._training, self._root, self._step = training, root, 0
        self._checkpointer = fp.Checkpointer(root, optimizer=training.optimizer, keep=1)

    def save(self) -> object:
        self._step += 1
        return self._checkpointer.save(self._step, self._training.state())

    def settle(self) -> None:
        self._checkpointer.wait()

    def close(self) -> None:
        self._checkpointer.close()

    def stats(self) -> dict[str, Any]:
        """Return what the last save says of itself."""
        last = self._checkpointer.stats()[-1]
        names = "stall_s capture_s plan_s write_s sync_s bytes bytes_by_writer bytes_at_gate bytes_before_return engine"
        return {name: getattr(last, name) for name in names.split()}

    def load(self) -> dict[str, torch.Tensor] | None:
        path = os.path.join(self._root, f"step-{self._step:08d}", "state.pt")
        found = torch.load(path, map_location=self._training.device.torch, weights_only=True)
        tensors = dict(found["model"])
        for index, moments in found["optimizer"]["state"].items():
            tensors |= {f"{index}.{name}": tensor for name, tensor in moments.items() if tensor.dim()}
        return tensors


class _Dcp(_None):
    """dcp.async_save with pinned staging, awaited before the update; keeps one checkpoint, as the other does."""

    def __init__(self, training: _Training, root: str) -> None:
        os.mkdir(root)
        self._training, self._root, self._step = training, root, 0
        self._saver = DcpSaver(training.device)

    def save(self) -> object:
        self._saver.wait()
        if self._step:
            remove(self._path(self._step - 1))
        self._step += 1
        self._saver.save(self._training.tensors(), self._path(self._step))
        return None

    def _path(self, step: int) -> str:
        return os.path.join(self._root, f"step-{step}")

    def before_update(self) -> None:
        self._saver.wait_staged()

    def settle(self) -> None:
        self._saver.wait()

    def close(self) -> None:
        self._saver.close()

    def load(self) -> dict[str, torch.Tensor] | None:
        return DcpSaver.load(self._path(self._step), self._training.tensors())


_WAYS: dict[str, Callable[[_Training, str], _None]] = {
    "no saves": _None,
    "fp.Checkpointer": _Ours,
    "dcp.async_save, pinned staging": _Dcp,
}


def measure_overlap(
    found: Found, device: Device, directory: str, parameter_count: int, rounds: int, deadline_s: float
) -> None:
    """Train with each way in turn, in blocks of up to three steps, each of which saves.

    Args:
        found: Gets values["overlap"]: settings, and by way the samples.
        device: What trains.
        directory: Empty, on the disk.
        parameter_count: Of the model.
        rounds: Blocks of each way, at most.
        deadline_s: No round begins after this time.monotonic().
    """
    training = _Training(device, parameter_count)
    for _ in range(2):
        training.step()  # there are moments from the first on
    count = sum(parameter.numel() for parameter in training.model.parameters())
    write_s, first_s = _write_seconds(training, os.path.join(directory, "alone"))
    # A rehearsal on the CPU shall be short.
    step_s = STEP_OF_WRITE * write_s if device.is_cuda else min(STEP_OF_WRITE * write_s, 0.005)
    training.set_length(step_s)
    overlap: dict[str, Any] = {
        "parameter_count": count,
        "state_bytes": count * BYTES_PER_PARAMETER,
        "first_save_s": first_s,
        "write_alone_s": write_s,
        "step_made_s": step_s,
        "products_per_step": training.product_count,
        "ways": {},
    }
    found.values["overlap"] = overlap
    ways: dict[str, _None] = {}
    seen_s: dict[str, float] = {}
    for name, make in _WAYS.items():
        entry = {"steps": [], "integrity": "not checked", "note": ""}
        overlap["ways"][name] = entry
        try:
            ways[name] = make(training, os.path.join(directory, f"way-{len(ways)}"))
            # Its memory is there from then on; the second step waits for the write of the first.
            seen_s[name] = _run_block(training, ways[name], 2)[-1]["step_s"]
            entry["integrity"] = _check(training, ways[name])
        except Exception as error:  # noqa: BLE001 - one way's failure is no other's
            entry["note"] = f"{type(error).__name__}: {error}"[:300]
            ways.pop(name, None)
        found.keep()
    rounds, step_count = overlap_blocks(list(seen_s.values()), deadline_s - time.monotonic(), rounds)
    overlap |= {"rounds": rounds, "steps_per_round": step_count}
    for number in range(rounds):
        round_start_s = time.monotonic()
        for name, way in list(ways.items() if number % 2 else reversed(ways.items())):
            try:
                overlap["ways"][name]["steps"].append(_run_block(training, way, step_count))
            except Exception as error:  # noqa: BLE001 - as above
                overlap["ways"][name]["note"] = f"{type(error).__name__}: {error}"[:300]
                del ways[name]
            found.keep()
        now_s = time.monotonic()
        if now_s + 0.8 * (now_s - round_start_s) > deadline_s and number + 1 < rounds:
            found.note(f"overlap: time for {number + 1} of {rounds} rounds")
            break
    ours = ways.get("fp.Checkpointer")
    if isinstance(ours, _Ours):
        overlap["last_stats"] = ours.stats()
    for way in ways.values():
        way.close()
    found.keep()


def _write_seconds(training: _Training, root: str) -> tuple[float, float]:
    """Return what a save takes with nothing beside it, and what the first one takes."""
    seconds = []
    with fp.Checkpointer(root, optimizer=training.optimizer, keep=1) as checkpointer:
        for step in range(3):
            training.device.synchronize()
            start_s = time.perf_counter()
            checkpointer.save(step, training.state())
            checkpointer.wait()
            seconds.append(time.perf_counter() - start_s)
            training.step()
    remove(root)
    return statistics.median(seconds[1:]), seconds[0]


def _run_block(training: _Training, way: _None, step_count: int) -> list[dict[str, float]]:
    steps = []
    for _ in range(step_count):
        step_s, save_s, gate_s = training.step(way.save, way.before_update)
        steps.append({"step_s": step_s, "save_s": save_s, "gate_s": gate_s})
    way.settle()
    return steps


def _check(training: _Training, way: _None) -> str:
    """Save, train on, and look whether the file holds what was true at the save."""
    if way.save is None:
        return "moves no state"
    wanted = {name: tensor.clone() for name, tensor in training.tensors().items()}
    training.step(way.save, way.before_update)
    way.settle()
    if all(torch.equal(wanted[name], tensor) for name, tensor in training.tensors().items()):
        return "the step changed nothing, so nothing was shown"
    found = way.load()
    if found is None:
        return "not checked"
    check_equal(found, wanted)
    return "equal"
