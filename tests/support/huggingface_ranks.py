"""A training with DDP over gloo on two ranks, each a fork of this process, by a stock Trainer or with ours.

Each rank returns what callbacks heard, one line for each, and at the end how it ended.
"""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 - what ranks import on their way is imported here once: they are forks
from support.filesystems import FullFor
from support.huggingface_trainers import At, trainer_for
from support.process_groups import run_ranks

import fastpersist as fp
from fastpersist.commit.filesystem import using
from fastpersist.integrations.huggingface import FastPersistCallback, attach


def train(directory: Path, way: str, fault: str = "none") -> list[list[str]]:
    """Train in a directory on two ranks, "stock", "ours" (attached) or "callback"; return the lines of each."""
    directory.mkdir(exist_ok=True)
    variables = {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "1"}  # the port is asked for, and not used: they have met
    return run_ranks(2, _train_on_this_rank, directory, way, fault, timeout_s=100, environment=variables)


def _train_on_this_rank(rank: int, _count: int, directory: Path, way: str, fault: str) -> list[str]:
    os.chdir(directory)
    lines: list[str] = []

    def hear(state: Any, control: Any) -> None:
        lines.append(f"heard of {state.global_step} at {trainer.state.global_step}")

    def signal() -> None:  # as the Trainer's timer does it after the signal
        managers = [getattr(one, "jit_manager", None) for one in trainer.callback_handler.callbacks]
        next(one for one in managers if one is not None)._enable_checkpoint()

    def signal_in_the_middle(state: Any, control: Any) -> None:
        if state.global_step == 4 and "ended at 5" not in lines:
            signal()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [At("on_save", hear)] + ([FastPersistCallback(on_error="warn")] if way == "callback" else [])
        options: dict[str, Any] = {"per_device_train_batch_size": 4, "ddp_backend": "gloo", "callbacks": callbacks}
        if fault == "sigterm":
            options["enable_jit_checkpoint"] = True
        else:
            options["save_total_limit"] = 3  # not with two trainings: it depends on time which of their checkpoints go
        trainer = trainer_for(eval_strategy="steps", eval_steps=4, **options)
        if fault == "sigterm" and rank == 1:
            trainer.callback_handler.callbacks.insert(0, At("on_step_begin", signal_in_the_middle))
        if way == "ours":
            attach(trainer, on_error="raise" if fault == "raise" else "warn")
        if fault == "part" and rank == 1:

            def fail(output_dir: str) -> None:
                raise TypeError("rank 1 fails")

            trainer._save_rng_state = fail
        try:
            with using(FullFor("checkpoint-4")) if fault in ("warn", "raise") else nullcontext():
                trainer.train(resume_from_checkpoint=fault == "resume")
            lines.append(f"ended at {trainer.state.global_step}")
            if fault == "sigterm":
                if rank == 0:
                    signal()  # late: this training has ended
                trainer.train()
                lines.append(f"ended at {trainer.state.global_step}")
        except (fp.FastPersistError, TypeError, RuntimeError) as error:
            lines.append(f"ended by {type(error).__name__}: {error}")
    return lines
