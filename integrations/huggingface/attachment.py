"""What `attach` puts on a HuggingFace Trainer, so that its checkpoints are written while it trains on.

The Trainer's own functions say what a checkpoint holds, so functions that a subclass overrides count, stock Trainers
resume from it, and ours from theirs. How a directory is put together is left to `checkpoint_saves`.

The Trainer has no hook for most of this, so functions of the one instance are replaced, private ones among them; each
passes on what it does not know.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import re
import warnings
from typing import Any

from .._shared.requirements import require

require("huggingface", "transformers", "5.2")  # the first with trainer_utils.rotate_checkpoints

from transformers import Trainer, TrainerCallback, TrainerState  # noqa: E402 - it must be there, and new enough
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

from fastpersist import (  # noqa: E402
    CheckpointNotFoundError,
    ConfigError,
    FastPersistError,
    PendingSave,
    UnsupportedError,
    inspect,
    verify,
)

from .._shared.replacement import Function, Replacement  # noqa: E402
from .callback import FastPersistCallback  # noqa: E402
from .checkpoint_saves import (  # noqa: E402
    SENTINEL_NAME,
    CheckpointSaves,
    Flight,
    from_first_rank,
    refuse_unsupported,
)
from .foreign_files import own_names  # noqa: E402
from .fsdp import LOADING_NAMES, sharded_loads, shards_in  # noqa: E402

__all__ = ["Attachment", "FastPersistCallback", "attach", "last_checkpoint"]

_log = logging.getLogger("fastpersist")

_WAITING_FIRST = ("hyperparameter_search", "_load_best_model", "_finalize_training")
_WAITING_HERE = ("evaluate", "predict")  # perhaps on one rank only: what went wrong is told by the next of the others
_MANIFEST_NAME = "MANIFEST.json"
_TENSOR_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_WEIGHTS = re.compile(r"(pytorch_model|pytorch_model_fsdp|model|adapter_model)(\.safetensors|\.bin)(\.index\.json)?")


def attach(
    trainer: Trainer,
    *,
    on_save: str = "published",
    on_error: str = "raise",
    engine: str = "auto",
    writers: str | int = "auto",
) -> Attachment:
    """Let a Trainer's checkpoints be written while it trains on, each published as a whole.

    The files are those of the Trainer, and a MANIFEST.json. Its own rotation runs when the new one is durable. Waiting
    for the save that is under way: another save, evaluation, prediction, loading the best model, the end of train()
    and a search for hyper-parameters. Saves are not written behind, but before the Trainer goes on, when they are the
    last of the training, pushed to the hub, made because of SIGTERM, or made by a subclass that overrides
    `_save_checkpoint` (it may rely on the directory).

    With DDP all ranks write weights and optimizer, of which each has a replica, each rank a part; the files are the
    same. Rank 0 writes alone where the class of the trainer overrides `save_model`, `_save` or
    `_save_optimizer_and_scheduler`, that of the model `save_pretrained` or `state_dict`, that of the optimizer
    `state_dict`: what they do may be meant for one rank.

    With FSDP and SHARDED_STATE_DICT each rank writes its shards, durable, before it trains on, with `FastPersistWriter`
    and under Accelerate's names; `FastPersistReader` reads them, on as many ranks as there are then. With
    FULL_STATE_DICT rank 0 writes what was gathered. The directory is published behind the training in both cases.

    `train(resume_from_checkpoint=True)` takes the newest checkpoint that is whole, and warns about those it skips. An
    exception that ends train() leaves it when the save under way is finished.

    Args:
        trainer: On one process, or on several with DDP, DataParallel or FSDP; one machine, or a shared output_dir.
        on_save: "published": callbacks hear of a save at the end of the first step after its publication, with a copy
            of the state as it was saved. "sync": every save is published before the Trainer goes on.
        on_error: What becomes of an error of the disk. "raise": it is raised by train(), at the end of a step, by the
            next save, or by what waits. "warn": a RuntimeWarning, and training goes on. It is in the log in any case,
            and callbacks do not hear of that save. One of another rank is a PeerError that names it.
        engine: "auto", or an engine's name, which then never falls back.
        writers: With DDP, the ranks that write what all hold: "all", "node" (one of each machine), a number, or "auto":
            up to 8 of one machine, or one of each of several. 1: rank 0 alone, also where replicas differ.

    Returns:
        What takes it off again.

    Raises:
        ConfigError: Unknown options, a trainer that has one already, or a strategy with savers of its own (DeepSpeed,
            FSDP of XLA, …).

    Thread safety: the thread that trains.
    """
    if on_save not in ("published", "sync"):
        raise ConfigError(f"on_save is 'published' or 'sync', not {on_save!r}")
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"attach() takes a transformers.Trainer, not a {type(trainer).__name__}")
    if isinstance(trainer.__dict__.get(_ATTRIBUTE), Attachment):
        raise ConfigError("this trainer is attached already: detach() that first")
    if "_save_checkpoint" in trainer.__dict__:
        raise ConfigError("somebody has replaced _save_checkpoint of this trainer: attach(trainer) before that")
    refuse_unsupported(trainer.args, trainer.model)
    saves = CheckpointSaves(on_error=on_error, engine=engine, writers=writers)
    return Attachment(trainer, saves, always_wait=on_save == "sync")


class Attachment:
    """What `attach` has put on a Trainer."""

    def __init__(self, trainer: Trainer, saves: CheckpointSaves, *, always_wait: bool) -> None:
        self._trainer: Any = trainer
        self._saves = saves
        self._always_wait = always_wait
        self._held: list[tuple[Flight, Any, Any]] = []  # calls of on_save that wait for their save, oldest first
        self._expected: Flight | None = None  # whose on_save comes next
        self._dropped = False  # the next on_save belongs to a save that has failed already
        self._replaced: dict[str, tuple[Any, Function, dict[str, Function]]] = {}  # whose, by what, and what it had
        self._is_overridden = type(trainer)._save_checkpoint is not Trainer._save_checkpoint
        if self._is_overridden:
            self._always_wait = True
            _inherited_save.hold()
            _log.info("%s overrides _save_checkpoint: each save is published before it returns", type(trainer).__name__)
        else:
            self._replace(trainer, "_save_checkpoint", self.save_checkpoint)
        self._replace(trainer, "train", self._train)
        self._replace(trainer.callback_handler, "on_save", self._on_save)
        for name in (*_WAITING_FIRST, *_WAITING_HERE):
            if hasattr(trainer, name):
                function = getattr(trainer, name)
                if name in LOADING_NAMES:
                    function = self._loading(function)
                self._replace(trainer, name, self._waiting(function, is_local=name in _WAITING_HERE))
        for name in LOADING_NAMES:
            if name not in _WAITING_FIRST:
                self._replace(trainer, name, self._loading(getattr(trainer, name)))
        self._callback = _GateCallback(self)
        trainer.callback_handler.callbacks.insert(0, self._callback)  # others see what a step starts with
        setattr(trainer, _ATTRIBUTE, self)

    # --- for users

    def pending(self) -> PendingSave | None:
        """Return the save that is under way, or this rank's part of it; None without one, or without a part."""
        return self._saves.pending

    def wait(self) -> None:
        """Wait for the save that is under way, and let callbacks hear of it. With several ranks, all call it.

        Raises:
            FastPersistError, …: With on_error="raise": it has failed.
        """
        self._saves.finish()
        trainer = self._trainer
        trainer.control = self.deliver(trainer.control)

    def detach(self) -> None:
        """Wait, and give the Trainer its own functions back. May be called again.

        Raises:
            FastPersistError, …: As in `wait`; it is detached all the same.
        """
        trainer = self._trainer
        if trainer.__dict__.get(_ATTRIBUTE) is not self:
            return
        try:
            self.wait()
        finally:
            delattr(trainer, _ATTRIBUTE)
            if self._is_overridden:
                _inherited_save.release()
            for name, (owner, ours, before) in self._replaced.items():
                if owner.__dict__.get(name) is ours:
                    delattr(owner, name)
                    owner.__dict__.update(before)
            if self._callback in trainer.callback_handler.callbacks:
                trainer.callback_handler.callbacks.remove(self._callback)

    # --- in place of the Trainer's functions

    def save_checkpoint(self, model: object, trial: Any = None, *_others: object, **_options: object) -> None:
        """Stand for Trainer._save_checkpoint."""
        trainer = self._trainer
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        at_once = self._always_wait or trainer.args.push_to_hub or trainer.control.should_training_stop
        self._expected, self._dropped = None, False
        flight = self._saves.save(trainer, trainer._get_output_dir(trial=trial), synchronous=at_once)
        if flight is None or flight.published is False:
            self._dropped = True
        elif flight.published is None:
            self._expected = flight
        elif trainer.args.push_to_hub:
            trainer._push_from_checkpoint(flight.path)

    def _on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        """Stand for CallbackHandler.on_save, which the Trainer calls right after a save."""
        flight, self._expected = self._expected, None
        dropped, self._dropped = self._dropped, False
        control = self.deliver(control)
        if flight is not None:
            self._held.append((flight, args, _copy_of(state)))
        elif not dropped:
            return self._stock_on_save(args, state, control, **keywords)
        control.should_save = False
        return control

    def _train(self, resume_from_checkpoint: Any = None, *others: Any, **options: Any) -> Any:
        """Stand for Trainer.train."""
        self.wait()
        if resume_from_checkpoint is True:
            found = from_first_rank(lambda: last_checkpoint(self._trainer.args.output_dir))
            resume_from_checkpoint = found or True  # without any, the Trainer says so
        try:
            outcome = self._stock("train")(resume_from_checkpoint, *others, **options)
            self.wait()
        except BaseException:
            self._saves.finish_quietly()
            self._deliver_quietly()
            raise
        return outcome

    def _waiting(self, stock: Function, *, is_local: bool) -> Function:
        """Return a function that waits before it does the same."""

        def waiting(*args: Any, **options: Any) -> Any:
            if is_local and self._trainer.args.world_size > 1:
                self._saves.join()
            elif is_local:
                self._saves.finish()  # callbacks hear of it at the end of the next step
            else:
                self.wait()
            return stock(*args, **options)

        return waiting

    def _loading(self, stock: Function) -> Function:
        """Return a function that does the same, and has shards read by us."""

        @functools.wraps(stock)
        def loading(*args: Any, **options: Any) -> Any:
            with sharded_loads(self._trainer, self._saves.engine):
                return stock(*args, **options)

        return loading

    # --- what callbacks hear

    def at_step_end(self, control: Any) -> Any:
        """See whether a save is over, and tell."""
        self._saves.poll()
        return self.deliver(control)

    def deliver(self, control: Any) -> Any:
        """Let callbacks hear of the saves that are published by now, in order."""
        while self._held and self._held[0][0].published is not None:
            flight, args, state = self._held.pop(0)
            if flight.published:
                wanted = control.should_save
                control = self._stock_on_save(args, state, control)
                control.should_save = control.should_save or wanted  # of this step, not of the one that was saved
        return control

    def _deliver_quietly(self) -> None:
        try:
            self.deliver(self._trainer.control)
        except Exception:  # noqa: BLE001 - another exception is on its way
            _log.exception("a callback failed in on_save")
        self._held.clear()

    @property
    def saves(self) -> CheckpointSaves:
        """The saves of this Trainer."""
        return self._saves

    # --- the Trainer's functions

    def _replace(self, owner: object, name: str, ours: Function) -> None:
        wrapper = _named_like(getattr(owner, name), ours)
        before = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
        setattr(owner, name, wrapper)
        self._replaced[name] = (owner, wrapper, before)

    def _stock(self, name: str) -> Function:
        return self._replaced[name][1].__wrapped__  # type: ignore[attr-defined,no-any-return]

    def _stock_on_save(self, *args: Any, **keywords: Any) -> Any:
        return self._stock("on_save")(*args, **keywords)


