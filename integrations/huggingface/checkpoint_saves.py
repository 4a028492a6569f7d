"""Saves one checkpoint directory of a Trainer: the Trainer's functions assemble it, ours publish it, one at a time.

`attachment` and `callback` share this module, and decide when to save and whom to notify. With several ranks, the
coordinator (rank 0) owns the directory and decides; followers learn its hidden name, add their own files, and hear how
the save ended. Each rank writes a part of the replicated weights and optimizer: followers let the Trainer assemble
these files too, in a temporary directory. Where other code has replaced the functions that do so, perhaps for one rank
only, the coordinator writes alone. With FSDP each rank writes its shards, or the coordinator the gathered state, as the
Trainer is configured (`fsdp`).
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils.import_utils import is_sagemaker_mp_enabled

from fastpersist import (
    ConfigError,
    DirectorySave,
    PeerDirectorySave,
    PendingSave,
    StorageError,
    directory_save_together,
    require_engine,
)

from .._shared.agreement import are_several, is_first_rank, is_of_the_disk, on_all_ranks
from .._shared.redirection import Redirection, saves_into
from .._shared.requirements import require_writers
from .._shared.save_figures import SaveFigures
from .foreign_files import clear_up, drop_held, hold_foreign
from .fsdp import is_sharding, moves_parameters, sharded_saves

__all__ = ["SENTINEL_NAME", "CheckpointSaves", "Flight", "from_first_rank", "refuse_unsupported"]

_log = logging.getLogger("fastpersist")

SENTINEL_NAME = "checkpoint-is-incomplete.txt"
"""The file with which the Trainer's own save at SIGTERM marks a directory as incomplete."""

Result = TypeVar("Result")


def refuse_unsupported(args: TrainingArguments, model: object) -> None:
    """Raise for a strategy that saves by itself, or a layout that cannot be published as one directory.

    Raises:
        ConfigError: The Trainer has such a strategy or layout; the message names it.
    """
    strategy = None
    fsdp_config: Any = args.fsdp_config or {}
    if args.fsdp and fsdp_config.get("xla"):
        strategy = "FSDP of XLA"
    elif args.deepspeed:
        strategy = "DeepSpeed"
    elif is_sagemaker_mp_enabled():
        strategy = "SageMaker model parallelism"
    elif getattr(model, "is_distributed_loading_by_transformers", False):
        strategy = "a model that was sharded when it was loaded"
    elif AcceleratorState._shared_state:
        kind = AcceleratorState().distributed_type.value
        is_known = kind in ("NO", "FSDP") or kind.startswith("MULTI_")  # one process, FSDP, and DDP
        strategy = None if is_known else kind
    if strategy is not None:
        raise ConfigError(f"fastpersist cannot save a Trainer with {strategy} yet; stock saving works there")
    if args.save_on_each_node and args.world_size > 1:
        raise ConfigError(
            "fastpersist publishes one directory for all ranks, so save_on_each_node=True is not supported: leave it "
            "out, and let output_dir be on a file system that all nodes share"
        )


@dataclass(eq=False)
class Flight:
    """One save from its start to its end.

    Attributes:
        path: The final name.
        state: The Trainer's state; corrected if the save fails.
        best_before: The state's best_model_checkpoint without this save.
        pending: The save, or this rank's part; None on ranks without a part.
        published: Whether it was published; None while it is under way.
    """

    path: str
    state: Any
    best_before: str | None
    pending: PendingSave | None = None
    published: bool | None = None

    def settle(self, *, published: bool) -> None:
        """Record how the save ended; a failed one is no longer the best checkpoint."""
        self.published = published
        drop_held(self.path, unless=published or not is_first_rank())
        if not published and self.state.best_model_checkpoint == self.path:
            self.state.best_model_checkpoint = self.best_before


