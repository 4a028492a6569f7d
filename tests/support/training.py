"""Trains tiny models beside a save that is under way, and compares what was saved with a copy taken at save().

An `Overlap` decides how far the writer gets before training goes on, with events and not with time. The copy that it
compares with is a file of stock torch.save, made right before save_async is called; every byte must be the same.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from support.archives import assert_same_files, save_aligned
from support.sameness import assert_same, portrait
from support.states import pending_files

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.saving import capture, file_save
from fastpersist.transfer.arena import Arena

PATIENCE_S = 30.0
"""So long does a test wait for what should happen at once."""

BLOCK_BYTES = 2 << 20
"""What the arena is cut into; the states of these models are larger than one."""

WIDTH = 256

WAYS = ("held", "free", "one block", "no room")
"""The writer has not begun when the step comes and all is copied there; it runs as it likes; it begins when somebody
waits, with memory for a part of the state, or for nothing."""


class HeldFilesystem(Filesystem):
    """The real file system, in which writers wait, before their first byte, until they are released."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()

    def release(self) -> None:
        """Let every writer go, those that come later too."""
        self._released.set()

    def hold(self) -> None:
        """Let those that come from now on wait."""
        self.reached.clear()
        self._released.clear()

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        self.reached.set()
        if not self._released.wait(PATIENCE_S):
            raise TimeoutError("the test never released its writers")
        super().allocate(fd, size_bytes, path)


class FailingFilesystem(HeldFilesystem):
    """Once released, there is no space."""

    fails_once = False
    """There is space for the second writer."""

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        super().allocate(fd, size_bytes, path)
        if self.is_full:
            self.is_full = not self.fails_once
            raise fp.NoSpaceError(errno.ENOSPC, f"allocating {path}: no space", path)

    is_full = True


class Overlap:
    """Saves during training. A context manager that finishes every save it began and looks for what they left.

    Args:
        directory: The directory for files.
        way: One of WAYS.
    """

    def __init__(self, directory: Path, way: str) -> None:
        self.way = way
        self.directory = directory
        self.writers = HeldFilesystem()
        self._expected = directory / "expected"
        self._saves: list[fp.PendingSave] = []
        self._stack = ExitStack()

    def __enter__(self) -> Overlap:
        self._expected.mkdir()
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        arena_bytes = {"one block": BLOCK_BYTES, "no room": 0}.get(self.way, 256 << 20)
        patch.setattr(file_save, "async_arena", Arena(arena_bytes))
        self._stack.enter_context(using(self.writers))
        if self.way == "free":
            self.writers.release()
        elif self.way != "held":
            for name in ("wait_captured", "copy_volatile"):
                patch.setattr(capture.Capture, name, self._releasing(getattr(capture.Capture, name)))
        return self

    def _releasing(self, waiting: Callable[..., Any]) -> Callable[..., Any]:
        def release_and_wait(*arguments: Any, **keywords: Any) -> Any:
            if keywords.get("wait", True):
                self.writers.release()
            return waiting(*arguments, **keywords)

        return release_and_wait

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.writers.release()
        with self._stack:
            for pending in self._saves:
                pending.exception(PATIENCE_S)
        if error is None:
            assert not capture._pending, "a save that is over still holds steps back"
            assert not pending_files(self.directory)

    def save(self, obj: object, *, name: str = "state.pt", **arguments: Any) -> fp.PendingSave:
        """Begin to save an object; what it is now is what `check` will look for."""
        self.note(obj, name)
        pending = fp.save_async(obj, self.directory / name, **arguments)
        self._saves.append(pending)
        return pending

    def note(self, obj: object, name: str = "state.pt") -> None:
        """Keep a copy of an object."""
        save_aligned(obj, self._expected / name)

    def let_all_finish(self) -> None:
        """Let the writers go, and hold those that come later as before."""
        self.writers.release()
        for pending in self._saves:
            assert pending.join(PATIENCE_S), "a save does not come to its end"
        if self.way != "free":
            self.writers.hold()

    def check(self, pending: fp.PendingSave, obj: object = None, *, same_file: bool = True) -> None:
        """Let the writer finish and compare what it wrote, bit for bit.

        Args:
            pending: The save.
            obj: What was saved; it must have changed since, or the comparison would show nothing.
            same_file: Compare the bytes of the file too.
        """
        self.let_all_finish()
        path = pending.result(PATIENCE_S)
        expected = torch.load(self._expected / path.name, weights_only=False)
        if obj is not None:
            assert portrait(obj) != portrait(expected), "nothing changed since save(), so nothing is proved"
        assert_same(fp.load(path, weights_only=False, verify=True), expected)
        if same_file:
            assert_same_files(path, self._expected / path.name)
        if self.way == "no room":
            assert pending.stats.bytes_at_gate == pending.stats.bytes_before_return == 0


@contextmanager
def waiting_step(step: Callable[[], object]) -> Iterator[threading.Thread]:
    """Take a step on a thread of its own, and go on once it stands at the gate."""
    at_gate = threading.Event()
    failed: list[BaseException] = []
    wait_captured = capture.Capture.wait_captured

    def noticed(self: capture.Capture, timeout_s: float | None = None, *, on_host: bool = True) -> None:
        at_gate.set()
        wait_captured(self, timeout_s, on_host=on_host)

    def work() -> None:
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failed.append(error)
            at_gate.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture.Capture, "wait_captured", noticed)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert at_gate.wait(PATIENCE_S), "the step did not come to the gate"
            yield thread
        finally:
            thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the step still stands at the gate"
    if failed:
        raise failed[0]


def small_model(seed: int = 0) -> torch.nn.Sequential:
    """Make a model of 1 MiB: with two moments it is larger than a block of the arena."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH))


def backward(model: torch.nn.Module, scale: float = 1.0) -> torch.Tensor:
    """Run forward and backward on random numbers; gradients add up."""
    loss = model(torch.randn(4, WIDTH)).square().mean() * scale
    loss.backward()
    return loss


def train(model: torch.nn.Module, optimizer: Any, step_count: int = 1) -> None:
    """Take steps of training on random numbers."""
    for _ in range(step_count):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def state_of(model: torch.nn.Module, *optimizers: Any) -> dict[str, Any]:
    """Return what a trainer would save: references to the live tensors."""
    return {"model": model.state_dict(), **{f"optimizer{i}": one.state_dict() for i, one in enumerate(optimizers)}}


def torn_by(overlap: Overlap, pending: fp.PendingSave, name: str = "") -> None:
    """Let the writer finish; the save must fail because the tensor of that name was changed, and publish nothing."""
    overlap.let_all_finish()
    error = pending.exception(PATIENCE_S)
    assert isinstance(error, fp.TornStateError), error
    assert name in str(error)
    assert pending.captured()
    with pytest.raises(fp.TornStateError):
        pending.result()
