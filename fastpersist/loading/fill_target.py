"""Fills a Module, or nested containers of tensors and Modules, in place: from a torch zip, or from safetensors files.

Stock torch.load builds the file's object over storages on the meta device. So every name, shape, dtype and stride is
known without a byte of data, and nothing changes before all is checked. After a Module's tensors are filled, they pass
through its load_state_dict if it has hooks or extra state, or if its state_dict has other tensors than the module's
own. `restore` fills targets with optimizers and other objects.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from fastpersist.errors import ChecksumError, ConfigError, FormatError, PeerError, StorageError, UnsupportedError
from fastpersist.formats import safetensors as safetensors_format
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.fill_tensors import Pair, StoredTensor, described_tensor, fill_pairs, why_not_fillable
from fastpersist.loading.renaming import Rename, regrouped, renamed
from fastpersist.loading.safetensors_directory import open_all
from fastpersist.loading.selection import chosen_part
from fastpersist.loading.targets import (
    MODULES,
    IncompatibleKeys,
    Step,
    TargetChange,
    as_loaded,
    has_stock_load,
    is_extra_state,
    joined_name,
    refuse_misfit,
    tensors_in,
    why_not_fitting,
)
from fastpersist.loading.unpickle import (
    LocalHeaders,
    check_records,
    check_small_records,
    new_storage,
    require_checksums,
    torch_dtype,
    unpickle_while_reading,
    unpickle_with,
)
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.progress import showing_progress
from fastpersist.transfer.reader import Extents, Read, read_extents

__all__ = ["Wanted", "fill_from_directory", "fill_target"]

_SHOWN_COUNT = 10


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is filled with what.

    Attributes:
        target: What is filled.
        strict: Names that only one side has are refused.
        keys: Names and patterns of what is taken from the file; the rest of the target stays. None for everything.
        rename: The names of the file become those of the target.
    """

    target: object
    strict: bool = True
    keys: Collection[str] | None = None
    rename: Rename | None = None

    def arranged(self, path: str, held: Any) -> Any:
        """Return what a file holds as the target expects it.

        Raises:
            ConfigError: A key chooses nothing; or what is renamed, or its target, has no names.
        """
        held = chosen_part(path, held, self.keys)
        if self.rename is None:
            return held
        if not isinstance(self.target, torch.nn.Module | Mapping):
            raise ConfigError(f"rename= goes with a Module or a dict, not with a {type(self.target).__name__}")
        return regrouped(renamed(path, held, self.rename), self.target)


def fill_target(source: CheckpointSource, wanted: Wanted, *, verify: bool, engine: str, read: Read) -> IncompatibleKeys:
    """Fill a Module, or nested containers of tensors and Modules, from a file; see `load_into`."""
    structure = _read_structure(source, wanted)
    pairs, modules, keys = _match(source.path, structure.stored, wanted, ties=source.kind == "safetensors")
    if verify:
        _verify_all(source, engine, read)
    held = _with_extra_states(source, structure, wanted, engine, read)
    read(source.fd, source.path, Extents(), engine=engine)  # raises if another rank has failed so far
    _fill([(source, pairs)], engine, read)
    _load_states(source.path, modules, held, strict=wanted.strict)
    return keys


def fill_from_directory(
    path: str, wanted: Wanted, *, verify: bool, engine: str, progress: bool
) -> tuple[IncompatibleKeys, int]:
    """Fill a Module, or nested containers of tensors and Modules, from a directory of safetensors; see `load_into`.

    Returns:
        The names that were passed over; the bytes of all files.
    """
    with ExitStack() as stack:
        sources = open_all(path, stack)
        stored = [_stored_entries(source) for source in sources]
        every = {name: one for own in stored for name, one in own.items()}
        pairs, modules, keys = _match(path, wanted.arranged(path, every), wanted, ties=True)
        size_bytes = sum(source.size_bytes for source in sources)
        stack.enter_context(showing_progress(path, size_bytes * (1 + verify), progress))
        if verify:
            for source in sources:
                _verify_all(source, engine, read_extents)
        number_of = {id(one): number for number, own in enumerate(stored) for one in own.values()}
        parts: list[tuple[CheckpointSource, list[Pair]]] = [(source, []) for source in sources]
        for pair in pairs:
            parts[number_of[id(pair.stored)]][1].append(pair)
        _fill(parts, engine, read_extents)
        _load_states(path, modules, {}, strict=wanted.strict)
        return keys, size_bytes


