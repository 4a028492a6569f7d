"""The ranks plan a save of sharded state together, which rank writes which chunks, over a Session without collectives.

DCP's planners plan; this module does what dcp.save does around them, on the writing thread. For each save

    followers → coordinator   hello   what is saved; the version of the plan that this rank keeps of an earlier save, if
                                      its tensors are still alike; and sums of what it shares with others by that plan
    coordinator → followers   go      the directory, and whether that plan still holds. If it does not:
    followers → coordinator   plan    what this rank holds, and the sums of its samples (`plan_comparison`)
    coordinator → followers   plan    to each rank what it writes, and what it shares with others
    followers → coordinator   done    where each item lies in this rank's part, and the part's length

`hello`, `go` and `done` are JSON; the places in `done` follow the JSON, packed. Plans are pickles, and are read without
running what they name (`metadata`).
"""

from __future__ import annotations

import itertools
import math
import secrets
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from fastpersist.dcp.metadata import build_pickled, pickled
from fastpersist.dcp.plan_comparison import GetSums, sample, two_under_one_name
from fastpersist.dcp.save_planner import StepSavePlanner, is_object
from fastpersist.distributed.messages import decoded, encoded
from fastpersist.errors import ConfigError, CoordinationError, FormatError
from fastpersist.saving.directory_files import RankSession
from fastpersist.saving.ownership import Ownership
from fastpersist.transfer.garbage import no_garbage_collection

__all__ = ["Done", "Planned", "SharedPlans", "gather_done", "tell_done"]

_SHOWN_COUNT = 5

_PLAN_BYTES_MAX = 1 << 30
"""Of a plan, unpacked: some millions of items. Without a limit, a message of a few KiB could unpack to terabytes."""

_PLACE = struct.Struct("<QQ")
"""Offset and length of an item."""

_Sums: TypeAlias = dict[str, int]
"""A sum of the samples of each tensor of a rank, by name."""

_Common: TypeAlias = dict[str, list[str]]
"""By set of ranks that this one belongs to: the names of the tensors of which they hold the same chunk."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a save.

    Attributes:
        directory: Where the parts go.
        items: What this rank writes.
        indexes: The items that each rank writes; on the coordinator.
        metadata: What is saved, for all ranks; on the coordinator.
    """

    directory: str
    items: list[WriteItem]
    indexes: list[list[MetadataIndex]]
    metadata: Metadata | None


@dataclass(frozen=True, slots=True)
class Done:
    """What a rank has written.

    Attributes:
        part: Name, length and CRC of its part; None if it has none.
        places: Offset and length of each of its items.
    """

    part: tuple[str, int, int | None] | None
    places: list[tuple[int, int]]


