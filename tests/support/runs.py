"""A tiny training run whose every step is computed from its number, so that anybody can say what was saved at a step.

The optimizer is real, its gradients are not: they are whole numbers of the step, divided. So a process that was
killed tells its successor all there is to know by the number of the step alone, and one wrong byte shows.
"""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.sameness import portrait
from support.training import PATIENCE_S, HeldFilesystem

import fastpersist as fp
from fastpersist.commit.filesystem import using
from fastpersist.events.delivery import flush

# No tensor is so large that torch would cut its work over threads: then the result would depend on their number.
SIZES = (20_000, 12_000, 3_000, 7)
FEW = (3_000, 7)


class Run:
    """A model and its optimizer after a number of steps.

    Args:
        sizes: The sizes of the parameters.
    """

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.step = 0
        self.model = torch.nn.ParameterList(torch.nn.Parameter(torch.arange(size) / 1e5) for size in sizes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2, amsgrad=False)

    def advance(self, step: int | None = None) -> Run:
        """Take the steps up to this one, by default one step."""
        target = self.step + 1 if step is None else step
        while self.step < target:
            self.step += 1
            for parameter in self.model:
                parameter.grad = (torch.arange(parameter.numel()) * 7 + self.step * 13) % 101 / 101 - 0.5
            self.optimizer.step()
        return self

    def state(self) -> dict[str, Any]:
        """Return what is saved: live tensors of the optimizer, one that is new each time, and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "position": torch.arange(50) + self.step,
            "step": self.step,
        }

    def targets(self) -> dict[str, Any]:
        """Return what `load(into=…)` fills."""
        return {"model": self.model, "optimizer": self.optimizer}

    def resume(self, checkpointer: fp.Checkpointer) -> Run:
        """Go on from the newest step of a root, if there is one."""
        found = checkpointer.load(into=self.targets(), missing_ok=True)
        self.step = self.step if found is None else found["step"]
        return self

    def load(self, checkpointer: fp.Checkpointer, **options: Any) -> Run:
        """Go on from the newest step of a root."""
        self.step = checkpointer.load(into=self.targets(), **options)["step"]
        return self


def copied(obj: Any) -> Any:
    """Return what stock torch would load of an object that stock torch had saved now."""
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Replay:
    """Says what the state was at a step. Steps that ascend cost one step of training each, known ones nothing."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self._sizes = sizes
        self._run = Run(sizes)
        self._portraits: dict[int, Any] = {}

    def at(self, step: int) -> Run:
        if step < self._run.step:
            self._run = Run(self._sizes)
        return self._run.advance(step)

    def check(self, loaded: dict[str, Any], step: int | None = None) -> int:
        """Return the step whose state this is, in every bit; fail if there is none, or if it is not `step`."""
        found = int(loaded["step"])
        assert step in (None, found), f"this is step {found}, not {step}"
        loaded.pop("rank_state", None)
        if found not in self._portraits:
            self._portraits[found] = portrait(copied(self.at(found).state()))
        assert portrait(loaded) == self._portraits[found], f"this is not the state of step {found}"
        return found

    def check_newest(self, root: Path) -> int | None:
        """Load the newest step of a root without falling back; return which it is, None if there is none."""
        with fp.Checkpointer(root) as reader:  # closed: no event of it is written while a test removes the root
            step = reader.latest()
            return None if step is None else self.check(reader.load(strict=True, verify=True), step)

    def check_all(self, root: Path) -> list[int]:
        """Load each step of a root; return which there are."""
        with fp.Checkpointer(root) as reader:
            return [self.check(reader.load(step, verify=True), step) for step in reader.steps()]


def remove_root(root: Path) -> None:
    """Remove a root of this process's Checkpointers: their events come to its log a little later than all else."""
    assert flush(PATIENCE_S)
    shutil.rmtree(root)


def hidden_names(root: Path) -> list[str]:
    """List what unfinished saves and removals have left below a root."""
    return sorted(path.name for pattern in (".*.pending-*", ".*.retired-*") for path in root.glob(pattern))


@contextmanager
def held_writers(writers: HeldFilesystem | None = None) -> Iterator[HeldFilesystem]:
    """Let no save write its first byte until the block says so, or ends."""
    writers = writers or HeldFilesystem()
    with using(writers):
        try:
            yield writers
        finally:
            writers.release()
            wait_for_writers()


def wait_for_writers() -> None:
    """Wait until no thread of ours is left, but those that deliver events and serve the connections of ranks."""
    for thread in threading.enumerate():
        if thread.name.startswith("fastpersist") and thread.name not in ("fastpersist-events", "fastpersist-ranks"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} never ends"
