"""Save the steps of a Checkpointer: check what save() was given, begin a save, and follow it until it is over.

- `StepSaver` turns a step into the files of its directory, on the coordinator and on the followers; `ShardedSaver` does
  so for sharded state.
- `SaveQueue` knows which saves are unfinished or have failed, what each cost, and what `busy` leaves out.

When a step may be saved, and what it replaces, is decided in `checkpointer`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fastpersist.distributed.coordinator_save import CoordinatorSave
from fastpersist.distributed.follower_save import FollowerSave
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.errors import ConfigError, SkippedError
from fastpersist.events.delivery import flush
from fastpersist.formats.manifest import STATE_NAME, CheckpointManifest, checked_step, encode_manifest, rank_file_name
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import Lane, PendingSave, SaveStats
from fastpersist.saving.refused_globals import warn_caller, warn_of_globals
from fastpersist.saving.skeleton import pickle_skeleton
from fastpersist.transfer.arena import Arena

__all__ = ["SaveQueue", "ShardedSaver", "StepSave", "StepSaver", "checked_metrics", "step_of"]

_log = logging.getLogger("fastpersist")

_STATS_COUNT = 1000
_FAILED_COUNT = 16


# --------------------------------------------------------------------------------------------- what is saved


@dataclass(frozen=True, slots=True)
class StepSave:
    """One call of `Checkpointer.save`, with checked arguments.

    Attributes:
        step: The step.
        state: The state; with several ranks the coordinator's is saved, unless it is sharded.
        rank_state: This rank's own object; None for none.
        metrics: Numbers for the manifest.
        overwrite: Replace the step if it is there.
        stats: Filled in by the save.
        after: Called when the step is durable, while the next step may already be written. A follower that publishes a
            store of its own calls it with the coordinator's `metrics`; and with the coordinator's steps as `among`,
            where each store has a part, or the commit `number`, where each has a copy.
        next_commit_number: Called on the coordinator when all files are written.
    """

    step: int
    state: object
    rank_state: object
    metrics: dict[str, float]
    overwrite: bool
    stats: SaveStats
    after: Callable[..., None]
    next_commit_number: Callable[[], int]


def step_of(step: object, state: object) -> int:
    """Return the step that save() was given, as an int.

    Raises:
        ConfigError: It is no whole number of 0 or more; or step and state are in the wrong order.
    """
    if not hasattr(step, "__index__") and isinstance(state, int):
        raise ConfigError(f"the step comes first, then the state: save({state!r}, state)")
    return checked_step(step)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats by name; a tensor of one element counts as a number.

    Raises:
        ConfigError: They are no dict, a value is no number, or a name is nothing that a manifest can hold.
    """
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(f'metrics is a dict from names to numbers, such as {{"loss": 0.5}}; not {metrics!r}')
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"metrics are numbers; {name!r} is {type(value).__name__}: {error}") from None
    encode_manifest(CheckpointManifest((), None, 0.0, checked, {}, {}, {}))
    return checked


# --------------------------------------------------------------------------------------------- how a save begins