class SharedPlans:
    """Plans saves that follow each other; a plan is used again while the tensors stay alike.

    One thread at a time uses it.

    Attributes:
        planner: Resolves the items of the last plan.
    """

    def __init__(self) -> None:
        self.planner = StepSavePlanner()
        self._taken = threading.Lock()
        self._kinds = _Kinds()
        self._structure: object = None  # of the state that `_local` plans
        self._local: list[WriteItem] = []  # what this rank holds
        self._version = ""  # of the plan of all ranks that includes `_local`; "" if there is none
        self._items: list[WriteItem] = []  # what this rank writes by that plan
        self._common: _Common = {}  # what this rank shares by that plan
        self._alone: frozenset[str] = frozenset()  # what no other rank holds, by the last plan
        self._indexes: list[list[MetadataIndex]] = []  # what each rank writes by that plan; on the coordinator
        self._metadata: Metadata | None = None

    def sample(self, state: Mapping[str, Any], ownership: Ownership) -> GetSums:
        """Take samples, as they are now, of what other ranks may hold, too; on any thread.

        Args:
            state: What this rank holds.
            ownership: What optimizers own.
        """
        return sample(state, ownership, self._alone)

    def agree(
        self,
        state: Mapping[str, Any],
        session: RankSession | None,
        label: str,
        directory: str | None,
        get_sums: GetSums | None = None,
    ) -> Planned:
        """Plan the save of a state with the other ranks.

        Args:
            state: What this rank holds of it.
            session: With the other ranks; None for a rank that saves alone.
            label: What is saved; the same on all ranks.
            directory: Where the parts go; on the coordinator.
            get_sums: Returns the sums of the samples of this state, to be compared; None to compare nothing.

        Raises:
            ConfigError: DCP cannot tell the names in the state apart; or there is one rank, and it does not hold all.
            CoordinationError: The ranks do not save the same, or what they hold makes no whole tensors.
            PeerError: Another rank has failed.
        """
        sums = {} if get_sums is None or session is None else get_sums()
        self._plan_locally(state, is_first=session is None or session.rank == 0)
        if session is None or session.count == 1:
            if not self._version:
                (self._items,) = self._plan_for_all([self._local], [self.planner.mappings])
                self._note_common({})
        elif session.rank == 0:
            self._lead(session, label, directory, sums)
        else:
            directory = self._follow(session, label, sums)
        # The planner has to know what was cut, to resolve the items that this rank writes.
        self.planner.finish_plan(SavePlan(self._items))
        return Planned(directory or "", self._items, self._indexes, self._metadata)

    @contextmanager
    def taken(self) -> Iterator[SharedPlans]:
        """Give these plans to a save, or new ones if another save uses them: saves may overlap on some ranks only."""
        if not self._taken.acquire(blocking=False):
            yield SharedPlans()
            return
        try:
            yield self
        finally:
            self.planner.state_dict = {}  # free the tensors, keep the plan
            self._taken.release()

    @no_garbage_collection()
    def _plan_locally(self, state: Mapping[str, Any], *, is_first: bool) -> None:
        planner = self.planner
        try:
            planner.set_up_planner(dict(state), is_coordinator=is_first)
        except ValueError as error:  # "a.b" and "b" in "a"
            raise ConfigError(f"two entries of the state have the same name for DCP: {error}") from error
        # Numbers, not tuples: the garbage collector would visit each tuple until the next save.
        kinds = [self._kinds.number_of(value) for value in planner.state_dict.values()]
        structure = (list(planner.state_dict), planner.mappings, kinds)
        if structure != self._structure:
            self._version = ""
            self._structure = None
            self._local = planner.create_local_plan().items
            self._structure = structure

    @no_garbage_collection()
    def _plan_for_all(self, items: list[list[WriteItem]], mappings: list[dict[str, Any]]) -> list[list[WriteItem]]:
        """Return what each rank writes; on the coordinator, which keeps only the indexes of it."""
        self._version = ""
        if len(items) == 1:
            _refuse_parts(items[0])
        plans = [SavePlan(own, planner_data=paths) for own, paths in zip(items, mappings, strict=True)]
        try:
            shared, metadata = self.planner.create_global_plan(plans)
        except (ValueError, AssertionError) as error:
            names = ", ".join(_incomplete(items)[:_SHOWN_COUNT])  # older releases of torch do not name them
            raise CoordinationError(f"what the ranks hold makes no whole tensors ({names}): {error}") from error
        self.planner.global_plan, self.planner.metadata = [], Metadata({})
        self._indexes = [[item.index for item in plan.items] for plan in shared]
        self._metadata = _in_order(metadata, mappings)
        self._version = secrets.token_hex(8)
        return [plan.items for plan in shared]

    def _note_common(self, common: _Common) -> None:
        self._common = common
        shared = {name for names in common.values() for name in names}
        self._alone = frozenset(item.index.fqn for item in self._local) - shared

    def _lead(self, session: RankSession, label: str, directory: str | None, sums: _Sums) -> None:
        hellos = [decoded(one, rank) for rank, one in enumerate(session.gather(b"{}"))]
        for rank, hello in enumerate(hellos[1:], 1):
            if hello.get("label") != label:
                raise CoordinationError(
                    f"the ranks do not save the same in the same order: rank 0 is at {label}, rank {rank} at "
                    f"{hello.get('label')}. All ranks save equally often, with the same steps or names"
                )
        holds = bool(self._version) and all(hello.get("version") == self._version for hello in hellos[1:])
        holds = holds and _are_alike([_joint(self._common, sums), *(hello.get("sums") or {} for hello in hellos[1:])])
        session.answer(encoded({"directory": directory, "holds": holds}))
        if holds:
            return
        told = [_unpacked(one, rank, _HELD) for rank, one in enumerate(session.gather(b"")) if rank]
        held = [self._local, *(items for items, _, _ in told)]
        _refuse_differences(held)
        common = _common([sums, *(of_rank for _, _, of_rank in told)], held)
        shared = self._plan_for_all(held, [self.planner.mappings, *(paths for _, paths, _ in told)])
        self._items = shared[0]
        self._note_common(common[0])
        others = list(zip(shared, common, strict=True))[1:]
        session.answer_each([b"", *(_packed((self._version, items, same)) for items, same in others)])

    def _follow(self, session: RankSession, label: str, sums: _Sums) -> str:
        joint = _joint(self._common, sums) if self._version else {}
        session.tell(encoded({"label": label, "version": self._version, "sums": joint}))
        go = decoded(session.hear(), 0)
        if not go.get("holds"):
            session.tell(_packed((self._local, self.planner.mappings, sums)))
            self._version, self._items, common = _unpacked(session.hear(), 0, _SHARED)
            self._note_common(common)
        return str(go["directory"])


