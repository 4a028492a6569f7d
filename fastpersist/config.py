"""Tuning parameters: defaults, the tuning files of file systems, and the only place that reads the environment.

FASTPERSIST_ENGINE       what engine="auto" means: an engine name, or "auto" (default)
FASTPERSIST_RING_BYTES   host memory for the ring, all transfers together (default 67108864 = 64 MiB)
FASTPERSIST_CHUNK_BYTES  bytes of one request to the kernel (default 8388608 = 8 MiB; a ring is at least 4)
FASTPERSIST_QUEUE_DEPTH  requests of one transfer in flight (default: one per chunk of the ring; half during training)
FASTPERSIST_THREADS      threads of one transfer by a threads engine (default 0: one per request in flight, 16 at most)
FASTPERSIST_CONFIG       a tuning file that counts for every file system; empty: no tuning file counts
FASTPERSIST_PORTS        the ports at which rank 0 listens for other ranks: "20000-20100" (default: any)
FASTPERSIST_INTERFACE    the network interface, or address of rank 0, over which ranks of other machines connect

A tuning file is TOML with any of the keys in `TUNING_KEYS`; `fastpersist tune` writes it. Each file system has its own,
$XDG_CONFIG_HOME/fastpersist/<type>-<id>.toml: one that cannot be used is left out, and the log says so. A file that
FASTPERSIST_CONFIG names must be usable. The environment overrides a tuning file, value by value.
"""

from __future__ import annotations

import importlib
import logging
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fastpersist import _native
from fastpersist.errors import ConfigError

__all__ = [
    "BLOCK_BYTES",
    "QUEUE_DEPTH_MAX",
    "THREAD_COUNT_MAX",
    "TUNING_KEYS",
    "Config",
    "Network",
    "check_named_tuning",
    "config",
    "config_at",
    "config_for",
    "filesystem_type_name",
    "network",
    "read_tuning",
    "tuning_path",
]

_log = logging.getLogger("fastpersist")

BLOCK_BYTES = 4096
"""Storages start on multiples of this in every file: one page, which direct I/O takes on all common devices."""

TUNING_KEYS = ("engine", "chunk_bytes", "queue_depth", "ring_bytes", "threads", "writers")
"""The keys of a tuning file; each is a field of `Config`."""

_MIB = 1 << 20
QUEUE_DEPTH_MAX = 4096  # of every engine: csrc/engine/registry.cc
THREAD_COUNT_MAX = 1024
_TUNING_FILE_BYTES_MAX = 1 << 16
_PORT_MAX = 65535

# By the type number of statfs. A type that is not here is called by its number.
_FILESYSTEM_NAMES = {
    0xEF53: "ext4",  # ext2 and ext3 have the same number
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xCA451A4E: "bcachefs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0x794C7630: "overlay",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x00C36400: "ceph",
    0x19830326: "beegfs",
    0x65735546: "fuse",
    0x01021997: "9p",
}


@dataclass(frozen=True, slots=True)
class Config:
    """The tunable values for a file.

    Args:
        engine: What `engine="auto"` means; "auto" tries one engine after the other.
        ring_bytes: Bytes of host memory of the ring; a multiple of `chunk_bytes`, at least four times as much, and not
            more than the memory of the machine.
        chunk_bytes: Bytes of one request to the kernel; a power of two from 64 KiB to 1 GiB.
        queue_depth: Requests in flight of a transfer, 1 to 4096; None: one per chunk of the ring, half during training.
        threads: Threads of one transfer with a threads engine, up to 1024; 0: queue_depth, but at most 16.
        writers: How many ranks of a node write if the caller does not say it; None: up to 8.
        engine_wish: The engine that "auto" tries first; "" for none.

    Raises:
        ConfigError: A value is not allowed.
    """

    engine: str = "auto"
    ring_bytes: int = 64 * _MIB
    chunk_bytes: int = 8 * _MIB
    queue_depth: int | None = None
    threads: int = 0
    writers: int | None = None
    engine_wish: str = ""

    def __post_init__(self) -> None:
        if self.chunk_bytes & (self.chunk_bytes - 1) or not 1 << 16 <= self.chunk_bytes <= 1 << 30:
            raise ConfigError(
                f"FASTPERSIST_CHUNK_BYTES must be a power of two from 65536 to 1073741824, not {self.chunk_bytes}"
            )
        if self.ring_bytes % self.chunk_bytes or self.ring_bytes < 4 * self.chunk_bytes:
            raise ConfigError(
                f"FASTPERSIST_RING_BYTES must be a multiple of the chunk ({self.chunk_bytes} bytes) and at least "
                f"four chunks, not {self.ring_bytes}"
            )
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.ring_bytes > host_bytes:
            raise ConfigError(
                f"FASTPERSIST_RING_BYTES is {self.ring_bytes}, more than this machine's memory ({host_bytes} bytes)"
            )
        if self.queue_depth is not None and not 1 <= self.queue_depth <= QUEUE_DEPTH_MAX:
            raise ConfigError(f"FASTPERSIST_QUEUE_DEPTH must be from 1 to {QUEUE_DEPTH_MAX}, not {self.queue_depth}")
        if not 0 <= self.threads <= THREAD_COUNT_MAX:
            raise ConfigError(f"FASTPERSIST_THREADS must be from 0 to {THREAD_COUNT_MAX}, not {self.threads}")
        if self.writers is not None and self.writers < 1:
            raise ConfigError(f"writers must be at least 1, not {self.writers}")


