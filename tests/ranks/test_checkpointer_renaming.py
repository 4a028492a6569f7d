"""`rename=` and `dtype=` of `Checkpointer.load`: for all kinds of steps, alone and with ranks of several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import run_ranks
from support.sameness import assert_same
from support.store_runs import two_stores

import fastpersist as fp

BOTH = pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    weight = torch.randn(300, 5)
    return {"model": {"module.weight": weight, "module.count": torch.arange(3)}, "step": 5}


def renamed(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    model = state()["model"]
    return {"weight": model["module.weight"].to(dtype), "count": model["module.count"], "step": 5}


def load_all_ways(checkpoints: fp.Checkpointer, rank_state: torch.Tensor) -> None:
    """Load with each option and with both; `rank_state` belongs to this rank."""
    own = {"rank_state": rank_state}
    assert_same(checkpoints.load(rename={"model.module.": ""}), {**renamed(), **own})
    found = checkpoints.load(rename=lambda name: None if name == "step" else name, keys=["model", "step"])
    assert sorted(found) == ["model.module.count", "model.module.weight"]
    found = checkpoints.load(dtype=torch.bfloat16)
    assert_same(found["model"]["module.weight"], state()["model"]["module.weight"].bfloat16())
    assert_same(found["model"]["module.count"], torch.arange(3))
    assert found["rank_state"].dtype == torch.float32
    both = checkpoints.load(rename={"model.module.": ""}, dtype=torch.float64)
    assert_same(both, {**renamed(torch.float64), **own})
    weight = torch.zeros(300, 5)
    into = {"model": {"module.weight": weight, "module.count": torch.zeros(3, dtype=torch.int64)}}
    filled = checkpoints.load(into=into, dtype=torch.float16)
    assert filled["model"]["module.weight"] is weight  # targets keep their dtype
    assert_same(weight, state()["model"]["module.weight"])
    other = torch.zeros(300, 5)
    into = {"net": {"weight": other, "count": torch.zeros(3, dtype=torch.int64)}}
    filled = checkpoints.load(into=into, rename={"model.module.": "net."})
    assert filled["net"]["weight"] is other
    assert_same(dict(sorted(filled.items())), {"net": into["net"], **own, "step": 5})
    assert_same(into["net"]["count"], torch.arange(3))
    assert_same(other, state()["model"]["module.weight"])


@BOTH
def test_a_rank_state_takes_the_place_of_nothing_that_is_renamed(tmp_path: Path, sharded: bool) -> None:
    with fp.Checkpointer(tmp_path, sharded=sharded) as checkpoints:
        checkpoints.save(1, state(), rank_state=torch.ones(2))
        with pytest.raises(fp.ConfigError, match=r"rename= gives .* the name 'rank_state'"):
            checkpoints.load(rename={"model.module.weight": "rank_state"})
        checkpoints.save(2, state()).result()
        found = checkpoints.load(rename={"model.module.weight": "rank_state"})
        assert_same(found["rank_state"], state()["model"]["module.weight"])


@BOTH
def test_one_process_gets_new_names_and_another_dtype(tmp_path: Path, sharded: bool) -> None:
    with fp.Checkpointer(tmp_path, sharded=sharded) as checkpoints:
        checkpoints.save(1, state(), rank_state=torch.ones(2))
        load_all_ways(checkpoints, torch.ones(2))


@pytest.mark.parametrize(
    ("node_local", "sharded"), [(None, False), (None, True), ("parts", False), ("parts", True), ("copies", False)]
)
def test_so_do_ranks_wherever_the_step_lies(tmp_path: Path, node_local: Any, sharded: bool) -> None:
    roots = [tmp_path, tmp_path] if node_local is None else two_stores(tmp_path)

    def work(rank: int, count: int) -> None:
        with fp.Checkpointer(
            roots[rank], process_group=dist.group.WORLD, sharded=sharded, node_local=node_local
        ) as checkpoints:
            checkpoints.save(1, state(), rank_state=torch.full((2,), float(rank))).result()
            dist.barrier()
            load_all_ways(checkpoints, torch.full((2,), float(rank)))

    run_ranks(2, work)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state()).result()
        with pytest.raises(fp.ConfigError, match="floating-point"):
            checkpoints.load(dtype=torch.int8)
        with pytest.raises(fp.UnsupportedError, match="rename= with into= goes without keys="):
            checkpoints.load(rename={"a": "b"}, into={"model": {}}, keys=["step"])
        for new, why in (("model", "something else lies"), ("model.module.weight", "one name")):
            with pytest.raises(fp.ConfigError, match=why):
                checkpoints.load(rename={"step": new}, into={"model": {"module.weight": torch.zeros(300, 5)}})
        with pytest.raises(fp.ConfigError, match="one name"):
            checkpoints.load(rename=lambda name: "same")


class Wrapper(torch.nn.Module):
    """Has its model's names with a prefix, as DistributedDataParallel does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(700, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 700)).sum().backward()
    optimizer.step()
    return model, optimizer


@BOTH
def test_a_model_is_resumed_without_the_wrapper_that_it_was_trained_in(
    tmp_path: Path, sharded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained(1)
    other, of_other = trained(2)
    weight, ema = other[0].weight, torch.randn(1 << 20)
    saved = {"model": Wrapper(model).state_dict(), "optimizer": optimizer.state_dict(), "ema": ema, "step": 7}
    with fp.Checkpointer(tmp_path, sharded=sharded) as checkpoints:
        checkpoints.save(1, saved).result()
        into = {"net": other, "optimizer": of_other}
        caplog.set_level("INFO", "fastpersist")
        found = checkpoints.load(into=into, rename={"model.module.": "net."}, verify=True)
    assert found == {**into, "step": 7}
    assert other[0].weight is weight
    assert_same(other.state_dict(), model.state_dict())
    assert_same(of_other.state_dict(), optimizer.state_dict())
    assert "in memory once more" not in caplog.text
    assert "neither into nor keys name them: ema (4.0 MiB)" in caplog.text
