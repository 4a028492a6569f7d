"""Plans which tensor of a saved file goes to which tensor of a target, and which storages are left to be loaded.

The first result is a `Plan`: leaves (tensors that are filled in place, or get memory of their own) and steps (the
load_state_dict of each target, and the like), which `restore` takes once all tensors are filled; and every reason why
file and target do not fit. `targets` has the code that files and shards share.

The second result is `SortedStorages`: a storage needs no memory if its tensors are filled in place, or if they were not
asked for. This is derived from the scanned pickle, before any object is built. All storages below a part of the pickle
that the plan does not mention, or that the scan does not understand, get memory.

Nothing here reads a file or changes a target.
"""

from __future__ import annotations

import copy
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.optim import Optimizer

from fastpersist.formats.pickle_scan import Call, Global, PersistentId, SymbolicDict, SymbolicSet
from fastpersist.loading.fill_tensors import memory_of, why_not_fillable
from fastpersist.loading.targets import (
    MODULES,
    OPTIMIZERS,
    OTHERS,
    SCALAR_KEYS,
    Path,
    TargetWalk,
    as_loaded,
    held_item,
    is_extra_state,
    joined_name,
    keep_group_tensors,
    keep_state_tensor,
    kind_of,
    unwrapped_optimizer,
)
from fastpersist.transfer.tensor_memory import PLAIN_TYPES

__all__ = [
    "UNREAD",
    "Leaf",
    "Plan",
    "SortedStorages",
    "Tree",
    "Unread",
    "is_ordered_dict",
    "storages_below",
    "tree_of",
]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor of the file, and where its values go.

    Attributes:
        name: The tensor's name in the target, for messages.
        value: The tensor; its data may be missing.
        target: The tensor that is filled with it; None if it gets memory of its own.
        device: The device of the memory of its own; None if map_location decides.
        is_bound: The target is filled even if another leaf fills the same memory: the last one wins, as with
            load_state_dict. False for an optimizer's state, which may share memory in the target and not in the file.
        shard_like: A DTensor: each rank keeps the shard of the value that it has of this DTensor. None: it keeps all.
    """

    name: str
    value: torch.Tensor
    target: torch.Tensor | None
    device: torch.device | None
    is_bound: bool = True
    shard_like: torch.Tensor | None = None

    def of_this_rank(self, value: torch.Tensor) -> torch.Tensor:
        """Return what a target gets for the loaded value: the tensor that was filled, or this rank's shard."""
        if self.target is not None:
            return self.target
        return value if self.shard_like is None else _shard_of(value, self.shard_like)


