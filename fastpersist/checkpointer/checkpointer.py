"""A directory of checkpoints: one step after the other, saved while training goes on, kept as long as asked, resumed.

    root/step-00000100/{state.pt, rank-00000.pt, MANIFEST.json}     committed, never changes
    root/.step-00000200.pending-<token>/                            being written
    root/LATEST                                                     a hint for people and scripts
    root/.lock                                                      held by the process that saves here

With sharded state, DCP's files stand in place of state.pt: `.metadata`, and `__0_0.distcp`, `__1_0.distcp` … of each
rank.

A step is committed when its directory has a manifest that can be read and every file that the manifest names, at its
length; nothing else is trusted. `root` locks the directory and removes steps; `step_saver` and `step_loader` write and
read the files of a step.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from fastpersist.arguments import local_path, require_bools
from fastpersist.checkpointer.explain import explain
from fastpersist.checkpointer.root import RetentionPolicy, Root, commits_of, why_no_root
from fastpersist.checkpointer.signal_save import SignalSave
from fastpersist.checkpointer.step_loader import RANK_KEY, LoadOptions, best_of, find_best, load_newest, load_step
from fastpersist.checkpointer.step_saver import (
    SaveQueue,
    ShardedSaver,
    StepSave,
    StepSaver,
    checked_metrics,
    step_of,
)
from fastpersist.commit.directory_commit import committed_path
from fastpersist.commit.step_listing import committed_steps, in_commit_order
from fastpersist.distributed.common_steps import refuse_together
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.group_save import Writers, tuned_writer_count
from fastpersist.distributed.node_local.detection import Stores
from fastpersist.distributed.partition import choose_writers
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.errors import CheckpointNotFoundError, ConfigError, StorageError
from fastpersist.formats.manifest import checked_step, step_name
from fastpersist.loading.unpickle import MapLocation
from fastpersist.saving.capture import watch_steps
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.saving.refused_globals import warn_caller
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.torch_boundary import untraced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer"]

PathLike = str | os.PathLike[str]


class Checkpointer:
    """Saves, keeps and restores the state of a training run, below one directory.

        ckpt = fp.Checkpointer("runs/a", optimizer=opt, keep=3)
        ...
        ckpt.save(step, {"model": model.state_dict(), "optimizer": opt.state_dict()})
        ...
        ckpt.close()

    Nothing is touched by making one; the first save makes the directory and takes its lock. One process saves to a
    root at a time; any number may read.

    Args:
        root: The directory: a path of a mounted file system, no URL; `~` in front is expanded.
        optimizer: Whose tensors are in the state: an optimizer, something that wraps one as `.optimizer`, or a list.
            Its tensors are written while forward and backward run; without it everything is copied inside save().
        constant: What never changes (frozen weights): modules, tensors, lists and dicts of them.
        gate: "optimizer": its next step waits by itself for what is neither written nor copied. "manual": you call
            wait_captured() before anything changes.
        keep: Keep the so many steps that were committed last. What load() has resumed from counts as one of them from
            then on, so it stays until so many newer ones are durable.
        keep_every: Keep the steps that are multiples of it.
        keep_best: (count, metric, "min" or "max"): keep these too. While no step has the metric, every step is kept.
            Without any of the three, too.
        max_host_bytes: Host memory for copied state. None: the bytes of the state, but at most half of what is
            available. What does not fit is waited for: slower, never wrong.
        busy: What save() does while two saves are unfinished: "wait" for the first; "latest": leave out the one that
            has not begun; "skip": leave out the new one, whenever any is unfinished.
        on_error: "raise": a failed save is raised by the next save(), wait() or close(). "warn": it is logged and
            warned of, and training goes on; the save's own result() still raises it.
        paranoid: Re-read 64 samples per save, to find changes in host memory that torch does not count (`.data`).
        engine: "auto", or an engine's name, which then never falls back.
        process_group: Save with all its ranks, each with a Checkpointer of its own, made and used in the same order.
            The state that is saved is rank 0's; what the optimizer owns, or constant= names, is the same on all ranks,
            and its storages of 1 MiB and more are written by all writers, each a part, into one ordinary file. After
            this constructor, torch's group is used by load(), delete() and discard_after() only. Ranks that see no
            common directory below their roots each get a part of every step there; load() with the group puts the parts
            together.
        sharded: Each rank's state holds its shards (DTensors, as of FSDP2 or tensor parallelism) and what it has of the
            rest. All ranks write what they hold, and it is loaded on any number of ranks, sharded in any way. A step
            holds a checkpoint of torch.distributed.checkpoint, which its readers read, too.
        writers: The ranks that write: "all", "node" (one of each node), a number, or "auto": up to 8 of one node
            (or as many as rank 0's tuning file says), or one of each of several.
        check_replicas: Compare all bytes of what the ranks should hold alike, not samples of it.
        peer_timeout_s: A rank that was not heard of for so long has failed. One whose process has died is noticed at
            once.
        lock_timeout_s: Seconds for which the first save waits if a process of another host has the root's lock: a host
            that has died keeps that until its lease on the file server ends (NFSv4: 90 s). 0: it does not wait.

    Raises:
        ConfigError: Options that make no sense, or the root is a file.

    Thread safety: save, wait_captured, delete, discard_after and close from the training thread; steps, latest, best,
    load and stats from any.
    """

    def __init__(
        self,
        root: PathLike,
        *,
        optimizer: object = None,
        constant: object = (),
        gate: Literal["optimizer", "manual"] = "optimizer",
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[int, str, str] | None = None,
        max_host_bytes: int | None = None,
        busy: Literal["wait", "latest", "skip"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        paranoid: bool = False,
        engine: str = "auto",
        process_group: ProcessGroup | None = None,
        sharded: bool = False,
        writers: Writers = "auto",
        check_replicas: bool = False,
        peer_timeout_s: float = 600.0,
        lock_timeout_s: float = 120.0,
    ) -> None:
        _check_options(
            busy=busy,
            on_error=on_error,
            engine=engine,
            paranoid=paranoid,
            sharded=sharded,
            writers=writers,
            check_replicas=check_replicas,
            lock_timeout_s=lock_timeout_s,
        )
        self._path = os.path.abspath(local_path(root, "root"))
        why_not = why_no_root(self._path)
        if why_not and process_group is None:
            raise ConfigError(why_not)
        self._owners = Owners(optimizer, constant, gate)
        if self._owners.optimizers():
            watch_steps()
        self._retention = RetentionPolicy(keep, keep_every, keep_best)
        self._root = Root(self._path, self._retention, lock_timeout_s)
        self._arena = Arena(max_host_bytes)
        self._busy = busy
        self._on_error = on_error
        self._engine = engine
        saver_class = ShardedSaver if sharded else StepSaver
        self._saver = saver_class(self._path, self._owners, self._arena, engine=engine, paranoid=paranoid)
        self._saves = SaveQueue(self._path, on_error)
        self._signals = SignalSave(self._owners, self._save_for_signal, self._is_saved)
        self._process = os.getpid()
        self._closed = False
        self._metric_looked_for = False
        self._check_replicas = check_replicas
        self._ranks: Ranks | None = None
        self._stores = Stores(self._own_root)
        self._writers = choose_writers(writers, [0])
        self._process_group: ProcessGroup | None = None
        met = (
            _meet_ranks(process_group, self._path, why_not, busy, peer_timeout_s) if process_group is not None else None
        )
        if met is not None:
            self._ranks, tuned_count = met
            self._writers = choose_writers(writers, self._ranks.nodes, tuned_count)
            self._process_group = process_group

    # ------------------------------------------------------------------------------------------------ saving

    @untraced
    def save(
        self,
        step: int,
        state: object,
        *,
        rank_state: object = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
    ) -> PendingSave:
        """Save the state of a step; returns when everything that may change before the next step is copied.

        Args:
            step: 0 or more; numpy's integers, too.
            state: Whatever torch.save takes, usually a dict; pickled before this returns.
            rank_state: This process's own object (data position, RNG), kept beside it; load() returns it under
                "rank_state". With several ranks, each may have one.
            metrics: Numbers for the manifest and for keep_best.
            overwrite: Replace the step if it is there already. One that is damaged is replaced in any case. With
                several ranks, rank 0's word counts here and for metrics.

        Returns:
            The save; nobody needs to look at it.

        Raises:
            ConfigError: The step exists, or an argument makes no sense.
            ConfigError: Somebody else saves to this root (with on_error="raise").
            StorageError: The directory cannot be made or written (with on_error="raise").
            FastPersistError: An earlier save failed (once; with on_error="raise"). With several ranks it is raised when
                this save has begun, and does not end it: the other ranks may not know of the failure yet.
        """
        self._refuse_unusable()
        if self._ranks is None:
            is_last = self._signals.is_noted()  # then it is not left out, whatever became of earlier ones
            if not is_last:
                self._saves.deliver()
            step = step_of(step, state)
            require_bools(overwrite=overwrite)
            # A loop that went back to an older step comes by the damaged one again.
            overwrite = overwrite or self._signals.saved_step == step or self._root.is_damaged(step)
            busy = "wait" if is_last else self._busy
            pending = self._save(step, state, rank_state, checked_metrics(metrics), overwrite, busy)
            self._signals.after_save(pending)
            return pending
        session = self._ranks.begin(f"step {step} of {self._path}")  # first: all ranks count their saves
        earlier = self._saves.take_failed()
        try:
            step = step_of(step, state)
            require_bools(overwrite=overwrite)
            overwrite = self._ranks.rank == 0 and (overwrite or self._root.is_damaged(step))
            together = SaveGroup(session, step_name(step), self._writers, self._check_replicas, stores=self._stores)
            pending = self._save(step, state, rank_state, checked_metrics(metrics), overwrite, self._busy, together)
        except BaseException as error:
            self._saves.give_back(earlier)
            session.fail(error)
            raise
        self._saves.deliver(earlier)
        return pending

    def wait_captured(self, timeout: float | None = None) -> None:
        """Return when the state of every pending save may be changed.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: It may not be changed yet.
        """
        self._saves.wait_captured(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Return when every save is over.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: One is still under way.
            FastPersistError: One failed (once; with on_error="raise").
        """
        self._saves.join(timeout)
        self._saves.deliver()

    def close(self) -> None:
        """Finish every save, give up the root, take the signal handlers back. May be called again.

        A signal that was noted and not heeded yet (see `save_on_signal`) is heeded first, and goes on last.

        Raises:
            FastPersistError: A save failed that nobody was told of (once; with on_error="raise").
        """
        try:
            if not self._closed and self._process == os.getpid():
                self._signals.poll()
        finally:
            self._close()
        self._saves.deliver()

    def _close(self) -> None:
        if self._closed or self._process != os.getpid():
            return
        try:
            self._saves.join(None)
            self._closed = True
            self._arena.let_go()
            if self._ranks is not None:
                self._ranks.close()
            self._root.release()
        finally:
            self._signals.uninstall()  # which may end the process

    def __repr__(self) -> str:
        said = self._retention.said()
        if self._ranks is not None:
            said.append(f"rank {self._ranks.rank} of {self._ranks.count}")
        unfinished = len(self._saves.unfinished())
        said += [f"{unfinished} unfinished"] * (unfinished > 0) + ["closed"] * self._closed
        return f"<Checkpointer of {self._path}: {', '.join(said)}>"

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._close()  # a signal that came meanwhile goes on, but the state may be half a step: it is not saved
        self._saves.log_failed()

    def save_on_signal(
        self,
        make_state: Callable[[], tuple[int, object] | None],
        signals: Iterable[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        """When one of these signals comes: save a last step where the state is whole; then go on as before.

        The handler itself only takes note. A step is committed on the training thread, by the first of these that can:

        - the optimizer's next step, at its end, and poll(): what make_state() returns is saved;
        - the loop's own save(), which then returns when its step is durable;
        - close(), as poll() does it, and behind it all that was being saved.

        Then what handled the signal before does so; by default the process ends. It also does if nothing could be
        saved: the log says first what failed. The same signal again changes nothing.

        A step that is committed, or being saved, is never replaced: then the next of these occasions is waited for.
        That is so for a loop that counts behind the optimizer's step, in which make_state() finds the number of the
        step before:

            optimizer.step()     # make_state() is called in here, with the state of the step that ends
            step += 1            # so it returns (step + 1, state()), or None to leave it to save()
            checkpoints.save(step, state())

        Args:
            make_state: Called when the time has come; returns the step and the state, or None to wait.
            signals: Which.

        Raises:
            ConfigError: Not called on the main thread, which alone may set signal handlers; there are several ranks;
                make_state cannot be called; or a signal cannot be handled.
        """
        if self._ranks is not None:
            raise ConfigError(
                "with several ranks, a signal reaches each in another step: let them agree on one, and save()"
            )
        self._signals.install(make_state, signals)

    def poll(self) -> None:
        """Save now if a signal asked for it; for loops without an optimizer that was given to us."""
        self._signals.poll()

    def stats(self) -> list[SaveStats]:
        """Return what each save cost, oldest first, the last 1000 at most."""
        return list(self._saves.stats)

    def explain(self, state: object) -> str:
        """Return a table of what would become of a state: bytes that are stable, constant, volatile, key by key."""
        return explain(state, self._owners)

    # --- inside save()

    def _is_saved(self, step: int) -> bool:
        """Tell whether a step is there and can be loaded as far as we know, or is being saved."""
        if any(pending.stats.step == step for pending in self._saves.unfinished()):
            return True
        return committed_path(self._path, step_name(step)) is not None and not self._root.is_damaged(step)

    def _save(
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
        stats = SaveStats(path=os.path.join(self._path, step_name(step)), step=step)
        if rank_state is not None and not (isinstance(state, Mapping) and RANK_KEY not in state):
            raise ConfigError(f"with rank_state, the state is a dict without {RANK_KEY!r}: there load() returns it")
        if not self._saves.make_room(busy):
            pending = PendingSave(stats.path, stats)
            pending.skip("another one was still being written")
            self._saves.stats.append(stats)
            return pending
        has_root = False
        try:
            if together is None or not together.session.rank:
                self._own_root()
            has_root = True
            after = partial(self._committed, step, metrics=metrics)
            number = self._root.next_commit_number
            saved = StepSave(step, state, rank_state, metrics, overwrite, stats, after, number)
            pending = self._saver.begin(saved, together)
            self._saves.add(pending)
            self._saver.tell_once(state)
            if (together is None or not together.session.rank) and not self._metric_looked_for:
                self._metric_looked_for = True
                if why := self._retention.why_all_stay(metrics):
                    warn_caller(why)
        except (StorageError, ConfigError) as error:
            if self._on_error == "raise" or (has_root and isinstance(error, ConfigError)):
                raise
            if together is not None:
                together.session.fail(error)
            pending = PendingSave(stats.path, stats)
            pending.fail(error)
            self._saves.note_finished(pending)
            self._saves.deliver()
        stats.stall_s = time.monotonic() - started_s  # what its parts have noted included
        return pending

    def _committed(self, step: int, metrics: dict[str, float], among: Collection[int] | None = None) -> None:
        """The step is durable; beside the writing of the next one. `among`: see `RootUpkeep.after_commit`."""
        self._root.after_commit(step, metrics, among)

    def _own_root(self) -> None:
        made = self._root.take()
        if made is not None:
            self._stores.made = made

    def _refuse_unusable(self) -> None:
        if self._process != os.getpid():
            raise ConfigError(f"{self._path} is saved to by the process that this one was forked from")
        if self._closed:
            raise ConfigError(f"the Checkpointer of {self._path} is closed")

    def _save_for_signal(self, step: int, state: object) -> None:
        """Save and commit, whatever became of earlier saves and whatever `busy` says: it may be the last one."""
        self._refuse_unusable()
        self._save(step, state, None, {}, overwrite=self._root.is_damaged(step), busy="wait").result()

    # ----------------------------------------------------------------------------------------------- resuming

    def steps(self) -> list[int]:
        """Return the committed steps, ascending. Reads manifests and nothing else."""
        return sorted(committed_steps(self._path))

    def latest(self) -> int | None:
        """Return the newest committed step that this process sees, None if there is none.

        The newest is the one that was committed last, as LATEST says: after going back to step 10, step 11 is newer
        than the 20 and 30 that are still there. Ranks may see different steps, on a disk of their own or in a cache: do
        not decide by it whether all of them load(), which would wait for those that do not; load(missing_ok=True)
        decides for all.
        """
        order = in_commit_order(commits_of(self._path))
        return order[-1] if order else None

    def best(self) -> int | None:
        """Return the committed step that `keep_best` ranks first; None if none has its metric.

        Raises:
            ConfigError: This Checkpointer was made without keep_best.
        """
        return best_of(commits_of(self._path), self._retention)

    def _resumed_from(self, step: int) -> None:
        if self._process == os.getpid():  # a forked child, which may load, removes nothing
            self._root.resumed_from(step)

    def discard_after(self, step: int) -> list[int]:
        """Remove all steps with a greater number, for good: to go back to a step and forget what came of it.

        Saves of this object that are under way are waited for first. With several ranks all of them call this.

        Args:
            step: The last one that stays; it need not exist.

        Returns:
            The steps that were removed, ascending.

        Raises:
            ConfigError: It is no step, or another process saves to this root.
            StorageError: One could not be removed, or somebody reads it right now; the others are.
            PeerError: With several ranks: rank 0 failed.
        """
        after = checked_step(step)
        return sorted(self._remove(lambda found: [other for other in found if other > after]))

    def delete(self, step: int) -> None:
        """Remove one step, for good, whatever the rules keep. It may be damaged.

        Saves of this object that are under way are waited for first. With several ranks all of them call this.

        Args:
            step: Which.

        Raises:
            CheckpointNotFoundError: There is no such step.
            ConfigError, StorageError, PeerError: As `discard_after`.
        """
        wanted = checked_step(step)

        def choose(found: list[int]) -> list[int]:
            if wanted not in found:
                raise CheckpointNotFoundError(f"there is no step {wanted} in {self._path}")
            return [wanted]

        self._remove(choose)

    def _remove(self, choose: Callable[[list[int]], list[int]]) -> list[int]:
        """Remove what is chosen of the steps there are, the newest first: what is left has then always been a state."""
        self._refuse_unusable()
        self._saves.join(None)

        rank = 0 if self._ranks is None else self._ranks.rank
        return self._root.remove_together(choose, self._own_root, self._process_group, rank)

    @untraced
    def load(
        self,
        step: int | Literal["best"] | None = None,
        *,
        map_location: MapLocation = None,
        into: Mapping[str, object] | None = None,
        keys: Collection[str] | None = None,
        missing_ok: bool = False,
        verify: bool = False,
        strict: bool = False,
        weights_only: bool = True,
    ) -> Any:
        """Load the state of a step, or of the newest one that is whole.

        Saves of this object that are under way are waited for first. With several ranks all of them call this, and load
        the same step; each may give another map_location. Whether a step is sharded, it says itself. A run that may be
        the first one begins with

            found = checkpoints.load(into={"model": model, "optimizer": optimizer}, missing_ok=True)
            if found is not None:
                step = found["step"]

        Args:
            step: Which; "best" for that which `keep_best` ranks first; None for the newest committed one, as `latest`
                says. If that one turns out to be damaged, a warning says so and the one that was committed before it is
                taken; an explicit step is never replaced by another.
            map_location: As in torch.load.
            into: From keys of the state to what is filled in place, without a second copy: modules, optimizers,
                tensors in dicts and lists, anything with load_state_dict. Of a sharded step, tensors may be DTensors
                with any sharding, and each rank reads what its shards consist of; tensors without a target are whole
                on every rank.
            keys: What else is read: keys of the state, or "rank_state"; without `into`, nothing but these. None: with
                `into`, no tensors of other keys; without it, the whole state.
            missing_ok: Return None where there is no such step, or no step at all. With several ranks all of them get
                None, or none does; what latest() says, one of them may see alone.
            verify: Check every CRC, also of what is not asked for; with `into`, before anything is changed. Without it,
                bytes that have changed on the disk are loaded as they are, unless structures do not fit any longer; of
                a sharded step CRCs are then checked only of pieces of tensors that one rank reads as a whole: few, if
                other ranks saved it.
            strict: Raise when the newest is damaged, instead of going back.
            weights_only: Only build tensors and plain containers. Set it to False only for files that you trust.

        Returns:
            What was saved, and a rank_state under "rank_state". With `keys` alone, a dict of these keys. With `into`, a
            dict of the very objects of `into`, which are filled; of what `keys` names; of the rank_state; and of every
            entry of the state that holds no tensor anywhere (a step, a scheduler's numbers). Other entries are left out
            as a whole: for `"rng": torch.get_rng_state()` pass keys=["rng"]. With missing_ok, None
            where nothing is committed.

        Raises:
            CheckpointNotFoundError: There is no such step, or no step at all, without missing_ok.
            CorruptionError, StorageError: It is damaged (explicit step, strict, or no step is whole).
            ConfigError: `into` does not fit the state, or one of `keys` is not in it; nothing was changed.
            PeerError: With several ranks: another one could not load it.
            UnsupportedError: It lies in parts, in several file systems, and this process is alone.
        """
        if self._process == os.getpid():
            self._saves.join(None)
        if isinstance(keys, str):
            raise ConfigError(f"keys is a list of the state's keys, not a text: keys=[{keys!r}]")
        options = LoadOptions(map_location, into, keys, verify, weights_only, self._engine, self._process_group)
        resumed = self._resumed_from
        if step is None:
            unusable = self._root.unloadable.add
            return load_newest(
                self._path, options, strict=strict, missing_ok=missing_ok, on_unusable=unusable, on_loaded=resumed
            )
        if step == "best":
            step = find_best(self._path, options, self._retention, missing_ok=missing_ok)
            if step is None:
                return None
        number = checked_step(step)
        found = load_step(self._path, number, options, missing_ok=missing_ok)
        if found is not None:
            resumed(number)
        return found


def _check_options(
    *,
    busy: str,
    on_error: str,
    engine: str,
    paranoid: bool,
    sharded: bool,
    writers: Writers,
    check_replicas: bool,
    lock_timeout_s: float,
) -> None:
    """Check the options of a Checkpointer that nobody else checks; see there.

    Raises:
        ConfigError: One makes no sense.
    """
    if busy not in ("wait", "latest", "skip"):
        raise ConfigError(f"busy is 'wait', 'latest' or 'skip', not {busy!r}")
    if on_error not in ("raise", "warn"):
        raise ConfigError(f"on_error is 'raise' or 'warn', not {on_error!r}")
    require_engine(engine)
    require_bools(paranoid=paranoid, sharded=sharded, check_replicas=check_replicas)
    if not (isinstance(lock_timeout_s, int | float) and lock_timeout_s >= 0):
        raise ConfigError(f"lock_timeout_s is a number of seconds, 0 or more, not {lock_timeout_s!r}")
    if sharded and (check_replicas or writers not in ("auto", "all")):
        raise ConfigError("with sharded=True each rank writes what it holds: there is no writers or check_replicas")


def _meet_ranks(
    process_group: ProcessGroup, root: str, why_not: str, busy: str, timeout_s: float
) -> tuple[Ranks, int | None] | None:
    """Meet the ranks of a process group; all of them call this.

    Args:
        process_group: The group.
        root: Of this rank's Checkpointer.
        why_not: Why no checkpoints can be there, as `why_no_root` says.
        busy: As in `Checkpointer`.
        timeout_s: A rank that was not heard of for so long has failed.

    Returns:
        The ranks, and how many of them write by rank 0's tuning file; None if this one is alone.

    Raises:
        ConfigError: No checkpoints can be below the root of some rank, or `busy` makes no sense for several.
        PeerError: A rank is gone.
    """
    ranks = Ranks.meet(process_group, timeout_s=timeout_s)
    try:
        refuse_together(process_group, root, why_not)
        if ranks.count == 1:
            return None
        tuned_count = tuned_writer_count(process_group, root)
        if busy != "wait":
            raise ConfigError(
                f"with several ranks, busy is 'wait': ranks would not leave out the same saves, as {busy!r} does"
            )
    except BaseException:
        ranks.close()
        raise
    return ranks, tuned_count
