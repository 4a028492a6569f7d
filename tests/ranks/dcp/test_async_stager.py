"""dcp.async_save with our writers: nothing of the state is copied that need not be, and no later step is in the file.

torch plans and writes on a thread of its own; the planners here hold it back, so that what comes before is certain.
"""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.dcp_states import blank, failures, loaded, make_state, portrait
from support.forking import Report, run_in_child
from support.process_groups import run_ranks
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fastpersist as fp
from fastpersist.integrations.torch_dcp import (
    FastPersistHuggingFaceReader,
    FastPersistHuggingFaceWriter,
    FastPersistReader,
    FastPersistSavePlanner,
    FastPersistWriter,
)

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:.*synchronize_staging.*:FutureWarning")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, which dcp.async_save wants."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    # torch 2.7 destroys the group with the GIL held, and waits for ever if gloo's thread wants it at that moment for
    # what is left of the last collective (shown without fastpersist: async_save, load and destroy, in a loop).
    time.sleep(0.02)
    dist.destroy_process_group()


class HeldPlanner(FastPersistSavePlanner):
    """Plans once it may: what the test does before that, it does before a byte is written."""

    def __init__(self) -> None:
        super().__init__()
        self.may_plan = threading.Event()

    def create_local_plan(self) -> SavePlan:
        assert self.may_plan.wait(30)
        return super().create_local_plan()


class FailingPlanner(HeldPlanner):
    """Fails where no code of ours is."""

    def create_local_plan(self) -> SavePlan:
        super().create_local_plan()
        raise ArithmeticError("no plan")


class DoublingPlanner(FastPersistSavePlanner):
    """Writes something else than what is in the state."""

    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item) * 2


