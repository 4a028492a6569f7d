"""Loads a file: fills all storages first, unpickles last.

1. Validate the zip directory, and scan the pickle: it names the storages, their sizes and devices.
2. Allocate every storage, and let the reader fill all of them; with `verify` it computes CRCs in the same pass.
3. Let stock torch.load build the object. Its `map_location` is a dictionary of ours: for each storage it returns a name
   that only our registered deserializer knows, and this deserializer returns the filled storage. torch reads through a
   file object of ours that skips the bytes of storages. So all code that runs during unpickling sees the real bytes. A
   torch.load that such code calls is not affected: it has neither our dictionary nor our file.

For a plain pickle, such as the state of most models, torch.load gets an unpickler of ours (`plain_load`), which returns
the storages itself. Such a pickle runs no code that reads tensor bytes, so steps 2 and 3 overlap.

Stock torch.load reads the file alone, and the log says why, with a callable map_location, for meta and fake loads, for
byte-swapped, legacy and TorchScript files, and if pickle and directory disagree.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import traceback
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, TypeAlias, cast

import torch
from torch import _weights_only_unpickler as wo_unpickler

from fastpersist import _native
from fastpersist.errors import (
    ChecksumError,
    ConfigError,
    FastPersistError,
    FormatError,
    InternalError,
    UnsupportedError,
)
from fastpersist.formats import safetensors as safetensors_format
from fastpersist.formats.layout import LOCAL_HEADER_BYTES
from fastpersist.formats.pickle_scan import StorageReference
from fastpersist.loading.checkpoint_file import CheckpointSource, SkippingFile
from fastpersist.loading.selection import chosen_part
from fastpersist.transfer.background_read import BackgroundRead
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.reader import Extents, Read, read_extents
from fastpersist.transfer.torch_boundary import (
    has_address,
    loads_ask_once,
    loads_plainly,
    no_tag,
    not_allowed_globals,
    plain_load,
    stock_load,
)

__all__ = ["MapLocation", "load_checkpoint", "read_safetensors", "unpickle_while_reading", "unpickle_with"]

_log = logging.getLogger("fastpersist")

MapLocation: TypeAlias = Callable[[Any, str], Any] | torch.device | str | dict[str, str] | None

# --------------------------------------------------------------------------------------------- stock torch.load

_LOAD_PRIORITY = -7_310_000
"""The priority of our deserializer in torch's registry: before all others, because it answers only to our names."""

_TOKEN_PREFIX = "fastpersist-storage:"
_REFUSED_GLOBALS = "it names globals that weights_only=True does not allow"
_running: dict[str, _StorageSupply] = {}
_load_numbers = itertools.count()


class _StorageSupply(dict[str, str]):
    """The map_location of one of our loads: it hands out the filled storages in the order in which torch asks.

    It is a dict, because torch asks a dict once for each storage. torch calls its `get` with a location (text) for a
    storage, and with a torch.device for a wrapper subclass without storage of its own.
    """

    def __init__(
        self,
        asks: list[tuple[StorageReference, torch.UntypedStorage, int]],
        wanted: MapLocation,
        file: SkippingFile,
    ) -> None:
        super().__init__()
        self._asks = iter(asks)
        self._wanted = wanted
        self._file = file
        self._token = f"{_TOKEN_PREFIX}{next(_load_numbers)}"
        self._next: torch.UntypedStorage | None = None

    def get(self, location: Any, default: Any = None) -> Any:
        if not isinstance(location, str):
            return mapped_location(self._wanted, location)
        reference, storage, offset_bytes = next(self._asks, (None, None, -1))
        if reference is None or reference.location != location:
            raise InternalError("torch.load asked for a storage that the scan of the pickle did not find")
        if storage is not None and storage.nbytes() and self._file.skipped_offset_bytes != offset_bytes:
            raise FormatError(
                f"torch does not find storage {reference.key} where the directory has it",
                path=self._file.path,
                offset_bytes=offset_bytes,
            )
        self._next = storage
        return self._token

    def take(self) -> torch.UntypedStorage:
        storage, self._next = self._next, None
        if storage is None:
            raise InternalError("torch.load asked twice for one storage")
        return storage

    def __enter__(self) -> _StorageSupply:
        _running[self._token] = self
        return self

    def __exit__(self, *exception: object) -> None:
        del _running[self._token]


