"""What goes wrong on a GPU is an exception, leaves no file, and spoils no later save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import Report, run_in_child
from support.gpu_device import DEVICE, GPU, PATIENCE_S, host_copy, keep_busy, needs_cuda, random_tensor, run_python
from support.states import differences, load_step, make_state, pending_files

import fastpersist as fp
from fastpersist import _native

pytestmark = GPU

COUNT = 5_000_000  # 20 MB: several chunks of the ring


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    yield
    _native.clear_fault_plan()


def usable_engine(directory: Path) -> str:
    return next(probe.name for probe in fp.engines(directory) if probe.usable)


# --- the disk


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("way", ["save", "save_async", "load", "load_into"])
def test_an_error_of_the_disk(way: str, nth: int, tmp_path: Path) -> None:
    """In the midst of copies; the next save and load find everything in order."""
    path, state = tmp_path / "model.pt", {"a": random_tensor(COUNT), "b": random_tensor(COUNT, 1)}
    engine = usable_engine(tmp_path)
    fp.save(state, path)
    before = path.read_bytes()
    operation = "write" if way.startswith("save") else "read"
    _native.set_fault_plan(_native.FaultPlan(op=operation, nth=nth))
    with pytest.raises(fp.StorageError):
        if way == "save":
            fp.save({"a": random_tensor(COUNT, 2)}, path, engine=f"fault:{engine}")
        elif way == "save_async":
            fp.save_async({"a": random_tensor(COUNT, 2)}, path, engine=f"fault:{engine}").result(PATIENCE_S)
        elif way == "load":
            fp.load(path, map_location=DEVICE, engine=f"fault:{engine}")
        else:
            fp.load_into(path, {name: torch.zeros_like(one) for name, one in state.items()}, engine=f"fault:{engine}")
    _native.clear_fault_plan()
    assert path.read_bytes() == before
    assert not pending_files(tmp_path)
    again: Any = {"a": random_tensor(COUNT, 3)}
    fp.save(again, path)
    loaded: Any = fp.load(path, map_location=DEVICE, verify=True)
    assert not differences(host_copy(loaded), host_copy(again))


@needs_cuda
def test_a_stream_that_stands_still_holds_up_neither_saves_of_the_host_nor_the_error_of_its_own(tmp_path: Path) -> None:
    weights, numbers = random_tensor(COUNT), torch.arange(COUNT)
    fp.save({"w": weights}, tmp_path / "before.pt")  # whatever the first save takes its time for
    files = fp.DirectorySave(tmp_path / "given-up")
    ended = torch.cuda.Event()
    _native.set_device_grace_s(0.3)
    try:
        keep_busy(8_000)  # some 6 s: longer than all that follows
        ended.record()
        files.save({"w": weights}, "w.pt", constant=[weights])  # so it is written from where it is, by and by
        for name in ("beside.pt", "again.pt"):
            fp.save({"n": numbers}, tmp_path / name)
        files.abort()
        with pytest.raises(fp.DeviceError, match="stands still"):
            fp.save({"w": weights}, tmp_path / "refused.pt")
        fp.save({"n": numbers}, tmp_path / "behind.pt")
        assert not ended.query(), "all that was to go on beside the stream has waited for it"
    finally:
        _native.set_device_grace_s(10)
    torch.cuda.synchronize(DEVICE)
    fp.save({"w": weights}, tmp_path / "after.pt")
    assert not differences(torch.load(tmp_path / "after.pt", map_location="cpu"), host_copy({"w": weights}))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}.pt" for name in ("after", "again", "before", "behind", "beside")
    ]


def test_a_change_that_no_gate_held_back_fails_one_save_only(tmp_path: Path) -> None:
    model = torch.nn.Linear(1000, 1000).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp.Checkpointer(tmp_path / "run", optimizer=optimizer, gate="manual", on_error="warn") as checkpointer:
        checkpointer.save(1, model.state_dict()).result(PATIENCE_S)
        checkpointer.wait_captured(PATIENCE_S)
        with torch.no_grad():
            model.weight.add_(1)
        checkpointer.save(2, model.state_dict()).result(PATIENCE_S)
    assert not differences(
        torch.load(tmp_path / "run" / "step-00000002" / "state.pt", map_location="cpu"), host_copy(model.state_dict())
    )


# --- the device


@needs_cuda
def test_a_context_that_is_lost_does_not_spoil_saves_of_host_memory(tmp_path: Path) -> None:
    """An assertion in a kernel makes every later call of CUDA in that process fail."""
    code = """
        import os
        tensor = torch.ones(1_000_000, device=device)
        host = torch.arange(3_000_000)
        fp.save({"tensor": tensor}, "before.pt")
        try:
            torch.zeros(10, device=device)[torch.tensor([10_000], device=device)]
            torch.cuda.synchronize()
        except RuntimeError as error:
            assert str(error)
        else:
            raise SystemExit("the kernel's assertion went unnoticed")
        for save in (lambda: fp.save({"tensor": tensor}, "lost.pt"),
                     lambda: fp.save_async({"tensor": tensor}, "lost.pt").result(30)):
            try:
                save()
            except Exception as error:
                assert str(error)
            else:
                raise SystemExit("a tensor was saved that nobody can read any more")
        try:
            fp.load("before.pt", map_location=device)
        except Exception as error:
            assert str(error)
        else:
            raise SystemExit("a tensor was loaded to a device that is lost")
        assert sorted(os.listdir()) == ["before.pt"], os.listdir()
        for number in range(3):
            fp.save({"host": host}, f"host{number}.pt")
            fp.save_async({"host": host}, f"async{number}.pt").result(30)
            assert torch.equal(fp.load(f"host{number}.pt")["host"], host)
            assert torch.equal(fp.load(f"async{number}.pt")["host"], host)
        assert fp.verify("before.pt").ok
        print("done", flush=True)
        os._exit(0)  # how torch ends after such an error is not ours
    """
    assert run_python(code, tmp_path) == "done\n"


@needs_cuda
def test_a_device_without_room_for_what_is_loaded(tmp_path: Path) -> None:
    fp.save({"a": random_tensor(COUNT)}, tmp_path / "small.pt")
    code = """
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        state = {str(number): torch.full((16 << 20,), float(number)) for number in range(4)}  # 256 MiB
        fp.save(state, "large.pt")
        torch.cuda.set_per_process_memory_fraction((128 << 20) / total_bytes, device)
        for _ in range(2):
            try:
                fp.load("large.pt", map_location=device)
            except torch.cuda.OutOfMemoryError as error:
                assert "memory" in str(error)
            else:
                raise SystemExit("there was room")
            assert fp.load("small.pt", map_location=device)["a"].device == device
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        loaded = fp.load("large.pt", map_location=device)
        assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in state.items())
        print("done")
    """
    assert run_python(code, tmp_path) == "done\n"


@needs_cuda
def test_a_device_that_is_full_can_be_saved(tmp_path: Path) -> None:
    """Saving asks for no memory of the device."""
    code = """
        total_bytes = torch.cuda.mem_get_info(device)[1]
        limit_bytes = 257 << 20
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)
        full = [torch.full((8 << 20,), float(number), device=device) for number in range(8)]  # 256 MiB
        try:
            torch.empty(8 << 20, device=device)
        except torch.cuda.OutOfMemoryError:
            pass
        else:
            raise SystemExit("there is still room")
        fp.save(full, "model.pt")
        fp.save_async(full, "async.pt").result(30)
        for name in ("model.pt", "async.pt"):
            found = torch.load(name, map_location="cpu")
            assert all(bool((tensor == number).all()) for number, tensor in enumerate(found))
        print("done")
    """
    assert run_python(code, tmp_path) == "done\n"


def test_pinning_that_is_refused(tmp_path: Path) -> None:
    """No memory may be locked: slower, with a word in the log, never wrong. Root is not held to the limit."""
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        state = {"a": torch.randn(5_000_000, device=device), "b": torch.ones(3, device=device)}
        fp.save(state, "model.pt")
        fp.save_async(state, "async.pt").result(30)
        for name in ("model.pt", "async.pt"):
            found = fp.load(name, map_location=device, verify=True)
            assert all(torch.equal(found[key], state[key]) for key in state)
        print("done")
    """
    assert run_python(code, tmp_path) == "done\n"


