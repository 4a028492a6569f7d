"""The ranks agree which rank writes which chunks of sharded state, over a Session without collectives.

Each rank uses DCP's planner for what it holds; `global_plan` plans for all. For each save, on the writing thread:

    followers → coordinator   hello    what is saved; the version of the plan that this rank keeps of an earlier save,
                                       if its tensors are still alike; sums of what it shares with others by that plan
    coordinator → followers   go       the directory, and whether that plan still holds; a token of this save, and that
                                       of the last save of which the coordinator still has the places. If it does not:
    followers → coordinator   digests  of what this rank holds, and of the sums of its samples (`plan_comparison`)
    coordinator → followers   wanted   which of both to send: of ranks that hold the same, only the first one's
    followers → coordinator   plan     those, packed (`held_items`), and the names of objects
    coordinator → followers   plan     to each rank what it writes, and what it shares with others
    followers → coordinator   done     where each item lies in this rank's part, and the part's length. Of tensors that
                                       lie where the coordinator has them already, only a digest

Everything except the plans is JSON; in `done`, packed places follow the JSON. Plans are pickles, and are read without
running their code (`metadata`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
import struct
import threading
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from fastpersist.dcp.global_plan.assignment import WHOLE, Group, Share, WholePlan, assign, common_of
from fastpersist.dcp.global_plan.held_items import HeldTensors, TensorNames, from_runs, packed_tensors, runs_of
from fastpersist.dcp.global_plan.kept_metadata import KeptMetadata
from fastpersist.dcp.metadata import build_pickled, pickled
from fastpersist.dcp.plan_comparison import GetSums
from fastpersist.dcp.save_planner import StepSavePlanner, is_object, rows_of
from fastpersist.distributed.file_agreement import hear_all
from fastpersist.distributed.messages import decoded, encoded
from fastpersist.errors import ConfigError, CoordinationError, FormatError, InternalError
from fastpersist.saving.directory_files import RankSession
from fastpersist.transfer.garbage import no_garbage_collection

__all__ = ["Done", "Planned", "SharedPlans", "Whole", "gather_done", "tell_done"]

_PLAN_BYTES_MAX = 1 << 30
"""Of a plan, unpacked: some millions of items. Without a limit, a message of a few KiB could unpack to terabytes."""

_PLACE = struct.Struct("<QQ")
"""Offset and length of an item."""

_Sums: TypeAlias = dict[str, int]
"""A sum of the samples of each tensor of a rank, by name."""

_Common: TypeAlias = dict[str, list[str]]
"""By set of ranks (this rank among them): the names of the tensors of which they hold the same chunk."""


@dataclass(frozen=True)
class Planned:
    """The plan of a save.

    Attributes:
        directory: The directory of the parts.
        items: The items that this rank writes: tensors, then objects.
        tensor_count: The number of tensors among the items.
        whole: On the coordinator, what all ranks write, and the metadata; None on followers.
        save: The token of this save.
        kept: The token of the save whose places the coordinator has; "" if it has none.
        told: The packed places of tensors that this rank has sent, by token of the save; a follower changes it.
    """

    directory: str
    items: list[WriteItem]
    tensor_count: int
    whole: Whole | None
    save: str = ""
    kept: str = ""
    told: dict[str, bytes] = field(default_factory=dict)


class Whole:
    """What all ranks write by one plan, from save to save; on the coordinator.

    Args:
        plan: The plan.

    Attributes:
        metadata: Pickles DCP's metadata.
        kept: Token of the save whose places `metadata` has.
    """

    def __init__(self, plan: WholePlan) -> None:
        self.plan = plan
        self.metadata = KeptMetadata(plan)
        self.kept = ""


@dataclass(frozen=True, slots=True)
class Done:
    """What a rank has written.

    Attributes:
        part: Name, length and CRC of its part; None if it has none.
        places: Offset and length of each of its tensors, packed.
        object_places: Offset and length of each of its objects.
    """

    part: tuple[str, int, int | None] | None
    places: bytes
    object_places: list[tuple[int, int]]

    @classmethod
    def of(cls, part: tuple[str, int, int | None] | None, places: Sequence[tuple[int, int]], tensor_count: int) -> Done:
        """Return what a rank has written whose first items are tensors."""
        return cls(part, b"".join(_PLACE.pack(*one) for one in places[:tensor_count]), list(places[tensor_count:]))


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
        self._tensor_count = 0  # of these
        self._common: _Common = {}  # what this rank shares by that plan
        self._whole: Whole | None = None  # on the coordinator
        self._told: dict[str, bytes] = {}  # see `Planned`

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
            state: This rank's state.
            session: The session with the other ranks; None for a rank that saves alone.
            label: The name of what is saved; the same on all ranks.
            directory: The directory of the parts; None on followers.
            get_sums: Returns the sums of the samples of this state, to be compared; None to compare nothing.

        Raises:
            ConfigError: DCP cannot tell the names in the state apart; or there is one rank, and it does not hold all.
            CoordinationError: The ranks do not save the same, or what they hold makes no whole tensors.
            PeerError: Another rank has failed.
        """
        sums = {} if get_sums is None or session is None else get_sums()
        self._plan_locally(state, is_first=session is None or session.rank == 0)
        save, kept = secrets.token_hex(8), ""
        if session is None or session.count == 1:
            if not self._version:
                _refuse_parts(self._local)
                self._plan_for_all([_Told(*self._packed_locally({}), self._objects(), {})])
                self._common = {}
        elif session.rank == 0:
            self._lead(session, label, directory, sums, save)
        else:
            directory, save, kept = self._follow(session, label, sums)
        # The planner has to know what was cut, to resolve the items that this rank writes.
        self.planner.finish_plan(SavePlan(self._items))
        return Planned(directory or "", self._items, self._tensor_count, self._whole, save, kept, self._told)

    @contextmanager
    def taken(self) -> Iterator[SharedPlans]:
        """Lend these plans to a save, or new ones if another save uses them: saves may overlap on some ranks only."""
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

    def _tensors(self) -> list[WriteItem]:
        return [item for item in self._local if item.tensor_data is not None]

    def _objects(self) -> list[str]:
        return [item.index.fqn for item in self._local if item.tensor_data is None]

    def _packed_locally(self, sums: _Sums) -> tuple[bytes, bytes]:
        return packed_tensors(self._tensors(), self.planner.mappings, sums)

    @no_garbage_collection()
    def _plan_for_all(self, told: Sequence[_Told]) -> list[_Common]:
        """Plan what each rank writes, from what each has sent; return what each shares. On the coordinator."""
        self._version, self._whole = "", None
        groups, group_of = _grouped(told)
        common = common_of(groups)
        paths = [self.planner.mappings, *(group.held.described.paths for group in groups), *(one.paths for one in told)]
        plan = assign(groups, [one.objects for one in told], paths)
        self._whole = Whole(plan)
        self._take_share(plan.shares[0])
        self._version = secrets.token_hex(8)
        return [common[number] for number in group_of]

    def _take_share(self, share: Share) -> None:
        """Note what this rank writes."""
        tensors = self._tensors()
        objects = {item.index.fqn: item for item in self._local if item.tensor_data is None}
        self._items = [
            tensors[item] if first_row == WHOLE else rows_of(tensors[item], first_row, row_count)
            for item, first_row, row_count in zip(share.items, share.first_rows, share.row_counts, strict=True)
        ]
        self._tensor_count = len(self._items)
        self._items += [objects[name] for name in share.objects]

    def _lead(self, session: RankSession, label: str, directory: str | None, sums: _Sums, save: str) -> None:
        hellos = hear_all(session, {})
        for rank, hello in enumerate(hellos[1:], 1):
            if hello.get("label") != label:
                raise CoordinationError(
                    f"the ranks do not save the same in the same order: rank 0 is at {label}, rank {rank} at "
                    f"{hello.get('label')}. All ranks save equally often, with the same steps or names. After a "
                    "missed call: rebind(group) of the Checkpointer on all ranks, or a new process group"
                )
        holds = bool(self._version) and all(hello.get("version") == self._version for hello in hellos[1:])
        holds = holds and _are_alike([_joint(self._common, sums), *(hello.get("sums") or {} for hello in hellos[1:])])
        kept = self._whole.kept if holds and self._whole is not None else ""
        session.answer(encoded({"directory": directory, "holds": holds, "save": save, "kept": kept}))
        if holds:
            return
        told = _gather_plans(session, _Told(*self._packed_locally(sums), self._objects(), {}))
        common = self._plan_for_all(told)
        self._common = common[0]
        if self._whole is None:
            raise InternalError("there is no plan of all ranks after it was made")
        numbers = _NameNumbers()
        shares = zip(self._whole.plan.shares, common, self._whole.plan.held_by(), told, strict=True)
        plans = [_share_message(self._version, *one, numbers) for one in shares]
        session.answer_each([b"", *plans[1:]])

    def _follow(self, session: RankSession, label: str, sums: _Sums) -> tuple[str, str, str]:
        """Return the directory, and the tokens of this save and of the one whose places the coordinator has."""
        joint = _joint(self._common, sums) if self._version else {}
        session.tell(encoded({"label": label, "version": self._version, "sums": joint}))
        go = decoded(session.hear(), 0)
        if not go.get("holds"):
            self._told.clear()
            names, chunks = self._packed_locally(sums)
            session.tell(encoded({"names": _digest(names), "chunks": _digest(chunks)}))
            wanted = decoded(session.hear(), 0)
            objects = self._objects()
            paths = {name: self.planner.mappings[name] for name in objects if name in self.planner.mappings}
            blobs = names if wanted.get("names") else b"", chunks if wanted.get("chunks") else b""
            session.tell(_packed((*blobs, objects, paths)))
            self._hear_share(session.hear())
        return str(go["directory"]), str(go.get("save")), str(go.get("kept"))

    def _hear_share(self, message: bytes) -> None:
        """Take the coordinator's plan of what this rank writes."""
        version, items, first_rows, row_counts, objects, common = _unpacked(message, 0, _SHARED)
        tensors, names = self._tensors(), self._objects()
        try:
            share = Share(
                array("I", from_runs(items, len(tensors))),
                array("q", first_rows),
                array("q", row_counts),
                [names[number] for number in from_runs(objects, len(names))],
            )
            self._take_share(share)
            own = list(dict.fromkeys(item.index.fqn for item in tensors))
            shared = {
                ranks: [own[number] for number in from_runs(packed, len(own))] for ranks, packed in common.items()
            }
        except (FormatError, ValueError, TypeError) as error:
            raise CoordinationError(f"the plan of rank 0 cannot be read: {error}") from error
        self._version = version
        self._common = shared


