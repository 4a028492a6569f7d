"""Restores modules and optimizers from a saved state in place, without a second copy of the state.

1. Prove the file's structure, and check the CRCs of all records but the storages.
2. Load the entries that the caller asked for and that have no target. Unpickle once, with storages on the meta device
   for all other entries: this gives their names, shapes and dtypes without a byte of data.
3. Plan which tensor of the file goes to which tensor of a target (`target_plan`). Every misfit is found here.
4. Load the entries without memory in a target (state that an optimizer does not have yet, schedulers, extra state);
   with `verify`, check the rest. Unpickle again, around the loaded entries. Entries that were not asked for are left
   out (`selection`), and their storages are never read. Until this point no target has changed.
5. Fill the targets' tensors from the file. Then call each target's own load_state_dict with its entry, which contains
   these same tensors: copying a tensor onto itself costs nothing, an optimizer adopts tensors of the right dtype and
   device, and hooks, extra state, groups and numbers are handled as usual.

If step 2 is impossible (a callable map_location, objects that cannot be built without data, …), the whole state is
loaded and copied into the targets, and the log says why. Directories, steps and the fallback to an older step are in
`checkpointer`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastpersist.errors import ConfigError, FormatError, UnsupportedError
from fastpersist.formats.layout import LOCAL_HEADER_BYTES
from fastpersist.formats.pickle_scan import Call, PickleScan, SymbolicDict
from fastpersist.formats.torch_zip import header_leads_to
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.fill_tensors import Pair, described_tensor, fill_pairs
from fastpersist.loading.renaming import Rename, nested_for
from fastpersist.loading.selection import (
    Choice,
    Entries,
    chosen_part,
    dict_entries,
    left_out_of,
    refuse_unmatched,
    tell_left_out,
    tensor_bytes,
    without,
)
from fastpersist.loading.target_plan import (
    Leaf,
    Plan,
    SortedStorages,
    Tree,
    Unread,
    is_ordered_dict,
    storages_below,
    tree_of,
)
from fastpersist.loading.targets import (
    SCALAR_KEYS,
    IncompatibleKeys,
    Path,
    TargetChange,
    missing_keys,
    refuse_misfit,
)
from fastpersist.loading.unpickle import (
    LocalHeaders,
    MapLocation,
    StorageToFill,
    check_records,
    check_small_records,
    fill_storages,
    load_checkpoint,
    new_storage,
    read_safetensors,
    refuse_disguised,
    require_checksums,
    storages_to_fill,
    torch_errors,
    unpickle_while_reading,
    why_stock,
)
from fastpersist.transfer.engine_selection import engine_ladder, refuse_null_engine
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.reader import Extents, Read, read_extents

__all__ = ["load_chosen", "load_state", "restore_whole"]

_log = logging.getLogger("fastpersist")

_SHOWN_COUNT = 10


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of load_state, without the file."""

    into: Mapping[str, object] | _Whole
    keys: Collection[str] | None
    map_location: MapLocation
    verify: bool
    weights_only: bool
    engine: str
    read: Read
    rename: Rename | None = None

    def arranged(self, path: str, value: Any) -> Any:
        """Return the file's object with the names that the targets have."""
        if self.rename is None or isinstance(self.into, _Whole):
            return value
        return nested_for(path, value, self.rename, self.into)

    def arranged_nodes(self, path: str, root: object) -> object:
        """Return the scanned pickle in the same way."""
        if self.rename is None or isinstance(self.into, _Whole):
            return root
        return nested_for(path, root, self.rename, self.into, _named_entries, _symbolic_dict)


@dataclass(frozen=True, slots=True)
class _Whole:
    """One target for all that a file holds, in place of targets for its entries.

    Attributes:
        target: The target.
        strict: Modules and dicts refuse names that only one side has.
    """

    target: object
    strict: bool


def restore_whole(
    source: CheckpointSource, target: object, *, strict: bool, verify: bool, engine: str, read: Read
) -> IncompatibleKeys:
    """Restore a target of any kind from all that a torch zip holds; see `api.load_into`."""
    options = _Options(_Whole(target, strict), None, None, verify, True, engine, read)
    ready = _ready(source, options, _prove(source))
    _change(source, ready, options, None)
    return ready.plan.keys