_ATTRIBUTE = "_fastpersist_attachment"


def _named_like(stock: Function, ours: Function) -> Function:
    @functools.wraps(stock)
    def wrapper(*args: Any, **options: Any) -> Any:
        return ours(*args, **options)

    return wrapper


def _inherit(stock: Function) -> Function:
    def _save_checkpoint(trainer: Any, *args: Any, **options: Any) -> Any:
        attachment = trainer.__dict__.get(_ATTRIBUTE)
        return (stock if attachment is None else _without_trainer(attachment))(trainer, *args, **options)

    return _save_checkpoint


def _without_trainer(attachment: Attachment) -> Function:
    return lambda _trainer, *args, **options: attachment.save_checkpoint(*args, **options)


# A subclass that overrides _save_checkpoint calls that of Trainer: there, and only for trainers with an attachment.
_inherited_save = Replacement(lambda: [(Trainer, "_save_checkpoint")], _inherit)  # type: ignore[list-item]


class _GateCallback(TrainerCallback):
    """Where the training is: the gate before the step, and what is told after it."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait until the parameters may change."""
        self._attachment.saves.wait_captured()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Tell of saves that are over."""
        return self._attachment.at_step_end(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Wait for the last save, and tell of it."""
        self._attachment.saves.finish()
        return self._attachment.deliver(control)


