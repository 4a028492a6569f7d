"""Fill tensors that exist already from a file: no second copy of the state, nothing changed before all is checked.

The file's structure comes from stock torch.load run over storages on the meta device, so every name, shape, dtype and
stride is known without a byte of data. Contiguous host tensors of the same dtype are filled straight from the ring;
others (strided, converted, on a device) through torch, in pieces or, where strides differ, one tensor at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from fastpersist.errors import (
    ChecksumError,
    ConfigError,
    FormatError,
    PeerError,
    StorageError,
    UnsupportedError,
)
from fastpersist.formats import safetensors as safetensors_format
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.unpickle import (
    check_records,
    check_small_records,
    new_storage,
    require_checksums,
    torch_dtype,
    unpickle_with,
)
from fastpersist.transfer.pipeline import Extents, Read, read_extents

__all__ = ["IncompatibleKeys", "fill_target"]

_SHOWN_COUNT = 10
_EXTRA_STATE_KEY = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file: its place and how its elements lie there."""

    offset_bytes: int  # of its first element, from the file's start
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Row-major without gaps; the stride of a dimension of size 1 does not matter."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """What is filled from what."""

    name: str
    target: torch.Tensor
    stored: StoredTensor


class IncompatibleKeys(NamedTuple):
    """What `load_into` has passed over, as `Module.load_state_dict` returns it.

    Attributes:
        missing_keys: Names that are in the target, but not in the file.
        unexpected_keys: Names that are in the file, but not in the target.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def fill_target(
    source: CheckpointSource, target: object, *, strict: bool, verify: bool, engine: str, read: Read
) -> IncompatibleKeys:
    """Fill a Module, or nested containers of tensors and Modules, from a file; see `load_into`."""
    structure = _read_structure(source)
    keys = IncompatibleKeys([], [])
    pairs = _match(source.path, structure.stored, target, strict, keys)
    if verify:
        _verify_all(source, engine, read)
    extra_states = _load_extra_states(source, structure, target, engine, read)
    read(source.fd, source.path, Extents(), engine=engine)  # of several ranks, none has failed so far
    filled: list[str] = []
    try:
        fill_pairs(source, pairs, engine, filled, read)
    except (StorageError, PeerError) as error:
        raise _partly_overwritten(error, filled) from error
    for set_extra_state, state in extra_states:
        set_extra_state(state)
    return keys


# --------------------------------------------------------------------------------------------- what the file holds


@dataclass(frozen=True, slots=True)
class _Structure:
    """What a file holds, without its data.

    Attributes:
        stored: Its object with a StoredTensor in place of each tensor, lists for tuples, None for everything else.
        skeleton: Its object, with tensors on the meta device; None for safetensors.
        storages: The storages of those tensors, by key.
    """

    stored: Any
    skeleton: Any
    storages: dict[str, torch.UntypedStorage]


def _read_structure(source: CheckpointSource) -> _Structure:
    if source.kind == "safetensors":
        entries = {entry.name: _stored_entry(entry, source.path) for entry in source.header.entries}
        return _Structure(entries, None, {})
    if source.kind != "torch_zip":
        source.refuse_foreign()
        raise UnsupportedError(
            f"{source.path}: {source.explain_unknown()}; use fastpersist.load and load_state_dict instead"
        )
    if source.is_byte_swapped():
        raise UnsupportedError(f"{source.path} has the other byte order; use torch.load and load_state_dict instead")
    skeleton, storages = meta_object(source)
    key_of = {storage._cdata: key for key, storage in storages.items()}
    return _Structure(_described(skeleton, lambda tensor: described_tensor(source, key_of, tensor)), skeleton, storages)


