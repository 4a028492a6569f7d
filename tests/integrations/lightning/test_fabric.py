"""Fabric with our plugin: the same files, written beside the training once it knows the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import IGNORED, lightning
from support.runs import copied, held_writers
from support.sameness import assert_same

from fastpersist.integrations.lightning import FastPersistCheckpointIO

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]


class Loop:
    """A training loop with Fabric."""

    def __init__(self, plugin: Any = None) -> None:
        torch.manual_seed(0)
        self.fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[] if plugin is None else [plugin])
        model = torch.nn.Sequential(torch.nn.Linear(8, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.step_count = 0
        if plugin is not None:
            plugin.optimizer = self.optimizer

    def backward(self) -> None:
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(self.step_count))
        self.optimizer.zero_grad()
        self.fabric.backward((self.model(rows) - rows.sum(1, keepdim=True)).pow(2).mean())

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.step_count += 1

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step_count": self.step_count}

    def weights(self) -> dict[str, Any]:
        return copied([self.model.state_dict(), self.optimizer.state_dict()])


def test_backward_runs_beside_the_writing_and_the_step_waits(tmp_path: Path) -> None:
    plugin = FastPersistCheckpointIO()
    loop = Loop(plugin)
    loop.step()
    expected = loop.weights()
    with held_writers() as writers:
        loop.fabric.save(tmp_path / "a.ckpt", loop.state())
        (pending,) = plugin.order.under_way()
        loop.backward()
        assert not pending.captured()
        loop.optimizer.step()
        assert pending.captured()
        assert not (tmp_path / "a.ckpt").exists()
        writers.release()
        plugin.wait()
    loaded = torch.load(tmp_path / "a.ckpt")
    assert_same([loaded["model"], loaded["optimizer"]], expected)


@pytest.mark.parametrize("first_is_ours", [True, False], ids=["ours to stock", "stock to ours"])
def test_one_resumes_what_the_other_began_and_reaches_the_same_bits(tmp_path: Path, first_is_ours: bool) -> None:
    whole = Loop()
    for _ in range(6):
        whole.step()
    plugin = FastPersistCheckpointIO()
    first = Loop(plugin if first_is_ours else None)
    for _ in range(3):
        first.step()
    first.fabric.save(tmp_path / "a.ckpt", first.state())
    first.step()
    plugin.wait()
    second = Loop(None if first_is_ours else plugin)
    state = second.state()
    assert second.fabric.load(tmp_path / "a.ckpt", state) == {}
    second.step_count = state["step_count"]
    assert second.step_count == 3
    for _ in range(3):
        second.step()
    assert_same(second.weights(), whole.weights())


def test_load_waits_for_the_save_of_its_path(tmp_path: Path) -> None:
    loop = Loop(FastPersistCheckpointIO())
    for _ in range(4):
        loop.step()
        loop.fabric.save(tmp_path / "a.ckpt", loop.state())
    assert loop.fabric.load(tmp_path / "a.ckpt")["step_count"] == 4


def test_filter_of_fabric_is_kept(tmp_path: Path) -> None:
    plugin = FastPersistCheckpointIO()
    loop = Loop(plugin)
    loop.fabric.save(tmp_path / "a.ckpt", loop.state(), filter={"model": lambda name, _value: "bias" not in name})
    plugin.wait()
    assert all("bias" not in name for name in torch.load(tmp_path / "a.ckpt")["model"])
