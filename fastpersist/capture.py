"""Who may change which bytes of a save, and when: stable, constant, volatile; the gate; the alarm.

*Stable* storages belong to an optimizer: its parameters and the tensors of its state. They change when it steps, and at
no other time; so they are written from where they are while forward and backward run, and what is not written by
then is copied when the step comes (the gate). *Constant* ones were named by the user: they do not change at all.
Everything else is *volatile* and is copied before save() returns. That is always right, only slower; so whatever is
in doubt is volatile: an optimizer without working hooks, a tensor without a version counter, device memory.

The gate is the guarantee. One pre-hook on all optimizers of the process, set by the first save that needs it, makes
a step wait until the stable bytes of every pending save that it could change are captured. With gate="manual" the
caller promises to call wait_captured() first.

The alarm is `_version`, torch's count of in-place changes, noted for every tensor by which an optimizer or the saved
object holds a stable storage, and compared when the gate is passed, or before the file is published if no gate came.
A change in between means that the bytes may be torn: the save fails, nothing is published, and the storage is volatile
from then on. What no counter sees (`.data`, a kernel of somebody's own) `paranoid` looks for, by re-reading samples.

This file decides; bytes are copied by csrc/transfer/snapshot. Which save is written when: `background`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastpersist import _native
from fastpersist.errors import ConfigError, TornStateError
from fastpersist.pipeline import is_host_memory

__all__ = ["Arena", "Capture", "Kind", "Owners", "Sources"]

_log = logging.getLogger("fastpersist")

Kind = _native.SourceKind

_SAMPLE_COUNT = 64
_SAMPLE_BYTES = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Sources(Protocol):
    """What is captured of a file: `saving.Container` without the writing."""

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


# ------------------------------------------------------------------------------------------------------- the arena


class Arena:
    """Host memory for captured bytes, shared by saves that follow each other.

    Args:
        max_bytes: Its limit; None for the bytes of the state, but at most half of what is available at the first save.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ConfigError(f"max_host_bytes is a number of bytes, 0 or more, not {max_bytes}")
        self._max_bytes = max_bytes
        self._half_bytes: int | None = None
        self._native: _native.Arena | None = None
        self._process = 0

    def for_state(self, state_bytes: int) -> _native.Arena:
        """Return the native arena, with room for a state of this size as far as the limit allows."""
        if self._native is None or self._process != os.getpid():
            self._native = _native.Arena(0)
            self._process = os.getpid()
        if self._max_bytes is not None:
            limit_bytes = self._max_bytes
        else:
            if self._half_bytes is None:
                self._half_bytes = available_host_bytes() // 2
            # Sources start on cache lines and blocks are whole, so a little more than the state itself.
            limit_bytes = min(state_bytes + state_bytes // 64 + (8 << 20), self._half_bytes)
        self._native.grow(limit_bytes)
        return self._native


def available_host_bytes() -> int:
    """Return how much memory this process could still take: MemAvailable, and what its cgroups leave."""
    available_bytes = 1 << 62
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    available_bytes = int(line.split()[1]) << 10
    except OSError:
        pass
    return min([available_bytes, *_cgroup_room_bytes()])


def _cgroup_room_bytes() -> Iterator[int]:
    """Yield what each memory cgroup above this process still has room for."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        while True:
            limit_bytes = _number_in(f"{root}{path.rstrip('/')}/{limit}")
            used_bytes = _number_in(f"{root}{path.rstrip('/')}/{usage}")
            if limit_bytes is not None and used_bytes is not None:
                yield max(0, limit_bytes - used_bytes)
            if path in ("", "/"):
                break
            path = os.path.dirname(path)


def _number_in(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):  # not there, or "max"
        return None


# ------------------------------------------------------------------------------------------------- who owns what

_torn: dict[int, StorageWeakRef] = {}  # storages that were caught changing before the gate: volatile for good
_replayed: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers whose steps are CUDA graphs: no hook runs


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that have the storages: those inside a wrapper subclass (DTensor …), else the tensor itself."""
    anything: Any = tensor  # else mypy takes a tensor that is a wrapper for impossible
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(anything):
        yield tensor
    else:
        for name in anything.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(anything, name))


