"""DeepSpeed itself, on CPUs with gloo: its own tools read what is saved, and training resumes bit by bit.

Skipped where DeepSpeed is not installed; the other tests of the integration are for everywhere.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from support.deepspeed_stand_in import files_of, latest_in, names_in
from support.process_groups import run_ranks
from support.runs import held_writers
from support.sameness import portrait
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

import fastpersist as fp

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

os.environ["DS_ACCELERATOR"] = "cpu"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed
    import deepspeed.ops
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import PipelineModule
    from deepspeed.utils import groups
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from fastpersist.integrations.deepspeed import attach

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
pytestmark = [pytest.mark.filterwarnings(f"ignore:::{module}") for module in ("accelerate", "deepspeed", "torch")]

# What engines are made of: ZeRO's stage, the type of the parameters, of the gradients that are summed up.
KINDS = {
    "plain": (0, torch.float32, None),
    "plain bf16": (0, torch.bfloat16, None),
    "zero 1": (1, torch.float32, None),
    "zero 1 bf16": (1, torch.bfloat16, None),
    "zero 1 bf16, fp32 gradients": (1, torch.bfloat16, "fp32"),
    "zero 2 bf16": (2, torch.bfloat16, None),
    "zero 3": (3, torch.float32, None),
    "zero 3 bf16": (3, torch.bfloat16, None),
}


class Model(torch.nn.Module):
    """A model whose forward pass changes a tensor, and whose one layer is large enough to be shared out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 8192), torch.nn.Linear(8192, 16)
        self.register_buffer("seen", torch.zeros(100))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.second(torch.tanh(self.first(rows)))


def engine_of(kind: str, model: torch.nn.Module | None = None, **more: Any) -> Any:
    """Make an engine; the same ones on all ranks and each time."""
    stage, dtype, sum_dtype = KINDS[kind]
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(7)
    model = model or Model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **more,
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if sum_dtype:
        config["data_types"] = {"grad_accum_dtype": sum_dtype}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.dtype = dtype
    return engine


def train(engine: Any, step_count: int = 1) -> list[float]:
    """Take some steps; return the losses, which depend on all that was trained before."""
    losses = []
    for _ in range(step_count):
        generator = torch.Generator().manual_seed(100 * engine.global_steps + dist.get_rank())
        rows = torch.randn(4, 64, generator=generator).to(engine.dtype)
        found = engine(rows)
        loss = (found.float() - rows[:, :16].float()).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def values_in(directory: Path) -> Any:
    """Return what there is in a tag, whichever tensors share a storage."""
    files = files_of(directory)
    return portrait(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), files))


def on_ranks(work: Any, count: int = 2) -> list[Any]:
    return run_ranks(count, work, timeout_s=100.0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_stock_saves_and_either_resumes_the_other(tmp_path: Path, kind: str) -> None:
    def work(rank: int, count: int) -> Any:
        engine = engine_of(kind)
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path / "stock"), "a", client_state={"epoch": 3})
        expected = portrait(files_of(tmp_path / "stock" / "a"))
        saving = attach(engine)
        with held_writers():
            engine.save_checkpoint(str(tmp_path / "ours"), "a", client_state={"epoch": 3})
            pending = saving.pending()
            was_captured = pending.captured()
            losses = train(engine, 2)
            was_there = (tmp_path / "ours" / "latest").exists() or (tmp_path / "ours" / "a").exists()
            dist.barrier()
        saving.close()
        same = portrait(files_of(tmp_path / "ours" / "a")) == expected
        resumed = []
        for where, is_attached in (("ours", False), ("stock", True), ("ours", True)):
            fresh = engine_of(kind)
            if is_attached:
                attach(fresh)
            path, client_state = fresh.load_checkpoint(str(tmp_path / where))
            resumed.append(path is not None and client_state["epoch"] == 3 and train(fresh, 2) == losses)
        stats = pending.stats
        return same, was_captured, was_there, resumed, stats.bytes_by_rank, stats.bytes_before_return

    for same, was_captured, was_there, resumed, bytes_by_rank, before_bytes in on_ranks(work):
        assert same
        assert not was_captured, "what only a step changes is written from where it is"
        assert not was_there
        assert resumed == [True, True, True]
        assert before_bytes < 100_000
        if bytes_by_rank and KINDS[kind][0] < 3:
            assert min(bytes_by_rank) > 0.3 * max(bytes_by_rank)
    assert latest_in(tmp_path / "ours") == "a"
    assert fp.verify(tmp_path / "ours" / "a").ok
    stock = [name for name in names_in(tmp_path / "stock") if name != "a"]
    assert [name for name in names_in(tmp_path / "ours") if name != "a"] == stock