def _fill(parts: Sequence[tuple[CheckpointSource, Sequence[Pair]]], engine: str, read: Read) -> None:
    """Fill targets from files, one after the other; errors name the targets that may have changed."""
    filled: list[str] = []
    for source, pairs in parts:
        try:
            fill_pairs(source, pairs, engine, filled, read)
        except (StorageError, PeerError) as error:
            raise _partly_overwritten(error, filled) from error


def _verify_all(source: CheckpointSource, engine: str, read: Read) -> None:
    require_checksums(source)
    if source.kind == "safetensors":
        extents = Extents()
        for entry in source.header.entries:
            extents.add_checked(entry.offset_bytes, entry.size_bytes)
        crcs = read(source.fd, source.path, extents, engine=engine).crcs
        for entry, crc in zip(source.header.entries, crcs, strict=True):
            if crc != entry.crc:
                raise ChecksumError(
                    f"the bytes of {entry.name} are damaged: their CRC is {crc:08x}, not {entry.crc or 0:08x}",
                    path=source.path,
                    offset_bytes=entry.offset_bytes,
                )
        return
    check_small_records(source)
    storages = [name for name in source.directory.entries if name.startswith("data/")]
    check_records(source, storages, engine=engine, read=read)


def _partly_overwritten(error: StorageError | PeerError, filled: list[str]) -> StorageError | PeerError:
    shown = ", ".join(filled[:_SHOWN_COUNT]) + (
        f" and {len(filled) - _SHOWN_COUNT} more" if len(filled) > _SHOWN_COUNT else ""
    )
    message = f"{error}; target partly overwritten, the contents of these tensors are unknown: {shown}"
    if isinstance(error, PeerError):
        return type(error)(message, rank=error.rank, subject=error.subject)
    return type(error)(error.errno, message, error.filename, error.offset_bytes)


# --------------------------------------------------------------------------------------------- what the file holds


@dataclass(frozen=True, slots=True)
class _Structure:
    """The object in a file, without its data.

    Attributes:
        stored: The object with a StoredTensor for each tensor, a list for each tuple, _EXTRA_STATE for each extra state
            of a module, and None for all other values.
        skeleton: The object with tensors on the meta device; None for safetensors.
        storages: The storages of these tensors, by key.
    """

    stored: Any
    skeleton: Any
    storages: dict[str, torch.UntypedStorage]


@no_garbage_collection()
def _read_structure(source: CheckpointSource, wanted: Wanted) -> _Structure:
    if source.kind == "safetensors":
        return _Structure(wanted.arranged(source.path, _stored_entries(source)), None, {})
    if source.kind != "torch_zip":
        source.refuse_foreign()
        raise UnsupportedError(
            f"{source.path}: {source.explain_unknown()}; use fastpersist.load and load_state_dict instead"
        )
    if source.is_byte_swapped():
        raise UnsupportedError(f"{source.path} has the other byte order; use torch.load and load_state_dict instead")
    held, storages = meta_object(source, with_headers=wanted.keys is None)
    skeleton = wanted.arranged(source.path, held)
    key_of = {storage._cdata: key for key, storage in storages.items()}
    if wanted.keys is not None:
        for key in {key_of.get(tensor.untyped_storage()._cdata) for tensor in tensors_in(skeleton)} - {None}:
            source.prove_header(source.directory.entries[f"data/{key}"])
    return _Structure(_described(skeleton, lambda tensor: described_tensor(source, key_of, tensor)), skeleton, storages)


def _stored_entries(source: CheckpointSource) -> dict[str, StoredTensor]:
    return {entry.name: _stored_entry(entry, source.path) for entry in source.header.entries}


def _stored_entry(entry: safetensors_format.Entry, path: str) -> StoredTensor:
    stride = []
    step = 1
    shape = entry.torch_shape
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return StoredTensor(entry.offset_bytes, torch_dtype(entry, path), shape, tuple(reversed(stride)))


def meta_object(source: CheckpointSource, *, with_headers: bool) -> tuple[Any, dict[str, torch.UntypedStorage]]:
    """Unpickle over storages without data, after a check of their sizes; also return the storages by key.

    Without headers, the caller proves those of the storages that it reads.
    """
    storages: dict[str, torch.UntypedStorage] = {}
    for reference in source.summary.references:
        entry = source.directory.entries.get(f"data/{reference.key}")
        if entry is None or entry.size_bytes != reference.size_bytes:
            raise FormatError(f"pickle and directory disagree on storage {reference.key}", path=source.path)
        if reference.key not in storages:
            storages[reference.key] = new_storage(entry.size_bytes, torch.device("meta"))
    extents = Extents()
    headers = LocalHeaders(source, storages if with_headers else (), extents)
    try:
        loaded = unpickle_while_reading(source, storages, extents, headers, map_location=None, weights_only=True)
        return loaded, storages
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{source.path} holds tensors that cannot be described without their data ({error}); use fastpersist.load "
            "and load_state_dict"
        ) from error


