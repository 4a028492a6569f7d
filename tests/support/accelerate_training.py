"""A training through Accelerate that is small and has all kinds of state: dropout, BatchNorm, schedule, custom object.

What the next step computes depends on all of it, the random state included, so a single bit that comes back wrong shows
in the losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file

import fastpersist as fp
from fastpersist.integrations.accelerate import load_state, save_state, wait

torch.set_num_threads(1)


class Counter:
    """A custom object, with a tensor that only it has."""

    def __init__(self) -> None:
        self.step = 0
        self.average = torch.zeros(300)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.average = state["step"], state["average"]


class StatefulLoader:
    """What save_state and load_state see of a prepared loader of torchdata."""

    use_stateful_dataloader = True
    dataset: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Training:
    """Everything that belongs to one training.

    Args:
        root: The project directory.
        automatic: Whether checkpoints are named automatically.
        total_limit: The most checkpoints that are kept, if they are named automatically.
        accumulation: Batches per step.
        pair_count: The number of models, each with an optimizer.
        scaler: Scale the gradients, as fp16 does.
        stateful_loader: Use a data loader that has a state.
        width: The width of the models.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        automatic: bool = False,
        total_limit: int | None = None,
        accumulation: int = 1,
        pair_count: int = 1,
        scaler: bool = False,
        stateful_loader: bool = False,
        width: int = 32,
    ) -> None:
        configuration = ProjectConfiguration(
            project_dir=None if root is None else str(root),
            automatic_checkpoint_naming=automatic,
            total_limit=total_limit,
        )
        self.accelerator = Accelerator(
            cpu=True,
            project_config=configuration,
            gradient_accumulation_steps=accumulation,
            step_scheduler_with_optimizer=False,
        )
        if scaler:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        if stateful_loader:
            self.accelerator._dataloaders.append(StatefulLoader())
        torch.manual_seed(11)
        self.counter = Counter()
        self.models, self.optimizers, self.schedulers = [], [], []
        for _ in range(pair_count):
            model = torch.nn.Sequential(
                torch.nn.Linear(width, width),
                torch.nn.BatchNorm1d(width),
                torch.nn.Dropout(0.3),
                torch.nn.Linear(width, 1),
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
            model, optimizer, scheduler = self.accelerator.prepare(model, optimizer, scheduler)
            self.models.append(model)
            self.optimizers.append(optimizer)
            self.schedulers.append(scheduler)
        self.accelerator.register_for_checkpointing(self.counter)
        self.width = width

    def train(self, batch_count: int = 1) -> list[float]:
        """Train with so many batches; return the losses."""
        losses = []
        for _ in range(batch_count):
            for model, optimizer, scheduler in zip(self.models, self.optimizers, self.schedulers, strict=True):
                with self.accelerator.accumulate(model):
                    rows = torch.randn(8, self.width)
                    loss = (model(rows) - rows.mean(1, keepdim=True)).pow(2).mean()
                    self.accelerator.backward(loss)
                    optimizer.step()
                    if self.accelerator.sync_gradients:
                        scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
            self.counter.step += 1
            for loader in self.accelerator._dataloaders:
                loader.position += 1
            self.counter.average.mul_(0.9).add_(0.1 * losses[-1])
        return losses

    @property
    def iteration(self) -> int:
        """The number of the next automatic name."""
        return int(self.accelerator.project_configuration.iteration)

    @iteration.setter
    def iteration(self, number: int) -> None:
        self.accelerator.project_configuration.iteration = number


def start_anew() -> None:
    """Forget the state that all Accelerators of a process share, as a new process would."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def contents(directory: Path) -> dict[str, Any]:
    """Load every file of a checkpoint with stock tools, by name; MANIFEST.json left out."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_dir() or path.name == "MANIFEST.json":
            continue
        name = str(path.relative_to(directory))
        if path.suffix == ".safetensors":
            found[name] = dict(sorted(load_file(path).items()))  # their order in the file is its writer's
        elif path.suffix in (".bin", ".pkl", ".pt"):
            found[name] = torch.load(path, weights_only=False)
        else:
            found[name] = path.read_bytes()
    return found


@contextmanager
def ended(training: Training) -> Iterator[Training]:
    """Wait for what is being saved, and end the training's process group, if it has one."""
    try:
        yield training
        wait(training.accelerator)
    finally:
        training.accelerator.end_training()


def train_as_one_of_two(root: Path) -> None:
    """Save with ours and stock, load, fail on one process and on another; for `run_ranks`."""
    start_anew()
    with ended(Training(root, automatic=True, total_limit=2)) as training:
        accelerator = training.accelerator
        assert accelerator.num_processes == 2
        for number in range(3):
            training.train()
            pending = save_state(accelerator)
            assert (pending is None) != accelerator.is_main_process, number
        wait(accelerator)
        accelerator.wait_for_everyone()
        names = ["checkpoint_1", "checkpoint_2"]
        assert sorted(path.name for path in (root / "checkpoints").iterdir()) == names
        assert training.iteration == 3

        accelerator.project_configuration.automatic_checkpoint_naming = False
        save_state(accelerator, root / "ours")
        accelerator.save_state(str(root / "stock"))
        expected = training.train(3)
        assert load_state(accelerator, root / "ours") == root / "ours"
        assert training.train(3) == expected
        accelerator.load_state(str(root / "ours"))
        assert training.train(3) == expected
        load_state(accelerator, root / "stock")
        assert training.train(3) == expected

        for broken in (0, 1):

            def fail(*_: object, broken: int = broken) -> None:
                if accelerator.process_index == broken:
                    raise KeyError("a hook of one process")

            iteration = training.iteration
            registered = accelerator.register_save_state_pre_hook(fail)
            with pytest.raises((KeyError, fp.FastPersistError), match="a hook of one process"):
                save_state(accelerator, root / "broken")
            registered.remove()
            assert training.iteration == iteration, "the same on all processes, those that came through included"
            accelerator.wait_for_everyone()
            assert sorted(path.name for path in root.iterdir()) == ["checkpoints", "ours", "stock"]

        accelerator.project_configuration.automatic_checkpoint_naming = True
        told: Any = nullcontext()
        if accelerator.is_main_process:
            (root / "checkpoints" / "checkpoint_2" / "random_states_1.pkl").write_bytes(b"")
            told = pytest.warns(RuntimeWarning, match="checkpoint_2 cannot be loaded, going back")
        accelerator.wait_for_everyone()
        with told:
            assert load_state(accelerator) == root / "checkpoints" / "checkpoint_1"
