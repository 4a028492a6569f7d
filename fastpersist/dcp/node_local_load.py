"""Loads a DCP checkpoint whose parts lie in several node-local stores: a rank that sees a part broadcasts it.

A `PartsExchange` reads all parts and the metadata as one file, one after the other. Before a rank reads items
(`FastPersistReader`), it fetches the blobs that lie in parts of other stores into a sparse in-memory file, as long as
all parts together. Until they are read, a rank holds a second copy of what it needs from other stores; no rank holds
the whole checkpoint. A rank that sees nothing of the step fetches the metadata in the same way.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from fastpersist.commit.filesystem import storage_errors
from fastpersist.dcp.load_state import load_sharded_state
from fastpersist.dcp.metadata import METADATA_NAME, read_metadata
from fastpersist.dcp.part_reader import PartReader, require_place
from fastpersist.dcp.storage_reader import FastPersistReader
from fastpersist.distributed.node_local.exchange import PartsExchange, writing_to
from fastpersist.distributed.node_local.split_step import StepParts
from fastpersist.distributed.shared_reader import SharedReader
from fastpersist.errors import FormatError, UnsupportedError
from fastpersist.formats.byte_ranges import Extent, merged
from fastpersist.formats.manifest import NO_FILES, writer_of
from fastpersist.formats.split_manifest import Part, PartsRecord
from fastpersist.loading.part_files import FoundPart
from fastpersist.transfer.reader import Extents

__all__ = ["loader_of_parts", "require_all_shards"]


def loader_of_parts(parts: StepParts, engine: str) -> Callable[..., dict[str, Any]]:
    """Return what loads a sharded step whose parts lie in several stores; all ranks call this, and then that.

    Args:
        parts: Which rank sees which parts.
        engine: "auto", or an engine's name, which then never falls back.

    Returns:
        `load_sharded_state` of this step, which takes the other options. With `verify`, the ranks that see a store
        check the CRCs of its files.

    Raises:
        FormatError: The parts that the ranks see are not those that the metadata name.
        PeerError: Another rank has failed.
    """
    read, manifest = parts.reader, parts.manifest or NO_FILES
    turn, turn_count = parts.own_turn()
    return partial(
        load_sharded_state,
        parts.path,
        replace(manifest, files=manifest.files[turn::turn_count]),
        read=read,
        rank=0,
        count=1,
        reader=_ExchangingReader(parts, read, engine),
        agree=lambda: read.wait_for_all("agreed"),
    )


def require_all_shards(path: str, record: PartsRecord) -> None:
    """Refuse a sharded step of which parts lie in other stores, for a process that loads it alone.

    Args:
        path: The path of the step's directory.
        record: The record of the step's parts.

    Raises:
        UnsupportedError: A part is not here; the message says whose, and where it was written.
    """
    metadata, _ = read_metadata(os.path.join(path, METADATA_NAME))
    with storage_errors("listing", path):
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


class _ExchangingReader(FastPersistReader):
    """Reads parts of this store from their files, and parts of other stores from memory, once they are fetched."""

    def __init__(self, parts: StepParts, read: SharedReader, engine: str) -> None:
        super().__init__(parts.path, engine=engine)
        manifest = parts.manifest or NO_FILES
        self._sizes = {
            entry.name: entry.size_bytes
            for entry in manifest.files
            if (entry.name.endswith(".distcp") and "/" not in entry.name) or entry.name == METADATA_NAME
        }
        here = set(self._sizes)
        for _, told in read.say("shards", self._sizes):
            self._sizes.update(told)
        names = sorted(name for name in self._sizes if self._sizes[name])
        starts = list(accumulate((self._sizes[name] for name in names), initial=0))
        self._starts = dict(zip(names, starts, strict=False))
        self._missing = self._sizes.keys() - here
        self._in_memory = -1  # the descriptor of all of them, once this rank reads of one
        self._read = read
        entries = {entry.name: entry for entry in manifest.files}
        own = []
        writers = Counter(writer_of(name) for name in names if name != METADATA_NAME)
        for name in names:
            # The metadata are no rank's part: they get the number after the last rank's.
            rank = 1 + max(filter(None, writers), default=0) if name == METADATA_NAME else writer_of(name)
            if rank is None or writers[rank] > 1:
                raise FormatError(f"{name} is no part that one rank wrote", path=parts.path)
            if name in here:
                part = Part(rank, (Extent(self._starts[name], self._sizes[name]),))
                own.append(FoundPart(os.path.join(parts.path, name), entries[name], part, parts.host_of(rank)))
        self._exchange = PartsExchange(read, parts.path, own, starts[-1], with_structure=False)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what is in the checkpoint."""
        if METADATA_NAME not in self._missing:
            return super().read_metadata(*args, **kwargs)
        fd = os.memfd_create("fastpersist", os.MFD_CLOEXEC)
        try:
            extents = Extents()
            start_bytes = self._starts.get(METADATA_NAME, 0)  # an empty file has no place
            extents.add_pushed(start_bytes, self._sizes[METADATA_NAME], writing_to(fd, 0), with_crc=False)
            self._exchange(-1, self._exchange.path, extents, engine=self._engine)
            return read_metadata(f"/proc/self/fd/{fd}")[0]
        finally:
            os.close(fd)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch what this rank reads of other stores, with the other ranks; then read everything."""
        wanted: dict[str, list[Extent]] = {}
        for item in plan.items:
            info = self._info_of(item.storage_index)
            name = info.relative_path
            if name in self._missing:
                path = os.path.join(self._path or "", name)
                require_place(path, item.storage_index.fqn, info.offset, info.length, self._sizes[name])
                wanted.setdefault(name, []).append(Extent(info.offset, info.length))
        extents = Extents()
        for name, places in sorted(wanted.items()):
            for offset_bytes, size_bytes in merged(places):
                start_bytes = self._starts[name] + offset_bytes
                extents.add_pushed(start_bytes, size_bytes, writing_to(self._memory(), start_bytes), with_crc=False)
        self._exchange(-1, self._exchange.path, extents, engine=self._engine)
        try:
            return super().read_data(plan, planner)
        finally:
            if wanted:
                os.ftruncate(self._memory(), 0)

    def _memory(self) -> int:
        """Return a file of holes in memory for parts of other stores, which is closed when all ranks are done."""
        if self._in_memory < 0:
            self._in_memory = os.memfd_create("fastpersist", os.MFD_CLOEXEC)
            self._read.stack.callback(os.close, self._in_memory)
        return self._in_memory

    def _part_bytes(self, name: str) -> int | None:
        return self._sizes.get(name)

    def _open_part(self, path: str, name: str) -> PartReader:
        if name not in self._missing:
            return super()._open_part(path, name)
        place = Extent(self._starts.get(name, 0), self._sizes[name])
        return PartReader(path, name, engine="auto", verify=self._verify, inside=(os.dup(self._memory()), place))