def described_tensor(source: CheckpointSource, key_of: Mapping[int, str], tensor: torch.Tensor) -> StoredTensor:
    """Say where a tensor on the meta device lies in the file, proven to be inside its storage.

    Args:
        source: The file.
        key_of: Keys of the storages that `meta_object` returned, by their `_cdata`.
        tensor: Of the object that `meta_object` returned.

    Raises:
        FormatError: It reaches beyond its storage.
        UnsupportedError: It is not plain and dense.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) not in PLAIN_TYPES:
        raise UnsupportedError(
            f"{source.path} holds a {type(tensor).__name__} of layout {tensor.layout}; load_into fills plain dense "
            "tensors only: use fastpersist.load and load_state_dict"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(
            f"{source.path} holds a conjugate or negative view; use fastpersist.load and load_state_dict"
        )
    key = key_of.get(tensor.untyped_storage()._cdata)
    if key is None:
        raise UnsupportedError(f"{source.path} holds a tensor without data (meta)")
    entry = source.directory.entries[f"data/{key}"]
    start = int(tensor.storage_offset()) * tensor.element_size()
    found = StoredTensor(entry.data_offset_bytes + start, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
    if any(step < 0 for step in found.stride) or start + found.span_bytes > entry.size_bytes:
        raise FormatError(f"a tensor reaches beyond its storage {key}", path=source.path)
    return found


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _stored_entry(entry: safetensors_format.Entry, path: str) -> StoredTensor:
    stride = []
    step = 1
    shape = entry.torch_shape
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return StoredTensor(entry.offset_bytes, torch_dtype(entry, path), shape, tuple(reversed(stride)))


def meta_object(source: CheckpointSource, *, weights_only: bool = True) -> tuple[Any, dict[str, torch.UntypedStorage]]:
    """Unpickle over storages without data, sizes checked against the directory; also return them by key."""
    storages: dict[str, torch.UntypedStorage] = {}
    for reference in source.summary.references:
        entry = source.directory.entries.get(f"data/{reference.key}")
        if entry is None or entry.size_bytes != reference.size_bytes:
            raise FormatError(f"pickle and directory disagree on storage {reference.key}", path=source.path)
        if reference.key not in storages:
            storages[reference.key] = new_storage(entry.size_bytes, torch.device("meta"))
    try:
        return unpickle_with(source, storages, map_location=None, weights_only=weights_only), storages
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{source.path} holds tensors that cannot be described without their data ({error}); use fastpersist.load "
            "and load_state_dict"
        ) from error


def _described(value: Any, describe: Callable[[torch.Tensor], StoredTensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, Mapping):
        return {key: _described(item, describe) for key, item in value.items() if not is_extra_state(key)}
    if isinstance(value, (list, tuple)):
        return [_described(item, describe) for item in value]
    return None


# --------------------------------------------------------------------------------------------- extra state

_SetExtraState: TypeAlias = Callable[[Any], None]


def is_extra_state(key: object) -> bool:
    """Tell whether a state_dict key is that of a module's get_extra_state."""
    return isinstance(key, str) and key.rpartition(".")[2] == _EXTRA_STATE_KEY


def _load_extra_states(
    source: CheckpointSource, structure: _Structure, target: object, engine: str, read: Read
) -> list[tuple[_SetExtraState, Any]]:
    """Load what the target's modules once returned from get_extra_state, before anything of the target changes.

    An extra state may hold tensors. No tensor of the target takes them, so they get storages of their own, and the
    object is built once more around those.
    """
    wanted = list(_extra_states(structure.skeleton, target))
    own = {tensor.untyped_storage()._cdata for _, state in wanted for tensor in _tensors_in(state)}
    if not own:
        return wanted
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
    return list(_extra_states(loaded, target))


def _extra_states(value: Any, target: object) -> Iterator[tuple[_SetExtraState, Any]]:
    """Find the extra states in a file's object that modules of the target take."""
    if isinstance(target, torch.nn.Module) and isinstance(value, Mapping):
        for prefix, module in target.named_modules():
            name = f"{prefix}.{_EXTRA_STATE_KEY}" if prefix else _EXTRA_STATE_KEY
            if name in value and type(module).set_extra_state is not torch.nn.Module.set_extra_state:
                yield module.set_extra_state, value[name]
    elif isinstance(target, Mapping) and isinstance(value, Mapping):
        for key, item in target.items():
            if key in value:
                yield from _extra_states(value[key], item)
    elif isinstance(target, (list, tuple)) and isinstance(value, (list, tuple)):
        for item, stored in zip(target, value, strict=False):
            yield from _extra_states(stored, item)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item)