class Network(NamedTuple):
    """How ranks connect with rank 0.

    Attributes:
        ports: The ports at which rank 0 listens: it takes the first that is free; 0 for a port that the kernel picks.
        interface: The name of a network interface, or an address; "" for any.
    """

    ports: range
    interface: str


def network() -> Network:
    """Read from the environment how ranks connect; rank 0's counts.

    Raises:
        ConfigError: FASTPERSIST_PORTS is no range of ports.
    """
    text = os.environ.get("FASTPERSIST_PORTS", "")
    first, dash, last = text.partition("-")
    ports = range(1)
    if text:
        numbers = [int(one) if one.isascii() and one.isdigit() else 0 for one in (first, last if dash else first)]
        if not 1 <= numbers[0] <= numbers[1] <= _PORT_MAX:
            raise ConfigError(f"FASTPERSIST_PORTS must be a port or a range of ports such as 20000-20100, not {text!r}")
        ports = range(numbers[0], numbers[1] + 1)
    return Network(ports, os.environ.get("FASTPERSIST_INTERFACE", ""))


def config() -> Config:
    """Read the configuration of the process from the environment, without any tuning file.

    Raises:
        ConfigError: A variable has a value that is not allowed; the message names it.

    Thread safety: any thread.
    """
    return Config(**_environment())


def config_for(fd: int) -> Config:
    """Return the values for a file: from the environment, else from its file system's tuning file, else the defaults.

    This costs two or three system calls; a tuning file is read again only after it has changed.

    Args:
        fd: Any descriptor on the file system, open in any way.

    Raises:
        ConfigError: A variable has a value that is not allowed, or FASTPERSIST_CONFIG names a file that cannot be used.

    Thread safety: any thread, and forked children.
    """
    environment = _environment()
    path = tuning_path(fd)
    if path is None:
        return Config(**environment)
    tuned = _tuning(path)
    return _merged(environment, tuned, path) if tuned else Config(**environment)


def config_at(path: str) -> Config:
    """Return the values for a file that may not exist yet; see `config_for`.

    Args:
        path: The file. Its nearest existing parent directory tells the file system.

    Raises:
        ConfigError: As in `config_for`.

    Thread safety: any thread.
    """
    directory = os.path.dirname(os.path.abspath(path))
    while True:
        try:
            fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            break
        except OSError:
            if directory == os.path.dirname(directory):
                return config()
            directory = os.path.dirname(directory)
    try:
        return config_for(fd)
    finally:
        os.close(fd)


def _environment() -> dict[str, Any]:
    """Return the values that the environment sets, by the names of `Config`."""
    found: dict[str, Any] = {}
    engine = os.environ.get("FASTPERSIST_ENGINE")
    if engine is not None:
        found["engine"] = engine
    for key, unit in (("ring_bytes", " of bytes"), ("chunk_bytes", " of bytes"), ("queue_depth", ""), ("threads", "")):
        name = f"FASTPERSIST_{key.upper()}"
        text = os.environ.get(name)
        if text is None:
            continue
        try:
            found[key] = int(text)
        except ValueError:
            raise ConfigError(f"{name} must be a whole number{unit}, not {text!r}") from None
    return found


# ------------------------------------------------------------------------------------------------- tuning files


class _Read(NamedTuple):
    """The content of a tuning file: a signature that changes with the file, its values, and what is wrong with it."""

    signature: tuple[int, ...]
    values: dict[str, Any]
    problem: str


_files_read: dict[str, _Read] = {}  # by path; entries are only replaced, so threads and forked children need no lock
_warned: dict[tuple[str, str], object] = {}


def filesystem_type_name(fd: int) -> str:
    """Return the type of a descriptor's file system, such as "xfs"; its number in hexadecimal if we know no name."""
    number = _native.filesystem_type(fd)
    return _FILESYSTEM_NAMES.get(number, f"{number:x}")


