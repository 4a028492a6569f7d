"""Ways of saving that `bench overlap` measures when they are named, beside those of `overlap.ways`.

Other settings of DCP and of fastpersist, torch_checkpointing, and a bare loop of writes, which shows what the disk and
the kernel take of a step.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fastpersist
from fastpersist.cli.bench.overlap.ways import (
    CheckpointerWay,
    DcpKeptWay,
    DcpWay,
    Options,
    OwnDirectoryWay,
    Trained,
    Unavailable,
    Way,
)
from fastpersist.cli.bench.save_rows import sync_below, sync_path
from fastpersist.cli.bench.states import tensor_bytes
from fastpersist.saving import pacing

__all__ = ["FURTHER_WAYS", "BareLoopWay", "DcpProcessWay", "TorchCheckpointingWay"]

_ALIGNMENT_BYTES = 4096


class BareLoopWay(OwnDirectoryWay):
    """As many bytes as a checkpoint, out of one fixed buffer, straight to the disk, and nothing else.

    It copies nothing, computes nothing, and touches no cache that training uses. So what a step beside it loses, the
    disk and the kernel take, and no way of saving can be expected to take less.
    """

    settings = "4 threads, each with one direct write of 8 MiB in flight, into a fresh, preallocated file, then a sync"
    suffix = ".loop"
    depth = 4
    chunk_bytes = 8 << 20

    def __init__(self, root: str, training: Trained, options: Options) -> None:
        super().__init__(root, training, options)
        self._buffer = mmap.mmap(-1, self.chunk_bytes)  # page-aligned
        self._buffer.write(os.urandom(self.chunk_bytes))  # zeros may cost a disk less
        os.close(_open_direct(os.path.join(root, "probe")))
        os.unlink(os.path.join(root, "probe"))
        self._threads = ThreadPoolExecutor(self.depth + 1, "bare-loop")  # one of them waits for the others

    def save(self, step: int) -> None:
        """Begin to write; the file is made in the background, too, because to reserve its space may take long."""
        self._wait_written()
        size_bytes = -(-tensor_bytes(self.training.state(step)) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._written = self._threads.submit(self._write, self._next_path(step), size_bytes)

    def _write(self, path: str, size_bytes: int) -> None:
        fd = _open_direct(path)

        def write_chunk(offset: int) -> None:
            end = min(self.chunk_bytes, size_bytes - offset)
            done = 0
            while done < end:
                with memoryview(self._buffer) as view:
                    done += os.pwrite(fd, view[done:end], offset + done)

        try:
            os.posix_fallocate(fd, 0, size_bytes)
            list(self._threads.map(write_chunk, range(0, size_bytes, self.chunk_bytes)))
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_path(self.root)

    def finish(self) -> None:
        """Settle, and end the threads."""
        self.settle()
        self._threads.shutdown()


def _open_direct(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise Unavailable("this file system has no direct I/O") from error


class DcpProcessWay(DcpWay):
    """dcp.async_save, which writes in a process of its own."""

    settings = "process, one kept DefaultStager that copies into shared memory in a thread, awaited before the update"
    staging = (True, True)
    in_process = True


def sync_checkpoint(arguments: Any) -> None:
    """Make what torch_checkpointing wrote durable, which it leaves to its users; runs in its writing process."""
    sync_below(arguments.path)


def sync_parent(arguments: Any) -> None:
    """Make a renamed checkpoint's name durable; runs in torch_checkpointing's writing process."""
    sync_path(os.path.dirname(arguments.path))


def checkpointing_manager(*, is_async: bool) -> Any:
    """Return torch_checkpointing's manager with its best settings, and with the fsync that it leaves to its users.

    Raises:
        Unavailable: It is not installed.
    """
    try:
        from torch_checkpointing import CheckpointManager  # type: ignore[import-not-found]
        from torch_checkpointing import config as settings
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig  # type: ignore[import-not-found]
        from torch_checkpointing.storage import filesystem  # type: ignore[import-not-found]
    except ImportError as error:
        raise Unavailable(f"{error}: pip install torch_checkpointing (needs torch >= 2.11)") from error
    # Its staging defaults are the right ones: shared memory, a thread. It writes a file of each entry of the state, of
    # which parameters and moments are two large ones: one for each thread.
    saver = settings.AsyncCheckpointSaverConfig if is_async else settings.SyncCheckpointSaverConfig
    return CheckpointManager(
        CheckpointManager.Config(
            save=saver(writer_config=CheckpointWriterConfig(file_write_max_threads=2)),
            storage_config=filesystem.LocalFileSystemStorageConfig(use_direct_io=False),  # which fails on ext4
            pre_finalize_callback=sync_checkpoint,
            finalize_callback=sync_parent,
        )
    )


class TorchCheckpointingWay(OwnDirectoryWay):
    """meta-pytorch's package: staging in a thread, writing in a process, optimizer.step() under its lock."""

    settings = "no O_DIRECT (it fails on ext4), not pinned, staging thread, 2 writing threads, prewarmed, with fsync"

    def __init__(self, root: str, training: Trained, options: Options) -> None:
        super().__init__(root, training, options)
        self._manager = checkpointing_manager(is_async=True)
        self._is_warm = False

    def save(self, step: int) -> None:
        """Wait for the save before, and begin this one."""
        state = self.training.state(step)
        if not self._is_warm:  # there is no optimizer state earlier
            self._manager.prewarm_staging(state)
            self._is_warm = True
        self._wait_written()  # it would do so itself; this way the oldest can be removed
        self._written = self._manager.save(self._next_path(step), state)

    def update_guard(self) -> contextlib.AbstractContextManager[Any]:
        """Return its lock."""
        guard: contextlib.AbstractContextManager[Any] = self._manager.lock()
        return guard

    def finish(self) -> None:
        """Settle, and end its process."""
        self.settle()
        self._manager.close()


class _UnpacedWay(CheckpointerWay):
    """fastpersist's own, whose writes are not spread over the time to the next step."""

    settings = "fp.Checkpointer as above, writing as fast as it can"

    def save(self, step: int) -> None:
        paced = pacing.PACE_SHARE  # no option: users need none, a measurement of pacing does
        pacing.PACE_SHARE = 0.0
        try:
            super().save(step)
        finally:
            pacing.PACE_SHARE = paced


class _FileWay(OwnDirectoryWay):
    """fastpersist's own, of one file and without a directory of steps."""

    settings = "fp.save_async(state, path, optimizer=optimizer), one at a time"
    suffix = ".pt"

    def save(self, step: int) -> None:
        self._wait_written()
        path, optimizer = self._next_path(step), self.training.optimizer
        self._written = fastpersist.save_async(
            self.training.state(step), path, optimizer=optimizer, engine=self.options.engine
        )


FURTHER_WAYS: dict[str, Callable[[str, Trained, Options], Way]] = {
    "no checkpoints, again": Way,
    "O_DIRECT loop": BareLoopWay,
    "fp.Checkpointer, unpaced": _UnpacedWay,
    "fp.save_async": _FileWay,
    "dcp.async_save, blocking stager": DcpKeptWay,
    "dcp.async_save, process": DcpProcessWay,
    "torch_checkpointing": TorchCheckpointingWay,
}
"""By the names of their rows. The difference of the "again" row is the noise of the measurement."""
