"""Two ranks with DDP hold the same weights and optimizer: both write them, and the files are those of one rank."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from support.huggingface_trainers import (
    CONTEXT,
    OUTPUT,
    At,
    PlainModel,
    assert_like_stock,
    checkpoints_in,
    trainer_for,
    working_in,
)
from support.process_groups import RankEnding, rank_endings, run_ranks
from support.runs import hidden_names
from support.training import PATIENCE_S
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.distributed.follower_file import FollowerFile
from fastpersist.integrations._shared.redirection import saves_into
from fastpersist.integrations.huggingface import FastPersistCallback, attach

MIB = 1 << 20
BLOCK_BYTES = 4096
BOTH = ["model.safetensors", "optimizer.pt"]


def wide_gpt2() -> GPT2LMHeadModel:
    """Make a model with one parameter of more than 1 MiB."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 20_000, "n_positions": CONTEXT, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


class FrozenModel(PlainModel):
    """Has a large parameter that is not trained, beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.arange(400_000.0), requires_grad=False)


class SavesItself(Trainer):
    """Overrides one of the functions that put the files together."""

    def _save(self, *arguments: Any, **options: Any) -> None:
        super()._save(*arguments, **options)


def on_ranks(directory: Path, work: Callable[[int], Any], run: Callable[..., Any] = run_ranks) -> Any:
    """Do something on two ranks, in a directory."""
    directory.mkdir(exist_ok=True)

    def rank_of_a_trainer(rank: int, count: int) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        with working_in(directory), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work(rank)

    return run(2, rank_of_a_trainer, timeout_s=150.0, group_timeout_s=100.0, environment={"ACCELERATE_USE_CPU": "true"})


def two_rank_trainer(model: torch.nn.Module | None = None, **options: Any) -> Trainer:
    """Make a trainer for four steps and two checkpoints."""
    usual: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 2, "ddp_find_unused_parameters": False}
    return trainer_for(model or wide_gpt2(), **{**usual, **options})


def shares_of(trainer: Trainer, pending: Callable[[], fp.PendingSave | None]) -> dict[int, fp.PendingSave]:
    """Return what becomes this rank's saves, by step."""
    found: dict[int, fp.PendingSave] = {}

    def note(state: Any, control: Any) -> None:
        save = pending()
        if save is not None and save not in found.values():
            found[state.global_step] = save

    trainer.add_callback(At("on_step_begin", note))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which rank 0 writes all of it, since the trainer's class saves in its own way."""
    directory = tmp_path_factory.mktemp("alone") / "alone"

    def work(rank: int) -> Any:
        trainer = two_rank_trainer(kind=SavesItself)
        saves = shares_of(trainer, attach(trainer).pending)
        trainer.train()
        return [save.stats.bytes_by_rank for save in saves.values()]

    assert on_ranks(directory, work) == [[[]], []]
    return directory / OUTPUT


def assert_even(bytes_by_rank: list[int], file_count: int) -> None:
    first, second = bytes_by_rank
    assert first > 0
    assert abs(first - second) <= file_count * BLOCK_BYTES


