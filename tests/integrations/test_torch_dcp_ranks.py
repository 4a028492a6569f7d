"""DCP on several ranks: any sharding saved on n of them is loaded on m, replicas share the work, and failures publish
nothing.
"""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.dcp_states import IGNORED, PLACEMENTS, has_use_collectives, raised_by
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import Point, empty_disk_over, kill_this_process, wait_until, watched
from support.runs import hidden_names
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fastpersist as fp
from fastpersist import _native
from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistSavePlanner, FastPersistWriter

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

torch.set_num_threads(1)

ELEMENT_COUNT = 600_000
"""Of a float tensor that is cut in two, and in no more: a chunk has at least 1 MiB."""


def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "uneven": torch.randn(13, 7, generator=generator),
        "few rows": torch.randn(2, 5, generator=generator),
        "half": torch.randn(64, 33, generator=generator).bfloat16(),
        "wide": torch.randn(6, 20_000, generator=generator),
        "long": torch.randn(ELEMENT_COUNT // 4, 4, generator=generator),
    }


def plain_state(seed: int) -> dict[str, Any]:
    return {
        "embedding": torch.full((ELEMENT_COUNT,), float(seed)),
        "vector": torch.arange(9) * seed,
        "step": torch.tensor(seed),
        "notes": {"text": f"seed {seed}", "list": [seed, torch.full((2,), float(seed))]},
    }


def state_of(layout: str, count: int, seed: int | None) -> dict[str, Any]:
    """Return this rank's state; without a seed, one with nothing in it."""
    dimensions, placements = PLACEMENTS[layout]
    mesh = init_device_mesh("cpu", (count,) if dimensions == 1 else (2, count // 2))
    state: dict[str, Any] = plain_state(seed or 1)
    for name, tensor in whole_tensors(seed or 1).items():
        state[name] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    if seed is None:
        for value in (*state.values(), state["notes"]["list"][1]):
            if isinstance(value, torch.Tensor):
                (value.to_local() if isinstance(value, DTensor) else value).zero_()
        state["notes"].update(text="", list=[0, torch.zeros(2)])
    return state


def expect(state: dict[str, Any], layout: str, count: int, seed: int) -> None:
    """Check what this rank holds, in every bit."""
    expected = state_of(layout, count, seed)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, DTensor):
            assert state[name].placements == value.placements
            assert torch.equal(state[name].to_local(), value.to_local()), name
        elif isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name
    assert state["notes"]["text"] == f"seed {seed}"
    assert state["notes"]["list"][0] == seed
    assert torch.equal(state["notes"]["list"][1], torch.full((2,), float(seed)))


def save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=FastPersistWriter(path, **options), planner=FastPersistSavePlanner())


def save_on(count: int, path: Path, seed: int, layout: str = "rows") -> None:
    def work(_rank: int, count: int) -> None:
        save(path, state_of(layout, count, seed))

    run_ranks(count, work)


def expect_on(count: int, path: Path, seed: int, layout: str = "rows") -> None:
    def work(_rank: int, count: int) -> None:
        state = state_of(layout, count, None)
        dcp.load(state, storage_reader=FastPersistReader(path))
        expect(state, layout, count, seed)

    run_ranks(count, work)


# --- any sharding, on any number of ranks


@pytest.mark.parametrize(
    ("save_count", "save_layout", "load_count", "load_layout"),
    [
        (1, "rows", 3, "columns"),
        (2, "rows", 1, "rows"),
        (2, "columns", 3, "rows"),
        (3, "rows", 2, "rows"),
        (2, "rows", 4, "blocks"),
        (4, "blocks", 2, "columns"),
        (4, "hybrid", 3, "rows"),
        (3, "replicas", 4, "hybrid"),
    ],
)
def test_any_sharding_is_loaded_as_any_other(
    tmp_path: Path, save_count: int, save_layout: str, load_count: int, load_layout: str
) -> None:
    def save_both(_rank: int, count: int) -> None:
        state = state_of(save_layout, count, 3)
        save(tmp_path / "ours", state)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "torchs", thread_count=2))

    def load_all(_rank: int, count: int) -> None:
        for reader in (
            FastPersistReader(tmp_path / "ours"),
            FastPersistReader(tmp_path / "torchs"),
            dcp.FileSystemReader(tmp_path / "ours"),
        ):
            state = state_of(load_layout, count, None)
            dcp.load(state, storage_reader=reader)
            expect(state, load_layout, count, 3)

    run_ranks(save_count, save_both)
    assert fp.verify(tmp_path / "ours").ok
    run_ranks(load_count, load_all)