def storage_keys(tensor: torch.Tensor) -> list[int]:
    """Return what identifies the storages of a tensor while they live; none for sparse, meta and the like."""
    found = []
    for inner in inner_tensors(tensor):
        try:
            found.append(inner.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            continue
    return found


class Owners:
    """The optimizers whose storages are stable, found by unwrapping what the user gave.

    Args:
        optimizer: An optimizer, something that wraps one as `.optimizer`, a list of those, or None.
        constant: Modules, tensors, and iterables or dicts of them, whose storages do not change at all.
        gate: "optimizer": steps wait by themselves; "manual": the caller calls wait_captured() before anything changes.

    Raises:
        ConfigError: Unknown gate, or something that is no optimizer or no tensor.
    """

    def __init__(self, optimizer: object = None, constant: object = (), gate: str = "optimizer") -> None:
        if gate not in ("optimizer", "manual"):
            raise ConfigError(f"gate is 'optimizer' or 'manual', not {gate!r}")
        self.gate = gate
        self._given = optimizer
        self._constant = constant
        self.optimizers()
        for _ in _tensors_in(constant):
            pass

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers themselves, with the wrappers taken off."""
        given = self._given
        if given is None:
            return []
        many = given if isinstance(given, list | tuple) else [given]
        return [_unwrapped(one) for one in many]

    def stable(self) -> tuple[dict[int, list[torch.Tensor]], str]:
        """Find the storages that only an optimizer's step changes, as they are now.

        Returns:
            For each storage key the tensors by which an optimizer holds it; and why storages of an optimizer are
            not among them, "" when all are.
        """
        found: dict[int, list[torch.Tensor]] = {}
        why_not = "" if self._given is not None else "no optimizer was given"
        for optimizer in self.optimizers():
            reason = self._why_volatile(optimizer)
            if reason:
                why_not = reason
                continue
            for tensor in _tensors_of(optimizer):
                for key in storage_keys(tensor):
                    found.setdefault(key, []).append(tensor)
        return found, why_not

    def constant(self) -> dict[int, list[torch.Tensor]]:
        """Find the storages that were declared constant."""
        found: dict[int, list[torch.Tensor]] = {}
        for tensor in _tensors_in(self._constant):
            for key in storage_keys(tensor):
                found.setdefault(key, []).append(tensor)
        return found

    def _why_volatile(self, optimizer: Optimizer) -> str:
        name = type(optimizer).__name__
        if optimizer in _replayed:
            return f"{name} steps inside a CUDA graph, where no hook runs"
        if self.gate == "manual":
            return ""
        if not getattr(type(optimizer).step, "hooked", False):
            return f"{name}.step() runs no hooks (torch.optim.Optimizer.__init__ was not called, or step was replaced)"
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
            return f"{name} changes parameters in train() and eval(), outside its step; use gate='manual'"
        return ""


def _unwrapped(given: object) -> Optimizer:
    """Take wrappers off: the innermost `.optimizer` is the one whose step changes parameters."""
    seen = set()
    inner = given
    while id(inner) not in seen:
        seen.add(id(inner))
        inner = getattr(inner, "optimizer", inner)
    if not isinstance(inner, Optimizer):
        raise ConfigError(
            f"optimizer= takes a torch.optim.Optimizer, something with one as .optimizer, or a list; "
            f"not {type(given).__name__}"
        )
    return inner


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield what an optimizer's step may change: its parameters, and the tensors anywhere inside its state."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for value in optimizer.state.values():
        yield from _tensors_below(value)


def _tensors_below(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_below(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _tensors_below(inner)


def _tensors_in(constant: object) -> Iterator[torch.Tensor]:
    if isinstance(constant, torch.Tensor):
        yield constant
    elif isinstance(constant, torch.nn.Module):
        yield from constant.parameters()
        yield from constant.buffers()
    elif isinstance(constant, Mapping):
        for value in constant.values():
            yield from _tensors_in(value)
    elif isinstance(constant, Iterable) and not isinstance(constant, str | bytes):
        for value in constant:
            yield from _tensors_in(value)
    else:
        raise ConfigError(
            f"constant= takes modules, tensors, and lists or dicts of them, not {type(constant).__name__}"
        )


# ------------------------------------------------------------------------------------------------------ the gate

_pending: list[Capture] = []  # those that a step must pass
_pending_lock = threading.Lock()
_hook_is_set = False


def _before_step(optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
    """Run before every optimizer's step in this process: nothing that it changes may still be uncaptured."""
    if not _pending:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _replayed.add(optimizer)
    for capture in list(_pending):
        if capture.is_changed_by(optimizer):
            capture.wait_captured()


def _forget_pending() -> None:
    """In a forked child: the saves, and the threads that write them, are the parent's."""
    global _pending_lock
    _pending_lock = threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_forget_pending)


class _Watched:
    """A tensor and its count of changes when save() saw it."""

    __slots__ = ("container", "source", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int, container: Sources, source: int) -> None:
        self.tensor = tensor
        self.version = version
        self.container = container
        self.source = source


