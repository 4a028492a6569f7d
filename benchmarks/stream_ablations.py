"""What each part of `fp.stream` is worth: token passes with one part after the other taken away.

    .venv/bin/python benchmarks/stream_ablations.py DIR [--layers 12] [--repeat 3] [--json FILE]

The model and the measuring are those of `fastpersist bench stream`, with half of the model as the budget, in a memory
cgroup with room for half of it. The rows take turns. A part is taken away by replacing a function in the process of its
row, so the package has no switches for it.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness import argument_parser, run_benchmark

import fastpersist
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import require_space, scratch_directory, write_json
from fastpersist.cli.bench.report import machine_facts
from fastpersist.cli.bench.rows import measure
from fastpersist.cli.bench.stream import ways, worker
from fastpersist.cli.bench.stream.model import FORM_COUNT, make_model, weight_sizes
from fastpersist.cli.bench.stream.rows import Case, WayProcess, bandwidth_rows, way_rows
from fastpersist.streaming import residency
from fastpersist.streaming.order import UseOrder
from fastpersist.streaming.prefetch import Prefetch

_NAME = "stream_ablations"  # of this module, for the processes that import it


def main() -> int:
    """Measure, and print a line for each row."""
    parser = argument_parser(f"{_NAME}.py", __doc__)
    parser.add_argument("--layers", type=int, default=12, help="of the model (default: 12)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: 3)")
    options = parser.parse_args()
    weight_bytes = sum(weight_sizes("large", options.layers))
    require_space(options.directory, FORM_COUNT * weight_bytes, instead="a smaller --layers")
    half_bytes = weight_bytes // 2
    case = Case(1, 8, 4, (half_bytes,), half_bytes)
    with scratch_directory(options.directory) as scratch:
        files = make_model(scratch, "large", options.layers)
        cache = PageCache(warm=False, whole_machine=False)

        def before(suffix: str) -> str:
            for path in files.paths(suffix):
                cache.prepare(path)
            return files.directory

        processes = [AblatedProcess(name, case, files, scratch, half_bytes) for name in ABLATIONS]
        try:
            rows = [*bandwidth_rows(files), *way_rows(processes)]
            results = measure(rows, options.repeat, before=before, after=lambda: None)
        finally:
            for process in processes:
                process.close()
    facts = machine_facts(options.directory)
    lines: list[dict[str, Any]] = []
    for result in results:
        times_s = [sample.seconds for sample in result.samples]
        lines.append({"name": result.row.name, "note": result.note, "seconds": times_s})
        if times_s:
            spread = f"{statistics.median(times_s):.3f} s ({min(times_s):.3f} – {max(times_s):.3f})"
            print(f"{result.row.name:50} {spread}, {result.samples[0].size_bytes / 1e9:.2f} GB")
        else:
            print(f"{result.row.name:50} – {result.note}")
    if options.json:
        write_json(options.json, {"facts": facts, "budget_bytes": half_bytes, "rows": lines})
    return 0


class AblatedProcess(WayProcess):
    """The process of a row, without the part that its name says."""

    @property
    def program(self) -> str:  # type: ignore[override]
        """What the process runs."""
        directory = os.path.dirname(os.path.abspath(__file__))
        return f"import sys; sys.path.insert(0, {directory!r}); from {_NAME} import serve; serve({self.way!r})"


def serve(name: str) -> None:
    """Take a part away, and generate as `bench stream` does."""
    ABLATIONS[name]()
    builder = ways.BUILDERS[ways.OURS]
    ways.BUILDERS[name] = builder
    worker.main()


def _nothing() -> None:
    pass


def _one_unit_in_flight() -> None:
    """A unit is read while the one before it computes, and no further."""

    def read_ahead(self: Prefetch) -> None:
        if all(filling.done() for filling in self._fillings.values()):
            following = self._units[next(self._order.foretell())]
            if following.blocks and following.number not in self._fillings:
                filling = self._start(following)
                if filling is not None and filling.room is not None:
                    self._ahead.append(following)

    Prefetch.read_ahead = read_ahead  # type: ignore[method-assign]


def _no_wrap() -> None:
    """Reading stops at the end of a pass."""
    foretell = UseOrder.foretell

    def foretell_this_pass(self: UseOrder) -> Iterator[int]:
        for number in foretell(self):
            if number < self._current:
                return
            yield number

    UseOrder.foretell = foretell_this_pass  # type: ignore[method-assign]


def _residents_as_prefix() -> None:
    """The first units stay, not every second one."""

    def choose(
        units: Sequence[Sequence[int]], must_stay: Sequence[bool], budget_bytes: int, uses: Sequence[int] | None = None
    ) -> residency.Residency:
        chosen = residency.choose_residents(units, must_stay, budget_bytes, uses)
        if not chosen.ring_bytes or chosen.missing_bytes:
            return chosen
        room_bytes, residents = chosen.resident_bytes, set()
        for number, blocks in enumerate(units):
            if sum(blocks) > room_bytes:
                break
            residents.add(number)
            room_bytes -= sum(blocks)
        taken_bytes = chosen.resident_bytes - room_bytes
        return residency.Residency(frozenset(residents), taken_bytes, budget_bytes - taken_bytes)

    vars(sys.modules[fastpersist.WeightStream.__module__])["choose_residents"] = choose


def _small_pages() -> None:
    """The memory of ring and residents has no huge pages."""
    mmap.MADV_HUGEPAGE = mmap.MADV_NOHUGEPAGE  # type: ignore[misc]


def _buffered() -> None:
    """Reads go through the page cache."""
    direct = fastpersist.stream

    def buffered(model: torch.nn.Module, source: str, **options: Any) -> fastpersist.WeightStream:
        return direct(model, source, engine="uring-buffered", **options)

    ways.stream = buffered  # type: ignore[assignment, attr-defined]


ABLATIONS: dict[str, Callable[[], None]] = {
    "all parts": _nothing,
    "one unit in flight": _one_unit_in_flight,
    "no reading ahead into the next pass": _no_wrap,
    "residents are the first units": _residents_as_prefix,
    "small pages": _small_pages,
    "through the page cache": _buffered,
}


if __name__ == "__main__":
    run_benchmark(main)
