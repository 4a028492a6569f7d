"""Any sequence of saves, replacements, crashes, reopenings and loads, beside a plain dict of what was saved.

A crash is a copy of the root, taken before one of the operations of a save, on which a new process goes on: what was
being written lies in it, and nobody holds a lock.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.directories import Refusing
from support.filesystems import Operation, WatchedFilesystem
from support.forking import SMALL_RING, in_child
from support.runs import Run, copied, hidden_names, remove_root, wait_for_writers
from support.sameness import portrait

import fastpersist as fp
from fastpersist.checkpointer.root import RetentionPolicy, steps_to_remove
from fastpersist.commit.directory_commit import committed_path
from fastpersist.commit.filesystem import using
from fastpersist.commit.step_listing import committed_steps

SIZES = (500, 7)
STEPS = st.one_of(st.integers(0, 12), st.sampled_from([99_999_999, 100_000_000, 2**63 - 1]))


POINTS = st.one_of(
    st.integers(0, 60), st.sampled_from(["rename_to_free_name", "exchange", "rename", "sync_directory", "unlink"])
)


class Copying(WatchedFilesystem):
    """Copies a directory before the n-th operation, or the first of a name, or at the end if there is none such."""

    def __init__(self, source: Path, target: Path, point: int | str) -> None:
        self._source = source
        self._target = target
        self._point = point
        self._count = 0

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        if self._point in (self._count, operation.name):
            self.copy()
        self._count += 1
        yield

    def copy(self) -> None:
        if not self._target.exists():
            shutil.copytree(self._source, self._target)


class CopyingRefusing(Refusing, Copying):
    """The same where two names cannot change places."""


class Machine(RuleBasedStateMachine):
    """The real root, and `saved`, what it has to hold."""

    @initialize(
        keep=st.sampled_from([None, 1, 2, 3]),
        keep_every=st.sampled_from([None, 4]),
        keep_best=st.sampled_from([None, (1, "loss", "min")]),
        owned=st.booleans(),
        memory=st.sampled_from([None, 0, 3000]),
        busy=st.sampled_from(["wait", "latest"]),
    )
    def begin(self, keep: Any, keep_every: Any, keep_best: Any, owned: bool, memory: Any, busy: Any) -> None:
        self.scratch = Path(tempfile.mkdtemp())
        self.root_count = 0
        self.root = self.scratch / "0"
        self.run = Run(SIZES).advance(1)
        self.policy = RetentionPolicy(keep, keep_every, keep_best)
        self.options = {
            "keep": keep, "keep_every": keep_every, "keep_best": keep_best, "max_host_bytes": memory,
            "optimizer": self.run.optimizer if owned else None, "busy": busy,
        }  # fmt: skip
        self.checkpointer = fp.Checkpointer(self.root, **self.options)
        self.saved: dict[int, Any] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.pending: list[tuple[int, Any, dict[str, float], fp.PendingSave]] = []

    def teardown(self) -> None:
        if hasattr(self, "scratch"):
            self.checkpointer.close()
            wait_for_writers()
            remove_root(self.scratch)

    # --- what the root has to hold

    def commit(self, step: int, state: Any, metrics: dict[str, float]) -> None:
        """Let a save be committed, and retention do its work. `metrics` is in the order of the commits."""
        self.metrics.pop(step, None)
        self.saved[step] = state
        self.metrics[step] = metrics
        for old in steps_to_remove(self.metrics, self.policy):
            del self.metrics[old], self.saved[old]

    def newest(self) -> int | None:
        """Return the step that was committed last."""
        return next(reversed(self.metrics), None)

    def settle(self) -> None:
        """Wait for all saves."""
        self.checkpointer.wait()
        for step, state, metrics, pending in self.pending:
            if not pending.skipped():
                self.commit(step, state, metrics)
        self.pending.clear()

    def look(self, step: int) -> Any:
        loaded = fp.Checkpointer(self.root).load(step, verify=True)
        assert loaded.pop("rank_state") == {"of": loaded["step"]}
        return portrait(loaded)

    def is_taken(self, step: int) -> bool:
        return step in self.saved or step in [number for number, *_ in self.pending]

    # --- rules

    @rule()
    def train(self) -> None:
        self.run.advance()

    @rule(step=STEPS, loss=st.sampled_from([0.5, 1.0, 2.0, float("nan")]))
    def save(self, step: int, loss: float) -> None:
        if self.is_taken(step):
            self.settle()
        if step in self.saved:
            try:
                self.checkpointer.save(step, self.run.state())
            except fp.ConfigError:
                return
            raise AssertionError(f"step {step} was replaced without being told so")
        self.begin_save(step, {"loss": loss}, overwrite=False)

    @rule(step=STEPS, loss=st.sampled_from([0.5, 1.0, 2.0]))
    def replace(self, step: int, loss: float) -> None:
        self.begin_save(step, {"loss": loss}, overwrite=True)

    def begin_save(self, step: int, metrics: dict[str, float], *, overwrite: bool) -> None:
        state = self.run.state()
        expected = portrait(copied(state))
        pending = self.checkpointer.save(
            step, state, rank_state={"of": self.run.step}, metrics=metrics, overwrite=overwrite
        )
        self.pending.append((step, expected, metrics, pending))

    @rule()
    def wait(self) -> None:
        self.settle()
        assert fp.Checkpointer(self.root).steps() == sorted(self.saved)

    @rule()
    def reopen(self) -> None:
        self.settle()
        self.checkpointer.close()
        self.checkpointer = fp.Checkpointer(self.root, **self.options)

    @precondition(lambda self: self.saved)
    @rule()
    def crash_between_retire_and_rename(self) -> None:
        self.die(None, "rename_to_free_name", refusing=True)

    @rule(step=st.one_of(STEPS, st.none()), point=POINTS, refusing=st.booleans())
    def crash(self, step: int | None, point: int | str, refusing: bool) -> None:
        self.die(step, point, refusing=refusing)

    def die(self, step: int | None, point: int | str, *, refusing: bool) -> None:
        """Die in a save, of a new step or (None) of the newest; another process goes on with what is there."""
        self.settle()
        if step is None:
            step = self.newest() or 0
        if not self.root.exists():
            return
        self.root_count += 1
        root = self.scratch / str(self.root_count)
        before, metrics_before = dict(self.saved), dict(self.metrics)
        double = (CopyingRefusing if refusing else Copying)(self.root, root, point)
        with using(double):
            self.begin_save(step, {"loss": 1.0}, overwrite=True)
            self.settle()
            self.checkpointer.wait()
        double.copy()
        self.checkpointer.close()
        wait_for_writers()
        after = self.saved
        remove_root(self.root)
        self.root = root
        self.checkpointer = fp.Checkpointer(self.root, **self.options)
        found = {number: self.look(number) for number in self.checkpointer.steps()}
        assert found.keys() <= before.keys() | {step}
        assert all(state in (before.get(number), after.get(number)) for number, state in found.items())
        assert found.keys() >= before.keys() & after.keys()
        was_committed = step in found and found[step] == after[step]
        assert was_committed or found == before
        self.saved = found
        self.metrics = {number: metrics for number, metrics in metrics_before.items() if number in found}
        if step in found:
            manifest = committed_steps(str(self.root))[step]
            if before.get(step) == after[step]:  # only its place can tell which of the two it is
                was_committed = self.checkpointer.latest() == step
            if was_committed:
                self.metrics.pop(step, None)
                self.metrics[step] = dict(manifest.metrics)

    @precondition(lambda self: self.saved or self.pending)
    @rule(in_place=st.booleans())
    def load_newest(self, in_place: bool) -> None:
        self.settle()
        run = Run(SIZES)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = self.checkpointer.load(strict=True, into=run.targets() if in_place else None)
        expected = self.saved[self.newest()]
        if in_place:
            run.step = loaded["step"]
            assert portrait(copied(run.state())) == expected
        else:
            loaded.pop("rank_state")
            assert portrait(loaded) == expected

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load_any(self, data: st.DataObject) -> None:
        self.settle()
        step = data.draw(st.sampled_from(sorted(self.saved)))
        assert self.look(step) == self.saved[step]

    @precondition(lambda self: len(self.saved) > 1)
    @rule()
    def damage_newest(self) -> None:
        """A file is lost: the step before is loaded, and the damaged one is nothing any longer."""
        self.settle()
        newest = self.newest()
        if len(self.saved) < 2:
            return
        path = committed_path(str(self.root), f"step-{newest:08d}")  # after a crash it may be a retired one
        assert path is not None
        Path(path, "state.pt").unlink()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = fp.Checkpointer(self.root).load()
        assert "going back" in str(caught[0].message)
        loaded.pop("rank_state")
        assert portrait(loaded) == self.saved[list(self.metrics)[-2]]
        self.checkpointer.close()
        shutil.rmtree(path)
        del self.saved[newest], self.metrics[newest]
        self.checkpointer = fp.Checkpointer(self.root, **self.options)

    @rule()
    def lose_latest(self) -> None:
        self.settle()
        (self.root / "LATEST").unlink(missing_ok=True)

    # --- always

    @invariant()
    def the_newest_step_that_was_committed_is_there(self) -> None:
        if not hasattr(self, "saved") or self.pending:
            return
        reader = fp.Checkpointer(self.root)
        assert reader.steps() == sorted(self.saved)
        if self.saved:
            assert reader.latest() == self.newest()
            assert self.look(self.newest()) == self.saved[self.newest()]

    @invariant()
    def nothing_is_left_when_all_is_settled(self) -> None:
        if hasattr(self, "saved") and not self.pending and self.checkpointer.stats():
            assert hidden_names(self.root) == []


@pytest.mark.parametrize("example_count", [25, pytest.param(1000, marks=pytest.mark.long)])
@in_child(SMALL_RING)
def test_any_sequence_of_saves_and_crashes_keeps_what_was_committed(example_count: int) -> None:
    # Without shrinking, which takes minutes: what fails is printed as it is, and the long run shrinks it.
    phases = [Phase.generate, Phase.shrink] if example_count > 100 else [Phase.generate]
    options = settings(max_examples=example_count, stateful_step_count=20, database=None, phases=phases)
    run_state_machine_as_test(Machine, settings=options)
