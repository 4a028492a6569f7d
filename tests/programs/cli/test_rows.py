"""`fastpersist rows`: what a table is, whether it is damaged, and the same rows in another order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.archives import flip_bit

import fastpersist as fp
from fastpersist.cli import main


@pytest.fixture
def table(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    rows = torch.arange(4000.0).view(1000, 4)
    fp.write_rows(tmp_path / "feat.npy", rows)
    return tmp_path / "feat.npy", rows


def test_info_tells_what_is_there(table: tuple[Path, torch.Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows", "info", str(table[0])]) == 0
    out = capsys.readouterr().out
    assert "1000 rows of 4 × float32, 16 bytes each" in out
    assert "shape (1000, 4)" in out
    assert "offset 4096" in out
    assert "ids are positions" in out
    assert "CRC-32" in out


def test_damage_is_found(table: tuple[Path, torch.Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows", "verify", str(table[0])]) == 0
    assert ": ok, " in capsys.readouterr().out
    flip_bit(table[0], 4096 + 160)
    assert main(["rows", "verify", str(table[0]), "--quiet"]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_tables_behind_one_that_cannot_be_read_are_verified(
    table: tuple[Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.npy"
    assert main(["rows", "verify", str(missing), str(table[0])]) == 2
    output = capsys.readouterr()
    assert ": ok, " in output.out
    assert str(missing) in output.err
    flip_bit(table[0], 4096 + 160)
    assert main(["rows", "verify", str(missing), str(table[0])]) == 2
    assert "DAMAGED" in capsys.readouterr().out


def test_packed_rows_keep_their_ids(
    table: tuple[Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    degree = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    fp.write_rows(tmp_path / "degree.npy", degree)
    packed = tmp_path / "packed.npy"
    assert main(["rows", "pack", str(table[0]), str(packed), "--order", str(tmp_path / "degree.npy")]) == 0
    assert "1000 rows" in capsys.readouterr().out
    assert main(["rows", "info", str(packed)]) == 0
    assert "packed" in capsys.readouterr().out
    with fp.RowStore(packed, cache_bytes=0) as rows:
        ids = torch.tensor([5, 999, 0, 5])
        assert torch.equal(rows.gather(ids), table[1][ids])
        highest = int(degree.argmax())
    raw = torch.from_file(str(packed), size=1024 + 4, dtype=torch.float32)[1024:]
    assert torch.equal(raw, table[1][highest])


def test_what_is_no_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rows", "info", str(tmp_path / "missing.npy")]) == 2
    assert "there is no table" in capsys.readouterr().err
    (tmp_path / "text.npy").write_text("hello " * 1000)
    assert main(["rows", "info", str(tmp_path / "text.npy")]) == 2
    assert "fastpersist.RowStore shape= and dtype=" in capsys.readouterr().err
    fp.save({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, tmp_path / "two.safetensors")
    assert main(["rows", "info", str(tmp_path / "two.safetensors")]) == 2
    assert "--tensor" in capsys.readouterr().err


def test_bench_compares_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--size", "4MiB", "--row-bytes", "512", "--depth", "8", "--count", "500", "--repeat", "1"]
    report = tmp_path / "rows.json"
    assert main(["bench", "rows", str(tmp_path), *options, "--json", str(report)]) == 0
    out = capsys.readouterr().out
    for name in (
        "fastpersist.RowStore",
        "numpy.memmap, MADV_RANDOM",
        "pread by 16 threads",
        "GraphBolt",
        "LMDB",
        "index_select",
    ):
        assert name in out
    assert "failed" not in out
    many, few, hits = json.loads(report.read_text())["tables"]
    assert all(row["rows_per_s"] > 0 for table in (many, few, hits) for row in table["rows"] if not row["note"])
    ours = next(row for row in few["rows"] if row["kind"] == "fastpersist")
    assert ours["p99_s"][0] >= ours["median_s"] / 200  # of the requests, half take the median or more
    assert "99 % of them" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json"]


def test_bench_refuses_rows_that_fio_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rows", "bench", str(tmp_path), "--row-bytes", "100"])
    assert "multiple of 512" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "row_bytes", "least"), [("2KiB", "512", "8KiB"), ("16KiB", "32768", "32KiB")], ids=["blocks", "rows"]
)
def test_bench_refuses_a_table_without_a_block_or_a_row(
    size: str, row_bytes: str, least: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--size", size, "--row-bytes", "512", row_bytes, "--count", "10", "--repeat", "1"]
    assert main(["rows", "bench", str(tmp_path), *options]) == 2
    assert f"--size {size} is too small: a table needs at least {least}" in capsys.readouterr().err
