"""Checkpoints of DDP that all ranks write: how the ranks decide alike, on the training thread, whenever one is saved.

Lightning puts a checkpoint together on every rank, and then has rank 0's plugin save it. `SharedSaving` stands in for
that function of the strategy. Rank 0 does what it does without it, and if that is to write a new file, all others
write their part. Two small collectives of the process group, at a place where Lightning has a barrier anyway:

    first → others   a word   "together" and the file's name, "alone" when it is saved, or "failed" and why
    all → all        begun    after `fastpersist.save_async`: why it could not begin, on each rank

So an exception of one rank is an exception of all, and nobody waits for a rank that has given up. All that comes after
is between the writers, beside training. Which files wait for which stays the affair of rank 0's plugin.

What a strategy does with checkpoints and optimizers decides more than this: whether the plugin is asked at all, and
whose tensors are written from where they are. That is here, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from fastpersist import ConfigError, PeerError, PendingSave

from .._shared import agreement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "SLURM_PREFIX",
    "Share",
    "SharedSaving",
    "gated_optimizers",
    "moves_parameters",
    "on_all_ranks",
    "refuse_bypassing",
    "shards_checkpoints",
]

Result = TypeVar("Result")

Share: TypeAlias = Callable[[str, Callable[["ProcessGroup | None"], PendingSave]], PendingSave]
"""Begins a save with all ranks: given its file, and what begins it with a process group or with none."""

SLURM_PREFIX = "hpc_ckpt_"
"""How the names of files begin that Lightning saves before Slurm ends the job: in a signal handler."""

# Callbacks of Lightning that change parameters outside of steps, some of them in ways that torch does not count.
_CHANGING_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning")

_DDP_MODULES = ("lightning.pytorch.strategies.ddp", "pytorch_lightning.strategies.ddp")
_WORTH_SHARING_BYTES = 1 << 20  # fastpersist cuts no smaller tensor; without one, there is nothing to talk about


class Plugin(Protocol):
    """The plugin, as far as it is needed here."""

    @property
    def writers(self) -> str | int:
        """Which ranks write."""

    def gated_optimizers(self) -> list[Optimizer]:
        """Return whose tensors are written from where they are."""

    def shared(self, share: Share) -> contextlib.AbstractContextManager[None]:
        """In the block, a new file is begun by `share`."""

    def end_burst(self) -> None:
        """Wait for saves of before the last step."""

    def save_part(self, checkpoint: dict[str, Any], key: str, process_group: ProcessGroup | None) -> PendingSave:
        """Begin this rank's part of a file."""

    def take_error(self) -> BaseException | None:
        """Return what has failed and nobody was told of."""

    def warn_of_errors(self) -> None:
        """Warn of what has failed, if that is what is wanted."""


# ------------------------------------------------------------------------------------------- all ranks save


class SharedSaving:
    """In place of `save_checkpoint` of a strategy, on all ranks, until `take_away`.

    Args:
        trainer: Whose strategy is set up.
        plugin: The strategy's.
    """

    def __init__(self, trainer: Any, plugin: Plugin) -> None:
        strategy = trainer.strategy
        self._trainer = trainer
        self._strategy = strategy
        self._plugin = plugin
        self._alone = strategy.save_checkpoint
        self._is_wanted = True
        self._stand_in = self._save
        strategy.save_checkpoint = self._stand_in

    @classmethod
    def of(cls, trainer: Any, plugin: Plugin) -> SharedSaving | None:
        """Stand in, if all ranks hold the same parameters and can write one file; decides alike on all of them."""
        strategy = trainer.strategy
        kind = type(strategy)
        if kind.__name__ != "DDPStrategy" or kind.__module__ not in _DDP_MODULES:
            return None  # others put checkpoints together in ways of their own
        if strategy.checkpoint_io is not plugin or "save_checkpoint" in vars(strategy):
            return None  # somebody else is asked first, on rank 0 alone, and may change what is saved
        if plugin.writers == 1 or (plugin.writers == "auto" and trainer.num_nodes > 1):
            return None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return cls(trainer, plugin)

    def take_away(self) -> None:
        """Give the strategy its own function back; where somebody has replaced ours meanwhile, it only passes on."""
        self._is_wanted = False
        if vars(self._strategy).get("save_checkpoint") is self._stand_in:
            del self._strategy.save_checkpoint

    def _save(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        # Slurm's signal comes to each rank at another place, and an exception perhaps to one rank only: a save that is
        # asked for then is made without the others, who may be in collectives of their own.
        is_sudden = self._trainer.interrupted or os.path.basename(str(filepath)).startswith(SLURM_PREFIX)
        if is_sudden or not self._is_wanted:
            self._alone(checkpoint, filepath, storage_options=storage_options)
        elif dist.get_rank() == 0:
            self._save_first(checkpoint, filepath, storage_options)
        else:
            self._save_part(checkpoint, filepath)

    def _save_first(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None
    ) -> None:
        is_told = False

        def share(key: str, begin: Callable[[ProcessGroup | None], PendingSave]) -> PendingSave:
            nonlocal is_told
            if not _are_worth_sharing(self._plugin.gated_optimizers()):
                return begin(None)
            is_told = True
            _say(("together", key))
            return _begin_on_all(key, lambda: begin(dist.group.WORLD))

        try:
            with self._plugin.shared(share):
                self._alone(checkpoint, filepath, storage_options=storage_options)
        except BaseException as error:
            if not is_told:
                with contextlib.suppress(Exception):  # the group is broken: the others have noticed
                    _say(("failed", _described(error)))
            raise
        if not is_told:
            _say(("alone", ""))

    def _save_part(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str]) -> None:
        self._plugin.end_burst()  # rank 0 waits for it, too: let the writer know
        word, text = _say(None)
        if word == "failed":
            raise self._plugin.take_error() or PeerError(
                f"rank 0 failed while saving {filepath}: {text}", rank=0, subject=str(filepath)
            )
        if word == "together":
            _begin_on_all(text, lambda: self._plugin.save_part(checkpoint, text, dist.group.WORLD))
        self._plugin.warn_of_errors()


