"""One of two processes that train with DDP over gloo: python -m support.huggingface_ranks RANK PORT WAY FAULT.

It works in the current directory and prints what callbacks heard, one line for each, and at the end how it ended.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from typing import Any


def main(rank: str, port: str, way: str, fault: str) -> None:
    """Train as a stock Trainer, with ours attached ("ours"), or with the callback ("callback")."""
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, ACCELERATE_USE_CPU="true")
    import errno

    import torch.distributed as dist
    from support.huggingface_trainers import At, trainer_for

    import fastpersist as fp
    from fastpersist.filesystem import Filesystem, using
    from fastpersist.integrations.huggingface import FastPersistCallback, attach

    class Full(Filesystem):
        def allocate(self, fd: int, size_bytes: int, path: str) -> None:
            if "checkpoint-4" in path:
                raise fp.NoSpaceError(errno.ENOSPC, f"allocating {path}: disk full", path)
            super().allocate(fd, size_bytes, path)

    def hear(state: Any, control: Any) -> None:
        print(f"heard of {state.global_step} at {trainer.state.global_step}", flush=True)

    callbacks = [At("on_save", hear)] + ([FastPersistCallback(on_error="warn")] if way == "callback" else [])
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "ddp_backend": "gloo", "callbacks": callbacks}
    trainer = trainer_for(eval_strategy="steps", eval_steps=4, save_total_limit=3, **options)
    if way == "ours":
        attach(trainer, on_error="raise" if fault == "raise" else "warn")
    if fault == "part" and rank == "1":

        def fail(output_dir: str) -> None:
            raise TypeError("rank 1 fails")

        trainer._save_rng_state = fail
    try:
        with using(Full()) if fault in ("warn", "raise") else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train(resume_from_checkpoint=fault == "resume")
        print(f"ended at {trainer.state.global_step}", flush=True)
    except (fp.FastPersistError, TypeError, RuntimeError) as error:
        print(f"ended by {type(error).__name__}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
