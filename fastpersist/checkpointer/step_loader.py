"""Load a step of a root: choose the step, load its state and what belongs to this rank, alike on several ranks.

One process goes back to an older step by itself when the newest is damaged. Several ranks must not choose each on its
own: the coordinator chooses, all try, and a failure on one is a failure on all. `restore` reads the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fastpersist.arguments import require_bools
from fastpersist.checkpointer.root import RetentionPolicy, best_steps
from fastpersist.commit.locks import HeldDirectory
from fastpersist.commit.step_listing import (
    Commit,
    commit_of,
    committed_steps,
    in_commit_order,
    read_commits,
    read_committed,
)
from fastpersist.distributed.common_steps import hearing_all
from fastpersist.distributed.node_local.split_step import StepParts, refuse_alone
from fastpersist.distributed.shared_reader import SharedReader, reader_for
from fastpersist.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    FastPersistError,
    FormatError,
    PeerError,
    StorageError,
    UnsupportedError,
)
from fastpersist.formats.manifest import (
    DCP_METADATA_NAME,
    STATE_NAME,
    CheckpointManifest,
    rank_file_name,
    step_name,
    writer_of,
)
from fastpersist.formats.split_manifest import PartsRecord
from fastpersist.loading.checkpoint_file import CheckpointSource, open_file
from fastpersist.loading.part_files import read_record
from fastpersist.loading.restore import load_state
from fastpersist.loading.unpickle import MapLocation
from fastpersist.saving.refused_globals import warn_caller
from fastpersist.transfer.reader import Read, read_extents

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RANK_KEY", "LoadOptions", "best_of", "find_best", "load_newest", "load_step"]

RANK_KEY = "rank_state"

_Unusable = (CorruptionError, StorageError, CheckpointNotFoundError)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a step is loaded; see `Checkpointer.load`."""

    map_location: MapLocation
    into: Mapping[str, object] | None
    keys: Collection[str] | None
    verify: bool
    weights_only: bool
    engine: str
    process_group: ProcessGroup | None

    def __post_init__(self) -> None:
        require_bools(verify=self.verify, weights_only=self.weights_only)
        if not isinstance(self.into, Mapping | None):
            raise ConfigError(
                'into is a dict from keys of the state to what is filled, such as into={"model": model}; not a '
                f"{type(self.into).__name__}"
            )

    @property
    def wants_rank_state(self) -> bool:
        """Whether this rank's own file is read."""
        return bool(self.into) or self.keys is None or RANK_KEY in self.keys

    def keys_without(self, own_names: Collection[str]) -> Collection[str] | None:
        """Return the keys that are looked for in the state, of a step that has these own files of its ranks."""
        return [key for key in self.keys if key != RANK_KEY] if self.keys is not None and own_names else self.keys

    @property
    def rank(self) -> int:
        """This rank in its group."""
        return 0 if self.process_group is None else dist.get_rank(self.process_group)

    @property
    def count(self) -> int:
        """How many ranks load."""
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)


def load_step(root: str, step: int, options: LoadOptions, *, missing_ok: bool) -> Any:
    """Load one step; with a process group all its ranks, and if one fails, all do.

    Args:
        root: Where the steps are.
        step: Which.
        options: How.
        missing_ok: Return None if it is not there; the same on all ranks.

    Raises:
        CheckpointNotFoundError, CorruptionError, StorageError: It is not there, or damaged.
        ConfigError: `into` does not fit.
        PeerError: Another rank could not load it; from that rank's error, if it is one of ours.
    """
    if missing_ok and step not in _listed(root, options, partial(read_commits, root)):
        return None
    with reader_for(options.process_group, f"step {step} of {root}") as read:
        return _read_step(root, step, options, read)


def best_of(commits: Mapping[int, Commit | None], retention: RetentionPolicy) -> int | None:
    """Return the step that `keep_best` ranks first; None if none has its metric.

    Raises:
        ConfigError: There is no such rule.
    """
    rule = _best_rule(retention)
    metrics = {step: found.metrics for step in in_commit_order(commits) if (found := commits[step]) is not None}
    return next(iter(best_steps(metrics, rule)), None)


