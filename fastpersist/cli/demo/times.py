"""The table of `fastpersist demo`: save and load of one training state, against torch and safetensors.

It runs some rows of `fastpersist bench`, with the same harness. A save ends when file and name are durable, a load when
all bytes are in memory; rows take turns, so that drift of the machine affects all alike.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fastpersist
from fastpersist.cli.bench.load_rows import PageCache, own_load_rows, peer_load_rows
from fastpersist.cli.bench.places import empty
from fastpersist.cli.bench.report import table
from fastpersist.cli.bench.rows import Measured, Row
from fastpersist.cli.bench.rows import measure as take_turns
from fastpersist.cli.bench.save_rows import own_save_rows, stock_save_rows
from fastpersist.cli.bench.states import StateRecipe, flatten
from fastpersist.cli.terminal import size_text
from fastpersist.errors import UnsupportedError

__all__ = ["measure"]

_SAVES = ("fp.save", "torch.save + fsync, CRC on", "safetensors save_file + fsync")
_LOADS = ("fp.load", "torch.load", "safetensors load_file, touched")


def measure(directory: Path, *, quick: bool) -> Iterator[str]:
    """Save and load a state in turn, several times.

    Args:
        directory: The directory in which the files are made, and removed again.
        quick: Use a state of some MB, and three rounds instead of five.

    Yields:
        The lines to print.

    Raises:
        UnsupportedError: A row of fastpersist failed.
    """
    round_count = 3 if quick else 5
    recipe = StateRecipe("gpt-29m", quick=quick)
    state = recipe.build()
    size_bytes = state.payload_bytes
    yield f"   the state: a GPT and its AdamW moments, {size_text(size_bytes)} in {state.tensor_count} tensors"
    with tempfile.TemporaryDirectory(dir=directory) as files:

        def path(suffix: str) -> str:
            return os.path.join(files, f"state{suffix}")

        rows = _chosen(_SAVES, [*own_save_rows(state, []), *stock_save_rows(state)])
        found = take_turns(rows, round_count, before=path, after=lambda: empty(files))
        fastpersist.save(state.tree, path(".pt"))
        fastpersist.save(flatten(state.tree), path(".safetensors"))
        del state, rows
        rows = _chosen(_LOADS, [*own_load_rows(recipe, size_bytes, []), *peer_load_rows(size_bytes)])
        cold, warm = PageCache(warm=False, whole_machine=False), PageCache(warm=True, whole_machine=False)
        for cache in (cold, warm):

            def before(suffix: str, cache: PageCache = cache) -> str:
                cache.prepare(path(suffix))
                return path(suffix)

            found += take_turns(rows, round_count, before=before, after=lambda: None)
    failed = next((one for one in found if one.row.kind == "fastpersist" and one.note), None)
    if failed is not None:
        raise UnsupportedError(f"{failed.row.name} {failed.note}")
    names = [*_SAVES, *(f"{name}, {how}" for how in ("cold", "warm") for name in _LOADS)]
    yield f"   medians of {round_count}, rows in turn; fresh files; saves until file and name are durable"
    yield f"   cold: {cold.describe()}."
    yield "   Caches below this kernel (hypervisor, drive) are out of reach. warm: all of the file in the page cache"
    yield ""
    cells = [_cells(name, one) for name, one in zip(names, found, strict=True)]
    yield from ("   " + line for line in table(["", "s", "min – max", "GB/s"], cells).splitlines())


def _chosen(names: tuple[str, ...], rows: list[Row]) -> list[Row]:
    by_name = {row.name: row for row in rows}
    return [by_name[name] for name in names]


def _cells(name: str, measured: Measured) -> list[str]:
    return [name, *measured.time_cells()] if measured.samples else [name, f"– {measured.note}"]