def tuning_path(fd: int, *, named: bool = True) -> str | None:
    """Return the path of the tuning file for a file system; None if there can be none.

    Its name has the type and the id of the file system. The id of a file system on a disk is stored there: it is the
    same after a reboot, and in containers. File systems without an id (most network file systems) share one tuning file
    for each type.

    Args:
        fd: Any descriptor on the file system.
        named: Return the file that FASTPERSIST_CONFIG names, if it names one; an empty name counts for "no file".

    Source: statfs(2), "The f_fsid field"; XDG Base Directory Specification.
    """
    if named:
        chosen = os.environ.get("FASTPERSIST_CONFIG")
        if chosen is not None:
            return chosen or None
    home = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(home):
        home = os.path.join(os.path.expanduser("~"), ".config")
    if not os.path.isabs(home):  # this user has no home
        return None
    try:
        name = f"{filesystem_type_name(fd)}-{os.fstatvfs(fd).f_fsid:016x}.toml"
    except (OSError, ConfigError):
        return None
    return os.path.join(home, "fastpersist", name)


def check_named_tuning() -> None:
    """Check the tuning file that FASTPERSIST_CONFIG names, if it names one, before any work begins.

    Raises:
        ConfigError: The file cannot be read, or a value in it is not allowed.
    """
    path = os.environ.get("FASTPERSIST_CONFIG")
    if path:
        _tuning(path)


def read_tuning(path: str) -> dict[str, Any]:
    """Return the values of a tuning file, by the names of `Config`.

    Raises:
        ConfigError: The file cannot be read, or a value in it is not allowed.
    """
    read = _read(path, ())
    if read.problem:
        raise ConfigError(f"the tuning file {path} cannot be used: {read.problem}")
    return dict(read.values)


def _is_named(path: str) -> bool:
    return path == os.environ.get("FASTPERSIST_CONFIG")


def _tuning(path: str) -> Mapping[str, Any]:
    """Return the values of a tuning file; none if there is no such file, or if it cannot be used.

    Raises:
        ConfigError: The file cannot be used, and FASTPERSIST_CONFIG names it.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        if _is_named(path):
            raise ConfigError(f"FASTPERSIST_CONFIG names {path}, which cannot be read: {error.strerror}") from error
        return {}
    signature = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)
    read = _files_read.get(path)
    if read is None or read.signature != signature:
        read = _files_read[path] = _read(path, signature)
    if read.problem:
        _refuse(path, read.problem)
    return read.values


def _refuse(path: str, problem: str) -> None:
    """Report a bad tuning file: raise if FASTPERSIST_CONFIG names it, else log it once."""
    if _is_named(path):
        raise ConfigError(f"FASTPERSIST_CONFIG names {path}, which cannot be used: {problem}")
    mine = object()
    if _warned.setdefault((path, problem), mine) is mine:
        _log.warning(
            "the tuning file %s is left out: %s; remove it, or write it anew with `fastpersist tune`", path, problem
        )


def _read(path: str, signature: tuple[int, ...]) -> _Read:
    try:
        # Without blocking: a save must not wait for a FIFO of this name.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return _Read(signature, {}, "it is no file")
            data = os.read(fd, _TUNING_FILE_BYTES_MAX + 1)
        finally:
            os.close(fd)
    except OSError as error:
        return _Read(signature, {}, f"it cannot be read ({error.strerror})")
    if len(data) > _TUNING_FILE_BYTES_MAX:
        return _Read(signature, {}, f"it is longer than {_TUNING_FILE_BYTES_MAX} bytes")
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        said = toml.loads(data.decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        return _Read(signature, {}, f"it is no TOML ({error})")
    problem = _problem(said)
    return _Read(signature, {} if problem else said, problem)


def _problem(said: Mapping[str, Any]) -> str:
    """Return what is wrong with the content of a tuning file; "" if nothing is."""
    for key, value in said.items():
        if key not in TUNING_KEYS:
            return f"it says {key!r}, and there is only {', '.join(TUNING_KEYS)}"
        if key == "engine":
            # No tuning file can make "auto" save nothing (null), or use GPUDirect.
            known = ["auto", *(name for name in _native.engine_names() if name not in ("null", "cufile"))]
            if value not in known:
                return f"engine is one of {', '.join(known)}, not {value!r}"
        elif isinstance(value, bool) or not isinstance(value, int):
            return f"{key} is a whole number, not {value!r}"
    try:
        Config(**said)
    except ConfigError as error:
        return str(error)
    return ""


def _merged(environment: Mapping[str, Any], tuned: Mapping[str, Any], path: str) -> Config:
    """Override the values of a tuning file by those of the environment."""
    values = {**tuned, **environment}
    if "engine" not in environment:
        wish = values.pop("engine", "auto")
        values["engine_wish"] = "" if wish == "auto" else wish
    try:
        return Config(**values)
    except ConfigError as error:
        # Each source alone is allowed: only the chunk of one does not fit the ring of the other.
        alone = Config(**environment)
        _refuse(path, f"it does not fit the environment: {error}")
        kept = ("queue_depth", "threads", "writers", "engine_wish")
        return replace(alone, **{key: values[key] for key in kept if key in values})
