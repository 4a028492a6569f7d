"""What fastpersist.integrations.deepspeed sees of DeepSpeed, for where it is not installed, and for faults.

    from support.deepspeed_stand_in import StandInEngine, deepspeed_integration

    attach = deepspeed_integration().attach
    engine = StandInEngine(stage=1)
    saving = attach(engine)

`deepspeed_integration` imports ours, upon a stand-in of DeepSpeed's abstract class if there is no DeepSpeed. The engine
is a stand-in in any case: it calls its checkpoint engine where DeepSpeed 0.19.8 does, it trains with partitions of the
optimizer as ZeRO does, and its files have DeepSpeed's names. tests/integrations/deepspeed/test_training.py has the same
questions for DeepSpeed itself.
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.set_num_threads(1)


class StandInCheckpointEngine(abc.ABC):
    """DeepSpeed's abstract class, as far as its subclasses have to know it."""

    def __init__(self, config_params: Any = None) -> None:
        self.name = None

    @abc.abstractmethod
    def create(self, info: Any) -> None: ...

    @abc.abstractmethod
    def save(self, state_dict: Any, path: str) -> None: ...

    @abc.abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any: ...

    @abc.abstractmethod
    def commit(self, info: Any) -> Any: ...


def deepspeed_integration() -> Any:
    """Import fastpersist.integrations.deepspeed, whether there is a DeepSpeed or not."""
    name = "fastpersist.integrations.deepspeed"
    if name in sys.modules or importlib.util.find_spec("deepspeed") is not None:
        return importlib.import_module(name)
    package = "deepspeed.runtime.checkpoint_engine.checkpoint_engine"
    parts = package.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    for one in names:
        sys.modules[one] = types.ModuleType(one)
    sys.modules[package].CheckpointEngine = StandInCheckpointEngine  # type: ignore[attr-defined]
    try:
        return importlib.import_module(name)
    finally:
        for one in names:  # others look whether there is a DeepSpeed
            del sys.modules[one]


@dataclass
class CommitInfo:
    """What DeepSpeed tells of the checkpoint that is begun."""

    tag: str
    save_dir: str
    save_latest: bool


class StockCheckpointEngine(StandInCheckpointEngine):
    """The one that an engine has to begin with: torch.save and torch.load."""

    def create(self, info: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        return False

    def get_commit_info(self) -> Any:
        return None


class _Partitioned:
    """An optimizer of ZeRO: a rank has the masters and moments of its part of all parameters in a row."""

    dp_process_group = None

    def __init__(self, parameters: list[torch.nn.Parameter], rank: int, count: int, lr: float) -> None:
        self._parameters = parameters
        total = sum(one.numel() for one in parameters)
        self._length = -(-total // count)
        self._padding = self._length * count - total
        self._count = count
        start = rank * self._length
        self._masters = [torch.nn.Parameter(self._flat()[start : start + self._length].clone())]
        self.optimizer = torch.optim.AdamW(self._masters, lr=lr)

    def _flat(self) -> torch.Tensor:
        flat = [one.detach().flatten() for one in self._parameters]
        return torch.cat([*flat, torch.zeros(self._padding)])

    def step(self) -> None:
        gradients = torch.cat([one.grad.flatten() for one in self._parameters] + [torch.zeros(self._padding)])
        start = (dist.get_rank() if self._count > 1 else 0) * self._length
        self._masters[0].grad = gradients[start : start + self._length].clone()
        self.optimizer.step()
        self.spread()

    def spread(self) -> None:
        """Put what the masters of all ranks are into the parameters."""
        parts = [torch.empty(self._length) for _ in range(self._count)]
        if self._count > 1:
            dist.all_gather(parts, self._masters[0].detach())
        else:
            parts = [self._masters[0].detach()]
        whole, position = torch.cat(parts), 0
        for one in self._parameters:
            one.data.copy_(whole[position : position + one.numel()].view_as(one))  # which moves no counter
            position += one.numel()

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self._masters, "base_optimizer_state": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._masters[0].data.copy_(state["masters"][0].data)
        self.optimizer.load_state_dict(state["base_optimizer_state"])
        self.spread()


class DeepSpeedZeroOptimizer(_Partitioned):
    """Stages 1 and 2."""

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.nn.Parameter]:
        return self._masters


class DeepSpeedZeroOptimizer_Stage3(_Partitioned):
    """Stage 3."""

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.nn.Parameter]:
        return self._masters


class ForestallingZeroOptimizer(DeepSpeedZeroOptimizer):
    """One that changes masters before its inner optimizer steps, as with Muon."""

    def step(self) -> None:
        with torch.no_grad():
            self._masters[0].data.mul_(0.5)
        super().step()


class StrangeZeroOptimizer(_Partitioned):
    """One that nobody knows."""


# They are told by the package they come from, and by their names.
for _kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, ForestallingZeroOptimizer, StrangeZeroOptimizer):
    _kind.__module__ = "deepspeed.stand_in"
ForestallingZeroOptimizer.__name__ = "DeepSpeedZeroOptimizer"

_KINDS: dict[int, type[_Partitioned]] = {
    1: DeepSpeedZeroOptimizer,
    2: DeepSpeedZeroOptimizer,
    3: DeepSpeedZeroOptimizer_Stage3,
}


