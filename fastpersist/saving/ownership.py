"""Finds which storages are stable and which are constant, anew at each save.

Storages of an optimizer are stable only if its step runs hooks, because the gate (`capture`) is one of them. The
storages of tensor subclasses that wrap others (DTensor …) are those of the tensors inside.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from fastpersist import _native
from fastpersist.cached import cached_property
from fastpersist.errors import ConfigError
from fastpersist.saving.sources import Holders
from fastpersist.transfer.tensor_memory import PLAIN_TYPES

__all__ = [
    "Owned",
    "Owners",
    "Ownership",
    "TensorsOfOwner",
    "note_step_of",
    "step_count",
    "storage_key",
    "storage_keys",
]

_step_count = 0  # steps of all optimizers since the first save that a step waits for
_replayed: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers whose steps are CUDA graphs: no hook runs
_STEP_CODE = Optimizer.profile_hook_step(len).__code__  # of what torch wraps around each optimizer's step
_NO_STORAGE = (NotImplementedError, RuntimeError, ValueError)  # ValueError: a parameter of a lazy module


@functools.lru_cache(maxsize=256)
def _wraps(kind: type) -> bool:
    """Tell whether tensors of a type have their elements in tensors inside them (DTensor …)."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def storage_keys(tensor: torch.Tensor) -> list[int]:
    """Return what identifies the storages of a tensor while they live; none for sparse, meta and the like."""
    kind = type(tensor)
    if kind in PLAIN_TYPES or not _wraps(kind):
        key = storage_key(tensor)
        return [] if key is None else [key]
    anything: Any = tensor
    inside = [getattr(anything, name) for name in anything.__tensor_flatten__()[0]]
    # A DTensor names its mesh too, which is no tensor.
    return [key for inner in inside if isinstance(inner, torch.Tensor) for key in storage_keys(inner)]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return what identifies the one storage of a plain tensor while it lives; None where there is none."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except _NO_STORAGE:
        return None
    return key


class TensorsOfOwner:
    """Tensors with the keys of their storages, which are looked up on demand: a file knows most of them.

    Attributes:
        tensors: The tensors, as the owner has them.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    @cached_property
    def held(self) -> list[int]:
        """The key of each storage (`storage_key`); not one for each tensor: a tensor may have none, or several."""
        return list(_held_by(self.tensors).held)


Owned: TypeAlias = TensorsOfOwner | Holders
"""The tensors by which an owner holds storages."""


def _held_by(tensors: list[torch.Tensor]) -> Holders:
    """Return tensors with the keys of their storages."""
    if PLAIN_TYPES.issuperset(map(type, tensors)):
        try:
            return Holders(tensors, [storage._cdata for storage in map(torch.Tensor.untyped_storage, tensors)])
        except _NO_STORAGE:
            pass
    found = Holders([], [])
    for tensor in tensors:
        for key in storage_keys(tensor):
            found.add(tensor, key)
    return found


@dataclass(frozen=True)
class Ownership:
    """The owners of storages at one moment.

    Attributes:
        stable: The tensors by which optimizers hold storages that only their steps change, with the key of each.
        constant: The same for storages that were declared constant.
        why_volatile: Why storages of an optimizer are not among the stable ones; "" when all are.
    """

    stable: Owned
    constant: Owned
    why_volatile: str


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
            raise ConfigError(f"gate must be 'optimizer' or 'manual', not {gate!r}")
        self.gate = gate
        self._given = optimizer
        self._constant = _kept(constant)
        self.optimizers()

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers themselves, with the wrappers taken off."""
        given = self._given
        if given is None:
            return []
        many = given if isinstance(given, list | tuple) else [given]
        return [_unwrapped(one) for one in many]

    def look(self) -> Ownership:
        """Find the owners of storages now."""
        stable, why_volatile = self.stable()
        return Ownership(stable, self.constant(), why_volatile)

    def stable(self) -> tuple[Owned, str]:
        """Find the storages that only an optimizer's step changes, as they are now.

        Returns:
            The tensors by which optimizers hold them, with the key of each; and why storages of an optimizer are not
            among them; "" when all are.
        """
        if self._given is not None and _is_inside_step():
            return Holders([], []), "an optimizer's step has begun, and has passed the barrier"
        owned: list[torch.Tensor] = []
        why_not = "" if self._given is not None else "no optimizer was given"
        for optimizer in self.optimizers():
            reason = self._why_volatile(optimizer)
            if reason:
                why_not = reason
                continue
            found = _tensors_of(optimizer)
            if owned:
                owned += found
            else:
                owned = found  # most have one optimizer, and its list of many thousands is not copied
        return TensorsOfOwner(owned) if owned else Holders([], []), why_not

    def constant(self) -> Holders:
        """Find the storages that were declared constant, without those that an optimizer trains all the same."""
        if isinstance(self._constant, list) and not self._constant:
            return Holders([], [])
        trained = {
            key
            for optimizer in self.optimizers()
            for tensor in _tensors_of(optimizer, frozen=False)
            for key in storage_keys(tensor)
        }
        found = Holders([], [])
        for tensor, key in zip(*_held_by(list(_tensors_in(self._constant))), strict=True):
            if key not in trained:
                found.add(tensor, key)
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


