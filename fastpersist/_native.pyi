"""Type the native module (csrc/binding/module.cc). Not public.

Addresses are plain integers; the caller keeps their memory alive and unchanged until the call has returned
(FileWriter.append needs it no longer either). Paths are bytes, as of os.fsencode. Every call that moves bytes releases
the GIL and takes it only to run a hook. Errors are of the classes of fastpersist.errors; exceptions of hooks are raised
unchanged.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from typing_extensions import Buffer

from fastpersist.formats.layout import Record

NO_CRC: int
HAS_FAULT_ENGINE: bool

class TransferOptions:
    def __init__(
        self,
        *,
        fd: int,
        path: bytes,
        engines: Sequence[str],
        ring_bytes: int,
        chunk_bytes: int,
        queue_depth: int,
        thread_count: int = 0,
        ring_device: int | None = None,
    ) -> None: ...

class Arena:
    """Blocks of host memory for captured bytes. Python makes and grows an arena; snapshots fill it."""

    def __init__(self, limit_bytes: int) -> None: ...
    def grow(self, limit_bytes: int) -> None: ...
    def prepare(self, size_bytes: int) -> bool: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...

class SourceKind:
    STABLE: SourceKind
    VOLATILE: SourceKind
    CONSTANT: SourceKind

    def __init__(self, value: int) -> None: ...
    @property
    def value(self) -> int: ...

class Snapshot:
    """The bytes of one file from save() to the writer; csrc/transfer/snapshot.h has the contract.

    The caller keeps the memory of a source allocated until the writer has taken it, or close().
    """

    def __init__(self, arena: Arena, thread_count: int = 1) -> None: ...
    def add(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        kinds: Sequence[SourceKind] | bytearray,
        devices: Sequence[int | None] | None,
    ) -> None: ...
    def narrow(self, source: int, from_bytes: int, until_bytes: int) -> None: ...
    def capture(self, kind: SourceKind, wait: bool) -> None: ...
    def pace(self, delay_s: float, seconds: float) -> None: ...
    def hold_caller(self, device: int, stream: int) -> bool: ...
    def settled(self) -> bool: ...
    def hurry(self) -> None: ...
    def close(self) -> None: ...
    def counts(self) -> dict[str, int]: ...

class PieceList:
    """The pieces to write next, in order."""

    def __init__(self) -> None: ...
    def add_bytes(self, data: bytes) -> None: ...
    def add_memory(self, address: int, size_bytes: int, crc_slot: int = ...) -> None: ...
    def add_device(self, device: int, address: int, size_bytes: int, crc_slot: int = ...) -> None: ...
    def add_captured(self, snapshot: Snapshot, source: int, size_bytes: int, crc_slot: int = ...) -> None: ...
    def add_pulled(self, id: int, size_bytes: int, crc_slot: int = ...) -> None: ...
    def add_crc(self, crc_slot: int) -> None: ...
    def add_records(
        self,
        records: list[Record],
        first_source: int,
        with_crcs: bool,
        snapshot: Snapshot | None,
        addresses: Sequence[int],
    ) -> None: ...
    @property
    def size_bytes(self) -> int: ...

class FileWriter:
    """pull(id, offset_bytes, address, size_bytes) fills memory; poll(done_bytes) is called about every 50 ms."""

    def __init__(
        self,
        options: TransferOptions,
        *,
        pull: Callable[[int, int, int, int], None] | None = None,
        poll: Callable[[int], None] | None = None,
    ) -> None: ...
    def append(self, pieces: PieceList) -> None: ...
    def seek(self, offset_bytes: int) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    def crcs(self, count: int) -> list[int]: ...
    def runs(self) -> list[tuple[int, int, int]] | None: ...
    @property
    def position(self) -> int: ...
    @property
    def engine(self) -> str: ...
    @property
    def demotions(self) -> list[str]: ...

class ExtentList:
    """The extents to read, sorted by offset."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def add_memory(
        self, offset_bytes: int, size_bytes: int, address: int, with_crc: bool = False, fresh: bool = False
    ) -> None: ...
    def add_device(
        self, offset_bytes: int, size_bytes: int, device: int, address: int, with_crc: bool = False
    ) -> None: ...
    def add_pushed(self, offset_bytes: int, size_bytes: int, id: int, with_crc: bool = False) -> None: ...
    def add_checked(self, offset_bytes: int, size_bytes: int) -> None: ...

class ReadReport:
    @property
    def crcs(self) -> list[int]: ...
    @property
    def engine(self) -> str: ...
    @property
    def demotions(self) -> list[str]: ...

