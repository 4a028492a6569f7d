"""Checks that ranks hold the same tensor under one name: compares samples that are taken when a save begins.

One name on several ranks stands for one tensor. One rank's bytes of it are written, or some rows of each rank's. If two
different tensors have one name (stages of a pipeline whose optimizers number their parameters), one of them would be
lost, or both would be mixed. So CRCs of samples are compared for tensors that must be the same on all ranks:

- shards of DTensors and ShardedTensors, except partial sums;
- plain tensors that an optimizer owns, or that lie in its state_dict, except single numbers: the count of updates of a
  parameter may differ if ranks get other data;
- plain tensors that are large enough to be cut among ranks.

Other plain tensors (statistics of batches, states of random generators) differ by design: one rank's are saved, as in
DCP.

In saves of a Checkpointer, `plan_agreement` compares the samples, over connections of our own. In torch's own saves,
the samples are sent with the plans, and the coordinator compares them. There a rank does not know what others hold, so
it samples everything that they may hold: tensors that would be cut, those in the state_dict of an optimizer, and chunks
of DTensors, unless each rank has a chunk of its own. To DCP a plan with samples is a SavePlan; the samples are removed
before DCP makes the plan of all ranks, so what DCP keeps and writes does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor, Partial, Replicate

from fastpersist.dcp.blobs import is_plain
from fastpersist.distributed.replica_check import sample_crcs
from fastpersist.errors import CoordinationError
from fastpersist.saving.ownership import Ownership
from fastpersist.transfer.garbage import no_garbage_collection

__all__ = [
    "CUT_TENSOR_BYTES_MIN",
    "GetSums",
    "Held",
    "Paths",
    "StagedMeta",
    "compared",
    "sample",
    "samples_of_state",
    "two_under_one_name",
    "with_samples",
]

_SHOWN_COUNT = 5

CUT_TENSOR_BYTES_MIN = 2 << 20
"""Smaller tensors are not cut among the ranks that hold them (`save_planner`)."""

GetSums: TypeAlias = Callable[[], dict[str, int]]
"""Returns a sum for each sampled tensor, by its name for DCP. May wait for a device to copy the samples."""

Held: TypeAlias = Mapping[str, list[WriteItem]]
"""What a rank holds of a state, by name."""

Paths: TypeAlias = Mapping[str, tuple[Any, ...]]
"""The path of each name in the state."""


# --- samples


@no_garbage_collection()
def sample(state: Mapping[str, Any], ownership: Ownership) -> GetSums:
    """Take samples of the tensors of a state that other ranks may hold, as they are now; waits for no device.

    Args:
        state: Nested dicts and lists of tensors.
        ownership: The storages that optimizers own.
    """
    rank_count = _rank_count()
    if rank_count == 1:
        return dict
    found: dict[str, torch.Tensor] = {}
    owned = {*ownership.stable.held, *ownership.constant.held}
    _find_alike(state, "", found, _Judge(owned, rank_count), in_optimizer=False)
    return _taken(found)


@no_garbage_collection()
def _sample_each(tensors: Mapping[str, torch.Tensor]) -> GetSums:
    """Take samples of tensors, as they are now; waits for no device.

    Args:
        tensors: The tensors by name. Those that cannot be compared get no sample.
    """
    found = {name: _local_of(tensor) for name, tensor in tensors.items()}
    return _taken({name: local for name, local in found.items() if local is not None})


def _taken(found: Mapping[str, torch.Tensor]) -> GetSums:
    """Take samples of contiguous plain tensors."""
    get = sample_crcs(list(found.values()))
    return lambda: dict(zip(found, get(), strict=True))


class _Judge:
    """Decides which tensors must be the same on all ranks."""

    def __init__(self, owned: Container[int], rank_count: int) -> None:
        self._owned = owned
        self._rank_count = rank_count

    def local_of(self, tensor: torch.Tensor, *, in_optimizer: bool) -> torch.Tensor | None:
        """Return what this rank holds of a tensor; None if it is not compared with other ranks."""
        if isinstance(tensor, DTensor) and _is_divided(tensor, self._rank_count):
            return None
        local = _local_of(tensor)
        if local is not tensor or local is None or in_optimizer or local.nbytes >= CUT_TENSOR_BYTES_MIN:
            return local
        return local if local.untyped_storage()._cdata in self._owned else None


def _local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what this rank holds of a tensor; None if that cannot be compared, or may differ."""
    local, count_min = tensor, 1
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            return None
    elif isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        if len(shards) != 1:
            return None
        local = shards[0].tensor
    else:
        count_min = 2
    if not is_plain(local) or local.numel() < count_min or local.device.type not in ("cpu", "cuda"):
        return None
    return local if local.is_contiguous() and not local.is_conj() and not local.is_neg() else None


