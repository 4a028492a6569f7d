"""Replicas are cut into chunks, among the ranks with least to write; rows are not cut, and no chunk is small."""

from __future__ import annotations

import pytest
import torch
from support.dcp_states import (
    IGNORED,
)
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from fastpersist.dcp.save_planner import cut_replicas

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]


def plans_of(*held: dict[str, torch.Tensor]) -> list[SavePlan]:
    return [create_default_local_save_plan(state, rank == 0) for rank, state in enumerate(held)]


def chunks_in(plans: list[SavePlan], name: str) -> list[tuple[int, int, int]]:
    """Return rank, first row and rows of each chunk, in order of the rows."""
    found = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.index.fqn == name:
                chunk = item.tensor_data.chunk  # type: ignore[union-attr]
                assert item.index.offset == chunk.offsets
                found.append((rank, chunk.offsets[0], chunk.sizes[0]))
    return sorted(found, key=lambda one: one[1])


def test_replicas_are_cut_into_chunks_that_do_not_overlap() -> None:
    state = {"a": torch.zeros(3_000_001), "b": torch.zeros(7, 100_000), "small": torch.zeros(1000)}
    plans = cut_replicas(plans_of(state, state, state))
    assert len({rank for rank, _, _ in chunks_in(plans, "a")}) == 3
    for name in ("a", "b"):
        chunks = chunks_in(plans, name)
        ends = [first + count for _, first, count in chunks]
        assert [first for _, first, _ in chunks] == [0, *ends[:-1]]
        assert ends[-1] == len(state[name])
    assert [count for _, _, count in chunks_in(plans, "small")] == [1000, 1000, 1000]


def test_no_chunk_is_smaller_than_a_mebibyte_and_those_with_less_to_do_get_them() -> None:
    shared = {"a": torch.zeros(600_000)}  # 2.4 MB
    plans = cut_replicas(plans_of({**shared, "own": torch.zeros(900_000)}, shared, shared))
    assert [rank for rank, _, _ in chunks_in(plans, "a")] == [1, 2]


def test_rows_are_not_cut() -> None:
    state = {"a": torch.zeros(2, 1_000_000), "b": torch.zeros(1, 1_000_000), "c": torch.tensor(1.0)}
    plans = cut_replicas(plans_of(*[state] * 4))
    assert [count for _, _, count in chunks_in(plans, "a")] == [1, 1]
    assert [count for _, _, count in chunks_in(plans, "b")] == [1] * 4  # as it was
