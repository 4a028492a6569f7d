"""HuggingFace checkpoints by dcp.async_save: the captured bytes reach their places, whatever the sharding.

That no step waits or is written too soon is the same for all writers, and tested in test_async_stager.py.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.dcp_states import failures
from support.process_groups import run_ranks
from support.runs import hidden_names
from support.safetensors_states import expect_files, plain_tensors, save, save_on, state_of, whole_tensors
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

import fastpersist as fp
from fastpersist import _native
from fastpersist.dcp.capture import ShardedCapture
from fastpersist.dcp.huggingface import captured_bytes, model_part, shared_windows
from fastpersist.dcp.huggingface import layout as huggingface_layout
from fastpersist.dcp.huggingface import storage_writer as huggingface_writer
from fastpersist.dcp.huggingface.captured_bytes import WINDOW_COUNT, CapturedBytes
from fastpersist.integrations.torch_dcp import FastPersistHuggingFaceWriter, FastPersistSavePlanner
from fastpersist.saving.ownership import Owners
from fastpersist.transfer.arena import Arena

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:.*synchronize_staging.*:FutureWarning")


@pytest.fixture(scope="module")
def files_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("one") / "model"
    save_on(1, path, 2, max_shard_bytes=600_000)
    return {name: (path / name).read_bytes() for name in os.listdir(path) if name != "MANIFEST.json"}


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors lie in many sources, these in several windows, and runs are cut by both."""
    monkeypatch.setattr(captured_bytes, "PIECE_BYTES", 12_288)
    monkeypatch.setattr(huggingface_writer, "PIECE_BYTES", 12_288)
    monkeypatch.setattr(captured_bytes, "_WINDOW_BYTES", 40_960)
    monkeypatch.setattr(model_part, "_BATCH_BYTES", 30_000)


def change(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for value in state.values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(
    ("layout", "count", "run_bytes_min", "machine_count", "owned"),
    [
        ("rows", 1, 1, 1, "constant"),
        ("rows", 2, 1, 1, "copied"),
        ("rows", 2, 1, 2, "constant"),
        ("columns", 2, 1, 1, "constant"),
        ("columns", 2, 1, 2, "copied"),
        ("columns", 2, 1 << 30, 1, "copied in part"),
        ("columns", 2, 1 << 30, 2, "constant"),
        ("hybrid", 4, 1, 2, "copied"),
    ],
)
def test_files_are_those_that_one_rank_writes_byte_by_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files_of_one_rank: dict[str, bytes],
    layout: str,
    count: int,
    run_bytes_min: int,
    machine_count: int,
    owned: str,
) -> None:
    """Written from where they are, or from copies; what is copied may change at once."""
    monkeypatch.setattr(huggingface_layout, "_RUN_BYTES_MIN", run_bytes_min)
    monkeypatch.setattr(shared_windows, "_RUN_BYTES_MIN", run_bytes_min)
    monkeypatch.setattr(huggingface_layout, "_UNIT_COUNT_MIN", 1)

    def work(rank: int, count: int) -> None:
        monkeypatch.setattr(huggingface_writer, "loopback_place", lambda: (f"machine {rank % machine_count}", ""))
        state = state_of(layout, count, 2)
        writer = FastPersistHuggingFaceWriter(
            tmp_path / "model",
            max_shard_bytes=600_000,
            constant=state if owned == "constant" else (),
            max_host_bytes=1 << 16 if owned == "copied in part" else None,
        )
        future = dcp.async_save(state, storage_writer=writer, planner=FastPersistSavePlanner())
        if owned == "constant":
            assert not writer._staged.sharded.capture.count("volatile_copied_bytes")  # type: ignore[union-attr]
        else:
            change(state)
        future.result()

    run_ranks(count, work)
    assert {*os.listdir(tmp_path / "model")} == {*files_of_one_rank, "MANIFEST.json"}
    for name, data in files_of_one_rank.items():
        assert (tmp_path / "model" / name).read_bytes() == data, name
    report = fp.verify(tmp_path / "model")
    assert report.ok
    assert report.has_checksums


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, which dcp.async_save wants."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("max_host_bytes", [None, 1 << 16])
def test_tensors_of_any_kind_are_safe_when_async_save_returns(tmp_path: Path, max_host_bytes: int | None) -> None:
    state = {
        **(whole_tensors(1) | plain_tensors(1)),
        "transposed": torch.randn(30, 40).t(),
        "every other": torch.randn(40, 50)[::2, ::3],
        "conjugate": torch.complex(torch.randn(9), torch.randn(9)).conj(),
        "parameter": torch.nn.Parameter(torch.randn(7)),
    }
    state["part of it"] = state["layers.2.pages"][10:20]
    expected = {name: tensor.detach().clone() for name, tensor in state.items()}
    writer = FastPersistHuggingFaceWriter(tmp_path / "model", max_host_bytes=max_host_bytes)
    future = dcp.async_save(state, storage_writer=writer)
    change(state)
    future.result()
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_write_holds_no_step_and_leaves_the_older_model(tmp_path: Path, victim: int) -> None:
    path = tmp_path / "model"

    def work(rank: int, count: int) -> None:
        state = state_of("rows", count, 1)
        save(path, state)
        weight = torch.nn.Parameter(state["long"])
        weight.grad = torch.ones_like(weight)
        state = {**state_of("rows", count, 2), "long": weight}
        optimizer = torch.optim.SGD([weight], lr=0.0)
        writer = FastPersistHuggingFaceWriter(path, engine="fault:threads", optimizer=optimizer, max_host_bytes=0)
        if rank == victim:
            _native.set_fault_plan(_native.FaultPlan(op="write", nth=2, sys_errno=errno.EIO))
        future = dcp.async_save(state, storage_writer=writer, planner=FastPersistSavePlanner())
        optimizer.step()  # finds no memory to copy to
        with pytest.raises(dcp.api.CheckpointException) as caught:
            future.result()
        assert isinstance(failures(caught.value)[0], fp.StorageError)
        assert f"rank {victim}: " in str(failures(caught.value)[0])
        _native.clear_fault_plan()
        dist.barrier()
        if rank == 0:
            expect_files(path, 1)
        dist.barrier()
        state["long"] = state_of("rows", count, 2)["long"]
        dcp.async_save(state, storage_writer=writer, planner=FastPersistSavePlanner()).result()
        writer.close()

    run_ranks(2, work, environment={"FASTPERSIST_ALLOW_FAULTS": "1"})
    expect_files(path, 2)
    assert hidden_names(tmp_path) == []


