"""Two tensors under one name are refused in dcp.save, too, with FastPersistSavePlanner; by name, on all ranks."""

from __future__ import annotations

import functools
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import IGNORED, raised_by
from support.process_groups import run_ranks
from support.sharded_runs import mesh_of_all
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastpersist.dcp import plan_comparison
from fastpersist.errors import CoordinationError
from fastpersist.integrations.torch_dcp import (
    FastPersistHuggingFaceReader,
    FastPersistHuggingFaceWriter,
    FastPersistReader,
    FastPersistSavePlanner,
    FastPersistWriter,
)

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

torch.set_num_threads(1)

WRITERS = {"ours": FastPersistWriter, "torch's": dcp.FileSystemWriter}


def saved(path: Path, state: dict[str, Any], kind: str = "ours", **options: Any) -> str:
    """Return what a save ends with, on this rank."""
    try:
        dcp.save(state, storage_writer=WRITERS[kind](path), planner=FastPersistSavePlanner(**options))
    except dcp.api.CheckpointException as error:
        return told_by(error)
    return "saved"


def told_by(error: dcp.api.CheckpointException) -> str:
    """Return what the first rank has raised, which is all that DCP shows of a failed save."""
    ((rank, (cause, _)),) = error.failures.items()
    assert rank == 0
    assert isinstance(cause, CoordinationError)
    assert str(cause) in str(error)
    return str(cause)


