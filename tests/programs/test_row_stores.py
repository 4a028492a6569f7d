"""A store of rows at the end of a process, and how much memory it takes beyond its cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.row_tables import make_rows

from fastpersist.rows.writer import write_rows

# --------------------------------------------------------------------------------------------------------- the end

ENDING = """
import sys, torch
from fastpersist.rows.store import RowStore
store = RowStore(sys.argv[1], cache_bytes="1MiB")
tickets = [store.prefetch(torch.arange(first, 20000, 100)) for first in range(5)]
generator = store.ahead(range(5), ids=lambda n: [n])
next(generator)
cycle = [store, tickets]
cycle.append(cycle)
"""


def test_a_process_may_end_with_everything_open(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    write_rows(path, make_rows(20_000))
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", ENDING, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


# ---------------------------------------------------------------------------------------------------------- memory

MEMORY = """
import sys, torch
from fastpersist.rows.store import RowStore

def used_bytes():
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024 + int(fields["RssShmem"].split()[0]) * 1024

torch.set_num_threads(1)
batches = [torch.randint(int(sys.argv[2]), (20000,)) for _ in range(40)]
out = torch.zeros(20000, 512, dtype=torch.int32)
cache_bytes = int(sys.argv[3])
before_bytes = used_bytes()
store = RowStore(sys.argv[1], cache_bytes=cache_bytes, engine=sys.argv[4])
peak_bytes = 0
for batch in batches:
    store.gather(batch, out=out)
    peak_bytes = max(peak_bytes, used_bytes())
assert store.stats().cached_row_count == store.stats().cache_row_limit
print(peak_bytes - before_bytes - cache_bytes, store.stats().cache_row_limit * 2048)
"""


@pytest.mark.parametrize("engine", ["auto", "threads-buffered"])
def test_memory_above_the_cache_is_bounded(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    count = 100_000
    np.lib.format.open_memmap(path, mode="w+", dtype="i4", shape=(count, 512)).flush()  # a hole of 200 MB
    cache_bytes = 128 << 20
    command = [sys.executable, "-c", MEMORY, path, str(count), str(cache_bytes), engine]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    above_bytes, cached_bytes = map(int, result.stdout.split())
    assert above_bytes <= 64 << 20
    assert cached_bytes > 0.9 * cache_bytes
