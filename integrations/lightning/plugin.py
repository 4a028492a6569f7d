"""Lightning's CheckpointIO and Callback: what saves and loads, and what says when the optimizer is about to step.

Which files wait for which is left to `file_order`, what all ranks of DDP write to `ddp`, and what FSDP and
ModelParallel save in shards to `fsdp`.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fastpersist import ConfigError, PendingSave, load, require_engine, save, save_async

from .._shared.requirements import require, require_writers
from .ddp import SLURM_PREFIX, Share, SharedSaving, gated_optimizers, refuse_bypassing
from .file_order import FileOrder, Likeness, key_of, local_path, sync_path
from .fsdp import ShardedSaving
from .resume import last_checkpoint

__all__ = ["FastPersistCallback", "FastPersistCheckpointIO", "last_checkpoint"]

_log = logging.getLogger("fastpersist")


def _framework() -> tuple[str, str]:
    """Return the packages to take the Trainer's and Fabric's classes from."""
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
    """From now on every optimizer's step in this process is seen here. May be called again."""
    global _is_watching
    with _watching_lock:
        if not _is_watching:
            register_optimizer_step_pre_hook(_before_step)
            _is_watching = True


@torch._disable_dynamo  # type: ignore[attr-defined]  # a compiled step runs it as it is
def _before_step(_optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A step begins. Where Lightning has put forward and backward into it, its hook will say when they are over."""
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
    """What was saved last, and where."""

    key: str
    likeness: Likeness
    pending: PendingSave


class FastPersistCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of a Trainer or of Fabric, files as Lightning's own plugin has them.

    In a Trainer use it together with `FastPersistCallback`. In Fabric set `optimizer` after `fabric.setup`; what is
    saved is durable after `wait()`, and at a normal end of the program. Without either, everything is copied before
    a save returns: right, and slower. One burst of saves is under way at a time: the first save after a step waits
    for those before it.

    Args:
        optimizer: Whose tensors are written from where they are, if no callback says it: an optimizer, something with
            one as `.optimizer`, or a list. Its next step waits for what is not copied or written by then.
        on_error: "raise": a save that failed behind the training is raised by the next save, by a load of its path, by
            `wait()`, or at the end of `fit()`, whichever comes first, and once. "warn": a RuntimeWarning instead.
        durable: Survive power loss once saved.
        engine: "auto", or an engine's name, which then never falls back.
        writers: In a Trainer with DDPStrategy and the callback, the ranks that write what all hold alike, parameters
            and optimizer state: "auto", up to 8, but rank 0 alone if there are several machines; "all", "node" or a
            number, as in `fastpersist.save`, if all machines see the same files; 1: rank 0 alone, as without DDP.

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
            raise ConfigError(f"on_error is 'raise' or 'warn', not {on_error!r}")
        require_engine(engine)
        require_writers(writers)
        self._optimizer = optimizer
        self._on_error = on_error
        self._durable = durable
        self._engine = engine
        self._writers: Any = writers
        self._share: Share | None = None  # while all ranks save
        self._order = FileOrder(durable=durable)
        self._gated: Callable[[], list[Optimizer]] | None = None  # given by the callback while it gates the steps
        self.hears_of_steps: Callable[[], bool] = lambda: True  # from Lightning's hook; for the callback to say
        self._is_over = False
        self._has_stepped = False
        self._last: _Saved | None = None  # until the next step
        for name in _PLUGIN_MODULES:  # Trainers of both packages shall take it; the program has imported its own by now
            if name in sys.modules:
                sys.modules[name].CheckpointIO.register(type(self))
        _plugins_alive.add(self)
        _watch_steps()

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process with the options alone: saves that are under way stay here, and so do optimizers."""
        options: dict[str, Any] = {"on_error": self._on_error, "durable": self._durable, "engine": self._engine}
        return functools.partial(type(self), writers=self._writers, **options), ()

    # --- what Lightning calls

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; return when training may go on.

        Args:
            checkpoint: What Lightning has put together.
            path: A file; its directory is made. Remote paths go to Lightning's own plugin.
            storage_options: Not supported, as in Lightning's own plugin.

        Raises:
            TypeError: storage_options were given.
            StorageError: An earlier save could not be written, with on_error="raise"; or the file cannot be created.
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
        likeness = Likeness.of(checkpoint) if optimizer is not None else None
        if likeness is not None and self._has_just_saved(likeness, key):
            self._order.link(self._last.key, key)  # type: ignore[union-attr]
        else:
            self._order.make_room(key)
            begin = functools.partial(self._begin_save, checkpoint, key, optimizer, gate)
            pending = begin(None) if self._share is None else self._share(key, begin)
            self._last = None if likeness is None else _Saved(key, likeness, pending)
        if self._is_over:
            self.wait()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of ours or of Lightning; wait for it, if it is still being written.

        Args:
            path: A file. Remote paths go to Lightning's own plugin.
            map_location: As in torch.load; None: to host memory.
            weights_only: As in Lightning; None is what torch takes it for.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: It could not be written, with on_error="raise"; or cannot be read.
            FormatError: It is damaged.
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
            engine=self._engine,
        )
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once every save that was accepted before is durable; it stays if one of them fails."""
        local = local_path(path)
        if local is None:
            TorchCheckpointIO().remove_checkpoint(path)  # type: ignore[arg-type]
        else:
            self._order.remove(key_of(local))

    def teardown(self) -> None:
        """Finish everything. Later saves are durable when they return, until the next `fit()`.

        Raises:
            StorageError: A save could not be written, with on_error="raise".
        """
        unwinding = sys.exc_info()[1] is not None and self._gated is None
        self.end()
        if unwinding:
            self.forget_errors()
        else:
            self._deliver()

    # --- for users

    @property
    def optimizer(self) -> object:
        """Whose tensors are written from where they are, if no callback says it."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: object) -> None:
        self._optimizer = optimizer

    def wait(self) -> None:
        """Wait until everything that was saved is durable.

        Raises:
            StorageError: Something could not be written, with on_error="raise".
        """
        self._order.join()
        self._deliver()

    def wait_for(self, path: str | os.PathLike[str]) -> None:
        """Wait until what was saved to a path is durable.

        Raises:
            StorageError: Something could not be written, with on_error="raise".
        """
        for key in {key_of(os.fspath(path)), os.path.realpath(path)}:
            self._order.wait_for(key)
        self._deliver()

    def wait_captured(self) -> None:
        """Return when everything that was saved may be changed. In a Trainer the callback does this before each step.

        Without the callback, optimizers wait by themselves, and this only ends the burst of saves.
        """
        self._has_stepped, self._last = True, None
        if self._gated is not None:
            for pending in self._order.under_way():
                pending.wait_captured()

    def pending(self) -> list[str]:
        """Return the paths that are being written."""
        return [pending.stats.path for pending in self._order.under_way()]

    # --- for the callback

    @property
    def order(self) -> FileOrder:
        """What was accepted and is not done."""
        return self._order

    def begin(self, gated: Callable[[], list[Optimizer]]) -> None:
        """From now on somebody calls `wait_captured` before each step of the optimizers that are returned."""
        self._gated, self._is_over = gated, False
        self._has_stepped, self._last = True, None

    def end(self) -> None:
        """Finish everything, and tell nobody of errors yet; from now on saves wait until they are durable."""
        self._order.join()
        self._gated, self._is_over, self._last = None, True, None

    def forget_pending(self) -> None:
        """Know of nothing that is under way: it is another process's."""
        self._order, self._last = FileOrder(durable=self._durable), None

    def forget_errors(self) -> None:
        """Another exception is on its way, and what went wrong here is in the log."""
        while self._order.next_error() is not None:
            pass

    # --- for the other ranks, and for rank 0 when it saves with them

    @property
    def durable(self) -> bool:
        """Whether what is saved survives power loss."""
        return self._durable

    @property
    def engine(self) -> str:
        """What writes and reads."""
        return self._engine

    def prepare(self) -> tuple[object, str]:
        """Begin a save: wait as needed, raise what has failed; return whose step it waits for, and with which gate."""
        optimizer, gate = self._optimizer, "optimizer"
        if self._gated is not None:
            optimizer, gate = self._gated() or None, "manual"
        elif optimizer is None:  # then nobody says when a step comes
            self._has_stepped = True
        self.end_burst()
        self._deliver()
        return optimizer, gate

    def accept(self, key: str, pending: PendingSave) -> None:
        """Take the save of a directory, which somebody else has begun on all ranks."""
        self._last = None
        self._order.add(key, pending)
        if self._is_over:
            self.wait()

    @property
    def writers(self) -> str | int:
        """Which ranks write what all hold alike."""
        return self._writers  # type: ignore[no-any-return]

    def gated_optimizers(self) -> list[Optimizer]:
        """Return whose tensors are written from where they are, as the callback says."""
        return [] if self._gated is None else self._gated()

    @contextlib.contextmanager
    def shared(self, share: Share) -> Iterator[None]:
        """In the block, have a save of a new file begun by somebody who knows the other ranks."""
        self._share = share
        try:
            yield
        finally:
            self._share = None

    def save_part(self, checkpoint: dict[str, Any], key: str, process_group: ProcessGroup | None) -> PendingSave:
        """Begin this rank's part of a file that rank 0 saves."""
        return self._begin_save(checkpoint, key, self.gated_optimizers(), "manual", process_group)

    def end_burst(self) -> None:
        """After a step, wait for the saves before it."""
        if self._has_stepped:
            self._order.join()
            self._has_stepped = False

    def take_error(self) -> BaseException | None:
        """Return what has failed and nobody was told of, one at a time; None with on_error="warn"."""
        return self._order.next_error() if self._on_error == "raise" else None

    def warn_of_errors(self) -> None:
        """With on_error="warn", warn of what has failed."""
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
            durable=self._durable,
            engine=self._engine,
            format="torch",
            replace_links=True,
            make_parents=True,
            process_group=process_group,
            writers=self._writers,
        )
        self._order.add(key, pending)
        return pending

    def _save_for_slurm(self, checkpoint: dict[str, Any], key: str) -> None:
        """Save before the job is started again, which Lightning asks Slurm for as soon as this returns.

        Under a name that is not like those which Lightning counts later: it would take a pending file for another one.
        """
        self._order.join()
        stand_in = os.path.join(os.path.dirname(key), ".slurm.ckpt")
        save(checkpoint, stand_in, durable=self._durable, engine=self._engine, format="torch", make_parents=True)
        os.replace(stand_in, key)
        if self._durable:
            sync_path(os.path.dirname(key))

    def _deliver(self) -> None:
        while (error := self._order.next_error()) is not None:
            if self._on_error == "raise":
                raise error
            # As a warning of this module: those of Lightning's, from where this is called, are often ignored.
            warnings.warn(f"a checkpoint could not be saved: {error}", RuntimeWarning, stacklevel=1)

    def _has_just_saved(self, likeness: Likeness, key: str) -> bool:
        """Tell whether the last save was of the same content, to another name, and may still become a file."""
        last = self._last
        if last is None or last.key == key or last.likeness != likeness or last.pending.stats.error is not None:
            return False
        expected = self._order.expects(last.key)
        return os.path.isfile(last.key) if expected is None else expected