def _is_inside_step() -> bool:
    """Tell whether this thread is in a hook before an optimizer's step, or in its closure.

    A hook of ours would not see the step in which the first save of a process is made, nor that a step has raised an
    error. In a hook after the step, `out` is what the step has returned.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _STEP_CODE and "out" not in frame.f_locals:
            return True
        frame = frame.f_back
    return False


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


def _tensors_of(optimizer: Optimizer, *, frozen: bool = True) -> list[torch.Tensor]:
    """Return what an optimizer's step may change: its parameters, and the tensors anywhere inside its state.

    Args:
        optimizer: The optimizer, without its wrappers.
        frozen: Include the parameters that require no gradient now.
    """
    found = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if frozen or parameter.requires_grad
    ]
    if type(optimizer.state) in (dict, defaultdict):  # each value is one of a parameter
        _native.add_tensors(optimizer.state, found, torch.Tensor, _add_tensors)
    else:
        for value in optimizer.state.values():
            _add_tensors(value, found)
    return found


def _add_tensors(value: object, found: list[torch.Tensor]) -> None:
    """Append the tensors anywhere inside a value."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict | Mapping):  # dict first: the other takes long to tell
        for inner in value.values():
            if type(inner) is torch.Tensor:  # nearly all: no call for them
                found.append(inner)
            else:
                _add_tensors(inner, found)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            _add_tensors(inner, found)


def _kept(constant: object) -> object:
    """Return the same, with lists in place of iterators, which could be walked once only.

    Raises:
        ConfigError: Something in it is neither a tensor nor a module.
    """
    if isinstance(constant, torch.Tensor | torch.nn.Module):
        return constant
    if isinstance(constant, Mapping):
        return [_kept(value) for value in constant.values()]
    if isinstance(constant, Iterable) and not isinstance(constant, str | bytes):
        return [_kept(value) for value in constant]
    raise ConfigError(f"constant= takes modules, tensors, lists and dicts of them, not {type(constant).__name__}")


def _tensors_in(constant: object) -> Iterator[torch.Tensor]:
    if isinstance(constant, torch.Tensor):
        yield constant
    elif isinstance(constant, torch.nn.Module):
        yield from constant.parameters()
        yield from constant.buffers()
    elif isinstance(constant, list):
        for value in constant:
            yield from _tensors_in(value)


def note_step_of(optimizer: Optimizer, *, is_replayed: bool) -> None:
    """Note a step of an optimizer; with `is_replayed` a CUDA graph captures it, whose replays run no hook."""
    global _step_count
    _step_count += 1
    if is_replayed:
        _replayed.add(optimizer)


def step_count() -> int:
    """Return how many optimizer steps were noted; while it does not grow, what `Owners.look` found stays true."""
    return _step_count
