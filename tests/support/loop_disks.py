"""A disk that can be cloned while a file system on it is in use.

It is an image file on a reflink file system, both mounted by loop devices. A clone is what the disk held at
one moment, so mounting it is what follows a power cut.

Needs root and xfs. Mounts are made in a mount namespace of the calling process, which must be a child of
pytest's (support.forking): however it ends, the kernel unmounts everything and frees the loop devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.sandbox import unmount

OUTER_BYTES = 2 << 30  # sparse, as the inner one; what is used is what is written
INNER_BYTES = 512 << 20  # mkfs.xfs refuses less than 300 MiB

_FICLONE = 0x40049409
_CLONE_NEWNS = 0x00020000


class NoLoopDisksError(Exception):
    """This machine or this user cannot make loop disks; says why."""


class LoopDisk:
    """A mounted disk. Use `loop_disk` to make one.

    Attributes:
        directory: The directory at which its file system is mounted.
    """

    def __init__(self, image: Path, directory: Path) -> None:
        self.directory = directory
        self._image = image
        self._clone_count = 0

    def clone(self) -> Path:
        """Copy the disk as it is at this moment, atomically, into an image beside its own."""
        self._clone_count += 1
        copy = self._image.with_suffix(f".{self._clone_count}")
        with self._image.open("rb") as source, copy.open("xb") as target:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
        return copy


def why_no_loop_disks() -> str | None:
    """Say what is missing for loop disks, as far as can be told without making one; None when nothing is."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if shutil.which("mkfs.xfs") is None:
        return "mkfs.xfs is not installed (xfsprogs)"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices (/dev/loop-control)"
    return None


@contextmanager
def loop_disk(scratch: Path) -> Iterator[LoopDisk]:
    """Make a disk in `scratch`, mount it for the block, and remove it.

    Raises:
        NoLoopDisksError: The kernel refuses to.
    """
    with ExitStack() as stack:
        try:
            enter_mount_namespace()
            outer = stack.enter_context(_image_with_xfs(scratch / "outer.img", OUTER_BYTES))
            outer_directory = stack.enter_context(mounted(outer))
            inner = stack.enter_context(_image_with_xfs(outer_directory / "inner.img", INNER_BYTES))
            inner_directory = stack.enter_context(mounted(inner))
        except OSError as error:
            raise NoLoopDisksError(f"unshare: {error.strerror}") from error
        except subprocess.CalledProcessError as error:
            raise NoLoopDisksError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        yield LoopDisk(inner, inner_directory)


@contextmanager
def disk_with_sectors(scratch: Path, sector_bytes: int) -> Iterator[Path]:
    """Mount a disk whose sectors are larger than usual for the block: direct I/O on it takes no smaller blocks.

    Raises:
        NoLoopDisksError: The kernel (before 6.14) or its tools cannot have such sectors.
    """
    image = scratch / "sectors.img"
    with image.open("xb") as file:
        file.truncate(INNER_BYTES)
    directory = scratch / "sectors"
    directory.mkdir()
    try:
        enter_mount_namespace()
        device = _run("losetup", "--show", "--find", "--sector-size", str(sector_bytes), str(image)).strip()
        try:
            _run("mkfs.xfs", "-q", "-b", f"size={sector_bytes}", "-s", f"size={sector_bytes}", device)
            _run("mount", device, str(directory))
        finally:
            _run("losetup", "--detach", device)  # when nothing has it mounted any more
    except OSError as error:
        raise NoLoopDisksError(f"unshare: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise NoLoopDisksError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
    try:
        yield directory
    finally:
        unmount(directory)
        image.unlink()


def enter_mount_namespace() -> None:
    """Give this process mounts of its own, which end with it and its children."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _run("mount", "--make-rprivate", "/")


@contextmanager
def _image_with_xfs(image: Path, size_bytes: int) -> Iterator[Path]:
    with image.open("xb") as file:
        file.truncate(size_bytes)
    try:
        _run("mkfs.xfs", "-q", "-m", "reflink=1", str(image))
        yield image
    finally:
        image.unlink()


@contextmanager
def mounted(image: Path) -> Iterator[Path]:
    """Mount the file system in an image for the block; it may be a clone of one that is mounted already."""
    directory = Path(f"{image}.mounted")
    directory.mkdir()
    try:
        _run("mount", "-o", "loop,nouuid", str(image), str(directory))
        try:
            yield directory
        finally:
            unmount(directory)
    finally:
        directory.rmdir()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
