"""`attach` makes a HuggingFace Trainer write its checkpoints in the background.

The Trainer's own functions decide what a checkpoint holds. So overridden functions take effect, a stock Trainer resumes
from our checkpoints, and ours from stock ones. `checkpoint_saves` assembles the directory.

The Trainer has no hook for most of this, so `Attachment` replaces functions of the one instance, private ones among
them; each passes unknown arguments on.
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

from transformers import Trainer, TrainerCallback, TrainerState  # noqa: E402 - after the check of its version
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
from .sigterm import AgreedSigterm  # noqa: E402

__all__ = ["Attachment", "FastPersistCallback", "attach", "last_checkpoint"]

_log = logging.getLogger("fastpersist")

_WAITING_FIRST = ("hyperparameter_search", "_load_best_model", "_finalize_training")
_WAITING_HERE = ("evaluate", "predict")  # may run on one rank only: the next collective step reports errors
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
    constant: object = (),
) -> Attachment:
    """Make a Trainer write its checkpoints in the background, and publish each as a whole.

    A checkpoint has the Trainer's files and a MANIFEST.json. The Trainer's rotation runs when the new checkpoint is
    durable. These wait for the save under way: another save, evaluation, prediction, loading the best model, the end of
    train(), and a hyper-parameter search. These saves are synchronous: the last one of the training, one that is pushed
    to the hub, one at SIGTERM, and one by a subclass that overrides `_save_checkpoint` (it may use the directory). With
    several ranks and enable_jit_checkpoint, a SIGTERM to any rank makes all of them save at the end of the same step.

    With DDP each rank holds a replica of weights and optimizer and writes a part of them; the files are the same. The
    coordinator writes alone where the trainer's class overrides `save_model`, `_save` or
    `_save_optimizer_and_scheduler`, the model's class `save_pretrained` or `state_dict`, or the optimizer's class
    `state_dict`: such a function may be meant for one rank.

    With FSDP and SHARDED_STATE_DICT each rank writes its shards under Accelerate's names; `FastPersistReader` reads
    them on any number of ranks. With FULL_STATE_DICT the coordinator writes the gathered state. Both are written and
    published in the background.

    `train(resume_from_checkpoint=True)` takes the newest whole checkpoint, and warns about those it skips. An exception
    that ends train() propagates after the save under way has finished.

    Args:
        trainer: A Trainer: one process, or several with DDP, DataParallel or FSDP; one machine, or a shared output_dir.
        on_save: "published": callbacks hear of a save at the end of the first step after its publication, with a copy
            of the state as it was saved. "sync": every save is published before the Trainer goes on.
        on_error: What to do about a storage error. "raise": train() raises it at the end of a step, or the next call
            that saves or waits does. "warn": issue a RuntimeWarning and go on. Either way the error is logged, and
            callbacks do not hear of that save. An error of another rank is a PeerError that names the rank.
        engine: "auto", or an engine's name, which then never falls back.
        writers: With DDP, the ranks that write replicated state: "all", "node" (one of each machine), a number, or
            "auto": up to 8 on one machine, or one on each of several. 1: the coordinator alone, also where replicas
            differ.
        constant: Modules and tensors that never change, such as a frozen encoder: they are not copied. Frozen weights
            that are not named are copied before a save returns, as other code may change them (an EMA teacher).

    Returns:
        The attachment; its `detach` removes it.

    Raises:
        ConfigError: Unknown options, a trainer that is attached already, or a strategy that saves by itself (DeepSpeed,
            FSDP of XLA, …).

    Thread safety: the thread that trains.
    """
    if on_save not in ("published", "sync"):
        raise ConfigError(f"on_save must be 'published' or 'sync', not {on_save!r}")
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"attach() takes a transformers.Trainer, not a {type(trainer).__name__}")
    if isinstance(trainer.__dict__.get(_ATTRIBUTE), Attachment):
        raise ConfigError("this trainer is attached already: detach() that first")
    if "_save_checkpoint" in trainer.__dict__:
        raise ConfigError("other code has replaced this trainer's _save_checkpoint: call attach(trainer) before it")
    refuse_unsupported(trainer.args, trainer.model)
    saves = CheckpointSaves(on_error=on_error, engine=engine, writers=writers, constant=constant)
    return Attachment(trainer, saves, always_wait=on_save == "sync")


class Attachment:
    """The saves of one Trainer; `attach` makes it."""

    def __init__(self, trainer: Trainer, saves: CheckpointSaves, *, always_wait: bool) -> None:
        self._trainer: Any = trainer
        self.saves = saves
        self._always_wait = always_wait
        self._held: list[tuple[Flight, Any, Any]] = []  # calls of on_save that wait for their save, oldest first
        self._expected: Flight | None = None  # the save that the next on_save belongs to
        self._dropped = False  # the next on_save belongs to a save that has failed already
        self._replaced: dict[str, tuple[Any, Function, dict[str, Function]]] = {}  # owner, wrapper, own attribute
        self._is_overridden = type(trainer)._save_checkpoint is not Trainer._save_checkpoint
        if self._is_overridden:
            self._always_wait = True
            _inherited_save.hold()
            _log.info("%s overrides _save_checkpoint: each save is published before it returns", type(trainer).__name__)
        else:
            self._replace(trainer, "_save_checkpoint", self.save_checkpoint)
        self._replace(trainer, "train", self._train)
        self._replace(trainer, "log", self._log)
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
        self._sigterm = AgreedSigterm(trainer)
        if self._sigterm.manager is not None:
            self._replace(self._sigterm.manager, "_enable_checkpoint", self._sigterm.ask)
        self._callback = _GateCallback(self)
        trainer.callback_handler.callbacks.insert(0, self._callback)  # first: pass the gate before other callbacks run
        setattr(trainer, _ATTRIBUTE, self)

    # --- for users

    def pending(self) -> PendingSave | None:
        """Return the save under way, or this rank's part of it; None if there is none."""
        return self.saves.pending

    def wait(self) -> None:
        """Wait for the save under way, and notify callbacks. With several ranks, all call it.

        Raises:
            FastPersistError, …: With on_error="raise": the save has failed.
        """
        self.saves.finish()
        trainer = self._trainer
        trainer.control = self.deliver(trainer.control)

    def detach(self) -> None:
        """Wait, and restore the Trainer's functions. Idempotent.

        Raises:
            FastPersistError, …: As in `wait`; the Trainer is detached all the same.
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
        """Replace Trainer._save_checkpoint."""
        trainer = self._trainer
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        at_once = self._always_wait or trainer.args.push_to_hub or trainer.control.should_training_stop
        self._expected, self._dropped = None, False
        self.saves.settle()
        trainer.control = self.deliver(trainer.control)  # before a rotation that this save may bring
        flight = self.saves.save(trainer, trainer._get_output_dir(trial=trial), synchronous=at_once)
        if flight is None or flight.published is False:
            self._dropped = True
        elif flight.published is None:
            self._expected = flight
        elif trainer.args.push_to_hub:
            trainer._push_from_checkpoint(flight.path)

    def _on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        """Replace CallbackHandler.on_save, which the Trainer calls right after a save."""
        flight, self._expected = self._expected, None
        dropped, self._dropped = self._dropped, False
        control = self.deliver(control)
        if flight is not None:
            self._held.append((flight, args, _copy_of(state)))
        elif not dropped:
            return self._stock_on_save(args, state, control, **keywords)
        control.should_save = False
        return control

    def _log(self, logs: dict[str, float], *others: Any, **options: Any) -> Any:
        """Replace Trainer.log: add the costs of the saves that have finished by now."""
        return self._stock("log")({**logs, **self.saves.figures.take()}, *others, **options)

    def log_rest(self) -> None:
        """Log the costs of the last saves, after the Trainer's last line."""
        self.saves.figures.log_by(lambda found: self._stock("log")(dict(found)))

    def _train(self, resume_from_checkpoint: Any = None, *others: Any, **options: Any) -> Any:
        """Replace Trainer.train."""
        self.wait()
        self._sigterm.begin()
        if resume_from_checkpoint is True:
            found = from_first_rank(lambda: last_checkpoint(self._trainer.args.output_dir))
            resume_from_checkpoint = found or True  # without a checkpoint, the Trainer raises its own error
        try:
            outcome = self._stock("train")(resume_from_checkpoint, *others, **options)
            self.wait()
        except BaseException:
            self.saves.finish_quietly()
            self._deliver_quietly()
            raise
        return outcome

    def _waiting(self, stock: Function, *, is_local: bool) -> Function:
        """Wrap a function to wait for the save under way first."""

        def waiting(*args: Any, **options: Any) -> Any:
            if is_local and self._trainer.args.world_size > 1:
                self.saves.join()
            elif is_local:
                self.saves.finish()  # callbacks hear of it at the end of the next step
            else:
                self.wait()
            return stock(*args, **options)

        return waiting

    def _loading(self, stock: Function) -> Function:
        """Wrap a function to read shards with `FastPersistReader`."""

        @functools.wraps(stock)
        def loading(*args: Any, **options: Any) -> Any:
            with sharded_loads(self._trainer, self.saves.engine):
                return stock(*args, **options)

        return loading

    # --- notifying callbacks

    def at_step_end(self, control: Any) -> Any:
        """Let all ranks save if one got SIGTERM; notify callbacks if a save has finished."""
        self._sigterm.agree()
        self.saves.poll()
        return self.deliver(control)

    def deliver(self, control: Any) -> Any:
        """Notify callbacks of the saves that are published by now, in order."""
        while self._held and self._held[0][0].published is not None:
            flight, args, state = self._held.pop(0)
            if flight.published:
                wanted = control.should_save
                control = self._stock_on_save(args, state, control)
                control.should_save = control.should_save or wanted  # a save that is due at this step stays due
        return control

    def _deliver_quietly(self) -> None:
        try:
            self.deliver(self._trainer.control)
        except Exception:  # noqa: BLE001 - another exception is propagating
            _log.exception("a callback failed in on_save")
        self._held.clear()

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


