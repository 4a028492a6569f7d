"""Which storages are replicas, and how those that differ are found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sessions import ThreadSession, run_threads
from support.shared_files import save_with, share_and_write, state_of

import fastpersist as fp
from fastpersist.distributed import replica_check
from fastpersist.distributed.partition import CUT_BYTES_MIN
from fastpersist.formats.byte_ranges import Extent
from fastpersist.saving.containers import Container, container_for
from fastpersist.saving.ownership import Ownership
from fastpersist.saving.sources import Holders, Source


def changed(rank: int, which: str, how: str) -> dict[str, Any]:
    state = state_of(0)
    if rank == 2:
        if how == "all bytes":
            state[which].add_(1)
        elif how == "dtype":
            state[which] = state[which].view(torch.int32)
        elif how == "size":
            state[which] = torch.cat([state[which], torch.zeros(4096)])
        elif how == "missing":
            del state[which]
        else:
            state[which][12345] += 1
    return state


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("all bytes", r"weights on rank 2"),
        ("dtype", r"weights on rank 2"),
        ("size", r"weights on rank 2"),
        ("missing", r"rank 0 has 5 .*rank 2 4"),
    ],
)
def test_replicas_that_differ_are_named_with_their_ranks(tmp_path: Path, how: str, said: str) -> None:
    outcomes = save_with(4, lambda rank: changed(rank, "weights", how), tmp_path / "state.pt")
    assert type(outcomes[0]) is fp.CoordinationError
    with pytest.raises(fp.CoordinationError, match=said):
        raise outcomes[0]
    assert all(isinstance(outcome, fp.PeerError) for outcome in outcomes[1:])


def test_one_byte_that_differs_is_found_when_all_are_compared(tmp_path: Path) -> None:
    outcomes = save_with(3, lambda rank: changed(rank, "weights", "one"), tmp_path / "a.pt", check_replicas=True)
    with pytest.raises(fp.CoordinationError, match=r"weights on rank 2"):
        raise outcomes[0]
    outcomes = save_with(3, lambda rank: state_of(0), tmp_path / "b.pt", check_replicas=True)
    assert fp.verify(tmp_path / "b.pt").ok
    assert not isinstance(outcomes[0], Exception)


def test_ranks_that_compare_differently_are_told_so(tmp_path: Path) -> None:
    def work(session: ThreadSession) -> Any:
        path = tmp_path / "state.pt"
        return share_and_write(session, state_of(0), path, [0, 1], check_replicas=session.rank == 1)

    with pytest.raises(fp.CoordinationError, match=r"samples.*all bytes"):
        raise run_threads(2, work)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.bool])
def test_same_bytes_are_sampled_on_devices_and_in_host_memory(dtype: torch.dtype) -> None:
    for count in (1, 64, 65, 12_345):
        tensor = (torch.arange(count * 3) % 97).to(dtype)[count : 2 * count]
        parts = [(index, replica_check._samples_in(tensor)) for index in (3, 7)]
        total = replica_check._sample_crc(tensor)
        assert replica_check._crcs_on_host(parts)() == {3: total, 7: total}
        changed = tensor.clone()
        changed[0] = not changed[0] if dtype is torch.bool else changed[0] + 1
        assert replica_check._sample_crc(changed) != total


# --- without ranks


def container_of(state: dict[str, torch.Tensor]) -> Container:
    return container_for(state, "state.pt", checksum=True)


def test_large_storages_are_cut_and_in_training_only_those_that_somebody_owns() -> None:
    names = ("owned", "constant", "volatile", "small")
    state = {name: torch.zeros(CUT_BYTES_MIN - (name == "small"), dtype=torch.uint8) for name in names}
    container = container_of(state)
    named = {index: container.names_of(index)[0] for index in range(len(names))}
    keys = {name: tensor.untyped_storage()._cdata for name, tensor in state.items()}
    ownership = Ownership(Holders([], [keys["owned"], keys["small"]]), Holders([], [keys["constant"]]), "")
    assert {named[index] for index in replica_check.replicas_of(container)} == {"owned", "constant", "volatile"}
    assert {named[index] for index in replica_check.replicas_in(container, ownership)} == {"owned", "constant"}
    assert replica_check.replicas_in(container, None) == []


@pytest.mark.parametrize("whole", [False, True])
def test_sums_are_of_the_values_at_the_save_and_differ_with_what_they_are_of(whole: bool) -> None:
    tensor = torch.arange(1 << 18, dtype=torch.int32)

    def sums(tensor: torch.Tensor, from_bytes: int = 0) -> Callable[[], list[int]]:
        interior = Extent(from_bytes, 4096)
        return replica_check.sums_of(container_of({"w": tensor}), [0], [interior], whole=whole)

    before = sums(tensor)
    told = before()
    assert sums(tensor.clone())() == told
    assert sums(tensor.view(torch.float32))() != told
    assert sums(tensor, 4096)() != told
    tensor[-1] += 1  # the last bytes are among the samples
    assert sums(tensor)() != told
    assert before() == told


def test_one_byte_between_the_samples_is_in_the_sum_of_all_bytes_alone() -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    other = tensor.clone()
    other[100] = 1

    def sums(tensor: torch.Tensor, whole: bool) -> list[int]:
        return replica_check.sums_of(container_of({"w": tensor}), [0], [Extent(0, 0)], whole=whole)()

    assert sums(tensor, False) == sums(other, False)
    assert sums(tensor, True) != sums(other, True)


def test_bytes_are_taken_as_they_are_now() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    source = Source(data.untyped_storage(), 10, 50)
    get = replica_check.bytes_of([(source, 0, 3), (source, 47, 3), (source, 5, 0)])
    data.zero_()
    assert get() == [bytes([10, 11, 12]), bytes([57, 58, 59]), b""]
    assert get()[0] == bytes([10, 11, 12])


def test_what_differs_is_named_by_the_ranks_that_differ() -> None:
    described = [("samples", [0] * 9), ("samples", [*[1] * 7, 0, 0]), ("samples", [0] * 8 + [3])]
    text = str(replica_check.difference(described, lambda position: [f"t{position}"] if position else []))
    assert "storage 0; t1; t2; t3; t4 and 2 more on rank 1; t8 on rank 2" in text
    described = [("samples", [0, 0]), ("all bytes", [0, 0]), ("samples", [0]), ("samples", [0, 0])]
    text = str(replica_check.difference(described, lambda _: []))
    assert "rank 0 has 2 (samples compared), rank 1 2 (all bytes), rank 2 1 (samples)" in text