# --- processes


def test_a_forked_child_saves_host_memory(tmp_path: Path) -> None:
    """The parent has used the device, and goes on to; the child has no part in it."""
    state = {"a": random_tensor(COUNT)}
    fp.save(state, tmp_path / "before.pt")

    def child(_: Report) -> None:
        for step in range(2):
            fp.save(make_state(step), tmp_path / "child.pt")
            assert load_step(tmp_path / "child.pt") == step
        fp.save_async(make_state(3), tmp_path / "child.pt").result(PATIENCE_S)
        assert load_step(tmp_path / "child.pt") == 3

    run_in_child(child)
    fp.save(state, tmp_path / "after.pt")
    for name in ("before.pt", "after.pt"):
        assert not differences(torch.load(tmp_path / name, map_location="cpu"), host_copy(state))


@needs_cuda
def test_a_forked_child_cannot_save_from_the_device_and_says_so(tmp_path: Path) -> None:
    state = {"a": random_tensor(COUNT)}
    fp.save(state, tmp_path / "before.pt")

    def child(_: Report) -> None:
        with pytest.raises(Exception, match=r".") as caught:
            fp.save(state, tmp_path / "child.pt")
        assert not isinstance(caught.value, fp.InternalError)
        assert not (tmp_path / "child.pt").exists()
        fp.save(make_state(1), tmp_path / "child.pt")
        assert load_step(tmp_path / "child.pt") == 1

    run_in_child(child)
    fp.save(state, tmp_path / "after.pt")
    assert not differences(torch.load(tmp_path / "after.pt", map_location="cpu"), host_copy(state))


