"""Saving and loading beside other work: order on the caller's stream, threads, and memory that is bounded."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_device import (
    DEVICE,
    GPU,
    ON_CUDA,
    PATIENCE_S,
    host_copy,
    keep_busy,
    needs_cuda,
    random_tensor,
    run_python,
    synchronize,
)
from support.states import differences
from torch.multiprocessing.reductions import StorageWeakRef

import fastpersist as fp

pytestmark = GPU

COUNT = 5_000_000  # 20 MB: several chunks of the ring


def on_a_side_stream() -> contextlib.AbstractContextManager[Any]:
    """Make a stream of the caller's own the current one; nothing on a CPU."""
    return torch.cuda.stream(torch.cuda.Stream(DEVICE)) if ON_CUDA else contextlib.nullcontext()


def in_threads(*work: Callable[[], object]) -> None:
    """Run all at the same time; raise what any of them raises."""
    failed: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it does not come to its end"
    if failed:
        raise failed[0]


# --- order


@pytest.mark.parametrize("stream", [contextlib.nullcontext, on_a_side_stream])
def test_save_waits_for_what_is_queued_before_it(
    stream: Callable[[], contextlib.AbstractContextManager[Any]], tmp_path: Path
) -> None:
    with stream():
        state = {"large": torch.zeros(COUNT, device=DEVICE), "small": torch.zeros(10, device=DEVICE)}
        keep_busy()
        state["large"].fill_(5)
        state["small"].fill_(5)
        fp.save(state, tmp_path / "model.pt")
    saved: Any = torch.load(tmp_path / "model.pt", map_location="cpu")
    assert all(bool((tensor == 5).all()) for tensor in saved.values())


def test_save_reads_before_what_is_queued_after_it(tmp_path: Path) -> None:
    state = {"large": random_tensor(COUNT), "small": random_tensor(10, 1)}
    expected = host_copy(state)
    keep_busy(100)
    fp.save(state, tmp_path / "model.pt")
    for tensor in state.values():
        tensor.fill_(9)
    assert not differences(torch.load(tmp_path / "model.pt", map_location="cpu"), expected)


@needs_cuda
def test_save_does_not_wait_for_other_streams(tmp_path: Path) -> None:
    """No device-wide synchronisation: a stream of somebody else's may be busy for as long as it likes."""
    state = {"large": random_tensor(COUNT)}
    fp.save(state, tmp_path / "first.pt")
    fp.load(tmp_path / "first.pt", map_location=DEVICE)  # pins, makes streams, and whatever else is done once
    synchronize()
    other = torch.cuda.Stream(DEVICE)
    done = torch.cuda.Event()
    with torch.cuda.stream(other):
        keep_busy(4_000)
        done.record()
    fp.save(state, tmp_path / "model.pt")
    loaded: Any = fp.load(tmp_path / "model.pt", map_location=DEVICE)
    was_busy = not done.query()
    synchronize()
    assert not differences(host_copy(loaded), host_copy(state))
    assert was_busy, "save or load waited for a stream that has nothing to do with it, or took seconds"


@pytest.mark.parametrize("stream", [contextlib.nullcontext, on_a_side_stream])
def test_what_is_loaded_may_be_used_at_once(
    stream: Callable[[], contextlib.AbstractContextManager[Any]], tmp_path: Path
) -> None:
    state = {"large": random_tensor(COUNT), "small": random_tensor(10, 1)}
    fp.save(state, tmp_path / "model.pt")
    with stream():
        loaded: Any = fp.load(tmp_path / "model.pt", map_location=DEVICE)
        doubled = {name: tensor * 2 for name, tensor in loaded.items()}
        found = host_copy(doubled)
    assert not differences(found, {name: tensor * 2 for name, tensor in host_copy(state).items()})


@pytest.mark.parametrize("stream", [contextlib.nullcontext, on_a_side_stream])
def test_load_into_waits_for_readers_of_the_target(
    stream: Callable[[], contextlib.AbstractContextManager[Any]], tmp_path: Path
) -> None:
    fp.save({"a": torch.full((COUNT,), 2.0, device=DEVICE)}, tmp_path / "model.pt")
    synchronize()
    with stream():
        target = {"a": torch.ones(COUNT, device=DEVICE)}
        keep_busy()
        read_before = target["a"] * 10
        fp.load_into(tmp_path / "model.pt", target)
        read_after = target["a"] * 10
    synchronize()
    assert bool((read_before == 10).all())
    assert bool((read_after == 20).all())


def test_load_takes_memory_that_queued_work_still_reads(tmp_path: Path) -> None:
    """What was freed a moment ago is given out again, while the stream has not yet come to its last reader."""
    fp.save({"a": torch.full((COUNT,), 2.0, device=DEVICE)}, tmp_path / "model.pt")
    synchronize()
    gc.collect()
    before = torch.ones(COUNT, device=DEVICE)
    keep_busy()
    read_before = before * 10
    del before
    loaded: Any = fp.load(tmp_path / "model.pt", map_location=DEVICE)
    synchronize()
    assert bool((read_before == 10).all())
    assert bool((loaded["a"] == 2).all())


# --- threads


def test_saves_and_loads_at_the_same_time(tmp_path: Path) -> None:
    states = [{"large": random_tensor(COUNT, seed), "small": random_tensor(9, -seed - 1)} for seed in range(4)]
    synchronize()

    def save_and_load(number: int) -> Callable[[], None]:
        def work() -> None:
            path = tmp_path / f"{number}.pt"
            with on_a_side_stream():
                for _ in range(3):
                    fp.save(states[number], path)
                    loaded: Any = fp.load(path, map_location=DEVICE, verify=True)
                    assert not differences(host_copy(loaded), host_copy(states[number]))

        return work

    in_threads(*(save_and_load(number) for number in range(4)))