def find_best(root: str, options: LoadOptions, retention: RetentionPolicy, *, missing_ok: bool) -> int | None:
    """Return the step that `keep_best` ranks first among those that are committed; on all ranks the same.

    Raises:
        CheckpointNotFoundError: None has its metric; with missing_ok, None is returned.
        ConfigError: There is no such rule.
    """
    rule = _best_rule(retention)

    def look() -> dict[int, Commit | None]:
        return {step: commit_of(manifest) for step, manifest in committed_steps(root).items()}

    best = best_of(_listed(root, options, look), retention)
    if best is None and not missing_ok:
        raise CheckpointNotFoundError(f"no committed step in {root} has the metric {rule[1]!r}")
    return best


def _best_rule(retention: RetentionPolicy) -> tuple[int, str, str]:
    if retention.keep_best is None:
        raise ConfigError('say which step is the best: Checkpointer(…, keep_best=(1, "loss", "min")), for example')
    return retention.keep_best


def load_newest(
    root: str,
    options: LoadOptions,
    *,
    strict: bool,
    missing_ok: bool,
    on_unusable: Callable[[int], None],
    on_loaded: Callable[[int], None],
) -> Any:
    """Load the newest step that is whole: of the order in which they were committed.

    Args:
        root: Where the steps are.
        options: How.
        strict: Raise when the newest is damaged, instead of going back.
        missing_ok: Return None if there is no step, damaged ones included; the same on all ranks.
        on_unusable: Told each step that could not be loaded.
        on_loaded: Told the one that was.

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
                found = _read_step(root, newest, options, shared)
            on_loaded(newest)
            return found
        except FastPersistError as error:
            if not isinstance(_cause(error, shared), _Unusable):
                raise
            if newest not in _listed(root, options, partial(read_commits, root)):
                continue
            if strict:
                raise
            failures[newest] = f"step {newest}: {error}"
            on_unusable(newest)
            warn_caller(f"{root}: step {newest} cannot be loaded, going back: {error}")
    if not failures:
        if missing_ok:
            return None
        raise CheckpointNotFoundError(f"there is no committed step in {root}")
    unusable = "" if options.into is None else "; what was to be filled may be partly overwritten and is not usable"
    raise FormatError(f"no step can be loaded{unusable}: " + "; ".join(failures.values()), path=root)


def _cause(error: FastPersistError, read: object) -> BaseException | None:
    """Return why a step could not be loaded: the same on all ranks, which decide by it what to do next."""
    if not isinstance(read, SharedReader):
        return error
    return None if read.first_failure is None else read.first_failure[1]


def _newest(root: str, without: set[int], options: LoadOptions) -> int | None:
    order = in_commit_order(_listed(root, options, partial(read_commits, root)))
    return next((step for step in reversed(order) if step not in without), None)


def _listed(root: str, options: LoadOptions, look: Callable[[], dict[int, Commit | None]]) -> dict[int, Commit | None]:
    """Return the steps that are there; with several ranks, those that the first one sees, or else that any sees."""
    group = options.process_group
    if group is None:
        return look()
    error: FastPersistError | None = None

    def looked() -> tuple[dict[int, Commit | None], str | None]:
        nonlocal error
        try:
            return look(), None
        except FastPersistError as caught:
            error = caught
            return {}, f"{type(caught).__name__}: {caught}"

    own: list[Any] = [looked() if options.rank == 0 else None]
    with hearing_all(root, "loading from"):
        dist.broadcast_object_list(own, src=dist.get_global_rank(group, 0), group=group)
        found = own
        if own == [({}, None)]:  # its host may be new, and take part in loading what others hold parts of
            found = [None] * options.count
            dist.all_gather_object(found, looked() if options.rank else own[0], group=group)
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(found):
        if failed is not None:
            text = f"rank {rank} failed while looking for steps in {root}: {failed}"
            raise PeerError(text, rank=rank, subject=root)
    union: dict[int, Commit | None] = {}
    for commits, _ in found:
        union.update({step: commit for step, commit in commits.items() if union.get(step) is None})
    return union


def _read_step(root: str, step: int, options: LoadOptions, read: Read) -> Any:
    def read_file(
        path: str,
        name: str,
        read: Read,
        source: CheckpointSource | None = None,
        into: Mapping[str, object] | None = None,
        keys: Collection[str] | None = None,
    ) -> Any:
        return load_state(
            os.path.join(path, name),
            into=into,
            keys=keys,
            map_location=options.map_location,
            verify=options.verify,
            weights_only=options.weights_only,
            engine=options.engine,
            read=read,
            source=source,
        )

    def read_parts(parts: StepParts, shared: SharedReader) -> Any:
        path, into, own_names = parts.path, options.into, parts.own_names()
        keys = options.keys_without(own_names)
        if parts.are_shards:
            state = _read_shards(parts, options, keys, shared)
        else:
            state = parts.load(
                STATE_NAME, lambda source, read: read_file(path, STATE_NAME, read, source, into=into, keys=keys)
            )
        own_name = _own_name(root, step, own_names, parts.rank_count, options)
        own = None if own_name is None else parts.own_file(own_name)
        if own_name is not None and own is not None and options.wants_rank_state:
            state[RANK_KEY] = read_file(path, own_name, read_extents, own)
        return state

    def read_all(held: HeldDirectory, manifest: CheckpointManifest) -> Any:
        record = read_record(held.place, manifest)
        if record is not None:
            if shared is not None:
                return read_parts(StepParts(shared, held.path, manifest, record), shared)
            _require_all_parts(held, manifest, record)
        names = {entry.name for entry in manifest.files}
        own_names = {name for name in names if name.startswith("rank-")}
        keys = options.keys_without(own_names)
        if _is_sharded(manifest):
            state = _read_sharded(held.place, manifest, options, keys, read)
        else:
            source = open_file(held, STATE_NAME)
            state = read_file(held.path, STATE_NAME, read, source, into=options.into, keys=keys)
        own_name = _own_name(root, step, own_names, manifest.host.get("rank_count", 1), options)
        if own_name in own_names and options.wants_rank_state:  # nobody else reads it
            state[RANK_KEY] = read_file(held.path, own_name, read_extents, open_file(held, own_name))
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


def _read_shards(parts: StepParts, options: LoadOptions, keys: Collection[str] | None, shared: SharedReader) -> Any:
    from fastpersist.dcp.node_local_load import (
        load_shards_together,  # torch.distributed.checkpoint takes long to import
    )

    return load_shards_together(
        parts,
        shared,
        into=options.into,
        keys=keys,
        map_location=options.map_location,
        verify=options.verify,
        weights_only=options.weights_only,
        engine=options.engine,
    )


def _require_all_parts(held: HeldDirectory, manifest: CheckpointManifest, record: PartsRecord) -> None:
    """Refuse a step of which parts lie in other stores, if there is nobody to get them from.

    Raises:
        UnsupportedError: A part is not here; the message says whose, and where it was written.
    """
    if not _is_sharded(manifest):
        refuse_alone(held.path, record)
    from fastpersist.dcp.metadata import METADATA_NAME, read_metadata

    path = held.place
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


def _read_sharded(
    path: str, manifest: CheckpointManifest, options: LoadOptions, keys: Collection[str] | None, read: Read
) -> Any:
    from fastpersist.dcp.load_state import load_sharded_state  # torch.distributed.checkpoint takes long to import

    return load_sharded_state(
        path,
        manifest,
        into=options.into,
        keys=keys,
        map_location=options.map_location,
        verify=options.verify,
        weights_only=options.weights_only,
        engine=options.engine,
        read=read,
        rank=options.rank,
        count=options.count,
    )


def _own_name(root: str, step: int, names: set[str], saved_count: object, options: LoadOptions) -> str | None:
    """Return the name of this rank's own file; with another number of ranks, no file is anybody's."""
    if names and saved_count != options.count:
        if options.wants_rank_state:
            warn_caller(
                f"{root}: step {step} was saved by {saved_count} ranks and is loaded by {options.count}: each rank's "
                "own rank_state is left out"
            )
        return None
    return rank_file_name(options.rank) if names else None
