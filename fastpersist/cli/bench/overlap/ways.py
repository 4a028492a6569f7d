"""The ways to save that are compared beside a training, each with its best settings.

A way saves the state of a training after a step, keeps the last checkpoints, and hears when the state is about to
change. All its files are durable when `finish` returns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import fastpersist
from fastpersist.cli.bench.save_rows import sync_path

__all__ = [
    "CheckpointerWay",
    "DcpKeptWay",
    "DcpStagedWay",
    "DcpWay",
    "Options",
    "OwnDirectoryWay",
    "TorchSaveWay",
    "Trained",
    "Unavailable",
    "Way",
]


class Trained(Protocol):
    """The view of a training that a way needs."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What owns the parameters."""

    def state(self, step: int) -> dict[str, Any]:
        """Return the state to save; its tensors are the live ones."""


class Unavailable(Exception):
    """This way cannot be tried here; the message says why and, if there is something, what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of some ways.

    Attributes:
        engine: The engine of fastpersist's ways.
        max_host_bytes: The option of the Checkpointer in fastpersist's ways.
        pins: DCP's stager pins its memory, and copies without blocking; only for tensors on a GPU.
        keep_count: Checkpoints that are kept.
        process_group: The group of the ranks that save together; None: this process saves alone.
    """

    engine: str = "auto"
    max_host_bytes: int | None = None
    pins: bool = False
    keep_count: int = 2
    process_group: Any = None


class Way:
    """Saves nothing; the others build on it. One thread calls all methods.

    Args:
        root: Empty directory that the way has for itself.
        training: What is to be saved.
        options: Settings for those ways that have some.
    """

    settings = "no checkpoint at all"

    def __init__(self, root: str, training: Trained, options: Options) -> None:
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

    def is_written(self) -> bool:
        """Tell whether another save would not have to wait for the last one."""
        return True

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