@pytest.mark.parametrize("way", ["attach", "callback"])
def test_both_ranks_write_their_half_and_the_files_are_those_of_one(tmp_path: Path, alone: Path, way: str) -> None:
    def work(rank: int) -> Any:
        has_stepped = threading.Event()
        write = FollowerFile.write

        def late(self: FollowerFile, path: str, **options: Any) -> str:
            if path.endswith("checkpoint-2/model.safetensors"):
                assert has_stepped.wait(PATIENCE_S)  # the step has copied what is not written yet
            return write(self, path, **options)

        FollowerFile.write = late  # type: ignore[method-assign]
        trainer = two_rank_trainer()
        if way == "attach":
            pending = attach(trainer).pending
        else:
            callback = FastPersistCallback()
            trainer.add_callback(callback)
            pending = callback.pending
        saves = shares_of(trainer, pending)
        trainer.add_callback(At("on_step_end", lambda state, _: has_stepped.set() if state.global_step == 3 else None))
        trainer.train()
        assert list(saves) == [2]
        assert trainer.args.should_save == (rank == 0)
        assert "should_save_on_this_rank" not in vars(trainer.model)
        assert saves[2].result() == Path(OUTPUT, "checkpoint-2").absolute()
        return saves[2].stats.bytes_by_rank, saves[2].stats.bytes

    (by_rank, _), (_, own_bytes) = on_ranks(tmp_path / "run", work)
    assert_even(by_rank, 2)
    assert sum(by_rank) > 3 * MIB
    assert own_bytes == by_rank[1]
    output = tmp_path / "run" / OUTPUT
    assert checkpoints_in(output) == checkpoints_in(alone) == ["checkpoint-2", "checkpoint-4"]
    assert hidden_names(output) == []
    for name in checkpoints_in(output):
        assert fp.verify(output / name).ok
        for file in BOTH:
            assert (output / name / file).read_bytes() == (alone / name / file).read_bytes()


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_training_resumes_from_what_both_have_written(tmp_path: Path, alone: Path, kind: str) -> None:
    def work(rank: int) -> Any:
        trainer = two_rank_trainer()
        attach(trainer)
        trainer.train()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(f"{OUTPUT}/checkpoint-4")
        dist.barrier()
        resumed = two_rank_trainer()
        if kind == "ours":
            attach(resumed)
        resumed.train(resume_from_checkpoint=True)
        return trainer.state.global_step, resumed.state.global_step

    assert on_ranks(tmp_path / "run", work) == [(4, 4)] * 2
    checkpoint = tmp_path / "run" / OUTPUT / "checkpoint-4"
    if kind == "ours":
        assert_like_stock(checkpoint, without_manifest(alone / "checkpoint-4", tmp_path / "expected"))
    else:
        assert_like_stock(alone / "checkpoint-4", checkpoint)


def without_manifest(checkpoint: Path, copy: Path) -> Path:
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("MANIFEST.json"))
    return copy


