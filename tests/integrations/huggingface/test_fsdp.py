"""A Trainer with FSDP on two ranks: its checkpoints are those of stock, whole, and either resumes from the other's."""

from __future__ import annotations

import errno
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from support.filesystems import HeldUntil
from support.fsdp_on_cpu import IGNORED, accelerate_shards, shard_directories, shards_of
from support.huggingface_trainers import At, arguments, assert_same_file, checkpoints_in, files_below, losses, rows
from support.process_groups import run_ranks
from support.runs import hidden_names
from transformers import Trainer

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations.huggingface import FastPersistCallback, attach, last_checkpoint
from fastpersist.integrations.torch_dcp import FastPersistReader

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

CONFIGURATION = {"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500}


class Model(torch.nn.Module):
    """Predicts each token from itself; with dropout, so that the random state counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Embedding(64, 24)
        self.hidden = torch.nn.Linear(24, 50)
        self.drop = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(50, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        logits = self.head(self.drop(torch.tanh(self.hidden(self.token(input_ids)))))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Full(Filesystem):
    """A disk without room for the shards of one step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def sync(self, fd: int, path: str) -> None:
        if f"checkpoint-{self._step}" in path and path.endswith(".distcp"):
            raise fp.NoSpaceError(errno.ENOSPC, f"syncing {path}: disk full", path)
        super().sync(fd, path)


def trainer_on_this_rank(output: Path, kind: str, callbacks: list[Any], **options: Any) -> Trainer:
    """Make a trainer; in `accelerate_shards`."""
    torch.manual_seed(1)
    configuration = {**CONFIGURATION, "state_dict_type": kind}
    usual = {"max_steps": 6, "per_device_train_batch_size": 4}
    return Trainer(
        model=Model(),
        args=arguments(output, fsdp=True, fsdp_config=configuration, **{**usual, **options}),
        train_dataset=rows(),
        eval_dataset=rows()[:8],
        callbacks=callbacks,
    )


def train(output: Path, kind: str, *, ours: bool, resume: Any = None, on_error: str = "raise", **options: Any) -> Any:
    """Train on this rank; return the log, what was heard of, and how it ended."""
    heard: list[int] = []
    callbacks = [At("on_save", lambda state, _: heard.append(state.global_step))]
    with accelerate_shards():
        trainer = trainer_on_this_rank(output, kind, [*callbacks, *options.pop("callbacks", [])], **options)
        attachment = attach(trainer, on_error=on_error) if ours else None
        ended = "well"
        try:
            trainer.train(resume_from_checkpoint=resume)
        except (fp.FastPersistError, RuntimeError) as error:
            ended = f"{type(error).__name__}: {error}"
        if attachment is not None:
            attachment.detach()
    return losses(trainer.state.log_history), heard, ended


def assert_alike(ours: Path, stock: Path) -> None:
    """Fail unless a checkpoint of ours holds what the stock one holds, as stock tools read it."""
    assert fp.verify(ours).ok
    directories = shard_directories(stock)
    assert shard_directories(ours) == directories
    assert files_below(ours) == files_below(stock) | {"MANIFEST.json"}
    for name in directories:
        assert shards_of(ours / name) == shards_of(stock / name)
    for file in files_below(stock):
        if not file.endswith((".distcp", ".metadata", "training_args.bin")):
            assert_same_file(ours / file, stock / file)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_checkpoints_are_those_of_stock_and_each_resumes_from_the_other(tmp_path: Path, kind: str) -> None:
    def work(rank: int, _count: int) -> Any:
        output = tmp_path / "run"  # whose name is in the files
        found = {}
        for ours in (False, True):
            log, heard, ended = train(output, kind, ours=ours)
            assert (ended, heard) == ("well", [2, 4, 6])
            found["whole"] = log
            dist.barrier()
            if rank == 0:
                assert hidden_names(output) == []
                output.rename(tmp_path / f"ours {ours}")
            dist.barrier()
            if ours:
                assert found["whole"] == found["stock"]
            found["stock"] = log
        for saved in (False, True):
            for ours in (False, True):
                source = tmp_path / f"ours {saved}" / "checkpoint-4"
                if rank == 0:
                    shutil.rmtree(output, ignore_errors=True)
                dist.barrier()
                log, _, ended = train(output, kind, ours=ours, resume=str(source))
                assert ended == "well"
                assert log[:-1] == found["whole"][:-1], f"saved by ours: {saved}, resumed by ours: {ours}"
        return [entry["loss"] for entry in found["whole"][:-1]]

    first, second = run_ranks(2, work, timeout_s=100)
    assert first == second
    assert len(set(first)) == len(first)
    for name in checkpoints_in(tmp_path / "ours False"):
        assert_alike(tmp_path / "ours True" / name, tmp_path / "ours False" / name)
    assert checkpoints_in(tmp_path / "ours True") == checkpoints_in(tmp_path / "ours False")


SHARDED = "SHARDED_STATE_DICT"


def test_the_best_model_is_the_one_of_stock_and_is_loaded_by_us(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the first: not what training ends with

    def work(rank: int, _count: int) -> Any:
        read: list[str] = []
        stock_read = FastPersistReader.read_data

        def read_data(self: FastPersistReader, *arguments: Any) -> Any:
            read.append(Path(str(self.checkpoint_id)).name)
            return stock_read(self, *arguments)

        FastPersistReader.read_data = read_data  # type: ignore[method-assign]
        output, found = tmp_path / "run", []
        for ours in (False, True):
            with accelerate_shards():
                trainer = trainer_on_this_rank(output, SHARDED, [], **options)
                if ours:
                    attach(trainer)
                trainer.train()
                best = {name: value.full_tensor().tolist() for name, value in trainer.model.state_dict().items()}
            dist.barrier()
            found.append((best, trainer.state.best_model_checkpoint, losses(trainer.state.log_history)))
            assert read == (["pytorch_model_fsdp_0"] if ours else [])
            dist.barrier()
            if rank == 0:
                shutil.rmtree(output)
            dist.barrier()
        assert found[0] == found[1]
        return found[0][1]

    assert run_ranks(2, work) == [str(tmp_path / "run" / "checkpoint-2")] * 2


def test_training_goes_on_while_shards_are_written_and_the_step_waits_for_their_copy(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> Any:
        stepped, pending = threading.Event(), []

        def look(state: Any, _control: Any) -> None:
            if state.global_step == 3:  # the step after the save is over
                pending.append(attachment.pending())
                assert not (tmp_path / "checkpoint-2").exists()
                stepped.set()

        with accelerate_shards(), using(HeldUntil(stepped, ".distcp")):
            trainer = trainer_on_this_rank(tmp_path, SHARDED, [At("on_step_end", look)], max_steps=4)
            attachment = attach(trainer)
            trainer.train()
        return [one.stats.bytes_at_gate for one in pending]

    for (copied_bytes,) in run_ranks(2, work):
        assert copied_bytes > 10_000
    assert fp.verify(tmp_path / "checkpoint-2").ok
    assert checkpoints_in(tmp_path) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize(("bad_rank", "on_error"), [(0, "warn"), (1, "raise"), (1, "warn")])
def test_full_disk_of_one_rank_is_told_on_all_and_leaves_what_was_there(
    tmp_path: Path, bad_rank: int, on_error: str
) -> None:
    def work(rank: int, _count: int) -> Any:
        with using(Full(4) if rank == bad_rank else Filesystem()), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            _, heard, ended = train(tmp_path, SHARDED, ours=True, on_error=on_error)
        return heard, ended, [str(one.message) for one in told if "could not be saved" in str(one.message)]

    results = run_ranks(2, work)
    for rank, (heard, ended, told) in enumerate(results):
        if on_error == "warn":
            assert (heard, ended) == ([2, 6], "well")
            assert len(told) == 1
            assert "disk full" in told[0]
        else:
            assert heard == [2]
            assert ended.startswith("NoSpaceError" if rank == bad_rank else f"PeerError: rank {bad_rank} failed")
            assert "disk full" in ended
    assert checkpoints_in(tmp_path) == ["checkpoint-2"] + (["checkpoint-6"] if on_error == "warn" else [])
    assert hidden_names(tmp_path) == []


def test_newest_whole_checkpoint_is_resumed_from_ours_or_not(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> Any:
        train(tmp_path, SHARDED, ours=False, max_steps=4)
        dist.barrier()
        if rank == 0:
            (tmp_path / "checkpoint-4" / "optimizer_0" / "__1_0.distcp").unlink()
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return train(tmp_path, SHARDED, ours=True, resume=True)[1]

    assert run_ranks(2, work) == [[4, 6], [4, 6]]
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    part = tmp_path / "checkpoint-6" / "pytorch_model_fsdp_0" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-4096] + bytes(4096))
    with pytest.warns(RuntimeWarning, match="pytorch_model_fsdp_0/__1_0.distcp"):
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_callback_that_knows_no_trainer_refuses_fsdp(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> str:
        with accelerate_shards():
            trainer = trainer_on_this_rank(tmp_path, SHARDED, [FastPersistCallback()])
            with pytest.raises(fp.ConfigError, match=r"does not support FSDP.*attach\(trainer\)"):
                trainer.train()
        return "refused"

    assert run_ranks(2, work) == ["refused"] * 2
