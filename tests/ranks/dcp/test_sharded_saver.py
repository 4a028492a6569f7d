"""Steps of sharded state: saved while training goes on, by any number of ranks, read by DCP, kept, verified, listed."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.process_groups import run_ranks
from support.runs import hidden_names
from support.sameness import assert_same
from support.sharded_runs import SHAPES, ShardedRun, expected, mesh_of_all, sharded
from support.training import PATIENCE_S, HeldFilesystem
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import fastpersist as fp
from fastpersist.cli import main
from fastpersist.commit.filesystem import using
from fastpersist.integrations.torch_dcp import FastPersistReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch.distributed.checkpoint")

LARGE = (*SHAPES, (1 << 20,))


def checkpointer(root: Path, **options: Any) -> fp.Checkpointer:
    return fp.Checkpointer(root, sharded=True, process_group=dist.group.WORLD, **options)


def train(rank: int, count: int, root: Path, steps: int, **options: Any) -> list[fp.SaveStats]:
    run = ShardedRun(mesh_of_all())
    with checkpointer(root, optimizer=run.optimizer, **options) as checkpoints:
        for _ in range(steps):
            run.advance()
            checkpoints.save(run.step, run.state(), rank_state={"rank": rank}, metrics={"loss": 1 / run.step})
        checkpoints.wait()
        return checkpoints.stats()


def loaded_by_dcp(path: Path) -> dict[str, Any]:
    """Load everything by DCP's own reader, in this process alone."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(path), planner=planner, no_dist=True)
    return state


def with_text_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as DCP has it: the numbers of an optimizer's parameters are text."""
    optimizer = dict(state["optimizer"])
    optimizer["state"] = {str(key): value for key, value in optimizer["state"].items()}
    return {**state, "optimizer": optimizer}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_step_is_what_all_ranks_held_by_our_reader_and_by_dcps(tmp_path: Path, count: int) -> None:
    root = tmp_path / "run"
    stats = run_ranks(count, train, root, 3)
    reader = fp.Checkpointer(root)
    assert reader.steps() == [1, 2, 3]
    for step in (1, 2, 3):
        path = root / f"step-{step:08d}"
        with pytest.warns(RuntimeWarning, match="rank_state") if count > 1 else contextlib.nullcontext():
            found = reader.load(step)
        found.pop("rank_state", None)
        assert_same(found, expected(step))
        assert_same(loaded_by_dcp(path), with_text_keys(expected(step)))
        assert fp.verify(path).ok
        manifest = json.loads((path / "MANIFEST.json").read_text())
        names = [entry["name"] for entry in manifest["files"]]
        own = [f"rank-{rank:05d}.pt" for rank in range(count)]
        assert names == sorted([".metadata", *(f"__{rank}_0.distcp" for rank in range(count)), *own])
        assert sorted(one.name for one in path.iterdir()) == sorted([*names, "MANIFEST.json"])
        assert all("crc32" in entry for entry in manifest["files"])
        assert manifest["step"] == step
        assert manifest["metrics"] == {"loss": 1 / step}
    assert hidden_names(root) == []
    assert all(one.bytes > 200_000 / count for one in stats[0])
    assert all(len(one.bytes_by_rank) == (count if count > 1 else 0) for one in stats[0])


def test_without_a_process_group_one_process_saves_plain_tensors_and_stock_dcp_reads_them(tmp_path: Path) -> None:
    run = ShardedRun()
    with fp.Checkpointer(tmp_path, sharded=True, optimizer=run.optimizer, keep=2) as checkpoints:
        for _ in range(4):
            checkpoints.save(run.advance().step, run.state(), rank_state={"position": run.step})
        checkpoints.wait()
        assert checkpoints.steps() == [3, 4]
        assert_same(checkpoints.load(), {**expected(4), "rank_state": {"position": 4}})
    like = ShardedRun(blank=True).advance().state()
    dcp.load(like, checkpoint_id=tmp_path / "step-00000003", no_dist=True)
    assert_same({**like, "model": dict(like["model"])}, expected(3))