class CheckpointSaves:
    """The saves of one Trainer, never two at once. Only the training thread uses it.

    Args:
        on_error: "raise" or "warn": what to do about a failed save.
        engine: "auto", or an engine's name, which then never falls back.
        writers: The ranks that write replicated state, if there are several ranks: "auto", "all", "node" or a number.
        constant: Modules and tensors that never change, as in `DirectorySave.save`.

    Raises:
        ConfigError: on_error, engine or writers is unknown.
    """

    def __init__(self, *, on_error: str, engine: str, writers: str | int = "auto", constant: object = ()) -> None:
        if on_error not in ("raise", "warn"):
            raise ConfigError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
        require_engine(engine)
        require_writers(writers)
        self._writers: Any = writers
        self._on_error = on_error
        self.engine = engine
        self._flight: Flight | None = None
        self._rotating: PendingSave | None = None  # published, but may still be deleting old checkpoints
        self._constant = constant
        self._plans: dict[str, Any] = {}  # of shards, for the next save
        self.figures = SaveFigures("checkpoint_")

    @property
    def pending(self) -> PendingSave | None:
        """The save under way, or this rank's part of it; None if there is none."""
        return None if self._flight is None else self._flight.pending

    def wait_captured(self) -> None:
        """Return when the optimizer may step."""
        if self.pending is not None:
            self.pending.wait_captured()

    def join(self) -> None:
        """Wait until nothing is under way on this rank; `finish` and `poll` report the outcome."""
        for pending in (self.pending, self._rotating):
            if pending is not None:
                pending.join()

    def poll(self) -> None:
        """Report the outcome of the save under way, if it is written: never wait. All ranks call it."""
        flight = self._flight
        if flight is not None and from_first_rank(lambda: flight.pending is not None and flight.pending.is_written()):
            self.settle()

    def finish(self) -> None:
        """Wait for the save under way, and report its outcome. All ranks call it.

        Raises:
            FastPersistError, …: With on_error="raise": the save has failed.
        """
        self.join()
        self.settle()

    def settle(self) -> None:
        """Wait until the save under way is published, but not until old checkpoints are deleted; report its outcome.

        Raises:
            FastPersistError, …: As in `finish`.
        """
        flight = self._flight
        if flight is None:
            return
        if flight.pending is not None:
            flight.pending.wait_written()
            self._rotating = flight.pending
        error = None if flight.pending is None else flight.pending.undelivered_error()
        failed = flight.pending is not None and flight.pending.stats.error is not None
        failed, described = from_first_rank(lambda: (failed, None if error is None else _described(error)))
        self._flight = None
        flight.settle(published=not failed)
        if described is not None:
            self._tell(flight.path, error or _error_of(0, *described))

    def finish_quietly(self) -> None:
        """Wait on this rank alone, while an exception propagates; errors of the save are only logged."""
        flight, pending = self._flight, self.pending
        failed = pending is not None and pending.exception() is not None
        self._flight = None
        if flight is not None:
            flight.settle(published=pending is not None and not failed)

    def save(self, trainer: Any, run_dir: str, *, synchronous: bool) -> Flight | None:
        """Save a checkpoint as the Trainer would, but write it in the background. All ranks call it.

        Args:
            trainer: The Trainer whose functions assemble the files.
            run_dir: The parent of checkpoint-N.
            synchronous: Return when it is published.

        Returns:
            The save; None if it has failed already and on_error is "warn".

        Raises:
            FastPersistError, …: With on_error="raise": this save has failed already, or the one before has.
            Exception: Errors of the Trainer's functions.
        """
        self.settle()
        state, args = trainer.state, trainer.args
        path = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        flight = Flight(path, state, state.best_model_checkpoint)
        files: DirectorySave | PeerDirectorySave | None = None

        def begin() -> str | None:
            nonlocal files
            files = self._begin(path, all_write=all_write)
            if is_first_rank():
                hold_foreign(path, wait=self.join)
            return None if files is None else files.path

        try:
            views = _on_all_ranks(lambda: self._view(trainer, path, run_dir))
            state.best_model_checkpoint = views[0].best_checkpoint
            synchronous = synchronous or views[0].is_urgent
            are_allowed = self._writers != 1 or is_sharding(trainer)  # only the rank itself holds its shards
            all_write = len(views) > 1 and are_allowed and all(view.can_take_part for view in views)
            hidden_path = _on_all_ranks(begin)[0] or ""
            _on_all_ranks(lambda: self._put_together(trainer, files, hidden_path, all_write=all_write))
        except BaseException as error:
            if files is not None:
                files.abort()
            flight.settle(published=False)
            if not is_of_the_disk(error):
                raise
            self._tell(path, error)
            return None
        if files is not None:
            limit, best = args.save_total_limit, state.best_model_checkpoint
            flight.pending = files.publish(after=lambda: clear_up(path, run_dir, limit, best), apart=True)
            self.figures.add(flight.pending)
        self._flight = flight
        if synchronous:
            self.finish()
        return flight

    def _view(self, trainer: Any, path: str, run_dir: str) -> _View:
        """Collect what this rank tells the others before a save begins."""
        if is_sharding(trainer):
            can_take_part = are_several()
        else:
            can_take_part = are_several() and _is_put_together_as_ever(trainer)
        if not is_first_rank():
            return _View(can_take_part)
        return _View(
            can_take_part,
            _best_checkpoint(trainer, run_dir),
            os.path.exists(os.path.join(path, SENTINEL_NAME)),
        )

    def _begin(self, path: str, *, all_write: bool) -> DirectorySave | PeerDirectorySave | None:
        if all_write:
            everybody: Any = dist.group.WORLD
            return directory_save_together(
                path,
                everybody,
                writers="auto" if self._writers == 1 else self._writers,
                overwrite="foreign",
                engine=self.engine,
                make_parents=True,
            )
        if is_first_rank():
            return DirectorySave(path, overwrite="foreign", engine=self.engine, make_parents=True)
        return None

    def _put_together(
        self,
        trainer: Any,
        files: DirectorySave | PeerDirectorySave | None,
        path: str,
        *,
        all_write: bool,
    ) -> None:
        args, state = trainer.args, trainer.state
        if not is_first_rank() and not os.path.isdir(path):
            raise StorageError(
                None, f"rank {args.process_index} does not see {path}: output_dir must be shared by all ranks", path
            )
        shards = is_sharding(trainer)
        optimizer = _optimizer_of(trainer)
        options: dict[str, Any] = {
            "optimizer": optimizer,
            "constant": self._constant,
            "shared": (_is_none_shared if shards else _is_shared) if all_write else None,
        }
        if isinstance(files, PeerDirectorySave) and not shards:
            with saves_into(files, **options), _as_first_rank(trainer):
                _save_tensors(trainer, files.path)
        with ExitStack() as stack:
            redirection = (
                stack.enter_context(saves_into(files, **options)) if isinstance(files, DirectorySave) else None
            )
            if shards and files is not None:
                stack.enter_context(sharded_saves(files, path, optimizer, self._plans))
            _save_files(trainer, path, redirection)  # a follower saves only its own files
        if args.should_save:
            for exporter in [*trainer.callback_handler.callbacks, trainer.control]:
                if isinstance(exporter, ExportableState):
                    name = type(exporter).__name__
                    if isinstance(state.stateful_callbacks.get(name), list):
                        state.stateful_callbacks[name].append(exporter.state())
                    else:
                        state.stateful_callbacks[name] = exporter.state()
            state.save_to_json(os.path.join(path, TRAINER_STATE_NAME))

    def _tell(self, path: str, error: BaseException) -> None:
        if self._on_error == "raise":
            raise error
        warnings.warn(
            f"{path} could not be saved, and training goes on without it: {error}", RuntimeWarning, stacklevel=2
        )