def test_parameters_that_are_named_as_constant_are_shared(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        model = FrozenModel()
        trainer = two_rank_trainer(model, max_steps=4, save_only_model=True)
        saves = shares_of(trainer, attach(trainer, constant=model.frozen).pending)
        trainer.train()
        return {step: sum(save.stats.bytes_by_rank) for step, save in saves.items()}

    first, second = on_ranks(tmp_path / "run", work)
    assert first[2] > MIB
    assert set(second) == {2}
    for name in ("checkpoint-2", "checkpoint-4"):
        saved = fp.load(tmp_path / "run" / OUTPUT / name / "model.safetensors")
        assert torch.equal(saved["frozen"], torch.arange(400_000.0))


def test_adapters_are_written_by_both(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def work(rank: int) -> Any:
        config = peft.LoraConfig(r=8, target_modules=["c_attn"], modules_to_save=["wte"])
        trainer = two_rank_trainer(peft.get_peft_model(wide_gpt2(), config))
        saves = shares_of(trainer, attach(trainer).pending)
        trainer.train()
        return saves[2].stats.bytes_by_rank, dict(peft.get_peft_model_state_dict(trainer.model))

    (by_rank, weights), _ = on_ranks(tmp_path / "run", work)
    assert_even(by_rank, 2)
    checkpoint = tmp_path / "run" / OUTPUT / "checkpoint-4"
    saved = fp.load(checkpoint / "adapter_model.safetensors")
    assert set(saved) == set(weights)
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
    assert (checkpoint / "adapter_config.json").is_file()


class BadFor(Filesystem):
    """A disk that loses what is synced to one file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def sync(self, fd: int, path: str) -> None:
        if self._name in path:
            raise fp.NoSpaceError(errno.ENOSPC, f"syncing {path}: disk full", path)
        super().sync(fd, path)


def test_disk_error_of_one_rank_is_raised_on_all_and_nothing_is_left(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        trainer = two_rank_trainer()
        attach(trainer)
        with using(BadFor("checkpoint-4/optimizer.pt" if rank else "no such file")):
            trainer.train()

    first, second = endings(tmp_path / "run", work)
    assert first.error_type is fp.PeerError
    assert first.error_attributes["rank"] == 1
    assert "disk full" in first.error_text
    assert second.error_type is fp.NoSpaceError
    assert checkpoints_in(tmp_path / "run" / OUTPUT) == ["checkpoint-2"]
    assert hidden_names(tmp_path / "run" / OUTPUT) == []


def endings(directory: Path, work: Callable[[int], Any]) -> list[RankEnding]:
    return on_ranks(directory, work, rank_endings)  # type: ignore[no-any-return]


def test_training_goes_on_after_errors_of_one_rank_with_warnings_on_all(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        trainer = two_rank_trainer(max_steps=8)
        attach(trainer, on_error="warn")

        def fail(optimizer: object) -> None:
            if trainer.state.global_step == 4:
                raise fp.StorageError(None, "while the files are put together")

        def plant(state: Any, control: Any) -> None:
            if rank == 1 and state.global_step == 1:
                trainer.optimizer.optimizer.register_state_dict_pre_hook(fail)

        trainer.add_callback(At("on_step_end", plant))
        with (
            using(BadFor("checkpoint-2/model" if rank else "no such file")),
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            trainer.train()
        messages = [str(warning.message) for warning in told if "goes on without it" in str(warning.message)]
        assert len(messages) == 2
        assert "checkpoint-2" in messages[0]
        assert "disk full" in messages[0]
        assert "checkpoint-4" in messages[1]
        assert "put together" in messages[1]
        return trainer.state.global_step

    assert on_ranks(tmp_path / "run", work) == [8, 8]
    output = tmp_path / "run" / OUTPUT
    assert checkpoints_in(output) == ["checkpoint-6", "checkpoint-8"]
    assert all(fp.verify(output / name).ok for name in checkpoints_in(output))
    assert hidden_names(output) == []


class OwnModel(GPT2LMHeadModel):
    """Saves itself in its own way."""

    def save_pretrained(self, *arguments: Any, **options: Any) -> None:
        super().save_pretrained(*arguments, **options)


class OwnAdamW(torch.optim.AdamW):
    """Says what its state is in its own way."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


@pytest.mark.parametrize("replaced", ["model", "optimizer", "function of one rank", "writers", "nothing"])
def test_rank_0_writes_alone_where_stock_functions_were_replaced_and_on_request(tmp_path: Path, replaced: str) -> None:
    def work(rank: int) -> Any:
        model = wide_gpt2()
        if replaced == "model":
            model = OwnModel(model.config)
        kind = OwnAdamW if replaced == "optimizer" else torch.optim.AdamW
        trainer = two_rank_trainer(model, optimizers=(kind(model.parameters(), lr=1e-3), None))
        if replaced == "function of one rank" and rank == 1:
            save = trainer._save_optimizer_and_scheduler
            trainer._save_optimizer_and_scheduler = lambda output_dir: save(output_dir)
        saves = shares_of(trainer, attach(trainer, writers=1 if replaced == "writers" else "auto").pending)
        trainer.train()
        return list(saves), [len(save.stats.bytes_by_rank) for save in saves.values()]

    first, second = on_ranks(tmp_path / "run", work)
    assert first == ([2], [2 if replaced == "nothing" else 0])
    assert second[0] == ([2] if replaced == "nothing" else [])
    output = tmp_path / "run" / OUTPUT
    assert [fp.verify(output / name).ok for name in ("checkpoint-2", "checkpoint-4")] == [True, True]


def test_names_that_are_not_shared_are_those_of_rank_0_alone(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(400_000))])
        weights = {"a": optimizer.param_groups[0]["params"][0]}
        with fp.directory_save_together(tmp_path / "run", dist.group.WORLD) as files:
            with saves_into(files, optimizer=optimizer, shared=lambda name: name == "shared.pt"):
                if rank == 0:
                    torch.save(weights, f"{files.path}/own.pt")
                torch.save(weights, f"{files.path}/shared.pt")
                if rank == 1:
                    torch.save(lambda: "cannot be pickled", f"{files.path}/dropped.pt")
            pending = files.publish()
            pending.result()
        return pending.stats.bytes_by_rank

    by_rank = run_ranks(2, work)[0]
    assert_even(by_rank, 1)
    assert sum(by_rank) < 2 * MIB
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"own.pt", "shared.pt", "MANIFEST.json"}
