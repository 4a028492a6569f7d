"""Lightning's ModelParallel (FSDP2) and FSDP on two ranks: the same checkpoints, whole, and written during training."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.filesystems import FullAtSync, HeldUntil
from support.fsdp_on_cpu import IGNORED as IGNORED_OF_FSDP
from support.fsdp_on_cpu import shard_directories, shards_of
from support.lightning_runs import BATCH_COUNT, IGNORED, Asked, Callback, ModelCheckpoint, Net, lightning
from support.process_groups import rank_endings, run_ranks
from support.runs import hidden_names
from support.sameness import portrait
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations.lightning import FastPersistCallback, FastPersistCheckpointIO, last_checkpoint
from fastpersist.integrations.lightning_fabric import attach
from fastpersist.integrations.torch_dcp import FastPersistReader

pytestmark = [pytest.mark.filterwarnings(one) for one in (*IGNORED, *IGNORED_OF_FSDP)]


class Sharded(lightning.LightningModule):
    """Two layers, sharded by FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 48)
        self.last = torch.nn.Linear(48, 1)

    def configure_model(self) -> None:
        if not isinstance(self.first, torch.distributed.fsdp.FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for module in (self.first, self.last, self):
                fully_shard(module, mesh=mesh)

    def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
        loss = (self.last(torch.tanh(self.first(batch))) - batch.sum(1, keepdim=True)).pow(2).mean()
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]

    train_dataloader = Net.train_dataloader


class Wrapped(Sharded):
    """The same, wrapped by FSDP1: here, since on CPUs it has to be told the device."""

    def configure_model(self) -> None:
        if not isinstance(self.first, FullyShardedDataParallel):
            device: Any = torch.device("cpu")
            self.first = FullyShardedDataParallel(self.first, device_id=device)
            self.last = FullyShardedDataParallel(self.last, device_id=device)


class OnCpu(lightning.pytorch.strategies.FSDPStrategy):
    """Lightning allows FSDPStrategy itself on accelerators only."""


KINDS: dict[str, tuple[Any, Any]] = {
    "ModelParallel": (
        Sharded,
        lambda: lightning.pytorch.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    ),
    "FSDP": (Wrapped, lambda: OnCpu(state_dict_type="sharded", process_group_backend="gloo")),
}
kinds = pytest.mark.parametrize(("kind", "make_strategy"), KINDS.values(), ids=KINDS)


