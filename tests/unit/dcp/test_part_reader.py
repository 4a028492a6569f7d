"""Any box of a tensor is read from a part file, ours or torch's, and no more of the file than it takes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import (
    IGNORED,
    PART,
    WRITERS,
    load,
    place_of,
    portrait,
    save,
)

from fastpersist.dcp import part_reader
from fastpersist.dcp.part_reader import PartReader, Wanted

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]


def test_sparse_tensors_go_through_torch_load(tmp_path: Path) -> None:
    """Which DCP does not need: its planners fill a copy of a sparse target."""
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    save({"sparse": sparse}, tmp_path / "checkpoint")
    place = place_of(tmp_path / "checkpoint", "sparse")
    target = torch.zeros(2, 2).to_sparse()
    stored = (torch.float32, (2, 2))
    wanted = Wanted("sparse", place.offset, place.length, stored, (0, 0), (2, 2), target, lambda _: None)
    with PartReader(str(tmp_path / "checkpoint"), PART, engine="auto", verify=True) as reader:
        reader.read([wanted])
    assert torch.equal(target.to_dense(), sparse.to_dense())


BOXES = [
    ((), (), ()),
    ((10,), (2,), (5,)),
    ((10,), (2,), (0,)),
    ((6, 8), (1, 0), (3, 8)),
    ((6, 8), (1, 2), (3, 4)),
    ((6, 8), (2, 3), (1, 4)),
    ((5, 4, 8), (1, 1, 0), (2, 3, 8)),
    ((5, 4, 8), (0, 1, 2), (5, 2, 3)),
    ((4, 1, 6), (1, 0, 0), (2, 1, 5)),
    ((64, 2, 3000), (3, 0, 500), (20, 2, 2000)),
    ((2000, 40), (7, 1), (1900, 3)),
]


@pytest.mark.parametrize("writer", ["ours", "torch's"])
@pytest.mark.parametrize("temporary_bytes", [64 << 20, 100], ids=["roomy", "narrow"])
@pytest.mark.parametrize("transposed", [False, True], ids=["straight", "transposed"])
def test_any_box_of_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, temporary_bytes: int, transposed: bool
) -> None:
    monkeypatch.setattr(part_reader, "_TEMPORARY_BYTES", temporary_bytes)
    tensors = {str(number): torch.randn(shape) for number, (shape, _, _) in enumerate(BOXES)}
    dcp.save(tensors, storage_writer=WRITERS[writer](tmp_path / "checkpoint"))
    wanted, targets, done = [], [], []
    for number, (shape, offsets, lengths) in enumerate(BOXES):
        place = place_of(tmp_path / "checkpoint", str(number))
        target = (
            torch.zeros(lengths[::-1]).permute(list(range(len(shape)))[::-1]) if transposed else torch.zeros(lengths)
        )
        targets.append(target)
        stored = (torch.float32, shape)
        take = [lambda _, number=number: done.append(number)][0]
        wanted.append(Wanted(str(number), place.offset, place.length, stored, offsets, lengths, target, take))
    with PartReader(str(tmp_path / "checkpoint"), PART, engine="auto", verify=True) as reader:
        reader.read(wanted)
    assert sorted(done) == list(range(len(BOXES)))
    for number, (_, offsets, lengths) in enumerate(BOXES):
        box = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
        assert torch.equal(targets[number], tensors[str(number)][box])


@pytest.mark.parametrize(("offsets", "lengths"), [((100, 0), (8, 1024)), ((0, 512), (1 << 12, 512))])
def test_only_what_is_wanted_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offsets: tuple[int, int], lengths: tuple[int, int]
) -> None:
    rows, columns = 1 << 12, 1 << 10
    save({"a": torch.arange(rows * columns).reshape(rows, columns)}, tmp_path / "checkpoint")
    place = place_of(tmp_path / "checkpoint", "a")
    read_bytes = []
    transfer = PartReader.transfer

    def counted(self: PartReader, extents: Any) -> list[int]:
        read_bytes.append(sum(size for _, size in extents.places()))
        return transfer(self, extents)

    monkeypatch.setattr(PartReader, "transfer", counted)
    target = torch.zeros(lengths, dtype=torch.int64)
    stored = (torch.int64, (rows, columns))
    wanted = Wanted("a", place.offset, place.length, stored, offsets, lengths, target, lambda _: None)
    with PartReader(str(tmp_path / "checkpoint"), PART, engine="auto", verify=True) as reader:
        reader.read([wanted])
    assert target[0, 0] == offsets[0] * columns + offsets[1]
    assert sum(read_bytes) < 1.1 * target.nbytes


def test_many_small_items_are_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {str(number): torch.full((number % 7 + 1,), float(number)) for number in range(3000)}
    save(state, tmp_path / "checkpoint")
    calls = []
    transfer = PartReader.transfer

    def counted(self: PartReader, extents: Any) -> list[int]:
        calls.append(len(extents))
        return transfer(self, extents)

    monkeypatch.setattr(PartReader, "transfer", counted)
    assert portrait(load(tmp_path / "checkpoint", state)) == portrait(state)
    assert len(calls) == math.ceil(3 * len(state) / part_reader._EXTENT_COUNT)