# For subclasses that override _save_checkpoint and call Trainer's: it saves by FastPersist if the trainer is attached.
_inherited_save = Replacement(lambda: [(Trainer, "_save_checkpoint")], _inherit)  # type: ignore[list-item]


class _GateCallback(TrainerCallback):
    """Passes the gate before each step, and notifies callbacks of saves after it."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait until the parameters may change."""
        self._attachment.saves.wait_captured()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Notify callbacks of finished saves."""
        return self._attachment.at_step_end(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Wait for the last save, and notify callbacks."""
        self._attachment.saves.finish()
        self._attachment.log_rest()
        return self._attachment.deliver(control)


def _copy_of(state: TrainerState) -> TrainerState:
    """Copy the state deeply, except for the entries of the log, which never change."""
    log_history = state.log_history
    copied = copy.copy(state)
    copied.log_history = []
    copied = copy.deepcopy(copied)
    copied.log_history = list(log_history)
    return copied


# ------------------------------------------------------------------------------------------- resuming


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Find the newest whole checkpoint-N of a directory, and warn about newer ones that are not whole.

    This reads our checkpoints completely and compares their checksums. A stock Trainer writes no checksums: its tensor
    files must be complete, and weights and trainer_state.json must exist.

    Returns:
        Its path, for `train(resume_from_checkpoint=…)`; None if there are no checkpoints.

    Raises:
        CheckpointNotFoundError: There are checkpoints, but none is whole.

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
            # Foreign files in the directory, such as those of a callback's on_save, are no damage.
            blamed = None if own is None else {*own, _MANIFEST_NAME, ""}
            damages = [one for one in verify(path).damages if blamed is None or one.file in blamed]
            if not damages or not _is_saved_over(path, {one.file for one in damages}):
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


def _is_saved_over(path: str, names: set[str]) -> bool:
    """Tell whether a stock Trainer has completely saved over a checkpoint of ours.

    In this case the files that differ from the manifest are newer than the manifest, and the newest is
    trainer_state.json, which a Trainer writes last. A copy in the order of names also has such times, but its
    trainer_state.json is unchanged.
    """
    if names & {"", _MANIFEST_NAME} or TRAINER_STATE_NAME not in names:
        return False
    try:
        ours, last = (os.stat(os.path.join(path, name)).st_mtime_ns for name in (_MANIFEST_NAME, TRAINER_STATE_NAME))
        return all(ours < os.stat(os.path.join(path, name)).st_mtime_ns <= last for name in names)
    except FileNotFoundError:
        return False


def _inspect(path: str) -> None:
    try:
        inspect(path)
    except UnsupportedError:  # a format without a table of contents cannot be checked
        pass
