"""Load a step of a root: choose the step, load its state and this rank's own file; the same step on all ranks.

If the newest step is damaged, a single process goes back to an older step. With several ranks, a rank must not choose
for itself: the coordinator chooses, all ranks load, and a failure on one is a failure on all. `restore` reads the
files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
import torch.distributed as dist

from fastpersist.arguments import require_bools
from fastpersist.checkpointer.root import RetentionPolicy, best_steps, committed_number
from fastpersist.commit.locks import HeldDirectory
from fastpersist.commit.step_listing import (
    Commit,
    commits_of,
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
from fastpersist.events.delivery import emit
from fastpersist.events.event import Figures
from fastpersist.formats.manifest import (
    DCP_METADATA_NAME,
    STATE_NAME,
    CheckpointManifest,
    rank_file_name,
    step_name,
)
from fastpersist.formats.split_manifest import COPY_NAME, PARTS_NAME
from fastpersist.loading.checkpoint_file import CheckpointSource, open_file
from fastpersist.loading.conversion import converted, require_floating
from fastpersist.loading.directory_inspection import directory_bytes
from fastpersist.loading.part_files import read_record
from fastpersist.loading.renaming import Rename, renamed
from fastpersist.loading.restore import load_state
from fastpersist.loading.unpickle import MapLocation
from fastpersist.saving.refused_globals import warn_caller
from fastpersist.transfer.progress import showing_progress
from fastpersist.transfer.reader import Read, read_extents

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RANK_KEY", "LoadOptions", "OnResize", "best_of", "find_best", "load_newest", "load_step", "look_together"]

_log = logging.getLogger("fastpersist")

RANK_KEY = "rank_state"
_RANK_COUNT_MAX = 1 << 20

OnResize = Callable[[list[Any], int, int], object]
"""What `Checkpointer.load` calls if another number of ranks has saved: see there."""

_Unusable = (CorruptionError, StorageError, CheckpointNotFoundError)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of `Checkpointer.load`; and `copies`: each node has steps of its own, and all of them count.

    Raises:
        ConfigError: An option makes no sense.
    """

    map_location: MapLocation
    into: Mapping[str, object] | None
    keys: Collection[str] | None
    verify: bool
    weights_only: bool
    engine: str
    process_group: ProcessGroup | None
    on_resize: OnResize | None = None
    rename: Rename | None = None
    dtype: torch.dtype | None = None
    copies: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None:
            require_floating(self.dtype)
        if self.rename is not None and self.into and self.keys is not None:
            raise UnsupportedError(
                "rename= with into= goes without keys=, which choose by the old names: load what they choose by "
                "another call"
            )
        require_bools(verify=self.verify, weights_only=self.weights_only, progress=self.progress)
        if self.on_resize is not None and not callable(self.on_resize):
            raise ConfigError(
                "on_resize is a function of the rank_states of all ranks, this rank, and the number of ranks; "
                f"{type(self.on_resize).__name__} cannot be called"
            )
        if not isinstance(self.into, Mapping | None):
            raise ConfigError(
                'into must be a dict from keys of the state to targets, such as into={"model": model}; not a '
                f"{type(self.into).__name__}"
            )

    def adapted(self, path: str, state: Any) -> Any:
        """Return a loaded state with new names and in another dtype, as far as that is asked for.

        Args:
            path: The step's path, for messages.
            state: The state, without what belongs to single ranks.
        """
        if self.rename is not None and not self.into:  # else it is renamed on the way to its targets
            state = renamed(path, state, self.rename)
        if self.dtype is not None and self.into:  # targets have dtypes of their own
            state.update(converted({key: state[key] for key in state if key not in self.into}, self.dtype))
        elif self.dtype is not None:
            state = converted(state, self.dtype)
        return state

    @property
    def wants_rank_state(self) -> bool:
        """Whether this rank's own file is read."""
        return bool(self.into) or self.keys is None or any(fnmatchcase(RANK_KEY, str(key)) for key in self.keys)

    def keys_without(self, own_names: Collection[str]) -> Collection[str] | None:
        """Return the keys to look for in the state; `own_names` are the files of single ranks in the step."""
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
        root: The directory of the steps.
        step: The step.
        options: The options of the load.
        missing_ok: Return None if there is no such step; the same on all ranks.

    Raises:
        CheckpointNotFoundError, CorruptionError, StorageError: The step is not there, or is damaged.
        ConfigError: `into` does not fit.
        PeerError: Another rank could not load it; that rank's error is the cause, if it is one of ours.
    """
    if missing_ok and step not in _listed(root, options, partial(read_commits, root)):
        return None
    with reader_for(options.process_group, f"step {step} of {root}") as read:
        return _read_step(root, step, options, read)


def best_of(commits: Mapping[int, Commit | None], retention: RetentionPolicy) -> int | None:
    """Return the step with the best value of the metric of `keep_best`; None if no step has the metric.

    Raises:
        ConfigError: There is no such rule.
    """
    rule = _best_rule(retention)
    metrics = {step: found.metrics for step in in_commit_order(commits) if (found := commits[step]) is not None}
    return next(iter(best_steps(metrics, rule)), None)


def find_best(root: str, options: LoadOptions, retention: RetentionPolicy, *, missing_ok: bool) -> int | None:
    """Return the committed step with the best value of the metric of `keep_best`; the same on all ranks.

    Raises:
        CheckpointNotFoundError: No step has the metric; with missing_ok, None is returned instead.
        ConfigError: There is no such rule.
    """
    rule = _best_rule(retention)
    best = best_of(_listed(root, options, partial(commits_of, root)), retention)
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
    """Load the step that was committed last, or the last one before it that is whole.

    Args:
        root: The directory of the steps.
        options: The options of the load.
        strict: Raise if the newest step is damaged, instead of going back.
        missing_ok: Return None if there is no step at all, not even a damaged one; the same on all ranks.
        on_unusable: Called with each step that could not be loaded.
        on_loaded: Called with the step that was loaded.

    Raises:
        CheckpointNotFoundError: There is no step.
        CorruptionError, StorageError, PeerError: As in `load_step`: with `strict`, or if no step is whole.
        ConfigError: `into` does not fit.
    """
    failures: dict[int, str] = {}
    # The root is listed again after each failure: retention may have removed that step, and there may be newer ones.
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
    raise FormatError("no step can be loaded: " + "; ".join(failures.values()), path=root)


def _cause(error: FastPersistError, read: object) -> BaseException | None:
    """Return why a step could not be loaded. It is the same on all ranks, so that all decide alike what to do next."""
    if not isinstance(read, SharedReader):
        return error
    return None if read.first_failure is None else read.first_failure[1]


def _newest(root: str, without: set[int], options: LoadOptions) -> int | None:
    order = in_commit_order(_listed(root, options, partial(read_commits, root)))
    return next((step for step in reversed(order) if step not in without), None)


def _listed(
    root: str, options: LoadOptions, look: Callable[[], Mapping[int, Commit | None]]
) -> Mapping[int, Commit | None]:
    """Return the steps that are there; with several ranks, those of the coordinator, or of any rank if it sees none."""
    if options.copies and options.process_group is not None:
        return look_together(
            root, options.process_group, lambda: _counting(root, look()), everywhere=True, some_suffice=True
        )
    return look_together(root, options.process_group, look, everywhere=False)


def _counting(root: str, commits: Mapping[int, Commit | None]) -> dict[int, Commit | None]:
    """Return the steps of this root that are known to be committed on all nodes; see `node_local.copies`."""
    least = committed_number(root)
    return {step: found for step, found in commits.items() if _counts(root, step, found, least)}


def _counts(root: str, step: int, commit: Commit | None, committed: int) -> bool:
    if commit is None or commit.number is None or commit.number <= committed:
        return True
    try:
        record = read_committed(root, step, lambda held, manifest: read_record(held.place, manifest, COPY_NAME))
    except FastPersistError:
        return True  # it is damaged, or gone: to load it says so
    return record is None or record.store == 0


def look_together(
    root: str,
    group: ProcessGroup | None,
    look: Callable[[], Mapping[int, Commit | None]],
    *,
    everywhere: bool,
    some_suffice: bool = False,
) -> Mapping[int, Commit | None]:
    """Return the steps that are there, the same on all ranks.

    Args:
        root: This rank's root.
        group: The group whose ranks all call this; None for a process that is alone.
        look: Returns the steps that this rank sees.
        everywhere: A step counts if any rank sees it; without it, only if the coordinator does, unless it sees no step.
        some_suffice: A rank that cannot look is passed over if another one sees a step.

    Raises:
        StorageError: This rank cannot look.
        PeerError: Another rank cannot, or is gone.
    """
    if group is None:
        return look()
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    error: FastPersistError | None = None

    def looked() -> tuple[Mapping[int, Commit | None], str | None]:
        nonlocal error
        try:
            return look(), None
        except FastPersistError as caught:
            error = caught
            return {}, f"{type(caught).__name__}: {caught}"

    own: list[Any] = [looked() if everywhere or rank == 0 else None]
    with hearing_all(root, "loading from"):
        if not everywhere:
            dist.broadcast_object_list(own, src=dist.get_global_rank(group, 0), group=group)
        found = own
        if everywhere or own == [({}, None)]:  # its host may be new: it then gets the data of others
            found = [None] * count
            dist.all_gather_object(found, own[0] if everywhere or rank == 0 else looked(), group=group)
    union: dict[int, Commit | None] = {}
    for commits, _ in found:
        union.update({step: commit for step, commit in commits.items() if _is_later(commit, union.get(step))})
    if some_suffice and union:
        if error is not None:
            _log.warning("%s cannot be read; the steps of the other nodes count: %s", root, error)
        return union
    if error is not None:
        raise error
    for other, (_, failed) in enumerate(found):
        if failed is not None:
            text = f"rank {other} failed while looking for steps in {root}: {failed}"
            raise PeerError(text, rank=other, subject=root)
    return union


def _is_later(commit: Commit | None, known: Commit | None) -> bool:
    """Tell whether a commit of a step counts in place of the one that is known of it."""
    return known is None or (commit is not None and (commit.number or 0) > (known.number or 0))


def _read_step(root: str, step: int, options: LoadOptions, read: Read) -> Any:
    begun_s = time.monotonic()
    size_bytes = 0
    is_open = False

    def checks_files(manifest: CheckpointManifest) -> bool:
        # Of a thousand ranks, one looks up all files and tells the others if one is missing; they look up what they
        # read. If each node has files of its own, each rank looks up those.
        names = {entry.name for entry in manifest.files}
        return options.rank == 0 or not names.isdisjoint((PARTS_NAME, COPY_NAME))

    def read_held(held: HeldDirectory, manifest: CheckpointManifest) -> Any:
        nonlocal is_open, size_bytes
        is_open = True
        size_bytes = sum(entry.size_bytes for entry in manifest.files)
        return _read(root, step, options, _opened(held, manifest, options, read))

    try:
        found = read_committed(root, step, read_held, checks_files=checks_files)
    except _Unusable as error:
        is_missing = isinstance(error, CheckpointNotFoundError)
        if not _is_shared(read) or not (is_missing or (options.copies and not is_open)):
            raise
        if not is_missing:
            _log.warning("the copy of step %d in %s cannot be used; looking for other copies: %s", step, root, error)
        parts = _StepInParts(read, os.path.join(root, step_name(step)), None, None)  # others may have all of it
        if not parts.exists:
            raise
        found = _read(root, step, options, parts)
    figures: Figures = {"bytes": size_bytes, "total_s": time.monotonic() - begun_s}
    emit("loaded", os.path.join(root, step_name(step)), figures, step=step, rank=options.rank)
    return found


def _read(root: str, step: int, options: LoadOptions, found: _Step) -> Any:
    """Load the state of a step, and what belongs to this rank."""

    def read_file(name: str, source: CheckpointSource, read: Read, **wanted: Any) -> Any:
        return load_state(
            os.path.join(found.path, name),
            **{"into": None, **wanted},
            map_location=options.map_location,
            verify=options.verify,
            weights_only=options.weights_only,
            engine=options.engine,
            read=read,
            source=source,
        )

    own_names = found.own_names()
    rename = options.rename if options.into else None
    wanted = {"into": options.into, "keys": options.keys_without(own_names), "rename": rename}
    if found.are_shards:
        is_shown = options.progress and os.path.isdir(found.path)  # its parts may all be elsewhere
        share_bytes = directory_bytes(found.path) // options.count if is_shown else 0
        with showing_progress(found.path, share_bytes, is_shown):
            state = found.shards_loader(options.engine)(
                **wanted,
                map_location=options.map_location,
                verify=options.verify,
                weights_only=options.weights_only,
                engine=options.engine,
            )
    else:

        def read_state(source: CheckpointSource, read: Read) -> Any:
            with showing_progress(found.path, source.size_bytes * (1 + options.verify), options.progress):
                return read_file(STATE_NAME, source, read, **wanted)

        state = found.load(STATE_NAME, read_state)
    state = options.adapted(found.path, state)
    if own_names and options.rename is not None and not options.into and RANK_KEY in state:
        raise ConfigError(
            f"rename= gives something of {found.path} the name {RANK_KEY!r}, under which load() returns the rank_state"
        )
    if own_names and found.rank_count != options.count:
        _resize(root, step, options, found, state, lambda name, source: read_file(name, source, read_extents))
        return state
    own_name = rank_file_name(options.rank)
    own = found.own_file(own_name) if own_names else None
    if own is not None:
        if options.wants_rank_state:  # no other code reads it
            state[RANK_KEY] = read_file(own_name, own, read_extents)
        else:
            own.close()
    return state


def _resize(
    root: str,
    step: int,
    options: LoadOptions,
    found: _Step,
    state: dict[str, Any],
    read: Callable[[str, CheckpointSource], Any],
) -> None:
    """Pass the rank_states of the save to `on_resize`; without on_resize, warn that they are left out."""
    if found.rank_count > _RANK_COUNT_MAX:
        raise FormatError(f"its manifest says that {found.rank_count} ranks have saved it", path=found.path)
    asks = options.on_resize is not None and options.wants_rank_state
    names = [rank_file_name(rank) for rank in range(found.rank_count)]
    own_files = found.all_own_files(names, asks)
    if options.on_resize is not None and asks:
        rank_states = [None if file is None else read(name, file) for name, file in zip(names, own_files, strict=True)]
        state[RANK_KEY] = options.on_resize(rank_states, options.rank, options.count)
    elif options.wants_rank_state:
        warn_caller(
            f"{root}: step {step} was saved by {found.rank_count} ranks and is loaded by {options.count}: each rank's "
            "own rank_state is left out; load(on_resize=) can make new ones of them"
        )


class _Step(Protocol):
    """A step that is being loaded: where its files are, and how they are read."""

    @property
    def path(self) -> str:
        """Its directory, for messages."""

    @property
    def rank_count(self) -> int:
        """The number of ranks that saved it, from its manifest."""

    @property
    def are_shards(self) -> bool:
        """Whether it holds DCP's files."""

    def own_names(self) -> set[str]:
        """Return the names of the ranks' own files."""

    def load(self, name: str, load: Callable[[CheckpointSource, Read], Any]) -> Any:
        """Load a file: `load` is given the open file, which it closes, and what reads it."""

    def shards_loader(self, engine: str) -> Callable[..., Any]:
        """Return what loads the shards, given the other options of `load_sharded_state`."""

    def own_file(self, name: str) -> CheckpointSource | None:
        """Open a rank's own file; None if there is none. With several ranks, all of them call this."""

    def all_own_files(self, names: list[str], wanted: bool) -> Iterator[CheckpointSource | None]:
        """Open the own files of all ranks, one after the other; None for one that is not there.

        Nothing comes unless this rank wants them.

        With several ranks, all of them call this.
        """