def _say(word: tuple[str, str] | None) -> tuple[str, str]:
    """Return what rank 0 says; collective."""
    said: list[Any] = [word]
    dist.broadcast_object_list(said, src=0)
    found: tuple[str, str] = said[0]
    return found


def _begin_on_all(key: str, begin: Callable[[], PendingSave]) -> PendingSave:
    """Begin a save on all ranks, or on none; collective.

    Raises:
        PeerError: It could not begin on another rank.
    """
    begun: list[PendingSave] = []
    try:
        on_all_ranks(key, lambda: begun.append(begin()))
    except PeerError:
        for pending in begun:
            pending.exception()  # it is told here, and not once more when the writer has heard of it
        raise
    return begun[0]


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def on_all_ranks(subject: str, work: Callable[[], Result]) -> list[Result]:
    """Do something on every rank, and return what came of it, by rank, when all are done; collective.

    Raises:
        PeerError: It failed on another rank. Where it failed, what it raised is raised.
    """

    def error_of(failure: agreement.PeerFailure) -> Exception:
        text = f"rank {failure.rank} failed while saving {subject}: {failure.text}"
        return PeerError(text, rank=failure.rank, subject=subject)

    return agreement.on_all_ranks(work, error_of)


def _are_worth_sharing(optimizers: Iterable[Optimizer]) -> bool:
    """Tell whether the ranks hold the same large tensors."""
    is_any_large = False
    for optimizer in optimizers:
        # One shards its state and gives it to rank 0 alone, the other averages parameters now and then only.
        if hasattr(optimizer, "consolidate_state_dict") or "PostLocalSGDOptimizer" in _names_of(type(optimizer)):
            return False
        for group in optimizer.param_groups:
            is_any_large = is_any_large or any(one.nbytes >= _WORTH_SHARING_BYTES for one in group["params"])
    return is_any_large


# ------------------------------------------------------------------------------------------- what a strategy allows


def shards_checkpoints(strategy: Any) -> bool:
    """Tell whether each rank saves its shards: into a directory, and without asking a CheckpointIO."""
    names = _names_of(type(strategy))
    if any("XLA" in name for name in names):
        return False
    if "FSDPStrategy" in names:
        return bool(getattr(strategy, "_state_dict_type", "") == "sharded")
    return "ModelParallelStrategy" in names and bool(getattr(strategy, "_save_distributed_checkpoint", True))


def moves_parameters(strategy: Any) -> bool:
    """Tell whether parameters are gathered and freed between a save and the step, whoever writes them: by FSDP1."""
    return "FSDPStrategy" in _names_of(type(strategy))


def refuse_bypassing(strategy: Any) -> None:
    """Raise for a strategy that writes checkpoints by itself, in ways of its own."""
    names = _names_of(type(strategy))
    if "DeepSpeedStrategy" in names or any("XLA" in name for name in names):
        raise ConfigError(
            f"{type(strategy).__name__} writes checkpoints by itself, not through FastPersistCheckpointIO. Use another "
            "strategy, or leave FastPersistCallback and FastPersistCheckpointIO out: stock saving works there"
        )


def gated_optimizers(trainer: Any) -> list[Optimizer]:
    """Return the optimizers whose tensors change in steps that are seen, and at no other time."""
    module = trainer.lightning_module
    if any(_names_of(type(one)).intersection(_CHANGING_CALLBACKS) for one in trainer.callbacks):
        return []
    if moves_parameters(trainer.strategy):
        return []
    # With manual optimization ModelCheckpoint saves weights of before the step, if the module keeps them, and puts
    # those of now back as soon as the save has returned.
    if not module.automatic_optimization and getattr(module, "saved_models", None):
        return []
    return [
        one
        for one in trainer.optimizers
        if not (callable(getattr(one, "train", None)) and callable(getattr(one, "eval", None)))
        and (module.automatic_optimization or getattr(type(one).step, "hooked", False))
    ]


def _names_of(kind: type) -> set[str]:
    """Return the names of a class and its bases, which both packages of Lightning share."""
    return {base.__name__ for base in kind.__mro__}
