"""Runs a function on several ranks of a gloo process group that may use CUDA: processes of their own, not forks.

run_spawned(2, work, tmp_path)      # work(rank, folder), of a module in support/; what a rank raises fails the test

Rank n has GPU n, or n modulo how many there are: on a machine with one GPU all ranks share it.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from support.gpu_device import DEVICE, ON_CUDA, PATIENCE_S

__all__ = ["device_of", "run_spawned"]

Work = Callable[[int, Path], None]

_TIMEOUT_S = 2 * PATIENCE_S


def device_of(rank: int) -> torch.device:
    """Return the device of a rank."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if ON_CUDA else DEVICE


def run_spawned(count: int, work: Work, folder: Path) -> None:
    """Run work(rank, folder) on so many ranks; fail the test if one raises, dies, or still runs after `_TIMEOUT_S`."""
    store = folder / f"store-{work.__name__}-{count}"
    context = torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        _be_a_rank, (count, work, folder, store), count, join=False, start_method="spawn"
    )
    deadline_s = time.monotonic() + _TIMEOUT_S
    try:
        while not context.join(max(0.0, deadline_s - time.monotonic())):
            if time.monotonic() > deadline_s:
                pytest.fail(f"ranks still ran after {_TIMEOUT_S:g} s", pytrace=False)
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _be_a_rank(rank: int, count: int, work: Work, folder: Path, store: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", FASTPERSIST_CONFIG="")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.dump_traceback_later(PATIENCE_S)
    torch.set_num_threads(1)
    if ON_CUDA:
        torch.cuda.set_device(device_of(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=PATIENCE_S / 2),
    )
    work(rank, folder)
    dist.barrier()  # so that no connection breaks under the others
    dist.destroy_process_group()
