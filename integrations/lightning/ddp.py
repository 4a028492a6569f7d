"""Lets all ranks of DDP write a checkpoint: the ranks agree on the training thread at each save.

Lightning assembles a checkpoint on every rank, and rank 0's plugin saves it. `SharedSaving` replaces the strategy's
function for that. The coordinator (rank 0) acts as before; if it writes a new file, each follower writes a part. This
takes three small collectives, at a point where Lightning has a barrier anyway:

    coordinator → followers   word    "together" and the file's name, "alone" once it is saved, or "failed" and why
    all → all                 layout  where large replicated tensors are in the checkpoint: hooks may have changed that
    all → all                 begun   after `fastpersist.save_async`: why it could not begin, on each rank

If layouts differ, the coordinator writes alone.

So an exception of one rank is raised on all, and no rank waits for one that has raised. From there on only the writers
communicate, in the background. The coordinator's plugin still decides which files wait for which.

Where the coordinator writes alone, followers know nothing of its saves. `SharedLoading` lets them wait before a load.

This module also judges strategies: whether one uses the plugin at all, and which optimizers' tensors are written in
place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from fastpersist import ConfigError, PeerError, PendingSave

from .._shared import agreement
from .file_order import local_path

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "SLURM_PREFIX",
    "Share",
    "SharedLoading",
    "SharedSaving",
    "gated_optimizers",
    "moves_parameters",
    "on_all_ranks",
    "refuse_bypassing",
    "shards_checkpoints",
]

Result = TypeVar("Result")
Begun = TypeVar("Begun", bound=PendingSave | None)

Share: TypeAlias = Callable[[str, Callable[["ProcessGroup | None"], PendingSave]], PendingSave]
"""Begins a save on all ranks; takes its file, and the function that begins it with a process group or None."""

SLURM_PREFIX = "hpc_ckpt_"
"""Prefix of the files that Lightning saves in a signal handler, before Slurm ends the job."""

# Lightning callbacks that change parameters outside of steps, some without counting up torch's tensor versions.
_CHANGING_CALLBACKS = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning")

_DDP_MODULES = ("lightning.pytorch.strategies.ddp", "pytorch_lightning.strategies.ddp")
_WORTH_SHARING_BYTES = 1 << 20  # fastpersist splits no smaller tensor, so ranks agree only if there is a larger one
_PLAIN = frozenset((int, float, bool, str, bytes, type(None)))


class Plugin(Protocol):
    """The part of the plugin that this module uses."""

    @property
    def writers(self) -> str | int:
        """The ranks that write."""

    def gated_optimizers(self) -> list[Optimizer]:
        """Return the optimizers whose tensors are written in place."""

    def shared(self, share: Share) -> contextlib.AbstractContextManager[None]:
        """Begin new files with `share`, in the block."""

    def end_burst(self) -> None:
        """Wait for the saves before the last step."""

    def save_part(self, checkpoint: dict[str, Any], key: str, process_group: ProcessGroup | None) -> PendingSave:
        """Begin this rank's part of a file."""

    def wait_for(self, path: str | os.PathLike[str]) -> None:
        """Wait until the saves to a path are durable."""

    def take_error(self) -> BaseException | None:
        """Return the next error that was not raised yet."""

    def warn_of_errors(self) -> None:
        """With on_error="warn", warn of failed saves."""


# ------------------------------------------------------------------------------------------- all ranks save