class Plan(TargetWalk):
    """Which tensors of a file go to which targets.

    Args:
        has_data: Tells whether the file has the values of a tensor; it has none for a tensor on the meta device.
        strict: Modules refuse names that only one side has.

    Attributes:
        leaves: The tensors of the file that targets take, by their paths in the file's object.
    """

    def __init__(self, has_data: Callable[[torch.Tensor], bool], *, strict: bool = True) -> None:
        super().__init__()
        self.has_data = has_data
        self.strict = strict
        self.leaves: dict[Path, Leaf] = {}

    def add_whole(self, target: object, value: Any) -> None:
        """Plan how `target` gets all that is in the file; plain values are replaced where a dict or list holds them."""
        problems = [f"{name} is {kind_of(item)}{hint}" for name, item, hint in self._unfillable("", target)]
        if problems:
            self.problems += problems
        else:
            optimizer = unwrapped_optimizer(target)
            is_container = isinstance(target, Mapping | list | tuple)
            self.add((), "" if is_container else "the target" if optimizer is None else "optimizer", target, value)

    def _unfillable(self, name: str, item: object, *, in_place: bool = False) -> Iterable[tuple[str, object, str]]:
        """Yield (name, part, hint) for each part of a target that can neither be filled nor replaced.

        Args:
            name: Name of the item.
            item: A target, or a part of one.
            in_place: The item is in a dict or list, where a plain value can be replaced.
        """
        if isinstance(item, Mapping):
            for key, inner in item.items():
                yield from self._unfillable(joined_name(name, key), inner, in_place=isinstance(item, MutableMapping))
        elif isinstance(item, (list, tuple)) and not isinstance(item, torch.Size):
            for index, inner in enumerate(item):
                # A tuple in a dict or list is replaced by one with other values.
                yield from self._unfillable(f"{name}[{index}]", inner, in_place=in_place or isinstance(item, list))
        elif not self._is_restorable(item) and not (in_place and isinstance(item, _PLAIN_VALUES)):
            is_array = hasattr(item, "__array_interface__")
            hint = "; torch.from_numpy(…) shares its memory, and is filled" if is_array else ", which cannot be filled"
            yield name or "the target", item, hint

    # --- modules, tensors and objects with load_state_dict

    def _add_module(self, path: Path, name: str, module: torch.nn.Module, value: Any) -> None:
        if not isinstance(value, Mapping):
            self.problems.append(f"{name} is a Module in the target, but {kind_of(value)} in the file")
            return
        live = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        state = module.state_dict(keep_vars=True)
        for key, tensor in state.items():
            inner = joined_name(name, key)
            if key not in value:
                self._add_missing(inner, tensor)
            elif isinstance(tensor, torch.Tensor) and not is_extra_state(key):
                # A tensor that a hook has made is not the module's own memory: load_state_dict takes its value.
                self._add_leaf((*path, key), inner, tensor, value[key], can_fill=id(tensor) in live)
        unexpected = [key for key in value if key not in state]
        for key in unexpected:
            self._add_unexpected((*path, key), joined_name(name, key))

        def load(loaded: Any) -> None:
            known = copy.copy(loaded)  # of an OrderedDict, with its _metadata
            for key in unexpected:
                del known[key]
            filled = {key: tensor for key, tensor in state.items() if id(tensor) in live and known.get(key) is tensor}
            known.update(as_loaded(module, filled))
            module.load_state_dict(known, strict=self.strict)

        self._add_step(MODULES, path, name, value, load)

    def _add_stateful(self, path: Path, name: str, target: Any, value: Any) -> None:
        rank = OPTIMIZERS if _is_optimizer_state(value) else OTHERS
        self._add_step(rank, path, name, value, target.load_state_dict)

    def _add_tensor(self, path: Path, name: str, target: torch.Tensor, value: Any) -> None:
        if not self._add_leaf(path, name, target, value, can_fill=True):

            def put(loaded: torch.Tensor) -> None:
                with torch.no_grad():
                    target.copy_(loaded)

            self._add_step(MODULES, path, name, value, put)

    def _add_leaf(self, path: Path, name: str, target: torch.Tensor, value: Any, *, can_fill: bool) -> bool:
        """Plan one tensor, whose shape must fit; return whether it is filled in place."""
        is_tensor = isinstance(value, torch.Tensor)
        if not self.fits(name, target, value.shape if is_tensor else None, value):
            return False
        if _is_plain(value) and not self.has_data(value):
            self.problems.append(f"{name} is a tensor without data (meta) in the file")
            return False
        reasons = why_not_fillable(name, target, value.dtype)
        if reasons and ((type(target) in PLAIN_TYPES and _is_plain(target)) or target.device.type == "meta"):
            self.problems.extend(reasons)  # copying would fail as well
        is_filled = can_fill and not reasons and _is_plain(value)
        shard_like = target if _is_sharded(target) and _is_plain(value) else None
        self.leaves[path] = Leaf(name, value, target if is_filled else None, _CPU, shard_like=shard_like)
        return is_filled

    # --- optimizers

    def _add_optimizer(self, path: Path, name: str, target: object, optimizer: Optimizer, value: Any) -> bool:
        if _is_optimizer_state(value) and _restores_by_position(optimizer):
            self._add_by_position(path, name, target, optimizer, value)
        elif isinstance(target, Optimizer) and not _may_take(target, value):
            self.problems.append(
                f"{name} is an optimizer in the target, but {kind_of(value)} in the file, which no optimizer has saved"
            )
        else:
            return False
        return True

    def _add_by_position(
        self, path: Path, name: str, target: object, optimizer: Optimizer, value: Mapping[str, Any]
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
            live = held_item(optimizer.state, key if parameter is None else parameter)
            inner = _OptimizerState(self, optimizer, parameter, filled)
            inner.add((*path, "state", key), (), joined_name(f"{name}.state", key), live, state)

        def load(loaded: Any) -> None:
            before = [dict(group) for group in optimizer.param_groups]
            target.load_state_dict(loaded)  # type: ignore[attr-defined]
            keep_group_tensors(before, optimizer.param_groups)
            if _has_stock_load(optimizer):
                for leaf_path, inside in filled:
                    key, tensor = leaf_path[len(path) + 1], self.leaves[leaf_path].target
                    if tensor is not None:
                        keep_state_tensor(held_item(optimizer.state, parameters.get(key, key)), inside, tensor)

        self._add_step(OPTIMIZERS, path, name, value, load)

    def follow_file_where_memory_is_shared(self) -> None:
        """Give optimizer state memory of its own if it shares memory in the target, but not in the file."""
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
    """Plans an optimizer's state of one parameter: tensors that it has are filled; it adopts those that it lacks.

    Attributes:
        plan: The plan that leaves are added to.
        optimizer: The optimizer.
        parameter: The parameter; None for state that belongs to no parameter.
        filled: Gets two paths for each filled tensor: in the file's object, and in the parameter's state.
    """

    plan: Plan
    optimizer: Optimizer
    parameter: torch.Tensor | None
    filled: list[tuple[Path, Path]]

    def add(self, path: Path, inside: Path, name: str, live: object, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(path, inside, name, live, value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.add((*path, key), (*inside, key), joined_name(name, key), held_item(live, key), item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self.add((*path, index), (*inside, index), f"{name}[{index}]", held_item(live, index), item)

    def _add_tensor(self, path: Path, inside: Path, name: str, live: object, value: torch.Tensor) -> None:
        parameter = self.parameter
        # torch keeps state on the parameter's device, except `step`: that is on the host, or torch moves it itself.
        device = None if parameter is None else _CPU if inside[-1:] == ("step",) else parameter.device
        is_filled = False
        expected: torch.Size | None = None
        if _is_plain(value) and not self.plan.has_data(value):
            self.plan.problems.append(f"{name} is a tensor without data (meta) in the file")
            return
        if isinstance(live, torch.Tensor) and _is_plain(value) and not why_not_fillable(name, live, value.dtype):
            # torch's load_state_dict moves state to the parameter's device. An optimizer that overrides it may keep
            # state elsewhere, and treat state of another dtype in its own way.
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
            self.plan.add_misfit_of_shape(name, expected, value.shape)
        target = live if is_filled and isinstance(live, torch.Tensor) else None
        shard_like = None
        if target is None and parameter is not None and _is_sharded(parameter) and _is_plain(value) and value.ndim:
            like = [one for one in (live, parameter) if isinstance(one, torch.Tensor) and _is_sharded(one)]
            shard_like = next((one for one in like if one.shape == value.shape), None)
            if shard_like is None:
                self.plan.add_unknown_sharding(name, value.shape, parameter)
        self.plan.leaves[path] = Leaf(name, value, target, device, is_bound=False, shard_like=shard_like)
        if target is not None:
            self.filled.append((path, inside))


def _is_sharded(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; a DTensor exists only if it is imported
    return module is not None and isinstance(tensor, module.DTensor)


def _shard_of(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Cut this rank's shard out of a tensor that all ranks have, without communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.detach(), like.device_mesh, like.placements, src_data_rank=None)


def _is_optimizer_state(value: Any) -> bool:
    """Tell whether a value has the form of an Optimizer.state_dict()."""
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def _may_take(optimizer: Optimizer, value: Any) -> bool:
    """Tell whether an optimizer's load_state_dict may accept a value."""
    if not _has_stock_load(optimizer) or not _restores_by_position(optimizer):
        return isinstance(value, Mapping)
    return _is_optimizer_state(value)


def _has_stock_load(optimizer: Optimizer) -> bool:
    return type(optimizer).load_state_dict is Optimizer.load_state_dict


def _restores_by_position(optimizer: Optimizer) -> bool:
    """Tell whether the n-th state is the n-th parameter's: a hook may reorder it, so with hooks this is not known."""
    return not optimizer._optimizer_load_state_dict_pre_hooks


def _hyperparameters_of_another_class(optimizer: Optimizer, saved: list[dict[str, Any]]) -> str:
    """Say which hyperparameters show that the file's optimizer is of another class; "" if none do.

    The file must lack a number of this class and have one that this class lacks. Switches do not count, for releases of
    torch add some; nor does a number that a scheduler adds (`initial_lr`), since the file then lacks none.
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
"""State of torch's own optimizers that has its parameter's shape: the only check for an optimizer without state."""


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


_PLAIN_VALUES = (type(None), numbers.Number, str, bytes, set, frozenset, range, torch.dtype, torch.device, torch.Size)


# --------------------------------------------------------------------------------------------- storages


class Unread:
    """Marks an entry that was not asked for."""


UNREAD = Unread()

Tree: TypeAlias = "dict[object, Tree | Leaf | Unread | None]"
"""Leaves by key, one level for each part of their paths. None: the storages below stay unsorted."""


def tree_of(leaves: Mapping[Path, Leaf], unread: Iterable[Path] = ()) -> Tree:
    """Return leaves and unread entries in nested dicts, one level for each part of their paths."""
    root: Tree = {}
    ends: dict[Path, Leaf | Unread] = {**leaves, **dict.fromkeys(unread, UNREAD)}
    for path, leaf in ends.items():
        level = root
        for key in path[:-1]:
            below = level.setdefault(key, {})
            level = below if isinstance(below, dict) else {}
        level[path[-1]] = leaf
    return root


class SortedStorages:
    """The storages of a scanned pickle, sorted by what the plan does with the tensors in them.

    Attributes:
        in_place: Keys of storages whose tensors are filled in place, or that were not asked for: they need no memory.
        elsewhere: Keys of storages that get memory on a given device, and that device.
        whole: Parts of the pickle that the plan does not mention, or the scan does not understand: every storage below
            them gets memory.
    """

    def __init__(self) -> None:
        self.in_place: set[str] = set()
        self.elsewhere: dict[str, torch.device] = {}
        self.whole: list[object] = []

    def sort(self, node: object, tree: Tree | Leaf | Unread | None) -> None:
        """Sort the storages below a node. Recursion ends at the leaves of the tree, however deep the pickle is."""
        if tree is None:
            return
        if isinstance(tree, Unread):
            self._pass_over(node)
            return
        if isinstance(tree, Leaf):
            self._sort_leaf(node, tree)
            return
        children: Iterable[tuple[object, object]] = ()
        if isinstance(node, (list, tuple)):
            children = enumerate(node)
        elif isinstance(node, SymbolicDict):
            children = self._entries(node)
        elif isinstance(node, Call) and is_ordered_dict(node):
            self.whole += [node.arguments, node.keywords, node.state, node.items]
            children = () if node.entries is None else self._entries(node.entries)
        else:
            self.whole.append(node)
        for key, child in children:
            if isinstance(key, SCALAR_KEYS) and key in tree:
                self.sort(child, tree[key])
            else:
                self.whole.append(child)

    def _pass_over(self, top: object) -> None:
        """Sort an unread entry. Only plain tensors in plain containers can be built without their data."""
        stack, seen = [top], set()
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if (key := _plain_storage_key(node)) is not None:
                self.in_place.add(key)
            elif isinstance(node, (list, tuple)):
                stack += node
            elif isinstance(node, SymbolicDict):
                stack += node.flat
            elif isinstance(node, Call) and is_ordered_dict(node):
                self.whole += [node.arguments, node.keywords, node.state, node.items]
                stack.append(node.entries)
            else:
                self.whole.append(node)

    def _entries(self, node: SymbolicDict) -> list[tuple[object, object]]:
        entries = node.items()
        if 2 * len(entries) != len(node.flat):
            self.whole.append(node)  # a key occurs twice: unpickling also builds the value that the second one replaces
        return entries

    def _sort_leaf(self, node: object, leaf: Leaf) -> None:
        key = _plain_storage_key(node)
        if key is None:
            self.whole.append(node)
        elif leaf.target is not None:
            self.in_place.add(key)
        elif leaf.device is not None and self.elsewhere.get(key, leaf.device) == leaf.device:
            self.elsewhere[key] = leaf.device
        else:
            self.whole.append(node)


def is_ordered_dict(node: Call) -> bool:
    """Tell whether a call builds a dict of `collections`."""
    return isinstance(node.function, Global) and node.function.module == "collections"


def _plain_storage_key(node: object) -> str | None:
    """Return the key of a plain tensor's storage; None for any other node, such as a tensor with attributes."""
    for _ in range(2):  # a Parameter around a tensor
        if not isinstance(node, Call) or not isinstance(node.function, Global) or not node.arguments:
            return None
        name = node.function.name if node.function.module == "torch._utils" else ""
        if node.state is not None or storages_below(node.arguments[1:]):
            return None
        if name.startswith("_rebuild_tensor_v"):
            storage = node.arguments[0]
            return str(storage.value[2]) if isinstance(storage, PersistentId) else None  # type: ignore[index]
        if name != "_rebuild_parameter":
            return None
        node = node.arguments[0]
    return None


_BRANCHES: Final = frozenset({Call, SymbolicDict, SymbolicSet, PersistentId, list, tuple})
"""The kinds of nodes that may be, or lead to, a storage."""


def storages_below(nodes: Iterable[object]) -> set[str]:
    """Return the keys of all storages that are reached from nodes of a scanned pickle."""
    keys: set[str] = set()
    seen: set[int] = set()
    stack = [node for node in nodes if type(node) in _BRANCHES]
    while stack:
        node = stack.pop()
        below: Iterable[object]
        if isinstance(node, PersistentId):
            keys.add(str(node.value[2]))  # type: ignore[index]  # its form was proven with the references
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Call):
            below = node.function, node.arguments, node.keywords, node.state, node.items, node.entries
        elif isinstance(node, SymbolicDict):
            below = node.flat
        else:
            below = node.members if isinstance(node, SymbolicSet) else node  # type: ignore[assignment]
        stack += [node for node in below if type(node) in _BRANCHES]
    return keys
