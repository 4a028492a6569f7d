"""Lightning's CheckpointIO, which saves and loads, and its Callback, which gates the optimizer's step.

`file_order` decides which files wait for which, `ddp` lets all ranks of DDP write, and `fsdp` saves the shards of FSDP
and ModelParallel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fastpersist import ConfigError, PendingSave, load, require_engine, save, save_async

from .._shared.requirements import require, require_writers
from .._shared.save_figures import SaveFigures
from .ddp import (
    SLURM_PREFIX,
    Share,
    SharedLoading,
    SharedSaving,
    gated_optimizers,
    on_all_ranks,
    refuse_bypassing,
)
from .file_order import FileOrder, Likeness, key_of, local_path, sync_path
from .fsdp import ShardedSaving
from .resume import last_checkpoint

__all__ = ["FastPersistCallback", "FastPersistCheckpointIO", "last_checkpoint"]

_log = logging.getLogger("fastpersist")


def _framework() -> tuple[str, str]:
    """Return the packages whose Trainer and Fabric classes we derive from."""
    both = ("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")
    first, second = both
    if second[0] in sys.modules and first[0] not in sys.modules:
        first = second
    elif sys.modules.get("lightning") is None and importlib.util.find_spec("lightning") is None:
        first = second if importlib.util.find_spec(second[0]) is not None else first
    require("lightning", first[0].partition(".")[0], "2.6")
    return first


if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch.callbacks import Callback
    from torch.distributed import ProcessGroup
else:
    _trainer_package, _fabric_package = _framework()
    Callback = importlib.import_module(f"{_trainer_package}.callbacks").Callback
    _plugins = importlib.import_module(f"{_fabric_package}.plugins")
    CheckpointIO, TorchCheckpointIO = _plugins.CheckpointIO, _plugins.TorchCheckpointIO

_PLUGIN_MODULES = ("lightning.fabric.plugins", "lightning_fabric.plugins")
_FORCING_VARIABLES = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")

_ADVICE = (
    "write Trainer(plugins=[FastPersistCheckpointIO()], callbacks=[FastPersistCallback(), ...]), both from "
    "fastpersist.integrations.lightning"
)


# ------------------------------------------------------------------------------------------- the step

_plugins_alive: weakref.WeakSet[FastPersistCheckpointIO] = weakref.WeakSet()
_watching_lock = threading.RLock()
_is_watching = False


def _watch_steps() -> None:
    """Register the hook before every optimizer step in this process. Idempotent."""
    global _is_watching
    with _watching_lock:
        if not _is_watching:
            register_optimizer_step_pre_hook(_before_step)
            _is_watching = True


@torch._disable_dynamo  # type: ignore[attr-defined]  # a compiled step runs it uncompiled
def _before_step(_optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Pass the gate, unless the step runs Lightning's closure: then its own hook comes after forward and backward."""
    closures = [*arguments[1:2], keywords.get("closure")]
    is_wrapped = any(getattr(getattr(one, "func", None), "__name__", "") == "_wrap_closure" for one in closures)
    for plugin in list(_plugins_alive):
        if not (is_wrapped and plugin.hears_of_steps()):
            plugin.wait_captured()


def _forget_pending() -> None:
    """In a forked child: the saves under way are the parent's."""
    for plugin in list(_plugins_alive):
        plugin.forget_pending()


os.register_at_fork(after_in_child=_forget_pending)


# ------------------------------------------------------------------------------------------- the plugin


@dataclass(frozen=True, eq=False)
class _Saved:
    """The last save."""

    key: str
    likeness: Likeness
    pending: PendingSave


class FastPersistCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of a Trainer or of Fabric, in the files of Lightning's own plugin.

    In a Trainer use it together with `FastPersistCallback`. In Fabric set `optimizer` after `fabric.setup`; saves are
    durable after `wait()`, and at a normal end of the program. Without either, a save copies everything before it
    returns, which is correct but slower. The first save after a step waits for all saves before that step.

    Args:
        optimizer: The optimizer whose tensors are written in place, if there is no callback; also an object with one as
            `.optimizer`, or a list. Its next step waits until the part not yet written is copied.
        on_error: "raise": the next save, a load of the path, `wait()`, or the end of `fit()` raises the error of a
            failed background save, whichever comes first, once. "warn": a RuntimeWarning instead.
        durable: Survive power loss once saved.
        engine: "auto", or an engine's name, which then never falls back.
        writers: In a Trainer with DDPStrategy and the callback, the ranks that write replicated state, parameters and
            optimizer: "auto", up to 8, but rank 0 alone with several machines; "all", "node" or a number, as in
            `fastpersist.save`, if all machines see the same files; 1: rank 0 alone, as without DDP.

    Attributes:
        optimizer, durable, engine, writers: The arguments; `optimizer` may be set later.
        order: The saves, links and removals that are not done.

    Raises:
        ConfigError: Unknown on_error, engine, or writers.
    """

    def __init__(
        self,
        *,
        optimizer: object = None,
        on_error: str = "raise",
        durable: bool = True,
        engine: str = "auto",
        writers: str | int = "auto",
    ) -> None:
        super().__init__()
        if on_error not in ("raise", "warn"):
            raise ConfigError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
        require_engine(engine)
        require_writers(writers)
        self.optimizer = optimizer
        self._on_error = on_error
        self.durable = durable
        self.engine = engine
        self.writers: Any = writers
        self._share: Share | None = None  # while all ranks save
        self.order = FileOrder(durable=durable)
        self._gated: Callable[[], list[Optimizer]] | None = None  # given by the callback while it gates the steps
        self.hears_of_steps: Callable[[], bool] = lambda: True  # whether Lightning's hook runs; set by the callback
        self._is_over = False
        self._is_together = False  # whether several ranks are in fit()
        self._has_stepped = False
        self._last: _Saved | None = None  # until the next step, or the next save that may not be linked to
        self._may_link = False
        self.figures = SaveFigures("checkpoint/")
        for name in _PLUGIN_MODULES:  # so that Trainers of both packages accept it; the program has imported its own
            if name in sys.modules:
                sys.modules[name].CheckpointIO.register(type(self))
        _plugins_alive.add(self)
        _watch_steps()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options only: saves under way and optimizers stay in this process."""
        options: dict[str, Any] = {"on_error": self._on_error, "durable": self.durable, "engine": self.engine}
        return functools.partial(type(self), writers=self.writers, **options), ()

    # --- what Lightning calls

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; return when training may go on.

        Args:
            checkpoint: Lightning's checkpoint dict.
            path: A file; its directory is made. Remote paths go to Lightning's own plugin.
            storage_options: Not supported, as in Lightning's own plugin.

        Raises:
            TypeError: storage_options were given.
            StorageError: With on_error="raise", an earlier save failed; or the file cannot be created.
        """
        if storage_options is not None:
            raise TypeError(
                "FastPersistCheckpointIO takes no storage_options; write your own CheckpointIO if you need them"
            )
        local = local_path(path)
        if local is None:
            TorchCheckpointIO().save_checkpoint(checkpoint, path)  # type: ignore[arg-type]
            return
        optimizer, gate = self.prepare()
        key = key_of(local)
        if os.path.basename(key).startswith(SLURM_PREFIX):
            self._save_for_slurm(checkpoint, key)
            return
        likeness = Likeness.of(checkpoint) if optimizer is not None and self._may_link else None
        if likeness is not None and self._has_just_saved(likeness, key):
            self.order.link(self._last.key, key)  # type: ignore[union-attr]
        else:
            self.order.make_room(key)
            begin = functools.partial(self._begin_save, checkpoint, key, optimizer, gate)
            pending = begin(None) if self._share is None else self._share(key, begin)
            self._last = None if likeness is None else _Saved(key, likeness, pending)
        if self._is_over:
            self.wait()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, ours or stock; wait for it first if it is still being written.

        Args:
            path: A file. Remote paths go to Lightning's own plugin.
            map_location: Where tensors go, as in torch.load; None: to host memory.
            weights_only: The option of Lightning; None: torch's default.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: With on_error="raise", its save failed; or the file cannot be read.
            FormatError: The file is damaged.
        """
        local = local_path(path)
        if local is None:
            return _stock_load(path, map_location, weights_only)
        self.wait_for(local)
        if any(name in os.environ for name in _FORCING_VARIABLES):
            return _stock_load(local, map_location, weights_only)
        loaded: dict[str, Any] = load(
            local,
            map_location="cpu" if map_location is None else map_location,
            weights_only=weights_only in (None, True),
            engine=self.engine,
        )
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once every earlier save is durable; keep it if one of them fails."""
        local = local_path(path)
        if local is None:
            TorchCheckpointIO().remove_checkpoint(path)  # type: ignore[arg-type]
        else:
            self.order.remove(key_of(local))

    def teardown(self) -> None:
        """Finish everything. Later saves are durable when they return, until the next `fit()`.

        Raises:
            StorageError: With on_error="raise", a save failed.
        """
        unwinding = sys.exc_info()[1] is not None and self._gated is None
        is_together = self._is_together
        self.end()
        if unwinding:
            self.forget_errors()
        elif is_together:
            on_all_ranks("the last checkpoints", self._deliver)  # the others return when rank 0's are durable, too
        else:
            self._deliver()

    # --- for users

    def wait(self) -> None:
        """Wait until all saves of this rank are durable. Where rank 0 saves alone, the other ranks have none.

        Raises:
            StorageError: With on_error="raise", a save failed.
        """
        self.order.join()
        self._deliver()

    def wait_for(self, path: str | os.PathLike[str]) -> None:
        """Wait until the saves to a path are durable.

        Raises:
            StorageError: With on_error="raise", a save failed.
        """
        for key in {key_of(os.fspath(path)), os.path.realpath(path)}:
            self.order.wait_for(key)
        self._deliver()

    def wait_captured(self) -> None:
        """Wait until all saved objects may be changed. In a Trainer the callback calls this before each step.

        Without the callback, optimizers wait by themselves, and this only marks the step.
        """
        self._has_stepped, self._last = True, None
        if self._gated is not None:
            for pending in self.order.under_way():
                pending.wait_captured()

    def pending(self) -> list[str]:
        """Return the paths that are being written."""
        return [pending.stats.path for pending in self.order.under_way()]

    # --- for the callback

    def begin(self, gated: Callable[[], list[Optimizer]], *, is_together: bool = False) -> None:
        """Gate the optimizers that `gated` returns by `wait_captured`, which the callback calls before each step.

        Args:
            gated: Returns the optimizers.
            is_together: Several ranks train together, so that all end when one ends, or raise its error.
        """
        self._gated, self._is_over, self._is_together = gated, False, is_together
        self._has_stepped, self._last = True, None

    @contextlib.contextmanager
    def linking(self, *, is_first: bool) -> Iterator[None]:
        """Turn a save in the block into a link to an earlier one of such a block, if both are equal.

        No other save may lie between the two. A change of weights through `.data` goes unnoticed, so only Lightning's
        own code may run between them.

        Args:
            is_first: Do not link to a save from before the block.
        """
        if is_first:
            self._last = None
        self._may_link = True
        try:
            yield
        finally:
            self._may_link = False

    def end(self) -> None:
        """Wait for all operations, without raising their errors; make later saves wait until they are durable."""
        self.order.join()
        self._gated, self._is_over, self._last, self._is_together = None, True, None, False

    def forget_pending(self) -> None:
        """Drop the saves under way: they belong to the parent process."""
        self.order, self._last = FileOrder(durable=self.durable), None
        self.figures = SaveFigures("checkpoint/")

    def forget_errors(self) -> None:
        """Drop the errors of saves while another exception propagates; the log has them."""
        while self.order.next_error() is not None:
            pass

    # --- for the other ranks, and for rank 0 when it saves with them

    def prepare(self) -> tuple[object, str]:
        """Wait and raise as needed before a save; return the optimizer that it gates, and the gate."""
        optimizer, gate = self.optimizer, "optimizer"
        if self._gated is not None:
            optimizer, gate = self._gated() or None, "manual"
        elif optimizer is None:  # then the plugin does not see steps
            self._has_stepped = True
        self.end_burst()
        self._deliver()
        return optimizer, gate

    def accept(self, key: str, pending: PendingSave) -> None:
        """Take the save of a directory that has begun on all ranks."""
        self._last = None
        self.figures.add(pending)
        self.order.add(key, pending)
        if self._is_over:
            self.wait()

    def gated_optimizers(self) -> list[Optimizer]:
        """Return the optimizers whose tensors are written in place; the callback names them."""
        return [] if self._gated is None else self._gated()

    @contextlib.contextmanager
    def shared(self, share: Share) -> Iterator[None]:
        """Begin saves of new files with `share`, which involves the other ranks, in the block."""
        self._share = share
        try:
            yield
        finally:
            self._share = None

    def save_part(self, checkpoint: dict[str, Any], key: str, process_group: ProcessGroup | None) -> PendingSave:
        """Begin a follower's part of a file that the coordinator saves."""
        return self._begin_save(checkpoint, key, self.gated_optimizers(), "manual", process_group)

    def end_burst(self) -> None:
        """Wait, after a step, for the saves before it."""
        if self._has_stepped:
            self.order.join()
            self._has_stepped = False

    def take_error(self) -> BaseException | None:
        """Return the next error that was not raised yet; None with on_error="warn"."""
        return self.order.next_error() if self._on_error == "raise" else None

    def warn_of_errors(self) -> None:
        """With on_error="warn", warn of failed saves."""
        if self._on_error == "warn":
            self._deliver()

    # --- inside

    def _begin_save(
        self, checkpoint: dict[str, Any], key: str, optimizer: object, gate: str, process_group: ProcessGroup | None
    ) -> PendingSave:
        pending = save_async(
            checkpoint,
            key,
            optimizer=optimizer,
            gate=gate,
            durable=self.durable,
            engine=self.engine,
            format="torch",
            replace_links=True,
            make_parents=True,
            process_group=process_group,
            writers=self.writers,
        )
        self.figures.add(pending)
        self.order.add(key, pending)
        return pending

    def _save_for_slurm(self, checkpoint: dict[str, Any], key: str) -> None:
        """Save before this returns, because Lightning then asks Slurm to requeue the job.

        The pending file has a name that Lightning does not count among its own for Slurm.
        """
        self.order.join()
        stand_in = os.path.join(os.path.dirname(key), ".slurm.ckpt")
        save(checkpoint, stand_in, durable=self.durable, engine=self.engine, format="torch", make_parents=True)
        os.replace(stand_in, key)
        if self.durable:
            sync_path(os.path.dirname(key))

    def _deliver(self) -> None:
        while (error := self.order.next_error()) is not None:
            if self._on_error == "raise":
                raise error
            # stacklevel=1: programs often ignore warnings from Lightning's modules, which call this.
            warnings.warn(f"a checkpoint could not be saved: {error}", RuntimeWarning, stacklevel=1)

    def _has_just_saved(self, likeness: Likeness, key: str) -> bool:
        """Return whether the last save had the same content and another name, and has not failed."""
        last = self._last
        if last is None or last.key == key or last.likeness != likeness or last.pending.stats.error is not None:
            return False
        expected = self.order.expects(last.key)
        return os.path.isfile(last.key) if expected is None else expected


