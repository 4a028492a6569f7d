"""The saves of a Checkpointer, alone or with other ranks: when one may begin, what it replaces, who gets its errors.

`step_saver` writes the files of a step, and its queue follows each save until it is over. `meeting` has the ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from functools import partial

from fastpersist.arguments import require_bools
from fastpersist.checkpointer.meeting import BoundRanks
from fastpersist.checkpointer.root import RetentionPolicy, Root
from fastpersist.checkpointer.step_loader import RANK_KEY
from fastpersist.checkpointer.step_saver import SaveQueue, StepSave, StepSaver, checked_metrics, step_of
from fastpersist.commit.directory_commit import committed_path
from fastpersist.commit.freeing import offer_room
from fastpersist.distributed.sessions import Session
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.errors import ConfigError, PeerError, StorageError
from fastpersist.formats.manifest import step_name
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.saving.refused_globals import warn_caller

__all__ = ["StepSaves"]


class StepSaves:
    """Begins the saves of a Checkpointer.

    Args:
        root: The directory that the steps are saved to.
        retention: The rules by which steps stay.
        saver: Writes the steps.
        queue: Follows the saves.
        busy: The option `busy` of `Checkpointer`.
        on_error: The option `on_error` of `Checkpointer`.

    Attributes:
        bound: The ranks that save; set before the first save.
        closed: No step is removed any more in favour of another one.

    Thread safety: the training thread only.
    """

    bound: BoundRanks

    def __init__(
        self, root: Root, retention: RetentionPolicy, saver: StepSaver, queue: SaveQueue, *, busy: str, on_error: str
    ) -> None:
        self._root = root
        self._retention = retention
        self._saver = saver
        self._queue = queue
        self._busy = busy
        self._on_error = on_error
        self._metric_looked_for = False
        self.closed = False
        offer_room(self)

    def bind(self, bound: BoundRanks) -> None:
        """Save with these ranks from now on."""
        self.bound = bound
        self._saver.forget_ranks()
        self._root.log_events(bound.rank)

    def is_saved(self, step: int) -> bool:
        """Tell whether a step is being saved, or is committed and not known to be damaged."""
        if self.bound.ranks is not None:  # the same on all of them, whatever they see of the root
            return step in (self.bound.newest_begun, self.bound.resumed)
        if any(pending.stats.step == step for pending in self._queue.unfinished()):
            return True
        return committed_path(self._root.path, step_name(step)) is not None and not self._root.is_damaged(step)

    def save(
        self,
        step: int,
        state: object,
        rank_state: object,
        metrics: Mapping[str, float] | None,
        *,
        overwrite: bool,
        replaces: int | None,
        is_last: bool,
    ) -> PendingSave:
        """Begin to save a step; see `Checkpointer.save`.

        Args:
            step: The argument of `Checkpointer.save`, as are the next four.
            state: …
            rank_state: …
            metrics: …
            overwrite: …
            replaces: The step that may be replaced in any case.
            is_last: This may be the last save: it is not left out, and raises no failure of an earlier one.
        """
        session = self.bound.begin(f"step {step} of {self._root.path}")  # first: all ranks count their saves
        if session is not None:
            return self._save_together(session, step, state, rank_state, metrics, overwrite, replaces, is_last)
        if not is_last:
            self._queue.deliver()
        step = step_of(step, state)
        require_bools(overwrite=overwrite)
        # A loop that went back to an older step reaches the damaged one again.
        overwrite = overwrite or replaces == step or self._root.is_damaged(step)
        busy = "wait" if is_last else self._busy
        return self._begin(step, state, rank_state, checked_metrics(metrics), overwrite, busy)

    def _save_together(
        self,
        session: Session,
        step: int,
        state: object,
        rank_state: object,
        metrics: Mapping[str, float] | None,
        overwrite: bool,
        replaces: int | None,
        is_last: bool,
    ) -> PendingSave:
        """Begin a save of several ranks, and then deliver earlier failures, if they are to be raised here."""
        earlier = self._queue.take_failed()
        try:
            step = step_of(step, state)
            require_bools(overwrite=overwrite)
            together = self.bound.to_save(session, step)
            overwrite = overwrite or replaces == step or (not session.rank and self._root.is_damaged(step))
            pending = self._begin(step, state, rank_state, checked_metrics(metrics), overwrite, self._busy, together)
        except BaseException as error:
            self._queue.give_back(earlier)
            session.fail(error)
            raise
        if is_last:
            self._queue.give_back(earlier)
        else:
            self._queue.deliver(earlier)
        return pending

    def _begin(
        self,
        step: int,
        state: object,
        rank_state: object,
        metrics: dict[str, float],
        overwrite: bool,
        busy: str,
        together: SaveGroup | None = None,
    ) -> PendingSave:
        started_s = time.monotonic()
        stats = SaveStats(path=os.path.join(self._root.path, step_name(step)), step=step)
        if rank_state is not None and not (isinstance(state, Mapping) and RANK_KEY not in state):
            raise ConfigError(
                f"with rank_state, the state must be a dict without the key {RANK_KEY!r}, under which load() returns it"
            )
        if not self._queue.make_room(busy):
            pending = PendingSave(stats.path, stats, rank=self.bound.rank)
            pending.skip("another one was still being written")
            self._queue.stats.append(stats)
            return pending
        is_coordinator = together is None or not together.session.rank
        has_root = False
        try:
            if is_coordinator and not self._root.is_locked():
                self._queue.join(None)  # until then, these saves rely on the present state of the root
                self.own_root()
            has_root = True
            if together is not None and self.bound.needs_stores():
                least_number = self.bound.find_stores(together.session, step, self._root.peek_commit_number)
                self._root.raise_commit_number(least_number)
                together = self.bound.to_save(together.session, step)
            after = partial(self._committed, step, metrics=metrics)
            number = self._root.next_commit_number
            pending = self._saver.begin(
                StepSave(step, state, rank_state, metrics, overwrite, stats, after, number), together
            )
            self._queue.add(pending)
            pending.when_finished(partial(self._look_again_after, pending))
            self._saver.tell_once(state)
            if is_coordinator and not self._metric_looked_for:
                self._metric_looked_for = True
                if why := self._retention.why_all_stay(metrics):
                    warn_caller(why)
        except (StorageError, ConfigError, PeerError) as error:
            if self._on_error == "raise" or (has_root and isinstance(error, ConfigError)):
                raise
            if together is not None:
                together.session.fail(error)
            pending = PendingSave(stats.path, stats, rank=self.bound.rank)
            pending.fail(error)
            self._queue.note_finished(pending)
            self._queue.deliver()
        pending.returned(time.monotonic() - started_s)  # includes what parts of the save have noted
        return pending

    def _look_again_after(self, pending: PendingSave) -> None:
        """Let retention find a step whose save published it and then failed."""
        # A node's own root may hold parts of steps that were never committed.
        if pending.stats.error and not pending.skipped() and self.bound.stores.node_local is None:
            self._root.note_failed()

    def make_room(self, path: str) -> bool:
        """Finish the removals that are under way, or else remove the steps that no rule keeps; tell if any went.

        A save that finds the disk full calls this, on the thread that writes.

        Args:
            path: The path that is being saved; nothing is done for a path outside this root.
        """
        if self.closed or not path.startswith(os.path.join(self._root.directory, "")):
            return False
        if self._saver.await_removals():
            return True
        # A node's own root may hold parts of steps that were never committed.
        return self.bound.stores.node_local is None and self._root.make_room()

    def _committed(
        self,
        step: int,
        metrics: dict[str, float],
        among: Collection[int] | None = None,
        number: int | None = None,
    ) -> None:
        """Tidy the root now that a step is durable; the next one may already be written. See `Root.after_commit`."""
        if number is not None:
            self._root.mark_committed(number)
        if not self.closed:
            self._root.after_commit(step, metrics, among)

    def own_root(self) -> None:
        """Make the root, and take its lock, if it is not held."""
        made = self._root.take()
        if made is not None:
            self.bound.stores.made = made