def test_a_fork_while_a_save_is_under_way(tmp_path: Path) -> None:
    state = {"a": random_tensor(COUNT), "b": random_tensor(COUNT, 1)}
    expected = host_copy(state)
    engine = usable_engine(tmp_path)
    _native.set_fault_plan(_native.FaultPlan(op="write", kind="delay", count=2**64 - 1, delay_ms=30))
    pending = fp.save_async(state, tmp_path / "model.pt", engine=f"fault:{engine}")
    state["a"].zero_()

    def child(_: Report) -> None:
        _native.clear_fault_plan()
        fp.save(make_state(1), tmp_path / "child.pt")
        assert load_step(tmp_path / "child.pt") == 1

    run_in_child(child)
    path = pending.result(PATIENCE_S)
    assert not differences(torch.load(path, map_location="cpu"), expected)


def test_a_process_that_ends_while_it_saves(tmp_path: Path) -> None:
    """Its end waits for the save, or gives it up; it does not crash, and nobody sees half a file."""
    code = """
        state = {str(number): torch.full((5_000_000,), float(number), device=device) for number in range(8)}
        fp.save_async(state, "model.pt")
        print("done")
    """
    assert run_python(code, tmp_path) == "done\n"
    if os.path.exists(tmp_path / "model.pt"):
        saved: Any = torch.load(tmp_path / "model.pt", map_location="cpu")
        assert all(bool((tensor == float(name)).all()) for name, tensor in saved.items())


def test_a_first_use_on_a_thread_and_an_end_without_a_close(tmp_path: Path) -> None:
    code = """
        import threading
        model = torch.nn.Linear(1000, 1000).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer = fp.Checkpointer("run", optimizer=optimizer)
        thread = threading.Thread(target=lambda: checkpointer.save(1, model.state_dict()))
        thread.start()
        thread.join()
        print("done")
    """
    assert run_python(code, tmp_path) == "done\n"
