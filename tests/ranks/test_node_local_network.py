"""Two ranks on two hosts, as far as one kernel can have them: networks of their own, joined by a cable, and mounts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.sandbox import needs_root
from support.two_hosts import ADDRESSES, two_hosts

import fastpersist as fp

WORK = """
import contextlib, datetime, os, sys
from pathlib import Path
import torch, torch.distributed as dist
torch.set_num_threads(1)
from support.rank_faults import empty_disk_over
from support.store_runs import resume, step_path, train
rank, root, address = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
with empty_disk_over(root) if rank else contextlib.nullcontext():
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    train(rank, 2, [root, root], 2)
    assert (step_path(root, 2) / f"state.pt.part-{rank:05d}").exists()
    assert not (step_path(root, 2) / f"state.pt.part-{1 - rank:05d}").exists()
    assert resume(rank, 2, [root, root]) == 2
    dist.barrier()
print("done", flush=True)
os._exit(0)
"""


@needs_root
def test_two_hosts_save_parts_over_the_network_and_load_them(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": ADDRESSES[0],  # as torchrun sets it
    }
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(two_hosts())
        processes = []
        for rank, name in enumerate(names):
            words = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-c",
                WORK,
                str(rank),
                str(root),
                f"{ADDRESSES[0]}:29555",
            ]
            process = subprocess.Popen(
                words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.callback(process.kill)
            processes.append(process)
        told = [process.communicate(timeout=60) for process in processes]
    if any("no mount namespace" in error for _, error in told):
        pytest.skip("no mount namespace")
    assert [output for output, _ in told] == ["done\n"] * 2, told
    assert fp.Checkpointer(root).steps() == [1, 2]
