"""The rows of `bench load`: fastpersist.load in its forms, and other readers of the same bytes.

Each row's clock runs from the call until all bytes are in memory; mapped files have every page touched. Outside of its
time, each result is checked to hold all bytes, and dropped before the next row.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import fastpersist
from fastpersist.cli.bench.rows import Row, Sample
from fastpersist.cli.bench.states import StateRecipe, flatten, tensor_bytes
from fastpersist.errors import StorageError
from fastpersist.transfer.reader import Extents, read_extents

__all__ = ["PageCache", "memcpy_rows", "own_load_rows", "peer_load_rows"]

_PAGE_BYTES = 4096
_DROP_CACHES = "/proc/sys/vm/drop_caches"


class PageCache:
    """Brings a file's pages into the state that a run wants, cold or warm, and keeps account of whether that worked.

    Args:
        warm: Read the file into the page cache, instead of dropping it from there.
        whole_machine: Drop what the kernel caches of other files and names, too, if the process may do that (root).
    """

    def __init__(self, *, warm: bool, whole_machine: bool) -> None:
        self._warm = warm
        self._whole_machine = whole_machine and not warm and os.access(_DROP_CACHES, os.W_OK)
        self._wrong_bytes_max = 0
        self._why_unchecked = ""

    def prepare(self, path: str) -> None:
        """Drop or fill, and look at the result."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self._warm:
                while os.read(fd, 1 << 24):
                    pass
            else:
                os.fsync(fd)  # dirty pages stay
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                if self._whole_machine:
                    with open(_DROP_CACHES, "w") as control:
                        control.write("3\n")
            self._check(fd)
        finally:
            os.close(fd)

    def _check(self, fd: int) -> None:
        """Ask mincore(2), which older kernels have as well, which pages of the file are in memory."""
        size_bytes = os.fstat(fd).st_size
        if not size_bytes:
            return
        pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
        with mmap.mmap(fd, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:  # not touched
            start = ctypes.c_char.from_buffer(mapped)
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size_bytes), pages)
            del start
        if failed:
            self._why_unchecked = os.strerror(ctypes.get_errno())
            return
        cached_count = int(torch.frombuffer(pages, dtype=torch.uint8).bitwise_and(1).sum(dtype=torch.int64))
        wrong_bytes = (len(pages) - cached_count if self._warm else cached_count) * mmap.PAGESIZE
        self._wrong_bytes_max = max(self._wrong_bytes_max, wrong_bytes)

    def describe(self) -> str:
        """Describe the preparation of each run, and the result of the check."""
        if self._warm:
            done, wanted, wrong = "file read into the page cache", "all of it was there", "were missing"
        else:
            also = " and drop_caches=3" if self._whole_machine else ""
            done = f"file dropped from the page cache by fsync + posix_fadvise(DONTNEED){also}"
            wanted, wrong = "none of it was left", "were left: NOT COLD"
        if self._why_unchecked:
            return f"before each run: {done}; not checked, as mincore fails: {self._why_unchecked}"
        found = wanted if not self._wrong_bytes_max else f"up to {self._wrong_bytes_max} bytes {wrong}"
        return f"before each run: {done}; checked each time: {found}"


def own_load_rows(recipe: StateRecipe, payload_bytes: int, engines: list[str]) -> list[Row]:
    """Return fastpersist's rows: auto, each of `engines`, verified, into existing tensors, safetensors.

    Args:
        recipe: The recipe of the state in the files, to build the target of load_into.
        payload_bytes: The bytes that each result must hold.
        engines: Names for `engine=`.
    """

    def row(name: str, suffix: str = ".pt", *, engine: str = "auto", **options: Any) -> Row:
        def run(path: str) -> Sample:
            seconds = _seconds_of_load(lambda: fastpersist.load(path, engine=engine, **options), payload_bytes)
            return Sample(seconds, payload_bytes, _engine_of(path, engine))

        return Row(name, "fastpersist", run, suffix)

    def run_load_into(path: str) -> Sample:
        target = recipe.build(random_numbers=False).tree

        def load_into() -> object:
            fastpersist.load_into(path, target)
            return target

        return Sample(_seconds_of_load(load_into, payload_bytes), payload_bytes, _engine_of(path, "auto"))

    return [
        row("fp.load"),
        *(row(f"fp.load, {engine}", engine=engine) for engine in engines),
        row("fp.load, verify=True", verify=True),
        Row("fp.load_into", "fastpersist", run_load_into),
        row("fp.load .safetensors", ".safetensors"),
    ]