def stage(rank: int, width: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a stage of its own on each rank, whose moments differ."""
    model = torch.nn.Sequential()
    model.add_module(f"layer{rank}", torch.nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((width,), float(rank + 1))).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("wider", [0, 1], ids=["same shapes", "other shapes"])
def test_stages_whose_optimizers_number_their_parameters_are_refused(tmp_path: Path, kind: str, wider: int) -> None:
    def work(rank: int, count: int) -> str:
        model, optimizer = stage(rank, 4 + rank * wider)
        return saved(tmp_path / "checkpoint", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kind)

    difference = "one of another shape or dtype" if wider else "other values of it"
    for told in run_ranks(2, work):
        assert f"'optimizer.state.0.exp_avg' counts as one tensor, and rank 0 holds {difference} than rank 1" in told
        assert "get_optimizer_state_dict" in told
    assert not (tmp_path / "checkpoint" / ".metadata").exists()


def test_stages_are_saved_by_names(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> bool:
        model, optimizer = stage(rank)
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        assert saved(tmp_path, state) == "saved"
        found = {"optimizer": {"state": {f"layer{rank}.weight": {"exp_avg": torch.zeros(3, 4)}}}}
        dcp.load(found, storage_reader=FastPersistReader(tmp_path))
        moment = optimizer.state[next(model.parameters())]["exp_avg"]
        return torch.equal(found["optimizer"]["state"][f"layer{rank}.weight"]["exp_avg"], moment)

    assert run_ranks(2, work) == [True, True]


@pytest.mark.parametrize("wider", [0, 2], ids=["same shapes", "other shapes"])
def test_shards_of_stages_are_refused(tmp_path: Path, wider: int) -> None:
    def work(rank: int, count: int) -> str:
        meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
        local = torch.full((4, 3 + rank // 2 * wider), float(rank))
        return saved(tmp_path, {"moment": DTensor.from_local(local, meshes[rank // 2], [Shard(0)], run_check=False)})

    difference = "one of another shape or dtype" if wider else "other values of it"
    for told in run_ranks(4, work):
        assert f"'moment' counts as one tensor, and rank 0 holds {difference} than rank 2" in told


@pytest.mark.parametrize(
    ("size", "options", "is_refused"),
    [
        pytest.param((300,), {}, False, id="small"),
        pytest.param((600_000,), {}, True, id="large"),
        pytest.param((1, 600_000), {}, False, id="one row"),
        pytest.param((600_000,), {"dedup_save_to_lowest_rank": True}, False, id="not to be cut"),
    ],
)
def test_large_plain_tensors_are_not_mixed(
    tmp_path: Path, size: tuple[int, ...], options: dict[str, Any], is_refused: bool
) -> None:
    def work(rank: int, count: int) -> str:
        return saved(tmp_path, {"average": torch.full(size, float(rank))}, **options)

    for told in run_ranks(2, work):
        assert ("'average' counts as one tensor" in told) if is_refused else (told == "saved")


def test_what_may_differ_among_ranks_is_saved(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> str:
        norm = torch.nn.BatchNorm1d(4)
        norm(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)))
        optimizer = torch.optim.Adam(norm.parameters())
        for _ in range(rank + 1):
            for parameter in norm.parameters():
                parameter.grad = torch.zeros(4)
            optimizer.step()
        state = {
            "model": norm.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.random.manual_seed(rank).get_state(),
            "own": torch.full((600_000 + rank,), float(rank)),
            "transposed": torch.full((2000, 1000), float(rank)).t(),
            "step": torch.tensor(rank),
            "rank": rank,
        }
        return saved(tmp_path, state)

    assert run_ranks(2, work) == ["saved", "saved"]


def test_only_the_ranks_that_differ_are_named(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> str:
        local = torch.full((5, 2), float(rank % 2))
        return saved(tmp_path, {"same": DTensor.from_local(local, mesh_of_all(), [Replicate()], run_check=False)})

    for told in run_ranks(4, work):
        assert "rank 0 holds other values of it than rank 1, 3. " in told


# --- plans that are kept


def forget_plans() -> None:
    for name in dir(SavePlanner):
        if name.startswith("_cached"):
            getattr(SavePlanner, name).clear()


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_kept_plans_are_compared_and_hold_nothing_of_a_save_that_was_refused(tmp_path: Path, odd: int) -> None:
    """From the odd save on there are other tensors, of which the first rank has not heard in a save that went well."""

    def work(rank: int, count: int) -> list[str]:
        forget_plans()
        told = []
        for step in range(4):
            tensor = torch.full((600_000,), float(step if step != odd else step + rank))
            state = {"optimizer": {"state": {0: {"exp_avg": tensor}}, "param_groups": [{"params": [0]}]}}
            state |= {f"own {step >= odd} {rank}": torch.full((3,), float(step + rank))}
            told.append(saved(tmp_path / str(step), state, enable_plan_caching=True))
            if step != odd:
                target = {name: torch.zeros_like(value) for name, value in state.items() if name != "optimizer"}
                moment = torch.zeros(600_000)
                target["optimizer"] = {"state": {0: {"exp_avg": moment}}, "param_groups": [{}]}
                dcp.load(target, storage_reader=FastPersistReader(tmp_path / str(step)))
                assert torch.equal(moment, tensor)
                assert all(torch.equal(target[name], state[name]) for name in state if name != "optimizer")
        return told

    for told in run_ranks(2, work):
        assert "'optimizer.state.0.exp_avg' counts as one tensor" in told.pop(odd)
        assert told == ["saved"] * 3


class FailingWriter(FastPersistWriter):
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        raise OSError("no room")


@pytest.mark.parametrize("odd", [0, 1])
def test_kept_plans_are_of_the_last_save_that_went_well(tmp_path: Path, odd: int) -> None:
    def work(rank: int, count: int) -> None:
        forget_plans()
        for step in range(4):
            path = tmp_path / str(step)
            state = {
                f"own {step >= odd} {rank}": torch.full((3,), float(step + rank)),
                "all": torch.ones(600_000) * step,
            }
            planner = FastPersistSavePlanner(enable_plan_caching=True)
            if step == odd:
                save = functools.partial(dcp.save, state, storage_writer=FailingWriter(path), planner=planner)
                assert "no room" in str(raised_by(save)[0])
                continue
            dcp.save(state, storage_writer=FastPersistWriter(path), planner=planner)
            target = {name: torch.zeros_like(value) for name, value in state.items()}
            dcp.load(target, storage_reader=FastPersistReader(path))
            assert all(torch.equal(target[name], state[name]) for name in state)

    run_ranks(2, work)


# --- dcp.async_save


class HeldPlanner(FastPersistSavePlanner):
    """Plans when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def create_local_plan(self) -> SavePlan:
        assert self.go.wait(20)
        return super().create_local_plan()


@pytest.mark.parametrize("writer", [FastPersistWriter, FastPersistHuggingFaceWriter])
def test_a_step_between_staging_and_planning_is_no_difference(tmp_path: Path, writer: Any) -> None:
    path = tmp_path / "checkpoint"

    def work(rank: int, count: int) -> None:
        weight = torch.nn.Parameter(torch.ones(600_000))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.ones(600_000)
        planner = HeldPlanner()
        future = dcp.async_save({"weight": weight}, storage_writer=writer(path, optimizer=optimizer), planner=planner)
        if rank == 1:
            optimizer.step()
        planner.go.set()
        future.result(20)
        assert weight[0] == (0 if rank == 1 else 1)

    run_ranks(2, work)
    reader = FastPersistReader if writer is FastPersistWriter else FastPersistHuggingFaceReader
    target = {"weight": torch.zeros(600_000)}
    dcp.load(target, storage_reader=reader(path))
    assert torch.equal(target["weight"], torch.ones(600_000))


def names_sampled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of all tensors are added of which samples are taken from now on."""
    sampled: list[str] = []
    sample_each: Callable[[Any], Any] = plan_comparison._sample_each
    monkeypatch.setattr(plan_comparison, "_sample_each", lambda found: sampled.extend(found) or sample_each(found))
    return sampled


STAGED = {**WRITERS, "ours, HuggingFace's": FastPersistHuggingFaceWriter}


@pytest.mark.parametrize("kind", STAGED)
@pytest.mark.parametrize("differs", [True, False], ids=["differs", "differs later"])
def test_async_saves_compare_what_was_there_when_they_were_called(tmp_path: Path, kind: str, differs: bool) -> None:
    path = tmp_path / "checkpoint"

    def work(rank: int, count: int) -> str:
        average = torch.full((600_000,), float(rank if differs else 5))
        planner = HeldPlanner()
        future = dcp.async_save({"average": average}, storage_writer=STAGED[kind](path), planner=planner)
        average.fill_(5 if differs else rank)
        planner.go.set()
        try:
            future.result(20)
        except dcp.api.CheckpointException as error:
            return told_by(error)
        return "saved"

    for told in run_ranks(2, work):
        assert ("'average' counts as one tensor" in told) if differs else (told == "saved")


def test_an_async_save_samples_no_shards_that_are_one_ranks_own_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, count: int) -> list[str]:
        sampled = names_sampled(monkeypatch)
        planner = FastPersistSavePlanner()
        dcp.async_save(mixed_state(rank), storage_writer=FastPersistWriter(tmp_path), planner=planner).result(20)
        return sorted(sampled)

    assert run_ranks(2, work) == [["optimizer.state.0.exp_avg", "replicated"]] * 2
    metadata = (tmp_path / ".metadata").read_bytes()
    assert b"fastpersist.dcp.plan_comparison" not in metadata
    assert type(pickle.loads(metadata).storage_meta) is StorageMeta


# --- what of it is seen


def mixed_state(rank: int) -> dict[str, Any]:
    """Return a state of which samples are taken."""
    shape, mesh = (5, 2), mesh_of_all()
    return {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(4, 3)}}, "param_groups": [{"params": [0], "lr": 0.1}]},
        "replicated": DTensor.from_local(torch.ones(shape), mesh, [Replicate()], run_check=False),
        "rows": DTensor.from_local(torch.full(shape, float(rank)), mesh, [Shard(0)], run_check=False),
        "rank": rank,
    }


@pytest.mark.parametrize("kind", WRITERS)
def test_metadata_is_what_torchs_planner_gives(tmp_path: Path, kind: str) -> None:
    def work(rank: int, count: int) -> None:
        for name, planner in (("ours", FastPersistSavePlanner()), ("stock", DefaultSavePlanner())):
            dcp.save(mixed_state(rank), storage_writer=WRITERS[kind](tmp_path / name), planner=planner)

    run_ranks(2, work)
    pickled = {name: (tmp_path / name / ".metadata").read_bytes() for name in ("ours", "stock")}
    ours, stock = (pickle.loads(pickled[name]) for name in ("ours", "stock"))
    assert b"fastpersist.dcp.plan_comparison" not in pickled["ours"]
    assert type(ours) is Metadata
    assert type(ours.storage_meta) is type(stock.storage_meta)
    for field in ("state_dict_metadata", "planner_data"):
        assert getattr(ours, field) == getattr(stock, field)
    assert ours.storage_data.keys() == stock.storage_data.keys()
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "stock"))


class Spy(FastPersistSavePlanner):
    """Keeps what ranks send, and what comes of it."""

    def create_local_plan(self) -> SavePlan:
        self.sent = super().create_local_plan()
        return self.sent

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        planned, metadata = super().create_global_plan(all_plans)
        self.planned = planned
        return planned, metadata


def test_what_no_other_rank_can_hold_is_not_sampled_and_samples_go_no_further_than_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, count: int) -> list[str]:
        sampled = names_sampled(monkeypatch)
        planner = Spy()
        dcp.save(mixed_state(rank), storage_writer=FastPersistWriter(tmp_path), planner=planner)
        assert type(planner.sent) is not SavePlan
        assert isinstance(planner.sent, SavePlan)
        assert all(type(plan) is SavePlan for plan in getattr(planner, "planned", []))
        assert hasattr(planner, "planned") == (rank == 0)
        return sorted(sampled)

    assert run_ranks(2, work) == [["optimizer.state.0.exp_avg", "replicated"]] * 2


def test_one_rank_samples_nothing(tmp_path: Path) -> None:
    planner = Spy()
    state = {"large": torch.zeros(600_000), "optimizer": {"state": {0: torch.zeros(3)}, "param_groups": []}}
    dcp.save(state, storage_writer=FastPersistWriter(tmp_path), planner=planner)
    assert type(planner.sent) is SavePlan


@pytest.mark.parametrize("first", [True, False], ids=["only the first rank", "all but the first rank"])
def test_ranks_with_torchs_planner_among_them_are_not_compared(tmp_path: Path, first: bool) -> None:
    def work(rank: int, count: int) -> None:
        planner = FastPersistSavePlanner() if (rank == 0) == first else DefaultSavePlanner()
        local = torch.full((5, 2), float(rank))
        state = {"same": DTensor.from_local(local, mesh_of_all(), [Replicate()], run_check=False)}
        dcp.save(state, storage_writer=FastPersistWriter(tmp_path), planner=planner)

    run_ranks(2, work)
    assert (tmp_path / ".metadata").exists()