def tell_done(session: RankSession, done: Done) -> None:
    """Tell the coordinator what this one has written."""
    places = zlib.compress(b"".join(_PLACE.pack(*place) for place in done.places), 1)
    session.tell(encoded({"part": done.part}) + b"\n" + places)


def gather_done(session: RankSession | None, own: Done, indexes: Sequence[Sequence[MetadataIndex]]) -> list[Done]:
    """Return what each rank has written, when all have.

    Raises:
        CoordinationError: A rank has written something else than was planned.
        PeerError: A rank has failed.
    """
    found = [own]
    for rank, message in enumerate([] if session is None else session.gather(b"")):
        if rank == 0:
            continue
        text, _, packed = message.partition(b"\n")
        said = decoded(text, rank)
        try:
            data = _decompressed(packed, _PLACE.size * len(indexes[rank]))
            places = list(_PLACE.iter_unpack(data))
            part = said["part"]
            found.append(Done(None if part is None else (part[0], part[1], part[2]), places))
        except (struct.error, zlib.error, LookupError, TypeError) as error:
            raise CoordinationError(f"where rank {rank} has written its items cannot be read: {error!r}") from error
    for rank, (done, planned) in enumerate(zip(found, indexes, strict=True)):
        if len(done.places) != len(planned):
            raise CoordinationError(f"rank {rank} has written {len(done.places)} items, and not {len(planned)}")
    return found


# --- what the ranks say


_HELD = (list, dict, dict)
_SHARED = (str, list, dict)
"""Types of what the two plans consist of."""


def _packed(plan: object) -> bytes:
    data = pickled(plan)
    if len(data) > _PLAN_BYTES_MAX:
        raise ConfigError(
            f"the plan of this save takes {len(data)} bytes, and the ranks take {_PLAN_BYTES_MAX} from each other: "
            "save fewer, larger tensors"
        )
    return zlib.compress(data, 1)


def _unpacked(message: bytes, rank: int, types: tuple[type, ...]) -> Any:
    try:
        plan = build_pickled(_decompressed(message, _PLAN_BYTES_MAX))
    except (FormatError, zlib.error) as error:
        raise CoordinationError(f"the plan of rank {rank} cannot be read: {error}") from error
    items = [] if type(plan) is not tuple else next((part for part in plan if type(part) is list), [])
    if type(plan) is not tuple or tuple(map(type, plan)) != types or {*map(type, items)} - {WriteItem}:
        raise CoordinationError(f"the plan of rank {rank} cannot be read: it is none")
    return plan


def _decompressed(message: bytes, size_bytes_max: int) -> bytes:
    """Decompress a whole stream.

    Raises:
        zlib.error: It is not whole, or longer than `size_bytes_max`.
    """
    stream = zlib.decompressobj()
    data = stream.decompress(message, size_bytes_max + 1)
    if len(data) > size_bytes_max or not stream.eof or stream.unused_data:
        raise zlib.error(f"it is cut off, or longer than {size_bytes_max} bytes")
    return data


# --- what fits together