class StepSaver:
    """Saves the steps of one Checkpointer, whose state all ranks hold alike.

    Args:
        root: The directory of the steps.
        owners: The optimizers and constants, whose storages are not copied at once.
        arena: Host memory for copied bytes.
        engine: "auto", or an engine's name, which then never falls back.
        paranoid: The option `paranoid` of `Checkpointer`.

    Thread safety: only the training thread calls it; the files are written by a thread of its own.
    """

    def __init__(self, root: str, owners: Owners, arena: Arena, *, engine: str, paranoid: bool) -> None:
        self._root = root
        self._owners = owners
        self._arena = arena
        self._engine = engine
        self._paranoid = paranoid
        self._lane = Lane("fastpersist-save")
        self._removal_lane = Lane("fastpersist-rm")  # its own thread: the next save does not wait for a removal
        self._known_keys: tuple[str, ...] | None = None
        self._pickle = b""  # of the state that was saved last, until it is told what a load would refuse
        self._why_volatile: str | None = None  # of the last save; None on followers, which tell nothing
        self._why_told = ""

    def begin(self, step: StepSave, together: SaveGroup | None) -> PendingSave:
        """Begin to save a step; returns when everything that may change before the next step is copied.

        Args:
            step: The step.
            together: The save of all ranks; None if this process is alone.
        """
        if together is not None and together.session.rank:
            peer = FollowerSave(
                step.stats.path,
                together,
                engine=self._engine,
                durable=True,
                arena=self._arena,
                lane=self._lane,
                stats=step.stats,
                paranoid=self._paranoid,
                confirms=True,
            )
            self._begin_follower(step, peer)
            if step.rank_state is not None:
                peer.add_own(step.rank_state, rank_file_name(together.session.rank), self._owners)
            return peer.publish(
                lambda end: step.after(metrics=end["metrics"], among=end.get("steps"), number=end.get("number"))
            )
        directory = DirectorySave(
            step.stats.path,
            overwrite=step.overwrite,
            engine=self._engine,
            _arena=self._arena,
            _lane=self._lane,
            _stats=step.stats,
            _paranoid=self._paranoid,
            _strategy=None if together is None else CoordinatorSave(together),
        )
        with directory:  # an error below removes it
            self._begin_coordinator(step, directory)
            if step.rank_state is not None:
                directory.save(step.rank_state, rank_file_name(0), owners=self._owners, own=True)
            self._why_volatile = directory.captures[0].why_volatile
            return directory.publish(
                step=step.step,
                metrics=step.metrics,
                after=step.after,
                _lane=self._removal_lane,
                _next_commit_number=step.next_commit_number,
            )

    def tell_once(self, state: object) -> None:
        """Log why state was copied inside save(); warn, once for each set of keys, of what a default load would refuse.

        Args:
            state: The state that was saved. Followers are silent.
        """
        if self._why_volatile is None:
            return
        if self._why_volatile not in ("", self._why_told):
            self._why_told = self._why_volatile
            _log.info("%s: state is copied inside save(), which stalls training: %s", self._root, self._why_told)
        keys = tuple(map(str, state)) if isinstance(state, Mapping) else ()
        if keys != self._known_keys:
            self._known_keys = keys
            self._warn_of(state)
        self._pickle = b""

    def await_removals(self) -> bool:
        """Wait until the steps that are being removed are gone; return False if there are none."""
        return self._removal_lane.await_idle()

    # --- what differs for sharded state

    def forget_ranks(self) -> None:
        """Forget the agreements with the present ranks: other ranks follow, or none."""

    def _begin_coordinator(self, step: StepSave, directory: DirectorySave) -> None:
        """Save the coordinator's part of the state into the directory."""
        directory.save(step.state, STATE_NAME, owners=self._owners)
        self._pickle = directory.pickle

    def _begin_follower(self, step: StepSave, peer: FollowerSave) -> None:
        """Save a follower's part of the state."""
        peer.save(step.state, STATE_NAME, self._owners, self._owners.look)

    def _warn_of(self, state: object) -> None:
        """Warn of what a default load would refuse."""
        warn_of_globals(self._pickle)


