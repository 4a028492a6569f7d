"""Who may change which bytes of a save, and when: stable, constant, volatile; the gate; the alarm.

*Stable* storages belong to an optimizer: its parameters and the tensors of its state. They change when it steps, and at
no other time; so they are written from where they are while forward and backward run, and what is not written by
then is copied when the step comes (the gate). *Constant* ones were named by the user: they do not change at all.
Everything else is *volatile* and is copied before save() returns. That is always right, only slower; so whatever is
in doubt is volatile: an optimizer without working hooks, a tensor without a version counter. What lies on a device that
the native side cannot copy from is copied at once.

The gate is the guarantee. One pre-hook on all optimizers of the process, set by the first save that needs it, makes
a step wait until the stable bytes of every pending save that it could change are captured. With gate="manual" the
caller promises to call wait_captured() first.

The alarm is `_version`, torch's count of in-place changes, noted for every tensor by which an optimizer or the saved
object holds a stable storage, and compared when the gate is passed, or before the file is published if no gate came.
A change in between means that the bytes may be torn: the save fails, nothing is published, and the storage is volatile
from then on. What no counter sees (`.data`, a kernel of somebody's own) `paranoid` looks for, by re-reading samples.

Who owns which storage: `ownership`. Where copies go: `arena`. Who copies: csrc/transfer/snapshot. Which save is written
when: `pending_save`.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fastpersist import _native
from fastpersist.errors import DeviceError, TornStateError
from fastpersist.saving.ownership import PLAIN, Owners, Ownership, note_step_of, storage_key, storage_keys
from fastpersist.saving.pacing import note_step
from fastpersist.transfer import cuda
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.tensor_memory import byte_tensor

__all__ = ["Capture", "Kind", "Sources", "no_garbage_collection", "watch_steps"]

_log = logging.getLogger("fastpersist")

Kind = _native.SourceKind

_SETTLING_S = 0.0005
_SAMPLE_COUNT = 64
_SAMPLE_BYTES = 64


class Sources(Protocol):
    """What is captured of a file: `containers.Container` without the writing."""

    @property
    def sources(self) -> Sequence[_Source]:
        """The bytes, in the order in which they are written."""

    @property
    def tensors(self) -> Sequence[Sequence[torch.Tensor]]:
        """For each source the tensors by which the object holds it."""

    @property
    def wrappers(self) -> Sequence[torch.Tensor]:
        """Tensors of a subclass, whose storages lie inside other tensors."""

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors in a source."""


class _Source(Protocol):
    @property
    def storage(self) -> torch.UntypedStorage: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


# ------------------------------------------------------------------------------------------------------ the gate

_torn: dict[int, StorageWeakRef] = {}  # storages that were caught changing before the gate: volatile for good
_pending: list[Capture] = []  # those that a step must pass
_pending_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
_watching = False


def watch_steps() -> None:
    """From now on every optimizer's step in this process passes the gate. May be called again."""
    global _watching
    with _pending_lock:
        if not _watching:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _watching = True


