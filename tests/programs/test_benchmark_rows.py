"""benchmarks/rows/simulate.py on a tiny graph; it compiles its simulator and starts it, which takes some seconds."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rows" / "simulate.py"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("rows")
    words = [directory, "--scale", "12", "--batches", "40", "--traces", "graph", "drift", "--shares", "5", "20"]
    done = subprocess.run([sys.executable, SCRIPT, *words], stdout=subprocess.PIPE, text=True, check=True)
    return directory, done.stdout


def test_no_policy_beats_belady_but_one_made_beforehand(simulated: tuple[Path, str]) -> None:
    rows = [line.split("|")[1:-1] for line in simulated[1].splitlines() if line.startswith("|")]
    policies = [[cell.strip() for cell in row] for row in rows if "(" in row[-1]]
    assert len(policies) > 20
    for name, *cells in policies:
        shares = [int(cell.split("(")[1].rstrip(")")) for cell in cells]
        assert min(shares) > 0
        if name not in ("static", "degree"):  # lists made beforehand may have rows that were not asked for yet
            assert max(shares) <= 100


def test_rows_by_degree_are_kept_where_there_is_a_graph(simulated: tuple[Path, str]) -> None:
    of_graph, of_drift = (part.splitlines() for part in simulated[1].split("\n## ")[1:])
    assert not [line for line in of_drift if line.startswith("| degree ")]
    (found,) = [line for line in of_graph if line.startswith("| degree ")]
    indices = torch.load(simulated[0] / "rmat-12-15-0.pt", weights_only=True)[1]
    kept = set(indices.bincount(minlength=1 << 12).argsort(descending=True, stable=True)[: (1 << 12) // 5].tolist())
    batches = read_batches(simulated[0] / "graph-12-40.trace")[10:]
    hits, asked = sum(len(kept.intersection(batch)) for batch in batches), sum(map(len, batches))
    assert f"| {100 * hits / asked:.1f} (" in found


def test_lru_hits_what_a_model_of_it_hits(simulated: tuple[Path, str]) -> None:
    path = simulated[0] / "drift-12-40.trace"
    slots = 50
    cache: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    for batch in read_batches(path):
        missing = [row for row in batch if row not in cache]
        asked += len(batch)
        hits += len(batch) - len(missing)
        for row in batch:
            if row in cache:
                cache.move_to_end(row)
        for row in missing:
            if len(cache) == slots:
                cache.popitem(last=False)
            cache[row] = None
    assert run(simulated[0], path, f"policy=lru slots={slots}") == (hits, asked)


def test_sampling_all_slots_with_the_whole_future_is_belady(simulated: tuple[Path, str]) -> None:
    path = simulated[0] / "graph-12-40.trace"
    belady = run(simulated[0], path, "policy=belady slots=200")
    assert run(simulated[0], path, "policy=sampled slots=200 k=200 window=40") == belady


def test_bad_runs_are_refused(simulated: tuple[Path, str]) -> None:
    path = simulated[0] / "graph-12-40.trace"
    for line in ("policy=best slots=5", "policy=lru slots=0", "policy=lru slots=5000"):
        done = subprocess.run([simulated[0] / "cache_simulator", path], input=line, text=True, capture_output=True)
        assert done.returncode == 1
        assert "cache_simulator: " in done.stderr


def read_batches(path: Path) -> list[tuple[int, ...]]:
    data = path.read_bytes()
    _, batch_count = struct.unpack_from("<qq", data)
    batches, offset = [], 16
    for _ in range(batch_count):
        (count,) = struct.unpack_from("<q", data, offset)
        batches.append(struct.unpack_from(f"<{count}i", data, offset + 8))
        offset += 8 + 4 * count
    return batches


def run(directory: Path, trace: Path, line: str) -> tuple[int, int]:
    done = subprocess.run(
        [directory / "cache_simulator", trace], input=line, text=True, capture_output=True, check=True
    )
    hits, asked, _ = done.stdout.split()
    return int(hits), int(asked)


def test_cached_rows_are_gathered_beside_torch(tmp_path: Path) -> None:
    report = tmp_path / "cached.json"
    words = ["--table-bytes", "1000000", "--counts", "10", "1000", "--repeat", "2", "--json", report]
    command = [sys.executable, SCRIPT.with_name("cached.py"), tmp_path, *words]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in said.splitlines()[-2:]] == ["10", "1,000"]
    assert {count: len(seconds["ours"]) for count, seconds in json.loads(report.read_text())["seconds"].items()} == {
        "10": 2,
        "1000": 2,
    }
    assert list(tmp_path.iterdir()) == [report]


@pytest.mark.long  # more than a minute
def test_an_epoch_of_each_way_is_measured_and_only_the_graph_is_left(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    words = [
        "--scale",
        "12",
        "--width",
        "16",
        "--seeds",
        "16",
        "--fan-outs",
        "4",
        "4",
        "--rounds",
        "1",
        "--batches",
        "3",
    ]
    report = tmp_path / "epoch.json"
    command = [sys.executable, SCRIPT.with_name("epoch.py"), tmp_path, *words, "--json", report]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no memory cgroup can be made here" in done.stderr:
        pytest.skip("a memory cgroup needs root")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^np\.memmap.*; read_ahead_kb (?:\d+|unknown) ", done.stdout, re.MULTILINE)) == 2
    turns = json.loads(report.read_text())["ways"]
    assert list(turns) == ["memory", "rows", "memmap-random", "memmap"]
    assert all([turn["batches"] for turn in some] == [3] for some in turns.values())
    for turn in (turn for some in turns.values() for turn in some):
        assert turn["batch"] == pytest.approx(turn["sample"] + turn["fetch"] + turn["compute"])
        assert turn["rows"] == pytest.approx(turns["memory"][0]["rows"], rel=0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch.json", "rmat-12-15-0.pt"]


STAND_IN_GRAPHBOLT = """
class TorchBasedFeature:
    def __init__(self, table):
        self.table = table

    def read(self, ids):
        return self.table[ids] + WRONG