# --------------------------------------------------------------------------------------------- matching


def _match(path: str, stored: Any, target: object, strict: bool, keys: IncompatibleKeys) -> list[Pair]:
    """Pair the target's tensors with the file's, and note what is on one side only; nothing is touched.

    Raises:
        ConfigError: They do not fit; all differences are listed.
    """
    pairs: list[Pair] = []
    problems: list[str] = []
    for name, tensor, found in _walk("", target, stored):
        if tensor is None:
            keys.unexpected_keys.append(name)
        elif found is None:
            keys.missing_keys.append(name)
        elif not isinstance(found, StoredTensor):
            problems.append(f"{name} is a tensor in the target, but not in the file")
        elif torch.nn.parameter.is_lazy(tensor):
            problems.append(f"{name} has no shape yet (a lazy module); run the module once, then load")
        elif tuple(tensor.shape) != found.shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)} in the target, {found.shape} in the file")
        else:
            problems.extend(why_not_fillable(name, tensor, found.dtype))
            pairs.append(Pair(name, tensor, found))
    refuse_misfit(path, problems, keys, strict=strict)
    return pairs


def refuse_misfit(
    path: str, problems: Sequence[str], keys: IncompatibleKeys, *, strict: bool, where: str = "file"
) -> None:
    """Refuse a target that does not fit; without `strict`, what is on one side only does no harm.

    Raises:
        ConfigError: All that does not fit.
    """
    found = [f"{name} is in the target, but not in the {where}" for name in keys.missing_keys] if strict else []
    found += problems
    found += [f"{name} is in the {where}, but not in the target" for name in keys.unexpected_keys] if strict else []
    if found:
        raise misfit(path, found)


def misfit(path: str, problems: Sequence[str]) -> ConfigError:
    """Say in one error why a file and a target do not fit; names that differ by a prefix alone are told as one."""
    shown = _by_prefix(problems)
    more = [f"… and {len(shown) - _SHOWN_COUNT} more"] if len(shown) > _SHOWN_COUNT else []
    return ConfigError(
        f"{path} does not fit the target, which was not changed: " + "; ".join([*shown[:_SHOWN_COUNT], *more])
    )


_ONE_SIDED = re.compile(r"(?s)(.+) is in the (target|file|checkpoint), but not in the (?:target|file|checkpoint)")


def _by_prefix(problems: Sequence[str]) -> list[str]:
    """Replace what is said of names on one side by one sentence, if a prefix explains all of them."""
    matches = [_ONE_SIDED.fullmatch(problem) for problem in problems]
    wanted = {match[1] for match in matches if match is not None and match[2] == "target"}
    stored = {match[1] for match in matches if match is not None and match[2] != "target"}
    if not wanted or len(wanted) != len(stored):
        return list(problems)
    first, last = min(wanted | stored), max(wanted | stored)  # what these two have in common, all have
    common = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    owner = first[: first.rfind(".", 0, common) + 1]
    for longer, shorter, side in ((stored, wanted, "file"), (wanted, stored, "target")):
        one = min(longer)
        for name in shorter:
            prefix = one.removeprefix(owner).removesuffix(name.removeprefix(owner))
            if prefix.endswith(".") and {f"{owner}{prefix}{name.removeprefix(owner)}" for name in shorter} == longer:
                others = [problem for problem, match in zip(problems, matches, strict=True) if match is None]
                where = f" of {owner[:-1]}" if owner else ""
                return [
                    f"names{where} differ by the prefix {prefix!r}, which only those of the {side} have "
                    f"({one}, {len(longer)} in all); add or remove it, as wrappers of a module do",
                    *others,
                ]
    return list(problems)