def _opened(held: HeldDirectory, manifest: CheckpointManifest, options: LoadOptions, read: Read) -> _Step:
    """Decide how a step is read: from its directory, or from parts that several ranks see.

    Raises:
        UnsupportedError: Parts of it are elsewhere, and there is no rank to get them from.
    """
    record = read_record(held.place, manifest)
    if record is not None and _is_shared(read):
        return _StepInParts(read, held.path, manifest, record)
    if record is None and _is_shared(read):
        copy = read_record(held.place, manifest, COPY_NAME)
        if copy is not None:
            counts = (manifest.commit_number or 0) <= committed_number(os.path.dirname(held.path)) or copy.store == 0
            return _StepInParts(read, held.path, manifest, copy, partial(open_file, held), counts=counts)
    step = _WholeStep(held, manifest, options, read)
    if record is not None and not step.are_shards:
        refuse_alone(held.path, record)
    if record is not None:
        from fastpersist.dcp.node_local_load import require_all_shards  # slow import

        require_all_shards(held.place, record)
    return step


def _is_shared(read: Read) -> TypeGuard[SharedReader]:
    return isinstance(read, SharedReader) and read.count > 1


@dataclass(frozen=True, slots=True)
class _WholeStep:
    """A step of which all files lie in one directory."""

    held: HeldDirectory
    manifest: CheckpointManifest
    options: LoadOptions
    read: Read

    @property
    def path(self) -> str:
        return self.held.path

    @property
    def rank_count(self) -> int:
        count = self.manifest.host.get("rank_count", 1)
        return count if isinstance(count, int) else 1

    @property
    def are_shards(self) -> bool:
        names = {entry.name for entry in self.manifest.files}
        return DCP_METADATA_NAME in names and STATE_NAME not in names

    def own_names(self) -> set[str]:
        return {entry.name for entry in self.manifest.files if entry.name.startswith("rank-")}

    def load(self, name: str, load: Callable[[CheckpointSource, Read], Any]) -> Any:
        return load(open_file(self.held, name), self.read)

    def shards_loader(self, engine: str) -> Callable[..., Any]:
        from fastpersist.dcp.load_state import load_sharded_state  # slow import

        rank, count = self.options.rank, self.options.count
        return partial(load_sharded_state, self.held.place, self.manifest, read=self.read, rank=rank, count=count)

    def own_file(self, name: str) -> CheckpointSource | None:
        return open_file(self.held, name) if name in self.own_names() else None

    def all_own_files(self, names: list[str], wanted: bool) -> Iterator[CheckpointSource | None]:
        return map(self.own_file, names if wanted else [])


class _StepInParts(StepParts):
    """A step whose parts lie in several node-local stores: the ranks send them to each other."""

    def shards_loader(self, engine: str) -> Callable[..., Any]:
        from fastpersist.dcp.node_local_load import loader_of_parts  # slow import

        return loader_of_parts(self, engine)
