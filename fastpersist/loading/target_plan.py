"""Which tensor of a saved state goes to which tensor of a target, and whatever keeps the two from fitting.

Looks at names, shapes, dtypes and memory; reads no file and changes nothing. What it finds is a `Plan`: leaves, tensors
that are filled in place or need memory of their own, and steps, the load_state_dict of each target and the like, which
somebody else takes once all tensors are filled.
"""

from __future__ import annotations

import copy
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fastpersist.loading.fill_tensors import (
    PLAIN_TYPES,
    IncompatibleKeys,
    is_extra_state,
    joined_name,
    memory_of,
    why_not_fillable,
)

__all__ = ["Leaf", "Path", "Plan", "Step"]

_CPU = torch.device("cpu")
_WRAPPERS_MAX = 16

Path: TypeAlias = tuple[Any, ...]
"""Keys and indexes that lead from the file's object to a part of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor of the file that the plan knows what to do with.

    Attributes:
        name: For messages.
        value: It; its data may be missing.
        target: The tensor that is filled with it; None when it gets memory of its own.
        device: Where that is; None for what map_location says.
        is_bound: It is filled in place even where another leaf fills the same memory: the last one wins, as with
            load_state_dict. An optimizer's state is not: it may share memory in the target, but not in the file.
        shard_like: The DTensor of which each rank gets its shard of the value; None where all of it is wanted.
    """

    name: str
    value: torch.Tensor
    target: torch.Tensor | None
    device: torch.device | None
    is_bound: bool = True
    shard_like: torch.Tensor | None = None

    def of_this_rank(self, value: torch.Tensor) -> torch.Tensor:
        """Return what a target gets in place of the value that was loaded: the tensor that was filled, or its shard."""
        if self.target is not None:
            return self.target
        return value if self.shard_like is None else _shard_of(value, self.shard_like)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What remains to be done with a part of the file once the tensors of the targets are filled.

    Attributes:
        rank: Modules come first, then optimizers, then what may look at either.
        path: The part.
        name: For messages.
        apply: Takes the part, in which tensors of targets stand for those that filled them.
    """

    rank: int
    path: Path
    name: str
    apply: Callable[[Any], object]


@dataclass(slots=True, eq=False)
class Plan:
    """What goes where.

    Attributes:
        has_data: Whether a tensor of the file is one whose values can be had.
        strict: Modules refuse what is on one side only.
        leaves: By their paths.
        steps: What comes after.
        problems: What keeps the plan from being followed.
        keys: What is on one side only, and so keeps a strict plan from being followed.
        unread: Paths of the parts of the file that nothing in the target takes.
    """

    has_data: Callable[[torch.Tensor], bool]
    strict: bool = True
    leaves: dict[Path, Leaf] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    keys: IncompatibleKeys = field(default_factory=lambda: IncompatibleKeys([], []))
    unread: list[Path] = field(default_factory=list)

    def add_whole(self, target: object, value: Any) -> None:
        """Plan how `target` gets all that is in the file.

        What can only be replaced is replaced in the dict or list that holds it, if it is a plain value.
        """
        problems = [f"{name} is {_kind(item)}{hint}" for name, item, hint in _unfillable("", target)]
        if problems:
            self.problems += problems
        else:
            optimizer = _unwrapped_optimizer(target)
            is_container = isinstance(target, Mapping | list | tuple)
            self.add((), "" if is_container else "the target" if optimizer is None else "optimizer", target, value)

    def add(self, path: Path, name: str, target: object, value: Any) -> None:
        """Plan how `target` gets what the file has in its place."""
        optimizer = _unwrapped_optimizer(target)
        if isinstance(target, torch.nn.Module):
            self._add_module(path, name, target, value)
        elif optimizer is not None and _is_optimizer_state(value) and _restores_by_position(optimizer):
            self._add_optimizer(path, name, target, optimizer, value)
        elif isinstance(target, torch.optim.Optimizer) and not _may_take(target, value):
            self.problems.append(f"{name} is an optimizer in the target, but {_kind(value)} that is none in the file")
        elif callable(load_state_dict := getattr(target, "load_state_dict", None)):
            self.steps.append(Step(1 if _is_optimizer_state(value) else 2, path, name, load_state_dict))
        elif isinstance(target, torch.Tensor):
            self._add_tensor(path, name, target, value)
        elif isinstance(target, Mapping):
            self._add_mapping(path, name, target, value)
        elif isinstance(target, list) or (isinstance(target, tuple) and _is_restorable(target)):
            self._add_sequence(path, name, target, value)
        else:
            self.problems.append(f"{name} is {_kind(target)} in the target, which cannot be restored in place")

    def _add_module(self, path: Path, name: str, module: torch.nn.Module, value: Any) -> None:
        if not isinstance(value, Mapping):
            self.problems.append(f"{name} is a Module in the target, but {_kind(value)} in the file")
            return
        live = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        state = module.state_dict(keep_vars=True)
        for key, tensor in state.items():
            inner = joined_name(name, key)
            if key not in value:
                self.keys.missing_keys.append(inner)
            elif isinstance(tensor, torch.Tensor) and not is_extra_state(key):
                # What a hook made up is no memory of the module's; load_state_dict knows what to do with its value.
                self._add_leaf((*path, key), inner, tensor, value[key], can_fill=id(tensor) in live)
        unexpected = [key for key in value if key not in state]
        self.keys.unexpected_keys.extend(joined_name(name, key) for key in unexpected)
        self.unread.extend((*path, key) for key in unexpected)

        def load(loaded: Any) -> None:
            known = copy.copy(loaded)  # of an OrderedDict, with its _metadata
            for key in unexpected:
                del known[key]
            module.load_state_dict(known, strict=self.strict)

        self.steps.append(Step(0, path, name, load))

    def _add_tensor(self, path: Path, name: str, target: torch.Tensor, value: Any) -> None:
        if not self._add_leaf(path, name, target, value, can_fill=True):

            def put(loaded: torch.Tensor) -> None:
                with torch.no_grad():
                    target.copy_(loaded)

            self.steps.append(Step(0, path, name, put))

    def _add_leaf(self, path: Path, name: str, target: torch.Tensor, value: Any, *, can_fill: bool) -> bool:
        """Plan one tensor that must fit; tell whether it is filled in place."""
        if not isinstance(value, torch.Tensor):
            self.problems.append(f"{name} is a tensor in the target, but {_kind(value)} in the file")
        elif torch.nn.parameter.is_lazy(target):
            self.problems.append(f"{name} has no shape yet (a lazy module); run the module once, then load")
        elif target.shape != value.shape:
            self.problems.append(
                f"{name} has shape {tuple(target.shape)} in the target, {tuple(value.shape)} in the file"
            )
        elif _is_plain(value) and not self.has_data(value):
            self.problems.append(f"{name} is a tensor without data (meta) in the file")
        else:
            reasons = why_not_fillable(name, target, value.dtype)
            if reasons and ((type(target) in PLAIN_TYPES and _is_plain(target)) or target.device.type == "meta"):
                self.problems.extend(reasons)  # copying would fail as well
            is_filled = can_fill and not reasons and _is_plain(value)
            shard_like = target if _is_sharded(target) and _is_plain(value) else None
            self.leaves[path] = Leaf(name, value, target if is_filled else None, _CPU, shard_like=shard_like)
            return is_filled
        return False

    def _add_mapping(self, path: Path, name: str, target: Mapping[Any, object], value: Any) -> None:
        if not isinstance(value, Mapping):
            self.problems.append(f"{name or 'all'} is a dict in the target, but {_kind(value)} in the file")
            return
        is_strict = any(map(_is_restorable, target.values()))  # else there is nothing to restore in place
        for key, item in target.items():
            inner = joined_name(name, key)
            if not _is_restorable(item):
                continue
            if key not in value:
                self.keys.missing_keys.append(inner)
                continue
            self.add((*path, key), inner, item, value[key])
            if _has_values(item) and isinstance(target, MutableMapping):
                self._set(target, key, (*path, key), inner, item)
        for key, item in value.items():
            inner = joined_name(name, key)
            if key not in target and is_strict and any(True for _ in tensors_in(item)):
                self.keys.unexpected_keys.append(inner)
                self.unread.append((*path, key))
            elif not _is_restorable(target.get(key)) and isinstance(target, MutableMapping):
                self._set(target, key, (*path, key), inner)

    def _add_sequence(self, path: Path, name: str, target: list[Any] | tuple[Any, ...], value: Any) -> None:
        if not isinstance(value, (list, tuple)):
            self.problems.append(f"{name or 'all'} is {_kind(target)} in the target, but {_kind(value)} in the file")
            return
        if isinstance(target, list) and not any(map(_is_restorable, target)):
            self._set(target, slice(None), path, name)
            return
        if len(target) != len(value):
            self.problems.append(f"{name or 'all'} has {len(target)} elements in the target, {len(value)} in the file")
            return
        for index, item in enumerate(target):
            if _is_restorable(item):
                self.add((*path, index), f"{name}[{index}]", item, value[index])
            if isinstance(target, list) and (not _is_restorable(item) or _has_values(item)):
                self._set(target, index, (*path, index), f"{name}[{index}]", item)

    def _set(self, container: Any, key: Any, path: Path, name: str, item: object = None) -> None:
        def put(loaded: Any) -> None:
            container[key] = _with_values(item, loaded)

        self.steps.append(Step(2, path, name, put))

    # --- optimizers

    def _add_optimizer(
        self, path: Path, name: str, target: object, optimizer: torch.optim.Optimizer, value: Mapping[str, Any]
    ) -> None:
        groups, saved = optimizer.param_groups, value["param_groups"]
        if len(groups) != len(saved):
            self.problems.append(f"{name} has {len(groups)} parameter groups in the target, {len(saved)} in the file")
            return
        if of_other := _hyperparameters_of_another_class(optimizer, saved):
            self.problems.append(f"{name} is of the class {type(optimizer).__name__} in the target, {of_other}")
            return
        parameters: dict[Any, torch.Tensor] = {}
        for index, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
            counts = len(group["params"]), len(saved_group["params"])
            if counts[0] != counts[1]:
                self.problems.append(
                    f"{name}.param_groups[{index}] has {counts[0]} parameters in the target, {counts[1]} in the file"
                )
                continue
            parameters.update(zip(saved_group["params"], group["params"], strict=True))
        filled: list[tuple[Path, Path]] = []
        for key, state in value["state"].items():
            parameter = parameters.get(key)
            live = _item(optimizer.state, key if parameter is None else parameter)
            inner = _OptimizerState(self, optimizer, parameter, filled)
            inner.add((*path, "state", key), (), joined_name(f"{name}.state", key), live, state)

        def load(loaded: Any) -> None:
            before = [dict(group) for group in optimizer.param_groups]
            target.load_state_dict(loaded)  # type: ignore[attr-defined]
            _keep_group_tensors(before, optimizer.param_groups)
            if _has_stock_load(optimizer):
                for leaf_path, inside in filled:
                    key = leaf_path[len(path) + 1]
                    _keep_state_tensor(_item(optimizer.state, parameters.get(key, key)), inside, self.leaves[leaf_path])

        self.steps.append(Step(1, path, name, load))

    def follow_file_where_memory_is_shared(self) -> None:
        """Give memory of its own to optimizer state that shares memory in the target, but not in the file."""
        places: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
        for leaf in self.leaves.values():
            if leaf.target is not None:
                value = leaf.value
                place = (value.untyped_storage()._cdata, value.storage_offset(), value.stride())
                places.setdefault(memory_of(leaf.target), set()).add(place)
        for path, leaf in self.leaves.items():
            if leaf.target is not None and not leaf.is_bound and len(places[memory_of(leaf.target)]) > 1:
                self.leaves[path] = Leaf(leaf.name, leaf.value, None, leaf.device)


@dataclass(frozen=True, slots=True, eq=False)
class _OptimizerState:
    """Plans the state of one parameter: what is there already is filled, what is not will be adopted.

    Attributes:
        plan: Gets the leaves.
        optimizer: The one that holds the state.
        parameter: Whose state it is; None for state that belongs to none.
        filled: Gets the path of each tensor that is filled, from the file's object and from the parameter's state.
    """

    plan: Plan
    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor | None
    filled: list[tuple[Path, Path]]

    def add(self, path: Path, inside: Path, name: str, live: object, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(path, inside, name, live, value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.add((*path, key), (*inside, key), joined_name(name, key), _item(live, key), item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self.add((*path, index), (*inside, index), f"{name}[{index}]", _item(live, index), item)

    def _add_tensor(self, path: Path, inside: Path, name: str, live: object, value: torch.Tensor) -> None:
        parameter = self.parameter
        # torch puts all but `step` on the parameter's device. A `step` is on the host, or torch moves it itself.
        device = None if parameter is None else _CPU if inside[-1:] == ("step",) else parameter.device
        is_filled = False
        expected: torch.Size | None = None
        if _is_plain(value) and not self.plan.has_data(value):
            self.plan.problems.append(f"{name} is a tensor without data (meta) in the file")
            return
        if isinstance(live, torch.Tensor) and _is_plain(value) and not why_not_fillable(name, live, value.dtype):
            # torch's load_state_dict moves state to the parameter's device. An optimizer's own may keep it elsewhere,
            # and mean more by a dtype than a conversion.
            if _has_stock_load(self.optimizer):
                stays = inside[-1:] == ("step",) or parameter is None or live.device == parameter.device
            else:
                stays, device = live.dtype == value.dtype, live.device
            is_filled = live.shape == value.shape and stays
            expected = live.shape if parameter is not None and live.shape == parameter.shape and live.ndim else None
        elif (
            parameter is not None and inside[-1:] and inside[-1] in _SHAPED_LIKE_PARAMETER.get(type(self.optimizer), ())
        ):
            expected = parameter.shape
        if expected is not None and value.shape != expected:
            self.plan.problems.append(
                f"{name} has shape {tuple(expected)} in the target, {tuple(value.shape)} in the file"
            )
        target = live if is_filled and isinstance(live, torch.Tensor) else None
        shard_like = None
        if target is None and parameter is not None and _is_sharded(parameter) and _is_plain(value) and value.ndim:
            like = [one for one in (live, parameter) if isinstance(one, torch.Tensor) and _is_sharded(one)]
            shard_like = next((one for one in like if one.shape == value.shape), None)
            if shard_like is None:
                self.plan.problems.append(
                    f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}, so it is not "
                    "known how it is sharded; one step of the optimizer, before load(), makes its state"
                )
        self.plan.leaves[path] = Leaf(name, value, target, device, is_bound=False, shard_like=shard_like)
        if target is not None:
            self.filled.append((path, inside))


def _is_sharded(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; who has a DTensor has done so
    return module is not None and isinstance(tensor, module.DTensor)


def _shard_of(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Cut this rank's shard out of a tensor that all ranks have, without saying a word to the others."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.detach(), like.device_mesh, like.placements, src_data_rank=None)


def _unwrapped_optimizer(target: object) -> torch.optim.Optimizer | None:
    """Find the optimizer that a target is, or is a wrapper of; None when it is neither."""
    found = target
    for _ in range(_WRAPPERS_MAX):
        inner = getattr(found, "optimizer", None)
        if inner is None or isinstance(found, torch.nn.Module):
            break
        found = inner
    return found if isinstance(found, torch.optim.Optimizer) else None


def _is_optimizer_state(value: Any) -> bool:
    """Tell whether this is what Optimizer.state_dict returns; a scheduler, which has an optimizer too, is none."""
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def _may_take(optimizer: torch.optim.Optimizer, value: Any) -> bool:
    """Tell whether an optimizer's load_state_dict may know what to do with a value."""
    if not _has_stock_load(optimizer) or not _restores_by_position(optimizer):
        return isinstance(value, Mapping)
    return _is_optimizer_state(value)