def why_not_fillable(name: str, tensor: torch.Tensor, stored_dtype: torch.dtype) -> list[str]:
    """Say what keeps the memory of a target from being filled with values of a dtype; nothing if nothing does."""
    if tensor.device.type == "meta":
        return [f"{name} is on the meta device and has no memory yet; call to_empty(device=…) on its module first"]
    if tensor.layout != torch.strided or tensor.is_quantized:
        return [f"{name} is not a dense tensor with memory"]
    if type(tensor) not in PLAIN_TYPES:
        return [f"{name} is a {type(tensor).__name__}, whose memory cannot be filled from outside"]
    if tensor.is_conj() or tensor.is_neg():
        return [f"{name} is a conjugate or negative view"]
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return [f"{name} is an expanded tensor: several of its elements share memory"]
    if stored_dtype.is_complex and not tensor.dtype.is_complex:
        return [f"{name} is {stored_dtype} in the file and {tensor.dtype} in the target"]
    return []


def _walk(name: str, target: object, stored: Any) -> Iterator[tuple[str, torch.Tensor | None, Any]]:
    """Yield (name, target tensor or None, what the file has there or None)."""
    if isinstance(target, torch.nn.Module):
        target = _module_tensors(target)
        if isinstance(stored, dict):
            stored = {key: item for key, item in stored.items() if item is not None}
    if isinstance(target, torch.Tensor):
        yield name or "the tensor", target, stored
    elif isinstance(target, Mapping):
        found = stored if isinstance(stored, dict) else {}
        for key, item in target.items():
            yield from _walk(joined_name(name, key), item, found.get(key))
        for key, item in found.items():
            if key not in target:
                for inner, _ in _leaves(joined_name(name, key), item):
                    yield inner, None, item
    elif isinstance(target, (list, tuple)):
        items = stored if isinstance(stored, list) else []
        for index in range(max(len(target), len(items))):
            inner_name = f"{name}[{index}]"
            if index < len(target):
                yield from _walk(inner_name, target[index], items[index] if index < len(items) else None)
            else:
                for inner, _ in _leaves(inner_name, items[index]):
                    yield inner, None, items[index]


def joined_name(name: str, key: object) -> str:
    """Name what lies under a key: `model.weight`, `state[0]`."""
    if isinstance(key, str):
        return f"{name}.{key}" if name else key
    return f"{name}[{key!r}]"


def _leaves(name: str, stored: Any) -> Iterator[tuple[str, StoredTensor]]:
    if isinstance(stored, StoredTensor):
        yield name, stored
    elif isinstance(stored, dict):
        for key, item in stored.items():
            yield from _leaves(joined_name(name, key), item)
    elif isinstance(stored, list):
        for index, item in enumerate(stored):
            yield from _leaves(f"{name}[{index}]", item)


def _module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's own tensors by their state_dict names; extra state is handled apart."""
    state = module.state_dict(keep_vars=True)
    return {
        name: value for name, value in state.items() if isinstance(value, torch.Tensor) and not is_extra_state(name)
    }


# --------------------------------------------------------------------------------------------- filling


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
    check_records(source, storages, engine=engine, poll=None, read=read)


