"""A tensor whose chunks do not cover it is refused: nothing is loaded that was never saved."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import failure_of, load, put_metadata, save
from support.store_runs import step_path
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import fastpersist as fp
from fastpersist.checkpointer.merge import merge
from fastpersist.dcp.coverage import is_covered
from fastpersist.integrations.torch_dcp import FastPersistReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Offsets and sizes."""


def covered(size: tuple[int, ...], boxes: Boxes) -> bool:
    return is_covered(size, [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes])


def painted(size: tuple[int, ...], boxes: Boxes) -> bool:
    """Tell the same from a picture."""
    picture = torch.zeros(size, dtype=torch.bool)
    for offsets, sizes in boxes:
        picture[tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))] = True
    return bool(picture.all())


PINWHEEL: Boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
WIDE_PINWHEEL: Boxes = [((0, 0, 0), (1, 2, 5)), *[((*at, 0), (*of, 5)) for at, of in PINWHEEL[1:]]]

CASES: list[tuple[tuple[int, ...], Boxes, bool]] = [
    ((), [], False),
    ((), [((), ())], True),
    ((0,), [], True),
    ((0, 7), [], True),
    ((4,), [], False),
    ((4,), [((0,), (4,))], True),
    ((4,), [((0,), (3,))], False),
    ((4,), [((1,), (3,))], False),
    ((4,), [((0,), (2,)), ((2,), (2,)), ((4,), (0,))], True),
    ((4,), [((0,), (2,)), ((0,), (2,))], False),
    ((6,), [((0,), (4,)), ((2,), (4,))], True),
    ((6,), [((0,), (4,)), ((0,), (4,))], False),
    ((2, 2), [((0, 0), (2, 1)), ((0, 0), (2, 1))], False),
    ((2, 2), [((0, 0), (2, 0)), ((0, 0), (0, 2))], False),
    ((3, 3), PINWHEEL, True),
    ((3, 3), PINWHEEL[:4], False),
    ((3, 3), [*PINWHEEL[:4], ((0, 0), (2, 1))], False),
    ((3, 3, 5), WIDE_PINWHEEL, True),
    ((3, 3, 5), [*WIDE_PINWHEEL[:-1], ((1, 1, 0), (1, 1, 4))], False),
    ((3, 3, 5), [*WIDE_PINWHEEL[:-1], ((1, 1, 0), (1, 1, 4)), ((0, 0, 0), (1, 1, 5))], False),
]


@pytest.mark.parametrize(("size", "boxes", "expected"), CASES)
def test_elements_that_no_chunk_has_are_found(size: tuple[int, ...], boxes: Boxes, expected: bool) -> None:
    assert painted(size, boxes) is expected
    assert covered(size, boxes) is expected


def random_cut(rng: random.Random, offsets: list[int], sizes: list[int], depth: int) -> Boxes:
    """Cut a box into parts that do not overlap."""
    wide = [dimension for dimension, length in enumerate(sizes) if length > 1]
    if not depth or not wide:
        return [(tuple(offsets), tuple(sizes))]
    dimension = rng.choice(wide)
    at = rng.randrange(1, sizes[dimension])
    left, right, behind = sizes.copy(), sizes.copy(), offsets.copy()
    left[dimension] = at
    right[dimension] -= at
    behind[dimension] += at
    return random_cut(rng, offsets, left, depth - 1) + random_cut(rng, behind, right, depth - 1)


@pytest.mark.parametrize("seed", range(400))
def test_any_boxes_are_judged_as_in_a_picture(seed: int) -> None:
    rng = random.Random(seed)
    size = tuple(rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randrange(1, 4)))
    boxes = random_cut(rng, [0] * len(size), list(size), rng.randrange(4))
    for _ in range(rng.choice([0, 0, 1, 3])):  # others over them
        offsets = [rng.randrange(length + 1) for length in size]
        sizes = [rng.randrange(length - start + 1) for start, length in zip(offsets, size, strict=True)]
        boxes.append((tuple(offsets), tuple(sizes)))
    rng.shuffle(boxes)
    assert covered(size, boxes) is painted(size, boxes)
    for missing in range(len(boxes)):
        fewer = boxes[:missing] + boxes[missing + 1 :]
        assert covered(size, fewer) is painted(size, fewer)


def test_many_chunks_of_a_grid_are_few_looks() -> None:
    rows, columns, layers = 20, 30, 10
    boxes: Boxes = [
        ((2 * row, 3 * column, 4 * layer), (2, 3, 4))
        for row, column, layer in itertools.product(range(rows), range(columns), range(layers))
    ]
    random.Random(1).shuffle(boxes)
    assert covered((2 * rows, 3 * columns, 4 * layers), boxes)
    assert not covered((2 * rows, 3 * columns, 4 * layers), boxes[:-1])


