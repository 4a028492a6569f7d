"""The disk of one node, or the one that all nodes share, gives nothing but errors from one moment on, while ranks save.

An ext4 on a loop device is shut down by its own ioctl, as it does by itself when its journal cannot be written; or the
device below it becomes one that fails every request (device-mapper's error target).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.forking import SMALL_RING, in_child
from support.loop_disks import enter_mount_namespace
from support.process_groups import run_ranks
from support.runs import Run, held_writers, hidden_names
from support.sandbox import needs_root, unmount
from support.store_runs import SIZES, checkpoints_at, resume, step_path

import fastpersist as fp

_EXT4_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_LOG_FLUSH = 2
_DISK_BYTES = 64 << 20


def run(*words: object) -> str:
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout


class Disk:
    """An ext4 in an image, on a loop device, below a device of device-mapper or not; mounted at `directory`."""

    def __init__(self, scratch: Path, image: Path, mapped: str, below: str) -> None:
        self.directory = scratch / "disk"
        self.directory.mkdir()
        self._image, self._mapped, self._below = image, mapped, below

    def mount(self) -> None:
        if self._mapped:
            run("mount", f"/dev/mapper/{self._mapped}", self.directory)
        else:
            run("mount", "-o", "loop", self._image, self.directory)

    def die(self) -> None:
        if self._mapped:
            self._become("error")
            return
        fd = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
        finally:
            os.close(fd)

    def repair(self) -> None:
        unmount(self.directory)
        if self._mapped:
            self._become(f"linear {self._below} 0")
        self.mount()

    def _become(self, target: str) -> None:
        run("dmsetup", "suspend", "--noflush", "--nolockfs", self._mapped)
        run("dmsetup", "load", self._mapped, "--table", f"0 {_DISK_BYTES // 512} {target}")
        run("dmsetup", "resume", self._mapped)


@contextmanager
def disk_below(scratch: Path, how: str) -> Iterator[Disk]:
    """Make a disk; skip where this machine has no means to."""
    needed = ["losetup", "mkfs.ext4", *(["dmsetup"] if how == "error target" else [])]
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if how == "error target" and not Path("/dev/mapper/control").exists():
        pytest.skip("the kernel has no device-mapper")
    image = scratch / "disk.img"
    with image.open("xb") as file:
        file.truncate(_DISK_BYTES)
    run("mkfs.ext4", "-q", image)
    with ExitStack() as stack:
        try:
            enter_mount_namespace()
            mapped = below = ""
            if how == "error target":
                below = run("losetup", "--show", "--find", image).strip()
                stack.callback(run, "losetup", "--detach", below)
                mapped = f"fastpersist-{os.getpid()}"
                run("dmsetup", "create", mapped, "--table", f"0 {_DISK_BYTES // 512} linear {below} 0")
                stack.callback(run, "dmsetup", "remove", mapped)
            disk = Disk(scratch, image, mapped, below)
            disk.mount()
        except OSError as error:
            pytest.skip(f"unshare: {error.strerror}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{' '.join(error.cmd)}: {error.stderr.strip()}")
        stack.callback(unmount, disk.directory)
        yield disk


def train(rank: int, count: int, roots: list[Path], node_local: Any, disk: Disk, victim: int) -> list[str]:
    """Save step 1; let the disk die in step 2; return how steps 2 and 3 ended."""
    state = Run(SIZES)
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints = checkpoints_at(roots[rank], state, node_local=node_local, on_error="warn")
        checkpoints.save(1, state.advance().state(), rank_state={"rank": rank, "step": 1}).result()
        for step in (2, 3):
            dist.barrier()
            try:
                with held_writers():
                    pending = checkpoints.save(step, state.advance().state(), rank_state={"rank": rank, "step": step})
                    if rank == victim and step == 2:
                        disk.die()
                error = pending.exception()
            except fp.FastPersistError as raised:
                error = raised
            said.append("" if error is None else f"{type(error).__name__}: {error}")
        checkpoints.close()
    return said


@needs_root
@pytest.mark.parametrize("how", ["shut down", "error target"])
@pytest.mark.parametrize("node_local", [None, "parts", "copies"])
@in_child(SMALL_RING)
def test_a_disk_that_dies_in_a_save_fails_it_on_all_ranks_and_the_step_before_is_there_when_it_is_back(
    tmp_path: Path, node_local: Any, how: str
) -> None:
    with disk_below(tmp_path, how) as disk:
        other = tmp_path / "other"
        roots = [disk.directory / "run"] * 4 if node_local is None else [other, other, *[disk.directory / "run"] * 2]
        victim = 2
        for said in run_ranks(4, train, roots, node_local, disk, victim):
            for text in said:
                assert text.startswith(("StorageError", "PeerError")), said
                assert "Input/output error" in text or "Read-only file system" in text, said
                assert str(disk.directory) in text, said
        disk.repair()
        assert run_ranks(4, partial(resume, node_local=node_local), roots) == [1] * 4

        def go_on(rank: int, count: int) -> None:
            state = Run(SIZES).advance(1)
            with checkpoints_at(roots[rank], state, node_local=node_local) as checkpoints:
                checkpoints.save(2, state.advance().state(), rank_state={"rank": rank, "step": 2}).result()

        run_ranks(4, go_on)
        assert run_ranks(4, partial(resume, node_local=node_local), roots) == [2] * 4
        for root in {*roots}:
            assert hidden_names(root) == []
            assert step_path(root, 2).is_dir()