def _stock_load(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    if map_location is None:
        return TorchCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)


# ------------------------------------------------------------------------------------------- the callback


class FastPersistCallback(Callback):
    """Tells `FastPersistCheckpointIO` when a step comes, and ModelCheckpoint which names are taken.

    It finds the plugin in the Trainer. Before each step of an optimizer it waits for what of it is neither written nor
    copied; everything else of the training overlaps with the writing. `trainer.save_checkpoint` outside of `fit()`
    returns when the file is durable. With DDPStrategy all ranks write each file of `fit()`; the plugin's `writers` says
    which. All of them call `trainer.save_checkpoint`, as always in Lightning.

    FSDPStrategy(state_dict_type="sharded") and ModelParallelStrategy save directories, of which each rank writes its
    shards; they are Lightning's, and visible when all ranks are done.

    All is copied before a save returns, because weights change outside of steps, with WeightAveraging,
    StochasticWeightAveraging, ModelPruning, FSDPStrategy, and optimizers that have train() and eval() of their own.

    Raises:
        ConfigError: In setup: the plugin is not there, is inside an AsyncCheckpointIO, or is not asked by the strategy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._plugin: FastPersistCheckpointIO | None = None
        self._sharing: SharedSaving | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plugin": None, "_sharing": None}  # each process finds its own

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the plugin; in `fit()` take the gate over."""
        refuse_bypassing(trainer.strategy)
        self._plugin = _find_plugin(trainer.strategy)
        ShardedSaving.stand_in(trainer.strategy, self._plugin)
        if stage == "fit":
            self._end_sharing()
            if type(self._plugin).save_checkpoint is FastPersistCheckpointIO.save_checkpoint:
                self._sharing = SharedSaving.of(trainer, self._plugin)
            # While Lightning looks for a learning rate or a batch size, the Trainer has other callbacks.
            self._plugin.hears_of_steps = lambda: self in trainer.callbacks
            self._plugin.begin(functools.partial(gated_optimizers, trainer))
            for checkpoint in _model_checkpoints(trainer):
                checkpoint.file_exists = functools.partial(_file_exists, self._plugin.order, checkpoint)
                checkpoint._link_checkpoint = functools.partial(_link_checkpoint, self._plugin.order)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Let nothing change that is still to be written."""
        if self._plugin is not None:
            self._plugin.wait_captured()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish what is under way; the exception goes on, and errors of saves are in the log."""
        self._end_sharing()
        if self._plugin is not None:
            self._plugin.end()
            self._plugin.forget_errors()
        _give_back(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give ModelCheckpoint its own functions back, and finish everything.

        By now the strategy has torn the plugin down, but for one inside another plugin: those do not pass it on.
        """
        self._end_sharing()
        _give_back(trainer)
        if self._plugin is not None and stage == "fit":
            self._plugin.teardown()

    def _end_sharing(self) -> None:
        if self._sharing is not None:
            self._sharing.take_away()
            self._sharing = None


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


def _give_back(trainer: Any) -> None:
    for checkpoint in _model_checkpoints(trainer):
        for name in ("file_exists", "_link_checkpoint"):
            checkpoint.__dict__.pop(name, None)


def _file_exists(order: FileOrder, checkpoint: Any, filepath: Any, trainer: Any) -> bool:
    """In ModelCheckpoint's place: tell whether a name is taken, by what is there or by what will be."""
    local = local_path(filepath) if trainer.is_global_zero else None
    expected = trainer.strategy.broadcast(None if local is None else order.expects(key_of(local)))
    if expected is not None:
        return bool(expected)
    return bool(type(checkpoint).file_exists(checkpoint, filepath, trainer))


def _link_checkpoint(order: FileOrder, trainer: Any, filepath: str, linkpath: str) -> None:
    """In ModelCheckpoint's place: make the symbolic link once the file is durable."""
    if trainer.is_global_zero and key_of(filepath) != key_of(linkpath):
        order.link(key_of(filepath), key_of(linkpath), symbolic=True)
    trainer.strategy.barrier()