def test_memory_is_used_again_when_what_lay_there_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    class Request:
        def __init__(self, number: int) -> None:
            self._number = number

        def wait(self) -> None:
            waited.append(self._number)

    numbers = itertools.count()
    monkeypatch.setattr(model_part, "submit_runs", lambda *_: Request(next(numbers)))
    stream = model_part._Stream(None)  # type: ignore[arg-type]
    stream.begin(0, 100)
    for turn in range(10):
        stream.turn()  # before a window is filled
        assert max(waited, default=-1) == max(-1, turn - WINDOW_COUNT)
        stream.write(torch.zeros(10, dtype=torch.uint8), [(0, 10, 10 * turn)])


class WholePlanner:
    """Resolves each item to the tensor of its name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def resolve_data(self, item: Any) -> torch.Tensor:
        return self._tensors[item.index.fqn]


def test_windows_take_turns_and_lie_in_memory_as_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_bytes, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(captured_bytes, "_WINDOW_BYTES", 40_960)
    tensors = {f"{n}": torch.arange(n, n + size, dtype=torch.int16) for n, size in enumerate((7, 90_000, 5, 300, 9000))}
    items = create_default_local_save_plan(tensors, is_coordinator=True).items
    capture = ShardedCapture(tensors, Owners(), Arena(), piece_bytes=10_000)
    assert len(capture.capture.kinds) == 1 + 18 + 1 + 1 + 2
    capture.settle(items, WholePlanner(tensors))  # type: ignore[arg-type]
    captured = CapturedBytes(capture)
    offsets = [100_003 * slot for slot in range(len(items))]
    for slot, offset_bytes in enumerate(offsets):
        captured.expect(slot, offset_bytes)
    turns: list[int] = []
    seen: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for slot, tensor in enumerate(tensors.values()):
        done_bytes = 0
        for part in captured.parts_of(slot, lambda: turns.append(len(seen))):
            expected = tensor.view(torch.uint8)[done_bytes : done_bytes + part.numel()]
            assert torch.equal(part, expected)
            assert part.data_ptr() % 4096 == (offsets[slot] + done_bytes) % 4096
            seen.append((part, expected, len(turns)))
            for other, other_expected, turn in seen:
                assert len(turns) >= turn + WINDOW_COUNT or torch.equal(other, other_expected)
            done_bytes += part.numel()
        assert done_bytes == tensor.nbytes
    assert len(turns) > WINDOW_COUNT
    captured.close()
    capture.capture.release()