@pytest.mark.parametrize("options", [{}, {"paranoid": True}, {"max_host_bytes": 64 << 20, "gate": "manual"}])
def test_training_goes_on_while_it_is_written_and_nothing_of_a_later_step_gets_in(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    def work(rank: int, count: int) -> list[fp.SaveStats]:
        run = ShardedRun(mesh_of_all(), shapes=LARGE).advance(1)
        with (
            using(disk := HeldFilesystem()),
            checkpointer(tmp_path, optimizer=run.optimizer, **options) as checkpoints,
        ):
            for _ in range(3):
                disk.hold()
                pending = checkpoints.save(run.step, run.state())
                if run.step > 1:  # planned, and waiting for the disk; at first not even planned
                    assert disk.reached.wait(PATIENCE_S)
                if "gate" in options:
                    checkpoints.wait_captured()
                run.advance()  # what is not written is copied at the gate
                assert not pending.done()
                disk.release()
                pending.result()
            return checkpoints.stats()

    for stats in run_ranks(2, work):
        for one in stats:
            assert one.bytes_before_return < 4096  # `position` alone: parameters and momentum are the optimizer's
            assert one.bytes_at_gate > 4 << 20
    for step in (1, 2, 3):
        assert_same(fp.Checkpointer(tmp_path).load(step), expected(step, LARGE))


def test_state_that_changes_without_a_step_fails_the_save_on_all_ranks_and_the_next_one_works(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> list[str]:
        run = ShardedRun(mesh_of_all(), shapes=LARGE).advance(1)
        errors = []
        with (
            using(disk := HeldFilesystem()),
            checkpointer(tmp_path, optimizer=run.optimizer, gate="manual") as checkpoints,
        ):
            pending = checkpoints.save(1, run.state())
            if rank == 1:
                run.advance()  # without wait_captured()
            disk.release()
            errors.append(type(pending.exception()).__name__)
            run.advance(2)
            pending = checkpoints.save(2, run.state())
            errors.append(type(pending.exception()).__name__)
        return errors

    first, second = run_ranks(2, work)
    assert first == ["PeerError", "NoneType"]
    assert second == ["TornStateError", "NoneType"]
    assert fp.Checkpointer(tmp_path).steps() == [2]
    assert_same(fp.Checkpointer(tmp_path).load(), expected(2, LARGE))


def test_what_is_alike_is_planned_once_and_what_changes_is_planned_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastpersist.dcp.save_planner import FastPersistSavePlanner

    plain = FastPersistSavePlanner.create_local_plan

    def work(rank: int, count: int) -> list[int]:
        calls = []
        monkeypatch.setattr(
            FastPersistSavePlanner, "create_local_plan", lambda planner: calls.append(1) or plain(planner)
        )
        run = ShardedRun(mesh_of_all())
        counts = []
        with checkpointer(tmp_path) as checkpoints:
            for step in range(1, 6):
                state = run.advance().state()  # the first step makes the momentum
                if step >= 4 and rank == 1:
                    state["new"] = torch.full((3,), 4.0)
                checkpoints.save(step, state).result()
                counts.append(len(calls))
        return counts

    assert run_ranks(2, work) == [[1, 1, 1, 1, 1], [1, 1, 1, 2, 2]]
    for step in range(1, 6):
        found = fp.Checkpointer(tmp_path).load(step)
        assert_same(found.pop("new", None), torch.full((3,), 4.0) if step >= 4 else None)
        assert_same(found, expected(step))


def test_constant_tensors_are_not_copied(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> fp.SaveStats:
        frozen = sharded(torch.arange(1 << 20).reshape(-1, 64), mesh_of_all(), None)
        with checkpointer(tmp_path, constant=[frozen]) as checkpoints:
            checkpoints.save(1, {"frozen": frozen, "other": torch.ones(3)}).result()
            return checkpoints.stats()[0]

    for stats in run_ranks(2, work):
        assert stats.bytes_before_return < 4096
        assert stats.bytes_by_writer > (4 << 20) - 4096
    found = fp.Checkpointer(tmp_path).load()
    assert_same(found, {"frozen": torch.arange(1 << 20).reshape(-1, 64), "other": torch.ones(3)})


def test_replicas_are_written_once_and_the_work_is_shared(tmp_path: Path) -> None:
    large = torch.arange(1 << 20, dtype=torch.float32).reshape(-1, 64)

    def work(rank: int, count: int) -> list[int]:
        state = {"large": large.clone(), "small": torch.full((3,), 1.0), "text": "x"}
        with checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, state).result()
            return checkpoints.stats()[0].bytes_by_rank

    shares, _ = run_ranks(2, work)
    assert large.nbytes <= sum(shares) < large.nbytes + 65536
    assert max(shares) - min(shares) < 65536
    assert_same(fp.Checkpointer(tmp_path).load(), {"large": large, "small": torch.full((3,), 1.0), "text": "x"})


def test_ranks_may_hold_different_parts_of_the_state(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        with checkpointer(tmp_path) as checkpoints:
            checkpoints.save(7, {"stages": {str(rank): torch.full((4,), float(rank))}})

    run_ranks(3, work)
    stages = {str(rank): torch.full((4,), float(rank)) for rank in range(3)}
    assert_same(fp.Checkpointer(tmp_path).load(), {"stages": stages})


def test_inspect_lists_the_tensors_with_their_global_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, train, tmp_path, 1)
    found = fp.inspect(tmp_path / "step-00000001")
    by_name = {tensor.name: tensor for tensor in found.tensors}
    for index, shape in enumerate(SHAPES):
        for name in (f"model.{index}", f"optimizer.state.{index}.momentum_buffer"):
            assert (by_name[name].shape, by_name[name].dtype) == (shape, "float32")
            assert by_name[name].size_bytes == torch.Size(shape).numel() * 4
    assert by_name["model.0"].file == "__*_0.distcp"
    assert by_name["position"].dtype == "int64"
    place = by_name["position"]
    part = (tmp_path / "step-00000001" / place.file).read_bytes()
    assert place.offset_bytes is not None
    stored = torch.frombuffer(bytearray(part[place.offset_bytes :][: place.size_bytes]), dtype=torch.int64)
    assert_same(stored, torch.arange(50) + 1)
    assert main(["inspect", str(tmp_path / "step-00000001")]) == 0
    assert "optimizer.state.4.momentum_buffer" in capsys.readouterr().out


def test_a_damaged_part_is_named_with_its_rank_and_its_tensors(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, 1)
    path = tmp_path / "step-00000001"
    part = path / "__1_0.distcp"
    places = FastPersistReader(path).read_metadata().storage_data
    (place,) = [info for index, info in places.items() if (index.fqn, info.relative_path) == ("model.4", part.name)]
    data = bytearray(part.read_bytes())
    data[place.offset + 10_000] ^= 1
    part.write_bytes(data)
    (damage,) = fp.verify(path).damages
    assert damage.file == "__1_0.distcp"
    assert damage.tensors == ("model.4",)
    assert "rank 1 wrote it" in damage.message
    assert "model.4" in damage.message
    part.unlink()
    (damage,) = fp.verify(path).damages
    assert "missing" in damage.message
    assert "rank 1 wrote it" in damage.message


def test_a_step_is_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> list[str]:
        errors = []
        run = ShardedRun(mesh_of_all()).advance(1)
        with checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, run.state()).result()
            run.advance()
            try:
                errors.append(str(checkpoints.save(1, run.state()).exception()))
            except fp.ConfigError as error:
                errors.append(str(error))
            checkpoints.save(1, run.state(), overwrite=True).result()
        return errors

    for (said,) in run_ranks(2, work):
        assert "exists" in said or "there already" in said
    assert_same(fp.Checkpointer(tmp_path).load(), expected(2))


def test_objects_that_a_load_refuses_and_keys_that_become_text_are_told_once(tmp_path: Path) -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Odd)

        __hash__ = None  # type: ignore[assignment]

    state = {"a": {"odd": [Path("x")]}, "numbers": {1: 2}, "t": torch.ones(2)}
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        with pytest.warns(RuntimeWarning) as told:
            checkpoints.save(1, state).result()
        checkpoints.save(2, state).result()
        said = [str(one.message) for one in told]
        assert any("'a.odd'" in one and "PosixPath" in one for one in said)
        assert any("'numbers'" in one and "text" in one for one in said)
        with pytest.raises(fp.UnsupportedError, match=r"a\.odd"):
            checkpoints.load(1)
        found = checkpoints.load(1, weights_only=False)
    assert found["a"] == {"odd": [Path("x")]}
    assert found["numbers"] == {"1": 2}