def _hand_out(storage: object, location: str) -> torch.UntypedStorage | None:
    supply = _running.get(location) if location.startswith(_TOKEN_PREFIX) else None
    return None if supply is None else supply.take()


torch.serialization.register_package(_LOAD_PRIORITY, no_tag, _hand_out)


def mapped_location(wanted: MapLocation, location: Any) -> Any:
    """Apply a map_location, which is not a callable, to a location, as torch does."""
    if wanted is None:
        return location
    if isinstance(wanted, dict):
        return wanted.get(location, location)
    return str(wanted) if isinstance(wanted, torch.device) else wanted


def unpickle_with(
    source: CheckpointSource,
    storages: Mapping[str, torch.UntypedStorage],
    *,
    map_location: MapLocation,
    weights_only: bool,
    headers_follow: bool = False,
) -> Any:
    """Build the object of a torch zip around existing storages.

    Args:
        source: The file; of it only the small records are read.
        storages: The storages of the object's tensors, by key.
        map_location: The location of wrapper subclasses that have no storage of their own; not a callable.
        weights_only: The option of torch.load.
        headers_follow: The option of `SkippingFile`.

    Raises:
        FormatError: A record is not where the directory has it, or a tensor reaches beyond its storage.
        StorageError: An error of the disk.
        Exception: What torch.load raises.
    """
    entries = [source.directory.entries[f"data/{key}"] for key in storages]
    summary = source.summary
    if summary.has_negative_int and any(storage.device.type == "meta" for storage in storages.values()):
        source.prove_tensors()  # torch does not check negative strides on the meta device
    elif "torch._utils._rebuild_qtensor" in summary.globals:
        source.prove_tensors()  # nor, before 2.13, where quantized tensors end
    has_plain_pickle = summary.needs_no_bytes and summary.is_as_torch_writes and loads_plainly(summary.globals)
    is_plain = weights_only and has_plain_pickle
    asks = [] if is_plain else _asks(source, storages)
    file = SkippingFile(source, () if is_plain else entries, headers_follow=headers_follow)
    opened = cast(IO[bytes], file)  # a raw reader has all that torch.load calls
    source.forget_pickle()  # megabytes for ten thousand tensors; torch reads its own
    sizes_bytes = {key: storage.nbytes() for key, storage in storages.items() if storage.resizable()}
    if is_plain and not headers_follow:
        for entry in entries:
            source.prove_header(entry)
    with _StorageSupply(asks, map_location, file) as supply:
        try:
            if is_plain:
                loaded = plain_load(opened, storages, pickle_sha256=summary.sha256)
            else:
                loaded = stock_load(opened, map_location=supply, weights_only=weights_only, mmap=False)
        except Exception as error:
            if file.failure is not None:
                raise file.failure from error
            if isinstance(error, RuntimeError):  # perhaps a tensor is larger than its storage, which cannot grow
                source.prove_tensors(error)
            raise
    if any(storages[key].nbytes() > size_bytes for key, size_bytes in sizes_bytes.items()):
        source.prove_tensors()
        raise FormatError("a tensor reaches beyond its storage", path=source.path)
    return loaded


def _asks(
    source: CheckpointSource, storages: Mapping[str, torch.UntypedStorage]
) -> list[tuple[StorageReference, torch.UntypedStorage, int]]:
    """Return the storages in the order in which torch.load asks for them, and where their bytes begin in the file."""
    asks: list[tuple[StorageReference, torch.UntypedStorage, int]] = []
    seen: set[str] = set()
    for reference in source.summary.references:
        storage = storages[reference.key]
        if reference.key not in seen:
            asks.append((reference, storage, source.directory.entries[f"data/{reference.key}"].data_offset_bytes))
            if has_address(storage) or loads_ask_once():
                seen.add(reference.key)
    return asks


