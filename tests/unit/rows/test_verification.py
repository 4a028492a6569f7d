"""verify_rows finds every changed bit, says which rows it is in, and finds nothing in a table that is whole."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.archives import flip_bit
from support.row_tables import make_rows

import fastpersist as fp
from fastpersist.errors import CheckpointNotFoundError, ConfigError
from fastpersist.rows.packing import pack_rows
from fastpersist.rows.sidecar import CHUNK_BYTES, sidecar_path
from fastpersist.rows.verification import verify_rows
from fastpersist.rows.writer import write_rows

COUNT, WIDTH = 10_000, 100  # 3.8 chunks


@pytest.fixture(params=[".npy", ".safetensors"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / f"table{request.param}"
    write_rows(path, make_rows(COUNT, WIDTH))
    return path


def test_a_whole_table_is_ok(path: Path) -> None:
    report = verify_rows(path)
    assert report.ok
    assert report.has_checksums
    assert report.checked_bytes == path.stat().st_size


def test_every_changed_bit_is_found(path: Path) -> None:
    rng = random.Random(3)
    size_bytes = path.stat().st_size
    for place in [0, 4095, 4096, size_bytes - 1, *(rng.randrange(size_bytes) for _ in range(20))]:
        flip_bit(path, place)
        report = verify_rows(path)
        assert not report.ok
        flip_bit(path, place)
    assert verify_rows(path).ok


def test_damage_names_the_rows(path: Path) -> None:
    place = 4096 + 2 * CHUNK_BYTES + 17
    flip_bit(path, place)
    (damage,) = verify_rows(path).damages
    assert damage.offset_bytes == 4096 + 2 * CHUNK_BYTES
    first, last = 2 * CHUNK_BYTES // 400, (3 * CHUNK_BYTES - 1) // 400
    assert f"rows at the positions {first} to {last} " in damage.message


def test_another_length_is_damage(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 400)
    (damage,) = verify_rows(path).damages
    assert "sidecar says" in damage.message


def test_damaged_sidecars_are_damage(path: Path) -> None:
    name = Path(sidecar_path(str(path)))
    flip_bit(name, name.stat().st_size - 1)
    (damage,) = verify_rows(path).damages
    assert "sidecar is damaged" in damage.message


def test_damaged_positions_are_damage(tmp_path: Path, path: Path) -> None:
    packed = tmp_path / "packed.npy"
    pack_rows(path, packed, order=torch.arange(COUNT))
    assert verify_rows(packed).ok
    name = Path(sidecar_path(str(packed)))
    flip_bit(name, name.stat().st_size // 2)
    (damage,) = verify_rows(packed).damages
    assert "position_of_row" in damage.message


def test_without_a_sidecar(path: Path) -> None:
    os.unlink(sidecar_path(str(path)))
    report = verify_rows(path)
    assert report.ok
    assert report.has_checksums == (path.suffix == ".safetensors")  # whose header has one
    flip_bit(path, 2_000_000)
    assert verify_rows(path).ok == (path.suffix == ".npy")


def test_a_packed_table_without_its_sidecar_is_damaged(tmp_path: Path, path: Path) -> None:
    packed = tmp_path / "packed.safetensors"
    pack_rows(path, packed, order=torch.arange(COUNT))
    assert verify_rows(packed).ok
    os.unlink(sidecar_path(str(packed)))
    report = verify_rows(packed)
    (damage,) = report.damages
    assert f"{sidecar_path(str(packed))}, which says where the row of each id is, is missing" in damage.message
    assert report.has_checksums


def test_tables_of_others(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", make_rows(5).numpy())
    report = verify_rows(tmp_path / "table.npy")
    assert report.ok
    assert not report.has_checksums
    os.truncate(tmp_path / "table.npy", 200)
    assert not verify_rows(tmp_path / "table.npy").ok
    save_file({"x": make_rows(5)}, tmp_path / "table.safetensors")
    assert not verify_rows(tmp_path / "table.safetensors").has_checksums
    (tmp_path / "raw.bin").write_bytes(bytes(range(200)))
    with pytest.raises(ConfigError, match="tables with checksums"):
        verify_rows(tmp_path / "raw.bin")
    with pytest.raises(CheckpointNotFoundError):
        verify_rows(tmp_path / "none.npy")


def test_not_all_damages_are_listed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpersist.rows.verification._DAMAGE_COUNT_MAX", 2)
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert len(verify_rows(path).damages) <= 2


def test_the_engine_is_the_one_that_is_named(path: Path) -> None:
    with pytest.raises(fp.ConfigError):
        verify_rows(path, engine="no such engine")