class Capture:
    """The bytes of one save, of all its files, from save() until they are written.

    `add` each file, then `copy_volatile`; the saving thread does both. Then any thread may wait.

    Args:
        owners: Whose storages are stable.
        arena: Where bytes go that cannot stay where they are.
        paranoid: Re-read samples of the stable bytes for changes that no counter sees.
        on_gate: Told the seconds that a thread waited at the gate, each time.
    """

    def __init__(
        self,
        owners: Owners,
        arena: Arena,
        *,
        paranoid: bool = False,
        on_gate: Callable[[float], None] | None = None,
    ) -> None:
        self._arena = arena
        self._paranoid = paranoid
        self._on_gate = on_gate
        self._gate = owners.gate
        self._optimizers = owners.optimizers()
        self._stable, self.why_volatile = owners.stable()
        self._constant = owners.constant()
        self._snapshots: list[_native.Snapshot] = []
        self._watched: list[_Watched] = []
        self._constants_watched: list[_Watched] = []
        self._samples: list[tuple[Sources, int, int, bytes]] = []
        self._stable_keys: set[int] = set()
        self._kept: list[object] = []
        self._lock = threading.Lock()
        self._sealed = False
        self._started_s = time.monotonic()
        self.capture_s = 0.0
        """Seconds from the save's start until everything but constants could be changed again."""
        self._error: TornStateError | None = None
        self.bytes_of = {Kind.STABLE: 0, Kind.CONSTANT: 0, Kind.VOLATILE: 0}

    # --- on the thread that saves

    def add(self, container: Sources) -> _native.Snapshot:
        """Sort the bytes of a file by who may change them when, and note the counters of what is stable.

        Returns:
            The snapshot that the file is written from.
        """
        snapshot = _native.Snapshot(self._arena.for_state(sum(source.size_bytes for source in container.sources)))
        reached_by = self._reached_by(container)
        for index, source in enumerate(container.sources):
            storage = source.storage
            kind, watched = self._kind_of(storage, reached_by[index])
            if not is_host_memory(storage):
                storage = storage.cpu()  # this is its capture; the copy is ours and changes no more
                kind, watched = Kind.CONSTANT, []
            self._kept.append(storage)
            snapshot.add(storage.data_ptr() + source.offset_bytes, source.size_bytes, kind)
            self.bytes_of[kind] += source.size_bytes
            into = self._watched if kind == Kind.STABLE else self._constants_watched
            into.extend(_Watched(tensor, version, container, index) for tensor, version in watched)
            if kind == Kind.STABLE:
                self._stable_keys.add(source.storage._cdata)
        self._snapshots.append(snapshot)
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
        return not self.remaining_bytes("volatile")

    def hold(self) -> None:
        """From now on the optimizers' steps wait for this capture."""
        global _hook_is_set
        if not self._stable_keys:
            return
        if self._gate == "manual":
            return
        with _pending_lock:
            if not _hook_is_set:
                register_optimizer_step_pre_hook(_before_step)
                _hook_is_set = True
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
        if self._sealed:
            return True
        if self.remaining_bytes("stable") or self.remaining_bytes("volatile"):
            return False
        self.seal()
        return True

    def wait_captured(self, timeout_s: float | None = None) -> None:
        """Make it safe to change everything but constants: copy what the writer has not reached, or wait for it.

        Raises:
            TimeoutError: With a timeout: not all is captured.
        """
        if self._sealed:
            return
        started_s = time.monotonic()
        try:
            if self.is_torn():
                return
            for wait in (False, True):  # first what finds room, of all files
                if wait and timeout_s is not None:
                    self._wait_until(started_s + timeout_s)
                    continue
                for snapshot in reversed(self._snapshots):
                    snapshot.capture(Kind.STABLE, wait)
                    snapshot.capture(Kind.VOLATILE, wait)
            self.seal()
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

    def check(self) -> None:
        """Before a file is published: raise if what was written may be torn.

        Raises:
            TornStateError: It may; the message names the tensor.
        """
        self.seal()
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
            self._kept.clear()
            self._stable.clear()
            self._constant.clear()
            self._sealed = True

    # --- inside

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
            held = [tensor for tensor in tensors if type(tensor) in _PLAIN and key in storage_keys(tensor)]
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
            return kind, [(tensor, tensor._version) for tensor in (*held_by, *reached_by)]
        except RuntimeError:  # inference tensors do not count
            return Kind.VOLATILE, []

    def _look_for_changes(self) -> None:
        if self._error is None:
            self._compare(self._watched, "it belongs to an optimizer, and only its step may change it")
        if self._error is None:
            self._compare_samples()

    def _compare(self, watched: list[_Watched], rule: str) -> None:
        for entry in watched:
            if entry.tensor._version != entry.version:
                self._tear(entry.container, entry.source, rule)
                return

    def _tear(self, container: Sources, source: int, rule: str) -> None:
        storage = container.sources[source].storage
        _torn[storage._cdata] = StorageWeakRef(storage)
        for entry in (*self._watched, *self._constants_watched):  # all that changed, so that one cause fails one save
            if entry.tensor._version != entry.version:
                changed = entry.container.sources[entry.source].storage
                _torn[changed._cdata] = StorageWeakRef(changed)
        names = ", ".join(container.names_of(source)) or f"storage {source}"
        self._error = TornStateError(
            f"{names} was changed in place after save() and before it was captured ({rule}). Nothing was published; "
            "from now on it is copied before save() returns. To save it without that copy, call wait_captured() "
            "before you change it"
        )

    def _take_samples(self, container: Sources) -> None:
        stable = [
            index
            for index, source in enumerate(container.sources)
            if source.storage._cdata in self._stable_keys and is_host_memory(source.storage)
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