def load_state(
    path: str,
    *,
    into: Mapping[str, object] | None,
    keys: Collection[str] | None = None,
    map_location: MapLocation,
    verify: bool,
    weights_only: bool,
    engine: str,
    on_filled: Callable[[str], None] | None = None,
    read: Read = read_extents,
    source: CheckpointSource | None = None,
    rename: Rename | None = None,
) -> Any:
    """Load a saved dict, and restore the entries named in `into` in place.

    Names, shapes, groups and the file's structure are checked first: unless all of it fits, nothing changes. After any
    error you may call it again, with this file or another; every target is then restored as a whole.

    Args:
        path: A torch zip that holds a dict, such as the `state.pt` of a step.
        into: What to restore in place, by key of that dict: a Module; an optimizer, bare or wrapped (`.optimizer`);
            a tensor; dicts and lists, nested, of these (other values in them are set to the file's); or any object
            with load_state_dict. None for a plain load.
        keys: Names and patterns of what is read beside `into` (`selection.choose`); without `into`, only this is read.
            None: with `into`, all other entries without large tensors are read; without it, everything.
        map_location: Where tensors go that have no target, as in torch.load.
        verify: Check every CRC before anything changes; what is filled in place is then read twice.
        weights_only: The option of torch.load. With False, code in the file may run more than once.
        engine: "auto", or an engine's name, which then never falls back.
        on_filled: Called with a key of `into` directly before the first change to its target. After an error, the
            targets of these keys are no longer what they were.
        read: How storages are read: a `SharedReader` where several ranks load together.
        source: The file, if it is open already; closed at the end.
        rename: New names for what is in the file, by which `into` finds it; without `keys`.

    Returns:
        The dict, with the very objects of `into` under their keys, and without what `left_out_of` names.
        Without `into` and `keys`, whatever was saved.

    Raises:
        CheckpointNotFoundError: There is no such file.
        FormatError, ChecksumError: The file is damaged; no target was changed.
        StorageError: An error of the disk. If the message says *partly overwritten*, the targets it names are not
            usable until they have been restored from this or another file.
        ConfigError: File and targets do not fit, or one of `keys` is not there, and nothing was changed; or the
            load_state_dict of a target refused its entry: then the message says what is partly overwritten.
        UnsupportedError: verify, and the file has no checksums; or the named engine cannot be used.
        pickle.UnpicklingError: With weights_only: torch's own refusal of an unsafe file.
        CoordinationError: What `read` raises where several ranks load together. The message says *partly overwritten*
            as that of StorageError does.

    Thread safety: any thread; no other thread may use the targets meanwhile.
    """
    options = _Options(into or {}, keys, map_location, verify, weights_only, engine, read, rename=rename)
    with source or CheckpointSource(path) as source:
        for name in engine_ladder(engine, source.fd, for_reading=True):
            refuse_null_engine(name)
        if not into and keys is None:
            _prove(source)
            return _load_whole(source, options)
        ready = _ready(source, options, _prove(source))
        _change(source, ready, options, on_filled)
        ready.loaded.update(into or {})
        return ready.loaded


def _is_torch_zip(source: CheckpointSource) -> bool:
    """Tell whether a file is an archive as torch.save writes it; others, such as a compressed one, are torch's."""
    try:
        return source.kind == "torch_zip" and bool(source.directory.entries)
    except UnsupportedError:
        return False


def load_chosen(
    source: CheckpointSource,
    *,
    keys: Collection[str],
    map_location: MapLocation,
    weights_only: bool,
    verify: bool,
    engine: str,
    read: Read,
    mapped: bool,
) -> Any:
    """Load what keys choose of a file of any format; see `fastpersist.load`."""
    if source.kind == "safetensors" and not mapped:
        return read_safetensors(source, map_location=map_location, verify=verify, engine=engine, read=read, keys=keys)
    if not mapped and _is_torch_zip(source):
        refuse_disguised(source, weights_only)
        for name in engine_ladder(engine, source.fd, for_reading=True):
            refuse_null_engine(name)
        options = _Options({}, keys, map_location, verify, weights_only, engine, read)
        return _ready(source, options, _prove(source)).loaded
    loaded = load_checkpoint(
        source,
        map_location=map_location,
        weights_only=weights_only,
        verify=verify,
        engine=engine,
        read=read,
        mapped=mapped,
    )
    return chosen_part(source.path, loaded, keys)


