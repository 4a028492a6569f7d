"""Two tensors under one name are refused, by name, before one is lost; what may differ among ranks may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import run_ranks
from support.sharded_runs import mesh_of_all
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastpersist as fp
from fastpersist.dcp.plan_comparison import sample
from fastpersist.errors import CoordinationError, PeerError
from fastpersist.saving.ownership import Ownership
from fastpersist.saving.sources import Holders


def saved(path: Path, state: dict[str, Any], *, optimizer: object = None) -> str:
    """Return what a save ends with, on this rank."""
    with fp.Checkpointer(path, sharded=True, process_group=dist.group.WORLD, optimizer=optimizer) as checkpoints:
        try:
            checkpoints.save(1, state).result(30)
        except (CoordinationError, PeerError) as error:
            assert checkpoints.latest() is None
            return str(error)
        return "saved"


def test_shards_of_stages_whose_optimizers_number_their_parameters_are_refused(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> str:
        meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
        moment = DTensor.from_local(torch.full((4, 3), float(rank)), meshes[rank // 2], [Shard(0)], run_check=False)
        state = {
            "model": {f"stage{rank // 2}.weight": moment},
            "optimizer": {"state": {0: {"exp_avg": moment}}, "param_groups": [{"params": [0]}]},
        }
        return saved(tmp_path, state)

    for told in run_ranks(4, work):
        assert "'optimizer.state.0.exp_avg' counts as one" in told
        assert "rank 0 holds other values of it than rank 2" in told
        assert "get_optimizer_state_dict" in told


def plain_stage(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a stage of its own on each rank, of one shape, whose moments differ."""
    model = torch.nn.Sequential()
    model.add_module(f"layer{rank}", torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((4,), float(rank + 1))).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("by_names", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["unknown optimizer", "optimizer"])
def test_plain_stages_are_saved_by_names_and_refused_by_numbers(tmp_path: Path, by_names: bool, given: bool) -> None:
    def work(rank: int, count: int) -> tuple[str, bool]:
        model, optimizer = plain_stage(rank)
        state = get_optimizer_state_dict(model, optimizer) if by_names else optimizer.state_dict()
        told = saved(
            tmp_path, {"model": model.state_dict(), "optimizer": state}, optimizer=optimizer if given else None
        )
        if not by_names:
            return told, True
        with fp.Checkpointer(tmp_path, process_group=dist.group.WORLD) as checkpoints:
            found = checkpoints.load(1)["optimizer"]["state"][f"layer{rank}.weight"]["exp_avg"]
        return told, torch.equal(found, optimizer.state[next(model.parameters())]["exp_avg"])

    for told, is_whole in run_ranks(2, work):
        assert is_whole
        assert told == "saved" if by_names else "'optimizer.state.0.exp_avg' counts as one tensor" in told


