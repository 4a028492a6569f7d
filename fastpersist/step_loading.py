"""A step of a root → its state: which step, what else of it belongs to this rank, and what several ranks do alike.

One process goes back to an older step by itself when the newest is damaged. Several ranks must not choose on their own:
the first one chooses, all try, and what fails on one has failed on all. How a file is read is `resuming`'s affair.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fastpersist.committed import candidate_steps, open_file, read_committed
from fastpersist.directory_locks import HeldDirectory
from fastpersist.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FastPersistError,
    FormatError,
    PeerError,
    StorageError,
    UnsupportedError,
)
from fastpersist.explaining import warn_caller
from fastpersist.formats.manifest import (
    DCP_METADATA_NAME,
    STATE_NAME,
    CheckpointManifest,
    rank_file_name,
    step_name,
    writer_of,
)
from fastpersist.formats.parts import PartsRecord
from fastpersist.loading import MapLocation
from fastpersist.loading_together import UNKNOWN_RANK, SharedReader, reader_for
from fastpersist.part_reading import read_record
from fastpersist.pipeline import Read, read_extents
from fastpersist.resuming import load_state
from fastpersist.source import CheckpointSource
from fastpersist.step_parts import StepParts, refuse_alone

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RANK_KEY", "LoadOptions", "load_newest", "load_step"]

RANK_KEY = "rank_state"

_Unusable = (CorruptionError, StorageError, CheckpointNotFoundError)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a step is loaded; see `Checkpointer.load`."""

    map_location: MapLocation
    into: Mapping[str, object] | None
    verify: bool
    weights_only: bool
    engine: str
    process_group: ProcessGroup | None

    @property
    def rank(self) -> int:
        """This rank in its group."""
        return 0 if self.process_group is None else dist.get_rank(self.process_group)

    @property
    def count(self) -> int:
        """How many ranks load."""
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)


def load_step(root: str, step: int, options: LoadOptions) -> Any:
    """Load one step; with a process group all its ranks, and if one fails, all do.

    Raises:
        CheckpointNotFoundError, CorruptionError, StorageError: It is not there, or damaged.
        ConfigError: `into` does not fit.
        PeerError: Another rank could not load it; from that rank's error, if it is one of ours.
    """
    with reader_for(options.process_group, f"step {step} of {root}") as read:
        return _read_step(root, step, options, read)


def load_newest(root: str, options: LoadOptions, *, strict: bool, on_unusable: Callable[[int], None]) -> Any:
    """Load the newest step that is whole.

    Args:
        root: Where the steps are.
        options: How.
        strict: Raise when the newest is damaged, instead of going back.
        on_unusable: Told each step that could not be loaded.

    Raises:
        CheckpointNotFoundError: There is no step.
        CorruptionError, StorageError, PeerError: As in `load_step`: with `strict`, or when no step is whole.
        ConfigError: `into` does not fit.
    """
    failures: dict[int, str] = {}
    # Listed again after each step that could not be loaded: retention may have removed it, and newer ones come.
    while (newest := _newest(root, set(failures), options)) is not None:
        shared: object = None
        try:
            with reader_for(options.process_group, f"step {newest} of {root}") as shared:
                return _read_step(root, newest, options, shared)
        except FastPersistError as error:
            if not isinstance(_cause(error, shared), _Unusable):
                raise
            if newest not in _listed(root, options):
                continue
            if strict:
                raise
            failures[newest] = f"step {newest}: {error}"
            on_unusable(newest)
            warn_caller(f"{root}: step {newest} cannot be loaded, going back: {error}")
    if not failures:
        raise CheckpointNotFoundError(f"there is no committed step in {root}")
    unusable = "" if options.into is None else "; what was to be filled may be partly overwritten and is not usable"
    raise FormatError(f"no step can be loaded{unusable}: " + "; ".join(failures.values()), path=root)


def _cause(error: FastPersistError, read: object) -> BaseException | None:
    """Return why a step could not be loaded: the same on all ranks, which decide by it what to do next."""
    if not isinstance(read, SharedReader):
        return error
    return None if read.first_failure is None else read.first_failure[1]


def _newest(root: str, without: set[int], options: LoadOptions) -> int | None:
    return max(_listed(root, options) - without, default=None)


def _listed(root: str, options: LoadOptions) -> set[int]:
    """Return the steps that are there; with several ranks, those that the first one sees, or else that any sees."""
    group = options.process_group
    if group is None:
        return candidate_steps(root)
    error: FastPersistError | None = None

    def look() -> tuple[set[int], str | None]:
        nonlocal error
        try:
            return candidate_steps(root), None
        except FastPersistError as caught:
            error = caught
            return set(), f"{type(caught).__name__}: {caught}"

    own: list[Any] = [look() if options.rank == 0 else None]
    try:
        dist.broadcast_object_list(own, src=dist.get_global_rank(group, 0), group=group)
        found = own
        if own == [(set(), None)]:  # its host may be new, and take part in loading what others hold parts of
            found = [None] * options.count
            dist.all_gather_object(found, look() if options.rank else own[0], group=group)
    except Exception as lost:
        raise PeerError(
            f"another rank is gone or silent while loading from {root}: {type(lost).__name__}: {lost}",
            rank=UNKNOWN_RANK,
            subject=root,
        ) from lost
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(found):
        if failed is not None:
            text = f"rank {rank} failed while looking for steps in {root}: {failed}"
            raise PeerError(text, rank=rank, subject=root)
    return set().union(*(steps for steps, _ in found))


