"""Accelerate with FSDP on two ranks: checkpoints are those of stock, whole, and either loads what the other wrote."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from support.accelerate_training import contents, start_anew
from support.filesystems import FullAtSync, HeldUntil
from support.fsdp_on_cpu import IGNORED, accelerate_shards, shard_directories, shards_of
from support.process_groups import rank_endings, run_ranks
from support.runs import hidden_names
from support.sameness import assert_same

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations.accelerate import load_state, save_state, wait

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

WAYS = {"FSDP2, sharded": (2, "SHARDED_STATE_DICT"), "FSDP2, full": (2, "FULL_STATE_DICT")}
WAYS["FSDP1, sharded"] = (1, "SHARDED_STATE_DICT")  # FSDP1 cannot gather on CPUs
ways = pytest.mark.parametrize(("version", "kind"), WAYS.values(), ids=WAYS)


class Training:
    """A model, its optimizer and a schedule, sharded."""

    def __init__(self, version: int, kind: str, **configuration: Any) -> None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, state_dict_type=kind, auto_wrap_policy="size_based_wrap", min_num_params=500
        )
        self.accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin, project_config=ProjectConfiguration(**configuration)
        )
        torch.manual_seed(3)
        model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(32, 48), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(48, 5)
        )
        if version == 1:
            from torch.distributed.fsdp import FullyShardedDataParallel

            where: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
            model[0] = FullyShardedDataParallel(model[0], **where)
            model = FullyShardedDataParallel(model, **where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        torch.manual_seed(self.accelerator.process_index)

    def train(self, count: int = 1) -> list[float]:
        losses = []
        for _ in range(count):
            rows = torch.randn(8, 32)
            loss = (self.model(rows) - rows.mean(1, keepdim=True)).pow(2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@contextmanager
def training(version: int, kind: str, **configuration: Any) -> Iterator[Training]:
    start_anew()
    with accelerate_shards():
        yield Training(version, kind, **configuration)


def without_shards(directory: Path) -> dict[str, Any]:
    return {name: found for name, found in contents(directory).items() if not name.endswith((".distcp", ".metadata"))}


@ways
def test_checkpoints_are_those_of_stock_and_each_loads_the_others(tmp_path: Path, version: int, kind: str) -> None:
    def work(rank: int, _count: int) -> Any:
        with training(version, kind) as one:
            one.train(3)
            pending = save_state(one.accelerator, tmp_path / "ours")
            one.accelerator.save_state(str(tmp_path / "stock"))
            expected = one.train(4)
            assert pending is not None
            assert pending.result(20) == tmp_path / "ours"
            wait(one.accelerator)
            one.accelerator.wait_for_everyone()
        results = []
        for load in (
            lambda other: other.accelerator.load_state(str(tmp_path / "stock")),
            lambda other: other.accelerator.load_state(str(tmp_path / "ours")),
            lambda other: load_state(other.accelerator, tmp_path / "stock"),
            lambda other: load_state(other.accelerator, tmp_path / "ours"),
        ):
            with training(version, kind) as other:
                other.train()  # with FSDP1, Accelerate loads what an optimizer has already
                load(other)
                results.append(other.train(4))
        assert results == [expected] * 4
        return expected

    first, second = run_ranks(2, work)
    assert first != second
    assert hidden_names(tmp_path) == []
    assert fp.verify(tmp_path / "ours").ok
    assert shard_directories(tmp_path / "ours") == shard_directories(tmp_path / "stock")
    for name in shard_directories(tmp_path / "stock"):
        assert shards_of(tmp_path / "ours" / name) == shards_of(tmp_path / "stock" / name)
    ours, stock = without_shards(tmp_path / "ours"), without_shards(tmp_path / "stock")
    assert list(ours) == list(stock)
    for name, expected in stock.items():
        assert_same(ours[name], expected)


SHARDED = WAYS["FSDP2, sharded"]


def test_training_goes_on_while_shards_are_written_and_the_step_waits_for_their_copy(tmp_path: Path) -> None:
    stepped = threading.Event()

    def work(rank: int, _count: int) -> int:
        with training(*SHARDED) as one, using(HeldUntil(stepped, ".distcp")):
            one.train(2)
            pending = save_state(one.accelerator, tmp_path / "a")
            assert pending is not None
            assert not pending.captured()
            one.train()
            assert pending.captured()
            assert not (tmp_path / "a").exists()
            stepped.set()
            wait(one.accelerator)
            return pending.stats.bytes_at_gate

    assert min(run_ranks(2, work)) > 5_000
    assert fp.verify(tmp_path / "a").ok


def test_with_fsdp1_all_is_copied_before_the_save_returns(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> bool:
        with training(*WAYS["FSDP1, sharded"]) as one:
            one.train(2)
            pending = save_state(one.accelerator, tmp_path / "a")
            captured = pending is not None and pending.captured()
            wait(one.accelerator)
            return captured

    assert run_ranks(2, work) == [True, True]


def test_names_are_counted_old_ones_go_and_the_newest_whole_one_is_loaded(tmp_path: Path) -> None:
    configuration = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 2}

    def work(rank: int, _count: int) -> Any:
        with training(*SHARDED, **configuration) as one:
            for _ in range(3):
                one.train()
                save_state(one.accelerator)
            wait(one.accelerator)
            one.accelerator.wait_for_everyone()  # the main process still removes what is too old
            one.accelerator.project_configuration.automatic_checkpoint_naming = False
            one.accelerator.save_state(str(tmp_path / "checkpoints" / "checkpoint_3"))  # by stock, without a manifest
            one.accelerator.project_configuration.automatic_checkpoint_naming = True
            one.accelerator.wait_for_everyone()
            loaded = [load_state(one.accelerator).name]
            for number, name in ((3, "optimizer_0"), (2, "pytorch_model_fsdp_0")):
                one.accelerator.wait_for_everyone()
                part = tmp_path / "checkpoints" / f"checkpoint_{number}" / name / "__1_0.distcp"
                if rank == 0:
                    part.write_bytes(part.read_bytes()[:-4096])
                one.accelerator.wait_for_everyone()
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    loaded.append(load_state(one.accelerator).name)
                assert len([one for one in told if f"{name}/__1_0.distcp" in str(one.message)]) == (1 - rank)
            return loaded

    names = [f"checkpoint_{number}" for number in (3, 2, 1)]
    assert run_ranks(2, work) == [names, names]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names[::-1]


@pytest.mark.parametrize(("bad_rank", "on_error"), [(0, "raise"), (1, "raise"), (1, "warn")])
def test_full_disk_of_one_rank_is_told_on_all(tmp_path: Path, bad_rank: int, on_error: Any) -> None:
    def work(rank: int, _count: int) -> Any:
        with training(*SHARDED) as one, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            one.train()
            raised = ""
            with using(FullAtSync(".distcp") if rank == bad_rank else Filesystem()):
                save_state(one.accelerator, tmp_path / "a", on_error=on_error)
                one.train()
                try:
                    wait(one.accelerator)
                except fp.FastPersistError as error:
                    raised = f"{type(error).__name__}: {error}"
            one.accelerator.wait_for_everyone()
            assert list(tmp_path.glob("*a*")) == []
            one.accelerator.wait_for_everyone()
            save_state(one.accelerator, tmp_path / "b")
            wait(one.accelerator)
            return raised, [str(one.message) for one in told if "not saved" in str(one.message)]

    for rank, (raised, told) in enumerate(run_ranks(2, work)):
        if on_error == "raise":
            assert raised.startswith("NoSpaceError" if rank == bad_rank else f"PeerError: rank {bad_rank} failed")
            assert "disk full" in raised
            assert told == []
        else:
            assert raised == ""
            assert "disk full" in told[0]
    assert fp.verify(tmp_path / "b").ok


def test_a_hook_that_fails_on_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> None:
        def fail(*_: object) -> None:
            if rank == 1:
                raise KeyError("a hook of one rank")

        with training(*SHARDED) as one:
            one.accelerator.register_save_state_pre_hook(fail)
            save_state(one.accelerator, tmp_path / "a")

    first, second = rank_endings(2, work)
    assert (first.error_type, second.error_type) == (fp.FastPersistError, KeyError)
    assert "process 1 failed" in first.error_text
    assert list(tmp_path.iterdir()) == []


def test_what_two_ranks_have_saved_is_loaded_on_one(tmp_path: Path) -> None:
    def save(rank: int, _count: int) -> Any:
        with training(*SHARDED) as one:
            one.train(3)
            save_state(one.accelerator, tmp_path / "a")
            wait(one.accelerator)
            return [value.full_tensor().tolist() for value in one.model.state_dict().values()]

    def load(_rank: int, _count: int) -> Any:
        with training(*SHARDED) as one:
            load_state(one.accelerator, tmp_path / "a")
            return [value.full_tensor().tolist() for value in one.model.state_dict().values()]

    expected = run_ranks(2, save)
    assert run_ranks(1, load) == expected[:1]


def test_a_directory_with_something_else_in_it_is_not_replaced(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> None:
        with training(*SHARDED) as one:
            one.train()
            for _ in range(2):  # over stock's, over ours
                one.accelerator.save_state(str(tmp_path / "a"))
                save_state(one.accelerator, tmp_path / "a")
                wait(one.accelerator)
            one.accelerator.wait_for_everyone()
            (tmp_path / "a" / "notes.txt").write_text("mine")
            one.accelerator.wait_for_everyone()
            with pytest.raises(fp.FastPersistError, match=r"notes\.txt"):
                save_state(one.accelerator, tmp_path / "a")

    run_ranks(2, work)
    assert (tmp_path / "a" / "notes.txt").exists()
