"""Host memory of saves beside training: the copies stay within max_host_bytes, and the ring adds less than 50 MiB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_RUN = """
import gc, sys
import torch
import fastpersist as fp

def status_bytes(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

torch.set_num_threads(1)
parameters = [torch.nn.Parameter(torch.ones(1_000_000)) for _ in range(24)]
optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
gc.collect()
before_bytes = status_bytes("VmRSS:")
with fp.Checkpointer(sys.argv[1], optimizer=optimizer, keep=1, max_host_bytes=int(sys.argv[2])) as checkpointer:
    for step in range(3):
        checkpointer.save(step, {"optimizer": optimizer.state_dict(), "parameters": parameters})
        optimizer.step()
    checkpointer.wait()
    copied_bytes = max(stats.bytes_at_gate for stats in checkpointer.stats())
print(status_bytes("VmHWM:") - before_bytes, copied_bytes)
"""


@pytest.mark.parametrize("limit_mib", [0, 64])
def test_peak_is_the_limit_and_a_ring(limit_mib: int, tmp_path: Path) -> None:
    # Steps follow at once, so each gate copies all that it may of a state of 192 MB.
    limit_bytes = limit_mib << 20
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(tmp_path / "run"), str(limit_bytes)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    peak_bytes, copied_bytes = map(int, done.stdout.split())
    assert peak_bytes <= limit_bytes + (50 << 20)
    assert (copied_bytes > 0) == (limit_bytes > 0)
