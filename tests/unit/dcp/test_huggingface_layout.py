"""Where chunks lie in the files of a model: however they are cut, each byte has one place, and somebody to write it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fastpersist.dcp.huggingface import layout as huggingface_layout
from fastpersist.dcp.huggingface.layout import Place, in_file_order, plan_model, runs_of, without_duplicates


def chunk(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> WriteItem:
    where = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
    data = TensorWriteData(where, TensorProperties(dtype=torch.int32), torch.Size(shape))
    return WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape, and boxes that make it up: a grid, with empty boxes in it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    bounds = [
        sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) + ([size] if draw(st.booleans()) else [])
        for size in shape
    ]
    intervals = [list(itertools.pairwise(each)) for each in bounds]
    boxes = [
        (tuple(low for low, _ in box), tuple(high - low for low, high in box)) for box in itertools.product(*intervals)
    ]
    return shape, boxes


@settings(max_examples=300)
@given(cut=cut_tensors(), offset_bytes=st.integers(0, 40).map(lambda n: 4 * n), unit_bytes=st.sampled_from([1, 8, 32]))
def test_every_byte_of_every_chunk_has_its_place(
    cut: tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]], offset_bytes: int, unit_bytes: int
) -> None:
    shape, boxes = cut
    whole = torch.arange(1, math.prod(shape) + 1, dtype=torch.int32).reshape(shape)
    file = bytearray(offset_bytes + whole.nbytes)
    place = Place(0, offset_bytes, whole.nbytes, gathered=False)
    for offsets, lengths in boxes:
        own = whole[tuple(slice(low, low + length) for low, length in zip(offsets, lengths, strict=True))]
        data = own.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        runs = runs_of(chunk("w", shape, offsets, lengths), place, unit_bytes)
        assert sum(size for _, size, _ in (*runs.own, *runs.left)) == len(data)
        assert all(size % unit_bytes == at % unit_bytes == 0 for _, size, at in runs.own)
        assert unit_bytes > 1 or not runs.left
        for start, size, at in (*runs.own, *runs.left):
            assert size > 0
            assert not any(file[at : at + size])
            file[at : at + size] = data[start : start + size]
    assert bytes(file[offset_bytes:]) == whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_chunks_that_several_ranks_plan_are_written_once_and_empty_ones_never() -> None:
    plans = [
        SavePlan([chunk("w", (4, 2), (0, 0), (2, 2)), chunk("none", (0, 3), (0, 0), (0, 3))]),
        SavePlan([chunk("w", (4, 2), (0, 0), (2, 2)), chunk("w", (4, 2), (2, 0), (2, 2))]),
        SavePlan([chunk("w", (4, 2), (4, 0), (0, 2)), chunk("none", (0, 3), (0, 0), (0, 3))]),
    ]
    found = without_duplicates(plans)
    assert [[(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items] for plan in found] == [
        [("w", (0, 0)), ("none", (0, 0))],
        [("w", (2, 0))],
        [],
    ]


@pytest.mark.parametrize(("unit_bytes", "gathered"), [(1, {"columns"}), (4096, {"columns", "wide columns"})])
def test_many_short_runs_go_through_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, unit_bytes: int, gathered: set[str]
) -> None:
    monkeypatch.setattr(huggingface_layout, "_RUN_BYTES_MIN", 1000)
    items = [
        chunk("rows", (10, 100), (0, 0), (10, 100)),
        chunk("few elements", (3,), (0,), (3,)),
        *(chunk("columns", (10, 100), (0, low), (10, 50)) for low in (0, 50)),
        *(chunk("wide columns", (10, 2000), (0, low), (10, 1000)) for low in (0, 1000)),
        *(chunk("one row", (1, 100), (0, low), (1, 50)) for low in (0, 50)),
    ]
    layout = plan_model(
        [SavePlan(items)], [], max_shard_bytes=1 << 30, indices=None, metadata={}, unit_bytes=unit_bytes
    )
    assert {name for name, place in layout.places.items() if place.gathered} == gathered
    run_bytes = {name: place.run_bytes for name, place in layout.places.items() if place.run_bytes}
    assert run_bytes == {"columns": 200, "wide columns": 4000}
    for item in items:
        runs = runs_of(item, layout.places[item.index.fqn], unit_bytes)
        if item.index.fqn in gathered:
            assert (len(runs.own), len(runs.left)) == (0, 1)


def test_ranks_write_in_the_order_of_the_file() -> None:
    items = [chunk("b", (4,), (2,), (2,)), chunk("a", (4,), (0,), (4,)), chunk("b", (4,), (0,), (2,))]
    places = {"a": Place(1, 0, 16, False), "b": Place(0, 4096, 16, False)}
    ordered = [(item.index.fqn, tuple(item.index.offset or ())) for item in in_file_order(items, places)]
    assert ordered == [("b", (0,)), ("b", (2,)), ("a", (0,))]