@no_garbage_collection()
def _ready(source: CheckpointSource, options: _Options, scan: PickleScan | str) -> _Ready:
    ready: _Ready | str
    if isinstance(scan, str):
        ready = scan
    else:
        reason = why_stock(source, options.map_location, options.weights_only)
        ready = reason or _planned_in_place(source, options, scan)
    del scan  # its tree is many times as large as the pickle
    if isinstance(ready, str):
        what = "is in memory once more while its targets are filled" if options.into else "is read as a whole"
        _log.warning("%s %s: %s", source.path, what, ready)
        ready = _planned_with_copy(source, options)
    return ready


def _load_whole(source: CheckpointSource, options: _Options) -> Any:
    with torch_errors(source):
        return load_checkpoint(
            source,
            map_location=options.map_location,
            weights_only=options.weights_only,
            verify=options.verify,
            engine=options.engine,
            read=options.read,
        )


@no_garbage_collection()
def _prove(source: CheckpointSource) -> PickleScan | str:
    """Check all of the file but its storages, so that no later error is due to a damaged structure.

    Returns:
        The scanned pickle, or why only stock torch.load can tell what is in it.

    Raises:
        FormatError, ChecksumError: The file is damaged.
    """
    if source.kind != "torch_zip":
        raise FormatError(f"no state was saved here: {source.explain_unknown()}", path=source.path)
    try:
        entries = source.directory.entries
    except UnsupportedError as error:
        raise FormatError(f"the directory of the archive is damaged: {error}", path=source.path) from error
    if source.directory.has_checksums:
        check_small_records(source)
    for entry in entries.values():
        # torch reads these records itself, and finds them through their local headers.
        if not entry.name.startswith("data/"):
            header = source.read_at(entry.header_offset_bytes, LOCAL_HEADER_BYTES)
            if header_leads_to(header, entry) != entry.data_offset_bytes:
                raise FormatError(
                    f"the header of record {entry.name} is damaged",
                    path=source.path,
                    offset_bytes=entry.header_offset_bytes,
                )
    try:
        scan = source.scan()
        references = source.summarize(scan).references
    except UnsupportedError as error:
        return str(error)
    for reference in references:
        found = entries.get(f"data/{reference.key}")
        if found is None or found.size_bytes != reference.size_bytes:
            raise FormatError(f"pickle and directory disagree on storage {reference.key}", path=source.path)
    return scan


def _require_dict(source: CheckpointSource, options: _Options, loaded: object) -> None:
    if not isinstance(options.into, _Whole) and not isinstance(loaded, dict):
        raise ConfigError(f"{source.path} holds a {type(loaded).__name__}; only a dict has entries to restore")


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """All that is needed to change the targets.

    Attributes:
        loaded: The file's object. Its tensors that go to targets straight from the file have no data.
        plan: Which tensor goes where.
        pairs: The tensors that are filled straight from the file; empty if `loaded` has all data, which is then copied.
    """

    loaded: Any
    plan: Plan
    pairs: list[Pair]


# --------------------------------------------------------------------------------------------- in place


