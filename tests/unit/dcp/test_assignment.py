"""Who writes what: each chunk once, large replicas by all who hold them, small ones in few files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.held_groups import group, item, whole
from torch.distributed.checkpoint.planner import WriteItem

from fastpersist.dcp.global_plan.assignment import WHOLE, Group, WholePlan, assign, common_of
from fastpersist.dcp.global_plan.kept_metadata import metadata_of
from fastpersist.errors import CoordinationError


def planned(*groups: Group, objects: Sequence[Sequence[str]] = ()) -> WholePlan:
    count = sum(len(one.ranks) for one in groups)
    return assign(groups, objects or [[]] * count, [])


def writes(plan: WholePlan) -> list[tuple[str, int, int]]:
    """Return rank, name and number of elements of all that is written."""
    found = []
    for rank, (own, share) in enumerate(zip(plan.held_by(), plan.shares, strict=True)):
        for number, first, count in zip(share.items, share.first_rows, share.row_counts, strict=True):
            _, lengths = own.place(number)
            shape = lengths if first == WHOLE else (count, *lengths[1:])
            found.append((own.described.names[own.described.name_of[number]], rank, torch.Size(shape).numel()))
    return found


def test_each_rank_writes_what_only_it_holds() -> None:
    groups = [group([rank], [item("w", (8, 2), (2 * rank, 0), (2, 2))]) for rank in range(4)]
    assert writes(planned(*groups)) == [("w", rank, 4) for rank in range(4)]


def test_replicas_of_a_shard_are_cut_among_their_ranks() -> None:
    """Two shards of 8 MiB, each on 4 ranks."""
    groups = [group([s, s + 2, s + 4, s + 6], [item("w", (4096, 1024), (2048 * s, 0), (2048, 1024))]) for s in range(2)]
    assert writes(planned(*groups)) == [("w", rank, 512 * 1024) for rank in range(8)]


def test_small_replicas_and_objects_lie_in_few_files() -> None:
    """300 tensors of 400 KB on 64 ranks are 120 MB: two files. DCP gives each of 64 ranks a few."""
    names = [f"small.{number}" for number in range(300)]
    plan = planned(
        group(list(range(64)), [whole(name, 100_000) for name in names]),
        objects=[["step", "rates", f"sampler of {rank}"] for rank in range(64)],
    )
    assert {rank for _, rank, _ in writes(plan)} == {0, 1}
    assert sorted(name for name, _, _ in writes(plan)) == sorted(names)
    assert plan.shares[0].objects == ["step", "rates", "sampler of 0"]
    assert plan.shares[7].objects == ["sampler of 7"]


def test_what_cannot_be_cut_goes_to_who_has_least() -> None:
    """One row cannot be cut; a rank of the group writes 4 MB of its own already."""
    alone = group([0], [whole("own", 1 << 20), whole("row", 1, 1 << 20)])
    others = group([1, 2], [whole("row", 1, 1 << 20)])
    assert writes(planned(alone, others)) == [("own", 0, 1 << 20), ("row", 1, 1 << 20)]


def test_empty_chunks_are_no_second_chunk() -> None:
    groups = [
        group([0], [item("w", (2, 3), (0, 0), (0, 3))]),
        group([1], [item("w", (2, 3), (0, 0), (2, 3))]),
        group([2, 3], [item("w", (2, 3), (2, 0), (0, 3))]),
    ]
    assert writes(planned(*groups)) == [("w", 1, 6), ("w", 2, 0)]


@pytest.mark.parametrize(
    "others",
    [
        [item("w", (8, 2), (4, 0), (3, 2))],
        [item("w", (8, 2), (3, 0), (4, 2))],
        [item("w", (8, 2), (3, 0), (5, 2))],
        [item("w", (8, 2), (0, 0), (8, 2))],
        [],
    ],
)
def test_what_makes_no_whole_tensor_is_refused(others: list[WriteItem]) -> None:
    with pytest.raises(CoordinationError, match=r"no whole tensors \(w\)"):
        planned(group([0], [item("w", (8, 2), (0, 0), (4, 2))]), group([1], others))


def test_chunks_in_both_dimensions_are_whole() -> None:
    places = [((0, 0), (1, 2)), ((0, 2), (1, 2)), ((1, 0), (3, 3)), ((1, 3), (3, 1))]
    groups = [group([rank], [item("w", (4, 4), *place)]) for rank, place in enumerate(places)]
    assert len(writes(planned(*groups))) == 4
    groups[1] = group([1], [item("w", (4, 4), (0, 1), (1, 2))])
    with pytest.raises(CoordinationError, match="whole"):
        planned(*groups)


def test_a_name_that_means_two_things_is_refused() -> None:
    tensor = group([0], [whole("a", 3)])
    with pytest.raises(CoordinationError, match=r"'a' is a sharded tensor of shape \(3,\).* on rank 0, and .*\(4,\)"):
        planned(tensor, group([1], [whole("a", 4)]))
    with pytest.raises(CoordinationError, match=r"'a' is a sharded tensor of shape \(3,\).* on rank 0, and an object"):
        planned(tensor, group([1], []), objects=[[], ["a"]])


def test_sums_of_what_several_ranks_hold_are_compared() -> None:
    items = [whole("a", 3), whole("b", 3)]
    groups = [group([0, 2], items, {"a": 1, "b": 2}), group([1], [whole("a", 3)], {"a": 1})]
    assert common_of(groups) == [{"0 1 2": ["a"], "0 2": ["b"]}, {"0 1 2": ["a"]}]
    groups[1] = group([1], [whole("a", 3)], {"a": 5})
    with pytest.raises(CoordinationError, match=r"'a'.*rank 0 .*than rank 1\."):
        common_of(groups)


@pytest.mark.parametrize("seed", range(20))
def test_all_that_is_held_is_written_once(seed: int) -> None:
    rng = random.Random(seed)
    shards, replicas = rng.randint(1, 5), rng.randint(1, 4)
    sizes = {f"t{number}": (shards * rng.randint(1, 3000), rng.choice([1, 7, 2000])) for number in range(12)}
    groups = []
    for shard in range(shards):
        items = []
        for name, (rows, columns) in sizes.items():
            items.append(item(name, (rows, columns), (rows // shards * shard, 0), (rows // shards, columns)))
        groups.append(group([shard * replicas + one for one in range(replicas)], items))
    plan = planned(*groups)
    totals: dict[str, int] = {}
    for name, _, count in writes(plan):
        totals[name] = totals.get(name, 0) + count
    assert totals == {name: rows * columns for name, (rows, columns) in sizes.items()}
    described: Any = metadata_of(plan).state_dict_metadata
    assert {name: sum(chunk.sizes.numel() for chunk in one.chunks) for name, one in described.items()} == totals