class _Kinds:
    """Numbers values: two values that are planned alike have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._unknown = itertools.count(-1, -1)

    def number_of(self, value: object) -> int:
        """Return the number of a value; a new one if it is not known how it is planned."""
        if is_object(value):
            value = None  # planned as all objects are
        kind: object = None
        if type(value) is DTensor:
            kind = (value.shape, value.dtype, value.requires_grad, value.placements, value.device_mesh)
        elif type(value) in (torch.Tensor, torch.nn.Parameter):
            kind = (value.shape, value.dtype, value.requires_grad, value.layout)  # type: ignore[attr-defined]
        elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return next(self._unknown)
        return self._numbers.setdefault(kind, len(self._numbers))


@no_garbage_collection()
def _refuse_differences(items: Sequence[Sequence[WriteItem]]) -> None:
    """Refuse names that stand for different things on different ranks.

    Raises:
        CoordinationError: There is such a name.
    """
    firsts: dict[str, tuple[int, WriteItem]] = {}
    for rank, own in enumerate(items):
        for item in own:
            first_rank, first = firsts.setdefault(item.index.fqn, (rank, item))
            if first is not item and _essence(first) != _essence(item):
                raise CoordinationError(
                    f"the ranks do not save the same: {item.index.fqn!r} is {_described(first)} on rank {first_rank}, "
                    f"and {_described(item)} on rank {rank}"
                )


@no_garbage_collection()
def _common(sums: Sequence[_Sums], items: Sequence[Sequence[WriteItem]]) -> list[_Common]:
    """Return for each rank what it shares with others, as far as it is sampled.

    Args:
        sums: Of each rank.
        items: What each rank holds.

    Raises:
        CoordinationError: Ranks hold different values of the same chunk.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, own in enumerate(items):
        counts = Counter(item.index.fqn for item in own)  # a sum is of all that a rank holds under a name
        for item in own:
            name = item.index.fqn
            if counts[name] == 1 and name in sums[rank]:
                holders.setdefault(item.index, []).append(rank)
    common: list[_Common] = [{} for _ in items]
    for index, ranks in holders.items():
        if len(ranks) == 1:
            continue
        name, key = index.fqn, " ".join(map(str, ranks))
        odd = [rank for rank in ranks if sums[rank][name] != sums[ranks[0]][name]]
        if odd:
            raise two_under_one_name(name, "other values of it", [ranks[0], *odd], "or passed as rank_state")
        for rank in ranks:
            common[rank].setdefault(key, []).append(name)
    return common


def _joint(common: _Common, sums: _Sums) -> dict[str, int]:
    """Return, for each set of ranks, one sum of all that they share."""
    return {ranks: zlib.crc32(repr([sums.get(name) for name in names]).encode()) for ranks, names in common.items()}


def _are_alike(told: Sequence[Mapping[str, int]]) -> bool:
    """Tell whether all ranks have told the same sums."""
    first: dict[str, int] = {}
    return all(first.setdefault(ranks, total) == total for of_rank in told for ranks, total in of_rank.items())


def _incomplete(items: Sequence[Sequence[WriteItem]]) -> list[str]:
    """Return the names of the tensors whose chunks, each counted once, are more or less than the tensor."""
    missing_counts: dict[str, int] = {}
    for item in {item.index: item for own in items for item in own if item.tensor_data is not None}.values():
        data: Any = item.tensor_data
        missing_counts.setdefault(item.index.fqn, data.size.numel())
        missing_counts[item.index.fqn] -= data.chunk.sizes.numel()
    return [name for name, count in missing_counts.items() if count]


def _essence(item: WriteItem) -> object:
    data = item.tensor_data
    return None if data is None else (item.type, data.size, data.properties.dtype)


def _described(item: WriteItem) -> str:
    if item.tensor_data is None:
        return "an object"
    kind = "a sharded tensor" if item.type == WriteItemType.SHARD else "a plain tensor"
    return f"{kind} of shape {tuple(item.tensor_data.size)} and {item.tensor_data.properties.dtype}"


def _in_order(metadata: Metadata, mappings: Sequence[Mapping[str, Any]]) -> Metadata:
    """Return metadata in the order of the state, which DCP loses: the coordinator's names, then those of followers."""
    paths: dict[str, Any] = {}
    for own in mappings:
        for name, path in own.items():
            paths.setdefault(name, path)
    described = metadata.state_dict_metadata
    names = [*(name for name in paths if name in described), *(name for name in described if name not in paths)]
    return replace(metadata, state_dict_metadata={name: described[name] for name in names}, planner_data=paths)


def _refuse_parts(items: Sequence[WriteItem]) -> None:
    """Refuse tensors of which a rank that saves alone holds a part only; with several ranks, DCP finds them.

    Raises:
        ConfigError: There is one.
    """
    held: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for item in items:
        if item.tensor_data is not None:
            name = item.index.fqn
            held[name] = held.get(name, 0) + math.prod(item.tensor_data.chunk.sizes)
            sizes[name] = math.prod(item.tensor_data.size)
    for name, count in held.items():
        if count != sizes[name]:
            raise ConfigError(
                f"{name!r} is sharded over several ranks, and this one holds {count} of its {sizes[name]} elements: "
                "save with process_group= of all of these ranks"
            )