@pytest.mark.parametrize("kind", ["zero 2 bf16", "zero 3"])
def test_deepspeeds_tools_read_it(tmp_path: Path, kind: str) -> None:
    def work(rank: int, count: int) -> Any:
        engine = engine_of(kind)
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path / "stock"))
        with attach(engine):
            engine.save_checkpoint(str(tmp_path / "ours"))
        return train(engine)

    losses = on_ranks(work)
    ours, stock = (get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / name)) for name in ("ours", "stock"))
    assert portrait(dict(ours)) == portrait(dict(stock))
    script = subprocess.run(
        [sys.executable, str(tmp_path / "ours" / "zero_to_fp32.py"), str(tmp_path / "ours"), str(tmp_path / "whole")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert script.returncode == 0, script.stderr
    converter = [sys.executable, ds_to_universal.__file__, "--input_folder", str(tmp_path / "ours" / "global_step2")]
    subprocess.run(
        [*converter, "--output_folder", str(tmp_path / "universal" / "global_step2"), "--inject_missing_state"],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    (tmp_path / "universal" / "latest_universal").write_text("global_step2")

    def resume(rank: int, count: int) -> Any:
        engine = engine_of(kind, checkpoint={"load_universal": True})
        attach(engine)
        path, _ = engine.load_checkpoint(str(tmp_path / "universal"))
        return train(engine) if path else None

    assert on_ranks(resume) == losses


@pytest.mark.parametrize("kind", ["plain", "zero 1 bf16"])
def test_a_pipeline_is_saved_by_its_stages(tmp_path: Path, kind: str) -> None:
    dtype = KINDS[kind][1]

    def make() -> Any:
        torch.manual_seed(7)
        layers = [torch.nn.Linear(64, 1200), torch.nn.Tanh(), torch.nn.Linear(1200, 1200), torch.nn.Linear(1200, 16)]
        model = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        return engine_of(kind, model)

    def batches(engine: Any) -> Any:
        while True:
            generator = torch.Generator().manual_seed(engine.global_steps)
            rows, wanted = (torch.randn(4, width, generator=generator).to(dtype) for width in (64, 16))
            yield rows, wanted

    def work(rank: int, count: int) -> Any:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        engine = make()
        engine.train_batch(batches(engine))
        engine.save_checkpoint(str(tmp_path / "stock"), "a")
        expected = values_in(tmp_path / "stock" / "a")
        saving = attach(engine)
        with held_writers():
            engine.save_checkpoint(str(tmp_path / "ours"), "a")
            loss = engine.train_batch(batches(engine)).item()
        saving.close()
        same = values_in(tmp_path / "ours" / "a") == expected
        resumed = make()
        attach(resumed)
        resumed.load_checkpoint(str(tmp_path / "ours"))
        return same, resumed.train_batch(batches(resumed)).item() == loss

    assert on_ranks(work) == [(True, True)] * 2
    ours, stock = tmp_path / "ours" / "a", tmp_path / "stock" / "a"
    assert sum(name.startswith("layer_") for name in names_in(ours)) == 4
    for name in names_in(stock):
        assert (ours / name).stat().st_size < (stock / name).stat().st_size + 100_000, "no layer has the flat buffer"


def test_experts_are_saved_by_who_has_them(tmp_path: Path) -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(64, 32)
            self.experts = MoE(32, torch.nn.Linear(32, 32), num_experts=2, ep_size=2, k=1)
            self.last = torch.nn.Linear(32, 16)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            found, _, _ = self.experts(self.first(rows))
            return self.last(found)

    def make() -> Any:
        torch.manual_seed(7)
        return engine_of("plain", Experts())

    def work(rank: int, count: int) -> Any:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        engine = make()
        train(engine, 2)
        engine.save_checkpoint(str(tmp_path / "stock"), "a")
        expected = portrait(files_of(tmp_path / "stock" / "a"))
        saving = attach(engine)
        with held_writers():
            engine.save_checkpoint(str(tmp_path / "ours"), "a")
            train(engine)
        saving.close()
        assert groups._get_max_expert_size() == 2
        return portrait(files_of(tmp_path / "ours" / "a")) == expected

    assert on_ranks(work) == [True, True]
    assert len([name for name in names_in(tmp_path / "ours" / "a") if "expert" in name]) == 2


def test_one_process_waits_for_nothing_while_gradients_accumulate(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        engine = engine_of("zero 1", gradient_accumulation_steps=3)
        saving = attach(engine)
        train(engine, 3)
        with held_writers():
            engine.save_checkpoint(str(tmp_path), "a")
            train(engine, 2)
            waits_for_none = not saving.pending().captured()
            train(engine, 1)
            waits = saving.pending().captured()
        engine.save_16bit_model(str(tmp_path / "model"))
        saving.wait()
        whole = torch.load(tmp_path / "model" / "pytorch_model.bin")
        engine.destroy()
        return waits_for_none, waits, sorted(whole)

    assert on_ranks(work, 1) == [(True, True, sorted(Model().state_dict()))]
    assert latest_in(tmp_path) == "a"


def test_accelerates_save_state_goes_through_it(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        torch.manual_seed(7)
        model = Model()
        rows = DataLoader(torch.randn(40, 64), batch_size=4)
        model, _, rows = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows)
        model.dtype = torch.float32
        saving = attach(model)
        train(model, 2)
        with held_writers():
            accelerator.save_state(str(tmp_path))
            losses = train(model, 2)
            was_there = (tmp_path / "latest").exists()
            dist.barrier()
        accelerator.load_state(str(tmp_path))  # which waits
        again = train(model, 2)
        saving.close()
        return was_there, again == losses

    assert on_ranks(work) == [(False, True)] * 2
    assert fp.verify(tmp_path / "pytorch_model").ok