"""


@pytest.mark.long  # starts two interpreters
@pytest.mark.parametrize("wrong", [0, 1])
def test_rows_by_another_interpreter_take_turns_and_are_checked(
    wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, disk = tmp_path / "site" / "dgl", tmp_path / "disk"
    package.mkdir(parents=True)
    disk.mkdir()
    (package / "__init__.py").write_text('__version__ = "0"\n')
    (package / "graphbolt.py").write_text(STAND_IN_GRAPHBOLT.replace("WRONG", str(wrong)))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    report = tmp_path / "graphbolt.json"
    words = ["--python", sys.executable, "--size-mb", "1", "--count", "50", "--repeat", "2", "--row-bytes", "512"]
    command = [sys.executable, SCRIPT.with_name("graphbolt.py"), disk, *words, "--json", report]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert list(disk.iterdir()) == []
    assert done.returncode == 0, done.stderr
    if wrong:
        assert "GraphBolt returned other rows" in done.stdout
        return
    rows = json.loads(report.read_text())["row_bytes"]["512"]
    assert {"fastpersist.RowStore", "GraphBolt, DGL 0"} <= rows.keys()
    assert re.search(r"GraphBolt, DGL 0; read_ahead_kb (\d+|unknown) ", done.stdout)


@pytest.mark.long  # runs a benchmark twice
def test_a_packed_table_needs_fewer_reads_and_a_second_run_makes_nothing(tmp_path: Path) -> None:
    report = tmp_path / "layout.json"
    words = ["--scale", "12", "--seeds", "16", "--batches", "2", "--repeat", "1", "--gaps", "0", "8", "--json", report]
    made: list[dict[str, int]] = []
    for _ in range(2):
        command = [sys.executable, SCRIPT.with_name("layout.py"), tmp_path, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made.append({path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")})
    assert made[0] == made[1]
    assert sorted(made[0]) == ["features-12-128.npy", "packed-12-128.npy"]
    reads = {name: way["counts"][1] for name, way in json.loads(report.read_text())["ways"].items()}
    assert len(reads) == 8
    # With a gap of 8 KiB a table that is so small is scanned in either order.
    assert reads["by degree, gap 0 KiB, cache 0 %"] < reads["by id, gap 0 KiB, cache 0 %"]
    for order in ("by id", "by degree"):
        assert reads[f"{order}, gap 8 KiB, cache 0 %"] < reads[f"{order}, gap 0 KiB, cache 0 %"]
