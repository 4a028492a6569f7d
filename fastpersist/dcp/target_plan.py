"""Plans which saved tensor goes to which tensor of this rank's targets, and notes every reason why they do not fit.

The counterpart of `loading.target_plan` for sharded state; both are a `TargetWalk` of `loading.targets`. The saved
state is a tree of names, with global shapes; a target may hold a shard of each tensor. Reads no file and changes
nothing: the result is a `Fit`, with tensors to be filled and steps to be taken after that. For state that an optimizer
does not have yet, this allocates memory, sharded like its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fastpersist.dcp.blobs import QUANTIZED
from fastpersist.errors import UnsupportedError
from fastpersist.loading.fill_tensors import why_not_fillable
from fastpersist.loading.targets import (
    MODULES,
    OPTIMIZERS,
    OTHERS,
    Path,
    TargetWalk,
    keep_group_tensors,
    keep_state_tensor,
)

__all__ = ["Fit", "Node", "Saved", "full_value", "holds_nothing", "leaves", "saved_tree"]

_CPU = torch.device("cpu")

_DEPTH_MAX = 128
"""Of the saved tree: functions that walk it are recursive."""

_HOLES_MAX = 1 << 20
"""Places in lists without a saved item, which DCP leaves out if empty. A path of a few bytes could name any place."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True, slots=True)
class Saved:
    """One thing that was saved.

    Attributes:
        fqn: Its name in DCP.
        described: A tensor's global shape, dtype and chunks; or that it is an object.
    """

    fqn: str
    described: TensorStorageMetadata | BytesStorageMetadata

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Global shape of a tensor; None for an object."""
        return tuple(self.described.size) if isinstance(self.described, TensorStorageMetadata) else None


Node: TypeAlias = "Saved | dict[str, Node] | list[Node | None]"


def saved_tree(metadata: Metadata) -> dict[str, Node]:
    """Return what was saved, nested as it was; the keys of dicts are text.

    Raises:
        AttributeError, IndexError, KeyError, TypeError, ValueError: The names make no such tree.
    """
    root: dict[str, Node] = {}
    paths = metadata.planner_data or {}
    holes_left = _HOLES_MAX
    for fqn, described in metadata.state_dict_metadata.items():
        path = paths.get(fqn) or (fqn,)
        if len(path) > _DEPTH_MAX or not all(type(part) is str or (type(part) is int and part >= 0) for part in path):
            raise ValueError(f"{fqn!r} has no path of up to {_DEPTH_MAX} names and numbers")
        container: Any = root
        for part, next_part in zip(path, [*path[1:], None], strict=True):
            new: Node = Saved(fqn, described) if next_part is None else [] if isinstance(next_part, int) else {}
            if isinstance(part, int):
                holes_left -= max(0, part - len(container))
                if holes_left < 0:
                    raise ValueError(f"lists in it have more than {_HOLES_MAX} places without anything")
                container += [None] * (part + 1 - len(container))
                if container[part] is None:
                    container[part] = new
            else:
                container.setdefault(part, new)
            container = container[part]
        if container is not new:
            raise ValueError(f"{fqn!r} has the place of something else")
    return root


def leaves(node: Node | None) -> Iterator[Saved]:
    """List what was saved below a part of the tree."""
    if isinstance(node, Saved):
        yield node
    elif node is not None:
        for below in node.values() if isinstance(node, dict) else node:
            yield from leaves(below)


def full_value(node: Node | None, value_of: Callable[[Saved], Any]) -> Any:
    """Return the value of a part of the tree, with an optimizer's ids of parameters as they were: text or numbers.

    Args:
        node: The part of the tree.
        value_of: Returns the tensor or object of a leaf.
    """
    if isinstance(node, Saved):
        return value_of(node)
    if isinstance(node, list):
        return [full_value(below, value_of) for below in node]
    if node is None:
        return None
    found = {key: full_value(below, value_of) for key, below in node.items()}
    groups, state = found.get("param_groups"), found.get("state")
    if isinstance(groups, list) and isinstance(state, dict | None):
        ids = {str(one): one for group in groups for one in _ids_of(group)}
        found["state"] = {ids.get(key, key): value for key, value in (state or {}).items()}
    return found


def _ids_of(group: object) -> list[int | str]:
    ids = group.get("params") if isinstance(group, Mapping) else None
    return ids if isinstance(ids, list) and all(isinstance(one, int | str) for one in ids) else []


class Fit(TargetWalk):
    """The plan of all targets.

    Args:
        objects: What was saved and is no tensor, by its name in DCP; loaded already.
        device: The device of tensors that have no target.
        modules: The modules of all targets, which name the parameters of optimizers.

    Attributes:
        tensors: The tensors to fill, by their names in DCP.
        filled_keys: The keys of targets whose own tensors are filled.
    """

    _where = "checkpoint"

    def __init__(self, objects: Mapping[str, Any], device: torch.device, modules: list[torch.nn.Module]) -> None:
        super().__init__()
        self.objects = objects
        self.device = device
        self.modules = modules
        self.tensors: dict[str, torch.Tensor] = {}
        self.filled_keys: dict[str, None] = {}

    def value_of(self, saved: Saved) -> Any:
        """Return an object, or the tensor that will be filled: a new whole one if no target has it.

        Raises:
            UnsupportedError: dcp.save saved a sparse or quantized tensor, and DCP does not say how to make one.
        """
        if not isinstance(saved.described, TensorStorageMetadata):
            return self.objects[saved.fqn]
        if saved.fqn not in self.tensors:
            dtype, layout = saved.described.properties.dtype, saved.described.properties.layout
            if layout is not torch.strided or dtype in QUANTIZED:
                raise UnsupportedError(
                    f"{saved.fqn!r} is a tensor of layout {layout} and {dtype}, which can only be loaded into one of "
                    "its kind, with dcp.load; Checkpointer(sharded=True).save keeps such tensors as they are"
                )
            self.tensors[saved.fqn] = torch.empty(saved.described.size, dtype=dtype, device=self.device)
        return self.tensors[saved.fqn]

    def add(self, path: Path, name: str, target: object, value: Any) -> None:
        """Plan a target; `value` is None where DCP has left out what was empty."""
        if value is None:
            self._add_missing(name, target)
        else:
            super().add(path, name, target, value)

    # --- what was saved

    def _saved_kind(self, value: Any) -> str:
        if isinstance(value, Saved):
            return "an object" if value.shape is None else "a tensor"
        return "a dict" if isinstance(value, dict) else "a list"

    def _saved_key(self, key: Any) -> str:
        return str(key)

    def _has_tensors(self, value: Any) -> bool:
        return any(leaf.shape is not None for leaf in leaves(value))

    def _is_replaced(self, target: list[Any], value: Any) -> bool:
        # A list without tensors was saved as one object.
        return isinstance(value, Saved) and isinstance(self.objects.get(value.fqn), list | tuple)

    def _is_restorable(self, item: object) -> bool:
        # So is a tuple without tensors, whatever lists are in it.
        return _holds_state(item) if isinstance(item, tuple) else super()._is_restorable(item)

    def _add_missing(self, name: str, target: object) -> None:
        if not holds_nothing(target):  # else DCP has left it out
            super()._add_missing(name, target)

    def _add_step(self, rank: int, path: Path, name: str, value: Any, apply: Callable[[Any], object]) -> None:
        full_value(value, self.value_of)  # its tensors are read with the others
        super()._add_step(rank, path, name, value, lambda _: apply(full_value(value, self.value_of)))

    # --- tensors

    def _add_tensor(self, path: Path, name: str, target: torch.Tensor, value: Any) -> None:
        if isinstance(value, Saved) and isinstance(held := self.objects.get(value.fqn), torch.Tensor):
            self._add_copied(path, name, target, held)
        elif self.fits(name, target, value.shape if isinstance(value, Saved) else None, value):
            dtype = value.described.properties.dtype
            memory = target._local_tensor if isinstance(target, DTensor) else target
            self.problems += why_not_fillable(name, memory.detach(), dtype) if _is_known(memory) else []
            self.tensors[value.fqn] = target.detach()
            self.filled_keys[path[0]] = None

    def _add_copied(self, path: Path, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        """Plan a tensor that was saved as an object: sparse, quantized or nested."""
        if target.layout != value.layout or target.is_quantized != value.is_quantized:
            self.problems.append(f"{name} is {_layout(target)} in the target, {_layout(value)} in the checkpoint")
        elif not value.is_nested and target.shape != value.shape:
            self.add_misfit_of_shape(name, target.shape, value.shape)
        elif target.layout in _COMPRESSED and target._nnz() != value._nnz():
            self.problems.append(
                f"{name} has {target._nnz()} elements in the target, {value._nnz()} in the checkpoint: load it without "
                f"a target, for torch copies no {target.layout} tensors where these numbers differ"
            )
        else:

            def put(_: object) -> None:
                with torch.no_grad():
                    target.copy_(value)

            self._add_step(MODULES, path, name, None, put)

    # --- modules

    def _add_module(self, path: Path, name: str, module: torch.nn.Module, node: Any) -> None:
        if not isinstance(node, dict):
            self.problems.append(f"{name} is a module in the target, but {self._saved_kind(node)} in the checkpoint")
            return
        live = module.state_dict()
        load: Callable[[dict[str, Any]], object] = module.load_state_dict
        if set(map(str, live)) != set(node):
            # The module is wrapped (DistributedDataParallel, torch.compile …). It may have been saved by the names
            # without the wrappers, which torch's get_model_state_dict returns.
            plain: dict[str, Any] = get_model_state_dict(module)
            if set(plain) == set(node):
                live = plain
                load = lambda state: set_model_state_dict(module, state)  # noqa: E731
        self._compare_names(name, live, node)
        for own_name, value in live.items():
            below = node.get(own_name)
            if below is not None and isinstance(value, torch.Tensor):
                self._add_tensor(path, f"{name}.{own_name}", value, below)
        extra = {key: node[key] for key, value in live.items() if key in node and not isinstance(value, torch.Tensor)}

        def put(loaded: Mapping[str, Any]) -> None:
            for own_name, value in live.items():
                if not isinstance(value, torch.Tensor):
                    live[own_name] = like(loaded.get(own_name), value)
            load(live)

        self._add_step(MODULES, path, name, extra, put)

    def _compare_names(self, name: str, live: Mapping[str, Any], node: Mapping[str, Node]) -> None:
        for one, value in live.items():
            if one not in node:
                self._add_missing(f"{name}.{one}", value)
        for one in set(node).difference(live):
            self._add_unexpected((), f"{name}.{one}")

    # --- optimizers

    def _add_optimizer(self, path: Path, name: str, target: object, optimizer: Optimizer, value: Any) -> bool:
        if isinstance(value, dict) and _is_optimizer_state(value):
            self._add_by_name_or_order(path, name, target, optimizer, value)
        elif isinstance(target, Optimizer):
            self.problems.append(
                f"{name} is an optimizer in the target, but no state_dict of one in the checkpoint (which has "
                f"'param_groups'); a flattened one is loaded into what get_optimizer_state_dict returns"
            )
        else:
            return False
        return True

    def _add_by_name_or_order(
        self, path: Path, name: str, target: Any, optimizer: Optimizer, node: Mapping[str, Node]
    ) -> None:
        saved_groups = node["param_groups"]
        if not isinstance(saved_groups, list):
            self.problems.append(f"{name}.param_groups is no list in the checkpoint")
            return
        groups = [full_value(group, self.value_of) for group in saved_groups]
        if not all(isinstance(group, dict) for group in groups):
            self.problems.append(f"{name}.param_groups has what is no group in the checkpoint")
            return
        matched = self._matched(name, optimizer, groups)
        if matched is None:
            return
        parameters, group_of = matched
        saved_state = node.get("state", {})
        state: dict[int, Any] = {}
        ids = _ids(optimizer)
        for saved_id, below in saved_state.items() if isinstance(saved_state, dict) else ():
            parameter = parameters.get(saved_id)
            if parameter is None:
                self.problems.append(f"{name}.state.{saved_id} is in the checkpoint, and belongs to no parameter")
                continue
            live = optimizer.state.get(parameter, {})
            state[ids[parameter]] = self._state_of(path, f"{name}.state.{saved_id}", parameter, live, below)

        def put(_: object) -> None:
            before = [dict(group) for group in optimizer.param_groups]
            loaded_groups = [
                {**group_of[index], "params": [ids[parameter] for parameter in group["params"]]}
                for index, group in enumerate(optimizer.param_groups)
            ]
            kept = [(parameter, live) for parameter, live in optimizer.state.items() if parameter in ids]
            target.load_state_dict({"state": state, "param_groups": loaded_groups})
            keep_group_tensors(before, optimizer.param_groups)
            for parameter, live in kept:
                filled: Any = state.get(ids[parameter])
                for key, tensor in live.items() if isinstance(filled, Mapping) else ():
                    if isinstance(tensor, torch.Tensor) and filled.get(key) is tensor:
                        keep_state_tensor(optimizer.state.get(parameter), (key,), tensor)

        self._add_step(OPTIMIZERS, path, name, None, put)

    def _matched(
        self, name: str, optimizer: Optimizer, groups: list[Any]
    ) -> tuple[dict[str, torch.Tensor], list[Any]] | None:
        """Return the parameter of each id in the checkpoint, and the saved group for each group of the optimizer."""
        saved_ids = [_ids_of(group) for group in groups]
        live = [group["params"] for group in optimizer.param_groups]
        names = _names_of_parameters(self.modules)
        by_name = any(isinstance(one, str) for ids in saved_ids for one in ids) and any(
            parameter in names for parameters in live for parameter in parameters
        )
        if not by_name:  # as torch does it: by their order
            if list(map(len, saved_ids)) != list(map(len, live)):
                self.problems.append(
                    f"{name} has groups of {list(map(len, live))} parameters in the target, and of "
                    f"{list(map(len, saved_ids))} in the checkpoint"
                )
                return None
            found = {
                str(one): parameter
                for ids, parameters in zip(saved_ids, live, strict=True)
                for one, parameter in zip(ids, parameters, strict=True)
            }
            return found, groups
        return self._matched_by_name(name, live, names, groups)

    def _matched_by_name(
        self, name: str, live: list[list[torch.Tensor]], names: Mapping[torch.Tensor, set[str]], groups: list[Any]
    ) -> tuple[dict[str, torch.Tensor], list[Any]] | None:
        place = {one: index for index, group in enumerate(groups) for one in _ids_of(group)}
        found: dict[str, torch.Tensor] = {}
        group_of: list[Any] = []
        count = len(self.problems)
        for index, parameters in enumerate(live):
            places = set()
            for parameter in parameters:
                own = sorted(names.get(parameter, ()))
                known = [one for one in own if one in place]
                if not known:
                    shown = own[0] if own else f"a parameter of shape {tuple(parameter.shape)}"
                    self.problems.append(f"{name} has {shown} in the target, and not in the checkpoint")
                    continue
                found.update(dict.fromkeys(known, parameter))
                places.add(place[known[0]])
            if len(places) > 1 or (not parameters and len(groups) != len(live)):
                self.problems.append(
                    f"{name}.param_groups[{index}] holds parameters of several groups of the checkpoint"
                )
            group_of.append(groups[places.pop() if places else index] if groups else {})
        for one in place:
            if one not in found:
                self.problems.append(f"{name} has {one} in the checkpoint, and not in the target")
        return (found, group_of) if len(self.problems) == count else None

    def _state_of(self, path: Path, name: str, parameter: torch.Tensor, live: Any, node: Node | None) -> Any:
        """Return the state of a parameter with the tensors to fill: its own where it has them, else new ones."""
        if isinstance(node, dict):
            return {
                own: self._state_of(path, f"{name}.{own}", parameter, _item(live, own), below)
                for own, below in node.items()
            }
        if isinstance(node, list):
            return [
                self._state_of(path, f"{name}[{index}]", parameter, _item(live, index), below)
                for index, below in enumerate(node)
            ]
        if node is None or node.shape is None:
            return None if node is None else self.value_of(node)
        if isinstance(live, torch.Tensor) and tuple(live.shape) == node.shape:
            self._add_tensor(path, name, live, node)
            return live
        new = self._new_state(name, parameter, live, node)
        if new is not None:
            self.tensors[node.fqn] = new
        return new

    def _new_state(self, name: str, parameter: torch.Tensor, live: Any, saved: Saved) -> torch.Tensor | None:
        dtype = saved.described.properties.dtype  # type: ignore[union-attr]
        shape = saved.shape or ()
        if isinstance(live, torch.Tensor) and live.ndim:
            self.add_misfit_of_shape(name, live.shape, shape)
            return None
        is_step = name.endswith(".step")
        if shape == tuple(parameter.shape) and not is_step:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
        if isinstance(parameter, DTensor) and shape not in ((), (1,)):
            self.add_unknown_sharding(name, shape, parameter)
            return None
        return torch.empty(shape, dtype=dtype, device=_CPU if is_step else parameter.device)

    # --- all else

    def _add_stateful(self, path: Path, name: str, target: Any, value: Any) -> None:

        def put(loaded: Any) -> None:
            read = getattr(target, "state_dict", None)
            target.load_state_dict(like(loaded, read()) if callable(read) else loaded)

        self._add_step(OTHERS, path, name, value, put)


def like(value: Any, live: Any) -> Any:
    """Return a value with the keys of the live one, which DCP makes text, and with the empty dicts that DCP drops."""
    if not isinstance(value, Mapping) or not isinstance(live, Mapping):
        return live if value is None and isinstance(live, Mapping | list) and not live else value
    keys = {str(key): key for key in live}
    found = {keys.get(key, key): like(item, live.get(keys.get(key, key))) for key, item in value.items()}
    for key, item in live.items():
        if key not in found and isinstance(item, Mapping | list) and not item:
            found[key] = item
    return found


def holds_nothing(target: Any) -> bool:
    """Tell whether a target has no state, such as a disabled scaler: DCP leaves out empty entries."""
    if isinstance(target, torch.Tensor):
        return False
    read = getattr(target, "state_dict", None)
    state = read() if callable(read) else target
    return isinstance(state, Mapping | list | tuple) and not state


def _is_optimizer_state(node: Mapping[str, Node]) -> bool:
    return "param_groups" in node and set(node) <= {"state", "param_groups"}


def _ids(optimizer: Optimizer) -> dict[torch.Tensor, int]:
    """Return the number that each parameter has in the optimizer's state_dict."""
    numbers: dict[torch.Tensor, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers.setdefault(parameter, len(numbers))
    return numbers


def _names_of_parameters(modules: Iterable[torch.nn.Module]) -> dict[torch.Tensor, set[str]]:
    """Name parameters as torch's get_optimizer_state_dict does: without the wrappers around modules."""
    names: dict[torch.Tensor, set[str]] = {}
    for module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, set()).update(_get_fqns(module, name))
    return names


def _item(container: Any, key: Any) -> Any:
    # Keys of what was saved are text; those of what is live may be numbers.
    if isinstance(container, Mapping):
        return next((value for own, value in container.items() if str(own) == str(key)), None)
    return container[key] if isinstance(container, list | tuple) and key < len(container) else None


def _is_known(memory: torch.Tensor) -> bool:
    return type(memory) in (torch.Tensor, torch.nn.Parameter)


def _holds_state(item: object) -> bool:
    if isinstance(item, Mapping | list | tuple):
        return any(map(_holds_state, item.values() if isinstance(item, Mapping) else item))
    return isinstance(item, torch.Tensor) or callable(getattr(item, "load_state_dict", None))


def _layout(tensor: torch.Tensor) -> str:
    return f"a {'quantized' if tensor.is_quantized else tensor.layout} tensor"