def read_extents(
    options: TransferOptions,
    extents: ExtentList,
    *,
    push: Callable[[int, int, int, int], None] | None = None,
    poll: Callable[[int], None] | None = None,
) -> ReadReport: ...
def run_requests(
    fd: int,
    path: bytes,
    engines: Sequence[str],
    requests: Sequence[tuple[bool, int, int, int]],
    queue_depth: int = 8,
    thread_count: int = 0,
) -> None:
    """Run and complete requests (write, offset_bytes, address, size_bytes), in any order."""

def cuda_why_not() -> str:
    """Return why this process cannot use the CUDA driver; "" if it can. Calls cuInit."""

def cuda_driver_why_not() -> str:
    """Return why there is no usable CUDA driver; "" if there is one. Does not call cuInit."""

def cufile_configure(library_path: bytes, host_device: int) -> None:
    """Set, before the first use, the path of libcufile (b"": by name) and the device for requests of host memory."""

def cufile_why_not() -> str:
    """Return why this process cannot use GPUDirect Storage; "" if it can. Calls cuInit and opens the library."""

def cufile_traffic() -> tuple[int, int, int]:
    """Return the number of transfers of device memory so far: by P2PDMA, by nvidia-fs, through host memory.

    Raises UnsupportedError if the library does not count them.
    """

class StagingBuffers:
    """Device memory registered with cuFile, for run_requests; freed when the object is dropped."""

    def __init__(self, device: int, buffer_count: int, buffer_bytes: int) -> None: ...
    @property
    def addresses(self) -> list[int]: ...

def follow_caller(device: int, stream: int, to_host: bool) -> None: ...
def set_device_grace_s(grace_s: float) -> None: ...
def why_not_pinned() -> str: ...
def pinned_bytes() -> int: ...
def pinned_cache_bytes() -> int:
    """Return how many pinned bytes wait for the next arena; see csrc/core/pinned_cache.h."""

def empty_pinned_cache() -> int:
    """Give the pinned memory without an arena back to the kernel; return its bytes."""

def allocate(fd: int, size_bytes: int, path: bytes) -> None: ...
def filesystem_type(fd: int) -> int: ...
def cached_bytes(fd: int) -> int: ...
def direct_io_limits(fd: int) -> tuple[bool, int, int, str]:
    """Return (supported, memory_alignment_bytes, offset_alignment_bytes, why_not)."""

def block_bytes(fd: int) -> int:
    """Return the unit of direct I/O on a file: 4096, or more if the file asks for it."""

def is_mount_point(path: bytes) -> bool: ...
def exchange_names(first: bytes, second: bytes) -> None: ...
def rename_to_free_name(source: bytes, target: bytes) -> None:
    """Rename, unless the new name exists. Raises UnsupportedError, as exchange_names does, without such a rename."""

def close_in_forked_child(fd: int) -> None: ...
def forget_descriptor(fd: int) -> None: ...

class Prefault:
    """A thread that has the kernel clear memory before it is filled, as long as this lives (csrc/core/memory.h)."""

    def __init__(self, memory: Sequence[tuple[int, int]], owner: object) -> None:
        """Start on ranges of (address, size_bytes). The owner keeps them mapped, and lives as long as this."""

class TorchFunctions:
    """What a tensor is, asked of torch's C++ functions."""

    @staticmethod
    def find(library: str, tensor: type, storage: type, samples: list[torch.Tensor]) -> TorchFunctions | None: ...

class TorchTypes:
    def __init__(
        self,
        *,
        tensor: type,
        parameter: type,
        storage: type,
        rebuild_parameter: Callable[..., object],
        ordered_dict: type,
        rebuild_by_dtype: dict[torch.dtype, tuple[Callable[..., object], type, int, bool]],
        is_ordinary: Callable[[object], bool],
        global_opcode: Callable[[object], bytes | None],
        location_of: Callable[[torch.UntypedStorage], str],
        is_host_tagged_cpu: bool,
        functions: TorchFunctions | None,
    ) -> None: ...

class TensorQuestions:
    def __init__(
        self, tensor: type, parameter: type, storage: type, functions: TorchFunctions | None = None
    ) -> None: ...

def add_tensors(
    values: dict[Any, Any],
    found: list[torch.Tensor],
    tensor: type,
    add: Callable[[object, list[torch.Tensor]], None],
) -> None: ...

class OwnedSources:
    """The sources of a file that an owner's tensors hold."""

class Counters:
    """Counts of the changes of tensors."""

    def changed(self) -> list[int]: ...

class Places:
    """Where storages lie."""

    def moved(self) -> int | None: ...

