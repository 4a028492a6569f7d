"""A step of a Checkpointer → the files of its directory, on the first rank and on the others; replicated state.

When a step may be saved, what it replaces and how it is counted is `checkpointer`'s affair; how sharded state becomes
files `sharded_saver`'s, which is this with other files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastpersist.distributed.coordinator_save import CoordinatorSave
from fastpersist.distributed.follower_save import FollowerSave
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.formats.manifest import STATE_NAME, rank_file_name
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import Lane, PendingSave, SaveStats
from fastpersist.saving.refused_globals import warn_of_globals
from fastpersist.transfer.arena import Arena

__all__ = ["StepSave", "StepSaver", "saver_class"]

_log = logging.getLogger("fastpersist")


@dataclass(frozen=True, slots=True)
class StepSave:
    """What is saved of a step, and how.

    Attributes:
        step: Which.
        state: As all ranks have it; with several, rank 0's is what is saved.
        rank_state: This rank's own; None for none.
        metrics: For the manifest.
        overwrite: Replace the step if it is there.
        stats: Filled in.
        after: Done when the step is durable, beside the writing of the next one; where another rank than the first has
            published a store of its own, with the metrics of the first, and `among`, the steps that it has.
        next_commit_number: Asked on the first rank when all is written.
    """

    step: int
    state: object
    rank_state: object
    metrics: dict[str, float]
    overwrite: bool
    stats: SaveStats
    after: Callable[..., None]
    next_commit_number: Callable[[], int]


class StepSaver:
    """Saves the steps of one Checkpointer. One thread uses it; another one writes.

    Args:
        root: Where the steps are.
        owners: Whose storages are stable.
        arena: For copied bytes.
        engine: "auto", or an engine's name, which then never falls back.
        paranoid: As in `capture`.
    """

    def __init__(self, root: str, owners: Owners, arena: Arena, *, engine: str, paranoid: bool) -> None:
        self._root = root
        self._owners = owners
        self._arena = arena
        self._engine = engine
        self._paranoid = paranoid
        self._lane = Lane("fastpersist-save")
        self._removal_lane = Lane("fastpersist-rm")  # of its own: removing gigabytes takes long enough to save some
        self._known_keys: tuple[str, ...] | None = None
        self._why_volatile: str | None = None  # of the last save; None where nobody needs to be told
        self._why_told = ""

    def begin(self, step: StepSave, together: SaveGroup | None) -> PendingSave:
        """Begin to save a step; returns when everything that may change before the next step is copied.

        Args:
            step: What.
            together: With the other ranks; None without any.
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
            self._begin_other(step, peer)
            if step.rank_state is not None:
                peer.add_own(step.rank_state, rank_file_name(together.session.rank), self._owners)
            return peer.publish(lambda end: step.after(metrics=end["metrics"], among=end["steps"]))
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
            self._begin_first(step, directory)
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
        """Say, after `begin`, what makes saves slow, and of each new structure what a default load would refuse.

        Args:
            state: That was saved; the first rank tells it for all.
        """
        if self._why_volatile is None:
            return
        if self._why_volatile not in ("", self._why_told):
            self._why_told = self._why_volatile
            _log.info("%s: the whole state is copied inside save(): %s", self._root, self._why_told)
        keys = tuple(map(str, state)) if isinstance(state, Mapping) else ()
        if keys != self._known_keys:
            self._known_keys = keys
            self._warn_of(state)

    # --- what sharded state does in another way

    def _begin_first(self, step: StepSave, directory: DirectorySave) -> None:
        """Save the state into the directory; on the first rank."""
        directory.save(step.state, STATE_NAME, owners=self._owners)

    def _begin_other(self, step: StepSave, peer: FollowerSave) -> None:
        """Save this rank's part of the state; on the others."""
        peer.save(step.state, STATE_NAME, self._owners, self._owners.look)

    def _warn_of(self, state: object) -> None:
        """Warn of what the state holds."""
        warn_of_globals(state)


def saver_class(sharded: bool) -> type[StepSaver]:
    """Return what saves steps of sharded state, or of state that all ranks hold alike."""
    if not sharded:
        return StepSaver
    from fastpersist.checkpointer.sharded_saver import ShardedSaver  # torch.distributed.checkpoint takes long to import

    return ShardedSaver