def test_two_saves_under_way_at_once(tmp_path: Path) -> None:
    first, second = {"a": random_tensor(COUNT)}, {"a": random_tensor(COUNT, 1)}
    expected = host_copy([first, second])
    pending = [
        fp.save_async(state, tmp_path / name) for state, name in ((first, "first.pt"), (second, "second.pt"))
    ] + [fp.save_async(second, tmp_path / "first.pt")]  # to the same path: in order
    for state in (first, second):
        state["a"].zero_()
    for one in pending:
        one.result(PATIENCE_S)
    assert not differences(torch.load(tmp_path / "first.pt", map_location="cpu"), expected[1])
    assert not differences(torch.load(tmp_path / "second.pt", map_location="cpu"), expected[1])


def test_a_save_on_a_thread_that_has_not_used_the_device_yet(tmp_path: Path) -> None:
    state = {"a": random_tensor(COUNT)}
    in_threads(lambda: fp.save(state, tmp_path / "model.pt"))
    found: list[Any] = []
    in_threads(lambda: found.append(fp.load(tmp_path / "model.pt", map_location=DEVICE)))
    assert not differences(host_copy(found[0]), host_copy(state))


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
def test_tensors_of_two_devices(tmp_path: Path) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    state = {"a": torch.randn(COUNT, device=first), "b": torch.randn(COUNT, device=second), "c": torch.randn(5)}
    fp.save(state, tmp_path / "model.pt")
    loaded: Any = fp.load(tmp_path / "model.pt")
    assert [tensor.device for tensor in loaded.values()] == [tensor.device for tensor in state.values()]
    assert not differences(host_copy(loaded), host_copy(state))
    moved: Any = fp.load(tmp_path / "model.pt", map_location={"cuda:0": "cuda:1"})
    assert moved["a"].device == second
    assert torch.cuda.current_device() == 0


# --- memory of the device


@needs_cuda
def test_saving_takes_no_memory_of_the_device(tmp_path: Path) -> None:
    state = {str(number): random_tensor(COUNT, number) for number in range(8)}  # 160 MB
    fp.save(state, tmp_path / "model.pt")
    gc.collect()  # what earlier tests left
    synchronize()
    before_bytes = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    for number in range(5):
        fp.save(state, tmp_path / "model.pt")
        fp.save_async(state, tmp_path / f"{number}.pt").result(PATIENCE_S)
    synchronize()
    assert torch.cuda.memory_allocated(DEVICE) == before_bytes
    assert torch.cuda.max_memory_allocated(DEVICE) - before_bytes <= 16 << 20


@needs_cuda
def test_loading_takes_the_result_and_little_more(tmp_path: Path) -> None:
    fp.save({str(number): random_tensor(COUNT, number) for number in range(8)}, tmp_path / "model.pt")
    for _ in range(3):
        gc.collect()
        synchronize()
        before_bytes = torch.cuda.memory_allocated(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        loaded: Any = fp.load(tmp_path / "model.pt", map_location=DEVICE)
        synchronize()
        wanted_bytes = sum(tensor.nbytes for tensor in loaded.values())
        assert torch.cuda.max_memory_allocated(DEVICE) - before_bytes <= wanted_bytes + (64 << 20)
        target = {name: torch.zeros_like(tensor) for name, tensor in loaded.items()}
        synchronize()
        before_bytes = torch.cuda.memory_allocated(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        fp.load_into(tmp_path / "model.pt", target)
        synchronize()
        assert torch.cuda.max_memory_allocated(DEVICE) - before_bytes <= 64 << 20
        del loaded, target


@needs_cuda
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
    ],
    ids=lambda environment: ",".join(environment.values()),
)
def test_every_allocator_of_torch(environment: dict[str, str], tmp_path: Path) -> None:
    """Memory that is mapped piece by piece, comes from the driver's own pools, or goes back to it at once."""
    code = """
        state = {str(count): torch.randn(count, device=device) for count in (3, 70_000, 5_000_000, 9_000_001)}
        expected = {name: tensor.cpu() for name, tensor in state.items()}
        fp.save(state, "model.pt")
        pending = fp.save_async(state, "async.pt")
        state.clear()
        others = [torch.full((count,), 7.0, device=device) for count in (3, 70_000, 5_000_000, 9_000_001)]
        pending.result(30)
        for name in ("model.pt", "async.pt"):
            found = torch.load(name, map_location="cpu")
            assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), name
            loaded = fp.load(name, map_location=device, verify=True)
            assert all(torch.equal(loaded[key].cpu(), tensor) for key, tensor in expected.items()), name
        fp.load_into("model.pt", dict(zip(expected, others)))
        assert all(torch.equal(one.cpu(), tensor) for one, tensor in zip(others, expected.values()))
        print("done")
    """
    assert run_python(code, tmp_path, environment) == "done\n"


def test_a_save_that_is_over_keeps_nothing_alive(tmp_path: Path) -> None:
    tensor = random_tensor(COUNT)
    storage = StorageWeakRef(tensor.untyped_storage())
    fp.save_async({"a": tensor}, tmp_path / "model.pt").result(PATIENCE_S)
    fp.save({"a": tensor}, tmp_path / "model.pt")
    assert not storage.expired()
    del tensor
    gc.collect()
    assert storage.expired()
