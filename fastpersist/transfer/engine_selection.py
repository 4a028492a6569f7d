"""Chooses the engine that moves a file's bytes: probes, the ladder of "auto", and a transfer's options.

This module transfers only the blocks of a probe. The native side, which `writer` and `reader` feed, moves the bytes
of files, and steps down the ladder in the middle of a file. `gpudirect` finds out whether "cufile" can be used.
`config` reads the environment and the tuning files.

"auto" never takes "cufile" (GPUDirect Storage). It becomes part of the ladder when a measurement on some machine shows
it at least 5 % faster than the ring in host memory; until then, users have to name it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fastpersist import _native
from fastpersist.config import QUEUE_DEPTH_MAX, check_named_tuning, config, config_for, filesystem_type_name
from fastpersist.errors import ConfigError, FastPersistError, UnsupportedError
from fastpersist.formats.layout import align_up
from fastpersist.transfer import gpudirect

__all__ = [
    "AUTO_LADDER",
    "EngineProbe",
    "Placed",
    "announce_engine",
    "engine_ladder",
    "engines",
    "is_cufile",
    "ladder_beside_buffered_writes",
    "refuse_null_engine",
    "require_engine",
    "transfer_options",
]

_log = logging.getLogger("fastpersist")

AUTO_LADDER = ("uring", "libaio", "threads", "threads-buffered")
"""What engine="auto" tries, best first."""

Placed: TypeAlias = Iterable[tuple[int | None, int]]
"""The items that a transfer moves: for each, the ordinal of its CUDA device (None: elsewhere), and its bytes."""

# Where direct I/O is refused, pointless or not known to be faster than the page cache.
_BUFFERED_FILESYSTEMS = {"tmpfs", "ramfs", "nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs", "fuse", "9p"}

# Those of them on which direct writes are 1.8 to 5 times as fast: the page cache sends a file's requests one by one.
# With other hosts writing to the same file, only the page cache was tested, so this is for files with one writer.
_DIRECT_FOR_ONE_WRITER = {"fuse"}


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """Whether an engine works in a directory, found by doing one real write and read there.

    Attributes:
        name: Engine name, as the `engine=` arguments take it.
        usable: The engine wrote a block and read the same bytes back.
        why_not: The reason in one sentence when not usable, else an empty string.
    """

    name: str
    usable: bool
    why_not: str


def engines(directory: str | os.PathLike[str] = ".") -> list[EngineProbe]:
    """Probe every engine by one real write and read of a block in `directory`.

    Args:
        directory: An existing directory on the file system in question.

    Returns:
        One probe per engine that moves data, best first.

    Raises:
        StorageError: No file could be made in the directory, so no engine could be probed.

    Thread safety: any thread.
    """
    with gpudirect.probe_file(directory) as (fd, path):
        return [_probe(fd, path, name) for name in _native.engine_names() if name != "null"]


def _probe(fd: int, path: str, name: str) -> EngineProbe:
    if name == "cufile" and (reason := gpudirect.why_not()):
        return EngineProbe(name, False, reason)
    block_bytes = _native.block_bytes(fd)
    with mmap.mmap(-1, 3 * block_bytes) as memory:
        mapped_at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = align_up(mapped_at, block_bytes) - mapped_at  # a page's address may not be aligned enough
        middle, end = start + block_bytes, start + 2 * block_bytes
        pattern = secrets.token_bytes(block_bytes)
        memory[start:middle] = pattern
        try:
            for write, target in ((True, mapped_at + start), (False, mapped_at + middle)):
                requests = [(write, 0, target, block_bytes)]
                _native.run_requests(fd, os.fsencode(path), [name], requests, queue_depth=1)
        except FastPersistError as error:
            return EngineProbe(name, False, str(error))
        if memory[middle:end] != pattern:
            return EngineProbe(name, False, "it read back other bytes than it wrote")
        return EngineProbe(name, True, "")


def require_engine(engine: str) -> str:
    """Return the meaning of an `engine=` argument: "auto", or the name of an existing engine.

    Raises:
        ConfigError: There is none of that name; or FASTPERSIST_CONFIG names a tuning file that cannot be used.
    """
    if not isinstance(engine, str):
        raise ConfigError(f'engine must be the name of an engine, or "auto", not {engine!r}')
    check_named_tuning()
    source = ""
    if engine == "auto":
        engine, source = config().engine, "FASTPERSIST_ENGINE: "
    known = _native.engine_names()
    name = engine.removeprefix("fault:") if _native.HAS_FAULT_ENGINE else engine
    if engine != "auto" and name not in known:
        named = ", ".join(one for one in known if one != "null")  # which is only for measurements
        raise ConfigError(f"{source}there is no engine {engine!r}; known are auto, {named}")
    if is_cufile(engine):
        gpudirect.prepare()
    return engine


def is_cufile(engine: str) -> bool:
    """Tell whether this is the engine for device memory, or the fault engine around it."""
    return engine.removeprefix("fault:") == "cufile"


def engine_ladder(
    engine: str, fd: int, *, for_reading: bool = False, uses_cached: bool = True, one_writer: bool = False
) -> list[str]:
    """Return the engines to try for a file, best first; one name alone never falls back.

    No direct engine follows one that goes through the page cache: requests that were cut for that one may not fit it.

    Args:
        engine: What the caller asked for; "auto" is the value of FASTPERSIST_ENGINE, or else the ladder.
        fd: The open file, whose file system decides whether direct I/O is tried, and with what the ladder begins if it
            has a tuning file.
        for_reading: A tuned engine that goes through the page cache is then left out: a tuning measures saving.
        uses_cached: A file that is read, and is mostly in the page cache, is read from there.
        one_writer: No other process writes to the file meanwhile. Direct I/O is then tried on more file systems.

    Raises:
        ConfigError: Unknown engine name.
    """
    engine = require_engine(engine)
    if engine != "auto":
        return [engine]
    buffered = _BUFFERED_FILESYSTEMS - _DIRECT_FOR_ONE_WRITER if one_writer else _BUFFERED_FILESYSTEMS
    ladder = ["threads-buffered"] if filesystem_type_name(fd) in buffered else list(AUTO_LADDER)
    if for_reading and uses_cached and 2 * _native.cached_bytes(fd) > os.fstat(fd).st_size:
        return ["threads-buffered"]
    wish = config_for(fd).engine_wish
    is_buffered = wish.endswith("-buffered")
    if wish and not (for_reading and is_buffered):
        ladder = [wish, *(name for name in ladder if name != wish and (name.endswith("-buffered") or not is_buffered))]
    return ladder


def transfer_options(
    fd: int,
    path: str,
    engine: str,
    *,
    placed: Placed,
    for_reading: bool = False,
    one_writer: bool = False,
    sparing: bool = False,
) -> _native.TransferOptions:
    """Return the options of a transfer: the engines to try, and the buffers.

    Args:
        fd: The open file.
        path: The path of the file, for messages.
        engine: Engine name or "auto".
        placed: What is moved. The ring of the engine "cufile" is memory of the device that most of it lies on.
        for_reading: The option of `engine_ladder`.
        one_writer: The option of `engine_ladder`.
        sparing: Keep half the requests in flight, unless a depth was tuned or set.

    Raises:
        ConfigError: Unknown engine name.
    """
    ladder = engine_ladder(engine, fd, for_reading=for_reading, one_writer=one_writer)
    limits = config_for(fd)
    queue_depth = limits.queue_depth  # as it was tuned, or set
    if queue_depth is None:
        whole = min(limits.ring_bytes // limits.chunk_bytes, QUEUE_DEPTH_MAX)
        queue_depth = whole // 2 if sparing else whole  # a ring has four chunks and more
    return _native.TransferOptions(
        fd=fd,
        path=os.fsencode(path),
        engines=ladder,
        ring_bytes=limits.ring_bytes,
        chunk_bytes=limits.chunk_bytes,
        queue_depth=queue_depth,
        thread_count=limits.threads,
        ring_device=_largest_share(placed) if is_cufile(ladder[0]) else None,
    )


def _largest_share(placed: Placed) -> int | None:
    """Return the device that most of the bytes are on; None if nothing is on any."""
    found: Counter[int] = Counter()
    for device, size_bytes in placed:
        if device is not None:
            found[device] += size_bytes
    return found.most_common(1)[0][0] if found else None


def ladder_beside_buffered_writes(ladder: list[str], fd: int, path: str) -> list[str]:
    """Return the ladder, without the asynchronous direct engines where no lock keeps buffered writes away from them.

    Raises:
        UnsupportedError: No engine is left.
    """
    if _native.has_edge_locks(fd):
        return ladder
    found = [name for name in ladder if "threads" in name]
    if not found:
        raise UnsupportedError(
            f"{ladder[0]} cannot write to {path}: its file system has no locks of open file descriptions, which keep "
            "direct writes apart from those through the page cache; engine='threads' needs none"
        )
    return found


def refuse_null_engine(used: str) -> None:
    """Refuse the engine that moves nothing, for files that must hold something: it is only for measurements.

    Raises:
        ConfigError: This engine was used.
    """
    if used.removeprefix("fault:") == "null":
        raise ConfigError("the null engine moves nothing, so this file would hold nothing; choose another engine")


_announced: set[tuple[str, str]] = set()


def announce_engine(path: str, wanted: str, used: str, left: Sequence[str]) -> None:
    """Log which rung of the ladder a transfer took and why not the others: once for each way down."""
    key = (used, "; ".join(reason.partition(": ")[0] for reason in left))
    if wanted != "auto" or key in _announced:
        return
    _announced.add(key)
    reasons = "".join(f"; not {reason}" for reason in left)
    _log.log(logging.WARNING if left else logging.INFO, "engine %s for %s%s", used, path, reasons)