class SharedSaving:
    """Replaces `save_checkpoint` of a strategy, on all ranks, until `take_away`.

    Args:
        trainer: The Trainer; its strategy is set up.
        plugin: The strategy's plugin.
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
        """Replace the function if all ranks hold the same parameters and can write one file; else return None.

        All ranks decide the same.
        """
        strategy = trainer.strategy
        kind = type(strategy)
        if kind.__name__ != "DDPStrategy" or kind.__module__ not in _DDP_MODULES:
            return None  # other strategies assemble checkpoints differently
        if strategy.checkpoint_io is not plugin or "save_checkpoint" in vars(strategy):
            return None  # other code runs first, on rank 0 alone, and may change the checkpoint
        if plugin.writers == 1 or (plugin.writers == "auto" and trainer.num_nodes > 1):
            return None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return cls(trainer, plugin)

    def take_away(self) -> None:
        """Restore the strategy's function; if other code has replaced ours, ours only passes on from now on."""
        self._is_wanted = False
        if vars(self._strategy).get("save_checkpoint") is self._stand_in:
            del self._strategy.save_checkpoint

    def _save(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        # Slurm's signal reaches each rank at another point, and an exception may reach one rank only. A save at such a
        # time runs without the other ranks, which may be in other collectives.
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
            group = dist.group.WORLD if self._have_one_layout(checkpoint, key) else None
            return _begin_on_all(key, lambda: begin(group))[0]

        try:
            with self._plugin.shared(share):
                self._alone(checkpoint, filepath, storage_options=storage_options)
        except BaseException as error:
            if not is_told:
                with contextlib.suppress(Exception):  # the process group is broken: the followers have noticed
                    _say(("failed", _described(error)))
            raise
        if not is_told:
            _say(("alone", ""))

    def _save_part(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str]) -> None:
        self._plugin.end_burst()  # the coordinator waits too: tell this rank's writer to hurry
        word, text = _say(None)
        if word == "failed":
            raise self._plugin.take_error() or PeerError(
                f"rank 0 failed while saving {filepath}: {text}", rank=0, subject=str(filepath)
            )
        if word == "together":
            is_wanted = self._have_one_layout(checkpoint, text)
            _begin_on_all(
                text, lambda: self._plugin.save_part(checkpoint, text, dist.group.WORLD) if is_wanted else None
            )
        self._plugin.warn_of_errors()

    def _have_one_layout(self, checkpoint: dict[str, Any], key: str) -> bool:
        """Return whether all ranks have the same large tensors at the same places of the checkpoint; collective.

        A hook may change the checkpoint on one rank only, such as rank 0, which is the one that Lightning saves.
        """
        layouts = on_all_ranks(key, lambda: _layout_of(checkpoint, self._plugin.gated_optimizers()))
        return len(set(layouts)) == 1


# ------------------------------------------------------------------------------------------- all ranks load


class SharedLoading:
    """Replaces `load_checkpoint` of a strategy, on all ranks, until `take_away`: it waits for the saves of all ranks.

    Args:
        trainer: The Trainer; all of its ranks load together.
        plugin: The strategy's plugin, or one that is wrapped in it.
    """

    def __init__(self, trainer: Any, plugin: Plugin) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._plugin = plugin
        self._stock = self._strategy.load_checkpoint
        self._is_wanted = True
        self._stand_in = self._load
        self._strategy.load_checkpoint = self._stand_in

    @classmethod
    def of(cls, trainer: Any, plugin: Plugin) -> SharedLoading | None:
        """Replace the function if there are several ranks, and it is the strategy's own; else return None."""
        is_alone = trainer.world_size == 1 or not agreement.are_several()
        return None if is_alone or "load_checkpoint" in vars(trainer.strategy) else cls(trainer, plugin)

    def take_away(self) -> None:
        """Restore the strategy's function; if other code has replaced ours, ours only passes on from now on."""
        self._is_wanted = False
        if vars(self._strategy).get("load_checkpoint") is self._stand_in:
            del self._strategy.load_checkpoint

    def _load(self, checkpoint_path: Any, *arguments: Any, **options: Any) -> Any:
        path = local_path(checkpoint_path)
        if self._is_wanted and path is not None and not self._trainer.interrupted:
            on_all_ranks(path, lambda: self._plugin.wait_for(path))
        return self._stock(checkpoint_path, *arguments, **options)


# ------------------------------------------------------------------------------------------- collectives


def _say(word: tuple[str, str] | None) -> tuple[str, str]:
    """Broadcast the coordinator's word and return it; collective."""
    said: list[Any] = [word]
    dist.broadcast_object_list(said, src=0)
    found: tuple[str, str] = said[0]
    return found


def _begin_on_all(key: str, begin: Callable[[], Begun]) -> list[Begun]:
    """Begin a save on all ranks, or on none; collective. Return this rank's, as the only item.

    Raises:
        PeerError: The save could not begin on another rank.
    """
    begun: list[Begun] = []
    try:
        on_all_ranks(key, lambda: begun.append(begin()))
    except PeerError:
        for pending in begun:
            if pending is not None:
                pending.exception()  # count the error as delivered: it is raised here, not once more by the writer
        raise
    return begun


