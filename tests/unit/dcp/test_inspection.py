"""What inspect and verify say of shards: where each tensor lies, which ones are damaged, and who wrote them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dcp_states import PART, place_of, put_metadata, save
from torch.distributed.checkpoint.metadata import MetadataIndex

import fastpersist as fp
from fastpersist.dcp.inspection import with_damaged_tensors, with_sharded_tensors
from fastpersist.integrations.torch_dcp import FastPersistReader
from fastpersist.loading.file_inspection import Damage, Manifest, TensorEntry, VerifyReport

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE = {f"t{number}": torch.arange(number * 1000, (number + 1) * 1000) for number in range(8)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save({**STATE, "text": "no tensor"}, tmp_path / "c")
    return tmp_path / "c"


def entries_of(path: Path) -> dict[str, TensorEntry]:
    nothing: Any = replace(fp.inspect(path), tensors=())
    assert isinstance(nothing, Manifest)
    return {entry.name: entry for entry in with_sharded_tensors(nothing).tensors}


def damages_of(path: Path, *damages: Damage) -> tuple[Damage, ...]:
    report = replace(fp.verify(path), damages=damages)
    assert isinstance(report, VerifyReport)
    return with_damaged_tensors(report).damages


def test_bytes_of_a_tensor_lie_where_its_entry_says(path: Path) -> None:
    entries, data = entries_of(path), (path / PART).read_bytes()
    assert entries.keys() == STATE.keys()
    for name, tensor in STATE.items():
        entry = entries[name]
        assert (entry.dtype, entry.shape, entry.size_bytes, entry.file) == ("int64", (1000,), 8000, PART)
        assert entry.offset_bytes is not None
        assert data[entry.offset_bytes : entry.offset_bytes + 8000] == bytes(tensor.numpy())


def test_a_tensor_in_several_parts_has_no_place_of_its_own(path: Path) -> None:
    metadata: Any = FastPersistReader(path).read_metadata()
    info = metadata.storage_data[MetadataIndex("t1", [0])]
    metadata.storage_data[MetadataIndex("t1", [500])] = replace(info, relative_path="__1_0.distcp")
    put_metadata(path, pickle.dumps(metadata))
    entry = entries_of(path)["t1"]
    assert (entry.file, entry.offset_bytes, entry.shape) == ("__*_0.distcp", None, (1000,))


def test_no_place_is_told_of_what_is_no_blob_of_a_plain_tensor(path: Path) -> None:
    metadata: Any = FastPersistReader(path).read_metadata()
    index = MetadataIndex("t1", [0])
    metadata.storage_data[index] = replace(metadata.storage_data[index], length=metadata.storage_data[index].length + 1)
    put_metadata(path, pickle.dumps(metadata))
    assert entries_of(path)["t1"].offset_bytes is None


@pytest.mark.parametrize("missing", ["dtype", "size"])
def test_metadata_without_a_description_are_refused(path: Path, missing: str) -> None:
    metadata: Any = FastPersistReader(path).read_metadata()
    described = metadata.state_dict_metadata["t1"]
    setattr(*((described.properties, "dtype", 7) if missing == "dtype" else (described, "size", 7)))
    put_metadata(path, pickle.dumps(metadata))
    with pytest.raises(fp.FormatError, match=r"metadata"):
        entries_of(path)


def test_all_damaged_tensors_are_listed_and_the_first_are_named(path: Path) -> None:
    data = bytearray((path / PART).read_bytes())
    for name in list(STATE)[1:]:
        place = place_of(path, name)
        data[place.offset + place.length // 2] ^= 1
    (path / PART).write_bytes(data)
    (damage,) = damages_of(path, Damage("its CRC is wrong", file=PART))
    assert set(damage.tensors) == set(STATE) - {"t0"}
    assert damage.message.startswith("its CRC is wrong; rank 0 wrote it, and in it t1, ")
    assert damage.message.endswith(" and 2 more")


def test_damage_that_says_nothing_of_tensors_names_the_rank_alone(path: Path) -> None:
    other, own, gone = damages_of(
        path,
        Damage("gone", file="config.json"),
        Damage("gone", file="rank-00003.pt"),
        Damage("gone", file="__7_0.distcp"),
    )
    assert other == Damage("gone", file="config.json")
    assert (own.message, own.tensors) == ("gone; rank 3 wrote it", ())
    assert (gone.message, gone.tensors) == ("gone; rank 7 wrote it", ())
    (path / ".metadata").write_bytes(b"no metadata")
    (damage,) = damages_of(path, Damage("its CRC is wrong", file=PART))
    assert (damage.message, damage.tensors) == ("its CRC is wrong; rank 0 wrote it", ())
