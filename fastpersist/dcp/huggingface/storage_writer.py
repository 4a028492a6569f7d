"""The StorageWriter of torch.distributed.checkpoint that writes a HuggingFace checkpoint: safetensors and an index.

The files are those of `save_pretrained`: each tensor whole, in one file, whatever its sharding. There is no second pass
over the bytes: the plans of all ranks give the place of each byte (`layout`), all ranks write at once (`model_part`),
and the coordinator publishes the directory.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from fastpersist.commit.directory_commit import Overwrite
from fastpersist.commit.filesystem import filesystem, storage_errors
from fastpersist.dcp.async_stager import CapturingWriter
from fastpersist.dcp.huggingface.captured_bytes import PIECE_BYTES
from fastpersist.dcp.huggingface.coordinator import finish_files
from fastpersist.dcp.huggingface.layout import (
    INDEX_NAME,
    ModelLayout,
    in_file_order,
    plan_model,
    without_duplicates,
)
from fastpersist.dcp.huggingface.model_part import ModelPart, make_files, write_model_part
from fastpersist.dcp.huggingface.shared_windows import (
    SharedWindows,
    failure_told,
    is_for_windows,
    make_windows,
    windowed,
)
from fastpersist.distributed.partition import common_block_bytes
from fastpersist.distributed.peers import loopback_place, own_process
from fastpersist.errors import ConfigError
from fastpersist.formats.manifest import MANIFEST_NAME
from fastpersist.formats.safetensors import WEIGHTS_NAME
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.ownership import Owners

__all__ = ["FastPersistHuggingFaceWriter"]

_MAX_SHARD_BYTES = 5_000_000_000

_NAMES_OF_MODELS = frozenset(
    ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "adapter_config.json")
)
"""Other files that show that a directory is meant for a model."""


class _Site(NamedTuple):
    """Where a rank runs."""

    machine: str
    process: tuple[int, str, str]
    page_bytes: int


class _Begun(NamedTuple):
    """What the coordinator knows of a save that is under way."""

    layout: ModelLayout
    parts: list[ModelPart]
    plans: list[SavePlan]


class FastPersistHuggingFaceWriter(CapturingWriter, StorageWriter):
    """Writes a sharded model as `model-0000x-of-0000y.safetensors` and their index, or as one `model.safetensors`.

    The directory appears when all ranks are done, durable, or not at all. For state dicts of tensors: those of a model.

    Args:
        path: The directory; None to take `checkpoint_id=` of dcp.save.
        max_shard_bytes: The most bytes of tensors in a file. A larger tensor gets a file of its own.
        fqn_to_index_mapping: The number of the file of each tensor, from 1, in place of `max_shard_bytes`.
        metadata: Text to text, for the header of each file, beside `"format": "pt"`.
        overwrite: Write a model into an existing directory: its weights are replaced, other files in it (config.json,
            a tokenizer) stay. Without it, an existing directory is an error.
        engine: "auto", or an engine's name, which then never falls back.
        durable: Survive power loss once dcp.save has returned.
        optimizer: For dcp.async_save, as in `FastPersistWriter`. Without it, dcp.async_save
            copies the whole state before it returns.
        constant: The option of `FastPersistWriter`.
        gate: The option of `FastPersistWriter`.
        max_host_bytes: The option of `FastPersistWriter`.

    Raises:
        ConfigError: Unknown engine or gate, no such size, or something that is no optimizer.

    All ranks need to see the directory. If a save fails, the existing directory stays as it was. The coordinator's
    writer removes what such a save has written, at its next save at the latest.

    dcp.async_save plans and writes on a thread of torch's, with collectives: give it a process_group of its own. This
    writer is its stager, too; with AsyncCheckpointerType.PROCESS pass async_stager=DefaultStager().
    Thread safety: one save at a time; a save waits for an async_save before it.
    """

    _why_collectives = "makes files to which all ranks write"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_shard_bytes: int = _MAX_SHARD_BYTES,
        fqn_to_index_mapping: Mapping[str, int] | None = None,
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = True,
        engine: str = "auto",
        durable: bool = True,
        optimizer: object = None,
        constant: object = (),
        gate: Literal["optimizer", "manual"] = "optimizer",
        max_host_bytes: int | None = None,
    ) -> None:
        super().__init__(
            path,
            Owners(optimizer, constant, gate),
            max_host_bytes,
            overwrite=overwrite,
            engine=engine,
            durable=durable,
            piece_bytes=PIECE_BYTES,
        )
        if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes is {max_shard_bytes!r}; it must be a number of bytes, 1 or more")
        self._max_shard_bytes = max_shard_bytes
        self._indices = None if fqn_to_index_mapping is None else dict(fqn_to_index_mapping)
        self._metadata = {"format": "pt", **(metadata or {})}
        self._order: list[str] = []
        self._plans: list[SavePlan] = []  # the last plan of each rank, and its machine
        self._sites: list[_Site | None] = []

    def storage_meta(self) -> StorageMeta:
        """Return what DCP notes of a save; the first method that dcp.save calls."""
        self._take_staged()
        return self._known_to_planner(StorageMeta(checkpoint_id=self._path))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add this rank's machine and process to its plan; called by dcp.save on each rank."""
        if plan.items:  # else the planner repeats the plan of the last save
            self._order = [item.index.fqn for item in plan.items]
        return replace(plan, storage_data=_Site(loopback_place()[0], own_process(), mmap.PAGESIZE))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide where each tensor goes, and make the files; called by dcp.save on the coordinator."""
        final_path = self._final_path()
        self._remember(plans)
        unique = without_duplicates(self._plans)
        machines = {site.machine if site is not None else None for site in self._sites}
        pages = [site.page_bytes for site in self._sites if site is not None]
        unit_bytes = 1 if len(machines) == 1 else common_block_bytes(pages)
        layout = plan_model(
            unique,
            self._order,
            max_shard_bytes=self._max_shard_bytes,
            indices=self._indices,
            metadata=self._metadata,
            unit_bytes=unit_bytes,
        )
        self._directory = DirectorySave(
            final_path, overwrite=self._may_replace(), engine=self._engine, make_parents=True
        )
        path = self._directory.path
        parts: list[ModelPart] = []
        self._begun = _Begun(layout, parts, unique)
        try:
            make_files(layout, path, final_path)
            windows = self._windows(path, final_path, layout, unique) if unit_bytes == 1 else None
            for rank, plan in enumerate(unique):
                places = {item.index.fqn: layout.places[item.index.fqn] for item in plan.items}
                parts.append(ModelPart(rank, path, final_path, layout.names, places, unit_bytes, windows))
        except BaseException:
            self._give_up()
            raise
        told = [own if plan.usable else plan for own, plan in zip(unique, plans, strict=True)]
        return [replace(plan, storage_data=part) for plan, part in zip(told, parts, strict=True)]

    def _windows(
        self, directory: str, final_path: str, layout: ModelLayout, plans: list[SavePlan]
    ) -> SharedWindows | None:
        """Send tensors of short runs through windows, if the ranks can share memory."""
        items: dict[str, dict[int, list[WriteItem]]] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                if is_for_windows(layout.places[item.index.fqn]):
                    items.setdefault(item.index.fqn, {}).setdefault(rank, []).append(item)
        tensors = [windowed(name, layout.places[name], list(own.values())) for name, own in items.items()]
        found = [tensor for tensor in tensors if tensor is not None]
        found.sort(key=lambda tensor: (tensor.place.file, tensor.place.offset_bytes))
        processes = [site.process if site is not None else None for site in self._sites]
        windows = make_windows(directory, final_path, processes, found)
        if windows is not None:
            layout.places.update({tensor.name: tensor.place for tensor in found})
        return windows

    def _remember(self, plans: list[SavePlan]) -> None:
        """Take the plans; for ranks whose planner has left out unchanged items, their last plans."""
        if not all(plan.usable for plan in plans) and len(self._plans) != len(plans):
            raise ConfigError(
                "this plan says that nothing has changed since a save with another writer: with "
                "enable_plan_caching=True, use one FastPersistHuggingFaceWriter for all saves"
            )
        before = self._plans or plans
        sites = self._sites or [None] * len(plans)
        self._plans = [new if new.usable else old for new, old in zip(plans, before, strict=True)]
        self._sites = [
            plan.storage_data if isinstance(plan.storage_data, _Site) else old
            for plan, old in zip(plans, sites, strict=True)
        ]

    def _may_replace(self) -> Overwrite:
        if not self._overwrite or self._path is None:
            return self._overwrite
        with storage_errors("listing", self._path):
            try:
                names = os.listdir(self._path)
            except (FileNotFoundError, NotADirectoryError):
                return self._overwrite
        if MANIFEST_NAME in names or not any(
            name in _NAMES_OF_MODELS or WEIGHTS_NAME.fullmatch(name) for name in names
        ):
            return True
        return "foreign"

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        part = self._part_in(plan, ModelPart)
        items = in_file_order(plan.items, part.places)
        with failure_told(part.windows, part.rank), self._captured(items, planner) as capture:
            return write_model_part(part, items, planner, engine=self._engine, durable=self._durable, capture=capture)

    def _give_up(self) -> None:
        super()._give_up()
        self.__dict__.pop("_begun", None)  # it is large

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write headers and index, and publish the directory; called by dcp.save on the coordinator."""
        with self._to_finish() as directory:
            begun = self._begun
            del self._begun  # it is large
            _refuse_gaps(begun.plans, results)
            if begun.parts[0].windows is not None:
                filesystem().unlink(begun.parts[0].windows.path)
            files = finish_files(
                begun.layout,
                begun.parts,
                [plan.items for plan in begun.plans],
                [result for of_rank in results for result in of_rank],
                engine=self._engine,
                durable=self._durable,
            )
            for name, size_bytes, crc in files:
                directory.add_written(name, size_bytes, crc)
            if begun.layout.is_split:
                directory.add_bytes(INDEX_NAME, _index_of(begun.layout))
            if self._overwrite:
                self._keep_others(directory, WEIGHTS_NAME.fullmatch)
            directory.publish(durable=self._durable).result()


def _refuse_gaps(plans: list[SavePlan], results: list[list[WriteResult]]) -> None:
    """Refuse to publish a model that was not written as a whole."""
    for rank, (plan, of_rank) in enumerate(zip(plans, results, strict=True)):
        missing = {item.index for item in plan.items}.difference(result.index for result in of_rank)
        if missing:
            raise ConfigError(
                f"rank {rank} was to write a chunk of {min(index.fqn for index in missing)!r} and has not: its planner "
                "has left it out"
            )


def _index_of(layout: ModelLayout) -> bytes:
    weight_map = {name: layout.names[place.file] for name, place in sorted(layout.places.items())}
    total_bytes = sum(place.size_bytes for place in layout.places.values())
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2).encode() + b"\n"
