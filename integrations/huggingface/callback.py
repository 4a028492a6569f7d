"""Background checkpoints for programs that can pass callbacks to a HuggingFace Trainer, but cannot attach to it.

`huggingface.attach` does more. A callback knows less than the Trainer, and runs before the Trainer saves, so it cannot
write all that a Trainer writes; `FastPersistCallback` lists the differences. The Trainer's own functions make the
files, on a stand-in object with the attributes that they use.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accelerate.utils import extract_model_from_parallel  # type: ignore[import-untyped]
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from fastpersist import ConfigError, PendingSave

from .checkpoint_saves import CheckpointSaves, refuse_unsupported

__all__ = ["FastPersistCallback"]


class FastPersistCallback(TrainerCallback):
    """Save a Trainer's checkpoints in the background: Trainer(..., callbacks=[FastPersistCallback()]).

    It takes over the saves that are due by steps or epochs, and writes the same files to the same place. Unlike
    `attach`, it saves the state before the step is logged and evaluated. So trainer_state.json lacks this step's
    entries, and the best metric is that of the evaluation before. The random generators are saved before an evaluation
    that draws from them, so a resumed training diverges. total_flos is that of the last log entry. States of other
    callbacks are those at the start of the training; their on_save is not called.

    `train(resume_from_checkpoint=True)` is the Trainer's own; `last_checkpoint(output_dir)` finds the newest whole
    checkpoint. An exception that ends train() does not wait for the save under way; the end of the program does.

    Args:
        on_error: What to do about a storage error. "raise": train() raises it, at the end of a step, at the next save,
            or at its end. "warn": issue a RuntimeWarning and go on. Either way the error is logged.
        engine: "auto", or an engine's name, which then never falls back.
        writers: With DDP, the ranks that write replicated state, as in `attach`.
        constant: Modules and tensors that never change, as in `attach`.

    Raises:
        ConfigError: Unknown options; and, from train(): save_strategy="best", load_best_model_at_end, push_to_hub, a
            gradient scaler (fp16), FSDP, or a strategy that saves by itself.
    """

    def __init__(
        self, *, on_error: str = "raise", engine: str = "auto", writers: str | int = "auto", constant: object = ()
    ) -> None:
        self._saves = CheckpointSaves(on_error=on_error, engine=engine, writers=writers, constant=constant)

    def pending(self) -> PendingSave | None:
        """Return the save under way, or this rank's part of it; None if there is none."""
        return self._saves.pending

    def wait(self) -> None:
        """Wait for the save under way. With several ranks, all call it.

        Raises:
            FastPersistError, …: With on_error="raise": the save has failed.
        """
        self._saves.finish()

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Raise for options that a callback cannot support."""
        self._saves.finish()
        refuse_unsupported(args, known.get("model"))
        for unsupported, name in (
            (args.save_strategy == SaveStrategy.BEST, 'save_strategy="best"'),
            (args.load_best_model_at_end, "load_best_model_at_end=True"),
            (args.push_to_hub, "push_to_hub=True"),
            (getattr(known.get("optimizer"), "scaler", None) is not None, "fp16=True"),
            (args.fsdp, "FSDP"),
        ):
            if unsupported:
                raise ConfigError(
                    f"FastPersistCallback does not support {name}, because callbacks know too little of it: use "
                    "fastpersist.integrations.huggingface.attach(trainer) instead"
                )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait until the parameters may change."""
        self._saves.wait_captured()

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> Any:
        """Save, if it is due."""
        return self._save_if_due(args, state, control, known)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **known: Any) -> Any:
        """Save, if it is due."""
        return self._save_if_due(args, state, control, known)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the last save."""
        self._saves.finish()

    def _save_if_due(self, args: Any, state: Any, control: Any, known: dict[str, Any]) -> Any:
        self._saves.poll()
        if control.should_save:
            control.should_save = False  # as after a save of the Trainer
            self._saves.save(_StandIn(args, state, control, known), args.output_dir, synchronous=False)
        return control


class _StandIn(Trainer):
    """A Trainer with the attributes that its saving functions use; never trains."""

    def __init__(self, args: Any, state: Any, control: Any, known: dict[str, Any]) -> None:
        collate = getattr(known.get("train_dataloader"), "collate_fn", None)
        own: Any = self
        own.args, own.state, own.control = args, state, control
        own.model = own.model_wrapped = known["model"]
        own.optimizer, own.lr_scheduler = known["optimizer"], known["lr_scheduler"]
        own.processing_class = known.get("processing_class")
        own.data_collator = getattr(collate, "data_collator", collate)  # the Trainer wraps it to drop columns
        own.callback_handler = SimpleNamespace(callbacks=[])
        own.accelerator = SimpleNamespace(unwrap_model=_unwrapped, scaler=None)
        own.is_deepspeed_enabled = own.is_fsdp_enabled = own.is_distributed_loading_by_transformers = False
        own.is_fsdp_xla_enabled = own.is_fsdp_xla_v1_enabled = own.is_fsdp_xla_v2_enabled = False


def _unwrapped(model: Any, **options: Any) -> Any:
    return extract_model_from_parallel(model, **options)