class HeldSources:
    """Which tensors hold the sources of a file (csrc/binding/held_sources.cc)."""

    def __init__(
        self,
        questions: TensorQuestions,
        keys: Sequence[int],
        holders: list[torch.Tensor],
        held: Sequence[int],
        versions: Sequence[int],
    ) -> None: ...
    def sources_of(self, key: int) -> list[int]: ...
    def owned_by(
        self, tensors: list[torch.Tensor], keys_of: Callable[[torch.Tensor], Sequence[int]]
    ) -> OwnedSources: ...
    def owned_with(self, tensors: list[torch.Tensor], keys: Sequence[int]) -> OwnedSources: ...
    def mark(self, kinds: bytearray, owned: OwnedSources, kind: int) -> None: ...
    def watch(self, kinds: bytearray, kind: int, kind_in_doubt: int, owners: list[OwnedSources]) -> Counters: ...
    def places(
        self,
        kinds: bytearray,
        kind: int,
        storages: list[torch.UntypedStorage],
        addresses: Sequence[int],
        sizes_bytes: Sequence[int],
    ) -> Places: ...

def zip_local_header(record: Record) -> bytes: ...
def zip_descriptor_tail(record: Record) -> bytes: ...
def zip_central_entries(records: list[Record], crcs: Sequence[int]) -> bytes: ...
def zip_contents(records: list[Record], crcs: Sequence[int]) -> bytes: ...
def pickle_plain(
    object: object, torch: TorchTypes
) -> (
    tuple[
        bytes,
        list[torch.UntypedStorage],
        tuple[array[int], array[int], array[int], bool, array[int]] | None,
        list[torch.Tensor],
        array[int],
    ]
    | None
): ...
def crc32(data: Buffer, crc: int = 0) -> int: ...
def combine_runs(runs: Sequence[tuple[int, int, int]], size_bytes: int) -> int | None: ...
def combine_crc32(first: int, second: int, second_size_bytes: int) -> int: ...
def crc32_implementation() -> str: ...
def compare_values(
    dtype: str, a_address: int, b_address: int, count: int
) -> tuple[int, float, float, tuple[int, int], tuple[int, int]]: ...
def summarize_values(dtype: str, address: int, count: int) -> tuple[int, int, float, float, float, float]: ...
def engine_names() -> list[str]: ...
def ring_buffer_count() -> int: ...
def ring_free_count() -> int: ...
def ring_quarantined_count() -> int: ...

class FaultPlan:
    """The faults of the engines "fault:<engine>" (csrc/engine/fault_engine.h). Test builds only."""

    def __init__(
        self,
        *,
        op: str = "any",
        nth: int = 1,
        count: int = 1,
        kind: str = "errno",
        sys_errno: int = 5,
        short_bytes: int = 512,
        delay_ms: int = 0,
    ) -> None: ...

def set_fault_plan(plan: FaultPlan) -> None: ...
def clear_fault_plan() -> int: ...
def set_write_recording(on: bool) -> None: ...
def take_recorded_writes() -> list[tuple[int, bytes]]: ...

class FileRequest:
    """One request to a RandomAccess: its reads or its writes."""

    def done(self) -> bool: ...
    def let_go(self) -> None:
        """Drop the memory owner of a request that is done."""
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most timeout_s; return whether it is. Handles signals meanwhile."""
    def raise_failure(self) -> None:
        """Raise the first failure, if any, and note that the caller knows it. The request must be done."""
    @property
    def ended_early(self) -> tuple[int, int, int] | None:
        """Where a read met the end of the file: offset of the part, bytes read, bytes requested."""
    @property
    def failed_count(self) -> int: ...
    @property
    def done_bytes(self) -> int: ...

KEEP_BATCH: int

class RowRequest:
    """Rows on their way to memory; dropping it cancels it."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most timeout_s; return whether it is. Handles signals meanwhile."""
    def raise_failure(self) -> None:
        """Raise the first failure, if any. The request must be done."""
    def cancel(self, why: str) -> None: ...

class PlainRows:
    """Finds the memory of ids and rows without Python's checks; `row` has the shape and the dtype of the rows."""

    def __init__(self, tensor: type, storage: type, row: torch.Tensor) -> None: ...