def test_modules_of_one_name_are_refused_if_an_optimizer_owns_them(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> str:
        torch.manual_seed(rank)
        model = torch.nn.Linear(4, 3)
        return saved(tmp_path, {"model": model.state_dict()}, optimizer=torch.optim.SGD(model.parameters()))

    for told in run_ranks(2, work):
        assert "'model.weight' counts as one tensor" in told


@pytest.mark.parametrize("size", [300, 600_000])
def test_large_plain_tensors_that_would_be_cut_are_not_mixed(tmp_path: Path, size: int) -> None:
    def work(rank: int, count: int) -> str:
        return saved(tmp_path, {"average": torch.full((size,), float(rank))})

    for told in run_ranks(2, work):
        assert told == "saved" if size == 300 else "'average' counts as one tensor" in told


def test_what_parts_later_is_refused_then_and_saved_again_when_it_agrees(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> list[str]:
        tensor = DTensor.from_local(torch.zeros(5, 2), mesh_of_all(), [Replicate()], run_check=False)
        own = DTensor.from_local(torch.zeros(5, 2), mesh_of_all(), [Shard(0)], run_check=False)
        told = []
        with fp.Checkpointer(tmp_path, sharded=True, process_group=dist.group.WORLD, keep=9) as checkpoints:
            for step, value in enumerate([0, rank, 3, 4]):
                tensor.to_local().fill_(value)
                own.to_local().fill_(rank + step)
                try:
                    checkpoints.save(step, {"same": tensor, "own": own, "step": step}).result(30)
                    told.append("saved")
                except (CoordinationError, PeerError) as error:
                    told.append(str(error))
            told.append(str(checkpoints.steps()))
            told.append(str(checkpoints.load(3)["own"][:, 0].tolist()))
        return told

    for first, second, *rest in run_ranks(2, work):
        assert first == "saved"
        assert "'same' counts as one tensor, and rank 0 holds other values of it than rank 1" in second
        assert rest == ["saved", "saved", "[0, 2, 3]", str([3.0] * 5 + [4.0] * 5)]


LARGE = 600_000  # floats, which would be cut


def late_state(rank: int, change: str, step: int) -> Any:
    """Return a state whose tensors of one name are one rank's, or not compared, until step 2."""
    is_late = step == 2
    if change == "grows":
        return {"bank": torch.full((LARGE if is_late else 5,), float(rank))}
    if change == "comes to the follower":
        return {"other": torch.ones(3)} | ({"bank": torch.full((LARGE,), float(rank))} if is_late or not rank else {})
    if change == "comes to the coordinator":
        return {"other": torch.ones(3)} | ({"bank": torch.full((LARGE,), float(rank))} if is_late or rank else {})
    placement = Replicate() if is_late else Shard(0)
    own = torch.full((LARGE,), float(rank))
    return {"bank": DTensor.from_local(own, mesh_of_all(), [placement], run_check=False)}


@pytest.mark.parametrize("change", ["grows", "comes to the follower", "comes to the coordinator", "is replicated"])
def test_what_comes_under_a_name_later_is_compared_then(tmp_path: Path, change: str) -> None:
    def work(rank: int, count: int) -> list[str]:
        told = []
        with fp.Checkpointer(tmp_path, sharded=True, process_group=dist.group.WORLD, keep=9) as checkpoints:
            for step in range(3):
                try:
                    checkpoints.save(step, late_state(rank, change, step)).result(30)
                    told.append("saved")
                except (CoordinationError, PeerError) as error:
                    told.append(str(error))
        return told

    for *before, last in run_ranks(2, work):
        assert before == ["saved", "saved"]
        assert "'bank' counts as one tensor, and rank 0 holds other values of it than rank 1" in last


def test_a_stage_that_begins_to_train_later_is_refused_where_optimizers_number_their_parameters(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> list[str]:
        torch.manual_seed(rank)
        stage = torch.nn.Linear(800, 800, bias=False)
        optimizer = torch.optim.Adam(stage.parameters())
        told = []
        options: dict[str, Any] = {"sharded": True, "process_group": dist.group.WORLD, "optimizer": optimizer}
        with fp.Checkpointer(tmp_path, **options) as checkpoints:
            for step in range(2):
                if step or not rank:
                    stage(torch.randn(4, 800)).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                state = {f"stage{rank}": stage.state_dict(), "optimizer": optimizer.state_dict()}
                try:
                    checkpoints.save(step, state).result(30)
                    told.append("saved")
                except (CoordinationError, PeerError) as error:
                    told.append(str(error))
        return told

    for first, second in run_ranks(2, work):
        assert first == "saved"
        assert "'optimizer.state.0.exp_avg" in second
        assert "counts as one tensor" in second


def test_what_may_differ_among_ranks_does_not_keep_a_step_from_being_saved(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> str:
        norm = torch.nn.BatchNorm1d(4)
        optimizer = torch.optim.Adam(norm.parameters())
        norm(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))).sum().backward()
        for parameter in norm.parameters():
            parameter.grad = torch.ones(4)
        for _ in range(rank + 1):
            optimizer.step()
        with torch.no_grad():
            for parameter in norm.parameters():  # of ranks that have met other numbers of batches, say
                parameter.fill_(1)
                optimizer.state[parameter]["exp_avg"].fill_(1)
                optimizer.state[parameter]["exp_avg_sq"].fill_(1)
        state = {
            "model": norm.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.random.manual_seed(rank).get_state(),
            "rank": rank,
        }
        return saved(tmp_path, state, optimizer=optimizer)

    assert run_ranks(2, work) == ["saved", "saved"]


def test_samples_are_of_values_at_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpersist.dcp.plan_comparison._rank_count", lambda: 2)
    tensors = {name: torch.arange(1000, dtype=torch.float64) for name in "ab"}
    tensors["one"] = torch.ones(1)
    owned = [tensor.untyped_storage()._cdata for tensor in tensors.values()]
    ownership = Ownership(Holders(list(tensors.values()), owned), Holders([], []), "")
    large = torch.ones(300_000, dtype=torch.complex128)
    state = {**tensors, "other": torch.ones(9), "empty": torch.ones(0), "large": large}
    get = sample(state, ownership)
    assert set(get()) == {"a", "b", "large"}
    before = get()
    tensors["a"].add_(1)
    assert get() == before
    assert sample(state, ownership)() != before
