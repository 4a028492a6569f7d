"""What is saved of a flat buffer: the views that a file has, and no more than a little of what it has not."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from support.deepspeed_stand_in import deepspeed_integration
from support.sameness import assert_same

deepspeed_integration()

from fastpersist.integrations.deepspeed.views import without_waste  # noqa: E402 - it is beside what needs DeepSpeed

COUNT = 4 << 20  # of a byte each


def flat() -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.int32).to(torch.uint8)


def file_bytes(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6])
def test_a_small_part_of_a_buffer_is_copied(part: float) -> None:
    buffer = flat()
    view = buffer[1000 : 1000 + int(part * COUNT)]
    state = OrderedDict(weight=view, bias=torch.ones(3), deep=[{"again": view}, (view[:10], 5, "text")])
    found, copies = without_waste(state)
    assert_same(found["weight"], view.clone())
    assert found["weight"].untyped_storage().nbytes() == view.nbytes
    assert found["weight"] is found["deep"][0]["again"], "copied once"
    assert found["bias"] is state["bias"]
    assert (type(found), list(found), found["deep"][1][1:]) == (OrderedDict, list(state), (5, "text"))
    assert len(copies) == 2
    assert all(one is found["weight"] or one is found["deep"][1][0] for one in copies)
    assert state["weight"] is view, "what was passed stays as it was"
    assert file_bytes(found) < 2.1 * view.nbytes + 10_000
    buffer.zero_()
    assert part == 0.0 or found["weight"].any(), "nobody else has the copies"


@pytest.mark.parametrize(
    "state",
    [
        [flat()],
        {"a": flat()[: COUNT // 2], "b": flat()[COUNT // 4 :]},  # of two buffers, half and three quarters
        {},
        {"a": torch.ones(5)[:1], "b": 7},
        {"a": torch.empty(4 << 20, dtype=torch.uint8)[: (3 << 20) + 1]},
    ],
    ids=["whole", "other", "empty", "small", "most"],
)
def test_what_wastes_little_is_the_very_same_object(state: Any) -> None:
    found, copies = without_waste(state)
    if isinstance(state, dict) and len(state) == 2 and isinstance(state["b"], torch.Tensor):
        assert [one.nbytes for one in copies] == [COUNT // 2], "one of them has too much beside it"
        return
    assert found is state
    assert copies == []


def test_views_that_make_up_a_buffer_together_stay() -> None:
    buffer = flat()
    state = {str(number): buffer[number << 20 : number + 1 << 20] for number in range(4)}
    assert without_waste(state) == (state, [])


def test_views_of_the_same_bytes_count_once() -> None:
    buffer = flat()
    state = {str(number): buffer[:1000] for number in range(COUNT // 1000 + 1)}
    found, copies = without_waste(state)
    assert all(one.untyped_storage().nbytes() == 1000 for one in found.values())
    assert len(copies) == len(state)


def test_tensors_without_a_storage_of_their_own_are_left_alone() -> None:
    state = [torch.eye(3).to_sparse(), torch.empty(1 << 22, device="meta")[:1], torch.nn.Parameter(flat(), False)[:1]]
    found, copies = without_waste(state)
    assert found[0] is state[0]
    assert found[1] is state[1]
    assert [found[2] is one for one in copies] == [True]