_EXTRA_STATE: Final = object()


def _described(value: Any, describe: Callable[[torch.Tensor], StoredTensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, Mapping):
        return {key: _EXTRA_STATE if is_extra_state(key) else _described(one, describe) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item, describe) for item in value]
    return None


# --------------------------------------------------------------------------------------------- modules


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of the target, and those tensors of its state_dict, by name, that the file fills."""

    name: str
    module: torch.nn.Module
    filled: dict[str, torch.Tensor]


def _load_states(path: str, modules: Sequence[_Module], held: Mapping[str, Mapping[Any, Any]], *, strict: bool) -> None:
    """Let modules take their filled tensors, which are mostly their own, and all that is no tensor in the file.

    Args:
        path: The path of the file, for messages.
        modules: The modules.
        held: What the file has for the modules, by name.
        strict: Filled tensors that a module passes over are an error: its own tensors may lie elsewhere.

    Raises:
        ConfigError: A module has refused it; the message says what is partly overwritten.
    """

    def load(one: _Module, _: object) -> None:
        in_file = held.get(one.name, {})
        state: Any = OrderedDict(
            (key, value) for key, value in in_file.items() if is_extra_state(key) or not list(tensors_in(value))
        )
        state.update(as_loaded(one.module, one.filled))
        if hasattr(in_file, "_metadata"):
            state._metadata = in_file._metadata  # versions
        passed_over = one.module.load_state_dict(state, strict=False)
        lost = [key for key in getattr(passed_over, "unexpected_keys", ()) if key in one.filled]
        if lost and strict:
            raise ValueError(f"load_state_dict takes no {', '.join(lost)}")

    with TargetChange(path) as change:
        steps = [
            Step(MODULES, (), one.name or "the module", partial(load, one))
            for one in modules
            if not _is_full(one.module, one.filled)
        ]
        change.take(steps, lambda _: None)


def _is_full(module: torch.nn.Module, filled: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether load_state_dict would only copy filled tensors onto themselves, which it does slowly."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return all(id(tensor) in own for tensor in filled.values()) and has_stock_load(module)


def _with_extra_states(
    source: CheckpointSource, structure: _Structure, wanted: Wanted, engine: str, read: Read
) -> dict[str, Mapping[Any, Any]]:
    """Return what the file has for the modules of the target, with data in extra states only; nothing changes yet.

    An extra state may hold tensors. They have no place in the target, so they get storages of their own, and the object
    is built once more around these.
    """
    held = dict(_held_for_modules("", structure.skeleton, wanted.target))
    extra = [value for one in held.values() for key, value in one.items() if is_extra_state(key)]
    own = {tensor.untyped_storage()._cdata for tensor in tensors_in(extra)}
    if not own:
        return held
    storages = dict(structure.storages)
    extents = Extents()
    for key, storage in structure.storages.items():
        if storage._cdata in own:
            storages[key] = new_storage(storage.nbytes(), torch.device("cpu"))
            extents.add_storage(
                source.directory.entries[f"data/{key}"].data_offset_bytes, storages[key], with_crc=False
            )
    read(source.fd, source.path, extents, engine=engine)
    loaded = unpickle_with(source, storages, map_location=None, weights_only=True)
    return dict(_held_for_modules("", wanted.arranged(source.path, loaded), wanted.target))


def _held_for_modules(name: str, value: Any, target: object) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the names of the modules in a target, as `_walk` has them, each with what the file's object has for it."""
    if isinstance(target, torch.nn.Module):
        if isinstance(value, Mapping):
            yield name, value
    elif isinstance(target, Mapping) and isinstance(value, Mapping):
        for key, item in target.items():
            if key in value:
                yield from _held_for_modules(joined_name(name, key), value[key], item)
    elif isinstance(target, (list, tuple)) and isinstance(value, (list, tuple)):
        for index, (item, stored) in enumerate(zip(target, value, strict=False)):
            yield from _held_for_modules(f"{name}[{index}]", stored, item)


