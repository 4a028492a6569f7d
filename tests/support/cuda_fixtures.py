"""The fixtures of the tests of the CUDA driver's double: a test file takes those it needs by name.

    from support import cuda_fixtures

    driver = cuda_fixtures.driver

What each of them needs has to be taken, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cuda_calls import SIZE, Driver, HostMemory, pinned_memory
from support.cuda_double import CudaDouble, checked_double


@pytest.fixture
def cuda() -> Iterator[CudaDouble]:
    with checked_double() as double:
        yield double


@pytest.fixture
def driver(cuda: CudaDouble) -> Iterator[Driver]:
    """The driver, with a context of device 0 current."""
    driver = Driver(cuda.library)
    assert driver.Init(0) == 0
    with driver.current():
        yield driver


@pytest.fixture
def pinned(driver: Driver) -> Iterator[HostMemory]:
    with pinned_memory(driver) as memory:
        yield memory


@pytest.fixture
def device_memory(cuda: CudaDouble) -> Iterator[int]:
    address = cuda.alloc(SIZE, device=0)
    yield address
    cuda.clear()
    cuda.free(address)