def unpickle_while_reading(
    source: CheckpointSource,
    storages: Mapping[str, torch.UntypedStorage],
    extents: Extents,
    headers: LocalHeaders,
    *,
    map_location: MapLocation,
    weights_only: bool,
    engine: str = "auto",
) -> Any:
    """Build the object of a torch zip around existing storages, while bytes of the file are read.

    A failure of the read comes before one of unpickling, as if the read had gone first.

    Args:
        source: The file.
        storages: The storages of the object's tensors, by key. The code that unpickling runs must not look at bytes
            that are being read: see `may_unpickle_while_reading`. On the meta device there are none.
        extents: What is read, to host memory: parts of storages, and `headers`.
        headers: The local headers of all storages.
        map_location: The location of wrapper subclasses, as in `unpickle_with`.
        weights_only: The option of torch.load.
        engine: Engine name or "auto".

    Raises:
        What `read_extents` and `unpickle_with` raise.
    """
    with BackgroundRead(source.fd, source.path, extents, engine=engine) as read:
        try:
            loaded = unpickle_with(
                source, storages, map_location=map_location, weights_only=weights_only, headers_follow=True
            )
        except Exception:
            read.wait()
            headers.keep()
            raise
        read.wait()
    headers.keep()
    return loaded


def may_unpickle_while_reading(source: CheckpointSource, storages: Iterable[torch.UntypedStorage], read: Read) -> bool:
    """Tell whether unpickling surely looks at no byte of these storages, so that they may be read meanwhile.

    A torch mode of the caller may look at each tensor that is made. Several ranks read on the callers' threads. A
    storage that can grow, for a tensor that is larger than it, would free the memory that is being read into.
    """
    return (
        read is read_extents
        and source.summary.needs_no_bytes
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
        and all(storage.device.type == "cpu" and not storage.resizable() for storage in storages)
    )


# --------------------------------------------------------------------------------------------- which way


@dataclass(frozen=True, slots=True)
class StorageToFill:
    """A storage of the file, its recorded CRC, and the device it goes to."""

    entry_offset_bytes: int
    size_bytes: int
    crc: int
    device: torch.device


def why_stock(source: CheckpointSource, map_location: MapLocation, weights_only: bool) -> str | None:
    """Say why only stock torch.load can load a torch zip; None if we can."""
    if callable(map_location):
        return "map_location is a callable"
    if torch._guards.detect_fake_mode(None) is not None:
        return "a FakeTensorMode is active"
    if torch.serialization._serialization_tls.skip_data:
        return "skip_data() is active"
    if "constants.pkl" in source.directory.entries:
        return "it is a TorchScript archive"
    if source.is_byte_swapped():
        return "it was written on a machine of the other byte order"
    if "byteorder" not in source.directory.entries and torch.serialization.get_default_load_endianness() is not None:
        return "it does not tell its byte order, and set_default_load_endianness does"
    if any(priority < 10 and untag is not _hand_out for priority, _, untag in torch.serialization._package_registry):
        return "a registered package may restore storages before torch does"
    if "torch._utils._rebuild_device_tensor_from_numpy" in source.summary.globals:
        return "it holds tensors of a device whose bytes are inside the pickle"
    if weights_only and not_allowed_globals(source.summary.globals):  # torch raises its own error, before any read
        return _REFUSED_GLOBALS
    return None


def _device_for(location: str) -> torch.device | None:
    """Return the device that torch would restore to; None if only stock torch.load can tell, or must refuse."""
    if location == "cpu":
        return torch.device("cpu")
    try:
        device = torch.device(location)
    except RuntimeError:
        return None
    if device.type == "cpu" or not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.device(device.type, index) if index < torch.accelerator.device_count() else None