def model_and_optimizer(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Train an FSDP2 model of odd sizes."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(37, 51), torch.nn.ReLU(), torch.nn.Linear(51, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (steps + 1))
    for _ in range(steps):
        model(torch.linspace(0, 1, 37).repeat(2, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def states_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


@pytest.mark.parametrize("load_count", [1, 3])
def test_fsdp2_models_and_optimizers_go_on_with_other_ranks(tmp_path: Path, load_count: int) -> None:
    def wholes(states: dict[str, Any]) -> dict[str, torch.Tensor]:
        found = dict(states["model"])
        for name, values in states["optimizer"]["state"].items():
            found |= {f"{name}.{key}": value for key, value in values.items()}
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}

    def train_and_save(_rank: int, _count: int) -> dict[str, torch.Tensor]:
        states = states_of(*model_and_optimizer(3))
        save(tmp_path / "checkpoint", states)
        return wholes(states)

    def load(_rank: int, _count: int) -> tuple[dict[str, torch.Tensor], float]:
        model, optimizer = model_and_optimizer(1)
        states = states_of(model, optimizer)
        dcp.load(states, storage_reader=FastPersistReader(tmp_path / "checkpoint"))
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        return wholes(states_of(model, optimizer)), optimizer.param_groups[0]["lr"]

    expected = run_ranks(2, train_and_save)[0]
    for found, rate in run_ranks(load_count, load):
        assert rate == pytest.approx(0.04)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_async_save_writes_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    def work(_rank: int, count: int) -> None:
        state = state_of("rows", count, 2)
        future = dcp.async_save(
            state, storage_writer=FastPersistWriter(tmp_path / "checkpoint"), planner=FastPersistSavePlanner()
        )
        state["uneven"].to_local().zero_()
        state["embedding"].zero_()
        future.result()

    run_ranks(2, work)
    expect_on(2, tmp_path / "checkpoint", 2)


# --- who writes what


def part_bytes(path: Path) -> list[int]:
    return [(path / name).stat().st_size for name in sorted(os.listdir(path)) if name.endswith(".distcp")]


@pytest.mark.parametrize("count", [2, 4])
def test_replicas_share_the_work(tmp_path: Path, count: int) -> None:
    """As DDP has it: all ranks hold all of two tensors, one of which would keep one rank busy."""

    def work(_rank: int, _count: int) -> None:
        state = {"embedding": torch.arange(4_000_000), "small": torch.ones(10)}
        save(tmp_path / "ours", state)
        dcp.save(state, storage_writer=FastPersistWriter(tmp_path / "uncut"))
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "torchs"), planner=FastPersistSavePlanner())

    run_ranks(count, work)
    shares = part_bytes(tmp_path / "ours")
    assert len(shares) == count
    assert max(shares) < 1.1 * 32_000_000 / count
    assert max(part_bytes(tmp_path / "uncut")) > 32_000_000
    for name in ("ours", "torchs"):
        for reader in (FastPersistReader, dcp.FileSystemReader):
            target = {"embedding": torch.zeros(4_000_000, dtype=torch.int64), "small": torch.zeros(10)}
            dcp.load(target, storage_reader=reader(tmp_path / name))
            assert torch.equal(target["embedding"], torch.arange(4_000_000))
            assert torch.equal(target["small"], torch.ones(10))


