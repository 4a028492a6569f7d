"""Restores targets: walks a target together with its saved state, reports why they do not fit, changes the target.

This module has the code that files (`loading.target_plan`) and shards (`dcp.target_plan`) share:

- the error for a target that does not fit (`refuse_misfit`);
- `TargetWalk`, which plans dicts, lists, tuples, plain values, objects with load_state_dict, and the tensors that an
  optimizer keeps. Subclasses look into the saved state, and plan modules, optimizers and single tensors. The walk reads
  no file and changes no target: it leaves `Step`s;
- `TargetChange`, which takes these steps once all tensors are filled. Its errors name what is partly overwritten.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer

from fastpersist.errors import ConfigError, CorruptionError, FastPersistError, PeerError, StorageError

__all__ = [
    "EXTRA_STATE_KEY",
    "MODULES",
    "OPTIMIZERS",
    "OTHERS",
    "SCALAR_KEYS",
    "IncompatibleKeys",
    "Path",
    "Step",
    "TargetChange",
    "TargetWalk",
    "as_loaded",
    "has_stock_load",
    "held_item",
    "is_extra_state",
    "joined_name",
    "keep_group_tensors",
    "keep_state_tensor",
    "kind_of",
    "misfit",
    "missing_keys",
    "refuse_misfit",
    "tensors_in",
    "unwrapped_optimizer",
    "why_not_fitting",
]

Path: TypeAlias = tuple[Any, ...]
"""Keys and indexes that lead from what was saved to a part of it."""

SCALAR_KEYS = (str, int, float, bool, bytes, type(None))
"""Types of keys that a scan of a pickle knows; keys of other types may exist only after unpickling."""

EXTRA_STATE_KEY = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX

_WRAPPERS_MAX = 16
_SHOWN_COUNT = 10

MODULES, OPTIMIZERS, OTHERS = range(3)
"""The order of steps: modules and tensors, then optimizers, then what may look at either."""


# --------------------------------------------------------------------------------------------- misfits


class IncompatibleKeys(NamedTuple):
    """The names that `load_into` has ignored, as `Module.load_state_dict` returns them.

    Attributes:
        missing_keys: Names that are in the target, but not in the file.
        unexpected_keys: Names that are in the file, but not in the target.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def joined_name(name: str, key: object) -> str:
    """Name what lies under a key: `model.weight`, `state[0]`."""
    if isinstance(key, str):
        return f"{name}.{key}" if name else key
    return f"{name}[{key!r}]"


def is_extra_state(key: object) -> bool:
    """Tell whether a state_dict key is that of a module's get_extra_state."""
    return isinstance(key, str) and key.rpartition(".")[2] == EXTRA_STATE_KEY


def why_not_fitting(name: str, target: torch.Tensor, shape: Sequence[int], where: str = "file") -> str | None:
    """Say why a tensor cannot take a saved one of a shape; None if it can."""
    if torch.nn.parameter.is_lazy(target):
        return f"{name} has no shape yet (a lazy module); run the module once, then load"
    if target.shape != torch.Size(shape):
        return misfit_of_shape(name, target.shape, shape, where)
    return None


def misfit_of_shape(name: str, own: Sequence[int], saved: Sequence[int], where: str) -> str:
    """Say that two shapes differ."""
    return f"{name} has shape {tuple(own)} in the target, {tuple(saved)} in the {where}"