def storages_to_fill(
    source: CheckpointSource, map_location: MapLocation, *, passed_over: Container[str] = ()
) -> dict[str, StorageToFill] | str:
    """Return the storages of the file, and the devices they go to; or say why only stock torch.load can load them.

    Storages whose keys are in `passed_over` are left out: the caller has a place for them.
    """
    wanted: dict[str, StorageToFill] = {}
    devices: dict[str, torch.device | None] = {}
    entries = source.directory.entries
    for reference in source.summary.references:
        entry = entries.get(f"data/{reference.key}")
        if entry is None or entry.size_bytes < reference.size_bytes:
            # Do not leave this to torch: older versions trust the pickle and read beyond the record.
            raise FormatError(f"storage {reference.key} is missing or too short", path=source.path)
        if entry.size_bytes != reference.size_bytes:
            return f"pickle and directory disagree on storage {reference.key}"
        if reference.key in passed_over:
            continue
        if reference.location not in devices:
            location = mapped_location(map_location, reference.location)
            devices[reference.location] = _device_for(location.decode() if isinstance(location, bytes) else location)
        device = devices[reference.location]
        if device is None:
            return f"only torch can tell to which device storage {reference.key} of {reference.location!r} goes"
        known = wanted.setdefault(
            reference.key, StorageToFill(entry.data_offset_bytes, entry.size_bytes, entry.crc, device)
        )
        if known.device != device:
            return f"storage {reference.key} has two locations"
    return wanted


# --------------------------------------------------------------------------------------------- loading


@no_garbage_collection()
def load_checkpoint(
    source: CheckpointSource,
    *,
    map_location: MapLocation,
    weights_only: bool,
    verify: bool,
    engine: str,
    read: Read = read_extents,
    mapped: bool = False,
) -> Any:
    """Load what a checkpoint file holds, by `read`, or as views of the file; see `fastpersist.load`."""
    if mapped:
        return _load_mapped(source, map_location, weights_only)
    if source.kind == "safetensors":
        return read_safetensors(source, map_location=map_location, verify=verify, engine=engine, read=read)
    if source.kind != "torch_zip":
        source.refuse_foreign()
    refuse_disguised(source, weights_only)
    if source.kind != "torch_zip":
        if verify:
            raise UnsupportedError(f"{source.path}: {source.explain_unknown()}, so there are no checksums to verify")
        return _load_stock(source, source.explain_unknown(), map_location, weights_only)
    try:
        wanted = why_stock(source, map_location, weights_only) or storages_to_fill(source, map_location)
    except UnsupportedError as error:
        wanted = str(error)
    if isinstance(wanted, str):
        if verify:
            require_checksums(source)
            check_records(source, list(source.directory.entries), engine=engine, read=read)
        return _load_stock(source, wanted, map_location, weights_only)

    storages = {key: new_storage(item.size_bytes, item.device) for key, item in wanted.items()}
    if not verify and may_unpickle_while_reading(source, storages.values(), read):
        extents, headers, _ = _extents_of(source, wanted, storages, with_crc=False)
        del wanted
        return unpickle_while_reading(
            source,
            storages,
            extents,
            headers,
            map_location=map_location,
            weights_only=weights_only,
            engine=engine,
        )
    fill_storages(source, wanted, storages, verify=verify, engine=engine, read=read)
    del wanted  # megabytes for ten thousand storages; unpickling needs memory too
    return unpickle_with(source, storages, map_location=map_location, weights_only=weights_only)


def refuse_disguised(source: CheckpointSource, weights_only: bool) -> None:
    """Refuse to run the code of a pickle with the name of a safetensors file: that name promises that there is none.

    Raises:
        FormatError: The file is such a pickle.
    """
    if weights_only or not source.path.endswith(".safetensors"):
        return
    if source.kind == "torch_zip":
        with contextlib.suppress(UnsupportedError):
            _ = source.directory  # its error tells what other archives are
    raise FormatError(
        f"it is no safetensors file, as its name says, but {source.looks_like()}, and loading that with "
        "weights_only=False would run code in it; rename it if you trust it",
        path=source.path,
    )


_OWN_PAGES_BYTES = 256 << 10  # as FileReader::kStraightBytes