def tell_done(session: RankSession, done: Done, planned: Planned) -> None:
    """Tell the coordinator what this one has written."""
    told = planned.told
    is_known = bool(planned.kept) and told.get(planned.kept) == done.places
    known = {planned.kept: told[planned.kept]} if is_known else {}
    told.clear()
    told.update(known)
    told[planned.save] = done.places
    objects = b"".join(_PLACE.pack(*one) for one in done.object_places)
    said: dict[str, Any] = {"part": done.part}
    if is_known:
        said["places"] = _digest(done.places)
    packed = zlib.compress(objects if is_known else done.places + objects, 1)
    session.tell(encoded(said) + b"\n" + packed)


def gather_done(session: RankSession | None, own: Done, planned: Planned) -> list[Done]:
    """Return what each rank has written, when all have.

    Raises:
        CoordinationError: A rank has written something else than was planned.
        PeerError: A rank has failed.
    """
    whole = planned.whole
    if whole is None:
        raise InternalError("the coordinator has no plan of what the ranks have written")
    kept = whole.metadata.places or []
    found = [own]
    for rank, message in enumerate([] if session is None else session.gather(b"")):
        if rank:
            found.append(_read_done(message, rank, whole.plan.shares[rank], kept[rank] if kept else None))
    for rank, (done, share) in enumerate(zip(found, whole.plan.shares, strict=True)):
        counts = len(done.places) // _PLACE.size, len(done.object_places)
        if counts != (len(share.items), len(share.objects)):
            raise CoordinationError(f"rank {rank} has written {sum(counts)} items, and not {len(share)}")
    return found


