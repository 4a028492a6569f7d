"""`.metadata` is pickled once for a plan; what comes of it is a pickle of DCP's, for any reader."""

from __future__ import annotations

import io
import pickle
import pickletools
from array import array
from typing import Any

import pytest
from support.held_groups import group, item, whole
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from fastpersist.dcp.global_plan import kept_metadata
from fastpersist.dcp.global_plan.assignment import WholePlan, assign
from fastpersist.dcp.global_plan.kept_metadata import KeptMetadata
from fastpersist.dcp.metadata import build_pickled


def plan_of(tensor_count: int, object_count: int) -> WholePlan:
    names = [f"model.layers.{number}.weight" for number in range(tensor_count)]
    groups = [group([r], [item(name, (4, 3), (2 * r, 0), (2, 3)) for name in names]) for r in range(2)]
    objects = [[f"object.{number}" for number in range(object_count)], ["of rank 1"] * bool(object_count)]
    paths = {name: tuple(name.split(".")) for names in ([*names], *objects) for name in names}
    return assign(groups, objects, [paths])


def places_of(plan: WholePlan, shift: int = 0) -> tuple[list[bytes], list[list[tuple[int, int]]]]:
    counts = [len(share.items) for share in plan.shares]
    tensors = [array("Q", [n for i in range(count) for n in (64 * i + shift, 60)]).tobytes() for count in counts]
    return tensors, [[(9000 + index, 5 + index) for index in range(len(share.objects))] for share in plan.shares]


@pytest.mark.parametrize(("tensor_count", "object_count"), [(0, 0), (0, 3), (1, 0), (1, 1), (3, 2), (1500, 1200)])
def test_it_is_what_a_pickler_writes(tensor_count: int, object_count: int) -> None:
    plan = plan_of(tensor_count, object_count)
    places, object_places = places_of(plan)
    meta = StorageMeta("/root/step-00000001", "of this save")
    data = KeptMetadata(plan).pickle(places, object_places, meta)
    pickletools.dis(data, io.StringIO())  # Python's own walk over all opcodes, with its checks of stack and memo
    read = pickle.loads(data)
    for metadata in (read, pickle._loads(data), build_pickled(data)):  # type: ignore[attr-defined]
        assert type(metadata) is Metadata
        assert metadata == read
    assert read.storage_meta == meta
    assert len(read.state_dict_metadata) == tensor_count + object_count + bool(object_count)
    assert list(read.state_dict_metadata) == list(read.planner_data)
    assert len(read.storage_data) == 2 * tensor_count + object_count + bool(object_count)
    for number in range(tensor_count):
        name = f"model.layers.{number}.weight"
        assert [tuple(chunk.offsets) for chunk in read.state_dict_metadata[name].chunks] == [(0, 0), (2, 0)]
        for rank in range(2):
            place = read.storage_data[MetadataIndex(name, (2 * rank, 0))]
            assert place == _StorageInfo(f"__{rank}_0.distcp", 64 * number, 60)
    for number in range(object_count):
        assert read.state_dict_metadata[f"object.{number}"] == BytesStorageMetadata()
        place = read.storage_data[MetadataIndex(f"object.{number}")]
        assert place == _StorageInfo("__0_0.distcp", 9000 + number, 5 + number)


def test_the_body_is_pickled_once_for_tensors_that_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []
    pickled = kept_metadata.pickled_unframed

    def counting(value: object) -> bytes:
        bodies.append(value)
        return pickled(value)

    monkeypatch.setattr(kept_metadata, "pickled_unframed", counting)
    plan = plan_of(10, 2)
    kept = KeptMetadata(plan)
    found: list[Any] = []
    for save in range(4):
        places, object_places = places_of(plan)
        object_places[0][1] = (9100 * save, 7)  # an object whose pickle has become longer
        found.append(pickle.loads(kept.pickle(places, object_places, StorageMeta(f"/root/{save}", str(save)))))
    assert len(bodies) == 1
    assert [one.storage_meta.save_id for one in found] == ["0", "1", "2", "3"]
    assert [one.storage_data[MetadataIndex("object.1")].offset for one in found] == [0, 9100, 18200, 27300]
    kept.pickle(*places_of(plan, shift=8), StorageMeta())
    assert len(bodies) == 2


def test_an_offset_is_pickled_once_for_chunk_and_place() -> None:
    plan = plan_of(1000, 0)
    data = KeptMetadata(plan).pickle(*places_of(plan), StorageMeta())
    copied = pickle.loads(data)
    copied.storage_data = {
        MetadataIndex(index.fqn, list(index.offset), index.index): info for index, info in copied.storage_data.items()
    }
    assert len(data) < len(pickle.dumps(copied, 4)) - 6 * len(copied.storage_data)


def test_plain_tensors_are_described_whole() -> None:
    plan = assign([group([0, 1], [whole("a", 3)])], [[], []], [])
    data = KeptMetadata(plan).pickle(*places_of(plan), StorageMeta())
    assert [tuple(chunk.sizes) for chunk in pickle.loads(data).state_dict_metadata["a"].chunks] == [(3,)]