def refuse_misfit(
    path: str,
    problems: Sequence[str],
    keys: IncompatibleKeys,
    *,
    strict: bool,
    where: str = "file",
    targets: Iterable[object] = (),
) -> None:
    """Refuse a target that does not fit; without `strict`, names that only one side has are accepted.

    Args:
        path: The path of the file, for messages.
        problems: What does not fit, one sentence each.
        keys: The names that only one side has.
        strict: Refuse also names that only one side has.
        where: What holds the state, for messages.
        targets: What was to be filled. The message says so if their hooks may know the names of the file.

    Raises:
        ConfigError: The target does not fit; the message lists every difference.
    """
    found = [f"{name} is in the target, but not in the {where}" for name in keys.missing_keys] if strict else []
    found += problems
    found += [f"{name} is in the {where}, but not in the target" for name in keys.unexpected_keys] if strict else []
    if found:
        refusal = misfit(path, found)
        if strict and keys.missing_keys and any(map(_has_load_hooks, targets)):
            refusal.args = (f"{refusal}{_HOOKS_MAY_RENAME}",)
        raise refusal


_HOOKS_MAY_RENAME = (
    ". Hooks of load_state_dict in the target may rename what an older file holds; such a file needs fastpersist.load "
    "and the module's own load_state_dict"
)


def _has_load_hooks(target: object) -> bool:
    return isinstance(target, torch.nn.Module) and any(module._load_state_dict_pre_hooks for module in target.modules())


def missing_keys(
    held: Collection[object], into: Collection[str], keys: Collection[str] | None, where: str
) -> Iterator[str]:
    """Name the entries that the caller asked for and the state does not have, one sentence for each.

    Args:
        held: The keys of the state.
        into: Keys of the entries that are filled in place.
        keys: Names of the other entries that the caller asked for and that were not found otherwise.
        where: What holds the state, for messages.
    """
    for asked, by in ((into, "in the target"), (keys or (), "among the keys")):
        yield from (f"{key} is {by}, but not in {where}" for key in asked if key not in held)


def misfit(path: str, problems: Sequence[str]) -> ConfigError:
    """Say in one error why a file and a target do not fit; names that differ only by a prefix make one sentence."""
    shown = _by_prefix(problems)
    more = [f"… and {len(shown) - _SHOWN_COUNT} more"] if len(shown) > _SHOWN_COUNT else []
    return ConfigError(
        f"{path} does not fit the target, which was not changed: " + "; ".join([*shown[:_SHOWN_COUNT], *more])
    )


_ONE_SIDED = re.compile(r"(?s)(.+) is in the (target|file|checkpoint), but not in the (?:target|file|checkpoint)")


def _by_prefix(problems: Sequence[str]) -> list[str]:
    """Replace the sentences on names that one side lacks by a single one, if a prefix explains all of them."""
    matches = [_ONE_SIDED.fullmatch(problem) for problem in problems]
    wanted = {match[1] for match in matches if match is not None and match[2] == "target"}
    stored = {match[1] for match in matches if match is not None and match[2] != "target"}
    if not wanted or len(wanted) != len(stored):
        return list(problems)
    first, last = min(wanted | stored), max(wanted | stored)  # a common prefix of these two is common to all
    common = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    owner = first[: first.rfind(".", 0, common) + 1]
    for longer, shorter, side in ((stored, wanted, "file"), (wanted, stored, "target")):
        one = min(longer)
        for name in shorter:
            prefix = one.removeprefix(owner).removesuffix(name.removeprefix(owner))
            if prefix.endswith(".") and {f"{owner}{prefix}{name.removeprefix(owner)}" for name in shorter} == longer:
                others = [problem for problem, match in zip(problems, matches, strict=True) if match is None]
                where = f" of {owner[:-1]}" if owner else ""
                return [
                    f"names{where} differ by the prefix {prefix!r}, which only those of the {side} have "
                    f"({one}, {len(longer)} in all); add or remove it, as wrappers of a module do, or "
                    "pass rename=",
                    *others,
                ]
    return list(problems)


