"""What the ranks of dcp.py do: hold a sharded state, save and load it in one way or another, and say what it cost.

Ours, torch's own storage writer and stagers, and torch_checkpointing, each with the settings that serve it best on a
CPU. In which order they take turns, and what is made of the times, is not decided here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ranks_parts as parts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from overlap_ways import sync_checkpoint, sync_parent
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistSavePlanner, FastPersistWriter

__all__ = [
    "ASYNC_WAYS",
    "LOAD_WAYS",
    "SAVE_WAYS",
    "SAVE_WAY_FOR_LOAD",
    "close_async",
    "digest",
    "forget",
    "hold_shards",
    "load",
    "save",
    "save_async",
    "start_async",
    "why_not",
]

_MIB = 1 << 20
_SEED = 11
_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Sharded(parts.Here):
    """A rank with its shards.

    Attributes:
        state: Of a model and its optimizer, as torch's get_state_dict nests them, or flat: DTensors, on a single rank
            plain tensors; and a number.
        optimizer: Owns the tensors.
        resident_bytes: Of the process with the state alone.
        ways: What was started, by name.
    """

    optimizer: torch.optim.Optimizer
    resident_bytes: int
    ways: dict[str, Any]


def hold_shards(here: _Sharded, size_bytes: int, count: int, flat: bool = False) -> int:
    """Make this rank's shards of the state, nested or `flat`; return the bytes of the whole."""
    mesh = init_device_mesh("cpu", (count,)) if count > 1 else None
    column_count = 1024
    layer_count = max(2, min(48, size_bytes // (4 * _MIB)))
    row_count = size_bytes // layer_count // 3 // 4 // column_count
    generator = torch.Generator().manual_seed(_SEED + here.rank)
    total_bytes = 0

    def shard_of(rows: int) -> torch.Tensor:
        chunk_count = -(-rows // count)
        low = min(rows, chunk_count * here.rank)
        local = torch.rand(min(rows, low + chunk_count) - low, column_count, generator=generator)
        if mesh is None:
            return local
        shape, stride = (rows, column_count), (column_count, 1)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    model: dict[str, torch.Tensor] = {}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for layer in range(layer_count):
        rows = max(count, row_count + 16 * (layer - layer_count // 2))
        total_bytes += rows * column_count * 4 * (1 + len(_MOMENTS))
        name = f"layers.{layer}.weight"
        model[name] = shard_of(rows)
        moments[name] = {moment: shard_of(rows) for moment in _MOMENTS}
    here.state = {"model": model, "optimizer": {"state": moments}, "step": 7}
    if flat:
        named = {f"{name}.{moment}": tensor for name, own in moments.items() for moment, tensor in own.items()}
        here.state = {**model, **named, "step": 7}
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in model.items()}
    here.optimizer = torch.optim.AdamW(weights.values())
    for name, weight in weights.items():
        here.optimizer.state[weight] = moments[name]
    here.ways = {}
    here.resident_bytes = _resident("VmRSS")
    return total_bytes


def digest(here: _Sharded) -> float:
    """Return a number that other shards would not give."""
    return sum(float(_local(tensor).double().sum()) for tensor in _tensors(here))


def forget(here: _Sharded) -> None:
    """Fill the shards with something else, so that a load has to bring them back."""
    for tensor in _tensors(here):
        _local(tensor).fill_(-1)


def _tensors(here: _Sharded) -> list[torch.Tensor]:
    return [value for value in tree_leaves(here.state) if isinstance(value, torch.Tensor)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _resident(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@contextlib.contextmanager
def _quietly() -> Any:
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        yield


def _span_of(here: _Sharded, count: int, do: Callable[[], object]) -> tuple[parts.Span, int]:
    """Return when it began and ended, and how much larger the process was at most than with the state alone."""
    here.together(count)
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # the peak begins here
    start_s = time.monotonic()
    with _quietly():
        do()
    end_s = time.monotonic()
    return (start_s, end_s), _resident("VmHWM") - here.resident_bytes


# ------------------------------------------------------------------------------------------------ torch_checkpointing


def _checkpointing_manager(here: _Sharded, *, is_async: bool) -> Any:
    """Return torch_checkpointing's manager, with its best settings, and with the fsync that it leaves to its users.

    It writes a file of each entry of the state, so two of these are large: one for each thread.
    """
    from torch_checkpointing import CheckpointManager  # type: ignore[import-not-found]
    from torch_checkpointing import config as settings  # type: ignore[import-not-found]
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig  # type: ignore[import-not-found]
    from torch_checkpointing.storage import filesystem  # type: ignore[import-not-found]

    if is_async:
        _allow_processes(here)
    saver = settings.AsyncCheckpointSaverConfig if is_async else settings.SyncCheckpointSaverConfig
    return CheckpointManager(
        CheckpointManager.Config(
            save=saver(writer_config=CheckpointWriterConfig(file_write_max_threads=2)),
            storage_config=filesystem.LocalFileSystemStorageConfig(use_direct_io=False),  # which fails on ext4
            pre_finalize_callback=sync_checkpoint,
            finalize_callback=sync_parent,
        )
    )


def why_not(here: _Sharded, way: str) -> str:
    """Say why a way cannot be tried here; nothing if it can."""
    if way == "torch_checkpointing":
        try:
            import torch_checkpointing  # type: ignore[import-not-found]  # noqa: F401
        except ImportError as error:
            return f"{error}: pip install torch_checkpointing (needs torch >= 2.11)"
    if way in ASYNC_WAYS[2:] and way.startswith("stock"):
        try:
            from torch.distributed.checkpoint.staging import DefaultStager  # noqa: F401
        except ImportError as error:
            return f"this torch's DCP has no DefaultStager ({error})"
    return ""


def _kept_manager(here: _Sharded) -> Any:
    """Return the manager that saves and loads at once."""
    if "torch_checkpointing at once" not in here.ways:
        here.ways["torch_checkpointing at once"] = _checkpointing_manager(here, is_async=False)
    return here.ways["torch_checkpointing at once"]


def _allow_processes(here: _Sharded) -> None:
    """Let this process, which the benchmark has made as one that ends with it, have processes of its own."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.multiprocessing.set_sharing_strategy("file_system")  # one descriptor per tensor is too many
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("LOCAL_RANK", str(here.rank))):
        os.environ.setdefault(name, value)


# ------------------------------------------------------------------------------------------------ save and load

SAVE_WAYS = ("fastpersist", "stock, 1 thread", "stock, 2 threads", "torch_checkpointing")
LOAD_WAYS = ("fastpersist", "stock", "torch_checkpointing")
SAVE_WAY_FOR_LOAD = {"stock": "stock, 1 thread"}
"""By which way something is saved for a way to load; else its own."""


def save(here: _Sharded, path: str, count: int, way: str) -> tuple[parts.Span, int]:
    """Save the state in one of the ways."""
    if way == "torch_checkpointing":
        manager = _kept_manager(here)
        return _span_of(here, count, lambda: manager.save(path, here.state))
    if way == "fastpersist":
        writer: Any = FastPersistWriter(path)
    else:
        writer = FileSystemWriter(path, thread_count=2 if "2 threads" in way else 1)
    planner = here.ways.get(f"planner, {way}")
    if planner is None:  # kept, so that what has not changed is planned once: each way's best setting
        kind = FastPersistSavePlanner if way == "fastpersist" else DefaultSavePlanner
        planner = here.ways[f"planner, {way}"] = kind(enable_plan_caching=True)
    save_it = functools.partial(dcp.save, here.state, storage_writer=writer, planner=planner, no_dist=count == 1)
    return _span_of(here, count, save_it)


def load(here: _Sharded, path: str, count: int, way: str) -> tuple[parts.Span, int]:
    """Load the state in one of the ways, over what it is."""
    if way == "torch_checkpointing":
        manager = _kept_manager(here)
        return _span_of(here, count, lambda: manager.load(path, into=here.state))
    reader: Any = FastPersistReader(path) if way == "fastpersist" else FileSystemReader(path)
    return _span_of(here, count, functools.partial(dcp.load, here.state, storage_reader=reader, no_dist=count == 1))


# ------------------------------------------------------------------------------------------------ async_save


class _AsyncWay:
    """Saves in the background. One thread calls all methods; what is written is durable when `finish` returns."""

    load_way = "stock"

    def __init__(self, here: _Sharded, count: int) -> None:
        self.here = here
        self.group: Any = here.groups[count]

    def begin(self, path: str) -> None:
        """Save the state; return when training may go on up to the next step of the optimizer."""
        raise NotImplementedError

    def step(self) -> None:
        """Take a step, which has nothing to do but to wait until the state may change."""
        self.here.optimizer.step()

    def finish(self) -> None:
        """Wait until the checkpoint is durable."""
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back."""


class _Fastpersist(_AsyncWay):
    """FastPersistWriter(optimizer=optimizer), one for all saves."""

    load_way = "fastpersist"

    def __init__(self, here: _Sharded, count: int) -> None:
        super().__init__(here, count)
        self._writer = FastPersistWriter(optimizer=here.optimizer)

    def begin(self, path: str) -> None:
        self._written: Any = dcp.async_save(
            self.here.state,
            checkpoint_id=path,
            storage_writer=self._writer,
            planner=FastPersistSavePlanner(),
            process_group=self.group,
        )

    def finish(self) -> None:
        self._written.result()


class _Stock(_AsyncWay):
    """A fresh copy for each save, in async_save."""

    staging: tuple[bool, bool] | None = None  # shared memory, in a thread of its own; None: async_save's own stager
    in_process = False

    def __init__(self, here: _Sharded, count: int) -> None:
        super().__init__(here, count)
        self._stager: Any = None
        self._staged: Future[Any] | None = None
        if self.staging is not None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            # Pinned memory and non-blocking copies are for GPUs, and refused without one.
            self._stager = DefaultStager(StagingOptions(False, *self.staging, False))
        if self.in_process:
            _allow_processes(here)

    def begin(self, path: str) -> None:
        kind = AsyncCheckpointerType.PROCESS if self.in_process else AsyncCheckpointerType.THREAD
        more = {} if self._stager is None else {"async_stager": self._stager}
        answer: Any = dcp.async_save(
            self.here.state,
            storage_writer=FileSystemWriter(path, sync_files=True),
            process_group=self.group,
            async_checkpointer_type=kind,
            **more,
        )
        self._staged = None if isinstance(answer, Future) else answer.staging_completion
        self._written = answer if isinstance(answer, Future) else answer.upload_completion

    def step(self) -> None:
        if self._staged is not None:
            self._staged.result()
        super().step()

    def finish(self) -> None:
        self._written.result()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class _StockKept(_Stock):
    """A kept DefaultStager, which copies in async_save into the same memory."""

    staging = (False, False)


class _StockThread(_Stock):
    """A kept DefaultStager, which copies in a thread; awaited before the step."""

    staging = (False, True)


class _StockProcess(_Stock):
    """As the thread, into shared memory, which a process of its own writes."""

    staging = (True, True)
    in_process = True


class _TorchCheckpointing(_AsyncWay):
    """Staging in a thread, writing in a process, the step under its lock; prewarmed."""

    load_way = "torch_checkpointing"

    def __init__(self, here: _Sharded, count: int) -> None:
        super().__init__(here, count)
        self._manager = _checkpointing_manager(here, is_async=True)
        self._manager.prewarm_staging(here.state)

    def begin(self, path: str) -> None:
        self._written: Any = self._manager.save(path, self.here.state)

    def step(self) -> None:
        with self._manager.lock():
            super().step()

    def finish(self) -> None:
        self._written.result()

    def close(self) -> None:
        self._manager.close()


_ASYNC: dict[str, Callable[[_Sharded, int], _AsyncWay]] = {
    "fastpersist": _Fastpersist,
    "stock": _Stock,
    "stock, kept stager": _StockKept,
    "stock, staging thread": _StockThread,
    "stock, process": _StockProcess,
    "torch_checkpointing": _TorchCheckpointing,
}
ASYNC_WAYS = tuple(_ASYNC)


def start_async(here: _Sharded, count: int, way: str) -> str:
    """Make a way ready; return in which one its checkpoints are loaded."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what others have left is not its
    here.resident_bytes = _resident("VmRSS")  # and what it keeps from one save to the next counts
    with _quietly():
        here.ways[way] = _ASYNC[way](here, count)
    return str(here.ways[way].load_way)


def save_async(
    here: _Sharded, path: str, count: int, way: str, between_s: float, forgets: bool
) -> tuple[parts.Span, int, float]:
    """Save in the background: nothing is done for a while, then comes the next step, then the checkpoint is awaited.

    Args:
        here: This rank.
        path: Of the checkpoint.
        count: Of ranks.
        way: Which was started.
        between_s: Between the save and the step, where forward and backward would be.
        forgets: Change the whole state as soon as the step has been taken.

    Returns:
        From the call until it was durable; the growth as of `save`; and how long the training stood still.
    """
    running: _AsyncWay = here.ways[way]
    stalls_s = []

    def do() -> None:
        start_s = time.monotonic()
        running.begin(path)
        stalls_s.append(time.monotonic() - start_s)
        time.sleep(between_s)
        start_s = time.monotonic()
        running.step()
        stalls_s.append(time.monotonic() - start_s)
        if forgets:
            forget(here)
        running.finish()

    span, growth_bytes = _span_of(here, count, do)
    return span, growth_bytes, sum(stalls_s)


def close_async(here: _Sharded, way: str) -> None:
    """End what was started; its memory is no burden for the next way."""
    with _quietly():
        here.ways.pop(way).close()
    dist.barrier()