class OwnDirectoryWay(Way):
    """For ways that leave names, removal and order of saves to their caller: one save at a time.

    A way that writes in the background leaves in `_written` what is done when the save is durable.
    """

    suffix = ""

    def __init__(self, root: str, training: Trained, options: Options) -> None:
        super().__init__(root, training, options)
        self._written: Any = None
        self._paths: list[str] = []
        self._removal: threading.Thread | None = None

    def _next_path(self, step: int) -> str:
        """Return the path for a step, and let go of the oldest; the one before is complete by now.

        Removing takes a while on some file systems, so it does not take the training's time.
        """
        self._join_removal()
        if len(self._paths) > self.options.keep_count:
            self._removal = threading.Thread(target=_remove, args=(self._paths.pop(0),))
            self._removal.start()
        self._paths.append(os.path.join(self.root, f"step-{step:08d}{self.suffix}"))
        return self._paths[-1]

    def _join_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def _wait_written(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    def is_written(self) -> bool:
        """Tell whether the last save is durable."""
        return self._written is None or bool(self._written.done())

    def settle(self) -> None:
        """Wait until the last save is durable, and the oldest removed."""
        self._wait_written()
        self._join_removal()


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


class TorchSaveWay(OwnDirectoryWay):
    """torch.save, made durable as careful scripts do it; all of it inside `save`."""

    settings = "torch.save to a temporary name, fsync, rename, fsync of the directory"
    suffix = ".pt"

    def save(self, step: int) -> None:
        """Return when the file is durable."""
        path = self._next_path(step)
        pending_path = os.path.join(self.root, f".{os.path.basename(path)}")
        torch.save(self.training.state(step), pending_path)
        sync_path(pending_path)
        os.rename(pending_path, path)
        sync_path(self.root)


class DcpWay(OwnDirectoryWay):
    """dcp.async_save, with a FileSystemWriter that syncs its files."""

    settings = "thread, a fresh blocking staging copy for each save (the defaults)"
    in_process = False
    staging: tuple[bool, bool] | None = None  # shared memory, in a thread of its own; None: async_save's own stager

    def __init__(self, root: str, training: Trained, options: Options) -> None:
        super().__init__(root, training, options)
        warnings.filterwarnings("ignore", module="torch.distributed")  # that there is one process only, and the like
        try:
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
        except ImportError as error:
            raise Unavailable(f"this torch has no torch.distributed.checkpoint with async_save ({error})") from error
        self._dcp: Any = dcp
        self._type = AsyncCheckpointerType.PROCESS if self.in_process else AsyncCheckpointerType.THREAD
        self._stager = self._new_stager()
        if self.in_process:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            torch.multiprocessing.set_sharing_strategy("file_system")  # one descriptor per tensor is too many
            if options.process_group is None:
                distributed: Any = torch.distributed
                distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        self._staged: Future[Any] | None = None

    def _new_stager(self) -> Any:
        if self.staging is None:
            return None
        try:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        except ImportError as error:
            raise Unavailable(f"this torch's DCP has no DefaultStager ({error})") from error
        shared, threaded = self.staging
        # Pinned memory and non-blocking copies are refused without a GPU.
        return DefaultStager(StagingOptions(self.options.pins, shared, threaded, self.options.pins))

    def save(self, step: int) -> None:
        """Wait for the save before, as async_save leaves that to its caller, and begin this one."""
        self._wait_written()  # it is the caller who must not start a second one
        if self._stager is not None and not self._stager._state_dict_stager._deepcopy_dispatch:
            self._stager = self._new_stager()  # torch 2.11's is good for one save
        answer = self._dcp.async_save(
            self.training.state(step),
            storage_writer=self._dcp.FileSystemWriter(self._next_path(step), sync_files=True),
            process_group=self.options.process_group,
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        if isinstance(answer, Future):
            self._written = answer
        else:
            self._staged, self._written = answer.staging_completion, answer.upload_completion

    def before_update(self) -> None:
        """Wait until the state is staged."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def _wait_written(self) -> None:
        if self._written is not None:
            super()._wait_written()
            sync_path(self.root)

    def settle(self) -> None:
        """Wait for staging, upload, and removal."""
        self.before_update()
        super().settle()

    def finish(self) -> None:
        """Settle, and close what was kept."""
        self.settle()
        if self._stager is not None:
            self._stager.close()
        if self.in_process and self.options.process_group is None:
            torch.distributed.destroy_process_group()


class DcpKeptWay(DcpWay):
    """The same, without a fresh copy for each save."""

    settings = "thread, one kept DefaultStager, blocking copies into the same memory"
    staging = (False, False)


class DcpStagedWay(DcpWay):
    """The same, whose copies are made beside the next forward and backward."""

    settings = "thread, one kept DefaultStager that copies in a thread, awaited before the update"
    staging = (False, True)


class CheckpointerWay(Way):
    """fastpersist's own; the gate is in the optimizer's step."""

    settings = "fp.Checkpointer(root, optimizer=optimizer, keep=2)"

    def __init__(self, root: str, training: Trained, options: Options) -> None:
        super().__init__(root, training, options)
        self._checkpointer = fastpersist.Checkpointer(
            root,
            optimizer=training.optimizer,
            keep=options.keep_count,
            max_host_bytes=options.max_host_bytes,
            engine=options.engine,
        )
        self._last: Any = None

    def save(self, step: int) -> None:
        """Begin a save; the Checkpointer itself waits for the one before."""
        self._last = self._checkpointer.save(step, self.training.state(step))

    def is_written(self) -> bool:
        """Tell whether its writer is free."""
        return self._last is None or self._last.is_written()

    def settle(self) -> None:
        """Wait until all steps are published."""
        self._checkpointer.wait()
        if self._last is not None and self._last.skipped():
            raise RuntimeError("the Checkpointer skipped the last save")

    def finish(self) -> None:
        """Settle, and close it."""
        self.settle()
        self._checkpointer.close()

    def report(self) -> list[dict[str, Any]]:
        """Return its statistics of each save."""
        names = "stall_s capture_s plan_s write_s sync_s commit_s bytes bytes_by_writer bytes_at_gate".split()
        names += ["bytes_before_return", "engine", "error"]
        return [{name: getattr(stats, name, None) for name in names} for stats in self._checkpointer.stats()]