def peer_load_rows(payload_bytes: int) -> list[Row]:
    """Return the rows of torch.load and safetensors."""

    def row(name: str, load: Callable[[str], Any], suffix: str = ".pt") -> Row:
        def run(path: str) -> Sample:
            return Sample(_seconds_of_load(lambda: load(path), payload_bytes), payload_bytes)

        return Row(name, "peer", run, suffix)

    rows = [
        row("torch.load", lambda path: torch.load(path, weights_only=True)),
        row(
            "torch.load(mmap=True), touched",
            lambda path: _touched(torch.load(path, weights_only=True, mmap=True)),
        ),
    ]
    name = "safetensors load_file, touched"
    if importlib.util.find_spec("safetensors") is None:
        return [*rows, Row(name, "peer", None, why_not="not installed: pip install safetensors")]
    from safetensors.torch import load_file

    return [*rows, row(name, lambda path: _touched(load_file(path)), ".safetensors")]


def memcpy_rows(size_bytes: int) -> list[Row]:
    """Return the limits of loads from the page cache: copies into fresh memory on huge pages, page faults included."""
    source = torch.ones(size_bytes, dtype=torch.uint8)

    def row(thread_count: int) -> Row:
        def run(_path: str) -> Sample:
            threads_before = torch.get_num_threads()
            torch.set_num_threads(thread_count)
            try:
                started_s = time.perf_counter()
                pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                pages.madvise(mmap.MADV_HUGEPAGE)
                torch.frombuffer(pages, dtype=torch.uint8).copy_(source)
                return Sample(time.perf_counter() - started_s, size_bytes)
            finally:
                torch.set_num_threads(threads_before)

        return Row(f"memcpy, {thread_count} thread{'s' if thread_count > 1 else ''}", "peer", run)

    return [row(1), row(2)]


def _seconds_of_load(load: Callable[[], Any], payload_bytes: int) -> float:
    started_s = time.perf_counter()
    result = load()
    elapsed_s = time.perf_counter() - started_s
    found_bytes = tensor_bytes(result)
    if found_bytes != payload_bytes:
        raise StorageError(None, f"the result holds {found_bytes} bytes of tensors instead of {payload_bytes}")
    return elapsed_s


def _engine_of(path: str, engine: str) -> str:
    """Return the engine that has just read a file, by reading one more block: load does not report it."""
    if engine != "auto":
        return engine
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        extents = Extents()
        extents.add_checked(0, _PAGE_BYTES)
        return read_extents(fd, path, extents).engine
    finally:
        os.close(fd)


def _touched(tree: Any) -> Any:
    """Read a byte of every page of the tensors, as their user will.

    Neighbours are touched as one span, for ten thousand small tensors would be ten thousand calls of torch, which is
    not what mapping costs. Less than a page between two tensors leaves no page that belongs to neither.
    """
    spans: list[list[int]] = []
    for start, size_bytes in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in flatten(tree).values()):
        if spans and start - spans[-1][1] < _PAGE_BYTES:
            spans[-1][1] = start + size_bytes
        else:
            spans.append([start, start + size_bytes])
    for start, end in spans:
        memory = torch.frombuffer((ctypes.c_char * (end - start)).from_address(start), dtype=torch.uint8)
        memory[::_PAGE_BYTES].sum()
        memory[-1].item()
    return tree