def _read_done(message: bytes, rank: int, share: Share, kept: bytes | None) -> Done:
    text, _, packed = message.partition(b"\n")
    said = decoded(text, rank)
    try:
        data = _decompressed(packed, _PLACE.size * len(share))
        places, objects = data[: _PLACE.size * len(share.items)], data[_PLACE.size * len(share.items) :]
        if "places" in said:
            if kept is None or said["places"] != _digest(kept):
                raise ValueError("it refers to places that rank 0 does not have")
            places, objects = kept, data
        part = said["part"]
        entry = None if part is None else (part[0], part[1], part[2])
        return Done(entry, places, list(_PLACE.iter_unpack(objects)))
    except (struct.error, zlib.error, LookupError, TypeError, ValueError) as error:
        raise CoordinationError(f"where rank {rank} has written its items cannot be read: {error!r}") from error


# --- what the ranks say


_HELD = (bytes, bytes, list, dict)
_SHARED = (str, bytes, bytes, bytes, bytes, dict)
"""Types of what the two plans consist of."""


class _Told(NamedTuple):
    """A rank's description of what it holds: names and chunks of tensors; objects, and their paths."""

    names: bytes
    chunks: bytes
    objects: list[str]
    paths: dict[str, Any]


def _gather_plans(session: RankSession, own: _Told) -> list[_Told]:
    """Return what each rank holds; ranks that hold the same have the very same blobs."""
    blobs = {_digest(own.names): own.names, _digest(own.chunks): own.chunks}
    digests: list[tuple[str, str]] = []
    wanted: list[tuple[bool, bool]] = []
    for rank, said in enumerate(hear_all(session, {})):
        names, chunks = str(said.get("names")), str(said.get("chunks"))
        digests.append((names, chunks))
        wanted.append((names not in blobs, chunks not in blobs))
        if rank:
            blobs.setdefault(names, b"")
            blobs.setdefault(chunks, b"")
    session.answer_each([encoded({"names": names, "chunks": chunks}) for names, chunks in wanted])
    found = [own]
    for rank, message in enumerate(session.gather(b"")):
        if rank == 0:
            continue
        *told, objects, paths = _unpacked(message, rank, _HELD)
        for blob, is_wanted, digest in zip(told, wanted[rank], digests[rank], strict=True):
            if is_wanted:
                if _digest(blob) != digest:
                    raise CoordinationError(f"the plan of rank {rank} cannot be read: it is another than it has told")
                blobs[digest] = blob
        if {*map(type, objects)} - {str} or len({*objects}) != len(objects):
            raise CoordinationError(f"the plan of rank {rank} cannot be read: these are no names of objects")
        found.append(_Told(blobs[digests[rank][0]], blobs[digests[rank][1]], objects, paths))
    return found