def new_storage(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Allocate a storage whose bytes are about to be filled.

    In host memory the storage cannot grow, like those of torch.load: so torch refuses a tensor that a file describes as
    larger than its storage. An ordinary storage would grow, by bytes that were never written. Device memory must come
    from torch's allocator, and can grow: `unpickle_with` checks this afterwards.

    A large storage in host memory has pages of its own, so a direct read can go straight to it. Such mappings are
    adjacent, and huge pages span them. malloc writes a header before each block, and the small page with the header
    prevents a huge page. These headers left a fifth to a third of a GPT-2 on small pages.
    """
    if device.type != "cpu":
        return torch.UntypedStorage(size_bytes, device=device)
    if size_bytes >= _OWN_PAGES_BYTES:
        with contextlib.suppress(OSError):  # torch says in its own words that there is no memory
            pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    lent = torch._C._to_dlpack(torch.empty(size_bytes, dtype=torch.uint8, device=device))
    storage: torch.UntypedStorage = torch._C._from_dlpack(lent).untyped_storage()
    return storage


def _load_stock(source: CheckpointSource, why: str, map_location: MapLocation, weights_only: bool) -> Any:
    _log.info("stock torch.load reads %s: %s", source.path, why)
    with source.open_whole() as file, torch_errors(source, why):
        return stock_load(file, map_location=map_location, weights_only=weights_only, mmap=False)


@contextlib.contextmanager
def torch_errors(source: CheckpointSource, why: str = "") -> Iterator[None]:
    """Raise FormatError for damage of an archive that torch finds: its zip reader looks at fields that we do not use.

    An error of a class in the file, or of a function of the caller, stays what it is.

    Args:
        source: The file.
        why: Why torch reads the file.
    """
    try:
        yield
    except FastPersistError:
        raise
    except (RuntimeError, ValueError) as error:
        # Others come from devices and memory. Of names that are no UTF-8, torch says nothing with Python 3.10.
        words = ("PytorchStreamReader", "inline_container", "hasRecord")
        is_reader = not str(error) or any(word in str(error) for word in words)
        says_damage = is_reader or isinstance(error, ValueError)
        if source.kind != "torch_zip" or not says_damage or not _comes_from_torch(error):
            raise
        said = f"torch cannot read the archive: {str(error) or 'it does not say why'}"
        raise FormatError(f"{said} ({why})" if why else said, path=source.path) from error


_READING_CODE = (
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    torch.serialization.__file__,
    wo_unpickler.__file__,
    contextlib.__file__,
)


def _comes_from_torch(error: BaseException) -> bool:
    """Tell whether only code of this package and torch's loading was on the stack when an error was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return all(frame.f_code.co_filename.startswith(_READING_CODE) for frame, _ in frames)


def _load_mapped(source: CheckpointSource, map_location: MapLocation, weights_only: bool) -> Any:
    """Load a file as views of it: nothing is read before it is used.

    The mapping is private, whatever torch.serialization.set_default_mmap_options says: what is changed in memory never
    reaches the file.

    Raises:
        ConfigError: This file cannot be loaded so, or not to this device.
    """
    if source.kind == "safetensors":
        device = "cpu" if map_location is None else map_location
        if not isinstance(device, str | torch.device) or torch.device(device).type != "cpu":
            raise _no_views(source, "map_location is not the CPU")
        whole = _whole_file(source)
        return {
            entry.name: _tensor_over(whole[entry.offset_bytes : entry.offset_bytes + entry.size_bytes], entry, source)
            for entry in source.header.entries
        }
    if source.kind != "torch_zip":
        source.refuse_foreign()
        raise _no_views(source, source.explain_unknown())
    refuse_disguised(source, weights_only)
    try:
        wanted = why_stock(source, map_location, weights_only) or storages_to_fill(source, map_location)
    except UnsupportedError as error:
        wanted = str(error)
    if isinstance(wanted, str):
        if wanted == _REFUSED_GLOBALS:
            _load_stock(source, wanted, map_location, weights_only)  # raises torch's own error
        raise _no_views(source, wanted)
    if any(item.device.type != "cpu" for item in wanted.values()):
        raise _no_views(source, "map_location, or the file, says that tensors belong to another device than the CPU")
    whole = _whole_file(source)
    storages = {
        key: whole[item.entry_offset_bytes : item.entry_offset_bytes + item.size_bytes] for key, item in wanted.items()
    }
    return unpickle_with(source, storages, map_location=map_location, weights_only=weights_only)


def _whole_file(source: CheckpointSource) -> torch.UntypedStorage:
    return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(source.whole_path, False, source.size_bytes))


def _no_views(source: CheckpointSource, why: str) -> ConfigError:
    return ConfigError(f"{source.path} cannot be loaded with mmap=True: {why}; load it without")


