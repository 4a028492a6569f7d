"""Run all examples of this folder in turn, and print one table of their rates.

python examples/file_access/run_all.py [DIR] [--size-mb N] [--loop N] [--validate]

DIR is a directory on the file system to measure (default: this one); files made there are removed. In each round every
example runs once, in its own process, so that drift of the disk affects all alike. Exit code 1: one of them failed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from command_line import LEFT_OUT, cache_state, drop_from_cache, make_file, parser_of
from tabulate import tabulate

import fastpersist as fp

EXAMPLES = (
    "py_load_cpu_tensor",
    "ring_load_cpu_tensor",
    "py_load_gpu_tensor",
    "ring_load_gpu_tensor",
    "gds_load_gpu_tensor",
    "py_store_cpu_tensor",
    "ring_store_cpu_tensor",
    "py_store_gpu_tensor",
    "ring_store_gpu_tensor",
    "gds_store_gpu_tensor",
)


class Row:
    """The results of one example.

    Args:
        name: The name of the example's file, without the suffix.
        words: The command line of the example.
    """

    def __init__(self, name: str, words: list[str]) -> None:
        self.name = name
        self._command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *words]
        self._rates: list[float] = []  # GB/s
        self.cached_bytes = 0
        self.failed = False
        self._ended = False
        self._remark = ""

    def run(self) -> None:
        """Run the example once, unless it has failed, or cannot run here."""
        if self._ended:
            return
        done = subprocess.run(self._command, capture_output=True, text=True, check=False)
        if done.returncode:
            self._ended = True
            self.failed = done.returncode != LEFT_OUT
            lines = done.stderr.strip().splitlines() or ["it said nothing"]
            self._remark = (f"FAILED with {done.returncode}: " if self.failed else "") + lines[-1]
            return
        found = json.loads(done.stdout)
        self._rates += [found["size_bytes"] / run_s / 1e9 for run_s in found["run_s"]]
        self._remark = found["remark"]
        self.cached_bytes = max(self.cached_bytes, found["cached_bytes"])

    def cells(self) -> list[str]:
        """Return its line of the table."""
        if self._ended:
            return [self.name, "", "", self._remark]
        low, middle, high = min(self._rates), statistics.median(self._rates), max(self._rates)
        return [self.name, f"{middle:.2f}", f"{low:.2f}–{high:.2f}", self._remark]


def engine_of(path: Path) -> str:
    """Return the engine that reads a file that is not in the page cache."""
    drop_from_cache(path, path.stat().st_size)
    with fp.TensorFile(path) as file:
        file.read(torch.empty(4096, dtype=torch.uint8))
        return file.engine


def main() -> int:
    """Run everything, print the table, return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=Path(), metavar="DIR")
    arguments = parser.parse_args()
    if not arguments.directory.is_dir():
        parser.error(f"there is no directory {arguments.directory}")
    size_mb = arguments.size_mb or 256
    common = ["--size-mb", str(size_mb), "--loop", "1", "--json", *(["--validate"] if arguments.validate else [])]
    with tempfile.TemporaryDirectory(prefix="file-access-", dir=arguments.directory) as directory:
        source, stored = Path(directory, "load.bin"), Path(directory, "store.bin")
        make_file(source, size_mb << 20)
        rows = [Row(n, ["--file", str(source if "_load_" in n else stored), *common]) for n in EXAMPLES]
        for i in range(arguments.loop):
            print(f"round {i + 1} of {arguments.loop}", file=sys.stderr)
            for row in rows:
                row.run()
                stored.unlink(missing_ok=True)
        engine = engine_of(source)
    checked = "compared" if arguments.validate else "not compared (--validate)"
    print(
        f"{size_mb} MiB in {arguments.directory.resolve()}, {arguments.loop} rounds, from opening to closing the file"
    )
    print(tabulate([row.cells() for row in rows], ["example", "GB/s: median", "min–max", ""], disable_numparse=True))
    print(f"loads: {cache_state(max(row.cached_bytes for row in rows))}")
    print("stores: into a new file each time, made durable within the time (fsync of the file and of its directory)")
    print(f"bytes: {checked}; the ring's engine: {engine}")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
