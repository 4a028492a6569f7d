"""Checkpoints beside the training where only callbacks can be given to a HuggingFace Trainer, not the Trainer attached.

`huggingface.attach` does more. A callback is told less than the Trainer knows and earlier than the Trainer saves, so
some of what a Trainer writes cannot be had here; `FastPersistCallback` says what. The files are made by the Trainer's
own functions, on an object that has of a Trainer just what they use.
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
    """Save a Trainer's checkpoints while it trains on: Trainer(..., callbacks=[FastPersistCallback()]).

    It takes over what is due by steps or by epochs, and writes the same files to the same place. With less than
    `attach` does: the state is saved before that step is logged and evaluated, so trainer_state.json lacks the entries
    of this very step, the best metric is that of the evaluation before, and the random generators are where they were
    before an evaluation that draws from them, so that a resumed training goes another way. total_flos is that of the
    last entry of the log, and states of other callbacks are those of the beginning. Their on_save is not called.

    `train(resume_from_checkpoint=True)` is the Trainer's own; `last_checkpoint(output_dir)` finds the newest that is
    whole. An exception that ends train() does not wait for the save under way; the end of the program does.

    Args:
        on_error: What becomes of an error of the disk. "raise": train() raises it, at the end of a step, at the next
            save, or at its end. "warn": a RuntimeWarning, and training goes on. It is in the log in any case.
        engine: "auto", or an engine's name, which then never falls back.
        writers: With DDP, the ranks that write what all hold, as in `attach`.

    Raises:
        ConfigError: Unknown options; and, from train(): save_strategy="best", load_best_model_at_end, push_to_hub, a
            gradient scaler (fp16), FSDP, or a strategy with savers of its own.
    """

    def __init__(self, *, on_error: str = "raise", engine: str = "auto", writers: str | int = "auto") -> None:
        self._saves = CheckpointSaves(on_error=on_error, engine=engine, writers=writers)

    def pending(self) -> PendingSave | None:
        """Return the save that is under way, or this rank's part of it; None without one, or without a part."""
        return self._saves.pending

    def wait(self) -> None:
        """Wait for the save that is under way. With several ranks, all call it.

        Raises:
            FastPersistError, …: With on_error="raise": it has failed.
        """
        self._saves.finish()

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Refuse what a callback cannot do."""
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
                    f"FastPersistCallback cannot do {name}, which callbacks learn too little about: use "
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
            control.should_save = False  # as it is when the Trainer has saved
            self._saves.save(_StandIn(args, state, control, known), args.output_dir, synchronous=False)
        return control


class _StandIn(Trainer):
    """Has the functions of a Trainer that save, and what they use; never trains."""

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