def fill_storages(
    source: CheckpointSource,
    wanted: dict[str, StorageToFill],
    storages: dict[str, torch.UntypedStorage],
    *,
    verify: bool,
    engine: str,
    read: Read = read_extents,
) -> None:
    """Fill new storages, by key; with `verify`, raise ChecksumError if a CRC differs."""
    if verify:
        require_checksums(source)
        check_small_records(source)
    extents, headers, indexes = _extents_of(source, wanted, storages, with_crc=verify)
    crcs = read(source.fd, source.path, extents, engine=engine).crcs
    headers.keep()
    if verify:
        damaged = [key for key, item in wanted.items() if crcs[indexes[key]] != item.crc]
        if damaged:
            first = damaged[0]
            raise checksum_error(source, first, wanted[first].crc, crcs[indexes[first]], len(damaged))


def _extents_of(
    source: CheckpointSource,
    wanted: Mapping[str, StorageToFill],
    storages: Mapping[str, torch.UntypedStorage],
    *,
    with_crc: bool,
) -> tuple[Extents, LocalHeaders, dict[str, int]]:
    """Return what to read for new storages: they, their local headers, and the indexes of the storages by key."""
    extents = Extents()
    indexes = {}
    for key, item in wanted.items():
        indexes[key] = extents.add_storage(item.entry_offset_bytes, storages[key], with_crc=with_crc, fresh=True)
    # GPUDirect reads into one kind of memory.
    are_in_host_memory = all(item.device.type == "cpu" for item in wanted.values())
    return extents, LocalHeaders(source, wanted if are_in_host_memory else (), extents), indexes


class LocalHeaders:
    """The local headers of storages that are not known yet, read in the same pass as these.

    torch reads them when it unpickles. Each lies right before its storage. If they were read only then, the kernel
    would read ahead, and many small storages would be read from the disk twice.
    """

    def __init__(self, source: CheckpointSource, keys: Iterable[str], extents: Extents) -> None:
        self._source = source
        entries = (source.directory.entries[f"data/{key}"] for key in keys)
        self._entries = [entry for entry in entries if entry.header_offset_bytes not in source.local_headers]
        self._headers = bytearray(max(1, len(self._entries)) * LOCAL_HEADER_BYTES)
        memory = torch.frombuffer(self._headers, dtype=torch.uint8)
        for index, entry in enumerate(self._entries):
            address = memory.data_ptr() + index * LOCAL_HEADER_BYTES
            extents.add_memory(entry.header_offset_bytes, LOCAL_HEADER_BYTES, address, memory, with_crc=False)

    def keep(self) -> None:
        """Check the headers that were read, and store them in the source.

        Raises:
            FormatError: A header leads out of the file, or is none.
        """
        for index, entry in enumerate(self._entries):
            start = index * LOCAL_HEADER_BYTES
            header = bytes(self._headers[start : start + LOCAL_HEADER_BYTES])
            self._source.local_headers[entry.header_offset_bytes] = header
            self._source.prove_header(entry)


