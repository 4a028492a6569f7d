"""The code of ranks with a sharded state: they save and load it through torch.distributed.checkpoint (DCP), or others.

Our storage writer and reader, DCP's own, and torch_checkpointing, each with its best settings on a CPU. `bench overlap`
has the ways of saving in the background. `ranks.sharded` decides the order.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fastpersist.cli.bench.overlap.further_ways import (
    DcpProcessWay,
    TorchCheckpointingWay,
    checkpointing_manager,
)
from fastpersist.cli.bench.overlap.ways import DcpKeptWay, DcpStagedWay, DcpWay, Options, Trained, Unavailable, Way
from fastpersist.cli.bench.ranks.processes import Here, Span
from fastpersist.cli.bench.states import flatten
from fastpersist.cli.bench.worker import forget_peak, resident_bytes
from fastpersist.dcp.save_planner import FastPersistSavePlanner
from fastpersist.dcp.storage_reader import FastPersistReader
from fastpersist.dcp.storage_writer import FastPersistWriter

__all__ = [
    "ASYNC_WAYS",
    "LOAD_WAYS",
    "OURS",
    "SAVE_WAYS",
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
_COLUMN_COUNT = 1024

OURS, _PEER = "FastPersistWriter", "torch_checkpointing"
SAVE_WAYS = (OURS, "DCP, 1 thread", "DCP, 2 threads", _PEER)
LOAD_WAYS = {OURS: OURS, "DCP": "DCP, 1 thread", _PEER: _PEER}
"""By the way that loads: the one that has saved."""


class _Sharded(Here):
    """A rank with its shards.

    Attributes:
        state: The state of a model and its optimizer (DTensors, and a number): nested as by get_state_dict, or flat.
        training: What ways of saving in the background see of the state.
        resident_bytes: The resident memory of the process when it holds nothing but the state.
        kept: What a way keeps from one save to the next, by name.
    """

    training: _Training
    resident_bytes: int
    kept: dict[str, Any]


class _Training:
    """The shards as a training that ways of saving can save."""

    def __init__(self, here: _Sharded, optimizer: torch.optim.Optimizer) -> None:
        self._here, self.optimizer = here, optimizer

    def state(self, step: int) -> dict[str, Any]:
        """Return the live state, whatever the step is."""
        return self._here.state


def hold_shards(here: _Sharded, size_bytes: int, count: int, flat: bool = False) -> int:
    """Make this rank's shards of the state, nested or `flat`; return the bytes of the whole."""
    warnings.simplefilter("ignore")  # of peers, on how they are used; they are used as intended
    mesh = init_device_mesh("cpu", (count,))
    layer_count = max(2, min(48, size_bytes // (4 * _MIB)))
    row_count = size_bytes // layer_count // 3 // 4 // _COLUMN_COUNT
    generator = torch.Generator().manual_seed(_SEED + here.rank)
    total_bytes = 0

    def shard_of(rows: int) -> torch.Tensor:
        chunk_count = -(-rows // count)
        low = min(rows, chunk_count * here.rank)
        local = torch.rand(min(rows, low + chunk_count) - low, _COLUMN_COUNT, generator=generator)
        shape, stride = torch.Size((rows, _COLUMN_COUNT)), (_COLUMN_COUNT, 1)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    model: dict[str, torch.Tensor] = {}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for layer in range(layer_count):
        rows = max(count, row_count + 16 * (layer - layer_count // 2))
        total_bytes += rows * _COLUMN_COUNT * 4 * (1 + len(_MOMENTS))
        name = f"layers.{layer}.weight"
        model[name] = shard_of(rows)
        moments[name] = {moment: shard_of(rows) for moment in _MOMENTS}
    here.state = {"model": model, "optimizer": {"state": moments}, "step": 7}
    if flat:
        here.state = {**flatten(here.state), "step": 7}
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in model.items()}
    optimizer = torch.optim.AdamW(weights.values())
    for name, weight in weights.items():
        optimizer.state[weight] = moments[name]
    here.training = _Training(here, optimizer)
    here.kept = {}
    here.resident_bytes = resident_bytes("VmRSS")
    return total_bytes


def _locals(here: _Sharded) -> list[torch.Tensor]:
    return [tensor.to_local() for tensor in flatten(here.state).values() if isinstance(tensor, DTensor)]


def digest(here: _Sharded) -> float:
    """Return a number that other shards would not give."""
    return sum(float(tensor.double().sum()) for tensor in _locals(here))


def forget(here: _Sharded) -> None:
    """Fill the shards with something else, so that a load has to bring them back."""
    for tensor in _locals(here):
        tensor.fill_(-1)


def why_not(here: _Sharded, way: str) -> str:
    """Say why a way cannot be tried here; nothing if it can."""
    try:
        if way == _PEER:
            checkpointing_manager(is_async=False)
        elif way in _ASYNC and getattr(_ASYNC[way][0], "staging", None) is not None:
            from torch.distributed.checkpoint.staging import DefaultStager  # noqa: F401
    except (ImportError, Unavailable) as reason:
        return str(reason)
    return ""


def _span_of(here: _Sharded, count: int, do: Callable[[], object]) -> tuple[Span, int]:
    """Return when it began and ended, and how much larger the process was at most than with the state alone."""
    here.together(count)
    forget_peak()
    start_s = time.monotonic()
    do()
    end_s = time.monotonic()
    return (start_s, end_s), resident_bytes("VmHWM") - here.resident_bytes


def _keep(here: _Sharded, name: str, make: Callable[[], Any]) -> Any:
    """Return what was made at the first call."""
    if name not in here.kept:
        here.kept[name] = make()
    return here.kept[name]


# --- save and load


def save(here: _Sharded, path: str, count: int, way: str) -> tuple[Span, int]:
    """Save the state in one of SAVE_WAYS; return when, and by how much the process grew."""
    if way == _PEER:
        manager = _keep(here, "manager", lambda: checkpointing_manager(is_async=False))
        return _span_of(here, count, lambda: manager.save(path, here.state))
    writer: Any = FastPersistWriter(path)
    if way != OURS:
        writer = FileSystemWriter(path, thread_count=2 if "2 threads" in way else 1)
    # Kept, so that what has not changed is planned once: each way's best setting.
    kind = FastPersistSavePlanner if way == OURS else DefaultSavePlanner
    planner = _keep(here, way, lambda: kind(enable_plan_caching=True))
    return _span_of(
        here, count, functools.partial(state_dict_saver.save, here.state, storage_writer=writer, planner=planner)
    )


def load(here: _Sharded, path: str, count: int, way: str) -> tuple[Span, int]:
    """Load the state in one of LOAD_WAYS, over what it is; return when, and by how much the process grew."""
    if way == _PEER:
        manager = _keep(here, "manager", lambda: checkpointing_manager(is_async=False))
        return _span_of(here, count, lambda: manager.load(path, into=here.state))
    reader: Any = FastPersistReader(path) if way == OURS else FileSystemReader(path)
    return _span_of(here, count, functools.partial(state_dict_loader.load, here.state, storage_reader=reader))


# --- in the background


class _FastPersistWay(DcpWay):
    """dcp.async_save with our storage writer, one for all saves."""

    settings = "FastPersistWriter(optimizer=optimizer)"

    def __init__(self, root: str, training: Trained, options: Options) -> None:
        super().__init__(root, training, options)
        self._writer = FastPersistWriter(optimizer=training.optimizer)

    def save(self, step: int) -> None:
        self._wait_written()
        self._written = self._dcp.async_save(
            self.training.state(step),
            checkpoint_id=self._next_path(step),
            storage_writer=self._writer,
            planner=FastPersistSavePlanner(),
            process_group=self.options.process_group,
        )


_ASYNC: dict[str, tuple[Callable[[str, Trained, Options], Way], str]] = {
    OURS: (_FastPersistWay, OURS),
    "DCP": (DcpWay, "DCP"),
    "DCP, stager kept": (DcpKeptWay, "DCP"),
    "DCP, staging thread": (DcpStagedWay, "DCP"),
    "DCP, process": (DcpProcessWay, "DCP"),
    _PEER: (TorchCheckpointingWay, _PEER),
}
ASYNC_WAYS = {name: load_way for name, (_, load_way) in _ASYNC.items()}
"""By the way that saves in the background: the one of LOAD_WAYS that loads that."""


def start_async(here: _Sharded, root: str, count: int, way: str) -> None:
    """Make a way ready to save below a directory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what others have left is not its
    here.resident_bytes = resident_bytes("VmRSS")  # and what it keeps from one save to the next counts
    torch.multiprocessing.set_sharing_strategy("file_system")  # one descriptor per tensor is too many
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("LOCAL_RANK", str(here.rank))):
        os.environ.setdefault(name, value)  # for processes that a way starts
    here.kept["async"] = _ASYNC[way][0](root, here.training, Options(process_group=here.groups[count]))


def save_async(here: _Sharded, count: int, step: int, between_s: float, forgets: bool) -> tuple[Span, int, float]:
    """Save in the background: nothing is done for a while, then comes the next step, then the checkpoint is awaited.

    Args:
        here: This rank.
        count: The number of ranks.
        step: The checkpoint's step.
        between_s: Seconds between the save and the optimizer's step, where forward and backward would be.
        forgets: Change the whole state as soon as the step has been taken.

    Returns:
        The time from the call until it was durable; the growth as of `save`; and how long the training stood still.
    """
    way: Way = here.kept["async"]
    stalls_s = []

    def do() -> None:
        start_s = time.monotonic()
        way.save(step)
        stalls_s.append(time.monotonic() - start_s)
        time.sleep(between_s)
        start_s = time.monotonic()
        way.before_update()
        with way.update_guard():
            here.training.optimizer.step()
        stalls_s.append(time.monotonic() - start_s)
        if forgets:
            forget(here)
        way.settle()

    span, growth_bytes = _span_of(here, count, do)
    return span, growth_bytes, sum(stalls_s)


def close_async(here: _Sharded) -> None:
    """End what was started; its memory is no burden for the next way."""
    here.kept.pop("async").finish()
    dist.barrier()