@torch._disable_dynamo  # type: ignore[attr-defined]  # a compiled step runs it as it is
def _before_step(optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
    """Nothing that this step changes may still be uncaptured."""
    # Asking a process without CUDA about its stream, or whether there is any CUDA, would start it.
    note_step_of(optimizer, is_replayed=torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    note_step(optimizer, manual=False)
    for capture in list(_pending):
        if not capture.is_manual and capture.is_changed_by(optimizer):
            capture.wait_captured(on_host=not _steps_on_current_stream(optimizer))


def _steps_on_current_stream(optimizer: Optimizer) -> bool:
    """Tell whether all that a step changes on devices it changes over the current streams; those of torch do.

    Others may bring new values over streams of their own, which nobody has told to wait.
    """
    return type(optimizer).__module__.startswith("torch.")


@torch._disable_dynamo  # type: ignore[attr-defined]
def _after_step(optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
    """With gate="manual" the caller should have waited by now; fused optimizers would not give themselves away."""
    note_step(optimizer, manual=True)
    for capture in list(_pending):
        if capture.is_manual and capture.is_changed_by(optimizer):
            capture.tear_by_step(type(optimizer).__name__)


def _forget_pending() -> None:
    """In a forked child: the saves, and the threads that write them, are the parent's."""
    global _collector_holders, _pending_lock
    _pending_lock = threading.RLock()
    _pending.clear()
    if _collector_holders:  # by a thread that is not here to turn it on again
        _collector_holders = 0
        gc.enable()


os.register_at_fork(after_in_child=_forget_pending)


class _Watched(NamedTuple):
    """The tensors by which a source is held, and each one's count of changes when save() saw it."""

    tensors: list[tuple[torch.Tensor, int]]
    container: Sources
    source: int

    def has_changed(self) -> bool:
        """Tell whether one of them has been changed since."""
        return any(tensor._version != version for tensor, version in self.tensors)


_collector_holders = 0  # who have turned it off, and will turn it on again


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the collector away while tens of thousands of objects are made of which none is garbage.

    It would go through all objects of the process again and again, which takes longer than making these.
    """
    global _collector_holders
    was_enabled = gc.isenabled()
    gc.disable()
    _collector_holders += was_enabled
    try:
        yield
    finally:
        if was_enabled:
            _collector_holders -= 1
            gc.enable()


class Capture:
    """The bytes of one save, of all its files, from save() until they are written.

    `add` each file, then `copy_volatile`; the saving thread does both. Then any thread may wait.

    Args:
        owners: Whose storages are stable.
        arena: Where bytes go that cannot stay where they are.
        paranoid: Re-read samples of the stable bytes for changes that no counter sees.
        on_gate: Told the seconds that a thread waited at the gate, each time.
        look: In place of `owners.look`, for those who know the answer.
    """

    def __init__(
        self,
        owners: Owners,
        arena: Arena,
        *,
        paranoid: bool = False,
        on_gate: Callable[[float], None] | None = None,
        look: Callable[[], Ownership] | None = None,
    ) -> None:
        self._arena = arena
        self._paranoid = paranoid
        self._on_gate = on_gate
        self.is_manual = owners.gate == "manual"
        self._optimizers = owners.optimizers()
        self._look: Callable[[], Ownership] | None = look or owners.look  # a file without tensors needs no answer
        self._stable: dict[int, list[torch.Tensor]] = {}
        self._constant: dict[int, list[torch.Tensor]] = {}
        self.why_volatile = ""
        """Why an optimizer's storages are not stable, "" when they are, or nothing was added."""
        self._snapshots: list[_native.Snapshot] = []
        self._watched: list[_Watched] = []
        self._constants_watched: list[_Watched] = []
        self._samples: list[tuple[Sources, int, int, bytes]] = []
        self._places: list[tuple[Sources, int, int, int]] = []  # of stable bytes: source, address, length
        self._stable_keys: set[int] = set()
        self._kept: list[torch.UntypedStorage] = []
        self._devices: list[int] = []  # ordinals of those that copy bytes of this save
        self._lock = threading.RLock()
        self._sealed = False
        self._started_s = time.monotonic()
        self.capture_s = 0.0
        """Seconds from the save's start until everything but constants could be changed again."""
        self._error: TornStateError | None = None
        self.kinds: list[Kind] = []
        """What each source is, over all files in the order they were added."""

    # --- on the thread that saves

    @no_garbage_collection()
    def add(self, container: Sources) -> _native.Snapshot:
        """Sort the bytes of a file by who may change them when, and note the counters of what is stable.

        Returns:
            The snapshot that the file is written from.
        """
        if container.sources and self._look is not None:
            found = self._look()
            self._stable, self._constant, self.why_volatile = found.stable, found.constant, found.why_volatile
        self._look = None
        snapshot = _native.Snapshot(self._arena.for_state(sum(source.size_bytes for source in container.sources)))
        reached_by = self._reached_by(container)
        on_devices_bytes = 0
        followed: set[int] = set()  # whose copies come after what the caller's current stream holds
        for index, source in enumerate(container.sources):
            storage = source.storage
            kind, watched = self._kind_of(storage, reached_by[index])
            start_bytes = source.offset_bytes
            on_host = cuda.is_host_memory(storage)
            ordinal = None if on_host else cuda.ordinal_of(storage)
            if ordinal is not None:
                if ordinal not in followed:
                    cuda.follow_caller(ordinal, to_host=True)
                    followed.add(ordinal)
                on_devices_bytes += 0 if kind == Kind.CONSTANT else source.size_bytes
            elif not on_host:
                # This is its capture; the copy is ours and changes no more.
                storage = byte_tensor(storage)[start_bytes : start_bytes + source.size_bytes].cpu().untyped_storage()
                kind, watched, start_bytes = Kind.CONSTANT, [], 0
            self._kept.append(storage)
            snapshot.add(storage.data_ptr() + start_bytes, source.size_bytes, kind, ordinal)
            self.kinds.append(kind)
            if watched:
                into = self._watched if kind == Kind.STABLE else self._constants_watched
                into.append(_Watched(watched, container, index))
            if kind == Kind.STABLE:
                self._stable_keys.add(storage._cdata)
                self._places.append((container, index, storage.data_ptr(), storage.nbytes()))
        self._snapshots.append(snapshot)
        self._devices += followed.difference(self._devices)
        if on_devices_bytes:
            self._arena.prepare(on_devices_bytes)
        if self._paranoid:
            self._take_samples(container)
        return snapshot

    def copy_volatile(self, *, wait: bool) -> bool:
        """Copy what may change as soon as save() has returned; what finds no room is waited for until it is written.

        Args:
            wait: Without it, return when there is no room: the writer has not begun, and would never make any.

        Returns:
            Whether all of it is captured.
        """
        for snapshot in reversed(self._snapshots):
            if snapshot.counts()["volatile_remaining_bytes"]:
                snapshot.capture(Kind.VOLATILE, wait)
        self._hold_caller()
        return not self.remaining_bytes("volatile")

    def hold(self) -> None:
        """From now on the optimizers' steps wait for this capture."""
        if not self._stable_keys:
            return
        watch_steps()
        with _pending_lock:
            _pending.append(self)

    # --- on any thread

    def remaining_bytes(self, kind: str) -> int:
        """Return how many "stable" or "volatile" bytes are neither copied nor written."""
        return sum(snapshot.counts()[f"{kind}_remaining_bytes"] for snapshot in self._snapshots)

    def count(self, name: str) -> int:
        """Return one of the counts of csrc/transfer/snapshot, over all files."""
        return sum(snapshot.counts()[name] for snapshot in self._snapshots)

    def is_changed_by(self, optimizer: Optimizer) -> bool:
        """Tell whether a step of this optimizer could change stable bytes of this save."""
        if any(optimizer is known for known in self._optimizers):
            return True
        return any(
            key in self._stable_keys
            for group in optimizer.param_groups
            for tensor in group["params"]
            for key in storage_keys(tensor)
        )

    def captured(self) -> bool:
        """Tell whether all may be changed again; once True, the counters have been compared for the last time."""
        if not self._is_settled():
            return False
        self.seal()
        return True

    def wait_captured(self, timeout_s: float | None = None, *, on_host: bool = True) -> None:
        """Make it safe to change everything but constants: copy what the writer has not reached, or wait for it.

        Args:
            timeout_s: Seconds to wait at most.
            on_host: For whatever may change it. Without it, for what the caller's current streams are given from now
                on: they wait for the devices, and this thread does not.

        Raises:
            TimeoutError: With a timeout: not all is captured.
        """
        started_s = time.monotonic()
        if self.is_manual:
            for optimizer in self._optimizers:
                note_step(optimizer, manual=True)
        deadline_s = None if timeout_s is None else started_s + timeout_s
        if self._sealed:
            self._hold_caller()  # who comes later may be on another stream
            if on_host:
                self._wait_settled(deadline_s)
            return
        try:
            if self.is_torn():
                return
            for wait in (False, True):  # first what finds room, of all files
                if wait and deadline_s is not None:
                    self._wait_until(deadline_s)
                    continue
                for snapshot in reversed(self._snapshots):
                    snapshot.capture(Kind.STABLE, wait)
                    snapshot.capture(Kind.VOLATILE, wait)
            self._hold_caller()
            self.seal()
            if on_host:
                self._wait_settled(deadline_s)
        finally:
            if self._on_gate is not None:
                self._on_gate(time.monotonic() - started_s)

    def _wait_until(self, deadline_s: float) -> None:
        self.hurry()
        while self.remaining_bytes("stable") or self.remaining_bytes("volatile"):
            if time.monotonic() >= deadline_s:
                raise TimeoutError("the state is not captured yet; nothing of it may be changed")
            time.sleep(0.002)
            for snapshot in reversed(self._snapshots):
                snapshot.capture(Kind.STABLE, wait=False)

    def _wait_settled(self, deadline_s: float | None = None) -> None:
        while not self._is_settled():
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError("the state is still being copied from its device; nothing of it may be changed")
            time.sleep(_SETTLING_S)

    def seal(self) -> None:
        """Compare the counters for the last time. From now on everything but constants may change."""
        with self._lock:
            if self._sealed:
                return
            self._look_for_changes()
            self._sealed = True
            self.capture_s = time.monotonic() - self._started_s
            self._watched.clear()
            self._samples.clear()
            self._places.clear()
        if not self._devices:
            self._let_go()

    def is_torn(self) -> bool:
        """Compare the counters now; when something has changed the save has failed, and no step waits for it."""
        with self._lock:
            if not self._sealed:
                self._look_for_changes()
            torn = self._error is not None
        if torn:
            self.hurry()
            self._let_go()
        return torn

    def tear_by_step(self, optimizer: str) -> None:
        """An optimizer has stepped, and nobody had waited for the capture: the save has failed."""
        with self._lock:
            if self._sealed or self._error is not None:
                return
            for storage in self._kept:
                if storage._cdata in self._stable_keys:
                    _torn[storage._cdata] = StorageWeakRef(storage)
            self._error = TornStateError(
                f"{optimizer} stepped before the state was captured. Nothing was published. With gate='manual', call "
                "wait_captured() before the optimizer's step"
            )
        self.hurry()
        self._let_go()

    def check(self) -> None:
        """Before a file is published: raise if what was written may be torn.

        Raises:
            TornStateError: It may; the message names the tensor.
            DeviceError: A device could not copy what it was told to.
        """
        self.seal()
        if self._devices:
            for snapshot in self._snapshots:
                snapshot.settled()
        with self._lock:
            if self._error is None:
                self._compare(self._constants_watched, "it was declared constant")
            if self._error is not None:
                raise self._error

    def hurry(self) -> None:
        """Somebody waits: the writer need not spare the training any more."""
        for snapshot in self._snapshots:
            snapshot.hurry()

    def release(self) -> None:
        """Give everything back: all is written, or never will be."""
        self._let_go()
        for snapshot in self._snapshots:
            snapshot.close()
        with self._lock:
            self._watched.clear()
            self._constants_watched.clear()
            self._samples.clear()
            self._places.clear()
            self._kept.clear()
            self._stable, self._constant = {}, {}
            self._devices = []
            self._sealed = True

    # --- inside

    def _hold_caller(self) -> None:
        """Let the caller's current streams wait for the copies from devices: that is the gate there."""
        for ordinal in self._devices:
            # One snapshot for all: a device's copies have one order. A stream that is being captured into a CUDA graph
            # executes nothing now, so it cannot be told to wait; the thread that will replay the graph does.
            if not self._snapshots[0].hold_caller(ordinal, cuda.caller_stream(ordinal)):
                self._wait_settled()

    def _is_settled(self) -> bool:
        """Tell whether nothing is left to be captured, and no copy from a device is on its way."""
        if not self._sealed and (self.remaining_bytes("stable") or self.remaining_bytes("volatile")):
            return False
        try:
            return not self._devices or all(snapshot.settled() for snapshot in self._snapshots)
        except DeviceError:  # there is nothing to protect: the save fails, and says so
            return True

    def _let_go(self) -> None:
        with _pending_lock:
            if self in _pending:
                _pending.remove(self)

    def _reached_by(self, container: Sources) -> list[list[torch.Tensor]]:
        """For each source the tensors that really hold it: the pickler's list may have one too many."""
        around: dict[int, list[torch.Tensor]] = {}
        for wrapper in container.wrappers:
            for key in storage_keys(wrapper):
                around.setdefault(key, []).append(wrapper)
        reached = []
        for source, tensors in zip(container.sources, container.tensors, strict=True):
            key = source.storage._cdata
            held = [tensor for tensor in tensors if type(tensor) in PLAIN and storage_key(tensor) == key]
            reached.append(held + around.get(key, []))
        return reached

    def _kind_of(
        self, storage: torch.UntypedStorage, reached_by: list[torch.Tensor]
    ) -> tuple[Kind, list[tuple[torch.Tensor, int]]]:
        key = storage._cdata
        if key in self._constant:
            kind, held_by = Kind.CONSTANT, self._constant[key]
        elif key in self._stable:
            kind, held_by = Kind.STABLE, self._stable[key]
        else:
            return Kind.VOLATILE, []
        torn = _torn.get(key)
        if torn is not None:
            if not torn.expired():
                return Kind.VOLATILE, []
            del _torn[key]
        try:
            distinct = {id(tensor): tensor for tensor in (*held_by, *reached_by)}
            return kind, [(tensor, tensor._version) for tensor in distinct.values()]
        except RuntimeError:  # inference tensors do not count
            return Kind.VOLATILE, []

    def _look_for_changes(self) -> None:
        if self._error is None:
            self._compare(self._watched, "it belongs to an optimizer, and only its step may change it")
        if self._error is None:
            self._compare_places()
        if self._error is None:
            self._compare_samples()

    def _compare_places(self) -> None:
        """A storage that was resized has left its memory; nobody must read there any more."""
        for container, index, address, size_bytes in self._places:
            storage = container.sources[index].storage
            if storage.data_ptr() != address or storage.nbytes() != size_bytes:
                self._tear(container, index, "it was resized, and its bytes are gone")
                return

    def _compare(self, watched: list[_Watched], rule: str) -> None:
        for entry in watched:
            if entry.has_changed():
                self._tear(entry.container, entry.source, rule)
                return

    def _tear(self, container: Sources, source: int, rule: str) -> None:
        storage = container.sources[source].storage
        _torn[storage._cdata] = StorageWeakRef(storage)
        for entry in (*self._watched, *self._constants_watched):  # all that changed, so that one cause fails one save
            if entry.has_changed():
                changed = entry.container.sources[entry.source].storage
                _torn[changed._cdata] = StorageWeakRef(changed)
        names = ", ".join(container.names_of(source)) or f"storage {source}"
        self._error = TornStateError(
            f"{names} was changed in place after save() and before it was captured ({rule}). Nothing was published; "
            "from now on it is copied before save() returns. To save it without that copy, call wait_captured() "
            "before you change it"
        )

    def _take_samples(self, container: Sources) -> None:
        if self._devices:
            cuda.tell_of_paranoia()
        stable = [
            index
            for index, source in enumerate(container.sources)
            if source.storage._cdata in self._stable_keys and cuda.is_host_memory(source.storage)
        ]
        weights = [container.sources[index].size_bytes for index in stable]
        if not sum(weights):
            return
        chance = random.Random(os.urandom(8))
        for index in chance.choices(stable, weights, k=_SAMPLE_COUNT):
            size_bytes = container.sources[index].size_bytes
            offset_bytes = chance.randrange(max(1, size_bytes - _SAMPLE_BYTES))
            self._samples.append((container, index, offset_bytes, _bytes_of(container.sources[index], offset_bytes)))

    def _compare_samples(self) -> None:
        for container, index, offset_bytes, expected in self._samples:
            if _bytes_of(container.sources[index], offset_bytes) != expected:
                self._tear(container, index, "found by comparing bytes: it changed in a way that torch does not count")
                return


def _bytes_of(source: _Source, offset_bytes: int) -> bytes:
    size_bytes = min(_SAMPLE_BYTES, source.size_bytes - offset_bytes)
    return ctypes.string_at(source.storage.data_ptr() + source.offset_bytes + offset_bytes, size_bytes)