def _stock_load(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    if map_location is None:
        return TorchCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)


# ------------------------------------------------------------------------------------------- the callback


class FastPersistCallback(Callback):
    """Gates optimizer steps for `FastPersistCheckpointIO`, and tells ModelCheckpoint which names are taken.

    It finds the plugin in the Trainer. Before each step of an optimizer it waits until the optimizer's tensors are
    written or copied; all other training overlaps with the writing. `trainer.save_checkpoint` outside of `fit()`
    returns when the file is durable. With DDPStrategy the ranks that the plugin's `writers` selects write each file of
    `fit()`. All ranks call `trainer.save_checkpoint`, as always in Lightning.

    With FSDPStrategy(state_dict_type="sharded") and ModelParallelStrategy, each rank writes its shards into Lightning's
    directory, which becomes visible when all ranks are done.

    A save copies everything before it returns where weights change outside of steps: with WeightAveraging,
    StochasticWeightAveraging, ModelPruning, FSDPStrategy, and optimizers that have their own train() and eval().

    Raises:
        ConfigError: In setup: the plugin is missing, is inside an AsyncCheckpointIO, or the strategy does not use it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._plugin: FastPersistCheckpointIO | None = None
        self._sharing: list[SharedSaving | SharedLoading | None] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plugin": None, "_sharing": []}  # each process finds its own

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the plugin; in `fit()` take over the gate."""
        refuse_bypassing(trainer.strategy)
        self._plugin = _find_plugin(trainer.strategy)
        ShardedSaving.stand_in(trainer.strategy, self._plugin)
        if stage == "fit":
            self._end_sharing()
            if type(self._plugin).save_checkpoint is FastPersistCheckpointIO.save_checkpoint:
                self._sharing.append(SharedSaving.of(trainer, self._plugin))
            self._sharing.append(SharedLoading.of(trainer, self._plugin))
            # While Lightning tunes the learning rate or batch size, the Trainer has other callbacks.
            self._plugin.hears_of_steps = lambda: self in trainer.callbacks
            self._plugin.begin(functools.partial(gated_optimizers, trainer), is_together=trainer.world_size > 1)
            for checkpoint in _model_checkpoints(trainer):
                checkpoint.file_exists = functools.partial(_file_exists, self._plugin.order, checkpoint)
                checkpoint._link_checkpoint = functools.partial(_link_checkpoint, self._plugin.order)
                checkpoint._save_topk_checkpoint = functools.partial(_save_topk, self._plugin, checkpoint)
                checkpoint._save_last_checkpoint = functools.partial(_save_last, self._plugin, checkpoint)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Wait until the parameters may change."""
        if self._plugin is not None:
            self._plugin.wait_captured()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the costs of the saves that have finished by now."""
        self._log_figures(trainer)

    def _log_figures(self, trainer: Any) -> None:
        """Tell the Trainer's loggers, at once: a metric of `self.log` reaches them every 50th step only."""

        def log(found: Mapping[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(dict(found), step=trainer.global_step)

        if self._plugin is not None and trainer.is_global_zero:
            self._plugin.figures.log_by(log)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for the saves under way; the exception propagates, and errors of saves are only logged."""
        self._end_sharing()
        if self._plugin is not None:
            self._plugin.end()
            self._plugin.forget_errors()
        _give_back(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore ModelCheckpoint's functions, and finish everything.

        The strategy has torn the plugin down already, unless another plugin wraps it: wrappers do not pass teardown on.
        """
        self._end_sharing()
        _give_back(trainer)
        if self._plugin is not None and stage == "fit":
            try:
                self._plugin.teardown()
            finally:
                self._log_figures(trainer)

    def _end_sharing(self) -> None:
        for one in self._sharing:
            if one is not None:
                one.take_away()
        self._sharing.clear()


def _find_plugin(strategy: Any) -> FastPersistCheckpointIO:
    plugin = strategy.checkpoint_io
    around = []
    while not isinstance(plugin, FastPersistCheckpointIO):
        around.append(type(plugin).__name__)
        inner = getattr(plugin, "checkpoint_io", None)
        if inner is None:
            raise ConfigError(f"FastPersistCallback finds no FastPersistCheckpointIO but {around[0]}: {_ADVICE}")
        plugin = inner
    if "AsyncCheckpointIO" in around:
        raise ConfigError("FastPersistCheckpointIO is asynchronous by itself: pass it without AsyncCheckpointIO")
    return plugin


def _model_checkpoints(trainer: Any) -> list[Any]:
    return [one for one in trainer.checkpoint_callbacks if hasattr(one, "file_exists") and hasattr(one, "_fs")]


_REPLACED_NAMES = ("file_exists", "_link_checkpoint", "_save_topk_checkpoint", "_save_last_checkpoint")


def _give_back(trainer: Any) -> None:
    for checkpoint in _model_checkpoints(trainer):
        for name in _REPLACED_NAMES:
            checkpoint.__dict__.pop(name, None)


def _file_exists(order: FileOrder, checkpoint: Any, filepath: Any, trainer: Any) -> bool:
    """Replace ModelCheckpoint's function: return whether a name is taken, by a file or by a pending operation."""
    local = local_path(filepath) if trainer.is_global_zero else None
    expected = trainer.strategy.broadcast(None if local is None else order.expects(key_of(local)))
    if expected is not None:
        return bool(expected)
    return bool(type(checkpoint).file_exists(checkpoint, filepath, trainer))


def _link_checkpoint(order: FileOrder, trainer: Any, filepath: str, linkpath: str) -> None:
    """Replace ModelCheckpoint's function: make the symbolic link once the file is durable."""
    if trainer.is_global_zero and key_of(filepath) != key_of(linkpath):
        order.link(key_of(filepath), key_of(linkpath), symbolic=True)
    trainer.strategy.barrier()


def _save_topk(plugin: FastPersistCheckpointIO, checkpoint: Any, *arguments: Any) -> None:
    """Call ModelCheckpoint's function, right after which it calls `_save_last`."""
    with plugin.linking(is_first=True):
        type(checkpoint)._save_topk_checkpoint(checkpoint, *arguments)


def _save_last(plugin: FastPersistCheckpointIO, checkpoint: Any, *arguments: Any) -> None:
    """Call ModelCheckpoint's function, with a link to what `_save_topk` has saved, if it is the same."""
    with plugin.linking(is_first=False):
        type(checkpoint)._save_last_checkpoint(checkpoint, *arguments)