def test_an_optimizers_numbers_are_no_such_keys(tmp_path: Path) -> None:
    run = ShardedRun().advance(1)
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:  # a warning would be an error
        checkpoints.save(1, {"optimizer": run.optimizer.state_dict()}).result()
        assert list(checkpoints.load()["optimizer"]["state"]) == list(range(len(SHAPES)))


@pytest.mark.parametrize("options", [{"writers": 1}, {"writers": "node"}, {"check_replicas": True}])
def test_who_writes_what_is_not_asked_where_each_rank_writes_what_it_holds(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(fp.ConfigError, match="sharded=True"):
        fp.Checkpointer(tmp_path, sharded=True, **options)


def test_a_state_that_is_no_dict_or_names_two_things_alike_is_refused(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        with pytest.raises(fp.ConfigError, match="dict"):
            checkpoints.save(1, [torch.ones(2)])
        pending = checkpoints.save(2, {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}})
        error = pending.exception()
        assert isinstance(error, fp.ConfigError)
        assert "a.b" in str(error)
        assert checkpoints.steps() == []
    assert hidden_names(tmp_path) == []


def test_without_the_group_of_its_ranks_a_shard_is_not_taken_for_a_tensor(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> str:
        run = ShardedRun(mesh_of_all())
        with fp.Checkpointer(tmp_path / str(rank), sharded=True) as checkpoints:
            error = checkpoints.save(1, run.state()).exception()
        assert isinstance(error, fp.ConfigError)
        return str(error)

    for said in run_ranks(2, work):
        assert "'model.0'" in said
        assert "process_group" in said


def test_explain_tells_what_belongs_to_the_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work(rank: int, count: int) -> str:
        run = ShardedRun(mesh_of_all(), shapes=LARGE).advance(1)
        checkpoints = checkpointer(tmp_path, optimizer=run.optimizer)
        return checkpoints.explain(run.state())

    for said in run_ranks(2, work):
        (row,) = [line.split() for line in said.splitlines() if line.startswith("model")]
        assert float(row[1]) > 2.0  # megabytes that are stable: half of the large one
        assert float(row[5]) == 0


def test_the_log_says_why_everything_is_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fastpersist"), fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.save(1, ShardedRun().state()).result()
    assert "no optimizer was given" in caplog.text
