"""Makes surroundings that are worse than this machine: system calls denied, no privileges, small and odd file systems.

What is done to a process cannot be undone, so do it in a child (support.forking). Mounts need root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and sysctls need root")

IO_URING_SETUP, IO_URING_ENTER = 425, 426
IO_SETUP, IO_GETEVENTS, IO_SUBMIT = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}.get(platform.machine(), (-1,) * 3)

_UNMOUNT_PATIENCE_S = 30
_ORDINARY_USER = 65534  # "nobody" everywhere


def deny_system_calls(*numbers: int) -> None:
    """Let this process get EPERM from these system calls from now on, as the profiles of containers do."""
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"the system call numbers of {platform.machine()} are not known here")
    # struct sock_filter { u16 code; u8 jump_true, jump_false; u32 k; }: load the number (it is the first word of
    # seccomp_data), answer EPERM where it is one of ours, allow all others.
    load_word, jump_equal, answer = 0x20, 0x15, 0x06
    allow, fail = 0x7FFF0000, 0x00050000 | errno.EPERM
    program = struct.pack("HBBI", load_word, 0, 0, 0)
    for number in numbers:
        program += struct.pack("HBBI", jump_equal, 0, 1, number) + struct.pack("HBBI", answer, 0, 0, fail)
    program += struct.pack("HBBI", answer, 0, 0, allow)
    memory = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(memory)))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    for arguments in (
        (no_new_privileges, 1, 0, 0, 0),
        (set_seccomp, filter_mode, ctypes.addressof(header), 0, 0),
    ):
        if prctl(*arguments) != 0:
            number = ctypes.get_errno()
            if number == errno.EINVAL:
                pytest.skip("this kernel has no seccomp filters")
            raise OSError(number, f"prctl{arguments}: {os.strerror(number)}")


def become_ordinary_user(*groups: int) -> None:
    """Give up root, for good, and be a member of `groups` besides one's own. Does nothing where we are not root."""
    if os.geteuid() == 0:
        os.setgroups(groups)
        os.setresgid(_ORDINARY_USER, _ORDINARY_USER, _ORDINARY_USER)
        os.setresuid(_ORDINARY_USER, _ORDINARY_USER, _ORDINARY_USER)


@contextlib.contextmanager
def open_directory(tmp_path: Path) -> Iterator[Path]:
    """Make a directory that an ordinary user may write to and reach (what pytest makes for root is closed to others).

    It lies beside pytest's own directories, on the same file system as `tmp_path`.
    """
    if os.geteuid() != 0:
        yield tmp_path
        return
    base = tmp_path
    while not all(parent.stat().st_mode & 0o001 for parent in [base, *base.parents]):
        base = base.parent
    directory = Path(tempfile.mkdtemp(dir=base))
    try:
        directory.chmod(0o777)
        yield directory
    finally:
        shutil.rmtree(directory)


FILESYSTEMS = ("tmpfs", "ext4", "ext4-without-fallocate")


@contextlib.contextmanager
def small_filesystem(kind: str, tmp_path: Path, size_mib: int) -> Iterator[Path]:
    """Mount an empty file system of a few MiB and few files below tmp_path. Skips where that is not possible."""
    root = tmp_path / f"mounted-{kind}"
    root.mkdir()
    if kind == "tmpfs":
        _mount("-t", "tmpfs", "-o", f"size={size_mib}m,nr_inodes=100", "tmpfs", str(root))
    else:
        # Files that are lists of blocks, not of extents, as on ext3: the kernel refuses to fallocate those.
        features = "^has_journal,^extent,^64bit" if kind == "ext4-without-fallocate" else "^has_journal"
        mount_ext4(tmp_path / f"{kind}.image", root, size_mib, features)
    try:
        yield root
    finally:
        unmount(root)


def mount_ext4(image: Path, root: Path, size_mib: int, features: str = "^has_journal") -> None:
    """Mount an empty ext4 that is kept in a new, sparse file. Skips where that is not possible."""
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    make = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if make is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run([make, "-q", "-F", "-m", "0", "-O", features, str(image)], check=True, capture_output=True)
    _mount("-o", "loop", str(image), str(root))


@contextlib.contextmanager
def bind_mounted(source: Path, place: Path) -> Iterator[None]:
    """Mount a file or directory on another one. Skips where that is not possible."""
    _mount("--bind", str(source), str(place))
    try:
        yield
    finally:
        unmount(place)


@contextlib.contextmanager
def overlay_mounted(lower: Path, tmp_path: Path) -> Iterator[Path]:
    """Mount what a directory holds as the image of a container: its directories cannot be renamed."""
    with small_filesystem("tmpfs", tmp_path, 64) as above:
        for name in ("upper", "work", "merged"):
            (above / name).mkdir()
        layers = f"lowerdir={lower},upperdir={above}/upper,workdir={above}/work,redirect_dir=off"
        _mount("-t", "overlay", "-o", layers, "overlay", str(above / "merged"))
        try:
            yield above / "merged"
        finally:
            unmount(above / "merged")


def unmount(directory: Path) -> None:
    """Take a file system off, as soon as the kernel lets go of it.

    After a process has ended, the kernel still finishes its io_uring requests, and their files stay open meanwhile.
    """
    deadline_s = time.monotonic() + _UNMOUNT_PATIENCE_S
    while True:
        tried = subprocess.run(["umount", str(directory)], check=False, capture_output=True, text=True)
        if tried.returncode == 0:
            return
        if "busy" not in tried.stderr or time.monotonic() > deadline_s:
            raise OSError(f"umount {directory}: {tried.stderr.strip()}")
        time.sleep(0.01)


def _mount(*arguments: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    result = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"mount {' '.join(arguments)} is not possible here: {result.stderr.strip()}")
