"""Walk a target beside what was saved for it: find which part goes where, and every reason why the two do not fit.

What is alike for a file (`loading.target_plan`) and for shards (`dcp.target_plan`) is here: dicts, lists, tuples, plain
values, objects with load_state_dict, and the tensors that an optimizer keeps. Subclasses look into the saved state, and
plan modules, optimizers and single tensors. Reads no file, and changes no target before the steps are taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from fastpersist.loading.misfit import IncompatibleKeys, joined_name, misfit_of_shape, why_not_fitting

__all__ = [
    "MODULES",
    "OPTIMIZERS",
    "OTHERS",
    "Path",
    "Step",
    "TargetWalk",
    "held_item",
    "keep_group_tensors",
    "keep_state_tensor",
    "kind_of",
    "tensors_in",
    "unwrapped_optimizer",
]

Path: TypeAlias = tuple[Any, ...]
"""Keys and indexes that lead from what was saved to a part of it."""

_WRAPPERS_MAX = 16

MODULES, OPTIMIZERS, OTHERS = range(3)
"""The order of steps: modules and tensors, then optimizers, then what may look at either."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What remains to be done with a part of what was saved once the tensors of the targets are filled.

    Attributes:
        rank: Steps with a lower one come first: MODULES, OPTIMIZERS, OTHERS.
        path: Of the part.
        name: Of the part of the target, for messages.
        apply: Takes the part, in which tensors of targets stand for those that filled them.
    """

    rank: int
    path: Path
    name: str
    apply: Callable[[Any], object]


class TargetWalk(ABC):
    """Plans how targets get what was saved for them.

    Attributes:
        steps: To be taken, in the order of their ranks, once all tensors are filled.
        problems: Why the targets do not fit.
        keys: Names that are on one side only.
        unread: Paths of saved tensors that nothing in the target takes.
    """

    _where = "file"
    """What the saved state is called in messages: "file" or "checkpoint"."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.problems: list[str] = []
        self.keys = IncompatibleKeys([], [])
        self.unread: list[Path] = []

    # --- what differs: single tensors and what holds them

    @abstractmethod
    def _add_tensor(self, path: Path, name: str, target: torch.Tensor, value: Any) -> None: ...

    @abstractmethod
    def _add_module(self, path: Path, name: str, module: torch.nn.Module, value: Any) -> None: ...

    @abstractmethod
    def _add_optimizer(self, path: Path, name: str, target: object, optimizer: Optimizer, value: Any) -> bool:
        """Plan an optimizer, bare or wrapped; return False if this is left to the target's load_state_dict."""

    @abstractmethod
    def _add_stateful(self, path: Path, name: str, target: Any, value: Any) -> None: ...

    # --- what may differ: how the saved state is looked into

    def _add_step(self, rank: int, path: Path, name: str, value: Any, apply: Callable[[Any], object]) -> None:
        self.steps.append(Step(rank, path, name, apply))

    def _add_missing(self, name: str, target: object) -> None:
        self.keys.missing_keys.append(name)

    def _add_unexpected(self, path: Path, name: str) -> None:
        self.keys.unexpected_keys.append(name)
        self.unread.append(path)

    def _saved_key(self, key: Any) -> Any:
        """Return what stands in the saved state for a key of a dict."""
        return key

    def _saved_kind(self, value: Any) -> str:
        """Say for a message what a part of the saved state is."""
        return kind_of(value)

    def _has_tensors(self, value: Any) -> bool:
        return any(True for _ in tensors_in(value))

    def _is_replaced(self, target: list[Any], value: Any) -> bool:
        """Tell whether a list gets other elements, instead of having its own ones filled."""
        return isinstance(value, list | tuple) and not any(map(self._is_restorable, target))

    def _is_restorable(self, item: object) -> bool:
        """Tell what is restored in place from what is replaced, as is a tuple that holds nothing else."""
        if isinstance(item, tuple):
            return any(map(self._is_restorable, item))
        return isinstance(item, torch.Tensor | Mapping | list) or callable(getattr(item, "load_state_dict", None))

    # --- the walk

    def add(self, path: Path, name: str, target: object, value: Any) -> None:
        """Plan how a target gets what was saved in its place.

        Args:
            path: Of that.
            name: Of the target, for messages.
            target: A tensor, a module, an optimizer, what has load_state_dict, or dicts, lists and tuples of these.
            value: What was saved.
        """
        if isinstance(target, torch.Tensor):
            self._add_tensor(path, name, target, value)
            return
        if isinstance(target, torch.nn.Module):
            self._add_module(path, name, target, value)
            return
        optimizer = unwrapped_optimizer(target)
        if optimizer is not None and self._add_optimizer(path, name, target, optimizer, value):
            return
        if callable(getattr(target, "load_state_dict", None)):
            self._add_stateful(path, name, target, value)
        elif isinstance(target, Mapping):
            self._add_mapping(path, name, target, value)
        elif isinstance(target, list) or (isinstance(target, tuple) and self._is_restorable(target)):
            self._add_sequence(path, name, target, value)
        else:
            self.problems.append(f"{name} is {kind_of(target)} in the target, which cannot be restored in place")

    def fits(self, name: str, target: torch.Tensor, shape: Sequence[int] | None, value: Any) -> bool:
        """Tell whether a tensor may take a saved one of that shape, None for no tensor; else note the reason."""
        if shape is None:
            problem: str | None = (
                f"{name} is a tensor in the target, but {self._saved_kind(value)} in the {self._where}"
            )
        else:
            problem = why_not_fitting(name, target, shape, self._where)
        if problem is not None:
            self.problems.append(problem)
        return problem is None

    def add_misfit_of_shape(self, name: str, own: Sequence[int], saved: Sequence[int]) -> None:
        """Note that shapes differ."""
        self.problems.append(misfit_of_shape(name, own, saved, self._where))

    def add_unknown_sharding(self, name: str, saved: Sequence[int], parameter: torch.Tensor) -> None:
        """Note that state which an optimizer does not have yet cannot be sharded like its parameter."""
        self.problems.append(
            f"{name} has shape {tuple(saved)}, its parameter {tuple(parameter.shape)}, so it is not known how it is "
            "sharded; one step of the optimizer, before load(), makes its state"
        )

    def _add_mapping(self, path: Path, name: str, target: Mapping[Any, object], value: Any) -> None:
        if not isinstance(value, Mapping):
            self._refuse_kind(name, "a dict", value)
            return
        is_strict = any(map(self._is_restorable, target.values()))  # else there is nothing to restore in place
        known = {self._saved_key(key): key for key in target}
        for saved, key in known.items():
            item, inner = target[key], joined_name(name, saved)
            if not self._is_restorable(item):
                continue
            if saved not in value:
                self._add_missing(inner, item)
                continue
            self.add((*path, saved), inner, item, value[saved])
            if isinstance(target, MutableMapping):
                self._add_values(target, key, (*path, saved), inner, value[saved])
        for saved, entry in value.items():
            inner = joined_name(name, saved)
            if saved not in known and is_strict and self._has_tensors(entry):
                self._add_unexpected((*path, saved), inner)
            elif isinstance(target, MutableMapping) and not (
                saved in known and self._is_restorable(target[known[saved]])
            ):
                self._set(target, known.get(saved, saved), (*path, saved), inner, entry)

    def _add_sequence(self, path: Path, name: str, target: list[Any] | tuple[Any, ...], value: Any) -> None:
        if isinstance(target, list) and self._is_replaced(target, value):
            self._set(target, slice(None), path, name, value)
            return
        if not isinstance(value, list | tuple):
            self._refuse_kind(name, kind_of(target), value)
            return
        if len(target) != len(value):
            self.problems.append(
                f"{name or 'all'} has {len(target)} elements in the target, {len(value)} in the {self._where}"
            )
            return
        for index, item in enumerate(target):
            at, inner = (*path, index), f"{name}[{index}]"
            if self._is_restorable(item):
                self.add(at, inner, item, value[index])
                if isinstance(target, list):
                    self._add_values(target, index, at, inner, value[index])
            elif isinstance(target, list):
                self._set(target, index, at, inner, value[index])

    def _refuse_kind(self, name: str, kind: str, value: Any) -> None:
        self.problems.append(
            f"{name or 'all'} is {kind} in the target, but {self._saved_kind(value)} in the {self._where}"
        )

    def _add_values(self, container: Any, key: Any, path: Path, name: str, value: Any) -> None:
        """Plan the values beside what is restored in place in a tuple: another tuple takes its place."""
        if self._has_values(container[key]):
            self._set(container, key, path, name, value, container[key])

    def _set(self, container: Any, key: Any, path: Path, name: str, value: Any, item: object = None) -> None:
        def put(loaded: Any) -> None:
            container[key] = self._with_values(item, loaded)

        self._add_step(OTHERS, path, name, value, put)

    def _has_values(self, item: object) -> bool:
        """Tell whether an item is a tuple that is restored in place, and holds what can only be replaced."""
        if not isinstance(item, tuple) or not self._is_restorable(item):
            return False
        return any(self._has_values(one) or not self._is_restorable(one) for one in item)

    def _with_values(self, item: Any, loaded: Any) -> Any:
        """Return a tuple with what it holds that is restored in place, and the loaded values beside that."""
        if not self._has_values(item):
            return item if self._is_restorable(item) else loaded
        make = getattr(type(item), "_make", type(item))  # a named tuple's takes an iterable, too
        return make(self._with_values(own, new) for own, new in zip(item, loaded, strict=True))