def test_chunks_that_overlap_in_many_ways_do_not_cost_their_square() -> None:
    """Rows and columns without their diagonal, and the diagonal."""
    count = 400
    boxes: Boxes = []
    for n in range(count):
        boxes += [((n, 0), (1, n)), ((n, n + 1), (1, count - n - 1)), ((n, n), (1, 1))]
        boxes += [((0, n), (n, 1)), ((n + 1, n), (count - n - 1, 1))]
    with pytest.raises(fp.FormatError, match="too many ways"):
        covered((count, count), boxes)


# --- loading


def without_chunks(metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"].chunks.clear()  # type: ignore[union-attr]


def with_a_part(metadata: Metadata) -> None:
    (chunk,) = metadata.state_dict_metadata["w"].chunks  # type: ignore[union-attr]
    chunk.sizes = torch.Size([chunk.sizes[0] - 1])


@pytest.mark.parametrize("change", [without_chunks, with_a_part])
@pytest.mark.parametrize("is_target", [True, False])
def test_a_step_with_a_tensor_that_is_not_covered_is_not_loaded(tmp_path: Path, change: Any, is_target: bool) -> None:
    with fp.Checkpointer(tmp_path / "run", sharded=True) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((1000,), float(step))}).result()
    step_2 = step_path(tmp_path / "run", 2)
    metadata = FastPersistReader(step_2).read_metadata()
    change(metadata)
    put_metadata(step_2, pickle.dumps(metadata))
    target = torch.full((1000,), 7.0)
    into = {"w": target} if is_target else None
    with pytest.raises(fp.FormatError, match=r"'w' has shape \(1000,\).*do not cover it"):
        checkpoints.load(2, into=into)
    assert target.tolist() == [7.0] * 1000
    with pytest.warns(RuntimeWarning, match="going back"):
        found = checkpoints.load(into=into)
    assert found["w"].tolist() == [1.0] * 1000


def test_dcp_does_not_load_a_tensor_that_is_not_covered(tmp_path: Path) -> None:
    save({"w": torch.ones(1000)}, tmp_path)
    metadata = FastPersistReader(tmp_path).read_metadata()
    without_chunks(metadata)
    put_metadata(tmp_path, pickle.dumps(metadata))
    error = failure_of(lambda: load(tmp_path, {"w": torch.zeros(1000)}))
    assert isinstance(error, fp.FormatError)
    assert "'w', of shape (1000,), is not whole" in str(error)
    with pytest.raises(fp.FormatError, match="do not cover it"):
        merge([tmp_path], tmp_path.with_suffix(".pt"))


def test_chunks_that_overlap_are_read(tmp_path: Path) -> None:
    """As stock readers do: rows 2 and 3 are in both."""
    state = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.arange(12.0, 36.0).reshape(4, 6)}
    save(state, tmp_path)
    metadata: Any = FastPersistReader(tmp_path).read_metadata()
    first, second = metadata.state_dict_metadata["a"], metadata.state_dict_metadata["b"]
    places = metadata.storage_data
    second.chunks[0].offsets = torch.Size([2, 0])
    first.chunks += second.chunks
    first.size = torch.Size([6, 6])
    places[MetadataIndex("a", [2, 0])] = places.pop(MetadataIndex("b", [0, 0]))
    del metadata.state_dict_metadata["b"]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    expected = torch.arange(36.0).reshape(6, 6)
    for reader in (FastPersistReader, dcp.FileSystemReader):
        found = {"a": torch.zeros(6, 6)}
        dcp.load(found, storage_reader=reader(tmp_path), no_dist=True)
        assert torch.equal(found["a"], expected)
    assert math.prod(expected.shape) < sum(chunk.sizes.numel() for chunk in first.chunks)


def only_rows(metadata: Any, first: int, count: int) -> None:
    """Leave a part of what is described, as one rank's own metadata have it."""
    described = metadata.state_dict_metadata["w"]
    described.size = torch.Size([first + count + 5])
    described.chunks[0].offsets = torch.Size([first])
    metadata.storage_data = {MetadataIndex("w", [first]): info for info in metadata.storage_data.values()}


def test_what_a_rank_wants_may_be_all_that_there_is(tmp_path: Path) -> None:
    """A rank that has saved its own part alone can load that: nothing else is missed."""
    save({"w": torch.arange(10.0)}, tmp_path)
    metadata = FastPersistReader(tmp_path).read_metadata()
    only_rows(metadata, 20, 10)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))

    class Part(torch.Tensor):
        """Stands for a shard of a tensor of 35 elements."""

        first = 20

        def size(self, *dimension: int) -> Any:
            return torch.Size([35]) if not dimension else 35

        def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
            return [ChunkStorageMetadata(torch.Size([self.first]), torch.Size([10]))]

        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    state = {"w": torch.zeros(10).as_subclass(Part)}
    dcp.load(state, storage_reader=FastPersistReader(tmp_path), no_dist=True)
    assert state["w"].as_subclass(torch.Tensor).tolist() == list(range(10))
    Part.first = 22
    error = failure_of(lambda: dcp.load(state, storage_reader=FastPersistReader(tmp_path), no_dist=True))
    assert "from (22,) on, (10,) of them" in str(error)
