"""Keeps the bytes of a save as they were at save(), while training goes on: three kinds of storages, a gate, an alarm.

*Stable* storages belong to an optimizer: its parameters and the tensors of its state. They change only when it steps.
The writer reads them in place while forward and backward run, and the step first copies the bytes that the writer has
not reached (the gate). *Constant* storages were named by the user; they do not change at all. All others are *volatile*
and are copied before save() returns. This is always correct, but slower, so a storage in doubt is volatile: of an
optimizer without working hooks, or of a tensor without a version counter. Storages on a device that the native side
cannot copy from are copied at once.

The gate is the guarantee. One pre-hook on all optimizers of the process, which the first save that needs it sets, makes
a step wait until the stable bytes of every pending save that it could change are captured. With gate="manual" the
caller promises to call wait_captured() first.

The alarm is `_version`, torch's count of in-place changes. It is noted for every tensor by which an optimizer or the
saved object holds a stable storage, and compared at the gate, or before the file is published if no step came. If it
has changed, the bytes may be torn: the save fails, nothing is published, and the storage is volatile from then on.
`paranoid` re-reads samples to find changes that no counter sees (through `.data`, or by a custom kernel).

`ownership` finds the owners of storages. Copies go to an `arena`, and csrc/transfer/snapshot makes them. `pending_save`
decides when which save is written.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fastpersist import _native
from fastpersist.errors import DeviceError, TornStateError
from fastpersist.saving.ownership import Owned, Owners, Ownership, TensorsOfOwner, note_step_of, storage_keys
from fastpersist.saving.pacing import note_step
from fastpersist.saving.sources import Holders, Source, SourceTable
from fastpersist.transfer import cuda
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.tensor_memory import byte_tensor
from fastpersist.transfer.torch_boundary import torch_functions

__all__ = ["Capture", "Kind", "Sources", "watch_steps"]

_log = logging.getLogger("fastpersist")

Kind = _native.SourceKind
_STABLE, _CONSTANT, _VOLATILE = Kind.STABLE.value, Kind.CONSTANT.value, Kind.VOLATILE.value  # in columns of bytes

_SETTLING_S = 0.0005
_SAMPLE_COUNT = 64
_SAMPLE_BYTES = 64


class Sources(Protocol):
    """The part of a file that is captured: `containers.Container` without the writing."""

    @property
    def sources(self) -> SourceTable:
        """The bytes, in the order of the file."""

    @property
    def holders(self) -> Holders:
        """The plain tensors by which the object holds the sources' storages, with the index of each one's source."""

    @property
    def wrappers(self) -> Sequence[torch.Tensor]:
        """Return the tensors of a subclass, whose storages lie inside other tensors."""

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors in a source."""


# ------------------------------------------------------------------------------------------------------ the gate

_torn: dict[int, StorageWeakRef] = {}  # storages that have changed before the gate once: volatile for good
_pending: list[Capture] = []  # those that a step waits for
_pending_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
_watching = False


def watch_steps() -> None:
    """Make every optimizer's step in this process wait at the gate from now on. May be called again."""
    global _watching
    with _pending_lock:
        if not _watching:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _watching = True