def _planned_in_place(source: CheckpointSource, options: _Options, scan: PickleScan) -> _Ready | str:
    """Load the entries without memory in a target, and plan the rest; or say why that is impossible."""
    root = options.arranged_nodes(source.path, scan.root)
    sizes_bytes = {reference.key: reference.size_bytes for reference in source.summary.references}
    keys = set(sizes_bytes)

    def bytes_of(node: object) -> int:
        return sum(sizes_bytes[key] for key in storages_below([node]))

    if options.keys is not None and isinstance(root, SymbolicDict | Call) and _scanned_entries(root) is None:
        return "its pickle does not tell the entries of a dict"
    choice = _left_out(source.path, root, options, _scanned_entries, bytes_of)
    left_out = [path for path, _ in choice.left_out]
    others = SortedStorages()
    if not isinstance(options.into, _Whole):
        others.sort(root, {**dict.fromkeys(options.into, None), **tree_of({}, left_out)})
    storages: dict[str, torch.UntypedStorage] = {}
    wanted = storages_below(others.whole)
    reason = _load_storages(source, options, storages, wanted, {})
    if reason is not None:
        return reason
    unread = others.in_place - wanted
    if unread:
        unread -= _storages_of(root, options.into)
    try:
        loaded, meta = _unpickled(source, options, storages, keys, unread)
    except Exception as error:  # noqa: BLE001 - whatever it is, stock torch.load succeeds or has the better message
        return f"it cannot be described without its data ({type(error).__name__}: {error})"
    _require_dict(source, options, loaded)
    loaded = options.arranged(source.path, loaded)

    key_of = {storage._cdata: key for key, storage in {**meta, **storages}.items()}
    plan = _plan(source, options, loaded, choice, lambda tensor: tensor.untyped_storage()._cdata in key_of)
    pairs = [
        Pair(leaf.name, leaf.target, described_tensor(source, key_of, leaf.value))
        for leaf in plan.leaves.values()
        if leaf.target is not None
    ]
    found = others
    if options.into:
        found = SortedStorages()
        found.sort(root, tree_of(plan.leaves, [*plan.unread, *left_out]))
    whole = storages_below(found.whole)
    missing = keys - storages.keys() - (found.in_place - found.elsewhere.keys() - whole)
    devices = {key: device for key, device in found.elsewhere.items() if key not in whole}
    if options.verify:
        require_checksums(source)
        in_place = sorted(keys - storages.keys() - missing, key=lambda key: (len(key), key))
        names = [f"data/{key}" for key in in_place]
        check_records(source, names, engine=options.engine, read=options.read)
    if missing:
        del loaded
        reason = _load_storages(source, options, storages, missing, devices)
        if reason is not None:
            return reason
        loaded = options.arranged(source.path, _unpickled(source, options, storages, keys, unread)[0])
    if options.keys is None:
        tell_left_out(source.path, choice, bytes_of)
    return _Ready(without(loaded, left_out), plan, pairs)


def _left_out(path: str, state: Any, options: _Options, entries_of: Entries, bytes_of: Callable[[Any], int]) -> Choice:
    """Choose what is left out of a state, as an object or as a scanned pickle."""
    if isinstance(options.into, _Whole):
        return Choice([], [])
    choice = left_out_of(state, options.into, options.keys, entries_of, bytes_of)
    entries = entries_of(state)
    if not options.into and entries is not None:  # with targets, one error lists everything that is wrong
        refuse_unmatched(path, choice.unmatched, [key for key, _ in entries if isinstance(key, SCALAR_KEYS)])
    return choice


def _storages_of(root: object, into: Mapping[str, object] | _Whole) -> set[str]:
    """Return the keys of the storages that targets of entries get."""
    if isinstance(into, _Whole):
        return set()
    return storages_below(
        node for key, node in _scanned_entries(root) or () if isinstance(key, SCALAR_KEYS) and key in into
    )


def _scanned_entries(node: object) -> list[tuple[object, object]] | None:
    """Return the entries of a scanned dict; None for any other node, and if a key occurs twice."""
    entries = node.entries if isinstance(node, Call) and is_ordered_dict(node) else node
    if not isinstance(entries, SymbolicDict):
        return None
    items = entries.items()
    return items if 2 * len(items) == len(entries.flat) else None


def _named_entries(node: object) -> list[tuple[object, object]] | None:
    """Return the entries of a scanned dict if all have names: no other key is safe to hash."""
    entries = _scanned_entries(node)
    return None if entries is None or not all(isinstance(key, SCALAR_KEYS) for key, _ in entries) else entries


def _symbolic_dict(entries: dict[object, object]) -> SymbolicDict:
    return SymbolicDict([one for entry in entries.items() for one in entry])


def _plan(
    source: CheckpointSource, options: _Options, loaded: Any, choice: Choice, has_data: Callable[[torch.Tensor], bool]
) -> Plan:
    into = options.into
    plan = Plan(has_data, strict=not isinstance(into, _Whole) or into.strict)
    if isinstance(into, _Whole):
        plan.add_whole(into.target, loaded)
    else:
        for key, target in into.items():
            if key in loaded:
                plan.add((key,), str(key), target, loaded[key])
        held = ", ".join(str(name) for name in list(loaded)[:_SHOWN_COUNT]) or "nothing"
        plan.problems += missing_keys(loaded, into, choice.unmatched, f"the file, which holds {held}")
    targets = [into.target] if isinstance(into, _Whole) else into.values()
    refuse_misfit(source.path, plan.problems, plan.keys, strict=plan.strict, targets=targets)
    plan.follow_file_where_memory_is_shared()
    return plan