# --------------------------------------------------------------------------------------------- the walk


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What to do with a part of the saved state once the tensors of the targets are filled.

    Attributes:
        rank: The place in the order of steps: MODULES before OPTIMIZERS before OTHERS.
        path: Where the part is in the saved state.
        name: Name of the part of the target, for messages.
        apply: Called with the part, in which the filled tensors of the targets replace the saved ones.
    """

    rank: int
    path: Path
    name: str
    apply: Callable[[Any], object]


class TargetWalk(ABC):
    """Plans how targets get their saved state.

    Attributes:
        steps: What to do, in the order of the ranks, once all tensors are filled.
        problems: Why the targets do not fit, one sentence each.
        keys: Names that only one side has.
        unread: Paths of saved entries that no target takes.
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
        """Describe a part of the saved state for a message."""
        return kind_of(value)

    def _has_tensors(self, value: Any) -> bool:
        return any(True for _ in tensors_in(value))

    def _is_replaced(self, target: list[Any], value: Any) -> bool:
        """Tell whether a list gets other elements, instead of having its own ones filled."""
        return isinstance(value, list | tuple) and not any(map(self._is_restorable, target))

    def _is_restorable(self, item: object) -> bool:
        """Tell whether an item is restored in place; other values, and tuples of nothing but values, are replaced."""
        if isinstance(item, tuple):
            return any(map(self._is_restorable, item))
        return isinstance(item, torch.Tensor | Mapping | list) or callable(getattr(item, "load_state_dict", None))

    # --- what is alike

    def add(self, path: Path, name: str, target: object, value: Any) -> None:
        """Plan how a target gets its part of the saved state.

        Args:
            path: Where that part is in the saved state.
            name: Name of the target, for messages.
            target: A tensor, a module, an optimizer, any object with load_state_dict, or dicts, lists and tuples of
                these.
            value: That part of the saved state.
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
        """Tell whether a tensor can take a saved one of this shape (None: no tensor was saved); if not, note why."""
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
        """Note that nothing tells how to shard state which the optimizer does not have yet."""
        self.problems.append(
            f"{name} has shape {tuple(saved)}, its parameter {tuple(parameter.shape)}, so it is not known how it is "
            "sharded; one step of the optimizer, before load(), makes its state"
        )

    def _add_mapping(self, path: Path, name: str, target: Mapping[Any, object], value: Any) -> None:
        if not isinstance(value, Mapping):
            self._refuse_kind(name, "a dict", value)
            return
        is_strict = any(map(self._is_restorable, target.values()))  # a dict of plain values takes whatever was saved
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
        """Plan the plain values of a tuple that also holds targets: a new tuple with both replaces it."""
        if self._has_values(container[key]):
            self._set(container, key, path, name, value, container[key])

    def _set(self, container: Any, key: Any, path: Path, name: str, value: Any, item: object = None) -> None:
        def put(loaded: Any) -> None:
            container[key] = self._with_values(item, loaded)

        self._add_step(OTHERS, path, name, value, put)

    def _has_values(self, item: object) -> bool:
        """Tell whether an item is a tuple that holds targets and also plain values, which can only be replaced."""
        if not isinstance(item, tuple) or not self._is_restorable(item):
            return False
        return any(self._has_values(one) or not self._is_restorable(one) for one in item)

    def _with_values(self, item: Any, loaded: Any) -> Any:
        """Return a tuple of the targets in `item` and of the loaded values beside them."""
        if not self._has_values(item):
            return item if self._is_restorable(item) else loaded
        make = getattr(type(item), "_make", type(item))  # a named tuple's takes an iterable, too
        return make(self._with_values(own, new) for own, new in zip(item, loaded, strict=True))


def kind_of(value: object) -> str:
    """Describe a value for a message."""
    return f"a value of type {type(value).__name__}"


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """List the tensors of nested containers, each container once."""
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (Mapping, list, tuple, set, frozenset)) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(item.values() if isinstance(item, Mapping) else item)


# --------------------------------------------------------------------------------------------- modules

_STOCK_LOADS = (
    torch.nn.Module._load_from_state_dict,
    torch.nn.BatchNorm1d._load_from_state_dict,  # for a file without num_batches_tracked, it keeps that of the module
)


def has_stock_load(module: torch.nn.Module) -> bool:
    """Tell whether load_state_dict only copies tensors."""
    stock = torch.nn.Module
    return all(
        type(one).load_state_dict is stock.load_state_dict
        and type(one)._load_from_state_dict in _STOCK_LOADS
        and type(one).set_extra_state is stock.set_extra_state
        and not one._load_state_dict_pre_hooks
        and not one._load_state_dict_post_hooks
        for one in module.modules()
    )


def as_loaded(module: torch.nn.Module, filled: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a module's filled tensors as hooks of its load_state_dict expect them: they may compute with each."""
    found = dict(filled)
    if not has_stock_load(module):
        seen: set[int] = set()
        for key, tensor in filled.items():
            if id(tensor) in seen:  # tied: when this name's turn comes, the first one's hook has changed the memory
                found[key] = tensor.detach().clone()
            elif tensor.requires_grad:
                found[key] = tensor.detach()
            seen.add(id(tensor))
    return found