@torch._disable_dynamo  # type: ignore[attr-defined]  # a compiled step runs it as it is
def _before_step(optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
    """Wait until everything that this step changes is captured."""
    # Asking for the stream, or even whether there is CUDA, would start CUDA in a process without it.
    note_step_of(optimizer, is_replayed=torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    note_step(optimizer, manual=False)
    on_host = not _steps_on_current_stream(optimizer)
    for capture in list(_pending):
        if not capture.is_manual and capture.is_changed_by(optimizer, on_any_stream=on_host):
            capture.wait_captured(on_host=on_host)


def _steps_on_current_stream(optimizer: Optimizer) -> bool:
    """Tell whether a step changes device memory only on the current streams, as torch's optimizers do.

    Other optimizers may write new values on streams of their own, which do not wait for the copies.
    """
    return type(optimizer).__module__.startswith("torch.")


@torch._disable_dynamo  # type: ignore[attr-defined]
def _after_step(optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
    """Fail the saves with gate="manual" without a wait: the counters do not show steps of fused optimizers."""
    note_step(optimizer, manual=True)
    for capture in list(_pending):
        if capture.is_manual and capture.is_changed_by(optimizer):
            capture.tear_by_step(type(optimizer).__name__)


def _forget_pending() -> None:
    """Forget all saves in a forked child: they, and the threads that write them, are the parent's."""
    global _pending_lock
    _pending_lock = threading.RLock()
    _pending.clear()


os.register_at_fork(after_in_child=_forget_pending)


@functools.cache
def _questions() -> _native.TensorQuestions:
    """Return the functions by which native code reads properties of tensors."""
    return _native.TensorQuestions(torch.Tensor, torch.nn.Parameter, torch.UntypedStorage, torch_functions())


class _Watched(NamedTuple):
    """The versions, at save(), of the tensors that hold sources of a file."""

    container: Sources
    counters: _native.Counters


def _around(wrappers: Iterable[torch.Tensor]) -> Holders:
    """Return tensors of a subclass with the keys of the storages inside them."""
    found = Holders([], [])
    for wrapper in wrappers:
        for key in storage_keys(wrapper):
            found.add(wrapper, key)
    return found


def _owned(held: _native.HeldSources, owned: Owned) -> _native.OwnedSources:
    """Find the sources of a file that an owner holds."""
    if isinstance(owned, TensorsOfOwner):
        return held.owned_by(owned.tensors, storage_keys)
    return held.owned_with(owned.tensors, owned.held)


class Capture:
    """The bytes of one save, of all its files, from save() until they are written.

    The thread that saves calls `add` for each file, then `copy_volatile`. After that any thread may wait.

    Args:
        owners: The owners of stable storages.
        arena: Host memory for copies.
        paranoid: Re-read samples of the stable bytes for changes that no counter sees.
        on_gate: Called with the seconds that a thread waited at the gate, each time.
        look: Called in place of `owners.look`, by callers that know the answer already.
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
        self.optimizers = owners.optimizers()
        self._look: Callable[[], Ownership] | None = look or owners.look  # a file without tensors needs no answer
        self._owned = Ownership(Holders([], []), Holders([], []), "")
        self._snapshots: list[_native.Snapshot] = []
        self._watched: list[_Watched] = []
        self._constants_watched: list[_Watched] = []
        self._samples: list[tuple[Sources, int, int, bytes]] = []
        self._places: list[tuple[Sources, _native.Places]] = []  # of stable bytes
        self._kinds_by_file: list[tuple[Sequence[int], bytearray]] = []  # with the keys of the storages
        self._known_stable_keys: set[int] = set()
        self._keys_count = 0  # files whose keys are among these
        self._kept: list[list[torch.UntypedStorage]] = []  # of each file
        self._devices: list[int] = []  # ordinals of the devices that bytes of this save are copied from
        self._lock = threading.RLock()
        self.is_sealed = False
        """Whether the counters have been compared for the last time."""
        self._started_s = time.monotonic()
        self.capture_s = 0.0
        """Seconds from the save's start until everything but constants could be changed again."""
        self._error: TornStateError | None = None
        self.when_sealed: Callable[[], None] | None = None
        """Called once, when everything but constants may change."""

    # --- on the thread that saves

    @no_garbage_collection()
    def add(self, container: Sources) -> _native.Snapshot:
        """Find the kind of each source of a file, and note the counters of the stable ones.

        Returns:
            The snapshot that the file is written from.
        """
        if container.sources and self._look is not None:
            self._owned = self._look()
        self._look = None
        sources = container.sources
        sizes = sources.sizes_bytes
        snapshot = _native.Snapshot(self._arena.for_state(sources.total_bytes()), torch.get_num_threads())
        # Training waits, and a state may have many thousands of sources: all work for each source is done in columns,
        # natively.
        facts, storages = sources.facts(), sources.storages
        starts = sources.addresses(facts)
        held = _native.HeldSources(_questions(), facts.keys, *container.holders, facts.versions)
        around = _owned(held, _around(container.wrappers))
        stable, constant = _owned(held, self._owned.stable), _owned(held, self._owned.constant)
        kinds = bytearray([_VOLATILE]) * len(storages)
        held.mark(kinds, stable, _STABLE)
        held.mark(kinds, constant, _CONSTANT)
        self._distrust_torn(held, kinds)
        ordinals: list[int | None] | None = None
        copied = []
        if not facts.are_on_host:
            storages, starts = storages[:], starts[:]
            ordinals = [None if cuda.is_host_memory(storage) else cuda.ordinal_of(storage) for storage in storages]
            for index, source in enumerate(sources):
                if ordinals[index] is None and not cuda.is_host_memory(source.storage):
                    # This copy is the capture; no other code has it, so it does not change.
                    whole = byte_tensor(source.storage)
                    copy = whole[source.offset_bytes : source.offset_bytes + source.size_bytes].cpu()
                    storages[index], starts[index], kinds[index] = copy.untyped_storage(), copy.data_ptr(), _VOLATILE
                    copied.append(index)
        watched = held.watch(kinds, _STABLE, _VOLATILE, [stable, around])
        self._watched.append(_Watched(container, watched))
        watched = held.watch(kinds, _CONSTANT, _VOLATILE, [constant, around])
        self._constants_watched.append(_Watched(container, watched))
        places = held.places(kinds, _STABLE, storages, facts.addresses, facts.sizes_bytes)
        self._places.append((container, places))
        for index in copied:
            kinds[index] = _CONSTANT
        self._kinds_by_file.append((facts.keys, kinds))
        if ordinals is not None:
            self._follow_devices(ordinals)
        snapshot.add(starts, sizes, kinds, ordinals)
        if ordinals is not None:
            sized = zip(ordinals, kinds, sizes, strict=True)
            copied_bytes = sum(size for ordinal, kind, size in sized if ordinal is not None and kind != _CONSTANT)
            if copied_bytes:  # after add, so that the arena knows the devices: otherwise it would map unpinned memory
                self._arena.prepare(copied_bytes)
        self._snapshots.append(snapshot)
        self._kept.append(storages)
        if self._paranoid:
            self._take_samples(container)
        return snapshot

    @property
    def kinds(self) -> list[Kind]:
        """The kind of each source, over all files in the order they were added."""
        return [Kind(kind) for _, kinds in self._kinds_by_file for kind in kinds]

    @property
    def _stable_keys(self) -> set[int]:
        """The keys of the storages of the stable sources; few steps ask for them."""
        while self._keys_count < len(self._kinds_by_file):
            keys, kinds = self._kinds_by_file[self._keys_count]
            self._known_stable_keys.update(key for key, kind in zip(keys, kinds, strict=True) if kind == _STABLE)
            self._keys_count += 1
        return self._known_stable_keys

    @property
    def why_volatile(self) -> str:
        """Why an optimizer's storages are not stable; "" when they are, or nothing was added."""
        return self._owned.why_volatile

    def copy_volatile(self, *, wait: bool) -> bool:
        """Copy volatile bytes, which may change as soon as save() has returned.

        Args:
            wait: Wait for the writer where the arena has no room. Without it, return: a writer that has not begun
                makes no room.

        Returns:
            Whether all of them are captured.
        """
        for snapshot in reversed(self._snapshots):
            if snapshot.counts()["volatile_remaining_bytes"]:
                snapshot.capture(Kind.VOLATILE, wait)
        self._hold_caller()
        return not self.remaining_bytes("volatile")

    def hold(self) -> None:
        """Make the optimizers' steps wait for this capture from now on."""
        if not self._devices and not any(_STABLE in kinds for _, kinds in self._kinds_by_file):
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

    def is_changed_by(self, optimizer: Optimizer, *, on_any_stream: bool = False) -> bool:
        """Tell whether a step of this optimizer could change bytes of this save that are not captured.

        Args:
            optimizer: Any optimizer; the save need not know it.
            on_any_stream: It also changes device memory on streams that do not wait for the copies. Such a stream could
                change bytes, even volatile ones, that a device is still copying.
        """
        if on_any_stream and self._devices:
            return True
        if any(optimizer is known for known in self.optimizers):
            return True
        return any(
            key in self._stable_keys
            for group in optimizer.param_groups
            for tensor in group["params"]
            for key in storage_keys(tensor)
        )

    def captured(self) -> bool:
        """Tell whether everything may change again; once True, the counters have been compared for the last time."""
        if not self._is_settled():
            return False
        self.seal()
        return True

    def wait_captured(self, timeout_s: float | None = None, *, on_host: bool = True) -> None:
        """Make it safe to change everything but constants: copy what the writer has not reached, or wait for it.

        Args:
            timeout_s: The most seconds to wait; None waits without limit.
            on_host: Anybody may change it when this returns. Without it, only work that the caller's current streams
                get from now on: those streams wait for the devices, and this thread does not.

        Raises:
            TimeoutError: The time is over, and not all is captured.
        """
        started_s = time.monotonic()
        if self.is_manual:
            for optimizer in self.optimizers:
                note_step(optimizer, manual=True)
        deadline_s = None if timeout_s is None else started_s + timeout_s
        if self.is_sealed:
            self._hold_caller()  # this caller may be on another stream than the one before
            if on_host:
                self._wait_settled(deadline_s)
            return
        try:
            if self.is_torn():
                return
            for wait in (False, True):  # first, copy from all files as much as the arena has room for
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
            if self.is_sealed:
                return
            self._look_for_changes()
            self.is_sealed = True
            self.capture_s = time.monotonic() - self._started_s
            self._watched.clear()
            self._samples.clear()
            self._places.clear()
        if not self._devices:
            self._let_go()
        if self.when_sealed is not None:
            self.when_sealed()

    def is_torn(self) -> bool:
        """Compare the counters now; if one has changed, the save has failed, and no step waits for it any more."""
        with self._lock:
            if not self.is_sealed:
                self._look_for_changes()
            torn = self._error is not None
        if torn:
            self.hurry()
            self._let_go()
        return torn

    def tear_by_step(self, optimizer: str) -> None:
        """Fail the save: an optimizer has stepped, and no caller had waited for the capture."""
        with self._lock:
            if self.is_sealed or self._error is not None:
                return
            for storage in itertools.chain(*self._kept):
                if storage._cdata in self._stable_keys:
                    _torn[storage._cdata] = StorageWeakRef(storage)
            self._error = TornStateError(
                f"{optimizer} stepped before the state was captured. Nothing was published. With gate='manual', call "
                "wait_captured() before the optimizer's step"
            )
        self.hurry()
        self._let_go()

    def check(self) -> None:
        """Raise if what was written may be torn; called before a file is published.

        Raises:
            TornStateError: What was written may be torn; the message names the tensor.
            DeviceError: A device has failed to copy.
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
        """Let the writer go at full speed: a caller waits, so it need not be paced for training any more."""
        for snapshot in self._snapshots:
            snapshot.hurry()

    def release(self) -> None:
        """Give everything back: all bytes are written, or will never be."""
        self._let_go()
        for snapshot in self._snapshots:
            snapshot.close()
        with self._lock:
            self._watched.clear()
            self._constants_watched.clear()
            self._samples.clear()
            self._places.clear()
            self._kept.clear()
            self._owned = Ownership(Holders([], []), Holders([], []), self._owned.why_volatile)
            self._devices = []
            self.is_sealed = True

    # --- inside

    def _hold_caller(self) -> None:
        """Let the caller's current streams wait for the copies from devices: that is the gate there."""
        for ordinal in self._devices:
            # One snapshot is enough for all, because a device makes all copies in one order. A stream that is being
            # captured into a CUDA graph executes nothing now, so the thread, which will replay the graph, waits.
            if not self._snapshots[0].hold_caller(ordinal, cuda.caller_stream(ordinal)):
                self._wait_settled()

    def _is_settled(self) -> bool:
        """Tell whether nothing is left to be captured, and no copy from a device is on its way."""
        if not self.is_sealed and (self.remaining_bytes("stable") or self.remaining_bytes("volatile")):
            return False
        try:
            return not self._devices or all(snapshot.settled() for snapshot in self._snapshots)
        except DeviceError:  # there is nothing to protect: the save fails with this error
            return True

    def _let_go(self) -> None:
        with _pending_lock:
            if self in _pending:
                _pending.remove(self)

    def _follow_devices(self, ordinals: Sequence[int | None]) -> None:
        """Let copies from devices come after the work of the caller's current streams."""
        found = {ordinal for ordinal in ordinals if ordinal is not None}
        for ordinal in found:
            cuda.follow_caller(ordinal, to_host=True)
        self._devices += found.difference(self._devices)

    def _distrust_torn(self, held: _native.HeldSources, kinds: bytearray) -> None:
        """Make storages volatile that were torn before."""
        for key, torn in list(_torn.items()):
            sources = [source for source in held.sources_of(key) if kinds[source] != _VOLATILE]
            if sources and torn.expired():
                _torn.pop(key, None)
                continue
            for source in sources:
                kinds[source] = _VOLATILE

    def _look_for_changes(self) -> None:
        if self._error is None:
            self._compare(self._watched, "it belongs to an optimizer, and only its step may change it")
        if self._error is None:
            self._compare_places()
        if self._error is None:
            self._compare_samples()

    def _compare_places(self) -> None:
        """Find a storage that was resized: its old memory is freed, and must not be read any more."""
        for container, places in self._places:
            source = places.moved()
            if source is not None:
                self._tear(container, source, "it was resized, and its bytes are gone")
                return

    def _compare(self, watched: list[_Watched], rule: str) -> None:
        for entry in watched:
            changed = entry.counters.changed()
            if changed:
                self._tear(entry.container, changed[0], rule)
                return

    def _tear(self, container: Sources, source: int, rule: str) -> None:
        storage = container.sources[source].storage
        _torn[storage._cdata] = StorageWeakRef(storage)
        for entry in (*self._watched, *self._constants_watched):  # all that have changed: one cause fails one save
            for changed in entry.counters.changed():
                also = entry.container.sources[changed].storage
                _torn[also._cdata] = StorageWeakRef(also)
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


def _bytes_of(source: Source, offset_bytes: int) -> bytes:
    size_bytes = min(_SAMPLE_BYTES, source.size_bytes - offset_bytes)
    return ctypes.string_at(source.storage.data_ptr() + source.offset_bytes + offset_bytes, size_bytes)
