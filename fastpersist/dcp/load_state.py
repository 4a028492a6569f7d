"""Loads the sharded state of a step: tensors in place, whatever their sharding, and everything else as it was saved.

Each rank reads DCP's `.metadata` and plans by itself what it needs from the parts. It first loads the objects, which
are small, and checks that all targets fit. With `verify`, the ranks then divide the CRCs of all files among them. When
all ranks agree, tensors are filled, and targets changed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from fastpersist.commit.filesystem import open_regular
from fastpersist.dcp.coverage import require_covered
from fastpersist.dcp.metadata import METADATA_NAME
from fastpersist.dcp.part_reader import load_object
from fastpersist.dcp.storage_reader import FastPersistReader
from fastpersist.dcp.target_plan import Fit, Node, Saved, full_value, holds_nothing, leaves, saved_tree
from fastpersist.errors import (
    ChecksumError,
    ConfigError,
    FormatError,
    UnsupportedError,
)
from fastpersist.formats.manifest import CheckpointManifest, FileEntry, writer_of
from fastpersist.loading.renaming import Rename, nested_for
from fastpersist.loading.selection import (
    dict_entries,
    left_out_of,
    refuse_unmatched,
    tell_left_out,
    tensor_bytes,
    without,
)
from fastpersist.loading.targets import TargetChange, missing_keys, refuse_misfit
from fastpersist.loading.unpickle import MapLocation
from fastpersist.transfer.reader import Extents, Read, read_extents

__all__ = ["load_sharded_state", "verify_files"]

_SHOWN_COUNT = 10


def load_sharded_state(
    path: str,
    manifest: CheckpointManifest,
    *,
    into: Mapping[str, object] | None,
    keys: Collection[str] | None,
    map_location: MapLocation,
    verify: bool,
    weights_only: bool,
    engine: str,
    read: Read,
    rank: int,
    count: int,
    reader: FastPersistReader | None = None,
    agree: Callable[[], object] | None = None,
    rename: Rename | None = None,
) -> dict[str, Any]:
    """Load the state of a step whose parts several ranks may have written.

    Args:
        path: The directory of the step.
        manifest: The step's manifest.
        into: Targets to fill in place, by key of the state: modules, optimizers, tensors (DTensors, too), dicts and
            lists of these, or an object with load_state_dict.
        keys: What to read beside `into`, as in `load_state`.
        map_location: A device, for tensors that have no target; None for the host.
        verify: Check the CRC of every file before anything changes.
        weights_only: The option of torch.load, for what is no tensor.
        engine: "auto", or an engine's name, which then never falls back.
        read: Agrees with the other ranks that load.
        rank: The rank of this process among the ranks that load.
        count: How many ranks load.
        reader: Reads the step; None for a reader of its directory.
        agree: Returns when all ranks call it; None for a round of `read`.
        rename: New names for what was saved, by which `into` finds it; with `into`, without `keys`.

    Returns:
        The state, with the very objects of `into` under their keys, and without what `left_out_of` names.
        Tensors without a target are whole, on every rank.

    Raises:
        FormatError, ChecksumError, CheckpointNotFoundError: The checkpoint is damaged, or a part is missing.
        StorageError: An error of the disk. Where a message says *partly overwritten*, the targets it names are not
            usable until they are restored.
        ConfigError: The targets do not fit, or one of `keys` is not there, and nothing was changed; or a target's
            load_state_dict refused.
        UnsupportedError: An object that weights_only refuses.
        PeerError: Another rank has failed.
    """
    device = _device_of(map_location)
    # Always checked: a wrong byte in it may lead anywhere, and the file is small.
    verify_files(
        path, [entry for entry in manifest.files if entry.name == METADATA_NAME and entry.crc32 is not None], engine
    )
    reader = reader or FastPersistReader(path, engine=engine)
    metadata = reader.read_metadata()
    # With thousands of ranks, each must not look up thousands of parts: reading a damaged part raises an error anyway.
    tree = _proven_tree(path, reader, metadata, {entry.name: entry.size_bytes for entry in manifest.files})
    targets = dict(into or {})
    if rename is not None:
        tree = nested_for(path, tree, rename, targets)
    taken = set(map(str, targets))
    # With targets, the objects tell which entries are small; without, only those are read that keys choose.
    objects = _read_objects(reader, metadata, weights_only, tree) if targets else {}

    def bytes_of(node: Node) -> int:
        return sum(_size_bytes(leaf, objects) for leaf in leaves(node))

    choice = left_out_of(tree, taken, keys, dict_entries, bytes_of)
    places = [place for place, _ in choice.left_out]
    # An optimizer's groups tell what its ids of parameters were: numbers or text.
    groups = [place for place in places if len(place) > 1 and place[-1] == "param_groups"]
    kept: dict[str, Node] = without(tree, [place for place in places if place not in groups])
    if not targets:
        refuse_unmatched(path, choice.unmatched, tree, "checkpoint")
        objects = _read_objects(reader, metadata, weights_only, kept)
    fit = _planned(path, tree, Fit(objects, device, _modules_in(targets)), targets, choice.unmatched)
    loaded = {key: full_value(node, fit.value_of) for key, node in kept.items() if key not in taken}
    loaded = without(loaded, groups)
    if keys is None:
        tell_left_out(path, choice, bytes_of)
    if verify:
        verify_files(path, manifest.files[rank::count], engine)
    if agree is None:
        _agree(path, engine, read)
    else:
        agree()
    _change(path, reader, metadata, fit)
    return {**loaded, **targets}


def _proven_tree(
    path: str, reader: FastPersistReader, metadata: Metadata, known_bytes: Mapping[str, int]
) -> dict[str, Node]:
    """Return the tree of what was saved, once the metadata are proven.

    Raises:
        FormatError, CorruptionError, UnsupportedError: The metadata are not valid.
    """
    metadata_path = os.path.join(path, METADATA_NAME)
    try:
        tree = saved_tree(metadata)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"its names make no state: {error}", path=metadata_path) from error
    require_covered(metadata.state_dict_metadata, metadata_path)
    reader.require_places(metadata, known_bytes)
    return tree


def _planned(
    path: str, tree: Mapping[str, Node], fit: Fit, targets: Mapping[str, object], keys: Collection[str]
) -> Fit:
    """Plan all targets.

    Raises:
        ConfigError: They do not fit, or something that is asked for is not there.
    """
    for key, target in targets.items():
        node = tree.get(str(key))
        if node is not None:
            fit.add((key,), str(key), target, node)
    held = ", ".join(list(tree)[:_SHOWN_COUNT]) or "nothing"
    needed = [str(key) for key, target in targets.items() if not holds_nothing(target)]
    fit.problems += missing_keys(tree, needed, keys, f"the checkpoint, which holds {held}")
    refuse_misfit(path, fit.problems, fit.keys, strict=True, where="checkpoint")
    return fit


def _modules_in(targets: Mapping[str, object]) -> list[torch.nn.Module]:
    return [one for one in targets.values() if isinstance(one, torch.nn.Module)]


def _device_of(map_location: MapLocation) -> torch.device:
    if map_location is None or isinstance(map_location, str | torch.device):
        return torch.device(map_location or "cpu")
    raise ConfigError(
        "for a sharded step, map_location must be a device, because it was saved from one device per rank"
    )


def _size_bytes(leaf: Saved, objects: Mapping[str, Any]) -> int:
    described = leaf.described
    if isinstance(described, TensorStorageMetadata):
        return int(described.size.numel()) * described.properties.dtype.itemsize
    return tensor_bytes(objects[leaf.fqn])


class _Planner(DefaultLoadPlanner):
    """Plans the load of tensors and objects by their names, without looking for older ways to name them."""

    def __init__(self, *, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object; called by the reader."""
        loaded = load_object(value, weights_only=self._weights_only)
        self.original_state_dict[read_item.dest_index.fqn] = loaded