def _load_storages(
    source: CheckpointSource,
    options: _Options,
    storages: dict[str, torch.UntypedStorage],
    wanted_keys: set[str],
    devices: Mapping[str, torch.device],
) -> str | None:
    """Add filled storages, on `devices` or else where map_location says; or say why only torch can load them."""
    all_keys = {reference.key for reference in source.summary.references}
    judged = storages_to_fill(source, options.map_location, passed_over=(all_keys - wanted_keys) | devices.keys())
    if isinstance(judged, str):
        return judged
    wanted = dict(judged)
    for key, device in devices.items():
        if key in wanted_keys:
            entry = source.directory.entries[f"data/{key}"]
            wanted[key] = StorageToFill(entry.data_offset_bytes, entry.size_bytes, entry.crc, device)
    fresh = {key: new_storage(item.size_bytes, item.device) for key, item in wanted.items()}
    fill_storages(source, wanted, fresh, verify=options.verify, engine=options.engine, read=options.read)
    storages.update(fresh)
    return None


def _unpickled(
    source: CheckpointSource,
    options: _Options,
    storages: Mapping[str, torch.UntypedStorage],
    keys: set[str],
    unread: set[str],
) -> tuple[Any, dict[str, torch.UntypedStorage]]:
    """Unpickle around the given storages and around new ones without data for other keys; return those too.

    Of the keys in `unread` not even the local headers are read.
    """
    sizes = {key: source.directory.entries[f"data/{key}"].size_bytes for key in keys - storages.keys()}
    meta = {key: new_storage(size_bytes, torch.device("meta")) for key, size_bytes in sizes.items()}
    extents = Extents()
    headers = LocalHeaders(source, keys - unread, extents)
    with torch_errors(source):
        loaded = unpickle_while_reading(
            source,
            {**meta, **storages},
            extents,
            headers,
            map_location=options.map_location,
            weights_only=options.weights_only,
        )
    return loaded, meta


# --------------------------------------------------------------------------------------------- by a copy


def _planned_with_copy(source: CheckpointSource, options: _Options) -> _Ready:
    """Load everything, as if there were no targets."""
    loaded = _load_whole(source, options)
    _require_dict(source, options, loaded)
    loaded = options.arranged(source.path, loaded)
    choice = _left_out(source.path, loaded, options, dict_entries, tensor_bytes)
    plan = _plan(source, options, loaded, choice, lambda tensor: not tensor.is_meta)
    if options.keys is None:
        tell_left_out(source.path, choice, tensor_bytes)
    return _Ready(without(loaded, (path for path, _ in choice.left_out)), plan, [])


# --------------------------------------------------------------------------------------------- change


def _change(
    source: CheckpointSource, ready: _Ready, options: _Options, on_filled: Callable[[str], None] | None
) -> None:
    """Fill the targets' tensors, then take the plan's steps. From here on, errors name the targets that changed."""
    # If another rank has failed, this raises before anything changes here.
    options.read(source.fd, source.path, Extents(), engine=options.engine)
    plan = ready.plan
    filled = [(path, leaf, leaf.target) for path, leaf in plan.leaves.items() if leaf.target is not None]
    tree = tree_of(plan.leaves)
    with TargetChange(source.path, on_filled) as change:
        for path, _, _ in filled:
            change.touch(path[0])
        if ready.pairs:
            fill_pairs(source, ready.pairs, options.engine, [], options.read)
        else:
            with torch.no_grad():
                for path, _, target in filled:
                    target.copy_(_part(ready.loaded, path))
        change.take(plan.steps, lambda step: _with_targets(_part(ready.loaded, step.path), _part(tree, step.path)))


def _part(value: Any, path: Path) -> Any:
    """Return the part of nested containers that a path leads to; None if there is none."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        else:
            value = value[key] if isinstance(value, (list, tuple)) else None
    return value


def _with_targets(value: Any, tree: Tree | Leaf | Unread | None) -> Any:
    """Return a part of the file's object, with the tensors of targets, or shards, in place of the loaded ones."""
    if isinstance(tree, Leaf):
        return tree.of_this_rank(value)
    if not isinstance(tree, dict) or not tree:
        return value
    if isinstance(value, dict):
        copied = copy.copy(value)  # of an OrderedDict, with its _metadata
        for key, below in tree.items():
            copied[key] = _with_targets(value[key], below)
        return copied
    items = [_with_targets(item, tree.get(index)) for index, item in enumerate(value)]
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
