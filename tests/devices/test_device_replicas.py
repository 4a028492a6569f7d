"""Comparing all bytes of replicas that lie on CUDA devices: the same sums as on the host, through the pinned ring.

Over the double of the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.cuda_double import PLAIN_ERROR, cuda_storage
from support.device_states import Stage, device_stage, grace, random_bytes
from support.sessions import ThreadSession, run_threads

from fastpersist import _native
from fastpersist.distributed.replica_check import replicas_of, sums_of
from fastpersist.distributed.shared_file import SaveGroup, Share
from fastpersist.errors import DeviceError
from fastpersist.saving.containers import container_for

CHUNK = 1 << 16
RING_CHUNKS = 8
SIZES = [(1 << 20) + 3, 1 << 20, 100, (1 << 20) + 5 * CHUNK]  # the third is no replica


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with device_stage(monkeypatch) as stage:
        yield stage


def contents_of(sizes_bytes: list[int]) -> list[torch.Tensor]:
    return [random_bytes(size, seed) for seed, size in enumerate(sizes_bytes)]


def state_on(device: int | None, contents: list[torch.Tensor]) -> dict[str, torch.UntypedStorage]:
    """Return storages with these bytes on a device, None for the host."""
    return {
        f"s{index}": data.clone().untyped_storage() if device is None else cuda_storage(data, device)
        for index, data in enumerate(contents)
    }


def all_sums(state: dict[str, Any]) -> list[int]:
    container = container_for(state, "x.pt", checksum=True)
    cut = replicas_of(container)
    return sums_of(container, cut, [(0, 0)] * len(cut), whole=True)()


def ring_is_free() -> bool:
    """Tell whether no transfer has a buffer; a device that failed may hold some in quarantine."""
    return _native.ring_free_count() + _native.ring_quarantined_count() == _native.ring_buffer_count()


def test_sums_are_the_same_wherever_the_bytes_lie(stage: Stage) -> None:
    contents = contents_of(SIZES)
    on_host = all_sums(state_on(None, contents))
    assert len(set(on_host)) == 3
    first, second = state_on(0, contents), state_on(1, contents)
    assert all_sums(first) == all_sums(second) == on_host
    mixed = {**first, "s1": state_on(None, contents)["s1"], "s3": second["s3"]}
    assert all_sums(mixed) == on_host
    assert ring_is_free()


@pytest.mark.parametrize("place", [0, 1 << 20, SIZES[3] - 1])
def test_every_byte_counts(stage: Stage, place: int) -> None:
    contents = contents_of(SIZES)
    state = state_on(0, contents)
    before = all_sums(state)
    stage.cuda.write(state["s3"].data_ptr() + place, bytes([int(contents[3][place]) ^ 1]))
    after = all_sums(state)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False]


def test_what_is_summed_up_goes_through_pinned_memory_of_the_rings_size(stage: Stage) -> None:
    size_bytes = 100 * CHUNK
    state = {"w": cuda_storage(bytes(size_bytes))}
    with stage.cuda.held_copies():
        summing = threading.Thread(target=all_sums, args=(state,))
        summing.start()
        stage.cuda.wait_for_queued_copies(RING_CHUNKS)
    summing.join()
    assert stage.cuda.peak_queued_copy_count == RING_CHUNKS
    assert stage.cuda.copied_to_host_bytes == size_bytes
    assert stage.cuda.pageable_copy_count == 0


def test_sums_are_of_what_the_callers_stream_has_made_of_the_bytes(stage: Stage) -> None:
    state = state_on(0, contents_of(SIZES))
    found: list[list[int]] = []
    with stage.cuda.blocked(stage.stream()):
        for storage in state.values():
            stage.kernel(storage, 7)
        summing = threading.Thread(target=lambda: found.append(all_sums(state)))
        summing.start()
        stage.cuda.wait_for_queued_copies(1)
    summing.join()
    assert found == [all_sums(state_on(None, [torch.full((size,), 7, dtype=torch.uint8) for size in SIZES]))]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_device_that_fails_is_told_of_and_keeps_nothing(stage: Stage, is_late: bool) -> None:
    contents = contents_of(SIZES)
    state = state_on(0, contents)
    (stage.cuda.fail_async if is_late else stage.cuda.fail)("cuMemcpyDtoHAsync_v2", 5, PLAIN_ERROR)
    with grace(0.3), pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        all_sums(state)
    assert ring_is_free()
    stage.cuda.clear()
    assert all_sums(state) == all_sums(state_on(None, contents))


@pytest.mark.parametrize("place", [None, 777_777])
def test_ranks_with_their_replicas_on_devices_are_compared(stage: Stage, place: int | None) -> None:
    contents = contents_of(SIZES)
    states = [state_on(rank, contents) for rank in range(2)]
    if place is not None:
        stage.cuda.write(states[1]["s1"].data_ptr() + place, bytes([int(contents[1][place]) ^ 1]))
    sums = []

    def work(session: ThreadSession) -> None:
        container = container_for(states[session.rank], "x.pt", checksum=True)
        together = SaveGroup(session, "x.pt", [0], True)  # type: ignore[arg-type]
        sums.append(Share(container, replicas_of(container), together)._digest())

    for stream in (0, 1):
        stage.stream(stream)  # made before the threads
    assert run_threads(2, work) == [None, None]
    assert (len(set(sums)) == 1) == (place is None)