def _read(reader: FastPersistReader, metadata: Metadata, state: dict[str, Any], *, weights_only: bool = True) -> None:
    planner = _Planner(weights_only=weights_only)
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _read_objects(
    reader: FastPersistReader, metadata: Metadata, weights_only: bool, tree: dict[str, Node]
) -> dict[str, Any]:
    """Read what is in the tree and is no tensor, by DCP's names."""
    state: dict[str, Any] = {leaf.fqn: None for leaf in leaves(tree) if leaf.shape is None}
    _read(reader, metadata, state, weights_only=weights_only)
    return state


def verify_files(path: str, entries: Sequence[FileEntry], engine: str) -> None:
    """Compare whole files of a checkpoint directory with their CRCs in its manifest.

    Raises:
        ChecksumError: One is damaged; the message says who wrote it.
        UnsupportedError: One has no CRC.
        StorageError: One cannot be read.
    """
    for entry in entries:
        file_path = os.path.join(path, entry.name)
        if entry.crc32 is None:
            raise UnsupportedError(f"{file_path} has no checksum in the manifest, so it cannot be verified")
        fd = open_regular(file_path)
        try:
            extents = Extents()
            extents.add_checked(0, entry.size_bytes)
            crcs = read_extents(fd, file_path, extents, engine=engine).crcs if entry.size_bytes else [0]
        finally:
            os.close(fd)
        if crcs[0] != entry.crc32:
            by_whom = "" if writer_of(entry.name) is None else f" (rank {writer_of(entry.name)} wrote it)"
            message = f"its bytes are damaged: their CRC is {crcs[0]:08x}, not {entry.crc32:08x}{by_whom}"
            raise ChecksumError(message, path=file_path)


def _agree(path: str, engine: str, read: Read) -> None:
    """Wait until all ranks reach this point: one may have found that its targets do not fit."""
    metadata_path = os.path.join(path, METADATA_NAME)
    fd = open_regular(metadata_path)
    try:
        read(fd, metadata_path, Extents(), engine=engine)
    finally:
        os.close(fd)


def _change(path: str, reader: FastPersistReader, metadata: Metadata, fit: Fit) -> None:
    """Fill the tensors, then take the steps. From here on, errors say what they leave behind."""
    with TargetChange(path) as change:
        for key in fit.filled_keys:
            change.touch(key)
        _read(reader, metadata, dict(fit.tensors))
        change.take(fit.steps, lambda _: None)
