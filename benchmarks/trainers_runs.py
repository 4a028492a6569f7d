"""A process of trainers.py: trains a small GPT-2 through one framework, saves in one way, and measures the times.

The model, the data and the optimizer are the same in all frameworks; the loop and the way of saving differ.
A step is counted from the end of one optimizer step to the end of the next. A stall is the time inside the call that
saves plus the waits at the gate. Durable means: files and names survive a power loss; stock saving does not promise
that, so for it one more save is made after the training, and its files are synced.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import fastpersist as fp
from fastpersist.cli.bench.save_rows import sync_below
from fastpersist.saving import capture

__all__ = ["FRAMEWORKS", "WAYS", "train"]

WAYS = ("none", "stock", "fastpersist")
_SEED = 20261
_KEPT_COUNT = 2


class _Stopwatch:
    """Records when optimizer steps end, the stall of saves, and when saves are durable."""

    def __init__(self) -> None:
        self.step_ends: list[float] = []
        self.save_steps: list[int] = []
        self.save_s: list[float] = []
        self.gate_s: list[float] = []
        self.durable_s: list[float] = []
        register_optimizer_step_post_hook(lambda *_: self.step_ends.append(time.perf_counter()))
        self._time_gates()

    def _time_gates(self) -> None:
        wait, stopwatch = capture.Capture.wait_captured, self

        def timed(self: capture.Capture, timeout_s: float | None = None) -> None:
            start = time.perf_counter()
            wait(self, timeout_s)
            stopwatch.gate_s.append(time.perf_counter() - start)

        capture.Capture.wait_captured = timed  # type: ignore[method-assign]

    def saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that saves."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = save(*arguments, **keywords)
            self.save_steps.append(len(self.step_ends))
            self.save_s.append(time.perf_counter() - start)
            return result

        return timed

    def follow(self, pending: fp.PendingSave) -> None:
        """Note when a save is durable, counted from now."""
        start = time.perf_counter()
        pending.when_finished(lambda: self.durable_s.append(time.perf_counter() - start))


def _model(job: dict[str, Any]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(_SEED)
    size = {"n_layer": 2, "n_embd": 32, "n_head": 2} if job["is_tiny"] else {"n_layer": 8, "n_embd": 512, "n_head": 8}
    vocabulary_count = _vocabulary_count(job)
    return GPT2LMHeadModel(
        GPT2Config(**size, vocab_size=vocabulary_count, n_positions=256, bos_token_id=0, eos_token_id=0)
    )


def _vocabulary_count(job: dict[str, Any]) -> int:
    return 500 if job["is_tiny"] else 50257


class _Tokens(torch.utils.data.Dataset[Any]):
    def __init__(self, job: dict[str, Any]) -> None:
        random = torch.Generator().manual_seed(_SEED)
        shape = (job["step_count"] * job["batch_count"], job["sequence_count"])
        self._tokens = torch.randint(_vocabulary_count(job), shape, generator=random)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _batches(job: dict[str, Any]) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(_Tokens(job), batch_size=job["batch_count"])


def _keep_newest(paths: list[Path]) -> None:
    """Remove all checkpoints but the newest, as training scripts do."""
    while len(paths) > _KEPT_COUNT:
        old = paths.pop(0)
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)


def _torch(job: dict[str, Any], watch: _Stopwatch) -> Callable[[], None]:
    model = _model(job)
    optimizer = _optimizer(model)
    paths: list[Path] = []

    def save() -> None:
        path = Path(job["root"], f"{len(watch.step_ends)}-{time.monotonic_ns()}.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        paths.append(path)

    if job["way"] == "fastpersist":
        fp.install(async_=True)
        _follow_all(watch)
    timed_save = watch.saving(save)
    for step, batch in enumerate(_batches(job), 1):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if job["way"] != "none" and step % job["every"] == 0:
            timed_save()
            _keep_newest(paths)
    fp.uninstall()
    return save


def _huggingface(job: dict[str, Any], watch: _Stopwatch) -> Callable[[], None]:
    from transformers import Trainer, TrainingArguments

    model = _model(job)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=job["root"],
            max_steps=job["step_count"],
            per_device_train_batch_size=job["batch_count"],
            save_strategy="no" if job["way"] == "none" else "steps",
            save_steps=job["every"],
            save_total_limit=_KEPT_COUNT,
            logging_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=_Tokens(job),
        optimizers=(_optimizer(model), None),
    )
    if job["way"] == "fastpersist":
        from fastpersist.integrations.huggingface import attach

        attach(trainer)
        _follow_all(watch)
    save = trainer._save_checkpoint
    trainer._save_checkpoint = watch.saving(save)
    trainer.train()
    return lambda: save(trainer.model, None)


def _lightning(job: dict[str, Any], watch: _Stopwatch) -> Callable[[], None]:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(job)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self.model)

    callbacks: list[Any] = []
    plugins: list[Any] = []
    if job["way"] != "none":
        callbacks.append(ModelCheckpoint(job["root"], every_n_train_steps=job["every"], save_top_k=1))
    if job["way"] == "fastpersist":
        from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO

        callbacks.append(FastPersistCallback())
        plugins.append(FastPersistCheckpointIO())
        _follow_all(watch)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=job["step_count"],
        callbacks=callbacks,
        plugins=plugins,
        enable_checkpointing=job["way"] != "none",
        gradient_clip_val=None,
        **quiet,
    )
    trainer.save_checkpoint = watch.saving(trainer.save_checkpoint)
    trainer.fit(Module(), _batches(job))
    return lambda: type(trainer).save_checkpoint(trainer, os.path.join(job["root"], "last.ckpt"))


def _accelerate(job: dict[str, Any], watch: _Stopwatch) -> Callable[[], None]:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    configuration = ProjectConfiguration(
        project_dir=job["root"], automatic_checkpoint_naming=True, total_limit=_KEPT_COUNT
    )
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = _model(job)
    model, optimizer, batches = accelerator.prepare(model, _optimizer(model), _batches(job))
    save: Callable[[], Any] = accelerator.save_state
    if job["way"] == "fastpersist":
        from fastpersist.integrations.accelerate import save_state, wait

        def save() -> Any:
            return save_state(accelerator)

        _follow_all(watch)
    timed_save = watch.saving(save)
    for step, batch in enumerate(batches, 1):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if job["way"] != "none" and step % job["every"] == 0:
            timed_save()
    if job["way"] == "fastpersist":
        wait(accelerator)
    return save


def _follow_all(watch: _Stopwatch) -> None:
    """Record, for every later save, when it is durable."""
    made = fp.PendingSave.__init__

    def followed(self: fp.PendingSave, *arguments: Any) -> None:
        made(self, *arguments)
        watch.follow(self)

    fp.PendingSave.__init__ = followed  # type: ignore[method-assign]


FRAMEWORKS: dict[str, Callable[[dict[str, Any], _Stopwatch], Callable[[], None]]] = {
    "torch": _torch,
    "huggingface": _huggingface,
    "lightning": _lightning,
    "accelerate": _accelerate,
}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train as the job says; return samples as JSON can carry them."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    watch = _Stopwatch()
    save = FRAMEWORKS[job["framework"]](job, watch)
    ended = time.perf_counter()
    if job["way"] == "stock":
        for _ in range(3):
            start = time.perf_counter()
            save()
            sync_below(job["root"])
            watch.durable_s.append(time.perf_counter() - start)
    return {
        "intervals_s": list(_differences(watch.step_ends)),
        "save_steps": watch.save_steps,
        "save_s": watch.save_s,
        "gate_s": sum(watch.gate_s),
        "durable_s": watch.durable_s,
        "tail_s": ended - watch.step_ends[-1],
        "checkpoint_bytes": _newest_bytes(job["root"]),
    }


def _differences(times: list[float]) -> Iterator[float]:
    return (after - before for before, after in itertools.pairwise(times))


def _newest_bytes(root: str) -> int:
    """Return the largest sum of bytes of a checkpoint below the root: a file, or a directory of files."""
    sizes: dict[str, int] = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = os.path.join(directory, name)
            key = path if directory == root else directory
            sizes[key] = sizes.get(key, 0) + os.path.getsize(path)
    return max(sizes.values(), default=0)


def median_of(values: list[float]) -> float:
    """Return the median, 0.0 of nothing."""
    return statistics.median(values) if values else 0.0