def _find_alike(value: Any, name: str, found: dict[str, torch.Tensor], judge: _Judge, *, in_optimizer: bool) -> None:
    """Find the tensors to compare, by their names for DCP."""
    if isinstance(value, torch.Tensor):
        local = judge.local_of(value, in_optimizer=in_optimizer)
        if local is not None:
            found[name] = local
    elif isinstance(value, Mapping):
        is_optimizer = isinstance(value.get("state"), Mapping) and isinstance(value.get("param_groups"), list)
        for key, item in value.items():
            inner = f"{name}.{key}" if name else str(key)
            _find_alike(item, inner, found, judge, in_optimizer=in_optimizer or (is_optimizer and key == "state"))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _find_alike(item, f"{name}.{index}", found, judge, in_optimizer=in_optimizer)


# --- in torch's own saves


@dataclass
class StagedMeta(StorageMeta):
    """What a storage writer tells the planner of a staged state, whose tensors change meanwhile; never written.

    Attributes:
        get_sums: Returns the sums of the samples that were taken when the state was staged.
    """

    get_sums: GetSums = dict


class _Sampled(NamedTuple):
    """A tensor as one rank holds it, or its chunk of one.

    Attributes:
        offsets: The offsets of the chunk; empty for a plain tensor without dimensions.
        sizes: The shape of the chunk.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        is_free: Ranks may hold tensors of different shapes under the name; then none is cut, and one rank's is saved.
        total: The sum of the samples.
    """

    offsets: torch.Size
    sizes: torch.Size
    shape: torch.Size
    dtype: torch.dtype
    is_free: bool
    total: int

    def is_like(self, other: _Sampled) -> bool:
        """Tell whether these are chunks of the same tensor, apart from their values."""
        return (self.sizes, self.shape, self.dtype) == (other.sizes, other.shape, other.dtype)


@dataclass(frozen=True)
class _SampledPlan(SavePlan):
    samples: Mapping[str, _Sampled] = field(default_factory=dict)


@no_garbage_collection()
def with_samples(
    plan: SavePlan, held: Held, state: Mapping[str, Any], paths: Paths, *, are_cut: bool, get_sums: GetSums | None
) -> SavePlan:
    """Add to a rank's plan samples of what other ranks may hold, too.

    Args:
        plan: The plan that the rank is about to send.
        held: All that the rank holds; that is more than the plan has, if the plan is the one of the last save.
        state: The tensors, by name.
        paths: The paths of the names; empty if the state is flat.
        are_cut: Whether large tensors are cut.
        get_sums: Returns the sums of samples that have been taken already. None: they are taken now.

    Returns:
        A plan with all that the given one has.
    """
    due = _due(state, paths, are_cut=are_cut)
    if not due:
        return plan
    sums = _sample_each({name: state[name] for name in due})() if get_sums is None else get_sums()
    samples = {
        name: _sampled(held[name][0], is_free, sums[name])
        for name, is_free in due.items()
        if name in sums and len(held.get(name, ())) == 1
    }
    return _SampledPlan(plan.items, plan.storage_data, plan.planner_data, plan.usable, samples)


@no_garbage_collection()
def samples_of_state(state: dict[str, Any]) -> GetSums:
    """Take samples, as they are now, of all that a planner would compare of a state; waits for no device."""
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:  # two entries have one name; the planner says so
        return dict
    return _sample_each({name: flat[name] for name in _due(flat, paths, are_cut=True)})