def _layout_of(checkpoint: dict[str, Any], optimizers: Iterable[Optimizer]) -> str:
    """Return a digest of where in a checkpoint which large tensors of optimizers are."""
    numbers: dict[int, int] = {}  # by address
    for optimizer in optimizers:
        for _, storage in _large_storages([optimizer.param_groups, optimizer.state], "", set()):
            numbers.setdefault(storage.data_ptr(), len(numbers))
    digest = hashlib.sha256()
    for place, storage in _large_storages(checkpoint, "", set()):
        number = numbers.get(storage.data_ptr())
        if number is not None:
            digest.update(f"{place} {number} {storage.nbytes()}\n".encode())
    return digest.hexdigest()


def _large_storages(
    value: dict[Any, Any] | list[Any] | tuple[Any, ...], place: str, seen: set[int]
) -> list[tuple[str, torch.UntypedStorage]]:
    """Return the storages worth sharing of tensors in nested collections, with the tensors' places, in their order."""
    found: list[tuple[str, torch.UntypedStorage]] = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        kind = type(item)
        if kind in _PLAIN:  # first: a list may have millions of numbers
            continue
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if item.layout is torch.strided:  # others have no one storage
                storage = item.untyped_storage()
                if storage.nbytes() >= _WORTH_SHARING_BYTES:
                    found.append((f"{place}/{key}" if isinstance(key, str | int) else place, storage))
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            found += _large_storages(item, f"{place}/{key}" if isinstance(key, str | int) else place, seen)
    return found


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def on_all_ranks(subject: str, work: Callable[[], Result]) -> list[Result]:
    """Run a function on every rank, and return all results by rank; collective.

    Raises:
        PeerError: The function failed on another rank.
        Exception: The exception of `work` on this rank.
    """

    def error_of(failure: agreement.PeerFailure) -> Exception:
        text = f"rank {failure.rank} failed while saving {subject}: {failure.text}"
        return PeerError(text, rank=failure.rank, subject=subject)

    return agreement.on_all_ranks(work, error_of)


def _are_worth_sharing(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether the ranks hold the same large tensors."""
    is_any_large = False
    for optimizer in optimizers:
        # ZeroRedundancyOptimizer gathers its sharded state on rank 0 only; PostLocalSGD averages parameters rarely.
        if hasattr(optimizer, "consolidate_state_dict") or "PostLocalSGDOptimizer" in _names_of(type(optimizer)):
            return False
        for group in optimizer.param_groups:
            is_any_large = is_any_large or any(one.nbytes >= _WORTH_SHARING_BYTES for one in group["params"])
    return is_any_large


# ------------------------------------------------------------------------------------------- what a strategy allows


def shards_checkpoints(strategy: Any) -> bool:
    """Return whether each rank saves its shards, into a directory and without a CheckpointIO."""
    names = _names_of(type(strategy))
    if any("XLA" in name for name in names):
        return False
    if "FSDPStrategy" in names:
        return bool(getattr(strategy, "_state_dict_type", "") == "sharded")
    return "ModelParallelStrategy" in names and bool(getattr(strategy, "_save_distributed_checkpoint", True))


def moves_parameters(strategy: Any) -> bool:
    """Return whether parameters are gathered and freed between a save and the step, as FSDP1 does."""
    return "FSDPStrategy" in _names_of(type(strategy))


def refuse_bypassing(strategy: Any) -> None:
    """Raise for a strategy that saves by itself."""
    names = _names_of(type(strategy))
    if "DeepSpeedStrategy" in names or any("XLA" in name for name in names):
        raise ConfigError(
            f"{type(strategy).__name__} writes checkpoints by itself, not through FastPersistCheckpointIO. Use another "
            "strategy, or leave FastPersistCallback and FastPersistCheckpointIO out: stock saving works there"
        )


def gated_optimizers(trainer: Any) -> list[Optimizer]:
    """Return the optimizers whose tensors change only in steps that our hook sees."""
    module = trainer.lightning_module
    if any(_names_of(type(one)).intersection(_CHANGING_CALLBACKS) for one in trainer.callbacks):
        return []
    if moves_parameters(trainer.strategy):
        return []
    # With manual optimization ModelCheckpoint saves the weights before the step, if the module keeps them, and restores
    # the current ones as soon as the save has returned.
    if not module.automatic_optimization and getattr(module, "saved_models", None):
        return []
    return [
        one
        for one in trainer.optimizers
        if not (callable(getattr(one, "train", None)) and callable(getattr(one, "eval", None)))
        and (module.automatic_optimization or getattr(type(one).step, "hooked", False))
    ]


def _names_of(kind: type) -> set[str]:
    """Return the names of a class and its bases; both packages of Lightning have the same names."""
    return {base.__name__ for base in kind.__mro__}
