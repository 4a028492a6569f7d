"""A directory of checkpoints: steps are saved while training goes on, kept by rules, and loaded again.

    root/step-00000100/{state.pt, rank-00000.pt, MANIFEST.json}     committed, never changes
    root/.step-00000200.pending-<token>/                            being written
    root/LATEST                                                     a hint for people and scripts
    root/.lock                                                      held by the process that saves here
    root/events.jsonl                                               what happened; see docs/reference/events.md

A sharded step has the files of torch.distributed.checkpoint in place of state.pt: `.metadata`, and `__0_0.distcp`,
`__1_0.distcp` … of each rank.

A step is committed when its directory has a readable manifest, and every file in the manifest with its length; nothing
else is trusted. `root` locks the directory and removes steps; `step_saver` and `step_loader` write and
read the files of a step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fastpersist.arguments import local_path, require_bools
from fastpersist.checkpointer.explain import explain
from fastpersist.checkpointer.meeting import BoundRanks
from fastpersist.checkpointer.overview import checkpointer_html
from fastpersist.checkpointer.root import RetentionPolicy, Root, why_no_root
from fastpersist.checkpointer.saves import StepSaves
from fastpersist.checkpointer.signal_save import MakeState, SignalSave
from fastpersist.checkpointer.step_loader import (
    LoadOptions,
    OnResize,
    best_of,
    find_best,
    load_newest,
    load_step,
    look_together,
)
from fastpersist.checkpointer.step_saver import (
    SaveQueue,
    ShardedSaver,
    StepSaver,
)
from fastpersist.commit.filesystem import absolute_path
from fastpersist.commit.step_listing import commits_of, committed_steps, in_commit_order, read_commits
from fastpersist.distributed.common_steps import refuse_together, require_same
from fastpersist.distributed.group_save import Writers
from fastpersist.distributed.node_local.detection import NodeLocal
from fastpersist.distributed.partition import require_writers
from fastpersist.distributed.peers import rank_in
from fastpersist.distributed.stop_agreement import StopAgreement
from fastpersist.errors import CheckpointNotFoundError, ConfigError, FastPersistError, SkippedError, UnsupportedError
from fastpersist.formats.manifest import checked_step
from fastpersist.loading.renaming import Rename
from fastpersist.loading.selection import require_keys
from fastpersist.loading.unpickle import MapLocation
from fastpersist.saving.capture import watch_steps
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.torch_boundary import untraced
from fastpersist.uncopied import Uncopied

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["Checkpointer"]

_Given = TypeVar("_Given")

PathLike = str | os.PathLike[str]


class Checkpointer(Uncopied):
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
            no step has the metric, every step is kept. Without any of the three rules, every step is kept too. With
            any of them, the newest step always stays.
        max_host_bytes: Bytes of host memory for copied state in this process. None: the size of the state, but at most
            half of the available memory, shared out among the ranks of the machine. If the copies do not fit, save() or
            the optimizer's step waits for the disk.
        busy: What save() does while two earlier saves are unfinished. "wait": it waits for the first of them. "latest":
            it leaves out the one that has not begun. "skip": it leaves out the new one, even if only one is unfinished.
        on_error: "raise": the next save(), wait() or close() raises the error of a failed save. "warn": the error is
            logged and warned of, and training goes on; the save's own result() still raises it.
        paranoid: Read 64 samples of tensors in host memory again in each save, to find changes that torch does not
            count (through `.data`).
        engine: "auto", or an engine's name, which then never falls back.
        process_group: Save with all ranks of this group; each makes and uses a Checkpointer of its own, in the same
            order. The coordinator's state (rank 0's) is saved. The tensors of the optimizer and of `constant` must be
            the same on all ranks: the writers share out those of 1 MiB and more, and write them into one ordinary file.
            After the constructor, only load(), delete(), discard_after() and rebind() use the group. Without a group,
            or in a group of one rank, node_local, writers, check_replicas and peer_timeout_s have no effect.
        sharded: The state of each rank holds shards (DTensors, as of FSDP2 or tensor parallelism). All ranks write what
            they hold, in the format of torch.distributed.checkpoint. Any number of ranks can load it, sharded in any
            way, and so can torch's own readers.
        node_local: What the ranks do if they see several file systems at the root. None: the first save fails, and
            names the hosts and what each sees, because a file system may not be mounted there. "parts": each file
            system keeps a part of every step; load() with the group puts the parts together. "copies": each keeps whole
            files, which its own ranks write together; each node's copy is a checkpoint by itself. All ranks pass the
            same value.
        writers: The ranks that write: "all", "node" (one rank of each node), a number, or "auto": on one node up to 8
            ranks (or as many as the coordinator's tuning file says), on several nodes one rank of each.
        check_replicas: Compare all bytes of the tensors that the ranks must have in common, instead of samples.
        peer_timeout_s: Seconds of silence after which a rank counts as failed, for example because it is stopped. The
            death of its process is noticed at once. For a rank that is late but alive, the others wait, and the log
            names it.
        lock_timeout_s: Seconds for which the first save waits if a process of another host holds the lock. A host that
            has died keeps its lock until its lease on the file server ends (NFSv4: 90 s). 0: it does not wait.

    Raises:
        ConfigError: An option makes no sense, or the root is a file.
        PeerError: Another rank of the process group is gone.
        CoordinationError: The ranks cannot reach each other, or rank 0 cannot listen.

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
        node_local: NodeLocal = None,
        writers: Writers = "auto",
        check_replicas: bool = False,
        peer_timeout_s: float = 600.0,
        lock_timeout_s: float = 120.0,
    ) -> None:
        if busy not in ("wait", "latest", "skip"):
            raise ConfigError(f"busy must be 'wait', 'latest' or 'skip', not {busy!r}")
        if on_error not in ("raise", "warn"):
            raise ConfigError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
        require_engine(engine)
        require_bools(paranoid=paranoid, sharded=sharded, check_replicas=check_replicas)
        if not (isinstance(lock_timeout_s, int | float) and lock_timeout_s >= 0):
            raise ConfigError(f"lock_timeout_s is a number of seconds, 0 or more, not {lock_timeout_s!r}")
        if not (isinstance(peer_timeout_s, int | float) and peer_timeout_s > 0):
            raise ConfigError(f"peer_timeout_s is a number of seconds above 0, not {peer_timeout_s!r}")
        if process_group is None:  # with several ranks all are told, by a save
            require_writers(writers)
        if node_local not in (None, "parts", "copies"):
            raise ConfigError(f"node_local must be None, 'parts' or 'copies', not {node_local!r}")
        if node_local == "copies" and sharded:
            raise ConfigError(
                'node_local="copies" is for state that all ranks hold: with sharded=True no node has all of it; choose '
                '"parts"'
            )
        if sharded and (check_replicas or writers not in ("auto", "all")):
            raise ConfigError(
                "with sharded=True each rank writes what it holds: writers and check_replicas do not apply"
            )
        self._path = absolute_path(local_path(root, "root"))
        why_not = why_no_root(self._path)
        if why_not and process_group is None:
            raise ConfigError(why_not)
        self._owners = Owners(optimizer, constant, gate)
        if self._owners.optimizers():
            watch_steps()
        self._retention = RetentionPolicy(keep, keep_every, keep_best)
        self._root = Root(self._path, self._retention, lock_timeout_s)
        self._arena = Arena(max_host_bytes)
        self._engine = engine
        saver_class = ShardedSaver if sharded else StepSaver
        self._saver = saver_class(self._path, self._owners, self._arena, engine=engine, paranoid=paranoid)
        self._queue = SaveQueue(self._path, on_error)
        self._saves = StepSaves(self._root, self._retention, self._saver, self._queue, busy=busy, on_error=on_error)
        self._signals = SignalSave(self._owners, self._save_for_signal, self._saves.is_saved)
        self._process = os.getpid()
        self._closed = False
        self._together: dict[str, Any] = {
            "node_local": node_local,
            "busy": busy,
            "writers": writers,
            "check_replicas": check_replicas,
            "timeout_s": peer_timeout_s,
        }
        self._bind(process_group)

    def _bind(self, process_group: ProcessGroup | None) -> None:
        """Save with the ranks of a group from now on; all of them call this. After an error nothing has changed."""
        self._bound = BoundRanks(process_group, self._path, self._saves.own_root, **self._together)
        self._saves.bind(self._bound)
        if self._signals.is_installed:
            self._agree_when_to_stop()

    def _agree_when_to_stop(self) -> None:
        session = self._bound.begin(f"when to stop saving to {self._path}")
        self._signals.agree_by(None if session is None else StopAgreement(session))

    def rebind(self, process_group: ProcessGroup | None) -> None:
        """Go on with another process group, in the same processes: when ranks were lost, or come back.

        Saves of the old group that are under way are given up, as in close(abort=True), and this waits for their
        threads; call wait() before this to let them finish. The ranks of the old group are not needed any more, and
        that group may be destroyed already. Options, arena, optimizers and handlers of signals stay. The next save()
        and load() are those of the new group: any number of ranks, also in another order. A failure that was not yet
        raised is logged, and not raised any more.

        All ranks of the new group call this at the same time; in a process that is new, the constructor takes its
        place.

        Args:
            process_group: The group of all ranks that save from now on; None if this process is alone.

        Raises:
            ConfigError: This object is closed; torch does not know the group; or the root of some rank, or `busy`,
                cannot be used with the group.
            PeerError: Another rank of the new group is gone, or refuses. Call rebind() again with a group that works;
                until then this object saves nothing with other ranks.
            CoordinationError: The ranks cannot reach each other.

        Thread safety: the training thread only.
        """
        self._refuse_unusable()
        if process_group is not None:
            rank_in(process_group)  # before anything is given up
        if self._bound.ranks is not None:
            self._give_up("the Checkpointer was bound to another process group")
        self._queue.join(None)
        self._queue.log_failed("a save before rebind(), whose error was not raised")
        self._root.hand_over()  # before the ranks meet: another one may be the first of them
        self._bind(process_group)

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
            metrics: Numbers by name, for the manifest and for keep_best. With several ranks, rank 0's are taken.
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
        is_last = self._signals.is_noted()  # then it is not left out, whatever became of earlier ones
        replaces = self._signals.saved_step
        pending = self._saves.save(
            step, state, rank_state, metrics, overwrite=overwrite, replaces=replaces, is_last=is_last
        )
        if is_last:
            self._signals.after_save(pending)
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
        self._queue.wait_captured(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is durable, or has failed.

        Args:
            timeout: Seconds; None waits without limit.

        Raises:
            TimeoutError: A save is still under way.
            FastPersistError: With on_error="raise": a save failed; raised once. Or this is a forked child: the saves
                are its parent's.

        Thread safety: the training thread only.
        """
        if self._process != os.getpid():
            raise FastPersistError(f"the saves to {self._path} belong to the process that this one was forked from")
        self._queue.join(timeout)
        self._queue.deliver()

    def close(self, *, abort: bool = False) -> None:
        """Finish every save, unlock the root, and put the earlier signal handlers back. You may call it again.

        If a signal has come and its step is not saved yet (see `save_on_signal`), the step is saved first, and the
        signal's earlier handler runs last.

        Args:
            abort: Give up the saves that are not visible yet, and wait neither for the disk nor for other ranks: this
                returns within seconds, whatever they do. On other ranks these saves fail with PeerError. Their state
                may change at once. No part of a step becomes visible; a step that is being renamed at this moment may.
                The thread that writes ends when the kernel has finished the writes that it has begun, and frees their
                buffers then: at most `FASTPERSIST_QUEUE_DEPTH` chunks, and a sync if one has begun. It also removes
                the hidden files, or the next save does. A normal exit of Python waits for this thread; `os._exit` does
                not.

        Raises:
            FastPersistError: With on_error="raise": a save failed, and its error was not raised yet; raised once. With
                `abort` the log says it instead.

        Thread safety: the training thread only.
        """
        if abort:
            self._abort()
            return
        try:
            if not self._closed and self._process == os.getpid():
                self._signals.poll()
        finally:
            self._close()
        self._queue.deliver()

    def _close(self) -> None:
        if self._closed or self._process != os.getpid():
            return
        try:
            self._queue.join(None)
            self._closed = self._saves.closed = True
            self._arena.let_go()
            self._bound.close()
            self._root.release()
        finally:
            self._signals.uninstall()  # which may end the process

    def _abort(self) -> None:
        if self._closed or self._process != os.getpid():
            return
        self._closed = self._saves.closed = True  # from now on, no step is removed in favour of another one
        try:
            self._give_up("the Checkpointer was closed with abort=True")
            self._arena.let_go()
            self._root.release()
            self._queue.log_failed("an earlier save, whose error was not raised")
        finally:
            self._signals.uninstall()  # which may end the process

    def _give_up(self, why: str) -> None:
        """Give up the saves that are not visible yet, and the connections to the other ranks; wait for neither."""
        error = SkippedError(f"the saves to {self._path} that were under way were given up: {why}")
        self._queue.give_up(error)
        self._bound.close(error)

    def __repr__(self) -> str:
        said = self._retention.said()
        if self._bound.ranks is not None:
            said.append(f"rank {self._bound.rank} of {self._bound.ranks.count}")
        unfinished = len(self._queue.unfinished())
        said += [f"{unfinished} unfinished"] * (unfinished > 0) + ["closed"] * self._closed
        return f"<Checkpointer of {self._path}: {', '.join(said)}>"

    def _repr_html_(self) -> str:
        return checkpointer_html(self._path, repr(self).strip("<>"), self._queue.unfinished())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._close()  # nothing is saved for a signal that came meanwhile: the state may be that of half a step
        self._queue.log_failed("while another exception was being raised")

    def save_on_signal(
        self,
        make_state: MakeState,
        signals: Iterable[signal.Signals] = (signal.SIGTERM,),
        *,
        grace_s: float | None = None,
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

        With several ranks, a signal to any of them makes all of them save the same step, within two or three steps of
        the optimizer, and then all of them run the earlier handler of that signal. All ranks call this, in the same
        order as save(); and all come to the same occasions: the optimizer's steps, or equally many calls of poll(). If
        the ranks have not agreed before close(), nothing is saved there.

        Args:
            make_state: Returns the step and the state when it is called, or also a rank_state as third; or None to wait
                for the next occasion, on all ranks alike.
            signals: The signals to handle; the same on all ranks.
            grace_s: Seconds from the signal to the end of the save. When they are over, the log says so, and the
                earlier handler runs without a save: on the training thread at the next occasion; if it is the default
                one, at once, from another thread. None: no limit.

        Raises:
            ConfigError: This is not the main thread, which alone may set signal handlers; make_state cannot be called;
                a signal cannot be handled; or grace_s is no time.

        Thread safety: the main thread only.
        """
        self._refuse_unusable()
        self._signals.install(make_state, signals, grace_s)
        self._agree_when_to_stop()

    def poll(self) -> None:
        """Save now if a signal has come; for training loops whose optimizer this object does not know.

        With several ranks, all of them call it equally often.

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
        return list(self._queue.stats)

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

    def _refuse_unusable(self) -> None:
        if self._process != os.getpid():
            raise ConfigError(f"this process was forked from the one that saves to {self._path}, and cannot save there")
        if self._closed:
            raise ConfigError(f"the Checkpointer of {self._path} is closed")

    def _save_for_signal(self, step: int, state: object, rank_state: object, timeout_s: float | None) -> None:
        """Save and commit, even if earlier saves have failed, and whatever `busy` says: this may be the last save."""
        self._refuse_unusable()
        pending = self._saves.save(step, state, rank_state, None, overwrite=False, replaces=None, is_last=True)
        pending.result(timeout_s)

    # ----------------------------------------------------------------------------------------------- resuming

    def steps(self) -> list[int]:
        """Return the committed steps, in ascending order. This reads manifests, and looks at the lengths of files.

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
            self._bound.resumed = step

    def discard_after(self, step: int) -> list[int]:
        """Remove all steps with greater numbers, for good: go back to a step and drop what came after it.

        This waits first for the unfinished saves of this object. With several ranks, all of them call it.

        Args:
            step: The last step that stays; it need not exist.

        Returns:
            The removed steps, in ascending order.

        Raises:
            ConfigError: `step` is no step, another process saves to this root, or the process group was destroyed.
            StorageError: A step could not be removed, or is being read; the others were removed.
            PeerError: With several ranks: the coordinator failed.

        Thread safety: the training thread only.
        """
        return sorted(self._remove(step, lambda found, after: [other for other in found if other > after]))

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

        def choose(found: list[int], wanted: int) -> list[int]:
            if wanted not in found:
                raise CheckpointNotFoundError(f"there is no step {wanted} in {self._path}")
            return [wanted]

        self._remove(step, choose)

    def _remove(self, given: Any, choose: Callable[[list[int], int], list[int]]) -> list[int]:
        """Remove those of the steps that are there which `choose` returns; see `Root.remove_together`."""
        self._refuse_unusable()
        self._queue.join(None)
        step = self._agreed("step", lambda: checked_step(given))
        bound, group = self._bound, self._bound.process_group
        everybodys = None
        if group is not None and bound.stores.node_local == "copies":
            look = partial(read_commits, self._path)
            everybodys = look_together(self._path, group, look, everywhere=True)
        return self._root.remove_together(
            lambda found: choose(found, step), self._saves.own_root, group, bound.rank, everybodys
        )

    @untraced
    def load(
        self,
        step: int | Literal["best"] | None = None,
        *,
        map_location: MapLocation = None,
        into: Mapping[str, object] | None = None,
        keys: Collection[str] | None = None,
        rename: Rename | None = None,
        dtype: torch.dtype | None = None,
        missing_ok: bool = False,
        verify: bool = False,
        progress: bool = False,
        strict: bool = False,
        weights_only: bool = True,
        on_resize: OnResize | None = None,
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
            keys: What to read beside `into`: keys of the state, "rank_state", or names of what is inside, as `inspect`
                lists them, with `*`, `?` and `[…]` as in `fnmatch`: "ema", "optimizer.state.*.exp_avg". What they do
                not choose is cut out of dicts; see `fastpersist.load`. Without `into`, only this is read, and with None
                the whole state. With `into`, entries whose tensors have less than 1 MiB together come in any case.
            rename: New names for what was saved, as in `fastpersist.load`; `keys` choose by the old ones. The result
                is then one flat dict, with the rank_state as ever. With `into`, targets are found by the new names,
                what has the old name keeps its place, and there are no `keys`.
            dtype: Convert the floating-point tensors of the state to this dtype once they are loaded, as in
                `fastpersist.load`. The targets of `into` and the rank_state keep their own.
            missing_ok: Return None if there is no such step, or no step at all. With several ranks either all of them
                get None, or none does.
            verify: Check every CRC, also of entries that are not loaded; with `into`, before any target changes.
                Without it, a byte that has changed on the disk is loaded as it is, unless it breaks the structure of
                the file; of a sharded step, only pieces that one rank reads as a whole are checked.
            progress: Show bytes, rate and remaining time on standard error, of what this rank reads: with several ranks
                one of them may show it. Of a sharded step that is taken to be an equal share.
            strict: Raise if the newest step is damaged, instead of going back to an older one.
            weights_only: Build nothing but tensors and plain containers. Pass False only for files that you trust.
            on_resize: Called if the step was saved by another number of ranks, and any of them has saved a rank_state:
                on_resize(rank_states, rank, count). `rank_states` lists those of all ranks that saved, by rank; None
                stands for none. `rank` and `count` are this rank and how many load. What it returns is the
                "rank_state". It is called last, when the targets are filled. Every rank that passes it reads all
                rank_states; `map_location` holds for them, too. Without it, they are left out, with a warning.

        Returns:
            The saved state, with a rank_state under "rank_state". With `keys` alone, a dict of what they choose. With
            `into`, a dict of the filled objects of `into`, what `keys` choose, the rank_state, and every entry of the
            state whose tensors have less than 1 MiB together (a step, a scheduler, a state of random numbers). All
            other entries are left out, and a line of the log names them: to get an "ema", pass keys=["ema"]. With
            missing_ok, None if nothing is committed.

        Raises:
            CheckpointNotFoundError: There is no such step, or no step at all, and missing_ok is False.
            CorruptionError, StorageError: The step is damaged or cannot be read: the one you named, the newest with
                `strict`, or all steps. If the message says *partly overwritten*, the targets it names are not usable
                until they are loaded again.
            ConfigError: `into` does not fit the state, or a key of `keys` is not in it, and nothing was changed; or a
                target's load_state_dict refused its entry, and the message says what is partly overwritten; or the
                process group was destroyed.
            UnsupportedError: `rename`, `into` and `keys` together; or the step lies in parts on several file systems,
                and this process is alone; or `verify`, and it was saved without checksums; or the named engine cannot
                be used.
            pickle.UnpicklingError: With weights_only: torch refuses an object that is not known to be safe.
            PeerError: With several ranks: another rank could not load the step.
            Exception: Whatever on_resize raises; the other ranks raise PeerError.

        Thread safety: any thread; no other thread may use the targets meanwhile.
        """
        if self._process == os.getpid():
            self._queue.join(None)
        make = partial(
            LoadOptions,
            map_location,
            into,
            keys,
            verify,
            weights_only,
            self._engine,
            self._bound.process_group,
            on_resize,
            rename,
            dtype,
            copies=self._bound.stores.node_local == "copies",
            progress=progress,
        )
        step, options = self._agreed_load(step, keys, missing_ok, make)
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
        found = load_step(self._path, step, options, missing_ok=missing_ok)
        if found is not None:
            resumed(step)
        return found

    def _agreed_load(
        self, step: Any, keys: Any, missing_ok: bool, make: Callable[[], LoadOptions]
    ) -> tuple[int | Literal["best"] | None, LoadOptions]:
        """Return the step to load, and the options that `make` returns; see `_agreed`."""
        options: list[LoadOptions] = []

        def checked() -> tuple[int | Literal["best"] | None, bool]:
            require_keys(keys)
            options.append(make())
            if isinstance(step, str):
                if step != "best":
                    raise ConfigError(f'a step is an int, "best", or None for the newest one; not {step!r}')
                return "best", bool(missing_ok)
            return None if step is None else checked_step(step), bool(missing_ok)

        found, _ = self._agreed("step and missing_ok", checked)
        return found, options[0]

    def _agreed(self, options: str, check: Callable[[], _Given]) -> _Given:
        """Return what a check of arguments returns; raise on all ranks if one was given no sense, or something else.

        Raises:
            ConfigError, UnsupportedError: The check has failed here; or it returned something else on another rank.
            PeerError: It has failed on another rank, or that is gone.
        """
        group = self._bound.process_group
        if group is None:
            return check()
        try:
            given = check()
        except (ConfigError, UnsupportedError) as error:
            with suppress(ConfigError):
                refuse_together(group, self._path, str(error))
            raise
        refuse_together(group, self._path, "")
        require_same(group, self._path, options, given)
        return given
