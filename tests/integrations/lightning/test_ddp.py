"""With DDP all ranks write each checkpoint, and it is the one that Lightning's rank 0 would have written."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.filesystems import FullAtSync, HeldUntil
from support.lightning_runs import (
    IGNORED,
    Asked,
    Callback,
    ModelCheckpoint,
    Net,
    contents,
    lightning,
    train,
    weights_of,
)
from support.process_groups import rank_endings, run_ranks
from support.ranks_in_threads import eventually
from support.runs import hidden_names
from support.sameness import portrait

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations.lightning import plugin as ours

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

WIDTH = 70_000  # the first layer's weights, and their two moments, have more than 1 MiB: they are cut
BLOCK_BYTES = 4096
EACH_STEP: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}


class Wide(Net):
    """Has a buffer that is another one on each rank."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else -1
        self.register_buffer("own", torch.full((300_000,), float(rank)))


def run(
    *callbacks: Callback, stock: bool = False, io: Any = None, kind: Any = Wide, strategy: Any = None, **options: Any
) -> Any:
    """Train on this rank."""
    if strategy is None:
        strategy = lightning.pytorch.strategies.DDPStrategy(broadcast_buffers=False)
    ckpt_path = options.pop("ckpt_path", None)
    before = options.pop("before", [])
    plugins = [] if stock else [io or ours.FastPersistCheckpointIO()]
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=plugins,
        callbacks=list(callbacks) if stock else [*before, ours.FastPersistCallback(), *callbacks],
        num_sanity_val_steps=0,
        **{"max_epochs": 1, "limit_val_batches": 0, **quiet, **options},
    )
    torch.manual_seed(1)
    model = kind()
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model


@contextmanager
def noted() -> Iterator[list[fp.PendingSave]]:
    """Keep what is saved in the background, whichever ranks write it."""
    kept: list[fp.PendingSave] = []
    begin = ours.save_async

    def save_async(*arguments: Any, **options: Any) -> fp.PendingSave:
        kept.append(begin(*arguments, **options))
        return kept[-1]

    ours.save_async = save_async
    try:
        yield kept
    finally:
        ours.save_async = begin


def shares_of(saves: list[fp.PendingSave]) -> list[list[int]]:
    return [one.stats.bytes_by_rank for one in saves]


# --- what is written, and by whom


@pytest.mark.parametrize(
    "options",
    [
        EACH_STEP,
        {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 1, "save_last": True, "filename": "{step}"},
        {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 1, "save_last": "link", "filename": "model"},
        {"every_n_train_steps": 1, "filename": "model", "enable_version_counter": False},
        {"every_n_train_steps": 1, "save_weights_only": True},
    ],
    ids=["all", "top two and last", "top two under one name, and a link", "one name", "weights only"],
)
def test_all_ranks_write_the_checkpoints_that_lightning_writes(tmp_path: Path, options: dict[str, Any]) -> None:
    def work(rank: int, _count: int) -> Any:
        found = []
        directory = tmp_path / "checkpoints"  # whose name is in the files
        for stock in (True, False):
            with noted() as saves:
                trainer, model = run(ModelCheckpoint(directory, **options), stock=stock)
            trainer.strategy.barrier()
            found.append((contents(directory), weights_of(model), hidden_names(directory)))
            assert "save_checkpoint" not in vars(trainer.strategy)
            trainer.strategy.barrier()
            if rank == 0:
                directory.rename(tmp_path / f"stock {stock}")
            trainer.strategy.barrier()
        return found, shares_of(saves), [one.stats.bytes for one in saves]

    (first, shares, sizes), (second, other_shares, other_sizes) = run_ranks(2, work)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0][2] == []
    assert len(shares) == len(other_shares) > 1
    for share in shares:
        assert len(share) == 2
        assert min(share) > 500_000
        assert abs(share[0] - share[1]) <= BLOCK_BYTES
    assert [share[1] for share in shares] == other_sizes
    assert all(size > sum(share) for size, share in zip(sizes, shares, strict=True))


