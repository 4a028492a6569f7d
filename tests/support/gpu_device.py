"""The device that tests/gpu is about, and how its tensors are compared: on the host, bit by bit, sharing included.

Without a GPU these tests are skipped. FASTPERSIST_GPU_TESTS_ON=cpu rehearses those that make sense on the CPU, to find
mistakes in the tests themselves.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sameness import portrait

DEVICE = torch.device(os.environ.get("FASTPERSIST_GPU_TESTS_ON", "cuda:0"))
ON_CUDA = DEVICE.type == "cuda"

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        ON_CUDA and not torch.cuda.is_available(), reason="torch finds no CUDA device; only -m gpu shows one to tests"
    ),
]
"""What a file of tests/gpu sets as its pytestmark."""

needs_cuda = pytest.mark.skipif(not ON_CUDA, reason="nothing of this can be rehearsed on a CPU")

PATIENCE_S = 60.0
"""So long does a test wait for what should happen at once."""


def synchronize() -> None:
    """Wait for all that the device was told to do."""
    if ON_CUDA:
        torch.cuda.synchronize(DEVICE)


def keep_busy(milliseconds: int = 300) -> None:
    """Give the current stream something to do, so that what comes after it comes late. Nothing on a CPU."""
    if ON_CUDA:
        torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles, of some 1.5 GHz


def random_tensor(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers on the device, others for each seed."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def host_copy(obj: Any) -> Any:
    """Return an equal object whose tensors are all in host memory; those that share still do."""
    with io.BytesIO() as buffer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on dtypes and layouts that torch calls experimental
        torch.save(obj, buffer)
        buffer.seek(0)
        return torch.load(buffer, map_location="cpu", weights_only=False)


def host_portrait(obj: Any) -> Any:
    """Draw an object, wherever its tensors are; equal portraits are equal in every bit, stride and sharing."""
    return portrait(host_copy(obj))


def devices_in(obj: Any) -> list[str]:
    """Return the devices of all tensors, in order."""
    if isinstance(obj, torch.Tensor):
        return [str(obj.device)]
    if isinstance(obj, Mapping):
        return [device for item in obj.values() for device in devices_in(item)]
    if isinstance(obj, list | tuple):
        return [device for item in obj for device in devices_in(item)]
    return []


def run_python(code: str, directory: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a script in a process of its own, which must end with status 0; return what it printed.

    It knows `device`, has imported torch and fastpersist as fp, and starts in `directory`.
    """
    script = f"import torch\nimport fastpersist as fp\ndevice = torch.device({str(DEVICE)!r})\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=os.environ | {"FASTPERSIST_CONFIG": ""} | dict(environment or {}),
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