def _grouped(told: Sequence[_Told]) -> tuple[list[Group], list[int]]:
    """Return the groups of ranks that hold the same tensors, and by rank in which one it is."""
    described: dict[int, TensorNames] = {}  # by the blobs' identity: equal ones are one object
    numbers: dict[tuple[int, int], int] = {}
    groups: list[Group] = []
    group_of = []
    for rank, one in enumerate(told):
        number = numbers.setdefault((id(one.names), id(one.chunks)), len(groups))
        if number == len(groups):
            try:
                if id(one.names) not in described:
                    described[id(one.names)] = TensorNames.of(one.names)
                groups.append(Group([], HeldTensors.of(described[id(one.names)], one.chunks)))
            except FormatError as error:
                raise CoordinationError(f"the plan of rank {rank} cannot be read: {error}") from error
        groups[number].ranks.append(rank)
        group_of.append(number)
    return groups, group_of


class _NameNumbers:
    """Packs what the ranks of a group share as numbers of their names, once for each group."""

    def __init__(self) -> None:
        self._packed: dict[int, dict[str, bytes]] = {}

    def packed(self, common: _Common, names: Sequence[str]) -> dict[str, bytes]:
        """Return by set of ranks the numbers of the names."""
        found = self._packed.get(id(common))
        if found is None:
            numbers = {name: number for number, name in enumerate(names)} if common else {}
            found = {ranks: runs_of([numbers[name] for name in shared]) for ranks, shared in common.items()}
            self._packed[id(common)] = found
        return found


def _share_message(
    version: str, share: Share, common: _Common, held: HeldTensors, told: _Told, numbers: _NameNumbers
) -> bytes:
    objects = set(share.objects)
    return _packed(
        (
            version,
            runs_of(share.items),
            share.first_rows.tobytes(),
            share.row_counts.tobytes(),
            runs_of([number for number, name in enumerate(told.objects) if name in objects]),
            numbers.packed(common, held.described.names),
        )
    )


def _digest(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


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
    if type(plan) is not tuple or tuple(map(type, plan)) != types:
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
    """Numbers values: two values that are planned in the same way have the same number."""

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


def _joint(common: _Common, sums: _Sums) -> dict[str, int]:
    """Return, for each set of ranks, one sum of all that they share."""
    return {ranks: zlib.crc32(repr([sums.get(name) for name in names]).encode()) for ranks, names in common.items()}


def _are_alike(told: Sequence[Mapping[str, int]]) -> bool:
    """Tell whether all ranks have told the same sums."""
    first: dict[str, int] = {}
    return all(first.setdefault(ranks, total) == total for of_rank in told for ranks, total in of_rank.items())


def _refuse_parts(items: Sequence[WriteItem]) -> None:
    """Refuse tensors of which a single saving rank holds only a part; with several ranks, DCP finds them.

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