def test_hybrid_shards_are_shared_by_their_replicas(tmp_path: Path) -> None:
    def work(_rank: int, count: int) -> None:
        mesh = init_device_mesh("cpu", (2, count // 2))
        whole = torch.arange(4_000_000).reshape(-1, 4)
        save(
            tmp_path / "checkpoint",
            {"weight": distribute_tensor(whole, mesh, (Replicate(), Shard(0)), src_data_rank=None)},
        )

    run_ranks(4, work)
    assert max(part_bytes(tmp_path / "checkpoint")) < 1.1 * 32_000_000 / 4
    target = {"weight": torch.zeros(1_000_000, 4, dtype=torch.int64)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "checkpoint"))
    assert torch.equal(target["weight"], torch.arange(4_000_000).reshape(-1, 4))


def test_what_ranks_hold_in_other_shapes_is_not_cut(tmp_path: Path) -> None:
    """Torch's planner takes one of them; so do we."""

    def work(rank: int, _count: int) -> None:
        save(tmp_path / "checkpoint", {"own": torch.full((ELEMENT_COUNT + 1000 * rank,), float(rank))})

    run_ranks(2, work)
    metadata = FastPersistReader(tmp_path / "checkpoint").read_metadata()
    assert len(metadata.storage_data) == 1


def test_the_lowest_rank_saves_all_if_that_is_wanted(tmp_path: Path) -> None:
    def work(_rank: int, count: int) -> None:
        planner = FastPersistSavePlanner(dedup_save_to_lowest_rank=True)
        state = {"embedding": torch.zeros(ELEMENT_COUNT)}
        dcp.save(state, storage_writer=FastPersistWriter(tmp_path / "checkpoint"), planner=planner)

    run_ranks(2, work)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [".metadata", "MANIFEST.json", "__0_0.distcp"]


def test_kept_plans_are_cut_too(tmp_path: Path) -> None:
    def work(_rank: int, count: int) -> None:
        SavePlanner._cached_save_plan.clear()
        for seed in (1, 2, 3):
            planner = FastPersistSavePlanner(enable_plan_caching=True)
            state = state_of("rows", count, seed)
            state["notes"] = {"text": f"seed {seed}", "list": [seed, torch.ones(3)]}
            dcp.save(state, storage_writer=FastPersistWriter(tmp_path / str(seed)), planner=planner)

    run_ranks(2, work)
    for seed in (1, 2, 3):
        target = {"embedding": torch.zeros(ELEMENT_COUNT)}
        dcp.load(target, storage_reader=FastPersistReader(tmp_path / str(seed)))
        assert torch.equal(target["embedding"], torch.full((ELEMENT_COUNT,), float(seed)))
        assert len(part_bytes(tmp_path / str(seed))) == 2


# --- failures


@pytest.mark.parametrize("sys_errno", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_write_leaves_the_older_checkpoint(tmp_path: Path, victim: int, sys_errno: int) -> None:
    path = tmp_path / "checkpoint"

    def work(rank: int, count: int) -> None:
        save(path, state_of("rows", count, 1))
        writer = FastPersistWriter(path, engine="fault:threads")
        if rank == victim:
            _native.set_fault_plan(_native.FaultPlan(op="write", nth=1, sys_errno=sys_errno))
        state = state_of("rows", count, 2)
        errors = raised_by(lambda: dcp.save(state, storage_writer=writer, planner=FastPersistSavePlanner()))
        _native.clear_fault_plan()
        assert list(errors) == [victim]
        assert isinstance(errors[victim], fp.NoSpaceError if sys_errno == errno.ENOSPC else fp.StorageError)
        assert f"rank {victim}: " in str(errors[victim])
        assert str(path / f"__{victim}_0.distcp") in str(errors[victim])
        assert "(at '" in str(errors[victim])
        assert not list(tmp_path.rglob(f".*/__{victim}_0.distcp"))  # its room is free again
        dist.barrier()
        state = state_of("rows", count, None)
        dcp.load(state, storage_reader=FastPersistReader(path))
        expect(state, "rows", count, 1)
        dcp.save(state_of("rows", count, 3), storage_writer=writer, planner=FastPersistSavePlanner())

    run_ranks(2, work)
    assert hidden_names(tmp_path) == []
    expect_on(2, path, 3)


def test_what_a_failed_save_has_written_is_removed_with_its_writer(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        state = state_of("rows", count, 1)
        if rank == 1:
            _native.set_fault_plan(_native.FaultPlan(op="write", nth=1))
        raised_by(lambda: save(tmp_path / "checkpoint", state, engine="fault:threads"))
        if rank == 0:
            gc.collect()  # the error held the writer
            wait_until(lambda: os.listdir(tmp_path) == [])

    run_ranks(2, work)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", ["create", "sync", "Writer.append"])
def test_a_rank_that_is_killed_leaves_the_older_checkpoint(tmp_path: Path, victim: int, name: str) -> None:
    path = tmp_path / "checkpoint"
    save_on(2, path, 1)

    def work(rank: int, count: int) -> None:
        state = state_of("rows", count, 2)
        dist.barrier()
        # The first file that rank 0 makes is the manifest of the pending directory.
        point = Point(name, 2 if name == "create" and rank == 0 else 1)
        with watched(point if rank == victim else None, kill_this_process):
            save(path, state)

    endings = rank_endings(2, work)
    assert endings[victim].signal == 9
    assert endings[1 - victim].error_type is not None
    expect_on(2, path, 1)
    save_on(2, path, 3)
    assert hidden_names(tmp_path) == []
    expect_on(1, path, 3)


def test_rank_0_killed_at_any_point_of_publishing_leaves_one_of_the_two(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_on(2, path, 1)

    def work(rank: int, count: int, point: Point) -> None:
        state = state_of("rows", count, 2)
        with watched(point if rank == 0 else None, kill_this_process):
            save(path, state)

    for name in ("exchange", "sync_directory"):
        endings = rank_endings(2, work, Point(name, 1))
        assert endings[0].signal == 9
        expect_on(1, path, 1)


def test_a_missing_part_is_named_and_who_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_on(2, path, 1)
    (path / "__1_0.distcp").unlink()

    def work(_rank: int, count: int) -> None:
        state = state_of("columns", count, None)
        errors = raised_by(lambda: dcp.load(state, storage_reader=FastPersistReader(path)))
        assert list(errors) == [0, 1]
        for error in errors.values():
            assert isinstance(error, fp.CheckpointNotFoundError)
            assert "__1_0.distcp" in str(error)
            assert "rank 1 wrote" in str(error)

    run_ranks(2, work)


def test_damage_is_said_to_be_of_the_rank_that_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_on(2, path, 1)
    part = bytearray((path / "__1_0.distcp").read_bytes())
    wide = whole_tensors(1)["wide"][3:]  # of rank 1
    place = part.index(bytes(wide.reshape(-1).view(torch.uint8).numpy()))
    part[place + 100] ^= 1
    (path / "__1_0.distcp").write_bytes(part)

    def work(_rank: int, count: int) -> None:
        state = state_of("rows", count, None)
        errors = raised_by(lambda: dcp.load(state, storage_reader=FastPersistReader(path)))
        assert list(errors) == [1]
        assert isinstance(errors[1], fp.ChecksumError)
        assert "'wide', which rank 1 wrote" in str(errors[1])

    run_ranks(2, work)
    assert [damage.file for damage in fp.verify(path).damages] == ["__1_0.distcp"]


def test_a_rank_with_another_file_system_is_told_so(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        state = state_of("rows", count, 1)
        (tmp_path / "root").mkdir(exist_ok=True)
        dist.barrier()
        if rank == 0:
            errors = raised_by(lambda: save(tmp_path / "root" / "checkpoint", state))
        else:
            with empty_disk_over(tmp_path / "root"):
                errors = raised_by(lambda: save(tmp_path / "root" / "checkpoint", state))
        assert list(errors) == [1]
        assert isinstance(errors[1], fp.UnsupportedError)
        assert "one file system" in str(errors[1])

    run_ranks(2, work)
    assert not (tmp_path / "root" / "checkpoint").exists()


@has_use_collectives
def test_ranks_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    def work(_rank: int, count: int) -> None:
        state = state_of("rows", count, 1)
        with pytest.raises(fp.UnsupportedError, match="use_collectives=True"):
            dcp.save(state, storage_writer=FastPersistWriter(tmp_path / "checkpoint"), use_collectives=False)

    run_ranks(2, work)
    assert os.listdir(tmp_path) == []


def test_keys_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_on(2, path, 1)

    def work(_rank: int, count: int) -> None:
        state = {**state_of("rows", count, None), "more": torch.zeros(3)}
        errors = raised_by(lambda: dcp.load(state, storage_reader=FastPersistReader(path)))
        assert all("more" in str(error) for error in errors.values())
        some = {"uneven": state["uneven"]}
        dcp.load(some, storage_reader=FastPersistReader(path))
        assert torch.equal(some["uneven"].full_tensor(), whole_tensors(1)["uneven"])

    run_ranks(2, work)


def test_an_older_save_of_more_ranks_leaves_nothing(tmp_path: Path) -> None:
    save_on(3, tmp_path / "checkpoint", 1)
    save_on(2, tmp_path / "checkpoint", 2)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [".metadata", "MANIFEST.json", "__0_0.distcp", "__1_0.distcp"]
    expect_on(3, tmp_path / "checkpoint", 2)
