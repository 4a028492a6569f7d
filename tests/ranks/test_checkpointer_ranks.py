"""Several ranks save and load together: one ordinary file, each rank's own state, and errors that reach everybody."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.runs import Run, hidden_names
from support.sameness import assert_same

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using

SIZES = (400_000, 300_001, 5_000, 7)  # the first two, and Adam's two moments of each, are cut
CUT_BYTES_MIN = 6 * 300_000 * 4


def train(rank: int, count: int, root: Path, steps: int, **options: Any) -> list[fp.SaveStats]:
    run = Run(SIZES)
    with fp.Checkpointer(root, optimizer=run.optimizer, process_group=dist.group.WORLD, **options) as checkpoints:
        for _ in range(steps):
            run.advance()
            state = run.state()
            state["statistics"] = torch.full((300_000,), rank + 0.5)  # as of BatchNorm: large, and of this rank alone
            state["device"] = "x" * (rank + 1)
            checkpoints.save(run.step, state, rank_state={"rank": rank, "noise": torch.full((3,), float(rank))})
        checkpoints.wait()
        return checkpoints.stats()


def expected_state(step: int) -> dict[str, Any]:
    return {**Run(SIZES).advance(step).state(), "statistics": torch.full((300_000,), 0.5), "device": "x"}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_step_is_one_file_that_all_ranks_have_written(tmp_path: Path, count: int) -> None:
    root = tmp_path / "run"
    stats = run_ranks(count, train, root, 3)
    assert fp.Checkpointer(root).steps() == [1, 2, 3]
    for step in (1, 2, 3):
        path = root / f"step-{step:08d}"
        assert_same(torch.load(path / "state.pt"), expected_state(step))
        assert fp.verify(path).ok
        alone = tmp_path / f"{step}" / "state.pt"
        alone.parent.mkdir()
        fp.save(expected_state(step), alone)
        assert alone.read_bytes() == (path / "state.pt").read_bytes()
        manifest = json.loads((path / "MANIFEST.json").read_text())
        assert manifest["host"]["rank_count"] == count
        names = [entry["name"] for entry in manifest["files"]]
        assert names == [*(f"rank-{rank:05d}.pt" for rank in range(count)), "state.pt"]
        assert all("crc32" in entry for entry in manifest["files"])
        for rank in range(count):
            assert fp.load(path / f"rank-{rank:05d}.pt")["rank"] == rank
    for step_stats in stats[0]:
        assert len(step_stats.bytes_by_rank) == count
        assert sum(step_stats.bytes_by_rank) >= CUT_BYTES_MIN
        assert max(step_stats.bytes_by_rank) - min(step_stats.bytes_by_rank) <= 4096
    assert hidden_names(root) == []


def test_each_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(2, train, root, 2)

    def resume(rank: int, count: int) -> Any:
        run = Run(SIZES)
        with fp.Checkpointer(root, optimizer=run.optimizer, process_group=dist.group.WORLD) as checkpoints:
            found = checkpoints.load(into=run.targets())
        assert_same(run.model.state_dict(), Run(SIZES).advance(2).model.state_dict())
        assert_same(run.optimizer.state_dict(), Run(SIZES).advance(2).optimizer.state_dict())
        return found["step"], found["rank_state"]["rank"], found["device"]

    assert run_ranks(2, resume) == [(2, 0, "x"), (2, 1, "x")]


def test_with_another_number_of_ranks_nobody_gets_another_ones_state(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(2, train, root, 1)

    def resume(rank: int, count: int) -> Any:
        checkpoints = fp.Checkpointer(root, process_group=dist.group.WORLD)
        with pytest.warns(RuntimeWarning, match=rf"saved by 2 ranks and is loaded by {count}"):
            found = checkpoints.load(1)
        assert "rank_state" not in found
        return found["step"]

    assert run_ranks(3, resume) == [1, 1, 1]
    with pytest.warns(RuntimeWarning, match="saved by 2 ranks and is loaded by 1"):
        assert "rank_state" not in fp.Checkpointer(root).load()


def test_newest_that_is_damaged_is_passed_over_by_all(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(2, train, root, 2)
    with (root / "step-00000002" / "state.pt").open("r+b") as file:
        file.truncate(1000)

    def resume(rank: int, count: int) -> Any:
        checkpoints = fp.Checkpointer(root, process_group=dist.group.WORLD)
        with pytest.warns(RuntimeWarning, match="step 2 cannot be loaded"):
            return checkpoints.load()["step"]

    assert run_ranks(2, resume) == [1, 1]


def test_ranks_that_ask_for_different_loads_hear_of_it_and_the_next_one_works(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        run = Run(SIZES)
        with fp.Checkpointer(tmp_path, optimizer=run.optimizer, process_group=dist.group.WORLD) as checkpoints:
            checkpoints.save(1, run.advance().state()).result()
            odd: list[dict[str, Any]] = [
                {"keys": "w"},
                {"step": "latest"},
                {"step": -1},
                {"into": 3},
                {"dtype": torch.int8},
            ]
            for options in odd:
                with pytest.raises((fp.ConfigError, fp.PeerError)) as caught:
                    checkpoints.load(**(options if rank else {}))
                assert type(caught.value) is (fp.ConfigError if rank else fp.PeerError)
            for options in ({"step": 1}, {"missing_ok": True}):
                with pytest.raises(fp.ConfigError, match="all ranks need the same step and missing_ok"):
                    checkpoints.load(**(options if rank else {}))
            assert checkpoints.load(torch.tensor(1) if rank else 1)["step"] == 1

    run_ranks(2, work)


def test_a_removal_that_one_rank_was_asked_for_in_another_way_removes_nothing(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        run = Run(SIZES)
        with fp.Checkpointer(tmp_path, optimizer=run.optimizer, process_group=dist.group.WORLD) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, run.advance().state()).result()
            for remove in (checkpoints.delete, checkpoints.discard_after):
                with pytest.raises((fp.ConfigError, fp.PeerError)) as caught:
                    remove(-1 if rank else 1)
                assert type(caught.value) is (fp.ConfigError if rank else fp.PeerError)
                with pytest.raises(fp.ConfigError, match="all ranks need the same step"):
                    remove(2 if rank else 1)
            assert checkpoints.steps() == [1, 2]

    run_ranks(2, work)


def test_what_fails_to_load_on_one_rank_has_failed_on_all(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(2, train, root, 1)

    def resume(rank: int, count: int) -> Any:
        run = Run(SIZES if rank == 0 else (5, 6))
        fp.Checkpointer(root, process_group=dist.group.WORLD).load(1, into=run.targets())

    first, second = rank_endings(2, resume)
    assert first.error_type is fp.PeerError
    assert first.error_attributes["rank"] == 1
    assert second.error_type is fp.ConfigError


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


class FailsToSync(Filesystem):
    """A file system that fails to sync while it is told to."""

    fails = False

    def sync(self, fd: int, path: str) -> None:
        if self.fails:
            raise fp.NoSpaceError(28, f"syncing {path}: no space left", path)
        super().sync(fd, path)


@pytest.mark.parametrize("failing", [0, 1])
def test_root_of_one_rank_that_is_a_file_is_told_to_all(tmp_path: Path, failing: int) -> None:
    (tmp_path / f"root-{failing}").touch()

    def work(rank: int, count: int) -> None:
        fp.Checkpointer(tmp_path / f"root-{rank}", process_group=dist.group.WORLD)

    for rank, ending in enumerate(rank_endings(2, work)):
        assert ending.error_type is (fp.ConfigError if rank == failing else fp.PeerError)
        assert f"root-{failing} is a file" in ending.error_text


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_that_cannot_list_its_root_is_told_to_all(tmp_path: Path, failing: int) -> None:
    def work(rank: int, count: int) -> str:
        root = tmp_path / f"root-{rank}"
        checkpoints = fp.Checkpointer(root, process_group=dist.group.WORLD)
        if rank == failing:
            root.write_text("no directory")
        with pytest.raises(fp.FastPersistError) as caught:
            checkpoints.load()
        if rank == failing:
            assert isinstance(caught.value, fp.StorageError)
        else:
            assert isinstance(caught.value, fp.PeerError)
            assert caught.value.rank == failing
        return str(caught.value)

    assert all(f"root-{failing}: Not a directory" in told for told in run_ranks(3, work))


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("how", ["pickle", "disk"])
def test_rank_that_fails_fails_the_save_everywhere_and_the_next_one_works(
    tmp_path: Path, failing: int, how: str
) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        disk = FailsToSync()
        run = Run(SIZES).advance()
        with (
            using(disk),
            fp.Checkpointer(
                root, optimizer=run.optimizer, process_group=dist.group.WORLD, on_error="warn"
            ) as checkpoints,
        ):
            checkpoints.save(1, run.state()).result()
            run.advance()
            state = run.state()
            started_s = time.monotonic()
            if rank == failing and how == "pickle":
                with pytest.raises(TypeError, match="cannot be pickled"):
                    checkpoints.save(2, {**state, "bad": Unpicklable()})
                told: BaseException | None = None
            else:
                disk.fails = rank == failing
                pending = checkpoints.save(2, state)
                told = pending.exception()
                disk.fails = False
                if rank == failing:
                    assert type(told) is fp.NoSpaceError
            assert time.monotonic() - started_s < 50  # half the time limit of the group
            run.advance()
            checkpoints.save(3, run.state()).result()
            return told if rank != failing else None

    for rank, told in enumerate(run_ranks(3, work)):
        if rank != failing:
            assert isinstance(told, fp.PeerError)
            assert told.rank == failing
            assert "step 2" in str(told)
            assert ("cannot be pickled" if how == "pickle" else "no space left") in str(told)
    assert fp.Checkpointer(root).steps() == [1, 3]
    assert hidden_names(root) == []


def test_earlier_failure_is_raised_when_the_next_save_has_begun(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        disk = FailsToSync()
        run = Run(SIZES).advance()
        raised = []
        with using(disk), fp.Checkpointer(root, optimizer=run.optimizer, process_group=dist.group.WORLD) as checkpoints:
            disk.fails = rank == 1
            checkpoints.save(1, run.state()).join()
            disk.fails = False
            for step in (2, 3):
                try:
                    checkpoints.save(step, run.advance().state())
                except fp.FastPersistError as error:
                    raised.append((step, type(error)))
        return raised

    assert run_ranks(2, work) == [[(2, fp.PeerError)], [(2, fp.NoSpaceError)]]
    assert fp.Checkpointer(root).steps() == [2, 3]


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES).advance()
        if rank == 1:
            with torch.no_grad():
                run.model[1].mul_(2)
        with fp.Checkpointer(tmp_path, optimizer=run.optimizer, process_group=dist.group.WORLD) as checkpoints:
            return checkpoints.save(1, run.state()).exception()

    first, second = run_ranks(2, work)
    assert type(first) is fp.CoordinationError
    assert "model.1 on rank 1" in str(first)
    assert isinstance(second, fp.PeerError)
    assert fp.Checkpointer(tmp_path).steps() == []


def test_rank_that_is_killed_is_noticed_at_once_and_the_last_step_stays(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES).advance()
        with fp.Checkpointer(
            tmp_path, optimizer=run.optimizer, process_group=dist.group.WORLD, on_error="warn"
        ) as checkpoints:
            checkpoints.save(1, run.state()).result()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            started_s = time.monotonic()
            error = checkpoints.save(2, run.advance().state()).exception()
            assert time.monotonic() - started_s < 50  # half the time limit of the group
            return error

    endings = rank_endings(3, work)
    assert endings[1].signal == signal.SIGKILL
    for rank in (0, 2):
        assert isinstance(endings[rank].result, fp.PeerError), endings[rank].trace
        assert endings[rank].result.rank == 1
    assert fp.Checkpointer(tmp_path).steps() == [1]
    assert hidden_names(tmp_path) == []


def test_gate_is_local_to_each_rank(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES).advance()
        with fp.Checkpointer(tmp_path, optimizer=run.optimizer, process_group=dist.group.WORLD) as checkpoints:
            pending = checkpoints.save(1, run.state())
            if rank == 1:
                run.advance()  # while rank 0 has not even come to its step
                assert pending.captured()
                dist.barrier()
            else:
                dist.barrier()
                run.advance()
            pending.result()

    run_ranks(2, work)
    assert_same(torch.load(tmp_path / "step-00000001" / "state.pt"), Run(SIZES).advance().state())


def test_options_that_ranks_would_understand_differently_are_refused(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        for busy in ("latest", "skip"):
            with pytest.raises(fp.ConfigError, match="busy"):
                fp.Checkpointer(tmp_path, busy=busy, process_group=dist.group.WORLD)  # type: ignore[arg-type]

    run_ranks(2, work)


def test_process_outside_the_group_is_refused(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        group = dist.new_group([0])
        if rank == 1:
            with pytest.raises(fp.ConfigError, match="not a rank"):
                fp.Checkpointer(tmp_path / "run", process_group=group)
            for save in (fp.save, fp.save_async, fp.load):
                arguments = [tmp_path / "a.pt"] if save is fp.load else [{}, tmp_path / "a.pt"]
                with pytest.raises(fp.ConfigError, match=r"not in|not a rank"):
                    save(*arguments, process_group=group)
        else:
            fp.save({"a": 1}, tmp_path / "a.pt", process_group=group)

    run_ranks(2, work)


def test_group_of_one_is_no_group(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        stats = train(rank, count, tmp_path / "run", 1, busy="skip")
        fp.save({"a": 1}, tmp_path / "a.pt", process_group=dist.group.WORLD)
        return stats[0].bytes_by_rank

    assert run_ranks(1, work) == [[]]
    assert fp.load(tmp_path / "a.pt") == {"a": 1}
    assert fp.Checkpointer(tmp_path / "run").load()["rank_state"]["rank"] == 0


@pytest.mark.parametrize("writers", ["all", "node", 1, 2, "auto"])
def test_writers(tmp_path: Path, writers: Any) -> None:
    def work(rank: int, count: int) -> Any:
        return train(rank, count, tmp_path, 1, writers=writers)

    by_rank = run_ranks(3, work)[0][0].bytes_by_rank
    expected = {"all": 3, "auto": 3, "node": 1, 1: 1, 2: 2}[writers]
    assert sum(size > 0 for size in by_rank) == expected
    assert fp.verify(tmp_path / "step-00000001").ok


# --- fp.save


def state_of(rank: int) -> dict[str, Any]:
    return {"weights": torch.arange(700_000.0), "more": torch.ones(300_000), "rank": torch.full((10,), float(rank))}


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_save_with_a_group_is_the_file_of_rank_0(tmp_path: Path, name: str) -> None:
    def work(rank: int, count: int) -> Any:
        for _ in range(2):  # the second time the ranks have met
            report = fp.save(state_of(rank), tmp_path / name, process_group=dist.group.WORLD)
        return report.size_bytes

    sizes = run_ranks(2, work)
    alone = tmp_path / "alone" / name
    alone.parent.mkdir()
    fp.save(state_of(0), alone)
    assert (tmp_path / name).read_bytes() == alone.read_bytes()
    assert sizes == [alone.stat().st_size] * 2
    assert hidden_names(tmp_path) == []


def test_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    fp.save({"old": 1}, path)

    def work(rank: int, count: int) -> Any:
        failures = []
        for bad in (0, 1):
            try:
                fp.save({**state_of(0), "x": Unpicklable() if rank == bad else 0}, path, process_group=dist.group.WORLD)
            except Exception as error:  # noqa: BLE001 - looked at below
                failures.append(error)
        assert fp.load(path) == {"old": 1}
        dist.barrier()
        fp.save(state_of(0), path, process_group=dist.group.WORLD)
        return [type(error).__name__ for error in failures]

    assert run_ranks(2, work) == [["TypeError", "PeerError"], ["PeerError", "TypeError"]]
    assert fp.verify(path).ok
    assert hidden_names(tmp_path) == []


def test_save_to_what_no_rename_replaces_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    fp.save({"old": 1}, path)
    os.link(path, tmp_path / "b.pt")

    def work(rank: int, count: int) -> Any:
        fp.save(state_of(0), path, process_group=dist.group.WORLD)

    first, second = rank_endings(2, work)
    assert first.error_type is fp.UnsupportedError
    assert "hard links" in first.error_text
    assert second.error_type is fp.PeerError


def test_log_tells_once_what_makes_saves_slow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, count: int) -> Any:
        caplog.set_level(logging.INFO, logger="fastpersist")
        with fp.Checkpointer(tmp_path, process_group=dist.group.WORLD) as checkpoints:
            checkpoints.save(1, {"weights": torch.zeros(10)})
        return [record.message for record in caplog.records if "copied inside save()" in record.message]

    first, second = run_ranks(2, work)
    assert len(first) == 1
    assert second == []