def run(
    kind: Any, make_strategy: Any, *callbacks: Callback, stock: bool = False, io: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Train on this rank."""
    ckpt_path = options.pop("ckpt_path", None)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=make_strategy(),
        plugins=[] if stock else [io or FastPersistCheckpointIO()],
        callbacks=list(callbacks) if stock else [FastPersistCallback(), *callbacks],
        num_sanity_val_steps=0,
        **{"devices": 2, "max_epochs": 2, "limit_val_batches": 0, **quiet, **options},
    )
    torch.manual_seed(1)
    model = kind()
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model


def contents(directory: Path) -> dict[str, Any]:
    """Return what each checkpoint holds, as stock tools read it; of a symbolic link, where it leads."""
    found: dict[str, Any] = {}
    for path in sorted(directory.iterdir()):
        if path.is_symlink():
            found[path.name] = "-> " + str(path.readlink())
        else:
            others = portrait(torch.load(path / "meta.pt", weights_only=False))
            found[path.name] = [shards_of(path), others, shard_directories(path)]
    return found


@kinds
@pytest.mark.parametrize(
    "options",
    [
        {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}", "save_last": True},
        {"every_n_train_steps": 1, "save_top_k": 1, "filename": "model", "save_last": "link"},
    ],
    ids=["all and last", "one and a link"],
)
def test_checkpoints_are_those_of_lightning(
    tmp_path: Path, kind: Any, make_strategy: Any, options: dict[str, Any]
) -> None:
    def work(rank: int, _count: int) -> Any:
        losses = []
        directory = tmp_path / "checkpoints"  # whose name is in the files
        for stock in (True, False):
            _, model = run(kind, make_strategy, ModelCheckpoint(directory, **options), stock=stock)
            losses.append(model.losses)
            dist.barrier()
            if rank == 0:
                directory.rename(tmp_path / f"stock {stock}")
            dist.barrier()
        assert losses[0] == losses[1]
        return losses[0]

    first, second = run_ranks(2, work)
    assert len(first) == len(set(first)) == BATCH_COUNT
    assert first != second
    assert hidden_names(tmp_path / "stock False") == []
    assert contents(tmp_path / "stock False") == contents(tmp_path / "stock True")
    for path in (tmp_path / "stock False").iterdir():
        assert fp.verify(path).ok


EACH_SECOND: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}


@kinds
def test_each_goes_on_from_the_others_checkpoint_and_shards_are_read_by_us(
    tmp_path: Path, kind: Any, make_strategy: Any
) -> None:
    def work(rank: int, _count: int) -> Any:
        read: list[str] = []
        stock_read = FastPersistReader.read_data

        def read_data(self: FastPersistReader, *arguments: Any) -> Any:
            read.append(str(self.checkpoint_id))
            return stock_read(self, *arguments)

        FastPersistReader.read_data = read_data  # type: ignore[method-assign]
        whole = []
        for stock in (True, False):
            checkpoint = ModelCheckpoint(tmp_path / f"stock {stock}", **EACH_SECOND)
            whole.append(run(kind, make_strategy, checkpoint, stock=stock)[1].losses)
        assert whole[0] == whole[1]
        assert read == []
        for saved in (True, False):
            for resumed in (True, False):
                path = tmp_path / f"stock {saved}" / "step=2.ckpt"
                options = {"enable_checkpointing": False, "default_root_dir": tmp_path}
                model = run(kind, make_strategy, stock=resumed, ckpt_path=path, **options)[1]
                assert model.losses == whole[0][2:], (saved, resumed)
                assert set(read) == (set() if resumed else {str(path)})
                read.clear()
        return whole[0]

    first, second = run_ranks(2, work)
    assert first != second


def test_training_goes_on_while_shards_are_written_and_the_step_waits_for_their_copy(tmp_path: Path) -> None:
    stepped = threading.Event()

    def work(rank: int, _count: int) -> Any:
        io = FastPersistCheckpointIO()
        under_way = []

        def look(_trainer: Any) -> None:
            under_way.extend(io.order.under_way())
            assert not (tmp_path / "step=2.ckpt").exists()
            stepped.set()

        kind, make_strategy = KINDS["ModelParallel"]
        with using(HeldUntil(stepped)):
            run(kind, make_strategy, Asked(3, look), ModelCheckpoint(tmp_path, **EACH_SECOND), io=io)
        return [pending.stats.bytes_at_gate for pending in under_way]

    for (copied_bytes,) in run_ranks(2, work):
        assert copied_bytes > 1000  # at the step's gate: until then they are where they are
    assert torch.load(tmp_path / "step=2.ckpt" / "meta.pt", weights_only=False)["global_step"] == 2
    assert fp.verify(tmp_path / "step=2.ckpt").ok


def test_shards_are_not_copied_to_the_host_by_lightning_too(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> list[list[bool]]:
        asked: list[bool] = []

        def noting(stock: Any, *arguments: Any) -> Any:
            asked.append(arguments[-1].cpu_offload)
            return stock(*arguments)

        for name in ("_get_model_state_dict", "_get_optim_state_dict"):
            setattr(dcp_state_dict, name, functools.partial(noting, getattr(dcp_state_dict, name)))
        found = []
        for stock in (True, False):
            options = {"enable_checkpointing": False, "default_root_dir": tmp_path}
            trainer, _ = run(*KINDS["ModelParallel"], stock=stock, **options)
            trainer.save_checkpoint(tmp_path / f"{stock}.ckpt")
            found.append(asked.copy())
            asked.clear()
        return found

    assert run_ranks(2, work) == [[[True, True], [False, False]]] * 2


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_failure_on_one_rank_ends_training_on_all_and_leaves_nothing(tmp_path: Path, bad_rank: int) -> None:
    def work(rank: int, _count: int) -> None:
        with using(FullAtSync("__")) if rank == bad_rank else nullcontext():
            run(*KINDS["ModelParallel"], ModelCheckpoint(tmp_path, **EACH_SECOND), max_epochs=3)

    endings = rank_endings(2, work)
    assert endings[bad_rank].error_type is fp.NoSpaceError
    assert endings[1 - bad_rank].error_type is fp.PeerError
    assert endings[1 - bad_rank].error_attributes["rank"] == bad_rank
    assert "disk full" in endings[1 - bad_rank].error_text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_failure_on_one_rank_is_a_warning_on_all_and_the_old_checkpoint_stays(tmp_path: Path, bad_rank: int) -> None:
    def work(rank: int, _count: int) -> list[str]:
        io = FastPersistCheckpointIO(on_error="warn")
        checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}")
        with (
            using(FullAtSync("step=4")) if rank == bad_rank else nullcontext(),
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            run(*KINDS["ModelParallel"], checkpoint, io=io)
        return [str(one.message) for one in told if "could not be saved" in str(one.message)]

    told = run_ranks(2, work)
    assert [len(one) for one in told] == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["step=2.ckpt"]
    assert fp.verify(tmp_path / "step=2.ckpt").ok


def test_what_cannot_be_saved_on_one_rank_is_an_error_on_all_before_training_goes_on(tmp_path: Path) -> None:
    class Bad(Sharded):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if dist.get_rank() == 0:
                checkpoint["what"] = lambda: None

    def work(rank: int, _count: int) -> None:
        run(Bad, KINDS["ModelParallel"][1], ModelCheckpoint(tmp_path, **EACH_SECOND))

    first, second = rank_endings(2, work)
    assert "lambda" in first.error_text
    assert second.error_type is fp.PeerError
    assert "rank 0 failed" in second.error_text
    assert "lambda" in second.error_text
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "mine").write_text("mine")

    def work(_rank: int, _count: int) -> None:
        trainer, _ = run(*KINDS["ModelParallel"], enable_checkpointing=False, default_root_dir=tmp_path)
        with pytest.raises(fp.FastPersistError, match="logs in it is no part of a checkpoint"):
            trainer.save_checkpoint(tmp_path / "run")

    run_ranks(2, work)
    assert (tmp_path / "run" / "logs" / "mine").read_text() == "mine"


def test_saves_outside_of_fit_are_durable_and_a_file_of_that_name_or_a_link_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def work(rank: int, _count: int) -> None:
        trainer, _ = run(*KINDS["ModelParallel"], enable_checkpointing=False, default_root_dir=tmp_path)
        for before in ("nothing", "a file", "a directory", "a link"):
            dist.barrier()
            if rank == 0 and before == "a file":
                shutil.rmtree(path)
                path.write_bytes(b"of a strategy that saves files")
            if rank == 0 and before == "a link":
                path.rename(tmp_path / "other.ckpt")
                path.symlink_to("other.ckpt")
            dist.barrier()
            trainer.save_checkpoint(path)
            assert fp.verify(path).ok
            assert not path.is_symlink()
        assert fp.verify(tmp_path / "other.ckpt").ok
        with pytest.raises(TypeError, match="storage_options"):
            trainer.save_checkpoint(path, storage_options={})

    run_ranks(2, work)
    assert hidden_names(tmp_path) == []


def test_a_file_of_that_name_stays_until_the_directory_is_durable(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"of a strategy that saves files")

    def work(_rank: int, _count: int) -> None:
        trainer, _ = run(*KINDS["ModelParallel"], enable_checkpointing=False, default_root_dir=tmp_path)
        with using(FullAtSync("a.directory")), pytest.raises(fp.FastPersistError, match="disk full"):
            trainer.save_checkpoint(path)

    run_ranks(2, work)
    assert path.read_bytes() == b"of a strategy that saves files"
    assert list(tmp_path.iterdir()) == [path]


def test_a_tilde_is_a_name_as_for_the_strategy(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()

    def work(_rank: int, _count: int) -> None:
        os.chdir(tmp_path)
        os.environ["HOME"] = str(tmp_path / "home")
        trainer, _ = run(*KINDS["ModelParallel"], enable_checkpointing=False, default_root_dir=tmp_path)
        trainer.save_checkpoint("~/a.ckpt")
        run(*KINDS["ModelParallel"], ckpt_path="~/a.ckpt", enable_checkpointing=False, default_root_dir=tmp_path)

    run_ranks(2, work)
    assert fp.verify(tmp_path / "~" / "a.ckpt").ok
    assert not os.listdir(tmp_path / "home")


def test_a_checkpoint_for_slurm_is_whole_when_the_save_returns_and_nothing_else_looks_like_one(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> None:
        def save(trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
            assert fp.verify(tmp_path / "hpc_ckpt_1.ckpt").ok

        class Watched(Filesystem):
            def create(self, path: str, mode: int = 0o666) -> int:
                assert "hpc_ckpt" not in path
                return super().create(path, mode)

        with using(Watched()):
            run(*KINDS["ModelParallel"], Asked(2, save), enable_checkpointing=False, default_root_dir=tmp_path)

    run_ranks(2, work)
    assert [path.name for path in tmp_path.iterdir()] == ["hpc_ckpt_1.ckpt"]


def test_weights_saved_on_two_ranks_are_loaded_on_one(tmp_path: Path) -> None:
    def save(rank: int, _count: int) -> None:
        run(*KINDS["ModelParallel"], ModelCheckpoint(tmp_path, **EACH_SECOND))

    def load(_rank: int, _count: int) -> Any:
        strategy = lightning.pytorch.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
        options = {"devices": 1, "enable_checkpointing": False, "default_root_dir": tmp_path, "max_epochs": 4}
        return run(Sharded, lambda: strategy, ckpt_path=tmp_path / "step=4.ckpt", **options)[1].losses

    run_ranks(2, save)
    (losses,) = run_ranks(1, load)
    assert len(losses) > 0


# --- after a crash


@pytest.mark.parametrize("dying_rank", [0, 1])
def test_death_of_a_rank_while_it_writes_leaves_the_old_checkpoint(tmp_path: Path, dying_rank: int) -> None:
    def work(rank: int, _count: int) -> None:
        class Dying(Filesystem):
            def allocate(self, fd: int, size_bytes: int, path: str) -> None:
                if rank == dying_rank and "step=4" in path:
                    os.kill(os.getpid(), signal.SIGKILL)
                super().allocate(fd, size_bytes, path)

        with using(Dying()):
            run(*KINDS["ModelParallel"], ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}"))

    endings = rank_endings(2, work)
    assert endings[dying_rank].signal == signal.SIGKILL
    assert endings[1 - dying_rank].error_type is not None
    visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert visible == ["step=2.ckpt"]
    assert fp.verify(tmp_path / "step=2.ckpt").ok
    assert last_checkpoint(tmp_path) == str(tmp_path / "step=2.ckpt")


def test_last_checkpoint_is_the_newest_that_is_whole_ours_or_not(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> None:
        for number, stock in ((1, True), (2, False)):
            checkpoint = ModelCheckpoint(
                tmp_path, filename=f"run {number} {{step}}", every_n_train_steps=2, save_top_k=-1
            )
            run(*KINDS["ModelParallel"], checkpoint, stock=stock)
            dist.barrier()

    run_ranks(2, work)
    (tmp_path / "folder.ckpt").mkdir()

    def newest() -> str:
        return Path(str(last_checkpoint(tmp_path))).name

    assert newest() == "run 2 step=4.ckpt"
    part = tmp_path / "run 2 step=4.ckpt" / "__1_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="__1_0.distcp"):
        assert newest() == "run 2 step=2.ckpt"
    for step in (2, 4):
        shutil.rmtree(tmp_path / f"run 2 step={step}.ckpt")
    assert newest() == "run 1 step=4.ckpt"
    (tmp_path / "run 1 step=4.ckpt" / "__0_0.distcp").unlink()
    with pytest.warns(RuntimeWarning, match="__0_0.distcp is missing"):
        assert newest() == "run 1 step=2.ckpt"
    shutil.rmtree(tmp_path / "run 1 step=4.ckpt")
    (tmp_path / "run 1 step=2.ckpt" / "meta.pt").unlink()
    with pytest.warns(RuntimeWarning, match="never finished"):
        assert last_checkpoint(tmp_path) is None


# --- Fabric


class Loop:
    """A loop of Fabric's with a model that FSDP2 shards."""

    def __init__(self) -> None:
        def parallelize(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
            for module in (*model.children(), model):
                fully_shard(module, mesh=mesh["data_parallel"])
            return model

        strategy = lightning.fabric.strategies.ModelParallelStrategy(
            parallelize, data_parallel_size=2, tensor_parallel_size=1
        )
        self.fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(4, 48), torch.nn.Tanh(), torch.nn.Linear(48, 1))
        self.model = self.fabric.setup_module(model)
        self.optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=1e-2))
        self.step_count = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step_count": self.step_count}

    def train(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            self.step_count += 1
            rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step_count * 10 + dist.get_rank()))
            loss = (self.model(rows) - rows.sum(1, keepdim=True)).pow(2).mean()
            self.fabric.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def test_fabric_saves_and_loads_shards_through_us_where_it_is_attached(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> Any:
        loop = Loop()
        loop.train(2)
        loop.fabric.save(tmp_path / "stock", loop.state())
        io = attach(loop.fabric)
        assert attach(loop.fabric, io) is io
        io.optimizer = loop.optimizer
        loop.fabric.save(tmp_path / "ours", loop.state())
        assert io.pending() in ([str(tmp_path / "ours")], [])
        expected = loop.train(3)
        io.wait()
        results = []
        for name in ("ours", "stock"):
            for is_ours in (True, False):
                other = Loop()
                if is_ours:
                    attach(other.fabric)
                state = other.state()
                assert other.fabric.load(tmp_path / name, state) == {}
                other.step_count = state["step_count"]
                results.append(other.train(3))
        assert results == [expected] * 4
        return expected

    run_ranks(2, work)
    assert contents(tmp_path)["ours"] == contents(tmp_path)["stock"]
    assert fp.verify(tmp_path / "ours").ok


def test_fabric_that_saves_files_is_told_to_take_the_plugin() -> None:
    with pytest.raises(fp.ConfigError, match=r"Fabric\(plugins="):
        attach(lightning.Fabric(accelerator="cpu", devices=1))


def test_a_rank_that_does_not_see_the_directory_says_so_on_all(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> None:
        path = tmp_path / "a.ckpt"
        trainer, _ = run(*KINDS["ModelParallel"], enable_checkpointing=False, default_root_dir=tmp_path)
        stock = os.path.isdir
        if rank == 1:
            os.path.isdir = lambda name: ".pending-" not in str(name) and stock(name)
        trainer.save_checkpoint(path)

    first, second = rank_endings(2, work)
    assert second.error_type is fp.UnsupportedError
    assert "rank 1 does not see" in first.error_text
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_fabric_is_refused() -> None:
    with pytest.raises(fp.ConfigError, match="takes a lightning Fabric, not a Linear"):
        attach(torch.nn.Linear(1, 1))