def test_buffers_are_those_of_the_first_rank(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> float:
        _, model = run(ModelCheckpoint(tmp_path, **EACH_STEP))
        return float(model.own[0])

    assert run_ranks(2, work) == [0.0, 1.0]
    for path in tmp_path.glob("*.ckpt"):
        own = torch.load(path, weights_only=False)["state_dict"]["own"]
        assert torch.equal(own, torch.zeros(300_000))


def test_training_goes_on_from_such_a_file_with_one_process_or_two_with_lightning_or_ours(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> Any:
        _, whole = run(ModelCheckpoint(tmp_path / "whole", **EACH_STEP), max_epochs=2)
        path = tmp_path / "whole" / "step=2.ckpt"
        resumed = []
        for stock in (True, False):
            checkpoint = ModelCheckpoint(tmp_path / f"again {stock}", save_last=True)
            resumed.append(run(checkpoint, stock=stock, ckpt_path=path, max_epochs=2)[1])
        trained = [weights_of(model.first) for model in (whole, *resumed)]
        return trained == [trained[0]] * 3

    assert run_ranks(2, work) == [True, True]
    path = tmp_path / "whole" / "step=2.ckpt"
    assert fp.verify(path).ok
    results = [train(Wide, ours=way, ckpt_path=path, max_epochs=2)[1] for way in (True, False)]
    assert weights_of(results[0]) == weights_of(results[1])
    saved = torch.load(tmp_path / "again True" / "last.ckpt", weights_only=False)
    again = torch.load(tmp_path / "again False" / "last.ckpt", weights_only=False)
    assert portrait(saved["state_dict"]) == portrait(again["state_dict"])
    assert portrait(saved["optimizer_states"]) == portrait(again["optimizer_states"])


def test_step_on_either_rank_copies_what_no_writer_has_taken(tmp_path: Path) -> None:
    stepped = threading.Event()

    def work(rank: int, _count: int) -> list[int]:
        checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        with using(HeldUntil(stepped)), noted() as saves:
            run(checkpoint, Asked(3, lambda _trainer: stepped.set()), max_epochs=2)
        return [one.stats.bytes_at_gate for one in saves]

    first, second = run_ranks(2, work)
    assert first[0] > 500_000
    assert second[0] > 500_000
    state = torch.load(tmp_path / "step=2.ckpt", weights_only=False)
    assert state["optimizer_states"][0]["state"][0]["step"] == 2
    assert fp.verify(tmp_path / "step=2.ckpt").ok


def test_steps_of_a_learning_rate_finder_wait_too_though_it_takes_the_callbacks_away(tmp_path: Path) -> None:
    stepped = threading.Event()  # the first rank, for whom the other waits, writes nothing before the next step

    class WithRate(Wide):
        rate = 1e-2

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if self.global_step > 0:
                stepped.set()
            return super().training_step(batch, number)

    def work(rank: int, _count: int) -> list[int]:
        finder = lightning.pytorch.callbacks.LearningRateFinder(
            num_training_steps=2, attr_name="rate", early_stop_threshold=None, update_attr=False
        )
        options = {"kind": WithRate, "enable_checkpointing": False, "default_root_dir": tmp_path}
        with using(HeldUntil(stepped)), noted() as saves:
            run(finder, **options)
        return [one.stats.bytes_at_gate for one in saves]

    first, second = run_ranks(2, work)
    assert min(*first, *second) > 100_000
    assert list(tmp_path.iterdir()) == []


# --- the first rank alone


class Subclass(lightning.pytorch.strategies.DDPStrategy):
    """Somebody's own."""


class Around(lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO):
    """Somebody's own, around ours."""


@pytest.mark.parametrize(
    ("options", "is_shared"),
    [
        (dict, True),
        (lambda: {"io": ours.FastPersistCheckpointIO(writers=1)}, False),
        (lambda: {"strategy": Subclass()}, False),
        (lambda: {"io": Around(ours.FastPersistCheckpointIO())}, False),
        (lambda: {"kind": Net}, False),
    ],
    ids=["plain", "one writer", "another strategy", "another plugin", "small tensors"],
)
def test_first_rank_saves_alone_where_the_others_cannot_know_what_it_saves(
    tmp_path: Path, options: Callable[[], dict[str, Any]], is_shared: bool
) -> None:
    def work(rank: int, _count: int) -> Any:
        with noted() as saves:
            run(ModelCheckpoint(tmp_path, **EACH_STEP), limit_train_batches=2, **options())
        return shares_of(saves)

    first, second = run_ranks(2, work)
    assert len(first) == 2
    assert all(bool(share) is is_shared for share in first)
    assert len(second) == (2 if is_shared else 0)
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


def test_optimizer_that_gives_its_state_to_the_first_rank_alone_is_saved_by_it(tmp_path: Path) -> None:
    class Sharded(Wide):
        def configure_optimizers(self) -> Any:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=1e-2)

    def work(rank: int, _count: int) -> Any:
        with noted() as saves, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(ModelCheckpoint(tmp_path, **EACH_STEP), kind=Sharded, limit_train_batches=2)
        return shares_of(saves)

    assert run_ranks(2, work) == [[[], []], []]
    assert len(torch.load(tmp_path / "step=2.ckpt", weights_only=False)["optimizer_states"][0]["state"]) == 6


def without_first_weight(checkpoint: dict[str, Any]) -> None:
    del checkpoint["state_dict"]["first.weight"]


def without_optimizers(checkpoint: dict[str, Any]) -> None:
    del checkpoint["optimizer_states"]


def with_copies(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"] = {name: value.clone() for name, value in checkpoint["state_dict"].items()}


def in_reverse(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["state"] = {
        number: dict(reversed(state.items())) for number, state in checkpoint["optimizer_states"][0]["state"].items()
    }


def exchanged(checkpoint: dict[str, Any]) -> None:
    states = checkpoint["optimizer_states"][0]["state"]
    states[0] = {**states[0], "exp_avg": states[0]["exp_avg_sq"], "exp_avg_sq": states[0]["exp_avg"]}


@pytest.mark.parametrize("change", [without_first_weight, without_optimizers, with_copies, in_reverse, exchanged])
def test_what_a_hook_changes_on_the_first_rank_alone_is_what_is_saved(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    class Changing(Callback):
        def on_save_checkpoint(self, trainer: Any, _module: Any, checkpoint: dict[str, Any]) -> None:
            if trainer.is_global_zero:
                change(checkpoint)

    def work(rank: int, _count: int) -> Any:
        found = []
        for stock in (True, False):
            with noted() as saves:
                trainer, _ = run(Changing(), ModelCheckpoint(tmp_path / "checkpoints", **EACH_STEP), stock=stock)
            trainer.strategy.barrier()
            found.append(contents(tmp_path / "checkpoints"))
            trainer.strategy.barrier()
            if rank == 0:
                (tmp_path / "checkpoints").rename(tmp_path / f"stock {stock}")
            trainer.strategy.barrier()
        assert found[0] == found[1]
        return shares_of(saves)

    assert run_ranks(2, work) == [[[], []], []]


class SlowerThan(Filesystem):
    """A disk that syncs nothing before the other rank has come to where it has to wait, and has left a file."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def sync(self, fd: int, path: str) -> None:
        eventually(self.sign.exists)
        super().sync(fd, path)


def test_fit_returns_on_each_rank_when_the_first_rank_has_saved(tmp_path: Path) -> None:
    class Signing(ours.FastPersistCheckpointIO):
        def teardown(self) -> None:
            if torch.distributed.get_rank() == 1:
                (tmp_path / "sign").touch()
            super().teardown()

    def work(rank: int, _count: int) -> bool:
        with using(SlowerThan(tmp_path / "sign")):
            run(ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}"), kind=Net, io=Signing())
            return (tmp_path / "step=2.ckpt").exists()

    assert run_ranks(2, work) == [True, True]


def test_failure_of_the_first_rank_alone_ends_fit_on_all(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> None:
        with using(FullAtSync("step=2")):
            run(ModelCheckpoint(tmp_path, **EACH_STEP), kind=Net)

    first, second = rank_endings(2, work)
    assert first.error_type is fp.NoSpaceError
    assert second.error_type is fp.PeerError
    assert "disk full" in second.error_text


def test_ranks_load_in_fit_when_the_first_rank_has_saved(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> int:
        def act(trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "asked.ckpt")
            if trainer.global_rank == 1:
                (tmp_path / "sign").touch()
            found.append(trainer.strategy.load_checkpoint(tmp_path / "asked.ckpt")["global_step"])

        found: list[int] = []
        with using(SlowerThan(tmp_path / "sign")):
            trainer, _ = run(Asked(1, act), kind=Net, enable_checkpointing=False)
        assert "load_checkpoint" not in vars(trainer.strategy)
        return found[0]

    assert run_ranks(2, work) == [1, 1]


# --- failures


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("epoch_count", [1, 2], ids=["raised at the end", "raised by the next save"])
def test_failure_on_one_rank_ends_training_on_all(tmp_path: Path, bad_rank: int, epoch_count: int) -> None:
    def work(rank: int, _count: int) -> None:
        with using(FullAtSync("step=2") if rank == bad_rank else Filesystem()):
            run(ModelCheckpoint(tmp_path, **EACH_STEP), max_epochs=epoch_count)

    endings = rank_endings(2, work)
    assert endings[bad_rank].error_type is fp.NoSpaceError
    assert endings[1 - bad_rank].error_type is fp.PeerError
    assert endings[1 - bad_rank].error_attributes["rank"] == bad_rank
    assert "disk full" in endings[1 - bad_rank].error_text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1.ckpt"]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_failure_on_one_rank_is_a_warning_on_all_and_old_checkpoints_stay(tmp_path: Path, bad_rank: int) -> None:
    def work(rank: int, _count: int) -> list[str]:
        io = ours.FastPersistCheckpointIO(on_error="warn")
        with (
            using(FullAtSync("step=4") if rank == bad_rank else Filesystem()),
            warnings.catch_warnings(record=True) as told,
        ):
            warnings.simplefilter("always")
            run(ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}"), io=io, max_epochs=2)
        return [str(one.message) for one in told if "could not be saved" in str(one.message)]

    told = run_ranks(2, work)
    assert [len(one) for one in told] == [1, 1]
    assert all("disk full" in one[0] for one in told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=2.ckpt"]


@pytest.mark.parametrize("writers", ["all", 1])
def test_weights_that_differ_are_no_checkpoint_unless_the_first_rank_writes_alone(tmp_path: Path, writers: Any) -> None:
    def work(rank: int, _count: int) -> None:
        def act(trainer: Any) -> None:
            trainer.strategy.checkpoint_io.wait()
            with torch.no_grad():
                trainer.lightning_module.first.weight.add_(rank)

        io = ours.FastPersistCheckpointIO(writers=writers)
        run(ModelCheckpoint(tmp_path, **EACH_STEP), Asked(1, act), io=io)

    first, second = rank_endings(2, work)
    names = sorted(path.name for path in tmp_path.iterdir())
    if writers == 1:
        assert [first.error_type, second.error_type] == [None, None]
        assert names == ["step=1.ckpt", "step=2.ckpt"]
    else:
        assert first.error_type is fp.CoordinationError
        assert "first.weight" in first.error_text
        assert "rank 1" in first.error_text
        assert second.error_type is fp.PeerError
        assert names == ["step=1.ckpt"]


def test_rank_that_is_killed_leaves_the_checkpoints_before(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> None:
        def act(_trainer: Any) -> None:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        class Slow(Filesystem):
            """The second rank does not get to the end of its part."""

            def sync(self, fd: int, path: str) -> None:
                if rank == 1 and "step=2" in path:
                    threading.Event().wait(30)
                super().sync(fd, path)

        with using(Slow()):
            run(ModelCheckpoint(tmp_path, **EACH_STEP), Asked(2, act), max_epochs=2)

    first, second = rank_endings(2, work)
    assert second.signal == signal.SIGKILL
    assert first.error_type is not None
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]
    assert fp.verify(tmp_path / "step=1.ckpt").ok


@pytest.mark.parametrize("where", ["first, before", "first", "second"])
def test_save_that_cannot_begin_on_one_rank_raises_on_all_and_the_next_one_works(tmp_path: Path, where: str) -> None:
    heard = []

    def work(rank: int, _count: int) -> Any:
        bad_rank = 1 if where == "second" else 0

        def act(trainer: Any) -> None:
            begin = ours.save_async

            def fail(*_arguments: Any, **options: Any) -> Any:
                options["engine"] = "no such engine"
                return begin(*_arguments, **options)

            options = {"storage_options": {}} if where == "first, before" else {}
            if where != "first, before" and rank == bad_rank:
                ours.save_async = fail
            try:
                trainer.save_checkpoint(tmp_path / "asked.ckpt", **options)
            except Exception as error:  # noqa: BLE001 - looked at below
                heard.append((type(error).__name__, getattr(error, "rank", None), str(error)))
            finally:
                ours.save_async = begin
            trainer.save_checkpoint(tmp_path / "asked again.ckpt")

        run(ModelCheckpoint(tmp_path, **EACH_STEP), Asked(1, act))
        return heard

    told = run_ranks(2, work)
    bad_rank = 1 if where == "second" else 0
    (own,), (peer,) = told[bad_rank], told[1 - bad_rank]
    assert own[0] == ("TypeError" if where == "first, before" else "ConfigError")
    assert peer[:2] == ("PeerError", bad_rank)
    assert own[2][:20] in peer[2]
    assert not (tmp_path / "asked.ckpt").exists()
    assert fp.verify(tmp_path / "asked again.ckpt").ok
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("who", [(0, 1), (0,), (1,)], ids=["all", "first", "second"])
def test_exception_in_training_leaves_every_checkpoint_whole(tmp_path: Path, who: tuple[int, ...]) -> None:
    def work(rank: int, _count: int) -> None:
        def act(_trainer: Any) -> None:
            if rank in who:
                raise ValueError("training fails")

        options = {"every_n_train_steps": 2, "save_top_k": -1, "save_on_exception": len(who) == 2}
        run(ModelCheckpoint(tmp_path, filename="{step}", **options), Asked(3, act), max_epochs=2)

    endings = rank_endings(2, work)
    assert [endings[rank].error_type for rank in who] == [ValueError] * len(who)
    assert all(one.error_type is not None for one in endings)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["step=2.ckpt", "step=3.ckpt"][: len(who)]
    assert all(fp.verify(tmp_path / name).ok for name in found)


def test_what_is_saved_in_an_exception_before_our_callback_has_heard_of_it_needs_no_other_rank(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_exception(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "exception.ckpt")

    def work(rank: int, _count: int) -> Any:
        def act(_trainer: Any) -> None:
            raise ValueError("training fails")

        with noted() as saves:
            with pytest.raises(ValueError, match="training fails"):
                run(Asked(1, act), before=[Saving()], enable_checkpointing=False)
        return shares_of(saves)

    assert run_ranks(2, work) == [[[]], []]
    assert fp.verify(tmp_path / "exception.ckpt").ok


def test_users_may_save_at_any_time_on_all_ranks(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "on_train_start.ckpt")

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "on_train_batch_end.ckpt")
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "on_train_end.ckpt")

        def on_fit_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "on_fit_end.ckpt")

    def work(rank: int, _count: int) -> list[str]:
        with noted() as saves:
            trainer, _ = run(Saving(), enable_checkpointing=False)
            trainer.save_checkpoint(tmp_path / "later.ckpt")
        assert all(fp.verify(path).ok for path in tmp_path.iterdir())
        return [Path(one.stats.path).stem for one in saves]

    first, second = run_ranks(2, work)
    assert second == ["on_train_start", *["on_train_batch_end", "weights"] * 2, "on_train_end"]
    assert first == [*second, "on_fit_end", "later"]
    assert len(list(tmp_path.iterdir())) == 6


def test_pytorch_lightning_is_taken_for_lightning(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> list[list[int]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pytorch_lightning

        class Other(pytorch_lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(600, 600)

            def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
                return self.layer(batch).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters())

        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_steps=1,
            default_root_dir=tmp_path,
            logger=False,
            plugins=ours.FastPersistCheckpointIO(),
            callbacks=[ours.FastPersistCallback()],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with noted() as saves, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Other(), torch.utils.data.DataLoader(torch.ones(8, 600)))  # type: ignore[arg-type]
        return shares_of(saves)

    first, second = run_ranks(2, work)
    assert [len(share) for share in first] == [2]
    assert len(second) == 1
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert fp.verify(path).ok


@pytest.mark.parametrize("writers", ["some", 0, -1, True, 1.5])
def test_unknown_writers_are_refused_when_they_are_named(writers: Any) -> None:
    with pytest.raises(fp.ConfigError, match="writers"):
        ours.FastPersistCheckpointIO(writers=writers)


def test_writers_go_along_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(ours.FastPersistCheckpointIO(writers=2))).writers == 2
