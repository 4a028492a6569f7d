"""The ways to save that overlap.py compares: those of `fastpersist bench overlap`, and more, for CPUs.

What a way is says `fastpersist.cli.bench.overlap.ways`. Who measures what is not decided here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from overlap_training import Training

import fastpersist as fp
from fastpersist.cli.bench.overlap.ways import (
    CheckpointerWay,
    DcpKeptWay,
    DcpStagedWay,
    DcpWay,
    Options,
    OwnDirectoryWay,
    TorchSaveWay,
    Unavailable,
    Way,
)
from fastpersist.cli.bench.save_rows import sync_path
from fastpersist.saving import pacing

__all__ = [
    "DEFAULT_WAYS",
    "WAY_NAMES",
    "Options",
    "Unavailable",
    "Way",
    "make_way",
    "sync_checkpoint",
    "sync_parent",
    "variants_of",
]


class _DcpProcess(DcpWay):
    settings = "process, one kept DefaultStager that copies into shared memory in a thread, awaited before the update"
    staging = (True, True)
    in_process = True


def sync_checkpoint(arguments: Any) -> None:
    """Make what torch_checkpointing wrote durable, which it leaves to its users; runs in its writing process."""
    for directory, _, names in os.walk(arguments.path):
        for name in names:
            sync_path(os.path.join(directory, name))
        sync_path(directory)


def sync_parent(arguments: Any) -> None:
    """Make a renamed checkpoint's name durable; runs in torch_checkpointing's writing process."""
    sync_path(os.path.dirname(arguments.path))


class _TorchCheckpointing(OwnDirectoryWay):
    """meta-pytorch's package: staging in a thread, writing in a process, optimizer.step() under its lock."""

    settings = "no O_DIRECT (it fails on ext4), not pinned, staging thread, 1 writing thread, prewarmed, with fsync"
    thread_count = 1

    def __init__(self, root: str, training: Training, options: Options) -> None:
        super().__init__(root, training, options)
        try:
            from torch_checkpointing import CheckpointManager  # type: ignore[import-not-found]
            from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig  # type: ignore[import-not-found]
            from torch_checkpointing.config import AsyncCheckpointSaverConfig  # type: ignore[import-not-found]
            from torch_checkpointing.storage import filesystem  # type: ignore[import-not-found]
        except ImportError as error:
            raise Unavailable(f"{error}: pip install torch_checkpointing (needs torch >= 2.11)") from error
        # On a machine without a GPU its staging defaults are the right ones: shared memory, a thread, nothing pinned.
        config = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(
                writer_config=CheckpointWriterConfig(file_write_max_threads=self.thread_count)
            ),
            storage_config=filesystem.LocalFileSystemStorageConfig(use_direct_io=False),
            pre_finalize_callback=sync_checkpoint,
            finalize_callback=sync_parent,
        )
        self._manager = CheckpointManager(config)
        self._written: Any = None
        self._is_warm = False

    def save(self, step: int) -> None:
        if not self._is_warm:  # there is no optimizer state earlier
            self._manager.prewarm_staging(self.training.state(step))
            self._is_warm = True
        self._wait_written()  # it would do so itself; this way the oldest can be removed
        self._written = self._manager.save(self._next_path(step), self.training.state(step))

    def update_guard(self) -> contextlib.AbstractContextManager[Any]:
        guard: contextlib.AbstractContextManager[Any] = self._manager.lock()
        return guard

    def _wait_written(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    def settle(self) -> None:
        self._wait_written()
        super().settle()

    def finish(self) -> None:
        self.settle()
        self._manager.close()


class _TorchCheckpointing2(_TorchCheckpointing):
    settings = "as the other, with 2 writing threads"
    thread_count = 2


class _FastpersistUnpaced(CheckpointerWay):
    settings = "as the other, writing as fast as it can"

    def save(self, step: int) -> None:
        paced = pacing.PACE_SHARE  # no option: users need none, a measurement of pacing does
        pacing.PACE_SHARE = 0.0
        try:
            super().save(step)
        finally:
            pacing.PACE_SHARE = paced


class _FastpersistFile(OwnDirectoryWay):
    settings = "fp.save_async(state, path, optimizer=optimizer), one at a time"
    suffix = ".pt"

    def __init__(self, root: str, training: Training, options: Options) -> None:
        super().__init__(root, training, options)
        self._pending: Any = None

    def save(self, step: int) -> None:
        self._wait_written()
        path, training = self._next_path(step), self.training
        self._pending = fp.save_async(
            training.state(step), path, optimizer=training.optimizer, engine=self.options.engine
        )

    def _wait_written(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def settle(self) -> None:
        self._wait_written()
        super().settle()


_WAYS: dict[str, Callable[[str, Training, Options], Way]] = {
    "none": Way,
    "torch-save": TorchSaveWay,
    "dcp-thread": DcpWay,
    "dcp-cached": DcpKeptWay,
    "dcp-staged": DcpStagedWay,
    "dcp-process": _DcpProcess,
    "tck": _TorchCheckpointing,
    "tck-2": _TorchCheckpointing2,
    "fastpersist": CheckpointerWay,
    "fastpersist-unpaced": _FastpersistUnpaced,
    "fastpersist-file": _FastpersistFile,
}
# A name that stands for several: all of them run in the first round, then only the fastest.
_VARIANTS = {
    "dcp": ["dcp-thread", "dcp-cached", "dcp-staged", "dcp-process"],
    "torch_checkpointing": ["tck", "tck-2"],
}
WAY_NAMES = [*_VARIANTS, *_WAYS]
DEFAULT_WAYS = ["none", "torch-save", "dcp", "torch_checkpointing", "fastpersist"]


def variants_of(name: str) -> list[str]:
    """Return the ways that a name stands for."""
    return _VARIANTS.get(name, [name])


def make_way(name: str, root: str, training: Training, options: Options) -> Way:
    """Make a way ready to save.

    Raises:
        Unavailable: It cannot be tried here.
    """
    return _WAYS[name](root, training, options)