def kind_of(value: object) -> str:
    """Say for a message what something is."""
    return f"a value of type {type(value).__name__}"


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """List the tensors of nested containers, each container once."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (Mapping, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(item.values() if isinstance(item, Mapping) else item)


# --- optimizers


def unwrapped_optimizer(target: object) -> Optimizer | None:
    """Find the optimizer that a target is, or is a wrapper of; None when it is neither."""
    found = target
    for _ in range(_WRAPPERS_MAX):
        inner = getattr(found, "optimizer", None)
        if inner is None or isinstance(found, torch.nn.Module):
            break
        found = inner
    return found if isinstance(found, Optimizer) else None


def keep_group_tensors(before: Sequence[Mapping[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Put a group's own tensors (a learning rate) back, with their new values: schedulers and graphs know them."""
    uses: dict[int, list[tuple[dict[str, Any], str]]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for old, new in zip(before, groups, strict=False):
        for key, value in old.items():
            if isinstance(value, torch.Tensor) and new.get(key) is not value:
                uses.setdefault(id(value), []).append((new, key))
                tensors[id(value)] = value
    for identity, places in uses.items():
        kept, values = tensors[identity], [group.get(key) for group, key in places]
        first = values[0]
        # Groups that shared a tensor and now differ cannot share it any longer.
        if isinstance(first, torch.Tensor) and all(_is_equal(first, value) for value in values):
            if (kept.shape, kept.dtype, kept.device) == (first.shape, first.dtype, first.device):
                with torch.no_grad():
                    kept.copy_(first)
                for group, key in places:
                    group[key] = kept


def _is_equal(first: torch.Tensor, other: object) -> bool:
    return isinstance(other, torch.Tensor) and first.shape == other.shape and bool(torch.equal(first, other))


def keep_state_tensor(state: Any, inside: Path, target: torch.Tensor) -> None:
    """Put a filled tensor back where load_state_dict put a conversion of it to the parameter's dtype.

    Args:
        state: Of the parameter, after load_state_dict.
        inside: Keys that lead to the tensor in it.
        target: The tensor that was filled.
    """
    for key in inside[:-1]:
        state = held_item(state, key)
    found = held_item(state, inside[-1]) if inside else None
    if isinstance(found, torch.Tensor) and found is not target and isinstance(state, (dict, list)):
        if (found.shape, found.device) == (target.shape, target.device):
            state[inside[-1]] = target


def held_item(container: Any, key: Any) -> Any:
    """Return what a dict, a list or a tuple has there; None where it has nothing."""
    if isinstance(container, Mapping):
        return container.get(key)
    return container[key] if isinstance(container, (list, tuple)) and key < len(container) else None