def read_safetensors(
    source: CheckpointSource,
    *,
    map_location: MapLocation,
    verify: bool,
    engine: str,
    read: Read,
    keys: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Load a safetensors file: a dict of contiguous tensors, in the order of the data.

    With `keys`, only of those that they name or match; but `verify` reads all.
    """
    if callable(map_location) or isinstance(map_location, dict):
        raise UnsupportedError(
            f"{source.path}: a safetensors file records no devices; map_location must be a device, not "
            f"{type(map_location).__name__}"
        )
    device = torch.device("cpu" if map_location is None else map_location)
    header = source.header
    chosen = chosen_part(source.path, {entry.name: entry for entry in header.entries}, keys)
    if verify:
        require_checksums(source)
    extents = Extents()
    tensors = {}
    for entry in header.entries:
        if entry.name not in chosen:
            if verify:
                extents.add_checked(entry.offset_bytes, entry.size_bytes)
            continue
        if device.type == "cpu" and entry.size_bytes >= _OWN_PAGES_BYTES:
            tensor = _tensor_over(new_storage(entry.size_bytes, device), entry, source)
        else:  # three times as fast, which counts with ten thousand tensors
            tensor = torch.empty(entry.torch_shape, dtype=torch_dtype(entry, source.path), device=device)
        tensors[entry.name] = tensor
        if device.type != "meta":
            extents.add_storage(entry.offset_bytes, tensor.untyped_storage(), with_crc=verify, fresh=True)
    crcs = read(source.fd, source.path, extents, engine=engine).crcs
    if verify:
        for entry, crc in zip(header.entries, crcs, strict=True):
            if crc != entry.crc:
                raise _damaged(source, [entry.name], entry.offset_bytes, entry.crc or 0, crc, 1)
    return tensors


def _tensor_over(
    storage: torch.UntypedStorage, entry: safetensors_format.Entry, source: CheckpointSource
) -> torch.Tensor:
    """Return the tensor of a safetensors entry, whose bytes a storage has."""
    like = torch.empty(entry.torch_shape, dtype=torch_dtype(entry, source.path), device="meta")
    return torch.empty(0, dtype=like.dtype, device=storage.device).set_(storage, 0, like.shape, like.stride())


def torch_dtype(entry: safetensors_format.Entry, path: str) -> torch.dtype:
    """Return the torch dtype of a safetensors entry.

    Raises:
        UnsupportedError: This torch has no such dtype.
    """
    dtype = getattr(torch, entry.torch_dtype or "", None)
    if not isinstance(dtype, torch.dtype):
        of_shape = f"{entry.dtype} and shape {list(entry.shape)}"
        raise UnsupportedError(f"{path}: tensor {entry.name!r} has dtype {of_shape}, for which this torch has no dtype")
    return dtype


# --------------------------------------------------------------------------------------------- checksums


def require_checksums(source: CheckpointSource) -> None:
    """Refuse to verify a file that was saved without checksums: silence would look like success.

    Raises:
        UnsupportedError: A CRC is missing.
    """
    if source.kind == "safetensors":
        has_checksums = all(entry.crc is not None for entry in source.header.entries)
    else:
        has_checksums = source.directory.has_checksums
    if not has_checksums:
        raise UnsupportedError(f"{source.path} was saved without checksums: there is nothing to verify it against")


def check_small_records(source: CheckpointSource) -> None:
    """Check the CRC of every record of a torch zip that is no storage.

    Raises:
        ChecksumError: A CRC differs.
    """
    for entry in source.directory.entries.values():
        if not entry.name.startswith("data/"):
            crc = _native.crc32(source.read_at(entry.data_offset_bytes, entry.size_bytes))
            if crc != entry.crc:
                raise ChecksumError(
                    f"record {entry.name} is damaged: its CRC is {crc:08x}, not {entry.crc:08x}",
                    path=source.path,
                    offset_bytes=entry.data_offset_bytes,
                )


def check_records(source: CheckpointSource, names: list[str], *, engine: str, read: Read) -> None:
    """Check the CRCs of records of a torch zip without keeping their bytes.

    Raises:
        ChecksumError: A CRC differs.
    """
    entries = [source.directory.entries[name] for name in names]
    extents = Extents()
    for entry in entries:
        extents.add_checked(entry.data_offset_bytes, entry.size_bytes)
    crcs = read(source.fd, source.path, extents, engine=engine).crcs
    for entry, crc in zip(entries, crcs, strict=True):
        if crc != entry.crc:
            raise checksum_error(source, entry.name.removeprefix("data/"), entry.crc, crc, 1)


def checksum_error(source: CheckpointSource, key: str, expected: int, found: int, count: int) -> ChecksumError:
    """Return the error for a damaged storage: which tensors it holds, and where it lies."""
    entry = source.directory.entries.get(f"data/{key}") or source.directory.entries[key]
    try:
        names = source.tensor_names([key])[key]
    except (FormatError, UnsupportedError):
        names = []
    return _damaged(source, names or [entry.name], entry.data_offset_bytes, expected, found, count)


def _damaged(
    source: CheckpointSource, names: list[str], offset_bytes: int, expected: int, found: int, count: int
) -> ChecksumError:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    others = f"; {count - 1} more damaged storages" if count > 1 else ""
    return ChecksumError(
        f"the bytes of {shown} are damaged: their CRC is {found:08x}, not {expected:08x}{others}",
        path=os.fspath(source.path),
        offset_bytes=offset_bytes,
    )