# --------------------------------------------------------------------------------------------- optimizers


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
    """Keep the tensors of parameter groups (a learning rate), with the new values: schedulers and graphs hold them."""
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
    """Put a filled tensor back where load_state_dict has replaced it by a copy in the parameter's dtype.

    Args:
        state: The parameter's state after load_state_dict.
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
    """Return the item of a dict, a list or a tuple; None if it has no such item."""
    if isinstance(container, Mapping):
        return container.get(key)
    return container[key] if isinstance(container, (list, tuple)) and key < len(container) else None


# --------------------------------------------------------------------------------------------- the change


class TargetChange(AbstractContextManager["TargetChange"]):
    """A context manager around everything that changes targets: its errors name those that are partly overwritten.

    Args:
        path: The file or directory that is loaded, for messages.
        on_touched: Called with the key of a target directly before its first change.

    Raises:
        StorageError, CorruptionError, PeerError: The block raised it; the message now names the changed targets.
        StorageError: Tensors were being filled, and an error that is none of ours came.
        ConfigError: A target refused its part of the saved state.
    """

    def __init__(self, path: str, on_touched: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._on_touched = on_touched
        self._touched: dict[str, None] = {}  # in the order of their first change
        self._step_name: str | None = None

    def touch(self, key: str) -> None:
        """Note that the target with this key is about to change."""
        if key not in self._touched:
            self._touched[key] = None
            if self._on_touched is not None:
                self._on_touched(key)

    def take(self, steps: Iterable[Step], part_of: Callable[[Step], Any]) -> None:
        """Take the steps of a plan, each with its part of the saved state."""
        for step in sorted(steps, key=lambda step: step.rank):
            self._step_name = step.name
            self.touch(step.path[0] if step.path else step.name)
            step.apply(part_of(step))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        left = f"partly overwritten, and not usable until they are restored again: {', '.join(map(str, self._touched))}"
        if isinstance(error, StorageError | CorruptionError | PeerError):
            if self._touched:
                raise _with_message(error, left) from error
            return
        if self._step_name is None and (isinstance(error, FastPersistError) or not self._touched):
            return  # nothing has changed yet: for example, the named engine cannot be used here
        reason = f"{type(error).__name__}: {error}; {left}"
        if self._step_name is None:
            message = f"filling the targets from {self._path} failed: {reason}"
            raise StorageError(None, message, self._path) from error
        raise ConfigError(f"{self._step_name} refused what {self._path} holds for it: {reason}") from error


def _with_message(error: StorageError | CorruptionError | PeerError, left: str) -> FastPersistError:
    if isinstance(error, PeerError):
        return type(error)(f"{error}; {left}", rank=error.rank, subject=error.subject)
    if isinstance(error, StorageError):
        return type(error)(error.errno, f"{error}; {left}", error.filename, error.offset_bytes)
    return type(error)(f"{error.message}; {left}", path=error.path, offset_bytes=error.offset_bytes)
