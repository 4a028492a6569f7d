"""The table of `fastpersist demo`: save and load of one training state, against torch and safetensors.

Everybody does the same job: a save ends when file and name are durable, a load when a byte of each page of the result
has been read (a memory-mapped result would else be timed before it is there). Rows take turns, so that whatever else
the machine does hits all of them. `fastpersist bench` is the instrument; this is a glance.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import fastpersist
from fastpersist import _native
from fastpersist.cli.demo.gpt import GPT, Sizes
from fastpersist.cli.terminal import size_text
from fastpersist.commit.filesystem import filesystem

__all__ = ["measure"]

_READ_BYTES = 8 << 20


@dataclass(slots=True)
class Row:
    """One line of the table: what is timed, and what puts the file into the right state before."""

    name: str
    prepare: Callable[[], None]
    action: Callable[[], object]
    times_s: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Time it once more."""
        self.prepare()
        started_s = time.perf_counter()
        result = self.action()
        self.times_s.append(time.perf_counter() - started_s)
        del result  # giving its memory back is nobody's load


def measure(directory: Path, *, quick: bool) -> Iterator[str]:
    """Save and load a state in turn, several times.

    Args:
        directory: Below which the files are made, and removed again.
        quick: A state of some MB, and three rounds instead of five.

    Yields:
        The lines to print.
    """
    round_count = 3 if quick else 5
    state = _training_state(Sizes(256, 2, 4, 64, 1) if quick else Sizes(768, 4, 12, 512, 1))
    tensors = dict(_tensors("", state))
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    yield f"   the state: a wider GPT and its AdamW moments, {size_text(size_bytes)} in {len(tensors)} tensors"

    cache = PageCache()
    with tempfile.TemporaryDirectory(dir=directory) as files:
        rows = _rows(Path(files), state, tensors, cache)
        for _ in range(round_count):
            for row in rows:
                row.measure()
    lines = [
        (
            row.name,
            f"{statistics.median(row.times_s):.3f}",
            f"{min(row.times_s):.3f} – {max(row.times_s):.3f}",
            f"{size_bytes / statistics.median(row.times_s) / 1e9:.2f}",
        )
        for row in rows
    ]
    yield f"   medians of {round_count}, rows in turn; fresh files; saves until file and name are durable"
    yield f"   cold: dropped from the page cache by posix_fadvise(DONTNEED) after fsync; {cache.what_was_left()}."
    yield "   Caches below this kernel (hypervisor, drive) are out of reach. warm: all of the file in the page cache"
    yield ""
    table = tabulate(
        lines, headers=("", "s", "min – max", "GB/s"), disable_numparse=True, colalign=("left", *["right"] * 3)
    )
    yield from ("   " + line for line in table.splitlines())


def _training_state(sizes: Sizes) -> dict[str, Any]:
    """Make what a trainer saves: parameters, and the moments that AdamW has after a step."""
    torch.manual_seed(1)
    model = GPT(sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}


def _tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk to the tensors of a state, each with its path: what a flat format can hold of it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), child)


def _rows(directory: Path, state: dict[str, Any], tensors: dict[str, torch.Tensor], cache: PageCache) -> list[Row]:
    """List what is timed. Each loader reads the file of its own side."""
    ours, torchs, safe = (directory / name for name in ("ours.pt", "torch.pt", "other.safetensors"))

    def torch_save() -> None:
        torch.save(state, torchs)
        _make_durable(torchs)

    saves: list[tuple[str, Path, Callable[[], object]]] = [
        ("fp.save", ours, lambda: fastpersist.save(state, ours)),
        ("torch.save + fsync", torchs, torch_save),
    ]
    loads: list[tuple[str, Path, Callable[[], object]]] = [
        ("fp.load", ours, lambda: _touched(fastpersist.load(ours))),
        ("torch.load", torchs, lambda: _touched(torch.load(torchs, weights_only=True))),
    ]
    try:
        from safetensors import torch as safetensors
    except ImportError:
        pass
    else:

        def safetensors_save() -> None:
            safetensors.save_file(tensors, safe)
            _make_durable(safe)

        saves.append(("safetensors + fsync (tensors only)", safe, safetensors_save))
        loads.append(("safetensors (tensors only)", safe, lambda: _touched(safetensors.load_file(safe))))
    return [
        *(Row(name, partial(path.unlink, missing_ok=True), action) for name, path, action in saves),
        *(Row(f"{name}, cold", partial(cache.drop, path), action) for name, path, action in loads),
        *(Row(f"{name}, warm", partial(cache.fill, path), action) for name, path, action in loads),
    ]


def _make_durable(path: Path) -> None:
    """Do for others what fp.save does itself: sync the file, then its name."""
    with path.open("rb") as file:
        filesystem().sync(file.fileno(), str(path))
    filesystem().sync_directory(str(path.parent))


def _touched(loaded: object) -> object:
    """Read a byte of each page of what was loaded."""
    for _, tensor in _tensors("", loaded):
        tensor.detach().reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
    return loaded


class PageCache:
    """Puts a file's pages out of the kernel's cache or into it, and remembers how well that went."""

    def __init__(self) -> None:
        self._left_bytes = 0
        self._kernel_can_tell = False

    def drop(self, path: Path) -> None:
        """Take a file out of the cache."""
        with path.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._left_bytes = max(self._left_bytes, _native.cached_bytes(file.fileno()))

    def fill(self, path: Path) -> None:
        """Read a file, so that the cache has all of it."""
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
            # 0 of a file just read: a kernel without cachestat(2), so the 0 after a drop says nothing either.
            self._kernel_can_tell |= _native.cached_bytes(file.fileno()) > 0

    def what_was_left(self) -> str:
        """Say how much `drop` had left in the cache, at most."""
        if not self._kernel_can_tell:
            return "this kernel cannot say whether it obeyed"
        return f"at most {size_text(self._left_bytes)} stayed in it"