class _View(NamedTuple):
    """The message of one rank to the others before a save.

    Attributes:
        can_take_part: Whether the rank can assemble weights and optimizer as the coordinator does.
        best_checkpoint: best_model_checkpoint once this save exists; from the coordinator.
        is_urgent: Whether training waits until the save is published; from the coordinator.
    """

    can_take_part: bool
    best_checkpoint: str | None = None
    is_urgent: bool = False


def _save_tensors(trainer: Any, path: str, redirection: Redirection | None = None) -> None:
    """Save model, optimizer and scheduler: all large replicated state, and some small files."""
    _call(trainer, "save_model", path, redirection, _internal_call=True)
    if not trainer.args.save_only_model:
        _call(trainer, "_save_optimizer_and_scheduler", path, redirection)


def _save_files(trainer: Any, path: str, redirection: Redirection | None) -> None:
    _save_tensors(trainer, path, redirection)
    if not trainer.args.save_only_model:
        _call(trainer, "_save_scaler", path, redirection)
        _call(trainer, "_save_rng_state", path, redirection)


_CALLED = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
"""The functions that save files, in the order of their calls."""


def _call(trainer: Any, name: str, path: str, redirection: Redirection | None, **options: bool) -> None:
    """Call a saving function of the Trainer.

    Files saved by an overridden function, and files saved before it, are written at once, because it may then use them.
    """
    if redirection is not None:
        still_called = _CALLED[_CALLED.index(name) :]
        redirection.at_once = not all(_is_stock(trainer, one) for one in still_called)
    getattr(trainer, name)(path, **options)


def _is_stock(trainer: Any, name: str) -> bool:
    """Return whether one of the functions of `_CALLED` is the Trainer's own."""
    if name != "save_model":
        return _has_stock(trainer, (name,), [Trainer])
    has_stock_model = _has_stock(_model_of(trainer), ("save_pretrained",), _stock_models())
    return has_stock_model and _has_stock(trainer, ("save_model", "_save"), [Trainer])


