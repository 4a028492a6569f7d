"""Tensors in shards, ours and those of torch's own writer: rows of the whole, values, comparison and conversion."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.archives import flip_bit
from torch.distributed.checkpoint.metadata import Metadata

import fastpersist as fp
from fastpersist.contents.comparison import compare
from fastpersist.contents.conversion import Wish, convert
from fastpersist.contents.pieces import read_pieces
from fastpersist.contents.sharded import Shards
from fastpersist.contents.stored import open_contents
from fastpersist.dcp.metadata import METADATA_NAME, pickled
from fastpersist.integrations.torch_dcp import FastPersistWriter


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    model = {
        "large": torch.randn(6000, 1000, generator=generator),
        "wide": torch.randn(1, 5_000_000, generator=generator),
        "half": torch.randn(7, 3, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    return {"model": model, "step": 7, "names": ["a", "b"]}


def save(directory: Path, writer: str, what: dict[str, Any]) -> None:
    if writer == "ours":
        dcp.save(what, storage_writer=FastPersistWriter(directory), no_dist=True)
    elif writer == "torch":
        dcp.save(what, checkpoint_id=directory, no_dist=True)
    else:
        with fp.Checkpointer(directory.parent / "run", sharded=True) as checkpoints:
            checkpoints.save(1, what)
        (directory.parent / "run" / "step-00000001").rename(directory)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", ["ours", "torch", "checkpointer"])
def test_one_file_of_shards(tmp_path: Path, writer: str) -> None:
    save(tmp_path / "dcp", writer, state())
    with open_contents(str(tmp_path / "dcp")) as contents:
        assert contents.values["step"] == "7"
        report = convert(contents, str(tmp_path / "one.safetensors"), Wish(prefixes={"model.": ""}))
    assert report.checked_count == (0 if writer == "torch" else 5)
    found = load_file(tmp_path / "one.safetensors")
    expected = state()["model"]
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.filterwarnings("ignore")
def test_shards_are_compared_with_a_file(tmp_path: Path) -> None:
    save(tmp_path / "dcp", "ours", state())
    other = state()
    other["model"]["large"][5999, 999] += 1
    fp.save(other["model"], tmp_path / "b.pt")
    fp.save({"model": other["model"]}, tmp_path / "c.pt")
    with open_contents(str(tmp_path / "dcp")) as ours, open_contents(str(tmp_path / "c.pt")) as theirs:
        found = compare(ours, theirs, ["model.*"])
    assert [(one.name, one.differing_count) for one in found.tensors] == [("model.large", 1)]
    assert found.equal_count == 4


def boxes_of(directory: Path, whole: torch.Tensor, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Write a tensor in boxes, as several ranks would."""
    directory.mkdir()
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks, places = [], {}
    for rank, (offsets, sizes) in enumerate(boxes):
        part = whole
        for dimension, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dimension, start, size)
        path = directory / f"__{rank}_0.distcp"
        torch.save(part.contiguous(), path)
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        info = _StorageInfo(path.name, 0, path.stat().st_size)
        places[MetadataIndex("w", torch.Size(offsets))] = info
    described = TensorStorageMetadata(TensorProperties(whole.dtype), whole.size(), chunks)
    metadata = Metadata({"w": described}, storage_data=places)
    (directory / METADATA_NAME).write_bytes(pickled(metadata))


BOXES = {
    "rows": [((0, 0), (3, 8)), ((3, 0), (2, 8)), ((5, 0), (1, 8))],
    "columns": [((0, 0), (6, 3)), ((0, 3), (6, 5))],
    "both": [((0, 0), (4, 3)), ((0, 3), (4, 5)), ((4, 0), (2, 8))],
}


@pytest.mark.parametrize("boxes", BOXES.values(), ids=BOXES)
def test_any_rows_of_any_boxes(tmp_path: Path, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    boxes_of(tmp_path / "dcp", whole, boxes)
    with ExitStack() as stack:
        shards = Shards(str(tmp_path / "dcp"), engine="auto", stack=stack)
        assert shards.tensors == {"w": (torch.float32, (6, 8))}
        for first in range(6):
            for end in range(first + 1, 7):
                assert torch.equal(shards.rows("w", first, end), whole[first:end])


def test_pieces_of_columns(tmp_path: Path) -> None:
    whole = torch.arange(6_000_000.0).reshape(3000, 2000)
    boxes_of(tmp_path / "dcp", whole, [((0, 0), (3000, 700)), ((0, 700), (3000, 1300))])
    with open_contents(str(tmp_path / "dcp")) as contents:
        stored = contents.tensors["w"]
        found = [piece.values(stored.dtype).clone() for batch in read_pieces([stored]) for piece in batch]
    assert torch.equal(torch.cat(found).reshape(3000, 2000), whole)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    boxes_of(tmp_path / "dcp", torch.ones(6, 8), BOXES["rows"])
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    with (
        open_contents(str(tmp_path / "dcp")) as contents,
        pytest.raises(fp.CheckpointNotFoundError, match="__1_0"),
    ):
        list(read_pieces(list(contents.tensors.values())))


def test_metadata_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    boxes_of(tmp_path / "dcp", torch.ones(6, 8), BOXES["rows"][:2])
    with pytest.raises(fp.CorruptionError), open_contents(str(tmp_path / "dcp")):
        pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["file", "shards"])
def test_damage_of_a_part_publishes_nothing(tmp_path: Path, form: str) -> None:
    save(tmp_path / "dcp", "ours", state())
    (part,) = (tmp_path / "dcp").glob("*.distcp")
    flip_bit(part, part.stat().st_size // 2)
    wish = Wish(shard_bytes=1 << 20 if form == "shards" else None)
    with (
        pytest.raises(fp.ChecksumError, match=rf"{part.name}: its bytes are damaged: .*\(rank 0 wrote it\)"),
        open_contents(str(tmp_path / "dcp")) as contents,
    ):
        convert(contents, str(tmp_path / "out.pt"), wish)
    assert os.listdir(tmp_path) == ["dcp"]


@pytest.mark.filterwarnings("ignore")
def test_only_the_parts_that_are_converted_are_compared(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run", sharded=True) as checkpoints:
        checkpoints.save(1, state(), rank_state={"seed": torch.ones(3)})
    step = tmp_path / "run" / "step-00000001"
    (part,) = step.glob("*.distcp")
    flip_bit(part, part.stat().st_size // 2)
    with open_contents(str(step)) as contents:
        report = convert(contents, str(tmp_path / "a.pt"), Wish(patterns=["rank-00000.pt:*"]))
    assert (report.tensor_count, report.checked_count) == (1, 1)
