"""A directory of checkpoints: steps are saved while training goes on, kept by rules, and loaded again.

    root/step-00000100/{state.pt, rank-00000.pt, MANIFEST.json}     committed, never changes
    root/.step-00000200.pending-<token>/                            being written
    root/LATEST                                                     a hint for people and scripts
    root/.lock                                                      held by the process that saves here

A sharded step has the files of torch.distributed.checkpoint in place of state.pt: `.metadata`, and `__0_0.distcp`,
`__1_0.distcp` … of each rank.

A step is committed when its directory has a readable manifest, and every file in the manifest with its length; nothing
else is trusted. `root` locks the directory and removes steps; `step_saver` and `step_loader` write and
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
from fastpersist.checkpointer.root import RetentionPolicy, Root, why_no_root
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
from fastpersist.commit.step_listing import commits_of, committed_steps, in_commit_order
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
    """Save, keep and restore the state of a training run, step by step, in one directory.

        ckpt = fp.Checkpointer("runs/a", optimizer=opt, keep=3)
        ...
        ckpt.save(step, {"model": model.state_dict(), "optimizer": opt.state_dict()})
        ...
        ckpt.close()

    The constructor touches nothing; the first save makes the directory and locks it. One process saves to a directory
    at a time; any number of processes may read it. The checkpoint of a step is a directory of its own: it is complete
    and durable as soon as its name appears, and never changes.

    Args:
        root: The directory: a path on a mounted file system, no URL; a leading `~` is expanded.
        optimizer: The optimizer whose parameters and state you save: a torch optimizer, a wrapper with an `.optimizer`
            attribute, or a list of these. Its tensors are written while forward and backward run. Without it, save()
            copies the whole state before it returns.
        constant: What never changes (frozen weights): modules, tensors, and lists and dicts of them. Never copied.
        gate: "optimizer": the optimizer's next step waits by itself until its tensors are written or copied. "manual":
            call wait_captured() before anything changes.
        keep: Keep this many of the steps that were committed last. A step that load() resumed from counts as committed
            at that moment: it stays until this many newer steps are durable.
        keep_every: Keep the steps that are multiples of this number.
        keep_best: (count, metric, "min" or "max"): also keep the `count` steps with the best values of a metric. While
            no step has the metric, every step is kept. Without any of the three rules, every step is kept too.
        max_host_bytes: Bytes of host memory for copied state. None: the size of the state, but at most half of the
            available memory. If the copies do not fit, save() or the optimizer's step waits for the disk.
        busy: What save() does while two earlier saves are unfinished. "wait": it waits for the first of them. "latest":
            it leaves out the one that has not begun. "skip": it leaves out the new one, even if only one is unfinished.
        on_error: "raise": the next save(), wait() or close() raises the error of a failed save. "warn": the error is
            logged and warned of, and training goes on; the save's own result() still raises it.
        paranoid: Read 64 samples again in each save, to find changes that torch does not count (through `.data`).
        engine: "auto", or an engine's name, which then never falls back.
        process_group: Save with all ranks of this group; each makes and uses a Checkpointer of its own, in the same
            order. The coordinator's state (rank 0's) is saved. The tensors of the optimizer and of `constant` must be
            the same on all ranks: the writers share out those of 1 MiB and more, and write them into one ordinary file.
            After the constructor, only load(), delete() and discard_after() use the group. If the root lies on a file
            system of each node, each keeps a part of every step; load() with the group puts the parts together.
        sharded: The state of each rank holds shards (DTensors, as of FSDP2 or tensor parallelism). All ranks write what
            they hold, in the format of torch.distributed.checkpoint. Any number of ranks can load it, sharded in any
            way, and so can torch's own readers.
        writers: The ranks that write: "all", "node" (one rank of each node), a number, or "auto": on one node up to 8
            ranks (or as many as the coordinator's tuning file says), on several nodes one rank of each.
        check_replicas: Compare all bytes of the tensors that the ranks must have in common, instead of samples.
        peer_timeout_s: Seconds of silence after which a rank counts as failed. The death of its process is noticed at
            once.
        lock_timeout_s: Seconds for which the first save waits if a process of another host holds the lock. A host that
            has died keeps its lock until its lease on the file server ends (NFSv4: 90 s). 0: it does not wait.

    Raises:
        ConfigError: An option makes no sense, or the root is a file.
        PeerError: Another rank of the process group is gone.

    Thread safety: any thread may call steps, latest, best, load and stats; only the training thread calls the other
    methods.
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
        if busy not in ("wait", "latest", "skip"):
            raise ConfigError(f"busy is 'wait', 'latest' or 'skip', not {busy!r}")
        if on_error not in ("raise", "warn"):
            raise ConfigError(f"on_error is 'raise' or 'warn', not {on_error!r}")
        require_engine(engine)
        require_bools(paranoid=paranoid, sharded=sharded, check_replicas=check_replicas)
        if not (isinstance(lock_timeout_s, int | float) and lock_timeout_s >= 0):
            raise ConfigError(f"lock_timeout_s is a number of seconds, 0 or more, not {lock_timeout_s!r}")
        if sharded and (check_replicas or writers not in ("auto", "all")):
            raise ConfigError(
                "with sharded=True each rank writes what it holds: writers and check_replicas do not apply"
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
        if process_group is not None:
            met = _meet_ranks(process_group, self._path, why_not, busy, peer_timeout_s)
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
        """Save the state of a step in the background.

        Returns as soon as everything that may change before the optimizer's next step is copied. The step is loadable
        when it is complete and durable; a crash before that leaves the earlier steps as they are.

        Args:
            step: The number of the step, 0 or more: an int, or a numpy integer.
            state: Any object that torch.save takes, usually a dict. It is pickled before this returns.
            rank_state: An object of this process alone (data position, RNG). It gets a file of its own, and load()
                returns it under the key "rank_state". Each rank may have one.
            metrics: Numbers by name, for the manifest and for keep_best. With several ranks, those of the coordinator.
            overwrite: Replace the step if it exists. A damaged step is always replaced. With several ranks, the
                coordinator decides.

        Returns:
            The save. You may ignore it: errors come from the next save(), wait() or close().

        Raises:
            ConfigError: The step exists, or an argument makes no sense; with on_error="raise" also: another process
                saves to this root.
            StorageError: With on_error="raise": the directory cannot be made or written.
            RuntimeError, TypeError, …: The state cannot be pickled; nothing was written.
            FastPersistError: With on_error="raise": an earlier save failed; raised once. With several ranks it comes
                after this save has begun, and the save goes on: other ranks may not know of the failure yet.

        Thread safety: the training thread only.
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
        """Wait until the state of every unfinished save may change: it is written or copied.

        With gate="manual" call this before the optimizer's step.

        Args:
            timeout: Seconds; None waits without limit.

        Raises:
            TimeoutError: The time is over, and the state must not change yet.

        Thread safety: the training thread only.
        """
        self._saves.wait_captured(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is durable, or has failed.

        Args:
            timeout: Seconds; None waits without limit.

        Raises:
            TimeoutError: A save is still under way.
            FastPersistError: With on_error="raise": a save failed; raised once.

        Thread safety: the training thread only.
        """
        self._saves.join(timeout)
        self._saves.deliver()

    def close(self) -> None:
        """Finish every save, unlock the root, and put the earlier signal handlers back. You may call it again.

        If a signal has come and its step is not saved yet (see `save_on_signal`), the step is saved first, and the
        signal's earlier handler runs last.

        Raises:
            FastPersistError: With on_error="raise": a save failed, and nobody has been told; raised once.

        Thread safety: the training thread only.
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
        self._close()  # nothing is saved for a signal that came meanwhile: the state may be that of half a step
        self._saves.log_failed()

    def save_on_signal(
        self,
        make_state: Callable[[], tuple[int, object] | None],
        signals: Iterable[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        """Save a last step when one of these signals comes, before the process ends.

        The signal handler only notes the signal. The training thread saves, at the first of these occasions:

        - at the end of the optimizer's next step, or in poll(): what make_state() returns is saved;
        - in the loop's own save(), which then returns when its step is durable;
        - in close(), like in poll(), after which close() finishes all other saves.

        Then the signal's earlier handler runs; by default it ends the process. It also runs if the save failed: the log
        says first what went wrong. The same signal again changes nothing.

        A step that is committed or being saved is never replaced; the save then waits for the next occasion. This
        happens in a loop that counts after the optimizer's step, if make_state() returns the number of the step before:

            optimizer.step()     # make_state() is called in here, with the state of the step that ends
            step += 1            # so it returns (step + 1, state()), or None to leave it to save()
            checkpoints.save(step, state())

        Args:
            make_state: Returns the step and the state when it is called, or None to wait for the next occasion.
            signals: The signals to handle.

        Raises:
            ConfigError: This is not the main thread, which alone may set signal handlers; there are several ranks;
                make_state cannot be called; or a signal cannot be handled.

        Thread safety: the main thread only.
        """
        if self._ranks is not None:
            raise ConfigError(
                "with several ranks, a signal reaches each in another step: let them agree on one, and save()"
            )
        self._signals.install(make_state, signals)

    def poll(self) -> None:
        """Save now if a signal has come; for training loops whose optimizer this object does not know.

        Raises:
            FastPersistError: The save failed; the signal's earlier handler has run.
            Exception: Whatever make_state() raises.

        Thread safety: the training thread only.
        """
        self._signals.poll()

    def stats(self) -> list[SaveStats]:
        """Return what each save cost, oldest first; at most the last 1000.

        Thread safety: any thread.
        """
        return list(self._saves.stats)

    def explain(self, state: object) -> str:
        """Tell what save() would do with a state, without saving it.

        Returns:
            A table of megabytes by key of the state: stable (written while training goes on), constant, and volatile
            (copied inside save()); then how long save() would take, and why state of the optimizer is volatile.

        Raises:
            ConfigError, RuntimeError, TypeError, …: The state cannot be saved; as in save().

        Thread safety: the training thread only.
        """
        return explain(state, self._owners)

    # --- inside save()

    def _is_saved(self, step: int) -> bool:
        """Tell whether a step is being saved, or is committed and not known to be damaged."""
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
            raise ConfigError(
                f"with rank_state, the state must be a dict without the key {RANK_KEY!r}, under which load() returns it"
            )
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
        stats.stall_s = time.monotonic() - started_s  # includes what parts of the save have noted
        return pending

    def _committed(self, step: int, metrics: dict[str, float], among: Collection[int] | None = None) -> None:
        """Tidy the root now that a step is durable; the next one may already be written. See `Root.after_commit`."""
        self._root.after_commit(step, metrics, among)

    def _own_root(self) -> None:
        made = self._root.take()
        if made is not None:
            self._stores.made = made

    def _refuse_unusable(self) -> None:
        if self._process != os.getpid():
            raise ConfigError(f"this process was forked from the one that saves to {self._path}, and cannot save there")
        if self._closed:
            raise ConfigError(f"the Checkpointer of {self._path} is closed")

    def _save_for_signal(self, step: int, state: object) -> None:
        """Save and commit, even if earlier saves have failed, and whatever `busy` says: this may be the last save."""
        self._refuse_unusable()
        self._save(step, state, None, {}, overwrite=self._root.is_damaged(step), busy="wait").result()

    # ----------------------------------------------------------------------------------------------- resuming

    def steps(self) -> list[int]:
        """Return the committed steps, in ascending order. This reads manifests only.

        Raises:
            StorageError: The root cannot be listed.

        Thread safety: any thread.
        """
        return sorted(committed_steps(self._path))

    def latest(self) -> int | None:
        """Return the newest committed step that this process sees; None if there is none.

        The newest is the one that was committed last: after a run has gone back to step 10, its step 11 is newer than
        the steps 20 and 30 that are still there. Ranks may see different steps, on disks of their own or in caches. So
        do not decide by it whether all ranks call load(): those that do would wait for the others. Call
        load(missing_ok=True) on all ranks, which decides for all.

        Raises:
            StorageError: The root cannot be listed.

        Thread safety: any thread.
        """
        order = in_commit_order(commits_of(self._path))
        return order[-1] if order else None

    def best(self) -> int | None:
        """Return the committed step with the best value of the metric of `keep_best`; None if no step has the metric.

        Raises:
            ConfigError: This Checkpointer was made without keep_best.
            StorageError: The root cannot be listed.

        Thread safety: any thread.
        """
        return best_of(commits_of(self._path), self._retention)

    def _resumed_from(self, step: int) -> None:
        if self._process == os.getpid():  # a forked child, which may load, removes nothing
            self._root.resumed_from(step)

    def discard_after(self, step: int) -> list[int]:
        """Remove all steps with greater numbers, for good: go back to a step and drop what came after it.

        This waits first for the unfinished saves of this object. With several ranks, all of them call it.

        Args:
            step: The last step that stays; it need not exist.

        Returns:
            The removed steps, in ascending order.

        Raises:
            ConfigError: `step` is no step, or another process saves to this root.
            StorageError: A step could not be removed, or somebody is reading it; the others were removed.
            PeerError: With several ranks: the coordinator failed.

        Thread safety: the training thread only.
        """
        after = checked_step(step)
        return sorted(self._remove(lambda found: [other for other in found if other > after]))

    def delete(self, step: int) -> None:
        """Remove one step, for good, even if a rule keeps it or it is damaged.

        This waits first for the unfinished saves of this object. With several ranks, all of them call it.

        Args:
            step: The step to remove.

        Raises:
            CheckpointNotFoundError: There is no such step.
            ConfigError, StorageError, PeerError: As in `discard_after`.

        Thread safety: the training thread only.
        """
        wanted = checked_step(step)

        def choose(found: list[int]) -> list[int]:
            if wanted not in found:
                raise CheckpointNotFoundError(f"there is no step {wanted} in {self._path}")
            return [wanted]

        self._remove(choose)

    def _remove(self, choose: Callable[[list[int]], list[int]]) -> list[int]:
        """Remove the steps that `choose` returns; see `Root.remove_together`."""
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
        """Load the state of a step: the newest that is whole, or the one you name.

        This waits first for the unfinished saves of this object. With several ranks, all of them call it and get the
        same step; each may give a map_location of its own. Sharded steps are recognized. A run that may be the first
        one, or a resumed one, begins with

            found = checkpoints.load(into={"model": model, "optimizer": optimizer}, missing_ok=True)
            if found is not None:
                step = found["step"]

        Args:
            step: The number of a step; "best" for the best step by `keep_best`; None for the newest step, as in
                latest(). If the newest is damaged, this warns and takes the one that was committed before it. A step
                that you name is never replaced by another.
            map_location: Where tensors go that have no target in `into`, as in torch.load.
            into: Keys of the state, and for each the target that is filled in place, without a second copy: a module,
                an optimizer, tensors in dicts and lists, or any object with load_state_dict. Of a sharded step, targets
                may hold DTensors of any sharding, and each rank reads the bytes of its own shards; every rank gets
                whole tensors for entries without a target.
            keys: What to read beside `into`: keys of the state, or "rank_state". Without `into`, only these are read.
                None: with `into`, all entries without tensors; without `into`, the whole state.
            missing_ok: Return None if there is no such step, or no step at all. With several ranks either all of them
                get None, or none does.
            verify: Check every CRC, also of entries that are not loaded; with `into`, before any target changes.
                Without it, a byte that has changed on the disk is loaded as it is, unless it breaks the structure of
                the file; of a sharded step, only pieces that one rank reads as a whole are checked.
            strict: Raise if the newest step is damaged, instead of going back to an older one.
            weights_only: Build nothing but tensors and plain containers. Pass False only for files that you trust.

        Returns:
            The saved state, with a rank_state under "rank_state". With `keys` alone, a dict of these keys. With `into`,
            a dict of the filled objects of `into`, the entries named by `keys`, the rank_state, and every entry of the
            state that holds no tensor anywhere (a step, a scheduler's numbers). All other entries are left out: to get
            `"rng": torch.get_rng_state()`, pass keys=["rng"]. With missing_ok, None if nothing is committed.

        Raises:
            CheckpointNotFoundError: There is no such step, or no step at all, and missing_ok is False.
            CorruptionError, StorageError: The step is damaged or cannot be read: the one you named, the newest with
                `strict`, or all steps. If the message says *partly overwritten*, the targets it names are not usable
                until they are loaded again.
            ConfigError: `into` does not fit the state, or a key of `keys` is not in it, and nothing was changed; or a
                target's load_state_dict refused its entry, and the message says what is partly overwritten.
            UnsupportedError: The step lies in parts on several file systems, and this process is alone; or `verify`,
                and it was saved without checksums; or the named engine cannot be used.
            pickle.UnpicklingError: With weights_only: torch refuses an object that is not known to be safe.
            PeerError: With several ranks: another rank could not load the step.

        Thread safety: any thread; nobody else may use the targets meanwhile.
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


def _meet_ranks(
    process_group: ProcessGroup, root: str, why_not: str, busy: str, timeout_s: float
) -> tuple[Ranks, int | None] | None:
    """Meet the ranks of a process group; all of them call this.

    Args:
        process_group: The group.
        root: The root of this rank.
        why_not: Why that cannot be a root, as `why_no_root` says; "" if it can.
        busy: As in `Checkpointer`.
        timeout_s: Seconds of silence after which a rank counts as failed.

    Returns:
        The ranks, and how many of them write by the coordinator's tuning file; None if this rank is alone.

    Raises:
        ConfigError: The root of some rank cannot be one, or `busy` makes no sense for several ranks.
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
                f"with several ranks, busy must be 'wait': with {busy!r} the ranks would leave out different saves"
            )
    except BaseException:
        ranks.close()
        raise
    return ranks, tuned_count