class ShardedSaver(StepSaver):
    """Saves the steps of one Checkpointer whose state is sharded: the files of torch.distributed.checkpoint."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        from fastpersist.dcp.plan_agreement import SharedPlans  # torch.distributed.checkpoint takes long to import

        super().__init__(*arguments, **options)
        self._new_plans = SharedPlans
        self._plans = SharedPlans()

    def forget_ranks(self) -> None:
        """Plan anew: the plans are those of the ranks before."""
        self._plans = self._new_plans()

    def _begin_coordinator(self, step: StepSave, directory: DirectorySave) -> None:
        from fastpersist.dcp.save_state import save_sharded

        save_sharded(directory, step.state, owners=self._owners, plans=self._plans)

    def _begin_follower(self, step: StepSave, peer: FollowerSave) -> None:
        from fastpersist.dcp.save_state import ShardedFiles, required_mapping

        peer.save_produced(ShardedFiles(required_mapping(step.state), self._owners, self._plans))

    def _warn_of(self, state: Any) -> None:
        """Warn of objects that a load refuses, and of keys that a load returns as text."""
        objects: dict[str, Any] = {}
        changed: list[str] = []
        _find_objects(state, "", objects, changed)
        with suppress(Exception):  # DCP pickles each object later, and says what fails then
            self._pickle = pickle_skeleton(objects).pickle
        warn_of_globals(self._pickle)
        if changed:
            warn_caller(
                f"the keys of {', '.join(map(repr, changed[:5]))} are not all text; in sharded state, as in DCP, they "
                "come back as text"
            )


def _find_objects(
    value: Any, name: str, objects: dict[str, Any], changed: list[str], *, knows_ids: bool = False
) -> None:
    """Find all objects that are no tensors, by name, and the dicts with keys that are not text: DCP makes them text."""
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, Mapping):
        if not knows_ids and not all(isinstance(key, str) for key in value):
            changed.append(name)
        # A load restores the numbers that are keys of an optimizer's state: its param_groups list them.
        is_optimizer = isinstance(value.get("state"), Mapping) and isinstance(value.get("param_groups"), list)
        for key, item in value.items():
            inner = f"{name}.{key}" if name else str(key)
            _find_objects(item, inner, objects, changed, knows_ids=is_optimizer and key == "state")
    elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | Mapping | list) for item in value):
        for index, item in enumerate(value):
            _find_objects(item, f"{name}.{index}", objects, changed)
    else:
        objects[name] = value


# --------------------------------------------------------------------------------------------- until it is over


class SaveQueue:
    """The saves of a Checkpointer: which are unfinished, which have failed, and what each cost.

    Args:
        root: The directory of the steps, for messages.
        on_error: The option `on_error` of `Checkpointer`.

    Attributes:
        stats: What each save cost, oldest first; the last 1000.

    Thread safety: any thread may call note_finished, unfinished and join; only the training thread calls the other
    methods.
    """

    def __init__(self, root: str, on_error: str) -> None:
        self._root = root
        self._on_error = on_error
        self._unfinished: deque[PendingSave] = deque()
        self._failed: deque[PendingSave] = deque(maxlen=_FAILED_COUNT)
        self.stats: deque[SaveStats] = deque(maxlen=_STATS_COUNT)

    def make_room(self, busy: str) -> bool:
        """Wait until fewer than two saves are unwritten, or leave one out.

        Args:
            busy: The option `busy` of `Checkpointer`.

        Returns:
            False if the new save is to be left out.
        """
        self._forget_finished()
        while unwritten := [pending for pending in list(self._unfinished) if not pending.is_written()]:
            if busy == "skip":
                return False
            if len(unwritten) < 2:
                break
            if busy != "latest" or not unwritten[-1].skip("a newer one came before it had begun"):
                unwritten[0].wait_written()
        return True

    def add(self, pending: PendingSave) -> None:
        """Add a save that has begun."""
        self._unfinished.append(pending)
        pending.when_finished(lambda: self.note_finished(pending))

    def note_finished(self, pending: PendingSave) -> None:
        """Keep what a save has cost, and the save itself if it failed."""
        stats = pending.stats
        self.stats.append(stats)
        if stats.error is not None:
            if not pending.skipped():
                self._failed.append(pending)
            return
        _log.info(
            "step %s: %.2f GB in %.3f s (%.2f GB/s, %s), training stalled for %.1f ms, synced in %.3f s",
            stats.step,
            stats.bytes / 1e9,
            stats.write_s,
            stats.bytes / 1e9 / max(stats.write_s, 1e-9),
            stats.engine,
            stats.stall_s * 1e3,
            stats.sync_s,
        )

    def unfinished(self) -> list[PendingSave]:
        """Return the unfinished saves."""
        return [pending for pending in list(self._unfinished) if not pending.done()]

    def give_up(self, error: SkippedError) -> None:
        """Make every save that is not visible yet fail with an error, as soon as its thread notices."""
        for pending in self.unfinished():
            if not pending.is_written():
                pending.cancel(error)

    def wait_captured(self, timeout: float | None) -> None:
        """Return when the state of every save may change; raise TimeoutError after `timeout` seconds."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        for pending in list(self._unfinished):
            pending.wait_captured(_left_s(deadline_s))

    def join(self, timeout: float | None) -> None:
        """Return when every save is finished; raise TimeoutError after `timeout` seconds."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        for pending in list(self._unfinished):
            if not pending.join(_left_s(deadline_s)):
                raise TimeoutError(f"a save to {self._root} is still under way after {timeout} s")
        self._forget_finished()
        flush()  # who has waited finds what was saved in the log, too

    def _forget_finished(self) -> None:
        for pending in list(self._unfinished):  # in place: a thread that loads does this while another save is added
            if pending.done():
                with suppress(ValueError):
                    self._unfinished.remove(pending)

    # --- failures

    def take_failed(self) -> deque[PendingSave]:
        """Return the failed saves, and forget them: the caller delivers them or gives them back."""
        failed, self._failed = self._failed, deque(maxlen=_FAILED_COUNT)
        return failed

    def give_back(self, failed: deque[PendingSave]) -> None:
        """Put failed saves back, before those that have failed since."""
        self._failed.extendleft(reversed(failed))

    def deliver(self, failed: deque[PendingSave] | None = None) -> None:
        """Raise the oldest failure not yet delivered, or warn of all: those in `failed`, else those kept here."""
        if failed is None:
            failed = self._failed
        while failed:
            pending = failed.popleft()
            error = pending.undelivered_error()
            if error is None or isinstance(error, SkippedError):
                continue
            if self._on_error == "raise":
                if failed is not self._failed:
                    self.give_back(failed)
                raise error
            warn_caller(f"a checkpoint was not saved, training goes on: {error}")

    def log_failed(self, when: str) -> None:
        """Log the failures not yet delivered, if they cannot be raised: "while …"."""
        for pending in self.take_failed():
            if failure := pending.undelivered_error():
                _log.error("%s: %s", when, failure)


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
