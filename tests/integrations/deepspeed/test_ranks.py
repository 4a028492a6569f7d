"""DeepSpeed, by several ranks: each file by whom it belongs to, all of them or none, and one `latest`.

The ranks are real, the engine is a stand-in.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.deepspeed_stand_in import StandInEngine, deepspeed_integration, files_of, latest_in, names_in
from support.filesystems import FullFor, FullForNames
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import empty_disk_over
from support.runs import held_writers, hidden_names
from support.sameness import portrait
from support.sandbox import needs_root
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using

attach = deepspeed_integration().attach

WIDTH = 8192  # 2 MiB of weights: enough to be shared out

MODEL = "mp_rank_00_model_states.pt"
PARTITIONS = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
MODELS = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)]
NAMES = {
    0: [MODEL],
    1: [MODEL, *PARTITIONS],
    3: [*MODELS, *PARTITIONS],
}


def raised_by(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of what a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is what the test is about
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_each_rank_writes_its_own_and_its_half_of_what_all_have(tmp_path: Path, stage: int) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(stage, width=WIDTH)
        engine.train(2)
        engine.save_checkpoint(str(tmp_path), "stock")
        expected = portrait(files_of(tmp_path / "stock"))
        saving = attach(engine)
        with held_writers():
            engine.save_checkpoint(str(tmp_path / "ours"), "a")
            pending = saving.pending()
            engine.train()
            was_there = (tmp_path / "ours" / "latest").exists() or (tmp_path / "ours" / "a").exists()
            dist.barrier()  # the other one has looked, too
        saving.wait()
        found = latest_in(tmp_path / "ours"), portrait(files_of(tmp_path / "ours" / "a")) == expected
        saving.close()
        return was_there, found, pending.stats.bytes_by_rank, pending.stats.bytes_at_gate > 0

    first, second = run_ranks(2, work)
    for was_there, found, _, waited in (first, second):
        assert not was_there
        assert found == ("a", True)
        assert waited, "what was not written when the step came was copied then"
    if stage < 3:
        low, high = sorted(first[2])
        assert low > 0.4 * high
    assert names_in(tmp_path / "ours" / "a") == sorted(["MANIFEST.json", *NAMES[stage]])
    assert fp.verify(tmp_path / "ours" / "a").ok
    listed = {file.name: file.crc32 for file in fp.inspect(tmp_path / "ours" / "a").files}
    assert sorted(listed) == sorted(NAMES[stage])
    assert None not in listed.values()


def test_each_rank_writes_its_partitions_while_the_other_one_has_not_begun(tmp_path: Path) -> None:
    written = multiprocessing.Semaphore(0)

    class Held(Filesystem):
        """Rank 0 writes when rank 1 has written both of its files."""

        rank = 0

        def allocate(self, fd: int, size_bytes: int, path: str) -> None:
            if self.rank == 0 and path.endswith(MODELS[0]):
                assert written.acquire(timeout=PATIENCE_S)
                assert written.acquire(timeout=PATIENCE_S)
            super().allocate(fd, size_bytes, path)

        def sync(self, fd: int, path: str) -> None:
            super().sync(fd, path)
            if self.rank == 1:
                written.release()

    def work(rank: int, count: int) -> None:
        engine = StandInEngine(3, width=WIDTH)
        with using(disk := Held()), attach(engine):
            disk.rank = rank
            engine.save_checkpoint(str(tmp_path), "a")

    run_ranks(2, work)
    assert fp.verify(tmp_path / "a").ok


def test_checkpoint_with_the_file_that_was_once_saved_by_all_ranks_loads_and_is_replaced(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> bool:
        engine = StandInEngine(1)
        with attach(engine) as saving:
            engine.save_checkpoint(str(tmp_path), "a")
            saving.wait()
            if rank == 0:
                fp.save({"rank_count": count}, tmp_path / "a" / "fastpersist_ranks.pt")
                (tmp_path / "a" / "MANIFEST.json").write_text("damaged, so that names alone tell whose files these are")
            dist.barrier()
            resumed = StandInEngine(1)
            resumed.load_checkpoint(str(tmp_path))
            expected = engine.train()
            is_same = resumed.train() == expected
            engine.save_checkpoint(str(tmp_path), "a")
        return is_same

    assert run_ranks(2, work) == [True, True]
    assert names_in(tmp_path / "a") == sorted(["MANIFEST.json", *NAMES[1]])


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("is_attached", [True, False])
def test_training_resumes_bit_by_bit(tmp_path: Path, stage: int, is_attached: bool) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(stage)
        saving = attach(engine)
        engine.train(2)
        engine.save_checkpoint(str(tmp_path))
        expected = engine.train(2)
        saving.close()
        resumed = StandInEngine(stage)
        if is_attached:
            attach(resumed)
        resumed.load_checkpoint(str(tmp_path))
        return resumed.train(2) == expected

    assert run_ranks(2, work) == [True, True]


@pytest.mark.parametrize(("writers", "is_shared"), [(1, False), ("all", True), (2, True)])
def test_writers_are_those_that_were_chosen(tmp_path: Path, writers: Any, is_shared: bool) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(width=WIDTH)
        saving = attach(engine, writers=writers)
        engine.save_checkpoint(str(tmp_path), "a")
        pending = saving.pending()
        saving.close()
        return engine.save_non_zero_checkpoint, pending.stats.bytes_by_rank

    first, second = run_ranks(2, work)
    assert [first[0], second[0]] == [True, False], "as it was before"
    assert (len([one for one in first[1] if one]) == 2) == is_shared
    assert names_in(tmp_path / "a") == sorted(["MANIFEST.json", MODEL])


@pytest.mark.parametrize("why", ["experts", "pipeline", "tensor parallel"])
def test_models_that_ranks_have_different_parts_of_are_not_shared(tmp_path: Path, why: str) -> None:
    class PipelineEngine(StandInEngine):
        pass

    def work(rank: int, count: int) -> Any:
        engine = PipelineEngine(width=WIDTH) if why == "pipeline" else StandInEngine(width=WIDTH)
        if why == "experts":
            engine.has_moe_layers = True  # type: ignore[misc]
        if why == "tensor parallel":
            engine.mp_world_size = 2  # type: ignore[misc]
        saving = attach(engine)
        writes = engine.save_non_zero_checkpoint
        engine.save_checkpoint(str(tmp_path), "a")
        saving.close()
        return writes

    assert run_ranks(2, work) == [True, False]
    assert names_in(tmp_path / "a") == sorted(["MANIFEST.json", MODEL])


def test_a_file_that_all_save_at_once_is_there_when_all_go_on(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(1)
        attach(engine)
        engine.save_16bit_model(str(tmp_path))
        there = (tmp_path / "pytorch_model.bin").exists()
        StandInEngine.save_checkpoint(engine, str(tmp_path), "a")
        return there, latest_in(tmp_path)

    assert run_ranks(2, work) == [(True, "a")] * 2
    assert names_in(tmp_path / "a") == sorted([MODEL, *PARTITIONS])


# ------------------------------------------------------------------------------------------- when it goes wrong


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("stage", [0, 3])
def test_full_disk_of_one_rank_is_told_on_both_and_the_next_save_works(tmp_path: Path, stage: int, loser: int) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(stage, width=WIDTH)
        saving = attach(engine)
        engine.save_checkpoint(str(tmp_path), "a")
        saving.wait()
        engine.train()
        if rank == loser:
            with using(FullFor() if rank == 0 else FullAtCreation()):
                engine.save_checkpoint(str(tmp_path), "b")
                saving.pending().join()
        else:
            engine.save_checkpoint(str(tmp_path), "b")
        told = raised_by(saving.wait)
        left = latest_in(tmp_path), names_in(tmp_path)
        assert raised_by(saving.wait) == ("", ""), "once"
        engine.save_checkpoint(str(tmp_path), "c")
        saving.close()
        return told, left

    endings = run_ranks(2, work)
    for (kind, text), (latest, names) in endings:
        assert kind in ("NoSpaceError", "StorageError", "PeerError"), text
        assert "disk full" in text
        assert latest == "a"
        assert "b" not in names
    assert latest_in(tmp_path) == "c"
    assert hidden_names(tmp_path) == []


class FullAtCreation(Filesystem):
    """A disk without room for another file, or another byte."""

    def create(self, path: str) -> int:
        raise fp.NoSpaceError(errno.ENOSPC, f"creating {path}: disk full", path)

    def sync(self, fd: int, path: str) -> None:
        raise fp.NoSpaceError(errno.ENOSPC, f"syncing {path}: disk full", path)


def test_disk_that_takes_no_name_is_warned_of_on_both(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(1)
        saving = attach(engine, on_error="warn")
        with using(FullForNames()), pytest.warns(RuntimeWarning, match="disk full"):
            was_begun = engine.save_checkpoint(str(tmp_path), "a")
        engine.train()
        engine.save_checkpoint(str(tmp_path), "b")
        saving.close()
        return was_begun

    assert run_ranks(2, work) == [False, False]
    assert names_in(tmp_path) == ["b", "latest"]


@pytest.mark.parametrize("loser", [0, 1])
def test_state_that_one_rank_cannot_pickle_is_told_on_both_by_the_save_itself(tmp_path: Path, loser: int) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(1)
        saving = attach(engine)
        odd = {"odd": (lambda: 0) if rank == loser else 0}
        told = raised_by(lambda: engine.save_checkpoint(str(tmp_path), "a", client_state=odd))
        engine.train()
        engine.save_checkpoint(str(tmp_path), "b")
        saving.close()
        return told

    told = run_ranks(2, work)
    assert all("pickle" in text for _, text in told)
    assert told[1 - loser][0] == "PeerError"
    assert f"rank {loser} could not save" in told[1 - loser][1]
    assert names_in(tmp_path) == ["b", "latest"]


@needs_root
def test_ranks_that_do_not_share_a_file_system_are_told_so_by_the_save_itself(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(1)
        saving = attach(engine)
        with empty_disk_over(tmp_path) if rank == 1 else nullcontext():
            told = raised_by(lambda: engine.save_checkpoint(str(tmp_path), "a"))
        engine.save_checkpoint(str(tmp_path), "b")
        saving.close()
        return told

    first, second = run_ranks(2, work)
    assert second[0] == "UnsupportedError"
    assert "rank 1 does not see" in second[1]
    assert first[0] == "PeerError"
    assert "all ranks need one file system" in first[1]
    assert names_in(tmp_path) == ["b", "latest"]


def test_two_engines_save_side_by_side(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        actor, critic = StandInEngine(1, width=WIDTH), StandInEngine(0, width=WIDTH)
        savings = [attach(actor), attach(critic)]
        with held_writers():
            for engine, name in ((actor, "actor"), (critic, "critic")):
                engine.save_checkpoint(str(tmp_path / name), "a")
            for engine in (critic, actor):
                engine.train()
        for saving in savings:
            saving.close()
        return latest_in(tmp_path / "actor"), latest_in(tmp_path / "critic")

    assert run_ranks(2, work) == [("a", "a")] * 2
    assert fp.verify(tmp_path / "actor" / "a").ok
    assert fp.verify(tmp_path / "critic" / "a").ok


def test_tags_that_differ_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(1)
        saving = attach(engine)
        told = raised_by(lambda: engine.save_checkpoint(str(tmp_path), f"tag{rank}"))
        engine.save_checkpoint(str(tmp_path), "b")
        saving.close()
        return told

    for kind, text in run_ranks(2, work):
        assert (kind, text) == ("ConfigError", "all ranks save the same tag, and here they are tag0, tag1")
    assert names_in(tmp_path) == ["b", "latest"]


def test_replicas_that_differ_are_told_and_nothing_is_mixed(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(width=WIDTH)
        saving = attach(engine)
        with torch.no_grad():
            engine.module[0].weight.add_(rank)
        engine.save_checkpoint(str(tmp_path), "a")
        told = raised_by(saving.wait)
        saving.close()
        with attach(engine, writers=1):  # which is not to be believed, but is what stock saves
            engine.save_checkpoint(str(tmp_path), "b")
        return told

    told = run_ranks(2, work)
    assert told[0][0] == "CoordinationError"
    assert "replicas differ from those of rank 0: " in told[0][1]
    assert "module.0.weight on rank 1" in told[0][1].replace("'", "")
    assert told[1][0] in ("CoordinationError", "PeerError")
    assert names_in(tmp_path) == ["b", "latest"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_takes_the_save_with_it_and_no_more(tmp_path: Path, victim: int) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(1, width=WIDTH)
        saving = attach(engine)
        engine.save_checkpoint(str(tmp_path), "a")
        saving.wait()
        engine.train()
        with held_writers() as writers:
            engine.save_checkpoint(str(tmp_path), "b")
            if rank == victim:
                if rank == 0:
                    assert writers.reached.wait(PATIENCE_S)
                os.kill(os.getpid(), signal.SIGKILL)
        pending = saving.pending()
        return type(pending.exception(PATIENCE_S)).__name__, latest_in(tmp_path), (tmp_path / "b").exists()

    endings = rank_endings(2, work)
    assert endings[victim].signal == signal.SIGKILL
    kind, latest, is_there = endings[1 - victim].result
    assert kind == "PeerError"
    assert (latest, is_there) == ("a", False)

    def resume(rank: int, count: int) -> Any:
        engine = StandInEngine(1, width=WIDTH)
        with attach(engine):
            path, _ = engine.load_checkpoint(str(tmp_path))
            engine.save_checkpoint(str(tmp_path), "b")
        return path

    assert run_ranks(2, resume) == [str(tmp_path / "a" / MODEL)] * 2
    assert names_in(tmp_path) == ["a", "b", "latest"]


def test_a_rank_without_the_others_leaves_the_block_without_waiting_for_them(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        engine = StandInEngine(1)
        with attach(engine) as saving:
            engine.save_checkpoint(str(tmp_path), "a")
            if rank == 1:
                raise ZeroDivisionError
            saving.pending().result(PATIENCE_S)
        return True

    first, second = rank_endings(2, work, group_timeout_s=5.0)
    assert second.error_type is ZeroDivisionError
    assert first.error_type is not None, "close() is for all ranks"
    assert latest_in(tmp_path) == "a"
