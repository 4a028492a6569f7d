"""An embedding whose table is larger than its cache: rows are read from disk when they are looked up.

It writes a table, looks words up whose frequencies follow Zipf's law, as those of a text do, and says how many rows
the cache had, and how many come in a second.

python examples/embedding_on_disk.py [DIR] [--rows N] [--width N] [--lookups N]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import fastpersist as fp

TOKENS = (8, 2048)  # of a lookup
CACHED_SHARE = 0.1


def make_table(path: Path, row_count: int, width: int) -> None:
    """Write a table that need not fit into memory, a piece at a time."""
    # --8<-- [start:write]
    with fp.RowWriter(path, (width,), torch.bfloat16) as writer:
        while writer.row_count < row_count:
            count = min(1 << 16, row_count - writer.row_count)
            ids = torch.arange(writer.row_count, writer.row_count + count)
            writer.append((ids.unsqueeze(1) % 251).expand(count, width).to(torch.bfloat16))
    # --8<-- [end:write]


def words_of(row_count: int) -> torch.Tensor:
    """Return ids to look up: the k-th most frequent word is met 1/k as often as the first."""
    ranks = torch.exp(torch.rand(TOKENS, dtype=torch.float64) * torch.tensor(row_count).log()).long().sub(1)
    return ranks.clamp(0, row_count - 1) * 7_919 % row_count  # scattered over the table


def show(directory: Path, row_count: int, width: int, lookup_count: int) -> None:
    """Write a table and look words up."""
    path = directory / "embedding.safetensors"
    make_table(path, row_count, width)
    table_bytes = path.stat().st_size
    # --8<-- [start:embedding]
    with fp.RowStore(path, cache_bytes=int(CACHED_SHARE * table_bytes)) as rows:
        embedding = fp.RowEmbedding(rows)  # in place of torch.nn.Embedding
        model = torch.nn.Sequential(embedding, torch.nn.Linear(width, 1, dtype=rows.dtype))
        # --8<-- [end:embedding]
        started_s, lookup_s = time.perf_counter(), 0.0
        for _ in range(lookup_count):
            ids = words_of(row_count)
            started_s = time.perf_counter()
            found = embedding(ids)
            lookup_s += time.perf_counter() - started_s
            if not torch.equal(found[..., 0], (ids % 251).to(torch.bfloat16)):
                raise SystemExit("these are not the rows that were asked for")
        with torch.inference_mode():
            model(words_of(row_count))
        stats = rows.stats()
    print(f"a table of {table_bytes / 1e6:.0f} MB, rows of {stats.row_bytes} bytes, a cache of {CACHED_SHARE:.0%}")
    print(f"{lookup_count} lookups of {ids.numel()} rows: {lookup_count * ids.numel() / lookup_s:,.0f} rows/s")
    print(f"the cache had {stats.hit_rate:.0%}; {stats.read_count} reads, {stats.read_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default=".", help="on the disk to use")
    parser.add_argument("--rows", type=int, default=800_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lookups", type=int, default=60)
    options = parser.parse_args()
    Path(options.directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        show(Path(scratch), options.rows, options.width, options.lookups)