def _read_step(root: str, step: int, options: LoadOptions, read: Read) -> Any:
    def read_file(
        path: str,
        name: str,
        targets: Mapping[str, object] | None,
        read: Read,
        source: CheckpointSource | None = None,
    ) -> Any:
        return load_state(
            os.path.join(path, name),
            into=targets,
            map_location=options.map_location,
            verify=options.verify,
            weights_only=options.weights_only,
            engine=options.engine,
            read=read,
            source=source,
        )

    def read_parts(parts: StepParts, shared: SharedReader) -> Any:
        path = parts.path
        if parts.are_shards:
            state = _read_shards(parts, options, shared)
        else:
            state = parts.load(STATE_NAME, lambda source, read: read_file(path, STATE_NAME, options.into, read, source))
        own_name = _own_name(root, step, parts.own_names(), parts.rank_count, options)
        own = None if own_name is None else parts.own_file(own_name)
        if own_name is not None and own is not None:
            state[RANK_KEY] = read_file(path, own_name, None, read_extents, own)
        return state

    def read_all(held: HeldDirectory, manifest: CheckpointManifest) -> Any:
        record = read_record(held.place, manifest)
        if record is not None and shared is not None:
            return read_parts(StepParts(shared, held.path, manifest, record), shared)
        if record is not None and _is_sharded(manifest):
            _require_shards(held.place, record)
        elif record is not None:
            refuse_alone(held.path, record)
        if _is_sharded(manifest):
            state = _read_sharded(held.place, manifest, options, read)
        else:
            state = read_file(held.path, STATE_NAME, options.into, read, open_file(held, STATE_NAME))
        own_name = _own_file(root, step, manifest, options)
        if own_name is not None:  # nobody else reads it
            state[RANK_KEY] = read_file(held.path, own_name, None, read_extents, open_file(held, own_name))
        return state

    shared = read if isinstance(read, SharedReader) and read.count > 1 else None
    try:
        return read_committed(root, step, read_all)
    except CheckpointNotFoundError:
        if shared is None:
            raise
        path = os.path.join(root, step_name(step))
        parts = StepParts(shared, path, None, None)  # others may have all of it between them
        if not parts.exists:
            raise
        return read_parts(parts, shared)


def _is_sharded(manifest: CheckpointManifest) -> bool:
    """Tell whether a step holds DCP's files: its manifest says so, not who loads it."""
    names = {entry.name for entry in manifest.files}
    return DCP_METADATA_NAME in names and STATE_NAME not in names


def _read_shards(parts: StepParts, options: LoadOptions, shared: SharedReader) -> Any:
    from fastpersist.sharded.exchanging import load_shards_together  # torch.distributed.checkpoint takes long to import

    return load_shards_together(
        parts,
        shared,
        into=options.into,
        map_location=options.map_location,
        verify=options.verify,
        weights_only=options.weights_only,
        engine=options.engine,
    )


def _require_shards(path: str, record: PartsRecord) -> None:
    """Refuse a sharded step of which parts lie in other stores, if there is nobody to get them from.

    Raises:
        UnsupportedError: A part is not here; the message says whose, and where it was written.
    """
    from fastpersist.sharded.metadata import METADATA_NAME, read_metadata

    metadata, _ = read_metadata(os.path.join(path, METADATA_NAME))
    here = set(os.listdir(path))
    missing = sorted({info.relative_path for info in (metadata.storage_data or {}).values()} - here)
    if missing:
        writers = {writer_of(name) for name in missing}
        stores = [number for number, store in enumerate(record.stores) if writers.intersection(store.ranks)]
        raise UnsupportedError(
            f"{path} holds only a part of the sharded checkpoint: {missing[0]} and all other parts of "
            f"{record.describe(stores)} are elsewhere, for the ranks that saved it share no file system. Load it "
            "with all of them (Checkpointer(process_group=)), or copy the .distcp files of all stores here (all "
            "names differ), or make one file of them: fastpersist merge DIR DIR… state.pt"
        )


def _read_sharded(path: str, manifest: CheckpointManifest, options: LoadOptions, read: Read) -> Any:
    from fastpersist.sharded.step_loading import load_sharded_state  # torch.distributed.checkpoint takes long to import

    return load_sharded_state(
        path,
        manifest,
        into=options.into,
        map_location=options.map_location,
        verify=options.verify,
        weights_only=options.weights_only,
        engine=options.engine,
        read=read,
        rank=options.rank,
        count=options.count,
    )


def _own_file(root: str, step: int, manifest: CheckpointManifest, options: LoadOptions) -> str | None:
    """Return the name of this rank's own file; with another number of ranks, no file is anybody's."""
    names = {entry.name for entry in manifest.files if entry.name.startswith("rank-")}
    name = _own_name(root, step, names, manifest.host.get("rank_count", 1), options)
    return name if name in names else None


def _own_name(root: str, step: int, names: set[str], saved_count: object, options: LoadOptions) -> str | None:
    if names and saved_count != options.count:
        warn_caller(
            f"{root}: step {step} was saved by {saved_count} ranks and is loaded by {options.count}: each rank's own "
            "rank_state is left out"
        )
        return None
    return rank_file_name(options.rank) if names else None