class StandInEngine:
    """An engine that trains a small model of 64 by `width` weights with real steps.

    Args:
        stage: The stage of ZeRO.
        width: The width of the model; from 4096 on, its weights are so large that several ranks share the writing.
        kind: The optimizer, if not what belongs to the stage.
    """

    has_moe_layers = False
    mp_world_size = 1
    seq_data_parallel_group = None

    def __init__(self, stage: int = 0, *, width: int = 64, kind: type[_Partitioned] | None = None) -> None:
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.seq_dp_world_size = self.count
        self.stage = stage
        torch.manual_seed(3)
        self.module = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Tanh(), torch.nn.Linear(width, 8))
        self.module.register_buffer("seen", torch.zeros(500))  # each forward pass changes it
        parameters = list(self.module.parameters())
        kind = kind or _KINDS.get(stage)
        self.optimizer: Any = (
            torch.optim.AdamW(parameters, lr=1e-2) if kind is None else kind(parameters, self.rank, self.count, lr=1e-2)
        )
        self.global_steps = 0
        self.checkpoint_engine: Any = StockCheckpointEngine()
        self.save_non_zero_checkpoint = stage == 3 or self.rank == 0
        self.has_nvme = self.is_node_local = False

    # --- what is asked

    def zero_optimization_partition_weights(self) -> bool:
        return self.stage == 3

    def is_first_weights_partition_group(self) -> bool:
        return self.stage == 3

    def zero_nvme_offload_optimizer(self) -> bool:
        return self.has_nvme

    def use_node_local_storage(self) -> bool:
        return self.is_node_local

    # --- training

    def train(self, step_count: int = 1) -> list[float]:
        """Take some steps; return the losses, which depend on all that was trained before."""
        return [self._train_one() for _ in range(step_count)]

    def _train_one(self) -> float:
        generator = torch.Generator().manual_seed(self.global_steps)
        rows = torch.randn(16, 64, generator=generator)
        self.module.seen.add_(1)
        loss = (self.module(rows) - rows[:, :8]).pow(2).mean()
        for one in self.module.parameters():
            one.grad = None
        loss.backward()
        self.step()
        return loss.item()

    def step(self) -> None:
        if self.checkpoint_engine.is_decoupled():
            info = self.checkpoint_engine.get_commit_info()
            if info is not None:
                self.checkpoint_engine.commit(info)
                self._name_latest(info)
        self.optimizer.step()
        self.global_steps += 1

    # --- checkpoints

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] = {},  # noqa: B006 - as DeepSpeed has it
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        if not save_dir:
            raise ValueError("no save_dir")
        if self.rank == 0:
            self.checkpoint_engine.makedirs(save_dir, exist_ok=True)
        self._meet()
        info = CommitInfo(str(tag or f"global_step{self.global_steps}"), save_dir, save_latest)
        self.checkpoint_engine.create(info)
        directory = os.path.join(save_dir, info.tag)
        self.checkpoint_engine.makedirs(directory, exist_ok=True)
        state = {"module": self.module_state(), "global_steps": self.global_steps, **client_state}
        state["optimizer"] = self.optimizer.state_dict() if self.stage == 0 else None
        if self.save_non_zero_checkpoint:
            self.checkpoint_engine.save(state_dict=state, path=os.path.join(directory, self.model_name()))
        if self.stage:
            part = {"optimizer_state_dict": self.optimizer.state_dict()}
            self.checkpoint_engine.save(part, os.path.join(directory, self.partition_name()))
        if not self.checkpoint_engine.is_decoupled():
            self.checkpoint_engine.commit(info)
            self._name_latest(info)
        self._meet()
        return True

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
        if tag is None:
            tag = Path(load_dir, "latest").read_text().strip()
        directory = os.path.join(load_dir, tag)
        path = os.path.join(directory, self.model_name())
        state = self.checkpoint_engine.load(path, map_location=lambda storage, location: storage)
        if self.stage:
            part = self.checkpoint_engine.load(os.path.join(directory, self.partition_name()), map_location="cpu")
            self.optimizer.load_state_dict(part["optimizer_state_dict"])
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        if self.stage == 3:
            self.module.seen.copy_(state["module"]["seen"])
        else:
            self.module.load_state_dict(state["module"])
        self.global_steps = state["global_steps"]
        return path, state

    def save_16bit_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        info = CommitInfo(f"global_step{self.global_steps}", save_dir, False)
        self.checkpoint_engine.create(info)
        if self.rank == 0:
            self.checkpoint_engine.makedirs(save_dir, exist_ok=True)
            self.checkpoint_engine.save(self.module.state_dict(), os.path.join(save_dir, save_filename))
        self.checkpoint_engine.commit(info)
        return True

    def destroy(self) -> None:
        if self.checkpoint_engine.is_decoupled():
            self.checkpoint_engine.cleanup()

    def module_state(self) -> dict[str, Any]:
        state = self.module.state_dict()
        if self.stage == 3:  # parameters are elsewhere
            return {name: one if name == "seen" else torch.empty(0) for name, one in state.items()}
        return state

    def model_name(self) -> str:
        return (
            f"zero_pp_rank_{self.rank}_mp_rank_00_model_states.pt" if self.stage == 3 else "mp_rank_00_model_states.pt"
        )

    def partition_name(self) -> str:
        return f"zero_pp_rank_{self.rank}_mp_rank_00_optim_states.pt"

    def _name_latest(self, info: CommitInfo) -> None:
        if info.save_latest and self.rank == 0:
            Path(info.save_dir, "latest").write_text(info.tag)

    def _meet(self) -> None:
        if self.count > 1:
            dist.barrier()


def files_of(directory: Path) -> dict[str, Any]:
    """Load every file of a tag with stock torch, by name; ours are left out."""
    names = sorted(path.name for path in directory.iterdir() if path.suffix == ".pt")
    return {
        name: torch.load(directory / name, weights_only=False) for name in names if not name.startswith("fastpersist")
    }


def names_in(directory: Path) -> list[str]:
    """List a directory."""
    return sorted(path.name for path in directory.iterdir())


def latest_in(directory: Path) -> str | None:
    """Return which tag a directory names, None if it names none."""
    path = directory / "latest"
    return path.read_text() if path.exists() else None