def model_and_optimizer(width: int = 400) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 7))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int = 400) -> None:
    model(torch.ones(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def states_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def tensors_of(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors of nested dicts, by names that need no nesting."""
    found = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[f"{name}{key}"] = value
        elif isinstance(value, dict):
            found |= tensors_of(value, f"{name}{key}.")
    return found


class Way(NamedTuple):
    """A writer, what reads it, and what of a state it can write."""

    writer: Any
    reader: Any
    part_of: Any

    def state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        part: dict[str, Any] = self.part_of(states_of(model, optimizer))
        return part

    def load(self, path: Path, like: Any) -> list[Any]:
        return loaded(path, self.reader, like)


WAYS = {
    "parts": Way(FastPersistWriter, FastPersistReader, lambda state: state),
    "safetensors": Way(FastPersistHuggingFaceWriter, FastPersistHuggingFaceReader, tensors_of),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def tensor_bytes(state: dict[str, Any]) -> int:
    tree = torch.utils._pytree.tree_leaves(state)
    return sum(leaf.nbytes for leaf in tree if isinstance(leaf, torch.Tensor))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("max_host_bytes", [None, 0])
def test_a_step_before_anything_is_planned_is_not_in_the_checkpoint(
    tmp_path: Path, way: Way, max_host_bytes: int | None
) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    state = way.state(model, optimizer)
    expected = portrait(state)
    planner = HeldPlanner()
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer, max_host_bytes=max_host_bytes)
    future = dcp.async_save(state, storage_writer=writer, planner=planner)
    if max_host_bytes is None:
        train(model, optimizer)  # nothing is written yet, so it copies
        planner.may_plan.set()
    else:  # it has to wait for the writer
        threading.Timer(0.2, planner.may_plan.set).start()
        train(model, optimizer)
    train(model, optimizer)
    future.result()
    assert portrait(way.state(model, optimizer)) != expected
    assert way.load(tmp_path / "checkpoint", state) == expected
    assert fp.verify(tmp_path / "checkpoint").ok


@pytest.mark.usefixtures("group")
def test_what_an_optimizer_owns_is_not_copied_when_no_step_comes(tmp_path: Path, way: Way) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    state = {**way.state(model, optimizer), "average": torch.ones(1000)}
    planner = HeldPlanner()
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer)
    future = dcp.async_save(state, storage_writer=writer, planner=planner)
    capture = writer._staged.sharded.capture  # type: ignore[union-attr]
    assert capture.count("volatile_copied_bytes") == 4000
    planner.may_plan.set()
    future.result()
    assert capture.count("stable_copied_bytes") == 0
    assert capture.count("taken_bytes") == tensor_bytes(state)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("max_host_bytes", [None, 1 << 16])
def test_without_an_optimizer_all_is_safe_when_async_save_returns(tmp_path: Path, max_host_bytes: int | None) -> None:
    state = {**make_state(), "sparse": torch.eye(5).to_sparse()}
    state["nested"]["again"] = state["weight"]
    state["part of it"] = state["weight"][10:20]
    expected = portrait(state)
    writer = FastPersistWriter(tmp_path / "checkpoint", max_host_bytes=max_host_bytes)
    future = dcp.async_save(state, storage_writer=writer)
    with torch.no_grad():
        for leaf in torch.utils._pytree.tree_leaves(state):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
    state["nested"]["list"][2] = 7.5
    future.result()
    target = {key: torch.eye(5).to_sparse() if key == "sparse" else blank(value) for key, value in state.items()}
    dcp.load(target, storage_reader=FastPersistReader(tmp_path / "checkpoint"))
    assert portrait(target) == expected


@pytest.mark.usefixtures("group")
def test_one_writer_saves_again_and_again(tmp_path: Path, way: Way) -> None:
    model, optimizer = model_and_optimizer()
    writer = way.writer(optimizer=optimizer)
    expected = []
    futures = []
    for step in range(4):
        train(model, optimizer)
        state = way.state(model, optimizer)
        expected.append(portrait(state))
        futures.append(dcp.async_save(state, checkpoint_id=tmp_path / str(step), storage_writer=writer))
    dcp.save({"last": torch.ones(2)}, checkpoint_id=tmp_path / "last", storage_writer=writer)  # waits for those
    writer.close()
    assert all(future.done() for future in futures)
    for step in range(4):
        assert way.load(tmp_path / str(step), state) == expected[step]


@pytest.mark.usefixtures("group")
def test_a_save_right_behind_leaves_the_one_before_to_its_thread(tmp_path: Path, way: Way) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    state = way.state(model, optimizer)
    expected = portrait(state)
    writer = way.writer(tmp_path / "first", optimizer=optimizer)
    staged = writer.stage(state)
    writer.synchronize_staging()  # as async_save does, whose thread has not begun yet
    later: list[threading.Timer] = [threading.Timer(0.2, dcp.save, (staged,), {"storage_writer": writer})]
    later[0].start()
    writer.reset(tmp_path / "second")  # the next save
    later[0].join()
    assert way.load(tmp_path / "first", state) == expected


@pytest.mark.usefixtures("group")
def test_nothing_is_planned_before_async_save_is_through(
    tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastpersist.dcp.async_stager._CALLER_FIRST_S", 20.0)
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    order = []

    class TellingPlanner(FastPersistSavePlanner):
        def create_local_plan(self) -> SavePlan:
            order.append("planned")
            return super().create_local_plan()

    class SlowCaller(way.writer):  # type: ignore[misc,name-defined]
        def synchronize_staging(self) -> None:  # the last that async_save does
            time.sleep(0.05)
            order.append("returns")
            super().synchronize_staging()

    writer = SlowCaller(tmp_path / "checkpoint", optimizer=optimizer)
    dcp.async_save(way.state(model, optimizer), storage_writer=writer, planner=TellingPlanner()).result()
    assert order == ["returns", "planned"]


@pytest.mark.usefixtures("group")
def test_a_caller_that_does_not_synchronize_is_not_waited_for(tmp_path: Path, way: Way) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    state = way.state(model, optimizer)
    expected = portrait(state)
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer)
    staged = writer.stage(state)
    thread = threading.Thread(target=dcp.save, args=(staged,), kwargs={"storage_writer": writer})
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert way.load(tmp_path / "checkpoint", state) == expected


@pytest.mark.usefixtures("group")
def test_a_step_far_away_does_not_keep_the_future_waiting(
    tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    monkeypatch.setattr("fastpersist.saving.pacing.spread_s", lambda optimizers: 3600.0)
    monkeypatch.setattr("fastpersist.dcp.async_stager._SPREAD_MAX_S", 0.2)
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer)
    future = dcp.async_save(way.state(model, optimizer), storage_writer=writer)
    try:
        future.result(20)
    finally:
        writer.close()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_save_that_is_cancelled_holds_no_step_and_the_next_one_is_whole(
    tmp_path: Path, way: Way, has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    state = way.state(model, optimizer)
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer, max_host_bytes=0)
    with monkeypatch.context() as patch:
        if not has_begun:  # torch's pool starts no thread
            patch.setattr(ThreadPoolExecutor, "_adjust_thread_count", lambda self: None)
        future = dcp.async_save(state, storage_writer=writer)
        while has_begun and not (future.running() or future.done()):
            time.sleep(0.001)
        assert future.cancel() is not has_begun
    expected = portrait(state)
    if has_begun:
        future.result(20)  # too late: it is saved
        assert way.load(tmp_path / "checkpoint", state) == expected
    del future
    gc.collect()
    train(model, optimizer)  # finds no memory, and waits for nobody
    state = way.state(model, optimizer)
    expected = portrait(state)
    dcp.async_save(state, storage_writer=writer).result(20)
    assert way.load(tmp_path / "checkpoint", state) == expected


@pytest.mark.usefixtures("group")
def test_a_save_that_fails_in_dcp_holds_no_step_and_leaves_the_checkpoint_before_it(tmp_path: Path, way: Way) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    state = way.state(model, optimizer)
    expected = portrait(state)
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer, max_host_bytes=0)
    dcp.async_save(state, storage_writer=writer).result()
    planner = FailingPlanner()
    future = dcp.async_save(state, storage_writer=writer, planner=planner)
    threading.Timer(0.2, planner.may_plan.set).start()
    train(model, optimizer)  # finds no memory, and nobody will ever write
    with pytest.raises(dcp.api.CheckpointException) as caught:
        future.result()
    assert isinstance(failures(caught.value)[0], ArithmeticError)
    assert way.load(tmp_path / "checkpoint", state) == expected
    state = way.state(model, optimizer)
    expected = portrait(state)
    dcp.async_save(state, storage_writer=writer).result()
    assert way.load(tmp_path / "checkpoint", state) == expected


@pytest.mark.usefixtures("group")
def test_what_was_staged_and_never_saved_holds_nobody(tmp_path: Path, way: Way) -> None:
    model, optimizer = model_and_optimizer()
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer, max_host_bytes=0)
    writer.stage(model.state_dict())
    train(model, optimizer)
    state = model.state_dict()
    dcp.async_save(state, storage_writer=writer).result()
    assert way.load(tmp_path / "checkpoint", state) == portrait(state)


@pytest.mark.usefixtures("group")
def test_a_change_that_no_step_made_fails_the_save(tmp_path: Path, way: Way) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    planner = HeldPlanner()
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer)
    future = dcp.async_save(way.part_of({"model": model.state_dict()}), storage_writer=writer, planner=planner)
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[union-attr, operator]
    planner.may_plan.set()
    with pytest.raises(dcp.api.CheckpointException) as caught:
        future.result()
    error = failures(caught.value)[0]
    assert isinstance(error, fp.TornStateError)
    assert "model.0.weight" in str(error)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.usefixtures("group")
def test_with_a_manual_gate_the_caller_waits(tmp_path: Path, way: Way) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    state = way.state(model, optimizer)
    expected = portrait(state)
    planner = HeldPlanner()
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer, gate="manual")
    future = dcp.async_save(state, storage_writer=writer, planner=planner)
    writer.wait_captured()
    train(model, optimizer)
    planner.may_plan.set()
    future.result()
    assert way.load(tmp_path / "checkpoint", state) == expected


@pytest.mark.usefixtures("group")
def test_a_planner_that_computes_what_it_writes_is_refused(tmp_path: Path, way: Way) -> None:
    future = dcp.async_save(
        {"weight": torch.ones(10)}, storage_writer=way.writer(tmp_path / "checkpoint"), planner=DoublingPlanner()
    )
    with pytest.raises(dcp.api.CheckpointException) as caught:
        future.result()
    assert isinstance(failures(caught.value)[0], fp.UnsupportedError)
    assert "'weight'" in str(failures(caught.value)[0])


@pytest.mark.usefixtures("group")
def test_what_is_captured_here_is_not_sent_to_another_process(tmp_path: Path, way: Way) -> None:
    writer = way.writer(tmp_path / "checkpoint", optimizer=model_and_optimizer()[1])
    with pytest.raises(fp.UnsupportedError, match="DefaultStager"):
        pickle.dumps(writer.stage({"weight": torch.ones(3)}))
    elsewhere = pickle.loads(pickle.dumps(writer))
    dcp.save({"weight": torch.ones(3)}, storage_writer=elsewhere)
    assert way.load(tmp_path / "checkpoint", {"weight": torch.ones(3)}) == portrait({"weight": torch.ones(3)})


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_forked_child_waits_for_no_save_of_its_parent(tmp_path: Path, way: Way) -> None:
    model, optimizer = model_and_optimizer()
    train(model, optimizer)
    state = way.state(model, optimizer)
    expected = portrait(state)
    planner = HeldPlanner()
    writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer)
    future = dcp.async_save(state, storage_writer=writer, planner=planner)

    def close(report: Report) -> None:
        writer.wait_captured()
        writer.close()

    def save(report: Report) -> None:
        dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "by_child", no_dist=True)

    run_in_child(close)
    run_in_child(save)
    planner.may_plan.set()
    future.result()
    writer.close()
    assert way.load(tmp_path / "checkpoint", state) == way.load(tmp_path / "by_child", state) == expected


# --- several ranks


def whole_tensors(state: Any) -> list[Any]:
    """Return what the shards of all ranks make up."""
    return portrait([value.full_tensor() for value in tensors_of(state).values() if isinstance(value, DTensor)])


def test_steps_of_sharded_ranks_are_not_in_the_checkpoint(tmp_path: Path, way: Way) -> None:
    def work(rank: int, count: int) -> tuple[list[Any], list[Any]]:
        own_group = dist.new_group()
        mesh = init_device_mesh("cpu", (count,))
        model, optimizer = model_and_optimizer(64)
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, optimizer, 64)
        state = {**way.state(model, optimizer), "replica": torch.arange(1 << 19)}
        expected = whole_tensors(state)
        planner = HeldPlanner()
        writer = way.writer(tmp_path / "checkpoint", optimizer=optimizer)
        future = dcp.async_save(state, storage_writer=writer, planner=planner, process_group=own_group)
        train(model, optimizer, 64)
        state["replica"].zero_()
        planner.may_plan.set()
        train(model, optimizer, 64)
        future.result()
        target = way.state(model, optimizer)
        target["replica"] = torch.zeros(1 << 19, dtype=torch.int64)
        dcp.load(target, storage_reader=way.reader(tmp_path / "checkpoint"))
        assert torch.equal(target["replica"], torch.arange(1 << 19))
        return expected, whole_tensors(target)

    for expected, found in run_ranks(2, work):
        assert found == expected
    shares = [path.stat().st_size for path in (tmp_path / "checkpoint").glob("*.distcp")]
    assert not shares or max(shares) - min(shares) < 1 << 18  # each wrote a part of the replica
