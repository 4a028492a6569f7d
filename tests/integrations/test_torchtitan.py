"""TorchTitan's trainer with our checkpoint manager: the same files, training and resumption as with its own."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import torchtitan_on_cpu
from support.tensor_files import faults
from support.torchrun import run_to_its_end
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fastpersist as fp

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("TorchTitan is not installed (make frameworks)", allow_module_level=True)

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from fastpersist.integrations.torchtitan import FastPersistCheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate")  # by TorchTitan itself

PROGRAM = Path(torchtitan_on_cpu.__file__)
PATIENCE_S = 400


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("assets") / "made"
    torchtitan_on_cpu.make_assets(directory)
    return directory


def train(assets: Path, out: Path, rank_count: int, config: str, *options: str) -> str:
    """Train with TorchTitan's own program; return what it said."""
    words = ["--module", "torchtitan_on_cpu", "--config", config, "--dump_folder", out, "--debug.seed", "1", *options]
    code, said = run_to_its_end(PROGRAM, rank_count, *words, patience_s=PATIENCE_S, TITAN_ASSETS=str(assets))
    assert code == 0, said
    return said


def steps_of(said: str) -> set[int]:
    return {int(step) for step in re.findall(r"step:\s+(\d+)", said)}


def state_of(step: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Read a step with stock DCP."""
    dcp_to_torch_save(step, scratch)
    found: dict[str, torch.Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, one in value.items():
                add(f"{name}/{key}", one)

    add("", torch.load(scratch, weights_only=False))
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert len(one) > 20
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.timeout(4 * PATIENCE_S)
def test_a_run_writes_and_resumes_what_a_run_with_the_stock_manager_does(assets: Path, tmp_path: Path) -> None:
    train(assets, tmp_path / "stock", 2, "stock")
    train(assets, tmp_path / "fast", 2, "fast")
    wanted = state_of(tmp_path / "stock/checkpoint/step-4", tmp_path / "stock.pt")
    assert_same(state_of(tmp_path / "fast/checkpoint/step-4", tmp_path / "fast.pt"), wanted)
    for step in ("step-2", "step-4"):
        assert fp.verify(tmp_path / "fast/checkpoint" / step).ok
    for name, other in (("fast", "stock"), ("stock", "fast")):  # each goes on from the other's step
        (tmp_path / name / "checkpoint/step-4").rename(tmp_path / f"{name}-step-4")
        assert steps_of(train(assets, tmp_path / name, 2, other)) == {3, 4}
        assert_same(state_of(tmp_path / name / "checkpoint/step-4", tmp_path / "again.pt"), wanted)


@pytest.mark.timeout(4 * PATIENCE_S)
def test_four_ranks_save_and_two_resume(assets: Path, tmp_path: Path) -> None:
    """The data loader's state does not survive another degree of data parallelism; that of tensor parallelism may."""
    train(assets, tmp_path, 4, "fast", "--parallelism.tensor_parallel_degree", "2")
    before = state_of(tmp_path / "checkpoint/step-4", tmp_path / "before.pt")
    said = train(assets, tmp_path, 2, "fast", "--training.steps", "6")
    assert steps_of(said) == {5, 6}
    after = state_of(tmp_path / "checkpoint/step-6", tmp_path / "after.pt")
    assert before.keys() == after.keys()
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


# --- the manager alone


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Run:
    """A training of one process, as the trainer makes it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(64, 64)
        self.optimizers = default_adamw().build(model_parts=[self.model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=1)
        self.manager = FastPersistCheckpointManager.Config(enable=True, interval=1, **options).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=schedulers.build(optimizers=self.optimizers, training_steps=10),
            states={},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def step(self) -> None:
        self.optimizers.zero_grad()
        self.model(torch.ones(2, 64)).sum().backward()
        self.manager.maybe_wait_for_staging()
        self.optimizers.step()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_what_is_saved_is_the_state_before_the_next_step(mode: str, tmp_path: Path) -> None:
    run = _Run(tmp_path, async_mode=mode)
    run.step()
    before = run.model.weight.detach().clone()
    assert run.manager.save(1)
    assert (tmp_path / "checkpoint/step-1").exists() or mode != "disabled"
    run.step()
    run.manager.close()
    assert torch.equal(state_of(tmp_path / "checkpoint/step-1", tmp_path / "one.pt")["/weight"], before)
    again = _Run(tmp_path)
    assert again.manager.load()
    assert torch.equal(again.model.weight, before)
    again.step()
    assert torch.equal(again.model.weight, run.model.weight)
    again.manager.close()


@pytest.mark.usefixtures("group")
def test_a_save_that_fails_is_the_error_of_the_next_one(tmp_path: Path) -> None:
    run = _Run(tmp_path, engine="fault:threads")
    run.step()
    with faults(count=2**32):
        run.manager.save(1)
        with pytest.raises(fp.StorageError, match="Input/output error"):
            run.manager.save(2)
    assert list((tmp_path / "checkpoint").iterdir()) == []
    assert run.manager.save(2)
    run.manager.close()
    assert fp.verify(tmp_path / "checkpoint/step-2").ok


@pytest.mark.usefixtures("group")
def test_a_save_that_fails_last_is_the_error_of_close(tmp_path: Path) -> None:
    run = _Run(tmp_path, engine="fault:threads")
    run.step()
    with faults(count=2**32):
        run.manager.save(1)
        with pytest.raises(fp.StorageError, match="Input/output error"):
            run.manager.close()
        run = _Run(tmp_path, engine="fault:threads")
        run.step()
        run.manager.save(1)
        with pytest.raises(KeyError, match="what ended the training"):
            try:
                raise KeyError("what ended the training")
            except KeyError:
                run.manager.close()
                raise


@pytest.mark.usefixtures("group")
def test_what_a_save_that_was_cut_off_has_left_is_no_step(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    run.step()
    run.manager.save(1)
    run.manager.close()
    left = tmp_path / "checkpoint/.step-7.pending-0123456789abcdef"
    left.mkdir()
    (left / ".metadata").write_bytes(b"x")
    again = _Run(tmp_path)
    assert again.manager.load()
    assert torch.equal(again.model.weight, run.model.weight)
    again.manager.close()


@pytest.mark.usefixtures("group")
def test_only_the_latest_steps_are_kept(tmp_path: Path) -> None:
    run = _Run(tmp_path, keep_latest_k=2)
    for step in range(1, 6):
        run.step()
        run.manager.save(step)
    run.manager.close()
    kept = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert kept <= {"step-3", "step-4", "step-5"}, kept
    assert {"step-4", "step-5"} <= kept


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match="abacus"):
        _Run(tmp_path, engine="abacus")


def test_a_manager_that_is_not_enabled_does_nothing(tmp_path: Path) -> None:
    manager = FastPersistCheckpointManager.Config(enable=False).build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not manager.save(1)
    assert not manager.load()
    manager.close()
