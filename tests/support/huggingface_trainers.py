"""Tiny HuggingFace trainings, and the comparison of what they saved with what a stock Trainer saves.

Two runs that are to be compared work in directories of their own and name their output alike, so that the path that
the Trainer writes into its files is the same. Dropout is on: without the generator's state no resume is bit-exact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from support.sameness import assert_same
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import fastpersist as fp
from fastpersist.integrations.huggingface import Attachment, attach

torch.set_num_threads(1)

OUTPUT = "run"
ROWS, CONTEXT, VOCABULARY = 32, 8, 64
TIMES = ("_runtime", "_per_second")  # what no two runs have in common


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Make a model of some 9,000 parameters, two of them tied."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


class PlainModel(torch.nn.Module):
    """A model that transformers knows nothing of, with a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Embedding(VOCABULARY, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Predict each token from itself."""
        logits = self.head(self.norm(self.token(input_ids).flatten(0, 1)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels.flatten()), "logits": logits}


def rows(count: int = ROWS) -> list[dict[str, torch.Tensor]]:
    """Make sequences to learn."""
    found = [(torch.arange(CONTEXT) * (row % 5 + 1) + row) % VOCABULARY for row in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in found]


def arguments(output: object = OUTPUT, **options: Any) -> TrainingArguments:
    """Make arguments for eight steps in two epochs."""
    usual: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**usual, **options})


def trainer_for(
    model: torch.nn.Module | None = None, *, kind: Callable[..., Trainer] = Trainer, **options: Any
) -> Trainer:
    """Make a trainer; what is no argument of Trainer's goes to the TrainingArguments."""
    own = {name: options.pop(name) for name in ("callbacks", "processing_class", "optimizers") if name in options}
    dataset = rows()
    model = tiny_gpt2() if model is None else model
    return kind(model=model, args=arguments(**options), train_dataset=dataset, eval_dataset=dataset[:8], **own)


@contextmanager
def working_in(directory: Path) -> Iterator[Path]:
    """Work in a directory, made if need be; gives the output directory in it."""
    directory.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield directory / OUTPUT
    finally:
        os.chdir(before)


class StopAfter(TrainerCallback):
    """End the training after a step, as if the machine went away between two steps: without another save."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Stop."""
        if state.global_step == self._step:
            raise KeyboardInterrupt
        return control


class At(TrainerCallback):
    """Call something at an event, with state and control; what it returns is the new control, if it is not None."""

    def __init__(self, event: str, call: Callable[[Any, Any], Any]) -> None:
        setattr(self, event, lambda args, state, control, **_: call(state, control))


def attached(**options: Any) -> tuple[Trainer, Attachment]:
    """Make a trainer with ours attached; takes the options of both."""
    own = {name: options.pop(name) for name in ("on_save", "on_error", "engine") if name in options}
    trainer = trainer_for(**options)
    return trainer, attach(trainer, **own)


def checkpoints_in(output: Path) -> list[str]:
    """Name the checkpoints, oldest first."""
    return sorted((path.name for path in output.glob("checkpoint-*")), key=lambda name: int(name.split("-")[1]))


def files_below(directory: Path) -> set[str]:
    """Name all files."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def assert_like_stock(ours: Path, stock: Path) -> None:
    """Fail unless our checkpoint is whole, and holds what the stock Trainer's holds."""
    report = fp.verify(ours)
    assert report.ok, report.damages
    names = files_below(stock)
    assert files_below(ours) == names | {"MANIFEST.json"}
    for name in sorted(names):
        assert_same_file(ours / name, stock / name)


def assert_same_file(ours: Path, stock: Path) -> None:
    """Fail unless two files hold the same, as their readers see it."""
    if ours.suffix == ".safetensors":
        assert_same(_safetensors(ours), _safetensors(stock))
    elif ours.suffix in (".pt", ".pth", ".bin"):
        assert_same(torch.load(ours, weights_only=False), torch.load(stock, weights_only=False))
    elif ours.name == "trainer_state.json":
        assert _without_times(json.loads(ours.read_text())) == _without_times(json.loads(stock.read_text()))
    else:
        assert ours.read_bytes() == stock.read_bytes(), ours.name


def _safetensors(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != "fastpersist.crc32"}
        return metadata, {name: file.get_tensor(name) for name in sorted(file.keys())}


def _without_times(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "log_history": losses(state["log_history"])}


def losses(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log without what depends on the clock, and without what we add to it."""
    kept = [
        {key: value for key, value in entry.items() if not key.endswith(TIMES) and not key.startswith("checkpoint_")}
        for entry in log_history
    ]
    return [entry for entry in kept if entry.keys() - {"epoch", "step"}]