def _copy_of(state: TrainerState) -> TrainerState:
    """Return the state as it is now. Entries of the log never change once they are there; the rest is small."""
    log_history = state.log_history
    copied = copy.copy(state)
    copied.log_history = []
    copied = copy.deepcopy(copied)
    copied.log_history = list(log_history)
    return copied


# ------------------------------------------------------------------------------------------- resuming


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Find the newest checkpoint-N of a directory that is whole, and warn about newer ones that are not.

    Ours are read completely and compared with their checksums. Those of a stock Trainer have none: all files of
    tensors must be complete, weights and trainer_state.json be there.

    Returns:
        Its path, for `train(resume_from_checkpoint=…)`; None when there are no checkpoints at all.

    Raises:
        CheckpointNotFoundError: There are checkpoints, and not one of them is whole.

    Thread safety: any thread.
    """
    output_dir = os.fspath(output_dir)
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]+)")
    steps = []
    for name in os.listdir(output_dir) if os.path.isdir(output_dir) else []:
        found = pattern.fullmatch(name)
        if found is not None and os.path.isdir(os.path.join(output_dir, name)):
            steps.append((int(found.group(1)), name))
    reasons = []
    for _, name in sorted(steps, reverse=True):
        path = os.path.join(output_dir, name)
        why_not = _why_not_whole(path)
        if why_not is None:
            return path
        reasons.append(f"{name}: {why_not}")
        warnings.warn(f"{path} is not whole and is skipped: {why_not}", RuntimeWarning, stacklevel=2)
    if reasons:
        raise CheckpointNotFoundError(
            f"no checkpoint in {output_dir} is whole ({'; '.join(reasons)}). To use one as it is, name its directory"
        )
    return None


def _why_not_whole(path: str) -> str | None:
    """Return what is wrong with a checkpoint, None if nothing is."""
    try:
        if os.path.exists(os.path.join(path, SENTINEL_NAME)):
            return "its save was never finished"
        if os.path.exists(os.path.join(path, _MANIFEST_NAME)):
            own = own_names(path)
            # What somebody has put beside its files, perhaps a callback in on_save, does them no harm.
            blamed = None if own is None else {*own, _MANIFEST_NAME, ""}
            damages = [one for one in verify(path).damages if blamed is None or one.file in blamed]
            return damages[0].message if damages else None
        with open(os.path.join(path, TRAINER_STATE_NAME), encoding="utf-8") as file:
            json.load(file)
        names = [
            os.path.relpath(os.path.join(folder, name), path) for folder, _, names in os.walk(path) for name in names
        ]
        has_shards, why_not = shards_in(path, names)
        if why_not is not None:
            return why_not
        if not has_shards and not any(_WEIGHTS.fullmatch(os.path.basename(name)) for name in names):
            return "it has no weights"
        for name in sorted(names):
            if name.endswith(_TENSOR_SUFFIXES):
                _inspect(os.path.join(path, name))
    except (FastPersistError, OSError, ValueError) as error:
        return str(error)
    return None


def _inspect(path: str) -> None:
    try:
        inspect(path)
    except UnsupportedError:  # a format without a table of contents: nothing to find out
        pass