def _best_checkpoint(trainer: Any, run_dir: str) -> str | None:
    """Return the best_model_checkpoint that will be true once this save exists."""
    state: Any = trainer.state
    if trainer.args.save_strategy != SaveStrategy.NO and state.best_global_step:
        best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if state.best_global_step == state.global_step or os.path.exists(best):
            return best
    return state.best_model_checkpoint  # type: ignore[no-any-return]


def _optimizer_of(trainer: Any) -> object:
    """Return the optimizer if only its step changes parameters; else None, so that the save copies everything."""
    if moves_parameters(trainer):
        return None
    optimizer = trainer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    steps_in_backward = "lomo" in str(getattr(trainer.args.optim, "value", trainer.args.optim))
    return optimizer if isinstance(inner, torch.optim.Optimizer) and not steps_in_backward else None


# ------------------------------------------------------------------------------------------- written by all ranks

_ASKED = "should_save_on_this_rank"  # save_pretrained of newer models calls it
_SHARED_NAMES = re.compile(r"(.*/)?(adapter_)?model(-\d+-of-\d+)?\.safetensors|" + re.escape(OPTIMIZER_NAME))


def _is_shared(name: str) -> bool:
    """Return whether a file holds replicated state, which all ranks write."""
    return _SHARED_NAMES.fullmatch(name) is not None


def _is_none_shared(_name: str) -> bool:
    """Return False: with FSDP, each file of torch.save is one rank's own."""
    return False


def _is_put_together_as_ever(trainer: Any) -> bool:
    """Return whether only stock functions assemble weights and optimizer, so that followers can run them too.

    A subclass's function may be meant for one rank, or may run collectives.
    """
    optimizer: Any = _optimizer_of(trainer)
    return (
        _has_stock(trainer, ("save_model", "_save", "_save_optimizer_and_scheduler"), [Trainer])
        and _has_stock(_model_of(trainer), ("state_dict", "save_pretrained", _ASKED), _stock_models())
        and optimizer is not None
        and _has_stock(getattr(optimizer, "optimizer", optimizer), ("state_dict",), [torch.optim.Optimizer])
    )


def _stock_models() -> list[type]:
    peft = sys.modules.get("peft")
    return [torch.nn.Module, PreTrainedModel, *([] if peft is None else [peft.PeftModel])]


def _has_stock(owner: object, names: Sequence[str], kinds: Sequence[type]) -> bool:
    """Return whether each method, where it exists, is the one of a given class."""
    for name in names:
        if hasattr(owner, name):
            function = getattr(getattr(owner, name), "__func__", None)
            if function is None or not any(function is getattr(kind, name, None) for kind in kinds):
                return False
    return True


def _model_of(trainer: Any) -> Any:
    """Return the model whose save_pretrained the Trainer calls, if it has one."""
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


@contextmanager
def _as_first_rank(trainer: Any) -> Iterator[None]:
    """Let the Trainer's saving functions behave on this rank as on rank 0."""
    args, model = trainer.args, _model_of(trainer)
    trainer.args = copy.copy(args)
    trainer.args.__class__ = type(type(args).__name__, (type(args),), {"should_save": True})
    asks_model = hasattr(model, _ASKED)
    if asks_model:
        setattr(model, _ASKED, lambda is_main_process: is_main_process)
    try:
        yield
    finally:
        trainer.args = args
        if asks_model:
            delattr(model, _ASKED)


# ------------------------------------------------------------------------------------------- several ranks


def from_first_rank(decide: Callable[[], Result]) -> Result:
    """Run a function on rank 0, and return its result on all ranks.

    Raises:
        Exception: The exception of `decide`; on followers a StorageError or RuntimeError with its text.
    """
    if not are_several():
        return decide()
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = decide()
        except Exception as error:  # noqa: BLE001 - raised below, when the followers know
            failure = error
            outcome[1] = _described(error)
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise _error_of(0, *outcome[1])
    return outcome[0]  # type: ignore[no-any-return]


def _on_all_ranks(work: Callable[[], Result]) -> list[Result]:
    """Run a function on every rank; return all results by rank, or raise on all ranks if one fails.

    Raises:
        Exception: The exception of `work`; on other ranks a StorageError or RuntimeError with its text.
    """
    return on_all_ranks(work, lambda failure: _error_of(*failure), is_of_the_disk)


def _described(error: BaseException) -> tuple[str, bool]:
    return f"{type(error).__name__}: {error}", is_of_the_disk(error)


def _error_of(rank: int, message: str, is_of_the_disk: bool) -> Exception:
    text = f"rank {rank} could not save: {message}"
    return StorageError(None, text) if is_of_the_disk else RuntimeError(text)
