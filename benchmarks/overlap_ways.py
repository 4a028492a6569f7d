"""The ways to save that overlap.py compares, each with the settings that serve it best on a CPU.

A way saves the state of a training after a step, keeps the last two checkpoints, and is told when the state is about to
change. Everything it wrote is durable when `finish` returns. Who measures what is not decided here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from overlap_training import Training

import fastpersist as fp
from fastpersist import pacing

__all__ = ["DEFAULT_WAYS", "WAY_NAMES", "Options", "Unavailable", "Way", "make_way", "variants_of"]

_KEEP_COUNT = 2


class Unavailable(Exception):
    """This way cannot be tried here; the message says why and, if there is something, what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose for fastpersist's own ways."""

    engine: str = "auto"
    max_host_bytes: int | None = None


class Way:
    """Saves nothing; the others build on it. One thread calls all methods.

    Args:
        root: Empty directory that the way has for itself.
        training: What is to be saved.
        options: For fastpersist's own ways.
    """

    settings = "no checkpoint at all"

    def __init__(self, root: str, training: Training, options: Options) -> None:
        self.root, self.training, self.options = root, training, options

    def save(self, step: int) -> None:
        """Save the state after a step; return when training may go on up to the next update."""

    def before_update(self) -> None:
        """Wait until the state may change."""

    def update_guard(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the optimizer's step is to run."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Wait until all that was saved is durable, and nothing goes on in the background."""

    def finish(self) -> None:
        """Settle, then end threads and processes."""
        self.settle()

    def report(self) -> list[dict[str, Any]]:
        """Return what the way itself says about each save."""
        return []

    def newest(self) -> tuple[int, int]:
        """Return step and bytes of the newest checkpoint on disk, (-1, 0) if there is none."""
        found = {int(name[5:13]): name for name in os.listdir(self.root) if name.startswith("step-")}
        if not found:
            return -1, 0
        return max(found), _bytes_below(os.path.join(self.root, found[max(found)]))


def _bytes_below(path: str) -> int:
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(_bytes_below(entry.path) for entry in os.scandir(path))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _OwnDirectoryWay(Way):
    """For ways that leave names, removal and order of saves to their caller."""

    suffix = ""

    def __init__(self, root: str, training: Training, options: Options) -> None:
        super().__init__(root, training, options)
        self._paths: list[str] = []
        self._removal: threading.Thread | None = None

    def _next_path(self, step: int) -> str:
        """Return the path for a step, and let go of the oldest; the one before is complete by now.

        Removing takes a while on some file systems, so it does not take the training's time.
        """
        self._join_removal()
        if len(self._paths) > _KEEP_COUNT:
            self._removal = threading.Thread(target=_remove, args=(self._paths.pop(0),))
            self._removal.start()
        self._paths.append(os.path.join(self.root, f"step-{step:08d}{self.suffix}"))
        return self._paths[-1]

    def _join_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def settle(self) -> None:
        self._join_removal()


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


class _TorchSave(_OwnDirectoryWay):
    settings = "torch.save to a temporary name, fsync, rename, fsync of the directory"
    suffix = ".pt"

    def save(self, step: int) -> None:
        path = self._next_path(step)
        pending_path = os.path.join(self.root, f".{os.path.basename(path)}")
        torch.save(self.training.state(step), pending_path)
        _sync(pending_path)
        os.rename(pending_path, path)
        _sync(self.root)


class _Dcp(_OwnDirectoryWay):
    """dcp.async_save, with a FileSystemWriter that syncs its files."""

    settings = "thread, a fresh blocking staging copy for each save (the defaults)"
    in_process = False
    staging: tuple[bool, bool] | None = None  # shared memory, in a thread of its own; None: async_save's own stager

    def __init__(self, root: str, training: Training, options: Options) -> None:
        super().__init__(root, training, options)
        warnings.filterwarnings("ignore", module="torch.distributed")  # that there is one process only, and the like
        try:
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
        except ImportError as error:
            raise Unavailable(f"this torch has no torch.distributed.checkpoint with async_save ({error})") from error
        self._dcp: Any = dcp
        self._type = AsyncCheckpointerType.PROCESS if self.in_process else AsyncCheckpointerType.THREAD
        self._stager: Any = None
        if self.staging is not None:
            try:
                from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
            except ImportError as error:
                raise Unavailable(f"this torch's DCP has no DefaultStager ({error})") from error
            shared, threaded = self.staging
            # Pinned memory and non-blocking copies are for GPUs, and refused without one.
            self._stager = DefaultStager(StagingOptions(False, shared, threaded, False))
        if self.in_process:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            torch.multiprocessing.set_sharing_strategy("file_system")  # one descriptor per tensor is too many
            distributed: Any = torch.distributed
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        self._wait_written()  # it is the caller who must not start a second one
        answer = self._dcp.async_save(
            self.training.state(step),
            storage_writer=self._dcp.FileSystemWriter(self._next_path(step), sync_files=True),
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        if isinstance(answer, Future):
            self._written = answer
        else:
            self._staged, self._written = answer.staging_completion, answer.upload_completion

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def _wait_written(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None
            _sync(self.root)

    def settle(self) -> None:
        self.before_update()
        self._wait_written()
        super().settle()

    def finish(self) -> None:
        self.settle()
        if self._stager is not None:
            self._stager.close()
        if self.in_process:
            torch.distributed.destroy_process_group()


class _DcpCached(_Dcp):
    settings = "thread, one kept DefaultStager, blocking copies into the same memory"
    staging = (False, False)


class _DcpStaged(_Dcp):
    settings = "thread, one kept DefaultStager that copies in a thread, awaited before the update"
    staging = (False, True)


class _DcpProcess(_Dcp):
    settings = "process, one kept DefaultStager that copies into shared memory in a thread, awaited before the update"
    staging = (True, True)
    in_process = True


def sync_checkpoint(arguments: Any) -> None:
    """Make what torch_checkpointing wrote durable, which it leaves to its users; runs in its writing process."""
    for directory, _, names in os.walk(arguments.path):
        for name in names:
            _sync(os.path.join(directory, name))
        _sync(directory)


def sync_parent(arguments: Any) -> None:
    """Make a renamed checkpoint's name durable; runs in torch_checkpointing's writing process."""
    _sync(os.path.dirname(arguments.path))


class _TorchCheckpointing(_OwnDirectoryWay):
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


class _Fastpersist(Way):
    settings = "fp.Checkpointer(root, optimizer=optimizer, keep=2)"

    def __init__(self, root: str, training: Training, options: Options) -> None:
        super().__init__(root, training, options)
        self._checkpointer = fp.Checkpointer(
            root,
            optimizer=training.optimizer,
            keep=_KEEP_COUNT,
            max_host_bytes=options.max_host_bytes,
            engine=options.engine,
        )
        self._last: Any = None

    def save(self, step: int) -> None:
        self._last = self._checkpointer.save(step, self.training.state(step))

    def settle(self) -> None:
        self._checkpointer.wait()
        if self._last is not None and self._last.skipped():
            raise RuntimeError("the Checkpointer skipped the last save")

    def finish(self) -> None:
        self.settle()
        self._checkpointer.close()

    def report(self) -> list[dict[str, Any]]:
        names = "stall_s capture_s plan_s write_s sync_s commit_s bytes bytes_by_writer bytes_at_gate".split()
        names += ["bytes_before_return", "engine", "error"]
        return [{name: getattr(stats, name, None) for name in names} for stats in self._checkpointer.stats()]


class _FastpersistUnpaced(_Fastpersist):
    settings = "as the other, writing as fast as it can"

    def save(self, step: int) -> None:
        paced = pacing.PACE_SHARE  # no option: users need none, a measurement of pacing does
        pacing.PACE_SHARE = 0.0
        try:
            super().save(step)
        finally:
            pacing.PACE_SHARE = paced


class _FastpersistFile(_OwnDirectoryWay):
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
    "torch-save": _TorchSave,
    "dcp-thread": _Dcp,
    "dcp-cached": _DcpCached,
    "dcp-staged": _DcpStaged,
    "dcp-process": _DcpProcess,
    "tck": _TorchCheckpointing,
    "tck-2": _TorchCheckpointing2,
    "fastpersist": _Fastpersist,
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