# --------------------------------------------------------------------------------------------- matching


@no_garbage_collection()
def _match(path: str, stored: Any, wanted: Wanted, *, ties: bool) -> tuple[list[Pair], list[_Module], IncompatibleKeys]:
    """Pair the target's tensors with the file's; also return its modules, and names that only one side has.

    This changes nothing.

    Args:
        path: The path of the file, for messages.
        stored: What the file holds, as the target expects it.
        wanted: What is filled, and with what.
        ties: The file has a tensor once, whatever names it has in the target, as safetensors files do.

    Raises:
        ConfigError: They do not fit; the message lists all differences.
    """
    keys = IncompatibleKeys([], [])
    pairs: list[Pair] = []
    problems: list[str] = []
    missing: list[tuple[str, torch.Tensor]] = []
    modules: list[_Module] = []
    for name, tensor, found in _walk("", wanted.target, stored, modules, keys):
        if tensor is None:
            keys.unexpected_keys.append(name)
        elif found is None:
            missing.append((name, tensor))
        elif not isinstance(found, StoredTensor):
            problems.append(f"{name} is a tensor in the target, but not in the file")
        elif problem := why_not_fitting(name, tensor, found.shape):
            problems.append(problem)
        else:
            problems.extend(why_not_fillable(name, tensor, found.dtype))
            pairs.append(Pair(name, tensor, found))
    known = {id(pair.target) for pair in pairs} if ties else set()
    keys.missing_keys.extend(name for name, tensor in missing if id(tensor) not in known)
    refused = keys if wanted.keys is None else IncompatibleKeys([], keys.unexpected_keys)
    refuse_misfit(path, problems, refused, strict=wanted.strict, targets=[entry.module for entry in modules])
    return pairs, modules, keys


def _walk(
    name: str, target: object, stored: Any, modules: list[_Module], keys: IncompatibleKeys
) -> Iterator[tuple[str, torch.Tensor | None, Any]]:
    """Yield (name, tensor of the target or None, what the file has under this name or None).

    Modules are added to `modules`, and extra states that only one side has to `keys`.
    """
    if isinstance(target, torch.nn.Module):
        module, state = target, target.state_dict(keep_vars=True)
        in_file = stored if isinstance(stored, dict) else {}
        keys.missing_keys.extend(joined_name(name, key) for key in state if is_extra_state(key) and key not in in_file)
        extra = [key for key, item in in_file.items() if item is _EXTRA_STATE]
        keys.unexpected_keys.extend(joined_name(name, key) for key in extra if key not in state)
        target = {
            key: value for key, value in state.items() if isinstance(value, torch.Tensor) and not is_extra_state(key)
        }
        for key in filter(is_extra_state, state):
            if isinstance(found := in_file.get(key), StoredTensor):  # in safetensors it is a tensor like any other
                target[key] = torch.empty(found.shape, dtype=found.dtype, device="cpu")
        stored = {key: item for key, item in in_file.items() if item is not None}
        modules.append(_Module(name, module, {key: value for key, value in target.items() if key in stored}))
    if isinstance(stored, dict):
        stored = {key: item for key, item in stored.items() if item is not _EXTRA_STATE}
    if isinstance(target, torch.Tensor):
        yield name or "the tensor", target, stored
    elif isinstance(target, Mapping):
        found = stored if isinstance(stored, dict) else {}
        for key, item in target.items():
            yield from _walk(joined_name(name, key), item, found.get(key), modules, keys)
        for key, item in found.items():
            if key not in target:
                for inner, _ in _leaves(joined_name(name, key), item):
                    yield inner, None, item
    elif isinstance(target, (list, tuple)):
        items = stored if isinstance(stored, list) else []
        for index in range(max(len(target), len(items))):
            inner_name = f"{name}[{index}]"
            if index < len(target):
                item = items[index] if index < len(items) else None
                yield from _walk(inner_name, target[index], item, modules, keys)
            else:
                for inner, _ in _leaves(inner_name, items[index]):
                    yield inner, None, items[index]


def _leaves(name: str, stored: Any) -> Iterator[tuple[str, StoredTensor]]:
    if isinstance(stored, StoredTensor):
        yield name, stored
    elif isinstance(stored, dict):
        for key, item in stored.items():
            yield from _leaves(joined_name(name, key), item)
    elif isinstance(stored, list):
        for index, item in enumerate(stored):
            yield from _leaves(f"{name}[{index}]", item)