def fill_pairs(
    source: CheckpointSource, pairs: Sequence[Pair], engine: str, filled: list[str], read: Read = read_extents
) -> None:
    """Fill all targets, by `read`; `filled` gets the names that may have been touched, before they are."""
    extents = Extents()
    one_by_one = _overlapping(pairs)
    last = {memory_of(pair.target): pair for pair in pairs}  # of tied targets the last wins, as in load_state_dict
    with torch.no_grad():
        for pair in last.values():
            if not pair.target.numel() or pair in one_by_one:
                continue
            if not pair.stored.is_contiguous():
                one_by_one.append(pair)
                continue
            filled.append(pair.name)
            _add_contiguous(extents, pair)
        try:
            read(source.fd, source.path, extents, engine=engine)
            for pair in one_by_one:
                filled.append(pair.name)
                pair.target.copy_(_read_strided(source, pair.stored, engine, read))
        finally:
            # autograd shall notice that the values changed, also where only the native side wrote them
            torch.autograd.graph.increment_version([pair.target for pair in pairs])


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common that show the same elements of the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _overlapping(pairs: Sequence[Pair]) -> list[Pair]:
    """Find targets that share memory without being the same tensor: they are filled one by one, in order."""

    def span(pair: Pair) -> tuple[str, int, int]:
        target = pair.target
        last = sum((size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True))
        return str(target.device), target.data_ptr(), target.data_ptr() + (last + 1) * target.element_size()

    ordered = sorted((pair for pair in pairs if pair.target.numel()), key=span)
    found: set[int] = set()
    reach: Pair | None = None  # of those before on the same device, the one that ends last
    for pair in ordered:
        if reach is not None and span(reach)[0] == span(pair)[0] and span(pair)[1] < span(reach)[2]:
            if memory_of(reach.target) != memory_of(pair.target):
                found |= {id(reach), id(pair)}
            if span(pair)[2] <= span(reach)[2]:
                continue
        reach = pair
    return [pair for pair in pairs if id(pair) in found]


def _add_contiguous(extents: Extents, pair: Pair) -> None:
    target, stored = pair.target, pair.stored
    size_bytes = stored.span_bytes
    if target.device.type == "cpu" and target.dtype == stored.dtype and target.is_contiguous():
        extents.add_memory(stored.offset_bytes, size_bytes, target.data_ptr(), target, with_crc=False)
        return
    flat = target.detach().view(-1) if target.is_contiguous() else None
    itemsize = stored.dtype.itemsize
    if target.device.type == "cuda" and flat is not None and target.dtype == stored.dtype:
        extents.add_storage(
            stored.offset_bytes,
            target.untyped_storage(),
            with_crc=False,
            from_bytes=int(target.storage_offset()) * itemsize,
            size_bytes=size_bytes,
        )
        return
    if flat is None or stored.offset_bytes % itemsize:
        # A strided target, or elements that chunk borders could cut in two: gathered first, one tensor at a time.
        whole = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        missing_bytes = size_bytes

        def gather(offset_bytes: int, source: torch.Tensor) -> None:
            nonlocal missing_bytes
            whole[offset_bytes : offset_bytes + source.numel()] = source
            missing_bytes -= source.numel()
            if not missing_bytes:
                target.detach().copy_(whole.view(stored.dtype).view(stored.shape))

        extents.add_pushed(stored.offset_bytes, size_bytes, gather, with_crc=False)
        return

    def convert(offset_bytes: int, source: torch.Tensor) -> None:
        first = offset_bytes // itemsize
        flat[first : first + source.numel() // itemsize].copy_(source.view(stored.dtype))

    extents.add_pushed(stored.offset_bytes, size_bytes, convert, with_crc=False)


def _read_strided(source: CheckpointSource, stored: StoredTensor, engine: str, read: Read) -> torch.Tensor:
    """Read a tensor that is a view with gaps: its span, then the view."""
    span = new_storage(stored.span_bytes, torch.device("cpu"))
    extents = Extents()
    extents.add_storage(stored.offset_bytes, span, with_crc=False)
    read(source.fd, source.path, extents, engine=engine)
    return torch.empty(0, dtype=stored.dtype, device="cpu").set_(span, 0, stored.shape, stored.stride)


def _partly_overwritten(error: StorageError | PeerError, filled: list[str]) -> StorageError | PeerError:
    shown = ", ".join(filled[:_SHOWN_COUNT]) + (
        f" and {len(filled) - _SHOWN_COUNT} more" if len(filled) > _SHOWN_COUNT else ""
    )
    message = f"{error}; target partly overwritten, the contents of these tensors are unknown: {shown}"
    if isinstance(error, PeerError):
        return type(error)(message, rank=error.rank, subject=error.subject)
    return type(error)(error.errno, message, error.filename, error.offset_bytes)
