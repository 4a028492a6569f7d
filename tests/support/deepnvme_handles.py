"""What the tests of DeepNVMe's names share: bytes, a file of them, and a handle of each class.

The fixtures are taken by name: `handle = deepnvme_handles.handle`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastpersist.integrations.deepnvme import aio_handle, gds_handle

Handle = aio_handle
SIZE = 100_003  # of no block


def some_bytes(size_bytes: int = SIZE, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def contents(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


@pytest.fixture(params=[aio_handle, gds_handle])
def handle(request: pytest.FixtureRequest, leak_check: None) -> Iterator[Handle]:
    made: Handle = request.param()
    yield made
    made._operations.close()  # what its end does; pytest holds it longer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(bytes(some_bytes().tolist()))
    return path