def _due(state: Mapping[str, Any], paths: Paths, *, are_cut: bool) -> dict[str, bool]:
    """Return the names of the tensors to compare, and for each whether it `is_free`."""
    rank_count = _rank_count()
    if rank_count == 1:
        return {}
    due: dict[str, bool] = {}
    optimizers = _optimizers_in(paths)
    for name, value in state.items():
        if isinstance(value, DTensor):
            if not _is_divided(value, rank_count):
                due[name] = False
        elif isinstance(value, ShardedTensor):
            due[name] = False
        elif isinstance(value, torch.Tensor):
            if optimizers and _is_state(paths.get(name, ()), optimizers):
                due[name] = False
            elif are_cut and is_plain(value) and value.nbytes >= CUT_TENSOR_BYTES_MIN and value.shape[:1] > (1,):
                due[name] = True
    return due


def _rank_count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _optimizers_in(paths: Paths) -> set[tuple[Any, ...]]:
    """Return the paths of optimizers' state_dicts in a state."""
    return {path[: path.index("param_groups")] for path in paths.values() if "param_groups" in path}


def _is_state(path: tuple[Any, ...], optimizers: set[tuple[Any, ...]]) -> bool:
    """Tell whether something is in the "state" of one of these optimizers."""
    return "state" in path and any(key == "state" and path[:at] in optimizers for at, key in enumerate(path))


def _is_divided(tensor: DTensor, rank_count: int) -> bool:
    """Tell whether each rank has a chunk of its own, so that no two ranks can hold the same."""
    mesh = tensor.device_mesh
    return mesh.size() == rank_count and not any(
        isinstance(placement, Replicate | Partial) and mesh.size(dimension) > 1
        for dimension, placement in enumerate(tensor.placements)
    )


def _sampled(item: WriteItem, is_free: bool, total: int) -> _Sampled:
    data: Any = item.tensor_data
    return _Sampled(data.chunk.offsets, data.chunk.sizes, data.size, data.properties.dtype, is_free, total)


@no_garbage_collection()
def compared(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Compare the samples in the plans of all ranks; on the coordinator.

    Returns:
        The plans without them.

    Raises:
        CoordinationError: Two ranks hold two tensors under one name.
    """
    holders: dict[tuple[str, torch.Size], list[int]] = {}
    for rank, plan in enumerate(plans):
        for name, sample in _samples_of(plan).items():
            holders.setdefault((name, sample.offsets), []).append(rank)
    for (name, _), ranks in holders.items():
        if len(ranks) > 1:
            _refuse_difference(name, {rank: _samples_of(plans[rank])[name] for rank in ranks})
    return [SavePlan(plan.items, plan.storage_data, plan.planner_data, plan.usable) for plan in plans]


def _samples_of(plan: SavePlan) -> Mapping[str, _Sampled]:
    return plan.samples if isinstance(plan, _SampledPlan) else {}


def _refuse_difference(name: str, samples: Mapping[int, _Sampled]) -> None:
    """Refuse a chunk that several ranks hold in different ways."""
    first_rank, first = next(iter(samples.items()))
    unlike = [rank for rank, sample in samples.items() if not sample.is_like(first)]
    if unlike and all(sample.is_free for sample in samples.values()):
        return
    odd = unlike or [rank for rank, sample in samples.items() if sample.total != first.total]
    if odd:
        difference = "one of another shape or dtype" if unlike else "other values of it"
        otherwise = "or needs a name of its own on each rank"
        raise two_under_one_name(name, difference, [first_rank, *odd], otherwise)


def two_under_one_name(name: str, difference: str, ranks: Sequence[int], otherwise: str) -> CoordinationError:
    """Return the error for ranks that should hold the same tensor, and do not.

    Args:
        name: The name of the tensor, for DCP.
        difference: What the first of the ranks holds, up to "than".
        ranks: The first rank, then those that hold something else.
        otherwise: What else can be done with a tensor that differs by design.
    """
    return CoordinationError(
        f"{name!r} counts as one tensor, and rank {ranks[0]} holds {difference} than rank "
        f"{', '.join(map(str, ranks[1 : 1 + _SHOWN_COUNT]))}. Nothing was published. Optimizers of a pipeline's "
        "stages number their parameters alike: save by names, as torch's get_optimizer_state_dict gives them, and "
        f"modules of stages under keys of their own. Leave other tensors that differ out of the state, {otherwise}"
    )