class RowStore:
    """A table of rows; csrc/rows/store.h has the contract.

    Ids are given as the address and the number of int64 values. The caller keeps the descriptors open until close(),
    and checks ids by first_bad_id() before it gives them to any other function.
    """

    def __init__(
        self,
        *,
        pieces: Sequence[tuple[int, bytes, int, int]],
        row_bytes: int,
        positions: tuple[int, int],
        owner: object,
        engines: Sequence[str],
        queue_depth: int,
        thread_count: int,
        cache_bytes: int,
        gap_bytes: int,
        copy_thread_count: int,
    ) -> None: ...
    def first_bad_id(self, ids: int, count: int) -> int:
        """Return the place of the first id that is no row, or how many there are."""
    def start(self, ids: int, count: int, result: int, batch: int, owner: object) -> RowRequest: ...
    def bring(self, ids: int, count: int, result: int, batch: int, owner: object) -> None:
        """Start a request and wait for it; if the wait is interrupted, nothing is written to the result any more."""
    def bring_plain(self, plain: PlainRows, ids: torch.Tensor, rows: object) -> bool:
        """Bring rows if ids and rows are plain tensors that fit, and all ids are valid; return whether they are."""
    def register(self, ids: int, count: int, batch: int) -> None: ...
    def unregister(self, ids: int, count: int, batch: int) -> None: ...
    def keep(self, ids: int, count: int) -> int:
        """Keep the cached ones of these rows; return for how many ids there is no cached row."""
    def count_kept(self) -> int:
        """Return how many rows are kept in the cache."""
    def gather_cached(
        self,
        device: int,
        batch: int,
        ids: int,
        count: int,
        scratch: int,
        others: int,
        target: int,
        stream: int,
        found_count_min: int,
    ) -> int:
        """Have a device gather the cached rows of some ids, and wait for it; return how many ids are left.

        These are all if fewer are cached than `found_count_min`; then the request has taken none.

        Args:
            device: The ordinal of the device.
            batch: The number of the request's batch.
            ids: The address of the ids.
            count: The number of ids; at most 2³¹ - 1.
            scratch: The address of twice as many int32, pinned.
            others: The address of as many int64; gets the places of the ids that are left, unless these are all.
            target: The address of the rows of all ids on the device, a multiple of 16.
            stream: The stream of the device that does the work.
            found_count_min: The smallest number of cached rows for which this is worthwhile.
        """
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...
    @property
    def engine(self) -> str: ...
    @property
    def demotions(self) -> list[str]: ...

class RandomAccess:
    """Reads and writes at any place of an open file; csrc/transfer/random_access.h has the contract.

    The caller keeps the memory of a request allocated until it is done, and owns the descriptors, open until close().
    """

    def __init__(
        self,
        *,
        fd: int,
        buffered_fd: int,
        direct_lock_fd: int,
        edge_lock_fd: int,
        path: bytes,
        engines: Sequence[str],
        edge_engines: Sequence[str],
        queue_depth: int,
        thread_count: int,
        chunk_bytes: int,
        staging_bytes: int,
    ) -> None: ...
    def submit(
        self,
        write: bool,
        slices: Iterable[Sequence[tuple[int, int, int]] | tuple[int, Sequence[tuple[int, int, int]]]],
        memory_owner: object,
    ) -> FileRequest:
        """Start a request: (address, size_bytes, offset_bytes) of each part; each slice starts before the next is read.

        A slice that is a tuple has the ordinal of a CUDA device, whose memory holds its parts; the copies follow the
        work for which follow_caller was called. The request holds `memory_owner` until it is done and the owner is
        dropped (let_go, forget_done_requests), and while a device may still copy there. If the iteration raises, this
        waits for the started slices, or until a signal's handler raises.
        """
    def give_up_on_devices(self) -> None:
        """Fail the copies that a device does not complete within the grace time, from now on."""
    def wait_for_all(self, timeout_s: float | None = None) -> bool: ...
    def take_failed_writes(self) -> list[FileRequest]:
        """Return the writes that have failed since the last call and whose failure was not raised."""
    def raise_lost_writes(self) -> None:
        """Raise the first error with which the kernel failed to write bytes back to the device."""
    def close(self) -> None:
        """Wait for all requests and give everything back. May be called again."""
    @property
    def engine(self) -> str: ...
    @property
    def demotions(self) -> list[str]: ...

class LockedMemory:
    """Page-locked, zeroed memory; exports a writable buffer of bytes, which keeps it alive."""

    def __init__(self, size_bytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

def has_edge_locks(fd: int) -> bool:
    """Return whether a file has the locks that keep direct and buffered writes apart."""

def keep_owners() -> None:
    """Never free the owner of a request's memory from now on; Python is about to end."""

def forget_done_requests() -> None:
    """Drop the memory owners of all requests that are done."""

def allocate_alone(lock_fd: int, fd: int, offset_bytes: int, size_bytes: int, path: bytes) -> None:
    """Reserve a range and extend the file to its end, if the file system can; lock_fd as of EdgeLock, or -1."""

def truncate_alone(lock_fd: int, fd: int, size_bytes: int, path: bytes) -> None:
    """Change the length of a file; lock_fd as of EdgeLock, or -1."""
