"""The memory that weights are read to: huge pages where the kernel has them, and given back when it says so."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest
import torch

from fastpersist.streaming.reading import Memory, SparseMemory, new_memory

MIB = 1 << 20


def flags_of(address: int) -> set[str]:
    """Return the flags of the mapping around an address, as /proc/self/smaps has them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    pytest.fail(f"no mapping has the address {address:x}")


@pytest.mark.parametrize("for_children", [True, False])
def test_memory_is_of_a_kind_that_gets_huge_pages(for_children: bool) -> None:
    memory = new_memory(4 * MIB, torch.device("cpu"), for_children=for_children)
    flags = flags_of(memory.data_ptr())
    assert "sh" not in flags  # the kernel's shmem_enabled is "never" by default, whatever is advised
    if Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        assert "hg" in flags
    assert ("dc" in flags) is not for_children


def test_sparse_memory_that_is_cleared_is_zeros_again() -> None:
    memory = SparseMemory(2 * mmap.PAGESIZE)
    (first, second) = memory.cut([mmap.PAGESIZE, mmap.PAGESIZE])
    second.fill_(7)
    memory.clear()
    assert not torch.count_nonzero(second)
    assert not torch.count_nonzero(first)


def resident_bytes(memory: torch.Tensor) -> int:
    """Return how much of a mapping has pages; its first address has a line in smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= memory.data_ptr() < end
        elif inside and first == "Rss:":
            return int(line.split()[1]) << 10
    pytest.fail("no such mapping")


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a thread would take the processor from others")
def test_the_kernel_clears_memory_before_anything_is_read_to_it() -> None:
    size_bytes = 128 * MIB
    memory = Memory(size_bytes, torch.device("cpu"))
    memory.clear_ahead([])
    ((ring,),) = [memory.in_ring([size_bytes])[1]]  # type: ignore[index]
    deadline = time.monotonic() + 60
    while resident_bytes(ring) < size_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert resident_bytes(ring) >= size_bytes