def _has_stock_load(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict


def _restores_by_position(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the n-th state is the n-th parameter's; a hook may say otherwise, and then sees loaded tensors only."""
    return not optimizer._optimizer_load_state_dict_pre_hooks


def _hyperparameters_of_another_class(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> str:
    """Say what the groups in the file have that optimizers of this class have not, and not the other way; "" if none.

    Numbers only: what a release of torch adds to a class is a switch, and what others add, say an `initial_lr`, is
    there beside all that the class needs.
    """

    def numbers(of: Iterable[Mapping[str, Any]]) -> set[str]:
        found = (item for group in of for item in group.items() if item[0] != "params")
        return {key for key, value in found if isinstance(value, int | float | tuple) and not isinstance(value, bool)}

    lost = numbers([optimizer.defaults]) - {key for group in saved for key in group}
    extra = numbers(saved) - {key for group in [optimizer.defaults, *optimizer.param_groups] for key in group}
    if not (lost and extra and _has_stock_load(optimizer)):
        return ""
    return f"but of another one in the file: with {_listed(extra)}, without {_listed(lost)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


_EVERY_ADAM = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
_SHAPED_LIKE_PARAMETER: dict[type, set[str]] = {
    torch.optim.Adadelta: {"square_avg", "acc_delta"},
    torch.optim.Adagrad: {"sum"},
    torch.optim.Adam: _EVERY_ADAM,
    torch.optim.Adamax: {"exp_avg", "exp_inf"},
    torch.optim.AdamW: _EVERY_ADAM,
    torch.optim.ASGD: {"ax"},
    torch.optim.NAdam: _EVERY_ADAM,
    torch.optim.RAdam: _EVERY_ADAM,
    torch.optim.RMSprop: {"square_avg", "momentum_buffer", "grad_avg"},
    torch.optim.Rprop: {"prev", "step_size"},
    torch.optim.SGD: {"momentum_buffer"},
}
"""State of torch's own optimizers that has the shape of its parameter: all that tells what fits one without state."""


def _keep_group_tensors(before: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
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


def _keep_state_tensor(state: Any, inside: Path, leaf: Leaf) -> None:
    """Put a filled tensor back where load_state_dict put a conversion of it to the parameter's dtype."""
    for key in inside[:-1]:
        state = _item(state, key)
    found = _item(state, inside[-1]) if inside else None
    if isinstance(found, torch.Tensor) and leaf.target is not None and found is not leaf.target:
        if found.shape == leaf.target.shape and found.device == leaf.target.device and isinstance(state, (dict, list)):
            state[inside[-1]] = leaf.target


def _item(container: Any, key: Any) -> Any:
    if isinstance(container, Mapping):
        return container.get(key)
    return container[key] if isinstance(container, (list, tuple)) and key < len(container) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _is_restorable(item: object) -> bool:
    """Tell what is restored in place from what is replaced, as is a tuple that holds nothing else."""
    if isinstance(item, tuple):
        return any(map(_is_restorable, item))
    return isinstance(item, (torch.Tensor, Mapping, list)) or callable(getattr(item, "load_state_dict", None))


_PLAIN_VALUES = (type(None), numbers.Number, str, bytes, set, frozenset, range, torch.dtype, torch.device, torch.Size)


def _unfillable(name: str, item: object, *, in_place: bool = False) -> Iterable[tuple[str, object, str]]:
    """Yield what is neither restored in place nor a plain value that can be replaced where it is: name, it, a hint.

    Args:
        name: Of the item.
        item: A target, or a part of one.
        in_place: It is a part of something that can be changed.
    """
    if isinstance(item, Mapping):
        for key, inner in item.items():
            yield from _unfillable(joined_name(name, key), inner, in_place=isinstance(item, MutableMapping))
    elif isinstance(item, (list, tuple)) and not isinstance(item, torch.Size):
        for index, inner in enumerate(item):
            # A tuple in a dict or list is replaced by one with other values.
            yield from _unfillable(f"{name}[{index}]", inner, in_place=in_place or isinstance(item, list))
    elif not _is_restorable(item) and not (in_place and isinstance(item, _PLAIN_VALUES)):
        is_array = hasattr(item, "__array_interface__")
        hint = "; torch.from_numpy(…) shares its memory, and is filled" if is_array else ", which cannot be filled"
        yield name or "the target", item, hint


def _has_values(item: object) -> bool:
    """Tell whether an item is a tuple that is restored in place, and holds what can only be replaced."""
    if not isinstance(item, tuple) or not _is_restorable(item):
        return False
    return any(_has_values(one) or not _is_restorable(one) for one in item)


def _with_values(item: Any, loaded: Any) -> Any:
    """Return a tuple with what it holds that is restored in place, and the loaded values beside that."""
    if not _has_values(item):
        return item if _is_restorable(item) else loaded
    make = getattr(type(item), "_make", type(item))  # a named tuple's takes an iterable, too
    return make(_with_values(own, new) for own, new in zip(item, loaded, strict=True))


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


def _kind(value: object) -> str:
    return f"a value of type {type(value).__name__}"
