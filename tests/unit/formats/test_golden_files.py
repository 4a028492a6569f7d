"""Files of format version 1 load for ever, and are written again byte for byte."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.golden import (
    CHECKPOINTS,
    DIRECTORY,
    GOLDEN,
    PARTS,
    PARTS_STEP,
    RANK_STATE,
    checkpoint,
    parted,
    save_parts,
)
from support.sameness import assert_same

import fastpersist as fp
from fastpersist.checkpointer.merge import merge
from fastpersist.formats import safetensors, torch_zip
from fastpersist.formats.split_manifest import encode_parts, parse_parts
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.saving.skeleton import pickle_skeleton

pytestmark = pytest.mark.skipif(sys.byteorder == "big", reason="the golden files are of a little-endian machine")

ZIPS = [name for name in GOLDEN if name.endswith(".pt")]
HEADERS = [name for name in GOLDEN if name.endswith(".safetensors")]


def test_all_golden_files_are_there() -> None:
    assert sorted(path.name for path in DIRECTORY.iterdir()) == sorted(GOLDEN)


@pytest.mark.parametrize("name", ZIPS)
def test_zip_holds_what_was_saved(name: str) -> None:
    make, options = GOLDEN[name]
    for loaded in (
        fp.load(DIRECTORY / name, verify="checksum" not in options),
        torch.load(DIRECTORY / name),
    ):
        assert_same(loaded, make())
    assert fp.verify(DIRECTORY / name).ok


@pytest.mark.parametrize("name", HEADERS)
def test_safetensors_hold_what_was_saved(name: str) -> None:
    make, options = GOLDEN[name]
    for loaded in (fp.load(DIRECTORY / name, verify="checksum" not in options), load_file(DIRECTORY / name)):
        assert_same(dict(sorted(loaded.items())), dict(sorted(make().items())))
    manifest = fp.inspect(DIRECTORY / name)
    assert manifest.metadata == options.get("metadata", {})
    assert manifest.has_checksums == ("checksum" not in options)


@pytest.mark.parametrize("name", GOLDEN)
def test_same_object_is_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    make, options = GOLDEN[name]
    if name in ZIPS:
        with CheckpointSource(str(DIRECTORY / name)) as source:
            if pickle_skeleton(make()).pickle != source.pickle:
                pytest.skip(f"torch {torch.__version__} on this Python pickles in another way")
    fp.save(make(), tmp_path / name, **options)
    assert (tmp_path / name).read_bytes() == (DIRECTORY / name).read_bytes()


@pytest.mark.parametrize("name", ZIPS)
def test_zip_is_encoded_byte_for_byte_from_its_records(name: str) -> None:
    """Unlike the test above, whatever the installed torch makes of a tensor."""
    data = (DIRECTORY / name).read_bytes()
    with CheckpointSource(str(DIRECTORY / name)) as source:
        entries = list(source.directory.entries.values())
        contents = [source.read_at(entry.data_offset_bytes, entry.size_bytes) for entry in entries]
        prefix = source.directory.prefix
    sizes = [entry.size_bytes for entry in entries if entry.name.startswith("data/")]
    plan = torch_zip.plan_archive(prefix, entries[0].size_bytes, sizes)
    crcs = [entry.crc for entry in entries]
    encoded = b"".join(
        torch_zip.local_header(record) + content + torch_zip.descriptor(record, crc)
        for record, content, crc in zip(plan.records, contents, crcs, strict=True)
    )
    assert contents[-1] == torch_zip.serialization_id(plan.records[:-1], crcs[:-1])
    assert encoded + torch_zip.central_directory(plan.records, crcs) == data
    assert plan.size_bytes == len(data)


@pytest.mark.parametrize("name", HEADERS)
def test_header_is_encoded_byte_for_byte_from_its_tensors(name: str) -> None:
    data = (DIRECTORY / name).read_bytes()
    with CheckpointSource(str(DIRECTORY / name)) as source:
        header = source.header
    described = [(entry.name, entry.dtype, entry.shape) for entry in sorted(header.entries, key=lambda e: e.name)]
    crcs = [entry.crc for entry in header.entries if entry.crc is not None]
    placed = safetensors.place_tensors(described, header.metadata, checksum=bool(crcs))
    assert [entry.offset_bytes for entry in placed.header.entries] == [entry.offset_bytes for entry in header.entries]
    assert data.startswith(safetensors.encode_header(placed, crcs or None))


@pytest.mark.parametrize("step", [7, 123456789])
def test_checkpoints_of_format_1_load(step: int, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(CHECKPOINTS, root)
    checkpointer = fp.Checkpointer(root)
    assert checkpointer.steps() == [7, 123456789]
    loaded = checkpointer.load(step, verify=True)
    assert_same(loaded.pop("rank_state"), RANK_STATE)
    assert_same(loaded, checkpoint(step))
    found = fp.inspect(root / f"step-{step:08d}")
    assert found.step == step
    assert found.metrics == {"loss": 0.25, "odd é": math.inf}
    assert fp.verify(root).ok


def test_saving_beside_checkpoints_of_format_1_sweeps_what_was_left(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(CHECKPOINTS, root)
    left = root / ".step-00000008.pending-0123456789abcdef"
    assert left.is_dir()
    with fp.Checkpointer(root) as checkpointer:
        checkpointer.save(123456790, {"step": 1})
    assert not left.exists()
    assert checkpointer.steps() == [7, 123456789, 123456790]


# --- a step in parts, of two ranks that share no file system

STEP = f"step-{PARTS_STEP:08d}"
RANDOM_KEYS = ("time_s", "versions", "host", "stats")
"""Of a manifest: what is of the save, and not of what was saved."""


def test_parts_of_format_1_are_merged_to_the_ordinary_file(tmp_path: Path) -> None:
    merge([PARTS / "b" / STEP, PARTS / "a" / STEP], tmp_path / "merged.pt")
    for loaded in (fp.load(tmp_path / "merged.pt", verify=True), torch.load(tmp_path / "merged.pt")):
        assert_same(loaded, parted())


def test_same_step_is_written_in_the_same_parts(tmp_path: Path) -> None:
    merge([PARTS / "a" / STEP, PARTS / "b" / STEP], tmp_path / "merged.pt")
    with CheckpointSource(str(tmp_path / "merged.pt")) as source:
        if pickle_skeleton(parted()).pickle != source.pickle:
            pytest.skip(f"torch {torch.__version__} on this Python pickles in another way")
    save_parts(tmp_path)
    for root in "ab":
        golden, written = PARTS / root / STEP, tmp_path / root / STEP
        assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in golden.iterdir())
        for path in golden.glob("*.part-*"):
            assert (written / path.name).read_bytes() == path.read_bytes()
        # The token is of the save; the rest of the record is of what was saved.
        record = parse_parts((golden / "PARTS.json").read_bytes(), "golden")
        own = parse_parts((written / "PARTS.json").read_bytes(), "written")
        hosts = tuple(replace(store, host=other.host) for store, other in zip(own.stores, record.stores, strict=True))
        assert own.token != record.token
        assert replace(own, token=record.token, stores=hosts) == record
        manifest, own_manifest = (json.loads((path / "MANIFEST.json").read_text()) for path in (golden, written))
        assert own_manifest.pop("commit_number") == 1  # which the golden ones are older than
        assert own_manifest.keys() == manifest.keys()
        for key in set(manifest).difference((*RANDOM_KEYS, "files")):
            assert own_manifest[key] == manifest[key], key
        assert [file["name"] for file in own_manifest["files"]] == [file["name"] for file in manifest["files"]]
        assert manifest["host"].keys() == own_manifest["host"].keys()


@pytest.mark.parametrize("root", ["a", "b"])
def test_record_of_parts_is_encoded_byte_for_byte(root: str) -> None:
    """Unlike the test above, whatever the installed torch makes of a tensor."""
    data = (PARTS / root / STEP / "PARTS.json").read_bytes()
    assert encode_parts(parse_parts(data, "golden")) == data
